//! From option texts to the core's option structures, by name, through the one option table.

use lockstep_core::command::ErrorCode;
use lockstep_core::options as core;
use lockstep_core::report::SharedOptions;
use lockstep_format::conf::options as table;
use lockstep_format::conf::options::Set;
use lockstep_front::device::Discards;

use crate::report::OptionTexts;

/// Why options are refused. The text names the option.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    /// Unknown name or value.
    #[error(transparent)]
    Table(#[from] table::SetError),
    /// An option that can only be given when the object is created.
    #[error("option '{name}' can only be given when the object is created")]
    Fixed {
        /// The option.
        name: String,
    },
    /// No mask of processors.
    #[error("cpu-mask '{0}': hexadecimal digits are needed, after each eight at most a comma")]
    CpuMask(String),
    /// A known value that this version cannot honour.
    #[error("option '{name}={value}' is not supported: {reason}")]
    Unsupported {
        /// The option.
        name: &'static str,
        /// The value.
        value: String,
        /// What there is instead.
        reason: &'static str,
    },
}

/// When options are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The object is being created: nothing was set before.
    Creation,
    /// `*-options` without `--set-defaults`: what is not named keeps its value.
    Change,
    /// `*-options --set-defaults`: what is not named gets its default.
    Replace,
}

/// The new set of option texts, with values in their canonical form. Changes nothing on error.
pub fn merged(
    set: Set,
    old: &OptionTexts,
    given: &OptionTexts,
    moment: Moment,
) -> Result<OptionTexts, OptionError> {
    let mut new = OptionTexts::new();
    for (name, value) in old {
        // A name is what an object is known by; it has no default to go back to.
        let kept = name == CONNECTION_NAME || table::find(set, name).is_some_and(is_fixed);
        if moment == Moment::Change || (moment == Moment::Replace && kept) {
            new.insert(name.clone(), value.clone());
        }
    }
    for (name, text) in given {
        let Some(spec) = table::find(set, name) else {
            return Err(table::SetError::UnknownName { name: name.clone() }.into());
        };
        let value = spec.parse(text).map_err(|source| table::SetError::Value {
            name: spec.name,
            value: text.clone(),
            source,
        })?;
        let value = value.to_string();
        if moment != Moment::Creation && is_fixed(spec) && old.get(name) != Some(&value) {
            return Err(OptionError::Fixed { name: name.clone() });
        }
        new.insert(spec.name.to_owned(), value);
    }
    Ok(new)
}

fn is_fixed(spec: &table::OptionSpec) -> bool {
    spec.change == table::Change::AtCreation
}

/// The option that names a connection.
pub(crate) const CONNECTION_NAME: &str = "_name";

/// `net` options for the core.
pub fn net(texts: &OptionTexts) -> Result<core::NetOptions, OptionError> {
    let mut t = table::NetOptions::default();
    for (name, value) in texts {
        t.set(name, value)?;
    }
    check_transport(&t)?;
    Ok(core::NetOptions {
        protocol: match t.protocol {
            table::Protocol::A => core::Protocol::A,
            table::Protocol::B => core::Protocol::B,
            table::Protocol::C => core::Protocol::C,
        },
        timeout_tenths: t.timeout_tenths_s,
        ping_int_s: t.ping_int_s,
        ping_timeout_tenths: t.ping_timeout_tenths_s,
        connect_int_s: t.connect_int_s,
        ko_count: t.ko_count,
        max_buffers: t.max_buffers_pages,
        max_epoch_size: t.max_epoch_size_requests,
        shared_secret: given(t.shared_secret),
        cram_hmac_alg: given(t.cram_hmac_alg),
        data_integrity_alg: given(t.data_integrity_alg),
        csums_alg: given(t.csums_alg),
        csums_after_crash_only: t.csums_after_crash_only,
        verify_alg: given(t.verify_alg),
        use_rle: t.use_rle,
        allow_two_primaries: t.allow_two_primaries,
        after_sb_0pri: after_sb_0pri(t.after_sb_0pri),
        after_sb_1pri: after_sb_1pri(t.after_sb_1pri),
        after_sb_2pri: after_sb_2pri(t.after_sb_2pri),
        rr_conflict: rr_conflict(t.rr_conflict),
        always_asbp: t.always_asbp,
        fencing: match t.fencing {
            table::Fencing::DontCare => core::Fencing::DontCare,
            table::Fencing::ResourceOnly => core::Fencing::ResourceOnly,
            table::Fencing::ResourceAndStonith => core::Fencing::ResourceAndStonith,
        },
        load_balance_paths: t.load_balance_paths,
        peer_name: t.connection_name,
        allow_remote_read: t.allow_remote_read,
        socket_check_timeout_tenths: t.socket_check_timeout_tenths_s,
        on_congestion: match t.on_congestion {
            table::OnCongestion::Block => core::OnCongestion::Block,
            table::OnCongestion::PullAhead => core::OnCongestion::PullAhead,
            table::OnCongestion::Disconnect => core::OnCongestion::Disconnect,
        },
        congestion_fill_sectors: u64::from(t.congestion_fill_sectors),
        congestion_extents: t.congestion_extents,
    })
}

