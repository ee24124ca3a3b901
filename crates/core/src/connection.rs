//! A connection: its link, the handshake up to `P_PROTOCOL`, authentication, pings, and its loss.
//!
//! What a connection means for volumes is decided in `handshake.rs` and `twopc.rs`.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::packet::{AlgName, ConnectionFeatures, Protocol as ProtocolPacket};
use lockstep_format::wire::{
    self, AfterSb, ConnFlags, ConnState, Digest, Features, Packet, ReplicationProtocol, Role,
};

use crate::auth::{Authenticator, HmacAlg};
use crate::command::{Answer, CommandError};
use crate::data::ConnIo;
use crate::data::doubt::Doubt;
use crate::event::{CommandId, LinkDownReason, LinkEnd, LinkId, Output, Stream};
use crate::options::{AfterSplitBrain, NetOptions, Protocol};
use crate::report::Level;
use crate::resource::Resource;
use crate::second_look::Over;
use crate::time::{Duration, Instant};
use crate::timers::Timer;
use crate::transition::Change;

/// Feature bits that this node offers to every peer.
pub const FEATURES: Features = Features::TRIM
    .union(Features::THIN_RESYNC)
    .union(Features::WSAME)
    .union(Features::WZEROES)
    .union(Features::RESYNC_DAGTAG)
    .union(Features::TWOPC_V2)
    .union(Features::RESYNC_WITHOUT_REPLICATION)
    .union(Features::BM_BLOCK_SHIFT)
    .union(Features::LOCKSTEP);

/// First protocol with the flush before the end of a resync (semantics.md, 19.6).
pub(crate) const WITH_FLUSH: u32 = 123;

/// A connection to one peer node.
#[derive(Debug)]
pub struct Connection {
    /// The peer.
    pub peer: NodeId,
    /// Options.
    pub net: NetOptions,
    /// The established streams, if any.
    pub link: Option<Link>,
    /// Dialect of the last link: what was sent on it is encoded after the core let go of it.
    pub last_dialect: Option<wire::Dialect>,
    /// `connect --discard-my-data` is in force.
    pub discard_my_data: bool,
    /// This Primary lost a split brain with the peer and gives its role up: as a Secondary it
    /// connects as by `connect --discard-my-data`.
    pub lost_split_brain: bool,
    /// `connect --tentative` is in force.
    pub tentative: bool,
    /// The driver was asked to connect and did not succeed yet.
    pub connecting: bool,
    /// Received writes of the lost link are still being written.
    pub draining: bool,
    /// The link that is being cleaned up after had ended its handshake.
    pub was_established: bool,
    /// Commands that wait for this connection to be StandAlone.
    pub waiting_down: Vec<CommandId>,
    /// Dagtag of the last write received from the peer.
    pub last_dagtag: Dagtag,
    /// `last_dagtag` is of the present link.
    pub dagtag_fresh: bool,
    /// The lost peer was Primary and the other survivors were not told yet (semantics.md, 18.5).
    pub notify_lost_primary: bool,
    /// Survivors that were told since the peer was lost.
    pub told_lost: NodeMask,
    /// How far this node had come, as it told them.
    pub told_dagtag: Dagtag,
    /// `verify-alg` of the peer, from its last `P_SYNC_PARAM89`.
    pub peer_verify_alg: String,
    /// What the peer said of a commonly lost Primary during the handshake.
    pub peer_dagtag: Option<(NodeId, Dagtag)>,
    /// What it said of a Primary that this node still reaches: it has lost its own link only.
    pub kept_dagtag: Option<(NodeId, Dagtag)>,
    /// What it said last of a lost Primary that is not back since.
    pub lost_word: Option<(NodeId, Dagtag)>,
    /// Try the connect two-phase commit so many times already.
    pub attempts: u32,
    /// The data path's part.
    pub io: ConnIo,
}

