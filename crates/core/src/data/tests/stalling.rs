//! Disks that do not answer: `disk-timeout` and `detach --force`.

use super::*;
use crate::device::LostDisk;

/// Operations of a disk that hangs.
#[derive(Default)]
pub(super) struct Hanging {
    /// Whose disk does not answer.
    pub(super) node: Option<usize>,
    /// What it does not answer.
    pub(super) held: Vec<Todo>,
    /// What was given up, and may still happen.
    late: Vec<Todo>,
    /// The core has given the disk up and not closed it.
    pub(super) abandoned: bool,
}

impl World {
    /// Takes an operation if the disk hangs; one of a disk that was given up ends at once.
    pub(super) fn hang(&mut self, index: usize, todo: Todo) {
        if self.hanging.node != Some(index) {
            self.todo.push(todo);
        } else if self.hanging.abandoned {
            self.gone(index, &todo);
        } else {
            self.hanging.held.push(todo);
        }
    }

    pub(super) fn abandon(&mut self, index: usize) {
        assert_eq!(
            self.hanging.node,
            Some(index),
            "only a disk that hangs is given up"
        );
        assert!(
            !core::mem::replace(&mut self.hanging.abandoned, true),
            "once"
        );
        for todo in core::mem::take(&mut self.hanging.held) {
            self.gone(index, &todo);
            self.hanging.late.push(todo);
        }
    }

    fn gone(&mut self, index: usize, todo: &Todo) {
        let gone = crate::event::DiskError::Gone;
        let input = match todo {
            Todo::Disk(_, tag, ..) => Input::DiskDone {
                tag: *tag,
                result: Err(gone),
            },
            Todo::Meta(_, tag, _) => Input::MetaDone {
                tag: *tag,
                result: Err(gone),
            },
            Todo::Input(..) => unreachable!("inputs do not hang"),
        };
        self.todo.push(Todo::Input(index, input));
    }

    /// The disk answers again. Some of what was given up still happens.
    fn answers_again(&mut self) {
        let index = self.hanging.node.take().unwrap();
        self.hanging.abandoned = false;
        let held = core::mem::take(&mut self.hanging.held);
        self.todo.extend(held);
        for (number, todo) in core::mem::take(&mut self.hanging.late)
            .into_iter()
            .enumerate()
        {
            let node = &mut self.nodes[index];
            match todo {
                Todo::Disk(_, _, DiskOp::Write { sector, .. }, bytes) if number % 2 == 0 => {
                    node.data.write(sector, &bytes);
                }
                Todo::Meta(_, _, MetaOp::Write { offset, bytes, .. }) if number % 2 == 0 => {
                    node.meta[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                _ => {}
            }
        }
    }

    fn own_disk(&self, index: usize) -> DiskState {
        self.nodes[index].resource.state.disk(VOLUME)
    }

    fn attach_again(&mut self, index: usize) {
        let attach = Command::Attach {
            volume: VOLUME,
            data_path: "data".into(),
            meta_path: Some("meta".into()),
            index: self.setup.index,
            options: self.setup.disk.clone(),
        };
        self.command(index, attach);
    }
}

fn world(disk_timeout_tenths: u32) -> World {
    let mut setup = Setup::default();
    setup.disk.disk_timeout_tenths = disk_timeout_tenths;
    clean(3, 2, setup)
}

#[test]
fn requests_go_on_with_the_peer_when_the_disk_is_given_up() {
    for hung in [0, 1] {
        let mut w = world(20);
        let early = w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, early));
        w.hanging.node = Some(hung);
        // One goes to an extent that is in the log, one needs a write of the log first.
        let hot = w.write(0, 8, 4096, 2);
        let cold = w.write(0, 3 * 8192, 4096, 3);
        let read = w.request(0, RequestKind::Read, 0, 4096, 0);
        w.pass(Duration::from_millis(1900));
        assert!(
            !w.done(0, hot) && !w.done(0, cold),
            "within disk-timeout it may still answer"
        );
        assert_eq!(w.own_disk(hung), DiskState::UpToDate);
        w.pass(Duration::from_secs(2));
        for id in [hot, cold, read] {
            assert_eq!(w.nodes[0].completed.get(&id), Some(&Ok(())), "{:#?}", w.log);
        }
        assert_eq!(w.own_disk(hung), DiskState::Diskless);
        let why = |w: &World| w.nodes[hung].resource.devices[&VOLUME].lost_disk;
        assert_eq!(why(&w), Some(LostDisk::Timeout));
        let more = w.write(0, 8, 4096, 4);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, more));
        w.answers_again();
        w.attach_again(hung);
        w.pass_until("in sync again", 60, World::in_sync);
        assert_eq!(why(&w), None);
        for (block, fill) in [(0, 1), (1, 4), (3 * 1024, 3)] {
            for node in &w.nodes {
                assert_eq!(node.data.block(block), [fill; 4096], "block {block}");
            }
        }
    }
}

