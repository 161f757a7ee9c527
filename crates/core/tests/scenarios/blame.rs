//! Which failure of an incident is blamed, and what becomes of a machine that failed itself.

use crate::scene::{Scene, failure};
use everstep_core::coordinator::command::Fact;
use everstep_core::coordinator::event::Event;
use everstep_core::id::{Generation, Session};
use everstep_core::message::{CrewReport, Failure, Order, Outcome, Report};
use everstep_core::severity::Table;
use everstep_core::spec::RestartBudget;

const CLOSED: &str = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:41234";
const ECC: &str = "RuntimeError: CUDA error: uncorrectable ECC error encountered";
const XID: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus.";
const PER_DAY: RestartBudget = RestartBudget::PerDayAfterFirstStep(10);

/// A job of `nodes` nodes with one rank each; nodes beyond the maximum in `sizes` wait.
fn job(sizes: (u32, u32), nodes: u64, restarts: RestartBudget) -> Scene {
    let mut scene = Scene::new();
    for node in 0..nodes {
        scene.join(node, 1, 1, Scene::spec(sizes, restarts));
    }
    scene.passes(2500);
    scene
}

fn fails(scene: &mut Scene, node: u64, failure: Failure) {
    let generation = scene.job().record().generation;
    scene.says(node, Report::Crew(generation, CrewReport::WorkerFailed(failure)));
}

fn sign(scene: &mut Scene, node: u64, line: &str) {
    let sign = Table::built_in().sign(line).unwrap();
    scene.says(node, Report::Signed(sign));
}

/// Returns the node and class that the latest incident was blamed on, and the number of other
/// failures.
fn blamed(scene: &Scene) -> Option<(String, String, u32)> {
    scene.facts.iter().rev().find_map(|f| match f {
        Fact::Blamed { node, verdict, others, .. } => {
            Some((node.0.clone(), verdict.class.clone(), others.values().sum()))
        }
        _ => None,
    })
}

#[test]
fn hundreds_of_closed_connections_are_one_line() {
    let mut scene = job((300, 300), 300, PER_DAY);
    for node in (0..300).filter(|n| *n != 7) {
        fails(&mut scene, node, failure(u32::try_from(node).unwrap(), Outcome::Code(1), CLOSED, 40));
    }
    fails(&mut scene, 7, failure(7, Outcome::Code(1), "ValueError: batch of 31", 40));
    assert_eq!(blamed(&scene), None, "others are heard for a moment");
    scene.passes(2100);
    assert_eq!(blamed(&scene), Some(("7".into(), "script-error".into(), 299)));
    let opened = scene.facts.iter().filter(|f| matches!(f, Fact::IncidentOpened { .. })).count();
    assert_eq!(opened, 1);
}

#[test]
fn the_restart_does_not_wait_for_the_blame() {
    let mut scene = job((2, 2), 2, PER_DAY);
    fails(&mut scene, 0, failure(0, Outcome::Code(1), CLOSED, 40));
    scene.stopped([0, 1]);
    assert_eq!(scene.started(), [1, 2]);
    // A report about the failed generation still counts while the next one runs.
    let late = failure(1, Outcome::Code(1), "OSError: [Errno 28] No space left on device", 40);
    scene.says(1, Report::Crew(Generation(1), CrewReport::WorkerFailed(late)));
    scene.passes(2100);
    assert_eq!(blamed(&scene), Some(("1".into(), "disk-full".into(), 1)));
}

#[test]
fn a_machine_that_is_gone_explains_what_others_say_before_that_is_known() {
    let mut scene = job((2, 3), 3, PER_DAY);
    fails(&mut scene, 0, failure(0, Outcome::Code(1), CLOSED, 40));
    scene.stopped([0, 1]);
    scene.passes(2200);
    assert_eq!(blamed(&scene), None, "only a consequence was reported: the blame window is extended");
    scene.event(Event::Lost { session: Session(3) });
    scene.passes(2000);
    assert_eq!(blamed(&scene), Some(("2".into(), "node-lost".into(), 1)));
    assert_eq!(scene.world(), ["0", "1"]);
}

