//! The provisioner: a user's program that provides machines. It gets one request on standard input,
//! and exits with 0 once it has accepted the request or recognizes it. After a restart of the
//! coordinator, the same request may come again, under the same id.

use crate::agent::launch::TOKENS;
use everstep_core::coordinator::request::{Remedy, Request};
use everstep_core::id::JobId;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// A program that takes longer is killed, and the request is tried again.
const PATIENCE: Duration = Duration::from_mins(2);
/// Number of characters kept of its standard error.
const SAID: usize = 300;

/// What the program reads.
#[derive(Serialize)]
struct Asked<'a> {
    /// Name of the job.
    job: &'a JobId,
    /// The same text each time that this request is made.
    request: String,
    #[serde(flatten)]
    remedy: &'a Remedy,
}

/// Why a request was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    #[error("no provisioner is configured; give --provisioner PROGRAM")]
    NotConfigured,
    /// The program cannot be started or waited for.
    #[error("{}: {source}", program.display())]
    Io { program: PathBuf, source: std::io::Error },
    #[error("{} has not ended within {PATIENCE:?}", .0.display())]
    TimedOut(PathBuf),
    #[error("{} ended with {status}: {said}", program.display())]
    Failed {
        program: PathBuf,
        status: ExitStatus,
        /// The beginning of its standard error.
        said: String,
    },
}

/// Calls `program`, if there is one.
///
/// # Errors
/// Fails if there is no program, or if it does not accept the request.
pub async fn carry_out(program: Option<&Path>, job: &JobId, request: &Request) -> Result<(), ProvisionError> {
    let program = program.ok_or(ProvisionError::NotConfigured)?;
    let failed = |source: std::io::Error| ProvisionError::Io { program: program.to_owned(), source };
    let asked = Asked { job, request: format!("{job}-{}", request.id), remedy: &request.remedy };
    // As a value, its fields come in alphabetical order. A program may match the text.
    let asked = serde_json::to_value(asked).map_err(|e| failed(e.into()))?;
    let mut command = Command::new(program);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    for name in TOKENS {
        command.env_remove(name);
    }
    crate::descriptors::restore(command.as_std_mut());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        // A program may ignore its input.
        let _ = input.write_all(format!("{asked}\n").as_bytes()).await;
    }
    let ended = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
    let output = ended.map_err(|_| ProvisionError::TimedOut(program.to_owned()))?;
    let output = output.map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(SAID).collect();
    Err(ProvisionError::Failed { program: program.to_owned(), status: output.status, said })
}
