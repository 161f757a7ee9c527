//! Writes a simulated history as records of incidents, and derives a policy from such records.

use super::failures::{Failure, Failures, Kind, SECOND, micros, seconds};
use super::policy::{OnLoss, Policy};
use super::read::{TraceError, from_lines};
use super::time_ledger::{Cause, TimeLedger};
use everstep_core::history::{self, Record, Span};

/// Collects records during a simulation.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// Records, each with its job until that job runs again.
    records: Vec<(Option<usize>, Record)>,
}

impl Recorder {
    /// Records a failure. Its job had `nodes` nodes and has to repeat `lost` microseconds of work.
    pub(super) fn failed(&mut self, job: Option<usize>, of: &Failure, nodes: usize, lost: u64, policy: &Policy) {
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let record = Record {
            t_s: seconds(of.at),
            node: of.node.to_string(),
            kind: of.kind.name().into(),
            cause: String::new(),
            repair_s: (of.kind == Kind::Node).then(|| seconds(of.repair)),
            detect_s: seconds(policy.detects(of.kind)),
            restart_s: None,
            lost_s: seconds(lost),
            world: (nodes, 0),
        };
        self.records.push((job, record));
    }

    /// Completes the records of a job that runs again.
    pub(super) fn runs(&mut self, job: usize, now: u64, nodes: usize) {
        for (of, record) in self.records.iter_mut().rev().filter(|(of, _)| *of == Some(job)) {
            record.restart_s = Some((seconds(now) - record.t_s - record.detect_s).max(0.0));
            record.world.1 = u32::try_from(nodes).unwrap_or(u32::MAX);
            *of = None;
        }
    }

    pub(super) fn lines(&self, of: &Failures, policy: &Policy, ledger: &TimeLedger) -> String {
        let stalled = ledger.blocked[Cause::Checkpoint as usize];
        let share = stalled as f64 / (stalled + ledger.productive + ledger.discarded).max(1) as f64;
        let span = Span {
            checkpoint_share: share,
            spares: Some(policy.spares.min(of.nodes)),
            ..Span::new(of.nodes, seconds(of.length))
        };
        history::lines(&span, self.records.iter().map(|(_, record)| record))
    }
}

fn mean(of: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = of.fold((0u32, 0.0), |(n, sum), x| (n + 1, sum + x));
    (count > 0).then(|| sum / f64::from(count))
}

/// Returns when the job ran again, in seconds.
fn until(of: &Record) -> f64 {
    of.t_s + of.detect_s + of.restart_s.unwrap_or(0.0)
}

/// Returns the seconds from the detection of the failure until the node was repaired.
fn until_repaired(of: &Record) -> f64 {
    of.repair_s.map_or(0.0, |repair| (repair - of.detect_s).max(0.0))
}

fn waited(of: &Record) -> bool {
    of.restart_s.unwrap_or(0.0) >= until_repaired(of)
}

/// Returns the failures of a history, and a policy that repeats how they were handled, with the
/// means of the recorded times and losses.
///
/// # Errors
/// Those of [`from_lines`].
pub fn recorded(text: &str) -> Result<(Failures, Policy), TraceError> {
    let failures = from_lines(text)?;
    let records: Vec<Record> = text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
    let known = records.iter().filter(|r| r.world.0 > 0 && r.restart_s.is_some()).collect::<Vec<_>>();
    // Stops that overlap show only how long they took together, and the failure of an idle node
    // shows nothing. So failures that stand alone are preferred.
    let alone = |r: &&Record| known.iter().all(|o| std::ptr::eq(*o, *r) || until(o) <= r.t_s || until(r) <= o.t_s);
    let some: Vec<&Record> = known.iter().copied().filter(alone).collect();
    let clear = if some.is_empty() { &known } else { &some };
    let nodes = || known.iter().filter(|r| r.kind == Kind::Node.name());
    let shrunk = nodes().filter(|r| r.world.1 < r.world.0).count();
    let on_loss = if 2 * shrunk > nodes().count() { OnLoss::Shrink } else { OnLoss::Wait };
    // A job that did not wait for a repair had a spare. There were as many spares as nodes were
    // down then.
    let served = nodes().filter(|r| on_loss == OnLoss::Wait && !waited(r));
    let span: Option<Span> = text.lines().find_map(|l| serde_json::from_str(l).ok());
    let told = span.as_ref().and_then(|s| s.spares).filter(|_| on_loss == OnLoss::Wait);
    let spares = told.unwrap_or_else(|| served.map(|r| failures.down_at(micros(r.t_s))).max().unwrap_or(0));
    let restart = |r: &&&Record| {
        let all = r.restart_s.unwrap_or(0.0);
        if on_loss == OnLoss::Wait && waited(r) { (all - until_repaired(r)).max(0.0) } else { all }
    };
    let of = |kind: Kind| clear.iter().filter(move |r| r.kind == kind.name());
    let any = mean(clear.iter().map(|r| restart(&r))).unwrap_or(0.0);
    let detects =
        |kind: Kind| micros(mean(records.iter().filter(|r| r.kind == kind.name()).map(|r| r.detect_s)).unwrap_or(0.0));
    let restarts = |kind: Kind| micros(mean(of(kind).map(|r| restart(&r))).unwrap_or(any));
    // On average, half of an interval is lost.
    let lost = mean(clear.iter().map(|r| r.lost_s)).unwrap_or(0.0);
    // Even if nothing was ever lost, checkpoints took their time.
    let stalls = span.map_or(0.0, |s| s.checkpoint_share.clamp(0.0, 0.99));
    let interval = if lost > 0.0 || stalls > 0.0 { micros(2.0 * lost).max(SECOND) } else { 0 };
    let kinds = [Kind::Node, Kind::Process, Kind::Transient];
    let policy = Policy {
        name: "recorded".into(),
        source: "the means of the records".into(),
        efficiency: 1_000_000,
        on_loss,
        spares,
        detect: kinds.map(detects),
        restart: kinds.map(restarts),
        regroup: restarts(Kind::Node),
        interval,
        write: (interval as f64 * stalls / (1.0 - stalls)).round() as u64,
        copies: 0,
        copy_interval: 0,
        coordinator: false,
    };
    Ok((failures, policy))
}
