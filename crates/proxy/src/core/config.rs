//! Options of the daemon and of one connection: names, units, ranges, defaults, and the checks
//! that refuse a configuration before anything changes.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::dscp::Dscp;
use super::fair::WEIGHT_MAX;
use super::plugin::{Choice, Plugin, chain_choice};
use super::shaper::Limit;

/// Smallest `memlimit`; less would not hold the chunks in flight.
pub(crate) const MEMLIMIT_MIN: u64 = 1 << 20;
/// Largest part of the memory that one connection may always have.
pub(crate) const FLOOR_MAX: u64 = 1 << 30;
/// Smallest memory for all buffers.
pub(crate) const MEMORY_MIN: u64 = 4 << 20;
/// Most bulk carriers of one session.
pub(crate) const CARRIERS_MAX: u32 = 16;

/// Who opens the carriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Dial {
    /// The end whose outside address sorts lower.
    Auto,
    Always,
    Never,
}

/// Options of one connection that may change while it runs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinkOptions {
    /// Buffer for bytes that DRBD sent and the peer has not yet taken.
    pub(crate) memlimit_bytes: u64,
    /// Rate on the WAN.
    pub(crate) limit: Limit,
    /// Marks of the packets on the WAN.
    pub(crate) dscp_control: Dscp,
    pub(crate) dscp_bulk: Dscp,
    /// Socket buffers towards DRBD and the peer; 0 leaves the kernel's choice.
    pub(crate) sndbuf_bytes: u64,
    pub(crate) rcvbuf_bytes: u64,
    /// A silent control carrier is given up after this time.
    pub(crate) wan_timeout: Duration,
    /// How long a broken session keeps DRBD's sockets open.
    pub(crate) session_hold: Duration,
    /// Longest wait in the buffer that is accepted before reading slows down; zero is no bound.
    pub(crate) max_lag: Duration,
    /// How long DRBD's pings are answered here while the line is cut; zero is never.
    pub(crate) ping_hold: Duration,
    /// Share of the daemon's rate, against the other connections.
    pub(crate) weight: u32,
    pub(crate) bulk_carriers: u32,
    pub(crate) dial: Dial,
    pub(crate) plugins: Vec<Plugin>,
    /// Options that drbdadm may send and that mean nothing here, kept for `show`.
    pub(crate) inert: Vec<(String, String)>,
}

/// One DRBD connection through the proxy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinkConfig {
    pub(crate) name: String,
    /// Where this proxy listens for its DRBD; also the source of connections towards it.
    pub(crate) inside: SocketAddr,
    pub(crate) peer_outside: SocketAddr,
    pub(crate) my_outside: SocketAddr,
    pub(crate) local_drbd: SocketAddr,
    pub(crate) options: LinkOptions,
}

/// Options of the whole daemon.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DaemonOptions {
    /// Memory that all buffers share.
    pub(crate) memory_max_bytes: u64,
    /// What each connection may always use.
    pub(crate) memlimit_min_bytes: u64,
    pub(crate) limit: Limit,
    /// Bytes on disk that all connections may use; 0 is no spill.
    pub(crate) spill_limit_bytes: u64,
    /// Codec jobs that may run at once.
    pub(crate) jobs_max: usize,
}

