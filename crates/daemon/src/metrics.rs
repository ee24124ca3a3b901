//! Metrics in the text format of Prometheus, and the smallest server that gives them out.
//! `docs/metrics.md` lists the names. Labels are names of configured objects and state words, so
//! their number is bounded by the configuration.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::meter::{BOUNDS_US, Counted, KINDS};
use crate::names::Named;
use crate::node::Node;
use crate::report::ResourceReport;

/// Counts of one volume's users, in the order of [`KINDS`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VolumeCounts {
    /// Name of the resource.
    pub resource: String,
    /// Number of the volume.
    pub volume: u16,
    /// Counts per kind of request.
    pub kinds: Vec<Counted>,
}

/// A peer's acknowledgements of writes of one volume.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AckCounts {
    /// Name of the resource.
    pub resource: String,
    /// Number of the volume.
    pub volume: u16,
    /// Name of the peer.
    pub peer: String,
    /// Acknowledgements and their times since the write began.
    pub counted: Counted,
}

/// Longest wait for a scraper's request or for it to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest request that is read, in bytes.
const MAX_REQUEST_BYTES: u64 = 8192;

/// Listens; the error says why it cannot.
pub(crate) fn start(address: SocketAddr, node: Arc<Node>) -> std::io::Result<()> {
    let listener = TcpListener::bind(address)?;
    tracing::info!(address = %listener.local_addr()?, "metrics are given out");
    std::thread::Builder::new()
        .name("metrics".into())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                // One scraper after the other: a slow one delays only others of its kind.
                if let Err(error) = serve(stream, &node) {
                    tracing::debug!(%error, "a scraper hung up");
                }
            }
        })?;
    Ok(())
}

