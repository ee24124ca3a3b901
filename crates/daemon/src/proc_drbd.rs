//! The text that `/proc/drbd` has with DRBD 8.4 (config-and-cli.md, 18.2), for programs that read
//! nothing else: one peer per volume, which 8.4 has at most.

use std::fmt::Write as _;

use lockstep_core::state::{ConnState, DiskState, ReplState, Role};

use crate::names::Named;
use crate::report::{
    ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport, ResyncReport,
};

/// What 8.4 shows of a minor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Minor<'a> {
    /// The resource.
    pub(crate) resource: &'a ResourceReport,
    /// The volume.
    pub(crate) device: &'a DeviceReport,
    /// The peer: of several the first that is not well, else the first.
    pub(crate) peer: Option<(&'a ConnectionReport, &'a PeerDeviceReport)>,
}

/// The minors in their order.
pub(crate) fn minors(reports: &[ResourceReport]) -> Vec<Minor<'_>> {
    let mut all: Vec<Minor<'_>> = Vec::new();
    for resource in reports {
        for device in &resource.devices {
            let peers = || {
                resource.connections.iter().filter_map(|connection| {
                    let mut peer_devices = connection.peer_devices.iter();
                    let found = peer_devices.find(|p| p.volume == device.volume);
                    found.map(|peer_device| (connection, peer_device))
                })
            };
            let is_well = |p: &PeerDeviceReport| {
                p.repl_state == ReplState::Established
                    && (p.disk_state == DiskState::UpToDate || p.client)
            };
            let peer = peers()
                .find(|(_, p)| !is_well(p))
                .or_else(|| peers().next());
            all.push(Minor {
                resource,
                device,
                peer,
            });
        }
    }
    all.sort_by_key(|minor| minor.device.minor);
    all
}

impl Minor<'_> {
    /// Connection and replication state in one word.
    pub(crate) fn state(&self) -> &'static str {
        let Some((connection, peer_device)) = self.peer else {
            return ConnState::StandAlone.text();
        };
        match (connection.state, peer_device.repl_state) {
            (ConnState::Connecting, _) => "WFConnection",
            (ConnState::Connected, ReplState::Off) => "WFReportParams",
            (ConnState::Connected, ReplState::Established) => "Connected",
            (ConnState::Connected, repl) => repl.text(),
            (state, _) => state.text(),
        }
    }

    /// Role of the peer.
    pub(crate) fn peer_role(&self) -> Role {
        self.peer.map_or(Role::Unknown, |(c, _)| c.role)
    }

    /// State of the peer's disk.
    pub(crate) fn peer_disk(&self) -> DiskState {
        self.peer.map_or(DiskState::DUnknown, |(_, p)| p.disk_state)
    }

    fn is_configured(&self) -> bool {
        self.state() != ConnState::StandAlone.text()
            || self.device.disk_state != DiskState::Diskless
            || self.resource.role != Role::Secondary
    }

    fn text(&self, out: &mut String) {
        let (r, d) = (self.resource, self.device);
        if !self.is_configured() {
            let _ = writeln!(out, "{:>2}: cs:Unconfigured", d.minor);
            return;
        }
        let protocol = self.peer.map_or(" ", |(c, _)| {
            c.options.get("protocol").map_or("C", String::as_str)
        });
        let suspended = |why: &str| {
            self.peer
                .is_some_and(|(_, p)| p.resync_suspended.iter().any(|word| word == why))
        };
        let flag = |set: bool, letter: char| if set { letter } else { '-' };
        let flags: String = [
            if r.suspended.is_empty() { 'r' } else { 's' },
            flag(suspended("dependency"), 'a'),
            flag(suspended("peer"), 'p'),
            flag(suspended("user"), 'u'),
            flag(self.peer.is_some_and(|(c, _)| c.congested), 'n'),
            flag(d.al_suspended, 's'),
        ]
        .iter()
        .collect();
        let _ = writeln!(
            out,
            "{:>2}: cs:{} ro:{}/{} ds:{}/{} {protocol} {flags}",
            d.minor,
            self.state(),
            r.role.text(),
            self.peer_role().text(),
            d.disk_state.text(),
            self.peer_disk().text(),
        );
        let of_peer = |value: fn(&PeerDeviceReport) -> u64| self.peer.map_or(0, |(_, p)| value(p));
        let _ = writeln!(
            out,
            "    ns:{} nr:{} dw:{} dr:{} al:{} bm:{} lo:{} pe:{} ua:{} ap:{} ep:1 wo:{} oos:{}",
            of_peer(|p| p.sent_sectors / 2),
            of_peer(|p| p.received_sectors / 2),
            d.written_sectors / 2,
            d.read_sectors / 2,
            d.al_writes,
            d.bm_writes,
            d.lower_pending,
            of_peer(|p| p.pending),
            of_peer(|p| p.unacked),
            d.upper_pending,
            r.write_ordering.chars().next().unwrap_or('n'),
            of_peer(|p| p.out_of_sync_sectors / 2),
        );
        if let Some((_, peer)) = self.peer
            && let Some(resync) = &peer.resync
        {
            progress(out, peer.repl_state, resync);
        }
    }
}

