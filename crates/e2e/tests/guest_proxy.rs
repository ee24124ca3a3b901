//! Kernel DRBD 8.4 on both ends, our WAN proxies between them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::guest::{COMMAND_LIMIT, HostFiles, can_emulate};
use lockstep_e2e::guest_drbd::{DRBD_LIMIT, Pair84, PairSetup, drbd_state, wait_state};
use lockstep_e2e::guest_line::LineState;
use lockstep_e2e::guest_proxy::{Proxies, Proxy};
use lockstep_e2e::has_program;

/// What `lockstep proxy plan` prints for a line with interruptions.
const NET: &str = "protocol A; ping-timeout 300; ping-int 30; socket-check-timeout 10; \
     connect-int 3; timeout 60;";

/// Files of random data, each durable before the next is written, until /run/stop exists.
const LOAD: &str = "n=0; while [ ! -e /run/stop ]; do \
     dd if=/dev/urandom of=/mnt/load$((n % 24)) bs=32k count=$((n % 7 + 1)) conv=fsync || exit 1; \
     n=$((n + 1)); done; echo $n files";

struct World {
    pair: Pair84,
    proxies: Proxies,
}

impl World {
    /// Two connected nodes, alfa Primary. `options` are those of `add connection`.
    fn connected(net: &str, options: &str, disk_mib: u64, host_files: HostFiles) -> Result<World> {
        let mut proxies = None;
        let mut setup = PairSetup::new(net);
        setup.disk_mib = disk_mib;
        setup.host_files = host_files;
        let pair = Pair84::start(&setup, |alfa, bravo| {
            let made = Proxies::start(alfa, bravo, options, "--memory-max 512M --workers 2")?;
            let ports = made.ports();
            proxies = Some(made);
            Ok(ports)
        })?;
        let proxies = proxies.context("the pair is joined")?;
        proxies.wait_session()?;
        let world = World { pair, proxies };
        world
            .pair
            .connect_clean()
            .with_context(|| world.proxies.logs())?;
        Ok(world)
    }

    /// [`World::connected`] with a filesystem on alfa and load on it.
    fn under_load(options: &str) -> Result<World> {
        World::loaded(NET, options)
    }

    fn loaded(net: &str, options: &str) -> Result<World> {
        let world = World::connected(net, options, 48, HostFiles::Hidden)?;
        world
            .pair
            .alfa
            .sh("mkfs.ext4 -q /dev/drbd0 && mount /dev/drbd0 /mnt")?;
        world.pair.alfa.start_job("load", LOAD)?;
        Ok(world)
    }

    /// Waits until the proxy at alfa has taken that many more bytes from DRBD.
    fn wait_bytes(&self, count: u64) -> Result<()> {
        let from = self.read_bytes()?;
        let begin = Instant::now();
        while self.read_bytes()? < from + count {
            ensure!(
                begin.elapsed() < DRBD_LIMIT,
                "the load stands still\n{}",
                self.proxies.logs()
            );
            std::thread::sleep(Duration::from_millis(200));
            let status = self.pair.alfa.job_status("load")?;
            ensure!(status.is_none(), "the load has ended with {status:?}");
        }
        Ok(())
    }

    fn read_bytes(&self) -> Result<u64> {
        self.proxies.a.state()?["counters"]["raw_in_bytes"]
            .as_u64()
            .context("raw_in_bytes")
    }

    /// How often DRBD on alfa has left the state Connected since the boot.
    fn losses(&self) -> Result<usize> {
        let log = self.pair.alfa.sh("dmesg")?;
        Ok(log
            .lines()
            .filter(|line| line.contains("conn( Connected -> "))
            .count())
    }

    fn end_load(&self) -> Result<()> {
        self.pair.alfa.sh("touch /run/stop")?;
        self.pair.alfa.finish_job("load", COMMAND_LIMIT)?;
        self.pair.alfa.sh("umount /mnt").map(drop)
    }
}

