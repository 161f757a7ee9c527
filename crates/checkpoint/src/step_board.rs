//! The step board: one page of atomics per worker. The worker writes it with plain stores (no
//! system call in the training loop), and its agent reads it. In the other direction, the agent
//! writes the words that are marked "From the agent", and the text of the last failure.

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
    /// Constant that identifies the page as a step board.
    Magic = 0,
    /// Generation of the worker that writes.
    Generation = 1,
    /// 1 once the worker has attached (`import everstep`, first call).
    Attached = 2,
    /// 1 once `Step` is valid.
    StepKnown = 3,
    /// Steps completed.
    Step = 4,
    /// Rises with every step, heartbeat and change of section.
    Beats = 5,
    /// Duration of the last step.
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
    /// Rises while the interpreter lock can be acquired.
    InterpreterTicks = 16,
    /// Rises when the main thread is seen at another place in the code.
    StackChanges = 17,
    /// Step that was restored (0 for a fresh start); steps beyond it are new.
    Restored = 18,
    /// 1 once the script is known to set variables that are read when torch is imported.
    WarmUnsafe = 19,
    /// 1 when steps are observed from outside: the script itself reports nothing.
    ZeroLine = 20,
    /// 1 when TERM only sets a flag in the worker.
    FlagsStop = 21,
    /// 1 once the worker writes its stacks on request.
    Stacks = 22,
    /// The end of the script: 1 once its interpreter shuts down, 2 once `os._exit` is called during
    /// the shutdown; 3 once `os._exit(0)` is called before that; 256 plus its exit code once the
    /// interpreter of a script that has failed shuts down.
    ShuttingDown = 23,
    /// From the agent: wait at the end of this step, plus 1, for the next world; 0: continue.
    HoldAt = 28,
    /// From the agent: number of the signal with which the job is stopping; 0 if it is not.
    StopRequested = 24,
    /// From the agent: stop at the end of this step, plus 1; 0 for as soon as possible.
    StopAt = 27,
    /// From the agent: newest step known to be durable, plus 1.
    Durable = 25,
    /// From the agent: persist the snapshot of this step, plus 1.
    PersistAt = 26,
    /// From the agent: capture multiples of the low [`EVERY_BITS`] bits, from the step in the other
    /// bits on; 0: each step.
    SnapshotEvery = 35,
    /// State of the training network: see [`Network`].
    Network = 29,
    /// When the network is expected to be used again, on the monotonic clock.
    IdleUntil = 30,
    /// Rises with every idle span that begins.
    IdleSpans = 31,
    /// When the innermost section was entered (monotonic); 0 outside of sections.
    SectionSince = 36,
    /// Kind of the innermost section: a [`Section`].
    SectionKind = 37,
    /// Total time in completed sections of the script.
    EvalNanos = 38,
    /// Total time in completed sections for checkpoints.
    SaveNanos = 39,
    /// Total time in completed sections for restoring.
    RestoreNanos = 40,
    /// Total time in completed sections in which the loop waited for data.
    DataNanos = 41,
    /// When the last step was completed (monotonic).
    StepAt = 42,
    /// Rises while the interpreter lock can be acquired at once: no thread runs Python.
    FreeTicks = 43,
    /// Role of the rank: ranks with the same parameters (one pipeline stage) have the same number;
    /// 0: unknown.
    Role = 44,
    /// 1 while the loop waits for the copies of its newest step.
    AwaitsCopies = 33,
    /// 1: one part of a copy in flight at a time (Gemini's scheme without its pipeline, to measure
    /// it).
    OneBuffer = 34,
    /// From the agent: newest step that all nodes have with its copies, plus 1.
    Replicated = 32,
    /// From the agent: number of checkpoints that could not be made durable; see
    /// [`Board::note_failure`].
    PersistFailures = 45,
    /// From the agent: the step of the last checkpoint that could not be made durable.
    FailedStep = 46,
    /// 1: `Step` and `Restored` are the training's own numbers; 0: steps are counted since the
    /// process started.
    Numbered = 47,
    /// The process that writes, see [`Board::claim`]: its number in the low 32 bits, and its start
    /// time; 0: not claimed yet.
    Worker = 48,
    /// Total number of steps that the script is to complete; 0: unknown.
    Total = 49,
    /// Backward passes since the last completed step.
    Passes = 50,
    /// The pid namespace of the process that has claimed the page; 0: unknown.
    PidNamespace = 51,
}

/// Kinds of sections, for the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Evaluation, or anything else that the script names.
    Eval = 1,
    /// Waiting for a checkpoint.
    Save = 2,
    /// Reading a checkpoint.
    Restore = 3,
    /// Waiting for data.
    Data = 4,
    /// The process is ending; its time is not added to any total.
    Exit = 5,
}

impl Section {
    /// Returns the kind of the section with this name.
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

    /// Returns the word with the total time of this kind; `None` for [`Section::Exit`].
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

/// Number of low bits of [`Word::SnapshotEvery`] that hold the interval.
pub const EVERY_BITS: u32 = 20;

/// When copies of checkpoints may use the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// At an even rate, because the collectives are not observed.
    Unseen = 0,
    /// Little by little between collectives, while they are being profiled.
    Learning = 1,
    /// In the idle spans.
    Known = 2,
    /// At any time.
    Open = 3,
}

