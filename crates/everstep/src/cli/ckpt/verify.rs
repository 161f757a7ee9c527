//! Verification: every byte is read here. Python, which does the restoring, then decodes the
//! values.

use super::check::{OVERWRITTEN, shards};
use super::inventory::{Inventory, UNREADABLE};
use crate::failure::Failure;
use crate::interpreter::{module, python};
use everstep_checkpoint::arena::Slot;
use everstep_checkpoint::erasure::parity_shard;
use everstep_wire::output::CheckpointRow;
use serde::Serialize;
use std::io::Write;
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
    /// Its bytes are good, but its values could not be checked.
    unchecked: bool,
}

/// Shards whose bytes are good. Their values are checked next.
struct Asked {
    /// Index among all checked shards of the first one: of rank 0 of a checkpoint, or of one slot.
    first: usize,
    /// Their indices: those of the good shards of one checkpoint, or of one slot.
    shards: Vec<usize>,
    what: Question,
    slot: Option<PathBuf>,
}

/// What `python/everstep/verify.py` decodes. It tells the variants apart by their fields.
#[derive(Serialize)]
#[serde(untagged)]
enum Question {
    /// All shards of a checkpoint; its path in bytes.
    Checkpoint { checkpoint: Option<Vec<u8>> },
    /// Some of its shards.
    Ranks { checkpoint: Option<Vec<u8>>, ranks: Vec<usize>, world_size: usize },
    /// A shard in memory; its path in bytes.
    Slot { rank: u64, slot: Vec<u8>, world_size: u64 },
}

/// A rank (`None` for all shards) and what is wrong with it; `None`: its values cannot be checked.
type Answer = (Option<usize>, Option<String>);

/// Verifies all shards, and prints the damaged ones.
pub fn verify(inventory: &Inventory, step: Option<u64>) -> Result<i32, Failure> {
    let (mut all, mut asked) = (Vec::new(), Vec::new());
    for row in inventory.rows.iter().filter(|r| step.is_none_or(|s| s == r.step)) {
        let first = all.len();
        all.extend(bytes(row).into_iter().map(|(name, wrong)| Checked { row, name, wrong, unchecked: false }));
        let good = |n: usize| all.get(n).is_some_and(|c: &Checked| c.wrong.is_none());
        match row.tier {
            // Parity has no values.
            "parity" => {}
            "disk" => asked.extend(checkpoint(row, first, all.len(), good)),
            _ => asked
                .extend((first..).zip(&row.paths).filter(|(n, _)| good(*n)).filter_map(|(n, p)| slot(n, p.as_ref()))),
        }
    }
    for (of, answers) in asked.iter().zip(values(&asked)?) {
        for (rank, why) in answers {
            // A problem with the whole checkpoint is reported once, at its first good shard.
            let at = rank.map_or(of.shards.first().copied(), |rank| Some(of.first + rank));
            let Some(shard) = at.filter(|at| of.shards.contains(at)).and_then(|at| all.get_mut(at)) else { continue };
            let current = of.slot.as_deref().is_none_or(|path| is_of(path, shard.row.step));
            shard.unchecked = why.is_none();
            shard.wrong = if current { why } else { Some(OVERWRITTEN.to_owned()) };
        }
    }
    all.retain(|c| c.wrong.as_deref() != Some(OVERWRITTEN));
    if all.is_empty() {
        return Err(Failure::usage("nothing to verify; run everstep ckpt ls to list the available checkpoints"));
    }
    let (mut bad, mut unchecked) = (0, 0);
    for Checked { row, name, wrong, unchecked: not_checked } in &all {
        let why = match wrong {
            Some(why) => {
                bad += 1;
                why.as_str()
            }
            None if *not_checked => {
                unchecked += 1;
                "bytes good, values not checked: reading them needs damaged shards, or a device or package that is missing here"
            }
            None => continue,
        };
        println!("step {} {} {}: {name}: {why}", row.step, row.tier, row.holder);
    }
    let good = all.len() - bad - unchecked;
    let rest = if unchecked > 0 { format!(", the values of {unchecked} were not checked") } else { String::new() };
    println!("{good} shards are good, {bad} are damaged{rest}");
    Ok(i32::from(bad + unchecked > 0))
}

/// Returns the shards of a row, and what is wrong with their bytes.
fn bytes(row: &CheckpointRow) -> Vec<(String, Option<String>)> {
    if let Some(why) = row.state.strip_prefix(UNREADABLE) {
        return row.paths.iter().map(|p| (p.0.display().to_string(), Some(why.to_owned()))).collect();
    }
    if row.tier == "parity" {
        let verified = |path: &Path| {
            let slot = Slot::open(path).map_err(|e| e.to_string())?;
            parity_shard::verify(&slot).map_err(|e| e.to_string())
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

/// Returns the good shards of a durable checkpoint, which has those from `first` to `end`. Some
/// values depend on other shards, so that they are checked only if all of them are good.
fn checkpoint(row: &CheckpointRow, first: usize, end: usize, good: impl Fn(usize) -> bool) -> Option<Asked> {
    let shards: Vec<usize> = (first..end).filter(|n| good(*n)).collect();
    let checkpoint = row.paths.first().map(|p| p.0.as_bytes().to_vec());
    let what = match shards.len() {
        0 => return None,
        n if n == end - first => Question::Checkpoint { checkpoint },
        _ => {
            let ranks = shards.iter().map(|n| n - first).collect();
            Question::Ranks { checkpoint, ranks, world_size: end - first }
        }
    };
    Some(Asked { first, shards, what, slot: None })
}

fn slot(number: usize, path: &Path) -> Option<Asked> {
    let label = Slot::open(path).ok()?.label()?;
    let slot = path.as_os_str().as_bytes().to_vec();
    let what = Question::Slot { rank: label.rank, slot, world_size: label.world_size };
    Some(Asked { first: number, shards: vec![number], what, slot: Some(path.into()) })
}

/// Returns true if the slot still contains this step: a running job reuses its slots.
fn is_of(path: &Path, step: u64) -> bool {
    Slot::open(path).is_ok_and(|s| s.label().is_some_and(|l| l.step == step))
}

/// Returns what is wrong with the values of each item, as reported by `python/everstep/verify.py`.
fn values(asked: &[Asked]) -> Result<Vec<Vec<Answer>>, Failure> {
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    let python = python();
    let failed = |why: &str| {
        let python = python.display();
        Failure::config(format!(
            "checksums were verified, but values cannot be decoded with {python}: {why}; set PYTHON_EXEC to the \
             Python in which everstep is installed"
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
    let answers: Vec<Vec<Answer>> =
        done.stdout.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    if !done.status.success() || answers.len() != asked.len() {
        return Err(failed(&format!("everstep.verify failed ({})", done.status)));
    }
    Ok(answers)
}
