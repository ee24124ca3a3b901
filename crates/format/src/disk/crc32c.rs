//! CRC-32C in the raw form of the activity log: start value 0 and no final inversion.

/// The CRC over `parts`, one after the other, as if they were one piece.
pub(super) fn crc32c_raw(parts: &[&[u8]]) -> u32 {
    parts.iter().fold(0, |crc, part| update(crc, part))
}

fn update(mut crc: u32, data: &[u8]) -> u32 {
    let mut chunks = data.chunks_exact(8);
    for c in &mut chunks {
        let low = crc ^ u32::from_le_bytes([c[0], c[1], c[2], c[3]]);
        crc = TABLES[7][(low & 0xff) as usize]
            ^ TABLES[6][(low >> 8 & 0xff) as usize]
            ^ TABLES[5][(low >> 16 & 0xff) as usize]
            ^ TABLES[4][(low >> 24) as usize]
            ^ TABLES[3][c[4] as usize]
            ^ TABLES[2][c[5] as usize]
            ^ TABLES[1][c[6] as usize]
            ^ TABLES[0][c[7] as usize];
    }
    for &byte in chunks.remainder() {
        crc = crc >> 8 ^ TABLES[0][((crc ^ u32::from(byte)) & 0xff) as usize];
    }
    crc
}

/// Castagnoli polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[k][b]` is the CRC of byte `b` followed by `k` zero bytes, so that eight bytes need
/// eight look-ups and no dependency between them.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut b = 0;
    while b < 256 {
        let mut crc = b as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        t[0][b] = crc;
        b += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut b = 0;
        while b < 256 {
            t[k][b] = t[k - 1][b] >> 8 ^ t[0][(t[k - 1][b] & 0xff) as usize];
            b += 1;
        }
        k += 1;
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_value_of_an_initialised_transaction() {
        let mut block = [0u8; 4096];
        block[..4].copy_from_slice(&0x69cb_65a2u32.to_be_bytes());
        block[12..14].copy_from_slice(&[0xff, 0xff]);
        assert_eq!(crc32c_raw(&[&block]), 0x709c_c651);
    }

    #[test]
    fn is_the_common_crc_with_the_inversions_put_back() {
        // Common CRC-32C of "123456789" is 0xe3069283. It inverts before and after; the start
        // value of all ones is the same as inverting the first four bytes of the message.
        let mut message = *b"123456789";
        for byte in &mut message[..4] {
            *byte = !*byte;
        }
        assert_eq!(!crc32c_raw(&[&message]), 0xe306_9283);
    }

    #[test]
    fn parts_count_as_one_piece() {
        let data: [u8; 61] = core::array::from_fn(|i| (i * 37) as u8);
        for cut in 0..data.len() {
            assert_eq!(
                crc32c_raw(&[&data[..cut], &data[cut..]]),
                crc32c_raw(&[&data])
            );
        }
    }
}
