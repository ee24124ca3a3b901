//! Volumes as ublk devices, in a guest whose kernel has ublk: two nodes on the guest's loopback, a
//! file system on the Primary's device, and a daemon that is killed under it.

use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{COMMAND_LIMIT, Guest, GuestSetup, HostFiles, can_emulate};
use lockstep_e2e::{binary, has_program, run};

/// SIGKILLs of the Primary's daemon, as many as there is time for; `LOCKSTEP_UBLK_KILLS` asks for that
/// many, however long they take.
const KILLS: RangeInclusive<usize> = 3..=20;
const KILLING_TIME: Duration = Duration::from_secs(100);

/// SIGKILLs in each of making a device and taking it away; `LOCKSTEP_UBLK_STEPS` asks for more.
const STEPS: usize = 3;

/// Kills that do not wait until the daemon before has brought the I/O back, and the longest time
/// between two of them; `LOCKSTEP_UBLK_QUICK` asks for more.
const QUICK_KILLS: usize = 3;
const QUICK_US: u64 = 6_000_000;

/// One round of fio in an emulated machine.
const ROUND_LIMIT: Duration = Duration::from_secs(300);

/// One kill and what follows it.
const STEP_LIMIT: Duration = Duration::from_secs(90);

const DISK_BYTES: u64 = 64 << 20;

const CONFIGURATION: &str = "resource r0 {
  net { protocol C; connect-int 1; }
  on alfa { node-id 0; address ipv4 127.0.0.1:7001;
    volume 0 { device minor 0; disk /dev/vda; meta-disk internal; } }
  on bravo { node-id 1; address ipv4 127.0.0.1:7002;
    volume 0 { device minor 1; disk /dev/vdb; meta-disk internal; } }
}
";

/// `adm NODE WORDS`, `setup NODE WORDS`, `start NODE [OPTIONS]`, `killed NODE` and `probe`; `again NODE`
/// starts a killed node once more. `try NODE` writes to its device, `disk NODE` names that, and
/// `gone NODE'S DEVICE` waits until there is none.
const HELPERS: &str = r#"
node() { LOCKSTEP_DIR=/run/$1 chroot /host /run/bin/$2 $3 $4 $5 $6 $7 2>&1; }
adm() { n=$1; shift; node $n drbdadm "$@"; }
setup() { n=$1; shift; node $n drbdsetup "$@"; }
start() {
    rm -f /run/$1/control.sock
    LOCKSTEP_DIR=/run/$1 setsid chroot /host /run/bin/lockstepd --device ublk --shards 1 \
        --pool-mib 32 ${2---hold 300} < /dev/null >> /run/$1/log 2>&1 &
    while [ ! -S /run/$1/control.sock ]; do usleep 20000; done
}
killed() { kill -9 $(cat /run/$1/lockstepd.pid); }
ended() {
    adm $1 down r0
    p=$(cat /run/$1/lockstepd.pid)
    kill $p
    while kill -0 $p 2> /dev/null; do usleep 20000; done
}
primary() { until adm $1 primary r0; do usleep 100000; done; }
again() { start $1 "$2" && adm $1 up r0; }
disk() { readlink /run/$1/dev/drbd$([ $1 = alfa ] && echo 0 || echo 1); }
# The I/O of a device fails first, and then its node goes.
gone() {
    n=0
    while [ -e $1 ]; do n=$((n + 1)); [ $n -lt 1000 ] || return 1; usleep 10000; done
}
try() { chroot /host /bin/dd if=/dev/zero of=$1 bs=4k count=1 oflag=direct conv=nocreat 2>&1; }
# One durable write after the other, with the time of each: begin and end in seconds.
probe() {
    while [ ! -e /run/stop-load ]; do
        read begin rest < /proc/uptime
        echo $begin | dd of=/host/mnt/probe bs=512 conv=fsync,notrunc 2> /dev/null || exit 1
        read end rest < /proc/uptime
        echo $begin $end
    done
}
"#;

struct Nodes {
    guest: Guest,
    dir: tempfile::TempDir,
}

