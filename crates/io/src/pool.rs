//! Payload memory of a shard: one mapping, cut into aligned blocks by a buddy allocator.
//!
//! [`BufferPool`] is the memory; any thread may take an [`IoBuf`] (the only handle, readable and
//! writable) from it. [`BufRef`] is the counted handle that several operations in flight share.
//! Nothing here allocates after the pool was made. Names for the core live in `table`.
//!
//! Cost of one 4 KiB block, taken and given back: two uncontended locks and two atomic additions.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of every block in bytes, and the smallest block.
pub const BLOCK_BYTES: usize = 4096;
/// Largest block in bytes: 1 MiB of payload and a page of headers before it fit.
pub const BLOCK_BYTES_MAX: usize = BLOCK_BYTES << MAX_ORDER;

const MAX_ORDER: u8 = 9;
const NOT_FREE: u8 = 0xFF;
const NIL: u32 = u32::MAX;
/// Free 4 KiB blocks that are kept apart instead of being merged with their neighbours.
const QUICK_BLOCKS: usize = 512;

/// For whom a block is taken. Received packets may use the whole pool, everything else leaves
/// [`BufferPool::reserve_bytes`] free. What was received drains without the network, so two nodes
/// whose pools are full of packets for each other cannot block each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Payload of a packet that arrived, and metadata.
    Receive,
    /// Front ends' requests, reads for peers, resync.
    Ordinary,
}

/// A shard's payload memory. Cloning gives another handle on the same memory.
#[derive(Clone, Debug)]
pub struct BufferPool {
    inner: Arc<PoolInner>,
}

#[derive(Debug)]
struct PoolInner {
    base: NonNull<u8>,
    pages: usize,
    reserve_pages: usize,
    free_pages: AtomicUsize,
    frees: AtomicU64,
    refs: Box<[AtomicU32]>,
    buddy: Mutex<Buddy>,
}

// SAFETY: `base` points to a private mapping that lives as long as the value; the blocks in it are
// handed out disjointly by `buddy`, which a mutex guards.
unsafe impl Send for PoolInner {}
// SAFETY: as above; shared access goes through atomics and the mutex only.
unsafe impl Sync for PoolInner {}

impl BufferPool {
    /// Maps a pool of at least `bytes`, of which `reserve_bytes` are kept for [`Claim::Receive`].
    /// Memory is taken from the system when a block is first touched.
    pub fn new(bytes: usize, reserve_bytes: usize) -> std::io::Result<BufferPool> {
        let pages = bytes.div_ceil(BLOCK_BYTES).max(1);
        let too_large = || std::io::Error::from_raw_os_error(libc::ENOMEM);
        let len = pages.checked_mul(BLOCK_BYTES).ok_or_else(too_large)?;
        if pages > u32::MAX as usize / 2 {
            return Err(too_large());
        }
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no
        // existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).expect("mmap without a hint never gives page 0");
        let inner = PoolInner {
            base,
            pages,
            reserve_pages: reserve_bytes.div_ceil(BLOCK_BYTES).min(pages),
            free_pages: AtomicUsize::new(pages),
            frees: AtomicU64::new(0),
            refs: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            buddy: Mutex::new(Buddy::new(pages)),
        };
        Ok(BufferPool {
            inner: Arc::new(inner),
        })
    }

    /// A block of at least `len` bytes, `None` if the pool is used up (or `len` exceeds
    /// [`BLOCK_BYTES_MAX`]). The content is undefined but never another process's.
    pub fn alloc(&self, len: usize, claim: Claim) -> Option<IoBuf> {
        if len > BLOCK_BYTES_MAX {
            return None;
        }
        let order = order_for(len);
        let pages = 1usize << order;
        let floor = match claim {
            Claim::Receive => 0,
            Claim::Ordinary => self.inner.reserve_pages,
        };
        if self.inner.free_pages.load(Ordering::Relaxed) < floor + pages {
            return None;
        }
        let page = self.inner.lock().alloc(order)?;
        self.inner.free_pages.fetch_sub(pages, Ordering::Relaxed);
        self.inner.refs[page as usize].store(1, Ordering::Relaxed);
        // SAFETY: the pointer comes from a live `Arc`; every block in use holds one count, which
        // `Block::drop_last` gives back.
        let pool = unsafe {
            let raw = Arc::as_ptr(&self.inner);
            Arc::increment_strong_count(raw);
            NonNull::new_unchecked(raw.cast_mut())
        };
        Some(IoBuf {
            block: Block { pool, page, order },
        })
    }

    /// Bytes in no block.
    pub fn free_bytes(&self) -> usize {
        self.inner.free_pages.load(Ordering::Relaxed) * BLOCK_BYTES
    }

