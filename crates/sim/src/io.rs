//! What the core asks of a world's disks.

use lockstep_core::event::MetaOp as CoreMetaOp;
use lockstep_core::event::{DiskError, DiskOp, Input, Tag};
use lockstep_core::report::PeerDeviceReport;
use lockstep_core::state::ReplState;
use lockstep_format::units::{Sector, VolumeNr};

use crate::check;
use crate::cover;
use crate::disk::{BLOCK, DataOp, Fate, Flying, MetaOp};
use crate::limits;
use crate::promises;
use crate::rot;
use crate::sometimes;
use crate::story;
use crate::world::{Ev, MS, Place, World, name, span};

/// Blocks that an operation reads.
fn read_range(op: &DataOp) -> Option<std::ops::Range<u64>> {
    match op {
        DataOp::Read { payload, block } => Some(*block..*block + u64::from(payload.len) / BLOCK),
        DataOp::ReadNew { block, count } => Some(*block..*block + count),
        DataOp::Write { .. } | DataOp::Flush { .. } => None,
    }
}

const EIO: DiskError = DiskError::Io { errno: 5 };

impl World {
    /// A connect looks at the disk. It takes no turn of the dice unless it finds something.
    pub(crate) fn look_at_disk(&mut self, node: usize, life: u32, tag: Tag, volume: VolumeNr) {
        let disk = &mut self.nodes[node].disks[usize::from(volume.0)];
        let result = Ok(disk.info());
        let delay = match std::mem::take(&mut disk.grown) {
            true => self.delay(Place::Node(node), self.config.disk_delay),
            false => 0,
        };
        let input = Box::new(Input::DiskOpened { tag, result });
        self.at(delay, Ev::Input { node, life, input });
    }

    pub(crate) fn disk_output(&mut self, node: usize, tag: Tag, volume: VolumeNr, op: DiskOp) {
        if self.is_traced() {
            let text = story::disk(volume, tag, &op);
            self.trace(node, || text);
        }
        let v = usize::from(volume.0);
        let size = self.nodes[node].disks[v].content.len() as u64;
        let block_of = |sector: Sector| sector.0 / 8;
        let op = match op {
            DiskOp::Read { sector, payload } => {
                self.hold(node, payload.buf);
                DataOp::Read {
                    payload,
                    block: block_of(sector),
                }
            }
            DiskOp::ReadNew { sector, len } => DataOp::ReadNew {
                block: block_of(sector),
                count: u64::from(len) / BLOCK,
            },
            DiskOp::Write {
                sector,
                payload,
                fua,
            } => DataOp::Write {
                block: block_of(sector),
                content: self.content(node, payload),
                fua,
            },
            DiskOp::Flush => DataOp::Flush {
                upto: self.nodes[node].disks[v].sequence(),
            },
            DiskOp::Discard { sector, len } if self.nodes[node].disks[v].keeps_discarded => {
                let first = block_of(sector) as usize;
                let blocks = first..first + (u64::from(len) / BLOCK) as usize;
                let old = self.nodes[node].disks[v].content.get(blocks);
                DataOp::Write {
                    block: block_of(sector),
                    content: old.unwrap_or_default().to_vec(),
                    fua: false,
                }
            }
            DiskOp::Discard { sector, len } | DiskOp::Zeroes { sector, len, .. } => DataOp::Write {
                block: block_of(sector),
                content: vec![0; (u64::from(len) / BLOCK) as usize],
                fua: false,
            },
        };
        let range = match &op {
            DataOp::Read { payload, block } => {
                Some((*block, u64::from(payload.len) / BLOCK, false))
            }
            DataOp::ReadNew { block, count } => Some((*block, *count, false)),
            DataOp::Write { block, content, .. } => Some((*block, content.len() as u64, true)),
            DataOp::Flush { .. } => None,
        };
        if self.nodes[node].disks[v].given_up {
            let result = Err(DiskError::Gone);
            self.release_read(node, &op);
            return self.soon(node, Input::DiskDone { tag, result });
        }
        if !self.nodes[node].disks[v].open {
            self.fail(format!(
                "{} uses volume {v}'s disk while it is closed",
                name(node)
            ));
            return;
        }
        if let Some((block, count, write)) = range {
            if block + count > size {
                self.fail(format!(
                    "{} reaches beyond the end: block {block}+{count}",
                    name(node)
                ));
                return;
            }
            if write {
                let overlaps = self.nodes[node].disks[v]
                    .flying
                    .iter()
                    .any(|(_, f)| match &f.op {
                        DataOp::Write {
                            block: b, content, ..
                        } => block < b + content.len() as u64 && *b < block + count,
                        _ => false,
                    });
                if overlaps {
                    self.fail(format!(
                        "{} has two overlapping writes of block {block}+{count} at its disk",
                        name(node)
                    ));
                }
            }
        }
        cover::write_is_marked(self, node, v, &op);
        let id = self.next();
        let typical = self.config.disk_delay * self.nodes[node].disks[v].trouble.slowness;
        let delay = self.delay(Place::Disk(node, v), typical);
        let (life, since) = (self.nodes[node].life, self.now);
        self.nodes[node].disks[v]
            .flying
            .push((id, Flying { tag, op, since }));
        self.at(
            delay,
            Ev::Disk {
                node,
                life,
                volume: v,
                id,
            },
        );
    }

