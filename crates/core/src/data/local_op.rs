//! What a write asks of the local disk.

use lockstep_format::units::{Sector, VolumeNr};

use crate::event::{DiskOp, Payload, RequestKind};
use crate::resource::Resource;

impl Resource {
    /// The local operation of a write. A discard that may leave old bytes behind is done as a
    /// zero-out, because replicas have to read alike afterwards.
    pub(crate) fn disk_write(
        &self,
        volume: VolumeNr,
        kind: RequestKind,
        sector: Sector,
        size_bytes: u32,
        payload: Option<Payload>,
    ) -> DiskOp {
        match kind {
            RequestKind::Write { fua } => {
                let payload = payload.expect("admission checked that a write has its payload");
                let fua = fua && !planted!(self, FuaIgnored);
                DiskOp::Write {
                    sector,
                    payload,
                    fua,
                }
            }
            RequestKind::Discard => {
                let disk = self.devices.get(&volume).and_then(|d| d.attached());
                let careless = planted!(self, ZeroesAsDiscard);
                if disk.is_some_and(|d| d.info.discard && (d.info.discard_zeroes || careless)) {
                    DiskOp::Discard {
                        sector,
                        len: size_bytes,
                    }
                } else {
                    DiskOp::Zeroes {
                        sector,
                        len: size_bytes,
                        unmap: true,
                    }
                }
            }
            RequestKind::Zeroes { unmap } => DiskOp::Zeroes {
                sector,
                len: match planted!(self, ZeroesShort) {
                    true => size_bytes.div_ceil(2).next_multiple_of(4096),
                    false => size_bytes,
                },
                unmap,
            },
            RequestKind::Read | RequestKind::Flush => unreachable!("only writes come here"),
        }
    }
}
