//! Tests of the option table.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::*;

fn spec(set: Set, name: &str) -> &'static OptionSpec {
    find(set, name).unwrap()
}

#[test]
fn every_default_is_a_value_of_its_option() {
    for set in Set::ALL {
        for option in all(set) {
            let default = option.default();
            let outside = matches!(option.name, "discard-granularity" | "minor-count");
            if !outside {
                assert_eq!(
                    option.parse(&default.to_string()),
                    Ok(default),
                    "{}",
                    option.name
                );
            }
        }
    }
}

#[test]
fn names_are_unique_in_a_set() {
    for set in Set::ALL {
        let mut names: Vec<_> = all(set).iter().map(|option| option.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "{set:?}");
    }
}

#[test]
fn structures_and_table_list_the_same_options() {
    assert_eq!(NetOptions::default().values().len(), all(Set::Net).len());
    assert_eq!(DiskOptions::default().values().len(), all(Set::Disk).len());
    assert_eq!(
        DeviceOptions::default().values().len(),
        all(Set::Device).len()
    );
    assert_eq!(
        PeerDeviceOptions::default().values().len(),
        all(Set::PeerDevice).len()
    );
    assert_eq!(
        ResourceOptions::default().values().len(),
        all(Set::Resource).len()
    );
}

#[test]
fn fresh_structures_hold_the_defaults_of_the_table() {
    let fresh = [
        NetOptions::default().values(),
        DiskOptions::default().values(),
        DeviceOptions::default().values(),
        PeerDeviceOptions::default().values(),
        ResourceOptions::default().values(),
    ];
    for (option, value) in fresh.iter().flatten() {
        assert!(option.is_default(value), "{}: {value:?}", option.name);
    }
    assert_eq!(NetOptions::default().timeout_tenths_s, 60);
    assert_eq!(NetOptions::default().protocol, Protocol::C);
    assert_eq!(PeerDeviceOptions::default().c_max_rate_kib_s, 102_400);
    assert_eq!(ResourceOptions::default().quorum, Quorum::Off);
    assert_eq!(DeviceOptions::default().discard_granularity_bytes, None);
    assert_eq!(DiskOptions::default().resync_after_minor, ResyncAfter(None));
}

#[test]
fn set_stores_in_the_unit_of_the_field() {
    let mut net = NetOptions::default();
    net.set("congestion-fill", "1M").unwrap();
    net.set("protocol", "a").unwrap();
    net.set("tls", "yes").unwrap();
    assert_eq!(net.congestion_fill_sectors, 2048);
    assert_eq!(net.protocol, Protocol::A);
    assert!(net.tls);
    let mut peer = PeerDeviceOptions::default();
    peer.set("c-max-rate", "100M").unwrap();
    assert_eq!(peer.c_max_rate_kib_s, 102_400);
    peer.set("resync-rate", "1025").unwrap();
    assert_eq!(peer.value("resync-rate").unwrap().show(), "1025k");
    let mut resource = ResourceOptions::default();
    resource.set("quorum", "3").unwrap();
    assert_eq!(resource.quorum, Quorum::Count(3));
    resource.set("quorum", "all").unwrap();
    assert_eq!(resource.value("quorum").unwrap().show(), "all");
    let mut disk = DiskOptions::default();
    disk.set("resync-after", "7").unwrap();
    assert_eq!(disk.resync_after_minor, ResyncAfter(Some(7)));
    disk.set("al-extents", "70000").unwrap();
    assert_eq!(disk.al_extents, 65534);
}

#[test]
fn a_refused_value_changes_nothing() {
    let mut net = NetOptions::default();
    let before = net.clone();
    assert_eq!(
        net.set("timeout", "0").unwrap_err().to_string(),
        "while parsing value ('0') for timeout. Value is too small."
    );
    assert!(matches!(
        net.set("time-out", "1"),
        Err(SetError::UnknownName { .. })
    ));
    assert_eq!(net, before);
}

#[test]
fn numbers_take_suffixes_and_round_up() {
    let rate = spec(Set::PeerDevice, "resync-rate");
    let stored = |text: &str| rate.parse(text).map(|value| value.number().unwrap());
    assert_eq!(stored("100"), Ok(100));
    assert_eq!(stored("100k"), Ok(100));
    assert_eq!(stored("1s"), Ok(1));
    assert_eq!(stored("3s"), Ok(2));
    assert_eq!(stored("1G"), Ok(1_048_576));
    assert_eq!(stored("16q"), Err(ValueError::NotANumber));
    assert_eq!(stored(""), Err(ValueError::NotANumber));
    assert_eq!(stored("k"), Err(ValueError::NotANumber));
    assert_eq!(stored("1kk"), Err(ValueError::NotANumber));
    assert_eq!(stored("99999999999999999999"), Err(ValueError::TooBig));
    assert_eq!(stored("99999999999999999G"), Err(ValueError::TooBig));
    assert_eq!(stored("0"), Err(ValueError::TooSmall));
    assert_eq!(stored("-1"), Err(ValueError::TooSmall));
    assert_eq!(stored("9G"), Err(ValueError::TooBig));
}

#[test]
fn equality_is_by_meaning() {
    let rate = spec(Set::PeerDevice, "c-max-rate");
    assert!(rate.same_value("100M", "102400k"));
    assert!(!rate.same_value("100M", "100"));
    assert!(spec(Set::Net, "protocol").same_value("a", "A"));
    assert!(!spec(Set::Net, "fencing").same_value("dont-care", "resource-only"));
}

#[test]
fn abbreviations_must_be_unambiguous() {
    let resource = || all(Set::Resource).iter();
    assert_eq!(
        find_abbreviated(resource(), "on-no-data").unwrap().name,
        "on-no-data-accessible"
    );
    assert!(find_abbreviated(resource(), "on-no").is_none());
    assert_eq!(
        find_abbreviated(resource(), "quorum").unwrap().name,
        "quorum"
    );
}

#[test]
fn a_misspelt_name_finds_its_neighbour() {
    let names = || all(Set::Net).iter().map(|option| option.name);
    assert_eq!(nearest("verfy-alg", names()), Some("verify-alg"));
    assert_eq!(nearest("max-bufers", names()), Some("max-buffers"));
    assert_eq!(nearest("something-else", names()), None);
    assert_eq!(nearest("", names()), None);
}

#[test]
fn show_prints_scale_letters_and_quotes() {
    let number = spec(Set::PeerDevice, "c-min-rate").parse("4M").unwrap();
    assert_eq!(number.show(), "4096k");
    let text = spec(Set::Net, "shared-secret").parse("a\"b\\c").unwrap();
    assert_eq!(text.show(), "\"a\\\"b\\\\c\"");
    assert_eq!(text.to_string(), "a\"b\\c");
}

#[test]
fn allowed_says_what_would_be_right() {
    assert_eq!(
        spec(Set::Net, "timeout").allowed(),
        "1..600 (1/10 seconds), default 60"
    );
    assert_eq!(spec(Set::Net, "protocol").allowed(), "A | B | C, default C");
    assert_eq!(
        spec(Set::Resource, "quorum").allowed(),
        "off | majority | all or 1..32, default off"
    );
}
