//! A sealed slot, written as one object: in parts, several at a time, each verified against the
//! checksums of its capture before it is sent.

use super::bucket::{Location, failed, wait};
use crate::arena::Reader;
use crate::direct_io::Throttle;
use crate::format::digest::CHUNK_BYTES;
use crate::format::mark::{MARK_FILE, Mark};
use crate::sealed_shard::SealedShard;
use crate::unique_id::unique_id;
use bytes::Bytes;
use everstep_core::message::ShardFile;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt, PutPayload};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Number of parts in flight: stores give each connection 40 to 100 MB/s.
const AT_ONCE: usize = 16;
/// The smallest part that every store accepts, and the largest that can be sent again at low cost.
const PART_BYTES: (usize, usize) = (8 << 20, 64 << 20);
/// Maximum number of parts of an upload that stores accept.
const PARTS_MAX: usize = 10_000;

/// Note that is written before an upload in parts begins.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Begun {
    /// Mark of the writer.
    #[serde(default)]
    pub mark: Option<Mark>,
    pub key: String,
    pub id: String,
}

/// Memory of a slot, which stays mapped and unchanged while a request needs it.
struct Held {
    reader: Arc<Reader>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.reader.region(self.range.start, self.range.len()).unwrap_or_default()
    }
}

/// Returns the length in bytes of each part but the last. All have the same length, as some stores
/// require.
fn part_bytes(total: usize) -> usize {
    let shared = total.div_ceil(AT_ONCE).next_multiple_of(CHUNK_BYTES).clamp(PART_BYTES.0, PART_BYTES.1);
    shared.max(total.div_ceil(PARTS_MAX).next_multiple_of(CHUNK_BYTES))
}

/// Returns a part of the file, which consists of the header and the region.
fn payload(of: &SealedShard, range: Range<usize>) -> io::Result<PutPayload> {
    let header = of.header.len();
    let mut pieces = Vec::with_capacity(2);
    if range.start < header {
        let head = of.header.get(range.start..range.end.min(header)).unwrap_or_default();
        pieces.push(Bytes::copy_from_slice(head));
    }
    if range.end > header {
        let body = range.start.saturating_sub(header)..range.end - header;
        verified(of, &body)?;
        pieces.push(Bytes::from_owner(Held { reader: of.reader.clone(), range: body }));
    }
    Ok(PutPayload::from_iter(pieces))
}

/// Checks that the chunks of this part of the region are those that were captured.
fn verified(of: &SealedShard, body: &Range<usize>) -> io::Result<()> {
    let chunks = body.start / CHUNK_BYTES..body.end.div_ceil(CHUNK_BYTES);
    match chunks.into_iter().find(|chunk| !of.holds(*chunk)) {
        None => Ok(()),
        Some(chunk) => {
            let what = format!("chunk {chunk} of {} is damaged in memory", of.name);
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

/// Writes a prepared shard under a name that no other writer uses.
///
/// # Errors
/// Those of the store; `InvalidData` when memory differs from what was captured.
pub(super) fn write_shard(to: &Location, of: &SealedShard, mark: &Mark, throttle: &Throttle) -> io::Result<ShardFile> {
    let attempt = format!("{}-{:016x}", mark.turn_text(), unique_id());
    let file = format!("{attempt}/{}", of.name);
    let key = to.join(&format!("step-{}/{file}", of.label.step));
    let total = of.header.len() + of.region;
    let part = part_bytes(total);
    let json = serde_json::to_vec(mark)?;
    wait(async {
        let there = to.join(&format!("step-{}/{attempt}/{MARK_FILE}", of.label.step));
        to.bucket.store.put(&there, json.into()).await.map_err(failed)?;
        if total <= part {
            tokio::time::sleep(throttle.delay(total)).await;
            to.bucket.store.put(&key, payload(of, 0..total)?).await.map_err(failed)?;
        } else {
            in_parts(to, of, &key, &attempt, mark, part, throttle).await?;
        }
        Ok(())
    })?;
    of.written(file)
}

async fn in_parts(
    to: &Location,
    of: &SealedShard,
    key: &Key,
    attempt: &str,
    mark: &Mark,
    part: usize,
    throttle: &Throttle,
) -> io::Result<()> {
    let store: &dyn MultipartStore = &*to.bucket.store;
    let total = of.header.len() + of.region;
    let id = store.create_multipart(key).await.map_err(failed)?;
    let note = to.join(&format!("uploads/{attempt}.json"));
    let begun = serde_json::to_vec(&Begun { mark: Some(*mark), key: key.to_string(), id: id.clone() })?;
    let done = async {
        to.bucket.store.put(&note, begun.into()).await.map_err(failed)?;
        let ranges = (0..total).step_by(part).map(|at| at..(at + part).min(total));
        let sent = stream::iter(ranges.enumerate()).map(|(n, range)| {
            let id = &id;
            async move {
                tokio::time::sleep(throttle.delay(range.len())).await;
                store.put_part(key, id, n, payload(of, range)?).await.map_err(failed)
            }
        });
        let parts = sent.buffered(AT_ONCE).try_collect().await?;
        if let Err(e) = store.complete_multipart(key, &id, parts).await {
            // The upload may be complete, and the answer lost: the second time there is nothing
            // left to complete.
            let there = to.bucket.store.head(key).await.is_ok_and(|o| o.size == total as u64);
            return if there { Ok(()) } else { Err(failed(e)) };
        }
        Ok(())
    };
    let done: io::Result<()> = done.await;
    // An upload that cannot be ended now is found later by its note.
    if done.is_err() && store.abort_multipart(key, &id).await.is_err() {
        return done;
    }
    let _ = to.bucket.store.delete(&note).await;
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chunks_and_as_few_as_stores_take() {
        assert_eq!(part_bytes(10 << 20), 8 << 20);
        assert_eq!(part_bytes(1 << 30), 64 << 20);
        assert_eq!(part_bytes(200 << 20), 13 << 20);
        assert!((5usize << 40).div_ceil(part_bytes(5 << 40)) <= PARTS_MAX);
    }
}