#[test]
fn the_kernel_says_why_a_process_was_killed() {
    let mut scene = job((2, 2), 2, PER_DAY);
    fails(&mut scene, 1, failure(1, Outcome::Signal(9), "", 40));
    // The first line is about another process of the same machine, the second about this one.
    sign(&mut scene, 1, "Out of memory: Killed process 9999 (chrome) total-vm:1kB");
    sign(&mut scene, 1, "Out of memory: Killed process 101 (python) total-vm:1kB");
    scene.passes(2100);
    assert_eq!(blamed(&scene), Some(("1".into(), "host-memory".into(), 0)));
    let elsewhere = failure(0, Outcome::Signal(9), "", 90);
    scene.stopped([0, 1]);
    fails(&mut scene, 0, elsewhere);
    scene.passes(2100);
    assert!(blamed(&scene).is_some_and(|(node, ..)| node == "1"), "what another machine says does not explain it");
}

#[test]
fn a_broken_machine_is_left_out_and_a_spare_takes_its_place() {
    let mut scene = job((2, 2), 3, PER_DAY);
    assert_eq!(scene.world(), ["0", "1"]);
    fails(&mut scene, 1, failure(1, Outcome::Code(1), ECC, 40));
    scene.stopped([0, 1]);
    assert_eq!(scene.world(), ["0", "2"]);
    assert!(scene.facts.iter().any(|f| matches!(f, Fact::Excluded { node, .. } if node.0 == "1")));
    let said = |o: &Order| matches!(o, Order::Notice { what } if what.starts_with("node 1 is excluded from now on"));
    assert!(scene.sent.iter().any(said));
    // A later life of its agent means that the machine has been repaired.
    fails(&mut scene, 0, failure(0, Outcome::Signal(9), "", 50));
    scene.event(Event::Lost { session: Session(2) });
    scene.event(Event::Lost { session: Session(3) });
    scene.join(1, 2, 1, Scene::spec((2, 2), PER_DAY));
    scene.stopped([0]);
    scene.passes(5000);
    assert_eq!(scene.world(), ["0", "1"]);
}

#[test]
fn a_sign_alone_stops_nobody_and_explains_a_silent_end() {
    let mut scene = job((2, 2), 3, PER_DAY);
    sign(&mut scene, 0, XID);
    scene.passes(5000);
    assert_eq!(scene.started(), [1]);
    fails(&mut scene, 1, failure(1, Outcome::Code(1), CLOSED, 40));
    scene.stopped([0, 1]);
    assert_eq!(scene.world(), ["1", "2"], "the machine that told of a failure is left out, not the one that noticed");
    scene.passes(2100);
    assert_eq!(blamed(&scene), Some(("0".into(), "gpu-lost".into(), 1)));
}

#[test]
fn what_a_script_says_of_itself_is_not_blamed_on_a_machine() {
    let mut scene = job((2, 2), 3, PER_DAY);
    sign(&mut scene, 1, XID);
    fails(&mut scene, 1, failure(1, Outcome::Code(1), "ValueError: batch of 31", 40));
    scene.stopped([0, 1]);
    assert_eq!(scene.world(), ["0", "1"]);
}

#[test]
fn without_others_a_broken_machine_is_tried_once_more_and_then_waited_for() {
    let mut scene = job((2, 2), 2, PER_DAY);
    for _ in 0..2 {
        fails(&mut scene, 1, failure(1, Outcome::Code(1), ECC, 40));
        scene.stopped([0, 1]);
        scene.passes(3000);
    }
    assert_eq!(scene.started(), [1, 2], "tried once more, not twice");
    scene.join(2, 1, 1, Scene::spec((2, 2), PER_DAY));
    assert_eq!(scene.world(), ["0", "2"]);
    let mut alone = job((1, 1), 1, PER_DAY);
    for _ in 0..2 {
        fails(&mut alone, 0, failure(0, Outcome::Code(1), ECC, 40));
        alone.stopped([0]);
        alone.passes(3000);
    }
    alone.passes(601_000);
    let (code, why) = alone.over().unwrap();
    assert!(code == 75 && why.contains("excluded because of machine failures: node 0 (gpu-memory)"), "{code} {why}");
}

