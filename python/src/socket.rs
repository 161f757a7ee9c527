//! Requests to the agent over its unix socket: one frame out, one frame back, interpreter released.

use crate::error::AgentError;
use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offer, Offers, Redundancy, Tier};
use everstep_wire::frame;
use everstep_wire::private;
use everstep_wire::raw::{from_text, to_text};
use everstep_wire::worker::{Reply, Request};
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a request that waits runs Python's signal handlers.
const SIGNALS: Duration = Duration::from_millis(100);

/// The agent of this node.
#[pyclass(name = "Agent", frozen)]
pub struct PyAgent {
    path: PathBuf,
    /// Connections on which no answer is awaited. A request that waits has one of its own: meanwhile, another thread or a
    /// signal handler may ask something, too.
    idle: Mutex<Vec<UnixStream>>,
    generation: Generation,
    local_rank: u32,
    rank: Rank,
}

/// Waits up to `time` for an answer to arrive.
fn has_answer(stream: &UnixStream, time: Duration) -> std::io::Result<bool> {
    let time = Timespec::try_from(time).map_err(std::io::Error::other)?;
    match poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&time)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn connect(path: &Path) -> PyResult<UnixStream> {
    private::connect(path)
        .map_err(|e| AgentError::new_err(format!("cannot reach the agent at {}: {e}", path.display())))
}

fn run_id(text: &str) -> PyResult<RunId> {
    text.parse().map_err(AgentError::new_err::<String>)
}

/// A decision as Python sees it: step, tier, slot.
type Chosen = (u64, &'static str, Option<OsString>);

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "local",
        Tier::Peer => "peer",
        Tier::Parity => "parity",
        Tier::Durable => "disk",
    }
}

impl PyAgent {
    fn idle(&self) -> MutexGuard<'_, Vec<UnixStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request and waits for its answer, for at most `timeout` seconds. Python's signal handlers run meanwhile; an
    /// exception of theirs ends the wait, as that of Ctrl-C does.
    fn ask(&self, py: Python<'_>, request: &Request, timeout: Option<f64>) -> PyResult<Reply> {
        let silent = |e: std::io::Error| AgentError::new_err(format!("the agent of this node does not answer: {e}"));
        let idle = self.idle().pop();
        let mut stream = idle.map_or_else(|| connect(&self.path), Ok)?;
        py.detach(|| frame::write(&mut stream, request)).map_err(silent)?;
        let deadline = timeout.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
        loop {
            let left = deadline.map_or(SIGNALS, |d| d.saturating_duration_since(Instant::now()).min(SIGNALS));
            if py.detach(|| has_answer(&stream, left)).map_err(silent)? {
                break;
            }
            if left.is_zero() {
                return Err(silent(std::io::ErrorKind::TimedOut.into()));
            }
            py.check_signals()?;
        }
        match py.detach(|| frame::read(&mut stream)).map_err(silent)? {
            // The agent may have closed the connection with it.
            Reply::Refused { why } => Err(AgentError::new_err(why)),
            reply => {
                self.idle().push(stream);
                Ok(reply)
            }
        }
    }
}

#[pymethods]
impl PyAgent {
    #[new]
    fn connect(path: PathBuf, generation: u64, rank: u32, local_rank: u32) -> PyResult<Self> {
        let idle = Mutex::new(vec![connect(&path)?]);
        Ok(PyAgent { path, idle, generation: Generation(generation), local_rank, rank: Rank(rank) })
    }

