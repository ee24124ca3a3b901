//! The proxy as processes, driven by drbdadm: proxy-up brings both ends together, bytes pass,
//! proxy-down takes them away.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

const BIN: &str = env!("CARGO_BIN_EXE_lockstep");
const PATIENCE: Duration = Duration::from_secs(40);
const FIRST: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf2\0\0";

/// A proxy process that ends with the test.
struct Proxy {
    child: Child,
    socket: PathBuf,
}

impl Proxy {
    fn start(directory: &Path, name: &str) -> Proxy {
        let options = ["--log", "error", "--memory-max", "64M"];
        let mut command = Command::new(BIN);
        command.args(["proxy", "run", "--secret-file", "secret"]);
        Proxy::spawn(command.args(options), directory, name)
    }

    /// Runs a command that ends in 'proxy run', and waits until it answers on `NAME.sock`.
    fn spawn(command: &mut Command, directory: &Path, name: &str) -> Proxy {
        let socket = directory.join(format!("{name}.sock"));
        let child = command
            .arg("--socket")
            .arg(&socket)
            .current_dir(directory)
            .spawn()
            .unwrap();
        let proxy = Proxy { child, socket };
        wait("the control socket", || {
            proxy.ctl(&["-c", "show"]).status.success()
        });
        proxy
    }

    fn ctl(&self, args: &[&str]) -> Output {
        Command::new(BIN)
            .args(["proxy", "ctl"])
            .arg("--socket")
            .arg(&self.socket)
            .args(args)
            .output()
            .unwrap()
    }

    fn show(&self, what: &str) -> String {
        String::from_utf8(self.ctl(&["-c", what]).stdout).unwrap()
    }

    fn drbdadm(&self, directory: &Path, node: &str, command: &str) {
        let output = Command::new(BIN)
            .args(["drbdadm", "-c"])
            .arg(directory.join("r0.conf"))
            .arg("-p")
            .arg(directory.join("drbd-proxy-ctl"))
            .args([command, "r0"])
            .env("__DRBD_NODE__", node)
            .env("LOCKSTEP_PROXY_SOCKET", &self.socket)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_limit_of_open_files_is_raised_as_far_as_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("secret"), [b'x'; 32]).unwrap();
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "ulimit -Sn 99; ulimit -Hn 999; exec \"$@\"",
            "sh",
            BIN,
        ])
        .args(["proxy", "run", "--log", "error", "--secret-file", "secret"]);
    let proxy = Proxy::spawn(&mut command, directory.path(), "a");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", proxy.child.id())).unwrap();
    let line = limits.lines().find(|l| l.starts_with("Max open files"));
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    assert_eq!(words[3..5], ["999", "999"], "{limits}");
}

