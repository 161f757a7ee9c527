//! Asks the real coordinator once for each situation, with agents that respond at once.
//!
//! A situation is how many nodes a job has, wants and needs, and what happens to it. The
//! coordinator's decision depends only on differences of these numbers, and beyond a few nodes not
//! on their size: 500 of 1,000 nodes are decided like 8 of 16. Durations come from the policy's
//! file. This module determines whether the job trains on with these nodes, and how long the
//! coordinator itself waits first.

use super::failures::Kind;
use everstep_core::coordinator::Coordinator;
use everstep_core::coordinator::command::Command;
use everstep_core::coordinator::event::Event;
use everstep_core::coordinator::job::Phase;
use everstep_core::failure::{Cause, Failure, Outcome};
use everstep_core::id::{Epoch, Generation, Incarnation, JobId, NodeId, Rank, Session, Step};
use everstep_core::message::{
    CrewOrder, CrewReport, FirstStep, Hello, Holdings, Offer, Offers, Order, RankOffers, Report, Start, Stopped, Tier,
};
use everstep_core::severity::Table;
use everstep_core::spec::{CheckWhen, JobSpec, Policy, RestartBudget};
use everstep_core::time::Time;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Larger differences are replaced by this one.
const FAR: u32 = 8;
/// Longer than the coordinator waits for anything but nodes, in milliseconds.
const LONG: u64 = 20 * 60 * 1000;
/// How long the job has trained before a failure, in milliseconds, so that it is not a crash loop.
const SETTLED: u64 = 60 * 60 * 1000;

/// What happens to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happens {
    /// One of its nodes or processes fails.
    Fails(Kind),
    /// A node joins.
    Joins,
}

/// A job and what happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Situation {
    pub happens: Happens,
    /// The number of nodes that it has afterwards.
    pub has: u32,
    /// The most nodes that it may have.
    pub most: u32,
    /// The fewest nodes that it runs on.
    pub least: u32,
}

/// Decisions so far. The same situation always has the same decision.
static ASKED: Mutex<BTreeMap<Situation, Option<u64>>> = Mutex::new(BTreeMap::new());

/// Returns after how many microseconds the job trains on with all nodes that it has, or `None` if
/// it waits for others.
pub fn trains(of: Situation) -> Option<u64> {
    // A job without nodes has no agent that could ask.
    if of.has == 0 {
        return None;
    }
    let least = of.least.clamp(1, FAR);
    let has = (least + of.has).saturating_sub(of.least.max(1)).clamp(1, least + FAR);
    let most = has + (of.most - of.has.min(of.most)).min(FAR);
    let near = Situation { happens: of.happens, has, most: most.max(least), least };
    let mut asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner);
    *asked.entry(near).or_insert_with(|| decide(near))
}

/// The coordinator of one job, and its agents.
struct Live {
    core: Coordinator,
    now: u64,
    version: u64,
    /// Events that agents and the store have sent and the coordinator has not handled.
    events: VecDeque<Event>,
    generation: Generation,
    step: Step,
}

fn spec(of: &Situation) -> JobSpec {
    JobSpec {
        job: JobId("replay".into()),
        nodes_min: of.least,
        nodes_max: of.most,
        node_unit: 1,
        spares: 0,
        restarts: RestartBudget::PerDayAfterFirstStep(10),
        detect_timeout_ms: 2000,
        join_timeout_ms: 600_000,
        policy: Policy::Observe,
        check: CheckWhen::Never,
    }
}

impl Live {
    fn join(&mut self, node: u32, spec: JobSpec) {
        let hello = Hello {
            node: NodeId(format!("{node:06}")),
            incarnation: Incarnation(1),
            spec,
            host: format!("host{node}"),
            workers: 1,
            store_port: 1,
            replica_port: 7,
            domain: String::new(),
            role: String::new(),
            seen: Generation(0),
            began: None,
            running: None,
            stop: None,
            shutdown_grace_ms: 0,
        };
        self.events.push_back(Event::Joined { session: Session(u64::from(node)), hello: Box::new(hello) });
    }

    /// Handles all events that follow at once.
    fn follow(&mut self) {
        while let Some(event) = self.events.pop_front() {
            self.core.handle(Time(self.now), event);
            self.obey();
        }
    }

    fn obey(&mut self) {
        while let Some(command) = self.core.poll() {
            match command {
                Command::Persist { id, .. } => {
                    self.version += 1;
                    self.events.push_back(Event::Persisted { id, result: Ok(self.version) });
                }
                // The write that it depends on always succeeds.
                Command::Send { session, order, .. } => self.answer(session, order),
                Command::Record { .. } | Command::Provision { .. } | Command::StepDown { .. } => {}
            }
        }
    }

    fn answer(&mut self, session: Session, order: Order) {
        let Order::Crew(generation, order) = order else { return };
        let mut say =
            |report| self.events.push_back(Event::Report { session, report: Report::Crew(generation, report) });
        match order {
            CrewOrder::Start(Start { place, .. }) => {
                self.generation = generation;
                say(CrewReport::Holds(Holdings { held: vec![], parity: vec![] }));
                let rank: Rank = place.slot.first_rank;
                let offer = Offer { step: self.step, tier: Tier::Durable, generation: Generation(0) };
                let offers = if self.step.0 > 0 { vec![offer] } else { vec![] };
                say(CrewReport::Offers(RankOffers { rank, offers: Offers::any(offers, true) }));
            }
            CrewOrder::Restore(_) => {
                say(CrewReport::FirstStep(FirstStep { step: Step(self.step.0 + 1), from: Some(self.step) }));
            }
            CrewOrder::Fence { .. } => {
                say(CrewReport::Stopped(Stopped { store_port: 1, reached: Some(self.step) }));
            }
            CrewOrder::ProposeStep => {
                say(CrewReport::StepProposed(Some(Step(self.step.0 + 10))));
            }
            CrewOrder::HoldAt(Some(step)) => {
                self.step = step;
                say(CrewReport::Published(step));
            }
            _ => {}
        }
    }

