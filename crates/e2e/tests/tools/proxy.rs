//! Debian's drbdadm, unchanged, drives our proxies: `proxy-up`, `adjust` and `proxy-down` with the
//! `proxy` sections of drbd.conf, while two nodes replicate through them.

use std::fs;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::nodes::{Nodes, Setup, binary, can_run_stock_tools};

const TEST: u8 = 12;

/// Two nodes with a proxy each.
struct World {
    nodes: Nodes,
    proxies: Vec<Child>,
    ctl: String,
}

impl World {
    fn new() -> Result<World> {
        let nodes = Nodes::new(&Setup {
            nodes: 2,
            lines: "",
            test: TEST,
            daemon: &["--no-device"],
        })?;
        let bin = nodes.node_dir(0).join("drbd-proxy-ctl");
        std::os::unix::fs::symlink(binary()?, &bin)?;
        let ctl = bin.to_str().context("the path is UTF-8")?.to_string();
        let mut world = World {
            nodes,
            proxies: Vec::new(),
            ctl,
        };
        for node in 0..2 {
            let dir = world.nodes.node_dir(node);
            let log = fs::File::create(dir.join("proxy.log"))?;
            let child = Command::new(binary()?)
                .args(["proxy", "run", "--insecure", "--memory-max", "64M"])
                .env("LOCKSTEP_DIR", dir)
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .context("starting the proxy")?;
            world.proxies.push(child);
            world
                .nodes
                .wait("the proxy answers", |_| Ok(world.shown(node).is_ok()))?;
        }
        Ok(world)
    }

    /// Writes drbd.conf with these options of the proxies.
    fn configure(&self, options: &str) -> Result<()> {
        let mut text = format!(
            "global {{ usage-count no; disable-ip-verification; }}\nresource r0 {{\n  net {{ \
             protocol A; ping-timeout 300; socket-check-timeout 10; }}\n  proxy {{ {options} }}\n"
        );
        let mut connection = String::from("  connection {\n");
        for (id, (name, port)) in [("alfa", 7916), ("bravo", 7914)].into_iter().enumerate() {
            text.push_str(&format!(
                "  on {name} {{ node-id {id}; volume 0 {{ device minor {}; disk {}; meta-disk \
                 internal; }} }}\n",
                self.nodes.minor(id),
                self.nodes.disk(id).display()
            ));
            let ip = |last: usize| format!("127.8.{TEST}.{}", last + id);
            connection.push_str(&format!(
                "    host {name} address ipv4 {}:7915 via proxy on {name} {{\n      inside \
                 {}:{port}; outside {}:7715; }}\n",
                ip(1),
                ip(11),
                ip(21)
            ));
        }
        text.push_str(&connection);
        text.push_str("  }\n}\n");
        for node in 0..2 {
            fs::write(self.nodes.node_dir(node).join("drbd.conf"), &text)?;
        }
        Ok(())
    }

    fn adm(&self, node: usize, args: &[&str]) -> Result<String> {
        let mut all = vec!["-p", &self.ctl];
        all.extend(args);
        self.nodes.stock(node, &all)
    }

    /// What drbdadm would call; one line each, without the shell's backslashes.
    fn planned(&self, node: usize) -> Result<String> {
        let calls = self.adm(node, &["-d", "adjust", "r0"])?;
        Ok(calls.replace('\\', ""))
    }

    /// What a proxy has, as it says itself.
    fn shown(&self, node: usize) -> Result<String> {
        self.control(node, "show")
    }

    fn control(&self, node: usize, command: &str) -> Result<String> {
        let output = Command::new(&self.ctl)
            .args(["-c", command])
            .env("LOCKSTEP_DIR", self.nodes.node_dir(node))
            .stdin(Stdio::null())
            .output()?;
        ensure!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for proxy in &mut self.proxies {
            // One that has ended by itself is as good.
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }
}

#[test]
fn debians_drbdadm_starts_adjusts_and_stops_the_proxies_of_two_nodes() -> Result<()> {
    if !can_run_stock_tools() {
        return Ok(());
    }
    let world = World::new()?;
    world.configure("memlimit 8M; plugin { zstd level 3; }")?;
    for node in 0..2 {
        world.adm(node, &["create-md", "--force", "r0"])?;
        world.adm(node, &["proxy-up", "r0"])?;
    }
    let shown = world.shown(0)?;
    ensure!(
        shown.contains(
            "add connection r0-bravo-alfa 127.8.12.11:7916 127.8.12.22:7715 127.8.12.21:7715 \
             127.8.12.1:7915 --memlimit=8388608"
        ) && shown.contains("set plugin r0-bravo-alfa 0 zstd level 3"),
        "{shown}"
    );
    for node in 0..2 {
        world.adm(node, &["up", "r0"])?;
    }
    world.adm(0, &["wait-connect", "r0"])?;
    world.adm(0, &["primary", "--force", "r0"])?;
    world.nodes.wait_in_sync()?;
    let state = world.control(0, "show connections")?;
    ensure!(state.contains("r0-bravo-alfa\tConnected"), "{state}");
    // Nothing has changed: nothing is called.
    let planned = world.planned(0)?;
    ensure!(planned.is_empty(), "{planned}");
    // Another plugin is set while DRBD stays connected.
    let resets = |node| -> Result<String> {
        let all = world.control(node, "print statistics")?;
        let line = all
            .lines()
            .find(|line| line.contains("counters.streams_reset="));
        Ok(line.context("streams_reset")?.to_string())
    };
    let before = resets(0)?;
    world.configure("memlimit 8M; plugin { lzma level 2; }")?;
    let planned = world.planned(0)?;
    ensure!(
        planned.contains("set plugin r0-bravo-alfa 0 lzma level 2")
            && !planned.contains("del connection"),
        "{planned}"
    );
    world.adm(0, &["adjust", "r0"])?;
    let settings = world.control(0, "show proxy-settings r0-bravo-alfa")?;
    ensure!(settings.contains("lzma level 2"), "{settings}");
    ensure!(resets(0)? == before, "DRBD's sockets were reset");
    // No plugin at all; one per cent more memory is no difference.
    world.configure("memlimit 8270k;")?;
    world.adm(0, &["adjust", "r0"])?;
    let settings = world.control(0, "show proxy-settings r0-bravo-alfa")?;
    ensure!(
        !settings.contains("lzma") && settings.contains("8388608"),
        "{settings}"
    );
    // Much more memory: drbdadm takes the connection away and adds it again.
    world.configure("memlimit 20M; plugin { lz4; }")?;
    world.adm(0, &["adjust", "r0"])?;
    ensure!(world.shown(0)?.contains("--memlimit=20971520"));
    let planned = world.planned(0)?;
    ensure!(planned.is_empty(), "a second adjust: {planned}");
    world.nodes.wait_in_sync()?;
    // A plugin that the proxy does not know fails, with its words, and changes nothing.
    world.configure("memlimit 20M; plugin { zstd level 99; }")?;
    let refused = world
        .nodes
        .stock_raw(0, &["-p", &world.ctl, "adjust", "r0"])?;
    let text = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        !refused.status.success() && text.contains("-5..22"),
        "{refused:?}"
    );
    ensure!(world.shown(0)?.contains("set plugin r0-bravo-alfa 0 lz4"));
    world.nodes.wait_in_sync()?;
    for node in 0..2 {
        world.adm(node, &["down", "r0"])?;
        world.adm(node, &["proxy-down", "r0"])?;
        ensure!(world.shown(node)?.is_empty(), "{}", world.shown(node)?);
    }
    Ok(())
}
