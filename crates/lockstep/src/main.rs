//! The one binary: its name, or else the first argument, selects the role.

mod bench;
mod console;
mod demo;
mod device_usage;
mod drbdadm;
mod drbdmeta;
mod drbdsetup;
mod hold;
mod inspect;
mod lockstepd;
mod open_files;
mod proxy;
mod words;

use std::process::ExitCode;

/// The commands with what they do.
pub(crate) const COMMANDS: &[(&str, &str)] = &[
    (
        "status",
        "the resources as a tree; why a state is not good and what to do",
    ),
    (
        "explain",
        "generations, quorum, and who waits for whom of one resource",
    ),
    ("top", "requests, their times, and resyncs, live"),
    (
        "recover",
        "shows what each side of a split brain would lose, and ends it",
    ),
    (
        "inspect",
        "shows files and traffic in the formats that Lockstep reads and writes",
    ),
    (
        "drbdadm",
        "brings resources to the state of the configuration (also by that name)",
    ),
    (
        "drbdmeta",
        "creates, shows and repairs metadata (also by that name)",
    ),
    (
        "drbdsetup",
        "changes and shows the state of this node's resources (also by that name)",
    ),
    ("lockstepd", "runs this node (also by that name)"),
    (
        "proxy",
        "WAN proxy, its control, planning (also drbd-proxy and drbd-proxy-ctl by name)",
    ),
    (
        "bench",
        "measures Lockstep against the bare minimum on this machine",
    ),
    (
        "demo",
        "three nodes, a database, and the Primary killed in mid-load",
    ),
    (
        "proc",
        "prints the state as /proc/drbd of DRBD 8.4 does, for programs that read it",
    ),
    ("completions", "prints shell completions: bash, zsh, fish"),
    ("man", "writes manual pages into a directory"),
];

fn usage() -> String {
    let mut text = String::from("Usage: lockstep COMMAND [ARGS]\n");
    for (name, what) in COMMANDS {
        text.push_str(&format!("\n  {name:<12}{what}"));
    }
    text
}

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
        "hold" => hold::run(args),
        "device-usage" => device_usage::run(args),
        "inspect" => inspect::run(args),
        "proxy" => proxy::run(args),
        "status" | "explain" | "top" | "recover" | "proc" => console::run(command, args),
        "completions" | "man" => words::run(command, args),
        "--help" | "-h" | "help" => {
            println!("{}", usage());
            ExitCode::SUCCESS
        }
        other => usage_error(&format!("lockstep: unknown command '{other}'")),
    }
}

fn usage_error(problem: &str) -> ExitCode {
    eprintln!("{problem}\n\n{}", usage());
    ExitCode::from(2)
}
