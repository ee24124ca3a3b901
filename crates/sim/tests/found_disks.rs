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
