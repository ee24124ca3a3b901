//! `drbdsetup wait-*` (config-and-cli.md, 15).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lockstep_core::state::{ConnState, DiskState, ReplState};
use lockstep_daemon::client::{Client, ClientError};
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::{PeerDeviceReport, ResourceReport};

/// For which volumes and until when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Exactly Established, not only connected.
    pub(super) sync: bool,
    pub(super) peer: Option<u32>,
    pub(super) volume: Option<u32>,
    pub(super) limits: Limits,
    /// Go on waiting when a connection has given up.
    pub(super) after_split_brain: bool,
}

/// How long to wait for a peer, by what the metadata said of it at the attach; without a limit for
/// ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// `wfc-timeout`: of the others.
    normal: Option<Duration>,
    /// `degr-wfc-timeout`: it was away while there was a Primary.
    degraded: Option<Duration>,
    /// `outdated-wfc-timeout`: its disk was outdated.
    outdated: Option<Duration>,
}

impl Limits {
    /// From seconds, of which 0 is for ever. A more special limit is not longer than a more general
    /// one; what is changed for that is told.
    pub(super) fn of_seconds(wfc: u64, degr: u64, outdated: u64) -> (Limits, Vec<String>) {
        let mut notices = Vec::new();
        let mut at_most = |general: (&str, u64), special: (&str, u64)| {
            let shorter = special.1 > 0 && special.1 <= general.1;
            if general.1 == 0 || shorter {
                return special.1;
            }
            notices.push(format!(
                "{} has to be shorter than {}\n{0} implicitly set to {1} ({}s)",
                special.0, general.0, general.1
            ));
            general.1
        };
        let degr = at_most(("wfc-timeout", wfc), ("degr-wfc-timeout", degr));
        let outdated = at_most(
            ("degr-wfc-timeout", degr),
            ("outdated-wfc-timeout", outdated),
        );
        let limit = |seconds: u64| (seconds > 0).then(|| Duration::from_secs(seconds));
        let limits = Limits {
            normal: limit(wfc),
            degraded: limit(degr),
            outdated: limit(outdated),
        };
        (limits, notices)
    }

