//! The value of replicas (Gemini §4.3, §7.2): the probability that memory survives the loss of f
//! nodes at once, and the time that a failure wastes. All sums have only positive terms, so nothing
//! cancels.

use crate::placement::{Scheme, groups};

/// A polynomial up to a fixed degree. A common factor 2^`exponent` is kept separately so that
/// nothing overflows.
#[derive(Clone, Debug)]
struct Series {
    terms: Vec<f64>,
    exponent: i64,
}

impl Series {
    fn new(terms: Vec<f64>, degree: usize) -> Self {
        let mut terms = terms;
        terms.resize(degree + 1, 0.0);
        Series { terms, exponent: 0 }
    }

    fn times(&self, other: &Series) -> Series {
        let n = self.terms.len();
        let mut terms = vec![0.0; n];
        for (i, a) in self.terms.iter().enumerate().filter(|(_, a)| **a != 0.0) {
            for (b, place) in other.terms.iter().zip(terms.iter_mut().skip(i)) {
                *place += a * b;
            }
        }
        let mut product = Series { terms, exponent: self.exponent + other.exponent };
        let largest = product.terms.iter().copied().fold(0.0, f64::max);
        if largest > 0.0 {
            // Scaling by a power of two is exact.
            let shift = largest.log2().floor();
            product.terms.iter_mut().for_each(|t| *t *= (-shift).exp2());
            product.exponent += shift as i64;
        }
        product
    }

    fn power(&self, mut n: u64) -> Series {
        let mut base = self.clone();
        let mut result = Series::new(vec![1.0], self.terms.len() - 1);
        while n > 0 {
            if n & 1 == 1 {
                result = result.times(&base);
            }
            base = base.times(&base);
            n >>= 1;
        }
        result
    }

    fn ratio(&self, other: &Series, degree: usize) -> f64 {
        let term = |s: &Series| s.terms.get(degree).copied().unwrap_or(0.0);
        let shift = i32::try_from(self.exponent - other.exponent).unwrap_or(i32::MIN);
        term(self) / term(other) * f64::from(shift).exp2()
    }
}

/// Returns the probability that every shard, with `k` copies each, has a copy left when `failed`
/// random nodes of `nodes` are lost at once.
#[must_use]
pub fn survival(nodes: u64, k: u64, failed: u64, scheme: Scheme) -> f64 {
    if failed == 0 {
        return 1.0;
    }
    if k == 0 || failed >= nodes || nodes == 0 {
        return 0.0;
    }
    let (n, k, f) = (size(nodes), size(k.min(nodes)), size(failed));
    // Terms are weighted by scale^degree to stay near one, in numerator and denominator alike.
    let scale = failed as f64 / nodes as f64;
    let all = Series::new(vec![1.0, scale], f).power(nodes);
    let found = groups(n, k, scheme);
    let last = found.last().map_or(0, |(a, b)| b - a);
    let plain = (found.len() - 1) as u64 + u64::from(last == k);
    let mut ways = Series::new(group_terms(k, scale), f).power(plain);
    if last > k {
        ways = ways.times(&Series::new(ring_terms(last, k, f, scale), f));
    }
    ways.ratio(&all, f).min(1.0)
}

/// An erasure code over the shards of a group of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// Number of shards from which parity is computed.
    pub data: u64,
    /// Number of parity shards, and of lost shards that can be computed again.
    pub parity: u64,
}

/// Returns the probability that every shard can still be computed when `failed` of `nodes` are lost
/// at once, under an erasure code: no group has lost more nodes
/// than it has parity.
#[must_use]
pub fn survival_of_code(nodes: u64, code: Code, failed: u64) -> f64 {
    let Code { data, parity } = code;
    if failed == 0 {
        return 1.0;
    }
    if failed >= nodes {
        return 0.0;
    }
    let (f, scale) = (size(failed), failed as f64 / nodes as f64);
    let all = Series::new(vec![1.0, scale], f).power(nodes);
    let one = Series::new(vec![1.0], f);
    let found = groups(size(nodes), size(data + parity), Scheme::Mixed);
    let ways = found.into_iter().fold(one, |ways, (start, end)| {
        let members = end - start;
        let most = size(parity).min(members.saturating_sub(1));
        let terms = group_terms(members, scale).into_iter().take(most + 1).collect();
        ways.times(&Series::new(terms, f))
    });
    ways.ratio(&all, f).min(1.0)
}

fn size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Ways to lose some of a group of k, but not all: (1+z)^k − z^k.
fn group_terms(k: usize, scale: f64) -> Vec<f64> {
    let mut term = 1.0;
    (0..k)
        .map(|i| {
            let now = term;
            term *= (k - i) as f64 / (i + 1) as f64 * scale;
            now
        })
        .collect()
}

