//! The median, which a few unusual values barely move.

/// Returns the middle value; of an even number of values, the higher one of the two in the middle.
/// `None` if there are no values.
#[must_use]
pub fn median<T: Ord + Copy>(values: impl IntoIterator<Item = T>) -> Option<T> {
    let mut sorted: Vec<T> = values.into_iter().collect();
    sorted.sort_unstable();
    median_of_sorted(&sorted)
}

/// As [`median`], of values in ascending order.
#[must_use]
pub fn median_of_sorted<T: Copy>(values: &[T]) -> Option<T> {
    values.get(values.len() / 2).copied()
}

/// Returns the [`median`] in the total order of floating-point numbers.
#[must_use]
pub fn median_of_floats(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    median_of_sorted(&sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_value_is_the_median() {
        assert_eq!(median(Vec::<u64>::new()), None);
        assert_eq!(median([7, 1, 5]), Some(5));
        assert_eq!(median([7, 1, 5, 6]), Some(6));
        assert_eq!(median_of_floats([0.5, -1.0, 2.0]), Some(0.5));
    }
}
