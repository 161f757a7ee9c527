//! The step board for Python, and the thread that shows whether the interpreter is responsive.

use crate::error::checkpoint;
use everstep_checkpoint::step_board::{Board, EVERY_BITS, Network, Word, monotonic};
use pyo3::prelude::*;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two attempts to take the interpreter lock.
const PULSE: Duration = Duration::from_millis(200);
/// Longest wait for a lock that is free. A thread that runs Python gives up the lock after 5 ms
/// (`sys.getswitchinterval`); a thread in C code has given it up already.
const AT_ONCE: Duration = Duration::from_millis(2);
/// Number of frames of the main thread that distinguish one place from another.
const FRAMES: usize = 24;

/// One worker's page of atomics. Reads and writes are plain loads and stores.
#[pyclass(name = "Board", frozen)]
pub struct PyBoard {
    pub(crate) board: Arc<Board>,
}

/// The last checkpoint that the agent could not make durable.
#[pyclass(name = "PersistFailure", frozen, get_all)]
pub struct PyPersistFailure {
    /// Number of such checkpoints so far.
    count: u64,
    step: u64,
    why: String,
}

impl PyBoard {
    fn flag(&self, word: Word) -> bool {
        self.board.get(word) != 0
    }

    /// Returns the step from a word that contains it plus 1; `None` for 0.
    fn step_in(&self, word: Word) -> Option<u64> {
        self.board.get(word).checked_sub(1)
    }
}

#[pymethods]
impl PyBoard {
    #[new]
    fn open(path: PathBuf) -> PyResult<Self> {
        Ok(PyBoard { board: Arc::new(Board::open(&path).map_err(checkpoint)?) })
    }

    /// Makes this process the worker that the board belongs to. Returns False if another process is
    /// the worker, and is alive.
    fn claim(&self) -> bool {
        self.board.claim()
    }

    /// Returns whether this process is the worker that the board belongs to.
    fn is_mine(&self) -> bool {
        self.board.is_mine()
    }

    /// Returns the generation of the worker that the board was made for.
    #[getter]
    fn generation(&self) -> u64 {
        self.board.get(Word::Generation)
    }

    /// Returns the number of completed steps.
    #[getter]
    fn step(&self) -> u64 {
        self.board.get(Word::Step)
    }

    #[setter]
    fn set_step(&self, step: u64) {
        self.board.set(Word::Step, step);
    }

    /// Returns the step that training continued from; 0 for a fresh start.
    #[getter]
    fn restored(&self) -> u64 {
        self.board.get(Word::Restored)
    }

    #[setter]
    fn set_restored(&self, step: u64) {
        self.board.set(Word::Restored, step);
    }

    /// Returns whether `step` and `restored` are the training's own numbers. Otherwise they are
    /// counted since the process started.
    #[getter]
    fn numbered(&self) -> bool {
        self.flag(Word::Numbered)
    }

    #[setter]
    fn set_numbered(&self, numbered: bool) {
        self.board.set(Word::Numbered, numbered.into());
    }

    /// Returns the total number of steps that the script is to complete; 0 if unknown.
    #[getter]
    fn total(&self) -> u64 {
        self.board.get(Word::Total)
    }

    #[setter]
    fn set_total(&self, total: u64) {
        self.board.set(Word::Total, total);
    }

    /// Returns the number of this rank's role: ranks with the same parameters have the same one. 0
    /// if unknown.
    #[getter]
    fn role(&self) -> u64 {
        self.board.get(Word::Role)
    }

    #[setter]
    fn set_role(&self, role: u64) {
        self.board.set(Word::Role, role);
    }

    /// Returns whether steps are observed from outside because the script does not report them.
    #[getter]
    fn zero_line(&self) -> bool {
        self.flag(Word::ZeroLine)
    }

    #[setter]
    fn set_zero_line(&self, zero_line: bool) {
        self.board.set(Word::ZeroLine, zero_line.into());
    }

    /// Returns whether the loop waits for the copies of its newest step.
    #[getter]
    fn awaits_copies(&self) -> bool {
        self.flag(Word::AwaitsCopies)
    }

