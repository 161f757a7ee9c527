//! Settings of the robust detector.

use serde::{Deserialize, Serialize};

/// Thresholds and times. The defaults were calibrated on the development seeds
/// (docs/benchmarks/detector.md).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Deviation from the peers, in their usual spread, that counts if one family shows it for
    /// `one_family_s`.
    pub faint: f32,
    /// Deviation that counts if two families show it for `two_families_s`.
    pub clear: f32,
    /// Smallest deviation that counts, as a share of the level, however small the spread.
    pub effect: f32,
    /// Share of the level that a metric must have lost to count as dead.
    pub dead: f32,
    /// Seconds for which one family of metrics must deviate.
    pub one_family_s: usize,
    /// Seconds for which two families must deviate together. A family does not count if one of its
    /// metrics rises although only a drop is bad.
    pub two_families_s: usize,
    /// Relative increase of `two_families_s` for each doubling of the machines beyond `few`: the
    /// longest jitter among many machines is longer than among a few.
    pub per_doubling: f32,
    /// Number of machines up to which `two_families_s` applies unchanged.
    pub few: usize,
    /// Seconds for which a metric must be dead, or samples missing.
    pub dead_s: usize,
    /// Share of each of these spans in which a machine must show the deviation.
    pub share: f32,
    /// Share of a role or failure domain beyond which the fault is shared, and not the machines'
    /// own.
    pub group: f32,
    /// Share of these spans in which another machine must show the same deviation as one that is
    /// certain; twice that if a single metric made it certain.
    pub accomplice: f32,
    /// Seconds after which the first estimate of a machine's own offset is used.
    pub known_s: usize,
}

impl Settings {
    /// Returns the settings for a job of `machines` machines.
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
