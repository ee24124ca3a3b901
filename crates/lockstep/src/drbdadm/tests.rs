//! Command lines against the real tool's outputs, and real runs with scripts as helpers.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::*;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/conf");

fn data(name: &str) -> String {
    format!("{DATA}/{name}")
}

fn read(name: &str) -> String {
    fs::read_to_string(data(name)).unwrap()
}

fn system(node: &str) -> System {
    System {
        program: "drbdadm".into(),
        host_name: node.into(),
        pretended_name: None,
        directory: None,
        has_address: Box::new(|_| false),
        is_interactive: false,
        module_version: Some([9, 3, 3]),
        fake_show: None,
        registry: PathBuf::from("/nonexistent/registry"),
    }
}

/// Exit code, stdout, stderr of a command line.
fn run_on(system: &System, words: &[&str]) -> (u8, String, String) {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = run_with(system, &words, &mut out, &mut err);
    (
        code,
        String::from_utf8(out).unwrap(),
        String::from_utf8(err).unwrap(),
    )
}

/// The same on node alpha with one of the configurations of the test data.
fn run_alpha(config: &str, words: &[&str]) -> (u8, String, String) {
    let config = data(config);
    run_on(&system("alpha"), &[&["-c", &config], words].concat())
}

/// Without the call that drbd-utils 9.22, which made the test data, did not know yet.
fn without_repair(text: &str) -> String {
    text.split_inclusive('\n')
        .filter(|line| !line.ends_with(" repair-md\n"))
        .collect()
}

#[track_caller]
fn assert_lines(got: &str, wanted: &str) {
    let (got, wanted): (Vec<_>, Vec<_>) = (got.lines().collect(), wanted.lines().collect());
    assert_eq!(got, wanted);
}

#[test]
fn up_makes_the_calls_of_the_original() {
    for node in ["alpha", "bravo", "charlie"] {
        let found = run_on(&system(node), &["-c", &data("all.conf"), "-d", "up", "all"]);
        assert_eq!(found.0, 0, "{}", found.2);
        assert_lines(&without_repair(&found.1), &read(&format!("all.up-{node}")));
    }
}

#[test]
fn up_of_one_connection_leaves_the_others_alone() {
    let (code, all, _) = run_alpha("example.conf", &["-d", "up", "web"]);
    assert_eq!(code, 0);
    let (code, one, _) = run_alpha("example.conf", &["-d", "up", "web:bravo"]);
    assert_eq!(code, 0);
    let of_charlie = |line: &&str| line.contains(" web 2 ") || line.ends_with(" web 2");
    let wanted: Vec<&str> = all.lines().filter(|line| !of_charlie(line)).collect();
    assert!(wanted.len() < all.lines().count());
    assert_lines(&one, &wanted.join("\n"));
}

#[test]
fn up_is_the_example_of_the_specification() {
    let (code, out, err) = run_alpha("example.conf", &["-d", "up", "web"]);
    assert_eq!(code, 0, "{err}");
    assert_lines(&out, &read("example.up-alpha"));
}

#[test]
fn command_lines_give_what_the_original_gives() {
    let mut count = 0;
    for name in [
        "all-alpha",
        "managed-alpha",
        "managed-charlie",
        "mesh-10.7.0.1",
        "mesh-alpha",
        "mesh-bravo",
        "mesh-delta",
        "v8-alpha",
        "v8-bravo",
    ] {
        let (config, node) = name.split_once('-').unwrap();
        let mut system = system(node);
        system.fake_show = Some("/dev/null".into());
        let config = data(&format!("{config}.conf"));
        for part in read(&format!("{name}.commands")).split("$ ").skip(1) {
            let (line, rest) = part.split_once('\n').unwrap();
            let (wanted, code) = rest.rsplit_once("= ").unwrap();
            let words: Vec<&str> = ["-c", &config].into_iter().chain(line.split(' ')).collect();
            let found = run_on(&system, &words);
            assert_eq!(without_repair(&found.1), wanted, "{name}: {line}");
            assert_eq!(
                found.0.to_string(),
                code.trim(),
                "{name}: {line}: {}",
                found.2
            );
            count += 1;
        }
    }
    assert!(count > 130, "{count}");
}

