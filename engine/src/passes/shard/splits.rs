//! The ways in which the dimensions of a program's values can be split over ranks.
//!
//! Index maps say which dimensions of which values are indexed by the same dimension of an op's iteration space. These must be
//! split the same way, so they form a [`Group`]: for example the rows of a projection's weight, its result, and the rotated
//! heads. A group consists of equal indivisible blocks. Every op limits their number: a rotary embedding to its heads, a linear
//! layer to its features.
//!
//! Attention joins a group of query heads and a group of KV heads to one *axis*: they are split together, but where there are
//! more ranks than KV heads, several ranks hold a copy of the same KV head. An axis has a few candidate [`Split`]s.

use super::iteration::{Place, iteration_splits};
use dsrun_core::{
    Result,
    op::OperandType,
    program::{Program, ValueId},
};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// A split of an axis over ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// The number of units that the axis has.
    units: usize,
    /// The units of each rank.
    ranges: Vec<Range<usize>>,
    /// Whether shorter parts are padded with zeros to the length of the longest.
    padded: bool,
}

/// The part of a dimension that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The elements of the dimension.
    pub(super) range: Range<usize>,
    /// The elements that are stored, zeros after the range included.
    pub(super) length: usize,
}

/// A dimension of a value, and how often the split dimension repeats inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Along {
    pub(super) value: ValueId,
    pub(super) dimension: usize,
    pub(super) repeats: usize,
}

impl Along {
    /// A dimension without repetitions.
    pub(super) fn once(value: ValueId, dimension: usize) -> Self {
        Self { value, dimension, repeats: 1 }
    }
}

/// Dimensions of values that are split alike.
#[derive(Clone, Debug)]
struct Group {
    /// The number of indivisible blocks.
    blocks: usize,
    /// The number of blocks whose columns of every quantised weight are whole quantisation groups; `None` if these do not fit.
    aligned: Option<usize>,
    /// Whether it cannot be padded, because it indexes the columns of a weight or is repeated.
    unpadded: bool,
    axis: usize,
}

/// The groups and axes of a program, with the candidate splits of each axis.
#[derive(Debug)]
pub(super) struct Splits {
    ranks: usize,
    group_of: HashMap<Along, usize>,
    groups: Vec<Group>,
    candidates: Vec<Vec<Split>>,
}

/// A disjoint-set forest (union-find).
#[derive(Debug, Default)]
struct Unions(Vec<usize>);

impl Unions {
    fn add(&mut self) -> usize {
        self.0.push(self.0.len());
        self.0.len() - 1
    }

    fn root(&self, mut set: usize) -> usize {
        while self.0[set] != set {
            set = self.0[set];
        }
        set
    }

    fn unite(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.0[a.max(b)] = a.min(b);
    }
}

