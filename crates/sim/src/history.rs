//! The oracle: what was written to each block when, and which values a read may return.
//!
//! A block is a register. A write takes effect at one moment between its start and its end; a
//! write without an end may have no effect at all. A value is *superseded* from the moment at
//! which a later write is known to have taken effect; a read that starts after that must not
//! return it.

const NEVER: u64 = u64::MAX;

/// A block with more versions loses those that are over for good.
const PRUNED_FROM: usize = 6;

/// A write to one block.
#[derive(Clone, Debug)]
struct Version {
    value: u64,
    /// The node that wrote it.
    writer: usize,
    start: u64,
    /// It is known to have taken effect by then: it was acknowledged, or read.
    end: u64,
    /// When it was acknowledged.
    acked: u64,
    /// Nobody drives it any more: if it has no effect by the next read, it never has.
    dead: u64,
    /// A flush that began after its end has succeeded.
    hard: bool,
    /// A discard: it leaves what was there as well.
    weak: bool,
    /// It was acknowledged, or read when nobody drove it any more: it stays.
    settled: bool,
    superseded: u64,
    /// The same, by settled versions only.
    superseded_settled: u64,
    superseded_hard: u64,
}

/// Which writes an event may take back, of those that are not durable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// All: what was under way ends with it.
    All,
    /// Those that are over. The others go on.
    Acknowledged,
}

/// One block's versions, oldest first.
#[derive(Clone, Debug)]
struct Register {
    versions: Vec<Version>,
    /// It is in its volume's list of those that a flush may change.
    is_soft: bool,
}

/// One volume: where each block's register is, and which of them a flush may change.
#[derive(Clone, Debug, Default)]
struct Volume {
    /// By block: index into `registers` plus one; 0 is none.
    index: Vec<u32>,
    registers: Vec<Register>,
    /// Their blocks.
    blocks: Vec<u64>,
    /// Registers with versions that ended and are not known to be durable.
    soft: Vec<u32>,
}

/// All blocks of all volumes.
#[derive(Clone, Debug, Default)]
pub struct History {
    volumes: Vec<Volume>,
    /// Several nodes write. Each reads its own disk, so that one may see a write before the other
    /// does: what a read returns says nothing about later ones while the write goes on.
    pub several_writers: bool,
    /// Users of more nodes than the Primary wait for their turn: what they have asked for goes on when that one dies.
    pub takes_turns: bool,
}

impl Volume {
    fn number(&mut self, number: u64) -> u32 {
        let block = number as usize;
        if block >= self.index.len() {
            let len = (block + 1).next_power_of_two().max(1024);
            self.index.resize(len, 0);
        }
        if self.index[block] == 0 {
            self.registers.push(Register::default());
            self.blocks.push(number);
            self.index[block] = self.registers.len() as u32;
        }
        self.index[block] - 1
    }
}

impl Default for Register {
    /// A block that was never written reads as zeroes.
    fn default() -> Self {
        Register {
            versions: vec![Version {
                value: 0,
                writer: 0,
                start: 0,
                end: 0,
                acked: 0,
                dead: NEVER,
                hard: true,
                weak: false,
                settled: true,
                superseded: NEVER,
                superseded_settled: NEVER,
                superseded_hard: NEVER,
            }],
            is_soft: false,
        }
    }
}

impl Version {
    /// A flush that is issued later makes it durable. A read may have seen it before its ack, on the
    /// peer's disk while the own one still writes: a flush need not wait for that one.
    fn counts_since(&self) -> u64 {
        match (self.acked, self.dead) {
            (NEVER, NEVER) => NEVER,
            (NEVER, _) => self.end,
            (acked, _) => acked,
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
        let since = self.versions[index].counts_since();
        let (hard, settled) = (self.versions[index].hard, self.versions[index].settled);
        if self.versions[index].weak {
            return;
        }
        // Later ones began later, and so none of them was over by then.
        for v in &mut self.versions[..index] {
            if v.end < start {
                v.superseded = v.superseded.min(end);
                if settled {
                    v.superseded_settled = v.superseded_settled.min(since);
                }
                if hard {
                    v.superseded_hard = v.superseded_hard.min(end);
                }
            }
        }
    }

    /// What is not durable may be lost. Only durable versions still supersede others.
    fn unflushed_may_be_lost(&mut self, now: u64, which: Which) {
        for v in &mut self.versions {
            v.superseded = v.superseded_hard;
            v.superseded_settled = v.superseded_hard;
            let goes_on = v.acked == NEVER && v.dead == NEVER;
            if v.hard || goes_on && which == Which::Acknowledged {
                continue;
            }
            v.settled = false;
            v.end = NEVER;
            v.acked = NEVER;
            // A frozen Primary that is not given up sends what goes on when it thaws.
            if !goes_on {
                v.dead = v.dead.min(now);
            }
        }
    }

    fn prune(&mut self, oldest_read: u64) {
        if self.versions.len() > PRUNED_FROM {
            self.versions
                .retain(|v| v.superseded_hard >= oldest_read || v.end == NEVER && v.dead == NEVER);
        }
    }
}

impl History {
    fn volume(&mut self, volume: u16) -> &mut Volume {
        let volume = usize::from(volume);
        if volume >= self.volumes.len() {
            self.volumes.resize_with(volume + 1, Volume::default);
        }
        &mut self.volumes[volume]
    }

