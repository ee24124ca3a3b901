//! `drbdsetup status` as text (config-and-cli.md, 10).

use lockstep_core::state::{ConnState, DiskState, ReplState};
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{
    ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport, ResyncReport,
};

use super::paint::{Colour, Side, Wrapped, yes_no};

/// How much is printed, and for whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) verbose: bool,
    pub(crate) statistics: bool,
    /// The figures behind the progress of a resync or verify.
    pub(crate) raw: bool,
    pub(crate) colour: Colour,
    /// Standard output is a terminal.
    pub(crate) terminal: bool,
    /// Characters per line.
    pub(crate) width: usize,
}

/// All resources as text.
pub(crate) fn text(resources: &[ResourceReport], style: Style) -> String {
    let mut out = Wrapped::new(style.width);
    for resource in resources {
        one_resource(&mut out, resource, style);
        out.blank_line();
    }
    out.finish()
}

fn one_resource(out: &mut Wrapped, r: &ResourceReport, s: Style) {
    out.item(0, 4);
    out.field(&r.name);
    if s.verbose {
        out.field(&format!("node-id:{}", r.node_id));
    }
    let role = s.colour.role(Side::Own, r.role, r.role.text());
    out.field(&format!("role:{role}"));
    if !r.suspended.is_empty() || s.verbose {
        out.field(&format!("suspended:{}", list_or_no(&r.suspended)));
    }
    if r.force_io_failures || s.verbose {
        let failing = s.colour.failing(r.force_io_failures);
        out.field(&format!("force-io-failures:{failing}"));
    }
    if s.verbose && s.statistics {
        out.next_line();
        out.field(&format!("write-ordering:{}", r.write_ordering));
    }
    let single = r.devices.len() == 1 && r.devices[0].volume == 0;
    for device in &r.devices {
        one_device(out, device, single, s);
    }
    let mut connections: Vec<_> = r.connections.iter().collect();
    connections.sort_by(|a, b| a.name.cmp(&b.name));
    for connection in connections {
        one_connection(out, connection, single, s);
    }
    out.end_line();
}

fn one_device(out: &mut Wrapped, d: &DeviceReport, single: bool, s: Style) {
    out.item(2, 6);
    if !single || s.verbose {
        out.field(&format!("volume:{}", d.volume));
    }
    if s.verbose {
        out.field(&format!("minor:{}", d.minor));
    }
    let disk = s
        .colour
        .disk(Side::Own, d.disk_state, d.client, d.disk_state.text());
    out.field(&format!("disk:{disk}"));
    if d.disk_state == DiskState::Diskless && (s.verbose || !s.terminal) {
        out.field(&format!("client:{}", yes_no(d.client)));
    }
    if s.verbose {
        let path = d
            .disk
            .as_ref()
            .map_or("none", |disk| disk.data_path.as_str());
        out.field(&format!("backing_dev:{path}"));
    }
    if !d.quorum || s.verbose {
        out.field(&format!("quorum:{}", s.colour.quorum(d.quorum)));
    }
    out.field(&format!("open:{}", s.colour.open(d.open)));
    if s.statistics {
        out.next_line();
        if s.verbose {
            out.field(&format!("size:{}", d.size_sectors / 2));
        }
        out.field(&format!("read:{}", d.read_sectors / 2));
        out.field(&format!("written:{}", d.written_sectors / 2));
        if s.verbose {
            out.field(&format!("al-writes:{}", d.al_writes));
            out.field(&format!("bm-writes:{}", d.bm_writes));
            out.field(&format!("upper-pending:{}", d.upper_pending));
            out.field(&format!("lower-pending:{}", d.lower_pending));
            out.field(&format!("al-suspended:{}", yes_no(d.al_suspended)));
        }
    }
    if s.verbose || d.al_suspended {
        out.field(&format!("blocked:{}", blocked(d)));
    }
}

fn one_connection(out: &mut Wrapped, c: &ConnectionReport, single: bool, s: Style) {
    out.item(2, 6);
    let connected = c.state == ConnState::Connected;
    if !c.name.is_empty() {
        out.field(&c.name);
    }
    if s.verbose || c.name.is_empty() {
        out.field(&format!("node-id:{}", c.peer_node_id));
    }
    if !connected || s.verbose {
        out.field(&format!(
            "connection:{}",
            s.colour.conn(c.state, c.state.text())
        ));
    }
    if connected || s.verbose {
        let role = s.colour.role(Side::Peer, c.role, c.role.text());
        out.field(&format!("role:{role}"));
    }
    if s.verbose || (connected && c.tls) {
        out.field(&format!("tls:{}", yes_no(c.tls)));
    }
    if c.congested || s.verbose {
        out.field(&format!("congested:{}", yes_no(c.congested)));
        out.field(&format!("ap-in-flight:{}", c.ap_in_flight_sectors));
        out.field(&format!("rs-in-flight:{}", c.rs_in_flight_sectors));
    }
    if connected || s.verbose || s.statistics {
        for peer_device in &c.peer_devices {
            one_peer_device(out, peer_device, single, s);
        }
    }
}

