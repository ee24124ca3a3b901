//! Programs that read `/proc/drbd`: node_exporter of Prometheus, unchanged, makes of our text what
//! the daemon gives out under its names.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lockstep_e2e::PATIENCE;

/// Its name in Debian.
const NODE_EXPORTER: &str = "prometheus-node-exporter";
/// Where it listens.
const LISTEN: &str = "127.8.7.9:9100";

/// Samples of the collector by name and labels.
type Samples = BTreeMap<String, f64>;

fn samples(page: &str) -> Result<Samples> {
    let lines = page.lines().filter(|line| line.starts_with("node_drbd_"));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').context("a sample")?;
            Ok((name.to_owned(), value.parse()?))
        })
        .collect()
}

/// An answer over HTTP.
pub(crate) fn get(address: &str, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The text of `lockstep proc`, read by node_exporter where the machine has it, gives the page of
/// the daemon.
pub(crate) fn reads_as(dir: &Path, text: &str, page: &str) -> Result<()> {
    let ours = samples(page)?;
    ensure!(
        ours.len() == 17,
        "13 values, and two for both sides: {ours:?}"
    );
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).find(|dir| dir.join(NODE_EXPORTER).exists());
    let Some(found) = found else {
        // Not among what the tests' machine must have.
        eprintln!("without: {NODE_EXPORTER}");
        return Ok(());
    };
    let proc = dir.join("proc");
    fs::create_dir(&proc)?;
    fs::write(proc.join("drbd"), text)?;
    let mut child = Command::new(found.join(NODE_EXPORTER))
        .arg(format!("--path.procfs={}", proc.display()))
        .args(["--collector.disable-defaults", "--collector.drbd"])
        .arg(format!("--web.listen-address={LISTEN}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let begin = Instant::now();
    let answer = loop {
        match get(LISTEN, "/metrics") {
            Ok(answer) => break Ok(answer),
            Err(error) if begin.elapsed() > PATIENCE => break Err(error),
            // Polled: it does not say when it listens.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    child.kill()?;
    child.wait()?;
    let theirs = samples(&answer?)?;
    if theirs != ours {
        bail!("node_exporter reads\n{theirs:#?}\nand ours are\n{ours:#?}\nfrom\n{text}");
    }
    Ok(())
}
