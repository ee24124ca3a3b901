//! The rows. Ranges, defaults and units are those of the specification, section 3.
//!
//! The order within a set is the order in which `show` prints. Help texts are our own.

use super::typed::{
    AfterSb0pri, AfterSb1pri, AfterSb2pri, Fencing, OnCongestion, OnIoError, OnNoDataAccessible,
    OnNoQuorum, OnSuspendedPrimaryOutdated, Protocol, Quorum, ReadBalancing, RrConflict,
};
use super::{Case, Change, Kind, OptionSpec, OutOfRange, Scale, Set, Symbol};

/// All options of a set, in the order in which the tools print them.
pub const fn all(set: Set) -> &'static [OptionSpec] {
    match set {
        Set::Net => NET,
        Set::Disk => DISK,
        Set::Device => DEVICE,
        Set::PeerDevice => PEER_DEVICE,
        Set::Resource => RESOURCE,
        Set::Startup => STARTUP,
        Set::Handlers => HANDLERS,
        Set::Proxy => PROXY,
        Set::Global => GLOBAL,
    }
}

/// Options that a command of `drbdsetup` takes besides those of its set; none for other commands.
pub fn command(name: &str) -> &'static [OptionSpec] {
    match name {
        "primary" | "secondary" | "disconnect" | "del-peer" => FORCE,
        "detach" => DETACH,
        "connect" => CONNECT,
        "resize" => RESIZE,
        "new-current-uuid" => NEW_CURRENT_UUID,
        "verify" => VERIFY,
        "invalidate" => INVALIDATE,
        "invalidate-remote" => INVALIDATE_REMOTE,
        "suspend-io" => SUSPEND_IO,
        "resource-options" | "net-options" | "disk-options" | "peer-device-options" => SET_DEFAULTS,
        "wait-connect-resource"
        | "wait-connect-connection"
        | "wait-connect-volume"
        | "wait-sync-resource"
        | "wait-sync-connection"
        | "wait-sync-volume" => STARTUP,
        _ => &[],
    }
}

