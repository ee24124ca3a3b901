//! Two proxies, a breakable line between them, and fake DRBD nodes, all over loopback sockets.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use lockstep_proxy::{Daemon, Options, Security, SharedSecret};

#[path = "loopback/limits.rs"]
mod limits;
#[path = "loopback/live.rs"]
mod live;
#[path = "loopback/refusals.rs"]
mod refusals;
#[path = "loopback/sharing.rs"]
mod sharing;
#[path = "loopback/statistics.rs"]
mod statistics;

const DATA: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf2\0\0";
const META: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf1\0\0";
const PATIENCE: Duration = Duration::from_secs(40);
const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

/// A loopback address that no other test uses, in this process or another one.
fn fresh_ip() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let pid = std::process::id();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 64 + (pid >> 8 & 0x7f) as u8, pid as u8, next as u8)
}

fn options(security: Security) -> Options {
    Options {
        security,
        memory_max_bytes: 64 << 20,
        workers: 2,
        ..Options::default()
    }
}

fn secret() -> Security {
    Security::Secrets(vec![SharedSecret::for_all(SECRET)])
}

/// A TCP line that can be cut and mended; it forwards bytes unchanged.
struct Line {
    addr: SocketAddr,
    down: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Line {
    fn to(target: SocketAddr) -> Line {
        let listener = TcpListener::bind((fresh_ip(), 7715)).unwrap();
        let addr = listener.local_addr().unwrap();
        let down = Arc::new(AtomicBool::new(false));
        let open = Arc::new(Mutex::new(Vec::new()));
        let (is_down, held) = (Arc::clone(&down), Arc::clone(&open));
        spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                if is_down.load(Ordering::SeqCst) {
                    continue;
                }
                let mut held = held.lock().unwrap();
                held.push(near.try_clone().unwrap());
                held.push(far.try_clone().unwrap());
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Line { addr, down, open }
    }

    fn cut(&self) {
        self.down.store(true, Ordering::SeqCst);
        for socket in self.open.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.down.store(false, Ordering::SeqCst);
    }
}

/// Two proxies with one connection between them.
struct Pair {
    a: Daemon,
    b: Daemon,
    line: Line,
    inside_a: SocketAddr,
    drbd_b: TcpListener,
}

impl Pair {
    fn start(a: Options, b: Options, extra: &str) -> Pair {
        let at = |port| SocketAddr::from((fresh_ip(), port));
        let (inside_a, inside_b) = (at(7815), at(7815));
        let (outside_a, outside_b) = (at(7715), at(7715));
        let line = Line::to(outside_b);
        let drbd_b = TcpListener::bind((fresh_ip(), 7915)).unwrap();
        let drbd_a = at(7915);
        let b = Daemon::start(b).unwrap();
        let a = Daemon::start(a).unwrap();
        let add_b = format!(
            "add connection r0-a-b {inside_b} {outside_a} {outside_b} {} --dial=never {extra}",
            drbd_b.local_addr().unwrap()
        );
        let add_a = format!(
            "add connection r0-b-a {inside_a} {} {outside_a} {drbd_a} --dial=always {extra}",
            line.addr
        );
        ok(&b, &add_b);
        ok(&a, &add_a);
        Pair {
            a,
            b,
            line,
            inside_a,
            drbd_b,
        }
    }

    fn up(a: Options, b: Options, extra: &str) -> Pair {
        let pair = Pair::start(a, b, extra);
        wait("session", || {
            connection(&pair.a)["bulk_carriers"].as_u64() > Some(0)
        });
        pair
    }

    /// Opens one socket of a DRBD connection through both proxies.
    fn open(&self, first: [u8; 8]) -> (TcpStream, TcpStream) {
        let mut near = TcpStream::connect(self.inside_a).unwrap();
        near.write_all(&first).unwrap();
        let (mut far, from) = self.drbd_b.accept().unwrap();
        let state = connection(&self.b);
        let inside: SocketAddr = state["inside"].as_str().unwrap().parse().unwrap();
        assert_eq!(
            from.ip(),
            inside.ip(),
            "DRBD accepts only its peer's address"
        );
        let mut got = [0; 8];
        far.read_exact(&mut got).unwrap();
        assert_eq!(got, first);
        for socket in [&near, &far] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        (near, far)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("A: {:#}\nB: {:#}", self.a.state(), self.b.state());
        }
    }
}

fn ok(daemon: &Daemon, command: &str) -> String {
    daemon
        .commands(&[command])
        .remove(0)
        .unwrap_or_else(|error| panic!("{command}: {error}"))
}

fn err(daemon: &Daemon, command: &str) -> String {
    match daemon.commands(&[command]).remove(0) {
        Err(error) => error,
        Ok(text) => panic!("{command} succeeded: {text}"),
    }
}

fn connection(daemon: &Daemon) -> serde_json::Value {
    daemon.state()["connections"][0].clone()
}

