//! An incident in a dozen lines: what happened, why, what was lost, what was done, whether it
//! worked, and what to do next.

use super::incident::{Began, Incident, Outcome, Restore};
use crate::coordinator::command::Action;
use crate::message::{Cause, HangEvidence, Tier};
use crate::severity::Verdict;
use crate::stacks::group;

/// Maximum number of groups of stacks to print; further groups add little.
const STACKS: usize = 3;

/// The reason why the number of lost steps is unknown.
const UNREADABLE: &str = "the script reports no step number, and neither its optimizer nor a scheduler carries one";

/// Formats an incident as lines of text. The first line contains the job's name and `when` it was
/// declared (the time of day, formatted for people).
#[must_use]
pub fn narrative(of: &Incident, job: &str, when: &str) -> Vec<String> {
    let next = of.regrouped.map_or(String::new(), |_| match of.began {
        Some(Began { generation, .. }) => format!(" → {generation}"),
        None => ", then a new one".into(),
    });
    let mut lines =
        vec![format!("inc-{}  {when}  {}  job {job}, generation {}{next}", of.number, head(of), of.generation)];
    lines.push(format!("What     {}", of.what()));
    lines.extend(followed(of).map(|line| format!("         {line}")));
    let (why, evidence) = why(of);
    lines.push(format!("Why      {why}"));
    lines.extend(evidence.map(|line| format!("         {line}")));
    let groups = group(&of.stacks);
    lines.extend(
        groups
            .iter()
            .take(STACKS)
            .enumerate()
            .map(|(i, g)| format!("{}{}", if i == 0 { "Stacks   " } else { "         " }, g.describe())),
    );
    lines.push(format!("Lost     {}", lost(of)));
    lines.push(format!("Done     {}", done(of)));
    lines.push(format!("Worked?  {}", worked(of)));
    lines.push(format!("Next     {}", advice(of)));
    let picture = of.finding.as_ref().map(|f| f.picture.as_str()).filter(|p| !p.is_empty());
    lines.extend(picture.map(|path| format!("Picture  {path}")));
    lines
}

/// Formats microseconds for people.
fn span(micros: u64) -> String {
    let seconds = micros as f64 / 1e6;
    if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1e3)
    } else if seconds < 120.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{:.1} min", seconds / 60.0)
    }
}

fn head(of: &Incident) -> String {
    match (&of.outcome, of.lasted()) {
        (Outcome::Recovered, Some(lasted)) => format!("RECOVERED in {}", span(lasted)),
        (Outcome::Recovered, None) => "RECOVERED".into(),
        (Outcome::Repeating, _) if of.cut_off => "NOT RECOVERED when the job ended".into(),
        (Outcome::Repeating, _) => "REPEATING STEPS".into(),
        (Outcome::GoesOn, Some(lasted)) => format!("RUNNING AGAIN after {}", span(lasted)),
        (Outcome::GoesOn, None) => "RUNNING AGAIN".into(),
        (Outcome::Open, _) => "OPEN".into(),
        (Outcome::Superseded { by }, _) => format!("SUPERSEDED by inc-{by}"),
        (Outcome::Ended { code, .. }, _) => format!("ENDED THE JOB with exit code {code}"),
    }
}

fn why(of: &Incident) -> (String, Option<String>) {
    let Some(verdict) = of.verdict().filter(|_| of.class() != "node-lost") else {
        return (format!("node-lost (machine): the agent of node {} no longer responds", of.at_fault()), None);
    };
    let Verdict { class, what, scope, line, follows, .. } = verdict;
    let echo = if *follows { "; usually a consequence of a failure elsewhere" } else { "" };
    let why = format!("{class} ({}): {what}{echo}", scope.label());
    (why, Some(line.clone()).filter(|l| !l.is_empty() && !of.what().contains(l.as_str())))
}

/// Describes the failures that followed from this one.
fn followed(of: &Incident) -> Option<String> {
    let others = &of.blamed.as_ref().filter(|b| !b.others.is_empty())?.others;
    let each: Vec<String> = others.iter().map(|(class, n)| format!("{n} × {class}")).collect();
    Some(format!("then {}", each.join(", ")))
}

