//! The send queue of one connection, asked for by its addresses: a microsecond, where a list of all takes the kernel milliseconds.
//!
//! Source: sock_diag(7), `linux/inet_diag.h` (`inet_diag_req_v2`, `inet_diag_msg`), netlink(7).

use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::os::fd::OwnedFd;

/// `SOCK_DIAG_BY_FAMILY`; `NLM_F_REQUEST`.
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
/// `TCP_ESTABLISHED`, as a bit; `IPPROTO_TCP`.
const ESTABLISHED: u32 = 1 << 1;
const TCP: u8 = 6;
/// Bytes of `nlmsghdr`, and of the whole request.
const HEADER: usize = 16;
const LENGTH: usize = HEADER + 56;
/// Where an answer has `idiag_wqueue`.
const QUEUE_AT: usize = HEADER + 4 + 48 + 8;

/// A connection as `struct inet_diag_sockid` begins: ports, then source and destination, all in the order of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    family: u8,
    id: [u8; 36],
}

impl Connection {
    /// Of a line of `/proc/net/tcp` or `tcp6`, if it is established, and not to this machine itself.
    pub fn of(line: &str) -> Option<Connection> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (own, other, state) = (words.next()?, words.next()?, words.next()?);
        let mut id = [0; 36];
        let mut ends = [(0, 4), (2, 20)].into_iter();
        let mut digits = 0;
        for text in [own, other] {
            let (address, port) = text.split_once(':')?;
            let (port_at, address_at) = ends.next()?;
            id.get_mut(port_at..port_at + 2)?.copy_from_slice(&u16::from_str_radix(port, 16).ok()?.to_be_bytes());
            digits = address.len();
            for word in 0..digits / 8 {
                // Each four bytes are written as a number of this machine.
                let value = u32::from_str_radix(address.get(word * 8..word * 8 + 8)?, 16).ok()?;
                let at = address_at + word * 4;
                id.get_mut(at..at + 4)?.copy_from_slice(&value.to_ne_bytes());
            }
        }
        let family = if digits == 8 { 2 } else { 10 };
        let to = id.get(20..)?;
        let mapped = to.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127]);
        let own =
            if family == 2 { to.starts_with(&[127]) } else { mapped || to.get(..16)? == [&[0; 15][..], &[1]].concat() };
        (state == "01" && !own).then_some(Connection { family, id })
    }

    fn request(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend((LENGTH as u32).to_ne_bytes());
        bytes.extend(BY_FAMILY.to_ne_bytes());
        bytes.extend(REQUEST.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([self.family, TCP, 0, 0]);
        bytes.extend(ESTABLISHED.to_ne_bytes());
        bytes.extend(self.id);
        // Any interface; no cookie.
        bytes.extend([0; 4]);
        bytes.extend([255; 8]);
        bytes
    }
}

/// Where it is asked.
#[derive(Debug)]
pub struct Diag(OwnedFd);

impl Diag {
    /// `None` where the kernel does not have it.
    pub fn open() -> Option<Diag> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(SOCK_DIAG)).ok().map(Diag)
    }

    /// Bytes that wait to be sent, or to be confirmed; `None` of a connection that is gone.
    pub fn queue(&self, of: &Connection) -> Option<u32> {
        sendto(&self.0, &of.request(), SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
        let mut answer = [0u8; 512];
        // It is there already: the kernel answers while it is asked.
        let (held, _) = recv(&self.0, &mut answer, RecvFlags::empty()).ok()?;
        let answer = answer.get(..held)?;
        let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
        let queue = || Some(u32::from_ne_bytes(answer.get(QUEUE_AT..QUEUE_AT + 4)?.try_into().ok()?));
        if kind == BY_FAMILY { queue() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn lines_of_the_kernel_are_connections_but_to_this_machine() {
        let four = "   1: 0808000A:1F90 0908000A:0050 01 00000100:00000000 x";
        let of = Connection::of(four).unwrap();
        assert_eq!(
            (of.family, &of.id[..4], &of.id[4..8], &of.id[20..24]),
            (2, &[0x1f, 0x90, 0, 80][..], &[10, 0, 8, 8][..], &[10, 0, 8, 9][..])
        );
        assert_eq!(Connection::of(&four.replace(" 01 ", " 0A ")), None);
        assert_eq!(Connection::of(&four.replace("0908000A", "0100007F")), None);
        let six = "0: 0000000000000000FFFF00000808000A:1F90 0000000000000000FFFF00000908000A:0050 01 0:0 x";
        assert_eq!(Connection::of(six).unwrap().id[20..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 8, 9]);
        assert_eq!(Connection::of(&six.replace("0908000A", "0100007F")), None);
        assert_eq!(
            Connection::of("0: 00000000000000000000000001000000:1 00000000000000000000000001000000:2 01 0:0"),
            None
        );
        assert_eq!(Connection::of("  sl  local_address rem_address   st"), None);
    }

    #[test]
    fn the_kernel_says_what_waits_in_a_connection_and_when_it_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (from, _) = listener.accept().unwrap();
        to.set_nonblocking(true).unwrap();
        while to.write(&[0; 65536]).is_ok() {}
        let mut id = [0; 36];
        id[..2].copy_from_slice(&to.local_addr().unwrap().port().to_be_bytes());
        id[2..4].copy_from_slice(&to.peer_addr().unwrap().port().to_be_bytes());
        id[4..8].copy_from_slice(&[127, 0, 0, 1]);
        id[20..24].copy_from_slice(&[127, 0, 0, 1]);
        let diag = Diag::open().unwrap();
        assert!(diag.queue(&Connection { family: 2, id }).unwrap() > 0);
        drop((to, from));
        id[0] ^= 0x55;
        assert_eq!(diag.queue(&Connection { family: 2, id }), None);
    }
}
