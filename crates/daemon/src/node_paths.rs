//! How peers are reached: paths, and the network namespaces that they are in.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use lockstep_core::command::{Command, CommandError, ErrorCode};
use lockstep_format::units::NodeId;
use lockstep_io::tcp::{NetNamespace, PeerNet};

use super::{CommandResult, Entry, Node, known_peer, lock, node, refuse};
use crate::address::{self, path};
use crate::namespaces;
use crate::options;
use crate::peers;
use crate::report::PathReport;

/// Paths of one connection.
const MAX_PATHS: usize = 16;

impl Node {
    /// The namespace of a descriptor that came with a request; `None` if it is the daemon's own.
    pub(crate) fn namespace(
        self: &Arc<Self>,
        descriptor: OwnedFd,
    ) -> Result<Option<NetNamespace>, CommandError> {
        let refuse = |error: std::io::Error| CommandError {
            code: ErrorCode::ERR_INVALID_REQUEST,
            text: format!("the daemon cannot enter the caller's network namespace: {error}"),
        };
        let namespace = NetNamespace::new(descriptor).map_err(refuse)?;
        if namespace.is_some() {
            self.namespaces.start(self).map_err(refuse)?;
        }
        Ok(namespace)
    }

    pub(crate) fn new_path(
        &self,
        name: &str,
        peer: u32,
        local: String,
        remote: String,
        namespace: Option<NetNamespace>,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        let known = known_peer(&entry, peer)?;
        address::check_unused(&lock(&entry.configured).configured, peer, &local, &remote)?;
        let new = path(&local, &remote)?;
        if new.local.is_ipv4() != new.peer.is_ipv4() {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("path {local} {remote}: both ends need the same address family"),
            );
        }
        if known.paths.len() >= MAX_PATHS {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("a connection has at most {MAX_PATHS} paths"),
            );
        }
        if !known.paths.is_empty() && known.namespace != namespace {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!(
                    "path {local} {remote}: the connection's other paths are in another network \
                     namespace; delete them first, or use `ip netns exec`"
                ),
            );
        }
        self.path_pairs.take(namespace.clone(), new)?;
        let inode = namespace.as_ref().map(NetNamespace::inode);
        self.done(name, &entry, Ok(()), |c| {
            if let Some(configured) = c.peers.get_mut(&peer.0) {
                configured.namespace = namespace;
                configured.paths.push(PathReport {
                    local,
                    remote,
                    established: false,
                });
            }
        })?;
        if let Some(inode) = inode {
            self.namespaces.add(inode);
        }
        self.tell_paths(&entry, peer)
    }

    pub(crate) fn del_path(
        &self,
        name: &str,
        peer: u32,
        local: &str,
        remote: &str,
    ) -> CommandResult {
        let entry = self.find(name)?;
        let peer = node(peer)?;
        let known = known_peer(&entry, peer)?;
        let paths = &known.paths;
        if !paths.iter().any(|p| p.local == local && p.remote == remote) {
            return refuse(
                ErrorCode::ERR_INVALID_REQUEST,
                format!("there is no path {local} {remote}"),
            );
        }
        if let [_] = paths.as_slice()
            && let Ok(Some(snapshot)) = self.shards[entry.shard].snapshot(entry.id)
            && let Some(conn) = snapshot.connections.iter().find(|conn| conn.peer == peer)
        {
            peers::check_last_path(peer, conn.state)?;
        }
        self.done(name, &entry, Ok(()), |c| {
            self.path_pairs.free(&known.namespace, local, remote);
            if let Some(configured) = c.peers.get_mut(&peer.0) {
                configured
                    .paths
                    .retain(|p| p.local != local || p.remote != remote);
                configured.let_go_of_namespace();
            }
        })?;
        self.tell_paths(&entry, peer)
    }

    /// Tells the shard how a peer is reached.
    pub(super) fn tell_paths(&self, entry: &Entry, peer: NodeId) -> CommandResult {
        let configured = known_peer(entry, peer)?;
        let mut paths = Vec::new();
        for p in &configured.paths {
            paths.push(path(&p.local, &p.remote)?);
        }
        let mut net = PeerNet::new(paths, &options::net(&configured.options)?);
        net.namespace = configured.namespace;
        let bytes = |name: &str| {
            let text = configured.options.get(name);
            text.and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        net.send_buffer_bytes = bytes("sndbuf-size");
        net.receive_buffer_bytes = bytes("rcvbuf-size");
        self.shards[entry.shard].set_peer(entry.id, peer, net);
        Ok(())
    }

    /// Ends the connections of namespaces that have been taken away. Tells whether some are on their
    /// way: without a name, but with a process.
    pub(crate) fn leave_ended_namespaces(&self) -> namespaces::Ending {
        let entries: Vec<(String, Arc<Entry>)> = lock(&self.resources)
            .iter()
            .map(|(name, entry)| (name.clone(), entry.clone()))
            .collect();
        let mut used = Vec::new();
        for (name, entry) in &entries {
            for (id, peer) in &lock(&entry.configured).configured.peers {
                if let (Some(namespace), Some(peer)) =
                    (&peer.namespace, NodeId::new(u32::from(*id)))
                {
                    used.push((namespace.inode(), name, entry, peer));
                }
            }
        }
        let (ended, ending) = self
            .namespaces
            .ended(&used.iter().map(|(inode, ..)| *inode).collect());
        for (inode, name, entry, peer) in used {
            if ended.contains(&inode) {
                tracing::warn!(
                    resource = name,
                    peer = peer.0,
                    "its network namespace has ended"
                );
                if let Err(error) = self.leave_namespace(name, entry, peer) {
                    tracing::warn!(resource = name, peer = peer.0, %error, "its paths stay");
                }
            }
        }
        ending
    }

    fn leave_namespace(&self, name: &str, entry: &Entry, peer: NodeId) -> CommandResult {
        let disconnect = Command::Disconnect { peer, force: true };
        match self.core(entry, disconnect) {
            Err(error) if error.code != ErrorCode::ALREADY_STANDALONE => return Err(error),
            result => drop(self.done(name, entry, result, |_| {})),
        }
        self.done(name, entry, Ok(()), |c| {
            if let Some(configured) = c.peers.get_mut(&peer.0) {
                self.path_pairs.free_all(configured);
                configured.paths.clear();
                configured.let_go_of_namespace();
            }
        })?;
        self.tell_paths(entry, peer)
    }
}
