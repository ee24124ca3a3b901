//! What watchers and `status` are told of a resource: plain values, no references into the core.
//!
//! `Resource::snapshot` gives everything at once. Between snapshots `Output::Event` names what
//! changed; the daemon renders both as `status`, `events2` and counters.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Uuid, VolumeNr};

pub use crate::data::{AckTimes, BOUNDS_US};
use crate::options::{AfterSplitBrain, NetOptions, Protocol};
use crate::state::{ConnState, DiskState, ReplState, Role};

/// Something changed that a watcher wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The resource's state (role, suspension, promotability) may have changed.
    Resource,
    /// A volume's state changed.
    Device(VolumeNr),
    /// A connection's state changed.
    Connection(NodeId),
    /// State between this volume and this peer changed.
    PeerDevice(NodeId, VolumeNr),
    /// The resource as it was after one change of its state; only where
    /// [`Resource::tell_steps`](crate::resource::Resource::tell_steps) asks for it. Several changes
    /// may follow from one input, and a watcher wants to see each.
    Step(Box<Snapshot>),
    /// An object came into being.
    Created(Object),
    /// An object has gone.
    Destroyed(Object),
    /// A line for the log at the given severity.
    Log {
        /// How bad.
        level: Level,
        /// The connection it is about.
        peer: Option<NodeId>,
        /// The volume it is about.
        volume: Option<VolumeNr>,
        /// The text.
        text: String,
    },
    /// A Primary is going to call its data, which are UpToDate here, by a new generation. Comes
    /// before any peer hears of it and before it is written: whoever sees `to` later knows that it
    /// descends from `from`, and that no other node's writes are in between. It may be given up.
    NewGeneration {
        /// The volume.
        volume: VolumeNr,
        /// The generation of now.
        from: Uuid,
        /// The new one.
        to: Uuid,
    },
}

/// An object of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// A volume.
    Device(VolumeNr),
    /// A connection.
    Connection(NodeId),
}

/// Severity of a log line (style.md, 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Someone must act.
    Error,
    /// Degraded but safe.
    Warn,
    /// State changes.
    Info,
    /// Per request.
    Debug,
}

/// All of a resource at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Counts changes of the state that were told; a later snapshot never has a smaller number.
    pub step: u64,
    /// This node's id.
    pub node_id: NodeId,
    /// Role.
    pub role: Role,
    /// Users hold this node as a Primary while another one has the role: their requests wait for it (semantics.md, 7.1).
    pub stands_by: bool,
    /// Why IO is suspended: any of `user`, `no-data`, `fencing`, `quorum`, `uuid`.
    pub suspended: Vec<&'static str>,
    /// A promotion would be tried with a chance of success (config-and-cli.md, 13.3).
    pub may_promote: bool,
    /// `promotion_score` (config-and-cli.md, 13.3).
    pub promotion_score: u32,
    /// `force-io-failures`.
    pub force_io_failures: bool,
    /// Volumes by number.
    pub devices: Vec<DeviceReport>,
    /// Connections by node id.
    pub connections: Vec<ConnectionReport>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Number.
    pub volume: VolumeNr,
    /// Minor.
    pub minor: u32,
    /// Disk state.
    pub disk_state: DiskState,
    /// Why the last disk was given up, until one is attached again.
    pub lost_disk: Option<crate::device::LostDisk>,
    /// Meant to have no disk.
    pub client: bool,
    /// Quorum (true when not enforced).
    pub quorum: bool,
    /// Opened by a front end.
    pub open: bool,
    /// Usable size in sectors.
    pub size_sectors: u64,
    /// Smallest unit of a request that all disks take, of this node and of the peers, in bytes.
    pub logical_block_bytes: u32,
    /// `size` of the attached disk's options in sectors, which `resize` changes on all nodes; 0
    /// for the whole disk.
    pub size_limit_sectors: Option<u64>,
    /// Sectors read by front ends from the local disk.
    pub read_sectors: u64,
    /// Sectors written to the local disk.
    pub written_sectors: u64,
    /// Activity log transactions.
    pub al_writes: u64,
    /// Bitmap writes.
    pub bm_writes: u64,
    /// Front-end requests in flight.
    pub upper_pending: u64,
    /// Local disk operations in flight.
    pub lower_pending: u64,
    /// Requests that wait for an activity log transaction.
    pub al_suspended: bool,
    /// Current UUID.
    pub current_uuid: Uuid,
    /// History UUIDs, newest first.
    pub history_uuids: Vec<Uuid>,
    /// Generation flags as `show-gi` words them: consistent, was-up-to-date, crashed-primary, ….
    pub flags: u32,
}

