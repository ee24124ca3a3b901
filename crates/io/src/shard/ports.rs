//! Front ends' access to volumes: requests in, completions and changes out.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lockstep_core::command::{Command, CommandError};
use lockstep_core::event::{Input, Payload, Request, RequestError, RequestId, RequestKind};
use lockstep_core::report::{DeviceReport, Snapshot};
use lockstep_core::state::{DiskState, ReplSets, Role};
use lockstep_format::units::{Sector, VolumeNr};

use super::mailbox::{Mailbox, Message};
use super::{Engine, Shard};
use crate::arena::Key;
use crate::pool::{BufferPool, Claim, IoBuf};
use crate::port::{
    Completion, PortEvent, PortRequest, PortSink, SubmitError, VolumePort, VolumeProperties,
};

/// A port as the shard sees it.
pub(super) struct PortEntry {
    resource: Key,
    volume: VolumeNr,
    sink: Box<dyn PortSink>,
    shared: Arc<PortShared>,
    told: bool,
}

impl PortEntry {
    /// The front end's next request is refused.
    pub(super) fn set_gone(&self) {
        self.shared.gone.store(true, Ordering::Release);
    }
}

/// What shard and front end share of a port.
pub(super) struct PortShared {
    in_flight: AtomicUsize,
    gone: AtomicBool,
    /// What the core has open for it, for reading only and for writing; none once the port has gone.
    /// The shard's thread only.
    opens: Mutex<Option<[u32; 2]>>,
    properties: Mutex<VolumeProperties>,
}

/// A request that a core has.
pub(super) struct RequestEntry {
    port: Key,
    shared: Arc<PortShared>,
    id: RequestId,
    kind: RequestKind,
    payload: Option<Payload>,
}

impl PortShared {
    fn opens(&self) -> MutexGuard<'_, Option<[u32; 2]>> {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A front end's access to a volume of a shard, usable on any thread.
pub struct ShardPort<E: Engine> {
    mailbox: Arc<Mailbox<E>>,
    key: Key,
    pool: BufferPool,
    shared: Arc<PortShared>,
    limit: usize,
}

impl<E: Engine> ShardPort<E> {
    fn run(&self, job: impl FnOnce(&mut Shard<E>) + Send + 'static) {
        // A shard that has ended has told the sink already.
        let _ = self.mailbox.post(Message::Run(Box::new(job)));
    }
}

impl<E: Engine> VolumePort for ShardPort<E> {
    fn properties(&self) -> VolumeProperties {
        *self
            .shared
            .properties
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn alloc(&self, len: usize) -> Option<IoBuf> {
        self.pool.alloc(len, Claim::Ordinary)
    }

    fn submit(&mut self, request: PortRequest) -> Result<(), SubmitError> {
        if self.shared.gone.load(Ordering::Acquire) {
            return Err(SubmitError::Gone(request));
        }
        if self.shared.in_flight.fetch_add(1, Ordering::Relaxed) >= self.limit {
            self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
            return Err(SubmitError::Full {
                request,
                limit: self.limit,
            });
        }
        match self.mailbox.push(Message::Submit {
            port: self.key,
            request,
        }) {
            Err(Message::Submit { request, .. }) => Err(SubmitError::Gone(request)),
            _ => Ok(()),
        }
    }

    fn kick(&mut self) {
        self.mailbox.kick();
    }

    fn open(&mut self, id: RequestId, write: bool) {
        let key = self.key;
        self.run(move |shard| shard.open_port(key, id, write));
    }

    fn close(&mut self, write: bool) {
        let key = self.key;
        self.run(move |shard| shard.close_port(key, write));
    }
}

impl<E: Engine> Drop for ShardPort<E> {
    fn drop(&mut self) {
        let key = self.key;
        self.run(move |shard| shard.remove_port(key));
    }
}

impl<E: Engine> Shard<E> {
    /// A new port; its sink is told the properties at once.
    pub(super) fn add_port(
        &mut self,
        resource: Key,
        volume: VolumeNr,
        sink: Box<dyn PortSink>,
    ) -> Option<ShardPort<E>> {
        let properties = self.properties(resource, volume, None)?;
        let shared = Arc::new(PortShared {
            in_flight: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            opens: Mutex::new(Some([0; 2])),
            properties: Mutex::new(properties),
        });
        let entry = PortEntry {
            resource,
            volume,
            sink,
            shared: shared.clone(),
            told: false,
        };
        let key = self.ports.insert(entry);
        self.resources.get_mut(resource)?.ports.push(key);
        self.tell(key, PortEvent::Changed(properties));
        let (mailbox, pool) = (self.mailbox.clone(), self.pool.clone());
        Some(ShardPort {
            mailbox,
            key,
            pool,
            shared,
            limit: self.config.port_requests,
        })
    }

