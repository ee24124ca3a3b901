//! Captures of three nodes: when a node was asked for a role or to leave is seen from what it
//! proposed to the others. A line of the shell has one time, and may wait or try again; and an
//! application promotes a node by opening its device.

use std::collections::BTreeSet;

use lockstep_format::units::NodeId;
use lockstep_format::wire::{Packet, Role, StateWord};

use crate::capture::{Item, Seen, What};

/// What a node proposes because its operator, or an application, wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    Role(Role),
    Leave(NodeId),
}

struct Proposal {
    time_ns: u64,
    wish: Wish,
    taken: bool,
}

/// A tool needs a while on an emulated processor.
const TOOL_NS: u64 = 100_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// Whether a capture has three nodes.
pub(crate) fn is_cluster(captured: &[Item]) -> bool {
    captured.iter().any(|item| match &item.what {
        What::Up { nodes, .. } => nodes.contains(&NodeId(2)),
        _ => false,
    })
}

/// The commands with the times at which the kernel was asked.
pub(crate) fn place(captured: &[Item], commands: Vec<Item>) -> Vec<Item> {
    let mut placed = Vec::new();
    for node in (0..3).map(NodeId) {
        let own = commands.iter().filter(|item| match &item.what {
            What::Command { node: of, .. } => *of == node,
            _ => false,
        });
        placed.extend(place_of(captured, node, &own.cloned().collect::<Vec<_>>()));
    }
    placed
}

fn place_of(captured: &[Item], node: NodeId, commands: &[Item]) -> Vec<Item> {
    let mut proposals = proposals(captured, node);
    let mut placed = Vec::new();
    let mut after = 0;
    let mut begins = 0;
    for (index, item) in commands.iter().enumerate() {
        let text = match &item.what {
            What::Command { text, .. } => text,
            _ => continue,
        };
        // Lines such as `while [ $(date +%s) -lt 1795290295 ]`.
        if let Some((_, second)) = text.split_once(" -lt ")
            && let Some(second) = second.split_whitespace().next()
        {
            begins = (second.parse::<u64>().expect("seconds") + 1) * SECOND_NS;
        }
        if index == 0 || commands[index - 1].time_ns != item.time_ns {
            after = 0;
        }
        let end = commands[index..]
            .iter()
            .find(|other| other.time_ns > item.time_ns)
            .map_or(u64::MAX, |next| next.time_ns);
        let wanted = |wish: Wish| !text.contains("[exit") && asks(text, wish);
        let mut time_ns = item.time_ns.max(after).max(begins);
        let mut first = true;
        for proposal in &mut proposals {
            let inside = (item.time_ns - TOOL_NS..end).contains(&proposal.time_ns);
            if proposal.taken || !inside {
                continue;
            }
            if wanted(proposal.wish) {
                // What follows are repetitions, or the other peers.
                proposal.taken = true;
                if std::mem::take(&mut first) {
                    time_ns = proposal.time_ns - 1;
                }
                after = proposal.time_ns + TOOL_NS;
            } else if !first {
                break;
            }
        }
        begins = if first { begins } else { 0 };
        if text.starts_with("echo") {
            begins = 0;
        }
        placed.push(Item {
            time_ns,
            what: item.what.clone(),
        });
    }
    // Whoever opens a device asks for its role.
    let opened = proposals.iter().filter(|p| !p.taken);
    placed.extend(opened.filter_map(|proposal| {
        let text = match proposal.wish {
            Wish::Role(Role::Primary) => "drbdadm primary r0",
            Wish::Role(_) => "drbdadm secondary r0",
            Wish::Leave(_) => return None,
        };
        Some(Item {
            time_ns: proposal.time_ns - 1,
            what: What::Command {
                node,
                text: text.to_owned(),
            },
        })
    }));
    placed
}