fn wait(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Text, noise and zeros in pieces, always the same for a seed.
fn sample(len: usize, mut seed: u64) -> Vec<u8> {
    let mut next = move || {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    };
    let mut data = Vec::with_capacity(len + 70_000);
    while data.len() < len {
        let piece = 1 + next() as usize % 60_000;
        match next() % 3 {
            0 => data.extend((0..piece).map(|_| next() as u8)),
            1 => data.extend(std::iter::repeat_n(0, piece)),
            _ => data.extend((0..piece).map(|i| b"a block of some file "[i % 21])),
        }
    }
    data.truncate(len);
    data
}

/// Does not shrink, so it needs the room that it has.
fn noise(len: usize) -> Vec<u8> {
    let mut data = sample(len, 4);
    for (i, byte) in data.iter_mut().enumerate() {
        *byte ^= (i as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(17) as u8;
    }
    data
}

fn send(mut socket: TcpStream, data: Vec<u8>) -> JoinHandle<TcpStream> {
    spawn(move || {
        socket.write_all(&data).unwrap();
        socket
    })
}

fn receive(socket: &mut TcpStream, data: &[u8]) {
    let mut got = vec![0; data.len()];
    socket.read_exact(&mut got).unwrap();
    assert!(got == data, "other bytes than were sent");
}

fn is_reset(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    match socket.read(&mut [0]) {
        Ok(0) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        Ok(_) => false,
    }
}

#[test]
fn a_new_process_takes_over_in_mid_stream_without_a_reset() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str, take_over| Options {
        control: Some(dir.path().join(name)),
        take_over,
        ..options(secret())
    };
    let mut pair = Pair::up(with("a", false), with("b", false), "--memlimit=8M");
    ok(&pair.a, "set plugin r0-b-a 0 zstd level 1");
    let (data_a, mut data_b) = pair.open(DATA);
    let (mut meta_a, mut meta_b) = pair.open(META);
    let (forth, back) = (sample(40_000_000, 7), sample(20_000_000, 8));
    let sender = send(data_a, forth.clone());
    let answer = send(data_b.try_clone().unwrap(), back.clone());
    // The receiver at b takes some, so that every buffer on the way is in use.
    receive(&mut data_b, &forth[..1_000_000]);
    for round in 0..2 {
        let (old, name) = match round {
            0 => (&mut pair.a, "a"),
            _ => (&mut pair.b, "b"),
        };
        let new = Daemon::start(with(name, true)).unwrap();
        assert_eq!(new.taken_over(), Some(1));
        std::mem::replace(old, new).wait();
        receive(
            &mut data_b,
            &forth[(round + 1) * 1_000_000..(round + 2) * 1_000_000],
        );
    }
    assert!(ok(&pair.a, "show proxy-settings r0-b-a").contains("zstd level 1"));
    meta_a.write_all(b"ping").unwrap();
    receive(&mut meta_b, b"ping");
    receive(&mut data_b, &forth[3_000_000..]);
    let mut data_a = sender.join().unwrap();
    receive(&mut data_a, &back);
    answer.join().unwrap();
    let state = connection(&pair.a);
    assert_eq!(state["counters"]["streams_reset"], 0);
    assert_eq!(state["counters"]["sessions"], 1);
    assert!(state["counters"]["resumes"].as_u64() >= Some(1));
    // The control socket is the new process's, and a start beside it is refused.
    let wrong = Daemon::start(with("a", false)).unwrap_err();
    assert!(wrong.contains("already answers"), "{wrong}");
}

#[test]
fn a_new_process_with_too_little_memory_takes_over_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let with = |memory_max_bytes, take_over| Options {
        control: Some(dir.path().join("a")),
        memory_max_bytes,
        take_over,
        ..options(secret())
    };
    let extra = "--memlimit=24M --max-lag=0 --bwlimit=64k";
    let mut pair = Pair::up(with(256 << 20, false), options(secret()), extra);
    let (data_a, mut data_b) = pair.open(DATA);
    let forth = noise(20_000_000);
    let sender = send(data_a, forth.clone());
    wait("a full buffer", || {
        connection(&pair.a)["buffered_memory_bytes"].as_u64() > Some(16 << 20)
    });
    let refused = Daemon::start(with(8 << 20, true)).unwrap_err();
    assert!(
        refused.contains("memory-max 8M is too small")
            && refused.contains("what the running proxy has buffered"),
        "{refused}"
    );
    // The old process has everything and goes on; one with room takes over.
    assert_eq!(connection(&pair.a)["counters"]["streams_reset"], 0);
    let new = Daemon::start(with(64 << 20, true)).unwrap();
    assert_eq!(new.taken_over(), Some(1));
    std::mem::replace(&mut pair.a, new).wait();
    ok(&pair.a, "set bwlimit r0-b-a 0");
    receive(&mut data_b, &forth);
    sender.join().unwrap();
    assert_eq!(connection(&pair.a)["counters"]["streams_reset"], 0);
}

