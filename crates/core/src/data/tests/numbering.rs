//! Nodes that were given no ids and chose the same one.

use super::*;

fn setup(unnumbered: bool) -> Setup {
    let mut setup = Setup {
        same_ids: true,
        ..Setup::default()
    };
    setup.options.unnumbered = unnumbered;
    setup
}

fn protocol(w: &World) -> u32 {
    w.nodes[0].resource.dialect(node_id(1)).protocol
}

#[test]
fn nodes_that_chose_the_same_id_speak_the_dialect_without_ids() {
    let mut w = clean(90, 2, setup(true));
    assert_eq!(protocol(&w), 101);
    w.write(0, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    w.check_same_data();
    w.cut_links();
    w.pass(Duration::from_secs(5));
    w.pass_until("the next connection", 60, World::in_sync);
    assert_eq!(protocol(&w), 101);
    w.check_idle();
}

#[test]
fn given_ids_that_clash_are_refused() {
    let mut w = World::new(91, 2, setup(false));
    w.pass(Duration::from_secs(10));
    assert!(
        w.log
            .iter()
            .any(|text| text.contains("the peer says it is node")),
        "{:#?}",
        w.log
    );
    assert!(!w.in_sync() && protocol(&w) < 118);
}

#[test]
fn a_peer_with_the_other_id_is_spoken_to_as_ever() {
    let mut setup = setup(true);
    setup.same_ids = false;
    let w = clean(92, 2, setup);
    assert!(protocol(&w) >= 118);
}
