//! The network as this machine (or its namespace) sees it: bytes, what waits to be sent, what was sent again; of RDMA the port counters.
//!
//! Source: proc(5) (net/dev, net/snmp, net/tcp, net/sockstat6), Linux Documentation/ABI/stable/sysfs-class-infiniband (port_*_data count four bytes each).

use super::budget::{QUEUES, rest, spent};
use super::diag::{Connection, Diag};
use super::table::read;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Counters and levels of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Net {
    /// Segments that were sent again, so far.
    pub retransmits: Option<u64>,
    /// Bytes that wait to be sent, or to be confirmed.
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

/// Connections whose queues are asked for, at most.
const MOST: usize = 256;

/// Send queues. To list all connections the kernel walks everything that connections could be in, a quarter of a million places: milliseconds, however
/// few there are. So they are listed seldom, and asked one by one every second.
#[derive(Debug, Default)]
struct Queues {
    diag: Option<Diag>,
    known: Vec<Connection>,
    due: Option<Instant>,
}

impl Queues {
    fn list(&mut self) -> Option<()> {
        let four = read("/proc/self/net/tcp")?;
        let six = has_six(&read("/proc/self/net/sockstat6").unwrap_or_default()).then(|| read("/proc/self/net/tcp6"));
        let lines = four.lines().chain(six.as_ref().and_then(Option::as_ref).into_iter().flat_map(|t| t.lines()));
        self.known = lines.filter_map(Connection::of).take(MOST).collect();
        Some(())
    }

    fn now(&mut self) -> Option<u64> {
        if self.diag.is_none() {
            self.diag = Diag::open();
        }
        let (now, began) = (Instant::now(), spent());
        if self.due.is_none_or(|due| now >= due) {
            self.list()?;
            self.due = Some(now + rest(spent().saturating_sub(began), QUEUES));
        }
        let diag = self.diag.as_ref()?;
        let mut all = 0;
        self.known.retain(|of| diag.queue(of).map(|bytes| all += u64::from(bytes)).is_some());
        Some(all)
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
        assert!(has_six("TCP6: inuse 2\nUDP6: inuse 0\n") && !has_six("TCP6: inuse 0\nUDP6: inuse 3\n") && has_six(""));
        let mut source = Source::default();
        assert!(source.now().queue.is_some());
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
