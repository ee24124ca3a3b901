//! The resource of the specification's examples, for the tests of everything that prints.

use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_daemon::report::{
    ConnectionReport, DeviceReport, DiskReport, PathReport, PeerDeviceReport, ResourceReport,
    ResyncReport, SinceMark,
};

/// Primary with a diskless second volume, one peer in resync, one unreachable over two paths.
pub(crate) fn web() -> ResourceReport {
    let path = |net: u8, host: u8, established| PathReport {
        local: format!("ipv4:10.{net}.0.1:7790"),
        remote: format!("ipv4:10.{net}.0.{host}:7790"),
        established,
    };
    let off = |volume| peer_device(volume, ReplState::Off, DiskState::DUnknown);
    let mut syncing = peer_device(0, ReplState::SyncSource, DiskState::Inconsistent);
    syncing.out_of_sync_sectors = 900_000;
    syncing.resync = Some(ResyncReport {
        total_sectors: 2_097_152,
        left_sectors: 900_000,
        failed_sectors: 0,
        same_sectors: 0,
        elapsed_ms: 12_000,
        paused_ms: 0,
        rate_kib_s: 53_330,
        newest: SinceMark {
            ms: 3_000,
            sectors: 300_000,
        },
        oldest: SinceMark {
            ms: 6_000,
            sectors: 640_000,
        },
        wanted_kib_s: 51_200,
        verify: None,
    });
    ResourceReport {
        name: "web".into(),
        node_id: 0,
        role: Role::Primary,
        suspended: Vec::new(),
        force_io_failures: false,
        may_promote: false,
        promotion_score: 101,
        write_ordering: "flush".into(),
        options: [("quorum", "majority"), ("on-no-quorum", "io-error")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        devices: vec![
            device(0, 10, DiskState::UpToDate),
            device(1, 11, DiskState::Diskless),
        ],
        connections: vec![
            connection(
                1,
                "bravo",
                ConnState::Connected,
                Role::Secondary,
                vec![path(1, 2, true)],
                vec![
                    syncing,
                    peer_device(1, ReplState::Established, DiskState::UpToDate),
                ],
            ),
            connection(
                2,
                "charlie",
                ConnState::Connecting,
                Role::Unknown,
                vec![path(1, 3, false), path(2, 3, false)],
                vec![off(0), off(1)],
            ),
        ],
    }
}

fn device(volume: u16, minor: u32, disk_state: DiskState) -> DeviceReport {
    let attached = disk_state != DiskState::Diskless;
    let text = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    DeviceReport {
        volume,
        minor,
        disk_state,
        lost_disk: None,
        client: !attached,
        quorum: true,
        open: true,
        logical_block_bytes: 512,
        disk: attached.then(|| DiskReport {
            data_path: "/dev/vg0/web0".into(),
            meta_path: "/dev/vg0/web0".into(),
            meta_index: "internal".into(),
        }),
        device_options: if attached {
            Default::default()
        } else {
            [text("diskless", "yes")].into()
        },
        disk_options: if attached {
            [text("al-extents", "6007")].into()
        } else {
            Default::default()
        },
        size_sectors: 2_097_152,
        read_sectors: 5_000,
        written_sectors: 90_000,
        al_writes: 14,
        bm_writes: 3,
        upper_pending: 1,
        lower_pending: 2,
        al_suspended: false,
        current_uuid: 0x1122_3344_5566_7789,
        history_uuids: vec![0xAAAA_AAAA_AAAA_AAA0, 0xBBBB_BBBB_BBBB_BBB0],
        flags: 0,
    }
}

fn connection(
    peer_node_id: u8,
    name: &str,
    state: ConnState,
    role: Role,
    paths: Vec<PathReport>,
    peer_devices: Vec<PeerDeviceReport>,
) -> ConnectionReport {
    ConnectionReport {
        peer_node_id,
        name: name.into(),
        state,
        role,
        congested: false,
        ap_in_flight_sectors: 0,
        rs_in_flight_sectors: 256,
        tls: false,
        protocol_version: 122,
        options: [
            ("cram-hmac-alg", "sha256"),
            ("shared-secret", "s3 cret"),
            ("max-buffers", "8000"),
            ("_name", name),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into(),
        paths,
        peer_devices,
    }
}

fn peer_device(volume: u16, repl_state: ReplState, disk_state: DiskState) -> PeerDeviceReport {
    PeerDeviceReport {
        volume,
        repl_state,
        disk_state,
        client: false,
        resync_suspended: Vec::new(),
        received_sectors: 0,
        sent_sectors: 300_000,
        out_of_sync_sectors: 0,
        pending: 0,
        unacked: 1,
        resync: None,
        bitmap_uuid: 0x9988_7766_5544_33FF,
        flags: 0,
        degraded: false,
        options: if volume == 0 {
            [("c-min-rate".to_owned(), "4096k".to_owned())].into()
        } else {
            Default::default()
        },
    }
}
