//! Training with Adam (Kingma and Ba 2014) on the loss of `network.rs`. A seed gives the same bits
//! on every machine.

use super::network::{LATENT, Layout, WINDOW, back, pass, reconstruct};
use super::real::{Fast, LANES, Lanes};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Hyperparameters of the training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Seed of everything that is drawn at random.
    pub seed: u64,
    /// Number of passes over the windows.
    pub epochs: usize,
    /// Windows per step, rounded up to a multiple of sixteen.
    pub batch: usize,
    /// Learning rate at the start: the largest change of a parameter in one step. It decays to a
    /// hundredth.
    pub rate: f64,
    /// Weight of the divergence.
    pub beta: f64,
}

impl Default for Training {
    fn default() -> Training {
        Training { seed: 1, epochs: 20, batch: 256, rate: 0.01, beta: 1e-6 }
    }
}

/// Returns a random number between 0 and 1, never 0, because its logarithm is taken.
fn open(rng: &mut ChaCha8Rng) -> f64 {
    f64::from(rng.next_u32()) / 4_294_967_296.0 + 1e-10
}

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    libm::sqrt(-2.0 * libm::log(open(rng))) * libm::cos(2.0 * std::f64::consts::PI * open(rng))
}

/// Returns the parameters of an untrained network for this seed: uniform in ±1/√4, like torch's
/// initialization.
#[must_use]
pub fn fresh(layout: &Layout, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..layout.parameters()).map(|_| (open(&mut rng) - 0.5) as f32).collect()
}

/// Arranges up to sixteen windows side by side; the last one fills any empty lanes.
pub(super) fn side_by_side(windows: &[&[f32]], lanes: &mut [Lanes<f32>]) {
    for (at, lanes) in lanes.iter_mut().enumerate() {
        for (lane, value) in lanes.iter_mut().enumerate() {
            let window = windows.get(lane).or(windows.last());
            *value = window.and_then(|w| w.get(at)).copied().unwrap_or(0.0);
        }
    }
}

struct Adam {
    first: Vec<f32>,
    second: Vec<f32>,
    steps: i32,
}

impl Adam {
    fn step(&mut self, parameters: &mut [f32], gradient: &[f32], rate: f32) {
        self.steps += 1;
        let corrected = |decay: f32| 1.0 - decay.powi(self.steps);
        let (a, b) = (corrected(0.9), corrected(0.999));
        for (((p, g), m), v) in parameters.iter_mut().zip(gradient).zip(&mut self.first).zip(&mut self.second) {
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.999 * *v + 0.001 * g * g;
            *p -= rate * (*m / a) / ((*v / b).sqrt() + 1e-8);
        }
    }
}

/// Returns the parameters after training on `windows`, each `WINDOW` seconds of `layout.width`
/// normalized metrics.
#[must_use]
pub fn train(layout: &Layout, windows: &[&[f32]], how: &Training) -> Vec<f32> {
    train_from(layout, fresh(layout, how.seed), windows, how)
}

/// The same, starting from `parameters`.
#[must_use]
pub fn train_from(layout: &Layout, mut parameters: Vec<f32>, windows: &[&[f32]], how: &Training) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(how.seed ^ 0x5eed);
    let mut adam = Adam { first: vec![0.0; parameters.len()], second: vec![0.0; parameters.len()], steps: 0 };
    let batch = how.batch.max(1).next_multiple_of(LANES).min(windows.len().next_multiple_of(LANES));
    let mut order: Vec<u32> = (0..windows.len() as u32).collect();
    let steps = (how.epochs * windows.len().div_ceil(batch.max(1))).max(1);
    let (mut input, mut output) =
        (vec![[0.0; LANES]; WINDOW * layout.width], vec![[0.0; LANES]; WINDOW * layout.width]);
    let mut done = 0;
    for _ in 0..how.epochs {
        // Fisher–Yates shuffle.
        for at in (1..order.len()).rev() {
            order.swap(at, (rng.next_u64() % (at as u64 + 1)) as usize);
        }
        for chosen in order.chunks(batch) {
            let mut gradient = vec![0.0f32; parameters.len()];
            for some in chosen.chunks(LANES) {
                let some: Vec<&[f32]> = some.iter().filter_map(|at| windows.get(*at as usize).copied()).collect();
                side_by_side(&some, &mut input);
                let mut chance = [[0.0f32; LANES]; LATENT];
                chance.iter_mut().flatten().for_each(|x| *x = normal(&mut rng) as f32);
                let tape = pass::<f32, Fast>(layout, &parameters, &input, &chance, &mut output);
                back(layout, &parameters, (&input, &chance, &output), &tape, how.beta as f32, &mut gradient);
            }
            let scale = 1.0 / (chosen.len() * WINDOW * layout.width) as f32;
            gradient.iter_mut().for_each(|g| *g *= scale);
            let left = 1.0 - f64::from(done) / steps as f64;
            adam.step(&mut parameters, &gradient, (how.rate * (0.01 + 0.99 * left * left)) as f32);
            done += 1;
        }
    }
    parameters
}