/// Two established streams and what was agreed on them.
#[derive(Debug)]
pub struct Link {
    /// Its name at the driver.
    pub id: LinkId,
    /// This node accepted the control stream (wire.md, 2.4).
    pub resolve_conflicts: bool,
    /// When it came up.
    pub since: Instant,
    /// Where the handshake stands.
    pub phase: Phase,
    /// The authentication under way.
    pub authenticator: Option<Authenticator>,
    /// Agreed protocol version, 0 before.
    pub protocol: u32,
    /// Agreed features.
    pub features: Features,
    /// Features that were offered on it.
    pub offered: Features,
    /// Integrity digest of payload that the peer sends.
    pub peer_integrity: Option<DigestAlg>,
    /// Integrity digest of payload that this node sends.
    pub own_integrity: Option<DigestAlg>,
    /// A ping was sent and not answered.
    pub ping_outstanding: bool,
    /// Pings that were sent, also those that no time-out watches.
    pub pings_sent: u64,
    /// How many of them are answered.
    pub pings_answered: u64,
    /// The number of the ping that is outstanding.
    pub ping_number: u64,
    /// A ping came before the versions were agreed on here, and is answered when they are.
    pub ping_unanswered: bool,
    /// Resyncs from an 8.4 source that end when so many more pings are answered.
    pub ends_after_pings: Vec<(VolumeNr, u8)>,
    /// The peer's `P_PROTOCOL` wants a dry run.
    pub dry_run: bool,
    /// The peer announced `--discard-my-data`.
    pub peer_discards: bool,
    /// Role that the volumes' packets of a handshake without two-phase commit told.
    pub sent_role: Option<Role>,
    /// Volumes that the peer told of and this node did not have.
    pub not_here: BTreeSet<VolumeNr>,
    /// Whether the peer has lost it: what it wrote is then no news any more.
    pub lost_there: LostThere,
    /// The peer was Primary, and became Secondary when it seemed to have lost it: it may have written
    /// without this node.
    pub demoted_apart: bool,
    /// Whether it is vouched for.
    pub(crate) doubt: Doubt,
}

/// Whether a peer has lost a link that is up here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostThere {
    /// Nothing speaks for it.
    No,
    /// A question of the peer came through another node.
    Perhaps,
    /// The same, and a ping has been sent since: an answer says that the question was older than the
    /// link.
    Asked,
}

/// Steps of the handshake (wire.md, 5.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// `P_CONNECTION_FEATURES` was sent.
    Features,
    /// The challenge was sent.
    Challenge,
    /// The response was sent.
    Response,
    /// `P_PROTOCOL` was sent.
    Protocol,
    /// Waiting for the connect two-phase commit.
    Ready,
    /// Committed.
    Established,
}

impl Connection {
    /// A connection in StandAlone.
    pub fn new(peer: NodeId, net: NetOptions) -> Self {
        Connection {
            peer,
            net,
            link: None,
            last_dialect: None,
            discard_my_data: false,
            lost_split_brain: false,
            tentative: false,
            connecting: false,
            draining: false,
            was_established: false,
            waiting_down: Vec::new(),
            last_dagtag: Dagtag(0),
            dagtag_fresh: false,
            notify_lost_primary: false,
            told_lost: NodeMask::EMPTY,
            told_dagtag: Dagtag(0),
            peer_verify_alg: String::new(),
            peer_dagtag: None,
            kept_dagtag: None,
            lost_word: None,
            attempts: 0,
            io: ConnIo::default(),
        }
    }

    /// Agreed features; none without a link.
    pub fn features(&self) -> Features {
        self.link.as_ref().map_or(Features::empty(), |l| l.features)
    }

    /// Agreed protocol version; 0 without a link.
    pub fn protocol(&self) -> u32 {
        self.link.as_ref().map_or(0, |l| l.protocol)
    }

    /// Both ends are Lockstep nodes.
    pub fn is_lockstep(&self) -> bool {
        self.features().contains(Features::LOCKSTEP)
    }

    /// The link speaks a dialect of 8.x (protocol below 110).
    pub fn is_legacy(&self) -> bool {
        crate::legacy::is_legacy(self.protocol())
    }

    /// No changes are given up any more because of a policy. Says whether some were to be.
    pub fn forget_lost_split_brain(&mut self) -> bool {
        let lost = core::mem::take(&mut self.lost_split_brain);
        if lost {
            self.discard_my_data = false;
        }
        lost
    }

    /// The time-out of one ping.
    pub fn ping_timeout(&self) -> Duration {
        Duration::from_tenths(u64::from(self.net.ping_timeout_tenths))
    }
}

