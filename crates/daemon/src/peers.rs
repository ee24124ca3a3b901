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

/// The same for a new peer, whose marks need a bitmap.
pub(crate) fn check_new(
    texts: &mut OptionTexts,
    peer: NodeId,
    configured: &Configured,
) -> Result<(), CommandError> {
    let mut volumes = configured.volumes.iter();
    if let Some((volume, _)) = volumes.find(|(_, v)| is_without_bitmap(&v.disk_options)) {
        return Err(CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!(
                "volume {volume} keeps no bitmap, and a peer needs one: disk-options --bitmap=yes"
            ),
        });
    }
    name(texts, peer, configured)
}

/// A disk with peers keeps its bitmap.
pub(crate) fn check_bitmap(
    texts: &OptionTexts,
    configured: &Configured,
) -> Result<(), CommandError> {
    match configured.peers.keys().next() {
        Some(peer) if is_without_bitmap(texts) => Err(CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!("bitmap no: node {peer} is a peer and needs one; del-peer it first"),
        }),
        Some(_) | None => Ok(()),
    }
}

fn is_without_bitmap(disk_options: &OptionTexts) -> bool {
    disk_options.get("bitmap").is_some_and(|text| text == "no")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ConfiguredPeer, ConfiguredVolume};

    #[test]
    fn a_bitmap_and_peers_go_together() {
        let texts = |value: &str| OptionTexts::from([("bitmap".to_owned(), value.to_owned())]);
        let mut configured = Configured::default();
        configured.volumes.insert(3, ConfiguredVolume::default());
        let new = |configured: &Configured| {
            let mut texts = OptionTexts::new();
            check_new(&mut texts, NodeId(1), configured)
        };
        assert!(new(&configured).is_ok());
        assert!(check_bitmap(&texts("no"), &configured).is_ok());
        configured.volumes.get_mut(&3).unwrap().disk_options = texts("no");
        let refused = new(&configured).unwrap_err();
        assert!(refused.text.starts_with("volume 3 keeps no bitmap"));
        configured.volumes.get_mut(&3).unwrap().disk_options = texts("yes");
        assert!(new(&configured).is_ok());
        configured.peers.insert(1, ConfiguredPeer::default());
        let refused = check_bitmap(&texts("no"), &configured).unwrap_err();
        assert!(refused.text.contains("node 1"));
        assert!(check_bitmap(&texts("yes"), &configured).is_ok());
    }
}