#[test]
fn adjust_is_the_example_of_the_specification_with_deletions_first() {
    let mut system = system("alpha");
    system.fake_show = Some(data("example.show").into());
    let config = data("example.conf");
    let (code, out, err) = run_on(&system, &["-c", &config, "-d", "adjust", "web"]);
    assert_eq!(code, 0, "{err}");
    assert_lines(&out, &read("example.adjust-alpha"));
    let (code, out, _) = run_on(&system, &["-c", &config, "sh-list-adjustable", "all"]);
    assert_eq!((code, out.as_str()), (0, "web\n"));
    let (_, out, _) = run_on(
        &system,
        &[
            "-c",
            &config,
            "-d",
            "--skip-net",
            "--skip-disk",
            "adjust",
            "web",
        ],
    );
    assert_eq!(out, "");
}

/// A running state that is what the configuration says.
const SAME: &str = r#"
resource "web" {
    options { quorum majority; on-no-quorum io-error; }
    _this_host {
        node-id 0;
        volume 0 { device minor 10; disk "/dev/vg0/web0"; meta-disk internal;
            disk { al-extents 6007; _unknown discard-granularity; } }
        volume 1 { device minor 11; disk "/dev/vg0/web1"; meta-disk "/dev/vg0/web1md";
            disk { al-extents 6007; } }
    }
    connection {
        _peer_node_id 1;
        path { _this_host ipv4 10.1.0.1:7790; _remote_host ipv4 10.1.0.2:7790; }
        _cstate Connected;
        net { protocol A; cram-hmac-alg "sha256"; shared-secret "s3 cret"; on-congestion pull-ahead;
            congestion-fill 2048s; verify-alg "crc32c"; max-buffers 8000; _name "bravo"; }
        volume 0 { disk { c-max-rate 102400k; c-min-rate 4096k; } }
        volume 1 { disk { c-max-rate 102400k; } }
    }
    connection {
        _peer_node_id 2;
        path { _this_host ipv4 10.1.0.1:7790; _remote_host ipv4 10.1.0.3:7790; }
        path { _this_host ipv6 [fd00:0::1]:7790; _remote_host ipv6 [fd00::3]:7790; }
        _cstate Connecting;
        net { cram-hmac-alg "sha256"; shared-secret "s3 cret"; verify-alg "crc32c";
            max-buffers 8000; _name "charlie"; }
        volume 0 { disk { bitmap no; } }
        volume 1 { disk { bitmap no; } }
    }
}"#;

fn adjusted(show: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("show");
    fs::write(&file, show).unwrap();
    let mut system = system("alpha");
    system.fake_show = Some(file);
    let (code, out, err) = run_on(
        &system,
        &["-c", &data("example.conf"), "-d", "adjust", "web"],
    );
    assert_eq!(code, 0, "{err}");
    out.lines().map(str::to_owned).collect()
}

#[test]
fn adjust_leaves_alone_what_is_as_configured() {
    assert_eq!(adjusted(SAME), [""; 0]);
}

