//! The per-volume part of a handshake: packets, the sync decision, and what a connect commits
//! (semantics.md, 9.2, 9.6 and 13; wire.md, 5.5 and 5.6).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, Sector, Uuid, VolumeNr};
use lockstep_format::wire::packet::{
    AlgName, CurrentUuid, DeviceLimits, DynamicRate, EnableReplication, Sizes, SyncParam89,
};
use lockstep_format::wire::{
    self, ConnState, DeviceDescFlags, DiskState, Features, Packet, PeerState, ReplState, Role,
    UuidFlags,
};

use crate::before_resync::ResyncGate;
use crate::command::ErrorCode;
use crate::compare::{self, Handshake, LostPrimary, Side, Strategy};
use crate::connection::{Link, Phase};
use crate::device::{ConnectVerdict, LocalDisk, PeerSizes};
use crate::event::Stream;
use crate::options::Quorum;
use crate::report::Level;
use crate::resource::Resource;
use crate::state::{ReplSets, State};
use crate::time::Duration;
use crate::timers::Timer;
use crate::transition::Change;
use crate::twopc::WishKind;
use crate::uuids::PeerUuids;
use crate::validity::Refusal;

/// Largest request that this node takes, in bytes.
const MAX_BIO_BYTES: u32 = wire::BIO_LEN_MAX;

impl Resource {
    pub(crate) fn dialect_of(&self, link: Option<&Link>) -> wire::Dialect {
        let Some(link) = link else {
            return wire::Dialect::INITIAL;
        };
        wire::Dialect {
            protocol: link.protocol,
            features: link.features,
            integrity_len: link.peer_integrity.map_or(0, |alg| alg.digest_len()),
        }
    }

    /// The lower node id starts the connect two-phase commit, again and again if need be.
    pub(crate) fn start_connect_twopc(&mut self, peer: NodeId) {
        if self.is_legacy(peer) {
            self.legacy_handshake(peer);
            return;
        }
        let ready = self.state.conn(peer) == ConnState::Connecting
            && self
                .connections
                .get(&peer)
                .and_then(|c| c.link.as_ref())
                .is_some_and(|l| l.phase == Phase::Ready);
        if !ready {
            return;
        }
        if !self.may_connect_now(peer) || self.twopc.current.is_some() {
            let at = self.now + Duration::from_millis(50);
            self.timers.set(Timer::ConnectTwopc(peer), at);
            return;
        }
        self.wish(WishKind::Connect(peer), None);
    }

    /// Nothing is under way here that the handshake's packets could miss.
    pub(crate) fn may_connect_now(&self, peer: NodeId) -> bool {
        // Frozen for fencing no generation is made, and the connection may be what ends it.
        let fenced = self
            .state
            .connections
            .get(&peer)
            .is_some_and(|c| c.susp_fen);
        self.new_uuid.is_none()
            && (fenced || !self.new_uuid_wanted)
            && self.steps.is_empty()
            && !self.unsettled_requests(peer)
            && self.connections.get(&peer).is_some_and(|c| !c.draining)
            && self
                .state
                .devices
                .values()
                .all(|d| !matches!(d.disk, DiskState::Attaching | DiskState::Detaching))
            && self
                .devices
                .values()
                .all(|d| d.disk.as_ref().is_none_or(LocalDisk::may_be_told))
            && !self.looks_at_disks()
    }

    /// An attempt failed for a reason that may pass.
    pub(crate) fn connect_attempt_failed(&mut self, peer: NodeId, pause: Duration) {
        self.handshake_aborted(peer);
        let links = self.state.connections.len().max(1) as u64;
        let jitter = Duration::from_millis(self.rng.below(50 * links));
        let at = self.now + pause + jitter;
        if self.state.conn(peer) == ConnState::Connecting {
            self.timers.set(Timer::ConnectTwopc(peer), at);
        }
    }

    /// A handshake that does not come to a commit: its packets do not count.
    pub(crate) fn handshake_aborted(&mut self, peer: NodeId) {
        for device in self.devices.values_mut() {
            if let Some(pd) = device.peers.get_mut(&peer) {
                pd.verdict = None;
                pd.sent_handshake = false;
                pd.last_state = None;
            }
        }
        let patience = self
            .connections
            .get(&peer)
            .map(|c| c.ping_timeout().times(10));
        if let (Some(patience), true) = (patience, self.node_id > peer)
            && self.state.conn(peer) == ConnState::Connecting
        {
            let at = self.now + patience;
            self.timers.set(Timer::Handshake(peer), at);
        }
    }

    /// The connect came to a no (semantics.md, 9.2, "result handling").
    pub(crate) fn connect_refused(&mut self, peer: NodeId, refusal: &Refusal) {
        self.learn_from_handshake(peer, refusal.code);
        let retry = matches!(
            refusal.code,
            ErrorCode::HANDSHAKE_RETRY
                | ErrorCode::IN_TRANSIENT_STATE
                | ErrorCode::CONCURRENT_ST_CHG
                | ErrorCode::PRIMARY_READER
                | ErrorCode::TIMEOUT
        ) || ((self.retries_conflicts(peer) || self.would_give_way())
            && matches!(
                refusal.code,
                ErrorCode::CW_FAILED_BY_PEER | ErrorCode::TWO_PRIMARIES
            ));
        if retry {
            self.connect_attempt_failed(peer, Duration::from_secs(1));
            return;
        }
        match refusal.code {
            ErrorCode::HANDSHAKE_DISCONNECT
            | ErrorCode::CW_FAILED_BY_PEER
            | ErrorCode::TWO_PRIMARIES => {
                self.send(peer, Stream::Data, VolumeNr::NONE, Packet::Disconnect);
                let text = format!("the connection was refused: {}", refusal.text);
                self.go_standalone(peer, text);
            }
            _ => self.drop_connection(peer, ConnState::NetworkFailure),
        }
    }