fn check_transport(t: &table::NetOptions) -> Result<(), OptionError> {
    let unsupported = |name, value: &str, reason| {
        Err(OptionError::Unsupported {
            name,
            value: value.to_owned(),
            reason,
        })
    };
    if !matches!(t.transport.as_str(), "" | "tcp" | "lb-tcp") {
        let reason = "connections run over tcp or lb-tcp";
        return unsupported("transport", &t.transport, reason);
    }
    if t.load_balance_paths && t.transport == "tcp" {
        let reason = "it needs transport lb-tcp, or none given";
        return unsupported("load-balance-paths", "yes", reason);
    }
    if t.tls && t.load_balance_paths {
        let reason = "there is no TLS over load-balanced paths";
        return unsupported("tls", "yes", reason);
    }
    if t.tls {
        return unsupported("tls", "yes", "connections are not encrypted");
    }
    Ok(())
}

/// The texts of `net` options with what the peer changed since they were given.
pub fn with_shared(texts: &OptionTexts, shared: &SharedOptions) -> OptionTexts {
    let mut texts = texts.clone();
    let Ok(given) = net(&texts) else {
        return texts;
    };
    let given = SharedOptions::of(&given);
    if given == *shared {
        return texts;
    }
    let mut set = |name: &str, text: Option<&str>| match text {
        Some(text) => texts.insert(name.to_owned(), text.to_owned()),
        None => texts.remove(name),
    };
    if given.protocol != shared.protocol {
        let text = match shared.protocol {
            core::Protocol::A => "A",
            core::Protocol::B => "B",
            core::Protocol::C => "C",
        };
        set("protocol", Some(text));
    }
    let names = ["after-sb-0pri", "after-sb-1pri", "after-sb-2pri"];
    for ((name, old), new) in names.iter().zip(given.after_sb).zip(shared.after_sb) {
        if old != new {
            set(name, after_sb_text(new));
        }
    }
    let algorithms = [
        (
            "data-integrity-alg",
            &given.data_integrity_alg,
            &shared.data_integrity_alg,
        ),
        ("csums-alg", &given.csums_alg, &shared.csums_alg),
        ("verify-alg", &given.verify_alg, &shared.verify_alg),
    ];
    for (name, old, new) in algorithms {
        if old != new {
            set(name, new.as_deref());
        }
    }
    texts
}

/// `disk` options for the core.
pub fn disk(texts: &OptionTexts) -> Result<core::DiskOptions, OptionError> {
    let mut t = table::DiskOptions::default();
    for (name, value) in texts {
        t.set(name, value)?;
    }
    Ok(core::DiskOptions {
        size_sectors: (t.size_sectors != 0).then_some(t.size_sectors),
        on_io_error: match t.on_io_error {
            table::OnIoError::PassOn => core::OnIoError::PassOn,
            table::OnIoError::CallLocalIoError => core::OnIoError::CallLocalIoError,
            table::OnIoError::Detach => core::OnIoError::Detach,
        },
        disk_barrier: t.disk_barrier,
        disk_flushes: t.disk_flushes,
        md_flushes: t.md_flushes,
        al_extents: t.al_extents,
        al_updates: t.al_updates,
        discard_zeroes_if_aligned: t.discard_zeroes_if_aligned,
        disable_write_same: t.disable_write_same,
        disk_timeout_tenths: t.disk_timeout_tenths_s,
        rs_discard_granularity_bytes: t.rs_discard_granularity_bytes,
        read_balancing: match t.read_balancing {
            table::ReadBalancing::PreferLocal => core::ReadBalancing::PreferLocal,
            table::ReadBalancing::PreferRemote => core::ReadBalancing::PreferRemote,
            table::ReadBalancing::RoundRobin => core::ReadBalancing::RoundRobin,
            table::ReadBalancing::LeastPending => core::ReadBalancing::LeastPending,
            table::ReadBalancing::WhenCongestedRemote => core::ReadBalancing::WhenCongestedRemote,
            table::ReadBalancing::Striping32K => core::ReadBalancing::Striping(15),
            table::ReadBalancing::Striping64K => core::ReadBalancing::Striping(16),
            table::ReadBalancing::Striping128K => core::ReadBalancing::Striping(17),
            table::ReadBalancing::Striping256K => core::ReadBalancing::Striping(18),
            table::ReadBalancing::Striping512K => core::ReadBalancing::Striping(19),
            table::ReadBalancing::Striping1M => core::ReadBalancing::Striping(20),
        },
        bitmap: t.bitmap,
    })
}

