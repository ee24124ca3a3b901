//! What the operator sees: counters of a connection and the snapshot that all outputs (text, JSON,
//! Prometheus, live view) are made from.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::adaptive::RungSnapshot;
use super::latency::Latency;
use super::plugin::{CODEC_COUNT, CODEC_NAMES};
use super::stream::Class;
use super::waits::Waits;

/// What a piece of work took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Took {
    /// By the clock on the wall: what a decision must reckon with.
    pub(crate) wall: Duration,
    /// Of the processor.
    pub(crate) cpu: Duration,
}

impl Took {
    /// On a processor of its own.
    #[cfg(test)]
    pub(crate) fn alone(time: Duration) -> Took {
        Took {
            wall: time,
            cpu: time,
        }
    }
}

/// What a codec worked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CodecWork {
    Encode,
    Decode,
    /// A trial for the automatic choice.
    Probe,
}

/// Processor time of codecs in microseconds: by work, class of the stream, and codec.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct CpuTimes(BTreeMap<String, BTreeMap<String, BTreeMap<String, u64>>>);

impl CpuTimes {
    pub(crate) fn add(&mut self, work: CodecWork, class: Class, codec: u8, time: Duration) {
        let work = match work {
            CodecWork::Encode => "encode",
            CodecWork::Decode => "decode",
            CodecWork::Probe => "probe",
        };
        let codec = CODEC_NAMES.get(usize::from(codec)).copied();
        let classes = self.0.entry(work.into()).or_default();
        let codecs = classes.entry(class.name().into()).or_default();
        *codecs.entry(codec.unwrap_or("unknown").into()).or_default() += time.as_micros() as u64;
    }

    /// Work, class, codec and time of each.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&str, &str, &str, u64)> {
        self.0.iter().flat_map(|(work, classes)| {
            classes.iter().flat_map(move |(class, codecs)| {
                let each = codecs.iter();
                each.map(move |(codec, us)| (work.as_str(), class.as_str(), codec.as_str(), *us))
            })
        })
    }
}

/// Counts that only grow.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Raw bytes read from the local DRBD, and written to it.
    pub(crate) raw_in_bytes: u64,
    pub(crate) raw_out_bytes: u64,
    /// Frame bytes given to the WAN, and taken from it.
    pub(crate) wire_out_bytes: u64,
    pub(crate) wire_in_bytes: u64,
    /// The part of each that is DRBD's control traffic, or the control carrier's.
    #[serde(default)]
    pub(crate) control_raw_in_bytes: u64,
    #[serde(default)]
    pub(crate) control_raw_out_bytes: u64,
    #[serde(default)]
    pub(crate) control_wire_out_bytes: u64,
    #[serde(default)]
    pub(crate) control_wire_in_bytes: u64,
    /// Payload bytes of coded chunks (without headers), and the raw bytes they stand for.
    pub(crate) coded_raw_bytes: u64,
    pub(crate) coded_wire_bytes: u64,
    pub(crate) chunks_by_codec: [u64; CODEC_COUNT],
    /// The same of what came.
    #[serde(default)]
    pub(crate) received_by_codec: [u64; CODEC_COUNT],
    pub(crate) sessions: u64,
    pub(crate) resumes: u64,
    pub(crate) resent_bytes: u64,
    pub(crate) sessions_dropped: u64,
    pub(crate) carriers_lost: u64,
    /// Carriers that came up, the first ones and those after a loss.
    #[serde(default)]
    pub(crate) carriers_up: u64,
    /// Segments that TCP sent again: those of carriers that are gone, in a snapshot of all.
    #[serde(default)]
    pub(crate) retransmits: u64,
    pub(crate) streams_opened: u64,
    pub(crate) streams_reset: u64,
    pub(crate) opens_refused: u64,
    pub(crate) checksum_errors: u64,
    pub(crate) protocol_errors: u64,
    pub(crate) duplicate_chunks: u64,
    /// Times that DRBD's pings were answered here, with `ping-hold`.
    #[serde(default)]
    pub(crate) pings_answered: u64,
    pub(crate) spill_written_bytes: u64,
    pub(crate) spill_errors: u64,
    /// Time in which reading from DRBD was held back, by reason.
    pub(crate) blocked_memory_ms: u64,
    pub(crate) blocked_pool_ms: u64,
    pub(crate) blocked_lag_ms: u64,
    /// Time in which sending to the peer was held back, by reason.
    #[serde(default)]
    pub(crate) send_blocked: Waits,
    #[serde(default)]
    pub(crate) codec_cpu_us: CpuTimes,
    /// From reading on a control socket here to the write at the peer.
    pub(crate) control_latency: Latency,
}

