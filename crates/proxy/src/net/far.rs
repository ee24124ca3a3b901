//! What the control lane knows of sockets that a shard has: it moves them there once they are known
//! to carry bulk, gives the orders, and tells the engine the news. Whatever the engine counts is
//! counted here as it would be with a socket of the lane: what may be read is promised before a
//! shard reads it, and what a carrier may send is paid for when a shard gets it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use socket2::Socket;

use super::local::LocalSock;
use super::shard::{News, Order, PIPE_FIRST, PIPE_MAX, PIPE_MIN, UNREAD_MAX};
use super::wire::Piece;
use super::{Reactor, Source, TURN_BYTES};
use crate::core::frame::Bytes;
use crate::core::link::StreamPhase;
use crate::core::stream::Class;
use crate::core::{CarrierKind, Close, Input, LinkId, LocalId, WireId};

/// How long a shard may take to give sockets back. It is never busy for longer than a turn; but
/// the machine may be.
const PATIENCE: Duration = Duration::from_secs(20);

/// A socket of DRBD that a shard has.
pub(super) struct FarLocal {
    shard: usize,
    link: LinkId,
    socket: Arc<Socket>,
    reading: Reading,
    /// Bytes given to the shard that the kernel has not taken.
    unwritten: usize,
    shutdown: bool,
}

/// Where reading stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// Nobody may read; the engine will ask.
    Held,
    /// The shard will say when there is something.
    Waiting,
    /// The shard reads up to so many bytes, which the engine has set aside.
    Ordered(usize),
}

/// A carrier that a shard has.
pub(super) struct FarCarrier {
    shard: usize,
    /// Bytes given to the shard that it still has.
    given: usize,
    unread: Arc<AtomicUsize>,
}

impl Reactor {
    /// Gives shards all sockets that are for them.
    pub(super) fn spread(&mut self) {
        let locals: Vec<LocalId> = self.locals.keys().copied().collect();
        locals.into_iter().for_each(|local| self.move_local(local));
        let carriers: Vec<WireId> = self.carriers.keys().copied().collect();
        carriers
            .into_iter()
            .for_each(|carrier| self.move_carrier(carrier));
    }

    /// Moves a socket of DRBD to a shard if it is known to carry data.
    pub(super) fn move_local(&mut self, local: LocalId) {
        let Some(sock) = self.locals.get(&local) else {
            return;
        };
        if sock.connecting || sock.closing || sock.shutdown {
            return;
        }
        let stream = self.engine.locals.get(&local).and_then(|(id, stream)| {
            let link = self.engine.links.get(id)?;
            Some((*id, link.streams.get(stream)?))
        });
        let link = match stream {
            Some((id, stream))
                if stream.class != Class::Control && stream.phase == StreamPhase::Open =>
            {
                id
            }
            _ => return,
        };
        let Some(mut sock) = self.locals.remove(&local) else {
            return;
        };
        self.sources.remove(&sock.token);
        sock.unwatch(&self.epoll);
        let read = std::mem::take(&mut sock.want_read);
        let far = FarLocal {
            shard: self.next_shard(),
            link,
            socket: Arc::clone(&sock.socket),
            reading: Reading::Held,
            unwritten: sock.unwritten_bytes(),
            shutdown: false,
        };
        self.shards[far.shard].send(Order::AdoptLocal(local, sock));
        self.far_locals.insert(local, far);
        if read {
            self.far_read(local);
        }
    }

    /// Moves a carrier to a shard if it is for bulk and authenticated.
    pub(super) fn move_carrier(&mut self, wire: WireId) {
        let entry = self.engine.trunks.wires.get(&wire);
        let bulk = entry.is_some_and(|entry| {
            entry.kind == CarrierKind::Bulk && entry.trunk.is_some() && entry.number > 0
        });
        let shard = self.shard_for(bulk);
        let (Some(shard), Some(sock)) = (shard, self.carriers.get_mut(&wire)) else {
            return;
        };
        if sock.connecting || sock.end.as_ref().is_none_or(|end| end.is_handshaking()) {
            return;
        }
        let Some(mut end) = sock.end.take() else {
            return;
        };
        self.sources.remove(&sock.token);
        end.unwatch(&self.epoll);
        let unread = Arc::clone(&end.unread);
        end.untold_bytes = 0;
        sock.far = Some(FarCarrier {
            shard,
            given: end.queued_bytes,
            unread,
        });
        self.turn_shard = shard + 1;
        self.shards[shard].send(Order::AdoptCarrier(wire, end));
        self.far_flush(wire);
    }

