//! Our drbdadm beside Debian's on many configurations: the same calls in the same order, the same
//! dumps, the same exit codes. What differs by intent is named in [`EXCEPTIONS`] and [`plain`].

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::machine_has;

use crate::nodes::{DRIVER, STOCK, binary};

/// Commands that each configuration is tried with.
const ALWAYS: &[&str] = &[
    "-d up all",
    "-d adjust all",
    "-d down all",
    "-d create-md all",
    "dump",
    "-d dump all",
    "dump-xml",
    "-d dump-xml all",
    "sh-resources",
    "sh-minor all",
];

/// Commands of which each configuration gets its share in turn.
const IN_TURN: &[&str] = &[
    "sh-nop",
    "-d attach all",
    "-d connect all",
    "-d disconnect all",
    "-d primary all",
    "-d secondary --force all",
    "-d new-peer all",
    "-d new-path all",
    "-d new-minor all",
    "-d new-resource all",
    "-d net-options all",
    "-d disk-options all",
    "-d resource-options all",
    "-d peer-device-options all",
    "-d detach --force all",
    "-d del-peer all",
    "-d del-path all",
    "-d del-minor all",
    "-d invalidate --reset-bitmap=no all",
    "-d invalidate-remote all",
    "-d resize --assume-clean all",
    "-d check-resize all",
    "-d verify --start=0 --stop=1M all",
    "-d pause-sync all",
    "-d resume-sync all",
    "-d suspend-io all",
    "-d resume-io all",
    "-d role all",
    "-d cstate all",
    "-d dstate all",
    "-d show-gi all",
    "-d get-gi all",
    "-d set-gi all",
    "-d status all",
    "-d status",
    "-d dump-md all",
    "-d wipe-md --force all",
    "-d apply-al all",
    "-d wait-connect all",
    "-d wait-sync all",
    "-d proxy-up all",
    "-d proxy-down all",
    "-d forget-peer all",
    "-d new-current-uuid --clear-bitmap all",
    "-d create-md --max-peers=5 --force all",
    "-d adjust --skip-disk all",
    "-d adjust --skip-net all",
    "-d adjust --discard-my-data all",
    "-d connect --discard-my-data all",
    "-d -- --force primary all",
    "-d primary --force all",
    "-n VARIABLE -d primary all",
    "-d -v down all",
    "-d up nosuch",
    "-d fence-peer all",
    "-d split-brain all",
    "-S sh-resources",
    "-S -d up all",
    "-S -d wait-connect all",
    "-S sh-lr-of all",
    "sh-lr-of all",
    "sh-resource all",
    "sh-dev all",
    "sh-ll-dev all",
    "sh-md-dev all",
    "sh-md-idx all",
    "sh-ip all",
    "sh-mod-parms",
    "-x up all",
    "-d up --force all",
    "-d nosuch all",
    "up",
];

/// Every configuration gets this part of [`IN_TURN`].
const SHARE: usize = 5;

/// Beginning of a configuration's name, a part of the command line, and why they differ.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    (
        "08-",
        "adjust",
        "9.22 schedules options of peer devices by connection, later versions by volume",
    ),
    ("", "up", "the usage names other options and the version"),
    (
        "22-",
        "sh-dev",
        "sh-dev prints /dev/drbdMINOR, which exists without udev",
    ),
    (
        "03-",
        "fence-peer",
        "outdate-peer is the old name of the handler in configurations too",
    ),
    (
        "31-",
        "set-gi",
        "a host without peers gets its own node id, as since 9.32",
    ),
    (
        "17-",
        "-d dump-xml all",
        "an unknown resync-after is left out everywhere, by 9.22 not on other nodes",
    ),
    ("30-", "-d dump", "9.22 shows it where it was inherited to"),
    (
        "68-",
        "sh-resources",
        "a wrong configuration is refused by every command",
    ),
    (
        "74-",
        "sh-",
        "a wrong configuration is refused by every command",
    ),
    (
        "47-",
        "dump-xml",
        "9.22 prints plugins in braces, which is no XML",
    ),
];

