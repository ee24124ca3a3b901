//! Counts and times what users of a volume ask for, at the border between front ends and volume.
//!
//! Nothing here waits or allocates per request: a table of fixed size holds when requests began.
//! Two requests that fall on one place of it lose one sample of the time, never the count.
//! Sketch: two clock readings and a few uncontended atomic operations, some 0.1 µs per request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lockstep_core::event::{RequestId, RequestKind};
use lockstep_front::device::Discards;
use lockstep_io::pool::IoBuf;
use lockstep_io::port::{
    PortEvent, PortRequest, PortSink, SubmitError, VolumePort, VolumeProperties,
};
use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets in microseconds; one more takes everything above.
pub use lockstep_core::report::BOUNDS_US;

/// What is counted apart.
pub const KINDS: [&str; 4] = ["read", "write", "flush", "discard"];

/// Places for requests in flight, per port.
const PLACES: usize = 1024;

/// Requests of one volume.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    kinds: [Counter; KINDS.len()],
}

#[derive(Debug, Default)]
struct Counter {
    done: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    sum_us: AtomicU64,
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
}

/// What a meter has counted of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Requests that have ended well.
    pub done: u64,
    /// Requests that have failed.
    pub failed: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// Sum of the times in microseconds.
    pub sum_us: u64,
    /// Timed requests per bucket of [`BOUNDS_US`], the last one above all bounds.
    pub buckets: Vec<u64>,
}

impl Counted {
    /// What the core has counted of a peer's acknowledgements.
    pub(crate) fn of_acks(times: &lockstep_core::report::AckTimes) -> Counted {
        Counted {
            done: times.buckets.iter().sum(),
            sum_us: times.sum_us,
            buckets: times.buckets.to_vec(),
            ..Counted::default()
        }
    }

    /// The bound below which this share (0 to 1) of the requests lay, in microseconds.
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let all: u64 = self.buckets.iter().sum();
        let wanted = (all as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && all > 0 {
                return Some(BOUNDS_US.get(index).copied().unwrap_or(u64::MAX));
            }
        }
        None
    }

    /// What has come since an earlier count.
    pub fn since(&self, before: &Counted) -> Counted {
        let minus = |now: u64, then: u64| now.saturating_sub(then);
        let then = |index: usize| before.buckets.get(index).copied().unwrap_or(0);
        Counted {
            done: minus(self.done, before.done),
            failed: minus(self.failed, before.failed),
            bytes: minus(self.bytes, before.bytes),
            sum_us: minus(self.sum_us, before.sum_us),
            buckets: self
                .buckets
                .iter()
                .enumerate()
                .map(|(index, now)| minus(*now, then(index)))
                .collect(),
        }
    }
}

impl Meter {
    /// The counts, in the order of [`KINDS`].
    pub(crate) fn counted(&self) -> Vec<Counted> {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.kinds
            .iter()
            .map(|kind| Counted {
                done: get(&kind.done),
                failed: get(&kind.failed),
                bytes: get(&kind.bytes),
                sum_us: get(&kind.sum_us),
                buckets: kind.buckets.iter().map(get).collect(),
            })
            .collect()
    }

    fn time(&self, kind: usize, elapsed_us: u64) {
        let counter = &self.kinds[kind];
        let bucket = BOUNDS_US.partition_point(|bound| *bound < elapsed_us);
        counter.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        counter.sum_us.fetch_add(elapsed_us, Ordering::Relaxed);
    }
}

fn kind_of(kind: &RequestKind) -> usize {
    match kind {
        RequestKind::Read => 0,
        RequestKind::Write { .. } => 1,
        RequestKind::Flush => 2,
        RequestKind::Discard | RequestKind::Zeroes { .. } => 3,
    }
}

/// When the requests of one port began.
struct Flights {
    epoch: Instant,
    places: Box<[Place]>,
}

/// `id` is the request's id plus one, 0 for a free place; `begun` is microseconds times 4 plus
/// the kind.
#[derive(Default)]
struct Place {
    id: AtomicU64,
    begun: AtomicU64,
}

impl Flights {
    fn new() -> Flights {
        Flights {
            epoch: Instant::now(),
            places: (0..PLACES).map(|_| Place::default()).collect(),
        }
    }

    fn place(&self, id: RequestId) -> &Place {
        let mixed = id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.places[(mixed >> 54) as usize % PLACES]
    }

    fn now_us(&self) -> u64 {
        self.epoch.elapsed().as_micros() as u64
    }

    fn begin(&self, id: RequestId, kind: usize) {
        let place = self.place(id);
        let begun = self.now_us() * 4 + kind as u64;
        place.begun.store(begun, Ordering::Relaxed);
        place.id.store(id.0.wrapping_add(1), Ordering::Release);
    }

    /// Kind and time of a request that ends now; none if another one took its place.
    fn end(&self, id: RequestId) -> Option<(usize, u64)> {
        let place = self.place(id);
        let own = id.0.wrapping_add(1);
        let begun = place.begun.load(Ordering::Acquire);
        place
            .id
            .compare_exchange(own, 0, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        let elapsed = self.now_us().saturating_sub(begun / 4);
        Some(((begun % 4) as usize, elapsed))
    }
}

/// A port that counts.
pub(crate) struct MeteredPort {
    port: Box<dyn VolumePort + Send>,
    discards: Discards,
    meter: Arc<Meter>,
    flights: Arc<Flights>,
}

/// What the sink needs; made before the port, which needs the sink.
pub(crate) struct Metering {
    meter: Arc<Meter>,
    discards: Discards,
    flights: Arc<Flights>,
}

impl Metering {
    /// For a new port of the meter's volume, whose users are offered these discards.
    pub(crate) fn new(meter: Arc<Meter>, discards: Discards) -> Metering {
        Metering {
            meter,
            discards,
            flights: Arc::new(Flights::new()),
        }
    }

