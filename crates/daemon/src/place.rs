//! Where a node's files are: control socket, lock, devices, configuration.

use std::path::{Path, PathBuf};

/// Directory of a node when nothing else is said.
pub const DEFAULT_DIR: &str = "/run/lockstep";

/// Where `drbdadm` keeps links from resources and minors to their configurations.
pub const REGISTRY: &str = "/var/run/drbd";

/// Environment variable with the socket that tools use in place of the daemon's own.
pub const CONTROL_VARIABLE: &str = "LOCKSTEP_CONTROL";

/// A node's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    dir: PathBuf,
}

impl Place {
    /// The node in `dir`, or that of `LOCKSTEP_DIR`, or the default.
    pub fn find(dir: Option<&Path>) -> Place {
        let dir = match (dir, std::env::var_os("LOCKSTEP_DIR")) {
            (Some(dir), _) => dir.to_owned(),
            (None, Some(dir)) if !dir.is_empty() => PathBuf::from(dir),
            _ => PathBuf::from(DEFAULT_DIR),
        };
        // Children change their directory, so the name has to hold everywhere.
        let dir = std::path::absolute(&dir).unwrap_or(dir);
        Place { dir }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The node that owns `/dev/drbd*` of this machine.
    pub fn is_default(&self) -> bool {
        self.dir == Path::new(DEFAULT_DIR)
    }

    /// The control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    /// Where tools find the daemon: its control socket, unless the environment names another.
    pub fn client_socket(&self) -> PathBuf {
        match std::env::var_os(CONTROL_VARIABLE) {
            Some(path) if !path.is_empty() => PathBuf::from(path),
            _ => self.control_socket(),
        }
    }

    /// Held locked by the running daemon; contains its process id.
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("lockstepd.pid")
    }

    /// The socket that serves every volume by NBD.
    pub fn nbd_socket(&self) -> PathBuf {
        self.dir.join("nbd.sock")
    }

    /// The socket of the process that keeps devices while no daemon runs.
    pub fn hold_socket(&self) -> PathBuf {
        self.dir.join("hold.sock")
    }

    /// Notes of what the disks in use have in their caches, for the daemon that comes next.
    pub fn cache_dir(&self) -> PathBuf {
        self.dir.join("caches")
    }

    /// Links to the mountable devices.
    pub fn dev_dir(&self) -> PathBuf {
        self.dir.join("dev")
    }

    /// Log of a daemon that was started in the background.
    pub fn log_file(&self) -> PathBuf {
        self.dir.join("lockstepd.log")
    }

    /// The configuration file that a resource's handlers are read from: the one that `drbdadm` registered when
    /// it made the resource, else `drbd.conf` of `/etc`. A node with a directory of its own has its own file.
    pub fn config_file(&self, resource: &str) -> PathBuf {
        match self.is_default() {
            true => registered(Path::new(REGISTRY), resource)
                .unwrap_or_else(|| PathBuf::from("/etc/drbd.conf")),
            false => self.dir.join("drbd.conf"),
        }
    }
}

fn registered(registry: &Path, resource: &str) -> Option<PathBuf> {
    let link = registry.join(format!("drbd-resource-{resource}.conf"));
    link.canonicalize().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registered_configuration_is_found_as_long_as_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("shop.conf");
        std::fs::write(&config, "").unwrap();
        let link = dir.path().join("drbd-resource-shop.conf");
        std::os::unix::fs::symlink(&config, &link).unwrap();
        let wanted = config.canonicalize().unwrap();
        assert_eq!(registered(dir.path(), "shop"), Some(wanted));
        assert_eq!(registered(dir.path(), "bank"), None);
        std::fs::remove_file(&config).unwrap();
        assert_eq!(registered(dir.path(), "shop"), None);
    }

    #[test]
    fn a_node_with_a_directory_of_its_own_reads_no_other_configuration() {
        let place = Place::find(Some(Path::new("/srv/node1")));
        assert_eq!(place.config_file("shop"), Path::new("/srv/node1/drbd.conf"));
    }
}
