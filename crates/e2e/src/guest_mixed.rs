//! A pair of one Lockstep node on this machine and one kernel DRBD 8.4 node in a guest.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::guest::{GUEST_ADDRESS, Guest, GuestSetup, HOST_IN_GUEST, HostFiles};
use crate::guest_disks::{FailingFile, Fault, dm_commands};
use crate::guest_drbd::{DRBD_LIMIT, DRBD_PORT, LOST_LINK, drbd_state, wait_state};
use crate::guest_host::HostNode;
use crate::guest_line::{Line, LineState, Side};
use crate::guest_trouble;

/// Size of each disk.
const DISK_MIB: u64 = 32;

/// Where the kernel's handlers note their names.
const KERNEL_CALLS: &str = "/run/called";

/// What the kernel logs as an error when the peer's port answers and is closed at once.
const REFUSED: &[&str] = &[
    "sock_sendmsg returned -",
    "sock_recvmsg returned -",
    "State change failed: In transient state",
    "mask = 0x1f0 val = 0x90",
    "old_conn:BrokenPipe wanted_conn:WFReportParams",
    "old_conn:NetworkFailure wanted_conn:WFReportParams",
];

/// Format of the metadata that the Lockstep node starts with. The kernel's are always v08.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// Its own.
    V09,
    /// The kernel's.
    V08,
}

/// What the nodes' disks can be told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disks {
    /// They hold.
    Sound,
    /// They fail on command ([`Mixed84::set_fault`]). One volume, no exchange, no reboot.
    CanFail,
}

/// What a rebooted kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterBoot {
    /// `drbdadm up`.
    Up,
    /// Nothing.
    Nothing,
}

/// How a mixed pair is made.
#[derive(Clone, Debug)]
pub struct MixedSetup {
    /// Lines for the `net` section.
    pub net: String,
    /// Further lines for the `disk` section.
    pub disk: String,
    /// Minor of the Lockstep node that no other test of this machine uses.
    pub minor: u32,
    /// Format of the Lockstep node's metadata.
    pub metadata: Metadata,
    /// Volumes, which take as many minors.
    pub volumes: u32,
    /// Access of the guest to the host's files.
    pub host_files: HostFiles,
    /// Whether the disks can fail.
    pub disks: Disks,
    /// Handlers that note their names ([`Mixed84::called`]).
    pub handlers: &'static [&'static str],
}

impl MixedSetup {
    /// One volume, metadata v09, no access to the host's files.
    pub fn new(net: &str, minor: u32) -> MixedSetup {
        MixedSetup {
            net: net.to_string(),
            disk: String::new(),
            minor,
            metadata: Metadata::V09,
            volumes: 1,
            host_files: HostFiles::Hidden,
            disks: Disks::Sound,
            handlers: &[],
        }
    }
}

/// `alfa` is the Lockstep node, `bravo` the kernel's. The resource is `r0`.
pub struct Mixed84 {
    /// The kernel's node.
    pub kernel: Guest,
    /// The Lockstep node.
    pub node: HostNode,
    setup: MixedSetup,
    own_port: u16,
    /// How the Lockstep node reaches the kernel, and the kernel the Lockstep node. Both see the peer
    /// that they expect, so both can open connections.
    lines: [Line; 2],
    swapped: bool,
    failing: Option<FailingFile>,
    dir: tempfile::TempDir,
}

/// Lines of a `net` section with which nodes find each other soon after a loss.
pub const PACE: &str = "connect-int 1; ping-timeout 30; socket-check-timeout 3;";

