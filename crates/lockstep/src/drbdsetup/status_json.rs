//! `drbdsetup status --json` (config-and-cli.md, 11): fixed key order and layout.

use lockstep_core::state::ReplState;
use lockstep_daemon::names::Named;
use lockstep_daemon::report::{
    ConnectionReport, DeviceReport, PathReport, PeerDeviceReport, ResourceReport, SinceMark,
};

use super::status::{done_percent, eta_seconds, list_or_no, mib_s, raw_progress};

/// All resources as a JSON array.
pub(super) fn text(resources: &[ResourceReport]) -> String {
    if resources.is_empty() {
        return "[\n]\n".to_owned();
    }
    let all: Vec<String> = resources.iter().map(resource).collect();
    format!("[\n{}\n]\n\n", all.join(",\n"))
}

/// A JSON string.
pub(super) fn string(text: &str) -> String {
    serde_json::to_string(text).expect("a string is always JSON")
}

fn resource(r: &ResourceReport) -> String {
    let suspended = |reason: &str| r.suspended.iter().any(|s| s == reason);
    let mut out = format!(
        "{{\n  \"name\": {},\n  \"node-id\": {},\n  \"role\": \"{}\",\n  \"suspended\": {},\n",
        string(&r.name),
        r.node_id,
        r.role.text(),
        !r.suspended.is_empty()
    );
    for reason in ["user", "no-data", "fencing", "quorum"] {
        out.push_str(&format!(
            "  \"suspended-{reason}\": {},\n",
            suspended(reason)
        ));
    }
    out.push_str(&format!(
        "  \"force-io-failures\": {},\n  \"write-ordering\": \"{}\",\n",
        r.force_io_failures, r.write_ordering
    ));
    let devices: Vec<String> = r.devices.iter().map(device).collect();
    out.push_str(&format!("  \"devices\": {},\n", array("    ", &devices)));
    let mut connections: Vec<&ConnectionReport> = r.connections.iter().collect();
    connections.sort_by(|a, b| a.name.cmp(&b.name));
    let connections: Vec<String> = connections
        .iter()
        .map(|c| connection(c, &r.devices))
        .collect();
    out.push_str(&format!(
        "  \"connections\": {}\n}}",
        array("    ", &connections)
    ));
    out
}

/// Elements are indented by `indent`; the closing bracket follows the last one.
fn array(indent: &str, elements: &[String]) -> String {
    if elements.is_empty() {
        return "[]".to_owned();
    }
    let separator = format!(",\n{indent}");
    format!("[\n{indent}{} ]", elements.join(&separator))
}

fn object(indent: &str, members: &[(&str, String)]) -> String {
    let lines: Vec<String> = members
        .iter()
        .map(|(key, value)| match *key {
            // The original has a blank behind this comma, and consumers have seen it for years.
            "connection-state" => format!("{indent}  \"{key}\": {value}, "),
            _ => format!("{indent}  \"{key}\": {value},"),
        })
        .collect();
    let mut body = lines.join("\n");
    let end = body.trim_end_matches([',', ' ']).len();
    body.truncate(end);
    format!("{{\n{body}\n{indent}}}")
}

fn device(d: &DeviceReport) -> String {
    object(
        "    ",
        &[
            ("volume", d.volume.to_string()),
            ("minor", d.minor.to_string()),
            ("disk-state", string(d.disk_state.text())),
            ("client", d.client.to_string()),
            ("open", d.open.to_string()),
            ("quorum", d.quorum.to_string()),
            ("size", (d.size_sectors / 2).to_string()),
            ("read", (d.read_sectors / 2).to_string()),
            ("written", (d.written_sectors / 2).to_string()),
            ("al-writes", d.al_writes.to_string()),
            ("bm-writes", d.bm_writes.to_string()),
            ("upper-pending", d.upper_pending.to_string()),
            ("lower-pending", d.lower_pending.to_string()),
        ],
    )
}

fn connection(c: &ConnectionReport, devices: &[DeviceReport]) -> String {
    let paths: Vec<String> = c.paths.iter().map(path).collect();
    let peer_devices: Vec<String> = c
        .peer_devices
        .iter()
        .map(|p| {
            let device = devices.iter().find(|d| d.volume == p.volume);
            peer_device(p, device.map_or(0, |d| d.size_sectors))
        })
        .collect();
    object(
        "    ",
        &[
            ("peer-node-id", c.peer_node_id.to_string()),
            ("name", string(&c.name)),
            ("connection-state", string(c.state.text())),
            ("congested", c.congested.to_string()),
            ("peer-role", string(c.role.text())),
            ("tls", c.tls.to_string()),
            ("ap-in-flight", c.ap_in_flight_sectors.to_string()),
            ("rs-in-flight", c.rs_in_flight_sectors.to_string()),
            ("paths", array("        ", &paths)),
            ("peer_devices", array("        ", &peer_devices)),
        ],
    )
}

fn path(p: &PathReport) -> String {
    object(
        "        ",
        &[
            ("this_host", address("          ", &p.local)),
            ("remote_host", address("          ", &p.remote)),
            ("established", p.established.to_string()),
        ],
    )
}

