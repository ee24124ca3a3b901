//! Everything that reports show, read out at one moment.

use alloc::boxed::Box;
use alloc::vec::Vec;

use lockstep_format::units::NodeMask;
use lockstep_format::wire::{DiskState, Role};

use crate::report::{
    ConnectionReport, DeviceReport, Event, PeerDeviceReport, ResyncReport, SharedOptions, Snapshot,
};
use crate::resource::Resource;
use crate::state::{PeerDeviceState, ReplSets, State};

impl Resource {
    /// Whether every change of the state is told with an [`Event::Step`] from now on. It costs a
    /// snapshot for each, so it is for times when somebody watches.
    pub fn tell_steps(&mut self, told: bool) {
        self.tells_steps = told;
    }

    /// The resource as status commands show it.
    pub fn snapshot(&self) -> Snapshot {
        let state = &self.state;
        let mut suspended = Vec::new();
        for (on, name) in [
            (state.susp_user, "user"),
            (state.susp_nod, "no-data"),
            (state.connections.values().any(|c| c.susp_fen), "fencing"),
            (state.susp_quorum, "quorum"),
            (state.susp_uuid, "uuid"),
        ] {
            if on {
                suspended.push(name);
            }
        }
        Snapshot {
            step: self.steps_told,
            node_id: self.node_id,
            role: state.role,
            stands_by: self.waits_for_turn(),
            suspended,
            may_promote: self.may_promote(),
            promotion_score: self.promotion_score(),
            force_io_failures: state.fail_io,
            devices: self
                .devices
                .keys()
                .map(|v| self.device_report(*v))
                .collect(),
            connections: self
                .connections
                .keys()
                .map(|n| self.connection_report(*n))
                .collect(),
        }
    }

    /// Tells watchers how the resource is after a change, if they want that. Later changes may have
    /// been committed already.
    pub(crate) fn tell_step(&mut self, old: &State, new: &State) {
        if !self.tells_steps {
            return;
        }
        self.steps_told += 1;
        let latest = core::mem::replace(&mut self.state, new.clone());
        let mut snapshot = self.snapshot();
        self.state = latest;
        for connection in &mut snapshot.connections {
            for p in &mut connection.peer_devices {
                let was = old.peer_device(p.volume, connection.peer).repl;
                if let Some(resync) = &mut p.resync
                    && !was.has_progress()
                {
                    // What counts its progress is set up after this.
                    resync.total_sectors = resync.left_sectors;
                    (resync.failed_sectors, resync.same_sectors) = (0, 0);
                    resync.started = self.now;
                }
            }
        }
        self.event(Event::Step(Box::new(snapshot)));
    }

    /// config-and-cli.md, 13.3.
    fn may_promote(&self) -> bool {
        self.promotion_score() > 0
            && self.state.role == Role::Secondary
            && !self.turns.stands_by
            && self.state.primary_peer().is_none()
            && self.state.devices.iter().all(|(volume, d)| {
                // A peer that was unstable beside this node alone is not any more: this one is Secondary.
                let stable = |peer| {
                    self.peer_uuids(*volume, peer).is_some_and(|u| {
                        self.is_stable_set(u) || u.node_mask == NodeMask::of(self.node_id)
                    })
                };
                d.disk == DiskState::UpToDate
                    || d.peers
                        .iter()
                        .any(|(n, p)| p.disk == DiskState::UpToDate && stable(*n))
            })
    }

    /// config-and-cli.md, 13.3. A Primary has a score too, although it cannot be promoted.
    fn promotion_score(&self) -> u32 {
        let mut usable = true;
        let (mut own, mut fewest) = (0, u32::MAX);
        for device in self.state.devices.values() {
            let up_to_date = |disk: DiskState| u32::from(disk == DiskState::UpToDate);
            let of_peers: u32 = device.peers.values().map(|p| up_to_date(p.disk)).sum();
            let replicas = up_to_date(device.disk) + of_peers;
            if !device.have_quorum || replicas == 0 {
                return 0;
            }
            usable &= matches!(
                device.disk,
                DiskState::UpToDate | DiskState::Consistent | DiskState::Inconsistent
            );
            own += up_to_date(device.disk);
            fewest = fewest.min(replicas);
        }
        if self.state.devices.is_empty() || self.state.fail_io {
            return 0;
        }
        10_000 * u32::from(usable) + 100 * own.min(99) + fewest.min(99)
    }