    #[setter]
    fn set_awaits_copies(&self, awaits: bool) {
        self.board.set(Word::AwaitsCopies, awaits.into());
    }

    /// Returns whether only one part of a copy is sent at a time, for measurements.
    #[getter]
    fn one_buffer(&self) -> bool {
        self.flag(Word::OneBuffer)
    }

    #[setter]
    fn set_one_buffer(&self, one_buffer: bool) {
        self.board.set(Word::OneBuffer, one_buffer.into());
    }

    /// Records that the worker uses everstep.
    fn attach(&self) {
        self.board.set(Word::Attached, 1);
    }

    /// Records that the worker writes its stacks on request.
    fn offer_stacks(&self) {
        self.board.set(Word::Stacks, 1);
    }

    /// Records that SIGTERM only sets a flag in this process.
    fn flag_stop_signals(&self) {
        self.board.set(Word::FlagsStop, 1);
    }

    /// Records that a process which imports torch ahead cannot become this one.
    fn forbid_warm_start(&self) {
        self.board.set(Word::WarmUnsafe, 1);
    }

    /// Records that copies may be sent at any time, because the collectives are not watched.
    fn open_network(&self) {
        self.board.set(Word::Network, Network::Open as u64);
    }

    /// Records that the script is over: its interpreter shuts down.
    fn script_over(&self) {
        self.board.set(Word::ShuttingDown, 1);
    }

    /// Records that the script has failed, with its exit code: its interpreter shuts down.
    fn script_failed(&self, exit_code: u8) {
        self.board.set(Word::ShuttingDown, 256 + u64::from(exit_code));
    }

    /// Records that `os._exit` is about to end the process, with status 0 if `clean`.
    fn os_exit(&self, clean: bool) {
        match self.board.get(Word::ShuttingDown) {
            1 => self.board.set(Word::ShuttingDown, 2),
            0 if clean => self.board.set(Word::ShuttingDown, 3),
            _ => {}
        }
    }

    /// Counts a sign of progress that is not a step.
    fn beat(&self) {
        self.board.add(Word::Beats, 1);
    }

    /// Counts a backward pass of the step in progress.
    fn backward_pass(&self) {
        self.board.add(Word::Passes, 1);
    }

    /// Counts a snapshot that was skipped because every slot was in use.
    fn skip_snapshot(&self) {
        self.board.add(Word::Skipped, 1);
    }

    /// Adds to the time in which captures have blocked the loop.
    fn add_blocking(&self, nanos: u64) {
        self.board.add(Word::BlockingNanos, nanos);
    }

    /// Adds to the time in which the loop has waited at the fence.
    fn add_fence(&self, nanos: u64) {
        self.board.add(Word::FenceNanos, nanos);
    }

    /// Changes the innermost section: its name (empty for the loop itself), its timeout in
    /// milliseconds (0 for none) and its depth.
    fn enter(&self, name: &str, timeout: u64, depth: u64) {
        let b = &self.board;
        b.enter(name);
        b.set(Word::SectionTimeout, timeout);
        b.set(Word::SectionDepth, depth);
        b.add(Word::Beats, 1);
    }

    /// Records that training continues after `step` completed steps.
    fn continue_from(&self, step: u64) {
        self.board.set(Word::Step, step);
        self.board.set(Word::StepKnown, 1);
        self.board.add(Word::Beats, 1);
    }

    /// Records a completed step and its times, without a system call.
    fn stepped(&self, step: u64, step_nanos: u64, compute_nanos: u64, wait_nanos: u64) {
        let b = &self.board;
        b.set(Word::StepNanos, step_nanos);
        b.set(Word::ComputeNanos, compute_nanos);
        b.set(Word::WaitNanos, wait_nanos);
        b.set(Word::StepAt, monotonic());
        b.set(Word::Passes, 0);
        b.set(Word::Step, step);
        b.set(Word::StepKnown, 1);
        b.add(Word::Beats, 1);
    }

    /// Returns whether the job is stopping, as the agent has announced.
    #[getter]
    fn stop_requested(&self) -> bool {
        self.flag(Word::StopRequested)
    }

