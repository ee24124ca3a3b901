//! Runs handlers of the configuration as child processes (config-and-cli.md, 19).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use lockstep_core::leaving::CLOSE_UNUSED;
use lockstep_core::report::Snapshot;
use lockstep_core::state::DiskState;
use lockstep_format::units::VolumeNr;
use lockstep_io::shard::{HandlerCall, HandlerDone, HandlerExecutor};

use crate::board::Board;
use crate::names::Named;
use crate::place::Place;
use crate::protocol::Reply;
use crate::report::ResourceReport;

/// Every handler that `drbdadm` looks up in the configuration.
pub(crate) const NAMES: &[&str] = &[
    "pri-on-incon-degr",
    "pri-lost-after-sb",
    "pri-lost",
    "initial-split-brain",
    "split-brain",
    "fence-peer",
    "unfence-peer",
    "local-io-error",
    "before-resync-target",
    "after-resync-target",
    "before-resync-source",
    "out-of-sync",
    "quorum-lost",
    "disconnected",
];

/// Handlers that may run at the same time; more count as lost.
const MAX_RUNNING: usize = 64;
/// The same where a call that is lost would leave I/O frozen or end a connection.
const MAX_DECIDING: usize = 1024;
/// How long the removal of a resource waits at most for its handlers to end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Handlers whose exit code decides.
const DECIDING: [&str; 3] = ["fence-peer", "before-resync-target", "before-resync-source"];
/// Names another program than `drbdadm`, or `disabled`.
const HELPER_VARIABLE: &str = "LOCKSTEP_USERMODE_HELPER";

/// What the configuration says of a handler of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlerEntry {
    /// It names a command.
    Command,
    /// It has the resource, and no command for the handler.
    Nothing,
    /// It does not have the resource.
    NoResource,
    /// That could not be found out.
    Unknown,
}

/// Looks a handler up: directory of the node, configuration, resource, handler.
pub type FindHandler = fn(&Path, &Path, &str, &str) -> HandlerEntry;

/// The handlers that the core may call; none of the configuration where the operator has switched them off.
pub(crate) fn names() -> Vec<String> {
    let names = if are_disabled() { &[] } else { NAMES };
    let all = names.iter().chain(&[CLOSE_UNUSED]);
    all.map(|name| (*name).to_owned()).collect()
}

fn are_disabled() -> bool {
    std::env::var_os(HELPER_VARIABLE).is_some_and(|helper| helper == "disabled")
}

/// Calls `drbdadm HANDLER RESOURCE`, or what `LOCKSTEP_USERMODE_HELPER` names.
pub(crate) struct Handlers {
    board: Arc<Board>,
    place: Place,
    find: FindHandler,
    running: Arc<AtomicUsize>,
    open: Arc<Open>,
    refresh: Arc<OnceLock<Refresh>>,
    close_unused: Arc<OnceLock<CloseUnused>>,
}

/// Calls by resource whose end watchers have not been told of yet.
#[derive(Default)]
struct Open {
    calls: Mutex<BTreeMap<String, usize>>,
    fewer: Condvar,
}

impl Open {
    fn calls(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begins(&self, resource: &str) {
        *self.calls().entry(resource.to_owned()).or_default() += 1;
    }

    fn ended(&self, resource: &str) {
        let mut calls = self.calls();
        if let Some(count) = calls.get_mut(resource) {
            *count -= 1;
            if *count == 0 {
                calls.remove(resource);
            }
        }
        self.fewer.notify_all();
    }
}

/// Closes the volumes of a resource that nobody uses any more, and waits for what follows.
pub(crate) type CloseUnused = Box<dyn Fn(&str) + Send + Sync>;

/// Publishes a resource as it is now.
pub(crate) type Refresh = Box<dyn Fn(&str) + Send + Sync>;

impl Handlers {
    pub(crate) fn new(board: Arc<Board>, place: Place, find: FindHandler) -> Handlers {
        Handlers {
            board,
            place,
            find,
            running: Arc::default(),
            open: Arc::default(),
            refresh: Arc::default(),
            close_unused: Arc::default(),
        }
    }

    /// Who closes volumes for [`CLOSE_UNUSED`].
    pub(crate) fn close_by(&self, close_unused: CloseUnused) {
        // A node says it once.
        let _ = self.close_unused.set(close_unused);
    }