/// Why an option or address is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{what} '{value}' is not an address; expected IP:PORT")]
    Address { what: &'static str, value: String },
    #[error("{option} '{value}' is not valid; expected {expected}")]
    Value {
        option: String,
        value: String,
        expected: String,
    },
    #[error(
        "unknown option '{0}'; known are memlimit, bwlimit, sndbuf-size, rcvbuf-size, \
             ping-timeout, read-loops, compression, wan-timeout, session-hold, ping-hold, max-lag, \
             carriers, dial, schedule, burst, weight, dscp-control, dscp-bulk"
    )]
    Option(String),
    #[error("connection {name}: {a} and {b} are both {addr}; the traffic would run in a circle")]
    Loop {
        name: String,
        a: &'static str,
        b: &'static str,
        addr: SocketAddr,
    },
    #[error(
        "connection {name}: its {a} and the {b} address of connection {other} are both {addr}; \
         the traffic would run in a circle"
    )]
    Circle {
        name: String,
        a: &'static str,
        b: &'static str,
        addr: SocketAddr,
        other: String,
    },
    #[error("connection {name}: {what} {addr} is already used by connection {other}")]
    Taken {
        name: String,
        what: &'static str,
        addr: SocketAddr,
        other: String,
    },
    #[error("unknown option '{option}' of a {level}; known are {known}")]
    LevelOption {
        level: &'static str,
        option: String,
        known: &'static str,
    },
    #[error("at most {0} sessions can have a limit of their own")]
    Sessions(usize),
    #[error("connection '{0}' exists already; use 'del connection {0}' first")]
    Exists(String),
    #[error("no connection '{0}'; see 'show'")]
    Unknown(String),
    #[error(
        "connection name '{0}' is not valid; expected 1 to 512 printable characters without \
             blanks"
    )]
    Name(String),
    #[error(
        "connection {name}: inside address {inside} and local DRBD {drbd} are of different \
             families"
    )]
    Family {
        name: String,
        inside: IpAddr,
        drbd: IpAddr,
    },
}

impl Default for LinkOptions {
    fn default() -> LinkOptions {
        LinkOptions {
            memlimit_bytes: 16 << 20,
            limit: Limit::default(),
            dscp_control: Dscp::AF31,
            dscp_bulk: Dscp::AF11,
            sndbuf_bytes: 0,
            rcvbuf_bytes: 0,
            wan_timeout: Duration::from_secs(5),
            session_hold: Duration::from_secs(25),
            max_lag: Duration::from_secs(20),
            ping_hold: Duration::ZERO,
            weight: 1,
            bulk_carriers: 1,
            dial: Dial::Auto,
            plugins: Vec::new(),
            inert: Vec::new(),
        }
    }
}

impl LinkOptions {
    /// The codec that is to be used for the next chunk.
    pub(crate) fn choice(&self) -> Choice {
        chain_choice(&self.plugins)
    }

