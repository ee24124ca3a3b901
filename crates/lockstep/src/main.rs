//! The one binary: the first argument selects the role.

mod inspect;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: lockstep COMMAND [ARGS]

  inspect   shows files and traffic in the formats that Lockstep reads and writes";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((command, rest)) => run(command, rest),
        None => usage_error("lockstep: say what to do"),
    }
}

fn run(command: &str, args: &[String]) -> ExitCode {
    match command {
        "inspect" => inspect::run(args),
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