#[test]
fn the_log_level_changes_while_the_proxy_runs() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    std::fs::write(at.join("secret"), [b'x'; 32]).unwrap();
    let log = std::fs::File::create(at.join("log")).unwrap();
    let mut command = Command::new(BIN);
    command.args(["proxy", "run", "--log", "error", "--secret-file", "secret"]);
    let proxy = Proxy::spawn(command.stderr(log), at, "a");
    let logged = || std::fs::read_to_string(at.join("log")).unwrap();
    proxy.ctl(&["-c", "list"]);
    assert!(proxy.ctl(&["-c", "set loglevel debug"]).status.success());
    proxy.ctl(&["-c", "show avail-plugins"]);
    assert!(proxy.ctl(&["set", "loglevel", "err"]).status.success());
    proxy.ctl(&["-c", "show statistics"]);
    let refused = proxy.ctl(&["-c", "set loglevel loud"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("'loud' is not valid"), "{text}");
    assert_eq!(proxy.show("show"), "");
    let log = logged();
    assert!(log.contains("show avail-plugins"), "{log}");
    assert!(
        !log.contains("list") && !log.contains("statistics"),
        "{log}"
    );
    let wrong = Command::new(BIN)
        .args(["proxy", "run", "--insecure", "--log", "loud"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("--log: log level 'loud'"));
}

#[test]
fn a_hangup_and_a_command_read_the_identity_again() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let write = |name: &str, text: &str| std::fs::write(at.join(name), text).unwrap();
    let keys = || lockstep_proxy::generate_keys().unwrap();
    let ((private, _), (_, first), (_, second)) = (keys(), keys(), keys());
    write("key", &private);
    write("peers", &first);
    let log = std::fs::File::create(at.join("log")).unwrap();
    let mut command = Command::new(BIN);
    command.args(["proxy", "run", "--key-file", "key", "--peer-file", "peers"]);
    let proxy = Proxy::spawn(command.stderr(log), at, "a");
    let logged = |text: &str| {
        std::fs::read_to_string(at.join("log"))
            .unwrap()
            .contains(text)
    };
    wait("the start", || logged("the proxy is ready"));
    let hangup = || {
        let id = rustix::process::Pid::from_raw(proxy.child.id() as i32).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::HUP).unwrap();
    };
    // Two peers need lists.
    write("peers", &format!("{first}\n{second}\n"));
    hangup();
    wait("the refusal", || logged("the old one stays in use"));
    assert!(logged("with several peers"));
    let refused = proxy.ctl(&["reload"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        text.contains("old identity stays in use: with several"),
        "{text}"
    );
    write("peers", &format!("{first}=r0-*\n{second}=r1-*\n"));
    hangup();
    wait("the new identity", || logged("the identity was read again"));
    assert!(proxy.ctl(&["-c", "reload"]).status.success());
    std::fs::remove_file(at.join("key")).unwrap();
    let refused = proxy.ctl(&["-c", "reload"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && text.contains("--key-file"),
        "{text}"
    );
    // It goes on.
    assert!(proxy.ctl(&["-c", "show"]).status.success());
}

#[test]
fn drbdadm_brings_two_proxies_up_and_down() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let keygen = Command::new(BIN)
        .args(["proxy", "keygen", "--secret"])
        .output()
        .unwrap();
    std::fs::write(at.join("secret"), keygen.stdout).unwrap();
    std::os::unix::fs::symlink(BIN, at.join("drbd-proxy-ctl")).unwrap();
    let pid = std::process::id();
    let site = |number: u32| format!("127.{}.{}.{number}", 192 + (pid >> 8 & 0x3f), pid & 0xff);
    let (alice, bob) = (site(1), site(2));
    let host = |name: &str, ip: &str, inside: u16| {
        format!(
            "host {name} address {ip}:7915 via proxy on {name} {{ inside {ip}:{inside}; \
             outside {ip}:7715; }}\n"
        )
    };
    let conf = format!(
        "resource r0 {{\n net {{ protocol A; }}\n proxy {{ memlimit 8M; plugin {{ zlib level 3; }} }}\n \
         device /dev/drbd17; disk none; meta-disk internal;\n on alice {{ node-id 0; }}\n \
         on bob {{ node-id 1; }}\n connection {{\n{}{} }}\n}}\n",
        host("alice", &alice, 7916),
        host("bob", &bob, 7914)
    );
    std::fs::write(at.join("r0.conf"), conf).unwrap();
    let (a, b) = (Proxy::start(at, "a"), Proxy::start(at, "b"));
    a.drbdadm(at, "alice", "proxy-up");
    b.drbdadm(at, "bob", "proxy-up");
    wait("session", || {
        a.show("show connections").contains("ProxyConnected")
    });
    let settings = a.show("show proxy-settings r0-bob-alice");
    assert_eq!(
        settings,
        "proxy {\n\tmemlimit 8388608;\n\tplugin {\n\t\tzlib level 3;\n\t}\n}\n"
    );
    // A fake DRBD on both sides; the near one opens.
    let drbd: SocketAddr = format!("{bob}:7915").parse().unwrap();
    let listener = TcpListener::bind(drbd).unwrap();
    let mut near = TcpStream::connect(format!("{alice}:7916")).unwrap();
    near.write_all(&FIRST).unwrap();
    let (mut far, from) = listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(from.ip().to_string(), bob);
    near.write_all(&[7; 100_000]).unwrap();
    let mut got = vec![0; 100_008];
    far.read_exact(&mut got).unwrap();
    assert!(got[..8] == FIRST && got[8..].iter().all(|byte| *byte == 7));
    let top = Command::new(BIN)
        .args(["proxy", "top", "--once", "--socket"])
        .arg(&a.socket)
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&top.stdout).contains("r0-bob-alice  Connected"));
    a.drbdadm(at, "alice", "proxy-down");
    assert_eq!(a.show("show"), "");
    // What DRBD's socket sees of it: the end, not silence.
    assert!(!matches!(far.read(&mut [0; 1]), Ok(1..)));
    let refused = a.ctl(&["-c", "del connection r0-bob-alice"]);
    assert_eq!(refused.status.code(), Some(1));
}
