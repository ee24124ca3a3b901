//! The numbers and layouts of the kernel's FUSE protocol that a directory with one regular file
//! needs. Pure encode and decode over slices, in the machine's byte order, as the protocol wants it.

/// Length of a request's header.
pub(crate) const IN_HEADER_LEN: usize = 40;
/// Length of a reply's header.
pub(crate) const OUT_HEADER_LEN: usize = 16;
/// Header and arguments of a write; its payload starts here.
pub(crate) const WRITE_HEAD_LEN: usize = IN_HEADER_LEN + 40;
/// Major version of the protocol.
const MAJOR: u32 = 7;
/// The newest minor version whose structures are used here.
const MINOR_MAX: u32 = 40;
/// Length of the attributes of a node.
const ATTR_LEN: usize = 88;
/// The oldest kernel protocol that has all that is needed (64-byte INIT replies).
const MINOR_MIN: u32 = 31;
/// Bit of a request's number: the kernel repeats it after `notify_resend`.
pub(crate) const UNIQUE_RESEND: u64 = 1 << 63;
/// The node of the mount's root, a directory.
pub(crate) const ROOT_NODE: u64 = 1;
/// The node of the file in it.
const FILE_NODE: u64 = 2;
/// How long the kernel may believe in the file's name, in seconds: it never changes.
const NAME_VALID_S: u64 = 1 << 31;
/// How long the attributes are valid, in seconds; a resize says so by a notification.
const ATTRIBUTES_VALID_S: u64 = 3600;

/// Operations.
pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
}

/// Flags of INIT, both halves.
pub(crate) mod init_flag {
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    pub(crate) const ASYNC_DIO: u64 = 1 << 15;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const INIT_EXT: u64 = 1 << 30;
    pub(crate) const HAS_RESEND: u64 = 1 << 39;
}

/// Flags of the reply to OPEN.
mod open_flag {
    pub(super) const DIRECT_IO: u32 = 1 << 0;
    pub(super) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Modes of FALLOCATE.
pub(crate) mod fallocate_mode {
    pub(crate) const KEEP_SIZE: u32 = 0x01;
    pub(crate) const PUNCH_HOLE: u32 = 0x02;
    pub(crate) const ZERO_RANGE: u32 = 0x10;
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
}

impl InHeader {
    pub(crate) fn decode(bytes: &[u8]) -> Option<InHeader> {
        bytes.get(..IN_HEADER_LEN)?;
        Some(InHeader {
            len: u32_at(bytes, 0)?,
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
        })
    }
}

/// The kernel's INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InitIn {
    pub(crate) minor: u32,
    max_readahead: u32,
    pub(crate) flags: u64,
}

impl InitIn {
    /// Decodes the arguments of INIT, `None` if the kernel's protocol is too old or too new.
    pub(crate) fn decode(args: &[u8]) -> Option<InitIn> {
        let (major, minor) = (u32_at(args, 0)?, u32_at(args, 4)?);
        let low = u64::from(u32_at(args, 12)?);
        let high = if low & init_flag::INIT_EXT != 0 {
            u32_at(args, 16)?
        } else {
            0
        };
        (major == MAJOR && minor >= MINOR_MIN).then_some(InitIn {
            minor,
            max_readahead: u32_at(args, 8)?,
            flags: low | u64::from(high) << 32,
        })
    }
}

/// What is answered to INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InitOut {
    pub(crate) flags: u64,
    pub(crate) max_background: u16,
    pub(crate) congestion_threshold: u16,
    pub(crate) max_write: u32,
}

impl InitOut {
    pub(crate) fn encode(&self, init: &InitIn) -> [u8; 64] {
        let mut bytes = [0; 64];
        put_u32(&mut bytes, 0, MAJOR);
        put_u32(&mut bytes, 4, init.minor.min(MINOR_MAX));
        put_u32(&mut bytes, 8, init.max_readahead);
        put_u32(&mut bytes, 12, self.flags as u32);
        put_u16(&mut bytes, 16, self.max_background);
        put_u16(&mut bytes, 18, self.congestion_threshold);
        put_u32(&mut bytes, 20, self.max_write);
        put_u32(&mut bytes, 24, 1);
        put_u16(&mut bytes, 28, self.max_write.div_ceil(4096) as u16);
        put_u32(&mut bytes, 32, (self.flags >> 32) as u32);
        bytes
    }
}

/// The range of READ, WRITE or FALLOCATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The range of the arguments of READ or WRITE.
pub(crate) fn io_range(args: &[u8]) -> Option<Range> {
    Some(Range {
        offset: u64_at(args, 8)?,
        len: u64::from(u32_at(args, 16)?),
    })
}

/// The range and the mode of FALLOCATE.
pub(crate) fn fallocate(args: &[u8]) -> Option<(Range, u32)> {
    let range = Range {
        offset: u64_at(args, 8)?,
        len: u64_at(args, 16)?,
    };
    Some((range, u32_at(args, 24)?))
}

/// A reply's header. `error` is 0 or a positive `errno`.
pub(crate) fn out_header(unique: u64, error: i32, body_len: usize) -> [u8; OUT_HEADER_LEN] {
    let mut bytes = [0; OUT_HEADER_LEN];
    put_u32(&mut bytes, 0, (OUT_HEADER_LEN + body_len) as u32);
    put_u32(&mut bytes, 4, error.wrapping_neg() as u32);
    put_u64(&mut bytes, 8, unique);
    bytes
}

/// The reply to GETATTR of the file.
pub(crate) fn attr_out(size_bytes: u64, block_bytes: u32) -> [u8; 16 + ATTR_LEN] {
    let mut bytes = [0; 16 + ATTR_LEN];
    put_u64(&mut bytes, 0, ATTRIBUTES_VALID_S);
    bytes[16..].copy_from_slice(&file_attr(size_bytes, block_bytes));
    bytes
}

