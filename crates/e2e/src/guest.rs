//! Guests: real kernels in QEMU, for tests that need kernel DRBD, ublk or another kernel part.
//!
//! A guest boots Debian's 6.12 kernel by emulation alone (no KVM, no root), takes about ten
//! seconds, and runs shell commands that the host sends over a virtio-serial port. Its network is
//! QEMU's user network: it reaches this host's 127.0.0.1 as [`HOST_IN_GUEST`], and each of its
//! forwarded TCP ports is reachable at the guest's own loopback address ([`Guest::address`]).
//! Disks are files on the host. A guest that dies or hangs ends the test with its console's last
//! lines; dropping a [`Guest`] ends QEMU and removes its files.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use lockstep_e2e::guest::{Guest, GuestSetup, can_emulate};
//! if can_emulate() {
//!     let guest = Guest::start(GuestSetup::new("alfa"))?;
//!     assert!(guest.sh("uname -r")?.starts_with("6.12"));
//! }
//! # Ok(())
//! # }
//! ```

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::guest_base64::{decode, encode};
use crate::guest_image::{DrbdModule, Image};
use crate::{has_program, machine_has};

/// Bounds a boot. Ten seconds are usual; a machine with other work may need ten times that.
pub const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// Bounds one command, and every wait that names no limit of its own.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// The host's 127.0.0.1 as the guest sees it.
pub const HOST_IN_GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// The guest's own address on its network.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

/// Whether this machine can run guests. A test that gets `false` ends; in CI this fails instead.
pub fn can_emulate() -> bool {
    [
        "qemu-system-x86_64",
        "busybox",
        "setpriv",
        "xz",
        "dpkg-deb",
        "apt-get",
        "drbdadm",
        "dmsetup",
        "mkfs.ext4",
    ]
    .iter()
    .all(|program| has_program(program))
        && machine_has("x86-64", cfg!(target_arch = "x86_64"))
}

/// Whether a guest sees the host's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFiles {
    /// It does not.
    Hidden,
    /// The host's root directory is below `/host`, read only, by 9p; `chroot /host` gives every
    /// program of the host, with the guest's `/dev`, `/proc`, `/sys`, `/run` and `/tmp`. What these
    /// hide is below `/run/host`, in both views: programs that were built below `/tmp`, for instance.
    ReadOnly,
}

/// State of a guest's network cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cable {
    /// Frames pass.
    Plugged,
    /// Frames are lost and the guest sees its link down. Nobody is told: connections stall.
    Pulled,
}

/// What a guest's network interfaces are joined to.
#[derive(Clone, Debug)]
pub enum GuestNetwork {
    /// QEMU's user network: the guest is [`GUEST_ADDRESS`], and sees the host as [`HOST_IN_GUEST`].
    User,
    /// Tap devices of a network namespace, which needs root. See [`crate::net::Network::join_guest`].
    Taps {
        /// File that stands for the namespace.
        namespace: PathBuf,
        /// Name of each tap device, with the address of the guest's interface there.
        interfaces: Vec<(String, String)>,
    },
}

/// How a guest is made.
#[derive(Clone, Debug)]
pub struct GuestSetup {
    /// Its host name.
    pub name: String,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Processors.
    pub cpus: u8,
    /// Raw image files, which become `/dev/vda` and so on.
    pub disks: Vec<PathBuf>,
    /// TCP ports of the guest that the host reaches, on the user network.
    pub ports: Vec<u16>,
    /// Its network.
    pub network: GuestNetwork,
    /// Its DRBD.
    pub drbd: DrbdModule,
    /// Access to the host's files.
    pub host_files: HostFiles,
    /// Processor model of QEMU; `max` has clwb and AVX.
    pub cpu_model: &'static str,
    /// Further arguments of QEMU.
    pub qemu_args: Vec<String>,
}

impl GuestSetup {
    /// One processor, 320 MiB, no disk, no forwarded port.
    pub fn new(name: &str) -> GuestSetup {
        GuestSetup {
            name: name.to_string(),
            memory_mib: 320,
            cpus: 1,
            disks: Vec::new(),
            ports: Vec::new(),
            network: GuestNetwork::User,
            drbd: DrbdModule::Distribution,
            host_files: HostFiles::Hidden,
            cpu_model: "Nehalem",
            qemu_args: Vec::new(),
        }
    }
}

