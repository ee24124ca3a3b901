//! A volume: its disk, its metadata, and what is remembered of each peer's.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Uuid, VolumeNr};
use lockstep_format::wire::{ReplState, UuidFlags};

use crate::command::MetaIndex;
use crate::data::{DeviceIo, DiskIo, PeerIo};
use crate::event::{CommandId, DiskInfo};
use crate::few::Few;
use crate::generation::Generations;
use crate::options::{DiskOptions, PeerDeviceOptions};
use crate::time::Instant;
use crate::uuids::PeerUuids;

/// Given-up generations of a Primary that are remembered.
const ANNOUNCED_COUNT: usize = 16;

/// A volume of a resource.
#[derive(Debug)]
pub struct Device {
    /// Its number.
    pub volume: VolumeNr,
    /// Its minor, for reports.
    pub minor: u32,
    /// It is meant to have no disk on this node.
    pub intentional_diskless: bool,
    /// Usable size in sectors as agreed with the peers; 0 if not known.
    pub size_sectors: u64,
    /// Its disk, from the start of an attach to the end of a detach.
    pub disk: Option<LocalDisk>,
    /// Generation of the data that this node has shown to applications; what a diskless node has
    /// instead of a current UUID.
    pub exposed_uuid: Uuid,
    /// What it was when a write failed for the last time that a lost peer may have.
    pub(crate) gave_up_at: Uuid,
    /// Generation that watchers know.
    pub told_uuid: Uuid,
    /// Generations that this node announced while it had no disk and that were not confirmed. Its
    /// own disk has to know them when it comes back: somebody may go by one of them although no
    /// write was made in it.
    pub announced: Vec<Uuid>,
    /// The UUID set before a generation whose superblock was not written when the disk went, and that
    /// generation: nothing was written under it, but the disk may come back with it.
    pub unmade: Option<(Generations, Uuid)>,
    /// Generations before the one that the last disk had when it went: who is still at one of them
    /// has older data than this node has shown.
    pub left_behind: Vec<Uuid>,
    /// The last disk's generation, where that disk alone has what applications were told is written,
    /// and the one that was exposed since then instead, which no peer knows.
    pub kept_alone: Option<(Uuid, Uuid)>,
    /// Connected peers that have everything that applications hold for written, while another one lost some of it.
    pub(crate) keeps_all: NodeMask,
    /// A new current UUID is due (semantics.md, 12.4).
    pub new_uuid_pending: bool,
    /// It became Primary: what it writes gets a generation of its own in any case, because the
    /// current one may be one that another Primary planned and gave up.
    pub new_uuid_forced: bool,
    /// Writes were not settled everywhere when it became due: a flush does not end before it either.
    pub new_uuid_for_flush: bool,
    /// The pending one is only for a peer that heard late of the present one.
    pub new_uuid_for_late: bool,
    /// How often an unequal peer was compared with again.
    pub looked_again: u32,
    /// Why the last disk was given up, until one is attached again.
    pub lost_disk: Option<LostDisk>,
    /// Openers for reading and for writing.
    pub openers: Openers,
    /// The volume towards each peer; one entry for every connection.
    pub peers: Few<NodeId, PeerDevice>,
    /// A change of the size that is under way or was made.
    pub(crate) growth: crate::resize::Growth,
    /// The data path's part.
    pub io: DeviceIo,
}

/// Why a disk was given up without a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostDisk {
    /// Data could not be read or written.
    Data,
    /// Metadata could not be read or written, or a flush failed.
    Meta,
    /// It did not answer within `disk-timeout`.
    Timeout,
}

/// How many front ends have a volume open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Openers {
    /// For reading only.
    pub readers: u32,
    /// For writing.
    pub writers: u32,
}

impl Openers {
    /// Somebody has it open.
    pub fn any(&self) -> bool {
        self.readers + self.writers > 0
    }
}

