//! The state of an incident, as reported to people.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of an incident, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The job is recovering.
    Firing,
    /// A person is needed.
    Person,
    /// The incident was handled.
    Resolved,
}
