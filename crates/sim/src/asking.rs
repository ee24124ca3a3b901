//! Resyncs, seen from the wire: whose resync is paused asks for nothing, and no more is asked for at a time
//! than `max-buffers` allows.

use std::collections::BTreeMap;

use lockstep_format::units::{NodeId, Sector, VolumeNr};
use lockstep_format::wire::Packet;

use crate::limits::open;
use crate::sometimes;
use crate::world::{World, name};

/// What one end of a link has asked for and not got: sectors, by volume and first sector.
pub(crate) type Asked = BTreeMap<(u16, u64), u64>;

/// A node sends a packet.
pub(crate) fn sent(
    w: &mut World,
    (node, peer): (usize, NodeId),
    link: u64,
    packet: &Packet,
    volume: VolumeNr,
) {
    let (sector, size_bytes) = match packet {
        Packet::RsDataRequest(r) | Packet::RsThinReq(r) => (r.sector, r.size_bytes),
        Packet::CsumRsRequest(r) => (r.sector, r.size_bytes),
        _ => return,
    };
    let v = usize::from(volume.0);
    let paused = w.view(node).map_or(0, |view| view.paused[v]);
    if paused & 1 << peer.0 != 0 {
        w.fail(format!(
            "{} asks {} for the resync of sector {} of volume {v}, and that resync is paused",
            name(node),
            name(usize::from(peer.0)),
            sector.0
        ));
        return;
    }
    let most = u64::from(w.limits.max_buffers) * 8 + LARGEST_REQUEST;
    let Some(open) = open(w, node, link) else {
        return;
    };
    let sectors = u64::from(size_bytes) / Sector::SIZE;
    open.resync.insert((volume.0, sector.0), sectors);
    let of_volume = open.resync.range((volume.0, 0)..=(volume.0, u64::MAX));
    let all: u64 = of_volume.map(|(_, sectors)| sectors).sum();
    sometimes!(w.marks, all * 2 > most, "resync-near-max-buffers");
    if all > most {
        w.fail(format!(
            "{} waits for {all} sectors of the resync of volume {v} from {}, and max-buffers is {} pages",
            name(node),
            name(usize::from(peer.0)),
            w.limits.max_buffers
        ));
    }
}

/// A packet reaches a node.
pub(crate) fn heard(w: &mut World, node: usize, link: u64, packet: &Packet, volume: VolumeNr) {
    let sector = match packet {
        Packet::RsDataReply(data) => data.sector,
        Packet::NegRsDreply(ack)
        | Packet::RsIsInSync(ack)
        | Packet::RsCancel(ack)
        | Packet::RsCancelAhead(ack)
        | Packet::RsDeallocatedId(ack) => ack.sector,
        Packet::RsDeallocated(range) => range.sector,
        _ => return,
    };
    if let Some(open) = open(w, node, link) {
        open.resync.remove(&(volume.0, sector.0));
    }
}

/// The last request may begin below the limit and end above it, and no request is longer than this.
const LARGEST_REQUEST: u64 = (1 << 20) / Sector::SIZE;
