//! Who is the source when a Primary has crashed (semantics.md, 13.3).

use super::*;

#[test]
fn a_crashed_primary_is_source_with_protocol_a_and_target_of_a_survivor_with_c() {
    let crashed = Case::new(0x10, 0x10).with(|c| {
        flag(&mut c.a, UuidFlags::CRASHED_PRIMARY);
        flag(&mut c.b, UuidFlags::RECONNECT);
    });
    crashed.expect(Strategy::TargetIfBothFailed, Rule::LostQuorum);
    for protocol in [Protocol::A, Protocol::B] {
        let case = crashed.clone().with(|c| c.net.protocol = protocol);
        case.expect(Strategy::SourceUseBitmap, Rule::CrashedPrimary);
        let old = case.with(|c| c.version = 120);
        assert_eq!(old.decide().strategy, Strategy::TargetIfBothFailed);
    }
}

/// It was demoted, or not, and lost its cache; who has been here all the time has all that was acknowledged.
#[test]
fn between_lockstep_nodes_b_is_as_c_for_who_has_been_here_all_the_time() {
    let crashed = Case::new(0x10, 0x10).with(|c| {
        c.features = Features::LOCKSTEP;
        c.net.protocol = Protocol::B;
        flag(&mut c.a, UuidFlags::CRASHED_PRIMARY);
        c.a.uuids.dirty_bits = 4;
        flag(&mut c.b, UuidFlags::RECONNECT);
    });
    crashed.expect(Strategy::TargetIfBothFailed, Rule::LostQuorum);
    let source = (Strategy::SourceUseBitmap, Rule::CrashedPrimary);
    let a = crashed.clone().with(|c| c.net.protocol = Protocol::A);
    a.expect(source.0, source.1);
    // Both came back, or the crashed one's peer did: nobody is known to have everything.
    let both = crashed
        .clone()
        .with(|c| c.b.uuids.flags = UuidFlags::empty());
    both.expect(source.0, source.1);
    let stayed = crashed.with(|c| {
        flag(&mut c.a, UuidFlags::RECONNECT);
        c.a.uuids.dirty_bits = 0;
    });
    stayed.expect(Strategy::NoSync, Rule::Reconnected);
}

#[test]
fn after_a_crash_of_everything_the_crashed_primary_is_source() {
    let one = Case::new(0x10, 0x10).with(|c| flag(&mut c.a, UuidFlags::CRASHED_PRIMARY));
    one.expect(Strategy::SourceIfBothFailed, Rule::BothOff);
    let both = one.with(|c| flag(&mut c.b, UuidFlags::CRASHED_PRIMARY));
    both.expect(Strategy::TargetIfBothFailed, Rule::BothOff);
    both.with(|c| c.a_resolves = false)
        .expect(Strategy::SourceIfBothFailed, Rule::BothOff);
}

#[test]
fn a_crashed_primary_that_is_not_whole_is_no_source() {
    let crashed = Case::new(0x10, 0x10).with(|c| {
        flag(&mut c.a, UuidFlags::CRASHED_PRIMARY);
        c.a.disk = DiskState::Inconsistent;
        c.net.protocol = Protocol::A;
    });
    // A kernel decides by the flag alone.
    crashed.expect(Strategy::SourceUseBitmap, Rule::CrashedPrimary);
    let ours = crashed.with(|c| c.features = Features::LOCKSTEP);
    ours.expect(Strategy::TargetUseBitmap, Rule::CrashedPrimary);
}
