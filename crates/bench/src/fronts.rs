//! The front ends: over a volume in memory beside qemu-storage-daemon's, and over a replicated
//! pair beside the floor.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstep_front::BlockAccess;
use lockstep_front::device::{DeviceSpec, Discards, MountedDevice, Opening};
use lockstep_front::nbd::{
    ExportDescription, ExportRefusal, Exports, Listen, NbdLimits, NbdServer,
};
use lockstep_front::ram::{RamVolume, Runs};
use lockstep_io::port::{PortEvent, PortSink, VolumePort, VolumeProperties};

use crate::engine::Opener;
use crate::nbd;
use crate::raw::{self, Direction};
use crate::stats::Figure;

/// The export's name, the same for every server.
const EXPORT: &str = "bench/0";
/// How long a server may take to come up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A volume that front ends can serve.
#[derive(Clone)]
pub enum Volume {
    /// In memory, for the front end alone.
    Ram(RamVolume),
    /// The Primary of a pair.
    Pair(Opener),
}

struct Silent;

impl PortSink for Silent {
    fn event(&mut self, _: PortEvent) {}
}

impl Volume {
    /// In memory.
    pub fn ram(bytes: u64) -> io::Result<Volume> {
        Ok(Volume::Ram(RamVolume::new(bytes, Runs::OwnThread)?))
    }

    fn port(&self, sink: Box<dyn PortSink>) -> io::Result<Box<dyn VolumePort + Send>> {
        match self {
            Volume::Ram(volume) => Ok(volume.port(sink)),
            Volume::Pair(opener) => opener.port(sink),
        }
    }

    fn properties(&self) -> io::Result<VolumeProperties> {
        Ok(self.port(Box::new(Silent))?.properties())
    }
}

struct One(Volume);

impl Exports for One {
    fn names(&self) -> Vec<String> {
        vec![EXPORT.to_owned()]
    }

    fn describe(&self, _: &str) -> Result<ExportDescription, ExportRefusal> {
        let properties = self
            .0
            .properties()
            .map_err(|error| ExportRefusal::Unknown(error.to_string()))?;
        Ok(ExportDescription {
            properties,
            text: String::new(),
        })
    }

    fn connect(
        &self,
        _: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal> {
        self.0
            .port(sink)
            .map_err(|error| ExportRefusal::Unknown(error.to_string()))
    }
}

/// Something that can be loaded.
pub struct Target {
    // Fields are dropped in this order: the client before what it uses.
    client: Client,
    _keep: Vec<Keep>,
    bytes: u64,
}

enum Client {
    Nbd(UnixStream),
    Device(std::fs::File),
}

/// What must live as long as the target.
#[expect(dead_code, reason = "they are held for what their end does")]
enum Keep {
    Server(Stopped),
    Device(Detached),
    Loop(LoopDevice),
    Qemu(Qemu),
}

struct Stopped(Option<NbdServer>);

impl Drop for Stopped {
    fn drop(&mut self) {
        if let Some(server) = self.0.take() {
            server.stop();
        }
    }
}

struct Detached(Option<MountedDevice>);

impl Drop for Detached {
    fn drop(&mut self) {
        if let Some(device) = self.0.take() {
            // A device that somebody else has opened goes with its last user.
            if let Err((device, _)) = device.detach() {
                device.abandon();
            }
        }
    }
}

impl Target {
    /// Our NBD server.
    pub fn nbd(volume: &Volume, directory: &Path) -> io::Result<Target> {
        let bytes = volume.properties()?.size_bytes;
        let socket = directory.join("nbd.sock");
        let listen = [Listen::Unix(socket.clone())];
        let exports = Arc::new(One(volume.clone()));
        let server = NbdServer::start(exports, &listen, NbdLimits::default())
            .map_err(|error| io::Error::other(error.to_string()))?;
        let keep = vec![Keep::Server(Stopped(Some(server)))];
        Ok(Target {
            client: Client::Nbd(nbd::connect(&socket, EXPORT)?),
            _keep: keep,
            bytes,
        })
    }

