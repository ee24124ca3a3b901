//! For each state that is not good: why it is so and what to do. Decides nothing and changes
//! nothing; every text comes from one report alone.

use lockstep_core::state::{ConnState, DiskState, ReplState};
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport};

/// One thing that is not good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Advice {
    /// The object, in the words of `drbdadm`.
    pub(super) about: String,
    /// Why.
    pub(super) why: String,
    /// What to do.
    pub(super) todo: String,
}

fn advice(about: String, why: impl Into<String>, todo: impl Into<String>) -> Advice {
    Advice {
        about,
        why: why.into(),
        todo: todo.into(),
    }
}

/// Everything about a resource, in the order of the tree.
pub(super) fn of_resource(r: &ResourceReport) -> Vec<Advice> {
    let mut all = suspension(r);
    all.extend(r.devices.iter().filter_map(|d| of_device(r, d)));
    all.extend(r.devices.iter().filter_map(|d| of_quorum(r, d)));
    for c in &r.connections {
        all.extend(of_connection(r, c));
        all.extend(c.peer_devices.iter().filter_map(|p| of_peer(r, c, p)));
    }
    all
}

fn suspension(r: &ResourceReport) -> Vec<Advice> {
    let name = &r.name;
    let mut all: Vec<Advice> = r
        .suspended
        .iter()
        .map(|reason| {
            let (why, todo) = match reason.as_str() {
                "user" => (
                    "an operator has suspended I/O".to_owned(),
                    format!("drbdadm resume-io {name}"),
                ),
                "no-data" => (
                    "no node with UpToDate data can be reached, and on-no-data-accessible says \
                     to wait"
                        .to_owned(),
                    "bring a node with good data back; I/O goes on by itself".to_owned(),
                ),
                "fencing" => (
                    "a peer was lost and its fencing is not confirmed yet".to_owned(),
                    format!("see to it that it is down, then drbdadm resume-io {name}"),
                ),
                "quorum" => (
                    "too few nodes can be reached, and on-no-quorum says to wait".to_owned(),
                    format!(
                        "bring nodes back, and I/O goes on; to fail it instead: drbdsetup \
                         resource-options {name} --on-no-quorum=io-error"
                    ),
                ),
                other => (format!("suspended: {other}"), "see the log".to_owned()),
            };
            advice(name.clone(), format!("I/O waits: {why}"), todo)
        })
        .collect();
    if r.force_io_failures {
        all.push(advice(
            name.clone(),
            "the role was taken by force; I/O of those who still have it open fails",
            "close (unmount, stop) what uses it",
        ));
    }
    all
}

/// The peer from which a volume is being filled.
fn source(r: &ResourceReport, volume: u16) -> Option<&ConnectionReport> {
    let filling = |p: &PeerDeviceReport| {
        p.volume == volume
            && matches!(
                p.repl_state,
                ReplState::SyncTarget | ReplState::PausedSyncT | ReplState::WfBitmapT
            )
    };
    r.connections
        .iter()
        .find(|c| c.peer_devices.iter().any(filling))
}

fn of_device(r: &ResourceReport, d: &DeviceReport) -> Option<Advice> {
    let about = format!("{}/{}", r.name, d.volume);
    let from = source(r, d.volume);
    let (why, todo) = match d.disk_state {
        DiskState::UpToDate => return None,
        DiskState::Diskless if d.client => return None,
        DiskState::Diskless => (
            match d.lost_disk.as_deref() {
                Some(why) => format!("its disk was given up ({why})"),
                None => "it has no disk: it was detached, or never attached".to_owned(),
            },
            format!(
                "look for errors of the disk in the log, replace it (drbdadm create-md \
                     {about}) if it is broken, then drbdadm attach {about}"
            ),
        ),
        DiskState::Failed | DiskState::Detaching => (
            "its disk failed or is being detached".to_owned(),
            "wait for what is in flight; the log names the error".to_owned(),
        ),
        DiskState::Attaching | DiskState::Negotiating => (
            "it is being attached and asks the peers who has newer data".to_owned(),
            "wait; it ends with the handshakes".to_owned(),
        ),
        DiskState::Inconsistent => match from {
            Some(c) => (
                format!("it is being filled from {}", c.name),
                "nothing; it becomes UpToDate at the end".to_owned(),
            ),
            None => (
                "its data is a mixture of old and new, and no peer with good data is connected"
                    .to_owned(),
                format!(
                    "connect to a node that is UpToDate; if this is a new resource, choose the \
                     first data with drbdadm primary --force {} on one node",
                    r.name
                ),
            ),
        },
        DiskState::Outdated => match from {
            Some(c) => (
                format!("it is brought up to date from {}", c.name),
                "nothing; it becomes UpToDate at the end".to_owned(),
            ),
            None => (
                "a peer has newer data, and it is not connected".to_owned(),
                "connect to the node that was Primary last".to_owned(),
            ),
        },
        DiskState::Consistent => (
            "its data is whole, but a peer that is not connected may have newer data".to_owned(),
            format!(
                "connect the peers; if they are lost for good: drbdadm primary --force {}",
                r.name
            ),
        ),
        DiskState::DUnknown => (
            "its state is not known".to_owned(),
            "see the log".to_owned(),
        ),
    };
    let why = format!("{}: {why}", d.disk_state.text());
    Some(advice(about, why, todo))
}

