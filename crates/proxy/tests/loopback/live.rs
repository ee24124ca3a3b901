//! What changes without a restart and belongs to no connection: the log level, and the memory.

use lockstep_proxy::LogLevel;

use super::*;

const MIB: u64 = 1 << 20;

/// Memory that what DRBD sent takes at one end.
fn buffered(daemon: &Daemon) -> u64 {
    let state = connection(daemon);
    state["buffered_memory_bytes"].as_u64().unwrap()
}

#[test]
fn the_log_level_is_set_live_and_a_word_that_is_none_is_refused() {
    let given = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&given);
    let log = LogLevel::new("info", move |level| {
        if level == "trace" {
            return Err("no".into());
        }
        seen.lock().unwrap().push(level.to_string());
        Ok(())
    });
    let daemon = Daemon::start(Options {
        log: Some(log),
        ..options(secret())
    });
    let daemon = daemon.unwrap();
    assert_eq!(ok(&daemon, "show"), "");
    ok(&daemon, "set loglevel DEBUG");
    ok(&daemon, "set loglevel warn,lockstep_proxy::net=notice");
    assert_eq!(
        *given.lock().unwrap(),
        ["debug", "warn,lockstep_proxy::net=info"]
    );
    for (bad, reason) in [
        ("set loglevel loud", "expected off, error"),
        ("set loglevel 7", "expected off, error"),
        ("set loglevel", "needs one LEVEL"),
        ("set loglevel r0 debug", "needs one LEVEL"),
        ("set loglevel trace", "no"),
    ] {
        let error = err(&daemon, bad);
        assert!(error.contains(reason), "{bad}: {error}");
    }
    let shown = ok(&daemon, "show");
    assert_eq!(shown, "set loglevel warn,lockstep_proxy::net=info\n");
    let state = daemon.state();
    assert_eq!(state["log_level"], "warn,lockstep_proxy::net=info");
    // In a program whose log is not the daemon's.
    let other = Daemon::start(options(secret())).unwrap();
    assert!(err(&other, "set loglevel debug").contains("not this daemon's"));
}

#[test]
fn the_memory_of_all_is_raised_and_lowered_under_load() {
    let start = || Options {
        memory_max_bytes: 12 * MIB,
        ..options(secret())
    };
    let extra = "--memlimit=64M --max-lag=0 --bwlimit=64k";
    let pair = Pair::up(start(), options(secret()), extra);
    let (near, mut far) = pair.open(DATA);
    let data = noise(40_000_000);
    let sender = send(near, data.clone());
    // Three quarters are for what DRBD sent.
    wait("a full pool", || buffered(&pair.a) > 8 * MIB);
    assert!(buffered(&pair.a) <= 9 * MIB + MIB / 4);
    for (command, reason) in [
        ("set daemon memory-max 0", "at least 4M"),
        ("set daemon memory-max 3M", "at least 4M"),
        ("set daemon memory-max much", "a size such as"),
        ("set daemon memlimit-min 1023K", "1M to 1G"),
        ("set daemon memlimit-min 2G", "1M to 1G"),
        ("set daemon memlimit-min 7M", "in a memory-max of 12M"),
        ("set daemon memory 8M", "memory-max, memlimit-min"),
    ] {
        let error = err(&pair.a, command);
        assert!(error.contains(reason), "{command}: {error}");
    }
    ok(&pair.a, "set daemon memory-max 32M");
    wait("use of what was added", || buffered(&pair.a) > 20 * MIB);
    assert!(buffered(&pair.a) <= 24 * MIB + MIB / 4);
    // Below what is in use: nothing is lost, nothing more is taken.
    ok(&pair.a, "set daemon memory-max 8M");
    ok(&pair.a, "set daemon memlimit-min 4M");
    let shown = ok(&pair.a, "show");
    let first = "set daemon memory-max 8M\nset daemon memlimit-min 4M\nadd connection";
    assert!(shown.starts_with(first), "{shown}");
    let state = pair.a.state();
    assert_eq!(state["memory_max_bytes"], 8 * MIB);
    assert_eq!(state["memlimit_min_bytes"], 4 * MIB);
    let metrics = ok(&pair.a, "print metrics");
    for line in [
        "lockstep_proxy_memory_limit_bytes 8388608\n",
        "lockstep_proxy_memory_floor_bytes 4194304\n",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    let read = |daemon: &Daemon| {
        let state = connection(daemon);
        state["counters"]["raw_in_bytes"].as_u64().unwrap()
    };
    let before = read(&pair.a);
    let full = buffered(&pair.a);
    ok(&pair.a, "set bwlimit r0-b-a 4M");
    receive(&mut far, &data[..2_000_000]);
    wait("less in the buffer", || buffered(&pair.a) < full);
    assert_eq!(read(&pair.a), before, "more was read than may be held");
    ok(&pair.a, "set bwlimit r0-b-a 0");
    receive(&mut far, &data[2_000_000..]);
    sender.join().unwrap();
    assert_eq!(connection(&pair.a)["counters"]["streams_reset"], 0);
}

#[test]
fn each_connection_has_its_floor_and_no_more_connections_than_have_one() {
    let daemon = Daemon::start(Options {
        memory_max_bytes: 12 * MIB,
        memlimit_min_bytes: 3 * MIB,
        ..options(secret())
    });
    let daemon = daemon.unwrap();
    let add = |name: &str| {
        let at = |port: u16| SocketAddr::from((fresh_ip(), port));
        let (inside, peer, own, drbd) = (at(7815), at(7715), at(7715), at(7915));
        format!("add connection {name} {inside} {peer} {own} {drbd}")
    };
    ok(&daemon, &add("r0"));
    ok(&daemon, &add("r1"));
    let third = add("r2");
    let error = err(&daemon, &third);
    assert!(error.contains("for 3 connections"), "{error}");
    let error = err(&daemon, "set daemon memory-max 11M");
    assert!(
        error.contains("at least 12M for 2 connections with a memlimit-min of 3M"),
        "{error}"
    );
    ok(&daemon, "set daemon memlimit-min 2M");
    ok(&daemon, &third);
    let wrong = |floor| {
        let options = Options {
            memlimit_min_bytes: floor,
            ..options(secret())
        };
        Daemon::start(options).unwrap_err()
    };
    for (floor, text) in [(0, "'0'"), (MIB - 1, "'1048575'"), (2 << 30, "'2G'")] {
        let error = wrong(floor);
        assert!(
            error.contains("memlimit-min") && error.contains(text),
            "{error}"
        );
    }
    let error = wrong(40 * MIB);
    assert!(error.contains("memory-max"), "{error}");
}