    fn register(&mut self, volume: u16, block: u64) -> &mut Register {
        let volume = self.volume(volume);
        let number = volume.number(block);
        &mut volume.registers[number as usize]
    }

    /// A write of this value by a node begins. Values other than 0 are unique.
    pub fn write_starts(
        &mut self,
        volume: u16,
        block: u64,
        (value, writer): (u64, usize),
        now: u64,
        weak: bool,
    ) {
        self.register(volume, block).versions.push(Version {
            value,
            writer,
            start: now,
            end: NEVER,
            acked: NEVER,
            dead: NEVER,
            hard: false,
            weak,
            settled: false,
            superseded: NEVER,
            superseded_settled: NEVER,
            superseded_hard: NEVER,
        });
    }

    fn find(&mut self, volume: u16, block: u64, value: u64, start: u64) -> Option<&mut Version> {
        self.register(volume, block)
            .versions
            .iter_mut()
            .rfind(|v| v.value == value && v.start == start)
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
        let volume = self.volume(volume);
        let number = volume.number(block);
        let register = &mut volume.registers[number as usize];
        let Some(index) = register
            .versions
            .iter()
            .rposition(|v| v.value == value && v.start == start)
        else {
            return;
        };
        let version = &mut register.versions[index];
        version.end = version.end.min(now);
        version.acked = now;
        version.settled = true;
        version.hard = hard;
        register.ended(index);
        if !hard && !register.is_soft {
            register.is_soft = true;
            volume.soft.push(number);
        }
    }

    /// Nobody waits for this write any more; it may have had an effect or not.
    pub fn write_dies(&mut self, volume: u16, block: u64, value: u64, start: u64, now: u64) {
        let Some(v) = self.find(volume, block, value, start) else {
            return;
        };
        v.dead = now;
        if !v.settled && v.end != NEVER {
            v.end = NEVER;
            for v in &mut self.register(volume, block).versions {
                v.superseded = v.superseded_settled;
            }
        }
    }

    /// A flush that was issued at `issued` has succeeded on this volume.
    pub fn flushed(&mut self, volume: u16, issued: u64, oldest_read: u64) {
        let several_writers = self.several_writers;
        let volume = self.volume(volume);
        let mut soft = std::mem::take(&mut volume.soft);
        soft.retain(|number| {
            let register = &mut volume.registers[*number as usize];
            let mut remain = false;
            for index in 0..register.versions.len() {
                let v = &mut register.versions[index];
                let since = v.counts_since();
                if v.hard || since == NEVER {
                    continue;
                }
                if since > issued {
                    remain = true;
                    continue;
                }
                v.hard = true;
                register.ended(index);
            }
            if !several_writers {
                register.prune(oldest_read);
            }
            register.is_soft = remain;
            remain
        });
        volume.soft = soft;
    }

    /// Writes that were not flushed may be lost.
    pub fn unflushed_may_be_lost(&mut self, now: u64) {
        let which = match self.takes_turns {
            true => Which::Acknowledged,
            false => Which::All,
        };
        for register in self.volumes.iter_mut().flat_map(|v| &mut v.registers) {
            register.unflushed_may_be_lost(now, which);
        }
    }

    /// A flush has failed: what was acknowledged and is not durable may be lost from now on.
    pub fn flush_failed(&mut self, volume: u16, now: u64) {
        for register in &mut self.volume(volume).registers {
            register.unflushed_may_be_lost(now, Which::Acknowledged);
        }
    }

    /// Whether a disk may hold this value and nothing newer when something that began at `issued`
    /// says that all data from before are durable, or all that `writer` wrote.
    pub fn may_be_durable(
        &self,
        volume: u16,
        block: u64,
        value: u64,
        issued: u64,
        writer: Option<usize>,
    ) -> bool {
        let Some(register) = self.known(volume, block) else {
            return true;
        };
        let newer = |v: &Version| {
            register.versions.iter().any(|n| {
                // What one of two Primaries had sent before it died reaches the other's disk behind its own writes.
                let lingers = self.several_writers && n.writer != v.writer;
                let over = match v.end {
                    NEVER if lingers => NEVER,
                    NEVER => v.dead,
                    end => end,
                };
                writer.is_none_or(|writer| n.writer == writer)
                    && !n.weak
                    && n.counts_since() < issued
                    && over < n.start
            })
        };
        let mut same = register.versions.iter().filter(|v| v.value == value);
        same.any(|v| !newer(v))
    }

