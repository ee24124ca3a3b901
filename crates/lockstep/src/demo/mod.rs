//! `lockstep demo`: three nodes on this machine, a database on top, and the Primary killed in the
//! middle of its work. Without root, clients that write over NBD take the database's place.

mod blocks;
mod nbd;
mod nodes;
mod postgres;

use std::collections::BTreeSet;
use std::fs;
use std::hash::Hasher;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use lockstep_core::state::{DiskState, ReplState};
use lockstep_daemon::report::ResourceReport;

use nodes::{MARK, NAMES, Nodes, RESOURCE, clean_leftovers, unmount_below};
use postgres::{Acknowledged, Load, Postgres, Server};

const USAGE: &str = "\
Usage: lockstep demo [--keep] [--kills N] [--seconds S] [--size-mib M] [--dir DIR]

Three nodes on this machine replicate a file system with a PostgreSQL database under load. The
Primary and its database are killed in mid-load, another node takes over, and every acknowledged
transaction must be there. Mounting needs root: without it, clients write to the volume over NBD
instead, and every acknowledged write must be there.

  --kills N       how often the Primary is killed, 1 to 100 (default 2)
  --seconds S     load before each kill, 1 to 600 (default 5)
  --size-mib M    size of each disk, 128 to 65536 (default 1024, sparse)
  --dir DIR       where everything is put (default /tmp/lockstep-demo)
  --nbd           write over NBD instead of mounting, also with root
  --keep          leave the nodes running (if it fails: their files) and say how to use them";

struct Settings {
    keep: bool,
    workload: Workload,
    kills: u32,
    seconds: u64,
    size_mib: u64,
    dir: PathBuf,
}

/// What is put on the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Workload {
    /// PostgreSQL on a mounted file system.
    Database,
    /// Clients that write blocks over NBD.
    Blocks,
}

/// Runs `lockstep demo ARGS`.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let settings = match parse(args) {
        Ok(Some(settings)) => settings,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(problem) => {
            eprintln!("lockstep demo: {problem}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match demo(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: &[String]) -> Result<Option<Settings>, String> {
    let root = rustix::process::geteuid().is_root();
    let mut settings = Settings {
        keep: false,
        workload: if root {
            Workload::Database
        } else {
            Workload::Blocks
        },
        kills: 2,
        seconds: 5,
        size_mib: 1024,
        dir: PathBuf::from("/tmp/lockstep-demo"),
    };
    let mut args = args.iter();
    while let Some(word) = args.next() {
        let mut number = |min: u64, max: u64| match args.next().map(|text| text.parse()) {
            Some(Ok(number)) if (min..=max).contains(&number) => Ok(number),
            _ => Err(format!("{word} needs a number from {min} to {max}")),
        };
        match word.as_str() {
            "--keep" => settings.keep = true,
            "--nbd" => settings.workload = Workload::Blocks,
            "--kills" => settings.kills = number(1, 100)? as u32,
            "--seconds" => settings.seconds = number(1, 600)?,
            "--size-mib" => settings.size_mib = number(128, 65_536)?,
            "--dir" => settings.dir = args.next().ok_or("--dir needs a directory")?.into(),
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown option '{other}'")),
        }
    }
    settings.dir = std::path::absolute(&settings.dir).map_err(|error| error.to_string())?;
    Ok(Some(settings))
}

fn demo(settings: &Settings) -> anyhow::Result<()> {
    let dir = &settings.dir;
    clean_leftovers(dir)?;
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    fs::write(
        dir.join(MARK),
        "made by lockstep demo; it removes this directory\n",
    )?;
    // PostgreSQL's user has to get through to the mount points.
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone()).context("taking signals")?;
    }
    let postgres = match settings.workload {
        Workload::Database => Some(Postgres::find(&dir.join("run"))?),
        Workload::Blocks => None,
    };
    let nodes = Nodes::create(dir, settings.size_mib << 20, interrupted)?;
    let mut demo = Demo {
        settings,
        nodes,
        began: Instant::now(),
    };
    let result = match postgres {
        Some(postgres) => {
            let mut database = Database {
                demo: &mut demo,
                postgres,
                server: None,
                mount: dir.join("mnt"),
            };
            let result = database.play();
            database.server = None;
            unmount_below(dir);
            result
        }
        None => demo.play_blocks(),
    };
    match (settings.keep, &result) {
        (true, Ok(())) => demo.nodes.leave_all(),
        (true, Err(_)) => {
            demo.nodes.stop_all();
            println!("kept: {}", dir.display());
        }
        (false, _) => {
            demo.nodes.stop_all();
            clean_leftovers(dir)?;
        }
    }
    result
}

