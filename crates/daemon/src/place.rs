//! Where a node's files are: control socket, lock, devices, configuration.

use std::path::{Path, PathBuf};

/// Directory of a node when nothing else is said.
pub const DEFAULT_DIR: &str = "/run/lockstep";

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

    /// Links to the mountable devices.
    pub fn dev_dir(&self) -> PathBuf {
        self.dir.join("dev")
    }

    /// Log of a daemon that was started in the background.
    pub fn log_file(&self) -> PathBuf {
        self.dir.join("lockstepd.log")
    }

    /// The configuration file that handlers read: `drbd.conf` of the directory, or `/etc`'s.
    pub fn config_file(&self) -> PathBuf {
        if self.is_default() {
            PathBuf::from("/etc/drbd.conf")
        } else {
            self.dir.join("drbd.conf")
        }
    }
}