#[test]
fn a_new_process_takes_over_what_is_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let plain = |take_over| Options {
        control: Some(dir.path().join("a")),
        take_over,
        ..options(secret())
    };
    let spilling = |take_over| Options {
        spill_directory: Some(dir.path().into()),
        spill_limit_bytes: 256 << 20,
        ..plain(take_over)
    };
    let extra = "--memlimit=2M --max-lag=0 --bwlimit=64k";
    let mut pair = Pair::up(spilling(false), options(secret()), extra);
    let (data_a, mut data_b) = pair.open(DATA);
    let forth = noise(24_000_000);
    let sender = send(data_a, forth.clone());
    let spilled = |pair: &Pair| connection(&pair.a)["spilled_bytes"].as_u64();
    let above = |bytes| move |pair: &Pair| spilled(pair) > Some(bytes);
    for (options, bytes) in [(spilling(true), 4_000_000), (spilling(true), 12_000_000)] {
        wait("spill", || above(bytes)(&pair));
        let new = Daemon::start(options).unwrap();
        assert_eq!(new.taken_over(), Some(1));
        std::mem::replace(&mut pair.a, new).wait();
        assert!(above(bytes)(&pair), "{:?}", spilled(&pair));
    }
    // The last one has no spill directory: it empties what is there and writes nothing more.
    let new = Daemon::start(plain(true)).unwrap();
    std::mem::replace(&mut pair.a, new).wait();
    assert!(spilled(&pair) > Some(4_000_000), "{:?}", spilled(&pair));
    ok(&pair.a, "set bwlimit r0-b-a 0");
    receive(&mut data_b, &forth);
    sender.join().unwrap();
    let state = connection(&pair.a);
    assert_eq!(state["counters"]["streams_reset"], 0);
    assert_eq!(state["counters"]["spill_errors"], 0);
    wait("empty disk", || {
        pair.a.state()["spill_used_bytes"].as_u64() == Some(0)
    });
}

#[test]
fn both_sockets_carry_bytes_both_ways_and_close_in_order() {
    let pair = Pair::up(options(secret()), options(secret()), "");
    ok(&pair.a, "set plugin r0-b-a 0 zstd level 1");
    ok(&pair.b, "set plugin r0-a-b 0 lz4");
    let (data_a, mut data_b) = pair.open(DATA);
    let (mut meta_a, mut meta_b) = pair.open(META);
    let (forth, back) = (sample(5_000_000, 1), sample(2_000_000, 2));
    let sender = send(data_a, forth.clone());
    let answer = send(data_b.try_clone().unwrap(), back.clone());
    for _ in 0..20 {
        meta_a.write_all(b"ping").unwrap();
        receive(&mut meta_b, b"ping");
        meta_b.write_all(b"pong").unwrap();
        receive(&mut meta_a, b"pong");
    }
    wait("latencies", || {
        let state = connection(&pair.a);
        state["counters"]["control_latency"]["count"].as_u64() >= Some(15)
            && state["control_p99_us"].as_u64() > Some(0)
    });
    receive(&mut data_b, &forth);
    let mut data_a = sender.join().unwrap();
    receive(&mut data_a, &back);
    answer.join().unwrap();
    assert_eq!(connection(&pair.a)["state"], "Connected");
    assert!(connection(&pair.a)["ratio"].as_f64() > Some(1.5));
    data_a.write_all(b"the last bytes").unwrap();
    drop((data_a, meta_a));
    let mut rest = Vec::new();
    data_b.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"the last bytes");
    assert_eq!(
        meta_b.read(&mut [0; 9]).unwrap(),
        0,
        "the control socket ends by FIN"
    );
    drop((data_b, meta_b));
    wait("teardown", || {
        [&pair.a, &pair.b]
            .iter()
            .all(|d| connection(d)["streams"].as_array().unwrap().is_empty())
    });
    assert_eq!(connection(&pair.a)["state"], "ProxyConnected");
}

#[test]
fn a_cut_line_is_resumed_and_drbd_does_not_notice() {
    let pair = Pair::up(options(secret()), options(secret()), "--carriers=3");
    ok(&pair.a, "set plugin r0-b-a 0 zlib level 1");
    let (data_a, mut data_b) = pair.open(DATA);
    let (_meta_a, _meta_b) = pair.open(META);
    let forth = sample(12_000_000, 3);
    let sender = send(data_a.try_clone().unwrap(), forth.clone());
    for round in 0..3 {
        receive(
            &mut data_b,
            &forth[round * 1_000_000..(round + 1) * 1_000_000],
        );
        pair.line.cut();
        wait("suspension", || connection(&pair.a)["state"] == "Suspended");
        pair.line.mend();
        wait("resumption", || connection(&pair.a)["state"] == "Connected");
    }
    receive(&mut data_b, &forth[3_000_000..]);
    sender.join().unwrap();
    let counters = connection(&pair.a)["counters"].clone();
    assert_eq!(
        (counters["sessions"].as_u64(), counters["resumes"].as_u64()),
        (Some(1), Some(3))
    );
}