#[test]
fn our_drbdadm_makes_the_calls_of_debians_for_many_configurations() -> Result<()> {
    if !machine_has("drbd-utils", Path::new(STOCK).exists()) {
        return Ok(());
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/conf/corpus");
    let mut files = Vec::new();
    for entry in fs::read_dir(corpus.canonicalize()?)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "conf")
        {
            files.push(path);
        }
    }
    files.sort();
    ensure!(files.len() >= 45, "only {} configurations", files.len());
    let dir = tempfile::Builder::new()
        .prefix("lockstep-corpus-")
        .tempdir()?;
    let ours = dir.path().join("drbdadm");
    std::os::unix::fs::symlink(binary()?, &ours)?;
    let work = Mutex::new(files.into_iter().enumerate());
    let differences: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let compare_all = || -> Result<()> {
        loop {
            let next = work.lock().ok().and_then(|mut work| work.next());
            let Some((index, file)) = next else {
                return Ok(());
            };
            let found = compare(index, &file, &ours)?;
            differences.lock().expect("no thread panics").extend(found);
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(compare_all)).collect();
        for thread in threads {
            thread.join().expect("no thread panics")?;
        }
        Ok(())
    })?;
    let differences = differences.into_inner()?;
    ensure!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.join("\n")
    );
    Ok(())
}

/// Changes of the running state, each by a text of it and what stands there instead.
const DIFFERENCES: &[(&str, &str)] = &[
    ("", ""),
    ("majority", "all"),
    ("        auto-promote    \tno;\n", ""),
    (
        "auto-promote    \tno;",
        "auto-promote    \tno;\n        cpu-mask        \t\"3\";",
    ),
    ("8000", "9000"),
    (
        "max-buffers     \t8000;",
        "max-buffers     \t8000;\n            ko-count        \t3;",
    ),
    ("s3 cret", "other"),
    ("\"bravo\"", "\"brave\""),
    ("6007", "1237"),
    (
        "al-extents      \t6007;",
        "al-extents      \t6007;\n                on-io-error     \tpass_on;",
    ),
    (
        "al-extents      \t6007;",
        "size            \t2048s;\n                al-extents      \t6007;",
    ),
    ("/dev/vg0/web0", "/dev/vg0/web9"),
    ("meta-disk\t\t\tinternal", "meta-disk\t\t\t\"/dev/md\""),
    (
        "meta-disk\t\t\t\"/dev/vg0/web1md\"",
        "meta-disk\t\t\tinternal",
    ),
    (
        "disk\t\t\t\"/dev/vg0/web0\";\n            meta-disk\t\t\tinternal;",
        "disk\t\t\tnone;",
    ),
    ("102400k", "50000k"),
    ("_peer_node_id 2", "_peer_node_id 5"),
    (
        "_remote_host ipv4 10.1.0.2:7790",
        "_remote_host ipv4 10.1.0.9:7790",
    ),
    ("        net {", "        _is_standalone;\n        net {"),
    (
        "        net {",
        "        net {\n            transport       \t\"rdma\";",
    ),
    (
        "        path {",
        "        path {\n            _this_host ipv4 10.1.0.1:7790;\n            _remote_host ipv4 10.1.0.9:7790;\n        }\n        path {",
    ),
    (
        "        volume 1 {\n            device",
        "        volume 7 {\n            device\t\t\tminor 17;\n            disk\t\t\tnone;\n        }\n        volume 1 {\n            device",
    ),
];

