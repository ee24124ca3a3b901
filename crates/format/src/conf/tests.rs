//! Whole configurations: dumps against the real tool's, errors, fuzz smoke.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::model::{Address, Config, SourceFile};
use super::parse::{
    FileError, FileText, Files, NoFiles, ParseOptions, Parsed, Severity, parse, parse_show,
};
use super::resolve::{Node, add_names, check_proxied, inherit, resolve};
use super::{dump, dump_xml};

const ALL: &str = include_str!("../../../../testdata/conf/all.conf");

fn source(name: &str, text: &str) -> (SourceFile, String) {
    let path = format!("/etc/{name}");
    (
        SourceFile {
            shown: name.into(),
            path,
        },
        text.into(),
    )
}

fn parsed(text: &str) -> Parsed {
    parse(
        &[source("drbd.conf", text)],
        &mut NoFiles,
        &ParseOptions::default(),
    )
}

fn errors(text: &str) -> String {
    let found = parsed(text).diagnostics;
    found
        .iter()
        .map(|found| format!("{}\n", found.text))
        .collect()
}

/// Parsed and resolved for a node; panics with the messages when there is an error.
fn on_node(text: &str, name: &str) -> Config {
    let mut parsed = parsed(text);
    assert!(parsed.is_valid(), "{:?}", parsed.diagnostics);
    let node = Node {
        name,
        has_address: &|_: &Address| false,
    };
    let found = resolve(&mut parsed.config, &node);
    let bad: Vec<_> = found
        .iter()
        .filter(|found| found.severity == Severity::Error)
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
    parsed.config
}

fn resolve_errors(text: &str) -> String {
    let mut parsed = parsed(text);
    assert!(parsed.is_valid(), "{:?}", parsed.diagnostics);
    let node = Node {
        name: "a",
        has_address: &|_: &Address| false,
    };
    let mut found = resolve(&mut parsed.config, &node);
    found.extend(inherit(&mut parsed.config));
    found.extend(check_proxied(&parsed.config));
    found
        .iter()
        .map(|found| format!("{}\n", found.text))
        .collect()
}

fn dumped(config: &Config, node: &str) -> String {
    let mut text = dump::head(config);
    for resource in &config.resources {
        text.push_str(&dump::resource(config, resource, node));
    }
    text
}

#[track_caller]
fn assert_same(got: &str, wanted: &str) {
    for (number, (got, wanted)) in got.lines().zip(wanted.lines()).enumerate() {
        assert_eq!(got, wanted, "line {}", number + 1);
    }
    assert_eq!(got.lines().count(), wanted.lines().count());
}

/// Lines without comments, which name places.
fn body(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .map(String::from)
        .collect()
}

#[test]
fn dump_is_that_of_the_original() {
    let config = on_node(ALL, "alpha");
    assert_same(
        &dumped(&config, "alpha"),
        include_str!("../../../../testdata/conf/all.dump"),
    );
}

#[test]
fn expanded_dump_is_that_of_the_original() {
    let mut config = on_node(ALL, "alpha");
    assert_eq!(inherit(&mut config), []);
    assert_same(
        &dumped(&config, "alpha"),
        include_str!("../../../../testdata/conf/all.dump-d"),
    );
}

#[test]
fn xml_is_that_of_the_original() {
    let config = on_node(ALL, "alpha");
    assert_same(
        &dump_xml::config(&config),
        include_str!("../../../../testdata/conf/all.xml"),
    );
}

#[test]
fn expanded_xml_is_that_of_the_original() {
    let mut config = on_node(ALL, "alpha");
    assert_eq!(inherit(&mut config), []);
    assert_same(
        &dump_xml::config(&config),
        include_str!("../../../../testdata/conf/all.xml-d"),
    );
    let mut web = config.resources[0].clone();
    add_names(&mut web);
    let xml = dump_xml::resource(&config, &web);
    assert_same(
        &xml,
        include_str!("../../../../testdata/conf/all-web.xml-d"),
    );
}

#[test]
fn a_dump_reads_back_to_the_same_dump() {
    let first = dumped(&on_node(ALL, "alpha"), "alpha");
    let again = dumped(&on_node(&first, "alpha"), "alpha");
    assert_eq!(body(&first), body(&again));
}

