//! Which slot takes what arrives for another node, and that there is memory for it.

use super::refusal::Refusal;
use crate::arena::{Label, Slot};
use crate::mapped::Mapped;
use crate::reuse::{Candidate, reusable};
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

/// Slots of one name, for one shard or parity shard.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// Where they are.
    pub directory: &'a Path,
    /// What their names begin with.
    pub name: &'a str,
    /// Those that are mapped.
    pub mapped: &'a Mapped,
}

impl Named<'_> {
    /// Finds or makes room of `need` bytes for what `label` says in one of these slots. The step
    /// `base` stays: it is what everybody would go back to. `resumes` tells a slot that an earlier
    /// attempt has begun with the same.
    ///
    /// # Errors
    /// [`Refusal`]: no slot may be written, or there is no room.
    pub fn room(
        &self,
        label: Label,
        need: u64,
        base: Option<u64>,
        resumes: impl Fn(&Slot) -> bool,
    ) -> Result<Room, Refusal> {
        let Named { directory, name, mapped } = *self;
        let path = |i| directory.join(format!("{name}-slot-{i}"));
        let slots: Vec<(PathBuf, Option<Arc<Slot>>)> =
            (0..SLOTS).map(path).map(|p| (p.clone(), mapped.open(&p).ok())).collect();
        // What is of another run is as good as empty.
        let labelled = |s: &Option<Arc<Slot>>| s.as_ref().and_then(|s| s.label()).filter(|l| l.run == label.run);
        if slots.iter().any(|(_, s)| labelled(s) == Some(label)) {
            return Ok(Room::Held);
        }
        let age = |l: Label| (l.generation, l.step);
        // A generation that went back may have made a step of the same number again: the later one
        // counts.
        let stays = slots.iter().filter_map(|(_, s)| labelled(s)).filter(|l| Some(l.step) == base).map(age).max();
        let needed = |s: &Option<Arc<Slot>>| stays.is_some() && labelled(s).map(age) == stays;
        let begun = slots.iter().find(|(_, s)| !needed(s) && s.as_deref().is_some_and(&resumes));
        let all = slots.iter().map(|slot| {
            let (holds, needed) = (labelled(&slot.1).map(age), needed(&slot.1));
            Candidate { slot, holds, needed }
        });
        let chosen = begun.or_else(|| reusable(all));
        let (path, _) = chosen.ok_or(Refusal::NoSlot)?;
        let more = need.saturating_sub(std::fs::metadata(path).map_or(0, |m| m.len()));
        let free = rustix::fs::statvfs(directory).map_or(0, |s| s.f_bavail * s.f_frsize);
        if more > 0 && more.saturating_add(HEADROOM_BYTES) > free {
            return Err(Refusal::Room { need, free });
        }
        if more > 0 {
            Slot::reserve(path, need).and_then(|s| s.populate())?;
        }
        Ok(Room::Slot(mapped.open(path)?))
    }
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
        let named = Named { directory: at, name: "peer-0", mapped };
        let Room::Slot(slot) = named.room(label, 16384, base, |_| false).unwrap() else { return };
        // SAFETY: nobody else uses the slot.
        let slot = unsafe { slot.begin() }.unwrap();
        slot.describe(label, b"{}", 0).unwrap();
        slot.seal(None);
    }

    fn held(at: &Path, mapped: &Mapped, label: Label) -> bool {
        let named = Named { directory: at, name: "peer-0", mapped };
        matches!(named.room(label, 16384, None, |_| false).unwrap(), Room::Held)
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
