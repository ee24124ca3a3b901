//! `lockstep explain`: the reasoning behind a resource's state, from its report alone.

use lockstep_core::state::{ConnState, DiskState, Role};
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{DeviceReport, ResourceReport};

use super::advice::{self, Votes, quorum_setting};
use super::tree::size;

/// The whole page.
pub(super) fn text(r: &ResourceReport) -> String {
    let mut out = format!("{}: {} on node {}\n", r.name, r.role.text(), r.node_id);
    promotion(&mut out, r);
    for d in &r.devices {
        out.push_str(&format!("\nvolume {} (minor {})\n", d.volume, d.minor));
        generations(&mut out, r, d);
        quorum(&mut out, r, d);
    }
    out.push_str("\nwho waits for whom\n");
    let waits = waits(r);
    match waits[..] {
        [] => out.push_str("  nobody waits\n"),
        _ => waits
            .iter()
            .for_each(|line| out.push_str(&format!("  {line}\n"))),
    }
    let all = advice::of_resource(r);
    out.push_str("\nwhat is not good\n");
    if all.is_empty() {
        out.push_str("  nothing\n");
    }
    for advice in all {
        out.push_str(&format!("  {}  {}\n", advice.about, advice.why));
        out.push_str(&format!("    what to do: {}\n", advice.todo));
    }
    out
}

fn promotion(out: &mut String, r: &ResourceReport) {
    out.push_str("\npromotion\n");
    let primary = r.connections.iter().find(|c| c.role == Role::Primary);
    if r.role == Role::Primary {
        out.push_str("  this node is Primary\n");
    } else if let Some(c) = primary {
        out.push_str(&format!("  no: {} is Primary\n", c.name));
    } else if r.may_promote {
        out.push_str("  possible: nobody is Primary, and good data is within reach\n");
    } else {
        out.push_str("  no: ");
        let bad = r
            .devices
            .iter()
            .find(|d| d.disk_state != DiskState::UpToDate || !d.quorum);
        out.push_str(&match bad {
            _ if r.devices.is_empty() => "there are no volumes\n".to_owned(),
            Some(d) if !d.quorum => format!("volume {} has no quorum\n", d.volume),
            Some(d) => format!(
                "volume {} is {} here, and no peer can stand in\n",
                d.volume,
                d.disk_state.text()
            ),
            None => "I/O fails until all users have closed\n".to_owned(),
        });
    }
    let score = r.promotion_score;
    out.push_str(&format!(
        "  score {score} = {} (own disks usable) + {} (own UpToDate volumes) x 100 + {} (UpToDate \
         copies of the worst volume)\n",
        score / 10_000 * 10_000,
        score % 10_000 / 100,
        score % 100
    ));
}

fn generations(out: &mut String, r: &ResourceReport, d: &DeviceReport) {
    if d.disk.is_none() {
        out.push_str("  no disk, so no generations\n");
        return;
    }
    out.push_str(&format!("  current generation  {:016X}\n", d.current_uuid));
    for (index, uuid) in d
        .history_uuids
        .iter()
        .filter(|uuid| **uuid != 0)
        .enumerate()
        .take(3)
    {
        out.push_str(&format!(
            "  {:<18}  {uuid:016X}\n",
            format!("history {index}")
        ));
    }
    for c in &r.connections {
        let Some(p) = c.peer_devices.iter().find(|p| p.volume == d.volume) else {
            continue;
        };
        let marked = size(p.out_of_sync_sectors * 512);
        let connected = c.state == ConnState::Connected;
        out.push_str(&format!("  towards {}: ", c.name));
        out.push_str(&match (p.bitmap_uuid, connected) {
            (0, true) => format!(
                "the peer is of the same generation ({} there, {marked} to resync)\n",
                p.disk_state.text()
            ),
            (0, false) => {
                format!("no generation was begun since it was last in sync ({marked} marked)\n")
            }
            (uuid, true) => format!(
                "the peer still is of generation {uuid:016X} or filled from it ({marked} to \
                 resync)\n"
            ),
            (uuid, false) => {
                format!("it was left in generation {uuid:016X}; {marked} changed here since\n")
            }
        });
    }
}

fn quorum(out: &mut String, r: &ResourceReport, d: &DeviceReport) {
    let setting = quorum_setting(r);
    let votes = Votes::of(r, d);
    let Some(needed) = votes.needed(setting) else {
        out.push_str("  quorum is off: this node goes on alone\n");
        return;
    };
    out.push_str(&format!(
        "  quorum {setting}: {} of {} nodes with data answer, {needed} are needed\n",
        votes.present(),
        votes.nodes.len()
    ));
    for (name, answers, disk) in &votes.nodes {
        let answer = if *answers {
            "answers"
        } else {
            "does not answer"
        };
        out.push_str(&format!("    {name}: {answer}, {}\n", disk.text()));
    }
    let verdict = match (d.quorum, votes.present() >= needed) {
        (true, true) => "quorum",
        (true, false) => "quorum: the missing ones are known to be outdated or cannot have it",
        (false, false) => "no quorum",
        (false, true) => "no quorum: enough nodes answer, but too few of them have good data",
    };
    out.push_str(&format!("    so: {verdict}\n"));
}

fn waits(r: &ResourceReport) -> Vec<String> {
    let mut all = Vec::new();
    for c in &r.connections {
        if matches!(c.state, ConnState::Connecting | ConnState::Unconnected) {
            all.push(format!("this node waits for {} to answer", c.name));
        }
        for p in &c.peer_devices {
            if p.pending > 0 {
                all.push(format!(
                    "{} requests of volume {} wait for {}",
                    p.pending, p.volume, c.name
                ));
            }
            if p.unacked > 0 {
                all.push(format!(
                    "{} waits for {} requests of volume {} here",
                    c.name, p.unacked, p.volume
                ));
            }
        }
    }
    for d in &r.devices {
        if d.lower_pending > 0 {
            all.push(format!(
                "{} operations of volume {} wait for the disk",
                d.lower_pending, d.volume
            ));
        }
        if d.al_suspended {
            all.push(format!(
                "requests of volume {} wait for the activity log",
                d.volume
            ));
        }
    }
    if !r.suspended.is_empty() {
        all.push(format!("all I/O waits: {}", r.suspended.join(", ")));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::super::drbdsetup::sample;
    use super::*;

    #[test]
    fn the_page_shows_generations_votes_and_waits() {
        let mut web = sample::web();
        web.connections[1].peer_devices[0].bitmap_uuid = 0xab;
        web.connections[1].peer_devices[0].out_of_sync_sectors = 64;
        let page = text(&web);
        for wanted in [
            "web: Primary on node 0\n",
            "this node is Primary\n",
            "towards charlie: it was left in generation 00000000000000AB; 32.0 KiB changed here \
             since\n",
            "quorum majority: 2 of 3 nodes with data answer, 2 are needed\n",
            "    charlie: does not answer, DUnknown\n",
            "    so: quorum\n",
            "this node waits for charlie to answer\n",
        ] {
            assert!(page.contains(wanted), "{wanted}\nis not in\n{page}");
        }
    }
}
