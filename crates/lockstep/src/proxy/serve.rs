//! `lockstep proxy run`: the daemon in the foreground.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lockstep_proxy::{
    Daemon, IdentitySource, LogLevel, Options, Security, SessionOption, log_filter, plan,
    rate_option,
};

use super::confine::{User, forbid_other_calls};
use super::identity::IdentityOptions;
use super::{default_socket, options};

const USAGE: &str = "\
Usage: lockstep proxy run [OPTIONS]

Identity, one of:
  --secret-file FILE[=CONNECTIONS] [--secret-file ...]
                         both ends hold the same secret ('lockstep proxy keygen --secret')
  --key-file FILE --peer-key HEX[=CONNECTIONS] [--peer-key ...]
                         own private key, public keys of the peers ('lockstep proxy keygen')
  --cert FILE --cert-key FILE --ca FILE [--peer-name NAME[=CONNECTIONS] ...]
                         X.509 certificates of a private authority, and names in those of
                         the peers (the dialled address)
  --peer-file FILE       more peers than --peer-key or --peer-name give, one a line
  --insecure             no encryption, no authentication: only inside a VPN
                         CONNECTIONS, such as r0-bob-alice,web-*: what that peer may use, or
                         what that secret is for; with several each needs it
  SIGHUP, or 'reload' of drbd-proxy-ctl, reads the files again, as the user that the
  proxy runs as: new carriers use them

Resources:
  --memory-max SIZE      memory of all buffers, at least 4M (1G)
  --memlimit-min SIZE    what of it each connection may always have, 1M to 1G (1M)
  --workers N            codec threads (one per core)
  --rate RATE            WAN bytes per second of the daemon, or a timetable
                         (mon-fri/08:00-18:00=2M,*=0; UTC)
  --burst SIZE           what may pass at once after a pause, 64K to 1G (20 ms of the rate)
  --session-rate IP=RATE, --session-burst IP=SIZE
                         the same for all connections with the peer proxy of one outside IP
  --spill-dir DIR --spill-limit SIZE
                         disk space for what does not fit into memory

Other:
  --config FILE          control commands to run at the start, one a line
  --take-over            continue the connections of the proxy that runs now, without
                         touching DRBD's sockets; without one, start as usual
  --user USER            when started as root: become this user, keeping of root's rights
                         only that to ports below 1024
  --no-seccomp           do not forbid the system calls that a proxy has no use for
  --socket PATH          control socket (/run/lockstep-proxy/proxy.sock)
  --metrics IP:PORT      Prometheus metrics at /metrics, state at /status
  --log LEVEL            off, error, warn, info, debug or trace, also for single modules:
                         info,lockstep_proxy::net=debug (info)
  --version";

/// What the command line says.
struct Asked {
    options: Options,
    /// Files with secrets that others can read.
    exposed: Vec<String>,
    config: Option<PathBuf>,
    log: String,
    user: Option<String>,
    /// System calls without a use here are forbidden.
    seccomp: bool,
}

