//! `survival N K F [N K F …]`: prints the total seconds, then each probability, as a JSON list.

use everstep_core::placement::Scheme;
use everstep_core::survival::survival;

#[allow(clippy::disallowed_methods, reason = "an example measures; the library is given the time")]
fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let began = std::time::Instant::now();
    let found: Vec<f64> = numbers
        .chunks_exact(3)
        .map(|c| match c {
            [n, k, f] => survival(*n, *k, *f, Scheme::Mixed),
            _ => f64::NAN,
        })
        .collect();
    let mut all = vec![began.elapsed().as_secs_f64()];
    all.extend(found);
    println!("{}", serde_json::to_string(&all).unwrap_or_default());
}
