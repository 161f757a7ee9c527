//! Placement of replicas: Gemini's Algorithm 1 (§4), over nodes ordered so that a group does not
//! share a failure domain.

use std::collections::BTreeMap;

/// How copies are distributed over nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// Groups of k. The remaining nodes join the last group, which then forms a ring. If k divides
    /// the number of nodes, there are only groups.
    Mixed,
    /// One ring: the copies of each node are on the k−1 nodes before it.
    Ring,
}

/// Returns the groups, as start and end of consecutive positions in `0..nodes`, for `k` copies of
/// each shard (the node's own included).
#[must_use]
pub fn groups(nodes: usize, k: usize, scheme: Scheme) -> Vec<(usize, usize)> {
    let k = k.clamp(1, nodes.max(1));
    let count = if scheme == Scheme::Ring { 1 } else { nodes / k };
    (0..count).map(|g| (g * k, if g + 1 == count { nodes } else { (g + 1) * k })).collect()
}

/// Returns, for each node in `0..nodes`, the nodes that keep its replicas: k−1 of them, or all
/// others if there are fewer.
#[must_use]
pub fn holders(nodes: usize, k: usize, scheme: Scheme) -> Vec<Vec<usize>> {
    let copies = k.clamp(1, nodes.max(1)) - 1;
    let mut found = Vec::with_capacity(nodes);
    for (start, end) in groups(nodes, k, scheme) {
        let size = end - start;
        // In a group of k, the k−1 nodes to the left in a circle are all the others.
        found.extend((0..size).map(|i| (1..=copies).map(|back| start + (i + size - back % size) % size).collect()));
    }
    found
}

/// Returns the groups of nodes that compute a code together, as positions in the order that keeps
/// neighbours in different failure domains: `data + parity` nodes each. The remaining nodes join
/// the last group.
#[must_use]
pub fn code_groups(domains: &[&str], data: usize, parity: usize) -> Vec<Vec<usize>> {
    let order = spread(domains);
    let bounds = groups(order.len(), data + parity, Scheme::Mixed);
    bounds.into_iter().map(|(start, end)| order.get(start..end).unwrap_or_default().to_vec()).collect()
}

/// Returns the participants in the stripe that the node at `place` computes, in a group of `size`
/// nodes: the nodes whose parts it is computed from (the i-th provides the i-th part of its shard),
/// and the nodes that keep the parity shards after the first.
///
/// Every node computes one stripe, keeps a parity shard of `parity` stripes and sends each part of
/// its own shard to a different node, so that all nodes do the same amount of work (RAID-5's
/// rotation, over nodes).
#[must_use]
pub fn stripe(size: usize, parity: usize, place: usize) -> (Vec<usize>, Vec<usize>) {
    let parity = parity.min(size.saturating_sub(1));
    let data = size - parity;
    let members = (1..=data).map(|back| (place + size - back) % size).collect();
    let keepers = (1..parity).map(|on| (place + on) % size).collect();
    if parity == 0 { (Vec::new(), Vec::new()) } else { (members, keepers) }
}

/// Returns the positions `0..domains.len()`, ordered so that neighbours are in different failure
/// domains as far as the domains allow: one node of the largest remaining domain, then one of the
/// next largest, and so on. Without domains, the order is unchanged.
#[must_use]
pub fn spread(domains: &[&str]) -> Vec<usize> {
    let mut by_domain: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, domain) in domains.iter().enumerate() {
        by_domain.entry(domain).or_default().push(i);
    }
    if by_domain.len() <= 1 {
        return (0..domains.len()).collect();
    }
    // One round after another through the domains, largest first: neighbours differ until only one
    // domain remains.
    let mut columns: Vec<Vec<usize>> = by_domain.into_values().collect();
    columns.sort_by_key(|c| (std::cmp::Reverse(c.len()), c.first().copied()));
    let rounds = columns.first().map_or(0, Vec::len);
    (0..rounds).flat_map(|r| columns.iter().filter_map(move |c| c.get(r).copied())).collect()
}

