//! What a node at rest still holds, for a checker outside: whatever has ended leaves nothing behind.

use alloc::string::String;

use lockstep_format::units::{NodeId, VolumeNr};

use crate::resource::Resource;

impl Resource {
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

fn said(of: &str, counts: &[(&str, usize)]) -> Option<String> {
    let (what, count) = counts.iter().find(|(_, count)| *count > 0)?;
    Some(alloc::format!("{of}{count} {what}"))
}
