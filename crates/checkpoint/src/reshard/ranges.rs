//! From runs to reads: runs of one shard that lie close together are read at once, as far as that reads little more than
//! what is needed.

use super::plan::Run;

/// Of all bytes that are needed, so many more may be read (a hundredth each).
const WASTE_PERCENT: u64 = 4;

/// One read of a shard, and the runs that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// Which shard.
    pub shard: u32,
    /// From here in its region.
    pub at: u64,
    /// So many.
    pub bytes: u64,
    /// What is in it.
    pub runs: Vec<Run>,
}

impl Range {
    fn end(&self) -> u64 {
        self.at + self.bytes
    }
}

/// Reads for all runs, by shard and place. The smallest gaps are read over first.
#[must_use]
pub fn ranges(mut runs: Vec<Run>) -> Vec<Range> {
    runs.sort_unstable_by_key(|r| (r.shard, r.at));
    let needed: u64 = runs.iter().map(|r| r.bytes).sum();
    let gap = |a: &Run, b: &Run| (a.shard == b.shard).then(|| b.at.saturating_sub(a.at + a.bytes));
    let mut gaps: Vec<u64> = runs.windows(2).filter_map(|w| gap(w.first()?, w.get(1)?)).collect();
    gaps.sort_unstable();
    let mut left = needed / 100 * WASTE_PERCENT;
    let mut widest = 0;
    for gap in gaps {
        match left.checked_sub(gap) {
            Some(rest) => (left, widest) = (rest, gap),
            None => break,
        }
    }
    // Of gaps that are equally wide some may have been too many: the budget holds for them, too.
    let mut budget = needed / 100 * WASTE_PERCENT;
    let mut found: Vec<Range> = Vec::new();
    for run in runs {
        let near = |r: &&mut Range| r.shard == run.shard && run.at.saturating_sub(r.end()) <= widest.min(budget);
        match found.last_mut().filter(near) {
            Some(range) => {
                budget -= run.at.saturating_sub(range.end());
                range.bytes = range.bytes.max(run.at + run.bytes - range.at);
                range.runs.push(run);
            }
            None => found.push(Range { shard: run.shard, at: run.at, bytes: run.bytes, runs: vec![run] }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(shard: u32, at: u64, bytes: u64) -> Run {
        Run { shard, at, bytes, into: 0 }
    }

    #[test]
    fn neighbours_are_one_read_and_far_ones_are_not() {
        let found =
            ranges(vec![run(1, 0, 50), run(0, 100, 1000), run(0, 0, 100), run(0, 1110, 5000), run(0, 90_000, 10)]);
        let told: Vec<_> = found.iter().map(|r| (r.shard, r.at, r.bytes, r.runs.len())).collect();
        assert_eq!(told, [(0, 0, 6110, 3), (0, 90_000, 10, 1), (1, 0, 50, 1)]);
        assert_eq!(ranges(vec![]), []);
    }

    proptest! {
        #[test]
        fn little_more_than_what_is_needed_is_read(gaps in prop::collection::vec((0u32..3, 0u64..5000, 1u64..5000), 0..60)) {
            let mut at = [0u64; 3];
            let runs: Vec<Run> = gaps.iter().map(|(shard, gap, bytes)| {
                let place = &mut at[*shard as usize];
                *place += gap;
                let found = run(*shard, *place, *bytes);
                *place += bytes;
                found
            }).collect();
            let needed: u64 = runs.iter().map(|r| r.bytes).sum();
            let found = ranges(runs.clone());
            let read: u64 = found.iter().map(|r| r.bytes).sum();
            prop_assert!(read >= needed && read - needed <= needed / 100 * WASTE_PERCENT);
            prop_assert_eq!(found.iter().map(|r| r.runs.len()).sum::<usize>(), runs.len());
            for range in &found {
                prop_assert!(range.runs.iter().all(|r| r.shard == range.shard && r.at >= range.at && r.at + r.bytes <= range.end()));
            }
        }
    }
}
