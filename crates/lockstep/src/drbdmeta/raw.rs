//! `dump-superblock`: the 4 KiB as hex, as they are, or as JSON.

use std::io::IsTerminal;

use lockstep_format::disk::any::AnySuperBlock;
use lockstep_format::disk::{Magic, store};

use super::options::Failure;
use super::{Tool, io_failure, output_failure};

impl Tool<'_> {
    /// Exit code 0 for valid metadata, 3 for anything else (which is dumped too).
    pub(super) fn dump_superblock(&mut self) -> Result<u8, Failure> {
        let mut device = self.open()?;
        let at = self.superblock_byte(&device)?;
        let block = store::read_block(&mut device, at).map_err(io_failure)?;
        let decoded = AnySuperBlock::decode(&block).ok().filter(|sb| {
            sb.format() == self.line.target.format
                && sb
                    .layout(self.line.target.placement, device.size_bytes())
                    .is_ok()
        });
        let format = self.line.options.output_format.as_deref().unwrap_or("auto");
        match format {
            "json" => {
                let meta = self.json_meta(&block, at, device.size_bytes(), decoded.is_some());
                let body = match (&decoded, Magic::of(&block)) {
                    (_, Some(Magic::V08 | Magic::V08Unclean)) => json_v08(&block),
                    (_, Some(Magic::V09)) => json_v09(&block),
                    (_, Some(Magic::V06 | Magic::V07)) => {
                        return Err(Failure {
                            code: 4,
                            text: "v06 and v07 have no JSON form".to_owned(),
                        });
                    }
                    (_, None) => match self.line.target.format.name() {
                        "v08" => json_v08(&block),
                        _ => json_v09(&block),
                    },
                };
                self.say(&format!("{{\n{body}{meta}}}\n"))?;
            }
            "hex" => self.say(&hex_dump(&block, at))?,
            "auto" if std::io::stdout().is_terminal() => self.say(&hex_dump(&block, at))?,
            _ => self.out.write_all(&block).map_err(output_failure)?,
        }
        Ok(if decoded.is_some() { 0 } else { 3 })
    }

    fn json_meta(&self, block: &[u8; 4096], at: u64, size: u64, valid: bool) -> String {
        let seconds = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        let uname = rustix::system::uname();
        let looks_like = Magic::of(block).map_or("unknown", Magic::name);
        format!(
            "  \"#meta\": {{\n    \"dump_time_utc\": \"{}\",\n    \"dump_host\": \"{}\",\n    \
             \"md_device_name\": {},\n    \"dump_offset\": {at},\n    \"bd_size\": {size},\n    \
             \"dumped_as\": \"{}\",\n    \"looks_like\": \"{looks_like}\",\n    \
             \"valid\": \"{}\"\n  }}\n",
            super::text::date_words(seconds),
            uname.nodename().to_string_lossy(),
            serde_json::Value::from(self.line.target.device.as_str()),
            self.line.target.format.name(),
            if valid {
                "VALID_MD_FOUND"
            } else {
                "NO_VALID_MD_FOUND"
            },
        )
    }
}

