//! A pair of one Lockstep node on this machine and one kernel DRBD 8.4 node in a guest.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::guest::{GUEST_ADDRESS, Guest, GuestSetup, HOST_IN_GUEST};
use crate::guest_drbd::{DRBD_LIMIT, DRBD_PORT, LOST_LINK, drbd_state, wait_state};

/// Size of each disk.
const DISK_MIB: u64 = 32;

/// What the kernel logs as an error when the peer's port answers and is closed at once.
const REFUSED: &[&str] = &[
    "sock_sendmsg returned -",
    "sock_recvmsg returned -",
    "State change failed: In transient state",
    "mask = 0x1f0 val = 0x90",
    "old_conn:BrokenPipe wanted_conn:WFReportParams",
    "old_conn:NetworkFailure wanted_conn:WFReportParams",
];

/// `alfa` is the Lockstep node, `bravo` the kernel's. The resource is `r0` with one volume.
pub struct Mixed84 {
    /// The kernel's node.
    pub kernel: Guest,
    daemon: Option<Child>,
    minor: u32,
    dir: tempfile::TempDir,
}

impl Mixed84 {
    /// Boots the guest, starts the daemon, makes metadata and brings both up. `minor` is one that
    /// no other test of this machine uses.
    pub fn start(net: &str, minor: u32) -> Result<Mixed84> {
        let dir = tempfile::Builder::new()
            .prefix("lockstep-mixed-")
            .tempdir()?;
        for name in ["alfa", "bravo"] {
            fs::File::create(dir.path().join(name))?.set_len(DISK_MIB << 20)?;
        }
        let kernel = Guest::start(GuestSetup {
            disks: vec![dir.path().join("bravo")],
            ports: vec![DRBD_PORT],
            ..GuestSetup::new("bravo")
        })?;
        let own_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut pair = Mixed84 {
            kernel,
            daemon: None,
            minor,
            dir,
        };
        let head = "global { usage-count no; }\nresource r0 {\n";
        let options = format!(" net {{ {net} }}\n disk {{ c-plan-ahead 0; resync-rate 100M; }}\n");
        let kernel_conf = format!(
            "{head}{options}\
             \x20on alfa {{ device /dev/drbd0 minor 0; disk /dev/vda; meta-disk internal; \
             address {HOST_IN_GUEST}:{own_port}; }}\n\
             \x20on bravo {{ device /dev/drbd0 minor 0; disk /dev/vda; meta-disk internal; \
             address {GUEST_ADDRESS}:{DRBD_PORT}; }}\n}}\n"
        );
        let own_conf = format!(
            "{head}{options}\
             \x20on alfa {{ node-id 0; address ipv4 127.0.0.1:{own_port}; volume 0 {{ device minor \
             {minor}; disk {}; meta-disk internal; }} }}\n\
             \x20on bravo {{ node-id 1; address ipv4 {}; volume 0 {{ device minor 0; disk \
             /dev/vda; meta-disk internal; }} }}\n}}\n",
            pair.disk("alfa").display(),
            pair.kernel.address(DRBD_PORT),
        );
        let node = pair.node_dir();
        fs::create_dir(&node)?;
        fs::write(node.join("drbd.conf"), own_conf)?;
        fs::write(node.join("node-name"), "alfa\n")?;
        let bin = pair.dir.path().join("bin");
        fs::create_dir(&bin)?;
        let binary = crate::binary()?;
        for name in ["lockstepd", "drbdadm", "drbdsetup", "drbdmeta"] {
            std::os::unix::fs::symlink(&binary, bin.join(name))?;
        }
        pair.start_daemon()?;
        pair.adm(&["create-md", "--force", "r0"])?;
        pair.adm(&["up", "r0"])?;
        pair.kernel.write_file("/etc/drbd.conf", &kernel_conf)?;
        pair.kernel
            .sh("yes yes | drbdadm create-md --force r0 && drbdadm up r0")?;
        Ok(pair)
    }

    fn node_dir(&self) -> PathBuf {
        self.dir.path().join("node")
    }

