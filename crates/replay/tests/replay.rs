//! Tests of the cost simulator: accounts add up under any failures, a seed gives the same bytes,
//! and results match what is known without it.

use everstep_planner::Mode;
use everstep_replay::{
    Cause, DAY, Failure, Failures, HOUR, Job, Kind, OnLoss, Policy, Recipe, Renewal, Repair, SECOND, Workload, compare,
    from_faults, from_lines, generate, run, to_lines,
};
use everstep_rng::Rng;

fn poisson(nodes: u32, days: u64, mtbf_days: u64) -> Renewal {
    Renewal {
        nodes,
        length: days * DAY,
        mtbf: mtbf_days * DAY,
        shape: 0.7,
        others: 2.0,
        repair: Repair::LogNormal(DAY / 4, DAY),
        burst: 0.1,
        domain: 4,
        lemons: (0.1, 4.0),
    }
}

fn random_policy(rng: &mut Rng) -> Policy {
    let on_loss =
        [OnLoss::Wait, OnLoss::Shrink, OnLoss::Plan(Mode::Floor), OnLoss::Plan(Mode::Paper), OnLoss::Plan(Mode::Fair)];
    let mut time = |most: u64| rng.range(0, most);
    let (copies, interval) = (if time(2) == 0 { 0 } else { 2 + time(2) as u32 }, time(3) * time(10 * HOUR));
    Policy {
        name: "random".into(),
        source: String::new(),
        efficiency: 1 + time(1_000_000) as u32,
        on_loss: on_loss[time(5) as usize],
        spares: time(3) as u32,
        detect: [time(HOUR), time(HOUR), time(HOUR)],
        restart: [time(HOUR), time(5 * HOUR), time(HOUR)],
        regroup: time(HOUR),
        interval,
        write: if interval > 0 { time(600 * SECOND) } else { 0 },
        copies,
        copy_interval: if copies > 0 { 1 + time(HOUR) } else { 0 },
        coordinator: time(2) == 0,
    }
}

fn random_work(rng: &mut Rng, nodes: u32) -> Workload {
    let count = rng.range(1, 5);
    let job = |n: u64| {
        let most = rng.range(2, u64::from(nodes) + 3) as i64;
        let achieved = (0..=most).map(|k| k * rng.range(300_000, 600_000) as i64).collect();
        let min = rng.range(0, u64::from(nodes) / count) as u32;
        Job { id: format!("job{n}"), weight: 500 + rng.range(0, 1500) as u32, min: min.min(most as u32), achieved }
    };
    Workload { jobs: (0..count).map(job).collect() }
}

/// `run` itself checks the accounts to the microsecond. This test adds the other properties.
#[test]
fn accounts_add_up_whatever_fails() {
    let mut stopped = 0u64;
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let nodes = rng.range(6, 40) as u32;
        let failures = generate(&Recipe::Renewal(poisson(nodes, 30, rng.range(1, 20))), seed).checked().unwrap();
        let (policy, work) = (random_policy(&mut rng), random_work(&mut rng, nodes));
        let Ok(out) = run(&failures, &work, &policy) else { continue };
        assert_eq!(out.ledger.sum(), u64::from(nodes) * failures.length, "seed {seed}");
        let down: u64 = failures.down().iter().enumerate().map(|(n, t)| n as u64 * t).sum();
        assert_eq!(out.ledger.unavailable, down, "seed {seed}: a policy must not change which machines are down");
        assert!(out.value >= 0 && out.value <= out.ideal.max(1) * 2, "seed {seed}");
        assert_eq!(out, run(&failures, &work, &policy).unwrap(), "seed {seed}");
        stopped += u64::from(out.stopped);
    }
    println!("replay: 400 seeds, {stopped} failures that stopped a job");
    assert!(stopped > 10_000);
}

