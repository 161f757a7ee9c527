//! Machines against their peers, without a model: how far each is from the median of its role, in the spread that is usual there; and for how
//! long, of how many independent families of metrics.
//!
//! ```text
//!  seconds ─ blocks of five ─ off the role's median, less its own usual offset ─> faint / clear / dead, by sign ─> k of the last n ─> verdict
//!                                                                                                  samples that cease ─┘
//! ```
//!
//! Minder's test has an upper bound of √(n − 1) standard deviations for one of n machines, and bad machines spread what they are measured in;
//! median and MAD have neither. One jitter ends a strict run of windows; k of n forgives it.

mod settings;

pub use settings::Settings;

use crate::center::median_of;
use crate::{Detector, Family, Metric, Series, Verdict, Worse};
use std::collections::BTreeMap;

/// Seconds of a block.
const BLOCK: usize = 5;
/// Blocks after which a machine's own offset is known, for now; it is looked at again each time that as many have come, so many times.
const KNOWN: usize = 12;
const LOOKS: usize = 5;
/// Less than this of the level, and the job stands still.
const STILL: f32 = 0.1;
/// A level that has grown so much was that of a job that begins.
const GROWN: f32 = 1.15;
/// How fast it follows after that, in spreads a block.
const FOLLOWS: f32 = 0.01;
/// How fast the usual middle of a role follows, in levels a block.
const SHIFTS: f32 = 0.002;
/// Farther from its usual middle, in levels, a role does something else.
const AS_EVER: f32 = 0.15;
/// A machine is unlike its peers, but like itself, if so much of the difference is theirs.
const THEIRS: f32 = 0.7;
/// How fast the usual spread follows, and how fast a level is forgotten.
const SLOWLY: f32 = 0.02;
const FADES: f32 = 0.999;

/// The last 64 blocks of one metric of one machine: whether it was far off, and in which direction.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    faint: [u64; 2],
    clear: [u64; 2],
    dead: u64,
}

fn push(bits: &mut u64, is: bool) {
    *bits = *bits << 1 | u64::from(is);
}

fn count(bits: u64, last: u32) -> u32 {
    (bits & ((1u64 << last.min(63)) - 1)).count_ones()
}

/// The usual middle of a role: a median at first, so that no checkpoint or beginning decides it, and a slow follower then.
#[derive(Clone, Debug, Default)]
struct Usual {
    first: Vec<f32>,
    now: f32,
}

impl Usual {
    fn follow(&mut self, middle: f32, step: f32, scratch: &mut Vec<f32>) {
        if self.first.len() < KNOWN * LOOKS {
            self.first.push(middle);
            self.now = median_of(self.first.iter().copied(), scratch).unwrap_or(middle);
        } else {
            self.now += step * (middle - self.now).signum();
        }
    }
}

/// One metric of all machines.
#[derive(Clone, Debug)]
struct Watched {
    family: Family,
    worse: Worse,
    /// By machine: sums and numbers of the samples of this block.
    sum: Vec<f32>,
    seen: Vec<u8>,
    /// By machine: how far it is off usually.
    own: Vec<f32>,
    /// The first blocks of a machine, to begin with.
    first: Vec<Vec<f32>>,
    history: Vec<History>,
    /// By machine: how far off now, in spreads.
    off: Vec<f32>,
    /// By role: its usual middle.
    usual: Vec<Usual>,
    /// Usual distance from the median and from one's own offset, in levels; and the level.
    spread: f32,
    level: f32,
    /// The level when offsets were begun to be learned.
    began: f32,
    blocks: u32,
}

/// The detector, fed second by second.
#[derive(Clone, Debug)]
pub struct Robust {
    settings: Settings,
    /// By role: its machines.
    roles: Vec<Vec<usize>>,
    metrics: Vec<Watched>,
    /// By machine: blocks without any sample, in a row; and whether it ever told anything.
    silent: Vec<(u32, bool)>,
    seconds: usize,
    scratch: Vec<f32>,
}

