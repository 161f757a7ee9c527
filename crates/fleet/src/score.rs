//! Verdicts against the truth. Nothing is adjusted: a verdict is right if it names the machine, after the onset, and before the fault is over.

use super::Truth;
use everstep_detector::Verdict;

/// What one episode says of a detector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bad machine, so many seconds after its onset.
    Right(usize),
    /// Another one, or too early, or nobody was bad.
    Wrong,
    /// Nothing was said, and something was wrong.
    Missed,
    /// Nothing was said, and nothing was wrong.
    Quiet,
}

/// The first verdict counts: whoever is named is looked at.
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

/// Many episodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Verdicts that were right, with their delays in seconds,
    pub right: Vec<usize>,
    /// verdicts that were not,
    pub wrong: usize,
    /// and faults without a verdict that was right.
    pub missed: usize,
}

impl Score {
    /// One more.
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

    /// Share of verdicts that are right.
    #[must_use]
    pub fn precision(&self) -> f64 {
        self.right.len() as f64 / (self.right.len() + self.wrong).max(1) as f64
    }

    /// Share of faults that are found.
    #[must_use]
    pub fn recall(&self) -> f64 {
        self.right.len() as f64 / (self.right.len() + self.missed).max(1) as f64
    }

    /// Their harmonic mean.
    #[must_use]
    pub fn f1(&self) -> f64 {
        let (p, r) = (self.precision(), self.recall());
        if p + r > 0.0 { 2.0 * p * r / (p + r) } else { 0.0 }
    }

    /// The delay that this share of the right verdicts have at most, in seconds.
    #[must_use]
    pub fn delay(&self, share: f64) -> usize {
        let mut all = self.right.clone();
        all.sort_unstable();
        all.get(((all.len() as f64 * share) as usize).min(all.len().saturating_sub(1))).copied().unwrap_or(0)
    }
}
