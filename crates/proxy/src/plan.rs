//! `lockstep proxy plan`: from the figures of a link to settings of DRBD and of the proxy that fit
//! together, with the reason for each.

use std::fmt::Write as _;

/// Figures of a link and of the load on it.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Bits per second of the line.
    pub bandwidth_bits: u64,
    /// Round trip time in milliseconds.
    pub rtt_ms: u64,
    /// Bytes per second that the application changes on average.
    pub change_rate: u64,
    /// Expected compression ratio; 1.0 assumes none.
    pub ratio: f64,
    /// Longest accepted lag in seconds.
    pub max_lag_s: u64,
    /// Longest interruption of the line that DRBD shall not notice, in seconds.
    pub outage_s: u64,
}

/// Settings and remarks.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Buffer in bytes.
    pub memlimit_bytes: u64,
    /// DRBD's `ko-count`; 0 switches it off.
    pub ko_count: u64,
    /// DRBD's `al-extents`.
    pub al_extents: u64,
    /// Bulk carriers.
    pub carriers: u64,
    /// What the operator must know before using it.
    pub warnings: Vec<String>,
    link: Link,
}

const MIB: u64 = 1 << 20;
/// DRBD's `timeout`, 6 s, in 0.1 s.
const TIMEOUT: u64 = 60;
/// Longest `ping-timeout` that DRBD takes, 30 s.
const PING_TIMEOUT_S: u64 = 30;
/// Longest `ping-hold`.
const PING_HOLD_S: u64 = crate::core::ping::PING_HOLD_MAX_S;
/// Extents that a default activity log of 32 KiB can hold.
const AL_DEFAULT_AREA: u64 = 6433;
const AL_EXTENTS_MAX: u64 = 65534;

/// Beyond these a figure is a mistake: 10 Tbit/s, a minute, what the options take, and a PiB.
const BANDWIDTH_MAX: u64 = 10_000_000_000_000;
const RTT_MAX_MS: u64 = 60_000;
const LAG_MAX_S: u64 = 864_000;
const OUTAGE_MAX_S: u64 = 86_400;
const MEMLIMIT_MAX: u64 = 1 << 50;

impl Plan {
    /// Computes the settings, or says which figure makes no sense.
    pub fn new(link: Link) -> Result<Plan, String> {
        if link.bandwidth_bits < 64_000 {
            return Err("the bandwidth must be at least 64kbit".into());
        }
        if !(1.0..=100.0).contains(&link.ratio) {
            return Err("the ratio must be between 1 and 100".into());
        }
        if link.max_lag_s == 0 {
            return Err("the lag must be at least one second".into());
        }
        for (what, value, most, unit) in [
            ("bandwidth", link.bandwidth_bits, BANDWIDTH_MAX, "bit/s"),
            ("round trip time", link.rtt_ms, RTT_MAX_MS, "ms"),
            ("lag", link.max_lag_s, LAG_MAX_S, "seconds"),
            ("outage", link.outage_s, OUTAGE_MAX_S, "seconds"),
        ] {
            if value > most {
                return Err(format!("the {what} must be at most {most} {unit}"));
            }
        }
        let mut warnings = Vec::new();
        let drain = link.drain();
        if link.change_rate > drain {
            warnings.push(format!(
                "The application changes {} KiB/s, the line moves {} KiB/s at ratio {}: the \
                 backlog grows without end and DRBD will block or fall behind again and again.",
                link.change_rate / 1024,
                drain / 1024,
                link.ratio
            ));
        } else if link.change_rate.saturating_mul(10) > drain * 8 {
            warnings.push("The line is loaded above 80 %: bursts drain slowly.".into());
        }
        let wanted = drain.saturating_mul(link.max_lag_s);
        let memlimit_bytes = wanted.min(MEMLIMIT_MAX).next_multiple_of(MIB).max(16 * MIB);
        let stall = link.max_lag_s + link.outage_s + 10;
        let ko_count = (stall * 10).div_ceil(TIMEOUT);
        let ko_count = if ko_count > 200 { 0 } else { ko_count.max(7) };
        if ko_count == 0 {
            warnings.push(
                "ko-count 0: DRBD no longer drops a peer that takes bytes but never answers."
                    .into(),
            );
        }
        if link.max_lag_s > 25 {
            warnings.push(format!(
                "A lag of {} s lets promotion, connecting of a third node and orderly disconnect \
                 wait as long; DRBD 9 gives up after twopc-timeout (at most 60 s).",
                link.max_lag_s
            ));
        }
        if link.outage_s > PING_HOLD_S {
            warnings.push(format!(
                "DRBD survives no interruption longer than {} s, or {PING_HOLD_S} s with \
                 ping-hold; then it reconnects and resyncs what changed.",
                PING_TIMEOUT_S - 5
            ));
        } else if link.outage_s > PING_TIMEOUT_S - 5 {
            warnings.push(format!(
                "An interruption of {} s is longer than DRBD's ping-timeout can be: ping-hold \
                 answers its pings meanwhile, so a dead peer is noticed later. Only with protocol \
                 A and without fencing.",
                link.outage_s
            ));
        }
        let al_extents = (memlimit_bytes / 4096).clamp(1237, AL_EXTENTS_MAX);
        let fast = link.bandwidth_bits >= 100_000_000;
        let carriers = match (fast, link.rtt_ms) {
            (_, 0..20) => 1,
            (false, _) => 2,
            (true, 20..80) => 4,
            (true, _) => 8,
        };
        Ok(Plan {
            memlimit_bytes,
            ko_count,
            al_extents,
            carriers,
            warnings,
            link,
        })
    }

