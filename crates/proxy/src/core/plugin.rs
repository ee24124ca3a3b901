//! The compression plugins of `drbd.conf`: names, keys, ranges, defaults, and the text form that
//! `show proxy-settings` gives back word by word.

use super::history::{HISTORY_MAX, HISTORY_MIN};

/// Numbers of the codecs on the wire.
pub(crate) const CODEC_NONE: u8 = 0;
pub(crate) const CODEC_ZERO: u8 = 1;
pub(crate) const CODEC_LZ4: u8 = 2;
pub(crate) const CODEC_ZSTD: u8 = 3;
pub(crate) const CODEC_ZLIB: u8 = 4;
pub(crate) const CODEC_LZMA: u8 = 5;
/// zstd that refers to the bytes before the chunk.
pub(crate) const CODEC_HISTORY: u8 = 6;
/// Count of codecs, for tables indexed by the number.
pub(crate) const CODEC_COUNT: usize = 7;
/// Names of the codecs by number.
pub(crate) const CODEC_NAMES: [&str; CODEC_COUNT] = [
    "none",
    "zero",
    "lz4",
    "zstd",
    "zlib",
    "lzma",
    "zstd-history",
];

/// Longest chain that drbdadm can send.
pub(crate) const CHAIN_MAX: usize = 10;

/// Match finder of the lzma encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MatchFinder {
    Hc3,
    Hc4,
    Bt2,
    Bt3,
    Bt4,
}

/// Options of the lzma encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lzma {
    pub(crate) level: u32,
    /// Concurrent jobs of one connection; 0 is the count of workers.
    pub(crate) contexts: u32,
    pub(crate) dict_bytes: Option<u32>,
    pub(crate) lc: u32,
    pub(crate) lp: u32,
    pub(crate) pb: u32,
    pub(crate) nice_len: Option<u32>,
    pub(crate) mf: Option<MatchFinder>,
    pub(crate) fast: Option<bool>,
    pub(crate) depth: u32,
    pub(crate) fallback_to_zlib: bool,
}

/// How one chunk is to be coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CodecSpec {
    None,
    Lz4,
    Zstd {
        level: i32,
    },
    Zlib {
        level: u32,
    },
    Lzma(Lzma),
    /// zstd with up to `bytes` of the stream before the chunk in its window.
    History {
        level: i32,
        bytes: u64,
    },
}

/// What the automatic choice aims at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Drain fast, keep the processors free.
    Speed,
    /// Fewest bytes on the line.
    Save,
}

/// The codec of a connection: one fixed codec or the automatic choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Fixed(CodecSpec),
    Auto { max_level: i32, policy: Policy },
}

/// One plugin as the operator wrote it, and what it means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plugin {
    /// Words joined by one blank; `show proxy-settings` prints exactly this.
    pub(crate) text: String,
    pub(crate) choice: Choice,
    /// Remarks for the operator, not errors.
    pub(crate) warnings: Vec<String>,
}

/// Why a plugin line is refused. Nothing changes then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PluginError {
    #[error("a plugin needs a name: one of none, lz4, zstd, zlib, lzma, auto")]
    Empty,
    #[error("unknown plugin '{0}'; known are none, lz4, zstd, zlib, lzma, auto")]
    Name(String),
    #[error("plugin {plugin}: unknown key '{key}'; known are: {known}")]
    Key {
        plugin: &'static str,
        key: String,
        known: &'static str,
    },
    #[error("plugin {plugin}: key '{key}' has no value")]
    NoValue { plugin: &'static str, key: String },
    #[error("plugin {plugin}: {key} '{value}' is out of range; allowed is {allowed}")]
    Value {
        plugin: &'static str,
        key: String,
        value: String,
        allowed: String,
    },
}

impl CodecSpec {
    /// Number of the codec on the wire.
    pub(crate) fn code(&self) -> u8 {
        match self {
            CodecSpec::None => CODEC_NONE,
            CodecSpec::Lz4 => CODEC_LZ4,
            CodecSpec::Zstd { .. } => CODEC_ZSTD,
            CodecSpec::Zlib { .. } => CODEC_ZLIB,
            CodecSpec::Lzma(_) => CODEC_LZMA,
            CodecSpec::History { .. } => CODEC_HISTORY,
        }
    }
}

impl std::fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CodecSpec::None => f.write_str("none"),
            CodecSpec::Lz4 => f.write_str("lz4"),
            CodecSpec::Zstd { level } => write!(f, "zstd level {level}"),
            CodecSpec::Zlib { level } => write!(f, "zlib level {level}"),
            CodecSpec::Lzma(lzma) => write!(f, "lzma level {}", lzma.level),
            CodecSpec::History { level, bytes } => {
                write!(f, "zstd level {level} history {}M", bytes >> 20)
            }
        }
    }
}

impl Default for Lzma {
    fn default() -> Lzma {
        Lzma {
            level: 4,
            contexts: 0,
            dict_bytes: None,
            lc: 3,
            lp: 0,
            pb: 2,
            nice_len: None,
            mf: None,
            fast: None,
            depth: 0,
            fallback_to_zlib: false,
        }
    }
}

