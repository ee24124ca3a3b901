//! Two Primaries: where they are allowed, and what that means for their generations
//! (semantics.md, 7.1). What becomes of their writes is in `data/conflict.rs`.

use alloc::format;

use lockstep_format::units::{NodeId, Uuid, VolumeNr};
use lockstep_format::wire::{DiskState, Role, UuidFlags};

use crate::command::ErrorCode;
use crate::compare::{Direction, Rule, Strategy, Verdict};
use crate::connection::Connection;
use crate::device::{Device, PeerDevice};
use crate::options::AfterSplitBrain;
use crate::resource::Resource;
use crate::state::DeviceState;
use crate::twopc::Transaction;
use crate::uuid_spread::SpreadStep;
use crate::uuids::PeerUuids;
use crate::validity::Refusal;

impl Resource {
    /// Both ends of the connection may write.
    pub(crate) fn both_may_write(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .is_some_and(|c| c.net.allow_two_primaries)
    }

    /// Some connection lets both its ends write.
    pub(crate) fn is_shared(&self) -> bool {
        self.connections.values().any(|c| c.net.allow_two_primaries)
    }

    /// This node and the peer may be Primary at the same time. A third disk gets the writes of both,
    /// and what it does with them is known of nodes of this project only. A peer of 8.3 knows no
    /// retried writes.
    pub(crate) fn may_both_be_primary(&self, peer: NodeId) -> bool {
        let Some(conn) = self.connections.get(&peer) else {
            return false;
        };
        if !conn.net.allow_two_primaries || crate::legacy::is_old(conn.protocol()) {
            return false;
        }
        let mut others = self.connections.keys().filter(|other| **other != peer);
        let alone = others.all(|other| self.is_client(*other));
        alone
            || !self.is_client(peer)
                && !self.is_client_here()
                && self.freezes_for(peer)
                && self.third_disks_follow()
    }

    /// Nodes that are met speak this project's dialect.
    fn third_disks_follow(&self) -> bool {
        let kernel = |peer: &NodeId| self.is_kernel(*peer) || self.is_legacy(*peer);
        !self.connections.keys().any(kernel)
    }

    /// This node has no disk and never gets one.
    fn is_client_here(&self) -> bool {
        let mut devices = self.devices.values();
        devices.any(|d| d.intentional_diskless)
    }

    /// What speaks against a promotion beside these Primaries. With a third disk both have whole disks of
    /// their own, and whoever may have to follow one of them follows both: a node apart from one of them
    /// would outdate itself, and might be the only one that has everything.
    pub(crate) fn may_join(&self, t: &Transaction) -> Result<(), Refusal> {
        let others = t.primary_nodes.without(self.node_id);
        let refuse = |text: &str| {
            Err(Refusal {
                code: ErrorCode::TWO_PRIMARIES,
                text: text.into(),
            })
        };
        if others.count() > 1 {
            return refuse(
                "two other nodes are Primary, and more than two Primaries are not supported",
            );
        }
        let third = |peer: &NodeId| !others.contains(*peer) && !self.is_client(*peer);
        let two = |peer| self.may_both_be_primary(peer);
        if !others.iter().all(two) && !planted!(self, FarPrimaryOverlooked) {
            let beside_third = self.connections.keys().any(third)
                && others.iter().all(|peer| self.both_may_write(peer));
            if beside_third && !others.iter().all(|peer| self.freezes_for(peer)) {
                return refuse(
                    "beside a third disk two Primaries need fencing resource-and-stonith and a fence-peer \
                     handler",
                );
            }
            if beside_third && !self.third_disks_follow() {
                return refuse(
                    "beside a third disk and a kernel node there can be no two Primaries",
                );
            }
            return refuse("another node is Primary, and two Primaries are not allowed");
        }
        if others.is_empty() || !self.connections.keys().any(third) {
            return Ok(());
        }
        let whole = |d: &DeviceState| {
            let theirs = |peer| d.peers.get(&peer).map(|p| p.disk);
            d.disk == DiskState::UpToDate
                && others
                    .iter()
                    .all(|peer| theirs(peer) == Some(DiskState::UpToDate))
        };
        if !self.state.devices.values().all(whole) {
            return refuse(
                "beside a third disk the disks of both Primaries have to be UpToDate before the second \
                 one is promoted",
            );
        }
        let marked =
            |volume: &VolumeNr| others.iter().any(|peer| self.marked_towards(*volume, peer));
        if self.devices.keys().any(marked) {
            // Two Primaries are not compared any more, and each reads its own disk.
            return refuse(
                "what is marked between the disks of both Primaries has to be copied first",
            );
        }
        if !t.weak_nodes.intersection(t.reachable).is_empty() {
            return refuse("some node is not connected with both nodes that would be Primary");
        }
        Ok(())
    }

