//! Nodes beyond the neighbours of a Primary whose quorum is that of a peer (semantics.md, 10.8 and 11.1).
//!
//! A Primary without a disk has quorum if an UpToDate peer says that it has it. What it writes may be on
//! that peer's disk alone then, while a majority of the disks is connected behind it, and calls itself
//! UpToDate until a two-phase commit shows them that a Primary is out of their reach. If they lost the peer
//! before, they would go on without what the Primary has acknowledged. So it makes no new generation,
//! and with it completes nothing, before they were told. Whoever has a majority of the disks beside it
//! needs no such word: every other majority has a node that knows of its generation.

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{DiskState, Role};

use crate::options::Quorum;
use crate::resource::Resource;
use crate::state::State;
use crate::timers::Timer;
use crate::twopc::WishKind;

impl Resource {
    /// Some volume's new generation has to wait until the nodes behind the peers are told; they are asked,
    /// if nobody does it already.
    pub(crate) fn awaits_far_nodes(&mut self) -> bool {
        if self.far_nodes().is_empty() || planted!(self, FarNodesNotTold) {
            return false;
        }
        let borrowed = |volume: &VolumeNr| {
            let n = self.count_quorum(*volume, &self.state, &self.state);
            n.borrowed
        };
        if self.options.quorum == Quorum::Off || !self.devices.keys().any(borrowed) {
            return false;
        }
        if !self.timers.is_set(Timer::EmptyTwopc) && !self.has_wish(&WishKind::Empty) {
            self.schedule_empty_twopc();
        }
        true
    }

    /// Nodes of this partition that this node has no connection to, and that may not know of it.
    fn far_nodes(&self) -> NodeMask {
        let without_disk = |node: &NodeId| {
            let mut peers = self.devices.values().filter_map(|d| d.peers.get(node));
            peers.any(|pd| !pd.options.bitmap)
        };
        let known = self.state.connected().union(self.twopc.told);
        let unknown = self.state.members.difference(known).without(self.node_id);
        unknown.iter().filter(|n| !without_disk(n)).collect()
    }

    /// A two-phase commit was committed: whoever hears of it, and is no neighbour of this Primary, knows that its
    /// data are not current. That it has heard, its vote in the next one says. One that was lost meanwhile may have
    /// taken itself for a neighbour.
    pub(crate) fn far_nodes_told(
        &mut self,
        reachable: NodeMask,
        primaries: NodeMask,
        lost: NodeMask,
    ) {
        if self.state.role == Role::Primary && primaries.contains(self.node_id) {
            let far = reachable.difference(self.state.connected().union(lost));
            let heard = far.intersection(self.twopc.telling);
            self.twopc.told = self.twopc.told.union(heard);
            self.twopc.telling = self.twopc.telling.union(far);
        }
    }

    /// This node has just lost a Primary, and is about to ask who is left. A question of another node may have begun
    /// before that, and would show what was then.
    pub(crate) fn asks_itself(&self) -> bool {
        let mut disks = self.state.devices.values();
        let serves = disks.any(|d| d.disk == DiskState::UpToDate);
        self.timers.is_set(Timer::EmptyTwopc)
            && !serves
            && !self.twopc.lost_primaries.is_empty()
            && !planted!(self, OldAnswerOutdates)
    }

    /// After a state change: what was told holds while this Primary serves data, and for a node until it is a
    /// neighbour.
    pub(crate) fn settle_told(&mut self, state: &State) {
        let serves =
            state.role == Role::Primary && state.devices.values().all(|d| d.data_accessible());
        let near = state.connected();
        for mask in [&mut self.twopc.told, &mut self.twopc.telling] {
            *mask = match serves {
                true => mask.difference(near),
                false => NodeMask::EMPTY,
            };
        }
    }
}
