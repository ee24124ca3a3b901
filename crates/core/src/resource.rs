//! A resource: the one owner of everything, and where inputs are handed to the part they concern.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{NodeId, NodeMask, VolumeNr};
use lockstep_format::wire::{self, ConnState, Packet};

use crate::admin::Waiting;
use crate::command::{Answer, Command, CommandError};
use crate::connection::{Connection, Phase};
use crate::data::pieces::Ended;
use crate::data::{DataOp, ResourceIo};
use crate::device::Device;
use crate::event::{
    BufId, CommandId, Input, LinkId, MetaOp, Output, Payload, Request, RequestId, Stream, Tag,
};
use crate::few::Few;
use crate::options::ResourceOptions;
use crate::report::{Event, Level};
use crate::rng::Rng;
use crate::state::State;
use crate::tags::Tags;
use crate::time::Instant;
use crate::timers::{Timer, Timers};
use crate::transition::Step;
use crate::twopc::Twopc;
use crate::uuid_spread::NewUuid;

/// What a resource is created with.
#[derive(Clone, Debug)]
pub struct ResourceConfig {
    /// Its name, for the log.
    pub name: String,
    /// This node's id.
    pub node_id: NodeId,
    /// Options.
    pub options: ResourceOptions,
}

/// A resource on this node. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct Resource {
    pub(crate) name: String,
    pub(crate) node_id: NodeId,
    pub(crate) options: ResourceOptions,
    /// The time of the input being handled.
    pub(crate) now: Instant,
    pub(crate) state: State,
    pub(crate) devices: Few<VolumeNr, Device>,
    pub(crate) connections: Few<NodeId, Connection>,
    pub(crate) outputs: VecDeque<Output>,
    pub(crate) timers: Timers,
    pub(crate) tags: Tags<Pending>,
    pub(crate) rng: Rng,
    /// State changes whose consequences were not drawn yet, in order.
    pub(crate) steps: VecDeque<Step>,
    pub(crate) in_steps: bool,
    /// Changes are told one by one, and so many were.
    pub(crate) tells_steps: bool,
    pub(crate) steps_told: u64,
    pub(crate) twopc: Twopc,
    /// Commands that wait.
    pub(crate) waiting: Vec<Waiting>,
    /// `down` asks for nothing before this time.
    pub(crate) down_pause: Instant,
    /// Primaries out of reach, as the last transaction has shown them.
    pub(crate) far_primaries: NodeMask,
    /// A new current UUID that is being spread.
    pub(crate) new_uuid: Option<NewUuid>,
    /// Something waits for a new generation that is due.
    pub(crate) new_uuid_wanted: bool,
    /// The promotion was explicit: closing the last opener does not demote.
    pub(crate) explicit_primary: bool,
    pub(crate) opens: crate::open::Opens,
    /// Whether users were looked for, for a peer that leaves.
    pub(crate) leaving: crate::leaving::Look,
    pub(crate) turns: crate::turns::Turns,
    pub(crate) gives_way: crate::frozen::GivesWay,
    /// Some peer's disk may lack what was in its cache (`lost_cache`).
    pub(crate) caches_in_doubt: bool,
    /// The driver has to note of some disk here who has not heard what it lost.
    pub(crate) caches_unnoted: bool,
    /// Some kernel may have to be asked to be a source.
    pub(crate) unasked: bool,
    pub(crate) fences: crate::fencing::Fences,
    pub(crate) io: ResourceIo,
    #[cfg(feature = "planted")]
    pub(crate) planted: Option<crate::planted::Planted>,
}

/// What an outstanding output's completion means.
#[derive(Debug)]
pub(crate) enum Pending {
    /// `Output::OpenDisk`.
    Open(VolumeNr),
    /// `Output::CloseDisk`.
    Close(VolumeNr),
    /// `Output::ProbeDisk` or `LookAtDisk`, the number of the look, and what its result is for.
    Probe(VolumeNr, u64, crate::disk_look::ProbeFor),
    /// A write of a metadata move.
    Move(VolumeNr),
    /// A part of the metadata that an attach reads.
    AttachRead(VolumeNr, crate::attach::AttachIo),
    /// The superblock; carries the change count that it makes durable.
    Superblock(VolumeNr, u64),
    /// A handler that nobody waits for.
    Handler,
    /// The `fence-peer` handler for a peer.
    Fence(NodeId),
    /// The driver closes volumes that nobody uses.
    CloseUnused,
    /// A handler that decides whether a resync starts.
    BeforeResync(VolumeNr, NodeId, LinkId),
    /// The data path's.
    Data(DataOp),
}

