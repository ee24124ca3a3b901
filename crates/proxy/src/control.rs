//! The control commands: the words that drbdadm sends, those an operator types, and what they print.
//! A command that fails changes nothing.

use std::net::IpAddr;

use crate::core::config::{LinkConfig, LinkOptions, parse_addr};
use crate::core::limits::Origin;
use crate::core::plugin::{AVAILABLE, CHAIN_MAX, Plugin};
use crate::core::stats::{CarrierSnapshot, LinkSnapshot, Snapshot};
use crate::net::Reactor;

const HELP: &str = "\
add connection NAME INSIDE PEER_OUTSIDE MY_OUTSIDE LOCAL_DRBD [--OPTION=VALUE ...]
del connection NAME
set memlimit NAME VALUE            raise or lower, while it runs
set OPTION NAME VALUE              bwlimit, schedule, burst, carriers, max-lag, session-hold,
                                   ping-hold, wan-timeout, ping-timeout, weight, dial,
                                   dscp-control, dscp-bulk, sndbuf-size, rcvbuf-size
set session PEER-IP OPTION VALUE   bwlimit, schedule, burst of all connections with that peer
set daemon OPTION VALUE            bwlimit, schedule, burst of all connections; memory-max,
                                   memlimit-min
set loglevel LEVEL                 off, error, warn, info, debug, trace
set plugin NAME INDEX PLUGIN [KEY VALUE ...]
set plugin NAME INDEX END
show                               connections and limits as commands
show proxy-settings NAME
show memusage
show connections | hconnections
show subconnections | hsubconnections
show carriers | hcarriers          what TCP says of each connection to the peer proxy
show avail-plugins
print statistics
print metrics                      Prometheus text
reload                             read secret, keys or certificates again
shutdown
";

/// Runs one command.
pub(crate) fn execute(reactor: &mut Reactor, command: &str, json: bool) -> Result<String, String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    tracing::debug!(command, "asked");
    match words.as_slice() {
        [
            "add",
            "connection",
            name,
            inside,
            peer,
            mine,
            drbd,
            options @ ..,
        ] => add(reactor, name, [inside, peer, mine, drbd], options),
        ["add", "connection", ..] => {
            Err("add connection needs NAME INSIDE PEER_OUTSIDE MY_OUTSIDE LOCAL_DRBD".into())
        }
        ["del" | "delete", "connection", name] => reactor.remove_link(name).map(|()| String::new()),
        ["set", "plugin", name, index, plugin @ ..] => {
            set_plugin(reactor, name, index, plugin).map(|warnings| warnings.join(""))
        }
        ["set", "loglevel", level] => crate::live::set_log_level(reactor, level),
        ["reload"] => crate::live::reload(reactor),
        ["set", "loglevel", ..] => Err("set loglevel needs one LEVEL, such as info".into()),
        ["set", "daemon", option, value] => {
            let now = reactor.now();
            let done = reactor.engine.set_daemon_limit(now, option, value);
            reactor.retune_all();
            done.map(|()| String::new()).map_err(|e| e.to_string())
        }
        ["set", "session", peer, option, value] => {
            set_session(reactor, peer, option, value, Origin::Command).map(|()| String::new())
        }
        ["set", option, name, value] => {
            let mut options = options_of(reactor, name)?;
            let remark = options
                .set(option, value)
                .map_err(|error| error.to_string())?;
            apply(reactor, name, options)?;
            Ok(remark
                .map(|text| format!("note: {text}\n"))
                .unwrap_or_default())
        }
        ["show" | "list"] => Ok(show(reactor)),
        ["show" | "list", "proxy-settings", name] => {
            let config = reactor
                .engine
                .find(name)
                .and_then(|id| reactor.engine.config(id))
                .ok_or_else(|| format!("no connection '{name}'; see 'show'"))?;
            Ok(settings(config))
        }
        ["show" | "list" | "print", what] => {
            let snapshot = reactor.snapshot();
            report(what, &snapshot, json)
        }
        ["shutdown"] => {
            reactor.stop();
            Ok("the proxy stops\n".into())
        }
        ["help"] => Ok(HELP.into()),
        ["quit"] | [] => Ok(String::new()),
        _ => Err(format!("unknown command '{command}'; 'help' lists all")),
    }
}

