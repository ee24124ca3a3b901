//! Serves a volume in memory over NBD and, as root, as a block device, to measure the front ends
//! alone: `cargo run --release -p lockstep-front --example serve_ram -- SOCKET inline|thread READERS`.
//! It ends when its standard input ends.

use std::io::Read;
use std::sync::Arc;

use lockstep_front::BlockAccess;
use lockstep_front::device::{DeviceSpec, Discards, MountedDevice, Opening};
use lockstep_front::nbd::{
    ExportDescription, ExportRefusal, Exports, Listen, NbdLimits, NbdServer,
};
use lockstep_front::ram::{RamVolume, Runs};
use lockstep_io::port::{PortSink, VolumePort};

struct One(RamVolume);

impl Exports for One {
    fn names(&self) -> Vec<String> {
        vec!["ram/0".into()]
    }

    fn describe(&self, _name: &str) -> Result<ExportDescription, ExportRefusal> {
        Ok(ExportDescription {
            properties: self.0.properties(),
            text: String::new(),
        })
    }

    fn connect(
        &self,
        _name: &str,
        sink: Box<dyn PortSink>,
    ) -> Result<Box<dyn VolumePort + Send>, ExportRefusal> {
        Ok(self.0.port(sink))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, socket, runs, readers] = &args[..] else {
        return Err("needed: SOCKET inline|thread READERS (0: no block device)".into());
    };
    let runs = if runs == "inline" {
        Runs::Inline
    } else {
        Runs::OwnThread
    };
    let volume = RamVolume::new(1 << 30, runs)?;
    let listen = [Listen::Unix(socket.into())];
    let server = NbdServer::start(Arc::new(One(volume.clone())), &listen, NbdLimits::default())?;
    let readers: usize = readers.parse()?;
    let device = match readers {
        0 => None,
        readers => {
            let spec = DeviceSpec {
                owner: format!("ex{}", std::process::id()),
                name: "ram/0".into(),
                properties: volume.properties(),
                links: Vec::new(),
                readers,
                access: BlockAccess::ReadWrite,
                opening: Opening::Never,
                discards: Discards::AsVolume,
            };
            let device = MountedDevice::create(&spec, &mut |sink| volume.port(sink))?;
            println!("{}", device.path().display());
            Some(device)
        }
    };
    std::io::stdin().read_to_end(&mut Vec::new())?;
    if let Some(device) = device {
        device.detach().map_err(|(_, error)| error)?;
    }
    server.stop();
    Ok(())
}
