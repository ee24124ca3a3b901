//! How fast a resync or verify goes: marks of what was left some seconds ago (config-and-cli.md,
//! 10 and 11). The same on both ends, from what the core says is left.

use std::collections::{BTreeMap, VecDeque};

use lockstep_core::time::{Duration, Instant};

use crate::report::{ResourceReport, ResyncReport, SinceMark};

/// Marks that are kept, and their distance.
const MARKS: usize = 8;
const DISTANCE: Duration = Duration::from_secs(3);

/// The marks of a resource by peer and volume.
#[derive(Debug, Default)]
pub(crate) struct Progress(BTreeMap<(u8, u16), Marks>);

#[derive(Debug)]
struct Marks {
    total_sectors: u64,
    /// When, and what was left; the oldest first. Never empty.
    all: VecDeque<(Instant, u64)>,
}

impl Progress {
    /// Sets marks where it is time and completes the report with what was done since.
    pub(crate) fn follow(&mut self, report: &mut ResourceReport, now: Instant) {
        let mut running = BTreeMap::new();
        for connection in &mut report.connections {
            for peer_device in &mut connection.peer_devices {
                let key = (connection.peer_node_id, peer_device.volume);
                if let Some(resync) = &mut peer_device.resync {
                    let old = self.0.remove(&key);
                    running.insert(key, marked(old, resync, now));
                }
            }
        }
        self.0 = running;
    }
}

/// The marks as they are now, and the report's figures from them.
fn marked(old: Option<Marks>, resync: &mut ResyncReport, now: Instant) -> Marks {
    let left = resync.left_sectors;
    // Another one has begun where more is left than ever before.
    let same = |m: &Marks| m.total_sectors == resync.total_sectors && left <= m.all[0].1;
    let mut marks = old.filter(same).unwrap_or_else(|| {
        let begun = Instant(now.0.saturating_sub(resync.elapsed_ms * 1_000_000));
        Marks {
            total_sectors: resync.total_sectors,
            all: [(begun, resync.total_sectors.max(left))].into(),
        }
    });
    let newest = marks.all[marks.all.len() - 1];
    if now - newest.0 >= DISTANCE {
        marks.all.push_back((now, left));
        if marks.all.len() > MARKS {
            marks.all.pop_front();
        }
    }
    let since = |(at, was): (Instant, u64)| SinceMark {
        ms: (now - at).as_millis(),
        sectors: was.saturating_sub(left),
    };
    resync.newest = since(newest);
    resync.oldest = since(marks.all[0]);
    resync.rate_kib_s = match resync.oldest.ms {
        0 => 0,
        ms => u32::try_from(resync.oldest.sectors / 2 * 1000 / ms).unwrap_or(u32::MAX),
    };
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resync(left_sectors: u64, elapsed_ms: u64) -> ResyncReport {
        ResyncReport {
            total_sectors: 100_000,
            left_sectors,
            failed_sectors: 0,
            same_sectors: 0,
            elapsed_ms,
            paused_ms: 0,
            rate_kib_s: 0,
            newest: SinceMark::default(),
            oldest: SinceMark::default(),
            wanted_kib_s: 0,
            verify: None,
        }
    }

    #[test]
    fn the_speed_is_that_of_the_last_marks() {
        let at = |seconds: u64| Instant(seconds * 1_000_000_000);
        let mut first = resync(90_000, 5_000);
        let mut marks = marked(None, &mut first, at(105));
        assert_eq!((first.oldest.ms, first.oldest.sectors), (5_000, 10_000));
        assert_eq!(first.rate_kib_s, 1_000);
        for second in 6..=60 {
            // From the 30th second on nothing moves.
            let mut now = resync(100_000 - 2_000 * second.min(30), second * 1_000);
            marks = marked(Some(marks), &mut now, at(100 + second));
            match second {
                29 => assert_eq!(now.rate_kib_s, 1_000),
                60 => assert_eq!((now.rate_kib_s, now.newest.sectors), (0, 0)),
                _ => {}
            }
        }
        assert_eq!(marks.all.len(), MARKS);
        // A new one begins from its own start.
        let mut next = resync(99_000, 1_000);
        marks = marked(Some(marks), &mut next, at(200));
        assert_eq!((marks.all.len(), next.oldest.ms), (1, 1_000));
    }
}