/// A volume's disk with its metadata in memory.
#[derive(Debug)]
pub struct LocalDisk {
    /// Path of the data device, for messages.
    pub data_path: String,
    /// Path of the metadata device, for messages.
    pub meta_path: Option<String>,
    /// Where the metadata lies.
    pub index: MetaIndex,
    /// Options.
    pub options: DiskOptions,
    /// What the driver found.
    pub info: DiskInfo,
    /// Progress of the attach or detach.
    pub phase: DiskPhase,
    /// Format of the metadata on disk. In memory they are v09 in any case.
    pub format: lockstep_format::disk::any::Format,
    /// The superblock as read, with everything that is not in `generations`.
    pub superblock: Option<lockstep_format::disk::v09::SuperBlock>,
    /// Where the areas lie.
    pub layout: Option<lockstep_format::disk::layout::Layout>,
    /// UUIDs, slots and flags: the live copy.
    pub generations: Generations,
    /// The node was a Primary that went down without a graceful end (flag `CRASHED_PRIMARY`).
    pub crashed_primary: bool,
    /// The peers that have not met this disk since it holds what a crashed Primary has completed.
    pub(crate) crashed_for: NodeMask,
    /// The peers that it was connected with when this node crashed, and has not met since.
    pub(crate) crashed_with: NodeMask,
    /// It was a Primary that lost quorum (flag `PRIMARY_LOST_QUORUM`).
    pub primary_lost_quorum: bool,
    /// A last man standing keeps its quorum over a restart (semantics.md, 8.3).
    pub restore_quorum: bool,
    /// It is Outdated only because the data of a generation were used or announced that it does not know.
    pub missed_exposed: bool,
    /// Peers that were away while there was a Primary, as the metadata said at the attach: what
    /// `degr-wfc-timeout` is for.
    pub degraded: lockstep_format::units::NodeMask,
    /// How far a detach has come.
    pub leaving: Option<crate::attach::Leaving>,
    /// `detach --force`: it goes, whatever it still does.
    pub(crate) forced: bool,
    /// The driver was told to give its operations up.
    pub(crate) abandoned: bool,
    /// An operation that was found too old once.
    pub(crate) suspect: Option<(crate::event::Tag, crate::time::Instant)>,
    /// A change of size or place of the metadata that is under way.
    pub(crate) resize: Option<crate::resize_local::LocalResize>,
    /// Superblock writes in flight and waiting.
    pub writer: MetaWriter,
    /// Activity log and bitmap.
    pub io: DiskIo,
}

/// Where an attach or detach stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskPhase {
    /// The driver opens it.
    Opening {
        /// Who waits for the attach.
        command: CommandId,
    },
    /// Superblock, activity log and bitmap are read.
    Reading {
        /// Who waits for the attach.
        command: CommandId,
        /// What is still on its way.
        step: crate::attach::ReadStep,
    },
    /// Usable, as far as the disk state says.
    Attached {
        /// Who waits for the end of the negotiation.
        command: Option<CommandId>,
    },
    /// The driver closes it.
    Closing {
        /// Who waits for the detach.
        command: Option<CommandId>,
    },
}

/// Writes the superblock: one write in flight, later changes go with the next one.
#[derive(Debug, Default)]
pub struct MetaWriter {
    /// Counts changes; a write carries the count at its start.
    pub changed: u64,
    /// The count of the write in flight.
    pub in_flight: Option<u64>,
    /// The count that is durable.
    pub durable: u64,
    /// No write starts: something else has to be durable first.
    pub hold: bool,
    /// So many writes of the bitmap have to be durable before the disk is called Inconsistent.
    pub unmarked: u32,
    /// The next write flushes the data first: this disk's copy became the only good one.
    pub flush_data: bool,
    /// The superblock on the disk names the size that the bitmap and the activity log are of.
    pub size_named: bool,
    /// The superblock in flight does.
    pub size_in_flight: bool,
    /// The activity log waits for that: without a size nothing is read from it after a crash.
    pub size_awaited: bool,
    /// What waits for a count to be durable, in ascending order.
    pub waiting: VecDeque<(u64, AfterMeta)>,
}

