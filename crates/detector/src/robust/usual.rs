//! What a role usually does: the middle of its machines, of one metric. What machines are off it is learned while the role does that.

use crate::center::{median_of, upper_quartile_of};

/// Offsets are looked at again each time that as many blocks have come as made them known, so many times.
pub const LOOKS: usize = 5;
/// Farther from its usual middle, in levels, a role does something else.
pub const AS_EVER: f32 = 0.15;
/// How fast the usual middle follows, in levels a block.
const SHIFTS: f32 = 0.002;

/// The usual middle of a role: of the first minutes at first, so that no checkpoint or beginning decides it, and a slow follower then.
#[derive(Clone, Debug, Default)]
pub struct Usual {
    first: Vec<f32>,
    /// In the metric's unit.
    pub now: f32,
    /// What it was when offsets of its machines were begun to be learned.
    then: f32,
}

impl Usual {
    /// One more block; `known`: blocks until a machine's own offset is known. Whether what was held to be usual was something else: an evaluation
    /// right at the beginning.
    pub fn follow(&mut self, middle: f32, level: f32, known: usize, scratch: &mut Vec<i32>) -> bool {
        if self.first.len() >= known * LOOKS {
            self.now += SHIFTS * level * (middle - self.now).signum();
            return false;
        }
        self.first.push(middle);
        // Whoever evaluates or waits does less than usual, perhaps for most of the time so far: the upper quartile is of what is usual.
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

    /// The blocks after which it was wrong, and what is usual in the end.
    fn followed(blocks: &[(usize, f32)]) -> (Vec<usize>, f32) {
        let (mut usual, mut scratch) = (Usual::default(), Vec::new());
        let all = blocks.iter().flat_map(|(many, middle)| std::iter::repeat_n(*middle, *many));
        let wrong = all.enumerate().filter(|(_, middle)| usual.follow(*middle, 1.0, 12, &mut scratch));
        (wrong.map(|(at, _)| at).collect(), usual.now)
    }

    #[test]
    fn an_evaluation_right_at_the_beginning_is_not_what_is_usual() {
        // Half a minute of training, two and a half of evaluation, and training again.
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
