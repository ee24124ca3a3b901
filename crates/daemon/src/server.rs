//! The control socket: one thread per conversation, one request after the other.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;

use lockstep_core::command::{Command, CommandError, ErrorCode};
use lockstep_io::tcp::NetNamespace;

use crate::board::Statistics;
use crate::incoming::Incoming;
use crate::node::{CommandResult, Node, node};
use crate::options::Moment;
use crate::protocol::{MAX_REQUEST_BYTES, Reply, Request, VERSION, parse_request, to_line};
use crate::report::ResourceReport;

/// Conversations at the same time.
const MAX_CLIENTS: usize = 256;

/// Whose the control socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The daemon's, which removes it at its end.
    Daemon,
    /// Of a service manager, which starts the daemon when somebody connects.
    Manager,
}

/// The control socket: what a service manager listens on with standard input, else a new one.
pub(crate) fn listen(path: &Path) -> std::io::Result<(UnixListener, Owner)> {
    match inherited(std::io::stdin().as_fd(), path)? {
        Some(listener) => Ok((listener, Owner::Manager)),
        None => Ok((bind(path)?, Owner::Daemon)),
    }
}

/// A descriptor that listens on the control socket's path (`StandardInput=socket` of systemd).
fn inherited(fd: BorrowedFd<'_>, path: &Path) -> std::io::Result<Option<UnixListener>> {
    // Not a socket, or not a listening one: something else is on standard input.
    if !rustix::net::sockopt::socket_acceptconn(fd).unwrap_or(false) {
        return Ok(None);
    }
    let listener = UnixListener::from(fd.try_clone_to_owned()?);
    let there = listener.local_addr()?;
    if there.as_pathname() != Some(path) {
        let text = format!(
            "the socket on standard input is {there:?}, not {}",
            path.display()
        );
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    Ok(Some(listener))
}

/// Binds the control socket, in place of one that a dead daemon left. The caller holds the node's
/// lock, so nobody alive listens on it.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The directory's mode protects the moment until the socket has its own.
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until the process ends. `stop` is told when a client asks for the end.
pub(crate) fn serve(listener: &UnixListener, node: &Arc<Node>, stop: &SyncSender<()>) {
    let clients = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let mut stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, "the control socket takes no connection");
                std::thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            clients.fetch_sub(1, Ordering::Relaxed);
            let text = format!("{MAX_CLIENTS} clients talk to the daemon, its limit");
            // A client that does not listen learns it by the end of the conversation.
            let _ = stream.write_all(&to_line(&Reply::Failed { code: 0, text }));
            continue;
        }
        let (node, stop, count) = (node.clone(), stop.clone(), clients.clone());
        let spawned = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                if let Err(error) = converse(stream, &node, &stop) {
                    tracing::debug!(%error, "a client hung up");
                }
                count.fetch_sub(1, Ordering::Relaxed);
            });
        if let Err(error) = spawned {
            clients.fetch_sub(1, Ordering::Relaxed);
            tracing::error!(%error, "no thread for a client");
        }
    }
}

fn converse(stream: UnixStream, node: &Arc<Node>, stop: &SyncSender<()>) -> std::io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut input = BufReader::new(Incoming::new(stream));
    loop {
        let mut line = Vec::new();
        let limit = MAX_REQUEST_BYTES as u64;
        if input.by_ref().take(limit).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let text = format!("a request is one line of at most {MAX_REQUEST_BYTES} bytes");
            return out.write_all(&to_line(&Reply::Failed { code: 0, text }));
        }
        match parse_request(line.trim_ascii_end()) {
            Err(text) => out.write_all(&to_line(&Reply::Failed { code: 0, text }))?,
            Ok(Request::Watch {
                statistics,
                on_request,
                resource,
            }) => {
                let statistics = match (statistics, on_request) {
                    (false, _) => Statistics::No,
                    (true, false) => Statistics::Regularly,
                    (true, true) => Statistics::OnRequest,
                };
                return watch(&mut out, input, node, resource, statistics);
            }
            Ok(Request::Stop) => {
                out.write_all(&to_line(&Reply::Done))?;
                // Full means that the end has begun.
                let _ = stop.try_send(());
            }
            Ok(request) => {
                let descriptor = match request {
                    Request::NewPath { .. } => input.get_mut().take_descriptor(),
                    _ => None,
                };
                let namespace = descriptor.map_or(Ok(None), |given| node.namespace(given));
                let reply = match namespace {
                    Ok(namespace) => answer(node, request, namespace),
                    Err(error) => refused(error),
                };
                out.write_all(&to_line(&reply))?;
            }
        }
    }
}