    /// Our block device. Needs root.
    pub fn device(volume: &Volume) -> io::Result<Target> {
        let properties = volume.properties()?;
        let spec = DeviceSpec {
            owner: format!("b{}", std::process::id()),
            name: EXPORT.to_owned(),
            properties,
            links: Vec::new(),
            readers: 1,
            access: BlockAccess::ReadWrite,
            opening: Opening::Never,
            discards: Discards::AsVolume,
        };
        let mut lost = None;
        let device = MountedDevice::create(&spec, &mut |sink| match volume.port(sink) {
            Ok(port) => port,
            Err(error) => {
                lost = Some(error);
                // A volume in memory of no use stands in until the error is told.
                RamVolume::new(1 << 20, Runs::OwnThread)
                    .expect("a mebibyte of memory")
                    .port(Box::new(Silent))
            }
        })
        .map_err(|error| io::Error::other(error.to_string()))?;
        let path = device.path();
        let keep = vec![Keep::Device(Detached(Some(device)))];
        match lost {
            Some(error) => Err(error),
            None => Ok(Target {
                client: Client::Device(open(&path)?),
                _keep: keep,
                bytes: properties.size_bytes,
            }),
        }
    }

    /// qemu-storage-daemon's NBD server over a volume that keeps nothing.
    pub fn qemu_nbd(bytes: u64, directory: &Path) -> io::Result<Target> {
        let socket = directory.join("qemu.sock");
        let server = format!("addr.type=unix,addr.path={}", socket.display());
        let export = format!("type=nbd,id=e,node-name=disk,name={EXPORT},writable=on");
        let qemu = Qemu::start(bytes, &["--nbd-server", &server, "--export", &export])?;
        let stream = wait_for(|| nbd::connect(&socket, EXPORT))?;
        Ok(Target {
            client: Client::Nbd(stream),
            _keep: vec![Keep::Qemu(qemu)],
            bytes,
        })
    }

    /// qemu-storage-daemon's FUSE export with a loop device on it. Needs root.
    pub fn qemu_device(bytes: u64, directory: &Path) -> io::Result<Target> {
        let file = directory.join("qemu.fuse");
        std::fs::write(&file, "")?;
        let export = format!(
            "type=fuse,id=e,node-name=disk,mountpoint={},writable=on",
            file.display()
        );
        let qemu = Qemu::start(bytes, &["--export", &export])?;
        wait_for(|| match std::fs::metadata(&file)?.len() {
            len if len == bytes => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        })?;
        let bound = LoopDevice::bind(&file)?;
        let client = Client::Device(open(&bound.path)?);
        Ok(Target {
            client,
            _keep: vec![Keep::Loop(bound), Keep::Qemu(qemu)],
            bytes,
        })
    }

    /// Random 4 KiB operations.
    pub fn measure(
        &mut self,
        direction: Direction,
        qd: usize,
        time: Duration,
    ) -> io::Result<Figure> {
        match &mut self.client {
            Client::Nbd(stream) => nbd::measure(stream, self.bytes, direction, qd, time),
            Client::Device(file) => raw::measure(file, self.bytes, direction, qd, time),
        }
    }
}

/// Devices can be made here.
pub fn can_make_devices() -> bool {
    rustix::process::geteuid().is_root()
        && Path::new("/dev/fuse").exists()
        && Path::new("/dev/loop-control").exists()
}

/// qemu-storage-daemon is installed.
pub fn has_qemu() -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(QEMU).exists()))
}

const QEMU: &str = "qemu-storage-daemon";

struct Qemu(Child);

impl Qemu {
    fn start(bytes: u64, args: &[&str]) -> io::Result<Qemu> {
        let disk = format!("null-co,node-name=disk,size={bytes},read-zeroes=on");
        let child = Command::new(QEMU)
            .args(["--blockdev", &disk])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Qemu(child))
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // By this it ends in order and takes its mount away.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.0.wait();
    }
}

struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    fn bind(file: &Path) -> io::Result<LoopDevice> {
        let output = Command::new("losetup")
            .args(["--direct-io=on", "--show", "--find"])
            .arg(file)
            .output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(io::Error::other(text));
        }
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(LoopDevice { path: path.into() })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A device that stays names its file in `losetup --list`.
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
            .status();
    }
}

fn open(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
}

fn wait_for<T>(mut ready: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begin = Instant::now();
    loop {
        match ready() {
            Err(error) if begin.elapsed() > PATIENCE => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            done => return done,
        }
    }
}