#[test]
fn cuts_codec_switches_and_upgrades_leave_drbd_connected_and_a_thin_line_makes_it_pull_ahead()
-> Result<()> {
    if !can_emulate() {
        return Ok(());
    }
    let mut world = World::under_load("--memlimit=128M")?;
    let proxies = &world.proxies;
    for plugin in [
        "zstd level 3",
        "lzma level 1",
        "lz4",
        "zlib level 2",
        "auto",
        "none",
    ] {
        for proxy in [&proxies.a, &proxies.b] {
            proxy.ctl(&[&format!("set plugin {} 0 {plugin}", proxy.connection)])?;
        }
        world.wait_bytes(1 << 19)?;
    }
    let cuts = [
        (LineState::Down, 0),
        (LineState::Stalled, 0),
        (LineState::Down, number("LOCKSTEP_WAN_CUT_S", 8)),
    ];
    for (state, seconds) in cuts {
        let before = proxies.a.state()?["counters"]["resumes"].as_u64();
        proxies.wan.set_state(state);
        proxies
            .a
            .wait("the suspension", |s| s["state"] == "Suspended")?;
        // The length of the cut is what is tested.
        std::thread::sleep(Duration::from_secs(seconds));
        ensure!(drbd_state(&world.pair.alfa, 0)?.connection == "Connected");
        proxies.wan.set_state(LineState::Up);
        proxies.a.wait("the resumption", |s| {
            s["state"] == "Connected" && s["counters"]["resumes"].as_u64() > before
        })?;
        world.wait_bytes(1 << 19)?;
    }
    for proxy in [&proxies.a, &proxies.b] {
        proxy.upgrade()?;
        proxies.wait_session()?;
        world.wait_bytes(1 << 19)?;
    }
    ensure!(
        world.losses()? == 0,
        "DRBD has lost its peer\n{}",
        proxies.logs()
    );
    for proxy in [&proxies.a, &proxies.b] {
        let state = proxy.state()?;
        let counters = &state["counters"];
        ensure!(
            counters["checksum_errors"] == 0
                && counters["sessions"] == 1
                && counters["resumes"].as_u64() >= Some(3),
            "{state:#}"
        );
    }
    world.end_load()?;
    world.pair.wait_in_sync()?;

    world.pair.adjust(&format!(
        "{NET} on-congestion pull-ahead; congestion-fill 1M; sndbuf-size 256k;"
    ))?;
    let (alfa, wan) = (&world.pair.alfa, &world.proxies.wan);
    for round in 0..3 {
        let begin = Instant::now();
        alfa.sh("drbdadm disconnect r0 && drbdadm connect r0")?;
        world.pair.wait_in_sync()?;
        // About two seconds; a wrong setting costs ten or thirty more, each time.
        let took = begin.elapsed();
        ensure!(took < Duration::from_secs(40), "round {round}: {took:?}");
    }
    wan.set_rate(Some(50_000));
    wan.set_delay(Duration::from_millis(20));
    alfa.sh("dd if=/dev/urandom of=/dev/drbd0 bs=64k count=48 seek=16 oflag=direct")?;
    wait_state(alfa, "Ahead", DRBD_LIMIT, |s| s.connection == "Ahead")?;
    alfa.sh("dd if=/dev/urandom of=/dev/drbd0 bs=4k count=64 seek=4096 oflag=direct")?;
    wan.set_rate(Some(400_000));
    world
        .pair
        .wait_in_sync()
        .with_context(|| world.proxies.logs())?;
    world.pair.check_same_data()
}

#[test]
fn drbd_resyncs_after_a_long_cut_and_after_the_crash_of_either_proxy() -> Result<()> {
    if !can_emulate() {
        return Ok(());
    }
    let world = World::under_load("--memlimit=128M --session-hold=3")?;
    let (proxies, alfa) = (&world.proxies, &world.pair.alfa);
    let back_to_work = |what: &str| -> Result<()> {
        proxies.wait_session()?;
        world
            .pair
            .wait_in_sync()
            .with_context(|| format!("after {what}\n{}", proxies.logs()))?;
        world.wait_bytes(1 << 19)
    };
    world.wait_bytes(1 << 19)?;
    proxies.wan.set_state(LineState::Down);
    // Longer than session-hold: both nodes are reset, and alfa goes on alone.
    wait_state(alfa, "the end of the session", DRBD_LIMIT, |s| {
        s.connection == "WFConnection" && s.out_of_sync_kib > 512
    })?;
    std::thread::sleep(Duration::from_secs(number("LOCKSTEP_WAN_LONG_CUT_S", 0)));
    proxies.wan.set_state(LineState::Up);
    back_to_work("a long cut")?;
    let crash = |proxy: &Proxy, what: &str| -> Result<()> {
        let losses = world.losses()?;
        proxy.kill()?;
        alfa.wait("the loss", DRBD_LIMIT, |_| Ok(world.losses()? > losses))?;
        proxy.start()?;
        back_to_work(what)
    };
    crash(&proxies.a, "the crash of the sender's proxy")?;
    crash(&proxies.b, "the crash of the receiver's proxy")?;
    world.end_load()?;
    world
        .pair
        .wait_in_sync()
        .with_context(|| world.proxies.logs())?;
    world.pair.check_same_data()
}