struct Demo<'a> {
    settings: &'a Settings,
    nodes: Nodes,
    began: Instant,
}

impl Demo<'_> {
    fn say(&self, text: &str) {
        println!("{:7.2}s  {text}", self.began.elapsed().as_secs_f64());
    }

    fn bring_up(&mut self) -> anyhow::Result<()> {
        self.say(&format!(
            "three nodes in {}: {}",
            self.settings.dir.display(),
            NAMES.join(", ")
        ));
        for index in 0..NAMES.len() {
            self.nodes.start(index, self.settings.workload)?;
            self.nodes
                .drbdadm(index, &["create-md", "--force", RESOURCE])?;
        }
        self.up_all()?;
        self.say("all connected");
        Ok(())
    }

    fn up_all(&self) -> anyhow::Result<()> {
        for index in 0..NAMES.len() {
            self.nodes.drbdadm(index, &["up", RESOURCE])?;
        }
        self.nodes.wait_until("all nodes to be connected", 30, || {
            for index in 0..NAMES.len() {
                if !is_connected(&self.nodes.report(index)?) {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
    }

    /// Makes a node Primary and waits for its device.
    fn promote(&self, index: usize, force: bool) -> anyhow::Result<()> {
        let args: &[&str] = if force {
            &["primary", "--force", RESOURCE]
        } else {
            &["primary", RESOURCE]
        };
        let mut refused = None;
        let asked = self.nodes.wait_until("the promotion", 30, || {
            match self.nodes.drbdadm(index, args) {
                Ok(()) => Ok(Some(())),
                // Until the others have noticed the loss of the old Primary they refuse.
                Err(error) => {
                    refused = Some(error);
                    Ok(None)
                }
            }
        });
        if let (Err(error), Some(refused)) = (asked, refused) {
            return Err(error.context(refused));
        }
        if self.settings.workload == Workload::Database {
            let device = self.nodes.device(index);
            self.nodes.wait_until("the mountable device", 15, || {
                Ok(device.exists().then_some(()))
            })?;
        }
        self.say(&format!("{} is Primary", NAMES[index]));
        Ok(())
    }

    /// Waits until all three replicas are UpToDate, with progress.
    fn wait_in_sync(&self, what: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut told = Instant::now();
        self.nodes.wait_until(what, 600, || {
            let mut done = true;
            let mut left_kib = 0;
            for index in 0..NAMES.len() {
                let report = self.nodes.report(index)?;
                done &= is_in_sync(&report);
                left_kib = left_kib.max(out_of_sync_kib(&report));
            }
            if !done && told.elapsed() > Duration::from_secs(1) {
                told = Instant::now();
                self.say(&format!("  {what}: {} MiB to go", left_kib >> 10));
            }
            Ok(done.then_some(()))
        })?;
        self.say(&format!(
            "{what}: done in {:.1} s",
            began.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    /// Lets the load run for its time.
    fn let_it_run(&self) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_secs(self.settings.seconds);
        while Instant::now() < until {
            self.nodes.check()?;
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The killed node returns and gets what it missed.
    fn bring_back(&mut self, index: usize) -> anyhow::Result<()> {
        self.nodes.start(index, self.settings.workload)?;
        self.nodes.drbdadm(index, &["up", RESOURCE])?;
        self.say(&format!("{} is back", NAMES[index]));
        self.wait_in_sync(&format!("resync of {}", NAMES[index]))?;
        let report = self.nodes.report(index)?;
        let received: u64 = report
            .connections
            .iter()
            .flat_map(|c| &c.peer_devices)
            .map(|p| p.received_sectors / 2)
            .sum();
        let size = report
            .devices
            .iter()
            .map(|d| d.size_sectors / 2)
            .sum::<u64>();
        self.say(&format!(
            "{} received {received} KiB of {size} KiB",
            NAMES[index]
        ));
        Ok(())
    }

    /// Everything down in order, then the three images must be equal.
    fn compare_images(&mut self, primary: usize) -> anyhow::Result<()> {
        let bytes = self
            .nodes
            .report(primary)?
            .devices
            .iter()
            .map(|d| d.size_sectors * 512)
            .sum::<u64>();
        self.nodes.drbdadm(primary, &["secondary", RESOURCE])?;
        for index in 0..NAMES.len() {
            self.nodes.drbdadm(index, &["down", RESOURCE])?;
        }
        let mut sums = Vec::new();
        for index in 0..NAMES.len() {
            sums.push(checksum(&self.nodes.image(index), bytes)?);
        }
        for (name, sum) in NAMES.iter().zip(&sums) {
            self.say(&format!("{name:8} {sum:016x}"));
        }
        ensure!(
            sums.iter().all(|sum| *sum == sums[0]),
            "the replicas differ"
        );
        self.say("the three replicas are identical");
        std::io::stdout().flush()?;
        Ok(())
    }

    /// Up again, and how to use it.
    fn leave_running(&self, primary: usize) -> anyhow::Result<()> {
        self.up_all()?;
        self.promote(primary, false)?;
        let dir = self.settings.dir.display();
        println!(
            "\nThe nodes go on. Each has its directory; name one, then use DRBD's commands:\n"
        );
        println!(
            "  export PATH={dir}/bin:$PATH LOCKSTEP_DIR={dir}/{}",
            NAMES[primary]
        );
        println!("  drbdadm status");
        println!("  drbdsetup events2 --statistics");
        match self.settings.workload {
            Workload::Database => {
                println!("  mount $LOCKSTEP_DIR/dev/drbd0 {dir}/mnt      # the database's files");
                println!("  umount {dir}/mnt && drbdadm secondary {RESOURCE}");
            }
            Workload::Blocks => {
                println!(
                    "  nbdinfo 'nbd+unix:///{RESOURCE}/0?socket={dir}/{}/nbd.sock'",
                    NAMES[primary]
                );
                println!("  drbdadm secondary {RESOURCE}");
            }
        }
        println!(
            "\nKill a daemon:   kill -9 $(cat {dir}/{}/lockstepd.pid)",
            NAMES[primary]
        );
        println!("Start it again:  lockstepd &   then   drbdadm up {RESOURCE}");
        println!("End all:         kill $(cat {dir}/*/lockstepd.pid)   then   rm -r {dir}");
        Ok(())
    }

    /// The demo without root.
    fn play_blocks(&mut self) -> anyhow::Result<()> {
        self.say("without root nothing is mounted: the volume is used over NBD");
        self.bring_up()?;
        let mut primary = 0;
        self.promote(primary, true)?;
        self.wait_in_sync("first full sync of two replicas")?;
        let mut ledgers = blocks::Ledger::all(CLIENTS);
        for _ in 0..self.settings.kills {
            let socket = self.nodes.nbd_socket(primary);
            let load = blocks::Load::start(std::mem::take(&mut ledgers), &socket, EXPORT)?;
            self.say(&format!(
                "{CLIENTS} clients overwrite blocks over NBD for {} s",
                self.settings.seconds
            ));
            self.let_it_run()?;
            let during = load.done();
            self.nodes.kill(primary)?;
            ledgers = load.stop()?;
            ensure!(during > 0, "no write was acknowledged: nothing is proven");
            let count: u64 = ledgers.iter().map(blocks::Ledger::count).sum();
            self.say(&format!(
                "SIGKILL to lockstepd of {} after {count} acknowledged writes",
                NAMES[primary]
            ));
            let next = (primary + 1) % NAMES.len();
            self.promote(next, false)?;
            let blocks = blocks::check_all(&mut ledgers, &self.nodes.nbd_socket(next), EXPORT)?;
            self.say(&format!(
                "all {blocks} blocks hold their last acknowledged write on {}",
                NAMES[next]
            ));
            self.bring_back(primary)?;
            primary = next;
        }
        self.compare_images(primary)?;
        if self.settings.keep {
            self.leave_running(primary)?;
        }
        Ok(())
    }
}

/// The demo with a database on a mounted file system.
struct Database<'a, 'b> {
    demo: &'a mut Demo<'b>,
    postgres: Postgres,
    server: Option<Server>,
    mount: PathBuf,
}

impl Database<'_, '_> {
    fn play(&mut self) -> anyhow::Result<()> {
        self.demo.bring_up()?;
        let mut primary = 0;
        self.demo.promote(primary, true)?;
        self.demo.wait_in_sync("first full sync of two replicas")?;
        self.demo
            .say(&format!("mkfs.ext4 and mount on {}", NAMES[primary]));
        tool(
            "mkfs.ext4",
            &["-q", &path_text(&self.demo.nodes.device(primary))?],
        )?;
        fs::create_dir_all(&self.mount)?;
        self.mount_on(primary)?;
        self.demo.say("initdb and postgres");
        self.postgres.init(&self.mount)?;
        self.start_database()?;
        self.postgres.query(
            "CREATE TABLE tx (client int, n bigint, payload text, PRIMARY KEY (client, n))",
        )?;
        let acknowledged = Acknowledged::default();
        for kill in 0..self.demo.settings.kills {
            let clients = kill * CLIENTS..(kill + 1) * CLIENTS;
            primary = self.kill_in_mid_load(primary, clients, &acknowledged)?;
        }
        if let Some(mut server) = self.server.take() {
            server.stop()?;
        }
        tool("umount", &[&path_text(&self.mount)?])?;
        self.demo.compare_images(primary)?;
        if self.demo.settings.keep {
            self.demo.leave_running(primary)?;
        }
        Ok(())
    }

    fn mount_on(&self, index: usize) -> anyhow::Result<()> {
        let device = path_text(&self.demo.nodes.device(index))?;
        tool("mount", &[&device, &path_text(&self.mount)?])
    }

    fn start_database(&mut self) -> anyhow::Result<()> {
        let mut server = self.postgres.start(&self.mount)?;
        let answered = self.demo.nodes.wait_until("postgres to answer", 60, || {
            ensure!(
                !server.has_ended(),
                "postgres ended; its log is run/log (use --keep)"
            );
            Ok(self.postgres.query("SELECT 1").is_ok().then_some(()))
        });
        self.server = Some(server);
        answered
    }

    /// Load, SIGKILL, takeover, proof, return of the killed node. Returns the new Primary.
    fn kill_in_mid_load(
        &mut self,
        primary: usize,
        clients: std::ops::Range<u32>,
        acknowledged: &Acknowledged,
    ) -> anyhow::Result<usize> {
        let log = self.demo.settings.dir.join("acknowledged.log");
        let load = Load::start(&self.postgres, clients, acknowledged, &log)?;
        let seconds = self.demo.settings.seconds;
        self.demo
            .say(&format!("{CLIENTS} clients insert rows for {seconds} s"));
        self.demo.let_it_run()?;
        self.demo.nodes.kill(primary)?;
        if let Some(mut server) = self.server.take() {
            server.kill();
        }
        load.stop();
        let count = acknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len();
        self.demo.say(&format!(
            "SIGKILL to lockstepd and postgres of {} after {count} acknowledged transactions",
            NAMES[primary]
        ));
        tool("umount", &["-l", &path_text(&self.mount)?])?;
        let next = (primary + 1) % NAMES.len();
        self.demo.promote(next, false)?;
        self.check_and_mount(next)?;
        self.start_database()?;
        self.prove(acknowledged)?;
        self.demo.bring_back(primary)?;
        Ok(next)
    }

    /// The journal is replayed, then the file system must be without fault.
    fn check_and_mount(&self, index: usize) -> anyhow::Result<()> {
        self.mount_on(index)?;
        tool("umount", &[&path_text(&self.mount)?])?;
        let device = path_text(&self.demo.nodes.device(index))?;
        tool("fsck.ext4", &["-f", "-n", &device])?;
        self.mount_on(index)?;
        self.demo.say(&format!(
            "file system is clean and mounted on {}",
            NAMES[index]
        ));
        Ok(())
    }

    /// Every acknowledged transaction must be in the database.
    fn prove(&self, acknowledged: &Acknowledged) -> anyhow::Result<()> {
        let rows = self.postgres.query("SELECT client, n FROM tx")?;
        let mut found = BTreeSet::new();
        for row in rows.lines() {
            let (client, number) = row.split_once('|').context("reading the table")?;
            found.insert((client.parse::<u32>()?, number.parse::<u64>()?));
        }
        let acknowledged = acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<_> = acknowledged.difference(&found).take(20).collect();
        if !missing.is_empty() {
            bail!("acknowledged transactions are missing (client, number): {missing:?}");
        }
        ensure!(
            !acknowledged.is_empty(),
            "no transaction was acknowledged: nothing is proven"
        );
        self.demo.say(&format!(
            "all {} acknowledged transactions are there ({} rows)",
            acknowledged.len(),
            found.len()
        ));
        Ok(())
    }
}

/// The volume's name for NBD.
const EXPORT: &str = "demo/0";
/// Database clients at the same time.
const CLIENTS: u32 = 4;

fn is_connected(report: &ResourceReport) -> bool {
    report.connections.len() + 1 == NAMES.len()
        && report
            .connections
            .iter()
            .flat_map(|c| &c.peer_devices)
            .all(|p| p.repl_state >= ReplState::Established)
}

fn is_in_sync(report: &ResourceReport) -> bool {
    let own = report
        .devices
        .iter()
        .all(|d| d.disk_state == DiskState::UpToDate);
    let peers = report
        .connections
        .iter()
        .flat_map(|c| &c.peer_devices)
        .all(|p| p.repl_state == ReplState::Established && p.disk_state == DiskState::UpToDate);
    own && peers && is_connected(report)
}

fn out_of_sync_kib(report: &ResourceReport) -> u64 {
    let of_peer = report.connections.iter().flat_map(|c| &c.peer_devices);
    of_peer
        .map(|p| p.out_of_sync_sectors / 2)
        .max()
        .unwrap_or(0)
}

/// Runs a tool of the system; what it says is shown if it fails.
fn tool(name: &str, args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(name)
        .args(args)
        .output()
        .with_context(|| format!("running {name}"))?;
    ensure!(
        output.status.success(),
        "{name} {}: {}\n{}{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn path_text(path: &Path) -> anyhow::Result<String> {
    path.to_str()
        .map(str::to_owned)
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// A checksum over the first bytes of a file.
fn checksum(path: &Path, bytes: u64) -> anyhow::Result<u64> {
    let mut file = fs::File::open(path)?.take(bytes);
    let mut hasher = std::hash::DefaultHasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(hasher.finish());
        }
        hasher.write(&buffer[..count]);
    }
}
