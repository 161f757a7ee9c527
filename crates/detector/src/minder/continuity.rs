//! Continuity: the same machine must stand out window after window (Minder, section 4.4), because
//! jitter does not last.

use super::similarity::Candidate;

/// The condition under which a candidate becomes a verdict.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Continuity {
    /// Smallest `z` of a candidate (exclusive).
    pub threshold: f32,
    /// Seconds for which the same machine must exceed it without a break. 0: at once.
    pub seconds: usize,
}

impl Continuity {
    /// Returns the first candidate that lasts: its machine, the second in which it became certain,
    /// and its `z` then. `candidates` has one window every `stride` seconds; the first window ends
    /// at second `first`.
    #[must_use]
    pub fn first(&self, candidates: &[Option<Candidate>], first: usize, stride: usize) -> Option<(usize, usize, f32)> {
        let mut since: Option<(u32, usize)> = None;
        for (at, candidate) in candidates.iter().enumerate() {
            let second = first + at * stride;
            let Some(found) = candidate.filter(|c| c.z > self.threshold) else {
                since = None;
                continue;
            };
            let from = since.filter(|(machine, _)| *machine == found.machine).map_or(second, |(_, from)| from);
            since = Some((found.machine, from));
            if second - from >= self.seconds {
                return Some((found.machine as usize, second, found.z));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_must_be_the_same_machine_all_the_time() {
        let of = |machines: &[i32]| -> Vec<Option<Candidate>> {
            machines.iter().map(|m| (*m >= 0).then_some(Candidate { machine: *m as u32, z: 4.0 })).collect()
        };
        let four = Continuity { threshold: 3.0, seconds: 3 };
        assert_eq!(four.first(&of(&[1, 1, 1, 2, 2, 2, 2]), 7, 1), Some((2, 13, 4.0)));
        assert_eq!(four.first(&of(&[1, 1, 1, -1, 1, 1, 1]), 7, 1), None);
        assert_eq!(four.first(&of(&[1, 1, 1, 1]), 7, 1), Some((1, 10, 4.0)));
        assert_eq!(Continuity { threshold: 5.0, seconds: 0 }.first(&of(&[1]), 7, 1), None);
    }
}
