//! The stories that `cuts` cuts: connect, bitmap exchange, resync, attach, two-phase commits.

use lockstep_core::event::RequestKind;
use lockstep_core::options::Protocol;
use lockstep_core::report::ConnectionReport;
use lockstep_core::state::{ConnState, DiskState};

use crate::cuts::Story;
use crate::disk::{Lose, Where};
use crate::scenario::{A, B, C, Scenario};
use crate::world::SECOND;

/// All stories.
pub const STORIES: &[Story] = &[
    Story {
        name: "reconnect",
        text: "Two nodes connect again; nothing has changed.",
        least_packets: 15,
        step: |s, step| {
            if step == 0 {
                s.world.sever(A, B);
            }
            let connected = |c: &ConnectionReport| c.state == ConnState::Connected;
            let down = s
                .world
                .snapshot(A)
                .is_some_and(|x| !x.connections.iter().any(connected));
            step == 0 || down
        },
        steps: 2,
        ..PAIR
    },
    Story {
        name: "resync",
        text: "Two nodes connect again; one has written.",
        least_packets: 40,
        before: write_apart,
        step: connect_again,
        steps: 1,
        ..PAIR
    },
    Story {
        name: "resync-under-writes",
        text: "The same, and the Primary writes on.",
        least_packets: 60,
        before: write_apart,
        step: |s, step| {
            s.cut(A, B, false);
            if s.world.nodes[A].requests.is_empty() {
                s.write(A, 700 + u64::from(step % 3), 1);
                return true;
            }
            false
        },
        steps: 12,
        ..PAIR
    },
    Story {
        name: "handover",
        text: "A demotion, a promotion of the other node, and writes there.",
        least_packets: 30,
        before: |s| write_some(s, A),
        step: handover,
        steps: 4,
        ..PAIR
    },
    Story {
        name: "attach",
        text: "A Secondary detaches and attaches again; the Primary writes.",
        least_packets: 40,
        step: |s, step| take_disk_away(s, step, B),
        steps: 4,
        ..PAIR
    },
    Story {
        name: "primary-attach",
        text: "The Primary detaches, writes, and attaches again.",
        least_packets: 40,
        step: |s, step| take_disk_away(s, step, A),
        steps: 4,
        ..PAIR
    },
    Story {
        name: "disconnect",
        text: "An operator disconnects, the Primary writes, the operator connects.",
        least_packets: 40,
        step: |s, step| match step {
            0 => s.operator.disconnect(&mut s.world, B, A, false),
            1 => {
                let alone = s.world.nodes[B].commands.is_empty();
                if alone {
                    write_some(s, A);
                }
                alone
            }
            2 => s.world.nodes[A].requests.is_empty(),
            _ => s.operator.reconnect(&mut s.world),
        },
        steps: 4,
        ..PAIR
    },
    Story {
        name: "full-resync",
        text: "A replica is thrown away and copied.",
        least_packets: 30,
        step: |s, _| s.operator.invalidate(&mut s.world, B, 0, true),
        steps: 1,
        ..PAIR
    },
    Story {
        name: "crashed-primary",
        text: "A crashed Primary comes back after another node took over.",
        least_packets: 40,
        before: take_over,
        step: |s, _| {
            s.restart(A);
            true
        },
        steps: 1,
        ..PAIR
    },
    Story {
        name: "resync-of-three",
        text: "Two of three nodes connect again; one has written.",
        least_packets: 60,
        before: write_apart,
        step: connect_again,
        steps: 1,
        ..TRIPLE
    },
    Story {
        name: "resync-of-three-under-writes",
        text: "The same, and the Primary writes on, also to what is copied.",
        least_packets: 100,
        before: write_apart,
        step: |s, step| {
            s.cut(A, B, false);
            if s.world.nodes[A].requests.is_empty() {
                s.write(A, 700 + u64::from(step % 3), 1);
                s.write(A, 3 + u64::from(step % 2), 1);
                return true;
            }
            false
        },
        steps: 8,
        ..TRIPLE
    },
    Story {
        name: "attach-of-three",
        text: "One of two Secondaries detaches and attaches again; the Primary writes.",
        least_packets: 60,
        step: |s, step| take_disk_away(s, step, B),
        steps: 4,
        ..TRIPLE
    },
    Story {
        name: "primary-attach-of-three",
        text: "The Primary of three detaches, writes, and attaches again.",
        least_packets: 60,
        step: |s, step| take_disk_away(s, step, A),
        steps: 4,
        ..TRIPLE
    },
    Story {
        name: "full-resync-of-three",
        text: "A replica is thrown away and copied, and the Primary writes.",
        least_packets: 60,
        step: |s, step| {
            if step == 0 {
                return s.operator.invalidate(&mut s.world, B, 0, false);
            }
            if s.world.nodes[A].requests.is_empty() {
                s.write(A, 700 + u64::from(step % 3), 1);
                return true;
            }
            false
        },
        steps: 5,
        ..TRIPLE
    },
    Story {
        name: "handover-of-three",
        text: "A handover among three nodes.",
        least_packets: 60,
        before: |s| write_some(s, A),
        step: handover,
        steps: 4,
        ..TRIPLE
    },
    Story {
        name: "two-survivors",
        text: "A Primary dies, one of two survivors takes over, the dead one comes back.",
        least_packets: 60,
        before: |s| {
            s.world.stall(A, C, 0, SECOND);
            write_some(s, A);
            s.pass(SECOND / 100);
            s.crash(A, Lose::Unflushed);
        },
        step: |s, step| match step {
            0 => s.operator.promote(&mut s.world, B, false),
            1 => s.operator.primary == Some(B),
            _ => {
                write_some(s, B);
                s.restart(A);
                true
            }
        },
        steps: 3,
        ..TRIPLE
    },
    Story {
        name: "last-man",
        text: "The last node with quorum is source for both others, which come back.",
        least_packets: 120,
        majority: true,
        before: |s| {
            for peer in [B, C] {
                s.operator.disconnect(&mut s.world, A, peer, false);
                s.pass(SECOND);
            }
            write_some(s, A);
            s.pass(SECOND);
        },
        step: |s, _| s.operator.reconnect(&mut s.world),
        steps: 2,
        ..TRIPLE
    },
    Story {
        name: "resync-84",
        text: "Two nodes connect again; one has written, in the dialect of 8.4.",
        least_packets: 40,
        dialect: Some(101),
        before: write_apart,
        step: connect_again,
        steps: 1,
        ..PAIR
    },
    Story {
        name: "crashed-primary-84",
        text: "A crashed Primary comes back after another node took over, in the dialect of 8.4.",
        least_packets: 40,
        dialect: Some(101),
        before: take_over,
        step: |s, _| {
            s.restart(A);
            true
        },
        steps: 1,
        ..PAIR
    },
    Story {
        name: "handover-async",
        text: "A handover with protocol A, and reads at once.",
        least_packets: 30,
        protocol: Protocol::A,
        before: |s| write_some(s, A),
        step: |s, step| {
            let done = handover(s, step);
            if done && step == 3 {
                let kind = RequestKind::Read;
                s.world.request(B, 0, kind, 3, 3);
            }
            done
        },
        steps: 4,
        ..PAIR
    },
    Story {
        name: "down-and-up",
        text: "A Secondary goes down in good order, the Primary writes, it comes back.",
        least_packets: 40,
        before: |s| write_some(s, A),
        step: |s, step| match step {
            0 => s.operator.down(&mut s.world, B),
            1 => {
                let down = s.operator.is_down(B);
                if down {
                    write_some(s, A);
                }
                down
            }
            2 => s.world.nodes[A].requests.is_empty(),
            _ => {
                s.restart(B);
                true
            }
        },
        steps: 4,
        ..PAIR
    },
];

