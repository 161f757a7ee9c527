//! Requests to the agent over its unix socket: one frame out, one frame back, interpreter released.

use crate::error::AgentError;
use crate::shards::PyRetention;
use everstep_core::id::{Generation, Rank, RunId, Step};
use everstep_core::message::{Offer, Offers, Redundancy, SnapshotInterval, Tier, Unreadable};
use everstep_wire::frame;
use everstep_wire::private;
use everstep_wire::raw::{from_text, to_text};
use everstep_wire::worker::{Ask, Persist, Reply, Request, WorkerId};
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval at which a waiting request runs Python's signal handlers.
const SIGNALS: Duration = Duration::from_millis(100);
/// Longest wait for the slots of a new worker: a fetch for its predecessor stops within a moment,
/// but memory that is being populated does not.
const SLOTS_TIMEOUT_S: f64 = 30.0;

/// The agent of this node.
#[pyclass(name = "Agent", frozen)]
pub struct PyAgent {
    path: PathBuf,
    /// Connections without a request in progress. A request that waits has a connection of its own,
    /// because another thread or a signal handler may send a request meanwhile.
    idle: Mutex<Vec<UnixStream>>,
    /// The process that sends the requests.
    worker: WorkerId,
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

/// A step that this rank can restore.
#[pyclass(name = "Offer", frozen, get_all, from_py_object)]
#[derive(Clone, Copy)]
pub struct PyOffer {
    step: u64,
    /// Whether it is in memory; otherwise it is on durable storage.
    in_memory: bool,
    /// Generation that captured it.
    generation: u64,
}

#[pymethods]
impl PyOffer {
    #[new]
    fn new(step: u64, in_memory: bool, generation: u64) -> Self {
        PyOffer { step, in_memory, generation }
    }
}

/// The step that all ranks restore.
#[pyclass(name = "Choice", frozen, get_all)]
pub struct PyChoice {
    step: u64,
    /// Name of the tier from which this rank restores it.
    tier: &'static str,
    /// Path of the slot that the agent has fetched it into, if it has.
    path: Option<OsString>,
}

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

    /// Sends a request and waits for its answer, for at most `timeout` seconds. Python's signal
    /// handlers run meanwhile; if one raises an exception (Ctrl-C), the wait ends with it.
    fn ask(&self, py: Python<'_>, ask: Ask, timeout: Option<f64>) -> PyResult<Reply> {
        let request = &Request { from: self.worker, ask };
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
            // The agent may have closed the connection as well.
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
        let worker = WorkerId { generation: Generation(generation), rank: Rank(rank), local_rank };
        Ok(PyAgent { path, idle, worker })
    }

    /// Reserves memory for slots. Returns their paths, and a warning if there is one.
    fn reserve(&self, py: Python<'_>, slot_bytes: u64, slots: u32) -> PyResult<(Vec<OsString>, Option<String>)> {
        match self.ask(py, Ask::Reserve { slot_bytes, slots }, None)? {
            Reply::Slots { paths, warning } => {
                Ok((paths.iter().map(|p| from_text(p).into_os_string()).collect(), warning))
            }
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Offers steps. Returns the step that all ranks restore, and whether some rank has found
    /// checkpoints; `found` is whether this rank has. With `wanted`, that step or none is chosen.
    fn restore(
        &self,
        py: Python<'_>,
        offers: Vec<PyOffer>,
        shared: bool,
        wanted: Option<u64>,
        found: bool,
    ) -> PyResult<(Option<PyChoice>, bool)> {
        let offer = |o: PyOffer| Offer {
            step: Step(o.step),
            tier: if o.in_memory { Tier::Memory } else { Tier::Durable },
            generation: Generation(o.generation),
        };
        let held = offers.into_iter().map(offer).collect();
        let offers = Offers { held, shared, wanted: wanted.map(Step), found };
        match self.ask(py, Ask::Restore(offers), None)? {
            Reply::Restore { step: Some(step), tier: Some(tier), path, found } => {
                let path = path.map(|p| from_text(&p).into_os_string());
                Ok((Some(PyChoice { step: step.0, tier: tier_name(tier), path }), found))
            }
            Reply::Restore { found, .. } => Ok((None, found)),
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Replaces damaged chunks of a slot with those of a copy.
    fn heal(&self, py: Python<'_>, path: PathBuf, chunks: Vec<usize>) -> PyResult<()> {
        self.ask(py, Ask::Heal { path: to_text(&path), chunks }, None).map(|_| ())
    }

    /// Reports that the step cannot be read: the world is formed again and restores another one.
    fn restore_failed(&self, py: Python<'_>, step: u64, tier: &str) -> PyResult<()> {
        let tier = match tier {
            "local" => Tier::Memory,
            "peer" => Tier::Peer,
            "parity" => Tier::Parity,
            _ => Tier::Durable,
        };
        self.ask(py, Ask::RestoreFailed(Unreadable { step: Step(step), tier }), Some(5.0)).map(|_| ())
    }

    /// Reports that this worker seals steps in memory, and how other nodes store them (see
    /// `Redundancy` in the core).
    fn replicate(&self, py: Python<'_>, run: String, replicas: u32, data: u32, shared: bool) -> PyResult<()> {
        let wish = Redundancy { replicas, data, shared };
        self.ask(py, Ask::Replicas { run, wish }, Some(SLOTS_TIMEOUT_S)).map(|_| ())
    }

    /// Waits until a step is on durable storage.
    fn await_durable(&self, py: Python<'_>, step: u64, timeout: Option<f64>) -> PyResult<()> {
        self.ask(py, Ask::AwaitDurable(Step(step)), timeout).map(|_| ())
    }

    /// Sets the directory to which sealed slots are persisted. Returns the epoch of its ownership.
    #[allow(clippy::too_many_arguments)]
    fn persist_to(
        &self,
        py: Python<'_>,
        directory: PathBuf,
        run: &str,
        keep: &PyRetention,
        bandwidth: u64,
        exactly: bool,
    ) -> PyResult<u64> {
        let persist = Persist {
            directory: to_text(&directory),
            run: run_id(run)?,
            keep: u32::try_from(keep.last).unwrap_or(u32::MAX),
            keep_every: keep.every,
            keep_epochs: keep.epochs,
            bandwidth,
            exactly,
        };
        match self.ask(py, Ask::Persist(persist), None)? {
            Reply::Owned { epoch } => Ok(epoch),
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Reports that a durable checkpoint is due.
    fn persist_due(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, Ask::PersistDue, Some(5.0)).map(|_| ())
    }

    /// Requests an interval in steps between snapshots.
    fn snapshot_every(&self, py: Python<'_>, every: u64) -> PyResult<()> {
        self.ask(py, Ask::SnapshotEvery(SnapshotInterval(every)), Some(5.0)).map(|_| ())
    }

    /// Reports an exception of the training script.
    #[pyo3(signature = (message, uncaught=None))]
    fn report_error(&self, py: Python<'_>, message: String, uncaught: Option<String>) -> PyResult<()> {
        self.ask(py, Ask::Error { message, uncaught }, Some(2.0)).map(|_| ())
    }
}

/// Adds the classes to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyOffer>()?;
    m.add_class::<PyChoice>()?;
    m.add_class::<PyAgent>()
}