impl Plugin {
    /// Reads `NAME [key value]...`, and the one-word `key value` pairs in any order.
    pub(crate) fn parse(words: &[&str]) -> Result<Plugin, PluginError> {
        let (&name, rest) = words.split_first().ok_or(PluginError::Empty)?;
        let mut warnings = Vec::new();
        let choice = match name.to_ascii_lowercase().as_str() {
            "none" | "noop" => {
                pairs("none", "no keys", rest, |_, _| Ok(false))?;
                Choice::Fixed(CodecSpec::None)
            }
            "lz4" => {
                pairs("lz4", "no keys", rest, |_, _| Ok(false))?;
                Choice::Fixed(CodecSpec::Lz4)
            }
            "zstd" => {
                let (mut level, mut bytes) = (3, 0);
                pairs("zstd", "level, history", rest, |key, value| match key {
                    "level" => set(&mut level, value, -5, 22),
                    "history" => set_history(&mut bytes, value),
                    _ => Ok(false),
                })?;
                let level = level as i32;
                Choice::Fixed(match bytes {
                    0 => CodecSpec::Zstd { level },
                    bytes => CodecSpec::History { level, bytes },
                })
            }
            "zlib" => {
                let mut level = 2;
                pairs("zlib", "level", rest, |key, value| {
                    Ok(key == "level" && set(&mut level, value, 1, 9)?)
                })?;
                Choice::Fixed(CodecSpec::Zlib {
                    level: level as u32,
                })
            }
            "lzma" => Choice::Fixed(CodecSpec::Lzma(parse_lzma(rest, &mut warnings)?)),
            "auto" => {
                let (mut max_level, mut policy) = (15, Policy::Speed);
                pairs("auto", "max-level, policy", rest, |key, value| match key {
                    "max-level" => set(&mut max_level, value, -5, 22),
                    "policy" => {
                        policy = match value {
                            "speed" => Policy::Speed,
                            "save" => Policy::Save,
                            _ => return Err("speed or save".into()),
                        };
                        Ok(true)
                    }
                    _ => Ok(false),
                })?;
                Choice::Auto {
                    max_level: max_level as i32,
                    policy,
                }
            }
            _ => return Err(PluginError::Name(name.into())),
        };
        Ok(Plugin {
            text: words.join(" "),
            choice,
            warnings,
        })
    }
}

/// The codec that a chain stands for: its last entry. An empty chain sends bytes as they are.
pub(crate) fn chain_choice(chain: &[Plugin]) -> Choice {
    chain
        .last()
        .map_or(Choice::Fixed(CodecSpec::None), |plugin| plugin.choice)
}

/// The blocks of `show avail-plugins`.
pub(crate) const AVAILABLE: &str = "\
Plugin compression: none bytes are sent as they are

Plugin compression: lz4 very fast, ratio about 2

Plugin compression: zstd level -5..22, default 3; history 1M..128M, default 0 (off)

Plugin compression: zlib level 1..9, default 2

Plugin compression: lzma level 1..9, default 4; contexts dict-size lc lp pb nice-len mf mode depth

Plugin compression: auto max-level -5..22, default 15; policy speed|save
";

const LZMA_KEYS: &str = "level, contexts, dict-size, lc, lp, pb, nice-len, mf, mode, depth, \
                         fallback-to-zlib, numa-threshold";

