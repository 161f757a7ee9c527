//! Assigns concrete units to the jobs of a plan. As few units as possible change hands, groups that
//! keep each other's copies stay together, and units that join a job come from domains in which the
//! job already runs, as far as possible.

use super::solve::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// A unit of the cluster: a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Id of the unit.
    pub id: String,
    /// The job that has it; `None`: idle.
    pub job: Option<String>,
    /// Units of one job with the same number keep copies of each other's state.
    pub group: u32,
    /// Location of the unit, such as a leaf switch or a rack.
    pub domain: String,
}

/// The units of each job, and those that change hands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// Unit ids by job, in the order of the given units.
    pub units: BTreeMap<String, Vec<String>>,
    /// Units that change hands, each with its old and new job; `None`: idle.
    pub moved: Vec<(String, Option<String>, Option<String>)>,
}

/// Assigns these working units according to a plan. Units beyond those in the plan are idle.
#[must_use]
pub fn assign(units: &[Unit], plan: &Plan) -> Assignment {
    let mut owner: Vec<Option<&str>> = Vec::with_capacity(units.len());
    for (at, unit) in units.iter().enumerate() {
        let job = unit.job.as_deref().filter(|job| plan.units.contains_key(*job));
        owner.push(job.filter(|job| !released(units, plan, job).contains(&at)));
    }
    let mut want: BTreeMap<&str, usize> = BTreeMap::new();
    let mut at_home: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (job, count) in &plan.units {
        let has = owner.iter().filter(|o| **o == Some(job)).count();
        want.insert(job, (*count as usize).saturating_sub(has));
        let home = units.iter().zip(&owner).filter(|(_, o)| **o == Some(job)).map(|(u, _)| u.domain.as_str());
        at_home.insert(job, home.collect());
    }
    let free: Vec<usize> = (0..units.len()).filter(|at| owner.get(*at) == Some(&None)).collect();
    for (at, job) in matched(units, &free, &want, &at_home) {
        if let Some(owner) = owner.get_mut(at) {
            *owner = Some(job);
        }
    }
    let mut found = Assignment::default();
    found.units.extend(plan.units.keys().map(|job| (job.clone(), Vec::new())));
    for (unit, owner) in units.iter().zip(owner) {
        if let Some(list) = owner.and_then(|job| found.units.get_mut(job)) {
            list.push(unit.id.clone());
        }
        if owner != unit.job.as_deref() {
            found.moved.push((unit.id.clone(), unit.job.clone(), owner.map(str::to_owned)));
        }
    }
    found
}

/// Returns the units that a job with too many gives up: whole groups if they add up, the last ones
/// first; otherwise one group is broken up.
fn released(units: &[Unit], plan: &Plan, job: &str) -> BTreeSet<usize> {
    let has: Vec<usize> =
        (0..units.len()).filter(|at| units.get(*at).is_some_and(|u| u.job.as_deref() == Some(job))).collect();
    let keeps = plan.units.get(job).map_or(0, |n| *n as usize);
    let away = has.len().saturating_sub(keeps);
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for at in has {
        groups.entry(units.get(at).map_or(0, |u| u.group)).or_default().push(at);
    }
    // reach[n]: groups, chosen from the last one on, that have n units together.
    let mut reach: Vec<Option<Vec<u32>>> = vec![None; away + 1];
    reach[0] = Some(Vec::new());
    for (number, members) in groups.iter().rev() {
        for n in (members.len()..=away).rev() {
            if reach[n].is_none()
                && let Some(before) = reach[n - members.len()].clone()
            {
                reach[n] = Some(before.into_iter().chain([*number]).collect());
            }
        }
    }
    let whole = reach.iter().rev().flatten().next().cloned().unwrap_or_default();
    let mut gone: BTreeSet<usize> = whole.iter().filter_map(|n| groups.get(n)).flatten().copied().collect();
    // The rest comes from one more group: the smallest that is large enough.
    let missing = away - gone.len();
    let rest = groups.iter().filter(|(n, members)| !whole.contains(n) && members.len() >= missing);
    if let Some((_, members)) = rest.min_by_key(|(n, members)| (members.len(), u32::MAX - **n)) {
        gone.extend(members.iter().rev().take(missing));
    }
    gone
}

