//! A small NBD client: enough to write, read and flush a volume without root.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

const MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// Fixed newstyle, no padding after the export's data.
const CLIENT_FLAGS: u32 = 0b11;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLAG_FUA: u16 = 1;

/// Longest option reply that is read, in bytes.
const MAX_REPLY_LEN: usize = 1 << 16;
/// A volume that answers nothing for so long is given up.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to one volume.
pub(super) struct NbdClient {
    stream: UnixStream,
    size_bytes: u64,
    cookie: u64,
}

impl NbdClient {
    /// Opens the export `RESOURCE/VOLUME` of a node's socket.
    pub(super) fn connect(socket: &Path, export: &str) -> anyhow::Result<NbdClient> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut client = NbdClient {
            stream,
            size_bytes: 0,
            cookie: 0,
        };
        ensure!(
            client.u64()? == MAGIC && client.u64()? == OPTION_MAGIC,
            "{} is no NBD server",
            socket.display()
        );
        client.bytes(2)?;
        let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPTION_GO.to_be_bytes());
        hello.extend((export.len() as u32 + 6).to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        // No information is asked for; that about the export comes anyway.
        hello.extend(0u16.to_be_bytes());
        client.stream.write_all(&hello)?;
        loop {
            ensure!(client.u64()? == OPTION_REPLY_MAGIC, "no option reply");
            client.bytes(4)?;
            let kind = client.u32()?;
            let len = client.u32()? as usize;
            ensure!(len <= MAX_REPLY_LEN, "an option reply of {len} bytes");
            let data = client.bytes(len)?;
            match kind {
                REPLY_ACK => return Ok(client),
                REPLY_INFO if data.len() >= 10 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                    let size = data[2..10].try_into().expect("eight bytes");
                    client.size_bytes = u64::from_be_bytes(size);
                }
                REPLY_INFO => {}
                other => bail!(
                    "the export {export} is refused ({other:#x}): {}",
                    String::from_utf8_lossy(&data)
                ),
            }
        }
    }

    /// The volume's size.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Writes, durable when it returns (force unit access).
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> anyhow::Result<()> {
        self.request(WRITE, FLAG_FUA, offset, data.len(), data)
    }

    /// Reads.
    pub(super) fn read(&mut self, offset: u64, len: usize) -> anyhow::Result<Vec<u8>> {
        self.request(READ, 0, offset, len, &[])?;
        Ok(self.bytes(len)?)
    }

    fn request(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: usize,
        data: &[u8],
    ) -> anyhow::Result<()> {
        self.cookie += 1;
        let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
        message.extend(flags.to_be_bytes());
        message.extend(command.to_be_bytes());
        message.extend(self.cookie.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend((len as u32).to_be_bytes());
        message.extend(data);
        self.stream.write_all(&message)?;
        ensure!(self.u32()? == REPLY_MAGIC, "no reply");
        let error = self.u32()?;
        ensure!(self.u64()? == self.cookie, "a reply to nothing");
        ensure!(error == 0, "NBD error {error} at byte {offset}");
        Ok(())
    }

    fn bytes(&mut self, len: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> std::io::Result<u32> {
        let mut bytes = [0; 4];
        self.stream.read_exact(&mut bytes)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn u64(&mut self) -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        self.stream.read_exact(&mut bytes)?;
        Ok(u64::from_be_bytes(bytes))
    }
}