impl Nodes {
    /// Two nodes, in sync and Secondary.
    fn start() -> Result<Nodes> {
        let binary = binary()?.canonicalize()?;
        let place = binary.parent().context("a binary in a directory")?;
        let dir = tempfile::Builder::new()
            .prefix("lockstep-ublk-")
            .tempdir_in(place)?;
        // Without what only a debugger reads: the guest copies it through an emulated processor.
        let small = dir.path().join("lockstep");
        run(Command::new("strip").arg("-o").arg(&small).arg(&binary))?;
        let mut setup = GuestSetup {
            host_files: HostFiles::ReadOnly,
            memory_mib: 512,
            cpus: 2,
            ..GuestSetup::new("ublk")
        };
        for name in ["alfa", "bravo"] {
            let disk = dir.path().join(name);
            fs::File::create(&disk)?.set_len(DISK_BYTES)?;
            setup.disks.push(disk);
        }
        let nodes = Nodes {
            guest: Guest::start(setup)?,
            dir,
        };
        let guest = &nodes.guest;
        guest.load_module("ublk_drv", "")?;
        guest.sh(&format!(
            "mkdir -p /run/bin && cp /run/host{} /run/bin/lockstep && cd /run/bin && \
             for name in lockstepd drbdadm drbdsetup drbdmeta; do ln -s lockstep $name; done",
            small.display()
        ))?;
        guest.write_file("/run/helpers", HELPERS)?;
        for name in ["alfa", "bravo"] {
            guest.sh(&format!(
                "mkdir /run/{name} && echo {name} > /run/{name}/node-name"
            ))?;
            guest.write_file(&format!("/run/{name}/drbd.conf"), CONFIGURATION)?;
            nodes.sh(&format!(
                "start {name}; adm {name} create-md --force r0 && adm {name} up r0"
            ))?;
        }
        nodes.wait_status("alfa", "the connection", "peer-disk:Inconsistent")?;
        nodes.sh("adm alfa new-current-uuid --clear-bitmap r0/0")?;
        nodes.wait_in_sync()?;
        Ok(nodes)
    }

    /// Runs a script with the helpers; the error has both nodes' logs.
    fn sh(&self, script: &str) -> Result<String> {
        let (status, output) = self.raw(script)?;
        ensure!(
            status == 0,
            "`{script}` ended with {status}: {output}\n{}",
            self.report()?
        );
        Ok(output)
    }

    /// The same for what may hang if something is wrong: the error says who waits for what then.
    fn step(&self, script: &str) -> Result<String> {
        let script = format!(". /run/helpers\n{script}");
        self.guest.start_job("step", &script)?;
        self.guest
            .finish_job("step", STEP_LIMIT)
            .map_err(|error| match self.waiting() {
                Ok(waiting) => error.context(waiting),
                Err(_) => error,
            })
    }

    fn waiting(&self) -> Result<String> {
        let waiting = "cat /run/job-step.out; ps; cd /proc; for t in [0-9]*/task/*; do
             grep -q '^State:.[DZ]' $t/status || continue
             echo $t; grep -e Name -e State $t/status; cat $t/wchan; cat $t/stack; done";
        Ok(format!("{}\n{}", self.raw(waiting)?.1, self.report()?))
    }

    fn raw(&self, script: &str) -> Result<(i32, String)> {
        let script = format!(". /run/helpers\n{script}");
        self.guest.sh_raw(&script, COMMAND_LIMIT)
    }

    fn report(&self) -> Result<String> {
        let logs = "for n in alfa bravo; do echo \"--- $n\"; tail -n 40 /run/$n/log; \
                    setup $n status --verbose; done; dmesg | tail -n 30";
        Ok(self.raw(logs)?.1)
    }

    fn wait_status(&self, node: &str, what: &str, word: &str) -> Result<()> {
        let waited = self.guest.wait(what, COMMAND_LIMIT, |_| {
            let (_, status) = self.raw(&format!("setup {node} status --verbose"))?;
            Ok(status.contains(word))
        });
        match waited {
            Ok(()) => Ok(()),
            Err(error) => Err(error.context(self.report()?)),
        }
    }

    fn wait_in_sync(&self) -> Result<()> {
        for node in ["alfa", "bravo"] {
            self.guest.wait("both UpToDate", COMMAND_LIMIT, |_| {
                let (_, status) =
                    self.raw(&format!("setup {node} status --verbose --statistics"))?;
                Ok(status.contains("disk:UpToDate")
                    && status.contains("peer-disk:UpToDate")
                    && status.contains("replication:Established")
                    && status.contains("out-of-sync:0"))
            })?;
        }
        Ok(())
    }

