//! The spill disk of a WAN proxy is full: nothing is lost, DRBD's sockets stay, and the disk is used
//! again when there is room.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{PATIENCE, binary, can_mount, machine_has, run};

const DATA: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf2\0\0";
const LEN: usize = 12 << 20;

/// A small file system of its own.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn new(at: PathBuf, size: &str) -> Result<Tmpfs> {
        fs::create_dir(&at)?;
        let options = format!("size={size}");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "lockstep-spill"])
            .arg(&at))?;
        Ok(Tmpfs(at))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // The processes that used it have ended.
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

struct Proxy {
    child: Child,
    directory: PathBuf,
}

impl Proxy {
    fn start(directory: &Path, commands: &str, arguments: &[&str]) -> Result<Proxy> {
        fs::create_dir(directory)?;
        fs::write(directory.join("commands"), commands)?;
        let log = fs::File::create(directory.join("log"))?;
        let child = Command::new(binary()?)
            .args(["proxy", "run", "--insecure", "--socket"])
            .arg(directory.join("socket"))
            .arg("--config")
            .arg(directory.join("commands"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting a proxy")?;
        Ok(Proxy {
            child,
            directory: directory.to_path_buf(),
        })
    }

    fn ctl(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(binary()?)
            .args(["proxy", "ctl", "--socket"])
            .arg(self.directory.join("socket"))
            .args(words)
            .stdin(Stdio::null())
            .output()?;
        ensure!(
            output.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    fn wait(&self, what: &str, done: impl Fn(&serde_json::Value) -> bool) -> Result<()> {
        let begin = Instant::now();
        loop {
            let state = self.ctl(&["--json", "show", "connections"]);
            let state: serde_json::Value =
                serde_json::from_str(&state.unwrap_or_default()).unwrap_or_default();
            if done(&state) {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < PATIENCE,
                "not within {PATIENCE:?}: {what}\n{state:#}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // One that has ended by itself is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn noise() -> Vec<u8> {
    let mut seed = 88_172_645_463_325_252u64;
    let mut out = Vec::with_capacity(LEN + 8);
    while out.len() < LEN {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        out.extend_from_slice(&seed.to_le_bytes());
    }
    out.truncate(LEN);
    out
}

#[test]
fn a_full_spill_disk_costs_speed_and_nothing_else() -> Result<()> {
    if !can_mount() || !machine_has("mount", Path::new("/usr/bin/mount").exists()) {
        return Ok(());
    }
    let root = tempfile::Builder::new()
        .prefix("lockstep-spill-")
        .tempdir()?;
    let disk = Tmpfs::new(root.path().join("disk"), "6m")?;
    let pid = std::process::id().to_be_bytes();
    let at = |port| SocketAddr::from((Ipv4Addr::new(127, 15, pid[2], pid[3]), port));
    let drbd = TcpListener::bind(at(7915))?;
    let ends = [at(7816), at(7817), at(7716), at(7717)];
    let [inside_a, inside_b, outside_a, outside_b] = ends;
    let b = Proxy::start(
        &root.path().join("b"),
        &format!(
            "add connection b {inside_b} {outside_a} {outside_b} {} --dial=never\n",
            at(7915)
        ),
        &[],
    )?;
    let spill = disk.0.to_str().context("the path is UTF-8")?;
    let a = Proxy::start(
        &root.path().join("a"),
        &format!(
            "add connection a {inside_a} {outside_b} {outside_a} {} --dial=always --memlimit=2M \
             --max-lag=0 --bwlimit=64k\n",
            at(7914)
        ),
        &["--spill-dir", spill, "--spill-limit", "64M"],
    )?;
    let first = |state: &serde_json::Value| state["connections"][0].clone();
    a.wait("a session", |s| {
        first(s)["bulk_carriers"].as_u64() > Some(0)
    })?;
    let mut near = TcpStream::connect(inside_a)?;
    near.write_all(&DATA)?;
    let (mut far, _) = drbd.accept()?;
    far.set_read_timeout(Some(PATIENCE))?;
    let mut head = [0; 8];
    far.read_exact(&mut head)?;
    let data = noise();
    let sent = data.clone();
    let sender = std::thread::spawn(move || near.write_all(&sent).map(|()| near));
    a.wait("the full disk is noticed", |s| {
        first(s)["counters"]["spill_errors"].as_u64() > Some(0)
    })?;
    ensure!(a.log().contains("No space left"), "{}", a.log());
    let memory = |s: &serde_json::Value| first(s)["buffered_memory_bytes"].as_u64();
    a.wait("the buffer is full", |s| memory(s) > Some(1 << 20))?;
    a.wait("its limit holds", |s| memory(s) <= Some(2 << 20))?;
    // What was spilled comes back, and so does the room.
    a.ctl(&["-c", "set bwlimit a 0"])?;
    let mut got = vec![0; LEN];
    far.read_exact(&mut got)?;
    ensure!(got == data, "other bytes than were sent");
    let near = sender.join().expect("the sender does not panic")?;
    a.wait("the disk is empty", |s| s["spill_used_bytes"] == 0)?;
    a.wait("no socket was reset", |s| {
        first(s)["counters"]["streams_reset"] == 0 && first(s)["state"] == "Connected"
    })?;
    drop((near, far, a, b));
    Ok(())
}
