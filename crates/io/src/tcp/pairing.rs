//! Which two TCP connections make a link: the rules of wire.md, 2.3, without sockets and clocks.
//!
//! Both nodes connect and accept at once. This decides which connection becomes the data and which
//! the control stream, and when both certainly stand. One difference to the kernel's loop: what is
//! accepted counts at once, also while an own attempt to connect hangs, so a node behind a
//! firewall that drops packets does not keep its peer waiting.

use std::collections::VecDeque;

use lockstep_core::event::Stream;
use lockstep_core::time::{Duration, Instant};

/// A TCP connection, named by whoever owns the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u64);

/// What the rules depend on.
#[derive(Clone, Debug)]
pub struct PairingConfig {
    /// `connect-int`: pace of the attempts.
    pub connect_int: Duration,
    /// `socket-check-timeout`: how long both must stand before they count.
    pub socket_check: Duration,
    /// How much longer than `connect-int` the peer may need for a connection of its own, once this
    /// node's stands.
    pub patience: Duration,
    /// For each path: this node's address is the larger one (see `address_is_larger`).
    pub larger: Vec<bool>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start to connect on this path; answer `connected` or `connect_failed`.
    Connect {
        /// Index of the path.
        path: usize,
    },
    /// Give the attempt up, without an answer.
    AbortConnect,
    /// Send the first packet on a socket that was connected.
    SendInitial {
        /// The socket.
        socket: SocketId,
        /// What it names.
        stream: Stream,
    },
    /// Close a socket.
    Close {
        /// The socket.
        socket: SocketId,
    },
    /// Both streams stand; this is the end.
    Established {
        /// The data stream.
        data: SocketId,
        /// The control stream.
        control: SocketId,
        /// The path of both.
        path: usize,
        /// This node accepted the control stream.
        resolve_conflicts: bool,
    },
}

/// The pairing with one peer, until `Established`.
#[derive(Debug)]
pub struct Pairing {
    config: PairingConfig,
    random: u64,
    phase: Phase,
    data: Option<SocketId>,
    control: Option<SocketId>,
    /// The path of the sockets found so far.
    path: Option<usize>,
    connecting: Option<usize>,
    next_path: usize,
    /// Paths of this round that were not tried yet.
    untried: usize,
    resolve_conflicts: bool,
    actions: VecDeque<Action>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Accepting { until: Instant },
    Checking { until: Instant },
    Done,
}

/// Tells whether a socket is still in TCP state ESTABLISHED.
pub type Alive<'a> = &'a dyn Fn(SocketId) -> bool;

impl Pairing {
    /// Begins with an attempt to connect. `seed` feeds the random choices. At least one path.
    pub fn new(config: PairingConfig, seed: u64) -> Pairing {
        assert!(!config.larger.is_empty(), "a peer has at least one path");
        let mut pairing = Pairing {
            untried: config.larger.len(),
            config,
            random: seed,
            phase: Phase::Connecting,
            data: None,
            control: None,
            path: None,
            connecting: None,
            next_path: 0,
            resolve_conflicts: false,
            actions: VecDeque::new(),
        };
        pairing.try_next_path();
        pairing
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When `timeout` wants to be called; `None` while an attempt to connect is under way (its time
    /// is limited by `connect-int` too) and at the end.
    pub fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Accepting { until } | Phase::Checking { until } => Some(until),
            Phase::Connecting | Phase::Done => None,
        }
    }

    /// The attempt to connect succeeded.
    pub fn connected(&mut self, now: Instant, socket: SocketId) {
        let Some(path) = self.connecting.take() else {
            return self.actions.push_back(Action::Close { socket });
        };
        let stream = match (self.data, self.control) {
            (Some(_), Some(_)) => return self.actions.push_back(Action::Close { socket }),
            (None, None) if self.config.larger[path] => Stream::Data,
            (None, None) => Stream::Control,
            (None, Some(_)) => Stream::Data,
            (Some(_), None) => Stream::Control,
        };
        self.path = Some(path);
        match stream {
            Stream::Data => self.data = Some(socket),
            Stream::Control => {
                self.control = Some(socket);
                self.resolve_conflicts = false;
            }
        }
        self.actions
            .push_back(Action::SendInitial { socket, stream });
        if !self.check_both(now) {
            self.accept_for_a_while(now);
            if let Phase::Accepting { until } = &mut self.phase {
                *until = *until + self.config.patience;
            }
        }
    }

    /// The attempt to connect failed or took longer than `connect-int`.
    pub fn connect_failed(&mut self, now: Instant) {
        if self.connecting.take().is_none() || self.phase != Phase::Connecting {
            return;
        }
        if self.path.is_none() && self.untried > 0 {
            self.try_next_path();
        } else {
            self.accept_for_a_while(now);
        }
    }

