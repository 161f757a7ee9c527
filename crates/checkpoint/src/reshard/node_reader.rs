//! Ranks of one node read a checkpoint together: each chunk is read and verified once, by one of
//! them, into a window of memory that all have mapped, and every rank takes its parts from there.
//!
//! ```text
//!  chunks that some rank needs   0 1 2 3 4 5 6 7 …      dealt to the readers of all ranks in turn
//!  window                        [4][5][2][3]           chunk n lies in place n mod W; it goes there when all who wanted
//!                                                       chunk n − W have taken their parts
//! ```
//!
//! All ranks process the chunks in the same order, so a rank that is behind can always proceed: no
//! rank waits forever as long as all processes live, and the death of one is detected.

use super::whole::{Whole, WholeError};
use crate::format::digest::CHUNK_BYTES;
use crate::memory::Memory;
use crate::process;
use crate::restore::Target;
use crate::shm::Mapping;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of reads of one rank in flight.
const READERS: usize = 2;
/// The head of the window: one page. Its words are: whether a rank has failed, how many have
/// joined; then two for each place.
const HEAD_BYTES: usize = 4096;
const FAILED: usize = 0;
const JOINED: usize = 8;
const PLACES: usize = 64;
/// Maximum number of places, limited by the words of the head.
const PLACES_MAX: usize = (HEAD_BYTES - PLACES) / 16;
const NAP: Duration = Duration::from_micros(50);
/// Number of naps between checks that the other processes live.
const LOOK: u32 = 2000;

/// Number of a shard, and a range of its chunks.
pub type Chunks = (u32, Range<usize>);

/// A rank that takes part.
#[derive(Clone, Debug)]
pub struct Member {
    /// Process id of the rank.
    pub pid: i32,
    /// Chunks that the rank needs.
    pub wants: Vec<Chunks>,
}

/// Memory that the ranks of a node share while they read.
#[derive(Debug)]
pub struct Window {
    map: Mapping,
}

impl Window {
    /// Returns the bytes of a window for `data` bytes. A window for the largest tensor is large
    /// enough.
    #[must_use]
    pub fn bytes(data: u64) -> u64 {
        let places = usize::try_from(data / CHUNK_BYTES as u64).unwrap_or(PLACES_MAX).clamp(2, PLACES_MAX);
        (HEAD_BYTES + places * CHUNK_BYTES) as u64
    }

    /// Maps a window that was created at `path`.
    ///
    /// # Errors
    /// Those of the file system; also fails when the window is too small.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let map = Mapping::open_shared(path)?;
        if map.len() < HEAD_BYTES + CHUNK_BYTES {
            return Err(std::io::Error::other("the window is too small"));
        }
        Ok(Window { map })
    }

    fn places(&self) -> usize {
        ((self.map.len() - HEAD_BYTES) / CHUNK_BYTES).min(PLACES_MAX)
    }

    /// Returns the word with the number of the chunk in a place, plus 1.
    fn holds(&self, place: usize) -> &AtomicU64 {
        self.map.word(PLACES + place * 16)
    }

    /// Returns the word with the number of ranks that have not yet taken their parts of a place.
    fn left(&self, place: usize) -> &AtomicU64 {
        self.map.word(PLACES + place * 16 + 8)
    }

    fn data(place: usize) -> usize {
        HEAD_BYTES + place * CHUNK_BYTES
    }
}

/// A chunk that some rank needs.
struct Wanted {
    shard: u32,
    chunk: usize,
    users: u64,
    mine: bool,
}

fn chunks(members: &[Member], me: usize) -> Vec<Wanted> {
    let mut users: BTreeMap<(u32, usize), (u64, bool)> = BTreeMap::new();
    for (n, member) in members.iter().enumerate() {
        for (shard, range) in &member.wants {
            for chunk in range.clone() {
                let (count, mine) = users.entry((*shard, chunk)).or_default();
                *count += 1;
                *mine |= n == me;
            }
        }
    }
    users.into_iter().map(|((shard, chunk), (users, mine))| Wanted { shard, chunk, users, mine }).collect()
}

/// One rank's part in the common read.
struct Party<'a> {
    whole: &'a Whole,
    window: &'a Window,
    members: &'a [Member],
    chunks: &'a [Wanted],
}

