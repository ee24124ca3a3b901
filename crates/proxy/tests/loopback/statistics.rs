//! What the statistics say after bytes have passed, in each of their forms.

use super::*;

#[test]
fn statistics_tell_codecs_classes_directions_and_the_automatic_choice() {
    let pair = Pair::up(options(secret()), options(secret()), "--memlimit=8M");
    ok(&pair.a, "set plugin r0-b-a 0 auto");
    let (data_a, mut data_b) = pair.open(DATA);
    let (mut meta_a, mut meta_b) = pair.open(META);
    let data = sample(12_000_000, 5);
    let sender = send(data_a, data.clone());
    receive(&mut data_b, &data);
    sender.join().unwrap();
    meta_a.write_all(b"ping").unwrap();
    receive(&mut meta_b, b"ping");
    wait("all is acknowledged", || {
        connection(&pair.a)["buffered_raw_bytes"] == 0
            && connection(&pair.a)["counters"]["control_latency"]["count"].as_u64() > Some(0)
    });
    let (a, b) = (connection(&pair.a), connection(&pair.b));
    let count = |state: &serde_json::Value, path: &str| {
        let found = state.pointer(path).and_then(serde_json::Value::as_u64);
        found.unwrap_or_else(|| panic!("{path}: {state:#}"))
    };
    // It begins with lz4, which the sample suits; time was spent on it at both ends.
    assert!(count(&a, "/counters/codec_cpu_us/encode/data/lz4") > 0);
    assert!(count(&b, "/counters/codec_cpu_us/decode/data/lz4") > 0);
    let sent = &a["counters"]["chunks_by_codec"];
    assert_eq!(sent, &b["counters"]["received_by_codec"]);
    assert_eq!(count(&a, "/counters/control_raw_in_bytes"), 4);
    assert_eq!(count(&b, "/counters/control_raw_out_bytes"), 4);
    assert_eq!(count(&a, "/counters/raw_in_bytes"), 12_000_004);
    assert!(count(&a, "/counters/control_wire_out_bytes") > 36);
    assert_eq!(count(&a, "/counters/carriers_up"), 2);
    assert!(count(&a, "/control_max_us") >= count(&a, "/control_p50_us"));
    let rungs = a["rungs"].as_array().unwrap();
    assert_eq!(rungs[1]["codec"], "lz4");
    assert_eq!(rungs[1]["measured"], true);
    assert!(rungs[1]["chunks"].as_u64() > Some(0) && rungs[1]["speed"].as_u64() > Some(0));
    assert_eq!(rungs.last().unwrap()["codec"], "zstd level 15");
    assert_eq!(
        b["rungs"],
        serde_json::json!([]),
        "only for the plugin auto"
    );
    let threads = pair.a.state()["thread_cpu_us"].clone();
    for name in ["control-lane", "proxy-io", "codec"] {
        assert!(threads[name].as_u64() > Some(0), "{name}: {threads}");
    }
    // What the kernel says of the carriers.
    let carriers = a["carriers"].as_array().unwrap();
    let bulk = carriers.iter().find(|one| one["class"] == "bulk").unwrap();
    for (path, least, most) in [
        ("/tcp/rtt_us", 1, 2_000_000),
        ("/tcp/min_rtt_us", 1, 2_000_000),
        ("/tcp/congestion_window_bytes", 1000, 1 << 30),
        ("/tcp/congestion_window_segments", 1, 1 << 20),
        ("/tcp/delivery_rate", 1, 1 << 40),
        ("/number", 1, 99),
    ] {
        let found = count(bulk, path);
        assert!((least..=most).contains(&found), "{path}: {found}");
    }
    let shown = ok(&pair.a, "show carriers");
    let table: Vec<Vec<&str>> = shown.lines().map(|l| l.split('\t').collect()).collect();
    assert_eq!(table.len(), 3, "{shown}");
    assert!(table.iter().all(|line| line.len() == 16), "{shown}");
    let control = table.iter().find(|line| line[1] == "control").unwrap();
    assert_eq!((control[0], control[2]), ("r0-b-a", "0"), "{shown}");
    assert_eq!(control[4], pair.line.addr.to_string());

    let values = ok(&pair.a, "print statistics");
    let text = ok(&pair.a, "print metrics");
    for key in [
        "r0-b-a.rungs.1.ratio=",
        "r0-b-a.rungs.1.speed=",
        "r0-b-a.rungs.1.effective=",
        "r0-b-a.rungs.1.probes=",
        "r0-b-a.counters.codec_cpu_us.encode.data.lz4=",
        "r0-b-a.buffered_encoded_bytes=0",
        "thread_cpu_us.proxy-io=",
    ] {
        let line = format!("\n{key}");
        assert!(values.contains(&line), "{key}: {values}");
    }
    for name in [
        "state{connection=\"r0-b-a\",state=\"Connected\"} 1",
        "state{connection=\"r0-b-a\",state=\"Suspended\"} 0",
        "raw_bytes_total{connection=\"r0-b-a\",direction=\"send\",class=\"data\"} 12000000",
        "raw_bytes_total{connection=\"r0-b-a\",direction=\"send\",class=\"control\"} 4",
        "wire_bytes_total{connection=\"r0-b-a\",direction=\"receive\",class=\"control\"} ",
        "chunks_total{connection=\"r0-b-a\",codec=\"lz4\",direction=\"send\"} ",
        "codec_seconds_total{connection=\"r0-b-a\",work=\"encode\",class=\"data\",codec=\"lz4\"} ",
        "codec{connection=\"r0-b-a\",codec=",
        "rung_ratio{connection=\"r0-b-a\",codec=\"lz4\",measured=\"yes\"} ",
        "rung_bytes_per_second{connection=\"r0-b-a\",codec=\"lz4\",measured=\"yes\"} ",
        "rung_effective_bytes_per_second{connection=\"r0-b-a\",codec=\"lz4\",",
        "rung_probes_total{connection=\"r0-b-a\",codec=\"lz4\"} ",
        "thread_cpu_seconds_total{thread=\"proxy-io\"} ",
        "control_latency_max_seconds{connection=\"r0-b-a\"} ",
        "carrier_rtt_seconds{connection=\"r0-b-a\",class=\"control\",carrier=\"0\"} 0.",
        "carrier_congestion_window_bytes{connection=\"r0-b-a\",class=\"bulk\",carrier=\"",
        "carrier_retransmitted_segments{connection=\"r0-b-a\",class=\"bulk\",carrier=\"",
        "retransmits_total{connection=\"r0-b-a\"} ",
        "carriers_up_total{connection=\"r0-b-a\"} 2",
        "buffered_encoded_bytes{connection=\"r0-b-a\"} 0",
    ] {
        let line = format!("\nlockstep_proxy_{name}");
        assert!(text.contains(&line), "{name}: {text}");
    }
}
