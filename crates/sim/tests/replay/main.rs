//! Replays captures of kernel DRBD: the core stands in for one captured node, is fed what the
//! other nodes sent and what the operator did, and has to send what the kernel sent.

mod inspect;

mod capture;
mod cluster;
mod compare;
mod conflicts;
mod copies;
mod early;
mod epochs;
mod equal;
mod operator;
mod order;
mod packets;
mod stand_in;
mod three_nodes;
mod verify;

use std::path::{Path, PathBuf};

use lockstep_core::command::Command;
use lockstep_core::options::{
    AfterSplitBrain, DiskOptions, NetOptions, OnCongestion, OnLoss, PeerDeviceOptions, Protocol,
    Quorum, ReadBalancing, ResourceOptions,
};
use lockstep_format::disk::layout::{BitmapBlock, Geometry};
use lockstep_format::units::NodeId;

use compare::{Difference, Setup};

fn capture(family: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/captures")
        .join(family)
        .join(format!("{name}.pcap.gz"))
}

/// The options that the transcript's configuration sets.
fn setup(path: &Path, node: u8) -> Setup {
    let text = path.to_string_lossy().replace(".pcap.gz", ".txt");
    let text = std::fs::read_to_string(text).expect("the transcript is beside the capture");
    let config = text.split("\ncommands ").next().unwrap_or_default();
    // What stands before the configuration is a description.
    let config = config.find("global {").map_or(config, |at| &config[at..]);
    // The second node's own lines stand behind the common ones, and override them.
    let (common, second) = config
        .split_once("# node2 differs:")
        .map_or((config, None), |(common, second)| (common, Some(second)));
    let secret = |text: &str| {
        let (_, rest) = text.split_once("shared-secret \"")?;
        rest.split_once('"').map(|(secret, _)| secret.to_owned())
    };
    let own_secret = second.and_then(|second| secret(if node == 0 { common } else { second }));
    let peer_secret = second.and_then(|second| secret(if node == 0 { second } else { common }));
    let words: Vec<&str> = config
        .split(|c: char| c.is_whitespace() || c == ';')
        .filter(|w| !w.is_empty())
        .collect();
    let mut setup = Setup {
        geometry: Geometry::for_peers(3),
        net: NetOptions::default(),
        disk: DiskOptions::default(),
        peer_disk: PeerDeviceOptions::default(),
        options: ResourceOptions::default(),
        peer_secret,
        diskless: Default::default(),
    };
    if path.parent().is_some_and(|dir| dir.ends_with("84")) {
        setup.geometry = Geometry::for_peers(1);
        setup.options.protocol_max = 101;
    }
    if path.to_string_lossy().contains("mixed-84-93") {
        setup.geometry = Geometry::for_peers(1);
        if node == 0 {
            setup.options.protocol_max = 101;
        }
    }
    // Nodes whose line says `disk none`.
    for (number, line) in (0..3).filter_map(|n| {
        let begin = format!(" on node{} ", n + 1);
        Some((n, config.lines().find(|line| line.starts_with(&begin))?))
    }) {
        if line.contains("disk none") {
            setup.diskless.insert(NodeId(number));
        }
    }
    let create = format!("node{} # drbdadm create-md", node + 1);
    if let Some(line) = text.lines().find(|line| line.contains(&create))
        && line.contains("--bitmap-block-size=64k")
    {
        setup.geometry.bitmap_block = BitmapBlock::from_shift(16).expect("64 KiB");
    }
    if words.contains(&"node3") {
        // When a peer was found to be lost is in the nodes' logs.
        setup.net.ping_timeout_tenths = 300;
    }
    for pair in words.windows(2) {
        match *pair {
            ["on-congestion", "pull-ahead"] => {
                setup.net.on_congestion = OnCongestion::PullAhead;
            }
            ["rs-discard-granularity", bytes] => {
                let bytes = bytes.parse().expect("a number of bytes");
                setup.disk.rs_discard_granularity_bytes = bytes;
            }
            ["congestion-fill", fill] => {
                let kib: u64 = fill.trim_end_matches('k').parse().expect("a number of KiB");
                setup.net.congestion_fill_sectors = kib * 2;
            }
            [_, "allow-two-primaries"] => setup.net.allow_two_primaries = true,
            ["protocol", "A"] => setup.net.protocol = Protocol::A,
            ["protocol", "B"] => setup.net.protocol = Protocol::B,
            ["read-balancing", "round-robin"] => {
                setup.disk.read_balancing = ReadBalancing::RoundRobin;
            }
            ["quorum", "majority"] => setup.options.quorum = Quorum::Majority,
            ["on-no-quorum", "suspend-io"] => setup.options.on_no_quorum = OnLoss::SuspendIo,
            ["on-no-quorum", "io-error"] => setup.options.on_no_quorum = OnLoss::IoError,
            ["c-plan-ahead", tenths] => {
                setup.peer_disk.c_plan_ahead_tenths = tenths.parse().expect("a number");
            }
            ["size", size] => {
                if let Ok(mib) = size.trim_end_matches('M').parse::<u64>() {
                    setup.disk.size_sectors = Some(mib << 11);
                }
            }
            ["resync-rate", rate] => {
                let mib: u32 = rate.trim_end_matches('M').parse().expect("a number of MiB");
                setup.peer_disk.resync_rate_kib_s = mib * 1024;
            }
            ["cram-hmac-alg", alg] => setup.net.cram_hmac_alg = Some(alg.into()),
            ["shared-secret", secret] => {
                setup.net.shared_secret = Some(secret.trim_matches('"').into());
            }
            ["after-sb-0pri", policy] => setup.net.after_sb_0pri = after_sb(policy),
            ["after-sb-1pri", policy] => setup.net.after_sb_1pri = after_sb(policy),
            ["after-sb-2pri", policy] => setup.net.after_sb_2pri = after_sb(policy),
            ["data-integrity-alg", alg] => setup.net.data_integrity_alg = Some(alg.into()),
            ["csums-alg", alg] => setup.net.csums_alg = Some(alg.into()),
            ["verify-alg", alg] => setup.net.verify_alg = Some(alg.into()),
            _ => {}
        }
    }
    if own_secret.is_some() {
        setup.net.shared_secret = own_secret;
    }
    setup
}

