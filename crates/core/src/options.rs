//! The options that the core obeys, with DRBD's names, units and defaults (config-and-cli.md, 3).
//!
//! Ranges are checked by the option table in `format` before a value gets here; the driver maps
//! table values to these fields by name.

use alloc::string::String;
use alloc::vec::Vec;

/// `protocol`: when a write counts as done (semantics.md, 15.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// Local disk and local send queue.
    A,
    /// Local disk and the peer's memory.
    B,
    /// Local disk and the peer's disk.
    C,
}

/// `after-sb-0pri`, `after-sb-1pri`, `after-sb-2pri` and `rr-conflict` (semantics.md, 13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterSplitBrain {
    /// Stay apart.
    Disconnect,
    /// The node that was Primary first gives up its changes.
    DiscardYoungerPrimary,
    /// The node that was Primary last gives up its changes.
    DiscardOlderPrimary,
    /// A node without changes gives up.
    DiscardZeroChanges,
    /// The node with fewer changed blocks gives up.
    DiscardLeastChanges,
    /// This node gives up.
    DiscardLocal,
    /// The peer gives up.
    DiscardRemote,
    /// What `after-sb-0pri` says if it picks the Secondary, else disconnect.
    Consensus,
    /// The Secondary gives up.
    DiscardSecondary,
    /// Run the `pri-lost-after-sb` handler on the Primary that lost.
    CallPriLostAfterSb,
    /// Follow `after-sb-0pri` even if it makes a Primary the loser.
    ViolentlyAs0p,
    /// `rr-conflict`: retry the connection.
    RetryConnect,
    /// `rr-conflict`: decide by the newest UUIDs automatically.
    AutoDiscard,
}

/// `fencing`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fencing {
    /// No fencing.
    DontCare,
    /// The `fence-peer` handler is called; IO goes on meanwhile.
    ResourceOnly,
    /// IO is frozen until the handler has answered.
    ResourceAndStonith,
}

/// `on-io-error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnIoError {
    /// Become Inconsistent; the error goes up only if no peer can serve.
    PassOn,
    /// Run the `local-io-error` handler, then detach.
    CallLocalIoError,
    /// Drop the disk and go on diskless.
    Detach,
}

/// `quorum` and `quorum-minimum-redundancy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quorum {
    /// Not enforced.
    Off,
    /// More than half.
    Majority,
    /// Every node.
    All,
    /// At least so many.
    Number(u8),
}

/// `on-no-quorum` and `on-no-data-accessible`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLoss {
    /// Requests fail.
    IoError,
    /// Requests wait.
    SuspendIo,
}

/// `read-balancing`: which replica serves a read that the local disk could serve
/// (semantics.md, 16.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadBalancing {
    /// The local disk.
    PreferLocal,
    /// A peer.
    PreferRemote,
    /// In turn.
    RoundRobin,
    /// Where fewer requests wait.
    LeastPending,
    /// A peer if the local disk has a queue and the peer is expected to answer sooner.
    WhenCongestedRemote,
    /// By stripes of 2 to the power of so many bytes, 15 to 20.
    Striping(u8),
}

/// `on-congestion`: what happens when a protocol A peer is too slow (semantics.md, 17).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCongestion {
    /// Writes go on being sent, and wait where the network stack lets them.
    Block,
    /// The peer is only told what it misses, and resynced later.
    PullAhead,
    /// The connection is given up.
    Disconnect,
}

