//! Object stores by their URLs.

use crate::storage::scheme_of;
use crate::unique_id::unique_id;
use bytes::Bytes;
use futures_util::StreamExt;
use object_store::aws::{AmazonS3Builder, Checksum, S3ConditionalPut};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ClientOptions, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Time limit of one attempt at a request. It is then tried again.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(2);
/// Time after which a request is given up.
const RETRY_TIMEOUT: Duration = Duration::from_mins(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a store that has not answered a first request is considered unreachable.
const REACH_TIMEOUT: Duration = Duration::from_secs(15);
const THREADS: usize = 2;
/// Content of a probe object.
pub(super) const PROBE: &[u8] = b"everstep";
/// Variables that name an endpoint other than the provider's.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).thread_name("objects").enable_all().build()
});
static BUCKETS: LazyLock<Mutex<HashMap<String, Arc<Bucket>>>> = LazyLock::new(Mutex::default);

/// Operations that checkpoints need from a store.
pub trait Store: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Store for T {}

/// A store, and what has been learned about it.
pub struct Bucket {
    pub(super) store: Box<dyn Store>,
    conditional: OnceLock<bool>,
}

/// A directory of checkpoints in a store, or one of its checkpoints.
#[derive(Clone)]
pub struct Location {
    pub(super) bucket: Arc<Bucket>,
    pub(super) key: Key,
    /// The URL as it was given, without slashes at its end.
    pub(super) url: String,
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// Returns whether the path is the URL of an object store.
#[must_use]
pub fn is_url(path: &Path) -> bool {
    path.to_str().is_some_and(|p| p.contains("://"))
}

/// Waits for an operation of a store on the shared runtime, and returns its result.
pub(super) fn wait<T>(done: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match &*RUNTIME {
        Ok(runtime) => runtime.block_on(done),
        Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
    }
}

/// Returns the body of an answer, or fails with `InvalidData` if it is longer than `limit` bytes: a
/// store may send anything.
pub(super) async fn body(got: GetResult, limit: u64) -> io::Result<Bytes> {
    let long = || io::Error::new(io::ErrorKind::InvalidData, format!("the store sends more than {limit} bytes"));
    let mut pieces = got.into_stream();
    let mut first = pieces.next().await.transpose().map_err(failed)?.unwrap_or_default();
    let mut all: Option<Vec<u8>> = None;
    while let Some(piece) = pieces.next().await.transpose().map_err(failed)? {
        let held = all.get_or_insert_with(|| std::mem::take(&mut first).to_vec());
        if held.len() as u64 + piece.len() as u64 > limit {
            return Err(long());
        }
        held.extend_from_slice(&piece);
    }
    let body = all.map_or(first, Bytes::from);
    if body.len() as u64 > limit { Err(long()) } else { Ok(body) }
}

/// Converts an error to one with the kind that a file system would use.
pub(super) fn failed(e: object_store::Error) -> io::Error {
    use object_store::Error as E;
    let kind = match e {
        E::NotFound { .. } => io::ErrorKind::NotFound,
        E::AlreadyExists { .. } | E::Precondition { .. } => io::ErrorKind::AlreadyExists,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        E::NotImplemented { .. } | E::NotSupported { .. } => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, e)
}

impl Location {
    /// Opens the location that a URL names: `s3://bucket/prefix`, `gs://…`, `az://container/…`.
    /// Keys and endpoints come from the environment, in the variables of each provider's own tools.
    ///
    /// # Errors
    /// `InvalidInput` for a URL that does not name a store, or settings that are incomplete.
    pub fn of(url: &Path) -> io::Result<Self> {
        let url = url.to_str().unwrap_or_default();
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, format!("{url}: {what}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid("no URL"))?;
        let rest = rest.trim_end_matches('/');
        let (host, key) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(invalid(&format!("it names no bucket; give {scheme}://BUCKET/PREFIX")));
        }
        let key = Key::parse(key).map_err(|e| invalid(&e.to_string()))?;
        let root = format!("{scheme}://{host}");
        let known = at_endpoint(&root);
        let mut buckets = BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = match buckets.get(&known) {
            Some(bucket) => bucket.clone(),
            None => {
                let store = open(scheme, &root).map_err(|e| invalid(&e))?;
                let bucket = Arc::new(Bucket { store, conditional: OnceLock::new() });
                buckets.insert(known, bucket.clone());
                bucket
            }
        };
        Ok(Location { bucket, key, url: format!("{scheme}://{rest}") })
    }

    /// Returns a key below this one.
    pub(super) fn join(&self, name: &str) -> Key {
        self.key.parts().chain(name.split('/').map(Into::into)).collect()
    }