impl Splits {
    /// Finds the groups and axes of a program.
    ///
    /// # Errors
    /// If a call of the program is not valid.
    pub(super) fn new(program: &Program, ranks: usize) -> Result<Self> {
        let (mut sets, mut numbers) = (Unions::default(), HashMap::new());
        let mut bounds: Vec<(usize, usize)> = Vec::new();
        let mut joined: Vec<[usize; 2]> = Vec::new();
        for node in &program.nodes {
            for split in iteration_splits(program, &node.call)? {
                let mut sides: [Option<usize>; 2] = [None; 2];
                for Place { value, dimension, repeats, blocks, shared } in split.places(&node.call) {
                    let along = Along { value, dimension, repeats };
                    let number = *numbers.entry(along).or_insert_with(|| sets.add());
                    bounds.push((number, blocks));
                    match &mut sides[usize::from(shared)] {
                        Some(first) => sets.unite(*first, number),
                        side => *side = Some(number),
                    }
                }
                if let [Some(own), Some(shared)] = sides {
                    joined.push([own, shared]);
                }
            }
        }
        let mut dense: BTreeMap<usize, usize> = BTreeMap::new();
        for number in 0..sets.0.len() {
            let next = dense.len();
            dense.entry(sets.root(number)).or_insert(next);
        }
        let group = |number: usize| dense[&sets.root(number)];
        let mut axes = Unions((0..dense.len()).collect());
        joined.iter().for_each(|[a, b]| axes.unite(group(*a), group(*b)));
        let mut groups: Vec<Group> = (0..dense.len())
            .map(|index| Group { blocks: 0, aligned: Some(0), unpadded: false, axis: axes.root(index) })
            .collect();
        for (number, blocks) in bounds {
            let group = &mut groups[group(number)];
            group.blocks = gcd(group.blocks, blocks);
        }
        let group_of: HashMap<_, _> =
            numbers.iter().map(|(place, number)| (*place, group(*number))).collect();
        for (Along { value, dimension, repeats }, group) in &group_of {
            groups[*group].unpadded |= *repeats > 1;
            let OperandType::Weight(weight) = &program.value(*value)?.value_type else { continue };
            if *dimension + 1 == weight.shape.len() {
                let (group, unit) = (&mut groups[*group], weight.format.granularity());
                let whole = weight.columns().is_multiple_of(unit).then(|| weight.columns() / unit);
                group.unpadded = true;
                group.aligned = group.aligned.zip(whole).map(|(aligned, whole)| gcd(aligned, whole));
            }
        }
        let candidates = (0..groups.len()).map(|axis| candidates(&groups, axis, ranks)).collect();
        Ok(Self { ranks, group_of, groups, candidates })
    }

    /// The number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of candidate splits of a dimension of a value.
    pub(super) fn count(&self, along: Along) -> usize {
        self.group(along).map_or(0, |group| self.candidates[group.axis].len())
    }

    fn group(&self, along: Along) -> Option<&Group> {
        self.groups.get(*self.group_of.get(&along)?)
    }

    /// The part of a dimension of `size` elements that a rank holds, within each repetition; the whole dimension if it cannot
    /// be split.
    pub(super) fn part(&self, along: Along, candidate: usize, rank: usize, size: usize) -> Part {
        let size = size / along.repeats.max(1);
        let whole = Part { range: 0..size, length: size };
        let Some(group) = self.group(along) else { return whole };
        let Some(split) = self.candidates[group.axis].get(candidate) else { return whole };
        let part = |rank: usize| {
            let Range { start, end } = split.ranges[rank];
            let block = size / group.blocks.max(1);
            // A block that several ranks share is replicated on each of them.
            (start * group.blocks / split.units) * block..(end * group.blocks).div_ceil(split.units) * block
        };
        let range = part(rank);
        let length = match split.padded {
            true => (0..self.ranks).map(|rank| part(rank).len()).max().unwrap_or(0),
            false => range.len(),
        };
        Part { range, length }
    }

    /// The parts of all ranks, as [`Self::part`].
    pub(super) fn parts(&self, along: Along, candidate: usize, size: usize) -> Vec<Part> {
        (0..self.ranks).map(|rank| self.part(along, candidate, rank, size)).collect()
    }
}

/// Whether every element is held by exactly one rank, in the order of ranks.
pub(super) fn is_partition(parts: &[Part], size: usize) -> bool {
    let mut end = 0;
    parts.iter().all(|part| std::mem::replace(&mut end, part.range.end) == part.range.start) && end == size
}

/// Whether the parts are equally long, so that a collective can gather or scatter them.
pub(super) fn is_even(parts: &[Part]) -> bool {
    parts.iter().all(|part| Some(part.length) == parts.first().map(|first| first.length))
}

