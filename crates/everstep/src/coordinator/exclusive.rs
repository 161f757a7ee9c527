//! Ensures that each store has only one coordinator.

use super::EndpointFile;
use crate::lock::Owner;
use crate::{lock, paths};
use everstep_wire::limits::{CONNECT_TIMEOUT, NOTE_BYTES_MAX};
use everstep_wire::private::Directory;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for a store's lock if its holder is not a coordinator that answers. Shorter
/// than an agent waits for a coordinator that it has started.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// How often to retry.
const DRAW: Duration = Duration::from_millis(50);

/// Why the lock of a store cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExclusiveError {
    #[error("cannot use the store {}: {source}", directory.display())]
    Directory { directory: PathBuf, source: io::Error },
    #[error("cannot lock {}: {source}", directory.display())]
    Lock { directory: PathBuf, source: io::Error },
    #[error(
        "the store is locked: {by} holds {}, and no coordinator answers; end that process",
        directory.join("lock").display()
    )]
    Held { directory: PathBuf, by: Owner },
}

/// Takes the lock of a store for the life of a coordinator. Returns `None` if another coordinator
/// serves already. Any other holder is waited for, up to a limit.
pub(super) async fn alone(directory: &Path) -> Result<Option<File>, ExclusiveError> {
    let place = || directory.to_owned();
    let store =
        paths::open_store(directory).map_err(|source| ExclusiveError::Directory { directory: place(), source })?;
    let start = Instant::now();
    loop {
        let taken = lock::take(&store, "lock", Duration::ZERO);
        let by = match taken.map_err(|source| ExclusiveError::Lock { directory: place(), source })? {
            Ok(lock) => return Ok(Some(lock)),
            Err(by) => by,
        };
        // A coordinator that is starting or ending holds the lock for a moment without an endpoint.
        if by.is("everstep") || answers(&store).await {
            return Ok(None);
        }
        if start.elapsed() >= LOCK_WAIT {
            return Err(ExclusiveError::Held { directory: place(), by });
        }
        tokio::time::sleep(DRAW).await;
    }
}

async fn answers(store: &Directory) -> bool {
    let about = store.read(EndpointFile::NAME, NOTE_BYTES_MAX).ok();
    let Some(about) = about.and_then(|b| serde_json::from_slice::<EndpointFile>(&b).ok()) else { return false };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::TcpStream::connect(about.endpoint)).await;
    connected.is_ok_and(|c| c.is_ok())
}
