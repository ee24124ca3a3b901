//! What packets of captures have in common, and how they are shown.

use lockstep_core::event::Stream;
use lockstep_format::units::{Sector, Uuid};
use lockstep_format::wire::packet::{BlockId, CompressedBitmap, RunKind, Uuids110};
use lockstep_format::wire::vli::RleDecoder;
use lockstep_format::wire::{self, Packet, PeerState, UuidFlags};

use crate::capture::{Item, Seen, What};

/// A UUID without the bit that a random one has by chance.
pub(crate) fn clean(uuid: Uuid) -> Uuid {
    Uuid(if uuid.0 == u64::MAX {
        uuid.0
    } else {
        uuid.0 & !1
    })
}

/// Whether the command leaves its node without power or without a cable.
pub(crate) fn is_cut_off(text: &str) -> bool {
    let cable = text.starts_with("(host: tap ") && text.ends_with(" down)");
    cable || text.starts_with("(QEMU killed")
}

/// Bits that a compressed bitmap sets.
pub(crate) fn set_runs(code: &CompressedBitmap) -> Vec<u64> {
    let mut at = 0;
    let mut bits = Vec::new();
    for run in RleDecoder::new(code) {
        let (kind, run) = run.expect("a code of a kernel");
        if kind == RunKind::Set {
            bits.extend(at..at + run);
        }
        at += run;
    }
    bits
}

pub(crate) fn ancestors(history: &[Uuid]) -> impl Iterator<Item = Uuid> {
    history.iter().copied().filter(|uuid| !uuid.is_zero())
}

/// Packets whose presence and timing do not matter.
pub(crate) fn is_free(packet: &Packet) -> bool {
    matches!(
        packet,
        Packet::Ping
            | Packet::PingAck
            | Packet::UnplugRemote
            | Packet::DelayProbe(_)
            | Packet::Dagtag(_)
            | Packet::EnableReplicationNext(_)
            | Packet::EnableReplication(_)
            | Packet::PeersInSync(_)
    )
}

/// An ack without its number, which counts all acks of a volume in the order of their timing.
pub(crate) fn without_seq(packet: &Packet) -> Option<(BlockId, Sector, u32)> {
    match packet {
        Packet::RecvAck(a)
        | Packet::WriteAck(a)
        | Packet::WriteAckInSync(a)
        | Packet::NegAck(a)
        | Packet::Superseded(a)
        | Packet::RsWriteAck(a)
        | Packet::RsIsInSync(a)
        | Packet::RsCancel(a)
        | Packet::NegRsDreply(a) => Some((a.block_id, a.sector, a.size_bytes)),
        _ => None,
    }
}

pub(crate) fn show(packet: &Packet) -> String {
    match packet {
        Packet::State(state) => format!("State {}", show_state(state)),
        Packet::Uuids110(u) => format!(
            "Uuids110 {:016x} dirty {} flags {:?} mask {:x} bitmap {:x?} history {:x?}",
            u.current.0,
            u.dirty_bits,
            u.flags,
            u.node_mask.0,
            u.bitmap_uuids
                .iter()
                .map(|(n, u)| (n.0, u.0))
                .collect::<Vec<_>>(),
            u.history
                .iter()
                .map(|u| u.0)
                .filter(|u| *u != 0)
                .collect::<Vec<_>>()
        ),
        other => format!("{other:?}"),
    }
}

pub(crate) fn show_state(s: &PeerState) -> String {
    format!(
        "{:?}/{:?} {:?} {:?} {:?}/{:?} quorum {} susp {}{}{} isp {}{}{}",
        s.role,
        s.peer,
        s.conn,
        s.repl,
        s.disk,
        s.pdsk,
        s.quorum,
        u8::from(s.susp),
        u8::from(s.susp_nod),
        u8::from(s.susp_fen),
        u8::from(s.aftr_isp),
        u8::from(s.peer_isp),
        u8::from(s.user_isp),
    )
}

pub(crate) fn event_stream(stream: wire::Stream) -> Stream {
    match stream {
        wire::Stream::Data => Stream::Data,
        wire::Stream::Control => Stream::Control,
    }
}

/// Whether the same set of UUIDs follows at once, with the news that it is a stable one.
pub(crate) fn is_told_again(seen: &Seen, uuids: &Uuids110, ahead: &[Item]) -> bool {
    let next = ahead.iter().find_map(|item| match &item.what {
        What::Packet(other) if (other.from, other.session) == (seen.from, seen.session) => {
            match &other.packet {
                Packet::Uuids110(next) => Some(next),
                _ => None,
            }
        }
        _ => None,
    });
    let mut again = uuids.clone();
    again.flags |= UuidFlags::GOT_STABLE;
    again != *uuids && next == Some(&again)
}
