//! The project's checks: `cargo xtask ci` is the whole of CI, the same locally.

mod beside;
mod layers;
mod licenses;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask TASK
  ci        style to e2e in order; the first failure ends it
  style     format, clippy, tidy, layers, licenses, documentation links
  test      unit, golden and integration tests
  sim       the simulator's fixed worlds
  swarm     simulated worlds of two nodes that the commit chooses from a known range
  planted   the simulator finds deliberate bugs: a third of them, chosen by the commit
  e2e       end-to-end tests with the release binary, `guests` and then `others`
  guests    those with emulated guests
  others    those without
  rest      sim, swarm, fresh, planted and others: what `ci` runs beside the guests
  fresh     worlds of two nodes that nobody has seen, for up to five minutes
  fmt|clippy|tidy|layers|licenses|doc   one step of `style`";

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let root = root();
    let result = match task.as_str() {
        "ci" => ci(&root),
        "style" => style(&root),
        "fmt" => fmt(&root),
        "clippy" => clippy(&root),
        "doc" => doc(&root),
        "tidy" => tidy::check(&root),
        "layers" => layers::check(&root),
        "licenses" => licenses::check(&root),
        "test" => test(&root),
        "sim" => sim(&root),
        "swarm" => swarm(&root),
        "fresh" => fresh(&root),
        "planted" => planted(&root),
        "e2e" => guests(&root).and_then(|()| others(&root)),
        "guests" => guests(&root),
        "others" => others(&root),
        "rest" => rest(&root),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("xtask: {text}");
            ExitCode::FAILURE
        }
    }
}

fn ci(root: &Path) -> Result<(), String> {
    style(root)?;
    cargo(root, &["build", "--release", "--locked", "--bins"])?;
    test(root)?;
    // Built here, so that no guest waits for a compiler.
    cargo(
        root,
        &["test", "-p", "lockstep-e2e", "--locked", "--no-run"],
    )?;
    for build in [&["build"][..], &["test", "--lib", "--no-run"]] {
        cargo(root, &[build, PLANTED].concat())?;
    }
    beside::beside(root, "rest", || guests(root))
}

fn rest(root: &Path) -> Result<(), String> {
    sim(root)?;
    swarm(root)?;
    fresh(root)?;
    planted(root)?;
    others(root)
}

fn style(root: &Path) -> Result<(), String> {
    fmt(root)?;
    tidy::check(root)?;
    layers::check(root)?;
    licenses::check(root)?;
    clippy(root)?;
    doc(root)
}

fn fmt(root: &Path) -> Result<(), String> {
    cargo(root, &["fmt", "--all", "--check"])
}

fn clippy(root: &Path) -> Result<(), String> {
    cargo(
        root,
        &[
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ],
    )
}

fn doc(root: &Path) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args([
            "doc",
            "--workspace",
            "--no-deps",
            "--locked",
            "--document-private-items",
        ])
        .env("RUSTDOCFLAGS", "-D warnings")
        .current_dir(root);
    run(command)
}

/// Everything but the end-to-end crate, whose tests want the release binary and the machine.
fn test(root: &Path) -> Result<(), String> {
    cargo(
        root,
        &[
            "test",
            "--workspace",
            "--exclude",
            "lockstep-e2e",
            "--locked",
        ],
    )
}

/// Worlds with fixed seeds, so that a failure is a change's and not chance's.
fn sim(root: &Path) -> Result<(), String> {
    for args in SIM_RUNS {
        let mut all = vec!["run", "--quiet", "--locked", "-p", "lockstep-sim", "--"];
        all.extend_from_slice(args);
        aside(root, &all)?;
    }
    Ok(())
}

/// The commit's hash says which worlds of a range run. All of it passed when the core changed last, so
/// a failure is a change's and not chance's.
fn swarm(root: &Path) -> Result<(), String> {
    let from = SWARM_FIRST + commit_number(root) % (SWARM_RANGE - SWARM_WORLDS + 1);
    worlds_of_two(root, from, SWARM_WORLDS, &[])
}

/// Worlds that nobody has seen before: the commit's hash says which. None begins after
/// `FRESH_SECONDS`, so that a slow machine runs fewer and fails no more often.
fn fresh(root: &Path) -> Result<(), String> {
    let seconds = FRESH_SECONDS.to_string();
    let from = commit_number(root);
    worlds_of_two(root, from, FRESH_WORLDS, &["--seconds", &seconds])
}

fn worlds_of_two(root: &Path, from: u64, count: u64, more: &[&str]) -> Result<(), String> {
    let seeds = format!("{from}..{}", from + count);
    let mut all = vec!["run", "--quiet", "--locked", "-p", "lockstep-sim", "--"];
    all.extend_from_slice(&["swarm", "--nodes", "2", "--seeds", &seeds]);
    all.extend_from_slice(&["--threads", "2", "--stop-after", "1"]);
    all.extend_from_slice(more);
    aside(root, &all)
}

const SWARM_FIRST: u64 = 400_000;
const SWARM_RANGE: u64 = 2_000;
const SWARM_WORLDS: u64 = 1_000;
const FRESH_WORLDS: u64 = 4_000;
const FRESH_SECONDS: u64 = 300;

