//! `create-md`: new metadata, and conversion of metadata of the other format.

use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::layout::{AlGeometry, BitmapBlock, Geometry, Layout, Placement};
use lockstep_format::disk::store::{self, BitmapInit};
use lockstep_format::disk::{Magic, v08, v09};
use lockstep_format::units::{Sector, Uuid};

use super::device::Device;
use super::existing::{Content, LOOK_BYTES};
use super::options::{Failure, InitialUuid, Options, number};
use super::{Tool, UNCLEAN, io_failure, random_uuid, read_start};

/// What to do with metadata that is there already.
enum Existing {
    /// None, or it may be overwritten.
    Create,
    /// Convert it.
    Convert(Box<AnySuperBlock>),
    /// The operator said no.
    Declined,
}

impl Tool<'_> {
    pub(super) fn create_md(&mut self) -> Result<u8, Failure> {
        let options = &self.line.options;
        let max_peers = match self.line.target.format {
            Format::V08 => 1,
            Format::V09 => self.max_peers()?,
        };
        let al = al_geometry(options, None)?;
        let bitmap_block = options.bitmap_block.unwrap_or_default();
        let geometry = Geometry {
            max_peers,
            bitmap_block,
            al,
        };
        let mut device = self.open()?;
        let layout = self.new_layout(&device, geometry)?;
        match self.existing(&mut device, &layout)? {
            Existing::Create => {}
            Existing::Convert(old) => return self.convert(&mut device, &old, &layout),
            Existing::Declined => {
                self.say("Operation cancelled.\n")?;
                return Ok(1);
            }
        }
        if !self.check_content(&mut device, &layout)? {
            return Ok(1);
        }
        let mut superblock = AnySuperBlock::fresh(self.line.target.format, &layout);
        self.set_created_fields(&mut superblock)?;
        self.say("initializing activity log\n")?;
        let options = &self.line.options;
        let init = options.initialize_bitmap.unwrap_or(BitmapInit::Clear);
        let kib = layout.bitmap_area_bytes() / 1024;
        match init {
            BitmapInit::Clear => {
                self.note(&format!("initializing bitmap ({kib} KB) to all zero\n"))?;
            }
            BitmapInit::Set => {
                self.note(&format!("initializing bitmap ({kib} KB) to all set\n"))?;
            }
            BitmapInit::Keep => self.note("SKIPPED initializing bitmap area\n")?,
        }
        store::create(&mut device, &layout, &superblock, init).map_err(io_failure)?;
        self.say(CREATED)?;
        Ok(0)
    }

    fn max_peers(&self) -> Result<u8, Failure> {
        let Some(word) = self.line.arguments.first() else {
            return Err(Failure::usage(
                "USAGE: drbdmeta MINOR v09 ... create-md MAX_PEERS\n\n  \
                 MAX_PEERS argument missing",
            ));
        };
        let peers = number(word, 1)
            .ok_or_else(|| Failure::usage(format!("{word} is not a valid number")))?;
        u8::try_from(peers)
            .ok()
            .filter(|n| (1..=31).contains(n))
            .ok_or_else(|| Failure::usage("MAX_PEERS argument not in allowed range 1 .. 31."))
    }

    pub(super) fn new_layout(
        &self,
        device: &Device,
        geometry: Geometry,
    ) -> Result<Layout, Failure> {
        let name = &self.line.target.device;
        let placement = self.line.target.placement;
        let size = device.size_bytes();
        if size < LOOK_BYTES as u64 {
            return Err(Failure::value(format!(
                "{name} is only {size} bytes. That's not enough."
            )));
        }
        self.superblock_byte(device)?;
        let layout = Layout::new(placement, geometry, size)
            .map_err(|e| Failure::value(format!("{name}: {e}")))?;
        // Attach refuses these, and a slot that is cut off would lose bitmap bits.
        let cut_off = matches!(placement, Placement::Indexed(_));
        if !Layout::attachable_on(placement, size)
            && (cut_off || !self.line.options.ignore_sanity_checks)
        {
            let hint = if cut_off {
                ""
            } else {
                " (--ignore-sanity-checks creates them anyway)"
            };
            return Err(Failure::value(format!(
                "{name} is only {size} bytes. {placement} meta data on it could not be attached: \
                 that needs at least {} bytes{hint}.",
                match placement {
                    Placement::Internal | Placement::FlexExternal => 1 << 20,
                    Placement::Indexed(slot) => (u64::from(slot) + 1) << 27,
                }
            )));
        }
        Ok(layout)
    }

    fn existing(&mut self, device: &mut Device, layout: &Layout) -> Result<Existing, Failure> {
        let at = layout.superblock_byte();
        let block = store::read_block(device, at).map_err(io_failure)?;
        let wanted = self.line.target.format;
        let found = match Magic::of(&block) {
            Some(Magic::V08 | Magic::V08Unclean) => Format::V08,
            Some(Magic::V09) => Format::V09,
            Some(Magic::V06 | Magic::V07) | None => return Ok(Existing::Create),
        };
        let internal = layout.placement().is_internal();
        let kind = if internal {
            "flexible-size internal"
        } else {
            "external"
        };
        if internal || found != wanted {
            self.note(&format!(
                "You want me to create a {} style {kind} meta data block.\n\
                 There appears to be a {} {kind} meta data block\n\
                 already in place on {} at byte offset {at}\n",
                wanted.name(),
                found.name(),
                self.line.target.device,
            ))?;
        }
        if found != wanted {
            let (f, w) = (found.name(), wanted.name());
            if self.confirm(&format!("Valid {f} meta-data found, convert to {w}?"))? {
                let old = AnySuperBlock::decode(&block);
                return old
                    .map(|sb| Existing::Convert(Box::new(sb)))
                    .map_err(|e| Failure::failed(e.to_string()));
            }
            let replace = format!(
                "So you want me to replace the {f} meta-data\nwith newly initialized {w} meta-data?"
            );
            return Ok(if self.confirm(&replace)? {
                Existing::Create
            } else {
                Existing::Declined
            });
        }
        let options = &self.line.options;
        let striped = options.al_stripes.is_some() || options.al_stripe_size_kib.is_some();
        let old_al = AnySuperBlock::decode(&block)
            .ok()
            .map(|sb| sb.geometry().al);
        if striped
            && old_al.is_some_and(|al| al != layout.geometry().al)
            && self.confirm("Do you want to change the activity log stripe settings *only*?")?
        {
            let text = "Sorry, not yet fully implemented\n\
                        Try dump-md > dump.txt; restore-md -s x -z y dump.txt";
            return Err(Failure {
                code: 30,
                text: text.to_owned(),
            });
        }
        let question = if internal {
            "Do you really want to overwrite the existing meta-data?"
        } else {
            "Valid meta data seems to be in place.\nDo you really want to overwrite?"
        };
        Ok(if self.confirm(question)? {
            Existing::Create
        } else {
            Existing::Declined
        })
    }

    /// Refuses or asks if the device holds something; false if declined.
    pub(super) fn check_content(
        &mut self,
        device: &mut Device,
        layout: &Layout,
    ) -> Result<bool, Failure> {
        let content = Content::of(&read_start(device, LOOK_BYTES)?);
        if content == Content::Nothing {
            return Ok(true);
        }
        self.say(&format!(
            "md_offset {}\nal_offset {}\nbm_offset {}\n\nFound {}\n",
            layout.superblock_byte(),
            layout.al_byte(),
            layout.bitmap_byte(),
            content.name()
        ))?;
        let refused = |text: String| Err(Failure { code: 40, text });
        let ignore = self.line.options.ignore_sanity_checks;
        let usable_kib = layout.tool_usable_sectors() / 2;
        let internal = layout.placement().is_internal();
        match content {
            Content::Nothing => return Ok(true),
            Content::SomeData => self.say("\n ==> This might destroy existing data! <==\n")?,
            Content::FileSystem { size_kib, .. } if internal => {
                self.say(&format!(
                    "{size_kib:12} kB data area apparently used\n{usable_kib:12} kB left usable \
                     by current configuration\n"
                ))?;
                if size_kib > usable_kib {
                    self.say(FILE_SYSTEM_TOO_LARGE)?;
                    return refused(String::new());
                }
                self.say(UNUSED_SPACE)?;
            }
            Content::Swap | Content::PhysicalVolume if internal => {
                self.say(&format!(
                    "{usable_kib:12} kB left usable by current configuration\n\
                     Device size would be truncated, which\nwould corrupt data and result in\n\
                     'access beyond end of device' errors.\n"
                ))?;
                return self.refuse_unless(ignore);
            }
            Content::Swap | Content::PhysicalVolume | Content::FileSystem { .. } => {
                self.say("\nThis would corrupt existing data.\n")?;
                return self.refuse_unless(ignore);
            }
        }
        let proceed = self.confirm("Do you want to proceed?")?;
        if !proceed {
            self.say("Operation canceled.\n")?;
        }
        Ok(proceed)
    }

    fn refuse_unless(&mut self, ignore: bool) -> Result<bool, Failure> {
        if ignore {
            self.say("\nIgnoring sanity check on user request.\n\n")?;
            return Ok(true);
        }
        self.say(ZERO_OUT)?;
        Err(Failure {
            code: 40,
            text: String::new(),
        })
    }

    fn set_created_fields(&self, superblock: &mut AnySuperBlock) -> Result<(), Failure> {
        let options = &self.line.options;
        if let Some(sectors) = options.effective_sectors {
            *superblock.effective_size_mut() = Sector(sectors);
        }
        let max_bio = options.peer_max_bio_bytes.unwrap_or(0);
        let sb = match superblock {
            AnySuperBlock::V08(sb) => {
                sb.peer_max_bio_bytes = max_bio;
                return Ok(());
            }
            AnySuperBlock::V09(sb) => sb,
        };
        sb.peer_max_bio_bytes = max_bio;
        for node in options.diskful_peers.unwrap_or_default().iter() {
            sb.peer_mut(node).flags |= v09::PeerFlags::DEVICE_SEEN;
        }
        if options.peers_outdated {
            for peer in &mut sb.peers {
                peer.flags |= v09::PeerFlags::OUTDATED;
            }
        }
        let valid = options.consistent || options.up_to_date || options.rotate_uuids;
        match options.initial_current_uuid {
            Some(InitialUuid::Value(uuid)) => sb.current_uuid = Uuid(uuid),
            Some(InitialUuid::Random) => sb.current_uuid = Uuid(random_uuid()?),
            None if valid => sb.current_uuid = Uuid(random_uuid()?),
            None => {}
        }
        if options.consistent || options.up_to_date {
            sb.flags |= v09::DeviceFlags::CONSISTENT;
        }
        if options.up_to_date {
            sb.flags |= v09::DeviceFlags::WAS_UP_TO_DATE;
        }
        if options.rotate_uuids {
            for peer in &mut sb.peers {
                peer.bitmap_uuid = sb.current_uuid;
            }
            sb.history[0] = sb.current_uuid;
            sb.current_uuid = Uuid(random_uuid()?);
        }
        Ok(())
    }

    fn convert(
        &mut self,
        device: &mut Device,
        old: &AnySuperBlock,
        new_layout: &Layout,
    ) -> Result<u8, Failure> {
        if !old.is_clean() {
            return Err(Failure::failed(UNCLEAN));
        }
        let old_layout = old
            .layout(self.line.target.placement, device.size_bytes())
            .map_err(|e| Failure::failed(e.to_string()))?;
        match old {
            AnySuperBlock::V08(sb) => {
                if new_layout.geometry().max_peers != 1 {
                    self.say(&format!(
                        "Warning: setting max_peers to 1 instead of {}\n\n",
                        new_layout.geometry().max_peers
                    ))?;
                }
                let new = AnySuperBlock::V09(sb.to_v09());
                self.say("Writing meta data...\n")?;
                store::write_superblock(device, &old_layout, &new).map_err(io_failure)?;
            }
            AnySuperBlock::V09(sb) => {
                self.say("Writing meta data...\n")?;
                convert_to_v08(device, sb, &old_layout)?;
            }
        }
        self.say("New drbd meta data block successfully created.\n")?;
        Ok(0)
    }
}