const NET: &[OptionSpec] = &[
    text(
        "transport",
        63,
        "How packets travel: tcp, rdma or lb-tcp; tcp when empty.",
    )
    .fixed(),
    yes_no(
        "load-balance-paths",
        false,
        "Use all paths at once instead of one after another.",
    )
    .fixed()
    .since("9.26"),
    OptionSpec {
        kind: Kind::Enum {
            symbols: Protocol::SYMBOLS,
            default: "C",
            case: Case::Ignored,
        },
        ..words(
            "protocol",
            Protocol::SYMBOLS,
            "C",
            "When a write counts as complete.",
        )
    },
    num(
        "timeout",
        1,
        600,
        60,
        "Longest wait for an expected answer of the peer.",
    )
    .unit_text(TENTHS),
    num(
        "max-epoch-size",
        1,
        20000,
        2048,
        "Most write requests between two write barriers.",
    ),
    num(
        "connect-int",
        1,
        120,
        10,
        "Pause between two tries to connect.",
    )
    .unit_text(SECONDS),
    num(
        "ping-int",
        1,
        120,
        10,
        "Idle time after which a ping is sent.",
    )
    .unit_text(SECONDS),
    num(
        "sndbuf-size",
        0,
        134_217_728,
        0,
        "Send buffer of a socket; 0 adapts it.",
    )
    .unit_text(BYTES),
    num(
        "rcvbuf-size",
        0,
        134_217_728,
        0,
        "Receive buffer of a socket; 0 adapts it.",
    )
    .unit_text(BYTES),
    num(
        "ko-count",
        0,
        200,
        7,
        "Time-outs of one write before the peer is dropped; 0 never.",
    ),
    yes_no(
        "allow-two-primaries",
        false,
        "Let both nodes be primary at the same time.",
    ),
    text(
        "cram-hmac-alg",
        63,
        "Digest with which peers prove that they know the shared secret.",
    ),
    text("shared-secret", 63, "The secret that both peers know."),
    words(
        "after-sb-0pri",
        AfterSb0pri::SYMBOLS,
        "disconnect",
        "Whose changes are lost after a split brain when no node is primary.",
    ),
    words(
        "after-sb-1pri",
        AfterSb1pri::SYMBOLS,
        "disconnect",
        "Whose changes are lost after a split brain when one node is primary.",
    ),
    words(
        "after-sb-2pri",
        AfterSb2pri::SYMBOLS,
        "disconnect",
        "Whose changes are lost after a split brain when two nodes are primary.",
    ),
    yes_no(
        "always-asbp",
        false,
        "Apply the split-brain rules to three data generations too.",
    ),
    words(
        "rr-conflict",
        RrConflict::SYMBOLS,
        "disconnect",
        "What happens when a primary would have to become the target of a resync.",
    ),
    num(
        "ping-timeout",
        1,
        300,
        5,
        "Longest wait for the answer to a ping.",
    )
    .unit_text(TENTHS),
    text(
        "data-integrity-alg",
        63,
        "Digest that is sent with the data of each write.",
    ),
    yes_no(
        "tcp-cork",
        true,
        "Hold small packets back until a batch is complete.",
    ),
    words(
        "on-congestion",
        OnCongestion::SYMBOLS,
        "block",
        "What happens on a full send queue.",
    ),
    OptionSpec {
        kind: number(Scale::Sector, 0, 20_971_520, 0, BYTES),
        ..num(
            "congestion-fill",
            0,
            0,
            0,
            "Data in flight that counts as congestion; 0 none.",
        )
    },
    num(
        "congestion-extents",
        0,
        65534,
        1237,
        "Active extents that count as congestion; 0 for no limit.",
    ),
    text(
        "csums-alg",
        63,
        "Digest that spares equal blocks in a resync.",
    ),
    yes_no(
        "csums-after-crash-only",
        false,
        "Use csums-alg only after a crash of the primary.",
    ),
    text(
        "verify-alg",
        63,
        "Digest with which online verify compares blocks.",
    ),
    yes_no("use-rle", true, "Send bitmaps compressed."),
    num(
        "socket-check-timeout",
        0,
        300,
        0,
        "Wait for a new socket to prove alive, in 1/10 seconds; 0 means ping-timeout.",
    ),
    words(
        "fencing",
        Fencing::SYMBOLS,
        "dont-care",
        "What is done about an unreachable peer.",
    ),
    num(
        "max-buffers",
        32,
        131_072,
        2048,
        "Most pages in receive buffers.",
    ),
    yes_no(
        "allow-remote-read",
        true,
        "Read from this peer when the local disk cannot answer.",
    ),
    yes_no("tls", false, "Encrypt the connection.").since("9.26"),
    key(
        "tls-keyring",
        "keyring",
        "Key ring with the trusted certificates.",
    ),
    key("tls-privkey", "user", "Private key of this node."),
    key("tls-certificate", "user", "Certificate of this node."),
    num(
        "rdma-ctrl-rcvbuf-size",
        0,
        10_485_760,
        0,
        "Receive buffer of the RDMA control stream.",
    )
    .unit_text(BYTES)
    .since("9.26"),
    num(
        "rdma-ctrl-sndbuf-size",
        0,
        10_485_760,
        0,
        "Send buffer of the RDMA control stream.",
    )
    .unit_text(BYTES)
    .since("9.26"),
    text("_name", 63, "Name of the connection: the peer's host name."),
];