impl Resource {
    /// A resource without volumes and connections. `seed` feeds UUIDs, transaction ids and jitter.
    pub fn new(config: ResourceConfig, seed: u64) -> Self {
        let mut state = State::default();
        state.members.insert(config.node_id);
        Resource {
            name: config.name,
            node_id: config.node_id,
            options: config.options,
            now: Instant(0),
            state,
            devices: Few::new(),
            connections: Few::new(),
            outputs: VecDeque::new(),
            timers: Timers::default(),
            tags: Tags::default(),
            rng: Rng::new(seed),
            steps: VecDeque::new(),
            in_steps: false,
            tells_steps: false,
            steps_told: 0,
            twopc: Twopc::default(),
            waiting: Vec::new(),
            down_pause: Instant(0),
            far_primaries: NodeMask::EMPTY,
            new_uuid: None,
            new_uuid_wanted: false,
            explicit_primary: false,
            opens: crate::open::Opens::default(),
            leaving: crate::leaving::Look::default(),
            turns: crate::turns::Turns::default(),
            gives_way: crate::frozen::GivesWay::default(),
            caches_in_doubt: false,
            caches_unnoted: false,
            unasked: false,
            fences: crate::fencing::Fences::default(),
            io: ResourceIo::default(),
            #[cfg(feature = "planted")]
            planted: None,
        }
    }