#[test]
fn a_second_failure_on_the_same_machine_gives_its_place_to_another() {
    let mut scene = job((2, 2), 3, PER_DAY);
    let fault =
        |step| failure(1, Outcome::Code(1), "RuntimeError: CUDA error: an illegal memory access was encountered", step);
    // A crash that may have come after the last step is held back for a second.
    fails(&mut scene, 1, fault(40));
    scene.passes(1100);
    scene.stopped([0, 1]);
    scene.passes(3000);
    assert_eq!(scene.world(), ["0", "1"]);
    fails(&mut scene, 1, fault(50));
    scene.passes(3200);
    scene.stopped([0, 1]);
    scene.passes(3000);
    assert_eq!(scene.world(), ["0", "2"]);
    // The machine is the last choice, but not barred: if no other is left, it is used.
    scene.event(Event::Lost { session: Session(3) });
    scene.passes(1000);
    scene.stopped([0]);
    scene.passes(5000);
    assert_eq!(scene.world(), ["0", "1"]);
}

#[test]
fn crash_loops_come_ever_less_often_unless_the_user_has_said_how_often() {
    let starts = |restarts| {
        let mut scene = job((1, 1), 1, restarts);
        for step in 0..2 {
            fails(&mut scene, 0, failure(0, Outcome::Signal(9), "", 40 + step));
            scene.stopped([0]);
            scene.passes(900);
        }
        scene.started().len()
    };
    assert_eq!(starts(RestartBudget::Exactly(10)), 3);
    assert_eq!(starts(PER_DAY), 2, "the first restart is at once, the next one waits for a second");
    let mut scene = job((1, 1), 1, PER_DAY);
    let mut waited = vec![];
    for step in 0..4 {
        let before = scene.started().len();
        fails(&mut scene, 0, failure(0, Outcome::Signal(9), "", 40 + step));
        let from = scene.now;
        scene.stopped([0]);
        while scene.started().len() == before && scene.now < from + 60_000 {
            scene.passes(100);
        }
        waited.push((scene.now - from) / 1000);
    }
    assert_eq!(waited, [0, 1, 2, 4]);
}

#[test]
fn what_ends_the_job_is_the_cause_not_what_followed() {
    let mut scene = job((2, 2), 2, RestartBudget::Exactly(0));
    fails(&mut scene, 0, failure(0, Outcome::Code(1), CLOSED, 40));
    assert_eq!(scene.over(), None);
    fails(&mut scene, 1, failure(1, Outcome::Code(1), "ValueError: batch of 31", 40));
    scene.stopped([0, 1]);
    scene.passes(2100);
    let (code, why) = scene.over().unwrap();
    assert!(code == 1 && why.starts_with("rank 1 ") && why.contains("batch of 31"), "{code} {why}");
    assert!(why.contains("--max-restarts 0"), "{why}");
}

#[test]
fn what_a_machine_told_before_it_was_seen_to_explains_nothing_after() {
    let mut scene = job((2, 2), 2, PER_DAY);
    sign(&mut scene, 1, XID);
    scene.event(Event::Lost { session: Session(2) });
    scene.passes(500);
    scene.join(1, 2, 1, Scene::spec((2, 2), PER_DAY));
    scene.stopped([0]);
    scene.passes(4000);
    assert_eq!(scene.world(), ["0", "1"]);
    scene.facts.clear();
    fails(&mut scene, 1, failure(1, Outcome::Signal(9), "", 50));
    scene.passes(2100);
    assert!(!scene.facts.iter().any(|f| matches!(f, Fact::Excluded { .. } | Fact::Blamed { .. })), "{:?}", scene.facts);
}

#[test]
fn a_worker_that_says_itself_what_its_machine_has_is_believed() {
    let mut scene = job((2, 2), 3, PER_DAY);
    sign(&mut scene, 1, XID);
    fails(&mut scene, 1, failure(1, Outcome::Code(1), ECC, 40));
    scene.passes(2100);
    let class = |f: &Fact| if let Fact::Excluded { verdict, .. } = f { Some(verdict.class.clone()) } else { None };
    assert_eq!(scene.facts.iter().find_map(class), Some("gpu-memory".into()));
}
