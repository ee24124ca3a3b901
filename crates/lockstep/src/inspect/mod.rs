//! `lockstep inspect`: shows files and traffic in the formats that Lockstep reads and writes.

mod control;
mod fields;
mod meta;
mod pcap;
mod session;
mod tcp;
mod wire;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: lockstep inspect wire [--json | --summary] FILE...
       lockstep inspect meta [--index INDEX] IMAGE
       lockstep inspect control [--full] COMMAND [ARGUMENT...]

  wire   lists the replication packets in captures (pcap, plain or gzip)
  meta   prints the metadata on a device or in a file, and what is wrong in it
  control  runs a command and shows on standard error what it and its children say to the daemon
           and hear from it; --full does not cut long lines, secrets are hidden in any case

Options of wire:
  --json      one JSON object per packet; the summary goes to standard error
  --summary   no packets, only problems and the summary

Options of meta:
  --index     internal, flex-external or a slot number; else where metadata is found

Exit code of control: that of the command.
Exit code of meta: 0 if nothing is wrong, 1 if something is.
Exit code of wire: 0 if every packet decodes and encodes to the same bytes, 1 if one does not or
a file cannot be read. Exit code 2 for wrong usage.";

/// Runs `lockstep inspect ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    match args.split_first() {
        Some((command, rest)) if command == "wire" => wire::run(rest),
        Some((command, rest)) if command == "meta" => meta::run(rest),
        Some((command, rest)) if command == "control" => control::run(rest),
        Some((flag, _)) if flag == "--help" || flag == "-h" => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Some((other, _)) => usage_error(&format!("lockstep inspect: unknown format '{other}'")),
        None => usage_error("lockstep inspect: say what to inspect"),
    }
}

/// Prints what was wrong and how it would be right.
fn usage_error(problem: &str) -> ExitCode {
    eprintln!("{problem}\n\n{USAGE}");
    ExitCode::from(2)
}
