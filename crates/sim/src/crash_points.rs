//! Metadata and activity log, cut in every write.
//!
//! A story is played; one node's metadata writes are counted. Then it is played again for each of
//! them and each number of sectors of it that are on the disk when the node dies. The node comes
//! back and recovers; that is cut in the same way at each of its writes. After all of it the
//! metadata have to open, what differs has to be marked, and the cluster has to come together.

use crate::check;
use crate::cuts::{MetaPoint, Story, Trap, mend};
use crate::disk::Lose;
use crate::scenario::Scenario;
use crate::world::{MS, SECOND};

/// What became of the crash points of a story.
#[derive(Clone, Debug, Default)]
pub struct Points {
    /// Metadata writes of the node in the story.
    pub writes: usize,
    /// Worlds with one crash, and with a second one in the recovery.
    pub worlds: [u64; 2],
    /// What went wrong, with the points.
    pub failed: Vec<String>,
}

/// Cuts one node's metadata writes: all of them, at every sector.
pub fn cut_once(story: &Story, node: usize, lose: Lose) -> Points {
    let mut points = Points::default();
    let writes = record(story, node);
    points.writes = writes.len();
    for first in all_points(&writes) {
        points.worlds[0] += 1;
        if let Err(text) = play(story, node, lose, first, None) {
            points.failed.push(format!("{first:?}: {text}"));
        }
    }
    points
}

/// Cuts every `stride`-th write of the story, half done, and then every write of the recovery, at
/// every sector.
pub fn cut_twice(story: &Story, node: usize, lose: Lose, stride: usize) -> Points {
    let mut points = Points::default();
    let writes = record(story, node);
    points.writes = writes.len();
    for (before, sectors) in writes.into_iter().enumerate().step_by(stride) {
        let sectors = sectors / 2;
        let first = MetaPoint { before, sectors };
        let recovery = match recover(story, node, lose, first) {
            Ok(writes) => writes,
            Err(text) => {
                points.failed.push(format!("{first:?}: {text}"));
                continue;
            }
        };
        for second in all_points(&recovery) {
            points.worlds[1] += 1;
            if let Err(text) = play(story, node, lose, first, Some(second)) {
                points
                    .failed
                    .push(format!("{first:?}, in the recovery {second:?}: {text}"));
            }
        }
    }
    points
}

/// Every write with every number of its sectors.
fn all_points(writes: &[u32]) -> Vec<MetaPoint> {
    let each = |(before, sectors): (usize, &u32)| {
        (0..=*sectors).map(move |sectors| MetaPoint { before, sectors })
    };
    writes.iter().enumerate().flat_map(each).collect()
}

/// The node's metadata writes in the uncut story.
fn record(story: &Story, node: usize) -> Vec<u32> {
    let mut s = story.begin(None);
    s.world.trap = Trap::on_metadata(node, None);
    story.tell(&mut s);
    s.world.trap.metadata_writes().to_vec()
}

/// The node's metadata writes from its start after the first crash until it takes part.
fn recover(story: &Story, node: usize, lose: Lose, first: MetaPoint) -> Result<Vec<u32>, String> {
    let mut s = crash(story, node, lose, first)?;
    start(&mut s, node, None);
    let writes = s.world.trap.metadata_writes().to_vec();
    s.world.violation.map_or(Ok(writes), Err)
}

fn play(
    story: &Story,
    node: usize,
    lose: Lose,
    first: MetaPoint,
    second: Option<MetaPoint>,
) -> Result<(), String> {
    let mut s = crash(story, node, lose, first)?;
    if second.is_some() {
        start(&mut s, node, second);
        s.operator.crash(&mut s.world, node, lose);
        check::differences_are_marked(&mut s.world);
    }
    mend(&mut s);
    s.world.violation.map_or(Ok(()), Err)
}

/// Plays to the first point and lets the node die.
fn crash(story: &Story, node: usize, lose: Lose, point: MetaPoint) -> Result<Scenario, String> {
    let mut s = story.begin(None);
    s.world.trap = Trap::on_metadata(node, Some(point));
    story.tell(&mut s);
    if let Some(text) = s.world.violation {
        return Err(text);
    }
    if !s.world.trap.has_sprung() {
        return Err("the story ended before the write".into());
    }
    s.operator.crash(&mut s.world, node, lose);
    check::differences_are_marked(&mut s.world);
    Ok(s)
}

/// Starts the node and waits until it takes part, or until it comes to the point.
fn start(s: &mut Scenario, node: usize, point: Option<MetaPoint>) {
    s.world.trap = Trap::on_metadata(node, point);
    s.restart(node);
    let end = s.world.now + 10 * SECOND;
    while s.world.violation.is_none() && s.world.now < end {
        let slice = s.world.now + MS;
        while !s.world.trap.has_sprung() && s.world.step(slice) {}
        if s.world.trap.has_sprung() {
            return;
        }
        s.world.now = s.world.now.max(slice);
        s.operator.tick(&mut s.world);
        if s.operator.is_up(node) {
            return;
        }
    }
    s.world.fail("the node does not recover within 10 s");
}
