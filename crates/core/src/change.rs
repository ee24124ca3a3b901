//! A wanted change of the state: a list of edits, made by whoever wants something to happen.

use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, ReplState, Role};

use crate::state::State;

/// A list of edits that are applied together or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    edits: Vec<Edit>,
    /// An Outdated that the disk is too low for is silently left out.
    pub ignore_impossible_outdate: bool,
    /// Openers do not keep a Primary from being demoted.
    pub ignore_openers: bool,
    /// The connections that go are ended by agreement: their peers did not crash.
    pub graceful: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edit {
    Role(Role),
    Conn(NodeId, ConnState),
    PeerRole(NodeId, Role),
    SuspFen(NodeId, bool),
    Disk(VolumeNr, DiskState),
    AllDisks(DiskState),
    Repl(VolumeNr, NodeId, ReplState),
    PeerDisk(VolumeNr, NodeId, DiskState),
    PauseUser(VolumeNr, NodeId, bool),
    PausePeer(VolumeNr, NodeId, bool),
    PauseDependency(VolumeNr, NodeId, bool),
    PauseMaxParallel(VolumeNr, NodeId, bool),
    ResyncActive(VolumeNr, NodeId, bool),
    Replication(VolumeNr, NodeId, bool),
    SuspUser(bool),
    SuspNod(bool),
    SuspQuorum(bool),
    SuspUuid(bool),
    FailIo(bool),
    Members(NodeMask),
}

macro_rules! edits {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) => $edit:expr;)*) => {
        impl Change {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $($arg: $ty),*) -> Self {
                self.edits.push($edit);
                self
            })*
        }
    };
}

edits! {
    /// Role of this node.
    role(role: Role) => Edit::Role(role);
    /// Connection state.
    conn(peer: NodeId, conn: ConnState) => Edit::Conn(peer, conn);
    /// Role of a peer.
    peer_role(peer: NodeId, role: Role) => Edit::PeerRole(peer, role);
    /// Frozen for fencing.
    susp_fen(peer: NodeId, on: bool) => Edit::SuspFen(peer, on);
    /// Local disk.
    disk(volume: VolumeNr, disk: DiskState) => Edit::Disk(volume, disk);
    /// Every local disk that is above the given state is lowered to it.
    lower_disks(disk: DiskState) => Edit::AllDisks(disk);
    /// Replication state.
    repl(volume: VolumeNr, peer: NodeId, repl: ReplState) => Edit::Repl(volume, peer, repl);
    /// A peer's disk.
    peer_disk(volume: VolumeNr, peer: NodeId, disk: DiskState) => Edit::PeerDisk(volume, peer, disk);
    /// Resync paused by the operator here.
    pause_user(volume: VolumeNr, peer: NodeId, on: bool) => Edit::PauseUser(volume, peer, on);
    /// Resync paused by the peer.
    pause_peer(volume: VolumeNr, peer: NodeId, on: bool) => Edit::PausePeer(volume, peer, on);
    /// Resync paused by `resync-after`.
    pause_dependency(volume: VolumeNr, peer: NodeId, on: bool)
        => Edit::PauseDependency(volume, peer, on);
    /// Resync paused by `max-parallel-resyncs`.
    pause_max_parallel(volume: VolumeNr, peer: NodeId, on: bool)
        => Edit::PauseMaxParallel(volume, peer, on);
    /// Requests of a resync as target are outstanding.
    resync_active(volume: VolumeNr, peer: NodeId, on: bool) => Edit::ResyncActive(volume, peer, on);
    /// Data may be sent to an Inconsistent peer.
    replication(volume: VolumeNr, peer: NodeId, on: bool) => Edit::Replication(volume, peer, on);
    /// Suspended by the operator.
    susp_user(on: bool) => Edit::SuspUser(on);
    /// Suspended for lack of data.
    susp_nod(on: bool) => Edit::SuspNod(on);
    /// Suspended for lack of quorum.
    susp_quorum(on: bool) => Edit::SuspQuorum(on);
    /// Suspended until a new current UUID is durable.
    susp_uuid(on: bool) => Edit::SuspUuid(on);
    /// All requests fail.
    fail_io(on: bool) => Edit::FailIo(on);
    /// Members.
    members(members: NodeMask) => Edit::Members(members);
}

