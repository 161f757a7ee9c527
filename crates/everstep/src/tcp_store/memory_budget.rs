//! The memory of a process-group store. Bytes are counted until nobody holds them any more, be it
//! the store, a client that is sending them, or one to which they are being sent.

use everstep_wire::limits::STORE_BYTES_MAX;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that an entry needs besides its bytes.
pub(super) const ENTRY: u64 = 96;

/// The memory that one store may use.
#[derive(Clone, Default)]
pub(super) struct MemoryBudget(Arc<AtomicU64>);

/// Bytes that are counted until this is dropped.
pub(super) struct Reserved {
    budget: MemoryBudget,
    bytes: u64,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl MemoryBudget {
    /// Reserves bytes, before memory is allocated.
    pub(super) fn take(&self, bytes: u64) -> io::Result<Reserved> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= STORE_BYTES_MAX);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| full())?;
        Ok(Reserved { budget: self.clone(), bytes })
    }

    pub(super) fn held(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn full() -> io::Error {
    let why = format!("the process-group store is full ({} MiB)", STORE_BYTES_MAX >> 20);
    io::Error::new(io::ErrorKind::StorageFull, why)
}

impl Reserved {
    pub(super) fn grow(&mut self, bytes: u64) -> io::Result<()> {
        self.absorb(self.budget.take(bytes)?);
        Ok(())
    }

    pub(super) fn absorb(&mut self, mut other: Reserved) {
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

/// Bytes with their reservation.
pub(super) struct Held {
    bytes: Vec<u8>,
    reserved: Reserved,
}

impl Held {
    /// `reserved` must be enough for `bytes`.
    pub(super) fn new(bytes: Vec<u8>, reserved: Reserved) -> Self {
        Held { bytes, reserved }
    }

    /// Separates the bytes from their reservation.
    pub(super) fn split(self) -> (Vec<u8>, Reserved) {
        (self.bytes, self.reserved)
    }

    /// Counts what `other` counts here, too.
    pub(super) fn absorb(&mut self, other: Reserved) {
        self.reserved.absorb(other);
    }

    /// Counts more, besides the bytes.
    pub(super) fn grow(&mut self, bytes: u64) -> io::Result<()> {
        self.reserved.grow(bytes)
    }

    /// Appends bytes.
    pub(super) fn extend(&mut self, more: &[u8]) -> io::Result<()> {
        self.reserved.grow(more.len() as u64)?;
        self.bytes.extend_from_slice(more);
        Ok(())
    }
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
