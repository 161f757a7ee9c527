//! The code itself, over short pieces that stay in the cache.

use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use std::io;

/// Bytes of each shard that are encoded at a time: all of them fit into the cache.
pub const PIECE_BYTES: usize = 64 << 10;
/// Lengths of pieces are multiples of this: then a piece may be cut anywhere without changing the
/// code.
pub const GRAIN: usize = 64;

fn wrong(e: reed_solomon_simd::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, e.to_string())
}

/// Computes parity shards from data shards.
pub struct Encoder {
    shape: (usize, usize),
    bytes: usize,
    inner: ReedSolomonEncoder,
}

impl Encoder {
    /// Creates an encoder for `data` shards and `parity` parity shards.
    ///
    /// # Errors
    /// Fails when there is no such code.
    pub fn new(data: usize, parity: usize) -> io::Result<Self> {
        let inner = ReedSolomonEncoder::new(data, parity, PIECE_BYTES).map_err(wrong)?;
        Ok(Encoder { shape: (data, parity), bytes: PIECE_BYTES, inner })
    }

    /// Computes the parity of these pieces (one per data shard, of equal length, a multiple of
    /// [`GRAIN`]), and passes each piece of parity to `take` with its number.
    ///
    /// # Errors
    /// Fails for pieces of other lengths, and with the errors of `take`.
    pub fn encode(
        &mut self,
        pieces: &[impl AsRef<[u8]>],
        mut take: impl FnMut(usize, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let bytes = pieces.first().map_or(0, |p| p.as_ref().len());
        if bytes != self.bytes {
            self.inner.reset(self.shape.0, self.shape.1, bytes).map_err(wrong)?;
            self.bytes = bytes;
        }
        pieces.iter().try_for_each(|piece| self.inner.add_original_shard(piece).map_err(wrong))?;
        let done = self.inner.encode().map_err(wrong)?;
        done.recovery_iter().enumerate().try_for_each(|(number, piece)| take(number, piece))
    }
}

/// Computes lost data shards.
pub struct Decoder {
    shape: (usize, usize),
    bytes: usize,
    inner: ReedSolomonDecoder,
}

impl Decoder {
    /// Creates a decoder for `data` shards and `parity` parity shards.
    ///
    /// # Errors
    /// Fails when there is no such code.
    pub fn new(data: usize, parity: usize) -> io::Result<Self> {
        let inner = ReedSolomonDecoder::new(data, parity, PIECE_BYTES).map_err(wrong)?;
        Ok(Decoder { shape: (data, parity), bytes: PIECE_BYTES, inner })
    }

    /// Computes the piece of data shard `lost` and passes it to `take`. `pieces` has as many others
    /// as there are data shards, with their numbers; parity shards are numbered after the data
    /// shards.
    ///
    /// # Errors
    /// Fails for too few pieces or pieces of other lengths, and with the errors of `take`.
    pub fn decode(
        &mut self,
        pieces: &[(usize, impl AsRef<[u8]>)],
        lost: usize,
        take: impl FnOnce(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let (data, parity) = self.shape;
        let bytes = pieces.first().map_or(0, |(_, p)| p.as_ref().len());
        if bytes != self.bytes {
            self.inner.reset(data, parity, bytes).map_err(wrong)?;
            self.bytes = bytes;
        }
        for (number, piece) in pieces {
            match number.checked_sub(data) {
                None => self.inner.add_original_shard(*number, piece),
                Some(number) => self.inner.add_recovery_shard(number, piece),
            }
            .map_err(wrong)?;
        }
        let done = self.inner.decode().map_err(wrong)?;
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, "this shard was not lost");
        take(done.restored_original(lost).ok_or_else(missing)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parity_of(data: &[Vec<u8>], parity: usize) -> Vec<Vec<u8>> {
        let mut found = vec![Vec::new(); parity];
        let take = |n: usize, piece: &[u8]| {
            found[n] = piece.to_vec();
            Ok(())
        };
        Encoder::new(data.len(), parity).unwrap().encode(data, take).unwrap();
        found
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_so_many_are_enough(
            data in 1usize..9, parity in 1usize..4, grains in 1usize..40, seed: u64, order in Just(()).prop_perturb(|(), mut rng| {
                let mut all: Vec<usize> = (0..12).collect();
                for i in (1..all.len()).rev() {
                    all.swap(i, rng.random_range(0..=i));
                }
                all
            }),
        ) {
            let mut state = seed | 1;
            let mut byte = || { state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1); (state >> 56) as u8 };
            let shards: Vec<Vec<u8>> = (0..data).map(|_| (0..grains * GRAIN).map(|_| byte()).collect()).collect();
            let coded = parity_of(&shards, parity);
            let lost: Vec<usize> = order.iter().copied().filter(|n| *n < data + parity).take(parity).collect();
            let left: Vec<(usize, &Vec<u8>)> = shards.iter().chain(&coded).enumerate().filter(|(n, _)| !lost.contains(n)).collect();
            let mut decoder = Decoder::new(data, parity).unwrap();
            for missing in lost.into_iter().filter(|n| *n < data) {
                let mut found = Vec::new();
                decoder.decode(&left, missing, |piece| { found = piece.to_vec(); Ok(()) }).unwrap();
                prop_assert_eq!(&found, &shards[missing]);
            }
        }

        #[test]
        fn a_piece_may_be_cut_anywhere(grains in 2usize..40, cut in 1usize..39, seed: u8) {
            let cut = cut.min(grains - 1) * GRAIN;
            let shards: Vec<Vec<u8>> = (0..4u8).map(|n| (0..grains * GRAIN).map(|i| (i as u8).wrapping_mul(n + 3) ^ seed).collect()).collect();
            let whole = parity_of(&shards, 2);
            let front = parity_of(&shards.iter().map(|s| s[..cut].to_vec()).collect::<Vec<_>>(), 2);
            let back = parity_of(&shards.iter().map(|s| s[cut..].to_vec()).collect::<Vec<_>>(), 2);
            for n in 0..2 {
                prop_assert_eq!(&whole[n], &[front[n].clone(), back[n].clone()].concat());
            }
        }
    }
}
