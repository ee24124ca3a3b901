//! NBD: the volume for every client that speaks it (QEMU, libnbd, nbdkit tools, fio, the kernel).

mod handshake;
mod proto;
mod server;
mod session;

pub use server::{
    ExportDescription, ExportRefusal, Exports, Listen, NbdLimits, NbdServer, StartError,
};
