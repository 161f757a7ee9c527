//! Incidents reconstructed from facts, as a coordinator's driver records them.

use everstep_core::coordinator::command::{Action, Fact};
use everstep_core::coordinator::finding::Finding;
use everstep_core::history::{Entry, LogLine, Outcome, incidents, narrative};
use everstep_core::id::{Generation, NodeId, Rank, Step};
use everstep_core::message::{Cause, Failure, HangEvidence, Outcome as Exit, Tier};
use everstep_core::severity::Table;

/// A log of facts, one second apart unless stated otherwise.
struct Log(Vec<Entry>, u64);

impl Log {
    fn new() -> Self {
        Log(Vec::new(), 0)
    }

    fn at(mut self, seconds: u64, fact: Fact) -> Self {
        self.1 += seconds * 1_000_000;
        self.0.push(Entry { at: self.1, fact });
        self
    }

    fn progress(mut self, generation: u64, step: u64, step_us: u64) -> Self {
        let fact = Fact::Progress { generation: Generation(generation), step: Step(step), step_us };
        self.0.push(Entry { at: self.1, fact });
        self
    }

    fn starts(self, generation: u64, restarts: u32) -> Self {
        let started = Fact::GenerationStarted { generation: Generation(generation), world_size: 4, restarts };
        self.at(1, started)
    }

    fn fails(self, incident: u64, generation: u64, failure: Option<Failure>) -> Self {
        let node = NodeId("n".into());
        let action = if failure.is_some() { Action::Restart } else { Action::Reconfigure };
        self.at(1, Fact::IncidentOpened { incident, generation: Generation(generation), node, failure, action })
    }

    fn restored(self, generation: u64, steps_lost: u64) -> Self {
        let tiers = vec![Tier::Memory, Tier::Memory, Tier::Memory, Tier::Peer];
        let generation = Generation(generation);
        self.at(1, Fact::Restored { generation, step: Some(Step(90)), tiers, steps_lost, nodes: 4 })
    }

    fn steps(self, generation: u64, incident: Option<u64>) -> Self {
        let lost = self.0.iter().rev().find_map(|e| match e.fact {
            Fact::Restored { steps_lost, .. } => Some(steps_lost),
            _ => None,
        });
        self.steps_from(generation, incident, Some(90), lost.map(|lost| 90 + lost))
    }

    fn steps_from(self, generation: u64, incident: Option<u64>, from: Option<u64>, had: Option<u64>) -> Self {
        let (from, had) = (from.map(Step), had.map(Step));
        let step = Step(from.map_or(1, |from| from.0 + 1));
        self.at(1, Fact::FirstStep { generation: Generation(generation), step, incident, from, had })
    }
}

fn failure(cause: Cause, text: &str) -> Failure {
    let verdict = Table::built_in().judge(&cause, text);
    let (rank, step) = (Rank(3), Some(Step(93)));
    let (total, passes) = (None, 0);
    Failure { rank, local_rank: 3, pid: 9, cause, message: text.into(), step, total, passes, progressed: true, verdict }
}

fn killed() -> Option<Failure> {
    Some(failure(Cause::Exited(Exit::Signal(9)), ""))
}

#[test]
fn an_incident_lasts_until_the_job_is_where_it_had_been() {
    let log = Log::new().starts(1, 0).progress(1, 93, 100_000).fails(1, 1, killed()).starts(2, 1).restored(2, 3);
    let log = log.steps(2, Some(1)).progress(2, 92, 110_000);
    let found = incidents(&log.0);
    assert_eq!((found[0].outcome.clone(), found[0].caught_up), (Outcome::Repeating, None));
    assert!(narrative(&found[0], "j", "now").iter().any(|l| l.contains("not yet back at step")));
    let caught_up = Fact::CaughtUp { generation: Generation(2), step: Step(94), incident: 1 };
    let found = incidents(&log.at(2, caught_up).0);
    assert_eq!(found[0].lasted(), Some(5_000_000));
    assert_eq!((found[0].step_us, found[0].rank_seconds()), ((Some(100_000), Some(110_000)), Some(20.0)));
    let text = narrative(&found[0], "j", "now").join("\n");
    for part in [
        "RECOVERED in 5.0 s",
        "SIGKILL",
        "killed (process)",
        "generation 1 → 2",
        "3 steps, recomputed",
        "regroup 1.0 s, start 1.0 s, load and first step 1.0 s, recompute 2.0 s",
        "local memory (3 ranks) and other nodes' memory (1 rank)",
        "110 ms (was 100 ms)",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(text.lines().count() <= 12);
}

#[test]
fn nothing_lost_means_the_first_step_is_the_end() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).restored(2, 0).steps(2, Some(1));
    assert_eq!(incidents(&log.0)[0].lasted(), Some(3_000_000));
}

#[test]
fn the_one_step_that_was_lost_is_the_first_one() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).restored(2, 1).steps(2, Some(1));
    assert_eq!(incidents(&log.0)[0].lasted(), Some(3_000_000));
    let text = narrative(&incidents(&log.0)[0], "j", "now").join("\n");
    assert!(text.contains("RECOVERED in 3.0 s") && !text.contains("not yet"), "{text}");
}