/// Whether a command has this wish.
fn asks(text: &str, wish: Wish) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    match (&words[..], wish) {
        (["drbdadm", "primary", ..], Wish::Role(Role::Primary))
        | (["drbdadm", "secondary", ..], Wish::Role(Role::Secondary))
        | (["drbdadm", "down", ..], Wish::Leave(_)) => true,
        (["drbdadm", "disconnect", whom, ..], Wish::Leave(peer)) => {
            *whom == "r0" || *whom == format!("r0:node{}", peer.0 + 1)
        }
        _ => false,
    }
}

fn proposals(captured: &[Item], node: NodeId) -> Vec<Proposal> {
    let mut seen_tids = BTreeSet::new();
    let mut proposals = Vec::new();
    for item in captured {
        let What::Packet(seen) = &item.what else {
            continue;
        };
        if seen.from != node {
            continue;
        }
        if let Packet::TwopcPrepare(p) = &seen.packet
            && let Some(wish) = wish(seen)
            && seen_tids.insert(p.head.tid)
        {
            proposals.push(Proposal {
                time_ns: item.time_ns,
                wish,
                taken: false,
            });
        }
    }
    proposals
}

fn wish(seen: &Seen) -> Option<Wish> {
    let Packet::TwopcPrepare(p) = &seen.packet else {
        return None;
    };
    if p.head.initiator_node_id != seen.from {
        return None;
    }
    // Connections are made by the same packet, with a role.
    let mask = p.change.mask;
    match (mask.has(StateWord::ROLE), mask.has(StateWord::CONN)) {
        (true, false) => p.change.val.role().map(Wish::Role),
        (false, true) => p.head.target_node_id.map(Wish::Leave),
        _ => None,
    }
}

/// When the nodes took each other for lost, by their logs: a cut cable shows nothing on the wire.
pub(crate) fn losses(captured: &[Item], transcript: &str) -> Vec<Item> {
    let mut losses = Vec::new();
    for node in (0..3).map(NodeId) {
        let title = format!("\nkernel log, node{} ", node.0 + 1);
        let Some((_, log)) = transcript.split_once(&title) else {
            continue;
        };
        let log = log.split("\nkernel log, ").next().unwrap_or_default();
        let lines: Vec<(u64, &str)> = log.lines().filter_map(stamped).collect();
        // A state change is in the log, and a moment later in the capture.
        let boot_ns = lines
            .iter()
            .filter_map(|(at, line)| Some(proposed(captured, node, line)? - at))
            .min();
        for (at, line) in &lines {
            let Some(peer) = lost_peer(line) else {
                continue;
            };
            losses.push(Item {
                time_ns: boot_ns.expect("the log has state changes") + at,
                what: What::Command {
                    node,
                    text: format!("(link to node{} lost)", peer.0 + 1),
                },
            });
        }
    }
    losses
}

/// A line such as `[  101.546405] drbd r0 node2: PingAck did not arrive in time.`
fn stamped(line: &str) -> Option<(u64, &str)> {
    let (stamp, text) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, micros) = stamp.trim().split_once('.')?;
    let ns = seconds.parse::<u64>().ok()? * SECOND_NS + micros.parse::<u64>().ok()? * 1000;
    Some((ns, text.trim()))
}

fn lost_peer(line: &str) -> Option<NodeId> {
    let (peer, _) = line
        .strip_prefix("drbd r0 node")?
        .split_once(": PingAck did not arrive in time.")?;
    Some(NodeId(peer.parse::<u8>().ok()? - 1))
}

/// When the proposal that a line names was sent.
fn proposed(captured: &[Item], node: NodeId, line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("Preparing cluster-wide state change ")?;
    let tid: u32 = rest.split_once(':')?.0.parse().ok()?;
    let item = captured.iter().find(|item| match &item.what {
        What::Packet(seen) => match &seen.packet {
            Packet::TwopcPrepare(p) => p.head.tid == tid && seen.from == node,
            _ => false,
        },
        _ => false,
    })?;
    Some(item.time_ns)
}