    /// Advances until the condition is true, for at most `within` milliseconds. Returns whether it
    /// is true.
    fn until(&mut self, so: impl Fn(&Live) -> bool, within: u64) -> bool {
        let end = self.now + within;
        self.follow();
        while !so(self) {
            let next = self.core.deadline(Time(self.now)).map_or(u64::MAX, |t| t.0.max(self.now + 1));
            if next > end {
                self.now = end;
                return false;
            }
            self.now = next;
            self.events.push_back(Event::Tick);
            self.follow();
        }
        true
    }

    fn trains_on(&self, nodes: u32) -> bool {
        let trains = |job: &everstep_core::coordinator::job::Job| {
            matches!(job.phase(), Phase::Training { .. })
                && job.recovery().has_stepped()
                && job.record().world.slots.len() == nodes as usize
        };
        self.core.jobs().values().any(trains)
    }
}

fn decide(of: Situation) -> Option<u64> {
    let core = Coordinator::new(Epoch(1), vec![], Time(0));
    let mut live =
        Live { core, now: 1000, version: 0, events: VecDeque::new(), generation: Generation(0), step: Step(0) };
    let before = match of.happens {
        Happens::Fails(Kind::Node) => of.has + 1,
        Happens::Fails(_) => of.has,
        Happens::Joins => of.has - 1,
    };
    // The job trains first, as far as it can.
    let most = of.most.max(before);
    let of_job = spec(&Situation { most, ..of });
    for node in 1..=before {
        live.join(node, of_job.clone());
    }
    // With too few nodes the job waits. Later it would ask to be requeued, which leads to the same
    // situation.
    let enough = before >= of.least;
    let trained = live.until(|l| l.trains_on(before), if enough { LONG } else { 60_000 });
    if enough {
        live.step = Step(1000);
        live.now += SETTLED;
    }
    live.events.push_back(Event::Tick);
    live.follow();
    let began = live.now;
    match of.happens {
        Happens::Fails(Kind::Node) => live.events.push_back(Event::Lost { session: Session(u64::from(before)) }),
        Happens::Joins => live.join(of.has, of_job),
        Happens::Fails(_) => {
            let cause = Cause::Exited(Outcome::Signal(9));
            let verdict = Table::built_in().judge(&cause, "");
            let failure = Failure {
                rank: Rank(0),
                local_rank: 0,
                pid: 1,
                cause,
                message: String::new(),
                step: Some(live.step),
                total: None,
                passes: 0,
                progressed: true,
                verdict,
            };
            let report = Report::Crew(live.generation, CrewReport::WorkerFailed(failure));
            live.events.push_back(Event::Report { session: Session(1), report });
        }
    }
    // Only a generation that starts after the event counts.
    let generation = live.generation;
    let again = live.until(|l| l.generation > generation && l.trains_on(of.has), LONG);
    (again && (trained || of.happens == Happens::Joins)).then(|| (live.now - began) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(happens: Happens, has: u32, most: u32, least: u32) -> Option<u64> {
        trains(Situation { happens, has, most, least })
    }

    #[test]
    fn the_coordinator_goes_on_with_whoever_is_there() {
        let lost = Happens::Fails(Kind::Node);
        let near = asked(lost, 7, 8, 4).expect("it trains on 7");
        assert!(near < 5_000_000, "at once: {near} us");
        assert_eq!(asked(lost, 3, 8, 4), None, "fewer than its minimum");
        assert!(asked(Happens::Fails(Kind::Process), 8, 8, 8).is_some_and(|t| t < 5_000_000));
        assert!(asked(Happens::Joins, 8, 8, 4).is_some_and(|t| t < 60_000_000));
        assert!(asked(Happens::Joins, 4, 8, 4).is_some(), "what waited trains");
    }

    /// Decides every situation that can be asked about, and compares with the rule of the policies'
    /// files: a job continues exactly if it has enough nodes.
    #[test]
    fn who_has_enough_goes_on_and_nobody_else() {
        let kinds = [Kind::Node, Kind::Process, Kind::Transient];
        let all = kinds.into_iter().map(Happens::Fails).chain([Happens::Joins]);
        for happens in all {
            for least in 1..=FAR {
                for has in 1..=least + FAR {
                    for most in has.max(least)..=has.max(least) + FAR {
                        let near = Situation { happens, has, most, least };
                        let waits = decide(near);
                        assert_eq!(waits.is_some(), has >= least, "{near:?}: {waits:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn large_jobs_are_asked_about_as_small_ones() {
        let lost = Happens::Fails(Kind::Node);
        assert_eq!(asked(lost, 999, 1000, 500), asked(lost, 15, 16, 7));
        assert_eq!(asked(lost, 499, 1000, 500), None);
        assert_eq!(asked(Happens::Joins, 12, 1000, 500), None);
        assert_eq!(asked(Happens::Joins, 1, 40, 40), None);
    }
}