fn after_sb(policy: &str) -> AfterSplitBrain {
    match policy {
        "disconnect" => AfterSplitBrain::Disconnect,
        "discard-zero-changes" => AfterSplitBrain::DiscardZeroChanges,
        "discard-secondary" => AfterSplitBrain::DiscardSecondary,
        other => panic!("after-sb policy {other}"),
    }
}

fn lines(differences: &[Difference]) -> String {
    let lines: Vec<String> = differences.iter().map(Difference::to_string).collect();
    lines.join("\n")
}

/// Replays one node of a capture. What differs by choice (docs/compatibility.md) is named by the
/// beginning of its line, without the time; there is to be nothing else, and all of it.
fn replay(family: &str, name: &str, node: u8, by_choice: &[&str]) {
    replay_until(family, name, node, None, by_choice);
}

/// Replays the part of a capture before the first command that begins so.
fn replay_until(family: &str, name: &str, node: u8, end: Option<&str>, by_choice: &[&str]) {
    let path = capture(family, name);
    let mut items = capture::read(&path);
    if let Some(end) = end {
        let ends = |item: &capture::Item| match &item.what {
            capture::What::Command { text, .. } => text.starts_with(end),
            _ => false,
        };
        items.truncate(items.iter().position(ends).expect("the command is there"));
    }
    let chosen = |text: &str| by_choice.iter().any(|c| text.starts_with(c));
    let differences = order::run(&items, NodeId(node), &setup(&path, node), &chosen);
    let other = differences.iter().filter(|d| !chosen(&d.text)).count();
    assert!(
        other == 0 && differences.len() == by_choice.len(),
        "{name}, node {node}: {} differences, of which {} not by choice\n{}",
        differences.len(),
        other,
        lines(&differences)
    );
}

