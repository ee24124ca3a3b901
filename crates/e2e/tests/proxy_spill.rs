//! WAN proxies as processes. The spill disk is full: nothing is lost, DRBD's sockets stay, and the
//! disk is used again when there is room. No root: it is neither needed nor kept, and system calls
//! that a proxy has no use for are refused, also across an upgrade.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
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
    log: PathBuf,
    socket: PathBuf,
}

impl Proxy {
    fn start(directory: &Path, commands: &str, arguments: &[&str]) -> Result<Proxy> {
        fs::create_dir(directory)?;
        let socket = directory.join("socket");
        Proxy::spawn(
            Command::new(binary()?),
            directory,
            &socket,
            commands,
            arguments,
        )
    }

    fn spawn(
        mut command: Command,
        directory: &Path,
        socket: &Path,
        commands: &str,
        arguments: &[&str],
    ) -> Result<Proxy> {
        let (log, list) = (directory.join("log"), directory.join("commands"));
        fs::write(&list, commands)?;
        let out = fs::File::options().create(true).append(true).open(&log)?;
        let child = command
            .args(["proxy", "run", "--insecure", "--socket"])
            .arg(socket)
            .arg("--config")
            .arg(list)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .context("starting a proxy")?;
        Ok(Proxy {
            child,
            log,
            socket: socket.to_path_buf(),
        })
    }

