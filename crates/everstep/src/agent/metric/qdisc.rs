//! What waits at this machine's own interfaces to be sent. Send queues of connections would not tell whose link is slow: they hold what is sent and
//! not confirmed, too, and confirmations of a machine whose link is slow come late to whoever sends to it.
//!
//! Source: rtnetlink(7) (`RTM_GETQDISC`), tc(8), `linux/rtnetlink.h` (`tcmsg`), `linux/gen_stats.h`, `linux/pkt_sched.h` (`tc_stats`).

use super::answer::{long, short};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::os::fd::OwnedFd;

/// `RTM_NEWQDISC`, `RTM_GETQDISC`, `NLMSG_DONE`; `NLM_F_REQUEST | NLM_F_DUMP`.
const NEW: u16 = 36;
const GET: u16 = 38;
const DONE: u16 = 3;
const DUMP: u16 = 0x301;
/// Bytes of `nlmsghdr`, and with `tcmsg`.
const HEADER: usize = 16;
const LENGTH: usize = HEADER + 20;
/// Where messages have the interface, and whose part a queue is; attributes follow.
const INTERFACE_AT: usize = HEADER + 4;
const PARENT_AT: usize = HEADER + 12;
/// The loopback interface of any namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// `TC_H_ROOT`: all that waits at an interface, the queues of its parts included.
const ROOT: u32 = u32::MAX;
/// `TCA_STATS`, and where it has `backlog`.
const STATS: u16 = 3;
const BACKLOG_AT: usize = 4 + 32;

/// Messages or attributes, one after another, whose first bytes have their length; the next one begins at a multiple of four.
fn each(bytes: &[u8], length: impl Fn(&[u8]) -> Option<usize>) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let one = rest.get(..length(rest)?).filter(|one| !one.is_empty())?;
        rest = rest.get(one.len().next_multiple_of(4)..).unwrap_or_default();
        Some(one)
    })
}

/// Bytes that wait, of one answer; and whether it was the last.
fn waiting(answer: &[u8]) -> (u64, bool) {
    let (mut all, mut last) = (0, false);
    for message in each(answer, |rest| Some(long(rest, 0)? as usize)) {
        let kind = short(message, 4);
        // An error ends it, too.
        last |= kind.is_none_or(|kind| kind <= DONE);
        let is_root = long(message, PARENT_AT) == Some(ROOT) && long(message, INTERFACE_AT) != Some(LOOPBACK);
        if kind == Some(NEW) && is_root {
            let mut attributes = each(message.get(LENGTH..).unwrap_or_default(), |rest| Some(short(rest, 0)?.into()));
            let stats = attributes.find(|a| short(a, 2) == Some(STATS));
            all += stats.and_then(|stats| long(stats, BACKLOG_AT)).map_or(0, u64::from);
        }
    }
    (all, last)
}

/// Where it is asked.
#[derive(Debug)]
pub struct Queues(OwnedFd);

impl Queues {
    /// `None` where the kernel does not have it.
    pub fn open() -> Option<Queues> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // No protocol: that of routes and queues (`NETLINK_ROUTE`).
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, None).ok().map(Queues)
    }

    /// Bytes that wait now at all interfaces but the loopback.
    pub fn now(&self) -> Option<u64> {
        let mut request = Vec::with_capacity(LENGTH);
        request.extend((LENGTH as u32).to_ne_bytes());
        request.extend(GET.to_ne_bytes());
        request.extend(DUMP.to_ne_bytes());
        request.resize(LENGTH, 0);
        sendto(&self.0, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
        let mut all = 0;
        let mut answer = [0u8; 32 << 10];
        // It is there already: the kernel answers while it is asked, and the next part while one is taken.
        while let Ok((held, _)) = recv(&self.0, &mut answer, RecvFlags::empty()) {
            let (bytes, last) = waiting(answer.get(..held)?);
            all += bytes;
            if last {
                return Some(all);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of the kernel: a queue of this interface, part of another, in which so many bytes wait.
    fn queue(interface: u32, parent: u32, backlog: u32) -> Vec<u8> {
        let kind = [10u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat();
        let stats = [44u16.to_ne_bytes(), STATS.to_ne_bytes()].concat();
        let attributes =
            [&kind[..], b"tbf\0\0\0\0\0", &stats, &[7; 32], &backlog.to_ne_bytes(), &[0; 4], &[4, 0, 9, 0]].concat();
        let length = (LENGTH + attributes.len()) as u32;
        let head = [length.to_ne_bytes(), (u32::from(NEW)).to_ne_bytes(), [1; 4], [2; 4]].concat();
        let of = [0, interface, 0x8001_0000, parent, 2].map(u32::to_ne_bytes).concat();
        [head, of, attributes].concat()
    }

    #[test]
    fn what_waits_is_counted_once_and_not_on_loopback() {
        let done = [20u32.to_ne_bytes(), u32::from(DONE).to_ne_bytes(), [1; 4], [2; 4], [0; 4]].concat();
        let all = [queue(2, ROOT, 1000), queue(2, 0x8001_0000, 600), queue(3, ROOT, 70_000), queue(1, ROOT, 9)];
        assert_eq!(waiting(&all.concat()), (71_000, false));
        assert_eq!(waiting(&[queue(2, ROOT, 5), done].concat()), (5, true));
        assert_eq!(waiting(&[]), (0, false));
        // Cut off anywhere, it is what came whole.
        let text = queue(2, ROOT, 1000);
        assert!((0..text.len()).all(|n| waiting(&text[..n]) == (0, false)));
        // A length of nothing does not go on for ever.
        assert_eq!(waiting(&[0; 64]), (0, false));
    }

    #[test]
    fn the_kernel_says_it() {
        assert!(Queues::open().unwrap().now().is_some());
    }
}
