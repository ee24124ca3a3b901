//! The verdict on one volume: in the handshake of a connection, and in that of a volume that was
//! added while the connection stands (wire.md, 5.9).
//!
//! Two Lockstep nodes agree on an added volume without a transaction. Whoever adds it, or attaches
//! its disk, *presents* it; a peer that does not know it skips that. Who knows it *answers*, and its
//! state word then has the disk of the peer as it was presented. Each decides with the two answers,
//! so both decide from the same words: the one that has an answer when it gives its own at once, the
//! other one when that comes. If anything changed here in between, or a node begins anew, nothing
//! is decided: the connection is made again, and its transaction holds still what this cannot.
//!
//! A kernel takes the first words that it gets, so they count as an answer.

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, PeerState, ReplState, Role, UuidFlags};

use crate::command::ErrorCode;
use crate::compare;
use crate::device::ConnectVerdict;
use crate::report::Level;
use crate::resource::Resource;
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;
use crate::uuids::PeerUuids;
use crate::validity::Refusal;

/// How long a volume that cannot be presented now waits until it is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// What this node said of a volume that a connected peer does not replicate yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Presented {
    role: Role,
    disk: DiskState,
    quorum: bool,
    exposed: Uuid,
    uuids: Option<PeerUuids>,
    /// The peer knows the volume and has got it.
    answers: bool,
}

