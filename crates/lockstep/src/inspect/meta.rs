//! `lockstep inspect meta`: prints a metadata area and what is wrong in it.

use std::fmt::Write as _;
use std::io;
use std::process::ExitCode;

use lockstep_format::disk::al::{self, AlForm, Coverage, Replay, ReplayError};
use lockstep_format::disk::any::AnySuperBlock;
use lockstep_format::disk::bitmap::Piece;
use lockstep_format::disk::layout::{Layout, Placement, superblock_sector};
use lockstep_format::disk::store::{self, Store};
use lockstep_format::disk::v09::{self, DeviceFlags};
use lockstep_format::disk::{Magic, SECTOR_BYTES};
use lockstep_format::units::NodeId;

use crate::drbdmeta::device::{Access, Device, PlainFile};

/// Runs `lockstep inspect meta ARGS`.
pub(super) fn run(args: &[String]) -> ExitCode {
    let (placement, path) = match args {
        [path] if !path.starts_with("--") => (None, path),
        [flag, index, path] if flag == "--index" => match parse_index(index) {
            Some(placement) => (Some(placement), path),
            None => return super::usage_error(&format!("'{index}' is no metadata index")),
        },
        _ => return super::usage_error("lockstep inspect meta: say which image"),
    };
    let mut report = Report::default();
    if let Err(error) = report.inspect(path, placement) {
        report.problem(&error.to_string());
    }
    print!("{}", report.text);
    if report.problems == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    }
}

fn parse_index(word: &str) -> Option<Placement> {
    match word {
        "internal" => Some(Placement::Internal),
        "flex-external" => Some(Placement::FlexExternal),
        _ => word.parse().ok().map(Placement::Indexed),
    }
}

/// What is printed, and how much of it is wrong.
#[derive(Default)]
struct Report {
    text: String,
    problems: u32,
}