/// What happens once the superblock is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AfterMeta {
    /// A new current UUID is durable on this volume; requests that wait for it go on.
    NewUuid,
    /// A generation that followers will be told is noted: if it is given up, it is an ancestor.
    PlannedUuid,
    /// The generation of a forced promotion is durable.
    ForcedUuid,
    /// A followed generation is durable; everybody is told.
    SpreadUuids,
    /// An attach goes on: the superblock does not call the log clean any more.
    Attached,
    /// A command of this volume is answered with success.
    Answer(CommandId),
    /// The same, and the generation that it made counts from now on.
    NamedByCommand(CommandId, Uuid),
    /// The disk is known to be Inconsistent: resync data of this peer may be written.
    ResyncStart(NodeId),
    /// The disk is known to be as good as this peer's: the resync ends.
    ResyncEnd(NodeId),
    /// Full sync with this peer is marked on disk; the bits may follow.
    FullSync(NodeId),
    /// The UUID of a resync towards this 8.4 peer is durable; the peer may know it.
    SyncUuid(NodeId, Uuid),
    /// What this disk has counted for is noted: this Primary waits for it.
    Voted(NodeId, Uuid),
    /// A new size, or the metadata's new place, is durable.
    Resized,
}

impl AfterMeta {
    /// The command that it answers.
    pub(crate) fn command(&self) -> Option<CommandId> {
        match self {
            AfterMeta::Answer(id) | AfterMeta::NamedByCommand(id, _) => Some(*id),
            AfterMeta::NewUuid
            | AfterMeta::PlannedUuid
            | AfterMeta::ForcedUuid
            | AfterMeta::SpreadUuids
            | AfterMeta::Attached
            | AfterMeta::ResyncStart(_)
            | AfterMeta::ResyncEnd(_)
            | AfterMeta::FullSync(_)
            | AfterMeta::SyncUuid(..)
            | AfterMeta::Voted(..)
            | AfterMeta::Resized => None,
        }
    }
}