    fn of(&self, peer_device: &PeerDeviceReport) -> Option<Duration> {
        match (peer_device.disk_state, peer_device.degraded) {
            (DiskState::Outdated, _) => self.outdated,
            (_, true) => self.degraded,
            (_, false) => self.normal,
        }
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// Everything is as wanted, or cannot become so and nobody asked to wait for that.
    Done,
    /// The time is over.
    TimedOut,
}

/// Waits.
pub(super) fn wait(
    client: &mut Client,
    resource: &str,
    wanted: Wanted,
) -> Result<Waited, ClientError> {
    let begun = Instant::now();
    client.send(&Request::Watch {
        statistics: false,
        on_request: false,
        resource: Some(resource.to_owned()),
    })?;
    // Which limit counts for a peer device is settled when it is first seen.
    let mut limits = BTreeMap::new();
    let mut last: Option<ResourceReport> = None;
    loop {
        let mut pause = None;
        if let Some(resource) = &last {
            match judge(resource, wanted, &mut limits, begun.elapsed()) {
                Verdict::Over(waited) => return Ok(waited),
                Verdict::Wait(left) => pause = left,
            }
        }
        match client.receive(pause)? {
            Some(Reply::Report { resources }) => match resources.into_iter().next() {
                Some(resource) => last = Some(resource),
                None => return Ok(Waited::Done),
            },
            Some(Reply::Changed { resource }) => last = Some(*resource),
            Some(Reply::Removed { .. }) => return Ok(Waited::Done),
            Some(_) | None => {}
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Over(Waited),
    /// So long, if nothing changes before.
    Wait(Option<Duration>),
}

/// Peer devices by node id and volume, with their limits.
type Seen = BTreeMap<(u8, u16), Option<Duration>>;

fn judge(resource: &ResourceReport, wanted: Wanted, seen: &mut Seen, elapsed: Duration) -> Verdict {
    let chosen = resource.connections.iter().filter(|c| {
        wanted
            .peer
            .is_none_or(|peer| u32::from(c.peer_node_id) == peer)
    });
    let (mut all_done, mut all_expired, mut any) = (true, true, false);
    let mut left: Option<Duration> = None;
    for connection in chosen {
        if connection.state < ConnState::Unconnected && !wanted.after_split_brain {
            return Verdict::Over(Waited::Done);
        }
        let volumes = connection.peer_devices.iter().filter(|p| {
            wanted
                .volume
                .is_none_or(|volume| u32::from(p.volume) == volume)
        });
        for p in volumes {
            any = true;
            let key = (connection.peer_node_id, p.volume);
            let limit = *seen.entry(key).or_insert_with(|| wanted.limits.of(p));
            let expired = limit.is_some_and(|limit| limit <= elapsed);
            let done = match wanted.sync {
                true => p.repl_state == ReplState::Established,
                false => p.repl_state >= ReplState::Established,
            };
            all_done &= done || expired;
            all_expired &= expired;
            if let Some(limit) = limit.filter(|_| !expired) {
                let this = limit - elapsed;
                left = Some(left.map_or(this, |least| least.min(this)));
            }
        }
    }
    match (any && all_expired, all_done) {
        (true, _) => Verdict::Over(Waited::TimedOut),
        (false, true) => Verdict::Over(Waited::Done),
        (false, false) => Verdict::Wait(left),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn wanted() -> Wanted {
        Wanted {
            sync: false,
            peer: None,
            volume: None,
            limits: Limits::default(),
            after_split_brain: false,
        }
    }

    fn is_over(resource: &ResourceReport, wanted: Wanted) -> bool {
        let verdict = judge(resource, wanted, &mut Seen::new(), Duration::ZERO);
        assert_ne!(verdict, Verdict::Over(Waited::TimedOut));
        verdict == Verdict::Over(Waited::Done)
    }

    #[test]
    fn connected_is_less_than_in_sync() {
        let web = sample::web();
        assert!(!is_over(&web, wanted()));
        let bravo = Wanted {
            peer: Some(1),
            ..wanted()
        };
        assert!(is_over(&web, bravo));
        assert!(!is_over(
            &web,
            Wanted {
                sync: true,
                ..bravo
            }
        ));
        assert!(is_over(
            &web,
            Wanted {
                sync: true,
                volume: Some(1),
                ..bravo
            }
        ));
    }

    #[test]
    fn a_connection_that_gave_up_ends_the_wait() {
        let mut web = sample::web();
        web.connections[1].state = ConnState::StandAlone;
        assert!(is_over(&web, wanted()));
        assert!(!is_over(
            &web,
            Wanted {
                after_split_brain: true,
                ..wanted()
            }
        ));
    }

    #[test]
    fn special_limits_are_not_longer_than_general_ones() {
        let seconds = |wfc, degr, outdated| {
            let (limits, notices) = Limits::of_seconds(wfc, degr, outdated);
            let s = |limit: Option<Duration>| limit.map_or(0, |limit| limit.as_secs());
            let all = [limits.normal, limits.degraded, limits.outdated].map(s);
            (all, notices.len())
        };
        assert_eq!(seconds(0, 0, 0), ([0, 0, 0], 0));
        assert_eq!(seconds(0, 120, 10), ([0, 120, 10], 0));
        assert_eq!(seconds(30, 0, 0), ([30, 30, 30], 2));
        assert_eq!(seconds(30, 120, 10), ([30, 30, 10], 1));
        assert_eq!(seconds(30, 20, 25), ([30, 20, 20], 1));
        let (_, notices) = Limits::of_seconds(30, 0, 5);
        assert_eq!(
            notices,
            ["degr-wfc-timeout has to be shorter than wfc-timeout\n\
                 degr-wfc-timeout implicitly set to wfc-timeout (30s)"]
        );
    }

    #[test]
    fn each_peer_has_the_limit_of_its_kind() {
        let mut web = sample::web();
        for (index, connection) in web.connections.iter_mut().enumerate() {
            for p in &mut connection.peer_devices {
                p.repl_state = ReplState::Off;
                p.degraded = index == 1;
            }
        }
        let (limits, _) = Limits::of_seconds(30, 20, 10);
        let wanted = Wanted { limits, ..wanted() };
        let mut seen = Seen::new();
        let mut at = |web: &ResourceReport, seconds| {
            judge(web, wanted, &mut seen, Duration::from_secs(seconds))
        };
        assert_eq!(at(&web, 0), Verdict::Wait(Some(Duration::from_secs(20))));
        // Nobody waits for charlie any more, which is degraded, but for bravo.
        assert_eq!(at(&web, 20), Verdict::Wait(Some(Duration::from_secs(10))));
        let mut connected = web.clone();
        for p in &mut connected.connections[0].peer_devices {
            p.repl_state = ReplState::Established;
        }
        assert_eq!(at(&connected, 21), Verdict::Over(Waited::Done));
        assert_eq!(at(&web, 30), Verdict::Over(Waited::TimedOut));
        // An outdated peer is the least worth waiting for.
        web.connections.truncate(1);
        web.connections[0].peer_devices.truncate(1);
        web.connections[0].peer_devices[0].disk_state = DiskState::Outdated;
        let verdict = judge(&web, wanted, &mut Seen::new(), Duration::from_secs(10));
        assert_eq!(verdict, Verdict::Over(Waited::TimedOut));
    }
}
