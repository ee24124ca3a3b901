//! A PostgreSQL server on a mounted volume, and pgbench clients whose acknowledged transactions
//! are remembered, to be looked for after a crash.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{PATIENCE, machine_has, run};

/// Clients of one load.
const CLIENTS: u32 = 4;
/// Beside pgbench's own transactions: one numbered row per transaction.
const NUMBERED: &str = "\\set n :n + 1\nINSERT INTO numbered VALUES (:round, :client_id, :n);\n";
/// Bytes of pgbench's log that come at once; about 80 transactions.
const LOG_CHUNK_BYTES: u64 = 4096;

/// The programs, and where they put socket and logs.
#[derive(Debug)]
pub struct Postgres {
    bin: PathBuf,
    uid: u32,
    gid: u32,
    dir: PathBuf,
    server: Option<Child>,
}

/// The machine has PostgreSQL's programs and user.
pub fn has_postgres() -> bool {
    machine_has(
        "PostgreSQL",
        find_programs().is_some() && find_user().is_some(),
    )
}

fn find_programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let mut bins: Vec<PathBuf> = versions.map(|v| v.path().join("bin")).collect();
    bins.sort();
    bins.into_iter()
        .rev()
        .find(|bin| bin.join("pgbench").exists())
}

fn find_user() -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    let line = passwd.lines().find(|line| line.starts_with("postgres:"))?;
    let mut ids = line.split(':').skip(2);
    Some((ids.next()?.parse().ok()?, ids.next()?.parse().ok()?))
}

