//! Options as typed structures with DRBD's defaults, for the replication core.
//!
//! Field names carry their unit. Names, ranges and defaults are not repeated here: they come from
//! the option table, and a test holds that both list the same options in the same order.

use alloc::string::String;
use alloc::vec::Vec;

use super::{OptionSpec, OptionValue, Set, Symbol, ValueError, all, find};

/// Why [`NetOptions::set`] and its siblings refuse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// The set has no option of that name.
    #[error("unknown option '{name}'")]
    UnknownName {
        /// The name as given.
        name: String,
    },
    /// The value does not fit the option.
    #[error("while parsing value ('{value}') for {name}. Value is {source}.")]
    Value {
        /// Name of the option.
        name: &'static str,
        /// The value as given.
        value: String,
        /// What is wrong with it.
        source: ValueError,
    },
}

/// Defines an enumeration and the symbol list that the option table uses.
macro_rules! symbols {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$vmeta:meta])* $variant:ident = $code:literal $word:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u32)]
        pub enum $name { $($(#[$vmeta])* $variant = $code,)* }

        impl $name {
            /// The words with the numbers of the kernel's interface, in the order tools print them.
            pub const SYMBOLS: &'static [Symbol] =
                &[$(Symbol { name: $word, code: $code },)*];

            /// The word of the configuration file.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }

            /// The value with this number in the kernel's interface.
            pub const fn from_code(code: u32) -> Option<Self> {
                match code { $($code => Some($name::$variant),)* _ => None }
            }
        }

        impl Field for $name {
            fn from_value(value: &OptionValue) -> Option<Self> {
                match value {
                    OptionValue::Symbol(symbol) => $name::from_code(symbol.code),
                    _ => None,
                }
            }
            fn to_value(&self, spec: &OptionSpec) -> OptionValue {
                spec.parse(self.name()).unwrap_or_else(|_| spec.default())
            }
        }
    };
}

/// A field of an option structure: converts from and to checked values.
trait Field: Sized {
    /// Takes a value that [`OptionSpec::parse`] or [`OptionSpec::default`] made.
    fn from_value(value: &OptionValue) -> Option<Self>;
    /// The value as the table stores it.
    fn to_value(&self, spec: &OptionSpec) -> OptionValue;
}

impl Field for bool {
    fn from_value(value: &OptionValue) -> Option<Self> {
        match value {
            OptionValue::Bool(yes) => Some(*yes),
            _ => None,
        }
    }
    fn to_value(&self, _: &OptionSpec) -> OptionValue {
        OptionValue::Bool(*self)
    }
}

impl Field for String {
    fn from_value(value: &OptionValue) -> Option<Self> {
        match value {
            OptionValue::Text(text) => Some(text.clone()),
            _ => None,
        }
    }
    fn to_value(&self, _: &OptionSpec) -> OptionValue {
        OptionValue::Text(self.clone())
    }
}

impl Field for u32 {
    fn from_value(value: &OptionValue) -> Option<Self> {
        u32::try_from(value.number()?).ok()
    }
    fn to_value(&self, spec: &OptionSpec) -> OptionValue {
        number(i64::from(*self), spec)
    }
}

impl Field for u64 {
    fn from_value(value: &OptionValue) -> Option<Self> {
        u64::try_from(value.number()?).ok()
    }
    fn to_value(&self, spec: &OptionSpec) -> OptionValue {
        number(i64::try_from(*self).unwrap_or(i64::MAX), spec)
    }
}

/// A number whose default lies outside its range and means "not set".
impl Field for Option<u32> {
    fn from_value(value: &OptionValue) -> Option<Self> {
        match value.number()? {
            NOT_CONFIGURED => Some(None),
            number => Some(u32::try_from(number).ok()),
        }
    }
    fn to_value(&self, spec: &OptionSpec) -> OptionValue {
        match self {
            Some(set) => number(i64::from(*set), spec),
            None => spec.default(),
        }
    }
}

/// A number in the scale of its option.
fn number(number: i64, spec: &OptionSpec) -> OptionValue {
    let scale = match spec.kind {
        super::Kind::Number { scale, .. } => scale,
        _ => super::Scale::One,
    };
    OptionValue::Number { number, scale }
}

/// The number with which the kernel's interface says "not configured" for unsigned options.
const NOT_CONFIGURED: i64 = u32::MAX as i64;

symbols! {
    /// When a write counts as complete on the peer.
    Protocol {
        /// Locally written and in the send buffer.
        A = 1 "A",
        /// Additionally received by the peer.
        B = 2 "B",
        /// Additionally written by the peer.
        C = 3 "C",
    }
}
symbols! {
    /// Automatic recovery from split brain when no node is primary.
    AfterSb0pri {
        /// Do not resolve: disconnect.
        Disconnect = 0 "disconnect",
        /// The node that became primary later loses its changes.
        DiscardYoungerPrimary = 1 "discard-younger-primary",
        /// The node that became primary earlier loses its changes.
        DiscardOlderPrimary = 2 "discard-older-primary",
        /// Only when one node has no changes: it loses nothing.
        DiscardZeroChanges = 3 "discard-zero-changes",
        /// The node with fewer changed blocks loses them.
        DiscardLeastChanges = 4 "discard-least-changes",
        /// This node loses its changes.
        DiscardLocal = 5 "discard-local",
        /// The peer loses its changes.
        DiscardRemote = 6 "discard-remote",
    }
}
symbols! {
    /// Automatic recovery from split brain when one node is primary.
    AfterSb1pri {
        /// Do not resolve: disconnect.
        Disconnect = 0 "disconnect",
        /// The secondary loses its changes when the rule for no primary says so too.
        Consensus = 7 "consensus",
        /// The secondary loses its changes.
        DiscardSecondary = 8 "discard-secondary",
        /// The rule for no primary decides; a primary that loses calls its handler.
        CallPriLostAfterSb = 9 "call-pri-lost-after-sb",
        /// The rule for no primary decides, even against the primary.
        ViolentlyAs0p = 10 "violently-as0p",
    }
}
symbols! {
    /// Automatic recovery from split brain when both nodes are primary.
    AfterSb2pri {
        /// Do not resolve: disconnect.
        Disconnect = 0 "disconnect",
        /// The rule for no primary decides; the primary that loses calls its handler.
        CallPriLostAfterSb = 9 "call-pri-lost-after-sb",
        /// The rule for no primary decides, even against a primary.
        ViolentlyAs0p = 10 "violently-as0p",
    }
}
symbols! {
    /// What happens when the resync direction contradicts the roles.
    RrConflict {
        /// Disconnect.
        Disconnect = 0 "disconnect",
        /// The primary that would become sync target calls its handler.
        CallPriLost = 9 "call-pri-lost",
        /// Resync towards the primary.
        Violently = 10 "violently",
        /// Disconnect and try again.
        RetryConnect = 11 "retry-connect",
        /// The primary keeps its data where the generations allow it.
        AutoDiscard = 12 "auto-discard",
    }
}
symbols! {
    /// What a connection does when its send queue is full.
    OnCongestion {
        /// Writes wait.
        Block = 0 "block",
        /// The peer falls behind and is resynchronised later.
        PullAhead = 1 "pull-ahead",
        /// Disconnect.
        Disconnect = 2 "disconnect",
    }
}
symbols! {
    /// Fencing policy.
    Fencing {
        /// No fencing.
        DontCare = 0 "dont-care",
        /// Call the fence-peer handler.
        ResourceOnly = 1 "resource-only",
        /// Freeze I/O and call the fence-peer handler.
        ResourceAndStonith = 2 "resource-and-stonith",
    }
}
symbols! {
    /// What happens after an error of the local disk.
    OnIoError {
        /// Report write errors upwards.
        PassOn = 0 "pass_on",
        /// Call the local-io-error handler, then detach.
        CallLocalIoError = 1 "call-local-io-error",
        /// Go on without the disk.
        Detach = 2 "detach",
    }
}
symbols! {
    /// Where reads go when several replicas are up to date.
    ReadBalancing {
        /// The local disk.
        PreferLocal = 0 "prefer-local",
        /// A peer.
        PreferRemote = 1 "prefer-remote",
        /// In turn.
        RoundRobin = 2 "round-robin",
        /// Where fewer requests wait.
        LeastPending = 3 "least-pending",
        /// The local disk unless it is congested.
        WhenCongestedRemote = 4 "when-congested-remote",
        /// In stripes of 32 KiB.
        Striping32K = 5 "32K-striping",
        /// In stripes of 64 KiB.
        Striping64K = 6 "64K-striping",
        /// In stripes of 128 KiB.
        Striping128K = 7 "128K-striping",
        /// In stripes of 256 KiB.
        Striping256K = 8 "256K-striping",
        /// In stripes of 512 KiB.
        Striping512K = 9 "512K-striping",
        /// In stripes of 1 MiB.
        Striping1M = 10 "1M-striping",
    }
}
symbols! {
    /// What happens to requests when no up-to-date data can be reached.
    OnNoDataAccessible {
        /// They fail.
        IoError = 0 "io-error",
        /// They wait.
        SuspendIo = 1 "suspend-io",
    }
}
symbols! {
    /// What happens to requests without quorum.
    OnNoQuorum {
        /// They fail.
        IoError = 0 "io-error",
        /// They wait.
        SuspendIo = 1 "suspend-io",
    }
}
symbols! {
    /// What a suspended primary does when a peer has newer data.
    OnSuspendedPrimaryOutdated {
        /// Stay primary and disconnect.
        Disconnect = 0 "disconnect",
        /// Become secondary; waiting requests fail.
        ForceSecondary = 1 "force-secondary",
    }
}

/// How many nodes must be reachable before data may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quorum {
    /// No rule.
    Off,
    /// More than half.
    Majority,
    /// All.
    All,
    /// At least this many, 1 to 32.
    Count(u8),
}

