//! A running proxy: starts the threads, serves the control socket and the metrics, and stops.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock};

use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use crate::core::config::{DaemonOptions, MEMLIMIT_MIN};
use crate::core::engine::Engine;
use crate::core::limits::{Origin, check_floor, memory_needed};
use crate::core::shaper::Limit;
use crate::core::stats::Snapshot;
use crate::core::time::Instant;
use crate::live::{IdentitySource, Live, LogLevel, identity_of};
use crate::mail::{Post, Reply, mailbox};
use crate::net::shard::Shard;
use crate::net::{Reactor, Threads, handover};
use crate::spill::Spill;
use crate::workers::Workers;

/// Longest control request in bytes.
const REQUEST_MAX: u64 = 1 << 20;

/// How the two proxies know each other.
#[derive(Clone, Debug)]
pub enum Security {
    /// Both ends hold the same secret; with several, each is for its own connections.
    Secrets(Vec<SharedSecret>),
    /// Own Ed25519 private key (hex), public keys of the peers (hex).
    Keys {
        /// 64 hex digits.
        private: String,
        /// 88 hex digits each, with `=` and a list of the connections that the peer may use. One
        /// peer alone needs no list.
        peers: Vec<String>,
    },
    /// X.509 with a private authority; PEM files.
    Certificates {
        /// Own certificate chain.
        cert: PathBuf,
        /// Own private key.
        key: PathBuf,
        /// The authority that signs both ends.
        authority: PathBuf,
        /// Names in the certificates of the peers, each as `NAME=CONNECTIONS`; without any the
        /// dialled address.
        peer_names: Vec<String>,
    },
    /// Neither encryption nor authentication. Only inside a VPN or on one machine.
    Insecure,
}

/// A secret that two sites share.
#[derive(Clone)]
pub struct SharedSecret {
    /// At least 16 random bytes.
    pub secret: Vec<u8>,
    /// Names or patterns of the connections that it is for, `r0-bob-alice,web-*`; one secret alone
    /// needs no list and is for all.
    pub connections: Option<String>,
}

impl SharedSecret {
    /// The only secret, for every connection.
    pub fn for_all(secret: &[u8]) -> SharedSecret {
        SharedSecret {
            secret: secret.to_vec(),
            connections: None,
        }
    }
}

impl std::fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedSecret for {:?}", self.connections)
    }
}

/// Options of a proxy daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// Encryption and identity.
    pub security: Security,
    /// Memory that all buffers share, in bytes.
    pub memory_max_bytes: u64,
    /// What of it each connection may always have, in bytes: 1 MiB to 1 GiB.
    pub memlimit_min_bytes: u64,
    /// WAN rate of the whole daemon: bytes per second or a timetable; empty is unlimited.
    pub rate: String,
    /// Bytes that may pass at once after a pause; empty is what the rate gives in 20 ms.
    pub burst: String,
    /// Limits of all connections with one peer proxy.
    pub sessions: Vec<SessionOption>,
    /// Codec threads; 0 is one per core.
    pub workers: usize,
    /// Directory for what does not fit into memory.
    pub spill_directory: Option<PathBuf>,
    /// Bytes that may be there.
    pub spill_limit_bytes: u64,
    /// Control socket.
    pub control: Option<PathBuf>,
    /// Address for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Take over connections, buffers and DRBD's sockets from the proxy that answers on the
    /// control socket, if one does.
    pub take_over: bool,
    /// The log of this process, if the daemon may change its level.
    pub log: Option<LogLevel>,
    /// Where the identity is read again when a command asks for it.
    pub identity: Option<IdentitySource>,
}

/// One setting of a session: of all connections with the peer proxy of one outside IP.
#[derive(Clone, Debug)]
pub struct SessionOption {
    /// Its outside IP.
    pub peer: String,
    /// bwlimit, schedule or burst.
    pub option: String,
    /// As the control command takes it.
    pub value: String,
}

