//! Every test vector of the wire specification: decoded, compared field by field, encoded again.

use lockstep_format::units::{Dagtag, NodeId, NodeMask, Sector, Uuid, VolumeNr};
use lockstep_format::wire::packet::{
    AlgName, Barrier, BarrierAck, BitmapWords, BlockAck, BlockDesc, BlockRequest, CompressedBitmap,
    ConfirmStable, ConnectionFeatures, CurrentUuid, DagtagRequest, Data, DeviceLimits, DynamicRate,
    EnableReplication, FlushForward, FlushRequests, FlushRequestsAck, OvResultId, PeerAck,
    PeersInSync, Protocol, RunKind, Sizes, StateRv, SyncParam89, Trim, TwopcHead, TwopcOutcome,
    TwopcPrepare, TwopcReply, TwopcResize, Uuids, Uuids110,
};
use lockstep_format::wire::transport::{LbTcpChunk, RdmaFlowControl};
use lockstep_format::wire::{
    AfterSb, BlockId, ConnFlags, ConnState, DataFlags, DeviceDescFlags, Dialect, Digest, DiskState,
    Features, HeaderKind, OvResultCode, Packet, PeerState, ReplState, ReplicationProtocol, Role,
    StateChange, StateWord, Stream, TwopcFlags, UuidFlags, WireError, decode, decode_header,
    decode_initial, encode, encode_with,
};

const VECTORS: &str = include_str!("../../../testdata/wire/vectors.hex");

