//! A shard from outside: starting and ending it, resources, commands, ports, reports.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use lockstep_core::command::{Answer, Command, CommandError, ErrorCode};
use lockstep_core::event::{CommandId, Input};
use lockstep_core::report::Snapshot;
use lockstep_format::units::{NodeId, VolumeNr};

use super::mailbox::{Mailbox, Message};
use super::{
    Engine, PendingCommand, ResourceId, Service, ServiceId, ServiceWaker, Shard, ShardConfig,
    ShardEnv, ShardPort, Slot, Subscriber, UsedPaths,
};
use crate::arena::Key;
use crate::pool::BufferPool;
use crate::port::PortSink;
use crate::ring::RingKind;
use crate::tcp::PeerNet;
use crate::timers::Armed;

/// Takes a command's result, on the shard's thread.
pub type CommandReply = Box<dyn FnOnce(Result<Answer, CommandError>) + Send>;

/// The shard has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the shard has ended")]
pub struct ShardGone;

/// A resource as its shard sees it.
#[derive(Clone, Debug)]
pub struct ResourceView {
    /// The core's report.
    pub snapshot: Snapshot,
    /// The paths of the links that stand.
    pub paths: UsedPaths,
}

/// A running shard. Clones name the same shard.
///
/// Calls that return a result wait for the shard, so they must not be made on its own thread (in
/// sinks, subscribers, services); those that take a callback or return nothing may.
pub struct ShardHandle<E: Engine> {
    mailbox: Arc<Mailbox<E>>,
    pool: BufferPool,
    ring: RingKind,
    thread: Arc<Mutex<Option<JoinHandle<io::Result<()>>>>>,
}

impl<E: Engine> Clone for ShardHandle<E> {
    fn clone(&self) -> Self {
        ShardHandle {
            mailbox: self.mailbox.clone(),
            pool: self.pool.clone(),
            ring: self.ring,
            thread: self.thread.clone(),
        }
    }
}

impl<E: Engine> ShardHandle<E> {
    /// Starts a shard on a new thread with this name.
    pub fn start(name: &str, config: ShardConfig, env: ShardEnv) -> io::Result<ShardHandle<E>> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // The ring belongs to its thread, so everything is made here.
                let mut shard = match Shard::new(config, env) {
                    Ok(shard) => shard,
                    Err(error) => {
                        let _ = sender.send(Err(error));
                        return Ok(());
                    }
                };
                let parts = (shard.mailbox.clone(), shard.pool.clone(), shard.ring.kind());
                let _ = sender.send(Ok(parts));
                let result = shard.run();
                if let Err(error) = &result {
                    tracing::error!(%error, "the ring failed, the shard ends");
                }
                shard.end();
                result
            })?;
        let ended = || io::Error::other("the shard's thread ended at its start");
        let (mailbox, pool, ring) = receiver.recv().map_err(|_| ended())??;
        let thread = Arc::new(Mutex::new(Some(thread)));
        Ok(ShardHandle {
            mailbox,
            pool,
            ring,
            thread,
        })
    }

    /// Adds a resource. `name` is for handlers and the log.
    pub fn add_resource(&self, name: &str, engine: E) -> Result<ResourceId, ShardGone> {
        let name = name.to_owned();
        self.ask(move |shard| shard.add_resource(name, engine))
    }

    /// Gives a resource another name for handlers and the log. `false` if there is none.
    pub fn rename_resource(&self, resource: ResourceId, name: &str) -> Result<bool, ShardGone> {
        let name = name.to_owned();
        self.ask(
            move |shard| match shard.resources.get_mut(Key(resource.0)) {
                Some(slot) => {
                    slot.name = name;
                    true
                }
                None => false,
            },
        )
    }

    /// Removes a resource with all its links, disks and ports. `Command::Down` comes before; what
    /// still runs is cut off, but for the last packets of links that were closed. `false` if there is none.
    pub fn remove_resource(&self, resource: ResourceId) -> Result<bool, ShardGone> {
        self.ask(move |shard| shard.remove_resource(Key(resource.0)))
    }

    /// Sends a command; the receiver gets its result.
    pub fn command(
        &self,
        resource: ResourceId,
        command: Command,
    ) -> Receiver<Result<Answer, CommandError>> {
        let (sender, receiver) = channel();
        // Who does not wait for the result has dropped the receiver.
        let reply = Box::new(move |result| drop(sender.send(result)));
        self.command_with(resource, command, reply);
        receiver
    }

    /// Sends a command; `reply` is called with its result on the shard's thread. A shard that has
    /// ended drops `reply`.
    pub fn command_with(&self, resource: ResourceId, command: Command, reply: CommandReply) {
        self.run(move |shard| shard.command(Key(resource.0), command, reply));
    }

    /// Tells how a peer is reached. Before `Command::Connect`, and again when options change.
    pub fn set_peer(&self, resource: ResourceId, peer: NodeId, net: PeerNet) {
        self.run(move |shard| shard.set_peer(Key(resource.0), peer, net));
    }

    /// A report of a resource; `None` if there is none.
    pub fn snapshot(&self, resource: ResourceId) -> Result<Option<Snapshot>, ShardGone> {
        self.ask(move |shard| Some(shard.resources.get(Key(resource.0))?.engine.snapshot()))
    }

    /// The same, and the paths that its links run over.
    pub fn view(&self, resource: ResourceId) -> Result<Option<ResourceView>, ShardGone> {
        self.ask(move |shard| {
            let key = Key(resource.0);
            Some(ResourceView {
                snapshot: shard.resources.get(key)?.engine.snapshot(),
                paths: shard.used_paths(key),
            })
        })
    }

    /// Bytes that wait in this node for being sent to a peer.
    pub fn queued_bytes(&self, resource: ResourceId, peer: NodeId) -> Result<u64, ShardGone> {
        self.ask(move |shard| shard.queued_bytes(Key(resource.0), peer))
    }

    /// Gives a front end access to a volume; `None` if there is no such resource. The volume may
    /// come into being later.
    pub fn open_port(
        &self,
        resource: ResourceId,
        volume: VolumeNr,
        sink: Box<dyn PortSink>,
    ) -> Result<Option<ShardPort<E>>, ShardGone> {
        self.ask(move |shard| shard.add_port(Key(resource.0), volume, sink))
    }

    /// Adds a watcher of all resources' events.
    pub fn subscribe(&self, subscriber: Subscriber) {
        self.run(move |shard| shard.subscribers.push(subscriber));
    }

    /// Whether the engines of this shard, those to come too, tell every step of a change.
    pub fn tell_steps(&self, told: bool) -> Result<(), ShardGone> {
        self.ask(move |shard| shard.tell_steps(told))
    }

    /// Adds a service to the shard's thread; `make` builds it there.
    pub fn add_service(
        &self,
        make: impl FnOnce(ServiceWaker) -> Box<dyn Service> + Send + 'static,
    ) -> Result<ServiceId, ShardGone> {
        self.ask(move |shard| shard.add_service(make))
    }

    /// Removes a service.
    pub fn remove_service(&self, id: ServiceId) {
        self.run(move |shard| shard.remove_service(id));
    }

    /// The shard's payload memory.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Which ring the shard uses.
    pub fn ring_kind(&self) -> RingKind {
        self.ring
    }

    /// Whether the shard runs. It ends by `stop`, by a failure of its ring, or by a bug.
    pub fn is_running(&self) -> bool {
        !self.mailbox.is_closed()
    }

    /// Ends the shard and waits for it. Resources are cut off as by `remove_resource`.
    pub fn stop(&self) -> io::Result<()> {
        self.run(|shard| shard.stop = true);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match thread.map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the shard's thread panicked")),
        }
    }

    fn run(&self, job: impl FnOnce(&mut Shard<E>) + Send + 'static) {
        // A shard that has ended needs nothing to be done any more.
        let _ = self.mailbox.post(Message::Run(Box::new(job)));
    }

    fn ask<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Shard<E>) -> R + Send + 'static,
    ) -> Result<R, ShardGone> {
        let (sender, receiver) = channel();
        // The receiver waits below.
        self.run(move |shard| drop(sender.send(job(shard))));
        receiver.recv().map_err(|_| ShardGone)
    }
}

