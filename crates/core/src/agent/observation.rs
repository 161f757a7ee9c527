//! The state of a worker at one time.

use crate::ledger::Reading;

/// What a worker does besides steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Inside a section (checkpoint, evaluation, restore, …).
    pub inside: bool,
    /// Timeout that the script set for the section, in milliseconds; 0 for none.
    pub timeout_ms: u64,
    /// The worker waits until other nodes hold its newest step, too.
    pub awaits_copies: bool,
    /// The worker waits for its data loader.
    pub waits_for_data: bool,
}

/// What /proc shows of a worker's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// It is stopped (state T).
    pub stopped: bool,
    /// The main thread runs, or waits for a CPU (state R).
    pub runnable: bool,
    /// CPU time used so far, in milliseconds.
    pub cpu_ms: u64,
}

/// Counters of a worker's Python interpreter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interpreter {
    /// Rises while the interpreter lock can be acquired.
    pub ticks: u64,
    /// Rises while it can be acquired at once: the main thread is outside Python.
    pub free_ticks: u64,
    /// Rises when the main thread is seen on another line of Python.
    pub stack_changes: u64,
}

/// How far a worker's script is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Script {
    /// The script runs.
    #[default]
    Runs,
    /// The script is over, and the interpreter is shutting down.
    Over,
    /// The worker called `os._exit` while the interpreter was shutting down.
    LeftAtOnce,
    /// It failed with this exit code, and the interpreter is shutting down.
    Failed(i32),
}

impl Script {
    /// Returns whether it ended without an error.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Script::Over | Script::LeftAtOnce)
    }
}

/// A process that trains in place of the launched one: a launcher script started it, and it claimed
/// the step board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trainer {
    /// Process id of the trainer.
    pub pid: u32,
    /// How the process ended; `None`: it has not, or that cannot be known.
    pub end: Option<TrainerEnd>,
}

/// How a process that trained in place of the launched one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainerEnd {
    /// Its script was over, and its interpreter was shutting down.
    Over,
    /// It called `os._exit(0)` before that.
    Left,
    /// Nothing shows that its script had come to its end: it was killed, interrupted, or failed.
    Vanished,
}

/// A sample of a worker's step board and of /proc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Steps completed; `None` if the worker does not report steps (yet).
    pub step: Option<u64>,
    /// Total number of steps that the script is to complete, if it reports one.
    pub total: Option<u64>,
    /// Backward passes since the last completed step.
    pub passes: u64,
    /// Step that the worker continued from; 0 for a fresh start.
    pub restored: u64,
    /// Both are the training's own numbers; false: steps are counted since the process started.
    pub numbered: bool,
    /// Rises with every step, heartbeat and change of section.
    pub beats: u64,
    /// What it does besides steps.
    pub section: Section,
    /// The process, as the kernel sees it.
    pub process: Process,
    /// Progress of its Python interpreter.
    pub interpreter: Interpreter,
    /// TERM only sets a flag in this process, so time between TERM and KILL gains nothing.
    pub flags_stop: bool,
    /// Steps are observed from outside: the script does not announce evaluations and saves.
    pub from_outside: bool,
    /// How the worker has spent its time so far.
    pub reading: Reading,
    /// How far its script is.
    pub script: Script,
    /// The process that trains in place of the launched one; `None`: the launched process trains
    /// itself, or no process has claimed the step board.
    pub trainer: Option<Trainer>,
}

impl Observation {
    /// Returns the steps completed beyond the one that the worker continued from.
    pub(super) fn new_steps(&self) -> u64 {
        self.step.unwrap_or(0).saturating_sub(self.restored)
    }
}
