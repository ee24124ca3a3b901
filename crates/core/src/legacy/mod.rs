//! The dialects of DRBD 8.x (protocol 86 to 101): what differs from 9 on the wire.
//!
//! The rest of the core speaks 9. Packets to and from an 8.4 peer are translated at the border:
//! [`outgoing`] and [`incoming`]. What has no counterpart is not sent: a kernel drops the
//! connection on a command that it does not know. Changes that need the peer's consent are in
//! `change.rs`, the connect and the resync in `connect.rs`, what 86 to 99 lack in `old.rs`.

mod change;
mod connect;
mod old;

use alloc::vec;

use lockstep_format::units::NodeId;
use lockstep_format::wire::packet::{BlockId, Uuids110};
use lockstep_format::wire::{self, DiskState, Features, Packet, ReplState, UuidFlags};

use crate::connection::Connection;
use crate::state::PeerDeviceState;
use crate::uuids::PeerUuids;

pub(crate) use old::{
    WITH_CLEAN_RESIZE, WITH_COMPRESSED_BITMAP, WITH_CSUMS, WITH_OUT_OF_SYNC, WITH_VERIFY,
    has_stop_sector, is_old,
};

/// Oldest protocol version that is spoken.
pub(crate) const PROTOCOL_MIN: u32 = wire::PROTOCOL_MIN;

/// Features that 8.4 knows. Without the others its packets have no counterpart of 9.
pub(crate) const FEATURES: Features = Features::TRIM
    .union(Features::THIN_RESYNC)
    .union(Features::WSAME)
    .union(Features::WZEROES);

/// The packet as the 8.x peer of this connection expects it; none if it has no counterpart.
pub(crate) fn to_peer(packet: Packet, conn: &Connection) -> Option<Packet> {
    let packet = outgoing(packet, conn.peer)?;
    if is_old(conn.protocol()) {
        old::outgoing(packet, conn.protocol(), conn.net.protocol)
    } else {
        Some(packet)
    }
}

/// The packet of the 8.x peer of this connection as one of 9. `me` is this node.
pub(crate) fn from_peer(packet: Packet, me: NodeId, conn: &Connection) -> Packet {
    let packet = incoming(packet, me);
    if is_old(conn.protocol()) {
        old::incoming(packet, &conn.net)
    } else {
        packet
    }
}

/// The packet as an 8.4 peer expects it; none if it has no counterpart.
fn outgoing(packet: Packet, peer: NodeId) -> Option<Packet> {
    Some(match packet {
        Packet::Uuids110(uuids) => {
            Packet::Uuids(PeerUuids::from_packet110(&uuids).to_packet84(peer))
        }
        Packet::State(mut state) => {
            // A bit that 8.4 does not have.
            state.quorum = false;
            Packet::State(state)
        }
        Packet::WriteAckInSync(ack) => Packet::RsWriteAck(ack),
        Packet::RsWriteAck(mut ack) => {
            ack.block_id = BlockId::SYNCER;
            Packet::RsWriteAck(ack)
        }
        Packet::RsNegAck(mut ack) => {
            ack.block_id = BlockId::SYNCER;
            Packet::NegAck(ack)
        }
        Packet::RsDataRequest(mut request) => {
            request.block_id = BlockId::SYNCER;
            Packet::RsDataRequest(request)
        }
        Packet::RsThinReq(mut request) => {
            request.block_id = BlockId::SYNCER;
            Packet::RsThinReq(request)
        }
        Packet::CsumRsRequest(mut request) => {
            request.block_id = BlockId::SYNCER;
            Packet::CsumRsRequest(request)
        }
        Packet::OvRequest(mut request) => {
            request.block_id = BlockId::SYNCER;
            Packet::OvRequest(request)
        }
        Packet::OvReply(mut reply) => {
            reply.block_id = BlockId::SYNCER;
            Packet::OvReply(reply)
        }
        Packet::RsCancelAhead(ack) => Packet::RsCancel(ack),
        packet if packet.command().to_wire() <= NEWEST && is_spoken(&packet) => packet,
        _ => return None,
    })
}

/// Newest command of 8.4 outside of the handshake.
const NEWEST: u16 = 0x36;

/// Commands up to the newest one that are not of 8.4, and those of the handshake.
fn is_spoken(packet: &Packet) -> bool {
    !matches!(
        packet,
        Packet::TwopcPrepare(_)
            | Packet::TwopcAbort(_)
            | Packet::TwopcPrepRsz(_)
            | Packet::Dagtag(_)
    )
}

/// A step of a resync that 8.4 nodes do not announce: it starts with the packet of its UUID. A kernel that is
/// told of a full sync that it has asked for, before it has moved itself, compares generations instead.
pub(crate) fn is_silent(before: ReplState, after: ReplState) -> bool {
    let running = |repl| matches!(repl, ReplState::SyncSource | ReplState::SyncTarget);
    let starting = !matches!(before, ReplState::PausedSyncS | ReplState::PausedSyncT);
    let full = [ReplState::StartingSyncS, ReplState::StartingSyncT].contains(&after);
    full || matches!(after, ReplState::WfSyncUuid | ReplState::Behind)
        || (running(after) && starting && before != after)
}

