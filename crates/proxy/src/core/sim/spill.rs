//! Reading back from the spill disk: ahead of the line, within the head of the queue.

use super::*;

#[test]
fn several_records_are_read_ahead_and_not_more_than_the_head() {
    let options = DaemonOptions {
        spill_limit_bytes: 64 << 20,
        ..DaemonOptions::default()
    };
    let mut world = up(1, &options);
    world.options(|options| {
        options.set("bwlimit", "100000").unwrap();
        options.set("max-lag", "0").unwrap();
    });
    let mut rng = Rng::new(4);
    let data: Vec<u8> = (0..16_000_000).map(|_| rng.below(256) as u8).collect();
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    let filled = world.run(60_000, |w| {
        w.engines[0].snapshot(Instant(w.now)).connections[0].spilled_bytes > 9_000_000
    });
    world.check(filled, "nothing is spilled");
    world.reads_peak = (0, 0);
    // Slow enough for the shaper to be what holds it up, not the disk.
    world.options(|options| {
        options.set("bwlimit", "2M").unwrap();
    });
    world.all_arrive(60_000, &data);
    let (records, bytes) = world.reads_peak;
    // The head is a quarter of memlimit, and may end within a chunk of at most an eighth.
    assert!((2..=16).contains(&records), "{records} records at once");
    assert!(bytes <= (1 << 20) + (512 << 10), "{bytes} bytes at once");
}
