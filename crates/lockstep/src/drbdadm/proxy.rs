//! Calls of `drbd-proxy-ctl`.

use lockstep_format::conf::model::{Proxy, Resource};
use lockstep_format::conf::options::{self, Set};
use lockstep_format::conf::parse::parse_show;
use lockstep_format::conf::resolve::{ConnectionView, PathView, same_host};

use super::calls::{Call, Program};

/// Name of a connection at the proxy.
pub(super) fn connection_name(resource: &Resource, view: &ConnectionView<'_>) -> String {
    let first = |names: &[String]| names.first().cloned().unwrap_or_default();
    let own = resource
        .my_host()
        .map(|host| first(&host.names))
        .unwrap_or_default();
    format!("{}-{}-{own}", resource.name, first(&view.peer.names))
}

/// The path of a connection whose own proxy runs on this node.
pub(super) fn own_path<'a>(view: &'a ConnectionView<'a>, node: &str) -> Option<&'a PathView<'a>> {
    view.paths.iter().find(|path| {
        let own = path.own_proxy.into_iter().flat_map(|proxy| &proxy.hosts);
        path.peer_proxy.is_some() && own.into_iter().any(|host| same_host(host, node))
    })
}

/// `add connection`, then the settings.
pub(super) fn up(resource: &Resource, view: &ConnectionView<'_>, path: &PathView<'_>) -> Vec<Call> {
    let (Some(own), Some(peer)) = (path.own_proxy, path.peer_proxy) else {
        return Vec::new();
    };
    let name = connection_name(resource, view);
    let plain = |address: &Option<lockstep_format::conf::model::Address>| {
        address
            .as_ref()
            .map(|address| address.plain())
            .unwrap_or_default()
    };
    let mut add = format!(
        "add connection {name} {} {} {} {}",
        plain(&own.inside),
        plain(&peer.outside),
        plain(&own.outside),
        path.own.plain()
    );
    for setting in &own.settings.0 {
        add.push_str(&format!(" --{}={}", setting.name, setting.value));
    }
    let mut calls = vec![control(vec![add])];
    let settings = settings(&name, own);
    if !settings.is_empty() {
        calls.push(control(settings));
    }
    calls
}

/// `del connection`.
pub(super) fn down(resource: &Resource, view: &ConnectionView<'_>) -> Call {
    control(vec![format!(
        "del connection {}",
        connection_name(resource, view)
    )])
}

fn settings(name: &str, proxy: &Proxy) -> Vec<String> {
    let each = proxy.settings.0.iter();
    let mut commands: Vec<String> = each
        .map(|setting| format!("set {} {name} {}", setting.name, setting.value))
        .collect();
    if !proxy.plugins.is_empty() {
        for (index, plugin) in proxy.plugins.iter().enumerate() {
            commands.push(format!("set plugin {name} {index} {plugin}"));
        }
        commands.push(format!("set plugin {name} {} END", proxy.plugins.len()));
    }
    commands
}

fn control(commands: Vec<String>) -> Call {
    let words = commands
        .into_iter()
        .flat_map(|command| ["-c".to_owned(), command])
        .collect();
    Call {
        program: Program::ProxyCtl,
        words,
    }
}

/// Asks for the settings of a connection.
pub(super) fn query(resource: &Resource, view: &ConnectionView<'_>) -> Call {
    control(vec![format!(
        "show proxy-settings {}",
        connection_name(resource, view)
    )])
}

/// Whether the answer to [`query`] is what the configuration says.
pub(super) fn is_as_configured(answer: &str, path: &PathView<'_>) -> bool {
    let Some(own) = path.own_proxy else {
        return true;
    };
    // The answer is a `proxy` section of a configuration.
    let parsed = parse_show(&format!("resource \"proxy\" {{ {answer} }}"));
    let Some(resource) = parsed
        .config
        .resources
        .first()
        .filter(|_| parsed.is_valid())
    else {
        return false;
    };
    let running = &resource.sections;
    if answer.trim().is_empty() || running.plugins != own.plugins {
        return false;
    }
    let limit = |text: Option<&str>| {
        let spec = options::find(Set::Proxy, "memlimit")?;
        spec.parse(text.unwrap_or("0")).ok()?.number()
    };
    let wanted = limit(own.settings.get("memlimit")).unwrap_or(0);
    let running = limit(running.proxy.get("memlimit")).unwrap_or(0);
    // The proxy rounds the limit; a difference of up to 2 % is none.
    (wanted - running).abs() * 50 <= wanted
}
