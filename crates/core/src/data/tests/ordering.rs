//! Resyncs that wait for others (semantics.md, 19.9).

use super::*;
use crate::command::ErrorCode;
use crate::resync_order::OrderVerdict;

fn order(w: &mut World, index: usize, dependency: bool, max_parallel: bool) {
    let verdict = OrderVerdict {
        dependency,
        max_parallel,
    };
    let volume = VOLUME;
    w.command(index, Command::ResyncOrder { volume, verdict });
    w.run();
}

fn reasons(w: &World, index: usize) -> Vec<&'static str> {
    let snapshot = w.nodes[index].resource.snapshot();
    snapshot.connections[0].peer_devices[0]
        .resync_suspended
        .clone()
}

#[test]
fn a_resync_that_waits_for_another_is_paused_on_both_sides_and_goes_on() {
    // The one who waits: the target, the source, or both.
    for (who, dependency) in [
        (vec![1], true),
        (vec![0], true),
        (vec![0, 1], true),
        (vec![1], false),
    ] {
        let mut w = World::synced(4, 2);
        w.cut = true;
        w.cut_links();
        w.pass(Duration::from_secs(12));
        for n in 0..200 {
            w.write(0, n * 16, 8192, n as u8);
        }
        w.pass(Duration::from_secs(1));
        for index in &who {
            order(&mut w, *index, dependency, !dependency);
        }
        w.cut = false;
        w.pass(Duration::from_secs(20));
        assert_eq!(w.repl(0, 1), ReplState::PausedSyncS, "{:#?}", w.log);
        assert_eq!(w.repl(1, 0), ReplState::PausedSyncT);
        let reason = if dependency {
            "dependency"
        } else {
            "max-parallel"
        };
        assert!(
            reasons(&w, who[0]).contains(&reason),
            "{:?}",
            reasons(&w, who[0])
        );
        let other = 1 - who[0];
        assert!(
            reasons(&w, other).contains(&"peer"),
            "{:?}",
            reasons(&w, other)
        );
        let left = w.bits(0, 1);
        assert!(left > 300, "nothing was resynced: {left}");
        if dependency {
            let id = w.command(
                who[0],
                Command::ResumeSync {
                    peer: node_id(1 - who[0]),
                    volume: VOLUME,
                },
            );
            let refused = w.answers[&id].as_ref().unwrap_err();
            assert_eq!(refused.code, ErrorCode::ERR_PIC_AFTER_DEP);
        }
        for index in &who {
            order(&mut w, *index, false, false);
        }
        w.pass_until("the resync ends", 60, World::in_sync);
        w.pass(Duration::from_secs(1));
        w.check_same_data();
        assert_eq!(reasons(&w, 0), Vec::<&str>::new());
    }
}
