//! Watches the collectives of a training loop, learns when the network is idle, and announces it on
//! the step board. The core (`interleave`) and the agent decide what that means for checkpoint
//! traffic.

use crate::step_board::PyBoard;
use everstep_checkpoint::step_board::{Board, Network, Word, monotonic as now};
use everstep_core::interleave::{Iteration, Kept, Profiler, TRUST};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

struct State {
    profiler: Profiler,
    /// Number of collectives in progress.
    under_way: u32,
    /// When the last one ended, or the iteration began; monotonic nanoseconds.
    idle_since: u64,
    began: u64,
    idle: Vec<Duration>,
    /// Whether the current iteration was observed from its beginning.
    whole: bool,
    open: bool,
}

/// The collectives of one worker. Called from any thread.
#[pyclass(name = "NetworkWatch", frozen)]
pub struct PyNetworkWatch {
    board: Arc<Board>,
    path: PathBuf,
    world_size: u64,
    state: Mutex<State>,
}

impl PyNetworkWatch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self, state: &State, at: u64) {
        let expected = state.profiler.profile().and_then(|p| p.idle.get(state.idle.len())).copied();
        let trusted = expected.unwrap_or_default().as_nanos() as f64 * TRUST;
        self.board.announce_idle(at + trusted as u64);
    }

    fn show(&self, state: &State) {
        let network = match state.profiler.profile() {
            _ if state.open => Network::Open,
            None => Network::Learning,
            // No collective, or none that repeats: they are not observable here.
            Some(profile) if profile.idle.len() < 2 => Network::Unseen,
            Some(_) => Network::Known,
        };
        self.board.set(Word::Network, network as u64);
    }

    fn keep(&self, profile: &Iteration) {
        let kept = Kept { world_size: self.world_size, iteration: profile.clone() };
        let temporary = self.path.with_extension("new");
        // If this fails, the next worker profiles again.
        let _ = serde_json::to_vec(&kept)
            .map_err(std::io::Error::other)
            .and_then(|json| std::fs::write(&temporary, json))
            .and_then(|()| std::fs::rename(&temporary, &self.path));
    }
}

#[pymethods]
impl PyNetworkWatch {
    /// Creates the watch. At `path`, the profile is kept for the next worker of this rank, with the
    /// same number of ranks.
    #[new]
    fn new(board: &PyBoard, path: PathBuf, world_size: u64) -> Self {
        let kept: Option<Kept> = std::fs::read(&path).ok().and_then(|json| serde_json::from_slice(&json).ok());
        let profile = kept.filter(|k| k.world_size == world_size).map(|k| k.iteration);
        let at = now();
        let state = State {
            profiler: Profiler::with(profile),
            under_way: 0,
            idle_since: at,
            began: at,
            idle: Vec::new(),
            whole: false,
            open: false,
        };
        let watch = PyNetworkWatch { board: board.board.clone(), path, world_size, state: Mutex::new(state) };
        watch.show(&watch.state());
        watch
    }

    /// Records that a collective begins.
    fn begin(&self) {
        let mut state = self.state();
        state.under_way += 1;
        if state.under_way == 1 {
            self.board.set(Word::CommBusy, 1);
            let idle = now().saturating_sub(state.idle_since);
            state.idle.push(Duration::from_nanos(idle));
        }
    }

    /// Records that a collective is complete.
    fn end(&self) {
        let mut state = self.state();
        state.under_way = state.under_way.saturating_sub(1);
        if state.under_way == 0 {
            let at = now();
            state.idle_since = at;
            self.announce(&state, at);
        }
    }

    /// Records a completed step.
    fn iteration(&self) {
        let mut state = self.state();
        let at = now();
        let last = if state.under_way > 0 { 0 } else { at.saturating_sub(state.idle_since) };
        state.idle.push(Duration::from_nanos(last));
        let idle = std::mem::take(&mut state.idle);
        let length = Duration::from_nanos(at.saturating_sub(state.began));
        (state.began, state.idle_since) = (at, at);
        if std::mem::replace(&mut state.whole, true) && !state.open {
            let known = state.profiler.profile().is_some();
            let _ = state.profiler.observe(Iteration { length, idle });
            if let Some(profile) = state.profiler.profile().filter(|_| !known) {
                self.keep(profile);
            }
            self.show(&state);
        }
        if state.under_way == 0 {
            self.announce(&state, at);
        }
    }

    /// Announces that the loop waits for its copies: the network is idle until the next collective.
    fn rest(&self) {
        // Only once: every announcement causes new requests.
        if self.state().under_way == 0 && self.board.get(Word::IdleUntil) != u64::MAX {
            self.board.announce_idle(u64::MAX);
        }
    }

    /// Sets whether copies are sent at any time (`open`) or in the idle spans.
    fn set_open(&self, open: bool) {
        let mut state = self.state();
        state.open = open;
        state.whole = false;
        self.show(&state);
    }

    /// Returns the profile: seconds of an iteration, and of each idle span; `None` until there is
    /// one.
    fn profile(&self) -> Option<(f64, Vec<f64>)> {
        let state = self.state();
        state.profiler.profile().map(|p| (p.length.as_secs_f64(), p.idle.iter().map(Duration::as_secs_f64).collect()))
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyNetworkWatch>()
}