    /// A request of a front end.
    pub(super) fn submit(&mut self, port: Key, request: PortRequest) {
        // Without its port nobody waits for the completion; the buffer goes back to the pool.
        let Some(entry) = self.ports.get(port) else {
            return;
        };
        let (resource, volume, shared) = (entry.resource, entry.volume, entry.shared.clone());
        let PortRequest {
            id,
            kind,
            sector,
            len,
            buf,
            buf_offset,
        } = request;
        let fits = |buf: &IoBuf| buf_offset as usize + len as usize <= buf.len();
        let needs_buf = match kind {
            RequestKind::Read | RequestKind::Write { .. } => true,
            RequestKind::Flush | RequestKind::Discard | RequestKind::Zeroes { .. } => false,
        };
        if needs_buf && !buf.as_ref().is_some_and(fits) {
            let result = Err(RequestError::Invalid);
            return self.finish_request(port, &shared, Completion { id, result, buf });
        }
        let payload = buf.filter(|_| needs_buf).map(|buf| Payload {
            buf: self.table.insert(resource.0, buf.share()),
            offset: buf_offset,
            len,
        });
        let entry = RequestEntry {
            port,
            shared,
            id,
            kind,
            payload,
        };
        let key = self.requests.insert(entry);
        let request = Request {
            id: RequestId(key.0),
            volume,
            kind,
            sector,
            len,
            payload,
        };
        self.inputs.push_back((resource, Input::Request(request)));
    }

    /// The core is done with a request.
    pub(super) fn complete(&mut self, id: RequestId, result: Result<(), RequestError>) {
        let Some(request) = self.requests.remove(Key(id.0)) else {
            tracing::error!(
                request = id.0,
                "the core completed a request that it does not have"
            );
            return;
        };
        let RequestEntry {
            port,
            shared,
            id,
            kind,
            payload,
        } = request;
        let buf = payload.and_then(|payload| self.take_back(payload, kind));
        self.finish_request(port, &shared, Completion { id, result, buf });
    }

    /// The resource had gone before the request reached its core.
    pub(super) fn request_refused(&mut self, id: RequestId) {
        self.complete(id, Err(RequestError::NoMedium));
    }

    /// Takes the core's reference and gives the front end its buffer, if nobody else uses it.
    fn take_back(&mut self, payload: Payload, kind: RequestKind) -> Option<IoBuf> {
        let copy_of = match kind {
            RequestKind::Read => self.payload(payload),
            _ => None,
        };
        let released = match self.table.release(payload.buf) {
            Ok(released) => released,
            Err(error) => {
                tracing::error!(%error, "the core released a request's buffer");
                None
            }
        };
        let Some(source) = copy_of else {
            return released?.try_into_buf().ok();
        };
        drop(source);
        let shared = match released?.try_into_buf() {
            Ok(buf) => return Some(buf),
            Err(shared) => shared,
        };
        // A read's answer must get to its reader, whoever else holds the buffer.
        let len = shared.capacity();
        let mut copy = self
            .pool
            .alloc(len, Claim::Receive)
            .or_else(|| IoBuf::standalone(len).ok())?;
        shared.read_at(0, &mut copy[..len]);
        Some(copy)
    }

    fn finish_request(&mut self, port: Key, shared: &PortShared, completion: Completion) {
        shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.tell(port, PortEvent::Done(completion));
    }

    fn tell(&mut self, port: Key, event: PortEvent) {
        let Some(entry) = self.ports.get_mut(port) else {
            return;
        };
        entry.sink.event(event);
        if !std::mem::replace(&mut entry.told, true) {
            self.told_ports.push(port);
        }
    }

    fn open_port(&mut self, port: Key, id: RequestId, write: bool) {
        let Some(entry) = self.ports.get(port) else {
            return;
        };
        let (resource, volume, shared) = (entry.resource, entry.volume, entry.shared.clone());
        let mailbox = self.mailbox.clone();
        // The reply has no shard at hand, so the rest goes through the mailbox. What the core has
        // opened counts at once: the port may go before its turn, and closes that.
        let reply = move |result: Result<_, CommandError>| {
            let result = result.map(|_| ());
            let is_late = match &mut *shared.opens() {
                Some(opens) => {
                    opens[usize::from(write)] += u32::from(result.is_ok());
                    false
                }
                None => result.is_ok(),
            };
            let rest = move |shard: &mut Shard<E>| match is_late {
                true => shard.close_volume(resource, volume, write),
                false => shard.tell(port, PortEvent::Opened { id, result }),
            };
            let _ = mailbox.post(Message::Run(Box::new(rest)));
        };
        let command = Command::Open {
            volume,
            open: true,
            write,
        };
        self.command(resource, command, Box::new(reply));
    }

    fn close_volume(&mut self, resource: Key, volume: VolumeNr, write: bool) {
        let command = Command::Open {
            volume,
            open: false,
            write,
        };
        self.command(resource, command, Box::new(|_| {}));
    }

    fn close_port(&mut self, port: Key, write: bool) {
        let Some(entry) = self.ports.get(port) else {
            return;
        };
        let is_open = entry.shared.opens().as_mut().is_some_and(|opens| {
            let count = &mut opens[usize::from(write)];
            let is_open = *count > 0;
            *count -= u32::from(is_open);
            is_open
        });
        if is_open {
            let (resource, volume) = (entry.resource, entry.volume);
            self.close_volume(resource, volume, write);
        }
    }

