//! What handlers of the configuration do: how long they run, and how they end.

use lockstep_core::event::{Input, Tag};
use lockstep_format::units::NodeId;

use crate::world::{Ev, MS, Place, World};

/// Handlers that worlds with handlers have.
pub const NAMES: [&str; 3] = ["fence-peer", "before-resync-target", "before-resync-source"];

/// `fence-peer`: the peer is down.
const PEER_IS_DOWN: u8 = 5;
/// The handler could not do what it is for.
const BROKEN: u8 = 1;

impl World {
    /// A handler runs; its end comes later.
    pub(crate) fn run_handler(
        &mut self,
        node: usize,
        tag: Tag,
        name: &'static str,
        peer: Option<NodeId>,
    ) {
        let (life, place) = (self.nodes[node].life, Place::Node(node));
        if let Some(peer) = peer.filter(|_| self.fences && name == "fence-peer") {
            self.trace(node, || format!("runs the handler {name}"));
            let call = (node, life, usize::from(peer.0), tag);
            self.fence_calls.push(call);
            return;
        }
        let mut typical = 10 * MS;
        let mut exit_code = 0;
        if self.config.handlers {
            typical = self.chance(place).pick(&[MS, 10 * MS, 300 * MS, 2000 * MS]);
            let fails = self.chance(place).permille(200) && !self.handlers_behave;
            exit_code = match (name, peer) {
                // It never says what is not so.
                ("fence-peer", Some(peer)) if !self.is_up(usize::from(peer.0)) && !fails => {
                    PEER_IS_DOWN
                }
                ("fence-peer", _) => BROKEN,
                _ if fails => BROKEN,
                _ => 0,
            };
        }
        self.trace(node, || {
            format!("runs the handler {name}, which will end with {exit_code}")
        });
        let delay = self.delay(place, typical);
        let input = Box::new(Input::HandlerDone { tag, exit_code });
        self.at(delay, Ev::Input { node, life, input });
    }
}
