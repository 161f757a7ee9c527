//! Who speaks to an agent from its own machine: workers, whoever sends signals, the kernel, the GPUs' driver.

use super::launch::Template;
use super::{Input, kernel_log, metric};
use everstep_core::severity::Table;
use everstep_wire::frame;
use everstep_wire::private::{Directory, Root};
use everstep_wire::worker::Request;
use rustix::fs::{AtFlags, Mode};
use std::io::ErrorKind;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// What the machine tells of itself.
pub(super) fn to_machine(
    template: &Template,
    table: &Arc<Table>,
    ring: &metric::samples::Ring,
    inbox: &mpsc::UnboundedSender<Input>,
) {
    metric::samples::follow(template.nvml.clone(), Arc::clone(ring), inbox.clone());
    if let Some(path) = &template.kernel_log {
        kernel_log::follow(path.clone(), Arc::clone(table), inbox.clone());
    }
    if let Some(library) = template.nvml.clone() {
        metric::follow(move || metric::nvml::Gpus::open(&library), Arc::clone(table), inbox.clone());
    }
}

/// Workers ask through a socket of their own.
pub(super) fn to_workers(template: &Template, inbox: &mpsc::UnboundedSender<Input>) -> std::io::Result<()> {
    let (parent, name) = template.socket.parent().zip(template.socket.file_name()).ok_or(ErrorKind::InvalidInput)?;
    let memory = Directory::root(parent, Root::Named)?;
    memory.remove(name)?;
    let listener = UnixListener::bind(memory.through(name)?)?;
    rustix::fs::chmodat(memory.handle(), name, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
    let inbox = inbox.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(talk(stream, inbox.clone()));
        }
    });
    Ok(())
}

async fn talk(mut stream: UnixStream, inbox: mpsc::UnboundedSender<Input>) {
    let mut buffer = Vec::new();
    loop {
        while let Ok(Some(request)) = frame::take::<Request>(&mut buffer) {
            let (answer, reply) = oneshot::channel();
            let _ = inbox.send(Input::Worker(request, answer));
            let Ok(reply) = reply.await else { return };
            let Ok(bytes) = frame::encode(&reply) else { return };
            if stream.write_all(&bytes).await.is_err() {
                return;
            }
        }
        if !matches!(stream.read_buf(&mut buffer).await, Ok(n) if n > 0) {
            return;
        }
    }
}

/// Signals to the agent.
pub(super) fn to_signals(inbox: &mpsc::UnboundedSender<Input>) -> std::io::Result<()> {
    for number in [1, 2, 3, 10, 12, 15, 18] {
        let mut stream = signal(SignalKind::from_raw(number))?;
        let inbox = inbox.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() {
                let _ = inbox.send(Input::Signal(number));
            }
        });
    }
    Ok(())
}
