//! The guard's process and the stream to it.

use super::input::Input;
use crate::guard::protocol::Event as GuardEvent;
use everstep_wire::frame;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command as Process, Stdio};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;

/// Starts the guard, which sends its events to `inbox`. It alone inherits the node lock, which
/// becomes free when the last worker is gone.
///
/// # Errors
/// Fails if the guard cannot be started.
pub fn start_guard(inbox: &mpsc::UnboundedSender<Input>, lock: &File) -> std::io::Result<(OwnedWriteHalf, Child)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    let mut command = Process::new(std::env::current_exe()?);
    let inherited = lock.try_clone()?;
    // The workers inherit our standard input, as under torchrun.
    let input = std::io::stdin().as_fd().try_clone_to_owned()?;
    command.arg("guard").arg(inherited.as_raw_fd().to_string()).arg(input.as_raw_fd().to_string());
    command.args(crate::descriptors::users().map(|n| n.to_string()));
    command.arg("--log").arg(crate::log::hand_on());
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    // SAFETY: only system calls between fork and exec; both descriptors are open in the child, too.
    unsafe {
        command.pre_exec(move || {
            rustix::io::fcntl_setfd(&input, rustix::io::FdFlags::empty())?;
            rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).map_err(Into::into)
        });
    }
    let child = command.spawn()?;
    ours.set_nonblocking(true)?;
    let (mut reader, writer) = UnixStream::from_std(ours)?.into_split();
    let inbox = inbox.clone();
    tokio::spawn(async move {
        let mut buffer = Vec::new();
        loop {
            while let Ok(Some(event)) = frame::take::<GuardEvent>(&mut buffer) {
                let _ = inbox.send(Input::Guard(Some(event)));
            }
            if !matches!(reader.read_buf(&mut buffer).await, Ok(n) if n > 0) {
                let _ = inbox.send(Input::Guard(None));
                return;
            }
        }
    });
    Ok((writer, child))
}