#[test]
fn a_disk_that_is_only_slow_stays() {
    let mut w = world(20);
    for round in 0..4 {
        w.hanging.node = Some(0);
        let id = w.write(0, round * 8192, 4096, 1);
        w.pass(Duration::from_millis(1950));
        w.answers_again();
        w.pass(Duration::from_millis(40));
        assert!(w.done(0, id));
    }
    assert_eq!(w.own_disk(0), DiskState::UpToDate);
}

/// The timer is late because the process stood still: the answers have come meanwhile.
#[test]
fn a_process_that_stood_still_does_not_blame_the_disk() {
    let mut w = world(20);
    w.hanging.node = Some(0);
    let id = w.write(0, 0, 4096, 1);
    w.run();
    w.now = w.now + Duration::from_secs(30);
    w.input(0, Input::Timeout);
    w.answers_again();
    w.pass(Duration::from_secs(5));
    assert!(w.done(0, id));
    assert_eq!(w.own_disk(0), DiskState::UpToDate);
}

#[test]
fn a_forced_detach_waits_half_a_second_for_a_dead_disk() {
    for graceful_first in [false, true] {
        let mut w = world(0);
        w.hanging.node = Some(0);
        let id = w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(60));
        assert!(
            !w.done(0, id),
            "without disk-timeout nobody gives the disk up"
        );
        let detach = |force| Command::Detach {
            volume: VOLUME,
            force,
            diskless: false,
        };
        let gentle = graceful_first.then(|| {
            let gentle = w.command(0, detach(false));
            w.pass(Duration::from_secs(1));
            assert_eq!(w.answers.get(&gentle), None);
            gentle
        });
        let forced = w.command(0, detach(true));
        w.pass(Duration::from_millis(600));
        for command in gentle.into_iter().chain([forced]) {
            assert_eq!(
                w.answers.get(&command),
                Some(&Ok(Answer::Done)),
                "{:#?}",
                w.log
            );
        }
        assert!(w.done(0, id));
        assert_eq!(w.own_disk(0), DiskState::Diskless);
        w.answers_again();
        w.attach_again(0);
        w.pass_until("in sync again", 60, World::in_sync);
        assert_eq!(w.nodes[0].data.block(0), [1; 4096]);
    }
}

#[test]
fn an_attach_of_a_dead_disk_fails() {
    let mut w = world(20);
    w.detach(1);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.own_disk(1), DiskState::Diskless);
    w.hanging.node = Some(1);
    w.attach_again(1);
    let attach = w.next_id;
    w.pass(Duration::from_secs(5));
    assert!(
        matches!(w.answers.get(&attach), Some(Err(_))),
        "{:#?}",
        w.log
    );
    assert_eq!(w.own_disk(1), DiskState::Diskless);
    w.answers_again();
    w.attach_again(1);
    w.pass_until("in sync again", 60, World::in_sync);
}

#[test]
fn what_a_kernel_84_does_not_answer_to_a_node_without_a_disk_is_asked_for_again() {
    for seed in 1..20 {
        let mut setup = Setup {
            kernels: true,
            ..Setup::default()
        };
        setup.options.protocol_max = 101;
        let mut w = clean(seed, 2, setup);
        let ids: Vec<u64> = (0..64).map(|n| w.write(0, n * 16, 4096, 7)).collect();
        w.pass(Duration::from_secs(2));
        assert!(ids.iter().all(|id| w.done(0, *id)));
        // The requests are on their way when the disk goes.
        w.stalled = Some(0);
        w.invalidate();
        w.stalled = None;
        while w.repl(1, 0) != ReplState::SyncTarget {
            assert!(w.step(), "{:#?}", w.log);
        }
        w.stalled = Some(0);
        w.pass(Duration::from_millis(300));
        w.detach(1);
        w.pass(Duration::from_millis(300));
        let mut dropped = 0;
        for wire in w.wires.values_mut() {
            let before = wire.len();
            wire.retain(|(_, packet, _)| packet_name(packet) != "resync request");
            dropped += before - wire.len();
        }
        assert!(dropped > 0, "seed {seed}: nothing was asked for");
        w.stalled = None;
        w.pass_until("a detach", 10, |w| w.own_disk(1) == DiskState::Diskless);
        w.attach_again(1);
        w.pass_until("all in sync", 60, World::in_sync);
        w.check_same_data();
        assert_eq!(w.log.iter().filter(|t| t.contains("unknown")).count(), 0);
    }
}

