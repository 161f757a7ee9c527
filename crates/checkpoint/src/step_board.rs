//! The step board: one page of atomics per worker. The worker writes it with plain stores (no
//! system call in the training loop), its agent reads it; three words go the other way.

use crate::memory::Memory;
use crate::process;
use crate::shm::Mapping;
use rustix::thread::{Timespec, futex};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const MAGIC: u64 = 0x6472_616f_6270_6574; // "tepboard"
const BOARD_BYTES: u64 = 4096;
const SECTION_AT: usize = 512;
const SECTION_BYTES: usize = 64;
/// Why a checkpoint could not be made durable: length, then text.
const FAILURE_AT: usize = 1024;
const FAILURE_BYTES: usize = 1024;

/// A word of the board. All are unsigned; times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Identifies the page.
    Magic = 0,
    /// Generation of the worker that writes.
    Generation = 1,
    /// 1 once the worker has attached (`import everstep`, first call).
    Attached = 2,
    /// 1 once `Step` means something.
    StepKnown = 3,
    /// Steps completed.
    Step = 4,
    /// Rises with every step, heartbeat and change of section.
    Beats = 5,
    /// Length of the last step.
    StepNanos = 6,
    /// Time of the last step spent computing (not waiting for other ranks).
    ComputeNanos = 7,
    /// Time of the last step spent waiting in collectives.
    WaitNanos = 8,
    /// 1 while in a collective.
    CommBusy = 9,
    /// Depth of sections; 0 is the training loop itself.
    SectionDepth = 10,
    /// Timeout of the innermost section in milliseconds; 0 for none.
    SectionTimeout = 11,
    /// Newest step sealed in memory, plus 1; 0 for none.
    Sealed = 12,
    /// Time that captures have blocked the loop, in total.
    BlockingNanos = 13,
    /// Time that the fence has waited, in total.
    FenceNanos = 14,
    /// Captures skipped because every slot was in use.
    Skipped = 15,
    /// Rises while the interpreter lock can be had.
    InterpreterTicks = 16,
    /// Rises when the main thread is seen at another place.
    StackChanges = 17,
    /// Step that was restored (0 for a fresh start); steps beyond it are new.
    Restored = 18,
    /// 1 once the script is known to set variables that are read when torch is imported.
    WarmUnsafe = 19,
    /// 1 when steps are seen from outside: the script itself tells nothing.
    ZeroLine = 20,
    /// 1 when TERM only sets a flag in the worker.
    FlagsStop = 21,
    /// 1 once the worker writes down its stacks when it is asked to.
    Stacks = 22,
    /// The script is over: 1 once its interpreter shuts down, 2 once something called `os._exit` in
    /// that; 3 once something called `os._exit(0)` before that; 256 and its exit code once the
    /// interpreter of a script that has failed shuts down.
    ShuttingDown = 23,
    /// From the agent: wait at the end of this step, plus 1, for the next world; 0: go on.
    HoldAt = 28,
    /// From the agent: the job is stopping; the signal's number.
    StopRequested = 24,
    /// From the agent: stop at the end of this step, plus 1; 0 for as soon as possible.
    StopAt = 27,
    /// From the agent: newest step known to be durable, plus 1.
    Durable = 25,
    /// From the agent: persist the snapshot of this step, plus 1.
    PersistAt = 26,
    /// From the agent: capture multiples of the low [`EVERY_BITS`] bits, from the step in the
    /// others on; 0: each step.
    SnapshotEvery = 35,
    /// What is known of the training network: see [`Network`].
    Network = 29,
    /// When the network is expected to be used again, on the monotonic clock.
    IdleUntil = 30,
    /// Rises with every idle span that begins.
    IdleSpans = 31,
    /// When the innermost section was entered (monotonic); 0 outside of sections.
    SectionSince = 36,
    /// What the innermost section is: a [`Section`].
    SectionKind = 37,
    /// Time in sections of the script that are over, in total.
    EvalNanos = 38,
    /// The same for checkpoints.
    SaveNanos = 39,
    /// The same for restoring.
    RestoreNanos = 40,
    /// Time that the loop has waited for data, in total.
    DataNanos = 41,
    /// When the last step was complete (monotonic).
    StepAt = 42,
    /// Rises while the interpreter lock can be had at once: nobody runs Python.
    FreeTicks = 43,
    /// What it does: ranks that hold the same parameters (one pipeline stage) have the same number;
    /// 0: not known.
    Role = 44,
    /// 1 while the loop waits for the copies of its newest step.
    AwaitsCopies = 33,
    /// 1: one part of a copy under way at a time (Gemini's scheme without its pipeline, to measure
    /// it).
    OneBuffer = 34,
    /// From the agent: newest step that all nodes hold with its copies, plus 1.
    Replicated = 32,
    /// From the agent: checkpoints that could not be made durable; see [`Board::note_failure`].
    PersistFailures = 45,
    /// From the agent: the step of the last one of them.
    FailedStep = 46,
    /// 1: `Step` and `Restored` are the training's own numbers; 0: steps are counted since the
    /// process started.
    Numbered = 47,
    /// The process that writes, see [`Board::claim`]: its number in the low 32 bits, and when it
    /// was started; 0: nobody yet.
    Worker = 48,
    /// Steps that the script is to complete in all; 0: not known.
    Total = 49,
    /// Backward passes since the last completed step.
    Passes = 50,
    /// The pid namespace of the process that has claimed the page; 0: not known.
    PidNamespace = 51,
}

