//! Failures of a cluster's nodes, one after another.

/// Microseconds.
pub const SECOND: u64 = 1_000_000;
/// Microseconds.
pub const HOUR: u64 = 3600 * SECOND;
/// Microseconds.
pub const DAY: u64 = 24 * HOUR;

/// Microseconds in seconds, as files have them.
pub(super) fn seconds(micros: u64) -> f64 {
    micros as f64 / SECOND as f64
}

/// Seconds of a file in microseconds; less than nothing is nothing.
pub(super) fn micros(seconds: f64) -> u64 {
    (seconds.max(0.0) * SECOND as f64).round() as u64
}

/// What fails (Unicron, table 1: severities).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The node, until it is repaired (sev1).
    Node,
    /// A process: it is started again (sev2).
    Process,
    /// What goes away by itself, but has to be noticed: a hang, a broken link (sev3).
    Transient,
}

impl Kind {
    /// As in a file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Node => "sev1",
            Kind::Process => "sev2",
            Kind::Transient => "sev3",
        }
    }
}

/// One failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When, in microseconds from the beginning.
    pub at: u64,
    /// Which node.
    pub node: u32,
    /// What.
    pub kind: Kind,
    /// Until it is back, in microseconds; 0 for what is no node.
    pub repair: u64,
}

/// All failures of a cluster, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// Nodes there are.
    pub nodes: u32,
    /// How long, in microseconds.
    pub length: u64,
    /// In order of time.
    pub list: Vec<Failure>,
}

impl Failures {
    /// In order, and possible: nothing of a node fails while it is down.
    ///
    /// # Errors
    /// A sentence.
    pub fn checked(mut self) -> Result<Failures, String> {
        if self.nodes == 0 || self.length == 0 {
            return Err("the trace is empty: it has no nodes, or lasts no time".into());
        }
        self.list.sort_by_key(|f| (f.at, f.node, f.kind));
        let mut back = vec![0u64; self.nodes as usize];
        for f in &self.list {
            let days = |at: u64| at as f64 / DAY as f64;
            let Some(back) = back.get_mut(f.node as usize) else {
                return Err(format!("the trace has a failure of node {}, but only {} nodes", f.node, self.nodes));
            };
            if f.at >= self.length {
                return Err(format!(
                    "the trace lasts {:.3} days, but node {} fails on day {:.3}",
                    days(self.length),
                    f.node,
                    days(f.at)
                ));
            }
            if f.at < *back {
                return Err(format!(
                    "failures overlap: node {} fails on day {:.3}, when it is down until day {:.3}",
                    f.node,
                    days(f.at),
                    days(*back)
                ));
            }
            if f.kind == Kind::Node {
                *back = f.at + f.repair.max(1);
            }
        }
        Ok(self)
    }

    /// Mean time to the failure of one node, in microseconds; `None` when none fails.
    #[must_use]
    pub fn node_mtbf(&self) -> Option<u64> {
        let failures = self.list.iter().filter(|f| f.kind == Kind::Node).count() as u64;
        (failures > 0).then(|| {
            u64::try_from(u128::from(self.length) * u128::from(self.nodes) / u128::from(failures)).unwrap_or(u64::MAX)
        })
    }

    /// Nodes that are down then.
    #[must_use]
    pub fn down_at(&self, at: u64) -> u32 {
        let down = |f: &&Failure| f.kind == Kind::Node && f.at <= at && at < f.at + f.repair.max(1);
        self.list.iter().filter(down).count() as u32
    }

    /// How long so many nodes are down at once: `[0]` none, and so on, in microseconds.
    #[must_use]
    pub fn down(&self) -> Vec<u64> {
        let mut changes: Vec<(u64, i64)> = Vec::new();
        for f in self.list.iter().filter(|f| f.kind == Kind::Node) {
            changes.push((f.at, 1));
            changes.push(((f.at + f.repair.max(1)).min(self.length), -1));
        }
        changes.sort_unstable();
        changes.push((self.length, 0));
        let (mut down, mut since, mut times) = (0i64, 0u64, vec![0u64]);
        for (at, change) in changes {
            let now = usize::try_from(down).unwrap_or(0);
            if times.len() <= now {
                times.resize(now + 1, 0);
            }
            times[now] += at - since;
            (down, since) = (down + change, at);
        }
        times
    }
}
