//! The one binary: its name, or else the first argument, selects the role.

mod bench;
mod demo;
mod drbdadm;
mod drbdmeta;
mod drbdsetup;
mod inspect;
mod lockstepd;
mod proxy;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: lockstep COMMAND [ARGS]

  bench      measures Lockstep against the bare minimum on this machine
  demo       three nodes, a database, and the Primary killed in mid-load
  drbdadm    brings resources to the state of the configuration (also by that name)
  drbdmeta   creates, shows and repairs metadata (also by that name)
  drbdsetup  changes and shows the state of this node's resources (also by that name)
  inspect    shows files and traffic in the formats that Lockstep reads and writes
  lockstepd  runs this node (also by that name)
  proxy      WAN proxy, its control, planning (also drbd-proxy and drbd-proxy-ctl by name)";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let name = words
        .first()
        .and_then(|word| word.rsplit('/').next())
        .unwrap_or_default();
    match (name, words.get(1..).unwrap_or_default()) {
        ("drbdadm", _) => drbdadm::run(&words),
        ("drbdmeta", args) => drbdmeta::run(args),
        ("drbdsetup", args) => drbdsetup::run(args),
        ("drbd-proxy", args) => proxy::run_daemon(args),
        ("drbd-proxy-ctl", args) => proxy::run_ctl(args),
        ("lockstepd", args) => lockstepd::run(args),
        (_, [command, rest @ ..]) => run(command, rest, &words),
        (_, []) => usage_error("lockstep: say what to do"),
    }
}

fn run(command: &str, args: &[String], words: &[String]) -> ExitCode {
    match command {
        "drbdadm" => drbdadm::run(&words[1..]),
        "drbdmeta" => drbdmeta::run(args),
        "bench" => bench::run(args),
        "demo" => demo::run(args),
        "drbdsetup" => drbdsetup::run(args),
        "lockstepd" => lockstepd::run(args),
        "inspect" => inspect::run(args),
        "proxy" => proxy::run(args),
        "--help" | "-h" | "help" => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        other => usage_error(&format!("lockstep: unknown command '{other}'")),
    }
}

fn usage_error(problem: &str) -> ExitCode {
    eprintln!("{problem}\n\n{USAGE}");
    ExitCode::from(2)
}
