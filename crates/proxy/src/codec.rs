//! The codecs: pure functions from raw chunk to payload and back. Decoding is bounded by the
//! declared raw length, and the checksum of the raw bytes is verified before anybody sees them.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::sync::Arc;

use crate::core::frame::{Bytes, CHUNK_MAX};
use crate::core::history::{Prefix, joined};
use crate::core::plugin::{
    CODEC_HISTORY, CODEC_LZ4, CODEC_LZMA, CODEC_NONE, CODEC_ZERO, CODEC_ZLIB, CODEC_ZSTD,
    CodecSpec, Lzma, MatchFinder,
};
use crate::room;

/// A chunk ready for the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) codec: u8,
    /// CRC-32C of the raw bytes.
    pub(crate) crc: u32,
    pub(crate) payload: Bytes,
}

/// Why a payload does not give back its chunk. Fatal for the stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("codec number {0} is unknown to this proxy")]
    Codec(u8),
    #[error("the payload is damaged: {0}")]
    Payload(String),
    #[error("the payload holds {found} bytes, its frame promised {expected}")]
    Length { found: usize, expected: usize },
    #[error("checksum mismatch after decompression")]
    Crc,
}

/// Chunks shorter than this are never worth a codec.
pub(crate) const CODEC_MIN: usize = 512;

