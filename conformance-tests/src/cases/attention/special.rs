//! Special numbers in attention: NaN and infinity in single places, zeros, subnormal numbers and scores of any size.
//!
//! A kernel that works tile by tile multiplies masked values by a weight of 0, and 0 times NaN or infinity is NaN. These steps put
//! NaN and infinity into keys and values that some queries of a tile attend to and others do not.

use super::{Batch, setups::Setup};
use crate::{
    case::Layout,
    oracle::{cache, float},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{DType, op::AttentionMask};

/// The numbers out of the ordinary among the operands of a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Special {
    /// The distribution of all queries, keys and values; `None` for the usual ones.
    pub(super) values: Option<Values>,
    /// A factor of all keys; `None` for 1.
    pub(super) key_factor: Option<f64>,
    /// Single numbers.
    pub(super) strewn: Vec<Strewn>,
}

/// An operand that holds a special number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Query,
    Key,
    Value,
}

/// A special number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strewn {
    place: Place,
    sequence: usize,
    /// The index of the token in its sequence.
    token: usize,
    /// The query head or the KV head.
    head: usize,
    /// The element of the head.
    element: usize,
    number: f64,
}

const fn strewn(place: Place, at: [usize; 4], number: f64) -> Strewn {
    let [sequence, token, head, element] = at;
    Strewn { place, sequence, token, head, element, number }
}

impl Special {
    fn of(strewn: impl IntoIterator<Item = Strewn>) -> Self {
        Self { strewn: strewn.into_iter().collect(), ..Self::default() }
    }

    /// The distribution of an operand whose usual one is given.
    pub(super) fn values(&self, usual: Values) -> Values {
        self.values.unwrap_or(usual)
    }

    /// Takes the special numbers out of values, where some queries of a sequence do not attend to them.
    pub(super) fn leave_values(&mut self) {
        self.strewn.retain(|strewn| strewn.place != Place::Value);
    }

    fn at(&self, place: Place) -> impl Iterator<Item = &Strewn> {
        self.strewn.iter().filter(move |strewn| strewn.place == place)
    }

    /// Changes the elements of a cache whose heads have `size` elements.
    pub(super) fn change_cache(
        &self,
        place: Place,
        setup: &Setup,
        batch: &Batch,
        cache: &mut [f64],
        size: usize,
    ) {
        if let (Place::Key, Some(factor)) = (place, self.key_factor) {
            cache.iter_mut().for_each(|element| *element *= factor);
        }
        let shape = [batch.pages, setup.kv_heads, setup.block, size];
        for Strewn { sequence, token, head, element, number, .. } in self.at(place) {
            let page = batch.table[sequence * batch.columns + token / setup.block];
            if let Ok(page) = usize::try_from(page) {
                cache[cache::element(shape, page, *head, token % setup.block, *element)] = *number;
            }
        }
    }

    /// Changes the rows of new tokens, which have `width` elements in heads of `size`.
    pub(super) fn change_rows(
        &self,
        place: Place,
        setup: &Setup,
        batch: &Batch,
        rows: &mut Tensor,
        size: usize,
    ) {
        if let (Place::Key, Some(factor)) = (place, self.key_factor) {
            let values: Vec<f64> = rows.values().iter().map(|value| value * factor).collect();
            *rows = Tensor::floats(rows.dtype, &rows.shape, &values);
        }
        let width = rows.shape[1];
        for Strewn { sequence, token, head, element, number, .. } in self.at(place) {
            let (new, all) = setup.sequences[*sequence];
            // Tokens before the new ones have no rows.
            if let Some(row) = (token + new).checked_sub(all) {
                let at = (batch.start[*sequence] + row) * width + head * size + element;
                rows.bits[at] = float::bits(rows.dtype, *number);
            }
        }
    }
}

/// Steps with special numbers. Of values of 16 bits, which may reach queries that do not attend to them, only steps in which a query
/// attends to all of a sequence have any.
pub(super) fn special_setups(dtype: DType) -> Vec<Setup> {
    let mut all = all_setups();
    if dtype != DType::F32 {
        let hides_values = |setup: &Setup| {
            let hidden = |strewn: &Strewn| {
                let (new, _) = setup.sequences[strewn.sequence];
                strewn.place == Place::Value && new > 1
            };
            setup.mask != AttentionMask::Bidirectional && setup.special.strewn.iter().any(hidden)
        };
        all.retain(|setup| !hides_values(setup));
    }
    all
}