/// `net` section, one set per connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// `protocol`, default C.
    pub protocol: Protocol,
    /// `timeout` in 0.1 s, default 60.
    pub timeout_tenths: u32,
    /// `ping-int` in seconds, default 10.
    pub ping_int_s: u32,
    /// `ping-timeout` in 0.1 s, default 5.
    pub ping_timeout_tenths: u32,
    /// `connect-int` in seconds, default 10.
    pub connect_int_s: u32,
    /// `ko-count`, default 7; 0 turns it off.
    pub ko_count: u32,
    /// `max-buffers` in 4 KiB pages, default 2048.
    pub max_buffers: u32,
    /// `max-epoch-size` in requests, default 2048.
    pub max_epoch_size: u32,
    /// `shared-secret`; authentication needs it and `cram-hmac-alg`.
    pub shared_secret: Option<String>,
    /// `cram-hmac-alg` (`sha1`, `sha256`, `md5`, …).
    pub cram_hmac_alg: Option<String>,
    /// `data-integrity-alg`.
    pub data_integrity_alg: Option<String>,
    /// `csums-alg`.
    pub csums_alg: Option<String>,
    /// `csums-after-crash-only`: only where a Primary has crashed.
    pub csums_after_crash_only: bool,
    /// `verify-alg`.
    pub verify_alg: Option<String>,
    /// `use-rle`, default yes.
    pub use_rle: bool,
    /// `allow-two-primaries`, default no.
    pub allow_two_primaries: bool,
    /// `after-sb-0pri`, default disconnect.
    pub after_sb_0pri: AfterSplitBrain,
    /// `after-sb-1pri`, default disconnect.
    pub after_sb_1pri: AfterSplitBrain,
    /// `after-sb-2pri`, default disconnect.
    pub after_sb_2pri: AfterSplitBrain,
    /// `rr-conflict`, default disconnect.
    pub rr_conflict: AfterSplitBrain,
    /// `always-asbp`, default no.
    pub always_asbp: bool,
    /// `fencing`, default dont-care.
    pub fencing: Fencing,
    /// `load-balance-paths`, default no: all paths are used at once. Fixed when the peer is made.
    pub load_balance_paths: bool,
    /// `_name`: the peer's host name.
    pub peer_name: String,
    /// `allow-remote-read`, default yes.
    pub allow_remote_read: bool,
    /// `socket-check-timeout` in 0.1 s, default 0 (the ping timeout).
    pub socket_check_timeout_tenths: u32,
    /// `on-congestion`, default block.
    pub on_congestion: OnCongestion,
    /// `congestion-fill` in sectors, default 0 (no limit).
    pub congestion_fill_sectors: u64,
    /// `congestion-extents`, default 1237; 0 for no limit.
    pub congestion_extents: u32,
}

impl Default for NetOptions {
    fn default() -> Self {
        NetOptions {
            protocol: Protocol::C,
            timeout_tenths: 60,
            ping_int_s: 10,
            ping_timeout_tenths: 5,
            connect_int_s: 10,
            ko_count: 7,
            max_buffers: 2048,
            max_epoch_size: 2048,
            shared_secret: None,
            cram_hmac_alg: None,
            data_integrity_alg: None,
            csums_alg: None,
            csums_after_crash_only: false,
            verify_alg: None,
            use_rle: true,
            allow_two_primaries: false,
            after_sb_0pri: AfterSplitBrain::Disconnect,
            after_sb_1pri: AfterSplitBrain::Disconnect,
            after_sb_2pri: AfterSplitBrain::Disconnect,
            rr_conflict: AfterSplitBrain::Disconnect,
            always_asbp: false,
            fencing: Fencing::DontCare,
            load_balance_paths: false,
            peer_name: String::new(),
            allow_remote_read: true,
            socket_check_timeout_tenths: 0,
            on_congestion: OnCongestion::Block,
            congestion_fill_sectors: 0,
            congestion_extents: 1237,
        }
    }
}

/// `disk` section, one set per volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// `size` in sectors; `None` is the whole disk.
    pub size_sectors: Option<u64>,
    /// `on-io-error`, default detach.
    pub on_io_error: OnIoError,
    /// `disk-barrier`, default no (accepted, without effect: flushes order the data).
    pub disk_barrier: bool,
    /// `disk-flushes`, default yes.
    pub disk_flushes: bool,
    /// `md-flushes`, default yes.
    pub md_flushes: bool,
    /// `al-extents`, default 1237.
    pub al_extents: u32,
    /// `al-updates`, default yes.
    pub al_updates: bool,
    /// `discard-zeroes-if-aligned`, default yes.
    pub discard_zeroes_if_aligned: bool,
    /// `disable-write-same`, default no.
    pub disable_write_same: bool,
    /// `disk-timeout` in 0.1 s, default 0 (off).
    pub disk_timeout_tenths: u32,
    /// `rs-discard-granularity` in bytes, default 0.
    pub rs_discard_granularity_bytes: u32,
    /// `read-balancing`, default prefer-local.
    pub read_balancing: ReadBalancing,
    /// `bitmap`, default yes. A disk without one has no peers, and everything is marked for those to come.
    pub bitmap: bool,
}

impl Default for DiskOptions {
    fn default() -> Self {
        DiskOptions {
            size_sectors: None,
            on_io_error: OnIoError::Detach,
            disk_barrier: false,
            disk_flushes: true,
            md_flushes: true,
            al_extents: 1237,
            al_updates: true,
            discard_zeroes_if_aligned: true,
            disable_write_same: false,
            disk_timeout_tenths: 0,
            rs_discard_granularity_bytes: 0,
            read_balancing: ReadBalancing::PreferLocal,
            bitmap: true,
        }
    }
}

