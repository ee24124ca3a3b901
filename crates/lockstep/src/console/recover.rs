//! `lockstep recover`: guides out of a split brain. What each side would lose is shown first;
//! nothing is discarded without the other side's numbers and a confirmation.

use std::io::{BufRead, IsTerminal, Write};

use lockstep_core::state::{ConnState, Role};
use lockstep_daemon::client::Client;
use lockstep_daemon::place::Place;
use lockstep_daemon::protocol::{Reply, Request};
use lockstep_daemon::report::{ConnectionReport, ResourceReport};
use serde_json::Value;

use super::tree::size;

/// What the operator has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// Only look.
    Look,
    /// This node's changes stay.
    KeepMine,
    /// This node's changes are given up.
    DiscardMine,
}

/// The command line.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) resource: String,
    /// Name of the peer, if there are several.
    pub(super) peer: Option<String>,
    /// File with the peer's `drbdsetup status --json`.
    pub(super) peer_status: Option<String>,
    pub(super) choice: Choice,
    /// The operator has confirmed on the command line.
    pub(super) confirmed: bool,
}

/// Shows, and does what was chosen.
pub(super) fn run(place: &Place, wanted: &Wanted) -> Result<(), String> {
    let mut client = Client::connect(place).map_err(|error| error.to_string())?;
    let name = &wanted.resource;
    let asked = Request::Report {
        resource: Some(name.clone()),
    };
    let report = match client.call(&asked).map_err(|error| error.to_string())? {
        Reply::Report { resources } => resources.into_iter().next(),
        other => return Err(format!("an unexpected answer: {other:?}")),
    };
    let report = report.ok_or_else(|| format!("resource '{name}' is not up on this node"))?;
    let peer = peer_of(&report, wanted.peer.as_deref())?;
    let theirs = match &wanted.peer_status {
        None => None,
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
            Some(
                loss_of_peer(&text, name, report.node_id)
                    .map_err(|why| format!("{file}: {why}"))?,
            )
        }
    };
    let mine = loss_of_this_node(peer);
    print!("{}", page(&report, peer, mine, theirs));
    match (wanted.choice, theirs) {
        (Choice::Look, _) => return Ok(()),
        (_, None) => {
            return Err(format!(
                "nothing was done: give {}'s side with --peer-status first",
                peer.name
            ));
        }
        (Choice::KeepMine | Choice::DiscardMine, Some(_)) => {}
    }
    if wanted.choice == Choice::DiscardMine && !wanted.confirmed && !confirm(mine)? {
        return Err("nothing was done".to_owned());
    }
    for request in steps(&report, peer, wanted.choice) {
        match client.call(&request).map_err(|error| error.to_string())? {
            Reply::Done => {}
            // A StandAlone connection needs no disconnect.
            Reply::Failed { code: -9, .. } if matches!(request, Request::Disconnect { .. }) => {}
            Reply::Failed { text, .. } => return Err(text),
            other => return Err(format!("an unexpected answer: {other:?}")),
        }
    }
    println!("done here; see `lockstep status {name}`");
    Ok(())
}

/// The one peer that it is about.
fn peer_of<'a>(r: &'a ResourceReport, name: Option<&str>) -> Result<&'a ConnectionReport, String> {
    let alone: Vec<_> = r
        .connections
        .iter()
        .filter(|c| c.state == ConnState::StandAlone)
        .filter(|c| name.is_none_or(|name| c.name == name))
        .collect();
    match (&alone[..], name) {
        ([one], _) => Ok(one),
        ([], None) => Err(format!(
            "no connection of {} is StandAlone: there is nothing to recover from",
            r.name
        )),
        ([], Some(name)) => Err(format!(
            "{} has no StandAlone connection to '{name}'",
            r.name
        )),
        (several, _) => {
            let names: Vec<&str> = several.iter().map(|c| c.name.as_str()).collect();
            Err(format!("choose one with --peer: {}", names.join(", ")))
        }
    }
}

/// Bytes that were changed here since the peer was last in sync.
fn loss_of_this_node(c: &ConnectionReport) -> u64 {
    c.peer_devices
        .iter()
        .map(|p| p.out_of_sync_sectors * 512)
        .sum()
}

/// The same of the peer, from its `drbdsetup status --json`.
fn loss_of_peer(text: &str, resource: &str, my_node_id: u8) -> Result<u64, String> {
    let all: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let one = all
        .as_array()
        .and_then(|all| all.iter().find(|r| r["name"] == resource))
        .ok_or_else(|| format!("it does not speak of '{resource}'"))?;
    let towards_me = one["connections"]
        .as_array()
        .and_then(|all| all.iter().find(|c| c["peer-node-id"] == my_node_id))
        .ok_or_else(|| format!("it has no connection to node {my_node_id}"))?;
    let devices = towards_me["peer_devices"]
        .as_array()
        .filter(|all| !all.is_empty())
        .ok_or("it has no volumes")?;
    devices.iter().try_fold(0_u64, |sum, device| {
        let kib = device["out-of-sync"]
            .as_u64()
            .ok_or("'out-of-sync' is missing")?;
        Ok(sum.saturating_add(kib.saturating_mul(1024)))
    })
}

