//! Middle and spread that up to half of the machines cannot move.

/// The median of the numbers that are there; sorts `scratch`. `None` of none.
pub fn median(scratch: &mut [f32]) -> Option<f32> {
    let middle = scratch.len() / 2;
    if scratch.is_empty() {
        return None;
    }
    let (below, at, _) = scratch.select_nth_unstable_by(middle, f32::total_cmp);
    let at = *at;
    let other = below.iter().copied().fold(f32::MIN, f32::max);
    Some(if scratch.len().is_multiple_of(2) { 0.5 * (at + other) } else { at })
}

/// The median of what is a number, with `scratch` to work in.
pub fn median_of(values: impl Iterator<Item = f32>, scratch: &mut Vec<f32>) -> Option<f32> {
    scratch.clear();
    scratch.extend(values.filter(|v| v.is_finite()));
    median(scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_medians() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0]), Some(3.0));
        assert_eq!(median(&mut [3.0, 1.0]), Some(2.0));
        assert_eq!(median(&mut [9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median_of([4.0, f32::NAN, 1.0, 2.0, 3.0].into_iter(), &mut Vec::new()), Some(2.5));
    }
}