thread_local! {
    static ZSTD: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> =
        const { RefCell::new(None) };
    static UNZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> =
        const { RefCell::new(None) };
    /// Room for what a codec makes of a chunk, before its size is known.
    static ROOM: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Codes one chunk. What does not shrink is sent as it is; zeros need no bytes at all. `prefix` is
/// what a codec with history may refer to.
pub(crate) fn encode(spec: &CodecSpec, raw: &Bytes, prefix: &Prefix) -> Encoded {
    let crc = crc32c::crc32c(raw);
    let plain = |payload: &Bytes| Encoded {
        codec: CODEC_NONE,
        crc,
        payload: Arc::clone(payload),
    };
    if raw.len() >= CODEC_MIN && is_zero(raw) {
        return Encoded {
            codec: CODEC_ZERO,
            crc,
            payload: Arc::default(),
        };
    }
    if raw.len() < CODEC_MIN {
        return plain(raw);
    }
    match compress(spec, raw, prefix) {
        Some(payload) if payload.len() < raw.len() => Encoded {
            codec: spec.code(),
            crc,
            payload: Arc::new(room::fitted(payload).into()),
        },
        _ => plain(raw),
    }
}

/// Gives back the raw chunk, or says why not. Never returns more than `raw_len` bytes.
pub(crate) fn decode(
    codec: u8,
    raw_len: usize,
    crc: u32,
    payload: &Bytes,
    prefix: &Prefix,
) -> Result<Bytes, DecodeError> {
    if raw_len > CHUNK_MAX {
        return Err(DecodeError::Length {
            found: raw_len,
            expected: CHUNK_MAX,
        });
    }
    let damaged = |error: &dyn std::fmt::Display| DecodeError::Payload(error.to_string());
    let raw: Bytes = match codec {
        CODEC_NONE => Arc::clone(payload),
        CODEC_ZERO if payload.is_empty() => Arc::new(vec![0; raw_len].into()),
        CODEC_ZERO => return Err(DecodeError::Payload("bytes after a zero chunk".into())),
        CODEC_LZ4 => {
            let mut out = room::filled(raw_len);
            let len = lz4_flex::block::decompress_into(payload, &mut out)
                .map_err(|error| damaged(&error))?;
            out.truncate(len);
            Arc::new(out.into())
        }
        CODEC_ZSTD => {
            // Not more than there is room for is written; the length is checked below.
            let mut out = room::empty(raw_len);
            let done: std::io::Result<usize> = UNZSTD.with_borrow_mut(|slot| {
                let context = match slot {
                    Some(context) => context,
                    None => slot.insert(zstd::bulk::Decompressor::new()?),
                };
                context.decompress_to_buffer(payload, &mut out)
            });
            done.map_err(|error| damaged(&error))?;
            Arc::new(out.into())
        }
        CODEC_ZLIB => {
            let decoder = flate2::read::ZlibDecoder::new(payload.as_slice());
            Arc::new(
                read_bounded(decoder, raw_len)
                    .map_err(|error| damaged(&error))?
                    .into(),
            )
        }
        CODEC_LZMA => {
            let mut options =
                liblzma::stream::LzmaOptions::new_preset(0).map_err(|error| damaged(&error))?;
            options.dict_size(CHUNK_MAX as u32);
            let mut filters = liblzma::stream::Filters::new();
            filters.lzma2(&options);
            let stream = liblzma::stream::Stream::new_raw_decoder(&filters)
                .map_err(|error| damaged(&error))?;
            let decoder = liblzma::read::XzDecoder::new_stream(payload.as_slice(), stream);
            Arc::new(
                read_bounded(decoder, raw_len)
                    .map_err(|error| damaged(&error))?
                    .into(),
            )
        }
        CODEC_HISTORY => {
            let before = joined(prefix);
            if prefix_len(payload) != Some(before.len() as u64) {
                return Err(DecodeError::Payload("another history is meant".into()));
            }
            let mut out = vec![0; raw_len];
            let len = with_history(&before, &payload[PREFIX_LEN..], &mut out)
                .map_err(|name| DecodeError::Payload(name.into()))?;
            out.truncate(len);
            Arc::new(out.into())
        }
        other => return Err(DecodeError::Codec(other)),
    };
    if raw.len() != raw_len {
        return Err(DecodeError::Length {
            found: raw.len(),
            expected: raw_len,
        });
    }
    if crc32c::crc32c(&raw) != crc {
        return Err(DecodeError::Crc);
    }
    Ok(raw)
}

/// Whether lz4 finds anything in a sample of the chunk; a cheap guess for the automatic choice.
pub(crate) fn looks_compressible(raw: &[u8]) -> bool {
    let start = raw.len().saturating_sub(SAMPLE) / 2;
    let sample = &raw[start..raw.len().min(start + SAMPLE)];
    let mut out = vec![0; lz4_flex::block::get_maximum_output_size(sample.len())];
    lz4_flex::block::compress_into(sample, &mut out)
        .is_ok_and(|len| len * 105 <= sample.len() * 100)
}

const SAMPLE: usize = 64 << 10;

/// A payload with history begins with the count of bytes that it refers to.
const PREFIX_LEN: usize = 4;
/// Log2 of the largest window: the longest history and a chunk.
const WINDOW_LOG_MAX: u32 = 28;

/// Bytes before the chunk that a payload with history refers to.
pub(crate) fn prefix_len(payload: &[u8]) -> Option<u64> {
    let (len, _) = payload.split_first_chunk::<PREFIX_LEN>()?;
    Some(u64::from(u32::from_le_bytes(*len)))
}

fn compress_with_history(level: i32, before: &[u8], raw: &[u8]) -> Option<Vec<u8>> {
    use zstd::zstd_safe::{CCtx, CParameter, compress_bound};
    let window = (before.len() + raw.len()).next_power_of_two().ilog2();
    let mut context = CCtx::try_create()?;
    for parameter in [
        CParameter::CompressionLevel(level),
        CParameter::WindowLog(window.clamp(10, WINDOW_LOG_MAX)),
        CParameter::EnableLongDistanceMatching(true),
    ] {
        context.set_parameter(parameter).ok()?;
    }
    context.ref_prefix(before).ok()?;
    let mut out = vec![0; PREFIX_LEN + compress_bound(raw.len())];
    out[..PREFIX_LEN].copy_from_slice(&(before.len() as u32).to_le_bytes());
    let len = context.compress2(&mut out[PREFIX_LEN..], raw).ok()?;
    out.truncate(PREFIX_LEN + len);
    Some(out)
}

fn with_history(before: &[u8], coded: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
    use zstd::zstd_safe::{DCtx, DParameter, get_error_name};
    let mut context = DCtx::try_create().ok_or("no memory")?;
    context
        .set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))
        .map_err(get_error_name)?;
    context.ref_prefix(before).map_err(get_error_name)?;
    context.decompress(out, coded).map_err(get_error_name)
}

fn compress(spec: &CodecSpec, raw: &[u8], prefix: &Prefix) -> Option<Vec<u8>> {
    match spec {
        CodecSpec::None => None,
        CodecSpec::Lz4 => ROOM.with_borrow_mut(|room| {
            let most = lz4_flex::block::get_maximum_output_size(raw.len());
            room.resize(most.max(room.len()), 0);
            let len = lz4_flex::block::compress_into(raw, room).ok()?;
            (len < raw.len()).then(|| room::copied(&room[..len]))
        }),
        CodecSpec::Zstd { level } => ZSTD.with_borrow_mut(|slot| {
            if slot.as_ref().is_none_or(|(held, _)| held != level) {
                *slot = Some((*level, zstd::bulk::Compressor::new(*level).ok()?));
            }
            let context = &mut slot.as_mut()?.1;
            ROOM.with_borrow_mut(|room| {
                let most = zstd::zstd_safe::compress_bound(raw.len());
                room.resize(most.max(room.len()), 0);
                let len = context.compress_to_buffer(raw, &mut room[..]).ok()?;
                (len < raw.len()).then(|| room::copied(&room[..len]))
            })
        }),
        CodecSpec::Zlib { level } => {
            let sink = Vec::with_capacity(raw.len() / 2);
            let level = flate2::Compression::new(*level);
            let mut encoder = flate2::write::ZlibEncoder::new(sink, level);
            encoder.write_all(raw).ok()?;
            encoder.finish().ok()
        }
        CodecSpec::History { level, .. } => compress_with_history(*level, &joined(prefix), raw),
        CodecSpec::Lzma(lzma) => {
            let mut filters = liblzma::stream::Filters::new();
            filters.lzma2(&lzma_options(lzma, raw.len())?);
            let stream = liblzma::stream::Stream::new_raw_encoder(&filters).ok()?;
            let mut encoder =
                liblzma::write::XzEncoder::new_stream(Vec::with_capacity(raw.len() / 2), stream);
            encoder.write_all(raw).ok()?;
            encoder.finish().ok()
        }
    }
}

