//! The step board as Python sees it, and the thread that shows whether the interpreter is alive.

use crate::error::checkpoint;
use everstep_checkpoint::board::{Board, EVERY_BITS, Word, monotonic};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the interpreter is asked whether it is there.
const PULSE: Duration = Duration::from_millis(200);
/// Who runs Python gives the lock away after 5 ms (`sys.getswitchinterval`); from C it is had in less.
const AT_ONCE: Duration = Duration::from_millis(2);
/// Frames of the main thread that tell one place from another.
const FRAMES: usize = 24;

/// One worker's page of atomics.
#[pyclass(name = "Board", frozen)]
pub struct PyBoard {
    pub(crate) board: Arc<Board>,
}

fn word(name: &str) -> PyResult<Word> {
    Word::named(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
}

#[pymethods]
impl PyBoard {
    #[new]
    fn open(path: PathBuf) -> PyResult<Self> {
        Ok(PyBoard { board: Arc::new(Board::open(&path).map_err(checkpoint)?) })
    }

    /// Makes this process the worker that the board is of. False if another process is, and lives.
    fn claim(&self) -> bool {
        self.board.claim()
    }

    /// Whether this process is the worker that the board is of.
    fn is_mine(&self) -> bool {
        self.board.is_mine()
    }

    fn get(&self, name: &str) -> PyResult<u64> {
        Ok(self.board.get(word(name)?))
    }

    fn set(&self, name: &str, value: u64) -> PyResult<()> {
        self.board.set(word(name)?, value);
        Ok(())
    }

    fn add(&self, name: &str, value: u64) -> PyResult<()> {
        self.board.add(word(name)?, value);
        Ok(())
    }

    /// The innermost section changes: its name (empty: the loop), its timeout in milliseconds, how deep it is.
    fn enter(&self, name: &str, timeout: u64, depth: u64) {
        let b = &self.board;
        b.enter(name);
        b.set(Word::SectionTimeout, timeout);
        b.set(Word::SectionDepth, depth);
        b.add(Word::Beats, 1);
    }

    /// A step is complete: one call, no system call.
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

    /// How many checkpoints the agent could not make durable, the last one's step, and why.
    fn failure(&self) -> (u64, u64, String) {
        self.board.failure()
    }

    /// Starts the pulse: a native thread that takes the interpreter lock now and then. When it can
    /// not have it, or the main thread never moves, the words stand still and the agent sees it.
    fn start_pulse(&self, main_thread: u64) -> PyResult<()> {
        let board = self.board.clone();
        let pulse = move || {
            let (mut last, mut beats) = (0, 0);
            loop {
                std::thread::sleep(PULSE);
                // A worker that steps is alive: it is not made to hand the interpreter over for that.
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

/// A number for where the main thread is: files' code objects and lines, outermost frames included.
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

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("EVERY_BITS", EVERY_BITS)?;
    m.add_class::<PyBoard>()
}
