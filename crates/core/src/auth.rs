//! Authentication of peers by `cram-hmac-alg` and `shared-secret` (wire.md, 5.3).
//!
//! The challenge comes from the driver's randomness, never from the core's generator: it must not
//! be predictable.

use alloc::string::String;
use alloc::vec::Vec;

use hmac::{Hmac, Mac};
use lockstep_format::units::NodeId;
use lockstep_format::wire::alg::DigestAlg;
use lockstep_format::wire::{CHALLENGE_LEN, Digest};
use md5::Md5;
use sha1::Sha1;
use sha2::{Sha224, Sha256, Sha384, Sha512};

/// Hash inside the HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say all")]
pub enum HmacAlg {
    Md5,
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

/// Why authentication did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The configured algorithm is not known; the command that configures it is refused.
    #[error(
        "cram-hmac-alg {name} is not supported; use md5, sha1, sha224, sha256, sha384 or sha512"
    )]
    UnknownAlgorithm {
        /// As configured.
        name: String,
    },
    /// The peer sent back this side's challenge: stay StandAlone.
    #[error("the peer's challenge is this node's own one")]
    Reflected,
    /// The response has a length of another algorithm: try again.
    #[error("the peer's response has {found} bytes, cram-hmac-alg needs {needed}")]
    WrongLength {
        /// Bytes received.
        found: usize,
        /// Bytes of the configured algorithm.
        needed: usize,
    },
    /// The peer does not know the secret: stay StandAlone.
    #[error("the peer's response is wrong; compare shared-secret on both nodes")]
    Mismatch,
}

impl AuthError {
    /// Whether the connection may be tried again; else it stays StandAlone.
    pub const fn may_retry(&self) -> bool {
        matches!(self, AuthError::WrongLength { .. })
    }
}

/// Bytes of a digest of `data-integrity-alg`, `csums-alg` or `verify-alg`; 0 for an unknown name.
pub fn digest_len(name: &str) -> u8 {
    DigestAlg::from_name(name).map_or(0, DigestAlg::digest_len)
}

impl HmacAlg {
    /// The algorithm of a `cram-hmac-alg` value.
    pub fn from_name(name: &str) -> Result<HmacAlg, AuthError> {
        match name {
            "md5" => Ok(HmacAlg::Md5),
            "sha1" => Ok(HmacAlg::Sha1),
            "sha224" => Ok(HmacAlg::Sha224),
            "sha256" => Ok(HmacAlg::Sha256),
            "sha384" => Ok(HmacAlg::Sha384),
            "sha512" => Ok(HmacAlg::Sha512),
            _ => Err(AuthError::UnknownAlgorithm { name: name.into() }),
        }
    }

    /// Bytes of a response.
    pub const fn response_len(self) -> usize {
        match self {
            HmacAlg::Md5 => 16,
            HmacAlg::Sha1 => 20,
            HmacAlg::Sha224 => 28,
            HmacAlg::Sha256 => 32,
            HmacAlg::Sha384 => 48,
            HmacAlg::Sha512 => 64,
        }
    }

    /// HMAC of `parts` in sequence.
    pub fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Digest {
        match self {
            HmacAlg::Md5 => mac::<Hmac<Md5>>(key, parts),
            HmacAlg::Sha1 => mac::<Hmac<Sha1>>(key, parts),
            HmacAlg::Sha224 => mac::<Hmac<Sha224>>(key, parts),
            HmacAlg::Sha256 => mac::<Hmac<Sha256>>(key, parts),
            HmacAlg::Sha384 => mac::<Hmac<Sha384>>(key, parts),
            HmacAlg::Sha512 => mac::<Hmac<Sha512>>(key, parts),
        }
    }
}

fn mac<M: Mac + hmac::digest::KeyInit>(key: &[u8], parts: &[&[u8]]) -> Digest {
    let mut mac = <M as Mac>::new_from_slice(key).expect("an HMAC takes keys of every length");
    for part in parts {
        mac.update(part);
    }
    Digest::new(&mac.finalize().into_bytes()).expect("no digest here is longer than 64 bytes")
}

/// One authentication of one connection.
#[derive(Clone)]
pub struct Authenticator {
    alg: HmacAlg,
    secret: Vec<u8>,
    challenge: [u8; CHALLENGE_LEN],
    own_node: Option<NodeId>,
    peer_node: Option<NodeId>,
}

impl core::fmt::Debug for Authenticator {
    /// Without the secret.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Authenticator")
            .field("alg", &self.alg)
            .finish_non_exhaustive()
    }
}

impl Authenticator {
    /// Starts with this side's random `challenge`. `nodes` are the own node id and the peer's at
    /// protocol 110 and later, none below.
    pub fn new(
        alg: HmacAlg,
        secret: &str,
        challenge: [u8; CHALLENGE_LEN],
        nodes: Option<(NodeId, NodeId)>,
    ) -> Self {
        Authenticator {
            alg,
            secret: secret.as_bytes().into(),
            challenge,
            own_node: nodes.map(|(own, _)| own),
            peer_node: nodes.map(|(_, peer)| peer),
        }
    }

    /// The challenge to send.
    pub const fn challenge(&self) -> &[u8; CHALLENGE_LEN] {
        &self.challenge
    }

