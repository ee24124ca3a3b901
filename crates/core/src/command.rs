//! What an operator can ask of a resource, and the answers.
//!
//! Return codes are DRBD's (semantics.md, 2.4 and 6.1), because tools print them.

use alloc::string::String;

use lockstep_format::units::{NodeId, VolumeNr};

use crate::options::{DiskOptions, NetOptions, PeerDeviceOptions, ResourceOptions};
use crate::resync_order::OrderVerdict;

/// Where a volume's metadata lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetaIndex {
    /// At the end of the data device.
    Internal,
    /// `flexible-meta-disk`: a device of its own, from byte 0.
    FlexExternal,
    /// `meta-disk … [index]`: one of several 128 MiB areas of a device.
    Indexed(u8),
}

/// A command. Every command gets exactly one `Output::Answer`; some only after a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `new-peer`: adds a connection object in StandAlone.
    NewPeer {
        /// The peer's node id.
        peer: NodeId,
        /// Its options.
        net: NetOptions,
    },
    /// `del-peer`: removes a connection object; it must be StandAlone.
    DelPeer {
        /// The peer.
        peer: NodeId,
    },
    /// `net-options`.
    NetOptions {
        /// The peer.
        peer: NodeId,
        /// The new set.
        net: NetOptions,
    },
    /// `connect`: StandAlone to Unconnected.
    Connect {
        /// The peer.
        peer: NodeId,
        /// `--discard-my-data`: this node gives up its changes in a split brain.
        discard_my_data: bool,
        /// `--tentative`: only report what a connect would decide.
        tentative: bool,
    },
    /// `disconnect`.
    Disconnect {
        /// The peer.
        peer: NodeId,
        /// `--force`: do not ask the peer.
        force: bool,
    },
    /// `new-minor`: adds a volume, diskless.
    NewVolume {
        /// The volume.
        volume: VolumeNr,
        /// Its minor number, for reports.
        minor: u32,
        /// `diskless`: this node is meant to have no disk here.
        diskless: bool,
    },
    /// `del-minor`: removes a diskless volume.
    DelVolume {
        /// The volume.
        volume: VolumeNr,
    },
    /// `attach`.
    Attach {
        /// The volume.
        volume: VolumeNr,
        /// Data device.
        data_path: String,
        /// Metadata device; `None` if internal.
        meta_path: Option<String>,
        /// Where the metadata lies.
        index: MetaIndex,
        /// Disk options.
        options: DiskOptions,
    },
    /// `detach`.
    Detach {
        /// The volume.
        volume: VolumeNr,
        /// `--force`: do not wait for IO.
        force: bool,
        /// `--diskless`: it is meant to have no disk from now on.
        diskless: bool,
    },
    /// `disk-options`.
    DiskOptions {
        /// The volume.
        volume: VolumeNr,
        /// The new set.
        options: DiskOptions,
    },
    /// `peer-device-options`.
    PeerDeviceOptions {
        /// The peer.
        peer: NodeId,
        /// The volume.
        volume: VolumeNr,
        /// The new set.
        options: PeerDeviceOptions,
    },
    /// `resource-options`.
    ResourceOptions {
        /// The new set.
        options: ResourceOptions,
    },
    /// `primary`.
    Primary {
        /// `--force`.
        force: bool,
    },
    /// `secondary`.
    Secondary {
        /// `--force`: also with openers; their IO fails from then on.
        force: bool,
    },
    /// A front end opened or closed a volume for writing; counts openers.
    Open {
        /// The volume.
        volume: VolumeNr,
        /// `true` at open, `false` at close.
        open: bool,
        /// Opened for writing.
        write: bool,
    },
    /// `outdate`.
    Outdate {
        /// The volume.
        volume: VolumeNr,
    },
    /// `invalidate`.
    Invalidate {
        /// The volume.
        volume: VolumeNr,
        /// `--sync-from-peer-node-id`.
        from: Option<NodeId>,
        /// `--reset-bitmap`: default yes, a full sync.
        reset_bitmap: bool,
    },
    /// `invalidate-remote`.
    InvalidateRemote {
        /// The peer.
        peer: NodeId,
        /// The volume.
        volume: VolumeNr,
        /// `--reset-bitmap`: default yes, a full sync.
        reset_bitmap: bool,
    },
    /// `pause-sync`.
    PauseSync {
        /// The peer.
        peer: NodeId,
        /// The volume.
        volume: VolumeNr,
    },
    /// `resume-sync`.
    ResumeSync {
        /// The peer.
        peer: NodeId,
        /// The volume.
        volume: VolumeNr,
    },
    /// `verify`.
    Verify {
        /// The peer.
        peer: NodeId,
        /// The volume.
        volume: VolumeNr,
        /// `--start` in sectors.
        start: Option<u64>,
        /// `--stop` in sectors.
        stop: Option<u64>,
    },
    /// `new-current-uuid`.
    NewCurrentUuid {
        /// The volume.
        volume: VolumeNr,
        /// `--clear-bitmap`.
        clear_bitmap: bool,
        /// `--force-resync`.
        force_resync: bool,
    },
    /// `suspend-io`.
    SuspendIo,
    /// `resume-io`.
    ResumeIo,
    /// `resize`.
    Resize {
        /// The volume.
        volume: VolumeNr,
        /// `--size` in sectors; 0 is as large as possible.
        size_sectors: u64,
        /// `--assume-clean`.
        assume_clean: bool,
        /// `--assume-peer-has-space`.
        assume_peer_has_space: bool,
    },
    /// `forget-peer`.
    ForgetPeer {
        /// The peer.
        peer: NodeId,
    },
    /// The node's order of resyncs has changed for a volume; from the driver, not the operator.
    ResyncOrder {
        /// The volume.
        volume: VolumeNr,
        /// Why its resyncs wait.
        verdict: OrderVerdict,
    },
    /// `down`: disconnect from all, detach all; the resource can be dropped at the answer.
    Down,
}