impl Robust {
    /// For machines of these roles.
    #[must_use]
    pub fn new(metrics: &[Metric], roles: &[u32], settings: Settings) -> Robust {
        let many = roles.len();
        let mut by_role: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        roles.iter().enumerate().for_each(|(machine, role)| by_role.entry(*role).or_default().push(machine));
        let watched = |m: &Metric| Watched {
            family: m.family,
            worse: m.worse,
            usual: Vec::new(),
            sum: vec![0.0; many],
            seen: vec![0; many],
            own: vec![0.0; many],
            first: vec![Vec::new(); many],
            history: vec![History::default(); many],
            off: vec![0.0; many],
            spread: 0.0,
            level: 0.0,
            began: 0.0,
            blocks: 0,
        };
        // Fewer than three have no middle: they are compared with all.
        let (mut groups, few): (Vec<_>, Vec<_>) = by_role.into_values().partition(|machines| machines.len() >= 3);
        if !few.is_empty() {
            groups.push(few.concat());
        }
        Robust {
            settings,
            roles: groups,
            metrics: metrics.iter().map(watched).collect(),
            silent: vec![(0, false); many],
            seconds: 0,
            scratch: Vec::with_capacity(many),
        }
    }

    /// One second of all metrics: by metric, the samples of all machines. What is certain now, if anything.
    pub fn second<'r>(&mut self, rows: impl Iterator<Item = &'r [f32]>) -> Option<Verdict> {
        for (of, row) in self.metrics.iter_mut().zip(rows) {
            for ((sum, seen), value) in of.sum.iter_mut().zip(&mut of.seen).zip(row) {
                let there = value.is_finite();
                *sum += if there { *value } else { 0.0 };
                *seen += u8::from(there);
            }
        }
        self.seconds += 1;
        if !self.seconds.is_multiple_of(BLOCK) {
            return None;
        }
        for machine in 0..self.silent.len() {
            let told = self.metrics.iter().any(|m| m.seen[machine] > 0);
            let (blocks, ever) = self.silent[machine];
            self.silent[machine] = if told { (0, true) } else { (blocks + u32::from(ever), ever) };
        }
        for metric in &mut self.metrics {
            metric.block(&self.roles, &self.settings, &mut self.scratch);
        }
        self.verdict()
    }

    fn verdict(&self) -> Option<Verdict> {
        let s = &self.settings;
        let blocks = |seconds: usize| (seconds.div_ceil(BLOCK)).clamp(1, 63) as u32;
        let enough = |bits: u64, n: u32| count(bits, n) as f32 >= s.share * n as f32;
        let (long, short, dead) = (blocks(s.one_family_s), blocks(s.two_families_s), blocks(s.dead_s));
        let mut found = Vec::new();
        for (machine, (silent, _)) in self.silent.iter().enumerate() {
            if *silent >= dead {
                found.push((f32::INFINITY, machine, Vec::new()));
                continue;
            }
            let (mut certain, mut told, mut families) = (false, Vec::new(), Vec::new());
            for (at, metric) in self.metrics.iter().enumerate() {
                let of = &metric.history[machine];
                let is_long = of.faint.iter().any(|bits| enough(*bits, long));
                let is_dead = enough(of.dead, dead);
                let [more, less] = of.clear.map(|bits| enough(bits, short));
                let is_short = more && metric.worse != Worse::Less || less && metric.worse != Worse::More;
                certain |= is_long || is_dead;
                if is_short && !families.contains(&metric.family) {
                    families.push(metric.family);
                }
                if is_long || is_dead || is_short {
                    told.push((metric.off[machine].abs(), at));
                }
            }
            if certain || families.len() >= 2 {
                told.sort_by(|a, b| b.0.total_cmp(&a.0));
                found.push((told.first().map_or(0.0, |t| t.0), machine, told.into_iter().map(|t| t.1).collect()));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (score, _, metrics) = found.first()?.clone();
        let mut machines: Vec<usize> = found.into_iter().map(|f| f.1).collect();
        machines.sort_unstable();
        let share = |role: &&Vec<usize>| {
            let bad = role.iter().filter(|m| machines.contains(m)).count();
            bad >= 3 && bad as f32 > s.group * role.len() as f32
        };
        let group = self.roles.iter().any(|r| share(&r));
        Some(Verdict { machines, at: self.seconds - 1, metrics, score, group })
    }
}

impl Watched {
    /// Ends a block.
    fn block(&mut self, roles: &[Vec<usize>], s: &Settings, scratch: &mut Vec<f32>) {
        self.blocks += 1;
        let mean = |m: usize| self.sum[m] / f32::from(self.seen[m]);
        let middles: Vec<Option<f32>> =
            roles.iter().map(|machines| median_of(machines.iter().map(|m| mean(*m)), scratch)).collect();
        let now = median_of(middles.iter().flatten().map(|m| m.abs()), scratch);
        // Nobody does anything: what single machines still do then says nothing of how they train.
        let stands_still = now.is_none_or(|now| now < STILL * self.level);
        if let Some(now) = now {
            // The usual level, not that of a pause: what stands still has no noise either.
            self.level = (self.level * FADES).max(now);
        }
        let level = self.level.max(f32::MIN_POSITIVE);
        if level > GROWN * self.began {
            (self.began, self.blocks, self.spread) = (level, 1, 0.0);
            self.first.iter_mut().for_each(Vec::clear);
            self.history.iter_mut().for_each(|of| *of = History::default());
            self.usual.clear();
        }
        self.usual.resize(roles.len(), Usual::default());
        let mut shifts = vec![0.0; self.off.len()];
        let mut distances = Vec::with_capacity(self.sum.len());
        for ((machines, middle), usual) in roles.iter().zip(middles).zip(&mut self.usual) {
            if let Some(middle) = middle {
                usual.follow(middle, SHIFTS * level, scratch);
            }
            for m in machines {
                shifts[*m] = middle.map_or(0.0, |middle| middle - usual.now) / level;
                self.off[*m] = middle.map_or(f32::NAN, |middle| mean(*m) - middle);
                distances.push((self.off[*m] - self.own[*m]).abs() / level);
            }
        }
        if let Some(now) = median_of(distances.into_iter(), scratch) {
            // A normal distribution's standard deviation.
            let now = (1.4826 * now).max(0.2 * s.effect);
            let rate = SLOWLY.max(1.0 / self.blocks as f32);
            self.spread += rate * (now - self.spread);
        }
        self.sum.fill(0.0);
        self.seen.fill(0);
        if stands_still {
            return;
        }
        for (m, shift) in shifts.into_iter().enumerate() {
            let (off, of) = (self.off[m], &mut self.history[m]);
            // What is usual is learned while the role does what is usual.
            let as_ever = off.is_finite() && shift.abs() < AS_EVER;
            let first = &mut self.first[m];
            let known = off.is_finite() && first.len() >= KNOWN;
            if as_ever && first.len() < KNOWN * LOOKS {
                first.push(off);
                if first.len() < KNOWN || first.len().is_multiple_of(KNOWN) {
                    let usual = median_of(first.iter().copied(), scratch).unwrap_or(0.0);
                    if (usual - self.own[m]).abs() > self.spread * level {
                        // What was said of it was said of a wrong beginning.
                        *of = History::default();
                    }
                    self.own[m] = usual;
                }
            } else if as_ever {
                self.own[m] += FOLLOWS * self.spread * level * (off - self.own[m]).signum();
            }
            let own = if known { (off - self.own[m]) / level } else { 0.0 };
            let z = own / self.spread;
            // What the others have left, and it has not: an evaluation on one machine.
            let theirs = (own + shift).abs() <= (1.0 - THEIRS) * own.abs();
            let large = own.abs() >= s.effect && !theirs;
            for (bits, sign) in [1.0f32, -1.0].into_iter().enumerate() {
                push(&mut of.faint[bits], large && z * sign > s.faint);
                push(&mut of.clear[bits], large && z * sign > s.clear);
            }
            push(&mut of.dead, z < -s.clear && -own >= s.dead);
            self.off[m] = z;
        }
    }
}

impl Detector for Settings {
    fn first(&self, series: &Series) -> Option<Verdict> {
        let mut robust = Robust::new(&series.metrics, &series.roles, *self);
        let rows = |second: usize| (0..series.metrics.len()).map(move |metric| series.row(metric, second));
        (0..series.seconds()).find_map(|second| robust.second(rows(second)))
    }
}