impl Resource {
    /// The sync decision of a volume in the connect handshake, once both sides' packets are known.
    pub(crate) fn evaluate(&mut self, peer: NodeId, volume: VolumeNr) {
        if self.state.conn(peer) != ConnState::Connecting {
            return;
        }
        let Some(pd) = self.devices.get(&volume).and_then(|d| d.peers.get(&peer)) else {
            return;
        };
        if !pd.sent_handshake {
            return;
        }
        let Some(theirs) = pd.last_state else { return };
        let verdict = self.verdict_on(peer, volume, theirs);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.verdict = verdict;
        }
        self.legacy_connect(peer);
    }

    fn verdict_on(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
    ) -> Option<ConnectVerdict> {
        let pd = self.devices.get(&volume)?.peers.get(&peer)?;
        let has_bitmap = pd.options.bitmap;
        let mut verdict = ConnectVerdict {
            repl: ReplState::Established,
            peer_role: theirs.role,
            peer_disk: theirs.disk,
            susp_peer: theirs.aftr_isp || theirs.user_isp,
            own_disk: None,
            strategy: None,
            reconciliation: false,
            clear_own_slot: false,
            refusal: pd.refusal.clone(),
        };
        let diskful =
            |disk: DiskState| disk >= DiskState::Inconsistent && disk != DiskState::DUnknown;
        if !has_bitmap && diskful(theirs.disk) {
            verdict.refusal.get_or_insert(Refusal {
                code: ErrorCode::HANDSHAKE_DISCONNECT,
                text: alloc::format!("node {peer} is configured diskless here, but it has a disk"),
            });
        } else if diskful(self.state.disk(volume)) && diskful(theirs.disk) {
            self.decide_sync(peer, volume, theirs, compare::Phase::Connect, &mut verdict);
        } else {
            self.decide_diskless(peer, volume, theirs, &mut verdict);
        }
        if let Some(refusal) = self.refuse_lost_cache(peer, volume, theirs) {
            verdict.refusal.get_or_insert(refusal);
        }
        Some(verdict)
    }

    /// What a volume's verdict adds to the change.
    pub(crate) fn verdict_change(
        &self,
        change: Change,
        peer: NodeId,
        volume: VolumeNr,
        verdict: &ConnectVerdict,
    ) -> Change {
        let mut change = change
            .peer_role(peer, verdict.peer_role)
            .repl(volume, peer, verdict.repl)
            .peer_disk(volume, peer, verdict.peer_disk)
            .pause_peer(volume, peer, verdict.susp_peer);
        if self.is_legacy(peer) && verdict.repl == ReplState::Established {
            // With two nodes nobody else can have newer data.
            if verdict.peer_disk == DiskState::Consistent {
                change = change.peer_disk(volume, peer, DiskState::UpToDate);
            }
            if self.state.disk(volume) == DiskState::Consistent {
                change = change.disk(volume, DiskState::UpToDate);
            }
        }
        if let Some(disk) = verdict.own_disk {
            change = change.disk(volume, disk);
        }
        change
    }

    /// The volume was added, or has its disk: peers that are connected and do not replicate it
    /// hear of it.
    pub(crate) fn present_volume(&mut self, volume: VolumeNr) {
        for peer in self.established_peers().iter() {
            if self.is_off(peer, volume) {
                self.present(peer, volume, None);
            }
        }
    }

    /// Sends a volume's packets; `answered` is the disk that the peer presented.
    fn present(&mut self, peer: NodeId, volume: VolumeNr, answered: Option<DiskState>) {
        let disk = self.state.disk(volume);
        if !self.is_lockstep(peer) && (answered.is_some() || disk == DiskState::Diskless) {
            self.send_sync_param(peer, volume);
        }
        self.send_sizes(peer, volume);
        self.mark_unsent(volume, peer);
        self.send_uuids(peer, volume, UuidFlags::empty());
        let knows = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        let knows = !self.is_lockstep(peer) && knows.is_some_and(|l| l.not_here.contains(&volume));
        let mut presented = self.own_presentation(peer, volume);
        presented.answers = answered.is_some() || knows;
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sent_disk = disk;
            pd.presented = Some(presented);
        }
        let mut packet = self.state_packet(peer, volume, &self.state);
        packet.pdsk = answered.unwrap_or(DiskState::DUnknown);
        let packet = lockstep_format::wire::Packet::State(packet);
        self.send(peer, crate::event::Stream::Data, volume, packet);
    }

    fn own_presentation(&self, peer: NodeId, volume: VolumeNr) -> Presented {
        let state = self.state.devices.get(&volume);
        let device = self.devices.get(&volume);
        Presented {
            role: self.state.role,
            disk: self.state.disk(volume),
            quorum: state.is_some_and(|d| d.have_quorum),
            exposed: device.map_or(Uuid::ZERO, |d| d.exposed_uuid),
            uuids: match self.state.disk(volume) > DiskState::Attaching {
                true => self.own_uuids(peer, volume, UuidFlags::empty()),
                false => None,
            },
            answers: false,
        }
    }

    /// What was said of the volume still holds.
    fn as_presented(&mut self, peer: NodeId, volume: VolumeNr) -> bool {
        self.mark_unsent(volume, peer);
        let mut now = self.own_presentation(peer, volume);
        let device = self.devices.get(&volume);
        let said = device.and_then(|d| d.peers.get(&peer)?.presented.as_ref());
        said.is_some_and(|said| {
            now.answers = said.answers;
            // A disk that is being read says nothing yet.
            if now.disk.max(said.disk) <= DiskState::Attaching {
                now.disk = said.disk;
            }
            *said == now
        })
    }

    /// Nothing is under way that would change what is said.
    fn may_present(&self, volume: VolumeNr) -> bool {
        self.new_uuid.is_none()
            && !self.new_uuid_wanted
            && !matches!(
                self.state.disk(volume),
                DiskState::Negotiating | DiskState::Detaching | DiskState::Failed
            )
    }

    /// The state of a volume that is not replicated over this connection, or was not at the peer.
    /// False if there is nothing special about it.
    pub(crate) fn added_volume_state(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
    ) -> bool {
        let off = self.is_off(peer, volume);
        let lockstep = self.is_lockstep(peer);
        let anew = theirs.repl == ReplState::Off && theirs.pdsk == DiskState::DUnknown;
        if !off {
            let special =
                lockstep && theirs.repl == ReplState::Off && theirs.conn == ConnState::Connected;
            if special && anew {
                // It took the volume away and added it again, or its disk came before its verdict.
                self.begin_anew(peer, volume);
            }
            return special;
        }
        if lockstep && theirs.repl > ReplState::Off {
            self.begin_anew(peer, volume);
            return true;
        }
        if !self.may_present(volume) && planted!(self, AddedNotTriedAgain) {
            return true;
        }
        if !self.may_present(volume) {
            self.timers.set(Timer::Added(peer), self.now + RETRY);
            return true;
        }
        if !lockstep {
            if !self.has_answered(peer, volume) {
                self.present(peer, volume, Some(theirs.disk));
            }
            self.join(peer, volume, theirs);
            return true;
        }
        let own = self.state.disk(volume);
        let of_now = theirs.pdsk == own || theirs.pdsk.max(own) <= DiskState::Attaching;
        if anew {
            self.present(peer, volume, Some(theirs.disk));
        } else if of_now {
            if !self.has_answered(peer, volume) {
                self.present(peer, volume, Some(theirs.disk));
            }
            self.join(peer, volume, theirs);
        }
        // Else it answers what was said before the disk came: the next answer counts.
        true
    }

    fn has_answered(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let device = self.devices.get(&volume);
        device
            .and_then(|d| d.peers.get(&peer)?.presented.as_ref())
            .is_some_and(|said| said.answers)
    }

    /// The peer does not replicate this volume, whatever the state of the connection.
    pub(crate) fn is_off(&self, peer: NodeId, volume: VolumeNr) -> bool {
        self.state.peer_device(volume, peer).repl == ReplState::Off
    }

    /// What could not be presented before is tried again.
    pub(crate) fn present_again(&mut self, peer: NodeId) {
        if self.state.conn(peer) != ConnState::Connected {
            return;
        }
        let volumes: alloc::vec::Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let device = self.devices.get(&volume);
            let heard = device.and_then(|d| d.peers.get(&peer)?.last_state);
            let off = self.is_off(peer, volume);
            let Some(theirs) = heard.filter(|_| off) else {
                continue;
            };
            if !self.is_lockstep(peer) {
                self.added_volume_state(peer, volume, theirs);
            } else if self.may_present(volume) {
                self.present(peer, volume, None);
            } else if !planted!(self, AddedNotTriedAgain) {
                self.timers.set(Timer::Added(peer), self.now + RETRY);
            }
        }
    }

    /// A peer with a disk of this volume is connected and not yet heard enough to replicate it.
    pub(crate) fn joining_peer(&self, volume: VolumeNr) -> Option<NodeId> {
        let device = self.devices.get(&volume)?;
        let joins = |peer: &NodeId| {
            let heard = device.peers.get(peer).and_then(|pd| pd.last_state);
            self.state.conn(*peer) == ConnState::Connected
                && self.state.peer_device(volume, *peer).repl == ReplState::Off
                && heard.is_some_and(|theirs| theirs.disk > DiskState::Diskless)
        };
        device.peers.keys().copied().find(joins)
    }

    /// Both sides' words about the volume are here.
    fn join(&mut self, peer: NodeId, volume: VolumeNr, theirs: PeerState) {
        if !self.as_presented(peer, volume) {
            self.begin_anew(peer, volume);
            return;
        }
        let Some(verdict) = self.verdict_on(peer, volume, theirs) else {
            return;
        };
        let change = self.verdict_change(Change::new(), peer, volume, &verdict);
        let outcome = match verdict.refusal.clone() {
            Some(refusal) => Err(refusal),
            None => self.check_change(&change).map(|_| ()),
        };
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.presented = None;
            pd.refusal = None;
        }
        if let Err(refusal) = outcome {
            self.handshake_refused(peer, &refusal);
            return;
        }
        self.apply_verdict(volume, peer, &verdict);
        self.hard_change(change);
    }

    /// Only a transaction can tell now: the connection is made again.
    fn begin_anew(&mut self, peer: NodeId, volume: VolumeNr) {
        let text = "the volume changed while it joined the connection; connecting again";
        self.log(Level::Info, Some(peer), Some(volume), text.into());
        self.drop_connection(peer, ConnState::NetworkFailure);
    }
}
