//! `lockstep inspect wire` over every capture of kernel DRBD in the repository.
//!
//! Each packet must decode and encode to the same bytes, and the packets of each sender must be
//! those that the capture's transcript lists, which another program counted.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn inspect(args: &[&str], file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args(["inspect", "wire"])
        .args(args)
        .arg(file)
        .output()
        .expect("the binary was built for this test")
}

fn captures(family: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/captures")
        .join(family);
    let entries = fs::read_dir(&dir).expect("captures are part of the repository");
    let mut files: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".pcap.gz"))
        .collect();
    files.sort();
    files
}

/// Packets by TCP connection ("client > server"), sender and name.
type Counts = BTreeMap<(String, String, String), u64>;

/// What the transcript beside a capture lists, and the number of packets it says are cut off.
fn listed(capture: &Path) -> (Counts, usize) {
    let name = capture.to_string_lossy().replace(".pcap.gz", ".txt");
    let text = fs::read_to_string(name).unwrap();
    let (_, list) = text.split_once("\npackets per connection").unwrap();
    let (list, _) = list.split_once("\nkernel log").unwrap();
    let (mut counts, mut connection, mut cut) = (Counts::new(), String::new(), 0);
    for line in list.lines().skip(1) {
        if let Some((sender, packets)) = line.trim().split_once(" sends: ") {
            cut += packets.matches("[tail").count();
            let packets = packets.split("  [").next().unwrap_or_default();
            for packet in packets.split(", ") {
                let Some((packet, count)) = packet.trim().split_once(" x") else {
                    continue;
                };
                let key = (connection.clone(), sender.to_owned(), packet.to_owned());
                counts.insert(key, count.parse().unwrap());
            }
        } else if line.contains(" > ") && !line.starts_with('(') {
            connection = line.split("  ").next().unwrap_or_default().to_owned();
        }
    }
    (counts, cut)
}

/// What the tool lists, and the number of packets it says are cut off.
fn seen(json: &str) -> (Counts, usize) {
    let (mut counts, mut cut) = (Counts::new(), 0);
    let mut clients: BTreeMap<(String, String), String> = BTreeMap::new();
    for line in json.lines() {
        let object: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let (from, to) = (text("from"), text("to"));
        if object.get("problem").is_some() {
            cut += 1;
            // A packet is listed as soon as its fields are there; the transcript counts whole ones.
            let packet = text("problem").split(' ').next().unwrap().to_owned();
            let sender = from.rsplit_once(':').unwrap().0.to_owned();
            if let Some(count) =
                counts.get_mut(&(clients[&ends(&from, &to)].clone(), sender, packet))
            {
                *count -= 1;
            }
            continue;
        }
        let ends = if from < to {
            (from.clone(), to.clone())
        } else {
            (to.clone(), from.clone())
        };
        if text("packet").starts_with("P_INITIAL_") {
            clients.insert(ends.clone(), format!("{from} > {to}"));
        }
        let sender = from.rsplit_once(':').unwrap().0.to_owned();
        *counts
            .entry((clients[&ends].clone(), sender, text("packet")))
            .or_default() += 1;
    }
    (counts, cut)
}

/// Both ends of a TCP connection in a fixed order.
fn ends(from: &str, to: &str) -> (String, String) {
    (from.min(to).to_owned(), from.max(to).to_owned())
}

fn check(family: &str, skip: &str) {
    let files = captures(family);
    assert!(files.len() > 20, "the captures are there");
    let mut packets = 0;
    for file in files {
        if file.to_string_lossy().contains(skip) {
            continue;
        }
        let output = inspect(&["--json"], &file);
        let errors = String::from_utf8_lossy(&output.stderr);
        let json = String::from_utf8(output.stdout).unwrap();
        let failed: Vec<_> = json
            .lines()
            .filter(|line| line.contains("\"failure\":true"))
            .collect();
        assert!(
            output.status.success(),
            "{}: {errors}{failed:?}",
            file.display()
        );
        let (seen, seen_cut) = seen(&json);
        packets += seen.values().sum::<u64>();
        // The program behind the transcript does not know the chunks of the lb-tcp transport.
        if file.to_string_lossy().contains("lb-tcp-balanced") {
            assert_eq!(seen.values().sum::<u64>(), 297, "{}", file.display());
            continue;
        }
        let (listed, listed_cut) = listed(&file);
        assert_eq!(seen, listed, "{}", file.display());
        assert_eq!(seen_cut, listed_cut, "{}", file.display());
    }
    assert!(packets > 30_000, "{packets}");
}

#[test]
fn every_packet_of_drbd_84_decodes_and_encodes_to_the_same_bytes() {
    check("84", "no capture is skipped");
}

#[test]
fn every_packet_of_drbd_9_decodes_and_encodes_to_the_same_bytes() {
    check("9x", "rdma");
}

#[test]
fn a_capture_of_the_rdma_transport_is_named_as_such() {
    let all = captures("9x");
    let file = all
        .iter()
        .find(|file| file.to_string_lossy().contains("rdma"))
        .unwrap();
    let output = inspect(&["--summary"], file);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors.contains("the rdma transport is not decoded"),
        "{errors}"
    );
}

#[test]
fn integrity_digests_and_fields_are_shown() {
    let all = captures("84");
    let file = all
        .iter()
        .find(|file| file.to_string_lossy().contains("integrity-sha1"))
        .unwrap();
    let text = String::from_utf8(inspect(&[], file).stdout).unwrap();
    let write = text.lines().find(|line| line.contains(" P_DATA ")).unwrap();
    let (_, digest) = write.split_once(" digest=").unwrap();
    assert_eq!(digest.split(' ').next().unwrap().len(), 40, "{write}");
    assert!(
        write.contains(" data ") && write.contains(" dp_flags="),
        "{write}"
    );
    let protocol = text
        .lines()
        .find(|line| line.contains(" P_PROTOCOL "))
        .unwrap();
    assert!(protocol.contains("integrity_alg=sha1"), "{protocol}");
}

/// Exit code and messages for a file with these bytes.
fn broken(bytes: &[u8]) -> (Option<i32>, String) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let output = inspect(&["--summary"], file.path());
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn a_file_that_is_no_sound_capture_is_an_error_that_says_why() {
    let check = |bytes: &[u8], reason: &str| {
        let (code, errors) = broken(bytes);
        assert_eq!(code, Some(1), "{reason}: {errors}");
        assert!(errors.contains(reason), "{reason}: {errors}");
    };
    let whole = fs::read(&captures("84")[0]).unwrap();
    check(b"resource r0 { }", "not a capture");
    check(b"", "not a capture");
    check(&whole[..whole.len() / 2], "compressed file broken");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x55;
    assert_eq!(broken(&flipped).0, Some(1));
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&whole[..])
        .take(100_000)
        .read_to_end(&mut plain)
        .unwrap();
    check(&plain, "the capture is truncated");
    check(&plain[..24], "no replication stream over TCP found");
}

#[test]
fn a_file_that_is_not_there_and_wrong_usage_are_told_apart() {
    let output = inspect(&[], Path::new("/nonexistent/capture.pcap"));
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot open the file"));
    let output = inspect(&["--frobnicate"], Path::new("x"));
    assert_eq!(output.status.code(), Some(2));
}
