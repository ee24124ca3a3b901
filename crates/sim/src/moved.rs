//! Devices that grow. Metadata at a device's end stay where it ended before, until the node moves them,
//! or whoever attaches the disk, as `drbdmeta check-resize` does.

use lockstep_format::disk::BLOCK_BYTES;
use lockstep_format::disk::layout::{Layout, Placement};
use lockstep_format::disk::v09::SuperBlock;

use crate::disk::{BLOCK, Disk};

impl Disk {
    fn is_internal(&self) -> bool {
        self.layout.placement() == Placement::Internal
    }

    /// The device becomes larger by so many blocks. What is new on it differs from node to node.
    pub fn grow(&mut self, node: usize, blocks: u64) {
        self.data_bytes += blocks * BLOCK;
        self.grown = true;
        let from = self.content.len() as u64;
        let mut end = from + blocks;
        if self.is_internal() {
            self.meta_bytes = self.data_bytes;
            let bytes = self.meta_bytes - self.meta_base;
            self.meta.resize(bytes as usize, 0);
            let geometry = self.layout.geometry();
            let place = Layout::new(Placement::Internal, geometry, self.meta_bytes)
                .expect("a larger device is large enough");
            end = place.usable_sectors(self.data_bytes / 512) / 8;
            self.places.push(place);
        }
        let rubbish = |block| (1 << 50) + ((node as u64) << 40) + block;
        self.content.extend((from..end).map(rubbish));
    }

    fn superblock_at(&self, place: &Layout) -> Option<SuperBlock> {
        let block = self.meta_at(place.superblock_byte(), BLOCK_BYTES);
        SuperBlock::decode(block.try_into().ok()?).ok()
    }

    /// An attach, after `check-resize`, goes by the metadata at the last end of the device that has any.
    pub(crate) fn look_for_superblock(&mut self) {
        if self.places.len() < 2 {
            return;
        }
        let found = self.places.iter().rev();
        let found = found
            .copied()
            .find(|place| self.superblock_at(place).is_some());
        if let Some(found) =
            found.filter(|found| found.superblock_byte() != self.layout.superblock_byte())
        {
            self.lies_at(found);
        }
    }

    /// Data are written where metadata may still lie.
    pub(crate) fn overwrite_metadata(&mut self, block: u64, count: u64) {
        let end = (block + count) * BLOCK;
        if self.places.len() < 2 || end <= self.meta_base {
            return;
        }
        let first = block.max(self.meta_base / BLOCK) * BLOCK;
        self.store_meta(first, &vec![0; (end - first) as usize]);
    }

    /// A node opens it.
    pub(crate) fn opened(&mut self, now: u64) {
        self.check_resize();
        self.open = true;
        self.opened_at = now;
        self.is_forced = false;
    }

    /// Whoever is about to attach the disk lets `drbdmeta` move metadata that lie where the device ended
    /// before it grew.
    fn check_resize(&mut self) {
        let Some(new) = self
            .places
            .last()
            .copied()
            .filter(|_| self.places.len() > 1)
        else {
            return;
        };
        self.look_for_superblock();
        let old = self.layout;
        if old.superblock_byte() == new.superblock_byte() {
            return;
        }
        let Some(mut superblock) = self.superblock_at(&old) else {
            return;
        };
        let shape = old.bitmap_shape(superblock.effective_size.0);
        let log = self.meta_at(old.al_byte(), old.geometry().al.bytes() as usize);
        let log = log.to_vec();
        let bitmap = self
            .meta_at(old.bitmap_byte(), shape.used_bytes() as usize)
            .to_vec();
        superblock.set_layout(&new);
        let mut block = [0u8; BLOCK_BYTES];
        superblock.encode(&mut block);
        self.store_meta(new.al_byte(), &log);
        self.store_meta(new.bitmap_byte(), &bitmap);
        self.store_meta(new.superblock_byte(), &block);
        self.lies_at(new);
    }
}
