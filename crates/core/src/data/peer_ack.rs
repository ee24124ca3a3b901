//! Peer acks: who of a Primary's peers has a settled write (semantics.md, 18.3).

use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::Packet;
use lockstep_format::wire::packet::PeerAck;

use super::Key;
use super::write::{AppRequest, Local};
use crate::event::Stream;
use crate::resource::Resource;
use crate::time::Duration;
use crate::timers::Timer;

/// Settled writes that the peers were not told of yet.
#[derive(Debug, Default)]
pub(crate) struct PeerAckQueue {
    pub(super) mask: NodeMask,
    /// Last dagtag that each peer got.
    pub(super) last: Vec<(NodeId, Dagtag)>,
    pub(super) since: Dagtag,
}

impl Resource {
    /// A write is settled: the peers that it was sent to hear who has it.
    pub(super) fn note_peer_ack(&mut self, req: &AppRequest) {
        let mut mask = req.ok.difference(req.left);
        if req.local == Local::Ok || planted!(self, PeerAckNamesFailed) {
            mask.insert(self.node_id);
        }
        if planted!(self, PeerAckNamesEverybody) {
            mask = self
                .connections
                .keys()
                .fold(mask, |mask, peer| mask.with(*peer));
        }
        // A kernel without its disk forgets what it has refused, and drops the connection if the ack ends with
        // it. What it failed to write is acked with the next write.
        let forgotten = |peer: NodeId| self.is_kernel(peer) && !req.ok.contains(peer);
        let got: Vec<NodeId> = req
            .sent
            .iter()
            .filter(|peer| self.is_established(*peer) && !forgotten(*peer))
            .collect();
        if got.is_empty() {
            return;
        }
        let merges = planted!(self, PeerAcksMerged);
        if !self.io.peer_ack.last.is_empty() && self.io.peer_ack.mask != mask && !merges {
            self.queue_peer_ack();
        }
        let queue = &mut self.io.peer_ack;
        if queue.last.is_empty() {
            queue.since = req.dagtag;
        }
        queue.mask = mask;
        for peer in got {
            match queue.last.iter_mut().find(|(node, _)| *node == peer) {
                Some((_, dagtag)) => *dagtag = req.dagtag,
                None => queue.last.push((peer, req.dagtag)),
            }
        }
        let window = u64::from(self.options.peer_ack_window_sectors);
        if req.dagtag.0.wrapping_sub(self.io.peer_ack.since.0) >= window {
            self.queue_peer_ack();
        } else {
            let delay = Duration::from_millis(u64::from(self.options.peer_ack_delay_ms));
            let at = self.now + delay;
            self.timers.set(Timer::PeerAck, at);
        }
    }

    /// A write is made again from the start. Peers have heard of the first attempt, and would take the next peer ack of
    /// any later write for what became of it: it stays in the log until it is its turn to be told.
    pub(super) fn attempt_ends(&mut self, key: Key, attempt: Option<AppRequest>) {
        let Some(attempt) = attempt.filter(|req| !req.sent.is_empty()) else {
            self.io.log.retain(|other| *other != key);
            return;
        };
        let told = self.io.requests.insert(AppRequest {
            completed: true,
            submitted: false,
            held: false,
            range: None,
            al: None,
            payload: None,
            // It is made again because it is not on this disk, or may not be there for long.
            local: Local::None,
            mark: NodeMask::EMPTY,
            in_sync: NodeMask::EMPTY,
            ..attempt
        });
        for place in self.io.log.iter_mut().filter(|other| **other == key) {
            *place = told;
        }
    }

    /// Sends the peer ack that was gathered so far.
    pub(crate) fn queue_peer_ack(&mut self) {
        let mask = self.io.peer_ack.mask;
        if planted!(self, PeerAckNeverSent) {
            return;
        }
        for (peer, dagtag) in core::mem::take(&mut self.io.peer_ack.last) {
            let packet = Packet::PeerAck(PeerAck { mask, dagtag });
            self.send(peer, Stream::Control, VolumeNr::NONE, packet);
        }
        self.timers.clear(Timer::PeerAck);
    }

    /// `Timer::PeerAck`.
    pub(crate) fn peer_ack_timer(&mut self) {
        self.queue_peer_ack();
    }
}
