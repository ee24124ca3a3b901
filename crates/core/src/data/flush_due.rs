//! Flushes that sync targets ask of Primaries before they end (semantics.md, 19.6).

use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::{FlushForward, FlushRequestsAck};

use super::peer_write::PeerWrite;
use crate::event::Stream;
use crate::resource::Resource;

/// A `P_FLUSH_REQUESTS` that waits until the writes before it are settled.
#[derive(Clone, Debug)]
pub(crate) struct FlushDue {
    pub(crate) sequence: u64,
    pub(crate) dagtag: Dagtag,
    /// Last received writes of others whose peer acks are still to come: they may bring marks.
    pub(crate) received: Vec<(NodeId, Dagtag)>,
}

impl Resource {
    /// A sync target wants all peer acks of earlier writes out (semantics.md, 19.6).
    pub(crate) fn flush_requested(&mut self, peer: NodeId, sequence: u64) {
        let dagtag = self.io.dagtag;
        self.close_epoch();
        let others = self.connections.values().filter(|c| c.peer != peer);
        let received = others
            .filter_map(|c| {
                let dagtags = c.io.writes.iter().map(PeerWrite::dagtag);
                let newest = dagtags.reduce(|a, b| if b.is_newer_than(a) { b } else { a });
                Some((c.peer, newest?))
            })
            .collect();
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.flush_requests.push_back(FlushDue {
                sequence,
                dagtag,
                received,
            });
        }
        self.settle_flush_requests();
    }

    pub(super) fn settle_flush_requests(&mut self) {
        if self
            .connections
            .values()
            .all(|c| c.io.flush_requests.is_empty())
        {
            return;
        }
        let oldest = self
            .io
            .log
            .iter()
            .find_map(|key| self.io.requests.get(*key))
            .map(|r| r.dagtag);
        let peers: Vec<NodeId> = self.connections.keys().copied().collect();
        for peer in peers {
            while let Some(conn) = self.connections.get_mut(&peer) {
                let Some(due) = conn.io.flush_requests.front().cloned() else {
                    break;
                };
                let early = planted!(self, FlushRequestAnsweredEarly);
                if !early && oldest.is_some_and(|oldest| !oldest.is_newer_than(due.dagtag)) {
                    break;
                }
                let owes = |(node, dagtag): &(NodeId, Dagtag)| {
                    let writes = self.connections.get(node).map(|c| &c.io.writes);
                    writes.is_some_and(|writes| {
                        let mut dagtags = writes.iter().map(PeerWrite::dagtag);
                        dagtags.any(|due| !due.is_newer_than(*dagtag))
                    })
                };
                if !early && due.received.iter().any(owes) && !planted!(self, ForwardsUnasked) {
                    break;
                }
                let Some(conn) = self.connections.get_mut(&peer) else {
                    break;
                };
                conn.io.flush_requests.pop_front();
                self.queue_peer_ack();
                for other in self.established() {
                    let sequence = due.sequence;
                    if other == peer {
                        self.send_flush_ack(peer, sequence, self.node_id);
                    } else {
                        let forward = FlushForward {
                            flush_sequence: sequence,
                            initiator_node_id: peer,
                        };
                        let packet = Packet::FlushForward(forward);
                        self.send(other, Stream::Control, VolumeNr::NONE, packet);
                    }
                }
            }
        }
    }

    /// A Primary has sent its peer acks; the initiator is told behind the marks they caused.
    pub(crate) fn flush_forwarded(&mut self, primary: NodeId, sequence: u64, initiator: NodeId) {
        if self.is_established(initiator) {
            self.send_flush_ack(initiator, sequence, primary);
        }
    }

    fn send_flush_ack(&mut self, to: NodeId, flush_sequence: u64, primary_node_id: NodeId) {
        let ack = FlushRequestsAck {
            flush_sequence,
            primary_node_id,
        };
        self.send(
            to,
            Stream::Data,
            VolumeNr::NONE,
            Packet::FlushRequestsAck(ack),
        );
    }
}
