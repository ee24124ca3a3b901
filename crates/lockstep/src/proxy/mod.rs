//! `lockstep proxy`: runs the WAN proxy, talks to it, plans for it, measures it.

mod confine;
mod ctl;
mod identity;
mod serve;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use lockstep_proxy::BenchOptions;
use lockstep_proxy::plan::{self, Plan};

const USAGE: &str = "\
Usage: lockstep proxy run [OPTIONS]          runs the proxy in the foreground (also: drbd-proxy)
       lockstep proxy ctl [OPTIONS] [WORDS]  controls it (also: drbd-proxy-ctl)
       lockstep proxy top [OPTIONS]          live view in the terminal
       lockstep proxy plan OPTIONS           settings of DRBD and proxy for a line
       lockstep proxy bench [OPTIONS]        measures codecs and the whole path on this machine
       lockstep proxy keygen [--secret]      makes a key pair, or a shared secret

Options of plan:
  --bandwidth BITS     such as 20mbit        --change-rate BYTES  such as 5MiB/s
  --rtt TIME           such as 80ms          --ratio N            expected compression (1)
  --max-lag SECONDS    accepted lag (20)     --outage SECONDS     tolerated interruption (20)

Options of bench:
  --only LIST          of codecs,fill,replay,latency,connections,cut,spill
                       (all; spill only with --spill-dir)
  --plugin PLUGIN      what codecs measures, such as 'zstd level 5'; may be repeated
  --file FILE          sample data (default: made-up text, noise and zeros)
  --bytes SIZE         how much of it (64M)
  --fill SIZE          written into the buffer (1G)
  --replay SIZE        size of the published example (3712983040); its times shrink with it
  --line SIZE          bytes per second of its line (220000000)
  --seconds N          how long codecs and control latency are measured (10)
  --connections N      that share one pool (100)
  --cut SECONDS        length of the cut (20)
  --spill-dir DIR      --spill SIZE          goes through the spill disk (1G)
  --json               for programs

'lockstep proxy run --help' and 'lockstep proxy ctl help' list the rest.";

/// Runs `lockstep proxy ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let Some((command, rest)) = args.split_first() else {
        return usage_error("lockstep proxy: say what to do");
    };
    match command.as_str() {
        "run" => serve::run(rest),
        "ctl" => ctl::run(rest),
        "top" => top::run(rest),
        "plan" => report(make_plan(rest)),
        "bench" => bench(rest),
        "keygen" => report(keygen(rest)),
        "--help" | "-h" | "help" => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        other => usage_error(&format!("lockstep proxy: unknown command '{other}'")),
    }
}

/// Runs as `drbd-proxy`.
pub(crate) fn run_daemon(args: &[String]) -> ExitCode {
    serve::run(args)
}

/// Runs as `drbd-proxy-ctl`.
pub(crate) fn run_ctl(args: &[String]) -> ExitCode {
    ctl::run(args)
}

/// Where the daemon listens for its tools, unless told otherwise.
fn default_socket() -> PathBuf {
    if let Some(path) = std::env::var_os("LOCKSTEP_PROXY_SOCKET") {
        return path.into();
    }
    match std::env::var_os("LOCKSTEP_DIR") {
        Some(directory) => PathBuf::from(directory).join("proxy.sock"),
        None => "/run/lockstep-proxy/proxy.sock".into(),
    }
}

/// `--name value` or `--name=value`, in order; words without `--` have no name.
fn options(args: &[String], flags: &[&str]) -> Result<Vec<(String, String)>, String> {
    let mut out = Vec::new();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix("--") else {
            return Err(format!("unexpected word '{word}'"));
        };
        if let Some((name, value)) = name.split_once('=') {
            out.push((name.into(), value.into()));
        } else if flags.contains(&name) {
            out.push((name.into(), String::new()));
        } else {
            let value = words
                .next()
                .ok_or_else(|| format!("--{name} needs a value"))?;
            out.push((name.into(), value.clone()));
        }
    }
    Ok(out)
}

fn make_plan(args: &[String]) -> Result<String, String> {
    let (mut bandwidth, mut rtt) = (None, None);
    let (mut change_rate, mut ratio, mut max_lag_s, mut outage_s) = (0, 1.0, 20, 20);
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|_| format!("'{text}' is not a number"))
    };
    for (name, value) in options(args, &[])? {
        match name.as_str() {
            "bandwidth" => bandwidth = Some(plan::parse_bits(&value)?),
            "rtt" => rtt = Some(plan::parse_ms(&value)?),
            "change-rate" => change_rate = plan::parse_size(&value)?,
            "ratio" => {
                ratio = value
                    .parse()
                    .map_err(|_| format!("'{value}' is not a number"))?;
            }
            "max-lag" => max_lag_s = number(&value)?,
            "outage" => outage_s = number(&value)?,
            _ => return Err(format!("unknown option --{name}")),
        }
    }
    let plan = Plan::new(plan::Link {
        bandwidth_bits: bandwidth.ok_or("--bandwidth is needed, such as 20mbit")?,
        rtt_ms: rtt.ok_or("--rtt is needed, such as 80ms")?,
        change_rate,
        ratio,
        max_lag_s,
        outage_s,
    })?;
    Ok(plan.text())
}

fn bench(args: &[String]) -> ExitCode {
    let (options, json) = match bench_options(args) {
        Ok(found) => found,
        Err(error) => return usage_error(&format!("lockstep proxy bench: {error}")),
    };
    match lockstep_proxy::bench(&options) {
        Ok(found) if json => print!("{}", found.json()),
        Ok(found) => print!("{}", found.text()),
        Err(error) => {
            eprintln!("lockstep proxy bench: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn bench_options(args: &[String]) -> Result<(BenchOptions, bool), String> {
    let (mut found, mut json) = (BenchOptions::default(), false);
    for (name, value) in options(args, &["json"])? {
        let number = || {
            let number = value.parse::<u16>();
            number.map_err(|_| format!("--{name} '{value}' is not a number"))
        };
        match name.as_str() {
            "only" => found.only = value.split(',').map(String::from).collect(),
            "plugin" => found.plugins.push(value),
            "file" => found.file = Some(PathBuf::from(&value)),
            "bytes" => found.sample_bytes = plan::parse_size(&value)?,
            "fill" => found.fill_bytes = plan::parse_size(&value)?,
            "replay" => found.replay_bytes = plan::parse_size(&value)?,
            "line" => found.link_bytes_s = plan::parse_size(&value)?.max(1),
            "seconds" => found.seconds = f64::from(number()?),
            "connections" => found.connections = number()?,
            "cut" => found.cut_s = u64::from(number()?),
            "spill-dir" => found.spill_directory = Some(PathBuf::from(&value)),
            "spill" => found.spill_bytes = plan::parse_size(&value)?,
            "json" => json = true,
            _ => return Err(format!("unknown option --{name}")),
        }
    }
    Ok((found, json))
}

fn keygen(args: &[String]) -> Result<String, String> {
    match args {
        [] => {
            let (private, public) = lockstep_proxy::generate_keys()?;
            Ok(format!(
                "private {private}\npublic  {public}\n\
                 # The private key belongs into a file for --key-file (mode 0600); the public one \
                 is the peer's --peer-key.\n"
            ))
        }
        [flag] if flag == "--secret" => Ok(lockstep_proxy::generate_secret()? + "\n"),
        _ => Err("keygen knows only --secret".into()),
    }
}

fn report(result: Result<String, String>) -> ExitCode {
    match result {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lockstep proxy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage_error(problem: &str) -> ExitCode {
    eprintln!("{problem}\n\n{USAGE}");
    ExitCode::from(2)
}