impl Resource {
    /// The driver has both streams.
    pub(crate) fn link_up(&mut self, peer: NodeId, link: LinkId, resolve_conflicts: bool) {
        let now = self.now;
        let node_id = self.node_id;
        let (protocol_min, protocol_max) = (self.protocol_min(peer), self.options.protocol_max);
        let usable = self.state.conn(peer) == ConnState::Connecting;
        let Some(conn) = self.connections.get_mut(&peer) else {
            self.output(Output::CloseLink {
                peer,
                link,
                end: LinkEnd::AtOnce,
            });
            return;
        };
        if !usable || conn.link.is_some() {
            self.output(Output::CloseLink {
                peer,
                link,
                end: LinkEnd::AtOnce,
            });
            return;
        }
        conn.connecting = false;
        let offered = match crate::legacy::is_old(protocol_max) {
            true => Features::empty(),
            false => conn.offered_features(),
        };
        let offered = match self.options.kernel_rules {
            true => offered.difference(Features::LOCKSTEP),
            false => offered,
        };
        conn.link = Some(Link {
            id: link,
            resolve_conflicts,
            since: now,
            phase: Phase::Features,
            authenticator: None,
            protocol: 0,
            features: Features::empty(),
            offered,
            peer_integrity: None,
            own_integrity: None,
            ping_outstanding: false,
            pings_sent: 0,
            pings_answered: 0,
            ping_number: 0,
            ping_unanswered: false,
            ends_after_pings: Vec::new(),
            dry_run: false,
            peer_discards: false,
            sent_role: None,
            not_here: BTreeSet::new(),
            lost_there: LostThere::No,
            demoted_apart: false,
            doubt: Doubt::default(),
        });
        let timeout = conn.ping_timeout().times(4);
        self.timers.set(Timer::Handshake(peer), now + timeout);
        self.restart_ping_timer(peer);
        let features = ConnectionFeatures {
            protocol_min: protocol_min.min(protocol_max),
            protocol_max,
            features: offered,
            sender_node_id: node_id,
            receiver_node_id: peer,
        };
        self.send(
            peer,
            Stream::Data,
            VolumeNr::NONE,
            Packet::ConnectionFeatures(features),
        );
        self.look_at_disks(peer);
    }

    /// The driver lost a link.
    pub(crate) fn link_down(&mut self, peer: NodeId, link: LinkId, reason: LinkDownReason) {
        let ours = self
            .connections
            .get(&peer)
            .and_then(|c| c.link.as_ref())
            .is_some_and(|l| l.id == link);
        if !ours {
            return;
        }
        let conn_state = match reason {
            LinkDownReason::Closed | LinkDownReason::Broken => ConnState::NetworkFailure,
            LinkDownReason::SendTimeout => ConnState::Timeout,
            LinkDownReason::Protocol => ConnState::ProtocolError,
        };
        self.log(
            Level::Warn,
            Some(peer),
            None,
            format!("the connection was lost: {reason:?}"),
        );
        self.drop_connection(peer, conn_state);
    }

    /// Ends the link for a reason that retries; `StandAlone` is reached with `Disconnecting`.
    pub(crate) fn drop_connection(&mut self, peer: NodeId, reason: ConnState) {
        if self.state.conn(peer) < ConnState::Unconnected {
            self.lose_link(peer, LinkEnd::AtOnce);
            return;
        }
        let link = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        let missed = link.is_some_and(|l| l.demoted_apart && l.lost_there != LostThere::No);
        self.hard_change(Change::new().conn(peer, reason));
        if missed && (self.others_have_disks() || planted!(self, OnlyDiskOutdated)) {
            self.outdate_self();
        }
    }

    /// The last link led to a node that is no Lockstep node.
    pub(crate) fn last_was_kernel(&self, peer: NodeId) -> bool {
        let last = self.connections.get(&peer).and_then(|c| c.last_dialect);
        last.is_some_and(|d| d.protocol != 0 && !d.features.contains(Features::LOCKSTEP))
    }

    /// A refusal by policy: no retry until the operator says so.
    pub(crate) fn go_standalone(&mut self, peer: NodeId, why: String) {
        self.log(Level::Error, Some(peer), None, why);
        self.drop_connection(peer, ConnState::Disconnecting);
    }