    /// Gives this resource a deliberate bug, or none.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: Option<crate::planted::Planted>) {
        self.planted = bug;
    }

    /// Feeds one event. Never blocks, never fails: a peer's bad packet ends that connection.
    pub fn handle(&mut self, now: Instant, input: Input) {
        assert!(now >= self.now, "time does not run backwards");
        self.now = now;
        self.fire_timers();
        match input {
            Input::Timeout => {}
            Input::Request(request) => self.request(request),
            Input::LinkUp {
                peer,
                link,
                resolve_conflicts,
            } => {
                self.link_up(peer, link, resolve_conflicts);
            }
            Input::LinkDown { peer, link, reason } => self.link_down(peer, link, reason),
            Input::Packet {
                peer,
                link,
                stream,
                volume,
                packet,
                payload,
            } => {
                self.packet(peer, link, stream, volume, packet, payload);
            }
            Input::Corrupt {
                peer,
                link,
                volume,
                packet,
            } => self.corrupt_packet(peer, link, volume, &packet),
            Input::Progress { peer, link, stream } => {
                if stream == Stream::Control && self.is_current(peer, link) {
                    self.restart_ping_timer(peer);
                }
            }
            Input::Sent { tag } => {
                if let Some(Pending::Data(op)) = self.tags.take(tag) {
                    self.data_sent(op);
                }
            }
            Input::DiskOpened { tag, result } => match self.tags.take(tag) {
                Some(Pending::Open(volume)) => self.disk_opened(volume, result),
                Some(Pending::Probe(volume, number, wanted)) => {
                    self.disk_probed(volume, number, wanted, result);
                }
                _ => {}
            },
            Input::DiskClosed { tag } => {
                if let Some(Pending::Close(volume)) = self.tags.take(tag) {
                    self.disk_closed(volume);
                }
            }
            Input::DiskDone { tag, result } => match self.tags.take(tag) {
                Some(Pending::Data(op)) => self.data_done(op, result),
                _ => {
                    if let Ok(Some(payload)) = result {
                        self.release(payload.buf);
                    }
                }
            },
            Input::MetaDone { tag, result } => match self.tags.take(tag) {
                Some(Pending::AttachRead(volume, io)) => self.attach_io_done(volume, io, result),
                Some(Pending::Superblock(volume, count)) => {
                    self.superblock_written(volume, count, result.map(|_| ()));
                }
                Some(Pending::Data(op)) => self.data_meta_done(op, result),
                Some(Pending::Move(volume)) => self.move_written(volume, result.map(|_| ())),
                Some(
                    Pending::Open(_)
                    | Pending::Close(_)
                    | Pending::Probe(..)
                    | Pending::Handler
                    | Pending::Fence(_)
                    | Pending::CloseUnused
                    | Pending::BeforeResync(..),
                )
                | None => {}
            },
            Input::DigestDone { tag, digest } => {
                if let Some(Pending::Data(op)) = self.tags.take(tag) {
                    self.data_digest(op, digest);
                }
            }
            Input::HandlerDone { tag, exit_code } => match self.tags.take(tag) {
                Some(Pending::Fence(peer)) => self.fence_ended(peer, exit_code),
                Some(Pending::CloseUnused) => self.unused_closed(),
                Some(Pending::BeforeResync(volume, peer, link)) => {
                    self.before_resync_ended(volume, peer, (link, tag), exit_code);
                }
                _ => {}
            },
            Input::Command { id, command } => self.command(id, command),
        }
        self.settle();
    }

    /// Next thing to do; call until `None`.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call `handle(now, Input::Timeout)` at the latest, if no event comes before.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// How packets of this peer's present link are laid out, or of its last one: packets that were
    /// sent before the core closed it are encoded afterwards. Ask before each decode and encode.
    pub fn dialect(&self, peer: NodeId) -> wire::Dialect {
        let conn = self.connections.get(&peer);
        match conn.and_then(|c| c.link.as_ref()) {
            Some(link) => self.dialect_of(Some(link)),
            None => conn
                .and_then(|c| c.last_dialect)
                .unwrap_or(wire::Dialect::INITIAL),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The present link to a peer, for drivers that look for what is stale.
    pub fn link(&self, peer: NodeId) -> Option<LinkId> {
        self.connections.get(&peer)?.link.as_ref().map(|l| l.id)
    }

    fn fire_timers(&mut self) {
        while let Some(over) = self.timers.pop_due(self.now) {
            match over.timer {
                Timer::Reconnect(peer) => self.reconnect(peer),
                Timer::Handshake(peer) => self.handshake_timeout(peer, over),
                Timer::ConnectTwopc(peer) => self.start_connect_twopc(peer),
                Timer::Added(peer) => self.present_again(peer),
                Timer::Ping(peer) => self.ping_timer(peer, over),
                Timer::RequestAge(peer) => self.check_request_age(peer, over),
                Timer::Follower(peer) => self.follower_timer(peer, over),
                Timer::Twopc => self.twopc_timeout(),
                Timer::TwopcRetry => self.twopc_retry(),
                Timer::CommandRetry => self.retry_commands(),
                Timer::EmptyTwopc => self.start_empty_twopc(),
                Timer::NewUuidPings => self.settle_new_uuid(),
                Timer::MetaSync(volume) => self.write_superblock(volume),
                Timer::PeerAck => self.peer_ack_timer(),
                Timer::ResyncStep(volume, peer) => self.resync_step_timer(volume, peer),
                Timer::VerifyStep(volume, peer) => self.verify_step_timer(volume, peer),
                Timer::SourcePace(volume, peer) => self.source_pace_timer(volume, peer),
                Timer::ResyncStart(volume, peer) => self.full_sync_starts(volume, peer),
                Timer::BitmapWrite(volume) => self.bitmap_write_timer(volume),
                Timer::ResyncFlush(volume) => self.resync_flush_timer(volume),
                Timer::LeftMarks(volume) => self.left_marks_timer(volume),
                Timer::AheadEnd(peer) => self.ahead_end_timer(peer),
                Timer::LookAgain(volume) => self.look_again_timer(volume),
                Timer::DiskTimeout(volume) => self.disk_timeout_timer(volume),
                Timer::WriteAwaited(node) => self.dagtag_lost(node),
                Timer::Turn(peer) => self.turn_timer(peer, over),
            }
            self.settle();
        }
    }

    fn is_current(&self, peer: NodeId, link: LinkId) -> bool {
        self.link(peer) == Some(link)
    }

    fn packet(
        &mut self,
        peer: NodeId,
        link: LinkId,
        stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Option<Payload>,
    ) {
        if !self.is_current(peer, link) {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            return;
        }
        if stream == Stream::Control {
            self.restart_ping_timer(peer);
        }
        let Some((packet, payload)) = self.in_turn(peer, stream, volume, packet, payload) else {
            return;
        };
        self.take_packet(peer, stream, volume, packet, payload);
        if stream == Stream::Control {
            self.turns_come(peer);
        }
    }

    /// A packet whose turn it is.
    pub(crate) fn take_packet(
        &mut self,
        peer: NodeId,
        stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Option<Payload>,
    ) {
        let Some(packet) = self.connection_packet(peer, stream, packet) else {
            if let Some(payload) = payload {
                self.release(payload.buf);
            }
            return;
        };
        let legacy = self.connections.get(&peer).filter(|c| c.is_legacy());
        let packet = if let Some(conn) = legacy {
            let packet = crate::legacy::from_peer(packet, self.node_id, conn);
            match self.legacy_packet(peer, volume, packet) {
                Some(packet) => packet,
                None => return,
            }
        } else {
            packet
        };
        let Some(packet) = self.twopc_packet(peer, volume, packet) else {
            return;
        };
        let Some(packet) = self.volume_packet(peer, volume, packet) else {
            return;
        };
        let established = self.state.conn(peer) == ConnState::Connected;
        if established {
            self.data_packet(peer, stream, volume, packet, payload);
            return;
        }
        match packet {
            Packet::FlushRequestsAck(ack) => {
                // A kernel sends it as soon as there is a stream for it: a Primary has passed on the question.
                self.flush_acked(peer, ack.flush_sequence, ack.primary_node_id);
            }
            // The peer has committed the connect, and what it says to all its peers overtakes the commit on
            // the other stream. No write of it came here yet that a word of its could be about.
            Packet::FlushForward(forward) if stream == Stream::Control => {
                self.flush_forwarded(peer, forward.flush_sequence, forward.initiator_node_id);
            }
            Packet::PeerAck(_) | Packet::PeersInSync(_) if stream == Stream::Control => {}
            other => {
                if let Some(payload) = payload {
                    self.release(payload.buf);
                }
                let text =
                    alloc::format!("{:?} before the connection is established", other.command());
                self.log(Level::Warn, Some(peer), None, text);
                self.drop_connection(peer, ConnState::ProtocolError);
            }
        }
    }

    /// Brings derived state up to date after an input.
    fn settle(&mut self) {
        self.run_steps();
        self.settle_fencing();
        self.settle_caches();
        self.settle_gone_on();
        self.settle_new_uuid();
        self.settle_data();
        self.settle_moves();
        self.settle_detaches();
        self.settle_commands();
        self.run_steps();
        self.tell_generations();
    }

    /// A generation may change when no state does, and whoever shows or remembers it must hear.
    fn tell_generations(&mut self) {
        let changed: Vec<VolumeNr> = (self.devices.iter_mut())
            .filter_map(|(volume, device)| {
                let uuid = device.current_uuid();
                let told = core::mem::replace(&mut device.told_uuid, uuid);
                (told != uuid).then_some(*volume)
            })
            .collect();
        for volume in changed {
            self.event(Event::Device(volume));
        }
    }

    pub(crate) fn output(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Sends a packet without payload on the peer's present link; dropped without one.
    pub(crate) fn send(&mut self, peer: NodeId, stream: Stream, volume: VolumeNr, packet: Packet) {
        self.send_payload(peer, stream, volume, packet, None, None);
    }

    /// Sends a packet on the peer's present link; dropped without one.
    pub(crate) fn send_payload(
        &mut self,
        peer: NodeId,
        stream: Stream,
        volume: VolumeNr,
        packet: Packet,
        payload: Option<Payload>,
        want_sent: Option<Tag>,
    ) {
        let packet = match self.connections.get(&peer) {
            Some(conn) if conn.is_legacy() => match crate::legacy::to_peer(packet, conn) {
                Some(packet) if !self.is_unnamed(peer, volume) => packet,
                _ => return,
            },
            _ => packet,
        };
        if let Some(link) = self.link(peer) {
            let integrity = self.own_integrity(peer, &packet);
            self.output(Output::Send {
                peer,
                link,
                stream,
                volume,
                packet,
                payload,
                integrity,
                want_sent,
            });
        }
    }

    pub(crate) fn release(&mut self, buf: BufId) {
        self.output(Output::Release { buf });
    }

    pub(crate) fn meta(&mut self, volume: VolumeNr, op: MetaOp, pending: Pending) {
        let op = self.in_place(volume, op);
        let tag = self.tags.insert_timed(pending, self.now);
        self.watch_disk(volume);
        self.output(Output::Meta { tag, volume, op });
    }

    pub(crate) fn event(&mut self, event: Event) {
        self.output(Output::Event(event));
    }

    pub(crate) fn log(
        &mut self,
        level: Level,
        peer: Option<NodeId>,
        volume: Option<VolumeNr>,
        text: String,
    ) {
        self.output(Output::Event(Event::Log {
            level,
            peer,
            volume,
            text,
        }));
    }

    pub(crate) fn answer(&mut self, id: CommandId, result: Result<Answer, CommandError>) {
        self.output(Output::Answer { id, result });
    }

    pub(crate) fn complete(
        &mut self,
        id: RequestId,
        result: Result<(), crate::event::RequestError>,
    ) {
        match self.io.pieces.done(id, result) {
            Ended::Partly => {}
            Ended::Whole(id, result) => self.output(Output::Complete { id, result }),
            Ended::Flush(request) => self.front_request(request),
        }
    }

    /// The connection is past the connect two-phase commit.
    pub(crate) fn is_established(&self, peer: NodeId) -> bool {
        self.connections
            .get(&peer)
            .and_then(|c| c.link.as_ref())
            .is_some_and(|l| l.phase == Phase::Established)
    }

    /// Runs a handler of the configuration; a handler that is not configured is skipped.
    pub(crate) fn run_handler(
        &mut self,
        name: &'static str,
        volume: Option<VolumeNr>,
        peer: Option<NodeId>,
    ) {
        if self.options.handlers.iter().any(|h| h == name) {
            let tag = self.tags.insert(Pending::Handler);
            self.output(Output::Handler {
                tag,
                name,
                volume,
                peer,
            });
        }
    }

    fn command(&mut self, id: CommandId, command: Command) {
        self.run_command(id, command);
    }

    /// One front-end request comes in.
    fn request(&mut self, request: Request) {
        self.front_request(request);
    }
}
