//! `drbdadm` as a program: it finds its configuration and its helpers.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A node with a file for a disk. There is no helper beside the program, so it calls itself.
fn node() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    symlink(env!("CARGO_BIN_EXE_lockstep"), dir.path().join("drbdadm")).unwrap();
    let disk = dir.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let config = format!(
        "global {{ disable-ip-verification; }}\n\
         resource r {{\n device minor 1040001; disk {};\n\
         on alpha {{ node-id 0; address 127.0.0.1:7001; }}\n on bravo {{ node-id 1; address 127.0.0.1:7002; }} }}\n",
        disk.display()
    );
    fs::write(dir.path().join("drbd.conf"), config).unwrap();
    fs::write(dir.path().join("node-name"), "alpha\n").unwrap();
    dir
}

fn drbdadm(dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(dir.join("drbdadm"));
    command
        .args(words)
        .env("LOCKSTEP_DIR", dir)
        .env_remove("__DRBD_NODE__")
        .output()
        .unwrap()
}

#[test]
fn metadata_is_made_on_a_file_that_the_configuration_names() {
    let node = node();
    let made = drbdadm(node.path(), &["create-md", "r"]);
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let dumped = drbdadm(node.path(), &["dump-md", "r"]);
    let text = String::from_utf8_lossy(&dumped.stdout);
    assert!(
        dumped.status.success(),
        "{}",
        String::from_utf8_lossy(&dumped.stderr)
    );
    assert!(text.contains("version \"v09\";"), "{text}");
    assert!(!text.contains("device-uuid 0x0000000000000000;"), "{text}");
}

#[test]
fn a_bad_configuration_has_exit_code_10() {
    let node = node();
    fs::write(node.path().join("drbd.conf"), "resource r {").unwrap();
    let found = drbdadm(node.path(), &["up", "r"]);
    assert_eq!(found.status.code(), Some(10));
    let text = String::from_utf8_lossy(&found.stderr).into_owned();
    assert!(
        text.contains("drbd.conf:1: Parse error: '}' expected,"),
        "{text}"
    );
}

/// Such calls need no process of their own; what they say went through a lock that drbdadm held.
#[test]
fn a_call_that_fails_says_so_at_once() {
    let node = node();
    assert!(drbdadm(node.path(), &["create-md", "r"]).status.success());
    for command in ["attach", "new-minor", "new-peer", "new-path", "connect"] {
        let mut child = Command::new(node.path().join("drbdadm"))
            .args([command, "r"])
            .env("LOCKSTEP_DIR", node.path())
            .env_remove("__DRBD_NODE__")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if begun.elapsed() > Duration::from_secs(30) {
                child.kill().unwrap();
                panic!("drbdadm {command} hangs");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(20), "{command}: {said}");
        assert!(said.contains("lockstepd"), "{command}: {said}");
        assert!(!said.contains("did not terminate"), "{command}: {said}");
    }
}
