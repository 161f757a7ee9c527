//! Generated fleets of machines that train together, of which one or several may go bad, to measure
//! detectors. One seed gives one episode.
//!
//! ```text
//!  ranges.toml ─┐                        machines            deviations
//!  faults.toml ─┴─> profile (shared) ──> (offsets, noise, ──> (jitter, harmless ──> Series, Truth
//!                                         clocks)             changes, fault)
//! ```
//!
//! The crate and its ranges were written before any detector was tuned. A detector gets only the
//! [`Series`], never the [`Truth`]; its crate cannot depend on this one.
#![forbid(unsafe_code)]

pub mod burst;
mod deviation;
mod faults;
mod profile;
pub mod ranges;
pub mod score;

use deviation::Deviation;
use everstep_detector::{Family, Metric, Series, Worse};
use everstep_rng::Rng;
use profile::Profile;
use ranges::{RANGES, Ranges};

/// The metrics: name, kind in `faults.toml`, family, usual level (as a share of its maximum), and
/// sensitivity to the job's common movement.
pub(crate) const METRICS: [(&str, &str, Family, f64, f64); 10] = [
    ("cpu", "cpu", Family::Host, 0.3, 0.5),
    ("memory", "memory", Family::Host, 0.5, 0.05),
    ("disk", "disk", Family::Host, 0.05, 0.3),
    ("gpu-duty", "gpu", Family::Gpu, 0.9, 0.5),
    ("gpu-power", "gpu", Family::Gpu, 0.75, 0.8),
    ("tensor", "gpu", Family::Gpu, 0.4, 1.0),
    ("nvlink", "link", Family::Link, 0.5, 1.0),
    ("pcie", "link", Family::Link, 0.3, 1.0),
    ("pfc", "pfc", Family::Net, 0.02, 0.5),
    ("net", "net", Family::Net, 0.45, 1.0),
];

/// The probabilities with which metrics show faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matrix {
    /// Those of `faults.toml`.
    Ours,
    /// 0.6 times those of `faults.toml`.
    Faint,
    /// Drawn at random for each kind of fault, with the same sum.
    Random,
}

/// The kind of episode to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// The number of machines; `None` to draw it.
    pub machines: Option<usize>,
    /// The number of roles; `None` to draw it.
    pub roles: Option<u32>,
    /// The probabilities with which metrics show the fault.
    pub matrix: Matrix,
    /// The number of machines that go bad at once; 0 for none.
    pub bad: usize,
    /// The bad machines are neighbours behind one switch.
    pub switch: bool,
}

/// What really happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Truth {
    /// The bad machines.
    pub bad: Vec<usize>,
    /// The kind of fault.
    pub kind: &'static str,
    /// The second at which it begins.
    pub onset: usize,
    /// The second at which it goes away or the job stops.
    pub end: usize,
    /// Whether any metric shows it.
    pub visible: bool,
}

/// Samples and the truth about them.
#[derive(Clone, Debug, PartialEq)]
pub struct Episode {
    /// What a detector gets.
    pub series: Series,
    /// `None` if nothing was wrong.
    pub truth: Option<Truth>,
}

/// The properties of machines that do not change during an episode.
struct Crew {
    roles: Vec<u32>,
    /// By machine, the seconds by which its clock is ahead, plus the maximum skew.
    skew: Vec<usize>,
}

impl Crew {
    fn drawn(rng: &mut Rng, recipe: &Recipe, of: &Ranges) -> Crew {
        let machines = recipe.machines.unwrap_or_else(|| rng.log_between(of.machines) as usize);
        let fits: Vec<u32> = of.roles.iter().copied().filter(|r| *r as usize * 4 <= machines.max(4)).collect();
        let roles = recipe.roles.unwrap_or_else(|| rng.pick(&fits).copied().unwrap_or(1));
        // Neighbours share a pipeline stage, as launchers place them.
        let role = |m: usize| (m * roles as usize / machines) as u32;
        let skew = |rng: &mut Rng| {
            let ahead = [0, 2 * of.machine.skew_s];
            if rng.chance(0.3) { ahead[usize::from(rng.chance(0.5))] } else { of.machine.skew_s }
        };
        Crew { roles: (0..machines).map(role).collect(), skew: (0..machines).map(|_| skew(rng)).collect() }
    }
}