    /// The text for the operator: a part of drbd.conf with comments, and the warnings.
    pub fn text(&self) -> String {
        let link = &self.link;
        let line = link.bandwidth_bits / 8;
        let bdp = line * link.rtt_ms / 1000;
        let pings = link.outage_s > PING_TIMEOUT_S - 5 && link.outage_s <= PING_HOLD_S;
        let hold = if pings {
            link.outage_s
        } else {
            link.outage_s.clamp(1, PING_TIMEOUT_S - 5)
        };
        let check = (link.rtt_ms * 4).div_ceil(100).clamp(10, 300);
        let twopc = (link.max_lag_s * 10 + 100).clamp(300, 600);
        let fill = (self.memlimit_bytes / 10 * 9 / 1024).min(10 << 20);
        let mut out = String::new();
        let mut say = |text: String| {
            let _ = writeln!(out, "{text}");
        };
        say(format!(
            "# {} kbit/s, {} ms round trip, {} KiB/s of changes, ratio {}: the line moves {} KiB/s.",
            link.bandwidth_bits / 1000,
            link.rtt_ms,
            link.change_rate / 1024,
            link.ratio,
            link.drain() / 1024
        ));
        say(format!(
            "# Recovery point if a whole site is lost: at most {} s and the round trip.",
            link.max_lag_s
        ));
        say("net {".into());
        say(
            "    protocol A;             # writes end at home; B and C would wait for the line"
                .into(),
        );
        say("    ping-timeout 300;       # 30 s: DRBD's pings cross the line".into());
        say("    ping-int 30;".into());
        say(format!(
            "    socket-check-timeout {check}; # 0.1 s: new sockets are looked at after the round trip"
        ));
        say(format!("    timeout {TIMEOUT};"));
        say(format!(
            "    ko-count {};             # a barrier may wait for lag, interruption and 10 s more",
            self.ko_count
        ));
        say("    on-congestion pull-ahead; # a full buffer must not stop the application".into());
        say(format!(
            "    congestion-fill {fill}K; # 90 % of the proxy's buffer"
        ));
        say(format!(
            "    congestion-extents {}; # 90 % of al-extents",
            self.al_extents / 10 * 9
        ));
        say("    fencing dont-care;".into());
        say("}".into());
        say(format!(
            "# DRBD 9: options {{ twopc-timeout {twopc}; }}: state changes queue behind the data."
        ));
        say("disk {".into());
        say(format!(
            "    al-extents {};       # every buffered write may keep its extent busy",
            self.al_extents
        ));
        say("    c-plan-ahead 50;".into());
        say(format!(
            "    c-fill-target {}K;    # 3 x bandwidth x round trip",
            (bdp * 3 / 1024).clamp(100, 512 << 10)
        ));
        say(format!(
            "    c-max-rate {}K;      # what the line moves",
            (link.drain() / 1024).clamp(4, 4 << 20)
        ));
        say("    read-balancing prefer-local;".into());
        say("}".into());
        say("proxy {".into());
        say(format!(
            "    memlimit {}M;           # drains in {} s",
            self.memlimit_bytes / MIB,
            link.max_lag_s
        ));
        say("    plugin { zstd level 3; }  # or 'auto' with lockstep proxy at both ends".into());
        say("}".into());
        say("# After proxy-up, at both ends:".into());
        say(format!(
            "#   drbd-proxy-ctl -c 'set max-lag NAME {}'",
            link.max_lag_s
        ));
        say(format!(
            "#   drbd-proxy-ctl -c 'set session-hold NAME {hold}'"
        ));
        if pings {
            say(format!("#   drbd-proxy-ctl -c 'set ping-hold NAME {hold}'"));
        }
        say(format!(
            "#   drbd-proxy-ctl -c 'set carriers NAME {}'",
            self.carriers
        ));
        say("# Ports: let the inside port be above the address port on one site and below it on the".into());
        say(
            "# other, or both DRBDs open the same socket first and connecting takes several tries."
                .into(),
        );
        if self.al_extents > AL_DEFAULT_AREA {
            say(format!(
                "# More than {AL_DEFAULT_AREA} extents need a larger activity log: create the \
                 metadata with --al-stripe-size."
            ));
        }
        for warning in &self.warnings {
            say(format!("# WARNING: {warning}"));
        }
        out
    }
}

