//! Primaries that take turns, as in a live migration (semantics.md, 7.1).

use super::*;
use crate::command::ErrorCode;
use crate::options::Quorum;
use crate::state::Role;

/// Nodes in sync that may take turns; the first one is Primary.
fn turns(seed: u64, count: usize, diskless: Option<usize>) -> World {
    let mut setup = Setup {
        diskless,
        client: diskless.is_some(),
        ..Setup::default()
    };
    setup.net.allow_two_primaries = true;
    clean(seed, count, setup)
}

fn role(w: &World, index: usize) -> Role {
    w.nodes[index].resource.state.role
}

fn stands_by(w: &World, index: usize) -> bool {
    w.nodes[index].resource.snapshot().stands_by
}

fn primary(w: &mut World, index: usize) {
    let id = w.command(index, Command::Primary { force: false });
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
}

fn opens(w: &mut World, index: usize, open: bool) -> u64 {
    let command = Command::Open {
        volume: VOLUME,
        open,
        write: true,
    };
    w.command(index, command)
}

fn logged(w: &World, words: &str) -> bool {
    w.log.iter().any(|text| text.contains(words))
}

/// What is read when the turn has come.
fn read(w: &mut World, index: usize, sector: u64) -> Vec<u8> {
    let id = w.request(index, RequestKind::Read, sector, 4096, 0xee);
    w.pass(Duration::from_millis(500));
    assert!(w.done(index, id), "{:#?}", w.log);
    let buffer = w.nodes[index].read[&id];
    w.nodes[index].buffers[&buffer].clone()
}

#[test]
fn a_second_primary_stands_by_and_gets_its_turn_with_its_first_request() {
    // Three disks; the second Primary a client; a client first.
    for (diskless, first, second) in [(None, 0, 1), (Some(2), 0, 2), (Some(2), 2, 1)] {
        for seed in 1..9 {
            let mut w = turns(seed, 3, diskless);
            if first != 0 {
                w.command(0, Command::Secondary { force: false });
                w.pass(Duration::from_secs(1));
                primary(&mut w, first);
            }
            let before = w.write(first, 0, 4096, 1);
            w.pass(Duration::from_secs(1));
            primary(&mut w, second);
            assert!(stands_by(&w, second) && w.done(first, before));
            assert_eq!(role(&w, first), Role::Primary);
            // As long as nobody asks for anything there, nothing changes.
            w.pass(Duration::from_secs(5));
            assert_eq!(role(&w, first), Role::Primary);
            assert_eq!(read(&mut w, second, 0), vec![1; 4096]);
            let (a, b) = (w.write(first, 8, 4096, 2), w.write(second, 16, 4096, 3));
            w.pass(Duration::from_secs(2));
            assert!(w.done(first, a) && w.done(second, b), "{:#?}", w.log);
            // What one has written the other one reads.
            assert_eq!(read(&mut w, second, 8), vec![2; 4096]);
            assert_eq!(read(&mut w, first, 16), vec![3; 4096]);
            // The one that is left goes on alone.
            let id = w.command(first, Command::Secondary { force: false });
            w.pass(Duration::from_secs(2));
            assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
            assert!(!stands_by(&w, first));
            assert_eq!(role(&w, second), Role::Primary, "{:#?}", w.log);
            w.check_same_data();
            w.check_idle();
        }
    }
}