/// A reader that is slow makes only this thread wait.
fn watch(
    out: &mut UnixStream,
    input: BufReader<Incoming>,
    node: &Arc<Node>,
    resource: Option<String>,
    statistics: Statistics,
) -> std::io::Result<()> {
    let (resources, changes) = node.watching().watch(resource.clone(), statistics);
    let (asked, mailbox) = (node.clone(), changes.mailbox().clone());
    std::thread::Builder::new()
        .name("watcher".into())
        .spawn(move || {
            listen_to_watcher(input, &asked, resource.as_deref());
            mailbox.close();
        })?;
    let mut sizes = Sizes::default();
    for report in &resources {
        sizes.note(report);
    }
    let mut result = out.write_all(&to_line(&Reply::Report { resources }));
    while result.is_ok()
        && let Some(reply) = changes.recv()
    {
        if let Reply::Changed { resource } = &reply
            && sizes.note(resource)
        {
            // Who waits for this may use the device at once.
            node.devices().look_at_soon(&resource.name);
        }
        result = out.write_all(&to_line(&reply));
    }
    // Ends the other thread. A connection that is gone already needs no end.
    let _ = out.shutdown(std::net::Shutdown::Both);
    result
}

/// The sizes of volumes that a watcher was told, in sectors.
#[derive(Default)]
struct Sizes(BTreeMap<u32, u64>);

impl Sizes {
    /// Takes a report in; `true` if a volume has another size than before, and one that a device has.
    fn note(&mut self, report: &ResourceReport) -> bool {
        let mut news = false;
        for device in &report.devices {
            let size = device.size_sectors;
            news |= self.0.insert(device.minor, size) != Some(size) && size != 0;
        }
        news
    }
}

/// Until the watcher hangs up or sends something else than `refresh`.
fn listen_to_watcher(mut input: BufReader<Incoming>, node: &Node, resource: Option<&str>) {
    loop {
        let mut line = Vec::new();
        let limit = MAX_REQUEST_BYTES as u64;
        match input.by_ref().take(limit).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        match parse_request(line.trim_ascii_end()) {
            // What changed reaches the watcher by the board.
            Ok(Request::Refresh) => drop(node.reports(resource)),
            Ok(_) | Err(_) => return,
        }
    }
}

fn refused(error: CommandError) -> Reply {
    tracing::info!(code = error.code.0, text = error.text, "command refused");
    Reply::Failed {
        code: error.code.0,
        text: error.text,
    }
}

/// `namespace` is the network namespace that came with the request, if it is not the daemon's.
fn answer(node: &Node, request: Request, namespace: Option<NetNamespace>) -> Reply {
    match request {
        Request::Hello { .. } => Reply::Hello {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
        },
        Request::Report { resource } => Reply::Report {
            resources: node.reports(resource.as_deref()),
        },
        Request::Counts => Reply::Counts {
            volumes: node.counts(),
            acks: node.acks(),
        },
        Request::Refresh => {
            drop(node.reports(None));
            Reply::Done
        }
        other => match execute(node, other, namespace) {
            Ok(()) => Reply::Done,
            Err(error) => refused(error),
        },
    }
}

fn moment(set_defaults: bool) -> Moment {
    if set_defaults {
        Moment::Replace
    } else {
        Moment::Change
    }
}

