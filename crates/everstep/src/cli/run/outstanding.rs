//! The end of `everstep run`: what was given to storage is completed, and storage may hang.

use crate::slow_storage;
use std::thread;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Shuts down the agent's runtime. `hurried`: the user has said not to wait for storage. Otherwise,
/// a signal ends the wait.
pub fn complete(runtime: Runtime, hurried: bool) {
    if hurried {
        return runtime.shutdown_background();
    }
    let (completed, over) = oneshot::channel::<()>();
    // Without a thread, the closure is dropped here, and the runtime with it.
    let _ = thread::Builder::new().name("everstep-end".into()).spawn(move || {
        drop(runtime);
        drop(completed);
    });
    match Builder::new_current_thread().enable_all().build() {
        Ok(waiting) => waiting.block_on(wait(over)),
        Err(_) => drop(over.blocking_recv()),
    }
}

async fn wait(mut over: oneshot::Receiver<()>) {
    let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = signals else { return drop(over.await) };
    let mut reminder = slow_storage::reminder();
    loop {
        tokio::select! {
            _ = &mut over => return,
            _ = interrupt.recv() => return,
            _ = terminate.recv() => return,
            _ = hangup.recv() => return,
            _ = reminder.tick() => crate::say!(
                "the job has ended; waiting for pending writes to storage; press Ctrl-C to stop waiting"
            ),
        }
    }
}