impl Link {
    /// Raw bytes per second that get through.
    fn drain(&self) -> u64 {
        (self.bandwidth_bits as f64 / 8.0 * self.ratio) as u64
    }
}

/// Reads `20mbit`, `2gbit`, `512kbit` or bits as a number.
pub fn parse_bits(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let digits = lower
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(lower.len());
    let factor = match lower[digits..].trim_end_matches("/s") {
        "" | "bit" => 1,
        "k" | "kbit" => 1_000,
        "m" | "mbit" => 1_000_000,
        "g" | "gbit" => 1_000_000_000,
        _ => return Err(format!("'{text}' is not a bandwidth such as 20mbit")),
    };
    lower[..digits]
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| format!("'{text}' is not a bandwidth such as 20mbit"))
}

/// Reads `80ms`, `2s` or milliseconds as a number.
pub fn parse_ms(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.strip_suffix("ms") {
        Some(number) => (number, 1),
        None => text
            .strip_suffix('s')
            .map_or((text, 1), |number| (number, 1000)),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| format!("'{text}' is not a time such as 80ms"))
}

/// Reads `5MiB/s`, `512M` or bytes as a number.
pub fn parse_size(text: &str) -> Result<u64, String> {
    crate::core::config::parse_bytes(text)
        .ok_or_else(|| format!("'{text}' is not a size such as 5MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(bandwidth: &str, max_lag_s: u64) -> Link {
        Link {
            bandwidth_bits: parse_bits(bandwidth).unwrap(),
            rtt_ms: 80,
            change_rate: 1 << 20,
            ratio: 1.0,
            max_lag_s,
            outage_s: 20,
        }
    }

    #[test]
    fn the_buffer_drains_within_the_lag_and_the_timeouts_allow_it() {
        let plan = Plan::new(link("20mbit", 20)).unwrap();
        assert_eq!(plan.memlimit_bytes, 48 << 20);
        assert!(plan.ko_count * 6 >= 20 + 20 + 10);
        assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
        assert!(plan.text().contains("memlimit 48M;"));
        assert!(plan.text().contains("c-fill-target 585K;"));
    }

    #[test]
    fn too_slow_a_line_and_too_long_a_lag_are_called_out() {
        let plan = Plan::new(link("4mbit", 20)).unwrap();
        assert!(plan.warnings[0].contains("without end"));
        let plan = Plan::new(link("20mbit", 3600)).unwrap();
        assert_eq!(plan.ko_count, 0);
        assert!(plan.text().contains("WARNING: A lag of 3600 s"));
        assert!(Plan::new(link("1kbit", 20)).is_err());
        assert!(Plan::new(link("20mbit", 0)).is_err());
    }

    #[test]
    fn figures_that_make_no_sense_are_named() {
        let wrong = |change: &dyn Fn(&mut Link)| {
            let mut odd = link("20mbit", 20);
            change(&mut odd);
            Plan::new(odd).unwrap_err()
        };
        for (error, name) in [
            (wrong(&|l| l.bandwidth_bits = u64::MAX), "bandwidth"),
            (wrong(&|l| l.rtt_ms = u64::MAX), "round trip time"),
            (wrong(&|l| l.max_lag_s = u64::MAX), "lag"),
            (wrong(&|l| l.outage_s = u64::MAX), "outage"),
            (wrong(&|l| l.ratio = f64::NAN), "ratio"),
        ] {
            assert!(error.contains(name), "{error}");
        }
        let mut most = link("10000gbit", LAG_MAX_S);
        (most.rtt_ms, most.outage_s) = (RTT_MAX_MS, OUTAGE_MAX_S);
        (most.ratio, most.change_rate) = (100.0, u64::MAX);
        assert!(Plan::new(most).unwrap().text().contains("al-extents 65534"));
    }

    #[test]
    fn the_arithmetic_is_that_of_the_specification() {
        for (bandwidth, rtt_ms, ratio, max_lag_s, outage_s) in [
            ("512kbit", 600, 1.0, 20, 20),
            ("20mbit", 80, 1.0, 20, 20),
            ("20mbit", 80, 2.5, 60, 25),
            ("1gbit", 30, 1.0, 10, 0),
            ("10gbit", 150, 3.0, 25, 50),
            ("100mbit", 5, 1.0, 3600, 600),
        ] {
            let link = Link {
                bandwidth_bits: parse_bits(bandwidth).unwrap(),
                rtt_ms,
                change_rate: 0,
                ratio,
                max_lag_s,
                outage_s,
            };
            let plan = Plan::new(link).unwrap();
            let (text, drain) = (plan.text(), link.drain());
            let number = |word: &str| -> u64 {
                let rest = text
                    .split(word)
                    .nth(1)
                    .unwrap_or_else(|| panic!("{word}: {text}"));
                let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
                digits.parse().unwrap()
            };
            // C9: the buffer drains within max-lag, or is the smallest one.
            let buffer = plan.memlimit_bytes;
            assert!(buffer == 16 * MIB || buffer <= drain * max_lag_s + MIB);
            assert!(buffer >= drain * max_lag_s);
            // B9: a barrier may wait for a full buffer and an interruption, or ko-count is off.
            let ko = number("ko-count ");
            assert!(
                ko == 0 || ko * TIMEOUT / 10 >= max_lag_s + outage_s + 10,
                "{text}"
            );
            // B7, B4: pings and new sockets have several round trips.
            assert_eq!(number("ping-timeout "), 300);
            assert!(number("socket-check-timeout ") * 100 >= (rtt_ms * 4).min(30_000));
            // B12: congestion is seen before the buffer is full; B11: each write may need an extent.
            assert!(number("congestion-fill ") * 1024 <= buffer);
            let extents = number("al-extents ");
            assert!(extents >= 1237 && (extents >= buffer / 4096 || extents == AL_EXTENTS_MAX));
            assert!(number("congestion-extents ") <= extents);
            // B10: a promotion waits for the buffer, or the operator is told that it fails.
            let twopc = number("twopc-timeout ");
            assert!(twopc >= max_lag_s * 10 || text.contains("twopc-timeout (at most 60 s)"));
            // C11: the session outlives what DRBD outlives.
            let hold = number("session-hold NAME ");
            assert!(hold <= 25 || hold <= 60 && number("ping-hold NAME ") == hold);
            assert!(hold >= outage_s.min(25));
            // The fill target is three times what is under way; the resync keeps to the line.
            let under_way = link.bandwidth_bits / 8 * rtt_ms / 1000;
            let target = number("c-fill-target ") * 1024;
            assert!(target >= (under_way * 3).min(512 * MIB) - 1024 || target == 100 * 1024);
            assert!(number("c-max-rate ") * 1024 <= drain.max(4096));
        }
    }

    #[test]
    fn units_are_read() {
        assert_eq!(parse_bits("2gbit"), Ok(2_000_000_000));
        assert_eq!(parse_ms("80ms"), Ok(80));
        assert_eq!(parse_ms("2s"), Ok(2000));
        assert_eq!(parse_size("5MiB/s"), Ok(5 << 20));
        assert!(parse_bits("fast").is_err() && parse_ms("x").is_err() && parse_size("y").is_err());
    }
}
