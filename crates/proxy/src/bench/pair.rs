//! Two proxies, a line between them and a fake DRBD at each end, all in this process over loopback.

use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use crate::threads;
use crate::{Daemon, Options, Security, SharedSecret, generate_secret, random_bytes};

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// First eight bytes of DRBD's two sockets.
const DATA: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf2\0\0";
const META: [u8; 8] = *b"\x83\x74\x02\x67\xff\xf1\0\0";

/// What a pair is made of.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) memory_max_bytes: u64,
    /// Options of `add connection` at both ends.
    pub(super) options: String,
    /// Codec from A to B.
    pub(super) plugin: String,
    /// Bytes per second and one-way delay of the line; without it the proxies are joined directly.
    pub(super) line: Option<(u64, Duration)>,
    pub(super) connections: u16,
    /// Spill directory and limit of A.
    pub(super) spill: Option<(PathBuf, u64)>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            memory_max_bytes: 1 << 30,
            options: "--memlimit=512M --max-lag=0".into(),
            plugin: "none".into(),
            line: None,
            connections: 1,
            spill: None,
        }
    }
}

/// The end at A and the end at B of a socket.
pub(super) type Ends = (TcpStream, TcpStream);

/// Two running proxies. TLS is on.
pub(super) struct Pair {
    pub(super) a: Daemon,
    pub(super) b: Daemon,
    /// The threads of each.
    threads: [BTreeSet<u32>; 2],
    ends: Vec<(SocketAddr, TcpListener)>,
    line: Option<Line>,
    idle: Mutex<Vec<Ends>>,
}

impl Pair {
    pub(super) fn start(setup: &Setup) -> Result<Pair, String> {
        let security =
            Security::Secrets(vec![SharedSecret::for_all(generate_secret()?.as_bytes())]);
        let options = |spill: Option<(PathBuf, u64)>| Options {
            security: security.clone(),
            memory_max_bytes: setup.memory_max_bytes,
            spill_limit_bytes: spill.as_ref().map_or(0, |(_, limit)| *limit),
            spill_directory: spill.map(|(directory, _)| directory),
            ..Options::default()
        };
        let (before, a) = (threads::ids(), Daemon::start(options(setup.spill.clone()))?);
        let (between, b) = (threads::ids(), Daemon::start(options(None))?);
        let threads = [&between - &before, &threads::ids() - &between];
        // A loopback address of our own, so no port is taken.
        let [x, y, z, ..] = random_bytes()?;
        let ip = Ipv4Addr::new(127, 1 + x % 60, y, z.clamp(1, 254));
        let at = |port: u16| SocketAddr::from((ip, port));
        let mut line = None;
        if let Some((rate, delay)) = setup.line {
            if setup.connections != 1 {
                return Err("a line carries one connection".into());
            }
            line = Some(Line::start(at(11_000), at(15_000), rate, delay).map_err(text)?);
        }
        let mut ends = Vec::new();
        for number in 0..setup.connections {
            let drbd = TcpListener::bind(at(19_000 + number)).map_err(text)?;
            let drbd_b = drbd.local_addr().map_err(text)?;
            let (inside_a, inside_b) = (at(12_000 + number), at(13_000 + number));
            let (out_a, out_b) = (at(17_000 + number), at(15_000 + number));
            let far = line.as_ref().map_or(out_b, |line| line.addr);
            let extra = &setup.options;
            let commands_b = [format!(
                "add connection b{number} {inside_b} {out_a} {out_b} {drbd_b} --dial=never {extra}"
            )];
            let commands_a = [
                format!(
                    "add connection a{number} {inside_a} {far} {out_a} {} --dial=always {extra}",
                    at(21_000 + number)
                ),
                format!("set plugin a{number} 0 {}", setup.plugin),
            ];
            command_all(&b, &commands_b)?;
            command_all(&a, &commands_a)?;
            ends.push((inside_a, drbd));
        }
        let idle = Mutex::default();
        let pair = Pair {
            a,
            b,
            threads,
            ends,
            line,
            idle,
        };
        pair.wait("the two proxies find each other", |pair| {
            let state = pair.a.state();
            let all = state["connections"].as_array();
            all.is_some_and(|all| all.iter().all(|c| c["bulk_carriers"].as_u64() > Some(0)))
        })?;
        Ok(pair)
    }

    /// Both sockets of a DRBD connection, opened at A: the two ends of the one for data. The other
    /// stays idle until the pair is dropped; a lone socket would be given up after half a minute.
    pub(super) fn open(&self, number: usize) -> Result<Ends, String> {
        let (data, meta) = self.open_both(number)?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(meta);
        Ok(data)
    }

    /// Both sockets, for data and for control.
    pub(super) fn open_both(&self, number: usize) -> Result<(Ends, Ends), String> {
        Ok((self.open_one(number, DATA)?, self.open_one(number, META)?))
    }

