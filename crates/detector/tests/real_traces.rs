//! Traces of real jobs (StragglerAnalysis, Apache-2.0): one with a slow worker, and one whose
//! workers differ without fault. Skipped if the traces are not available.
#![allow(clippy::unwrap_used)]

use everstep_detector::stragglers::Stragglers;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Computing time in seconds of each worker (data-parallel rank, stage), by step; and the workers'
/// stages.
type Trace = (BTreeMap<i64, Vec<f32>>, Vec<u32>);

fn read(name: &str) -> Option<Trace> {
    let path =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/straggler-analysis")).join(name);
    let Ok(file) = std::fs::File::open(&path) else {
        eprintln!("skipped: there is no {}", path.display());
        return None;
    };
    let reader = SerializedFileReader::new(file).unwrap();
    let mut computed: BTreeMap<(i64, (i8, i8)), f32> = BTreeMap::new();
    let mut workers = BTreeSet::new();
    for row in reader.get_row_iter(None).unwrap() {
        let row = row.unwrap();
        let worker = (row.get_byte(0).unwrap(), row.get_byte(1).unwrap());
        workers.insert(worker);
        if row.get_string(4).unwrap().ends_with("-compute") {
            *computed.entry((row.get_long(3).unwrap(), worker)).or_default() += row.get_float(6).unwrap();
        }
    }
    let steps: BTreeSet<i64> = computed.keys().map(|(step, _)| *step).collect();
    let of = |step: i64| workers.iter().map(|w| computed.get(&(step, *w)).copied().unwrap_or(f32::NAN)).collect();
    let stages = workers.iter().map(|(_, stage)| *stage as u32).collect();
    Some((steps.into_iter().map(|step| (step, of(step))).collect(), stages))
}

/// Returns the workers that were named, and the number of steps until the first was.
fn named((steps, stages): &Trace) -> (BTreeSet<usize>, Option<usize>) {
    let mut watch = Stragglers::new(stages);
    let (mut all, mut first) = (BTreeSet::new(), None);
    for (number, computed) in steps.values().enumerate() {
        for slow in watch.step(computed) {
            all.insert(slow.worker);
            first.get_or_insert(number + 1);
        }
    }
    println!("{} workers, {} steps: {all:?} named, first after {first:?} steps", stages.len(), steps.len());
    (all, first)
}

#[test]
fn the_slow_worker_is_named_within_two_steps_and_nobody_else() {
    let Some(trace) = read("trace-AR.parquet") else { return };
    let (all, first) = named(&trace);
    assert_eq!((all.len(), first), (1, Some(2)));
    // It is by far the slowest of its stage, regardless of any thresholds.
    let worker = *all.first().unwrap();
    let sum = |w: usize| trace.0.values().map(|s| s[w]).sum::<f32>();
    let peers = (0..trace.1.len()).filter(|w| trace.1[*w] == trace.1[worker] && *w != worker);
    assert!(peers.clone().count() > 0 && peers.into_iter().all(|p| sum(worker) > 1.5 * sum(p)));
}

#[test]
fn where_sequences_differ_nobody_is_named() {
    let Some(trace) = read("trace-SE.parquet") else { return };
    assert_eq!(named(&trace).0, BTreeSet::new());
}