/// Peer-device options of the `disk` section, one set per volume and peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerDeviceOptions {
    /// `resync-rate` in KiB/s, default 250; used when `c-plan-ahead` is 0.
    pub resync_rate_kib_s: u32,
    /// `c-plan-ahead` in 0.1 s, default 20; 0 turns the controller off.
    pub c_plan_ahead_tenths: u32,
    /// `c-delay-target` in 0.1 s, default 10.
    pub c_delay_target_tenths: u32,
    /// `c-fill-target` in sectors, default 100 (50 KiB).
    pub c_fill_target_sectors: u32,
    /// `c-max-rate` in KiB/s, default 102400.
    pub c_max_rate_kib_s: u32,
    /// `c-min-rate` in KiB/s, default 250.
    pub c_min_rate_kib_s: u32,
    /// `bitmap`, default yes: this node keeps a bitmap for the peer.
    pub bitmap: bool,
    /// `peer-tiebreaker`, default yes.
    pub peer_tiebreaker: bool,
    /// `resync-without-replication`, default yes: while this node is copied to, it is told of
    /// writes only, and copies them, too (semantics.md, 19.3).
    pub resync_without_replication: bool,
}

impl Default for PeerDeviceOptions {
    fn default() -> Self {
        PeerDeviceOptions {
            resync_rate_kib_s: 250,
            c_plan_ahead_tenths: 20,
            c_delay_target_tenths: 10,
            c_fill_target_sectors: 100,
            c_max_rate_kib_s: 102_400,
            c_min_rate_kib_s: 250,
            bitmap: true,
            peer_tiebreaker: true,
            resync_without_replication: true,
        }
    }
}

/// `on-suspended-primary-outdated`: what a frozen Primary does when a peer has newer data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnSuspendedPrimaryOutdated {
    /// `disconnect`: it refuses the connection and stays frozen.
    #[default]
    Disconnect,
    /// `force-secondary`: it becomes Secondary, and its waiting requests fail.
    ForceSecondary,
}

/// `options` section, one set per resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceOptions {
    /// `auto-promote`, default yes.
    pub auto_promote: bool,
    /// `auto-promote-timeout` in 0.1 s, default 20.
    pub auto_promote_timeout_tenths: u32,
    /// `quorum`, default off.
    pub quorum: Quorum,
    /// `quorum-minimum-redundancy`, default off.
    pub quorum_minimum_redundancy: Quorum,
    /// `on-no-quorum`, default suspend-io.
    pub on_no_quorum: OnLoss,
    /// `on-no-data-accessible`, default io-error.
    pub on_no_data_accessible: OnLoss,
    /// `on-suspended-primary-outdated`, default disconnect.
    pub on_suspended_primary_outdated: OnSuspendedPrimaryOutdated,
    /// `twopc-timeout` in 0.1 s, default 300.
    pub twopc_timeout_tenths: u32,
    /// `twopc-retry-timeout` in 0.1 s, default 1.
    pub twopc_retry_timeout_tenths: u32,
    /// `nr-requests`, default 8000: application requests in flight per direction.
    pub nr_requests: u32,
    /// `peer-ack-window` in sectors, default 4096 (2 MiB).
    pub peer_ack_window_sectors: u32,
    /// `peer-ack-delay` in milliseconds, default 100.
    pub peer_ack_delay_ms: u32,
    /// `drbd8-api-compatibility`, default no: the node was given no id, as in DRBD 8.4, and a peer
    /// that has chosen the same one by itself is spoken to in the dialect that has no ids.
    pub unnumbered: bool,
    /// Newest protocol version that is offered, default 124; lower ones are for tests.
    pub protocol_max: u32,
    /// Whether the private bit is not offered, so that the peer is treated as a kernel of DRBD 9. Default no; for
    /// tests.
    pub kernel_rules: bool,
    /// Handlers that the configuration names (`fence-peer`, `split-brain`, …); others count as
    /// succeeded at once.
    pub handlers: Vec<String>,
}

impl Default for ResourceOptions {
    fn default() -> Self {
        ResourceOptions {
            auto_promote: true,
            auto_promote_timeout_tenths: 20,
            quorum: Quorum::Off,
            quorum_minimum_redundancy: Quorum::Off,
            on_no_quorum: OnLoss::SuspendIo,
            on_no_data_accessible: OnLoss::IoError,
            on_suspended_primary_outdated: OnSuspendedPrimaryOutdated::Disconnect,
            twopc_timeout_tenths: 300,
            twopc_retry_timeout_tenths: 1,
            nr_requests: 8000,
            peer_ack_window_sectors: 4096,
            peer_ack_delay_ms: 100,
            unnumbered: false,
            protocol_max: lockstep_format::wire::PROTOCOL_MAX,
            kernel_rules: false,
            handlers: Vec::new(),
        }
    }
}