    /// Closes the streams, if any, and starts the cleanup.
    pub(crate) fn lose_link(&mut self, peer: NodeId, end: LinkEnd) {
        let dialect = self.dialect(peer);
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        if let Some(link) = conn.link.take() {
            conn.last_dialect = Some(dialect);
            self.output(Output::CloseLink {
                peer,
                link: link.id,
                end,
            });
        } else if conn.connecting {
            conn.connecting = false;
            self.output(Output::StopConnecting { peer });
        }
        self.timers.clear_peer(peer);
    }

    /// A packet of the handshake or of the link itself; others go on to volumes.
    /// Returns the packet if it is not for this module.
    pub(crate) fn connection_packet(
        &mut self,
        peer: NodeId,
        stream: Stream,
        packet: Packet,
    ) -> Option<Packet> {
        let phase = self.connections.get(&peer)?.link.as_ref()?.phase.clone();
        match (packet, phase) {
            (Packet::Ping, Phase::Features) => {
                // The peer has agreed already: it expects another header than this node would send.
                let conn = self.connections.get_mut(&peer)?;
                conn.link.as_mut()?.ping_unanswered = true;
            }
            (Packet::Ping, _) => {
                self.send(peer, Stream::Control, VolumeNr::NONE, Packet::PingAck);
                self.targets_may_end(peer);
            }
            (Packet::PingAck, _) => self.ping_answered(peer),
            (Packet::ConnectionFeatures(features), Phase::Features) => {
                self.features_received(peer, features);
            }
            (Packet::AuthChallenge(challenge), Phase::Challenge) => {
                self.challenge_received(peer, &challenge);
            }
            (Packet::AuthResponse(digest), Phase::Response) => {
                self.response_received(peer, digest);
            }
            (Packet::Protocol(protocol), Phase::Protocol) => {
                self.protocol_received(peer, protocol);
            }
            (Packet::ProtocolUpdate(protocol), Phase::Established) => {
                self.protocol_updated(peer, &protocol);
            }
            (packet, Phase::Ready | Phase::Established) => return Some(packet),
            // A Primary has passed a flush on to the peer, and a kernel answers by any stream that there is, even
            // before its features. No flush waits for a node that is not connected: nothing is missed.
            (Packet::FlushRequestsAck(_), _) if stream == Stream::Data => {}
            (packet, Phase::Challenge) => {
                let text = format!(
                    "authentication is configured here, but the peer sent {:?}; set the same \
                     cram-hmac-alg and shared-secret on both nodes",
                    packet.command()
                );
                self.go_standalone(peer, text);
            }
            (packet, phase) => {
                let text = format!(
                    "unexpected {:?} on the {stream:?} stream in {phase:?}",
                    packet.command()
                );
                self.log(Level::Warn, Some(peer), None, text);
                self.drop_connection(peer, ConnState::ProtocolError);
            }
        }
        None
    }

