//! The budget for sampling. Its cost on this machine determines its frequency, so that it takes no
//! more than a fixed share of one core on any machine.

use std::time::Duration;

/// Share of one core for all sampling.
pub const ALL: f64 = 0.0045;
/// Time between looks for the ring, if the machine is fast enough.
const LOOK: Duration = Duration::from_millis(10);
/// Longest time between looks, however slow the machine is.
const SLOWEST: Duration = Duration::from_millis(100);

/// How often the network is sampled for the ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// CPU seconds of one look and of a second's other samples: moving averages, so that rare work
    /// counts in part.
    look: Option<f64>,
    other: f64,
}

impl Pace {
    /// Learns from a second in which `looks` looks and everything else took this much CPU time.
    pub fn learn(&mut self, looks: u32, of_looks: Duration, other: Duration) {
        if looks == 0 {
            return;
        }
        let look = of_looks.as_secs_f64() / f64::from(looks);
        self.other = self.look.map_or(other.as_secs_f64(), |_| self.other + 0.1 * (other.as_secs_f64() - self.other));
        self.look = Some(self.look.map_or(look, |was| was + 0.1 * (look - was)));
    }

    /// Returns the time from one look to the next.
    #[must_use]
    pub fn between(&self) -> Duration {
        let Some(look) = self.look else { return LOOK };
        let left = ALL - self.other;
        let between = if left > 0.0 { look / left } else { f64::MAX };
        Duration::try_from_secs_f64(between).map_or(SLOWEST, |d| d.clamp(LOOK, SLOWEST))
    }
}

/// Returns the CPU time of this thread so far.
#[must_use]
pub fn spent() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(look_us: u64, other_us: u64) -> Duration {
        let mut pace = Pace::default();
        for _ in 0..100 {
            let looks = (1.0 / pace.between().as_secs_f64()) as u32;
            pace.learn(looks, Duration::from_micros(look_us) * looks, Duration::from_micros(other_us));
        }
        pace.between()
    }

    #[test]
    fn what_is_cheap_is_looked_at_a_hundred_times_a_second_and_what_is_dear_is_not() {
        assert_eq!(Pace::default().between(), LOOK);
        assert_eq!(after(20, 500), LOOK);
        let dear = after(100, 500).as_secs_f64();
        assert!((dear - 100e-6 / 4e-3).abs() < 1e-3, "{dear}");
        assert_eq!(after(20, 9_000), SLOWEST);
        assert_eq!(after(100_000, 0), SLOWEST);
        assert_eq!(after(0, 0), LOOK);
        assert!(spent() > Duration::ZERO);
    }
}