#[test]
fn three_nodes_take_turns_under_load() {
    for seed in 1..9 {
        let mut w = turns(seed, 3, None);
        primary(&mut w, 1);
        primary(&mut w, 2);
        let mut ids = Vec::new();
        for n in 0..60 {
            let node = (n % 3) as usize;
            ids.push((node, w.write(node, n * 16, 8192, n as u8 + 1)));
            w.pass(Duration::from_millis(7));
        }
        w.pass(Duration::from_secs(5));
        for (node, id) in ids {
            assert!(w.done(node, id), "{:#?}", w.log);
        }
        let primaries = (0..3).filter(|n| role(&w, *n) == Role::Primary).count();
        assert_eq!(primaries, 1);
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn an_opener_takes_its_turn_and_its_close_ends_it() {
    let mut w = turns(3, 3, None);
    let id = opens(&mut w, 0, true);
    w.run();
    assert_eq!(w.answers[&id], Ok(Answer::Done));
    let id = opens(&mut w, 1, true);
    w.pass(Duration::from_millis(500));
    assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
    assert!(stands_by(&w, 1));
    // Its holder is not asked to close: it gives its turn away all the same, and nothing fails there.
    assert_eq!(read(&mut w, 1, 0), vec![0; 4096]);
    assert!(stands_by(&w, 0) && !w.nodes[0].resource.state.fail_io);
    let id = w.command(0, Command::Secondary { force: false });
    w.pass(Duration::from_secs(1));
    let refused = w.answers[&id].as_ref().err().map(|e| e.code);
    assert_eq!(refused, Some(ErrorCode::DEVICE_IN_USE));
    opens(&mut w, 1, false);
    w.pass(Duration::from_secs(3));
    assert!(!stands_by(&w, 1));
    assert_eq!((role(&w, 0), role(&w, 1)), (Role::Primary, Role::Secondary));
    w.check_idle();
}

#[test]
fn without_the_option_a_second_primary_is_refused() {
    let mut w = clean(3, 3, Setup::default());
    let id = w.command(1, Command::Primary { force: false });
    w.pass(Duration::from_secs(3));
    let refused = w.answers[&id].as_ref().err().map(|e| e.code);
    assert_eq!(refused, Some(ErrorCode::TWO_PRIMARIES));
    assert!(!stands_by(&w, 1));
}

/// Whoever is Primary may go on behind a lost link.
#[test]
fn the_turn_of_a_lost_primary_is_taken_with_quorum_or_on_a_word_only() {
    for quorum in [Quorum::Off, Quorum::Majority] {
        let mut setup = Setup::default();
        setup.net.allow_two_primaries = true;
        setup.options.quorum = quorum;
        let mut w = clean(5, 3, setup);
        primary(&mut w, 1);
        w.crash(0);
        let id = w.write(1, 0, 4096, 1);
        w.pass(Duration::from_secs(20));
        if quorum == Quorum::Off {
            assert!(!w.done(1, id) && role(&w, 1) == Role::Secondary);
            assert!(logged(&w, "was Primary when its connection was lost"));
            primary(&mut w, 1);
        }
        assert!(w.done(1, id), "{:#?}", w.log);
        w.restart(0);
        w.pass_until("the other one", 60, World::in_sync);
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn who_stands_by_can_be_forced_to_go_and_taken_down() {
    let mut w = turns(3, 3, None);
    primary(&mut w, 1);
    opens(&mut w, 1, true);
    w.run();
    // The other one's turn lasts as long as it cannot complete what it has begun.
    w.command(0, Command::SuspendIo);
    w.run();
    let id = w.write(1, 0, 4096, 1);
    w.pass(Duration::from_secs(1));
    assert!(!w.done(1, id));
    let forced = w.command(1, Command::Secondary { force: true });
    w.pass(Duration::from_millis(100));
    assert_eq!(w.answers.get(&forced), Some(&Ok(Answer::Done)));
    assert!(!stands_by(&w, 1) && !w.done(1, id));
    opens(&mut w, 1, false);
    w.run();
    assert!(!w.nodes[1].resource.state.fail_io);
    primary(&mut w, 1);
    let down = w.command(1, Command::Down);
    w.pass(Duration::from_secs(3));
    assert_eq!(
        w.answers.get(&down),
        Some(&Ok(Answer::Done)),
        "{:#?}",
        w.log
    );
    w.check_idle();
}

/// Wherever the node that has asked for its turn dies: who gave it away goes on, and its users see no error.
#[test]
fn the_death_of_who_asked_is_no_error_for_who_gives_its_turn_away() {
    for steps in 0..120 {
        let mut setup = Setup::default();
        setup.net.allow_two_primaries = true;
        setup.options.quorum = Quorum::Majority;
        let mut w = clean(7, 3, setup);
        opens(&mut w, 0, true);
        w.run();
        primary(&mut w, 1);
        w.write(1, 0, 4096, 1);
        for _ in 0..steps {
            w.step();
        }
        w.crash(1);
        let id = w.write(0, 8, 4096, 2);
        w.pass(Duration::from_secs(20));
        assert!(!w.nodes[0].resource.state.fail_io, "{steps}: {:#?}", w.log);
        assert!(w.done(0, id), "{steps}: {:#?}", w.log);
    }
}

/// A kernel knows no turns, and would become a second Primary if it were asked.
#[test]
fn beside_a_kernel_primary_a_second_one_reads_and_its_writes_wait_for_the_demotion() {
    for (diskless, seed) in [(None, 1), (None, 2), (Some(1), 3)] {
        let mut setup = Setup {
            diskless,
            client: diskless.is_some(),
            ..Setup::default()
        };
        setup.net.allow_two_primaries = true;
        setup.options.kernel_rules = true;
        let mut w = clean(seed, 3, setup);
        let before = w.write(0, 0, 4096, 1);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, before));
        primary(&mut w, 1);
        assert!(stands_by(&w, 1));
        let waiting = w.write(1, 16, 4096, 3);
        w.pass(Duration::from_secs(5));
        assert_eq!((role(&w, 0), role(&w, 1)), (Role::Primary, Role::Secondary));
        assert!(!w.done(1, waiting), "{:#?}", w.log);
        // The one that is Primary still writes, and the other one reads that, past its own writes that wait.
        let more = w.write(0, 8, 4096, 2);
        w.pass(Duration::from_secs(1));
        assert!(w.done(0, more), "{:#?}", w.log);
        assert_eq!(read(&mut w, 1, 0), vec![1; 4096]);
        assert_eq!(read(&mut w, 1, 8), vec![2; 4096]);
        let id = w.command(0, Command::Secondary { force: false });
        w.pass(Duration::from_secs(1));
        assert_eq!(w.answers.get(&id), Some(&Ok(Answer::Done)), "{:#?}", w.log);
        assert_eq!((role(&w, 0), role(&w, 1)), (Role::Secondary, Role::Primary));
        assert!(w.done(1, waiting), "{:#?}", w.log);
        assert_eq!(read(&mut w, 1, 16), vec![3; 4096]);
        w.check_same_data();
        w.check_idle();
    }
}

#[test]
fn who_loses_the_kernel_that_it_stands_by_for_reads_no_more() {
    let mut setup = Setup::default();
    setup.net.allow_two_primaries = true;
    setup.options.kernel_rules = true;
    let mut w = clean(4, 3, setup);
    primary(&mut w, 1);
    w.crash(0);
    w.pass(Duration::from_secs(1));
    let id = w.request(1, RequestKind::Read, 0, 4096, 0xee);
    w.pass(Duration::from_secs(5));
    assert!(
        !w.done(1, id) && role(&w, 1) == Role::Secondary,
        "{:#?}",
        w.log
    );
}
