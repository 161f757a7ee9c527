//! Copy and checksum in one pass: load → streaming store → fold. CRC-64/NVME is a remainder of
//! polynomials over GF(2), so 64 bytes are folded by two carry-less multiplications while they are
//! in registers; memory is the limit.
//!
//! Method: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel,
//! 2009), on four 512-bit accumulators. Streaming stores leave the target's old lines unread: to
//! copy 1 MB into memory that no cache holds, they take a third of the time of ordinary ones. A
//! fence waits for all of them, so a copy in many pieces has one at its end
//! ([`Running::copy_piece`], [`fence`]). Without AVX-512 the same is done with lanes of 128 bits.
//! Other processors get the same result from pieces that fit into the cache, copied and then summed
//! by `crc-fast`, which picks its own instructions.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod pclmul;

use crate::format::digest::{POLYNOMIAL, combine, crc};

/// Below this size, tables are faster than anything else. To combine the checksum of a piece takes
/// as long as to copy ten kilobytes.
const BY_TABLE: usize = 256;
/// Pieces of this size stay in the second-level cache between copy and checksum.
const PIECE_BYTES: usize = 128 << 10;

/// Returns x^`n` modulo the polynomial, bit-reflected.
const fn power(n: u32) -> u64 {
    // x^0 is the highest bit of a reflected value; multiplying by x shifts it down.
    let mut value: u64 = 1 << 63;
    let mut i = 0;
    while i < n {
        value = (value >> 1) ^ if value & 1 == 1 { POLYNOMIAL } else { 0 };
        i += 1;
    }
    value
}

/// The remainder of each byte, for the edges of a piece.
const TABLE: [u64; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            value = (value >> 1) ^ if value & 1 == 1 { POLYNOMIAL } else { 0 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

/// The remainder of each byte with up to seven bytes of zeros behind it: eight bytes are taken at
/// once.
static BY_EIGHT: [[u64; 256]; 8] = {
    let mut tables = [TABLE; 8];
    let mut behind = 1;
    while behind < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[behind - 1][byte];
            tables[behind][byte] = (before >> 8) ^ TABLE[(before & 0xff) as usize];
            byte += 1;
        }
        behind += 1;
    }
    tables
};

fn by_table(mut state: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let each = (state ^ u64::from_le_bytes(*word)).to_le_bytes();
        let of = |at: usize| BY_EIGHT[7 - at][each[at] as usize];
        state = of(0) ^ of(1) ^ of(2) ^ of(3) ^ of(4) ^ of(5) ^ of(6) ^ of(7);
    }
    for byte in rest {
        state = BY_EIGHT[0][((state ^ u64::from(*byte)) & 0xff) as usize] ^ (state >> 8);
    }
    state
}

/// A checksum over consecutive pieces, each copied on the way.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// The register of the algorithm: the inverted remainder of the bytes so far.
    state: u64,
}

impl Default for Running {
    fn default() -> Self {
        Running { state: u64::MAX }
    }
}

impl Running {
    /// Continues after bytes with this checksum.
    #[must_use]
    pub fn after(checksum: u64) -> Self {
        Running { state: !checksum }
    }

    /// Returns the checksum of all bytes so far.
    #[must_use]
    pub fn value(self) -> u64 {
        !self.state
    }

    /// Copies `len` bytes and adds them to the checksum.
    ///
    /// # Safety
    /// `source` is readable and `target` writable for `len` bytes, and they do not overlap; no
    /// other thread writes `target` meanwhile.
    pub unsafe fn copy(&mut self, target: *mut u8, source: *const u8, len: usize) {
        // SAFETY: the caller guarantees that `source` is readable and `target` writable for `len`
        // bytes.
        unsafe { self.pass::<true>(target, source, len) }
        fence();
    }

    /// Does what [`Running::copy`] does, for one of many pieces. Other threads may not see the
    /// piece before this one has called [`fence`].
    ///
    /// # Safety
    /// The same as for [`Running::copy`].
    pub unsafe fn copy_piece(&mut self, target: *mut u8, source: *const u8, len: usize) {
        // SAFETY: the caller guarantees that `source` is readable and `target` writable for `len`
        // bytes.
        unsafe { self.pass::<true>(target, source, len) }
    }

    /// Adds bytes to the checksum without copying them.
    pub fn read(&mut self, bytes: &[u8]) {
        // SAFETY: readable for its length; the target is not used.
        unsafe { self.pass::<false>(std::ptr::null_mut(), bytes.as_ptr(), bytes.len()) }
    }

