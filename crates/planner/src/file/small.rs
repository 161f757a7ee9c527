//! Jobs smaller than a node share nodes. They are packed before planning, so that a plan still
//! assigns whole nodes (a failing node affects all small jobs on it, but no job that spans nodes).

use super::{JobError, PlanFileError, Written, speed};
use std::collections::BTreeMap;

/// Packs jobs with these numbers of GPUs into nodes: largest first, each into the first node with
/// room. Returns the indices of the jobs by node.
///
/// If all numbers are powers of two, no node but the last has room left over.
fn pack(gpus: &[u32], node: u32) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    order.sort_by_key(|at| u32::MAX - gpus.get(*at).copied().unwrap_or(0));
    let mut nodes: Vec<(u32, Vec<usize>)> = Vec::new();
    for at in order {
        let needs = gpus.get(at).copied().unwrap_or(0);
        match nodes.iter_mut().find(|(room, _)| *room >= needs) {
            Some((room, jobs)) => {
                *room -= needs;
                jobs.push(at);
            }
            None => nodes.push((node.saturating_sub(needs), vec![at])),
        }
    }
    nodes.into_iter().map(|(_, jobs)| jobs).collect()
}

/// Returns what a small job asks for: GPUs, and FLOP/s on them.
fn asked(job: &Written, node: u64) -> Result<(u32, f64), PlanFileError> {
    let gpus = job.gpus.unwrap_or(0);
    if !gpus.is_power_of_two() || u64::from(gpus) >= node {
        return Err(JobError::Gpus { job: job.id.clone(), gpus, node }.into());
    }
    if job.model.is_some() || !job.throughput.is_empty() {
        return Err(JobError::SpeedOnly { job: job.id.clone() }.into());
    }
    let text = job.speed.as_deref().ok_or_else(|| JobError::NoSpeed { job: job.id.clone() })?;
    Ok((gpus, speed(&format!("job {}: speed", job.id), text)?))
}

/// Replaces the small jobs on each node by one job, whose id joins theirs with `+`. Also returns
/// the new id for each small job.
pub(super) fn packed(all: Vec<Written>, node: u64) -> Result<(Vec<Written>, BTreeMap<String, String>), PlanFileError> {
    let (small, mut rest): (Vec<Written>, Vec<Written>) = all.into_iter().partition(|j| j.gpus.is_some());
    let asked = small.iter().map(|j| asked(j, node)).collect::<Result<Vec<_>, _>>()?;
    let gpus: Vec<u32> = asked.iter().map(|(gpus, _)| *gpus).collect();
    let mut homes = BTreeMap::new();
    for on_node in pack(&gpus, u32::try_from(node).unwrap_or(u32::MAX)) {
        let of = |at: &usize| small.get(*at).zip(asked.get(*at));
        let jobs: Vec<_> = on_node.iter().filter_map(of).collect();
        let id = jobs.iter().map(|(j, _)| j.id.as_str()).collect::<Vec<_>>().join("+");
        let together: f64 = jobs.iter().map(|(_, (_, speed))| speed).sum();
        let weighted: f64 = jobs.iter().map(|(j, (_, speed))| j.weight * speed).sum();
        homes.extend(jobs.iter().map(|(j, _)| (j.id.clone(), id.clone())));
        let longest = |of: fn(&Written) -> &Option<String>| {
            let text = |j: &Written| of(j).clone();
            jobs.iter().filter_map(|(j, _)| text(j)).max_by_key(|t| super::time("", t).unwrap_or_default())
        };
        rest.push(Written {
            id,
            weight: weighted / together,
            min: jobs.iter().map(|(j, _)| j.min.min(1)).max().unwrap_or(0),
            nodes: jobs.iter().filter_map(|(j, _)| j.nodes).max().map(|n| n.min(1)),
            parameters: None,
            throughput: BTreeMap::from([("1".into(), format!("{} TFLOP/s", together / 1e12))]),
            model: None,
            batch: None,
            gpus: None,
            speed: None,
            regroup: longest(|j| &j.regroup),
            state: longest(|j| &j.state),
            lost: longest(|j| &j.lost),
            done_in: None,
        });
    }
    Ok((rest, homes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_jobs_fill_nodes() {
        assert_eq!(pack(&[2, 4, 1, 4, 4, 1], 8), [vec![1, 3], vec![4, 0, 2, 5]]);
        assert_eq!(pack(&[], 8), Vec::<Vec<usize>>::new());
        for seed in 0u32..200 {
            let gpus: Vec<u32> = (0..seed % 23).map(|n| 1 << ((n * 7 + seed) % 3)).collect();
            let nodes = pack(&gpus, 8);
            let sum = |jobs: &Vec<usize>| jobs.iter().map(|at| gpus[*at]).sum::<u32>();
            assert!(nodes.iter().all(|jobs| sum(jobs) <= 8));
            assert_eq!(nodes.len() as u32, gpus.iter().sum::<u32>().div_ceil(8), "no node is wasted");
        }
    }
}
