//! Command line of the simulator.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::{Args, Parser, Subcommand};
use lockstep_sim::drive::{self, Trace};
use lockstep_sim::faults;
use lockstep_sim::plan::{Numbers, Orders, Size};
use lockstep_sim::shrink::shrink;
use lockstep_sim::soak::{SHRINK_EVENTS, Soak, report};
use lockstep_sim::swarm::{Limits, run};
use lockstep_sim::world::MAX_VOLUMES;

/// Worlds are made of small allocations by one thread each; this allocator takes less time for them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The deterministic simulator of Lockstep's core.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Subcommand)]
enum Sub {
    /// Runs worlds of the first design, whose seeds the tests and CI name.
    Run(RunArgs),
    /// Runs planned worlds: each fault and request has a number and can be left out.
    Swarm(SwarmArgs),
    /// Runs planned worlds on all cores until stopped.
    Soak(SoakArgs),
    /// Measures the speed: small worlds on one core.
    Bench {
        /// How many.
        #[arg(long, default_value_t = 1000)]
        worlds: u64,
    },
    /// Searches the deliberate bugs of the core: each must be found. Needs feature `planted`.
    Planted(PlantedArgs),
    /// Cuts stories at every packet: the link, a process, a node's power.
    Cuts {
        /// Only this story.
        story: Option<String>,
        /// Only this cut, event by event: FROM-TO-PACKET-BLOW, for example A-B-7-link.
        #[arg(long, requires = "story")]
        trace: Option<lockstep_sim::cuts::Cut>,
    },
}

#[derive(Args)]
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
    /// Newest protocol version that the nodes offer; 101 is the dialect of 8.4.
    #[arg(long)]
    protocol_max: Option<u32>,
    /// Nodes (numbers from 0) of worlds of two whose disks have the metadata of 8.4.
    #[arg(long, value_delimiter = ',')]
    v08: Vec<usize>,
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

/// What is fixed of planned worlds.
#[derive(Args)]
struct OrderArgs {
    /// Small worlds: 2 nodes, 1 volume of 32 MiB, protocol C, 2,000 requests, 20 faults.
    #[arg(long)]
    small: bool,
    /// Number of nodes, 2 to 5, instead of what the seed says.
    #[arg(long)]
    nodes: Option<usize>,
    /// Number of volumes, 1 to 4, instead of what the seed says.
    #[arg(long)]
    volumes: Option<u16>,
    /// Only these kinds of faults, separated by commas; `all` is every kind.
    #[arg(long)]
    faults: Option<String>,
    #[arg(long, help = format!(
        "Options that worlds have only by name, separated by commas: {}",
        lockstep_sim::extras::known()
    ))]
    with: Option<String>,
}

#[derive(Args)]
struct SwarmArgs {
    #[command(flatten)]
    orders: OrderArgs,
    /// From (inclusive) to (exclusive): `0..1000`.
    #[arg(long, conflicts_with = "seed")]
    seeds: Option<String>,
    /// One seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Only the faults with these numbers: `0-4,7`, or `none`.
    #[arg(long)]
    only_faults: Option<String>,
    /// Only the requests with these numbers.
    #[arg(long)]
    only_requests: Option<String>,
    /// Print every event of the one world.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Do not look for a smaller world that fails in the same way.
    #[arg(long)]
    no_shrink: bool,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Stop after so many failures.
    #[arg(long, default_value_t = 10)]
    stop_after: u64,
    /// Begin no world after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Lines of each node's trace in a report.
    #[arg(long, default_value_t = 25)]
    lines: usize,
}

#[derive(Args)]
struct SoakArgs {
    #[command(flatten)]
    orders: OrderArgs,
    /// First seed; the clock decides if it is not given.
    #[arg(long)]
    base: Option<u64>,
    /// Stop after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Threads; as many as cores if not given.
    #[arg(long)]
    threads: Option<usize>,
    /// Stop after so many failures; 0 is never.
    #[arg(long, default_value_t = 0)]
    stop_after: u64,
    /// Failures are appended to this file too.
    #[arg(long, default_value = "target/sim-failures.txt")]
    record: PathBuf,
    /// Lines of each node's trace in a report.
    #[arg(long, default_value_t = 25)]
    lines: usize,
}

#[derive(Args)]
struct PlantedArgs {
    #[command(flatten)]
    orders: OrderArgs,
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
    /// Search the planned worlds of `soak` alone, with its seeds.
    #[arg(long)]
    as_soak: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Sub::Run(args) => run_first_design(&args),
        Sub::Swarm(args) => swarm(&args),
        Sub::Soak(args) => soak(&args),
        Sub::Bench { worlds } => Ok(bench(worlds)),
        Sub::Planted(args) => planted(args),
        Sub::Cuts { story, trace } => cuts(story.as_deref(), trace),
    }
}

