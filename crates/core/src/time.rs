//! Time as an argument: milliseconds since the driver started, or since the simulation began.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A point in time, in milliseconds on the caller's monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// Returns this time plus `d`, saturating at the maximum.
    #[must_use]
    pub fn after(self, d: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(d.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Returns this time in microseconds.
    #[must_use]
    pub fn micros(self) -> u64 {
        self.0.saturating_mul(1000)
    }

    /// Returns the time since `earlier`, or zero if `earlier` lies in the future (the clock jumped
    /// back).
    #[must_use]
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
