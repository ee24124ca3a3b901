//! State changes that need the consent of an 8.4 peer (wire.md, 8.1): one request, one reply.
//!
//! They run as a transaction of `twopc.rs` whose only other party is the peer.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::packet::StateRv;
use lockstep_format::wire::{
    ConnState, DiskNumbering, DiskState, Packet, ReplState, Role, StateChange, StateWord,
};

use crate::command::ErrorCode;
use crate::event::Stream;
use crate::report::Level;
use crate::resource::Resource;
use crate::transition::Change;
use crate::twopc::WishKind;
use crate::validity::Refusal;

impl Resource {
    /// The established 8.4 peer. There is no other connection then.
    pub(crate) fn legacy_peer(&self) -> Option<NodeId> {
        self.connections
            .values()
            .find(|c| c.is_legacy() && self.is_established(c.peer))
            .map(|c| c.peer)
    }

    /// Asks an 8.4 peer for its consent; false if the change needs none.
    pub(crate) fn legacy_ask(
        &mut self,
        peer: NodeId,
        kind: &WishKind,
        change: StateChange,
    ) -> bool {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        self.twopc.legacy.clear();
        match kind {
            WishKind::Disconnect { .. } => {
                let packet = Packet::ConnStChgReq(in_84_numbers(change));
                self.send(peer, Stream::Data, VolumeNr(0), packet);
                return true;
            }
            WishKind::Promote { .. } => {
                for volume in volumes {
                    self.twopc.legacy.push_back((volume, in_84_numbers(change)));
                }
            }
            WishKind::Detach(volume) => {
                let change = StateChange {
                    mask: StateWord::DISK,
                    val: StateWord::default()
                        .with_field(StateWord::DISK, number(DiskState::Failed)),
                };
                self.twopc.legacy.push_back((*volume, change));
            }
            WishKind::Resync { volume, .. } => {
                self.twopc.legacy.push_back((*volume, change));
            }
            WishKind::Connect(_)
            | WishKind::ForceUpToDate(_)
            | WishKind::Demote { .. }
            | WishKind::Attach(_)
            | WishKind::Resize { .. }
            | WishKind::Empty => return false,
        }
        self.legacy_ask_next(peer)
    }

    /// A full resync was asked for, and the answer has not come: whoever agreed takes a state without that
    /// resync for its end.
    pub(crate) fn legacy_asks_for_resync(&self, volume: VolumeNr) -> bool {
        let wish = self.twopc.current.as_ref().and_then(|t| t.wish.as_ref());
        wish.is_some_and(
            |wish| matches!(wish.kind, WishKind::Resync { volume: of, .. } if of == volume),
        )
    }

