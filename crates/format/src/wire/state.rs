//! The 32-bit state word and its parts, in the numbering of 9.x and of 8.4 (wire.md 4.3).

use super::flags::wire_enum;

wire_enum! {
    /// Role of a node for a resource.
    Role: u32 {
        /// Not known (no connection, or an unselected field).
        Unknown = 0,
        /// The resource may be in use there.
        Primary = 1,
        /// The resource is not in use there.
        Secondary = 2,
    }
}

wire_enum! {
    /// State of a disk, in 9.x numbering.
    DiskState: u32 {
        /// No disk.
        Diskless = 0,
        /// Reading the metadata.
        Attaching = 1,
        /// Being detached; 8.4 has no such state and shows it as Failed.
        Detaching = 2,
        /// I/O error; will be detached.
        Failed = 3,
        /// Attached to a connected device; waits for the peer's verdict.
        Negotiating = 4,
        /// Only parts of the data are usable.
        Inconsistent = 5,
        /// Consistent, but known not to be the newest.
        Outdated = 6,
        /// Disk of a peer that is not connected.
        DUnknown = 7,
        /// Consistent; whether it is the newest is not known.
        Consistent = 8,
        /// The newest data.
        UpToDate = 9,
    }
}

wire_enum! {
    /// State of a connection.
    ConnState: u32 {
        /// No attempt to connect.
        StandAlone = 0,
        /// An agreed disconnect is going on.
        Disconnecting = 1,
        /// About to try again.
        Unconnected = 2,
        /// Lost by a time-out.
        Timeout = 3,
        /// Lost by a closed stream.
        BrokenPipe = 4,
        /// Lost by a network error.
        NetworkFailure = 5,
        /// Ended because of a packet that breaks the protocol.
        ProtocolError = 6,
        /// The peer disconnects.
        TearDown = 7,
        /// Waiting for the peer (8.4: WFConnection).
        Connecting = 8,
        /// Connected (8.4: WFReportParams).
        Connected = 9,
    }
}

wire_enum! {
    /// State of the replication of a volume over a connection.
    ReplState: u32 {
        /// Not connected.
        Off = 9,
        /// Replicating (8.4: Connected).
        Established = 10,
        /// Full resync as source is being started.
        StartingSyncS = 11,
        /// Full resync as target is being started.
        StartingSyncT = 12,
        /// Sends its bitmap as source.
        WfBitmapS = 13,
        /// Waits for the bitmap as target.
        WfBitmapT = 14,
        /// Waits for the resync's UUID (protocol below 110).
        WfSyncUuid = 15,
        /// Resync is running, this node is the source.
        SyncSource = 16,
        /// Resync is running, this node is the target.
        SyncTarget = 17,
        /// Online verify is running, this node compares.
        VerifyS = 18,
        /// Online verify is running, the peer compares.
        VerifyT = 19,
        /// Resync as source is paused.
        PausedSyncS = 20,
        /// Resync as target is paused.
        PausedSyncT = 21,
        /// Does not replicate because of congestion.
        Ahead = 22,
        /// The peer is ahead.
        Behind = 23,
    }
}

/// How disk states are numbered in a state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskNumbering {
    /// 8.4: no Detaching, everything behind it is one lower.
    V84,
    /// 9.x.
    V9,
}

impl DiskNumbering {
    /// The numbering of `P_STATE` at this agreed protocol version.
    pub const fn of_protocol(protocol: u32) -> DiskNumbering {
        if protocol < 110 {
            DiskNumbering::V84
        } else {
            DiskNumbering::V9
        }
    }
}

impl DiskState {
    /// The state with number `value` in `numbering`; none for numbers without meaning.
    pub const fn from_number(value: u32, numbering: DiskNumbering) -> Option<DiskState> {
        match numbering {
            DiskNumbering::V9 => DiskState::from_wire(value),
            DiskNumbering::V84 if value >= 2 => DiskState::from_wire(value + 1),
            DiskNumbering::V84 => DiskState::from_wire(value),
        }
    }

    /// Number of the state in `numbering`. Detaching is sent to 8.4 as Failed.
    pub const fn number(self, numbering: DiskNumbering) -> u32 {
        match numbering {
            DiskNumbering::V9 => self.to_wire(),
            DiskNumbering::V84 if self.to_wire() > 2 => self.to_wire() - 1,
            DiskNumbering::V84 => self.to_wire(),
        }
    }
}