#[test]
fn ping_hold_keeps_drbd_connected_through_a_cut_longer_than_its_ping_timeout() -> Result<()> {
    if !can_emulate() {
        return Ok(());
    }
    // Nine seconds of silence are more than DRBD takes.
    let net = "protocol A; ping-timeout 60; ping-int 3; socket-check-timeout 10; connect-int 3; \
         timeout 60; ko-count 0;";
    let world = World::loaded(net, "--memlimit=128M --session-hold=60")?;
    let (proxies, alfa) = (&world.proxies, &world.pair.alfa);
    world.wait_bytes(1 << 19)?;
    proxies.wan.set_state(LineState::Stalled);
    wait_state(alfa, "without it DRBD gives up", DRBD_LIMIT, |s| {
        s.connection != "Connected"
    })?;
    for proxy in [&proxies.a, &proxies.b] {
        proxy.ctl(&[&format!("set ping-hold {} 60", proxy.connection)])?;
    }
    proxies.wan.set_state(LineState::Up);
    world.pair.wait_in_sync().with_context(|| proxies.logs())?;
    let losses = world.losses()?;
    // DRBD's sockets are older than the processes that answer for them.
    for proxy in [&proxies.a, &proxies.b] {
        proxy.upgrade()?;
        proxies.wait_session()?;
    }
    // The end of a resync is acknowledged write by write; epochs after it are not.
    world.wait_bytes(1 << 19)?;
    for state in [LineState::Stalled, LineState::Down] {
        let resumes = proxies.a.state()?["counters"]["resumes"].as_u64();
        proxies.wan.set_state(state);
        proxies
            .a
            .wait("the suspension", |s| s["state"] == "Suspended")?;
        // The length of the cut is what is tested: three seconds more than DRBD would take.
        std::thread::sleep(Duration::from_secs(12));
        proxies.wan.set_state(LineState::Up);
        proxies.a.wait("the resumption", |s| {
            s["state"] == "Connected" && s["counters"]["resumes"].as_u64() > resumes
        })?;
        ensure!(
            world.losses()? == losses,
            "DRBD has lost its peer\n{}",
            proxies.logs()
        );
        world.wait_bytes(1 << 19)?;
    }
    for proxy in [&proxies.a, &proxies.b] {
        let state = proxy.state()?;
        ensure!(
            state["counters"]["pings_answered"].as_u64() > Some(2),
            "{state:#}"
        );
    }
    world.end_load()?;
    world.pair.wait_in_sync()?;
    world.pair.check_same_data()
}

