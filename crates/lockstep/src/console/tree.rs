//! `lockstep status`: resources as a tree with progress bars and advice.

use lockstep_core::state::{ConnState, ReplState};
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport};

use super::super::drbdsetup::paint::{Colour, Side};
use super::super::drbdsetup::status::{done_percent, eta_seconds};
use super::advice;

/// Positions of a progress bar.
const BAR: usize = 20;

/// All resources.
pub(super) fn text(resources: &[ResourceReport], colour: Colour) -> String {
    let mut out = String::new();
    for r in resources {
        resource(&mut out, r, colour);
        out.push('\n');
    }
    out
}

fn resource(out: &mut String, r: &ResourceReport, colour: Colour) {
    let role = colour.role(Side::Own, r.role, r.role.text());
    out.push_str(&format!("{}  {role}  (node {})\n", r.name, r.node_id));
    let mut branches: Vec<Vec<String>> =
        r.devices.iter().map(|d| vec![device(d, colour)]).collect();
    branches.extend(r.connections.iter().map(|c| connection(r, c, colour)));
    let last = branches.len().saturating_sub(1);
    for (index, lines) in branches.iter().enumerate() {
        let (first, next) = if index == last {
            ("└─ ", "   ")
        } else {
            ("├─ ", "│  ")
        };
        for (number, line) in lines.iter().enumerate() {
            let lead = if number == 0 { first } else { next };
            out.push_str(&format!("{lead}{line}\n"));
        }
    }
    for advice in advice::of_resource(r) {
        let mark = colour.failing_mark("!");
        out.push_str(&format!("{mark} {}  {}\n", advice.about, advice.why));
        out.push_str(&format!("  what to do: {}\n", advice.todo));
    }
}

fn device(d: &DeviceReport, colour: Colour) -> String {
    let state = colour.disk(Side::Own, d.disk_state, d.client, d.disk_state.text());
    let mut line = format!("volume {}  {state}", d.volume);
    if d.client {
        line.push_str(" (client)");
    }
    line.push_str(&format!(
        "  {}  minor {}",
        size(d.size_sectors * 512),
        d.minor
    ));
    if d.open {
        line.push_str("  in use");
    }
    if !d.quorum {
        line.push_str(&format!("  quorum {}", colour.quorum(false)));
    }
    line
}

fn connection(r: &ResourceReport, c: &ConnectionReport, colour: Colour) -> Vec<String> {
    let state = colour.conn(c.state, c.state.text());
    let mut first = format!("{}  {state}", c.name);
    if c.state == ConnState::Connected {
        first.push_str(&format!(
            "  {}",
            colour.role(Side::Peer, c.role, c.role.text())
        ));
    }
    let single = r.devices.len() == 1;
    let mut lines = vec![first];
    for p in &c.peer_devices {
        let text = peer_device(p, c.state, colour);
        if text.is_empty() {
            continue;
        }
        match single {
            true => lines[0].push_str(&format!("  {text}")),
            false => lines.push(format!("   volume {}  {text}", p.volume)),
        }
    }
    lines
}

fn peer_device(p: &PeerDeviceReport, connection: ConnState, colour: Colour) -> String {
    if connection != ConnState::Connected {
        return match p.out_of_sync_sectors {
            0 => String::new(),
            sectors => format!("{} changed here since", size(sectors * 512)),
        };
    }
    let mut text = colour.disk(Side::Peer, p.disk_state, p.client, p.disk_state.text());
    if p.repl_state > ReplState::Established {
        text.push_str(&format!(
            "  {}",
            colour.repl(p.repl_state, p.repl_state.text())
        ));
    }
    if let Some(resync) = &p.resync {
        let done = done_percent(resync);
        let eta = eta_seconds(resync).map_or("no end in sight".to_owned(), duration);
        let rate = u64::from(resync.rate_kib_s) * 1024;
        text.push_str(&format!(
            "  {} {done:.1}%  {}/s  {eta}",
            bar(done),
            size(rate)
        ));
    } else if p.out_of_sync_sectors > 0 {
        text.push_str(&format!(
            "  {} out of sync",
            size(p.out_of_sync_sectors * 512)
        ));
    }
    text
}

/// `[########............]`
pub(super) fn bar(percent: f64) -> String {
    let full = ((percent / 100.0 * BAR as f64) as usize).min(BAR);
    format!("[{}{}]", "#".repeat(full), ".".repeat(BAR - full))
}

/// Bytes for people.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Seconds for people.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s left"),
        60..3600 => format!("{} min {} s left", seconds / 60, seconds % 60),
        _ => format!("{} h {} min left", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::drbdsetup::sample;
    use super::*;

    #[test]
    fn the_tree_of_the_specification_s_example() {
        let tree = text(&[sample::web()], Colour::Off);
        assert_eq!(
            tree,
            "web  Primary  (node 0)
├─ volume 0  UpToDate  1.0 GiB  minor 10  in use
├─ volume 1  Diskless (client)  1.0 GiB  minor 11  in use
├─ bravo  Connected  Secondary
│     volume 0  Inconsistent  SyncSource  [###########.........] 57.1%  52.1 MiB/s  8 s left
│     volume 1  UpToDate
└─ charlie  Connecting
! web:charlie  Connecting: nobody answers at ipv4:10.1.0.3:7790
  what to do: see that the peer runs, that the resource is up there, and that its port is reachable

"
        );
    }

    #[test]
    fn numbers_are_for_people() {
        assert_eq!(size(512), "512 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(u64::MAX), "16384.0 PiB");
        assert_eq!(bar(0.0), "[....................]");
        assert_eq!(bar(100.0), "[####################]");
        assert_eq!(duration(59), "59 s left");
        assert_eq!(duration(7265), "2 h 1 min left");
    }
}
