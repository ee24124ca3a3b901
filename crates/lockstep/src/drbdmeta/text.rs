//! `dump-md`, `restore-md` and `verify-dump`.

use lockstep_format::disk::any::{AnySuperBlock, Format};
use lockstep_format::disk::bitmap::Piece;
use lockstep_format::disk::dump::{self, Dump, Members, WordPrinter};
use lockstep_format::disk::layout::{Geometry, Layout};
use lockstep_format::disk::store::{self, Store};
use lockstep_format::disk::{Magic, SECTOR_BYTES};

use super::create::al_geometry;
use super::options::Failure;
use super::{Found, NO_METADATA, Tool, UNCLEAN, io_failure, output_failure};

/// Bytes of the bitmap that are read at a time; a multiple of the words of up to 31 slots is not
/// needed, since words are looked up by index.
const PIECE_BYTES: u64 = 1 << 20;

impl Tool<'_> {
    pub(super) fn dump_md(&mut self) -> Result<u8, Failure> {
        let mut found = self.find(NO_METADATA)?;
        if !found.superblock.is_clean() && !self.line.options.force {
            return Err(Failure::failed(UNCLEAN));
        }
        // Zero says nothing, and older tools cannot parse the line.
        let members = match &found.superblock {
            AnySuperBlock::V09(sb) if !sb.members.is_empty() => Members::Print,
            _ => Members::Leave,
        };
        let header = header(self.args);
        let place = dump::place_comment(&found.layout);
        let head = dump::print_head(&found.superblock, &place, members);
        self.say(&format!("{header}{head}"))?;
        let bits_set = self.dump_bitmap(&mut found)?;
        self.say(&format!("# bits-set {bits_set};\n"))?;
        if self.line.options.verbose >= 10 {
            let al = found.layout.geometry().al;
            let mut area = vec![0; al.bytes() as usize];
            found
                .device
                .read(found.layout.al_byte(), &mut area)
                .map_err(io_failure)?;
            let form = store::al_form(&area, &found.layout, &found.superblock);
            let text = dump::print_al(&area, al, found.superblock.al_extents(), form);
            self.say(&text)?;
        }
        Ok(0)
    }

    /// Prints all slots; returns the number of bits in the last one.
    fn dump_bitmap(&mut self, found: &mut Found) -> Result<u64, Failure> {
        let shape = store::agreed_bitmap(&found.layout, &found.superblock);
        let area = shape.area_bytes();
        self.say(&format!("# bm-bytes {area};\n"))?;
        let mut bits_set = 0;
        for slot in 0..shape.slots() {
            let mut text = match found.superblock.format() {
                Format::V08 => String::from("bm {\n"),
                Format::V09 => format!("bitmap[{slot}] {{\n"),
            };
            let mut printer = WordPrinter::new(shape.slots());
            let mut lower = None;
            let mut left = dump::words_of_slot(area, shape.slots(), slot);
            let mut at = 0;
            while at < area && left > 0 {
                let len = PIECE_BYTES.min(area - at);
                let mut bytes = vec![0; len as usize];
                let start = found.layout.bitmap_byte() + at;
                found.device.read(start, &mut bytes).map_err(io_failure)?;
                for (_, half) in Piece::new(&shape, at, &bytes[..]).words(slot) {
                    match lower.take() {
                        None => lower = Some(half),
                        Some(low) if left > 0 => {
                            let word = u64::from(low) | u64::from(half) << 32;
                            printer.push(word, &mut text);
                            left -= 1;
                        }
                        Some(_) => {}
                    }
                }
                self.out
                    .write_all(text.as_bytes())
                    .map_err(output_failure)?;
                text.clear();
                at += len;
            }
            bits_set = printer.finish(&mut text);
            text.push_str("}\n");
            self.say(&text)?;
        }
        Ok(bits_set)
    }

    fn parse_file(&mut self) -> Result<Dump, Failure> {
        let name = self.argument(0, "file")?;
        let text =
            std::fs::read(name).map_err(|_| Failure::usage(format!("open of '{name}' failed.")))?;
        let text = String::from_utf8_lossy(&text);
        let wanted = self.line.target.format.name();
        let version = dump::version(&text).map_err(|e| Failure::value(e.to_string()))?;
        if version != wanted {
            let text = format!("dump is '{version}' you requested '{wanted}'.");
            return Err(Failure::value(text));
        }
        dump::parse(&text).map_err(|e| Failure::value(e.to_string()))
    }

    pub(super) fn verify_dump(&mut self) -> Result<u8, Failure> {
        self.parse_file()?;
        self.say("input file parsed ok\n")?;
        Ok(0)
    }

    /// The layout follows from the parsed text and the device, so that the bitmap never lands
    /// anywhere else; the activity log and the rest of the bitmap are initialised.
    pub(super) fn restore_md(&mut self) -> Result<u8, Failure> {
        let name = self.argument(0, "file")?;
        if !std::path::Path::new(name).exists() {
            return Err(Failure::usage(format!("open of '{name}' failed.")));
        }
        let mut device = self.open()?;
        let at = self.superblock_byte(&device)?;
        let block = store::read_block(&mut device, at).map_err(io_failure)?;
        let in_place = Magic::of(&block).is_some();
        if in_place && !self.confirm("Valid meta-data in place, overwrite?")? {
            return Ok(1);
        }
        let parsed = self.parse_file()?;
        if in_place {
            self.note("reinitializing\n")?;
        }
        let mut superblock = parsed.superblock;
        let old = superblock.geometry();
        let al = al_geometry(&self.line.options, Some(old.al))?;
        let layout = self.new_layout(&device, Geometry { al, ..old })?;
        if !in_place && !self.check_content(&mut device, &layout)? {
            return Ok(1);
        }
        superblock.set_layout(&layout);
        if let Some((found, usable)) = store::clip_effective_size(&layout, &mut superblock) {
            let text = format!("# la-size-sect was too big ({found}), truncated ({usable})!\n");
            self.say(&text)?;
        }
        check_restored(&superblock, &layout, device.size_bytes())?;
        store::restore(&mut device, &layout, &superblock, &parsed.bitmap).map_err(io_failure)?;
        self.say("Successfully restored meta data\n")?;
        Ok(0)
    }
}

/// Checks what is about to be written the way a reader would.
fn check_restored(superblock: &AnySuperBlock, layout: &Layout, size: u64) -> Result<(), Failure> {
    superblock
        .layout(layout.placement(), size)
        .map(|_| ())
        .map_err(|e| Failure::value(e.to_string()))
}

fn header(args: &[String]) -> String {
    let host = rustix::system::uname();
    let seconds = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    format!(
        "# DRBD meta data dump\n# {} [{seconds}]\n# {}> drbdmeta {}\n#\n\n",
        date_words(seconds),
        host.nodename().to_string_lossy(),
        args.join(" "),
    )
}

/// A point in time in UTC, as `2026-01-31 23:59:59 +0000`.
pub(super) fn date_words(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years begin in March here, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} +0000")
}

const _: () = assert!(PIECE_BYTES.is_multiple_of(SECTOR_BYTES));
