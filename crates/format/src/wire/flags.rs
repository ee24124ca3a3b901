//! Flag words and small enumerations of packets (wire.md 4.3).
//!
//! Flag words keep unknown bits, so that a newer peer's packet can be shown and passed on.

bitflags::bitflags! {
    /// `dp_flags` of `P_DATA`, `P_TRIM`, `P_ZEROES` and `P_WSAME`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DataFlags: u32 {
        /// Obsolete barrier request, never set.
        const HARDBARRIER = 0x001;
        /// The writer waits for this write.
        const RW_SYNC = 0x002;
        /// The sender is in a sync state: the receiver may clear its out-of-sync bit.
        const MAY_SET_IN_SYNC = 0x004;
        /// Compatibility hint, ignored.
        const UNPLUG = 0x008;
        /// Forced unit access (protocol 95 and later).
        const FUA = 0x010;
        /// Preflush that belongs to this write (protocol 95 and later).
        const FLUSH = 0x020;
        /// Discard; with `ZEROES`: the zero-out may deallocate.
        const DISCARD = 0x040;
        /// Protocol B: answer with `P_RECV_ACK` (protocol 100 and later).
        const SEND_RECEIVE_ACK = 0x080;
        /// Protocol C: answer with the write ack (protocol 100 and later).
        const SEND_WRITE_ACK = 0x100;
        /// Write-same; must not be sent to DRBD 9.1.12/9.2 and later.
        const WSAME = 0x200;
        /// Zero-out.
        const ZEROES = 0x400;
        const _ = !0;
    }

    /// `feature_flags` of `P_CONNECTION_FEATURES`; agreed is what both sides announce.
    /// The specification writes `FF_TRIM` for [`Features::TRIM`] and so on.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// `P_TRIM` is allowed.
        const TRIM = 1;
        /// The `P_RS_THIN_REQ` family is allowed.
        const THIN_RESYNC = 2;
        /// 56-byte `P_SIZES`, discards up to 128 MiB.
        const WSAME = 4;
        /// `P_ZEROES` is allowed and a `P_TRIM` is a real discard.
        const WZEROES = 8;
        /// The requests with a dagtag replace the plain ones.
        const RESYNC_DAGTAG = 16;
        /// Second layout of the two-phase commit request.
        const TWOPC_V2 = 32;
        /// A node with a disk sends its new UUID also to diskless peers.
        const RS_SKIP_UUID = 64;
        /// `P_ENABLE_REPLICATION(_NEXT)` is allowed.
        const RESYNC_WITHOUT_REPLICATION = 128;
        /// The last byte of `P_SIZES` says the bitmap block size.
        const BM_BLOCK_SHIFT = 256;
        /// `P_PEER_DAGTAG` may appear in the connect handshake.
        const RECONCILE_RECONNECT = 512;
        /// `FF_LOCKSTEP`: both peers are Lockstep. A kernel peer never announces it, so it is never
        /// agreed with one.
        const LOCKSTEP = 1 << 31;
        const _ = !0;
    }

    /// `uuid_flags` of `P_UUIDS` and `P_UUIDS110`. Bits 56..=63 hold a node id with `HAS_UNALLOC`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct UuidFlags: u64 {
        /// The sender's data may be discarded.
        const DISCARD_MY_DATA = 1 << 0;
        /// The sender was Primary when it crashed.
        const CRASHED_PRIMARY = 1 << 1;
        /// The sender's disk is Inconsistent.
        const INCONSISTENT = 1 << 2;
        /// Both sides just created: skip the initial resync.
        const SKIP_INITIAL_SYNC = 1 << 3;
        /// The packet announces a new current UUID; `node_mask` are the weak nodes.
        const NEW_DATAGEN = 1 << 4;
        /// The sender is stable; clear: `node_mask` are the authoritative nodes.
        const STABLE = 1 << 5;
        /// The sender became stable.
        const GOT_STABLE = 1 << 6;
        /// Compare UUIDs now and start a resync if needed.
        const RESYNC = 1 << 7;
        /// The connection was lost and comes back.
        const RECONNECT = 1 << 8;
        /// With `RESYNC`: the reason is a diskless primary.
        const DISKLESS_PRIMARY = 1 << 9;
        /// The sender was Primary and lost quorum.
        const PRIMARY_LOST_QUORUM = 1 << 10;
        /// The sender is sync target of some peer.
        const SYNC_TARGET = 1 << 11;
        /// Bits 56..=63 name an unallocated day-0 bitmap slot (protocol 116 and later).
        const HAS_UNALLOC = 1 << 12;
        /// Of Lockstep alone: the sender's disk was connected to the receiver when it crashed, and was not since then.
        const CACHE_LOST = 1 << 40;
        /// Of Lockstep alone: nothing was written to the sender's disk since the generation in its slot for the receiver.
        const UNWRITTEN = 1 << 41;
        /// With UNWRITTEN: nor did the disk differ from that of any other node at that time.
        const UNWRITTEN_FOR_ALL = 1 << 42;
        /// Of Lockstep alone: the Primary waits until the receiver, which is not whole, has noted this generation.
        const VOTE_ASKED = 1 << 43;
        /// The answer: the slot of the sender itself names the generation that it was asked for.
        const VOTE_NOTED = 1 << 44;
        const _ = !0;
    }

    /// `dds_flags` of `P_SIZES` and of the two-phase resize.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceDescFlags: u16 {
        /// Peers that are not connected are assumed to have the space.
        const ASSUME_UNCONNECTED_PEER_HAS_SPACE = 1;
        /// The new area needs no resync (assume-clean).
        const NO_RESYNC = 2;
        /// Unused.
        const IGNORE_PEER_CONSTRAINTS = 4;
        const _ = !0;
    }

    /// `conn_flags` of `P_PROTOCOL`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ConnFlags: u32 {
        /// The sender offers its data to be discarded.
        const DISCARD_MY_DATA = 1;
        /// The sender only wants to know what would happen (protocol 92 and later).
        const DRY_RUN = 2;
        const _ = !0;
    }

    /// `flags` of the two-phase commit requests with [`Features::TWOPC_V2`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct TwopcFlags: u32 {
        /// Set by every sender of the second layout.
        const HAS_FLAGS = 0x8000_0000;
        /// Commit and abort carry `reachable_nodes`.
        const HAS_REACHABLE = 0x4000_0000;
        /// There is a primary, but it has no good data.
        const PRI_INCAPABLE = 0x2000_0000;
        const _ = !0;
    }
}

