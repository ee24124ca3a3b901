//! The decisions of the proxy as one state machine: connections, sessions, carriers, streams,
//! memory, bandwidth, codec choice. It is driven by `Engine::handle` with time and events and
//! answers with outputs; it opens no socket, starts no thread and reads no clock.

pub(crate) mod adaptive;
mod coding;
pub(crate) mod config;
pub(crate) mod dscp;
pub(crate) mod engine;
mod fair;
mod flow;
pub(crate) mod frame;
pub(crate) mod handover;
pub(crate) mod history;
pub(crate) mod identity;
pub(crate) mod latency;
pub(crate) mod limits;
pub(crate) mod link;
pub(crate) mod message;
pub(crate) mod ping;
pub(crate) mod plugin;
pub(crate) mod rng;
mod session;
pub(crate) mod shaper;
#[cfg(test)]
mod sim;
pub(crate) mod stats;
pub(crate) mod stream;
pub(crate) mod time;
pub(crate) mod trunk;
pub(crate) mod waits;

use frame::{Bytes, Frame};
use history::Prefix;
use identity::Peer;
use plugin::CodecSpec;
use stats::Took;

/// A configured connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(crate) u32);

/// A way of a connection's frames to the peer proxy: a lane of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CarrierId(pub(crate) u64);

/// A TCP connection to a peer proxy, which carries lanes of all connections between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WireId(pub(crate) u64);

/// A TCP connection to the local DRBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LocalId(pub(crate) u64);

/// Work given to the codec pool or the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct JobId(pub(crate) u64);

/// A record on the spill disk.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub(crate) struct SpillRef {
    pub(crate) segment: u32,
    pub(crate) position: u32,
    pub(crate) len: u32,
}

impl SpillRef {
    /// Places and lengths on the disk are multiples of this, as direct access wants it.
    pub(crate) const BLOCK: usize = 4096;
    /// What sealing adds to a payload.
    pub(crate) const TAG_LEN: usize = 16;

    /// Bytes that a payload takes on the disk.
    pub(crate) const fn disk_len(payload_len: usize) -> usize {
        (payload_len + Self::TAG_LEN).next_multiple_of(Self::BLOCK)
    }

    /// Bytes that the record takes on the disk.
    pub(crate) const fn disk_bytes(self) -> u64 {
        Self::disk_len(self.len as usize) as u64
    }
}

/// What a carrier is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CarrierKind {
    Control,
    Bulk,
}

/// How a socket towards DRBD is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    /// After everything queued was written, by FIN.
    Orderly,
    /// At once, by RST; what is queued is dropped.
    Reset,
}

/// Something happened.
#[derive(Debug)]
pub(crate) enum Input {
    /// Time passed.
    Tick,
    LocalConnected(LocalId),
    LocalData(LocalId, Vec<u8>),
    LocalEof(LocalId),
    /// The kernel accepted so many bytes of what was written.
    LocalWritten(LocalId, usize),
    /// The socket failed or could not be connected; it is closed already.
    LocalFailed(LocalId, String),
    /// A TCP connection that the core dialled is connected and authenticated.
    WireUp(WireId, Peer),
    /// A frame of the session itself.
    WireFrame(WireId, Frame),
    /// Bytes of a lane came in, with the headers of their pieces.
    LaneReceived(WireId, u32, usize),
    LaneFrame(WireId, u32, Frame),
    /// A piece with so many bytes of a carrier's frames goes out.
    CarrierSent(CarrierId, usize),
    /// The TCP connection failed or could not be connected; it is closed already.
    WireDown(WireId, String),
    Encoded(JobId, crate::codec::Encoded, Took),
    Decoded(JobId, Result<Bytes, crate::codec::DecodeError>, Took),
    SpillWritten(JobId, Result<SpillRef, String>),
    SpillRead(JobId, Result<Vec<u8>, String>),
    /// Thousandths of a core that coding can have on this machine.
    FreeCores(u64),
    /// The wall clock: minute of the week, Monday 00:00 first.
    Wall(u32),
}

/// Something is to be done.
#[derive(Debug)]
pub(crate) enum Output {
    Dial {
        wire: WireId,
        /// Its addresses and its identity.
        link: LinkId,
        kind: CarrierKind,
    },
    /// A frame of the session itself goes before everything that waits.
    SendSession(WireId, Frame),
    Send {
        wire: WireId,
        lane: u32,
        carrier: CarrierId,
        frame: Frame,
    },
    /// The lane ends after what its frames of no stream still say.
    CloseLane(WireId, u32),
    CloseWire(WireId),
    /// Bytes may be written again; ask `carrier_allowance`.
    WantWrite(CarrierId),
    /// Connect to the link's DRBD from its inside address.
    ConnectLocal {
        local: LocalId,
        link: LinkId,
    },
    WriteLocal(LocalId, Bytes),
    /// End the sending direction after everything queued.
    ShutdownLocal(LocalId),
    CloseLocal(LocalId, Close),
    /// Bytes may be read again; ask `read_allowance`.
    WantRead(LocalId),
    Encode {
        job: JobId,
        spec: CodecSpec,
        raw: Bytes,
        sample: bool,
        /// What the chunk may refer to.
        prefix: Prefix,
    },
    Decode {
        job: JobId,
        codec: u8,
        raw_len: u32,
        crc: u32,
        payload: Bytes,
        /// What the chunk refers to.
        prefix: Prefix,
    },
    SpillWrite {
        job: JobId,
        payload: Bytes,
    },
    SpillRead {
        job: JobId,
        from: SpillRef,
    },
    SpillFree(SpillRef),
    Log(Level, LinkId, String),
}

/// Weight of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Info,
    Warn,
    Error,
}
