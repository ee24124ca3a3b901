//! Our WAN proxies as processes of this host, one beside each of two nodes, and the lines around
//! them: node, line, proxy, WAN line, proxy, line, node.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::PATIENCE;
use crate::guest_drbd::DRBD_PORT;
use crate::guest_line::{Line, Side};

/// Two proxies with one connection, `r0`, between them.
pub struct Proxies {
    /// The one beside alfa; it dials the other.
    pub a: Proxy,
    /// The one beside bravo.
    pub b: Proxy,
    /// Between the two.
    pub wan: Line,
    near_a: Line,
    near_b: Line,
    inside_a: SocketAddr,
    directory: tempfile::TempDir,
}

/// One proxy. The process can be killed and started again; its configuration stays.
pub struct Proxy {
    /// Name of its connection.
    pub connection: &'static str,
    directory: PathBuf,
    child: Mutex<Option<Child>>,
}

impl Proxies {
    /// Starts both for two nodes that listen there. `options` are words of `add connection`,
    /// `daemon` are arguments of `lockstep proxy run`.
    pub fn start(
        alfa: SocketAddr,
        bravo: SocketAddr,
        options: &str,
        daemon: &str,
    ) -> Result<Proxies> {
        let directory = tempfile::Builder::new().prefix("lockstep-wan-").tempdir()?;
        let secret = directory.path().join("secret");
        fs::write(&secret, "0123456789abcdef0123456789abcdef")?;
        let at = |port| SocketAddr::from((fresh_address(), port));
        let (inside_a, inside_b) = (at(7815), at(7815));
        let (outside_a, outside_b) = (at(7715), at(7715));
        let wan = Line::new(at(7715), outside_b, None)?;
        let wan_address = wan.address();
        let conf_a = format!(
            "add connection r0-bravo-alfa {inside_a} {wan_address} {outside_a} {alfa} \
             --dial=always {options}\n"
        );
        let conf_b = format!(
            "add connection r0-alfa-bravo {inside_b} {outside_a} {outside_b} {bravo} \
             --dial=never {options}\n"
        );
        let make = |name: &str, connection, conf: String| -> Result<Proxy> {
            let directory = directory.path().join(name);
            fs::create_dir(&directory)?;
            fs::write(directory.join("commands"), conf)?;
            fs::write(
                directory.join("arguments"),
                format!("--secret-file {} {daemon}", secret.display()),
            )?;
            Ok(Proxy {
                connection,
                directory,
                child: Mutex::new(None),
            })
        };
        let proxies = Proxies {
            a: make("a", "r0-bravo-alfa", conf_a)?,
            b: make("b", "r0-alfa-bravo", conf_b)?,
            wan,
            near_a: Line::beside(Side::Above, DRBD_PORT, inside_a)?,
            near_b: Line::beside(Side::Below, DRBD_PORT, inside_b)?,
            inside_a,
            directory,
        };
        proxies.b.start()?;
        proxies.a.start()?;
        Ok(proxies)
    }

    /// The ports of 127.0.0.1 where alfa and bravo find their proxy.
    pub fn ports(&self) -> (u16, u16) {
        (self.near_a.address().port(), self.near_b.address().port())
    }

    /// Moves alfa's proxy to a port on the same side of DRBD's own as bravo's, so that both nodes
    /// choose alike who opens which socket first. Answers as [`Proxies::ports`].
    pub fn make_symmetric(&mut self) -> Result<(u16, u16)> {
        self.near_a = Line::beside(Side::Below, DRBD_PORT, self.inside_a)?;
        Ok(self.ports())
    }

    /// Waits until the proxies have a session.
    pub fn wait_session(&self) -> Result<()> {
        for proxy in [&self.a, &self.b] {
            proxy.wait("a session", |state| {
                state["bulk_carriers"].as_u64() > Some(0)
                    && state["state"] != "Suspended"
                    && state["state"] != "Connecting"
            })?;
        }
        Ok(())
    }

