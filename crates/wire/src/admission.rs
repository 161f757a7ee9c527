//! Admission of connections before their callers have authenticated: connections are counted per
//! user and per machine, and errors while accepting are reported once and retried after a pause.
//!
//! For a connection within this machine, the kernel reports whose socket is at the other end. This
//! also shows whether a secret may be sent there.

use crate::limits::{UNPROVEN_PER_MACHINE, UNPROVEN_PER_USER, UNPROVEN_TOTAL};
use crate::socket_owner::{self, Found, plain};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Caller {
    /// This user or root, on this machine.
    Own,
    /// Another user of this machine.
    User(u32),
    /// Another machine, by its address.
    Machine(IpAddr),
    /// A process on this machine that has already closed the connection.
    Gone,
}

fn own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Returns what kind of caller opened a connection accepted at `local`.
#[must_use]
pub fn caller(local: SocketAddr, peer: SocketAddr) -> Caller {
    let (local, peer) = (plain(local), plain(peer));
    let found = match socket_owner::connection(peer, local) {
        Found::Nothing if peer.ip().is_loopback() || peer.ip() == local.ip() => return Caller::Gone,
        // It may be bound to an interface. If it is not, an address translation hides another
        // machine, or a container.
        Found::Nothing if socket_owner::is_own(peer.ip()) => socket_owner::listed(peer, Some(local)),
        found => found,
    };
    match found {
        Found::Loose => Caller::Gone,
        Found::Held(uid) if own(uid) => Caller::Own,
        Found::Held(uid) => Caller::User(uid),
        Found::Nothing | Found::Unknown => Caller::Machine(peer.ip()),
    }
}

/// Rejects a connection from `local` to a `peer` on this machine that another user may have
/// accepted, so that no secret is sent there. Other machines are not checked.
///
/// # Errors
/// `PermissionDenied` if another user is there; `ConnectionReset` if no process is, or no longer.
pub fn check_peer(local: SocketAddr, peer: SocketAddr) -> io::Result<()> {
    let (local, peer) = (plain(local), plain(peer));
    let loopback = peer.ip().is_loopback();
    if !loopback && peer.ip() != local.ip() && !socket_owner::is_own(peer.ip()) {
        return Ok(());
    }
    let told = matches!(socket_owner::connection(local, peer), Found::Held(_));
    judge(peer, told, |what| match what {
        Look::End => socket_owner::connection(peer, local),
        Look::Listener => socket_owner::listener(peer),
        // On loopback, addresses are not translated.
        Look::AnyEnd if loopback => Found::Loose,
        Look::AnyEnd => socket_owner::listed(peer, Some(local)),
    })
}

/// A lookup that [`judge`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// The other end of the connection.
    End,
    /// The other end of the connection, even if it is bound to an interface.
    AnyEnd,
    /// The listener at the other end's address.
    Listener,
}

/// Decides whether the other end of a connection within this machine is ours. `told` means that the
/// kernel knows at least our own end.
///
/// The end itself is looked up first, because a listener may have been closed, or replaced, since
/// it accepted the connection.
fn judge(peer: SocketAddr, told: bool, look: impl Fn(Look) -> Found) -> io::Result<()> {
    let foreign = |uid| Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{peer} belongs to user {uid}")));
    let end = look(Look::End);
    match end {
        Found::Held(uid) if !own(uid) => return foreign(uid),
        Found::Held(uid) if uid != 0 => return Ok(()),
        // It waits to be accepted. Or the kernel has accepted it as root: for root, or for a socket
        // of any user in another family (SMC). The listener decides.
        _ => {}
    }
    match look(Look::Listener) {
        Found::Held(uid) if !own(uid) => foreign(uid),
        // As long as this listener is there, no other can take its address.
        Found::Held(_) => match look(Look::End) {
            Found::Held(uid) if !own(uid) => foreign(uid),
            _ => Ok(()),
        },
        // A sandbox shows not even our own end, so the absence of others means nothing. It would
        // mean the end of every job there.
        _ if !told => Ok(()),
        // An address translation leads to another network namespace: no process here gets the
        // secret.
        _ if end == Found::Nothing && look(Look::AnyEnd) == Found::Nothing => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::ConnectionReset, format!("nothing listens on {peer} any more"))),
    }
}

/// The connections whose callers have not authenticated yet.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    waiting: Arc<Mutex<BTreeMap<Caller, usize>>>,
}

