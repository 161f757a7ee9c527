//! Shows the contents of checkpoints.

use super::inventory::Inventory;
use super::size;
use crate::failure::Failure;
use everstep_checkpoint::arena::Slot;
use everstep_checkpoint::persist::{self, read_manifest};
use everstep_checkpoint::restore::Shard;
use everstep_core::coordinator::wording::counted;
use everstep_core::message::ShardFile;
use everstep_wire::output::CheckpointRow;
use std::path::Path;
use std::sync::Arc;

/// What is reported for a slot that a running job has overwritten.
pub const OVERWRITTEN: &str = "overwritten meanwhile";

/// One shard of a row: its name, and the shard or what is wrong with it.
pub type Found = (String, Result<Shard, String>);

/// Opens the shards of a row, in the order of their ranks if it is a durable checkpoint.
pub fn shards(row: &CheckpointRow) -> Vec<Found> {
    if row.tier != "disk" {
        let open = |path: &Path| {
            let slot = Slot::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
            let found = Shard::from_slot(Arc::new(slot)).map_err(|e| format!("{}: {e}", path.display()))?;
            // A running job reuses its slots.
            if found.1.step == row.step { Ok(found.0) } else { Err(OVERWRITTEN.to_owned()) }
        };
        return row.paths.iter().map(|p| (p.0.display().to_string(), open(p.as_ref()))).collect();
    }
    let Some(checkpoint) = row.paths.first().map(AsRef::<Path>::as_ref) else { return Vec::new() };
    match read_manifest(checkpoint) {
        Ok(manifest) => {
            // By rank: a manifest may name them in any order.
            let mut files: Vec<_> = manifest.shards.iter().collect();
            files.sort_by_key(|s| s.rank);
            let open = |s: &ShardFile| Shard::from_file(checkpoint, s).map_err(|e| e.to_string());
            files.into_iter().map(|s| (format!("rank {}", s.rank), open(s))).collect()
        }
        Err(why) => vec![(checkpoint.display().to_string(), Err(why.to_string()))],
    }
}

/// Prints the shards of one step, wherever they are.
pub fn show(inventory: &Inventory, step: Option<u64>, tensors: bool) -> Result<i32, Failure> {
    let step = step.or(inventory.rows.first().map(|r| r.step));
    let rows: Vec<&CheckpointRow> = inventory.rows.iter().filter(|r| Some(r.step) == step).collect();
    if rows.is_empty() {
        return Err(Failure::usage("no such checkpoint; run everstep ckpt ls to list the available ones"));
    }
    for row in rows {
        println!(
            "step {}  {}  {}  ranks {}  {}  {}",
            row.step,
            row.tier,
            row.holder,
            row.ranks,
            size(row.bytes),
            row.state
        );
        for (name, shard) in shards(row) {
            match shard {
                Ok(shard) => {
                    let index = shard.index();
                    println!(
                        "  {name}: {}, {}, {}",
                        counted(index.tensors().len() as u64, "tensor"),
                        size(index.bytes()),
                        counted(index.crcs().len() as u64, "chunk")
                    );
                    for t in index.tensors().iter().filter(|_| tensors) {
                        println!("    {:<48} {:<5} {:?}", t.name, t.dtype, t.shape);
                    }
                }
                Err(why) => println!("  {name}: {why}"),
            }
        }
    }
    for directory in inventory.directories() {
        if let Some(why) = frequency(directory) {
            println!("durable checkpoints in {}: {why}", directory.display());
        }
    }
    Ok(0)
}

/// Returns how often durable checkpoints are made in this directory, and why, if that is measured.
/// `python/everstep/schedule.py` records it in `everstep-frequency.json`.
fn frequency(directory: &Path) -> Option<String> {
    let kept: serde_json::Value =
        serde_json::from_slice(&persist::recall(directory, "everstep-frequency.json").ok()??).ok()?;
    Some(kept.get("why")?.as_str()?.to_owned())
}