impl Postgres {
    /// `dir` must be reachable for PostgreSQL's user.
    pub fn new(dir: &Path) -> Result<Postgres> {
        let (uid, gid) = find_user().context("PostgreSQL's user")?;
        fs::create_dir_all(dir)?;
        std::os::unix::fs::chown(dir, Some(uid), Some(gid))?;
        Ok(Postgres {
            bin: find_programs().context("PostgreSQL's programs")?,
            uid,
            gid,
            dir: dir.to_owned(),
            server: None,
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .uid(self.uid)
            .gid(self.gid)
            .current_dir(&self.dir)
            .env("LC_ALL", "C")
            .env("HOME", &self.dir)
            .env("PGHOST", &self.dir)
            .env("PGUSER", "bench")
            .env("PGDATABASE", "postgres")
            .stdin(Stdio::null());
        command
    }

    /// A new database on a mounted volume, started and filled.
    pub fn create(&mut self, mount: &Path) -> Result<()> {
        let data = mount.join("pg");
        fs::create_dir(&data)?;
        std::os::unix::fs::chown(&data, Some(self.uid), Some(self.gid))?;
        run(self
            .command("initdb")
            .args(["-k", "-A", "trust", "-U", "bench", "--wal-segsize=1", "-D"])
            .arg(&data))?;
        self.start(mount)?;
        run(self.command("pgbench").args(["-i", "-q", "-s", "1"]))?;
        self.query("CREATE TABLE numbered (round int, client int, n bigint, PRIMARY KEY (round, client, n))")?;
        Ok(())
    }

    /// Starts the server and waits until it answers; after a crash it recovers first.
    pub fn start(&mut self, mount: &Path) -> Result<()> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))?;
        let child = self
            .command("postgres")
            .arg("-D")
            .arg(mount.join("pg"))
            .arg("-k")
            .arg(&self.dir)
            .args(["-c", "listen_addresses=", "-c", "shared_buffers=16MB"])
            .args(["-c", "max_wal_size=32MB", "-c", "min_wal_size=4MB"])
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting postgres")?;
        self.server = Some(child);
        let begin = Instant::now();
        while self.query("SELECT 1").is_err() {
            let ended = match &mut self.server {
                Some(child) => child.try_wait()?.is_some(),
                None => true,
            };
            if ended || begin.elapsed() > PATIENCE {
                bail!("postgres: {}", fs::read_to_string(self.dir.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// SIGKILL to the server and all its processes.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.server.take() else {
            return Ok(());
        };
        let children = children_of(child.id());
        // The first dead one must not be able to start others.
        child.kill()?;
        for pid in children.into_iter().filter_map(Pid::from_raw) {
            // Many have ended with the first.
            let _ = kill_process(pid, Signal::KILL);
        }
        child.wait()?;
        Ok(())
    }

    /// A shutdown in order.
    pub fn stop(&mut self) -> Result<()> {
        if let Some(mut child) = self.server.take() {
            kill_process(Pid::from_child(&child), Signal::INT)?;
            let status = child.wait()?;
            ensure!(status.success(), "postgres: {status}");
        }
        Ok(())
    }

    /// Runs one statement; rows come as lines of fields between bars.
    pub fn query(&self, sql: &str) -> Result<String> {
        let output = self
            .command("psql")
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql])
            .output()?;
        ensure!(
            output.status.success(),
            "{sql}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Starts clients that go on until they are stopped or the server dies.
    pub fn load(&self, round: u32) -> Result<Load> {
        let script = self.dir.join("numbered.sql");
        fs::write(&script, NUMBERED)?;
        let prefix = self.dir.join(format!("round{round}"));
        let mut command = self.command("pgbench");
        command
            .args(["-n", "-l", "-T", "3600", "-c", &CLIENTS.to_string()])
            .args(["-D", "n=0", "-D", &format!("round={round}")])
            .args(["-b", "tpcb-like", "-f"])
            .arg(script)
            .arg(format!("--log-prefix={}", prefix.display()))
            .stdout(Stdio::null())
            .stderr(fs::File::create(prefix.with_extension("err"))?);
        let child = command.spawn().context("starting pgbench")?;
        let log = PathBuf::from(format!("{}.{}", prefix.display(), child.id()));
        Ok(Load { round, child, log })
    }

    /// What was acknowledged is there, everything once, and the sums are right.
    pub fn check(&self, all: &[Acknowledged]) -> Result<()> {
        for round in all {
            let rows = self.query(&format!(
                "SELECT client, count(*), max(n) FROM numbered WHERE round = {} GROUP BY client",
                round.round
            ))?;
            let mut found = BTreeMap::new();
            for row in rows.lines() {
                let fields: Vec<u64> = row
                    .split('|')
                    .map(str::parse)
                    .collect::<Result<_, _>>()
                    .with_context(|| format!("row {row}"))?;
                ensure!(
                    fields[1] == fields[2],
                    "a transaction in between is missing: {row}"
                );
                found.insert(fields[0], fields[2]);
            }
            for (client, acknowledged) in &round.numbered {
                let found = found.get(client).copied().unwrap_or(0);
                ensure!(
                    (*acknowledged..=acknowledged + 1).contains(&found),
                    "client {client} of round {}: {acknowledged} acknowledged, {found} found",
                    round.round
                );
            }
        }
        let acknowledged: u64 = all.iter().map(|round| round.others).sum();
        let possible = acknowledged + u64::from(CLIENTS) * all.len() as u64;
        let found: u64 = self
            .query("SELECT count(*) FROM pgbench_history")?
            .parse()?;
        ensure!(
            (acknowledged..=possible).contains(&found),
            "{acknowledged} of pgbench's own transactions acknowledged, {found} found"
        );
        let sums = self.query(
            "SELECT (SELECT coalesce(sum(delta), 0) FROM pgbench_history), \
             (SELECT sum(abalance) FROM pgbench_accounts), \
             (SELECT sum(tbalance) FROM pgbench_tellers), \
             (SELECT sum(bbalance) FROM pgbench_branches)",
        )?;
        let mut sums = sums.split('|');
        let first = sums.next().context("sums")?;
        ensure!(sums.all(|sum| sum == first), "pgbench's sums differ");
        Ok(())
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // A test that failed has its own error.
        let _ = self.kill();
    }
}

/// Processes whose parent is this one.
fn children_of(parent: u32) -> Vec<i32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().flat_map(str::parse).collect()
}

/// What was acknowledged to the clients of one load.
#[derive(Clone, Debug, Default)]
pub struct Acknowledged {
    round: u32,
    /// By client: numbered rows 1 to this.
    numbered: BTreeMap<u64, u64>,
    /// Transactions of pgbench's own kind.
    others: u64,
}

impl Acknowledged {
    /// Transactions of both kinds.
    pub fn count(&self) -> u64 {
        self.others + self.numbered.values().sum::<u64>()
    }
}

/// Running clients.
#[derive(Debug)]
pub struct Load {
    round: u32,
    child: Child,
    log: PathBuf,
}

impl Load {
    /// Waits until some more transactions have been acknowledged.
    pub fn wait_for_progress(&mut self) -> Result<()> {
        let len = |path: &Path| fs::metadata(path).map_or(0, |m| m.len());
        let enough = len(&self.log) + 2 * LOG_CHUNK_BYTES;
        let begin = Instant::now();
        while len(&self.log) < enough {
            if let Some(status) = self.child.try_wait()? {
                let error = fs::read_to_string(self.log.with_extension("err"));
                bail!("pgbench: {status}\n{}", error.unwrap_or_default());
            }
            ensure!(begin.elapsed() < PATIENCE, "no transaction is acknowledged");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends the clients, if the server's death has not, and counts.
    pub fn end(mut self, postgres: &Postgres) -> Result<Acknowledged> {
        if postgres.server.is_some() {
            // Its connections, not itself: a signal would lose the end of its log.
            postgres.query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                 WHERE application_name = 'pgbench'",
            )?;
        }
        let begin = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(begin.elapsed() < PATIENCE, "pgbench does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut all = Acknowledged {
            round: self.round,
            ..Acknowledged::default()
        };
        for line in fs::read_to_string(&self.log)?.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let [client, _, _, script, _, _] = fields[..] else {
                bail!("pgbench's log has a line '{line}'");
            };
            match script {
                "1" => *all.numbered.entry(client.parse()?).or_default() += 1,
                _ => all.others += 1,
            }
        }
        ensure!(
            all.count() > 0,
            "no transaction was acknowledged: nothing is proven"
        );
        Ok(all)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It has ended if the test went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