const DISK: &[OptionSpec] = &[
    OptionSpec {
        kind: number(Scale::Sector, 0, LARGEST_SECTORS, 0, BYTES),
        ..num(
            "size",
            0,
            0,
            0,
            "Use only this much of the disk; 0 uses all.",
        )
    }
    .fixed(),
    words(
        "on-io-error",
        OnIoError::SYMBOLS,
        "detach",
        "What follows an error of the disk.",
    ),
    yes_no("disk-barrier", false, "Order writes with barriers."),
    yes_no("disk-flushes", true, "Order writes with cache flushes."),
    yes_no(
        "disk-drain",
        true,
        "Order writes by waiting for the earlier ones.",
    ),
    yes_no(
        "md-flushes",
        true,
        "Flush the disk's cache after metadata writes.",
    ),
    num(
        "resync-after",
        -1,
        1_048_575,
        -1,
        "Resync only after that resource has finished its.",
    ),
    OptionSpec {
        kind: Kind::Number {
            scale: Scale::One,
            min: 67,
            max: 65534,
            default: 1237,
            out_of_range: OutOfRange::Clamp,
            unit: "",
        },
        ..num(
            "al-extents",
            0,
            0,
            0,
            "Areas of 4 MiB that may have writes in flight at once.",
        )
    },
    yes_no(
        "al-updates",
        true,
        "Keep the activity log; without it a crash means a full resync.",
    ),
    yes_no(
        "discard-zeroes-if-aligned",
        true,
        "Pass discards on when discarded blocks of the disk read as zeroes.",
    ),
    yes_no("disable-write-same", false, "Do not offer WRITE SAME."),
    num(
        "disk-timeout",
        0,
        6000,
        0,
        "Longest wait for the disk; 0 for ever.",
    )
    .unit_text(TENTHS),
    words(
        "read-balancing",
        ReadBalancing::SYMBOLS,
        "prefer-local",
        "Where reads go.",
    ),
    num(
        "rs-discard-granularity",
        0,
        1_048_576,
        0,
        "Resync ranges of zeroes as discards of this size; 0 never.",
    )
    .unit_text(BYTES),
    yes_no("bitmap", true, "Keep bitmaps on this device.").since("9.33"),
];

const DEVICE: &[OptionSpec] = &[
    num(
        "max-bio-size",
        512,
        1_048_576,
        1_048_576,
        "Largest request of the device.",
    )
    .fixed(),
    OptionSpec {
        kind: Kind::Flag,
        ..yes_no(
            "diskless",
            false,
            "The volume has no disk on this node by intention.",
        )
    }
    .fixed(),
    num(
        "block-size",
        512,
        4096,
        512,
        "Logical block size of the device.",
    )
    .fixed()
    .since("9.24"),
    num(
        "discard-granularity",
        0,
        134_217_728,
        4_294_967_295,
        "Discard granularity of the device in bytes; 0 switches discards off.",
    )
    .fixed()
    .since("9.34"),
];

const PEER_DEVICE: &[OptionSpec] = &[
    OptionSpec {
        kind: number(Scale::Kib, 1, 8_388_608, 250, BYTES_PER_SECOND),
        ..num(
            "resync-rate",
            0,
            0,
            0,
            "Rate of a resync while the controller is off.",
        )
    },
    num(
        "c-plan-ahead",
        0,
        300,
        20,
        "How far the controller plans; 0 switches it off.",
    )
    .unit_text(TENTHS),
    num(
        "c-delay-target",
        1,
        100,
        10,
        "Delay of resync answers to aim at.",
    )
    .unit_text(TENTHS),
    OptionSpec {
        kind: number(Scale::Sector, 0, 1_048_576, 100, BYTES),
        ..num(
            "c-fill-target",
            0,
            0,
            0,
            "Resync data in flight to aim at; 0 aims at the delay.",
        )
    },
    OptionSpec {
        kind: number(Scale::Kib, 0, 4_194_304, 102_400, BYTES_PER_SECOND),
        ..num(
            "c-max-rate",
            0,
            0,
            0,
            "Upper limit of the controlled rate; 0 for none.",
        )
    },
    OptionSpec {
        kind: number(Scale::Kib, 0, 4_194_304, 250, BYTES_PER_SECOND),
        ..num(
            "c-min-rate",
            0,
            0,
            0,
            "Rate that resync keeps beside applications; 0 any.",
        )
    },
    yes_no("bitmap", true, "Keep a bitmap for this peer."),
    yes_no(
        "resync-without-replication",
        true,
        "Let peers that do not replicate resync.",
    )
    .since("9.33"),
    yes_no(
        "peer-tiebreaker",
        true,
        "Let the diskless peer break ties of the quorum.",
    )
    .since("9.34"),
];