#[test]
fn one_failure_costs_what_it_must() {
    let failures = |kind, repair| Failures {
        nodes: 4,
        length: 10 * HOUR,
        list: vec![Failure { at: 5 * HOUR + 600 * SECOND, node: 1, kind, repair }],
    };
    let wait = Policy {
        detect: [60 * SECOND; 3],
        restart: [120 * SECOND; 3],
        interval: HOUR,
        write: 0,
        ..Policy::named("wait").unwrap()
    };
    let work = Workload::alone(4);
    let process = run(&failures(Kind::Process, 0), &work, &wait).unwrap();
    assert_eq!(process.ledger.discarded, 4 * 600 * SECOND, "since the last checkpoint");
    assert_eq!(process.ledger.blocked[Cause::Detection as usize], 4 * 60 * SECOND);
    assert_eq!(process.ledger.blocked[Cause::Restart as usize], 4 * 120 * SECOND);
    assert_eq!(process.ledger.unavailable, 0);
    let node = run(&failures(Kind::Node, HOUR), &work, &wait).unwrap();
    assert_eq!(node.ledger.blocked[Cause::Waiting as usize], 3 * (HOUR - 60 * SECOND), "three wait for the fourth");
    assert_eq!(node.ledger.blocked[Cause::Restart as usize], 4 * 120 * SECOND);
    let spare = Policy { spares: 1, ..wait.clone() };
    let spared = run(&failures(Kind::Node, HOUR), &Workload::alone(3), &spare).unwrap();
    assert_eq!(spared.ledger.blocked[Cause::Waiting as usize], 0);
    let shrink = Policy { on_loss: OnLoss::Shrink, regroup: 30 * SECOND, ..wait.clone() };
    let shrunk = run(&failures(Kind::Node, HOUR), &work, &shrink).unwrap();
    assert_eq!(
        shrunk.ledger.blocked[Cause::Restart as usize],
        3 * 120 * SECOND + 4 * 30 * SECOND,
        "down, and up again"
    );
    let planned = Policy { on_loss: OnLoss::Plan(Mode::Floor), ..shrink };
    assert_eq!(run(&failures(Kind::Node, HOUR), &work, &planned).unwrap().ledger, shrunk.ledger, "one job: the same");
}

#[test]
fn copies_save_what_their_group_keeps() {
    let at = 5 * HOUR + 1000 * SECOND;
    let both = |second: u32| {
        let failure = |node| Failure { at, node, kind: Kind::Node, repair: HOUR };
        Failures { nodes: 4, length: 10 * HOUR, list: vec![failure(0), failure(second)] }
    };
    let policy =
        Policy { interval: HOUR, write: 0, copies: 2, copy_interval: 30 * SECOND, ..Policy::named("wait").unwrap() };
    let lost = |second| run(&both(second), &Workload::alone(4), &policy).unwrap();
    assert_eq!((lost(2).ledger.discarded, lost(2).copies_lost), (4 * 10 * SECOND, 0), "of other groups");
    assert_eq!(lost(1).copies_lost, 1);
    assert_eq!(lost(1).ledger.discarded, 4 * 10 * SECOND + 4 * 990 * SECOND, "both that hold it");
}

#[test]
fn a_plan_is_never_worse_than_leaving_jobs_alone() {
    let all: Vec<Failures> = (0..40).map(|seed| generate(&Recipe::TraceB, seed)).collect();
    let work = everstep_replay::papers::unicron::case(5).unwrap();
    let plan = Policy::named("unicron").unwrap();
    let alone = Policy { name: "alone".into(), on_loss: OnLoss::Shrink, ..plan.clone() };
    let found = compare(&all, &work, &[plan, alone], 2).unwrap();
    assert!(found[1].ratio.is_some_and(|r| r.ends.0 >= 1.0), "{:?}", found[1].ratio);
}

#[test]
fn threads_do_not_matter() {
    let all: Vec<Failures> = (0..7).map(|seed| generate(&Recipe::Renewal(poisson(32, 60, 30)), seed)).collect();
    let policies = [Policy::named("everstep").unwrap(), Policy::named("wait").unwrap()];
    let found = |threads| compare(&all, &Workload::alone(32), &policies, threads).unwrap();
    assert_eq!(found(1), found(2));
    assert_eq!(found(1), found(5));
}

