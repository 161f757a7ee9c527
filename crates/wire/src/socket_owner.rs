//! Finds out from the kernel whose socket of this machine is at an address: `sock_diag(7)`, or
//! `/proc/net/tcp` if that is unavailable.

use rustix::fd::OwnedFd;
use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

/// What the kernel reports about a socket of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A process of this user has it open.
    Held(u32),
    /// No process has it open: it is not accepted yet, or closed already.
    Loose,
    /// There is no such socket.
    Nothing,
    /// The kernel gives no answer.
    Unknown,
}

/// Converts IPv4-mapped IPv6 addresses to IPv4.
pub(crate) fn plain(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// Finds the socket at `at` that is connected to `to`.
pub(crate) fn connection(at: SocketAddr, to: SocketAddr) -> Found {
    find(at, Some(to))
}

/// Finds the socket that listens at `at`, an address of this machine.
pub(crate) fn listener(at: SocketAddr) -> Found {
    find(at, None)
}

fn find(at: SocketAddr, to: Option<SocketAddr>) -> Found {
    /// Set once the kernel has found a socket. From then on, its finding none can be trusted.
    static TELLS: AtomicBool = AtomicBool::new(false);
    match ask(at, to) {
        Some(Found::Nothing) if TELLS.load(Ordering::Relaxed) => Found::Nothing,
        Some(found @ (Found::Held(_) | Found::Loose)) => {
            TELLS.store(true, Ordering::Relaxed);
            found
        }
        _ => listed(at, to),
    }
}

/// Returns whether `ip` is an address of this machine. It need not be the one from which this
/// machine connects to it: a secondary address is reached from the primary one.
pub(crate) fn is_own(ip: IpAddr) -> bool {
    const LOCAL: u8 = 2;
    const TYPE_AT: usize = 23;
    // Without an answer, the address is judged by what is known of the connection.
    let answer = exchange(None, &route_request(ip), |answer| Some((kind(answer)?, *answer.get(TYPE_AT)?)));
    answer == Some((NEW_ROUTE, LOCAL))
}

const HEADER_BYTES: usize = 16;
const BY_FAMILY: u16 = 20;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const REQUEST: u16 = 1;
const ERROR: u16 = 2;
const TCP: u8 = 6;
const NO_COOKIE: [u8; 8] = [0xff; 8];
const LISTEN: u8 = 10;
/// Number of the loopback interface in every network namespace.
const LOOPBACK: u32 = 1;
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

fn family(at: IpAddr) -> u8 {
    if at.is_ipv4() { 2 } else { 10 }
}

/// Prepends the header of a netlink message.
fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend(((HEADER_BYTES + body.len()) as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend(body);
    bytes
}

/// Encodes a `struct inet_diag_req_v2` (`linux/inet_diag.h`).
fn socket_request(at: SocketAddr, to: Option<SocketAddr>) -> Vec<u8> {
    let mut body = vec![family(at.ip()), TCP, 0, 0];
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(at.port().to_be_bytes());
    body.extend(to.map_or(0, |t| t.port()).to_be_bytes());
    body.extend(address(at.ip()));
    body.extend(to.map_or([0; 16], |t| address(t.ip())));
    // A connection within this machine goes through the loopback interface. Without its number, a
    // socket that is bound to this interface, as any user may do, would not be found.
    body.extend(LOOPBACK.to_ne_bytes());
    body.extend(NO_COOKIE);
    message(BY_FAMILY, &body)
}

/// Encodes a `struct rtmsg` (`linux/rtnetlink.h`) with a destination.
fn route_request(ip: IpAddr) -> Vec<u8> {
    const DESTINATION: u16 = 1;
    let length: u8 = if ip.is_ipv4() { 4 } else { 16 };
    let mut body = vec![family(ip), length * 8];
    body.extend([0; 10]);
    body.extend((4 + u16::from(length)).to_ne_bytes());
    body.extend(DESTINATION.to_ne_bytes());
    body.extend(address(ip).iter().take(usize::from(length)));
    message(GET_ROUTE, &body)
}

/// Sends a request to the kernel, which answers at once.
fn exchange<T>(protocol: Option<Protocol>, request: &[u8], read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let netlink: OwnedFd = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol).ok()?;
    sendto(&netlink, request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
    let mut answer = [0u8; 1024];
    let (held, _) = recv(&netlink, &mut answer, RecvFlags::empty()).ok()?;
    read(answer.get(..held)?)
}

fn ask(at: SocketAddr, to: Option<SocketAddr>) -> Option<Found> {
    exchange(Some(SOCK_DIAG), &socket_request(at, to), |answer| read(answer, to.is_none()))
}

fn kind(answer: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?))
}

fn read(answer: &[u8], listens: bool) -> Option<Found> {
    if kind(answer)? == ERROR {
        return Some(Found::Nothing);
    }
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let (uid, inode, state) = (word(UID_AT)?, word(INODE_AT)?, *answer.get(STATE_AT)?);
    // The kernel answers with a listener if there is no such connection, even if it asks for one
    // with another machine.
    if (state == LISTEN) != listens {
        return Some(Found::Nothing);
    }
    // A socket that no process has open belongs to no user, which the kernel may report as root.
    Some(if inode == 0 { Found::Loose } else { Found::Held(uid) })
}

