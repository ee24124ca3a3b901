//! What happens in a world in words that a newcomer understands: the lines of a trace.

use std::collections::VecDeque;

use lockstep_core::command::{Answer, Command, CommandError};
use lockstep_core::event::{DiskOp, Input, MetaOp, RequestKind, Tag};
use lockstep_core::report::Snapshot;
use lockstep_format::disk::layout::Layout;
use lockstep_format::units::VolumeNr;
use lockstep_format::wire::Packet;

use crate::packets::{blocks, generation, packet, range};
use crate::world::{Asked, name};

/// How to read a trace; printed above it.
pub const LEGEND: &str = "\
Each line: virtual time in seconds, node (A, B, ...), what happens there. `==` is done by the simulator (a
fault, the operator, a request of an application), `<-` is a packet that arrives, `->` one that is sent,
`log:` what the node itself says; everything else is what it does with its disks, links and requests.
Blocks have 4 KiB and are counted from 0; a write of blocks 8..9 = 41..42 stores version 41 in block 8
and version 42 in block 9. Every version is written once, so it names the write it came from; version 0
is what a block has before any write. A write is on a disk when its operation is done, and durable after a
flush that began later. The mark of a block says that the other disk may lack what this one has there.
A generation names the data of a disk: it changes when a disk is left behind (first 8 digits are shown).";

/// The last lines of each node.
#[derive(Clone, Debug)]
pub struct Tail {
    limit: usize,
    lines: Vec<VecDeque<String>>,
}

impl Tail {
    /// Keeps so many lines of each node.
    pub fn new(nodes: usize, limit: usize) -> Self {
        Tail {
            limit,
            lines: vec![VecDeque::new(); nodes],
        }
    }

