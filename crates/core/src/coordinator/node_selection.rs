//! Decides which nodes train in the next generation, and with which ranks: a pure function.

use super::command::Reason;
use crate::id::{NodeId, Rank};
use crate::message::{Hello, Slot, World};
use crate::spec::JobSpec;
use crate::time::Time;

/// Forms a world from the nodes that are attached and have no old workers, or returns why it
/// cannot.
///
/// Nodes of the previous world come first (they hold the memory checkpoints), then lower ids. The
/// chosen nodes are ordered by id. With `keep_together`, only nodes of the previous world are
/// chosen if there are enough of them. With fewer nodes than the maximum, the world forms when no
/// node has joined for the last-call time, or at once without a `last_join`.
///
/// # Errors
/// Returns the reason to keep waiting, and when the wait can end by itself.
pub fn form(
    spec: &JobSpec,
    candidates: &[&Hello],
    previous: &World,
    keep_together: bool,
    last_join: Option<Time>,
    now: Time,
) -> Result<World, (Reason, Option<Time>)> {
    let have = u32::try_from(candidates.len()).unwrap_or(u32::MAX);
    let fit = |have: u32| have.min(spec.nodes_max) / spec.node_unit * spec.node_unit;
    let usable = match candidates.iter().filter(|h| keep_together && previous.slot(&h.node).is_some()).count() {
        0 => fit(have),
        members => match fit(u32::try_from(members).unwrap_or(u32::MAX)) {
            enough if enough >= spec.nodes_min && enough > 0 => enough,
            _ => fit(have),
        },
    };
    if usable < spec.nodes_min || usable == 0 {
        return Err((Reason::WaitingForNodes { have, need: spec.nodes_min.max(spec.node_unit) }, None));
    }
    if usable < spec.nodes_max
        && let Some(last_join) = last_join
    {
        let last_call = last_join.after(spec.ladder().last_call);
        if now < last_call {
            return Err((Reason::LastCall { have, want: spec.nodes_max }, Some(last_call)));
        }
    }
    let mut chosen: Vec<&Hello> = candidates.to_vec();
    let rank_of = |id: &NodeId| (previous.slot(id).is_none(), id.clone());
    chosen.sort_by_key(|h| rank_of(&h.node));
    chosen.truncate(usable as usize);
    chosen.sort_by(|a, b| a.node.cmp(&b.node));
    let mut first = 0;
    let slots = chosen
        .into_iter()
        .map(|h| {
            let slot = Slot {
                node: h.node.clone(),
                incarnation: h.incarnation,
                first_rank: Rank(first),
                workers: h.workers,
                host: h.host.clone(),
                store_port: h.store_port,
                role: h.role.clone(),
            };
            first += h.workers;
            slot
        })
        .collect();
    Ok(World { slots })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Generation, Incarnation, JobId};
    use crate::invariant::rank_once;
    use crate::spec::RestartBudget;
    use proptest::prelude::*;

    fn spec(min: u32, max: u32, unit: u32) -> JobSpec {
        JobSpec {
            job: JobId("j".into()),
            nodes_min: min,
            nodes_max: max,
            node_unit: unit,
            spares: 0,
            restarts: RestartBudget::Exactly(0),
            detect_timeout_ms: 2000,
            join_timeout_ms: 1000,
            policy: crate::spec::Policy::Observe,
            check: crate::spec::CheckWhen::Never,
        }
    }

    fn hello(node: u32, workers: u32) -> Hello {
        Hello {
            node: NodeId(node.to_string()),
            incarnation: Incarnation(1),
            spec: spec(1, 1, 1),
            host: "h".into(),
            workers,
            store_port: 1,
            replica_port: 0,
            domain: String::new(),
            role: String::new(),
            seen: Generation(0),
            began: None,
            running: None,
            stop: None,
            shutdown_grace_ms: 0,
        }
    }

    #[test]
    fn the_previous_world_is_preferred_and_rank_zero_is_stable() {
        let hellos: Vec<_> = (0..4).map(|n| hello(n, 2)).collect();
        let refs: Vec<_> = hellos.iter().collect();
        let previous =
            form(&spec(2, 2, 1), &[&hellos[2], &hellos[3]], &World::default(), false, Some(Time(0)), Time(0)).unwrap();
        let world = form(&spec(2, 2, 1), &refs, &previous, false, Some(Time(0)), Time(0)).unwrap();
        assert_eq!(world.slots[0].node.0, "2");
        assert_eq!(world.slots[1].first_rank, Rank(2));
    }

    #[test]
    fn an_elastic_world_waits_for_the_last_call() {
        let hellos: Vec<_> = (0..3).map(|n| hello(n, 1)).collect();
        let refs: Vec<_> = hellos.iter().collect();
        let s = spec(2, 4, 1);
        assert!(matches!(
            form(&s, &refs, &World::default(), false, Some(Time(0)), Time(10)),
            Err((Reason::LastCall { .. }, Some(_)))
        ));
        assert_eq!(form(&s, &refs, &World::default(), false, Some(Time(0)), Time(2000)).unwrap().size(), 3);
        assert_eq!(form(&s, &refs, &World::default(), false, None, Time(0)).unwrap().size(), 3);
    }

    #[test]
    fn who_holds_the_memory_stays_together() {
        let hellos: Vec<_> = (0..4).map(|n| hello(n, 1)).collect();
        let refs: Vec<_> = hellos.iter().collect();
        let s = spec(2, 4, 1);
        let previous = form(&s, &refs[1..], &World::default(), false, None, Time(0)).unwrap();
        assert_eq!(form(&s, &refs, &previous, true, None, Time(0)).unwrap().size(), 3);
        assert_eq!(form(&s, &refs, &previous, false, None, Time(0)).unwrap().size(), 4);
        let fixed = spec(4, 4, 1);
        assert_eq!(form(&fixed, &refs, &previous, true, None, Time(0)).unwrap().size(), 4);
    }

    proptest! {
        #[test]
        fn worlds_are_sound(min in 1u32..5, extra in 0u32..5, unit in 1u32..4, nodes in prop::collection::btree_map(0u32..40, 1u32..9, 0..12)) {
            let max = min + extra;
            let hellos: Vec<_> = nodes.iter().map(|(n, w)| hello(*n, *w)).collect();
            let refs: Vec<_> = hellos.iter().collect();
            let s = spec(min, max, unit.min(max));
            if let Ok(world) = form(&s, &refs, &World::default(), false, Some(Time(0)), Time(1 << 40)) {
                let n = u32::try_from(world.slots.len()).unwrap();
                prop_assert!(rank_once(&world));
                prop_assert!(n >= min && n <= max && n % s.node_unit == 0);
                prop_assert!(world.slots.windows(2).all(|w| w[0].node < w[1].node));
            } else {
                let usable = (hellos.len() as u32).min(max) / s.node_unit * s.node_unit;
                prop_assert!(usable < min || usable == 0);
            }
        }
    }
}
