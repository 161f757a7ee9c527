//! The accounts of time: exact sums over random histories, and the right categories for known ones.

use everstep_core::id::Generation;
use everstep_core::ledger::{Account, Category, End, NodeLedger, Reading, Spent, Steps};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Event {
    Start,
    Look { local: u32, steps: u64, data: u64, eval: u64, stall: u64, restore: u64, tells: bool },
    Ended { local: u32, how: u8 },
    Fenced,
    Waits(bool),
    Best(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let micros = || prop_oneof![Just(0u64), 0u64..400_000];
    prop_oneof![
        1 => Just(Event::Start),
        12 => (0u32..3, 0u64..5, micros(), micros(), micros(), micros(), any::<bool>()).prop_map(
            |(local, steps, data, eval, stall, restore, tells)| Event::Look { local, steps, data, eval, stall, restore, tells }
        ),
        1 => (0u32..3, 0u8..3).prop_map(|(local, how)| Event::Ended { local, how }),
        1 => Just(Event::Fenced),
        1 => any::<bool>().prop_map(Event::Waits),
        1 => (0u64..60).prop_map(Event::Best),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Whatever happens, and whatever the workers count: nothing is missing, nothing counts twice,
    /// and no total shrinks.
    #[test]
    fn the_parts_sum_to_the_whole(events in prop::collection::vec((event(), 0u64..300_000), 1..120)) {
        let mut ledger = NodeLedger::new(3, 1_000);
        let (mut at, mut generation) = (1_000, 0);
        let mut readings = [Reading::default(); 3];
        let mut seen: BTreeMap<Generation, Spent> = BTreeMap::new();
        for (event, later) in events {
            at += later;
            match event {
                Event::Start => {
                    generation += 1;
                    readings = [Reading::default(); 3];
                    ledger.start(at, Generation(generation));
                }
                Event::Look { local, steps, data, eval, stall, restore, tells } => {
                    let r = &mut readings[local as usize];
                    (r.data, r.eval, r.stall, r.restore) = (r.data + data, r.eval + eval, r.stall + stall, r.restore + restore);
                    r.step = r.step.map(|s| s + steps).or(tells.then_some(0));
                    ledger.look(at, local, *r);
                }
                Event::Ended { local, how } => {
                    ledger.ended(at, local, [End::Well, End::Failed, End::Stopped][how as usize]);
                }
                Event::Fenced => ledger.fenced(at),
                Event::Waits(excluded) => ledger.waits(at, excluded),
                Event::Best(step) => ledger.best(step),
            }
            prop_assert!(ledger.is_whole(at), "{ledger:?}");
            for account in ledger.accounts(at) {
                let before = seen.insert(account.generation, account.spent).unwrap_or_default();
                for category in Category::ALL {
                    prop_assert!(account.spent.of(category) >= before.of(category), "{category:?} shrank");
                }
            }
        }
    }
}

const MS: u64 = 1000;

/// A worker with a known history, sampled every 100 ms.
struct Worker {
    ledger: NodeLedger,
    at: u64,
    reading: Reading,
}

impl Worker {
    fn started() -> Self {
        let mut ledger = NodeLedger::new(1, 0);
        ledger.start(2000 * MS, Generation(1));
        Worker { ledger, at: 2000 * MS, reading: Reading::default() }
    }

    /// Lets time pass; `counted` selects the counter that the worker increases meanwhile.
    fn passes(&mut self, millis: u64, counted: fn(&mut Reading) -> Option<&mut u64>) {
        for _ in 0..millis / 100 {
            self.at += 100 * MS;
            if let Some(total) = counted(&mut self.reading) {
                *total += 100 * MS;
            }
            self.ledger.look(self.at, 0, self.reading);
        }
    }

    fn steps(&mut self, n: u64, millis: u64) {
        for _ in 0..n {
            self.passes(millis - 100, |_| None);
            self.reading.step = Some(self.reading.step.unwrap_or(0) + 1);
            self.passes(100, |_| None);
        }
    }

    fn account(&self) -> Account {
        self.ledger.accounts(self.at).pop().unwrap()
    }

    fn of(&self, category: Category) -> u64 {
        self.account().spent.of(category) / MS
    }
}

#[test]
fn a_known_history_is_told_as_it_was() {
    let mut w = Worker::started();
    w.passes(3000, |_| None);
    w.reading.step = Some(0);
    w.passes(500, |r| Some(&mut r.restore));
    w.steps(1, 2000);
    w.steps(40, 200);
    // The worker counts a wait for data only when it is over.
    w.passes(30_000, |_| None);
    w.reading.data += 30_000 * MS;
    w.steps(1, 200);
    w.passes(60_000, |r| Some(&mut r.eval));
    w.steps(10, 200);
    w.passes(1000, |r| Some(&mut r.stall));
    w.steps(5, 400);
    let of = |c| w.of(c);
    assert_eq!((of(Category::Schedule), of(Category::Init), of(Category::Restore)), (2000, 3000, 500));
    assert_eq!((of(Category::DataStall), of(Category::Eval), of(Category::CheckpointStall)), (30_000, 60_000, 1000));
    assert_eq!(of(Category::Warmup), 2000);
    let near = |c, expected: u64| assert!(of(c).abs_diff(expected) <= 400, "{c:?} {}", of(c));
    near(Category::Productive, 40 * 200 + 200 + 10 * 200 + 5 * 200);
    near(Category::Degraded, 5 * 200);
}

#[test]
fn a_failure_makes_of_the_last_step_a_silence_and_of_the_next_ones_a_repetition() {
    let mut w = Worker::started();
    w.reading.step = Some(0);
    w.steps(20, 200);
    w.passes(2500, |_| None);
    w.ledger.ended(w.at, 0, End::Failed);
    assert_eq!(w.of(Category::Detect), 2500);
    w.at += 700 * MS;
    w.ledger.start(w.at, Generation(2));
    w.reading = Reading { step: Some(15), restored: 15, numbered: true, ..Reading::default() };
    w.passes(1000, |_| None);
    w.steps(10, 200);
    // Of the time before the first step, it is only known that the worker is being restored.
    assert_eq!(w.of(Category::Init), 100);
    assert_eq!(w.of(Category::Warmup), 900);
    let before = w.ledger.accounts(w.at).remove(0);
    assert_eq!((before.generation, before.spent.of(Category::Decide)), (Generation(1), 700 * MS));
    assert!(w.of(Category::Recompute).abs_diff(5 * 200) <= 200, "{}", w.of(Category::Recompute));
    assert!(w.of(Category::Productive).abs_diff(5 * 200) <= 300, "{}", w.of(Category::Productive));
}

#[test]
fn steps_without_a_number_may_be_new_or_the_same_again() {
    let mut w = Worker::started();
    w.reading.step = Some(0);
    w.steps(20, 200);
    assert!(w.of(Category::Productive) > 0 && w.of(Category::Unknown) == 0);
    w.ledger.ended(w.at, 0, End::Failed);
    w.ledger.start(w.at, Generation(2));
    w.reading = Reading { step: Some(0), ..Reading::default() };
    w.steps(3, 200);
    assert_eq!((w.of(Category::Productive), w.of(Category::Recompute)), (0, 0));
    let unknown = w.of(Category::Unknown);
    assert!(unknown > 0);
    // A scheduler has restored these three steps: the script continues from step 15.
    w.reading = Reading { step: Some(18), restored: 15, numbered: true, ..w.reading };
    w.steps(10, 200);
    assert_eq!(w.of(Category::Unknown), unknown);
    assert!(w.of(Category::Recompute).abs_diff(2 * 200) <= 200, "{}", w.of(Category::Recompute));
    assert!(w.of(Category::Productive).abs_diff(8 * 200) <= 300, "{}", w.of(Category::Productive));
    let accounts = w.ledger.accounts(w.at);
    assert_eq!(accounts.last().unwrap().steps, Some(Steps { from: Some(15), done: 13 }));
    assert_eq!(accounts[accounts.len() - 2].steps, Some(Steps { from: None, done: 20 }));
}