    /// The response to the peer's challenge.
    pub fn respond(&self, peer_challenge: &[u8; CHALLENGE_LEN]) -> Result<Digest, AuthError> {
        if peer_challenge == &self.challenge {
            return Err(AuthError::Reflected);
        }
        Ok(self.response(peer_challenge, self.own_node))
    }

    /// Checks the peer's response to this side's challenge.
    pub fn check(&self, response: &[u8]) -> Result<(), AuthError> {
        let needed = self.alg.response_len();
        if response.len() != needed {
            return Err(AuthError::WrongLength {
                found: response.len(),
                needed,
            });
        }
        let wanted = self.response(&self.challenge, self.peer_node);
        if equal_in_constant_time(wanted.as_bytes(), response) {
            Ok(())
        } else {
            Err(AuthError::Mismatch)
        }
    }

    fn response(&self, challenge: &[u8], node: Option<NodeId>) -> Digest {
        match node {
            Some(node) => {
                let id = u32::from(node.0).to_be_bytes();
                self.alg.hmac(&self.secret, &[challenge, &id])
            }
            None => self.alg.hmac(&self.secret, &[challenge]),
        }
    }
}

/// Compares without telling by its duration where the first difference is.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && core::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const V6: [u8; 32] = [
        0xc2, 0x7b, 0xbd, 0x74, 0xa8, 0x10, 0x2f, 0x71, 0xa2, 0xd3, 0x9a, 0xb9, 0xf3, 0x72, 0x17,
        0x57, 0x8e, 0x1a, 0x9a, 0x52, 0xfb, 0x44, 0xec, 0x3d, 0x36, 0x65, 0x83, 0xa0, 0xce, 0xd4,
        0xfd, 0x2d,
    ];
    const V7: [u8; 20] = [
        0xaf, 0xe9, 0x48, 0x5a, 0x34, 0xcf, 0x04, 0xa7, 0x8c, 0x4f, 0x01, 0x01, 0xa2, 0xa0, 0x89,
        0x74, 0xb9, 0x12, 0xde, 0x08,
    ];
    const NODES: Option<(NodeId, NodeId)> = Some((NodeId(0), NodeId(1)));

    fn v5() -> [u8; CHALLENGE_LEN] {
        core::array::from_fn(|index| index as u8)
    }

    #[test]
    fn responses_are_those_of_the_recorded_vectors() {
        let answering = Authenticator::new(
            HmacAlg::Sha256,
            "secret",
            [9; CHALLENGE_LEN],
            Some((NodeId(1), NodeId(0))),
        );
        assert_eq!(answering.respond(&v5()).unwrap().as_bytes(), V6);
        let asking = Authenticator::new(HmacAlg::Sha256, "secret", v5(), NODES);
        assert_eq!(asking.check(&V6), Ok(()));
        let old = Authenticator::new(HmacAlg::Sha1, "secret", [9; CHALLENGE_LEN], None);
        assert_eq!(old.respond(&v5()).unwrap().as_bytes(), V7);
    }

    #[test]
    fn each_algorithm_authenticates_and_refuses_another_secret() {
        for name in ["md5", "sha1", "sha224", "sha256", "sha384", "sha512"] {
            let alg = HmacAlg::from_name(name).unwrap();
            let a = Authenticator::new(alg, "secret", [1; CHALLENGE_LEN], NODES);
            let nodes = Some((NodeId(1), NodeId(0)));
            let b = Authenticator::new(alg, "secret", [2; CHALLENGE_LEN], nodes);
            let answer = b.respond(a.challenge()).unwrap();
            assert_eq!(answer.as_bytes().len(), alg.response_len());
            assert_eq!(a.check(answer.as_bytes()), Ok(()));
            let mut wrong = Vec::from(answer.as_bytes());
            *wrong.last_mut().unwrap() ^= 1;
            assert_eq!(a.check(&wrong), Err(AuthError::Mismatch));
            let liar = Authenticator::new(alg, "Secret", [2; CHALLENGE_LEN], nodes);
            let answer = liar.respond(a.challenge()).unwrap();
            assert_eq!(a.check(answer.as_bytes()), Err(AuthError::Mismatch));
            // The node id is part of the message: an own response sent back does not pass.
            let mirrored = a.respond(b.challenge()).unwrap();
            assert_eq!(a.check(mirrored.as_bytes()), Err(AuthError::Mismatch));
        }
    }

    #[test]
    fn a_reflected_challenge_gets_no_response() {
        let a = Authenticator::new(HmacAlg::Sha1, "secret", [1; CHALLENGE_LEN], None);
        assert_eq!(a.respond(&[1; CHALLENGE_LEN]), Err(AuthError::Reflected));
        assert!(!AuthError::Reflected.may_retry());
    }

    #[test]
    fn a_response_of_another_length_may_be_retried() {
        let a = Authenticator::new(HmacAlg::Sha1, "secret", [1; CHALLENGE_LEN], None);
        let error = a.check(&V6).unwrap_err();
        assert_eq!(
            error,
            AuthError::WrongLength {
                found: 32,
                needed: 20
            }
        );
        assert!(error.may_retry());
        assert!(HmacAlg::from_name("crc32c").is_err());
    }
}