    /// Makes room for slots; returns their paths and a warning, if any.
    fn reserve(&self, py: Python<'_>, slot_bytes: u64, slots: u32) -> PyResult<(Vec<OsString>, Option<String>)> {
        let request = Request::Reserve { generation: self.generation, local_rank: self.local_rank, slot_bytes, slots };
        match self.ask(py, &request, None)? {
            Reply::Slots { paths, warning } => {
                Ok((paths.iter().map(|p| from_text(p).into_os_string()).collect(), warning))
            }
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Offers steps as (step, is_memory, generation). Returns the step that all ranks restore, where from, and the slot
    /// that the agent has fetched it into, if it has; and whether some rank has found checkpoints, as this one has or has
    /// not (`found`). `wanted`: that step or none.
    fn restore(
        &self,
        py: Python<'_>,
        offers: Vec<(u64, bool, u64)>,
        shared: bool,
        wanted: Option<u64>,
        found: bool,
    ) -> PyResult<(Option<Chosen>, bool)> {
        let offer = |(step, memory, generation)| Offer {
            step: Step(step),
            tier: if memory { Tier::Memory } else { Tier::Durable },
            generation: Generation(generation),
        };
        let held = offers.into_iter().map(offer).collect();
        let offers = Offers { held, shared, wanted: wanted.map(Step), found };
        let request = Request::Restore { generation: self.generation, rank: self.rank, offers };
        match self.ask(py, &request, None)? {
            Reply::Restore { step: Some(step), tier: Some(tier), path, found } => {
                let path = path.map(|p| from_text(&p).into_os_string());
                Ok((Some((step.0, tier_name(tier), path)), found))
            }
            Reply::Restore { found, .. } => Ok((None, found)),
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Has damaged chunks of a slot brought back from a copy.
    fn heal(&self, py: Python<'_>, path: PathBuf, chunks: Vec<usize>) -> PyResult<()> {
        let request = Request::Heal { generation: self.generation, rank: self.rank, path: to_text(&path), chunks };
        self.ask(py, &request, None).map(|_| ())
    }

    /// Says that the step cannot be read: the world forms anew and restores something else.
    fn restore_failed(&self, py: Python<'_>, step: u64, tier: &str) -> PyResult<()> {
        let tier = match tier {
            "local" => Tier::Memory,
            "peer" => Tier::Peer,
            "parity" => Tier::Parity,
            _ => Tier::Durable,
        };
        let request = Request::RestoreFailed { generation: self.generation, rank: self.rank, step: Step(step), tier };
        self.ask(py, &request, Some(5.0)).map(|_| ())
    }

    /// Says that this worker seals steps in memory, and what other nodes are to keep of them (see `Redundancy` in the core).
    fn replicate(&self, py: Python<'_>, run: String, replicas: u32, data: u32, shared: bool) -> PyResult<()> {
        let (generation, local_rank) = (self.generation, self.local_rank);
        let wish = Redundancy { replicas, data, shared };
        self.ask(py, &Request::Replicas { generation, local_rank, run, wish }, Some(5.0)).map(|_| ())
    }

    /// Waits until a step is on durable storage.
    fn await_durable(&self, py: Python<'_>, step: u64, timeout: Option<f64>) -> PyResult<()> {
        let request = Request::AwaitDurable { generation: self.generation, step: Step(step) };
        self.ask(py, &request, timeout).map(|_| ())
    }

    /// Says where sealed slots are persisted to.
    #[allow(clippy::too_many_arguments)]
    fn persist_to(
        &self,
        py: Python<'_>,
        directory: PathBuf,
        run: &str,
        keep: u32,
        keep_every: u64,
        keep_epochs: bool,
        bandwidth: u64,
        exactly: bool,
    ) -> PyResult<()> {
        let request = Request::Persist {
            generation: self.generation,
            local_rank: self.local_rank,
            rank: self.rank,
            directory: to_text(&directory),
            run: run_id(run)?,
            keep,
            keep_every,
            keep_epochs,
            bandwidth,
            exactly,
        };
        self.ask(py, &request, None).map(|_| ())
    }

    /// Says that it is time for a durable checkpoint.
    fn persist_due(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, &Request::PersistDue { generation: self.generation }, Some(5.0)).map(|_| ())
    }

    /// Says how many steps snapshots should be apart.
    fn snapshot_every(&self, py: Python<'_>, every: u64) -> PyResult<()> {
        let request = Request::SnapshotEvery { generation: self.generation, every };
        self.ask(py, &request, Some(5.0)).map(|_| ())
    }

    /// Says that an exception left the training function.
    #[pyo3(signature = (message, uncaught=None))]
    fn report_error(&self, py: Python<'_>, message: String, uncaught: Option<String>) -> PyResult<()> {
        let request = Request::Error { generation: self.generation, local_rank: self.local_rank, message, uncaught };
        self.ask(py, &request, Some(2.0)).map(|_| ())
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyAgent>()
}