/// What a section is, for the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Evaluation, or anything else that the script names.
    Eval = 1,
    /// Waiting for a checkpoint.
    Save = 2,
    /// Reading one.
    Restore = 3,
    /// Waiting for data.
    Data = 4,
    /// Taking the process down: nothing of its own.
    Exit = 5,
}

impl Section {
    /// By its name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        match name {
            "checkpoint" | "regroup" => Section::Save,
            "restore" => Section::Restore,
            "data" => Section::Data,
            "exit" => Section::Exit,
            _ => Section::Eval,
        }
    }

    fn of(kind: u64) -> Option<Self> {
        [Section::Eval, Section::Save, Section::Restore, Section::Data, Section::Exit]
            .into_iter()
            .find(|s| *s as u64 == kind)
    }

    /// Where its time is summed up.
    fn total(self) -> Option<Word> {
        match self {
            Section::Eval => Some(Word::EvalNanos),
            Section::Save => Some(Word::SaveNanos),
            Section::Restore => Some(Word::RestoreNanos),
            Section::Data => Some(Word::DataNanos),
            Section::Exit => None,
        }
    }
}

/// Low bits of [`Word::SnapshotEvery`].
pub const EVERY_BITS: u32 = 20;

/// When copies of checkpoints may use the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Nobody sees the collectives: evenly.
    Unseen = 0,
    /// Profiling: little by little, between collectives.
    Learning = 1,
    /// In the idle spans.
    Known = 2,
    /// At any time.
    Open = 3,
}

/// Nanoseconds on the clock that all processes of a machine share (as Python's `perf_counter_ns`).
#[must_use]
pub fn monotonic() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// One worker's page.
#[derive(Debug)]
pub struct Board {
    map: Mapping,
}