    fn sectors_written(&self) -> Result<u64> {
        let stat = self.guest.sh("cat /sys/block/$(cat /run/disk)/stat")?;
        let field = stat.split_whitespace().nth(6).context("sectors written")?;
        Ok(field.parse()?)
    }

    /// Both disks hold the same, and not only zeroes, up to the volume's end.
    fn check_equal_disks(&self, size_bytes: u64) -> Result<()> {
        let [alfa, bravo] = ["alfa", "bravo"].map(|name| -> Result<Vec<u8>> {
            let mut bytes = vec![0; size_bytes as usize];
            fs::File::open(self.dir.path().join(name))?.read_exact_at(&mut bytes, 0)?;
            Ok(bytes)
        });
        let (alfa, bravo) = (alfa?, bravo?);
        let unequal = alfa
            .chunks(4096)
            .zip(bravo.chunks(4096))
            .filter(|(a, b)| a != b)
            .count();
        ensure!(unequal == 0, "{unequal} blocks differ");
        let written = alfa.chunks(4096).filter(|c| c.iter().any(|&b| b != 0));
        ensure!(written.count() > 500, "hardly anything was written");
        Ok(())
    }
}

/// What the kernel knows of the device.
fn check_limits(nodes: &Nodes) -> Result<()> {
    for (attribute, wanted) in [("write_cache", "write back"), ("fua", "1")] {
        let found = nodes.sh(&format!(
            "cat /sys/block/$(cat /run/disk)/queue/{attribute}"
        ))?;
        ensure!(found.trim() == wanted, "{attribute}: {found}");
    }
    let discard = nodes.sh("cat /sys/block/$(cat /run/disk)/queue/discard_max_bytes")?;
    ensure!(discard.trim() != "0", "no discards");
    Ok(())
}