fn steps(n: u64) -> String {
    if n == 1 { "1 step".into() } else { format!("{n} steps") }
}

/// Describes the steps by which the job fell back, as far as they are known.
fn steps_lost(of: &Incident) -> String {
    if of.action == Action::Tell {
        return "no step: training continues".into();
    }
    let again = of.began.and_then(|b| b.again());
    match (&of.restored, of.began) {
        (Some(Restore { steps_lost, nodes, .. }), _) if again.is_some() || *nodes == 0 => {
            let earlier = again.unwrap_or(0).saturating_sub(*steps_lost);
            match (*steps_lost, earlier) {
                (0, 0) => "no step".into(),
                (0, n) => format!("no step; {} from earlier failures recomputed", steps(n)),
                (n, 0) => format!("{}, recomputed", steps(n)),
                (n, more) => format!("{}, recomputed, plus {more} from earlier failures", steps(n)),
            }
        }
        (_, None) if of.outcome == Outcome::Open => "not known yet".into(),
        (_, None) if matches!(of.outcome, Outcome::Ended { .. }) => "no step is repeated: the job ended".into(),
        (_, None) => "unknown: the job completed no step after that".into(),
        (_, Some(Began { from: None, .. })) => format!("unknown: {UNREADABLE}"),
        (_, Some(Began { from: Some(from), had: None, .. })) => {
            format!("unknown: the step that the job had reached was not recorded; it continued at step {}", from + 1)
        }
        (_, Some(Began { from: Some(from), .. })) => {
            let begun = if from == 0 { "began again at step" } else { "continued at step" };
            let repeated = match (again.unwrap_or(0), of.caught_up.is_some(), of.outcome == Outcome::Repeating) {
                (0, ..) => "no step is repeated".into(),
                (1, true, _) => "1 step was repeated".into(),
                (n, true, _) => format!("{n} steps were repeated"),
                (n, false, true) if !of.cut_off => {
                    format!("{} being repeated", if n == 1 { "1 step is".into() } else { format!("{n} steps are") })
                }
                (n, ..) => format!("{} to be repeated", steps(n)),
            };
            format!("the script {begun} {}; {repeated}", from + 1)
        }
    }
}

fn lost(of: &Incident) -> String {
    let steps = steps_lost(of);
    let Some(seconds) = of.rank_seconds() else { return steps };
    let name = |stage: &'static str| if stage == "restore" { "load and first step" } else { stage };
    // The silence is printed even if it was zero.
    let lasted = of.stages().into_iter().filter(|(stage, micros)| *micros > 0 || *stage == "detect");
    let stages: Vec<String> = lasted.map(|(stage, micros)| format!("{} {}", name(stage), span(micros))).collect();
    format!("{steps}; {seconds:.1} rank-seconds ({})", stages.join(", "))
}

/// Returns whether the failed generation's processes have not been replaced yet.
fn awaits_restart(of: &Incident) -> bool {
    of.regrouped.is_none() && of.outcome == Outcome::Open
}

fn done(of: &Incident) -> String {
    let action = match of.action {
        // The job was stopped, or ended, before they were started again.
        Action::Restart | Action::Reconfigure
            if of.regrouped.is_none() && matches!(of.outcome, Outcome::Ended { .. } | Outcome::Superseded { .. }) =>
        {
            "stopped the processes and did not restart them"
        }
        Action::Restart if awaits_restart(of) => "is restarting the processes",
        Action::Reconfigure if awaits_restart(of) => "is waiting for enough nodes to re-form the world",
        Action::Restart => "restarted the processes",
        Action::Reconfigure => "re-formed the world",
        Action::Fail => "ended the job",
        Action::Tell => "reported it without restarting",
    };
    let world = match of.world {
        (before, Some(after)) if before != after => format!(", {before} ranks → {after}"),
        (_, Some(after)) => format!(", {after} ranks"),
        _ => String::new(),
    };
    let restored = match &of.restored {
        None => String::new(),
        Some(Restore { step: None, .. }) => "; nothing to restore, started from scratch".into(),
        Some(Restore { step: Some(step), tiers, nodes, .. }) => {
            format!("; step {step} restored from {}", places(tiers, *nodes))
        }
    };
    let left_out = of.excluded.as_ref().map_or(String::new(), |node| format!("; node {node} excluded"));
    let checked = of.checked.as_ref().map_or(String::new(), |found| format!("; nodes checked: {found}"));
    let asked: String = of.requests.iter().map(|r| format!("; {} ({})", r.remedy, r.stage.name())).collect();
    let planned = of.planned.as_ref().map_or(String::new(), |(ready, units)| {
        let each: Vec<String> = units.iter().map(|(job, nodes)| format!("{job} {nodes}")).collect();
        format!("; plan{}: {} nodes", if *ready { " (prepared in advance)" } else { "" }, each.join(", "))
    });
    format!("{action}{world}{restored}{checked}{left_out}{planned}{asked}")
}

