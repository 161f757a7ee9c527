//! The machine least like the others in one window (Minder, section 4.4). The distances of each
//! machine to all others are summed; the score is the largest sum, in standard deviations of all
//! sums.

use pulp::Simd;

/// A distance between the windows of two machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distance {
    /// Root of the sum of squares.
    #[default]
    Euclid,
    /// Sum of absolute differences.
    Manhattan,
    /// Largest absolute difference.
    Chebyshev,
}

/// The machine that is least like the others, and by how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Index of the machine.
    pub machine: u32,
    /// Standard deviations of its sum from the mean of all sums; with `n` machines, at most √(n −
    /// 1).
    pub z: f32,
}

/// Machines side by side (`LANES`), and machines compared with them at once (`ROWS`), so that
/// loaded values are used several times.
const LANES: usize = 16;
const ROWS: usize = 4;

/// Returns the distances of one machine to `L` others.
#[inline(always)]
fn apart<const N: usize, const L: usize>(of: Distance, own: &[f32; N], columns: &[&[f32]; N], from: usize) -> [f32; L] {
    let mut d = [0.0f32; L];
    for k in 0..N {
        let others = &columns[k][from..from + L];
        for l in 0..L {
            let x = others[l] - own[k];
            d[l] = match of {
                Distance::Euclid => d[l] + x * x,
                Distance::Manhattan => d[l] + x.abs(),
                Distance::Chebyshev => d[l].max(x.abs()),
            };
        }
    }
    if of == Distance::Euclid {
        d.iter_mut().for_each(|d| *d = d.sqrt());
    }
    d
}

/// Computes each pair once, and adds the distance to the sums of both.
#[inline(always)]
fn pairs<const N: usize>(of: Distance, columns: &[&[f32]; N], sums: &mut [f32], rows: std::ops::Range<usize>) {
    let machines = sums.len();
    for i in rows {
        let own: [f32; N] = std::array::from_fn(|k| columns[k][i]);
        let mut all = [0.0f32; LANES];
        let mut from = i + 1;
        while from + LANES <= machines {
            let d: [f32; LANES] = apart::<N, LANES>(of, &own, columns, from);
            sums[from..from + LANES].iter_mut().zip(&d).for_each(|(sum, d)| *sum += d);
            all.iter_mut().zip(&d).for_each(|(all, d)| *all += d);
            from += LANES;
        }
        for (j, sum) in sums.iter_mut().enumerate().skip(from) {
            let [d] = apart::<N, 1>(of, &own, columns, j);
            *sum += d;
            all[0] += d;
        }
        sums[i] += all.iter().sum::<f32>();
    }
}

/// The same for the Euclidean distance of many machines, in whole registers. Relative to the mean
/// of all machines, |a − b|² = |a|² + |b|² − 2ab loses no more digits than the sums can show.
#[inline(always)]
fn euclid<const N: usize, S: Simd>(simd: S, values: &[Vec<f32>], sums: &mut [f32]) {
    let machines = sums.len();
    let centered: [Vec<f32>; N] = std::array::from_fn(|k| {
        let mean = values[k].iter().sum::<f32>() / machines as f32;
        values[k].iter().map(|v| v - mean).collect()
    });
    let columns: [&[f32]; N] = std::array::from_fn(|k| centered[k].as_slice());
    let mut norms = vec![0.0f32; machines];
    for column in &columns {
        norms.iter_mut().zip(*column).for_each(|(norm, v)| *norm += v * v);
    }
    let places: Vec<f32> = (0..machines).map(|m| m as f32).collect();
    // Machines within a block are compared in both directions, all in whole registers; those after
    // the block only once.
    let block = S::F32_LANES.max(ROWS);
    let whole = machines / block * block;
    let zero = simd.splat_f32s(0.0);
    for first in (0..whole).step_by(ROWS) {
        let mut own = [[zero; N]; ROWS];
        let mut own_norm = [zero; ROWS];
        for r in 0..ROWS {
            own_norm[r] = simd.splat_f32s(norms[first + r]);
            for k in 0..N {
                own[r][k] = simd.splat_f32s(-2.0 * columns[k][first + r]);
            }
        }
        let to = |r: usize, norm: S::f32s, here: &[S::f32s; N]| {
            let mut d = simd.add_f32s(own_norm[r], norm);
            for k in 0..N {
                d = simd.mul_add_e_f32s(own[r][k], here[k], d);
            }
            simd.sqrt_f32s(simd.max_f32s(d, zero))
        };
        let from = first / block * block;
        let (norm, _) = S::as_simd_f32s(&norms[from..whole]);
        let (place, _) = S::as_simd_f32s(&places[from..whole]);
        let mut others = [norm; N];
        for k in 0..N {
            others[k] = S::as_simd_f32s(&columns[k][from..whole]).0;
        }
        let mut all = [zero; ROWS];
        let within = block / S::F32_LANES;
        for at in 0..within {
            let mut here = [zero; N];
            for k in 0..N {
                here[k] = others[k][at];
            }
            for (r, all) in all.iter_mut().enumerate() {
                let is_itself = simd.equal_f32s(place[at], simd.splat_f32s((first + r) as f32));
                let d = simd.select_f32s(is_itself, zero, to(r, norm[at], &here));
                *all = simd.add_f32s(*all, d);
            }
        }
        let (sum, _) = S::as_mut_simd_f32s(&mut sums[from..whole]);
        for at in within..norm.len() {
            let mut here = [zero; N];
            for k in 0..N {
                here[k] = others[k][at];
            }
            let mut sum_here = sum[at];
            for (r, all) in all.iter_mut().enumerate() {
                let d = to(r, norm[at], &here);
                sum_here = simd.add_f32s(sum_here, d);
                *all = simd.add_f32s(*all, d);
            }
            sum[at] = sum_here;
        }
        for r in 0..ROWS {
            let own: [f32; N] = std::array::from_fn(|k| columns[k][first + r]);
            let mut sum = simd.reduce_sum_f32s(all[r]);
            for (j, behind) in sums.iter_mut().enumerate().skip(whole) {
                let [d] = apart::<N, 1>(Distance::Euclid, &own, &columns, j);
                *behind += d;
                sum += d;
            }
            sums[first + r] += sum;
        }
    }
    pairs::<N>(Distance::Euclid, &columns, sums, whole..machines);
}