    fn device_report(&self, volume: lockstep_format::units::VolumeNr) -> DeviceReport {
        let device = &self.devices[&volume];
        let state = self.state.devices.get(&volume).cloned().unwrap_or_default();
        let disk = device.attached();
        DeviceReport {
            volume,
            minor: device.minor,
            disk_state: state.disk,
            lost_disk: device.lost_disk,
            client: device.intentional_diskless && state.disk == DiskState::Diskless,
            quorum: state.have_quorum,
            open: device.openers.any(),
            size_sectors: device.size_sectors,
            logical_block_bytes: device.logical_block_bytes(),
            size_limit_sectors: disk.map(|d| d.options.size_sectors.unwrap_or(0)),
            read_sectors: device.io.read_sectors,
            written_sectors: device.io.written_sectors,
            al_writes: disk.map_or(0, |d| d.io.transactions()),
            bm_writes: disk.map_or(0, |d| d.io.bitmap_writes),
            upper_pending: device.io.upper_pending,
            lower_pending: device.io.lower_pending,
            al_suspended: disk.is_some_and(|d| d.io.al_suspended()),
            current_uuid: device.current_uuid(),
            history_uuids: disk
                .map(|d| {
                    d.generations
                        .history
                        .iter()
                        .copied()
                        .filter(|u| !u.is_zero())
                        .collect()
                })
                .unwrap_or_default(),
            flags: disk.map_or(0, |d| d.generations.flags.bits()),
        }
    }

    fn connection_report(&self, peer: lockstep_format::units::NodeId) -> ConnectionReport {
        let conn = &self.connections[&peer];
        let state = self
            .state
            .connections
            .get(&peer)
            .copied()
            .unwrap_or_default();
        ConnectionReport {
            peer,
            name: conn.net.peer_name.clone(),
            state: state.conn,
            role: state.peer_role,
            protocol_version: conn.protocol(),
            ap_in_flight_sectors: conn.io.ap_in_flight_sectors,
            rs_in_flight_sectors: self
                .devices
                .values()
                .filter_map(|d| d.peers.get(&peer))
                .map(|pd| pd.io.rs_in_flight_sectors())
                .sum(),
            congested: false,
            shared: SharedOptions::of(&conn.net),
            peer_devices: self
                .devices
                .keys()
                .map(|v| self.peer_device_report(*v, peer))
                .collect(),
        }
    }