fn all_setups() -> Vec<Setup> {
    use AttentionMask::{Bidirectional, Explicit};
    use Place::{Key, Query, Value};
    const INFINITY: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;
    // A chunk behind earlier tokens, a whole prompt, single tokens, and a prompt of several tiles.
    let sequences: &[(usize, usize)] = &[(5, 20), (1, 33), (40, 40), (1, 1), (70, 150)];
    let new = |label, special| Setup { special, ..Setup::new(label, sequences, [4, 2, 64]) };
    // Late tokens of each sequence, which the queries before them do not attend to.
    let late = |place: Place| {
        [[0, 17, 0, 3], [2, 30, 1, 0], [2, 39, 0, 63], [4, 110, 1, 9], [4, 149, 0, 20]]
            .map(|at| strewn(place, at, NAN))
    };
    let late_infinities = [[0, 18, 1, 5], [2, 21, 0, 8], [4, 100, 1, 33]]
        .into_iter()
        .enumerate()
        .map(|(number, at)| strewn(Value, at, if number % 2 == 0 { INFINITY } else { -INFINITY }));
    // Early tokens, which have left the window of all queries but the first.
    let early = |place: Place| {
        [[0, 7, 0, 3], [1, 20, 1, 1], [2, 0, 1, 0], [4, 73, 0, 40]].map(|at| strewn(place, at, NAN))
    };
    vec![
        new("special_masked_values", Special::of(late(Value))),
        new("special_masked_keys", Special::of(late(Key))),
        new("special_masked_infinities", Special::of(late_infinities)),
        Setup { window: 9, ..new("special_window_values", Special::of(early(Value))) },
        Setup { window: 9, ..new("special_window_keys", Special::of(early(Key))) },
        Setup {
            mask: Explicit,
            ..new(
                "special_explicit",
                Special::of(late(Value).into_iter().chain(late(Key).into_iter().take(2))),
            )
        },
        Setup {
            layout: Layout::strided(8, 1),
            ..new(
                "special_rare",
                Special::of([
                    strewn(Query, [0, 16, 3, 7], NAN),
                    strewn(Query, [2, 11, 0, 0], NAN),
                    strewn(Query, [4, 140, 2, 63], NAN),
                    strewn(Value, [1, 5, 1, 2], INFINITY),
                    strewn(Value, [1, 6, 0, 2], NAN),
                    strewn(Value, [3, 0, 0, 9], -INFINITY),
                    strewn(Key, [4, 145, 1, 1], NAN),
                ]),
            )
        },
        // A value of plus infinity and one of minus infinity make NaN of the element, and of no other.
        Setup {
            mask: Bidirectional,
            ..new(
                "special_both_infinities",
                Special::of([
                    strewn(Value, [2, 4, 0, 6], INFINITY),
                    strewn(Value, [2, 35, 0, 6], -INFINITY),
                    strewn(Value, [0, 4, 1, 11], -INFINITY),
                ]),
            )
        },
        new("special_zeros", Special { values: Some(Values::Zeros), ..Special::default() }),
        new("special_subnormals", Special { values: Some(Values::Subnormal), ..Special::default() }),
        // Scores of hundreds and thousands: only those near the largest have a weight.
        new("special_large_scores", Special { key_factor: Some(300.0), ..Special::default() }),
        Setup {
            softcap: 5.0,
            ..new("special_saturated", Special { key_factor: Some(300.0), ..Special::default() })
        },
    ]
}

/// The distribution of keys, if nothing else is said: within the range of f16 whatever they are multiplied by. Beside infinite values no
/// weight is so small that it is zero in f16, which makes NaN of them.
pub(super) fn keys(special: &Special) -> Values {
    let has_infinities =
        special.strewn.iter().any(|strewn| strewn.place == Place::Value && strewn.number.is_infinite());
    let uniform = special.key_factor.is_some() || has_infinities;
    special.values(if uniform { Values::Uniform } else { Values::HeavyTailed })
}

/// A query tensor.
pub(super) fn query(random: &mut Random, dtype: DType, setup: &Setup, batch: &Batch) -> Tensor {
    let shape = [batch.tokens, setup.query_heads * setup.key_size];
    // Queries have no large mean: with keys of a large mean, all scores would be very large and nearly equal.
    let mut query = random.tensor(dtype, &shape, setup.special.values(Values::Uniform));
    setup.special.change_rows(Place::Query, setup, batch, &mut query, setup.key_size);
    query
}