    pub(crate) fn push(&mut self, node: usize, line: String) {
        // Pings of an idle cluster would push out what matters.
        if line.ends_with("Ping") || line.ends_with("PingAck") {
            return;
        }
        let lines = &mut self.lines[node];
        if lines.len() >= self.limit {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// The lines of a node, oldest first.
    pub fn of(&self, node: usize) -> impl Iterator<Item = &str> {
        self.lines[node].iter().map(String::as_str)
    }
}

/// A node's state in a few lines.
pub(crate) fn state(snapshot: &Snapshot) -> String {
    let mut text = format!("{:?}", snapshot.role);
    if !snapshot.suspended.is_empty() {
        text += &format!(", suspended: {}", snapshot.suspended.join(", "));
    }
    for device in &snapshot.devices {
        text += &format!(
            "\n  volume {}: {:?}, generation {}, {} requests and {} disk operations pending",
            device.volume,
            device.disk_state,
            generation(device.current_uuid),
            device.upper_pending,
            device.lower_pending
        );
    }
    for connection in &snapshot.connections {
        text += &format!(
            "\n  with {}: {:?}",
            name(usize::from(connection.peer.0)),
            connection.state
        );
        for p in &connection.peer_devices {
            text += &format!(
                "; volume {}: {:?}, its disk {:?}, {} blocks marked, {} sent without answer",
                p.volume,
                p.repl_state,
                p.disk_state,
                p.out_of_sync_sectors / 8,
                p.pending
            );
        }
    }
    text
}

/// A tag as slot and use of the slot.
fn short(tag: Tag) -> String {
    format!("{}.{}", tag.0 & 0xffff_ffff, tag.0 >> 32)
}

fn versions(content: &[u64]) -> String {
    match content {
        [] => String::new(),
        [one] => format!(" = {one}"),
        [first, .., last] if *last == first + content.len() as u64 - 1 => {
            format!(" = {first}..{last}")
        }
        many => format!(" = {many:?}"),
    }
}

/// A request in words.
pub(crate) fn asked(asked: &Asked) -> String {
    let place = range(asked.block, asked.count);
    let volume = asked.volume;
    match asked.kind {
        RequestKind::Read => format!("read of {place} of volume {volume}"),
        RequestKind::Write { fua } => {
            let content: Vec<u64> = (asked.value..asked.value + asked.count).collect();
            let how = if fua { "durable write" } else { "write" };
            format!("{how} of {place}{} of volume {volume}", versions(&content))
        }
        RequestKind::Flush => format!("flush of volume {volume}"),
        RequestKind::Discard => format!("discard of {place} of volume {volume}"),
        RequestKind::Zeroes { .. } => format!("zeroing of {place} of volume {volume}"),
    }
}

/// A command in words.
pub(crate) fn command(command: &Command) -> String {
    match command {
        Command::NewVolume { volume, .. } => format!("new-minor volume {volume}"),
        Command::NewPeer { peer, .. } => format!("new-peer {}", name(usize::from(peer.0))),
        Command::PeerDeviceOptions { peer, volume, .. } => {
            format!(
                "peer-device-options {} volume {volume}",
                name(usize::from(peer.0))
            )
        }
        Command::Attach { volume, .. } => format!("attach volume {volume}"),
        other => format!("{other:?}"),
    }
}

/// The answer to a command in words.
pub(crate) fn answer(result: &Result<Answer, CommandError>) -> String {
    match result {
        Ok(Answer::Done) => "done".into(),
        Ok(Answer::NothingToDo) => "nothing to do".into(),
        Err(error) => format!("refused ({}): {}", error.code.0, error.text),
    }
}

/// Something that a node is told; nothing for what its own line says already.
pub(crate) fn input(input: &Input) -> Option<String> {
    Some(match input {
        Input::Timeout
        | Input::Sent { .. }
        | Input::Progress { .. }
        | Input::DigestDone { .. }
        | Input::Request(_) => return None,
        Input::LinkUp {
            peer,
            link,
            resolve_conflicts,
        } => format!(
            "link {} to {} is up{}",
            link.0,
            name(usize::from(peer.0)),
            if *resolve_conflicts {
                " (this side resolves conflicts)"
            } else {
                ""
            }
        ),
        Input::LinkDown { peer, link, reason } => format!(
            "link {} to {} is down: {reason:?}",
            link.0,
            name(usize::from(peer.0))
        ),
        Input::Packet {
            peer,
            volume,
            packet: p,
            ..
        } => format!("<- {}  {}", name(usize::from(peer.0)), packet(*volume, p)),
        Input::Corrupt {
            peer,
            volume,
            packet: p,
            ..
        } => format!(
            "<- {}  {} (changed on its way)",
            name(usize::from(peer.0)),
            packet(*volume, p)
        ),
        Input::DiskOpened { result, .. } => match result {
            Ok(_) => "a disk is open".into(),
            Err(text) => format!("a disk cannot be opened: {text}"),
        },
        Input::DiskClosed { .. } => "a disk is closed".into(),
        Input::DiskDone { tag, result } => match result {
            Ok(_) => format!("disk operation {} is done", short(*tag)),
            Err(error) => format!("disk operation {} FAILED: {error:?}", short(*tag)),
        },
        Input::MetaDone { tag, result } => match result {
            Ok(_) => format!("metadata operation {} is done", short(*tag)),
            Err(error) => format!("metadata operation {} FAILED: {error:?}", short(*tag)),
        },
        Input::HandlerDone { .. } => "a handler ended".into(),
        Input::Command { id, command: c } => {
            format!("== operator, command {}: {}", id.0, command(c))
        }
    })
}

/// A packet that is sent.
pub(crate) fn sent(
    peer: usize,
    volume: VolumeNr,
    sent: &Packet,
    payload: Option<&[u64]>,
) -> String {
    format!(
        "-> {}  {}{}",
        name(peer),
        packet(volume, sent),
        payload.map_or(String::new(), versions)
    )
}

/// A disk operation that starts.
pub(crate) fn disk(volume: VolumeNr, tag: Tag, op: &DiskOp) -> String {
    let what = match op {
        DiskOp::Read { sector, payload } => format!("reads {}", blocks(*sector, payload.len)),
        DiskOp::ReadNew { sector, len } => format!("reads {}", blocks(*sector, *len)),
        DiskOp::Write {
            sector,
            payload,
            fua,
        } => format!(
            "writes {}{}",
            blocks(*sector, payload.len),
            if *fua { ", durably" } else { "" }
        ),
        DiskOp::Flush => "flushes".into(),
        DiskOp::Discard { sector, len } => format!("discards {}", blocks(*sector, *len)),
        DiskOp::Zeroes { sector, len, .. } => format!("zeroes {}", blocks(*sector, *len)),
    };
    format!("disk operation {}: {what} (volume {volume})", short(tag))
}

/// A metadata operation that starts.
pub(crate) fn meta(layout: &Layout, volume: VolumeNr, tag: Tag, op: &MetaOp) -> String {
    let area = |offset: u64| {
        let areas = [
            (layout.superblock_byte(), "the superblock"),
            (layout.al_byte(), "the activity log"),
            (layout.bitmap_byte(), "the bitmap"),
        ];
        areas
            .iter()
            .filter(|(start, _)| *start <= offset)
            .max_by_key(|(start, _)| *start)
            .map_or("metadata", |(_, name)| name)
    };
    match op {
        MetaOp::Read { offset, len } => format!(
            "metadata operation {}: reads {} (byte {offset}, {len} bytes, volume {volume})",
            short(tag),
            area(*offset)
        ),
        MetaOp::Write {
            offset,
            bytes,
            flush_data,
        } => format!(
            "metadata operation {}: writes {} (byte {offset}, {} bytes, volume {volume}){}",
            short(tag),
            area(*offset),
            bytes.len(),
            if *flush_data {
                " after a flush of the data"
            } else {
                ""
            }
        ),
        MetaOp::Store { steps, flush_data } => {
            let words: usize = steps.iter().map(|s| s.bytes.len() / 8).sum();
            format!(
                "metadata operation {}: stores to {} ({words} words in {} steps, volume {volume}){}",
                short(tag),
                steps.first().map_or("nothing", |s| area(s.offset)),
                steps.len(),
                if *flush_data {
                    " after a flush of the data"
                } else {
                    ""
                }
            )
        }
    }
}