#[test]
fn nodes_connect_each_time_and_ko_count_and_al_extents_limit_a_deep_buffer() -> Result<()> {
    if !can_emulate() || !has_program("fio") {
        return Ok(());
    }
    let net = |ko_count: u64| {
        format!(
            "protocol A; ping-timeout 300; ping-int 30; socket-check-timeout 10; connect-int 3; \
             timeout 60; ko-count {ko_count};"
        )
    };
    let extents = number("LOCKSTEP_WAN_AL_EXTENTS", 151);
    let mut world = World::connected(
        &net(0),
        "--memlimit=128M --max-lag=0",
        // One block in each of twice as many extents.
        (2 * extents + 20) * 4,
        // For fio.
        HostFiles::ReadOnly,
    )?;
    let disk = "c-plan-ahead 0; resync-rate 100M;";

    // Each connecting, with addresses in both relations.
    let tries = number("LOCKSTEP_WAN_CONNECTS", 4);
    let mut worst = Duration::ZERO;
    for symmetric in [false, true] {
        if symmetric {
            let ports = world.proxies.make_symmetric()?;
            world.pair.readjust(&net(0), disk, ports)?;
            world.pair.wait_in_sync()?;
        }
        for attempt in 0..tries {
            let begin = Instant::now();
            world
                .pair
                .alfa
                .sh("drbdadm disconnect r0 && drbdadm connect r0")?;
            world.pair.wait_in_sync()?;
            let took = begin.elapsed();
            worst = worst.max(took);
            // About two seconds where nothing else runs. A wrong decision costs ten or thirty more.
            ensure!(
                took < Duration::from_secs(40),
                "symmetric: {symmetric}, attempt {attempt}: {took:?}\n{}",
                world.proxies.logs()
            );
        }
        eprintln!("symmetric: {symmetric}, {tries} connects, the longest took {worst:?}");
    }

    // A buffer that drains for longer than ko-count x timeout looks like a dead peer.
    let ports = world.proxies.ports();
    let (proxies, alfa) = (&world.proxies, &world.pair.alfa);
    let limit = |rate: &str| limit_rate(proxies, rate);
    let ko_count = number("LOCKSTEP_WAN_KO_COUNT", 1);
    // More than passes in minutes.
    let write = "dd if=/dev/urandom of=/dev/drbd0 bs=64k count=20 oflag=direct conv=notrunc && \
         dd if=/dev/urandom of=/dev/drbd0 bs=4k count=2 seek=9000 oflag=direct conv=notrunc";
    let losses = world.losses()?;
    limit("4k")?;
    alfa.sh(write)?;
    let enough_ms = (6 * ko_count + 5) * 1000;
    proxies.a.wait("a byte waits for longer than that", |s| {
        s["oldest_byte_age_ms"].as_u64() > Some(enough_ms)
    })?;
    limit("0")?;
    proxies
        .a
        .wait("everything is through", |s| s["buffered_raw_bytes"] == 0)?;
    ensure!(world.losses()? == losses, "with ko-count 0 DRBD waits");
    world.pair.readjust(&net(ko_count), disk, ports)?;
    let (proxies, alfa) = (&world.proxies, &world.pair.alfa);
    // The kernel's timer stops for good when it finds ko-count 0, and starts with a connection.
    alfa.sh("drbdadm disconnect r0 && drbdadm connect r0")?;
    world.pair.wait_in_sync()?;
    let losses = world.losses()?;
    let limit = |rate: &str| limit_rate(proxies, rate);
    limit("4k")?;
    alfa.sh(write)?;
    alfa.wait("DRBD drops its peer", DRBD_LIMIT, |_| {
        Ok(world.losses()? > losses)
    })?;
    let log = alfa.sh("dmesg")?;
    ensure!(log.contains("Remote failed to"), "{log}");
    limit("0")?;
    world.pair.readjust(&net(0), disk, ports)?;
    world.pair.wait_in_sync()?;

    // Each scattered block holds an extent until the peer has acknowledged it.
    for (al_extents, rest) in [(extents, "waits"), (3 * extents, "passes")] {
        let disk = format!("{disk} al-extents {al_extents};");
        world.pair.readjust(&net(0), &disk, ports)?;
        world.pair.wait_in_sync()?;
        let (proxies, alfa) = (&world.proxies, &world.pair.alfa);
        limit_rate(proxies, "4k")?;
        alfa.start_job(
            "scattered",
            &format!(
                "chroot /host fio --name=scattered --filename=/dev/drbd0 --rw=write:4092k --bs=4k \
                 --direct=1 --ioengine=psync --number_ios={} --size={}m --randrepeat=0 \
                 --refill_buffers",
                2 * extents,
                (2 * extents + 10) * 4
            ),
        )?;
        let held = || -> Result<u64> {
            let state = proxies.a.state()?;
            state["buffered_raw_bytes"].as_u64().context("a number")
        };
        let ended = || alfa.job_status("scattered").map(|status| status.is_some());
        let full = extents * 4096;
        if rest == "passes" {
            alfa.wait("more fits into the buffer", DRBD_LIMIT, |_| {
                Ok(held()? > full * 13 / 10)
            })?;
        } else {
            alfa.wait("the extents are used up", DRBD_LIMIT, |_| {
                Ok(held()? > full * 8 / 10 || ended()?)
            })?;
            // The line drains slowly and the buffer is filled up as slowly: never more than that.
            for _ in 0..20 {
                let held = held()?;
                ensure!(held < full * 11 / 10, "{held} of {full}");
                ensure!(!ended()?, "the load has ended");
            }
        }
        limit_rate(proxies, "0")?;
        alfa.finish_job("scattered", COMMAND_LIMIT)?;
        world.pair.wait_in_sync()?;
    }
    Ok(())
}

/// Limits what the proxy beside alfa sends.
fn limit_rate(proxies: &Proxies, rate: &str) -> Result<()> {
    let command = format!("set bwlimit {} {rate}", proxies.a.connection);
    proxies.a.ctl(&[&command]).map(drop)
}

/// Lengths that CI cannot afford are given from outside; docs/testing.md names them.
fn number(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value.map_or(default, |text| text.parse().expect("a number"))
}
