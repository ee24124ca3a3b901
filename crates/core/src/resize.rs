//! `resize`: how large a volume becomes and who copies the new area to whom (semantics.md, 22).
//!
//! Peers of DRBD 9 agree by a two-phase commit; each looks at its disk again before it votes. A
//! peer of 8.4 follows `P_SIZES`. What happens on this node's disk is in `resize_local.rs`.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, VolumeNr};
use lockstep_format::wire::packet::{
    BlockRequest, TwopcHead, TwopcOutcome, TwopcPrepare, TwopcResize,
};
use lockstep_format::wire::{
    ConnState, DeviceDescFlags, DiskState, Packet, ReplState, Role, StateChange, UuidFlags,
};

use crate::admin::no_volume;
use crate::before_resync::ResyncGate;
use crate::command::{Answer, CommandError, ErrorCode};
use crate::data::Wanted;
use crate::device::{Device, DiskPhase, LocalDisk, PeerDevice, PeerSizes};
use crate::disk_look::{Looks, ProbeFor};
use crate::event::{CommandId, LinkId, Stream};
use crate::report::Level;
use crate::resource::Resource;
use crate::time::{Duration, Instant};
use crate::transition::Change;
use crate::twopc::{Transaction, Wish, WishKind, command_error};
use crate::validity::Refusal;

/// How long a kernel may take to say that it is source of a new area; it took 0.4 s in an emulated machine.
const SOURCE_SAYS_SO: Duration = Duration::from_secs(5);
/// Requests that are kept for one peer and more than it has in flight.
const EARLY_REQUESTS: usize = 4096;
/// How long a peer's sizes count as what is so now: a handshake is tried again within it.
const FRESH_SIZES: Duration = Duration::from_secs(3);
/// Size in sectors that a node without a disk names: it sets no limit.
const NO_LIMIT_SECTORS: u64 = 1 << 41;

/// What is done with the area that a resize adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NewArea {
    /// It differs between the nodes: marked towards everybody.
    Resync,
    /// `--assume-clean`: it is equal, or nobody cares.
    Clean,
}

impl NewArea {
    fn of(flags: DeviceDescFlags) -> NewArea {
        if flags.contains(DeviceDescFlags::NO_RESYNC) {
            NewArea::Clean
        } else {
            NewArea::Resync
        }
    }
}

/// A `resize` as the operator asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResizeWish {
    pub(crate) id: CommandId,
    user_sectors: u64,
    flags: DeviceDescFlags,
}

/// What follows a change of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AfterResize {
    /// Nothing.
    Nothing,
    /// The disk is as it was found now.
    Probed(ProbeFor),
    /// An agreed size is durable.
    Sized {
        command: Option<CommandId>,
        sides: Vec<(NodeId, Side)>,
        tell: Tell,
        flags: DeviceDescFlags,
    },
}

/// Who is told by `P_SIZES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    /// Nobody: all have agreed.
    Nobody,
    /// Everybody is asked to follow; whether the volume has grown here.
    Ask(bool),
    /// Everybody hears what this node has now.
    Answer,
}

/// This node's side in the resync of a new area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

/// A volume's changes of size.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    /// Size before it shrank: what peers sent before they knew is still taken.
    pub(crate) shrunk_from: u64,
    /// Changes that wait for the one under way.
    queued: VecDeque<(u64, NewArea, AfterResize)>,
    /// Peers whose requests for the new area are kept until this node is ready to serve them.
    sources_for: NodeMask,
    early: Vec<EarlyRequest>,
    /// Peers that have grown as well, and were not compared with since.
    pub(crate) uncompared: NodeMask,
    /// Peers whose handshake had begun when the disk was found larger: they hear of it when it ends.
    pub(crate) untold: NodeMask,
    pub(crate) looks: Looks,
    /// When a look at the disk began for a peer that connects; none if it has ended.
    pub(crate) looked_at: Option<Instant>,
    /// A connected peer's size changed while this node's disk was being changed: it is looked at after that.
    follow: Option<(NodeId, DeviceDescFlags)>,
    /// This node's command grew the volume and the 8.4 peer has not followed yet.
    pending: Option<DeviceDescFlags>,
    /// A kernel that is source of the new area and has not said so yet, and how long that is waited for.
    unsaid: Option<(NodeId, Instant)>,
}

/// A resync request that came before this node knew that it is source.
#[derive(Debug)]
struct EarlyRequest {
    peer: NodeId,
    link: LinkId,
    request: BlockRequest,
    after: (NodeId, Dagtag),
    wanted: Wanted,
}

/// The part of a two-phase commit that only a resize has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResizeVote {
    user_sectors: u64,
    flags: DeviceDescFlags,
    /// Smallest limit of all that voted.
    max_sectors: u64,
    diskful_primaries: NodeMask,
    /// The disk here is being looked at.
    pub(crate) probing: bool,
}

impl ResizeVote {
    pub(crate) const fn is_probing(&self) -> bool {
        self.probing
    }