#[test]
fn every_statement_of_the_language_is_read() {
    let text = r#"
        global { minor-count 64; dialog-refresh 0; cmd-timeout-short 7; udev-always-use-vnr; }
        common { protocol B; proxy { memlimit 3M; plugin { lz4; zlib level 9; } } }
        resource "a b" {
            floating 10.0.0.1:5 { node-id 0; volume 3 { device drbd5; disk /x;
                disk { al-extents 77; c-max-rate 5; max-bio-size 4096; } meta-disk /md[3];
                tiebreaker yes; } }
            floating ipv6 [fd00::1%eth0]:5 { node-id 1; options { cpu-mask 1; }
                volume 3 { device minor 5; disk none; flexible-meta-disk /md; } }
            connection {
                path { address 10.0.0.1:5 via outside-address 1.2.3.4:5;
                       address ipv6 [fd00::1%eth0]:5; }
                net { no-tcp-cork; allow-two-primaries; tls yes; }
                volume 3 { disk { c-min-rate 2M; } }
                skip { "}" } }
            startup { become-primary-on both; stacked-timeouts; wait-after-sb; }
            skip anything here { x { y } z }
        }
        skip resource q { broken"#;
    let text = format!("{text} {{ }} }}");
    let config = on_node(&text, "10.0.0.1");
    let dump = dumped(&config, "10.0.0.1");
    let again = dumped(&on_node(&dump, "10.0.0.1"), "10.0.0.1");
    assert_eq!(body(&again), body(&dump));
    let resource = &config.resources[0];
    assert_eq!(resource.me, Some(0));
    let views = resource.my_connections();
    assert_eq!(views.len(), 1);
    assert_eq!(
        views[0].paths[0].connect_to.argument(),
        "ipv6:[fd00::1%eth0]:5"
    );
    assert_eq!(resource.connections[0].net.get("tcp-cork"), Some("no"));
    assert_eq!(resource.hosts[1].names, ["fd00::1%eth0_5"]);
}

#[test]
fn wrong_values_are_all_reported_with_what_is_allowed() {
    let found = errors(
        "resource r { net { timeout 0;\n protocol X; max-buffers 16q; }\n \
         disk { on-io-error foo; }\n \
         options { quorum 33; auto-promote maybe; } }",
    );
    assert_eq!(
        found,
        "drbd.conf:1: Parse error: while parsing value ('0')\n\
         for timeout. Value is too small.\n\
         allowed: 1..600 (1/10 seconds), default 60\n\
         drbd.conf:2: Parse error: while parsing value ('X')\n\
         for protocol. Value is not valid.\n\
         Allowed values are: A | B | C\n\
         drbd.conf:2: Parse error: while parsing value ('16q')\n\
         for max-buffers. Value is not a number.\n\
         allowed: 32..131072, default 2048\n\
         drbd.conf:3: Parse error: while parsing value ('foo')\n\
         for on-io-error. Value is not valid.\n\
         Allowed values are: pass_on | call-local-io-error | detach\n\
         drbd.conf:4: Parse error: while parsing value ('33')\n\
         for quorum. Value is too big.\n\
         allowed: off | majority | all or 1..32, default off\n\
         drbd.conf:4: Parse error: while parsing value ('maybe')\n\
         for auto-promote. Value is not 'yes' or 'no'.\n"
    );
}

#[test]
fn wrong_words_name_the_nearest_right_one() {
    let found = errors("resource r {\n net { verfy-alg sha1; } }");
    assert!(
        found.starts_with("drbd.conf:2: Parse error: 'transport | "),
        "{found}"
    );
    assert!(
        found.ends_with("but got 'verfy-alg'\n\tdid you mean 'verify-alg'?\n"),
        "{found}"
    );
    assert_eq!(
        errors("resourc r { }"),
        "drbd.conf:1: Parse error: 'global | common | resource | skip | include |\n\t\
         require-drbd-module-version-{eq,ne,gt,ge,lt,le}' expected,\n\tbut got 'resourc'\n\t\
         did you mean 'resource'?\n"
    );
    assert_eq!(
        errors("resource r { net { verify-alg sha1 } }"),
        "drbd.conf:1: Parse error: ';' expected,\n\tbut got '}'\n"
    );
    // The original takes such an option for "yes".
    assert_eq!(
        errors("resource r { net { timeout; tcp-cork; } }"),
        "drbd.conf:1: Parse error: 'value of timeout' expected,\n\tbut got ';'\n"
    );
    assert_eq!(
        errors("resource r { on a { node-id 40; } }"),
        "drbd.conf:1: node-id 40 => 40 out of range [0..32].\n"
    );
    assert_eq!(
        errors("resource r { on a { address 10.0.0.1:70000; } }"),
        "drbd.conf:1: port 70000 => 70000 out of range [1..65535].\n"
    );
    assert_eq!(
        errors("resource r { on a { address foo:7; } }"),
        "drbd.conf:1: Parse error: 'ssocks | sdp | ipv4 | ipv6 | <ipv4 address> ' expected,\n\t\
         but got 'foo'\n"
    );
}

#[test]
fn a_file_that_ends_too_early_is_refused() {
    for text in [
        "resource r {",
        "resource r { net {",
        "skip x {",
        "resource r { net { timeout",
    ] {
        let found = errors(text);
        assert!(found.contains("but got 'end of file'"), "{text}: {found}");
    }
}

#[test]
fn double_use_is_reported_with_both_places() {
    assert_eq!(
        errors("resource r { net { }\n net { } }"),
        "drbd.conf:2: conflicting use of net section 'r:net' ...\n\
         drbd.conf:1: net section 'r:net' first used here.\n"
    );
    assert_eq!(
        errors("resource r { }\nresource r { }"),
        "drbd.conf:2: conflicting use of resource section 'r' ...\n\
         drbd.conf:1: resource section 'r' first used here.\n"
    );
    let host = |name: &str, n: u32| {
        format!("on {name} {{ node-id {n}; address 10.0.0.{n}:1; device minor 1; disk /d; }}\n")
    };
    let text = format!(
        "resource r {{ {} {} }}\nresource q {{ {} {} }}",
        host("a", 1),
        host("b", 2),
        host("a", 3),
        host("b", 4)
    );
    let found = resolve_errors(&text);
    assert!(
        found.starts_with(
            "/etc/drbd.conf:4: conflicting use of device-minor 'device-minor:a:1' ...\n\
             /etc/drbd.conf:1: device-minor 'device-minor:a:1' first used here.\n"
        ),
        "{found}"
    );
}

#[test]
fn host_sections_are_checked() {
    let host = |body: &str| format!("resource r {{ on a {{ node-id 0; {body} }} }}");
    assert_eq!(
        resolve_errors(&host(
            "device minor 1; meta-disk internal; address 10.0.0.1:1;"
        )),
        "/etc/drbd.conf:1: in resource r, on a { ... }: 'disk' keyword missing.\n"
    );
    // With neither it is a client, as with the original.
    assert_eq!(
        resolve_errors(&host("device minor 1; address 10.0.0.1:1;")),
        ""
    );
    assert_eq!(
        resolve_errors(&host("disk /d; address 10.0.0.1:1;")),
        "/etc/drbd.conf:1: in resource r, on a { ... }: 'device' keyword missing.\n"
    );
    let found = resolve_errors(&host("device drbd7 minor 8; disk /d; address 10.0.0.1:1;"));
    assert!(
        found.contains("explicit minor number must match with device name"),
        "{found}"
    );
    let found = resolve_errors(&host("device foo minor 8; disk /d; address 10.0.0.1:1;"));
    assert!(
        found.contains("device name must start with /dev/drbd"),
        "{found}"
    );
    let two = "resource r { on a { node-id 0; } on a.x.org { node-id 1; }\n\
               connection { host a; host c; } }";
    let found = resolve_errors(two);
    assert!(
        found.contains("There are multiple host sections for this node."),
        "{found}"
    );
    assert!(
        found.contains("/etc/drbd.conf:2: in resource r a hostname (\"c\") is given"),
        "{found}"
    );
}

#[test]
fn a_proxy_carries_the_tcp_transport_only() {
    let with = |net: &str| {
        let end = |name: &str, n: u8| {
            format!(
                "host {name} address 127.0.0.1:79{n}0 via proxy on {name} \
                 {{ inside 127.0.0.2:79{n}1; outside 10.0.0.{n}:7000; }}\n"
            )
        };
        resolve_errors(&format!(
            "common {{ net {{ {net} }} }} resource r {{ volume 0 {{ device minor 1; disk /d; \
             meta-disk internal; }}\n\
             on a {{ node-id 0; }} on b {{ node-id 1; }}\nconnection {{ {}{} }} }}",
            end("a", 1),
            end("b", 2)
        ))
    };
    for fine in ["", "transport tcp;", "transport lb-tcp;"] {
        assert_eq!(with(fine), "", "{fine}");
    }
    assert_eq!(
        with("transport lb-tcp; load-balance-paths yes;"),
        "/etc/drbd.conf:3: in resource r: a connection through a proxy needs transport tcp, \
         which 'load-balance-paths yes' is not.\n"
    );
    assert!(with("transport rdma;").contains("'transport rdma' is not"));
}

#[test]
fn ambiguous_inheritance_is_an_error() {
    let text = "common { disk { c-max-rate 100M; } } resource r { device minor 1; disk /d;\n\
        on a { node-id 0; address 10.0.0.1:1; } on b { node-id 1; address 10.0.0.2:1; }\n\
        connection { host a; host b; disk { c-max-rate 50M; } } }";
    let found = resolve_errors(text);
    assert!(
        found.starts_with(
            "/etc/drbd.conf:1: in resource r, ambiguous inheritance for option \"c-max-rate\".\n\
             should be \"50M\" and \"100M\" at the same time\n."
        ),
        "{found}"
    );
}

#[test]
fn a_volume_is_not_told_two_things_by_what_it_inherits_from() {
    let text = |general: &str, volume: &str, host: &str| {
        format!(
            "common {{ disk {{ {general} }} }} resource r {{\n\
             volume 0 {{ device minor 1; disk /d; disk {{ {volume} }} }}\n\
             on a {{ node-id 0; address 10.0.0.1:1; volume 0 {{ disk {{ {host} }} }} }}\n\
             on b {{ node-id 1; address 10.0.0.2:1; volume 0 {{ disk {{ {host} }} }} }} }}"
        )
    };
    let found = resolve_errors(&text("on-io-error detach;", "on-io-error pass_on;", ""));
    assert_eq!(
        found.trim_end(),
        "/etc/drbd.conf:1: in resource r, ambiguous inheritance for option \"on-io-error\".\n\
         should be \"detach\" and \"pass_on\" at the same time\n."
    );
    let same = resolve_errors(&text("al-extents 977;", "al-extents 977;", ""));
    assert_eq!(same, "");
    // What is written nearest holds.
    let nearest = resolve_errors(&text("", "al-extents 977;", "al-extents 1237;"));
    assert_eq!(nearest, "");
}

#[test]
fn node_ids_are_invented_as_the_original_does() {
    let text = "resource r { device minor 1; disk /d; on a { address 10.1.0.1:7; } \
                on b { address 10.1.0.2:7; } }";
    let config = on_node(text, "a");
    assert_eq!(config.resources[0].hosts[0].node_id, Some(1));
    assert_eq!(config.resources[0].hosts[1].node_id, Some(0));
}

/// Files in memory; `*` alone stands for all of them.
struct Memory(&'static [(&'static str, &'static str)]);

impl Files for Memory {
    fn expand(&mut self, _: &str, pattern: &str) -> Vec<String> {
        match pattern {
            "*" => self.0.iter().map(|(name, _)| name.to_string()).collect(),
            name => Vec::from([name.to_string()]),
        }
    }
    fn read(&mut self, path: &str) -> Result<FileText, FileError> {
        let found = self.0.iter().find(|(name, _)| *name == path);
        let (name, text) = found.ok_or(FileError::Missing)?;
        Ok(FileText {
            path: format!("/etc/{name}"),
            text: text.to_string(),
        })
    }
}

#[test]
fn includes_read_each_file_once() {
    let mut files = Memory(&[
        ("a", "resource a { } include \"*\";"),
        ("b", "resource b { } include a; include b;"),
    ]);
    let main = source("drbd.conf", "include \"*\"; resource c { }");
    let parsed = parse(&[main], &mut files, &ParseOptions::default());
    assert!(parsed.is_valid(), "{:?}", parsed.diagnostics);
    let names: Vec<_> = parsed
        .config
        .resources
        .iter()
        .map(|found| found.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    let excluded = ParseOptions {
        excluded: Vec::from(["/etc/b".into()]),
        ..Default::default()
    };
    let main = source("drbd.conf", "include \"*\"; include nothing;");
    let parsed = parse(&[main], &mut files, &excluded);
    assert_eq!(parsed.config.resources.len(), 1);
    assert_eq!(
        parsed.diagnostics[0].text,
        "drbd.conf:1: Failed to open include file 'nothing'.\n\tno such file"
    );
}

/// A file system in which every name is another file that includes a further one.
struct Endless(u32);

impl Files for Endless {
    fn expand(&mut self, _: &str, _: &str) -> Vec<String> {
        self.0 += 1;
        Vec::from([format!("f{}", self.0)])
    }
    fn read(&mut self, path: &str) -> Result<FileText, FileError> {
        Ok(FileText {
            path: path.into(),
            text: "include next;".into(),
        })
    }
}

#[test]
fn endless_includes_end() {
    let main = source("drbd.conf", "include next;");
    let parsed = parse(&[main], &mut Endless(0), &ParseOptions::default());
    assert!(!parsed.is_valid());
    assert!(
        parsed.diagnostics[0]
            .text
            .contains("too many include files")
    );
}

#[test]
fn module_version_is_compared() {
    let text = "require-drbd-module-version-ge 9.1.0;";
    let with = |version| {
        let options = ParseOptions {
            module_version: version,
            ..Default::default()
        };
        let found = parse(&[source("c", text)], &mut NoFiles, &options).diagnostics;
        found.first().map(|found| found.text.clone())
    };
    assert_eq!(with(Some([9, 2, 0])), None);
    assert_eq!(
        with(Some([9, 0, 9])).unwrap(),
        "c:1: Validation error: drbd-module-version 9.0.9 >= 9.1.0 not true"
    );
    assert!(
        with(None)
            .unwrap()
            .contains("Could not get drbd-module-version")
    );
}

#[test]
fn show_output_is_read() {
    let text = include_str!("../../../../testdata/conf/web.show");
    let parsed = parse_show(text);
    assert!(parsed.is_valid(), "{:?}", parsed.diagnostics);
    let web = &parsed.config.resources[0];
    assert_eq!(web.hosts[0].node_id, Some(0));
    assert_eq!(web.hosts[0].volumes.len(), 2);
    assert_eq!(web.connections[0].peer_node_id, Some(1));
    assert_eq!(web.connections[0].state.as_deref(), Some("Connected"));
    assert_eq!(web.connections[0].net.get("_name"), Some("bravo"));
    assert!(
        web.connections[0]
            .net
            .0
            .iter()
            .any(|setting| setting.unknown)
    );
    assert_eq!(
        web.connections[0].volumes[0].settings.get("c-min-rate"),
        Some("4096k")
    );
}

#[test]
fn mutated_files_never_panic() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below as u64) as usize
    };
    let words = [
        "{",
        "}",
        ";",
        "\"",
        "[",
        "disk",
        "on",
        "host",
        "volume",
        "4294967296",
        "é",
        "\\",
    ];
    let show = include_str!("../../../../testdata/conf/web.show");
    for round in 0..1500 {
        let mut text = String::from(if round % 3 == 0 { show } else { ALL });
        for _ in 0..=random(4) {
            let at = (0..=random(text.len()))
                .rev()
                .find(|at| text.is_char_boundary(*at))
                .unwrap();
            match random(3) {
                0 => text.insert_str(at, words[random(words.len())]),
                1 => text.truncate(at),
                _ => {
                    let end = (at + random(40)).min(text.len());
                    let end = (end..=text.len())
                        .find(|end| text.is_char_boundary(*end))
                        .unwrap();
                    text.replace_range(at..end, "");
                }
            }
            if text.is_empty() {
                text.push(' ');
            }
        }
        parse_show(&text);
        let mut parsed = parsed(&text);
        if parsed.is_valid() {
            let node = Node {
                name: "alpha",
                has_address: &|_: &Address| true,
            };
            resolve(&mut parsed.config, &node);
            inherit(&mut parsed.config);
            for resource in &mut parsed.config.resources {
                add_names(resource);
                resource.my_connections();
            }
            dumped(&parsed.config, "alpha");
            dump_xml::config(&parsed.config);
        }
    }
}