    /// Of `/proc/PID/status`.
    fn status(&self, field: &str) -> Result<String> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        let value = line.with_context(|| format!("{field} in {text}"))?;
        Ok(value.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    fn ctl(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(binary()?)
            .args(["proxy", "ctl", "--socket"])
            .arg(&self.socket)
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
        fs::read_to_string(&self.log).unwrap_or_default()
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

/// The user and group that own nothing.
const NOBODY: u32 = 65_534;

/// A directory of that user.
fn own_directory(path: PathBuf) -> Result<PathBuf> {
    fs::create_dir(&path)?;
    std::os::unix::fs::chown(&path, Some(NOBODY), Some(NOBODY))?;
    Ok(path)
}

#[test]
fn a_proxy_needs_no_root_and_does_not_keep_it() -> Result<()> {
    if !machine_has("root", rustix::process::geteuid().is_root()) {
        return Ok(());
    }
    let root = tempfile::Builder::new()
        .prefix("lockstep-user-")
        .permissions(fs::Permissions::from_mode(0o755))
        .tempdir()?;
    let pid = std::process::id().to_be_bytes();
    let at = |port| SocketAddr::from((Ipv4Addr::new(127, 14, pid[2], pid[3]), port));
    let drbd = TcpListener::bind(at(7915))?;
    let [inside_a, inside_b, outside_a, outside_b] = [at(816), at(7817), at(7716), at(7717)];

    // One was never root.
    let program = root.path().join("lockstep");
    fs::copy(binary()?, &program)?;
    let mut plain = Command::new(&program);
    plain.uid(NOBODY).gid(NOBODY);
    let own = own_directory(root.path().join("b"))?;
    let commands_b = format!(
        "add connection b {inside_b} {outside_a} {outside_b} {} --dial=never \
         --session-hold=300\n",
        at(7915)
    );
    let b = Proxy::spawn(plain, &own, &own.join("socket"), &commands_b, &[])?;
    // The other was, and has a port of its own below 1024.
    let spill = own_directory(root.path().join("spill"))?;
    let spill = spill.to_str().context("the path is UTF-8")?;
    let directory = root.path().join("a");
    fs::create_dir(&directory)?;
    let commands_a = format!(
        "add connection a {inside_a} {outside_b} {outside_a} {} --dial=always --memlimit=2M \
         --max-lag=0 --bwlimit=256k\n",
        at(7914)
    );
    let arguments = [
        "--user",
        "nobody",
        "--spill-dir",
        spill,
        "--spill-limit",
        "64M",
    ];
    let start = |more: &[&str]| -> Result<Proxy> {
        let socket = directory.join("run/socket");
        let arguments = [&arguments, more].concat();
        Proxy::spawn(
            Command::new(binary()?),
            &directory,
            &socket,
            &commands_a,
            &arguments,
        )
    };
    let mut a = start(&["--metrics", &at(9799).to_string()])?;
    let first = |state: &serde_json::Value| state["connections"][0].clone();
    let up = |s: &serde_json::Value| first(s)["bulk_carriers"].as_u64() > Some(0);
    a.wait("a session", up)?;

    let mut near = TcpStream::connect(inside_a)?;
    near.write_all(&DATA)?;
    let (mut far, _) = drbd.accept()?;
    far.set_read_timeout(Some(PATIENCE))?;
    far.read_exact(&mut [0; 8])?;
    let data = noise();
    let sent = data.clone();
    let sender = std::thread::spawn(move || near.write_all(&sent).map(|()| near));
    a.wait("spilling", |s| {
        first(s)["spilled_bytes"].as_u64() > Some(4 << 20)
    })?;
    let mut scrape = TcpStream::connect(at(9799))?;
    scrape.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    scrape.read_to_string(&mut text)?;
    ensure!(text.contains("lockstep_proxy_"), "{text}");

    let new = start(&["--take-over"])?;
    let mut old = std::mem::replace(&mut a, new);
    ensure!(old.child.wait()?.success(), "{}", a.log());
    a.wait("a session of the new process", up)?;
    a.ctl(&["-c", "set bwlimit a 0"])?;
    let mut got = vec![0; LEN];
    far.read_exact(&mut got)?;
    ensure!(got == data, "other bytes than were sent");
    let near = sender.join().expect("the sender does not panic")?;
    a.wait("no socket was reset", |s| {
        first(s)["counters"]["streams_reset"] == 0 && first(s)["state"] == "Connected"
    })?;
    drop((near, far));

    for (proxy, capabilities) in [(&a, "0000000000000400"), (&b, "0000000000000000")] {
        let user = format!("{NOBODY} {NOBODY} {NOBODY} {NOBODY}");
        for (field, expected) in [
            ("Uid:", user.as_str()),
            ("Gid:", &user),
            ("CapEff:", capabilities),
            ("CapPrm:", capabilities),
            ("NoNewPrivs:", "1"),
            ("Seccomp:", "2"),
        ] {
            let found = proxy.status(field)?;
            ensure!(found == expected, "{field} {found}, not {expected}");
        }
    }
    ensure!(a.status("Groups:")? == NOBODY.to_string());
    ensure!(!a.log().contains("ERROR"), "{}", a.log());

    // A second one beside it is refused; after a crash the place is free again.
    let mut second = start(&[])?;
    ensure!(!second.child.wait()?.success());
    ensure!(
        a.log().contains("another proxy already answers"),
        "{}",
        a.log()
    );
    a.child.kill()?;
    a.child.wait()?;
    let mut a = start(&[])?;
    a.wait("a session after a crash", up)?;
    // Who is told to end tells the peer, which waits for nothing then.
    let mut near = TcpStream::connect(inside_a)?;
    near.write_all(&DATA)?;
    let (mut far, _) = drbd.accept()?;
    far.set_read_timeout(Some(PATIENCE))?;
    far.read_exact(&mut [0; 8])?;
    let id = rustix::process::Pid::from_child(&a.child);
    rustix::process::kill_process(id, rustix::process::Signal::TERM)?;
    ensure!(a.child.wait()?.success(), "{}", a.log());
    let end = far.read(&mut [0]);
    let reset = |kind| kind == std::io::ErrorKind::ConnectionReset;
    ensure!(
        end.as_ref().is_ok_and(|len| *len == 0) || end.as_ref().is_err_and(|e| reset(e.kind())),
        "{end:?}"
    );
    for user in ["root", "no-such-user"] {
        let mut wrong = Proxy::spawn(
            Command::new(binary()?),
            &directory,
            &directory.join("other"),
            "",
            &["--user", user],
        )?;
        ensure!(!wrong.child.wait()?.success());
        let log = wrong.log();
        ensure!(log.contains(&format!("--user {user}: ")), "{log}");
    }
    drop((near, far, a, b));
    Ok(())
}
