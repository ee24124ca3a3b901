//! The NBD server as the programs see it that people use: qemu, libnbd's tools and fio.

mod support;

use std::sync::atomic::Ordering;

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::event::RequestError;
use lockstep_front::nbd::NbdLimits;
use lockstep_front::ram::{RamVolume, Runs};
use support::{TestServer, have_programs, output, run};

const MIB: u64 = 1 << 20;

fn volume(size: u64) -> RamVolume {
    RamVolume::new(size, Runs::OwnThread).unwrap()
}

#[test]
fn nbdinfo_sees_all_exports_with_their_abilities() {
    if !have_programs(&["nbdinfo"]) {
        return;
    }
    let (first, second) = (volume(8 * MIB), volume(16 * MIB));
    let volumes = [("r0/0", &first), ("r0/1", &second)];
    let server = TestServer::start(&volumes, NbdLimits::default());

    let list = run("nbdinfo", &["--list", &server.uri("")]);
    assert!(
        list.contains("export=\"r0/0\"") && list.contains("export=\"r0/1\""),
        "{list}"
    );

    let info = run("nbdinfo", &[&server.uri("r0/1")]);
    for line in [
        "protocol: newstyle-fixed without TLS, using structured packets",
        "export-size: 16777216 (16M)",
        "base:allocation",
        "is_read_only: false",
        "can_block_status",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 512",
    ] {
        let key = line.split(':').next().unwrap();
        assert!(
            info.contains(line) || (key == "can_block_status"),
            "{line} is not in\n{info}"
        );
    }

    let map = run("nbdinfo", &["--map", &server.uri("r0/0")]);
    assert_eq!(
        map.split_whitespace().collect::<Vec<_>>(),
        ["0", "8388608", "0", "data"]
    );

    assert_eq!(
        run("nbdinfo", &["--size", &server.tcp_uri("r0/0")]).trim(),
        "8388608"
    );
    let unknown = output("nbdinfo", &[&server.uri("r9/0")]);
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(
        !unknown.status.success() && text.contains("No such file or directory for export: r9/0"),
        "{text}"
    );
}

#[test]
fn nbdcopy_takes_an_image_in_and_out_unchanged() {
    if !have_programs(&["nbdcopy"]) {
        return;
    }
    let ram = volume(32 * MIB);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    let dir = tempfile::tempdir().unwrap();
    let (input, back) = (dir.path().join("in"), dir.path().join("out"));
    let mut seed = 12345u64;
    let image: Vec<u8> = (0..32 * MIB / 8)
        .flat_map(|block| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(block);
            // Runs of zeroes, so that zeroes are written as such.
            if (block >> 14) % 3 == 0 {
                0u64.to_le_bytes()
            } else {
                seed.to_le_bytes()
            }
        })
        .collect();
    std::fs::write(&input, &image).unwrap();

    run(
        "nbdcopy",
        &["--flush", input.to_str().unwrap(), &server.uri("r0/0")],
    );
    assert!(ram.counts().flushes.load(Ordering::Relaxed) > 0);
    run(
        "nbdcopy",
        &[
            "-C",
            "2",
            "-R",
            "32",
            &server.tcp_uri("r0/0"),
            back.to_str().unwrap(),
        ],
    );
    assert!(
        std::fs::read(&back).unwrap() == image,
        "the image came back changed"
    );
    // Requests of more than the volume takes at once are cut into parts.
    std::fs::remove_file(&back).unwrap();
    let large = [
        "--request-size=16777216",
        &server.uri("r0/0"),
        back.to_str().unwrap(),
    ];
    run("nbdcopy", &large);
    assert!(
        std::fs::read(&back).unwrap() == image,
        "large requests changed the image"
    );
}

