//! Digests of payload: data integrity, checksum resync, online verify.

use sha1::Digest as _;

/// The digest of `bytes` by an algorithm as the configuration names it; `None` if it is unknown.
pub fn digest(algorithm: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    Some(match algorithm {
        // The kernel gives the final value in little-endian order.
        "crc32c" => crc32c::crc32c(bytes).to_le_bytes().to_vec(),
        "md5" => md5::Md5::digest(bytes).to_vec(),
        "sha1" => sha1::Sha1::digest(bytes).to_vec(),
        "sha224" => sha2::Sha224::digest(bytes).to_vec(),
        "sha256" => sha2::Sha256::digest(bytes).to_vec(),
        "sha384" => sha2::Sha384::digest(bytes).to_vec(),
        "sha512" => sha2::Sha512::digest(bytes).to_vec(),
        _ => return None,
    })
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
