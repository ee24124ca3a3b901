//! The core's only border: what happens (`Input`) and what is wanted (`Output`).
//!
//! Rules of the border, for every driver (the real one and the simulator):
//!
//! * Feed one `Input`, then drain `Resource::poll_output` until `None`, before the next packet of
//!   a stream is decoded: the dialect of a link can change with every packet of its handshake.
//! * Outputs may run in any order and in parallel. Only `Send`s of one stream of one link keep
//!   their order. What must come after something durable is emitted after its completion.
//! * An output with a `Tag` completes with exactly one input that carries the tag, also when its
//!   object has gone meanwhile. A completion that the core does not know any more is ignored.
//! * Payload bytes stay with the driver. A `BufId` names a reference-counted buffer: an input that
//!   carries one gives the core one reference; `Output::Release` gives it back. A buffer that is
//!   named in an output stays alive until the output is done (the driver takes its own reference),
//!   so the core may release right after emitting.

use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::disk::pmem::WordStore;
use lockstep_format::units::{NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::Packet;

use crate::command::{Answer, Command, CommandError};
use crate::report::Event;

/// Not a digest: asks whether all bytes are zero. The answer is one byte, 1 if they are and 0 if
/// they are not.
pub const ALL_ZERO: &str = "all-zero";

/// Names one output of the core that will complete. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// Names a front end's request; chosen by the front end, unique among its requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Names an operator's command; chosen by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub u64);

/// Names a buffer of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufId(pub u64);

/// Names one established pair of streams to a peer; chosen by the driver, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// Which of a connection's two byte streams (wire.md, 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// Writes, requests, replies with payload, bitmap, state, handshake.
    Data,
    /// Acks, pings, two-phase commit replies.
    Control,
}

/// Bytes that came with or go with a packet: a part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The buffer.
    pub buf: BufId,
    /// First byte within the buffer.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

/// What a front end asks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Fill the payload's buffer from the volume.
    Read,
    /// Write the payload. With `fua` it is durable on every replica that counts at completion.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// All completed writes become durable on every replica that counts.
    Flush,
    /// The range's content is not needed any more; reads give zeroes or the old bytes.
    Discard,
    /// The range reads as zeroes afterwards. `unmap`: it may be deallocated.
    Zeroes {
        /// The backing storage may deallocate the range.
        unmap: bool,
    },
}

/// One request of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Returned with the completion.
    pub id: RequestId,
    /// The volume.
    pub volume: VolumeNr,
    /// What to do.
    pub kind: RequestKind,
    /// First sector; a multiple of 8 (4 KiB) or of the volume's logical block size.
    pub sector: Sector,
    /// Length in bytes, a multiple of 512; 0 only for a flush.
    pub len: u32,
    /// Source of a write, destination of a read. The core takes the reference over.
    pub payload: Option<Payload>,
}

/// Why a request failed, in the terms of the block layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// `EIO`: the disk failed and no peer has the data, or IO is set to fail without quorum.
    Io,
    /// `EROFS`: a write to a volume that is not Primary.
    ReadOnly,
    /// `ENOMEDIUM`: the volume is not Primary, has gone, or has no data.
    NoMedium,
    /// `EINVAL`: beyond the end, unaligned, or without its payload.
    Invalid,
    /// `EOPNOTSUPP`.
    Unsupported,
}

/// Why a disk operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskError {
    /// The device reported an error, with the operating system's error number.
    Io {
        /// `errno`.
        errno: i32,
    },
    /// The device cannot do this operation (discard, zeroes).
    Unsupported,
    /// The disk was closed before the operation ran, or was given up (`Output::AbandonDisk`).
    Gone,
}

/// What the driver found when it opened a volume's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size of the data device in bytes (with internal metadata: of the whole device).
    pub data_bytes: u64,
    /// Size of the metadata device in bytes; equals `data_bytes` for internal metadata.
    pub meta_bytes: u64,
    /// Logical block size in bytes: 512 or 4096.
    pub logical_block_bytes: u32,
    /// Physical block size in bytes.
    pub physical_block_bytes: u32,
    /// Discards work.
    pub discard: bool,
    /// A discarded range reads as zeroes.
    pub discard_zeroes: bool,
    /// Discard granularity in bytes; 0 if discards do not work.
    pub discard_granularity_bytes: u32,
    /// Largest discard or zero-out in bytes.
    pub max_discard_bytes: u32,
    /// The device loses nothing of what it acknowledged at a power cut: flushes are not needed.
    pub write_through: bool,
    /// The metadata device is a device of its own on persistent memory, and the driver can do
    /// [`MetaOp::Store`] on it.
    pub persistent_memory: bool,
    /// Whether it still has what it had acknowledged; only what is found at opening counts.
    pub cache: DiskCache,
}

/// What a disk still has of what it had acknowledged, and nobody had flushed, when it was open last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskCache {
    /// It may have lost some: the machine went down, the disk failed, or nobody knows.
    #[default]
    MayBeLost,
    /// All of it: only the process ended.
    Kept {
        /// What [`Output::NoteCache`] said last.
        untold: NodeMask,
    },
}

