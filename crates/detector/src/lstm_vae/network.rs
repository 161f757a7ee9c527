//! The network. An LSTM reads a window, its last state determines a normal distribution of 8
//! numbers, and a second LSTM reconstructs the window from them (Minder, section 4.2: hidden size
//! 4, latent size 8, one layer).

use super::cell::{GATES, HIDDEN, State, Step, backward, forward};
use super::real::{Activation, LANES, Lanes, Real, add_times, dot};
use std::ops::Range;

/// Samples in a window.
pub const WINDOW: usize = 8;
/// Size of the latent representation of a window.
pub const LATENT: usize = 8;

/// Positions of each part's parameters in one flat array, for windows of `width` metrics.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Metrics per window: 1, or all of them together.
    pub width: usize,
    pub(super) read: [Range<usize>; 3],
    pub(super) mean: [Range<usize>; 2],
    spread: [Range<usize>; 2],
    pub(super) write: [Range<usize>; 3],
    pub(super) out: [Range<usize>; 2],
}

impl Layout {
    /// Returns the layout for windows of `width` metrics.
    #[must_use]
    pub fn new(width: usize) -> Layout {
        let mut at = 0;
        let mut next = |count: usize| {
            at += count;
            at - count..at
        };
        Layout {
            width,
            read: [next(GATES * width), next(GATES * HIDDEN), next(GATES)],
            mean: [next(LATENT * HIDDEN), next(LATENT)],
            spread: [next(LATENT * HIDDEN), next(LATENT)],
            write: [next(GATES * LATENT), next(GATES * HIDDEN), next(GATES)],
            out: [next(width * HIDDEN), next(width)],
        }
    }

    /// Returns the number of parameters: 389 for one metric.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.out[1].end
    }

    /// Returns the parts by name, for files and for comparisons with torch.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, Range<usize>); 12] {
        let ([a, b, c], [d, e], [f, g]) = (self.read.clone(), self.mean.clone(), self.spread.clone());
        let ([h, i, j], [k, l]) = (self.write.clone(), self.out.clone());
        [
            ("read.input", a),
            ("read.recurrent", b),
            ("read.bias", c),
            ("mean.weight", d),
            ("mean.bias", e),
            ("spread.weight", f),
            ("spread.bias", g),
            ("write.input", h),
            ("write.recurrent", i),
            ("write.bias", j),
            ("out.weight", k),
            ("out.bias", l),
        ]
    }
}

/// Computes `weight * x + bias`, row by row.
#[inline(always)]
fn linear<T: Real, const N: usize>(weight: &[T], bias: &[T], x: &[Lanes<T>]) -> [Lanes<T>; N] {
    let mut out = [[T::default(); LANES]; N];
    for ((out, row), bias) in out.iter_mut().zip(weight.chunks_exact(x.len())).zip(bias) {
        *out = [*bias; LANES];
        for (weight, x) in row.iter().zip(x) {
            add_times(out, *weight, x);
        }
    }
    out
}

/// Propagates gradients back through [`linear`]. Returns the gradient with respect to `x`, and adds
/// to the gradients of the parameters.
fn linear_back<T: Real, const N: usize>(
    parameters: &[T],
    gradient: &mut [T],
    [weight, bias]: [&Range<usize>; 2],
    x: &[Lanes<T>],
    out: &[Lanes<T>],
) -> [Lanes<T>; N] {
    let mut dx = [[T::default(); LANES]; N];
    for (at, d) in out.iter().enumerate() {
        let one = [T::of(1.0); LANES];
        gradient[bias.start + at] += dot(d, &one);
        for (j, x) in x.iter().enumerate() {
            let place = weight.start + at * x_len(weight, bias) + j;
            gradient[place] += dot(d, x);
            if let Some(dx) = dx.get_mut(j) {
                add_times(dx, parameters[place], d);
            }
        }
    }
    dx
}

fn x_len(weight: &Range<usize>, bias: &Range<usize>) -> usize {
    weight.len() / bias.len()
}

/// The input of a pass, the noise drawn for it, and its output.
pub type Passed<'a, T> = (&'a [Lanes<T>], &'a [Lanes<T>; LATENT], &'a [Lanes<T>]);

/// What a pass records for the backward pass.
pub struct Tape<T> {
    read: Vec<Step<T>>,
    last: [Lanes<T>; HIDDEN],
    /// Means of the latent distribution; `spread` has the logarithms of its variances.
    pub mean: [Lanes<T>; LATENT],
    /// See `mean`.
    pub spread: [Lanes<T>; LATENT],
    latent: [Lanes<T>; LATENT],
    write: Vec<Step<T>>,
    written: Vec<[Lanes<T>; HIDDEN]>,
}

/// Reads sixteen windows and returns the last state. `window` is by second, then by metric.
#[inline(always)]
pub fn encode<T: Real, A: Activation>(
    of: &Layout,
    p: &[T],
    window: &[Lanes<T>],
    mut steps: impl FnMut(Step<T>),
) -> State<T> {
    let mut state = State::zero();
    for x in window.chunks_exact(of.width) {
        let input = linear(&p[of.read[0].clone()], &p[of.read[2].clone()], x);
        let (after, step) = forward::<T, A>(input, &p[of.read[1].clone()], &state);
        state = after;
        steps(step);
    }
    state
}

/// Reconstructs sixteen windows from the latent means, without noise. `out` has the layout of
/// `window`.
#[inline(always)]
pub fn reconstruct<T: Real, A: Activation>(of: &Layout, p: &[T], window: &[Lanes<T>], out: &mut [Lanes<T>]) {
    let state = encode::<T, A>(of, p, window, |_| ());
    let latent: [Lanes<T>; LATENT] = linear(&p[of.mean[0].clone()], &p[of.mean[1].clone()], &state.h);
    decode::<T, A>(of, p, &latent, out, |_, _| ());
}