    fn features_received(&mut self, peer: NodeId, theirs: ConnectionFeatures) {
        let own_min = self.protocol_min(peer);
        let own_max = self.options.protocol_max;
        let peer_max = if theirs.protocol_max == 0 {
            theirs.protocol_min
        } else {
            theirs.protocol_max
        };
        let never_spoken = wire::PROTOCOL_MAX_84 + 1..wire::PROTOCOL_MIN_9;
        if never_spoken.contains(&peer_max) || own_max < theirs.protocol_min || own_min > peer_max {
            let text = format!(
                "incompatible dialects: this node speaks protocol {own_min} to {own_max}, the peer \
                 {} to {peer_max}{}",
                theirs.protocol_min,
                if self.has_other_connections(peer) {
                    "; a peer of 8.4 needs a resource with no other connection"
                } else {
                    ""
                }
            );
            self.go_standalone(peer, text);
            return;
        }
        let mut protocol = own_max.min(peer_max);
        if self.options.unnumbered && self.peer_chose_the_same_id(peer, &theirs) {
            protocol = protocol.min(wire::PROTOCOL_MAX_84);
        }
        let legacy = crate::legacy::is_legacy(protocol);
        let named = theirs.sender_node_id == peer && theirs.receiver_node_id == self.node_id;
        if !legacy && !named {
            let text = format!(
                "the peer says it is node {} and expects node {}; configured here are node {peer} \
                 and node {}",
                theirs.sender_node_id, theirs.receiver_node_id, self.node_id
            );
            self.log(Level::Error, Some(peer), None, text);
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        if let Some(text) = self.old_version_lacks(peer, protocol) {
            self.go_standalone(peer, text);
            return;
        }
        let offered = self.connections.get(&peer).and_then(|c| c.link.as_ref());
        let mut features = offered.map_or(FEATURES, |l| l.offered) & theirs.features;
        if legacy {
            features &= crate::legacy::FEATURES;
        }
        if protocol < WITH_FLUSH {
            // The end of a resync without replication needs it.
            features.remove(Features::RESYNC_WITHOUT_REPLICATION);
        }
        if crate::legacy::is_old(protocol) {
            // They came with 8.4.4; whoever speaks less has none of them.
            features = Features::empty();
        }
        if protocol == 121 && features.contains(Features::RESYNC_DAGTAG) {
            let text = "protocol 121 with dagtag requests merges resync acks; update the peer";
            self.go_standalone(peer, text.into());
            return;
        }
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let alg = conn.net.cram_hmac_alg.clone();
        let secret = conn.net.shared_secret.clone().unwrap_or_default();
        let Some(link) = conn.link.as_mut() else {
            return;
        };
        link.protocol = protocol;
        link.features = features;
        if core::mem::take(&mut link.ping_unanswered) {
            self.send(peer, Stream::Control, VolumeNr::NONE, Packet::PingAck);
        }
        let Some(alg) = alg else {
            self.send_protocol(peer);
            return;
        };
        let alg = match HmacAlg::from_name(&alg) {
            Ok(alg) => alg,
            Err(error) => {
                self.go_standalone(peer, format!("{error}"));
                return;
            }
        };
        let mut own = [0u8; 64];
        for chunk in own.chunks_exact_mut(8) {
            chunk.copy_from_slice(&self.rng.next_u64().to_be_bytes());
        }
        let nodes = (!legacy).then_some((self.node_id, peer));
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.authenticator = Some(Authenticator::new(alg, &secret, own, nodes));
        }
        self.set_phase(peer, Phase::Challenge);
        self.send(
            peer,
            Stream::Data,
            VolumeNr::NONE,
            Packet::AuthChallenge(own),
        );
    }

    /// Whether the peer numbers the two nodes as this one does, each beginning with itself, and
    /// both can do without numbers. What is compared is the same on both sides, and so the answer.
    fn peer_chose_the_same_id(&self, peer: NodeId, theirs: &ConnectionFeatures) -> bool {
        theirs.sender_node_id == self.node_id
            && theirs.receiver_node_id == peer
            && theirs.protocol_min.max(self.protocol_min(peer)) <= wire::PROTOCOL_MAX_84
    }

    /// Oldest protocol version for this peer: 8.4 knows two nodes only.
    fn protocol_min(&self, peer: NodeId) -> u32 {
        if self.has_other_connections(peer) {
            wire::PROTOCOL_MIN_9
        } else {
            crate::legacy::PROTOCOL_MIN
        }
    }

    fn authenticator(&self, peer: NodeId) -> Option<&Authenticator> {
        self.connections
            .get(&peer)?
            .link
            .as_ref()?
            .authenticator
            .as_ref()
    }

    fn challenge_received(&mut self, peer: NodeId, theirs: &[u8; 64]) {
        let Some(answer) = self.authenticator(peer).map(|a| a.respond(theirs)) else {
            return;
        };
        match answer {
            Ok(digest) => {
                self.set_phase(peer, Phase::Response);
                self.send(
                    peer,
                    Stream::Data,
                    VolumeNr::NONE,
                    Packet::AuthResponse(digest),
                );
            }
            Err(error) => self.go_standalone(peer, format!("{error}")),
        }
    }

    fn response_received(&mut self, peer: NodeId, theirs: Digest) {
        let Some(verdict) = self.authenticator(peer).map(|a| a.check(theirs.as_bytes())) else {
            return;
        };
        match verdict {
            Ok(()) => self.send_protocol(peer),
            Err(_) if planted!(self, AnySecretDoes) => self.send_protocol(peer),
            Err(error) if error.may_retry() => {
                self.log(Level::Warn, Some(peer), None, format!("{error}"));
                self.drop_connection(peer, ConnState::NetworkFailure);
            }
            Err(error) => self.go_standalone(peer, format!("{error}")),
        }
    }