impl Report {
    fn say(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.text, "{name:16} {value}");
    }

    fn problem(&mut self, text: &str) {
        self.problems += 1;
        let _ = writeln!(self.text, "WRONG: {text}");
    }

    fn inspect(&mut self, path: &str, placement: Option<Placement>) -> io::Result<()> {
        let mut device = Device::open(path, Access::Read, false, PlainFile::Allowed)
            .map_err(io::Error::other)?;
        let size = device.size_bytes();
        self.say("device", format_args!("{path}, {size} bytes"));
        let Some((placement, at, block)) = find(&mut device, placement)? else {
            self.problem("no metadata at any place that was looked at");
            return Ok(());
        };
        self.say("placement", placement);
        self.say("superblock", format_args!("byte {at}"));
        let superblock = match AnySuperBlock::decode(&block) {
            Ok(superblock) => superblock,
            Err(error) => {
                self.problem(&error.to_string());
                return Ok(());
            }
        };
        self.superblock(&superblock, &block);
        let layout = match superblock.layout(placement, size) {
            Ok(layout) => layout,
            Err(error) => {
                self.problem(&error.to_string());
                return Ok(());
            }
        };
        self.areas(&superblock, &layout);
        self.activity_log(&mut device, &superblock, &layout)?;
        self.bitmap(&mut device, &superblock, &layout)
    }

    fn superblock(&mut self, superblock: &AnySuperBlock, block: &[u8; 4096]) {
        self.say("format", superblock.format().name());
        self.say("current UUID", superblock.current_uuid());
        self.say(
            "device UUID",
            format_args!("{:016X}", superblock.device_uuid()),
        );
        self.say(
            "effective size",
            format_args!("{} sectors", superblock.effective_size()),
        );
        let clean = if superblock.is_clean() {
            "clean"
        } else {
            "unclean"
        };
        self.say("state", clean);
        match superblock {
            AnySuperBlock::V08(sb) => {
                self.say("bitmap UUID", sb.bitmap_uuid);
                self.say(
                    "flags",
                    flag_names(sb.flags.iter_names().map(|(name, _)| name)),
                );
            }
            AnySuperBlock::V09(sb) => {
                self.say(
                    "flags",
                    flag_names(sb.flags.iter_names().map(|(name, _)| name)),
                );
                let own = sb.node_id.map_or("none".to_owned(), |id| id.to_string());
                self.say("node id", own);
                self.peers(sb);
            }
        }
        let mut again = [0; 4096];
        superblock.encode(&mut again);
        let unknown = again.iter().zip(block).filter(|(a, b)| a != b).count();
        if unknown > 0 {
            self.problem(&format!("{unknown} bytes of the superblock mean nothing"));
        }
    }

    fn peers(&mut self, sb: &v09::SuperBlock) {
        for (id, peer) in (0u8..).zip(&sb.peers) {
            if peer.bitmap_index.is_none() && peer.flags.is_empty() {
                continue;
            }
            let slot = peer
                .bitmap_index
                .map_or("none".to_owned(), |slot| slot.to_string());
            let names = flag_names(peer.flags.iter_names().map(|(name, _)| name));
            let uuid = peer.bitmap_uuid;
            self.say(
                &format!("peer {id}"),
                format_args!("slot {slot}, bitmap UUID {uuid}, {names}"),
            );
        }
        let Some(day0) = sb.day0_peer().map(|peer| peer.bitmap_uuid) else {
            return;
        };
        self.say("day-0 UUID", day0);
        for (id, peer) in (0u8..).zip(&sb.peers) {
            let own = sb.node_id == Some(NodeId(id));
            if !own && peer.is_day0() && peer.bitmap_uuid != day0 {
                self.problem(&format!(
                    "peer {id} has the day-0 UUID {}; `drbdmeta repair-md` corrects it",
                    peer.bitmap_uuid
                ));
            }
        }
    }

    fn areas(&mut self, superblock: &AnySuperBlock, layout: &Layout) {
        let geometry = layout.geometry();
        self.say(
            "activity log",
            format_args!(
                "byte {}, {} stripes of {} blocks, al-extents {}",
                layout.al_byte(),
                geometry.al.stripes(),
                geometry.al.stripe_blocks(),
                superblock.al_extents()
            ),
        );
        self.say(
            "bitmap",
            format_args!(
                "byte {}, {} bytes, {} slots, {} bytes per bit",
                layout.bitmap_byte(),
                layout.bitmap_area_bytes(),
                geometry.max_peers,
                geometry.bitmap_block.bytes()
            ),
        );
        let usable = layout.tool_usable_sectors();
        self.say("usable", format_args!("{usable} sectors"));
        if superblock.effective_size().0 > usable {
            self.problem("the effective size is larger than what the device can hold");
        }
        if superblock.al_extents() > u32::from(geometry.al.max_extents()) {
            self.problem(&format!(
                "al-extents is above {}, which this activity log can hold",
                geometry.al.max_extents()
            ));
        }
    }

    fn activity_log(
        &mut self,
        device: &mut Device,
        superblock: &AnySuperBlock,
        layout: &Layout,
    ) -> io::Result<()> {
        let mut area = vec![0; layout.geometry().al.bytes() as usize];
        device.read(layout.al_byte(), &mut area)?;
        let extents = superblock.al_extents();
        let (form, replay) = match store::al_form(&area, layout, superblock) {
            AlForm::Blocks => ("blocks", al::replay(&area, layout.geometry().al)),
            AlForm::PersistentMemory => (
                "persistent memory",
                Ok(al::replay_persistent_memory(&area, extents)),
            ),
            AlForm::Legacy => ("DRBD 8.3", Ok(al::replay_legacy(&area, extents))),
        };
        self.say("log form", form);
        self.replayed(superblock, replay);
        Ok(())
    }

    fn replayed(&mut self, superblock: &AnySuperBlock, replay: Result<Replay, ReplayError>) {
        let replay = match replay {
            Ok(replay) => replay,
            Err(error) => return self.problem(&error.to_string()),
        };
        let list: Vec<String> = replay.active.iter().map(|e| e.0.to_string()).collect();
        self.say(
            "active extents",
            format_args!("{} {}", list.len(), list.join(" ")),
        );
        if replay.corrupt_blocks > 0 {
            self.say("damaged blocks", replay.corrupt_blocks);
        }
        if let Coverage::Incomplete(gap) = replay.coverage {
            self.problem(&format!(
                "the activity log is incomplete ({gap:?}): apply-al marks all"
            ));
        }
        if replay.slots_out_of_range > 0 {
            self.problem(&format!(
                "{} slot numbers out of range",
                replay.slots_out_of_range
            ));
        }
        if superblock.is_clean() && !replay.active.is_empty() {
            self.problem("the metadata says clean, but the activity log holds extents");
        }
        let disabled =
            DeviceFlags::CRASHED_PRIMARY | DeviceFlags::PRIMARY_IND | DeviceFlags::AL_DISABLED;
        if superblock.device_flags().contains(disabled) {
            self.problem("crashed as primary without an activity log: apply-al marks all");
        }
    }

    fn bitmap(
        &mut self,
        device: &mut Device,
        superblock: &AnySuperBlock,
        layout: &Layout,
    ) -> io::Result<()> {
        let shape = store::agreed_bitmap(layout, superblock);
        let mut counts = vec![0u64; shape.slots().into()];
        let mut at = 0;
        while at < shape.area_bytes() {
            let len = (shape.area_bytes() - at).min(1 << 20);
            let mut bytes = vec![0; len as usize];
            device.read(layout.bitmap_byte() + at, &mut bytes)?;
            let piece = Piece::new(&shape, at, &bytes[..]);
            for (slot, count) in (0u8..).zip(&mut counts) {
                *count += piece.count(slot, shape.bits());
            }
            at += len;
        }
        for (slot, count) in counts.into_iter().enumerate() {
            let of = shape.bits();
            self.say(
                &format!("slot {slot}"),
                format_args!("{count} of {of} bits set"),
            );
        }
        Ok(())
    }
}