    pub(crate) fn disk_done(&mut self, node: usize, v: usize, id: u64) {
        let disk = &mut self.nodes[node].disks[v];
        if disk.trouble.hangs {
            disk.hung.push((id, false));
            return;
        }
        if let Some(op) = disk.abandoned.remove(&id) {
            self.late(node, v, &op);
            return;
        }
        let Some(Flying { tag, op, .. }) = self.nodes[node].disks[v].take_flying(id) else {
            return;
        };
        let mut result = Ok(None);
        let fate = if self.reads_bad_block(node, v, &op) {
            Fate::Failed
        } else if self.is_last_copy(node, v) {
            Fate::Good
        } else {
            self.nodes[node].disks[v].trouble.fate(&op)
        };
        if fate == Fate::Failed {
            self.loses_block(node, v, &op);
        }
        if fate == Fate::Failed {
            self.nodes[node].disks[v].fails();
        }
        if fate != Fate::Good {
            self.trace(node, || format!("== volume {v}: {}", fate.words()));
        }
        let disk = &mut self.nodes[node].disks[v];
        match (op, fate) {
            (DataOp::Read { payload, block }, Fate::Good | Fate::Lost | Fate::Misdirected) => {
                let (_, len) = span(payload);
                let content = disk.content[block as usize..block as usize + len].to_vec();
                self.fill(node, payload, &content);
                self.release(node, payload.buf);
            }
            (DataOp::Read { payload, .. }, Fate::Failed) => {
                self.release(node, payload.buf);
                result = Err(EIO);
            }
            (DataOp::ReadNew { block, count }, Fate::Good | Fate::Lost | Fate::Misdirected) => {
                let content = disk.content[block as usize..(block + count) as usize].to_vec();
                result = Ok(Some(self.new_buffer(node, content)));
            }
            (
                DataOp::Write {
                    block,
                    content,
                    fua,
                },
                Fate::Good,
            ) => disk.write(block, &content, fua),
            (DataOp::Write { block, content, .. }, Fate::Failed) => {
                // A failed write may have reached the medium in part.
                let mut rng = self.chance(Place::Disk(node, v)).clone();
                let disk = &mut self.nodes[node].disks[v];
                for (i, value) in content.iter().enumerate() {
                    if rng.permille(500) {
                        disk.write(block + i as u64, &[*value], false);
                    }
                }
                result = Err(EIO);
            }
            (DataOp::Write { block, content, .. }, Fate::Lost) => {
                self.spoil(node, v, block, content.len() as u64);
            }
            (DataOp::Write { block, content, .. }, Fate::Misdirected) => {
                let size = disk.content.len() as u64;
                let count = content.len() as u64;
                let wrong = (block + size / 3) % (size - count);
                disk.write(wrong, &content, false);
                self.spoil(node, v, block, count);
                self.spoil(node, v, wrong, count);
            }
            (DataOp::Flush { upto }, Fate::Good | Fate::Lost | Fate::Misdirected) => {
                disk.flushed(upto);
            }
            (DataOp::ReadNew { .. } | DataOp::Flush { .. }, Fate::Failed) => result = Err(EIO),
        }
        self.input(node, Input::DiskDone { tag, result });
        self.try_close(node, v);
    }

