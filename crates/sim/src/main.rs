//! Command line of the simulator.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use lockstep_sim::swarm::{FAULTS, Limits, run};

/// The deterministic simulator of Lockstep's core.
#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Subcommand)]
enum Sub {
    /// Runs the worlds of seeds.
    Run {
        /// From (inclusive) to (exclusive): `0..1000`.
        #[arg(long, conflicts_with = "seed")]
        seeds: Option<String>,
        /// One seed.
        #[arg(long)]
        seed: Option<u64>,
        /// Number of nodes instead of what the seed says.
        #[arg(long)]
        nodes: Option<usize>,
        /// Only these faults, separated by commas.
        #[arg(long)]
        faults: Option<String>,
        /// At most so many faults.
        #[arg(long)]
        max_faults: Option<u64>,
        /// At most so many requests.
        #[arg(long)]
        max_requests: Option<u64>,
        /// Print every event.
        #[arg(long)]
        trace: bool,
        /// Print a line for every world.
        #[arg(long)]
        verbose: bool,
        /// Stop after so many failures.
        #[arg(long, default_value_t = 10)]
        stop_after: usize,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let Sub::Run {
        seeds,
        seed,
        nodes,
        faults,
        max_faults,
        max_requests,
        trace,
        verbose,
        stop_after,
    } = Args::parse().command;
    let range = match (seeds, seed) {
        (Some(text), _) => parse_range(&text)?,
        (None, Some(seed)) => seed..seed + 1,
        (None, None) => 0..100,
    };
    let faults = match faults {
        Some(list) => Some(parse_faults(&list)?),
        None => None,
    };
    let limits = Limits {
        nodes,
        faults,
        max_faults,
        max_requests,
        trace,
    };
    if !trace {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let started = Instant::now();
    let (mut worlds, mut failed, mut steps, mut virtual_s, mut acked) = (0u64, 0, 0u64, 0u64, 0u64);
    for seed in range {
        let outcome = run(seed, &limits);
        worlds += 1;
        steps += outcome.steps;
        acked += outcome.acked;
        virtual_s += outcome.time / 1_000_000_000;
        if verbose {
            println!(
                "seed {seed}: {} events, {} s, {} writes; {}",
                outcome.steps,
                outcome.time / 1_000_000_000,
                outcome.acked,
                outcome.shape
            );
        }
        if let Some(text) = outcome.violation {
            failed += 1;
            println!(
                "seed {seed} FAILED after {} events: {text}\n    {}",
                outcome.steps, outcome.shape
            );
            if failed >= stop_after {
                break;
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{worlds} worlds, {failed} failed, {:.1} worlds/s, {steps} events, {virtual_s} s of virtual \
         time, {acked} writes",
        worlds as f64 / seconds
    );
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn parse_range(text: &str) -> anyhow::Result<std::ops::Range<u64>> {
    let (from, to) = text
        .split_once("..")
        .context("--seeds takes FROM..TO, for example 0..1000")?;
    Ok(from.parse()?..to.parse()?)
}

fn parse_faults(list: &str) -> anyhow::Result<Vec<lockstep_sim::swarm::Fault>> {
    list.split(',')
        .filter(|w| !w.is_empty())
        .map(|word| match FAULTS.iter().find(|(_, name)| *name == word) {
            Some((fault, _)) => Ok(*fault),
            None => bail!(
                "no fault is called {word}; there are {}",
                FAULTS.map(|(_, name)| name).join(", ")
            ),
        })
        .collect()
}