    fn send_protocol(&mut self, peer: NodeId) {
        self.set_phase(peer, Phase::Protocol);
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let packet = Packet::Protocol(protocol_packet(conn));
        self.send(peer, Stream::Data, VolumeNr::NONE, packet);
        self.announce_integrity(peer);
    }

    fn protocol_received(&mut self, peer: NodeId, theirs: ProtocolPacket) {
        let Some(conn) = self.connections.get_mut(&peer) else {
            return;
        };
        let ours = protocol_packet(conn);
        if conn.lost_split_brain
            && conn.discard_my_data
            && theirs.conn_flags.contains(ConnFlags::DISCARD_MY_DATA)
        {
            // Each lost to the other, for instance one volume each: as Secondaries they decide anew.
            conn.forget_lost_split_brain();
            let text = "both nodes give up their changes; connecting again without that";
            self.log(Level::Info, Some(peer), None, text.into());
            self.drop_connection(peer, ConnState::NetworkFailure);
            return;
        }
        if let Some(text) = protocol_mismatch(&ours, &theirs) {
            self.go_standalone(peer, text);
            return;
        }
        if let Some(link) = conn.link.as_mut() {
            link.dry_run = theirs.conn_flags.contains(ConnFlags::DRY_RUN);
            link.peer_discards = theirs.conn_flags.contains(ConnFlags::DISCARD_MY_DATA);
        }
        let patience = conn.ping_timeout().times(10);
        self.adopt_peer_integrity(peer, &theirs);
        self.set_phase(peer, Phase::Ready);
        let now = self.now;
        if self.is_legacy(peer) {
            self.timers.set(Timer::Handshake(peer), now + patience);
            self.legacy_handshake(peer);
        } else if self.node_id < peer {
            self.timers.set(Timer::ConnectTwopc(peer), now);
            self.timers.clear(Timer::Handshake(peer));
        } else {
            self.timers.set(Timer::Handshake(peer), now + patience);
        }
    }

