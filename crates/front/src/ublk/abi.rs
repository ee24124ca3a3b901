//! Numbers and layouts of the kernel's ublk interface (`linux/ublk_cmd.h`), as far as they are used.
//!
//! All numbers are in the machine's byte order.

/// Commands on `/dev/ublk-control`, as ioctl-like numbers (kernel 6.4 and newer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Reads a device's [`DeviceInfo`].
    GetInfo,
    /// Makes a device without a disk; reads and writes a [`DeviceInfo`].
    Add,
    /// Removes a device, and waits until nobody has it open.
    Delete,
    /// Makes the disk, once all tags are fetched.
    Start,
    /// Removes the disk; what waits in it fails.
    Stop,
    /// Reads a [`Parameters`].
    SetParameters,
    /// A new server comes for a device whose server has died.
    StartRecovery,
    /// It has fetched all tags: requests go on.
    EndRecovery,
    /// As [`Command::Delete`], without the wait (kernel 6.9).
    DeleteLater,
}

impl Command {
    /// The number that the kernel knows.
    pub(super) const fn number(self) -> u32 {
        const READ: u32 = 2;
        const BOTH: u32 = 3;
        let (direction, number) = match self {
            Command::GetInfo => (READ, 0x02),
            Command::Add => (BOTH, 0x04),
            Command::Delete => (BOTH, 0x05),
            Command::Start => (BOTH, 0x06),
            Command::Stop => (BOTH, 0x07),
            Command::SetParameters => (BOTH, 0x08),
            Command::StartRecovery => (BOTH, 0x10),
            Command::EndRecovery => (BOTH, 0x11),
            Command::DeleteLater => (READ, 0x14),
        };
        encoded(direction, CONTROL_LEN as u32, number)
    }
}

/// Commands on `/dev/ublkcN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagCommand {
    /// The tag is free for a first request.
    Fetch,
    /// The tag's request is done; the tag is free for the next one.
    CommitAndFetch,
    /// The payload of the tag's write is wanted in a buffer.
    GetData,
}

impl TagCommand {
    /// The number that the kernel knows.
    pub(super) const fn number(self) -> u32 {
        let number = match self {
            TagCommand::Fetch => 0x20,
            TagCommand::CommitAndFetch => 0x21,
            TagCommand::GetData => 0x22,
        };
        encoded(3, 16, number)
    }
}

const fn encoded(direction: u32, len: u32, number: u32) -> u32 {
    direction << 30 | len << 16 | (b'u' as u32) << 8 | number
}

/// Result of a tag's command: a request has come, or a write's payload.
pub(super) const RESULT_OK: i32 = 0;
/// Result of a tag's command: a write has come, and its payload has to be asked for.
pub(super) const RESULT_NEED_DATA: i32 = 1;

/// A write's payload comes only when asked for, into memory that is named then.
pub(super) const FLAG_NEED_GET_DATA: u64 = 1 << 2;
/// The device outlives its server.
pub(super) const FLAG_RECOVERY: u64 = 1 << 3;
/// What a dead server had begun is given to the next one.
pub(super) const FLAG_REISSUE: u64 = 1 << 4;
/// Commands are numbered as ioctls are.
pub(super) const FLAG_IOCTL_NUMBERS: u64 = 1 << 6;

/// A device's state: its server has died.
pub(super) const STATE_QUIESCED: u16 = 2;

/// Operations of a request.
pub(super) mod op {
    pub(in crate::ublk) const READ: u8 = 0;
    pub(in crate::ublk) const WRITE: u8 = 1;
    pub(in crate::ublk) const FLUSH: u8 = 2;
    pub(in crate::ublk) const DISCARD: u8 = 3;
    pub(in crate::ublk) const WRITE_ZEROES: u8 = 5;
}

/// Flags of a request: durable at its completion.
pub(super) const REQUEST_FUA: u32 = 1 << 13;
/// Flags of a request: zeroes that must stay allocated.
pub(super) const REQUEST_NO_UNMAP: u32 = 1 << 15;

/// Length of a command on the control device.
pub(super) const CONTROL_LEN: usize = 32;