/// Peer-device options for the core.
pub fn peer_device(texts: &OptionTexts) -> Result<core::PeerDeviceOptions, OptionError> {
    let mut t = table::PeerDeviceOptions::default();
    for (name, value) in texts {
        t.set(name, value)?;
    }
    Ok(core::PeerDeviceOptions {
        resync_rate_kib_s: t.resync_rate_kib_s,
        c_plan_ahead_tenths: t.c_plan_ahead_tenths_s,
        c_delay_target_tenths: t.c_delay_target_tenths_s,
        c_fill_target_sectors: t.c_fill_target_sectors,
        c_max_rate_kib_s: t.c_max_rate_kib_s,
        c_min_rate_kib_s: t.c_min_rate_kib_s,
        bitmap: t.bitmap,
        peer_tiebreaker: t.peer_tiebreaker,
        resync_without_replication: t.resync_without_replication,
    })
}

/// Resource options for the core; `handlers` are the names that the daemon can run.
pub fn resource(
    texts: &OptionTexts,
    handlers: &[String],
) -> Result<core::ResourceOptions, OptionError> {
    let mut t = table::ResourceOptions::default();
    for (name, value) in texts {
        t.set(name, value)?;
    }
    if !t.cpu_mask.is_empty() && !t.cpu_mask.split(',').all(is_mask_group) {
        return Err(OptionError::CpuMask(t.cpu_mask));
    }
    Ok(core::ResourceOptions {
        auto_promote: t.auto_promote,
        auto_promote_timeout_tenths: t.auto_promote_timeout_tenths_s,
        quorum: quorum(t.quorum),
        quorum_minimum_redundancy: quorum(t.quorum_minimum_redundancy),
        on_no_quorum: match t.on_no_quorum {
            table::OnNoQuorum::IoError => core::OnLoss::IoError,
            table::OnNoQuorum::SuspendIo => core::OnLoss::SuspendIo,
        },
        on_no_data_accessible: match t.on_no_data_accessible {
            table::OnNoDataAccessible::IoError => core::OnLoss::IoError,
            table::OnNoDataAccessible::SuspendIo => core::OnLoss::SuspendIo,
        },
        on_suspended_primary_outdated: match t.on_suspended_primary_outdated {
            table::OnSuspendedPrimaryOutdated::Disconnect => {
                core::OnSuspendedPrimaryOutdated::Disconnect
            }
            table::OnSuspendedPrimaryOutdated::ForceSecondary => {
                core::OnSuspendedPrimaryOutdated::ForceSecondary
            }
        },
        twopc_timeout_tenths: t.twopc_timeout_tenths_s,
        twopc_retry_timeout_tenths: t.twopc_retry_timeout_tenths_s,
        nr_requests: t.max_io_depth_requests,
        peer_ack_window_sectors: t.peer_ack_window_sectors,
        peer_ack_delay_ms: t.peer_ack_delay_ms,
        unnumbered: t.drbd8_api_compatibility,
        handlers: handlers.to_vec(),
        ..core::ResourceOptions::default()
    })
}

/// The volume is meant to have no disk here (`new-minor --diskless`).
pub fn is_diskless(texts: &OptionTexts) -> bool {
    texts.get("diskless").map(String::as_str) == Some("yes")
}

/// Smallest unit of a request: of the disks, or what is configured.
pub(crate) fn block_bytes(device: &crate::report::DeviceReport) -> u32 {
    let configured = device.device_options.get("block-size");
    let configured = configured.and_then(|text| text.parse().ok()).unwrap_or(512);
    device.logical_block_bytes.max(configured).clamp(512, 4096)
}

/// The discards that a volume's users are offered (`new-minor --discard-granularity`).
pub fn discards(texts: &OptionTexts) -> Discards {
    let mut t = table::DeviceOptions::default();
    if let Some(text) = texts.get("discard-granularity") {
        // The text was checked when the volume came; a wrong one is none.
        let _ = t.set("discard-granularity", text);
    }
    match t.discard_granularity_bytes {
        None => Discards::AsVolume,
        Some(0) => Discards::Never,
        Some(bytes) => Discards::Every(bytes),
    }
}