fn flag_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() {
        "no flags".to_owned()
    } else {
        names.join(" ")
    }
}

/// The place that was asked for, or else the first with a magic number.
fn find(
    device: &mut Device,
    placement: Option<Placement>,
) -> io::Result<Option<(Placement, u64, [u8; 4096])>> {
    let size = device.size_bytes();
    let places = match placement {
        Some(placement) => vec![placement],
        None => vec![Placement::Internal, Placement::FlexExternal],
    };
    for asked in places {
        let Some(sector) = superblock_sector(asked, size) else {
            continue;
        };
        let at = sector * SECTOR_BYTES;
        let block = store::read_block(device, at)?;
        if Magic::of(&block).is_none() {
            continue;
        }
        // Slot 0 and flexible metadata start at the same place; the size field tells them apart.
        let slot0 = placement.is_none()
            && asked == Placement::FlexExternal
            && AnySuperBlock::decode(&block)
                .is_ok_and(|sb| sb.layout(asked, size).is_ok_and(|l| slot_sized(&l, size)));
        let found = if slot0 { Placement::Indexed(0) } else { asked };
        return Ok(Some((found, at, block)));
    }
    Ok(None)
}

fn slot_sized(layout: &Layout, device_bytes: u64) -> bool {
    let size = u64::from(layout.offsets().md_size_sectors) * SECTOR_BYTES;
    size == 128 << 20 && device_bytes != size
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drbdmeta::tests_support::run_drbdmeta;

    fn inspect(path: &str) -> Report {
        let mut report = Report::default();
        report.inspect(path, None).unwrap();
        report
    }

    #[test]
    fn fresh_metadata_is_sound_and_damage_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("md.img").display().to_string();
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        assert_eq!(inspect(&path).problems, 1, "nothing there");
        let create = format!("--force -Z 65536s - v09 {path} internal create-md 2");
        assert_eq!(run_drbdmeta(&create), 0);
        let sound = inspect(&path);
        assert_eq!(sound.problems, 0, "{}", sound.text);
        assert!(
            sound.text.contains("slot 1           0 of 8192 bits set"),
            "{}",
            sound.text
        );
        use std::os::unix::fs::FileExt;
        let place = (64 << 20) - 4096;
        let damage = |at: u64, bytes: &[u8], text: &str| {
            let mut before = vec![0; bytes.len()];
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(&path)
                .unwrap();
            file.read_exact_at(&mut before, at).unwrap();
            file.write_all_at(bytes, at).unwrap();
            let report = inspect(&path);
            assert!(
                report.problems > 0 && report.text.contains(text),
                "{}",
                report.text
            );
            file.write_all_at(&before, at).unwrap();
        };
        damage(place + 88, &[0, 0, 0, 32], "max-peers is 32");
        damage(place + 24, &[1], "1 bytes of the superblock mean nothing");
        damage(
            place + 76,
            &[0xff, 0xff, 0xff, 0xf8],
            "bm_offset in the superblock is -8",
        );
        damage(place + 112 + 20, &[0, 0, 0, 2], "peer 0: bitmap-index is 2");
        damage(place - 32768, &[0; 32768], "no usable activity log found");
    }
}
