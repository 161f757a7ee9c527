//! `detector_sets EPISODES`: several machines go bad at once, on sealed seeds: 2 to 5 of 16 to
//! 1,024; a switch of 32 of 600; and at 100 Hz, 2 to 5 of 8 to 64, and 2 of 4. Prints one JSON line
//! each: recall and precision of the named machines, and how often they were reported as a group.

use everstep_detector::onset::onset;
use everstep_detector::{Detector, robust};
use everstep_fleet::burst::burst;
use everstep_fleet::{Matrix, Recipe, generate};
use serde_json::json;

const SEALED: u64 = (1 << 33) + (1 << 32);

/// Counts of machines named, named rightly, and bad.
#[derive(Default)]
struct Sets {
    cases: usize,
    named: usize,
    right: usize,
    bad: usize,
    groups: usize,
}

impl Sets {
    fn add(&mut self, named: &[usize], bad: &[usize], in_time: bool) {
        self.cases += 1;
        self.named += named.len();
        self.bad += bad.len();
        self.right += named.iter().filter(|m| in_time && bad.contains(m)).count();
    }

    fn print(&self, what: &str) {
        let share = |of: usize| self.right as f64 / of.max(1) as f64;
        println!(
            "{}",
            json!({"of": what, "cases": self.cases, "recall": share(self.bad), "precision": share(self.named), "groups": self.groups})
        );
    }
}

fn main() {
    let episodes: u64 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(100);
    let settings = robust::Settings::default();
    for (what, switch) in [("some", false), ("switch", true)] {
        let mut all = Sets::default();
        for seed in 0..episodes {
            let machines = if switch { 600 } else { [16, 64, 256, 1024][(seed / 4 % 4) as usize] };
            let bad = if switch { 32 } else { 2 + (seed % 4) as usize };
            let recipe = Recipe { machines: Some(machines), roles: None, matrix: Matrix::Ours, bad, switch };
            let episode = generate(&recipe, SEALED + seed);
            // A fault that no metric shows cannot be detected.
            let Some(truth) = episode.truth.filter(|t| t.visible) else { continue };
            let verdict = settings.first(&episode.series);
            let named = verdict.as_ref().map_or(&[][..], |v| &v.machines);
            all.groups += usize::from(verdict.as_ref().is_some_and(|v| v.group));
            let in_time = verdict.as_ref().is_some_and(|v| (truth.onset..=truth.end).contains(&v.at));
            all.add(named, &truth.bad, in_time);
        }
        all.print(what);
    }
    let mut all = Sets::default();
    for seed in 0..episodes {
        let (machines, slow) =
            if seed % 5 == 0 { (4, 2) } else { ([8, 16, 32, 64][(seed % 4) as usize], 2 + (seed / 4 % 4) as usize) };
        let (values, bad, began) = burst(machines, slow, SEALED + seed);
        let found = onset(&values);
        let in_time = found.as_ref().is_some_and(|o| o.at + 50 >= began);
        all.add(found.as_ref().map_or(&[][..], |o| &o.machines), &bad, in_time);
    }
    all.print("looks");
    let quiet = (0..episodes).filter(|seed| onset(&burst(16, 0, SEALED + seed).0).is_some()).count();
    println!("{}", json!({"of": "quiet", "cases": episodes, "named": quiet}));
}