impl OrderArgs {
    fn orders(&self) -> anyhow::Result<Orders> {
        if self.nodes.is_some_and(|n| !(2..=5).contains(&n)) {
            bail!("--nodes is 2 to 5");
        }
        if self
            .volumes
            .is_some_and(|n| !(1..=MAX_VOLUMES as u16).contains(&n))
        {
            bail!("--volumes is 1 to {MAX_VOLUMES}");
        }
        let kinds = match self.faults.as_deref() {
            None => None,
            Some("all") => Some(faults::all().map(|(fault, _)| fault).collect()),
            Some(list) => Some(faults::parse(list).map_err(|text| anyhow!(text))?),
        };
        Ok(Orders {
            size: if self.small { Size::Small } else { Size::Any },
            nodes: self.nodes,
            volumes: self.volumes,
            kinds,
            extras: lockstep_sim::extras::parse(self.with.as_deref().unwrap_or_default())
                .map_err(|text| anyhow!(text))?,
            ..Orders::default()
        })
    }
}

/// A panic of the core is a result here, not something to print.
fn be_quiet_about_panics() {
    std::panic::set_hook(Box::new(|_| {}));
}

fn swarm(args: &SwarmArgs) -> anyhow::Result<ExitCode> {
    let numbers = |text: &Option<String>| match text {
        Some(text) => Numbers::parse(text).map(Some).map_err(|text| anyhow!(text)),
        None => Ok(None),
    };
    let orders = Orders {
        only_faults: numbers(&args.only_faults)?,
        only_requests: numbers(&args.only_requests)?,
        ..args.orders.orders()?
    };
    if let Some(seed) = args.seed {
        return Ok(one_world(seed, &orders, args));
    }
    be_quiet_about_panics();
    let seeds = parse_range(args.seeds.as_deref().unwrap_or("0..100"))?;
    let sum = Soak {
        orders,
        varies: false,
        base: seeds.start,
        worlds: Some(seeds.end.saturating_sub(seeds.start)),
        time: args.seconds.map(Duration::from_secs),
        threads: args.threads,
        stop_after: args.stop_after,
        record: None,
        live: false,
        lines: args.lines,
        shrink: !args.no_shrink,
    }
    .run();
    print!("{}", sum.describe());
    Ok(code(sum.failed == 0))
}

fn one_world(seed: u64, orders: &Orders, args: &SwarmArgs) -> ExitCode {
    let trace = if args.trace { Trace::Print } else { Trace::Off };
    if args.trace {
        println!("{}\n", lockstep_sim::story::LEGEND);
    } else {
        be_quiet_about_panics();
    }
    let result = drive::run(seed, orders, trace);
    println!(
        "seed {seed}: {}; {} events, {:.1} s of virtual time, {} writes, fingerprint {:016x}",
        result.shape,
        result.steps,
        result.time as f64 / 1e9,
        result.acked,
        result.fingerprint
    );
    let Some(violation) = &result.violation else {
        println!("It holds.");
        return ExitCode::SUCCESS;
    };
    if args.trace {
        for (node, state) in result.states.iter().enumerate() {
            println!(
                "State of {} at the end: {state}",
                lockstep_sim::world::name(node)
            );
        }
        println!("FAILED: {violation}");
    } else {
        let budget = if args.no_shrink { 0 } else { SHRINK_EVENTS };
        let small = shrink(seed, orders, &result, budget);
        println!("{}", report(&result, &small, args.lines));
    }
    ExitCode::FAILURE
}

fn soak(args: &SoakArgs) -> anyhow::Result<ExitCode> {
    be_quiet_about_panics();
    let clock = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |t| t.as_secs() % 1_000_000 * 1_000_000)
    };
    let base = args.base.unwrap_or_else(clock);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores);
    println!(
        "seeds from {base} on {threads} threads; failures go to {}",
        args.record.display()
    );
    let orders = args.orders.orders()?;
    let failed_cuts = match lockstep_sim::variety::is_open(&orders) {
        true => cut_stories(None)?,
        false => 0,
    };
    let sum = Soak {
        orders,
        varies: true,
        base,
        worlds: None,
        time: args.seconds.map(Duration::from_secs),
        threads,
        stop_after: if args.stop_after == 0 {
            u64::MAX
        } else {
            args.stop_after
        },
        record: Some(args.record.clone()),
        live: true,
        lines: args.lines,
        shrink: true,
    }
    .run();
    print!("{}", sum.describe());
    Ok(code(sum.failed == 0 && failed_cuts == 0))
}

fn bench(worlds: u64) -> ExitCode {
    be_quiet_about_panics();
    let orders = Orders {
        size: Size::Small,
        ..Orders::default()
    };
    let started = Instant::now();
    let (mut steps, mut acked, mut failed) = (0, 0, 0);
    for seed in 0..worlds {
        let result = drive::run(seed, &orders, Trace::Off);
        steps += result.steps;
        acked += result.acked;
        failed += u64::from(result.violation.is_some());
    }
    let wall = started.elapsed().as_secs_f64();
    // On a machine with other work the time on the core counts.
    let seconds = cpu_seconds().unwrap_or(wall);
    println!(
        "{worlds} small worlds (2 nodes, 2,000 requests, 20 faults) in {seconds:.2} s of one core \
         ({wall:.2} s): {:.1} worlds/s, {:.2} million events/s, {} writes, {failed} failed",
        worlds as f64 / seconds,
        steps as f64 / seconds / 1e6,
        acked
    );
    code(failed == 0)
}