/// A packed state word as it travels; also used for masks, where a field of ones selects it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateWord(pub u32);

impl StateWord {
    /// Role of the sender.
    pub const ROLE: StateWord = StateWord(0x0000_0003);
    /// Role of the receiver, as the sender sees it.
    pub const PEER: StateWord = StateWord(0x0000_000c);
    /// Connection or replication state.
    pub const CONN: StateWord = StateWord(0x0000_01f0);
    /// Disk state of the sender.
    pub const DISK: StateWord = StateWord(0x0000_1e00);
    /// Disk state of the receiver, as the sender sees it.
    pub const PDSK: StateWord = StateWord(0x0001_e000);
    /// Suspended by the user.
    pub const SUSP: StateWord = StateWord(0x0002_0000);
    /// Resync is paused by a resync dependency.
    pub const AFTR_ISP: StateWord = StateWord(0x0004_0000);
    /// Resync is paused by the peer.
    pub const PEER_ISP: StateWord = StateWord(0x0008_0000);
    /// Resync is paused by the user.
    pub const USER_ISP: StateWord = StateWord(0x0010_0000);
    /// Suspended because no data are accessible.
    pub const SUSP_NOD: StateWord = StateWord(0x0020_0000);
    /// Suspended until fencing is done.
    pub const SUSP_FEN: StateWord = StateWord(0x0040_0000);
    /// The sender has quorum (9.x).
    pub const QUORUM: StateWord = StateWord(0x0080_0000);

    /// The fields that `field` selects, in place.
    pub const fn masked(self, field: StateWord) -> StateWord {
        StateWord(self.0 & field.0)
    }

    /// Whether any bit of `field` is set.
    pub const fn has(self, field: StateWord) -> bool {
        self.0 & field.0 != 0
    }

    /// Both words together.
    #[must_use]
    pub const fn union(self, other: StateWord) -> StateWord {
        StateWord(self.0 | other.0)
    }

    /// Raw value of a field, shifted down.
    pub const fn field(self, field: StateWord) -> u32 {
        (self.0 & field.0) >> field.0.trailing_zeros()
    }

    /// The word with `field` set to `value` (excess bits of `value` are dropped).
    #[must_use]
    pub const fn with_field(self, field: StateWord, value: u32) -> StateWord {
        let shifted = (value << field.0.trailing_zeros()) & field.0;
        StateWord((self.0 & !field.0) | shifted)
    }

    /// Role of the sender, none if the bits mean nothing.
    pub const fn role(self) -> Option<Role> {
        Role::from_wire(self.field(Self::ROLE))
    }

    /// Role of the receiver, none if the bits mean nothing.
    pub const fn peer(self) -> Option<Role> {
        Role::from_wire(self.field(Self::PEER))
    }

    /// Connection state: what the field says up to 9, Connected above; none for 24..=31.
    pub const fn conn(self) -> Option<ConnState> {
        match self.field(Self::CONN) {
            value @ 0..=9 => ConnState::from_wire(value),
            10..=23 => Some(ConnState::Connected),
            _ => None,
        }
    }

    /// Replication state: Off up to 9, what the field says above; none for 24..=31.
    pub const fn repl(self) -> Option<ReplState> {
        match self.field(Self::CONN) {
            0..=9 => Some(ReplState::Off),
            value => ReplState::from_wire(value),
        }
    }

    /// Disk state of the sender, none if the number means nothing.
    pub const fn disk(self, numbering: DiskNumbering) -> Option<DiskState> {
        DiskState::from_number(self.field(Self::DISK), numbering)
    }

    /// Disk state of the receiver, none if the number means nothing.
    pub const fn pdsk(self, numbering: DiskNumbering) -> Option<DiskState> {
        DiskState::from_number(self.field(Self::PDSK), numbering)
    }