/// Runs the daemon until it is told to shut down.
pub(super) fn run(args: &[String]) -> ExitCode {
    match args.first().map(String::as_str) {
        Some("--help" | "-h" | "help") => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Some("--version" | "-V") => {
            // Management software reads the first line; the command set is that of version 4.
            println!("drbd-proxy 4.0.0");
            println!("Lockstep proxy {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let asked = match parse(args) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("lockstep proxy run: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match serve(asked) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep proxy run: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Begins to log; the level can be changed later.
fn begin_log(level: &str) -> Result<LogLevel, String> {
    let level = log_filter(level).map_err(|error| format!("--log: {error}"))?;
    let filter = |level: &str| {
        tracing_subscriber::EnvFilter::try_new(level)
            .map_err(|error| format!("log level '{level}': {error}"))
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter(&level)?)
        .with_writer(std::io::stderr)
        .with_filter_reloading();
    let handle = log.reload_handle();
    let _ = log.try_init();
    Ok(LogLevel::new(&level, move |level| {
        let filter = filter(level)?;
        handle.reload(filter).map_err(|error| error.to_string())
    }))
}

fn serve(mut asked: Asked) -> Result<(), String> {
    asked.options.log = Some(begin_log(&asked.log)?);
    let commands = asked
        .config
        .as_deref()
        .map(read_config)
        .transpose()?
        .unwrap_or_default();
    for file in &asked.exposed {
        tracing::warn!(
            file,
            "every user of this machine may read a secret; chmod o-r it"
        );
    }
    if matches!(asked.options.security, Security::Insecure) {
        tracing::warn!("carriers are neither encrypted nor authenticated");
    }
    crate::open_files::raise_limit();
    confine(&asked)?;
    let daemon = Daemon::start(asked.options)?;
    follow_signals(&daemon)?;
    if let Some(count) = daemon.taken_over() {
        tracing::info!(count, "connections taken over; --config is not read again");
        lockstep_proxy::tell_ready();
        daemon.wait();
        return Ok(());
    }
    for (number, command) in commands {
        match daemon.commands(&[&command]).pop() {
            Some(Ok(note)) if note.is_empty() => {}
            Some(Ok(note)) => tracing::info!("{}", note.trim_end()),
            Some(Err(error)) => {
                let file = asked.config.as_deref().unwrap_or(Path::new("")).display();
                return Err(format!("{file}, line {number}, '{command}': {error}"));
            }
            None => return Err("the proxy has stopped".into()),
        }
    }
    tracing::info!("the proxy is ready");
    lockstep_proxy::tell_ready();
    daemon.wait();
    Ok(())
}

/// An orderly end tells the peers at once that nothing more comes. SIGHUP reads the identity again.
fn follow_signals(daemon: &Daemon) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("taking signals: {error}");
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let wanted = [SIGTERM, SIGINT, SIGHUP];
    let mut signals = signal_hook::iterator::Signals::new(wanted).map_err(failed)?;
    let (stop, command) = (daemon.stopper(), daemon.commander());
    let wait = move || {
        for signal in signals.forever() {
            if signal == SIGHUP {
                // The daemon logs what came of it.
                let _ = command("reload");
                continue;
            }
            tracing::info!(signal, "asked to end");
            stop();
            return;
        }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(wait).map(|_| ()).map_err(failed)
}

/// Gives up what a proxy does not need; the last thing before other threads start.
fn confine(asked: &Asked) -> Result<(), String> {
    match &asked.user {
        Some(name) => {
            let passwd = std::fs::read_to_string("/etc/passwd")
                .map_err(|error| format!("/etc/passwd: {error}"))?;
            let user = User::find(name, &passwd)?;
            if let Some(socket) = &asked.options.control {
                user.make_directory_of(socket)?;
            }
            user.become_it()?;
        }
        None if rustix::process::geteuid().is_root() => {
            tracing::warn!("a proxy needs no root: give --user, or start it as another user");
        }
        None => {}
    }
    if asked.seccomp && !forbid_other_calls()? {
        tracing::warn!("system calls are not restricted on this kind of processor");
    }
    Ok(())
}

fn read_config(path: &Path) -> Result<Vec<(usize, String)>, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("configuration {}: {error}", path.display()))?;
    Ok(text
        .lines()
        .enumerate()
        .map(|(at, line)| {
            (
                at + 1,
                line.split('#')
                    .next()
                    .unwrap_or_default()
                    .trim()
                    .to_string(),
            )
        })
        .filter(|(_, line)| !line.is_empty())
        .collect())
}

/// `IP=RATE` or `IP=SIZE`.
fn session(name: &str, text: &str) -> Result<SessionOption, String> {
    let expected = || format!("--{name} '{text}': IP=VALUE, with the peer's outside IP");
    let (peer, value) = text.split_once('=').ok_or_else(expected)?;
    peer.parse::<std::net::IpAddr>().map_err(|_| expected())?;
    let option = match name {
        "session-rate" => rate_option(value),
        _ => "burst",
    };
    Ok(SessionOption {
        peer: peer.into(),
        option: option.into(),
        value: value.into(),
    })
}

fn parse(args: &[String]) -> Result<Asked, String> {
    let mut found = Options {
        control: Some(default_socket()),
        ..Options::default()
    };
    let mut identity = IdentityOptions::default();
    let (mut config, mut log) = (None, "info".to_string());
    let (mut user, mut seccomp) = (None, true);
    for (name, value) in options(args, &["insecure", "take-over", "no-seccomp"])? {
        if identity.take(&name, &value) {
            continue;
        }
        match name.as_str() {
            "user" => user = Some(value.clone()),
            "no-seccomp" => seccomp = false,
            "take-over" => found.take_over = true,
            "memlimit-min" => found.memlimit_min_bytes = plan::parse_size(&value)?,
            "memory-max" => found.memory_max_bytes = plan::parse_size(&value)?,
            "workers" => {
                found.workers = value
                    .parse()
                    .map_err(|_| format!("--workers '{value}' is not a number"))?;
            }
            "rate" => found.rate = value.clone(),
            "burst" => found.burst = value.clone(),
            "session-rate" | "session-burst" => found.sessions.push(session(&name, &value)?),
            "spill-dir" => found.spill_directory = Some(PathBuf::from(&value)),
            "spill-limit" => found.spill_limit_bytes = plan::parse_size(&value)?,
            "config" => config = Some(PathBuf::from(&value)),
            "socket" => found.control = Some(PathBuf::from(&value)),
            "metrics" => {
                let addr = value
                    .parse()
                    .map_err(|_| format!("--metrics '{value}': IP:PORT"))?;
                found.metrics = Some(addr);
            }
            "log" => log = value.clone(),
            _ => return Err(format!("unknown option --{name}")),
        }
    }
    if found.spill_directory.is_some() != (found.spill_limit_bytes > 0) {
        return Err("--spill-dir and --spill-limit belong together".into());
    }
    found.security = identity.read()?;
    let exposed = identity.exposed();
    found.identity = Some(IdentitySource::new(move || identity.read()));
    Ok(Asked {
        options: found,
        exposed,
        config,
        log,
        user,
        seccomp,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        parse(&words).err().unwrap_or_default()
    }

    #[test]
    fn an_identity_is_always_asked_for() {
        assert!(problem("--workers 2").contains("no identity"));
        assert!(problem("--insecure --cert a").contains("belong together"));
        assert!(problem("--insecure --key-file /dev/null").contains("one identity"));
        assert!(problem("--insecure --memory-max x").contains("not a size"));
        assert!(problem("--insecure --frob 1").contains("unknown option --frob"));
        assert!(problem("--secret-file /nonexistent/file").contains("/nonexistent/file"));
        assert!(problem("--secret-file /nonexistent/file=r0").contains("/nonexistent/file: "));
        assert!(problem("--secret-file /dev/null=r0 --secret-file /dev/null=r1").is_empty());
        assert!(problem("--insecure").is_empty());
        for alone in ["--spill-dir /tmp", "--spill-limit 1G", "--spill-limit 0"] {
            let text = problem(&format!("--insecure {alone}"));
            let fine = alone.ends_with('0') && text.is_empty();
            assert!(fine || text.contains("belong together"), "{alone}: {text}");
        }
        assert!(problem("--insecure --spill-dir /tmp --spill-limit 1G").is_empty());
        assert!(problem("--insecure --session-rate 2M").contains("IP=VALUE"));
        assert!(problem("--insecure --session-burst bob=2M").contains("outside IP"));
        assert!(problem("--insecure --session-rate fd00::2=mon=2M,*=0").is_empty());
    }
}
