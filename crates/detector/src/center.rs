//! Middle and spread that up to half of the machines cannot move.

/// In the order of the numbers (IEEE 754 totalOrder): whole numbers are compared faster. Its own inverse.
fn key(bits: i32) -> i32 {
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

fn number(key_of: i32) -> f32 {
    f32::from_bits(key(key_of) as u32)
}

/// Keys of what is a number.
fn numbers_of(values: impl Iterator<Item = f32>, scratch: &mut Vec<i32>) {
    // No number's key. Nearly always there is none of these, and to write all and look again is faster than to ask of each.
    const NONE: i32 = i32::MAX;
    scratch.clear();
    scratch.extend(values.map(|v| if v.is_finite() { key(v.to_bits() as i32) } else { NONE }));
    if scratch.contains(&NONE) {
        scratch.retain(|key| *key != NONE);
    }
}

/// The median of what is a number, with `scratch` to work in. `None` of none.
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

/// What three quarters of the numbers do not exceed, with `scratch` to work in. `None` of none.
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
