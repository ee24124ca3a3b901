//! The order in which a kernel took the packets of its streams is not in a capture: a packet lies
//! in a socket until its receiver has time. Within one stream the order is fixed. Where a replay
//! first differs, packets of one stream are held back behind those of another one, as long as that
//! makes the difference go away or come later.

use lockstep_format::units::NodeId;
use lockstep_format::wire::Packet;

use crate::capture::{Item, Seen, What};
use crate::cluster::is_cluster;
use crate::compare::{Difference, Replay, Setup};

/// How long a kernel leaves a packet in its socket.
const HELD_BACK_NS: u64 = 150_000_000;
/// How many packets are held back at most in a whole capture.
const MOST: usize = 60;

/// Replays one node in the order that fits best.
pub(crate) fn run(
    items: &[Item],
    me: NodeId,
    setup: &Setup,
    by_choice: &dyn Fn(&str) -> bool,
) -> Vec<Difference> {
    if !is_cluster(items) {
        return Replay::run(items, me, setup);
    }
    let mut items = items.to_vec();
    let mut best = Replay::run(&items, me, setup);
    for _ in 0..MOST {
        let Some(first) = first(&best, by_choice) else {
            break;
        };
        let start = items[0].time_ns;
        let better =
            candidates(&items, me, start + first)
                .into_iter()
                .find_map(|(from, behind)| {
                    let tried = held_back(&items, from, behind);
                    let differences = Replay::run(&tried, me, setup);
                    let later = self::first(&differences, by_choice).is_none_or(|at| at > first);
                    let fewer = differences.len() < best.len();
                    let known = |all: &[Difference]| all.iter().filter(|d| d.at_ns < first).count();
                    (later && known(&differences) <= known(&best)
                        || fewer && self::first(&differences, by_choice) == Some(first))
                    .then_some((tried, differences))
                });
        let Some((tried, differences)) = better else {
            break;
        };
        items = tried;
        best = differences;
    }
    best
}

fn first(differences: &[Difference], by_choice: &dyn Fn(&str) -> bool) -> Option<u64> {
    let other = differences.iter().filter(|d| !by_choice(&d.text));
    other.map(|d| d.at_ns).min()
}

fn to_me(item: &Item, me: NodeId) -> Option<&Seen> {
    match &item.what {
        What::Packet(seen) if seen.to == me => Some(seen),
        _ => None,
    }
}

/// Whether it may matter when a packet is taken.
fn decides(packet: &Packet) -> bool {
    !matches!(
        packet,
        Packet::Ping
            | Packet::PingAck
            | Packet::UnplugRemote
            | Packet::Dagtag(_)
            | Packet::Barrier(_)
            | Packet::BarrierAck(_)
            | Packet::RsDataReply(_)
            | Packet::RsDagtagReq(_)
            | Packet::RsWriteAck(_)
    )
}

fn same_stream(a: &Seen, b: &Seen) -> bool {
    (a.session, a.stream) == (b.session, b.stream)
}

/// What may be held back, and behind what: the nearest first.
fn candidates(items: &[Item], me: NodeId, at_ns: u64) -> Vec<(usize, usize)> {
    let window = at_ns - HELD_BACK_NS..at_ns + HELD_BACK_NS / 2;
    let near: Vec<usize> = (0..items.len())
        .filter(|i| window.contains(&items[*i].time_ns))
        .filter(|i| to_me(&items[*i], me).is_some_and(|seen| decides(&seen.packet)))
        .collect();
    let mut pairs = Vec::new();
    for (n, from) in near.iter().enumerate() {
        for behind in &near[n + 1..] {
            let (Some(a), Some(b)) = (to_me(&items[*from], me), to_me(&items[*behind], me)) else {
                continue;
            };
            if !same_stream(a, b) {
                pairs.push((*from, *behind));
            }
        }
    }
    let far = |at: usize| items[at].time_ns.abs_diff(at_ns);
    pairs.sort_by_key(|(from, behind)| far(*from) + (behind - from) as u64 * 1_000_000);
    pairs
}

/// The same items with those of one stream moved behind another one.
fn held_back(items: &[Item], from: usize, behind: usize) -> Vec<Item> {
    let mut order = items[..from].to_vec();
    let mut held = Vec::new();
    let What::Packet(stream) = &items[from].what else {
        return items.to_vec();
    };
    for item in &items[from..=behind] {
        match &item.what {
            What::Packet(seen) if seen.to == stream.to && same_stream(seen, stream) => {
                held.push(Item {
                    time_ns: items[behind].time_ns,
                    what: item.what.clone(),
                });
            }
            _ => order.push(item.clone()),
        }
    }
    order.append(&mut held);
    order.extend_from_slice(&items[behind + 1..]);
    order
}