impl Mixed84 {
    /// Boots the guest, starts the daemon, makes metadata and brings both up.
    pub fn start(setup: MixedSetup) -> Result<Mixed84> {
        let dir = tempfile::Builder::new()
            .prefix("lockstep-mixed-")
            .tempdir()?;
        let mut disks = Vec::new();
        for volume in 0..setup.volumes {
            for node in ["bravo", "alfa"] {
                let path = image_of(dir.path(), node, volume);
                fs::File::create(&path)?.set_len(DISK_MIB << 20)?;
                disks.push(path);
            }
        }
        let kernel = Guest::start(GuestSetup {
            disks,
            ports: vec![DRBD_PORT],
            host_files: setup.host_files,
            ..GuestSetup::new("bravo")
        })?;
        let own_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let node = HostNode::new(dir.path(), "alfa", setup.minor)?;
        // In the eyes of both the Lockstep node has the larger address.
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, own_port));
        let lines = [
            Line::beside(Side::Below, own_port, kernel.address(DRBD_PORT))?,
            Line::beside(Side::Above, DRBD_PORT, own)?,
        ];
        let mut pair = Mixed84 {
            kernel,
            node,
            setup,
            own_port,
            lines,
            swapped: false,
            failing: None,
            dir,
        };
        if pair.setup.disks == Disks::CanFail {
            pair.failing = Some(FailingFile::new(&pair.disk("alfa", 0), pair.dir.path())?);
            pair.kernel.load_module("dm_mod", "")?;
            pair.kernel.sh(&dm_commands(Fault::None, DISK_MIB << 11))?;
        }
        pair.write_own_configuration()?;
        pair.start_daemon()?;
        match pair.setup.metadata {
            Metadata::V09 => pair.adm(&["create-md", "--force", "r0"])?,
            Metadata::V08 => pair.create_v08()?,
        }
        pair.adm(&["up", "r0"])?;
        pair.write_kernel_configuration()?;
        // One after the other: each eats all of its input.
        for volume in 0..pair.setup.volumes {
            let create = format!("yes yes | drbdadm create-md --force r0/{volume}");
            pair.kernel.sh(&create)?;
        }
        pair.kernel.sh("drbdadm up r0")?;
        Ok(pair)
    }

    fn create_v08(&self) -> Result<()> {
        let disk = self.disk("alfa", 0);
        let disk = disk.to_str().context("a path in ASCII")?;
        let output = self.node.tool(
            "drbdmeta",
            &["--force", "-", "v08", disk, "internal", "create-md"],
        )?;
        ensure!(output.status.success(), "drbdmeta: {output:?}");
        Ok(())
    }

    /// Each node takes the other's disk. Neither may be up.
    pub fn swap_disks(&mut self) -> Result<()> {
        self.swapped = !self.swapped;
        self.write_own_configuration()?;
        self.write_kernel_configuration()
    }

    /// [`Mixed84::swap_disks`] while the kernel's machine is off.
    pub fn swap_disks_offline(&mut self) -> Result<()> {
        self.swapped = !self.swapped;
        self.write_own_configuration()
    }

    /// Boots the kernel's node after a power cut and brings its DRBD up if asked to.
    pub fn boot_kernel(&self, then: AfterBoot) -> Result<()> {
        self.kernel.boot()?;
        self.write_kernel_configuration()?;
        match then {
            AfterBoot::Up => self.kernel.sh("drbdadm up r0").map(drop),
            AfterBoot::Nothing => Ok(()),
        }
    }

    /// What both configurations begin with; handlers note their names in a file.
    fn options(&self, calls: &str) -> String {
        let mut text = format!(
            "global {{ usage-count no; }}\nresource r0 {{\n net {{ {} }}\n \
             disk {{ c-plan-ahead 0; resync-rate 100M; {} }}\n handlers {{\n",
            self.setup.net, self.setup.disk
        );
        for name in self.setup.handlers {
            text += &format!("  {name} \"echo {name} >> {calls}\";\n");
        }
        text + " }\n"
    }

    /// The handlers that a node has called since the last question, one a line.
    pub fn called(&self, side: guest_trouble::Side) -> Result<String> {
        if side.is_kernel() {
            let take = format!("cat {KERNEL_CALLS} 2>/dev/null; rm -f {KERNEL_CALLS}");
            return self.kernel.sh(&take);
        }
        let path = self.dir.path().join("called");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        Ok(text)
    }

    /// Makes a node's disk fail, or hold again.
    pub fn set_fault(&self, side: guest_trouble::Side, fault: Fault) -> Result<()> {
        if side.is_kernel() {
            return self
                .kernel
                .sh(&dm_commands(fault, DISK_MIB << 11))
                .map(drop);
        }
        let failing = self.failing.as_ref().context("disks that can fail")?;
        failing.set_fault(fault);
        Ok(())
    }

    /// Other lines for the `disk` section of both, at once.
    pub fn adjust_disk(&mut self, disk: &str) -> Result<()> {
        self.setup.disk = disk.to_string();
        self.write_kernel_configuration()?;
        self.write_own_configuration()?;
        self.kernel.sh("drbdadm adjust r0")?;
        self.adm(&["adjust", "r0"])
    }

    /// Other lines for the `net` section, from the next `up` or `adjust` on. The Lockstep node can
    /// get others than the kernel's.
    pub fn set_net(&mut self, kernel: &str, own: &str) -> Result<()> {
        self.setup.net = kernel.to_string();
        self.write_kernel_configuration()?;
        self.setup.net = own.to_string();
        self.write_own_configuration()
    }

    fn write_kernel_configuration(&self) -> Result<()> {
        let mut text = self.options(KERNEL_CALLS);
        for (name, host, port) in [
            ("alfa", HOST_IN_GUEST, self.lines[1].address().port()),
            ("bravo", GUEST_ADDRESS, DRBD_PORT),
        ] {
            text += &format!(" on {name} {{\n  address {host}:{port};\n");
            for volume in 0..self.setup.volumes {
                let letter = b'a' + 2 * volume as u8 + u8::from(self.swapped);
                let disk = match self.setup.disks {
                    Disks::Sound => format!("vd{}", char::from(letter)),
                    Disks::CanFail => "dm-0".to_string(),
                };
                text += &format!(
                    "  volume {volume} {{ device minor {volume}; disk /dev/{disk}; \
                     meta-disk internal; }}\n"
                );
            }
            text += " }\n";
        }
        self.kernel.write_file("/etc/drbd.conf", &(text + "}\n"))
    }

    fn write_own_configuration(&self) -> Result<()> {
        let image = if self.swapped { "bravo" } else { "alfa" };
        let calls = self.dir.path().join("called");
        let mut text = self.options(&calls.display().to_string());
        for (id, name, address) in [
            (0, "alfa", format!("127.0.0.1:{}", self.own_port)),
            (1, "bravo", self.lines[0].address().to_string()),
        ] {
            text += &format!(" on {name} {{\n  node-id {id}; address ipv4 {address};\n");
            for volume in 0..self.setup.volumes {
                let disk = match &self.failing {
                    Some(failing) => failing.path().to_path_buf(),
                    None => self.disk(image, volume),
                };
                text += &format!(
                    "  volume {volume} {{ device minor {}; disk {}; meta-disk internal; }}\n",
                    self.setup.minor + volume,
                    disk.display()
                );
            }
            text += " }\n";
        }
        self.node.write_configuration(&(text + "}\n"))
    }

    /// Cuts, stalls or mends the line between the two, both directions of opening connections.
    pub fn line_state(&self, state: LineState) {
        for line in &self.lines {
            line.set_state(state);
        }
    }

    /// A directory for a test's own files.
    pub fn notes(&self) -> &Path {
        self.dir.path()
    }

    /// File of a node's disk.
    pub fn disk(&self, name: &str, volume: u32) -> PathBuf {
        image_of(self.dir.path(), name, volume)
    }

    /// A volume's block device on the Lockstep node, while it is Primary.
    pub fn device(&self, volume: u32) -> Result<PathBuf> {
        self.node.device(volume)
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) -> Result<()> {
        self.node.start_daemon()
    }

    /// SIGKILL to the daemon.
    pub fn kill_daemon(&mut self) -> Result<()> {
        self.node.kill_daemon()
    }

    /// The kernel becomes Primary instead of the Lockstep node.
    pub fn hand_to_kernel(&self) -> Result<()> {
        self.adm(&["secondary", "r0"])?;
        self.kernel.sh("drbdadm primary r0").map(drop)
    }

    /// The Lockstep node becomes Primary instead of the kernel.
    pub fn hand_to_lockstep(&self) -> Result<()> {
        self.kernel.sh("drbdadm secondary r0")?;
        self.adm(&["primary", "r0"])
    }

    /// `drbdadm` of the Lockstep node, which must succeed.
    pub fn adm(&self, args: &[&str]) -> Result<()> {
        self.node.adm(args)
    }

    /// [`HostNode::state`] of the Lockstep node.
    pub fn state(&self, volume: u32) -> Result<[String; 4]> {
        self.node.state(volume)
    }

    /// Blocks that the Lockstep node has marked, in KiB.
    pub fn out_of_sync_kib(&self, volume: u32) -> Result<u64> {
        self.node.out_of_sync_kib(volume)
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
        let kernel = self
            .kernel
            .sh("cat /proc/drbd; dmesg | tail -30")
            .unwrap_or_else(|e| e.to_string());
        format!("--- alfa\n{}\n--- bravo\n{kernel}", self.node.report())
    }

    /// Waits until the two are connected, whatever their disks are.
    pub fn wait_connected(&self) -> Result<()> {
        self.wait("Connected", |pair| Ok(pair.state(0)?[0] == "Connected"))?;
        wait_state(&self.kernel, "Connected", DRBD_LIMIT, |s| {
            s.connection == "Connected"
        })
        .map(drop)
    }

    /// Waits until both see all disks UpToDate with nothing to resync.
    pub fn wait_in_sync(&self) -> Result<()> {
        for volume in 0..self.setup.volumes {
            self.wait("everything UpToDate here", |pair| {
                pair.node.is_in_sync(volume)
            })?;
            self.wait("everything UpToDate in the kernel", |pair| {
                let s = drbd_state(&pair.kernel, volume)?;
                Ok(s.connection == "Connected"
                    && s.disks == "UpToDate/UpToDate"
                    && s.out_of_sync_kib == 0)
            })?;
        }
        Ok(())
    }

    /// Both disks of volume 0 get this size; the volume keeps its own.
    pub fn grow_disks(&self, mib: u64) -> Result<()> {
        let own = fs::File::options().write(true).open(self.disk("alfa", 0))?;
        own.set_len(mib << 20)?;
        self.kernel.resize_disk(0, mib << 20)?;
        self.wait("the grown disk in the kernel", |pair| {
            let sectors = pair.kernel.sh("cat /sys/block/vda/size")?;
            Ok(sectors.trim() == (mib << 11).to_string())
        })
    }

    /// Waits until volume 0 fills disks of this size with its metadata, and the new area is equal.
    pub fn wait_grown(&self, mib: u64) -> Result<()> {
        let least = (mib - 1) * 1024;
        self.wait("the sizes", |pair| {
            let sectors = pair.kernel.sh("cat /sys/block/drbd0/size")?;
            let own = pair.node.status()?["devices"][0]["size"].as_u64();
            let own = own.context("a size")?;
            Ok(own > least && sectors.trim().parse::<u64>()? / 2 == own)
        })?;
        self.wait_in_sync()
    }

    /// Both nodes leave, and come back with what is in their configuration by then.
    pub fn down(&self) -> Result<()> {
        self.adm(&["down", "r0"])?;
        self.kernel.sh("drbdadm down r0").map(drop)
    }

    /// The end of [`Mixed84::down`].
    pub fn up(&self) -> Result<()> {
        self.kernel.sh("drbdadm up r0")?;
        self.adm(&["up", "r0"])
    }

    /// No line of the kernel's log is an error, but for the words for a lost link and those that
    /// the test expects.
    pub fn check_kernel_log(&self, expected: &[&str]) -> Result<()> {
        let mut errors = self.kernel.kernel_errors()?;
        // QEMU's network takes connections for a port of this host that nobody listens on.
        let lost = |line: &String| {
            LOST_LINK.iter().any(|text| line.ends_with(text))
                || REFUSED.iter().any(|text| line.contains(text))
                || expected.iter().any(|text| line.contains(text))
        };
        errors.retain(|line| line.contains("drbd") && !lost(line));
        if !errors.is_empty() {
            let log = self.kernel.sh("dmesg | grep drbd | tail -300")?;
            bail!("{errors:#?} in\n{log}");
        }
        Ok(())
    }

    /// Takes both down (nothing may be mounted) and compares the data on the lower disks, after a
    /// look at the kernel's log.
    pub fn check_same_data(&self) -> Result<()> {
        self.check_end(&[])
    }

    /// The same when the kernel's log has errors that the test expects, named by a part of them.
    pub fn check_end(&self, expected: &[&str]) -> Result<()> {
        self.check_kernel_log(expected)?;
        let mut sizes = Vec::new();
        for volume in 0..self.setup.volumes {
            let sectors = self
                .kernel
                .sh(&format!("cat /sys/block/drbd{volume}/size"))?;
            let bytes = sectors.trim().parse::<usize>()? * 512;
            ensure!(bytes > 0, "the device has no size");
            sizes.push(bytes);
        }
        self.down()?;
        self.kernel.sh("sync")?;
        for (volume, bytes) in (0..).zip(sizes) {
            let read = |name| fs::read(self.disk(name, volume));
            let (a, b) = (read("alfa")?, read("bravo")?);
            let differs = (0..bytes).find(|&at| a[at] != b[at]);
            ensure!(
                differs.is_none(),
                "the disks of volume {volume} differ from byte {differs:?} on, of {bytes}"
            );
        }
        Ok(())
    }
}

fn image_of(dir: &Path, node: &str, volume: u32) -> PathBuf {
    dir.join(format!("{node}{volume}"))
}
