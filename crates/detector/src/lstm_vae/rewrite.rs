//! The forward pass alone, in whole registers: fused multiplications and additions, and one
//! division where the plain code (`cell.rs`) has three or two. It computes the same network, but
//! results differ in the last bits.

use super::cell::{GATES, HIDDEN};
use super::network::{LATENT, Layout};
use pulp::Simd;

/// Values in registers before and after a step.
type Numbers<S, const N: usize> = [<S as Simd>::f32s; N];

struct Net<'p, S: Simd> {
    simd: S,
    of: &'p Layout,
    p: &'p [f32],
}

impl<S: Simd> Net<'_, S> {
    /// Lambert's fraction for the tangent (`real.rs`), as numerator and denominator. Both are
    /// scaled, because three of them are multiplied.
    #[inline(always)]
    fn fraction(&self, x: S::f32s) -> (S::f32s, S::f32s) {
        const SCALE: f32 = 1e-5;
        let s = self.simd;
        let of = |x: f32| s.splat_f32s(x * SCALE);
        let x = s.min_f32s(s.max_f32s(x, s.splat_f32s(-4.97)), s.splat_f32s(4.97));
        let q = s.mul_f32s(x, x);
        let above = s.mul_add_e_f32s(q, of(1.0), of(378.0));
        let above = s.mul_add_e_f32s(q, above, of(17_325.0));
        let above = s.mul_f32s(x, s.mul_add_e_f32s(q, above, of(135_135.0)));
        let below = s.mul_add_e_f32s(q, of(28.0), of(3150.0));
        let below = s.mul_add_e_f32s(q, below, of(62_370.0));
        (above, s.mul_add_e_f32s(q, below, of(135_135.0)))
    }

    /// The logistic function, in the same form.
    #[inline(always)]
    fn logistic(&self, x: S::f32s) -> (S::f32s, S::f32s) {
        let s = self.simd;
        let (above, below) = self.fraction(s.mul_f32s(x, s.splat_f32s(0.5)));
        (s.add_f32s(above, below), s.add_f32s(below, below))
    }

    /// Computes `to += weight · x`, row by row.
    #[inline(always)]
    fn add_rows<const N: usize, const M: usize>(
        &self,
        to: &mut Numbers<S, N>,
        weight: &std::ops::Range<usize>,
        x: &Numbers<S, M>,
    ) {
        let weight = &self.p[weight.clone()];
        for at in 0..N {
            let row = &weight[at * M..][..M];
            let mut sum = to[at];
            for k in 0..M {
                sum = self.simd.mul_add_e_f32s(self.simd.splat_f32s(row[k]), x[k], sum);
            }
            to[at] = sum;
        }
    }

    #[inline(always)]
    fn biases<const N: usize>(&self, bias: &std::ops::Range<usize>) -> Numbers<S, N> {
        let bias = &self.p[bias.clone()];
        std::array::from_fn(
            #[inline(always)]
            |at| self.simd.splat_f32s(bias[at]),
        )
    }

    /// Computes a step of the cell from the contribution from outside, and updates the hidden state
    /// `h` and the cell state `c`.
    #[inline(always)]
    fn step(
        &self,
        mut gates: Numbers<S, GATES>,
        recurrent: &std::ops::Range<usize>,
        h: &mut Numbers<S, HIDDEN>,
        c: &mut Numbers<S, HIDDEN>,
    ) {
        let s = self.simd;
        self.add_rows(&mut gates, recurrent, h);
        for j in 0..HIDDEN {
            let (enters, enters_below) = self.logistic(gates[j]);
            let (keeps, keeps_below) = self.logistic(gates[HIDDEN + j]);
            let (new, new_below) = self.fraction(gates[2 * HIDDEN + j]);
            let below = s.mul_f32s(enters_below, new_below);
            let above = s.mul_f32s(s.mul_f32s(enters, new), keeps_below);
            let above = s.mul_add_e_f32s(s.mul_f32s(keeps, c[j]), below, above);
            c[j] = s.div_f32s(above, s.mul_f32s(keeps_below, below));
            let (leaves, leaves_below) = self.logistic(gates[3 * HIDDEN + j]);
            let (tangent, tangent_below) = self.fraction(c[j]);
            h[j] = s.div_f32s(s.mul_f32s(leaves, tangent), s.mul_f32s(leaves_below, tangent_below));
        }
    }

    /// Reconstructs one register of machines.
    #[inline(always)]
    fn rewrite(&self, window: impl Iterator<Item = S::f32s>, out: &mut [S::f32s]) {
        let (s, of, zero) = (self.simd, self.of, self.simd.splat_f32s(0.0));
        let (mut h, mut c) = ([zero; HIDDEN], [zero; HIDDEN]);
        let outside: Numbers<S, GATES> = self.biases(&of.read[2]);
        let read = &self.p[of.read[0].clone()];
        let (mut gates, mut metric) = (outside, 0);
        for x in window {
            for at in 0..GATES {
                gates[at] = s.mul_add_e_f32s(s.splat_f32s(read[at * of.width + metric]), x, gates[at]);
            }
            metric += 1;
            if metric == of.width {
                self.step(gates, &of.read[1], &mut h, &mut c);
                (gates, metric) = (outside, 0);
            }
        }
        let mut latent: Numbers<S, LATENT> = self.biases(&of.mean[1]);
        self.add_rows(&mut latent, &of.mean[0], &h);
        let mut input: Numbers<S, GATES> = self.biases(&of.write[2]);
        self.add_rows(&mut input, &of.write[0], &latent);
        (h, c) = ([zero; HIDDEN], [zero; HIDDEN]);
        let (rows, biases) = (&self.p[of.out[0].clone()], &self.p[of.out[1].clone()]);
        for out in out.chunks_exact_mut(of.width) {
            self.step(input, &of.write[1], &mut h, &mut c);
            for (at, out) in out.iter_mut().enumerate() {
                let mut sum = s.splat_f32s(biases[at]);
                for k in 0..HIDDEN {
                    sum = s.mul_add_e_f32s(s.splat_f32s(rows[at * HIDDEN + k]), h[k], sum);
                }
                *out = sum;
            }
        }
    }
}

