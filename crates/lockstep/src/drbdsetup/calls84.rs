//! The forms of DRBD 8.4 as the calls of today that they stand for (config-and-cli.md, 9 and 22).
//!
//! There a resource has one peer, which has no number: here the own node is 0 if it was not given,
//! and the peer the lowest other one. Where the peer does the same, the two speak the dialect of
//! 8.4, which has no numbers (`drbd8-api-compatibility`). Options that were given at the attach and
//! are a peer's today wait in a file of the node for the connect.

use std::path::PathBuf;

use lockstep_daemon::place::Place;
use lockstep_daemon::report::OptionTexts;
use lockstep_format::conf::options::{self, Set};

use super::args::{self, Parsed};
use super::{USAGE, lost, reports};

/// Runs it.
pub(super) fn run(place: &Place, parsed: Parsed) -> u8 {
    match parsed.verb.name {
        "new-resource" => {
            let mut words = vec![
                "new-resource".to_owned(),
                parsed.words[0].clone(),
                "0".into(),
            ];
            if !parsed.options.contains_key("drbd8-api-compatibility") {
                words.push("--drbd8-api-compatibility=yes".to_owned());
            }
            words.extend(texts(&parsed.options));
            super::run_to_code(&words)
        }
        "connect" => connect(place, parsed),
        "disconnect" => disconnect(place, parsed),
        "attach" => attach(place, parsed),
        _ => wait(place, &parsed),
    }
}

fn texts(options: &OptionTexts) -> impl Iterator<Item = String> {
    options
        .iter()
        .map(|(name, value)| format!("--{name}={value}"))
}

/// The peer of a resource of this node.
fn peer_of(own: u8) -> String {
    u8::from(own == 0).to_string()
}

/// Makes the calls one after the other up to the first that fails.
fn all(calls: &[Vec<String>]) -> u8 {
    for call in calls {
        let code = super::run_to_code(call);
        if code != 0 {
            return code;
        }
    }
    0
}

fn call(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn connect(place: &Place, mut parsed: Parsed) -> u8 {
    let [name, local, remote] = [0, 1, 2].map(|at| parsed.words[at].clone());
    let found = match reports(place, Some(&name)) {
        Ok(found) => found,
        Err(error) => return lost(&name, &error),
    };
    let Some(resource) = found.first() else {
        eprintln!("{name}: Unknown resource");
        return super::UNKNOWN_OBJECT;
    };
    let peer = peer_of(resource.node_id);
    let mut last = call(&["connect", &name, &peer]);
    for flag in ["discard-my-data", "tentative"] {
        if parsed.take_bool(flag) == Some(true) {
            last.push(format!("--{flag}"));
        }
    }
    parsed
        .options
        .entry("_name".to_owned())
        .or_insert_with(|| "remote".to_owned());
    let mut first = call(&["new-peer", &name, &peer]);
    let mut options = Vec::new();
    for device in &resource.devices {
        let stored = stored(place, device.minor);
        let (net, of_peer): (OptionTexts, OptionTexts) =
            stored.into_iter().partition(|(name, _)| name == "fencing");
        for (name, value) in net {
            parsed.options.entry(name).or_insert(value);
        }
        if !of_peer.is_empty() {
            let volume = device.volume.to_string();
            let mut words = call(&["peer-device-options", &name, &peer, &volume]);
            words.extend(texts(&of_peer));
            options.push(words);
        }
    }
    first.extend(texts(&parsed.options));
    let code = super::run_to_code(&first);
    if code != 0 {
        return code;
    }
    let mut calls = vec![call(&["new-path", &name, &peer, &local, &remote])];
    calls.extend(options);
    calls.push(last);
    let code = all(&calls);
    if code != 0 {
        super::run_to_code(&call(&["del-peer", &name, &peer]));
    }
    code
}

fn disconnect(place: &Place, mut parsed: Parsed) -> u8 {
    let [name, local, remote] = [0, 1, 2].map(|at| parsed.words[at].clone());
    let found = match reports(place, Some(&name)) {
        Ok(found) => found,
        Err(error) => return lost(&name, &error),
    };
    let (local, remote) = match (args::address(&local), args::address(&remote)) {
        (Ok(local), Ok(remote)) => (local, remote),
        (Err(text), _) | (_, Err(text)) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    let mut connections = found.iter().flat_map(|resource| &resource.connections);
    let connection = connections.find(|connection| {
        let mut paths = connection.paths.iter();
        paths.any(|path| path.local == local && path.remote == remote)
    });
    let Some(connection) = connection else {
        eprintln!("{name}: No such connection");
        return super::UNKNOWN_OBJECT;
    };
    let peer = connection.peer_node_id.to_string();
    let mut first = call(&["disconnect", &name, &peer]);
    if parsed.take_bool("force") == Some(true) {
        first.push("--force".to_owned());
    }
    all(&[first, call(&["del-peer", &name, &peer])])
}

/// Options of the peer, given at an attach.
fn file(place: &Place, minor: u32) -> PathBuf {
    place.dir().join("compat-84").join(minor.to_string())
}

fn stored(place: &Place, minor: u32) -> OptionTexts {
    let text = std::fs::read_to_string(file(place, minor)).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn attach(place: &Place, parsed: Parsed) -> u8 {
    let minor = match args::minor(&parsed.words[0]) {
        Ok(minor) => minor,
        Err(text) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    let mut words = vec!["attach".to_owned()];
    words.extend(parsed.words.iter().cloned());
    let mut later = OptionTexts::new();
    for (name, value) in &parsed.options {
        let of_disk = options::find(Set::Disk, name).is_some()
            || options::command("attach")
                .iter()
                .any(|spec| spec.name == *name);
        if of_disk {
            words.push(format!("--{name}={value}"));
        } else if name == "fencing" || options::find(Set::PeerDevice, name).is_some() {
            later.insert(name.clone(), value.clone());
        } else {
            eprintln!("attach: unrecognized option '--{name}'");
            return USAGE;
        }
    }
    let code = super::run_to_code(&words);
    if code != 0 {
        return code;
    }
    let text: String = later.iter().map(|(n, v)| format!("{n}={v}\n")).collect();
    let path = file(place, minor);
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    match made.and_then(|()| std::fs::write(&path, text)) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            USAGE
        }
    }
}

fn wait(place: &Place, parsed: &Parsed) -> u8 {
    let object = &parsed.words[0];
    let minor = match args::minor(object) {
        Ok(minor) => minor,
        Err(text) => {
            eprintln!("{text}");
            return USAGE;
        }
    };
    let found = match reports(place, None) {
        Ok(found) => found,
        Err(error) => return lost(object, &error),
    };
    let Some((resource, device)) = super::device(&found, minor) else {
        eprintln!("{object}: No such device");
        return super::UNKNOWN_OBJECT;
    };
    let volume = device.volume.to_string();
    let verb = format!("{}-volume", parsed.verb.name);
    let calls: Vec<Vec<String>> = resource
        .connections
        .iter()
        .map(|connection| {
            let peer = connection.peer_node_id.to_string();
            let mut words = call(&[&verb, &resource.name, &peer, &volume]);
            words.extend(texts(&parsed.options));
            words
        })
        .collect();
    all(&calls)
}
