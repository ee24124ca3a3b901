//! Limits and marks: set at the start, by command, while bytes pass, and over an upgrade.

use lockstep_proxy::SessionOption;

use super::*;

/// Class and mark of the carriers of the only connection.
fn marks(daemon: &Daemon) -> Vec<(String, String)> {
    let state = connection(daemon);
    let carriers = state["carriers"].as_array().unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    let mut marks: Vec<_> = carriers
        .iter()
        .map(|carrier| (text(&carrier["class"]), text(&carrier["dscp"])))
        .collect();
    marks.sort();
    marks
}

fn wanted(list: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = list.iter().map(|(a, b)| ((*a).into(), (*b).into()));
    owned.collect()
}

#[test]
fn carriers_bear_the_marks_that_are_asked_for_and_change_them_live() {
    let extra = "--carriers=2 --dscp-bulk=CS1";
    let pair = Pair::up(options(secret()), options(secret()), extra);
    let first = wanted(&[("bulk", "cs1"), ("bulk", "cs1"), ("control", "af31")]);
    for daemon in [&pair.a, &pair.b] {
        wait("all carriers are marked", || marks(daemon) == first);
    }
    let (near, mut far) = pair.open(DATA);
    let data = sample(3_000_000, 3);
    let sender = send(near, data.clone());
    receive(&mut far, &data[..1_000_000]);
    ok(&pair.a, "set dscp-control r0-b-a 46");
    ok(&pair.a, "set dscp-bulk r0-b-a default");
    let error = err(&pair.a, "set dscp-bulk r0-b-a af14");
    assert!(
        error.contains("0 to 63") && error.contains("af14"),
        "{error}"
    );
    let second = [("bulk", "default"), ("bulk", "default"), ("control", "ef")];
    assert_eq!(marks(&pair.a), wanted(&second));
    assert_eq!(marks(&pair.b), first, "each end marks what it sends");
    // A carrier that is dialled later has them too.
    pair.line.cut();
    pair.line.mend();
    wait("the carriers are back", || {
        marks(&pair.a) == wanted(&second)
    });
    receive(&mut far, &data[1_000_000..]);
    sender.join().unwrap();
    let state = connection(&pair.a);
    assert_eq!(state["counters"]["streams_reset"], 0);
    let shown = ok(&pair.a, "show");
    let options = "--dscp-control=ef --dscp-bulk=default --carriers=2 --dial=always";
    assert!(shown.contains(options), "{shown}");
}

#[test]
fn limits_of_every_level_are_set_live_shown_and_kept_over_an_upgrade() {
    let dir = tempfile::tempdir().unwrap();
    let at_start = |take_over| Options {
        control: Some(dir.path().join("a")),
        take_over,
        rate: "mon-fri/08:00-18:00=3G,*=2G".into(),
        burst: "128K".into(),
        sessions: [("bwlimit", "1G"), ("burst", "512K")]
            .map(|(option, value)| SessionOption {
                peer: "192.0.2.77".into(),
                option: option.into(),
                value: value.into(),
            })
            .into(),
        ..options(secret())
    };
    let mut pair = Pair::up(at_start(false), options(secret()), "--bwlimit=1G");
    let peer = pair.line.addr.ip();
    let session = |option: &str, value: &str| format!("set session {peer} {option} {value}");
    for (command, reason) in [
        ("set daemon burst 4K".to_string(), "64K to 1G"),
        ("set daemon weight 2".into(), "'weight' of a daemon"),
        ("set burst r0-b-a 2G".into(), "64K to 1G"),
        ("set session bob bwlimit 1M".into(), "not the outside IP"),
        (session("schedule", "mon"), "mon-fri/08:00-18:00"),
        (session("bwlimit", "fast"), "bytes per second"),
    ] {
        let error = err(&pair.a, &command);
        assert!(error.contains(reason), "{command}: {error}");
    }
    let (near, mut far) = pair.open(DATA);
    let data = sample(3_000_000, 3);
    let sender = send(near, data.clone());
    receive(&mut far, &data[..1_000_000]);
    for command in [
        session("bwlimit", "30M"),
        session("burst", "1M"),
        "set burst r0-b-a 2M".into(),
        "set daemon bwlimit 40M".into(),
    ] {
        ok(&pair.a, &command);
    }
    let limits = |daemon: &Daemon| {
        let state = daemon.state();
        let link = &state["connections"][0];
        let pair = |from: &serde_json::Value| {
            let number = |key: &str| from[key].as_u64().unwrap();
            (number("rate_limit"), number("burst_bytes"))
        };
        let sessions = state["sessions"].as_array().unwrap();
        let mut all = vec![pair(&state), pair(link)];
        all.extend(sessions.iter().map(pair));
        all.sort();
        all
    };
    const M: u64 = 1 << 20;
    let mut now = vec![
        (30 * M, M),
        (40 * M, 128 << 10),
        (1024 * M, 512 << 10),
        (1024 * M, 2 * M),
    ];
    assert_eq!(limits(&pair.a), now);
    let shown = ok(&pair.a, "show");
    for line in [
        "set daemon bwlimit 40M\nset daemon burst 128K\n",
        &format!("set session {peer} bwlimit 30M\nset session {peer} burst 1M\n"),
        "set session 192.0.2.77 bwlimit 1G\nset session 192.0.2.77 burst 512K\n",
        "--bwlimit=1G --burst=2M",
    ] {
        assert!(shown.contains(line), "{line}: {shown}");
    }
    let metrics = ok(&pair.a, "print metrics");
    for line in [
        "lockstep_proxy_rate_limit_bytes_per_second{level=\"daemon\"} 41943040",
        &format!("{{level=\"session\",peer=\"{peer}\"}} 31457280"),
        "lockstep_proxy_burst_bytes{level=\"connection\",connection=\"r0-b-a\"} 2097152",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    // The daemon's limit is what the new process was started with.
    let new = Daemon::start(at_start(true)).unwrap();
    std::mem::replace(&mut pair.a, new).wait();
    now.retain(|(rate, _)| *rate != 40 * M);
    let after = limits(&pair.a);
    for limit in &now {
        assert!(after.contains(limit), "{limit:?} in {after:?}");
    }
    let daemon = after.iter().find(|limit| !now.contains(limit)).unwrap();
    assert!(daemon.0 >= 2048 * M && daemon.1 == 128 << 10, "{daemon:?}");
    receive(&mut far, &data[1_000_000..]);
    sender.join().unwrap();
    assert_eq!(connection(&pair.a)["counters"]["streams_reset"], 0);
    // What was shown can be given to another daemon.
    pair.a.commands(&["del connection r0-b-a"]);
    let other = Daemon::start(options(secret())).unwrap();
    for line in shown.lines() {
        ok(&other, line);
    }
    assert_eq!(ok(&other, "show"), shown);
}

#[test]
fn a_bad_limit_on_the_command_line_is_named() {
    let wrong = |change: &dyn Fn(&mut Options)| {
        let mut options = options(secret());
        change(&mut options);
        Daemon::start(options).unwrap_err()
    };
    let error = wrong(&|o| o.burst = "1K".into());
    assert!(error.contains("burst '1K'"), "{error}");
    let error = wrong(&|o| o.rate = "mon=".into());
    assert!(error.contains("schedule 'mon='"), "{error}");
    let error = wrong(&|o| o.rate = "quick".into());
    assert!(error.contains("bytes per second"), "{error}");
}