    pub(crate) const fn words(&self) -> (NodeMask, u64) {
        (self.diskful_primaries, self.max_sectors)
    }

    pub(crate) fn add(&mut self, diskful_primaries: NodeMask, max_sectors: u64) {
        self.diskful_primaries = self.diskful_primaries.union(diskful_primaries);
        if max_sectors != 0 {
            self.max_sectors = self.max_sectors.min(max_sectors);
        }
    }

    /// The packet that asks for it.
    pub(crate) const fn packet(&self, head: TwopcHead) -> TwopcResize {
        TwopcResize {
            head,
            user_size: Sector(self.user_sectors),
            dds_flags: self.flags,
        }
    }
}

/// Phase one of a transaction of either kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseOne {
    pub(crate) head: TwopcHead,
    pub(crate) change: StateChange,
    pub(crate) resize: Option<TwopcResize>,
}

impl From<TwopcPrepare> for PhaseOne {
    fn from(packet: TwopcPrepare) -> Self {
        PhaseOne {
            head: packet.head,
            change: packet.change,
            resize: None,
        }
    }
}

impl From<TwopcResize> for PhaseOne {
    fn from(packet: TwopcResize) -> Self {
        PhaseOne {
            head: packet.head,
            change: StateChange::default(),
            resize: Some(packet),
        }
    }
}

pub(crate) fn refusal(code: ErrorCode, text: String) -> Refusal {
    Refusal { code, text }
}

impl Resource {
    // The command.

    pub(crate) fn command_resize(
        &mut self,
        id: CommandId,
        volume: VolumeNr,
        user_sectors: u64,
        flags: DeviceDescFlags,
    ) {
        if !self.devices.contains_key(&volume) {
            self.answer(id, Err(no_volume(volume)));
            return;
        }
        if let Err(cause) = self.check_resize(volume) {
            self.answer(id, Err(command_error(cause)));
            return;
        }
        let clean = flags.contains(DeviceDescFlags::NO_RESYNC);
        let knows = crate::legacy::WITH_CLEAN_RESIZE;
        let old = |peer: &NodeId| self.is_established(*peer) && self.spoken(*peer) < knows;
        if let Some(peer) = self.connections.keys().find(|peer| clean && old(peer)) {
            let error = CommandError {
                code: ErrorCode::ERR_INVALID_REQUEST,
                text: format!("the protocol version of node {peer} resyncs what a resize adds"),
            };
            self.answer(id, Err(error));
            return;
        }
        self.probe_disk(
            volume,
            ProbeFor::Command(ResizeWish {
                id,
                user_sectors,
                flags,
            }),
        );
    }

    /// Whether this node could take part in a resize now.
    pub(crate) fn check_resize(&self, volume: VolumeNr) -> Result<(), Refusal> {
        let disk = self.state.disk(volume);
        let attached = self.devices.get(&volume).and_then(|d| d.attached());
        let (Some(attached), true) = (
            attached,
            disk >= DiskState::Inconsistent && disk != DiskState::DUnknown,
        ) else {
            let text = format!("volume {volume} has no disk on this node");
            return Err(refusal(ErrorCode::ERR_NO_DISK, text));
        };
        self.check_no_resync(volume)?;
        if !attached.may_resize() {
            let text = format!("volume {volume} is being resized or detached");
            return Err(refusal(ErrorCode::IN_TRANSIENT_STATE, text));
        }
        Ok(())
    }

    fn check_no_resync(&self, volume: VolumeNr) -> Result<(), Refusal> {
        let busy = self
            .state
            .devices
            .get(&volume)
            .is_some_and(|d| d.peers.values().any(|p| p.repl > ReplState::Established));
        if busy {
            let text = format!("volume {volume} is being resynchronised or verified");
            return Err(refusal(ErrorCode::ERR_RESIZE_RESYNC, text));
        }
        Ok(())
    }

    /// A change of the disk is complete: what it was for goes on.
    pub(crate) fn resized(&mut self, volume: VolumeNr, after: AfterResize) {
        match after {
            AfterResize::Nothing => {}
            AfterResize::Probed(ProbeFor::Command(wish)) => self.probed_for_command(volume, wish),
            AfterResize::Probed(ProbeFor::Vote { tid, initiator }) => {
                let limit = self.own_limit(volume);
                let limit = limit.filter(|_| !planted!(self, LimitNotVoted));
                let limit = limit.unwrap_or(NO_LIMIT_SECTORS);
                let current = self.twopc.current.as_mut();
                if let Some(t) = current.filter(|t| t.tid == tid && t.initiator == initiator)
                    && let Some(vote) = t.resize.as_mut()
                {
                    vote.probing = false;
                    vote.add(NodeMask::EMPTY, limit);
                    self.twopc_progress();
                }
            }
            AfterResize::Probed(ProbeFor::Connect { peer, room }) => {
                self.looked_at_connect(volume, peer, room);
            }
            AfterResize::Probed(ProbeFor::Follow { peer, flags, late }) => {
                self.follow_sizes(volume, peer, flags, late);
            }
            AfterResize::Sized {
                command,
                sides,
                tell,
                flags,
            } => self.sized(volume, command, &sides, tell, flags),
        }
        let idle = |d: &crate::device::Device| d.attached().is_none_or(|disk| disk.may_resize());
        if let Some(device) = self.devices.get_mut(&volume).filter(|d| idle(d))
            && let Some((sectors, area, after)) = device.growth.queued.pop_front()
        {
            self.change_size(volume, sectors, area, after);
        } else if let Some(device) = self.devices.get_mut(&volume).filter(|d| idle(d))
            && let Some((peer, flags)) = device.growth.follow.take()
        {
            self.probe_disk(
                volume,
                ProbeFor::Follow {
                    peer,
                    flags,
                    late: true,
                },
            );
        }
    }

