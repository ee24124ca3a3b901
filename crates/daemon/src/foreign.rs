//! Metrics under the names that dashboards and alarms made for DRBD ask for: those of
//! drbd-reactor's exporter (config-and-cli.md, 21.1) and of node_exporter's collector (21.6).
//! `docs/metrics.md` lists them.

use lockstep_core::state::{ConnState, DiskState, Role};

use crate::metrics::Page;
use crate::names::Named;
use crate::proc_drbd::{Minor, minors};
use crate::report::{ConnectionReport, DeviceReport, PeerDeviceReport, ResourceReport};

const ROLES: [Role; 3] = [Role::Unknown, Role::Primary, Role::Secondary];

const CONNECTIONS: [ConnState; 10] = [
    ConnState::StandAlone,
    ConnState::Disconnecting,
    ConnState::Unconnected,
    ConnState::Timeout,
    ConnState::BrokenPipe,
    ConnState::NetworkFailure,
    ConnState::ProtocolError,
    ConnState::TearDown,
    ConnState::Connecting,
    ConnState::Connected,
];

const DISKS: [DiskState; 10] = [
    DiskState::Diskless,
    DiskState::Attaching,
    DiskState::Detaching,
    DiskState::Failed,
    DiskState::Negotiating,
    DiskState::Inconsistent,
    DiskState::Outdated,
    DiskState::DUnknown,
    DiskState::Consistent,
    DiskState::UpToDate,
];

/// The page of drbd-reactor's exporter.
pub(crate) fn reactor(reports: &[ResourceReport]) -> String {
    let mut page = Page::default();
    page.family("drbdreactor_up", "gauge", "Always 1.");
    page.sample(&[], 1);
    page.family("drbd_version", "gauge", "Version of the daemon.");
    page.sample(&[("lockstep", env!("CARGO_PKG_VERSION"))], 1);
    page.family("drbd_resource_resources", "gauge", "Number of resources.");
    page.sample(&[], reports.len());
    reactor_resources(&mut page, reports);
    reactor_connections(&mut page, reports);
    reactor_peer_devices(&mut page, reports);
    reactor_devices(&mut page, reports);
    page.text
}

fn reactor_resources(page: &mut Page, reports: &[ResourceReport]) {
    let name = "drbd_resource_role";
    page.family(name, "gauge", "1 for the present role.");
    for r in reports {
        for role in ROLES {
            let labels = [("name", r.name.as_str()), (name, role.text())];
            page.sample(&labels, u8::from(role == r.role));
        }
    }
    type Value = fn(&ResourceReport) -> u64;
    let all: [(&str, &str, Value); 4] = [
        ("suspended", "1 while I/O is suspended.", |r| {
            u64::from(!r.suspended.is_empty())
        }),
        ("maypromote", "1 if a promotion has a chance.", |r| {
            u64::from(r.may_promote)
        }),
        ("promotionscore", "Higher is better.", |r| {
            u64::from(r.promotion_score)
        }),
        (
            "forceiofailures",
            "1 while I/O fails until all users have closed.",
            |r| u64::from(r.force_io_failures),
        ),
    ];
    for (name, help, value) in all {
        page.family(&format!("drbd_resource_{name}"), "gauge", help);
        for r in reports {
            page.sample(&[("name", &r.name)], value(r));
        }
    }
}

fn reactor_connections(page: &mut Page, reports: &[ResourceReport]) {
    let each = || {
        reports
            .iter()
            .flat_map(|r| r.connections.iter().map(move |c| (r, c)))
    };
    let name = "drbd_connection_state";
    page.family(name, "gauge", "1 for the present state of the connection.");
    for (r, c) in each() {
        for state in CONNECTIONS {
            let labels = [
                ("name", r.name.as_str()),
                ("conn_name", &c.name),
                (name, state.text()),
            ];
            page.sample(&labels, u8::from(state == c.state));
        }
    }
    type Value = fn(&ConnectionReport) -> u64;
    let all: [(&str, &str, Value); 3] = [
        ("congested", "1 while the send queue is congested.", |c| {
            u64::from(c.congested)
        }),
        ("apinflight_bytes", "Bytes of users on their way.", |c| {
            c.ap_in_flight_sectors * 512
        }),
        ("rsinflight_bytes", "Bytes of resyncs on their way.", |c| {
            c.rs_in_flight_sectors * 512
        }),
    ];
    for (name, help, value) in all {
        page.family(&format!("drbd_connection_{name}"), "gauge", help);
        for (r, c) in each() {
            page.sample(&[("name", &r.name), ("conn_name", &c.name)], value(c));
        }
    }
}