/// Bytes of the vector with this number.
fn vector(number: u32) -> Vec<u8> {
    let head = format!("V{number} ");
    let lines = VECTORS
        .lines()
        .skip_while(|line| !line.starts_with(&head))
        .skip(1);
    let hex: String = lines
        .take_while(|line| line.starts_with("  "))
        .map(str::trim)
        .collect();
    assert!(!hex.is_empty(), "no vector V{number}");
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn features_9() -> Features {
    Features::from_bits_retain(0x3ff)
}

/// The dialect of two 9.3.3 kernels.
fn p124() -> Dialect {
    Dialect::new(124, features_9())
}

/// The dialect of 8.4.
fn p101() -> Dialect {
    Dialect::new(101, Features::from_bits_retain(7))
}

/// Decodes the packet at the start of the vector, compares, encodes, compares.
#[track_caller]
fn check(number: u32, stream: Stream, dialect: Dialect, volume: u16, expected: &Packet) {
    let bytes = vector(number);
    let used = check_bytes(&bytes, stream, dialect, volume, expected);
    assert!(
        expected.payload_len() > 0 || used == bytes.len(),
        "V{number} has a tail"
    );
}

#[track_caller]
fn check_bytes(
    bytes: &[u8],
    stream: Stream,
    dialect: Dialect,
    volume: u16,
    expected: &Packet,
) -> usize {
    let header = decode_header(bytes, stream, &dialect).unwrap().unwrap();
    assert_eq!(header.volume, VolumeNr(volume));
    let head = header.kind.len();
    let fixed = header.fixed_len(&dialect);
    let packet = decode(&header, &bytes[head..], &dialect).unwrap();
    assert_eq!(&packet, expected);
    assert_eq!(packet.payload_len(), header.payload_len(&dialect));
    let mut out = Vec::new();
    encode(&packet, header.volume, &dialect, &mut out);
    assert_eq!(out, bytes[..head + fixed]);
    head + fixed
}

const ID: BlockId = BlockId(0x0102_0304_0506_0708);

#[test]
fn v01_v02_first_packets_name_their_stream() {
    assert_eq!(decode_initial(&vector(1)), Ok(Some(Stream::Data)));
    assert_eq!(decode_initial(&vector(2)), Ok(Some(Stream::Control)));
    assert_eq!(decode_initial(&vector(2)[..7]), Ok(None));
    check(1, Stream::Data, Dialect::INITIAL, 0, &Packet::InitialData);
    check(
        2,
        Stream::Control,
        Dialect::INITIAL,
        0,
        &Packet::InitialMeta,
    );
}

#[test]
fn v03_v04_connection_features() {
    let mut expected = ConnectionFeatures {
        protocol_min: 86,
        protocol_max: 124,
        features: features_9(),
        sender_node_id: NodeId(0),
        receiver_node_id: NodeId(1),
    };
    let packet = Packet::ConnectionFeatures(expected);
    check(3, Stream::Data, Dialect::INITIAL, 0, &packet);
    expected.protocol_max = 101;
    expected.features = Features::TRIM | Features::THIN_RESYNC | Features::WSAME;
    expected.receiver_node_id = NodeId(0);
    check(
        4,
        Stream::Data,
        Dialect::INITIAL,
        0,
        &Packet::ConnectionFeatures(expected),
    );
}

#[test]
fn v05_v06_v07_authentication() {
    let challenge = core::array::from_fn(|index| index as u8);
    check(
        5,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::AuthChallenge(challenge),
    );
    let digest = |number| Packet::AuthResponse(Digest::new(&vector(number)[16..]).unwrap());
    assert_eq!(vector(6)[16..18], [0xc2, 0x7b]);
    check(6, Stream::Data, p124(), 0xFFFF, &digest(6));
    check(7, Stream::Data, p101(), 0, &digest(7));
}

fn alg(name: &str) -> AlgName {
    AlgName::new(name.as_bytes()).unwrap()
}

#[test]
fn v08_v09_protocol() {
    let mut expected = Protocol {
        protocol: ReplicationProtocol::C,
        after_sb_0p: AfterSb::Disconnect,
        after_sb_1p: AfterSb::Disconnect,
        after_sb_2p: AfterSb::Disconnect,
        conn_flags: ConnFlags::empty(),
        two_primaries: false,
        integrity_alg: AlgName::default(),
    };
    check(
        8,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::Protocol(expected.clone()),
    );
    expected.protocol = ReplicationProtocol::A;
    expected.after_sb_0p = AfterSb::DiscardZeroChanges;
    expected.after_sb_1p = AfterSb::DiscardSecondary;
    expected.conn_flags = ConnFlags::DISCARD_MY_DATA;
    expected.integrity_alg = alg("crc32c");
    check(9, Stream::Data, p124(), 0xFFFF, &Packet::Protocol(expected));
}

#[test]
fn v10_sync_param() {
    let expected = SyncParam89 {
        resync_rate_kib_s: 250,
        verify_alg: alg("sha1"),
        csums_alg: alg("crc32c"),
        dynamic: Some(DynamicRate {
            plan_ahead_ds: 20,
            delay_target_ds: 10,
            fill_target_sectors: 100,
            max_rate_kib_s: 102_400,
        }),
    };
    check(10, Stream::Data, p124(), 0, &Packet::SyncParam89(expected));
}

#[test]
fn v11_sizes() {
    let expected = Sizes {
        d_size: Sector(2_097_152),
        u_size: Sector(0),
        c_size: Sector(2_097_152),
        max_bio_size_bytes: 1 << 20,
        queue_order_type: 0,
        dds_flags: DeviceDescFlags::empty(),
        limits: Some(DeviceLimits {
            physical_block_size_bytes: 4096,
            logical_block_size_bytes: 512,
            alignment_offset_bytes: 0,
            io_min_bytes: 4096,
            io_opt_bytes: 0,
            discard_enabled: 1,
            discard_zeroes_data: 0,
            write_same_capable: 0,
            bm_block_shift_minus_12: 2,
        }),
    };
    check(11, Stream::Data, p124(), 3, &Packet::Sizes(expected));
}

#[test]
fn v12_v13_v14_uuids() {
    let old = Uuids {
        current: Uuid(0x1111_1111_1111_1110),
        bitmap: Uuid(0),
        history: [Uuid(0x2222_2222_2222_2222), Uuid(0x3333_3333_3333_3332)],
        dirty_bits: 5,
        flags: UuidFlags::CRASHED_PRIMARY,
    };
    check(12, Stream::Data, p101(), 0, &Packet::Uuids(old));
    let current = Uuid(0xa1b2_c3d4_e5f6_0718);
    let new = Uuids110 {
        current,
        dirty_bits: 0,
        flags: UuidFlags::STABLE,
        node_mask: NodeMask::EMPTY,
        bitmap_uuids: vec![(NodeId(1), Uuid(0)), (NodeId(2), Uuid(ID.0))],
        history: vec![Uuid(0x1112_1314_1516_1718), Uuid(0)],
    };
    check(13, Stream::Data, p124(), 0, &Packet::Uuids110(new));
    let diskless = CurrentUuid {
        uuid: current,
        weak_nodes: NodeMask::EMPTY,
    };
    check(14, Stream::Data, p124(), 0, &Packet::CurrentUuid(diskless));
}

#[test]
fn v15_v16_state_in_both_numberings() {
    let mut expected = PeerState {
        role: Role::Secondary,
        peer: Role::Primary,
        conn: ConnState::Connected,
        repl: ReplState::Established,
        disk: DiskState::UpToDate,
        pdsk: DiskState::UpToDate,
        susp: false,
        aftr_isp: false,
        peer_isp: false,
        user_isp: false,
        susp_nod: false,
        susp_fen: false,
        quorum: true,
    };
    check(15, Stream::Data, p124(), 0, &Packet::State(expected));
    expected.quorum = false;
    check(16, Stream::Data, p101(), 0, &Packet::State(expected));
}

fn write(seq_num: u32, flags: DataFlags) -> Data {
    Data {
        sector: Sector(2048),
        block_id: ID,
        seq_num,
        flags,
        digest: Digest::EMPTY,
        payload_len: 512,
    }
}

#[test]
fn v17_v18_v19_data() {
    let mut data = write(1, DataFlags::SEND_WRITE_ACK | DataFlags::RW_SYNC);
    check(17, Stream::Data, p124(), 0, &Packet::Data(data));
    assert_eq!(vector(17)[40..], [0x5a; 8]);

    data.digest = Digest::new(&[0x2a, 0x6a, 0xc0, 0x10]).unwrap();
    let dialect = Dialect {
        integrity_len: 4,
        ..p124()
    };
    check(18, Stream::Data, dialect, 0, &Packet::Data(data));

    let mut large = write(1, DataFlags::RW_SYNC);
    large.sector = Sector(0);
    large.payload_len = 65_536;
    let dialect = Dialect::new(97, Features::empty());
    check(19, Stream::Data, dialect, 0, &Packet::Data(large));
}

#[test]
fn v20_v21_trim_and_zeroes() {
    let mut trim = Trim {
        sector: Sector(4096),
        block_id: ID,
        seq_num: 2,
        flags: DataFlags::DISCARD | DataFlags::SEND_WRITE_ACK,
        size_bytes: 1 << 20,
    };
    check(20, Stream::Data, p124(), 0, &Packet::Trim(trim));
    trim.sector = Sector(8192);
    trim.seq_num = 3;
    trim.flags |= DataFlags::ZEROES;
    trim.size_bytes = 65_536;
    check(21, Stream::Data, p124(), 0, &Packet::Zeroes(trim));
}

#[test]
fn v22_to_v28_acks_and_tags() {
    let ack = BlockAck {
        sector: Sector(2048),
        block_id: ID,
        size_bytes: 512,
        seq_num: 1,
    };
    check(22, Stream::Control, p124(), 0, &Packet::WriteAck(ack));
    let barrier = 0x0700_0000;
    check(
        23,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::Barrier(Barrier { barrier }),
    );
    let ack = BarrierAck {
        barrier,
        set_size: 3,
    };
    check(
        24,
        Stream::Control,
        p124(),
        0xFFFF,
        &Packet::BarrierAck(ack),
    );
    let stable = ConfirmStable {
        oldest_block_id: ID,
        youngest_block_id: BlockId(0x1112_1314_1516_1718),
        set_size: 2,
    };
    check(
        25,
        Stream::Control,
        p124(),
        0xFFFF,
        &Packet::ConfirmStable(stable),
    );
    check(
        26,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::Dagtag(Dagtag(4096)),
    );
    let ack = PeerAck {
        mask: NodeMask(7),
        dagtag: Dagtag(4097),
    };
    check(27, Stream::Control, p124(), 0xFFFF, &Packet::PeerAck(ack));
    let same = PeersInSync {
        sector: Sector(0),
        mask: NodeMask(5),
        size_bytes: 4 << 20,
    };
    check(28, Stream::Control, p124(), 0, &Packet::PeersInSync(same));
}

#[test]
fn v29_v30_v31_requests() {
    let mut request = BlockRequest {
        sector: Sector(2048),
        block_id: ID,
        size_bytes: 4096,
    };
    check(29, Stream::Data, p124(), 0, &Packet::DataRequest(request));
    request = BlockRequest {
        sector: Sector(0),
        block_id: BlockId::SYNCER,
        size_bytes: 32_768,
    };
    check(30, Stream::Data, p101(), 0, &Packet::RsDataRequest(request));
    let request = DagtagRequest {
        sector: Sector(0),
        block_id: ID,
        size_bytes: 1 << 20,
        dagtag_node_id: NodeId(0),
        dagtag: Dagtag(4097),
    };
    check(31, Stream::Data, p124(), 0, &Packet::RsDagtagReq(request));
}

#[test]
fn v32_v33_v34_verify_and_out_of_sync() {
    let block_id = BlockId::OV_OUT_OF_SYNC;
    let old = BlockAck {
        sector: Sector(8),
        block_id,
        size_bytes: 4096,
        seq_num: 9,
    };
    check(32, Stream::Control, p101(), 0, &Packet::OvResult(old));
    let new = OvResultId {
        sector: Sector(8),
        block_id: ID,
        size_bytes: 4096,
        seq_num: 9,
        result: OvResultCode::OutOfSync,
    };
    check(33, Stream::Control, p124(), 0, &Packet::OvResultId(new));
    let range = BlockDesc {
        sector: Sector(16),
        size_bytes: 8192,
    };
    check(34, Stream::Data, p124(), 0, &Packet::OutOfSync(range));
}

#[test]
fn v35_v36_v37_bitmaps() {
    let sparse = CompressedBitmap {
        first_run: RunKind::Clear,
        pad_bits: 2,
        code: vec![0x03, 0x73, 0xf9, 0x66, 0xfe, 0xac, 0xbc, 0x07],
    };
    check(
        35,
        Stream::Data,
        p124(),
        0,
        &Packet::CompressedBitmap(sparse),
    );
    let code = vec![0x7f, 0xcf, 0xde, 0x03];
    let full = CompressedBitmap {
        first_run: RunKind::Set,
        pad_bits: 3,
        code,
    };
    check(36, Stream::Data, p124(), 0, &Packet::CompressedBitmap(full));
    let bytes = vector(37);
    let words = Packet::Bitmap(BitmapWords {
        words: vec![1, 2, 0, 0, 0, 0, 0, 0x80],
    });
    let used = check_bytes(&bytes, Stream::Data, p124(), 0, &words);
    let end = Packet::Bitmap(BitmapWords::default());
    assert_eq!(
        used + check_bytes(&bytes[used..], Stream::Data, p124(), 0, &end),
        bytes.len()
    );
}

#[test]
fn v38_to_v42_two_phase_commit() {
    let v2 = TwopcFlags::HAS_FLAGS | TwopcFlags::HAS_REACHABLE;
    let head = TwopcHead {
        tid: 0x1234_5678,
        flags: v2,
        initiator_node_id: NodeId(0),
        target_node_id: Some(NodeId(1)),
        nodes_to_reach: NodeMask(!7),
    };
    let change = StateChange {
        mask: StateWord(0x1f3),
        val: StateWord(0x92),
    };
    let connect = TwopcPrepare {
        head,
        primary_nodes: NodeMask::EMPTY,
        change,
    };
    check(
        38,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::TwopcPrepare(connect),
    );

    let promote = TwopcPrepare {
        head: TwopcHead {
            tid: 0xcafe_babe,
            flags: TwopcFlags::empty(),
            initiator_node_id: NodeId(2),
            target_node_id: None,
            nodes_to_reach: NodeMask(!7),
        },
        primary_nodes: NodeMask::EMPTY,
        change: StateChange {
            mask: StateWord::ROLE,
            val: StateWord(Role::Primary.to_wire()),
        },
    };
    let first_layout = Dialect::new(122, features_9().difference(Features::TWOPC_V2));
    check(
        39,
        Stream::Data,
        first_layout,
        0xFFFF,
        &Packet::TwopcPrepare(promote),
    );

    let yes = TwopcReply {
        tid: 0x1234_5678,
        initiator_node_id: NodeId(0),
        reachable_nodes: NodeMask(3),
        primary_nodes: NodeMask::EMPTY,
        word: 0,
    };
    check(40, Stream::Control, p124(), 0xFFFF, &Packet::TwopcYes(yes));

    let commit = TwopcOutcome {
        head,
        primary_nodes: NodeMask::EMPTY,
        word: 7,
    };
    assert_eq!(commit.reachable_nodes(), NodeMask(7));
    check(
        41,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::TwopcCommit(commit),
    );

    let resize = TwopcResize {
        head: TwopcHead {
            tid: 0x0bad_f00d,
            flags: TwopcFlags::HAS_FLAGS,
            initiator_node_id: NodeId(0),
            target_node_id: None,
            nodes_to_reach: NodeMask(!3),
        },
        user_size: Sector(4_194_304),
        dds_flags: DeviceDescFlags::NO_RESYNC,
    };
    check(42, Stream::Data, p124(), 1, &Packet::TwopcPrepRsz(resize));
}

#[test]
fn v43_v44_v45_state_changes_of_84() {
    let change = StateChange {
        mask: StateWord::ROLE,
        val: StateWord(Role::Primary.to_wire()),
    };
    check(43, Stream::Data, p101(), 0, &Packet::StateChgReq(change));
    check(
        44,
        Stream::Control,
        p101(),
        0,
        &Packet::StateChgReply(StateRv::SUCCESS),
    );
    let busy = Packet::ConnStChgReply(StateRv::CONCURRENT_ST_CHG);
    check(45, Stream::Control, p101(), 0xFFFF, &busy);
}

#[test]
fn v46_v47_ping_with_long_and_short_header() {
    check(46, Stream::Control, p124(), 0xFFFF, &Packet::Ping);
    check(47, Stream::Control, Dialect::INITIAL, 0, &Packet::Ping);
    // A ping sent before the version was agreed may arrive behind it.
    let header = decode_header(&vector(47), Stream::Control, &p124())
        .unwrap()
        .unwrap();
    assert_eq!(header.kind, HeaderKind::H80);
    let mut out = Vec::new();
    encode_with(&Packet::Ping, header.volume, header.kind, &p124(), &mut out);
    assert_eq!(out, vector(47));
    assert!(matches!(
        decode_header(&vector(47), Stream::Data, &p124()),
        Err(WireError::Magic { .. })
    ));
}

#[test]
fn v48_v49_v50_flush_and_replication() {
    let flush = FlushRequests { flush_sequence: 5 };
    check(
        48,
        Stream::Data,
        p124(),
        0xFFFF,
        &Packet::FlushRequests(flush),
    );
    let forward = FlushForward {
        flush_sequence: 5,
        initiator_node_id: NodeId(2),
    };
    check(
        49,
        Stream::Control,
        p124(),
        0xFFFF,
        &Packet::FlushForward(forward),
    );
    let next = EnableReplication { enable: false };
    check(
        50,
        Stream::Data,
        p124(),
        0,
        &Packet::EnableReplicationNext(next),
    );
}

#[test]
fn v51_v52_other_transports() {
    let bytes = vector(51);
    let chunk = LbTcpChunk::decode(&bytes).unwrap();
    assert_eq!(
        chunk,
        LbTcpChunk {
            sequence: 1,
            len: 16
        }
    );
    assert_eq!(chunk.encode(), bytes[..8]);
    check_bytes(&bytes[8..], Stream::Control, p124(), 0xFFFF, &Packet::Ping);
    let bytes = vector(52);
    let message = RdmaFlowControl {
        new_data_buffers: 260,
        new_control_buffers: 8,
        credit_of: Stream::Control,
    };
    assert_eq!(
        RdmaFlowControl::decode(bytes.first_chunk().unwrap()),
        Ok(message)
    );
    assert_eq!(message.encode(), bytes[..]);
}

/// Header of protocol 100 and later.
fn header100(volume: u16, command: u16, len: u32) -> Vec<u8> {
    let mut bytes = vec![0x86, 0x20, 0xEC, 0x20];
    bytes.extend_from_slice(&volume.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes
}

/// A kernel that is asked for it while it connects sends it before its features.
#[test]
fn the_answer_to_a_flush_is_read_before_a_version_is_agreed() {
    let short = [0x83, 0x74, 0x02, 0x67, 0x00, 0x57, 0x00, 0x0c];
    for mut bytes in [short.to_vec(), header100(0xffff, 0x57, 12)] {
        let header = decode_header(&bytes, Stream::Data, &Dialect::INITIAL);
        let header = header.unwrap().unwrap();
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1]);
        let body = &bytes[header.kind.len()..];
        let packet = decode(&header, body, &Dialect::INITIAL);
        let ack = FlushRequestsAck {
            flush_sequence: 5,
            primary_node_id: NodeId::new(1).unwrap(),
        };
        assert_eq!(packet, Ok(Packet::FlushRequestsAck(ack)));
    }
    // Nothing else of its kind is, and no older version has it.
    for command in [0x55, 0x56] {
        let header = header100(0, command, if command == 0x55 { 8 } else { 12 });
        assert!(decode_header(&header, Stream::Data, &Dialect::INITIAL).is_err());
        assert!(decode_header(&header, Stream::Control, &Dialect::INITIAL).is_err());
    }
    let header = header100(0, 0x57, 12);
    assert!(decode_header(&header, Stream::Data, &p101()).is_err());
}