    /// A block that could not be read once cannot be read again.
    fn reads_bad_block(&self, node: usize, v: usize, op: &DataOp) -> bool {
        let disk = &self.nodes[node].disks[v];
        !disk.bad.is_empty()
            && read_range(op).is_some_and(|range| disk.bad.range(range).next().is_some())
    }

    /// A read has failed. Where another disk has the block for certain, it is lost here until somebody
    /// writes it.
    fn loses_block(&mut self, node: usize, v: usize, op: &DataOp) {
        // A disk that is taken away reports the error again after the next attach.
        let lasts = self.nodes[node].disks[v].trouble.loses && self.limits.passes_on;
        let Some(range) = read_range(op).filter(|_| lasts) else {
            return;
        };
        let block = range.start;
        let value = self.nodes[node].disks[v]
            .content
            .get(block as usize)
            .copied();
        let is_safe = |peer: usize| {
            let disk = &self.nodes[peer].disks[v];
            let kept = disk.content.get(block as usize).copied() == value && disk.open;
            kept && !disk.given_up
                && check::is_whole(self, peer, v)
                && disk.volatile_in(block..block + 1).is_empty()
        };
        let mut peers = self.storage().filter(|peer| *peer != node);
        if value.is_some() && peers.any(is_safe) && !cover::is_asked_for_writing(self, v, block) {
            self.trace(node, || format!("== block {block} of volume {v} is lost"));
            sometimes!(self.marks, "block-unreadable");
            self.nodes[node].disks[v].loses(block);
        }
    }

    /// The disk has all data, no other node that is up has, and that is to be spared. One that its
    /// operator gives up just now has none, before this node hears of it.
    fn is_last_copy(&mut self, node: usize, v: usize) -> bool {
        if !self.nodes[node].disks[v].trouble.spares_last {
            return false;
        }
        let holders = self.view(node).map_or(0, |view| view.holders[v]);
        let mut others = (0..self.nodes.len())
            .filter(|peer| *peer != node && holders & 1 << peer != 0)
            .collect::<Vec<_>>();
        others.retain(|peer| self.is_up(*peer) && !self.is_invalidated(*peer, node, v));
        holders & 1 << node != 0 && others.is_empty()
    }

    /// A node has been told, or begins, to throw its copy away for that of `source`.
    fn is_invalidated(&self, node: usize, source: usize, v: usize) -> bool {
        let told = format!("Invalidate {{ volume: VolumeNr({v}),");
        let mut commands = self.nodes[node].commands.values();
        let begins = |p: &PeerDeviceReport| {
            usize::from(p.volume.0) == v
                && matches!(
                    p.repl_state,
                    ReplState::StartingSyncT | ReplState::WfBitmapT
                )
        };
        commands.any(|c| c.text.starts_with(&told))
            || self.snapshot(node).is_some_and(|snapshot| {
                let mut connections = snapshot.connections.iter();
                connections
                    .any(|c| usize::from(c.peer.0) == source && c.peer_devices.iter().any(begins))
            })
    }

