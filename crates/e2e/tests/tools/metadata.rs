//! Debian's drbdmeta and ours: each command of both on copies of one image must give the same
//! output, exit code and bytes, whoever made the image.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lockstep_e2e::machine_has;

use crate::nodes::binary;

const THEIRS: &str = "/usr/sbin/drbdmeta";

/// In this order, each on what the one before has left. A dash is where the node id belongs.
const COMMANDS: &[&str] = &[
    "dump-md",
    "apply-al",
    "outdate",
    "invalidate",
    "dstate",
    "check-resize",
    "read-dev-uuid",
    "write-dev-uuid 1234567890ABCDEF",
    "read-dev-uuid",
    "- get-gi",
    "- show-gi",
    "- set-gi 1122334455667788:0:0:0:1:1:0:0:0",
    "- get-gi",
    "- forget-peer",
    "dump-md",
    "wipe-md",
    "dump-md",
];

/// What is known to differ from drbd-utils 9.22: it prints flags of v08 as zero, and cannot forget
/// the one peer that v08 has.
fn differs(format: &str, line: &str) -> bool {
    line.starts_with('#') || (format == "v08" && line.trim_start().starts_with("flags "))
}

struct Answer {
    code: Option<i32>,
    lines: Vec<String>,
    image: Vec<u8>,
}

/// Runs a drbdmeta on a copy of an image.
fn answer(dir: &Path, program: &Path, format: &str, command: &str) -> Result<Answer> {
    let image = dir.join("copy.img");
    fs::copy(dir.join("md.img"), &image)?;
    let mut run = Command::new(program);
    if program != Path::new(THEIRS) {
        run.arg("drbdmeta");
    }
    run.arg("--force");
    let words = match command.strip_prefix("- ") {
        Some(words) if format == "v09" => {
            run.args(["--node-id", "1"]);
            words
        }
        Some(words) => words,
        None => command,
    };
    let output = run
        .args(["-", format, "copy.img", "internal"])
        .args(words.split(' '))
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .with_context(|| program.display().to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(Answer {
        code: output.status.code(),
        lines: text.lines().map(str::to_owned).collect(),
        image: fs::read(&image)?,
    })
}

#[test]
fn every_command_of_drbdmeta_does_what_the_original_does() -> Result<()> {
    if !machine_has("drbd-utils", Path::new(THEIRS).exists()) {
        return Ok(());
    }
    let ours = binary()?;
    let mut compared = 0;
    for format in ["v08", "v09"] {
        for maker in [Path::new(THEIRS), &ours] {
            let dir = tempfile::Builder::new().prefix("lockstep-md-").tempdir()?;
            fs::File::create(dir.path().join("md.img"))?.set_len(4 << 20)?;
            let create = if format == "v09" {
                "create-md 2"
            } else {
                "create-md"
            };
            let made = answer(dir.path(), maker, format, create)?;
            ensure!(made.code == Some(0), "{format} {create}: {:?}", made.code);
            fs::write(dir.path().join("md.img"), made.image)?;
            for command in COMMANDS {
                if format == "v08" && command.ends_with("forget-peer") {
                    continue;
                }
                let theirs = answer(dir.path(), Path::new(THEIRS), format, command)?;
                let ours = answer(dir.path(), &ours, format, command)?;
                let what = format!("{format} made by {}: {command}", maker.display());
                let kept = |lines: &[String]| -> Vec<String> {
                    let lines = lines.iter().filter(|line| !differs(format, line));
                    lines.cloned().collect()
                };
                ensure!(theirs.code == ours.code, "{what}: {:?}", ours.code);
                let (left, right) = (kept(&theirs.lines), kept(&ours.lines));
                ensure!(left == right, "{what}: {left:#?}\nours: {right:#?}");
                ensure!(theirs.image == ours.image, "{what}: the bytes differ");
                fs::write(dir.path().join("md.img"), theirs.image)?;
                compared += 1;
            }
        }
    }
    ensure!(compared == 2 * (COMMANDS.len() * 2 - 1), "{compared}");
    Ok(())
}

#[test]
fn a_dump_by_one_drbdmeta_restored_by_the_other_gives_the_same_bytes() -> Result<()> {
    if !machine_has("drbd-utils", Path::new(THEIRS).exists()) {
        return Ok(());
    }
    let (ours, theirs) = (binary()?, Path::new(THEIRS).to_path_buf());
    // Not v08 dumped by theirs: drbd-utils before 9.33 print its flags as zero.
    for (format, dumper, restorer) in [
        ("v09", &ours, &theirs),
        ("v09", &theirs, &ours),
        ("v08", &ours, &theirs),
    ] {
        let dir = tempfile::Builder::new().prefix("lockstep-md-").tempdir()?;
        let image = dir.path().join("md.img");
        fs::File::create(&image)?.set_len(4 << 20)?;
        let create = match format {
            "v09" => "create-md 3",
            _ => "create-md",
        };
        let generations = "- set-gi 1122334455667788:99887766554433FE:AAAAAAAAAAAAAAA0:0:1:1:0:1";
        let mut before = Vec::new();
        let mut dump = Vec::new();
        for command in [create, generations, "dump-md", "wipe-md"] {
            let answer = answer(dir.path(), dumper, format, command)?;
            ensure!(
                answer.code == Some(0),
                "{format} {command}: {:?}",
                answer.code
            );
            match command {
                "dump-md" => dump = answer.lines,
                "wipe-md" => ensure!(answer.image != before, "nothing was wiped"),
                _ => before.clone_from(&answer.image),
            }
            fs::write(&image, answer.image)?;
        }
        fs::write(dir.path().join("dump"), dump.join("\n") + "\n")?;
        let restored = answer(dir.path(), restorer, format, "restore-md dump")?;
        let what = format!("{format} by {}", restorer.display());
        ensure!(restored.code == Some(0), "{what}: {:?}", restored.code);
        ensure!(restored.image == before, "{what}: the bytes differ");
    }
    Ok(())
}