#[test]
fn drbd9_fresh_full_sync() {
    // The generation of a forced promotion is told once, not twice.
    let twice = ["missing Data Uuids110 af48d03fe4cc0b3b"];
    replay("9x", "01-2node-fresh-fullsync", 0, &twice);
    replay("9x", "01-2node-fresh-fullsync", 1, &[]);
}

#[test]
fn drbd9_writes_of_each_protocol() {
    for name in [
        "02-2node-writes-C",
        "03-2node-writes-A",
        "04-2node-writes-B",
    ] {
        replay("9x", name, 0, &[]);
        replay("9x", name, 1, &[]);
    }
}

#[test]
fn drbd9_reconnect_with_bitmap_resync() {
    replay("9x", "05-2node-reconnect-resync", 0, &[]);
    replay("9x", "05-2node-reconnect-resync", 1, &[]);
}

#[test]
fn drbd9_split_brain() {
    replay("9x", "09-2node-split-brain", 0, &[]);
    replay("9x", "09-2node-split-brain", 1, &[]);
}

#[test]
fn drbd9_resize() {
    replay("9x", "10-2node-resize", 0, &[]);
    replay("9x", "10-2node-resize", 1, &[]);
}

#[test]
fn drbd84_resize() {
    // Then the lower devices grow. The kernel counts 64 bits too few on a fresh disk.
    let end = Some("(QEMU monitor");
    let count = ["missing Data Uuids(Uuids { current: Uuid(0000000000000004)"];
    replay_until("84", "13-resize", 0, end, &count);
    replay_until("84", "13-resize", 1, end, &count);
}

#[test]
fn drbd84_fresh_full_sync() {
    replay("84", "01-fresh-fullsync", 0, &[]);
    replay("84", "01-fresh-fullsync", 1, &[]);
}

#[test]
fn drbd84_writes_of_each_protocol() {
    for name in ["02-writes-A", "03-writes-B", "04-writes-C"] {
        replay("84", name, 0, &[]);
        replay("84", name, 1, &[]);
    }
}

#[test]
fn drbd84_reconnect_with_bitmap_resync() {
    // The kernel tells its next generation to a peer that is leaving.
    let to_nobody = ["missing Data Uuids(Uuids { current: Uuid(3FCB70F0BD772509)"];
    replay("84", "05-reconnect-bitmap-resync", 0, &to_nobody);
    replay("84", "05-reconnect-bitmap-resync", 1, &[]);
}

#[test]
fn drbd84_congestion() {
    replay("84", "20-congestion-pull-ahead", 0, &[]);
    // Three writes come in the moment in which the resync ends; here they come after it.
    let in_sync_or_not = [
        "missing Control RsWriteAck(BlockAck { sector: Sector(8192)",
        "missing Control RsWriteAck(BlockAck { sector: Sector(8200)",
        "missing Control RsWriteAck(BlockAck { sector: Sector(8208)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(8192)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(8200)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(8208)",
    ];
    replay("84", "20-congestion-pull-ahead", 1, &in_sync_or_not);
}

#[test]
fn drbd84_thin_resync() {
    // The kernel tells its next generation to a peer that is leaving.
    let to_nobody = ["missing Data Uuids(Uuids { current: Uuid(691CC460FE18EC61)"];
    replay("84", "25-thin-resync", 0, &to_nobody);
    replay("84", "25-thin-resync", 1, &[]);
}

#[test]
fn drbd84_split_brain() {
    replay("84", "09-split-brain", 0, &[]);
    replay("84", "09-split-brain", 1, &[]);
}

#[test]
fn drbd84_invalidate() {
    replay("84", "19-invalidate", 0, &[]);
    replay("84", "19-invalidate", 1, &[]);
}

#[test]
fn drbd84_paused_resync() {
    replay("84", "23-pause-resume-sync", 0, &[]);
    // How far the resync had come when it was interrupted is a matter of its pace.
    let pace = ["missing Data Uuids(Uuids { current: Uuid(FF1314C5D12A4F04)"];
    replay("84", "23-pause-resume-sync", 1, &pace);
}

#[test]
fn drbd9_integrity() {
    replay("9x", "08-2node-auth-integrity", 0, &[]);
    replay("9x", "08-2node-auth-integrity", 1, &[]);
}