impl Party<'_> {
    /// Waits until `done`, or fails if another rank has failed or its process has ended.
    fn wait(&self, done: impl Fn() -> bool) -> Result<(), WholeError> {
        let failed = || self.window.map.word(FAILED).load(Ordering::Acquire) != 0;
        self.wait_for_the_living(|| done() || failed())?;
        if done() {
            return Ok(());
        }
        Err(WholeError::Together("another rank of this node could not read its part".into()))
    }

    /// Waits until `done`, or fails if the process of a rank has ended.
    fn wait_for_the_living(&self, done: impl Fn() -> bool) -> Result<(), WholeError> {
        let mut naps = 0u32;
        while !done() {
            naps += 1;
            if naps.is_multiple_of(LOOK) {
                for member in self.members {
                    if process::is_gone(member.pid) {
                        let what = format!("process {} on this node is gone", member.pid);
                        return Err(WholeError::Together(what));
                    }
                }
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// Processes the chunks in their order: reads those whose turn (modulo `of`) is in `turns`, and
    /// takes this rank's parts if `targets` are given. Returns the number of bytes that were read.
    ///
    /// All ranks go in the same order, so that the first chunk that is not done can always be done:
    /// one thread may have both tasks.
    ///
    /// # Safety
    /// The same as for [`Whole::read`].
    unsafe fn go(&self, turns: &[usize], of: usize, mut targets: Option<Targets>) -> Result<u64, WholeError> {
        let mut bytes = 0;
        for (n, wanted) in self.chunks.iter().enumerate() {
            if turns.contains(&(n % of)) {
                bytes += self.read(n, wanted)?;
            }
            if let Some(targets) = targets.as_mut().filter(|_| wanted.mine) {
                // SAFETY: the caller keeps the targets writable and guarantees that no other thread
                // uses them.
                unsafe { self.take(n, wanted, targets)? };
            }
        }
        Ok(bytes)
    }

    /// Reads a chunk into its place. Returns its length in bytes.
    fn read(&self, n: usize, wanted: &Wanted) -> Result<u64, WholeError> {
        let places = self.window.places();
        let (place, number) = (n % places, n as u64 + 1);
        let before = (number as usize).checked_sub(places + 1).map_or(0, |n| n as u64 + 1);
        let free = || {
            self.window.holds(place).load(Ordering::Acquire) == before
                && self.window.left(place).load(Ordering::Acquire) == 0
        };
        self.wait(free)?;
        let shard = self.whole.shards().get(wanted.shard as usize);
        let shard = shard.ok_or_else(|| WholeError::Together("ranks do not agree on its shards".into()))?;
        // SAFETY: no other thread uses the place: all users of the chunk before are done, and those
        // of this one wait for it.
        let room = unsafe { self.window.map.slice_mut(Window::data(place), CHUNK_BYTES) };
        let bytes = shard.read_chunk(wanted.chunk, room.map_err(WholeError::Window)?)? as u64;
        self.window.left(place).store(wanted.users, Ordering::Release);
        self.window.holds(place).store(number, Ordering::Release);
        Ok(bytes)
    }

    /// Copies this rank's parts of a chunk to their targets.
    ///
    /// # Safety
    /// The same as for [`Whole::read`].
    unsafe fn take(&self, n: usize, wanted: &Wanted, targets: &mut Targets) -> Result<(), WholeError> {
        let places = self.window.places();
        let (place, number) = (n % places, n as u64 + 1);
        self.wait(|| self.window.holds(place).load(Ordering::Acquire) == number)?;
        let begins = (wanted.chunk * CHUNK_BYTES) as u64;
        let ends = begins + CHUNK_BYTES as u64;
        if let Some((parts, at)) = targets.0.get_mut(&wanted.shard) {
            while parts.get(*at).is_some_and(|t| t.offset + t.bytes <= begins) {
                *at += 1;
            }
            let data = self.window.map.address(Window::data(place), CHUNK_BYTES).map_err(WholeError::Window)?;
            for part in parts.iter().skip(*at).take_while(|t| t.offset < ends) {
                let (from, to) = (part.offset.max(begins), (part.offset + part.bytes).min(ends));
                if from < to {
                    let into = (part.address + (from - part.offset) as usize) as *mut u8;
                    // SAFETY: the chunk stays in its place until all users are done; the caller
                    // keeps the target writable and guarantees that no other thread uses it.
                    unsafe {
                        std::ptr::copy_nonoverlapping(data.add((from - begins) as usize), into, (to - from) as usize);
                    };
                }
            }
        }
        self.window.left(place).fetch_sub(1, Ordering::AcqRel);
        Ok(())
    }
}

/// The parts that a rank needs of each shard, in the order of their offsets, and the index of the
/// first that extends beyond the chunks that have passed.
struct Targets(BTreeMap<u32, (Vec<Target>, usize)>);

impl Targets {
    fn new(parts: BTreeMap<u32, Vec<Target>>) -> Self {
        let sorted = parts.into_iter().map(|(shard, mut parts)| {
            parts.sort_unstable_by_key(|t| t.offset);
            (shard, (parts, 0))
        });
        Targets(sorted.collect())
    }
}

impl Whole {
    /// Returns the chunks that contain some of these parts.
    ///
    /// # Errors
    /// The same as for [`Whole::plan`].
    pub fn chunks_of(&self, wanted: &[super::whole::Wanted]) -> Result<Vec<Chunks>, WholeError> {
        let mut found = Vec::new();
        for (shard, mut targets) in self.plan(wanted)? {
            targets.sort_unstable_by_key(|t| t.offset);
            found.extend(crate::read_plan::touched(&targets).into_iter().map(|range| (shard, range)));
        }
        Ok(found)
    }

    /// Does what [`Whole::read`] does, together with the other ranks of this node, all of which
    /// call it with the same members, each with its own number `me`. Returns the number of bytes
    /// that this rank has read for all.
    ///
    /// # Safety
    /// The same as for [`Whole::read`].
    ///
    /// # Errors
    /// The same as for [`Whole::read`]; also fails when another rank fails or dies.
    pub unsafe fn read_together(
        &self,
        wanted: &[super::whole::Wanted],
        members: &[Member],
        me: usize,
        window: &Window,
    ) -> Result<u64, WholeError> {
        let chunks = chunks(members, me);
        let party = Party { whole: self, window, members, chunks: &chunks };
        window.map.word(JOINED).fetch_add(1, Ordering::AcqRel);
        let of = members.len() * READERS;
        let work = |result: Result<u64, WholeError>| {
            if result.is_err() {
                window.map.word(FAILED).store(1, Ordering::Release);
            }
            result
        };
        let done = std::thread::scope(|scope| {
            let party = &party;
            let (mut readers, mut turns) = (Vec::new(), Vec::new());
            for turn in (me * READERS)..(me * READERS + READERS) {
                // SAFETY: without targets, nothing is copied.
                let read = move || work(unsafe { party.go(&[turn], of, None) });
                match std::thread::Builder::new().name("everstep-read".into()).spawn_scoped(scope, read) {
                    Ok(reader) => readers.push(reader),
                    // If a thread cannot be created, this one reads, too.
                    Err(_) => turns.push(turn),
                }
            }
            // SAFETY: the caller keeps the targets writable and guarantees that no other thread
            // uses them.
            let taken = self.targets(wanted).and_then(|t| unsafe { party.go(&turns, of, Some(Targets::new(t))) });
            let taken = work(taken);
            let panicked = |_| Err(WholeError::Together("a reader panicked".into()));
            let mut results: Vec<_> = readers.into_iter().map(|r| r.join().unwrap_or_else(panicked)).collect();
            results.push(taken);
            results
        });
        // The process that has created the window keeps it until all have opened it, if only to see
        // that one has failed.
        let joined = || window.map.word(JOINED).load(Ordering::Acquire) >= members.len() as u64;
        party.wait_for_the_living(joined)?;
        // An error about damage is more helpful than one about a failure of another rank.
        let (good, mut bad): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
        bad.sort_by_key(|r| matches!(r, Err(WholeError::Together(_))));
        if let Some(Err(first)) = bad.into_iter().next() {
            return Err(first);
        }
        Ok(good.into_iter().flatten().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_several_want_is_read_once() {
        let member = |wants: &[Chunks]| Member { pid: 1, wants: wants.to_vec() };
        let members = [member(&[(0, 0..3), (2, 1..2)]), member(&[(0, 2..4)])];
        let found = chunks(&members, 1);
        let list: Vec<_> = found.iter().map(|w| (w.shard, w.chunk, w.users, w.mine)).collect();
        assert_eq!(list, [(0, 0, 1, false), (0, 1, 1, false), (0, 2, 2, true), (0, 3, 1, true), (2, 1, 1, false)]);
    }

    #[test]
    fn windows_have_places() {
        assert_eq!(Window::bytes(0), (HEAD_BYTES + 2 * CHUNK_BYTES) as u64);
        assert_eq!(Window::bytes(u64::MAX), (HEAD_BYTES + PLACES_MAX * CHUNK_BYTES) as u64);
    }
}