impl Change {
    /// No edit.
    pub fn new() -> Self {
        Change::default()
    }

    /// Nothing is wanted.
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty()
    }

    /// Both together; the other's edits come last.
    #[must_use]
    pub fn and(mut self, other: Change) -> Self {
        self.edits.extend(other.edits);
        self.ignore_impossible_outdate |= other.ignore_impossible_outdate;
        self.ignore_openers |= other.ignore_openers;
        self.graceful |= other.graceful;
        self
    }

    /// Edits the state; edits of objects that do not exist are left out.
    pub fn apply(&self, state: &mut State) {
        for edit in &self.edits {
            match *edit {
                Edit::Role(role) => state.role = role,
                Edit::Conn(peer, conn) => set_conn(state, peer, conn),
                Edit::PeerRole(peer, role) => {
                    if let Some(c) = state.connections.get_mut(&peer) {
                        c.peer_role = role;
                    }
                }
                Edit::SuspFen(peer, on) => {
                    if let Some(c) = state.connections.get_mut(&peer) {
                        c.susp_fen = on;
                    }
                }
                Edit::Disk(volume, disk) => {
                    if let Some(d) = state.devices.get_mut(&volume) {
                        let impossible = disk == DiskState::Outdated
                            && self.ignore_impossible_outdate
                            && d.disk < DiskState::Outdated;
                        if !impossible {
                            d.disk = disk;
                        }
                    }
                }
                Edit::AllDisks(disk) => {
                    for d in state.devices.values_mut() {
                        if d.disk > disk {
                            d.disk = disk;
                        }
                    }
                }
                Edit::Repl(volume, peer, repl) => with(state, volume, peer, |p| p.repl = repl),
                Edit::PeerDisk(volume, peer, disk) => with(state, volume, peer, |p| p.disk = disk),
                Edit::PauseUser(volume, peer, on) => {
                    with(state, volume, peer, |p| p.susp_user = on)
                }
                Edit::PausePeer(volume, peer, on) => {
                    with(state, volume, peer, |p| p.susp_peer = on)
                }
                Edit::PauseDependency(volume, peer, on) => {
                    with(state, volume, peer, |p| p.susp_dependency = on);
                }
                Edit::PauseMaxParallel(volume, peer, on) => {
                    with(state, volume, peer, |p| p.susp_max_parallel = on);
                }
                Edit::ResyncActive(volume, peer, on) => {
                    with(state, volume, peer, |p| p.resync_active = on);
                }
                Edit::Replication(volume, peer, on) => {
                    with(state, volume, peer, |p| p.replication = on);
                }
                Edit::SuspUser(on) => state.susp_user = on,
                Edit::SuspNod(on) => state.susp_nod = on,
                Edit::SuspQuorum(on) => state.susp_quorum = on,
                Edit::SuspUuid(on) => state.susp_uuid = on,
                Edit::FailIo(on) => state.fail_io = on,
                Edit::Members(members) => state.members = members,
            }
        }
    }
}

/// A connection's state; the volumes' replication states follow a loss at once.
fn set_conn(state: &mut State, peer: NodeId, conn: ConnState) {
    let Some(c) = state.connections.get_mut(&peer) else {
        return;
    };
    // The first reason of a loss wins (semantics.md, 2.1).
    let is_reason = |s| (ConnState::Timeout..=ConnState::TearDown).contains(&s);
    if is_reason(c.conn) && is_reason(conn) {
        return;
    }
    c.conn = conn;
    if conn < ConnState::Connected {
        for d in state.devices.values_mut() {
            if let Some(p) = d.peers.get_mut(&peer) {
                p.repl = ReplState::Off;
            }
        }
    }
}

fn with(
    state: &mut State,
    volume: VolumeNr,
    peer: NodeId,
    edit: impl FnOnce(&mut crate::state::PeerDeviceState),
) {
    if let Some(p) = state
        .devices
        .get_mut(&volume)
        .and_then(|d| d.peers.get_mut(&peer))
    {
        edit(p);
    }
}
