//! What the daemon tells its tools of a node: all resources with states, options and counters.
//!
//! These are the types of the control protocol. `drbdsetup` renders them as `status`, `show` and
//! `events2`; nothing is rendered in the daemon.

use std::collections::BTreeMap;

use lockstep_core::device::LostDisk;
use lockstep_core::report as core;
use lockstep_core::state::{ConnState, DiskState, ReplState, Role};
use lockstep_io::tcp::NetNamespace;
use serde::{Deserialize, Serialize};

use crate::names::by_name;

/// Options by name with their values as text, without those that were never given.
pub type OptionTexts = BTreeMap<String, String>;

/// A resource.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResourceReport {
    /// Name.
    pub name: String,
    /// This node's id.
    pub node_id: u8,
    /// Role of this node.
    #[serde(with = "by_name")]
    pub role: Role,
    /// Why IO is suspended, of `user`, `no-data`, `fencing`, `quorum`, in this order.
    pub suspended: Vec<String>,
    /// Requests fail until every opener has closed.
    pub force_io_failures: bool,
    /// A promotion would be tried with a chance of success.
    pub may_promote: bool,
    /// Rates the data of this node for a promotion.
    pub promotion_score: u32,
    /// How the order of writes is kept: `none`, `drain`, `flush` or `barrier`.
    pub write_ordering: String,
    /// Options of the resource.
    pub options: OptionTexts,
    /// Volumes by number.
    pub devices: Vec<DeviceReport>,
    /// Connections by node id.
    pub connections: Vec<ConnectionReport>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Number within the resource.
    pub volume: u16,
    /// Minor number.
    pub minor: u32,
    /// State of the disk.
    #[serde(with = "by_name")]
    pub disk_state: DiskState,
    /// Why the last disk was given up, until one is attached again: `data error`, `metadata error`
    /// or `disk-timeout`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_disk: Option<String>,
    /// Meant to have no disk.
    pub client: bool,
    /// Has quorum, or none is required.
    pub quorum: bool,
    /// Somebody has it open.
    pub open: bool,
    /// Smallest unit of a request in bytes; not for tools.
    #[serde(skip)]
    pub logical_block_bytes: u32,
    /// The attached disk.
    pub disk: Option<DiskReport>,
    /// Options given at `new-minor`.
    pub device_options: OptionTexts,
    /// Options given at `attach` and later.
    pub disk_options: OptionTexts,
    /// Size in sectors.
    pub size_sectors: u64,
    /// Sectors read.
    pub read_sectors: u64,
    /// Sectors written.
    pub written_sectors: u64,
    /// Transactions of the activity log.
    pub al_writes: u64,
    /// Writes of the bitmap.
    pub bm_writes: u64,
    /// Requests of users in flight.
    pub upper_pending: u64,
    /// Requests to the disk in flight.
    pub lower_pending: u64,
    /// Requests wait for the activity log.
    pub al_suspended: bool,
    /// Current UUID.
    pub current_uuid: u64,
    /// History UUIDs, newest first.
    pub history_uuids: Vec<u64>,
    /// Flags of the metadata (metadata.md).
    pub flags: u32,
}

/// The disk behind a volume as it was given at `attach`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskReport {
    /// Data device.
    pub data_path: String,
    /// Metadata device as given; equal to `data_path` with internal metadata.
    pub meta_path: String,
    /// `internal`, `flexible`, or a number.
    pub meta_index: String,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// The peer's node id.
    pub peer_node_id: u8,
    /// The connection's name: usually the peer's host name.
    pub name: String,
    /// Its state.
    #[serde(with = "by_name")]
    pub state: ConnState,
    /// Role of the peer.
    #[serde(with = "by_name")]
    pub role: Role,
    /// The send queue is congested.
    pub congested: bool,
    /// Writes in flight in sectors.
    pub ap_in_flight_sectors: u64,
    /// Resync data in flight in sectors.
    pub rs_in_flight_sectors: u64,
    /// The connection is encrypted.
    pub tls: bool,
    /// Agreed protocol version; 0 before.
    pub protocol_version: u32,
    /// Options.
    pub options: OptionTexts,
    /// Paths in the order of configuration.
    pub paths: Vec<PathReport>,
    /// Volumes with this peer by number.
    pub peer_devices: Vec<PeerDeviceReport>,
}

/// A path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// Own address as `ipv4:ADDR:PORT` or `ipv6:[ADDR]:PORT`.
    pub local: String,
    /// The peer's address.
    pub remote: String,
    /// The connection uses it now.
    pub established: bool,
}