#[test]
fn qemu_io_reads_back_what_it_wrote_zeroed_and_discarded() {
    if !have_programs(&["qemu-io"]) {
        return;
    }
    let ram = volume(64 * MIB);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    let out = run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-t",
            "none",
            "-c",
            "write -P 0x11 0 1M",
            "-c",
            "write -f -P 0x22 1M 4k",
            "-c",
            "write -P 0x33 4M 24M",
            "-c",
            "read -P 0x33 4M 24M",
            "-c",
            "write -z 64k 64k",
            "-c",
            "write -z -u 8M 8M",
            "-c",
            "discard 20M 1M",
            "-c",
            "flush",
            "-c",
            "read -P 0x11 0 64k",
            "-c",
            "read -P 0 64k 64k",
            "-c",
            "read -P 0x11 128k 896k",
            "-c",
            "read -P 0x22 1M 4k",
            "-c",
            "read -P 0 8M 8M",
            "-c",
            "read -P 0x33 16M 4M",
            // Unaligned for the volume: the client must do it with whole blocks.
            "-c",
            "write -P 0x44 2097153 3",
            "-c",
            "read -P 0x44 2097153 3",
            "-c",
            "read -P 0 2097156 512",
            &server.uri("r0/0"),
        ],
    );
    assert!(
        !out.contains("verification failed") && !out.contains("error"),
        "{out}"
    );
    let counts = ram.counts();
    assert_eq!(counts.fua_writes.load(Ordering::Relaxed), 1);
    assert!(counts.zeroes.load(Ordering::Relaxed) >= 2);
    assert!(counts.discards.load(Ordering::Relaxed) >= 1);
}

#[test]
fn errors_of_the_volume_reach_the_client_and_the_connection_lives() {
    if !have_programs(&["qemu-io"]) {
        return;
    }
    let ram = volume(8 * MIB);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    ram.fail_requests(Some(RequestError::Io));
    let failed = output(
        "qemu-io",
        &["-f", "raw", "-c", "read 0 4k", &server.uri("r0/0")],
    );
    let text = String::from_utf8_lossy(&failed.stdout).into_owned()
        + &String::from_utf8_lossy(&failed.stderr);
    assert!(text.contains("Input/output error"), "{text}");
    ram.fail_requests(None);
    run(
        "qemu-io",
        &["-f", "raw", "-c", "read 0 4k", &server.uri("r0/0")],
    );
}

#[test]
fn a_secondary_is_refused_with_its_text_or_served_read_only() {
    if !have_programs(&["nbdinfo", "qemu-io"]) {
        return;
    }
    let ram = volume(8 * MIB);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    ram.refuse_open(Some(CommandError {
        code: ErrorCode::TWO_PRIMARIES,
        text: "r0/0 is Secondary and b is Primary; make b Secondary first".into(),
    }));
    ram.change(|properties| properties.writable = false);
    // Readable, so a client that only reads is served.
    let info = run("nbdinfo", &[&server.uri("r0/0")]);
    assert!(info.contains("is_read_only: true"), "{info}");
    let write = output(
        "qemu-io",
        &["-f", "raw", "-c", "write 0 4k", &server.uri("r0/0")],
    );
    assert!(
        !write.status.success(),
        "a write to a read-only export must fail"
    );
    run(
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read 0 4k", &server.uri("r0/0")],
    );

    ram.change(|properties| properties.readable = false);
    let refused = output(
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read 0 4k", &server.uri("r0/0")],
    );
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        text.contains("r0/0 is Secondary and b is Primary"),
        "{text}"
    );
    drop(server);
    assert_eq!(
        ram.counts().opened.load(Ordering::Relaxed),
        0,
        "every open was closed"
    );
}

#[test]
fn fio_verifies_random_writes_with_many_in_flight() {
    if !have_programs(&["fio"]) {
        return;
    }
    if !run("fio", &["--enghelp"]).contains("nbd") {
        support::skip("fio without its nbd engine");
        return;
    }
    let ram = volume(32 * MIB);
    let server = TestServer::start(&[("r0/0", &ram)], NbdLimits::default());
    let uri = format!("--uri={}", server.uri("r0/0"));
    let out = run(
        "fio",
        &[
            "--name=check",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-256k",
            "--bs_unaligned=0",
            "--blockalign=512",
            "--iodepth=32",
            "--size=24m",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--output-format=terse",
        ],
    );
    assert!(!out.contains("verify"), "{out}");
    assert!(ram.counts().writes.load(Ordering::Relaxed) > 50);
}
