//! Packets in words, for the trace: what a reader has to know of them, not every field.

use std::fmt::Write as _;

use lockstep_format::units::{NodeId, NodeMask, Sector, Uuid, VolumeNr};
use lockstep_format::wire::packet::{
    BlockAck, BlockRequest, Data, Protocol, Trim, TwopcHead, Uuids, Uuids110,
};
use lockstep_format::wire::state::{DiskNumbering, PeerState, StateChange, StateWord};
use lockstep_format::wire::{Packet, UuidFlags};

use crate::world::name;

/// Blocks of a request.
pub(crate) fn blocks(sector: Sector, len: u32) -> String {
    let (first, count) = (sector.0 / 8, u64::from(len) / 4096);
    range(first, count)
}

/// So many blocks from this one on.
pub(crate) fn range(first: u64, count: u64) -> String {
    if count <= 1 {
        format!("block {first}")
    } else {
        format!("blocks {first}..{}", first + count - 1)
    }
}

/// A generation (current or bitmap UUID), shortened; its lowest bit says only that a Primary had it.
pub(crate) fn generation(uuid: Uuid) -> String {
    if uuid.is_zero() {
        "none".into()
    } else if uuid == Uuid::JUST_CREATED {
        "just created".into()
    } else {
        format!("{:08x}", uuid.0 >> 32)
    }
}

