//! Options of a connection that change while it is established: `P_PROTOCOL_UPDATE` and
//! `P_SYNC_PARAM89` tell the peer, which adopts them (wire.md, 5.4 and 5.5).
//!
//! Each direction changes by itself: a node's payload carries the new digest behind its own
//! announcement, and each write says in its flags which acks it wants.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::{Protocol as ProtocolPacket, SyncParam89};
use lockstep_format::wire::{AfterSb, Features, Packet, ReplicationProtocol, Role};

use crate::admin::{fail, no_peer};
use crate::command::{Answer, CommandError, ErrorCode};
use crate::connection::protocol_packet;
use crate::event::Stream;
use crate::objects::check_net;
use crate::options::{AfterSplitBrain, NetOptions, Protocol};
use crate::report::Level;
use crate::resource::Resource;
use crate::state::ReplSets;

impl Resource {
    /// `net-options`.
    pub(crate) fn net_options(
        &mut self,
        peer: NodeId,
        net: NetOptions,
    ) -> Result<Answer, CommandError> {
        check_net(&net)?;
        let Some(conn) = self.connections.get(&peer) else {
            return Err(no_peer(peer));
        };
        let runs = |test: fn(lockstep_format::wire::ReplState) -> bool| {
            let volumes = self.state.devices.values();
            volumes
                .filter_map(|d| d.peers.get(&peer))
                .any(|p| test(p.repl))
        };
        if conn.net.csums_alg != net.csums_alg && runs(|repl| repl.is_sync()) {
            return fail(
                ErrorCode::ERR_CSUMS_RESYNC_RUNNING,
                "csums-alg cannot be changed while a resync runs; wait for its end",
            );
        }
        if conn.net.verify_alg != net.verify_alg && runs(|repl| repl.is_verify()) {
            return fail(
                ErrorCode::ERR_VERIFY_RUNNING,
                "verify-alg cannot be changed while an online verify runs; wait for its end",
            );
        }
        let reshaped = conn.net.protocol != net.protocol
            || conn.net.data_integrity_alg != net.data_integrity_alg;
        if crate::legacy::is_old(conn.protocol()) && reshaped {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                format!(
                    "protocol {} has no packet that tells the peer of another replication protocol \
                     or data-integrity-alg; disconnect, change it on both nodes and connect again",
                    conn.protocol()
                ),
            );
        }
        let two_write = self.state.role == Role::Primary && self.peer_role(peer) == Role::Primary;
        if conn.net.allow_two_primaries && !net.allow_two_primaries && two_write {
            return fail(
                ErrorCode::ERR_NEED_ALLOW_TWO_PRI,
                format!("allow-two-primaries stays on while node {peer} and this one are Primary"),
            );
        }
        let zeroes = conn.features().contains(Features::WZEROES) && !conn.is_lockstep();
        if conn.link.is_some() && zeroes && net.integrity().is_some() {
            return fail(
                ErrorCode::ERR_INVALID_REQUEST,
                "this connection was made without data-integrity-alg, and its kernel peer would \
                 misread a zero-out with digests in use; disconnect, change it on both nodes and \
                 connect again",
            );
        }
        self.set_net(peer, net);
        if self.is_established(peer) {
            self.send_net_update(peer);
        }
        self.restart_ping_timer(peer);
        self.recalculate();
        Ok(Answer::Done)
    }

    fn set_net(&mut self, peer: NodeId, net: NetOptions) {
        let forgets = planted!(self, WasAsyncForgotten);
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.io.was_async |=
                conn.net.protocol == Protocol::A && conn.link.is_some() && !forgets;
            conn.net = net;
        }
    }

    fn send_net_update(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let packet = Packet::ProtocolUpdate(protocol_packet(conn));
        if planted!(self, OptionsNotMirrored) {
            return;
        }
        self.send(peer, Stream::Data, VolumeNr::NONE, packet);
        self.announce_integrity(peer);
        let volumes: Vec<VolumeNr> = self.devices.keys().copied().collect();
        for volume in volumes {
            self.send_sync_param(peer, volume);
        }
    }

    /// `P_PROTOCOL_UPDATE`: the peer's options are this node's from now on.
    pub(crate) fn protocol_updated(&mut self, peer: NodeId, theirs: &ProtocolPacket) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let mut net = conn.net.clone();
        net.protocol = match theirs.protocol {
            ReplicationProtocol::A => Protocol::A,
            ReplicationProtocol::B => Protocol::B,
            ReplicationProtocol::C => Protocol::C,
        };
        net.after_sb_0pri = mirrored(theirs.after_sb_0p);
        net.after_sb_1pri = mirrored(theirs.after_sb_1p);
        net.after_sb_2pri = mirrored(theirs.after_sb_2p);
        let alg = theirs.integrity_alg.as_str().unwrap_or_default();
        net.data_integrity_alg = DigestAlg::from_name(alg).map(|alg| alg.name().into());
        net.allow_two_primaries = theirs.two_primaries;
        let changed = net != conn.net;
        if changed {
            let text = format!(
                "the peer changed options of the connection: protocol {:?}, data-integrity-alg \
                 {alg:?}",
                net.protocol
            );
            self.log(Level::Info, Some(peer), None, text);
        }
        self.set_net(peer, net);
        self.adopt_peer_integrity(peer, theirs);
    }

    /// `P_SYNC_PARAM89` on an established connection.
    pub(crate) fn adopt_algorithms(&mut self, peer: NodeId, param: &SyncParam89) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let known = |name: Option<&str>| -> Option<Option<String>> {
            match name? {
                "" => Some(None),
                name => Some(Some(DigestAlg::from_name(name)?.name().into())),
            }
        };
        // An unknown algorithm equals nothing: data are sent, and a verify is refused.
        if let Some(alg) = known(param.csums_alg.as_str()) {
            conn.net.csums_alg = alg;
        }
        if let Some(alg) = known(param.verify_alg.as_str()) {
            conn.net.verify_alg = alg;
        }
    }
}

/// The peer's policy as seen from this side.
fn mirrored(policy: AfterSb) -> AfterSplitBrain {
    match policy {
        AfterSb::Disconnect => AfterSplitBrain::Disconnect,
        AfterSb::DiscardYoungerPrimary => AfterSplitBrain::DiscardYoungerPrimary,
        AfterSb::DiscardOlderPrimary => AfterSplitBrain::DiscardOlderPrimary,
        AfterSb::DiscardZeroChanges => AfterSplitBrain::DiscardZeroChanges,
        AfterSb::DiscardLeastChanges => AfterSplitBrain::DiscardLeastChanges,
        AfterSb::DiscardLocal => AfterSplitBrain::DiscardRemote,
        AfterSb::DiscardRemote => AfterSplitBrain::DiscardLocal,
        AfterSb::Consensus => AfterSplitBrain::Consensus,
        AfterSb::DiscardSecondary => AfterSplitBrain::DiscardSecondary,
        AfterSb::CallPriLostAfterSb => AfterSplitBrain::CallPriLostAfterSb,
        AfterSb::ViolentlyAs0p => AfterSplitBrain::ViolentlyAs0p,
        AfterSb::RetryConnect => AfterSplitBrain::RetryConnect,
        AfterSb::AutoDiscard => AfterSplitBrain::AutoDiscard,
    }
}
