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
    Run(RunArgs),
    /// Searches the deliberate bugs of the core: each must be found. Needs feature `planted`.
    Planted(PlantedArgs),
}

#[derive(clap::Args)]
struct RunArgs {
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
}

#[derive(clap::Args)]
struct PlantedArgs {
    /// Only this one.
    name: Option<String>,
    /// One JSON object per bug.
    #[arg(long)]
    json: bool,
    /// First seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Most seconds of one core per bug.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Most worlds per bug.
    #[arg(long, default_value_t = 1_000_000)]
    worlds: u64,
    /// Bugs that are searched at the same time.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Only every third bug, beginning with that of a number (a commit's hash, for example),
    /// and none that takes hundreds of worlds.
    #[arg(long)]
    third: Option<u64>,
    /// Only this world, with the bug, event by event.
    #[arg(long, requires = "name")]
    trace: Option<u64>,
}

fn main() -> anyhow::Result<ExitCode> {
    match Args::parse().command {
        Sub::Run(args) => worlds(args),
        Sub::Planted(args) => planted(args),
    }
}

fn worlds(args: RunArgs) -> anyhow::Result<ExitCode> {
    let RunArgs {
        seeds,
        seed,
        nodes,
        faults,
        max_faults,
        max_requests,
        trace,
        verbose,
        stop_after,
    } = args;
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

#[cfg(feature = "planted")]
fn planted(args: PlantedArgs) -> anyhow::Result<ExitCode> {
    use lockstep_sim::planted::{Patience, choose, search_all, with};
    let choice = choose(args.name.as_deref(), args.third)?;
    if let (Some(seed), [bug]) = (args.trace, &choice[..]) {
        let limits = Limits {
            trace: true,
            ..Limits::default()
        };
        let outcome = with(Some(*bug), || run(seed, &limits));
        println!("{}", outcome.violation.as_deref().unwrap_or("passes"));
        return Ok(ExitCode::SUCCESS);
    }
    std::panic::set_hook(Box::new(|_| {}));
    let patience = Patience {
        from: args.from,
        worlds: args.worlds,
        time: std::time::Duration::from_secs(args.seconds),
    };
    let found = search_all(&choice, patience, args.threads, |search| {
        println!(
            "{}",
            if args.json {
                search.json()
            } else {
                search.line()
            }
        );
    });
    if !args.json {
        println!("{found} of {} deliberate bugs found", choice.len());
    }
    Ok(if found == choice.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(not(feature = "planted"))]
fn planted(_args: PlantedArgs) -> anyhow::Result<ExitCode> {
    bail!(
        "this simulator has no deliberate bugs; run it with `cargo run --release -p lockstep-sim \
         --features planted -- planted`"
    )
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
