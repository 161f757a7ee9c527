//! CRC-64/NVME: per 1 MiB chunk while copying, combined into that of a whole file without reading again.

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

/// Bytes per chunk.
pub const CHUNK_BYTES: usize = 1 << 20;

/// Checksum of `bytes`.
#[must_use]
pub fn crc(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// Checksum of two consecutive pieces from theirs; `second_bytes` is the length of the second.
#[must_use]
pub fn combine(first: u64, second: u64, second_bytes: u64) -> u64 {
    if second_bytes == 0 { first } else { checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, second_bytes) }
}

/// Checksum of a region from those of its chunks.
#[must_use]
pub fn combine_chunks(start: u64, crcs: &[u64], bytes: u64) -> u64 {
    let chunk = CHUNK_BYTES as u64;
    crcs.iter().enumerate().fold(start, |sum, (i, crc)| combine(sum, *crc, chunk.min(bytes - i as u64 * chunk)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, straight from the polynomial (NVM Express 2.0, figure 5.2.1.3.4).
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
        }
    }
}
