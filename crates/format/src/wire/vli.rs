//! The run-length code of compressed bitmaps (wire.md 7.2 and 7.3).
//!
//! Runs alternate between clear and set bits, and each is at least one bit long. A run length is
//! written as prefix and offset, least significant bit first, from the least significant bit of
//! the first byte upward.

use alloc::vec::Vec;

use super::packet::{CompressedBitmap, RunKind};

/// Longest run that the code can express, in bits of the bitmap.
pub const RUN_MAX: u64 = 72_057_611_219_902_768;

/// One row of the code: `prefix` in the low `prefix_bits`, then the offset from `first`.
struct Row {
    total_bits: u32,
    prefix_bits: u32,
    prefix: u64,
    first: u64,
    last: u64,
}

const fn row(total_bits: u32, prefix_bits: u32, prefix: u64, first: u64, last: u64) -> Row {
    assert!(last - first + 1 == 1 << (total_bits - prefix_bits));
    Row {
        total_bits,
        prefix_bits,
        prefix,
        first,
        last,
    }
}

const ROWS: [Row; 10] = [
    row(2, 1, 0x00, 1, 2),
    row(3, 2, 0x01, 3, 4),
    row(5, 3, 0x03, 5, 8),
    row(7, 4, 0x07, 9, 16),
    row(10, 5, 0x0f, 17, 48),
    row(14, 6, 0x1f, 49, 304),
    row(21, 8, 0x3f, 305, 8_496),
    row(29, 8, 0x7f, 8_497, 2_105_648),
    row(42, 8, 0xbf, 2_105_649, 17_181_974_832),
    row(64, 8, 0xff, 17_181_974_833, RUN_MAX),
];

/// The code of a bitmap is broken: drop the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VliError {
    /// The last code word is cut off.
    #[error("code word at bit {bit} needs {need} bits, {have} are left")]
    Truncated {
        /// Where the code word begins.
        bit: usize,
        /// Bits of the code word.
        need: u32,
        /// Bits that are left.
        have: usize,
    },
    /// A run reaches beyond the end of the bitmap.
    #[error("run of {run} bits at bit {position} reaches beyond the bitmap's {total} bits")]
    Overrun {
        /// Where the run begins in the bitmap.
        position: u64,
        /// Its length.
        run: u64,
        /// Bits of the bitmap.
        total: u64,
    },
}

/// Whether a run fitted into the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// It is in.
    Fits,
    /// There is no room; nothing was written. It belongs into the next packet.
    Full,
}

/// Codes runs into one compressed bitmap packet.
#[derive(Clone, Debug)]
pub struct RleEncoder {
    first_run: RunKind,
    code: Vec<u8>,
    used_bits: usize,
    max_bits: usize,
    covered: u64,
}

impl RleEncoder {
    /// An encoder for at most `max_code_bytes` (see `Dialect::bitmap_code_len_max`); the first run
    /// will be of this kind, and kinds alternate from there.
    pub fn new(first_run: RunKind, max_code_bytes: usize) -> RleEncoder {
        let max_bits = max_code_bytes * 8;
        RleEncoder {
            first_run,
            code: Vec::new(),
            used_bits: 0,
            max_bits,
            covered: 0,
        }
    }

    /// Adds the next run, of `run` bits.
    ///
    /// # Panics
    ///
    /// If the run is empty or longer than [`RUN_MAX`]: neither occurs in a bitmap.
    pub fn push(&mut self, run: u64) -> Pushed {
        assert!(run >= 1, "runs alternate, so none is empty");
        let row = ROWS
            .iter()
            .find(|row| run <= row.last)
            .expect("no device has more bits than the longest run");
        if self.used_bits + row.total_bits as usize > self.max_bits {
            return Pushed::Full;
        }
        let mut word = (run - row.first) << row.prefix_bits | row.prefix;
        let mut left = row.total_bits;
        while left > 0 {
            let shift = (self.used_bits % 8) as u32;
            if shift == 0 {
                self.code.push(0);
            }
            let step = (8 - shift).min(left);
            let bits = (word & ((1 << step) - 1)) as u8;
            let last = self.code.len() - 1;
            self.code[last] |= bits << shift;
            word >>= step;
            left -= step;
            self.used_bits += step as usize;
        }
        self.covered += run;
        Pushed::Fits
    }

    /// Bits of the bitmap that the runs cover so far.
    pub const fn covered_bits(&self) -> u64 {
        self.covered
    }

    /// Whether the code is longer than the bits it covers: then send plain words instead.
    pub const fn is_wasteful(&self) -> bool {
        self.used_bits as u64 > self.covered
    }

    /// Whether no run was added.
    pub const fn is_empty(&self) -> bool {
        self.used_bits == 0
    }

    /// The packet with the runs so far.
    pub fn finish(self) -> CompressedBitmap {
        let pad_bits = (self.code.len() * 8 - self.used_bits) as u8;
        CompressedBitmap {
            first_run: self.first_run,
            pad_bits,
            code: self.code,
        }
    }
}

/// The runs of one compressed bitmap packet. Ends after the first error.
#[derive(Clone, Debug)]
pub struct RleDecoder<'a> {
    code: &'a [u8],
    next: RunKind,
    bit: usize,
    end: usize,
}