/// A volume with a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerDeviceReport {
    /// Number of the volume.
    pub volume: u16,
    /// Replication state.
    #[serde(with = "by_name")]
    pub repl_state: ReplState,
    /// State of the peer's disk.
    #[serde(with = "by_name")]
    pub disk_state: DiskState,
    /// The peer is meant to have no disk.
    pub client: bool,
    /// Why a resync is paused, of `user`, `peer`, `dependency`, `max-parallel`.
    pub resync_suspended: Vec<String>,
    /// Sectors received.
    pub received_sectors: u64,
    /// Sectors sent.
    pub sent_sectors: u64,
    /// Sectors out of sync.
    pub out_of_sync_sectors: u64,
    /// Requests sent and not answered.
    pub pending: u64,
    /// Requests received and not answered.
    pub unacked: u64,
    /// A resync or verify.
    pub resync: Option<ResyncReport>,
    /// Bitmap UUID of the peer's slot.
    pub bitmap_uuid: u64,
    /// Flags of the peer's slot in the metadata (metadata.md).
    #[serde(default)]
    pub flags: u32,
    /// At the attach the metadata said that there was a Primary while this peer was away.
    #[serde(default)]
    pub degraded: bool,
    /// Options.
    pub options: OptionTexts,
}

/// Progress of a resync or verify.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResyncReport {
    /// Sectors to do at the start.
    pub total_sectors: u64,
    /// Sectors left.
    pub left_sectors: u64,
    /// Sectors that failed.
    pub failed_sectors: u64,
    /// Sectors that were equal.
    pub same_sectors: u64,
    /// Milliseconds since the start.
    pub elapsed_ms: u64,
    /// Of these, milliseconds of pause.
    pub paused_ms: u64,
    /// Speed since the oldest mark in KiB/s.
    pub rate_kib_s: u32,
    /// What was done since the newest mark, at most some seconds ago.
    #[serde(default)]
    pub newest: SinceMark,
    /// What was done since the oldest mark, some 20 seconds ago.
    #[serde(default)]
    pub oldest: SinceMark,
    /// Speed that the controller wants in KiB/s.
    pub wanted_kib_s: u32,
    /// More about an online verify.
    #[serde(default)]
    pub verify: Option<VerifyReport>,
}

/// Progress since a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SinceMark {
    /// Milliseconds since then.
    pub ms: u64,
    /// Sectors done since then.
    pub sectors: u64,
}

/// Where a running online verify stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// First sector.
    pub start_sector: u64,
    /// Where it stops; none is the end of the volume.
    pub stop_sector: Option<u64>,
    /// Next sector.
    pub position_sector: u64,
    /// Sectors that writes kept from being compared.
    pub skipped_sectors: u64,
}

/// What the configuration of a resource adds to the core's snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Configured {
    /// Name of the resource.
    pub name: String,
    /// Options of the resource.
    pub options: OptionTexts,
    /// Volumes by number.
    pub volumes: BTreeMap<u16, ConfiguredVolume>,
    /// Peers by node id.
    pub peers: BTreeMap<u8, ConfiguredPeer>,
}

/// What the configuration adds for a volume.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfiguredVolume {
    /// Minor number.
    pub minor: u32,
    /// Options given at `new-minor`.
    pub device_options: OptionTexts,
    /// Options given at `attach` and later.
    pub disk_options: OptionTexts,
    /// The disk as given at the last `attach`.
    pub disk: Option<DiskReport>,
}

/// What the configuration adds for a peer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConfiguredPeer {
    /// Options of the connection.
    pub options: OptionTexts,
    /// Paths in the order of configuration.
    pub paths: Vec<PathReport>,
    /// The network namespace of all paths, if it is not the daemon's.
    pub namespace: Option<NetNamespace>,
    /// Options per volume.
    pub peer_device_options: BTreeMap<u16, OptionTexts>,
}

impl ConfiguredPeer {
    /// Without a path there is no namespace either: the next path decides.
    pub fn let_go_of_namespace(&mut self) {
        if self.paths.is_empty() {
            self.namespace = None;
        }
    }
}

impl ResourceReport {
    /// Joins what the core says now with what was configured.
    pub fn join(
        configured: &Configured,
        snapshot: &core::Snapshot,
        now: lockstep_core::time::Instant,
    ) -> ResourceReport {
        let suspended = ["user", "no-data", "fencing", "quorum"]
            .iter()
            .filter(|reason| snapshot.suspended.contains(reason))
            .map(|reason| (*reason).to_owned())
            .collect();
        ResourceReport {
            name: configured.name.clone(),
            node_id: snapshot.node_id.0,
            // Who stands by is a Primary for its users, and for whoever asks what is in use here.
            role: match snapshot.stands_by {
                true => Role::Primary,
                false => snapshot.role,
            },
            suspended,
            force_io_failures: snapshot.force_io_failures,
            may_promote: snapshot.may_promote,
            promotion_score: snapshot.promotion_score,
            write_ordering: write_ordering(configured).to_owned(),
            options: configured.options.clone(),
            devices: snapshot
                .devices
                .iter()
                .map(|device| join_device(configured.volumes.get(&device.volume.0), device))
                .collect(),
            connections: snapshot
                .connections
                .iter()
                .map(|conn| join_connection(configured.peers.get(&conn.peer.0), conn, now))
                .collect(),
        }
    }
}

/// `flush` unless every disk has its flushes switched off.
fn write_ordering(configured: &Configured) -> &'static str {
    let off = |volume: &ConfiguredVolume| {
        volume.disk_options.get("disk-flushes").map(String::as_str) == Some("no")
    };
    let mut disks = configured.volumes.values().filter(|v| v.disk.is_some());
    if disks.clone().next().is_some() && disks.all(off) {
        "drain"
    } else {
        "flush"
    }
}

