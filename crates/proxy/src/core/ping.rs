//! `ping-hold`: while the line is cut, DRBD's own pings are answered here, so that DRBD waits longer
//! than its `ping-timeout`. The only place where anything of DRBD's protocol is read, and the only
//! packet that a proxy ever makes up. Off unless asked for.

use serde::{Deserialize, Serialize};

/// DRBD's liveness question, and the answer to it. Neither has a payload.
const PING: u16 = 0x13;
const PING_ACK: u16 = 0x14;
/// The answer to the end of an epoch, in every protocol.
const BARRIER_ACK: u16 = 0x1c;
/// Acknowledgements of single writes, as in protocol B and C. With these a made-up answer would hold
/// up writers, and a dead peer would be noticed late by those who wait for it. With protocol A they
/// come only during a resync, so an epoch without any says that it is protocol A.
const SYNCHRONOUS: [u16; 3] = [0x15, 0x16, 0x51];
/// Longest time that pings may be answered in the peer's name.
pub(crate) const PING_HOLD_MAX_S: u64 = 60;

/// Follows the packets of one direction of a control socket. The form of a header is known by its
/// magic, so nothing of the handshake must be seen.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Walk {
    head: Vec<u8>,
    /// Bytes of the present packet's payload that are still to come.
    payload: u64,
    /// What came is not DRBD's protocol in clear.
    lost: bool,
}

impl Walk {
    /// Takes bytes; says command and header of each packet whose header is complete.
    fn take(&mut self, mut data: &[u8], mut seen: impl FnMut(u16, &[u8])) {
        while !data.is_empty() && !self.lost {
            let skip = self.payload.min(data.len() as u64);
            data = &data[skip as usize..];
            self.payload -= skip;
            while let Some((byte, rest)) = data.split_first().filter(|_| self.payload == 0) {
                self.head.push(*byte);
                data = rest;
                let Some(len) = header_len(&self.head) else {
                    self.lost = true;
                    return;
                };
                if self.head.len() < len {
                    continue;
                }
                let (command, payload) = parsed(&self.head);
                seen(command, &self.head);
                self.head.clear();
                self.payload = u64::from(payload);
            }
        }
    }

    /// Between two packets, and sure of it.
    fn is_between(&self) -> bool {
        !self.lost && self.head.is_empty() && self.payload == 0
    }
}

/// Length of a header that begins like this; `None` if none does.
fn header_len(head: &[u8]) -> Option<usize> {
    const FORMS: [(&[u8], usize); 3] = [
        (&[0x83, 0x74, 0x02, 0x67], 8),
        (&[0x83, 0x5a], 8),
        (&[0x86, 0x20, 0xec, 0x20], 16),
    ];
    let known = FORMS.iter().find(|(magic, _)| {
        let both = magic.len().min(head.len());
        magic[..both] == head[..both]
    });
    known.map(|(_, len)| *len)
}

/// Place of the command in a header of this form.
fn command_at(head: &[u8]) -> usize {
    match (head[1], head.len()) {
        (0x5a, _) => 2,
        (_, 16) => 6,
        _ => 4,
    }
}

/// Command and payload length of a complete header.
fn parsed(head: &[u8]) -> (u16, u32) {
    let short = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let at = command_at(head);
    let long = u32::from(short(at + 2)) << 16;
    let len = match at {
        4 => u32::from(short(6)),
        _ => long | u32::from(short(at + 4)),
    };
    (short(at), len)
}

/// What is known of one control socket's pings. An upgrade takes it along.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PingHold {
    from_local: Walk,
    to_local: Walk,
    /// Pings of the local DRBD without an answer, and the header of the last one.
    unanswered: u32,
    ping: Vec<u8>,
    /// A single write was acknowledged since the end of the last epoch; and in the epoch before it.
    acked: bool,
    acked_before: bool,
}

impl PingHold {
    /// The local DRBD sent these bytes.
    pub(crate) fn sent(&mut self, data: &[u8]) {
        let mut other = Vec::new();
        self.from_local.take(data, |command, head| {
            other.push(command);
            if command == PING {
                self.unanswered += 1;
                self.ping = head.to_vec();
            }
        });
        other.into_iter().for_each(|command| self.note(command));
    }

