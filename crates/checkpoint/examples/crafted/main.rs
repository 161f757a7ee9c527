//! Checkpoints made by hand, with the right checksums, through the reader: `crafted DIR INPUTS
//! SEED`. DIR should be in memory. Prints what came of each kind as JSON lines. Built with a
//! sanitizer by `figures/crafted_checkpoints.py`, which counts its reports.

#![allow(clippy::indexing_slicing, clippy::panic, reason = "a measurement may end where it stands")]

mod files;
mod mutate;
mod random;
mod shard;
mod slots;

use files::Outcome;
use mutate::{KINDS, change};
use random::Random;
use serde_json::json;
use shard::Checkpoint;
use slots::Memory;
use std::collections::BTreeMap;
use std::path::Path;

/// One input in this many has regions of more than a chunk.
const LARGE: usize = 1000;

#[derive(Default)]
struct Tally {
    accepted: u64,
    refused: BTreeMap<&'static str, u64>,
    wrong: Vec<String>,
    panics: u64,
}

/// Makes and reads one input; the name of its kind.
fn one(directory: &Path, memory: &Memory, valid: &[Checkpoint; 2], random: &mut Random) -> (&'static str, Outcome) {
    let model = &valid[usize::from(random.one_in(LARGE))];
    let mut crafted = model.clone();
    match random.below(10) {
        0 => {
            // The slot has the first shard.
            KINDS[slots::of_lines(random)].1(random, &mut crafted, 0);
            let what = random.below(3);
            (["slot", "slot-superblock", "slot-index-text"][what], memory.through(random, what, &crafted))
        }
        1 => {
            if random.one_in(3) {
                change(slots::of_lines(random), random, &mut crafted);
            }
            ("parity", memory.parity(random, &crafted))
        }
        2 => {
            (0..2 + random.below(2)).for_each(|_| change(random.below(KINDS.len()), random, &mut crafted));
            ("several", files::through(directory, random, model, &crafted))
        }
        _ => {
            let kind = random.below(KINDS.len());
            change(kind, random, &mut crafted);
            (KINDS[kind].0, files::through(directory, random, model, &crafted))
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, directory, inputs, seed] = arguments.as_slice() else { panic!("crafted DIR INPUTS SEED") };
    let (inputs, seed): (u64, u64) = match (inputs.parse(), seed.parse()) {
        (Ok(inputs), Ok(seed)) => (inputs, seed),
        _ => panic!("numbers of inputs and a seed"),
    };
    let directory = Path::new(directory).join("step-7");
    std::fs::create_dir_all(&directory).unwrap_or_else(|e| panic!("cannot create {}: {e}", directory.display()));
    let valid = [Checkpoint::valid(false), Checkpoint::valid(true)];
    let memory = Memory::new(&directory);
    let mut all: BTreeMap<&str, Tally> = BTreeMap::new();
    for input in 0..inputs {
        let mut random = Random::new(seed, input);
        let done =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| one(&directory, &memory, &valid, &mut random)));
        let Ok((kind, outcome)) = done else {
            eprintln!("input {input} of seed {seed} panicked");
            all.entry("panicked").or_default().panics += 1;
            continue;
        };
        let tally = all.entry(kind).or_default();
        match outcome {
            Outcome::Accepted => tally.accepted += 1,
            Outcome::Refused(at) => *tally.refused.entry(at).or_default() += 1,
            Outcome::Wrong(what) => tally.wrong.push(format!("input {input} of seed {seed}: {what}")),
        }
    }
    for (kind, t) in &all {
        let shown = &t.wrong[..t.wrong.len().min(5)];
        let inputs = t.accepted + t.refused.values().sum::<u64>() + t.wrong.len() as u64 + t.panics;
        println!(
            "{}",
            json!({"kind": kind, "inputs": inputs, "accepted": t.accepted, "refused": t.refused, "wrong": t.wrong.len(), "panics": t.panics, "samples": shown})
        );
    }
}
