//! `everstep ckpt`: every checkpoint of a job or directory, wherever it is.

mod check;
mod convert;
mod inventory;
mod verify;

use super::{Failure, print_json};
use clap::{Args, Subcommand};
use everstep_checkpoint::objects::is_url;
use everstep_checkpoint::persist::{self, Foreign, NotAllGone};
use everstep_checkpoint::retain::Policy;
use everstep_wire::output::{CheckpointList, CheckpointRow, FIRST};
use inventory::Inventory;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Args, Clone, Debug)]
pub struct CkptOptions {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// List all checkpoints: step, tier, holder, ranks, size, age and state
    Ls {
        /// Directory of checkpoints, or name of a job [default: all jobs on this machine]
        target: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the shards of one step, and their tensors
    Show {
        /// Directory of checkpoints, or name of a job
        target: String,
        /// Step to show [default: the newest]
        step: Option<u64>,
        /// Also print the names, types and shapes of all tensors
        #[arg(long)]
        tensors: bool,
    },
    /// Read every byte and value as a restore would; exit with 1 if anything is damaged
    Verify {
        /// Directory of checkpoints, or name of a job
        target: String,
        /// Verify only this step
        step: Option<u64>,
    },
    /// Convert a durable checkpoint to another tool's format
    Export(convert::Export),
    /// Convert another tool's checkpoint to one for everstep.dcp.Reader
    Import(convert::Import),
    /// Remove durable checkpoints, except those to keep, those that users saved, and those that
    /// everstep did not write
    Prune {
        /// Directory of checkpoints
        directory: std::path::PathBuf,
        /// Number of newest checkpoints to keep (at least 2)
        #[arg(long)]
        keep: usize,
        /// Also keep the first checkpoint of every period of this length, in hours
        #[arg(long, value_name = "HOURS")]
        keep_every: Option<u64>,
        /// Do not keep the checkpoints of epoch boundaries
        #[arg(long)]
        no_epochs: bool,
        /// Also remove branches that were left by restoring an earlier step
        #[arg(long)]
        abandoned: bool,
        /// Only print what would be removed, and what would be left alone
        #[arg(long)]
        dry_run: bool,
    },
}

/// Runs the command.
pub fn run(o: &CkptOptions) -> Result<i32, Failure> {
    match &o.command {
        Command::Ls { target, json } => list(target.as_deref(), *json),
        Command::Show { target, step, tensors } => check::show(&Inventory::of(Some(target))?, *step, *tensors),
        Command::Verify { target, step } => verify::verify(&Inventory::of(Some(target))?, *step),
        Command::Export(o) => convert::export(o),
        Command::Import(o) => convert::import(o),
        Command::Prune { directory, keep, keep_every, no_epochs, abandoned, dry_run } => {
            let every = keep_every.map(|hours| Duration::from_secs(hours.saturating_mul(3600)));
            prune(directory, Policy { last: *keep, every, epochs: !no_epochs, abandoned: *abandoned }, *dry_run)
        }
    }
}

/// Returns what is at this path, if it is neither a directory nor missing.
fn instead_of_directory(path: &Path) -> Option<String> {
    let there = std::fs::symlink_metadata(path).ok()?;
    if there.is_symlink() && !path.exists() {
        let to = std::fs::read_link(path).ok()?;
        return Some(format!("is a dangling link to {}", to.display()));
    }
    match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => None,
        Ok(there) if there.is_file() => Some("is a regular file, not a directory".into()),
        _ => Some("is a special file, not a directory".into()),
    }
}

fn list(target: Option<&str>, as_json: bool) -> Result<i32, Failure> {
    let found = Inventory::of(target)?;
    if as_json {
        print_json(&CheckpointList { version: FIRST, checkpoints: found.rows, foreign: found.foreign })?;
        return Ok(0);
    }
    for foreign in &found.foreign {
        eprintln!("not written by everstep: {}: {}", foreign.path.0.display(), foreign.why);
    }
    if found.rows.is_empty() {
        eprintln!("no checkpoints{}", target.map_or(String::new(), |t| format!(" found for {t}")));
        return Ok(0);
    }
    // The job matters only if there can be several.
    let of = |job: &str| if target.is_none() { format!("{job:<20}  ") } else { String::new() };
    println!(
        "{}{:>10}  {:<5}  {:<28}  {:<12}  {:>9}  {:>6}  STATE",
        of("JOB"),
        "STEP",
        "TIER",
        "HOLDER",
        "RANKS",
        "SIZE",
        "AGE"
    );
    for row in &found.rows {
        let CheckpointRow { step, tier, job, holder, ranks, bytes, saved_at, state, .. } = row;
        println!(
            "{}{step:>10}  {tier:<5}  {holder:<28}  {ranks:<12}  {:>9}  {:>6}  {state}",
            of(job.as_deref().unwrap_or("")),
            size(*bytes),
            age(*saved_at)
        );
    }
    Ok(0)
}

fn prune(directory: &Path, policy: Policy, dry_run: bool) -> Result<i32, Failure> {
    if !directory.is_dir() && !is_url(directory) {
        let what = instead_of_directory(directory).unwrap_or_else(|| "is not a directory".into());
        return Err(Failure::config(format!(
            "{} {what}; give the directory that contains step-N",
            directory.display()
        )));
    }
    let result = persist::prune_outside(directory, policy, dry_run);
    let (done, failed) = match &result {
        Ok(done) => (done, [].as_slice()),
        Err(e) => match e.get_ref().and_then(|e| e.downcast_ref()) {
            Some(NotAllGone { done, failed }) => (done, failed.as_slice()),
            None => return Err(Failure::config(format!("cannot prune {}: {e}", directory.display()))),
        },
    };
    if failed.is_empty() && done.gone.is_empty() && done.leftovers.is_empty() {
        eprintln!("nothing to remove (the newest two checkpoints of the current branch are always kept)");
    }
    for (step, name) in &done.gone {
        // If the name is derived from the step, the step is enough.
        if *name == format!("step-{step}") { println!("{step}") } else { println!("{name}") }
    }
    for name in &done.leftovers {
        println!("{name}");
    }
    for Foreign { name, why, .. } in &done.foreign {
        eprintln!("left alone: {name}: {why}");
    }
    for (name, why) in failed {
        eprintln!("could not be deleted: {name}: {why}");
    }
    Ok(i32::from(!failed.is_empty()))
}

/// Formats a size for display: at most three digits before the point, and a unit.
pub(super) fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$} {}", units.get(unit).unwrap_or(&"?"))
}

fn age(saved_at: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    match now.checked_sub(saved_at).filter(|_| saved_at > 0) {
        None => "-".into(),
        Some(s @ 0..120) => format!("{s} s"),
        Some(s @ 120..7200) => format!("{} min", s / 60),
        Some(s @ 7200..172_800) => format!("{} h", s / 3600),
        Some(s) => format!("{} d", s / 86400),
    }
}