    /// Blocks are marked between two whole disks under Primaries, after a resync from a third node: that one
    /// tells soon that they are equal, and none of the two has to become the other one's target.
    pub(crate) fn is_left_to_third(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        result: &Verdict,
    ) -> bool {
        let up_to_date = |disk| disk == DiskState::UpToDate;
        let left = result.rule == Rule::MarkedBlocks
            && result.strategy == Strategy::SplitBrainDisconnect
            && self.connections.len() > 1
            && self.same_current(volume, peer)
            && up_to_date(self.state.disk(volume))
            && self.state.role == Role::Primary
            && self.peer_role(peer) == Role::Primary;
        if left {
            self.watch_left_marks(volume);
        }
        left
    }

    /// After the connect the Primaries are neighbours of each other, and this node, if it is one, may
    /// be one beside them (semantics.md, 10.5).
    pub(crate) fn primaries_meet(&self, t: &Transaction) -> bool {
        let beside = |peer| self.may_both_be_primary(peer);
        let others = t.primary_nodes.without(self.node_id);
        let apart = t.primary_nodes.intersection(t.weak_nodes);
        let allowed = self.state.role != Role::Primary || others.iter().all(beside);
        allowed && apart.is_empty() && t.primary_nodes.count() < 3
    }

    /// A node that is met while two are Primary, and may have a disk, has to be one beside which they may be.
    pub(crate) fn third_disk(&self, peer: NodeId) -> Result<(), Refusal> {
        let another = |n: &&NodeId| **n != peer && self.peer_role(**n) == Role::Primary;
        let mut others = self.connections.keys().filter(another);
        let apart = others.any(|other| !self.may_both_be_primary(*other));
        if self.state.role == Role::Primary && apart && !self.is_client(peer) {
            return Err(Refusal {
                code: ErrorCode::TWO_PRIMARIES,
                text: format!("two nodes are Primary, and node {peer} may have a disk as well"),
            });
        }
        Ok(())
    }

    /// The source of a resync is a Primary, and there is another one that this node is not connected to: its
    /// writes do not come here. If it is gone meanwhile, the next two-phase commit shows that.
    pub(crate) fn follows_one_of_two(&mut self, source: NodeId) -> bool {
        let far = self.both_may_write(source)
            && self.peer_role(source) == Role::Primary
            && self.is_weak(&self.state);
        if far {
            self.schedule_empty_twopc();
        }
        far
    }

    /// This node is one of two Primaries that see each other.
    pub(crate) fn is_beside_primary(&self) -> bool {
        self.state.role == Role::Primary
            && self
                .established_peers()
                .iter()
                .any(|peer| self.both_may_write(peer) && self.peer_role(peer) == Role::Primary)
    }

    /// The policies demote the peer, a Primary that has lost after a split brain. What it said in this handshake may be of
    /// before that: the connection is tried again.
    pub(crate) fn wait_for_loser(&self, peer: NodeId, refusal: &mut Refusal) {
        let demoted = |c: &Connection| c.net.after_sb_2pri == AfterSplitBrain::CallPriLostAfterSb;
        let won = |device: &Device| {
            let verdict = device.peers.get(&peer).and_then(|pd| pd.verdict.as_ref());
            let direction = verdict.and_then(|verdict| verdict.strategy?.direction());
            direction == Some(Direction::Source)
        };
        if refusal.code == ErrorCode::TWO_PRIMARIES
            && self.state.role == Role::Primary
            && self.connections.get(&peer).is_some_and(demoted)
            && self.devices.values().any(won)
        {
            refusal.code = ErrorCode::HANDSHAKE_RETRY;
        }
    }

    /// The configuration gives the peer no bitmap, so it never has a disk.
    pub(crate) fn is_client(&self, peer: NodeId) -> bool {
        let mut devices = self.devices.values();
        devices.all(|d| d.peers.get(&peer).is_some_and(|pd| !pd.options.bitmap))
    }

    /// A peer is Primary as well, or may be: it may go on without this node, whose disk is not
    /// whole, before that is noticed here.
    pub(crate) fn others_may_write(&self) -> bool {
        let peers = self.connections.keys().copied();
        peers
            .filter(|peer| self.both_may_write(*peer))
            .any(|peer| self.peer_role(peer) != Role::Secondary)
    }

