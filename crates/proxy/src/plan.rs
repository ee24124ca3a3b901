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
/// Extents that a default activity log of 32 KiB can hold.
const AL_DEFAULT_AREA: u64 = 6433;
const AL_EXTENTS_MAX: u64 = 65534;

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
        } else if link.change_rate * 10 > drain * 8 {
            warnings.push("The line is loaded above 80 %: bursts drain slowly.".into());
        }
        let wanted = drain.saturating_mul(link.max_lag_s);
        let memlimit_bytes = wanted.next_multiple_of(MIB).max(16 * MIB);
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
        if link.outage_s > PING_TIMEOUT_S - 5 {
            warnings.push(format!(
                "DRBD survives no interruption longer than its ping-timeout of {PING_TIMEOUT_S} s; \
                 after {} s it reconnects and resyncs what changed.",
                PING_TIMEOUT_S - 5
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
        let hold = link.outage_s.min(PING_TIMEOUT_S - 5);
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
    fn units_are_read() {
        assert_eq!(parse_bits("2gbit"), Ok(2_000_000_000));
        assert_eq!(parse_ms("80ms"), Ok(80));
        assert_eq!(parse_ms("2s"), Ok(2000));
        assert_eq!(parse_size("5MiB/s"), Ok(5 << 20));
        assert!(parse_bits("fast").is_err() && parse_ms("x").is_err() && parse_size("y").is_err());
    }
}