fn one_peer_device(out: &mut Wrapped, p: &PeerDeviceReport, single: bool, s: Style) {
    out.item(4, 8);
    if !single || s.verbose {
        out.field(&format!("volume:{}", p.volume));
    }
    if p.repl_state > ReplState::Established || s.verbose {
        out.field(&format!(
            "replication:{}",
            s.colour.repl(p.repl_state, p.repl_state.text())
        ));
    }
    let unknown = p.repl_state == ReplState::Off && p.disk_state == DiskState::DUnknown;
    if unknown && !s.verbose && !s.statistics {
        return;
    }
    let disk = s
        .colour
        .disk(Side::Peer, p.disk_state, p.client, p.disk_state.text());
    out.field(&format!("peer-disk:{disk}"));
    if p.disk_state == DiskState::Diskless && (s.verbose || !s.terminal) {
        out.field(&format!("peer-client:{}", yes_no(p.client)));
    }
    if let Some(resync) = &p.resync {
        out.field(&format!("done:{:.2}", done_percent(resync)));
    }
    if !p.resync_suspended.is_empty() || s.verbose {
        out.field(&format!(
            "resync-suspended:{}",
            list_or_no(&p.resync_suspended)
        ));
    }
    if s.statistics {
        out.next_line();
        out.field(&format!("received:{}", p.received_sectors / 2));
        out.field(&format!("sent:{}", p.sent_sectors / 2));
        if p.out_of_sync_sectors != 0 || s.verbose {
            out.field(&format!("out-of-sync:{}", p.out_of_sync_sectors / 2));
        }
        if s.verbose {
            out.field(&format!("pending:{}", p.pending));
            out.field(&format!("unacked:{}", p.unacked));
        }
        if let (true, Some(resync)) = (s.verbose, &p.resync) {
            if s.raw {
                for (key, value) in raw_progress(p.repl_state, resync) {
                    out.field(&format!("{key}:{value}"));
                }
            }
            out.field(&format!(
                "dbdt1:{:.2}",
                f64::from(resync.rate_kib_s) / 1024.0
            ));
            out.field(&format!("eta:{}", eta_text(resync)));
        }
    }
}

/// `suspended:` and `resync-suspended:`.
pub(crate) fn list_or_no(reasons: &[String]) -> String {
    if reasons.is_empty() {
        "no".to_owned()
    } else {
        reasons.join(",")
    }
}

/// `blocked:` of a device.
pub(crate) fn blocked(d: &DeviceReport) -> &'static str {
    if d.al_suspended { "upper" } else { "no" }
}

/// How much of a resync or verify is done, in percent.
pub(crate) fn done_percent(resync: &ResyncReport) -> f64 {
    if resync.total_sectors == 0 {
        return 100.0;
    }
    let left = resync.left_sectors.min(resync.total_sectors);
    100.0 * (resync.total_sectors - left) as f64 / resync.total_sectors as f64
}

/// The figures behind the progress, in the order of the original.
pub(super) fn raw_progress(state: ReplState, r: &ResyncReport) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("rs-total", r.total_sectors.to_string()),
        ("rs-dt-start-ms", r.elapsed_ms.to_string()),
        ("rs-paused-ms", r.paused_ms.to_string()),
        ("rs-dt0-ms", r.newest.ms.to_string()),
        ("rs-db0-sectors", r.newest.sectors.to_string()),
        ("rs-dt1-ms", r.oldest.ms.to_string()),
        ("rs-db1-sectors", r.oldest.sectors.to_string()),
    ];
    if matches!(state, ReplState::VerifyS | ReplState::VerifyT) {
        let ov = r.verify.clone().unwrap_or_default();
        // Without a stop sector the original gives the largest number.
        let stop = ov.stop_sector.unwrap_or(u64::MAX);
        fields.extend([
            ("ov-start-sector", ov.start_sector.to_string()),
            ("ov-stop-sector", stop.to_string()),
            ("ov-position", ov.position_sector.to_string()),
            ("ov-left", r.left_sectors.to_string()),
            ("ov-skipped", ov.skipped_sectors.to_string()),
        ]);
    } else {
        fields.extend([
            ("rs-failed", r.failed_sectors.to_string()),
            ("rs-same-csum", r.same_sectors.to_string()),
        ]);
    }
    if r.wanted_kib_s != 0 {
        let want = f64::from(r.wanted_kib_s) / 1024.0;
        fields.push(("want", format!("{want:.2}")));
    }
    let done = r.total_sectors.saturating_sub(r.left_sectors);
    let active_ms = r.elapsed_ms.saturating_sub(r.paused_ms);
    let newest = mib_s(r.newest.sectors, r.newest.ms);
    fields.extend([
        ("dbdt", format!("{:.2}", mib_s(done, active_ms))),
        ("dbdt0", format!("{newest:.2}")),
    ]);
    fields
}