/// A running proxy. Dropping it stops it.
#[derive(Debug)]
pub struct Daemon {
    post: Post,
    thread: Option<JoinHandle<bool>>,
    control: Option<PathBuf>,
    metrics: Option<SocketAddr>,
    taken_over: Option<usize>,
}

/// A request on the control socket: one JSON line.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Request {
    /// Commands in order; the first failure ends the list.
    pub commands: Vec<String>,
    /// Reports as JSON.
    #[serde(default)]
    pub json: bool,
    /// Not a command: everything is to be handed over to the asking process.
    #[serde(default)]
    pub hand_over: bool,
}

/// The answer to one command.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Whether it was done.
    pub ok: bool,
    /// Its output, or why it failed.
    pub text: String,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            security: Security::Insecure,
            memory_max_bytes: 1 << 30,
            memlimit_min_bytes: MEMLIMIT_MIN,
            rate: String::new(),
            burst: String::new(),
            sessions: Vec::new(),
            workers: 0,
            spill_directory: None,
            spill_limit_bytes: 0,
            control: None,
            metrics: None,
            take_over: false,
            log: None,
            identity: None,
        }
    }
}

impl Daemon {
    /// Checks the options, starts everything, and returns the running proxy.
    pub fn start(options: Options) -> Result<Daemon, String> {
        check_floor(options.memlimit_min_bytes)?;
        let needed = memory_needed(1, options.memlimit_min_bytes);
        if options.memory_max_bytes < needed {
            return Err(format!(
                "memory-max is {} bytes, at least {needed} are needed",
                options.memory_max_bytes
            ));
        }
        let identity = identity_of(&options.security)?;
        let mut limit = Limit::default();
        for (option, value) in [
            (rate_option(&options.rate), &options.rate),
            ("burst", &options.burst),
        ] {
            if let Some(Err(expected)) = limit.set(option, value).filter(|_| !value.is_empty()) {
                return Err(format!(
                    "{option} '{value}' is not valid; expected {expected}"
                ));
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = if options.workers == 0 {
            cores
        } else {
            options.workers
        };
        let (post, mailbox) = mailbox().map_err(|error| error.to_string())?;
        let mut spill = match &options.spill_directory {
            Some(directory) if options.spill_limit_bytes > 0 => {
                Some(Spill::start(directory, &post)?)
            }
            Some(_) => return Err("a spill directory needs a spill limit above 0".into()),
            None => None,
        };
        let daemon_options = DaemonOptions {
            memory_max_bytes: options.memory_max_bytes,
            memlimit_min_bytes: options.memlimit_min_bytes,
            limit,
            spill_limit_bytes: if spill.is_some() {
                options.spill_limit_bytes
            } else {
                0
            },
            jobs_max: workers * 2,
        };
        let mut seed = [0u8; 32];
        SystemRandom::new()
            .fill(&mut seed)
            .map_err(|_| "no random numbers".to_string())?;
        let live = Live::new(options.log, options.identity, &daemon_options);
        let engine = Engine::new(Instant(0), daemon_options, seed);
        let pool = Workers::start(workers, &post).map_err(|error| error.to_string())?;
        let shards = (0..(cores / 2).max(1))
            .map(|number| Shard::start(number, &post))
            .collect::<std::io::Result<Vec<Shard>>>()
            .map_err(|error| error.to_string())?;
        let given = match &options.control {
            Some(path) if options.take_over => handover::ask(path)?,
            _ => None,
        };
        if spill.is_none() && given.as_ref().is_some_and(handover::Given::has_spilled) {
            spill = Some(Spill::start_reading(&post)?);
        }
        let uptime = given
            .as_ref()
            .map_or(Duration::ZERO, handover::Given::uptime);
        let taken_over = given.as_ref().map(handover::Given::count);
        // Ages of what is taken over must not lie before the beginning of time.
        let started = Clock::now().checked_sub(uptime).unwrap_or_else(Clock::now);
        let threads = Threads {
            shards,
            workers: pool,
            spill,
        };
        let mut reactor = Reactor::new(engine, mailbox, threads, identity, live, started)
            .map_err(|error| error.to_string())?;
        for given in &options.sessions {
            let (peer, option, value) = (&given.peer, &given.option, &given.value);
            crate::control::set_session(&mut reactor, peer, option, value, Origin::CommandLine)?;
        }
        if let Some(given) = given {
            let stream = reactor.take_over(given)?;
            handover::confirm(stream)?;
            // The old process has let go of it.
            let _ = options.control.as_deref().map(std::fs::remove_file);
        }
        let control = options.control.as_deref().map(open_control).transpose()?;
        let metrics = options.metrics.map(open_metrics).transpose()?;
        let metrics_addr = metrics
            .as_ref()
            .and_then(|listener| listener.local_addr().ok());
        let thread = std::thread::Builder::new()
            .name("control-lane".into())
            .spawn(move || reactor.run())
            .map_err(|error| error.to_string())?;
        if let Some(listener) = control {
            let post = post.clone();
            spawn("proxy-control", move || serve_control(&listener, &post))?;
        }
        if let Some(listener) = metrics {
            let post = post.clone();
            spawn("proxy-metrics", move || serve_metrics(&listener, &post))?;
        }
        Ok(Daemon {
            post,
            thread: Some(thread),
            control: options.control,
            metrics: metrics_addr,
            taken_over,
        })
    }

    /// Runs control commands here.
    pub fn commands(&self, commands: &[&str]) -> Vec<Result<String, String>> {
        self.post
            .commands(commands.iter().map(|text| (*text).into()).collect(), false)
    }

    /// The state of everything as JSON.
    pub fn state(&self) -> serde_json::Value {
        self.post
            .snapshot()
            .and_then(|snapshot| serde_json::to_value(snapshot).ok())
            .unwrap_or_default()
    }

    /// Where the metrics are served.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// How many connections were taken over from another process at the start.
    pub fn taken_over(&self) -> Option<usize> {
        self.taken_over
    }

    /// Waits until the proxy was told to stop, or has handed over.
    pub fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().unwrap_or(false)
        {
            // The name now belongs to the new process.
            self.control = None;
        }
    }

    /// A handle that runs a command from another thread, as a signal handler does.
    pub fn commander(&self) -> impl Fn(&str) -> Result<String, String> + Send + use<> {
        let post = self.post.clone();
        move |command| {
            let answers = post.commands(vec![command.into()], false);
            let none = || Err("the proxy is stopping".into());
            answers.into_iter().next().unwrap_or_else(none)
        }
    }

    /// A handle that can stop the proxy from another thread, as a signal handler does.
    pub fn stopper(&self) -> impl Fn() + Send + use<> {
        let post = self.post.clone();
        move || crate::net::stop(&post)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        crate::net::stop(&self.post);
        self.join();
        if let Some(path) = &self.control {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Sends commands to a running proxy.
pub fn request(path: &Path, request: &Request) -> Result<Vec<Answer>, String> {
    let failed = |error: std::io::Error| {
        format!(
            "proxy control socket {}: {error}; is 'lockstep proxy run' running?",
            path.display()
        )
    };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    let mut line = serde_json::to_vec(request).map_err(|error| error.to_string())?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .map_err(failed)?;
    serde_json::from_str(&answer).map_err(|error| format!("unreadable answer: {error}"))
}

/// A timetable holds `=`, a rate does not.
pub fn rate_option(text: &str) -> &'static str {
    match text.contains('=') {
        true => "schedule",
        false => "bwlimit",
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

fn open_control(path: &Path) -> Result<UnixListener, String> {
    let named = |error: std::io::Error| format!("control socket {}: {error}", path.display());
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(named)?;
    }
    if UnixStream::connect(path).is_ok() {
        return Err(format!(
            "another proxy already answers on {}",
            path.display()
        ));
    }
    // A socket that nobody answers on was left by a crash.
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).map_err(named)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660)).map_err(named)?;
    Ok(listener)
}

/// A process that has just handed over may still hold the address for a moment.
fn open_metrics(addr: SocketAddr) -> Result<TcpListener, String> {
    let end = Clock::now() + Duration::from_secs(5);
    loop {
        match TcpListener::bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && Clock::now() < end => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(error) => return Err(format!("metrics {addr}: {error}")),
        }
    }
}

