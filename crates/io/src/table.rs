//! Names for buffers: what the core holds is a [`BufId`], this table knows the memory behind it.
//!
//! A name carries a generation, so a name that was released is an error instead of another
//! request's buffer. The core's references are counted here; operations in flight hold a
//! [`BufRef`] of their own, so memory outlives the name as long as the kernel may touch it.

use lockstep_core::event::BufId;

use crate::pool::BufRef;

/// The core named a buffer that it had released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("buffer {:#x} is not in use", .0.0)]
pub struct StaleBuf(pub BufId);

/// The buffers that the cores of a shard have names for.
#[derive(Debug, Default)]
pub struct BufTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    refs: u32,
    owner: u64,
    buf: Option<BufRef>,
}

impl BufTable {
    /// Gives the buffer a name with one reference. `owner` is the core that learns it.
    pub fn insert(&mut self, owner: u64, buf: BufRef) -> BufId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                refs: 0,
                owner,
                buf: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.refs = 1;
        slot.owner = owner;
        slot.buf = Some(buf);
        BufId(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// A handle on the memory.
    pub fn get(&self, id: BufId) -> Result<&BufRef, StaleBuf> {
        match self.slots.get(id.0 as u32 as usize) {
            Some(Slot {
                generation,
                buf: Some(buf),
                ..
            }) if *generation == generation_of(id) => Ok(buf),
            _ => Err(StaleBuf(id)),
        }
    }

    /// Adds a reference.
    pub fn retain(&mut self, id: BufId) -> Result<(), StaleBuf> {
        self.get(id)?;
        self.slots[id.0 as u32 as usize].refs += 1;
        Ok(())
    }

    /// Puts other memory behind a name.
    pub fn replace(&mut self, id: BufId, buf: BufRef) {
        if self.get(id).is_ok() {
            self.slots[id.0 as u32 as usize].buf = Some(buf);
        }
    }

    /// Takes a reference back. With the last one the name ends and the memory is returned.
    pub fn release(&mut self, id: BufId) -> Result<Option<BufRef>, StaleBuf> {
        self.get(id)?;
        let index = id.0 as u32;
        let slot = &mut self.slots[index as usize];
        slot.refs -= 1;
        if slot.refs > 0 {
            return Ok(None);
        }
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Ok(slot.buf.take())
    }

    /// Ends all names of an owner that has gone.
    pub fn release_all_of(&mut self, owner: u64) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if slot.owner == owner && slot.buf.take().is_some() {
                slot.generation = slot.generation.wrapping_add(1);
                self.free.push(index as u32);
            }
        }
    }

    /// Number of names in use.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether no name is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn generation_of(id: BufId) -> u32 {
    (id.0 >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::{BufTable, StaleBuf};
    use crate::pool::IoBuf;

    #[test]
    fn a_released_name_is_stale_even_when_its_slot_is_used_again() {
        let mut table = BufTable::default();
        let first = table.insert(1, IoBuf::standalone(1).unwrap().share());
        table.retain(first).unwrap();
        assert!(table.release(first).unwrap().is_none());
        assert!(table.release(first).unwrap().is_some());
        let second = table.insert(1, IoBuf::standalone(1).unwrap().share());
        assert_ne!(first, second);
        assert_eq!(table.get(first).unwrap_err(), StaleBuf(first));
        assert_eq!(table.release(first).unwrap_err(), StaleBuf(first));
        assert!(table.get(second).is_ok());
        assert_eq!(table.len(), 1);
        table.release_all_of(2);
        assert_eq!(table.len(), 1);
        table.release_all_of(1);
        assert!(table.is_empty() && table.get(second).is_err());
    }
}
