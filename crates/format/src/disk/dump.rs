//! The text of `dump-md`: printing and parsing (section 20).
//!
//! Printing follows the original byte for byte, run lengths included, so that texts can be
//! compared. Parsing accepts any text of the grammar.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write as _;

use super::al::{AlForm, Block, CONTEXT_PER_TRANSACTION, FREE};
use super::any::{AnySuperBlock, Format};
use super::layout::{AlGeometry, BitmapBlock, Geometry, Layout, StoredOffsets};
use super::{
    BLOCK_BYTES, CREATE_AL_EXTENTS, HISTORY_UUIDS, MAX_BITMAP_SLOTS, MAX_DEVICE_SECTORS, PEERS_MAX,
    v08, v09,
};
use crate::units::{AlExtent, Dagtag, NodeId, NodeMask, Sector, Uuid};

/// Whether to print the `members` of v09. Tools before 9.27 neither print nor parse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Members {
    /// As since 9.27.
    Print,
    /// As before.
    Leave,
}

/// Everything from the version line to the first bitmap. `place` are the comment lines that say
/// where the areas are; see [`place_comment`].
pub fn print_head(superblock: &AnySuperBlock, place: &str, members: Members) -> String {
    let mut out = String::new();
    out.push_str(&format!("version \"{}\";\n\n", superblock.format().name()));
    if !superblock.is_clean() {
        out.push_str(UNCLEAN_TOKEN);
        out.push_str("\n# You should \"apply-al\" first, if you plan to restore this.\n\n");
    }
    match superblock {
        AnySuperBlock::V08(sb) => print_v08(&mut out, sb, place),
        AnySuperBlock::V09(sb) => print_v09(&mut out, sb, place, members),
    }
    let g = superblock.geometry();
    out.push_str(&format!(
        "# al-extents {};\nla-size-sect {};\nbm-byte-per-bit {};\ndevice-uuid 0x{:016X};\n\
         la-peer-max-bio-size {};\nal-stripes {};\nal-stripe-size-4k {};\n",
        superblock.al_extents(),
        superblock.effective_size(),
        g.bitmap_block.bytes(),
        superblock.device_uuid(),
        superblock.peer_max_bio_bytes(),
        g.al.stripes(),
        g.al.stripe_blocks(),
    ));
    out
}

const UNCLEAN_TOKEN: &str = "This_is_an_unclean_meta_data_dump._Don't_trust_the_bitmap.";

/// The comment lines with the places of the areas, as they usually are.
pub fn place_comment(layout: &Layout) -> String {
    format!(
        "# md_size_sect {}\n# md_offset {}\n# al_offset {}\n# bm_offset {}\n",
        layout.offsets().md_size_sectors,
        layout.superblock_byte(),
        layout.al_byte(),
        layout.bitmap_byte(),
    )
}

fn print_v08(out: &mut String, sb: &v08::SuperBlock, place: &str) {
    out.push_str(place);
    out.push_str(&format!(
        "\nuuid {{\n    0x{}; 0x{}; 0x{}; 0x{};\n    flags 0x{:08X};\n}}\n",
        sb.current_uuid,
        sb.bitmap_uuid,
        sb.history[0],
        sb.history[1],
        sb.flags.bits(),
    ));
}

fn print_v09(out: &mut String, sb: &v09::SuperBlock, place: &str, members: Members) {
    out.push_str(&format!("max-peers {};\n{place}\n", sb.geometry.max_peers));
    let node_id = sb.node_id.map_or(-1, |id| i32::from(id.0));
    out.push_str(&format!(
        "node-id {node_id};\ncurrent-uuid 0x{};\nflags 0x{:08X};\n",
        sb.current_uuid,
        sb.flags.bits(),
    ));
    if members == Members::Print {
        out.push_str(&format!("members 0x{:016X};\n", sb.members.0));
    }
    for (id, peer) in sb.peers.iter().enumerate() {
        let names = peer_flag_names(peer.flags);
        out.push_str(&format!(
            "peer[{id}] {{\n    bitmap-index {};\n    bitmap-uuid 0x{};\n    \
             bitmap-dagtag 0x{:016X};\n    flags 0x{:08X};{names}\n}}\n",
            peer.bitmap_index.map_or(-1, i32::from),
            peer.bitmap_uuid,
            peer.bitmap_dagtag.0,
            peer.flags.bits(),
        ));
    }
    out.push_str("history-uuids {");
    for (i, uuid) in sb.history.iter().enumerate() {
        let gap = if i % 4 == 0 { "\n        " } else { " " };
        out.push_str(&format!("{gap}0x{uuid};"));
    }
    out.push_str("\n}\n");
}

