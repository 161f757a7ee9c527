//! Compares machines with their peers, without a model: how far each is from the median of its
//! role, in units of the usual spread, for how long, and in how many independent families of
//! metrics.
//!
//! ```text
//!  seconds ─ blocks of five ─ off the role's median, less its own usual offset ─> faint / clear / dead, by sign ─> k of the last n ─> verdict
//!                                                                                                     missing samples ─┘
//! ```
//!
//! Minder's test is bounded by √(n − 1) standard deviations for one of n machines, and bad machines
//! inflate the deviation it divides by; median and MAD avoid both. A single jitter ends a strict
//! run of windows; k of n forgives it.

mod baseline;
mod evidence;
mod settings;

pub use settings::Settings;

use crate::quantiles::median_of;
use crate::{Detector, Family, Metric, Series, Verdict, Worse};
use baseline::{AS_EVER, Baseline, LOOKS};
use evidence::{BLOCK, Evidence, SIGNS, Sign, Spans, blocks};
use std::collections::{BTreeMap, BTreeSet};

/// Number of machines, at most, from which the usual spread is estimated.
const SAMPLE: usize = 256;
/// Share of the level below which the job stands still.
const STILL: f32 = 0.1;
/// If the level grows by this factor, it was that of a job starting up.
const GROWN: f32 = 1.15;
/// How fast a machine's own offset follows, in spreads per block.
const FOLLOWS: f32 = 0.01;
/// A deviation does not count if the role's own shift explains this share of it.
const THEIRS: f32 = 0.7;
/// Mean distance of a normal distribution from its center, in standard deviations.
const MEAN: f32 = 0.8;
/// How fast the usual spread follows, and by which factor the level decays, per block.
const SLOWLY: f32 = 0.02;
const FADES: f32 = 0.999;

/// One metric of all machines.
#[derive(Clone, Debug)]
struct Watched {
    family: Family,
    worse: Worse,
    floor: f32,
    /// By machine: sum and number of the samples in this block.
    sum: Vec<f32>,
    seen: Vec<f32>,
    /// By machine: its usual offset.
    own: Vec<f32>,
    /// By machine: the reciprocal of its own spread around that offset, in levels.
    narrow: Vec<f32>,
    /// By machine: the deviations in the first blocks.
    first: Vec<Vec<f32>>,
    /// By machine: the length of `first`.
    learned: Vec<f32>,
    history: Evidence,
    /// By machine: signs in this block.
    flags: Vec<u8>,
    /// By machine: the current deviation, in spreads.
    off: Vec<f32>,
    /// By role: its usual median.
    baselines: Vec<Baseline>,
    /// Usual distance from the median plus the machine's offset, in levels; and the level.
    spread: f32,
    level: f32,
    /// The level when the offsets began to be learned.
    began: f32,
    blocks: u32,
    /// Number of blocks in which the job did not stand still.
    looked: u32,
}

/// Machines that are compared with each other.
#[derive(Clone, Debug)]
struct Peers {
    machines: Vec<usize>,
    /// The first `judged` machines are compared with the median of all.
    judged: usize,
}

impl Peers {
    /// Groups by role. Roles of fewer than three machines have no median; they are pooled, and
    /// compared with all machines if even the pool is smaller than three.
    fn by(roles: &[u32]) -> Vec<Peers> {
        let (groups, few): (Vec<_>, Vec<_>) = by(roles).into_values().partition(|machines| machines.len() >= 3);
        let mut all: Vec<Peers> =
            groups.into_iter().map(|machines| Peers { judged: machines.len(), machines }).collect();
        if !few.is_empty() {
            let mut machines = few.concat();
            let judged = machines.len();
            if judged < 3 {
                let others: Vec<usize> = (0..roles.len()).filter(|m| !machines.contains(m)).collect();
                machines.extend(others);
            }
            all.push(Peers { machines, judged });
        }
        all
    }

    fn judged(&self) -> &[usize] {
        &self.machines[..self.judged]
    }
}

/// Returns the stride at which machines are sampled for the usual spread.
fn sampled(machines: usize) -> usize {
    machines / SAMPLE + 1
}

/// Groups the machines by a common value.
fn by(of: &[u32]) -> BTreeMap<u32, Vec<usize>> {
    let mut all: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    of.iter().enumerate().for_each(|(machine, of)| all.entry(*of).or_default().push(machine));
    all
}

/// The detector, fed second by second.
#[derive(Clone, Debug)]
pub struct Robust {
    of: Vec<Metric>,
    settings: Settings,
    spans: Spans,
    roles: Vec<Peers>,
    /// The machines of each failure domain.
    domains: Vec<Vec<usize>>,
    metrics: Vec<Watched>,
    /// By machine: consecutive blocks without samples, and whether it ever sent any.
    silent: Vec<(u32, bool)>,
    seconds: usize,
    scratch: Vec<i32>,
}

