//! Front ends of a world: requests come, are completed, and what they read is checked.

use lockstep_core::event::{Input, Request, RequestError, RequestId, RequestKind};
use lockstep_core::state::Role;
use lockstep_format::units::{Sector, VolumeNr};

use crate::check;
use crate::disk::BLOCK;
use crate::promises;
use crate::sometimes;
use crate::story;
use crate::world::{Asked, Weather, World, name};

/// A front end with so many requests under way reads nothing back.
const READS_BACK: usize = 20;

impl World {
    /// A request; its content is fresh versions.
    pub fn request(
        &mut self,
        node: usize,
        volume: u16,
        kind: RequestKind,
        block: u64,
        count: u64,
    ) -> u64 {
        let request_id = self.next();
        let value = self.next_value;
        let start = self.now;
        let mut payload = None;
        let mut value_of_first = 0;
        let mut taken = 0;
        match kind {
            RequestKind::Write { .. } => {
                value_of_first = value;
                taken = count;
                let content = (value..value + count).collect();
                payload = Some(self.new_buffer(node, content));
            }
            RequestKind::Read => {
                payload = Some(self.new_buffer(node, vec![u64::MAX; count as usize]));
            }
            _ => {}
        }
        self.next_value += taken;
        let asked = Asked {
            volume,
            kind,
            block,
            count,
            value: value_of_first,
            start,
            generation: promises::generation(self, node, usize::from(volume)),
            payload,
            is_given_up: false,
        };
        if !matches!(kind, RequestKind::Read | RequestKind::Flush) {
            let weak = kind == RequestKind::Discard;
            for i in 0..count {
                self.history.write_starts(
                    volume,
                    block + i,
                    (asked.value_of(i), node),
                    start,
                    weak,
                );
            }
        }
        self.trace(node, || {
            format!("== request {request_id}: {}", story::asked(&asked))
        });
        self.nodes[node].requests.insert(request_id, asked);
        let len = if kind == RequestKind::Flush {
            0
        } else {
            (count * BLOCK) as u32
        };
        self.input(
            node,
            Input::Request(Request {
                id: RequestId(request_id),
                volume: VolumeNr(volume),
                kind,
                sector: Sector(block * 8),
                len,
                payload,
            }),
        );
        request_id
    }

    pub(crate) fn abandon(&mut self, asked: &Asked, now: u64) {
        // What was read of it since then stays.
        if !asked.is_given_up {
            self.writes_die(asked, now);
        }
    }

    /// It is up and has no role in which it writes.
    fn is_secondary(&mut self, node: usize) -> bool {
        let view = self.view(node);
        view.is_some_and(|view| view.role == Role::Secondary)
    }

    fn writes_die(&mut self, asked: &Asked, now: u64) {
        if matches!(asked.kind, RequestKind::Read | RequestKind::Flush) {
            return;
        }
        for i in 0..asked.count {
            self.history.write_dies(
                asked.volume,
                asked.block + i,
                asked.value_of(i),
                asked.start,
                now,
            );
        }
    }

    /// Nobody promises any more what no flush has covered.
    pub(crate) fn unflushed_may_be_lost(&mut self) {
        self.trace(0, || "== what was not flushed may be lost".into());
        self.history.unflushed_may_be_lost(self.now);
    }

    /// Another node takes over from this one, whose applications count as dead. What it has not
    /// acknowledged may never happen, whatever it read of it itself; that it acknowledges nothing of it
    /// any more is checked as before.
    pub(crate) fn give_up_writes(&mut self, node: usize) {
        self.seen.outlived |= 1 << node;
        let mut asked: Vec<Asked> = self.nodes[node].requests.values().cloned().collect();
        asked.retain(|asked| !asked.is_given_up);
        for asked in self.nodes[node].requests.values_mut() {
            asked.is_given_up = true;
        }
        self.trace(node, || {
            format!("== its {} requests count as given up", asked.len())
        });
        for asked in asked {
            self.writes_die(&asked, self.now);
        }
    }

    /// Reads at once what was just acknowledged, where front ends do that.
    pub(crate) fn read_back(&mut self) {
        let Some(due) = self.read_back.as_mut().map(std::mem::take) else {
            return;
        };
        for (node, asked) in due {
            if self.is_up(node) && self.violation.is_none() {
                self.request(
                    node,
                    asked.volume,
                    RequestKind::Read,
                    asked.block,
                    asked.count,
                );
            }
        }
    }

    fn oldest_read(&self) -> u64 {
        self.nodes
            .iter()
            .flat_map(|n| n.requests.values())
            .map(|a| a.start)
            .min()
            .unwrap_or(self.now)
    }

