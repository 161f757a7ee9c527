//! The provisioner: a user's program that provides machines. It gets one request on standard input,
//! and exits with 0 once it has accepted the request or recognizes it. After a restart of the
//! coordinator, the same request may come again, under the same id.

use crate::agent::launch::TOKENS;
use everstep_core::coordinator::request::{Remedy, Request};
use everstep_core::id::JobId;
use serde::Serialize;
use std::path::Path;
use std::process::Stdio;
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

/// Calls `program`, if there is one.
///
/// # Errors
/// Explains why the request was not accepted.
pub async fn carry_out(program: Option<&Path>, job: &JobId, request: &Request) -> Result<(), String> {
    let program = program.ok_or("no provisioner is configured; give --provisioner PROGRAM")?;
    let failed = |e: std::io::Error| format!("{}: {e}", program.display());
    let asked = Asked { job, request: format!("{job}-{}", request.id), remedy: &request.remedy };
    // As a value, its fields come in alphabetical order. A program may match the text.
    let asked = serde_json::to_value(asked).map_err(|e| e.to_string())?;
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
    let output = ended.map_err(|_| format!("{} has not ended within {PATIENCE:?}", program.display()))?;
    let output = output.map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(SAID).collect();
    Err(format!("{} ended with {}: {said}", program.display(), output.status))
}