#[test]
fn every_incident_is_over_at_some_time() {
    let behind = || Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).restored(2, 3).steps(2, Some(1));
    // A coordinator that started in between does not record that the job has caught up, but it
    // records its progress.
    let log = behind().progress(2, 92, 100_000).at(2, Fact::CoordinatorStarted { epoch: 2 });
    assert_eq!(incidents(&log.0)[0].caught_up, None);
    let found =
        incidents(&log.at(1, Fact::Noted { incident: 9, right: true, note: String::new() }).progress(2, 93, 1).0);
    assert_eq!((found[0].outcome.clone(), found[0].lasted()), (Outcome::Recovered, Some(6_000_000)));
    // The next failure comes first.
    let found = incidents(&behind().fails(2, 2, killed()).starts(3, 2).restored(3, 0).steps(3, Some(2)).0);
    assert_eq!((found[0].outcome.clone(), found[0].caught_up), (Outcome::Superseded { by: 2 }, None));
    assert!(narrative(&found[0], "j", "now").join("\n").contains("inc-2 began before the job had caught up"));
    assert_eq!(found[1].outcome, Outcome::Recovered);
    // The job finishes first.
    let found = incidents(&behind().at(2, Fact::Ended { code: 0, why: "done".into() }).0);
    assert_eq!((found[0].outcome.clone(), found[0].lasted()), (Outcome::Recovered, Some(5_000_000)));
}

#[test]
fn what_is_noticed_while_a_job_restarts_does_not_take_the_restart() {
    let (nodes, picture) = (vec![NodeId("m".into())], String::new());
    let finding = Finding { nodes, metrics: Vec::new(), score: 900, group: false, sure: false, picture };
    let unlike = Fact::Unlike { incident: 2, generation: Generation(2), finding };
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).at(1, unlike).restored(2, 0).steps(2, Some(1));
    let found = incidents(&log.0);
    assert_eq!([&found[0].outcome, &found[1].outcome], [&Outcome::Recovered, &Outcome::Open]);
    assert!(found[0].restored.is_some() && found[0].caught_up.is_some());
    let found = incidents(&log.at(1, Fact::Ended { code: 0, why: "done".into() }).0);
    assert_eq!(found[1].outcome, Outcome::Ended { code: 0, why: "done".into() });
}

#[test]
fn silence_counts_and_a_lost_machine_is_one() {
    let hung = failure(Cause::Hung { evidence: HangEvidence::Stopped, silence_ms: 2000 }, "");
    let log = Log::new().starts(1, 0).fails(1, 1, Some(hung));
    let open = narrative(&incidents(&log.0)[0], "j", "now").join("\n");
    let next = open.lines().find(|l| l.starts_with("Next")).unwrap();
    // Stacks do not show who stopped a process.
    assert!(next.contains("kill -CONT 9 on node n") && !next.contains("stacks"), "{next}");
    let log = log.starts(2, 1).restored(2, 0).steps(2, Some(1)).fails(2, 2, None);
    let found = incidents(&log.0);
    assert_eq!(found[0].lasted(), Some(5_000_000));
    let stopped = narrative(&found[0], "j", "now").join("\n");
    assert!(stopped.contains("detect 2.0 s"), "{stopped}");
    assert!(!stopped.contains("kill -CONT"), "the process is gone: {stopped}");
    let lost = narrative(&found[1], "j", "now").join("\n");
    assert!(lost.contains("node-lost") && lost.contains("OPEN") && lost.contains("to re-form the world"), "{lost}");
}

#[test]
fn one_failure_may_supersede_another_and_one_may_end_the_job() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).fails(2, 2, killed());
    let ended = Fact::Ended { code: 93, why: "the same again".into() };
    let log = log.at(1, ended);
    let found = incidents(&log.0);
    assert_eq!(found[0].outcome, Outcome::Superseded { by: 2 });
    assert_eq!(found[1].outcome, Outcome::Ended { code: 93, why: "the same again".into() });
    // In a new run, the incidents of an earlier one are over.
    assert_eq!(incidents(&log.starts(3, 0).0), []);
}

#[test]
fn a_restart_that_was_ordered_but_never_happened_is_not_told() {
    let failed = || Log::new().starts(1, 0).fails(1, 1, killed());
    let ended = |code| Fact::Ended { code, why: "why".into() };
    let found = incidents(&failed().at(1, ended(1)).0);
    let text = narrative(&found[0], "j", "now").join("\n");
    assert!(found[0].action == Action::Fail && text.contains("Done     ended the job"), "{text}");
    // Somebody stopped the job.
    let text = narrative(&incidents(&failed().at(1, ended(143)).0)[0], "j", "now").join("\n");
    assert!(text.contains("Done     stopped the processes and did not restart them"), "{text}");
    // A restart that happened is one.
    let text = narrative(&incidents(&failed().starts(2, 1).at(1, ended(1)).0)[0], "j", "now").join("\n");
    assert!(text.contains("Done     restarted the processes, 4 ranks"), "{text}");
}