/// A packet in words.
pub(crate) fn packet(volume: VolumeNr, packet: &Packet) -> String {
    let of = |sector, size| format!("{} (volume {volume})", blocks(sector, size));
    let ack = |what: &str, a: &BlockAck| format!("{what} {}", of(a.sector, a.size_bytes));
    let data = |what: &str, d: &Data| format!("{what} {}", of(d.sector, d.payload_len));
    let asks = |what: &str, r: &BlockRequest| format!("{what} {}", of(r.sector, r.size_bytes));
    let trim = |what: &str, t: &Trim| format!("{what} {}", of(t.sector, t.size_bytes));
    match packet {
        Packet::Data(d) => data("Data: write of", d),
        Packet::DataReply(d) => data("DataReply: content of", d),
        Packet::RsDataReply(d) => data("RsDataReply: resync of", d),
        Packet::Trim(t) => trim("Trim: discard of", t),
        Packet::Zeroes(t) => trim("Zeroes: zeroing of", t),
        Packet::WriteAck(a) => ack("WriteAck: has written", a),
        Packet::RecvAck(a) => ack("RecvAck: has received", a),
        Packet::RsWriteAck(a) => ack("RsWriteAck: has the resync of", a),
        Packet::WriteAckInSync(a) => {
            ack("WriteAckInSync: has written, and cleared the marks of", a)
        }
        Packet::NegAck(a) => ack("NegAck: failed write of", a),
        Packet::NegDreply(a) => ack("NegDreply: failed read of", a),
        Packet::NegRsDreply(a) => ack("NegRsDreply: failed resync read of", a),
        Packet::RsNegAck(a) => ack("RsNegAck: failed resync write of", a),
        Packet::RsIsInSync(a) => ack("RsIsInSync: has the same in", a),
        Packet::RsCancel(a) => ack("RsCancel: does not answer now for", a),
        Packet::RsCancelAhead(a) => ack("RsCancelAhead: does not answer while Ahead for", a),
        Packet::DataRequest(r) => asks("DataRequest: asks for", r),
        Packet::RsDataRequest(r) => asks("RsDataRequest: asks for the resync of", r),
        Packet::RsThinReq(r) => asks("RsThinReq: asks for the resync, or for zero, of", r),
        Packet::RsDagtagReq(r) => asks("RsDagtagReq: asks for the resync of", &r.block()),
        Packet::RsThinDagtagReq(r) => asks(
            "RsThinDagtagReq: asks for the resync, or for zero, of",
            &r.block(),
        ),
        Packet::OutOfSync(d) => {
            let place = of(d.sector, d.size_bytes);
            format!("OutOfSync: marks, instead of the data, of {place}")
        }
        Packet::PeersInSync(p) => {
            let (place, nodes) = (of(p.sector, p.size_bytes), nodes(p.mask));
            format!("PeersInSync: {nodes} are equal in {place}")
        }
        Packet::Barrier(b) => format!("Barrier {}: the epoch of writes before it ends", b.barrier),
        Packet::BarrierAck(b) => format!(
            "BarrierAck {}: the {} writes of that epoch are durable",
            b.barrier, b.set_size
        ),
        Packet::PeerAck(p) => format!(
            "PeerAck: {} have all writes up to dagtag {}",
            nodes(p.mask),
            p.dagtag.0
        ),
        Packet::Dagtag(d) => format!("Dagtag {}: what follows begins there", d.0),
        Packet::State(s) => state(volume, s),
        Packet::Uuids110(u) => uuids110(volume, u),
        Packet::Uuids(u) => uuids(volume, u),
        Packet::CurrentUuid(c) => format!(
            "CurrentUuid (volume {volume}): a node without a usable disk serves generation {}",
            generation(c.uuid)
        ),
        Packet::SyncUuid(u) => format!(
            "SyncUuid (volume {volume}): the resync is called {}",
            generation(*u)
        ),
        Packet::Sizes(s) => format!(
            "Sizes (volume {volume}): its disk has {} sectors, the volume {}",
            s.d_size.0, s.c_size.0
        ),
        Packet::Protocol(p) => protocol("Protocol", p),
        Packet::ProtocolUpdate(p) => protocol("ProtocolUpdate", p),
        Packet::ConnectionFeatures(f) => format!(
            "ConnectionFeatures: speaks versions {} to {}",
            f.protocol_min, f.protocol_max
        ),
        Packet::SyncParam(_) | Packet::SyncParam89(_) => "SyncParam: options of resyncs".into(),
        Packet::AuthChallenge(_) => "AuthChallenge".into(),
        Packet::AuthResponse(_) => "AuthResponse".into(),
        Packet::Bitmap(b) => format!("Bitmap (volume {volume}): {} bytes of marks", b.words.len()),
        Packet::CompressedBitmap(_) => format!("CompressedBitmap (volume {volume}): marks"),
        Packet::TwopcPrepare(p) => {
            let what = change(volume, p.change);
            format!("TwopcPrepare {}: {what}?", transaction(&p.head))
        }
        Packet::TwopcYes(r) => format!("TwopcYes {:08x}", r.tid),
        Packet::TwopcNo(r) => format!("TwopcNo {:08x}", r.tid),
        Packet::TwopcRetry(r) => format!("TwopcRetry {:08x}: not now", r.tid),
        Packet::TwopcCommit(o) => format!("TwopcCommit {}", transaction(&o.head)),
        Packet::TwopcAbort(o) => format!("TwopcAbort {}", transaction(&o.head)),
        Packet::StateChgReq(c) => format!("StateChgReq: {}?", change(volume, *c)),
        Packet::ConnStChgReq(c) => format!("ConnStChgReq: {}?", change(VolumeNr::NONE, *c)),
        Packet::FlushRequests(f) => format!(
            "FlushRequests {}: asks a Primary for what it still has to tell of its writes",
            f.flush_sequence
        ),
        Packet::FlushRequestsAck(f) => format!(
            "FlushRequestsAck {}: that was all of {}",
            f.flush_sequence,
            node(f.primary_node_id)
        ),
        Packet::EnableReplication(e) => format!(
            "EnableReplication (volume {volume}): wants {} from now on",
            wanted(e.enable)
        ),
        Packet::EnableReplicationNext(e) => format!(
            "EnableReplicationNext (volume {volume}): wants {} while it is a target",
            wanted(e.enable)
        ),
        other => {
            let mut text = format!("{other:?}");
            text.truncate(text.char_indices().nth(400).map_or(text.len(), |(i, _)| i));
            text
        }
    }
}

fn node(node: NodeId) -> String {
    name(usize::from(node.0)).to_string()
}

fn nodes(mask: NodeMask) -> String {
    let names: Vec<String> = mask.iter().filter(|n| n.0 < 5).map(node).collect();
    match names.is_empty() {
        true => "no nodes".into(),
        false => names.join("+"),
    }
}