/// An operation on the data area of a volume's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOp {
    /// Reads `payload.len` bytes at `sector` into the payload.
    Read {
        /// First sector.
        sector: Sector,
        /// Destination.
        payload: Payload,
    },
    /// Reads `len` bytes at `sector` into a new buffer, which comes with the completion.
    ReadNew {
        /// First sector.
        sector: Sector,
        /// Length in bytes.
        len: u32,
    },
    /// Writes the payload at `sector`. With `fua` it is durable at completion.
    Write {
        /// First sector.
        sector: Sector,
        /// Source.
        payload: Payload,
        /// Durable at completion.
        fua: bool,
    },
    /// Everything that completed before is durable at completion.
    Flush,
    /// Deallocates the range; a device that cannot says `Unsupported`.
    Discard {
        /// First sector.
        sector: Sector,
        /// Length in bytes.
        len: u32,
    },
    /// Makes the range read as zeroes; always possible (by writing zeroes if need be).
    Zeroes {
        /// First sector.
        sector: Sector,
        /// Length in bytes.
        len: u32,
        /// The range may be deallocated.
        unmap: bool,
    },
}

/// An operation on a volume's metadata device. Offsets are bytes from the device's start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetaOp {
    /// Reads `len` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Writes whole 4 KiB blocks, durable at completion. With `flush_data` the data device is
    /// flushed first (metadata.md, 15: an extent's data before the extent leaves the log).
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
        /// Flush the data device before.
        flush_data: bool,
    },
    /// Changes persistent memory in place ([`DiskInfo::persistent_memory`]). Each step is
    /// persistent, behind a fence, before the next begins, and all of them are at completion. Of
    /// the step that a power cut meets any of its aligned words of 8 bytes may be there, each
    /// whole.
    Store {
        /// What to store; offsets are bytes from the device's start.
        steps: Vec<WordStore>,
        /// Flush the data device before the first step.
        flush_data: bool,
    },
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// `Resource::next_timeout` has come.
    Timeout,
    /// A front end's request.
    Request(Request),
    /// Both streams to a peer stand (wire.md, 2.3), the answer to `Output::Connect`.
    LinkUp {
        /// The peer.
        peer: NodeId,
        /// The new link.
        link: LinkId,
        /// This node accepted the control stream (wire.md, 2.4).
        resolve_conflicts: bool,
    },
    /// A link broke or was closed by the peer. Not sent for a link that `Output::CloseLink` named.
    LinkDown {
        /// The peer.
        peer: NodeId,
        /// The link.
        link: LinkId,
        /// For the log.
        reason: LinkDownReason,
    },
    /// A packet of a peer.
    Packet {
        /// The peer.
        peer: NodeId,
        /// The link it came on.
        link: LinkId,
        /// The stream it came on.
        stream: Stream,
        /// The header's volume number.
        volume: VolumeNr,
        /// The packet.
        packet: Packet,
        /// Its bulk payload; the core takes the reference over.
        payload: Option<Payload>,
    },
    /// A packet of a peer whose payload does not have the digest that it carries
    /// (`Resource::peer_integrity`). The payload stays with the driver.
    Corrupt {
        /// The peer.
        peer: NodeId,
        /// The link it came on.
        link: LinkId,
        /// The header's volume number.
        volume: VolumeNr,
        /// The packet.
        packet: Packet,
    },
    /// Bytes arrived on the stream, without a whole packet yet; restarts receive timers.
    Progress {
        /// The peer.
        peer: NodeId,
        /// The link.
        link: LinkId,
        /// The stream.
        stream: Stream,
    },
    /// All bytes of sends with `want_sent` up to this tag have been handed to the network.
    Sent {
        /// The tag of `Output::Send`.
        tag: Tag,
    },
    /// A disk was opened or not, the answer to `Output::OpenDisk`; or its size was looked at
    /// again, the answer to `Output::ProbeDisk` or `LookAtDisk`.
    DiskOpened {
        /// The output's tag.
        tag: Tag,
        /// The disk's properties, or a text that names path and cause.
        result: Result<DiskInfo, String>,
    },
    /// `Output::CloseDisk` is done: nothing of it is in flight any more.
    DiskClosed {
        /// The output's tag.
        tag: Tag,
    },
    /// A data operation is done.
    DiskDone {
        /// The output's tag.
        tag: Tag,
        /// For `ReadNew` the new buffer with the data; the core takes the reference over.
        result: Result<Option<Payload>, DiskError>,
    },
    /// A metadata operation is done.
    MetaDone {
        /// The output's tag.
        tag: Tag,
        /// For reads the bytes, empty for writes.
        result: Result<Vec<u8>, DiskError>,
    },
    /// `Output::Digest` is done.
    DigestDone {
        /// The output's tag.
        tag: Tag,
        /// The digest.
        digest: Vec<u8>,
    },
    /// A handler of the configuration ended.
    HandlerDone {
        /// The output's tag.
        tag: Tag,
        /// Its exit code.
        exit_code: u8,
    },
    /// An operator's command.
    Command {
        /// Returned with the answer.
        id: CommandId,
        /// What to do.
        command: Command,
    },
}

