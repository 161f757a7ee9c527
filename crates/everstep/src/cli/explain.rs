//! `everstep explain`: what happened and why, what was lost, what was done, whether it worked, and
//! what to do next.

use super::incidents::{One, Which, one, report};
use super::{Failure, print_json};
use crate::notify::when;
use clap::Args;
use everstep_core::history::{Incident, narrative};
use everstep_wire::output::Explained;

#[derive(Args, Clone, Debug)]
pub struct Explain {
    #[command(flatten)]
    which: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints one incident, and the notes on the run.
pub fn explain(o: &Explain) -> Result<i32, Failure> {
    let One { facts, incident, notes } = one(&o.which, true)?;
    let job = facts.job;
    if o.json {
        print_json(&match incident {
            Some(found) => Explained::of(report(&job, &found), notes),
            None => Explained::nothing(job, notes),
        })?;
        return Ok(0);
    }
    match incident {
        Some(found) => explained(&job, &found).iter().for_each(|line| println!("{line}")),
        None => println!("job {job} has had no incident"),
    }
    notes.iter().for_each(|note| println!("Note     {note}"));
    Ok(0)
}

/// Returns what `everstep explain` prints about an incident.
pub fn explained(job: &str, of: &Incident) -> Vec<String> {
    narrative(of, job, &when(of.opened))
}
