//! CRC-64/NVME: per 1 MiB chunk while copying, combined into that of a whole file without reading
//! again.

use crc_fast::{CrcAlgorithm, checksum};

/// Bytes per chunk.
pub const CHUNK_BYTES: usize = 1 << 20;
/// Bytes of a part of a chunk that is summed alone; a chunk has a whole number of them.
pub(crate) const SMALL_PART: usize = 64 << 10;

/// Returns the CRC-64/NVME of `bytes`.
#[must_use]
pub fn crc(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The polynomial without its highest power, bit-reflected (NVM Express 2.0, figure 5.2.1.3.4).
pub(crate) const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// Returns the product of two polynomials modulo the polynomial, bit-reflected: x^0 is the highest
/// bit.
const fn times(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut bit = 1 << 63;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = (b >> 1) ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

/// Returns x to the power of the number of bits in `bytes`: the factor that moves a checksum that
/// far ahead.
const fn ahead(mut bytes: u64) -> u64 {
    // x^8, squared again and again.
    let mut square: u64 = 1 << (63 - 8);
    let mut result: u64 = 1 << 63;
    while bytes > 0 {
        if bytes & 1 == 1 {
            result = times(result, square);
        }
        square = times(square, square);
        bytes >>= 1;
    }
    result
}

/// Returns the checksum of two consecutive pieces from theirs; `second_bytes` is the length of the
/// second.
#[must_use]
pub fn combine(first: u64, second: u64, second_bytes: u64) -> u64 {
    const CHUNK_AHEAD: u64 = ahead(CHUNK_BYTES as u64);
    const PART_AHEAD: u64 = ahead(SMALL_PART as u64);
    let factor = match second_bytes {
        n if n == CHUNK_BYTES as u64 => CHUNK_AHEAD,
        n if n == SMALL_PART as u64 => PART_AHEAD,
        n => ahead(n),
    };
    times(first, factor) ^ second
}

/// Returns the checksum of a region of `bytes` from those of its chunks, continuing `start`.
#[must_use]
pub fn combine_chunks(start: u64, crcs: &[u64], bytes: u64) -> u64 {
    let chunk = CHUNK_BYTES as u64;
    crcs.iter().enumerate().fold(start, |sum, (i, crc)| combine(sum, *crc, chunk.min(bytes - i as u64 * chunk)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the checksum bit by bit, straight from the polynomial (NVM Express 2.0, figure
    /// 5.2.1.3.4).
    fn oracle(bytes: &[u8]) -> u64 {
        let mut crc = u64::MAX;
        for byte in bytes {
            crc ^= u64::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0x9a6c_9329_ac4b_c9b5 } else { crc >> 1 };
            }
        }
        !crc
    }

    proptest! {
        #[test]
        fn agrees_with_the_polynomial_and_combines(bytes in prop::collection::vec(any::<u8>(), 0..4000), at in 0usize..4000) {
            let at = at.min(bytes.len());
            let (a, b) = bytes.split_at(at);
            prop_assert_eq!(crc(&bytes), oracle(&bytes));
            prop_assert_eq!(combine(crc(a), crc(b), b.len() as u64), crc(&bytes));
            let chunk = vec![7; CHUNK_BYTES];
            prop_assert_eq!(combine(crc(a), crc(&chunk), CHUNK_BYTES as u64), crc(&[a, &chunk].concat()));
        }
    }
}