#[test]
fn adjust_makes_only_the_differing_calls() {
    let changed = |from: &str, to: &str| {
        assert!(SAME.contains(from), "{from}");
        adjusted(&SAME.replacen(from, to, 1))
    };
    assert_eq!(
        changed("quorum majority; ", ""),
        [
            "drbdsetup resource-options web --set-defaults --quorum=majority --auto-promote=yes \
          --on-no-quorum=io-error"
        ]
    );
    assert_eq!(
        changed("al-extents 6007; _unknown", "al-extents 6008; _unknown"),
        ["drbdsetup disk-options 10 --set-defaults --al-extents=6007"]
    );
    assert_eq!(
        changed("c-min-rate 4096k; ", ""),
        ["drbdsetup peer-device-options web 1 0 --set-defaults --c-max-rate=100M --c-min-rate=4M"]
    );
    // Standing alone: only a connect, whose wait would be the last call.
    assert_eq!(
        changed("_cstate Connected", "_cstate StandAlone"),
        ["drbdsetup connect web 1"]
    );
    assert_eq!(
        changed("\"/dev/vg0/web0\"", "\"/dev/vg0/old\""),
        [
            "drbdsetup detach --diskless 10",
            "drbdmeta 10 v09 /dev/vg0/web0 internal repair-md",
            "drbdmeta 10 v09 /dev/vg0/web0 internal apply-al",
            "drbdsetup attach 10 /dev/vg0/web0 /dev/vg0/web0 internal --al-extents=6007",
        ]
    );
    // A volume with another number has the minor: it goes first.
    let calls = changed(
        "volume 1 { device minor 11; disk",
        "volume 7 { device minor 11; disk",
    );
    assert_eq!(
        calls[..3],
        [
            "drbdsetup detach --diskless 11",
            "drbdsetup del-minor 11",
            "drbdsetup new-minor web 11 1",
        ]
    );
    // A surplus path goes without a disconnect when another one stays.
    assert_eq!(
        changed(
            "path { _this_host ipv6",
            "path { _this_host ipv4 10.9.0.1:1; _remote_host ipv4 \
            10.9.0.2:1; } path { _this_host ipv6"
        ),
        ["drbdsetup del-path web 2 ipv4:10.9.0.1:1 ipv4:10.9.0.2:1"]
    );
    // The transport is given at creation only.
    let calls = changed(
        "net { protocol A;",
        "net { transport \"lb-tcp\"; protocol A;",
    );
    assert_eq!(calls[0], "drbdsetup del-peer web 1");
    assert!(
        calls[1].starts_with("drbdsetup new-peer web 1 --_name=bravo"),
        "{calls:?}"
    );
    assert_eq!(calls.last().unwrap(), "drbdsetup connect web 1");
    // The bitmap is enabled early.
    let calls = changed(
        "disk { al-extents 6007; _unknown",
        "disk { al-extents 6007; bitmap no; _unknown",
    );
    assert_eq!(
        calls,
        ["drbdsetup disk-options 10 --set-defaults --al-extents=6007"]
    );
}

#[test]
fn a_running_state_that_cannot_be_read_stops_adjust() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("show");
    fs::write(&file, "resource \"web\" {\n _strange 1; }").unwrap();
    let mut system = system("alpha");
    system.fake_show = Some(file);
    let (code, out, err) = run_on(
        &system,
        &["-c", &data("example.conf"), "-d", "adjust", "web"],
    );
    assert_eq!((code, out.as_str()), (10, ""));
    assert!(err.starts_with("drbdsetup show:2: Parse error:"), "{err}");
}

#[test]
fn errors_of_use_are_those_of_the_original() {
    for (words, wanted) in [
        (
            &["-d", "up", "nix"][..],
            "'nix' not defined in your config (for this host).\n",
        ),
        (
            &["-d", "up", "wev"],
            "'wev' not defined in your config (for this host).\n\tdid you mean 'web'?\n",
        ),
        (
            &["-d", "attach", "web/3"],
            "Resource 'web' has no volume 3\n",
        ),
        (
            &["-d", "connect", "web:alpha"],
            "Host name 'alpha' (from 'web:alpha') is not a peer, but the local node\n",
        ),
        (
            &["-d", "connect", "web:x"],
            "Not a valid connection (web:x) for this host\n\
             'web:x' unexpected ctx_by_* result r=-2\n",
        ),
        (
            &["-d", "primary", "web/0"],
            "primary operates on whole resources, but you specified a specific volume!\n",
        ),
        (&["-d", "attach"], "No resource names specified\n"),
        (&["-d", "foo", "web"], "drbdadm: Unknown command 'foo'\n"),
        (
            &["-d", "--discard-my-data", "primary", "web"],
            "drbdadm: unrecognized option '--discard-my-data'\ntry 'drbdadm help primary'\n",
        ),
        (
            &["--size"],
            "drbdadm: option '--size' requires an argument\ntry 'drbdadm help'\n",
        ),
        (
            &["-t", "x", "up", "web"],
            "The --config-to-test (-t) option is only allowed with the dump and sh-nop commands\n",
        ),
    ] {
        let found = run_alpha("all.conf", words);
        assert_eq!((found.0, found.2.as_str()), (1, wanted), "{words:?}");
    }
}

