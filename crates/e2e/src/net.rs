//! The network between the nodes of one cluster: a namespace for each node and one for the bridge
//! that joins them, without any trace in the machine's own network.
//!
//! The namespaces have no names: they live as long as somebody holds them, so a killed test leaves
//! none behind.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::run;
use crate::wan::{self, Line, Wan};

/// A hardware address that no interface here has.
const NOBODY: &str = "02:00:00:00:00:01";

/// How a node is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Its interface goes down: the kernel knows that there is no way.
    Down,
    /// Its port leaves the bridge: nobody is told, connections stay open until they time out.
    Silent,
}

/// A network with one node on each port of a switch.
#[derive(Debug)]
pub struct Network {
    switch: OwnedFd,
    nodes: Vec<OwnedFd>,
    /// Number of the last bridge that exists in `switch`.
    switches: AtomicUsize,
    /// Instead of the switch.
    wan: Option<Wan>,
}

impl Network {
    /// Namespaces, bridge and cables for so many nodes.
    pub fn new(nodes: usize) -> Result<Network> {
        let network = Network {
            switch: namespace()?,
            nodes: (0..nodes).map(|_| namespace()).collect::<Result<_>>()?,
            switches: AtomicUsize::new(0),
            wan: None,
        };
        inside(&network.switch, || {
            ip("link add bridge0 type bridge stp_state 0 mcast_snooping 0")?;
            ip("link set bridge0 up")?;
            for (index, node) in network.nodes.iter().enumerate() {
                let there = format!("/proc/{}/fd/{}", std::process::id(), node.as_raw_fd());
                ip(&format!(
                    "link add port{index} type veth peer name eth0 netns {there}"
                ))?;
                ip(&format!("link set port{index} master bridge0 up"))?;
            }
            Ok(())
        })?;
        for (index, node) in network.nodes.iter().enumerate() {
            inside(node, || {
                ip("link set lo up")?;
                ip(&format!("address add {}/24 dev eth0", address(index)))?;
                ip("link set eth0 up")
            })?;
        }
        Ok(network)
    }

    /// Two nodes with a long line between them.
    pub fn across(line: Line) -> Result<Network> {
        let mut network = Network {
            switch: namespace()?,
            nodes: vec![namespace()?, namespace()?],
            switches: AtomicUsize::new(0),
            wan: None,
        };
        let mut ends = Vec::new();
        for (index, node) in network.nodes.iter().enumerate() {
            ends.push(inside(node, || {
                let end = wan::end("eth0")?;
                ip("link set lo up")?;
                ip(&format!("address add {}/24 dev eth0", address(index)))?;
                ip("link set eth0 up mtu 1500")?;
                Ok(end)
            })?);
        }
        let ends = ends
            .try_into()
            .map_err(|_| anyhow!("a line has two ends"))?;
        network.wan = Some(Wan::new(ends, line));
        Ok(network)
    }

    /// Joins the nodes by a second switch, with an interface `eth1` on each.
    pub fn add_second_link(&self) -> Result<()> {
        self.switch("link add other0 type bridge stp_state 0 mcast_snooping 0")?;
        self.switch("link set other0 up")?;
        for (index, node) in self.nodes.iter().enumerate() {
            let there = format!("/proc/{}/fd/{}", std::process::id(), node.as_raw_fd());
            self.switch(&format!(
                "link add second{index} type veth peer name eth1 netns {there}"
            ))?;
            self.switch(&format!("link set second{index} master other0 up"))?;
            inside(node, || {
                ip(&format!(
                    "address add {}/24 dev eth1",
                    second_address(index)
                ))?;
                ip("link set eth1 up")
            })?;
        }
        Ok(())
    }

    /// Cuts a node's second link, or mends it.
    pub fn set_second_link(&self, node: usize, cut: bool) -> Result<()> {
        let state = if cut { "down" } else { "up" };
        inside(&self.nodes[node], || ip(&format!("link set eth1 {state}")))
    }

    /// Takes a node's second link off its switch, which nobody is told of.
    pub fn cut_second_link_silently(&self, node: usize) -> Result<()> {
        self.switch(&format!("link set second{node} nomaster"))
    }

    /// Undoes that.
    pub fn mend_second_link(&self, node: usize) -> Result<()> {
        self.switch(&format!("link set second{node} master other0"))
    }

    /// Puts a guest in the place of a node, whose cables become tap devices: the namespace in which
    /// QEMU has to run, and each device with the guest's address. The second link comes before.
    pub fn join_guest(&self, node: usize) -> Result<(PathBuf, Vec<(String, String)>)> {
        let mut interfaces = Vec::new();
        let cables = [
            (format!("port{node}"), "bridge0", address(node)),
            (format!("second{node}"), "other0", second_address(node)),
        ];
        inside(&self.switch, || {
            for (cable, bridge, address) in cables {
                let here = |words: String| {
                    let done = Command::new("ip").args(words.split(' ')).output();
                    done.is_ok_and(|output| output.status.success())
                };
                if !here(format!("link show {cable}")) {
                    continue;
                }
                ip(&format!("link delete {cable}"))?;
                ip(&format!("tuntap add {cable} mode tap"))?;
                ip(&format!("link set {cable} master {bridge} up"))?;
                interfaces.push((cable, address));
            }
            Ok(())
        })?;
        Ok((path(&self.switch), interfaces))
    }

