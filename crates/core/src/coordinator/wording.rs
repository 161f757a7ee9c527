//! Decisions and waits as people read them: one sentence each, the same on consoles, in `status`
//! and in `explain`.

use super::command::Reason;
use crate::id::{NodeId, Rank, Step};
use crate::message::{Cause, Failure, HangEvidence, Outcome};
use crate::severity::Verdict;

/// How a process ended that neither reached Python's normal exit nor chose to leave.
const ABNORMALLY: &str = "without a normal exit (killed, interrupted, crashed, or with an exit code other than 0)";

fn nodes(ids: &[NodeId]) -> String {
    const SHOWN: usize = 5;
    let names: Vec<&str> = ids.iter().take(SHOWN).map(|id| id.0.as_str()).collect();
    let rest = ids.len().saturating_sub(SHOWN);
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    format!("{} {}{more}", if ids.len() == 1 { "node" } else { "nodes" }, names.join(", "))
}

/// Returns a count with its noun: `1 rank`, `2 ranks`.
#[must_use]
pub fn counted(number: impl Into<u64>, what: &str) -> String {
    let number = number.into();
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

impl Reason {
    /// Returns the reason as a sentence.
    #[must_use]
    pub fn sentence(&self) -> String {
        match self {
            Reason::WaitingForNodes { have, need } => format!("waiting for nodes: {have} of {need} joined"),
            Reason::LastCall { have, want } => {
                format!("{have} of at most {want} nodes joined; waiting briefly for more")
            }
            Reason::Fencing { waiting } => format!("waiting for {} to stop their old workers", nodes(waiting)),
            Reason::OldWorldUnreachable => {
                "no node of the old world can confirm that its workers have ended; waiting for their timeout to expire"
                    .into()
            }
            Reason::Reattaching { waiting } => {
                format!("the coordinator restarted; waiting for {} to come back", nodes(waiting))
            }
            Reason::StoreBusy => "waiting for the coordinator's store".into(),
            Reason::Checking { round } => format!("checking the nodes, round {round}"),
            Reason::BackingOff { .. } => {
                "the workers failed before their first step; waiting before the next restart".into()
            }
            Reason::Training => "training".into(),
            Reason::Stopping => "stopping, as requested".into(),
            Reason::Over { code, why } => format!("ended with exit code {code}: {why}"),
        }
    }
}

impl HangEvidence {
    /// Returns what shows that a silent process hangs, as a clause.
    #[must_use]
    pub fn sentence(&self) -> &'static str {
        match self {
            HangEvidence::Stopped => "the process is stopped (SIGSTOP)",
            HangEvidence::InterpreterHeld => "a native call holds the interpreter lock (GIL)",
            HangEvidence::Spinning => "it has been executing the same line of Python",
            HangEvidence::NoCpu => "it uses no CPU time",
            HangEvidence::SectionTimeout => "a section outlasted the timeout that the script gave",
            HangEvidence::MachineSign => "its machine reported a failure",
        }
    }
}

/// Describes a failure by the class that it turned out to have.
#[must_use]
pub fn describe_as(node: &NodeId, failure: Option<&Failure>, verdict: &Verdict) -> String {
    match failure {
        Some(failure) => describe(node, Some(&Failure { verdict: verdict.clone(), ..failure.clone() })),
        None if verdict.line.is_empty() => describe(node, None),
        None => format!("node {node}: {} ({}): {}", verdict.what, verdict.class, verdict.line),
    }
}

/// Describes a failure in one line: what failed, and how.
#[must_use]
pub fn describe(node: &NodeId, failure: Option<&Failure>) -> String {
    let Some(f) = failure else { return format!("node {node} was lost") };
    if f.cause == Cause::Fenced {
        return format!(
            "node {node} ended its workers because of a failure that was reported to an earlier coordinator"
        );
    }
    // One that could not be started has none.
    let pid = if f.pid == 0 { String::new() } else { format!(", pid {}", f.pid) };
    let who = format!("rank {} (local rank {}{pid}) on node {node}", f.rank, f.local_rank);
    let how = match &f.cause {
        Cause::Exited(Outcome::Code(code)) => format!("exited with code {code}"),
        Cause::Exited(Outcome::Signal(9)) => {
            "was killed by SIGKILL (by the out-of-memory killer or by a person)".into()
        }
        Cause::Exited(Outcome::Signal(11)) => "died of a segmentation fault (SIGSEGV)".into(),
        Cause::Exited(Outcome::Signal(6)) => "aborted (SIGABRT)".into(),
        Cause::Exited(Outcome::Signal(s)) => format!("was ended by signal {s}"),
        Cause::Hung { evidence, silence_ms } => {
            format!("is hung: no step for {:.1} s, and {}", *silence_ms as f64 / 1000.0, evidence.sentence())
        }
        Cause::TrainerVanished { pid } => {
            let at = f.step.map_or_else(|| "before its first step".into(), |step| format!("at step {step}"));
            let of = f.total.map_or_else(String::new, |total| format!(" of {total}"));
            format!(
                "exited with code 0, but process {pid}, which trained in its place, had ended {at}{of} {ABNORMALLY}"
            )
        }
        Cause::NotStarted | Cause::Fenced => "could not be started".into(),
    };
    let said = if f.message.is_empty() { String::new() } else { format!(": {}", f.message) };
    let Verdict { class, what, .. } = &f.verdict;
    let held = if what.is_empty() || class == "unknown" { String::new() } else { format!(" ({class}: {what})") };
    format!("{who} {how}{said}{held}")
}

/// Describes an end that nothing confirms: a launcher script exited with 0, but the process `pid`
/// that trained in its place had vanished.
#[must_use]
pub fn unconfirmed(node: &NodeId, rank: Rank, pid: u32, step: Option<Step>) -> String {
    let at = step.map_or_else(String::new, |step| format!(" up to step {step}"));
    format!(
        "process {pid}, which trained{at} as rank {rank} on node {node}, ended {ABNORMALLY}, and the launched program exited with \
         code 0; it is not known whether the training finished; make the launched program return the training's exit code"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_nodes_are_cut() {
        let waiting: Vec<NodeId> = (0..8).map(|n| NodeId(n.to_string())).collect();
        assert_eq!(
            Reason::Fencing { waiting }.sentence(),
            "waiting for nodes 0, 1, 2, 3, 4 and 3 more to stop their old workers"
        );
    }
}