#[test]
fn drbd84_integrity() {
    for name in ["17-integrity-crc32c", "18-integrity-sha1"] {
        // Node 1 then detaches, reads, writes and demotes in one line of the shell, which has one
        // time here; node 2 shows the packets of all that.
        replay_until("84", name, 0, Some("drbdadm detach"), &[]);
        replay("84", name, 1, &[]);
    }
}

#[test]
fn drbd9_checksum_resync() {
    replay("9x", "06-2node-csum-resync", 0, &[]);
    replay("9x", "06-2node-csum-resync", 1, &[]);
}

/// The clock is the capture's: a core that keeps itself busy would stop it.
#[test]
#[should_panic(expected = "the replay stands still at")]
fn a_replay_that_stands_still_ends() {
    let options = ResourceOptions::default();
    let mut node = stand_in::StandIn::new(NodeId(0), 0, Geometry::for_peers(1), options);
    loop {
        node.command(Command::Down);
    }
}

/// Nobody brings the node up, so that every packet of the kernel is missing.
#[test]
fn a_replay_with_too_many_differences_gives_up() {
    let path = capture("9x", "07-2node-verify-diff");
    let mut items = capture::read(&path);
    items.retain(|item| !matches!(item.what, capture::What::Command { .. }));
    let differences = compare::Replay::run(&items, NodeId(0), &setup(&path, 0));
    let gives_up = |d: &&Difference| d.text.starts_with("gives up: there are more than 500");
    assert_eq!(differences.iter().filter(gives_up).count(), 1);
    assert!(differences.len() < 600, "{}", differences.len());
}

/// A kernel that agrees on 101 while such a ping is on its way takes its header for garbage.
#[test]
fn no_ping_is_sent_before_the_versions_are_agreed_on() {
    let (me, peer) = (NodeId(0), NodeId(1));
    let options = ResourceOptions {
        protocol_max: 101,
        ..ResourceOptions::default()
    };
    let mut node = stand_in::StandIn::new(me, 0, Geometry::for_peers(1), options);
    // The handshake may take four times the time-out of a ping: an emulated peer is slow.
    let net = NetOptions {
        ping_int_s: 1,
        ping_timeout_tenths: 100,
        ..NetOptions::default()
    };
    node.up(
        &[peer],
        &net,
        &DiskOptions::default(),
        &PeerDeviceOptions::default(),
    );
    node.advance(1_000_000_000);
    node.link_up(peer, true);
    node.advance(20_000_000_000);
    let names: Vec<String> = node
        .sent
        .iter()
        .map(|sent| format!("{:?}", sent.packet))
        .collect();
    assert!(names[0].starts_with("ConnectionFeatures"), "{names:?}");
    assert!(!names.contains(&"Ping".to_string()), "{names:?}");
}

#[test]
fn drbd84_changed_options() {
    replay("84", "27-option-changes", 0, &[]);
    // The kernel adopts the peer's resync rate and repeats it; newer ones go by their own.
    let rate = [
        "missing Data SyncParam89(SyncParam89 { resync_rate_kib_s: 51200",
        "extra at the end of the connection: Data SyncParam89(SyncParam89 { resync_rate_kib_s: 102400",
    ];
    replay("84", "27-option-changes", 1, &rate);
}

#[test]
fn drbd84_authentication() {
    for name in ["14-auth-sha1", "15-auth-sha256"] {
        replay("84", name, 0, &[]);
        replay("84", name, 1, &[]);
    }
}

#[test]
fn drbd84_split_brain_with_policies() {
    replay("84", "10-split-brain-auto", 0, &[]);
    // The kernel makes a generation with the promotion, this project with the first write.
    let early = ["missing Data Uuids(Uuids { current: Uuid(BBC8AD32FA88AF10)"];
    replay("84", "10-split-brain-auto", 1, &early);
}

#[test]
fn drbd84_verify() {
    replay("84", "07-verify-clean", 0, &[]);
    replay("84", "07-verify-clean", 1, &[]);
}