#[test]
fn every_codec_is_switched_live_under_load() {
    let pair = Pair::up(
        options(Security::Insecure),
        options(Security::Insecure),
        "--carriers=2",
    );
    let (data_a, mut data_b) = pair.open(DATA);
    let plugins = [
        "lzma level 1",
        "zlib level 1",
        "none",
        "zstd level 3",
        "lz4",
        "auto max-level 6",
        "lzma level 2 mf bt4 dict-size 65536",
    ];
    for (round, plugin) in plugins.iter().enumerate() {
        ok(&pair.a, &format!("set plugin r0-b-a 0 {plugin}"));
        let settings = ok(&pair.a, "show proxy-settings r0-b-a");
        assert!(settings.contains(plugin), "{settings}");
        let forth = sample(1_500_000, round as u64);
        let sender = send(data_a.try_clone().unwrap(), forth.clone());
        receive(&mut data_b, &forth);
        sender.join().unwrap();
    }
    let chunks = connection(&pair.a)["counters"]["chunks_by_codec"].clone();
    for codec in [2, 3, 4, 5] {
        assert!(chunks[codec].as_u64() > Some(0), "{chunks}");
    }
    ok(&pair.a, "set plugin r0-b-a 0 end");
    assert!(!ok(&pair.a, "show proxy-settings r0-b-a").contains("plugin"));
}

#[test]
fn what_was_sent_long_before_costs_next_to_nothing_with_history() {
    let pair = Pair::up(options(secret()), options(secret()), "--memlimit=32M");
    ok(&pair.a, "set plugin r0-b-a 0 zstd level 1 history 4M");
    let (data_a, mut data_b) = pair.open(DATA);
    let (_meta_a, _meta_b) = pair.open(META);
    let mut seed = 5u64;
    let mut block = Vec::new();
    while block.len() < 1_500_000 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        block.extend_from_slice(&seed.to_le_bytes());
    }
    let data = block.repeat(8);
    let sender = send(data_a, data.clone());
    receive(&mut data_b, &data);
    sender.join().unwrap();
    wait("everything is acknowledged", || {
        connection(&pair.a)["buffered_raw_bytes"] == 0
    });
    let coded = connection(&pair.a)["counters"]["coded_wire_bytes"].clone();
    assert!(coded.as_u64() < Some(2 * block.len() as u64), "{coded}");
}

#[test]
fn a_full_buffer_stops_reading_and_spill_gives_it_room() {
    let directory = tempfile::tempdir().unwrap();
    let spilling = Options {
        spill_directory: Some(directory.path().into()),
        spill_limit_bytes: 64 << 20,
        ..options(secret())
    };
    let extra = "--memlimit=2M --max-lag=0 --bwlimit=64k";
    let pair = Pair::up(spilling, options(secret()), extra);
    let (data_a, mut data_b) = pair.open(DATA);
    // The line is slow at first.
    let forth = noise(20_000_000);
    let sender = send(data_a.try_clone().unwrap(), forth.clone());
    wait("spill", || {
        connection(&pair.a)["spilled_bytes"].as_u64() > Some(8_000_000)
    });
    assert!(pair.a.state()["memory_used_bytes"].as_u64() < Some(6 << 20));
    ok(&pair.a, "set bwlimit r0-b-a 0");
    receive(&mut data_b, &forth);
    sender.join().unwrap();
    wait("empty disk", || {
        pair.a.state()["spill_used_bytes"].as_u64() == Some(0)
    });
}

#[test]
fn without_a_peer_drbd_is_reset_at_once_and_a_reset_passes_through() {
    let pair = Pair::start(options(secret()), options(secret()), "--session-hold=1");
    pair.line.cut();
    wait("down", || connection(&pair.a)["state"] == "Connecting");
    let mut refused = TcpStream::connect(pair.inside_a).unwrap();
    assert!(is_reset(&mut refused));
    pair.line.mend();
    wait("session", || {
        connection(&pair.a)["bulk_carriers"].as_u64() > Some(0)
    });
    let (data_a, mut data_b) = pair.open(DATA);
    let (mut meta_a, mut meta_b) = pair.open(META);
    let hard = socket2::SockRef::from(&data_a);
    hard.set_linger(Some(Duration::ZERO)).unwrap();
    drop(data_a);
    assert!(is_reset(&mut data_b));
    // The other socket of the pair follows.
    assert!(is_reset(&mut meta_a) && is_reset(&mut meta_b));
}

#[test]
fn wrong_secret_garbage_and_plain_text_leave_the_others_alone() {
    let pair = Pair::up(options(secret()), options(secret()), "");
    let (data_a, mut data_b) = pair.open(DATA);
    let (mut near, outside_b) = (data_a, connection(&pair.b)["my_outside"].clone());
    let outside_b: SocketAddr = outside_b.as_str().unwrap().parse().unwrap();
    let mut garbage = TcpStream::connect(outside_b).unwrap();
    garbage.write_all(&sample(3000, 9)).unwrap();
    garbage.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    match garbage.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    let intruder = Daemon::start(options(Security::Secrets(vec![SharedSecret::for_all(
        b"another secret of 32 characters!",
    )])));
    let intruder = intruder.unwrap();
    let at = |port| SocketAddr::from((fresh_ip(), port));
    ok(
        &intruder,
        &format!(
            "add connection x {} {outside_b} {} {} --dial=always",
            at(1),
            at(2),
            at(3)
        ),
    );
    wait("refusal", || {
        connection(&intruder)["last_error"]
            .as_str()
            .is_some_and(|text| text.contains("another secret or key"))
    });
    assert_eq!(connection(&intruder)["state"], "Connecting");
    near.write_all(b"still here").unwrap();
    receive(&mut data_b, b"still here");
}