/// Returns the sum of four 16-bit numbers, a cheap approximation of a standard normal number. Rare
/// events have their own rules (`deviation.rs`).
fn noise(rng: &mut Rng) -> f32 {
    let bits = rng.bits();
    let sum = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as f32).sum::<f32>();
    // Mean 2 · 65535, variance 4/12 · 65536².
    (sum - 131_070.0) / 37_837.2
}

/// Generates the episode of this seed.
#[must_use]
pub fn generate(recipe: &Recipe, seed: u64) -> Episode {
    let of = &*RANGES;
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_97f4_a7c1) ^ 0xf1ee);
    let crew = Crew::drawn(&mut rng, recipe, of);
    let profile = Profile::drawn(&mut rng, &crew, of);
    let fault = (recipe.bad > 0).then(|| faults::drawn(&mut rng, recipe, &crew.roles, of));
    let mut deviations = deviation::harmless(&mut rng, &profile, crew.roles.len(), of);
    let truth = fault.map(|(truth, of_fault)| {
        deviations.extend(of_fault);
        truth
    });
    let worse = |name: &str, family: Family| match (name, family) {
        ("pfc", _) => Worse::More,
        (_, Family::Host) => Worse::Either,
        _ => Worse::Less,
    };
    let metrics = METRICS.map(|(name, _, family, ..)| Metric {
        name: name.into(),
        family,
        worse: worse(name, family),
        floor: 0.0,
    });
    let mut series = Series::new(metrics.to_vec(), crew.roles.clone(), of.seconds);
    series.domains = switches(crew.roles.len(), recipe, truth.as_ref());
    fill(&mut series, &mut rng, &crew, &profile, of);
    deviations.iter().for_each(|deviation| deviation.apply(&mut series, &mut rng));
    gaps(&mut series, &mut rng, of);
    Episode { series, truth }
}

/// The ports of a switch, unless the recipe sets how many machines fail together.
const PORTS: usize = 32;

/// Assigns neighbouring machines to switches. A switch that fails has as many ports as machines
/// went bad, and is aligned with them.
fn switches(machines: usize, recipe: &Recipe, truth: Option<&Truth>) -> Vec<u32> {
    let first = truth.filter(|_| recipe.switch).and_then(|t| t.bad.first().copied());
    let ports = if first.is_some() { recipe.bad.max(1) } else { PORTS };
    let before = first.map_or(0, |first| (ports - first % ports) % ports);
    (0..machines).map(|m| ((m + before) / ports) as u32).collect()
}

fn fill(series: &mut Series, rng: &mut Rng, crew: &Crew, profile: &Profile, of: &Ranges) {
    let machines = crew.roles.len();
    let (spread, sd, memory) =
        (rng.between(of.machine.spread), rng.between(of.machine.noise) as f32, rng.between(of.machine.memory) as f32);
    let fresh = sd * (1.0 - memory * memory).sqrt();
    for (metric, (name, _, _, level, _)) in METRICS.iter().enumerate() {
        // Pauses and disk accesses come in bursts.
        let wild = if *name == "pfc" || *name == "disk" { 8.0 } else { 1.0 };
        let own: Vec<f32> = (0..machines).map(|_| (level * libm::exp(spread * rng.normal())) as f32).collect();
        let mut state: Vec<f32> = (0..machines).map(|_| sd * noise(rng)).collect();
        for second in 0..of.seconds {
            let row = series.row_mut(metric, second);
            for (machine, value) in row.iter_mut().enumerate() {
                state[machine] = memory * state[machine] + fresh * noise(rng);
                let together = profile.at(metric, crew.roles[machine], second + crew.skew[machine]);
                *value = (own[machine] * together * (1.0 + wild * state[machine])).clamp(0.0, 1.0);
            }
        }
    }
}

/// Removes samples of all metrics of a machine at once, in bursts.
fn gaps(series: &mut Series, rng: &mut Rng, of: &Ranges) {
    let share = rng.pick(&of.machine.missing).copied().unwrap_or(0.0);
    let (machines, seconds) = (series.machines(), series.seconds());
    // Bursts are 5.5 s long on average.
    let bursts = (machines * seconds) as f64 * share / 5.5;
    for _ in 0..bursts as usize {
        let machine = rng.range(0, machines as u64) as usize;
        let from = rng.range(0, seconds as u64) as usize;
        let gap = Deviation::gone(machine, from, from + rng.range(1, 11) as usize);
        gap.apply(series, rng);
    }
}
