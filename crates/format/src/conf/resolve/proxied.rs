//! What a WAN proxy can carry (proxy.md, B17).

use alloc::format;
use alloc::vec::Vec;

use super::super::model::{Config, Connection};
use super::super::parse::Diagnostic;
use super::{Report, end_proxy};

/// Refuses connections through a proxy that are not of the tcp transport. After the options were
/// inherited.
pub fn check_proxied(config: &Config) -> Vec<Diagnostic> {
    let mut report = Report::default();
    for resource in &config.resources {
        for connection in &resource.connections {
            let mut ends = connection.paths.iter().flat_map(|path| &path.ends);
            let proxied = ends.any(|end| end_proxy(resource, end).is_some());
            let Some(option) = other_transport(connection).filter(|_| proxied) else {
                continue;
            };
            let text = format!(
                "in resource {}: a connection through a proxy needs transport tcp, which \
                 '{option}' is not.",
                resource.name
            );
            report.error(config, connection.pos, &text);
        }
    }
    report.0
}

/// The option that makes the connection one of another transport.
fn other_transport(connection: &Connection) -> Option<&'static str> {
    let net = &connection.net;
    match (net.get("transport"), net.get("load-balance-paths")) {
        (_, Some("yes")) => Some("load-balance-paths yes"),
        (Some("rdma"), _) => Some("transport rdma"),
        // Without load balancing its streams are those of tcp.
        (None | Some("" | "tcp" | "lb-tcp"), _) => None,
        (Some(_), _) => Some("transport"),
    }
}
