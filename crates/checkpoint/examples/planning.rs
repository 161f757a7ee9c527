//! What it costs to plan: 1,000 tensors saved by 256 ranks, read by 192, all of whose plans are made here.
//! `planning RANKS TENSORS NEW_RANKS` prints processor seconds as JSON.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use everstep_checkpoint::reshard::part::Part;
use everstep_checkpoint::reshard::plan::{Held, Table};
use everstep_checkpoint::reshard::ranges::ranges;
use std::time::Instant;

/// Rows of a tensor that a rank has, as FSDP2 cuts them.
fn rows(rank: u64, ranks: u64, shape: [u64; 2]) -> Part {
    let chunk = shape[0].div_ceil(ranks);
    let first = (rank * chunk).min(shape[0]);
    Part::Block { offsets: vec![first, 0], sizes: vec![(first + chunk).min(shape[0]) - first, shape[1]] }
}

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let [ranks, tensors, new] = numbers[..] else { panic!("RANKS TENSORS NEW_RANKS") };
    let shape = [4096, 1024];
    let began = Instant::now();
    let mut reads = 0;
    let tables: Vec<Table> = (0..tensors)
        .map(|n| {
            let held = |rank| Held { shard: rank as u32, at: n * 65_536, part: rows(rank, ranks, shape) };
            Table::new(&shape, 4, (0..ranks).map(held).collect()).unwrap()
        })
        .collect();
    let tables_made = began.elapsed().as_secs_f64();
    for rank in 0..new {
        let part = rows(rank, new, shape);
        let runs = tables.iter().flat_map(|t| t.plan(&part).unwrap()).collect();
        reads += ranges(runs).len();
    }
    let all = began.elapsed().as_secs_f64();
    println!("{{\"tables\": {tables_made:.4}, \"all\": {all:.4}, \"reads\": {reads}}}");
}