/// One emulated machine. Its methods may be called from several threads; commands queue.
pub struct Guest {
    setup: GuestSetup,
    address: Ipv4Addr,
    directory: tempfile::TempDir,
    machine: Mutex<Option<Machine>>,
}

/// A running QEMU and the two sockets to it.
struct Machine {
    qemu: Child,
    port: BufReader<UnixStream>,
    ready: bool,
    commands: u64,
}

impl Guest {
    /// Starts QEMU and returns at once; the first command waits for the boot. So several guests
    /// boot side by side. The thread that calls this must live as long as the guest.
    pub fn start(setup: GuestSetup) -> Result<Guest> {
        static GUESTS: AtomicU8 = AtomicU8::new(0);
        let pid = std::process::id().to_be_bytes();
        let number = GUESTS.fetch_add(1, Ordering::Relaxed);
        let guest = Guest {
            // Other test programs run at the same time: process and guest make the address.
            address: Ipv4Addr::new(127, 96 + number % 128, pid[2], pid[3]),
            directory: tempfile::Builder::new()
                .prefix("lockstep-guest-")
                .tempdir()?,
            setup,
            machine: Mutex::new(None),
        };
        guest.boot()?;
        Ok(guest)
    }

    /// Boots again after [`Guest::power_cut`], with the same disks and address.
    pub fn boot(&self) -> Result<()> {
        let mut machine = self.machine();
        ensure!(machine.is_none(), "{} runs already", self.setup.name);
        *machine = Some(self.launch()?);
        Ok(())
    }

    /// SIGKILL to QEMU: what the guest had in its memory is gone, the disks stay as they are.
    pub fn power_cut(&self) -> Result<()> {
        let mut machine = self.machine();
        let mut running = machine.take().context("the guest does not run")?;
        running.qemu.kill()?;
        running.qemu.wait()?;
        Ok(())
    }

    /// Plugs or pulls the network cable.
    pub fn cable(&self, cable: Cable) -> Result<()> {
        let up = cable == Cable::Plugged;
        self.qmp(&format!(
            r#"{{"execute":"set_link","arguments":{{"name":"net0","up":{up}}}}}"#
        ))
    }

    /// Gives a disk another size; its file grows or shrinks.
    pub fn resize_disk(&self, index: usize, bytes: u64) -> Result<()> {
        self.qmp(&format!(
            r#"{{"execute":"block_resize","arguments":{{"device":"disk{index}","size":{bytes}}}}}"#
        ))
    }

