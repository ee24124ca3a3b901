//! The time by cause: each world makes one cause the only one that counts.

use super::*;
use crate::core::waits::Waits;

fn waits(world: &World) -> Waits {
    let snapshot = world.engines[0].snapshot(Instant(world.now));
    let text = crate::metrics::prometheus(&snapshot);
    let waits = snapshot.connections[0].counters.send_blocked.clone();
    for (reason, us) in waits.each() {
        let line = format!(
            "lockstep_proxy_send_blocked_seconds_total{{connection=\"r0-b-a\",\
             reason=\"{reason}\"}} {}\n",
            us as f64 / 1e6
        );
        assert!(text.contains(&line), "{line}");
    }
    waits
}

fn sum(waits: &Waits) -> u64 {
    waits.each().iter().map(|(_, us)| us).sum()
}

#[test]
fn a_session_that_no_drbd_uses_keeps_its_carriers() {
    for seed in 0..4 {
        let mut world = up(seed, &DaemonOptions::default());
        world.run(120_000, |_| false);
        for engine in &world.engines {
            let link = engine.links.values().next().unwrap();
            assert_eq!(link.counters.carriers_lost, 0, "seed {seed}");
            assert_eq!(link.bulk.len(), 1);
        }
    }
}

#[test]
fn nothing_is_blocked_while_nothing_is_to_be_sent() {
    let mut world = up(1, &DaemonOptions::default());
    world.run(5_000, |_| false);
    assert_eq!(waits(&world), Waits::default());
}

#[test]
fn a_rate_is_shaping() {
    let mut world = up(2, &DaemonOptions::default());
    world.options(|options| {
        options.set("bwlimit", "100000").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(4), 1_500_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.run(8_000, |_| false);
    let waits = waits(&world);
    assert!(waits.shaping_us > 6_000_000, "{waits:?}");
    assert!(waits.shaping_us > sum(&waits) / 10 * 9, "{waits:?}");
}

#[test]
fn a_cut_line_is_session() {
    let mut world = up(3, &DaemonOptions::default());
    world.options(|options| {
        options.set("bwlimit", "100000").unwrap();
    });
    let data = noise_and_text(&mut Rng::new(4), 1_500_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.run(1_000, |_| false);
    let before = waits(&world).session_us;
    world.down = true;
    world.cut();
    world.run(5_000, |_| false);
    let time = waits(&world).session_us - before;
    // An end may learn of the cut 300 ms late.
    assert!((4_700_000..=5_000_000).contains(&time), "{time} us");
    world.down = false;
    world.options(|options| {
        options.set("bwlimit", "0").unwrap();
    });
    world.all_arrive(60_000, &data);
}

#[test]
fn a_peer_without_room_is_window() {
    let options = DaemonOptions {
        memory_max_bytes: 4 << 20,
        ..DaemonOptions::default()
    };
    let mut world = up(4, &options);
    let data = noise_and_text(&mut Rng::new(4), 12_000_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.all_arrive(60_000, &data);
    let waits = waits(&world);
    assert!(waits.window_us > sum(&waits) / 2, "{waits:?}");
}

#[test]
fn a_slow_codec_is_codec() {
    let options = DaemonOptions {
        jobs_max: 1,
        ..DaemonOptions::default()
    };
    let mut world = up(5, &options);
    world.options(|options| options.plugins = vec![Plugin::parse(&["zlib"]).unwrap()]);
    let data = noise_and_text(&mut Rng::new(4), 8_000_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.all_arrive(60_000, &data);
    let waits = waits(&world);
    assert!(waits.codec_us > sum(&waits) / 2, "{waits:?}");
}