#[inline(always)]
fn decode<T: Real, A: Activation>(
    of: &Layout,
    p: &[T],
    latent: &[Lanes<T>; LATENT],
    out: &mut [Lanes<T>],
    mut steps: impl FnMut(Step<T>, &State<T>),
) {
    // The same at every second.
    let input: [Lanes<T>; GATES] = linear(&p[of.write[0].clone()], &p[of.write[2].clone()], latent);
    let mut state = State::zero();
    for out in out.chunks_exact_mut(of.width) {
        let (after, step) = forward::<T, A>(input, &p[of.write[1].clone()], &state);
        state = after;
        steps(step, &state);
        let rows = p[of.out[0].clone()].chunks_exact(HIDDEN).zip(&p[of.out[1].clone()]);
        for (out, (row, bias)) in out.iter_mut().zip(rows) {
            *out = [*bias; LANES];
            for (weight, h) in row.iter().zip(&state.h) {
                add_times(out, *weight, h);
            }
        }
    }
}

/// Like [`reconstruct`], but adds `chance` (standard normal noise), and records a tape.
pub fn pass<T: Real, A: Activation>(
    of: &Layout,
    p: &[T],
    window: &[Lanes<T>],
    chance: &[Lanes<T>; LATENT],
    out: &mut [Lanes<T>],
) -> Tape<T> {
    let mut read = Vec::with_capacity(WINDOW);
    let last = encode::<T, A>(of, p, window, |step| read.push(step)).h;
    let mean: [Lanes<T>; LATENT] = linear(&p[of.mean[0].clone()], &p[of.mean[1].clone()], &last);
    let spread: [Lanes<T>; LATENT] = linear(&p[of.spread[0].clone()], &p[of.spread[1].clone()], &last);
    let mut latent = mean;
    for j in 0..LATENT {
        for l in 0..LANES {
            latent[j][l] += chance[j][l] * (T::of(0.5) * spread[j][l]).exp();
        }
    }
    let (mut write, mut written) = (Vec::with_capacity(WINDOW), Vec::with_capacity(WINDOW));
    decode::<T, A>(of, p, &latent, out, |step, state| {
        write.push(step);
        written.push(state.h);
    });
    Tape { read, last, mean, spread, latent, write, written }
}

/// Returns the loss of a pass: half the squared error, plus `beta` times the divergence from the
/// standard normal distribution (Kingma and Welling 2013), summed over all windows. Adds its
/// derivatives to `gradient`.
pub fn back<T: Real>(
    of: &Layout,
    p: &[T],
    (window, chance, out): Passed<'_, T>,
    tape: &Tape<T>,
    beta: T,
    gradient: &mut [T],
) -> T {
    let (half, one) = (T::of(0.5), T::of(1.0));
    let mut loss = T::default();
    let mut state = State::zero();
    let mut input = [[T::default(); LANES]; GATES];
    for second in (0..WINDOW).rev() {
        let at = second * of.width..(second + 1) * of.width;
        let mut off = vec![[T::default(); LANES]; of.width];
        for ((off, out), x) in off.iter_mut().zip(&out[at.clone()]).zip(&window[at]) {
            for l in 0..LANES {
                off[l] = out[l] - x[l];
                loss += half * off[l] * off[l];
            }
        }
        let dh: [Lanes<T>; HIDDEN] = linear_back(p, gradient, [&of.out[0], &of.out[1]], &tape.written[second], &off);
        for (h, dh) in state.h.iter_mut().zip(&dh) {
            add_times(h, one, dh);
        }
        let gates =
            backward(&tape.write[second], &p[of.write[1].clone()], &mut state, &mut gradient[of.write[1].clone()]);
        for (sum, gate) in input.iter_mut().zip(&gates) {
            add_times(sum, one, gate);
        }
    }
    let latent: [Lanes<T>; LATENT] = linear_back(p, gradient, [&of.write[0], &of.write[2]], &tape.latent, &input);
    let (mut mean, mut spread) = (latent, latent);
    for j in 0..LATENT {
        for l in 0..LANES {
            let (m, s) = (tape.mean[j][l], tape.spread[j][l]);
            let deviation = (half * s).exp();
            spread[j][l] = latent[j][l] * chance[j][l] * half * deviation + beta * half * (deviation * deviation - one);
            mean[j][l] += beta * m;
            loss += beta * half * (m * m + deviation * deviation - s - one);
        }
    }
    let by_mean: [Lanes<T>; HIDDEN] = linear_back(p, gradient, [&of.mean[0], &of.mean[1]], &tape.last, &mean);
    let by_spread: [Lanes<T>; HIDDEN] = linear_back(p, gradient, [&of.spread[0], &of.spread[1]], &tape.last, &spread);
    let mut state = State::zero();
    for j in 0..HIDDEN {
        add_times(&mut state.h[j], one, &by_mean[j]);
        add_times(&mut state.h[j], one, &by_spread[j]);
    }
    for second in (0..WINDOW).rev() {
        let gates = backward(&tape.read[second], &p[of.read[1].clone()], &mut state, &mut gradient[of.read[1].clone()]);
        let x = &window[second * of.width..(second + 1) * of.width];
        let _: [Lanes<T>; 0] = linear_back(p, gradient, [&of.read[0], &of.read[2]], x, &gates);
    }
    loss
}