    fn retries_conflicts(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .is_some_and(|c| c.net.rr_conflict == crate::options::AfterSplitBrain::RetryConnect)
    }

    /// A failed connect still taught that the peer has newer data.
    pub(crate) fn apply_local_consequences(&mut self, peer: NodeId) {
        if self.state.role != Role::Secondary {
            return;
        }
        let mut change = Change::new();
        change.ignore_impossible_outdate = true;
        for (volume, device) in &self.devices {
            let target = device.peers.get(&peer).and_then(|pd| pd.verdict.as_ref());
            if target.is_some_and(|v| v.repl.becomes_target())
                && self.state.disk(*volume) > DiskState::Outdated
            {
                change = change.disk(*volume, DiskState::Outdated);
            }
        }
        self.hard_change(change);
    }

    /// Sends this node's part of the handshake, all volumes.
    pub(crate) fn send_handshake(&mut self, peer: NodeId) {
        self.send_lost_primary(peer);
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.send_volume(peer, volume);
        }
    }

    fn send_volume(&mut self, peer: NodeId, volume: VolumeNr) {
        self.send_sync_param(peer, volume);
        if self
            .features(peer)
            .contains(Features::RESYNC_WITHOUT_REPLICATION)
        {
            let enable = self.wants_replication(peer, volume);
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.asked_marks = !enable;
            }
            let packet = Packet::EnableReplicationNext(EnableReplication { enable });
            self.send(peer, Stream::Data, volume, packet);
        }
        self.send_sizes(peer, volume);
        self.mark_unsent(volume, peer);
        self.send_uuids(peer, volume, UuidFlags::empty());
        let disk = self.state.disk(volume);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sent_handshake = true;
            pd.sent_disk = disk;
        }
        let mut packet = self.state_packet(peer, volume, &self.state);
        packet.aftr_isp |= self.is_kernel(peer) && self.has_active_source(volume);
        self.send(peer, Stream::Data, volume, Packet::State(packet));
        // The peer's packets may have been faster.
        self.evaluate(peer, volume);
    }

    pub(crate) fn features(&self, peer: NodeId) -> Features {
        self.connections
            .get(&peer)
            .map_or(Features::empty(), |c| c.features())
    }

    pub(crate) fn send_sync_param(&mut self, peer: NodeId, volume: VolumeNr) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let Some(pd) = self.devices.get(&volume).and_then(|d| d.peers.get(&peer)) else {
            return;
        };
        let name = |alg: &Option<String>| {
            alg.as_ref()
                .and_then(|a| AlgName::new(a.as_bytes()))
                .unwrap_or_default()
        };
        let packet = SyncParam89 {
            resync_rate_kib_s: pd.options.resync_rate_kib_s,
            verify_alg: name(&conn.net.verify_alg),
            csums_alg: name(&conn.net.csums_alg),
            dynamic: Some(DynamicRate {
                plan_ahead_ds: pd.options.c_plan_ahead_tenths,
                delay_target_ds: pd.options.c_delay_target_tenths,
                fill_target_sectors: pd.options.c_fill_target_sectors,
                max_rate_kib_s: pd.options.c_max_rate_kib_s,
            }),
        };
        self.send(peer, Stream::Data, volume, Packet::SyncParam89(packet));
    }

    pub(crate) fn send_sizes(&mut self, peer: NodeId, volume: VolumeNr) {
        let size = self.devices.get(&volume).map_or(0, |d| d.size_sectors);
        let flags = match self.kernel_is_held_back(peer, volume) {
            true => DeviceDescFlags::ASSUME_UNCONNECTED_PEER_HAS_SPACE,
            false => DeviceDescFlags::empty(),
        };
        self.send_sizes_with(peer, volume, size, flags);
    }

    /// Sizes for a peer. A current size of 0 asks it to follow and to answer with its own.
    pub(crate) fn send_sizes_with(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        current_sectors: u64,
        dds_flags: DeviceDescFlags,
    ) {
        let Some(device) = self.devices.get(&volume) else {
            return;
        };
        let disk = device.attached();
        let info = disk.map(|d| d.info);
        let block = info.map_or(512, |i| i.logical_block_bytes);
        let limits = DeviceLimits {
            physical_block_size_bytes: info.map_or(512, |i| i.physical_block_bytes),
            logical_block_size_bytes: block,
            alignment_offset_bytes: 0,
            io_min_bytes: block,
            io_opt_bytes: 0,
            discard_enabled: u8::from(info.is_some_and(|i| i.discard)),
            discard_zeroes_data: 0,
            write_same_capable: 0,
            bm_block_shift_minus_12: self.block_shift_for(peer, volume),
        };
        let packet = Sizes {
            d_size: Sector(self.room_for(peer, volume)),
            u_size: Sector(self.told_wish(volume, peer)),
            c_size: Sector(current_sectors),
            max_bio_size_bytes: MAX_BIO_BYTES,
            queue_order_type: 0,
            dds_flags,
            limits: self
                .features(peer)
                .contains(Features::WSAME)
                .then_some(limits),
        };
        self.send(peer, Stream::Data, volume, Packet::Sizes(packet));
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sent_sectors = current_sectors;
        }
    }

    /// Sends the UUIDs, or what a diskless node has instead.
    pub(crate) fn send_uuids(&mut self, peer: NodeId, volume: VolumeNr, flags: UuidFlags) {
        let attached = self
            .devices
            .get(&volume)
            .is_some_and(|d| d.attached().is_some());
        if !attached {
            let uuid = self
                .devices
                .get(&volume)
                .map_or(Uuid::ZERO, |d| d.exposed_uuid);
            let packet = CurrentUuid {
                uuid,
                weak_nodes: self.weak_nodes(volume),
            };
            self.send(peer, Stream::Data, volume, Packet::CurrentUuid(packet));
            return;
        }
        if self.spreads_with(peer, volume, flags) {
            return;
        }
        let Some(set) = self.own_uuids(peer, volume, flags) else {
            return;
        };
        let packet = set.to_packet110();
        let set = if self.is_legacy(peer) {
            // Compared is what both know.
            PeerUuids::from_packet84(&set.to_packet84(peer), peer)
        } else {
            set
        };
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sent_uuids = Some(set);
        }
        self.note_told_marks(volume, peer, packet.dirty_bits);
        self.send(peer, Stream::Data, volume, Packet::Uuids110(packet));
    }

    /// This node's state word for a volume.
    pub(crate) fn state_packet(&self, peer: NodeId, volume: VolumeNr, state: &State) -> PeerState {
        let c = state.connections.get(&peer).copied().unwrap_or_default();
        let device = state.devices.get(&volume);
        let p = state.peer_device(volume, peer);
        let own = device.map_or(DiskState::Diskless, |d| d.disk);
        PeerState {
            role: state.role,
            peer: c.peer_role,
            conn: c.conn,
            repl: p.repl,
            disk: own,
            pdsk: p.disk,
            susp: state.susp_user || state.susp_uuid || self.waits_for_quorum(state),
            susp_nod: state.susp_nod,
            susp_fen: c.susp_fen,
            aftr_isp: p.combined_dependency(own),
            peer_isp: p.susp_peer,
            user_isp: p.susp_user,
            quorum: device.is_some_and(|d| d.have_quorum),
        }
    }

    /// A role change is told with the state of each volume.
    pub(crate) fn send_role(&mut self, peer: NodeId, state: &State) {
        let volumes: Vec<VolumeNr> = state.devices.keys().copied().collect();
        for volume in volumes {
            self.send_state(peer, volume, state);
        }
    }

    /// Packets of a volume's handshake and state; returns the packet if it is another one.
    pub(crate) fn volume_packet(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        packet: Packet,
    ) -> Option<Packet> {
        match packet {
            Packet::PeerDagtag(dagtag) => self.peer_dagtag_received(peer, dagtag),
            Packet::SyncParam89(param) => self.sync_param_received(peer, volume, &param),
            Packet::Sizes(sizes) => self.sizes_received(peer, volume, sizes),
            Packet::Uuids110(uuids) => self.uuids_arrived(peer, volume, uuids),
            Packet::CurrentUuid(uuid) => self.current_uuid_received(peer, volume, uuid),
            Packet::EnableReplicationNext(next) => {
                if let Some(pd) = self.peer_device_mut(volume, peer) {
                    pd.replicates_to_target = next.enable;
                    pd.replicates_now = next.enable;
                }
            }
            Packet::EnableReplication(now) => {
                let exchanges = self.state.peer_device(volume, peer).repl == ReplState::WfBitmapS;
                if let Some(pd) = self.peer_device_mut(volume, peer) {
                    pd.replicates_now = now.enable;
                    pd.replicates_early = now.enable && exchanges;
                }
                self.hard_change(Change::new().replication(volume, peer, now.enable));
            }
            Packet::State(state) => self.state_received(peer, volume, state),
            other => return Some(other),
        }
        None
    }

    fn sync_param_received(&mut self, peer: NodeId, volume: VolumeNr, param: &SyncParam89) {
        let verify_alg = param.verify_alg.as_str().unwrap_or_default();
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.peer_verify_alg = verify_alg.into();
        }
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        if self.state.conn(peer) == ConnState::Connected {
            self.adopt_algorithms(peer, param);
            return;
        }
        let theirs = param.csums_alg.as_str().unwrap_or_default();
        let ours = conn.net.csums_alg.clone().unwrap_or_default();
        if theirs != ours {
            let text = format!(
                "csums-alg differs: {ours:?} here, {theirs:?} at the peer; configure the same"
            );
            self.refuse(peer, volume, ErrorCode::HANDSHAKE_DISCONNECT, text);
        }
    }

    fn sizes_received(&mut self, peer: NodeId, volume: VolumeNr, sizes: Sizes) {
        if !self.devices.contains_key(&volume) {
            return;
        }
        let bogus = (sizes.d_size.0 != 0 && sizes.c_size > sizes.d_size)
            || (sizes.u_size.0 != 0 && sizes.c_size > sizes.u_size);
        if bogus {
            let text = format!(
                "the peer's sizes of volume {volume} contradict each other: current {}, disk {}, \
                 configured {} sectors",
                sizes.c_size.0, sizes.d_size.0, sizes.u_size.0
            );
            self.refuse(peer, volume, ErrorCode::HANDSHAKE_DISCONNECT, text);
            return;
        }
        let block_shift = match self.peer_block_shift(peer, volume, &sizes) {
            Ok(shift) => shift,
            Err(text) => {
                self.refuse(peer, volume, ErrorCode::HANDSHAKE_DISCONNECT, text);
                return;
            }
        };
        let now = self.now;
        let Some(pd) = self.peer_device_mut(volume, peer) else {
            return;
        };
        pd.sizes_at = now;
        // Another try over the same link.
        pd.refusal
            .take_if(|refusal| refusal.code == ErrorCode::HANDSHAKE_RETRY);
        let before = pd.sizes;
        pd.sizes = Some(PeerSizes {
            disk_sectors: sizes.d_size.0,
            wanted_sectors: sizes.u_size.0,
            current_sectors: sizes.c_size.0,
            max_bio_bytes: sizes.max_bio_size_bytes,
            bitmap_block_shift: block_shift,
        });
        // Whatever else it says is none of a disk.
        let said = sizes.limits.map(|limits| limits.logical_block_size_bytes);
        let said = said.filter(|bytes| matches!(bytes, 1024 | 2048 | 4096));
        pd.logical_block_bytes = said.unwrap_or(512);
        self.adopt_block_sizes(volume);
        if self.sizes_changed(peer, volume, before, sizes.dds_flags) {
            return;
        }
        if let Err(cause) = self.agree_on_size(peer, volume) {
            self.refuse(peer, volume, cause.code, cause.text);
        }
    }

    /// Remembers that the handshake of this volume cannot succeed; outside of a handshake the
    /// connection ends.
    fn refuse(&mut self, peer: NodeId, volume: VolumeNr, code: ErrorCode, text: String) {
        if self.state.conn(peer) == ConnState::Connected {
            self.go_standalone(peer, text);
            return;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.refusal = Some(Refusal { code, text });
        }
    }

    fn state_received(&mut self, peer: NodeId, volume: VolumeNr, state: PeerState) {
        if volume.is_none() || !self.devices.contains_key(&volume) {
            if volume.is_none() && state.role == Role::Secondary {
                self.hard_change(Change::new().peer_role(peer, Role::Secondary));
            }
            let link = self
                .connections
                .get_mut(&peer)
                .and_then(|c| c.link.as_mut());
            if let Some(link) = link.filter(|_| !volume.is_none()) {
                link.not_here.insert(volume);
            }
            return;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.last_state = Some(state);
        }
        self.source_says_so(volume, peer, state.repl);
        self.admission_changed();
        match self.state.conn(peer) {
            ConnState::Connecting => {
                self.evaluate(peer, volume);
                self.twopc_progress();
            }
            ConnState::Connected if self.added_volume_state(peer, volume, state) => {}
            ConnState::Connected => {
                self.established_state_received(peer, volume, state);
                if self.state.peer_device(volume, peer).disk >= DiskState::Consistent {
                    self.forget_stable_news(Some((peer, volume)));
                }
            }
            _ => {}
        }
    }

    /// Compares the two UUID sets and fills the verdict in.
    pub(crate) fn decide_sync(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
        phase: compare::Phase,
        verdict: &mut ConnectVerdict,
    ) {
        let Some(result) = self.compare_with(peer, volume, theirs, phase) else {
            verdict.refusal.get_or_insert(Refusal {
                code: ErrorCode::HANDSHAKE_RETRY,
                text: "the peer did not send its UUIDs".into(),
            });
            return;
        };
        let strategy = result.strategy;
        let own_role = self.state.role;
        self.log(
            Level::Info,
            Some(peer),
            Some(volume),
            format!(
                "sync decision: {} by rule {}",
                strategy.name(),
                result.rule.name()
            ),
        );
        self.outdated_beside_target(volume, peer, result.rule);
        verdict.strategy = Some(strategy);
        verdict.reconciliation = result.reconciliation;
        verdict.clear_own_slot = result.clear_own_slot;
        for handler in &result.handlers {
            self.run_handler(handler.name(), Some(volume), Some(peer));
        }
        if result.demote_first && !planted!(self, LoserNotDemoted) {
            verdict
                .refusal
                .get_or_insert(self.give_role_up(peer, volume));
            return;
        }
        if !result.split_brain && strategy.direction().is_some() && self.keeps_changes(peer) {
            verdict.refusal.get_or_insert(Refusal {
                code: ErrorCode::HANDSHAKE_RETRY,
                text: format!(
                    "volume {volume}: the split brain that this node lost is no more; connecting \
                     without discarding its data"
                ),
            });
            return;
        }
        if self.has_to_give_way(peer, volume, strategy, theirs.role) {
            verdict.refusal.get_or_insert(self.give_way(peer, volume));
            return;
        }
        if strategy.direction() != Some(compare::Direction::Source)
            && let Some(refusal) = (self.refuse_as_target(volume, peer))
                .or_else(|| self.refuse_while_primary_copies(volume, peer, &result))
        {
            verdict.refusal.get_or_insert(refusal);
            return;
        }
        match strategy.to_repl_state(own_role, theirs.role) {
            Some(repl) => verdict.repl = repl,
            None => {
                self.go_on_without(volume, peer, strategy);
                let code = if strategy.retries() {
                    ErrorCode::HANDSHAKE_RETRY
                } else {
                    ErrorCode::HANDSHAKE_DISCONNECT
                };
                let text = match strategy {
                    Strategy::SplitBrainAutoRecover | Strategy::SplitBrainDisconnect => format!(
                        "split brain on volume {volume}: both nodes have changes that the other \
                         lacks; choose the node whose changes are dropped and run there `drbdadm \
                         connect --discard-my-data`"
                    ),
                    Strategy::UnrelatedData => {
                        format!("volume {volume} has unrelated data at node {peer}")
                    }
                    other => format!("volume {volume}: {}", other.name()),
                };
                verdict.refusal.get_or_insert(Refusal { code, text });
            }
        }
    }

    /// Runs the comparison; none if the peer's UUIDs are not known.
    pub(crate) fn compare_with(
        &self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
        phase: compare::Phase,
    ) -> Option<compare::Verdict> {
        let device = self.devices.get(&volume)?;
        let pd = device.peers.get(&peer)?;
        let conn = self.connections.get(&peer)?;
        let own = Side {
            node: self.node_id,
            uuids: match pd.sent_uuids.clone() {
                Some(sent) => sent,
                None => self.told_uuids(peer, volume)?,
            },
            disk: match phase {
                compare::Phase::Connect => pd.sent_disk,
                compare::Phase::Attach | compare::Phase::AfterUnstable => self.state.disk(volume),
            },
            role: self.state.role,
            quorate: self
                .state
                .devices
                .get(&volume)
                .is_some_and(|d| d.have_quorum),
        };
        let other = Side {
            node: peer,
            uuids: pd.uuids.clone()?,
            disk: theirs.disk,
            role: theirs.role,
            quorate: theirs.quorum,
        };
        let lost = |pair: Option<(NodeId, lockstep_format::units::Dagtag)>| {
            pair.map(|(node, dagtag)| LostPrimary { node, dagtag })
        };
        let (own_lost, peer_lost) = match phase {
            compare::Phase::AfterUnstable => self.words_between(peer).unzip(),
            _ => (self.lost_primary_for(peer), conn.peer_dagtag),
        };
        let verdict = compare::compare(&Handshake {
            own: &own,
            peer: &other,
            phase,
            protocol_version: conn.protocol(),
            features: conn.features(),
            resolver: self.resolves_conflicts(peer),
            net: &conn.net,
            quorum_configured: self.options.quorum != Quorum::Off,
            own_lost: lost(own_lost),
            peer_lost: lost(peer_lost),
        });
        #[cfg(feature = "planted")]
        let verdict = self.planted_verdict(verdict);
        Some(verdict)
    }

    /// One side has no disk: no sync decision, but generations still matter (13.8).
    pub(crate) fn decide_diskless(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
        verdict: &mut ConnectVerdict,
    ) {
        let without_disk = self.state.disk(volume) < DiskState::Inconsistent;
        let of_interest = without_disk && theirs.disk == DiskState::UpToDate;
        let Some(device) = self.devices.get(&volume).filter(|_| of_interest) else {
            return;
        };
        let (exposed, pd) = (device.exposed_uuid, device.peers.get(&peer));
        let Some(uuids) = pd.and_then(|pd| pd.uuids.clone()) else {
            return;
        };
        if exposed.is_zero() || exposed.same_generation(uuids.current) {
            verdict.peer_disk = self.disk_without_held(volume, peer);
            return;
        }
        let newer = uuids.history_has(exposed)
            || uuids
                .bitmap
                .iter()
                .any(|slot| slot.same_generation(exposed));
        if newer && self.state.role == Role::Secondary {
            return;
        }
        // This Primary announced that generation while it had no disk, and the link broke before the
        // answer came. Who took it over from there would have made one of its own.
        let announced = device
            .announced
            .iter()
            .any(|uuid| uuid.same_generation(uuids.current));
        if newer && announced {
            verdict.peer_disk = self.disk_without_held(volume, peer);
            return;
        }
        if newer {
            let refusal = self.older_than(peer, volume);
            verdict.refusal.get_or_insert(refusal);
            return;
        }
        let older = device.peers.iter().any(|(n, pd)| {
            *n != peer
                && pd.uuids.as_ref().is_some_and(|u| {
                    u.history_has(uuids.current)
                        || u.bitmap
                            .iter()
                            .any(|slot| slot.same_generation(uuids.current))
                })
        });
        if older || self.is_left_behind(volume, peer) {
            verdict.peer_disk = DiskState::Outdated;
            self.remember_left_behind(volume, peer);
        } else if self.state.role == Role::Primary {
            verdict.refusal.get_or_insert(Refusal {
                code: ErrorCode::HANDSHAKE_DISCONNECT,
                text: format!("node {peer} has other data of volume {volume} than this Primary"),
            });
        }
    }

    /// All volumes' states of the peer are in.
    pub(crate) fn handshake_ready(&self, peer: NodeId) -> bool {
        self.devices.values().all(|d| {
            d.peers
                .get(&peer)
                .is_none_or(|pd| pd.verdict.is_some() || pd.refusal.is_some())
        })
    }

    /// The first thing that speaks against the connect.
    pub(crate) fn handshake_verdict(&self, peer: NodeId) -> Result<(), Refusal> {
        self.may_be_joined(peer)?;
        let mut retry = None;
        for device in self.devices.values() {
            let Some(pd) = device.peers.get(&peer) else {
                continue;
            };
            let verdict = pd.verdict.as_ref().and_then(|v| v.refusal.clone());
            let Some(refusal) = verdict.or_else(|| pd.refusal.clone()) else {
                continue;
            };
            if refusal.code == ErrorCode::HANDSHAKE_RETRY {
                retry = Some(refusal);
                continue;
            }
            // What is refused for good is refused by what holds now.
            let changed = self.handshake_changed(peer);
            return Err(match planted!(self, RefusedByOldNews) {
                true => refusal,
                false => changed.unwrap_or(refusal),
            });
        }
        let grown = || {
            self.outgrown(peer)
                .or_else(|| self.kernel_stays_behind(peer))
        };
        let changed = || grown().or_else(|| self.handshake_changed(peer));
        if let Some(refusal) = retry.or_else(changed) {
            return Err(refusal);
        }
        let tentative = self
            .connections
            .get(&peer)
            .is_some_and(|c| c.tentative || c.link.as_ref().is_some_and(|l| l.dry_run));
        if tentative {
            return Err(Refusal {
                code: ErrorCode::HANDSHAKE_DISCONNECT,
                text: "a tentative connect ends here; the log says what would have been done"
                    .into(),
            });
        }
        Ok(())
    }

    /// The change that a connect commits. `role` is the peer's as the transaction tells it; with volumes,
    /// their states are newer.
    pub(crate) fn connect_change(&self, peer: NodeId, role: Role) -> Change {
        let mut change = Change::new()
            .conn(peer, ConnState::Connected)
            .peer_role(peer, role);
        for (volume, device) in &self.devices {
            let Some(verdict) = device.peers.get(&peer).and_then(|pd| pd.verdict.as_ref()) else {
                continue;
            };
            change = self.verdict_change(change, peer, *volume, verdict);
        }
        change
    }

    /// The connect was committed: the link is open for everything, bitmaps are prepared.
    pub(crate) fn connect_committed(&mut self, peer: NodeId) {
        self.set_phase(peer, Phase::Established);
        self.timers.clear(Timer::Handshake(peer));
        self.timers.clear(Timer::ConnectTwopc(peer));
        self.connection_established(peer);
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            let Some(verdict) = self.peer_device_mut(volume, peer).and_then(|pd| {
                pd.refusal = None;
                pd.verdict.clone()
            }) else {
                continue;
            };
            self.apply_verdict(volume, peer, &verdict);
        }
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.discard_my_data = false;
            conn.lost_split_brain = false;
            conn.attempts = 0;
            conn.peer_dagtag = None;
            conn.kept_dagtag = None;
            conn.lost_word = None;
        }
        for conn in self.connections.values_mut() {
            conn.lost_word = conn.lost_word.filter(|(lost, _)| *lost != peer);
        }
    }

    /// What a verdict does besides the change of states.
    pub(crate) fn apply_verdict(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        verdict: &ConnectVerdict,
    ) {
        if let Some(strategy) = verdict.strategy {
            self.prepare_bitmap(volume, peer, strategy, verdict.clear_own_slot);
        }
        self.learn_exposed(volume, peer, verdict);
    }

    /// Sets, clears or copies the slot before the bitmaps are exchanged (semantics.md, 13.9).
    pub(crate) fn prepare_bitmap(
        &mut self,
        volume: VolumeNr,
        peer: NodeId,
        strategy: Strategy,
        clear_own_slot: bool,
    ) {
        let peer_current = self
            .peer_uuids(volume, peer)
            .map_or(Uuid::ZERO, |u| u.current_or_created());
        let own_current = self
            .devices
            .get(&volume)
            .map_or(Uuid::ZERO, |d| d.current_uuid());
        match strategy {
            Strategy::SourceSetBitmap | Strategy::TargetSetBitmap => {
                let fresh = own_current == Uuid::JUST_CREATED || peer_current == Uuid::JUST_CREATED;
                if own_current == Uuid::JUST_CREATED && strategy == Strategy::TargetSetBitmap {
                    self.set_all_slots(volume);
                } else {
                    self.set_slot(volume, peer);
                }
                if strategy == Strategy::SourceSetBitmap && !fresh {
                    self.set_slot_uuid(volume, peer, peer_current);
                }
            }
            Strategy::SourceCopyBitmap(from) => self.copy_slot(volume, from, peer),
            // The source copies what it changed since the generation that this disk is of. What
            // differs here is marked here only: writes that a crash cut short, or a disk that was
            // half copied. So nothing is cleared, and at worst blocks are copied that are equal.
            _ => {}
        }
        if strategy.direction().is_some()
            && let Some(pd) = self.peer_device_mut(volume, peer)
        {
            // They are copied; what is marked later has other reasons.
            pd.marks_of_log = false;
        }
        if strategy.direction() == Some(compare::Direction::Target) {
            self.inherit_marks(volume, peer);
        }
        if clear_own_slot {
            self.retire_slot_uuid(volume, peer);
        }
    }

    /// A resync from another node is under way: what it has not copied yet differs from the new
    /// source as well, although this node goes by the generation of the first one already.
    fn inherit_marks(&mut self, volume: VolumeNr, peer: NodeId) {
        for source in self.sources_of(volume).without(peer).iter() {
            self.copy_slot(volume, source, peer);
        }
    }

    /// A state of the peer on an established connection (semantics.md, 9.6).
    fn established_state_received(&mut self, peer: NodeId, volume: VolumeNr, theirs: PeerState) {
        self.full_sync_target_told(volume, peer);
        let mine = self.state.peer_device(volume, peer);
        let own = self.state.disk(volume);
        let mut change = Change::new().peer_role(peer, theirs.role).pause_peer(
            volume,
            peer,
            (theirs.aftr_isp || theirs.user_isp) && !planted!(self, PeerPauseIgnored),
        );
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.quorate = theirs.quorum;
        }
        let mut peer_disk = self.disk_as_told(peer, volume, theirs.disk);
        if peer_disk == DiskState::Negotiating {
            if mine.disk < DiskState::Negotiating && self.is_lockstep(peer) {
                // The two-phase commit of the attach timed out here. It waits for an answer that says
                // that this node has heard of it.
                self.hard_change(Change::new().peer_disk(volume, peer, peer_disk));
            }
            if own >= DiskState::Inconsistent && mine.repl == ReplState::Established {
                if self.is_legacy(peer) {
                    // No two-phase commit has announced the attach.
                    self.send_uuids(peer, volume, UuidFlags::empty());
                } else if !self.is_lockstep(peer) {
                    // A kernel forgets all UUIDs when its disk becomes Negotiating, also those that answered
                    // its two-phase commit if they were faster.
                    self.answer_attaching_peer(volume, peer);
                }
                self.attach_handshake(peer, volume, theirs);
                return;
            }
        }
        if own == DiskState::Negotiating && mine.repl == ReplState::Established {
            self.hard_change(change); // Its role, and whether its operator pauses resyncs, are not told again.
            self.attach_handshake(peer, volume, theirs);
            return;
        }
        if peer_disk == DiskState::Negotiating
            && mine.repl > ReplState::Established
            && !self.is_legacy(peer)
            && !planted!(self, AttachToldTwice)
        {
            // What an attaching node has said before; this node's answer is on its way.
            self.hard_change(change);
            return;
        }
        if self.ended_before_it_was_behind(peer, volume, theirs.repl) {
            return;
        }
        // The end of a resync as its source hears of it.
        let source = mine.repl.is_sync_source() || mine.repl == ReplState::WfBitmapS;
        let peer_was_target = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.peer_was_target)
            || (self.is_legacy(peer) && mine.repl.is_sync_source());
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.peer_was_target = theirs.repl.is_sync_target();
            pd.source_is_late &= theirs.repl == ReplState::WfBitmapS;
            if theirs.repl == ReplState::Established && mine.repl == ReplState::WfBitmapS {
                // What its disk is worth may change until this node's handler has ended.
                pd.finished_early = pd.finished_early.map(|_| theirs.disk);
            }
        }
        if source && own >= DiskState::Inconsistent {
            match theirs.repl {
                ReplState::Established if peer_was_target => {
                    if mine.repl == ReplState::WfBitmapS {
                        if let Some(pd) = self.peer_device_mut(volume, peer) {
                            pd.finished_early = Some(theirs.disk);
                        }
                    } else {
                        self.hard_change(change);
                        self.resync_finished_by_peer(volume, peer, theirs.disk);
                    }
                    return;
                }
                _ => {
                    // Its disk is worth what this node's view of the resync says.
                    if theirs.disk >= DiskState::Inconsistent {
                        peer_disk = mine.disk;
                    }
                }
            }
        }
        if mine.repl.becomes_target() && theirs.disk >= DiskState::Inconsistent {
            change = change.peer_disk(volume, peer, theirs.disk);
        } else if !source || theirs.disk < DiskState::Inconsistent {
            change = change.peer_disk(volume, peer, peer_disk);
        }
        if own >= DiskState::Inconsistent
            && let Some(repl) = self.mirrored_congestion(peer, mine.repl, theirs.repl)
        {
            if repl == ReplState::SyncTarget {
                self.hard_change(change);
                self.before_resync_target(volume, peer, ResyncGate::Behind);
                return;
            }
            change = change.repl(volume, peer, repl);
        }
        // The driver sends its state when it is through; behind it nothing of the verify comes.
        let verified = mine.repl == ReplState::VerifyT && theirs.repl == ReplState::Established;
        let aborted = mine.repl > ReplState::Established
            && theirs.repl == ReplState::Established
            && !source
            && !matches!(mine.repl, ReplState::WfBitmapT)
            && theirs.disk < DiskState::Inconsistent;
        if aborted || verified {
            change = change.repl(volume, peer, ReplState::Established);
        }
        self.hard_change(change);
        let usable = |d: DiskState| d >= DiskState::Inconsistent && d != DiskState::DUnknown;
        let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
        if lockstep
            && mine.repl == ReplState::Established
            && mine.disk < DiskState::Negotiating
            && usable(theirs.disk)
            && usable(own)
        {
            // Both attached at the same time, and each took the other for diskless.
            self.compare_established(peer, volume, theirs, compare::Phase::Attach);
        }
        let consider = self
            .devices
            .get(&volume)
            .and_then(|d| d.peers.get(&peer))
            .is_some_and(|pd| pd.consider_resync);
        if consider {
            self.compare_established(peer, volume, theirs, compare::Phase::AfterUnstable);
        }
        self.left_behind_as_exposed(peer, volume, theirs);
        self.answer_waiting_peer(peer, volume, theirs);
    }

    /// A comparison while Established (semantics.md, 9.6 and 14.2).
    pub(crate) fn compare_established(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        theirs: PeerState,
        phase: compare::Phase,
    ) {
        let mine = self.state.peer_device(volume, peer);
        let own = self.state.disk(volume);
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.consider_resync = false;
        }
        let usable = |d: DiskState| d >= DiskState::Inconsistent && d != DiskState::DUnknown;
        if !usable(own) || !usable(theirs.disk) {
            return;
        }
        if mine.repl != ReplState::Established {
            let again = !self.is_kernel(peer) || self.goes_on(peer, volume, theirs, phase);
            if let Some(pd) = self.peer_device_mut(volume, peer).filter(|_| again) {
                pd.resync_again += 1;
            }
            return;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            // Compared is what holds now, not what an earlier packet said.
            pd.sent_uuids = None;
        }
        let Some(result) = self.compare_with(peer, volume, theirs, phase) else {
            return;
        };
        self.compared_beside_crashed(peer, volume);
        let strategy = result.strategy;
        if self.is_left_to_third(volume, peer, &result)
            || self.is_left_to_primary(volume, peer, theirs.disk, strategy)
        {
            return;
        }
        self.log(
            Level::Info,
            Some(peer),
            Some(volume),
            format!(
                "comparison: {} by rule {}",
                strategy.name(),
                result.rule.name()
            ),
        );
        if self.steps_back(volume, peer, strategy) {
            return;
        }
        match strategy.to_repl_state(self.state.role, theirs.role) {
            Some(ReplState::Established) => {
                let follows = own == DiskState::Outdated
                    && !self.is_weak(&self.state)
                    && !self.diskless_primary_of_other_generation(volume);
                if follows && theirs.disk >= DiskState::Consistent {
                    let equal =
                        self.same_current(volume, peer) && !self.marked_towards(volume, peer);
                    if equal {
                        self.hard_change(Change::new().disk(volume, theirs.disk));
                    }
                }
            }
            Some(repl) => {
                self.prepare_bitmap(volume, peer, strategy, result.clear_own_slot);
                match self.soft_change(Change::new().repl(volume, peer, repl)) {
                    Ok(_) => self.reconciles_late(volume, peer, own),
                    Err(refusal) => {
                        self.log(Level::Warn, Some(peer), Some(volume), refusal.text);
                    }
                }
            }
            None if strategy.retries() => {
                self.drop_connection(peer, ConnState::NetworkFailure);
            }
            None => {
                let text = format!("volume {volume}: {}", strategy.name());
                self.send(peer, Stream::Data, VolumeNr::NONE, Packet::Disconnect);
                self.go_standalone(peer, text);
            }
        }
    }

    /// One side attaches while Established (semantics.md, 13.7).
    fn attach_handshake(&mut self, peer: NodeId, volume: VolumeNr, theirs: PeerState) {
        let own = self.state.disk(volume);
        let mut change = Change::new().peer_disk(volume, peer, theirs.disk);
        let has_uuids = self.peer_uuids(volume, peer).is_some();
        let comparable = theirs.disk >= DiskState::Negotiating
            && theirs.disk != DiskState::DUnknown
            && has_uuids;
        let has_disk = theirs.disk >= DiskState::Inconsistent && theirs.disk != DiskState::DUnknown;
        if own == DiskState::Negotiating && has_disk && !has_uuids && self.is_legacy(peer) {
            // Its UUIDs answer this node's, and a state comes with them.
            return;
        }
        if own == DiskState::Negotiating {
            let lockstep = self.connections.get(&peer).is_some_and(|c| c.is_lockstep());
            let has_disk =
                theirs.disk >= DiskState::Negotiating && theirs.disk != DiskState::DUnknown;
            // Who heard of the attach by a state packet alone may have compared at once.
            let has_heard = theirs.pdsk == DiskState::Negotiating
                || matches!(theirs.repl, ReplState::WfBitmapS | ReplState::WfBitmapT);
            let answers = has_uuids && (!lockstep || has_heard);
            if has_disk && !answers {
                // It was sent before the peer heard of the attach, and says nothing about it.
                self.hard_change(change);
                return;
            }
            let result = if comparable {
                let Some(verdict) = self.compare_with(peer, volume, theirs, compare::Phase::Attach)
                else {
                    return;
                };
                let repl = verdict.strategy.to_repl_state(self.state.role, theirs.role);
                if repl.is_some() {
                    self.prepare_bitmap(volume, peer, verdict.strategy, verdict.clear_own_slot);
                }
                repl
            } else {
                Some(ReplState::Established)
            };
            if let Some(pd) = self.peer_device_mut(volume, peer) {
                pd.negotiation = Some(result);
            }
            self.hard_change(change);
            return;
        }
        if !comparable {
            self.hard_change(change);
            return;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            pd.sent_uuids = None;
        }
        let Some(verdict) = self.compare_with(peer, volume, theirs, compare::Phase::Attach) else {
            return;
        };
        if self.steps_back(volume, peer, verdict.strategy) {
            return;
        }
        match verdict.strategy.to_repl_state(self.state.role, theirs.role) {
            Some(ReplState::Established) | None => {
                // The peer decides about its disk.
                self.hard_change(change);
            }
            Some(repl) => {
                self.prepare_bitmap(volume, peer, verdict.strategy, verdict.clear_own_slot);
                change = change.repl(volume, peer, repl);
                self.hard_change(change);
            }
        }
    }
}
