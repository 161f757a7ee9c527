//! Scenarios of the control plane: a coordinator, an agent, or both, event by event.
//!
//! They are one program, because each program takes seconds to build.
#![allow(clippy::unwrap_used)]

mod blame;
mod codes;
mod committed;
mod ending;
mod giving_up;
mod history;
mod incidents;
mod last_words;
mod launcher;
mod ledger;
mod live_plan;
mod lone_agent;
mod network;
mod node_check;
mod node_states;
mod outlier;
mod publishing;
mod refusal;
mod remediation;
mod restarted;
mod restoring;
mod scene;
mod severity;
mod stop_request;
mod stopping;