    fn remove_port(&mut self, port: Key) {
        let Some(entry) = self.ports.remove(port) else {
            return;
        };
        let (resource, volume) = (entry.resource, entry.volume);
        let opens = entry.shared.opens().take().unwrap_or_default();
        for (n, count) in opens.into_iter().enumerate() {
            for _ in 0..count {
                self.close_volume(resource, volume, n == 1);
            }
        }
        if let Some(slot) = self.resources.get_mut(resource) {
            slot.ports.retain(|other| *other != port);
        }
    }

    /// The port's volume goes away with its resource: all its requests end.
    pub(super) fn end_port(&mut self, port: Key) {
        let of = |(key, request): (Key, &RequestEntry)| (request.port == port).then_some(key);
        let requests: Vec<Key> = self.requests.iter().filter_map(of).collect();
        for request in requests {
            self.request_refused(RequestId(request.0));
        }
        if let Some(entry) = self.ports.get(port) {
            entry.set_gone();
        }
        self.tell(port, PortEvent::Gone);
        if let Some(mut entry) = self.ports.remove(port) {
            entry.sink.batch_end();
        }
    }

    /// Tells sinks that the turn is over, and front ends what changed in it.
    pub(super) fn tell_ports(&mut self) {
        for resource in std::mem::take(&mut self.changed) {
            let Some(slot) = self.resources.get_mut(resource) else {
                continue;
            };
            slot.changed = false;
            if slot.ports.is_empty() {
                continue;
            }
            let (snapshot, ports) = (slot.engine.snapshot(), slot.ports.clone());
            for port in ports {
                let Some(entry) = self.ports.get(port) else {
                    continue;
                };
                let new = self.properties(resource, entry.volume, Some(&snapshot));
                let new = new.unwrap_or_default();
                let mut old = entry
                    .shared
                    .properties
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                if std::mem::replace(&mut *old, new) != new {
                    drop(old);
                    self.tell(port, PortEvent::Changed(new));
                }
            }
        }
        let mut told = std::mem::take(&mut self.told_ports);
        for port in told.drain(..) {
            if let Some(entry) = self.ports.get_mut(port) {
                entry.told = false;
                entry.sink.batch_end();
            }
        }
        self.told_ports = told;
    }

    /// A volume's properties; `None` if the resource has gone, zeroes if it has no such volume.
    fn properties(
        &self,
        resource: Key,
        volume: VolumeNr,
        snapshot: Option<&Snapshot>,
    ) -> Option<VolumeProperties> {
        let slot = self.resources.get(resource)?;
        let fresh;
        let snapshot = match snapshot {
            Some(snapshot) => snapshot,
            None => {
                fresh = slot.engine.snapshot();
                &fresh
            }
        };
        let device = snapshot
            .devices
            .iter()
            .find(|device| device.volume == volume);
        let Some(device) = device else {
            return Some(VolumeProperties::default());
        };
        let disk = slot.disks.get(&volume).map(|open| open.disk.info());
        let usable = snapshot.role == Role::Primary && has_data(snapshot, device);
        Some(VolumeProperties {
            size_bytes: Sector(device.size_sectors).bytes(),
            logical_block_bytes: device.logical_block_bytes,
            physical_block_bytes: disk
                .map_or(4096, |disk| disk.physical_block_bytes)
                .max(device.logical_block_bytes),
            discard: disk.is_some_and(|disk| disk.discard),
            discard_granularity_bytes: disk.map_or(0, |disk| disk.discard_granularity_bytes),
            max_request_bytes: lockstep_format::wire::BIO_LEN_MAX,
            max_discard_bytes: MAX_DISCARD_BYTES,
            readable: usable,
            writable: usable,
            changed_elsewhere: snapshot.role != Role::Primary
                && is_changed_elsewhere(snapshot, volume),
        })
    }
}

/// Another node is Primary, or gives this one its data.
fn is_changed_elsewhere(snapshot: &Snapshot, volume: VolumeNr) -> bool {
    snapshot.connections.iter().any(|connection| {
        let mut peer_devices = connection.peer_devices.iter();
        connection.role == Role::Primary
            || peer_devices.any(|peer| peer.volume == volume && peer.repl_state.becomes_target())
    })
}

/// Up-to-date data can be reached, here or at a peer.
fn has_data(snapshot: &Snapshot, device: &DeviceReport) -> bool {
    let peers = snapshot
        .connections
        .iter()
        .flat_map(|connection| &connection.peer_devices);
    device.disk_state == DiskState::UpToDate
        || peers
            .filter(|peer| peer.volume == device.volume)
            .any(|peer| peer.disk_state == DiskState::UpToDate)
}

/// Discards of front ends are cut to what every peer takes in one packet.
const MAX_DISCARD_BYTES: u32 = 4 << 20;