fn wanted(writes: bool) -> &'static str {
    if writes {
        "all writes"
    } else {
        "only marks of writes"
    }
}

fn protocol(what: &str, p: &Protocol) -> String {
    format!("{what}: replication protocol {:?}", p.protocol)
}

/// What differs from the usual is said.
fn state(volume: VolumeNr, s: &PeerState) -> String {
    let mut text = format!("State (volume {volume}): {:?}, disk {:?}", s.role, s.disk);
    let _ = match s.repl > lockstep_format::wire::ReplState::Off {
        true => write!(text, ", {:?}", s.repl),
        false => write!(text, ", {:?}", s.conn),
    };
    let _ = write!(
        text,
        "; takes the other for {:?}, disk {:?}",
        s.peer, s.pdsk
    );
    let flags = [
        (
            s.susp || s.susp_nod || s.susp_fen,
            "its requests are suspended",
        ),
        (s.aftr_isp || s.peer_isp || s.user_isp, "resync paused"),
        (!s.quorum, "without quorum"),
    ];
    for (_, word) in flags.iter().filter(|(is, _)| *is) {
        let _ = write!(text, "; {word}");
    }
    text
}

fn flags(text: &mut String, flags: UuidFlags, dirty_bits: u64) {
    if dirty_bits > 0 {
        let _ = write!(text, ", {dirty_bits} marks");
    }
    if !flags.is_empty() {
        let _ = write!(text, ", {flags:?}");
    }
}

fn ancestors<'a>(text: &mut String, history: impl Iterator<Item = &'a Uuid>) {
    let names: Vec<String> = history
        .filter(|u| !u.is_zero())
        .map(|u| generation(*u))
        .collect();
    if !names.is_empty() {
        let _ = write!(text, ", before that {}", names.join(" "));
    }
}

fn uuids110(volume: VolumeNr, u: &Uuids110) -> String {
    let mut text = format!(
        "Uuids (volume {volume}): generation {}",
        generation(u.current)
    );
    for (of, uuid) in u.bitmap_uuids.iter().filter(|(_, uuid)| !uuid.is_zero()) {
        let _ = write!(text, ", {} left at {}", node(*of), generation(*uuid));
    }
    ancestors(&mut text, u.history.iter());
    flags(&mut text, u.flags, u.dirty_bits);
    text
}

fn uuids(volume: VolumeNr, u: &Uuids) -> String {
    let mut text = format!(
        "Uuids (volume {volume}): generation {}",
        generation(u.current)
    );
    if !u.bitmap.is_zero() {
        let _ = write!(text, ", the other left at {}", generation(u.bitmap));
    }
    ancestors(&mut text, u.history.iter());
    flags(&mut text, u.flags, u.dirty_bits);
    text
}

/// A cluster-wide change by its number and who asks.
fn transaction(head: &TwopcHead) -> String {
    let mut text = format!("{:08x} of {}", head.tid, node(head.initiator_node_id));
    if let Some(target) = head.target_node_id {
        let _ = write!(text, " about {}", node(target));
    }
    text
}

/// What a state change wants.
fn change(volume: VolumeNr, change: StateChange) -> String {
    let StateChange { mask, val } = change;
    let mut wanted = Vec::new();
    if mask.has(StateWord::ROLE) {
        wanted.push(format!("become {:?}", val.role()));
    }
    if mask.has(StateWord::CONN) {
        let conn = val.field(StateWord::CONN);
        match (val.conn(), val.repl()) {
            (Some(conn), _) if volume == VolumeNr::NONE => wanted.push(format!("be {conn:?}")),
            (_, Some(repl)) => wanted.push(format!("be {repl:?}")),
            (conn_state, None) => wanted.push(format!("be {conn_state:?} ({conn})")),
        }
    }
    if mask.has(StateWord::DISK) {
        wanted.push(format!("my disk {:?}", val.disk(DiskNumbering::V9)));
    }
    if mask.has(StateWord::PDSK) {
        wanted.push(format!("your disk {:?}", val.pdsk(DiskNumbering::V9)));
    }
    if wanted.is_empty() {
        wanted.push("look who is there".into());
    }
    wanted.join(", ").replace("Some(", "").replace(')', "")
}
