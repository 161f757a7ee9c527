//! Ensures that each store has only one coordinator.

use crate::{lock, paths};
use everstep_wire::limits::{CONNECT_TIMEOUT, NOTE_BYTES_MAX};
use everstep_wire::private::Directory;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long to wait for a store's lock if its holder is not a coordinator that answers. Shorter
/// than an agent waits for a coordinator that it has started.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// How often to retry.
const DRAW: Duration = Duration::from_millis(50);

/// Takes the lock of a store for the life of a coordinator. Returns `None` if another coordinator
/// serves already. Any other holder is waited for, up to a limit.
pub(super) async fn alone(directory: &Path) -> Result<Option<File>, String> {
    let store =
        paths::open_store(directory).map_err(|e| format!("cannot use the store {}: {e}", directory.display()))?;
    let start = Instant::now();
    loop {
        let taken = lock::take(&store, "lock", Duration::ZERO);
        let by = match taken.map_err(|e| format!("cannot lock {}: {e}", directory.display()))? {
            Ok(lock) => return Ok(Some(lock)),
            Err(by) => by,
        };
        // A coordinator that is starting or ending holds the lock for a moment without an endpoint.
        if by.is("everstep") || answers(&store).await {
            return Ok(None);
        }
        if start.elapsed() >= LOCK_WAIT {
            let at = directory.join("lock");
            return Err(format!(
                "the store is locked: {by} holds {}, and no coordinator answers; end that process",
                at.display()
            ));
        }
        tokio::time::sleep(DRAW).await;
    }
}

async fn answers(store: &Directory) -> bool {
    let about = store.read("endpoint.json", NOTE_BYTES_MAX).ok();
    let about = about.and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok());
    let Some(endpoint) = about.as_ref().and_then(|a| a["endpoint"].as_str()) else { return false };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::TcpStream::connect(endpoint)).await;
    connected.is_ok_and(|c| c.is_ok())
}
