//! A Primary that appears while this node is copied from another one.

use alloc::vec::Vec;

use lockstep_format::units::NodeId;
use lockstep_format::wire::{ConnState, Role};

use crate::resource::Resource;
use crate::state::{ReplSets, State};

impl Resource {
    /// A neighbour has become Primary. It may not have heard yet that this disk is being copied: its first writes
    /// go only to who was whole, and may come to the source after it has sent the block. So when the resync has ended,
    /// the Primary is asked what it has marked.
    pub(crate) fn look_at_new_primaries(&mut self, old: &State, new: &State) {
        let connections = new.connections.iter().filter(|(peer, c)| {
            let before = old.connections.get(peer);
            c.conn == ConnState::Connected
                && c.peer_role == Role::Primary
                && before.is_some_and(|b| b.conn == c.conn && b.peer_role != Role::Primary)
        });
        let primaries: Vec<NodeId> = connections.map(|(peer, _)| *peer).collect();
        for primary in primaries {
            if !self.is_lockstep(primary) || planted!(self, NewPrimaryUnasked) {
                continue;
            }
            for (volume, state) in &new.devices {
                let Some(device) = self.devices.get_mut(volume) else {
                    continue;
                };
                for (source, p) in &state.peers {
                    if *source != primary
                        && p.repl.is_sync_target()
                        && let Some(pd) = device.peers.get_mut(source)
                    {
                        pd.unstable_resync = true;
                    }
                }
            }
        }
    }
}