fn execute(n: &Node, request: Request, namespace: Option<NetNamespace>) -> CommandResult {
    match request {
        Request::NewResource {
            resource,
            node_id,
            options,
        } => n.new_resource(&resource, node_id, &options),
        Request::ResourceOptions {
            resource,
            options,
            set_defaults,
        } => n.resource_options(&resource, &options, moment(set_defaults)),
        Request::DelResource { resource } => n.del_resource(&resource),
        Request::RenameResource { resource, new_name } => n.rename_resource(&resource, &new_name),
        Request::Down { resource } => n.down(&resource),
        Request::NewMinor {
            resource,
            minor,
            volume,
            options,
        } => n.new_minor(&resource, minor, volume, &options),
        Request::DelMinor { minor } => n.del_minor(minor),
        Request::Attach {
            minor,
            data_path,
            meta_path,
            meta_index,
            options,
        } => n.attach(minor, data_path, meta_path, &meta_index, &options),
        Request::DiskOptions {
            minor,
            options,
            set_defaults,
        } => n.disk_options(minor, &options, moment(set_defaults)),
        Request::Detach {
            minor,
            force,
            diskless,
        } => n.detach(minor, force, diskless),
        Request::NewPeer {
            resource,
            peer,
            options,
        } => n.new_peer(&resource, peer, &options),
        Request::DelPeer {
            resource,
            peer,
            force,
        } => n.del_peer(&resource, peer, force),
        Request::NetOptions {
            resource,
            peer,
            options,
            set_defaults,
        } => n.net_options(&resource, peer, &options, moment(set_defaults)),
        Request::NewPath {
            resource,
            peer,
            local,
            remote,
        } => n.new_path(&resource, peer, local, remote, namespace),
        Request::DelPath {
            resource,
            peer,
            local,
            remote,
        } => n.del_path(&resource, peer, &local, &remote),
        Request::Connect {
            resource,
            peer,
            discard_my_data,
            tentative,
        } => n.connect(&resource, peer, discard_my_data, tentative),
        Request::Disconnect {
            resource,
            peer,
            force,
        } => n.peer_command(&resource, peer, |peer| Command::Disconnect { peer, force }),
        Request::ForgetPeer { resource, peer } => {
            n.peer_command(&resource, peer, |peer| Command::ForgetPeer { peer })
        }
        Request::PeerDeviceOptions {
            resource,
            peer,
            volume,
            options,
            set_defaults,
        } => n.peer_device_options(&resource, peer, volume, &options, moment(set_defaults)),
        Request::Primary { resource, force } => n.primary(&resource, force),
        Request::Secondary { resource, force } => n.secondary(&resource, force),
        Request::SuspendIo { minor } => n.suspend_io(minor),
        Request::ResumeIo { minor } => n.resume_io(minor),
        other => execute_on_volume(n, other),
    }
}