fn reactor_peer_devices(page: &mut Page, reports: &[ResourceReport]) {
    type Value = fn(&PeerDeviceReport) -> u64;
    let all: [(&str, &str, Value); 3] = [
        ("outofsync", "Bytes that differ or may differ.", |p| {
            p.out_of_sync_sectors * 512
        }),
        ("sent", "Bytes sent to the peer.", |p| p.sent_sectors * 512),
        ("received", "Bytes received from the peer.", |p| {
            p.received_sectors * 512
        }),
    ];
    for (name, help, value) in all {
        page.family(&format!("drbd_peerdevice_{name}_bytes"), "gauge", help);
        for r in reports {
            for c in &r.connections {
                for p in &c.peer_devices {
                    let volume = p.volume.to_string();
                    let labels = [
                        ("name", r.name.as_str()),
                        ("conn_name", &c.name),
                        ("volume", &volume),
                    ];
                    page.sample(&labels, value(p));
                }
            }
        }
    }
}

fn reactor_devices(page: &mut Page, reports: &[ResourceReport]) {
    let each = || {
        reports
            .iter()
            .flat_map(|r| r.devices.iter().map(move |d| (r, d)))
    };
    let state = "drbd_device_state";
    page.family(state, "gauge", "1 for the present state of the disk.");
    for (r, d) in each() {
        let (volume, minor) = (d.volume.to_string(), d.minor.to_string());
        for disk in DISKS {
            let labels = [
                ("name", r.name.as_str()),
                ("volume", &volume),
                ("minor", &minor),
                (state, disk.text()),
            ];
            page.sample(&labels, u8::from(disk == d.disk_state));
        }
    }
    type Value = fn(&DeviceReport) -> u64;
    let all: [(&str, &str, &str, Value); 12] = [
        ("client", "gauge", "1 if meant to be diskless.", |d| {
            u64::from(d.client)
        }),
        (
            "unintentionaldiskless",
            "gauge",
            "1 if it has lost its disk.",
            |d| u64::from(d.disk_state == DiskState::Diskless && !d.client),
        ),
        ("quorum", "gauge", "1 with quorum.", |d| u64::from(d.quorum)),
        ("open", "gauge", "1 while in use.", |d| u64::from(d.open)),
        ("size_bytes", "gauge", "Usable size.", |d| {
            d.size_sectors * 512
        }),
        (
            "read_bytes_total",
            "counter",
            "Bytes read from the local disk.",
            |d| d.read_sectors * 512,
        ),
        (
            "written_bytes_total",
            "counter",
            "Bytes written to the local disk.",
            |d| d.written_sectors * 512,
        ),
        (
            "alwrites_total",
            "counter",
            "Transactions of the activity log.",
            |d| d.al_writes,
        ),
        ("bmwrites_total", "counter", "Writes of the bitmap.", |d| {
            d.bm_writes
        }),
        (
            "upperpending",
            "gauge",
            "Requests of users in flight.",
            |d| d.upper_pending,
        ),
        (
            "lowerpending",
            "gauge",
            "Requests to the disk in flight.",
            |d| d.lower_pending,
        ),
        (
            "alsuspended",
            "gauge",
            "1 while requests wait for the activity log.",
            |d| u64::from(d.al_suspended),
        ),
    ];
    for (name, kind, help, value) in all {
        page.family(&format!("drbd_device_{name}"), kind, help);
        for (r, d) in each() {
            let (volume, minor) = (d.volume.to_string(), d.minor.to_string());
            let labels = [
                ("name", r.name.as_str()),
                ("volume", &volume),
                ("minor", &minor),
            ];
            page.sample(&labels, value(d));
        }
    }
}

