//! Histories in a job's record, which keep their latest entries.

/// Maximum number of entries in each.
pub const RECENT: usize = 64;

/// Adds to a history, and forgets its oldest entries.
pub(super) fn remember<T>(history: &mut Vec<T>, entry: T) {
    history.push(entry);
    let surplus = history.len().saturating_sub(RECENT);
    history.drain(..surplus);
}