    /// All bytes of the pool.
    pub fn total_bytes(&self) -> usize {
        self.inner.pages * BLOCK_BYTES
    }

    /// Bytes that only [`Claim::Receive`] may use.
    pub fn reserve_bytes(&self) -> usize {
        self.inner.reserve_pages * BLOCK_BYTES
    }

    /// Counts the blocks that came back; if it has not moved, a failed `alloc` fails again.
    pub fn free_count(&self) -> u64 {
        self.inner.frees.load(Ordering::Relaxed)
    }
}

impl PoolInner {
    fn lock(&self) -> MutexGuard<'_, Buddy> {
        // The allocator's functions do not panic between changes, so its state is whole.
        self.buddy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length, and no block is in use, because
        // each holds a count of the `Arc` that is being dropped.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * BLOCK_BYTES) };
    }
}

/// A block in use. Not `Clone`: the owners count in `PoolInner::refs`.
#[derive(Debug)]
struct Block {
    pool: NonNull<PoolInner>,
    page: u32,
    order: u8,
}

// SAFETY: the pool may be used from any thread, and the block's memory belongs to its handles.
unsafe impl Send for Block {}
// SAFETY: a shared `Block` only gives its address and size.
unsafe impl Sync for Block {}

impl Block {
    fn pool(&self) -> &PoolInner {
        // SAFETY: a block in use holds a strong count of the pool.
        unsafe { self.pool.as_ref() }
    }

    fn refs(&self) -> &AtomicU32 {
        &self.pool().refs[self.page as usize]
    }

    fn ptr(&self) -> *mut u8 {
        // SAFETY: `page` lies within the mapping.
        unsafe {
            self.pool()
                .base
                .as_ptr()
                .add(self.page as usize * BLOCK_BYTES)
        }
    }

    fn capacity(&self) -> usize {
        BLOCK_BYTES << self.order
    }

    fn another(&self) -> Block {
        let before = self.refs().fetch_add(1, Ordering::Relaxed);
        assert!(before < u32::MAX / 2, "a buffer has too many owners");
        Block {
            pool: self.pool,
            page: self.page,
            order: self.order,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.refs().fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        fence(Ordering::Acquire);
        let pool = self.pool();
        pool.lock().free(self.page, self.order);
        pool.free_pages
            .fetch_add(1 << self.order, Ordering::Relaxed);
        pool.frees.fetch_add(1, Ordering::Relaxed);
        // SAFETY: this is the count that `alloc` took for the block; `pool` is not used after.
        unsafe { Arc::decrement_strong_count(self.pool.as_ptr().cast_const()) };
    }
}

/// The only handle of a block: its bytes can be read and written.
#[derive(Debug)]
pub struct IoBuf {
    block: Block,
}

impl IoBuf {
    /// A block with memory of its own, outside any pool: for tools, tests and rare large pieces.
    pub fn standalone(len: usize) -> std::io::Result<IoBuf> {
        // One block of the pool must hold it, so larger ones cannot be had.
        let pool = BufferPool::new(len.max(1).next_power_of_two(), 0)?;
        pool.alloc(len, Claim::Receive)
            .ok_or_else(|| std::io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// Turns the handle into one that can be shared.
    pub fn share(self) -> BufRef {
        BufRef { block: self.block }
    }
}

impl Deref for IoBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block is mapped, initialised by the kernel with zeroes, and only this handle
        // exists, so nobody writes while the borrow lives.
        unsafe { std::slice::from_raw_parts(self.block.ptr(), self.block.capacity()) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr(), self.block.capacity()) }
    }
}

/// A shared handle of a block, as operations in flight hold it.
///
/// Which operation may write the bytes is decided by the core: a buffer that is the destination of
/// a read is named in nothing else until that read is done. So all access goes by copies and raw
/// pointers, and a core that broke the rule would see mixed bytes, not broken memory.
#[derive(Debug)]
pub struct BufRef {
    block: Block,
}

impl Clone for BufRef {
    fn clone(&self) -> BufRef {
        BufRef {
            block: self.block.another(),
        }
    }
}

impl BufRef {
    /// Size of the block in bytes.
    pub fn capacity(&self) -> usize {
        self.block.capacity()
    }

    /// The only handle again, or this one back if others exist.
    pub fn try_into_buf(self) -> Result<IoBuf, BufRef> {
        if self.block.refs().load(Ordering::Acquire) == 1 {
            Ok(IoBuf { block: self.block })
        } else {
            Err(self)
        }
    }

