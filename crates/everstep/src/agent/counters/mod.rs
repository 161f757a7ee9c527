//! Counters of the machine's devices, read once a second for the life of the agent. They have a
//! thread of their own, so that a hanging driver does not block the agent.

mod answer;
mod budget;
mod ethtool;
mod host;
pub mod host_sampler;
mod net;
pub mod nvml;
mod qdisc;
mod table;

use super::input::Input;
use everstep_core::agent::event::Event;
use everstep_core::health::{Health, Sample};
use everstep_core::severity::Table;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often counters are read.
const EVERY: Duration = Duration::from_secs(1);

/// A source of counters and events.
pub trait CounterSource {
    /// Waits at most `time` for an event of a device. Returns the device and a line in the style of
    /// the kernel's log.
    fn event(&mut self, time: Duration) -> Option<(String, String)>;
    /// Returns the current values, or nothing if they cannot be read.
    fn sample(&mut self) -> Vec<Sample>;
}

/// Follows the source that `open` finds. Ends silently if there is none.
pub fn follow<S: CounterSource>(
    open: impl FnOnce() -> Option<S> + Send + 'static,
    table: Arc<Table>,
    inbox: mpsc::UnboundedSender<Input>,
) {
    let follow = move || {
        let Some(mut source) = open() else { return };
        let mut health = Health::default();
        let mut next = Instant::now();
        while !inbox.is_closed() {
            // A burst of events is no reason to read the counters more often.
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
