//! The choices for a job, each with its value as one number. Values add up over jobs, so that the
//! best sum is the best plan.

use super::problem::{Job, Mode, Problem};
use std::ops::Add;
use std::time::Duration;

/// Admits running jobs before any number of waiting jobs.
const RUNS: i64 = 1 << 24;
/// Lowest bit of the admitted jobs in a 128-bit key. Below it are 46 bits of gain for each of 2^12
/// jobs, and the bits that break ties.
const ADMITTED: u32 = 88;

/// The value of a choice. Its parts, most important first: admitted jobs, gain, few changed jobs,
/// few used units.
pub(super) trait Key: Copy + PartialOrd + Add<Output = Self> {
    /// Not allowed: stays below every allowed value, whatever is added.
    const NONE: Self;
    /// No gain and no units.
    const ZERO: Self;
    /// Packs the parts into one number.
    fn pack(of: &Parts, bits: Bits) -> Self;
    /// Returns the better of two values.
    fn or(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

pub(super) struct Parts {
    admitted: i64,
    gain: i64,
    changed: bool,
    units: u32,
}

/// Number of bits that the sums of the less important parts need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bits {
    units: u32,
    jobs: u32,
}

impl Key for i64 {
    const NONE: i64 = i64::MIN / 4;
    const ZERO: i64 = 0;
    fn pack(of: &Parts, bits: Bits) -> i64 {
        (of.gain << (bits.units + bits.jobs)) - (i64::from(of.changed) << bits.units) - i64::from(of.units)
    }
}

/// Integers below 2^53 are exact, and CPUs compare several at once.
impl Key for f64 {
    const NONE: f64 = -1e300;
    const ZERO: f64 = 0.0;
    fn pack(of: &Parts, bits: Bits) -> f64 {
        i64::pack(of, bits) as f64
    }
}

impl Key for i128 {
    const NONE: i128 = i128::MIN / 4;
    const ZERO: i128 = 0;
    fn pack(of: &Parts, bits: Bits) -> i128 {
        let less = bits.units + bits.jobs;
        let low = (i128::from(of.gain) << less) - (i128::from(of.changed) << bits.units) - i128::from(of.units);
        low + (i128::from(of.admitted) << ADMITTED)
    }
}

/// The number type of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// `f64`
    Narrow,
    /// `i64`
    Usual,
    /// `i128`, which also counts admitted jobs
    Wide,
}

/// A number of units for a job, and its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice<K> {
    pub(super) units: usize,
    pub(super) key: K,
}

/// A problem, and what is the same for all of its jobs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale<'p> {
    problem: &'p Problem,
    horizon: Duration,
    bits: Bits,
    /// All jobs get their minimum, which makes it a bound instead of a goal.
    firm: bool,
}

impl<'p> Scale<'p> {
    pub(super) fn of(problem: &'p Problem) -> Self {
        let bits_of = |n: usize| usize::BITS - n.leading_zeros();
        let bits = Bits { units: bits_of(problem.units as usize), jobs: bits_of(problem.jobs.len()) };
        let least: u64 = problem.jobs.iter().map(|j| u64::from(j.min)).sum();
        let can = problem.jobs.iter().all(|j| j.min <= j.most());
        let firm = problem.mode != Mode::Paper && can && least <= u64::from(problem.units);
        Scale { problem, horizon: problem.horizon(), bits, firm }
    }

    /// Returns the narrowest type that holds the sums of all keys; with `hit`, even if any of the
    /// jobs is hit.
    pub(super) fn width(&self, hit: bool) -> Width {
        if !self.firm && self.problem.mode != Mode::Paper {
            return Width::Wide;
        }
        // A plan gains at most its units times the largest gain per unit, plus what is gained (or
        // paid) without units.
        let (mut alone, mut for_one, mut sum) = (0u64, 0u64, 0u64);
        for job in &self.problem.jobs {
            let hits = [Job { hit: job.hit || hit, ..job.clone() }, Job { hit: job.hit, ..job.clone() }];
            let gain = |k: u32| hits.iter().map(|j| self.problem.gain(j, k, self.horizon).unsigned_abs()).max();
            let mut most = 0;
            for k in 1..=job.most().min(self.problem.units) {
                let gain = gain(k).unwrap_or(0);
                most = most.max(gain);
                for_one = for_one.max(gain.div_ceil(k.into()));
            }
            let none = gain(0).unwrap_or(0);
            alone = alone.saturating_add(none);
            sum = sum.saturating_add(most.max(none));
        }
        let bound = sum.min(alone.saturating_add(for_one.saturating_mul(self.problem.units.into())));
        let bits = u64::BITS - bound.leading_zeros() + self.bits.units + self.bits.jobs;
        match bits {
            0..=52 => Width::Narrow,
            53..=58 => Width::Usual,
            _ => Width::Wide,
        }
    }

    /// Returns the choices for a job in ascending order of units, without those that are no better
    /// than a choice with fewer units (units may stay idle).
    pub(super) fn choices<K: Key>(&self, job: &Job) -> Vec<Choice<K>> {
        let mut found: Vec<Choice<K>> = Vec::new();
        let least = if self.firm { job.min } else { 0 };
        for k in least..=job.most().min(self.problem.units) {
            let runs = job.current > 0 || job.hit;
            let admitted = match self.problem.mode {
                Mode::Paper => 0,
                _ if k < job.min => 0,
                _ => i64::from(job.weight) + if runs { RUNS } else { 0 },
            };
            let gain = self.problem.gain(job, k, self.horizon);
            let key = K::pack(&Parts { admitted, gain, changed: k != job.current, units: k }, self.bits);
            if found.last().is_none_or(|best| key > best.key) {
                found.push(Choice { units: k as usize, key });
            }
        }
        found
    }
}

/// Adds one job: for each number of units, finds the best sum of one of its choices and the best of
/// the other jobs with the remaining units.
pub(super) fn stage<K: Key>(before: &[K], choices: &[Choice<K>]) -> Vec<K> {
    let mut after = vec![K::NONE; before.len()];
    let (fours, rest) = choices.as_chunks::<4>();
    // Four at a time, so that the best so far is read and written once for all of them.
    for four @ [a, b, c, d] in fours {
        let (below, from) = after.split_at_mut(d.units.min(before.len()));
        for choice in four {
            raise(below, before, choice);
        }
        let rests = [a, b, c, d].map(|choice| before.iter().skip(d.units - choice.units));
        let [w, x, y, z] = rests;
        for ((((best, w), x), y), z) in from.iter_mut().zip(w).zip(x).zip(y).zip(z) {
            let (first, second) = ((*w + a.key).or(*x + b.key), (*y + c.key).or(*z + d.key));
            *best = best.or(first.or(second));
        }
    }
    for choice in rest {
        raise(&mut after, before, choice);
    }
    after
}

fn raise<K: Key>(after: &mut [K], before: &[K], choice: &Choice<K>) {
    for (best, rest) in after.iter_mut().skip(choice.units).zip(before) {
        *best = best.or(*rest + choice.key);
    }
}

/// Returns the best sum of two elements at the same index.
pub(super) fn best_sum<K: Key>(left: &[K], right: &[K]) -> K {
    let none = K::NONE + K::NONE;
    let ((lefts, left), (rights, right)) = (left.as_chunks::<4>(), right.as_chunks::<4>());
    let mut lanes = [none; 4];
    for (a, b) in lefts.iter().zip(rights) {
        for (best, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *best = best.or(*a + *b);
        }
    }
    let rest = left.iter().zip(right).map(|(a, b)| *a + *b);
    lanes.into_iter().chain(rest).fold(none, Key::or)
}