impl Robust {
    /// Creates a detector for these roles and failure domains; `domains` is empty if unknown.
    #[must_use]
    pub fn new(metrics: &[Metric], roles: &[u32], domains: &[u32], settings: Settings) -> Robust {
        let many = roles.len();
        let watched = |m: &Metric| Watched {
            family: m.family,
            worse: m.worse,
            floor: m.floor,
            baselines: Vec::new(),
            sum: vec![0.0; many],
            seen: vec![0.0; many],
            own: vec![0.0; many],
            narrow: vec![f32::INFINITY; many],
            first: vec![Vec::new(); many],
            learned: vec![0.0; many],
            flags: vec![0; many],
            history: Evidence::new(many),
            off: vec![0.0; many],
            spread: 0.0,
            level: 0.0,
            began: 0.0,
            blocks: 0,
            looked: 0,
        };
        Robust {
            of: metrics.to_vec(),
            spans: Spans::of(&settings.of(many)),
            settings,
            roles: Peers::by(roles),
            domains: by(domains).into_values().filter(|d| d.len() < many).collect(),
            metrics: metrics.iter().map(watched).collect(),
            silent: vec![(0, false); many],
            seconds: 0,
            scratch: Vec::with_capacity(many),
        }
    }

    /// Returns the same detector in its initial state, for other roles.
    #[must_use]
    pub fn anew(&self, roles: &[u32], domains: &[u32]) -> Robust {
        Robust::new(&self.of, roles, domains, self.settings)
    }