#[test]
fn a_header_that_breaks_a_rule_is_refused() {
    let data = |command, len| decode_header(&header100(0, command, len), Stream::Data, &p124());
    let ctl = |command, len| decode_header(&header100(0, command, len), Stream::Control, &p124());
    // Unknown, reserved and never used commands.
    for command in [0x05, 0x06, 0x25, 0x37, 0x5a, 0x100, 0xffff] {
        assert!(
            matches!(data(command, 0), Err(WireError::UnknownCommand { .. })),
            "{command:x}"
        );
    }
    // Each stream has its own commands.
    assert!(matches!(ctl(0x03, 8), Err(WireError::WrongStream { .. })));
    assert!(matches!(data(0x16, 24), Err(WireError::WrongStream { .. })));
    // Lengths.
    assert!(matches!(ctl(0x16, 25), Err(WireError::Length { .. })));
    assert!(matches!(data(0x00, 24), Err(WireError::Length { .. })));
    assert!(matches!(
        data(0x00, 24 + (1 << 20) + 512),
        Err(WireError::Length { .. })
    ));
    assert!(matches!(
        data(0x00, 24 + 513),
        Err(WireError::Granularity { .. })
    ));
    assert!(matches!(data(0x04, 4088), Err(WireError::Length { .. })));
    assert!(data(0x04, 4080).is_ok());
    assert!(matches!(
        data(0x42, u32::MAX),
        Err(WireError::Length { .. })
    ));
    assert!(matches!(data(0x0d, 32), Err(WireError::Length { .. })));
    // Versions and features.
    assert!(matches!(data(0x12, 8), Err(WireError::NotInDialect { .. })));
    let old = header100(0, 0x53, 32);
    assert!(matches!(
        decode_header(&old, Stream::Control, &p101()),
        Err(WireError::NotInDialect { .. })
    ));
    // The pad is checked.
    let mut bad_pad = header100(0, 0x13, 0);
    bad_pad[15] = 1;
    assert!(matches!(
        decode_header(&bad_pad, Stream::Control, &p124()),
        Err(WireError::HeaderPad { .. })
    ));
    // Fewer bytes are no error yet.
    assert_eq!(
        decode_header(&old[..15], Stream::Control, &p124()),
        Ok(None)
    );
}

