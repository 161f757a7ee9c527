//! What all machines of a job do together: iterations, checkpoints, evaluations, and a slow drift,
//! by role with its own offset and phase.

use super::ranges::Ranges;
use super::{Crew, METRICS};
use everstep_rng::Rng;

/// A factor for each metric, role and second. It covers more seconds than an episode because clocks
/// differ.
pub(super) struct Profile {
    roles: usize,
    seconds: usize,
    factors: Vec<f32>,
    /// When checkpoints are written.
    pub checkpoints: Vec<(usize, usize)>,
    /// When the job evaluates.
    pub evaluation: Option<(usize, usize)>,
}

/// A wave between -1 and 1 with steep flanks, like that of iterations.
fn wave(at: f64) -> f64 {
    let phase = at - libm::floor(at);
    if phase < 0.8 { 0.5 } else { -2.0 + 10.0 * (phase - 0.9).abs() }
}

impl Profile {
    pub(super) fn drawn(rng: &mut Rng, crew: &Crew, of: &Ranges) -> Profile {
        let roles = crew.roles.iter().max().map_or(1, |r| *r as usize + 1);
        let seconds = of.seconds + 2 * of.machine.skew_s + 1;
        let job = &of.job;
        let (period, height) = (rng.between(job.period_s), rng.between(job.wave));
        let every = rng.between(job.checkpoint_every_s);
        let mut checkpoints = Vec::new();
        let mut next = rng.between([0.0, every]);
        while next < seconds as f64 {
            checkpoints.push((next as usize, (next + rng.between(job.checkpoint_s)) as usize));
            next += every;
        }
        let span = |rng: &mut Rng, lasts: [f64; 2]| {
            let from = rng.range(0, seconds as u64) as usize;
            (from, from + rng.between(lasts) as usize)
        };
        let evaluation = rng.chance(job.evaluation).then(|| span(rng, job.evaluation_s));
        let warm_up = if rng.chance(job.warm_up) { rng.between(job.warm_up_s) } else { 0.0 };
        let spread = rng.between(of.machine.role_spread);
        let phases: Vec<f64> = (0..roles).map(|_| rng.open()).collect();
        let mut factors = Vec::with_capacity(METRICS.len() * roles * seconds);
        let drift = drift(rng, seconds, job.drift);
        for (metric, (name, kind, _, _, moves)) in METRICS.iter().enumerate() {
            let busy = matches!(*kind, "gpu" | "link" | "net" | "pfc");
            let (stops, tests) = (rng.between([0.05, 0.5]), rng.between([0.6, 0.9]));
            for phase in &phases {
                let offset = libm::exp(spread * rng.normal());
                for (second, drift) in drift.iter().enumerate() {
                    let within = |span: &(usize, usize)| (span.0..span.1).contains(&second);
                    let mut factor =
                        offset * (1.0 + moves * height * wave(second as f64 / period + phase)) * (1.0 + moves * drift);
                    if checkpoints.iter().any(within) {
                        factor *= if busy { 1.0 - moves * (1.0 - stops) } else { 1.0 };
                        factor *= if *name == "disk" { 4.0 } else { 1.0 };
                    }
                    if evaluation.iter().any(within) && busy {
                        factor *= tests;
                    }
                    if (second as f64) < warm_up {
                        factor *= if *name == "memory" { 1.0 } else { second as f64 / warm_up.max(1.0) * 0.5 };
                    }
                    factors.push(factor as f32);
                }
            }
            debug_assert_eq!(factors.len(), (metric + 1) * roles * seconds);
        }
        Profile { roles, seconds, factors, checkpoints, evaluation }
    }

    /// Returns the factor of a metric's level.
    pub(super) fn at(&self, metric: usize, role: u32, second: usize) -> f32 {
        let at = (metric * self.roles + role as usize) * self.seconds + second;
        self.factors.get(at).copied().unwrap_or(1.0)
    }
}

/// Returns slow changes by second.
fn drift(rng: &mut Rng, seconds: usize, size: f64) -> Vec<f64> {
    let mut now = size * rng.normal();
    let step = |rng: &mut Rng, now: &mut f64| {
        *now = 0.995 * *now + 0.1 * size * rng.normal();
        *now
    };
    (0..seconds).map(|_| step(rng, &mut now)).collect()
}