    /// Returns the directory that a checkpoint lies in, and the checkpoint's step.
    pub(super) fn parent(&self) -> io::Result<(Self, u64)> {
        let invalid =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not a checkpoint; give …/step-N", self.url));
        let (above, name) = self.url.rsplit_once('/').ok_or_else(invalid)?;
        // `step-N`, or `step-N.…` where there are several of one step.
        let step = name.strip_prefix("step-").and_then(|n| n.split('.').next()?.parse().ok()).ok_or_else(invalid)?;
        Ok((Location::of(Path::new(above))?, step))
    }

    /// Returns whether the store refuses to overwrite an object if asked to. This is tried once,
    /// with an object of our own: some stores accept the condition and ignore it.
    pub(super) async fn heeds_conditions(&self) -> io::Result<bool> {
        if let Some(known) = self.bucket.conditional.get() {
            return Ok(*known);
        }
        let (store, key) = (&self.bucket.store, self.join(&format!("probes/{:016x}", unique_id())));
        let put = || store.put_opts(&key, PutPayload::from_static(PROBE), PutMode::Create.into());
        let heeds = match put().await {
            // The object is ours, even if an answer was lost and the store has seen the request
            // twice.
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => match put().await {
                Ok(_) => false,
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => true,
                Err(e) => return Err(failed(e)),
            },
            Err(object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. }) => false,
            Err(e) => return Err(failed(e)),
        };
        // If it stays there, it does no harm.
        let _ = store.delete(&key).await;
        Ok(*self.bucket.conditional.get_or_init(|| heeds))
    }
}

/// Returns the identity of a bucket among the open ones: after a move to another endpoint, the same
/// name means another store.
fn at_endpoint(root: &str) -> String {
    let endpoints: Vec<String> = ENDPOINTS.iter().filter_map(|n| std::env::var(n).ok()).collect();
    format!("{root} {}", endpoints.join(" "))
}

/// Makes URLs that begin with one of `roots` name one bucket in memory.
#[cfg(test)]
pub(super) fn keep_in_memory(roots: &[&str], conditional: bool) {
    let store = Box::new(object_store::memory::InMemory::new());
    let bucket = Arc::new(Bucket { store, conditional: conditional.into() });
    let mut buckets = BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
    buckets.extend(roots.iter().map(|root| (at_endpoint(root), bucket.clone())));
}

/// Checks that the store answers.
///
/// # Errors
/// Those of the store; `TimedOut` when it does not answer for a while.
pub(super) fn reach(at: &Location) -> io::Result<()> {
    wait(async {
        let below = at.join("manifests");
        let asked = at.bucket.store.list_with_delimiter(Some(&below));
        let what = "the store does not answer; check the endpoint and the credentials";
        let late = || io::Error::new(io::ErrorKind::TimedOut, what);
        tokio::time::timeout(REACH_TIMEOUT, asked).await.map_err(|_| late())?.map_err(failed).map(drop)
    })
}

fn open(scheme: &str, root: &str) -> Result<Box<dyn Store>, String> {
    // Retries are limited by time, not by number: a store that restarts refuses connections for
    // seconds.
    let retry = RetryConfig { max_retries: 1000, retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    let plain = ENDPOINTS.iter().any(|name| std::env::var(name).is_ok_and(|endpoint| endpoint.starts_with("http://")));
    let options = ClientOptions::new().with_timeout(REQUEST_TIMEOUT).with_connect_timeout(CONNECT_TIMEOUT);
    let text = |e: object_store::Error| e.to_string();
    Ok(match scheme_of(scheme) {
        Some("s3") => {
            let mut builder = AmazonS3Builder::from_env();
            if let Ok(endpoint) = std::env::var("AWS_ENDPOINT_URL_S3") {
                builder = builder.with_endpoint(endpoint);
            }
            // Each part is sent with its CRC-64/NVME, which the store compares; so the signature
            // need not hash it.
            if std::env::var("AWS_CHECKSUM_ALGORITHM").is_err() {
                builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
            }
            let builder = builder.with_unsigned_payload(true).with_conditional_put(S3ConditionalPut::ETagMatch);
            let options = options.with_allow_http(plain);
            Box::new(builder.with_url(root).with_retry(retry).with_client_options(options).build().map_err(text)?)
        }
        Some("gs") => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(root).with_retry(retry);
            Box::new(builder.with_client_options(options).build().map_err(text)?)
        }
        Some("az") => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(root).with_retry(retry);
            Box::new(builder.with_client_options(options).build().map_err(text)?)
        }
        _ => {
            return Err(format!(
                "{scheme}:// is not a supported object store; give s3://, gs:// or az://, or a directory"
            ));
        }
    })
}