fn given(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn quorum(value: table::Quorum) -> core::Quorum {
    match value {
        table::Quorum::Off => core::Quorum::Off,
        table::Quorum::Majority => core::Quorum::Majority,
        table::Quorum::All => core::Quorum::All,
        table::Quorum::Count(count) => core::Quorum::Number(count),
    }
}

fn after_sb_text(value: core::AfterSplitBrain) -> Option<&'static str> {
    use core::AfterSplitBrain as Of;
    match value {
        Of::Disconnect => Some("disconnect"),
        Of::DiscardYoungerPrimary => Some("discard-younger-primary"),
        Of::DiscardOlderPrimary => Some("discard-older-primary"),
        Of::DiscardZeroChanges => Some("discard-zero-changes"),
        Of::DiscardLeastChanges => Some("discard-least-changes"),
        Of::DiscardLocal => Some("discard-local"),
        Of::DiscardRemote => Some("discard-remote"),
        Of::Consensus => Some("consensus"),
        Of::DiscardSecondary => Some("discard-secondary"),
        Of::CallPriLostAfterSb => Some("call-pri-lost-after-sb"),
        Of::ViolentlyAs0p => Some("violently-as0p"),
        // Of `rr-conflict` only, which no packet carries.
        Of::RetryConnect | Of::AutoDiscard => None,
    }
}

fn after_sb_0pri(value: table::AfterSb0pri) -> core::AfterSplitBrain {
    use core::AfterSplitBrain as To;
    match value {
        table::AfterSb0pri::Disconnect => To::Disconnect,
        table::AfterSb0pri::DiscardYoungerPrimary => To::DiscardYoungerPrimary,
        table::AfterSb0pri::DiscardOlderPrimary => To::DiscardOlderPrimary,
        table::AfterSb0pri::DiscardZeroChanges => To::DiscardZeroChanges,
        table::AfterSb0pri::DiscardLeastChanges => To::DiscardLeastChanges,
        table::AfterSb0pri::DiscardLocal => To::DiscardLocal,
        table::AfterSb0pri::DiscardRemote => To::DiscardRemote,
    }
}

fn after_sb_1pri(value: table::AfterSb1pri) -> core::AfterSplitBrain {
    use core::AfterSplitBrain as To;
    match value {
        table::AfterSb1pri::Disconnect => To::Disconnect,
        table::AfterSb1pri::Consensus => To::Consensus,
        table::AfterSb1pri::DiscardSecondary => To::DiscardSecondary,
        table::AfterSb1pri::CallPriLostAfterSb => To::CallPriLostAfterSb,
        table::AfterSb1pri::ViolentlyAs0p => To::ViolentlyAs0p,
    }
}

fn after_sb_2pri(value: table::AfterSb2pri) -> core::AfterSplitBrain {
    use core::AfterSplitBrain as To;
    match value {
        table::AfterSb2pri::Disconnect => To::Disconnect,
        table::AfterSb2pri::CallPriLostAfterSb => To::CallPriLostAfterSb,
        table::AfterSb2pri::ViolentlyAs0p => To::ViolentlyAs0p,
    }
}

fn rr_conflict(value: table::RrConflict) -> core::AfterSplitBrain {
    use core::AfterSplitBrain as To;
    match value {
        table::RrConflict::Disconnect => To::Disconnect,
        table::RrConflict::CallPriLost => To::CallPriLostAfterSb,
        table::RrConflict::Violently => To::ViolentlyAs0p,
        table::RrConflict::RetryConnect => To::RetryConnect,
        table::RrConflict::AutoDiscard => To::AutoDiscard,
    }
}

/// Up to 32 processors of a mask.
fn is_mask_group(group: &str) -> bool {
    (1..=8).contains(&group.len()) && group.bytes().all(|b| b.is_ascii_hexdigit())
}