    /// Sets one option by its name. `Ok(Some(text))` is a remark for the operator.
    pub(crate) fn set(&mut self, option: &str, value: &str) -> Result<Option<String>, ConfigError> {
        let bad = |expected: &str| ConfigError::Value {
            option: option.into(),
            value: value.into(),
            expected: expected.into(),
        };
        let tenths = |min: u64, max: u64| {
            value
                .parse::<u64>()
                .ok()
                .filter(|tenths| (min..=max).contains(tenths))
                .map(|tenths| Duration::from_millis(tenths * 100))
                .ok_or_else(|| bad(&format!("{min} to {max} (in 0.1 s)")))
        };
        let seconds = |min: u64, max: u64| {
            value
                .trim_end_matches('s')
                .parse::<f64>()
                .ok()
                .filter(|seconds| (min as f64..=max as f64).contains(seconds))
                .map(Duration::from_secs_f64)
                .ok_or_else(|| bad(&format!("{min} to {max} (in seconds)")))
        };
        match option {
            "memlimit" => {
                let bytes = parse_bytes(value).ok_or_else(|| bad("a size such as 512M"))?;
                if bytes < MEMLIMIT_MIN {
                    return Err(bad(
                        "at least 1M: the buffer must hold the chunks in flight",
                    ));
                }
                self.memlimit_bytes = bytes;
            }
            "bwlimit" | "schedule" | "burst" => {
                if let Some(done) = self.limit.set(option, value) {
                    done.map_err(|expected| bad(&expected))?;
                }
            }
            "dscp-control" => self.dscp_control = Dscp::parse(value).ok_or_else(|| bad(DSCP))?,
            "dscp-bulk" => self.dscp_bulk = Dscp::parse(value).ok_or_else(|| bad(DSCP))?,
            "sndbuf-size" | "rcvbuf-size" => {
                let bytes = parse_bytes(value)
                    .filter(|bytes| *bytes <= 128 << 20)
                    .ok_or_else(|| bad("0 to 128M"))?;
                if option == "sndbuf-size" {
                    self.sndbuf_bytes = bytes;
                } else {
                    self.rcvbuf_bytes = bytes;
                }
            }
            "ping-timeout" => self.wan_timeout = tenths(1, 300)?,
            "wan-timeout" => self.wan_timeout = seconds(1, 300)?,
            "session-hold" => self.session_hold = seconds(1, 86_400)?,
            "ping-hold" => {
                self.ping_hold = seconds(0, super::ping::PING_HOLD_MAX_S)?;
                return Ok(Some(
                    "ping-hold works for DRBD connections that open from now on, with protocol A \
                     and without fencing only"
                        .into(),
                ));
            }
            "max-lag" => self.max_lag = seconds(0, 864_000)?,
            "carriers" => {
                self.bulk_carriers = value
                    .parse()
                    .ok()
                    .filter(|count| (1..=CARRIERS_MAX).contains(count))
                    .ok_or_else(|| bad("1 to 16"))?;
            }
            "weight" => {
                self.weight = value
                    .parse()
                    .ok()
                    .filter(|weight| (1..=WEIGHT_MAX).contains(weight))
                    .ok_or_else(|| bad(&format!("1 to {WEIGHT_MAX}")))?;
            }
            "dial" => {
                self.dial = match value {
                    "auto" => Dial::Auto,
                    "always" => Dial::Always,
                    "never" => Dial::Never,
                    _ => return Err(bad("auto, always or never")),
                };
            }
            "compression" => {
                let text: &[&str] = match value {
                    "on" | "yes" | "1" => &["zlib", "level", "9"],
                    "off" | "no" | "0" => &["none"],
                    _ => return Err(bad("on or off")),
                };
                self.plugins = Plugin::parse(text).into_iter().collect();
                return Ok(Some("compression is deprecated, use a plugin".into()));
            }
            "read-loops" => {
                self.inert.retain(|(name, _)| name != option);
                self.inert.push((option.into(), value.into()));
                return Ok(Some("read-loops has no effect here".into()));
            }
            _ => return Err(ConfigError::Option(option.into())),
        }
        Ok(None)
    }

    /// The options that differ from their defaults, as they are set; plugins have their own
    /// command.
    pub(crate) fn words(&self) -> Vec<(String, String)> {
        let default = LinkOptions::default();
        let mut words = vec![("memlimit", self.memlimit_bytes.to_string())];
        words.extend(self.limit.words());
        let mut differs = |name: &'static str, changed: bool, value: String| {
            if changed {
                words.push((name, value));
            }
        };
        for (name, is, usual) in [
            ("dscp-control", self.dscp_control, default.dscp_control),
            ("dscp-bulk", self.dscp_bulk, default.dscp_bulk),
        ] {
            differs(name, is != usual, is.to_string());
        }
        for (name, is, usual) in [
            ("sndbuf-size", self.sndbuf_bytes, default.sndbuf_bytes),
            ("rcvbuf-size", self.rcvbuf_bytes, default.rcvbuf_bytes),
        ] {
            differs(name, is != usual, is.to_string());
        }
        for (name, is, usual) in [
            ("wan-timeout", self.wan_timeout, default.wan_timeout),
            ("session-hold", self.session_hold, default.session_hold),
            ("ping-hold", self.ping_hold, default.ping_hold),
            ("max-lag", self.max_lag, default.max_lag),
        ] {
            differs(name, is != usual, is.as_secs_f64().to_string());
        }
        for (name, is, usual) in [
            ("weight", self.weight, default.weight),
            ("carriers", self.bulk_carriers, default.bulk_carriers),
        ] {
            differs(name, is != usual, is.to_string());
        }
        let dial = match self.dial {
            Dial::Auto => "auto",
            Dial::Always => "always",
            Dial::Never => "never",
        };
        differs("dial", self.dial != default.dial, dial.into());
        let words = words.into_iter().map(|(name, value)| (name.into(), value));
        words.chain(self.inert.iter().cloned()).collect()
    }
}

