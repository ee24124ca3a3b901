//! Lengths of the digests that algorithm names stand for (wire.md 4.3, digest encodings).

use super::packet::AlgName;

/// A digest that a node of this project can compute: `data-integrity-alg`, `csums-alg` and
/// `verify-alg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say all")]
pub enum DigestAlg {
    Crc32c,
    Md5,
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

impl DigestAlg {
    /// All of them.
    pub const ALL: [DigestAlg; 7] = [
        DigestAlg::Crc32c,
        DigestAlg::Md5,
        DigestAlg::Sha1,
        DigestAlg::Sha224,
        DigestAlg::Sha256,
        DigestAlg::Sha384,
        DigestAlg::Sha512,
    ];

    /// The algorithm of this name; none if it is unknown.
    pub fn from_name(name: &str) -> Option<DigestAlg> {
        Self::ALL.into_iter().find(|alg| alg.name() == name)
    }

    /// Its name in the configuration and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            DigestAlg::Crc32c => "crc32c",
            DigestAlg::Md5 => "md5",
            DigestAlg::Sha1 => "sha1",
            DigestAlg::Sha224 => "sha224",
            DigestAlg::Sha256 => "sha256",
            DigestAlg::Sha384 => "sha384",
            DigestAlg::Sha512 => "sha512",
        }
    }

    /// Bytes of a digest.
    pub const fn digest_len(self) -> u8 {
        match self {
            DigestAlg::Crc32c => 4,
            DigestAlg::Md5 => 16,
            DigestAlg::Sha1 => 20,
            DigestAlg::Sha224 => 28,
            DigestAlg::Sha256 => 32,
            DigestAlg::Sha384 => 48,
            DigestAlg::Sha512 => 64,
        }
    }
}

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
    use super::{AlgName, DigestAlg, digest_len};

    #[test]
    fn both_tables_agree() {
        for alg in DigestAlg::ALL {
            let name = AlgName::new(alg.name().as_bytes()).unwrap();
            assert_eq!(digest_len(&name), Some(alg.digest_len()));
            assert_eq!(DigestAlg::from_name(alg.name()), Some(alg));
        }
        assert_eq!(DigestAlg::from_name(""), None);
    }

    #[test]
    fn an_unknown_algorithm_has_no_length() {
        let len = |name: &str| digest_len(&AlgName::new(name.as_bytes()).unwrap());
        assert_eq!(len(""), Some(0));
        assert_eq!(len("crc32c"), Some(4));
        assert_eq!(len("sha256-generic"), Some(32));
        assert_eq!(len("rot13"), None);
    }
}
