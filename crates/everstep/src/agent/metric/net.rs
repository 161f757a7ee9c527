//! The network as this machine (or its namespace) sees it: bytes, what waits to be sent, what was sent again; of RDMA the port counters.
//!
//! Source: proc(5) (net/dev, net/snmp, net/tcp), Linux Documentation/ABI/stable/sysfs-class-infiniband (port_*_data count four bytes each).

use super::budget::{QUEUES, rest, spent};
use super::table::read;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Counters and levels of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Net {
    /// Segments that were sent again, so far.
    pub retransmits: Option<u64>,
    /// Bytes that wait to be sent, or to be confirmed; not every second.
    pub queue: Option<u64>,
    /// Bytes that RDMA ports have received, and sent, so far.
    pub rdma: Option<(u64, u64)>,
}

/// Bytes received and sent, of a table of interfaces.
pub fn bytes(table: &str) -> (u64, u64) {
    let mut all = (0u64, 0u64);
    for line in table.lines().skip(2) {
        let Some((name, rest)) = line.split_once(':') else { continue };
        let mut numbers = rest.split_ascii_whitespace();
        let both =
            (numbers.next().and_then(|n| n.parse::<u64>().ok()), numbers.nth(7).and_then(|n| n.parse::<u64>().ok()));
        if let (Some(received), Some(sent)) = both
            && name.trim() != "lo"
        {
            all = (all.0 + received, all.1 + sent);
        }
    }
    all
}

/// Names, interfaces but the loopback.
pub fn interfaces(table: &str) -> Vec<String> {
    let names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    names.filter(|name| name != "lo").collect()
}

/// Segments sent again, of `/proc/net/snmp`.
fn retransmits(table: &str) -> Option<u64> {
    let mut lines = table.lines().filter(|l| l.starts_with("Tcp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|name| name == "RetransSegs")?;
    values.split_whitespace().nth(at)?.parse().ok()
}

/// Bytes in all send queues but those to this machine itself, of `/proc/net/tcp`.
fn queued(table: &str) -> u64 {
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (to, queues) = (words.get(2)?, words.get(4)?);
        // 127.0.0.1 as the kernel writes it.
        let own = to.starts_with("0100007F");
        u64::from_str_radix(queues.split(':').next()?, 16).ok().filter(|_| !own)
    };
    table.lines().skip(1).filter_map(of).sum()
}

fn rdma(root: &Path) -> Option<(u64, u64)> {
    let mut all = None;
    for device in fs::read_dir(root).ok()?.flatten() {
        for port in fs::read_dir(device.path().join("ports")).ok()?.flatten() {
            let of = |name: &str| -> Option<u64> {
                let text = read(port.path().join("counters").join(name))?;
                text.trim().parse::<u64>().ok()?.checked_mul(4)
            };
            if let (Some(received), Some(sent)) = (of("port_rcv_data"), of("port_xmit_data")) {
                let (r, s) = all.unwrap_or((0u64, 0u64));
                all = Some((r.wrapping_add(received), s.wrapping_add(sent)));
            }
        }
    }
    all
}

/// Whether anybody uses TCP over version 6, of `/proc/net/sockstat6`.
fn has_six(table: &str) -> bool {
    !table.lines().any(|l| l.trim() == "TCP6: inuse 0")
}

/// Send queues. To read them the kernel walks all that connections could be in, a quarter of a million places: milliseconds, however few there are.
#[derive(Debug, Default)]
struct Queues {
    due: Option<Instant>,
}

impl Queues {
    fn now(&mut self) -> Option<u64> {
        let (now, began) = (Instant::now(), spent());
        if self.due.is_some_and(|due| now < due) {
            return None;
        }
        let four = read("/proc/self/net/tcp");
        let six = has_six(&read("/proc/self/net/sockstat6").unwrap_or_default()).then(|| read("/proc/self/net/tcp6"));
        self.due = Some(now + rest(spent().saturating_sub(began), QUEUES));
        Some(queued(&four?) + six.flatten().map_or(0, |t| queued(&t)))
    }
}

/// Where it is read.
#[derive(Debug, Default)]
pub struct Source {
    queues: Queues,
}

impl Source {
    /// As it is now.
    pub fn now(&mut self) -> Net {
        Net {
            retransmits: read("/proc/self/net/snmp").and_then(|t| retransmits(&t)),
            queue: self.queues.now(),
            rdma: rdma(Path::new("/sys/class/infiniband")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_kernel_are_read() {
        let dev = "Inter-| Receive | Transmit\n face |bytes packets\n    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  eth0:100 2 0 0 0 0 0 0  250 3 0 0 0 0 0 0\n eth1: 1 2 0 0 0 0 0 0 2 3 0 0 0 0 0 0\n";
        assert_eq!((bytes(dev), interfaces(dev)), ((101, 252), vec!["eth0".to_owned(), "eth1".to_owned()]));
        assert_eq!(retransmits("Ip: a\nIp: 1\nTcp: ActiveOpens RetransSegs InErrs\nTcp: 5 42 0\n"), Some(42));
        let tcp = "  sl  local rem st tx:rx\n 0: 0100007F:1 0100007F:2 01 000000FF:00000000 x\n 1: 0808000A:1 0908000A:2 01 00000100:00000000 x\n";
        assert_eq!(queued(tcp), 256);
        assert!(has_six("TCP6: inuse 2\nUDP6: inuse 0\n") && !has_six("TCP6: inuse 0\nUDP6: inuse 3\n") && has_six(""));
        let mut source = Source::default();
        assert!(source.now().queue.is_some());
        assert_eq!(source.now().queue, None, "it was asked just now");
    }

    #[test]
    fn ports_of_rdma_count_in_words() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(rdma(root.path()), None);
        let port = root.path().join("mlx5_0/ports/1/counters");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("port_rcv_data"), "10\n").unwrap();
        fs::write(port.join("port_xmit_data"), "20\n").unwrap();
        assert_eq!(rdma(root.path()), Some((40, 80)));
    }
}
