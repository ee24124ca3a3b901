//! The Debian package: what is in it, that it stays apart from drbd-utils, and that it goes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lockstep_e2e::has_program;

use crate::nodes::{binary, can_run_stock_tools, output};

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging")
}

/// Builds the package of the binary under test, and names its file.
pub(crate) fn build_package(dir: &Path) -> Result<String> {
    let out = dir.join("deb");
    let build = packaging().join("build-deb");
    output(Command::new(build).arg(binary()?).arg(&out))?;
    let deb = fs::read_dir(out)?.next().context("a package")??.path();
    Ok(deb.to_str().context("the path is UTF-8")?.to_owned())
}

fn dpkg(root: &Path, args: &[&str]) -> Result<String> {
    output(
        Command::new("dpkg")
            .arg(format!("--root={}", root.display()))
            .arg("--force-script-chrootless")
            .arg("--force-depends")
            .arg("--log=/dev/null")
            .args(args),
    )
}

#[test]
fn the_package_installs_beside_drbd_utils_takes_its_names_on_request_and_goes() -> Result<()> {
    if !can_run_stock_tools() || !has_program("dpkg-deb") || !has_program("strip") {
        return Ok(());
    }
    let dir = tempfile::Builder::new().prefix("lockstep-deb-").tempdir()?;
    let deb = build_package(dir.path())?;

    // A machine with files where drbd-utils has its own.
    let root = dir.path().join("root");
    for part in ["usr/sbin", "var/lib/dpkg/info", "var/lib/dpkg/updates"] {
        fs::create_dir_all(root.join(part))?;
    }
    for file in ["status", "available", "diversions"] {
        fs::write(root.join("var/lib/dpkg").join(file), "")?;
    }
    let tools = ["drbdadm", "drbdsetup", "drbdmeta"];
    let theirs = |name: &str| root.join("usr/sbin").join(name);
    for name in tools {
        fs::write(theirs(name), "theirs")?;
    }
    dpkg(&root, &["-i", &deb])?;
    let files = dpkg(&root, &["-L", "lockstep"])?;
    let others = output(Command::new("dpkg").args(["-L", "drbd-utils"]))?;
    for file in files.lines() {
        let path = root.join(file.trim_start_matches('/'));
        let shared = !path.is_dir() && others.lines().any(|other| other == file);
        ensure!(!shared, "{file} belongs to drbd-utils");
    }
    for name in ["usr/sbin/lockstepd", "usr/lib/lockstep/bin/drbdadm"] {
        ensure!(root.join(name).exists(), "{name} leads nowhere");
    }
    let version = output(Command::new(root.join("usr/lib/lockstep/bin/drbdadm")).arg("--version"))?;
    ensure!(version.contains("DRBDADM_VERSION_CODE=0x"), "{version}");
    let completions = root.join("usr/share/bash-completion/completions/lockstep");
    output(Command::new("bash").arg("-n").arg(completions))?;

    // The names are taken only when asked, and given back.
    let divert = |word: &str| {
        output(
            Command::new(root.join("usr/sbin/lockstep-divert"))
                .arg(word)
                .env("DPKG_ROOT", &root),
        )
    };
    let ours = || tools.map(|name| theirs(name).is_symlink());
    ensure!(ours() == [false; 3], "taken without being asked");
    divert("on")?;
    ensure!(ours() == [true; 3], "{}", divert("status")?);
    ensure!(fs::read_to_string(theirs("drbdadm.drbd-utils"))? == "theirs");
    divert("off")?;
    ensure!(ours() == [false; 3], "{}", divert("status")?);
    divert("on")?;
    dpkg(&root, &["--purge", "lockstep"])?;
    for name in tools {
        ensure!(fs::read_to_string(theirs(name))? == "theirs", "{name}");
    }
    ensure!(!root.join("usr/bin/lockstep").exists(), "something is left");
    for file in [
        "etc/default/lockstep",
        "etc/default/lockstep-proxy",
        "etc/lockstep",
    ] {
        ensure!(!root.join(file).exists(), "{file} is left");
    }
    Ok(())
}

#[test]
fn the_dashboard_asks_for_metrics_that_exist() -> Result<()> {
    let text = fs::read_to_string(packaging().join("grafana-dashboard.json"))?;
    let page = fs::read_to_string(packaging().join("../docs/metrics.md"))?;
    let dashboard: serde_json::Value = serde_json::from_str(&text)?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    ensure!(panels.len() >= 8, "{} panels", panels.len());
    for panel in panels {
        for target in panel["targets"].as_array().context("targets")? {
            let query = target["expr"].as_str().context("a query")?;
            let from = query.find("lockstep_").with_context(|| query.to_owned())?;
            let name: String = query[from..]
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || *c == '_')
                .collect();
            let name = name.trim_end_matches("_count").trim_end_matches("_bucket");
            ensure!(page.contains(name), "docs/metrics.md does not know {name}");
        }
    }
    Ok(())
}

#[test]
fn every_unit_calls_what_the_package_installs() -> Result<()> {
    let script = fs::read_to_string(packaging().join("build-deb"))?;
    for unit in fs::read_dir(packaging().join("systemd"))? {
        let unit = unit?.path();
        let text = fs::read_to_string(&unit)?;
        ensure!(
            text.starts_with("[Unit]\nDescription="),
            "{}",
            unit.display()
        );
        for line in text.lines().filter(|line| line.starts_with("Exec")) {
            let program = line.split(['=', ' ']).nth(1).context("a program")?;
            let name = program.rsplit('/').next().context("a name")?;
            let known = ["/usr/bin/", "/usr/lib/lockstep/"];
            let path = program.trim_start_matches(['-', '+']);
            ensure!(known.iter().any(|dir| path.starts_with(dir)), "{line}");
            ensure!(script.contains(name), "{name} is not installed");
        }
    }
    Ok(())
}
