//! Converts counters to rates. A counter that decreases has either wrapped around or was reset: by
//! a restart, a driver, or a device that reappeared.

/// Range of a 32-bit counter. A counter whose last value is below it is taken to have 32 bits.
const NARROW: u64 = 1 << 32;
/// A counter has wrapped if it was above this share of its range and is now below the complementary
/// share. Otherwise it was reset.
const FULL: f64 = 0.9;

/// A counter of one machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counter {
    /// Time of the last reading in milliseconds, and its value.
    last: Option<(u64, u64)>,
}

impl Counter {
    /// Returns the rate per second since the last reading. `None` for the first reading, after a
    /// reset, and if no time has passed.
    pub fn read(&mut self, at_ms: u64, value: u64) -> Option<f32> {
        let before = self.last.replace((at_ms, value));
        let (then, was) = before.filter(|(then, _)| at_ms > *then)?;
        let more = match value.checked_sub(was) {
            Some(more) => more,
            None => {
                let range = if was < NARROW { NARROW as f64 } else { u64::MAX as f64 };
                let wrapped = was as f64 > FULL * range && (value as f64) < (1.0 - FULL) * range;
                if !wrapped {
                    return None;
                }
                let range = if was < NARROW { NARROW } else { 0 };
                value.wrapping_sub(was).wrapping_add(range)
            }
        };
        Some((more as f64 * 1000.0 / (at_ms - then) as f64) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_wraps_and_is_set_back() {
        let mut c = Counter::default();
        assert_eq!(c.read(0, 100), None);
        assert_eq!(c.read(1000, 350), Some(250.0));
        assert_eq!(c.read(1000, 350), None, "no time has passed");
        assert_eq!(c.read(2000, 0), None, "set back");
        assert_eq!(c.read(4000, 10), Some(5.0));
        let mut narrow = Counter::default();
        narrow.read(0, u64::from(u32::MAX) - 9);
        assert_eq!(narrow.read(1000, 90), Some(100.0));
        let mut wide = Counter::default();
        wide.read(0, u64::MAX - 9);
        assert_eq!(wide.read(1000, 90), Some(100.0));
    }

    proptest! {
        #[test]
        fn rates_are_finite_and_never_negative(reads in prop::collection::vec((0u64..1 << 40, any::<u64>()), 1..50)) {
            let mut c = Counter::default();
            for (at, value) in reads {
                if let Some(rate) = c.read(at, value) {
                    prop_assert!(rate.is_finite() && rate >= 0.0);
                }
            }
        }
    }
}