/// A write that one peer does not answer keeps the epoch open: the other one owes nothing. What was kept back
/// and is sent late is not late at once.
#[test]
fn only_a_peer_that_does_not_answer_is_dropped() {
    let mut w = clean(5, 3, Setup::default());
    let early = w.write(0, 0, 4096, 1);
    // Until no timer of it runs.
    w.pass(Duration::from_secs(60));
    assert!(w.done(0, early));
    w.hanging.node = Some(1);
    let late = w.write(0, 8, 4096, 2);
    // ko-count 7, timeout 6 s.
    w.pass(Duration::from_secs(41));
    assert!(!w.done(0, late));
    let dropped = |w: &World| {
        let told = |line: &&String| line.contains("without an answer");
        w.log.iter().filter(told).count()
    };
    w.pass(Duration::from_secs(2));
    assert!(w.done(0, late), "{:#?}", w.log);
    w.pass(Duration::from_secs(10));
    assert_eq!(w.repl(0, 2), ReplState::Established);
    assert_eq!(dropped(&w), 1, "{:#?}", w.log);
    w.answers_again();
    w.pass_until("in sync again", 60, World::in_sync);
    w.check_same_data();
}

/// The operator disconnects a node whose disk still has a write of the connection that was lost, and connects it again:
/// not before that is on the disk, or its ack would go to the next connection.
#[test]
fn a_connection_that_drains_ends_when_it_has_drained_whoever_disconnects_it() {
    let parted = |peer| Command::Disconnect {
        peer: node_id(peer),
        force: true,
    };
    let state = |w: &World| w.nodes[1].resource.state.conn(node_id(0));
    let mut w = world(0);
    let early = w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, early));
    w.hanging.node = Some(1);
    w.write(0, 8, 4096, 7);
    w.pass(Duration::from_millis(100));
    assert_eq!(w.hanging.held.len(), 1, "{:#?}", w.log);
    w.command(0, parted(1));
    w.pass(Duration::from_millis(100));
    assert_eq!(state(&w), ConnState::NetworkFailure);
    w.command(1, parted(0));
    w.pass(Duration::from_millis(100));
    assert_eq!(state(&w), ConnState::Disconnecting);
    w.answers_again();
    w.pass(Duration::from_secs(1));
    assert_eq!(state(&w), ConnState::StandAlone);
    w.open_connections(0);
    w.open_connections(1);
    w.pass_until("in sync again", 60, World::in_sync);
    assert!(
        !w.log.iter().any(|l| l.contains("unknown write")),
        "{:#?}",
        w.log
    );
    w.check_same_data();
}

/// A superblock without a size is on the disk: after a crash the log could mark no block of it.
#[test]
fn the_log_is_written_once_the_metadata_name_the_size() {
    let mut w = clean(3, 2, Setup::default());
    let device = w.nodes[1].resource.devices.get_mut(&VOLUME).unwrap();
    let disk = device.attached_mut().unwrap();
    let log = disk.layout.as_ref().unwrap().al_byte();
    disk.writer.size_named = false;
    w.hanging.node = Some(1);
    let id = w.write(0, 3 * 8192, 4096, 7);
    w.pass(Duration::from_millis(100));
    let held: Vec<u64> = w
        .hanging
        .held
        .iter()
        .filter_map(|todo| match todo {
            Todo::Meta(_, _, MetaOp::Write { offset, .. }) => Some(*offset),
            _ => None,
        })
        .collect();
    assert_eq!(held.len(), 1, "the superblock is written first: {held:?}");
    assert!(!(log..log + 32_768).contains(&held[0]));
    assert!(!w.done(0, id));
    w.answers_again();
    w.pass(Duration::from_secs(1));
    assert!(w.done(0, id));
    assert_eq!(w.nodes[1].data.block(3 * 1024), [7; 4096]);
}