/// Matches free units to jobs that need some: as many as possible near the job (augmenting paths),
/// the others in order.
fn matched<'p>(
    units: &[Unit],
    free: &[usize],
    want: &BTreeMap<&'p str, usize>,
    at_home: &BTreeMap<&str, BTreeSet<&str>>,
) -> BTreeMap<usize, &'p str> {
    let seats: Vec<&'p str> = want.iter().flat_map(|(job, count)| std::iter::repeat_n(*job, *count)).collect();
    let near = |seat: usize, at: usize| {
        let homes = seats.get(seat).and_then(|job| at_home.get(job));
        homes.zip(units.get(at)).is_some_and(|(homes, unit)| homes.contains(unit.domain.as_str()))
    };
    let mut sits: BTreeMap<usize, usize> = BTreeMap::new();
    for seat in 0..seats.len() {
        seat_near(seat, free, &near, &mut sits, &mut BTreeSet::new());
    }
    let taken: BTreeSet<usize> = sits.values().copied().collect();
    let mut others = free.iter().filter(|at| !sits.contains_key(at)).copied().collect::<Vec<_>>().into_iter();
    for seat in (0..seats.len()).filter(|seat| !taken.contains(seat)) {
        sits.extend(others.next().map(|at| (at, seat)));
    }
    sits.into_iter().filter_map(|(at, seat)| Some((at, *seats.get(seat)?))).collect()
}

fn seat_near(
    seat: usize,
    free: &[usize],
    near: &impl Fn(usize, usize) -> bool,
    sits: &mut BTreeMap<usize, usize>,
    seen: &mut BTreeSet<usize>,
) -> bool {
    for at in free {
        if !near(seat, *at) || !seen.insert(*at) {
            continue;
        }
        let before = sits.get(at).copied();
        if before.is_none_or(|other| seat_near(other, free, near, sits, seen)) {
            sits.insert(*at, seat);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(id: usize, job: &str, group: u32, domain: &str) -> Unit {
        let job = (!job.is_empty()).then(|| job.to_owned());
        Unit { id: id.to_string(), job, group, domain: domain.into() }
    }

    fn plan(of: &[(&str, u32)]) -> Plan {
        Plan { units: of.iter().map(|(job, n)| ((*job).to_owned(), *n)).collect() }
    }

    fn moves(found: &Assignment) -> Vec<String> {
        let name = |job: &Option<String>| job.clone().unwrap_or_else(|| "-".into());
        found.moved.iter().map(|(id, from, to)| format!("{id}:{}>{}", name(from), name(to))).collect()
    }

    #[test]
    fn nothing_moves_that_need_not() {
        let units: Vec<Unit> = (0..6).map(|i| unit(i, if i < 4 { "a" } else { "b" }, 0, "")).collect();
        assert!(assign(&units, &plan(&[("a", 4), ("b", 2)])).moved.is_empty());
        assert_eq!(moves(&assign(&units, &plan(&[("a", 3), ("b", 3)]))), ["3:a>b"]);
        assert_eq!(moves(&assign(&units, &plan(&[("b", 2)]))), ["0:a>-", "1:a>-", "2:a>-", "3:a>-"], "a is done");
    }

    #[test]
    fn groups_stay_whole_where_they_can() {
        let groups = [0, 0, 1, 1, 1, 2, 2];
        let units: Vec<Unit> = groups.iter().enumerate().map(|(i, g)| unit(i, "a", *g, "")).collect();
        assert_eq!(moves(&assign(&units, &plan(&[("a", 4)]))), ["2:a>-", "3:a>-", "4:a>-"]);
        assert_eq!(moves(&assign(&units, &plan(&[("a", 3)]))), ["0:a>-", "1:a>-", "5:a>-", "6:a>-"]);
        assert_eq!(moves(&assign(&units, &plan(&[("a", 6)]))), ["6:a>-"], "one group is broken");
    }

    #[test]
    fn who_joins_is_near_as_far_as_there_are_such() {
        let units = [
            unit(0, "a", 0, "left"),
            unit(1, "b", 0, "right"),
            unit(2, "b", 0, "left"),
            unit(3, "", 0, "left"),
            unit(4, "", 0, "right"),
            unit(5, "", 0, "far"),
        ];
        // b could take either unit, a only the one on the left.
        assert_eq!(moves(&assign(&units, &plan(&[("a", 2), ("b", 3)]))), ["3:->a", "4:->b"]);
        assert_eq!(moves(&assign(&units, &plan(&[("a", 3), ("b", 2)]))), ["3:->a", "4:->a"]);
    }
}
