//! What the robust detector goes by.

use serde::{Deserialize, Serialize};

/// Thresholds and times. The defaults are what was calibrated on the development seeds (docs/benchmarks/detector.md).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Deviation from the peers, in their usual spread, that counts for the long way,
    pub faint: f32,
    /// and for the short one.
    pub clear: f32,
    /// Share of the level that a metric must be off, however small the spread.
    pub effect: f32,
    /// Share of the level at which a metric is as good as dead.
    pub dead: f32,
    /// Seconds that one family of metrics must tell.
    pub one_family_s: usize,
    /// Seconds that two families must tell together, neither of which does more of anything.
    pub two_families_s: usize,
    /// By what share that is longer for each doubling of the machines beyond `few`: the longest jitter of many is longer than that of a few.
    pub per_doubling: f32,
    /// Up to so many machines the times are as they are written.
    pub few: usize,
    /// Seconds that a metric is dead, or that samples do not come.
    pub dead_s: usize,
    /// Share of those seconds in which it must.
    pub share: f32,
    /// Share of a role, or of what fails together, that is no machine's own fault any more.
    pub group: f32,
    /// Share of those seconds in which another machine must tell the same once one is certain; twice that if it is of one metric only.
    pub accomplice: f32,
    /// Seconds after which a machine's own offset is known, for now.
    pub known_s: usize,
}

impl Settings {
    /// For a job of so many machines.
    #[must_use]
    pub fn of(self, machines: usize) -> Settings {
        let doublings = (machines as f32 / self.few as f32).log2().max(0.0);
        let longer = self.two_families_s as f32 * (1.0 + self.per_doubling * doublings);
        let most = self.one_family_s.max(self.two_families_s);
        Settings { two_families_s: (longer as usize).min(most), ..self }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            faint: 1.5,
            clear: 3.0,
            effect: 0.04,
            dead: 0.7,
            one_family_s: 235,
            two_families_s: 95,
            per_doubling: 0.15,
            few: 1024,
            dead_s: 60,
            share: 0.85,
            group: 0.25,
            accomplice: 0.25,
            known_s: 60,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_machines_are_looked_at_for_longer_and_few_are_not() {
        let settings = Settings { two_families_s: 100, per_doubling: 0.15, few: 512, ..Settings::default() };
        let span = |machines| settings.of(machines).two_families_s;
        assert_eq!([4, 512].map(span), [100, 100]);
        assert_eq!([1024, 2048].map(span), [115, 130]);
        assert!((1..4096).all(|n| span(n) <= span(n + 1)));
        assert_eq!(span(1 << 30), settings.one_family_s);
        assert_eq!(Settings { two_families_s: 100, ..settings.of(4096) }, settings);
    }
}
