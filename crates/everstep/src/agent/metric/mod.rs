//! Counters of the machine's devices, read once a second for the life of the agent, by a thread of their own: a driver that hangs does not
//! reach the agent.

mod answer;
mod budget;
mod ethtool;
mod host;
mod net;
pub mod nvml;
mod qdisc;
pub mod samples;
mod table;

use super::Input;
use everstep_core::agent::event::Event;
use everstep_core::health::{Health, Sample};
use everstep_core::severity::Table;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often counters are read.
const EVERY: Duration = Duration::from_secs(1);

/// Where counters come from.
pub trait MetricSource {
    /// Waits at most `time` for something that happens on a device, as (device, line of the kernel's kind).
    fn event(&mut self, time: Duration) -> Option<(String, String)>;
    /// The values of now; empty where nothing can be read.
    fn sample(&mut self) -> Vec<Sample>;
}

/// Follows what `open` finds; silently ends where there is none.
pub fn follow<S: MetricSource>(
    open: impl FnOnce() -> Option<S> + Send + 'static,
    table: Arc<Table>,
    inbox: mpsc::UnboundedSender<Input>,
) {
    let follow = move || {
        let Some(mut source) = open() else { return };
        let mut health = Health::default();
        let mut next = Instant::now();
        while !inbox.is_closed() {
            // Many events at once are no reason to read counters as often.
            let mut lines = Vec::new();
            if next <= Instant::now() {
                lines = health.take(&source.sample());
                next = Instant::now() + EVERY;
            }
            lines.extend(source.event(next.saturating_duration_since(Instant::now())));
            for (device, line) in lines {
                let Some(mut sign) = table.sign(&line) else { continue };
                sign.device = device;
                let _ = inbox.send(Input::Core(Event::Signed(sign)));
            }
        }
    };
    let _ = std::thread::Builder::new().name("everstep-metric".into()).spawn(follow);
}
