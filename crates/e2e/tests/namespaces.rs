//! Connections in another network namespace than the daemon's: that of who made their paths.

use std::process::{Child, Command};

use anyhow::{Result, ensure};
use lockstep_e2e::net::second_address;
use lockstep_e2e::{Cluster, Setup, can_mount, run};

const TEST: u8 = 98;

/// A name for the network namespace of a process.
struct Name(String);

impl Name {
    fn new(process: u32) -> Result<Name> {
        let name = format!("lockstep-e2e-name-{process}");
        let id = process.to_string();
        run(Command::new("ip").args(["netns", "attach", &name, &id]))?;
        Ok(Name(name))
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).output();
    }
}

/// Ends with the test.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn paths_are_in_the_network_namespace_of_who_makes_them_and_end_with_it() -> Result<()> {
    if !can_mount() {
        return Ok(());
    }
    let mut cluster = Cluster::new(&Setup::quick(TEST, 2))?;
    cluster.adm(0, &["down", "r0"])?;
    cluster.stop(0)?;
    // The host, where none of the nodes' addresses is.
    cluster.start_outside(0)?;
    let sleep = || Ok(Command::new("sleep").arg("1000").spawn()?);
    let sleeper = Sleeper(cluster.network().inside(0, sleep)?);
    let name = Name::new(sleeper.0.id())?;
    cluster.adm(0, &["up", "r0"])?;
    let connected = |c: &Cluster| c.connection_is(0, 1, "Connected");
    cluster.wait("the nodes are connected", connected)?;

    // From the host, which the connection is not in.
    let (own, peer) = (second_address(0), second_address(1));
    let output = cluster.setup_from_host(
        0,
        &[
            "new-path",
            "r0",
            "1",
            &format!("ipv4:{own}:7788"),
            &format!("ipv4:{peer}:7788"),
        ],
    )?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "a connection in two namespaces");
    ensure!(text.contains("another network namespace"), "{text}");
    ensure!(connected(&cluster)?, "as before");

    // The namespace goes on without a name as long as a process is in it.
    drop(name);
    let log = "its network namespace has ended";
    ensure!(connected(&cluster)?, "a process is in it");
    ensure!(!cluster.log(0)?.contains(log), "too early");
    drop(sleeper);
    cluster.wait("the connection has ended", |c| {
        c.connection_is(0, 1, "StandAlone")
    })?;
    cluster.wait("its path is gone", |c| {
        let status = c.status(0)?;
        let paths = status["connections"][0]["paths"].as_array();
        Ok(paths.is_none_or(Vec::is_empty))
    })?;
    ensure!(cluster.log(0)?.contains(log));

    // The next path decides anew.
    cluster.adm(0, &["adjust", "r0"])?;
    cluster.wait("the nodes are connected again", connected)?;
    Ok(())
}
