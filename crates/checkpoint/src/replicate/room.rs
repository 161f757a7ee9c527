//! Which slot takes what arrives for another node, and that there is memory for it.

use crate::arena::{Label, Slot};
use crate::mapped::Mapped;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Other programs keep at least this much memory.
const HEADROOM_BYTES: u64 = 64 << 20;
/// Slots per shard that is kept for another node: one complete, one on its way.
const SLOTS: usize = 2;

/// A place for a shard.
pub enum Room {
    /// It is there, complete.
    Held,
    /// Here it can be written.
    Slot(Arc<Slot>),
}

/// Finds or makes room of `need` bytes for what `label` says in one of the slots of this name. The step `base` stays: it is what
/// everybody would go back to. `resumes` tells a slot that an earlier attempt has begun with the same.
///
/// # Errors
/// A sentence, for people.
pub fn room(
    (directory, name, mapped): (&Path, &str, &Mapped),
    label: Label,
    need: u64,
    base: Option<u64>,
    resumes: impl Fn(&Slot) -> bool,
) -> Result<Room, String> {
    let path = |i| directory.join(format!("{name}-slot-{i}"));
    let slots: Vec<(PathBuf, Option<Arc<Slot>>)> =
        (0..SLOTS).map(path).map(|p| (p.clone(), mapped.open(&p).ok())).collect();
    // What is of another run is as good as empty.
    let labelled = |s: &Option<Arc<Slot>>| s.as_ref().and_then(|s| s.label()).filter(|l| l.run == label.run);
    if slots.iter().any(|(_, s)| labelled(s) == Some(label)) {
        return Ok(Room::Held);
    }
    let age = |l: Label| (l.generation, l.step);
    // A generation that went back may have made a step of the same number again: the later one counts.
    let stays = slots.iter().filter_map(|(_, s)| labelled(s)).filter(|l| Some(l.step) == base).map(age).max();
    let mut free = slots.iter().filter(|(_, s)| stays.is_none() || labelled(s).map(age) != stays);
    let chosen = free.clone().find(|(_, s)| s.as_deref().is_some_and(&resumes));
    // Empty before old before new.
    let chosen = chosen.or_else(|| free.by_ref().min_by_key(|(_, s)| labelled(s).map(age)));
    let (path, _) = chosen.ok_or("no slot")?;
    let more = need.saturating_sub(std::fs::metadata(path).map_or(0, |m| m.len()));
    let free = rustix::fs::statvfs(directory).map_or(0, |s| s.f_bavail * s.f_frsize);
    if more > 0 && more.saturating_add(HEADROOM_BYTES) > free {
        let (need, free) = (need >> 20, free >> 20);
        return Err(format!("a replica of {need} MiB does not fit into this node's shared memory ({free} MiB free)"));
    }
    if more > 0 {
        Slot::reserve(path, need).and_then(|s| s.populate()).map_err(|e| e.to_string())?;
    }
    Ok(Room::Slot(mapped.open(path).map_err(|e| e.to_string())?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use everstep_core::message::Purpose;

    fn label(generation: u64, step: u64) -> Label {
        Label { run: 1, rank: 0, world_size: 2, generation, step, purpose: Purpose::Recovery, shared: false }
    }

    fn arrives(at: &Path, mapped: &Mapped, label: Label, base: Option<u64>) {
        let Room::Slot(slot) = room((at, "peer-0", mapped), label, 16384, base, |_| false).unwrap() else { return };
        assert!(slot.begin());
        slot.describe(label, b"{}", 0).unwrap();
        slot.finish(None);
    }

    fn held(at: &Path, mapped: &Mapped, label: Label) -> bool {
        matches!(room((at, "peer-0", mapped), label, 16384, None, |_| false).unwrap(), Room::Held)
    }

    /// Step 3 is complete here, but not everywhere, when step 4 arrives: what all hold is step 2.
    #[test]
    fn the_step_to_go_back_to_stays() {
        let (at, mapped) = (tempfile::tempdir().unwrap(), Mapped::default());
        for (step, base) in [(2, None), (3, Some(2)), (4, Some(2)), (5, Some(2))] {
            arrives(at.path(), &mapped, label(1, step), base);
            assert!(held(at.path(), &mapped, label(1, 2)) && held(at.path(), &mapped, label(1, step)), "step {step}");
        }
        // Once step 5 is what all hold, step 2 may go, and what comes after stays away from it.
        arrives(at.path(), &mapped, label(1, 6), Some(5));
        assert!(held(at.path(), &mapped, label(1, 5)) && !held(at.path(), &mapped, label(1, 2)));
    }

    /// Generation 2 went back to step 5 and made step 6 again.
    #[test]
    fn of_two_with_the_same_number_the_later_generations_stays() {
        let (at, mapped) = (tempfile::tempdir().unwrap(), Mapped::default());
        arrives(at.path(), &mapped, label(1, 6), None);
        arrives(at.path(), &mapped, label(2, 6), Some(5));
        arrives(at.path(), &mapped, label(2, 7), Some(6));
        assert!(held(at.path(), &mapped, label(2, 6)) && held(at.path(), &mapped, label(2, 7)));
    }
}