/// A kernel that attaches its disk compares generations when it hears that the resync begins. An 8.4 throws away a
/// bitmap that comes before; a 9 that was not ready for the state before waits for ever with that bitmap in its
/// hands.
pub(crate) fn names_resync_first(before: &PeerDeviceState, after: &PeerDeviceState) -> bool {
    before.disk < DiskState::Inconsistent
        && before.repl != after.repl
        && matches!(after.repl, ReplState::WfBitmapS | ReplState::WfBitmapT)
}

/// The packet of an 8.4 peer as one of 9. `me` is this node.
fn incoming(packet: Packet, me: NodeId) -> Packet {
    match packet {
        Packet::Uuids(uuids) => {
            let set = PeerUuids::from_packet84(&uuids, me);
            Packet::Uuids110(Uuids110 {
                current: set.current,
                dirty_bits: set.dirty_bits,
                flags: set.flags | UuidFlags::STABLE,
                bitmap_uuids: vec![(me, uuids.bitmap)],
                history: uuids.history.to_vec(),
                ..Uuids110::default()
            })
        }
        Packet::State(mut state) => {
            // Without the notion there is nothing to lose.
            state.quorum = true;
            Packet::State(state)
        }
        Packet::RsWriteAck(ack) if ack.block_id != BlockId::SYNCER => Packet::WriteAckInSync(ack),
        Packet::NegAck(ack) if ack.block_id == BlockId::SYNCER => Packet::RsNegAck(ack),
        other => other,
    }
}

/// Whether this protocol version is one of 8.x.
pub(crate) const fn is_legacy(protocol: u32) -> bool {
    protocol != 0 && protocol <= wire::PROTOCOL_MAX_84
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_format::units::{Dagtag, Uuid};
    use lockstep_format::wire::packet::{BlockAck, EnableReplication, PeersInSync};

    #[test]
    fn nothing_that_breaks_a_kernel_is_sent() {
        let peer = NodeId(1);
        for packet in [
            Packet::Dagtag(Dagtag(1)),
            Packet::PeersInSync(PeersInSync::default()),
            Packet::EnableReplication(EnableReplication { enable: true }),
            Packet::EnableReplicationNext(EnableReplication { enable: true }),
            Packet::Disconnect,
            Packet::TwopcCommit(Default::default()),
            Packet::TwopcPrepare(Default::default()),
            Packet::TwopcAbort(Default::default()),
            Packet::PeerAck(Default::default()),
            Packet::ConfirmStable(Default::default()),
            Packet::CurrentUuid(Default::default()),
            Packet::PeerDagtag(Default::default()),
            Packet::FlushRequests(Default::default()),
            Packet::FlushForward(Default::default()),
            Packet::FlushRequestsAck(Default::default()),
        ] {
            assert_eq!(outgoing(packet.clone(), peer), None, "{packet:?}");
        }
        assert_eq!(outgoing(Packet::Ping, peer), Some(Packet::Ping));
    }

    #[test]
    fn acks_of_resync_and_application_writes_are_told_apart() {
        let ack = BlockAck {
            block_id: BlockId(7),
            ..BlockAck::default()
        };
        let of_resync = BlockAck {
            block_id: BlockId::SYNCER,
            ..ack
        };
        let me = NodeId(0);
        assert_eq!(
            outgoing(Packet::RsWriteAck(ack), me),
            Some(Packet::RsWriteAck(of_resync))
        );
        assert_eq!(
            incoming(Packet::RsWriteAck(of_resync), me),
            Packet::RsWriteAck(of_resync)
        );
        assert_eq!(
            outgoing(Packet::WriteAckInSync(ack), me).map(|p| incoming(p, me)),
            Some(Packet::WriteAckInSync(ack))
        );
        assert_eq!(
            outgoing(Packet::RsNegAck(ack), me).map(|p| incoming(p, me)),
            Some(Packet::RsNegAck(of_resync))
        );
    }

    #[test]
    fn the_one_bitmap_uuid_is_the_slot_of_the_receiver() {
        let sent = Uuids110 {
            current: Uuid(0x11),
            bitmap_uuids: vec![(NodeId(1), Uuid(0x20)), (NodeId(2), Uuid(0x30))],
            history: vec![Uuid(0x40), Uuid(0x50), Uuid(0x60)],
            flags: UuidFlags::INCONSISTENT | UuidFlags::NEW_DATAGEN,
            ..Uuids110::default()
        };
        let Some(packet) = outgoing(Packet::Uuids110(sent), NodeId(1)) else {
            panic!("UUIDs are sent");
        };
        let Packet::Uuids110(set) = incoming(packet, NodeId(1)) else {
            panic!("UUIDs are received");
        };
        assert_eq!(set.bitmap_uuids, vec![(NodeId(1), Uuid(0x20))]);
        assert_eq!(set.history, vec![Uuid(0x40), Uuid(0x50)]);
        assert_eq!(set.flags, UuidFlags::INCONSISTENT | UuidFlags::STABLE);
    }
}
