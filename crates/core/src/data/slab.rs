//! Objects with keys that are never used twice.

use alloc::vec::Vec;

/// Names an object of a [`Slab`]. Never 0, never all ones, so that it can travel as a block id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(pub(crate) u64);

/// A table with stable keys; places are used again, keys are not.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> Key {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.entries.push((0, None));
                u32::try_from(self.entries.len() - 1).expect("fewer than 2^32 objects")
            }
        };
        let entry = &mut self.entries[index as usize];
        // 31 bits of generation: a key is never all ones.
        entry.0 = (entry.0 + 1) & 0x7fff_ffff;
        if entry.0 == 0 {
            entry.0 = 1;
        }
        entry.1 = Some(value);
        Key(u64::from(entry.0) << 32 | u64::from(index))
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get((key.0 & 0xffff_ffff) as usize)?;
        if u64::from(entry.0) != key.0 >> 32 {
            return None;
        }
        entry.1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut((key.0 & 0xffff_ffff) as usize)?;
        if u64::from(entry.0) != key.0 >> 32 {
            return None;
        }
        entry.1.as_mut()
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        self.get(key)?;
        let index = (key.0 & 0xffff_ffff) as u32;
        self.free.push(index);
        self.entries[index as usize].1.take()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn keys(&self) -> Vec<Key> {
        self.entries
            .iter()
            .enumerate()
            .filter(|(_, (_, value))| value.is_some())
            .map(|(index, (generation, _))| Key(u64::from(*generation) << 32 | index as u64))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_key_does_not_find_the_next_object_in_its_place() {
        let mut slab = Slab::default();
        let a = slab.insert('a');
        assert_ne!(a.0, 0);
        assert_eq!(slab.remove(a), Some('a'));
        let b = slab.insert('b');
        assert_eq!((slab.get(a), slab.get(b)), (None, Some(&'b')));
        assert_eq!(slab.remove(a), None);
        assert_eq!((slab.len(), slab.keys().len()), (1, 1));
    }
}
