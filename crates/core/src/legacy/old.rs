//! Protocols 86 to 99, which DRBD 8.3 spoke: what they lack (wire.md, 10.1 and 10.3).
//!
//! One volume without a number in the header, writes that say nothing about their acks, short
//! requests, and fewer packets. A kernel 8.4 still speaks all of them with a peer that offers no
//! more.

use alloc::format;
use alloc::string::String;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::packet::{AlgName, SyncParam, SyncParam89};
use lockstep_format::wire::{
    BIO_LEN_MAX, ConnFlags, DataFlags, Packet, ReplState, UuidFlags, bio_len_max,
};

use crate::event::RequestKind;
use crate::options::{NetOptions, Protocol};
use crate::resource::Resource;

/// First version whose headers name volumes; also the first whose writes name their acks and
/// that has `P_PROTOCOL_UPDATE` and state changes of the connection.
pub(crate) const WITH_VOLUMES: u32 = 100;
/// First version with `P_OUT_OF_SYNC` and `P_RS_CANCEL`.
pub(crate) const WITH_OUT_OF_SYNC: u32 = 96;
/// First version whose writes say that they are durable.
const WITH_DURABLE_WRITES: u32 = 95;
/// First version in which a resize can go without a resync.
pub(crate) const WITH_CLEAN_RESIZE: u32 = 93;
/// First version that says that a connect is tentative.
const WITH_DRY_RUN: u32 = 92;
/// First version with compressed bitmaps, and with disks that were just created and are equal.
pub(crate) const WITH_COMPRESSED_BITMAP: u32 = 90;
/// First version with checksum resyncs.
pub(crate) const WITH_CSUMS: u32 = 89;
/// First version with online verify.
pub(crate) const WITH_VERIFY: u32 = 88;
/// First version that names the algorithm of data integrity.
const WITH_INTEGRITY: u32 = 87;

/// A link that speaks one of these versions.
pub(crate) const fn is_old(protocol: u32) -> bool {
    protocol != 0 && protocol < WITH_VOLUMES
}

/// A verify can end before the volume does; without a link nothing speaks against it.
pub(crate) const fn has_stop_sector(protocol: u32) -> bool {
    protocol == 0 || (protocol >= 97 && protocol != 100)
}

/// A packet in 8.4's terms as a peer of this version expects it; none if it has no counterpart.
pub(crate) fn outgoing(packet: Packet, protocol: u32, net: Protocol) -> Option<Packet> {
    Some(match packet {
        Packet::ProtocolUpdate(_) => return None,
        Packet::OutOfSync(_) if protocol < WITH_OUT_OF_SYNC => return None,
        // A resync that was cancelled looks to the target like one that failed: it marks the
        // block again, which is what a cancel means.
        Packet::RsCancel(ack) if protocol < WITH_OUT_OF_SYNC => Packet::NegRsDreply(ack),
        Packet::ConnStChgReq(change) => Packet::StateChgReq(change),
        Packet::ConnStChgReply(rv) => Packet::StateChgReply(rv),
        Packet::SyncParam89(param) if protocol < WITH_CSUMS => Packet::SyncParam(SyncParam {
            resync_rate_kib_s: param.resync_rate_kib_s,
            verify_alg: (protocol >= WITH_VERIFY).then_some(param.verify_alg),
        }),
        Packet::Protocol(mut packet) => {
            if protocol < WITH_DRY_RUN {
                packet.conn_flags.remove(ConnFlags::DRY_RUN);
            }
            Packet::Protocol(packet)
        }
        Packet::Sizes(mut sizes) => {
            sizes.max_bio_size_bytes = sizes.max_bio_size_bytes.min(bio_len_max(protocol));
            Packet::Sizes(sizes)
        }
        Packet::Uuids(mut uuids) => {
            if protocol < WITH_COMPRESSED_BITMAP {
                uuids.flags.remove(UuidFlags::SKIP_INITIAL_SYNC);
            }
            Packet::Uuids(uuids)
        }
        Packet::Data(mut data) => {
            let mut known = DataFlags::RW_SYNC | DataFlags::MAY_SET_IN_SYNC;
            if protocol >= WITH_DURABLE_WRITES {
                known |= DataFlags::FUA | DataFlags::FLUSH;
            }
            data.flags &= known;
            if net != Protocol::C {
                data.flags.remove(DataFlags::MAY_SET_IN_SYNC);
            }
            Packet::Data(data)
        }
        other => other,
    })
}

