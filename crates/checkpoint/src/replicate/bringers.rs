//! Connections that bring something into one slot, and who may write there.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, RwLock, RwLockReadGuard};

/// See the module.
#[derive(Debug, Default)]
pub struct Bringers {
    /// Nobody wants it any more.
    cancelled: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    /// Held by whoever writes into the slot.
    writing: RwLock<()>,
}

impl Bringers {
    /// One more connection brings parts of it.
    pub fn attach(&self, stream: &TcpStream) {
        if let (Ok(mut streams), Ok(stream)) = (self.streams.lock(), stream.try_clone()) {
            streams.push(stream);
        }
    }

    /// Ends it: when this returns, nobody writes into the slot any more.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        for stream in self.streams.lock().iter().flat_map(|s| s.iter()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(self.writing.write());
    }

    /// The right to write into the slot, beside others.
    ///
    /// # Errors
    /// `InvalidData` when it is over.
    pub fn write(&self) -> io::Result<RwLockReadGuard<'_, ()>> {
        self.writing.read().ok().filter(|_| !self.is_over()).ok_or_else(over)
    }

    /// Nobody wants it any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what this stream brings is not wanted any more")
}
