//! Durable checkpoints in an object store (S3, GCS, Azure), so that a crash at any request leaves
//! the previous checkpoint whole.
//!
//! ```text
//!  step-N/E.G-XXXX/everstep-mark.json    who writes here (E: epoch of the directory's owner, G: its generation), before the shard
//!  step-N/E.G-XXXX/rank-R.safetensors   each rank: under a name that nobody else uses, in parts, several at a time
//!  manifests/step-N.json              the leader, when all shards are there: one conditional put; from now on it exists
//!  manifests/step-N.E.G-XXXX.json     the same in a store that ignores conditions: the newest generation's counts
//!  uploads/E.G-XXXX.json                an upload in parts that has begun: whoever finds it later ends it (parts follow the note: one without it holds nothing)
//!  notes/step-N.E.G/rank-R.json         a shard, for whoever publishes (see `persist::note`)
//! ```
//!
//! Everything here blocks: it is called from threads of their own, and waits on a runtime that is
//! started when first used.

mod bucket;
mod commit;
mod notes;
mod prune;
mod source;
mod storage;
mod upload;

pub use bucket::{Location, is_url};
pub(crate) use source::Object;
