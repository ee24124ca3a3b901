//! Commands on the fields of the superblock: generation identifiers, flags, peers, device UUID.

use lockstep_format::disk::any::{AnySuperBlock, FlagChange};
use lockstep_format::disk::bitmap::Piece;
use lockstep_format::disk::store::{self, SetGiError, Store};
use lockstep_format::disk::v09::{DeviceFlags, Peer, PeerFlags};
use lockstep_format::disk::{gi, v08, v09};
use lockstep_format::units::{NodeId, Uuid};

use super::options::Failure;
use super::{Found, NO_METADATA, Tool, io_failure};

impl Tool<'_> {
    fn node(&self) -> NodeId {
        self.line.options.node_id.unwrap_or_default()
    }

    pub(super) fn get_gi(&mut self) -> Result<u8, Failure> {
        let found = self.find("")?;
        let text = gi::print(&found.superblock, self.node());
        self.say(&format!("{text}\n"))?;
        Ok(0)
    }

    pub(super) fn show_gi(&mut self) -> Result<u8, Failure> {
        let found = self.find("")?;
        let text = gi::picture(&found.superblock, self.node());
        self.say(&text)?;
        Ok(0)
    }

    pub(super) fn set_gi(&mut self) -> Result<u8, Failure> {
        let list = self.argument(0, "GI")?.to_owned();
        let mut found = self.find("")?;
        let before = gi::print(&found.superblock, self.node());
        let Found {
            device,
            layout,
            superblock,
            ..
        } = &mut found;
        store::set_gi(device, layout, superblock, self.node(), &list).map_err(|e| match e {
            SetGiError::List(error) => Failure::value(error.to_string()),
            SetGiError::Store(error) => io_failure(error),
        })?;
        let after = gi::print(&found.superblock, self.node());
        self.say(&format!("previously {before}\nset GI to  {after}\n"))?;
        if !self.confirm("Write new GI to disk?")? {
            self.say("Operation canceled.\n")?;
            return Ok(0);
        }
        found.write_superblock()?;
        Ok(0)
    }

    /// Bit 5 is "peer outdated" in v08 and nothing in v09, which therefore never says UpToDate.
    pub(super) fn dstate(&mut self) -> Result<u8, Failure> {
        let found = self.find(NO_METADATA)?;
        let flags = found.superblock.device_flags();
        let peer_outdated = match &found.superblock {
            AnySuperBlock::V08(sb) => sb.flags.contains(v08::Flags::PEER_OUT_DATED),
            AnySuperBlock::V09(_) => false,
        };
        let state = if !flags.contains(DeviceFlags::CONSISTENT) {
            "Inconsistent"
        } else if !flags.contains(DeviceFlags::WAS_UP_TO_DATE) {
            "Outdated"
        } else if peer_outdated {
            "UpToDate"
        } else {
            "Consistent"
        };
        self.say(&format!("{state}\n"))?;
        Ok(0)
    }

    pub(super) fn outdate(&mut self) -> Result<u8, Failure> {
        let mut found = self.find("")?;
        if !found
            .superblock
            .device_flags()
            .contains(DeviceFlags::CONSISTENT)
        {
            return Err(Failure {
                code: 5,
                text: "Device is inconsistent.".to_owned(),
            });
        }
        found
            .superblock
            .change_device_flags(DeviceFlags::WAS_UP_TO_DATE, FlagChange::Clear);
        found.write_superblock()?;
        Ok(0)
    }

    pub(super) fn invalidate(&mut self) -> Result<u8, Failure> {
        let mut found = self.find("")?;
        let valid = DeviceFlags::CONSISTENT | DeviceFlags::WAS_UP_TO_DATE;
        found
            .superblock
            .change_device_flags(valid, FlagChange::Clear);
        match &mut found.superblock {
            AnySuperBlock::V08(sb) => sb.flags |= v08::Flags::FULL_SYNC,
            AnySuperBlock::V09(sb) => {
                for peer in &mut sb.peers {
                    peer.flags |= PeerFlags::FULL_SYNC;
                }
            }
        }
        found.write_superblock()?;
        Ok(0)
    }

    pub(super) fn wipe_md(&mut self) -> Result<u8, Failure> {
        let nothing = "There appears to be no drbd meta data to wipe out?";
        let mut found = match self.find(nothing) {
            Err(Failure { code: 1, text }) if text == nothing => {
                self.note(&format!("{text}\n"))?;
                return Ok(0);
            }
            found => found?,
        };
        if !self.confirm("Do you really want to wipe out the DRBD meta data?")? {
            self.say("Operation cancelled.\n")?;
            return Ok(1);
        }
        self.say("Wiping meta data...\n")?;
        store::wipe(&mut found.device, &found.layout).map_err(io_failure)?;
        self.forget_place();
        self.say("DRBD meta data block successfully wiped out.\n")?;
        Ok(0)
    }

    pub(super) fn read_dev_uuid(&mut self) -> Result<u8, Failure> {
        let found = self.find(NO_METADATA)?;
        self.say(&format!("{:016X}\n", found.superblock.device_uuid()))?;
        Ok(0)
    }

    pub(super) fn write_dev_uuid(&mut self) -> Result<u8, Failure> {
        let word = self.argument(0, "UUID")?;
        let digits = word.strip_prefix("0x").unwrap_or(word);
        let uuid = match u64::from_str_radix(digits, 16) {
            Ok(uuid) if digits.len() == 16 => uuid,
            _ => {
                return Err(Failure::value(format!(
                    "'{word}' is not a UUID of 16 hex digits"
                )));
            }
        };
        let mut found = self.find(NO_METADATA)?;
        found.superblock.set_device_uuid(uuid);
        found.write_superblock()?;
        Ok(0)
    }

    /// Frees the entry and the slot of a node. The original leaves the slot's bits to the
    /// operator; here the slot becomes what an unallocated slot must be: a copy of another such
    /// slot, or all set.
    pub(super) fn forget_peer(&mut self) -> Result<u8, Failure> {
        let node = self.node();
        let mut found = self.find(NO_METADATA)?;
        let AnySuperBlock::V09(sb) = &mut found.superblock else {
            return Err(Failure::usage("forget-peer is not supported with v08"));
        };
        let slot = sb.peer(node).bitmap_index;
        let day0 = sb.day0_peer().copied().unwrap_or_default();
        let spare = sb.free_bitmap_index();
        *sb.peer_mut(node) = Peer {
            bitmap_uuid: day0.bitmap_uuid,
            bitmap_dagtag: day0.bitmap_dagtag,
            ..Peer::default()
        };
        if let Some(slot) = slot {
            copy_slot(&mut found, spare, slot)?;
        }
        found.write_superblock()?;
        Ok(0)
    }

    /// Gives all day-0 entries the UUID of the one with the highest node id.
    pub(super) fn repair_md(&mut self) -> Result<u8, Failure> {
        let mut found = self.find_or_move()?;
        let AnySuperBlock::V09(sb) = &mut found.superblock else {
            return Ok(0);
        };
        let wrong = wrong_day0(sb);
        for (node, is, should) in &wrong {
            self.note(&format!(
                "Peer slot {node} has \"day0\" UUID 0x{is}, expected 0x{should}\n"
            ))?;
        }
        if wrong.is_empty() {
            return Ok(0);
        }
        if self.line.options.tentative {
            return Ok(1);
        }
        self.note("Repairing metadata\n")?;
        for (node, _, should) in wrong {
            sb.peer_mut(node).bitmap_uuid = should;
        }
        found.write_superblock()?;
        Ok(0)
    }
}

