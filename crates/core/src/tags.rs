//! Which completion belongs to what: a table of outstanding outputs.

use alloc::vec::Vec;

use crate::event::Tag;
use crate::time::Instant;

/// Outstanding outputs of one resource. A tag is never reused: it carries its slot's generation.
#[derive(Debug)]
pub struct Tags<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    /// When it was started, if that matters.
    since: Option<Instant>,
    value: Option<T>,
}

impl<T> Default for Tags<T> {
    fn default() -> Self {
        Tags {
            slots: Vec::new(),
            free: Vec::new(),
            len: 0,
        }
    }
}

impl<T> Tags<T> {
    /// Remembers what the completion of the returned tag means.
    pub fn insert(&mut self, value: T) -> Tag {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 outputs");
                self.slots.push(Slot {
                    generation: 0,
                    since: None,
                    value: None,
                });
                index
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        slot.since = None;
        self.len += 1;
        Tag((u64::from(slot.generation) << 32) | u64::from(index))
    }

    /// The same for an output whose age may matter.
    pub fn insert_timed(&mut self, value: T, now: Instant) -> Tag {
        let tag = self.insert(value);
        self.slots[(tag.0 & 0xffff_ffff) as usize].since = Some(now);
        tag
    }

    /// Outstanding outputs of [`Tags::insert_timed`] with the time of their start.
    pub fn timed(&self) -> impl Iterator<Item = (Tag, &T, Instant)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let tag = Tag((u64::from(slot.generation) << 32) | index as u64);
            Some((tag, slot.value.as_ref()?, slot.since?))
        })
    }

    /// Takes what the tag stood for; none for an old or unknown tag, which is a normal event.
    pub fn take(&mut self, tag: Tag) -> Option<T> {
        let index = (tag.0 & 0xffff_ffff) as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if u64::from(slot.generation) != tag.0 >> 32 {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        self.len -= 1;
        Some(value)
    }

    /// Outstanding outputs.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Nothing is outstanding.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_taken_once_and_its_slot_is_not_confused() {
        let mut tags = Tags::default();
        let a = tags.insert('a');
        assert_eq!(tags.take(a), Some('a'));
        let b = tags.insert('b');
        assert_ne!(a, b);
        assert_eq!(tags.take(a), None);
        assert_eq!(tags.take(b), Some('b'));
        assert!(tags.is_empty());
        let timed = tags.insert_timed('c', Instant(9));
        tags.insert('d');
        let found: Vec<_> = tags.timed().collect();
        assert_eq!(found, [(timed, &'c', Instant(9))]);
        tags.take(timed);
        tags.insert('e');
        assert_eq!(tags.timed().count(), 0);
        assert_eq!(tags.take(Tag(77)), None);
    }
}
