//! With AVX-512: four lanes are multiplied at once, and whole cache lines stored.

use super::{by_table, edge, power};
use std::arch::x86_64::{
    __m128i, __m512i, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set_epi64, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
};

/// Bytes per round: four accumulators hide the latency of the multiplication.
const ROUND: usize = 256;

/// Returns the factors of the two halves of a lane, in all four lanes. They are powers of x that
/// move the halves forward. The product of two reflected values comes out one power too high, so
/// each power is one less than its distance.
#[target_feature(enable = "avx512f")]
fn factors(earlier: u64, later: u64) -> __m512i {
    let (e, l) = (earlier.cast_signed(), later.cast_signed());
    _mm512_set_epi64(l, e, l, e, l, e, l, e)
}

/// Moves each lane of `a` forward and adds `b`.
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(a: __m512i, factor: __m512i, b: __m512i) -> __m512i {
    let earlier = _mm512_clmulepi64_epi128::<0x00>(a, factor);
    let later = _mm512_clmulepi64_epi128::<0x11>(a, factor);
    _mm512_ternarylogic_epi64::<0x96>(earlier, later, b)
}

/// Sums `len` bytes of `source` and, with `COPY`, copies them to `target`; returns the new
/// register.
///
/// # Safety
/// The same as for [`super::Running::copy`]; the processor has the features.
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub unsafe fn pass<const COPY: bool>(state: u64, target: *mut u8, source: *const u8, len: usize) -> u64 {
    // Up to where streaming stores may begin (or aligned loads, when nothing is stored).
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
        let before = _mm512_zextsi128_si512(low(state));
        let mut acc = [before; 4];
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: the first round lies within both ranges.
            let data = unsafe { step::<COPY>(target, source, at + 64 * i) };
            *a = if i == 0 { _mm512_xor_si512(before, data) } else { data };
        }
        at += ROUND;
        for _ in 1..rounds {
            for (i, a) in acc.iter_mut().enumerate() {
                // SAFETY: at + ROUND <= head + rounds * ROUND <= len.
                let data = unsafe { step::<COPY>(target, source, at + 64 * i) };
                *a = fold(*a, far, data);
            }
            at += ROUND;
        }
        let near = factors(const { power(512 + 63) }, const { power(512 - 1) });
        let [a, b, c, d] = acc;
        let one = fold(fold(fold(a, near, b), near, c), near, d);
        let mut rest = [0u8; 64];
        // SAFETY: `rest` has room for 64 bytes.
        unsafe { _mm512_storeu_si512(rest.as_mut_ptr().cast(), one) };
        // The 64 bytes have the same remainder as everything that was folded into them.
        state = by_table(0, &rest);
    }
    // SAFETY: `len - at` bytes from `at` on are the rest of both ranges, which the caller
    // guarantees.
    unsafe { edge::<COPY>(state, target.wrapping_add(at), source.add(at), len - at) }
}

#[target_feature(enable = "avx512f")]
fn low(state: u64) -> __m128i {
    std::arch::x86_64::_mm_set_epi64x(0, state.cast_signed())
}

#[target_feature(enable = "avx512f")]
unsafe fn step<const COPY: bool>(target: *mut u8, source: *const u8, at: usize) -> __m512i {
    // SAFETY: the caller guarantees 64 bytes from `at` on in both ranges; `pass` has aligned the
    // target to a cache line by its head.
    unsafe {
        let data = _mm512_loadu_si512(source.add(at).cast());
        if COPY {
            _mm512_stream_si512(target.add(at).cast(), data);
        }
        data
    }
}