/// Returns the nanoseconds on the clock that all processes of a machine share (that of Python's
/// `perf_counter_ns`).
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

    /// Makes this process the worker of this page; its agent ignores all others. Returns false if
    /// another process has claimed it, has not ended, and has restored or completed a step: a
    /// script may start programs that use everstep, too. If a launched program starts the script,
    /// the script gets the page, even if that program has imported torch.
    #[must_use]
    pub fn claim(&self) -> bool {
        let (own, word) = (process::this(), self.map.word(Word::Worker as usize * 8));
        let trains = self.get(Word::StepKnown) == 1;
        let free = |known: u64| (known == own || !trains || !process::lives(known)).then_some(own);
        let Ok(before) = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) else { return false };
        self.set(Word::PidNamespace, process::namespace());
        if before != 0 && before != own {
            // The state of the earlier process at its end does not apply to this one.
            let of_its_end = [Word::ShuttingDown, Word::Total, Word::Passes];
            for word in of_its_end.into_iter().chain([Word::SectionDepth, Word::SectionTimeout, Word::SectionSince]) {
                self.set(word, 0);
            }
        }
        true
    }

    /// Returns whether this process, which has claimed the page, is still its worker; false in a
    /// forked child.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        // No other process can have claimed it with this number in the meantime.
        self.is_of(std::process::id())
    }

    /// Returns whether the process that has claimed the page has not ended. `None` if the page is
    /// not claimed, or if this process cannot know: in another pid namespace (a container), the
    /// number means another process, or none.
    #[must_use]
    pub fn worker_lives(&self) -> Option<bool> {
        let worker = self.get(Word::Worker);
        let namespace = self.get(Word::PidNamespace);
        let known = process::is_complete(worker) && namespace != 0 && namespace == process::namespace();
        known.then(|| process::lives(worker))
    }

    /// Returns the number of the process that has claimed the page; 0 if it is not claimed.
    #[must_use]
    pub fn worker(&self) -> u32 {
        process::number(self.get(Word::Worker))
    }

    /// Returns whether the process that has claimed the page has this number; false also if the
    /// page is not claimed.
    #[must_use]
    pub fn is_of(&self, pid: u32) -> bool {
        self.worker() == pid
    }

    /// Returns the value of a word.
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

    /// Records that a checkpoint could not be made durable. Called by the agent.
    pub fn note_failure(&self, step: u64, why: &str) {
        let end = (0..=FAILURE_BYTES.min(why.len())).rev().find(|end| why.is_char_boundary(*end));
        let text = why.get(..end.unwrap_or(0)).unwrap_or_default();
        // Readers read the count first and last: a text that changes meanwhile is read again.
        let _ = self.map.store(FAILURE_AT + 8, &[text.as_bytes()]);
        self.map.word(FAILURE_AT).store(text.len() as u64, Ordering::Release);
        self.set(Word::FailedStep, step);
        self.add(Word::PersistFailures, 1);
    }

    /// Returns how many checkpoints could not be made durable, and the step and the cause of the
    /// last one.
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

    /// Announces that a step is sealed, and wakes the agent. Called by the capture, not by the
    /// training loop.
    pub fn announce_sealed(&self, step: u64) {
        self.set(Word::Sealed, step + 1);
        self.wake(Word::Sealed);
    }

    /// Waits until `Sealed` differs from `seen`, or `patience` is over; returns its value.
    #[must_use]
    pub fn await_sealed(&self, seen: u64, patience: Duration) -> u64 {
        if self.get(Word::Sealed) == seen {
            self.wait(Word::Sealed, seen, patience);
        }
        self.get(Word::Sealed)
    }

    /// Returns the half of a word that changes; the kernel waits on 32 bits.
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

    /// Returns when copies may use the training network.
    #[must_use]
    pub fn network(&self) -> Network {
        match self.get(Word::Network) {
            1 => Network::Learning,
            2 => Network::Known,
            3 => Network::Open,
            _ => Network::Unseen,
        }
    }

    /// Announces that the network is idle, probably until `until` (monotonic nanoseconds), and
    /// wakes threads that wait for it.
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

    /// Returns the name of the innermost section; empty in the training loop.
    #[must_use]
    pub fn section(&self) -> String {
        let bytes = self.map.load(SECTION_AT, SECTION_BYTES).unwrap_or_default();
        let text: Vec<u8> = bytes.into_iter().take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Changes the innermost section; `name` is empty when the loop continues.
    pub fn enter(&self, name: &str) {
        let now = monotonic();
        let since = self.get(Word::SectionSince);
        if let Some(total) = Section::of(self.get(Word::SectionKind)).and_then(Section::total).filter(|_| since > 0) {
            // First its end, then its duration: a reader in between misses it for a moment and does
            // not count it twice.
            self.set(Word::SectionSince, 0);
            self.add(total, now.saturating_sub(since));
        }
        self.set(Word::SectionKind, if name.is_empty() { 0 } else { Section::named(name) as u64 });
        self.set(Word::SectionSince, if name.is_empty() { 0 } else { now });
        self.set_section(name);
    }

    /// Returns the nanoseconds in sections of this kind so far, including the current one.
    #[must_use]
    pub fn time_in(&self, section: Section) -> u64 {
        let (since, kind) = (self.get(Word::SectionSince), self.get(Word::SectionKind));
        let now = if since > 0 && kind == section as u64 { monotonic().saturating_sub(since) } else { 0 };
        section.total().map_or(0, |word| self.get(word)) + now
    }

    /// Sets the name of the innermost section, cut to the available length.
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