fn peer_flag_names(flags: v09::PeerFlags) -> String {
    let names = [
        (v09::PeerFlags::CONNECTED, "connected"),
        (v09::PeerFlags::OUTDATED, "<=outdated"),
        (v09::PeerFlags::FENCING, "fencing"),
        (v09::PeerFlags::FULL_SYNC, "full-sync"),
        (v09::PeerFlags::DEVICE_SEEN, "seen"),
        (v09::PeerFlags::NODE_EXISTS, "exists"),
    ];
    let set: Vec<&str> = names
        .iter()
        .filter(|(flag, _)| flags.contains(*flag))
        .map(|(_, name)| *name)
        .collect();
    if set.is_empty() {
        String::new()
    } else {
        format!(" # {}", set.join(" | "))
    }
}

/// Number of 64-bit words that the text has for `slot`, when the whole bitmap is `area_bytes`.
/// An odd half word at the end is left out.
pub const fn words_of_slot(area_bytes: u64, slots: u8, slot: u8) -> u64 {
    let raw = area_bytes / 4;
    (raw + slots as u64 - 1 - slot as u64) / slots as u64 / 2
}

/// Prints the 64-bit words of one slot, in order, with run lengths.
#[derive(Debug)]
pub struct WordPrinter {
    slots: u64,
    index: u64,
    pending: Vec<(u64, u64)>,
    waiting: u64,
    bits_set: u64,
}

impl WordPrinter {
    /// For a bitmap of so many slots.
    pub fn new(slots: u8) -> Self {
        Self {
            slots: slots.into(),
            index: 0,
            pending: Vec::new(),
            waiting: 0,
            bits_set: 0,
        }
    }

    /// Takes the next word; text that is certain by now goes to `out`.
    pub fn push(&mut self, word: u64, out: &mut String) {
        self.bits_set += u64::from(word.count_ones());
        self.waiting += 1;
        match self.pending.last_mut() {
            Some((value, count)) if *value == word => *count += 1,
            _ => self.pending.push((word, 1)),
        }
        while self.pending.len() > 1 || self.pending.first().is_some_and(|run| !is_uniform(run.0)) {
            if !self.emit(Remaining::More, out) {
                break;
            }
        }
    }

    /// Prints what is left and returns the number of bits set in all words.
    pub fn finish(mut self, out: &mut String) -> u64 {
        while self.emit(Remaining::Nothing, out) {}
        self.bits_set
    }

    fn emit(&mut self, remaining: Remaining, out: &mut String) -> bool {
        let Some((value, count)) = self.pending.first().copied() else {
            return false;
        };
        let run = count & !3;
        let is_run = is_uniform(value) && run >= 8;
        if !is_run && self.waiting < 4 && remaining == Remaining::More {
            return false;
        }
        // One comment per 64 words of 32 bits over all slots.
        let raw = self.index * 2 * self.slots;
        if raw.is_multiple_of(64) {
            out.push_str(&format!("   # at {}kB\n", raw * 128));
        }
        if is_run {
            out.push_str(&format!("    {run} times 0x{value:016X};\n"));
            self.take(run);
        } else {
            out.push_str("   ");
            for _ in 0..self.waiting.min(4) {
                let word = self.pending[0].0;
                out.push_str(&format!(" 0x{word:016X};"));
                self.take(1);
            }
            out.push('\n');
        }
        true
    }

