//! DiffServ code points (RFC 2474): how the packets of a carrier are marked, so that routers on
//! the way may treat control and bulk differently.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A code point, 0 to 63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dscp(u8);

/// Names and numbers: RFC 2474 (CS), 2597 (AF), 3246 (EF), 5865 (voice-admit), 8622 (LE).
const NAMES: [(&str, u8); 24] = [
    ("default", 0),
    ("le", 1),
    ("cs1", 8),
    ("cs2", 16),
    ("cs3", 24),
    ("cs4", 32),
    ("cs5", 40),
    ("cs6", 48),
    ("cs7", 56),
    ("af11", 10),
    ("af12", 12),
    ("af13", 14),
    ("af21", 18),
    ("af22", 20),
    ("af23", 22),
    ("af31", 26),
    ("af32", 28),
    ("af33", 30),
    ("af41", 34),
    ("af42", 36),
    ("af43", 38),
    ("va", 44),
    ("ef", 46),
    // Older names of the default.
    ("cs0", 0),
];

impl Dscp {
    pub(crate) const AF11: Dscp = Dscp(10);
    pub(crate) const AF31: Dscp = Dscp(26);

    /// Reads a name in any case, or a number.
    pub(crate) fn parse(text: &str) -> Option<Dscp> {
        let known = NAMES
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(text));
        match known {
            Some((_, code)) => Some(Dscp(*code)),
            None => text.parse().ok().filter(|code| *code < 64).map(Dscp),
        }
    }

    /// From the TOS byte or traffic class of a socket.
    pub(crate) fn of_tos(tos: u32) -> Dscp {
        Dscp((tos >> 2 & 63) as u8)
    }

    /// The TOS byte (IPv4) or traffic class (IPv6): the upper six bits.
    pub(crate) fn tos(self) -> u32 {
        u32::from(self.0) << 2
    }
}

/// Its name, else its number.
impl fmt::Display for Dscp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(_, code)| *code == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_read_and_written() {
        for (text, tos, shown) in [
            ("af11", 0x28, "af11"),
            ("AF31", 0x68, "af31"),
            ("ef", 0xb8, "ef"),
            ("cs1", 0x20, "cs1"),
            ("46", 0xb8, "ef"),
            ("63", 0xfc, "63"),
            ("0", 0, "default"),
            ("CS0", 0, "default"),
            ("le", 4, "le"),
        ] {
            let code = Dscp::parse(text).unwrap();
            assert_eq!((code.tos(), code.to_string()), (tos, shown.into()));
            assert_eq!(Dscp::of_tos(code.tos() | 1), code);
        }
        for bad in ["64", "-1", "af14", "af01", "ef ", "", "0x2e", "256"] {
            assert_eq!(Dscp::parse(bad), None, "{bad}");
        }
    }
}
