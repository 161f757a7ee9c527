//! One minute of traffic at 100 Hz, in which some machines become slow at once and the others wait
//! for them a little later.

use everstep_rng::Rng;

/// The number of samples in a minute.
const LOOKS: usize = 6000;
/// Ranges: seconds per iteration, depth of its wave, noise of a sample, relative loss of a slow
/// machine, relative loss of the others, and the delay of the latter in samples.
const PERIOD: [f64; 2] = [0.4, 2.0];
const WAVE: [f64; 2] = [0.2, 0.6];
const NOISE: [f64; 2] = [0.02, 0.08];
const SLOWER: [f64; 2] = [0.25, 0.7];
const OTHERS: [f64; 2] = [0.05, 0.3];
const AFTER: [f64; 2] = [10.0, 50.0];

/// Returns the bytes that each machine sent, by sample; the slow machines; and the sample at which
/// they became slow.
#[must_use]
pub fn burst(machines: usize, slow: usize, seed: u64) -> (Vec<Vec<f32>>, Vec<usize>, usize) {
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_97f4_a7c1) ^ 0xb1257);
    let mut bad: Vec<usize> = Vec::new();
    while bad.len() < slow.min(machines) {
        let next = rng.range(0, machines as u64) as usize;
        if !bad.contains(&next) {
            bad.push(next);
        }
    }
    bad.sort_unstable();
    let began = rng.between([0.4, 0.7]) * LOOKS as f64;
    let (period, wave, noise) = (rng.between(PERIOD) * 100.0, rng.between(WAVE), rng.between(NOISE));
    let (others, after) = (rng.between(OTHERS), rng.between(AFTER));
    let values = (0..machines)
        .map(|machine| {
            let own = 1e5 * libm::exp(0.1 * rng.normal());
            let late = rng.between([0.0, 2.0]);
            let (lacks, from) = if bad.contains(&machine) {
                (rng.between(SLOWER), began + late)
            } else {
                (others, began + after + late)
            };
            (0..LOOKS)
                .map(|at| {
                    let together = if ((at as f64 + late) / period).fract() < 0.4 { 1.0 - wave } else { 1.0 };
                    let slower = if at as f64 >= from && slow > 0 { 1.0 - lacks } else { 1.0 };
                    (own * together * slower * (1.0 + noise * rng.normal())).max(0.0) as f32
                })
                .collect()
        })
        .collect();
    (values, bad, began as usize)
}
