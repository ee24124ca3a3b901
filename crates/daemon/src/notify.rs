//! Tells a service manager that the daemon is ready, ends, and still works.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Weak;
use std::time::Duration;

use crate::node::Node;

/// The service manager that started the daemon, if it wants to be told.
#[derive(Debug)]
pub(crate) struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl Manager {
    /// From the environment: `NOTIFY_SOCKET`.
    pub(crate) fn of_environment() -> Option<Manager> {
        let name = std::env::var("NOTIFY_SOCKET").ok()?;
        Manager::at(&name)
            .inspect_err(|error| tracing::warn!(%error, name, "the service manager is not told"))
            .ok()
    }

    fn at(name: &str) -> std::io::Result<Manager> {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        Ok(Manager { socket, address })
    }

    /// Says something; a manager that does not listen is no reason to stop.
    pub(crate) fn say(&self, text: &str) {
        if let Err(error) = self.socket.send_to_addr(text.as_bytes(), &self.address) {
            tracing::warn!(%error, text, "the service manager was not told");
        }
    }

    /// Says regularly that every shard still answers. It stops saying so when one does not: the
    /// manager then restarts the daemon.
    pub(crate) fn watch(self, node: Weak<Node>) -> std::io::Result<()> {
        let Some(period) = watchdog_period() else {
            return Ok(());
        };
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || {
                while let Some(node) = node.upgrade() {
                    drop(node.reports(None));
                    drop(node);
                    self.say("WATCHDOG=1");
                    std::thread::sleep(period);
                }
            })?;
        Ok(())
    }
}

/// Half of what the manager waits, from `WATCHDOG_USEC`.
fn watchdog_period() -> Option<Duration> {
    let us: u64 = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (us > 0).then(|| Duration::from_micros(us / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        Manager::at(path.to_str().unwrap()).unwrap().say("READY=1");
        let mut bytes = [0; 16];
        let len = manager.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"READY=1");
        assert!(Manager::at(&"x".repeat(500)).is_err());
    }
}