    pub(crate) fn meta_output(&mut self, node: usize, tag: Tag, volume: VolumeNr, op: CoreMetaOp) {
        let v = usize::from(volume.0);
        if self.is_traced() {
            let text = story::meta(&self.nodes[node].disks[v].layout, volume, tag, &op);
            self.trace(node, || text);
        }
        let disk = &mut self.nodes[node].disks[v];
        if disk.given_up {
            let result = Err(DiskError::Gone);
            return self.soon(node, Input::MetaDone { tag, result });
        }
        let open = disk.open;
        let op = match op {
            CoreMetaOp::Read { offset, len } => MetaOp::Read { offset, len },
            CoreMetaOp::Write {
                offset,
                bytes,
                flush_data,
            } => {
                let overlaps = disk.flying_meta.values().any(|f| match &f.op {
                    MetaOp::Write {
                        offset: o,
                        bytes: b,
                        ..
                    } => offset < o + b.len() as u64 && *o < offset + bytes.len() as u64,
                    MetaOp::Read { .. } | MetaOp::Store { .. } => false,
                });
                let beyond = !disk.is_meta(offset, bytes.len() as u64);
                let flush_upto = flush_data.then(|| disk.sequence());
                if overlaps || beyond || !open {
                    self.fail(format!(
                        "{} writes metadata at {offset}+{}: overlap {overlaps}, beyond the end \
                         {beyond}, open {open}",
                        name(node),
                        bytes.len()
                    ));
                    return;
                }
                MetaOp::Write {
                    offset,
                    bytes,
                    flush_upto,
                }
            }
            CoreMetaOp::Store { steps, flush_data } => {
                if let Some(text) = disk.refuses(&steps) {
                    self.fail(format!("{} stores to metadata {text}", name(node)));
                    return;
                }
                let flush_upto = flush_data.then(|| disk.sequence());
                MetaOp::Store { steps, flush_upto }
            }
        };
        let id = self.next();
        let typical = self.config.disk_delay * self.nodes[node].disks[v].trouble.slowness;
        let delay = self.delay(Place::Meta(node, v), typical);
        let (life, since) = (self.nodes[node].life, self.now);
        self.nodes[node].disks[v]
            .flying_meta
            .insert(id, Flying { tag, op, since });
        self.at(
            delay,
            Ev::Meta {
                node,
                life,
                volume: v,
                id,
            },
        );
    }

    pub(crate) fn meta_done(&mut self, node: usize, v: usize, id: u64) {
        let disk = &mut self.nodes[node].disks[v];
        if disk.trouble.hangs {
            disk.hung.push((id, true));
            return;
        }
        if let Some(op) = disk.abandoned_meta.remove(&id) {
            let happens = self.chance(Place::Meta(node, v)).permille(500);
            let disk = &mut self.nodes[node].disks[v];
            match op {
                MetaOp::Write { offset, bytes, .. } if happens => disk.store_meta(offset, &bytes),
                MetaOp::Store { steps, .. } if happens => disk.store_steps(&steps),
                MetaOp::Read { .. } | MetaOp::Write { .. } | MetaOp::Store { .. } => {}
            }
            return;
        }
        if self.tears_metadata(node, v, id) {
            return;
        }
        let disk = &mut self.nodes[node].disks[v];
        let Some(Flying { tag, op, .. }) = disk.flying_meta.remove(&id) else {
            return;
        };
        let writes_bitmap = matches!(&op, MetaOp::Write { offset, .. } if disk.is_bitmap(*offset));
        if disk.trouble.meta_fails(writes_bitmap) {
            disk.fails();
            self.trace(node, || {
                format!("== volume {v}: a metadata operation fails")
            });
            let result = Err(EIO);
            self.input(node, Input::MetaDone { tag, result });
            self.try_close(node, v);
            return;
        }
        let result: Result<Vec<u8>, DiskError> = Ok(match op {
            MetaOp::Read { offset, len } => disk.meta_at(offset, len as usize).to_vec(),
            MetaOp::Write {
                offset,
                bytes,
                flush_upto,
            } => {
                if let Some(upto) = flush_upto {
                    disk.flushed(upto);
                }
                let was_partial = crate::cover::is_partial_disk(disk);
                disk.store_meta(offset, &bytes);
                let log = disk.layout.al_byte();
                let is_log = offset >= log && offset < log + disk.layout.geometry().al.bytes();
                if offset == disk.layout.superblock_byte() {
                    promises::superblock_written(self, node, v);
                    if was_partial {
                        check::current_is_durable(self, node, v);
                    }
                    rot::comes_to_light(self, node, v);
                }
                if self.watches {
                    check::differences_are_marked(self);
                    check::losses_are_marked(self);
                } else if is_log {
                    // Some extent may have left the log.
                    check::losses_are_marked(self);
                }
                Vec::new()
            }
            MetaOp::Store { steps, flush_upto } => {
                if let Some(upto) = flush_upto {
                    disk.flushed(upto);
                }
                disk.store_steps(&steps);
                sometimes!(self.marks, "stored-in-place");
                if self.watches {
                    check::differences_are_marked(self);
                    check::losses_are_marked(self);
                }
                Vec::new()
            }
        });
        self.input(node, Input::MetaDone { tag, result });
        self.try_close(node, v);
    }