/// One connection at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LinkSnapshot {
    pub(crate) name: String,
    pub(crate) inside: String,
    pub(crate) peer_outside: String,
    pub(crate) my_outside: String,
    pub(crate) local_drbd: String,
    /// Connecting, ProxyConnected, Connected or Suspended.
    pub(crate) state: String,
    pub(crate) role: String,
    pub(crate) memlimit_bytes: u64,
    pub(crate) plugins: Vec<String>,
    /// Codec of the next chunk.
    pub(crate) codec: String,
    pub(crate) codec_switches: u64,
    /// What the automatic choice knows; empty with another plugin.
    pub(crate) rungs: Vec<RungSnapshot>,
    pub(crate) bulk_carriers: usize,
    /// Raw bytes that the peer's DRBD has not got yet.
    pub(crate) buffered_raw_bytes: u64,
    /// Memory that they take here.
    pub(crate) buffered_memory_bytes: u64,
    /// The part of it that is coded.
    pub(crate) buffered_encoded_bytes: u64,
    pub(crate) spilled_bytes: u64,
    /// Memory of data on the way to the local DRBD.
    pub(crate) receive_memory_bytes: u64,
    /// Age of the oldest undelivered byte: the recovery point.
    pub(crate) oldest_byte_age_ms: u64,
    /// Raw bytes per second that drain.
    pub(crate) drain_rate: u64,
    /// Wire bytes per second that the link takes under load; 0 is unknown.
    pub(crate) wire_rate: u64,
    pub(crate) input_rate: u64,
    /// Estimate until the buffer is empty.
    pub(crate) drain_ms: Option<u64>,
    /// Raw bytes over wire bytes since the start.
    pub(crate) ratio: f64,
    pub(crate) rtt_us: u64,
    /// Raw bytes per second that the peer can decode; 0 is unknown.
    pub(crate) peer_decode_rate: u64,
    /// Thousandths of a core that it has for that, if it says so.
    pub(crate) peer_free_millicores: Option<u64>,
    /// One way of DRBD's control traffic, proxy to proxy; 0 is unknown.
    pub(crate) control_p50_us: u64,
    pub(crate) control_p99_us: u64,
    pub(crate) control_max_us: u64,
    /// Bytes per second and at once that the connection's own limit lets pass; 0 is none.
    pub(crate) rate_limit: u64,
    pub(crate) burst_bytes: u64,
    /// memory, pool, lag, share or empty.
    pub(crate) blocked_by: String,
    pub(crate) last_error: String,
    /// What the sockets to the peer say of themselves.
    pub(crate) carriers: Vec<CarrierSnapshot>,
    pub(crate) streams: Vec<StreamSnapshot>,
    pub(crate) counters: Counters,
}

/// One TCP connection to the peer proxy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CarrierSnapshot {
    /// control or bulk.
    pub(crate) class: String,
    pub(crate) local: String,
    pub(crate) peer: String,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// The DiffServ code point of its packets.
    pub(crate) dscp: String,
    /// How the kernel finds its rate; `bbr` for bulk where the machine allows it.
    pub(crate) congestion: String,
    /// Unsent bytes that the kernel takes.
    pub(crate) notsent_bytes: u32,
    /// Number in the session; 0 is the control carrier.
    pub(crate) number: u32,
    pub(crate) tcp: TcpSnapshot,
}