    /// Address of the byte at `offset`, for the kernel. Panics if `offset..offset + len` does not
    /// lie within the block.
    pub fn ptr_at(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset
            .checked_add(len)
            .expect("a range of a buffer does not overflow");
        assert!(
            end <= self.capacity(),
            "bytes {offset}..{end} of a {}-byte buffer",
            { self.capacity() }
        );
        // SAFETY: the assertion keeps the address within the block or one past its end.
        unsafe { self.block.ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) {
        let to = self.ptr_at(offset, bytes.len());
        // SAFETY: `to` has room for `bytes`; a borrowed slice cannot lie in the block, since
        // borrows of it come only from `IoBuf`, which excludes this handle, or `with_bytes`.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies the bytes at `offset` to `bytes`.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.ptr_at(offset, bytes.len());
        // SAFETY: `from` has so many bytes, and `bytes` is exclusive memory outside the block.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Calls `f` with `len` bytes from `offset` on. Only for buffers whose content is settled (no
    /// read into them is in flight), see the type's description.
    pub fn with_bytes<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        let from = self.ptr_at(offset, len);
        // SAFETY: the bytes are mapped and initialised, and live while `self` does; the core names
        // no buffer as a source while a read into it is in flight.
        f(unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// Fills `len` bytes from `offset` on with zeroes.
    pub fn zero(&self, offset: usize, len: usize) {
        let to = self.ptr_at(offset, len);
        // SAFETY: `to` has room for `len` bytes.
        unsafe { std::ptr::write_bytes(to, 0, len) };
    }
}

fn order_for(len: usize) -> u8 {
    let pages = len.div_ceil(BLOCK_BYTES).max(1);
    pages.next_power_of_two().trailing_zeros() as u8
}

/// The buddy allocator over page numbers. Free blocks are linked through the two arrays.
#[derive(Debug)]
struct Buddy {
    heads: [u32; MAX_ORDER as usize + 1],
    next: Box<[u32]>,
    prev: Box<[u32]>,
    /// Order of the free block that starts at this page, `NOT_FREE` for all other pages.
    free_order: Box<[u8]>,
    quick: Vec<u32>,
}

impl Buddy {
    fn new(pages: usize) -> Buddy {
        let mut buddy = Buddy {
            heads: [NIL; MAX_ORDER as usize + 1],
            next: vec![NIL; pages].into(),
            prev: vec![NIL; pages].into(),
            free_order: vec![NOT_FREE; pages].into(),
            quick: Vec::with_capacity(QUICK_BLOCKS),
        };
        let mut page = 0;
        while page < pages {
            let by_alignment = if page == 0 {
                u32::from(MAX_ORDER)
            } else {
                page.trailing_zeros()
            };
            let by_room = (pages - page).ilog2();
            let order = by_alignment.min(by_room).min(u32::from(MAX_ORDER)) as u8;
            buddy.push(page as u32, order);
            page += 1 << order;
        }
        buddy
    }

    fn alloc(&mut self, order: u8) -> Option<u32> {
        if order == 0
            && let Some(page) = self.quick.pop()
        {
            return Some(page);
        }
        self.take(order).or_else(|| {
            self.merge_quick();
            self.take(order)
        })
    }

    fn free(&mut self, page: u32, order: u8) {
        if order == 0 && self.quick.len() < QUICK_BLOCKS {
            self.quick.push(page);
        } else {
            self.merge(page, order);
        }
    }

    fn take(&mut self, order: u8) -> Option<u32> {
        let found = (order..=MAX_ORDER).find(|o| self.heads[usize::from(*o)] != NIL)?;
        let page = self.heads[usize::from(found)];
        self.unlink(page);
        for smaller in (order..found).rev() {
            self.push(page + (1 << smaller), smaller);
        }
        Some(page)
    }

    fn merge_quick(&mut self) {
        while let Some(page) = self.quick.pop() {
            self.merge(page, 0);
        }
    }

    fn merge(&mut self, mut page: u32, mut order: u8) {
        while order < MAX_ORDER {
            let other = page ^ (1 << order);
            if self.free_order.get(other as usize) != Some(&order) {
                break;
            }
            self.unlink(other);
            page = page.min(other);
            order += 1;
        }
        self.push(page, order);
    }

    fn push(&mut self, page: u32, order: u8) {
        let head = std::mem::replace(&mut self.heads[usize::from(order)], page);
        self.next[page as usize] = head;
        self.prev[page as usize] = NIL;
        if head != NIL {
            self.prev[head as usize] = page;
        }
        self.free_order[page as usize] = order;
    }

    fn unlink(&mut self, page: u32) {
        let (prev, next) = (self.prev[page as usize], self.next[page as usize]);
        let order = std::mem::replace(&mut self.free_order[page as usize], NOT_FREE);
        if prev == NIL {
            self.heads[usize::from(order)] = next;
        } else {
            self.next[prev as usize] = next;
        }
        if next != NIL {
            self.prev[next as usize] = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK_BYTES, BLOCK_BYTES_MAX, BufferPool, Claim, IoBuf};

    fn pool(pages: usize, reserve: usize) -> BufferPool {
        BufferPool::new(pages * BLOCK_BYTES, reserve * BLOCK_BYTES).unwrap()
    }

    #[test]
    fn blocks_are_aligned_and_disjoint() {
        let pool = pool(64, 0);
        let mut held = Vec::new();
        for (n, len) in [1, 4096, 4097, 16384, 40000, 512].into_iter().enumerate() {
            let mut buf = pool.alloc(len, Claim::Ordinary).unwrap();
            assert!(buf.len() >= len);
            assert_eq!(buf.as_ptr() as usize % BLOCK_BYTES, 0);
            buf.fill(n as u8);
            held.push(buf);
        }
        for (n, buf) in held.iter().enumerate() {
            assert!(buf.iter().all(|byte| *byte == n as u8));
        }
    }

    #[test]
    fn a_pool_is_bounded_and_everything_comes_back() {
        let pool = pool(37, 0);
        let held: Vec<_> = std::iter::from_fn(|| pool.alloc(1, Claim::Ordinary)).collect();
        assert_eq!(held.len(), 37);
        assert_eq!(pool.free_bytes(), 0);
        drop(held);
        assert_eq!(pool.free_bytes(), 37 * BLOCK_BYTES);
        // The single pages merge again, so a block of 32 pages can be had.
        assert!(pool.alloc(32 * BLOCK_BYTES, Claim::Ordinary).is_some());
        assert!(pool.alloc(BLOCK_BYTES_MAX + 1, Claim::Ordinary).is_none());
    }

    #[test]
    fn the_reserve_is_for_received_packets_only() {
        let pool = pool(8, 4);
        let ordinary: Vec<_> = std::iter::from_fn(|| pool.alloc(1, Claim::Ordinary)).collect();
        let received: Vec<_> = std::iter::from_fn(|| pool.alloc(1, Claim::Receive)).collect();
        assert_eq!((ordinary.len(), received.len()), (4, 4));
        let before = pool.free_count();
        drop(received);
        assert_eq!(pool.free_count(), before + 4);
        assert!(pool.alloc(1, Claim::Ordinary).is_none());
    }

    #[test]
    fn a_shared_block_is_unique_again_when_the_others_are_gone() {
        let pool = pool(1, 0);
        let shared = pool.alloc(10, Claim::Ordinary).unwrap().share();
        let other = shared.clone();
        other.write_at(4090, b"abcdef");
        let shared = shared.try_into_buf().unwrap_err();
        drop(other);
        let buf = shared.try_into_buf().unwrap();
        assert_eq!(&buf[4090..], b"abcdef");
        assert!(pool.alloc(1, Claim::Receive).is_none());
        drop(buf);
        assert!(pool.alloc(1, Claim::Receive).is_some());
    }

    #[test]
    fn a_block_outlives_its_pool() {
        let pool = pool(1, 0);
        let mut buf = pool.alloc(1, Claim::Ordinary).unwrap();
        drop(pool);
        buf[0] = 7;
        let handle = std::thread::spawn(move || buf[0]);
        assert_eq!(handle.join().unwrap(), 7);
        assert_eq!(IoBuf::standalone(100_000).unwrap().len(), 131_072);
    }

    #[test]
    #[should_panic(expected = "of a 4096-byte buffer")]
    fn a_range_beyond_the_block_is_refused() {
        pool(1, 0)
            .alloc(1, Claim::Ordinary)
            .unwrap()
            .share()
            .ptr_at(4000, 97);
    }

    #[test]
    fn random_use_never_hands_out_a_page_twice() {
        let pool = pool(200, 0);
        let mut held: Vec<IoBuf> = Vec::new();
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize
        };
        for step in 0..20_000u32 {
            if random() % 2 == 0 && !held.is_empty() {
                let gone = held.swap_remove(random() % held.len());
                let mark = u32::from_ne_bytes(gone[..4].try_into().unwrap());
                assert!(
                    gone.chunks(BLOCK_BYTES)
                        .all(|p| p[..4] == mark.to_ne_bytes())
                );
            } else if let Some(mut buf) = pool.alloc(random() % 60_000, Claim::Ordinary) {
                buf.chunks_mut(BLOCK_BYTES)
                    .for_each(|p| p[..4].copy_from_slice(&step.to_ne_bytes()));
                held.push(buf);
            }
        }
        drop(held);
        assert_eq!(pool.free_bytes(), 200 * BLOCK_BYTES);
    }
}