/// Every kind of request, beside file systems.
fn check_requests(nodes: &Nodes) -> Result<()> {
    nodes.sh("dev=/dev/$(cat /run/disk)
         dd if=/dev/urandom of=/run/part bs=64k count=16 2>/dev/null
         chroot /host /bin/dd if=/run/part of=$dev bs=64k seek=32 oflag=direct,dsync 2>&1
         chroot /host /bin/dd if=$dev of=/run/back bs=64k skip=32 count=16 iflag=direct 2>&1
         cmp /run/part /run/back || exit 1
         chroot /host /sbin/blkdiscard -o 2162688 -l 65536 $dev || exit 1
         chroot /host /bin/fallocate -z -o 2228224 -l 65536 $dev || exit 1
         chroot /host /bin/dd if=$dev of=/run/back bs=64k skip=33 count=2 iflag=direct 2>&1
         head -c 131072 /dev/zero | cmp - /run/back")?;
    // Beside a Primary a Secondary's device refuses everything.
    let (status, _) = nodes.raw(
        "chroot /host /bin/dd if=/run/part of=/run/bravo/dev/drbd1 bs=4k count=1 oflag=direct 2>&1",
    )?;
    ensure!(status != 0, "a Secondary's device took a write");
    Ok(())
}

/// What the daemon's log says at the end of each step from a kill to the first request, with the step.
const RECOVERY: [(&str, &str); 7] = [
    ("start of the daemon", "lockstepd is ready"),
    ("drbdadm up", "Diskless -> Attaching"),
    ("attach", "Unconnected -> Connecting"),
    ("connect", "Connecting -> Connected"),
    ("handler before-resync-target", "-> SyncTarget"),
    ("resync", "SyncTarget -> Established"),
    ("device", "device resumed"),
];

/// How long each step of one recovery took in seconds; none of a step that was not in the log.
fn steps(killed: f64, log: &str) -> [Option<f64>; RECOVERY.len()] {
    let mut before = killed;
    RECOVERY.map(|(_, words)| {
        let line = log.lines().find(|line| line.contains(words))?;
        // Of 2026-01-31T12:34:56.789012Z what the guest's clock says in `seconds_of_day`.
        let (_, time) = line.split_whitespace().next()?.split_once('T')?;
        let mut fields = time.trim_end_matches('Z').split(':').map(str::parse::<f64>);
        let mut next = || fields.next().and_then(|field| field.ok());
        let at = next()? * 3600.0 + next()? * 60.0 + next()?;
        let step = at - before;
        before = at;
        Some(step)
    })
}

/// Kills the daemon, starts the next one, and waits until the device works again.
fn kill_and_start(nodes: &Nodes) -> Result<[Option<f64>; RECOVERY.len()]> {
    let said = nodes.sh(
        "wc -l < /run/alfa/log; chroot /host /bin/date -u '+%H %M %S.%N'
         killed alfa; start alfa; adm alfa up r0 > /dev/null",
    )?;
    let mut numbers = said.split_whitespace().map(str::parse::<f64>);
    let mut next = || {
        let number = numbers.next().context("the time of the kill")?;
        number.context("a number")
    };
    let lines = next()?;
    let killed = next()? * 3600.0 + next()? * 60.0 + next()?;
    nodes.wait_status("alfa", "Primary again", "role:Primary")?;
    nodes.wait_in_sync()?;
    let log = nodes.sh(&format!("tail -n +{} /run/alfa/log", lines + 1.0))?;
    Ok(steps(killed, &log))
}

fn kill_under_load(nodes: &Nodes, kills: Option<usize>) -> Result<()> {
    let guest = &nodes.guest;
    nodes.sh("mkfs.ext4 -q /dev/$(cat /run/disk) && mount /dev/$(cat /run/disk) /host/mnt")?;
    let (status, refusal) = nodes.raw("adm alfa secondary r0")?;
    ensure!(status != 0, "made Secondary under a mount");
    ensure!(refusal.contains("mnt"), "the mount is not named: {refusal}");
    let fio = "fio --name=load --directory=/mnt --rw=randwrite --bs=4k --size=4m --fsync=8 \
               --direct=1 --ioengine=libaio --iodepth=8 --overwrite=1 --verify=crc32c \
               --verify_fatal=1 --do_verify=1 --verify_state_save=0 --randrepeat=0";
    guest.start_job(
        "load",
        &format!("while :; do chroot /host {fio} || exit 1; [ -e /run/stop-load ] && exit 0; done"),
    )?;
    guest.start_job("probe", ". /run/helpers; probe > /run/probed")?;
    let begin = Instant::now();
    let mut recoveries = Vec::new();
    while match kills {
        Some(kills) => recoveries.len() < kills,
        None => {
            recoveries.len() < *KILLS.start()
                || recoveries.len() < *KILLS.end() && begin.elapsed() < KILLING_TIME
        }
    } {
        let before = nodes.sectors_written()?;
        let kill = recoveries.len();
        let more = guest.wait("more writes", ROUND_LIMIT, |guest| {
            let status = guest.job_status("load")?;
            ensure!(
                status.is_none(),
                "the load has ended before kill {kill}: {}",
                guest.sh("cat /run/job-load.out")?
            );
            Ok(nodes.sectors_written()? > before + 400)
        });
        if let Err(error) = more {
            return Err(error.context(nodes.report()?));
        }
        recoveries.push(kill_and_start(nodes)?);
    }
    report_recoveries(nodes, &recoveries)?;
    for quick in 0..kills_of("LOCKSTEP_UBLK_QUICK", QUICK_KILLS)? as u64 {
        // In any step of the recovery; some after it.
        nodes.sh(&format!(
            "killed alfa; start alfa; adm alfa up r0; usleep {}",
            quick * 7_919_000 % QUICK_US
        ))?;
    }
    nodes.wait_status("alfa", "Primary again", "role:Primary")?;
    guest.sh("touch /run/stop-load")?;
    if let Err(error) = guest.finish_job("probe", ROUND_LIMIT) {
        return Err(error.context(nodes.report()?));
    }
    if let Err(error) = guest.finish_job("load", ROUND_LIMIT) {
        return Err(error.context(nodes.report()?));
    }
    nodes.sh(
        "[ $(readlink /run/alfa/dev/drbd0) = /dev/$(cat /run/disk) ] || exit 1
         umount /host/mnt && chroot /host /sbin/fsck.ext4 -f -n /dev/$(cat /run/disk)",
    )?;
    let log = guest.sh("dmesg")?;
    for word in ["EXT4-fs error", "I/O error, dev ublkb0", "Aborting journal"] {
        ensure!(!log.contains(word), "{log}");
    }
    Ok(())
}

fn report_recoveries(nodes: &Nodes, recoveries: &[[Option<f64>; RECOVERY.len()]]) -> Result<()> {
    let kills = recoveries.len();
    let longest = nodes.guest.sh(&format!(
        "awk '{{ print $2 - $1 }}' /run/probed | sort -rn | head -n {kills} | tr '\\n' ' '"
    ))?;
    eprintln!("longest waits for a durable write in seconds, {kills} kills: {longest}");
    for (at, (name, _)) in RECOVERY.iter().enumerate() {
        let mut times: Vec<f64> = recoveries.iter().filter_map(|steps| steps[at]).collect();
        times.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (times.first(), times.last()) {
            let median = times[times.len() / 2];
            eprintln!("{name}: {median:.2} s ({least:.2} to {most:.2})");
        }
    }
    Ok(())
}

#[test]
fn a_ublk_device_outlives_its_daemon() -> Result<()> {
    if !can_emulate() || !has_program("fio") || !has_program("strip") {
        return Ok(());
    }
    let kills = asked("LOCKSTEP_UBLK_KILLS")?;
    let nodes = Nodes::start()?;
    match story(&nodes, kills) {
        Ok(()) => Ok(()),
        Err(error) => Err(error.context(nodes.report()?)),
    }
}

#[test]
fn ublk_devices_without_a_next_daemon_end_and_come_back() -> Result<()> {
    if !can_emulate() || !has_program("strip") {
        return Ok(());
    }
    let nodes = Nodes::start()?;
    match ends(&nodes) {
        Ok(()) => Ok(()),
        Err(error) => Err(error.context(nodes.report()?)),
    }
}

fn ends(nodes: &Nodes) -> Result<()> {
    // Nobody comes back to a Secondary: its holder ends what waits.
    nodes.sh("ended bravo; again bravo '--hold 2'")?;
    nodes.wait_in_sync()?;
    nodes.sh("d=$(disk bravo); killed bravo; ! try $d && gone $d")?;
    // The next daemon makes another device. Without a holder it ends at once.
    nodes.sh("again bravo '' && d=$(disk bravo); killed bravo; ! try $d
         again bravo && [ -e $(disk bravo) ]")?;
    nodes.wait_in_sync()?;
    // A Primary's, which the holder was to keep.
    nodes.sh(
        "ended alfa; again alfa '--hold 2' && primary alfa && d=$(disk alfa)
         try $d && killed alfa; ! try $d && gone $d || exit 1
         again alfa && primary alfa && try $(disk alfa)",
    )?;
    nodes.wait_in_sync()?;
    coming_and_going(nodes)?;
    growing(nodes)
}

/// The daemon is killed while its device is made or taken away. The next one takes up or away what it
/// finds, and the device works.
fn coming_and_going(nodes: &Nodes) -> Result<()> {
    nodes.sh("adm alfa secondary r0")?;
    // No device but one of each node, and no process that waits for a device of nobody: such a one waits
    // for ever, others only for their disk.
    let works = "d=$(disk bravo); try $d || exit 1
         n=0; while [ $(ls /sys/class/ublk-char | wc -l) != 2 ]; do
             n=$((n + 1)); [ $n -lt 100 ] || { ls /sys/class/ublk-char; exit 2; }; usleep 100000; done
         waiting=$(grep -l '^State:.D' /proc/[0-9]*/task/*/status)
         for t in $waiting; do
             n=0; while grep -q '^State:.D' $t 2> /dev/null; do
                 n=$((n + 1)); [ $n -lt 100 ] || { cat $t; exit 3; }; usleep 100000; done; done";
    let time = |words: &str| -> Result<u64> {
        let script = format!(
            "read a x < /proc/uptime; adm bravo {words} r0 > /dev/null || exit 1
             read b x < /proc/uptime; echo $a $b | awk '{{ printf \"%d\", ($2 - $1) * 1000000 }}'"
        );
        Ok(nodes.sh(&script)?.trim().parse()?)
    };
    let (down_us, up_us) = (time("down")?, time("up")?);
    eprintln!("down takes {down_us} us, up {up_us} us");
    let kills = kills_of("LOCKSTEP_UBLK_STEPS", STEPS)? as u64;
    for kill in 0..kills {
        for (words, whole_us) in [("down", down_us), ("up", up_us)] {
            let after_us = whole_us * kill / kills;
            let context = format!("kill {after_us} us into {words}");
            let before = if words == "up" {
                "adm bravo down r0"
            } else {
                ""
            };
            let script = format!(
                "{before}
                 adm bravo {words} r0 & p=$!
                 usleep {after_us}; killed bravo; wait $p
                 # An `up` that finds no daemon starts one, without a holder.
                 killed bravo
                 again bravo || exit 1
                 {works}"
            );
            nodes.step(&script).with_context(|| context.clone())?;
            nodes.wait_in_sync().context(context)?;
        }
    }
    Ok(())
}

/// Both disks grow under a mounted device, which keeps its size; the one that comes after it is larger.
fn growing(nodes: &Nodes) -> Result<()> {
    let size = |node: &str| -> Result<u64> {
        let script = format!("cat /sys/block/$(basename $(disk {node}))/size");
        Ok(nodes.sh(&script)?.trim().parse()?)
    };
    nodes.sh("adm alfa primary r0 && d=$(disk alfa) && mkfs.ext4 -q $d && mount $d /host/mnt")?;
    let before = size("alfa")?;
    for index in 0..2 {
        nodes.guest.resize_disk(index, 2 * DISK_BYTES)?;
    }
    nodes.sh("adm alfa resize r0")?;
    nodes.wait_in_sync()?;
    ensure!(size("alfa")? == before, "resized under its user");
    nodes.sh("dd if=/dev/urandom of=/host/mnt/file bs=64k count=32 conv=fsync 2> /dev/null")?;
    let grown = before + DISK_BYTES / 512;
    // The Secondary's device has no user.
    let wait = |node: &'static str| {
        nodes.guest.wait("the new size", COMMAND_LIMIT, |_| {
            Ok(size(node).unwrap_or(0) >= grown)
        })
    };
    wait("bravo")?;
    nodes.sh("cd / && md5sum < /host/mnt/file > /run/sum && umount /host/mnt")?;
    wait("alfa")?;
    nodes.sh(
        "d=$(disk alfa); chroot /host /sbin/e2fsck -f -p $d; [ $? -le 1 ] || exit 1
         chroot /host /sbin/resize2fs $d && mount $d /host/mnt || exit 1
         md5sum < /host/mnt/file | cmp - /run/sum || exit 1
         dd if=/dev/urandom of=/host/mnt/more bs=64k count=32 conv=fsync || exit 1
         umount /host/mnt",
    )?;
    nodes.wait_in_sync()?;
    nodes.sh("for n in alfa bravo; do adm $n down r0 || exit 1; done")?;
    nodes.check_equal_disks(grown * 512)
}

fn kills_of(variable: &str, otherwise: usize) -> Result<usize> {
    Ok(asked(variable)?.unwrap_or(otherwise))
}

fn asked(variable: &str) -> Result<Option<usize>> {
    let text = std::env::var(variable).ok();
    let number = text.map(|text| text.parse().with_context(|| variable.to_owned()));
    number.transpose()
}

fn story(nodes: &Nodes, kills: Option<usize>) -> Result<()> {
    nodes.sh("adm alfa primary r0")?;
    let link = nodes.sh("readlink /run/alfa/dev/drbd0")?;
    ensure!(link.starts_with("/dev/ublkb"), "{link}");
    nodes
        .guest
        .sh("basename $(readlink /run/alfa/dev/drbd0) > /run/disk")?;
    check_limits(nodes)?;
    check_requests(nodes)?;
    kill_under_load(nodes, kills)?;
    nodes.wait_in_sync()?;
    let size = nodes.sh("cat /sys/block/$(cat /run/disk)/size")?;
    let size_bytes = size.trim().parse::<u64>()? * 512;
    // With the nodes the devices go.
    nodes.sh("for n in alfa bravo; do adm $n down r0 || exit 1; done")?;
    let left = nodes.sh("ls /sys/class/ublk-char /run/alfa/dev /run/bravo/dev")?;
    ensure!(!left.contains("ublkc") && !left.contains("drbd0"), "{left}");
    nodes.check_equal_disks(size_bytes)
}
