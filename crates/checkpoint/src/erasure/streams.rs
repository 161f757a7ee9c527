//! Idle streams to other agents, kept for reuse.

use crate::replicate::protocol::{Peer, Stream};
use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;

/// Idle streams by the address of the peer.
#[derive(Debug, Default)]
pub struct Streams {
    idle: Mutex<BTreeMap<String, Vec<Stream>>>,
}

impl Streams {
    pub(super) fn take(&self, peer: &Peer) -> io::Result<Stream> {
        let idle = self.idle.lock().ok().and_then(|mut all| all.get_mut(&peer.address).and_then(Vec::pop));
        idle.map_or_else(|| Stream::open(peer), Ok)
    }

    pub(super) fn give(&self, peer: &Peer, stream: Stream) {
        if let Ok(mut all) = self.idle.lock() {
            all.entry(peer.address.clone()).or_default().push(stream);
        }
    }

    /// Closes all idle streams.
    pub fn clear(&self) {
        if let Ok(mut all) = self.idle.lock() {
            all.clear();
        }
    }
}