const RESOURCE: &[OptionSpec] = &[
    text(
        "cpu-mask",
        255,
        "Processors on which the resource runs, a hexadecimal mask.",
    ),
    words(
        "on-no-data-accessible",
        OnNoDataAccessible::SYMBOLS,
        "io-error",
        "What happens to requests when no up-to-date data can be reached.",
    ),
    yes_no(
        "auto-promote",
        true,
        "Become primary when a device is opened for writing.",
    ),
    OptionSpec {
        kind: number(Scale::Sector, 2048, 204_800, 4096, BYTES),
        ..num(
            "peer-ack-window",
            0,
            0,
            0,
            "Written data after which a peer ack is sent.",
        )
    },
    num(
        "peer-ack-delay",
        1,
        10000,
        100,
        "Idle time after which a peer ack is sent.",
    )
    .unit_text("milliseconds"),
    num("twopc-timeout", 50, 600, 300, "Longest two-phase commit.").unit_text(TENTHS),
    num(
        "twopc-retry-timeout",
        1,
        50,
        1,
        "Base of the pause before a two-phase commit is retried.",
    )
    .unit_text(TENTHS),
    num(
        "auto-promote-timeout",
        0,
        600,
        20,
        "Longest wait of an automatic promotion.",
    )
    .unit_text(TENTHS),
    num(
        "max-io-depth",
        4,
        4_294_967_295,
        8000,
        "Most requests in flight on a device.",
    ),
    quorum("quorum", "Nodes that must be reachable to change data."),
    words(
        "on-no-quorum",
        OnNoQuorum::SYMBOLS,
        "suspend-io",
        "What happens without quorum.",
    ),
    quorum(
        "quorum-minimum-redundancy",
        "Up-to-date replicas needed to change data.",
    ),
    words(
        "on-suspended-primary-outdated",
        OnSuspendedPrimaryOutdated::SYMBOLS,
        "disconnect",
        "What a suspended primary does when a peer has newer data.",
    ),
    yes_no(
        "drbd8-api-compatibility",
        false,
        "Serve the tools of version 8.4.",
    )
    .since("9.33"),
];

const STARTUP: &[OptionSpec] = &[
    num(
        "wfc-timeout",
        0,
        300_000,
        0,
        "Longest wait for a peer; 0 for ever.",
    )
    .unit_text(SECONDS),
    num(
        "degr-wfc-timeout",
        0,
        300_000,
        0,
        "The same when the cluster was degraded.",
    )
    .unit_text(SECONDS),
    num(
        "outdated-wfc-timeout",
        0,
        300_000,
        0,
        "The same when the peer was outdated.",
    )
    .unit_text(SECONDS),
    yes_no("wait-after-sb", false, "Go on waiting after a split brain."),
];

const HANDLERS: &[OptionSpec] = &[
    handler(
        "pri-on-incon-degr",
        "Primary on inconsistent data without a peer.",
    ),
    handler(
        "pri-lost-after-sb",
        "A primary lost its changes by a split-brain rule.",
    ),
    handler("pri-lost", "A primary would have to become sync target."),
    handler(
        "initial-split-brain",
        "A split brain was found, before rules are applied.",
    ),
    handler("split-brain", "A split brain could not be resolved."),
    handler("outdate-peer", "Old name of fence-peer."),
    handler(
        "fence-peer",
        "Keep an unreachable peer from using its data.",
    ),
    handler(
        "unfence-peer",
        "The opposite of fence-peer, after a resync.",
    ),
    handler("local-io-error", "The local disk failed."),
    handler(
        "before-resync-target",
        "This node is about to become sync target.",
    ),
    handler(
        "after-resync-target",
        "This node was sync target and has finished.",
    ),
    handler(
        "before-resync-source",
        "This node is about to become sync source.",
    ),
    handler("out-of-sync", "Online verify has found differences."),
    handler("quorum-lost", "The quorum was lost."),
    handler("disconnected", "A connection was lost."),
];