    /// A connection of the peer brought its first packet: the stream, or `None` for anything else.
    pub fn accepted(
        &mut self,
        now: Instant,
        path: usize,
        socket: SocketId,
        stream: Option<Stream>,
        alive: Alive<'_>,
    ) {
        let Some(stream) = stream.filter(|_| self.phase != Phase::Done) else {
            self.actions.push_back(Action::Close { socket });
            return self.go_on(now, Crossed::Yes, alive);
        };
        if self.path.is_some_and(|before| before != path) {
            // The peer works on another path: fail over to it.
            self.close_both();
        }
        if self.connecting.is_some_and(|connecting| connecting != path) {
            self.connecting = None;
            self.actions.push_back(Action::AbortConnect);
        }
        self.drop_dead(alive);
        self.path = Some(path);
        let old = match stream {
            Stream::Data => self.data.replace(socket),
            Stream::Control => {
                self.resolve_conflicts = true;
                self.control.replace(socket)
            }
        };
        if let Some(socket) = old {
            self.actions.push_back(Action::Close { socket });
        }
        if !self.check_both(now) {
            let crossed = if old.is_some() {
                Crossed::Yes
            } else {
                Crossed::No
            };
            self.go_on(now, crossed, alive);
        }
    }

    /// `deadline` has come.
    pub fn timeout(&mut self, now: Instant, alive: Alive<'_>) {
        match self.phase {
            Phase::Accepting { until } if until <= now => {
                self.drop_dead(alive);
                // Both may stand already: a crossed connection had interrupted the check.
                if !self.check_both(now) {
                    self.new_round(alive);
                }
            }
            Phase::Checking { until } if until <= now => {
                self.drop_dead(alive);
                match (self.data, self.control, self.path) {
                    (Some(data), Some(control), Some(path)) => {
                        self.phase = Phase::Done;
                        let resolve_conflicts = self.resolve_conflicts;
                        let established = Action::Established {
                            data,
                            control,
                            path,
                            resolve_conflicts,
                        };
                        self.actions.push_back(established);
                    }
                    _ => self.new_round(alive),
                }
            }
            Phase::Accepting { .. } | Phase::Checking { .. } => {}
            Phase::Connecting | Phase::Done => {}
        }
    }

    /// If both streams are there, starts the wait that reveals crossed connections.
    fn check_both(&mut self, now: Instant) -> bool {
        if self.data.is_none() || self.control.is_none() {
            return false;
        }
        if self.connecting.take().is_some() {
            self.actions.push_back(Action::AbortConnect);
        }
        self.phase = Phase::Checking {
            until: now + self.config.socket_check,
        };
        true
    }

    /// After an accepted connection that did not complete the pair.
    fn go_on(&mut self, now: Instant, crossed: Crossed, alive: Alive<'_>) {
        match (self.phase, crossed) {
            (Phase::Accepting { .. } | Phase::Checking { .. }, Crossed::Yes) if self.coin() => {
                self.accept_for_a_while(now);
            }
            (Phase::Accepting { .. } | Phase::Checking { .. }, _) => {
                if !self.check_both(now) {
                    self.new_round(alive);
                }
            }
            // An attempt is under way, its end goes on; or there is nothing to do any more.
            (Phase::Connecting | Phase::Done, _) => {}
        }
    }

    fn new_round(&mut self, alive: Alive<'_>) {
        self.drop_dead(alive);
        self.untried = self.config.larger.len();
        self.try_next_path();
    }

    fn try_next_path(&mut self) {
        let path = self.path.unwrap_or(self.next_path);
        self.next_path = (path + 1) % self.config.larger.len();
        self.untried = self.untried.saturating_sub(1);
        self.phase = Phase::Connecting;
        if self.connecting.replace(path).is_none() {
            self.actions.push_back(Action::Connect { path });
        }
    }

    fn accept_for_a_while(&mut self, now: Instant) {
        // Two nodes in step would miss each other again and again.
        let (time, step) = (self.config.connect_int.0, self.config.connect_int.0 / 7);
        let time = if self.coin() {
            time + step
        } else {
            time - step
        };
        self.phase = Phase::Accepting {
            until: now + Duration(time),
        };
    }

    fn drop_dead(&mut self, alive: Alive<'_>) {
        for place in [&mut self.data, &mut self.control] {
            if let Some(socket) = place.take_if(|socket| !alive(*socket)) {
                self.actions.push_back(Action::Close { socket });
            }
        }
        if self.data.is_none() && self.control.is_none() {
            self.path = None;
        }
    }

    fn close_both(&mut self) {
        for socket in [self.data.take(), self.control.take()]
            .into_iter()
            .flatten()
        {
            self.actions.push_back(Action::Close { socket });
        }
        self.path = None;
    }

    fn coin(&mut self) -> bool {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.random >> 63 == 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crossed {
    Yes,
    No,
}

#[cfg(test)]
#[path = "pairing_tests.rs"]
mod tests;