    /// File of a node's disk.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The volume's block device on the Lockstep node, while it is Primary.
    pub fn device(&self) -> Result<PathBuf> {
        let link = self.node_dir().join(format!("dev/drbd{}", self.minor));
        self.wait("the block device", |_| Ok(link.exists()))?;
        Ok(link.canonicalize()?)
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) -> Result<()> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.node_dir().join("log"))?;
        let child = Command::new(self.dir.path().join("bin/lockstepd"))
            .env("LOCKSTEP_DIR", self.node_dir())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting lockstepd")?;
        self.daemon = Some(child);
        self.wait("the daemon answers", |pair| {
            Ok(pair.tool("drbdsetup", &["status"])?.status.success())
        })
    }

    /// SIGKILL to the daemon.
    pub fn kill_daemon(&mut self) -> Result<()> {
        let mut child = self.daemon.take().context("the daemon does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    fn tool(&self, tool: &str, args: &[&str]) -> Result<Output> {
        Command::new(self.dir.path().join("bin").join(tool))
            .args(args)
            .env("LOCKSTEP_DIR", self.node_dir())
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("{tool} {args:?}"))
    }

    /// `drbdadm` of the Lockstep node, which must succeed.
    pub fn adm(&self, args: &[&str]) -> Result<()> {
        let output = self.tool("drbdadm", args)?;
        ensure!(
            output.status.success(),
            "drbdadm {}: {}\n{}{}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// `drbdsetup status` of the Lockstep node.
    pub fn status(&self) -> Result<serde_json::Value> {
        let output = self.tool("drbdsetup", &["status", "r0", "--json"])?;
        let value: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        Ok(value[0].clone())
    }

    /// The Lockstep node's words for the connection, its disk and the peer's disk.
    pub fn state(&self) -> Result<[String; 3]> {
        let status = self.status()?;
        let connection = &status["connections"][0];
        let text = |value: &serde_json::Value| value.as_str().unwrap_or("").to_string();
        Ok([
            text(&connection["connection-state"]),
            text(&status["devices"][0]["disk-state"]),
            text(&connection["peer_devices"][0]["peer-disk-state"]),
        ])
    }

    /// Waits for something of the Lockstep node; a failure shows both ends.
    pub fn wait(&self, what: &str, mut condition: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        loop {
            if condition(self).unwrap_or(false) {
                return Ok(());
            }
            if begin.elapsed() > DRBD_LIMIT {
                bail!("not within {DRBD_LIMIT:?}: {what}\n{}", self.report());
            }
            // Polled: the tools have no wait for every condition.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// State and last log lines of both nodes.
    pub fn report(&self) -> String {
        let status = self.tool("drbdsetup", &["status", "--verbose", "--statistics"]);
        let status = status.map_or_else(
            |e| e.to_string(),
            |o| String::from_utf8_lossy(&o.stdout).into_owned(),
        );
        let log = fs::read_to_string(self.node_dir().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(30)..].join("\n");
        let kernel = self
            .kernel
            .sh("cat /proc/drbd; dmesg | tail -30")
            .unwrap_or_else(|e| e.to_string());
        format!("--- alfa\n{status}{tail}\n--- bravo\n{kernel}")
    }

    /// Waits until the two are connected, whatever their disks are.
    pub fn wait_connected(&self) -> Result<()> {
        self.wait("Connected", |pair| Ok(pair.state()?[0] == "Connected"))?;
        wait_state(&self.kernel, "Connected", DRBD_LIMIT, |s| {
            s.connection == "Connected"
        })
        .map(drop)
    }

    /// Waits until both see both disks UpToDate with nothing to resync.
    pub fn wait_in_sync(&self) -> Result<()> {
        self.wait("everything UpToDate here", |pair| {
            Ok(pair.state()? == ["Connected", "UpToDate", "UpToDate"])
        })?;
        self.wait("everything UpToDate in the kernel", |pair| {
            let s = drbd_state(&pair.kernel, 0)?;
            Ok(s.connection == "Connected"
                && s.disks == "UpToDate/UpToDate"
                && s.out_of_sync_kib == 0)
        })
    }

    /// Takes both down (nothing may be mounted) and compares the data on the lower disks; no line
    /// of the kernel's log may be an error, but for the words for a lost link.
    pub fn check_same_data(&self) -> Result<()> {
        let sectors = self.kernel.sh("cat /sys/block/drbd0/size")?;
        let bytes = sectors.trim().parse::<usize>()? * 512;
        ensure!(bytes > 0, "the device has no size");
        self.adm(&["down", "r0"])?;
        self.kernel.sh("drbdadm down r0 && sync")?;
        let mut errors = self.kernel.kernel_errors()?;
        // QEMU's network takes connections for a port of this host that nobody listens on.
        let lost = |line: &String| {
            LOST_LINK.iter().any(|text| line.ends_with(text))
                || REFUSED.iter().any(|text| line.contains(text))
        };
        errors.retain(|line| line.contains("drbd") && !lost(line));
        ensure!(errors.is_empty(), "{errors:#?}");
        let read = |path: &Path| fs::read(path);
        let (a, b) = (read(&self.disk("alfa"))?, read(&self.disk("bravo"))?);
        let differs = (0..bytes).find(|&at| a[at] != b[at]);
        ensure!(
            differs.is_none(),
            "the disks differ from byte {differs:?} on, of {bytes}"
        );
        Ok(())
    }
}

impl Drop for Mixed84 {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            // A clean end takes the block device along.
            let _ = self.tool("drbdadm", &["down", "r0"]);
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            let begin = Instant::now();
            while begin.elapsed().as_secs() < 10 {
                if matches!(child.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