impl OptionError {
    /// As the tools know it (config-and-cli.md, 16.2).
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            OptionError::CpuMask(_) => ErrorCode(143),
            OptionError::Table(_) | OptionError::Fixed { .. } | OptionError::Unsupported { .. } => {
                ErrorCode::ERR_INVALID_REQUEST
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(pairs: &[(&str, &str)]) -> OptionTexts {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn the_granularity_of_discards_is_the_disks_unless_it_is_given() {
        let of = |given: &[(&str, &str)]| discards(&texts(given));
        assert_eq!(of(&[]), Discards::AsVolume);
        assert_eq!(of(&[("discard-granularity", "0")]), Discards::Never);
        let given = [("discard-granularity", "12288")];
        assert_eq!(of(&given), Discards::Every(12288));
    }

    #[test]
    fn the_core_and_the_table_agree_about_defaults() {
        let none = OptionTexts::new();
        assert_eq!(net(&none).unwrap(), core::NetOptions::default());
        assert_eq!(disk(&none).unwrap(), core::DiskOptions::default());
        assert_eq!(
            peer_device(&none).unwrap(),
            core::PeerDeviceOptions::default()
        );
        assert_eq!(
            resource(&none, &[]).unwrap(),
            core::ResourceOptions::default()
        );
    }

    #[test]
    fn options_reach_the_core_by_name_and_unit() {
        let n = net(&texts(&[
            ("protocol", "a"),
            ("timeout", "90"),
            ("shared-secret", "x"),
        ]));
        let n = n.unwrap();
        assert_eq!(n.protocol, core::Protocol::A);
        assert_eq!(n.timeout_tenths, 90);
        assert_eq!(n.shared_secret.as_deref(), Some("x"));
        assert_eq!(
            disk(&texts(&[("size", "1M")])).unwrap().size_sectors,
            Some(2048)
        );
        let r = resource(&texts(&[("quorum", "2")]), &[]).unwrap();
        assert_eq!(r.quorum, core::Quorum::Number(2));
    }

    #[test]
    fn a_change_keeps_and_a_replacement_drops_what_is_not_named() {
        let old = texts(&[("al-extents", "6007"), ("disk-flushes", "no")]);
        let given = texts(&[("al-extents", "1237")]);
        let changed = merged(Set::Disk, &old, &given, Moment::Change).unwrap();
        assert_eq!(
            changed,
            texts(&[("al-extents", "1237"), ("disk-flushes", "no")])
        );
        let replaced = merged(Set::Disk, &old, &given, Moment::Replace).unwrap();
        assert_eq!(replaced, given);
    }

    #[test]
    fn what_a_peer_changed_is_shown_and_kept() {
        let given = texts(&[("protocol", "A"), ("ping-int", "7"), ("verify-alg", "md5")]);
        let mut shared = SharedOptions::of(&net(&given).unwrap());
        assert_eq!(with_shared(&given, &shared), given);
        shared.protocol = core::Protocol::B;
        shared.after_sb[1] = core::AfterSplitBrain::DiscardSecondary;
        shared.verify_alg = None;
        shared.csums_alg = Some("sha1".into());
        let wanted = texts(&[
            ("protocol", "B"),
            ("ping-int", "7"),
            ("after-sb-1pri", "discard-secondary"),
            ("csums-alg", "sha1"),
        ]);
        assert_eq!(with_shared(&given, &shared), wanted);
        assert_eq!(SharedOptions::of(&net(&wanted).unwrap()), shared);
    }

    #[test]
    fn refused_options_are_named() {
        let unknown = merged(
            Set::Disk,
            &OptionTexts::new(),
            &texts(&[("al-extends", "1237")]),
            Moment::Creation,
        );
        assert!(unknown.unwrap_err().to_string().contains("al-extends"));
        let value = merged(
            Set::Net,
            &OptionTexts::new(),
            &texts(&[("timeout", "9999")]),
            Moment::Creation,
        );
        assert!(value.unwrap_err().to_string().contains("timeout"));
        let fixed = merged(
            Set::Net,
            &texts(&[("transport", "tcp")]),
            &texts(&[("transport", "rdma")]),
            Moment::Change,
        );
        assert!(fixed.unwrap_err().to_string().contains("transport"));
        let error = |given: &[(&str, &str)]| net(&texts(given)).unwrap_err().to_string();
        assert!(error(&[("transport", "rdma")]).contains("rdma"));
        let balanced = ("load-balance-paths", "yes");
        assert!(error(&[("transport", "tcp"), balanced]).contains("needs transport lb-tcp"));
        assert!(error(&[("tls", "yes"), balanced]).contains("no TLS over load-balanced"));
        let change = merged(Set::Net, &texts(&[]), &texts(&[balanced]), Moment::Change);
        assert!(
            change
                .unwrap_err()
                .to_string()
                .contains("load-balance-paths")
        );
        for transport in ["", "lb-tcp"] {
            assert!(net(&texts(&[("transport", transport), balanced])).is_ok());
        }
        assert!(net(&texts(&[("transport", "lb-tcp")])).is_ok());
    }
}
