//! Durable checkpoints in an object store (S3, GCS, Azure), so that a crash at any request leaves
//! the previous checkpoint whole.
//!
//! ```text
//!  step-N/E.G-XXXX/everstep-mark.json    the writer (E: epoch of the directory's owner, G: its generation), before the shard
//!  step-N/E.G-XXXX/rank-R.safetensors   each rank: under a unique name, in parts, several at a time
//!  manifests/step-N.json              the leader, when all shards are there: one conditional put; from now on it exists
//!  manifests/step-N.E.G-XXXX.json     the same in a store that ignores conditions: the newest generation's counts
//!  uploads/E.G-XXXX.json                an upload in parts that has begun: a later clean-up ends it (parts follow the note: an upload without one is empty)
//!  notes/step-N.E.G/rank-R.json         a shard, for the process that publishes (see `persist::note`)
//! ```
//!
//! All functions block: each caller has a thread of its own, and waits on a runtime that is started
//! when it is first used.

mod bucket;
mod commit;
mod notes;
mod prune;
mod source;
mod storage;
mod upload;

pub use bucket::{Location, is_url};
pub(crate) use source::Object;
