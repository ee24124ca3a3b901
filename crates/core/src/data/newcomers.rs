//! Writes that wait for a lost peer, and peers that came since they were sent.
//!
//! A write that is frozen without its peer is sent again when that one is back. Meanwhile another peer may
//! have been brought up to date by it, before the write was there. Nobody marks the write for that one before
//! it is settled, so that it would count as UpToDate without it: it gets the write as well.

use alloc::vec::Vec;

use lockstep_format::units::NodeMask;
use lockstep_format::wire::ReplState;

use super::slab::Key;
use crate::resource::Resource;

impl Resource {
    /// Resends or gives up what was parked (semantics.md, 5.1 point 16).
    pub(crate) fn settle_parked(&mut self) {
        if self.io.parked == 0 {
            return;
        }
        let suspended = self.state.suspended();
        let keys: Vec<Key> = self.io.log.iter().copied().collect();
        // A write says that all earlier ones were sent: others wait for that. So one that has to wait holds up those of
        // other volumes.
        let mut held_up = NodeMask::EMPTY;
        for key in keys {
            let Some(req) = self.io.requests.get(key) else {
                continue;
            };
            let volume = req.volume;
            for peer in req.parked.iter() {
                let p = self.state.peer_device(volume, peer);
                let resends = p.repl == ReplState::Established && p.replicates();
                // The suspension may go on for want of a new generation, which takes quorum.
                let waits = (suspended || self.cannot_mark(key)) && !self.io_fails(volume);
                let lost = !resends && (!waits || p.repl > ReplState::Established);
                if !resends && !lost && !planted!(self, ResentOutOfOrder) {
                    held_up.insert(peer);
                }
                if !lost && (!resends || held_up.contains(peer)) {
                    continue;
                }
                self.io.parked -= 1;
                if let Some(req) = self.io.requests.get_mut(key) {
                    req.parked.remove(peer);
                    if lost {
                        req.ok.remove(peer);
                        req.unsettled.remove(peer);
                    }
                }
                if lost {
                    self.redo_on_target(key, peer);
                }
                if resends && !planted!(self, ParkedNotResent) {
                    // The epoch may be over since long: its barrier follows.
                    self.io.barriers_due |= !planted!(self, ResentWithoutBarrier);
                    let keeps = planted!(self, ResentKeepsAge);
                    if let Some(conn) = self.connections.get_mut(&peer).filter(|_| !keeps) {
                        conn.io.resent_at = self.now;
                    }
                    self.send_write(peer, key);
                }
                self.send_to_newcomers(key);
            }
            self.try_complete(key);
        }
        self.tell_after_parked();
        self.settle_log();
    }

    /// The suspension ends with the state change that is being made.
    pub(crate) fn thawed(&mut self) {
        self.io.parked_due |= !planted!(self, ThawForgotten);
    }

    /// The write goes again to a peer that it was sent to: and now to all that it would be sent to if it
    /// was new.
    pub(super) fn send_to_newcomers(&mut self, key: Key) {
        let Some(req) = self.io.requests.get(key) else {
            return;
        };
        if req.completed || req.again || planted!(self, NewcomersForgotten) {
            return;
        }
        let known = req.sent.union(req.accounted).union(req.mark);
        let Some(device) = self.state.devices.get(&req.volume) else {
            return;
        };
        let new: NodeMask = device
            .peers
            .iter()
            .filter(|(peer, p)| p.replicates() && !known.contains(**peer))
            .map(|(peer, _)| *peer)
            .collect();
        for peer in new.iter() {
            if let Some(req) = self.io.requests.get_mut(key) {
                req.sent.insert(peer);
                req.unsettled.insert(peer);
            }
            self.send_write(peer, key);
        }
    }
}
