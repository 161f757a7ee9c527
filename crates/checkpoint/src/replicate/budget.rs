//! Limits the memory that all streams together may take at the same time.

use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A number of bytes that several streams share.
#[derive(Debug)]
pub(super) struct Budget {
    left: Mutex<u64>,
    more: Condvar,
}

/// A part of a [`Budget`], returned to it when it is dropped.
#[derive(Debug)]
pub(super) struct Portion<'a> {
    of: &'a Budget,
    bytes: u64,
}

impl Budget {
    /// Returns a budget of `bytes` bytes.
    pub fn of(bytes: u64) -> Self {
        Budget { left: Mutex::new(bytes), more: Condvar::new() }
    }

    /// Takes `bytes` bytes from the budget, as soon as that many are left.
    ///
    /// # Errors
    /// `TimedOut` if others use them for longer than `within`.
    pub fn take(&self, bytes: u64, within: Duration) -> io::Result<Portion<'_>> {
        // A panic cannot leave the number half-written.
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.more.wait_timeout_while(left, within, |left| *left < bytes);
        let (mut left, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(bytes).ok_or_else(|| {
            io::Error::new(io::ErrorKind::TimedOut, "other streams have all the memory for what arrives; try again")
        })?;
        Ok(Portion { of: self, bytes })
    }
}

impl Drop for Portion<'_> {
    fn drop(&mut self) {
        *self.of.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.of.more.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_missing_until_it_is_given_back() {
        let (budget, soon) = (Budget::of(10), Duration::from_millis(1));
        let first = budget.take(6, soon).unwrap();
        let _second = budget.take(4, soon).unwrap();
        assert_eq!(budget.take(1, soon).unwrap_err().kind(), io::ErrorKind::TimedOut);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| budget.take(6, Duration::from_mins(1)).map(drop));
            drop(first);
            waits.join().unwrap().unwrap();
        });
        assert!(budget.take(11, soon).is_err());
    }
}