/// A volume towards a peer.
#[derive(Debug)]
pub struct PeerDevice {
    /// Options.
    pub options: PeerDeviceOptions,
    /// The peer's UUIDs as last reported; none before the first report on this link.
    pub uuids: Option<PeerUuids>,
    /// The current UUID last known of a diskless or vanished peer.
    pub current_uuid: Uuid,
    /// The generation of this Primary that it has noted last (`vote.rs`).
    pub voted: Uuid,
    /// What it is told with a followed generation as soon as that is durable.
    pub spread_flags: UuidFlags,
    /// What the peer said of its size and limits.
    pub sizes: Option<PeerSizes>,
    /// Smallest unit of a request that its disk takes, in bytes, as it said last: it may come back.
    pub logical_block_bytes: u32,
    /// When they came.
    pub sizes_at: Instant,
    /// The peer's last state word, in 9.x numbering.
    pub last_state: Option<lockstep_format::wire::PeerState>,
    /// The verdict of the handshake in progress; applied at the commit.
    pub verdict: Option<ConnectVerdict>,
    /// Why there will be no connection, known before the verdict.
    pub refusal: Option<crate::validity::Refusal>,
    /// This node's UUIDs as last sent on this link.
    pub sent_uuids: Option<PeerUuids>,
    /// The peer's last state word said that it was sync target.
    pub peer_was_target: bool,
    /// The peer has quorum.
    pub quorate: bool,
    /// It connected with a disk that was not UpToDate, and that has not become so.
    pub joined_behind: bool,
    /// This node sent its part of the handshake on this link.
    pub sent_handshake: bool,
    /// This node asked the peer on this connection for marks instead of writes while it is
    /// copied to.
    pub asked_marks: bool,
    /// The peer wants writes when this node begins to copy to it (`P_ENABLE_REPLICATION_NEXT`).
    pub replicates_to_target: bool,
    /// It wants them when it becomes Inconsistent otherwise: as above, until it has asked for them
    /// once (`P_ENABLE_REPLICATION`).
    pub replicates_now: bool,
    /// It has asked for writes while this node, its source, was still in the exchange of bitmaps.
    pub replicates_early: bool,
    /// A kernel that this node took for a further source of a full sync without a word to it.
    pub unasked: Option<crate::unasked::Unasked>,
    /// This node's disk state as sent with it: the comparison goes by what both know.
    pub sent_disk: lockstep_format::wire::DiskState,
    /// Size in sectors that the peer was told last.
    pub(crate) sent_sectors: u64,
    /// What was said of a volume that was added to this connection.
    pub presented: Option<crate::added::Presented>,
    /// Result of the attach handshake with this peer; none while it is negotiating.
    pub negotiation: Option<Option<ReplState>>,
    /// Flags that go with the next UUIDs.
    pub uuid_flags: UuidFlags,
    /// The next state packet of the peer runs a comparison (semantics.md, 9.6).
    pub consider_resync: bool,
    /// The connection was up since this node started (UUID flag RECONNECT).
    pub reconnect: bool,
    /// Its disk was UpToDate when the connection broke.
    pub(crate) left_whole: bool,
    /// What its disk may have lost with its power.
    pub(crate) cache: crate::lost_cache::PeerCache,
    /// A running resync has a source that is not stable (semantics.md, 14.2).
    pub unstable_resync: bool,
    /// The peer, a target of this node, may have ended its resync without a word of that here yet.
    pub target_may_end: bool,
    /// What this disk was called when it was copied from the peer last.
    pub(crate) ended_at: Uuid,
    /// The last thing that happened between the two is a resync, to its end.
    pub was_copied: bool,
    /// This node has pulled ahead, and the peer has not said yet that it is Behind.
    pub behind_unheard: bool,
    /// It has refused writes of this node, which went on without it and knew it as UpToDate.
    pub refuses: bool,
    /// It was copied from here since the connection was made, and has begun no verify since.
    pub served: bool,
    /// Who pauses the resync has changed since it was about to start, when an 8.4 is told nothing.
    pub pause_untold: bool,
    /// Comparisons that hit a running resync.
    pub resync_again: u32,
    /// The superblock says Inconsistent: requests may be made.
    pub resync_ready: bool,
    /// Nodes that the source of the resync that ends knows to be behind.
    pub behind: lockstep_format::units::NodeMask,
    /// `rs_start_uuid` of a running resync as target (semantics.md, 12.10).
    pub resync_start_uuid: Uuid,
    /// The peer, which this disk is being copied from, has written nothing since this older generation, as far as is
    /// known; else zero (`unwritten.rs`).
    pub(crate) copied_since: Uuid,
    /// Old generation in this peer's slot, until it reports the new one.
    pub provisional: Option<Uuid>,
    /// A reconciliation resync runs or is owed (semantics.md, 18.5).
    pub reconcile: Reconcile,
    /// The peer ended its resync while this node's was not yet started.
    pub finished_early: Option<lockstep_format::wire::DiskState>,
    /// This node's resync has ended, and its source was not seen to begin it.
    pub source_is_late: bool,
    /// UUID of a resync from an 8.4 source that came before this node was ready for it.
    pub early_sync_uuid: Option<Uuid>,
    /// An 8.4 target has not been told yet what the resync is called.
    pub sync_uuid_due: bool,
    /// Its slot was empty before a crash: what is marked is what the activity log covered then.
    pub marks_of_log: bool,
    /// A handler is asked whether a resync may start.
    pub(crate) resync_gate: Option<(crate::before_resync::ResyncGate, crate::event::Tag)>,
    /// It agreed before this node answered the source's bitmap.
    pub(crate) resync_agreed: bool,
    /// The log says that this node waits for another one instead of being this peer's target.
    pub(crate) wait_told: bool,
    /// The data path's part.
    pub io: PeerIo,
}

/// Where the reconciliation after the loss of a Primary stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reconcile {
    /// Nothing is owed.
    #[default]
    No,
    /// The peer's dagtag is awaited.
    Pending {
        /// The lost Primary.
        lost: NodeId,
    },
    /// The resync runs.
    Running {
        /// The lost Primary.
        lost: NodeId,
        /// The dagtag that both reach.
        dagtag: Dagtag,
    },
}