/// The simulator's own test. The number of worlds is bounded, not the time, so that a busy machine
/// changes nothing.
fn planted(root: &Path) -> Result<(), String> {
    let mut test = vec!["test", "--quiet", "--lib"];
    test.extend_from_slice(PLANTED);
    test.extend_from_slice(&["--", "planted"]);
    aside(root, &test)?;
    let third = commit_number(root).to_string();
    let mut search = vec!["run", "--quiet"];
    search.extend_from_slice(PLANTED);
    search.extend_from_slice(&["--", "planted", "--threads", "2", "--third", &third]);
    search.extend_from_slice(&["--worlds", "3000", "--seconds", "100000"]);
    aside(root, &search)
}

const PLANTED: &[&str] = &["-p", "lockstep-sim", "--locked", "--features", "planted"];

/// The beginning of the commit's hash as a number; 0 where there is no repository.
fn commit_number(root: &Path) -> u64 {
    Command::new("git")
        .args(["rev-parse", "--short=8", "HEAD"])
        .current_dir(root)
        .output()
        .ok()
        .and_then(|o| String::from_utf8(o.stdout).ok())
        .and_then(|hash| u64::from_str_radix(hash.trim(), 16).ok())
        .unwrap_or(0)
}

fn guests(root: &Path) -> Result<(), String> {
    e2e(root, &beside::guests())
}

fn others(root: &Path) -> Result<(), String> {
    e2e(root, &beside::others(root)?)
}

/// One test at a time: each has whole nodes, and some kill them.
fn e2e(root: &Path, which: &[String]) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["test", "-p", "lockstep-e2e", "--locked"])
        .args(which)
        .args(["--", "--test-threads=1"])
        .env("LOCKSTEP_BIN", root.join("target/release/lockstep"))
        .current_dir(root);
    run(command)
}

/// Disks that stop answering, beside what else happens.
const HANGS: &str = "hangdisk,reset,partition,crash,powercut,handover,invalidate";

/// What the simulator runs in CI.
///
/// Kinds of worlds that still fail are not among them; docs/testing.md, "State", names them.
const SIM_RUNS: &[&[&str]] = &[
    &[
        "swarm", "--nodes", "2", "--faults", HANGS, "--with", "blocks", "--seeds", "0..60",
    ],
    &[
        "run", "--nodes", "2", "--faults", KILLS, "--seeds", "1..301",
    ],
    &["run", "--nodes", "2", "--seeds", "1..301"],
    &[
        "run", "--nodes", "3", "--faults", KILLS, "--seeds", "1..201",
    ],
    &["run", "--nodes", "3", "--seeds", "1..161"],
    &[
        "swarm", "--nodes", "2", "--faults", ERRORS, "--seeds", "0..80",
    ],
    &[
        "swarm", "--nodes", "3", "--faults", CLIENTS, "--seeds", "0..100",
    ],
    &[
        "swarm", "--nodes", "4", "--faults", CLIENTS, "--seeds", "0..40",
    ],
    &[
        "swarm", "--nodes", "2", "--with", "pmem", "--seeds", "0..60",
    ],
    &["swarm", "--nodes", "3", "--seeds", "0..60"],
    &["swarm", "--nodes", "4", "--seeds", "0..40"],
    &["swarm", "--nodes", "5", "--seeds", "0..30"],
    &["swarm", "--with", "two-primaries", "--seeds", "0..60"],
    &[
        "swarm",
        "--with",
        "two-primaries,tie-breaker",
        "--seeds",
        "0..60",
    ],
    &[
        "swarm",
        "--with",
        "two-primaries,third-disk",
        "--faults",
        PARTINGS,
        "--seeds",
        "0..40",
    ],
    &[
        "swarm", "--nodes", "2", "--faults", RESIZES, "--seeds", "0..60",
    ],
];

/// Processes die, nodes lose their power, links are cut and reset.
const PARTINGS: &str = "crash,partition,reset,powercut";

/// Volumes and their disks grow, volumes shrink, nodes lose power.
const RESIZES: &str = "resize,crash,partition,powercut";

/// Nodes without a disk, quorum, processes that die, links that break.
const CLIENTS: &str = "diskless,quorum,crash,partition,reset";

/// Disks report errors, processes die, links break.
const ERRORS: &str = "readerror,writeerror,flusherror,metaerror,crash,reset";

/// Processes die, links are cut, stall and reset.
const KILLS: &str = "crash,reset,partition,stall";

fn cargo(root: &Path, args: &[&str]) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(args).current_dir(root);
    run(command)
}

/// Worlds have their own time, so they leave the machine to whatever has real time-outs.
fn aside(root: &Path, args: &[&str]) -> Result<(), String> {
    let mut command = Command::new("nice");
    command.args(["-n", "19", env!("CARGO")]);
    command.args(args).current_dir(root);
    run(command)
}

fn run(mut command: Command) -> Result<(), String> {
    let args: Vec<String> = command
        .get_args()
        .map(|a| a.to_string_lossy().into_owned())
        .collect();
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let line = format!("{name} {}", args.join(" "));
    eprintln!("== {line}");
    let start = Instant::now();
    let status = command.status().map_err(|e| format!("{line}: {e}"))?;
    eprintln!("== {line}: {status} after {} s", start.elapsed().as_secs());
    if status.success() {
        Ok(())
    } else {
        Err(format!("failed: {line}"))
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the crate lies two levels below the root")
        .to_path_buf()
}