    /// The local DRBD is given these bytes, which its peer sent.
    pub(crate) fn given(&mut self, data: &[u8]) {
        let mut other = Vec::new();
        self.to_local.take(data, |command, _| {
            other.push(command);
            if command == PING_ACK {
                self.unanswered = self.unanswered.saturating_sub(1);
            }
        });
        other.into_iter().for_each(|command| self.note(command));
    }

    /// Watches for signs of protocol B and C, in both directions.
    fn note(&mut self, command: u16) {
        if command == BARRIER_ACK {
            self.acked_before = std::mem::take(&mut self.acked);
        }
        self.acked |= SYNCHRONOUS.contains(&command);
    }

    /// Answers to the pings that wait for one, if they can be put here. The peer answers them too,
    /// later; DRBD takes an answer that it does not wait for as a sign of life.
    pub(crate) fn answers(&mut self) -> Option<Vec<u8>> {
        let sure = !self.from_local.lost && self.to_local.is_between();
        if self.unanswered == 0 || self.acked || self.acked_before || !sure {
            return None;
        }
        let mut answer = std::mem::take(&mut self.ping);
        let at = command_at(&answer);
        answer[at..at + 2].copy_from_slice(&PING_ACK.to_be_bytes());
        let count = std::mem::take(&mut self.unanswered);
        Some(answer.repeat(count.min(16) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PING80: [u8; 8] = [0x83, 0x74, 0x02, 0x67, 0, 0x13, 0, 0];
    const PING95: [u8; 8] = [0x83, 0x5a, 0, 0x13, 0, 0, 0, 0];
    const PING100: [u8; 16] = [
        0x86, 0x20, 0xec, 0x20, 0, 0, 0, 0x13, 0, 0, 0, 0, 0, 0, 0, 0,
    ];

    fn with_command(ping: &[u8], command: u16) -> Vec<u8> {
        let mut out = ping.to_vec();
        let at = command_at(ping);
        out[at..at + 2].copy_from_slice(&command.to_be_bytes());
        out
    }

    /// A barrier ack with its payload of 8 bytes, header form 100.
    fn barrier_ack() -> Vec<u8> {
        let mut out = with_command(&PING100, BARRIER_ACK);
        out[11] = 8;
        out.extend([0x83; 8]);
        out
    }

    #[test]
    fn a_ping_is_answered_once_in_the_form_in_which_it_was_asked() {
        for ping in [&PING80[..], &PING95, &PING100] {
            let mut hold = PingHold::default();
            assert_eq!(hold.answers(), None);
            // Byte by byte, behind another packet whose payload looks like a magic.
            for byte in [barrier_ack().as_slice(), ping].concat() {
                assert_eq!(hold.answers(), None);
                hold.sent(&[byte]);
            }
            assert_eq!(hold.answers(), Some(with_command(ping, PING_ACK)));
            assert_eq!(hold.answers(), None);
            hold.sent(&ping.repeat(2));
            hold.given(&with_command(ping, PING_ACK));
            assert_eq!(hold.answers(), Some(with_command(ping, PING_ACK)));
        }
    }

    #[test]
    fn nothing_is_put_into_the_middle_of_a_packet_or_into_what_is_not_understood() {
        let mut hold = PingHold::default();
        hold.sent(&PING100);
        let ack = barrier_ack();
        hold.given(&ack[..20]);
        assert_eq!(hold.answers(), None, "in the middle of a payload");
        hold.given(&ack[20..]);
        assert!(hold.answers().is_some());
        hold.sent(&PING100);
        hold.given(b"\x16\x03\x03 TLS");
        assert_eq!(hold.answers(), None);
        let mut hold = PingHold::default();
        hold.sent(b"\x16\x03\x03 TLS and then by chance");
        hold.sent(&PING100);
        assert_eq!(hold.answers(), None);
    }

    #[test]
    fn with_protocol_b_or_c_no_answer_is_made_up() {
        for command in SYNCHRONOUS {
            let mut hold = PingHold::default();
            hold.sent(&PING80);
            let mut ack = with_command(&PING80, command);
            ack[7] = 24;
            ack.extend([0; 24]);
            hold.given(&ack);
            assert_eq!(hold.answers(), None);
            hold.given(&barrier_ack());
            assert_eq!(hold.answers(), None, "the epoch had one");
            hold.given(&barrier_ack());
            assert!(
                hold.answers().is_some(),
                "a resync with protocol A has ended"
            );
        }
    }
}
