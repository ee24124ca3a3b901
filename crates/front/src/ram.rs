//! A volume in memory behind the same border as a replicated one, for tests and measurements of
//! the front ends alone. Nothing is kept, so it is no backend for anybody's data.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;

use lockstep_core::command::CommandError;
use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_io::pool::{BufferPool, Claim, IoBuf};
use lockstep_io::port::{
    Completion, PortEvent, PortRequest, PortSink, SubmitError, VolumePort, VolumeProperties,
};

/// Memory is allocated in pieces of so many bytes when they are first written.
const CHUNK_BYTES: usize = 1 << 20;

/// On which thread requests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// On the caller's, within `kick`, as on a shard that runs the front end itself.
    Inline,
    /// On a thread of the volume's own, as on a shard of another thread.
    OwnThread,
}

/// What a test may change about the volume while it is in use.
#[derive(Debug, Default)]
struct Faults {
    refuse_open: Mutex<Option<CommandError>>,
    /// So many more refusals.
    refusals_left: AtomicU64,
    fail: Mutex<Option<RequestError>>,
    held: AtomicBool,
    gone: AtomicBool,
}

/// How many requests of each kind have completed, with or without success.
#[derive(Debug, Default)]
pub struct Counts {
    /// Reads.
    pub reads: AtomicU64,
    /// Writes without force unit access.
    pub writes: AtomicU64,
    /// Writes with force unit access.
    pub fua_writes: AtomicU64,
    /// Flushes.
    pub flushes: AtomicU64,
    /// Discards.
    pub discards: AtomicU64,
    /// Zero-outs.
    pub zeroes: AtomicU64,
    /// Opens minus closes.
    pub opened: AtomicUsize,
}

/// A volume in memory.
#[derive(Clone)]
pub struct RamVolume {
    shared: Arc<Shared>,
}

/// A port's sink; the volume's thread and `RamVolume::change` both use it.
type SharedSink = Mutex<Box<dyn PortSink>>;

struct Shared {
    properties: RwLock<VolumeProperties>,
    chunks: Vec<RwLock<Option<Box<[u8]>>>>,
    pool: BufferPool,
    faults: Faults,
    counts: Counts,
    limit: usize,
    ports: Mutex<Vec<Weak<SharedSink>>>,
    worker: Option<Mutex<Sender<Batch>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Batch {
    port: Arc<PortShared>,
    work: Vec<Work>,
}

enum Work {
    Request(PortRequest),
    Open { id: RequestId, write: bool },
}

struct PortShared {
    sink: Arc<SharedSink>,
    in_flight: AtomicUsize,
}

impl RamVolume {
    /// A volume of `size_bytes` zeroes that is readable and writable.
    pub fn new(size_bytes: u64, runs: Runs) -> std::io::Result<RamVolume> {
        let properties = VolumeProperties {
            size_bytes,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            discard: true,
            discard_granularity_bytes: 4096,
            max_request_bytes: 1 << 20,
            max_discard_bytes: 64 << 20,
            readable: true,
            writable: true,
            changed_elsewhere: false,
        };
        Self::with(properties, runs, 64 << 20, 1024)
    }

    /// A volume with all its limits given: bytes of buffers and requests in flight of one port.
    pub fn with(
        properties: VolumeProperties,
        runs: Runs,
        pool_bytes: usize,
        limit: usize,
    ) -> std::io::Result<RamVolume> {
        let chunk_count = properties.size_bytes.div_ceil(CHUNK_BYTES as u64) as usize;
        let (worker, queue) = channel();
        let shared = Arc::new(Shared {
            properties: RwLock::new(properties),
            chunks: (0..chunk_count).map(|_| RwLock::new(None)).collect(),
            pool: BufferPool::new(pool_bytes, 0)?,
            faults: Faults::default(),
            counts: Counts::default(),
            limit,
            ports: Mutex::new(Vec::new()),
            worker: (runs == Runs::OwnThread).then(|| Mutex::new(worker)),
            thread: Mutex::new(None),
        });
        if runs == Runs::OwnThread {
            let weak = Arc::downgrade(&shared);
            let thread = std::thread::Builder::new()
                .name("ram-volume".into())
                .spawn(move || serve(&weak, &queue))?;
            *lock(&shared.thread) = Some(thread);
        }
        Ok(RamVolume { shared })
    }

    /// A new user of the volume.
    pub fn port(&self, sink: Box<dyn PortSink>) -> Box<dyn VolumePort + Send> {
        let sink = Arc::new(Mutex::new(sink));
        let mut ports = lock(&self.shared.ports);
        ports.retain(|port| port.strong_count() > 0);
        ports.push(Arc::downgrade(&sink));
        let port = Arc::new(PortShared {
            sink,
            in_flight: AtomicUsize::new(0),
        });
        Box::new(RamPort {
            shared: self.shared.clone(),
            port,
            queued: Vec::new(),
        })
    }

