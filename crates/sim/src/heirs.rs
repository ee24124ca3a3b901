//! Whether a node may be promoted without losing what others have, and who would be left then.

use lockstep_core::options::Protocol;
use lockstep_core::report::ConnectionReport;
use lockstep_core::state::{ConnState, DiskState};

use crate::operator::{Operator, generations, members};
use crate::promises::is_crashed_primary;
use crate::sometimes;
use crate::world::{SECOND, World};

/// Protocol version of DRBD 8.4's last release.
const DIALECT_84: u32 = 101;

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

    /// A successor goes that no application has seen anything of: it has not begun a generation, and
    /// if the dead Primary comes back, its copy may be the one that counts. The answer is who that is.
    pub(crate) fn left_unused(&mut self, w: &mut World, node: usize) -> u32 {
        let unused = self
            .heir
            .take_if(|(heir, served, _)| *heir == node && w.nodes[node].served == *served);
        let Some((_, _, loss)) = unused else {
            return 0;
        };
        if members(loss).into_iter().any(|n| !self.is_down(n)) {
            // It is back, and perhaps not compared yet.
            w.unflushed_may_be_lost();
            return 0;
        }
        sometimes!(w.marks, true, "heir-left-unused");
        loss
    }

    /// A Primary has died, came back and loses its power, and nobody has followed it: in 8.4's dialect it is the source of
    /// those that have what it lost, as if it had lost its power at once (semantics.md, 13.3).
    pub(crate) fn may_overwrite(&self, w: &World, node: usize) -> u32 {
        let disks = &w.nodes[node].disks;
        let crashed = w.has_disk(node) && disks.iter().any(is_crashed_primary);
        let old = self.settings.resource.protocol_max <= DIALECT_84;
        if crashed && old { 1 << node } else { 0 }
    }

    /// A node without disks is being promoted, and this is the last heir that it sees. With protocols A and B it would be
    /// left with whoever comes next, and nobody can call its promotion back.
    pub(crate) fn is_promotions_source(&self, w: &World, node: usize) -> bool {
        let client = self.promoting.map(|(n, _)| n).filter(|n| !w.has_disk(*n));
        let heirs = self.heirs();
        let others = || heirs.iter().any(|n| *n != node && self.is_up(*n));
        client.is_some_and(|client| client != node)
            && w.config.protocol != Protocol::C
            && heirs.contains(&node)
            && !others()
    }

    /// In 8.4's dialect both disks may be Outdated after a handshake that broke, as with kernels, and stay so. Somebody
    /// decides after a while which one counts.
    pub(crate) fn nobody_is_current(&mut self, w: &World, heir: usize) -> bool {
        let outdated = |node: usize| {
            let view = w.snapshot(node);
            view.is_some_and(|s| {
                let met = s
                    .connections
                    .iter()
                    .all(|c| c.state == ConnState::Connected);
                let mut disks = s.devices.iter().map(|d| d.disk_state);
                met && disks.any(|disk| disk == DiskState::Outdated)
            })
        };
        if self.settings.resource.protocol_max > DIALECT_84 {
            return false;
        }
        let stays = w.storage().all(outdated);
        let before = self.refusing.filter(|_| stays);
        self.refusing = before.or(stays.then_some((heir, w.now)));
        before.is_some_and(|(_, since)| since + LONG_ENOUGH < w.now)
    }

    /// The Primary has no whole disk, and has waited long for one that has what applications hold for written: whoever
    /// came back may have lost that. Somebody decides to go on with what there is.
    pub(crate) fn nobody_has_all(&mut self, w: &World, primary: usize) -> bool {
        let lacks = w.snapshot(primary).is_some_and(|snapshot| {
            let own = snapshot.devices.iter().map(|d| d.disk_state);
            let apart = |c: &ConnectionReport| c.state != ConnState::Connected;
            own.min() < Some(DiskState::UpToDate) && snapshot.connections.iter().any(apart)
        });
        let refuses = lacks && w.seen.refuses(primary);
        let before = self
            .refusing
            .filter(|(node, _)| refuses && *node == primary);
        self.refusing = before.or(refuses.then_some((primary, w.now)));
        before.is_some_and(|(_, since)| since + LONG_ENOUGH < w.now)
    }
}

/// How long somebody waits for disks that have everything, in nanoseconds.
pub(crate) const LONG_ENOUGH: u64 = 20 * SECOND;
