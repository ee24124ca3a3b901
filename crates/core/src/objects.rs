//! Objects of a resource as commands make, change and remove them: connections, volumes, and the
//! options of both.

use alloc::format;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DiskState, Role};

use crate::admin::{fail, no_peer, no_volume};
use crate::command::{Answer, CommandError, ErrorCode};
use crate::connection::Connection;
use crate::device::{Device, PeerDevice};
use crate::options::{DiskOptions, Fencing, NetOptions, PeerDeviceOptions};
use crate::report::{Event, Object};
use crate::resource::Resource;
use crate::state::{ConnectionState, DeviceState, PeerDeviceState};
use crate::transition::Change;

impl Resource {
    pub(crate) fn new_peer(
        &mut self,
        peer: NodeId,
        net: NetOptions,
    ) -> Result<Answer, CommandError> {
        if peer == self.node_id || peer.0 >= NodeId::COUNT {
            return fail(
                ErrorCode::ERR_INVALID_PEER_NODE_ID,
                format!("node id {peer} cannot be a peer of node {}", self.node_id),
            );
        }
        if self.connections.contains_key(&peer) {
            return fail(
                ErrorCode::ERR_ALREADY_EXISTS,
                format!("there is a connection to node {peer} already"),
            );
        }
        check_net(&net)?;
        if let Some(volume) = self.volume_of_one_peer() {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                format!(
                    "volume {volume}: its metadata are of version v08 and belong to one other \
                     peer; convert them with `drbdadm create-md` after a clean down"
                ),
            );
        }
        self.connections.insert(peer, Connection::new(peer, net));
        self.state
            .connections
            .insert(peer, ConnectionState::default());
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.add_peer_device(volume, peer);
        }
        self.event(Event::Created(Object::Connection(peer)));
        self.recalculate();
        Ok(Answer::Done)
    }

    pub(crate) fn add_peer_device(&mut self, volume: VolumeNr, peer: NodeId) {
        let options = PeerDeviceOptions::default();
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        device.peers.insert(peer, PeerDevice::new(options));
        let mut outdated = false;
        if let Some(disk) = device.attached_mut() {
            // A new slot is given at `connect`: until then the options may say that none is wanted.
            let index = disk.generations.slot(peer).bitmap_index;
            disk.io.set_slot(peer, index);
            outdated = disk
                .generations
                .slot(peer)
                .flags
                .contains(lockstep_format::disk::v09::PeerFlags::OUTDATED);
        }
        if let Some(state) = self.state.devices.get_mut(&volume) {
            let mut p = PeerDeviceState::default();
            if outdated {
                p.disk = DiskState::Outdated;
            }
            state.peers.insert(peer, p);
        }
        self.write_superblock(volume);
    }

    /// Bitmap slots for all volumes with a disk that are to have one for this peer.
    pub(crate) fn give_slots(&mut self, peer: NodeId) -> Result<(), CommandError> {
        let wants = |d: &Device| d.peers.get(&peer).is_some_and(|pd| pd.options.bitmap);
        let volumes = self.devices.iter().filter(|(_, d)| wants(d));
        let volumes: Vec<VolumeNr> = volumes.map(|(volume, _)| *volume).collect();
        for volume in volumes {
            self.give_slot(volume, peer)?;
        }
        Ok(())
    }

    /// A bitmap slot for a peer, unless it has one. A free slot has marks of all that was written
    /// since day 0, so what it says of this peer is true.
    fn give_slot(&mut self, volume: VolumeNr, peer: NodeId) -> Result<(), CommandError> {
        let Some(disk) = self.devices.get_mut(&volume).and_then(|d| d.attached_mut()) else {
            return Ok(());
        };
        if disk.io.slot(peer).is_some() {
            return Ok(());
        }
        let Some(index) = disk.generations.allocate_slot(peer) else {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                format!(
                    "volume {volume}: the metadata have {} bitmap slots, all taken; node {peer} \
                     needs one; run `drbdadm create-md --max-peers` after a backup, or forget-peer",
                    disk.generations.max_peers
                ),
            );
        };
        disk.io.set_slot(peer, Some(index));
        self.write_superblock(volume);
        Ok(())
    }

    pub(crate) fn del_peer(&mut self, peer: NodeId) -> Result<Answer, CommandError> {
        match self.state.connections.get(&peer) {
            None => return Err(no_peer(peer)),
            Some(c) if c.conn != ConnState::StandAlone => {
                return fail(
                    ErrorCode::ERR_NET_CONFIGURED,
                    format!(
                        "the connection to node {peer} is {:?}; disconnect first",
                        c.conn
                    ),
                );
            }
            Some(_) => {}
        }
        self.connections.remove(&peer);
        self.state.connections.remove(&peer);
        self.timers.clear_peer(peer);
        self.forget_fence(peer);
        for device in self.devices.values_mut() {
            device.peers.remove(&peer);
        }
        for device in self.state.devices.values_mut() {
            device.peers.remove(&peer);
        }
        self.event(Event::Destroyed(Object::Connection(peer)));
        self.recalculate();
        Ok(Answer::Done)
    }

    pub(crate) fn peer_device_options(
        &mut self,
        peer: NodeId,
        volume: VolumeNr,
        options: PeerDeviceOptions,
    ) -> Result<Answer, CommandError> {
        let Some(device) = self.devices.get(&volume) else {
            return Err(no_volume(volume));
        };
        let Some(pd) = device.peers.get(&peer) else {
            return Err(no_peer(peer));
        };
        if !pd.options.bitmap && options.bitmap {
            self.give_slot(volume, peer)?;
        }
        if let Some(pd) = self.peer_device_mut(volume, peer) {
            // Without a bitmap a slot that the peer has keeps its marks until `forget-peer`.
            pd.options = options;
        }
        if self.is_established(peer) {
            self.send_sync_param(peer, volume);
        }
        self.recalculate();
        Ok(Answer::Done)
    }

    pub(crate) fn disk_options(
        &mut self,
        volume: VolumeNr,
        mut options: DiskOptions,
    ) -> Result<Answer, CommandError> {
        let Some(device) = self.devices.get_mut(&volume) else {
            return Err(no_volume(volume));
        };
        let Some(disk) = device.disk.as_mut() else {
            return fail(
                ErrorCode::ERR_NO_DISK,
                format!("volume {volume} has no disk"),
            );
        };
        // The size is agreed with the peers: only `resize` changes it.
        options.size_sectors = disk.options.size_sectors;
        let same_log = options.al_extents == disk.options.al_extents
            && options.al_updates == disk.options.al_updates;
        if !same_log {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                "al-extents and al-updates take effect at the next attach; detach first",
            );
        }
        let changes = options.bitmap != disk.options.bitmap;
        disk.options = options;
        if changes {
            // What a peer that comes lacks is not known: spec/metadata.md, 5.2.
            self.set_all_slots(volume);
        }
        self.watch_disk(volume);
        Ok(Answer::Done)
    }

    pub(crate) fn new_volume(
        &mut self,
        volume: VolumeNr,
        minor: u32,
        diskless: bool,
    ) -> Result<Answer, CommandError> {
        if self.devices.contains_key(&volume) || volume.is_none() {
            return fail(
                ErrorCode::ERR_MINOR_OR_VOLUME_EXISTS,
                format!("there is a volume {volume} already"),
            );
        }
        self.devices
            .insert(volume, Device::new(volume, minor, diskless));
        self.state.devices.insert(volume, DeviceState::default());
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for peer in peers {
            self.add_peer_device(volume, peer);
        }
        self.event(Event::Created(Object::Device(volume)));
        self.recalculate();
        self.present_volume(volume);
        Ok(Answer::Done)
    }

    pub(crate) fn del_volume(&mut self, volume: VolumeNr) -> Result<Answer, CommandError> {
        let Some(device) = self.devices.get(&volume) else {
            return Err(no_volume(volume));
        };
        if device.disk.is_some() || self.state.disk(volume) != DiskState::Diskless {
            return fail(
                ErrorCode::ERR_MINOR_CONFIGURED,
                format!("volume {volume} has a disk; detach it first"),
            );
        }
        // One without a size has never had data, whatever the Primary does with the others.
        let is_open = device.openers.readers > 0 || device.openers.writers > 0;
        if self.state.role == Role::Primary && (is_open || device.size_sectors > 0) {
            return fail(
                ErrorCode::DEVICE_IN_USE,
                format!("volume {volume} belongs to a Primary; demote it first"),
            );
        }
        self.devices.remove(&volume);
        self.state.devices.remove(&volume);
        self.event(Event::Destroyed(Object::Device(volume)));
        self.recalculate();
        Ok(Answer::Done)
    }

    /// Derived state (quorum, suspension) after options or objects changed.
    pub(crate) fn recalculate(&mut self) {
        self.hard_change(Change::new());
        self.admission_changed();
    }
}

