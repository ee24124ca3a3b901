//! What the core has sent and a peer did not ack.

use std::collections::VecDeque;

/// Epochs of the core that a peer has not acked.
#[derive(Default)]
pub(crate) struct Epochs {
    /// Writes of the open epoch and those without an answer of theirs.
    pub(crate) writes: u32,
    pub(crate) unanswered: Vec<u64>,
    /// A write of the open one was refused.
    pub(crate) refused: bool,
    /// Closed ones: number, writes, and those without an answer.
    pub(crate) closed: VecDeque<(u32, u32, Vec<u64>)>,
}

impl Epochs {
    /// What was refused is no part of its epoch any more; an epoch of nothing is not acked.
    pub(crate) fn answered(&mut self, id: u64, refused: bool) {
        let less = u32::from(refused);
        let take = |unanswered: &mut Vec<u64>, writes: &mut u32| {
            let before = unanswered.len();
            unanswered.retain(|b| *b != id);
            if unanswered.len() < before {
                *writes -= less;
            }
        };
        self.refused |= refused && self.unanswered.contains(&id);
        take(&mut self.unanswered, &mut self.writes);
        for (_, writes, unanswered) in &mut self.closed {
            take(unanswered, writes);
        }
        self.closed.retain(|(_, writes, _)| *writes > 0);
    }
}
