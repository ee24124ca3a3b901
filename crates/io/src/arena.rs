//! Objects by slot, with keys that tell an object from a later one in the same slot.

/// Slots with generations. Keys fit in 60 bits: 28 of generation, 32 of slot number.
#[derive(Debug)]
pub(crate) struct Arena<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    entry: Option<T>,
}

/// Names an object of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(pub(crate) u64);

const GENERATION_MASK: u32 = (1 << 28) - 1;

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Arena {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Arena<T> {
    pub(crate) fn insert(&mut self, entry: T) -> Key {
        self.insert_with(|_| entry)
    }

    /// Inserts what `make` gives for the new key.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(Key) -> T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                entry: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        let key = Key(u64::from(slot.generation) << 32 | u64::from(index));
        slot.entry = Some(make(key));
        key
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let slot = self.slots.get(key.0 as u32 as usize)?;
        if u64::from(slot.generation) == key.0 >> 32 {
            slot.entry.as_ref()
        } else {
            None
        }
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.0 as u32 as usize)?;
        if u64::from(slot.generation) == key.0 >> 32 {
            slot.entry.as_mut()
        } else {
            None
        }
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.0 as u32 as usize)?;
        if u64::from(slot.generation) != key.0 >> 32 {
            return None;
        }
        let entry = slot.entry.take()?;
        slot.generation = slot.generation.wrapping_add(1) & GENERATION_MASK;
        self.free.push(key.0 as u32);
        Some(entry)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let key = Key(u64::from(slot.generation) << 32 | index as u64);
            slot.entry.as_ref().map(|entry| (key, entry))
        })
    }

    pub(crate) fn keys(&self) -> Vec<Key> {
        self.iter().map(|(key, _)| key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Arena;

    #[test]
    fn a_key_of_a_removed_object_names_nothing() {
        let mut arena = Arena::default();
        let a = arena.insert_with(|key| key.0);
        assert_eq!(arena.get(a), Some(&a.0));
        assert!(arena.remove(a).is_some());
        let b = arena.insert(9);
        assert_eq!((arena.get(a), arena.get(b)), (None, Some(&9)));
        assert!(arena.get_mut(a).is_none() && arena.remove(a).is_none());
        assert_eq!(arena.keys(), [b]);
    }
}
