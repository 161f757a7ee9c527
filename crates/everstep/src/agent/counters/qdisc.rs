//! Bytes waiting to be sent at this machine's own interfaces. The send queues of connections would
//! not show whose link is slow. They also contain what was sent and is not acknowledged yet, and a
//! machine with a slow link delays its acknowledgements to everyone who sends to it.
//!
//! Source: rtnetlink(7) (`RTM_GETQDISC`), tc(8), `linux/rtnetlink.h` (`tcmsg`),
//! `linux/gen_stats.h`, `linux/pkt_sched.h` (`tc_stats`).

use super::answer::{long, short};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
use std::os::fd::OwnedFd;

/// `RTM_NEWQDISC`, `RTM_GETQDISC`, `NLMSG_DONE`; `NLM_F_REQUEST | NLM_F_DUMP`.
const NEW: u16 = 36;
const GET: u16 = 38;
const DONE: u16 = 3;
const DUMP: u16 = 0x301;
/// Length in bytes of `nlmsghdr`, and of it with `tcmsg`.
const HEADER: usize = 16;
const LENGTH: usize = HEADER + 20;
/// Offsets in a message of the interface and of the queue's parent. Attributes follow.
const INTERFACE_AT: usize = HEADER + 4;
const PARENT_AT: usize = HEADER + 12;
/// The loopback interface of any namespace (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// `TC_H_ROOT`: the parent of an interface's root queue, which includes all queues below it.
const ROOT: u32 = u32::MAX;
/// `TCA_STATS`, and the offset of its `backlog`.
const STATS: u16 = 3;
const BACKLOG_AT: usize = 4 + 32;

/// Iterates over messages or attributes, which begin with their length and are 4-byte aligned.
fn each(bytes: &[u8], length: impl Fn(&[u8]) -> Option<usize>) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let one = rest.get(..length(rest)?).filter(|one| !one.is_empty())?;
        rest = rest.get(one.len().next_multiple_of(4)..).unwrap_or_default();
        Some(one)
    })
}

/// Returns the bytes waiting according to an answer, and whether it was the last one.
fn waiting(answer: &[u8]) -> (u64, bool) {
    let (mut all, mut last) = (0, false);
    for message in each(answer, |rest| Some(long(rest, 0)? as usize)) {
        let kind = short(message, 4);
        // An error ends the answer, too.
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

/// A socket for requests to the kernel.
#[derive(Debug)]
pub struct Queues(OwnedFd);

impl Queues {
    /// Opens the socket. Returns `None` if the kernel does not support it.
    pub fn open() -> Option<Queues> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Protocol 0 is that of routes and queues (`NETLINK_ROUTE`).
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, None).ok().map(Queues)
    }

    /// Returns the bytes waiting now at all interfaces but the loopback.
    pub fn now(&self) -> Option<u64> {
        let mut request = Vec::with_capacity(LENGTH);
        request.extend((LENGTH as u32).to_ne_bytes());
        request.extend(GET.to_ne_bytes());
        request.extend(DUMP.to_ne_bytes());
        request.resize(LENGTH, 0);
        sendto(&self.0, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
        let mut all = 0;
        let mut answer = [0u8; 32 << 10];
        // No need to wait: the kernel answers during the request, and adds the next part whenever
        // one is received.
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

    /// A message of the kernel: `backlog` bytes wait in a queue of `interface`, below `parent`.
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
        // A message cut off anywhere is not counted.
        let text = queue(2, ROOT, 1000);
        assert!((0..text.len()).all(|n| waiting(&text[..n]) == (0, false)));
        // A length of zero must not loop for ever.
        assert_eq!(waiting(&[0; 64]), (0, false));
    }

    #[test]
    fn the_kernel_says_it() {
        assert!(Queues::open().unwrap().now().is_some());
    }
}
