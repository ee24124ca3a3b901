//! A map of few entries in ascending order of their keys: volumes and peers of a resource.
//!
//! A B-tree takes room for eleven entries as soon as it has one, which is tens of KiB where values
//! are whole volumes or connections. Nodes with thousands of resources have one or two of each.

use alloc::vec::Vec;
use core::iter::Zip;
use core::ops::Index;
use core::slice;

/// The map. Memory is that of its entries; adding and removing one moves those behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Few<K, V> {
    keys: Vec<K>,
    /// In the order of the keys.
    values: Vec<V>,
}

impl<K, V> Default for Few<K, V> {
    fn default() -> Self {
        Few::new()
    }
}

impl<K, V> Few<K, V> {
    /// An empty map.
    pub const fn new() -> Self {
        Few {
            keys: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// There is no entry.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys in ascending order.
    pub fn keys(&self) -> slice::Iter<'_, K> {
        self.keys.iter()
    }

    /// Values in the order of their keys.
    pub fn values(&self) -> slice::Iter<'_, V> {
        self.values.iter()
    }

    /// Values in the order of their keys.
    pub fn values_mut(&mut self) -> slice::IterMut<'_, V> {
        self.values.iter_mut()
    }

    /// Entries in the order of their keys.
    pub fn iter(&self) -> Zip<slice::Iter<'_, K>, slice::Iter<'_, V>> {
        self.keys.iter().zip(self.values.iter())
    }

    /// Entries in the order of their keys.
    pub fn iter_mut(&mut self) -> Zip<slice::Iter<'_, K>, slice::IterMut<'_, V>> {
        self.keys.iter().zip(self.values.iter_mut())
    }
}

impl<K: Copy + Ord, V> Few<K, V> {
    fn find(&self, key: K) -> Result<usize, usize> {
        self.keys.binary_search(&key)
    }

    /// The entry's value.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.values.get(self.find(*key).ok()?)
    }

    /// The entry's value.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.find(*key).ok()?;
        self.values.get_mut(at)
    }

    /// There is such an entry.
    pub fn contains_key(&self, key: &K) -> bool {
        self.find(*key).is_ok()
    }

    /// Adds an entry, or replaces its value and returns the old one.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(key) {
            Ok(at) => Some(core::mem::replace(&mut self.values[at], value)),
            Err(at) => {
                self.keys.reserve_exact(1);
                self.values.reserve_exact(1);
                self.keys.insert(at, key);
                self.values.insert(at, value);
                None
            }
        }
    }

    /// Takes an entry out.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let at = self.find(*key).ok()?;
        self.keys.remove(at);
        Some(self.values.remove(at))
    }
}

impl<K: Copy + Ord, V> Index<&K> for Few<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        self.get(key)
            .expect("the caller knows that the entry is there")
    }
}

impl<'a, K, V> IntoIterator for &'a Few<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Zip<slice::Iter<'a, K>, slice::Iter<'a, V>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, K, V> IntoIterator for &'a mut Few<K, V> {
    type Item = (&'a K, &'a mut V);
    type IntoIter = Zip<slice::Iter<'a, K>, slice::IterMut<'a, V>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<K: Copy + Ord, V> FromIterator<(K, V)> for Few<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut few = Few::new();
        for (key, value) in entries {
            few.insert(key, value);
        }
        few
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use super::Few;
    use crate::rng::Rng;

    #[test]
    fn it_is_a_map_in_the_order_of_its_keys() {
        let mut rng = Rng::new(5);
        let (mut few, mut model) = (Few::new(), BTreeMap::new());
        for value in 0..2000_u32 {
            let key = (rng.next_u64() % 20) as u8;
            match rng.next_u64() % 3 {
                0 => assert_eq!(few.remove(&key), model.remove(&key)),
                1 => assert_eq!(few.insert(key, value), model.insert(key, value)),
                _ => assert_eq!(few.get_mut(&key), model.get_mut(&key)),
            }
            assert!(few.iter().eq(model.iter()) && few.len() == model.len());
            assert_eq!(few.contains_key(&key), model.contains_key(&key));
        }
        let again: Few<u8, u32> = model.iter().map(|(k, v)| (*k, *v)).collect();
        assert_eq!(again, few);
        assert_eq!(few.keys().rev().copied().collect::<Vec<_>>(), {
            model.keys().rev().copied().collect::<Vec<_>>()
        });
    }

    #[test]
    fn one_entry_takes_the_room_of_one() {
        let mut few = Few::new();
        few.insert(1_u8, [0_u8; 512]);
        assert_eq!(few.values.capacity(), 1);
    }
}
