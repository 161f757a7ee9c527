//! What happened, reconstructed from recorded facts: an incident from its first sign until all that
//! it cost is made good.
//!
//! ```text
//!  last progress    declared    world formed    restore decided    first new step    caught up
//!       │ detect       │ regroup     │ start           │ load and a step  │ recompute      │
//!       ▼              ▼             ▼                 ▼                  ▼                ▼
//!  ─────●──────────────●─────────────●─────────────────●──────────────────●────────────────●────
//! ```

mod entry;
mod incident;
mod incidents;
mod lemons;
mod narrative;
mod notes;
mod record;
mod sums;

pub use entry::{Entry, LogLine};
pub use incident::{Began, Incident, Outcome, Restore};
pub use incidents::incidents;
pub use lemons::{Lemon, lemons};
pub use narrative::narrative;
pub use notes::notes;
pub use record::{Record, Span, lines, records};
pub use sums::{Sums, sums};
