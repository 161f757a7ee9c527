//! Compares verdicts with the truth, without any tolerance: a verdict is right if it names exactly
//! the bad machines, after the onset and before the end of the fault.

use super::Truth;
use everstep_detector::Verdict;

/// The result of a detector on one episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It named the bad machines, this many seconds after the onset.
    Right(usize),
    /// It named others, named them at the wrong time, or nothing was wrong.
    Wrong,
    /// It named nothing although something was wrong.
    Missed,
    /// It named nothing, and nothing was wrong.
    Quiet,
}

/// Judges the first verdict, because a machine that is named gets inspected.
#[must_use]
pub fn judge(verdict: Option<&Verdict>, truth: Option<&Truth>) -> Found {
    match (verdict, truth) {
        (None, None) => Found::Quiet,
        (None, Some(_)) => Found::Missed,
        (Some(_), None) => Found::Wrong,
        (Some(v), Some(t)) => {
            let right = v.machines == t.bad && (t.onset..=t.end).contains(&v.at);
            if right { Found::Right(v.at - t.onset) } else { Found::Wrong }
        }
    }
}

/// The score over many episodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// The delays of the right verdicts, in seconds.
    pub right: Vec<usize>,
    /// The number of wrong verdicts.
    pub wrong: usize,
    /// The number of faults without a right verdict.
    pub missed: usize,
}

impl Score {
    /// Adds one episode.
    pub fn add(&mut self, found: Found, faulty: bool) {
        match found {
            Found::Right(delay) => self.right.push(delay),
            Found::Wrong => {
                self.wrong += 1;
                self.missed += usize::from(faulty);
            }
            Found::Missed => self.missed += 1,
            Found::Quiet => {}
        }
    }

    /// Returns the share of verdicts that are right.
    #[must_use]
    pub fn precision(&self) -> f64 {
        self.right.len() as f64 / (self.right.len() + self.wrong).max(1) as f64
    }

    /// Returns the share of faults that are found.
    #[must_use]
    pub fn recall(&self) -> f64 {
        self.right.len() as f64 / (self.right.len() + self.missed).max(1) as f64
    }

    /// Returns the harmonic mean of precision and recall.
    #[must_use]
    pub fn f1(&self) -> f64 {
        let (p, r) = (self.precision(), self.recall());
        if p + r > 0.0 { 2.0 * p * r / (p + r) } else { 0.0 }
    }

    /// Returns the delay, in seconds, that this share of the right verdicts does not exceed.
    #[must_use]
    pub fn delay(&self, share: f64) -> usize {
        let mut all = self.right.clone();
        all.sort_unstable();
        all.get(((all.len() as f64 * share) as usize).min(all.len().saturating_sub(1))).copied().unwrap_or(0)
    }
}