#[test]
fn words_numbers_and_addresses_are_names_only_in_quotes() {
    for name in [
        "disk",
        "on",
        "yes",
        "123",
        "12M",
        "10.0.0.1",
        "9.1.7",
        "_this_host",
    ] {
        let found = errors(&format!("resource {name} {{ }}"));
        let wanted = format!("'resource name' expected,\n\tbut got '{name}'\n\tput it in quotes");
        assert!(found.contains(&wanted), "{found}");
        assert_eq!(errors(&format!("resource \"{name}\" {{ }}")), "");
        let host = format!("resource r {{ on {name} {{ node-id 0; }} }}");
        assert!(errors(&host).contains("'host name' expected"), "{name}");
    }
    for name in [
        "quorum",
        "protocol",
        "1k",
        "123456789",
        "1.2.3.4.5",
        "a.b.c",
        "none",
    ] {
        assert_eq!(errors(&format!("resource {name} {{ }}")), "");
    }
}

#[test]
fn an_option_that_is_inherited_twice_must_have_one_value() {
    let conflicts = |general: &str, own: &str| {
        let text = format!(
            "common {{ {general} }}\nresource r {{ {own}\n\
             on a {{ node-id 0; address 10.0.0.1:1; device minor 1; disk /d; }}\n\
             on b {{ node-id 1; address 10.0.0.2:1; device minor 1; disk /d; }} }}"
        );
        let mut config = on_node(&text, "a");
        let found = inherit(&mut config);
        found.iter().map(|d| d.text.clone()).collect::<String>()
    };
    for (general, own, name) in [
        ("", "net { timeout 50; timeout 60; }", "timeout"),
        ("protocol A; net { protocol B; }", "", "protocol"),
        ("options { quorum 1; quorum 2; }", "", "quorum"),
        ("handlers { fence-peer a; fence-peer b; }", "", "fence-peer"),
        (
            "startup { wfc-timeout 5; wfc-timeout 6; }",
            "",
            "wfc-timeout",
        ),
        ("disk { c-max-rate 1M; c-max-rate 2M; }", "", "c-max-rate"),
    ] {
        let found = conflicts(general, own);
        let wanted = format!("ambiguous inheritance for option \"{name}\"");
        assert!(found.contains(&wanted), "{general} {own}: {found}");
    }
    for (general, own) in [
        ("net { timeout 50; }", "net { timeout 60; }"),
        ("", "net { timeout 50; timeout 50; }"),
        ("", "options { quorum 1; quorum 2; }"),
    ] {
        assert_eq!(conflicts(general, own), "", "{general} {own}");
    }
}

#[test]
fn options_of_a_volume_that_does_not_exist_are_an_error() {
    let text = "resource r {\n\
        on a { node-id 0; address 10.0.0.1:1; volume 0 { device minor 1; disk /d; } }\n\
        on b { node-id 1; address 10.0.0.2:1; volume 0 { device minor 1; disk /d; } }\n\
        connection { host a; host b; volume 9 { disk { c-min-rate 1M; } } } }";
    let found = resolve_errors(text);
    for host in ["a", "b"] {
        let wanted = format!(
            "/etc/drbd.conf:4: Resource r: There is a reference to a volume 9 that is not known \
             in this resource on host {host}\n"
        );
        assert!(found.contains(&wanted), "{found}");
    }
    assert_eq!(resolve_errors(&text.replace("volume 9", "volume 0")), "");
}
