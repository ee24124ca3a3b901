//! Lengths of the digests that algorithm names stand for (wire.md 4.3, digest encodings).

use super::packet::AlgName;

/// Bytes of a digest of this algorithm: 0 for the empty name, none for an unknown name.
///
/// Names with a driver suffix, such as `sha1-generic`, are the same algorithms.
pub fn digest_len(name: &AlgName) -> Option<u8> {
    let name = name.as_str()?;
    let base = name.strip_suffix("-generic").unwrap_or(name);
    Some(match base {
        "" => 0,
        "crc32" | "crc32c" => 4,
        "xxhash64" => 8,
        "md4" | "md5" => 16,
        "rmd160" | "sha1" => 20,
        "sha224" | "sha3-224" => 28,
        "blake2s-256" | "sha256" | "sha3-256" | "sm3" => 32,
        "sha384" | "sha3-384" => 48,
        "blake2b-512" | "sha3-512" | "sha512" | "wp512" => 64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::{AlgName, digest_len};

    #[test]
    fn an_unknown_algorithm_has_no_length() {
        let len = |name: &str| digest_len(&AlgName::new(name.as_bytes()).unwrap());
        assert_eq!(len(""), Some(0));
        assert_eq!(len("crc32c"), Some(4));
        assert_eq!(len("sha256-generic"), Some(32));
        assert_eq!(len("rot13"), None);
    }
}
