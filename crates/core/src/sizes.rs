//! What a volume's size becomes when nodes meet (semantics.md, 22.2 and 22.4). A resize on command is in `resize.rs`.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::{ConnState, DeviceDescFlags, DiskState, Role};

use crate::command::ErrorCode;
use crate::device::{Device, LocalDisk, PeerSizes};
use crate::report::Level;
use crate::resize::{AfterResize, NewArea};
use crate::resource::Resource;
use crate::validity::Refusal;

impl Resource {
    /// The size that follows from what is known of all disks; none without any.
    pub(crate) fn new_size(&self, volume: VolumeNr) -> Option<u64> {
        let device = self.devices.get(&volume)?;
        let disk = device.disk.as_ref();
        let mine = disk.map_or(0, LocalDisk::usable_sectors);
        let stored = disk
            .and_then(|d| d.superblock.as_ref())
            .map_or(0, |b| b.effective_size.0);
        let wanted = disk.and_then(|d| d.options.size_sectors).unwrap_or(0);
        // What a peer has come to already was agreed on with those that this node does not reach,
        // and may have seen last before their disks grew.
        let near = |peer: NodeId| self.state.conn(peer) >= ConnState::Connecting;
        let come_to = device
            .peers
            .iter()
            .filter(|(peer, _)| stored != 0 && near(**peer))
            .filter_map(|(_, pd)| pd.sizes)
            .map(|sizes| sizes.current_sectors)
            .max()
            .unwrap_or(0);
        // Among nodes without disks each would hold the others at what it has.
        let has_disk = |sizes: &PeerSizes| sizes.disk_sectors != 0;
        let mut told = device.peers.values().filter_map(|pd| pd.sizes.as_ref());
        let any_disk = told.any(has_disk) && !planted!(self, ClientsHoldSize);
        let mut size = mine;
        let mut all_known = true;
        let mut wish = wanted;
        for (peer, pd) in &device.peers {
            match pd.sizes {
                Some(sizes) => {
                    let room = match sizes.disk_sectors {
                        known if planted!(self, AbsentRoomStale) => known,
                        known if known != 0 && !near(*peer) => known.max(come_to),
                        known => known,
                    };
                    if !planted!(self, DiskSizeIgnored) {
                        size = min_nonzero(size, room);
                    }
                    wish = min_nonzero(wish, sizes.wanted_sectors);
                    if mine == 0 && (has_disk(&sizes) || !any_disk) {
                        size = min_nonzero(size, sizes.current_sectors);
                    }
                }
                None => all_known &= !self.slot_seen_with_disk(volume, *peer),
            }
        }
        if !all_known {
            size = min_nonzero(size, stored.max(come_to));
        }
        size = min_nonzero(size, wish);
        (size != 0).then_some(size)
    }

    /// The size that the operator asked for, as `peer` hears it: here or at a neighbour, whose wish holds for both
    /// of them (22.4). After a restart this node may know it from others only.
    pub(crate) fn told_wish(&self, volume: VolumeNr, peer: NodeId) -> u64 {
        let Some(device) = self.devices.get(&volume) else {
            return 0;
        };
        let own = device.attached().and_then(|d| d.options.size_sectors);
        let neighbours = device.peers.iter().filter(|(node, _)| {
            **node != peer
                && self.is_established(**node)
                && device.attached().is_some()
                && !planted!(self, WishNotPassedOn)
        });
        neighbours
            .filter_map(|(_, pd)| pd.sizes)
            .map(|sizes| sizes.wanted_sectors)
            .filter(|wanted| *wanted >= device.size_sectors)
            .fold(own.unwrap_or(0), min_nonzero)
    }

    /// Sizes of a peer arrived: what does the volume become?
    pub(crate) fn agree_on_size(&mut self, peer: NodeId, volume: VolumeNr) -> Result<(), Refusal> {
        let Some(size) = self.new_size(volume) else {
            return Ok(());
        };
        if let Some(cause) = self.held_back(peer, volume, size) {
            return Err(cause);
        }
        let own = self.state.disk(volume);
        let Some(device) = self.devices.get(&volume) else {
            return Ok(());
        };
        let current = device.size_sectors;
        if size == current {
            return Ok(());
        }
        let told = device.peers.get(&peer).and_then(|pd| pd.sizes);
        let stays = told.is_some_and(|told| (1..=current).contains(&told.current_sectors));
        if size > current
            && stays
            && own == DiskState::Inconsistent
            && self.state.conn(peer) == ConnState::Connected
        {
            // The peer has room, but a third node that this one does not reach may have none. Whoever has no data
            // follows what others have come to.
            return Ok(());
        }
        let usable = own >= DiskState::Outdated && own != DiskState::DUnknown;
        // A target would shrink, but not the neighbour that it is copied from.
        let held = self.is_in_use(device) || self.neighbour_has_data(volume);
        if size < current && (usable || held) && !planted!(self, ShrinksInUse) {
            let text = format!(
                "volume {volume}: node {peer} allows only {size} sectors, but {current} are in \
                 use here; enlarge its disk, or make the volume smaller here"
            );
            let code = ErrorCode::HANDSHAKE_DISCONNECT;
            return Err(Refusal { code, text });
        }
        if device.attached().is_some_and(|disk| disk.resize.is_some()) {
            if self.state.conn(peer) == ConnState::Connected {
                self.follow_later(volume, peer, DeviceDescFlags::empty());
                return Ok(());
            }
            let text = format!("volume {volume} is being resized");
            let code = ErrorCode::HANDSHAKE_RETRY;
            return Err(Refusal { code, text });
        }
        self.apply_size(volume, current, size);
        Ok(())
    }