/// Finds a socket in `/proc/net/tcp`, also if it is bound to an interface. That takes long on a
/// machine with many connections.
pub(crate) fn listed(at: SocketAddr, to: Option<SocketAddr>) -> Found {
    // A socket for both families is in the table of IPv6.
    let files: &[_] = if at.is_ipv4() { &["/proc/net/tcp", "/proc/net/tcp6"] } else { &["/proc/net/tcp6"] };
    let texts: Vec<String> = files.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    if texts.is_empty() { Found::Unknown } else { in_tables(&texts, at, to) }
}

fn in_tables(texts: &[String], at: SocketAddr, to: Option<SocketAddr>) -> Found {
    let near = names(at, to.is_none());
    let far = to.map(|to| names(to, false));
    let (mut found, mut best) = (Found::Nothing, usize::MAX);
    for line in texts.iter().flat_map(|text| text.lines()) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, state, _, _, _, uid, _, inode, ..] = fields.as_slice() else { continue };
        let Some(rank) = near.iter().position(|name| name == local) else { continue };
        let fits = far.as_ref().map_or(*state == "0A", |far| far.iter().any(|name| name == remote));
        if let Some(uid) = uid.parse().ok().filter(|_| fits && rank < best) {
            found = if *inode == "0" { Found::Loose } else { Found::Held(uid) };
            best = rank;
        }
    }
    found
}

/// Returns how the tables may write an address; for a listener also the addresses that stand for
/// all, after it, because the kernel prefers the listener with the more exact address.
fn names(at: SocketAddr, listens: bool) -> Vec<String> {
    let mut ips = vec![at.ip()];
    if let IpAddr::V4(ip) = at.ip() {
        ips.push(ip.to_ipv6_mapped().into());
        if listens {
            ips.push(Ipv4Addr::UNSPECIFIED.into());
        }
    }
    if listens {
        ips.push(Ipv6Addr::UNSPECIFIED.into());
    }
    ips.into_iter().map(|ip| name(ip, at.port())).collect()
}

/// Formats an address like `/proc/net/tcp`: words in the machine's byte order.
fn name(ip: IpAddr, port: u16) -> String {
    let bytes = address(ip);
    let words = bytes.chunks(4).take(if ip.is_ipv4() { 1 } else { 4 });
    let word = |w: &[u8]| w.try_into().map_or(0, u32::from_ne_bytes);
    let text: String = words.map(|w| format!("{:08X}", word(w))).collect();
    format!("{text}:{port:04X}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const OWN: fn() -> u32 = || rustix::process::geteuid().as_raw();

    #[test]
    fn both_sources_find_listeners_and_connections() {
        for address in ["127.0.0.1", "0.0.0.0", "[::1]", "[::]"] {
            let Ok(server) = TcpListener::bind(format!("{address}:0")) else { continue };
            let port = server.local_addr().unwrap().port();
            let near = if address == "[::1]" { "[::1]" } else { "127.0.0.1" };
            let at: SocketAddr = format!("{near}:{port}").parse().unwrap();
            let client = TcpStream::connect(at).unwrap();
            let from = client.local_addr().unwrap();
            for look in [find, listed] {
                assert_eq!(look(at, None), Found::Held(OWN()), "{address}");
                assert_eq!(look(from, Some(at)), Found::Held(OWN()), "{address}");
                assert_ne!(look(at, Some(from)), Found::Held(OWN()), "{address}: not accepted yet");
            }
            let _accepted = server.accept().unwrap();
            drop(server);
            for look in [find, listed] {
                assert_eq!(look(at, None), Found::Nothing, "{address}");
                assert_eq!(look(at, Some(from)), Found::Held(OWN()), "{address}");
            }
        }
    }

    #[test]
    fn a_listener_is_not_an_end_of_a_connection_with_another_machine() {
        let server = TcpListener::bind("0.0.0.0:0").unwrap();
        let elsewhere = SocketAddr::new([198, 51, 100, 7].into(), server.local_addr().unwrap().port());
        assert_eq!(connection(elsewhere, "127.0.0.1:9".parse().unwrap()), Found::Nothing);
    }

    #[test]
    fn the_exact_listener_comes_before_the_one_at_all_addresses() {
        let row = |ip: IpAddr, uid: u32| {
            let at = name(ip, 80);
            format!("0: {at} 0:0 0A 0:0 00:0 0 {uid} 0 77 1\n")
        };
        let (all, exact) = (Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into());
        let texts = [row(all, 3), row(Ipv4Addr::UNSPECIFIED.into(), 4), row(exact, 5)];
        let at = SocketAddr::new(exact, 80);
        assert_eq!(in_tables(&texts, at, None), Found::Held(5));
        assert_eq!(in_tables(&texts[..2], at, None), Found::Held(4));
        assert_eq!(in_tables(&texts[..1], at, None), Found::Held(3));
        assert_eq!(in_tables(&texts, SocketAddr::new(exact, 81), None), Found::Nothing);
    }

    #[test]
    fn the_addresses_of_this_machine_are_known() {
        assert!(is_own(Ipv4Addr::new(127, 3, 4, 5).into()));
        assert!(!is_own(Ipv4Addr::new(198, 51, 100, 7).into()));
    }
}