    /// The node gives a disk up: what is in flight ends for it, and may still happen.
    pub(crate) fn abandon_disk(&mut self, node: usize, v: usize) {
        self.trace(node, || format!("gives the disk of volume {v} up"));
        sometimes!(self.marks, "disk-given-up");
        promises::gives_up_what_hangs(self, node, v);
        limits::disk_is_given_up(self, node, v);
        let disk = &mut self.nodes[node].disks[v];
        disk.given_up = true;
        disk.fails();
        disk.trouble.happened = true;
        let flying = std::mem::take(&mut disk.flying);
        let flying_meta = std::mem::take(&mut disk.flying_meta);
        for (id, Flying { tag, op, .. }) in flying {
            self.release_read(node, &op);
            let result = Err(DiskError::Gone);
            self.soon(node, Input::DiskDone { tag, result });
            self.nodes[node].disks[v].abandoned.insert(id, op);
        }
        for (id, Flying { tag, op, .. }) in flying_meta {
            let result = Err(DiskError::Gone);
            self.soon(node, Input::MetaDone { tag, result });
            self.nodes[node].disks[v].abandoned_meta.insert(id, op);
        }
        self.try_close(node, v);
    }

    /// The disk answers again.
    pub(crate) fn unhang(&mut self, node: usize, v: usize) {
        let life = self.nodes[node].life;
        for (id, meta) in std::mem::take(&mut self.nodes[node].disks[v].hung) {
            let delay = self.delay(Place::Disk(node, v), self.config.disk_delay);
            let volume = v;
            let event = match meta {
                true => Ev::Meta {
                    node,
                    life,
                    volume,
                    id,
                },
                false => Ev::Disk {
                    node,
                    life,
                    volume,
                    id,
                },
            };
            self.at(delay, event);
        }
    }

    /// An operation that was given up reaches the medium after all, or does not.
    fn late(&mut self, node: usize, v: usize, op: &DataOp) {
        let mut happens = || self.chance(Place::Disk(node, v)).permille(500);
        match op {
            DataOp::Write { block, content, .. } => {
                if happens() {
                    self.nodes[node].disks[v].write(*block, content, false);
                }
            }
            DataOp::Flush { upto } => self.nodes[node].disks[v].flushed(*upto),
            DataOp::Read { .. } | DataOp::ReadNew { .. } => {}
        }
    }

    fn release_read(&mut self, node: usize, op: &DataOp) {
        if let DataOp::Read { payload, .. } = op {
            self.release(node, payload.buf);
        }
    }

    fn soon(&mut self, node: usize, input: Input) {
        let life = self.nodes[node].life;
        let input = Box::new(input);
        self.at(MS / 100, Ev::Input { node, life, input });
    }

    /// A disk silently did something else than it was told.
    fn spoil(&mut self, node: usize, volume: usize, block: u64, count: u64) {
        sometimes!(self.marks, "silent-corruption");
        for block in block..block + count {
            self.spoiled.entry((volume as u16, block)).or_insert(node);
        }
    }

    pub(crate) fn try_close(&mut self, node: usize, v: usize) {
        let life = self.nodes[node].life;
        let disk = &mut self.nodes[node].disks[v];
        if disk.flying.is_empty()
            && disk.flying_meta.is_empty()
            && let Some(tag) = disk.closing.take()
        {
            disk.open = false;
            disk.given_up = false;
            disk.note.disk_goes();
            let input = Box::new(Input::DiskClosed { tag });
            self.at(MS / 100, Ev::Input { node, life, input });
        }
    }
}