    /// Unpacks the word; none if a field holds a number without meaning.
    pub fn unpack(self, numbering: DiskNumbering) -> Option<PeerState> {
        Some(PeerState {
            role: self.role()?,
            peer: self.peer()?,
            conn: self.conn()?,
            repl: self.repl()?,
            disk: self.disk(numbering)?,
            pdsk: self.pdsk(numbering)?,
            susp: self.has(Self::SUSP),
            aftr_isp: self.has(Self::AFTR_ISP),
            peer_isp: self.has(Self::PEER_ISP),
            user_isp: self.has(Self::USER_ISP),
            susp_nod: self.has(Self::SUSP_NOD),
            susp_fen: self.has(Self::SUSP_FEN),
            quorum: self.has(Self::QUORUM),
        })
    }
}

/// A `mask`/`val` pair: the fields that `mask` selects shall get the values of `val`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateChange {
    /// Selected fields: all ones in each.
    pub mask: StateWord,
    /// Wanted values.
    pub val: StateWord,
}

impl StateChange {
    /// The same change seen from the other side (wire.md 4.3, mirror rule).
    ///
    /// Role and peer, disk and pdsk change places; connection states that have no counterpart
    /// become 0 (StandAlone), as kernel peers do.
    #[must_use]
    pub const fn mirrored(self) -> StateChange {
        StateChange {
            mask: mirror(self.mask),
            val: mirror(self.val),
        }
    }
}

const fn mirror(word: StateWord) -> StateWord {
    let conn = match word.field(StateWord::CONN) {
        same @ (8 | 9 | 10 | 31) => same,
        1 => 7,
        11 => 12,
        12 => 11,
        13 => 14,
        14 => 13,
        18 => 19,
        _ => 0,
    };
    let peer_isp = word.has(StateWord::AFTR_ISP) || word.has(StateWord::USER_ISP);
    StateWord(0)
        .with_field(StateWord::ROLE, word.field(StateWord::PEER))
        .with_field(StateWord::PEER, word.field(StateWord::ROLE))
        .with_field(StateWord::CONN, conn)
        .with_field(StateWord::DISK, word.field(StateWord::PDSK))
        .with_field(StateWord::PDSK, word.field(StateWord::DISK))
        .with_field(StateWord::PEER_ISP, peer_isp as u32)
}

/// The state of a volume as its sender sees it (`P_STATE`), in the numbering of 9.x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerState {
    /// Role of the sender.
    pub role: Role,
    /// Role of the receiver, as the sender sees it.
    pub peer: Role,
    /// Connection state; Connected whenever `repl` is not Off.
    pub conn: ConnState,
    /// Replication state.
    pub repl: ReplState,
    /// Disk of the sender.
    pub disk: DiskState,
    /// Disk of the receiver, as the sender sees it.
    pub pdsk: DiskState,
    /// I/O is suspended by the user.
    pub susp: bool,
    /// Resync is paused by a resync dependency.
    pub aftr_isp: bool,
    /// Resync is paused by the peer.
    pub peer_isp: bool,
    /// Resync is paused by the user.
    pub user_isp: bool,
    /// I/O is suspended because no data are accessible.
    pub susp_nod: bool,
    /// I/O is suspended until fencing is done.
    pub susp_fen: bool,
    /// The sender has quorum (9.x; unused by 8.4).
    pub quorum: bool,
}

impl PeerState {
    /// Packs the state into a word.
    pub const fn pack(self, numbering: DiskNumbering) -> StateWord {
        let conn = match self.repl {
            ReplState::Off => self.conn.to_wire(),
            repl => repl.to_wire(),
        };
        StateWord(0)
            .with_field(StateWord::ROLE, self.role.to_wire())
            .with_field(StateWord::PEER, self.peer.to_wire())
            .with_field(StateWord::CONN, conn)
            .with_field(StateWord::DISK, self.disk.number(numbering))
            .with_field(StateWord::PDSK, self.pdsk.number(numbering))
            .with_field(StateWord::SUSP, self.susp as u32)
            .with_field(StateWord::AFTR_ISP, self.aftr_isp as u32)
            .with_field(StateWord::PEER_ISP, self.peer_isp as u32)
            .with_field(StateWord::USER_ISP, self.user_isp as u32)
            .with_field(StateWord::SUSP_NOD, self.susp_nod as u32)
            .with_field(StateWord::SUSP_FEN, self.susp_fen as u32)
            .with_field(StateWord::QUORUM, self.quorum as u32)
    }
}
