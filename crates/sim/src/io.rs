//! What the core asks of a world's disks.

use lockstep_core::event::MetaOp as CoreMetaOp;
use lockstep_core::event::{DiskError, DiskOp, Input, Tag};
use lockstep_format::units::{Sector, VolumeNr};

use crate::disk::{BLOCK, DataOp, Flying, META_BYTES, MetaOp};
use crate::world::{Ev, MS, World, name, span};

impl World {
    pub(crate) fn disk_output(&mut self, node: usize, tag: Tag, volume: VolumeNr, op: DiskOp) {
        self.trace(node, || format!("< disk {} {op:?}", tag.0));
        let v = usize::from(volume.0);
        let size = self.config.blocks;
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
                    .values()
                    .any(|f| match &f.op {
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
        let id = self.next();
        let delay = self.rng.delay(self.config.disk_delay);
        let life = self.nodes[node].life;
        self.nodes[node].disks[v]
            .flying
            .insert(id, Flying { tag, op });
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
        let Some(Flying { tag, op }) = self.nodes[node].disks[v].flying.remove(&id) else {
            return;
        };
        let disk = &mut self.nodes[node].disks[v];
        let mut result = Ok(None);
        match op {
            DataOp::Read { payload, block } => {
                let (_, len) = span(payload);
                let content = disk.content[block as usize..block as usize + len].to_vec();
                self.fill(node, payload, &content);
                self.release(node, payload.buf);
            }
            DataOp::ReadNew { block, count } => {
                let content = disk.content[block as usize..(block + count) as usize].to_vec();
                result = Ok(Some(self.new_buffer(node, content)));
            }
            DataOp::Write {
                block,
                content,
                fua,
            } => disk.write(block, &content, fua),
            DataOp::Flush { upto } => disk.flushed(upto),
        }
        self.input(node, Input::DiskDone { tag, result });
        self.try_close(node, v);
    }

    pub(crate) fn meta_output(&mut self, node: usize, tag: Tag, volume: VolumeNr, op: CoreMetaOp) {
        let v = usize::from(volume.0);
        self.trace(node, || match &op {
            CoreMetaOp::Read { offset, len } => format!("< meta {} read {offset}+{len}", tag.0),
            CoreMetaOp::Write {
                offset,
                bytes,
                flush_data,
            } => format!(
                "< meta {} write {offset}+{}{}",
                tag.0,
                bytes.len(),
                if *flush_data { " after a flush" } else { "" }
            ),
        });
        let disk = &mut self.nodes[node].disks[v];
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
                    MetaOp::Read { .. } => false,
                });
                let beyond = offset + bytes.len() as u64 > META_BYTES;
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
        };
        let id = self.next();
        let delay = self.rng.delay(self.config.disk_delay);
        let life = self.nodes[node].life;
        self.nodes[node].disks[v]
            .flying_meta
            .insert(id, Flying { tag, op });
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
        let Some(Flying { tag, op }) = disk.flying_meta.remove(&id) else {
            return;
        };
        let result: Result<Vec<u8>, DiskError> = Ok(match op {
            MetaOp::Read { offset, len } => {
                disk.meta[offset as usize..offset as usize + len as usize].to_vec()
            }
            MetaOp::Write {
                offset,
                bytes,
                flush_upto,
            } => {
                if let Some(upto) = flush_upto {
                    disk.flushed(upto);
                }
                disk.meta[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                Vec::new()
            }
        });
        self.input(node, Input::MetaDone { tag, result });
        self.try_close(node, v);
    }

    pub(crate) fn try_close(&mut self, node: usize, v: usize) {
        let life = self.nodes[node].life;
        let disk = &mut self.nodes[node].disks[v];
        if disk.flying.is_empty()
            && disk.flying_meta.is_empty()
            && let Some(tag) = disk.closing.take()
        {
            disk.open = false;
            let input = Input::DiskClosed { tag };
            self.at(MS / 100, Ev::Input { node, life, input });
        }
    }
}