/// The bitmap of one slot stays where it is. That of several slots is interleaved and cannot;
/// if it holds anything, the new metadata asks for a full sync.
fn convert_to_v08(
    device: &mut Device,
    old: &v09::SuperBlock,
    old_layout: &Layout,
) -> Result<(), Failure> {
    if old.geometry.bitmap_block != BitmapBlock::DEFAULT {
        return Err(Failure::failed(format!(
            "v08 knows only 4096 bytes per bitmap bit, this metadata has {}",
            old.geometry.bitmap_block.bytes()
        )));
    }
    let geometry = Geometry {
        max_peers: 1,
        ..old.geometry
    };
    let size = device.size_bytes();
    let layout = Layout::new(old_layout.placement(), geometry, size)
        .map_err(|e| Failure::failed(e.to_string()))?;
    // Which entry becomes the one peer: the only one with a slot, else that of node 0.
    let mut with_slot = old.peers.iter().filter(|peer| peer.bitmap_index.is_some());
    let peer = match (with_slot.next(), with_slot.next()) {
        (Some(only), None) => only,
        _ => &old.peers[0],
    };
    let mut new = v08::SuperBlock::from_v09(old, peer, &layout);
    let any = AnySuperBlock::V09(old.clone());
    if old.geometry.max_peers == 1 {
        new.offsets = old.offsets;
        let new = AnySuperBlock::V08(new);
        return store::write_superblock(device, old_layout, &new).map_err(io_failure);
    }
    if store::any_bit_set(device, old_layout, &any).map_err(io_failure)? {
        new.flags |= v08::Flags::FULL_SYNC;
    }
    let new = AnySuperBlock::V08(new);
    store::create(device, &layout, &new, BitmapInit::Clear).map_err(io_failure)
}