/// Counts a connection until it is dropped: when its caller authenticates, or the connection ends.
#[derive(Debug)]
pub struct Pass {
    admission: Admission,
    caller: Caller,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut waiting = self.admission.waiting();
        if let Some(count) = waiting.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.caller);
            }
        }
    }
}

impl Admission {
    fn waiting(&self) -> std::sync::MutexGuard<'_, BTreeMap<Caller, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection that has yet to authenticate, or returns `None` if too many are waiting.
    #[must_use]
    pub fn admit(&self, caller: Caller) -> Option<Pass> {
        let mut waiting = self.waiting();
        let most = match caller {
            Caller::Own => usize::MAX,
            Caller::User(_) => UNPROVEN_PER_USER,
            Caller::Machine(_) => UNPROVEN_PER_MACHINE,
            Caller::Gone => 0,
        };
        let others: usize = waiting.iter().filter(|(c, _)| **c != Caller::Own).map(|(_, n)| n).sum();
        let count = waiting.get(&caller).copied().unwrap_or(0);
        if count >= most || (caller != Caller::Own && others >= UNPROVEN_TOTAL) {
            return None;
        }
        waiting.insert(caller, count + 1);
        Some(Pass { admission: self.clone(), caller })
    }
}

/// Errors while accepting connections: a pause after each, and one message per burst.
#[derive(Debug, Default)]
pub struct Trouble {
    pause: Duration,
    last: Option<Instant>,
}

/// First and longest pause after a failed accept.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// Time without errors after which a burst is over.
const BURST: Duration = Duration::from_mins(1);

impl Trouble {
    /// Records that accepting at `what` failed. Returns how long to pause, and a message if this
    /// error begins a burst.
    pub fn failed(&mut self, what: &str, why: &io::Error) -> (Duration, Option<String>) {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
        if matches!(why.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock) {
            // The caller has already gone.
            return (Duration::ZERO, None);
        }
        let new = self.last.is_none_or(|at| at.elapsed() > BURST);
        self.last = Some(Instant::now());
        self.pause = if new { PAUSES.0 } else { (self.pause * 2).min(PAUSES.1) };
        (self.pause, new.then(|| format!("cannot accept connections {what}: {why}; trying again until it works")))
    }

    /// Resets the pause after a success.
    pub fn over(&mut self) {
        self.pause = Duration::ZERO;
    }
}

