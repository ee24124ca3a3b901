//! Snapshots as text: Prometheus metrics, and `key=value` lines for scripts.

use std::fmt::Write as _;

use crate::core::latency::BOUNDS_US;
use crate::core::plugin::CODEC_NAMES;
use crate::core::stats::{LinkSnapshot, Snapshot};

/// Name, help and value of a metric that every connection has.
type Column = (&'static str, &'static str, fn(&LinkSnapshot) -> f64);

/// The Prometheus exposition format.
pub(crate) fn prometheus(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, values: Vec<(String, f64)>| {
        let _ = writeln!(out, "# HELP lockstep_proxy_{name} {help}");
        let _ = writeln!(out, "# TYPE lockstep_proxy_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(out, "lockstep_proxy_{name}{labels} {value}");
        }
    };
    metric(
        "memory_bytes",
        "gauge",
        "Memory in use by all buffers.",
        vec![(String::new(), snapshot.memory_used_bytes as f64)],
    );
    metric(
        "memory_limit_bytes",
        "gauge",
        "Memory that all buffers may use.",
        vec![(String::new(), snapshot.memory_max_bytes as f64)],
    );
    metric(
        "spill_bytes",
        "gauge",
        "Bytes on the spill disk.",
        vec![(String::new(), snapshot.spill_used_bytes as f64)],
    );
    metric(
        "codec_jobs",
        "gauge",
        "Chunks that are being coded or decoded, or wait for it.",
        vec![(String::new(), snapshot.codec_jobs as f64)],
    );
    let mut limits = vec![(
        "{level=\"daemon\"}".to_string(),
        snapshot.rate_limit,
        snapshot.burst_bytes,
    )];
    for session in &snapshot.sessions {
        let labels = format!("{{level=\"session\",peer=\"{}\"}}", session.peer);
        limits.push((labels, session.rate_limit, session.burst_bytes));
    }
    for link in &snapshot.connections {
        let own = labels(link, &[]).split_off(1);
        let labels = format!("{{level=\"connection\",{own}");
        limits.push((labels, link.rate_limit, link.burst_bytes));
    }
    let of = |value: fn(&(String, u64, u64)) -> u64| {
        limits
            .iter()
            .map(|limit| (limit.0.clone(), value(limit) as f64))
            .collect()
    };
    metric(
        "rate_limit_bytes_per_second",
        "gauge",
        "Limit of a level now; 0 is none.",
        of(|limit| limit.1),
    );
    metric(
        "burst_bytes",
        "gauge",
        "What the limit of a level lets pass at once; 0 is without a limit.",
        of(|limit| limit.2),
    );
    let each = |value: &dyn Fn(&LinkSnapshot) -> f64| {
        snapshot
            .connections
            .iter()
            .map(|link| (labels(link, &[]), value(link)))
            .collect()
    };
    let gauges: [Column; 14] = [
        (
            "connected",
            "1 if DRBD's sockets are connected through.",
            |l| f64::from(u8::from(l.state == "Connected")),
        ),
        (
            "suspended",
            "1 while the way to the peer proxy is lost.",
            |l| f64::from(u8::from(l.state == "Suspended")),
        ),
        (
            "buffered_raw_bytes",
            "Raw bytes that the peer's DRBD has not got.",
            |l| l.buffered_raw_bytes as f64,
        ),
        ("buffered_memory_bytes", "Memory that they take.", |l| {
            l.buffered_memory_bytes as f64
        }),
        ("spilled_bytes", "Bytes of this connection on disk.", |l| {
            l.spilled_bytes as f64
        }),
        (
            "oldest_byte_age_seconds",
            "Age of the oldest undelivered byte: recovery point.",
            |l| l.oldest_byte_age_ms as f64 / 1000.0,
        ),
        (
            "drain_bytes_per_second",
            "Raw bytes that drain per second under load.",
            |l| l.drain_rate as f64,
        ),
        (
            "drain_seconds",
            "Estimated time until the buffer is empty; -1 is unknown.",
            |l| l.drain_ms.map_or(-1.0, |ms| ms as f64 / 1000.0),
        ),
        (
            "ratio",
            "Raw bytes over coded bytes since the start.",
            |l| l.ratio,
        ),
        (
            "receive_memory_bytes",
            "Memory of what arrives for the local DRBD.",
            |l| l.receive_memory_bytes as f64,
        ),
        (
            "input_bytes_per_second",
            "Raw bytes that DRBD gives per second.",
            |l| l.input_rate as f64,
        ),
        (
            "wire_bytes_per_second",
            "Bytes per second that the line takes under load; 0 is unknown.",
            |l| l.wire_rate as f64,
        ),
        ("bulk_carriers", "Carriers for data that are up.", |l| {
            l.bulk_carriers as f64
        }),
        (
            "rtt_seconds",
            "Round trip time of the control carrier.",
            |l| l.rtt_us as f64 / 1e6,
        ),
    ];
    for (name, help, value) in gauges {
        metric(name, "gauge", help, each(&value));
    }
    let counters: [Column; 18] = [
        ("raw_in_bytes_total", "Bytes read from DRBD.", |l| {
            l.counters.raw_in_bytes as f64
        }),
        ("raw_out_bytes_total", "Bytes written to DRBD.", |l| {
            l.counters.raw_out_bytes as f64
        }),
        ("wire_out_bytes_total", "Bytes given to the WAN.", |l| {
            l.counters.wire_out_bytes as f64
        }),
        ("wire_in_bytes_total", "Bytes taken from the WAN.", |l| {
            l.counters.wire_in_bytes as f64
        }),
        ("sessions_total", "Sessions begun.", |l| {
            l.counters.sessions as f64
        }),
        (
            "sessions_dropped_total",
            "Sessions ended with a reset.",
            |l| l.counters.sessions_dropped as f64,
        ),
        ("resumes_total", "Sessions resumed after a loss.", |l| {
            l.counters.resumes as f64
        }),
        ("resent_bytes_total", "Raw bytes sent again.", |l| {
            l.counters.resent_bytes as f64
        }),
        ("carriers_lost_total", "Carriers lost.", |l| {
            l.counters.carriers_lost as f64
        }),
        ("streams_reset_total", "DRBD sockets reset.", |l| {
            l.counters.streams_reset as f64
        }),
        ("opens_refused_total", "DRBD connections refused.", |l| {
            l.counters.opens_refused as f64
        }),
        (
            "checksum_errors_total",
            "Chunks that failed their check.",
            |l| l.counters.checksum_errors as f64,
        ),
        (
            "protocol_errors_total",
            "Violations of the WAN protocol.",
            |l| l.counters.protocol_errors as f64,
        ),
        (
            "duplicate_chunks_total",
            "Chunks that had come before.",
            |l| l.counters.duplicate_chunks as f64,
        ),
        (
            "spill_bytes_total",
            "Bytes written to the spill disk.",
            |l| l.counters.spill_written_bytes as f64,
        ),
        ("spill_errors_total", "Failures of the spill disk.", |l| {
            l.counters.spill_errors as f64
        }),
        (
            "pings_answered_total",
            "Answers to DRBD's pings made up here (ping-hold).",
            |l| l.counters.pings_answered as f64,
        ),
        (
            "codec_switches_total",
            "Changes by the automatic choice.",
            |l| l.codec_switches as f64,
        ),
    ];
    for (name, help, value) in counters {
        metric(name, "counter", help, each(&value));
    }
    let mut chunks = Vec::new();
    let mut blocked = Vec::new();
    let mut waited = Vec::new();
    let mut cpu = Vec::new();
    for link in &snapshot.connections {
        for (codec, count) in CODEC_NAMES.iter().zip(link.counters.chunks_by_codec) {
            chunks.push((labels(link, &[("codec", codec)]), count as f64));
        }
        let c = &link.counters;
        for (reason, ms) in [
            ("memory", c.blocked_memory_ms),
            ("pool", c.blocked_pool_ms),
            ("lag", c.blocked_lag_ms),
        ] {
            blocked.push((labels(link, &[("reason", reason)]), ms as f64 / 1000.0));
        }
        for (reason, us) in c.send_blocked.each() {
            waited.push((labels(link, &[("reason", reason)]), us as f64 / 1e6));
        }
        for (what, ms) in [("encode", c.encode_cpu_ms), ("decode", c.decode_cpu_ms)] {
            cpu.push((labels(link, &[("work", what)]), ms as f64 / 1000.0));
        }
    }
    let mut latency = Vec::new();
    for link in &snapshot.connections {
        let times = &link.counters.control_latency;
        for bound in BOUNDS_US {
            let le = format!("{}", bound as f64 / 1e6);
            let labels = labels(link, &[("le", &le)]);
            latency.push((format!("_bucket{labels}"), times.up_to(bound) as f64));
        }
        let all = labels(link, &[("le", "+Inf")]);
        latency.push((format!("_bucket{all}"), times.count as f64));
        let own = labels(link, &[]);
        latency.push((format!("_sum{own}"), times.sum_us as f64 / 1e6));
        latency.push((format!("_count{own}"), times.count as f64));
    }
    metric(
        "control_latency_seconds",
        "histogram",
        "From DRBD's control socket here to the one at the peer.",
        latency,
    );
    metric("chunks_total", "counter", "Chunks by codec.", chunks);
    metric(
        "blocked_seconds_total",
        "counter",
        "Time that reading was held back.",
        blocked,
    );
    metric(
        "send_blocked_seconds_total",
        "counter",
        "Time that the front of the queue for the peer was held back.",
        waited,
    );
    metric(
        "codec_seconds_total",
        "counter",
        "Time of codec workers.",
        cpu,
    );
    out
}

