//! Digests of simulated blocks, which hold a number each.

use lockstep_core::event::ALL_ZERO;
use lockstep_format::wire::alg::DigestAlg;

/// A hash of the blocks' values with as many bytes as the algorithm has. Every byte depends on all bits of all
/// values, so that the four bytes of a CRC tell blocks apart as well as a real one does.
pub(crate) fn digest_of(algorithm: &str, content: &[u64]) -> Vec<u8> {
    if algorithm == ALL_ZERO {
        return vec![u8::from(content.iter().all(|value| *value == 0))];
    }
    let len = DigestAlg::from_name(algorithm).map_or(20, DigestAlg::digest_len);
    let hash = content
        .iter()
        .fold(0, |hash, value| mixed(hash ^ mixed(*value)));
    (0..len).map(|i| (hash >> (i % 8 * 8)) as u8).collect()
}

/// A permutation of all numbers in which each bit of the result depends on each bit of the number.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A world of two nodes had 2 and 66 at one place, and a digest of four bytes that was the same for both: seed 3177474411.
    #[test]
    fn four_bytes_tell_small_numbers_apart() {
        let numbers = 0..4096;
        let seen: BTreeSet<_> = numbers
            .clone()
            .map(|number| digest_of("crc32c", &[7, number, 7]))
            .collect();
        assert_eq!(seen.len(), numbers.count());
    }

    #[test]
    fn a_digest_has_the_length_of_its_algorithm() {
        assert_eq!(digest_of("crc32c", &[1]).len(), 4);
        assert_eq!(digest_of("sha256", &[1]).len(), 32);
        assert_eq!(digest_of(ALL_ZERO, &[0, 0]), [1]);
        assert_eq!(digest_of(ALL_ZERO, &[0, 1]), [0]);
    }
}