    pub(crate) fn set_phase(&mut self, peer: NodeId, phase: Phase) {
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.phase = phase;
        }
    }

    /// The handshake's next packet did not come in time.
    pub(crate) fn handshake_timeout(&mut self, peer: NodeId, over: Over) {
        if self.state.conn(peer) == ConnState::Connecting
            && !planted!(self, HandshakeNeverTimesOut)
            && !self.looks_again(over)
        {
            self.drop_connection(peer, ConnState::NetworkFailure);
        }
    }

    /// Bytes came on the control stream: the peer lives.
    pub(crate) fn restart_ping_timer(&mut self, peer: NodeId) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let Some(link) = conn.link.as_ref() else {
            return;
        };
        if planted!(self, PingTimerNotRearmed) && !link.ping_outstanding {
            return;
        }
        let span = if link.ping_outstanding {
            conn.ping_timeout()
        } else {
            Duration::from_secs(u64::from(conn.net.ping_int_s))
        };
        let at = self.now + span;
        self.timers.set(Timer::Ping(peer), at);
    }

    /// `Timer::Ping`.
    pub(crate) fn ping_timer(&mut self, peer: NodeId, over: Over) {
        let Some(link) = self.connections.get(&peer).and_then(|c| c.link.as_ref()) else {
            return;
        };
        if link.ping_outstanding && !planted!(self, SilentPeerKept) {
            if self.looks_again(over) {
                return;
            }
            self.log(
                Level::Warn,
                Some(peer),
                None,
                "the peer did not answer a ping".into(),
            );
            self.drop_connection(peer, ConnState::NetworkFailure);
        } else {
            self.ping(peer);
        }
    }

    /// Sends a ping unless one is under way; its answer is due within `ping-timeout`.
    pub(crate) fn ping(&mut self, peer: NodeId) {
        let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        else {
            return;
        };
        if link.ping_outstanding && !planted!(self, PingsMoveTimeOut) {
            return;
        }
        // Before the versions are agreed on there is no header that the peer is sure to expect: it
        // may have agreed by the time it reads this. The limit of the handshake stands in.
        if link.phase != Phase::Features {
            link.ping_outstanding = true;
            link.pings_sent += 1;
            link.ping_number = link.pings_sent;
            self.send(peer, Stream::Control, VolumeNr::NONE, Packet::Ping);
        }
        self.restart_ping_timer(peer);
    }

    /// Sends a ping that may be answered whenever that is: what went before it on the control stream has arrived
    /// then. Gives its number.
    pub(crate) fn ping_without_haste(&mut self, peer: NodeId) -> Option<u64> {
        let conn = self.connections.get_mut(&peer);
        let link = conn.and_then(|c| c.link.as_mut())?;
        link.pings_sent += 1;
        let number = link.pings_sent;
        self.send(peer, Stream::Control, VolumeNr::NONE, Packet::Ping);
        Some(number)
    }

    fn ping_answered(&mut self, peer: NodeId) {
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.pings_answered += 1;
            let answered = link.pings_answered;
            let early = link.ping_outstanding && answered < link.ping_number;
            self.acks_arrived(peer, answered);
            if early {
                return;
            }
        }
        if let Some(link) = self
            .connections
            .get_mut(&peer)
            .and_then(|c| c.link.as_mut())
        {
            link.ping_outstanding = false;
            if link.lost_there == LostThere::Asked && !planted!(self, LostThereKept) {
                link.lost_there = LostThere::No;
                link.demoted_apart = false;
            }
        }
        self.ask_if_lost_there(peer);
        self.keep_words_about(peer);
        self.restart_ping_timer(peer);
        self.legacy_acks_arrived(peer);
        self.late_marks_answered(peer);
        self.doubt_answered(peer);
        self.pings_progress();
    }

    /// The driver connects again after a pause, when the lost link's writes have drained.
    pub(crate) fn reconnect(&mut self, peer: NodeId) {
        if self.state.conn(peer) == ConnState::Unconnected {
            self.hard_change(Change::new().conn(peer, ConnState::Connecting));
        }
    }

    /// Role of the conflict resolver (semantics.md, 9.1). With several paths at once the nodes may
    /// differ on which one stood first, and both would come to the same role; nodes of this project
    /// go by their ids then.
    pub(crate) fn resolves_conflicts(&self, peer: NodeId) -> bool {
        let Some(conn) = self.connections.get(&peer) else {
            return false;
        };
        match &conn.link {
            Some(_) if conn.net.load_balance_paths && conn.is_lockstep() => self.node_id > peer,
            Some(link) => link.resolve_conflicts,
            None => false,
        }
    }

    /// `connect`.
    pub(crate) fn command_connect(
        &mut self,
        peer: NodeId,
        discard_my_data: bool,
        tentative: bool,
    ) -> Result<Answer, CommandError> {
        let role = self.state.role;
        let conn_state = self.state.conn(peer);
        if !self.connections.contains_key(&peer) {
            return Err(crate::admin::no_peer(peer));
        }
        if conn_state != ConnState::StandAlone {
            return Err(CommandError {
                code: crate::command::ErrorCode::ERR_NET_CONFIGURED,
                text: format!("the connection to node {peer} is {conn_state:?} already"),
            });
        }
        if discard_my_data && role == Role::Primary {
            return Err(CommandError {
                code: crate::command::ErrorCode::ERR_DISCARD_IMPOSSIBLE,
                text: "--discard-my-data is not possible on a Primary; demote it first".into(),
            });
        }
        self.give_slots(peer)?;
        let Some(conn) = self.connections.get_mut(&peer) else {
            return Err(crate::admin::no_peer(peer));
        };
        conn.discard_my_data = discard_my_data;
        conn.lost_split_brain = false;
        conn.tentative = tentative;
        conn.attempts = 0;
        // As with kernels what is shown counts from this command on: who compares how far two followers came
        // connects both anew first.
        for device in self.devices.values_mut() {
            if let Some(pd) = device.peers.get_mut(&peer) {
                (pd.io.received_sectors, pd.io.sent_sectors) = (0, 0);
            }
        }
        self.hard_change(Change::new().conn(peer, ConnState::Unconnected));
        Ok(Answer::Done)
    }
}