/// The packet of a peer of this version with what later versions say.
pub(crate) fn incoming(packet: Packet, net: &NetOptions) -> Packet {
    match packet {
        Packet::SyncParam(param) => {
            // Checksums do not exist, so there is nothing to differ.
            let csums = net.csums_alg.as_ref();
            Packet::SyncParam89(SyncParam89 {
                resync_rate_kib_s: param.resync_rate_kib_s,
                verify_alg: param.verify_alg.unwrap_or_default(),
                csums_alg: csums
                    .and_then(|alg| AlgName::new(alg.as_bytes()))
                    .unwrap_or_default(),
                dynamic: None,
            })
        }
        Packet::Data(mut data) => {
            // The protocol says which ack is wanted. Without one that tells, a write is no
            // replacement for the block's resync.
            match net.protocol {
                Protocol::C => data.flags |= DataFlags::SEND_WRITE_ACK,
                Protocol::B => data.flags |= DataFlags::SEND_RECEIVE_ACK,
                Protocol::A => {}
            }
            if net.protocol != Protocol::C {
                data.flags.remove(DataFlags::MAY_SET_IN_SYNC);
            }
            Packet::Data(data)
        }
        other => other,
    }
}

impl Resource {
    /// The version that the link to this peer speaks, or spoke last.
    pub(crate) fn spoken(&self, peer: NodeId) -> u32 {
        self.dialect(peer).protocol
    }

    /// Why this version cannot carry what is configured here.
    pub(crate) fn old_version_lacks(&self, peer: NodeId, protocol: u32) -> Option<String> {
        if !is_old(protocol) {
            return None;
        }
        if self.devices.keys().any(|volume| *volume != VolumeNr(0)) {
            return Some(format!(
                "the peer speaks protocol {protocol}, which knows volume 0 only; this resource \
                 has others: update the peer to {WITH_VOLUMES} or later"
            ));
        }
        let longest = u64::from(bio_len_max(protocol));
        let block = |d: &crate::device::Device| {
            let io = d.attached().map(|disk| &disk.io);
            io.is_some_and(|io| u64::from(io.bitmap.shape().block().bytes()) > longest)
        };
        if self.devices.values().any(block) {
            return Some(format!(
                "the peer speaks protocol {protocol}, in which a request has {longest} bytes at \
                 most; the bitmap of this node has larger blocks"
            ));
        }
        let conn = self.connections.get(&peer)?;
        if protocol < WITH_INTEGRITY && conn.net.data_integrity_alg.is_some() {
            return Some(format!(
                "data-integrity-alg needs protocol {WITH_INTEGRITY}, the peer speaks {protocol}"
            ));
        }
        if protocol < WITH_DRY_RUN && conn.tentative {
            return Some(format!(
                "a tentative connect needs protocol {WITH_DRY_RUN}, the peer speaks {protocol}"
            ));
        }
        None
    }

    /// Bytes of the longest request that every peer takes.
    pub(crate) fn longest_request(&self) -> u32 {
        let peers = self.connections.keys().map(|peer| self.spoken(*peer));
        peers
            .filter(|protocol| is_old(*protocol))
            .map(bio_len_max)
            .min()
            .unwrap_or(BIO_LEN_MAX)
    }

    /// A peer does not know writes that are durable by themselves: a flush has to follow.
    pub(crate) fn lacks_durability(&self) -> bool {
        self.connections
            .values()
            .any(|conn| is_old(conn.protocol()) && conn.protocol() < WITH_DURABLE_WRITES)
    }

    /// A peer does not know discards: applications write zeroes instead.
    pub(crate) fn lacks_discards(&self) -> bool {
        self.connections.values().any(|conn| {
            conn.is_legacy()
                && !conn
                    .features()
                    .contains(lockstep_format::wire::Features::TRIM)
        })
    }

    /// Without `P_OUT_OF_SYNC` a write between the bitmap and the start of a resync would be
    /// known to the source alone.
    pub(crate) fn waits_for_old_target(&self, volume: VolumeNr) -> bool {
        self.connections.iter().any(|(peer, conn)| {
            conn.is_legacy()
                && conn.protocol() < WITH_OUT_OF_SYNC
                && self.state.peer_device(volume, *peer).repl == ReplState::WfBitmapS
        })
    }

    /// Whether the peer's version can carry this write; if not, the connection ends with a text.
    pub(crate) fn can_carry(&mut self, peer: NodeId, kind: RequestKind, size_bytes: u32) -> bool {
        let Some(conn) = self.connections.get(&peer).filter(|c| c.is_legacy()) else {
            return true;
        };
        let protocol = conn.protocol();
        let trims = !matches!(kind, RequestKind::Write { .. });
        let knows = lockstep_format::wire::Features::TRIM;
        let text = if trims && !conn.features().contains(knows) {
            "a discard that began before the connection is not known to the peer's version"
        } else if !trims && is_old(protocol) && size_bytes > bio_len_max(protocol) {
            "a write that began before the connection is longer than the peer's version takes"
        } else {
            return true;
        };
        self.go_standalone(
            peer,
            format!("{text} ({protocol}); connect again once it is done"),
        );
        false
    }

    /// The packet belongs to a volume that the headers of this link cannot name.
    pub(crate) fn is_unnamed(&self, peer: NodeId, volume: VolumeNr) -> bool {
        !volume.is_none()
            && volume != VolumeNr(0)
            && self
                .connections
                .get(&peer)
                .is_some_and(|c| is_old(c.protocol()))
    }
}
