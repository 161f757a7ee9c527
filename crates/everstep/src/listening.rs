//! Where this process listens: on loopback, and elsewhere only with the user's consent. Nothing
//! else in this program binds a port.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use tokio::net::TcpListener;

/// How to allow other machines to reach the control plane without encryption.
pub const REMEDY: &str = "to continue without encryption, create a token once:\n  (umask 077; od -An -N24 -tx1 /dev/urandom | tr -d ' \\n' > TOKEN)\ncopy the file TOKEN to the other nodes, readable only by you, and run on each node:\n  everstep run --insecure --token-file TOKEN …";

/// Returns true if every address of `host` is a loopback address.
pub fn is_loopback(host: &str) -> bool {
    let mut addresses = (host, 0).to_socket_addrs().into_iter().flatten().peekable();
    addresses.peek().is_some() && addresses.all(|a| a.ip().to_canonical().is_loopback())
}

/// An address of this machine to listen at.
#[derive(Clone, Debug)]
pub struct Place {
    host: String,
    /// Other machines may connect: `--insecure` and a token file were given.
    open: bool,
}

/// An address that others reach, without a token to keep them out.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not loopback and there is no TLS yet; {REMEDY}")]
pub struct NotLoopback(String);

impl Place {
    /// Returns the place for `host`, which must be loopback unless `open`.
    ///
    /// # Errors
    /// [`NotLoopback`].
    pub fn at(host: &str, open: bool) -> Result<Self, NotLoopback> {
        if !open && !is_loopback(host) {
            return Err(NotLoopback(host.to_owned()));
        }
        Ok(Place { host: host.to_owned(), open })
    }

    /// Listens at `port`, or at any free port if it is 0.
    ///
    /// # Errors
    /// Those of binding.
    pub async fn bind(&self, port: u16) -> io::Result<TcpListener> {
        let listener = TcpListener::bind((self.host.as_str(), port)).await?;
        self.check(listener.local_addr()?)?;
        Ok(listener)
    }

    /// Does the same for blocking code.
    ///
    /// # Errors
    /// Those of binding.
    pub fn bind_blocking(&self, port: u16) -> io::Result<std::net::TcpListener> {
        let listener = std::net::TcpListener::bind((self.host.as_str(), port))?;
        self.check(listener.local_addr()?)?;
        Ok(listener)
    }

    /// Checks again after binding, because a name may resolve differently than before.
    fn check(&self, at: SocketAddr) -> io::Result<()> {
        if self.open || at.ip().to_canonical().is_loopback() {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{at} is not loopback")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_word_of_the_user_only_loopback_is_listened_at() {
        for host in ["127.0.0.1", "::1", "localhost", "127.8.9.1"] {
            assert!(Place::at(host, false).is_ok(), "{host}");
        }
        for host in ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "no.such.host.invalid"] {
            assert!(Place::at(host, false).is_err() && Place::at(host, true).is_ok(), "{host}");
        }
        let changed = Place { host: "0.0.0.0".into(), open: false };
        assert_eq!(changed.bind_blocking(0).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