/// Time that this thread spent on a core, if the system says.
fn cpu_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds / 1e9)
}

fn run_first_design(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let range = match (&args.seeds, args.seed) {
        (Some(text), _) => parse_range(text)?,
        (None, Some(seed)) => seed..seed + 1,
        (None, None) => 0..100,
    };
    let faults = match &args.faults {
        Some(list) => Some(faults::parse(list).map_err(|text| anyhow!(text))?),
        None => None,
    };
    let limits = Limits {
        protocol_max: args.protocol_max,
        nodes: args.nodes,
        faults,
        max_faults: args.max_faults,
        max_requests: args.max_requests,
        v08: args.v08.clone(),
        trace: args.trace,
    };
    if !args.trace {
        be_quiet_about_panics();
    }
    let started = Instant::now();
    let (mut worlds, mut failed, mut steps, mut virtual_s, mut acked) = (0u64, 0, 0u64, 0u64, 0u64);
    for seed in range {
        let outcome = run(seed, &limits);
        worlds += 1;
        steps += outcome.steps;
        acked += outcome.acked;
        virtual_s += outcome.time / 1_000_000_000;
        if args.verbose {
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
            if failed >= args.stop_after {
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
    Ok(code(failed == 0))
}

fn cuts(only: Option<&str>, trace: Option<lockstep_sim::cuts::Cut>) -> anyhow::Result<ExitCode> {
    let all = lockstep_sim::stories::STORIES;
    let names: Vec<&str> = all.iter().map(|s| s.name).collect();
    if let Some(name) = only.filter(|name| !names.contains(name)) {
        bail!("no story is called {name}; there are {}", names.join(", "));
    }
    let told = all.iter().find(|s| Some(s.name) == only);
    if let (Some(cut), Some(story)) = (trace, told) {
        let story = lockstep_sim::cuts::Story {
            trace: true,
            ..*story
        };
        println!("{:?}", story.play(cut));
        return Ok(ExitCode::SUCCESS);
    }
    Ok(code(cut_stories(only)? == 0))
}

/// Cuts one story, or all, at every packet; gives how many cuts ended badly.
fn cut_stories(only: Option<&str>) -> anyhow::Result<usize> {
    let mut failed = 0;
    let chosen = |name: &str| only.is_none_or(|only| name == only);
    for story in lockstep_sim::stories::STORIES
        .iter()
        .filter(|s| chosen(s.name))
    {
        let name = story.name;
        let report = lockstep_sim::cuts::cut_everywhere(story, |cut, result| {
            if let Err(text) = result {
                println!("{name} {cut} FAILED: {text}");
                println!(
                    "  repeat it: cargo run --release -p lockstep-sim -- cuts {name} --trace {cut}"
                );
            }
        });
        let report = report.map_err(anyhow::Error::msg)?;
        failed += report.failed.len();
        println!(
            "{name}: {} packets, {} cuts, {} failed; {}",
            report.packets,
            report.cuts,
            report.failed.len(),
            story.text
        );
    }
    Ok(failed)
}

#[cfg(feature = "planted")]
fn planted(args: PlantedArgs) -> anyhow::Result<ExitCode> {
    use lockstep_sim::planted::{Patience, choose, search_all, with, world_for};
    use lockstep_sim::variety;
    let choice = choose(args.name.as_deref(), args.third)?;
    let orders = args.orders.orders()?;
    if let (Some(seed), [bug]) = (args.trace, &choice[..]) {
        let violation = with(Some(*bug), || match args.as_soak {
            true => drive::run(seed, &variety::orders(seed), Trace::Print).violation,
            false => world_for(*bug, seed, &orders, Trace::Print),
        });
        println!("{}", violation.as_deref().unwrap_or("passes"));
        return Ok(ExitCode::SUCCESS);
    }
    std::panic::set_hook(Box::new(|_| {}));
    let patience = Patience {
        orders,
        from: args.from,
        worlds: args.worlds,
        time: std::time::Duration::from_secs(args.seconds),
        as_soak: args.as_soak,
    };
    let found = search_all(&choice, &patience, args.threads, |search| {
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

fn code(is_good: bool) -> ExitCode {
    if is_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn parse_range(text: &str) -> anyhow::Result<std::ops::Range<u64>> {
    let (from, to) = text
        .split_once("..")
        .context("--seeds takes FROM..TO, for example 0..1000")?;
    Ok(from.parse()?..to.parse()?)
}