#[inline(always)]
fn to_others_of_any_width(of: Distance, values: &[Vec<f32>], i: usize, sums: &mut [f32]) {
    let machines = sums.len();
    let mut d = vec![0.0f32; machines - i - 1];
    for column in values {
        let own = column[i];
        for (d, other) in d.iter_mut().zip(&column[i + 1..machines]) {
            let x = other - own;
            *d = match of {
                Distance::Euclid => *d + x * x,
                Distance::Manhattan => *d + x.abs(),
                Distance::Chebyshev => d.max(x.abs()),
            };
        }
    }
    for (at, d) in d.into_iter().enumerate() {
        let d = if of == Distance::Euclid { d.sqrt() } else { d };
        sums[i + 1 + at] += d;
        sums[i] += d;
    }
}

/// The computation that is compiled for each kind of register.
struct AllPairs<'a> {
    of: Distance,
    values: &'a [Vec<f32>],
    sums: &'a mut [f32],
}

impl AllPairs<'_> {
    #[inline(always)]
    fn summed<const N: usize, S: Simd>(self, simd: S) {
        let AllPairs { of, values, sums } = self;
        let machines = sums.len();
        let columns: [&[f32]; N] = std::array::from_fn(|k| values[k].as_slice());
        match of {
            Distance::Euclid => euclid::<N, S>(simd, values, sums),
            _ => pairs::<N>(of, &columns, sums, 0..machines),
        }
    }
}

impl pulp::WithSimd for AllPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.values.len() {
            8 => self.summed::<8, S>(simd),
            4 => self.summed::<4, S>(simd),
            _ => (0..self.sums.len()).for_each(|i| to_others_of_any_width(self.of, self.values, i, self.sums)),
        }
    }
}

/// Returns the machine least like the others. `values` is by index in the embedding, then by
/// machine. `None` with fewer than three machines, or if all are alike.
#[must_use]
pub fn candidate(of: Distance, values: &[Vec<f32>]) -> Option<Candidate> {
    let machines = values.first().map_or(0, Vec::len);
    if machines < 3 {
        return None;
    }
    let mut sums = vec![0.0f32; machines];
    pulp::Arch::new().dispatch(AllPairs { of, values, sums: &mut sums });
    outlier(&sums)
}

/// Returns the largest of the numbers, in standard deviations from their mean.
#[must_use]
pub fn outlier(sums: &[f32]) -> Option<Candidate> {
    let n = sums.len() as f64;
    let mean = sums.iter().map(|s| f64::from(*s)).sum::<f64>() / n;
    let variance = sums.iter().map(|s| (f64::from(*s) - mean).powi(2)).sum::<f64>() / n;
    let (machine, most) = sums.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)))?;
    let z = (f64::from(*most) - mean) / variance.sqrt();
    z.is_finite().then_some(Candidate { machine: machine as u32, z: z as f32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(width: usize, machines: usize) -> Vec<Vec<f32>> {
        let of = |m: usize, k: usize| ((m * 7 + k * 3) % 5) as f32 * 0.1 + if m == 4 { 2.0 } else { 0.0 };
        (0..width).map(|k| (0..machines).map(|m| of(m, k)).collect()).collect()
    }

    #[test]
    fn sums_are_those_of_all_pairs_for_any_width_and_any_number() {
        for (width, machines) in [(1, 9), (8, 9), (11, 9), (4, 16), (8, 16), (8, 75), (8, 128), (4, 131)] {
            let all = values(width, machines);
            for of in [Distance::Euclid, Distance::Manhattan, Distance::Chebyshev] {
                let between = |a: usize, b: usize| {
                    let off = all.iter().map(|c| f64::from(c[a] - c[b]).abs());
                    match of {
                        Distance::Euclid => off.map(|x| x * x).sum::<f64>().sqrt(),
                        Distance::Manhattan => off.sum(),
                        Distance::Chebyshev => off.fold(0.0, f64::max),
                    }
                };
                let sum = |a| (0..machines).map(|b| between(a, b)).sum::<f64>() as f32;
                let by_hand = outlier(&(0..machines).map(sum).collect::<Vec<_>>()).unwrap();
                let found = candidate(of, &all).unwrap();
                assert_eq!((found.machine, by_hand.machine), (4, 4));
                assert!((found.z - by_hand.z).abs() < 1e-4 * by_hand.z, "{machines} {found:?} {by_hand:?}");
            }
        }
    }

    #[test]
    fn equals_have_no_outlier() {
        assert_eq!(candidate(Distance::Euclid, &vec![vec![0.5; 6]; 8]), None);
        assert_eq!(candidate(Distance::Euclid, &[vec![0.5, 1.0]]), None);
    }
}