/// Combinations of net options that cannot work (semantics.md, 6.2).
pub(crate) fn check_net(net: &NetOptions) -> Result<(), CommandError> {
    use crate::options::{OnCongestion, Protocol};
    if net.allow_two_primaries && net.protocol != Protocol::C {
        return fail(
            ErrorCode::ERR_NOT_PROTO_C,
            "allow-two-primaries goes with protocol C only",
        );
    }
    for (name, alg, code) in [
        ("verify-alg", &net.verify_alg, ErrorCode::ERR_VERIFY_ALG),
        ("csums-alg", &net.csums_alg, ErrorCode::ERR_CSUMS_ALG),
        (
            "data-integrity-alg",
            &net.data_integrity_alg,
            ErrorCode::ERR_INTEGRITY_ALG,
        ),
    ] {
        let Some(alg) = alg.as_deref().filter(|alg| !alg.is_empty()) else {
            continue;
        };
        if crate::auth::digest_len(alg) == 0 {
            return fail(
                code,
                format!(
                    "{name} {alg} is not supported; use crc32c, md5, sha1, sha224, sha256, \
                     sha384 or sha512"
                ),
            );
        }
    }
    if net.fencing == Fencing::ResourceAndStonith && net.protocol == Protocol::A {
        return fail(
            ErrorCode(154),
            "fencing resource-and-stonith does not go with protocol A",
        );
    }
    if net.on_congestion != OnCongestion::Block && net.protocol != Protocol::A {
        return fail(
            ErrorCode::ERR_CONG_NOT_PROTO_A,
            "on-congestion goes with protocol A only: with B and C a write waits for the peer \
             anyway",
        );
    }
    if let Some(alg) = &net.cram_hmac_alg {
        if crate::auth::HmacAlg::from_name(alg).is_err() {
            return fail(
                ErrorCode::ERR_AUTH_ALG,
                format!("cram-hmac-alg {alg} is not supported; use sha1 or sha256"),
            );
        }
        if net
            .shared_secret
            .as_ref()
            .is_none_or(alloc::string::String::is_empty)
        {
            return fail(
                ErrorCode::ERR_AUTH_ALG,
                "cram-hmac-alg needs a shared-secret",
            );
        }
    }
    Ok(())
}