impl<E: Engine> Shard<E> {
    fn tell_steps(&mut self, told: bool) {
        self.tells_steps = told;
        for key in self.resources.keys() {
            if let Some(slot) = self.resources.get_mut(key) {
                slot.engine.tell_steps(told);
            }
        }
    }

    fn add_resource(&mut self, name: String, mut engine: E) -> ResourceId {
        engine.tell_steps(self.tells_steps);
        let slot = Slot {
            name,
            engine,
            armed: Armed::default(),
            nets: BTreeMap::new(),
            connecting: BTreeMap::new(),
            links: Vec::new(),
            disks: BTreeMap::new(),
            ports: Vec::new(),
            changed: false,
        };
        let key = self.resources.insert(slot);
        // A core may have something to do or to wait for from its beginning on.
        self.inputs.push_back((key, Input::Timeout));
        ResourceId(key.0)
    }

    pub(super) fn command(&mut self, resource: Key, command: Command, reply: CommandReply) {
        if self.resources.get(resource).is_none() {
            return reply(Err(no_resource()));
        }
        let key = self.commands.insert(PendingCommand { resource, reply });
        let input = Input::Command {
            id: CommandId(key.0),
            command,
        };
        self.inputs.push_back((resource, input));
    }

    fn remove_resource(&mut self, key: Key) -> bool {
        let Some(slot) = self.resources.get_mut(key) else {
            return false;
        };
        let (links, ports) = (slot.links.clone(), slot.ports.clone());
        let connecting: Vec<_> = slot.connecting.values().flatten().copied().collect();
        for link in links {
            // The peer's last packets, of a clean `down` for instance, may still be on their way to it.
            if !self.is_draining(link) {
                self.remove_link(link);
            }
        }
        connecting
            .into_iter()
            .for_each(|key| self.remove_connecting(key));
        ports.into_iter().for_each(|port| self.end_port(port));
        // Disks close with their last operation in flight.
        self.resources.remove(key);
        self.table.release_all_of(key.0);
        let of = |key: Key, command: &PendingCommand| command.resource == key;
        let waiting = self.commands.iter().filter(|(_, command)| of(key, command));
        let waiting: Vec<Key> = waiting.map(|(key, _)| key).collect();
        for command in waiting
            .into_iter()
            .filter_map(|key| self.commands.remove(key))
        {
            (command.reply)(Err(no_resource()));
        }
        true
    }

    /// The shard's last act: everything that somebody waits for gets its answer.
    fn end(&mut self) {
        for key in self.resources.keys() {
            self.remove_resource(key);
        }
        for key in self.links.keys() {
            self.remove_link(key);
        }
    }
}

fn no_resource() -> CommandError {
    CommandError {
        code: ErrorCode::ERR_RES_NOT_KNOWN,
        text: "the resource is not known to this node; `drbdadm up` creates it".to_owned(),
    }
}