fn parse_lzma(rest: &[&str], warnings: &mut Vec<String>) -> Result<Lzma, PluginError> {
    let mut lzma = Lzma::default();
    pairs("lzma", LZMA_KEYS, rest, |key, value| {
        let mut number = 0i64;
        match key {
            "level" => set(&mut number, value, 1, 9).map(|_| lzma.level = number as u32)?,
            "contexts" => set(&mut number, value, 1, 253).map(|_| lzma.contexts = number as u32)?,
            "dict-size" => set(&mut number, value, 4096, 1_610_612_736)
                .map(|_| lzma.dict_bytes = Some(number as u32))?,
            "lc" => set(&mut number, value, 0, 4).map(|_| lzma.lc = number as u32)?,
            "lp" => set(&mut number, value, 0, 4).map(|_| lzma.lp = number as u32)?,
            "pb" => set(&mut number, value, 0, 4).map(|_| lzma.pb = number as u32)?,
            "nice-len" => set(&mut number, value, 0, 273)
                .map(|_| lzma.nice_len = (number >= 2).then_some(number as u32))?,
            "depth" => set(&mut number, value, 0, 1000).map(|_| lzma.depth = number as u32)?,
            "numa-threshold" => set(&mut number, value, 0, 253).map(|_| ())?,
            "mf" => {
                lzma.mf = Some(match value {
                    "hc3" => MatchFinder::Hc3,
                    "hc4" => MatchFinder::Hc4,
                    "bt2" => MatchFinder::Bt2,
                    "bt3" => MatchFinder::Bt3,
                    "bt4" => MatchFinder::Bt4,
                    _ => return Err("hc3, hc4, bt2, bt3 or bt4".into()),
                });
            }
            "mode" => {
                lzma.fast = Some(match value {
                    "fast" => true,
                    "normal" => false,
                    _ => return Err("fast or normal".into()),
                });
            }
            "fallback-to-zlib" => {
                lzma.fallback_to_zlib = match value {
                    "on" | "yes" | "1" => true,
                    "off" | "no" | "0" => false,
                    _ => return Err("on or off".into()),
                };
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    if lzma.lc + lzma.lp > 4 {
        return Err(PluginError::Value {
            plugin: "lzma",
            key: "lc + lp".into(),
            value: (lzma.lc + lzma.lp).to_string(),
            allowed: "0..4".into(),
        });
    }
    if lzma.dict_bytes.is_some_and(|bytes| bytes > 1 << 20) {
        warnings.push("lzma: chunks are 1 MiB, a larger dict-size has no effect".into());
    }
    Ok(lzma)
}

/// Feeds `key value` pairs to `take`, which says whether it knows the key; `Err` is the allowed
/// range.
fn pairs(
    plugin: &'static str,
    known: &'static str,
    words: &[&str],
    mut take: impl FnMut(&str, &str) -> Result<bool, String>,
) -> Result<(), PluginError> {
    for pair in words.chunks(2) {
        let key = pair[0];
        let Some(value) = pair.get(1) else {
            return Err(PluginError::NoValue {
                plugin,
                key: key.into(),
            });
        };
        match take(key, value) {
            Ok(true) => {}
            Ok(false) => {
                return Err(PluginError::Key {
                    plugin,
                    key: key.into(),
                    known,
                });
            }
            Err(allowed) => {
                let (key, value) = (key.into(), (*value).into());
                return Err(PluginError::Value {
                    plugin,
                    key,
                    value,
                    allowed,
                });
            }
        }
    }
    Ok(())
}

/// Bytes of history: whole MiB as `32M`, or a plain number; 0 is off.
fn set_history(slot: &mut u64, value: &str) -> Result<bool, String> {
    let bytes = match value.strip_suffix(['M', 'm']) {
        Some(number) => number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << 20)),
        None => value.parse().ok(),
    };
    match bytes {
        Some(bytes) if bytes == 0 || (HISTORY_MIN..=HISTORY_MAX).contains(&bytes) => {
            *slot = bytes;
            Ok(true)
        }
        _ => Err("0, or 1M..128M".into()),
    }
}

fn set(slot: &mut i64, value: &str, min: i64, max: i64) -> Result<bool, String> {
    match value.parse::<i64>() {
        Ok(number) if (min..=max).contains(&number) => {
            *slot = number;
            Ok(true)
        }
        _ => Err(format!("{min}..{max}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Plugin, PluginError> {
        Plugin::parse(&text.split_whitespace().collect::<Vec<_>>())
    }

    #[test]
    fn levels_have_the_documented_ranges_and_defaults() {
        let level = |text: &str| parse(text).map(|plugin| plugin.choice);
        assert_eq!(
            level("zstd"),
            Ok(Choice::Fixed(CodecSpec::Zstd { level: 3 }))
        );
        assert_eq!(
            level("zstd level 22"),
            Ok(Choice::Fixed(CodecSpec::Zstd { level: 22 }))
        );
        assert_eq!(
            level("zlib"),
            Ok(Choice::Fixed(CodecSpec::Zlib { level: 2 }))
        );
        assert_eq!(
            level("zstd level 5 history 32M"),
            Ok(Choice::Fixed(CodecSpec::History {
                level: 5,
                bytes: 32 << 20
            }))
        );
        assert_eq!(level("zstd history 0"), level("zstd"));
        for wrong in ["129M", "4096", "-1", "x", "M"] {
            assert!(matches!(
                level(&format!("zstd history {wrong}")),
                Err(PluginError::Value { .. })
            ));
        }
        assert!(matches!(
            level("zstd level 23"),
            Err(PluginError::Value { .. })
        ));
        assert!(matches!(
            level("zlib level 0"),
            Err(PluginError::Value { .. })
        ));
        assert!(matches!(
            level("zlib level x"),
            Err(PluginError::Value { .. })
        ));
        assert!(matches!(level("zlib size 3"), Err(PluginError::Key { .. })));
        assert!(matches!(
            level("zlib level"),
            Err(PluginError::NoValue { .. })
        ));
        assert!(matches!(level("gzip level 1"), Err(PluginError::Name(_))));
        assert!(matches!(
            level("lzma lc 3 lp 3"),
            Err(PluginError::Value { .. })
        ));
    }

    #[test]
    fn text_comes_back_word_by_word() {
        let text = "lzma level 7 dict-size 65536 mf bt4 mode normal contexts 2";
        assert_eq!(parse(text).map(|plugin| plugin.text).as_deref(), Ok(text));
    }

    #[test]
    fn a_chain_stands_for_its_last_plugin() {
        let chain = [parse("lz4").unwrap(), parse("zlib level 9").unwrap()];
        assert_eq!(
            chain_choice(&chain),
            Choice::Fixed(CodecSpec::Zlib { level: 9 })
        );
        assert_eq!(chain_choice(&[]), Choice::Fixed(CodecSpec::None));
    }
}
