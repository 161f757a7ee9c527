//! The connections that deliver parts of one slot, and the right to write there.

use crate::arena::Writing;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, Weak};

/// The connections that deliver parts of one slot, and the right to write there.
#[derive(Debug)]
pub struct Suppliers {
    /// Whether the delivery was cancelled.
    cancelled: AtomicBool,
    /// Each connection once. The conversations own them.
    streams: Mutex<Vec<Weak<TcpStream>>>,
    /// Locked for reading by threads that write into the slot; `None` once the slot may not be
    /// written any more.
    writing: RwLock<Option<Writing>>,
}

impl Suppliers {
    /// Creates the suppliers of a slot that was begun, without connections.
    pub fn of(slot: Writing) -> Self {
        Suppliers { cancelled: AtomicBool::new(false), streams: Mutex::default(), writing: RwLock::new(Some(slot)) }
    }

    /// Adds a connection that delivers parts of the slot.
    pub fn attach(&self, stream: &Arc<TcpStream>) {
        self.detach(stream);
        if let Ok(mut streams) = self.streams.lock() {
            streams.push(Arc::downgrade(stream));
        }
    }

    /// Removes a connection that delivers something else from now on.
    pub fn detach(&self, stream: &Arc<TcpStream>) {
        if let Ok(mut streams) = self.streams.lock() {
            streams.retain(|s| s.strong_count() > 0 && !std::ptr::eq(s.as_ptr(), Arc::as_ptr(stream)));
        }
    }

    /// Cancels the delivery. When this returns, no thread writes into the slot any more.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        for stream in self.streams.lock().iter().flat_map(|s| s.iter()).filter_map(Weak::upgrade) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(self.take());
    }

    /// Returns the right to write into the slot, shared with others.
    ///
    /// # Errors
    /// `InvalidData` if the delivery is over.
    pub fn write(&self) -> io::Result<Share<'_>> {
        let share = self.writing.read().ok().map(Share);
        share.filter(|s| s.0.is_some() && !self.is_over()).ok_or_else(over)
    }

    /// Takes the slot, to seal it, once no thread writes into it. `None` if it is sealed already,
    /// or if the delivery was cancelled.
    pub fn take(&self) -> Option<Writing> {
        self.writing.write().ok()?.take()
    }

    /// Returns whether the delivery was cancelled.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// The right to write into a slot; see [`Suppliers::write`].
#[derive(Debug)]
pub struct Share<'a>(RwLockReadGuard<'a, Option<Writing>>);

impl Share<'_> {
    /// Returns the slot.
    ///
    /// # Errors
    /// `InvalidData` if the delivery is over.
    pub fn slot(&self) -> io::Result<&Writing> {
        self.0.as_ref().ok_or_else(over)
    }
}

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what this stream brings is not wanted any more")
}
