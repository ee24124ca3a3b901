//! Which replica serves a read (semantics.md, 16.1), for reads that the local disk could serve.
//!
//! `when-congested-remote` has no effect in current kernels, which lost the means to ask a disk
//! for its queue. Here the queue is measured: each path (the local disk, each peer) keeps how
//! many reads wait on it and the mean time that it needs for one of them. A read goes to a peer
//! if the local disk has a queue and the peer is expected to answer sooner.

use lockstep_format::units::{NodeId, Sector, VolumeNr};

use crate::device::Device;
use crate::options::ReadBalancing;
use crate::resource::Resource;
use crate::time::{Duration, Instant};

/// Reads in flight on the local disk from which on it has a queue.
const QUEUE_READS: u32 = 4;

/// A figure older than this is measured again.
const STALE: Duration = Duration::from_secs(1);

/// What is known of one path of reads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadPath {
    in_flight: u32,
    /// Mean time between two answers while reads wait, in nanoseconds; 0 is not measured.
    interval_ns: u64,
    measured_at: Instant,
}

impl ReadPath {
    /// A path with these figures.
    #[cfg(test)]
    pub(crate) fn known(in_flight: u32, interval_ns: u64, measured_at: Instant) -> Self {
        ReadPath {
            in_flight,
            interval_ns,
            measured_at,
        }
    }

    /// A read leaves; returns how many are in flight with it.
    pub(crate) fn issue(&mut self) -> u32 {
        self.in_flight += 1;
        self.in_flight
    }

    /// No read is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// A read of the path was given up.
    pub(crate) fn forget(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The read that was issued at `issued` as one of `depth` came back.
    pub(crate) fn answered(&mut self, issued: Instant, depth: u32, now: Instant) {
        self.forget();
        let sample = ((now - issued).0 / u64::from(depth.max(1))).max(1);
        self.interval_ns = if self.is_stale(now) {
            sample
        } else {
            (self.interval_ns * 7 + sample) / 8
        };
        self.measured_at = now;
    }

    fn is_stale(&self, now: Instant) -> bool {
        self.interval_ns == 0 || now - self.measured_at > STALE
    }

    /// When one more read would be answered; nothing is known of a path that is not measured.
    fn expected_ns(&self, now: Instant) -> Option<u64> {
        (!self.is_stale(now)).then(|| self.interval_ns * u64::from(self.in_flight + 1))
    }
}

impl Device {
    /// Reads that the local disk could serve may go to a peer.
    pub(crate) fn balances_reads(&self) -> bool {
        let policy = self.disk.as_ref().map(|d| d.options.read_balancing);
        policy.is_some_and(|p| p != ReadBalancing::PreferLocal)
    }
}

impl Resource {
    /// Whether a read that both the local disk and `peer` can serve goes to `peer`.
    pub(crate) fn reads_at_peer(&mut self, volume: VolumeNr, peer: NodeId, sector: Sector) -> bool {
        let now = self.now;
        let pending = self
            .connections
            .get(&peer)
            .map_or(0, |c| c.io.sent.len() as u64);
        let Some(device) = self.devices.get_mut(&volume) else {
            return false;
        };
        let at_peer = device.io.read_paths.get(&peer).copied().unwrap_or_default();
        let resync = device
            .peers
            .get(&peer)
            .and_then(|p| p.io.target.as_ref())
            .map_or(0, |t| t.in_flight() as u64);
        let Some(policy) = device.disk.as_ref().map(|d| d.options.read_balancing) else {
            return true;
        };
        match policy {
            ReadBalancing::PreferLocal => false,
            ReadBalancing::PreferRemote => true,
            ReadBalancing::RoundRobin => {
                device.io.read_turn = !device.io.read_turn;
                !device.io.read_turn
            }
            ReadBalancing::LeastPending => {
                device.io.lower_pending > pending + resync + u64::from(at_peer.in_flight)
            }
            ReadBalancing::WhenCongestedRemote => {
                let local = &device.io.local_reads;
                if local.in_flight < QUEUE_READS {
                    return false;
                }
                match (local.expected_ns(now), at_peer.expected_ns(now)) {
                    (Some(here), Some(there)) => there < here,
                    // One read measures the peer.
                    (_, None) => at_peer.in_flight == 0,
                    (None, Some(_)) => false,
                }
            }
            ReadBalancing::Striping(shift) => (sector.0 >> (shift - 9)) & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_expects_its_queue_times_its_interval() {
        let mut path = ReadPath::default();
        assert_eq!(path.expected_ns(Instant(0)), None);
        for depth in 1..=4 {
            assert_eq!(path.issue(), depth);
        }
        // The fourth of four comes after 400 ns: one each 100 ns.
        path.answered(Instant(0), 4, Instant(400));
        assert_eq!(path.expected_ns(Instant(400)), Some(400));
        path.forget();
        assert_eq!(path.expected_ns(Instant(400)), Some(300));
        assert_eq!(path.expected_ns(Instant(400) + STALE + Duration(1)), None);
    }
}
