//! What the peers of a resource must have: names of their own, and a way to them.

use lockstep_core::command::{CommandError, ErrorCode};
use lockstep_core::state::ConnState;
use lockstep_format::units::NodeId;

use crate::names::Named;
use crate::options::CONNECTION_NAME;
use crate::report::{Configured, OptionTexts};

/// Sees to it that a connection has a name which no other of the resource has. One that is given
/// none is called after the peer's node id: tools find a connection in `status` and `events2` by
/// its name.
pub(crate) fn name(
    texts: &mut OptionTexts,
    peer: NodeId,
    configured: &Configured,
) -> Result<(), CommandError> {
    let name = texts.entry(CONNECTION_NAME.to_owned()).or_default();
    if name.is_empty() {
        *name = format!("node-{peer}");
    }
    for (id, other) in &configured.peers {
        if *id != peer.0 && other.options.get(CONNECTION_NAME) == Some(name) {
            return Err(CommandError {
                code: ErrorCode::ERR_ALREADY_EXISTS,
                text: format!("the connection to node {id} is named '{name}' already"),
            });
        }
    }
    Ok(())
}

/// A connection that is not StandAlone keeps its last path.
pub(crate) fn check_last_path(peer: NodeId, state: ConnState) -> Result<(), CommandError> {
    if state == ConnState::StandAlone {
        return Ok(());
    }
    Err(CommandError {
        code: ErrorCode::ERR_NET_CONFIGURED,
        text: format!(
            "it is the only path to node {peer}, and the connection is {}; disconnect first, or \
             add another path",
            state.text()
        ),
    })
}
