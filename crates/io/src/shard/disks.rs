//! A shard's disks: opening, closing, and operations until their completion.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use lockstep_core::event::{DiskError, DiskInfo, DiskOp, Input, MetaOp, Payload, Stream, Tag};
use lockstep_format::units::{NodeMask, VolumeNr};

use super::{Engine, Owner, Shard};
use crate::arena::Key;
use crate::disk::{CacheNote, DataWork, Disk, MetaWork, OpenError, Outcome, Step, Task};
use crate::pool::{BLOCK_BYTES_MAX, BufRef, Claim, IoBuf};
use crate::ring::{Done, Op};

/// A volume's open disk.
pub(super) struct OpenDisk {
    pub(super) disk: Disk,
    /// For the next process.
    note: Option<CacheNote>,
    /// Operations under way.
    in_flight: usize,
    /// The core wants it closed and waits.
    closing: Option<Tag>,
    /// The core has given it up.
    abandoned: bool,
}

/// A disk that a worker thread opens, or whose size it looks at.
pub(super) struct Opening {
    resource: Key,
    tag: Tag,
    volume: VolumeNr,
    result: Found,
}

/// What the worker thread leaves behind.
enum Found {
    Opened(Arc<Mutex<Option<Opened>>>),
    Probed(Arc<Mutex<Option<Result<DiskInfo, OpenError>>>>),
}

type Opened = Result<(Disk, Option<CacheNote>), OpenError>;

/// An operation under way.
pub(super) struct Run {
    resource: Key,
    volume: VolumeNr,
    tag: Tag,
    task: Task,
    kind: Kind,
}

enum Kind {
    Data,
    /// A read into a buffer of the core.
    ReadInto(Payload),
    /// A read into a new buffer, with its length.
    ReadNew(BufRef, u32),
    Meta,
    /// Given up: nobody waits for it, but it keeps its memory, and the disk open and locked, until
    /// the kernel has returned it.
    Abandoned(Disk),
}

/// Work that waits for pool memory.
#[derive(Default)]
pub(super) struct Starved {
    reads: VecDeque<(Key, Tag, VolumeNr, DiskOp)>,
    streams: Vec<(Key, Stream)>,
    frees_seen: u64,
}

impl Starved {
    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.streams.is_empty()
    }

    pub(super) fn park(&mut self, link: Key, stream: Stream) {
        self.streams.push((link, stream));
    }
}

impl<E: Engine> Shard<E> {
    pub(super) fn open_disk(
        &mut self,
        resource: Key,
        tag: Tag,
        volume: VolumeNr,
        data_path: String,
        meta_path: Option<String>,
    ) {
        if let Err(text) = self.may_open(resource, volume, &data_path, meta_path.as_deref()) {
            let result = Err(text);
            let input = Input::DiskOpened { tag, result };
            return self.inputs.push_back((resource, input));
        }
        let result = Arc::new(Mutex::new(None));
        let opening = Opening {
            resource,
            tag,
            volume,
            result: Found::Opened(result.clone()),
        };
        let key = self.opening.insert(opening);
        let notes = self.config.cache_notes.clone();
        let work = move || {
            let opened = Disk::open(&data_path, meta_path.as_deref()).map(|disk| {
                let note = notes.and_then(|notes| notes.note(&disk));
                (disk, note)
            });
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
            Ok(0)
        };
        self.ring
            .push(Owner::Open.token(key), Op::Blocking(Some(Box::new(work))));
    }

    pub(super) fn disk_opened(&mut self, key: Key) {
        let Some(opening) = self.opening.remove(key) else {
            return;
        };
        let opened = match opening.result {
            Found::Opened(result) => result,
            Found::Probed(result) => {
                let found = result.lock().unwrap_or_else(PoisonError::into_inner).take();
                let result = match found {
                    Some(Ok(info)) => Ok(info),
                    Some(Err(error)) => Err(error.to_string()),
                    None => Err("no thread could be started to look at the disk".to_owned()),
                };
                let tag = opening.tag;
                let input = Input::DiskOpened { tag, result };
                return self.inputs.push_back((opening.resource, input));
            }
        };
        let result = opened.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = match result {
            Some(Ok((disk, note))) => {
                let mut info = disk.info();
                info.cache = note.as_ref().map(CacheNote::found).unwrap_or_default();
                if let Some(slot) = self.resources.get_mut(opening.resource) {
                    let open = OpenDisk {
                        disk,
                        note,
                        in_flight: 0,
                        closing: None,
                        abandoned: false,
                    };
                    slot.disks.insert(opening.volume, open);
                }
                Ok(info)
            }
            Some(Err(error)) => Err(error.to_string()),
            None => Err("no thread could be started to open the disk".to_owned()),
        };
        let input = Input::DiskOpened {
            tag: opening.tag,
            result,
        };
        self.inputs.push_back((opening.resource, input));
    }