    /// The properties now.
    pub fn properties(&self) -> VolumeProperties {
        *self
            .shared
            .properties
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Lets every request from now on fail, or work again.
    pub fn fail_requests(&self, error: Option<RequestError>) {
        *lock(&self.shared.faults.fail) = error;
    }

    /// Lets every `open` from now on fail, or work again.
    pub fn refuse_open(&self, error: Option<CommandError>) {
        self.refuse_opens(error, u64::MAX);
    }

    /// Lets only the next `count` opens for writing fail.
    pub fn refuse_opens(&self, error: Option<CommandError>, count: u64) {
        self.shared
            .faults
            .refusals_left
            .store(count, Ordering::SeqCst);
        *lock(&self.shared.faults.refuse_open) = error;
    }

    /// Requests are refused as gone from now on, and every port is told.
    pub fn remove(&self) {
        self.shared.faults.gone.store(true, Ordering::SeqCst);
        self.tell_all(|| PortEvent::Gone);
    }

    /// Changes properties and tells every port. The memory keeps its size.
    pub fn change(&self, change: impl FnOnce(&mut VolumeProperties)) {
        let mut properties = self
            .shared
            .properties
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        change(&mut properties);
        let now = *properties;
        drop(properties);
        self.tell_all(|| PortEvent::Changed(now));
    }

    /// The bytes at `offset`, beside all ports.
    pub fn peek(&self, offset: u64, bytes: &mut [u8]) {
        self.shared.read(offset, bytes);
    }

    fn tell_all(&self, event: impl Fn() -> PortEvent) {
        let sinks: Vec<_> = lock(&self.shared.ports)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for sink in sinks {
            let mut sink = lock(&sink);
            sink.event(event());
            sink.batch_end();
        }
    }
}

impl Shared {
    fn run(&self, request: PortRequest) -> Completion {
        let PortRequest {
            id,
            kind,
            sector,
            len,
            mut buf,
            buf_offset,
        } = request;
        let offset = sector.0 * 512;
        let end = offset + u64::from(len);
        let counter = match kind {
            RequestKind::Read => &self.counts.reads,
            RequestKind::Write { fua: false } => &self.counts.writes,
            RequestKind::Write { fua: true } => &self.counts.fua_writes,
            RequestKind::Flush => &self.counts.flushes,
            RequestKind::Discard => &self.counts.discards,
            RequestKind::Zeroes { .. } => &self.counts.zeroes,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let properties = *self
            .properties
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let failure = *lock(&self.faults.fail);
        let result = if let Some(error) = failure {
            Err(error)
        } else if end > properties.size_bytes {
            Err(RequestError::Invalid)
        } else if kind != RequestKind::Read && !properties.writable {
            Err(RequestError::ReadOnly)
        } else {
            let range = buf_offset as usize..buf_offset as usize + len as usize;
            match (kind, &mut buf) {
                (RequestKind::Read, Some(buf)) => self.read(offset, &mut buf[range]),
                (RequestKind::Write { .. }, Some(buf)) => self.write(offset, &buf[range]),
                (RequestKind::Flush, _) => {}
                (RequestKind::Discard | RequestKind::Zeroes { .. }, _) => self.zero(offset, end),
                (RequestKind::Read | RequestKind::Write { .. }, None) => {
                    return Completion {
                        id,
                        result: Err(RequestError::Invalid),
                        buf,
                    };
                }
            }
            Ok(())
        };
        Completion { id, result, buf }
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        for (chunk, at, part) in pieces(offset, bytes.len()) {
            let chunk = self.chunks[chunk]
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            match &*chunk {
                Some(data) => bytes[part.clone()].copy_from_slice(&data[at..at + part.len()]),
                None => bytes[part].fill(0),
            }
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        for (chunk, at, part) in pieces(offset, bytes.len()) {
            let mut chunk = self.chunks[chunk]
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            let data = chunk.get_or_insert_with(|| vec![0; CHUNK_BYTES].into());
            data[at..at + part.len()].copy_from_slice(&bytes[part]);
        }
    }

    fn zero(&self, offset: u64, end: u64) {
        for (chunk, at, part) in pieces(offset, (end - offset) as usize) {
            let mut chunk = self.chunks[chunk]
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            if part.len() == CHUNK_BYTES {
                *chunk = None;
            } else if let Some(data) = &mut *chunk {
                data[at..at + part.len()].fill(0);
            }
        }
    }

    fn readable(&self) -> bool {
        self.properties
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .readable
    }

    fn run_batch(&self, batch: Batch) {
        let mut sink = lock(&batch.port.sink);
        for work in batch.work {
            match work {
                Work::Request(request) => {
                    let completion = self.run(request);
                    batch.port.in_flight.fetch_sub(1, Ordering::SeqCst);
                    sink.event(PortEvent::Done(completion));
                }
                Work::Open { id, write } => {
                    let refused = lock(&self.faults.refuse_open).clone();
                    let left = &self.faults.refusals_left;
                    let result = match refused {
                        Some(error) if write || !self.readable() => {
                            let less = |n: u64| n.checked_sub(u64::from(n < u64::MAX));
                            match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) {
                                Ok(_) => Err(error),
                                Err(_) => Ok(()),
                            }
                        }
                        Some(_) | None => Ok(()),
                    };
                    if result.is_ok() {
                        self.counts.opened.fetch_add(1, Ordering::SeqCst);
                    }
                    sink.event(PortEvent::Opened { id, result });
                }
            }
        }
        sink.batch_end();
    }
}

/// Cuts a range at the chunks' borders: chunk, offset in it, range of the caller's bytes.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        (done < len).then(|| {
            let position = offset + done as u64;
            let at = (position % CHUNK_BYTES as u64) as usize;
            let part = done..done + (CHUNK_BYTES - at).min(len - done);
            done = part.end;
            ((position / CHUNK_BYTES as u64) as usize, at, part)
        })
    })
}