/// What node_exporter makes of `/proc/drbd`.
pub(crate) fn node_exporter(reports: &[ResourceReport]) -> String {
    type Value = fn(&Minor<'_>) -> u64;
    fn of_peer(minor: &Minor<'_>, value: fn(&PeerDeviceReport) -> u64) -> u64 {
        minor.peer.map_or(0, |(_, p)| value(p))
    }
    let all: [(&str, &str, &str, Value); 13] = [
        (
            "activitylog_writes_total",
            "counter",
            "Transactions of the activity log.",
            |m| m.device.al_writes,
        ),
        (
            "application_pending",
            "gauge",
            "Requests of users in flight.",
            |m| m.device.upper_pending,
        ),
        (
            "bitmap_writes_total",
            "counter",
            "Writes of the bitmap.",
            |m| m.device.bm_writes,
        ),
        (
            "connected",
            "gauge",
            "1 while connected and in sync.",
            |m| u64::from(m.state() == "Connected"),
        ),
        (
            "disk_read_bytes_total",
            "counter",
            "Bytes read from the local disk.",
            |m| m.device.read_sectors / 2 * 1024,
        ),
        (
            "disk_written_bytes_total",
            "counter",
            "Bytes written to the local disk.",
            |m| m.device.written_sectors / 2 * 1024,
        ),
        ("epochs", "gauge", "Always 1.", |_| 1),
        (
            "local_pending",
            "gauge",
            "Requests to the disk in flight.",
            |m| m.device.lower_pending,
        ),
        (
            "network_received_bytes_total",
            "counter",
            "Bytes received from the peer.",
            |m| of_peer(m, |p| p.received_sectors / 2 * 1024),
        ),
        (
            "network_sent_bytes_total",
            "counter",
            "Bytes sent to the peer.",
            |m| of_peer(m, |p| p.sent_sectors / 2 * 1024),
        ),
        (
            "out_of_sync_bytes",
            "gauge",
            "Bytes that differ or may differ.",
            |m| of_peer(m, |p| p.out_of_sync_sectors / 2 * 1024),
        ),
        (
            "remote_pending",
            "gauge",
            "Requests sent to the peer without an answer.",
            |m| of_peer(m, |p| p.pending),
        ),
        (
            "remote_unacknowledged",
            "gauge",
            "Requests of the peer not answered yet.",
            |m| of_peer(m, |p| p.unacked),
        ),
    ];
    let minors = minors(reports);
    let mut page = Page::default();
    for (name, kind, help, value) in all {
        page.family(&format!("node_drbd_{name}"), kind, help);
        for minor in &minors {
            let device = format!("drbd{}", minor.device.minor);
            page.sample(&[("device", &device)], value(minor));
        }
    }
    page.family(
        "node_drbd_node_role_is_primary",
        "gauge",
        "1 for a Primary.",
    );
    for minor in &minors {
        let roles = [minor.resource.role, minor.peer_role()];
        both_nodes(&mut page, minor, roles.map(|role| role == Role::Primary));
    }
    page.family(
        "node_drbd_disk_state_is_up_to_date",
        "gauge",
        "1 for a disk that is UpToDate.",
    );
    for minor in &minors {
        let disks = [minor.device.disk_state, minor.peer_disk()];
        both_nodes(
            &mut page,
            minor,
            disks.map(|disk| disk == DiskState::UpToDate),
        );
    }
    page.text
}

/// A sample of this node and one of its peer.
fn both_nodes(page: &mut Page, minor: &Minor<'_>, values: [bool; 2]) {
    let device = format!("drbd{}", minor.device.minor);
    for (node, value) in ["local", "remote"].into_iter().zip(values) {
        page.sample(&[("device", &device), ("node", node)], u8::from(value));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use lockstep_core::state::ReplState;

    use super::*;
    use crate::report::OptionTexts;

    /// A Primary and a Secondary in sync.
    pub(crate) fn sample() -> ResourceReport {
        ResourceReport {
            name: "web".into(),
            node_id: 0,
            role: Role::Primary,
            suspended: Vec::new(),
            force_io_failures: false,
            may_promote: false,
            promotion_score: 10102,
            write_ordering: "flush".into(),
            options: OptionTexts::new(),
            devices: vec![DeviceReport {
                volume: 0,
                minor: 1,
                disk_state: DiskState::UpToDate,
                lost_disk: None,
                client: false,
                quorum: true,
                open: true,
                disk: None,
                device_options: OptionTexts::new(),
                disk_options: OptionTexts::new(),
                logical_block_bytes: 512,
                size_sectors: 4096,
                read_sectors: 4240,
                written_sectors: 2_097_200,
                al_writes: 14,
                bm_writes: 0,
                upper_pending: 0,
                lower_pending: 0,
                al_suspended: false,
                current_uuid: 0,
                history_uuids: Vec::new(),
                flags: 0,
            }],
            connections: vec![ConnectionReport {
                peer_node_id: 1,
                name: "bravo".into(),
                state: ConnState::Connected,
                role: Role::Secondary,
                congested: false,
                ap_in_flight_sectors: 8,
                rs_in_flight_sectors: 0,
                tls: false,
                protocol_version: 124,
                options: OptionTexts::new(),
                paths: Vec::new(),
                peer_devices: vec![PeerDeviceReport {
                    volume: 0,
                    repl_state: ReplState::Established,
                    disk_state: DiskState::UpToDate,
                    client: false,
                    resync_suspended: Vec::new(),
                    received_sectors: 0,
                    sent_sectors: 2_097_152,
                    out_of_sync_sectors: 0,
                    pending: 0,
                    unacked: 0,
                    resync: None,
                    bitmap_uuid: 0,
                    flags: 0,
                    degraded: false,
                    options: OptionTexts::new(),
                }],
            }],
        }
    }

    #[test]
    fn every_state_has_a_series_and_one_of_them_is_1() {
        let page = reactor(&[sample()]);
        let of = |family: &str| -> Vec<&str> {
            let begin = format!("{family}{{");
            page.lines().filter(|l| l.starts_with(&begin)).collect()
        };
        for (family, count, now) in [
            ("drbd_resource_role", 3, "Primary"),
            ("drbd_connection_state", 10, "Connected"),
            ("drbd_device_state", 10, "UpToDate"),
        ] {
            let lines = of(family);
            assert_eq!(lines.len(), count, "{page}");
            let set: Vec<_> = lines.iter().filter(|l| l.ends_with(" 1")).collect();
            assert_eq!(set.len(), 1);
            assert!(set[0].contains(&format!("{family}=\"{now}\"")), "{set:?}");
        }
        for line in [
            "drbdreactor_up 1",
            "drbd_resource_resources 1",
            "drbd_resource_promotionscore{name=\"web\"} 10102",
            "drbd_connection_apinflight_bytes{name=\"web\",conn_name=\"bravo\"} 4096",
            "drbd_peerdevice_sent_bytes{name=\"web\",conn_name=\"bravo\",volume=\"0\"} 1073741824",
            "drbd_device_alwrites_total{name=\"web\",volume=\"0\",minor=\"1\"} 14",
            "drbd_device_unintentionaldiskless{name=\"web\",volume=\"0\",minor=\"1\"} 0",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn node_exporters_names_say_what_it_reads_in_the_text_of_8_4() {
        let page = node_exporter(&[sample()]);
        for line in [
            "node_drbd_connected{device=\"drbd1\"} 1",
            "node_drbd_network_sent_bytes_total{device=\"drbd1\"} 1073741824",
            "node_drbd_disk_written_bytes_total{device=\"drbd1\"} 1073766400",
            "node_drbd_node_role_is_primary{device=\"drbd1\",node=\"local\"} 1",
            "node_drbd_node_role_is_primary{device=\"drbd1\",node=\"remote\"} 0",
            "node_drbd_disk_state_is_up_to_date{device=\"drbd1\",node=\"remote\"} 1",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is not in\n{page}");
        }
    }
}