fn execute_on_volume(n: &Node, request: Request) -> CommandResult {
    match request {
        Request::Outdate { minor } => {
            n.volume_command(minor, |volume| Ok(Command::Outdate { volume }))
        }
        Request::Invalidate {
            minor,
            from,
            reset_bitmap,
        } => n.volume_command(minor, |volume| {
            let from = from.map(node).transpose()?;
            Ok(Command::Invalidate {
                volume,
                from,
                reset_bitmap,
            })
        }),
        Request::NewCurrentUuid {
            minor,
            clear_bitmap,
            force_resync,
        } => n.volume_command(minor, |volume| {
            Ok(Command::NewCurrentUuid {
                volume,
                clear_bitmap,
                force_resync,
            })
        }),
        Request::Resize {
            minor,
            size_sectors,
            assume_clean,
            assume_peer_has_space,
        } => n.volume_command(minor, |volume| {
            Ok(Command::Resize {
                volume,
                size_sectors,
                assume_clean,
                assume_peer_has_space,
            })
        }),
        Request::InvalidateRemote {
            resource,
            peer,
            volume,
            reset_bitmap,
        } => n.peer_device_command(&resource, peer, volume, |peer, volume| {
            Command::InvalidateRemote {
                peer,
                volume,
                reset_bitmap,
            }
        }),
        Request::PauseSync {
            resource,
            peer,
            volume,
        } => n.peer_device_command(&resource, peer, volume, |peer, volume| Command::PauseSync {
            peer,
            volume,
        }),
        Request::ResumeSync {
            resource,
            peer,
            volume,
        } => n.peer_device_command(&resource, peer, volume, |peer, volume| {
            Command::ResumeSync { peer, volume }
        }),
        Request::Verify {
            resource,
            peer,
            volume,
            start_sector,
            stop_sector,
        } => n.peer_device_command(&resource, peer, volume, |peer, volume| Command::Verify {
            peer,
            volume,
            start: start_sector,
            stop: stop_sector,
        }),
        other => Err(lockstep_core::command::CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!("not a command: {other:?}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Left, NodeConfig};
    use crate::place::Place;
    use std::sync::mpsc::sync_channel;

    /// A node of its own in a new directory, without devices.
    fn node(dir: &Path) -> Arc<Node> {
        let config = NodeConfig {
            shards: 1,
            pool_bytes: 16 << 20,
            devices: false,
            hold: None,
            device_kind: lockstep_front::block::DeviceKind::Auto,
            max_parallel_resyncs: 0,
            protocol_max: lockstep_format::wire::PROTOCOL_MAX,
            find_handler: |_, _, _, _| crate::handlers::HandlerEntry::Unknown,
        };
        Node::start(&Place::find(Some(dir)), &config).unwrap()
    }

    fn converse_with(node: &Arc<Node>, lines: &[&str]) -> Vec<String> {
        let (here, there) = UnixStream::pair().unwrap();
        let (stop, _stopped) = sync_channel(1);
        let (served, mut client) = (node.clone(), here.try_clone().unwrap());
        let server = std::thread::spawn(move || converse(there, &served, &stop));
        let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
        client.write_all(input.as_bytes()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let answers = BufReader::new(here).lines().map_while(Result::ok).collect();
        server.join().unwrap().unwrap();
        answers
    }

    #[test]
    fn a_bad_request_is_answered_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let answers = converse_with(
            &node,
            &[
                "not json",
                r#"{"do":"explode"}"#,
                r#"{"do":"new-resource","resource":"a/b","node_id":0}"#,
                r#"{"do":"new-resource","resource":"web","node_id":99}"#,
                r#"{"do":"new-resource","resource":"web","node_id":0,"options":{"quorum":"x"}}"#,
                r#"{"do":"new-minor","resource":"web","minor":1,"volume":0}"#,
                r#"{"do":"report"}"#,
            ],
        );
        assert_eq!(answers.len(), 7);
        for answer in &answers[..6] {
            assert!(answer.contains("\"is\":\"failed\""), "{answer}");
        }
        assert!(answers[4].contains("quorum"), "{}", answers[4]);
        assert!(answers[5].contains("158"), "{}", answers[5]);
        assert_eq!(answers[6], r#"{"is":"report","resources":[]}"#);
        assert_eq!(node.stop(), Left::Nothing);
    }

    #[test]
    fn a_pair_of_addresses_leads_to_one_peer_and_processors_are_a_mask() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let path = |peer: u32| {
            let addresses = r#""local":"ipv4:127.0.0.1:1","remote":"ipv4:127.0.0.1:2""#;
            format!(r#"{{"do":"new-path","resource":"web","peer":{peer},{addresses}}}"#)
        };
        let mask = |mask: &str| {
            let options = format!(r#""options":{{"cpu-mask":"{mask}"}}"#);
            format!(r#"{{"do":"resource-options","resource":"web",{options}}}"#)
        };
        let requests = [
            r#"{"do":"new-resource","resource":"web","node_id":0}"#.to_owned(),
            r#"{"do":"new-peer","resource":"web","peer":1}"#.to_owned(),
            r#"{"do":"new-peer","resource":"web","peer":2}"#.to_owned(),
            path(1),
            path(1),
            path(2),
            mask("zz"),
            mask("123456789"),
            mask("f,00000001"),
            mask(""),
        ];
        let requests: Vec<&str> = requests.iter().map(String::as_str).collect();
        let wanted = [
            "done", "done", "done", "done", "174", "173", "143", "143", "done", "done",
        ];
        let answers = converse_with(&node, &requests);
        assert_eq!(answers.len(), wanted.len());
        for (answer, wanted) in answers.iter().zip(wanted) {
            assert!(answer.contains(wanted), "{wanted} is not in {answer}");
        }
        node.stop();
    }

    #[test]
    fn objects_come_and_go_and_minors_are_unique() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let answers = converse_with(
            &node,
            &[
                r#"{"do":"new-resource","resource":"web","node_id":0}"#,
                r#"{"do":"new-resource","resource":"web","node_id":0}"#,
                r#"{"do":"new-minor","resource":"web","minor":7,"volume":0}"#,
                r#"{"do":"new-minor","resource":"web","minor":7,"volume":1}"#,
                r#"{"do":"new-peer","resource":"web","peer":0}"#,
                r#"{"do":"new-peer","resource":"web","peer":1,"options":{"_name":"bravo"}}"#,
                r#"{"do":"connect","resource":"web","peer":1}"#,
                r#"{"do":"del-resource","resource":"web"}"#,
                r#"{"do":"primary","resource":"web"}"#,
            ],
        );
        let failed = |answer: &str| answer.contains("\"is\":\"failed\"");
        let outcome: Vec<bool> = answers.iter().map(|answer| failed(answer)).collect();
        assert_eq!(
            outcome,
            [false, true, false, true, true, false, true, true, true]
        );
        assert!(answers[3].contains("161"), "{}", answers[3]);
        assert!(answers[8].contains("-2"), "{}", answers[8]);
        let reports = node.reports(None);
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0].devices[0].minor, 7);
        assert_eq!(reports[0].connections[0].name, "bravo");
        assert_eq!(
            converse_with(&node, &[r#"{"do":"down","resource":"web"}"#]),
            [r#"{"is":"done"}"#]
        );
        assert!(node.reports(None).is_empty());
        assert_eq!(node.stop(), Left::Nothing);
    }

    #[test]
    fn a_watcher_sees_objects_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let (reports, changes) = node.watching().watch(None, Statistics::No);
        assert!(reports.is_empty());
        node.new_resource("web", 0, &Default::default()).unwrap();
        let next = || changes.recv().unwrap();
        assert!(matches!(next(), Reply::Changed { resource } if resource.name == "web"));
        node.del_resource("web").unwrap();
        loop {
            match next() {
                Reply::Removed { name } => break assert_eq!(name, "web"),
                Reply::Changed { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(node.stop(), Left::Nothing);
    }

    /// A volume whose disk cannot be opened is Diskless again before anybody can look.
    #[test]
    fn a_watcher_sees_each_of_several_quick_steps() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        node.new_minor("web", 7, 0, &Default::default()).unwrap();
        let (_, changes) = node.watching().watch(None, Statistics::No);
        let missing = dir.path().join("none").display().to_string();
        let refused = node.attach(7, missing.clone(), missing, "internal", &Default::default());
        assert_eq!(refused.unwrap_err().code.0, 104);
        node.del_minor(7).unwrap();
        let mut disks = Vec::new();
        loop {
            match changes.recv().unwrap() {
                Reply::Changed { resource } => match resource.devices.first() {
                    Some(device) => disks.push(device.disk_state),
                    None => break,
                },
                other => panic!("{other:?}"),
            }
        }
        disks.dedup();
        use lockstep_format::wire::DiskState;
        assert_eq!(disks, [DiskState::Attaching, DiskState::Diskless]);
        node.stop();
    }

    #[test]
    fn a_disk_without_a_bitmap_is_not_attached_beside_a_peer() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        node.new_minor("web", 7, 0, &Default::default()).unwrap();
        node.new_peer("web", 1, &Default::default()).unwrap();
        let disk = dir.path().join("missing").display().to_string();
        let without = [("bitmap".to_owned(), "no".to_owned())].into();
        let attach = |disk: String| node.attach(7, disk.clone(), disk, "internal", &without);
        let refused = attach(disk.clone()).unwrap_err();
        assert!(
            refused.text.starts_with("bitmap no: node 1"),
            "{}",
            refused.text
        );
        // Without the peer it is the disk that is missed.
        node.del_peer("web", 1, false).unwrap();
        assert_eq!(attach(disk).unwrap_err().code.0, 104);
        node.stop();
    }

    #[test]
    fn a_watcher_sees_what_led_to_a_handler_before_its_call() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        node.new_peer("web", 1, &Default::default()).unwrap();
        let (local, remote) = ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2");
        node.new_path("web", 1, local.into(), remote.into(), None)
            .unwrap();
        let (_, changes) = node.watching().watch(None, Statistics::No);
        node.connect("web", 1, false, false).unwrap();
        let disconnect = |peer| lockstep_core::command::Command::Disconnect { peer, force: false };
        node.peer_command("web", 1, disconnect).unwrap();
        let mut seen = Vec::new();
        let called = loop {
            match changes.recv().unwrap() {
                Reply::Changed { resource } => seen.push(resource.connections[0].state),
                Reply::Helper { helper, status, .. } => break (helper, status),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(called, ("disconnected".to_owned(), None));
        seen.dedup();
        use lockstep_core::state::ConnState::{Connecting, Disconnecting, StandAlone, Unconnected};
        assert_eq!(seen, [Unconnected, Connecting, Disconnecting, StandAlone]);
        node.stop();
    }

    #[test]
    fn a_pair_of_addresses_leads_to_one_resource_of_the_node() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        for name in ["web", "mail"] {
            node.new_resource(name, 0, &Default::default()).unwrap();
            node.new_peer(name, 1, &Default::default()).unwrap();
        }
        let new = |name, remote: &str| {
            let (local, remote) = ("ipv6:[::1]:1".into(), remote.into());
            node.new_path(name, 1, local, remote, None)
                .map_err(|error| error.code.0)
        };
        assert_eq!(new("web", "ipv6:[::1]:2"), Ok(()));
        assert_eq!(new("mail", "ipv6:[0:0:0:0:0:0:0:1]:2"), Err(173));
        assert_eq!(new("mail", "ipv6:[::1]:3"), Ok(()));
        // Free again with its path, its peer, its resource.
        node.del_path("web", 1, "ipv6:[::1]:1", "ipv6:[::1]:2")
            .unwrap();
        assert_eq!(new("mail", "ipv6:[::1]:2"), Ok(()));
        node.del_peer("mail", 1, false).unwrap();
        assert_eq!(new("web", "ipv6:[::1]:2"), Ok(()));
        node.down("web").unwrap();
        node.new_peer("mail", 1, &Default::default()).unwrap();
        assert_eq!(new("mail", "ipv6:[::1]:2"), Ok(()));
        node.stop();
    }

    #[test]
    fn a_watcher_hears_of_a_handler_s_call_and_end_before_its_resource_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        for _ in 0..20 {
            node.new_resource("web", 0, &Default::default()).unwrap();
            node.new_peer("web", 1, &Default::default()).unwrap();
            let (local, remote) = ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2");
            node.new_path("web", 1, local.into(), remote.into(), None)
                .unwrap();
            node.connect("web", 1, false, false).unwrap();
            let (_, changes) = node.watching().watch(None, Statistics::No);
            node.down("web").unwrap();
            let mut told = Vec::new();
            loop {
                match changes.recv().unwrap() {
                    Reply::Helper { status, .. } => told.push(status.is_some()),
                    Reply::Removed { .. } => break,
                    Reply::Changed { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(told, [false, true], "the resource was gone before");
        }
        assert_eq!(node.stop(), Left::Nothing);
    }

    #[test]
    fn connections_have_names_of_their_own_and_keep_them() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let peer = |peer: u32, options: &str| {
            format!(r#"{{"do":"new-peer","resource":"web","peer":{peer},"options":{{{options}}}}}"#)
        };
        let net = |peer: u32, options: &str| {
            format!(
                r#"{{"do":"net-options","resource":"web","peer":{peer},"set_defaults":true,"options":{{{options}}}}}"#
            )
        };
        let requests = [
            r#"{"do":"new-resource","resource":"web","node_id":0}"#.to_owned(),
            peer(1, ""),
            peer(2, r#""_name":"bravo""#),
            peer(3, r#""_name":"bravo""#),
            peer(4, r#""_name":"node-1""#),
            peer(5, r#""_name":"""#),
            net(2, r#""ping-int":"3""#),
            net(1, r#""_name":"bravo""#),
            net(5, r#""_name":"echo""#),
        ];
        let requests: Vec<&str> = requests.iter().map(String::as_str).collect();
        let wanted = [
            "done", "done", "done", "174", "174", "done", "done", "174", "done",
        ];
        let answers = converse_with(&node, &requests);
        assert_eq!(answers.len(), wanted.len());
        for (answer, wanted) in answers.iter().zip(wanted) {
            assert!(answer.contains(wanted), "{wanted} is not in {answer}");
        }
        let report = node.reports(None).remove(0);
        let mut names: Vec<(u8, String)> = report
            .connections
            .iter()
            .map(|c| (c.peer_node_id, c.name.clone()))
            .collect();
        names.sort();
        let named = |id: u8, name: &str| (id, name.to_owned());
        assert_eq!(
            names,
            [named(1, "node-1"), named(2, "bravo"), named(5, "echo")]
        );
        node.stop();
    }

    #[test]
    fn the_only_path_of_a_connection_stays_until_it_is_stand_alone() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let (local, first, second) = ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv4:127.0.0.1:3");
        node.new_resource("web", 0, &Default::default()).unwrap();
        node.new_peer("web", 1, &Default::default()).unwrap();
        for remote in [first, second] {
            node.new_path("web", 1, local.into(), remote.into(), None)
                .unwrap();
        }
        node.connect("web", 1, false, false).unwrap();
        node.del_path("web", 1, local, first).unwrap();
        let refused = node.del_path("web", 1, local, second).unwrap_err();
        assert_eq!(refused.code, ErrorCode::ERR_NET_CONFIGURED);
        assert_eq!(node.reports(None)[0].connections[0].paths.len(), 1);
        let disconnect = |peer| lockstep_core::command::Command::Disconnect { peer, force: false };
        node.peer_command("web", 1, disconnect).unwrap();
        node.del_path("web", 1, local, second).unwrap();
        node.stop();
    }

    #[test]
    fn names_of_resources_are_those_that_the_original_takes() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        for name in ["r0", "A+b.c_d-9"] {
            node.new_resource(name, 0, &Default::default()).unwrap();
        }
        let long = "x".repeat(128);
        for name in ["", "a/b", "a b", "h\u{fc}", "a@b", "all", &long] {
            let refused = node.new_resource(name, 0, &Default::default());
            let code = refused.unwrap_err().code;
            assert_eq!(code, ErrorCode::ERR_INVALID_REQUEST, "{name}");
        }
        node.stop();
    }

    /// Counters that nobody looks at do not reach a watcher; a refresh does not repeat what is
    /// known, and a watcher that says something else is hung up on.
    #[test]
    fn a_watcher_may_ask_for_a_refresh_and_for_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        let answers = converse_with(
            &node,
            &[
                r#"{"do":"watch","statistics":true,"on_request":true}"#,
                r#"{"do":"refresh"}"#,
                r#"{"do":"stop"}"#,
                r#"{"do":"refresh"}"#,
            ],
        );
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert!(answers[0].contains("\"is\":\"report\""), "{}", answers[0]);
        assert_eq!(
            converse_with(&node, &[r#"{"do":"refresh"}"#]),
            [r#"{"is":"done"}"#]
        );
        assert_eq!(node.stop(), Left::Nothing);
    }

    /// A watcher that reads nothing at all delays no command, and finds the last state when it
    /// reads again.
    #[test]
    fn a_watcher_that_does_not_read_delays_nobody_and_ends_with_the_truth() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let (stop, _stopped) = sync_channel(1);
        let served = node.clone();
        let server = std::thread::spawn(move || converse(there, &served, &stop));
        let mut client = here.try_clone().unwrap();
        client.write_all(b"{\"do\":\"watch\"}\n").unwrap();
        let mut reader = BufReader::new(here);
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        let set = |quorum: &str| {
            let options = [("quorum".to_owned(), quorum.to_owned())].into();
            node.resource_options("web", &options, Moment::Change)
                .unwrap();
        };
        // More than the socket and the mailbox together can hold.
        for _ in 0..3000 {
            set("majority");
            set("off");
        }
        set("all");
        let mut last = String::new();
        while !last.contains("\"quorum\":\"all\"") {
            last.clear();
            assert_ne!(reader.read_line(&mut last).unwrap(), 0, "hung up on");
        }
        drop((reader, client));
        server.join().unwrap().unwrap();
        assert_eq!(node.stop(), Left::Nothing);
    }

    #[test]
    fn a_listening_socket_on_standard_input_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let managers = UnixListener::bind(&path).unwrap();
        let listener = inherited(managers.as_fd(), &path).unwrap().unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        // Another socket is a mistake of its own; what is no socket is only no socket.
        assert!(inherited(managers.as_fd(), &dir.path().join("other")).is_err());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(inherited(file.as_fd(), &path).unwrap().is_none());
        let (stream, _other) = UnixStream::pair().unwrap();
        assert!(inherited(stream.as_fd(), &path).unwrap().is_none());
    }

    #[test]
    fn a_resource_gets_another_name_and_watchers_follow_it() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        node.new_resource("web", 0, &Default::default()).unwrap();
        node.new_resource("mail", 0, &Default::default()).unwrap();
        let (_, changes) = node.watching().watch(Some("web".into()), Statistics::No);
        let answers = converse_with(
            &node,
            &[
                r#"{"do":"rename-resource","resource":"web","new_name":"mail"}"#,
                r#"{"do":"rename-resource","resource":"none","new_name":"shop"}"#,
                r#"{"do":"rename-resource","resource":"web","new_name":"a b"}"#,
                r#"{"do":"rename-resource","resource":"web","new_name":"shop"}"#,
                r#"{"do":"down","resource":"web"}"#,
            ],
        );
        for (answer, code) in answers.iter().zip(["174", "158", "162", "done", "158"]) {
            assert!(answer.contains(code), "{code} is not in {answer}");
        }
        let names: Vec<String> = node.reports(None).into_iter().map(|r| r.name).collect();
        assert_eq!(names, ["mail", "shop"]);
        node.down("shop").unwrap();
        let mut seen = Vec::new();
        while seen.last() != Some(&"removed shop".to_owned()) {
            match changes.recv().unwrap() {
                Reply::Renamed { name, new_name } => seen.push(format!("{name} to {new_name}")),
                Reply::Removed { name } => seen.push(format!("removed {name}")),
                Reply::Changed { resource } => assert_eq!(resource.name, "shop"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(seen, ["web to shop", "removed shop"]);
        assert_eq!(node.stop(), Left::Nothing);
    }

    #[test]
    fn a_line_without_end_ends_the_conversation() {
        let dir = tempfile::tempdir().unwrap();
        let node = node(dir.path());
        let long = "x".repeat(MAX_REQUEST_BYTES + 10);
        let answers = converse_with(&node, &[&long]);
        assert_eq!(answers.len(), 1);
        assert!(answers[0].contains("at most"), "{}", answers[0]);
        assert_eq!(node.stop(), Left::Nothing);
    }
}