#[test]
fn a_field_without_meaning_is_refused() {
    let refused = |command: u16, body: &[u8], dialect: &Dialect| {
        let bytes = header100(0, command, body.len() as u32);
        let stream = if matches!(command, 0x53 | 0x45) {
            Stream::Control
        } else {
            Stream::Data
        };
        let header = decode_header(&bytes, stream, dialect).unwrap().unwrap();
        assert!(
            matches!(decode(&header, body, dialect), Err(WireError::Field { .. })),
            "{command:x} {body:x?}"
        );
    };
    refused(0x0e, &[0, 0, 0, 3], &p124()); // role 3
    refused(0x0e, &[0, 0, 0x13, 2], &p101()); // disk 9 in the numbering of 8.4
    refused(0x0b, &[0; 25], &p124()); // replication protocol 0
    refused(0x08, &[0; 24], &p124()); // a read of no bytes
    refused(0x31, &[0xFF; 28], &p124()); // a discard of 4 GiB
    refused(0x58, &[2, 0, 0, 0], &p124());
    refused(0x24, &[0x23, 0], &p124()); // code 3
    let mut many_slots = [0; 40];
    many_slots[39] = 1;
    refused(0x42, &many_slots, &p124()); // one slot, no UUID for it
    many_slots[35] = 1;
    refused(0x42, &many_slots, &p124()); // node 32
    refused(0x43, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32], &p124());
    let mut name = [0; 24 + 64];
    name[3] = 3;
    name[24..].fill(b'x');
    refused(0x0b, &name, &p124()); // a name without end
}

#[test]
fn a_body_shorter_than_the_header_says_is_an_error_not_a_panic() {
    let bytes = vector(13);
    let header = decode_header(&bytes, Stream::Data, &p124())
        .unwrap()
        .unwrap();
    for len in 0..bytes.len() - 16 {
        let result = decode(&header, &bytes[16..16 + len], &p124());
        assert!(matches!(result, Err(WireError::ShortBody { .. })), "{len}");
    }
}

#[test]
fn state_changes_are_mirrored() {
    // "Disconnecting, and the peer's disk becomes Outdated" seen from the peer.
    let change = StateChange {
        mask: StateWord(0x1f0 | 0x1e000),
        val: StateWord(0x10 | 6 << 13),
    };
    let seen = change.mirrored();
    assert_eq!(seen.mask, StateWord(0x1f0 | 0x1e00));
    assert_eq!(seen.val, StateWord(0x70 | 6 << 9));
}