struct Fields<'a>(&'a [u8; 4096]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    fn i32(&self, at: usize) -> i32 {
        self.u32(at) as i32
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) << 32 | u64::from(self.u32(at + 4))
    }

    fn hex64(&self, at: usize) -> String {
        format!("\"0x{:016X}\"", self.u64(at))
    }

    fn hex32(&self, at: usize) -> String {
        format!("\"0x{:08X}\"", self.u32(at))
    }

    /// The fields that both formats have at the same place, and the geometry at `stripes`.
    fn common(&self, device_uuid: usize, stripes: usize) -> String {
        format!(
            "  \"effective_size\": {},\n  \"current_uuid\": {},\n  \"device_uuid\": {},\n  \
             \"flags\": {},\n  \"magic\": {},\n  \"md_size_sect\": {},\n  \"al_offset\": {},\n  \
             \"al_nr_extents\": {},\n  \"bm_offset\": {},\n  \"bm_bytes_per_bit\": {},\n  \
             \"la_peer_max_bio_size\": {},\n  \"al_stripes\": {},\n  \
             \"al_stripe_size_4k\": {},\n",
            self.u64(0),
            self.hex64(8),
            self.hex64(device_uuid),
            self.hex32(56),
            self.hex32(60),
            self.u32(64),
            self.i32(68),
            self.u32(72),
            self.i32(76),
            self.u32(80),
            self.u32(84),
            self.u32(stripes),
            self.u32(stripes + 4),
        )
    }

    fn padding(&self, start: usize) -> String {
        let bytes: Vec<String> = (start..4096)
            .filter(|at| self.0[*at] != 0)
            .map(|at| format!("\"{at}\": \"0x{:02X}\"", self.0[at]))
            .collect();
        let inner = match bytes.is_empty() {
            true => String::from(" "),
            false => format!(" {} ", bytes.join(", ")),
        };
        format!(
            "  \"padding\": {{ \"start\": {start}, \"end\": 4096, \"non-zero\": {{{inner}}} }},\n"
        )
    }
}

fn json_v08(block: &[u8; 4096]) -> String {
    let f = Fields(block);
    format!(
        "{}  \"peers\": [ {{ \"bitmap_uuid\": {} }} ],\n  \"history_uuids\": [\n    {}, {}\n  \
         ],\n{}",
        f.common(40, 88),
        f.hex64(16),
        f.hex64(24),
        f.hex64(32),
        f.padding(100),
    )
}

fn json_v09(block: &[u8; 4096]) -> String {
    let f = Fields(block);
    let peers: Vec<String> = (0..32)
        .map(|n| {
            let at = 112 + 32 * n;
            format!(
                "    {{ \"bitmap_uuid\": {},  \"bitmap_dagtag\": {},  \"flags\": {},  \
                 \"bitmap_index\": {},  \"reserved_u32\": [ {}, {} ] }}",
                f.hex64(at),
                f.u64(at + 8),
                f.hex32(at + 16),
                f.i32(at + 20),
                f.hex32(at + 24),
                f.hex32(at + 28),
            )
        })
        .collect();
    let history: Vec<String> = (0..8)
        .map(|row| {
            let four: Vec<String> = (0..4).map(|k| f.hex64(1136 + 8 * (4 * row + k))).collect();
            format!("    {}", four.join(", "))
        })
        .collect();
    format!(
        "{}  \"peers\": [\n{}\n  ],\n  \"bm_max_peers\": {},\n  \"node_id\": {},\n  \
         \"members\": {},\n  \"reserved_u64\": [ {}, {}, {} ],\n  \
         \"reserved_u32\": [ {}, {} ],\n  \"history_uuids\": [\n{}\n  ],\n{}",
        f.common(48, 96),
        peers.join(",\n"),
        f.u32(88),
        f.i32(92),
        f.hex64(16),
        f.hex64(24),
        f.hex64(32),
        f.hex64(40),
        f.hex32(104),
        f.hex32(108),
        history.join(",\n"),
        f.padding(1392),
    )
}

fn hex_dump(block: &[u8; 4096], at: u64) -> String {
    let mut text = String::new();
    let mut starred = false;
    for (i, row) in block.chunks_exact(16).enumerate() {
        let repeats = i > 0 && row == &block[16 * (i - 1)..16 * i] && i < 255;
        if repeats {
            if !starred {
                text.push_str("*\n");
            }
            starred = true;
            continue;
        }
        starred = false;
        let hex = |bytes: &[u8]| {
            bytes
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        let printable: String = row
            .iter()
            .map(|b| {
                if (0x20..0x7f).contains(b) {
                    char::from(*b)
                } else {
                    '.'
                }
            })
            .collect();
        text += &format!(
            "{:08x}  {}  {}  |{printable}|\n",
            at + 16 * i as u64,
            hex(&row[..8]),
            hex(&row[8..])
        );
    }
    text + &format!("{:08x}\n", at + 4096)
}