/// A frame as another build might send it.
fn frame(version: u8, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 32];
    (out[0], out[1]) = (version, kind);
    out[20..24].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let crc = crc32c::crc32c(&out[..28]);
    out[28..].copy_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(payload);
    out
}

#[test]
fn another_version_is_told_so_and_the_others_are_untouched() {
    let pair = Pair::up(options(Security::Insecure), options(Security::Insecure), "");
    let (mut near, mut far) = pair.open(DATA);
    let outside_b = connection(&pair.b)["my_outside"].clone();
    let outside_b: SocketAddr = outside_b.as_str().unwrap().parse().unwrap();
    let say = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(outside_b).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // Closed by FIN, or by RST when bytes were left unread.
        let _ = socket.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    // HELLO of a later protocol: 1 byte each for the oldest and newest version that it speaks.
    let mut hello = vec![7, 9];
    hello.extend([1; 16 + 16 + 32 + 8]);
    for text in ["r0-a-b", "192.0.2.1:1", "192.0.2.2:2"] {
        hello.extend((text.len() as u16).to_le_bytes());
        hello.extend(text.as_bytes());
    }
    hello.extend([0; 4 + 8]);
    let answer = say(&frame(1, 1, &hello));
    let told = "protocol versions 7 to 9 are offered, 3 is spoken here";
    assert!(answer.contains(told), "{answer:?}");
    // Other frames, unknown types, and a first frame that is no HELLO.
    for bytes in [
        frame(2, 1, &hello),
        frame(1, 77, b""),
        frame(1, 7, &[0; 100]),
        b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n".to_vec(),
    ] {
        assert!(!say(&bytes).contains("session"));
    }
    // The same towards a proxy that dials: what answers is no proxy, and the reason is shown.
    let listener = TcpListener::bind((fresh_ip(), 7715)).unwrap();
    let stranger = listener.local_addr().unwrap();
    spawn(move || {
        for socket in listener.incoming().flatten() {
            let _ = (&socket).write_all(&frame(2, 2, b"from the future"));
            std::mem::forget(socket);
        }
    });
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let add = format!("add connection r1 {} {stranger} {} {}", at(1), at(2), at(3));
    ok(&pair.a, &format!("{add} --dial=always"));
    wait("the reason", || {
        let error = pair.a.state()["connections"][1]["last_error"].clone();
        let error = error.as_str().unwrap_or_default().to_string();
        error.contains("frame version 2, this proxy speaks version 1; upgrade the older one")
    });
    near.write_all(b"still here").unwrap();
    receive(&mut far, b"still here");
    assert_eq!(connection(&pair.a)["counters"]["streams_reset"], 0);
}

#[test]
fn addresses_that_lead_back_are_seen_and_named() {
    let pair = Pair::up(options(secret()), options(secret()), "");
    let (mut near, mut far) = pair.open(DATA);
    // The peer's outside address is a line that comes back to the own one.
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let outside = at(7716);
    let line = Line::to(outside);
    let add = format!(
        "add connection r1 {} {} {outside} {}",
        at(1),
        line.addr,
        at(3)
    );
    ok(&pair.a, &format!("{add} --dial=always"));
    wait("the reason", || {
        let error = pair.a.state()["connections"][1]["last_error"].clone();
        let error = error.as_str().unwrap_or_default().to_string();
        error.contains("connected to itself")
    });
    // DRBD's address of one connection may not be the inside of another.
    let inside_a = pair.inside_a;
    let circle = format!("add connection r2 {} {} {} {inside_a}", at(1), at(2), at(3));
    let error = err(&pair.a, &circle);
    assert!(error.contains("circle"), "{error}");
    // Nor may the peer's outside address be one of this proxy's own.
    ok(&pair.a, "del connection r1");
    ok(&pair.a, &add);
    let other = at(7717);
    let circle = format!("add connection r2 {} {outside} {other} {}", at(4), at(5));
    let error = err(&pair.a, &circle);
    let named = error.contains("own outside address of connection r1");
    assert!(named && error.contains("circle"), "{error}");
    // Two connections cannot listen on one address; the error names the other.
    let taken = format!("add connection r3 {inside_a} {} {other} {}", at(6), at(7));
    let error = err(&pair.a, &taken);
    assert!(error.contains("already used by connection"), "{error}");
    near.write_all(b"still here").unwrap();
    receive(&mut far, b"still here");
}

