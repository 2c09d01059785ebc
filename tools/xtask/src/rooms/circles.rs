//! Import cycles: the strongly connected components of a graph of names.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The strongly connected components with at least two nodes, the largest first. The nodes of a component are sorted by name.
pub(super) fn circles<'a>(edges: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Vec<&'a str>> {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in edges {
        next.entry(from).or_default().insert(to);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        next.keys().map(|start| (*start, reachable(start, &next))).collect();
    let mut placed: BTreeSet<&str> = BTreeSet::new();
    let mut circles = Vec::new();
    for (start, ahead) in &reached {
        if !ahead.contains(start) || placed.contains(start) {
            continue;
        }
        let back = |node: &&&str| reached.get(**node).is_some_and(|ahead| ahead.contains(start));
        let circle: Vec<&str> = ahead.iter().filter(back).copied().collect();
        placed.extend(&circle);
        if circle.len() > 1 {
            circles.push(circle);
        }
    }
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// All nodes that are reachable by at least one edge.
fn reachable<'a>(start: &'a str, next: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut pending = VecDeque::from([start]);
    while let Some(node) = pending.pop_front() {
        for neighbour in next.get(node).into_iter().flatten() {
            if found.insert(*neighbour) {
                pending.push_back(neighbour);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Nodes are letters, an edge is two of them.
    #[rstest]
    #[case(&[], &[])]
    #[case(&["ab", "bc", "ac"], &[])]
    #[case(&["ab", "ba"], &["ab"])]
    #[case(&["ab", "ba", "cd", "de", "ec", "bc"], &["cde", "ab"])]
    #[case(&["ab", "ba", "bc", "cb"], &["abc"])]
    #[case(&["aa", "ab"], &[])]
    fn circles_are_found(#[case] edges: &[&'static str], #[case] expected: &[&str]) {
        let found = circles(edges.iter().map(|edge| edge.split_at(1)));
        assert_eq!(found.iter().map(|circle| circle.concat()).collect::<Vec<_>>(), expected);
    }
}
