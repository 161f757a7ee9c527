//! Connections that bring something into one slot, and who may write there.

use crate::arena::Writing;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, Weak};

/// See the module.
#[derive(Debug)]
pub struct Bringers {
    /// Nobody wants it any more.
    cancelled: AtomicBool,
    /// Each once. They are their conversations', and end with them.
    streams: Mutex<Vec<Weak<TcpStream>>>,
    /// Held by whoever writes into the slot; `None` once nobody may any more.
    writing: RwLock<Option<Writing>>,
}

impl Bringers {
    /// Those of a slot that was begun.
    pub fn of(slot: Writing) -> Self {
        Bringers { cancelled: AtomicBool::new(false), streams: Mutex::default(), writing: RwLock::new(Some(slot)) }
    }

    /// This connection, too, brings parts of it.
    pub fn attach(&self, stream: &Arc<TcpStream>) {
        self.detach(stream);
        if let Ok(mut streams) = self.streams.lock() {
            streams.push(Arc::downgrade(stream));
        }
    }

    /// This connection brings something else from now on.
    pub fn detach(&self, stream: &Arc<TcpStream>) {
        if let Ok(mut streams) = self.streams.lock() {
            streams.retain(|s| s.strong_count() > 0 && !std::ptr::eq(s.as_ptr(), Arc::as_ptr(stream)));
        }
    }

    /// Ends it: when this returns, nobody writes into the slot any more.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        for stream in self.streams.lock().iter().flat_map(|s| s.iter()).filter_map(Weak::upgrade) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(self.take());
    }

    /// The right to write into the slot, beside others.
    ///
    /// # Errors
    /// `InvalidData` when it is over.
    pub fn write(&self) -> io::Result<Share<'_>> {
        let share = self.writing.read().ok().map(Share);
        share.filter(|s| s.0.is_some() && !self.is_over()).ok_or_else(over)
    }

    /// Takes the slot, to seal it, once nobody writes into it. `None` if it is sealed already, or
    /// if nobody wants it any more.
    pub fn take(&self) -> Option<Writing> {
        self.writing.write().ok()?.take()
    }

    /// Nobody wants it any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// See [`Bringers::write`].
#[derive(Debug)]
pub struct Share<'a>(RwLockReadGuard<'a, Option<Writing>>);

impl Share<'_> {
    /// The slot.
    ///
    /// # Errors
    /// `InvalidData` when it is over.
    pub fn slot(&self) -> io::Result<&Writing> {
        self.0.as_ref().ok_or_else(over)
    }
}

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what this stream brings is not wanted any more")
}
