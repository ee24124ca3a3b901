//! Integrity digests of `data-integrity-alg`: which algorithm covers which direction, and what
//! happens to a payload that does not have its digest (wire.md, 6.6).
//!
//! The bytes stay with the driver. `Output::Send` names the algorithm, and the driver puts the
//! digest into the packet; before it feeds a received packet it computes the digest that the peer
//! announced (`Resource::peer_integrity`) and says `Input::Corrupt` if the two differ.

use alloc::format;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::Protocol as ProtocolPacket;
use lockstep_format::wire::{Features, Packet};

use crate::connection::{Connection, FEATURES};
use crate::event::LinkId;
use crate::options::NetOptions;
use crate::resource::Resource;

impl NetOptions {
    /// Algorithm of `data-integrity-alg`; none if none is configured.
    pub fn integrity(&self) -> Option<DigestAlg> {
        DigestAlg::from_name(self.data_integrity_alg.as_deref()?)
    }
}

impl Connection {
    /// Feature bits that this node offers to the peer.
    ///
    /// Kernels expect a digest in `P_ZEROES` and send none, so a zero-out travels as `P_TRIM`;
    /// without the feature its receiver zeroes.
    pub(crate) fn offered_features(&self) -> Features {
        if self.net.integrity().is_some() {
            FEATURES.difference(Features::WZEROES)
        } else {
            FEATURES
        }
    }
}

impl Resource {
    /// The digest that the peer's packets with payload carry now. Ask before each decode.
    pub fn peer_integrity(&self, peer: NodeId) -> Option<DigestAlg> {
        self.connections.get(&peer)?.link.as_ref()?.peer_integrity
    }

    /// The digest that this node's next packet has to carry.
    pub(crate) fn own_integrity(&self, peer: NodeId, packet: &Packet) -> Option<DigestAlg> {
        packet.integrity()?;
        self.connections.get(&peer)?.link.as_ref()?.own_integrity
    }

    /// The peer's packets carry the digest of this `P_PROTOCOL` from now on.
    pub(crate) fn adopt_peer_integrity(&mut self, peer: NodeId, theirs: &ProtocolPacket) {
        let Some(name) = theirs.integrity_alg.as_str() else {
            return;
        };
        let alg = DigestAlg::from_name(name);
        if alg.is_none() && !name.is_empty() {
            let text = format!(
                "the peer uses data-integrity-alg {name}, which this node cannot compute; \
                 configure crc32c, md5, sha1, sha224, sha256, sha384 or sha512 on both nodes"
            );
            self.go_standalone(peer, text);
            return;
        }
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.peer_integrity = alg;
        }
    }

    /// This node's packets carry the configured digest from now on: its `P_PROTOCOL` was sent.
    pub(crate) fn announce_integrity(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let alg = conn.net.integrity();
        if let Some(link) = conn.link.as_mut() {
            link.own_integrity = alg;
        }
    }

    /// A payload arrived changed. Nothing of it is used: the link ends, what was sent on it and
    /// not acked counts as not there, and reads go elsewhere or wait for the next link.
    pub(crate) fn corrupt_packet(
        &mut self,
        peer: NodeId,
        link: LinkId,
        volume: VolumeNr,
        packet: &Packet,
    ) {
        if self.link(peer) != Some(link) {
            return;
        }
        let alg = self.peer_integrity(peer).map_or("", DigestAlg::name);
        let place = match packet {
            Packet::Data(d) | Packet::DataReply(d) | Packet::RsDataReply(d) => d.sector,
            Packet::Wsame(w) => w.sector,
            _ => lockstep_format::units::Sector(0),
        };
        let text = format!(
            "{:?} of {} bytes at sector {place} does not have its {alg} digest: it was changed on \
             the way, or the sender changed it while it was sent; closing the connection",
            packet.command(),
            packet.payload_len(),
        );
        self.protocol_error(peer, Some(volume), text);
    }
}