    pub(crate) fn complete(
        &mut self,
        node: usize,
        id: RequestId,
        result: Result<(), RequestError>,
    ) {
        let Some(asked) = self.nodes[node].requests.remove(&id.0) else {
            self.fail(format!("{} completes request {} twice", name(node), id.0));
            return;
        };
        let now = self.now;
        self.trace(node, || {
            let took = (now - asked.start) as f64 / 1e6;
            let how = match &result {
                Ok(()) => "is acknowledged".to_string(),
                Err(error) => format!("fails ({error:?})"),
            };
            format!(
                "request {} ({}) {how} after {took:.2} ms",
                id.0,
                story::asked(&asked)
            )
        });
        let ok = result.is_ok();
        self.nodes[node].served += u64::from(ok);
        sometimes!(self.marks, !ok, "request-failed");
        if result == Err(RequestError::Io) {
            self.check_error(node, &asked);
        }
        match asked.kind {
            RequestKind::Read => {
                if let (true, Some(payload)) = (ok, asked.payload) {
                    let content = self.content(node, payload);
                    for (i, value) in content.into_iter().enumerate() {
                        let block = asked.block + i as u64;
                        if self.spoiled.contains_key(&(asked.volume, block)) {
                            continue;
                        }
                        let read = self
                            .history
                            .read(asked.volume, block, value, asked.start, now);
                        if let Err(text) = read {
                            self.fail(format!("{} reads what it must not: {text}", name(node)));
                        }
                    }
                }
            }
            // Users of a node that stands by have written nothing: it answers their flush at once.
            RequestKind::Flush if ok && asked.start == now && self.is_secondary(node) => {}
            RequestKind::Flush => {
                if ok {
                    promises::goes_on(self, node);
                    check::flushed_is_durable(self, node, asked.volume, asked.start);
                    let oldest = self.oldest_read();
                    self.history.flushed(asked.volume, asked.start, oldest);
                } else if self.has_lost_disk(node, asked.volume) {
                    self.history.flush_failed(asked.volume, now);
                }
            }
            RequestKind::Write { .. } | RequestKind::Discard | RequestKind::Zeroes { .. } => {
                let hard = asked.kind == RequestKind::Write { fua: true };
                if ok {
                    self.acked += 1;
                    promises::majority_is_there(self, node, &asked);
                    promises::goes_on(self, node);
                    promises::generation_is_there(self, node, &asked);
                    for i in 0..asked.count {
                        self.history.write_ends(
                            asked.volume,
                            asked.block + i,
                            asked.value_of(i),
                            asked.start,
                            now,
                            hard,
                        );
                    }
                    crate::acks::is_everywhere(self, node, &asked);
                    crate::acks::failure_is_noted(self, node, &asked);
                    match hard {
                        true => check::fua_is_durable(self, node, &asked),
                        false => promises::last_copy_is_durable(self, node, &asked),
                    }
                    if self.nodes[node].requests.len() < READS_BACK
                        && let Some(due) = &mut self.read_back
                    {
                        due.push((node, asked.clone()));
                    }
                } else {
                    self.abandon(&asked, now);
                }
            }
        }
        if let Some(payload) = asked.payload {
            self.release(node, payload.buf);
        }
    }

    /// The node's disk had an error, and it goes on without it. If a flush fails then, its peers may have
    /// lost what was in their caches just as well: semantics.md 13.8 takes a peer of the generation that
    /// applications see for UpToDate, and nobody but the flush that failed could tell them.
    fn has_lost_disk(&mut self, node: usize, volume: u16) -> bool {
        let v = usize::from(volume);
        let holds = self
            .view(node)
            .is_some_and(|view| view.holders[v] & 1 << node != 0);
        self.nodes[node].disks[v].had_errors && !holds && !self.history.several_writers
    }

    /// A node whose own disk is good has no reason to fail a request.
    fn check_error(&mut self, node: usize, asked: &Asked) {
        let volume = usize::from(asked.volume);
        let disk = &self.nodes[node].disks[volume];
        // One that was opened after the request does not answer it.
        let was_there = disk.open && disk.opened_at <= asked.start;
        let forced = self.seen.is_forced_down(node, self.now);
        let failed = disk.had_errors || !was_there || forced;
        // Without quorum a request may have to fail.
        let view = self.view(node).filter(|v| v.quorate);
        let is_whole =
            view.is_some_and(|v| v.holders.get(volume).is_some_and(|h| h & 1 << node != 0));
        if is_whole && !failed && self.config.weather == Weather::ByPlace {
            let text = story::asked(asked);
            self.fail(format!(
                "{} fails a request although its disk is good: {text}",
                name(node)
            ));
        }
    }
}