    fn take(&mut self, words: u64) {
        self.index += words;
        self.waiting -= words;
        self.pending[0].1 -= words;
        if self.pending[0].1 == 0 {
            self.pending.remove(0);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Remaining {
    More,
    Nothing,
}

/// Runs are found by comparing 32-bit words.
fn is_uniform(word: u64) -> bool {
    word >> 32 == word & 0xffff_ffff
}

/// The comment section with the activity log of a very verbose dump. `area` is the whole ring.
pub fn print_al(area: &[u8], geometry: AlGeometry, al_extents: u32, form: AlForm) -> String {
    let mut out = String::from("# al {\n");
    match form {
        AlForm::PersistentMemory => {
            let slots = area.get(4..).unwrap_or_default().chunks_exact(4);
            for (i, w) in slots.take(al_extents as usize).enumerate() {
                match AlExtent(u32::from_be_bytes([w[0], w[1], w[2], w[3]])) {
                    FREE => out.push_str(&format!("# slot[{i}]: {:>10}\n", "FREE")),
                    extent => out.push_str(&format!("# slot[{i}]: {:>10}\n", extent.0)),
                }
            }
        }
        AlForm::Blocks | AlForm::Legacy => {
            for (i, block) in area.chunks_exact(BLOCK_BYTES).enumerate() {
                let block = block
                    .first_chunk::<BLOCK_BYTES>()
                    .map(|b| (b, Block::decode(b)));
                let Some((bytes, decoded)) = block else {
                    continue;
                };
                print_al_block(&mut out, i, bytes, decoded.ok());
            }
        }
    }
    debug_assert!(
        geometry.bytes() >= area.len() as u64,
        "no more than the ring"
    );
    out.push_str("# }\n");
    out
}

fn print_al_block(out: &mut String, i: usize, bytes: &[u8; BLOCK_BYTES], decoded: Option<Block>) {
    let update = match decoded {
        None => return out.push_str(&format!("#     block {i:2} {{ INVALID }}\n")),
        Some(Block::Initialised) => {
            return out.push_str(&format!("#     block {i:2} {{ INITIALIZED }}\n"));
        }
        Some(Block::Update(update)) => update,
    };
    let crc = u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    out.push_str(&format!(
        "#     block {i:2} {{\n# \tmagic: 0x69cb65a2\n# \ttype: 0x0000\n# \ttr: {:10}\n\
         # \tactive set size: {}\n",
        update.number, update.context_size
    ));
    let left = u32::from(update.context_size).saturating_sub(update.context_start.into());
    let shown = left.min(CONTEXT_PER_TRANSACTION) as usize;
    for (k, extent) in update.context.iter().take(shown).enumerate() {
        let slot = usize::from(update.context_start) + k;
        out.push_str(&format!("# \t{k:2}: {slot:10} {:10}\n", extent.0));
    }
    out.push_str(&format!("# \tupdates: {}\n", update.updates.len()));
    for (k, change) in update.updates.iter().enumerate() {
        out.push_str(&format!(
            "# \t{k:2}: {:10} {:10}\n",
            change.slot, change.extent.0
        ));
    }
    let _ = writeln!(out, "# \tcrc32c: 0x{crc:08x}\n#     }}");
}

/// A text that cannot be parsed; printed in the original's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}Parse error in line {line}: {expected} expected", unknown_line(*.line, .unknown))]
pub struct ParseError {
    /// Line of the text, from 1.
    pub line: u32,
    /// The word that is no token at all, if that was the problem.
    pub unknown: Option<String>,
    /// What should have been there.
    pub expected: String,
}

fn unknown_line(line: u32, unknown: &Option<String>) -> String {
    match unknown {
        Some(word) => format!("line {line}: unknown token: {word} ...\n"),
        None => String::new(),
    }
}

/// A dump as parsed. The offsets of the superblock are zero; they follow from the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// All fields of the text; what the text does not have is as after create-md.
    pub superblock: AnySuperBlock,
    /// Words of each slot as (count, value) runs, in order.
    pub bitmap: Vec<Vec<(u64, u64)>>,
}

/// The version that a text names, without reading more of it.
pub fn version(text: &str) -> Result<String, ParseError> {
    Parser::new(text).version()
}

/// Parses a whole text.
pub fn parse(text: &str) -> Result<Dump, ParseError> {
    let mut p = Parser::new(text);
    let version = p.version()?;
    let dump = match version.as_str() {
        "v08" => p.v08_body()?,
        "v09" => p.v09_body()?,
        _ => return Err(p.error("version \"v08\" or \"v09\"")),
    };
    if p.peek().is_some() {
        return Err(p.error("end of file"));
    }
    Ok(dump)
}

struct Parser<'a> {
    rest: &'a str,
    line: u32,
}

struct Sizes {
    effective_size: Sector,
    bitmap_block: BitmapBlock,
    device_uuid: u64,
    peer_max_bio_bytes: u32,
    al: AlGeometry,
}

const NO_OFFSETS: StoredOffsets = StoredOffsets {
    md_size_sectors: 0,
    al_offset_sectors: 0,
    bm_offset_sectors: 0,
};

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text,
            line: 1,
        }
    }

    /// The next token, not consumed: a bracket, a semicolon, a quoted string or a word.
    fn peek(&mut self) -> Option<&'a str> {
        loop {
            let first = self.rest.chars().next()?;
            if first == '#' {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.rest = &self.rest[end..];
            } else if first.is_ascii_whitespace() {
                self.line += u32::from(first == '\n');
                self.rest = &self.rest[1..];
            } else {
                break;
            }
        }
        let punctuation = ['{', '}', '[', ']', ';'];
        let end = if self.rest.starts_with(punctuation) {
            1
        } else if let Some(quoted) = self.rest.strip_prefix('"') {
            quoted.find(['"', '\n']).map_or(self.rest.len(), |i| i + 2)
        } else {
            let stop = |c: char| c.is_ascii_whitespace() || c == '#' || punctuation.contains(&c);
            self.rest.find(stop).unwrap_or(self.rest.len())
        };
        self.rest.get(..end)
    }

    fn take(&mut self) -> Option<&'a str> {
        let token = self.peek()?;
        self.rest = &self.rest[token.len()..];
        Some(token)
    }

    fn error(&mut self, expected: &str) -> ParseError {
        let unknown = self.peek().filter(|t| !is_known_token(t)).map(|t| {
            // The original stops at the first character that no word can have.
            let end = t.find(['.', '\'']).unwrap_or(t.len());
            t[..end].chars().take(60).collect()
        });
        ParseError {
            line: self.line,
            unknown,
            expected: expected.to_owned(),
        }
    }

    fn expect(&mut self, token: &str) -> Result<(), ParseError> {
        if self.peek() == Some(token) {
            self.take();
            return Ok(());
        }
        let quoted = if token
            .chars()
            .next()
            .is_some_and(|c| c.is_ascii_alphabetic())
        {
            format!("keyword '{token}'")
        } else {
            format!("'{token}'")
        };
        Err(self.error(&quoted))
    }

    fn number(&mut self) -> Result<i64, ParseError> {
        let parsed = self
            .peek()
            .filter(|t| is_number(t))
            .and_then(|t| t.parse().ok());
        match parsed {
            Some(number) => {
                self.take();
                Ok(number)
            }
            None => Err(self.error("number ([0-9], up to 20 digits)")),
        }
    }

    fn hex(&mut self, digits: usize) -> Result<u64, ParseError> {
        let parsed = self
            .peek()
            .and_then(|t| t.strip_prefix("0x"))
            .filter(|t| t.len() == digits && t.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|t| u64::from_str_radix(t, 16).ok());
        match parsed {
            Some(value) => {
                self.take();
                Ok(value)
            }
            None => {
                let what = format!("an {digits}digit hex number");
                Err(self.error(&what))
            }
        }
    }

    fn number_in<T: TryFrom<i64>>(
        &mut self,
        range: core::ops::RangeInclusive<i64>,
    ) -> Result<T, ParseError> {
        let before = (self.rest, self.line);
        let number = self.number()?;
        let value = if range.contains(&number) {
            T::try_from(number).ok()
        } else {
            None
        };
        value.ok_or_else(|| {
            (self.rest, self.line) = before;
            let what = format!("a number from {} to {}", range.start(), range.end());
            self.error(&what)
        })
    }

    fn field_number(&mut self, key: &str) -> Result<i64, ParseError> {
        self.expect(key)?;
        let number = self.number()?;
        self.expect(";")?;
        Ok(number)
    }

    fn field_in<T: TryFrom<i64>>(
        &mut self,
        key: &str,
        range: core::ops::RangeInclusive<i64>,
    ) -> Result<T, ParseError> {
        self.expect(key)?;
        let number = self.number_in(range)?;
        self.expect(";")?;
        Ok(number)
    }

    fn field_hex(&mut self, key: &str, digits: usize) -> Result<u64, ParseError> {
        self.expect(key)?;
        self.hex_semicolon(digits)
    }

    fn hex_semicolon(&mut self, digits: usize) -> Result<u64, ParseError> {
        let value = self.hex(digits)?;
        self.expect(";")?;
        Ok(value)
    }

    fn version(&mut self) -> Result<String, ParseError> {
        self.expect("version")?;
        let token = self
            .peek()
            .and_then(|t| t.strip_prefix('"')?.strip_suffix('"'));
        let Some(name) = token.filter(|t| (1..=20).contains(&t.len())) else {
            return Err(self.error("string"));
        };
        self.take();
        self.expect(";")?;
        Ok(name.to_owned())
    }

    fn v08_body(&mut self) -> Result<Dump, ParseError> {
        self.expect("uuid")?;
        self.expect("{")?;
        let mut uuids = [Uuid::ZERO; 4];
        for uuid in &mut uuids {
            *uuid = Uuid(self.hex_semicolon(16)?);
        }
        let flags = self.field_hex("flags", 8)? as u32;
        self.expect("}")?;
        let sizes = self.sizes()?;
        if sizes.bitmap_block != BitmapBlock::DEFAULT {
            return Err(self.error("bm-byte-per-bit 4096"));
        }
        self.expect("bm")?;
        let bitmap = alloc::vec![self.words()?];
        let superblock = v08::SuperBlock {
            effective_size: sizes.effective_size,
            current_uuid: uuids[0],
            bitmap_uuid: uuids[1],
            history: [uuids[2], uuids[3]],
            device_uuid: sizes.device_uuid,
            flags: v08::Flags::from_bits_retain(flags),
            magic_84_unclean: false,
            written_for_peer: false,
            offsets: NO_OFFSETS,
            al_extents: CREATE_AL_EXTENTS,
            peer_max_bio_bytes: sizes.peer_max_bio_bytes,
            al: sizes.al,
        };
        Ok(Dump {
            superblock: AnySuperBlock::V08(superblock),
            bitmap,
        })
    }

    fn v09_body(&mut self) -> Result<Dump, ParseError> {
        let max_peers: u8 = self.field_in("max-peers", 1..=MAX_BITMAP_SLOTS.into())?;
        let node_id: i32 = self.field_in("node-id", -1..=31)?;
        let current_uuid = Uuid(self.field_hex("current-uuid", 16)?);
        let flags = self.field_hex("flags", 8)? as u32;
        let mut members = NodeMask::EMPTY;
        if self.peek() == Some("members") {
            members = NodeMask(self.field_hex("members", 16)?);
        }
        let mut peers = [None; PEERS_MAX];
        for _ in 0..PEERS_MAX {
            self.peer(&mut peers, max_peers)?;
        }
        self.expect("history-uuids")?;
        self.expect("{")?;
        let mut history = [Uuid::ZERO; HISTORY_UUIDS];
        for uuid in &mut history {
            *uuid = Uuid(self.hex_semicolon(16)?);
        }
        self.expect("}")?;
        let sizes = self.sizes()?;
        let mut bitmap = Vec::new();
        for slot in 0..max_peers {
            self.expect("bitmap")?;
            self.index(i64::from(slot)..=slot.into())?;
            bitmap.push(self.words()?);
        }
        let superblock = v09::SuperBlock {
            effective_size: sizes.effective_size,
            current_uuid,
            members,
            device_uuid: sizes.device_uuid,
            flags: v09::DeviceFlags::from_bits_retain(flags),
            offsets: NO_OFFSETS,
            al_extents: CREATE_AL_EXTENTS,
            peer_max_bio_bytes: sizes.peer_max_bio_bytes,
            geometry: Geometry {
                max_peers,
                bitmap_block: sizes.bitmap_block,
                al: sizes.al,
            },
            node_id: u8::try_from(node_id).ok().map(NodeId),
            peers: peers.map(Option::unwrap_or_default),
            history,
            unwritten_since: Uuid::ZERO,
            unwritten_for: crate::units::NodeMask::EMPTY,
        };
        if let Err(reason) = superblock.check_slots() {
            let what = format!("consistent bitmap indices ({reason})");
            return Err(self.error(&what));
        }
        Ok(Dump {
            superblock: AnySuperBlock::V09(superblock),
            bitmap,
        })
    }

    fn index(&mut self, range: core::ops::RangeInclusive<i64>) -> Result<usize, ParseError> {
        self.expect("[")?;
        let index: u8 = self.number_in(range)?;
        self.expect("]")?;
        Ok(index.into())
    }

    fn peer(
        &mut self,
        peers: &mut [Option<v09::Peer>; PEERS_MAX],
        max_peers: u8,
    ) -> Result<(), ParseError> {
        self.expect("peer")?;
        let node = self.index(0..=PEERS_MAX as i64 - 1)?;
        if peers[node].is_some() {
            let what = format!("each peer once, not peer[{node}] again,");
            return Err(self.error(&what));
        }
        self.expect("{")?;
        let index: i32 = self.field_in("bitmap-index", -1..=i64::from(max_peers) - 1)?;
        let bitmap_uuid = Uuid(self.field_hex("bitmap-uuid", 16)?);
        let bitmap_dagtag = Dagtag(self.field_hex("bitmap-dagtag", 16)?);
        let flags = self.field_hex("flags", 8)? as u32;
        self.expect("}")?;
        peers[node] = Some(v09::Peer {
            bitmap_uuid,
            bitmap_dagtag,
            flags: v09::PeerFlags::from_disk(flags),
            bitmap_index: u8::try_from(index).ok(),
        });
        Ok(())
    }

    fn sizes(&mut self) -> Result<Sizes, ParseError> {
        let sectors: i64 = self.field_in("la-size-sect", 0..=MAX_DEVICE_SECTORS as i64)?;
        let bytes_per_bit = self.field_number("bm-byte-per-bit")?;
        let bitmap_block = u32::try_from(bytes_per_bit)
            .ok()
            .and_then(BitmapBlock::from_bytes);
        let Some(bitmap_block) = bitmap_block else {
            return Err(self.error("a power of two from 4096 to 1048576 as bm-byte-per-bit"));
        };
        let device_uuid = self.field_hex("device-uuid", 16)?;
        let peer_max_bio_bytes = self.field_in("la-peer-max-bio-size", 0..=u32::MAX.into())?;
        let stripes: u32 = self.field_in("al-stripes", 0..=u32::MAX.into())?;
        let blocks: u32 = self.field_in("al-stripe-size-4k", 0..=u32::MAX.into())?;
        let Some(al) = AlGeometry::new(stripes, blocks) else {
            return Err(self.error("an activity log of 8 to 4194304 blocks"));
        };
        Ok(Sizes {
            effective_size: Sector(sectors as u64),
            bitmap_block,
            device_uuid,
            peer_max_bio_bytes,
            al,
        })
    }

    fn words(&mut self) -> Result<Vec<(u64, u64)>, ParseError> {
        self.expect("{")?;
        let mut words: Vec<(u64, u64)> = Vec::new();
        while self.peek() != Some("}") {
            let mut count = 1u64;
            if self.peek().is_some_and(is_number) {
                count = self.number_in(1..=i64::MAX)?;
                self.expect("times")?;
            }
            let value = self.hex_semicolon(16)?;
            match words.last_mut() {
                Some((n, last)) if *last == value => *n = n.saturating_add(count),
                _ => words.push((count, value)),
            }
        }
        self.expect("}")?;
        Ok(words)
    }
}

fn is_number(token: &str) -> bool {
    let digits = token.strip_prefix('-').unwrap_or(token);
    (1..=19).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
}

fn is_known_token(token: &str) -> bool {
    const KEYWORDS: [&str; 25] = [
        "version",
        "max-peers",
        "node-id",
        "current-uuid",
        "flags",
        "members",
        "peer",
        "bitmap-index",
        "bitmap-uuid",
        "bitmap-dagtag",
        "history-uuids",
        "uuid",
        "la-size-sect",
        "bm-byte-per-bit",
        "device-uuid",
        "la-peer-max-bio-size",
        "al-stripes",
        "al-stripe-size-4k",
        "bitmap",
        "bm",
        "times",
        "{",
        "}",
        "[",
        "]",
    ];
    let hex = token
        .strip_prefix("0x")
        .is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit()));
    KEYWORDS.contains(&token) || token == ";" || token.starts_with('"') || is_number(token) || hex
}

/// The format that a version name stands for.
pub fn format_of_version(name: &str) -> Option<Format> {
    [Format::V08, Format::V09]
        .into_iter()
        .find(|format| format.name() == name)
}
