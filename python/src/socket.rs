//! Requests to the agent over its unix socket: one frame out, one frame back, interpreter released.

use crate::error::AgentError;
use everstep_core::id::{Generation, Rank, Step};
use everstep_core::message::{Offer, Tier};
use everstep_wire::frame;
use everstep_wire::worker::{Reply, Request};
use pyo3::prelude::*;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// The agent of this node.
#[pyclass(name = "Agent", frozen)]
pub struct PyAgent {
    stream: Mutex<UnixStream>,
    generation: Generation,
    local_rank: u32,
    rank: Rank,
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Memory => "local",
        Tier::Durable => "disk",
    }
}

impl PyAgent {
    fn ask(&self, py: Python<'_>, request: &Request, timeout: Option<f64>) -> PyResult<Reply> {
        let timeout = timeout.map(Duration::from_secs_f64);
        let talk = || -> std::io::Result<Reply> {
            let mut stream = self.stream.lock().map_err(|_| std::io::Error::other("an earlier request failed"))?;
            stream.set_read_timeout(timeout)?;
            frame::write(&mut *stream, request)?;
            frame::read(&mut *stream)
        };
        match py.detach(talk) {
            Ok(Reply::Refused { why }) => Err(AgentError::new_err(why)),
            Ok(reply) => Ok(reply),
            Err(e) => Err(AgentError::new_err(format!("the agent of this node does not answer: {e}"))),
        }
    }
}

#[pymethods]
impl PyAgent {
    #[new]
    fn connect(path: PathBuf, generation: u64, rank: u32, local_rank: u32) -> PyResult<Self> {
        let stream = UnixStream::connect(&path)
            .map_err(|e| AgentError::new_err(format!("cannot reach the agent at {}: {e}", path.display())))?;
        Ok(PyAgent { stream: Mutex::new(stream), generation: Generation(generation), local_rank, rank: Rank(rank) })
    }

    /// Makes room for slots; returns their paths and a warning, if any.
    fn reserve(&self, py: Python<'_>, slot_bytes: u64, slots: u32) -> PyResult<(Vec<String>, Option<String>)> {
        let request = Request::Reserve { generation: self.generation, local_rank: self.local_rank, slot_bytes, slots };
        match self.ask(py, &request, None)? {
            Reply::Slots { paths, warning } => Ok((paths, warning)),
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Offers steps as (step, is_memory); returns the step that all ranks restore and where from.
    fn restore(&self, py: Python<'_>, offers: Vec<(u64, bool, u64)>) -> PyResult<Option<(u64, &'static str)>> {
        let offer = |(step, memory, generation)| Offer {
            step: Step(step),
            tier: if memory { Tier::Memory } else { Tier::Durable },
            generation: Generation(generation),
        };
        let offers = offers.into_iter().map(offer).collect();
        let request = Request::Restore { generation: self.generation, rank: self.rank, offers };
        match self.ask(py, &request, None)? {
            Reply::Restore { step: Some(step), tier: Some(tier) } => Ok(Some((step.0, tier_name(tier)))),
            Reply::Restore { .. } => Ok(None),
            other => Err(AgentError::new_err(format!("unexpected answer {other:?}"))),
        }
    }

    /// Waits until a step is on durable storage.
    fn await_durable(&self, py: Python<'_>, step: u64, timeout: Option<f64>) -> PyResult<()> {
        let request = Request::AwaitDurable { generation: self.generation, step: Step(step) };
        self.ask(py, &request, timeout).map(|_| ())
    }

    /// Says where sealed slots are persisted to.
    fn persist_to(&self, py: Python<'_>, directory: String, keep: u32) -> PyResult<()> {
        let request = Request::Persist {
            generation: self.generation,
            local_rank: self.local_rank,
            rank: self.rank,
            directory,
            keep,
        };
        self.ask(py, &request, None).map(|_| ())
    }

    /// Says that it is time for a durable checkpoint.
    fn persist_due(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, &Request::PersistDue { generation: self.generation }, Some(5.0)).map(|_| ())
    }

    /// Says that an exception left the training function.
    fn report_error(&self, py: Python<'_>, message: String) -> PyResult<()> {
        let request = Request::Error { generation: self.generation, local_rank: self.local_rank, message };
        self.ask(py, &request, Some(2.0)).map(|_| ())
    }
}

/// Adds the class to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyAgent>()
}