    /// Closes on a thread of its own: users are looked for in all processes.
    fn close(&self, call: HandlerCall, done: HandlerDone) {
        let close_unused = self.close_unused.clone();
        let thread = std::thread::Builder::new().name("closer".into());
        let spawned = thread.spawn(move || {
            if let Some(close_unused) = close_unused.get() {
                close_unused(&call.resource);
            }
            done.finish(0);
        });
        if let Err(error) = spawned {
            // The core hears of the end by the closure that is gone.
            tracing::warn!(%error, "nobody looks for the users of a device");
        }
    }

    /// Watchers see what led to a handler before its call; `refresh` is called for that.
    pub(crate) fn after(&self, refresh: Refresh) {
        // A node says it once.
        let _ = self.refresh.set(refresh);
    }

    /// Waits until every call so far has ended: what it is about is going to be removed. One that
    /// hangs does not keep it, and nobody hears of its end (`Board::helper`).
    pub(crate) fn wait_until_ended(&self, resource: &str) {
        let waits = |calls: &mut BTreeMap<String, usize>| calls.contains_key(resource);
        let _ = self
            .open
            .fewer
            .wait_timeout_while(self.open.calls(), PATIENCE, waits);
    }
}

impl HandlerExecutor for Handlers {
    fn run(&self, call: HandlerCall, done: HandlerDone) {
        if call.handler == CLOSE_UNUSED {
            return self.close(call, done);
        }
        let helper = std::env::var_os(HELPER_VARIABLE);
        if are_disabled() {
            return done.finish(0);
        }
        // A node that loses its network calls one for each connection, and I/O may wait for it.
        let limit = if DECIDING.contains(&call.handler) {
            MAX_DECIDING
        } else {
            MAX_RUNNING
        };
        if self.running.fetch_add(1, Ordering::Relaxed) >= limit {
            self.running.fetch_sub(1, Ordering::Relaxed);
            tracing::error!(handler = call.handler, limit, "too many handlers run");
            return;
        }
        let (board, place, running) =
            (self.board.clone(), self.place.clone(), self.running.clone());
        let find = self.find;
        let (refresh, open) = (self.refresh.clone(), self.open.clone());
        self.open.begins(&call.resource);
        let resource = call.resource.clone();
        let spawned = std::thread::Builder::new()
            .name("handler".into())
            .spawn(move || {
                let message = |status| Reply::Helper {
                    resource: call.resource.clone(),
                    peer: call.peer.map(|peer| peer.0),
                    volume: call.volume.map(|volume| volume.0),
                    helper: call.handler.to_owned(),
                    status,
                };
                if let Some(refresh) = refresh.get() {
                    refresh(&call.resource);
                }
                board.helper(&message(None));
                let report = board.report(&call.resource);
                let helper = helper.map(PathBuf::from);
                let exit_code = execute(&call, report.as_ref(), &place, helper, find);
                board.helper(&message(Some(i32::from(exit_code) << 8)));
                open.ended(&call.resource);
                running.fetch_sub(1, Ordering::Relaxed);
                done.finish(exit_code);
            });
        if let Err(error) = spawned {
            // The closure is gone, and `done` with it, which reports the loss.
            self.running.fetch_sub(1, Ordering::Relaxed);
            self.open.ended(&resource);
            tracing::error!(%error, "no thread for a handler");
        }
    }
}

/// Runs it to its end.
fn execute(
    call: &HandlerCall,
    report: Option<&ResourceReport>,
    place: &Place,
    helper: Option<PathBuf>,
    find: FindHandler,
) -> u8 {
    let mut command = match (helper, std::env::current_exe()) {
        (Some(helper), _) => Command::new(helper),
        (None, Ok(own)) => {
            let config = place.config_file(&call.resource);
            if !config.exists() {
                return 0;
            }
            // No process to find that nothing is to be run: a resync may wait for the answer, and a
            // node that loses its network calls hundreds.
            match find(place.dir(), &config, &call.resource, call.handler) {
                HandlerEntry::Nothing => return 0,
                // A resource that was made with `drbdsetup` alone has no handlers; `drbdadm` would
                // call that an error, and the resync would not start.
                HandlerEntry::NoResource if call.handler.starts_with("before-resync") => return 0,
                HandlerEntry::Command | HandlerEntry::NoResource | HandlerEntry::Unknown => {}
            }
            let mut command = Command::new(own);
            command.arg("drbdadm").arg("-c").arg(config);
            command
        }
        (None, Err(error)) => {
            tracing::error!(%error, "this program's own path is not known, no handler runs");
            return HandlerDone::LOST;
        }
    };
    command
        .arg(call.handler)
        .arg(&call.resource)
        .env_clear()
        .envs(environment(call, report))
        .env("LOCKSTEP_DIR", place.dir())
        .stdin(Stdio::null());
    match command.status() {
        Ok(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            tracing::info!(
                handler = call.handler,
                resource = call.resource,
                ?code,
                "handler ended"
            );
            code.unwrap_or(HandlerDone::LOST)
        }
        Err(error) => {
            tracing::error!(handler = call.handler, %error, "handler could not be started");
            HandlerDone::LOST
        }
    }
}

/// The environment of a handler: a clean one with what it is about.
fn environment(call: &HandlerCall, report: Option<&ResourceReport>) -> Vec<(String, String)> {
    let mut env: Vec<(String, String)> = vec![
        ("HOME".into(), "/".into()),
        ("TERM".into(), "linux".into()),
        ("PATH".into(), "/sbin:/usr/sbin:/bin:/usr/bin".into()),
    ];
    // Whoever pretends to be another host does so in handlers too.
    if let Ok(host) = std::env::var("__DRBD_NODE__") {
        env.push(("__DRBD_NODE__".into(), host));
    }
    let Some(report) = report else { return env };
    let mut set = |key: String, value: String| env.push((key, value));
    let connection = call
        .peer
        .and_then(|peer| report.connections.iter().find(|c| c.peer_node_id == peer.0));
    for device in &report.devices {
        let of_call = call.volume.is_some_and(|volume| volume.0 == device.volume);
        let suffix = if of_call {
            String::new()
        } else if call.volume.is_none() && connection.is_some() {
            format!("_{}", device.volume)
        } else {
            continue;
        };
        set(format!("DRBD_MINOR{suffix}"), device.minor.to_string());
        if of_call {
            set("DRBD_VOLUME".into(), device.volume.to_string());
        }
        if let Some(disk) = &device.disk {
            set(format!("DRBD_BACKING_DEV{suffix}"), disk.data_path.clone());
        }
    }
    if let Some(connection) = connection {
        set(
            "DRBD_PEER_NODE_ID".into(),
            connection.peer_node_id.to_string(),
        );
        set("DRBD_CSTATE".into(), connection.state.text().to_owned());
        if let Some(path) = connection.paths.first() {
            for (side, address) in [("MY", &path.local), ("PEER", &path.remote)] {
                if let Some((family, address)) = address_parts(address) {
                    set(format!("DRBD_{side}_AF"), family);
                    set(format!("DRBD_{side}_ADDRESS"), address);
                }
            }
        }
    }
    if call.handler.contains("fence") {
        set(
            "UP_TO_DATE_NODES".into(),
            format!("0x{:08X}", up_to_date_nodes(&call.snapshot)),
        );
    }
    env
}

/// Family and address; IPv6 in full.
fn address_parts(text: &str) -> Option<(String, String)> {
    let (family, rest) = text.split_once(':')?;
    let address: std::net::SocketAddr = rest.parse().ok()?;
    let plain = match address.ip() {
        std::net::IpAddr::V4(ip) => ip.to_string(),
        std::net::IpAddr::V6(ip) => ip.segments().map(|group| format!("{group:04x}")).join(":"),
    };
    Some((family.to_owned(), plain))
}

/// Nodes that are UpToDate for every volume.
fn up_to_date_nodes(snapshot: &Snapshot) -> u32 {
    let of_volume = |volume: VolumeNr, own: DiskState| {
        let mut mask = 0u32;
        if own == DiskState::UpToDate {
            mask |= 1 << snapshot.node_id.0;
        }
        for connection in &snapshot.connections {
            let volumes = connection.peer_devices.iter();
            for peer in volumes.filter(|p| p.volume == volume) {
                if peer.disk_state == DiskState::UpToDate {
                    mask |= 1 << connection.peer.0;
                }
            }
        }
        mask
    };
    snapshot
        .devices
        .iter()
        .fold(u32::MAX, |mask, d| mask & of_volume(d.volume, d.disk_state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_for_handlers() {
        assert_eq!(
            address_parts("ipv6:[fd00::1]:7790"),
            Some((
                "ipv6".into(),
                "fd00:0000:0000:0000:0000:0000:0000:0001".into()
            ))
        );
        assert_eq!(
            address_parts("ipv4:10.0.0.1:7790"),
            Some(("ipv4".into(), "10.0.0.1".into()))
        );
    }
}