impl<'a> RleDecoder<'a> {
    /// Reads the packet's code.
    pub fn new(packet: &'a CompressedBitmap) -> RleDecoder<'a> {
        let end = (packet.code.len() * 8).saturating_sub(usize::from(packet.pad_bits));
        RleDecoder {
            code: &packet.code,
            next: packet.first_run,
            bit: 0,
            end,
        }
    }

    /// The next 64 bits of code; zero behind the end.
    fn look_ahead(&self) -> u64 {
        let byte = |index: usize| self.code.get(index).copied().unwrap_or(0);
        let first = self.bit / 8;
        let shift = self.bit % 8;
        let low = (0..8).fold(0, |word, i| word | u64::from(byte(first + i)) << (8 * i));
        if shift == 0 {
            return low;
        }
        low >> shift | u64::from(byte(first + 8)) << (64 - shift)
    }
}

impl Iterator for RleDecoder<'_> {
    type Item = Result<(RunKind, u64), VliError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.bit >= self.end {
            return None;
        }
        let word = self.look_ahead();
        let row = ROWS
            .iter()
            .find(|row| word & ((1 << row.prefix_bits) - 1) == row.prefix)
            .expect("the prefixes cover every bit pattern");
        let have = self.end - self.bit;
        if row.total_bits as usize > have {
            let bit = self.bit;
            self.bit = self.end;
            return Some(Err(VliError::Truncated {
                bit,
                need: row.total_bits,
                have,
            }));
        }
        let offset_bits = row.total_bits - row.prefix_bits;
        let offset = word >> row.prefix_bits & ((1 << offset_bits) - 1);
        self.bit += row.total_bits as usize;
        let kind = self.next;
        self.next = kind.other();
        Some(Ok((kind, row.first + offset)))
    }
}

impl RunKind {
    /// The kind of the run behind one of this kind.
    #[must_use]
    pub const fn other(self) -> RunKind {
        match self {
            RunKind::Clear => RunKind::Set,
            RunKind::Set => RunKind::Clear,
        }
    }
}

/// Walks the runs of set bits of a packet that begins at bit `position` of a bitmap of `total`
/// bits, and returns the position behind it. `set(first bit, number of bits)` is called in
/// ascending order; before an error it may have been called for runs that were sound.
pub fn for_each_set_run(
    packet: &CompressedBitmap,
    position: u64,
    total: u64,
    mut set: impl FnMut(u64, u64),
) -> Result<u64, VliError> {
    let mut position = position;
    for run in RleDecoder::new(packet) {
        let (kind, run) = run?;
        let end = position
            .checked_add(run)
            .filter(|end| *end <= total)
            .ok_or(VliError::Overrun {
                position,
                run,
                total,
            })?;
        if kind == RunKind::Set {
            set(position, run);
        }
        position = end;
    }
    Ok(position)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::{Pushed, ROWS, RUN_MAX, RleDecoder, RleEncoder, VliError, for_each_set_run};
    use crate::wire::packet::{CompressedBitmap, RunKind};

    fn coded(first: RunKind, runs: &[u64]) -> CompressedBitmap {
        let mut encoder = RleEncoder::new(first, 4079);
        for run in runs {
            assert_eq!(encoder.push(*run), Pushed::Fits);
        }
        encoder.finish()
    }

    #[test]
    fn the_worked_example_has_the_bytes_of_the_specification() {
        let runs = [5, 1, 2, 3, 10, 100, 262_023];
        let packet = coded(RunKind::Clear, &runs);
        assert_eq!(
            packet.code,
            [0x03, 0x73, 0xf9, 0x66, 0xfe, 0xac, 0xbc, 0x07]
        );
        assert_eq!(packet.pad_bits, 2);
        let mut set = Vec::new();
        let end = for_each_set_run(&packet, 0, 262_144, |at, run| set.push((at, run)));
        assert_eq!(end, Ok(262_144));
        assert_eq!(set, [(5, 1), (8, 3), (21, 100)]);
        let set = coded(RunKind::Set, &[262_144]);
        assert_eq!(
            (set.code.as_slice(), set.pad_bits),
            (&[0x7f, 0xcf, 0xde, 0x03][..], 3)
        );
    }

    #[test]
    fn first_and_last_length_of_every_row_come_back() {
        for row in &ROWS {
            for run in [row.first, row.last] {
                let packet = coded(RunKind::Set, &[1, run, 7]);
                let runs: Vec<_> = RleDecoder::new(&packet)
                    .map(|run| run.map(|r| r.1))
                    .collect();
                assert_eq!(runs, [Ok(1), Ok(run), Ok(7)]);
            }
        }
        assert_eq!(RUN_MAX, ROWS[9].last);
    }

    #[test]
    fn rows_follow_each_other_without_gap() {
        assert!(
            ROWS.windows(2)
                .all(|pair| pair[0].last + 1 == pair[1].first)
        );
    }

    #[test]
    fn a_run_that_does_not_fit_leaves_the_packet_unchanged() {
        let mut encoder = RleEncoder::new(RunKind::Clear, 1);
        assert_eq!(encoder.push(9), Pushed::Fits);
        assert_eq!(encoder.push(1), Pushed::Full);
        assert_eq!((encoder.covered_bits(), encoder.is_wasteful()), (9, false));
        let packet = encoder.finish();
        assert_eq!((packet.code.as_slice(), packet.pad_bits), (&[0x07][..], 1));
    }

    #[test]
    fn a_cut_code_word_is_an_error_and_ends_the_runs() {
        let packet = CompressedBitmap {
            first_run: RunKind::Set,
            pad_bits: 0,
            code: [0xff].into(),
        };
        let mut runs = RleDecoder::new(&packet);
        assert_eq!(
            runs.next(),
            Some(Err(VliError::Truncated {
                bit: 0,
                need: 64,
                have: 8
            }))
        );
        assert_eq!(runs.next(), None);
    }

    #[test]
    fn a_run_beyond_the_bitmap_is_an_error() {
        let packet = coded(RunKind::Clear, &[10, 7]);
        let result = for_each_set_run(&packet, 0, 16, |_, _| panic!("nothing may be set"));
        assert_eq!(
            result,
            Err(VliError::Overrun {
                position: 10,
                run: 7,
                total: 16
            })
        );
    }
}
