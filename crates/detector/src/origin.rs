//! Who was first: looks at 100 Hz of one quantity (bytes on the network) of all machines of a job, around the moment in which several became unlike
//! the others. At one sample a second a slow machine has long slowed down all others; at a hundred, who was first still shows.
//!
//! All do the same at the same time, so each is compared with what a good quarter of all does at that moment: not with the middle, which two of four
//! would move.

use crate::center::median_of;

/// Looks of a mean: a fifth of a second.
const MEAN: usize = 20;
/// So many in a row make a beginning.
const ROW: usize = 20;
/// Spreads, and share of the level, that a machine must lack.
const FAR: f32 = 6.0;
const EFFECT: f32 = 0.12;
/// Looks within which several begin together.
const TOGETHER: usize = 30;

/// Where something began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// These machines,
    pub machines: Vec<usize>,
    /// with this look.
    pub at: usize,
}

/// Means of the last fifth of a second.
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

/// Who first did less than the others, by machine and look; nothing was wrong in the first third. `None`: nobody.
#[must_use]
pub fn origin(values: &[Vec<f32>]) -> Option<Origin> {
    let looks = values.iter().map(Vec::len).min()?;
    let before = looks / 3;
    if before < MEAN * 2 || values.len() < 3 {
        return None;
    }
    let mut scratch = Vec::new();
    // As shares of what each does usually.
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
    Some(Origin { machines, at: first })
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
        let found = origin(&values).unwrap();
        assert_eq!(found.machines, [1, 2]);
        assert!((1490..1530).contains(&found.at), "{found:?}");
        let well: Vec<Vec<f32>> = (0..4).map(|m| (0..1500).map(|at| look(m, at)).collect()).collect();
        assert_eq!(origin(&well), None);
        assert_eq!(origin(&[]), None);
    }
}