#[test]
fn a_disk_is_asked_for_where_one_is_needed() {
    let found = run_on(
        &system("charlie"),
        &["-c", &data("all.conf"), "-d", "attach", "web"],
    );
    assert_eq!(found.0, 10);
    assert_eq!(
        found.2,
        "The attach command requires a local disk, but the configuration gives none.\n"
    );
}

#[test]
fn own_addresses_are_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c").to_string_lossy().into_owned();
    fs::write(
        &config,
        read("example.conf").replace("disable-ip-verification;", ""),
    )
    .unwrap();
    let mut system = system("alpha");
    system.has_address = Box::new(|address| address.host != "10.1.0.1");
    system.is_interactive = true;
    let (code, out, err) = run_on(&system, &["-c", &config, "-d", "up", "web"]);
    assert_eq!((code, out.as_str()), (10, ""));
    let wanted = "in resource web, on alpha:\n\tIP 10.1.0.1 not found on this host.\n";
    assert!(err.contains(wanted), "{err}");
    // The dump of a named resource goes on.
    let (code, out, _) = run_on(&system, &["-c", &config, "dump", "web"]);
    assert_eq!(code, 0);
    assert!(out.contains("resource web {"));
}

#[test]
fn unknown_resync_after_is_dropped_without_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("c").to_string_lossy().into_owned();
    let disk = "disk { al-extents 6007; }";
    let text = read("example.conf");
    assert!(text.contains(disk));
    fs::write(
        &config,
        text.replace(disk, "disk { al-extents 6007; resync-after gone; }"),
    )
    .unwrap();
    let mut system = system("alpha");
    let (code, out, err) = run_on(&system, &["-c", &config, "-d", "attach", "web/0"]);
    assert_eq!(code, 0);
    assert!(!out.contains("resync-after"), "{out}");
    assert!(
        err.contains("resource 'gone' mentioned in 'resync-after' option is not known."),
        "{err}"
    );
    system.is_interactive = true;
    assert_eq!(
        run_on(&system, &["-c", &config, "-d", "attach", "web/0"]).0,
        10
    );
    fs::write(
        &config,
        text.replace(disk, "disk { al-extents 6007; resync-after web/1; }"),
    )
    .unwrap();
    let (_, out, _) = run_on(&system, &["-c", &config, "-d", "attach", "web/0"]);
    assert!(out.contains(" --resync-after=11"), "{out}");
}

#[test]
fn version_lines_are_for_a_shell() {
    let (code, out, _) = run_on(&system("alpha"), &["--version"]);
    assert_eq!(code, 0);
    let names: Vec<_> = out
        .lines()
        .filter_map(|line| line.split('=').next())
        .collect();
    assert_eq!(
        names,
        [
            "DRBDADM_BUILDTAG",
            "DRBDADM_API_VERSION",
            "DRBD_KERNEL_VERSION_CODE",
            "DRBD_KERNEL_VERSION",
            "DRBDADM_VERSION_CODE",
            "DRBDADM_VERSION"
        ]
    );
    assert!(out.contains("DRBD_KERNEL_VERSION_CODE=0x090303\n"));
    assert!(out.contains("DRBDADM_VERSION_CODE=0x092200\n"));
}

#[test]
fn a_file_to_test_is_read_in_place_of_the_included_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    fs::write(path("drbd.conf"), "include \"*.res\";").unwrap();
    fs::write(path("r.res"), "resource r { net { timeout 0; } }").unwrap();
    fs::write(path("new"), "resource r { net { timeout 50; } }").unwrap();
    let system = system("alpha");
    let main = path("drbd.conf");
    assert_eq!(run_on(&system, &["-c", &main, "sh-nop"]).0, 10);
    let words = [
        "-c",
        &main,
        "-t",
        &path("new"),
        "-E",
        &path("r.res"),
        "sh-nop",
    ];
    assert_eq!(run_on(&system, &words), (0, String::new(), String::new()));
}