    /// Runs a shell script, which must end with status 0; answers with its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        let (status, output) = self.sh_raw(script, COMMAND_LIMIT)?;
        ensure!(
            status == 0,
            "{}: `{script}` ended with {status}:\n{output}",
            self.setup.name
        );
        Ok(output)
    }

    /// Runs a shell script, however it ends; answers with exit status and output of both kinds.
    pub fn sh_raw(&self, script: &str, limit: Duration) -> Result<(i32, String)> {
        let mut machine = self.machine();
        let machine = machine.as_mut().context("the guest does not run")?;
        self.exchange(machine, script, limit).with_context(|| {
            format!(
                "guest {}: `{script}`; its console's end:\n{}",
                self.setup.name,
                self.console_tail()
            )
        })
    }

    /// Waits until the guest takes commands.
    pub fn wait_ready(&self) -> Result<()> {
        self.sh("true").map(drop)
    }

    /// Writes a file in the guest.
    pub fn write_file(&self, path: &str, content: &str) -> Result<()> {
        let code = encode(content.as_bytes());
        self.sh(&format!("echo {code} | base64 -d > {path}"))
            .map(drop)
    }

    /// Loads a kernel module of [`crate::guest_image`] with what it needs.
    pub fn load_module(&self, module: &str, parameters: &str) -> Result<()> {
        let order = self.image()?.load_order(module)?;
        for (index, name) in order.iter().enumerate() {
            let words = if index + 1 == order.len() {
                parameters
            } else {
                ""
            };
            self.sh(&format!(
                "[ -d /sys/module/{name} ] || insmod /lib/modules/{name}.ko {words}"
            ))?;
        }
        Ok(())
    }

    /// Starts a script in the background, under a name of its own.
    pub fn start_job(&self, name: &str, script: &str) -> Result<()> {
        self.write_file(&format!("/run/job-{name}"), script)?;
        self.sh(&format!(
            "rm -f /run/job-{name}.status; \
             (setsid sh -c 'sh /run/job-{name} > /run/job-{name}.out 2>&1; \
             echo $? > /run/job-{name}.new; mv /run/job-{name}.new /run/job-{name}.status' \
             < /dev/null > /dev/null 2>&1 &)"
        ))
        .map(drop)
    }

    /// Exit status of a job that has ended.
    pub fn job_status(&self, name: &str) -> Result<Option<i32>> {
        let text = self.sh(&format!("cat /run/job-{name}.status 2>/dev/null || true"))?;
        Ok(text.trim().parse().ok())
    }

    /// Waits for a job's end with status 0; answers with its output.
    pub fn finish_job(&self, name: &str, limit: Duration) -> Result<String> {
        self.wait(&format!("the end of job {name}"), limit, |guest| {
            Ok(guest.job_status(name)?.is_some())
        })?;
        let output = self.sh(&format!("cat /run/job-{name}.out"))?;
        let status = self.job_status(name)?;
        ensure!(
            status == Some(0),
            "{}: job {name} ended with {status:?}:\n{output}",
            self.setup.name
        );
        Ok(output)
    }

    /// Waits until the condition holds. A condition that cannot be asked ends the wait at once.
    pub fn wait(
        &self,
        what: &str,
        limit: Duration,
        mut condition: impl FnMut(&Guest) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        while !condition(self)? {
            if begin.elapsed() > limit {
                let (_, log) = self.sh_raw("dmesg | tail -n 40", COMMAND_LIMIT)?;
                bail!("{}: not within {limit:?}: {what}\n{log}", self.setup.name);
            }
            // Polled: a shell command in the guest is the only question there is.
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Lines of the kernel's log of level "error" or worse since the guest was ready. What the
    /// kernel says before that is about the emulated board.
    pub fn kernel_errors(&self) -> Result<Vec<String>> {
        let log = self.sh("dmesg -r")?;
        Ok(log
            .lines()
            .skip_while(|line| !line.ends_with("guest ready"))
            .filter(|line| {
                let level = line.strip_prefix('<').and_then(|rest| rest.split_once('>'));
                // The number holds the facility above its three low bits.
                level.is_some_and(|(n, _)| n.parse::<u32>().is_ok_and(|n| n & 7 <= 3))
            })
            .map(str::to_string)
            .collect())
    }

    /// Where the host reaches a forwarded port.
    pub fn address(&self, port: u16) -> SocketAddr {
        assert!(
            self.setup.ports.contains(&port),
            "port {port} is not forwarded"
        );
        SocketAddr::new(IpAddr::V4(self.address), port)
    }

    /// Its host name.
    pub fn name(&self) -> &str {
        &self.setup.name
    }

    /// File of one of its disks.
    pub fn disk(&self, index: usize) -> &Path {
        &self.setup.disks[index]
    }

    /// The end of its console, which holds the kernel's last words.
    pub fn console_tail(&self) -> String {
        let bytes = fs::read(self.directory.path().join("console")).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
    }

    fn machine(&self) -> MutexGuard<'_, Option<Machine>> {
        // A panic elsewhere leaves a machine that still has to be ended.
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model of its processors. QEMU 7.2 computes the flags of CMPXCHG16B from a stale state: bits of
    /// an earlier operand end in EFLAGS, and an interrupt right after it pushes them. With NT, VM or DF set the
    /// kernel dies in its allocator or its network path, wherever that is. Without CX16 it uses another way.
    /// And a kernel without RDRAND waits some seconds for its random numbers, and patches its code then. QEMU
    /// lets a second processor run into a patch that is being made, which no real one does: an oops in
    /// `get_random_u64` has been seen. With RDRAND the patch is made before the second one runs.
    fn cpu(&self) -> String {
        match self.setup.cpus {
            1 => format!("{},-cx16", self.setup.cpu_model),
            _ => format!("{},-cx16,+rdrand", self.setup.cpu_model),
        }
    }

    fn image(&self) -> Result<&'static Image> {
        Image::of_this_machine(self.setup.drbd)
    }

    /// QEMU's arguments for the network.
    fn network_args(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut add = |backend: String, device: String| {
            words.extend([
                "-netdev".to_string(),
                backend,
                "-device".to_string(),
                device,
            ]);
        };
        match &self.setup.network {
            GuestNetwork::User => {
                let mut net = "user,id=net0".to_string();
                for port in &self.setup.ports {
                    net += &format!(",hostfwd=tcp:{}:{port}-:{port}", self.address);
                }
                add(net, "virtio-net-pci,netdev=net0,romfile=".to_string());
            }
            GuestNetwork::Taps { interfaces, .. } => {
                // The hardware address is made of the guest's number, which is unlike that of others.
                let number = self.address.octets()[1];
                for (index, (tap, _)) in interfaces.iter().enumerate() {
                    add(
                        format!("tap,id=net{index},ifname={tap},script=no,downscript=no"),
                        format!(
                            "virtio-net-pci,netdev=net{index},romfile=,mac=52:54:00:00:{index:02x}:{number:02x}"
                        ),
                    );
                }
            }
        }
        words
    }

    fn launch(&self) -> Result<Machine> {
        let image = self.image()?;
        let place = self.directory.path();
        let socket = place.join("port");
        let mut command = Command::new("setpriv");
        // The kernel ends QEMU if this test is killed and cannot.
        command.args(["--pdeathsig", "KILL"]);
        let mut addresses = String::new();
        if let GuestNetwork::Taps {
            namespace,
            interfaces,
        } = &self.setup.network
        {
            // Becomes QEMU, without a process between.
            command.arg("nsenter");
            command.arg(format!("--net={}", namespace.display()));
            let all: Vec<&str> = interfaces
                .iter()
                .map(|(_, address)| address.as_str())
                .collect();
            addresses = format!(" guest.addresses={}", all.join(","));
        }
        command.arg("qemu-system-x86_64");
        for name in ["port", "monitor"] {
            // A socket of an earlier boot would be taken for this one's.
            let _ = fs::remove_file(place.join(name));
        }
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-accel", &accelerator()])
            .args(["-cpu", &self.cpu()])
            .args(["-smp", &self.setup.cpus.to_string()])
            .args(["-m", &self.setup.memory_mib.to_string()])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet loglevel=5 mitigations=off nokaslr no_timer_check clocksource=hpet \
                 tsc=unstable panic=-1 log_buf_len=8M \
                 guest.name={}{addresses}",
                self.setup.name
            ));
        command
            .arg("-chardev")
            .arg(format!(
                "file,id=console,path={}",
                place.join("console").display()
            ))
            .args(["-serial", "chardev:console"])
            .args(["-device", "virtio-serial-pci", "-chardev"])
            .arg(format!(
                "socket,id=port,path={},server=on,wait=off",
                socket.display()
            ))
            .args(["-device", "virtserialport,chardev=port,name=lockstep"])
            .arg("-qmp")
            .arg(format!(
                "unix:{},server=on,wait=off",
                place.join("monitor").display()
            ));
        command.args(self.network_args());
        for (index, disk) in self.setup.disks.iter().enumerate() {
            command
                .arg("-drive")
                .arg(format!(
                    "if=none,id=disk{index},format=raw,cache=unsafe,discard=unmap,file={}",
                    disk.display()
                ))
                .arg("-device")
                .arg(format!(
                    "virtio-blk-pci,drive=disk{index},discard=on,write-zeroes=on"
                ));
        }
        if self.setup.host_files == HostFiles::ReadOnly {
            command.args([
                "-virtfs",
                "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
            ]);
        }
        command.args(&self.setup.qemu_args);
        let errors = fs::File::create(place.join("errors"))?;
        let mut qemu = command
            .stdin(Stdio::null())
            .stdout(errors.try_clone()?)
            .stderr(errors)
            .spawn()
            .context("starting setpriv and qemu-system-x86_64")?;
        match self.open_port(&mut qemu, &socket) {
            Ok(port) => Ok(Machine {
                qemu,
                port: BufReader::new(port),
                ready: false,
                commands: 0,
            }),
            Err(error) => {
                // It may be dead already, which is what the error says.
                let _ = qemu.kill();
                let _ = qemu.wait();
                Err(error)
            }
        }
    }

    fn open_port(&self, qemu: &mut Child, socket: &Path) -> Result<UnixStream> {
        let begin = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(socket) {
                stream.set_read_timeout(Some(TICK))?;
                return Ok(stream);
            }
            if let Some(status) = qemu.try_wait()? {
                let text = fs::read_to_string(self.directory.path().join("errors"))?;
                bail!("QEMU for {} ended with {status}: {text}", self.setup.name);
            }
            ensure!(begin.elapsed() < COMMAND_LIMIT, "QEMU opens no socket");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn exchange(
        &self,
        machine: &mut Machine,
        script: &str,
        limit: Duration,
    ) -> Result<(i32, String)> {
        if !machine.ready {
            let deadline = Instant::now() + BOOT_LIMIT;
            while read_line(machine, deadline).context("while booting")? != "READY" {}
            machine.ready = true;
            if self.setup.host_files == HostFiles::ReadOnly {
                let (status, output) = self.exchange(machine, MOUNT_HOST, COMMAND_LIMIT)?;
                ensure!(status == 0, "mounting the host's files: {output}");
            }
        }
        machine.commands += 1;
        let number = machine.commands;
        let line = format!("{number} {}\n", encode(script.as_bytes()));
        machine.port.get_mut().write_all(line.as_bytes())?;
        let deadline = Instant::now() + limit;
        let end = format!("END {number} ");
        let mut coded = String::new();
        loop {
            let line = read_line(machine, deadline)?;
            if let Some(status) = line.strip_prefix(&end) {
                let bytes = decode(&coded).context("the answer is not base64")?;
                let text = String::from_utf8_lossy(&bytes).into_owned();
                return Ok((status.trim().parse()?, text));
            }
            coded.push_str(&line);
        }
    }

    fn qmp(&self, command: &str) -> Result<()> {
        let mut stream = UnixStream::connect(self.directory.path().join("monitor"))?;
        stream.set_read_timeout(Some(COMMAND_LIMIT))?;
        let mut answers = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        answers.read_line(&mut line)?;
        for text in [r#"{"execute":"qmp_capabilities"}"#, command] {
            stream.write_all(text.as_bytes())?;
            stream.write_all(b"\n")?;
            loop {
                line.clear();
                ensure!(answers.read_line(&mut line)? > 0, "QEMU's monitor is gone");
                let value: serde_json::Value = serde_json::from_str(&line)?;
                if value.get("return").is_some() {
                    break;
                }
                // Events come in between.
                ensure!(value.get("error").is_none(), "{text}: {line}");
            }
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(mut machine) = self.machine().take() {
            // Already dead is as good.
            let _ = machine.qemu.kill();
            let _ = machine.qemu.wait();
        }
    }
}

/// One line of the port without its end.
fn read_line(machine: &mut Machine, deadline: Instant) -> Result<String> {
    let mut line = Vec::new();
    loop {
        match machine.port.by_ref().read_until(b'\n', &mut line) {
            Ok(0) => bail!("the guest has ended: {:?}", machine.qemu.try_wait()),
            Ok(_) if line.ends_with(b"\n") => {
                let text = String::from_utf8_lossy(&line);
                return Ok(text.trim_end().to_string());
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if let Some(status) = machine.qemu.try_wait()? {
                    bail!("the guest has ended: {status}");
                }
                ensure!(Instant::now() < deadline, "the guest does not answer");
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// What QEMU runs the guest's instructions with; emulation is what works everywhere.
fn accelerator() -> String {
    std::env::var("LOCKSTEP_GUEST_ACCEL").unwrap_or_else(|_| "tcg,thread=multi".to_string())
}

/// How often a wait for the port looks whether QEMU lives.
const TICK: Duration = Duration::from_millis(500);

const CONSOLE_LINES: usize = 60;

const MOUNT_HOST: &str = "for m in netfs 9pnet 9pnet_virtio 9p; do \
    [ -d /sys/module/$m ] || insmod /lib/modules/$m.ko; done; \
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose,ro host /host && \
    mkdir -p /run/host && mount -o bind /host /run/host && \
    for d in dev proc sys run tmp; do mount -o bind /$d /host/$d || exit 1; done; \
    mount -o bind /run/host /host/run/host";
