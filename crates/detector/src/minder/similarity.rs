//! Who is unlike the others in one window (Minder, section 4.4): each machine's distances to all others, summed; the largest sum, in standard
//! deviations of all sums.

/// How far two machines' windows are apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distance {
    /// Root of the squares.
    #[default]
    Euclid,
    /// Sum of the differences.
    Manhattan,
    /// Largest difference.
    Chebyshev,
}

/// The machine that is least like the others, and by how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Which.
    pub machine: u32,
    /// Standard deviations of its sum from the mean of all. Of `n` machines it is √(n − 1) at most.
    pub z: f32,
}

const LANES: usize = 16;

/// How far apart, number by number.
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

/// All pairs once: each distance is added to the sums of both.
#[inline(always)]
fn pairs<const N: usize>(of: Distance, values: &[Vec<f32>], sums: &mut [f32]) {
    let columns: [&[f32]; N] = std::array::from_fn(|k| values[k].as_slice());
    let machines = sums.len();
    for i in 0..machines {
        let own: [f32; N] = std::array::from_fn(|k| columns[k][i]);
        let mut all = [0.0f32; LANES];
        let mut from = i + 1;
        while from + LANES <= machines {
            let d: [f32; LANES] = apart::<N, LANES>(of, &own, &columns, from);
            sums[from..from + LANES].iter_mut().zip(&d).for_each(|(sum, d)| *sum += d);
            all.iter_mut().zip(&d).for_each(|(all, d)| *all += d);
            from += LANES;
        }
        for (j, sum) in sums.iter_mut().enumerate().skip(from) {
            let [d] = apart::<N, 1>(of, &own, &columns, j);
            *sum += d;
            all[0] += d;
        }
        sums[i] += all.iter().sum::<f32>();
    }
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

/// Who is least like the others; `values` by number of the embedding, then by machine. `None` of fewer than three machines, or if all are alike.
#[must_use]
pub fn candidate(of: Distance, values: &[Vec<f32>]) -> Option<Candidate> {
    let machines = values.first().map_or(0, Vec::len);
    if machines < 3 {
        return None;
    }
    let mut sums = vec![0.0f32; machines];
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || match (values.len(), of) {
            (8, Distance::Euclid) => pairs::<8>(Distance::Euclid, values, &mut sums),
            (8, _) => pairs::<8>(of, values, &mut sums),
            (4, Distance::Euclid) => pairs::<4>(Distance::Euclid, values, &mut sums),
            _ => (0..machines).for_each(|i| to_others_of_any_width(of, values, i, &mut sums)),
        },
    );
    outlier(&sums)
}

/// The largest of some numbers, in standard deviations.
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

    fn values(width: usize) -> Vec<Vec<f32>> {
        (0..width)
            .map(|k| (0..9).map(|m| ((m * 7 + k * 3) % 5) as f32 * 0.1 + if m == 4 { 2.0 } else { 0.0 }).collect())
            .collect()
    }

    #[test]
    fn sums_are_those_of_all_pairs_for_any_width() {
        for width in [1, 8, 11] {
            let all = values(width);
            for of in [Distance::Euclid, Distance::Manhattan, Distance::Chebyshev] {
                let between = |a: usize, b: usize| {
                    let off = all.iter().map(|c| f64::from(c[a] - c[b]).abs());
                    match of {
                        Distance::Euclid => off.map(|x| x * x).sum::<f64>().sqrt(),
                        Distance::Manhattan => off.sum(),
                        Distance::Chebyshev => off.fold(0.0, f64::max),
                    }
                };
                let sums: Vec<f32> = (0..9).map(|a| (0..9).map(|b| between(a, b)).sum::<f64>() as f32).collect();
                let (found, by_hand) = (candidate(of, &all).unwrap(), outlier(&sums).unwrap());
                assert_eq!((found.machine, by_hand.machine), (4, 4));
                assert!((found.z - by_hand.z).abs() < 1e-4, "{found:?} {by_hand:?}");
            }
        }
    }

    #[test]
    fn equals_have_no_outlier() {
        assert_eq!(candidate(Distance::Euclid, &vec![vec![0.5; 6]; 8]), None);
        assert_eq!(candidate(Distance::Euclid, &[vec![0.5, 1.0]]), None);
    }
}