    /// It does not come about: who pauses resyncs is told now.
    fn legacy_tells_pauses(&mut self, peer: NodeId) {
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let pd = self.peer_device_mut(volume, peer);
            if pd.is_some_and(|pd| core::mem::take(&mut pd.pause_untold)) {
                let state = self.state.clone();
                self.send_state(peer, volume, &state);
            }
        }
    }

    /// The next request of a change of several volumes; false if there is none.
    fn legacy_ask_next(&mut self, peer: NodeId) -> bool {
        let Some((volume, change)) = self.twopc.legacy.pop_front() else {
            return false;
        };
        self.send(peer, Stream::Data, volume, Packet::StateChgReq(change));
        true
    }

    /// Packets of 8.4 that have no counterpart in 9; returns the packet if it is another one.
    pub(crate) fn legacy_packet(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        packet: Packet,
    ) -> Option<Packet> {
        match packet {
            Packet::StateChgReply(rv) | Packet::ConnStChgReply(rv) => self.legacy_reply(peer, rv),
            Packet::StateChgReq(change) => self.legacy_request(peer, Some(volume), change),
            Packet::ConnStChgReq(change) => self.legacy_request(peer, None, change),
            Packet::SyncUuid(uuid) => self.sync_uuid_received(peer, volume, uuid),
            other => return Some(other),
        }
        None
    }

    fn legacy_reply(&mut self, peer: NodeId, rv: StateRv) {
        let Some(t) = self.twopc.current.as_ref() else {
            return;
        };
        if t.wish.is_none() || !t.waiting.contains(peer) {
            return;
        }
        if rv.is_success() && self.legacy_ask_next(peer) {
            return;
        }
        self.twopc.legacy.clear();
        if let Some(t) = self.twopc.current.as_mut() {
            t.waiting.remove(peer);
            if rv == StateRv::CONCURRENT_ST_CHG {
                t.retry = true;
            } else if !rv.is_success() {
                t.no = true;
            }
        }
        if !rv.is_success() {
            let text = format!("the peer refused the state change with code {}", rv.0);
            self.log(Level::Info, Some(peer), None, text);
            self.legacy_tells_pauses(peer);
        }
        self.twopc_progress();
    }

    /// A change that the peer wants: of a volume, or of the connection.
    fn legacy_request(&mut self, peer: NodeId, volume: Option<VolumeNr>, change: StateChange) {
        if !self.is_established(peer) {
            return;
        }
        let busy = self.twopc.current.is_some() && self.resolves_conflicts(peer);
        let wanted = if busy {
            Err(Refusal {
                code: ErrorCode::CONCURRENT_ST_CHG,
                text: "a state change of this node is under way".into(),
            })
        } else {
            self.legacy_wanted(peer, volume, change)
        };
        let result = wanted.and_then(|wanted| {
            self.check_change(&wanted)?;
            Ok(wanted)
        });
        let rv = match &result {
            Ok(_) => StateRv::SUCCESS,
            Err(refusal) => {
                let text = format!("refused a state change of the peer: {}", refusal.text);
                self.log(Level::Info, Some(peer), volume, text);
                StateRv(refusal.code.0)
            }
        };
        // The answer first: a disconnect takes the connection with it.
        let reply = match volume {
            Some(_) => Packet::StateChgReply(rv),
            None => Packet::ConnStChgReply(rv),
        };
        let header = volume.unwrap_or(VolumeNr(0));
        self.send(peer, Stream::Control, header, reply);
        if let Ok(wanted) = result {
            self.hard_change(wanted);
            let forced = change.mask.has(StateWord::ROLE) && change.mask.has(StateWord::DISK);
            if let (true, Some(volume)) = (forced, volume)
                && self.state.disk(volume) == DiskState::Inconsistent
                && let Some(pd) = self.peer_device_mut(volume, peer)
            {
                // Its state will follow, with the generation that was made for it.
                pd.consider_resync = true;
            }
        }
    }

    /// What the peer's change is on this side (wire.md, 4.3, the mirror rule).
    fn legacy_wanted(
        &self,
        peer: NodeId,
        volume: Option<VolumeNr>,
        change: StateChange,
    ) -> Result<Change, Refusal> {
        let unsupported = |what: &str| Refusal {
            code: ErrorCode::NOT_SUPPORTED,
            text: format!("{what} is not supported with an 8.4 peer"),
        };
        let (mask, val) = (change.mask, change.val);
        let mut wanted = Change::new();
        if mask.has(StateWord::ROLE) {
            let role = val.role().unwrap_or(Role::Unknown);
            let two = self.may_both_be_primary(peer);
            if role == Role::Primary && self.state.role == Role::Primary && !two {
                return Err(Refusal {
                    code: ErrorCode::TWO_PRIMARIES,
                    text: "this node is Primary, and two Primaries are not allowed".into(),
                });
            }
            wanted = wanted.peer_role(peer, role);
        }
        let volumes: Vec<VolumeNr> = match volume {
            Some(volume) if self.devices.contains_key(&volume) => alloc::vec![volume],
            Some(volume) => {
                return Err(Refusal {
                    code: ErrorCode::UNKNOWN_ERROR,
                    text: format!("there is no volume {volume}"),
                });
            }
            None => self.devices.keys().copied().collect(),
        };
        if mask.has(StateWord::CONN) {
            let field = val.field(StateWord::CONN);
            match (volume, field) {
                // 8.3 asks for it as for a change of its one volume.
                (_, DISCONNECTING) => {
                    wanted = wanted.conn(peer, ConnState::TearDown);
                    wanted.graceful = true;
                }
                (Some(volume), STARTING_SYNC_S) => {
                    wanted = wanted.repl(volume, peer, ReplState::StartingSyncT);
                }
                (Some(volume), STARTING_SYNC_T) => {
                    wanted = wanted.repl(volume, peer, ReplState::StartingSyncS);
                }
                (Some(volume), VERIFY_S) => {
                    wanted = wanted.repl(volume, peer, ReplState::VerifyT);
                }
                (_, other) => return Err(unsupported(&format!("connection state {other}"))),
            }
        }
        for volume in volumes {
            if mask.has(StateWord::DISK) {
                let disk = val.disk(DiskNumbering::V84).unwrap_or(DiskState::DUnknown);
                wanted = wanted.peer_disk(volume, peer, disk);
            }
            if mask.has(StateWord::PDSK) {
                match val.pdsk(DiskNumbering::V84) {
                    Some(DiskState::Outdated) => {
                        wanted = wanted.disk(volume, DiskState::Outdated);
                        wanted.ignore_impossible_outdate = true;
                    }
                    other => return Err(unsupported(&format!("disk state {other:?} here"))),
                }
            }
        }
        Ok(wanted)
    }
}

const DISCONNECTING: u32 = ConnState::Disconnecting as u32;
const STARTING_SYNC_S: u32 = ReplState::StartingSyncS as u32;
const STARTING_SYNC_T: u32 = ReplState::StartingSyncT as u32;
const VERIFY_S: u32 = ReplState::VerifyS as u32;

const fn number(disk: DiskState) -> u32 {
    disk.number(DiskNumbering::V84)
}

/// A change in 9's numbers with the disk states in those of 8.4, which expects its own.
fn in_84_numbers(change: StateChange) -> StateChange {
    let mut val = change.val;
    for field in [StateWord::DISK, StateWord::PDSK] {
        if change.mask.has(field)
            && let Some(disk) = DiskState::from_number(val.field(field), DiskNumbering::V9)
        {
            val = val.with_field(field, number(disk));
        }
    }
    StateChange {
        mask: change.mask,
        val,
    }
}