fn add(
    reactor: &mut Reactor,
    name: &str,
    addrs: [&str; 4],
    words: &[&str],
) -> Result<String, String> {
    let text = |error: crate::core::config::ConfigError| error.to_string();
    let mut options = LinkOptions::default();
    let mut remarks = String::new();
    for word in words {
        let Some((option, value)) = word
            .strip_prefix("--")
            .and_then(|option| option.split_once('='))
        else {
            return Err(format!("'{word}' is not --OPTION=VALUE"));
        };
        match options.set(option, value) {
            Ok(None) => {}
            Ok(Some(remark)) => remarks.push_str(&format!("note: {remark}\n")),
            // A later drbdadm may know more options than this proxy.
            Err(crate::core::config::ConfigError::Option(option)) => {
                remarks.push_str(&format!(
                    "note: option {option} is unknown here and ignored\n"
                ));
            }
            Err(error) => return Err(text(error)),
        }
    }
    let config = LinkConfig {
        name: name.into(),
        inside: parse_addr("inside address", addrs[0]).map_err(text)?,
        peer_outside: parse_addr("peer's outside address", addrs[1]).map_err(text)?,
        my_outside: parse_addr("own outside address", addrs[2]).map_err(text)?,
        local_drbd: parse_addr("local DRBD address", addrs[3]).map_err(text)?,
        options,
    };
    reactor.add_link(config)?;
    Ok(remarks)
}

fn set_plugin(
    reactor: &mut Reactor,
    name: &str,
    index: &str,
    words: &[&str],
) -> Result<Vec<String>, String> {
    let mut options = options_of(reactor, name)?;
    let index: usize = index
        .parse()
        .map_err(|_| format!("plugin index '{index}' is not a number"))?;
    if index > options.plugins.len() {
        return Err(format!(
            "plugin index {index} leaves a gap: {} plugins are set",
            options.plugins.len()
        ));
    }
    let mut remarks = Vec::new();
    if words.len() == 1 && words[0].eq_ignore_ascii_case("end") {
        options.plugins.truncate(index);
    } else {
        let plugin = Plugin::parse(words).map_err(|error| error.to_string())?;
        remarks.extend(
            plugin
                .warnings
                .iter()
                .map(|warning| format!("note: {warning}\n")),
        );
        if index < options.plugins.len() {
            options.plugins[index] = plugin;
        } else if index < CHAIN_MAX {
            options.plugins.push(plugin);
        } else {
            return Err(format!("at most {CHAIN_MAX} plugins can be set"));
        }
    }
    if options.plugins.len() > 1 {
        let last = options
            .plugins
            .last()
            .map(|plugin| plugin.text.clone())
            .unwrap_or_default();
        remarks.push(format!(
            "note: of several plugins only the last one is used: {last}\n"
        ));
    }
    apply(reactor, name, options)?;
    Ok(remarks)
}

fn options_of(reactor: &Reactor, name: &str) -> Result<LinkOptions, String> {
    reactor
        .engine
        .find(name)
        .and_then(|id| reactor.engine.config(id))
        .map(|config| config.options.clone())
        .ok_or_else(|| format!("no connection '{name}'; see 'show'"))
}

fn apply(reactor: &mut Reactor, name: &str, options: LinkOptions) -> Result<(), String> {
    let now = reactor.now();
    reactor
        .engine
        .set_options(now, name, options)
        .map_err(|error| error.to_string())?;
    reactor.retune_all();
    Ok(())
}

/// Limits all connections with the peer proxy of one outside IP.
pub(crate) fn set_session(
    reactor: &mut Reactor,
    peer: &str,
    option: &str,
    value: &str,
    origin: Origin,
) -> Result<(), String> {
    let peer: IpAddr = peer
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse()
        .map_err(|_| format!("session '{peer}' is not the outside IP of a peer proxy"))?;
    let now = reactor.now();
    reactor
        .engine
        .set_session_limit(now, peer, option, value, origin)
        .map_err(|error| error.to_string())?;
    reactor.retune_all();
    Ok(())
}

/// Lines that would set and create everything again.
fn show(reactor: &Reactor) -> String {
    let mut out = String::new();
    for command in reactor.live.words(&reactor.engine.options) {
        out.push_str(&format!("{command}\n"));
    }
    for (option, value) in reactor.engine.options.limit.words() {
        out.push_str(&format!("set daemon {option} {value}\n"));
    }
    for (peer, session) in &reactor.engine.sessions {
        for (option, value) in session.limit.words() {
            out.push_str(&format!("set session {peer} {option} {value}\n"));
        }
    }
    for config in reactor.engine.configs() {
        // The last colon splits, so IPv6 needs no brackets, as drbdadm prints it.
        let plain = |addr: std::net::SocketAddr| format!("{}:{}", addr.ip(), addr.port());
        out.push_str(&format!(
            "add connection {} {} {} {} {}",
            config.name,
            plain(config.inside),
            plain(config.peer_outside),
            plain(config.my_outside),
            plain(config.local_drbd),
        ));
        for (option, value) in config.options.words() {
            out.push_str(&format!(" --{option}={value}"));
        }
        out.push('\n');
        for (index, plugin) in config.options.plugins.iter().enumerate() {
            out.push_str(&format!(
                "set plugin {} {index} {}\n",
                config.name, plugin.text
            ));
        }
    }
    out
}