    /// The file that stands for a node's namespace while this network lives.
    pub fn node_path(&self, node: usize) -> PathBuf {
        path(&self.nodes[node])
    }

    /// The same for the namespace of the switches.
    pub fn switch_path(&self) -> PathBuf {
        path(&self.switch)
    }

    /// The line, where there is one.
    pub fn wan(&self) -> Option<&Wan> {
        self.wan.as_ref()
    }

    /// Runs something on a thread in a node's network; processes that it starts stay there.
    pub fn inside<T: Send>(
        &self,
        node: usize,
        what: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        inside(&self.nodes[node], what)
    }

    /// Cuts a node off.
    pub fn cut(&self, node: usize, cut: Cut) -> Result<()> {
        match cut {
            Cut::Down => inside(&self.nodes[node], || ip("link set eth0 down")),
            Cut::Silent if let Some(wan) = &self.wan => {
                wan.cut(true);
                Ok(())
            }
            Cut::Silent => self.switch(&format!("link set port{node} nomaster")),
        }
    }

    /// Bounds what reaches a node to so many megabits in a second, or ends that. What is more waits.
    pub fn slow(&self, node: usize, mbit: Option<u32>) -> Result<()> {
        let words = match mbit {
            Some(mbit) => {
                format!("qdisc add dev port{node} root tbf rate {mbit}mbit burst 32k latency 20s")
            }
            None => format!("qdisc delete dev port{node} root"),
        };
        inside(&self.switch, || {
            run(Command::new("tc").args(words.split(' ')))
        })
    }

    /// Undoes a cut.
    pub fn mend(&self, node: usize, cut: Cut) -> Result<()> {
        match cut {
            Cut::Down => inside(&self.nodes[node], || ip("link set eth0 up")),
            Cut::Silent if let Some(wan) = &self.wan => {
                wan.cut(false);
                Ok(())
            }
            Cut::Silent => self.switch(&format!("link set port{node} master bridge0")),
        }
    }

    /// Puts each group of nodes on a switch of its own; who is not named joins the first.
    pub fn partition(&self, groups: &[&[usize]]) -> Result<()> {
        for (number, group) in groups.iter().enumerate() {
            if self.switches.fetch_max(number, Ordering::Relaxed) < number {
                self.switch(&format!(
                    "link add bridge{number} type bridge stp_state 0 mcast_snooping 0"
                ))?;
                self.switch(&format!("link set bridge{number} up"))?;
            }
            for node in *group {
                self.switch(&format!("link set port{node} master bridge{number}"))?;
            }
        }
        Ok(())
    }

    /// What a node sends to another one goes to an address that nobody has.
    pub fn mute(&self, node: usize, towards: usize) -> Result<()> {
        inside(&self.nodes[node], || {
            ip(&format!(
                "neigh replace {} lladdr {NOBODY} dev eth0 nud permanent",
                address(towards)
            ))
        })
    }

    /// Everybody on one switch again, and nobody muted.
    pub fn heal(&self) -> Result<()> {
        for (node, namespace) in self.nodes.iter().enumerate() {
            self.switch(&format!("link set port{node} master bridge0"))?;
            inside(namespace, || ip("neigh flush dev eth0 nud permanent"))?;
        }
        Ok(())
    }

    fn switch(&self, words: &str) -> Result<()> {
        inside(&self.switch, || ip(words))
    }
}

/// A node's address in its cluster's network.
pub fn address(node: usize) -> String {
    format!("10.77.0.{}", node + 1)
}

/// A node's address on the second link.
pub fn second_address(node: usize) -> String {
    format!("10.78.0.{}", node + 1)
}

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A new network namespace. It has a name only while it is made.
fn namespace() -> Result<OwnedFd> {
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("lockstep-e2e-{}-{count}", std::process::id());
    ip(&format!("netns add {name}"))?;
    let opened = File::open(format!("/run/netns/{name}")).context("opening a network namespace");
    ip(&format!("netns delete {name}"))?;
    Ok(opened?.into())
}

fn path(namespace: &OwnedFd) -> PathBuf {
    let (process, number) = (std::process::id(), namespace.as_raw_fd());
    PathBuf::from(format!("/proc/{process}/fd/{number}"))
}

/// Runs something on a thread that has moved into a namespace.
fn inside<T: Send>(namespace: &OwnedFd, what: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .context("moving into a network namespace")?;
            what()
        });
        thread.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

fn ip(words: &str) -> Result<()> {
    run(Command::new("ip").args(words.split(' ')))
}