/// Speed in MiB/s.
pub(super) fn mib_s(sectors: u64, ms: u64) -> f64 {
    if ms == 0 {
        0.0
    } else {
        sectors as f64 / ms as f64 * 1000.0 / 2048.0
    }
}

/// Seconds to the end of a resync at its present speed; none without progress.
pub(crate) fn eta_seconds(resync: &ResyncReport) -> Option<u64> {
    let rate = u64::from(resync.rate_kib_s);
    (rate != 0).then(|| (resync.left_sectors / 2) / rate)
}

/// The same as printed.
pub(crate) fn eta_text(resync: &ResyncReport) -> String {
    eta_seconds(resync).map_or_else(|| "nan".to_owned(), |s| s.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn style() -> Style {
        Style {
            verbose: false,
            statistics: false,
            raw: false,
            colour: Colour::Off,
            terminal: false,
            width: 80,
        }
    }

    #[test]
    fn short_form_of_two_volumes() {
        assert_eq!(
            text(&[sample::web()], style()),
            "\
web role:Primary
  volume:0 disk:UpToDate open:yes
  volume:1 disk:Diskless client:yes open:yes
  bravo role:Secondary
    volume:0 replication:SyncSource peer-disk:Inconsistent done:57.08
    volume:1 peer-disk:UpToDate
  charlie connection:Connecting

"
        );
    }

    #[test]
    fn long_form_wraps_at_fields() {
        let style = Style {
            verbose: true,
            statistics: true,
            ..style()
        };
        assert_eq!(
            text(&[sample::web()], style),
            "\
web node-id:0 role:Primary suspended:no force-io-failures:no
    write-ordering:flush
  volume:0 minor:10 disk:UpToDate backing_dev:/dev/vg0/web0 quorum:yes open:yes
      size:1048576 read:2500 written:45000 al-writes:14 bm-writes:3 upper-pending:1
      lower-pending:2 al-suspended:no blocked:no
  volume:1 minor:11 disk:Diskless client:yes backing_dev:none quorum:yes open:yes
      size:1048576 read:2500 written:45000 al-writes:14 bm-writes:3 upper-pending:1
      lower-pending:2 al-suspended:no blocked:no
  bravo node-id:1 connection:Connected role:Secondary tls:no congested:no
      ap-in-flight:0 rs-in-flight:256
    volume:0 replication:SyncSource peer-disk:Inconsistent done:57.08
        resync-suspended:no
        received:0 sent:150000 out-of-sync:450000 pending:0 unacked:1 dbdt1:52.08 eta:8
    volume:1 replication:Established peer-disk:UpToDate resync-suspended:no
        received:0 sent:150000 out-of-sync:0 pending:0 unacked:1
  charlie node-id:2 connection:Connecting role:Unknown tls:no congested:no
      ap-in-flight:0 rs-in-flight:256
    volume:0 replication:Off peer-disk:DUnknown resync-suspended:no
        received:0 sent:150000 out-of-sync:0 pending:0 unacked:1
    volume:1 replication:Off peer-disk:DUnknown resync-suspended:no
        received:0 sent:150000 out-of-sync:0 pending:0 unacked:1

"
        );
    }

    #[test]
    fn one_volume_has_no_number_and_lost_quorum_is_shown() {
        let mut web = sample::web();
        web.role = lockstep_core::state::Role::Secondary;
        web.suspended = vec!["user".into(), "quorum".into()];
        web.devices.truncate(1);
        web.devices[0].quorum = false;
        web.connections.remove(0);
        assert_eq!(
            text(&[web], style()),
            "\
web role:Secondary suspended:user,quorum
  disk:UpToDate quorum:no open:yes
  charlie connection:Connecting

"
        );
    }

    #[test]
    fn colours_mark_states() {
        let style = Style {
            colour: Colour::On,
            ..style()
        };
        let text = text(&[sample::web()], style);
        assert!(text.contains("role:\x1b[1;36mPrimary\x1b[0m"), "{text:?}");
        assert!(text.contains("disk:\x1b[1;32mUpToDate\x1b[0m"), "{text:?}");
        assert!(text.contains("open:\x1b[1;36myes\x1b[0m"), "{text:?}");
        assert!(
            text.contains("connection:\x1b[1;31mConnecting\x1b[0m"),
            "{text:?}"
        );
    }
}