    fn shard_for(&self, bulk: bool) -> Option<usize> {
        bulk.then(|| self.turn_shard % self.shards.len())
    }

    fn next_shard(&mut self) -> usize {
        self.turn_shard += 1;
        self.turn_shard % self.shards.len()
    }

    /// Takes all of DRBD's sockets back, with nothing on its way to or from a shard but mail.
    pub(super) fn recall(&mut self) -> Result<(), String> {
        let (sender, receiver) = channel();
        for shard in &self.shards {
            shard.send(Order::Recall(sender.clone()));
        }
        for _ in 0..self.shards.len() {
            let back = receiver
                .recv_timeout(PATIENCE)
                .map_err(|_| "an I/O shard does not answer")?;
            for (local, sock) in back {
                self.take_back(local, sock);
            }
        }
        Ok(())
    }

    fn take_back(&mut self, local: LocalId, mut sock: LocalSock) {
        let Some(far) = self.far_locals.remove(&local) else {
            return;
        };
        self.release(far.link, far.reading);
        sock.token = self.token(Source::Local(local));
        sock.want_read = far.reading != Reading::Held;
        sock.shutdown |= far.shutdown;
        sock.shutdown_done |= far.shutdown;
        self.locals.insert(local, sock);
        // What it was read already is in the mail, and must come first: nothing is read from it
        // before the next turn.
        self.update_local(local);
    }

    /// What a shard did.
    pub(super) fn news(&mut self, news: News) {
        match news {
            News::Readable(local) => {
                let waits = |far: &FarLocal| far.reading == Reading::Waiting;
                if self.far_locals.get(&local).is_some_and(waits) {
                    self.far_read(local);
                }
            }
            News::Data(local, data) => {
                if self.knows(local) {
                    let now = self.now();
                    self.engine.handle(now, Input::LocalData(local, data));
                    self.answered(local, Reading::Held);
                    self.far_read(local);
                }
            }
            News::Nothing(local) => self.answered(local, Reading::Waiting),
            News::Eof(local) => {
                self.answered(local, Reading::Held);
                if let Some(sock) = self.locals.get_mut(&local) {
                    sock.want_read = false;
                    self.update_local(local);
                }
                if self.knows(local) {
                    let now = self.now();
                    self.engine.handle(now, Input::LocalEof(local));
                }
            }
            News::Written(local, bytes) => {
                if let Some(far) = self.far_locals.get_mut(&local) {
                    far.unwritten -= bytes;
                }
                if self.knows(local) {
                    let now = self.now();
                    self.engine.handle(now, Input::LocalWritten(local, bytes));
                }
            }
            News::Failed(local, reason) => {
                if let Some(far) = self.far_locals.remove(&local) {
                    self.release(far.link, far.reading);
                    let now = self.now();
                    self.engine.handle(now, Input::LocalFailed(local, reason));
                }
            }
            News::Came(carrier, len, cut) => {
                let Some(far) = self.far_carrier(carrier) else {
                    return;
                };
                let (shard, unread) = (far.shard, Arc::clone(&far.unread));
                let there = self.carrier_came(carrier, cut);
                let before = unread.fetch_sub(len, Ordering::AcqRel);
                let low = UNREAD_MAX / 2;
                if there && before > low && before - len <= low {
                    self.shards[shard].send(Order::Resume(carrier));
                }
            }
            News::Sent(carrier, bytes) => {
                if let Some(far) = self.far_carrier(carrier) {
                    far.given -= bytes;
                    self.far_flush(carrier);
                }
            }
            News::Down(carrier, reason) => {
                if self.far_carrier(carrier).is_some() {
                    self.carrier_lost(carrier, &reason);
                }
            }
        }
    }

    /// Whether the engine may still hear of a socket.
    fn knows(&self, local: LocalId) -> bool {
        self.far_locals.contains_key(&local) || self.locals.contains_key(&local)
    }

