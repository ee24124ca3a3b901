//! A write goes to every peer, and is one write.

use std::collections::BTreeSet;

use lockstep_format::units::{NodeId, Sector};
use lockstep_format::wire::Packet;

use crate::capture::Seen;

/// Writes of the captured node of which not every peer has a copy.
#[derive(Default)]
pub(crate) struct Copies(Vec<Copy>);

struct Copy {
    block_id: u64,
    sector: Sector,
    kind: u16,
    to: BTreeSet<NodeId>,
}

impl Copies {
    /// This write began before it is in the capture.
    pub(crate) fn begun(&mut self, seen: &Seen) {
        if let Packet::Data(data) = &seen.packet {
            self.0.push(Copy {
                block_id: data.block_id.0,
                sector: data.sector,
                kind: seen.packet.command().to_wire(),
                to: BTreeSet::new(),
            });
        }
    }

    /// Whether this packet is the first of a write.
    pub(crate) fn is_first(&mut self, seen: &Seen, peers: usize) -> bool {
        let (block_id, sector) = match &seen.packet {
            Packet::Data(data) => (data.block_id.0, data.sector),
            Packet::Trim(trim) | Packet::Zeroes(trim) => (trim.block_id.0, trim.sector),
            _ => return true,
        };
        let kind = seen.packet.command().to_wire();
        // A kernel uses its block ids again: a second copy to one peer is another write.
        let known = self.0.iter().position(|copy| {
            (copy.block_id, copy.sector, copy.kind) == (block_id, sector, kind)
                && !copy.to.contains(&seen.to)
        });
        let at = known.unwrap_or_else(|| {
            self.0.retain(|copy| copy.block_id != block_id);
            self.0.push(Copy {
                block_id,
                sector,
                kind,
                to: BTreeSet::new(),
            });
            self.0.len() - 1
        });
        self.0[at].to.insert(seen.to);
        if self.0[at].to.len() == peers {
            self.0.remove(at);
        }
        known.is_none()
    }
}