/// What the handshake decided for a volume; applied when the connect commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectVerdict {
    /// Replication state.
    pub repl: ReplState,
    /// The peer's role.
    pub peer_role: lockstep_format::wire::Role,
    /// The peer's disk.
    pub peer_disk: lockstep_format::wire::DiskState,
    /// The peer pauses resync.
    pub susp_peer: bool,
    /// This node's disk, if the handshake changes it.
    pub own_disk: Option<lockstep_format::wire::DiskState>,
    /// What to do with the bitmap before the exchange.
    pub strategy: Option<crate::compare::Strategy>,
    /// The resync reconciles survivors of a lost Primary.
    pub reconciliation: bool,
    /// This node's slot for the peer is outdated knowledge.
    pub clear_own_slot: bool,
    /// Why there will be no connection.
    pub refusal: Option<crate::validity::Refusal>,
}

/// `P_SIZES` of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerSizes {
    /// Backing disk in sectors.
    pub disk_sectors: u64,
    /// Size that its configuration wants, 0 for none.
    pub wanted_sectors: u64,
    /// Its current size in sectors.
    pub current_sectors: u64,
    /// Largest request in bytes.
    pub max_bio_bytes: u32,
    /// Bitmap block shift, 12 for 4 KiB.
    pub bitmap_block_shift: u8,
}

impl PeerSizes {
    /// Neither its disk nor its configuration is in the way of a volume of so many sectors.
    pub const fn has_room(&self, sectors: u64) -> bool {
        let least = match (self.disk_sectors, self.wanted_sectors) {
            (0, 0) => return true,
            (0, known) | (known, 0) => known,
            (disk, wanted) if disk < wanted => disk,
            (_, wanted) => wanted,
        };
        least >= sectors
    }

    /// Its bitmap block in sectors.
    pub const fn bitmap_block_sectors(&self) -> u64 {
        match self.bitmap_block_shift {
            shift @ 12..=20 => 1 << (shift - 9),
            _ => 8,
        }
    }
}

impl PeerDevice {
    /// A volume towards a peer that was never heard of.
    pub fn new(options: PeerDeviceOptions) -> Self {
        PeerDevice {
            options,
            uuids: None,
            current_uuid: Uuid::ZERO,
            voted: Uuid::ZERO,
            spread_flags: UuidFlags::empty(),
            sizes: None,
            logical_block_bytes: 512,
            sizes_at: Instant(0),
            last_state: None,
            verdict: None,
            refusal: None,
            sent_uuids: None,
            peer_was_target: false,
            quorate: false,
            joined_behind: false,
            sent_handshake: false,
            asked_marks: false,
            replicates_to_target: true,
            replicates_now: true,
            replicates_early: false,
            unasked: None,
            sent_disk: lockstep_format::wire::DiskState::Diskless,
            sent_sectors: 0,
            presented: None,
            negotiation: None,
            uuid_flags: UuidFlags::empty(),
            consider_resync: false,
            reconnect: false,
            unstable_resync: false,
            target_may_end: false,
            ended_at: Uuid::ZERO,
            was_copied: false,
            refuses: false,
            behind_unheard: false,
            served: false,
            pause_untold: false,
            resync_again: 0,
            left_whole: false,
            cache: crate::lost_cache::PeerCache::Safe,
            resync_ready: false,
            behind: lockstep_format::units::NodeMask::EMPTY,
            resync_start_uuid: Uuid::ZERO,
            copied_since: Uuid::ZERO,
            provisional: None,
            reconcile: Reconcile::No,
            finished_early: None,
            source_is_late: false,
            early_sync_uuid: None,
            sync_uuid_due: false,
            marks_of_log: false,
            resync_gate: None,
            resync_agreed: false,
            wait_told: false,
            io: PeerIo::default(),
        }
    }