/// Returns, for each node, given by its failure domain, the nodes that keep its replicas.
#[must_use]
pub fn place(domains: &[&str], replicas: usize) -> Vec<Vec<usize>> {
    let order = spread(domains);
    let by_position = holders(order.len(), replicas + 1, Scheme::Mixed);
    let mut found = vec![Vec::new(); order.len()];
    for (position, node) in order.iter().enumerate() {
        if let (Some(place), Some(holders)) = (found.get_mut(*node), by_position.get(position)) {
            *place = holders.iter().filter_map(|h| order.get(*h).copied()).collect();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_papers_examples() {
        assert_eq!(holders(4, 2, Scheme::Mixed), vec![vec![1], vec![0], vec![3], vec![2]]);
        // Five nodes, two copies: a pair, and a ring of three.
        assert_eq!(holders(5, 2, Scheme::Mixed), vec![vec![1], vec![0], vec![4], vec![2], vec![3]]);
        assert_eq!(holders(1, 2, Scheme::Mixed), vec![Vec::<usize>::new()]);
        assert_eq!(holders(2, 3, Scheme::Mixed), vec![vec![1], vec![0]]);
        assert!(holders(0, 2, Scheme::Mixed).is_empty());
    }

    #[test]
    fn a_group_does_not_share_a_domain_where_that_is_possible() {
        assert_eq!(place(&["a", "a", "b", "b"], 1), vec![vec![2], vec![3], vec![0], vec![1]]);
        assert_eq!(place(&["", "", "", ""], 1), vec![vec![1], vec![0], vec![3], vec![2]]);
    }

    #[test]
    fn four_and_two_over_six() {
        assert_eq!(stripe(6, 2, 0), (vec![5, 4, 3, 2], vec![1]));
        assert_eq!(stripe(6, 2, 5), (vec![4, 3, 2, 1], vec![0]));
        // Too few nodes for parity: copies.
        assert_eq!(stripe(3, 2, 0), (vec![2], vec![1]));
        assert_eq!(stripe(2, 2, 0), (vec![1], vec![]));
        assert_eq!(stripe(1, 2, 0), (vec![], vec![]));
        assert_eq!(code_groups(&["", "", "", "", "", "", ""], 2, 1), vec![vec![0, 1, 2], vec![3, 4, 5, 6]]);
    }

    proptest! {
        #[test]
        fn any_so_many_of_a_group_may_be_lost(size in 1usize..12, parity in 0usize..4, lost in prop::collection::btree_set(0usize..12, 0..4)) {
            let all: Vec<(Vec<usize>, Vec<usize>)> = (0..size).map(|p| stripe(size, parity, p)).collect();
            let parity = parity.min(size - 1);
            let lost: Vec<usize> = lost.into_iter().filter(|n| *n < size).take(parity).collect();
            for (place, (members, keepers)) in all.iter().enumerate().filter(|_| parity > 0) {
                let mut nodes = members.clone();
                nodes.push(place);
                nodes.extend(keepers);
                let distinct: std::collections::BTreeSet<_> = nodes.iter().collect();
                prop_assert_eq!(distinct.len(), size, "each node once");
                prop_assert!(nodes.iter().filter(|n| !lost.contains(n)).count() >= members.len());
            }
            // Every part of every node's shard is in exactly one stripe.
            for node in (0..size).filter(|_| parity > 0) {
                for part in 0..size - parity {
                    prop_assert_eq!(all.iter().filter(|(members, _)| members.get(part) == Some(&node)).count(), 1);
                }
            }
        }

        #[test]
        fn everybody_has_k_copies_on_different_nodes_and_keeps_as_many(
            domains in prop::collection::vec(0u8..5, 1..40), replicas in 0usize..5,
        ) {
            let names: Vec<String> = domains.iter().map(u8::to_string).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let found = place(&names, replicas);
            let copies = replicas.min(names.len() - 1);
            let mut kept = vec![0; names.len()];
            for (node, holders) in found.iter().enumerate() {
                let distinct: std::collections::BTreeSet<_> = holders.iter().collect();
                prop_assert!(holders.len() == copies && distinct.len() == copies && !holders.contains(&node));
                holders.iter().for_each(|h| kept[*h] += 1);
            }
            prop_assert!(kept.iter().all(|n| *n == copies));
        }

        #[test]
        fn even_domains_are_never_shared(sizes in 1usize..6, domains in 2usize..6) {
            let names: Vec<String> = (0..sizes * domains).map(|i| (i / sizes).to_string()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            for (node, holders) in place(&names, domains - 1).iter().enumerate() {
                prop_assert!(holders.iter().all(|h| names[*h] != names[node]));
            }
        }
    }
}
