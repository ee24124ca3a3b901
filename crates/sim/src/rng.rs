//! The only source of chance: one xorshift generator per world.

/// A small deterministic generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator of this seed; close seeds give unrelated streams.
    pub fn new(seed: u64) -> Self {
        let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Rng((z ^ (z >> 31)) | 1)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.bits() >> 11) % limit
    }

    /// A number of the half-open range.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below((to - from).max(1))
    }

    /// True in so many of a thousand cases.
    pub fn permille(&mut self, chance: u32) -> bool {
        self.below(1000) < u64::from(chance)
    }

    /// One of the slice.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// A time in nanoseconds: mostly near `typical`, sometimes many times that.
    pub fn delay(&mut self, typical: u64) -> u64 {
        let base = self.range(typical / 4 + 1, typical * 2 + 2);
        match self.below(32) {
            0 => base * 16,
            1..=3 => base * 4,
            _ => base,
        }
    }
}

/// One number out of several: the seed of a stream that only its own name and place change.
pub fn mixed(parts: &[u64]) -> u64 {
    let mut z = 0x9e37_79b9_7f4a_7c15u64;
    for part in parts {
        z = (z ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 32;
    }
    z
}
