//! What the fuzzers call: the decoders with bytes of a hostile peer, and the properties that must
//! hold whatever the bytes are. Shared by the smoke test here and the targets in `/fuzz`.

use lockstep_format::wire::packet::{CompressedBitmap, RunKind};
use lockstep_format::wire::vli::{Pushed, RUN_MAX, RleDecoder, RleEncoder, for_each_set_run};
use lockstep_format::wire::{
    Dialect, Features, Header, HeaderKind, MAGIC_80, MAGIC_95, MAGIC_100, Packet, Stream,
    WireError, decode, decode_header, decode_initial, encode_with,
};

/// Bytes in front of a packet that choose dialect and stream.
pub(crate) const CHOICE_LEN: usize = 6;

/// The first byte chooses the version, the second stream and digest, the next four the features;
/// then follow header and body, whose magic is replaced by that of `kind`.
pub(crate) fn wire_decode(kind: HeaderKind, data: &[u8]) {
    let Some((choice, packet)) = data.split_first_chunk::<CHOICE_LEN>() else {
        return;
    };
    let versions = [
        0, 86, 87, 88, 90, 94, 95, 99, 100, 101, 118, 121, 122, 123, 124, 124,
    ];
    let dialect = Dialect {
        protocol: versions[usize::from(choice[0] & 15)],
        features: Features::from_bits_retain(u32::from_be_bytes([
            choice[2], choice[3], choice[4], choice[5],
        ])),
        integrity_len: choice[1] & 63,
    };
    let stream = if choice[1] & 0x80 == 0 {
        Stream::Data
    } else {
        Stream::Control
    };
    let mut bytes = packet.to_vec();
    let magic = match kind {
        HeaderKind::H80 => MAGIC_80.to_be_bytes().to_vec(),
        HeaderKind::H95 => MAGIC_95.to_be_bytes().to_vec(),
        HeaderKind::H100 => MAGIC_100.to_be_bytes().to_vec(),
    };
    for (place, byte) in bytes.iter_mut().zip(magic) {
        *place = byte;
    }
    if kind == HeaderKind::H100 && choice[0] & 0x80 == 0 {
        // A wrong pad ends everything, so most inputs get a right one.
        for byte in bytes.iter_mut().take(16).skip(12) {
            *byte = 0;
        }
    }
    let _ = decode_initial(&bytes);
    let header = match decode_header(&bytes, stream, &dialect) {
        Ok(Some(header)) => header,
        Ok(None) => {
            assert!(bytes.len() < 16, "a whole header is decoded or refused");
            return;
        }
        Err(_) => return,
    };
    body(&header, &bytes[header.kind.len()..], stream, &dialect);
}

fn body(header: &Header, body: &[u8], stream: Stream, dialect: &Dialect) {
    let need = header.fixed_len(dialect);
    assert!(need <= 4096, "memory for a packet is bounded");
    assert_eq!(
        need as u64 + u64::from(header.payload_len(dialect)),
        u64::from(header.len)
    );
    let result = decode(header, body, dialect);
    if body.len() < need {
        assert!(matches!(result, Err(WireError::ShortBody { .. })));
        return;
    }
    let packet = match result {
        Ok(packet) => packet,
        Err(error) => {
            assert!(matches!(error, WireError::Field { .. }), "{error:?}");
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(packet.command(), header.command);
    assert_eq!(packet.payload_len(), header.payload_len(dialect));
    let mut out = Vec::new();
    encode_with(&packet, header.volume, header.kind, dialect, &mut out);
    let again = decode_header(&out, stream, dialect)
        .expect("what we send is a packet")
        .expect("what we send is whole");
    assert_eq!(
        (again.command, again.volume),
        (header.command, header.volume)
    );
    let repeated = decode(&again, &out[again.kind.len()..], dialect);
    assert_eq!(repeated.as_ref(), Ok(&packet));
    if let Packet::CompressedBitmap(bitmap) = &packet {
        runs(bitmap);
    }
}

/// The first byte is the encoding of a compressed bitmap, the rest its code; the same bytes are
/// also taken as lengths of runs.
pub(crate) fn vli(data: &[u8]) {
    let Some((encoding, code)) = data.split_first() else {
        return;
    };
    let first_run = if encoding & 0x80 == 0 {
        RunKind::Clear
    } else {
        RunKind::Set
    };
    runs(&CompressedBitmap {
        first_run,
        pad_bits: encoding >> 4 & 7,
        code: code.to_vec(),
    });

    let mut encoder = RleEncoder::new(first_run, code.len());
    let mut pushed = Vec::new();
    for length in code.chunks(8) {
        let length = length
            .iter()
            .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        // Lengths of all magnitudes, not only huge ones.
        let run = (length >> (length & 63)).clamp(1, RUN_MAX);
        match encoder.push(run) {
            Pushed::Fits => pushed.push(run),
            Pushed::Full => break,
        }
    }
    assert_eq!(encoder.covered_bits(), pushed.iter().sum::<u64>());
    let packet = encoder.finish();
    assert!(packet.code.len() <= code.len(), "the room was said");
    let decoded: Result<Vec<_>, _> = RleDecoder::new(&packet).collect();
    let decoded: Vec<_> = decoded
        .expect("own code is sound")
        .into_iter()
        .map(|r| r.1)
        .collect();
    assert_eq!(decoded, pushed);
}

fn runs(packet: &CompressedBitmap) {
    let runs: Result<Vec<_>, _> = RleDecoder::new(packet).collect();
    let mut count = 0_usize;
    let walked = for_each_set_run(packet, 3, 1 << 40, |at, run| {
        assert!(run >= 1 && at + run <= 1 << 40);
        count += 1;
    });
    assert!(count <= packet.code.len() * 4, "a run needs two bits");
    let Ok(runs) = runs else {
        assert!(walked.is_err());
        return;
    };
    assert!(runs.iter().all(|(_, run)| (1..=RUN_MAX).contains(run)));
    if runs.is_empty() {
        return;
    }
    // Each length has one code word, so sound code comes back, but for what the pad holds.
    let mut encoder = RleEncoder::new(packet.first_run, packet.code.len());
    for (_, run) in &runs {
        assert_eq!(encoder.push(*run), Pushed::Fits);
    }
    let again = encoder.finish();
    let mut expected = packet.clone();
    if let Some(last) = expected.code.last_mut() {
        *last &= 0xFF >> expected.pad_bits;
    }
    assert_eq!(again, expected);
}
