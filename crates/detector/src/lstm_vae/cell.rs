//! One LSTM layer (Hochreiter and Schmidhuber 1997), one step forward and backward. The gates are
//! in the order of torch.nn.LSTM: in, forget, cell, out.

use super::real::{Activation, LANES, Lanes, Real, add_times, dot};

/// Size of the hidden state.
pub const HIDDEN: usize = 4;
/// Rows of the weight matrices.
pub const GATES: usize = 4 * HIDDEN;

/// The state after a step.
#[derive(Clone, Copy)]
pub struct State<T> {
    /// Hidden state, the layer's output.
    pub h: [Lanes<T>; HIDDEN],
    /// Cell state.
    pub c: [Lanes<T>; HIDDEN],
}

impl<T: Real> State<T> {
    /// Returns the initial state.
    pub fn zero() -> State<T> {
        let zero = [[T::default(); LANES]; HIDDEN];
        State { h: zero, c: zero }
    }
}

/// What a forward step records for the backward step.
#[derive(Clone, Copy)]
pub struct Step<T> {
    /// Activations of the gates.
    gates: [Lanes<T>; GATES],
    /// State before the step.
    before: State<T>,
    /// Hyperbolic tangent of the cell state after the step.
    tangent: [Lanes<T>; HIDDEN],
}

/// Computes one step. `input` is the contribution from outside, biases included; `recurrent` is
/// `GATES` × `HIDDEN`.
#[inline(always)]
pub fn forward<T: Real, A: Activation>(
    mut input: [Lanes<T>; GATES],
    recurrent: &[T],
    before: &State<T>,
) -> (State<T>, Step<T>) {
    for (gate, row) in input.iter_mut().zip(recurrent.chunks_exact(HIDDEN)) {
        for (weight, h) in row.iter().zip(&before.h) {
            add_times(gate, *weight, h);
        }
    }
    for (at, gate) in input.iter_mut().enumerate() {
        if at / HIDDEN == 2 {
            gate.iter_mut().for_each(|x| *x = A::tanh(*x));
        } else {
            gate.iter_mut().for_each(|x| *x = A::sigmoid(*x));
        }
    }
    let (mut after, mut tangent) = (State::zero(), [[T::default(); LANES]; HIDDEN]);
    for j in 0..HIDDEN {
        let (enters, keeps, new, leaves) =
            (&input[j], &input[HIDDEN + j], &input[2 * HIDDEN + j], &input[3 * HIDDEN + j]);
        for l in 0..LANES {
            after.c[j][l] = keeps[l] * before.c[j][l] + enters[l] * new[l];
            tangent[j][l] = A::tanh(after.c[j][l]);
            after.h[j][l] = leaves[l] * tangent[j][l];
        }
    }
    (after, Step { gates: input, before: *before, tangent })
}

/// Propagates gradients back through one step. `after` is the gradient with respect to the state
/// after the step, and is replaced by that of the state before. Returns the gradient of the gates
/// before their activation, and adds to the gradient of the recurrent weights.
// Indices name the same lane of several arrays.
#[allow(clippy::needless_range_loop)]
pub fn backward<T: Real>(
    step: &Step<T>,
    recurrent: &[T],
    after: &mut State<T>,
    gradient: &mut [T],
) -> [Lanes<T>; GATES] {
    let one = T::of(1.0);
    let mut gates = [[T::default(); LANES]; GATES];
    for j in 0..HIDDEN {
        for l in 0..LANES {
            let [enters, keeps, new, leaves] = [0, 1, 2, 3].map(|g| step.gates[g * HIDDEN + j][l]);
            let (tangent, dh) = (step.tangent[j][l], after.h[j][l]);
            let dc = after.c[j][l] + dh * leaves * (one - tangent * tangent);
            gates[j][l] = dc * new * enters * (one - enters);
            gates[HIDDEN + j][l] = dc * step.before.c[j][l] * keeps * (one - keeps);
            gates[2 * HIDDEN + j][l] = dc * enters * (one - new * new);
            gates[3 * HIDDEN + j][l] = dh * tangent * leaves * (one - leaves);
            after.c[j][l] = dc * keeps;
        }
    }
    after.h = [[T::default(); LANES]; HIDDEN];
    for ((gate, row), gradient) in
        gates.iter().zip(recurrent.chunks_exact(HIDDEN)).zip(gradient.chunks_exact_mut(HIDDEN))
    {
        for (j, (weight, gradient)) in row.iter().zip(gradient).enumerate() {
            add_times(&mut after.h[j], *weight, gate);
            *gradient += dot(gate, &step.before.h[j]);
        }
    }
    gates
}
