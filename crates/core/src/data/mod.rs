//! The data path: placeholder of its border until the real one lands.
#![allow(dead_code, missing_docs, unused_variables)]
use crate::bitmap::Bitmap;
use crate::event::{DiskError, Payload, Request, Stream};
use crate::resource::Resource;
use alloc::vec::Vec;
use lockstep_format::disk::bitmap::BitmapShape;
use lockstep_format::disk::layout::AlGeometry;
use lockstep_format::units::{Dagtag, NodeId, VolumeNr};
use lockstep_format::wire::Packet;
#[derive(Clone, Copy, Debug)]
pub struct DiskIoGeometry {
    pub al_offset_bytes: u64,
    pub al: AlGeometry,
    pub bitmap_offset_bytes: u64,
    pub bitmap: BitmapShape,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapThen {
    Nothing,
    Detach,
    Prepared(NodeId),
    FullSync(NodeId),
}
#[derive(Debug)]
pub struct DiskIo {
    pub bitmap: Bitmap,
    pub bitmap_writes: u64,
}
impl DiskIo {
    pub fn new(g: DiskIoGeometry, a: u32, b: bool, c: bool) -> Self {
        DiskIo {
            bitmap: Bitmap::new(g.bitmap),
            bitmap_writes: 0,
        }
    }
    pub fn set_slot(&mut self, node: NodeId, slot: Option<u8>) {}
    pub fn slot(&self, node: NodeId) -> Option<u8> {
        None
    }
    pub fn is_idle(&self) -> bool {
        true
    }
    pub fn transactions(&self) -> u64 {
        0
    }
    pub fn al_suspended(&self) -> bool {
        false
    }
}
#[derive(Debug)]
pub(crate) enum DataOp {
    None,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    Data,
    Meta,
}
#[derive(Debug, Default)]
pub struct ResourceIo {
    pub(crate) dagtag: Dagtag,
}
#[derive(Debug, Default)]
pub struct DeviceIo {
    pub read_sectors: u64,
    pub written_sectors: u64,
    pub upper_pending: u64,
    pub lower_pending: u64,
}
#[derive(Debug, Default)]
pub struct ConnIo {
    pub ap_in_flight_sectors: u64,
}
#[derive(Debug, Default)]
pub struct PeerIo {
    pub received_sectors: u64,
    pub sent_sectors: u64,
    pub resync_total_bits: u64,
    pub resync_failed_bits: u64,
    pub resync_started: crate::time::Instant,
}
impl PeerIo {
    pub fn rs_in_flight_sectors(&self) -> u64 {
        0
    }
    pub fn resync_rate_kib_s(&self, now: crate::time::Instant) -> u32 {
        0
    }
}
impl Resource {
    pub(crate) fn front_request(&mut self, request: Request) {}
    pub(crate) fn data_done(&mut self, op: DataOp, result: Result<Option<Payload>, DiskError>) {}
    pub(crate) fn data_meta_done(&mut self, op: DataOp, result: Result<Vec<u8>, DiskError>) {}
    pub(crate) fn data_sent(&mut self, op: DataOp) {}
    pub(crate) fn data_digest(&mut self, op: DataOp, d: Vec<u8>) {}
    pub(crate) fn settle_data(&mut self) {}
    pub(crate) fn data_packet(
        &mut self,
        peer: NodeId,
        s: Stream,
        v: VolumeNr,
        p: Packet,
        q: Option<Payload>,
    ) {
    }
    pub(crate) fn close_epoch(&mut self) {}
    pub(crate) fn replication_started(&mut self, peer: NodeId) {}
    pub(crate) fn queue_peer_ack(&mut self) {}
    pub(crate) fn flush_peer_ack(&mut self) {}
    pub(crate) fn peer_ack_timer(&mut self) {}
    pub(crate) fn thawed(&mut self) {}
    pub(crate) fn resync_left(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn resync_entered(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn resync_resumed(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn send_bitmap(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn await_bitmap(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn write_bitmap(&mut self, v: VolumeNr, t: BitmapThen) {}
    pub(crate) fn write_all_bitmaps(&mut self) {}
    pub(crate) fn bitmap_write_timer(&mut self, v: VolumeNr) {}
    pub(crate) fn resync_step_timer(&mut self, v: VolumeNr, p: NodeId) {}
    pub(crate) fn resync_flush_timer(&mut self, v: VolumeNr) {}
    pub(crate) fn request_age_timer(&mut self, p: NodeId) {}
    pub(crate) fn drain_connection(&mut self, p: NodeId) {
        self.connection_drained(p);
    }
    pub(crate) fn lose_requests(&mut self, p: NodeId) {}
    pub(crate) fn connection_established(&mut self, p: NodeId) {}
    pub(crate) fn unsettled_requests(&self, p: NodeId) -> bool {
        false
    }
    pub(crate) fn admission_changed(&mut self) {}
    pub(crate) fn acks_ungated(&mut self, v: VolumeNr) {}
    pub(crate) fn peer_writes_in_flight(&self, v: VolumeNr) -> bool {
        false
    }
    pub(crate) fn local_requests_open(&self, v: VolumeNr) -> bool {
        false
    }
    pub(crate) fn data_disk_gone(&mut self, v: VolumeNr) {}
    pub(crate) fn io_is_quiet(&self) -> bool {
        true
    }
    pub(crate) fn pending_towards(&self, v: VolumeNr, p: NodeId) -> u64 {
        0
    }
    pub(crate) fn unacked_of(&self, v: VolumeNr, p: NodeId) -> u64 {
        0
    }
}
