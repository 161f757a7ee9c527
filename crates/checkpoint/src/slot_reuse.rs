//! Chooses which of several slots is written next. Pure.

/// A slot that may be written.
#[derive(Clone, Debug)]
pub struct Candidate<T> {
    /// The slot.
    pub slot: T,
    /// Generation and step in the slot; `None` if its contents are useless.
    pub holds: Option<(u64, u64)>,
    /// Whether it must not be written: it is in use, or its step may still be gone back to.
    pub needed: bool,
}

/// Returns the slot to write: an empty one if possible, otherwise the one with the oldest step,
/// where a later generation counts more than a later step. Of several, the first. `None` if all are
/// needed.
pub fn reusable<T>(candidates: impl IntoIterator<Item = Candidate<T>>) -> Option<T> {
    let free = candidates.into_iter().filter(|c| !c.needed);
    free.min_by_key(|c| c.holds).map(|c| c.slot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_slot_comes_before_the_oldest_and_a_needed_one_never() {
        let chosen = |slots: &[(Option<(u64, u64)>, bool)]| {
            reusable((0..).zip(slots).map(|(slot, (holds, needed))| Candidate { slot, holds: *holds, needed: *needed }))
        };
        assert_eq!(chosen(&[(Some((1, 4)), false), (None, false), (None, false)]), Some(1));
        assert_eq!(chosen(&[(Some((1, 4)), false), (None, true), (Some((1, 3)), false)]), Some(2));
        assert_eq!(
            chosen(&[(Some((2, 3)), false), (Some((1, 7)), false)]),
            Some(1),
            "the earlier generation's is older"
        );
        assert_eq!(chosen(&[(Some((1, 4)), true), (None, true)]), None);
        assert_eq!(chosen(&[]), None);
    }
}
