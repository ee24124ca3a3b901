//! The state of a resource as one plain value (semantics.md, 2.2), and what can be asked of it.
//!
//! A change clones the value, edits the copy, sanitises and checks it, and puts it in the place of
//! the old one (`transition.rs`). Nothing here has effects.

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
pub use lockstep_format::wire::{ConnState, DiskState, ReplState, Role};

use crate::few::Few;

/// Everything that a state change can change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Role of this node.
    pub role: Role,
    /// `suspend-io` of the operator.
    pub susp_user: bool,
    /// No UpToDate data can be reached and the policy is to wait.
    pub susp_nod: bool,
    /// A volume lacks quorum and the policy is to wait.
    pub susp_quorum: bool,
    /// A new current UUID has to be durable before requests go on (semantics.md, 12.5).
    pub susp_uuid: bool,
    /// All requests fail until every opener has closed.
    pub fail_io: bool,
    /// Nodes that may be in this node's partition; never misses an online one.
    pub members: NodeMask,
    /// Volumes.
    pub devices: Few<VolumeNr, DeviceState>,
    /// Connections.
    pub connections: Few<NodeId, ConnectionState>,
}

/// State of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Local disk.
    pub disk: DiskState,
    /// Quorum as enforced: true with `quorum off`.
    pub have_quorum: bool,
    /// Quorum as counted, whatever is enforced.
    pub quorum: bool,
    /// The volume towards each peer; one entry for every connection.
    pub peers: Few<NodeId, PeerDeviceState>,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionState {
    /// Connection state.
    pub conn: ConnState,
    /// Role of the peer; Unknown below Connected.
    pub peer_role: Role,
    /// Frozen until the `fence-peer` handler has answered.
    pub susp_fen: bool,
}

/// State of a volume towards a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerDeviceState {
    /// Replication state.
    pub repl: ReplState,
    /// The peer's disk.
    pub disk: DiskState,
    /// Resync paused by the operator here.
    pub susp_user: bool,
    /// Resync paused by the peer.
    pub susp_peer: bool,
    /// Resync paused by `resync-after`.
    pub susp_dependency: bool,
    /// Resync paused because another connection's goes first.
    pub susp_other: bool,
    /// Resync paused by `max-parallel-resyncs` of this node.
    pub susp_max_parallel: bool,
    /// Target: requests of this resync are still being drained.
    pub resync_active: bool,
    /// Data may be sent to this Inconsistent peer (the peer said so).
    pub replication: bool,
}

impl Default for ConnectionState {
    fn default() -> Self {
        ConnectionState {
            conn: ConnState::StandAlone,
            peer_role: Role::Unknown,
            susp_fen: false,
        }
    }
}

impl Default for PeerDeviceState {
    fn default() -> Self {
        PeerDeviceState {
            repl: ReplState::Off,
            disk: DiskState::DUnknown,
            susp_user: false,
            susp_peer: false,
            susp_dependency: false,
            susp_other: false,
            susp_max_parallel: false,
            resync_active: false,
            replication: true,
        }
    }
}

impl Default for DeviceState {
    fn default() -> Self {
        DeviceState {
            disk: DiskState::Diskless,
            have_quorum: true,
            quorum: true,
            peers: Few::new(),
        }
    }
}

impl Default for State {
    fn default() -> Self {
        State {
            role: Role::Secondary,
            susp_user: false,
            susp_nod: false,
            susp_quorum: false,
            susp_uuid: false,
            fail_io: false,
            members: NodeMask::EMPTY,
            devices: Few::new(),
            connections: Few::new(),
        }
    }
}

impl PeerDeviceState {
    /// Sum of the reasons that travels as `aftr_isp` (semantics.md, 2.3).
    pub fn combined_dependency(&self, own_disk: DiskState) -> bool {
        // A peer that is not told would go on by itself.
        self.susp_dependency
            || self.susp_max_parallel
            || self.susp_other
            || (self.repl.is_sync_source() && own_disk <= DiskState::Inconsistent)
    }

    /// A resync in this direction has to pause.
    pub fn resync_suspended(&self, own_disk: DiskState) -> bool {
        self.susp_user || self.susp_peer || self.combined_dependency(own_disk)
    }

    /// Application writes are sent to this peer (semantics.md, 15.3).
    pub fn replicates(&self) -> bool {
        match self.disk {
            DiskState::UpToDate => self.repl > ReplState::Off,
            DiskState::Inconsistent => {
                self.replication
                    && (self.repl == ReplState::Established
                        || (self.repl >= ReplState::WfBitmapT && self.repl < ReplState::Ahead))
            }
            // What this node copies from must not be older than what it writes.
            DiskState::Consistent | DiskState::Outdated => {
                self.replication
                    && (self.repl == ReplState::WfBitmapT || self.repl.is_sync_target())
            }
            _ => false,
        }
    }