/// Helpers that write their names and words to a log and exit as a file says.
struct Helpers {
    dir: tempfile::TempDir,
    system: System,
}

impl Helpers {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let system = System {
            program: dir.path().join("drbdadm").to_string_lossy().into_owned(),
            directory: Some(dir.path().to_owned()),
            ..system("alpha")
        };
        let helpers = Helpers { dir, system };
        for name in ["drbdsetup", "drbdmeta"] {
            // A link, for a file that was just written may be busy when it is to be run.
            symlink(data("helper.sh"), helpers.path().join(name)).unwrap();
        }
        fs::copy(data("example.conf"), helpers.path().join("drbd.conf")).unwrap();
        helpers
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn fail(&self, command: &str, code: u8) {
        fs::write(self.path().join("fail"), command).unwrap();
        fs::write(self.path().join("code"), code.to_string()).unwrap();
    }

    /// Exit code, calls made, error output.
    fn run(&self, words: &[&str]) -> (u8, Vec<String>, String) {
        let log = self.path().join("log");
        let _ = fs::remove_file(&log);
        let (code, _, err) = run_on(&self.system, words);
        let log = fs::read_to_string(log).unwrap_or_default();
        (code, log.lines().map(str::to_owned).collect(), err)
    }
}

#[test]
fn up_runs_what_its_dry_run_prints() {
    let helpers = Helpers::new();
    let (code, calls, err) = helpers.run(&["up", "web"]);
    assert_eq!(code, 0, "{err}");
    let wanted = read("example.up-alpha").replace('\\', "");
    assert_eq!(calls, wanted.lines().collect::<Vec<_>>());
}

#[test]
fn a_bad_configuration_makes_no_call() {
    let helpers = Helpers::new();
    let config = helpers.path().join("drbd.conf");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text + "\nresource late { net { timeout 0; } }").unwrap();
    for words in [
        &["up", "web"][..],
        &["adjust", "all"],
        &["down", "web"],
        &["attach", "web/0"],
    ] {
        let (code, calls, err) = helpers.run(words);
        assert_eq!((code, calls.len()), (10, 0), "{words:?}");
        assert!(
            err.contains("drbd.conf:35: Parse error: while parsing value ('0')"),
            "{err}"
        );
    }
}

#[test]
fn a_failure_at_the_beginning_of_up_stops_it() {
    let helpers = Helpers::new();
    helpers.fail("new-minor", 10);
    let (code, calls, err) = helpers.run(&["up", "web"]);
    assert_eq!(code, 1);
    assert_eq!(
        calls,
        [
            "drbdsetup new-resource web 0 --quorum=majority --auto-promote=yes \
             --on-no-quorum=io-error",
            "drbdsetup new-minor web 10 0"
        ]
    );
    assert!(
        err.contains("Command 'drbdsetup new-minor web 10 0' terminated with exit code 10"),
        "{err}"
    );
}

#[test]
fn exit_codes_of_helpers_come_through() {
    let helpers = Helpers::new();
    helpers.fail("primary", 17);
    assert_eq!(helpers.run(&["primary", "web"]).0, 17);
    // The second volume is not tried.
    helpers.fail("suspend-io", 11);
    let (code, calls, _) = helpers.run(&["suspend-io", "web"]);
    assert_eq!(
        (code, calls),
        (11, vec!["drbdsetup suspend-io 10".to_owned()])
    );
}

