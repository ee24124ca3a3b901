//! A node's payload buffers with their reference counts. Numbers are never reused, so that a use
//! after the release is noticed.

use std::collections::VecDeque;

#[derive(Debug)]
struct Buffer {
    content: Vec<u64>,
    references: u32,
}

/// All buffers of one life of a node: a window over ever increasing numbers.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    first: u64,
    window: VecDeque<Option<Buffer>>,
    alive: usize,
}

impl Buffers {
    /// A new buffer with one reference.
    pub(crate) fn add(&mut self, content: Vec<u64>) -> u64 {
        self.window.push_back(Some(Buffer {
            content,
            references: 1,
        }));
        self.alive += 1;
        self.first + self.window.len() as u64
    }

    fn slot(&mut self, buf: u64) -> Option<&mut Option<Buffer>> {
        let index = buf.checked_sub(self.first + 1)?;
        self.window.get_mut(usize::try_from(index).ok()?)
    }

    /// The content of a living buffer.
    pub(crate) fn get(&mut self, buf: u64) -> Option<&mut Vec<u64>> {
        self.slot(buf)?.as_mut().map(|b| &mut b.content)
    }

    /// One more reference.
    pub(crate) fn hold(&mut self, buf: u64) {
        if let Some(Some(buffer)) = self.slot(buf) {
            buffer.references += 1;
        }
    }

    /// One reference less; false if the buffer is gone already.
    pub(crate) fn release(&mut self, buf: u64) -> bool {
        let Some(slot) = self.slot(buf) else {
            return false;
        };
        match slot {
            None => return false,
            Some(buffer) if buffer.references > 1 => {
                buffer.references -= 1;
                return true;
            }
            Some(_) => *slot = None,
        }
        self.alive -= 1;
        while let Some(None) = self.window.front() {
            self.window.pop_front();
            self.first += 1;
        }
        true
    }

    /// How many live.
    pub(crate) fn len(&self) -> usize {
        self.alive
    }

    /// The node died.
    pub(crate) fn clear(&mut self) {
        self.first += self.window.len() as u64;
        self.window.clear();
        self.alive = 0;
    }
}
