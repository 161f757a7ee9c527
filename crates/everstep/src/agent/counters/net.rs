//! The network as this machine (or its namespace) sees it: bytes, send queues, retransmissions, and
//! the port counters of RDMA.
//!
//! Source: proc(5) (net/dev, net/snmp), Linux Documentation/ABI/stable/sysfs-class-infiniband
//! (port_*_data count four bytes each).

use super::qdisc::Queues;
use super::table::read;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Current counters and levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Net {
    /// Segments retransmitted so far.
    pub retransmits: Option<u64>,
    /// Bytes waiting to be sent at the interfaces, on average.
    pub queue: Option<u64>,
    /// Bytes received and sent by RDMA ports so far.
    pub rdma: Option<(u64, u64)>,
}

/// Returns the bytes received and sent, from a table of interfaces without the loopback.
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

/// Returns the names of the interfaces, without the loopback.
pub fn interfaces(table: &str) -> Vec<String> {
    let names = table.lines().skip(2).filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    names.filter(|name| name != "lo").collect()
}

/// Returns the number of retransmitted segments, from `/proc/net/snmp`.
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

/// Time between looks at the queues, which fill and empty many times a second.
const QUEUED: Duration = Duration::from_millis(100);

/// Reads the network's counters.
#[derive(Debug)]
pub struct Source {
    queues: Option<Queues>,
    due: Instant,
    /// Bytes queued since the last report: their sum, and the number of looks.
    waited: (u64, u64),
}

impl Source {
    /// Opens the counters of this machine or namespace.
    pub fn open() -> Source {
        Source { queues: Queues::open(), due: Instant::now(), waited: (0, 0) }
    }

    /// Looks at the queues if that is due. To be called often.
    pub fn look(&mut self) {
        let now = Instant::now();
        if now >= self.due {
            self.due = now + QUEUED;
            let waits = self.queues.as_ref().and_then(Queues::now);
            self.waited = waits.map_or(self.waited, |bytes| (self.waited.0 + bytes, self.waited.1 + 1));
        }
    }

    /// Returns the current values; for the queues, the mean of all looks since the last call.
    pub fn now(&mut self) -> Net {
        let (waited, looks) = std::mem::take(&mut self.waited);
        Net {
            retransmits: read("/proc/self/net/snmp").and_then(|t| retransmits(&t)),
            queue: waited.checked_div(looks),
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
        let mut source = Source::open();
        assert_eq!(source.now().queue, None);
        source.look();
        source.look();
        assert_eq!(source.waited.1, 1);
        assert!(source.now().queue.is_some() && source.now().queue.is_none());
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