    /// Returns the last step of a job that is stopping, as announced by the agent; `None` if any
    /// step may be the last.
    #[getter]
    fn stop_at(&self) -> Option<u64> {
        self.step_in(Word::StopAt)
    }

    /// Returns the step after which to wait for the next world, as announced by the agent; `None`
    /// to continue.
    #[getter]
    fn hold_at(&self) -> Option<u64> {
        self.step_in(Word::HoldAt)
    }

    /// Returns the next step to make durable, as announced by the agent; `None` if none was
    /// announced.
    #[getter]
    fn persist_at(&self) -> Option<u64> {
        self.step_in(Word::PersistAt)
    }

    /// Returns the newest step that the agent knows to be durable; 0 for none.
    #[getter]
    fn durable(&self) -> u64 {
        self.step_in(Word::Durable).unwrap_or(0)
    }

    /// Returns the newest step that all nodes have with its copies, according to the agent; 0 for
    /// none.
    #[getter]
    fn replicated(&self) -> u64 {
        self.step_in(Word::Replicated).unwrap_or(0)
    }

    /// Returns the interval in steps between snapshots, if the agent has announced one that applies
    /// from `step` or earlier.
    fn snapshot_interval(&self, step: u64) -> Option<u64> {
        let announced = self.board.get(Word::SnapshotEvery);
        let (first, every) = (announced >> EVERY_BITS, announced & ((1 << EVERY_BITS) - 1));
        (announced != 0 && step >= first).then_some(every)
    }

    /// Returns the last checkpoint that the agent could not make durable; `None` if there are still
    /// `seen` of them.
    fn persist_failure(&self, seen: u64) -> Option<PyPersistFailure> {
        if self.board.get(Word::PersistFailures) == seen {
            return None;
        }
        let (count, step, why) = self.board.failure();
        Some(PyPersistFailure { count, step, why })
    }

    /// Starts the pulse: a native thread that takes the interpreter lock regularly and looks up
    /// where the main thread is. Its counters stop when the lock is not released or the main thread
    /// does not move, which the agent observes.
    fn start_pulse(&self, main_thread: u64) -> PyResult<()> {
        let board = self.board.clone();
        let pulse = move || {
            let (mut last, mut beats) = (0, 0);
            loop {
                std::thread::sleep(PULSE);
                // A worker that makes steps is responsive, and need not hand over the interpreter
                // lock to prove it.
                if std::mem::replace(&mut beats, board.get(Word::Beats)) != beats {
                    board.add(Word::InterpreterTicks, 1);
                    board.add(Word::StackChanges, 1);
                    continue;
                }
                let asked = Instant::now();
                let taken = Python::try_attach(|py| (asked.elapsed(), main_thread_place(py, main_thread)));
                let Some((waited, place)) = taken else { return };
                board.add(Word::InterpreterTicks, 1);
                if waited < AT_ONCE {
                    board.add(Word::FreeTicks, 1);
                }
                if place != last {
                    last = place;
                    board.add(Word::StackChanges, 1);
                }
            }
        };
        std::thread::Builder::new().name("everstep-pulse".into()).spawn(pulse).map_err(checkpoint)?;
        Ok(())
    }
}

/// Returns a hash of the main thread's place: the code objects and lines of its innermost frames.
fn main_thread_place(py: Python<'_>, main_thread: u64) -> u64 {
    let place = || -> PyResult<u64> {
        let frames = py.import("sys")?.call_method0("_current_frames")?;
        let mut frame = frames.get_item(main_thread)?;
        let mut hasher = DefaultHasher::new();
        for _ in 0..FRAMES {
            (frame.getattr("f_code")?.as_ptr() as usize).hash(&mut hasher);
            frame.getattr("f_lineno")?.extract::<Option<u64>>()?.hash(&mut hasher);
            frame = frame.getattr("f_back")?;
            if frame.is_none() {
                break;
            }
        }
        Ok(hasher.finish())
    };
    place().unwrap_or(0)
}

/// Adds the classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyPersistFailure>()?;
    m.add_class::<PyBoard>()
}