/// Reconstructs the windows of all machines, by second and metric, then by machine. The number of
/// machines must fill whole registers.
pub struct Rewrite<'a> {
    /// The network's layout.
    pub of: &'a Layout,
    /// The network's parameters.
    pub p: &'a [f32],
    /// The windows, in the layout of `out`.
    pub windows: &'a [&'a [f32]],
    /// The reconstruction.
    pub out: &'a mut [Vec<f32>],
}

impl pulp::WithSimd for Rewrite<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let net = Net { simd, of: self.of, p: self.p };
        let registers = self.out.first().map_or(0, |o| o.len() / S::F32_LANES);
        let mut out = vec![simd.splat_f32s(0.0); self.out.len()];
        for at in 0..registers {
            let of = |row: &&[f32]| S::as_simd_f32s(row).0[at];
            net.rewrite(self.windows.iter().map(of), &mut out);
            for (row, out) in self.out.iter_mut().zip(&out) {
                S::as_mut_simd_f32s(row).0[at] = *out;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::network::{WINDOW, reconstruct};
    use super::super::real::{Fast, LANES, Lanes};
    use super::super::train::fresh;
    use super::*;
    use pulp::WithSimd;

    #[test]
    fn it_is_the_plain_way_but_for_the_last_bits() {
        for width in [1, 3] {
            let layout = Layout::new(width);
            let p: Vec<f32> = fresh(&layout, 5).into_iter().map(|x| 3.0 * x).collect();
            let wave = |at: usize, lane: usize| 0.5 + 0.5 * libm::sinf(at as f32 * 0.9 + lane as f32);
            let window: Vec<Lanes<f32>> =
                (0..WINDOW * width).map(|at| std::array::from_fn(|lane| wave(at, lane))).collect();
            let mut plain = window.clone();
            reconstruct::<f32, Fast>(&layout, &p, &window, &mut plain);
            let rows: Vec<&[f32]> = window.iter().map(<[f32; 16]>::as_slice).collect();
            for wide in [false, true] {
                let mut out = vec![vec![0.0; LANES]; WINDOW * width];
                let rewrite = Rewrite { of: &layout, p: &p, windows: &rows, out: &mut out };
                if wide {
                    pulp::Arch::new().dispatch(rewrite);
                } else {
                    rewrite.with_simd(pulp::Scalar::new());
                }
                for (a, b) in out.iter().flatten().zip(plain.iter().flatten()) {
                    assert!((a - b).abs() < 2e-5, "{a} {b}");
                }
            }
        }
    }
}
