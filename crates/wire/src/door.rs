//! Admission of connections before their callers have authenticated: connections are counted per
//! user and per machine, and errors while accepting are reported once and retried after a pause.
//!
//! For a connection within this machine, the kernel reports whose socket is at the other end
//! (`sock_diag(7)`, or `/proc/net/tcp` if that is unavailable).

use crate::limits::{UNPROVEN_PER_MACHINE, UNPROVEN_PER_USER, UNPROVEN_TOTAL};
use rustix::fd::OwnedFd;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Who opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Caller {
    /// This user or root, on this machine.
    Own,
    /// Another user of this machine.
    User(u32),
    /// Another machine.
    Machine(IpAddr),
    /// A process on this machine that has already closed the connection.
    Gone,
}

/// What the kernel reports about a socket of this machine.
enum Found {
    /// Its user, and whether a process still has it open.
    Socket {
        uid: u32,
        open: bool,
    },
    Nothing,
    /// The kernel gives no answer.
    Unknown,
}

fn own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Returns what kind of caller opened a connection accepted at `local`.
#[must_use]
pub fn caller(local: SocketAddr, peer: SocketAddr) -> Caller {
    let (local, peer) = (plain(local), plain(peer));
    let here = peer.ip().is_loopback() || peer.ip() == local.ip();
    match socket(peer, Some(local)) {
        Found::Socket { open: false, .. } => Caller::Gone,
        Found::Socket { uid, .. } if own(uid) => Caller::Own,
        Found::Socket { uid, .. } => Caller::User(uid),
        Found::Nothing if here => Caller::Gone,
        Found::Nothing | Found::Unknown => Caller::Machine(peer.ip()),
    }
}

/// Rejects a port of this machine on which another user listens, so that no secret is sent there.
///
/// # Errors
/// `PermissionDenied` if another user listens there.
pub fn check_listener(at: SocketAddr) -> io::Result<()> {
    match socket(plain(at), None) {
        Found::Socket { uid, open: true } if !own(uid) => {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("user {uid} listens at {at}")))
        }
        _ => Ok(()),
    }
}

/// Converts IPv4-mapped IPv6 addresses to IPv4.
fn plain(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// Finds this machine's socket at `at`: connected to `to`, or listening if that is `None`.
fn socket(at: SocketAddr, to: Option<SocketAddr>) -> Found {
    /// Set once the kernel has found a socket. From then on, its finding none can be trusted.
    static TELLS: AtomicBool = AtomicBool::new(false);
    match ask(at, to) {
        Some(found @ Found::Socket { .. }) => {
            TELLS.store(true, Ordering::Relaxed);
            found
        }
        Some(Found::Nothing) if TELLS.load(Ordering::Relaxed) => Found::Nothing,
        _ => table(at, to),
    }
}

const REQUEST_BYTES: usize = 72;
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
const ERROR: u16 = 2;
const TCP: u8 = 6;
const NO_COOKIE: [u8; 8] = [0xff; 8];
const LISTEN: u8 = 10;
/// Offsets into the answer: `struct inet_diag_msg`, after the message header.
const STATE_AT: usize = 17;
const UID_AT: usize = 80;
const INODE_AT: usize = 84;

fn address(at: IpAddr) -> [u8; 16] {
    match at {
        IpAddr::V6(ip) => ip.octets(),
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
    }
}

/// Encodes a `struct inet_diag_req_v2` (`linux/inet_diag.h`), with its message header.
fn request(at: SocketAddr, to: Option<SocketAddr>) -> Vec<u8> {
    let family: u8 = if at.is_ipv4() { 2 } else { 10 };
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(at.port().to_be_bytes());
    bytes.extend(to.map_or(0, |t| t.port()).to_be_bytes());
    bytes.extend(address(at.ip()));
    bytes.extend(to.map_or([0; 16], |t| address(t.ip())));
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(NO_COOKIE);
    bytes
}

fn ask(at: SocketAddr, to: Option<SocketAddr>) -> Option<Found> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let netlink: OwnedFd = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(SOCK_DIAG)).ok()?;
    sendto(&netlink, &request(at, to), SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
    let mut answer = [0u8; 1024];
    let (held, _) = recv(&netlink, &mut answer, RecvFlags::empty()).ok()?;
    read(answer.get(..held)?, to.is_none())
}