/// Commands that change nothing: the socket's group may use them.
fn only_reads(command: &str) -> bool {
    let word = command.split_whitespace().next().unwrap_or_default();
    matches!(word, "" | "show" | "list" | "print" | "help" | "quit")
}

/// Only the same user, or root, may change anything, or have DRBD's data and the session keys.
fn may_change(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
}

fn serve_control(listener: &UnixListener, post: &Post) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        let post = post.clone();
        let _ = spawn("proxy-client", move || serve_client(stream, &post));
    }
}

fn serve_client(stream: UnixStream, post: &Post) {
    let Ok(mut out) = stream.try_clone() else {
        return;
    };
    let mut lines = BufReader::new(stream.take(REQUEST_MAX));
    let mut line = String::new();
    if lines.read_line(&mut line).is_err() || line.is_empty() {
        return;
    }
    let replies: Vec<Reply> = match serde_json::from_str::<Request>(&line) {
        Ok(request) if request.hand_over => {
            let result = match out.try_clone() {
                Ok(stream) if may_change(&stream) => post.hand_over(stream),
                Ok(_) => Err("only root and the proxy's own user may take over".into()),
                Err(error) => Err(error.to_string()),
            };
            match result {
                Ok(()) => return,
                Err(error) => vec![Err(error)],
            }
        }
        Ok(request) if !may_change(&out) && !request.commands.iter().all(|c| only_reads(c)) => {
            let refusal = "only root and the proxy's own user may change anything; others of its \
                           group may 'show', 'list' and 'print'";
            vec![Err(refusal.into())]
        }
        Ok(request) => post.commands(request.commands, request.json),
        Err(error) => vec![Err(format!("not a request: {error}"))],
    };
    let answers: Vec<Answer> = replies
        .into_iter()
        .map(|reply| match reply {
            Ok(text) => Answer { ok: true, text },
            Err(text) => Answer { ok: false, text },
        })
        .collect();
    if let Ok(mut text) = serde_json::to_vec(&answers) {
        text.push(b'\n');
        let _ = out.write_all(&text);
    }
}