const DSCP: &str = "a DiffServ code point: 0 to 63, or a name such as af31, cs1, ef, le, default";

impl LinkConfig {
    /// Checks the addresses among themselves.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let printable = |c: char| c.is_ascii_graphic() || (!c.is_ascii() && c.is_alphanumeric());
        if self.name.is_empty() || self.name.len() > 512 || !self.name.chars().all(printable) {
            return Err(ConfigError::Name(self.name.clone()));
        }
        let all = [
            ("inside address", self.inside),
            ("peer's outside address", self.peer_outside),
            ("own outside address", self.my_outside),
            ("local DRBD address", self.local_drbd),
        ];
        for (i, (a, addr)) in all.iter().enumerate() {
            if let Some((b, _)) = all[i + 1..].iter().find(|(_, other)| other == addr) {
                return Err(ConfigError::Loop {
                    name: self.name.clone(),
                    a,
                    b,
                    addr: *addr,
                });
            }
        }
        if self.inside.is_ipv4() != self.local_drbd.is_ipv4() {
            return Err(ConfigError::Family {
                name: self.name.clone(),
                inside: self.inside.ip(),
                drbd: self.local_drbd.ip(),
            });
        }
        Ok(())
    }

    /// Whether this end opens the carriers.
    pub(crate) fn dials(&self) -> bool {
        match self.options.dial {
            Dial::Always => true,
            Dial::Never => false,
            Dial::Auto => {
                let key = |addr: SocketAddr| (addr.ip(), addr.port());
                key(self.my_outside) < key(self.peer_outside)
            }
        }
    }
}

impl Default for DaemonOptions {
    fn default() -> DaemonOptions {
        DaemonOptions {
            memory_max_bytes: 1 << 30,
            memlimit_min_bytes: MEMLIMIT_MIN,
            limit: Limit::default(),
            spill_limit_bytes: 0,
            jobs_max: 4,
        }
    }
}

