//! `lockstepd`: the command line of the node's daemon.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_daemon::lockstepd::{DaemonConfig, run as run_daemon};
use lockstep_daemon::node::NodeConfig;
use lockstep_daemon::place::Place;
use lockstep_format::wire::{PROTOCOL_MAX, PROTOCOL_MAX_84, PROTOCOL_MIN, PROTOCOL_MIN_9};
use lockstep_front::block::DeviceKind;

const USAGE: &str = "\
Usage: lockstepd [--dir DIR] [--shards N] [--pool-mib N] [--no-device] [--device KIND]
                 [--hold SECONDS]
                 [--max-parallel-resyncs N] [--metrics ADDRESS] [--nbd-listen ADDRESS]...
                 [--protocol-max N]

  --dir DIR      the node's directory (default: LOCKSTEP_DIR, else /run/lockstep)
  --shards N     threads that replicate (default: one per processor, at most 2)
  --pool-mib N   memory for data of each of them in MiB, 16 to 65536 (default 256)
  --no-device    no mountable devices, only NBD
  --device KIND  mountable devices of this kind: ublk, fuse (a loop device on a file over FUSE), or
                 auto, which is ublk where /dev/ublk-control exists and else fuse (default auto)
  --hold S       if this daemon is killed, the I/O of its devices waits so many seconds (1 to
                 86400) for the next one instead of failing at once
  --max-parallel-resyncs N  volumes of this node that resync or verify at the same time (default
                 0: no limit)
  --metrics ADDRESS  gives out metrics by HTTP there, such as 127.0.0.1:9942 (default: nowhere)
  --nbd-listen ADDRESS  serves all volumes by NBD there as well, such as 10.0.0.1:10809, without
                 authentication and encryption: for trusted networks only; may be repeated
  --protocol-max N  newest protocol version that peers are offered, 86 to 124 (default 124)

One daemon runs per directory. SIGTERM ends it in order. Logs go to standard error; LOCKSTEP_LOG
sets the level (error, warn, info, debug, trace; default info).";

/// Runs `lockstepd ARGS` to the daemon's end.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let config = match parse(args) {
        Ok(Some(config)) => config,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("lockstepd: {problem}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let level = std::env::var("LOCKSTEP_LOG").unwrap_or_else(|_| "info".to_owned());
    let filter = tracing_subscriber::EnvFilter::new(level);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    crate::open_files::raise_limit();
    match run_daemon(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstepd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `None` asks for the help.
fn parse(args: &[String]) -> Result<Option<DaemonConfig>, String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut dir = None;
    let mut new_session = false;
    let mut metrics = None;
    let mut nbd = Vec::new();
    let mut node = NodeConfig {
        shards: processors.min(2),
        pool_bytes: 256 << 20,
        devices: rustix::process::geteuid().is_root()
            && (Path::new("/dev/fuse").exists() || lockstep_front::ublk::is_present()),
        hold: None,
        device_kind: DeviceKind::Auto,
        max_parallel_resyncs: 0,
        protocol_max: PROTOCOL_MAX,
        find_handler: crate::drbdadm::handler_entry,
    };
    let mut args = args.iter();
    while let Some(word) = args.next() {
        let (name, mut value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.as_str(), None),
        };
        let mut needed = || {
            value
                .take()
                .or_else(|| args.next().cloned())
                .ok_or(format!("{name} needs a value"))
        };
        match name {
            "--dir" => dir = Some(needed()?),
            "--shards" => node.shards = number(name, &needed()?, 1, 64)?,
            "--pool-mib" => node.pool_bytes = number(name, &needed()?, 16, 65_536)? << 20,
            "--metrics" => {
                let text = needed()?;
                let wrong = || format!("--metrics {text}: ADDRESS:PORT is needed");
                metrics = Some(text.parse().map_err(|_| wrong())?);
            }
            "--nbd-listen" => {
                let text = needed()?;
                let wrong = || format!("--nbd-listen {text}: ADDRESS:PORT is needed");
                nbd.push(text.parse().map_err(|_| wrong())?);
            }
            "--protocol-max" => {
                let text = needed()?;
                let most =
                    number(name, &text, PROTOCOL_MIN as usize, PROTOCOL_MAX as usize)? as u32;
                if (PROTOCOL_MAX_84 + 1..PROTOCOL_MIN_9).contains(&most) {
                    return Err(format!("--protocol-max {text}: nobody speaks 102 to 117"));
                }
                node.protocol_max = most;
            }
            "--no-device" => node.devices = false,
            "--device" => {
                node.device_kind = match needed()?.as_str() {
                    "auto" => DeviceKind::Auto,
                    "ublk" => DeviceKind::Ublk,
                    "fuse" => DeviceKind::Fuse,
                    other => return Err(format!("--device {other}: auto, ublk or fuse is needed")),
                };
            }
            "--hold" => {
                let seconds = number(name, &needed()?, 1, 86_400)?;
                node.hold = Some(Duration::from_secs(seconds as u64));
            }
            "--max-parallel-resyncs" => {
                node.max_parallel_resyncs = number(name, &needed()?, 0, 1 << 20)?;
            }
            "--new-session" => new_session = true,
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown option '{other}'")),
        }
    }
    let place = Place::find(dir.as_deref().map(Path::new));
    Ok(Some(DaemonConfig {
        place,
        new_session,
        node,
        metrics,
        nbd,
    }))
}

fn number(name: &str, text: &str, min: usize, max: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(format!(
            "{name} {text}: a number from {min} to {max} is needed"
        )),
    }
}