fn serve_metrics(listener: &TcpListener, post: &Post) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        let _ = stream.set_write_timeout(Some(Duration::from_secs(2)));
        let mut line = String::new();
        let mut reader = BufReader::new((&stream).take(4096));
        if reader.read_line(&mut line).is_err() {
            continue;
        }
        let path = line.split_whitespace().nth(1).unwrap_or("");
        let body = match (path, post.snapshot()) {
            (_, None) => return,
            ("/metrics", Some(snapshot)) => Some((
                "text/plain; version=0.0.4",
                crate::metrics::prometheus(&snapshot),
            )),
            ("/status", Some(snapshot)) => Some((
                "application/json",
                serde_json::to_string::<Snapshot>(&snapshot).unwrap_or_default(),
            )),
            _ => None,
        };
        let text = match body {
            Some((kind, body)) => format!(
                "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
                 Connection: close\r\n\r\n{body}",
                body.len()
            ),
            None => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                .to_string(),
        };
        let _ = stream.write_all(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::only_reads;

    #[test]
    fn a_group_may_look_but_not_touch() {
        for command in [
            "show",
            "show hconnections",
            " print statistics",
            "list",
            "help",
            "",
        ] {
            assert!(only_reads(command), "{command}");
        }
        for command in [
            "add connection r0 a b c d",
            "del connection r0",
            "set memlimit r0 1G",
            "set plugin r0 0 lz4",
            "set loglevel debug",
            "shutdown",
            "showdown",
        ] {
            assert!(!only_reads(command), "{command}");
        }
    }
}
