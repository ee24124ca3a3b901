//! How the marked blocks are cut into requests.

use super::MOST_SECTORS;

/// The bits of one request that starts at set bit `bit`, where `clear` is the next clear one:
/// aligned power-of-two pieces, so that long areas end up in few large requests.
///
/// `unit` is the number of blocks that may be answered without data, or 0.
pub(super) fn request_bits(
    clear: u64,
    bit: u64,
    block_sectors: u64,
    grant_sectors: u64,
    unit: u64,
) -> (u64, u64) {
    let most = match unit {
        0 => (MOST_SECTORS / block_sectors).max(1),
        _ => unit,
    };
    let aligned = if bit == 0 {
        most
    } else {
        (1 << bit.trailing_zeros().min(20)).min(most)
    };
    let granted = (grant_sectors / block_sectors).max(1);
    (
        bit,
        clear.min(bit + aligned.min(granted.next_power_of_two())),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_grow_to_aligned_powers_of_two() {
        assert_eq!(request_bits(1000, 0, 8, 4096, 0), (0, 256));
        assert_eq!(request_bits(1000, 3, 8, 4096, 0), (3, 4));
        assert_eq!(request_bits(1000, 4, 8, 4096, 0), (4, 8));
        assert_eq!(request_bits(5, 4, 8, 4096, 0), (4, 5));
        assert_eq!(request_bits(1000, 256, 8, 4096, 0), (256, 512));
        assert_eq!(request_bits(1000, 256, 8, 64, 0), (256, 264));
        assert_eq!(request_bits(1000, 1, 2048, 8, 0), (1, 2));
        // 64 KiB may be answered without data.
        assert_eq!(request_bits(1000, 32, 8, 4096, 16), (32, 48));
        assert_eq!(request_bits(1000, 8, 8, 4096, 16), (8, 16));
        assert_eq!(request_bits(40, 32, 8, 4096, 16), (32, 40));
    }
}
