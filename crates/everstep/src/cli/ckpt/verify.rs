//! Verification: every byte is read here. Python, which does the restoring, then decodes the
//! values.

use super::check::{OVERWRITTEN, shards};
use super::inventory::{Inventory, UNREADABLE};
use crate::failure::Failure;
use crate::interpreter::{module, python};
use everstep_checkpoint::arena::Slot;
use everstep_checkpoint::erasure::parity;
use everstep_wire::output::CheckpointRow;
use serde_json::{Value, json};
use std::io::Write;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Number of threads that read.
const READERS: usize = 4;

/// One shard, and what is wrong with it.
struct Checked<'a> {
    row: &'a CheckpointRow,
    name: String,
    wrong: Option<String>,
}

/// Shards whose bytes are good. Their values are checked next.
struct Asked {
    /// Indices among all checked shards: those of one checkpoint, or one slot.
    shards: Range<usize>,
    what: Value,
    slot: Option<PathBuf>,
}

/// A rank (`None` for all shards) and what is wrong with it.
type Wrong = (Option<usize>, String);

/// Verifies all shards, and prints the damaged ones.
pub fn verify(inventory: &Inventory, step: Option<u64>) -> Result<i32, Failure> {
    let (mut all, mut asked) = (Vec::new(), Vec::new());
    for row in inventory.rows.iter().filter(|r| step.is_none_or(|s| s == r.step)) {
        let first = all.len();
        all.extend(bytes(row).into_iter().map(|(name, wrong)| Checked { row, name, wrong }));
        let good = |n: usize| all.get(n).is_some_and(|c: &Checked| c.wrong.is_none());
        match row.tier {
            // Parity has no values.
            "parity" => {}
            "disk" if (first..all.len()).all(good) => {
                let path = row.paths.first().map(|p| p.0.as_bytes());
                asked.push(Asked { shards: first..all.len(), what: json!({"checkpoint": path}), slot: None });
            }
            "disk" => {}
            _ => asked
                .extend((first..).zip(&row.paths).filter(|(n, _)| good(*n)).filter_map(|(n, p)| slot(n, p.as_ref()))),
        }
    }
    for (of, wrongs) in asked.iter().zip(values(&asked)?) {
        for (rank, why) in wrongs {
            // A problem with the whole checkpoint is reported once, at its first shard.
            let at = of.shards.start + rank.unwrap_or(0);
            if let Some(shard) = all.get_mut(at).filter(|_| of.shards.contains(&at)) {
                let current = of.slot.as_deref().is_none_or(|path| is_of(path, shard.row.step));
                shard.wrong = Some(if current { why } else { OVERWRITTEN.to_owned() });
            }
        }
    }
    all.retain(|c| c.wrong.as_deref() != Some(OVERWRITTEN));
    if all.is_empty() {
        return Err(Failure::usage("there is nothing to verify here; everstep ckpt ls shows what there is"));
    }
    let bad: Vec<(&Checked, &String)> = all.iter().filter_map(|c| Some((c, c.wrong.as_ref()?))).collect();
    for (Checked { row, name, .. }, why) in &bad {
        println!("step {} {} {}: {name}: {why}", row.step, row.tier, row.holder);
    }
    println!("{} shards are good, {} are damaged", all.len() - bad.len(), bad.len());
    Ok(i32::from(!bad.is_empty()))
}

/// Returns the shards of a row, and what is wrong with their bytes.
fn bytes(row: &CheckpointRow) -> Vec<(String, Option<String>)> {
    if let Some(why) = row.state.strip_prefix(UNREADABLE) {
        return row.paths.iter().map(|p| (p.0.display().to_string(), Some(why.to_owned()))).collect();
    }
    if row.tier == "parity" {
        let verified = |path: &Path| {
            let slot = Slot::open(path).map_err(|e| e.to_string())?;
            parity::verify(&slot).map_err(|e| e.to_string())
        };
        return row.paths.iter().map(|p| (p.0.display().to_string(), verified(p.as_ref()).err())).collect();
    }
    let verified = |(name, shard): (String, Result<_, String>)| {
        let wrong =
            shard.and_then(|s: everstep_checkpoint::restore::Shard| s.verify(READERS).map_err(|e| e.to_string()));
        (name, wrong.err())
    };
    shards(row).into_iter().map(verified).collect()
}

fn slot(number: usize, path: &Path) -> Option<Asked> {
    let label = Slot::open(path).ok()?.label()?;
    let what = json!({"slot": path.as_os_str().as_bytes(), "rank": label.rank, "world_size": label.world_size});
    Some(Asked { shards: number..number + 1, what, slot: Some(path.into()) })
}

/// Returns true if the slot still contains this step: a running job reuses its slots.
fn is_of(path: &Path, step: u64) -> bool {
    Slot::open(path).is_ok_and(|s| s.label().is_some_and(|l| l.step == step))
}

/// Returns what is wrong with the values of each item, as reported by `python/everstep/verify.py`.
fn values(asked: &[Asked]) -> Result<Vec<Vec<Wrong>>, Failure> {
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    let python = python();
    let failed = |why: &str| {
        let python = python.display();
        Failure::config(format!(
            "checksums were compared, but values cannot be decoded: everstep.verify {why} in {python}; set PYTHON_EXEC"
        ))
    };
    let mut command = Command::new(&python);
    command.args(module("verify")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| failed(&e.to_string()))?;
    let question = serde_json::to_vec(&asked.iter().map(|a| &a.what).collect::<Vec<_>>()).unwrap_or_default();
    // It reads everything before it answers. If it has ended already, its exit code explains more
    // than the broken pipe.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(&question));
    let done = child.wait_with_output().map_err(|e| failed(&e.to_string()))?;
    let answers: Vec<Vec<Wrong>> =
        done.stdout.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    if !done.status.success() || answers.len() != asked.len() {
        return Err(failed(&format!("failed ({})", done.status)));
    }
    Ok(answers)
}