/// The activity-log shape of the options; what they leave open is as in `base` or the default.
pub(super) fn al_geometry(
    options: &Options,
    base: Option<AlGeometry>,
) -> Result<AlGeometry, Failure> {
    let base = base.unwrap_or_default();
    if options.al_stripes.is_none() && options.al_stripe_size_kib.is_none() {
        return Ok(base);
    }
    let stripes = options.al_stripes.unwrap_or(base.stripes().into());
    let blocks = options
        .al_stripe_size_kib
        .map_or(u64::from(base.stripe_blocks()), |kib| kib / 4);
    let total = stripes.saturating_mul(blocks);
    let wrong = |what| {
        Err(Failure::value(format!(
            "invalid (too {what}) al-stripe* settings"
        )))
    };
    if total < AlGeometry::MIN_BLOCKS {
        return wrong("small");
    }
    if total > AlGeometry::MAX_TOOL_BLOCKS {
        return wrong("large");
    }
    match AlGeometry::new(stripes as u32, blocks as u32) {
        Some(al) => Ok(al),
        None => wrong("small"),
    }
}

const CREATED: &str = "Writing meta data...\nNew drbd meta data block successfully created.\n";

const FILE_SYSTEM_TOO_LARGE: &str = "
Device size would be truncated, which
would corrupt data and result in
'access beyond end of device' errors.
You need to either
   * use external meta data (recommended)
   * shrink that filesystem first
   * zero out the device (destroy the filesystem)
Operation refused.

";

const UNUSED_SPACE: &str = "
Even though it looks like this would place the new meta data into
unused space, you still need to confirm, as this is only a guess.
";

const ZERO_OUT: &str = "If you want me to do this, you need to zero out the first part
of the device (destroy the content).
You should be very sure that you mean it.
Operation refused.

";