impl Quorum {
    /// The words with the numbers of the kernel's interface.
    pub const SYMBOLS: &'static [Symbol] = &[
        Symbol {
            name: "off",
            code: 0,
        },
        Symbol {
            name: "majority",
            code: 1024,
        },
        Symbol {
            name: "all",
            code: 1025,
        },
    ];

    /// The number of the kernel's interface.
    pub const fn code(self) -> u32 {
        match self {
            Quorum::Off => 0,
            Quorum::Majority => 1024,
            Quorum::All => 1025,
            Quorum::Count(count) => count as u32,
        }
    }
}

impl Field for Quorum {
    fn from_value(value: &OptionValue) -> Option<Self> {
        match value {
            OptionValue::Symbol(symbol) => match symbol.code {
                0 => Some(Quorum::Off),
                1024 => Some(Quorum::Majority),
                1025 => Some(Quorum::All),
                _ => None,
            },
            _ => Some(Quorum::Count(u8::try_from(value.number()?).ok()?)),
        }
    }
    fn to_value(&self, spec: &OptionSpec) -> OptionValue {
        match self {
            Quorum::Count(count) => number(i64::from(*count), spec),
            Quorum::Off | Quorum::Majority | Quorum::All => {
                let code = self.code();
                let symbol = Quorum::SYMBOLS.iter().find(|symbol| symbol.code == code);
                symbol.map_or_else(|| spec.default(), |symbol| OptionValue::Symbol(*symbol))
            }
        }
    }
}

