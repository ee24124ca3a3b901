//! The node that drives an online verify asks at its own pace: free are the ids of its requests, and how
//! far ahead of the kernel it is. Every request and every result must be there, in the kernel's order.

use std::collections::{BTreeMap, VecDeque};

use lockstep_core::event::Stream;
use lockstep_format::units::{NodeId, Sector};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::BlockId;

use crate::capture::Seen;
use crate::compare::{PATIENCE_NS, Replay};
use crate::packets::{event_stream, show};
use crate::stand_in::Sent;

/// What the core sent as a driver, and the kernel not yet.
#[derive(Default)]
pub(crate) struct Verify {
    /// Requests of the data streams, and results of the control streams.
    sent: BTreeMap<(NodeId, Stream), VecDeque<Sent>>,
    /// Ids of the requests that have no result yet: the captured one, and the core's.
    ids: BTreeMap<(NodeId, Sector), (BlockId, BlockId)>,
}

/// Whether only the driver of a verify sends such a packet.
pub(crate) fn is_driven(packet: &Packet) -> bool {
    matches!(
        packet,
        Packet::OvRequest(_) | Packet::OvDagtagReq(_) | Packet::OvResult(_) | Packet::OvResultId(_)
    )
}

impl Verify {
    /// Takes a packet for which [`is_driven`] holds.
    pub(crate) fn take(&mut self, sent: Sent) {
        let key = (sent.to, sent.stream);
        self.sent.entry(key).or_default().push_back(sent);
    }

    /// What the kernel did not send to a peer, or to all. The ids mean nothing any more.
    pub(crate) fn rest(&mut self, peer: Option<NodeId>) -> Vec<Sent> {
        let concerns = |other: NodeId| peer.is_none_or(|peer| peer == other);
        self.ids.retain(|(to, _), _| !concerns(*to));
        let mut rest = Vec::new();
        self.sent.retain(|(to, _), sent| {
            if concerns(*to) {
                rest.extend(sent.drain(..));
            }
            !concerns(*to)
        });
        rest
    }

    /// The core's id for a captured one, in a peer's answer.
    pub(crate) fn own_id(&self, from: NodeId, sector: Sector, captured: BlockId) -> BlockId {
        match self.ids.get(&(from, sector)) {
            Some((asked, own)) if *asked == captured => *own,
            _ => captured,
        }
    }

    /// Whether the next packet of this stream stands for this one of the kernel. A result has to have the
    /// id of its request.
    fn is_next(&mut self, seen: &Seen) -> bool {
        let key = (seen.to, event_stream(seen.stream));
        let Some(sent) = self.sent.get(&key).and_then(VecDeque::front) else {
            return false;
        };
        if seen.volume != sent.volume || seen.payload != sent.payload {
            return false;
        }
        match (&seen.packet, &sent.packet) {
            (Packet::OvDagtagReq(a), Packet::OvDagtagReq(b)) => {
                let ids = (a.block_id, b.block_id);
                let mut a = *a;
                a.block_id = b.block_id;
                self.ids.insert((seen.to, a.sector), ids);
                a == *b
            }
            (Packet::OvResultId(a), Packet::OvResultId(b)) => {
                let ids = self.ids.remove(&(seen.to, a.sector));
                let same_id = ids == Some((a.block_id, b.block_id));
                let mut a = *a;
                a.block_id = b.block_id;
                same_id && a == *b
            }
            // An 8.4 node uses the same ids for all blocks.
            (a, b) => a == b,
        }
    }
}

impl Replay<'_> {
    /// The kernel drove a verify: the core has to have sent the same, or to send it soon.
    pub(crate) fn expect_driven(&mut self, seen: &Seen, now: u64) {
        let key = (seen.to, event_stream(seen.stream));
        let until = now + PATIENCE_NS;
        let asked = |replay: &Self| replay.verify.sent.get(&key).is_some_and(|s| !s.is_empty());
        self.serve();
        while !asked(self) && self.node.step(until) {
            self.serve();
        }
        let same = self.verify.is_next(seen);
        // One that is another one stands for it all the same, so that a difference is told once.
        let sent = self.verify.sent.get_mut(&key).and_then(VecDeque::pop_front);
        if !same {
            let instead = sent.map_or("nothing".into(), |sent| show(&sent.packet));
            let text = format!(
                "verify: {:?} {} instead of {}",
                seen.stream,
                instead,
                show(&seen.packet)
            );
            self.differ(now, text);
        }
    }
}