#[test]
fn bad_commands_are_refused_with_a_reason_and_change_nothing() {
    let daemon = Daemon::start(options(secret())).unwrap();
    let ip = fresh_ip();
    let add = format!("add connection r0-b-a {ip}:1 192.0.2.2:2 {ip}:2 {ip}:3");
    for (command, reason) in [
        (format!("{add} --memlimit=0"), "at least 1M"),
        (
            format!("add connection r0 {ip}:1 192.0.2.2:2 {ip}:2 {ip}:1"),
            "circle",
        ),
        (
            format!("add connection r0 {ip}:1 192.0.2.2 {ip}:2 {ip}:3"),
            "IP:PORT",
        ),
        ("add connection r0 x".into(), "needs NAME"),
        (
            "add connection r0 203.0.113.77:1 192.0.2.2:2 127.0.0.1:2 127.0.0.1:3".into(),
            "listen",
        ),
        ("del connection nobody".into(), "no connection 'nobody'"),
        ("set memlimit nobody 1G".into(), "no connection 'nobody'"),
        ("frobnicate".into(), "unknown command"),
        ("show nothing".into(), "cannot show"),
    ] {
        let error = err(&daemon, &command);
        assert!(error.contains(reason), "{command}: {error}");
    }
    assert_eq!(ok(&daemon, "show"), "");
    ok(&daemon, &format!("{add} --memlimit=512M --new-option=7"));
    assert!(err(&daemon, &add).contains("exists already"));
    assert!(err(&daemon, "set plugin r0-b-a 0 gzip").contains("unknown plugin 'gzip'"));
    assert!(err(&daemon, "set plugin r0-b-a 0 zstd level 99").contains("-5..22"));
    assert!(err(&daemon, "set plugin r0-b-a 3 lz4").contains("gap"));
    assert!(ok(&daemon, "show").contains("--memlimit=536870912"));
    assert!(ok(&daemon, "show connections").contains("Connecting"));
    assert!(ok(&daemon, "print statistics").contains("r0-b-a.state=Connecting"));
    assert!(ok(&daemon, "print metrics").contains("# TYPE lockstep_proxy_ratio gauge"));
    ok(&daemon, "del connection r0-b-a");
    assert_eq!(ok(&daemon, "show"), "");
    ok(&daemon, &add);
}

#[test]
fn metrics_are_served_over_http() {
    let metrics = Some(SocketAddr::from((fresh_ip(), 0)));
    let daemon = Daemon::start(Options {
        metrics,
        ..options(secret())
    })
    .unwrap();
    let get = |path: &str| {
        let mut socket = TcpStream::connect(daemon.metrics_addr().unwrap()).unwrap();
        write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        let _ = socket.read_to_string(&mut text);
        text
    };
    assert!(get("/metrics").contains("lockstep_proxy_memory_limit_bytes 67108864"));
    assert!(get("/status").contains("\"connections\":[]"));
    assert!(get("/else").starts_with("HTTP/1.1 404"));
}

#[test]
fn pinned_keys_work_as_identity() {
    let (private_a, public_a) = lockstep_proxy::generate_keys().unwrap();
    let (private_b, public_b) = lockstep_proxy::generate_keys().unwrap();
    let a = options(Security::Keys {
        private: private_a,
        peers: vec![public_b],
    });
    let b = options(Security::Keys {
        private: private_b,
        peers: vec![public_a],
    });
    let pair = Pair::up(a, b, "");
    let (mut near, mut far) = pair.open(DATA);
    near.write_all(b"hello").unwrap();
    receive(&mut far, b"hello");
}

/// The certificates in `tests/certificates`: an authority that is good for nothing else has signed
/// `alice.example`, `bob.example` and `carol.example`; its key was thrown away.
fn certificate(name: &str, peer_names: &[&str]) -> Options {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
    options(Security::Certificates {
        cert: directory.join(format!("{name}.pem")),
        key: directory.join(format!("{name}.key.pem")),
        authority: directory.join("authority.pem"),
        peer_names: peer_names.iter().map(|name| (*name).to_string()).collect(),
    })
}

#[test]
fn certificates_work_as_identity_and_their_names_count() {
    let known = ["alice.example=r0-a-*", "carol.example=r0-c-*"];
    let pair = Pair::up(
        certificate("alice", &["bob.example"]),
        certificate("bob", &known),
        "",
    );
    let (mut near, mut far) = pair.open(DATA);
    let outside_b = connection(&pair.b)["my_outside"]
        .as_str()
        .unwrap()
        .to_string();
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let refused = |options: Options, expected: &str| {
        let other = Daemon::start(options).unwrap();
        let add = format!(
            "add connection r0-b-a {} {outside_b} {} {} --dial=always",
            at(7815),
            at(7715),
            at(7915)
        );
        ok(&other, &add);
        wait("the refusal", || {
            let error = connection(&other)["last_error"].clone();
            error.as_str().is_some_and(|text| text.contains(expected))
        });
    };
    refused(certificate("carol", &["bob.example"]), "may not use it");
    // Whoever answers must bear the name that was asked for, or the address.
    refused(
        certificate("alice", &["carol.example"]),
        "not valid for name",
    );
    refused(certificate("alice", &[]), "not valid for name");
    near.write_all(b"hello").unwrap();
    receive(&mut far, b"hello");
    let vague = Daemon::start(certificate("bob", &["alice.example", "carol.example"]));
    assert!(vague.unwrap_err().contains("with several peers"));
    let missing = Daemon::start(certificate("dave", &[])).unwrap_err();
    assert!(missing.contains("dave.pem"), "{missing}");
}