fn lzma_options(lzma: &Lzma, raw_len: usize) -> Option<liblzma::stream::LzmaOptions> {
    use liblzma::stream::{LzmaOptions, MatchFinder as Finder, Mode};
    let mut options = LzmaOptions::new_preset(lzma.level).ok()?;
    let useful = (raw_len as u32)
        .next_power_of_two()
        .clamp(4096, CHUNK_MAX as u32);
    options
        .dict_size(lzma.dict_bytes.unwrap_or(useful).min(useful))
        .literal_context_bits(lzma.lc)
        .literal_position_bits(lzma.lp)
        .position_bits(lzma.pb);
    if let Some(finder) = lzma.mf {
        let (finder, least) = match finder {
            MatchFinder::Hc3 => (Finder::HashChain3, 3),
            MatchFinder::Hc4 => (Finder::HashChain4, 4),
            MatchFinder::Bt2 => (Finder::BinaryTree2, 2),
            MatchFinder::Bt3 => (Finder::BinaryTree3, 3),
            MatchFinder::Bt4 => (Finder::BinaryTree4, 4),
        };
        options.match_finder(finder);
        if let Some(nice_len) = lzma.nice_len {
            options.nice_len(nice_len.max(least));
        }
    } else if let Some(nice_len) = lzma.nice_len {
        options.nice_len(nice_len.max(4));
    }
    if let Some(fast) = lzma.fast {
        options.mode(if fast { Mode::Fast } else { Mode::Normal });
    }
    if lzma.depth > 0 {
        options.depth(lzma.depth);
    }
    Some(options)
}