/// The candidate splits of an axis. There are none if it has fewer blocks than ranks.
fn candidates(groups: &[Group], axis: usize, ranks: usize) -> Vec<Split> {
    let own: Vec<&Group> = groups.iter().filter(|group| group.axis == axis).collect();
    let units = own.iter().fold(0, |units, group| gcd(units, group.blocks));
    let mut found = Vec::new();
    let mut add = |split: Option<Split>| {
        if let Some(split) = split.filter(|split| !found.contains(split)) {
            found.push(split);
        }
    };
    let aligned = own.iter().map(|group| group.aligned).try_fold(units, |units, aligned| match aligned? {
        0 => Some(units),
        aligned => Some(gcd(units, aligned)),
    });
    add(aligned.and_then(|aligned| even(aligned, ranks)));
    add(even(units, ranks));
    if units < ranks {
        let least = own.iter().map(|group| group.blocks).min().unwrap_or(0);
        let most =
            own.iter().filter(|group| group.blocks > least).fold(0, |most, group| gcd(most, group.blocks));
        add(shared(least, most, ranks));
    }
    if let ([group], false) = (&own[..], units.is_multiple_of(ranks)) {
        add(padded(units, ranks).filter(|_| !group.unpadded));
    }
    found
}

/// The experts of a rank, of `count`; `None` if there are fewer than ranks.
pub(super) fn experts_of(count: usize, ranks: usize, rank: usize) -> Option<Range<usize>> {
    even(count, ranks)?.ranges.get(rank).cloned()
}

/// Splits units as evenly as possible, larger parts first.
fn even(units: usize, ranks: usize) -> Option<Split> {
    let (each, more) = (units / ranks, units % ranks);
    let start = |rank: usize| rank * each + rank.min(more);
    let ranges = (0..ranks).map(|rank| start(rank)..start(rank + 1)).collect();
    (each > 0).then_some(Split { units, ranges, padded: false })
}

/// Splits units so that all parts but the last are equal, and the last can be padded.
fn padded(units: usize, ranks: usize) -> Option<Split> {
    let each = units.div_ceil(ranks);
    let ranges = (0..ranks).map(|rank| (rank * each).min(units)..((rank + 1) * each).min(units)).collect();
    ((ranks - 1) * each < units).then_some(Split { units, ranges, padded: true })
}

/// Splits `most` query heads over more ranks than there are KV heads (`least`): each rank has query heads of a single KV head,
/// which is replicated on several ranks.
fn shared(least: usize, most: usize, ranks: usize) -> Option<Split> {
    if least == 0 || !most.is_multiple_of(least) || ranks < least || ranks > most {
        return None;
    }
    let (group, mut ranges) = (most / least, Vec::with_capacity(ranks));
    for head in 0..least {
        let sharers = ranks / least + usize::from(head < ranks % least);
        let parts = even(group, sharers)?.ranges;
        ranges.extend(parts.iter().map(|part| head * group + part.start..head * group + part.end));
    }
    Some(Split { units: most, ranges, padded: false })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(split: Option<Split>) -> Vec<Range<usize>> {
        split.map(|split| split.ranges).unwrap_or_default()
    }

    #[test]
    fn units_are_split_evenly_and_larger_parts_come_first() {
        assert_eq!(ranges(even(3, 2)), [0..2, 2..3]);
        assert_eq!(ranges(even(9, 4)), [0..3, 3..5, 5..7, 7..9]);
        assert!(ranges(even(3, 4)).is_empty());
    }

    #[test]
    fn only_the_last_part_is_padded() {
        assert_eq!(ranges(padded(50257, 2)), [0..25129, 25129..50257]);
        assert_eq!(ranges(padded(10, 4)), [0..3, 3..6, 6..9, 9..10]);
        // With parts of 2 the last rank would have nothing.
        assert!(ranges(padded(5, 4)).is_empty());
    }

    #[test]
    fn kv_heads_fewer_than_ranks_are_shared() {
        assert_eq!(ranges(shared(3, 9, 4)), [0..2, 2..3, 3..6, 6..9]);
        assert_eq!(ranges(shared(2, 8, 4)), [0..2, 2..4, 4..6, 6..8]);
        assert!(ranges(shared(3, 9, 10)).is_empty(), "more ranks than query heads");
        assert!(ranges(shared(3, 12, 2)).is_empty(), "fewer ranks than KV heads");
    }
}
