//! What the kernel says of the carriers' TCP connections: losses, round trips, windows.

use std::os::fd::AsFd;

use lockstep_io::tcp::TcpInfo;

use super::Reactor;
use crate::core::WireId;
use crate::core::stats::TcpSnapshot;

impl Reactor {
    /// Since its first frame it is known which connection an accepted carrier is for.
    pub(super) fn note_carrier(&mut self, carrier: WireId) {
        if let Some(id) = self.engine.wire_link(carrier) {
            self.live.carriers.insert(carrier, id);
        }
    }

    /// A carrier ends: what it sent again stays counted.
    pub(super) fn note_retransmits(&mut self, carrier: WireId, socket: &impl AsFd) {
        if let Some(id) = self.live.carriers.remove(&carrier)
            && let Some(link) = self.engine.links.get_mut(&id)
            && let Ok(info) = TcpInfo::of(socket)
        {
            link.counters.retransmits += u64::from(info.retransmitted_segments);
        }
    }
}

/// Asks the kernel; all zero where it does not say.
pub(super) fn tcp_of(socket: &impl AsFd) -> TcpSnapshot {
    let info = TcpInfo::of(socket).unwrap_or_default();
    TcpSnapshot {
        rtt_us: info.rtt_us,
        rtt_deviation_us: info.rtt_deviation_us,
        min_rtt_us: info.min_rtt_us,
        congestion_window_bytes: info.congestion_window_bytes(),
        congestion_window_segments: info.congestion_window_segments,
        unacknowledged_segments: info.unacknowledged_segments,
        retransmitted_segments: info.retransmitted_segments,
        retransmitted_bytes: info.retransmitted_bytes,
        delivery_rate: info.delivery_bytes_per_second,
    }
}