/// The nodes that count for quorum and those of them that answer.
pub(super) struct Votes {
    /// Name, whether it answers, and its disk, this node first.
    pub(super) nodes: Vec<(String, bool, DiskState)>,
}

impl Votes {
    /// Of one volume. A node that is meant to be diskless has no vote.
    pub(super) fn of(r: &ResourceReport, d: &DeviceReport) -> Votes {
        let mut nodes = Vec::new();
        if !d.client {
            nodes.push(("this node".to_owned(), true, d.disk_state));
        }
        for c in &r.connections {
            let peer = c.peer_devices.iter().find(|p| p.volume == d.volume);
            if let Some(p) = peer.filter(|p| !p.client) {
                let answers = c.state == ConnState::Connected;
                nodes.push((c.name.clone(), answers, p.disk_state));
            }
        }
        Votes { nodes }
    }

    /// How many answer.
    pub(super) fn present(&self) -> usize {
        self.nodes.iter().filter(|(_, answers, _)| *answers).count()
    }

    /// How many the setting asks for, if it asks for any.
    pub(super) fn needed(&self, setting: &str) -> Option<usize> {
        match setting {
            "off" => None,
            "majority" => Some(self.nodes.len() / 2 + 1),
            "all" => Some(self.nodes.len()),
            number => number.parse().ok(),
        }
    }
}

/// The quorum setting of a resource.
pub(super) fn quorum_setting(r: &ResourceReport) -> &str {
    r.options.get("quorum").map_or("off", String::as_str)
}

fn of_quorum(r: &ResourceReport, d: &DeviceReport) -> Option<Advice> {
    if d.quorum {
        return None;
    }
    let votes = Votes::of(r, d);
    let setting = quorum_setting(r);
    let needed = votes
        .needed(setting)
        .map_or_else(String::new, |needed| format!(", {needed} are needed"));
    let missing: Vec<&str> = votes
        .nodes
        .iter()
        .filter(|(_, answers, _)| !answers)
        .map(|(name, _, _)| name.as_str())
        .collect();
    Some(advice(
        format!("{}/{}", r.name, d.volume),
        format!(
            "no quorum: {} of {} nodes with data answer{needed} (quorum {setting})",
            votes.present(),
            votes.nodes.len()
        ),
        match missing[..] {
            [] => "attach disks or finish resyncs on the nodes that are connected".to_owned(),
            _ => format!("bring back {}", missing.join(", ")),
        },
    ))
}

fn of_connection(r: &ResourceReport, c: &ConnectionReport) -> Option<Advice> {
    let about = format!("{}:{}", r.name, c.name);
    let to = c
        .paths
        .first()
        .map_or("an address that is not configured", |path| {
            path.remote.as_str()
        });
    match c.state {
        ConnState::Connected if c.congested => Some(advice(
            about,
            "the peer or the line takes data more slowly than it is written",
            "look at the line and at the peer's disk",
        )),
        ConnState::Connected => None,
        ConnState::StandAlone => Some(advice(
            about.clone(),
            "StandAlone: it was disconnected here, or the nodes refused each other (split brain, \
             unrelated data, wrong secret); the log says which",
            format!(
                "drbdadm connect {about}; after a split brain: lockstep recover {}",
                r.name
            ),
        )),
        ConnState::Connecting | ConnState::Unconnected => Some(advice(
            about,
            format!("{}: nobody answers at {to}", c.state.text()),
            "see that the peer runs, that the resource is up there, and that its port is reachable",
        )),
        ConnState::Disconnecting
        | ConnState::Timeout
        | ConnState::BrokenPipe
        | ConnState::NetworkFailure
        | ConnState::ProtocolError
        | ConnState::TearDown => Some(advice(
            about,
            format!("{}: the connection has just ended", c.state.text()),
            "wait; it is tried again by itself",
        )),
    }
}

