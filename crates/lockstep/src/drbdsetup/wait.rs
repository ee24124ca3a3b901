//! `drbdsetup wait-*` (config-and-cli.md, 15).

use std::time::{Duration, Instant};

use lockstep_core::state::{ConnState, ReplState};
use lockstep_daemon::client::{Client, ClientError};
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::ResourceReport;

/// For which volumes and until when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Exactly Established, not only connected.
    pub(super) sync: bool,
    pub(super) peer: Option<u32>,
    pub(super) volume: Option<u32>,
    /// Longest wait; for ever if not given.
    pub(super) limit: Option<Duration>,
    /// Go on waiting when a connection has given up.
    pub(super) after_split_brain: bool,
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
    let until = wanted.limit.map(|limit| Instant::now() + limit);
    client.send(&Request::Watch {
        statistics: false,
        on_request: false,
        resource: Some(resource.to_owned()),
    })?;
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(Waited::TimedOut);
        }
        match client.receive(left)? {
            None => return Ok(Waited::TimedOut),
            Some(Reply::Report { resources }) => {
                if resources
                    .first()
                    .is_none_or(|resource| is_over(resource, wanted))
                {
                    return Ok(Waited::Done);
                }
            }
            Some(Reply::Changed { resource }) if is_over(&resource, wanted) => {
                return Ok(Waited::Done);
            }
            Some(Reply::Removed { .. }) => return Ok(Waited::Done),
            Some(_) => {}
        }
    }
}

fn is_over(resource: &ResourceReport, wanted: Wanted) -> bool {
    let chosen = resource.connections.iter().filter(|c| {
        wanted
            .peer
            .is_none_or(|peer| u32::from(c.peer_node_id) == peer)
    });
    let mut all = true;
    for connection in chosen {
        let given_up = connection.state < ConnState::Unconnected;
        if given_up && !wanted.after_split_brain {
            return true;
        }
        all &= connection
            .peer_devices
            .iter()
            .filter(|p| {
                wanted
                    .volume
                    .is_none_or(|volume| u32::from(p.volume) == volume)
            })
            .all(|p| match wanted.sync {
                true => p.repl_state == ReplState::Established,
                false => p.repl_state >= ReplState::Established,
            });
    }
    all
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
            limit: None,
            after_split_brain: false,
        }
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
}
