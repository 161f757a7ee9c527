//! Where this process listens: on loopback, and elsewhere only when the user has said so. Nothing else
//! in this program binds a port.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use tokio::net::TcpListener;

/// How to say that the control plane may be reached from other machines without encryption.
pub const REMEDY: &str = "to go on all the same, put one token on all nodes and say so:\n  install -m 600 /dev/null TOKEN && head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n' > TOKEN\n  everstep run --insecure --token-file TOKEN …";

/// True when every address of `host` is this machine's alone.
pub fn is_loopback(host: &str) -> bool {
    let mut addresses = (host, 0).to_socket_addrs().into_iter().flatten().peekable();
    addresses.peek().is_some() && addresses.all(|a| a.ip().to_canonical().is_loopback())
}

/// An address of this machine to listen at.
#[derive(Clone, Debug)]
pub struct Place {
    host: String,
    /// Other machines may come: `--insecure` and a token file were given.
    open: bool,
}

impl Place {
    /// `host`, which must be loopback unless `open`.
    ///
    /// # Errors
    /// A sentence.
    pub fn at(host: &str, open: bool) -> Result<Self, String> {
        if !open && !is_loopback(host) {
            return Err(format!("{host} is not loopback and there is no TLS yet; {REMEDY}"));
        }
        Ok(Place { host: host.to_owned(), open })
    }

    /// Listens at `port`, or at a free one for 0.
    ///
    /// # Errors
    /// Those of binding.
    pub async fn bind(&self, port: u16) -> io::Result<TcpListener> {
        let listener = TcpListener::bind((self.host.as_str(), port)).await?;
        self.check(listener.local_addr()?)?;
        Ok(listener)
    }

    /// The same for threads.
    ///
    /// # Errors
    /// Those of binding.
    pub fn bind_blocking(&self, port: u16) -> io::Result<std::net::TcpListener> {
        let listener = std::net::TcpListener::bind((self.host.as_str(), port))?;
        self.check(listener.local_addr()?)?;
        Ok(listener)
    }

    /// A name may lead elsewhere than it did when it was looked at.
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