    fn open_one(&self, number: usize, first: [u8; 8]) -> Result<Ends, String> {
        let (inside, drbd) = &self.ends[number];
        let mut near = TcpStream::connect(inside).map_err(text)?;
        near.set_nodelay(true).map_err(text)?;
        near.write_all(&first).map_err(text)?;
        let (mut far, _) = drbd.accept().map_err(text)?;
        let mut got = [0; 8];
        far.read_exact(&mut got).map_err(text)?;
        Ok((near, far))
    }

    pub(super) fn command(&self, command: &str) -> Result<(), String> {
        command_all(&self.a, &[command.to_string()])
    }

    /// The first connection at A.
    pub(super) fn state(&self) -> serde_json::Value {
        self.a.state()["connections"][0].clone()
    }

    /// Breaks the line, or mends it.
    pub(super) fn line_down(&self, down: bool) {
        if let Some(line) = &self.line {
            line.down.store(down, Ordering::SeqCst);
            if down {
                line.break_all();
            }
        }
    }

    /// Processor time that A and B have had.
    pub(super) fn processor_time(&self) -> [Duration; 2] {
        self.threads.each_ref().map(threads::cpu_of)
    }

    pub(super) fn wait(
        &self,
        what: &str,
        done: impl Fn(&Pair) -> bool,
    ) -> Result<Duration, String> {
        let begun = Instant::now();
        while !done(self) {
            if begun.elapsed() > PATIENCE {
                return Err(format!("not within {PATIENCE:?}: {what}"));
            }
            sleep(Duration::from_millis(2));
        }
        Ok(begun.elapsed())
    }
}

fn command_all(daemon: &Daemon, commands: &[String]) -> Result<(), String> {
    for command in commands {
        let answer = daemon.commands(&[command]).pop();
        answer.unwrap_or_else(|| Err("the proxy has stopped".into()))?;
    }
    Ok(())
}

pub(super) fn text(error: std::io::Error) -> String {
    error.to_string()
}

/// A TCP line with a rate and a delay in each direction, shared by all that passes.
struct Line {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    down: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    fn start(
        at: SocketAddr,
        target: SocketAddr,
        rate: u64,
        delay: Duration,
    ) -> std::io::Result<Line> {
        let listener = TcpListener::bind(at)?;
        let addr = listener.local_addr()?;
        let (stop, down) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let open = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
        let (is_stopped, is_down) = (Arc::clone(&stop), Arc::clone(&down));
        let held = Arc::clone(&open);
        let ways = [0, 1].map(|_| Arc::new(Mutex::new(Instant::now())));
        let thread = spawn(move || {
            for near in listener.incoming().flatten() {
                if is_stopped.load(Ordering::SeqCst) {
                    return;
                }
                if is_down.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                for (way, from, to) in [(0, &near, &far), (1, &far, &near)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else {
                        continue;
                    };
                    let free_at = Arc::clone(&ways[way]);
                    spawn(move || carry(from, to, &free_at, rate, delay));
                }
                let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
                held.extend([near, far]);
            }
        });
        Ok(Line {
            addr,
            stop,
            down,
            open,
            thread: Some(thread),
        })
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.break_all();
    }
}

impl Line {
    fn break_all(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in open.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Moves bytes one way. What is late because the machine was busy is made up for, up to 5 ms.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    free_at: &Mutex<Instant>,
    rate: u64,
    delay: Duration,
) {
    let slack = Duration::from_millis(5);
    let block = (rate / 500).clamp(1460, 128 << 10) as usize;
    let (later, due) = sync_channel::<(Instant, Vec<u8>)>(8192);
    let mut end = to.try_clone();
    let writer = (delay > Duration::ZERO).then(|| {
        spawn(move || {
            let mut held: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
            while let Ok(next) = held.pop_front().map_or_else(|| due.recv(), Ok) {
                sleep(next.0.saturating_duration_since(Instant::now()));
                if let Ok(end) = &mut end
                    && end.write_all(&next.1).is_err()
                {
                    return;
                }
                held.extend(due.try_iter());
            }
        })
    });
    let mut room = vec![0; block];
    loop {
        let len = match from.read(&mut room) {
            Ok(len) if len > 0 => len,
            _ => break,
        };
        let (begin, done) = {
            let mut free_at = free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let begin = (*free_at).max(now.checked_sub(slack).unwrap_or(now));
            *free_at = begin + Duration::from_secs_f64(len as f64 / rate as f64);
            (begin, *free_at)
        };
        let (wait, fine) = if writer.is_some() {
            let due = done.max(Instant::now()) + delay;
            let sent = later.send((due, room[..len].to_vec()));
            (begin, sent.is_ok())
        } else {
            (done, true)
        };
        sleep(wait.saturating_duration_since(Instant::now()));
        if !fine || writer.is_none() && to.write_all(&room[..len]).is_err() {
            break;
        }
    }
    drop(later);
    if let Some(writer) = writer {
        let _ = writer.join();
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}