/// Defines an option structure over one set of the table.
macro_rules! options {
    ($(#[$meta:meta])* $name:ident of $set:expr, {
        $($(#[$fmeta:meta])* $option:literal $field:ident: $type:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $type,)* }

        impl Default for $name {
            /// The values that hold when nothing is configured, from the option table.
            fn default() -> Self {
                $name { $($field: initial($set, $option),)* }
            }
        }

        impl $name {
            /// The set of the option table behind this structure.
            pub const SET: Set = $set;

            /// Checks and stores the value of one option, given by its DRBD name.
            ///
            /// On error nothing is changed.
            pub fn set(&mut self, name: &str, value: &str) -> Result<(), SetError> {
                let (spec, value) = checked(Self::SET, name, value)?;
                self.store(spec, &value);
                Ok(())
            }

            /// Stores a value that [`OptionSpec::parse`] has already checked.
            pub fn store(&mut self, spec: &OptionSpec, value: &OptionValue) {
                match spec.name {
                    $($option => {
                        if let Some(value) = Field::from_value(value) {
                            self.$field = value;
                        }
                    })*
                    _ => {}
                }
            }

            /// The current value of one option, given by its DRBD name.
            pub fn value(&self, name: &str) -> Option<OptionValue> {
                let spec = find(Self::SET, name)?;
                match spec.name {
                    $($option => Some(Field::to_value(&self.$field, spec)),)*
                    _ => None,
                }
            }

            /// All options with their current values, in the order in which tools print them.
            pub fn values(&self) -> Vec<(&'static OptionSpec, OptionValue)> {
                all(Self::SET)
                    .iter()
                    .filter_map(|spec| Some((spec, self.value(spec.name)?)))
                    .collect()
            }
        }
    };
}

/// The default of an option as a field's type.
fn initial<T: Field>(set: Set, name: &str) -> T {
    find(set, name)
        .and_then(|spec| T::from_value(&spec.default()))
        .expect("a test holds each field against its row of the option table")
}

/// Looks an option up and checks a value.
fn checked(
    set: Set,
    name: &str,
    text: &str,
) -> Result<(&'static OptionSpec, OptionValue), SetError> {
    let spec = find(set, name).ok_or_else(|| SetError::UnknownName { name: name.into() })?;
    match spec.parse(text) {
        Ok(value) => Ok((spec, value)),
        Err(source) => Err(SetError::Value {
            name: spec.name,
            value: text.into(),
            source,
        }),
    }
}

options! {
    /// Options of a connection.
    NetOptions of Set::Net, {
        /// `tcp`, `rdma`, `lb-tcp`; empty means tcp.
        "transport" transport: String,
        /// Whether all paths carry data at once.
        "load-balance-paths" load_balance_paths: bool,
        /// When a write counts as complete.
        "protocol" protocol: Protocol,
        /// Longest wait for an answer of the peer, in tenths of a second.
        "timeout" timeout_tenths_s: u32,
        /// Most write requests between two barriers.
        "max-epoch-size" max_epoch_size_requests: u32,
        /// Pause between two tries to connect, in seconds.
        "connect-int" connect_int_s: u32,
        /// Idle time before a ping, in seconds.
        "ping-int" ping_int_s: u32,
        /// Send buffer in bytes, 0 for automatic.
        "sndbuf-size" sndbuf_size_bytes: u32,
        /// Receive buffer in bytes, 0 for automatic.
        "rcvbuf-size" rcvbuf_size_bytes: u32,
        /// Time-outs that a write may take before the peer is dropped, 0 for any number.
        "ko-count" ko_count: u32,
        /// Whether both nodes may be primary.
        "allow-two-primaries" allow_two_primaries: bool,
        /// Digest for the authentication of peers, empty for none.
        "cram-hmac-alg" cram_hmac_alg: String,
        /// Secret of that authentication. Never to be logged or reported.
        "shared-secret" shared_secret: String,
        /// Split brain without a primary.
        "after-sb-0pri" after_sb_0pri: AfterSb0pri,
        /// Split brain with one primary.
        "after-sb-1pri" after_sb_1pri: AfterSb1pri,
        /// Split brain with two primaries.
        "after-sb-2pri" after_sb_2pri: AfterSb2pri,
        /// Whether the three rules hold even when the data generations tell who is right.
        "always-asbp" always_asbp: bool,
        /// Resync direction against the roles.
        "rr-conflict" rr_conflict: RrConflict,
        /// Longest wait for the answer to a ping, in tenths of a second.
        "ping-timeout" ping_timeout_tenths_s: u32,
        /// Digest over the data of each packet, empty for none.
        "data-integrity-alg" data_integrity_alg: String,
        /// Whether small packets are held back until a batch is complete.
        "tcp-cork" tcp_cork: bool,
        /// What happens when the send queue is full.
        "on-congestion" on_congestion: OnCongestion,
        /// Data in flight that counts as congestion, in sectors; 0 for no limit.
        "congestion-fill" congestion_fill_sectors: u32,
        /// Active activity-log extents that count as congestion.
        "congestion-extents" congestion_extents: u32,
        /// Digest for resync by checksum, empty for none.
        "csums-alg" csums_alg: String,
        /// Whether that is used only after a crash of the primary.
        "csums-after-crash-only" csums_after_crash_only: bool,
        /// Digest for online verify, empty for none.
        "verify-alg" verify_alg: String,
        /// Whether bitmaps are sent compressed.
        "use-rle" use_rle: bool,
        /// Wait for a new socket to prove alive, in tenths of a second; 0 means `ping-timeout`.
        "socket-check-timeout" socket_check_timeout_tenths_s: u32,
        /// Fencing policy.
        "fencing" fencing: Fencing,
        /// Most pages of 4 KiB in receive buffers.
        "max-buffers" max_buffers_pages: u32,
        /// Whether the peer may be read from.
        "allow-remote-read" allow_remote_read: bool,
        /// Whether the connection is encrypted.
        "tls" tls: bool,
        /// Key ring with trusted certificates, empty for unset.
        "tls-keyring" tls_keyring: String,
        /// Private key, empty for unset.
        "tls-privkey" tls_privkey: String,
        /// Certificate, empty for unset.
        "tls-certificate" tls_certificate: String,
        /// Receive buffer of the RDMA control stream in bytes, 0 for automatic.
        "rdma-ctrl-rcvbuf-size" rdma_ctrl_rcvbuf_size_bytes: u32,
        /// Send buffer of the RDMA control stream in bytes, 0 for automatic.
        "rdma-ctrl-sndbuf-size" rdma_ctrl_sndbuf_size_bytes: u32,
        /// Name of the connection.
        "_name" connection_name: String,
    }
}

options! {
    /// Options of an attached disk.
    DiskOptions of Set::Disk, {
        /// Size to use in sectors, 0 for all that the disk offers.
        "size" size_sectors: u64,
        /// What follows an error of the disk.
        "on-io-error" on_io_error: OnIoError,
        /// Whether write barriers order writes.
        "disk-barrier" disk_barrier: bool,
        /// Whether cache flushes order writes.
        "disk-flushes" disk_flushes: bool,
        /// Whether draining the queue orders writes.
        "disk-drain" disk_drain: bool,
        /// Whether metadata writes are flushed.
        "md-flushes" md_flushes: bool,
        /// Minor whose resync has to end before ours starts.
        "resync-after" resync_after_minor: ResyncAfter,
        /// Extents of the activity log.
        "al-extents" al_extents: u32,
        /// Whether the activity log is written at all.
        "al-updates" al_updates: bool,
        /// Whether discards are passed on to disks whose discarded blocks read as zeroes.
        "discard-zeroes-if-aligned" discard_zeroes_if_aligned: bool,
        /// Whether WRITE SAME is not offered.
        "disable-write-same" disable_write_same: bool,
        /// Longest wait for the disk in tenths of a second, 0 for ever.
        "disk-timeout" disk_timeout_tenths_s: u32,
        /// Where reads go.
        "read-balancing" read_balancing: ReadBalancing,
        /// Size in bytes of the discards that stand for zeroes in a resync, 0 for none.
        "rs-discard-granularity" rs_discard_granularity_bytes: u32,
        /// Whether the device keeps bitmaps.
        "bitmap" bitmap: bool,
    }
}

options! {
    /// Options of a device, given when it is created.
    DeviceOptions of Set::Device, {
        /// Largest request in bytes.
        "max-bio-size" max_bio_size_bytes: u32,
        /// Whether the volume has no disk on this node by intention.
        "diskless" diskless: bool,
        /// Logical block size in bytes.
        "block-size" block_size_bytes: u32,
        /// Discard granularity in bytes; `None` is not configured, 0 switches discards off.
        "discard-granularity" discard_granularity_bytes: Option<u32>,
    }
}

options! {
    /// Options of one volume of one connection.
    PeerDeviceOptions of Set::PeerDevice, {
        /// Resync rate when the controller is off, in KiB/s.
        "resync-rate" resync_rate_kib_s: u32,
        /// Planning horizon of the controller in tenths of a second, 0 switches it off.
        "c-plan-ahead" c_plan_ahead_tenths_s: u32,
        /// Wanted delay of resync answers in tenths of a second.
        "c-delay-target" c_delay_target_tenths_s: u32,
        /// Wanted resync data in flight in sectors.
        "c-fill-target" c_fill_target_sectors: u32,
        /// Upper limit of the controller in KiB/s, 0 for none.
        "c-max-rate" c_max_rate_kib_s: u32,
        /// Rate that resync keeps while applications write, in KiB/s; 0 for no throttling.
        "c-min-rate" c_min_rate_kib_s: u32,
        /// Whether a bitmap slot is kept for the peer.
        "bitmap" bitmap: bool,
        /// Whether a resync may run between peers that do not replicate.
        "resync-without-replication" resync_without_replication: bool,
        /// Whether the diskless peer counts as tiebreaker for quorum.
        "peer-tiebreaker" peer_tiebreaker: bool,
    }
}

options! {
    /// Options of a resource.
    ResourceOptions of Set::Resource, {
        /// Processors to run on, a hexadecimal mask; empty for any.
        "cpu-mask" cpu_mask: String,
        /// What happens to requests when no data can be reached.
        "on-no-data-accessible" on_no_data_accessible: OnNoDataAccessible,
        /// Whether opening a device for writing makes the node primary.
        "auto-promote" auto_promote: bool,
        /// Data after which a peer ack is sent, in sectors.
        "peer-ack-window" peer_ack_window_sectors: u32,
        /// Idle time after which a peer ack is sent, in milliseconds.
        "peer-ack-delay" peer_ack_delay_ms: u32,
        /// Longest two-phase commit in tenths of a second.
        "twopc-timeout" twopc_timeout_tenths_s: u32,
        /// Base of the pause before a two-phase commit is tried again, in tenths of a second.
        "twopc-retry-timeout" twopc_retry_timeout_tenths_s: u32,
        /// Longest wait of an automatic promotion in tenths of a second.
        "auto-promote-timeout" auto_promote_timeout_tenths_s: u32,
        /// Most requests in flight per device.
        "max-io-depth" max_io_depth_requests: u32,
        /// Nodes needed to change data.
        "quorum" quorum: Quorum,
        /// What happens to requests without quorum.
        "on-no-quorum" on_no_quorum: OnNoQuorum,
        /// Up-to-date replicas needed to change data.
        "quorum-minimum-redundancy" quorum_minimum_redundancy: Quorum,
        /// What a suspended primary does when a peer has newer data.
        "on-suspended-primary-outdated" on_suspended_primary_outdated: OnSuspendedPrimaryOutdated,
        /// Whether the resource speaks to 8.4 tools.
        "drbd8-api-compatibility" drbd8_api_compatibility: bool,
    }
}

/// Minor that has to finish its resync first, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ResyncAfter(pub Option<u32>);

impl Field for ResyncAfter {
    fn from_value(value: &OptionValue) -> Option<Self> {
        Some(ResyncAfter(u32::try_from(value.number()?).ok()))
    }
    fn to_value(&self, spec: &OptionSpec) -> OptionValue {
        number(self.0.map_or(-1, i64::from), spec)
    }
}