/// The parts of `FAMILY:ADDRESS:PORT`; IPv6 addresses are in brackets.
pub(super) fn address_parts(text: &str) -> Option<(&str, &str, &str)> {
    let (family, rest) = text.split_once(':')?;
    let (address, port) = rest.rsplit_once(':')?;
    Some((
        family,
        address.trim_start_matches('[').trim_end_matches(']'),
        port,
    ))
}

pub(super) fn address(indent: &str, text: &str) -> String {
    match address_parts(text) {
        Some((family, address, port)) => object(
            indent,
            &[
                ("address", string(address)),
                ("port", port.to_owned()),
                ("family", string(family)),
            ],
        ),
        None => object(indent, &[("family", string(text))]),
    }
}

fn peer_device(p: &PeerDeviceReport, size_sectors: u64) -> String {
    let verify = matches!(p.repl_state, ReplState::VerifyS | ReplState::VerifyT);
    let in_sync = match size_sectors {
        0 => 0.0,
        size => 100.0 * (1.0 - p.out_of_sync_sectors as f64 / size as f64),
    };
    let mut members = vec![
        ("volume", p.volume.to_string()),
        ("replication-state", string(p.repl_state.text())),
        ("peer-disk-state", string(p.disk_state.text())),
        ("peer-client", p.client.to_string()),
        ("resync-suspended", string(&list_or_no(&p.resync_suspended))),
        ("received", (p.received_sectors / 2).to_string()),
        ("sent", (p.sent_sectors / 2).to_string()),
        ("out-of-sync", (p.out_of_sync_sectors / 2).to_string()),
        ("pending", p.pending.to_string()),
        ("unacked", p.unacked.to_string()),
        ("has-sync-details", p.resync.is_some().to_string()),
        (
            "has-online-verify-details",
            (verify && p.resync.is_some()).to_string(),
        ),
        ("percent-in-sync", format!("{in_sync:.2}")),
    ];
    if let Some(r) = &p.resync {
        let done = r.total_sectors.saturating_sub(r.left_sectors);
        let active_ms = r.elapsed_ms.saturating_sub(r.paused_ms);
        let raw = raw_progress(p.repl_state, r).into_iter();
        // The speeds have other names here.
        members.extend(raw.take_while(|(key, _)| key.starts_with("rs-") || key.starts_with("ov-")));
        let speed = |since: SinceMark| format!("{:.2}", mib_s(since.sectors, since.ms));
        let eta = eta_seconds(r).unwrap_or(NO_PROGRESS_SECONDS);
        members.extend([
            ("want", format!("{:.2}", f64::from(r.wanted_kib_s) / 1024.0)),
            ("db0/dt0 [MiB/s]", speed(r.newest)),
            ("db1/dt1 [MiB/s]", speed(r.oldest)),
            ("estimated-seconds-to-finish", eta.to_string()),
            ("db/dt [MiB/s]", format!("{:.2}", mib_s(done, active_ms))),
            ("percent-resync-done", format!("{:.2}", done_percent(r))),
        ]);
    }
    object("        ", &members)
}

/// The number that means "no progress".
const NO_PROGRESS_SECONDS: u64 = 987_654_321;

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn layout_and_key_order_are_the_specification_s() {
        let text = text(&[sample::web()]);
        assert!(text.starts_with(
            "[\n{\n  \"name\": \"web\",\n  \"node-id\": 0,\n  \"role\": \"Primary\",\n  \
             \"suspended\": false,\n  \"suspended-user\": false,\n  \
             \"suspended-no-data\": false,\n  \"suspended-fencing\": false,\n  \
             \"suspended-quorum\": false,\n  \"force-io-failures\": false,\n  \
             \"write-ordering\": \"flush\",\n  \"devices\": [\n    {\n      \"volume\": 0,\n"
        ));
        assert!(text.contains("      \"lower-pending\": 2\n    } ],\n  \"connections\": [\n"));
        assert!(text.contains(
            "      \"connection-state\": \"Connected\", \n      \"congested\": false,\n"
        ));
        assert!(text.contains(
            "      \"paths\": [\n        {\n          \"this_host\": {\n            \
             \"address\": \"10.1.0.1\",\n            \"port\": 7790,\n            \
             \"family\": \"ipv4\"\n          },\n"
        ));
        assert!(text.contains("          \"established\": true\n        } ],\n"));
        assert!(text.contains("          \"percent-in-sync\": 57.08,\n"));
        assert!(text.ends_with("        } ]\n    } ]\n}\n]\n\n"), "{text}");
    }

    #[test]
    fn it_is_json() {
        let value: serde_json::Value = serde_json::from_str(&text(&[sample::web()])).unwrap();
        assert_eq!(value[0]["connections"][0]["peer_devices"][0]["want"], 50.0);
        assert_eq!(
            value[0]["connections"][1]["peer_devices"][0]["has-sync-details"],
            false
        );
        assert_eq!(text(&[]), "[\n]\n");
    }
}