/// Options of a connection that its peer can change while it is established.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedOptions {
    /// `protocol`.
    pub protocol: Protocol,
    /// `after-sb-0pri`, `after-sb-1pri` and `after-sb-2pri`.
    pub after_sb: [AfterSplitBrain; 3],
    /// `data-integrity-alg`.
    pub data_integrity_alg: Option<String>,
    /// `csums-alg`.
    pub csums_alg: Option<String>,
    /// `verify-alg`.
    pub verify_alg: Option<String>,
}

impl SharedOptions {
    /// Those of a connection's options.
    pub fn of(net: &NetOptions) -> Self {
        SharedOptions {
            protocol: net.protocol,
            after_sb: [net.after_sb_0pri, net.after_sb_1pri, net.after_sb_2pri],
            data_integrity_alg: net.data_integrity_alg.clone(),
            csums_alg: net.csums_alg.clone(),
            verify_alg: net.verify_alg.clone(),
        }
    }
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionReport {
    /// The peer.
    pub peer: NodeId,
    /// Its name.
    pub name: String,
    /// Connection state.
    pub state: ConnState,
    /// Its role.
    pub role: Role,
    /// Agreed protocol version, 0 before.
    pub protocol_version: u32,
    /// Application writes in flight towards the peer, in sectors.
    pub ap_in_flight_sectors: u64,
    /// Resync data in flight, in sectors.
    pub rs_in_flight_sectors: u64,
    /// The send queue is congested.
    pub congested: bool,
    /// Options that a peer can change.
    pub shared: SharedOptions,
    /// Volumes with this peer.
    pub peer_devices: Vec<PeerDeviceReport>,
}

/// A volume with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerDeviceReport {
    /// The volume.
    pub volume: VolumeNr,
    /// Replication state.
    pub repl_state: ReplState,
    /// The peer's disk state.
    pub disk_state: DiskState,
    /// The peer is meant to have no disk.
    pub client: bool,
    /// Why a resync is paused: any of `user`, `peer`, `dependency`, `connection dependency`.
    pub resync_suspended: Vec<&'static str>,
    /// Sectors received from the peer.
    pub received_sectors: u64,
    /// Sectors sent to the peer.
    pub sent_sectors: u64,
    /// Sectors marked out of sync towards the peer.
    pub out_of_sync_sectors: u64,
    /// Requests sent to the peer without an answer.
    pub pending: u64,
    /// Requests of the peer not yet answered.
    pub unacked: u64,
    /// Progress of a resync or verify, if one runs.
    pub resync: Option<ResyncReport>,
    /// More about a running verify.
    pub verify: Option<VerifyReport>,
    /// Bitmap UUID of the peer's slot.
    pub bitmap_uuid: Uuid,
    /// Flags of the peer's slot in the metadata (metadata.md); 0 without a disk.
    pub flags: u32,
    /// How long the peer takes to acknowledge writes.
    pub ack_times: AckTimes,
    /// At the attach the metadata said that there was a Primary while this peer was away.
    pub degraded: bool,
}

/// Where a running online verify stands. The node that only answers knows the position alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// First sector.
    pub start_sector: u64,
    /// Where it stops before the end of the volume.
    pub stop_sector: Option<u64>,
    /// Next sector to ask for.
    pub position_sector: u64,
    /// Sectors that are not compared yet.
    pub left_sectors: u64,
    /// Sectors that were not compared because of writes.
    pub skipped_sectors: u64,
}

/// Progress of a resync or verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResyncReport {
    /// Sectors to do at the start.
    pub total_sectors: u64,
    /// Sectors left.
    pub left_sectors: u64,
    /// Sectors that failed.
    pub failed_sectors: u64,
    /// Sectors whose checksums were equal, so no data was sent.
    pub same_sectors: u64,
    /// When it started.
    pub started: crate::time::Instant,
    /// Time spent paused, in nanoseconds.
    pub paused_ns: u64,
    /// Current speed in KiB/s over the last seconds.
    pub rate_kib_s: u32,
    /// Speed that the rate controller wants, in KiB/s; 0 on the source.
    pub wanted_kib_s: u32,
}
