//! Chooses the slot for an arriving copy, and checks that there is memory for it.

use super::refusal::Refusal;
use crate::arena::{Label, Slot};
use crate::mapped::Mapped;
use crate::slot_reuse::{Candidate, reusable};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of memory that are always left to other programs.
const HEADROOM_BYTES: u64 = 64 << 20;
/// Slots per shard that is kept for another node: one complete, one arriving.
const SLOTS: usize = 2;

/// The slot for a shard.
pub enum ReceiveSlot {
    /// The shard is complete here already.
    Held,
    /// The shard can be written here.
    Slot(Arc<Slot>),
}

/// Slots of one name, for one shard or parity shard.
#[derive(Clone, Copy, Debug)]
pub struct NamedSlots<'a> {
    /// Directory of the slots.
    pub directory: &'a Path,
    /// Beginning of the slots' names.
    pub name: &'a str,
    /// Mappings of the slots that are open.
    pub mapped: &'a Mapped,
}

impl NamedSlots<'_> {
    /// Chooses one of these slots for the shard with this `label`, and reserves `need` bytes. A
    /// slot with the step `base` is kept, because all ranks would return to that step. `resumes`
    /// recognizes a slot in which an earlier attempt has begun the same shard.
    ///
    /// # Errors
    /// [`Refusal`]: no slot may be written, or there is not enough memory.
    pub fn choose(
        &self,
        label: Label,
        need: u64,
        base: Option<u64>,
        resumes: impl Fn(&Slot) -> bool,
    ) -> Result<ReceiveSlot, Refusal> {
        let NamedSlots { directory, name, mapped } = *self;
        let path = |i| directory.join(format!("{name}-slot-{i}"));
        let slots: Vec<(PathBuf, Option<Arc<Slot>>)> =
            (0..SLOTS).map(path).map(|p| (p.clone(), mapped.open(&p).ok())).collect();
        // A slot of another run counts as empty.
        let labelled = |s: &Option<Arc<Slot>>| s.as_ref().and_then(|s| s.label()).filter(|l| l.run == label.run);
        if slots.iter().any(|(_, s)| labelled(s) == Some(label)) {
            return Ok(ReceiveSlot::Held);
        }
        let age = |l: Label| (l.generation, l.step);
        // A generation that went back may have repeated a step with the same number. The later one
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
            return Err(Refusal::TooLittleMemory { need, free });
        }
        if more > 0 {
            Slot::reserve(path, need).and_then(|s| s.populate())?;
        }
        Ok(ReceiveSlot::Slot(mapped.open(path)?))
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
        let named = NamedSlots { directory: at, name: "peer-0", mapped };
        let ReceiveSlot::Slot(slot) = named.choose(label, 16384, base, |_| false).unwrap() else { return };
        // SAFETY: the test is the only user of the slot.
        let slot = unsafe { slot.begin() }.unwrap();
        slot.describe(label, b"{}", 0).unwrap();
        slot.seal(None);
    }

    fn held(at: &Path, mapped: &Mapped, label: Label) -> bool {
        let named = NamedSlots { directory: at, name: "peer-0", mapped };
        matches!(named.choose(label, 16384, None, |_| false).unwrap(), ReceiveSlot::Held)
    }

    /// Step 3 is complete here, but not on all nodes, when step 4 arrives: all nodes have step 2.
    #[test]
    fn the_step_to_go_back_to_stays() {
        let (at, mapped) = (tempfile::tempdir().unwrap(), Mapped::default());
        for (step, base) in [(2, None), (3, Some(2)), (4, Some(2)), (5, Some(2))] {
            arrives(at.path(), &mapped, label(1, step), base);
            assert!(held(at.path(), &mapped, label(1, 2)) && held(at.path(), &mapped, label(1, step)), "step {step}");
        }
        // Once all nodes hold step 5, step 2 may be overwritten, and step 5 may not.
        arrives(at.path(), &mapped, label(1, 6), Some(5));
        assert!(held(at.path(), &mapped, label(1, 5)) && !held(at.path(), &mapped, label(1, 2)));
    }

    /// Generation 2 went back to step 5 and completed step 6 again.
    #[test]
    fn of_two_with_the_same_number_the_later_generations_stays() {
        let (at, mapped) = (tempfile::tempdir().unwrap(), Mapped::default());
        arrives(at.path(), &mapped, label(1, 6), None);
        arrives(at.path(), &mapped, label(2, 6), Some(5));
        arrives(at.path(), &mapped, label(2, 7), Some(6));
        assert!(held(at.path(), &mapped, label(2, 6)) && held(at.path(), &mapped, label(2, 7)));
    }
}