fn serve(shared: &Weak<Shared>, queue: &Receiver<Batch>) {
    while let Ok(batch) = queue.recv() {
        // The batch's own port keeps the volume alive until it is done.
        let Some(shared) = shared.upgrade() else {
            return;
        };
        while shared.faults.held.load(Ordering::SeqCst) {
            std::thread::park();
        }
        shared.run_batch(batch);
    }
}

impl RamVolume {
    /// Stops the volume's own thread before its next batch, or lets it run again.
    pub fn hold(&self, held: Hold) {
        self.shared
            .faults
            .held
            .store(held == Hold::Stopped, Ordering::SeqCst);
        if let Some(thread) = &*lock(&self.shared.thread) {
            thread.thread().unpark();
        }
    }
}

/// Argument of [`RamVolume::hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Requests pile up.
    Stopped,
    /// Requests run.
    Running,
}

struct RamPort {
    shared: Arc<Shared>,
    port: Arc<PortShared>,
    queued: Vec<Work>,
}

impl VolumePort for RamPort {
    fn properties(&self) -> VolumeProperties {
        *self
            .shared
            .properties
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn alloc(&self, len: usize) -> Option<IoBuf> {
        self.shared.pool.alloc(len, Claim::Ordinary)
    }

    fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError> {
        if self.shared.faults.gone.load(Ordering::SeqCst) {
            return Err(SubmitError::Gone(request));
        }
        if self.port.in_flight.load(Ordering::SeqCst) >= self.shared.limit {
            return Err(SubmitError::Full {
                request,
                limit: self.shared.limit,
            });
        }
        self.port.in_flight.fetch_add(1, Ordering::SeqCst);
        self.queued.push(Work::Request(request));
        Ok(())
    }

    fn kick(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        let work = std::mem::take(&mut self.queued);
        let batch = Batch {
            port: self.port.clone(),
            work,
        };
        match &self.shared.worker {
            Some(worker) => {
                lock(worker)
                    .send(batch)
                    .expect("the volume's thread lives while its ports do");
            }
            None => self.shared.run_batch(batch),
        }
    }

    fn open(&mut self, id: RequestId, write: bool) {
        self.queued.push(Work::Open { id, write });
        self.kick();
    }

    fn close(&mut self, _write: bool) {
        self.shared.counts.opened.fetch_sub(1, Ordering::SeqCst);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // No code panics between two changes of what these mutexes guard.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_format::units::Sector;

    struct Collect(Sender<PortEvent>);

    impl PortSink for Collect {
        fn event(&mut self, event: PortEvent) {
            self.0.send(event).unwrap();
        }
    }

    #[test]
    fn what_was_written_is_read_across_chunks_and_zeroes_after_a_discard() {
        for runs in [Runs::Inline, Runs::OwnThread] {
            let volume = RamVolume::new(4 << 20, runs).unwrap();
            let (sender, events) = channel();
            let mut port = volume.port(Box::new(Collect(sender)));
            let mut ask = |kind, sector, len: u32, fill: u8| {
                let mut buf = port.alloc(len as usize);
                if let Some(buf) = &mut buf {
                    buf.fill(fill);
                }
                let id = RequestId(sector);
                let sector = Sector(sector);
                port.submit(PortRequest {
                    id,
                    kind,
                    sector,
                    len,
                    buf,
                    buf_offset: 0,
                })
                .unwrap();
                port.kick();
                match events.recv().unwrap() {
                    PortEvent::Done(done) => {
                        done.result.unwrap();
                        done.buf.unwrap()[..len as usize].to_vec()
                    }
                    other => panic!("unexpected {other:?}"),
                }
            };
            ask(RequestKind::Write { fua: false }, 2047, 1024, 7);
            assert_eq!(ask(RequestKind::Read, 2047, 1024, 9), [7; 1024]);
            ask(RequestKind::Discard, 2048, 512, 0);
            let after = ask(RequestKind::Read, 2047, 1024, 9);
            assert!(after[..512] == [7; 512] && after[512..] == [0; 512]);
        }
    }
}
