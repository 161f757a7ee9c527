//! Failures of a cluster's nodes over time.

/// One second in microseconds.
pub const SECOND: u64 = 1_000_000;
/// One hour in microseconds.
pub const HOUR: u64 = 3600 * SECOND;
/// One day in microseconds.
pub const DAY: u64 = 24 * HOUR;

/// Converts microseconds to seconds, the unit of files.
pub(super) fn seconds(micros: u64) -> f64 {
    micros as f64 / SECOND as f64
}

/// Converts seconds from a file to microseconds. Negative values become 0.
pub(super) fn micros(seconds: f64) -> u64 {
    (seconds.max(0.0) * SECOND as f64).round() as u64
}

/// What fails (the severities of Unicron, table 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The node, until it is repaired (sev1).
    Node,
    /// A process, which is started again (sev2).
    Process,
    /// Something transient that has to be detected, such as a hang or a broken link (sev3).
    Transient,
}

impl Kind {
    /// Returns the name used in files.
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
    /// Microseconds since the beginning.
    pub at: u64,
    /// The node that fails, or on which something fails.
    pub node: u32,
    /// What fails.
    pub kind: Kind,
    /// Microseconds until the node is back; 0 if the node itself does not fail.
    pub repair: u64,
}

/// All failures of a cluster, in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failures {
    /// The number of nodes.
    pub nodes: u32,
    /// The length of the trace in microseconds.
    pub length: u64,
    /// The failures in the order of time.
    pub list: Vec<Failure>,
}

/// Failures that cannot have happened. Times are in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImpossibleError {
    #[error("the trace is empty: it has no nodes, or lasts no time")]
    Empty,
    #[error("the trace has a failure of node {node}, but only {nodes} nodes")]
    UnknownNode { node: u32, nodes: u32 },
    #[error("the trace lasts {:.3} days, but node {node} fails on day {:.3}", days(*.length), days(*.at))]
    AfterEnd { node: u32, at: u64, length: u64 },
    #[error("failures overlap: node {node} fails on day {:.3}, when it is down until day {:.3}", days(*.at), days(*.until))]
    Overlap { node: u32, at: u64, until: u64 },
}

fn days(micros: u64) -> f64 {
    micros as f64 / DAY as f64
}

impl Failures {
    /// Sorts the failures and checks that they are possible: nothing fails on a node that is down.
    ///
    /// # Errors
    /// If the trace is empty, or if a failure is of an unknown node, after the end, or during a
    /// repair.
    pub fn checked(mut self) -> Result<Failures, ImpossibleError> {
        if self.nodes == 0 || self.length == 0 {
            return Err(ImpossibleError::Empty);
        }
        self.list.sort_by_key(|f| (f.at, f.node, f.kind));
        let mut back = vec![0u64; self.nodes as usize];
        for f in &self.list {
            let Some(back) = back.get_mut(f.node as usize) else {
                return Err(ImpossibleError::UnknownNode { node: f.node, nodes: self.nodes });
            };
            if f.at >= self.length {
                return Err(ImpossibleError::AfterEnd { node: f.node, at: f.at, length: self.length });
            }
            if f.at < *back {
                return Err(ImpossibleError::Overlap { node: f.node, at: f.at, until: *back });
            }
            if f.kind == Kind::Node {
                *back = f.at + f.repair.max(1);
            }
        }
        Ok(self)
    }

    /// Returns the mean time to failure of one node in microseconds, or `None` if no node fails.
    #[must_use]
    pub fn node_mtbf(&self) -> Option<u64> {
        let failures = self.list.iter().filter(|f| f.kind == Kind::Node).count() as u64;
        (failures > 0).then(|| {
            u64::try_from(u128::from(self.length) * u128::from(self.nodes) / u128::from(failures)).unwrap_or(u64::MAX)
        })
    }

    /// Returns the number of nodes that are down at this time.
    #[must_use]
    pub fn down_at(&self, at: u64) -> u32 {
        let down = |f: &&Failure| f.kind == Kind::Node && f.at <= at && at < f.at + f.repair.max(1);
        self.list.iter().filter(down).count() as u32
    }

    /// Returns how long `n` nodes are down at once, in microseconds, at index `n`.
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