    /// A connected peer has another size, and this node's disk is being changed: it follows after that.
    pub(crate) fn follow_later(&mut self, volume: VolumeNr, peer: NodeId, flags: DeviceDescFlags) {
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.follow = Some((peer, flags));
        }
    }

    /// The disk went while something was under way.
    pub(crate) fn resize_failed(&mut self, volume: VolumeNr, after: AfterResize) {
        let text = format!("volume {volume} lost its disk while it was being resized");
        let cause = refusal(ErrorCode::ERR_NO_DISK, text);
        match after {
            AfterResize::Nothing => {}
            AfterResize::Probed(wanted) => self.probe_failed(wanted, cause),
            AfterResize::Sized { command, .. } => {
                if let Some(id) = command {
                    self.answer(id, Err(command_error(cause)));
                }
            }
        }
        if let Some(device) = self.devices.get_mut(&volume) {
            let queued = core::mem::take(&mut device.growth.queued);
            device.growth.sources_for = NodeMask::EMPTY;
            device.growth.early.clear();
            device.growth.follow = None;
            for (_, _, after) in queued {
                self.resize_failed(volume, after);
            }
        }
    }

    /// Queues a change of the size behind the one under way; says whether it did.
    pub(crate) fn queue_size(
        &mut self,
        volume: VolumeNr,
        sectors: u64,
        area: NewArea,
        after: &AfterResize,
    ) -> bool {
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let busy = device.attached().is_some_and(|disk| disk.resize.is_some());
        if busy {
            let entry = (sectors, area, after.clone());
            device.growth.queued.push_back(entry);
        }
        busy
    }

    fn probed_for_command(&mut self, volume: VolumeNr, wish: ResizeWish) {
        let limit = self.own_limit(volume).unwrap_or(0);
        let checked = self.check_resize(volume).and_then(|()| {
            if wish.user_sectors > limit {
                let text = format!(
                    "{} sectors are wanted, but this node's disk has room for {limit}",
                    wish.user_sectors
                );
                return Err(refusal(ErrorCode::ERR_DISK_TOO_SMALL, text));
            }
            Ok(())
        });
        if let Err(cause) = checked {
            self.answer(wish.id, Err(command_error(cause)));
            return;
        }
        let legacy = self.established_peers().iter().any(|p| self.is_legacy(p));
        if legacy {
            self.resize_without_twopc(volume, &wish);
            return;
        }
        let kind = WishKind::Resize {
            volume,
            user_sectors: wish.user_sectors,
            flags: wish.flags,
        };
        self.wish(kind, Some(wish.id));
    }

    // Two-phase commit.

    /// What this node puts into a transaction of its own.
    pub(crate) fn own_resize_vote(&self, kind: &WishKind) -> Option<ResizeVote> {
        let WishKind::Resize {
            volume,
            user_sectors,
            flags,
        } = kind
        else {
            return None;
        };
        Some(ResizeVote {
            user_sectors: *user_sectors,
            flags: *flags,
            max_sectors: self.own_limit(*volume).unwrap_or(NO_LIMIT_SECTORS),
            diskful_primaries: self.diskful_primary(*volume),
            probing: false,
        })
    }

    /// The vote of a participant, still without its limit.
    pub(crate) fn resize_vote(
        &self,
        volume: VolumeNr,
        packet: &TwopcResize,
    ) -> Result<ResizeVote, Refusal> {
        self.check_no_resync(volume)?;
        let device = self.devices.get(&volume);
        let attached = device.is_some_and(|d| d.attached().is_some());
        let transient = device.and_then(|d| d.disk.as_ref()).is_some_and(|disk| {
            !matches!(disk.phase, DiskPhase::Attached { command: None }) || !disk.may_resize()
        });
        if transient {
            let text = format!("volume {volume} is being attached, detached or resized");
            return Err(refusal(ErrorCode::IN_TRANSIENT_STATE, text));
        }
        Ok(ResizeVote {
            user_sectors: packet.user_size.0,
            flags: packet.dds_flags,
            max_sectors: NO_LIMIT_SECTORS,
            diskful_primaries: self.diskful_primary(volume),
            probing: attached,
        })
    }

    /// The participant's disk is looked at before it votes.
    pub(crate) fn probe_for_vote(&mut self, volume: VolumeNr, tid: u32, initiator: NodeId) {
        self.probe_disk(volume, ProbeFor::Vote { tid, initiator });
    }

    fn diskful_primary(&self, volume: VolumeNr) -> NodeMask {
        if self.state.role == Role::Primary && self.state.disk(volume) > DiskState::Diskless {
            NodeMask::of(self.node_id)
        } else {
            NodeMask::EMPTY
        }
    }

    /// The size that all who voted can have (semantics.md, 22.2).
    fn agreed_size(&mut self, t: &Transaction, vote: &ResizeVote) -> u64 {
        let volume = t.volume;
        let mut max = vote.max_sectors;
        let mut unknown = Vec::new();
        for node in (0..NodeId::COUNT).map(NodeId) {
            if node == self.node_id || t.reachable.contains(node) {
                continue;
            }
            let sizes = self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&node))
                .and_then(|pd| pd.sizes);
            match sizes {
                Some(sizes) if sizes.disk_sectors != 0 => max = max.min(sizes.disk_sectors),
                Some(_) => {}
                None if planted!(self, AbsentSizeIgnored) => {}
                None if self.slot_seen_with_disk(volume, node) => unknown.push(node),
                None => {}
            }
        }
        let assumes = DeviceDescFlags::ASSUME_UNCONNECTED_PEER_HAS_SPACE;
        if !unknown.is_empty() && !vote.flags.contains(assumes) {
            let stored = match self.stored_size(volume).0 {
                0 => self.devices.get(&volume).map_or(0, |d| d.size_sectors),
                stored => stored,
            };
            if stored != 0 && stored < max {
                max = stored;
                self.log(
                    Level::Warn,
                    None,
                    Some(volume),
                    format!(
                        "node {} is not connected, and nobody knows how large its disk is: the \
                         volume does not grow; use --assume-peer-has-space if it has room",
                        unknown[0]
                    ),
                );
            }
        }
        if vote.user_sectors != 0 && vote.user_sectors <= max {
            return vote.user_sectors;
        }
        if vote.user_sectors != 0 {
            self.log(
                Level::Warn,
                None,
                Some(volume),
                format!(
                    "{} sectors were asked for, but not all nodes have more than {max}",
                    vote.user_sectors
                ),
            );
        }
        max
    }

    /// All have agreed to this node's resize.
    pub(crate) fn decide_resize(&mut self, t: &Transaction, wish: &Wish, vote: &ResizeVote) {
        let size = self.agreed_size(t, vote);
        let current = self.devices.get(&t.volume).map_or(0, |d| d.size_sectors);
        if size == current {
            self.abort(t);
            self.end_wish(wish, Ok(Answer::NothingToDo));
            return;
        }
        if size < current && size != vote.user_sectors {
            self.abort(t);
            let text = format!(
                "volume {} would shrink from {current} to {size} sectors; name the size if that \
                 is wanted",
                t.volume
            );
            self.end_wish(wish, Err(refusal(ErrorCode::ERR_IMPLICIT_SHRINK, text)));
            return;
        }
        if let Err(cause) = self.check_resize(t.volume) {
            self.abort(t);
            self.end_wish(wish, Err(cause));
            return;
        }
        let to = self.established_peers();
        let outcome = TwopcOutcome {
            head: self.head(t, to.with(self.node_id).complement()),
            primary_nodes: vote.diskful_primaries,
            word: size,
        };
        for peer in to.iter() {
            self.send(peer, Stream::Data, t.volume, Packet::TwopcCommit(outcome));
        }
        self.resize_committed(t, vote, size, vote.diskful_primaries, wish.command);
    }

    /// The cluster has agreed on a size: this node takes it.
    pub(crate) fn resize_committed(
        &mut self,
        t: &Transaction,
        vote: &ResizeVote,
        size: u64,
        diskful_primaries: NodeMask,
        command: Option<CommandId>,
    ) {
        let volume = t.volume;
        let limit = self.own_limit(volume).unwrap_or(NO_LIMIT_SECTORS);
        let connected = self.established_peers();
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if size > limit {
            // Every node has said what it can have, so this is a fault of the initiator.
            self.log(
                Level::Error,
                None,
                Some(volume),
                format!("{size} sectors were agreed on, but the disk has room for {limit}"),
            );
            return;
        }
        for (peer, pd) in &mut device.peers {
            if let Some(sizes) = pd.sizes.as_mut().filter(|_| connected.contains(*peer)) {
                if sizes.disk_sectors != 0 {
                    sizes.disk_sectors = sizes.disk_sectors.max(size);
                }
                sizes.wanted_sectors = vote.user_sectors;
                sizes.current_sectors = size;
            }
        }
        let grows = size > device.size_sectors;
        if let Some(disk) = device.attached_mut() {
            disk.options.size_sectors = (vote.user_sectors != 0).then_some(vote.user_sectors);
        }
        let area = NewArea::of(vote.flags);
        let mut sides = Vec::new();
        if grows && area == NewArea::Resync {
            for peer in connected.iter() {
                let side = self.side_towards(peer, t, diskful_primaries);
                let ahead = side == Some(Side::Source) && self.is_target_already(volume, peer);
                if let Some(side) = side.filter(|_| ahead || self.copies_new_area(volume, peer)) {
                    sides.push((peer, side));
                }
            }
        }
        if let Some(device) = self.devices.get_mut(&volume) {
            device.growth.sources_for = sides
                .iter()
                .filter(|(_, side)| *side == Side::Source)
                .map(|(peer, _)| *peer)
                .collect();
        }
        let after = AfterResize::Sized {
            command,
            sides,
            tell: Tell::Nobody,
            flags: vote.flags,
        };
        self.change_size(volume, size, area, after);
    }

    /// Who copies the new area to whom (semantics.md, 22.3).
    fn side_towards(&self, peer: NodeId, t: &Transaction, primaries: NodeMask) -> Option<Side> {
        match (primaries.contains(self.node_id), primaries.contains(peer)) {
            (true, false) => Some(Side::Source),
            (false, true) => Some(Side::Target),
            (true, true) if self.node_id < peer => Some(Side::Source),
            (true, true) => Some(Side::Target),
            (false, false) if !primaries.is_empty() && !planted!(self, NewAreaTwoSources) => None,
            (false, false) if t.parents.contains(peer) => Some(Side::Target),
            (false, false) if t.children.contains(peer) => Some(Side::Source),
            (false, false) => None,
        }
    }

    /// Both disks hold the same good data, so that only the new area has to be copied.
    fn copies_new_area(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let p = self.state.peer_device(volume, peer);
        let has_disk = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .and_then(|pd| pd.sizes)
            .is_some_and(|sizes| sizes.disk_sectors != 0);
        has_disk
            && p.repl == ReplState::Established
            && p.disk == DiskState::UpToDate
            && self.state.disk(volume) == DiskState::UpToDate
    }

    /// The commit has come to this peer by a shorter way: it is target of the new area already.
    pub(crate) fn is_target_already(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let last = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .and_then(|pd| pd.last_state);
        self.state.peer_device(volume, peer).repl == ReplState::Established
            && self.state.disk(volume) == DiskState::UpToDate
            && last.is_some_and(|state| {
                state.repl == ReplState::SyncTarget && state.disk == DiskState::Inconsistent
            })
    }

    /// The commit of a resize has made this peer a source, and did not come here.
    fn is_source_already(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let said = device.and_then(|d| d.peers.get(&peer)?.last_state);
        said.is_some_and(|state| {
            state.repl == ReplState::SyncSource && state.pdsk == DiskState::Inconsistent
        })
    }

    /// An agreed size is durable here.
    fn sized(
        &mut self,
        volume: VolumeNr,
        command: Option<CommandId>,
        sides: &[(NodeId, Side)],
        tell: Tell,
        flags: DeviceDescFlags,
    ) {
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        for peer in self.established_peers().iter() {
            match tell {
                Tell::Nobody => {}
                Tell::Ask(grown) => {
                    if grown {
                        self.send_uuids(peer, volume, UuidFlags::empty());
                    }
                    self.send_sizes_with(peer, volume, 0, flags);
                }
                Tell::Answer => self.send_sizes_with(peer, volume, size, flags),
            }
        }
        for (peer, side) in sides {
            self.start_new_area(volume, *peer, *side);
        }
        if tell == Tell::Answer {
            self.compare_grown(volume, size);
        }
        if let Some(id) = command {
            self.answer(id, Ok(Answer::Done));
        }
        let early = match self.devices.get_mut(&volume) {
            Some(device) => {
                device.growth.sources_for = NodeMask::EMPTY;
                core::mem::take(&mut device.growth.early)
            }
            None => Vec::new(),
        };
        for item in early {
            if self.link(item.peer) == Some(item.link) && !planted!(self, EarlyRequestsLost) {
                self.source_request(item.peer, volume, item.request, item.after, item.wanted);
            }
        }
    }

    /// A bitmap or a request of another length than the volume's: the peer may have heard sooner of a
    /// change that comes to this node as well, or not yet of one that it made. Both connect anew then,
    /// which begins with equal sizes. Says whether it was so.
    pub(crate) fn sizes_differ(&mut self, peer: NodeId, volume: VolumeNr) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let size = device.size_sectors;
        let told = device.peers.get(&peer).and_then(|pd| pd.sizes);
        let other = told.is_some_and(|sizes| ![0, size].contains(&sizes.current_sectors));
        let may_grow = self.own_limit(volume).is_some_and(|limit| limit > size);
        if !self.is_lockstep(peer) || !(other || may_grow) {
            return false;
        }
        let text = format!("the peer has another size than {size} sectors: connecting anew");
        self.log(Level::Info, Some(peer), Some(volume), text);
        self.drop_connection(peer, ConnState::NetworkFailure);
        true
    }

    /// A handshake in which this node has outgrown what either side told the other: it knew a third
    /// node's disk, which the peer may not know. It is told in the next one, since a bitmap of
    /// another length cannot be exchanged.
    pub(crate) fn outgrown(&self, peer: NodeId) -> Option<Refusal> {
        if !self.is_lockstep(peer) {
            return None;
        }
        let (volume, device) = self.devices.iter().find(|(_, device)| {
            device.peers.len() > 1
                && device.attached().is_some()
                && device.peers.get(&peer).is_some_and(|pd| {
                    pd.sizes.is_some_and(|sizes| {
                        sizes.disk_sectors != 0
                            && device.size_sectors > sizes.current_sectors.max(pd.sent_sectors)
                    })
                })
        })?;
        let text = format!(
            "volume {volume} has grown to {} sectors, which node {peer} does not know yet",
            device.size_sectors
        );
        Some(refusal(ErrorCode::HANDSHAKE_RETRY, text))
    }

    /// In a handshake with a node that is larger: this node has room as well, and would follow, but
    /// for what it knows of a third one. That may be old, so the third one is asked, and the
    /// handshake tried again: bitmaps of two lengths cannot be exchanged.
    pub(crate) fn held_back(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        size: u64,
    ) -> Option<Refusal> {
        if self.state.conn(peer) != ConnState::Connecting || !self.is_lockstep(peer) {
            return None;
        }
        let room = self.own_limit(volume)?;
        let device = self.devices.get(&volume)?;
        let wish = device.attached()?.options.size_sectors;
        let theirs = device.peers.get(&peer)?.sizes?.current_sectors;
        if size >= theirs || theirs > room.min(wish.unwrap_or(u64::MAX)) {
            return None;
        }
        let by: Vec<NodeId> = device
            .peers
            .iter()
            .filter(|(node, pd)| {
                let known = pd.sizes.map_or(0, |sizes| sizes.disk_sectors);
                self.is_established(**node)
                    && self.is_lockstep(**node)
                    && (1..theirs).contains(&known)
                    && !self.is_fresh(pd)
            })
            .map(|(node, _)| *node)
            .collect();
        for node in &by {
            self.send_sizes_with(*node, volume, 0, DeviceDescFlags::empty());
        }
        let by = by.first()?;
        let text = format!("volume {volume}: node {by} has no room for {theirs} sectors");
        Some(refusal(ErrorCode::HANDSHAKE_RETRY, text))
    }

    /// What a peer's disk has room for was heard a moment ago.
    fn is_fresh(&self, pd: &PeerDevice) -> bool {
        self.now - pd.sizes_at < FRESH_SIZES
    }

    /// Sectors that a peer is told as those of this node's disk. Who connects is to come no larger than
    /// the nodes that it does not reach have room for, if they said so just now.
    pub(crate) fn room_for(&self, peer: NodeId, volume: VolumeNr) -> u64 {
        let Some(device) = self.devices.get(&volume) else {
            return 0;
        };
        let own = device.attached().map_or(0, LocalDisk::usable_sectors);
        if self.kernel_is_held_back(peer, volume) {
            // No larger than this node.
            return device.size_sectors.min(own);
        }
        if self.state.conn(peer) != ConnState::Connecting || !self.is_lockstep(peer) {
            return own;
        }
        let others = device.peers.iter().filter(|(node, pd)| {
            **node != peer && self.is_established(**node) && self.is_fresh(pd)
        });
        let rooms = others.filter_map(|(_, pd)| pd.sizes.map(|sizes| sizes.disk_sectors));
        let room = rooms.filter(|room| *room != 0).fold(own, u64::min);
        room.max(device.size_sectors.min(own))
    }

    /// This node follows others, or they follow it: with whoever is as large now, the new area is
    /// compared. What both know from packets alone may be over: one of them may have become target
    /// of a third node that it met.
    fn compare_grown(&mut self, volume: VolumeNr, size: u64) {
        for peer in self.established_peers().iter() {
            let equal = self
                .devices
                .get(&volume)
                .and_then(|d| d.peers.get(&peer))
                .and_then(|pd| pd.sizes)
                .is_some_and(|sizes| sizes.current_sectors == size && sizes.disk_sectors != 0);
            if equal && self.is_lockstep(peer) {
                self.compare_marks(volume, peer);
            }
        }
    }

    /// The resync of the new area starts; both sides know without asking, and their marks are equal.
    fn start_new_area(&mut self, volume: VolumeNr, peer: NodeId, side: Side) {
        let repl = self.state.peer_device(volume, peer).repl;
        let whole = self.state.disk(volume) == DiskState::UpToDate;
        if repl != ReplState::Established || !whole || !self.stays_with(volume, peer, side) {
            return;
        }
        let legacy = self.is_legacy(peer);
        self.log(
            Level::Info,
            Some(peer),
            Some(volume),
            format!("the new area is resynchronised; this node is {side:?}"),
        );
        match side {
            Side::Source => {
                let change = Change::new()
                    .repl(volume, peer, ReplState::SyncSource)
                    .peer_disk(volume, peer, DiskState::Inconsistent);
                self.hard_change(change);
                if legacy {
                    self.legacy_source_starts(volume, peer);
                }
                self.before_resync_source(volume, peer, ResyncGate::Started);
            }
            Side::Target => {
                let repl = if legacy {
                    ReplState::WfSyncUuid
                } else {
                    ReplState::SyncTarget
                };
                self.hard_change(Change::new().repl(volume, peer, repl));
                if self.is_kernel(peer)
                    && let Some(device) = self.devices.get_mut(&volume)
                {
                    device.growth.unsaid = Some((peer, self.now + SOURCE_SAYS_SO));
                }
                if !legacy {
                    self.before_resync_target(volume, peer, ResyncGate::Started);
                }
            }
        }
    }

    /// A kernel sends the commit of a resize before it follows itself, and closes the connection when it is asked for what
    /// lies behind its end. Its state says when it is source.
    pub(crate) fn source_may_be_smaller(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let unsaid = device.and_then(|d| d.growth.unsaid);
        unsaid.is_some_and(|(source, until)| source == peer && self.now < until)
    }

    /// The peer's state has come.
    pub(crate) fn source_says_so(&mut self, volume: VolumeNr, peer: NodeId, repl: ReplState) {
        if let Some(device) = self.devices.get_mut(&volume)
            && matches!(repl, ReplState::SyncSource | ReplState::PausedSyncS)
        {
            device.growth.unsaid.take_if(|(source, _)| *source == peer);
        }
    }

    /// A target was faster than this source: its request is kept. Says whether it was.
    pub(crate) fn keep_early_request(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        request: BlockRequest,
        after: (NodeId, Dagtag),
        wanted: Wanted,
    ) -> bool {
        let link = self.link(peer);
        let repl = self.state.peer_device(volume, peer).repl;
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let (Some(link), true, ReplState::Established) =
            (link, device.growth.sources_for.contains(peer), repl)
        else {
            return false;
        };
        if device.growth.early.len() >= EARLY_REQUESTS {
            return false;
        }
        device.growth.early.push(EarlyRequest {
            peer,
            link,
            request,
            after,
            wanted,
        });
        true
    }

    // Peers that follow P_SIZES.

    fn resize_without_twopc(&mut self, volume: VolumeNr, wish: &ResizeWish) {
        let primary = self.state.role == Role::Primary
            && self.state.disk(volume) == DiskState::UpToDate
            || self.established_peers().iter().any(|peer| {
                self.peer_role(peer) == Role::Primary
                    && self.state.peer_device(volume, peer).disk == DiskState::UpToDate
            });
        if !primary {
            let text = "with a peer of DRBD 8.4 one node has to be Primary with good data";
            let cause = refusal(ErrorCode::ERR_NO_PRIMARY, text.into());
            self.answer(wish.id, Err(command_error(cause)));
            return;
        }
        let current = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        if let Some(device) = self.devices.get_mut(&volume) {
            if let Some(disk) = device.attached_mut() {
                disk.options.size_sectors = (wish.user_sectors != 0).then_some(wish.user_sectors);
            }
            for pd in device.peers.values_mut() {
                if let Some(sizes) = pd.sizes.as_mut() {
                    sizes.wanted_sectors = wish.user_sectors;
                }
            }
            device.growth.pending = Some(wish.flags);
        }
        let size = self.new_size(volume).unwrap_or(current);
        if size < current && size != wish.user_sectors {
            let text = format!("volume {volume} would shrink from {current} to {size} sectors");
            let cause = refusal(ErrorCode::ERR_IMPLICIT_SHRINK, text);
            self.answer(wish.id, Err(command_error(cause)));
            return;
        }
        let after = AfterResize::Sized {
            command: Some(wish.id),
            sides: Vec::new(),
            tell: Tell::Ask(size > current),
            flags: wish.flags,
        };
        if size == current {
            // The peer may have grown, too: it answers with what it has.
            self.resized(volume, after);
        } else {
            self.change_size(volume, size, NewArea::of(wish.flags), after);
        }
    }

    /// Sizes of an established peer: they may ask this node to follow. Says whether they are dealt
    /// with here.
    pub(crate) fn sizes_changed(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        before: Option<PeerSizes>,
        flags: DeviceDescFlags,
    ) -> bool {
        if self.state.conn(peer) != ConnState::Connected {
            return false;
        }
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let current = device.size_sectors;
        let Some(before) = before.filter(|_| current != 0) else {
            return false;
        };
        let Some(now) = device.peers.get(&peer).and_then(|pd| pd.sizes) else {
            return false;
        };
        let pending = device.growth.pending;
        let Some(disk) = device.attached_mut() else {
            return false;
        };
        // What a peer says that has just attached its disk is agreed on as at a connect.
        let had_disk = before.disk_sectors != 0 && now.disk_sectors != 0;
        let grew = had_disk && now.disk_sectors > before.disk_sectors;
        let resized = grew
            || had_disk
                && (now.wanted_sectors != before.wanted_sectors
                    || now.current_sectors != before.current_sectors);
        if now.current_sectors == current
            && !grew
            && let Some(flags) = pending
        {
            device.growth.pending = None;
            self.follow_starts(volume, peer, flags);
            return true;
        }
        if !resized {
            return false;
        }
        if now.wanted_sectors != before.wanted_sectors {
            disk.options.size_sectors = (now.wanted_sectors != 0).then_some(now.wanted_sectors);
        }
        self.probe_disk(
            volume,
            ProbeFor::Follow {
                peer,
                flags,
                late: false,
            },
        );
        true
    }

    /// The peer has another size, and this node's disk is known: it follows.
    fn follow_sizes(&mut self, volume: VolumeNr, peer: NodeId, flags: DeviceDescFlags, late: bool) {
        if self.state.conn(peer) != ConnState::Connected {
            // Lost meanwhile: the next handshake decides.
            return;
        }
        let current = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        let wanted = disk.and_then(|d| d.options.size_sectors);
        let shrinks = self.shrinks_with(peer, volume);
        let size = shrinks.or(self.new_size(volume)).unwrap_or(current);
        let here = |d: &Device| d.peers.get(&peer)?.sizes.map(|s| s.has_room(current));
        let has_room =
            self.devices.get(&volume).and_then(here) == Some(true) && !planted!(self, RoomIsDenied);
        if size < current && wanted != Some(size) && (late || has_room && shrinks.is_none()) {
            // It tells what it has now when it has changed itself; if it does not, the next handshake decides. With
            // another peer that has less room, that one's does.
            return;
        }
        if size < current && wanted != Some(size) && shrinks.is_none() {
            let text = format!(
                "volume {volume}: node {peer} allows only {size} sectors, but {current} are in \
                 use here; enlarge its disk, or make the volume smaller here"
            );
            self.go_standalone(peer, text);
            return;
        }
        let flags = match self.devices.get_mut(&volume) {
            Some(device) => device.growth.pending.take().unwrap_or(flags),
            None => flags,
        };
        let mut sides = Vec::new();
        // Lockstep peers compare: each may have changed since the other's last packet. One that has followed a resize
        // of which this node has not heard waits as source already.
        let waits = self.is_source_already(volume, peer) && !planted!(self, WaitingSourceCompared);
        let grows = size > current && NewArea::of(flags) == NewArea::Resync;
        if grows && (waits || !self.is_lockstep(peer)) && self.copies_new_area(volume, peer) {
            let side = match waits {
                true => Side::Target,
                false => self.side_by_roles(peer),
            };
            sides.push((peer, side));
        }
        let after = AfterResize::Sized {
            command: None,
            sides,
            tell: Tell::Answer,
            flags,
        };
        if size == current {
            self.resized(volume, after);
        } else {
            self.change_size(volume, size, NewArea::of(flags), after);
        }
    }

    /// The 8.4 peer has followed this node's resize.
    fn follow_starts(&mut self, volume: VolumeNr, peer: NodeId, flags: DeviceDescFlags) {
        let marked = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .and_then(|disk| disk.io.slot(peer).map(|slot| disk.io.bitmap.count(slot)))
            .unwrap_or(0);
        if marked > 0 && NewArea::of(flags) == NewArea::Resync && self.copies_new_area(volume, peer)
        {
            let side = self.side_by_roles(peer);
            self.start_new_area(volume, peer, side);
        }
    }

    pub(crate) fn peer_role(&self, peer: NodeId) -> Role {
        let conn = self.state.connections.get(&peer);
        conn.map_or(Role::Unknown, |c| c.peer_role)
    }

    fn side_by_roles(&self, peer: NodeId) -> Side {
        let theirs = self.peer_role(peer) == Role::Primary;
        match (self.state.role == Role::Primary, theirs) {
            (true, false) => Side::Source,
            (false, true) => Side::Target,
            (true, true) | (false, false) => {
                let first = if self.is_legacy(peer) {
                    self.resolves_conflicts(peer)
                } else {
                    self.node_id < peer
                };
                if first { Side::Source } else { Side::Target }
            }
        }
    }
}

/// `resize` in the terms of the wire.
pub(crate) fn flags_of(assume_clean: bool, assume_peer_has_space: bool) -> DeviceDescFlags {
    let mut flags = DeviceDescFlags::empty();
    flags.set(DeviceDescFlags::NO_RESYNC, assume_clean);
    flags.set(
        DeviceDescFlags::ASSUME_UNCONNECTED_PEER_HAS_SPACE,
        assume_peer_has_space,
    );
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vote_keeps_the_smallest_limit_and_ignores_none() {
        let mut vote = ResizeVote {
            user_sectors: 0,
            flags: flags_of(true, false),
            max_sectors: NO_LIMIT_SECTORS,
            diskful_primaries: NodeMask::EMPTY,
            probing: false,
        };
        vote.add(NodeMask::EMPTY, 0);
        vote.add(NodeMask::of(NodeId(2)), 800);
        vote.add(NodeMask::EMPTY, 900);
        assert_eq!(vote.words(), (NodeMask::of(NodeId(2)), 800));
        assert_eq!(NewArea::of(vote.flags), NewArea::Clean);
    }
}