/// Two nodes in sync, A Primary.
const PAIR: Story = Story {
    name: "",
    text: "",
    least_packets: 1,
    nodes: 2,
    blocks: 2048,
    metadata: Where::External,
    full_sync: false,
    majority: false,
    protocol: Protocol::C,
    dialect: None,
    before: |_| {},
    step: |_, _| true,
    steps: 0,
    trace: false,
};

/// The same with three nodes.
const TRIPLE: Story = Story { nodes: 3, ..PAIR };

fn write_some(s: &mut Scenario, node: usize) {
    for block in [3, 4, 700, 1300, 2000] {
        s.write(node, block, 2);
    }
}

/// The Primary loses its power, and another node becomes Primary and writes.
fn take_over(s: &mut Scenario) {
    write_some(s, A);
    s.crash(A, Lose::Unflushed);
    s.pass(15 * SECOND);
    s.promote(B);
    write_some(s, B);
    s.pass(SECOND);
}

fn write_apart(s: &mut Scenario) {
    s.cut(A, B, true);
    s.pass(20 * SECOND);
    write_some(s, A);
    s.pass(SECOND);
}

fn connect_again(s: &mut Scenario, _step: u32) -> bool {
    s.cut(A, B, false);
    true
}

/// A demotion, a promotion of B, and writes there.
fn handover(s: &mut Scenario, step: u32) -> bool {
    match step {
        0 => s.operator.demote(&mut s.world),
        1 => s.operator.primary.is_none(),
        2 => s.operator.promote(&mut s.world, B, false),
        _ => {
            let done = s.operator.primary == Some(B);
            if done {
                write_some(s, B);
            }
            done
        }
    }
}

fn take_disk_away(s: &mut Scenario, step: u32, node: usize) -> bool {
    match step {
        0 => s.operator.detach(&mut s.world, node, 0, false),
        1 => {
            let gone = s
                .world
                .snapshot(node)
                .is_some_and(|x| x.devices[0].disk_state == DiskState::Diskless);
            if gone {
                write_some(s, A);
            }
            gone
        }
        2 => s.world.nodes[A].requests.is_empty(),
        _ => s.operator.reattach(&mut s.world),
    }
}

/// For crash points: the Primary is alone and writes to more extents than its activity log holds,
/// so bits are set, extents leave the log, and their bitmap pages are written before.
pub const ALONE: Story = Story {
    name: "alone",
    text: "A Primary without its peer writes to more extents than the activity log holds.",
    blocks: 76 * 1024,
    before: |s| {
        s.cut(A, B, true);
        s.pass(20 * SECOND);
    },
    step: |s, step| {
        if !s.world.nodes[A].requests.is_empty() {
            return false;
        }
        if step < 12 {
            for extent in 0..6 {
                s.write(A, u64::from(step * 6 + extent) * 1024 + 5, 1);
            }
        }
        s.cut(A, B, step < 12);
        true
    },
    steps: 13,
    ..PAIR
};

/// The same with metadata on persistent memory.
pub const ALONE_IN_PLACE: Story = Story {
    name: "alone-in-place",
    text: "The same with metadata on persistent memory.",
    metadata: Where::Persistent,
    ..ALONE
};