/// What TCP measured on a carrier; 0 is unknown.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TcpSnapshot {
    /// Round trip time, its mean deviation, and the shortest.
    pub(crate) rtt_us: u32,
    pub(crate) rtt_deviation_us: u32,
    pub(crate) min_rtt_us: u32,
    /// What may be, and what is, under way unacknowledged.
    pub(crate) congestion_window_bytes: u64,
    pub(crate) congestion_window_segments: u32,
    pub(crate) unacknowledged_segments: u32,
    /// Sent again since the carrier came up.
    pub(crate) retransmitted_segments: u32,
    pub(crate) retransmitted_bytes: u64,
    /// What arrived per second lately.
    pub(crate) delivery_rate: u64,
}

/// One socket of DRBD.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StreamSnapshot {
    pub(crate) id: u32,
    pub(crate) class: String,
    pub(crate) phase: String,
    pub(crate) sent_bytes: u64,
    pub(crate) delivered_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) window_bytes: u64,
}

/// A limit of all connections with one peer proxy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionSnapshot {
    pub(crate) peer: String,
    pub(crate) rate_limit: u64,
    pub(crate) burst_bytes: u64,
}

/// A session with a peer proxy: the TCP connections that its DRBD connections share.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TrunkSnapshot {
    /// 128 bits in hex.
    pub(crate) id: String,
    /// The peer's outside IP.
    pub(crate) peer: String,
    /// dialer or listener.
    pub(crate) role: String,
    pub(crate) rtt_us: u64,
    pub(crate) tcp_connections: usize,
    pub(crate) connections: Vec<String>,
}

/// The whole daemon at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) version: String,
    pub(crate) uptime_ms: u64,
    /// Of the log; empty where the log is not the daemon's.
    pub(crate) log_level: String,
    pub(crate) memory_max_bytes: u64,
    /// What each connection may always have.
    pub(crate) memlimit_min_bytes: u64,
    pub(crate) memory_used_bytes: u64,
    pub(crate) spill_limit_bytes: u64,
    pub(crate) spill_used_bytes: u64,
    pub(crate) codec_jobs: usize,
    /// The daemon's limit; 0 is none.
    pub(crate) rate_limit: u64,
    pub(crate) burst_bytes: u64,
    /// Limits of all connections with one peer proxy.
    pub(crate) sessions: Vec<SessionSnapshot>,
    /// Processor time of the proxy's threads in microseconds.
    pub(crate) thread_cpu_us: BTreeMap<String, u64>,
    /// Sessions with peer proxies.
    #[serde(default)]
    pub(crate) peers: Vec<TrunkSnapshot>,
    pub(crate) connections: Vec<LinkSnapshot>,
}

/// A rate that follows what was measured lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    per_second: f64,
    known: bool,
}

impl Rate {
    /// Learns that `amount` passed in `time`.
    pub(crate) fn sample(&mut self, amount: u64, time: Duration) {
        let seconds = time.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let now = amount as f64 / seconds;
        let weight = if self.known { 0.3 } else { 1.0 };
        self.per_second += (now - self.per_second) * weight;
        self.known = true;
    }

    /// Whether `amount` in `time` is more than the rate believed in; false while none is known.
    pub(crate) fn is_below(&self, amount: u64, time: Duration) -> bool {
        self.known && amount as f64 > self.per_second * time.as_secs_f64()
    }

    /// The truth is known to be higher than what was seen; beyond `enough` it does not matter.
    pub(crate) fn raise(&mut self, factor: f64, enough: f64) {
        self.per_second = self.per_second.max((self.per_second * factor).min(enough));
    }

    /// Units per second, once known.
    pub(crate) fn get(&self) -> Option<f64> {
        self.known.then_some(self.per_second)
    }

    /// Units per second as a whole number; 0 while unknown.
    pub(crate) fn whole(&self) -> u64 {
        self.per_second as u64
    }
}
