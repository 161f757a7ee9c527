//! `scale NODES`: gathers a world of that many nodes over a network with 1 ms and 10 Gbit/s; prints
//! JSON.

use everstep_sim::scale::{Model, gather};
use std::time::Duration;

fn main() {
    let nodes = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let model = Model {
        round_trip: Duration::from_millis(1),
        bits_per_second: 10_000_000_000,
        write: Duration::from_millis(5),
    };
    let g = gather(nodes, model);
    println!(
        "{{\"nodes\": {nodes}, \"placed\": {}, \"simulated\": {:.4}, \"core_cpu\": {:.4}, \"sent\": {}}}",
        g.placed,
        g.simulated.as_secs_f64(),
        g.core.as_secs_f64(),
        g.sent
    );
}