/// The two lines of a resync or verify.
fn progress(out: &mut String, state: ReplState, resync: &ResyncReport) {
    let total = resync.total_sectors.max(1);
    let left = resync.left_sectors.min(total);
    let permille = (total - left) * 1000 / total;
    let bar = (permille / 50) as usize;
    let done = "=".repeat(bar.saturating_sub(1));
    let head = if bar == 0 { "" } else { ">" };
    let rest = ".".repeat(20 - bar);
    let verifies = matches!(state, ReplState::VerifyS | ReplState::VerifyT);
    let what = if verifies { "verified" } else { "sync'ed" };
    // Above 4 GiB in MiB.
    let (shift, unit) = if total > 4 << 21 { (11, 'M') } else { (1, 'K') };
    let _ = writeln!(
        out,
        "\t[{done}{head}{rest}] {what}:{:>3}.{}% ({}/{}){unit}",
        permille / 10,
        permille % 10,
        left >> shift,
        total >> shift,
    );
    let rate = u64::from(resync.rate_kib_s);
    let seconds = (left / 2) / rate.max(1);
    let ran_ms = resync.elapsed_ms.saturating_sub(resync.paused_ms).max(1);
    let average = (total - left) / 2 * 1000 / ran_ms;
    let _ = write!(
        out,
        "\tfinish: {}:{:02}:{:02} speed: {} ({})",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        thousands(rate),
        thousands(average)
    );
    if matches!(state, ReplState::SyncTarget | ReplState::VerifyS) {
        let _ = write!(out, " want: {}", thousands(resync.wanted_kib_s.into()));
    }
    let stalled = if rate == 0 { " (stalled)" } else { "" };
    let _ = writeln!(out, " K/sec{stalled}");
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The whole text.
#[must_use]
pub fn text(reports: &[ResourceReport]) -> String {
    let mut out = format!(
        "version: 8.4.11 (api:1/proto:86-101)\nLockstep {}, in the words of DRBD 8.4\n",
        env!("CARGO_PKG_VERSION")
    );
    let mut next = None;
    for minor in minors(reports) {
        if next.is_some_and(|next| minor.device.minor > next) {
            out.push('\n');
        }
        minor.text(&mut out);
        next = Some(minor.device.minor + 1);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::tests::sample;

    #[test]
    fn a_pair_in_sync_looks_as_with_the_kernel() {
        let text = text(&[sample()]);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                " 1: cs:Connected ro:Primary/Secondary ds:UpToDate/UpToDate C r-----",
                "    ns:1048576 nr:0 dw:1048600 dr:2120 al:14 bm:0 lo:0 pe:0 ua:0 ap:0 ep:1 wo:f \
                 oos:0",
            ]
        );
    }

    #[test]
    fn progress_has_its_bar_its_end_and_its_speeds() {
        let mut resource = sample();
        let peer = &mut resource.connections[0].peer_devices[0];
        peer.repl_state = ReplState::SyncTarget;
        peer.disk_state = DiskState::Inconsistent;
        peer.resync_suspended = vec!["user".into()];
        peer.resync = Some(ResyncReport {
            total_sectors: 2 * 1_048_576,
            left_sectors: 2 * 729_400,
            failed_sectors: 0,
            same_sectors: 0,
            elapsed_ms: 7000,
            paused_ms: 1000,
            rate_kib_s: 61_440,
            newest: Default::default(),
            oldest: Default::default(),
            wanted_kib_s: 61_440,
            verify: None,
        });
        let shown = text(&[resource.clone()]);
        let lines: Vec<&str> = shown.lines().skip(4).collect();
        assert_eq!(
            lines,
            [
                "\t[=====>..............] sync'ed: 30.4% (729400/1048576)K",
                "\tfinish: 0:00:11 speed: 61,440 (53,196) want: 61,440 K/sec",
            ]
        );
        assert!(shown.contains(" cs:SyncTarget ro:Primary/Secondary "));
        assert!(shown.contains("/Inconsistent C r--u--\n"));
        let peer = &mut resource.connections[0].peer_devices[0];
        if let Some(resync) = &mut peer.resync {
            resync.rate_kib_s = 0;
            resync.total_sectors = 1 << 30;
            resync.left_sectors = 1 << 30;
        }
        let shown = text(&[resource]);
        assert!(
            shown.contains("\t[....................] sync'ed:  0.0% (524288/524288)M\n"),
            "{shown}"
        );
        assert!(shown.ends_with(" K/sec (stalled)\n"), "{shown}");
    }

    #[test]
    fn of_several_peers_the_one_that_is_not_well_is_shown_and_gaps_are_blank_lines() {
        let mut resource = sample();
        let mut second = resource.connections[0].clone();
        second.name = "charlie".into();
        second.state = ConnState::Connecting;
        second.role = Role::Unknown;
        second.peer_devices[0].repl_state = ReplState::Off;
        second.peer_devices[0].disk_state = DiskState::DUnknown;
        resource.connections.push(second);
        let mut other = resource.devices[0].clone();
        other.volume = 1;
        other.minor = 12;
        other.disk_state = DiskState::Diskless;
        resource.devices.push(other);
        resource.role = Role::Secondary;
        let text = text(&[resource]);
        assert!(
            text.contains(" 1: cs:WFConnection ro:Secondary/Unknown ds:UpToDate/DUnknown C "),
            "{text}"
        );
        assert!(text.ends_with("\n\n12: cs:Unconfigured\n"), "{text}");
    }

    #[test]
    fn numbers_have_commas() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(thousands(number), text);
        }
    }
}
