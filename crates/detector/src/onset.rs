//! Finds the machine that was slow first, from samples of one quantity (bytes on the network) at
//! 100 Hz from all machines of a job, around the moment at which several began to deviate. At one
//! sample per second, a slow machine has long slowed down all others; at a hundred, the first one
//! is still visible.
//!
//! All machines do the same at the same time, so each is compared with the upper quartile at that
//! moment. The median would not do: two slow machines of four would move it.

use crate::quantiles::median_of;

/// Samples in the moving average: a fifth of a second.
const MEAN: usize = 20;
/// Consecutive samples that make an onset.
const ROW: usize = 20;
/// Spreads, and share of the level, by which a machine must fall short.
const FAR: f32 = 6.0;
const EFFECT: f32 = 0.12;
/// Samples within which several onsets count as simultaneous.
const TOGETHER: usize = 30;

/// Where a slowdown began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Onset {
    /// The machines that were slow first.
    pub machines: Vec<usize>,
    /// Index of the sample at which the first of them began.
    pub at: usize,
}

/// Returns the moving average over the last fifth of a second.
fn smooth(of: &[f32]) -> Vec<f32> {
    let (mut sum, mut many) = (0.0, 0usize);
    let mut out = Vec::with_capacity(of.len());
    for (at, value) in of.iter().enumerate() {
        sum += f64::from(*value);
        many += 1;
        if many > MEAN {
            sum -= f64::from(of[at - MEAN]);
            many = MEAN;
        }
        out.push((sum / many as f64) as f32);
    }
    out
}

/// Returns the machines that fell behind the others first. `values` has one list of samples per
/// machine, and nothing may be wrong in the first third. Returns `None` if no machine fell behind.
#[must_use]
pub fn onset(values: &[Vec<f32>]) -> Option<Onset> {
    let looks = values.iter().map(Vec::len).min()?;
    let before = looks / 3;
    if before < MEAN * 2 || values.len() < 3 {
        return None;
    }
    let mut scratch = Vec::new();
    // As shares of each machine's usual level.
    let shares: Vec<Vec<f32>> = values
        .iter()
        .map(|of| {
            let usual = of[..before].iter().sum::<f32>() / before as f32;
            smooth(&of[..looks].iter().map(|v| if usual > 0.0 { v / usual } else { 1.0 }).collect::<Vec<_>>())
        })
        .collect();
    let reference = |at: usize| {
        let mut all: Vec<f32> = shares.iter().map(|s| s[at]).filter(|v| v.is_finite()).collect();
        all.sort_by(f32::total_cmp);
        all.get(all.len() * 3 / 4).copied().unwrap_or(1.0)
    };
    let references: Vec<f32> = (0..looks).map(reference).collect();
    let mut began: Vec<(usize, usize)> = Vec::new();
    for (machine, own) in shares.iter().enumerate() {
        let lacks: Vec<f32> = own.iter().zip(&references).map(|(own, all)| all - own).collect();
        let usual = median_of(lacks[MEAN..before].iter().copied(), &mut scratch)?;
        let apart = median_of(lacks[MEAN..before].iter().map(|l| (l - usual).abs()), &mut scratch)?;
        let least = (FAR * 1.4826 * apart).max(EFFECT);
        let mut row = 0;
        for (at, lack) in lacks.iter().enumerate().skip(before) {
            row = if lack - usual > least { row + 1 } else { 0 };
            if row == ROW {
                began.push((at + 1 - ROW, machine));
                break;
            }
        }
    }
    let first = began.iter().map(|(at, _)| *at).min()?;
    let machines = began.iter().filter(|(at, _)| *at <= first + TOGETHER).map(|(_, machine)| *machine).collect();
    Some(Onset { machines, at: first })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_of_four_are_told_from_those_that_they_slow_down() {
        let look = |machine: usize, at: usize| {
            let wave = if at % 80 < 30 { 0.4 } else { 1.0 };
            let noise = ((at * 7919 + machine * 104_729) % 101) as f32 / 1000.0;
            let level = match (machine, at) {
                (1 | 2, 1500..) => 0.5,
                (_, 1530..) => 0.8,
                _ => 1.0,
            };
            (wave + noise) * level * 1e7
        };
        let values: Vec<Vec<f32>> = (0..4).map(|m| (0..3000).map(|at| look(m, at)).collect()).collect();
        let found = onset(&values).unwrap();
        assert_eq!(found.machines, [1, 2]);
        assert!((1490..1530).contains(&found.at), "{found:?}");
        let well: Vec<Vec<f32>> = (0..4).map(|m| (0..1500).map(|at| look(m, at)).collect()).collect();
        assert_eq!(onset(&well), None);
        assert_eq!(onset(&[]), None);
    }
}