    /// Sums `len` bytes of `source` and, with `COPY`, copies them to `target`.
    ///
    /// # Safety
    /// The same as for [`Running::copy`]; without `COPY`, `target` may be any address.
    unsafe fn pass<const COPY: bool>(&mut self, target: *mut u8, source: *const u8, len: usize) {
        #[cfg(target_arch = "x86_64")]
        if len >= BY_TABLE && has_avx512() {
            // SAFETY: `has_avx512` has found the instructions; the caller guarantees both ranges.
            self.state = unsafe { avx512::pass::<COPY>(self.state, target, source, len) };
            return;
        } else if len >= BY_TABLE && has_pclmul() {
            // SAFETY: `has_pclmul` has found the instructions; the caller guarantees both ranges.
            self.state = unsafe { pclmul::pass::<COPY>(self.state, target, source, len) };
            return;
        }
        // SAFETY: the caller guarantees that `source` is readable and, with `COPY`, `target`
        // writable for `len` bytes.
        unsafe { self.portable::<COPY>(target, source, len) }
    }

    /// Does what [`Running::pass`] does, on any processor.
    ///
    /// # Safety
    /// The same as for [`Running::pass`].
    unsafe fn portable<const COPY: bool>(&mut self, target: *mut u8, source: *const u8, len: usize) {
        let mut at = 0;
        while at < len {
            let n = PIECE_BYTES.min(len - at);
            // SAFETY: within both ranges (at + n <= len).
            let piece = unsafe {
                if COPY {
                    std::ptr::copy_nonoverlapping(source.add(at), target.add(at), n);
                    std::slice::from_raw_parts(target.add(at), n)
                } else {
                    std::slice::from_raw_parts(source.add(at), n)
                }
            };
            self.state =
                if n < BY_TABLE { by_table(self.state, piece) } else { !combine(!self.state, crc(piece), n as u64) };
            at += n;
        }
    }
}

/// Makes what this thread has copied visible to threads that learn of it from this thread.
pub fn fence() {
    // Miri has neither streaming stores nor the fence for them.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: part of SSE, which every x86-64 processor has.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Returns whether AVX-512 can be used with carry-less multiplication of four lanes at once.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    streams() && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
}

#[cfg(target_arch = "x86_64")]
fn has_pclmul() -> bool {
    streams() && is_x86_feature_detected!("pclmulqdq")
}

/// Returns whether streaming stores may be used: neither a sanitizer nor Miri sees them.
#[cfg(target_arch = "x86_64")]
fn streams() -> bool {
    !cfg!(everstep_sanitized) && !cfg!(miri)
}

/// Copies and sums bytes that do not fill a round of lanes.
///
/// # Safety
/// The same as for [`Running::copy`]; without `COPY`, `target` may be any address.
#[cfg(target_arch = "x86_64")]
unsafe fn edge<const COPY: bool>(state: u64, target: *mut u8, source: *const u8, len: usize) -> u64 {
    // SAFETY: the caller guarantees that `source` is readable for `len` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(source, len) };
    if COPY {
        // SAFETY: the caller guarantees that `target` is writable for `len` bytes and does not
        // overlap `source`.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len) };
    }
    by_table(state, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the checksum bit by bit, straight from the polynomial.
    fn oracle(bytes: &[u8]) -> u64 {
        !bytes.iter().fold(u64::MAX, |state, byte| {
            (0..8).fold(state ^ u64::from(*byte), |s, _| if s & 1 == 1 { (s >> 1) ^ POLYNOMIAL } else { s >> 1 })
        })
    }

    proptest! {
        #[test]
        fn every_path_copies_and_agrees_with_the_polynomial(
            bytes in prop::collection::vec(any::<u8>(), 0..9000), skew in 0usize..70, cut in 0usize..9000,
        ) {
            let mut target = vec![0u8; bytes.len() + 70];
            let (expected, cut) = (oracle(&bytes), cut.min(bytes.len()));
            let mut pieces = Running::default();
            let mut portable = Running::default();
            let mut read = Running::default();
            // SAFETY: the target has 70 bytes more than are copied, and they begin less than 70
            // bytes after its start.
            unsafe {
                let to = target.as_mut_ptr().add(skew);
                pieces.copy(to, bytes.as_ptr(), cut);
                pieces.copy(to.add(cut), bytes.as_ptr().add(cut), bytes.len() - cut);
                prop_assert_eq!(&target[skew..skew + bytes.len()], &bytes[..]);
                target.fill(0);
                portable.portable::<true>(target.as_mut_ptr().add(skew), bytes.as_ptr(), bytes.len());
            }
            prop_assert_eq!(&target[skew..skew + bytes.len()], &bytes[..]);
            // Not chosen on a processor with AVX-512.
            #[cfg(target_arch = "x86_64")]
            if has_pclmul() {
                target.fill(0);
                // SAFETY: `has_pclmul` has found the instructions; the target has 70 bytes more
                // than are copied, and they begin less than 70 bytes after its start.
                let state = unsafe { pclmul::pass::<true>(u64::MAX, target.as_mut_ptr().add(skew), bytes.as_ptr(), bytes.len()) };
                fence();
                prop_assert_eq!(&target[skew..skew + bytes.len()], &bytes[..]);
                prop_assert_eq!(!state, expected);
            }
            read.read(&bytes[..cut]);
            read.read(&bytes[cut..]);
            prop_assert_eq!((pieces.value(), portable.value(), read.value()), (expected, expected, expected));
        }
    }
}
