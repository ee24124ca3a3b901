//! What changes without a restart and belongs to no connection: log level, memory, identity.

use lockstep_proxy::{IdentitySource, LogLevel};

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
    // Three quarters are for what DRBD sent; one read may be under way.
    wait("a full pool", || buffered(&pair.a) > 8 * MIB);
    assert!(buffered(&pair.a) <= 11 * MIB);
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
    assert!(buffered(&pair.a) <= 26 * MIB);
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
    ok(&pair.a, "set bwlimit r0-b-a 32M");
    receive(&mut far, &data[..8_000_000]);
    wait("less in the buffer", || buffered(&pair.a) < 17 * MIB);
    // All that was delivered would have been replaced; but for a read that was under way.
    let more = read(&pair.a) - before;
    assert!(buffered(&pair.a) <= 8 * MIB || more <= 2 * MIB, "{more}");
    ok(&pair.a, "set bwlimit r0-b-a 0");
    receive(&mut far, &data[8_000_000..]);
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

/// An identity that a test changes as somebody changes files.
fn changing(now: &Arc<Mutex<Security>>) -> Options {
    let first = now.lock().unwrap().clone();
    let source = Arc::clone(now);
    Options {
        identity: Some(IdentitySource::new(move || {
            Ok(source.lock().unwrap().clone())
        })),
        ..options(first)
    }
}

fn only_secret(text: &[u8]) -> Security {
    Security::Secrets(vec![SharedSecret::for_all(text)])
}

#[test]
fn a_new_secret_is_for_new_carriers_and_a_bad_one_is_refused() {
    let (at_a, at_b) = (
        Arc::new(Mutex::new(secret())),
        Arc::new(Mutex::new(secret())),
    );
    let pair = Pair::up(changing(&at_a), changing(&at_b), "");
    let (near, mut far) = pair.open(DATA);
    let data = sample(9_000_000, 5);
    let sender = send(near, data.clone());
    receive(&mut far, &data[..1_000_000]);
    let counter = |name: &str| connection(&pair.a)["counters"][name].as_u64().unwrap();
    let up = counter("carriers_up");
    // Too short, or of no use at all.
    for bad in [only_secret(b"short"), Security::Insecure] {
        *at_a.lock().unwrap() = bad;
        let error = err(&pair.a, "reload");
        assert!(error.contains("old identity stays in use"), "{error}");
    }
    let reconnect = || {
        pair.line.cut();
        wait("the loss", || connection(&pair.a)["state"] == "Suspended");
        pair.line.mend();
    };
    reconnect();
    wait("the old secret", || {
        let state = connection(&pair.a);
        state["state"] == "Connected" && state["bulk_carriers"] == 1
    });
    receive(&mut far, &data[1_000_000..2_000_000]);
    // A new one at one end: what is up stays up.
    let new = b"fedcba9876543210fedcba9876543210";
    let (before, resumed) = (counter("carriers_up"), counter("resumes"));
    assert!(before > up);
    *at_a.lock().unwrap() = only_secret(new);
    ok(&pair.a, "reload");
    receive(&mut far, &data[2_000_000..4_000_000]);
    assert_eq!(counter("carriers_up"), before);
    // A carrier from now on has it, and is let in as soon as the other end has it too.
    reconnect();
    wait("a refusal", || {
        let error = connection(&pair.a)["last_error"].clone();
        error
            .as_str()
            .is_some_and(|text| text.contains("secret or key"))
    });
    *at_b.lock().unwrap() = only_secret(new);
    ok(&pair.b, "reload");
    wait("the new secret", || {
        connection(&pair.a)["state"] == "Connected"
    });
    receive(&mut far, &data[4_000_000..]);
    sender.join().unwrap();
    assert_eq!(counter("resumes"), resumed + 1);
    assert_eq!(counter("streams_reset"), 0);
    // Without files there is nothing to read.
    let plain = Daemon::start(options(secret())).unwrap();
    assert!(err(&plain, "reload").contains("not come from files"));
}

#[test]
fn certificates_are_read_again_whole_or_not_at_all() {
    let (here, dir) = (
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates"),
        tempfile::tempdir().unwrap(),
    );
    let put = |from: &str, to: &str| {
        std::fs::copy(here.join(from), dir.path().join(to)).unwrap();
    };
    put("alice.pem", "cert");
    put("alice.key.pem", "key");
    put("authority.pem", "ca");
    let files = Security::Certificates {
        cert: dir.path().join("cert"),
        key: dir.path().join("key"),
        authority: dir.path().join("ca"),
        peer_names: vec!["bob.example".into()],
    };
    let known = ["alice.example=r0-a-*", "carol.example=r0-c-*"];
    let a = changing(&Arc::new(Mutex::new(files)));
    let pair = Pair::up(a, certificate("bob", &known), "");
    let (mut near, mut far) = pair.open(DATA);
    let refused = |expected: &str| {
        let error = err(&pair.a, "reload");
        assert!(
            error.contains("stays in use") && error.contains(expected),
            "{error}"
        );
    };
    // Half of a new pair, an outdated one, nothing, and no certificate.
    put("carol.pem", "cert");
    refused("cert");
    put("expired.pem", "cert");
    put("expired.key.pem", "key");
    put("expired.authority.pem", "ca");
    refused("expired");
    std::fs::remove_file(dir.path().join("cert")).unwrap();
    refused("cert");
    put("alice.key.pem", "cert");
    refused("cert");
    std::fs::write(dir.path().join("ca"), "").unwrap();
    put("alice.pem", "cert");
    put("alice.key.pem", "key");
    refused("ca");
    put("authority.pem", "ca");
    let reconnect = || {
        pair.line.cut();
        wait("the loss", || connection(&pair.a)["state"] == "Suspended");
        pair.line.mend();
    };
    reconnect();
    wait("the old certificate", || {
        connection(&pair.a)["state"] == "Connected"
    });
    near.write_all(b"hello").unwrap();
    receive(&mut far, b"hello");
    // A whole one, of somebody who may not use the connection.
    put("carol.pem", "cert");
    put("carol.key.pem", "key");
    ok(&pair.a, "reload");
    near.write_all(b"still").unwrap();
    receive(&mut far, b"still");
    reconnect();
    wait("the refusal", || {
        let error = connection(&pair.a)["last_error"].clone();
        error
            .as_str()
            .is_some_and(|text| text.contains("may not use it"))
    });
    put("alice.pem", "cert");
    put("alice.key.pem", "key");
    ok(&pair.a, "reload");
    wait("the right one", || {
        connection(&pair.a)["state"] == "Connected"
    });
    near.write_all(b"again").unwrap();
    receive(&mut far, b"again");
}
