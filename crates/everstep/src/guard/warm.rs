//! A process with torch imported, from which workers are forked when a job restarts.
//!
//! It is a child of the guard, but not a worker: it survives generations and dies with the guard.
//! If it does not answer in time, it is killed, and workers are started as new processes.

use super::protocol::{Launch, Template};
use everstep_wire::raw::Raw;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A fork takes milliseconds. A template that has not answered by then is not used again.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer.
const ANSWER_BYTES_MAX: usize = 4096;

/// A worker to fork.
#[derive(Serialize)]
struct ForkRequest<'a> {
    argv: &'a [Raw],
    cpus: &'a [u32],
    env: &'a [(Raw, Raw)],
    module: bool,
}

/// The first message, after the imports.
#[derive(Deserialize)]
struct FirstMessage {
    /// Why the process cannot be used; `None` if it can.
    why_not: Option<String>,
}

/// The answer to a [`ForkRequest`].
#[derive(Deserialize)]
struct ForkAnswer {
    /// Process id of the worker; `None` if there is none.
    pid: Option<u64>,
}

/// The warm process.
pub struct Warmed {
    child: Child,
    socket: UnixStream,
    /// The process has reported that it is ready.
    pub ready: bool,
}

impl Drop for Warmed {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// Why there is no warm process, or why it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WarmError {
    #[error("there is no command to run")]
    NothingToRun,
    #[error("cannot run {program}: {source}")]
    Run { program: String, source: io::Error },
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error("the warm process sent an invalid answer")]
    Nonsense,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("torch cannot be imported by the interpreter that runs the workers")]
    NoTorch,
    /// By its own account.
    #[error("{0}")]
    Unfit(String),
    #[error("the warm process is for another launch")]
    OtherLaunch,
    #[error("the warm process returned no process id")]
    NoProcess,
    #[error(transparent)]
    Number(#[from] std::num::TryFromIntError),
}

impl Warmed {
    /// Starts the process and its imports.
    pub fn start(template: &Template) -> Result<Self, WarmError> {
        let (ours, theirs) = UnixStream::pair()?;
        let program = template.argv.first().ok_or(WarmError::NothingToRun)?;
        let mut command = Command::new(program);
        command.args(&template.argv[1..]).env_clear().envs(template.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
        let guard = std::process::id();
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe { command.pre_exec(move || super::die_with(guard)) };
        crate::descriptors::restore(&mut command);
        let child =
            command.spawn().map_err(|source| WarmError::Run { program: program.0.display().to_string(), source })?;
        ours.set_read_timeout(Some(PATIENCE))?;
        ours.set_write_timeout(Some(PATIENCE))?;
        Ok(Warmed { child, socket: ours, ready: false })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the socket to wait on until the process is ready.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn answer<T: DeserializeOwned>(&mut self) -> Result<T, WarmError> {
        let mut length = [0u8; 4];
        self.socket.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > ANSWER_BYTES_MAX {
            return Err(WarmError::Nonsense);
        }
        let mut body = vec![0; length];
        self.socket.read_exact(&mut body)?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Reads the first message.
    ///
    /// # Errors
    /// Returns why the process cannot be used.
    pub fn read_first_message(&mut self) -> Result<(), WarmError> {
        let FirstMessage { why_not } = self.answer().map_err(|_| WarmError::NoTorch)?;
        match why_not {
            None => {
                self.ready = true;
                Ok(())
            }
            Some(why) => Err(WarmError::Unfit(why)),
        }
    }

    /// Forks a worker with these standard streams. Returns its process id.
    pub fn fork(&mut self, launch: &Launch, streams: [BorrowedFd<'_>; 3]) -> Result<u32, WarmError> {
        let warm = launch.warm.as_ref().ok_or(WarmError::OtherLaunch)?;
        let request = ForkRequest { argv: &warm.argv, cpus: &launch.cpus, env: &launch.env, module: warm.module };
        let body = serde_json::to_vec(&request)?;
        let length = u32::try_from(body.len())?.to_le_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&streams));
        sendmsg(&self.socket, &[IoSlice::new(&length)], &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(io::Error::from)?;
        self.socket.write_all(&body)?;
        let pid = self.answer::<ForkAnswer>()?.pid.ok_or(WarmError::NoProcess)?;
        Ok(u32::try_from(pid)?)
    }
}
