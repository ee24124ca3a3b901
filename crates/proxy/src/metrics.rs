//! Snapshots as text: Prometheus metrics, and `key=value` lines for scripts.

use std::fmt::Write as _;

use crate::core::latency::BOUNDS_US;
use crate::core::plugin::CODEC_NAMES;
use crate::core::stats::{LinkSnapshot, Snapshot, TcpSnapshot};

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
        "memory_floor_bytes",
        "gauge",
        "Memory that each connection may always have.",
        vec![(String::new(), snapshot.memlimit_min_bytes as f64)],
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
    let peers = snapshot.peers.len() as f64;
    metric(
        "peer_sessions",
        "gauge",
        "Sessions with peer proxies.",
        vec![(String::new(), peers)],
    );
    let wires: usize = snapshot.peers.iter().map(|peer| peer.tcp_connections).sum();
    metric(
        "peer_tcp_connections",
        "gauge",
        "TCP connections of these sessions.",
        vec![(String::new(), wires as f64)],
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
    let gauges: [Column; 17] = [
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
        (
            "buffered_encoded_bytes",
            "The part of the memory that is coded.",
            |l| l.buffered_encoded_bytes as f64,
        ),
        (
            "control_latency_max_seconds",
            "Longest control latency since the start.",
            |l| l.control_max_us as f64 / 1e6,
        ),
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
        (
            "peer_decode_bytes_per_second",
            "Raw bytes that the peer can decode per second; 0 is unknown.",
            |l| l.peer_decode_rate as f64,
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
    let counters: [Column; 20] = [
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
        (
            "carriers_up_total",
            "Carriers that came up, at first or again.",
            |l| l.counters.carriers_up as f64,
        ),
        (
            "retransmits_total",
            "Segments that TCP sent again, on all carriers.",
            |l| l.counters.retransmits as f64,
        ),
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
        let c = &link.counters;
        let counts = c.chunks_by_codec.into_iter().zip(c.received_by_codec);
        for (codec, (sent, received)) in CODEC_NAMES.iter().zip(counts) {
            for (direction, count) in [("send", sent), ("receive", received)] {
                let labels = labels(link, &[("codec", codec), ("direction", direction)]);
                chunks.push((labels, count as f64));
            }
        }
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
        for (work, class, codec, us) in c.codec_cpu_us.each() {
            let labels = labels(link, &[("work", work), ("class", class), ("codec", codec)]);
            cpu.push((labels, us as f64 / 1e6));
        }
    }
    traffic(snapshot, &mut metric);
    carriers(snapshot, &mut metric);
    choices(snapshot, &mut metric);
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
        "Processor time of codec workers, by codec and class.",
        cpu,
    );
    out
}

/// Writes one metric: name, kind, help, and a value for each set of labels.
type Writer<'a> = dyn FnMut(&str, &str, &str, Vec<(String, f64)>) + 'a;

/// The states, bytes by direction and class, and the threads.
fn traffic(snapshot: &Snapshot, metric: &mut Writer<'_>) {
    const STATES: [&str; 4] = ["Connecting", "ProxyConnected", "Connected", "Suspended"];
    let (mut states, mut raw, mut wire) = (Vec::new(), Vec::new(), Vec::new());
    for link in &snapshot.connections {
        for state in STATES {
            let is = f64::from(u8::from(link.state == state));
            states.push((labels(link, &[("state", state)]), is));
        }
        let c = &link.counters;
        let both = |to: &mut Vec<_>, direction, all: u64, control: u64| {
            for (class, bytes) in [("data", all - control.min(all)), ("control", control)] {
                let labels = labels(link, &[("direction", direction), ("class", class)]);
                to.push((labels, bytes as f64));
            }
        };
        both(&mut raw, "send", c.raw_in_bytes, c.control_raw_in_bytes);
        both(
            &mut raw,
            "receive",
            c.raw_out_bytes,
            c.control_raw_out_bytes,
        );
        both(
            &mut wire,
            "send",
            c.wire_out_bytes,
            c.control_wire_out_bytes,
        );
        both(
            &mut wire,
            "receive",
            c.wire_in_bytes,
            c.control_wire_in_bytes,
        );
    }
    metric("state", "gauge", "1 for the state that it has.", states);
    metric(
        "raw_bytes_total",
        "counter",
        "DRBD's bytes, to and from the peer.",
        raw,
    );
    metric(
        "wire_bytes_total",
        "counter",
        "Bytes on the line, to and from the peer.",
        wire,
    );
    let threads = snapshot.thread_cpu_us.iter();
    let threads = threads.map(|(name, us)| (format!("{{thread=\"{name}\"}}"), *us as f64 / 1e6));
    metric(
        "thread_cpu_seconds_total",
        "counter",
        "Processor time of the proxy's threads.",
        threads.collect(),
    );
}

/// Name, help and value of a metric that every carrier has.
type CarrierColumn = (&'static str, &'static str, fn(&TcpSnapshot) -> f64);

/// What TCP says of each connection to the peer proxy.
fn carriers(snapshot: &Snapshot, metric: &mut Writer<'_>) {
    let columns: [CarrierColumn; 5] = [
        ("rtt_seconds", "Round trip time that TCP measured.", |tcp| {
            f64::from(tcp.rtt_us) / 1e6
        }),
        (
            "min_rtt_seconds",
            "Shortest round trip that TCP measured; 0 is unknown.",
            |tcp| f64::from(tcp.min_rtt_us) / 1e6,
        ),
        (
            "congestion_window_bytes",
            "What TCP may have under way unacknowledged.",
            |tcp| tcp.congestion_window_bytes as f64,
        ),
        (
            "retransmitted_segments",
            "Segments sent again since the carrier came up.",
            |tcp| f64::from(tcp.retransmitted_segments),
        ),
        (
            "delivery_bytes_per_second",
            "What arrived per second lately, as TCP sees it.",
            |tcp| tcp.delivery_rate as f64,
        ),
    ];
    for (name, help, value) in columns {
        let mut values = Vec::new();
        for link in &snapshot.connections {
            for carrier in &link.carriers {
                let number = carrier.number.to_string();
                let more = [("class", carrier.class.as_str()), ("carrier", &number)];
                values.push((labels(link, &more), value(&carrier.tcp)));
            }
        }
        metric(&format!("carrier_{name}"), "gauge", help, values);
    }
}

/// The codec in use, and what the automatic choice knows.
fn choices(snapshot: &Snapshot, metric: &mut Writer<'_>) {
    let (mut codec, mut ratio, mut speed) = (Vec::new(), Vec::new(), Vec::new());
    let (mut effective, mut chunks, mut probes) = (Vec::new(), Vec::new(), Vec::new());
    for link in &snapshot.connections {
        codec.push((labels(link, &[("codec", &link.codec)]), 1.0));
        for rung in &link.rungs {
            let measured = if rung.measured { "yes" } else { "no" };
            let own = labels(link, &[("codec", &rung.codec), ("measured", measured)]);
            ratio.push((own.clone(), rung.ratio));
            speed.push((own.clone(), rung.speed as f64));
            effective.push((own, rung.effective as f64));
            let own = labels(link, &[("codec", &rung.codec)]);
            chunks.push((own.clone(), rung.chunks as f64));
            probes.push((own, rung.probes as f64));
        }
    }
    for (name, kind, help, values) in [
        ("codec", "gauge", "The codec of the next chunk.", codec),
        (
            "rung_ratio",
            "gauge",
            "Automatic choice: ratio that a codec gives.",
            ratio,
        ),
        (
            "rung_bytes_per_second",
            "gauge",
            "Automatic choice: raw bytes that all cores code with it.",
            speed,
        ),
        (
            "rung_effective_bytes_per_second",
            "gauge",
            "Automatic choice: raw bytes that would get through with it; 0 is unknown.",
            effective,
        ),
        (
            "rung_chunks_total",
            "counter",
            "Automatic choice: chunks that were coded with it.",
            chunks,
        ),
        (
            "rung_probes_total",
            "counter",
            "Automatic choice: trials among them.",
            probes,
        ),
    ] {
        metric(name, kind, help, values);
    }
}

/// One `key=value` line per number of the daemon, `name.key=value` per number of a connection.
pub(crate) fn key_values(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    if let Ok(serde_json::Value::Object(map)) = serde_json::to_value(snapshot) {
        for (key, value) in map.iter().filter(|(key, _)| *key != "connections") {
            flatten(&mut out, key, value);
        }
    }
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