fn wrong_day0(sb: &v09::SuperBlock) -> Vec<(NodeId, Uuid, Uuid)> {
    let Some(day0) = sb.day0_peer() else {
        return Vec::new();
    };
    (0u8..)
        .zip(&sb.peers)
        .filter(|(id, peer)| peer.is_day0() && sb.node_id != Some(NodeId(*id)))
        .filter(|(_, peer)| peer.bitmap_uuid != day0.bitmap_uuid)
        .map(|(id, peer)| (NodeId(id), peer.bitmap_uuid, day0.bitmap_uuid))
        .collect()
}

/// Overwrites slot `to` with slot `from`, or sets all its bits.
fn copy_slot(found: &mut Found, from: Option<u8>, to: u8) -> Result<(), Failure> {
    let shape = store::agreed_bitmap(&found.layout, &found.superblock);
    let start = found.layout.bitmap_byte();
    // Pieces of whole rows, so that a word of both slots is always in the same piece.
    let row = u64::from(shape.slots()) * 4096;
    let mut at = 0;
    while at < shape.area_bytes() {
        let len = (row * 16).min(shape.area_bytes() - at);
        let mut bytes = vec![0; len as usize];
        found
            .device
            .read(start + at, &mut bytes)
            .map_err(io_failure)?;
        let mut piece = Piece::new(&shape, at, &mut bytes[..]);
        for index in piece.word_range(to) {
            let word = match from {
                Some(from) => piece.word(from, index).unwrap_or(u32::MAX),
                None => u32::MAX,
            };
            piece.set_word(to, index, word);
        }
        found.device.write(start + at, &bytes).map_err(io_failure)?;
        at += len;
    }
    Ok(())
}
