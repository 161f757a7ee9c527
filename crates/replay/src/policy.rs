//! Policies: what is done about failures and how long it takes, read from a small TOML file.

use super::failures::{Kind, micros};
use everstep_planner::Mode;
use serde::Deserialize;

/// What to do about a failed node if no spare is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLoss {
    /// The job waits until the node is repaired.
    Wait,
    /// The job continues with fewer nodes, down to its minimum. Other jobs are left alone.
    Shrink,
    /// The core's planner plans the nodes of all jobs anew.
    Plan(Mode),
}

/// A duration in seconds, by what has failed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct By {
    node: f64,
    process: f64,
    transient: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    source: String,
    #[serde(default = "all")]
    efficiency: f64,
    on_loss: String,
    #[serde(default)]
    spares: u32,
    #[serde(default)]
    mode: Option<String>,
    detect_s: By,
    restart_s: By,
    regroup_s: f64,
    #[serde(default)]
    interval_s: f64,
    #[serde(default)]
    write_s: f64,
    #[serde(default)]
    copies: u32,
    #[serde(default)]
    copy_interval_s: f64,
    #[serde(default)]
    coordinator: bool,
}

fn all() -> f64 {
    1.0
}

/// One policy. Durations are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub name: String,
    /// Where its numbers come from.
    pub source: String,
    /// The achieved share of the planner's speeds, in millionths.
    pub efficiency: u32,
    /// What to do about a failed node.
    pub on_loss: OnLoss,
    /// The number of nodes that are kept idle at first.
    pub spares: u32,
    /// From a failure to its detection: node, process, transient.
    pub detect: [u64; 3],
    /// From detection until the job runs: node, process, transient.
    pub restart: [u64; 3],
    /// The time to continue with more or fewer nodes without a failure of the job's own.
    pub regroup: u64,
    /// Work between checkpoints that survive any failure; 0 means that nothing is ever lost.
    pub interval: u64,
    /// How long a checkpoint stops the job.
    pub write: u64,
    /// The number of nodes that hold each node's state in memory, including itself; 0 for no
    /// copies.
    pub copies: u32,
    /// Work between copies.
    pub copy_interval: u64,
    /// Whether everstep's coordinator decides if a job trains on with the nodes it has. Otherwise,
    /// its minimum alone decides.
    pub coordinator: bool,
}

/// The built-in policies.
const KNOWN: [(&str, &str); 8] = [
    ("everstep", include_str!("policies/everstep.toml")),
    ("unicron", include_str!("policies/unicron.toml")),
    ("wait", include_str!("policies/wait.toml")),
    ("elastic", include_str!("policies/elastic.toml")),
    ("gemini", include_str!("policies/gemini.toml")),
    ("oobleck", include_str!("policies/oobleck.toml")),
    ("varuna", include_str!("policies/varuna.toml")),
    ("bamboo", include_str!("policies/bamboo.toml")),
];

/// Returns the names of the built-in policies, for users.
fn names() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

/// An unknown or invalid policy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    #[error("there is no policy {name}: there are {}, spares:N, and files that end in .toml", names())]
    Unknown { name: String },
    #[error("policy {name}: give a number of spares, as in spares:2")]
    Spares { name: String },
    /// The file is not TOML, or has an unknown or missing field.
    #[error("the policy file: {}", .0.message())]
    Parse(#[source] Box<toml::de::Error>),
    #[error("policy {policy}: {source}")]
    Invalid { policy: String, source: InvalidPolicy },
}

/// An invalid value in a policy's file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidPolicy {
    #[error("mode = {0} is invalid; give floor, paper or fair")]
    Mode(String),
    #[error("on_loss = {0} is invalid; give wait, shrink or plan")]
    OnLoss(String),
    #[error("efficiency = {0} is not between 0 and 1")]
    Efficiency(f64),
    #[error("{what} = {seconds} is not a time from 0 to a billion seconds")]
    Time { what: String, seconds: f64 },
    #[error("write_s needs interval_s")]
    WriteWithoutInterval,
    #[error("copies (2 or more) and copy_interval_s go together")]
    Copies,
}

