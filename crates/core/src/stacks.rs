//! The stacks of a job's ranks, grouped to make the odd one out visible at once.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Frames kept per stack.
const FRAMES: usize = 40;

/// Stack of a rank's main thread, innermost frame first: `file:line function`. Empty if the rank
/// did not answer.
pub type Stack = Vec<String>;

/// Ranks with the same stack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Group {
    /// Global ranks.
    pub ranks: Vec<u32>,
    /// Their stack; empty for ranks that did not answer.
    pub stack: Stack,
}

/// Extracts the main thread from what Python's `faulthandler` writes for all threads: the thread
/// that is listed last.
#[must_use]
pub fn main_thread(written: &str) -> Stack {
    let mut frames = Vec::new();
    for line in written.lines() {
        if line.ends_with("(most recent call first):") {
            frames.clear();
        } else if let Some(frame) = frame(line)
            && frames.len() < FRAMES
        {
            frames.push(frame);
        }
    }
    frames
}

/// Shortens a frame: `File "a/b.py", line 3 in f` → `a/b.py:3 f`.
fn frame(line: &str) -> Option<String> {
    let (file, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
    let (number, function) = rest.split_once(" in ").unwrap_or((rest, "?"));
    Some(format!("{file}:{number} {function}"))
}

/// Groups ranks by stack. The smallest groups come first, and among those the ranks that did not
/// answer.
#[must_use]
pub fn group(stacks: &BTreeMap<u32, Stack>) -> Vec<Group> {
    let mut by_place: BTreeMap<&[String], Vec<u32>> = BTreeMap::new();
    for (rank, stack) in stacks {
        by_place.entry(stack).or_default().push(*rank);
    }
    let mut groups: Vec<Group> =
        by_place.into_iter().map(|(stack, ranks)| Group { ranks, stack: stack.to_vec() }).collect();
    groups.sort_by_key(|g| (g.ranks.len(), !g.stack.is_empty(), g.ranks.first().copied()));
    groups
}

/// Formats ranks as ranges: `1, 3-7`.
#[must_use]
pub fn ranges(ranks: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *rank => *last = *rank,
            _ => parts.push((*rank, *rank)),
        }
    }
    let part = |(from, to): &(u32, u32)| if from == to { from.to_string() } else { format!("{from}-{to}") };
    parts.iter().map(part).collect::<Vec<_>>().join(", ")
}

impl Group {
    /// Describes the group in one line: its ranks, the innermost frame, and the innermost frame in
    /// the script.
    #[must_use]
    pub fn describe(&self) -> String {
        let who = match self.ranks.as_slice() {
            [one] => format!("rank {one}"),
            several => format!("{} ranks ({})", several.len(), ranges(several)),
        };
        let Some(innermost) = self.stack.first() else { return format!("{who}: no answer") };
        let own = self.stack.iter().find(|f| !is_library(f)).filter(|f| *f != innermost);
        let (place, function) = innermost.rsplit_once(' ').unwrap_or((innermost, "?"));
        let from =
            own.map_or(String::new(), |f| format!(", called from {}", short(f.rsplit_once(' ').map_or(f, |(p, _)| p))));
        format!("{who} in {function} ({}){from}", short(place))
    }
}

fn is_library(frame: &str) -> bool {
    ["/site-packages/", "/lib/python", "<frozen", "/dist-packages/"].iter().any(|part| frame.contains(part))
}

/// Returns the last two components of a path.
fn short(place: &str) -> String {
    let parts: Vec<&str> = place.rsplitn(3, '/').take(2).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "Thread 0x7f1 (most recent call first):\n  File \"/usr/lib/python3.11/threading.py\", line 982 in run\n\n\
        Current thread 0x7f2 (most recent call first):\n  File \"/usr/lib/python3.11/re/__init__.py\", line 166 in match\n  \
        File \"/home/u/job/train.py\", line 36 in spin\n  File \"/home/u/job/train.py\", line 90 in <module>\n";

    #[test]
    fn the_main_thread_is_the_one_that_is_listed_last() {
        let stack = main_thread(WRITTEN);
        assert_eq!(stack.first().map(String::as_str), Some("/usr/lib/python3.11/re/__init__.py:166 match"));
        assert_eq!(stack.len(), 3);
        let of = Group { ranks: vec![1], stack };
        assert_eq!(of.describe(), "rank 1 in match (re/__init__.py:166), called from job/train.py:36");
    }

    #[test]
    fn the_odd_rank_is_on_top() {
        let waits = vec!["/x/site-packages/torch/distributed/distributed_c10d.py:2700 all_reduce".to_owned()];
        let mut stacks: BTreeMap<u32, Stack> = (0..8).map(|r| (r, waits.clone())).collect();
        stacks.insert(3, main_thread(WRITTEN));
        stacks.insert(5, vec![]);
        let described: Vec<String> = group(&stacks).iter().map(Group::describe).collect();
        assert_eq!(
            described,
            [
                "rank 5: no answer",
                "rank 3 in match (re/__init__.py:166), called from job/train.py:36",
                "6 ranks (0-2, 4, 6-7) in all_reduce (distributed/distributed_c10d.py:2700)"
            ]
        );
    }
}