/// The result of a command that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// Nothing had to change.
    NothingToDo,
}

/// Why a command failed: DRBD's code and a text that explains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct CommandError {
    /// The code.
    pub code: ErrorCode,
    /// What was found, what is needed, and the next step.
    pub text: String,
}

/// A return code: of a state change (negative, semantics.md 2.4) or of a command (over 100, 6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode(pub i32);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {
        impl ErrorCode {
            $($(#[$doc])* pub const $name: ErrorCode = ErrorCode($value);)*
        }
    };
}

codes! {
    /// `SS_UNKNOWN_ERROR`.
    UNKNOWN_ERROR = 0;
    /// `SS_TWO_PRIMARIES`.
    TWO_PRIMARIES = -1;
    /// `SS_NO_UP_TO_DATE_DISK`.
    NO_UP_TO_DATE_DISK = -2;
    /// `SS_NO_LOCAL_DISK`.
    NO_LOCAL_DISK = -4;
    /// `SS_NO_REMOTE_DISK`.
    NO_REMOTE_DISK = -5;
    /// `SS_CONNECTED_OUTDATES`.
    CONNECTED_OUTDATES = -6;
    /// `SS_PRIMARY_NOP`.
    PRIMARY_NOP = -7;
    /// `SS_RESYNC_RUNNING`.
    RESYNC_RUNNING = -8;
    /// `SS_ALREADY_STANDALONE`.
    ALREADY_STANDALONE = -9;
    /// `SS_CW_FAILED_BY_PEER`.
    CW_FAILED_BY_PEER = -10;
    /// `SS_IS_DISKLESS`.
    IS_DISKLESS = -11;
    /// `SS_DEVICE_IN_USE`.
    DEVICE_IN_USE = -12;
    /// `SS_NO_NET_CONFIG`.
    NO_NET_CONFIG = -13;
    /// `SS_NO_VERIFY_ALG`.
    NO_VERIFY_ALG = -14;
    /// `SS_NEED_CONNECTION`.
    NEED_CONNECTION = -15;
    /// `SS_LOWER_THAN_OUTDATED`.
    LOWER_THAN_OUTDATED = -16;
    /// `SS_NOT_SUPPORTED`.
    NOT_SUPPORTED = -17;
    /// `SS_IN_TRANSIENT_STATE`.
    IN_TRANSIENT_STATE = -18;
    /// `SS_CONCURRENT_ST_CHG`.
    CONCURRENT_ST_CHG = -19;
    /// `SS_O_VOL_PEER_PRI`.
    O_VOL_PEER_PRI = -20;
    /// `SS_INTERRUPTED`.
    INTERRUPTED = -21;
    /// `SS_PRIMARY_READER`.
    PRIMARY_READER = -22;
    /// `SS_TIMEOUT`.
    TIMEOUT = -23;
    /// `SS_WEAKLY_CONNECTED`.
    WEAKLY_CONNECTED = -24;
    /// `SS_NO_QUORUM`.
    NO_QUORUM = -25;
    /// `SS_ATTACH_NO_BITMAP`.
    ATTACH_NO_BITMAP = -26;
    /// `SS_HANDSHAKE_DISCONNECT`.
    HANDSHAKE_DISCONNECT = -27;
    /// `SS_HANDSHAKE_RETRY`.
    HANDSHAKE_RETRY = -28;
    /// `ERR_OPEN_DISK`.
    ERR_OPEN_DISK = 104;
    /// `ERR_OPEN_MD_DISK`.
    ERR_OPEN_MD_DISK = 105;
    /// `ERR_DISK_TOO_SMALL`.
    ERR_DISK_TOO_SMALL = 111;
    /// `ERR_MD_DISK_TOO_SMALL`.
    ERR_MD_DISK_TOO_SMALL = 112;
    /// `ERR_IO_MD_DISK`.
    ERR_IO_MD_DISK = 118;
    /// `ERR_MD_INVALID`.
    ERR_MD_INVALID = 119;
    /// `ERR_AUTH_ALG`.
    ERR_AUTH_ALG = 120;
    /// `ERR_DISCARD_IMPOSSIBLE`.
    ERR_DISCARD_IMPOSSIBLE = 123;
    /// `ERR_DISK_CONFIGURED`.
    ERR_DISK_CONFIGURED = 124;
    /// `ERR_NET_CONFIGURED`.
    ERR_NET_CONFIGURED = 125;
    /// `ERR_MINOR_INVALID`.
    ERR_MINOR_INVALID = 127;
    /// `ERR_RESIZE_RESYNC`.
    ERR_RESIZE_RESYNC = 130;
    /// `ERR_NO_PRIMARY`.
    ERR_NO_PRIMARY = 131;
    /// `ERR_RESYNC_AFTER`.
    ERR_RESYNC_AFTER = 132;
    /// `ERR_RESYNC_AFTER_CYCLE`.
    ERR_RESYNC_AFTER_CYCLE = 133;
    /// `ERR_PAUSE_IS_SET`.
    ERR_PAUSE_IS_SET = 134;
    /// `ERR_PAUSE_IS_CLEAR`.
    ERR_PAUSE_IS_CLEAR = 135;
    /// `ERR_NO_DISK`.
    ERR_NO_DISK = 138;
    /// `ERR_NOT_PROTO_C`.
    ERR_NOT_PROTO_C = 139;
    /// `ERR_INTEGRITY_ALG`.
    ERR_INTEGRITY_ALG = 141;
    /// `ERR_CSUMS_ALG`.
    ERR_CSUMS_ALG = 144;
    /// `ERR_VERIFY_ALG`.
    ERR_VERIFY_ALG = 146;
    /// `ERR_CSUMS_RESYNC_RUNNING`.
    ERR_CSUMS_RESYNC_RUNNING = 148;
    /// `ERR_VERIFY_RUNNING`.
    ERR_VERIFY_RUNNING = 149;
    /// `ERR_DATA_NOT_CURRENT`.
    ERR_DATA_NOT_CURRENT = 150;
    /// `ERR_CONNECTED`.
    ERR_CONNECTED = 151;
    /// `ERR_CONG_NOT_PROTO_A`.
    ERR_CONG_NOT_PROTO_A = 155;
    /// `ERR_PIC_AFTER_DEP`.
    ERR_PIC_AFTER_DEP = 156;
    /// `ERR_PIC_PEER_DEP`.
    ERR_PIC_PEER_DEP = 157;
    /// `ERR_RES_NOT_KNOWN`.
    ERR_RES_NOT_KNOWN = 158;
    /// `ERR_RES_IN_USE`.
    ERR_RES_IN_USE = 159;
    /// `ERR_MINOR_CONFIGURED`.
    ERR_MINOR_CONFIGURED = 160;
    /// `ERR_MINOR_OR_VOLUME_EXISTS`.
    ERR_MINOR_OR_VOLUME_EXISTS = 161;
    /// `ERR_INVALID_REQUEST`.
    ERR_INVALID_REQUEST = 162;
    /// `ERR_NEED_ALLOW_TWO_PRI`.
    ERR_NEED_ALLOW_TWO_PRI = 164;
    /// `ERR_MD_UNCLEAN`.
    ERR_MD_UNCLEAN = 165;
    /// `ERR_IMPLICIT_SHRINK`.
    ERR_IMPLICIT_SHRINK = 170;
    /// `ERR_INVALID_PEER_NODE_ID`.
    ERR_INVALID_PEER_NODE_ID = 171;
    /// `ERR_ALREADY_EXISTS`.
    ERR_ALREADY_EXISTS = 174;
    /// `ERR_APV_TOO_LOW`.
    ERR_APV_TOO_LOW = 175;
}
