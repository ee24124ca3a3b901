//! What one end tells the other about itself.

use super::*;

#[test]
fn the_automatic_choice_knows_how_many_cores_the_peer_has_to_decode_with() {
    let mut world = up(6, &DaemonOptions::default());
    world.options(|options| options.plugins = vec![Plugin::parse(&["lz4"]).unwrap()]);
    let data = noise_and_text(&mut Rng::new(4), 6_000_000);
    world.drbd_opens(0, DATA_FIRST, 0, &data);
    world.all_arrive(60_000, &data);
    let told = |world: &mut World| {
        world.run(1_000, |_| false);
        let link = |node: usize| &world.engines[node].links[&world.links[node]];
        let own = link(1).decode_rate.get().unwrap();
        let shown = world.engines[0].snapshot(Instant(world.now));
        let shown = &shown.connections[0];
        let rate = link(0).peer_decode_rate.unwrap();
        assert_eq!(shown.peer_decode_rate, rate as u64);
        (shown.peer_free_millicores, rate / own)
    };
    // A peer that does not say is expected to have one core.
    let (free, cores) = told(&mut world);
    assert_eq!(free, None);
    assert!((0.99..1.01).contains(&cores), "{cores}");
    for (free, used) in [(3500, 3.5), (900, 0.9), (0, 0.25), (u64::MAX, 1024.0)] {
        let now = Instant(world.now);
        world.engines[1].handle(now, Input::FreeCores(free));
        let (told, cores) = told(&mut world);
        assert_eq!(told, Some(free));
        assert!((used * 0.99..used * 1.01).contains(&cores), "{cores}");
    }
}