#[test]
fn a_coordinator_that_began_in_between_does_not_know_the_number() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).at(1, Fact::CoordinatorStarted { epoch: 2 });
    let log = log.starts(2, 1).restored(2, 0).steps(2, None);
    assert_eq!(incidents(&log.0)[0].outcome, Outcome::Recovered);
}

#[test]
fn what_is_written_is_read_and_what_is_unknown_is_passed_over() {
    let fact = Fact::GenerationStarted { generation: Generation(2), world_size: 8, restarts: 1 };
    let read = |text: &str| serde_json::from_str::<LogLine>(text).map(Entry::from).ok();
    let line = |fact: &str| format!("{{\"ts\": 1.5, \"job\": \"j\", \"fact\": {fact}}}");
    let written = serde_json::to_string(&fact).unwrap();
    assert_eq!(read(&line(&written)), Some(Entry { at: 1_500_000, fact }));
    assert_eq!(read(&line("{\"Later\": {}}")), None);
}

#[test]
fn a_script_that_begins_again_is_not_recovered_until_it_is_where_it_had_been() {
    let log = Log::new().starts(1, 0).progress(1, 60, 1).fails(1, 1, killed()).starts(2, 1);
    let log = log.steps_from(2, Some(1), Some(0), Some(60)).progress(2, 59, 1);
    let found = incidents(&log.0);
    assert_eq!(found[0].outcome, Outcome::Repeating);
    let text = narrative(&found[0], "j", "now").join("\n");
    for part in
        ["REPEATING STEPS", "the script began again at step 1; 60 steps are being repeated", "not yet back at step 60"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains("yes"), "{text}");
    let caught_up = Fact::CaughtUp { generation: Generation(2), step: Step(60), incident: 1 };
    let text = narrative(&incidents(&log.at(3, caught_up).0)[0], "j", "now").join("\n");
    assert!(text.contains("RECOVERED in 5.0 s") && text.contains("60 steps were repeated"), "{text}");
}

#[test]
fn what_becomes_known_later_is_told_from_then_on() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).steps_from(2, Some(1), None, Some(80));
    let found = incidents(&log.0);
    assert_eq!((found[0].outcome.clone(), found[0].caught_up), (Outcome::GoesOn, None));
    let text = narrative(&found[0], "j", "now").join("\n");
    assert!(text.contains("RUNNING AGAIN") && text.contains("Lost     unknown: "), "{text}");
    assert!(text.contains("whether it has caught up is unknown"), "{text}");
    let began = Fact::Began { generation: Generation(2), step: Step(79), from: Step(75), had: Some(Step(80)) };
    let log = log.at(1, began);
    let text = narrative(&incidents(&log.0)[0], "j", "now").join("\n");
    assert!(text.contains("the script continued at step 76; 5 steps are being repeated"), "{text}");
    assert_eq!(incidents(&log.progress(2, 80, 1).0)[0].outcome, Outcome::Recovered);
}

#[test]
fn how_far_a_job_had_been_may_not_have_been_seen() {
    let log =
        Log::new().starts(1, 0).fails(1, 1, None).starts(2, 1).restored(2, 0).steps_from(2, Some(1), Some(90), None);
    let text = narrative(&incidents(&log.0)[0], "j", "now").join("\n");
    assert!(
        text.contains("unknown: the step that the job had reached was not recorded; it continued at step 91"),
        "{text}"
    );
}

#[test]
fn steps_of_an_earlier_failure_are_not_this_ones_but_are_repeated() {
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).restored(2, 10);
    let log = log.steps_from(2, Some(1), Some(90), Some(100)).fails(2, 2, killed()).starts(3, 2).restored(3, 1);
    let text = narrative(&incidents(&log.steps_from(3, Some(2), Some(90), Some(100)).0)[1], "j", "now").join("\n");
    assert!(text.contains("1 step, recomputed, plus 9 from earlier failures"), "{text}");
    assert!(text.contains("not yet back at step 100"), "{text}");
}

#[test]
fn one_node_has_no_other_nodes() {
    let tiers = vec![Tier::Memory, Tier::Peer];
    let restored = Fact::Restored { generation: Generation(2), step: Some(Step(90)), tiers, steps_lost: 0, nodes: 1 };
    let log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1).at(1, restored).steps(2, Some(1));
    let text = narrative(&incidents(&log.0)[0], "j", "now").join("\n");
    assert!(text.contains("local memory (1 rank) and another rank's memory (1 rank)"), "{text}");
}

#[test]
fn what_earlier_versions_wrote_down_is_read() {
    let old = [
        r#"{"Restored": {"generation": 2, "step": 90, "tiers": ["Memory"], "steps_lost": 3}}"#,
        r#"{"FirstStep": {"generation": 2, "step": 91, "incident": 1}}"#,
    ];
    let mut log = Log::new().starts(1, 0).fails(1, 1, killed()).starts(2, 1);
    log.0.extend(old.map(|fact| Entry { at: 9_000_000, fact: serde_json::from_str(fact).unwrap() }));
    let found = incidents(&log.0);
    assert_eq!(found[0].outcome, Outcome::Repeating);
    assert!(narrative(&found[0], "j", "now").join("\n").contains("3 steps, recomputed"));
}
