//! `lockstep bench`: how Lockstep compares with the bare minimum on this machine.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_bench::run::{Plan, run as measure};
use lockstep_bench::stats::table;

const USAGE: &str = "\
Usage: lockstep bench [OPTIONS]

Measures Lockstep, the bare floor (two threads, io_uring, TCP) and the raw disk in turns and shows
the median of the rounds. 4 KiB random IO, protocol C, both nodes on this machine. The front ends
(NBD; as root also FUSE + loop) are measured over two nodes and alone, beside qemu-storage-daemon
where that is installed (its figure is in the raw column).

  --quick         one short round over small files; ends within 60 s
  --rounds N      rounds per row, default 5
  --seconds S     time of one measurement, default 1
  --file-mib N    size of each file, default 1024
  --dir DIR       where the files go, default the current directory
  --json          an array of objects {path, qd, floor_iops, raw_iops, iops, ratio, against, p50_us,
                  p99_us, cpu_us_per_io}";

/// Runs the command.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let (plan, json) = match parse(args) {
        Ok(Some(parsed)) => parsed,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(text) => {
            eprintln!("lockstep bench: {text}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match measure(&plan, |line| eprintln!("measuring: {line}")) {
        Ok(rows) if json => match serde_json::to_string_pretty(&rows) {
            Ok(text) => {
                println!("{text}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("lockstep bench: {error}");
                ExitCode::FAILURE
            }
        },
        Ok(rows) => {
            print!("{}", table(&rows));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lockstep bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: &[String]) -> Result<Option<(Plan, bool)>, String> {
    let mut plan = Plan {
        rounds: 5,
        time: Duration::from_secs(1),
        file_bytes: 1 << 30,
        ram_bytes: 256 << 20,
        directory: PathBuf::from("."),
    };
    let mut json = false;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--quick" => {
                plan.rounds = 1;
                plan.time = Duration::from_millis(400);
                plan.file_bytes = 128 << 20;
                plan.ram_bytes = 64 << 20;
            }
            "--json" => json = true,
            "--rounds" => plan.rounds = number(arg, value()?, 1, 1000)? as usize,
            "--seconds" => {
                let text = value()?;
                let seconds: f64 = text
                    .parse()
                    .map_err(|_| format!("{arg}: {text} is not a number"))?;
                if !(0.01..=3600.0).contains(&seconds) {
                    return Err(format!("{arg}: {text} is not between 0.01 and 3600"));
                }
                plan.time = Duration::from_secs_f64(seconds);
            }
            "--file-mib" => plan.file_bytes = number(arg, value()?, 8, 1 << 20)? << 20,
            "--dir" => plan.directory = PathBuf::from(value()?),
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown option {other}")),
        }
    }
    Ok(Some((plan, json)))
}

fn number(name: &str, text: &str, least: u64, most: u64) -> Result<u64, String> {
    match text.parse() {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        _ => Err(format!(
            "{name}: {text} is not a number from {least} to {most}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn wrong_arguments_are_named() {
        assert!(
            parse(&words("--rounds 0"))
                .unwrap_err()
                .contains("--rounds")
        );
        assert!(
            parse(&words("--seconds"))
                .unwrap_err()
                .contains("needs a value")
        );
        assert!(parse(&words("--fast")).unwrap_err().contains("--fast"));
        assert!(parse(&words("--help")).unwrap().is_none());
        let (plan, json) = parse(&words("--quick --json --rounds 3")).unwrap().unwrap();
        assert!(json && plan.rounds == 3);
    }
}
