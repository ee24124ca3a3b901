//! The three levels of bandwidth limits: the daemon, a session (all connections with one peer
//! proxy, known by its outside IP), and a connection. Bulk passes when all three let it; control is
//! charged to all and waits for none.

use std::net::IpAddr;

use super::LinkId;
use super::config::{ConfigError, FLOOR_MAX, MEMLIMIT_MIN, MEMORY_MIN, format_bytes, parse_bytes};
use super::engine::Engine;
use super::link::Link;
use super::shaper::{Bucket, Limit};
use super::time::Instant;

/// Sessions with a limit of their own.
const SESSIONS_MAX: usize = 1024;

/// What the connections with one peer proxy share.
#[derive(Debug)]
pub(crate) struct SessionLimit {
    pub(crate) limit: Limit,
    pub(crate) bucket: Bucket,
    /// The greatest `served_in_session` of its connections.
    pub(crate) most_served: u64,
    /// Whether it was given at the start. Then the process that takes over has its own.
    pub(crate) origin: Origin,
}

/// Who set a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    CommandLine,
    Command,
}

impl Engine {
    /// Sets an option of the daemon: `bwlimit`, `schedule`, `burst`, `memory-max`, `memlimit-min`.
    pub(crate) fn set_daemon_limit(
        &mut self,
        now: Instant,
        option: &str,
        value: &str,
    ) -> Result<(), ConfigError> {
        match option {
            "memory-max" | "memlimit-min" => self.set_memory(option, value)?,
            _ => {
                set_one(&mut self.options.limit, "daemon", option, value)?;
                self.bucket.set(now, &self.options.limit, self.wall_minute);
            }
        }
        self.settle_all(now);
        self.wake_blocked(now);
        Ok(())
    }

    /// Memory may shrink below what is in use: reading waits until that is less.
    fn set_memory(&mut self, option: &str, value: &str) -> Result<(), ConfigError> {
        let bad = |expected: String| ConfigError::Value {
            option: option.into(),
            value: value.into(),
            expected,
        };
        let bytes = parse_bytes(value).ok_or_else(|| bad("a size such as 512M".into()))?;
        let (mut memory, mut floor) = (
            self.options.memory_max_bytes,
            self.options.memlimit_min_bytes,
        );
        if option == "memory-max" {
            memory = bytes;
        } else {
            check_floor(bytes).map_err(|_| bad(FLOOR.into()))?;
            floor = bytes;
        }
        let count = self.links.len() as u64;
        let needed = memory_needed(count, floor);
        if memory < needed {
            return Err(bad(match option {
                "memory-max" => format!(
                    "at least {} for {count} connections with a memlimit-min of {}",
                    format_bytes(needed),
                    format_bytes(floor)
                ),
                _ => format!(
                    "{FLOOR}, and twice that for each of {count} connections in a memory-max of {}",
                    format_bytes(memory)
                ),
            }));
        }
        (
            self.options.memory_max_bytes,
            self.options.memlimit_min_bytes,
        ) = (memory, floor);
        Ok(())
    }

    /// Sets `bwlimit`, `schedule` or `burst` of a session.
    pub(crate) fn set_session_limit(
        &mut self,
        now: Instant,
        peer: IpAddr,
        option: &str,
        value: &str,
        origin: Origin,
    ) -> Result<(), ConfigError> {
        let known = self.sessions.get(&peer);
        let mut limit = known
            .map(|session| session.limit.clone())
            .unwrap_or_default();
        set_one(&mut limit, "session", option, value)?;
        if known.is_none() && self.sessions.len() >= SESSIONS_MAX {
            return Err(ConfigError::Sessions(SESSIONS_MAX));
        }
        self.put_session_limit(now, peer, limit, origin);
        self.settle_all(now);
        Ok(())
    }

    pub(crate) fn put_session_limit(
        &mut self,
        now: Instant,
        peer: IpAddr,
        limit: Limit,
        origin: Origin,
    ) {
        if limit == Limit::default() {
            self.sessions.remove(&peer);
            return;
        }
        let minute = self.wall_minute;
        if !self.sessions.contains_key(&peer) {
            // Nobody has had anything of it yet.
            for link in self.links.values_mut() {
                link.served_in_session = 0;
            }
        }
        let session = self.sessions.entry(peer).or_insert_with(|| SessionLimit {
            limit: Limit::default(),
            bucket: Bucket::limited(now, &limit, minute),
            most_served: 0,
            origin,
        });
        session.bucket.set(now, &limit, minute);
        (session.limit, session.origin) = (limit, origin);
    }

