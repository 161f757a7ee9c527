//! With the carry-less multiplication of a single lane, which processors have had since 2010: four
//! times the instructions per byte of AVX-512.

use super::{by_table, edge, power};
use std::arch::x86_64::{
    __m128i, _mm_clmulepi64_si128, _mm_loadu_si128, _mm_set_epi64x, _mm_storeu_si128, _mm_stream_si128, _mm_xor_si128,
};

/// Accumulators, which hide the latency of the multiplication.
const LANES: usize = 8;
/// Bytes per round.
const ROUND: usize = 16 * LANES;

/// Returns the factors of the two halves of a lane. They are powers of x that move the halves
/// forward. The product of two reflected values comes out one power too high, so each power is one
/// less than its distance.
#[target_feature(enable = "sse2")]
fn factors(earlier: u64, later: u64) -> __m128i {
    _mm_set_epi64x(later.cast_signed(), earlier.cast_signed())
}

/// Moves `a` forward and adds `b`.
#[target_feature(enable = "pclmulqdq")]
fn fold(a: __m128i, factor: __m128i, b: __m128i) -> __m128i {
    let earlier = _mm_clmulepi64_si128::<0x00>(a, factor);
    let later = _mm_clmulepi64_si128::<0x11>(a, factor);
    _mm_xor_si128(_mm_xor_si128(earlier, later), b)
}

/// Sums `len` bytes of `source` and, with `COPY`, copies them to `target`; returns the new
/// register.
///
/// # Safety
/// The same as for [`super::Running::copy`]; the processor has the feature.
#[target_feature(enable = "pclmulqdq")]
pub unsafe fn pass<const COPY: bool>(state: u64, target: *mut u8, source: *const u8, len: usize) -> u64 {
    // Up to where streaming stores may begin (or aligned loads, when nothing is stored). They fill
    // whole cache lines.
    let anchor = if COPY { target.cast_const() } else { source };
    let head = anchor.align_offset(64).min(len);
    // SAFETY: head <= len.
    let mut state = unsafe { edge::<COPY>(state, target, source, head) };
    let rounds = (len - head) / ROUND;
    let mut at = head;
    if rounds > 0 {
        const AHEAD: u32 = (ROUND * 8) as u32;
        let far = factors(const { power(AHEAD + 63) }, const { power(AHEAD - 1) });
        // The register is added to the first eight bytes.
        let before = _mm_set_epi64x(0, state.cast_signed());
        let mut acc = [before; LANES];
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: the first round lies within both ranges.
            let data = unsafe { step::<COPY>(target, source, at + 16 * i) };
            *a = if i == 0 { _mm_xor_si128(before, data) } else { data };
        }
        at += ROUND;
        for _ in 1..rounds {
            for (i, a) in acc.iter_mut().enumerate() {
                // SAFETY: at + ROUND <= head + rounds * ROUND <= len.
                let data = unsafe { step::<COPY>(target, source, at + 16 * i) };
                *a = fold(*a, far, data);
            }
            at += ROUND;
        }
        let near = factors(const { power(128 + 63) }, const { power(128 - 1) });
        let mut one = acc[0];
        for next in &acc[1..] {
            one = fold(one, near, *next);
        }
        let mut rest = [0u8; 16];
        // SAFETY: `rest` has room for 16 bytes.
        unsafe { _mm_storeu_si128(rest.as_mut_ptr().cast(), one) };
        // The 16 bytes have the same remainder as everything that was folded into them.
        state = by_table(0, &rest);
    }
    // SAFETY: `len - at` bytes from `at` on are the rest of both ranges, which the caller
    // guarantees.
    unsafe { edge::<COPY>(state, target.wrapping_add(at), source.add(at), len - at) }
}

#[target_feature(enable = "sse2")]
unsafe fn step<const COPY: bool>(target: *mut u8, source: *const u8, at: usize) -> __m128i {
    // SAFETY: the caller guarantees 16 bytes from `at` on in both ranges; `pass` has aligned the
    // target to a cache line by its head.
    unsafe {
        let data = _mm_loadu_si128(source.add(at).cast());
        if COPY {
            _mm_stream_si128(target.add(at).cast(), data);
        }
        data
    }
}
