//! What a node at rest still holds, for a checker outside: whatever has ended leaves nothing behind.

use alloc::string::String;

use lockstep_format::units::{NodeId, VolumeNr};
use lockstep_format::wire::Role;

use crate::connection::{Connection, LostThere};
use crate::device::{Device, PeerDevice};
use crate::resource::Resource;
use crate::timers::Timer;

impl Resource {
    /// Cluster-wide changes that run here, or wait for their turn or their next try.
    pub fn changes_pending(&self) -> usize {
        self.twopc.pending()
    }

    /// Disk operations that run.
    pub fn disk_operations(&self) -> usize {
        self.tags.timed().count()
    }

    /// The first thing that no node has which is connected, whole, and has nothing to do: in words, or none.
    pub fn leftover(&self) -> Option<String> {
        let whole = [
            ("disk operations", self.tags.timed().count()),
            ("steps", self.steps.len()),
            ("commands", self.waiting.len()),
            ("cluster-wide changes", self.twopc.pending()),
            ("new generations", usize::from(self.new_uuid.is_some())),
            ("requests", self.io.requests.len()),
            ("writes in the log", self.io.log.len()),
            ("held requests", self.io.held.len()),
            ("postponed writes", self.io.postponed.len()),
            ("held completions", self.io.held_completions.len()),
            ("flushes", self.io.flushes.len()),
            ("reads for peers", self.io.serving.len()),
            ("parked writes", self.io.parked),
            ("requests in pieces", self.io.pieces.len()),
            ("peer acks", self.io.peer_ack.last.len()),
        ];
        said("", &whole)
            .or_else(|| self.devices.keys().find_map(|v| self.left_of_volume(*v)))
            .or_else(|| self.connections.keys().find_map(|p| self.left_of_peer(*p)))
    }

    /// The first thing that no such node means to do, or remembers, when it has been so for some seconds.
    pub fn unfinished(&self) -> Option<String> {
        self.still_to_do()
            .or_else(|| {
                let volumes = self.devices.iter();
                let looks = |v: &VolumeNr| self.timers.is_set(Timer::LookAgain(*v));
                let mut volumes = volumes.filter_map(|(v, d)| Some((*v, d.remembers(looks(v))?)));
                let (volume, what) = volumes.next()?;
                Some(alloc::format!("volume {volume}: {what}"))
            })
            .or_else(|| {
                let connections = self.connections.iter();
                let mut connections = connections.filter_map(|(p, c)| Some((*p, c.remembers()?)));
                let (peer, what) = connections.next()?;
                Some(alloc::format!("node {peer}: {what}"))
            })
            .or_else(|| self.between_volume_and_peer())
    }

    /// What this node means to do as soon as something happens, and a timer that nothing will stop.
    fn still_to_do(&self) -> Option<String> {
        let is_right = |timer: &Timer| match timer {
            // These look, find nothing and end by themselves.
            Timer::RequestAge(_)
            | Timer::Follower(_)
            | Timer::DiskTimeout(_)
            | Timer::Ping(_)
            | Timer::LookAgain(_)
            | Timer::BitmapWrite(_)
            | Timer::LeftMarks(_) => true,
            _ => false,
        };
        let mut timers = self.timers.running().filter(|timer| !is_right(timer));
        if let Some(timer) = timers.next() {
            return Some(alloc::format!("the timer {timer:?}"));
        }
        let pending_without_role = self.devices.values().any(|d| d.new_uuid_pending);
        let flags = [
            ("outputs that nobody took", !self.outputs.is_empty()),
            (
                "a Primary that is out of reach",
                !self.far_primaries.is_empty(),
            ),
            (
                "somebody who waits for a new generation",
                self.new_uuid_wanted,
            ),
            (
                "a new generation that is due without a Primary",
                pending_without_role && self.state.role == Role::Secondary,
            ),
            ("owners to wake", !self.io.wakes.is_empty()),
            ("a look for barriers to do", self.io.barriers_due),
            ("a look for parked writes to do", self.io.parked_due),
            (
                "requests of a change for 8.4",
                !self.twopc.legacy.is_empty(),
            ),
        ];
        is_set(&flags).map(String::from)
    }

    fn between_volume_and_peer(&self) -> Option<String> {
        let pairs = self.devices.iter().flat_map(|(volume, device)| {
            let peers = device.peers.iter();
            peers.map(move |(peer, p)| (*volume, *peer, p))
        });
        let mut found = pairs.filter_map(|(volume, peer, p)| {
            let what = p.remembers()?;
            Some(alloc::format!("volume {volume}, node {peer}: {what}"))
        });
        found.next()
    }

    fn left_of_volume(&self, volume: VolumeNr) -> Option<String> {
        let device = self.devices.get(&volume)?;
        let paths = device
            .io
            .read_paths
            .values()
            .chain([&device.io.local_reads]);
        let counts = [
            ("ranges", device.io.ranges.len()),
            ("acks that wait for metadata", device.io.gated_acks.len()),
            ("requests", device.io.upper_pending as usize),
            ("disk operations", device.io.lower_pending as usize),
            (
                "paths with reads",
                paths.filter(|path| !path.is_idle()).count(),
            ),
        ];
        let of_disk = || {
            let io = &device.attached()?.io;
            let counts = [
                ("used extents", io.al.referenced()),
                (
                    "writes that wait for extents",
                    usize::from(io.al.has_waiters()),
                ),
                ("log transactions", usize::from(!io.al.is_settled())),
            ];
            said(&alloc::format!("volume {volume}: "), &counts)
        };
        said(&alloc::format!("volume {volume}: "), &counts).or_else(of_disk)
    }

