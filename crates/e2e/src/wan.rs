//! A long, thin, lossy line between two nodes: whole IP packets pass with a delay, at a rate, and
//! some are lost, so that the kernel's TCP on both sides lives through it as on a real line.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

/// What the line does to packets.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// One way.
    pub delay: Duration,
    /// Bytes per second in each direction.
    pub rate: u64,
    /// Packets lost out of a thousand.
    pub loss_per_mille: u64,
    /// Bytes that wait at the line's entrance before packets are dropped.
    pub queue_bytes: u64,
}

/// A line in use. It ends when it is dropped.
#[derive(Debug)]
pub struct Wan {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    end: AtomicBool,
    down: AtomicBool,
    passed: AtomicU64,
    lost: AtomicU64,
}

/// Packets under way in one direction, with the time of their arrival.
#[derive(Default)]
struct Way {
    packets: Mutex<VecDeque<(Instant, Vec<u8>)>>,
    wake: Condvar,
}

/// A device of this name in the caller's network namespace.
pub fn end(name: &str) -> Result<SyncDevice> {
    DeviceBuilder::new()
        .name(name)
        .layer(Layer::L3)
        .build_sync()
        .context("making a tun device")
}

impl Wan {
    /// Joins two ends.
    pub fn new(ends: [SyncDevice; 2], line: Line) -> Wan {
        let shared = Arc::new(Shared::default());
        let [a, b] = ends.map(Arc::new);
        let mut threads = Vec::new();
        for (number, from, to) in [(1, &a, &b), (2, &b, &a)] {
            let way = Arc::new(Way::default());
            let (from, to) = (Arc::clone(from), Arc::clone(to));
            let (entrance, shared_in) = (Arc::clone(&way), Arc::clone(&shared));
            threads.push(std::thread::spawn(move || {
                take(&from, &entrance, line, &shared_in, number);
            }));
            let shared_out = Arc::clone(&shared);
            threads.push(std::thread::spawn(move || give(&to, &way, &shared_out)));
        }
        Wan { shared, threads }
    }

    /// Lets no packet in until it is called with false.
    pub fn cut(&self, down: bool) {
        self.shared.down.store(down, Ordering::SeqCst);
    }

    /// Packets that passed, and packets that were lost on the line or at its full queue.
    pub fn counts(&self) -> (u64, u64) {
        (
            self.shared.passed.load(Ordering::SeqCst),
            self.shared.lost.load(Ordering::SeqCst),
        )
    }
}

impl Drop for Wan {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// How often a thread looks whether the line is to end.
const LOOK: Duration = Duration::from_millis(100);

fn take(from: &SyncDevice, way: &Way, line: Line, shared: &Shared, mut seed: u64) {
    let mut packet = vec![0; 65_536];
    // When the last bit of what was taken has left.
    let mut busy_until = Instant::now();
    while !shared.end.load(Ordering::SeqCst) {
        let mut fds = [PollFd::new(from, PollFlags::IN)];
        let look = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK.as_nanos() as i64,
        };
        if poll(&mut fds, Some(&look)).unwrap_or(0) == 0 {
            continue;
        }
        let Ok(len) = from.recv(&mut packet) else {
            continue;
        };
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let now = Instant::now();
        let begin = busy_until.max(now);
        let waiting = (begin - now).as_secs_f64() * line.rate as f64;
        let lost = (seed >> 33) % 1000 < line.loss_per_mille
            || shared.down.load(Ordering::SeqCst)
            || waiting > line.queue_bytes as f64;
        if lost {
            shared.lost.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        busy_until = begin + Duration::from_secs_f64(len as f64 / line.rate as f64);
        let mut packets = way.packets.lock().unwrap_or_else(PoisonError::into_inner);
        packets.push_back((busy_until + line.delay, packet[..len].to_vec()));
        way.wake.notify_one();
    }
}

fn give(to: &SyncDevice, way: &Way, shared: &Shared) {
    let mut packets = way.packets.lock().unwrap_or_else(PoisonError::into_inner);
    while !shared.end.load(Ordering::SeqCst) {
        let now = Instant::now();
        let wait = match packets.front() {
            Some((due, _)) if *due <= now => {
                let (_, packet) = packets.pop_front().expect("there is a front");
                drop(packets);
                // An interface that is down takes nothing; that is a loss like any other.
                if to.send(&packet).is_ok() {
                    shared.passed.fetch_add(1, Ordering::SeqCst);
                } else {
                    shared.lost.fetch_add(1, Ordering::SeqCst);
                }
                packets = way.packets.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            Some((due, _)) => (*due - now).min(LOOK),
            None => LOOK,
        };
        packets = way
            .wake
            .wait_timeout(packets, wait)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
}