    /// The block's versions, if anything was ever asked of it.
    fn known(&self, volume: u16, block: u64) -> Option<&Register> {
        let volume = self.volumes.get(usize::from(volume))?;
        let number = volume.index.get(block as usize)?.checked_sub(1)?;
        volume.registers.get(number as usize)
    }

    /// A write of this value to the block began at this time or later.
    pub fn began_since(&self, volume: u16, block: u64, value: u64, start: u64) -> bool {
        self.known(volume, block).is_some_and(|r| {
            let mut versions = r.versions.iter();
            versions.any(|v| v.value == value && v.start >= start)
        })
    }

    /// All writes of a value to the block were over before the write of the other one began.
    pub fn is_older(&self, volume: u16, block: u64, value: u64, than: u64) -> bool {
        let Some(register) = self.known(volume, block) else {
            return false;
        };
        let of = |value: u64| register.versions.iter().filter(move |v| v.value == value);
        let over = |v: &Version| if v.end == NEVER { v.dead } else { v.end };
        of(than)
            .next()
            .is_some_and(|newer| of(value).all(|v| over(v) < newer.start))
    }

    /// Whether a replica that has all acknowledged data may hold this value. What only a read has
    /// seen so far may be missing.
    pub fn is_current(&self, volume: u16, block: u64, value: u64, now: u64) -> bool {
        self.known(volume, block).is_none_or(|r| {
            let mut versions = r.versions.iter();
            versions.any(|v| v.value == value && v.superseded_settled >= now)
        })
    }

    /// Whether a disk may lose what is newer than this value: none of that is known to be durable.
    pub fn may_come_back(&self, volume: u16, block: u64, value: u64, now: u64) -> bool {
        self.known(volume, block).is_none_or(|r| {
            let mut versions = r.versions.iter();
            versions.any(|v| v.value == value && v.superseded_hard >= now)
        })
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
        let several_writers = self.several_writers;
        let state = self.volume(volume);
        let number = state.number(block);
        let register = &mut state.registers[number as usize];
        let mut fits = register
            .allowed(start, end)
            .filter(|i| register.versions[*i].value == value);
        let (first, second) = (fits.next(), fits.next());
        drop(fits);
        let Some(only) = first else {
            return Err(format!(
                "volume {volume} block {block}: read version {value} between {} and {}; {}",
                seconds(start),
                seconds(end),
                self.describe(volume, block)
            ));
        };
        // It began before that write failed, where it had an effect: that may go with the disk it was on.
        let version = &register.versions[only];
        let fails = !version.settled && version.dead != NEVER && start <= version.dead;
        if second.is_none() && !several_writers && !fails {
            let version = &mut register.versions[only];
            version.end = version.end.min(end);
            let is_soft = !version.hard;
            register.ended(only);
            for (i, v) in register.versions.iter_mut().enumerate() {
                let is_older = v.end < start || v.end == NEVER && v.dead < start;
                if i != only && is_older {
                    v.superseded = v.superseded.min(end);
                }
            }
            if is_soft && !register.is_soft {
                register.is_soft = true;
                state.soft.push(number);
            }
        }
        Ok(())
    }

    /// The versions of a block in words.
    pub fn describe(&self, volume: u16, block: u64) -> String {
        let mut text = String::from("history of the block, newest first:");
        let found = self.volumes.get(usize::from(volume)).and_then(|v| {
            let number = v.index.get(block as usize)?.checked_sub(1)?;
            v.registers.get(number as usize)
        });
        if let Some(register) = found {
            for v in register.versions.iter().rev().take(6) {
                text += &format!(" [version {}", v.value);
                if v.value > 0 {
                    text += &format!(": written at {}", seconds(v.start));
                    text += &match v.end {
                        NEVER => ", not acknowledged".to_string(),
                        end => format!(", acknowledged at {}", seconds(end)),
                    };
                }
                if v.hard {
                    text += ", flushed";
                }
                if v.dead != NEVER {
                    text += ", given up";
                }
                if v.superseded != NEVER {
                    text += &format!(", replaced for certain at {}", seconds(v.superseded));
                }
                text += "]";
            }
        }
        text
    }

    /// Blocks of a volume that were ever written or read, ascending.
    pub fn touched(&self, volume: u16) -> Vec<u64> {
        let mut blocks = self.touched_blocks(volume).to_vec();
        blocks.sort_unstable();
        blocks
    }