/// The reply to GETATTR of the directory: nobody but its owner may use it.
pub(crate) fn root_attr_out() -> [u8; 16 + ATTR_LEN] {
    let mut bytes = [0; 16 + ATTR_LEN];
    put_u64(&mut bytes, 0, ATTRIBUTES_VALID_S);
    put_u64(&mut bytes, 16, ROOT_NODE);
    put_u32(&mut bytes, 16 + 60, 0o040_700);
    put_u32(&mut bytes, 16 + 64, 2);
    bytes
}

/// The reply to LOOKUP of the file, by whatever name.
pub(crate) fn entry_out(size_bytes: u64, block_bytes: u32) -> [u8; 40 + ATTR_LEN] {
    let mut bytes = [0; 40 + ATTR_LEN];
    put_u64(&mut bytes, 0, FILE_NODE);
    put_u64(&mut bytes, 16, NAME_VALID_S);
    put_u64(&mut bytes, 24, ATTRIBUTES_VALID_S);
    bytes[40..].copy_from_slice(&file_attr(size_bytes, block_bytes));
    bytes
}

/// A regular file that nobody but its owner may use.
fn file_attr(size_bytes: u64, block_bytes: u32) -> [u8; ATTR_LEN] {
    let mut bytes = [0; ATTR_LEN];
    put_u64(&mut bytes, 0, FILE_NODE);
    put_u64(&mut bytes, 8, size_bytes);
    put_u64(&mut bytes, 16, size_bytes.div_ceil(512));
    put_u32(&mut bytes, 60, 0o100_600);
    put_u32(&mut bytes, 64, 1);
    put_u32(&mut bytes, 80, block_bytes);
    bytes
}

/// The reply to OPEN: direct I/O, and writes at the same time.
pub(crate) fn open_out() -> [u8; 16] {
    let mut bytes = [0; 16];
    put_u32(
        &mut bytes,
        8,
        open_flag::DIRECT_IO | open_flag::PARALLEL_DIRECT_WRITES,
    );
    bytes
}

/// The reply to WRITE.
pub(crate) fn write_out(len: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    put_u32(&mut bytes, 0, len);
    bytes
}

/// The reply to STATFS: a file system with blocks of this size.
pub(crate) fn statfs_out(size_bytes: u64, block_bytes: u32) -> [u8; 80] {
    let mut bytes = [0; 80];
    put_u64(&mut bytes, 0, size_bytes / 4096);
    put_u64(&mut bytes, 24, 1);
    put_u32(&mut bytes, 40, block_bytes);
    put_u32(&mut bytes, 44, 255);
    put_u32(&mut bytes, 48, 4096);
    bytes
}

/// Asks the kernel to repeat all requests that were read and not answered.
pub(crate) fn notify_resend() -> [u8; OUT_HEADER_LEN] {
    let mut bytes = [0; OUT_HEADER_LEN];
    put_u32(&mut bytes, 0, OUT_HEADER_LEN as u32);
    put_u32(&mut bytes, 4, 7);
    bytes
}

/// Tells the kernel that the file's attributes are out of date.
pub(crate) fn notify_attributes_changed() -> [u8; OUT_HEADER_LEN + 24] {
    let mut bytes = [0; OUT_HEADER_LEN + 24];
    put_u32(&mut bytes, 0, (OUT_HEADER_LEN + 24) as u32);
    put_u32(&mut bytes, 4, 2);
    put_u64(&mut bytes, 16, FILE_NODE);
    // A negative offset: attributes only.
    put_u64(&mut bytes, 24, u64::MAX);
    bytes
}

/// Tells the kernel that the file reaches up to `size_bytes`, by the byte that ends it. The kernel takes no
/// smaller size from this. What it asks for and gets while requests of the file complete it believes only
/// for that moment; this it keeps.
pub(crate) fn notify_grown(size_bytes: u64) -> [u8; OUT_HEADER_LEN + 24 + 1] {
    const LEN: usize = OUT_HEADER_LEN + 24 + 1;
    let mut bytes = [0; LEN];
    put_u32(&mut bytes, 0, LEN as u32);
    put_u32(&mut bytes, 4, 4);
    put_u64(&mut bytes, 16, FILE_NODE);
    // The byte goes into the file's page cache, which direct I/O does not use.
    put_u64(&mut bytes, 24, size_bytes.saturating_sub(1));
    put_u32(&mut bytes, 32, 1);
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_ne_bytes());
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_or_foreign_requests_are_not_decoded() {
        assert_eq!(InHeader::decode(&[0; 39]), None);
        assert_eq!(io_range(&[0; 19]), None);
        assert_eq!(fallocate(&[0; 27]), None);
        let mut init = [0u8; 64];
        put_u32(&mut init, 0, 7);
        put_u32(&mut init, 4, 12);
        assert_eq!(InitIn::decode(&init), None, "too old");
        put_u32(&mut init, 4, 45);
        put_u32(&mut init, 12, 1 << 30);
        put_u32(&mut init, 16, 1 << 7);
        let decoded = InitIn::decode(&init).unwrap();
        assert_eq!(decoded.flags, init_flag::INIT_EXT | init_flag::HAS_RESEND);
    }

    #[test]
    fn an_error_reply_carries_the_negative_number() {
        let bytes = out_header(5, 5, 0);
        assert_eq!(i32::from_ne_bytes(bytes[4..8].try_into().unwrap()), -5);
        assert_eq!(u32::from_ne_bytes(bytes[..4].try_into().unwrap()), 16);
    }
}