fn checked(what: &str, seconds: f64) -> Result<u64, InvalidPolicy> {
    if (0.0..=1e9).contains(&seconds) {
        Ok(micros(seconds))
    } else {
        Err(InvalidPolicy::Time { what: what.to_owned(), seconds })
    }
}

fn times(what: &str, by: By) -> Result<[u64; 3], InvalidPolicy> {
    Ok([
        checked(&format!("{what}.node"), by.node)?,
        checked(&format!("{what}.process"), by.process)?,
        checked(&format!("{what}.transient"), by.transient)?,
    ])
}

impl Policy {
    /// Returns a built-in policy. `NAME:N` sets its number of spares, and `spares:N` is short for
    /// `wait:N`.
    ///
    /// # Errors
    /// If there is no such policy. The message lists the names.
    pub fn named(name: &str) -> Result<Policy, PolicyError> {
        if let Some((of, count)) = name.split_once(':') {
            let of = if of == "spares" { "wait" } else { of };
            let count = count.parse().ok().filter(|n| *n <= 100_000);
            let spares = count.ok_or_else(|| PolicyError::Spares { name: name.to_owned() })?;
            return Ok(Policy { name: name.to_owned(), spares, ..Policy::named(of)? });
        }
        match KNOWN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Policy::read(text),
            None => Err(PolicyError::Unknown { name: name.to_owned() }),
        }
    }

    /// Reads a policy from the text of its file.
    ///
    /// # Errors
    /// If the text is not a valid policy.
    pub fn read(text: &str) -> Result<Policy, PolicyError> {
        let of: Written = toml::from_str(text).map_err(|e| PolicyError::Parse(Box::new(e)))?;
        let within = |source: InvalidPolicy| PolicyError::Invalid { policy: of.name.clone(), source };
        let mode = match of.mode.as_deref() {
            None | Some("floor") => Mode::Floor,
            Some("paper") => Mode::Paper,
            Some("fair") => Mode::Fair,
            Some(other) => return Err(within(InvalidPolicy::Mode(other.to_owned()))),
        };
        let on_loss = match of.on_loss.as_str() {
            "wait" => OnLoss::Wait,
            "shrink" => OnLoss::Shrink,
            "plan" => OnLoss::Plan(mode),
            other => return Err(within(InvalidPolicy::OnLoss(other.to_owned()))),
        };
        if !(of.efficiency > 0.0 && of.efficiency <= 1.0) {
            return Err(within(InvalidPolicy::Efficiency(of.efficiency)));
        }
        let policy = Policy {
            name: of.name.clone(),
            source: of.source.clone(),
            efficiency: (of.efficiency * 1e6).round() as u32,
            on_loss,
            spares: of.spares,
            detect: times("detect_s", of.detect_s).map_err(within)?,
            restart: times("restart_s", of.restart_s).map_err(within)?,
            regroup: checked("regroup_s", of.regroup_s).map_err(within)?,
            interval: checked("interval_s", of.interval_s).map_err(within)?,
            write: checked("write_s", of.write_s).map_err(within)?,
            copies: of.copies,
            copy_interval: checked("copy_interval_s", of.copy_interval_s).map_err(within)?,
            coordinator: of.coordinator,
        };
        if policy.write > 0 && policy.interval == 0 {
            return Err(within(InvalidPolicy::WriteWithoutInterval));
        }
        if (policy.copies > 0) != (policy.copy_interval > 0) || policy.copies == 1 {
            return Err(within(InvalidPolicy::Copies));
        }
        Ok(policy)
    }

    pub(super) fn detects(&self, kind: Kind) -> u64 {
        self.detect[kind as usize]
    }

    pub(super) fn restarts(&self, kind: Kind) -> u64 {
        self.restart[kind as usize]
    }
}