/// Encodes a command on the control device: its memory at `address`, and a number.
pub(super) fn control(device: u32, len: usize, address: u64, number: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[..4].copy_from_slice(&device.to_ne_bytes());
    bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    bytes[6..8].copy_from_slice(&(len as u16).to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes[16..24].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// Encodes a command for a tag of queue 0.
pub(super) fn tag_command(tag: u16, result: i32, address: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes
}

/// What the kernel has of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceInfo {
    /// Requests in flight at most.
    pub(super) depth: u16,
    /// Its state.
    pub(super) state: u16,
    /// Largest payload in bytes.
    pub(super) max_bytes: u32,
    /// Its number; `u32::MAX` asks for any.
    pub(super) device: u32,
    /// What it can do.
    pub(super) flags: u64,
    /// Kept for the server: names the node.
    pub(super) owner: u64,
}

impl DeviceInfo {
    /// Length of the encoded form.
    pub(super) const LEN: usize = 64;

    /// As the kernel reads it, with one queue.
    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..2].copy_from_slice(&1u16.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.max_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.device.to_ne_bytes());
        bytes[16..20].copy_from_slice(&(-1i32).to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.owner.to_ne_bytes());
        bytes
    }

    /// From what the kernel wrote.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> DeviceInfo {
        DeviceInfo {
            depth: number16(bytes, 2),
            state: number16(bytes, 4),
            max_bytes: number32(bytes, 8),
            device: number32(bytes, 12),
            flags: number64(bytes, 24),
            owner: number64(bytes, 32),
        }
    }
}

/// What a device's disk looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameters {
    /// Logical block size in bytes.
    pub(super) logical_bytes: u32,
    /// Physical block size in bytes.
    pub(super) physical_bytes: u32,
    /// Largest payload in bytes.
    pub(super) max_bytes: u32,
    /// Size in sectors of 512 bytes.
    pub(super) sectors: u64,
    /// Granularity of discards in bytes.
    pub(super) granularity_bytes: u32,
    /// Largest discard in sectors; 0 without discards.
    pub(super) discard_sectors: u32,
    /// Largest write of zeroes in sectors.
    pub(super) zeroes_sectors: u32,
}

impl Parameters {
    /// Length of the encoded form.
    pub(super) const LEN: usize = 60;

    /// As the kernel reads it.
    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        // Parts: the basic one, discards.
        const PARTS: u32 = 1 | 2;
        // A volatile cache, and force unit access.
        const CACHE: u32 = 4 | 8;
        let mut bytes = [0; Self::LEN];
        let mut put = |at: usize, value: u32| {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        };
        put(0, Self::LEN as u32);
        put(4, PARTS);
        put(8, CACHE);
        put(16, self.max_bytes / 512);
        put(44, self.granularity_bytes);
        put(48, self.discard_sectors);
        put(52, self.zeroes_sectors);
        let physical = self.physical_bytes.trailing_zeros() as u8;
        bytes[12] = self.logical_bytes.trailing_zeros() as u8;
        bytes[13] = physical;
        bytes[14] = physical;
        bytes[15] = physical;
        bytes[24..32].copy_from_slice(&self.sectors.to_ne_bytes());
        // Segments of one discard.
        bytes[56..58].copy_from_slice(&1u16.to_ne_bytes());
        bytes
    }
}

/// A request, as the kernel describes it in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    /// Operation.
    pub(super) op: u8,
    /// Flags.
    pub(super) flags: u32,
    /// Length in sectors.
    pub(super) sectors: u32,
    /// First sector.
    pub(super) start: u64,
}

impl Description {
    /// Length in shared memory.
    pub(super) const LEN: usize = 24;

    /// From shared memory.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Description {
        let word = number32(bytes, 0);
        Description {
            op: word as u8,
            flags: word & !0xff,
            sectors: number32(bytes, 4),
            start: number64(bytes, 8),
        }
    }
}

fn number16(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn number32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn number64(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_kernels_numbers() {
        assert_eq!(Command::GetInfo.number(), 0x8020_7502);
        assert_eq!(Command::Add.number(), 0xc020_7504);
        assert_eq!(TagCommand::CommitAndFetch.number(), 0xc010_7521);
    }

    #[test]
    fn a_device_comes_back_from_its_bytes() {
        let info = DeviceInfo {
            depth: 128,
            state: STATE_QUIESCED,
            max_bytes: 1 << 20,
            device: 7,
            flags: FLAG_RECOVERY | FLAG_REISSUE,
            owner: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(DeviceInfo::decode(&info.encode()), info);
    }

    #[test]
    fn a_requests_flags_are_apart_from_its_operation() {
        let mut bytes = [0; Description::LEN];
        bytes[..4].copy_from_slice(&(REQUEST_FUA | u32::from(op::WRITE)).to_ne_bytes());
        bytes[4..8].copy_from_slice(&8u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&16u64.to_ne_bytes());
        let description = Description::decode(&bytes);
        assert_eq!(
            (description.op, description.flags),
            (op::WRITE, REQUEST_FUA)
        );
        assert_eq!((description.sectors, description.start), (8, 16));
    }
}