    /// A read order was answered.
    fn answered(&mut self, local: LocalId, next: Reading) {
        if let Some(far) = self.far_locals.get_mut(&local) {
            let (link, before) = (far.link, std::mem::replace(&mut far.reading, next));
            self.release(link, before);
        }
    }

    /// Gives back what the engine has set aside for a read order.
    fn release(&mut self, link: LinkId, reading: Reading) {
        if let Reading::Ordered(bytes) = reading {
            let now = self.now();
            self.engine.release(now, link, bytes);
        }
    }

    /// Orders a shard to read what the engine allows now.
    fn far_read(&mut self, local: LocalId) {
        let now = self.now();
        if !self.far_locals.contains_key(&local) {
            return;
        }
        let allowed = self.engine.read_allowance(now, local).min(TURN_BYTES);
        let Some(far) = self.far_locals.get_mut(&local) else {
            return;
        };
        if allowed == 0 {
            far.reading = Reading::Held;
            return;
        }
        far.reading = Reading::Ordered(allowed);
        self.engine.promise(far.link, allowed);
        self.shards[far.shard].send(Order::ReadLocal(local, allowed));
    }

    pub(super) fn far_want_read(&mut self, local: LocalId) -> bool {
        let Some(far) = self.far_locals.get(&local) else {
            return false;
        };
        if far.reading == Reading::Held {
            self.far_read(local);
        }
        true
    }

    /// The bytes come back if the lane has the socket.
    pub(super) fn far_write(&mut self, local: LocalId, data: Bytes) -> Option<Bytes> {
        let Some(far) = self.far_locals.get_mut(&local) else {
            return Some(data);
        };
        far.unwritten += data.len();
        self.shards[far.shard].send(Order::WriteLocal(local, data));
        None
    }

    pub(super) fn far_shutdown(&mut self, local: LocalId) -> bool {
        let Some(far) = self.far_locals.get_mut(&local) else {
            return false;
        };
        if far.unwritten == 0 {
            // At once, so that the ends of both sockets keep their order.
            let _ = far.socket.shutdown(std::net::Shutdown::Write);
            far.shutdown = true;
        } else {
            self.shards[far.shard].send(Order::ShutdownLocal(local));
        }
        true
    }

    pub(super) fn far_close(&mut self, local: LocalId, how: Close) -> bool {
        let Some(far) = self.far_locals.remove(&local) else {
            return false;
        };
        if how == Close::Reset {
            let _ = far.socket.set_linger(Some(Duration::ZERO));
        }
        self.release(far.link, far.reading);
        // The last of the two to let go closes it.
        drop(far.socket);
        self.shards[far.shard].send(Order::CloseLocal(local, how));
        true
    }

    fn far_carrier(&mut self, wire: WireId) -> Option<&mut FarCarrier> {
        self.carriers.get_mut(&wire)?.far.as_mut()
    }

    /// Gives a shard what the engine lets pass, as far as it has room.
    pub(super) fn far_flush(&mut self, wire: WireId) {
        let pipe = self.pipe_bytes(wire);
        let Some(far) = self.far_carrier(wire) else {
            return;
        };
        let room = pipe.saturating_sub(far.given);
        let pieces = self.take_pieces(wire, room);
        if !pieces.is_empty()
            && let Some(far) = self.far_carrier(wire)
        {
            far.given += pieces.iter().map(Piece::len).sum::<usize>();
            let shard = far.shard;
            self.shards[shard].send(Order::Send(wire, pieces));
        }
    }

    /// How much a shard may have of a carrier.
    fn pipe_bytes(&self, wire: WireId) -> usize {
        let rate = match self.engine.wire_limit(wire) {
            0 => self.engine.wire_rate(wire),
            rate => Some(rate),
        };
        rate.map_or(PIPE_FIRST, |rate| {
            ((rate / 50) as usize).clamp(PIPE_MIN, PIPE_MAX)
        })
    }

    /// The engine is done with a carrier that a shard has.
    pub(super) fn far_carrier_close(&mut self, wire: WireId) {
        let Some(shard) = self.far_carrier(wire).map(|far| far.shard) else {
            return;
        };
        if let Some(sock) = self.carriers.get_mut(&wire) {
            sock.end_lanes();
        }
        let pieces = self.take_pieces(wire, usize::MAX);
        self.shards[shard].send(Order::CloseCarrier(wire, pieces));
    }
}
