//! Whether a node may be promoted without losing what others have.

use crate::operator::{Operator, generations, members};
use crate::world::World;

impl Operator {
    /// The node's own disks are UpToDate, or those of peers that have all data. A node without disks sees no
    /// others, which it would be left with if the heir died during its promotion, unless they are of another
    /// generation: those it must not take for whole.
    pub(crate) fn sees_heir_data(&self, w: &mut World, node: usize) -> bool {
        let Some(view) = w.view(node) else {
            return false;
        };
        let others = w.has_disk(node);
        let mut volumes = self.heirs.iter().enumerate();
        volumes.all(|(volume, heirs)| {
            let holders = view.holders[volume];
            // Of a disk that is being attached nothing is known.
            let generation = |of: usize| {
                let known = generations(w, of)?.get(&(volume as u16)).copied();
                known.filter(|uuid| !uuid.is_zero())
            };
            let foreign = |other: usize| {
                members(*heirs).into_iter().all(|heir| {
                    let pair = generation(heir).zip(generation(other));
                    pair.is_some_and(|(a, b)| a != b)
                })
            };
            let sees_only_heirs = || members(holders & !heirs).into_iter().all(foreign);
            // One that has died meanwhile is none that it sees.
            let is_there = |of: &usize| *of == node || w.shares_link(node, *of);
            let heirs = members(holders & (1 << node | heirs));
            heirs.iter().any(is_there) && (others || sees_only_heirs())
        })
    }
}