#[test]
fn adjust_makes_the_calls_of_debians_for_each_difference() -> Result<()> {
    if !machine_has("drbd-utils", Path::new(STOCK).exists()) {
        return Ok(());
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/conf/corpus");
    let file = corpus.join("adjust/web.conf");
    let running = fs::read_to_string(corpus.join("adjust/web.show"))?;
    let dir = tempfile::Builder::new()
        .prefix("lockstep-adjust-")
        .tempdir()?;
    let ours = dir.path().join("drbdadm");
    std::os::unix::fs::symlink(binary()?, &ours)?;
    let show = dir.path().join("show");
    for (from, to) in DIFFERENCES {
        ensure!(running.contains(from), "{from} is not in the running state");
        fs::write(&show, running.replacen(from, to, 1))?;
        for command in [
            "-d adjust web",
            "-d adjust --skip-net web",
            "-d adjust --skip-disk web",
        ] {
            let mut found = Vec::new();
            for program in [Path::new(STOCK), &ours] {
                let (code, text) = run_beside(program, &file, "alpha", command, &show)?;
                // Later versions order them in another way, and wait between connections.
                let is_call = |line: &&str| !line.is_empty() && !line.contains(" wait-connect-");
                let calls = text.lines().filter(is_call);
                let mut calls: Vec<String> = calls.map(str::to_owned).collect();
                calls.sort();
                found.push((code, calls));
            }
            ensure!(
                found[0] == found[1],
                "{command} with {from:?} replaced by {to:?}:\n{found:#?}"
            );
            ensure!(
                found[0].0 == Some(0) && found[0].1.is_empty() == from.is_empty()
                    || command.contains("skip"),
                "{command}, {from:?}: {found:#?}"
            );
        }
    }
    Ok(())
}

/// What differs for one configuration.
fn compare(index: usize, file: &Path, ours: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(file)?;
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.context("the name is UTF-8")?;
    let nodes: &[&str] = match text.contains("floating") {
        true => &["10.0.0.2", "10.0.0.1"],
        false => &["alpha", "bravo", "charlie", "delta"],
    };
    let is_there = |node: &&&str| text.contains("floating") || text.contains(**node);
    let nodes: Vec<&str> = nodes.iter().filter(is_there).copied().collect();
    let node = nodes.get(index % nodes.len().max(1)).unwrap_or(&"alpha");
    let share = (0..IN_TURN.len()).filter(|turn| (turn + index).is_multiple_of(SHARE));
    let commands = ALWAYS
        .iter()
        .copied()
        .chain(share.map(|turn| IN_TURN[turn]));
    let mut differences = Vec::new();
    for command in commands {
        let is_known = EXCEPTIONS.iter().any(|(file, part, _)| {
            name.starts_with(file)
                && (command.contains(part) && !file.is_empty() || command == *part)
        });
        if is_known {
            continue;
        }
        let theirs = run(Path::new(STOCK), file, node, command)?;
        let own = run(ours, file, node, command)?;
        if theirs != own {
            differences.push(format!(
                "{name} on {node}: drbdadm {command}\n--- Debian's: {:?}\n{}--- ours: {:?}\n{}",
                theirs.0, theirs.1, own.0, own.1
            ));
        }
    }
    Ok(differences)
}

/// Exit code and standard output, in one dialect.
fn run(program: &Path, file: &Path, node: &str, command: &str) -> Result<(Option<i32>, String)> {
    run_beside(program, file, node, command, Path::new("/dev/null"))
}

/// The same beside a running state.
fn run_beside(
    program: &Path,
    file: &Path,
    node: &str,
    command: &str,
    show: &Path,
) -> Result<(Option<i32>, String)> {
    let nowhere = PathBuf::from("/nonexistent");
    let output = Command::new(program)
        // Without a slash in its name it prints its helpers without their directory.
        .arg0("drbdadm")
        .arg("-c")
        .arg(file)
        .args(command.split(' '))
        .env("__DRBD_NODE__", node)
        .env("DRBD_DRIVER_VERSION_OVERRIDE", DRIVER)
        .env("FAKE_DRBDSETUP_SHOW", show)
        .env("LOCKSTEP_DIR", nowhere)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program:?} {command}"))?;
    let text = String::from_utf8(output.stdout)?;
    Ok((output.status.code(), plain(&text)))
}

/// Without what later versions of drbd-utils print in another way than Debian's 9.22, and without
/// what makes its dumps unreadable.
fn plain(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        // Since 9.24.
        let is_repair = line.starts_with("drbdmeta ") && line.ends_with(" repair-md");
        // An address that is not there.
        let is_null = line.contains("(null)");
        // Devices of stacked sections are missing in the original's dump.
        let is_stacked = line.trim_start().starts_with("device ")
            && lines
                .iter()
                .rev()
                .take(2)
                .any(|before| before.trim_start().starts_with("# on "));
        if is_repair || is_null || is_stacked {
            continue;
        }
        let mut line = line.replace("<template file=", "<template ");
        // An element that the original leaves open.
        line = line.replace("/>", ">");
        if line.starts_with("drbd-proxy-ctl ") {
            // Since 9.23 with its options and each command behind its own -c.
            if let Some(at) = line.find("\\ --") {
                line.truncate(at);
            }
            line = line.replace(" -c ", " ");
        }
        // Names of floating hosts have no colon since 9.23.
        if line.contains("10.0.0.") && (line.contains("--_name=") || line.contains("<host name=")) {
            let (head, tail) = line.split_at(line.find("name=").unwrap_or_default());
            let end = tail.find([' ', '>']).unwrap_or(tail.len());
            line = format!("{head}{}{}", tail[..end].replace(':', "_"), &tail[end..]);
        }
        lines.push(line);
    }
    let mut text = lines.join("\n");
    text.push('\n');
    text
}