/// Why a resync is paused, in the tools' words and order.
fn suspension(reasons: &[&str]) -> Vec<String> {
    let words = [
        ("user", &["user"][..]),
        ("peer", &["peer"]),
        ("dependency", &["dependency", "connection dependency"]),
        ("max-parallel", &["max-parallel"]),
    ];
    words
        .iter()
        .filter(|(_, of)| of.iter().any(|reason| reasons.contains(reason)))
        .map(|(word, _)| (*word).to_owned())
        .collect()
}

/// Disk options with the size that holds since the last `resize` of any node.
fn with_size(texts: &OptionTexts, limit_sectors: Option<u64>) -> OptionTexts {
    let mut texts = texts.clone();
    match limit_sectors {
        None => None,
        Some(0) => texts.remove("size"),
        Some(limit) => texts.insert("size".to_owned(), format!("{limit}s")),
    };
    texts
}

fn join_device(configured: Option<&ConfiguredVolume>, device: &core::DeviceReport) -> DeviceReport {
    let empty = ConfiguredVolume::default();
    let configured = configured.unwrap_or(&empty);
    DeviceReport {
        volume: device.volume.0,
        minor: device.minor,
        disk_state: device.disk_state,
        lost_disk: device.lost_disk.map(|why| {
            let text = match why {
                LostDisk::Data => "data error",
                LostDisk::Meta => "metadata error",
                LostDisk::Timeout => "disk-timeout",
            };
            text.to_owned()
        }),
        client: device.client,
        quorum: device.quorum,
        open: device.open,
        disk: (device.disk_state != DiskState::Diskless)
            .then(|| configured.disk.clone())
            .flatten(),
        device_options: configured.device_options.clone(),
        disk_options: with_size(&configured.disk_options, device.size_limit_sectors),
        logical_block_bytes: device.logical_block_bytes,
        size_sectors: device.size_sectors,
        read_sectors: device.read_sectors,
        written_sectors: device.written_sectors,
        al_writes: device.al_writes,
        bm_writes: device.bm_writes,
        upper_pending: device.upper_pending,
        lower_pending: device.lower_pending,
        al_suspended: device.al_suspended,
        current_uuid: device.current_uuid.0,
        history_uuids: device.history_uuids.iter().map(|uuid| uuid.0).collect(),
        flags: device.flags,
    }
}

fn join_connection(
    configured: Option<&ConfiguredPeer>,
    conn: &core::ConnectionReport,
    now: lockstep_core::time::Instant,
) -> ConnectionReport {
    let empty = ConfiguredPeer::default();
    let configured = configured.unwrap_or(&empty);
    ConnectionReport {
        peer_node_id: conn.peer.0,
        name: conn.name.clone(),
        state: conn.state,
        role: conn.role,
        congested: conn.congested,
        ap_in_flight_sectors: conn.ap_in_flight_sectors,
        rs_in_flight_sectors: conn.rs_in_flight_sectors,
        tls: false,
        protocol_version: conn.protocol_version,
        options: crate::options::with_shared(&configured.options, &conn.shared),
        // Which one is in use is known to the shard alone.
        paths: configured.paths.clone(),
        peer_devices: conn
            .peer_devices
            .iter()
            .map(|pd| PeerDeviceReport {
                volume: pd.volume.0,
                repl_state: pd.repl_state,
                disk_state: pd.disk_state,
                client: pd.client,
                resync_suspended: suspension(&pd.resync_suspended),
                received_sectors: pd.received_sectors,
                sent_sectors: pd.sent_sectors,
                out_of_sync_sectors: pd.out_of_sync_sectors,
                pending: pd.pending,
                unacked: pd.unacked,
                resync: pd
                    .resync
                    .as_ref()
                    .map(|resync| join_resync(resync, pd.verify.as_ref(), now)),
                bitmap_uuid: pd.bitmap_uuid.0,
                flags: pd.flags,
                degraded: pd.degraded,
                options: configured
                    .peer_device_options
                    .get(&pd.volume.0)
                    .cloned()
                    .unwrap_or_default(),
            })
            .collect(),
    }
}

fn join_resync(
    resync: &core::ResyncReport,
    verify: Option<&core::VerifyReport>,
    now: lockstep_core::time::Instant,
) -> ResyncReport {
    ResyncReport {
        total_sectors: resync.total_sectors,
        left_sectors: resync.left_sectors,
        failed_sectors: resync.failed_sectors,
        same_sectors: resync.same_sectors,
        elapsed_ms: (now - resync.started).as_millis(),
        paused_ms: resync.paused_ns / 1_000_000,
        // Until the marks are known: the speed so far.
        rate_kib_s: resync.rate_kib_s,
        newest: SinceMark::default(),
        oldest: SinceMark::default(),
        wanted_kib_s: resync.wanted_kib_s,
        verify: verify.map(|v| VerifyReport {
            start_sector: v.start_sector,
            stop_sector: v.stop_sector,
            position_sector: v.position_sector,
            skipped_sectors: v.skipped_sectors,
        }),
    }
}