impl Board {
    /// Makes a fresh page for a new worker.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(path: &Path, generation: u64) -> io::Result<Self> {
        everstep_wire::private::remove(path)?;
        let board = Board { map: Mapping::create(path, BOARD_BYTES)? };
        board.set(Word::Generation, generation);
        board.set(Word::Magic, MAGIC);
        Ok(board)
    }

    /// Opens an existing page.
    ///
    /// # Errors
    /// Those of the file system; `InvalidData` when it is not a step board.
    pub fn open(path: &Path) -> io::Result<Self> {
        let map = Mapping::open(path)?;
        if map.len() as u64 != BOARD_BYTES || map.word(0).load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} is not a step board", path.display())));
        }
        Ok(Board { map })
    }

    /// Makes this process the worker that this page is of; its agent believes nobody else. False if
    /// another process is, has not ended, and has restored or completed a step: a script may start
    /// programs that use everstep, too. Where a launched program starts the script, the script gets
    /// it, even if that program has imported torch.
    #[must_use]
    pub fn claim(&self) -> bool {
        let (own, word) = (process::this(), self.map.word(Word::Worker as usize * 8));
        let trains = self.get(Word::StepKnown) == 1;
        let free = |known: u64| (known == own || !trains || !process::lives(known)).then_some(own);
        let Ok(before) = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) else { return false };
        self.set(Word::PidNamespace, process::namespace());
        if before != 0 && before != own {
            // What the earlier process was doing when it ended says nothing about this one.
            let of_its_end = [Word::ShuttingDown, Word::Total, Word::Passes];
            for word in of_its_end.into_iter().chain([Word::SectionDepth, Word::SectionTimeout, Word::SectionSince]) {
                self.set(word, 0);
            }
        }
        true
    }

    /// Whether this process, which has claimed the page, is still the one that it is of; false in a
    /// forked child.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        // No other process can have claimed it with this number since.
        self.is_of(std::process::id())
    }

    /// Whether the process that has claimed the page has not ended. `None` if nobody has claimed
    /// it, or if this process cannot tell: the number means another process, or none, in another
    /// pid namespace (a container).
    #[must_use]
    pub fn worker_lives(&self) -> Option<bool> {
        let worker = self.get(Word::Worker);
        let namespace = self.get(Word::PidNamespace);
        let known = process::is_complete(worker) && namespace != 0 && namespace == process::namespace();
        known.then(|| process::lives(worker))
    }

    /// The number of the process that has claimed the page; 0 if nobody has.
    #[must_use]
    pub fn worker(&self) -> u32 {
        process::number(self.get(Word::Worker))
    }

    /// Whether the process that has claimed the page has this number; false also if nobody has.
    #[must_use]
    pub fn is_of(&self, pid: u32) -> bool {
        self.worker() == pid
    }

    /// Reads a word.
    #[must_use]
    pub fn get(&self, word: Word) -> u64 {
        self.map.word(word as usize * 8).load(Ordering::Acquire)
    }

    /// Writes a word.
    pub fn set(&self, word: Word, value: u64) {
        self.map.word(word as usize * 8).store(value, Ordering::Release);
    }

    /// Adds to a word.
    pub fn add(&self, word: Word, value: u64) {
        self.map.word(word as usize * 8).fetch_add(value, Ordering::AcqRel);
    }

    /// A checkpoint could not be made durable. Called by the agent.
    pub fn note_failure(&self, step: u64, why: &str) {
        let end = (0..=FAILURE_BYTES.min(why.len())).rev().find(|end| why.is_char_boundary(*end));
        let text = why.get(..end.unwrap_or(0)).unwrap_or_default();
        // Readers look at the count first and last: a sentence that changes meanwhile is read
        // again.
        let _ = self.map.store(FAILURE_AT + 8, &[text.as_bytes()]);
        self.map.word(FAILURE_AT).store(text.len() as u64, Ordering::Release);
        self.set(Word::FailedStep, step);
        self.add(Word::PersistFailures, 1);
    }

    /// How many checkpoints could not be made durable, and the step and the cause of the last one.
    #[must_use]
    pub fn failure(&self) -> (u64, u64, String) {
        loop {
            let count = self.get(Word::PersistFailures);
            let bytes = usize::try_from(self.map.word(FAILURE_AT).load(Ordering::Acquire)).unwrap_or(0);
            let text = self.map.load(FAILURE_AT + 8, bytes.min(FAILURE_BYTES)).unwrap_or_default();
            let step = self.get(Word::FailedStep);
            if count == self.get(Word::PersistFailures) {
                return (count, step, String::from_utf8_lossy(&text).into_owned());
            }
        }
    }

    /// A step is sealed: says so, and wakes the agent. Called by the capture, not by the training
    /// loop.
    pub fn announce_sealed(&self, step: u64) {
        self.set(Word::Sealed, step + 1);
        self.wake(Word::Sealed);
    }

    /// Waits until `Sealed` differs from `seen`, or `patience` is over; returns what it is then.
    #[must_use]
    pub fn await_sealed(&self, seen: u64, patience: Duration) -> u64 {
        if self.get(Word::Sealed) == seen {
            self.wait(Word::Sealed, seen, patience);
        }
        self.get(Word::Sealed)
    }

    /// The half of a word that changes; the kernel waits on 32 bits.
    fn low(&self, word: Word) -> &AtomicU32 {
        self.map.half_word(word as usize * 8)
    }

    fn wake(&self, word: Word) {
        let _ = futex::wake(self.low(word), futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Waits while the word is `seen`, for less than a second.
    fn wait(&self, word: Word, seen: u64, patience: Duration) {
        let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(patience.subsec_nanos()) };
        let low = u32::try_from(seen & u64::from(u32::MAX)).unwrap_or(0);
        let _ = futex::wait(self.low(word), futex::Flags::empty(), low, Some(&patience));
    }

    /// What is known of the training network.
    #[must_use]
    pub fn network(&self) -> Network {
        match self.get(Word::Network) {
            1 => Network::Learning,
            2 => Network::Known,
            3 => Network::Open,
            _ => Network::Unseen,
        }
    }

    /// The network falls idle, probably until `until` (monotonic nanoseconds): wakes who waits for
    /// that.
    pub fn announce_idle(&self, until: u64) {
        self.set(Word::IdleUntil, until);
        self.set(Word::CommBusy, 0);
        self.add(Word::IdleSpans, 1);
        self.wake(Word::IdleSpans);
    }

    /// Waits until an idle span begins that is not the `seen`th, or `patience` is over.
    pub fn await_idle(&self, seen: u64, patience: Duration) {
        self.wait(Word::IdleSpans, seen, patience);
    }

    /// Name of the innermost section; empty in the training loop.
    #[must_use]
    pub fn section(&self) -> String {
        let bytes = self.map.load(SECTION_AT, SECTION_BYTES).unwrap_or_default();
        let text: Vec<u8> = bytes.into_iter().take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// The innermost section changes; `name` is empty when the loop goes on.
    pub fn enter(&self, name: &str) {
        let now = monotonic();
        let since = self.get(Word::SectionSince);
        if let Some(total) = Section::of(self.get(Word::SectionKind)).and_then(Section::total).filter(|_| since > 0) {
            // First that it is over, then how long it was: a look in between misses it for a moment
            // and does not count it twice.
            self.set(Word::SectionSince, 0);
            self.add(total, now.saturating_sub(since));
        }
        self.set(Word::SectionKind, if name.is_empty() { 0 } else { Section::named(name) as u64 });
        self.set(Word::SectionSince, if name.is_empty() { 0 } else { now });
        self.set_section(name);
    }

    /// Nanoseconds in sections of this kind so far, the one at hand included.
    #[must_use]
    pub fn time_in(&self, section: Section) -> u64 {
        let (since, kind) = (self.get(Word::SectionSince), self.get(Word::SectionKind));
        let now = if since > 0 && kind == section as u64 { monotonic().saturating_sub(since) } else { 0 };
        section.total().map_or(0, |word| self.get(word)) + now
    }

    /// Sets the name of the innermost section, cut to what fits.
    pub fn set_section(&self, name: &str) {
        let mut bytes = [0u8; SECTION_BYTES];
        let n = name.len().min(SECTION_BYTES - 1);
        bytes[..n].copy_from_slice(&name.as_bytes()[..n]);
        let _ = self.map.store(SECTION_AT, &[&bytes]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("board");
        let worker = Board::create(&path, 7).unwrap();
        let agent = Board::open(&path).unwrap();
        worker.set(Word::Step, 42);
        worker.set_section(&"ü".repeat(60));
        worker.enter("restore");
        worker.enter("");
        assert!(agent.time_in(Section::Restore) > 0 && agent.time_in(Section::Eval) == 0);
        worker.set_section(&"ü".repeat(60));
        agent.set(Word::StopRequested, 15);
        assert_eq!((agent.get(Word::Step), agent.get(Word::Generation)), (42, 7));
        assert!(agent.section().starts_with("üü") && agent.section().len() <= 66);
        assert_eq!(worker.get(Word::StopRequested), 15);
        std::fs::write(&path, [0u8; 4096]).unwrap();
        assert!(Board::open(&path).is_err());
    }

    #[test]
    fn a_worker_is_known_to_have_ended_only_if_it_can_be_seen() {
        let dir = tempfile::tempdir().unwrap();
        let board = Board::create(&dir.path().join("board"), 7).unwrap();
        assert_eq!((board.worker_lives(), board.is_mine()), (None, false), "nobody has claimed it");
        assert!(board.claim() && board.is_mine());
        assert_eq!(board.worker_lives(), Some(true));
        let own = board.get(Word::Worker);
        board.set(Word::Worker, own ^ (1 << 32));
        assert_eq!(board.worker_lives(), Some(false), "another process had this number");
        board.set(Word::PidNamespace, board.get(Word::PidNamespace) + 1);
        assert_eq!(board.worker_lives(), None, "in another namespace");
        board.set(Word::PidNamespace, 0);
        assert_eq!(board.worker_lives(), None);
        assert!(board.claim());
        board.set(Word::Worker, own & u64::from(u32::MAX));
        assert_eq!(board.worker_lives(), None, "not known when it was started");
    }
}