#[test]
fn what_is_written_is_read_again() {
    for seed in 0..20 {
        let failures = generate(&Recipe::Renewal(poisson(16, 20, 10)), seed).checked().unwrap();
        assert_eq!(from_lines(&to_lines(&failures)).unwrap(), failures);
    }
}

#[test]
fn wrong_traces_are_refused_in_a_sentence() {
    for (text, words) in [
        ("", "empty"),
        (
            "{\"kind\":\"cluster\",\"nodes\":4,\"length_s\":100}\n{\"t_s\":-5,\"node\":1,\"kind\":\"sev1\",\"repair_s\":3}",
            "t_s = -5",
        ),
        (
            "{\"kind\":\"cluster\",\"nodes\":4,\"length_s\":100}\n{\"t_s\":5,\"node\":1,\"kind\":\"sev1\",\"repair_s\":-3}",
            "repair_s = -3",
        ),
        (
            "{\"t_s\":5,\"node\":1,\"kind\":\"sev1\",\"repair_s\":50}\n{\"t_s\":25,\"node\":1,\"kind\":\"sev1\",\"repair_s\":50}",
            "overlap",
        ),
        (
            "{\"kind\":\"cluster\",\"nodes\":4,\"length_s\":100}\n{\"t_s\":5,\"node\":7,\"kind\":\"sev2\"}",
            "only 4 nodes",
        ),
        ("{\"t_s\":5,\"node\":7,\"kind\":\"rain\"}", "give sev1"),
        ("{\"t_s\":\"5 s\",\"node\":7,\"kind\":\"sev1\"}", "no t_s, in seconds"),
        ("rain", "not a JSON object"),
    ] {
        let said = from_lines(text).unwrap_err().to_string();
        assert!(said.contains(words), "{text}: {said}");
    }
    assert!(from_faults("[]", None).unwrap_err().to_string().contains("empty"));
    let none = |p: &str| Recipe::read(p, |_| Err("no file")).unwrap_err().to_string();
    for (spec, words) in [
        ("rain", "there are trace-a"),
        ("poisson,nodes=-4", "nodes = -4"),
        ("poisson,mtbf=260", "has no unit"),
        ("poisson,mtbf=0d", "greater than zero"),
        ("poisson,rain=3", "there is no rain"),
        ("weibull,repair=20h..4h", "4h..20h, exp:1d"),
        ("bootstrap", "needs file"),
        ("trace-a,nodes=3", "as published"),
    ] {
        assert!(none(spec).contains(words), "{spec}: {}", none(spec));
    }
    for (name, words) in [("rain", "there is no policy rain"), ("spares:x", "as in spares:2")] {
        assert!(Policy::named(name).unwrap_err().to_string().contains(words));
    }
    let many = Workload {
        jobs: (0..5).map(|n| Job { id: n.to_string(), weight: 1000, min: 4, achieved: (0..9).collect() }).collect(),
    };
    let failures = Failures { nodes: 16, length: DAY, list: vec![] };
    assert!(run(&failures, &many, &Policy::named("wait").unwrap()).unwrap_err().to_string().contains("cannot fit"));
}

#[test]
fn the_real_trace_is_what_its_authors_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/infinitehbd/trace.json");
    let Ok(text) = std::fs::read_to_string(path) else {
        println!("skipped: no real traces on this machine");
        return;
    };
    let failures = from_faults(&text, Some(400)).unwrap();
    let fit = everstep_replay::fit(&failures).unwrap();
    assert_eq!(failures.nodes, 400);
    assert!((560..=584).contains(&fit.failures), "{fit:?}");
    assert!((0.8..0.95).contains(&fit.repair.0) && (5.0..6.0).contains(&fit.repair.1), "{fit:?}");
    assert!(fit.down.2 == 31 && fit.poisson == 17, "{fit:?}");
    let drawn = generate(&Recipe::Bootstrap { of: failures.clone(), length: failures.length, block: 14 * DAY }, 3)
        .checked()
        .unwrap();
    assert!(drawn.list.len() > 300);
}
