//! `make sim SEED=…`: replays one seed exactly and prints its trace. The argument `tight` gives the
//! job a small restart budget.

use everstep_sim::trace::Keep;
use everstep_sim::{Options, run};

fn main() {
    let mut args = std::env::args().skip(1);
    let Some(Ok(seed)) = args.next().map(|s| s.parse()) else {
        eprintln!("usage: everstep-sim SEED [MINUTES] [tight]; give a seed as a number, for example 7");
        std::process::exit(2);
    };
    let mut options = Options { trace: Keep::Lines, ..Options::usual(seed) };
    for arg in args {
        match arg.parse() {
            Ok(minutes) => options.minutes = minutes,
            Err(_) => options.tight_budget = arg == "tight",
        }
    }
    let outcome = run(&options);
    for line in &outcome.trace {
        println!("{line}");
    }
    eprintln!(
        "seed {seed}: {} events, {} generations, faults {:?}",
        outcome.events, outcome.generations, outcome.faults
    );
    for v in &outcome.violations {
        eprintln!("VIOLATION {} at {:.3} s: {}", v.invariant, v.at as f64 / 1000.0, v.what);
    }
    eprintln!("trace hash {:016x}", outcome.hash);
    std::process::exit(i32::from(!outcome.violations.is_empty()));
}