/// Ways to lose f nodes of a ring of n without k consecutive ones: n/(n−f) times the ways to fill
/// the n−f gaps between survivors with fewer than k each.
fn ring_terms(n: usize, k: usize, most: usize, scale: f64) -> Vec<f64> {
    let gap = Series::new((0..k).map(|i| scale.powi(i32::try_from(i).unwrap_or(i32::MAX))).collect(), most.min(n));
    let term = |f: usize| {
        let filled = gap.power((n - f) as u64);
        let ways = filled.terms.get(f).copied().unwrap_or(0.0) * (filled.exponent as f64).exp2();
        ways * n as f64 / (n - f) as f64
    };
    (0..=most.min(n - 1)).map(term).collect()
}

/// Returns the average time that a failure wastes, in seconds (Gemini, equation 1): the checkpoint
/// in progress, half an interval, and the retrieval of the state. An interval is never shorter than
/// a checkpoint or a step.
#[must_use]
pub fn wasted_seconds(checkpoint: f64, interval: f64, step: f64, retrieval: f64) -> f64 {
    checkpoint + interval.max(checkpoint).max(step) / 2.0 + retrieval
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::holders;

    fn counted(n: usize, k: usize, f: u32, scheme: Scheme) -> f64 {
        let holders = holders(n, k, scheme);
        let (mut good, mut all) = (0u64, 0u64);
        for lost in (0u32..1 << n).filter(|s| s.count_ones() == f) {
            let gone = |i: usize| lost >> i & 1 == 1;
            all += 1;
            good += u64::from(holders.iter().enumerate().all(|(i, h)| !gone(i) || h.iter().any(|j| !gone(*j))));
        }
        good as f64 / all as f64
    }

    #[test]
    fn exact_against_every_way_to_fail() {
        for scheme in [Scheme::Mixed, Scheme::Ring] {
            for n in 1..=10usize {
                for k in 1..=n.min(4) {
                    for f in 0..=u32::try_from(n).unwrap() {
                        let (is, counted) =
                            (survival(n as u64, k as u64, u64::from(f), scheme), counted(n, k, f, scheme));
                        let zero = f as usize == n;
                        assert!(zero || (is - counted).abs() < 1e-12, "{scheme:?} {n} {k} {f}: {is} {counted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_code_is_exact_against_every_way_to_fail() {
        for (n, data, parity) in [(6, 4, 2), (7, 4, 2), (12, 4, 2), (5, 2, 1), (4, 4, 2), (1, 4, 2), (9, 2, 1)] {
            let found = groups(n, data + parity, Scheme::Mixed);
            for f in 0..=n as u32 {
                let sets: Vec<u32> = (0u32..1 << n).filter(|s| s.count_ones() == f).collect();
                let holds = |lost: &u32, (start, end): &(usize, usize)| {
                    let gone = (*start..*end).filter(|i| lost >> i & 1 == 1).count();
                    gone <= parity.min(end - start - 1)
                };
                let good = sets.iter().filter(|lost| found.iter().all(|g| holds(lost, g))).count();
                let (is, counted) = (
                    survival_of_code(n as u64, Code { data: data as u64, parity: parity as u64 }, u64::from(f)),
                    good as f64 / sets.len() as f64,
                );
                assert!((is - counted).abs() < 1e-12, "{n} {data}+{parity} {f}: {is} {counted}");
            }
        }
        // Six nodes survive the loss of any two, as with two full copies.
        assert!((survival_of_code(6, Code { data: 4, parity: 2 }, 2) - survival(6, 3, 2, Scheme::Mixed)).abs() < 1e-12);
    }

    #[test]
    fn the_papers_figures() {
        for (f, p, ring) in [(2, 0.933_333, 0.866_667), (3, 0.8, 0.628_571), (4, 0.615_385, 0.362_637)] {
            assert!((survival(16, 2, f, Scheme::Mixed) - p).abs() < 1e-6);
            assert!((survival(16, 2, f, Scheme::Ring) - ring).abs() < 1e-6);
        }
        assert!((survival(128, 3, 6, Scheme::Mixed) - 0.9973).abs() < 1e-4);
        // MT-NLG at 20 Gbit/s: 42 + 21 + 42 minutes.
        assert!((wasted_seconds(2520.0, 2520.0, 60.0, 2520.0) - 6300.0).abs() < 1e-9);
    }

    #[test]
    fn large_clusters_neither_overflow_nor_underflow() {
        let p = survival(1_000_000, 2, 1000, Scheme::Mixed);
        assert!(p > 0.55 && p < 0.65, "{p}");
        assert!(survival(9, 2, 8, Scheme::Mixed) < 1e-12);
    }
}
