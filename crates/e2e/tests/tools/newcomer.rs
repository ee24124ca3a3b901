//! Somebody new with two machines and `docs/getting-started.md`: every command is a line of the
//! page, and so is the configuration. The machines are namespaces with their own host name,
//! network, `/etc`, `/run` and `/dev`, and `/usr` and `/var` where the package is installed; the
//! other one gets the binary and its names, as the page says for other systems.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::{has_program, machine_has, terminate};

use crate::nodes::{STOCK, binary, output};
use crate::package::build_package;

const PAGE: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/getting-started.md"
));

/// Where the page's disk is, and a file in its place.
const DISK: (&str, &str) = ("/dev/vg/r0", "/srv/r0");

/// What a machine has of its own; `sleep` keeps it.
const OWN: &str = "set -e\n\
    hostname \"$1\"\n\
    mount -t tmpfs tmpfs /run\n\
    mkdir -p /run/own/dev /run/own/work /run/own/etc /run/own/work2\n\
    mount -t overlay -o lowerdir=/dev,upperdir=/run/own/dev,workdir=/run/own/work overlay /dev\n\
    mount -t overlay -o lowerdir=/etc,upperdir=/run/own/etc,workdir=/run/own/work2 overlay /etc\n\
    mount --bind \"$2\" /srv\n\
    if [ -n \"$3\" ]; then\n\
        for dir in usr var; do\n\
            mkdir -p /run/own/$dir /run/own/work-$dir\n\
            mount -t overlay -o lowerdir=/$dir,upperdir=/run/own/$dir,workdir=/run/own/work-$dir overlay /$dir\n\
        done\n\
        dpkg --no-triggers --install \"$3\" >/dev/null\n\
    fi\n\
    mount -t tmpfs tmpfs /mnt\n\
    echo ready\n\
    exec sleep infinity";

/// Where a fresh system looks for programs.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

struct Machine {
    namespace: String,
    keeper: Child,
    daemon: Option<Child>,
    path: String,
    /// How its daemon is started.
    start: String,
}

impl Machine {
    /// With the package installed, else with links in `DIR/bin`.
    fn new(name: &str, dir: &Path, package: Option<&str>) -> Result<Machine> {
        let disks = dir.join(name);
        fs::create_dir(&disks)?;
        let disk = fs::File::create(disks.join("r0"))?;
        disk.set_len(64 << 20)?;
        let namespace = format!("lsnew-{name}-{}", std::process::id());
        output(Command::new("ip").args(["netns", "add", &namespace]))?;
        let keeper = Command::new("ip")
            .args(["netns", "exec", &namespace])
            .args([
                "unshare", "--mount", "--uts", "bash", "-c", OWN, "bash", name,
            ])
            .arg(&disks)
            .arg(package.unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut machine = Machine {
            namespace,
            keeper,
            daemon: None,
            path: match package {
                Some(_) => SYSTEM_PATH.to_owned(),
                None => format!("{}:{SYSTEM_PATH}", dir.join("bin").display()),
            },
            start: "lockstepd".to_owned(),
        };
        let out = machine.keeper.stdout.take().context("standard output")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        ensure!(
            line == "ready\n",
            "the machine {name} is not ready: {line:?}"
        );
        machine.ip(&["link", "set", "lo", "up"])?;
        if package.is_some() {
            machine.do_as_told("lockstep-divert on")?;
            // There is no systemd in a namespace: what its unit says is done by hand.
            ensure!(PAGE.contains("systemctl enable --now lockstep.service"));
            let unit = machine.run("cat /usr/lib/systemd/system/lockstep.service")?;
            let line = unit
                .lines()
                .find_map(|line| line.strip_prefix("ExecStart="));
            machine.start = line.context("ExecStart")?.to_owned();
        }
        Ok(machine)
    }

    fn ip(&self, args: &[&str]) -> Result<String> {
        output(Command::new("ip").args(["-n", &self.namespace]).args(args))
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.keeper.id().to_string()])
            .args(["--mount", "--uts", "--net", "bash", "-c", line])
            .env("PATH", &self.path)
            .env_remove("LOCKSTEP_DIR")
            .env_remove("__DRBD_NODE__");
        command
    }

    fn run(&self, line: &str) -> Result<String> {
        output(&mut self.command(line))
    }

    /// Runs what the page says.
    fn do_as_told(&self, line: &str) -> Result<String> {
        ensure!(PAGE.contains(line), "the page does not say '{line}'");
        self.run(line)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.command("umount -q /mnt").output();
        if let Some(daemon) = &mut self.daemon {
            terminate(daemon);
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = self.ip(&["link", "del", "eth0"]);
        let _ = Command::new("ip")
            .args(["netns", "del", &self.namespace])
            .output();
    }
}

/// The lines of the page from `global` to the end of the resource.
fn configuration() -> Result<String> {
    let from = PAGE.find("    global {").context("a configuration")?;
    let block = PAGE[from..].split("\n\n").next().context("its end")?;
    ensure!(block.contains(DISK.0), "the page has another disk: {block}");
    Ok(block.replace(DISK.0, DISK.1) + "\n")
}