/// `P_PROTOCOL` for this connection's options.
pub(crate) fn protocol_packet(conn: &Connection) -> ProtocolPacket {
    let net = &conn.net;
    let mut conn_flags = ConnFlags::empty();
    if conn.discard_my_data {
        conn_flags |= ConnFlags::DISCARD_MY_DATA;
    }
    if conn.tentative {
        conn_flags |= ConnFlags::DRY_RUN;
    }
    ProtocolPacket {
        protocol: match net.protocol {
            Protocol::A => ReplicationProtocol::A,
            Protocol::B => ReplicationProtocol::B,
            Protocol::C => ReplicationProtocol::C,
        },
        after_sb_0p: after_sb(net.after_sb_0pri),
        after_sb_1p: after_sb(net.after_sb_1pri),
        after_sb_2p: after_sb(net.after_sb_2pri),
        conn_flags,
        two_primaries: net.allow_two_primaries,
        integrity_alg: net
            .data_integrity_alg
            .as_ref()
            .and_then(|a| AlgName::new(a.as_bytes()))
            .unwrap_or_default(),
    }
}

fn after_sb(policy: AfterSplitBrain) -> AfterSb {
    match policy {
        AfterSplitBrain::Disconnect => AfterSb::Disconnect,
        AfterSplitBrain::DiscardYoungerPrimary => AfterSb::DiscardYoungerPrimary,
        AfterSplitBrain::DiscardOlderPrimary => AfterSb::DiscardOlderPrimary,
        AfterSplitBrain::DiscardZeroChanges => AfterSb::DiscardZeroChanges,
        AfterSplitBrain::DiscardLeastChanges => AfterSb::DiscardLeastChanges,
        AfterSplitBrain::DiscardLocal => AfterSb::DiscardLocal,
        AfterSplitBrain::DiscardRemote => AfterSb::DiscardRemote,
        AfterSplitBrain::Consensus => AfterSb::Consensus,
        AfterSplitBrain::DiscardSecondary => AfterSb::DiscardSecondary,
        AfterSplitBrain::CallPriLostAfterSb => AfterSb::CallPriLostAfterSb,
        AfterSplitBrain::ViolentlyAs0p => AfterSb::ViolentlyAs0p,
        AfterSplitBrain::RetryConnect => AfterSb::RetryConnect,
        AfterSplitBrain::AutoDiscard => AfterSb::AutoDiscard,
    }
}

/// The first thing in which the two sides' settings do not go together (wire.md, 5.4).
fn protocol_mismatch(ours: &ProtocolPacket, theirs: &ProtocolPacket) -> Option<String> {
    let mirrored = |policy: AfterSb| match policy {
        AfterSb::DiscardLocal => AfterSb::DiscardRemote,
        AfterSb::DiscardRemote => AfterSb::DiscardLocal,
        other => other,
    };
    let differs = |name: &str, ours: &dyn core::fmt::Debug, theirs: &dyn core::fmt::Debug| {
        Some(format!(
            "incompatible {name} settings: {ours:?} here, {theirs:?} at the peer"
        ))
    };
    if ours.protocol != theirs.protocol {
        return differs("protocol", &ours.protocol, &theirs.protocol);
    }
    for (name, mine, peer) in [
        ("after-sb-0pri", ours.after_sb_0p, theirs.after_sb_0p),
        ("after-sb-1pri", ours.after_sb_1p, theirs.after_sb_1p),
        ("after-sb-2pri", ours.after_sb_2p, theirs.after_sb_2p),
    ] {
        if mine != mirrored(peer) {
            return differs(name, &mine, &peer);
        }
    }
    let discards = ConnFlags::DISCARD_MY_DATA;
    if ours.conn_flags.contains(discards) && theirs.conn_flags.contains(discards) {
        return Some("both sides were told to discard their data; connect one without".into());
    }
    if ours.two_primaries != theirs.two_primaries {
        return differs(
            "allow-two-primaries",
            &ours.two_primaries,
            &theirs.two_primaries,
        );
    }
    if ours.integrity_alg != theirs.integrity_alg {
        return differs(
            "data-integrity-alg",
            &ours.integrity_alg,
            &theirs.integrity_alg,
        );
    }
    None
}
