//! `lockstep bench`: how Lockstep compares with the bare minimum on this machine.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use lockstep_bench::run::{Plan, run as measure};
use lockstep_bench::stats::table;
use lockstep_bench::{clusters, extents, scale};
use serde::Serialize;

const USAGE: &str = "\
Usage: lockstep bench [WHAT] [OPTIONS]

Measures Lockstep, the bare floor (two threads, io_uring, TCP) and the raw disk in turns and shows
the median of the rounds. 4 KiB random IO, protocol C, both nodes on this machine. The front ends
(NBD; as root also FUSE + loop) are measured over two nodes and alone, beside qemu-storage-daemon
where that is installed (its figure is in the raw column).

WHAT measures something else instead:
  read-balancing  random reads through two nodes by each policy, the local disk throttled to half
                  (raw: prefer-local)
  client          a client without a disk (raw: a storage node of the same cluster)
  replicas        three replicas (raw: two)
  resync          a full resync, in MiB/s beside disks and link
  extents         a write to a cold extent of the activity log beside one durable write
  promote         promotions in a cluster of three, in microseconds
  scale           many idle resources in one daemon

  --quick         one short round over small files; ends within 60 s
  --rounds N      rounds per row, default 5
  --seconds S     time of one measurement, default 1
  --file-mib N    size of each file, default 1024
  --dir DIR       where the files go, default the current directory
  --resources N   resources of `scale`, default 10000
  --json          an array of objects; {path, qd, floor_iops, raw_iops, iops, ratio, against, p50_us,
                  p99_us, cpu_us_per_io} but for resync, extents, promote and scale";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topic {
    Paths,
    ReadBalancing,
    Client,
    Replicas,
    Resync,
    Extents,
    Promote,
    Scale,
}

impl Topic {
    const NAMED: [(&str, Topic); 7] = [
        ("read-balancing", Topic::ReadBalancing),
        ("client", Topic::Client),
        ("replicas", Topic::Replicas),
        ("resync", Topic::Resync),
        ("extents", Topic::Extents),
        ("promote", Topic::Promote),
        ("scale", Topic::Scale),
    ];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
struct Wish {
    topic: Topic,
    plan: Plan,
    resources: u32,
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let wish = match parse(args) {
        Ok(Some(wish)) => wish,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(text) => {
            eprintln!("lockstep bench: {text}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match wish.measure() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lockstep bench: {error}");
            ExitCode::FAILURE
        }
    }
}

impl Wish {
    fn measure(&self) -> io::Result<String> {
        let plan = &self.plan;
        let progress = |line: &str| eprintln!("measuring: {line}");
        match self.topic {
            Topic::Paths => self.show(&measure(plan, progress)?, table),
            Topic::ReadBalancing => self.show(&clusters::read_balancing(plan, progress)?, table),
            Topic::Client => self.show(&clusters::client(plan, progress)?, table),
            Topic::Replicas => self.show(&clusters::replicas(plan, progress)?, table),
            Topic::Resync => {
                let rows = clusters::resync(plan, progress)?;
                self.show(&rows, clusters::resync_table)
            }
            Topic::Extents => {
                let rows = extents::extents(plan, progress)?;
                self.show(&rows, extents::extents_table)
            }
            Topic::Promote => {
                let rows = clusters::promote(plan, progress)?;
                self.show(&rows, clusters::change_table)
            }
            Topic::Scale => {
                // Each connection takes several sockets.
                crate::open_files::raise_limit();
                let plan = scale::Plan {
                    resources: self.resources,
                    idle: plan.time * 10,
                    directory: plan.directory.clone(),
                };
                self.show(&scale::run(&plan, progress)?, scale::table)
            }
        }
    }

    fn show<R: Serialize>(&self, rows: &[R], table: fn(&[R]) -> String) -> io::Result<String> {
        if !self.json {
            return Ok(table(rows));
        }
        let text = serde_json::to_string_pretty(rows)?;
        Ok(text + "\n")
    }
}

fn parse(args: &[String]) -> Result<Option<Wish>, String> {
    let (mut topic, mut resources) = (Topic::Paths, 10_000);
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
            "--resources" => resources = number(arg, value()?, 1, 16_384)? as u32,
            "--help" | "-h" => return Ok(None),
            other => match Topic::NAMED.iter().find(|(name, _)| *name == other) {
                Some((_, named)) if topic == Topic::Paths => topic = *named,
                Some(_) => return Err(format!("{other}: one thing is measured at a time")),
                None if other.starts_with('-') => return Err(format!("unknown option {other}")),
                None => return Err(format!("{other}: nothing of this name is measured")),
            },
        }
    }
    Ok(Some(Wish {
        topic,
        plan,
        resources,
        json,
    }))
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
        for unknown in ["speed", "client resync"] {
            let wrong = unknown.split(' ').next_back().unwrap();
            assert!(parse(&words(unknown)).unwrap_err().contains(wrong));
        }
        let wish = parse(&words("--quick --json --rounds 3")).unwrap().unwrap();
        assert!(wish.json && wish.plan.rounds == 3 && wish.topic == Topic::Paths);
        let wish = parse(&words("scale --resources 5")).unwrap().unwrap();
        assert!(wish.topic == Topic::Scale && wish.resources == 5);
    }
}
