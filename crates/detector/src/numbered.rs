//! Small numbers for what only has to be told apart: roles, failure domains.

use std::collections::BTreeMap;

/// By value its number, in the order of first appearance.
///
/// ```
/// assert_eq!(everstep_detector::numbered(["b", "a", "b"]), [0, 1, 0]);
/// ```
pub fn numbered<T: Ord>(of: impl IntoIterator<Item = T>) -> Vec<u32> {
    let mut known: BTreeMap<T, u32> = BTreeMap::new();
    let number = |value: T| {
        let next = known.len() as u32;
        *known.entry(value).or_insert(next)
    };
    of.into_iter().map(number).collect()
}