/// In the grammar of drbd.conf; drbdadm compares it with its own.
fn settings(config: &LinkConfig) -> String {
    let mut out = format!("proxy {{\n\tmemlimit {};\n", config.options.memlimit_bytes);
    if !config.options.plugins.is_empty() {
        out.push_str("\tplugin {\n");
        for plugin in &config.options.plugins {
            out.push_str(&format!("\t\t{};\n", plugin.text));
        }
        out.push_str("\t}\n");
    }
    out.push_str("}\n");
    out
}

fn report(what: &str, snapshot: &Snapshot, json: bool) -> Result<String, String> {
    let known = matches!(
        what,
        "memusage"
            | "connections"
            | "hconnections"
            | "subconnections"
            | "hsubconnections"
            | "carriers"
            | "hcarriers"
            | "statistics"
            | "details"
    );
    if json && known {
        return serde_json::to_string_pretty(snapshot)
            .map(|text| text + "\n")
            .map_err(|error| error.to_string());
    }
    let human = what.starts_with('h');
    let bytes = |count: u64| {
        if human {
            human_bytes(count)
        } else {
            count.to_string()
        }
    };
    let mut out = String::new();
    match what {
        "avail-plugins" => out.push_str(AVAILABLE),
        "metrics" => out = crate::metrics::prometheus(snapshot),
        "statistics" | "details" => out = crate::metrics::key_values(snapshot),
        "memusage" => {
            for link in &snapshot.connections {
                out.push_str(&format!(
                    "{}\t{} of {}\n",
                    link.name,
                    human_bytes(link.buffered_memory_bytes),
                    human_bytes(link.memlimit_bytes)
                ));
            }
            out.push_str(&format!(
                "all\t{} of {}\n",
                human_bytes(snapshot.memory_used_bytes),
                human_bytes(snapshot.memory_max_bytes)
            ));
        }
        "connections" | "hconnections" => {
            out.push_str(
                "name\tstate\tcodec\tbuffered\tmemory\tspilled\tlag_ms\tdrain_ms\tratio\t\
                 blocked\terror\n",
            );
            for link in &snapshot.connections {
                out.push_str(&connection_line(link, &bytes));
            }
        }
        "subconnections" | "hsubconnections" => {
            out.push_str("name\tclass\tphase\tid\tsent\tdelivered\treceived\twindow\n");
            for link in &snapshot.connections {
                for stream in &link.streams {
                    out.push_str(&format!(
                        "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\n",
                        link.name,
                        stream.class,
                        stream.phase,
                        stream.id,
                        bytes(stream.sent_bytes),
                        bytes(stream.delivered_bytes),
                        bytes(stream.received_bytes),
                        bytes(stream.window_bytes)
                    ));
                }
            }
        }
        "carriers" | "hcarriers" => {
            out.push_str(
                "name\tclass\tnumber\tlocal\tpeer\tsent\treceived\trtt_us\trtt_deviation_us\t\
                 min_rtt_us\tcongestion\tcongestion_window\tunacknowledged_segments\t\
                 retransmitted_segments\tretransmitted\tdelivery_rate\n",
            );
            for link in &snapshot.connections {
                for carrier in &link.carriers {
                    out.push_str(&carrier_line(&link.name, carrier, &bytes));
                }
            }
        }
        other => return Err(format!("cannot show '{other}'; 'help' lists all")),
    }
    Ok(out)
}

fn carrier_line(name: &str, carrier: &CarrierSnapshot, bytes: &dyn Fn(u64) -> String) -> String {
    let tcp = &carrier.tcp;
    let fields = [
        name.to_string(),
        carrier.class.clone(),
        carrier.number.to_string(),
        carrier.local.clone(),
        carrier.peer.clone(),
        bytes(carrier.sent_bytes),
        bytes(carrier.received_bytes),
        tcp.rtt_us.to_string(),
        tcp.rtt_deviation_us.to_string(),
        tcp.min_rtt_us.to_string(),
        carrier.congestion.clone(),
        bytes(tcp.congestion_window_bytes),
        tcp.unacknowledged_segments.to_string(),
        tcp.retransmitted_segments.to_string(),
        bytes(tcp.retransmitted_bytes),
        bytes(tcp.delivery_rate),
    ];
    fields.join("\t") + "\n"
}

fn connection_line(link: &LinkSnapshot, bytes: &dyn Fn(u64) -> String) -> String {
    format!(
        "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{:.2}\t{}\t{}\n",
        link.name,
        link.state,
        link.codec,
        bytes(link.buffered_raw_bytes),
        bytes(link.buffered_memory_bytes),
        bytes(link.spilled_bytes),
        link.oldest_byte_age_ms,
        link.drain_ms.map_or("?".into(), |ms| ms.to_string()),
        link.ratio,
        if link.blocked_by.is_empty() {
            "-"
        } else {
            &link.blocked_by
        },
        if link.last_error.is_empty() {
            "-"
        } else {
            &link.last_error
        }
    )
}

/// A count of bytes for people.
pub(crate) fn human_bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}
