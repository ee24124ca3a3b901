//! The border between a volume and its users: what NBD, FUSE and the like see of a volume.
//!
//! A front end opens a [`VolumePort`], takes buffers from its pool, submits requests and gets
//! [`PortEvent`]s in its [`PortSink`]. A port may be used on any thread: on the shard's own thread
//! submitting costs no system call, elsewhere one wake-up per [`VolumePort::kick`]. The port decides
//! nothing: range, role and alignment are checked by the core, which completes with an error.

use lockstep_core::command::CommandError;
use lockstep_core::event::{RequestError, RequestId, RequestKind};
use lockstep_format::units::Sector;

use crate::pool::IoBuf;

/// What a front end tells its users about a volume. Numbers of a volume without data are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeProperties {
    /// Usable size in bytes; 0 while unknown.
    pub size_bytes: u64,
    /// Smallest unit of a request: 512 or 4096.
    pub logical_block_bytes: u32,
    /// Best unit of a request in bytes.
    pub physical_block_bytes: u32,
    /// Discards are passed on.
    pub discard: bool,
    /// Discard granularity in bytes; 0 without discards.
    pub discard_granularity_bytes: u32,
    /// Largest read or write in bytes.
    pub max_request_bytes: u32,
    /// Largest discard or zero-out in bytes.
    pub max_discard_bytes: u32,
    /// A read has a chance now (this node is Primary and some node has the data).
    pub readable: bool,
    /// A write has a chance now.
    pub writable: bool,
    /// Not Primary here, and another node may be changing the data: it is Primary, or this node is
    /// the target of a resync.
    pub changed_elsewhere: bool,
}

/// One request of a front end, with the memory it needs.
#[derive(Debug)]
pub struct PortRequest {
    /// Returned with the completion; unique among this port's requests in flight.
    pub id: RequestId,
    /// What to do.
    pub kind: RequestKind,
    /// First sector.
    pub sector: Sector,
    /// Length in bytes; 0 only for a flush.
    pub len: u32,
    /// Source of a write, destination of a read; `None` for the rest. Owned by the volume until
    /// the completion.
    pub buf: Option<IoBuf>,
    /// First byte of the payload within `buf`, a multiple of 4096 (or of the logical block size if
    /// the buffer's user cannot do better).
    pub buf_offset: u32,
}

/// A request is done.
#[derive(Debug)]
pub struct Completion {
    /// The request.
    pub id: RequestId,
    /// Whether it worked.
    pub result: Result<(), RequestError>,
    /// The request's buffer. Always there for a read; `None` for a write whose bytes are still on
    /// their way to a peer (protocol A and B, or a slow second peer): take a new one from the pool.
    pub buf: Option<IoBuf>,
}

/// What a port tells its user. Called on the shard's thread.
#[derive(Debug)]
pub enum PortEvent {
    /// A request is done.
    Done(Completion),
    /// The answer to [`VolumePort::open`].
    Opened {
        /// The id given to `open`.
        id: RequestId,
        /// The error carries DRBD's return code and a text for the user.
        result: Result<(), CommandError>,
    },
    /// Size or abilities changed. Also sent once right after the port came into being.
    Changed(VolumeProperties),
    /// The volume was removed: every request in flight has completed, no other event follows.
    Gone,
}

/// Receives a port's events on the shard's thread. It must be quick and never block.
pub trait PortSink: Send {
    /// Takes one event.
    fn event(&mut self, event: PortEvent);

    /// The shard has delivered what this turn brought: wake whoever waits, once.
    fn batch_end(&mut self) {}
}

/// Why a request was not taken. The request comes back unchanged.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The volume has been removed or the shard has ended.
    #[error("the volume is gone")]
    Gone(PortRequest),
    /// Too many requests of this port are in flight; try again after a completion.
    #[error("the volume has {limit} requests in flight, its limit")]
    Full {
        /// The request.
        request: PortRequest,
        /// The limit.
        limit: usize,
    },
}

/// A front end's access to one volume.
pub trait VolumePort {
    /// The last known properties; changes are announced by [`PortEvent::Changed`].
    fn properties(&self) -> VolumeProperties;

    /// A buffer of at least `len` bytes, aligned to 4 KiB; `None` if the pool is used up, then a
    /// completion of any request brings memory back. Its content is undefined.
    fn alloc(&self, len: usize) -> Option<IoBuf>;

    /// Queues a request. It runs at the next [`Self::kick`] at the latest.
    fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError>;

    /// Makes sure that everything submitted is seen. Call once per batch.
    fn kick(&mut self);

    /// Opens the volume (with auto-promote: promotes the resource if `write`). The answer is
    /// [`PortEvent::Opened`]. Requests before it may fail.
    fn open(&mut self, id: RequestId, write: bool);

    /// Undoes one successful `open` with the same `write`. Without an answer.
    fn close(&mut self, write: bool);
}
