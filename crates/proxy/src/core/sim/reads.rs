//! The shell's reading side: at once, or, for data sockets in half of the worlds, by another thread
//! that is told first how much it may read.

use super::*;

impl World {
    pub(super) fn read(&mut self, node: usize, local: LocalId) {
        let Some(socket) = self.sockets[node].get_mut(&local) else {
            return;
        };
        if socket.reset || socket.eof_given {
            return;
        }
        let known = socket.first == DATA_FIRST && self.ordered_elsewhere(node, local);
        let Some(socket) = self.sockets[node].get_mut(&local) else {
            return;
        };
        socket.reading = false;
        let allowed = self.engines[node].read_allowance(Instant(self.now), local);
        if !known || allowed == 0 {
            self.take(node, local, allowed);
        } else if !self.ordered[node].contains_key(&local) {
            self.engines[node].promise(self.links[node], allowed);
            self.ordered[node].insert(local, allowed);
            if let Some(socket) = self.sockets[node].get_mut(&local) {
                socket.reading = true;
            }
            self.later(3, Event::Brought { node, local });
        }
    }

    /// Whether the socket's class is known, so that another thread may have it.
    fn ordered_elsewhere(&self, node: usize, local: LocalId) -> bool {
        let stream = self.engines[node].locals.get(&local);
        self.far && !self.handing[node] && stream.is_some_and(|(_, stream)| *stream != 0)
    }

    pub(super) fn brought(&mut self, node: usize, local: LocalId) {
        let Some(allowed) = self.ordered[node].remove(&local) else {
            return;
        };
        if let Some(socket) = self.sockets[node].get_mut(&local) {
            socket.reading = false;
        }
        self.take(node, local, allowed);
        let (now, link) = (Instant(self.now), self.links[node]);
        self.engines[node].release(now, link, allowed);
    }

    /// The socket is closed; nothing will come.
    pub(super) fn called_off(&mut self, node: usize, local: LocalId) {
        if let Some(allowed) = self.ordered[node].remove(&local) {
            let (now, link) = (Instant(self.now), self.links[node]);
            self.engines[node].release(now, link, allowed);
        }
    }

    /// What is ordered comes before anything else happens.
    pub(super) fn recall(&mut self, node: usize) {
        let ordered: Vec<LocalId> = self.ordered[node].keys().copied().collect();
        for local in ordered {
            self.brought(node, local);
        }
    }

    fn take(&mut self, node: usize, local: LocalId, allowed: usize) {
        let most = 1 + self.rng.below(200_000) as usize;
        let Some(socket) = self.sockets[node].get_mut(&local) else {
            return;
        };
        if socket.reset || socket.eof_given {
            return;
        }
        let len = allowed.min(most).min(socket.to_send.len());
        let data: Vec<u8> = socket.to_send.drain(..len).collect();
        let empty = socket.to_send.is_empty();
        let closing = socket.closing && empty && allowed > 0;
        if !empty && allowed > 0 {
            socket.reading = true;
        }
        socket.eof_given |= closing;
        if len > 0 {
            self.feed(node, Input::LocalData(local, data));
        }
        if closing {
            self.feed(node, Input::LocalEof(local));
        } else if !empty && allowed > 0 {
            self.later(2, Event::Read { node, local });
        }
    }
}

#[test]
fn what_is_promised_counts_as_used_until_it_comes_or_will_not() {
    let mut world = up(31, &DaemonOptions::default());
    assert!(world.far);
    world.options(|options| {
        options.set("memlimit", "2M").unwrap();
    });
    let local = world.drbd_opens(0, DATA_FIRST, 0, b"x");
    let arrived = |w: &World| w.received(1, DATA_FIRST).is_some_and(|s| s.got == b"x");
    assert!(world.run(5000, arrived));
    world.run(1000, |_| false);
    let (now, link) = (Instant(world.now), world.links[0]);
    let engine = &mut world.engines[0];
    let chunk = engine.read_allowance(now, local);
    assert!(chunk > 0);
    let mut promised = 0;
    while engine.read_allowance(now, local) > 0 {
        engine.promise(link, chunk);
        promised += chunk;
    }
    assert!((1 << 20..=2 << 20).contains(&promised), "{promised}");
    while engine.poll_output().is_some() {}
    engine.release(now, link, promised);
    // It is told at once that it may read again.
    let wanted = |output| matches!(output, Output::WantRead(id) if id == local);
    assert!(std::iter::from_fn(|| engine.poll_output()).any(wanted));
    assert_eq!(engine.read_allowance(now, local), chunk);
}