fn read(answer: &[u8], listens: bool) -> Option<Found> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if kind == ERROR {
        return Some(Found::Nothing);
    }
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let (uid, inode, state) = (word(UID_AT)?, word(INODE_AT)?, *answer.get(STATE_AT)?);
    // A closed socket belongs to no user, which the kernel reports as root.
    let open = inode != 0 && (state == LISTEN) == listens;
    Some(Found::Socket { uid, open })
}

fn table(at: SocketAddr, to: Option<SocketAddr>) -> Found {
    let path = if at.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
    let Ok(text) = std::fs::read_to_string(path) else { return Found::Unknown };
    let (at, to) = (in_table(at), to.map(in_table));
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, state, _, _, _, uid, _, inode, ..] = fields.as_slice() else { continue };
        let matches = *local == at && to.as_deref().map_or(*state == "0A", |to| *remote == to);
        if let Some(uid) = uid.parse().ok().filter(|_| matches) {
            return Found::Socket { uid, open: *inode != "0" };
        }
    }
    Found::Nothing
}

/// Formats an address like `/proc/net/tcp`: words in the machine's byte order.
fn in_table(at: SocketAddr) -> String {
    let bytes = address(at.ip());
    let words = bytes.chunks(4).take(if at.is_ipv4() { 1 } else { 4 });
    let word = |w: &[u8]| w.try_into().map_or(0, u32::from_ne_bytes);
    let text: String = words.map(|w| format!("{:08X}", word(w))).collect();
    format!("{text}:{:04X}", at.port())
}

/// The connections whose callers have not authenticated yet.
#[derive(Clone, Debug, Default)]
pub struct Door {
    waiting: Arc<Mutex<BTreeMap<Caller, usize>>>,
}

/// Counts a connection until it is dropped: when its caller authenticates, or the connection ends.
#[derive(Debug)]
pub struct Pass {
    door: Door,
    caller: Caller,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut waiting = self.door.waiting();
        if let Some(count) = waiting.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.caller);
            }
        }
    }
}

impl Door {
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
        Some(Pass { door: self.clone(), caller })
    }
}

/// Errors while accepting connections: a pause after each, and one message per burst.
#[derive(Debug, Default)]
pub struct Trouble {
    pause: Duration,
    last: Option<Instant>,
}

/// First and longest pause.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    #[test]
    fn the_kernel_says_whose_connection_it_is() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let local = listener.local_addr().unwrap();
            let client = TcpStream::connect(local).unwrap();
            let (_server, peer) = listener.accept().unwrap();
            assert_eq!(caller(local, peer), Caller::Own);
            assert!(matches!(table(peer, Some(local)), Found::Socket { open: true, .. }));
            assert!(check_listener(local).is_ok());
            drop(client);
            assert_eq!(caller(local, peer), Caller::Gone, "{address}");
        }
    }

    #[test]
    fn callers_that_prove_nothing_are_limited_and_this_user_is_not() {
        let door = Door::default();
        let own: Vec<_> = (0..5000).map(|_| door.admit(Caller::Own).unwrap()).collect();
        let mut user: Vec<_> = (0..UNPROVEN_PER_USER).map(|_| door.admit(Caller::User(7)).unwrap()).collect();
        assert!(door.admit(Caller::User(7)).is_none() && door.admit(Caller::User(8)).is_some());
        user.pop();
        assert!(door.admit(Caller::User(7)).is_some());
        let machine = |n: u32| Caller::Machine(IpAddr::V4(Ipv4Addr::from(n)));
        let all: Vec<_> = (0..10_000).filter_map(|n| door.admit(machine(n))).collect();
        assert!(all.len() <= UNPROVEN_TOTAL && door.admit(Caller::Own).is_some());
        drop((own, user, all));
        assert!(door.waiting().is_empty());
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