    /// Looks at the size of an open disk again, on a worker thread like the opening.
    pub(super) fn probe_disk(&mut self, resource: Key, tag: Tag, volume: VolumeNr) {
        let Some(disk) = self.usable_disk(resource, volume) else {
            let result = Err("the disk is closed".to_owned());
            let input = Input::DiskOpened { tag, result };
            return self.inputs.push_back((resource, input));
        };
        let result = Arc::new(Mutex::new(None));
        let probing = Opening {
            resource,
            tag,
            volume,
            result: Found::Probed(result.clone()),
        };
        let key = self.opening.insert(probing);
        let work = move || {
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(disk.probe());
            Ok(0)
        };
        self.ring
            .push(Owner::Open.token(key), Op::Blocking(Some(Box::new(work))));
    }

    pub(super) fn close_disk(&mut self, resource: Key, tag: Tag, volume: VolumeNr) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        match slot.disks.get_mut(&volume) {
            Some(open) if open.in_flight > 0 => open.closing = Some(tag),
            _ => self.closed(resource, tag, volume),
        }
    }

    fn closed(&mut self, resource: Key, tag: Tag, volume: VolumeNr) {
        let slot = self.resources.get_mut(resource);
        let open = slot.and_then(|slot| slot.disks.remove(&volume));
        // A crash from now on is none of this disk.
        if let Some(note) = open.and_then(|open| open.note) {
            note.remove();
        }
        self.inputs.push_back((resource, Input::DiskClosed { tag }));
    }

    /// A crash of this process loses nothing of the disk from now on.
    pub(super) fn note_cache(&mut self, resource: Key, volume: VolumeNr, untold: NodeMask) {
        let slot = self.resources.get(resource);
        if let Some(open) = slot.and_then(|slot| slot.disks.get(&volume))
            && open.closing.is_none()
            && let Some(note) = &open.note
        {
            note.write(untold);
        }
    }

    pub(super) fn disk_op(&mut self, resource: Key, tag: Tag, volume: VolumeNr, op: DiskOp) {
        let done = |result| (resource, Input::DiskDone { tag, result });
        let Some(disk) = self.usable_disk(resource, volume) else {
            return self.inputs.push_back(done(Err(DiskError::Gone)));
        };
        let mut kind = Kind::Data;
        let work = match op {
            DiskOp::Read { sector, payload } => self.payload(payload).map(|buf| {
                kind = Kind::ReadInto(payload);
                let Payload {
                    offset: start, len, ..
                } = payload;
                DataWork::Read {
                    buf,
                    start,
                    len,
                    offset: sector.bytes(),
                }
            }),
            DiskOp::Write {
                sector,
                payload,
                fua,
            } => self.payload(payload).map(|buf| {
                let Payload {
                    offset: start, len, ..
                } = payload;
                DataWork::Write {
                    buf,
                    start,
                    len,
                    offset: sector.bytes(),
                    fua,
                }
            }),
            DiskOp::ReadNew { len, .. } if len as usize > BLOCK_BYTES_MAX => None,
            DiskOp::ReadNew { sector, len } => {
                // Those that wait already go first.
                let waiting = !self.starved.reads.is_empty();
                let buf = if waiting {
                    None
                } else {
                    self.pool.alloc(len as usize, Claim::Ordinary)
                };
                let Some(buf) = buf else {
                    return self.starved.reads.push_back((resource, tag, volume, op));
                };
                let buf = buf.share();
                kind = Kind::ReadNew(buf.clone(), len);
                Some(DataWork::Read {
                    buf,
                    start: 0,
                    len,
                    offset: sector.bytes(),
                })
            }
            DiskOp::Flush => Some(DataWork::Flush),
            DiskOp::Discard { sector, len } => Some(DataWork::Discard {
                offset: sector.bytes(),
                len,
            }),
            DiskOp::Zeroes { sector, len, unmap } => Some(DataWork::Zeroes {
                offset: sector.bytes(),
                len,
                unmap,
            }),
        };
        let Some(work) = work else {
            let error = DiskError::Io {
                errno: libc::EFAULT,
            };
            return self.inputs.push_back(done(Err(error)));
        };
        let task = Task::data(&disk, work);
        self.start_run(Run {
            resource,
            volume,
            tag,
            task,
            kind,
        });
    }

    pub(super) fn meta_op(&mut self, resource: Key, tag: Tag, volume: VolumeNr, op: MetaOp) {
        let Some(disk) = self.usable_disk(resource, volume) else {
            let result = Err(DiskError::Gone);
            return self
                .inputs
                .push_back((resource, Input::MetaDone { tag, result }));
        };
        let work = match op {
            MetaOp::Read { offset, len } => MetaWork::Read { offset, len },
            MetaOp::Write {
                offset,
                bytes,
                flush_data,
            } => MetaWork::Write {
                offset,
                bytes,
                flush_data,
            },
            MetaOp::Store { steps, flush_data } => MetaWork::Store { steps, flush_data },
        };
        match Task::meta(&disk, work, &self.pool) {
            Ok(task) => self.start_run(Run {
                resource,
                volume,
                tag,
                task,
                kind: Kind::Meta,
            }),
            Err(error) => {
                let input = Input::MetaDone {
                    tag,
                    result: Err(error),
                };
                self.inputs.push_back((resource, input));
            }
        }
    }

    /// The disk, unless it is not open or being closed.
    fn usable_disk(&self, resource: Key, volume: VolumeNr) -> Option<Disk> {
        let open = self.resources.get(resource)?.disks.get(&volume)?;
        (open.closing.is_none() && !open.abandoned).then(|| open.disk.clone())
    }

    fn start_run(&mut self, mut run: Run) {
        if let Some(open) = self.open_of(&run) {
            open.in_flight += 1;
        }
        match run.task.start() {
            Step::Finished(result) => self.finish_run(run, result),
            Step::Run(op) => {
                let key = self.runs.insert(run);
                self.ring.push(Owner::Disk.token(key), op);
            }
        }
    }

    pub(super) fn disk_completed(&mut self, key: Key, done: Done) {
        let Some(run) = self.runs.get_mut(key) else {
            return;
        };
        // What the operation owned goes before the core learns of it.
        let Done { token, op, result } = done;
        drop(op);
        if let Kind::Abandoned(_) = run.kind {
            self.abandoned_returned(key);
            return;
        }
        match run.task.advance(result) {
            Step::Run(op) => {
                self.ring.push(token, op);
            }
            Step::Finished(result) => {
                if let Some(run) = self.runs.remove(key) {
                    self.finish_run(run, result);
                }
            }
        }
    }

    fn finish_run(&mut self, run: Run, result: Result<Outcome, DiskError>) {
        let closed = self.open_of(&run).and_then(|open| {
            if let (Some(note), Err(DiskError::Io { .. })) = (&mut open.note, &result) {
                note.disk_fails();
            }
            open.in_flight -= 1;
            open.closing.take_if(|_| open.in_flight == 0)
        });
        let Run {
            resource,
            volume,
            tag,
            task,
            kind,
        } = run;
        // The task shares the buffer; without this a completed read's buffer were not unique.
        drop(task);
        let input = match kind {
            Kind::Abandoned(_) => return,
            Kind::Data | Kind::ReadInto(_) => Input::DiskDone {
                tag,
                result: result.map(|_| None),
            },
            Kind::ReadNew(buf, len) => {
                let result = result.map(|_| {
                    let buf = self.table.insert(resource.0, buf);
                    Some(Payload {
                        buf,
                        offset: 0,
                        len,
                    })
                });
                Input::DiskDone { tag, result }
            }
            Kind::Meta => {
                let result = result.map(|outcome| match outcome {
                    Outcome::Bytes(bytes) => bytes,
                    Outcome::Done => Vec::new(),
                });
                Input::MetaDone { tag, result }
            }
        };
        self.inputs.push_back((resource, input));
        if let Some(tag) = closed {
            self.closed(resource, tag, volume);
        }
    }

    fn open_of(&mut self, run: &Run) -> Option<&mut OpenDisk> {
        self.resources
            .get_mut(run.resource)?
            .disks
            .get_mut(&run.volume)
    }

    /// The disk does not answer: whoever waits for it is told so, and the operations stay behind.
    pub(super) fn abandon_disk(&mut self, resource: Key, volume: VolumeNr) {
        let Some(slot) = self.resources.get_mut(resource) else {
            return;
        };
        let Some(open) = slot.disks.get_mut(&volume) else {
            return;
        };
        open.abandoned = true;
        if let Some(note) = &mut open.note {
            note.disk_fails();
        }
        open.in_flight = 0;
        let (disk, closing) = (open.disk.clone(), open.closing.take());
        let is_of = |run: &Run| run.resource == resource && run.volume == volume;
        let runs = self.runs.iter().filter(|(_, run)| is_of(run));
        let keys: Vec<Key> = runs.map(|(key, _)| key).collect();
        let mut given_up = 0_u32;
        for key in keys {
            let Some(run) = self.runs.get_mut(key) else {
                continue;
            };
            if let Kind::Abandoned(_) = run.kind {
                continue;
            }
            let tag = run.tag;
            let kind = std::mem::replace(&mut run.kind, Kind::Abandoned(disk.clone()));
            given_up += 1;
            let input = match kind {
                Kind::Meta => Input::MetaDone {
                    tag,
                    result: Err(DiskError::Gone),
                },
                kind => {
                    if let Kind::ReadInto(payload) = kind {
                        self.renew(payload);
                    }
                    Input::DiskDone {
                        tag,
                        result: Err(DiskError::Gone),
                    }
                }
            };
            self.inputs.push_back((resource, input));
        }
        let starved = std::mem::take(&mut self.starved.reads);
        for (of, tag, nr, op) in starved {
            if of == resource && nr == volume {
                let result = Err(DiskError::Gone);
                let input = Input::DiskDone { tag, result };
                self.inputs.push_back((resource, input));
            } else {
                self.starved.reads.push_back((of, tag, nr, op));
            }
        }
        let path = disk.data().path();
        tracing::warn!(
            path,
            operations = given_up,
            "operations of a disk are given up"
        );
        if let Some(tag) = closing {
            self.close_disk(resource, tag, volume);
        }
    }

    /// The kernel may still fill the memory of a read that was given up: the core's buffer gets
    /// other memory, with the bytes around the read.
    fn renew(&mut self, payload: Payload) {
        let Ok(old) = self.table.get(payload.buf) else {
            return;
        };
        let capacity = old.capacity();
        let new = self.pool.alloc(capacity, Claim::Receive);
        let Some(mut new) = new.or_else(|| IoBuf::standalone(capacity).ok()) else {
            tracing::error!("no memory in place of a buffer that a dead disk may still fill");
            std::process::abort();
        };
        let (start, len) = (payload.offset as usize, payload.len as usize);
        let old = old.clone();
        old.read_at(0, &mut new[..start]);
        old.read_at(start + len, &mut new[start + len..capacity]);
        self.table.replace(payload.buf, new.share());
    }

    fn abandoned_returned(&mut self, key: Key) {
        let Some(Run { kind, .. }) = self.runs.remove(key) else {
            return;
        };
        if let Kind::Abandoned(disk) = kind {
            let path = disk.data().path();
            tracing::info!(path, "an operation that was given up has returned");
        }
    }

    /// A write that was given up may still happen: it must not hit what comes next.
    fn may_open(
        &self,
        resource: Key,
        volume: VolumeNr,
        data_path: &str,
        meta_path: Option<&str>,
    ) -> Result<(), String> {
        let meta_path = meta_path.unwrap_or(data_path);
        let blocks = |run: &Run| match &run.kind {
            Kind::Abandoned(disk) => {
                let own = run.resource == resource && run.volume == volume;
                disk.data().path() == data_path || own && disk.meta().path() == meta_path
            }
            Kind::Data | Kind::ReadInto(_) | Kind::ReadNew(..) | Kind::Meta => false,
        };
        match self.runs.iter().filter(|(_, run)| blocks(run)).count() {
            0 => Ok(()),
            count => Err(format!(
                "{data_path}: {count} operations of its last use, which were given up, have not \
                 come back from the kernel and may still write; wait until the disk answers, or \
                 attach another"
            )),
        }
    }

    /// Memory came back: goes on with what waited for it, in the order in which it waited.
    pub(super) fn feed_starved(&mut self) {
        let frees = self.pool.free_count();
        if self.starved.is_empty() || frees == self.starved.frees_seen {
            return;
        }
        self.starved.frees_seen = frees;
        for (link, stream) in std::mem::take(&mut self.starved.streams) {
            self.parse(link, stream);
        }
        for (resource, tag, volume, op) in std::mem::take(&mut self.starved.reads) {
            self.disk_op(resource, tag, volume, op);
        }
        self.pump();
    }
}
