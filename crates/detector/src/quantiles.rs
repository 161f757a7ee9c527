//! Median and quartile: statistics of the center that outliers barely move.

/// Maps a float's bits to an integer with the same order (IEEE 754 totalOrder), because integers
/// compare faster. The map is its own inverse.
fn key(bits: i32) -> i32 {
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

fn number(key_of: i32) -> f32 {
    f32::from_bits(key(key_of) as u32)
}

/// Collects the keys of all finite values.
fn numbers_of(values: impl Iterator<Item = f32>, scratch: &mut Vec<i32>) {
    // Not the key of any finite value. Non-finite values are rare, so writing everything and
    // searching once is faster than a branch per value.
    const NONE: i32 = i32::MAX;
    scratch.clear();
    scratch.extend(values.map(|v| if v.is_finite() { key(v.to_bits() as i32) } else { NONE }));
    if scratch.contains(&NONE) {
        scratch.retain(|key| *key != NONE);
    }
}

/// Returns the median of the finite values, or `None` if there are none. `scratch` is working
/// memory.
pub fn median_of(values: impl Iterator<Item = f32>, scratch: &mut Vec<i32>) -> Option<f32> {
    numbers_of(values, scratch);
    let (even, middle) = (scratch.len().is_multiple_of(2), scratch.len() / 2);
    if scratch.is_empty() {
        return None;
    }
    let (below, at, _) = scratch.select_nth_unstable(middle);
    let at = number(*at);
    let before = below.iter().copied().max().map_or(at, number);
    Some(if even { 0.5 * (before + at) } else { at })
}

/// Returns the upper quartile of the finite values, or `None` if there are none. `scratch` is
/// working memory.
pub fn upper_quartile_of(values: impl Iterator<Item = f32>, scratch: &mut Vec<i32>) -> Option<f32> {
    numbers_of(values, scratch);
    let at = scratch.len() * 3 / 4;
    (!scratch.is_empty()).then(|| number(*scratch.select_nth_unstable(at).1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_middle_of_what_is_sorted(all in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::ZERO, 1..200)) {
            let mut sorted = all.clone();
            sorted.sort_by(f32::total_cmp);
            let at = sorted.len() / 2;
            let middle = if sorted.len() % 2 == 0 { 0.5 * (sorted[at - 1] + sorted[at]) } else { sorted[at] };
            prop_assert_eq!(median_of(all.iter().copied(), &mut Vec::new()), Some(middle));
            prop_assert_eq!(upper_quartile_of(all.into_iter(), &mut Vec::new()), Some(sorted[sorted.len() * 3 / 4]));
        }
    }

    #[test]
    fn medians_are_medians() {
        let of = |values: &[f32]| median_of(values.iter().copied(), &mut Vec::new());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some(3.0));
        assert_eq!(of(&[3.0, -1.0]), Some(1.0));
        assert_eq!(of(&[-9.0, 1.0, -2.0]), Some(-2.0));
        assert_eq!(of(&[2.0, 1.0, 2.0, 2.0]), Some(2.0));
        assert_eq!(of(&[4.0, f32::NAN, 1.0, 2.0, f32::INFINITY, 3.0]), Some(2.5));
    }
}
