//! The same machine, window after window (Minder, section 4.4): a jitter does not last.

use super::similarity::Candidate;

/// When a candidate is a verdict.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Continuity {
    /// It is this unlike the others,
    pub threshold: f32,
    /// for so many seconds without a break. 0: at once.
    pub seconds: usize,
}

impl Continuity {
    /// The first that lasts: its machine, when it was certain, and how unlike it was then. `candidates` have a window every `stride` seconds; the
    /// last second of the first is `first`.
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