    /// The sink that counts and passes on.
    pub(crate) fn sink(&self, sink: Box<dyn PortSink>) -> Box<dyn PortSink> {
        Box::new(MeteredSink {
            sink,
            discards: self.discards,
            meter: self.meter.clone(),
            flights: self.flights.clone(),
        })
    }

    /// The port that counts and passes on.
    pub(crate) fn port(self, port: Box<dyn VolumePort + Send>) -> Box<dyn VolumePort + Send> {
        Box::new(MeteredPort {
            port,
            discards: self.discards,
            meter: self.meter,
            flights: self.flights,
        })
    }
}

impl VolumePort for MeteredPort {
    fn properties(&self) -> VolumeProperties {
        offered(self.discards, self.port.properties())
    }

    fn alloc(&self, len: usize) -> Option<IoBuf> {
        self.port.alloc(len)
    }

    fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError> {
        let (id, kind, len) = (request.id, kind_of(&request.kind), request.len);
        self.flights.begin(id, kind);
        self.port.submit(request)?;
        let counter = &self.meter.kinds[kind];
        counter.bytes.fetch_add(u64::from(len), Ordering::Relaxed);
        Ok(())
    }

    fn kick(&mut self) {
        self.port.kick();
    }

    fn open(&mut self, id: RequestId, write: bool) {
        self.port.open(id, write);
    }

    fn close(&mut self, write: bool) {
        self.port.close(write);
    }
}

/// What a volume's users are told of it.
fn offered(discards: Discards, mut properties: VolumeProperties) -> VolumeProperties {
    match discards {
        Discards::AsVolume => {}
        Discards::Never => {
            properties.discard = false;
            properties.discard_granularity_bytes = 0;
        }
        // Where a disk or a peer cannot discard, zeroes are written.
        Discards::Every(bytes) => {
            properties.discard = true;
            properties.discard_granularity_bytes = bytes;
        }
    }
    properties
}

struct MeteredSink {
    sink: Box<dyn PortSink>,
    discards: Discards,
    meter: Arc<Meter>,
    flights: Arc<Flights>,
}

impl PortSink for MeteredSink {
    fn event(&mut self, event: PortEvent) {
        if let PortEvent::Done(completion) = &event
            && let Some((kind, elapsed_us)) = self.flights.end(completion.id)
        {
            let counter = &self.meter.kinds[kind];
            match completion.result {
                Ok(()) => {
                    counter.done.fetch_add(1, Ordering::Relaxed);
                    self.meter.time(kind, elapsed_us);
                }
                Err(_) => {
                    counter.failed.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        self.sink.event(match event {
            PortEvent::Changed(properties) => {
                PortEvent::Changed(offered(self.discards, properties))
            }
            PortEvent::Done(_) | PortEvent::Opened { .. } | PortEvent::Gone => event,
        });
    }

    fn batch_end(&mut self) {
        self.sink.batch_end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_timed_once_and_only_if_it_kept_its_place() {
        let flights = Flights::new();
        flights.begin(RequestId(7), 1);
        assert_eq!(flights.end(RequestId(7)).map(|(kind, _)| kind), Some(1));
        assert_eq!(flights.end(RequestId(7)), None);
        // Another request with the same place takes it over.
        let same = (8..)
            .map(RequestId)
            .find(|id| std::ptr::eq(flights.place(*id), flights.place(RequestId(7))))
            .unwrap();
        flights.begin(RequestId(7), 0);
        flights.begin(same, 2);
        assert_eq!(flights.end(RequestId(7)), None);
        assert_eq!(flights.end(same).map(|(kind, _)| kind), Some(2));
        // Ids of all ones are ids too.
        flights.begin(RequestId(u64::MAX - 1), 3);
        assert_eq!(
            flights.end(RequestId(u64::MAX - 1)).map(|(k, _)| k),
            Some(3)
        );
    }

    #[test]
    fn users_are_offered_the_discards_that_were_configured() {
        let disk = VolumeProperties {
            discard: true,
            discard_granularity_bytes: 4096,
            ..VolumeProperties::default()
        };
        let client = VolumeProperties::default();
        let of = |discards, properties| {
            let told = offered(discards, properties);
            (told.discard, told.discard_granularity_bytes)
        };
        assert_eq!(of(Discards::AsVolume, disk), (true, 4096));
        assert_eq!(of(Discards::AsVolume, client), (false, 0));
        assert_eq!(of(Discards::Never, disk), (false, 0));
        assert_eq!(of(Discards::Every(12288), disk), (true, 12288));
        assert_eq!(of(Discards::Every(12288), client), (true, 12288));
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let meter = Meter::default();
        for us in [10, 10, 10, 90, 30_000_000] {
            meter.time(1, us);
        }
        let counted = &meter.counted()[1];
        assert_eq!(counted.quantile_us(0.5), Some(20));
        assert_eq!(counted.quantile_us(0.8), Some(100));
        assert_eq!(counted.quantile_us(1.0), Some(u64::MAX));
        assert_eq!(meter.counted()[0].quantile_us(0.5), None);
        let before = counted.clone();
        meter.time(1, 100);
        let since = meter.counted()[1].since(&before);
        assert_eq!((since.buckets[2], since.sum_us), (1, 100));
    }
}