/// Reads `IP:PORT`; drbdadm prints IPv6 without brackets, so the last colon splits.
pub(crate) fn parse_addr(what: &'static str, text: &str) -> Result<SocketAddr, ConfigError> {
    let bad = || ConfigError::Address {
        what,
        value: text.into(),
    };
    let (ip, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let ip = ip
        .strip_prefix('[')
        .and_then(|ip| ip.strip_suffix(']'))
        .unwrap_or(ip);
    let port: u16 = port.parse().map_err(|_| bad())?;
    if port == 0 {
        return Err(bad());
    }
    Ok(SocketAddr::new(ip.parse().map_err(|_| bad())?, port))
}

/// Reads a size with DRBD's suffixes k, M, G (powers of 1024), `KiB` and the like too.
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let shift = match text[digits..].trim_end_matches("/s").trim_end_matches("iB") {
        "" | "B" => 0,
        "s" | "S" => 9,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// As `parse_bytes` reads it, as short as can be.
pub(crate) fn format_bytes(bytes: u64) -> String {
    for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link() -> LinkConfig {
        LinkConfig {
            name: "r0-bob-alice".into(),
            inside: "127.0.0.1:7815".parse().unwrap(),
            peer_outside: "192.0.2.2:7715".parse().unwrap(),
            my_outside: "192.0.2.1:7715".parse().unwrap(),
            local_drbd: "127.0.0.1:7915".parse().unwrap(),
            options: LinkOptions::default(),
        }
    }

    #[test]
    fn addresses_that_loop_are_refused() {
        assert_eq!(link().check(), Ok(()));
        let mut bad = link();
        bad.local_drbd = bad.inside;
        assert!(matches!(bad.check(), Err(ConfigError::Loop { .. })));
        bad = link();
        bad.peer_outside = bad.my_outside;
        assert!(bad.check().unwrap_err().to_string().contains("circle"));
        bad = link();
        bad.local_drbd = "[::1]:7915".parse().unwrap();
        assert!(matches!(bad.check(), Err(ConfigError::Family { .. })));
    }

    #[test]
    fn exactly_one_end_dials() {
        let (a, mut b) = (link(), link());
        (b.my_outside, b.peer_outside) = (a.peer_outside, a.my_outside);
        assert!(a.dials());
        assert!(!b.dials());
    }

    #[test]
    fn ipv6_addresses_come_with_and_without_brackets() {
        let want: SocketAddr = "[fd00::2]:7815".parse().unwrap();
        assert_eq!(parse_addr("x", "fd00::2:7815"), Ok(want));
        assert_eq!(parse_addr("x", "[fd00::2]:7815"), Ok(want));
        assert!(parse_addr("x", "bob:7815").is_err());
        assert!(parse_addr("x", "10.0.0.1:0").is_err());
        assert!(parse_addr("x", "10.0.0.1").is_err());
    }

    #[test]
    fn all_options_can_be_written_and_set_again() {
        let mut options = LinkOptions::default();
        assert_eq!(options.words(), [("memlimit".into(), "16777216".into())]);
        for (option, value) in [
            ("memlimit", "5M"),
            ("schedule", "sat/01:00-02:00=8M,*=1M"),
            ("burst", "2M"),
            ("dscp-control", "ef"),
            ("dscp-bulk", "17"),
            ("sndbuf-size", "1M"),
            ("rcvbuf-size", "2M"),
            ("wan-timeout", "2.5"),
            ("session-hold", "60"),
            ("ping-hold", "30"),
            ("max-lag", "0"),
            ("weight", "3"),
            ("carriers", "4"),
            ("dial", "never"),
            ("read-loops", "7"),
        ] {
            options.set(option, value).unwrap();
        }
        let words = options.words();
        assert_eq!(words.len(), 15, "{words:?}");
        let mut again = LinkOptions::default();
        for (option, value) in words {
            again.set(&option, &value).unwrap();
        }
        assert_eq!(again, options);
    }

    #[test]
    fn options_have_units_and_ranges() {
        let mut options = LinkOptions::default();
        assert_eq!(options.set("memlimit", "512M"), Ok(None));
        assert_eq!(options.memlimit_bytes, 512 << 20);
        assert!(
            options
                .set("memlimit", "0")
                .unwrap_err()
                .to_string()
                .contains("at least 1M")
        );
        assert_eq!(options.memlimit_bytes, 512 << 20);
        assert_eq!(options.set("ping-timeout", "200"), Ok(None));
        assert_eq!(options.wan_timeout, Duration::from_secs(20));
        assert!(options.set("carriers", "17").is_err());
        assert_eq!(options.weight, 1);
        assert_eq!(options.set("weight", "100"), Ok(None));
        for bad in ["0", "101", "-1", "x"] {
            let error = options.set("weight", bad).unwrap_err().to_string();
            assert!(error.contains("1 to 100"), "{error}");
        }
        assert_eq!(options.weight, 100);
        assert!(
            options
                .set("no-such", "1")
                .unwrap_err()
                .to_string()
                .contains("no-such")
        );
        assert!(options.set("read-loops", "3").unwrap().is_some());
        assert_eq!(options.set("dscp-bulk", "cs1"), Ok(None));
        for bad in ["64", "-1", "af15", "", "x"] {
            for option in ["dscp-control", "dscp-bulk"] {
                let error = options.set(option, bad).unwrap_err().to_string();
                assert!(
                    error.contains("0 to 63") && error.contains(option),
                    "{error}"
                );
            }
        }
        assert_eq!(options.dscp_control, Dscp::AF31);
        assert_eq!(options.set("burst", "1M"), Ok(None));
        let error = options.set("burst", "1K").unwrap_err().to_string();
        assert!(
            error.contains("burst '1K'") && error.contains("64K"),
            "{error}"
        );
        assert_eq!(options.limit.burst_bytes, 1 << 20);
        assert_eq!(parse_bytes("4MiB/s"), Some(4 << 20));
        assert_eq!(parse_bytes("x"), None);
        assert_eq!(parse_bytes("99999999999999999999"), None);
        assert_eq!(parse_bytes("18446744073709551615k"), None);
    }
}