/// One `name.key=value` line per number.
pub(crate) fn key_values(snapshot: &Snapshot) -> String {
    let mut out = format!(
        "version={}\nuptime_ms={}\nmemory_max_bytes={}\nmemory_used_bytes={}\n\
         spill_limit_bytes={}\nspill_used_bytes={}\ncodec_jobs={}\n",
        snapshot.version,
        snapshot.uptime_ms,
        snapshot.memory_max_bytes,
        snapshot.memory_used_bytes,
        snapshot.spill_limit_bytes,
        snapshot.spill_used_bytes,
        snapshot.codec_jobs
    );
    for link in &snapshot.connections {
        if let Ok(value) = serde_json::to_value(link) {
            flatten(&mut out, &link.name, &value);
        }
    }
    out
}

fn flatten(out: &mut String, prefix: &str, value: &serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                flatten(out, &format!("{prefix}.{key}"), value);
            }
        }
        serde_json::Value::Array(list) => {
            for (at, value) in list.iter().enumerate() {
                flatten(out, &format!("{prefix}.{at}"), value);
            }
        }
        serde_json::Value::String(text) => {
            let _ = writeln!(out, "{prefix}={}", text.replace('\n', " "));
        }
        other => {
            let _ = writeln!(out, "{prefix}={other}");
        }
    }
}

fn labels(link: &LinkSnapshot, more: &[(&str, &str)]) -> String {
    let name = link.name.replace('\\', "\\\\").replace('"', "\\\"");
    let mut out = format!("{{connection=\"{name}\"");
    for (key, value) in more {
        let _ = write!(out, ",{key}=\"{value}\"");
    }
    out.push('}');
    out
}