    fn peer_device_report(
        &self,
        volume: lockstep_format::units::VolumeNr,
        peer: lockstep_format::units::NodeId,
    ) -> PeerDeviceReport {
        let p = self.state.peer_device(volume, peer);
        let device = &self.devices[&volume];
        let own = self.state.disk(volume);
        let pd = device.peers.get(&peer);
        let own_disk = device.attached();
        let block = own_disk.map_or(8, |d| d.io.bitmap.shape().block().sectors());
        let out_of_sync = self.out_of_sync_blocks(volume, peer) * block;
        let verify = self.verify_report(volume, peer);
        let verified = verify.map(|v| {
            let done = self.verify_done_sectors(volume, peer);
            let (done, started) = done.unwrap_or((0, self.now));
            let ms = (self.now - started).as_millis().max(1);
            ResyncReport {
                total_sectors: done + v.left_sectors,
                left_sectors: v.left_sectors,
                failed_sectors: 0,
                same_sectors: 0,
                started,
                paused_ns: 0,
                rate_kib_s: (done / 2 * 1000 / ms) as u32,
                wanted_kib_s: 0,
            }
        });
        let resync = pd.filter(|_| p.repl.has_progress()).map(|pd| ResyncReport {
            total_sectors: pd.io.resync_total_bits * block,
            left_sectors: out_of_sync,
            failed_sectors: pd.io.resync_failed_bits * block,
            same_sectors: pd.io.resync_same_sectors,
            started: pd.io.resync_started,
            paused_ns: 0,
            rate_kib_s: pd.io.resync_rate_kib_s(self.now),
            wanted_kib_s: 0,
        });
        PeerDeviceReport {
            volume,
            repl_state: p.repl,
            disk_state: p.disk,
            client: pd.is_some_and(|pd| !pd.options.bitmap) && p.disk == DiskState::Diskless,
            resync_suspended: resync_reasons(&p, own),
            received_sectors: pd.map_or(0, |pd| pd.io.received_sectors),
            sent_sectors: pd.map_or(0, |pd| pd.io.sent_sectors),
            out_of_sync_sectors: out_of_sync,
            pending: self.pending_towards(volume, peer),
            unacked: self.unacked_of(volume, peer),
            resync: verified.or(resync),
            verify,
            bitmap_uuid: self.slot_uuid(volume, peer),
            ack_times: pd.map(|pd| pd.io.ack_times).unwrap_or_default(),
            flags: self.slot_flags(volume, peer).bits(),
            degraded: device.attached().is_some_and(|d| d.degraded.contains(peer)),
        }
    }
}

fn resync_reasons(p: &PeerDeviceState, own: DiskState) -> Vec<&'static str> {
    let mut reasons = Vec::new();
    if p.susp_user {
        reasons.push("user");
    }
    if p.susp_peer {
        reasons.push("peer");
    }
    if p.susp_dependency {
        reasons.push("dependency");
    }
    if p.susp_other || (p.repl.is_sync_source() && own <= DiskState::Inconsistent) {
        reasons.push("connection dependency");
    }
    if p.susp_max_parallel {
        reasons.push("max-parallel");
    }
    reasons
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use lockstep_format::units::NodeId;

    use crate::command::Command;
    use crate::event::{CommandId, Input, Output};
    use crate::options::{NetOptions, ResourceOptions};
    use crate::report::Event;
    use crate::resource::{Resource, ResourceConfig};
    use crate::state::ConnState;
    use crate::time::Instant;

    /// The connection's state and number of each step that a command made.
    fn steps(resource: &mut Resource, id: u64, command: Command) -> Vec<(u64, ConnState)> {
        let id = CommandId(id);
        resource.handle(Instant(1_000_000_000), Input::Command { id, command });
        core::iter::from_fn(|| resource.poll_output())
            .filter_map(|output| match output {
                Output::Event(Event::Step(s)) => Some((s.step, s.connections[0].state)),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn every_step_of_a_change_is_told_to_those_who_want_it() {
        let options = ResourceOptions::default();
        let config = ResourceConfig {
            name: "r".into(),
            node_id: NodeId(0),
            options,
        };
        let peer = NodeId(1);
        let connect = || Command::Connect {
            peer,
            discard_my_data: false,
            tentative: false,
        };
        let mut resource = Resource::new(config, 1);
        let net = NetOptions::default();
        assert_eq!(steps(&mut resource, 1, Command::NewPeer { peer, net }), []);
        resource.tell_steps(true);
        assert_eq!(
            steps(&mut resource, 2, connect()),
            [(1, ConnState::Unconnected)]
        );
        let force = false;
        let told = steps(&mut resource, 3, Command::Disconnect { peer, force });
        assert_eq!(
            told,
            [
                (2, ConnState::Connecting),
                (3, ConnState::Disconnecting),
                (4, ConnState::StandAlone)
            ]
        );
        assert_eq!(resource.snapshot().step, 4);
        resource.tell_steps(false);
        assert_eq!(steps(&mut resource, 4, connect()), []);
        assert_eq!(resource.snapshot().step, 4);
        assert_eq!(
            resource.snapshot().connections[0].state,
            ConnState::Unconnected
        );
    }
}
