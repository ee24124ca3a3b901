//! Command numbers with the stream and the scope of each (wire.md 4.1).

/// Byte stream of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// Writes, requests, replies with payload, handshake, state.
    Data,
    /// Acks, pings, two-phase commit replies.
    Control,
}

/// Streams on which a command may travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Streams {
    /// Data stream only.
    Data,
    /// Control stream only.
    Control,
    /// Either.
    Both,
}

impl Streams {
    /// Whether `stream` is allowed.
    pub const fn allow(self, stream: Stream) -> bool {
        matches!(
            (self, stream),
            (Streams::Both, _)
                | (Streams::Data, Stream::Data)
                | (Streams::Control, Stream::Control)
        )
    }
}

/// What the volume number in the header of a command means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// It names a volume. Two-phase commit packets and `P_STATE` may also carry 0xFFFF.
    Volume,
    /// It is ignored: the packet concerns the connection.
    Connection,
}

/// Declares the commands.
macro_rules! commands {
    ($($(#[$meta:meta])* $variant:ident = $value:literal, $name:literal, $streams:ident, $scope:ident;)+) => {
        /// Command of a packet. The two that were never used since 8.0 have no variant.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Command { $($(#[$meta])* $variant = $value,)+ }

        impl Command {
            /// All commands.
            pub const ALL: &[Command] = &[$(Command::$variant,)+];

            /// The command with this number, if there is one.
            pub const fn from_wire(value: u16) -> Option<Command> {
                match value { $($value => Some(Command::$variant),)+ _ => None }
            }

            /// The number on the wire.
            pub const fn to_wire(self) -> u16 {
                self as u16
            }

            /// The name in the specification, such as `P_WRITE_ACK`.
            pub const fn name(self) -> &'static str {
                match self { $(Command::$variant => $name,)+ }
            }

            /// The streams on which it may travel.
            pub const fn streams(self) -> Streams {
                match self { $(Command::$variant => Streams::$streams,)+ }
            }

            /// Whether it concerns a volume or the connection.
            pub const fn scope(self) -> Scope {
                match self { $(Command::$variant => Scope::$scope,)+ }
            }
        }
    };
}

commands! {
    /// Application write.
    Data = 0x00, "P_DATA", Data, Volume;
    /// Answer to a remote read.
    DataReply = 0x01, "P_DATA_REPLY", Data, Volume;
    /// Data for a resync.
    RsDataReply = 0x02, "P_RS_DATA_REPLY", Data, Volume;
    /// End of a write epoch.
    Barrier = 0x03, "P_BARRIER", Data, Connection;
    /// Plain bitmap words.
    Bitmap = 0x04, "P_BITMAP", Data, Volume;
    /// Hint: submit what is queued.
    UnplugRemote = 0x07, "P_UNPLUG_REMOTE", Data, Connection;
    /// Remote read.
    DataRequest = 0x08, "P_DATA_REQUEST", Data, Volume;
    /// Resync request.
    RsDataRequest = 0x09, "P_RS_DATA_REQUEST", Data, Volume;
    /// Resync parameters (protocol up to 88).
    SyncParam = 0x0a, "P_SYNC_PARAM", Data, Volume;
    /// Connection parameters.
    Protocol = 0x0b, "P_PROTOCOL", Data, Connection;
    /// Data generations (protocol below 110).
    Uuids = 0x0c, "P_UUIDS", Data, Volume;
    /// Sizes and limits of a volume.
    Sizes = 0x0d, "P_SIZES", Data, Volume;
    /// State of a volume.
    State = 0x0e, "P_STATE", Data, Volume;
    /// Generation of a starting resync (protocol below 110).
    SyncUuid = 0x0f, "P_SYNC_UUID", Data, Volume;
    /// Challenge.
    AuthChallenge = 0x10, "P_AUTH_CHALLENGE", Data, Connection;
    /// Answer to a challenge.
    AuthResponse = 0x11, "P_AUTH_RESPONSE", Data, Connection;
    /// State change of a volume (protocol below 110).
    StateChgReq = 0x12, "P_STATE_CHG_REQ", Data, Volume;
    /// Are you there?
    Ping = 0x13, "P_PING", Control, Connection;
    /// Answer to a ping.
    PingAck = 0x14, "P_PING_ACK", Control, Connection;
    /// Write was received (protocol B).
    RecvAck = 0x15, "P_RECV_ACK", Control, Volume;
    /// Write is on disk (protocol C).
    WriteAck = 0x16, "P_WRITE_ACK", Control, Volume;
    /// Resync write is on disk.
    RsWriteAck = 0x17, "P_RS_WRITE_ACK", Control, Volume;
    /// A conflicting write supersedes this one.
    Superseded = 0x18, "P_SUPERSEDED", Control, Volume;
    /// Write failed.
    NegAck = 0x19, "P_NEG_ACK", Control, Volume;
    /// Remote read failed.
    NegDreply = 0x1a, "P_NEG_DREPLY", Control, Volume;
    /// Resync read failed.
    NegRsDreply = 0x1b, "P_NEG_RS_DREPLY", Control, Volume;
    /// Epoch is stable.
    BarrierAck = 0x1c, "P_BARRIER_ACK", Control, Connection;
    /// Answer to a state change request.
    StateChgReply = 0x1d, "P_STATE_CHG_REPLY", Control, Volume;
    /// Verify request.
    OvRequest = 0x1e, "P_OV_REQUEST", Data, Volume;
    /// Digest of a verify request.
    OvReply = 0x1f, "P_OV_REPLY", Data, Volume;
    /// Result of a verified block (protocol below 122).
    OvResult = 0x20, "P_OV_RESULT", Control, Volume;
    /// Resync request with a digest.
    CsumRsRequest = 0x21, "P_CSUM_RS_REQUEST", Data, Volume;
    /// Digest was equal.
    RsIsInSync = 0x22, "P_RS_IS_IN_SYNC", Control, Volume;
    /// Resync parameters.
    SyncParam89 = 0x23, "P_SYNC_PARAM89", Data, Volume;
    /// Run-length coded bitmap.
    CompressedBitmap = 0x24, "P_COMPRESSED_BITMAP", Data, Volume;
    /// 8.3 only; skipped.
    DelayProbe = 0x27, "P_DELAY_PROBE", Both, Connection;
    /// Mark a range out of sync.
    OutOfSync = 0x28, "P_OUT_OF_SYNC", Data, Volume;
    /// Ask for this resync block later.
    RsCancel = 0x29, "P_RS_CANCEL", Control, Volume;
    /// State change of a connection (protocol 100..=109).
    ConnStChgReq = 0x2a, "P_CONN_ST_CHG_REQ", Data, Connection;
    /// Answer to a connection state change.
    ConnStChgReply = 0x2b, "P_CONN_ST_CHG_REPLY", Control, Connection;
    /// Send this write again later.
    RetryWrite = 0x2c, "P_RETRY_WRITE", Control, Volume;
    /// New connection parameters.
    ProtocolUpdate = 0x2d, "P_PROTOCOL_UPDATE", Data, Connection;
    /// First phase of a cluster-wide state change.
    TwopcPrepare = 0x2e, "P_TWOPC_PREPARE", Data, Volume;
    /// Gives a two-phase commit up.
    TwopcAbort = 0x2f, "P_TWOPC_ABORT", Data, Volume;
    /// Sets the dagtag.
    Dagtag = 0x30, "P_DAGTAG", Data, Connection;
    /// Discard.
    Trim = 0x31, "P_TRIM", Data, Volume;
    /// Resync request, "deallocated" allowed.
    RsThinReq = 0x32, "P_RS_THIN_REQ", Data, Volume;
    /// Resync block is all zero (protocol below 122).
    RsDeallocated = 0x33, "P_RS_DEALLOCATED", Data, Volume;
    /// Write-same.
    Wsame = 0x34, "P_WSAME", Data, Volume;
    /// First phase of a cluster-wide resize.
    TwopcPrepRsz = 0x35, "P_TWOPC_PREP_RSZ", Data, Volume;
    /// Zero-out.
    Zeroes = 0x36, "P_ZEROES", Data, Volume;
    /// Nodes that have all writes up to a dagtag.
    PeerAck = 0x40, "P_PEER_ACK", Control, Connection;
    /// Nodes that have identical data in a range.
    PeersInSync = 0x41, "P_PEERS_IN_SYNC", Control, Volume;
    /// Data generations.
    Uuids110 = 0x42, "P_UUIDS110", Data, Volume;
    /// Dagtag of a commonly lost primary.
    PeerDagtag = 0x43, "P_PEER_DAGTAG", Data, Connection;
    /// Generation of a node without a disk.
    CurrentUuid = 0x44, "P_CURRENT_UUID", Data, Volume;
    /// Agrees to a two-phase commit.
    TwopcYes = 0x45, "P_TWOPC_YES", Control, Volume;
    /// Refuses a two-phase commit.
    TwopcNo = 0x46, "P_TWOPC_NO", Control, Volume;
    /// Second phase of a two-phase commit.
    TwopcCommit = 0x47, "P_TWOPC_COMMIT", Data, Volume;
    /// Try the two-phase commit again later.
    TwopcRetry = 0x48, "P_TWOPC_RETRY", Control, Volume;
    /// A part of the current epoch is stable.
    ConfirmStable = 0x49, "P_CONFIRM_STABLE", Control, Connection;
    /// Source is Ahead: stop asking.
    RsCancelAhead = 0x4a, "P_RS_CANCEL_AHEAD", Control, Volume;
    /// The handshake ended in a refusal.
    Disconnect = 0x4b, "P_DISCONNECT", Data, Connection;
    /// Resync request with a dagtag.
    RsDagtagReq = 0x4c, "P_RS_DAGTAG_REQ", Data, Volume;
    /// Resync request with digest and dagtag.
    RsCsumDagtagReq = 0x4d, "P_RS_CSUM_DAGTAG_REQ", Data, Volume;
    /// Thin resync request with a dagtag.
    RsThinDagtagReq = 0x4e, "P_RS_THIN_DAGTAG_REQ", Data, Volume;
    /// Verify request with a dagtag.
    OvDagtagReq = 0x4f, "P_OV_DAGTAG_REQ", Data, Volume;
    /// Digest of a verify request, with a dagtag.
    OvDagtagReply = 0x50, "P_OV_DAGTAG_REPLY", Data, Volume;
    /// Write is on disk and the block in sync.
    WriteAckInSync = 0x51, "P_WRITE_ACK_IN_SYNC", Control, Volume;
    /// Resync write failed.
    RsNegAck = 0x52, "P_RS_NEG_ACK", Control, Volume;
    /// Result of a verified block.
    OvResultId = 0x53, "P_OV_RESULT_ID", Control, Volume;
    /// Resync block is all zero.
    RsDeallocatedId = 0x54, "P_RS_DEALLOCATED_ID", Data, Volume;
    /// Push peer acks out before a resync ends.
    FlushRequests = 0x55, "P_FLUSH_REQUESTS", Data, Connection;
    /// Forwarded flush.
    FlushForward = 0x56, "P_FLUSH_FORWARD", Control, Connection;
    /// Answer to a flush.
    FlushRequestsAck = 0x57, "P_FLUSH_REQUESTS_ACK", Data, Connection;
    /// Whether the next resync replicates writes.
    EnableReplicationNext = 0x58, "P_ENABLE_REPLICATION_NEXT", Data, Volume;
    /// Whether writes are replicated now.
    EnableReplication = 0x59, "P_ENABLE_REPLICATION", Data, Volume;
    /// First packet of a control stream.
    InitialMeta = 0xfff1, "P_INITIAL_META", Control, Connection;
    /// First packet of a data stream.
    InitialData = 0xfff2, "P_INITIAL_DATA", Data, Connection;
    /// Versions and features.
    ConnectionFeatures = 0xfffe, "P_CONNECTION_FEATURES", Data, Connection;
}
