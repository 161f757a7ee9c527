//! Small numbers for values that only need to be told apart, such as roles and failure domains.

use std::collections::BTreeMap;

/// Numbers the values in the order of their first appearance; equal values get the same number.
///
/// ```
/// assert_eq!(everstep_detector::group_numbers(["b", "a", "b"]), [0, 1, 0]);
/// ```
pub fn group_numbers<T: Ord>(of: impl IntoIterator<Item = T>) -> Vec<u32> {
    let mut known: BTreeMap<T, u32> = BTreeMap::new();
    let number = |value: T| {
        let next = known.len() as u32;
        *known.entry(value).or_insert(next)
    };
    of.into_iter().map(number).collect()
}
