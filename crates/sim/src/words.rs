//! Simulated persistent memory for metadata. A step of a store is persistent when its fence is
//! done; of the words of the step that a power cut meets any may be there, each of 8 bytes whole.

use lockstep_format::disk::pmem::{WORD_BYTES, WordStore};

use crate::disk::{Disk, MetaOp};
use crate::rng::Rng;

/// Bytes that the processor writes back at a time: crash points are so far apart.
pub const LINE_BYTES: usize = 64;

impl Disk {
    /// Why these stores may not be: in words, none if they may.
    pub(crate) fn refuses(&self, steps: &[WordStore]) -> Option<String> {
        for step in steps {
            let (offset, len) = (step.offset, step.bytes.len() as u64);
            let range = format!("at {offset}+{len}");
            if !self.info().persistent_memory {
                return Some(format!("{range}, which is no persistent memory"));
            }
            if !self.open {
                return Some(format!("{range} while it is closed"));
            }
            if len == 0 || !offset.is_multiple_of(WORD_BYTES) || !len.is_multiple_of(WORD_BYTES) {
                return Some(format!("{range}, which are no whole words"));
            }
            if !self.is_meta(offset, len) {
                return Some(format!("{range}, beyond the end"));
            }
            let overlaps = |other: &WordStore| {
                offset < other.offset + other.bytes.len() as u64 && other.offset < offset + len
            };
            let mut flying = self.flying_meta.values();
            if flying
                .any(|f| matches!(&f.op, MetaOp::Store { steps, .. } if steps.iter().any(overlaps)))
            {
                return Some(format!("{range}, where another store is under way"));
            }
        }
        None
    }

    /// All steps are done.
    pub(crate) fn store_steps(&mut self, steps: &[WordStore]) {
        for step in steps {
            self.store_meta(step.offset, &step.bytes);
        }
    }

    /// The power went, or the process died, while the steps were done.
    pub(crate) fn torn_words(&mut self, steps: &[WordStore], rng: &mut Rng) -> bool {
        let done = rng.below(steps.len() as u64 + 1) as usize;
        self.store_steps(&steps[..done]);
        let mut any = done > 0;
        let Some(step) = steps.get(done) else {
            return any;
        };
        let chance = rng.pick(&[0, 100, 500, 900, 1000]);
        for (i, word) in step.bytes.chunks_exact(WORD_BYTES as usize).enumerate() {
            if rng.permille(chance) {
                self.store_meta(step.offset + i as u64 * WORD_BYTES, word);
                any = true;
            }
        }
        any
    }

    /// The first lines of the steps are there, and nothing else.
    pub(crate) fn store_lines(&mut self, steps: &[WordStore], lines: usize) {
        let all = steps.iter().flat_map(|step| {
            let chunks = step.bytes.chunks(LINE_BYTES).enumerate();
            chunks.map(|(i, line)| (step.offset + (i * LINE_BYTES) as u64, line))
        });
        for (offset, line) in all.take(lines) {
            self.store_meta(offset, line);
        }
    }
}

/// Lines of all steps.
pub(crate) fn count_lines(steps: &[WordStore]) -> u32 {
    let lines = |step: &WordStore| step.bytes.len().div_ceil(LINE_BYTES);
    steps.iter().map(lines).sum::<usize>() as u32
}