#[test]
fn drbd84_authentication_with_different_secrets() {
    replay("84", "16-auth-fail", 0, &[]);
    // Without a secret the kernel says everything at once; this project hears the peer's options
    // first, and the peer asks for a secret instead.
    let at_once = [
        "missing Data SyncParam89(",
        "missing Data Sizes(",
        "missing Data Uuids(",
        "missing Data State ",
    ];
    replay("84", "16-auth-fail", 1, &at_once);
}

#[test]
fn drbd84_verify_of_planted_differences() {
    // The kernel tells its next generation to a peer that is leaving.
    let to_nobody = ["missing Data Uuids(Uuids { current: Uuid(169A98717665B463)"];
    replay("84", "08-verify-diff", 0, &to_nobody);
    replay("84", "08-verify-diff", 1, &[]);
}

#[test]
fn drbd84_lost_link() {
    // The cable was pulled before these went out.
    let lost = [
        "extra at the end of the connection: Control BarrierAck(BarrierAck { barrier: 1392508928",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(60464)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(57376)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(63408)",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(19320)",
    ];
    replay("84", "24-link-loss", 1, &lost);
    replay("84", "24-link-loss", 0, &[]);
}

#[test]
fn drbd84_crash_of_the_secondary() {
    replay("84", "11-secondary-crash", 0, &[]);
    // After a crash a kernel's Secondary marks nothing, and this project what the activity log
    // covers. A bitmap of few runs goes compressed.
    let log = [
        "missing Data Uuids(Uuids { current: Uuid(C7E500B112577F1C)",
        "missing Data Bitmap(BitmapWords { words: [238, 22",
        "missing Data Bitmap(BitmapWords { words: [] })",
        "extra at the end of the connection: Data CompressedBitmap(CompressedBitmap { first_run: Set",
    ];
    replay("84", "11-secondary-crash", 1, &log);
}

#[test]
fn drbd84_two_primaries() {
    let few = "29-dual-primary-few-conflicts";
    replay("84", few, 0, &[]);
    replay("84", few, 1, &[]);
    // With epochs of several writes the kernels lose count of those of which a write was superseded
    // (wire.md, 6.12): node 2 does not ack them, and node 1 breaks the link at the ack of a later one, with
    // acks of its own in its queue. What they mark follows from that.
    let mut node1 = vec!["missing Data Uuids(Uuids { current: Uuid(02B7BDB2D5D612BD)"; 2];
    node1.extend(["extra at the end of the connection: Control WriteAck("; 8]);
    node1.push(
        "extra at the end of the connection: Control BarrierAck(BarrierAck { barrier: 369098752",
    );
    replay("84", "22-dual-primary", 0, &node1);
    let mut node2 = vec!["extra at the end of the connection: Control BarrierAck("; 10];
    node2.push("missing Data Uuids(Uuids { current: Uuid(AE4BFF3F246C211B)");
    replay("84", "22-dual-primary", 1, &node2);
}

#[test]
fn drbd9_verify_of_planted_differences() {
    // A kernel that connects again without a new generation drops the marks of the verify and copies
    // nothing. Here the Primary makes one when the peer leaves, so that the three blocks are copied.
    let copied = [
        "missing Data Uuids110 a30531cddb60cd4a dirty 3 flags UuidFlags(STABLE | RECONNECT",
        "missing Data State Primary/Secondary Connected Established UpToDate/Outdated",
        "missing Data State Secondary/Secondary Connected Established UpToDate/UpToDate",
        "extra at the end of the connection: Data CompressedBitmap(",
    ];
    replay("9x", "07-2node-verify-diff", 0, &copied);
    replay("9x", "07-2node-verify-diff", 1, &[]);
}