    fn left_of_peer(&self, peer: NodeId) -> Option<String> {
        let io = &self.connections.get(&peer)?.io;
        let counts = [
            ("unsettled writes", io.sent.len()),
            ("barriers without an answer", io.unacked.len()),
            ("received writes without a peer ack", io.writes.len()),
            ("epochs", io.epochs.len().saturating_sub(1)),
            ("flushes of epochs", usize::from(io.flushing.is_some())),
            ("questions", io.flush_requests.len()),
            ("sectors in flight", io.ap_in_flight_sectors as usize),
            ("packets behind a conflict", io.conflicts.held()),
        ];
        let of_volume = |(volume, device): (&VolumeNr, &crate::device::Device)| {
            let io = &device.peers.get(&peer)?.io;
            let counts = [
                ("resync requests of the peer", io.source.len()),
                ("resync requests by sector", io.source_by_sector.len()),
                ("held resync requests", io.source_pace.held.len()),
                ("resyncs", usize::from(io.target.is_some())),
                ("blocks of a verify", io.verify.blocks()),
                ("owed blocks", io.owed_blocks as usize),
            ];
            said(&alloc::format!("volume {volume}, node {peer}: "), &counts)
        };
        said(&alloc::format!("node {peer}: "), &counts)
            .or_else(|| self.devices.iter().find_map(of_volume))
    }
}

impl Connection {
    /// What is only there while something is under way with the peer.
    fn remembers(&self) -> Option<&'static str> {
        let flags = [
            ("an attempt to connect", self.connecting),
            ("a link that drains", self.draining || self.io.draining),
            (
                "commands that wait for its end",
                !self.waiting_down.is_empty(),
            ),
            ("a lost Primary to tell of", self.notify_lost_primary),
            ("attempts of a change", self.attempts > 0),
            ("a wish to lose its data", self.discard_my_data),
            ("a lost split brain", self.lost_split_brain),
            ("a tentative connect", self.tentative),
            (
                "resync data in flight",
                self.io.resync_in_flight_sectors > 0,
            ),
            (
                "writes that are not settled",
                self.io.sent_count != self.io.settled_count,
            ),
            ("marks instead of writes", self.io.was_ahead),
        ];
        is_set(&flags).or_else(|| {
            let link = self.link.as_ref()?;
            let flags = [
                ("a ping to answer", link.ping_unanswered),
                (
                    "resyncs that end after pings",
                    !link.ends_after_pings.is_empty(),
                ),
                (
                    "a suspicion that it lost the link",
                    link.lost_there != LostThere::No,
                ),
                ("a doubt about it", link.doubt.is_open()),
                ("volumes that are not here", !link.not_here.is_empty()),
            ];
            is_set(&flags)
        })
    }
}

impl Device {
    /// What is only there while a generation, the disk or the size changes.
    fn remembers(&self, looks_again: bool) -> Option<&'static str> {
        let flags = [
            ("a generation that was not made", self.unmade.is_some()),
            ("data that only a lost disk has", self.kept_alone.is_some()),
            // The next look forgets them.
            (
                "comparisons to repeat",
                self.looked_again > 0 && !looks_again,
            ),
            (
                "a generation that watchers do not know",
                self.told_uuid != self.current_uuid(),
            ),
        ];
        is_set(&flags).or_else(|| {
            let disk = self.attached()?;
            let writer = &disk.writer;
            let flags = [
                ("a detach", disk.leaving.is_some()),
                ("a resize", disk.resize.is_some()),
                ("metadata to write", writer.durable != writer.changed),
                ("a write of metadata", writer.in_flight.is_some()),
                ("a hold of metadata", writer.hold || writer.unmarked > 0),
                (
                    "somebody who waits for metadata",
                    !writer.waiting.is_empty(),
                ),
            ];
            is_set(&flags).or_else(|| disk.io.busy_with())
        })
    }
}

impl PeerDevice {
    /// What is only there while the two are compared, or one is copied to the other.
    fn remembers(&self) -> Option<&'static str> {
        let flags = [
            ("a refusal", self.refusal.is_some()),
            ("a comparison that waits", self.consider_resync),
            ("a pause to tell of", self.pause_untold),
            ("a reconciliation", self.reconcile != Default::default()),
            (
                "a resync that ended before it began",
                self.finished_early.is_some() || self.source_is_late,
            ),
            (
                "a generation of a resync to come",
                self.early_sync_uuid.is_some(),
            ),
            ("a handler that is asked", self.resync_gate.is_some()),
            ("an agreement on a resync", self.resync_agreed),
            ("a volume that was presented", self.presented.is_some()),
            ("a target", self.peer_was_target),
            (
                "blocks that were called in sync in an exchange",
                !self.io.acked_in_exchange.is_empty(),
            ),
            ("a bitmap of the peer", self.io.bitmap_received),
            ("flags of the next generations", !self.uuid_flags.is_empty()),
            ("resync data in flight", self.io.rs_in_flight_sectors() > 0),
        ];
        is_set(&flags)
    }
}

/// The first of these that is so.
fn is_set(flags: &[(&'static str, bool)]) -> Option<&'static str> {
    let mut set = flags.iter().filter(|(_, is_set)| *is_set);
    set.next().map(|(what, _)| *what)
}

fn said(of: &str, counts: &[(&str, usize)]) -> Option<String> {
    let (what, count) = counts.iter().find(|(_, count)| *count > 0)?;
    Some(alloc::format!("{of}{count} {what}"))
}
