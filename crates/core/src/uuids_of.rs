//! Questions about generations: this node's, and what is known of the peers' (semantics.md, 12).

use alloc::vec::Vec;

use lockstep_format::disk::v09::PeerFlags;
use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::packet::{CurrentUuid, PeerDagtag};
use lockstep_format::wire::{ConnState, DiskState, Features, Packet, ReplState, Role, UuidFlags};

use crate::connection::Connection;
use crate::device::PeerDevice;
use crate::event::Stream;
use crate::generation::{self, PeerView, SendContext};
use crate::resource::Resource;
use crate::state::{PeerDeviceState, ReplSets, State};
use crate::uuid_spread::{NewUuid, SpreadStep};
use crate::uuids::{PeerUuids, is_real};

impl Resource {
    pub(crate) fn set_slot_uuid(&mut self, volume: VolumeNr, peer: NodeId, peer_current: Uuid) {
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            disk.generations
                .full_resync_starts_as_source(peer, peer_current);
            self.write_superblock(volume);
        }
    }

    pub(crate) fn retire_slot_uuid(&mut self, volume: VolumeNr, peer: NodeId) {
        let forgets = planted!(self, RetiredForgotten);
        if let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) {
            let history = disk.generations.history;
            disk.generations.retire_slot(peer);
            if forgets {
                disk.generations.history = history;
            }
            self.write_superblock(volume);
        }
    }

    /// The peer runs its handler before a resync whose target has finished: when the handler ends, it
    /// has heard of that end, and waits for nobody.
    pub(crate) fn source_is_late(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let device = self.devices.get(&volume);
        device
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.source_is_late)
    }

    pub(crate) fn peer_device_mut(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
    ) -> Option<&mut PeerDevice> {
        self.devices.get_mut(&volume)?.peers.get_mut(&peer)
    }

    /// The peer's UUIDs as last reported on this link or the one before.
    pub(crate) fn peer_uuids(&self, volume: VolumeNr, peer: NodeId) -> Option<&PeerUuids> {
        self.devices.get(&volume)?.peers.get(&peer)?.uuids.as_ref()
    }

    /// The peer reported the generation that this node is at.
    pub(crate) fn same_current(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let own = device.current_uuid();
        self.peer_uuids(volume, peer)
            .is_some_and(|u| u.current.same_generation(own) && !u.current.is_zero())
    }

    /// A resync ended here while this node met the peer, which was told the UUIDs of before: the generations that came
    /// with the data are missing there. Between Lockstep nodes that go on without a resync.
    pub(crate) fn told_as_target(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let pd = self.devices.get(&volume).and_then(|d| d.peers.get(&peer));
        let told = pd.and_then(|pd| pd.sent_uuids.as_ref());
        self.state.disk(volume) == DiskState::UpToDate
            && self.state.peer_device(volume, peer).repl == ReplState::Established
            && self.is_lockstep(peer)
            && told.is_some_and(|set| set.flags.contains(UuidFlags::SYNC_TARGET))
    }

    pub(crate) fn is_stable_set(&self, uuids: &PeerUuids) -> bool {
        uuids.flags.contains(UuidFlags::STABLE)
    }

    pub(crate) fn peer_got_stable(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.peer_uuids(volume, peer)
            .is_some_and(|u| u.flags.contains(UuidFlags::GOT_STABLE))
            && !self.marked_towards(volume, peer)
    }

    /// The news that peers are stable have had their effect (semantics.md, 4.2, rule 11): what lowers this
    /// node's disk later is not undone by them. Those of one peer and volume, or all.
    pub(crate) fn forget_stable_news(&mut self, of: Option<(NodeId, VolumeNr)>) {
        for (volume, device) in &mut self.devices {
            for (peer, pd) in &mut device.peers {
                if let Some(set) = pd.uuids.as_mut()
                    && of.is_none_or(|of| of == (*peer, *volume))
                {
                    set.flags.remove(UuidFlags::GOT_STABLE);
                }
            }
        }
    }

    /// Either side has marked blocks towards the other.
    pub(crate) fn marked_towards(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.out_of_sync_blocks(volume, peer) > 0
            || self
                .peer_uuids(volume, peer)
                .is_some_and(|u| u.dirty_bits > 0)
    }

    /// Marked blocks in the peer's slot.
    pub(crate) fn out_of_sync_blocks(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        self.devices
            .get(&volume)
            .and_then(|d| d.attached())
            .and_then(|d| d.io.slot(peer).map(|slot| d.io.bitmap.count(slot)))
            .unwrap_or(0)
    }

    pub(crate) fn slot_uuid(&self, volume: VolumeNr, peer: NodeId) -> Uuid {
        self.devices
            .get(&volume)
            .and_then(|d| d.attached())
            .map_or(Uuid::ZERO, |d| d.generations.slot(peer).bitmap_uuid)
    }

    /// The last thing that the own disk's history knows is a generation that was announced, and
    /// perhaps never made.
    pub(crate) fn announced_last(&self, volume: VolumeNr) -> bool {
        self.devices
            .get(&volume)
            .and_then(|d| d.attached())
            .is_some_and(|d| d.generations.history[0].0 & Uuid::PRIMARY_BIT != 0)
    }

    /// A resync copies to the own disk right now.
    pub(crate) fn has_active_source(&self, volume: VolumeNr) -> bool {
        let state = self.state.devices.get(&volume);
        state.is_some_and(|d| d.peers.values().any(|p| p.repl == ReplState::SyncTarget))
    }

    pub(crate) fn slot_is_outdated(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.slot_flags(volume, peer).contains(PeerFlags::OUTDATED)
    }

    pub(crate) fn slot_seen_with_disk(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.slot_flags(volume, peer)
            .contains(PeerFlags::DEVICE_SEEN)
    }

    pub(crate) fn slot_flags(&self, volume: VolumeNr, peer: NodeId) -> PeerFlags {
        self.devices
            .get(&volume)
            .and_then(|d| d.attached())
            .map_or(PeerFlags::empty(), |d| d.generations.slot(peer).flags)
    }

    /// Nodes that quorum counts, this one left out (semantics.md, 11.1).
    pub(crate) fn quorum_nodes(&self, volume: VolumeNr, with_disk: bool) -> Vec<NodeId> {
        let Some(device) = self.devices.get(&volume) else {
            return Vec::new();
        };
        let Some(disk) = device.attached().filter(|_| with_disk) else {
            return device.peers.keys().copied().collect();
        };
        (0..NodeId::COUNT)
            .map(NodeId)
            .filter(|n| *n != self.node_id)
            .filter(|n| {
                disk.generations.exists(*n)
                    || disk
                        .generations
                        .slot(*n)
                        .flags
                        .contains(PeerFlags::DEVICE_SEEN)
            })
            .collect()
    }

    pub(crate) fn peer_is_quorate(&self, volume: VolumeNr, peer: NodeId) -> bool {
        self.devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.quorate)
    }

    /// The peer's last state, also one in a handshake, says that it has quorum for some volume.
    pub(crate) fn is_quorate_anywhere(&self, peer: NodeId) -> bool {
        let mut states = (self.devices.values()).filter_map(|d| d.peers.get(&peer)?.last_state);
        states.any(|state| state.quorum)
    }

    pub(crate) fn any_peer_quorate(&self) -> bool {
        self.devices.values().any(|d| {
            d.peers
                .iter()
                .any(|(n, pd)| pd.quorate && self.state.conn(*n) == ConnState::Connected)
        })
    }

    /// A Primary without a disk in use, which may be just coming back, serves another generation
    /// than this disk's.
    pub(crate) fn diskless_primary_of_other_generation(&self, volume: VolumeNr) -> bool {
        self.state.connections.iter().any(|(peer, c)| {
            c.peer_role == Role::Primary
                && self.state.peer_device(volume, *peer).disk <= DiskState::Failed
                && !self.same_current(volume, *peer)
        })
    }

    /// The peer's data are older than what this node, which lost its disk, has shown.
    pub(crate) fn is_left_behind(&self, volume: VolumeNr, peer: NodeId) -> bool {
        let (Some(device), Some(set)) = (
            self.devices.get(&volume),
            self.peer_uuids(volume, peer).map(|set| set.current),
        ) else {
            return false;
        };
        let is_old = |old: Uuid| old.same_generation(set);
        let kept_here = device.kept_alone.is_some_and(|(kept, _)| is_old(kept));
        let behind = match device.attached() {
            None => device.left_behind.iter().copied().any(is_old),
            // On its way out.
            Some(disk) if self.state.disk(volume) < DiskState::Inconsistent => {
                kept_here || disk.generations.older().any(is_old)
            }
            Some(_) => false,
        };
        behind && !set.same_generation(device.exposed_uuid)
    }

    /// The peer has become whole beside another node, and neither knows the generation that this Primary without a
    /// disk has served meanwhile.
    pub(crate) fn lacks_exposed(&self, volume: VolumeNr, peer: NodeId, role: Role) -> bool {
        let exposed = self.devices.get(&volume).map(|d| d.exposed_uuid);
        let (Some(exposed), Some(set)) = (exposed, self.peer_uuids(volume, peer)) else {
            return false;
        };
        role == Role::Primary
            && is_real(exposed)
            && is_real(set.current)
            && self.is_lockstep(peer)
            && !self.is_legacy(peer)
            && !set.knows(exposed)
            && !planted!(self, OldCopyServed)
    }

    /// What the flags of the metadata make of the disk (semantics.md, 8.2).
    pub(crate) fn disk_state_from_metadata(&self, volume: VolumeNr) -> DiskState {
        let Some(disk) = self.devices.get(&volume).and_then(|d| d.attached()) else {
            return DiskState::Diskless;
        };
        let peers: Vec<(NodeId, PeerDeviceState)> = self
            .state
            .devices
            .get(&volume)
            .map(|d| d.peers.iter().map(|(n, p)| (*n, *p)).collect())
            .unwrap_or_default();
        let found = generation::disk_state_of(
            disk.generations.flags,
            self.may_be_up_to_date(volume, peers),
        );
        if found == DiskState::Outdated && planted!(self, OutdatedTrusted) {
            return DiskState::UpToDate;
        }
        if found > DiskState::Outdated && self.missed_what_was_exposed(volume) {
            return DiskState::Outdated;
        }
        found
    }

    /// The metadata call the disk good; only a generation that the disk does not know speaks against it.
    pub(crate) fn only_missed_exposed(&self, volume: VolumeNr) -> bool {
        let disk = self.devices.get(&volume).and_then(|d| d.attached());
        disk.is_some_and(|d| {
            generation::disk_state_of(d.generations.flags, true) == DiskState::UpToDate
        }) && self.missed_what_was_exposed(volume)
            && !self.reconcile_hold(volume)
    }

    /// The disk is good, and a Primary without one vouches for its generation: that Primary need not
    /// be fenced off.
    pub(crate) fn is_whole_beside_primary(&self, volume: VolumeNr) -> bool {
        let flags = self
            .devices
            .get(&volume)
            .and_then(|d| d.attached())
            .map(|disk| disk.generations.flags);
        flags.is_some_and(|flags| {
            generation::disk_state_of(flags, true) == DiskState::UpToDate
                && !self.missed_what_was_exposed(volume)
                && !self.reconcile_hold(volume)
        })
    }

    /// Since this node lost this disk it has used a peer's data of a generation that the disk does
    /// not know. A Primary refuses such a disk; after its demotion it is at least known as old.
    fn missed_what_was_exposed(&self, volume: VolumeNr) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let exposed = device.exposed_uuid;
        device.attached().is_some_and(|disk| {
            is_real(exposed) && exposed != Uuid::JUST_CREATED && !disk.generations.knows(exposed)
        })
    }

    /// No peer can have newer data, as far as fencing is configured (semantics.md, 8.2).
    pub(crate) fn may_be_up_to_date(
        &self,
        volume: VolumeNr,
        peers: Vec<(NodeId, PeerDeviceState)>,
    ) -> bool {
        let Some(device) = self.devices.get(&volume) else {
            return false;
        };
        let Some(disk) = device.attached() else {
            return false;
        };
        if self.diskless_primary_of_other_generation(volume)
            || self.reconcile_hold(volume)
            || self.is_left_by_another(volume, &peers)
        {
            return false;
        }
        let disk_of = |node: NodeId| {
            peers
                .iter()
                .find(|(n, _)| *n == node)
                .map_or(DiskState::DUnknown, |(_, p)| {
                    if p.repl == ReplState::Off {
                        DiskState::DUnknown
                    } else {
                        p.disk
                    }
                })
        };
        let diskless = device
            .peers
            .iter()
            .filter(|(_, pd)| !pd.options.bitmap)
            .map(|(n, _)| *n)
            .collect();
        disk.generations.may_be_up_to_date(disk_of, diskless)
    }

    /// A connected node that is whole has left this disk behind in its generation, and has not been compared since.
    /// What a third node says of its own disk does not make this one current.
    pub(crate) fn is_left_by_another(
        &self,
        volume: VolumeNr,
        peers: &[(NodeId, PeerDeviceState)],
    ) -> bool {
        let own = self.devices.get(&volume).map(|d| d.current_uuid());
        let Some(own) = own.filter(|own| is_real(*own)) else {
            return false;
        };
        let left = |set: &PeerUuids| {
            set.slot(self.node_id).same_generation(own) && !set.current.same_generation(own)
        };
        let mut peers = peers.iter().filter(|(peer, p)| {
            p.disk == DiskState::UpToDate
                && p.repl == ReplState::Established
                && self.is_lockstep(*peer)
                && !self.is_legacy(*peer)
        });
        peers.any(|(peer, _)| self.peer_uuids(volume, *peer).is_some_and(left))
            && !planted!(self, LeftBehindFollows)
    }

    /// Some other peer is a source that does not change unseen (semantics.md, 14.2).
    pub(crate) fn stable_source_present(
        &self,
        volume: VolumeNr,
        except: NodeId,
        state: &State,
    ) -> bool {
        let authoritative = self
            .peer_uuids(volume, except)
            .map_or(NodeMask::EMPTY, |u| u.node_mask);
        if authoritative.contains(self.node_id) {
            return true;
        }
        let Some(device) = state.devices.get(&volume) else {
            return false;
        };
        device.peers.iter().any(|(peer, p)| {
            if *peer == except {
                return false;
            }
            let linked = p.repl == ReplState::Established
                || p.repl == ReplState::WfBitmapS
                || p.repl.has_progress();
            let primary = state
                .connections
                .get(peer)
                .is_some_and(|c| c.peer_role == Role::Primary);
            let stable = self
                .peer_uuids(volume, *peer)
                .is_some_and(|u| self.is_stable_set(u));
            // One that is behind itself, or half copied, knows of no Primary only because it does not count.
            let whole = p.disk == DiskState::UpToDate || planted!(self, BehindCountsStable);
            let source = p.repl.is_sync_target() && stable && whole;
            // What one writes that has become Primary unheard is still on its way.
            let heard = !self.is_lockstep(*peer) || planted!(self, UnheardPrimaryCounts);
            linked && (authoritative.contains(*peer) && heard || primary || source)
        })
    }

    /// The peers as a rotation sees them.
    pub(crate) fn peer_views(&self, volume: VolumeNr) -> Vec<PeerView> {
        let Some(device) = self.devices.get(&volume) else {
            return Vec::new();
        };
        device
            .peers
            .iter()
            .map(|(node, pd)| {
                let p = self.state.peer_device(volume, *node);
                PeerView {
                    node: *node,
                    // What this node writes from now on is not sent there.
                    disk: match p.repl {
                        ReplState::Ahead => p.disk.min(DiskState::Outdated),
                        ReplState::Established if self.gets_no_writes(*node, &p) => {
                            DiskState::Outdated
                        }
                        _ if p.disk == DiskState::Outdated
                            && planted!(self, RotationMissesOutdated) =>
                        {
                            DiskState::Consistent
                        }
                        _ => p.disk,
                    },
                    connected: p.repl > ReplState::Off,
                    has_bitmap: pd.options.bitmap,
                }
            })
            .collect()
    }

    /// A peer beside this Primary asks around, or waits for the end of a reconciliation, before it
    /// calls itself UpToDate: until then it gets no writes, so it must not look like a follower.
    fn gets_no_writes(&self, peer: NodeId, p: &PeerDeviceState) -> bool {
        self.state.role == Role::Primary
            && p.disk == DiskState::Consistent
            && self.is_lockstep(peer)
            && !self.is_legacy(peer)
    }

    /// Nodes that do not get a new generation of this volume.
    pub(crate) fn weak_nodes(&self, volume: VolumeNr) -> NodeMask {
        generation::weak_nodes(
            self.node_id,
            self.state.disk(volume),
            &self.peer_views(volume),
        )
    }

    /// This node's UUIDs as the peer knows them: both sides compare the same, and have to come to one result.
    pub(crate) fn told_uuids(&self, peer: NodeId, volume: VolumeNr) -> Option<PeerUuids> {
        let set = self.own_uuids(peer, volume, UuidFlags::empty())?;
        Some(
            match self.is_legacy(peer) && !planted!(self, UntoldCompared) {
                true => PeerUuids::from_packet84(&set.to_packet84(peer), peer),
                false => set,
            },
        )
    }

    /// This node's UUIDs for a peer.
    pub(crate) fn own_uuids(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        flags: UuidFlags,
    ) -> Option<PeerUuids> {
        let device = self.devices.get(&volume)?;
        let disk = device.attached()?;
        let pd = device.peers.get(&peer)?;
        let state = self.state.devices.get(&volume)?;
        let stable = self.state.stable();
        let mut flags = flags | pd.uuid_flags;
        flags.set(UuidFlags::STABLE, stable);
        flags.set(
            UuidFlags::DISCARD_MY_DATA,
            self.connections
                .get(&peer)
                .is_some_and(|c| c.discard_my_data),
        );
        let crashed = disk.crashed_primary || self.speaks_for_crashed(peer, volume);
        flags.set(UuidFlags::CRASHED_PRIMARY, crashed);
        flags.set(UuidFlags::PRIMARY_LOST_QUORUM, disk.primary_lost_quorum);
        let stayed = pd.reconnect || planted!(self, ReconnectFlagAlways);
        flags.set(UuidFlags::RECONNECT, stayed);
        let lost = disk.crashed_with.contains(peer) && self.is_lockstep(peer);
        flags.set(UuidFlags::CACHE_LOST, lost);
        let unwritten = disk.generations.is_unwritten_for(peer) && self.is_lockstep(peer);
        flags.set(UuidFlags::UNWRITTEN, unwritten);
        let for_all = unwritten && disk.generations.is_unwritten_for_all();
        flags.set(UuidFlags::UNWRITTEN_FOR_ALL, for_all);
        let inconsistent = state.disk == DiskState::Inconsistent
            || (state.disk == DiskState::Negotiating
                && !disk
                    .generations
                    .flags
                    .contains(lockstep_format::disk::v09::DeviceFlags::CONSISTENT));
        flags.set(UuidFlags::INCONSISTENT, inconsistent);
        let source = state
            .peers
            .iter()
            .find(|(_, p)| p.repl.is_sync_target())
            .map(|(n, _)| *n);
        flags.set(UuidFlags::SYNC_TARGET, source.is_some());
        let resolved = source
            .and_then(|n| self.peer_uuids(volume, n))
            .map(|u| u.current);
        let node_mask = if stable {
            if self.state.role == Role::Primary {
                self.weak_nodes(volume)
            } else {
                NodeMask::EMPTY
            }
        } else {
            self.state
                .connections
                .iter()
                .filter(|(_, c)| c.peer_role == Role::Primary)
                .map(|(n, _)| *n)
                .filter(|n| !self.may_lack_held(volume, *n))
                .collect()
        };
        let target_of = state
            .peers
            .iter()
            .filter(|(n, p)| p.repl.is_sync_target() && !self.same_current(volume, **n))
            .map(|(n, _)| *n)
            .collect();
        let mut set = disk.generations.to_send(&SendContext {
            receiver: peer,
            resolved_current: resolved,
            target_of,
            dirty_bits: self.out_of_sync_blocks(volume, peer),
            flags,
            node_mask,
        });
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        if let Some(planned) = self.planned_unheard(volume, peer) {
            // It would be taken for one that was given up, and not followed when it is announced.
            set.forget(planned);
        }
        if !lockstep {
            // Only Lockstep knows the mark of a noted generation.
            set.history = set.history.map(Uuid::without_primary_bit);
        }
        Some(set)
    }

    /// The generation that this node is about to announce to the peer, which follows.
    pub(crate) fn planned_unheard(&self, volume: VolumeNr, peer: NodeId) -> Option<Uuid> {
        let noting = |new: &&NewUuid| new.step == SpreadStep::Noting;
        let plan = self.new_uuid.as_ref().filter(noting)?.plans.get(&volume)?;
        (plan.sets.is_some() && plan.confirm.contains(peer)).then_some(plan.uuid)
    }

    /// A Primary that both this node and the peer lost: what this node has of its stream.
    pub(crate) fn lost_primary_for(&self, peer: NodeId) -> Option<(NodeId, Dagtag)> {
        let absent = |c: &&Connection| {
            c.peer != peer
                && self.state.conn(c.peer) != ConnState::Connected
                && c.last_dagtag != Dagtag(0)
        };
        let absent: Vec<&Connection> = self.connections.values().filter(absent).collect();
        // Of several the one whose loss as a Primary this node told others of.
        let mut told = absent.iter().filter(|c| !c.told_lost.is_empty());
        let found = match (absent.as_slice(), told.next(), told.next()) {
            ([only], ..) => *only,
            (_, Some(only), None) if self.is_lockstep(peer) => *only,
            _ => return None,
        };
        Some((found.peer, found.last_dagtag))
    }

    /// Tells a peer that reconciles what this node has of the stream of a Primary that both lost.
    pub(crate) fn send_lost_primary(&mut self, peer: NodeId) {
        let reconciles = self.features(peer).contains(Features::RECONCILE_RECONNECT)
            || self.is_lockstep(peer) && !planted!(self, WordsForgotten);
        if let Some((node_id, dagtag)) = self.lost_primary_for(peer).filter(|_| reconciles) {
            let packet = Packet::PeerDagtag(PeerDagtag { dagtag, node_id });
            self.send(peer, Stream::Data, VolumeNr::NONE, packet);
        }
    }

    /// A Primary without a disk goes by what its peers' slots say: as long as one seems to name a generation
    /// that its peer has left, the loss of that peer's disk would not make a new one, and it could come back
    /// as if it had missed nothing.
    pub(crate) fn tell_diskless(&mut self, but: NodeId, volume: VolumeNr) {
        for peer in self.established_peers().without(but).iter() {
            let p = self.state.peer_device(volume, peer);
            if p.repl >= ReplState::Established && p.disk < DiskState::Inconsistent {
                self.send_uuids(peer, volume, UuidFlags::empty());
            }
        }
    }

    /// Tells a kernel that survived a Primary with this node of which generation it is.
    pub(crate) fn send_current_uuid(&mut self, peer: NodeId, volume: VolumeNr) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let packet = CurrentUuid {
            uuid: device.current_uuid(),
            weak_nodes: self.established_peers().complement(),
        };
        self.send(peer, Stream::Data, volume, Packet::CurrentUuid(packet));
    }
}
