//! The demo's database: PostgreSQL as an ordinary user, and clients that remember what was
//! acknowledged to them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, bail, ensure};

/// Where PostgreSQL's programs are, and as whom they run.
#[derive(Clone, Debug)]
pub(super) struct Postgres {
    bin: PathBuf,
    uid: u32,
    gid: u32,
    /// The socket's directory.
    run: PathBuf,
}

impl Postgres {
    /// Finds the programs and a user.
    pub(super) fn find(run: &Path) -> anyhow::Result<Postgres> {
        let versions = fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten();
        let mut places: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
        places.sort();
        places.reverse();
        places.extend(["/usr/local/bin".into(), "/usr/bin".into()]);
        let whole = |bin: &PathBuf| {
            ["initdb", "postgres", "psql"]
                .iter()
                .all(|name| bin.join(name).exists())
        };
        let Some(bin) = places.into_iter().find(whole) else {
            bail!("PostgreSQL is not installed: `apt-get install postgresql`, or `make prepare`");
        };
        let (uid, gid) = user("postgres")
            .or_else(|| user("nobody"))
            .context("no user for it")?;
        fs::create_dir_all(run)?;
        std::os::unix::fs::chown(run, Some(uid), Some(gid))?;
        Ok(Postgres {
            bin,
            uid,
            gid,
            run: run.to_owned(),
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command
            .uid(self.uid)
            .gid(self.gid)
            .current_dir("/")
            .env("LC_ALL", "C")
            .env("HOME", &self.run)
            .stdin(Stdio::null());
        command
    }

    /// A new database below the mounted file system.
    pub(super) fn init(&self, mount: &Path) -> anyhow::Result<()> {
        let data = mount.join("pg");
        fs::create_dir_all(&data)?;
        std::os::unix::fs::chown(&data, Some(self.uid), Some(self.gid))?;
        let output = self
            .command("initdb")
            .args(["-A", "trust", "-U", "demo", "-E", "UTF8", "-D"])
            .arg(&data)
            .output()
            .context("running initdb")?;
        ensure!(
            output.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// Starts the server. Its own crash recovery runs if it was killed.
    pub(super) fn start(&self, mount: &Path) -> anyhow::Result<Server> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.run.join("log"))?;
        let child = self
            .command("postgres")
            .arg("-D")
            .arg(mount.join("pg"))
            .arg("-k")
            .arg(&self.run)
            .args(["-c", "listen_addresses=", "-c", "shared_buffers=16MB"])
            .args(["-c", "max_wal_size=64MB", "-c", "fsync=on"])
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("starting postgres")?;
        Ok(Server { child: Some(child) })
    }

    /// Runs one statement and gives its rows.
    pub(super) fn query(&self, sql: &str) -> anyhow::Result<String> {
        let output = self
            .psql()
            .args(["-c", sql])
            .output()
            .context("running psql")?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn psql(&self) -> Command {
        let mut command = self.command("psql");
        command.args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "demo",
        ]);
        command.args(["-d", "postgres", "-h"]).arg(&self.run);
        command
    }
}

/// User and group id.
fn user(name: &str) -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    let line = passwd
        .lines()
        .find(|line| line.split(':').next() == Some(name))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// A running server.
pub(super) struct Server {
    child: Option<Child>,
}

impl Server {
    /// SIGKILL to the server and all its processes.
    pub(super) fn kill(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        let children = children_of(child.id());
        // The first dead one must not be able to start others.
        let _ = child.kill();
        for pid in children {
            if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let _ = child.wait();
    }

    /// A fast shutdown in order.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        if let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
            rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        }
        child.wait().context("waiting for postgres")?;
        Ok(())
    }

    /// It ended by itself.
    pub(super) fn has_ended(&mut self) -> bool {
        self.child
            .as_mut()
            .is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Processes whose parent is this one.
fn children_of(parent: u32) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name in parentheses may contain blanks; state and parent follow it.
            let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
            after.split_whitespace().nth(1) == Some(&parent.to_string())
        })
        .collect()
}

/// Everything that was acknowledged to clients, as `(client, number)`.
pub(super) type Acknowledged = Arc<Mutex<BTreeSet<(u32, u64)>>>;

/// Clients that insert rows as fast as they are acknowledged.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts clients, numbered from `first`. Each acknowledged row is also written to `log`.
    pub(super) fn start(
        postgres: &Postgres,
        clients: std::ops::Range<u32>,
        acknowledged: &Acknowledged,
        log: &Path,
    ) -> anyhow::Result<Load> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for client in clients {
            let log = fs::File::options().create(true).append(true).open(log)?;
            let mut psql = postgres
                .psql()
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .process_group(0)
                .spawn()
                .context("starting a client")?;
            let (stop, acknowledged) = (stop.clone(), acknowledged.clone());
            threads.push(std::thread::spawn(move || {
                insert_rows(&mut psql, client, &stop, &acknowledged, log);
                // A client whose server has died is of no use.
                let _ = psql.kill();
                let _ = psql.wait();
            }));
        }
        Ok(Load {
            stop,
            clients: threads,
        })
    }

    /// Ends the clients; those of a dead server have ended by themselves.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            // A client that panicked has no more rows to tell of.
            let _ = client.join();
        }
    }
}

/// One row after the other, until the server dies or it is told to stop.
fn insert_rows(
    psql: &mut Child,
    client: u32,
    stop: &AtomicBool,
    acknowledged: &Acknowledged,
    mut log: fs::File,
) {
    let (Some(mut input), Some(output)) = (psql.stdin.take(), psql.stdout.take()) else {
        return;
    };
    let mut answers = BufReader::new(output).lines();
    for number in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let sql = format!(
            "INSERT INTO tx VALUES ({client}, {number}, repeat('lockstep ', 20)) RETURNING n;\n"
        );
        if input.write_all(sql.as_bytes()).is_err() {
            return;
        }
        match answers.next() {
            Some(Ok(answer)) if answer.trim() == number.to_string() => {}
            _ => return,
        }
        acknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((client, number));
        // The log is for people; the set decides.
        let _ = writeln!(log, "{client} {number}");
    }
}
