//! When the user learns that something waits for storage, which may hang.

use std::time::Duration;
use tokio::time::{Instant, Interval, interval_at};

/// How long a wait is silent, and the interval between messages after that.
const SILENT: Duration = Duration::from_secs(3);
const REPEATED: Duration = Duration::from_secs(30);

/// Ticks whenever a wait that begins now should be mentioned.
pub fn reminder() -> Interval {
    interval_at(Instant::now() + SILENT, REPEATED)
}