    /// Nothing of a former link counts on the next one.
    pub(crate) fn link_is_gone(&mut self) {
        self.spread_flags = UuidFlags::empty();
        self.verdict = None;
        self.refusal = None;
        self.sent_uuids = None;
        self.peer_was_target = false;
        self.quorate = false;
        self.sent_handshake = false;
        self.asked_marks = false;
        self.replicates_to_target = true;
        self.replicates_now = true;
        self.presented = None;
        self.negotiation = None;
        self.finished_early = None;
        self.source_is_late = false;
        self.early_sync_uuid = None;
        self.sync_uuid_due = false;
        self.resync_gate = None;
        self.resync_agreed = false;
        self.resync_again = 0;
        self.sizes = None;
        self.last_state = None;
        self.behind_unheard = false;
        self.voted = Uuid::ZERO;
    }
}

impl Device {
    /// A new current UUID is due, while writes are not settled everywhere or not.
    pub(crate) fn uuid_is_due(&mut self, forced: bool, unsettled: bool) {
        // What a former Primary has in its cache is durable when it has noted the generation of the next one.
        let waits = unsettled || forced;
        self.new_uuid_for_flush = waits || self.new_uuid_pending && self.new_uuid_for_flush;
        self.new_uuid_pending = true;
        self.new_uuid_forced |= forced;
    }

    /// A diskless volume.
    pub fn new(volume: VolumeNr, minor: u32, intentional_diskless: bool) -> Self {
        Device {
            volume,
            minor,
            intentional_diskless,
            size_sectors: 0,
            disk: None,
            exposed_uuid: Uuid::ZERO,
            gave_up_at: Uuid::ZERO,
            told_uuid: Uuid::ZERO,
            left_behind: Vec::new(),
            kept_alone: None,
            keeps_all: NodeMask::EMPTY,
            announced: Vec::new(),
            unmade: None,
            new_uuid_pending: false,
            new_uuid_for_flush: false,
            new_uuid_forced: false,
            new_uuid_for_late: false,
            looked_again: 0,
            lost_disk: None,
            openers: Openers::default(),
            peers: Few::new(),
            growth: crate::resize::Growth::default(),
            io: DeviceIo::default(),
        }
    }

    /// The disk if its metadata are in memory.
    pub fn attached(&self) -> Option<&LocalDisk> {
        self.disk
            .as_ref()
            .filter(|d| matches!(d.phase, DiskPhase::Attached { .. }))
    }

    /// The disk if its metadata are in memory.
    pub fn attached_mut(&mut self) -> Option<&mut LocalDisk> {
        self.disk
            .as_mut()
            .filter(|d| matches!(d.phase, DiskPhase::Attached { .. }))
    }

    /// Smallest unit of a request that this disk takes, and those of the peers: the disk of one that got a
    /// smaller one would fail.
    pub fn logical_block_bytes(&self) -> u32 {
        let own = self.attached().map_or(512, |d| d.info.logical_block_bytes);
        let peers = self.peers.values().map(|pd| pd.logical_block_bytes);
        peers.fold(own, u32::max)
    }

    /// Generation of this node's data: of the disk, or what it has exposed.
    pub fn current_uuid(&self) -> Uuid {
        match self.attached() {
            Some(disk) => disk.generations.current,
            None => self.exposed_uuid,
        }
    }

    /// The disk of a Primary goes: a peer may have taken what was announced with it, and its answer is on the way.
    pub(crate) fn keep_announced(&mut self) {
        let Some(disk) = self.attached() else {
            return;
        };
        let given_up: Vec<Uuid> = disk.generations.announced_since().collect();
        self.remember_announced(given_up.into_iter().rev().map(Uuid::without_primary_bit));
    }

    pub(crate) fn remember_announced(&mut self, uuids: impl IntoIterator<Item = Uuid>) {
        for uuid in uuids {
            if !self.announced.contains(&uuid) {
                self.announced.push(uuid);
            }
        }
        let most = self.announced.len().saturating_sub(ANNOUNCED_COUNT);
        self.announced.drain(..most);
    }
}
