//! Digests of payload: data integrity, checksum resync, online verify.

use lockstep_core::event::ALL_ZERO;
use lockstep_format::wire::Digest;
use lockstep_format::wire::alg::DigestAlg;
use sha1::Digest as _;

/// The digest of `bytes` by an algorithm as the configuration names it, or what [`ALL_ZERO`] asks
/// for; `None` if it is unknown.
pub fn digest(algorithm: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    if algorithm == ALL_ZERO {
        return Some(vec![u8::from(is_zero(bytes))]);
    }
    let alg = DigestAlg::from_name(algorithm)?;
    Some(digest_by(alg, bytes).as_bytes().to_vec())
}

/// The digest of `bytes`.
pub fn digest_by(alg: DigestAlg, bytes: &[u8]) -> Digest {
    let digest = match alg {
        // The kernel gives the final value in little-endian order.
        DigestAlg::Crc32c => Digest::new(&crc32c::crc32c(bytes).to_le_bytes()),
        DigestAlg::Md5 => Digest::new(&md5::Md5::digest(bytes)),
        DigestAlg::Sha1 => Digest::new(&sha1::Sha1::digest(bytes)),
        DigestAlg::Sha224 => Digest::new(&sha2::Sha224::digest(bytes)),
        DigestAlg::Sha256 => Digest::new(&sha2::Sha256::digest(bytes)),
        DigestAlg::Sha384 => Digest::new(&sha2::Sha384::digest(bytes)),
        DigestAlg::Sha512 => Digest::new(&sha2::Sha512::digest(bytes)),
    };
    digest.expect("no algorithm has more than 64 bytes")
}

/// All bytes are zero. In pieces: most blocks with data show it at their beginning.
fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(512)
        .all(|piece| piece.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Bytes of a digest of this algorithm; `None` if it is unknown.
pub fn digest_len(algorithm: &str) -> Option<usize> {
    digest(algorithm, &[]).map(|digest| digest.len())
}

#[cfg(test)]
mod tests {
    use super::{digest, digest_len};

    fn hex(algorithm: &str) -> String {
        let digest = digest(algorithm, b"123456789").unwrap();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn one_byte_that_is_not_zero_is_seen_wherever_it_is() {
        let zero = |bytes: &[u8]| digest("all-zero", bytes) == Some(vec![1]);
        assert!(zero(&[0; 4097]) && zero(&[]));
        for at in [0, 511, 512, 4095, 4096] {
            let mut bytes = [0; 4097];
            bytes[at] = 0x80;
            assert!(!zero(&bytes), "{at}");
        }
    }

    #[test]
    fn digests_have_their_published_check_values() {
        // The check value of CRC-32C is 0xe3069283.
        assert_eq!(hex("crc32c"), "839206e3");
        assert_eq!(hex("md5"), "25f9e794323b453885f5181f1b624d0b");
        assert_eq!(hex("sha1"), "f7c3bc1d808e04732adf679965ccc34ca7ae3441");
        let sha256 = "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225";
        assert_eq!(hex("sha256"), sha256);
        assert_eq!(digest_len("sha512"), Some(64));
        assert_eq!(digest("rot13", b""), None);
    }
}