#[test]
fn drbd9_diskless_primary() {
    replay("9x", "11-2node-diskless-primary-trim-thin", 1, &[]);
    // After a detach a kernel marks all that its log covers, and copies it back; here the log is closed, and
    // what was written meanwhile is copied. The sizes are told twice.
    let mut clean = vec!["missing Data RsThinDagtagReq("; 63];
    clean.extend([
        "missing Data Uuids110 94434eef9ad18777 dirty 1024 flags UuidFlags(STABLE",
        "missing Data Uuids110 94434eef9ad18777 dirty 1024 flags UuidFlags(INCONSISTENT",
        "missing Data Uuids110 c544f588247f6a29 dirty 0 flags UuidFlags(STABLE",
        "missing Data CompressedBitmap(CompressedBitmap { first_run: Set",
        "extra at the end of the connection: Data CompressedBitmap(",
        "extra at the end of the connection: Data Sizes(",
    ]);
    replay("9x", "11-2node-diskless-primary-trim-thin", 0, &clean);
}

#[test]
fn drbd84_diskless_primary() {
    // To a peer that attaches the kernel calls its disk Consistent until the bitmap is there, and
    // this project what it is.
    let inconsistent =
        ["missing Data State Secondary/Primary Connected WfBitmapS UpToDate/Consistent"];
    replay("84", "21-diskless-primary", 1, &inconsistent);
    // A kernel's disk fails when it is detached, and comes back like that of a crashed Primary;
    // here its log is closed, so that less is copied. The sizes are told twice.
    let clean = [
        "missing Data State Primary/Secondary Connected Established Failed/UpToDate",
        "missing Data Uuids(Uuids { current: Uuid(3D583E27062C9D29)",
        "missing Data CompressedBitmap(CompressedBitmap { first_run: Set, pad_bits: 6",
        "extra at the end of the connection: Data Sizes(",
        "extra at the end of the connection: Data CompressedBitmap(",
    ];
    replay("84", "21-diskless-primary", 0, &clean);
}

#[test]
fn drbd84_failing_disk_of_the_secondary() {
    // A kernel's Secondary marks nothing for a disk that failed, and this project what its log
    // covers. The sizes are told twice.
    let log = [
        "missing Data CompressedBitmap(CompressedBitmap { first_run: Set, pad_bits: 1",
        "extra at the end of the connection: Data Sizes(",
        "extra at the end of the connection: Data CompressedBitmap(CompressedBitmap { first_run: Set",
    ];
    replay("84", "28-disk-error", 1, &log);
    // Whether a write left before or after the news of the failed disk was read is not in a capture.
    replay_until(
        "84",
        "28-disk-error",
        0,
        Some("printf \"0 67584 error"),
        &[],
    );
}

#[test]
fn full_sync_between_84_and_93() {
    // The kernel 8.4 breaks the link at a packet that it does not know, before it has read the block.
    let too_late =
        ["extra at the end of the connection: Data RsDataReply(Data { sector: Sector(0)"];
    replay("9x", "40-mixed-84-93-fullsync", 0, &too_late);
    // A kernel 9 tells an 8.4 peer that it has quorum, in a bit that 8.4 does not know, and clears
    // the Primary's bit of the generation that it copies.
    let mut unknown = vec!["missing Data State Secondary/"; 8];
    unknown.push("missing Data Uuids(Uuids { current: Uuid(6861DF01A79B8A30)");
    replay("9x", "40-mixed-84-93-fullsync", 1, &unknown);
}

#[test]
fn drbd9_two_paths() {
    replay("9x", "30-2node-two-paths", 0, &[]);
    // The cable was pulled before these went out.
    let lost = [
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(37472)",
        "extra at the end of the connection: Control BarrierAck(BarrierAck { barrier: 1962934272",
        "extra at the end of the connection: Control WriteAck(BlockAck { sector: Sector(22416)",
    ];
    replay("9x", "30-2node-two-paths", 1, &lost);
}

#[test]
fn drbd9_bitmap_blocks_of_two_sizes() {
    // By choice a bitmap is reduced to the blocks of a peer with larger ones before it is sent.
    let reduced = [
        "missing Data CompressedBitmap(CompressedBitmap { first_run: Clear, pad_bits: 0, code: [223, 37",
        "extra at the end of the connection: Data CompressedBitmap(",
    ];
    replay("9x", "34-2node-bitmap-block-size", 0, &reduced);
    replay("9x", "34-2node-bitmap-block-size", 1, &[]);
}