fn of_peer(r: &ResourceReport, c: &ConnectionReport, p: &PeerDeviceReport) -> Option<Advice> {
    if c.state != ConnState::Connected {
        return None;
    }
    let about = format!("{}:{}/{}", r.name, c.name, p.volume);
    if !p.resync_suspended.is_empty() {
        let todo = match p.resync_suspended[0].as_str() {
            "user" => format!("drbdadm resume-sync {about}"),
            "peer" => format!("drbdadm resume-sync {} on {}", r.name, c.name),
            _ => "nothing; it waits for another resync that resync-after names".to_owned(),
        };
        let why = format!("the resync is paused by: {}", p.resync_suspended.join(", "));
        return Some(advice(about, why, todo));
    }
    let syncing = p.repl_state > ReplState::Established;
    let (why, todo) = match p.disk_state {
        DiskState::Inconsistent | DiskState::Outdated if syncing => return None,
        DiskState::Diskless if !p.client => (
            "the peer has no disk",
            format!("look at the disk on {}", c.name),
        ),
        DiskState::Inconsistent => (
            "the peer's data is a mixture, and nobody fills it",
            "connect it to a node that is UpToDate".to_owned(),
        ),
        DiskState::Outdated => (
            "the peer's data is old, and nobody brings it up to date",
            format!(
                "drbdadm disconnect {0} and drbdadm connect {0} there",
                r.name
            ),
        ),
        DiskState::Failed => ("the peer's disk fails", format!("look at it on {}", c.name)),
        _ => return None,
    };
    Some(advice(
        about,
        format!("{}: {why}", p.disk_state.text()),
        todo,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::super::drbdsetup::sample;
    use super::*;

    #[test]
    fn what_is_good_needs_no_advice() {
        let mut web = sample::web();
        web.connections.truncate(1);
        web.connections[0].peer_devices.remove(0);
        assert_eq!(of_resource(&web), []);
    }

    #[test]
    fn a_lost_disk_is_told_from_none() {
        let mut web = sample::web();
        web.devices[0].disk_state = DiskState::Diskless;
        let why = |web: &ResourceReport| of_resource(web)[0].why.clone();
        assert!(why(&web).contains("never attached"), "{}", why(&web));
        web.devices[0].lost_disk = Some("data error".into());
        assert!(
            why(&web).ends_with("given up (data error)"),
            "{}",
            why(&web)
        );
    }

    #[test]
    fn each_bad_state_has_a_reason_and_a_step() {
        let mut web = sample::web();
        web.suspended = vec!["user".into(), "quorum".into()];
        web.devices[0].disk_state = DiskState::Outdated;
        web.devices[0].quorum = false;
        web.connections[0].state = ConnState::StandAlone;
        let all = of_resource(&web);
        let about: Vec<&str> = all.iter().map(|a| a.about.as_str()).collect();
        assert_eq!(
            about,
            ["web", "web", "web/0", "web/0", "web:bravo", "web:charlie"]
        );
        assert!(all[2].why.starts_with("Outdated: "), "{}", all[2].why);
        assert_eq!(
            all[3].why,
            "no quorum: 1 of 3 nodes with data answer, 2 are needed (quorum majority)"
        );
        assert_eq!(all[3].todo, "bring back bravo, charlie");
        assert!(
            all[4].todo.contains("lockstep recover web"),
            "{}",
            all[4].todo
        );
        assert!(all[5].why.contains("10.1.0.3:7790"), "{}", all[5].why);
        assert!(all.iter().all(|a| !a.todo.is_empty()));
    }

    #[test]
    fn every_disk_state_is_told_apart() {
        let mut web = sample::web();
        let good = [DiskState::UpToDate];
        for (state, _) in DiskState::NAMES {
            web.devices[0].disk_state = *state;
            assert_eq!(
                of_device(&web, &web.devices[0]).is_none(),
                good.contains(state) || (*state == DiskState::Diskless && web.devices[0].client),
                "{state:?}"
            );
        }
    }
}
