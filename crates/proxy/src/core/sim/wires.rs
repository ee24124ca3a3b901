//! What travels between the proxies, and the shell's writing side.

use super::*;

/// What travels between the proxies.
#[derive(Debug)]
pub(super) enum Parcel {
    Session(Frame),
    /// A whole frame of a lane, and the pieces in which it went out.
    Lane(u32, Frame, usize),
}

/// What a lane has to send.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) carrier: CarrierId,
    /// Frames, with the bytes and pieces that were allowed already.
    pub(super) frames: VecDeque<(Frame, usize, usize)>,
}

impl World {
    /// The shell's writing side: as much as the core allows, whole frames travel.
    pub(super) fn flush(&mut self, node: usize, wire: WireId, lane: u32) {
        loop {
            let Some(outbox) = self.outbox.get_mut(&(node, wire, lane)) else {
                return;
            };
            let carrier = outbox.carrier;
            let Some((frame, done, pieces)) = outbox.frames.front_mut() else {
                return;
            };
            let allowed = self.engines[node].carrier_allowance(Instant(self.now), carrier);
            if allowed == 0 {
                return;
            }
            let step = allowed.min(frame.wire_len() - *done).min(SEGMENT_MAX);
            *done += step;
            *pieces += 1;
            if *done == frame.wire_len()
                && let Some((frame, _, pieces)) = outbox.frames.pop_front()
            {
                self.transmit(node, wire, Parcel::Lane(lane, frame, pieces));
            }
            self.feed(node, Input::CarrierSent(carrier, step));
        }
    }

    pub(super) fn transmit(&mut self, node: usize, wire: WireId, parcel: Parcel) {
        if let Some(id) = self.pipe_of.get(&(node, wire)).copied()
            && let Some(pipe) = self.pipes.get_mut(&id)
        {
            let to = usize::from(pipe.ends[0] == (node, wire));
            let delay = (10 + self.rng.below(30)) * MS;
            let at = (self.now + delay).max(pipe.last[to] + 1);
            pipe.last[to] = at;
            self.order += 1;
            let event = Event::Arrive {
                pipe: id,
                to,
                parcel,
            };
            self.queue.insert((at, self.order), event);
        }
    }
}