impl UuidFlags {
    /// Node id of the unallocated day-0 bitmap slot, if `HAS_UNALLOC` says there is one.
    pub const fn unallocated_slot(self) -> Option<u8> {
        if self.contains(Self::HAS_UNALLOC) {
            Some((self.bits() >> 56) as u8)
        } else {
            None
        }
    }

    /// The flags that a peer below protocol 110 knows.
    pub const KNOWN_TO_84: UuidFlags = UuidFlags::from_bits_retain(0xF);
}

/// Declares an enumeration with its numbers on the wire.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)+ }

        impl $name {
            /// The variant with this number on the wire, if there is one.
            pub const fn from_wire(value: $repr) -> Option<Self> {
                match value { $($value => Some(Self::$variant),)+ _ => None }
            }

            /// The number on the wire.
            pub const fn to_wire(self) -> $repr {
                self as $repr
            }
        }
    };
}
pub(crate) use wire_enum;

wire_enum! {
    /// Replication protocol: when a write is complete.
    ReplicationProtocol: u32 {
        /// Asynchronous: local disk and own send buffer.
        A = 1,
        /// Memory synchronous: local disk and the peer's memory.
        B = 2,
        /// Synchronous: local disk and the peer's disk.
        C = 3,
    }
}

wire_enum! {
    /// Automatic split-brain recovery policy (`after-sb-*`).
    AfterSb: u32 {
        /// Give up the connection.
        Disconnect = 0,
        /// Sync from the node that was Primary first.
        DiscardYoungerPrimary = 1,
        /// Sync from the node that became Primary last.
        DiscardOlderPrimary = 2,
        /// Sync from the node with changes if only one has any.
        DiscardZeroChanges = 3,
        /// Sync from the node with more changes.
        DiscardLeastChanges = 4,
        /// Discard the own data; the peer's word for it is `DiscardRemote`.
        DiscardLocal = 5,
        /// Discard the peer's data; the peer's word for it is `DiscardLocal`.
        DiscardRemote = 6,
        /// Discard the secondary's data if the 0-primaries policy agrees.
        Consensus = 7,
        /// Discard the secondary's data.
        DiscardSecondary = 8,
        /// As `Consensus`, and call the handler on a Primary that loses.
        CallPriLostAfterSb = 9,
        /// Do what the 0-primaries policy says, even against a Primary.
        ViolentlyAs0p = 10,
        /// Retry the connection (`rr-conflict` only).
        RetryConnect = 11,
        /// Discard automatically (`rr-conflict` only).
        AutoDiscard = 12,
    }
}

impl AfterSb {
    /// The same policy in the peer's words: exchanges "local" and "remote".
    #[must_use]
    pub const fn mirrored(self) -> AfterSb {
        match self {
            AfterSb::DiscardLocal => AfterSb::DiscardRemote,
            AfterSb::DiscardRemote => AfterSb::DiscardLocal,
            other => other,
        }
    }
}

wire_enum! {
    /// Result of an online verify of one block (`P_OV_RESULT_ID`).
    OvResultCode: u32 {
        /// Not compared, because of writes or an error.
        Skip = 0,
        /// Both nodes have the same data.
        InSync = 1,
        /// The data differ.
        OutOfSync = 2,
    }
}