fn page(r: &ResourceReport, peer: &ConnectionReport, mine: u64, theirs: Option<u64>) -> String {
    let (name, other) = (&r.name, &peer.name);
    let mut out = format!(
        "{name}: this node and {other} do not replicate (StandAlone).\n\n\
         changed here since they were in sync:   {:>12}  lost with --discard-mine\n",
        size(mine)
    );
    match theirs {
        Some(theirs) => out.push_str(&format!(
            "changed on {:<28} {:>12}  lost with --keep-mine\n",
            format!("{other} since:"),
            size(theirs)
        )),
        None => out.push_str(&format!(
            "changed on {other} since: not known here. There:\n    \
             drbdsetup status {name} --json > FILE\nand here again with --peer-status FILE\n"
        )),
    }
    if mine == 0 {
        out.push_str("\nnothing was changed here: nothing is lost by --discard-mine.\n");
    } else if theirs == Some(0) {
        out.push_str(&format!(
            "\nnothing was changed on {other}: nothing is lost by --keep-mine.\n"
        ));
    }
    out.push_str(&format!(
        "\nSave what you need of the side that loses before you choose. Then on one node\n    \
         lockstep recover {name} --peer-status FILE --discard-mine\n\
         and on the other one\n    lockstep recover {name} --peer-status FILE --keep-mine\n\n"
    ));
    out
}

fn confirm(mine: u64) -> Result<bool, String> {
    if !std::io::stdin().is_terminal() {
        return Err("there is no terminal to confirm on; add --yes".to_owned());
    }
    print!(
        "{} of changes made here are going to be lost. To go on, type discard: ",
        size(mine)
    );
    let mut line = String::new();
    std::io::stdout()
        .flush()
        .and_then(|()| std::io::stdin().lock().read_line(&mut line))
        .map_err(|error| error.to_string())?;
    Ok(line.trim() == "discard")
}

fn steps(r: &ResourceReport, peer: &ConnectionReport, choice: Choice) -> Vec<Request> {
    let resource = || r.name.clone();
    let node = u32::from(peer.peer_node_id);
    let connect = |discard_my_data| Request::Connect {
        resource: resource(),
        peer: node,
        discard_my_data,
        tentative: false,
    };
    match choice {
        Choice::Look => Vec::new(),
        Choice::KeepMine => vec![connect(false)],
        Choice::DiscardMine => {
            let mut steps = Vec::new();
            if r.role == Role::Primary {
                steps.push(Request::Secondary {
                    resource: resource(),
                    force: false,
                });
            }
            steps.push(Request::Disconnect {
                resource: resource(),
                peer: node,
                force: false,
            });
            steps.push(connect(true));
            steps
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::drbdsetup::sample;
    use super::*;

    #[test]
    fn both_losses_are_shown_and_no_step_is_taken_to_look() {
        let mut web = sample::web();
        web.connections[0].state = ConnState::StandAlone;
        let peer = peer_of(&web, None).unwrap();
        assert_eq!(peer.name, "bravo");
        let page = page(&web, peer, loss_of_this_node(peer), Some(8192));
        assert!(
            page.contains("439.5 MiB  lost with --discard-mine"),
            "{page}"
        );
        assert!(page.contains("8.0 KiB  lost with --keep-mine"), "{page}");
        assert!(steps(&web, peer, Choice::Look).is_empty());
        assert_eq!(steps(&web, peer, Choice::KeepMine).len(), 1);
        let steps = steps(&web, peer, Choice::DiscardMine);
        assert!(matches!(steps[0], Request::Secondary { force: false, .. }));
        assert!(matches!(
            steps[2],
            Request::Connect {
                discard_my_data: true,
                ..
            }
        ));
    }

    #[test]
    fn without_or_with_several_candidates_it_asks() {
        let mut web = sample::web();
        assert!(peer_of(&web, None).is_err());
        for c in &mut web.connections {
            c.state = ConnState::StandAlone;
        }
        assert!(peer_of(&web, None).unwrap_err().contains("bravo, charlie"));
        assert_eq!(peer_of(&web, Some("charlie")).unwrap().peer_node_id, 2);
        assert!(peer_of(&web, Some("delta")).is_err());
    }

    #[test]
    fn the_peer_s_side_must_be_about_this_node() {
        let text = r#"[{"name":"web","connections":[{"peer-node-id":0,"peer_devices":[
            {"volume":0,"out-of-sync":4},{"volume":1,"out-of-sync":8}]}]}]"#;
        assert_eq!(loss_of_peer(text, "web", 0), Ok(12 * 1024));
        assert!(loss_of_peer(text, "web", 3).is_err());
        assert!(loss_of_peer(text, "data", 0).is_err());
        assert!(loss_of_peer("[", "web", 0).is_err());
        let nothing = r#"[{"name":"web","connections":[{"peer-node-id":0,"peer_devices":[]}]}]"#;
        assert!(loss_of_peer(nothing, "web", 0).is_err());
    }
}