/// Returns the mean squared error of the reconstructed windows.
#[must_use]
pub fn error(layout: &Layout, parameters: &[f32], windows: &[&[f32]]) -> f64 {
    let (mut input, mut output) =
        (vec![[0.0; LANES]; WINDOW * layout.width], vec![[0.0; LANES]; WINDOW * layout.width]);
    let mut sum = 0.0;
    for some in windows.chunks(LANES) {
        side_by_side(some, &mut input);
        reconstruct::<f32, Fast>(layout, parameters, &input, &mut output);
        for (x, y) in input.iter().zip(&output) {
            sum += x.iter().zip(y).take(some.len()).map(|(x, y)| f64::from((x - y) * (x - y))).sum::<f64>();
        }
    }
    sum / (windows.len() * WINDOW * layout.width).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::real::{Activation, Exact};
    use super::*;

    #[test]
    fn it_is_the_network_that_torch_computes() {
        let fixture: serde_json::Value = serde_json::from_str(include_str!("../../tests/torch/fixture.json")).unwrap();
        let numbers = |of: &serde_json::Value| -> Vec<f64> {
            of.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let layout = Layout::new(1);
        let (mut p, mut expected) = (vec![0.0; layout.parameters()], vec![0.0; layout.parameters()]);
        for (name, place) in layout.parts() {
            p[place.clone()].copy_from_slice(&numbers(&fixture["parameters"][name]));
            expected[place].copy_from_slice(&numbers(&fixture["gradients"][name]));
        }
        let lanes =
            |of: &serde_json::Value| -> Vec<Lanes<f64>> { numbers(of).into_iter().map(|x| [x; LANES]).collect() };
        let window = lanes(&fixture["window"]);
        let mut out = window.clone();
        reconstruct::<f64, Exact>(&layout, &p, &window, &mut out);
        for (out, torch) in out.iter().zip(numbers(&fixture["reconstruction"])) {
            assert!((out[0] - torch).abs() < 1e-12, "{} and {torch}", out[0]);
        }
        let narrow: Vec<f32> = p.iter().map(|x| *x as f32).collect();
        let input: Vec<Lanes<f32>> = window.iter().map(|x| x.map(|x| x as f32)).collect();
        for exact in [true, false] {
            let mut out = input.clone();
            match exact {
                true => reconstruct::<f32, Exact>(&layout, &narrow, &input, &mut out),
                false => reconstruct::<f32, Fast>(&layout, &narrow, &input, &mut out),
            }
            let off = out.iter().zip(numbers(&fixture["reconstruction"])).map(|(x, y)| (f64::from(x[0]) - y).abs());
            assert!(off.fold(0.0, f64::max) < if exact { 1e-6 } else { 1e-4 });
        }
        let chance: [Lanes<f64>; LATENT] = lanes(&fixture["chance"]).try_into().unwrap();
        let tape = pass::<f64, Exact>(&layout, &p, &window, &chance, &mut out);
        let mut gradient = vec![0.0; p.len()];
        let beta = fixture["beta"].as_f64().unwrap();
        let loss = back(&layout, &p, (&window, &chance, &out), &tape, beta, &mut gradient);
        let all = LANES as f64;
        assert!((loss / all - fixture["loss"].as_f64().unwrap()).abs() < 1e-12);
        for (at, (ours, torch)) in gradient.iter().zip(&expected).enumerate() {
            assert!((ours / all - torch).abs() < 1e-12, "{at}: {} and {torch}", ours / all);
        }
    }

    /// Returns the loss and adds its derivatives to `gradient`, in `f64`.
    fn loss(layout: &Layout, p: &[f64], gradient: &mut [f64]) -> f64 {
        let wave = |at: usize, lane: usize| 0.5 + 0.3 * libm::sin(at as f64 * 0.7 + lane as f64);
        let window: Vec<Lanes<f64>> =
            (0..WINDOW * layout.width).map(|at| std::array::from_fn(|lane| wave(at, lane))).collect();
        let chance: [Lanes<f64>; LATENT] =
            std::array::from_fn(|j| std::array::from_fn(|lane| libm::cos(j as f64 + 3.0 * lane as f64)));
        let mut out = window.clone();
        let tape = pass::<f64, Exact>(layout, p, &window, &chance, &mut out);
        back(layout, p, (&window, &chance, &out), &tape, 0.1, gradient)
    }

    #[test]
    fn derivatives_are_those_of_finite_differences() {
        for width in [1, 3] {
            let layout = Layout::new(width);
            let p: Vec<f64> = fresh(&layout, 7).into_iter().map(f64::from).collect();
            let mut gradient = vec![0.0; p.len()];
            loss(&layout, &p, &mut gradient);
            for (at, of) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut p = p.clone();
                    p[at] += by;
                    loss(&layout, &p, &mut vec![0.0; p.len()])
                };
                let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((difference - of).abs() <= 1e-6 * (1.0 + of.abs()), "parameter {at}: {of} and {difference}");
            }
        }
    }

    #[test]
    fn the_fast_tangent_is_close() {
        for at in -1000..=1000 {
            let x = f64::from(at) / 100.0;
            assert!((Fast::tanh(x) - libm::tanh(x)).abs() < 1.1e-4, "{x}");
            assert!((Fast::sigmoid(x) - 1.0 / (1.0 + libm::exp(-x))).abs() < 6e-5, "{x}");
        }
    }

    #[test]
    fn it_learns_waves_and_the_same_again() {
        let wave = |phase: usize| -> Vec<f32> {
            (0..WINDOW).map(|t| 0.5 + 0.2 * libm::sinf((t + phase) as f32 * 0.4)).collect()
        };
        let all: Vec<Vec<f32>> = (0..400).map(wave).collect();
        let windows: Vec<&[f32]> = all.iter().map(Vec::as_slice).collect();
        let layout = Layout::new(1);
        assert_eq!(layout.parameters(), 389);
        let how = Training { epochs: 300, batch: 64, ..Training::default() };
        let trained = train(&layout, &windows, &how);
        assert_eq!(trained, train(&layout, &windows, &how));
        let (before, after) = (error(&layout, &fresh(&layout, 1), &windows), error(&layout, &trained, &windows));
        assert!(after < 1e-4 && before > 1e-2, "{before} {after}");
    }
}