    /// Application writes are marked out of sync for this connected peer (semantics.md, 15.3).
    pub fn marks_out_of_sync(&self) -> bool {
        matches!(self.repl, ReplState::Ahead | ReplState::WfBitmapS)
            || (self.repl >= ReplState::Established
                && (self.disk == DiskState::Outdated && !self.replicates()
                    || (self.disk == DiskState::Inconsistent && !self.replication)))
    }
}

/// Sets of replication states with a name in semantics.md, 2.1.
pub trait ReplSets: Copy {
    /// SyncSource or PausedSyncS.
    fn is_sync_source(self) -> bool;
    /// SyncTarget or PausedSyncT.
    fn is_sync_target(self) -> bool;
    /// A resync runs or is paused.
    fn is_sync(self) -> bool;
    /// VerifyS or VerifyT.
    fn is_verify(self) -> bool;
    /// SyncSource to PausedSyncT, verify included: progress is accounted.
    fn has_progress(self) -> bool;
    /// The states in which this node's data are going to be overwritten by the peer's.
    fn becomes_target(self) -> bool;
}

impl ReplSets for ReplState {
    fn is_sync_source(self) -> bool {
        matches!(self, ReplState::SyncSource | ReplState::PausedSyncS)
    }

    fn is_sync_target(self) -> bool {
        matches!(self, ReplState::SyncTarget | ReplState::PausedSyncT)
    }

    fn is_sync(self) -> bool {
        self.is_sync_source() || self.is_sync_target()
    }

    fn is_verify(self) -> bool {
        matches!(self, ReplState::VerifyS | ReplState::VerifyT)
    }

    fn has_progress(self) -> bool {
        (ReplState::SyncSource..=ReplState::PausedSyncT).contains(&self)
    }

    fn becomes_target(self) -> bool {
        matches!(
            self,
            ReplState::WfSyncUuid
                | ReplState::WfBitmapT
                | ReplState::StartingSyncT
                | ReplState::SyncTarget
                | ReplState::PausedSyncT
                | ReplState::Behind
        )
    }
}

impl State {
    /// Requests wait.
    pub fn suspended(&self) -> bool {
        self.susp_user
            || self.susp_nod
            || self.susp_quorum
            || self.susp_uuid
            || self.connections.values().any(|c| c.susp_fen)
    }

    /// Replication state and disk of a volume towards a peer; the default if there is none.
    pub fn peer_device(&self, volume: VolumeNr, peer: NodeId) -> PeerDeviceState {
        self.devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .copied()
            .unwrap_or_default()
    }

    /// Disk state of a volume; Diskless if there is none.
    pub fn disk(&self, volume: VolumeNr) -> DiskState {
        self.devices
            .get(&volume)
            .map_or(DiskState::Diskless, |d| d.disk)
    }

    /// State of a connection; StandAlone if there is none.
    pub fn conn(&self, peer: NodeId) -> ConnState {
        self.connections
            .get(&peer)
            .map_or(ConnState::StandAlone, |c| c.conn)
    }

    /// Nodes with an established connection.
    pub fn connected(&self) -> NodeMask {
        self.connections
            .iter()
            .filter(|(_, c)| c.conn == ConnState::Connected)
            .map(|(n, _)| *n)
            .collect()
    }

    /// A connected peer is Primary.
    pub fn primary_peer(&self) -> Option<NodeId> {
        self.connections
            .iter()
            .find(|(_, c)| c.peer_role == Role::Primary)
            .map(|(n, _)| *n)
    }

    /// Peers that are Primary.
    pub fn primaries(&self) -> impl Iterator<Item = NodeId> {
        let primary = |(_, c): &(&NodeId, &ConnectionState)| c.peer_role == Role::Primary;
        let all = self.connections.iter();
        all.filter(primary).map(|(node, _)| *node)
    }

    /// No connected peer is Primary, or this node is: the data cannot change unseen
    /// (semantics.md, 14.2).
    pub fn stable(&self) -> bool {
        self.role == Role::Primary || self.primary_peer().is_none()
    }
}

impl DeviceState {
    /// UpToDate data can be read here or at a peer (semantics.md, 3.6).
    pub fn data_accessible(&self) -> bool {
        self.disk == DiskState::UpToDate
            || self
                .peers
                .values()
                .any(|p| p.disk == DiskState::UpToDate && p.repl > ReplState::Off)
    }

    /// A peer decides whether its disk is whole as it is, by what this node has told it: a write that
    /// comes before the decision is known here would reach it neither as data nor as a mark.
    pub fn peer_decides(&self) -> bool {
        let mut peers = self.peers.values();
        self.disk == DiskState::UpToDate
            && peers.any(|p| p.disk == DiskState::Negotiating && p.repl == ReplState::Established)
    }

    /// The disk's content is about to be decided: requests wait (semantics.md, 3.6).
    pub fn unstable(&self) -> bool {
        matches!(self.disk, DiskState::Attaching | DiskState::Negotiating)
            || self
                .peers
                .values()
                .any(|p| matches!(p.repl, ReplState::WfBitmapT | ReplState::WfSyncUuid))
    }
}