    /// A generation that this Primary has planned comes before one that a Lockstep peer, Primary
    /// as well, plans at the same time. One that is made of the planned one comes after it.
    pub(crate) fn precedes(&self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) -> bool {
        let told = self.new_uuid.as_ref().is_some_and(|new| {
            // One that is only being noted may still be given up without a word.
            matches!(new.step, SpreadStep::Confirm | SpreadStep::Writing)
                && new.plans.get(&volume).is_some_and(|plan| {
                    plan.confirm.contains(peer) && !plan.written && !set.knows(plan.uuid)
                })
        });
        told && self.node_id < peer
            && self.is_lockstep(peer)
            && self.state.role == Role::Primary
            && self.peer_role(peer) == Role::Primary
    }

    /// The other Primary drops this one, but a third node may have taken it. As long as the own plan is
    /// none but a plan, that one would be the newer of both; afterwards it is an ancestor.
    pub(crate) fn note_dropped(&mut self, volume: VolumeNr, dropped: Uuid) {
        let new = self.new_uuid.as_mut();
        let plan = new.and_then(|new| new.plans.get_mut(&volume));
        let disk = self.devices.get_mut(&volume).and_then(|d| d.attached_mut());
        let (Some((base, next)), Some(disk)) = (plan.and_then(|p| p.sets.as_mut()), disk) else {
            return;
        };
        next.push_retired_current(dropped);
        if disk.generations == *base {
            base.note_planned(dropped);
            disk.generations = base.clone();
        } else {
            disk.generations.push_retired_current(dropped);
        }
        self.write_superblock(volume);
    }

    /// Two Primaries plan a generation at the same time, and this third node has that of the lower node id
    /// already: the other one will be dropped.
    pub(crate) fn will_be_dropped(&self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let own = device.current_uuid();
        let first = |other: &NodeId| {
            *other < peer
                && self.is_lockstep(*other)
                && self.is_established(*other)
                && self.peer_role(*other) == Role::Primary
                && (self.peer_uuids(volume, *other)).is_some_and(|u| u.current.same_generation(own))
        };
        self.state.role == Role::Secondary
            && self.both_may_write(peer)
            && self.is_lockstep(peer)
            && self.peer_role(peer) == Role::Primary
            && !set.knows(own)
            && self.connections.keys().any(first)
    }

    /// The peer has not said that it has the generation of this node, which may be on its way to it. Compared now, it
    /// would become the target of a resync, perhaps as a Primary.
    pub(crate) fn may_follow_yet(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let pd = device.and_then(|d| d.peers.get(&peer));
        pd.is_some_and(|pd| pd.provisional.is_some()) || !self.same_current(volume, peer)
    }

    /// A node that is to take a generation which this Primary plans has taken another one meanwhile, from a Primary
    /// that may never tell it here. It becomes an ancestor of what is planned next.
    pub(crate) fn note_taken_elsewhere(&mut self, peer: NodeId, volume: VolumeNr, set: &PeerUuids) {
        let planned = set.flags.contains(UuidFlags::NEW_DATAGEN);
        if planned || !self.is_shared() || self.peer_role(peer) == Role::Primary {
            return;
        }
        let plan = self.new_uuid.as_ref().and_then(|new| {
            let told = matches!(new.step, SpreadStep::Noting | SpreadStep::Confirm);
            new.plans.get(&volume).filter(|_| told)
        });
        let Some(plan) = plan.filter(|plan| plan.confirm.contains(peer)) else {
            return;
        };
        let Some((base, _)) = &plan.sets else {
            return;
        };
        let elsewhere =
            !set.knows(plan.uuid) && set.knows(base.current) && !base.knows(set.current);
        if !elsewhere {
            return;
        }
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations.note_planned(set.current);
            self.write_superblock(volume);
        }
    }

    /// Two Primaries that lost nothing but their connection (`compare_marks.rs`). What a verify
    /// found between them stays marked.
    pub(crate) fn both_stayed(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        let pd = device.and_then(|d| d.peers.get(&peer));
        let theirs = |pd: &PeerDevice| {
            pd.uuids
                .as_ref()
                .is_some_and(|set| set.flags.contains(UuidFlags::RECONNECT))
        };
        self.may_both_be_primary(peer)
            && self.state.role == Role::Primary
            && self.peer_role(peer) == Role::Primary
            && pd.is_some_and(|pd| pd.reconnect && theirs(pd) && !pd.io.verify.found)
    }
}
