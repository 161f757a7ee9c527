//! The agent's inputs from its own machine: workers, signals, the kernel, and the GPU driver.

use super::launch::Template;
use super::{Input, counters, kernel_log};
use everstep_core::severity::Table;
use everstep_wire::admission::Trouble;
use everstep_wire::frame;
use everstep_wire::limits::WORKER_CONNECTIONS_MAX;
use everstep_wire::private::{Directory, Root};
use everstep_wire::worker::{Reply, Request};
use rustix::fs::{AtFlags, Mode};
use std::io::ErrorKind;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Starts to follow the machine's samples, its kernel log and its GPUs.
pub(super) fn to_machine(
    template: &Template,
    table: &Arc<Table>,
    ring: &counters::host_sampler::Ring,
    inbox: &mpsc::UnboundedSender<Input>,
) {
    counters::host_sampler::follow(template.nvml.clone(), Arc::clone(ring), inbox.clone());
    if let Some(path) = &template.kernel_log {
        kernel_log::follow(path.clone(), Arc::clone(table), inbox.clone());
    }
    if let Some(library) = template.nvml.clone() {
        counters::follow(move || counters::nvml::Gpus::open(&library), Arc::clone(table), inbox.clone());
    }
}

/// Opens the socket through which workers send requests.
pub(super) fn to_workers(template: &Template, inbox: &mpsc::UnboundedSender<Input>) -> std::io::Result<()> {
    let (parent, name) = template.socket.parent().zip(template.socket.file_name()).ok_or(ErrorKind::InvalidInput)?;
    let memory = Directory::root(parent, Root::Named)?;
    memory.remove(name)?;
    let listener = UnixListener::bind(memory.through(name)?)?;
    rustix::fs::chmodat(memory.handle(), name, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
    tokio::spawn(accept(listener, inbox.clone()));
    Ok(())
}

async fn accept(listener: UnixListener, inbox: mpsc::UnboundedSender<Input>) {
    let (connections, mut trouble) = (Arc::new(Semaphore::new(WORKER_CONNECTIONS_MAX)), Trouble::default());
    loop {
        let mut stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                let (pause, line) = trouble.failed("from workers", &e);
                line.into_iter().for_each(|line| crate::say_warning!("{line}"));
                tokio::time::sleep(pause).await;
                continue;
            }
        };
        trouble.over();
        let own =
            stream.peer_cred().is_ok_and(|who| who.uid() == 0 || who.uid() == rustix::process::geteuid().as_raw());
        if !own {
            continue;
        }
        let inbox = inbox.clone();
        match connections.clone().try_acquire_owned() {
            Ok(one) => {
                tokio::spawn(async move {
                    talk(stream, inbox).await;
                    drop(one);
                });
            }
            Err(_) => refuse(&mut stream, "too many connections to this agent").await,
        }
    }
}

async fn talk(mut stream: UnixStream, inbox: mpsc::UnboundedSender<Input>) {
    let mut buffer = Vec::new();
    loop {
        let request = match frame::take::<Request>(&mut buffer) {
            Ok(Some(request)) => request,
            Ok(None) => {
                if !matches!(stream.read_buf(&mut buffer).await, Ok(n) if n > 0) {
                    return;
                }
                continue;
            }
            // After this, frames cannot be told apart any more.
            Err(e) => return refuse(&mut stream, &format!("not a request: {e}")).await,
        };
        let reply = match request.ask.check() {
            Err(why) => Reply::Refused { why: why.to_string() },
            Ok(()) => {
                let (answer, reply) = oneshot::channel();
                let _ = inbox.send(Input::Worker(request, answer));
                let Ok(reply) = reply.await else { return };
                reply
            }
        };
        let Ok(bytes) = frame::encode(&reply) else { return };
        if stream.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Answers with the reason and closes the connection.
async fn refuse(stream: &mut UnixStream, why: &str) {
    if let Ok(bytes) = frame::encode(&Reply::Refused { why: why.to_owned() }) {
        let _ = stream.try_write(&bytes);
    }
    let _ = stream.shutdown().await;
}

/// Forwards the agent's signals.
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