fn places(tiers: &[Tier], nodes: u32) -> String {
    let kinds = [
        (Tier::Memory, "local memory"),
        (Tier::Peer, if nodes == 1 { "another rank's memory" } else { "other nodes' memory" }),
        (Tier::Parity, "parity"),
        (Tier::Durable, "durable storage"),
    ];
    let count = |tier| tiers.iter().filter(|t| **t == tier).count();
    let all: Vec<String> = kinds
        .into_iter()
        .map(|(tier, name)| (count(tier), name))
        .filter(|(n, _)| *n > 0)
        .map(|(n, name)| format!("{name} ({n} {})", if n == 1 { "rank" } else { "ranks" }))
        .collect();
    if all.is_empty() { "memory".into() } else { all.join(" and ") }
}

fn worked(of: &Incident) -> String {
    match (&of.outcome, of.stepped) {
        (Outcome::Recovered | Outcome::Repeating | Outcome::GoesOn, Some((at, _))) => {
            let steps = span(at.saturating_sub(of.opened) + of.silence().unwrap_or(0));
            let again = match (of.caught_up, of.lasted(), of.began.and_then(|b| b.had)) {
                (Some(_), Some(lasted), _) => format!("yes: caught up after {}", span(lasted)),
                _ if of.outcome == Outcome::GoesOn => {
                    format!("first step after {steps}; whether it has caught up is unknown")
                }
                (.., had) => {
                    let there = had.map_or_else(|| "where it was".into(), |had| format!("at step {had}"));
                    let not = if of.cut_off { "the job ended before it was back" } else { "not yet back" };
                    format!("first step after {steps}; {not} {there}")
                }
            };
            let pace = match of.step_us {
                (Some(before), Some(after)) => format!("; a step takes {} (was {})", span(after), span(before)),
                _ => String::new(),
            };
            format!("{again}{pace}")
        }
        (Outcome::Ended { code, why }, _) => format!("no: the job ended with exit code {code}: {why}"),
        (Outcome::Superseded { by }, _) => match of.stepped {
            Some(_) => format!("no: inc-{by} began before the job had caught up"),
            None => format!("no: inc-{by} began before the first new step"),
        },
        _ => match &of.noted {
            Some((right, note)) => {
                let said = if note.is_empty() { String::new() } else { format!(": {note}") };
                format!("{} by a user{said}", if *right { "confirmed" } else { "marked as a false alarm" })
            }
            None => "not known yet".into(),
        },
    }
}

fn advice(of: &Incident) -> String {
    let failure = of.blamed.as_ref().map_or(of.failure.as_ref(), |b| b.failure.as_ref());
    if let Some(stopped) = failure.filter(|f| matches!(f.cause, Cause::Hung { evidence: HangEvidence::Stopped, .. })) {
        let continues = if awaits_restart(of) {
            let (pid, node) = (stopped.pid, of.at_fault());
            format!("; until everstep ends such a process, kill -CONT {pid} on node {node} lets it continue")
        } else {
            String::new()
        };
        let who = "find out who or what stopped the process (kill -STOP, Ctrl-Z, a debugger, the scheduler)";
        return format!("{who}{continues}");
    }
    match of.verdict() {
        Some(verdict) if !verdict.advice.is_empty() => verdict.advice.clone(),
        Some(_) => "read the process's output: everstep logs --first-cause".into(),
        None => {
            "check whether the machine is up and what ended its everstep run process; the machine's event log (BMC) \
                 shows why it went down"
                .into()
        }
    }
}