/// Pacemaker's script, by the wrapper of the package, finds a Secondary that runs, and its device.
fn ask_the_agent(machine: &Machine, dir: &Path) -> Result<()> {
    let cluster = dir.join("cluster");
    fs::create_dir(&cluster)?;
    let functions = include_str!("ocf-functions.sh");
    fs::write(cluster.join("ocf-shellfuncs"), functions)?;
    let agent = "/usr/lib/ocf/resource.d/lockstep/drbd";
    let settings = "OCF_RESKEY_drbd_resource=r0 OCF_RESKEY_crm_feature_set=3.17.4 \
         OCF_RESKEY_CRM_meta_timeout=30000 OCF_RESKEY_CRM_meta_interval=0 \
         OCF_RESKEY_CRM_meta_clone=0 OCF_RESKEY_CRM_meta_clone_max=2 \
         OCF_RESKEY_CRM_meta_clone_node_max=1 OCF_RESKEY_CRM_meta_master_max=1 \
         OCF_RESKEY_CRM_meta_master_node_max=1 OCF_RESKEY_CRM_meta_notify=true \
         OCF_RESKEY_CRM_meta_globally_unique=false OCF_RESOURCE_INSTANCE=drbd:0 \
         OCF_RESOURCE_TYPE=drbd OCF_RESOURCE_PROVIDER=linbit OCF_ROOT=/usr/lib/ocf \
         OCF_RA_VERSION_MAJOR=1 OCF_RA_VERSION_MINOR=0 HA_RSCTMP=/run";
    // What it tells the cluster manager of the data goes to a program that does nothing.
    let manager = "for name in crm_master crm_attribute crm_node; do \
         ln -sf /bin/true /usr/local/sbin/$name; done";
    machine.run(&format!("mkdir -p /usr/local/sbin && {manager}"))?;
    machine.run(&format!(
        "export PATH=/usr/local/sbin:$PATH HA_SBIN_DIR=/usr/local/sbin; \
         env OCF_FUNCTIONS_DIR={} {settings} {agent} monitor",
        cluster.display()
    ))?;
    // The daemon's own device is what it has found there.
    machine.run("test -b /dev/drbd100")?;
    let device = machine.run("readlink /dev/drbd100")?;
    ensure!(!device.contains("/ocf/"), "{device}");
    Ok(())
}

#[test]
fn a_newcomer_gets_a_cluster_of_two_by_the_page() -> Result<()> {
    if !machine_has("root", rustix::process::geteuid().is_root())
        || !machine_has("/dev/fuse", Path::new("/dev/fuse").exists())
        || !has_program("ip")
        || !has_program("nsenter")
        || !has_program("mkfs.ext4")
        || !has_program("dpkg-deb")
        || !has_program("strip")
        || !machine_has("drbd-utils", Path::new(STOCK).exists())
    {
        return Ok(());
    }
    let dir = tempfile::Builder::new().prefix("lockstep-new-").tempdir()?;
    fs::create_dir(dir.path().join("bin"))?;
    for name in ["lockstep", "lockstepd", "drbdadm", "drbdsetup", "drbdmeta"] {
        ensure!(PAGE.contains(name));
        symlink(binary()?, dir.path().join("bin").join(name))?;
    }
    fs::write(dir.path().join("drbd.conf"), configuration()?)?;
    ensure!(PAGE.contains("    make deb ") && PAGE.contains("apt install ./lockstep_*.deb"));
    let package = build_package(dir.path())?;
    let mut alfa = Machine::new("alfa", dir.path(), Some(&package))?;
    ensure!(alfa.run("readlink -f /usr/sbin/drbdadm")? == "/usr/bin/lockstep\n");
    let mut bravo = Machine::new("bravo", dir.path(), None)?;
    alfa.ip(&[
        "link",
        "add",
        "eth0",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        &bravo.namespace,
    ])?;
    for (machine, address) in [(&mut alfa, "10.0.0.1/24"), (&mut bravo, "10.0.0.2/24")] {
        machine.ip(&["addr", "add", address, "dev", "eth0"])?;
        machine.ip(&["link", "set", "eth0", "up"])?;
        let conf = dir.path().join("drbd.conf");
        machine.run(&format!("cp {} /etc/drbd.conf", conf.display()))?;
        machine.do_as_told("drbdadm sh-nop")?;
        ensure!(PAGE.contains("    lockstepd &\n"));
        let start = format!("exec {}", machine.start);
        let log = fs::File::create(dir.path().join(format!("{}.log", machine.namespace)))?;
        let daemon = machine
            .command(&start)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        machine.daemon = Some(daemon);
        // On the page the reader is slower than the daemon.
        machine
            .run("timeout 20 sh -c 'until [ -S /run/lockstep/control.sock ]; do sleep .1; done'")?;
        machine.do_as_told("drbdadm create-md r0")?;
        machine.do_as_told("drbdadm up r0")?;
    }
    alfa.do_as_told("drbdadm wait-connect r0")?;
    alfa.do_as_told("drbdadm primary --force r0")?;
    bravo.run("drbdsetup wait-sync-resource r0")?;
    // All is good: its exit code says so, too.
    let status = alfa.do_as_told("lockstep status")?;
    ensure!(status.contains("r0  Primary"), "{status}");
    alfa.do_as_told("mkfs.ext4 /dev/drbd100")?;
    alfa.do_as_told("mount /dev/drbd100 /mnt")?;
    alfa.run("echo hello > /mnt/file")?;
    alfa.do_as_told("umount /mnt && drbdadm secondary r0")?;
    bravo.do_as_told("drbdadm primary r0")?;
    bravo.do_as_told("mount /dev/drbd100 /mnt")?;
    ensure!(bravo.run("cat /mnt/file")? == "hello\n");
    ask_the_agent(&alfa, dir.path())?;
    bravo.run("umount /mnt && drbdadm down r0")?;
    alfa.run("drbdadm down r0")?;
    Ok(())
}