    /// The wall clock has moved on.
    pub(crate) fn follow_timetables(&mut self, now: Instant, minute: u32) {
        self.wall_minute = minute;
        self.bucket.set(now, &self.options.limit, minute);
        for session in self.sessions.values_mut() {
            session.bucket.set(now, &session.limit, minute);
        }
        for link in self.links.values_mut() {
            link.bucket.set(now, &link.config.options.limit, minute);
        }
    }

    /// Bytes that a connection may send now; unlimited for one that is gone.
    pub(crate) fn may_pass(&mut self, now: Instant, id: LinkId) -> usize {
        let Some(link) = self.links.get_mut(&id) else {
            return usize::MAX;
        };
        let session = self.sessions.get_mut(&link.config.peer_outside.ip());
        let session = session.map_or(usize::MAX, |session| session.bucket.available(now));
        let daemon = self.bucket.available(now);
        daemon.min(session).min(link.bucket.available(now))
    }

    /// When so many bytes may pass on all levels.
    pub(crate) fn may_pass_at(&self, link: &Link, bytes: usize) -> Instant {
        let daemon = self.bucket.ready_at(bytes);
        let session = self.sessions.get(&link.config.peer_outside.ip());
        let session = session.map_or(daemon, |session| session.bucket.ready_at(bytes));
        daemon.max(session).max(link.bucket.ready_at(bytes))
    }

    /// Takes what a connection has sent, on all levels.
    pub(crate) fn charge(&mut self, now: Instant, id: Option<LinkId>, bytes: usize) {
        let take = |bucket: &mut Bucket| {
            bucket.available(now);
            bucket.charge(bytes);
        };
        take(&mut self.bucket);
        let Some(link) = id.and_then(|id| self.links.get_mut(&id)) else {
            return;
        };
        take(&mut link.bucket);
        if let Some(session) = self.sessions.get_mut(&link.config.peer_outside.ip()) {
            take(&mut session.bucket);
        }
    }

    pub(crate) fn session_rate(&self, peer: IpAddr) -> u64 {
        let session = self.sessions.get(&peer);
        session.map_or(0, |session| session.bucket.rate())
    }

    /// The lowest rate of all levels of a connection; 0 is unlimited.
    pub(crate) fn lowest_rate(&self, id: LinkId) -> u64 {
        let link = self.links.get(&id);
        [
            self.bucket.rate(),
            link.map_or(0, |link| self.session_rate(link.config.peer_outside.ip())),
            link.map_or(0, |link| link.bucket.rate()),
        ]
        .into_iter()
        .filter(|rate| *rate > 0)
        .min()
        .unwrap_or(0)
    }

    fn settle_all(&mut self, now: Instant) {
        let ids: Vec<LinkId> = self.links.keys().copied().collect();
        for id in ids {
            self.settle(now, id);
        }
    }
}

const FLOOR: &str = "1M to 1G";

/// What each connection may always have must be so much that a chunk fits.
pub(crate) fn check_floor(bytes: u64) -> Result<(), String> {
    match (MEMLIMIT_MIN..=FLOOR_MAX).contains(&bytes) {
        true => Ok(()),
        false => Err(format!(
            "memlimit-min '{}' is not valid; expected {FLOOR}",
            format_bytes(bytes)
        )),
    }
}

/// Memory with which so many connections have what they may always have, in each direction.
pub(crate) fn memory_needed(connections: u64, floor_bytes: u64) -> u64 {
    (connections * 2 * floor_bytes).max(MEMORY_MIN)
}

fn set_one(
    limit: &mut Limit,
    level: &'static str,
    option: &str,
    value: &str,
) -> Result<(), ConfigError> {
    let unknown = || ConfigError::LevelOption {
        level,
        option: option.into(),
        known: match level {
            "daemon" => "bwlimit, schedule, burst, memory-max, memlimit-min",
            _ => "bwlimit, schedule, burst",
        },
    };
    let done = limit.set(option, value).ok_or_else(unknown)?;
    done.map_err(|expected| ConfigError::Value {
        option: format!("{level} {option}"),
        value: value.into(),
        expected,
    })
}