#[cfg(all(test, feature = "net"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    fn the_kernel_says_whose_connection_it_is() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let local = listener.local_addr().unwrap();
            let client = TcpStream::connect(local).unwrap();
            let ends = (client.local_addr().unwrap(), local);
            check_peer(ends.0, ends.1).unwrap();
            let (_server, peer) = listener.accept().unwrap();
            assert_eq!(caller(local, peer), Caller::Own);
            check_peer(ends.0, ends.1).unwrap();
            drop(client);
            assert_eq!(caller(local, peer), Caller::Gone, "{address}");
        }
    }

    const OTHER: u32 = 65_534;

    /// Runs `what` as another user, if this one may.
    fn as_another<T: Send>(what: impl FnOnce() -> T + Send) -> Option<T> {
        let become_other = || rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(OTHER)).ok();
        std::thread::scope(|scope| scope.spawn(|| become_other().map(|()| what())).join().unwrap())
    }

    fn on_loopback_interface<T>(what: impl AsyncFnOnce(tokio::net::TcpSocket) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind_device(Some(b"lo")).unwrap();
            what(socket).await
        })
    }

    fn refused_throughout(listener: TcpListener) {
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), listener.local_addr().unwrap().port());
        let client = TcpStream::connect(at).unwrap();
        let check = || check_peer(client.local_addr().unwrap(), at).unwrap_err().kind();
        assert_eq!(check(), io::ErrorKind::PermissionDenied, "waiting");
        let _server = as_another(|| listener.accept().unwrap());
        assert_eq!(check(), io::ErrorKind::PermissionDenied, "accepted");
        drop(listener);
        assert_eq!(check(), io::ErrorKind::PermissionDenied, "no listener any more");
        let _own = TcpListener::bind(at);
        assert_eq!(check(), io::ErrorKind::PermissionDenied, "another listener");
    }

    #[test]
    fn nothing_is_sent_to_a_port_of_another_user() {
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
            let Some(listener) = as_another(|| TcpListener::bind(address).unwrap()) else { return };
            refused_throughout(listener);
        }
        let listen = || {
            on_loopback_interface(async |socket| {
                socket.bind(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)).unwrap();
                let listener = socket.listen(8).unwrap().into_std().unwrap();
                listener.set_nonblocking(false).unwrap();
                listener
            })
        };
        let Some(listener) = as_another(listen) else { return };
        refused_throughout(listener);
    }

    #[test]
    fn another_user_is_known_even_if_bound_to_an_interface() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let connect = || on_loopback_interface(async |socket| socket.connect(local).await.unwrap().into_std().unwrap());
        let Some(_client) = as_another(connect) else { return };
        assert_eq!(caller(local, listener.accept().unwrap().1), Caller::User(OTHER));
    }

    #[test]
    fn a_secret_goes_only_where_this_user_or_root_certainly_is() {
        use Found::{Held, Loose, Nothing, Unknown};
        use io::ErrorKind::{ConnectionReset, PermissionDenied};
        let (us, root, other) = (Held(rustix::process::geteuid().as_raw()), Held(0), Held(OTHER - 1));
        // The end, the listener, the end again, and the end in the table.
        let cases = [
            ([us, us, us, us], true, None),
            ([Loose, us, Loose, Nothing], true, None),
            ([Nothing, us, us, Nothing], true, None),
            ([root, root, root, root], true, None),
            ([other, us, us, us], true, Some(PermissionDenied)),
            ([other, Nothing, other, other], true, Some(PermissionDenied)),
            ([Loose, us, other, other], true, Some(PermissionDenied)),
            ([Loose, other, Loose, Loose], true, Some(PermissionDenied)),
            ([Nothing, other, Nothing, Nothing], false, Some(PermissionDenied)),
            ([Loose, Nothing, Loose, Loose], true, Some(ConnectionReset)),
            ([root, Nothing, root, root], true, Some(ConnectionReset)),
            ([root, other, root, root], true, Some(PermissionDenied)),
            // On loopback, or while the table shows an end.
            ([Nothing, Nothing, Nothing, Loose], true, Some(ConnectionReset)),
            ([Nothing, Nothing, Nothing, other], true, Some(ConnectionReset)),
            // An address translation.
            ([Nothing, Nothing, Nothing, Nothing], true, None),
            // A sandbox.
            ([Nothing, Nothing, Nothing, Nothing], false, None),
            ([Unknown, Unknown, Unknown, Unknown], false, None),
        ];
        for (found, told, want) in cases {
            let ends = std::cell::Cell::new(0);
            let judged = judge("127.0.0.1:1".parse().unwrap(), told, |what| match what {
                Look::End => found[2 * ends.replace(1)],
                Look::Listener => found[1],
                Look::AnyEnd => found[3],
            });
            assert_eq!(judged.err().map(|e| e.kind()), want, "{found:?} {told}");
        }
    }

    #[test]
    fn callers_that_prove_nothing_are_limited_and_this_user_is_not() {
        let admission = Admission::default();
        let own: Vec<_> = (0..5000).map(|_| admission.admit(Caller::Own).unwrap()).collect();
        let mut user: Vec<_> = (0..UNPROVEN_PER_USER).map(|_| admission.admit(Caller::User(7)).unwrap()).collect();
        assert!(admission.admit(Caller::User(7)).is_none() && admission.admit(Caller::User(8)).is_some());
        user.pop();
        assert!(admission.admit(Caller::User(7)).is_some());
        let machine = |n: u32| Caller::Machine(IpAddr::V4(Ipv4Addr::from(n)));
        let all: Vec<_> = (0..10_000).filter_map(|n| admission.admit(machine(n))).collect();
        assert!(all.len() <= UNPROVEN_TOTAL && admission.admit(Caller::Own).is_some());
        drop((own, user, all));
        assert!(admission.waiting().is_empty());
    }

    #[test]
    fn a_burst_of_failures_is_one_line_and_ever_slower() {
        let mut trouble = Trouble::default();
        let full = io::Error::from_raw_os_error(24);
        let (first, line) = trouble.failed("here", &full);
        assert!(line.is_some_and(|l| l.contains("here")) && first > Duration::ZERO);
        let pauses: Vec<_> = (0..20).map(|_| trouble.failed("here", &full)).collect();
        assert!(pauses.iter().all(|(pause, line)| line.is_none() && *pause <= PAUSES.1));
        assert_eq!(pauses[19].0, PAUSES.1);
    }
}