    /// A kernel that connects is smaller, although its disk has room: it has not met a third node since that one's
    /// disk grew, and cannot read a bitmap of this length. In the next try it is told that the third one has room, as
    /// this node's size was agreed on without it.
    pub(crate) fn kernel_is_held_back(&self, peer: NodeId, volume: VolumeNr) -> bool {
        let conn = self.connections.get(&peer);
        let since = conn.and_then(|c| c.link.as_ref()).map(|link| link.since);
        if self.state.conn(peer) != ConnState::Connecting || !self.is_kernel(peer) {
            return false;
        }
        let own = self.state.disk(volume);
        let usable = own >= DiskState::Outdated && own != DiskState::DUnknown;
        if !usable && !self.neighbour_has_data(volume) {
            // Nobody has agreed on its size.
            return false;
        }
        let device = self.devices.get(&volume);
        let Some(device) = device.filter(|d| d.peers.len() > 1 && d.attached().is_some()) else {
            return false;
        };
        let size = device.size_sectors;
        device.peers.get(&peer).is_some_and(|pd| {
            let heard = since.is_some_and(|since| pd.sizes_at >= since);
            pd.sizes.filter(|_| heard).is_some_and(|sizes| {
                (1..size).contains(&sizes.current_sectors)
                    && sizes.disk_sectors >= size
                    && (sizes.wanted_sectors == 0 || sizes.wanted_sectors >= size)
            })
        })
    }

    /// A handshake with such a kernel is tried again over the same link.
    pub(crate) fn kernel_stays_behind(&self, peer: NodeId) -> Option<Refusal> {
        let mut volumes = self.devices.keys();
        let volume = volumes.find(|volume| self.kernel_is_held_back(peer, **volume))?;
        let text = format!("volume {volume}: node {peer} has room for its size, but has not grown");
        let code = ErrorCode::HANDSHAKE_RETRY;
        Some(Refusal { code, text })
    }

    fn is_in_use(&self, device: &Device) -> bool {
        device.openers.any() || self.state.role == Role::Primary
    }

    fn neighbour_has_data(&self, volume: VolumeNr) -> bool {
        self.established_peers().iter().any(|node| {
            let disk = self.state.peer_device(volume, node).disk;
            disk >= DiskState::Outdated && disk != DiskState::DUnknown
        })
    }

    /// A neighbour with no more data than this node has become smaller, as a third node with data wants it: nothing is
    /// lost by doing the same. That node's size, if so.
    pub(crate) fn shrinks_with(&self, peer: NodeId, volume: VolumeNr) -> Option<u64> {
        let device = self.devices.get(&volume)?;
        let told = device.peers.get(&peer)?.sizes?.current_sectors;
        let empty = self.state.disk(volume) == DiskState::Inconsistent
            && !self.is_in_use(device)
            && !self.neighbour_has_data(volume);
        (empty && (1..device.size_sectors).contains(&told)).then_some(told)
    }

    /// Sets the size; what is new is out of sync towards everybody.
    pub(crate) fn apply_size(&mut self, volume: VolumeNr, old: u64, size: u64) {
        let Some(device) = self.devices.get_mut(&volume) else {
            return;
        };
        if old != 0 && old != size && device.attached().is_some() {
            self.change_size(volume, size, NewArea::Resync, AfterResize::Nothing);
            for peer in self.established_peers().iter() {
                self.send_sizes(peer, volume);
            }
            return;
        }
        device.size_sectors = size;
        if let Some(disk) = device.disk.as_mut()
            && let Some(layout) = disk.layout.as_ref()
        {
            let shape = layout.bitmap_shape(size);
            let loaded = disk.io.bitmap.shape().bits();
            if shape.bits() != loaded {
                // Metadata that were never attached, but name a generation, were made for data
                // that are of it as a whole (metadata.md, 7: day 0).
                let named = old == 0 && disk.generations.is_named();
                disk.io.bitmap.resize(shape, !named);
            }
        }
        self.log(
            Level::Info,
            None,
            Some(volume),
            format!("size: {old} -> {size} sectors"),
        );
        self.event(crate::report::Event::Device(volume));
        self.write_superblock(volume);
        for peer in self.established_peers().iter() {
            self.send_sizes(peer, volume);
        }
    }
}

fn min_nonzero(a: u64, b: u64) -> u64 {
    match (a, b) {
        (0, b) => b,
        (a, 0) => a,
        (a, b) => a.min(b),
    }
}
