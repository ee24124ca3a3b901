//! `data-integrity-alg`: payload that arrives changed is not used (wire.md, 6.6).

use super::*;

fn setup(alg: DigestAlg) -> Setup {
    let mut setup = Setup::default();
    setup.net.data_integrity_alg = Some(alg.name().into());
    setup
}

fn complaints(w: &World) -> usize {
    let complains = |text: &&String| text.contains("does not have its");
    w.log.iter().filter(complains).count()
}

#[test]
fn every_algorithm_covers_writes_reads_and_resync_in_both_dialects() {
    for (seed, alg) in DigestAlg::ALL.into_iter().enumerate() {
        for protocol_max in [101, 124] {
            let mut setup = setup(alg);
            setup.options.protocol_max = protocol_max;
            let mut w = clean(40 + seed as u64, 2, setup);
            w.write(0, 0, 65_536, 3);
            w.request(0, RequestKind::Discard, 0, 8192, 0);
            w.request(0, RequestKind::Zeroes { unmap: false }, 16, 4096, 0);
            w.pass(Duration::from_secs(1));
            w.cut_links();
            w.write(0, 800, 4096, 9);
            w.pass_until("the resync", 60, World::in_sync);
            w.pass(Duration::from_secs(2));
            w.check_idle();
            w.check_same_data();
            // Kernels disagree about a digest in it.
            assert_eq!(w.packets.get("zeroes"), None);
            assert_eq!(complaints(&w), 0);
        }
    }
}

#[test]
fn a_changed_write_is_not_written_and_comes_again() {
    for protocol_max in [101, 124] {
        let mut setup = setup(DigestAlg::Crc32c);
        setup.options.protocol_max = protocol_max;
        let mut w = clean(7, 2, setup);
        w.spoil = Some("data");
        let id = w.write(0, 80, 4096, 5);
        w.pass_until("the write and the resync", 60, |w| {
            w.done(0, id) && complaints(w) == 1 && w.in_sync()
        });
        assert_eq!(w.nodes[1].data.block(10), &[5; 4096]);
        w.check_idle();
        w.check_same_data();
    }
}

#[test]
fn a_changed_resync_block_is_not_written() {
    let mut w = clean(8, 2, setup(DigestAlg::Sha1));
    w.cut_links();
    w.spoil = Some("rs data reply");
    w.write(0, 80, 4096, 6);
    w.pass_until("the resync", 60, |w| complaints(w) == 1 && w.in_sync());
    assert_eq!(w.nodes[1].data.block(10), &[6; 4096]);
    w.check_idle();
}

#[test]
fn a_changed_answer_to_a_read_is_asked_of_another_node() {
    let mut setup = setup(DigestAlg::Sha256);
    setup.diskless = Some(0);
    let mut w = clean(9, 3, setup);
    w.write(0, 80, 4096, 7);
    w.pass(Duration::from_secs(1));
    w.spoil = Some("data reply");
    let id = w.request(0, RequestKind::Read, 80, 4096, 0);
    w.pass_until("the read", 60, |w| w.done(0, id));
    assert_eq!(complaints(&w), 1);
    let result = w.nodes[0].completed.get(&id);
    assert_eq!(result, Some(&Ok(())));
}

#[test]
fn an_unknown_algorithm_is_refused() {
    let mut w = clean(10, 2, Setup::default());
    let net = NetOptions {
        data_integrity_alg: Some("rot13".into()),
        ..NetOptions::default()
    };
    let peer = node_id(1);
    w.command(0, Command::NetOptions { peer, net });
    assert!(w.log.last().unwrap().contains("data-integrity-alg rot13"));
}
