//! A small seeded generator (xoshiro256**) for UUIDs, transaction ids and jitter.
//!
//! The driver seeds it once from the machine's randomness, the simulator from its seed. It is not
//! for secrets: the driver makes authentication challenges itself.

use lockstep_format::units::Uuid;

/// Deterministic generator: equal seeds give equal sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// A generator for `seed`; every seed is good, zero too.
    pub const fn new(seed: u64) -> Self {
        let mut stream = seed;
        let mut state = [0; 4];
        let mut index = 0;
        while index < state.len() {
            // SplitMix64 spreads similar seeds and never gives four zeros.
            stream = stream.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut word = stream;
            word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            state[index] = word ^ (word >> 31);
            index += 1;
        }
        Rng { state }
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        let result = self.state[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = self.state[1] << 17;
        self.state[2] ^= self.state[0];
        self.state[3] ^= self.state[1];
        self.state[1] ^= self.state[2];
        self.state[0] ^= self.state[3];
        self.state[2] ^= shifted;
        self.state[3] = self.state[3].rotate_left(45);
        result
    }

    /// The next 32 bits.
    pub const fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// A number below `limit`, 0 if `limit` is 0. The bias is below `limit` / 2^64.
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.next_u64() as u128 * limit as u128) >> 64) as u64
    }

    /// A new generation identifier: primary bit clear, none of the values with a meaning.
    pub const fn uuid(&mut self) -> Uuid {
        loop {
            let uuid = Uuid(self.next_u64()).without_primary_bit();
            if !uuid.is_zero()
                && uuid.0 != Uuid::JUST_CREATED.0
                && uuid.0 != Uuid::ALL_ONES.without_primary_bit().0
            {
                return uuid;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn equal_seeds_give_equal_sequences_and_near_seeds_do_not() {
        let (mut a, mut b, mut c) = (Rng::new(0), Rng::new(0), Rng::new(1));
        let mut differing_bits = 0;
        for _ in 0..1000 {
            let value = a.next_u64();
            assert_eq!(value, b.next_u64());
            differing_bits += (value ^ c.next_u64()).count_ones();
        }
        assert!((31_000..33_000).contains(&differing_bits));
    }

    #[test]
    fn numbers_below_a_limit_reach_every_value_and_stay_below() {
        let mut rng = Rng::new(7);
        let mut seen = [0u32; 10];
        for _ in 0..10_000 {
            seen[rng.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|count| (800..1200).contains(count)));
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn a_uuid_never_has_the_primary_bit() {
        let mut rng = Rng::new(7);
        assert!((0..1000).all(|_| rng.uuid().0 & 1 == 0));
    }
}