    /// Both logs, for a failure's text.
    pub fn logs(&self) -> String {
        format!(
            "--- proxy a\n{}\n--- proxy b\n{}",
            self.a.log_tail(),
            self.b.log_tail()
        )
    }

    /// Where both keep their files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }
}

impl Proxy {
    /// Starts the process and waits until it answers.
    pub fn start(&self) -> Result<()> {
        let mut child = self.child.lock().expect("no thread panics with it");
        ensure!(child.is_none(), "the proxy runs already");
        *child = Some(self.spawn(&[])?);
        drop(child);
        self.wait_answer()
    }

    /// SIGKILL: what it had buffered is gone.
    pub fn kill(&self) -> Result<()> {
        let mut child = self.child.lock().expect("no thread panics with it");
        let mut process = child.take().context("the proxy does not run")?;
        process.kill()?;
        process.wait()?;
        Ok(())
    }

    /// Starts a second process that takes over from the first, which must end by itself.
    pub fn upgrade(&self) -> Result<()> {
        let mut child = self.child.lock().expect("no thread panics with it");
        let old = child.as_mut().context("the proxy does not run")?;
        let mut new = self.spawn(&["--take-over"])?;
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = old.try_wait()? {
                break status;
            }
            if begin.elapsed() > PATIENCE {
                new.kill()?;
                new.wait()?;
                bail!("the old proxy does not end:\n{}", self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        *child = Some(new);
        drop(child);
        ensure!(
            status.success(),
            "the old proxy: {status}\n{}",
            self.log_tail()
        );
        self.wait_answer()
    }

    /// Control commands; each must succeed. Answers with their output.
    pub fn ctl(&self, commands: &[&str]) -> Result<String> {
        let mut command = Command::new(crate::binary()?);
        command
            .args(["proxy", "ctl", "--socket"])
            .arg(self.socket());
        for text in commands {
            command.args(["-c", text]);
        }
        let output = command.stdin(Stdio::null()).output()?;
        ensure!(
            output.status.success(),
            "{commands:?}: {}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.log_tail()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The state of its connection.
    pub fn state(&self) -> Result<serde_json::Value> {
        let output = Command::new(crate::binary()?)
            .args(["proxy", "ctl", "--json", "--socket"])
            .arg(self.socket())
            .args(["show", "connections"])
            .stdin(Stdio::null())
            .output()?;
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(value["connections"][0].clone())
    }

    /// Waits until its connection's state satisfies the condition.
    pub fn wait(
        &self,
        what: &str,
        condition: impl Fn(&serde_json::Value) -> bool,
    ) -> Result<serde_json::Value> {
        let begin = Instant::now();
        loop {
            let state = self.state()?;
            if condition(&state) {
                return Ok(state);
            }
            if begin.elapsed() > PATIENCE {
                bail!(
                    "not within {PATIENCE:?}: {what}\n{state:#}\n{}",
                    self.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    fn spawn(&self, more: &[&str]) -> Result<Child> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.directory.join("log"))?;
        let arguments = fs::read_to_string(self.directory.join("arguments"))?;
        Command::new(crate::binary()?)
            .args(["proxy", "run", "--socket"])
            .arg(self.socket())
            .arg("--config")
            .arg(self.directory.join("commands"))
            .args(arguments.split_whitespace())
            .args(more)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting a proxy")
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    fn wait_answer(&self) -> Result<()> {
        let begin = Instant::now();
        while self.state().is_err() {
            ensure!(
                begin.elapsed() < PATIENCE,
                "the proxy does not answer:\n{}",
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let child = match self.child.get_mut() {
            Ok(child) => child.take(),
            Err(poisoned) => poisoned.into_inner().take(),
        };
        if let Some(mut child) = child {
            // One that has ended by itself is as good.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A loopback address that no other proxy uses, of this process or of another one.
fn fresh_address() -> Ipv4Addr {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let pid = std::process::id().to_be_bytes();
    Ipv4Addr::new(
        127,
        16 + NEXT.fetch_add(1, Ordering::Relaxed) % 48,
        pid[2],
        pid[3],
    )
}