#[test]
fn a_peer_gets_at_its_own_connections_only() {
    let keys = || lockstep_proxy::generate_keys().unwrap();
    let ((private_a, public_a), (private_b, public_b), (private_c, public_c)) =
        (keys(), keys(), keys());
    let with = |private: &str, peers: &[String]| {
        options(Security::Keys {
            private: private.into(),
            peers: peers.to_vec(),
        })
    };
    // b knows both; the connection with a is a's alone.
    let lists = [format!("{public_a}=r0-a-*"), format!("{public_c}=r0-c-*")];
    let pair = Pair::up(
        with(&private_a, std::slice::from_ref(&public_b)),
        with(&private_b, &lists),
        "",
    );
    let (mut near, mut far) = pair.open(DATA);
    let outside = |end: &str| connection(&pair.b)[end].as_str().unwrap().to_string();
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let intruder = Daemon::start(with(&private_c, std::slice::from_ref(&public_b))).unwrap();
    let add = || {
        let (inside, own, drbd) = (at(7815), at(7715), at(7915));
        let peer = outside("my_outside");
        format!("add connection r0-b-c {inside} {peer} {own} {drbd} --dial=always")
    };
    ok(&intruder, &add());
    let told = "connection r0-a-b: the identity of the peer may not use it";
    wait("the refusal", || {
        let error = connection(&intruder)["last_error"].clone();
        error.as_str().is_some_and(|text| text.contains(told))
    });
    assert_eq!(connection(&intruder)["counters"]["sessions"], 0);
    near.write_all(b"untouched").unwrap();
    receive(&mut far, b"untouched");
    // Who dials looks as well.
    let lists = [format!("{public_b}=other"), format!("{public_a}=*")];
    let careful = Daemon::start(with(&private_c, &lists)).unwrap();
    ok(&careful, &add());
    wait("the refusal", || {
        let error = connection(&careful)["last_error"].clone();
        error
            .as_str()
            .is_some_and(|text| text.contains("may not use it"))
    });
}

#[test]
fn a_hub_has_a_secret_with_each_site_on_one_port() {
    let secret = |letter: u8, list: Option<&str>| SharedSecret {
        secret: vec![letter; 32],
        connections: list.map(String::from),
    };
    let start = |secrets: &[SharedSecret]| {
        Daemon::start(options(Security::Secrets(secrets.to_vec()))).unwrap()
    };
    let hub = start(&[secret(b'a', Some("r0-a-*")), secret(b'b', Some("*-b-*"))]);
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let outside_hub = at(7715);
    let outsides = [at(7715), at(7715)];
    let drbds = [1, 2].map(|_| TcpListener::bind((fresh_ip(), 7915)).unwrap());
    for ((site, outside), drbd) in ["a", "b"].iter().zip(outsides).zip(&drbds) {
        let (inside, drbd) = (at(7815), drbd.local_addr().unwrap());
        let add = format!("add connection r0-{site}-hub {inside} {outside} {outside_hub} {drbd}");
        ok(&hub, &format!("{add} --dial=never"));
    }
    let join = |daemon: &Daemon, outside: SocketAddr| {
        let (inside, drbd) = (at(7815), at(7915));
        let add = format!("add connection r0 {inside} {outside_hub} {outside} {drbd}");
        ok(daemon, &format!("{add} --dial=always --carriers=2"));
        inside
    };
    let works = |daemon: &Daemon, inside: SocketAddr, drbd: &TcpListener| {
        wait("session", || {
            connection(daemon)["bulk_carriers"].as_u64() == Some(2)
        });
        let mut near = TcpStream::connect(inside).unwrap();
        near.write_all(&DATA).unwrap();
        let (mut far, _) = drbd.accept().unwrap();
        receive(&mut far, &DATA);
    };
    let site_a = start(&[secret(b'a', None)]);
    let inside = join(&site_a, outsides[0]);
    works(&site_a, inside, &drbds[0]);
    // a is not b, even with b's address; the right one is let in beside it.
    let false_b = start(&[secret(b'a', None)]);
    join(&false_b, outsides[1]);
    wait("the refusal", || {
        let error = connection(&false_b)["last_error"].clone();
        error.as_str().is_some_and(|text| text.contains("TLS"))
    });
    drop(false_b);
    let site_b = start(&[secret(b'b', None)]);
    let inside = join(&site_b, outsides[1]);
    works(&site_b, inside, &drbds[1]);
    assert_eq!(connection(&site_a)["counters"]["sessions"], 1);
}

