//! What it takes to reach a goal (spares, copies, checkpoints, detection), and which of these pays
//! off most.

use super::compare::{CompareError, Interval, compare};
use super::failures::{Failures, HOUR, SECOND, seconds};
use super::fit::quantile;
use super::generate::{Recipe, generate};
use super::policy::{OnLoss, Policy};
use super::work::Workload;

/// One setting of all knobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knobs {
    /// The number of nodes that wait to replace a failed one.
    pub spares: u32,
    /// The number of nodes that hold each node's state in memory; 0 for no copies.
    pub copies: u32,
    /// Work between checkpoints on storage, in microseconds.
    pub interval: u64,
    /// The time from a failure to its detection, in microseconds.
    pub detect: u64,
}

/// The possible values of each knob, the cheapest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// See [`Knobs`].
    pub spares: Vec<u32>,
    /// See [`Knobs`].
    pub copies: Vec<u32>,
    /// See [`Knobs`].
    pub interval: Vec<u64>,
    /// See [`Knobs`].
    pub detect: Vec<u64>,
}

/// A setting and its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    pub knobs: Knobs,
    /// The productive share of all nodes' time, including spares.
    pub goodput: Interval,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Sized {
    /// The cheapest setting that reaches the goal, or the best one if none does.
    pub best: Tried,
    /// Whether `best` reaches the goal.
    pub reached: bool,
    /// For each knob, its name and the result with that knob at its cheapest value.
    pub without: Vec<(&'static str, Tried)>,
}

impl Range {
    /// Returns the usual values for this number of nodes.
    #[must_use]
    pub fn usual(nodes: u32) -> Range {
        let mut spares: Vec<u32> = (0..=16).map(|part| nodes * part / 128).collect();
        spares.dedup();
        Range {
            spares,
            copies: vec![0, 2, 3],
            interval: [180, 60, 30, 10, 5].map(|minutes| minutes * 60 * SECOND).to_vec(),
            detect: [1800, 60, 10, 2].map(|seconds| seconds * SECOND).to_vec(),
        }
    }

    fn cheapest(&self) -> Knobs {
        let (spares, copies) = (self.spares[0], self.copies[0]);
        Knobs { spares, copies, interval: self.interval[0], detect: self.detect[0] }
    }
}

/// Returns a policy for one job on all nodes but the spares, which waits for a spare or a repair
/// when a node fails.
fn policy(base: &Policy, knobs: Knobs) -> Policy {
    Policy {
        on_loss: OnLoss::Wait,
        spares: knobs.spares,
        copies: knobs.copies,
        copy_interval: if knobs.copies > 0 { 20 * SECOND } else { 0 },
        interval: knobs.interval,
        detect: [knobs.detect; 3],
        coordinator: false,
        ..base.clone()
    }
}

/// A search without a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The range has no spares or no copies.
    #[error("there is nothing to try")]
    EmptyRange,
    #[error(transparent)]
    Compare(#[from] CompareError),
}

/// Finds the cheapest setting that reaches `goal`: the fewest spares, then the fewest copies, then
/// the fewest checkpoints and the slowest detection.
///
/// # Errors
/// Those of [`compare`], and if the range is empty.
pub fn size(all: &[Failures], base: &Policy, range: &Range, goal: f64, threads: usize) -> Result<Sized, SizeError> {
    let nodes = all.first().map_or(0, |f| f.nodes);
    let goodput = |knobs: Knobs| -> Result<Tried, SizeError> {
        let work = Workload::alone(nodes - knobs.spares.min(nodes - 1));
        let compared = compare(all, &work, &[policy(base, knobs)], threads)?;
        Ok(Tried { knobs, goodput: compared[0].goodput })
    };
    let mut best: Option<Tried> = None;
    let mut reached = None;
    let last = |of: &[u64]| of.last().copied().unwrap_or(0);
    // With the best values of the other two knobs. If these miss the goal, no others reach it.
    let (interval, detect) = (last(&range.interval), last(&range.detect));
    for (spares, copies) in range.spares.iter().flat_map(|s| range.copies.iter().map(move |c| (*s, *c))) {
        let tried = goodput(Knobs { spares, copies, interval, detect })?;
        if best.as_ref().is_none_or(|b| tried.goodput.mean > b.goodput.mean) {
            best = Some(tried.clone());
        }
        if tried.goodput.mean >= goal {
            reached = Some(tried);
            break;
        }
    }
    let Some(mut found) = reached.clone().or(best) else { return Err(SizeError::EmptyRange) };
    if reached.is_some() {
        let (spares, copies) = (found.knobs.spares, found.knobs.copies);
        let others = range.interval.iter().flat_map(|i| range.detect.iter().map(move |d| (*i, *d)));
        for (interval, detect) in others {
            let tried = goodput(Knobs { spares, copies, interval, detect })?;
            if tried.goodput.mean >= goal {
                found = tried;
                break;
            }
        }
    }
    let (with, cheap) = (found.knobs, range.cheapest());
    let less = [
        ("spares", Knobs { spares: cheap.spares, ..with }),
        ("copies", Knobs { copies: cheap.copies, ..with }),
        ("interval", Knobs { interval: cheap.interval, ..with }),
        ("detection", Knobs { detect: cheap.detect, ..with }),
    ];
    let without =
        less.into_iter().map(|(name, knobs)| Ok((name, goodput(knobs)?))).collect::<Result<_, SizeError>>()?;
    Ok(Sized { best: found, reached: reached.is_some(), without })
}

/// Returns the number of spares such that no more nodes are down for `share` of the time, in the
/// fraction `sure` of the futures drawn from this trace by block bootstrap.
#[must_use]
pub fn spares(of: &Failures, share: f64, sure: f64, length: u64, block: u64, seeds: u64) -> u32 {
    let recipe = Recipe::Bootstrap { of: of.clone(), length, block };
    let mut needed: Vec<usize> = (0..seeds).map(|seed| quantile(&generate(&recipe, seed).down(), share)).collect();
    needed.sort_unstable();
    let at = ((needed.len() as f64 * sure) as usize).min(needed.len().saturating_sub(1));
    u32::try_from(needed.get(at).copied().unwrap_or(0)).unwrap_or(u32::MAX)
}

/// Formats a duration for people, such as `10 min` or `3 h`.
#[must_use]
pub fn spoken(micros: u64) -> String {
    match micros {
        t if t >= HOUR && t % HOUR == 0 => format!("{} h", t / HOUR),
        t if t >= 60 * SECOND => format!("{} min", t / (60 * SECOND)),
        t => format!("{} s", seconds(t)),
    }
}
