//! The oracle: what was written to each block when, and which values a read may return.
//!
//! A block is a register. A write takes effect at one moment between its start and its end; a
//! write without an end may have no effect at all. A value is *superseded* from the moment at
//! which a later write is known to have taken effect; a read that starts after that must not
//! return it.

use std::collections::BTreeMap;

const NEVER: u64 = u64::MAX;

/// A write to one block.
#[derive(Clone, Debug)]
struct Version {
    value: u64,
    start: u64,
    /// It is known to have taken effect by then.
    end: u64,
    /// Nobody drives it any more: if it has no effect by the next read, it never has.
    dead: u64,
    /// A flush that began after its end has succeeded.
    hard: bool,
    /// A discard: it leaves what was there as well.
    weak: bool,
    superseded: u64,
    superseded_hard: u64,
}

/// One block's versions, oldest first.
#[derive(Clone, Debug)]
struct Register {
    versions: Vec<Version>,
}

/// All blocks of all volumes.
#[derive(Clone, Debug, Default)]
pub struct History {
    blocks: BTreeMap<(u16, u64), Register>,
}

impl Default for Register {
    /// A block that was never written reads as zeroes.
    fn default() -> Self {
        Register {
            versions: vec![Version {
                value: 0,
                start: 0,
                end: 0,
                dead: NEVER,
                hard: true,
                weak: false,
                superseded: NEVER,
                superseded_hard: NEVER,
            }],
        }
    }
}

impl Register {
    /// Values that a read over this span may return, as indexes.
    fn allowed(&self, start: u64, end: u64) -> impl Iterator<Item = usize> + '_ {
        self.versions
            .iter()
            .enumerate()
            .filter(move |(_, v)| v.start <= end && v.superseded >= start)
            .map(|(i, _)| i)
    }

    /// What version `index` supersedes, now that its end is known.
    fn ended(&mut self, index: usize) {
        let (start, end) = (self.versions[index].start, self.versions[index].end);
        let hard = self.versions[index].hard;
        if self.versions[index].weak {
            return;
        }
        for (i, v) in self.versions.iter_mut().enumerate() {
            if i != index && v.end < start {
                v.superseded = v.superseded.min(end);
                if hard {
                    v.superseded_hard = v.superseded_hard.min(end);
                }
            }
        }
    }

    fn prune(&mut self, oldest_read: u64) {
        if self.versions.len() > 24 {
            self.versions
                .retain(|v| v.superseded_hard >= oldest_read || v.end == NEVER && v.dead == NEVER);
        }
    }
}

impl History {
    fn register(&mut self, volume: u16, block: u64) -> &mut Register {
        self.blocks.entry((volume, block)).or_default()
    }

    /// A write of this value begins. Values other than 0 are unique.
    pub fn write_starts(&mut self, volume: u16, block: u64, value: u64, now: u64, weak: bool) {
        self.register(volume, block).versions.push(Version {
            value,
            start: now,
            end: NEVER,
            dead: NEVER,
            hard: false,
            weak,
            superseded: NEVER,
            superseded_hard: NEVER,
        });
    }

    fn find(&mut self, volume: u16, block: u64, value: u64, start: u64) -> Option<&mut Version> {
        self.register(volume, block)
            .versions
            .iter_mut()
            .find(|v| v.value == value && v.start == start)
    }

    /// The write was acknowledged. `hard`: it is durable.
    pub fn write_ends(
        &mut self,
        volume: u16,
        block: u64,
        value: u64,
        start: u64,
        now: u64,
        hard: bool,
    ) {
        let register = self.register(volume, block);
        let Some(index) = register
            .versions
            .iter()
            .position(|v| v.value == value && v.start == start)
        else {
            return;
        };
        let version = &mut register.versions[index];
        version.end = version.end.min(now);
        version.hard = hard;
        register.ended(index);
    }

    /// Nobody waits for this write any more; it may have had an effect or not.
    pub fn write_dies(&mut self, volume: u16, block: u64, value: u64, start: u64, now: u64) {
        if let Some(v) = self.find(volume, block, value, start) {
            v.dead = now;
        }
    }

    /// A flush that was issued at `issued` has succeeded on this volume.
    pub fn flushed(&mut self, volume: u16, issued: u64, oldest_read: u64) {
        for (_, register) in self.blocks.range_mut((volume, 0)..=(volume, u64::MAX)) {
            let newly: Vec<usize> = register
                .versions
                .iter()
                .enumerate()
                .filter(|(_, v)| !v.hard && v.end <= issued)
                .map(|(i, _)| i)
                .collect();
            for index in newly {
                register.versions[index].hard = true;
                register.ended(index);
            }
            register.prune(oldest_read);
        }
    }

    /// Writes that were not flushed may be lost.
    pub fn unflushed_may_be_lost(&mut self, now: u64) {
        for register in self.blocks.values_mut() {
            for v in &mut register.versions {
                v.superseded = v.superseded_hard;
                if !v.hard {
                    v.end = NEVER;
                    v.dead = v.dead.min(now);
                }
            }
        }
    }

    /// Checks a read and learns from it.
    pub fn read(
        &mut self,
        volume: u16,
        block: u64,
        value: u64,
        start: u64,
        end: u64,
    ) -> Result<(), String> {
        let register = self.register(volume, block);
        let fits: Vec<usize> = register
            .allowed(start, end)
            .filter(|i| register.versions[*i].value == value)
            .collect();
        if fits.is_empty() {
            return Err(format!(
                "volume {volume} block {block}: read {value} at {start}..{end}; {}",
                self.describe(volume, block)
            ));
        }
        if let [only] = fits[..] {
            let version = &mut register.versions[only];
            version.end = version.end.min(end);
            register.ended(only);
            for (i, v) in register.versions.iter_mut().enumerate() {
                let is_older = v.end < start || v.end == NEVER && v.dead < start;
                if i != only && is_older {
                    v.superseded = v.superseded.min(end);
                }
            }
        }
        Ok(())
    }

    /// The versions of a block in words.
    pub fn describe(&self, volume: u16, block: u64) -> String {
        let mut text = String::from("history:");
        if let Some(register) = self.blocks.get(&(volume, block)) {
            for v in register.versions.iter().rev().take(6) {
                let time = |t: u64| {
                    if t == NEVER {
                        "-".to_string()
                    } else {
                        format!("{:.6}", t as f64 / 1e9)
                    }
                };
                text += &format!(
                    " [{} from {} to {}{}{} superseded {}]",
                    v.value,
                    time(v.start),
                    time(v.end),
                    if v.hard { " flushed" } else { "" },
                    if v.dead == NEVER { "" } else { " abandoned" },
                    time(v.superseded)
                );
            }
        }
        text
    }

    /// Blocks of a volume that were ever written or read.
    pub fn touched(&self, volume: u16) -> Vec<u64> {
        self.blocks
            .range((volume, 0)..=(volume, u64::MAX))
            .map(|((_, block), _)| *block)
            .collect()
    }
}