const PROXY: &[OptionSpec] = &[
    num("memlimit", 0, i64::MAX, 0, "Most memory for buffered data.").unit_text(BYTES),
    num(
        "read-loops",
        0,
        i64::MAX,
        0,
        "Reads before the other direction is served.",
    ),
    num(
        "compression",
        0,
        i64::MAX,
        0,
        "Compression, in the old notation.",
    ),
    num("bwlimit", 0, i64::MAX, 0, "Most bytes per second.").unit_text(BYTES_PER_SECOND),
    num(
        "sndbuf-size",
        0,
        134_217_728,
        0,
        "Send buffer of a socket; 0 adapts it.",
    )
    .unit_text(BYTES)
    .since("9.30"),
    num(
        "rcvbuf-size",
        0,
        134_217_728,
        0,
        "Receive buffer of a socket; 0 adapts it.",
    )
    .unit_text(BYTES)
    .since("9.30"),
    num(
        "ping-timeout",
        1,
        300,
        5,
        "Longest wait for the answer to a ping.",
    )
    .unit_text(TENTHS)
    .since("9.30"),
];

const GLOBAL: &[OptionSpec] = &[
    OptionSpec {
        kind: Kind::Flag,
        ..yes_no(
            "disable-ip-verification",
            false,
            "Do not look whether our address is ours.",
        )
    },
    OptionSpec {
        kind: Kind::Flag,
        ..yes_no(
            "udev-always-use-vnr",
            false,
            "Name even a single volume by its number.",
        )
    },
    num(
        "minor-count",
        1,
        255,
        0,
        "Devices to make room for; computed when not given.",
    ),
    num(
        "dialog-refresh",
        0,
        600,
        1,
        "How often a waiting dialogue is redrawn.",
    )
    .unit_text(SECONDS),
    num(
        "cmd-timeout-short",
        0,
        900,
        5,
        "Longest short call of a tool.",
    )
    .unit_text(SECONDS),
    num(
        "cmd-timeout-medium",
        0,
        900,
        600,
        "Longest medium call of a tool.",
    )
    .unit_text(SECONDS),
    num(
        "cmd-timeout-long",
        0,
        900,
        0,
        "Longest long call of a tool; 0 for ever.",
    )
    .unit_text(SECONDS),
    words(
        "usage-count",
        USAGE_COUNT,
        "ask",
        "Whether to take part in the usage count.",
    ),
];

/// Sending usage counts is not supported; the words are read and kept.
const USAGE_COUNT: &[Symbol] = &[
    Symbol {
        name: "yes",
        code: 0,
    },
    Symbol {
        name: "no",
        code: 1,
    },
    Symbol {
        name: "ask",
        code: 2,
    },
];

const FORCE: &[OptionSpec] = &[flag("force", "Do it against an objection.")];
const DETACH: &[OptionSpec] = &[
    flag("force", "Do not wait for requests in flight."),
    flag("diskless", "The volume stays without a disk by intention."),
];
const CONNECT: &[OptionSpec] = &[
    flag("tentative", "Only find out what the resync would be."),
    flag(
        "discard-my-data",
        "Lose our changes when a split brain is found.",
    ),
];
const RESIZE: &[OptionSpec] = &[
    OptionSpec {
        kind: number(Scale::Sector, 0, LARGEST_SECTORS, 0, BYTES),
        ..num(
            "size",
            0,
            0,
            0,
            "The new size; 0 for all that the disks offer.",
        )
    }
    .on_command_line(),
    flag(
        "assume-peer-has-space",
        "Do not ask whether the peer's disk is large enough.",
    ),
    flag("assume-clean", "Do not resync the new area."),
    num("al-stripes", 1, 1024, 1, "Stripes of the activity log.").on_command_line(),
    OptionSpec {
        kind: number(Scale::Kib, 4, 16_777_216, 32, ""),
        ..num("al-stripe-size-kB", 0, 0, 0, "Size of a stripe.")
    }
    .on_command_line(),
];
const NEW_CURRENT_UUID: &[OptionSpec] = &[
    flag("clear-bitmap", "Declare both replicas equal."),
    flag(
        "force-resync",
        "Declare the peer's replica old: full resync from here.",
    ),
];
const VERIFY: &[OptionSpec] = &[
    OptionSpec {
        kind: number(Scale::Sector, 0, LARGEST_SECTORS, 0, BYTES),
        ..num("start", 0, 0, 0, "Where to start.")
    }
    .on_command_line(),
    OptionSpec {
        kind: number(Scale::Sector, 0, LARGEST_SECTORS, 0, BYTES),
        ..num("stop", 0, 0, 0, "Where to stop.")
    }
    .on_command_line(),
];
const INVALIDATE: &[OptionSpec] = &[
    num(
        "sync-from-peer-node-id",
        -1,
        32,
        -1,
        "The peer to resync from.",
    )
    .on_command_line(),
    yes_no(
        "reset-bitmap",
        true,
        "Resync everything, not only marked blocks.",
    )
    .on_command_line(),
];
const INVALIDATE_REMOTE: &[OptionSpec] = &[yes_no(
    "reset-bitmap",
    true,
    "Resync everything, not only marked blocks.",
)
.on_command_line()];
const SUSPEND_IO: &[OptionSpec] =
    &[
        yes_no("bdev-freeze", true, "Freeze a mounted file system first.")
            .on_command_line()
            .since("9.34"),
    ];