/// How a link is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// What is queued is lost.
    AtOnce,
    /// What was sent before goes out first.
    Flushed,
    /// The same, and the peer has agreed and ends the link too.
    Agreed,
}

/// Why a link went down, as the driver saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDownReason {
    /// The peer closed a stream.
    Closed,
    /// The network reported an error.
    Broken,
    /// A stream did not accept bytes for too long.
    SendTimeout,
    /// Bytes that are no packet of this dialect.
    Protocol,
}

/// What the core wants done.
#[derive(Clone, Debug)]
pub enum Output {
    /// Open the disk and take it exclusively; answer `DiskOpened`.
    OpenDisk {
        /// Completes with `DiskOpened`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
        /// Path of the data device.
        data_path: String,
        /// Path of the metadata device; `None` for internal metadata.
        meta_path: Option<String>,
    },
    /// Look again how large the open disk is; answer `DiskOpened` with what is true now.
    ProbeDisk {
        /// Completes with `DiskOpened`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
    },
    /// As `ProbeDisk`, at each connect: mostly nothing has changed.
    LookAtDisk {
        /// Completes with `DiskOpened`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
    },
    /// From now on the open disk loses nothing as long as the machine runs and the disk has no error: note that where
    /// the next process finds it ([`DiskCache::Kept`]), and a machine that went down does not. Closing the disk, and
    /// giving it up, takes the note away.
    NoteCache {
        /// The volume.
        volume: VolumeNr,
        /// Nodes that have not heard yet of what the disk lost before.
        untold: NodeMask,
    },
    /// Close the disk when all its operations in flight have ended; answer `DiskClosed`.
    CloseDisk {
        /// Completes with `DiskClosed`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
    },
    /// The disk does not answer: end its operations in flight with [`DiskError::Gone`] now, and
    /// those that still come, and `CloseDisk` without waiting. What the system has not returned
    /// keeps its memory; until it has, the disk must not be opened again, because a write that
    /// was given up may still happen.
    AbandonDisk {
        /// The volume.
        volume: VolumeNr,
    },
    /// A data operation; answer `DiskDone`.
    Disk {
        /// Completes with `DiskDone`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
        /// What to do.
        op: DiskOp,
    },
    /// A metadata operation; answer `MetaDone`.
    Meta {
        /// Completes with `MetaDone`.
        tag: Tag,
        /// The volume.
        volume: VolumeNr,
        /// What to do.
        op: MetaOp,
    },
    /// Send a packet.
    Send {
        /// The peer.
        peer: NodeId,
        /// The link; a send on a link that is gone is dropped.
        link: LinkId,
        /// The stream.
        stream: Stream,
        /// The header's volume number.
        volume: VolumeNr,
        /// The packet.
        packet: Packet,
        /// Its bulk payload.
        payload: Option<Payload>,
        /// The driver puts the payload's digest by this algorithm into the packet
        /// (`Packet::set_integrity`).
        integrity: Option<DigestAlg>,
        /// Answer with `Sent` when the bytes have left.
        want_sent: Option<Tag>,
    },
    /// Start to connect to the peer and to listen for it, until `LinkUp` or `StopConnecting`.
    Connect {
        /// The peer; the driver knows its paths.
        peer: NodeId,
    },
    /// End the attempts of `Connect`.
    StopConnecting {
        /// The peer.
        peer: NodeId,
    },
    /// Close both streams.
    CloseLink {
        /// The peer.
        peer: NodeId,
        /// The link.
        link: LinkId,
        /// How.
        end: LinkEnd,
    },
    /// A front end's request is done. Its payload's reference is released with it.
    Complete {
        /// The request.
        id: RequestId,
        /// The result.
        result: Result<(), RequestError>,
    },
    /// A command is done.
    Answer {
        /// The command.
        id: CommandId,
        /// The result.
        result: Result<Answer, CommandError>,
    },
    /// Compute a digest over the payload; answer `DigestDone`.
    Digest {
        /// Completes with `DigestDone`.
        tag: Tag,
        /// The algorithm's name as configured (`crc32c`, `sha1`, …), or [`ALL_ZERO`].
        algorithm: String,
        /// The bytes.
        payload: Payload,
    },
    /// Copy the bytes of one payload into another of the same length, before the outputs that
    /// follow: the reply to a remote read goes into the front end's buffer.
    Copy {
        /// Source.
        from: Payload,
        /// Destination.
        to: Payload,
    },
    /// Run a handler of the configuration; answer `HandlerDone`.
    Handler {
        /// Completes with `HandlerDone`.
        tag: Tag,
        /// The handler's name (`split-brain`, `fence-peer`, …).
        name: &'static str,
        /// The volume it is about, if any.
        volume: Option<VolumeNr>,
        /// The peer it is about, if any.
        peer: Option<NodeId>,
    },
    /// The core is done with this buffer.
    Release {
        /// The buffer.
        buf: BufId,
    },
    /// Something that watchers (`events2`) are told.
    Event(Event),
}