#[test]
fn a_connection_that_stands_still_leaves_room_for_the_others() {
    let small = || Options {
        memory_max_bytes: 12 << 20,
        ..options(secret())
    };
    let pair = Pair::up(small(), small(), "--memlimit=512M --max-lag=0");
    let (hog, _stalled) = pair.open(DATA);
    let noise = sample(40_000_000, 11);
    let sender = spawn(move || {
        let mut hog = hog;
        // Ends with an error when the test is over.
        let _ = hog.write_all(&noise);
    });
    wait("a full pool", || {
        connection(&pair.a)["blocked_by"]
            .as_str()
            .is_some_and(|reason| !reason.is_empty())
    });
    let at = |port| SocketAddr::from((fresh_ip(), port));
    let (inside_a, inside_b, outside_a, outside_b) = (at(7815), at(7815), at(7715), at(7715));
    let drbd = TcpListener::bind((fresh_ip(), 7915)).unwrap();
    let drbd_b = drbd.local_addr().unwrap();
    let drbd_a = at(7915);
    ok(
        &pair.b,
        &format!("add connection r1-a-b {inside_b} {outside_a} {outside_b} {drbd_b} --dial=never"),
    );
    ok(
        &pair.a,
        &format!("add connection r1-b-a {inside_a} {outside_b} {outside_a} {drbd_a} --dial=always"),
    );
    wait("second session", || {
        pair.a.state()["connections"][1]["bulk_carriers"].as_u64() > Some(0)
    });
    let mut near = TcpStream::connect(inside_a).unwrap();
    near.write_all(&DATA).unwrap();
    let (mut far, _) = drbd.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    receive(&mut far, &DATA);
    let forth = sample(6_000_000, 12);
    let second = send(near, forth.clone());
    receive(&mut far, &forth);
    second.join().unwrap();
    // A connection that came when the pool was full may use its guaranteed share.
    assert!(pair.a.state()["memory_used_bytes"].as_u64() <= Some(14 << 20));
    drop(pair);
    sender.join().unwrap();
}

#[test]
fn a_hundred_connections_share_one_pool_and_stay_within_it() {
    const COUNT: usize = 100;
    const MIB: u64 = 1 << 20;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit {
        current: limit.maximum,
        ..limit
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    // Less than each connection's own limit together, and less than is under way.
    let small = || Options {
        memory_max_bytes: 256 * MIB,
        ..options(secret())
    };
    let (a, b) = (
        Daemon::start(small()).unwrap(),
        Daemon::start(small()).unwrap(),
    );
    let (ip_a, ip_b, drbd_ip) = (fresh_ip(), fresh_ip(), fresh_ip());
    let mut ends = Vec::new();
    for number in 0..COUNT as u16 {
        let at = |ip: Ipv4Addr, port: u16| SocketAddr::from((ip, port + number));
        let drbd = TcpListener::bind(at(drbd_ip, 9000)).unwrap();
        let (outside_a, outside_b) = (at(ip_a, 8000), at(ip_b, 8000));
        let drbd_b = drbd.local_addr().unwrap();
        ok(
            &b,
            &format!(
                "add connection r{number}-a-b {} {outside_a} {outside_b} {drbd_b} \
                 --dial=never --memlimit=16M",
                at(ip_b, 7000)
            ),
        );
        ok(
            &a,
            &format!(
                "add connection r{number}-b-a {} {outside_b} {outside_a} {} \
                 --dial=always --memlimit=16M",
                at(ip_a, 7000),
                at(ip_a, 9000)
            ),
        );
        ok(&a, &format!("set plugin r{number}-b-a 0 lz4"));
        ends.push((at(ip_a, 7000), drbd));
    }
    wait("all sessions", || {
        let state = a.state();
        let connections = state["connections"].as_array().unwrap();
        connections
            .iter()
            .all(|c| c["bulk_carriers"].as_u64() > Some(0))
    });
    let data: Vec<Arc<Vec<u8>>> = (0..4).map(|s| Arc::new(sample(3_000_000, s))).collect();
    let pairs: Vec<(TcpStream, TcpStream)> = ends
        .iter()
        .map(|(inside, drbd)| {
            let mut near = TcpStream::connect(inside).unwrap();
            near.write_all(&DATA).unwrap();
            let (mut far, _) = drbd.accept().unwrap();
            far.set_read_timeout(Some(PATIENCE)).unwrap();
            receive(&mut far, &DATA);
            (near, far)
        })
        .collect();
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for (number, (near, mut far)) in pairs.into_iter().enumerate() {
        let (out, want) = (Arc::clone(&data[number % 4]), Arc::clone(&data[number % 4]));
        senders.push(spawn(move || {
            let mut near = near;
            near.write_all(&out).unwrap();
            near
        }));
        receivers.push(spawn(move || {
            receive(&mut far, &want);
            far
        }));
    }
    let mut peak = 0;
    while receivers.iter().any(|receiver| !receiver.is_finished()) {
        for daemon in [&a, &b] {
            peak = peak.max(daemon.state()["memory_used_bytes"].as_u64().unwrap());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let far: Vec<TcpStream> = receivers.into_iter().map(|r| r.join().unwrap()).collect();
    let near: Vec<TcpStream> = senders.into_iter().map(|s| s.join().unwrap()).collect();
    assert!(peak > 0 && peak <= 256 * MIB, "{peak} bytes in use");
    for connection in a.state()["connections"].as_array().unwrap() {
        assert_eq!(connection["counters"]["streams_reset"], 0);
    }
    drop((near, far));
}

#[test]
fn removing_a_connection_ends_it_at_both_ends_at_once() {
    let pair = Pair::up(options(secret()), options(secret()), "--session-hold=3600");
    let (mut near, mut far) = pair.open(DATA);
    ok(&pair.a, "del connection r0-b-a");
    assert!(is_reset(&mut near) && is_reset(&mut far));
    assert_eq!(connection(&pair.b)["state"], "Connecting");
}
