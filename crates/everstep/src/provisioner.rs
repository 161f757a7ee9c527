//! Whoever provides machines: a program of the user's, called with one request on its standard input. It ends with 0 when it has taken the
//! request, or knows it from before: after a coordinator was restarted the same request may come again, under the same id.

use crate::agent::launch::TOKENS;
use everstep_core::coordinator::remedy::Request;
use everstep_core::id::JobId;
use serde_json::json;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// A program that has not ended by then is killed, and the request tried again.
const PATIENCE: Duration = Duration::from_secs(120);
/// Characters of what it said on standard error that are kept.
const SAID: usize = 300;

/// Calls `program`, if there is one.
///
/// # Errors
/// A sentence for people.
pub async fn carry_out(program: Option<&Path>, job: &JobId, request: &Request) -> Result<(), String> {
    let program = program.ok_or("no program was given that could do it (--provisioner)")?;
    let failed = |e: std::io::Error| format!("{}: {e}", program.display());
    let mut asked = json!(request.remedy);
    asked["request"] = format!("{job}-{}", request.id).into();
    asked["job"] = json!(job);
    let mut command = Command::new(program);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    for name in TOKENS {
        command.env_remove(name);
    }
    crate::descriptors::restore(command.as_std_mut());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        // A program that does not read is one that does not need to.
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