    /// The same in the order in which they were first asked for.
    pub fn touched_blocks(&self, volume: u16) -> &[u64] {
        let volume = self.volumes.get(usize::from(volume));
        volume.map_or(&[], |v| &v.blocks)
    }
}

/// A time of the simulator as its trace shows it.
pub(crate) fn seconds(at: u64) -> String {
    format!("{:.6}", at as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_need_not_save_what_only_a_read_has_seen_of_a_write_under_way() {
        let mut h = History::default();
        h.write_starts(0, 1, (7, 0), 10, false);
        h.write_ends(0, 1, 7, 10, 20, true);
        h.write_starts(0, 1, (8, 0), 30, false);
        assert!(h.read(0, 1, 8, 40, 50).is_ok());
        assert!(h.may_be_durable(0, 1, 7, 60, None));
        let mut lost = h.clone();
        lost.flushed(0, 60, 60);
        lost.unflushed_may_be_lost(70);
        assert!(lost.read(0, 1, 7, 80, 90).is_ok());
        // From its ack on it must.
        h.write_ends(0, 1, 8, 30, 100, false);
        assert!(h.may_be_durable(0, 1, 7, 100, None));
        assert!(!h.may_be_durable(0, 1, 7, 110, None));
        h.flushed(0, 110, 110);
        h.unflushed_may_be_lost(120);
        assert!(h.read(0, 1, 7, 130, 140).is_err());
    }

    #[test]
    fn a_flush_that_failed_saves_nothing_but_takes_nothing_durable() {
        let mut h = History::default();
        h.write_starts(0, 1, (7, 0), 10, false);
        h.write_ends(0, 1, 7, 10, 20, true);
        h.write_starts(0, 1, (8, 0), 30, false);
        h.write_ends(0, 1, 8, 30, 40, false);
        assert!(h.clone().read(0, 1, 7, 50, 60).is_err());
        h.write_starts(0, 1, (9, 0), 45, false);
        h.flush_failed(0, 50);
        assert!(h.clone().read(0, 1, 0, 60, 70).is_err());
        assert!(h.clone().read(0, 1, 8, 60, 70).is_ok());
        assert!(h.clone().read(0, 1, 7, 60, 70).is_ok());
        // What was under way, and ends later, is there.
        h.write_ends(0, 1, 9, 45, 80, false);
        assert!(h.clone().read(0, 1, 7, 90, 99).is_err());
        assert!(h.read(0, 1, 9, 90, 99).is_ok());
    }

    #[test]
    fn a_flush_saves_what_was_read_of_a_dead_nodes_write() {
        let mut h = History::default();
        h.write_starts(0, 1, (7, 0), 10, false);
        h.write_ends(0, 1, 7, 10, 20, true);
        h.write_starts(0, 1, (8, 0), 30, false);
        h.write_dies(0, 1, 8, 30, 40);
        assert!(h.may_be_durable(0, 1, 7, 50, None));
        assert!(h.read(0, 1, 8, 60, 70).is_ok());
        assert!(!h.may_be_durable(0, 1, 7, 80, None));
        h.flushed(0, 80, 80);
        h.unflushed_may_be_lost(90);
        assert!(h.read(0, 1, 7, 100, 110).is_err());
    }

    #[test]
    fn what_a_read_beside_a_failing_write_has_seen_may_go_with_the_disk() {
        let mut h = History::default();
        h.write_starts(0, 1, (7, 0), 10, false);
        h.write_ends(0, 1, 7, 10, 20, true);
        h.write_starts(0, 1, (8, 0), 30, false);
        h.write_dies(0, 1, 8, 30, 50);
        assert!(h.read(0, 1, 8, 40, 60).is_ok());
        assert!(h.clone().read(0, 1, 7, 70, 80).is_ok());
        // A read that begins later has it from a disk that is there.
        assert!(h.read(0, 1, 8, 70, 80).is_ok());
        assert!(h.read(0, 1, 7, 90, 99).is_err());
    }

    #[test]
    fn what_was_read_before_its_ack_may_go_with_the_node_but_nothing_acknowledged() {
        let mut h = History::default();
        h.write_starts(0, 1, (7, 0), 10, false);
        h.write_ends(0, 1, 7, 10, 20, false);
        h.write_starts(0, 1, (8, 1), 30, false);
        assert!(h.read(0, 1, 8, 40, 50).is_ok());
        assert!(h.read(0, 1, 7, 60, 70).is_err());
        h.write_dies(0, 1, 8, 30, 80);
        assert!(h.clone().read(0, 1, 0, 90, 99).is_err());
        let mut kept = h.clone();
        assert!(kept.read(0, 1, 8, 90, 99).is_ok());
        assert!(kept.read(0, 1, 7, 100, 110).is_err());
        assert!(h.read(0, 1, 7, 90, 99).is_ok());
        assert!(h.read(0, 1, 8, 100, 110).is_err());
    }
}