/// Reads at most one byte more than `limit`, so that a bomb is seen and costs nothing.
fn read_bounded(reader: impl Read, limit: usize) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::with_capacity(limit + 1);
    reader.take(limit as u64 + 1).read_to_end(&mut out)?;
    Ok(out)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.first() == Some(&0) && bytes[..bytes.len() - 1] == bytes[1..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::plugin::{Choice, Plugin};
    use crate::core::rng::Rng;

    fn specs() -> Vec<CodecSpec> {
        [
            "none",
            "lz4",
            "zstd level 1",
            "zstd level -5",
            "zstd level 12",
            "zlib level 1",
            "zlib level 9",
            "lzma level 1",
            "lzma level 6 dict-size 4096 lc 0 lp 2 pb 0 nice-len 64 mf bt4 mode normal depth 10",
            "lzma mf hc3 nice-len 0 mode fast",
            "lzma mf bt2 nice-len 2",
        ]
        .iter()
        .map(|text| {
            match Plugin::parse(&text.split_whitespace().collect::<Vec<_>>())
                .unwrap()
                .choice
            {
                Choice::Fixed(spec) => spec,
                Choice::Auto { .. } => unreachable!(),
            }
        })
        .collect()
    }

    fn texty(len: usize, seed: u64) -> Bytes {
        let mut rng = Rng::new(seed);
        let words = ["sector ", "block ", "replica ", "epoch ", "barrier "];
        let mut out = Vec::new();
        while out.len() < len {
            out.extend_from_slice(words[rng.below(5) as usize].as_bytes());
        }
        out.truncate(len);
        Arc::new(out.into())
    }

    #[test]
    fn every_codec_gives_back_what_it_got_and_shrinks_text() {
        for spec in specs() {
            for len in [0, 1, 511, 512, 4096, 100_000] {
                let raw = texty(len, 5);
                let coded = encode(&spec, &raw, &Prefix::new());
                assert_eq!(
                    decode(coded.codec, len, coded.crc, &coded.payload, &Prefix::new()),
                    Ok(raw)
                );
                if len >= 4096 && spec != CodecSpec::None {
                    assert_eq!(coded.codec, spec.code(), "{spec}");
                    assert!(coded.payload.len() * 3 < len * 2, "{spec}");
                }
            }
        }
    }

    #[test]
    fn noise_is_sent_as_it_is_and_zeros_as_nothing() {
        let mut rng = Rng::new(3);
        let noise: Bytes = Arc::new(
            (0..65536)
                .map(|_| rng.next() as u8)
                .collect::<Vec<u8>>()
                .into(),
        );
        assert!(!looks_compressible(&noise));
        assert!(looks_compressible(&texty(65536, 1)));
        let zeros: Bytes = Arc::new(vec![0; 65536].into());
        for spec in specs() {
            assert_eq!(
                encode(&spec, &noise, &Prefix::new()).codec,
                CODEC_NONE,
                "{spec}"
            );
            let coded = encode(&spec, &zeros, &Prefix::new());
            assert_eq!((coded.codec, coded.payload.len()), (CODEC_ZERO, 0));
            assert_eq!(
                decode(CODEC_ZERO, 65536, coded.crc, &coded.payload, &Prefix::new()),
                Ok(zeros.clone())
            );
        }
    }

    #[test]
    fn a_bomb_is_refused_at_its_declared_length() {
        let raw: Bytes = Arc::new(
            [texty(4096, 1).as_slice(), &vec![7; 1 << 20]].concat()[..CHUNK_MAX]
                .to_vec()
                .into(),
        );
        for spec in specs().into_iter().filter(|spec| *spec != CodecSpec::None) {
            let coded = encode(&spec, &raw, &Prefix::new());
            let result = decode(coded.codec, 4096, coded.crc, &coded.payload, &Prefix::new());
            assert!(result.is_err(), "{spec}");
        }
        assert!(
            decode(
                CODEC_NONE,
                CHUNK_MAX + 1,
                0,
                &Arc::default(),
                &Prefix::new()
            )
            .is_err()
        );
    }

    #[test]
    fn damaged_payloads_are_errors_and_never_wrong_bytes() {
        let raw = texty(20_000, 9);
        let mut rng = Rng::new(11);
        for spec in specs() {
            let coded = encode(&spec, &raw, &Prefix::new());
            for _ in 0..60 {
                let mut payload = coded.payload.to_vec();
                match rng.below(3) {
                    0 => payload.truncate(rng.below(payload.len() as u64) as usize),
                    1 => {
                        let at = rng.below(payload.len() as u64) as usize;
                        payload[at] ^= 1 << rng.below(8);
                    }
                    _ => payload.extend((0..1 + rng.below(9)).map(|_| rng.next() as u8)),
                }
                // Bytes after the end of a compressed stream may go unseen by a decoder.
                if let Ok(back) = decode(
                    coded.codec,
                    20_000,
                    coded.crc,
                    &Arc::new(payload.into()),
                    &Prefix::new(),
                ) {
                    assert_eq!(back, raw, "{spec}");
                }
            }
        }
    }

    #[test]
    fn random_bytes_in_every_decoder_never_panic() {
        let mut rng = Rng::new(17);
        for round in 0..1200u64 {
            let len = rng.below(400) as usize;
            let payload: Bytes = Arc::new(
                (0..len)
                    .map(|_| rng.next() as u8)
                    .collect::<Vec<u8>>()
                    .into(),
            );
            let raw_len = rng.below(70_000) as usize;
            let result = decode(
                (round % 8) as u8,
                raw_len,
                rng.next() as u32,
                &payload,
                &Prefix::new(),
            );
            assert!(result.is_err());
        }
    }

    #[test]
    fn a_repeated_block_costs_next_to_nothing_with_history_and_needs_the_same_history() {
        let mut rng = Rng::new(23);
        let noise: Bytes = Arc::new(
            (0..300_000)
                .map(|_| rng.next() as u8)
                .collect::<Vec<u8>>()
                .into(),
        );
        let other: Bytes = Arc::new(
            (0..200_000)
                .map(|_| rng.next() as u8)
                .collect::<Vec<u8>>()
                .into(),
        );
        let prefix = vec![Arc::clone(&noise), Arc::clone(&other)];
        let spec = CodecSpec::History {
            level: 3,
            bytes: 8 << 20,
        };
        let coded = encode(&spec, &noise, &prefix);
        assert_eq!(coded.codec, CODEC_HISTORY);
        assert!(coded.payload.len() < 1000, "{}", coded.payload.len());
        assert_eq!(prefix_len(&coded.payload), Some(500_000));
        let back =
            |prefix: &Prefix| decode(CODEC_HISTORY, 300_000, coded.crc, &coded.payload, prefix);
        assert_eq!(back(&prefix), Ok(Arc::clone(&noise)));
        assert_eq!(
            back(&vec![Arc::new([&noise[..], &other[..]].concat().into())]),
            Ok(Arc::clone(&noise))
        );
        assert!(back(&vec![other, noise]).is_err(), "other bytes before it");
        assert!(back(&Prefix::new()).is_err());
    }
}
