//! The baseline of a role: the usual median of its machines, for one metric. The machines' offsets
//! from it are learned while the role does what is usual.

use crate::quantiles::{median_of, upper_quartile_of};

/// How often an offset is estimated before it follows slowly: each time another `known` blocks have
/// come.
pub const LOOKS: usize = 5;
/// Distance from the usual median, in levels, beyond which a role is doing something else.
pub const AS_EVER: f32 = 0.15;
/// How fast the usual median follows, in levels per block.
const SHIFTS: f32 = 0.002;

/// The usual median of a role. It is estimated from the first minutes, so that neither a checkpoint
/// nor the start of the job determines it; then it follows slowly.
#[derive(Clone, Debug, Default)]
pub struct Baseline {
    first: Vec<f32>,
    /// The usual median, in the metric's unit.
    pub now: f32,
    /// Its value when the current offsets of the machines began to be learned.
    then: f32,
}

impl Baseline {
    /// Adds a block; `known` is the number of blocks until a machine's own offset is known. Returns
    /// whether the baseline so far was something else, such as an evaluation right at the start.
    pub fn follow(&mut self, middle: f32, level: f32, known: usize, scratch: &mut Vec<i32>) -> bool {
        if self.first.len() >= known * LOOKS {
            self.now += SHIFTS * level * (middle - self.now).signum();
            return false;
        }
        self.first.push(middle);
        // Machines that evaluate or wait do less than usual, perhaps for most of the time so far;
        // so the upper quartile is taken as usual.
        let of = self.first.iter().copied();
        let most = upper_quartile_of(of.clone(), scratch).unwrap_or(middle);
        let usual = of.filter(|v| (v - most).abs() < AS_EVER * level);
        self.now = median_of(usual, scratch).unwrap_or(most);
        let was_wrong = (self.now - self.then).abs() > AS_EVER * level;
        if was_wrong {
            self.then = self.now;
        }
        was_wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the blocks at which the baseline was found wrong, and the baseline at the end.
    fn followed(blocks: &[(usize, f32)]) -> (Vec<usize>, f32) {
        let (mut baseline, mut scratch) = (Baseline::default(), Vec::new());
        let all = blocks.iter().flat_map(|(many, middle)| std::iter::repeat_n(*middle, *many));
        let wrong = all.enumerate().filter(|(_, middle)| baseline.follow(*middle, 1.0, 12, &mut scratch));
        (wrong.map(|(at, _)| at).collect(), baseline.now)
    }

    #[test]
    fn an_evaluation_right_at_the_beginning_is_not_what_is_usual() {
        // Half a minute of training, two and a half minutes of evaluation, and training again.
        let (wrong, now) = followed(&[(6, 0.9), (30, 0.3), (60, 0.9)]);
        assert_eq!(now, 0.9);
        let [0, eval, back] = wrong[..] else { panic!("{wrong:?}") };
        assert!((6..36).contains(&eval) && (37..48).contains(&back), "{wrong:?}");
    }

    #[test]
    fn a_checkpoint_is_not_what_is_usual_and_what_stays_becomes_it() {
        assert_eq!(followed(&[(20, 0.9), (4, 0.1), (20, 0.9), (4, 0.1), (40, 0.9)]), (vec![0], 0.9));
        let (wrong, now) = followed(&[(60, 0.9), (400, 0.5)]);
        assert!(wrong == [0] && (now - 0.5).abs() < 0.01, "{wrong:?} {now}");
    }
}