    /// Adds one second: for each metric, the samples of all machines. Returns the verdict at the
    /// end of a block, if any.
    pub fn second<'r>(&mut self, rows: impl Iterator<Item = &'r [f32]>) -> Option<Verdict> {
        for (of, row) in self.metrics.iter_mut().zip(rows) {
            for ((sum, seen), value) in of.sum.iter_mut().zip(&mut of.seen).zip(row) {
                let there = value.is_finite();
                *sum += if there { *value } else { 0.0 };
                *seen += f32::from(u8::from(there));
            }
        }
        self.seconds += 1;
        if !self.seconds.is_multiple_of(BLOCK) {
            return None;
        }
        for machine in 0..self.silent.len() {
            let told = self.metrics.iter().any(|m| m.seen[machine] > 0.0);
            let (blocks, ever) = self.silent[machine];
            self.silent[machine] = if told { (0, true) } else { (blocks + u32::from(ever), ever) };
        }
        for metric in &mut self.metrics {
            metric.block(&self.roles, &self.settings, &self.spans, &mut self.scratch);
        }
        // With two machines, it cannot be decided which one deviates.
        if self.silent.len() < 3 { None } else { self.verdict() }
    }

    fn verdict(&self) -> Option<Verdict> {
        let (s, enough) = (&self.settings, &self.spans.enough);
        let dead = u32::from(blocks(s.dead_s));
        let mut found = Vec::new();
        let mut any = vec![false; self.silent.len()];
        self.metrics.iter().flat_map(|metric| &metric.history.shown).for_each(|m| any[*m as usize] = true);
        for (machine, (silent, _)) in self.silent.iter().enumerate() {
            if *silent >= dead {
                found.push((f32::INFINITY, machine, Vec::new()));
                continue;
            }
            if !any[machine] {
                continue;
            }
            // By deviating metric: how far, its index, and if it needs no other family.
            let (mut told, mut against) = (Vec::new(), Vec::new());
            for (at, metric) in self.metrics.iter().enumerate() {
                let of = &metric.history;
                let shows = |sign| of.shows(machine, sign, enough);
                let alone = shows(Sign::FaintMore) || shows(Sign::FaintLess) || shows(Sign::Dead);
                let is_short = shows(Sign::ClearMore) && metric.worse != Worse::Less
                    || shows(Sign::ClearLess) && metric.worse != Worse::More;
                // A held-back machine does less in its whole family; if not, the cause is another.
                if metric.worse == Worse::Less && of.shows(machine, Sign::ClearMore, &self.spans.beside) {
                    against.push(metric.family);
                }
                if alone || is_short {
                    told.push((metric.off[machine].abs(), at, alone));
                }
            }
            let family = |t: &(f32, usize, bool)| self.metrics[t.1].family;
            told.retain(|t| t.2 || !against.contains(&family(t)));
            let first = told.first().map(family);
            if told.iter().any(|t| t.2 || Some(family(t)) != first) {
                told.sort_by(|a, b| b.0.total_cmp(&a.0));
                found.push((told.first().map_or(0.0, |t| t.0), machine, told.into_iter().map(|t| t.1).collect()));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (score, _, metrics) = found.first()?.clone();
        let mut machines: Vec<usize> = found.iter().map(|f| f.1).collect();
        let others = (0..self.silent.len()).filter(|m| !machines.contains(m) && self.tells_the_same(*m, &found));
        machines.extend(others.collect::<Vec<_>>());
        machines.sort_unstable();
        let of = |all: &[usize]| all.iter().filter(|m| machines.binary_search(m).is_ok()).count();
        let many = |all: &[usize]| of(all) >= 3 && of(all) as f32 > s.group * all.len() as f32;
        // Three behind one switch, and hardly any other machine, are not a coincidence.
        let one = |all: &[usize]| of(all) >= 3 && of(all) * 3 >= machines.len() * 2;
        let mut domains = self.domains.iter().map(Vec::as_slice);
        let group = self.roles.iter().map(Peers::judged).chain(domains.clone()).any(many) || domains.clone().any(one);
        // If at least half of a switch's machines deviate, it is the switch, and affects all.
        if let Some(all) = domains.find(|all| one(all) && of(all) * 2 >= all.len()) {
            machines = machines.iter().chain(all).copied().collect::<BTreeSet<_>>().into_iter().collect();
        }
        Some(Verdict { machines, at: self.seconds - 1, metrics, score, group })
    }
}

impl Robust {
    /// Returns whether a machine that is not certain itself shows, less clearly, the same as one
    /// that is: faults with one cause appear together.
    fn tells_the_same(&self, machine: usize, certain: &[(f32, usize, Vec<usize>)]) -> bool {
        certain.iter().any(|(score, who, told)| {
            if score.is_infinite() {
                let dead = f32::from(blocks(self.settings.dead_s));
                return self.silent[machine].0 as f32 >= self.settings.accomplice * dead;
            }
            // A single metric may jitter anywhere.
            let beside = if told.len() == 1 { &self.spans.beside_in_one } else { &self.spans.beside };
            let same = |metric: &&usize| {
                let of = &self.metrics[**metric].history;
                let both = |sign: &Sign| of.shows(*who, *sign, beside) && of.shows(machine, *sign, beside);
                SIGNS.iter().filter(|s| !matches!(s, Sign::FaintMore | Sign::FaintLess)).any(both)
            };
            // At least two thirds of the metrics, so all of them if there are only two.
            !told.is_empty() && told.iter().filter(same).count() * 3 >= told.len() * 2
        })
    }
}

impl Watched {
    /// Ends a block.
    fn block(&mut self, roles: &[Peers], s: &Settings, spans: &Spans, scratch: &mut Vec<i32>) {
        self.blocks += 1;
        let means: Vec<f32> = self.sum.iter().zip(&self.seen).map(|(sum, seen)| sum / seen).collect();
        let middles: Vec<Option<f32>> =
            roles.iter().map(|of| median_of(of.machines.iter().map(|m| means[*m]), scratch)).collect();
        let now = median_of(middles.iter().flatten().map(|m| m.abs()), scratch);
        // If the job is idle, what single machines still do reveals nothing about training.
        // But a metric that is usually near zero (a disk) is informative just then.
        let seldom = self.floor > 0.0 && self.worse == Worse::More;
        let stands_still = !seldom && now.is_none_or(|now| now < STILL * self.level);
        let known = s.known_s.div_ceil(BLOCK).max(2);
        if let Some(now) = now {
            // Keeps the usual level during a pause: an idle job has no noise either.
            self.level = (self.level * FADES).max(now);
        }
        // Raised so that `effect` of this level is at least the floor.
        let level = self.level.max(self.floor / s.effect).max(f32::MIN_POSITIVE);
        if level > GROWN * self.began {
            (self.began, self.blocks, self.spread) = (level, 1, 0.0);
            self.first.iter_mut().for_each(Vec::clear);
            self.learned.fill(0.0);
            self.history = Evidence::new(self.off.len());
            self.baselines.clear();
        }
        self.baselines.resize(roles.len(), Baseline::default());
        let mut shifts = vec![0.0; self.off.len()];
        for ((of, middle), baseline) in roles.iter().zip(middles).zip(&mut self.baselines) {
            if middle.is_some_and(|middle| baseline.follow(middle, level, known, scratch)) {
                for m in of.judged() {
                    self.first[*m].clear();
                    self.learned[*m] = 0.0;
                    self.history.forget(*m);
                }
            }
            let shift = middle.map_or(0.0, |middle| (middle - baseline.now) / level);
            let middle = middle.unwrap_or(f32::NAN);
            for m in of.judged() {
                shifts[*m] = shift;
                self.off[*m] = means[*m] - middle;
            }
        }
        self.follow_spread(level, s.effect, scratch);
        self.sum.fill(0.0);
        self.seen.fill(0.0);
        if stands_still {
            return;
        }
        self.looked = self.looked.wrapping_add(1);
        // Offsets are learned only while the role does what is usual.
        // Here and below, `&` instead of `&&` avoids branches, so that the loops vectorize.
        let as_ever = |off: f32, shift: f32| off.is_finite() & (shift.abs() < AS_EVER);
        self.learn(&shifts, as_ever, known, level, scratch);
        let (step, least) = (FOLLOWS * self.spread * level, known as f32);
        let (levels, spreads) = (1.0 / level, 1.0 / self.spread);
        let known = self.learned.iter().zip(&self.narrow);
        let all = self.off.iter_mut().zip(&mut self.own).zip(&shifts).zip(known).zip(&mut self.flags);
        for ((((off, own), shift), (learned, narrow)), flags) in all {
            let follows = as_ever(*off, *shift) & (*learned >= least * LOOKS as f32);
            *own += if follows { step * (*off - *own).signum() } else { 0.0 };
            let far = if off.is_finite() & (*learned > least) { (*off - *own) * levels } else { 0.0 };
            // The others left their usual level and this one did not: it evaluates alone.
            let theirs = (far + shift).abs() <= (1.0 - THEIRS) * far.abs();
            let z = far * spreads.min(*narrow);
            let counted = if (far.abs() >= s.effect) & !theirs { z } else { 0.0 };
            let dead = (counted < -s.clear) & (-far * level >= s.dead * self.level);
            *flags = u8::from(counted > s.faint)
                | u8::from(counted < -s.faint) << 1
                | u8::from(counted > s.clear) << 2
                | u8::from(counted < -s.clear) << 3
                | u8::from(dead) << 4;
            *off = z;
        }
        self.history.push(spans, self.looked, &self.flags);
    }

    /// Follows how far machines usually are from their own offsets.
    fn follow_spread(&mut self, level: f32, effect: f32, scratch: &mut Vec<i32>) {
        // A sample of the machines suffices.
        let some = self.off.iter().zip(&self.own).step_by(sampled(self.off.len()));
        if let Some(now) = median_of(some.map(|(off, own)| (off - own).abs() / level), scratch) {
            // Scaled to the standard deviation of a normal distribution.
            let now = (1.4826 * now).max(0.2 * effect);
            let rate = SLOWLY.max(1.0 / self.blocks as f32);
            self.spread += rate * (now - self.spread);
        }
    }

    /// Learns from a machine's first blocks: its offset is their median, estimated a few times.
    fn learn(
        &mut self,
        shifts: &[f32],
        as_ever: impl Fn(f32, f32) -> bool,
        known: usize,
        level: f32,
        scratch: &mut Vec<i32>,
    ) {
        for (m, shift) in shifts.iter().enumerate() {
            if self.learned[m] >= (known * LOOKS) as f32 || !as_ever(self.off[m], *shift) {
                continue;
            }
            let first = &mut self.first[m];
            if first.is_empty() {
                first.reserve_exact(known * LOOKS);
            }
            first.push(self.off[m]);
            self.learned[m] = first.len() as f32;
            // Earlier, an offset is needed only to estimate the usual spread.
            let early = first.len() < known && m.is_multiple_of(sampled(self.off.len()));
            if early || first.len().is_multiple_of(known) {
                let usual = median_of(first.iter().copied(), scratch).unwrap_or(0.0);
                if (usual - self.own[m]).abs() > self.spread * level {
                    // The signs so far were relative to a wrong offset.
                    self.history.forget(m);
                }
                self.own[m] = usual;
                // A mean and not a quantile, so that intermittent deviations give a wide spread.
                let far = mean_distance(first, usual);
                self.narrow[m] = MEAN * level / far;
            }
        }
    }
}

/// Returns the mean distance of the numbers from `from`.
fn mean_distance(of: &[f32], from: f32) -> f32 {
    // Eight sums can be added in parallel; a single sum could not, as the order matters.
    let mut sums = [0.0; 8];
    let (chunks, rest) = of.as_chunks::<8>();
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, v)| *sum += (v - from).abs());
    }
    let rest: f32 = rest.iter().map(|v| (v - from).abs()).sum();
    (sums.iter().sum::<f32>() + rest) / of.len() as f32
}

impl Detector for Settings {
    fn first(&self, series: &Series) -> Option<Verdict> {
        let mut robust = Robust::new(&series.metrics, &series.roles, &series.domains, *self);
        let rows = |second: usize| (0..series.metrics.len()).map(move |metric| series.row(metric, second));
        (0..series.seconds()).find_map(|second| robust.second(rows(second)))
    }
}

#[cfg(test)]
mod tests;
