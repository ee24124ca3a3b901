//! Planned worlds in which a disk was given up or taken away, and what came of it.

mod common;

use common::planned_holds as holds;
use lockstep_sim::extras::Extra;

/// A Primary's superblock with a new generation hung, its disk was given up, and the Primary went on with its
/// peer's. The write happened after all, and the disk was refused for ever: nobody knew its generation.
#[test]
fn a_generation_that_was_given_up_with_its_disk_is_none() {
    const KINDS: &str = "hangdisk,hangdisk,reset";
    let kinds = || (Some(KINDS), vec![Extra::Every, Extra::Impatient]);
    holds(Some(2), 118, kinds(), "1-2", "121,220");
    holds(Some(2), 118, kinds(), "0-99", "0-999");
}

/// A write was on a disk that went and on the peer's. When it was settled the disk was back, and the marks of
/// its blocks went there, but not at the peer, in the middle of a resync.
#[test]
fn a_write_on_a_disk_that_went_clears_no_marks() {
    let kinds = || (Some("suspend,detach"), vec![Extra::Every, Extra::ShortLog]);
    holds(Some(2), 778, kinds(), "5,11,14", "180,184-187,191");
    holds(Some(2), 778, kinds(), "0-99", "0-999");
}

/// A Primary that was frozen for fencing waited for a generation that it could not make, and took nobody's
/// handshake meanwhile, although a connection ends the freeze.
#[test]
fn a_primary_frozen_for_fencing_lets_its_peers_connect() {
    let handlers = || (None, vec![Extra::Handlers]);
    const REQUESTS: &str = "157-158,165,171,174,231-232,266,351";
    holds(Some(3), 31, handlers(), "5,8-9", REQUESTS);
    holds(Some(3), 31, handlers(), "0-99", "0-999");
}

/// A Primary without a disk announced a generation, and the only disk failed to write it. Nothing was written
/// under it, but the disk was Outdated for ever when it came back, because its node had heard of it.
#[test]
fn an_announced_generation_that_failed_outdates_no_disk() {
    const KINDS: &str = "metaerror,hangdisk,resize,powercut,crash,diskless,readerror,writeerror";
    holds(None, 1053, (Some(KINDS), Vec::new()), "0-1", "75");
}

/// A disk that goes on after a read error got one just when the peer's copy was thrown away by command: then
/// neither is whole, which only the operator can end. The simulator spares such a disk.
#[test]
fn the_last_copy_is_the_one_whose_peer_is_invalidated() {
    holds(Some(2), 66_100_071, (None, Vec::new()), "4-5", "1");
    holds(Some(2), 66_100_071, (None, Vec::new()), "0-99", "0-999");
}

/// A flush failed, and the Primary went on without its disk. Its peer had lost its power before, and what was
/// in its cache; it came back with the generation that applications saw. They knew by the flush that what they
/// had not flushed might be gone.
#[test]
fn a_flush_that_failed_tells_that_writes_may_be_lost() {
    holds(
        Some(2),
        91_770_159,
        (None, Vec::new()),
        "0-1,3",
        "12,14,18,22,47,68",
    );
    holds(Some(2), 91_770_159, (None, Vec::new()), "0-99", "0-999");
}

/// The same with protocol A, without a power cut: the peer never got the write. Where disks report errors,
/// the protocol is C, also if the command line asks for the errors.
#[test]
fn disks_with_errors_are_replicated_by_protocol_c() {
    let errors = "readerror,writeerror,flusherror,metaerror,crash,reset";
    holds(
        Some(2),
        90_010_184,
        (Some(errors), Vec::new()),
        "0-99",
        "0-999",
    );
    let metadata = (Some("metaerror,powercut"), Vec::new());
    holds(Some(2), 180, metadata, "0-99", "0-999");
}

/// Protocol B: three disks were taken away one after the other, the last one by force, before it had written
/// what the Primary, by then without a disk, had been told was received. The simulator's operator spares it.
#[test]
fn the_last_disk_under_a_primary_without_one_is_not_taken_by_force() {
    let kinds = || {
        (
            Some("detach,detach,detach,stall,slowdisk,reset"),
            Vec::new(),
        )
    };
    holds(None, 90_000_115, kinds(), "4-5,8,15", "28,106-107,119,148");
    holds(None, 90_000_115, kinds(), "0-99", "0-999");
}

/// Protocol A: a Primary lost a peer before that had an acknowledged write, and then its disk before the next
/// write, which would have made a generation without the peer: that came back as equal.
#[test]
fn a_peer_without_an_acknowledged_write_is_excluded_at_once() {
    holds(Some(3), 15_500_266, (None, Vec::new()), "0-99", "0-9999");
}

/// A read had hung for longer than `disk-timeout`, and the process stood still between its two looks at it. The
/// disk had answered long before the second one, and was given up all the same.
#[test]
fn a_disk_is_looked_at_again_after_the_process_stood_still() {
    let kinds = || (Some("hangdisk,freeze,freeze,reset"), vec![Extra::Every]);
    holds(Some(2), 71, kinds(), "0,6", "0");
    holds(Some(2), 71, kinds(), "0-99", "0-999");
}

/// A node was moving its metadata to the end of a disk that had grown when a connected peer told it another
/// size: it did not follow, or gave up the connection until the operator asked for it.
#[test]
fn a_node_that_moves_its_metadata_follows_its_peers_after_that() {
    const KINDS: &str = "resize,crash,partition,powercut";
    let kinds = || (Some(KINDS), vec![Extra::Internal]);
    holds(Some(3), 28, kinds(), "0-1,3", "0");
    const REQUESTS: &str = "49,51,55,64,70";
    holds(Some(3), 89, kinds(), "0-3,6,8-10,13", REQUESTS);
}