#[test]
fn metadata_is_used_where_the_engine_cannot_answer() {
    let helpers = Helpers::new();
    assert_eq!(helpers.run(&["dstate", "web/0"]).1, ["drbdsetup dstate 10"]);
    helpers.fail("dstate", 10);
    let (code, calls, err) = helpers.run(&["dstate", "web/0"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        calls,
        [
            "drbdsetup dstate 10",
            "drbdmeta 10 v09 /dev/vg0/web0 internal dstate"
        ]
    );
    assert_eq!(err, "");
    helpers.fail("invalidate", 17);
    let (code, calls, _) = helpers.run(&["invalidate", "web/0"]);
    assert_eq!(
        (code, calls),
        (17, vec!["drbdsetup invalidate 10".to_owned()])
    );
    helpers.fail("outdate", 10);
    let (code, calls, _) = helpers.run(&["outdate", "web/0"]);
    assert_eq!(code, 0);
    assert_eq!(calls[1], "drbdmeta 10 v09 /dev/vg0/web0 internal outdate");
}

#[test]
fn new_metadata_gets_a_device_uuid() {
    let helpers = Helpers::new();
    let (code, calls, err) = helpers.run(&["create-md", "web/0"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        calls[0],
        "drbdmeta 10 v09 /dev/vg0/web0 internal create-md 1"
    );
    assert_eq!(
        calls[1],
        "drbdmeta 10 v09 /dev/vg0/web0 internal read-dev-uuid"
    );
    let (head, uuid) = calls[2].rsplit_once(' ').unwrap();
    assert_eq!(
        head,
        "drbdmeta 10 v09 /dev/vg0/web0 internal write-dev-uuid"
    );
    assert!(
        uuid.len() == 16 && u64::from_str_radix(uuid, 16).unwrap() != 0,
        "{uuid}"
    );
}

#[test]
fn adjust_reads_the_running_state_from_drbdsetup() {
    let helpers = Helpers::new();
    let (code, calls, err) = helpers.run(&["adjust", "web"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(calls[0], "drbdsetup show web");
    assert!(calls.contains(&"drbdsetup new-minor web 10 0".to_owned()));
    assert_eq!(calls.last().unwrap(), "drbdsetup connect web 2");
}

#[test]
fn the_name_of_a_node_may_lie_in_its_directory() {
    let helpers = Helpers::new();
    fs::write(helpers.path().join("node-name"), "charlie\n").unwrap();
    assert_eq!(
        run_on(&helpers.system, &["sh-ll-dev", "web"]).1,
        "none\nnone\n"
    );
}

#[test]
fn handlers_run_in_a_shell_with_their_environment() {
    let helpers = Helpers::new();
    let config = helpers.path().join("drbd.conf");
    let text = fs::read_to_string(&config).unwrap();
    let out = helpers.path().join("out");
    let command = format!(
        "echo $DRBD_RESOURCE $DRBD_MINOR $DRBD_VOLUME $DRBD_LL_DISK $DRBD_NODE_ID_2 > {}; exit 7",
        out.display()
    );
    let handlers = format!("resource web {{\n handlers {{ fence-peer \"{command}\"; }}");
    fs::write(&config, text.replace("resource web {", &handlers)).unwrap();
    assert_eq!(helpers.run(&["fence-peer", "web"]).0, 7);
    let found = fs::read_to_string(&out).unwrap();
    assert_eq!(found, "web 10 11 0 1 /dev/vg0/web0 /dev/vg0/web1 charlie\n");
    assert_eq!(helpers.run(&["fence-peer", "minor-11"]).0, 7);
    assert!(
        fs::read_to_string(&out)
            .unwrap()
            .starts_with("web 11 1 /dev/vg0/web1")
    );
    assert_eq!(helpers.run(&["split-brain", "web"]).0, 0);
    // What the daemon asks before it starts a process for that.
    let find =
        |resource: &str, handler: &str| find_handler(&helpers.system, &config, resource, handler);
    assert_eq!(find("web", "fence-peer"), Some(HandlerEntry::Command));
    assert_eq!(find("web", "split-brain"), Some(HandlerEntry::Nothing));
    assert_eq!(
        find("another", "split-brain"),
        Some(HandlerEntry::NoResource)
    );
    fs::write(&config, "resource web {").unwrap();
    assert_eq!(find("web", "split-brain"), None, "drbdadm says why");
}
