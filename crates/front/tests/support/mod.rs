//! What the integration tests of the front ends share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;

use lockstep_front::nbd::{
    ExportDescription, ExportRefusal, Exports, Listen, NbdLimits, NbdServer,
};
use lockstep_front::ram::RamVolume;
use lockstep_io::port::{PortSink, VolumePort};

/// Says why a test does not run. In CI a missing prerequisite is a failure.
pub fn skip(what: &str) {
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "in CI nothing may be missing: {what}"
    );
    eprintln!("SKIPPED: {what}");
}

/// Whether all programs can be run; if not, the test is skipped by their names.
pub fn have_programs(names: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |name: &&&str| {
        let extra = [PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")];
        std::env::split_paths(&path)
            .chain(extra)
            .any(|dir| dir.join(name).is_file())
    };
    let missing: Vec<&&str> = names.iter().filter(|name| !found(name)).collect();
    if missing.is_empty() {
        return true;
    }
    skip(&format!("programs not found: {missing:?}"));
    false
}

/// Whether this process may make FUSE files and loop devices; if not, the test is skipped.
pub fn can_use_devices() -> bool {
    if !rustix::process::geteuid().is_root() {
        skip("not root, and the mountable device needs it");
        return false;
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if std::fs::File::options()
            .read(true)
            .write(true)
            .open(device)
            .is_err()
        {
            skip(&format!("{device} cannot be opened"));
            return false;
        }
    }
    true
}

/// Runs a program that must succeed and returns its standard output.
pub fn run(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {args:?}: {}\n{out}\n{err}",
        output.status
    );
    out
}

/// Runs a program, whatever comes of it.
pub fn output(program: &str, args: &[&str]) -> Output {
    // fio and qemu leave files in the working directory if they have to.
    Command::new(program)
        .args(args)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/bin")
        .current_dir(std::env::temp_dir())
        .output()
        .unwrap_or_else(|error| panic!("{program} does not start: {error}"))
}

/// Volumes in memory as exports.
pub struct RamExports(pub BTreeMap<String, RamVolume>);

impl Exports for RamExports {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn describe(&self, name: &str) -> Result<ExportDescription, ExportRefusal> {
        let volume = self.find(name)?;
        let properties = volume.properties();
        Ok(ExportDescription {
            properties,
            text: format!("volume {name}"),
        })
    }

    fn connect(
        &self,
        name: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal> {
        Ok(self.find(name)?.port(sink))
    }
}

impl RamExports {
    fn find(&self, name: &str) -> Result<&RamVolume, ExportRefusal> {
        let text = || format!("{name}: no such volume; it has the form resource/volume");
        self.0
            .get(name)
            .ok_or_else(|| ExportRefusal::Unknown(text()))
    }
}

/// A server over volumes in memory on a unix socket in a directory of its own.
pub struct TestServer {
    pub server: NbdServer,
    pub socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl TestServer {
    pub fn start(volumes: &[(&str, &RamVolume)], limits: NbdLimits) -> TestServer {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd.sock");
        let exports = volumes
            .iter()
            .map(|(name, volume)| (name.to_string(), (*volume).clone()));
        let exports = Arc::new(RamExports(exports.collect()));
        let listen = [
            Listen::Unix(socket.clone()),
            Listen::Tcp(([127, 0, 0, 1], 0).into()),
        ];
        let server = NbdServer::start(exports, &listen, limits).unwrap();
        TestServer {
            server,
            socket,
            _dir: dir,
        }
    }

    /// The export's address for qemu, libnbd and fio.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// The export's address over TCP.
    pub fn tcp_uri(&self, export: &str) -> String {
        let tcp = self
            .server
            .addresses()
            .iter()
            .find_map(|listen| match listen {
                Listen::Tcp(address) => Some(*address),
                Listen::Unix(_) => None,
            });
        format!("nbd://{}/{export}", tcp.unwrap())
    }
}