const SET_DEFAULTS: &[OptionSpec] = &[flag("set-defaults", "First reset what is not named.")];

const TENTHS: &str = "1/10 seconds";
const SECONDS: &str = "seconds";
const BYTES: &str = "bytes";
const BYTES_PER_SECOND: &str = "bytes/second";
/// Largest device in sectors of 512 bytes: 1 PiB.
const LARGEST_SECTORS: i64 = 2_199_023_255_552;

const fn row(name: &'static str, kind: Kind, help: &'static str) -> OptionSpec {
    OptionSpec {
        name,
        kind,
        change: Change::Anytime,
        since: "",
        help,
    }
}

const fn number(scale: Scale, min: i64, max: i64, default: i64, unit: &'static str) -> Kind {
    Kind::Number {
        scale,
        min,
        max,
        default,
        out_of_range: OutOfRange::Refuse,
        unit,
    }
}

const fn num(
    name: &'static str,
    min: i64,
    max: i64,
    default: i64,
    help: &'static str,
) -> OptionSpec {
    row(name, number(Scale::One, min, max, default, ""), help)
}

const fn yes_no(name: &'static str, default: bool, help: &'static str) -> OptionSpec {
    row(name, Kind::Bool { default }, help)
}

const fn flag(name: &'static str, help: &'static str) -> OptionSpec {
    row(name, Kind::Flag, help).on_command_line()
}

const fn text(name: &'static str, max_len_bytes: usize, help: &'static str) -> OptionSpec {
    row(name, Kind::Text { max_len_bytes }, help)
}

const fn handler(name: &'static str, help: &'static str) -> OptionSpec {
    text(name, LONGEST_COMMAND_BYTES, help)
}

const fn key(name: &'static str, key_type: &'static str, help: &'static str) -> OptionSpec {
    row(name, Kind::Key { key_type }, help).since("9.26")
}

const fn words(
    name: &'static str,
    symbols: &'static [Symbol],
    default: &'static str,
    help: &'static str,
) -> OptionSpec {
    row(
        name,
        Kind::Enum {
            symbols,
            default,
            case: Case::Sensitive,
        },
        help,
    )
}

const fn quorum(name: &'static str, help: &'static str) -> OptionSpec {
    let kind = Kind::NumberOrSymbol {
        min: 1,
        max: 32,
        symbols: Quorum::SYMBOLS,
        default: "off",
    };
    row(name, kind, help)
}

impl OptionSpec {
    const fn unit_text(mut self, text: &'static str) -> Self {
        if let Kind::Number {
            scale,
            min,
            max,
            default,
            out_of_range,
            ..
        } = self.kind
        {
            self.kind = Kind::Number {
                scale,
                min,
                max,
                default,
                out_of_range,
                unit: text,
            };
        }
        self
    }

    const fn fixed(mut self) -> Self {
        self.change = Change::AtCreation;
        self
    }

    const fn on_command_line(mut self) -> Self {
        self.change = Change::CommandOnly;
        self
    }

    const fn since(mut self, version: &'static str) -> Self {
        self.since = version;
        self
    }
}

/// Longest handler command: what a quoted string of the configuration language can hold.
const LONGEST_COMMAND_BYTES: usize = 255;