fn serve(mut stream: TcpStream, node: &Node) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = String::new();
    let mut input = BufReader::new(stream.try_clone()?.take(MAX_REQUEST_BYTES));
    input.read_line(&mut request)?;
    // The headers say nothing that matters, but an unread request resets the connection.
    let mut header = String::new();
    while input.read_line(&mut header)? > 2 {
        header.clear();
    }
    let (status, body) = match request.split(' ').collect::<Vec<_>>()[..] {
        ["GET", "/metrics", _] => (
            "200 OK",
            page(&node.reports(None), &node.counts(), &node.acks()),
        ),
        ["GET", "/metrics/drbd-reactor", _] => {
            ("200 OK", crate::foreign::reactor(&node.reports(None)))
        }
        ["GET", "/metrics/node-exporter", _] => {
            ("200 OK", crate::foreign::node_exporter(&node.reports(None)))
        }
        ["GET", _, _] => (
            "404 Not Found",
            "the metrics are at /metrics, /metrics/drbd-reactor, /metrics/node-exporter\n"
                .to_owned(),
        ),
        _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// The page.
pub(crate) fn page(
    reports: &[ResourceReport],
    counts: &[VolumeCounts],
    acks: &[AckCounts],
) -> String {
    let mut page = Page::default();
    page.family("lockstep_build_info", "gauge", "Version of the daemon.");
    page.sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    resources(&mut page, reports);
    devices(&mut page, reports);
    peers(&mut page, reports);
    requests(&mut page, counts);
    acknowledgements(&mut page, acks);
    page.text
}

/// A page in the making.
#[derive(Default)]
pub(crate) struct Page {
    /// What it has.
    pub(crate) text: String,
    name: String,
}

impl Page {
    /// Begins a metric.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        name.clone_into(&mut self.name);
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A sample of the metric that was begun last.
    pub(crate) fn sample(&mut self, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let name = self.name.clone();
        self.named(&name, labels, value);
    }

    fn named(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        let labels = match labels.join(",") {
            none if none.is_empty() => none,
            some => format!("{{{some}}}"),
        };
        let _ = writeln!(self.text, "{name}{labels} {value}");
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn resources(page: &mut Page, reports: &[ResourceReport]) {
    page.family("lockstep_resource_role", "gauge", "1 for the present role.");
    for r in reports {
        page.sample(&[("resource", &r.name), ("role", r.role.text())], 1);
    }
    type Value = fn(&ResourceReport) -> u64;
    let gauges: [(&str, &str, Value); 4] = [
        (
            "lockstep_resource_suspended",
            "1 while I/O is suspended.",
            |r| u64::from(!r.suspended.is_empty()),
        ),
        (
            "lockstep_resource_may_promote",
            "1 if a promotion has a chance.",
            |r| u64::from(r.may_promote),
        ),
        (
            "lockstep_resource_promotion_score",
            "How good this node is for a promotion.",
            |r| u64::from(r.promotion_score),
        ),
        (
            "lockstep_resource_force_io_failures",
            "1 while I/O fails until all users have closed.",
            |r| u64::from(r.force_io_failures),
        ),
    ];
    for (name, help, value) in gauges {
        page.family(name, "gauge", help);
        for r in reports {
            page.sample(&[("resource", &r.name)], value(r));
        }
    }
}

fn devices(page: &mut Page, reports: &[ResourceReport]) {
    use crate::report::DeviceReport;
    page.family(
        "lockstep_device_state",
        "gauge",
        "1 for the present state of the disk.",
    );
    for r in reports {
        for d in &r.devices {
            let volume = d.volume.to_string();
            let state = d.disk_state.text();
            page.sample(
                &[("resource", &r.name), ("volume", &volume), ("state", state)],
                1,
            );
        }
    }
    type Value = fn(&DeviceReport) -> u64;
    let all: [(&str, &str, &str, Value); 10] = [
        ("lockstep_device_quorum", "gauge", "1 with quorum.", |d| {
            u64::from(d.quorum)
        }),
        ("lockstep_device_open", "gauge", "1 while in use.", |d| {
            u64::from(d.open)
        }),
        (
            "lockstep_device_client",
            "gauge",
            "1 if meant to be diskless.",
            |d| u64::from(d.client),
        ),
        ("lockstep_device_size_bytes", "gauge", "Usable size.", |d| {
            d.size_sectors * 512
        }),
        (
            "lockstep_device_read_bytes_total",
            "counter",
            "Bytes read from the local disk.",
            |d| d.read_sectors * 512,
        ),
        (
            "lockstep_device_written_bytes_total",
            "counter",
            "Bytes written to the local disk.",
            |d| d.written_sectors * 512,
        ),
        (
            "lockstep_device_al_writes_total",
            "counter",
            "Transactions of the activity log.",
            |d| d.al_writes,
        ),
        (
            "lockstep_device_bm_writes_total",
            "counter",
            "Writes of the bitmap.",
            |d| d.bm_writes,
        ),
        (
            "lockstep_device_upper_pending",
            "gauge",
            "Requests of users in flight.",
            |d| d.upper_pending,
        ),
        (
            "lockstep_device_lower_pending",
            "gauge",
            "Requests to the disk in flight.",
            |d| d.lower_pending,
        ),
    ];
    for (name, kind, help, value) in all {
        page.family(name, kind, help);
        for r in reports {
            for d in &r.devices {
                let volume = d.volume.to_string();
                page.sample(&[("resource", &r.name), ("volume", &volume)], value(d));
            }
        }
    }
}

fn peers(page: &mut Page, reports: &[ResourceReport]) {
    use crate::report::PeerDeviceReport;
    page.family(
        "lockstep_connection_state",
        "gauge",
        "1 for the present state of the connection.",
    );
    for r in reports {
        for c in &r.connections {
            let state = c.state.text();
            page.sample(
                &[("resource", &r.name), ("peer", &c.name), ("state", state)],
                1,
            );
        }
    }
    page.family(
        "lockstep_connection_congested",
        "gauge",
        "1 while the send queue is congested.",
    );
    for r in reports {
        for c in &r.connections {
            let labels = [("resource", r.name.as_str()), ("peer", c.name.as_str())];
            page.sample(&labels, u64::from(c.congested));
        }
    }
    page.family(
        "lockstep_connection_in_flight_bytes",
        "gauge",
        "Bytes on their way to the peer: of users, of a resync.",
    );
    for r in reports {
        for c in &r.connections {
            for (what, sectors) in [
                ("application", c.ap_in_flight_sectors),
                ("resync", c.rs_in_flight_sectors),
            ] {
                page.sample(
                    &[("resource", &r.name), ("peer", &c.name), ("what", what)],
                    sectors * 512,
                );
            }
        }
    }
    type Value = fn(&PeerDeviceReport) -> u64;
    let all: [(&str, &str, &str, Value); 6] = [
        (
            "lockstep_peer_device_out_of_sync_bytes",
            "gauge",
            "Bytes that differ or may differ.",
            |p| p.out_of_sync_sectors * 512,
        ),
        (
            "lockstep_peer_device_sent_bytes_total",
            "counter",
            "Bytes sent to the peer.",
            |p| p.sent_sectors * 512,
        ),
        (
            "lockstep_peer_device_received_bytes_total",
            "counter",
            "Bytes received from the peer.",
            |p| p.received_sectors * 512,
        ),
        (
            "lockstep_peer_device_pending",
            "gauge",
            "Requests sent to the peer without an answer.",
            |p| p.pending,
        ),
        (
            "lockstep_peer_device_unacked",
            "gauge",
            "Requests of the peer not answered yet.",
            |p| p.unacked,
        ),
        (
            "lockstep_peer_device_resync_rate_bytes",
            "gauge",
            "Speed of a resync or verify in bytes per second, 0 without.",
            |p| {
                p.resync
                    .as_ref()
                    .map_or(0, |r| u64::from(r.rate_kib_s) * 1024)
            },
        ),
    ];
    for (name, kind, help, value) in all {
        page.family(name, kind, help);
        each_peer_device(reports, |r, peer, p| {
            let volume = p.volume.to_string();
            page.sample(
                &[("resource", r), ("peer", peer), ("volume", &volume)],
                value(p),
            );
        });
    }
    page.family(
        "lockstep_peer_device_state",
        "gauge",
        "1 for the present states of replication and of the peer's disk.",
    );
    each_peer_device(reports, |r, peer, p| {
        let volume = p.volume.to_string();
        page.sample(
            &[
                ("resource", r),
                ("peer", peer),
                ("volume", &volume),
                ("replication", p.repl_state.text()),
                ("disk", p.disk_state.text()),
            ],
            1,
        );
    });
}

fn each_peer_device(
    reports: &[ResourceReport],
    mut each: impl FnMut(&str, &str, &crate::report::PeerDeviceReport),
) {
    for r in reports {
        for c in &r.connections {
            for p in &c.peer_devices {
                each(&r.name, &c.name, p);
            }
        }
    }
}

fn requests(page: &mut Page, counts: &[VolumeCounts]) {
    type Value = fn(&Counted) -> u64;
    let all: [(&str, &str, Value); 2] = [
        (
            "lockstep_request_errors_total",
            "Requests of users that failed.",
            |c| c.failed,
        ),
        (
            "lockstep_request_bytes_total",
            "Bytes that users asked for.",
            |c| c.bytes,
        ),
    ];
    for (name, help, value) in all {
        page.family(name, "counter", help);
        for v in counts {
            let volume = v.volume.to_string();
            for (kind, counted) in KINDS.iter().zip(&v.kinds) {
                let labels = [
                    ("resource", v.resource.as_str()),
                    ("volume", &volume),
                    ("kind", kind),
                ];
                page.sample(&labels, value(counted));
            }
        }
    }
    let name = "lockstep_request_duration_seconds";
    page.family(name, "histogram", "Time of users' requests.");
    for v in counts {
        let volume = v.volume.to_string();
        for (kind, counted) in KINDS.iter().zip(&v.kinds) {
            let base = [
                ("resource", v.resource.as_str()),
                ("volume", &volume),
                ("kind", kind),
            ];
            histogram(page, name, &base, counted);
        }
    }
}

fn acknowledgements(page: &mut Page, acks: &[AckCounts]) {
    let name = "lockstep_peer_ack_duration_seconds";
    page.family(
        name,
        "histogram",
        "Time from a write's begin to the peer's acknowledgement.",
    );
    for a in acks {
        let volume = a.volume.to_string();
        let base = [
            ("resource", a.resource.as_str()),
            ("peer", a.peer.as_str()),
            ("volume", &volume),
        ];
        histogram(page, name, &base, &a.counted);
    }
}

fn histogram(page: &mut Page, name: &str, base: &[(&str, &str)], counted: &Counted) {
    let mut below = 0;
    for (index, count) in counted.buckets.iter().enumerate() {
        below += count;
        let bound = BOUNDS_US
            .get(index)
            .map_or("+Inf".to_owned(), |us| (*us as f64 / 1e6).to_string());
        let mut labels = base.to_vec();
        labels.push(("le", &bound));
        page.named(&format!("{name}_bucket"), &labels, below);
    }
    page.named(&format!("{name}_sum"), base, counted.sum_us as f64 / 1e6);
    page.named(&format!("{name}_count"), base, below);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_belongs_to_its_family_and_histograms_add_up() {
        let counted = Counted {
            done: 3,
            failed: 1,
            bytes: 4096,
            sum_us: 1_500_000,
            buckets: (0..=BOUNDS_US.len() as u64).map(|n| n % 2).collect(),
        };
        let counts = [VolumeCounts {
            resource: "we\"b".into(),
            volume: 0,
            kinds: vec![counted; KINDS.len()],
        }];
        let acks = [AckCounts {
            resource: "web".into(),
            volume: 0,
            peer: "bravo".into(),
            counted: Counted::of_acks(&lockstep_core::report::AckTimes {
                sum_us: 500_000,
                buckets: [1; BOUNDS_US.len() + 1],
            }),
        }];
        let page = page(&[], &counts, &acks);
        assert!(page.contains(
            "lockstep_peer_ack_duration_seconds_bucket\
             {resource=\"web\",peer=\"bravo\",volume=\"0\",le=\"0.0001\"} 3\n"
        ));
        let mut family = String::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap().to_owned();
            } else if !line.starts_with('#') {
                assert!(line.starts_with(&family), "{line} in {family}");
                let value = line.rsplit(' ').next().unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
            }
        }
        assert!(page.contains(
            "lockstep_request_errors_total{resource=\"we\\\"b\",volume=\"0\",kind=\"read\"} 1\n"
        ));
        assert!(
            page.contains("kind=\"write\",le=\"0.00005\"} 1\n"),
            "{page}"
        );
        assert!(page.contains("kind=\"write\",le=\"+Inf\"} 9\n"));
        assert!(page.contains(
            "duration_seconds_sum{resource=\"we\\\"b\",volume=\"0\",kind=\"flush\"} 1.5\n"
        ));
    }
}
