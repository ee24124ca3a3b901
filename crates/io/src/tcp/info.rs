//! What the kernel knows of a TCP connection: losses, round trips, and how much it may have under
//! way (`TCP_INFO`).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A connection at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Smoothed round trip time and its mean deviation, in microseconds; 0 is unknown.
    pub rtt_us: u32,
    /// See `rtt_us`.
    pub rtt_deviation_us: u32,
    /// Shortest round trip that was seen, in microseconds; 0 is unknown.
    pub min_rtt_us: u32,
    /// Segments that may be under way unacknowledged.
    pub congestion_window_segments: u32,
    /// Largest segment that is sent, in bytes.
    pub segment_bytes: u32,
    /// Segments under way.
    pub unacknowledged_segments: u32,
    /// How often in a row the oldest one was sent again.
    pub retransmissions: u8,
    /// Milliseconds since something was acknowledged.
    pub since_acknowledgement_ms: u32,
    /// Segments that were sent again since the connection began.
    pub retransmitted_segments: u32,
    /// Bytes in them; 0 where the kernel does not count them (before Linux 4.19).
    pub retransmitted_bytes: u64,
    /// Bytes per second that arrived lately, as the sender sees it; 0 is unknown.
    pub delivery_bytes_per_second: u64,
}

/// Of this the kernel fills as much as it has.
const LEN: usize = 256;

impl TcpInfo {
    /// Asks the kernel.
    pub fn of(fd: &impl AsFd) -> io::Result<TcpInfo> {
        let mut bytes = [0u8; LEN];
        let mut size = LEN as libc::socklen_t;
        let raw = fd.as_fd().as_raw_fd();
        // SAFETY: the kernel writes at most `size` bytes, which `bytes` has, and any bytes are valid.
        let result = unsafe {
            let to = bytes.as_mut_ptr().cast();
            libc::getsockopt(raw, libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut size)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(TcpInfo::read(&bytes))
    }

    /// The layout of `struct tcp_info`; what an older kernel does not have stays 0.
    fn read(bytes: &[u8; LEN]) -> TcpInfo {
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(word)
        };
        let long = |at: usize| {
            let mut long = [0; 8];
            long.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(long)
        };
        // Without any measurement the kernel has the largest number.
        let known = |us: u32| if us == u32::MAX { 0 } else { us };
        TcpInfo {
            rtt_us: word(68),
            rtt_deviation_us: word(72),
            min_rtt_us: known(word(148)),
            congestion_window_segments: word(80),
            segment_bytes: word(16),
            unacknowledged_segments: word(24),
            retransmissions: bytes[2],
            since_acknowledgement_ms: word(56),
            retransmitted_segments: word(100),
            retransmitted_bytes: long(208),
            delivery_bytes_per_second: long(160),
        }
    }

    /// Bytes that may be under way unacknowledged.
    pub fn congestion_window_bytes(&self) -> u64 {
        u64::from(self.congestion_window_segments) * u64::from(self.segment_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_live_connection_has_a_window_and_a_round_trip_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let mut bytes = vec![7; 100_000];
        for _ in 0..10 {
            near.write_all(&bytes).unwrap();
            far.read_exact(&mut bytes).unwrap();
        }
        let info = TcpInfo::of(&near).unwrap();
        assert!(
            (1..1_000_000).contains(&info.rtt_us) && info.rtt_deviation_us > 0,
            "{info:?}"
        );
        assert!(info.min_rtt_us <= info.rtt_us * 100, "{info:?}");
        assert!(
            (2..100_000).contains(&info.congestion_window_segments)
                && (500..70_000).contains(&info.segment_bytes),
            "{info:?}"
        );
        assert!(info.congestion_window_bytes() >= 1000);
        let nothing = std::fs::File::open("/dev/null").unwrap();
        assert!(TcpInfo::of(&nothing).is_err());
    }

    #[test]
    fn the_layout_is_that_of_linux() {
        let mut bytes = [0; LEN];
        for (at, value) in [(16, 1u32), (24, 2), (68, 3), (72, 4), (80, 5), (100, 6)] {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes[148..152].copy_from_slice(&u32::MAX.to_ne_bytes());
        bytes[160..168].copy_from_slice(&8u64.to_ne_bytes());
        bytes[2] = 10;
        bytes[56..60].copy_from_slice(&11u32.to_ne_bytes());
        bytes[208..216].copy_from_slice(&9u64.to_ne_bytes());
        let info = TcpInfo::read(&bytes);
        let wanted = TcpInfo {
            rtt_us: 3,
            rtt_deviation_us: 4,
            min_rtt_us: 0,
            congestion_window_segments: 5,
            segment_bytes: 1,
            unacknowledged_segments: 2,
            retransmissions: 10,
            since_acknowledgement_ms: 11,
            retransmitted_segments: 6,
            retransmitted_bytes: 9,
            delivery_bytes_per_second: 8,
        };
        assert_eq!(info, wanted);
        assert_eq!(info.congestion_window_bytes(), 5);
    }
}
