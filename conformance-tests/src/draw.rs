//! Random cases: shapes, layouts and options are drawn, and the id of a case is enough to run it again and to simplify it.
//!
//! A random case is made from a list of choices, each an index into a list of possibilities that begins with the simplest. The
//! seed in the id determines them: `linear/bf16/property-1f3a`. An id may also list the choices, without trailing zeros:
//! `linear/bf16/property-1f3a@2.0.1`. That is why [`simplify`] works for every op: it lowers choices as long as the case still
//! fails.
//!
//! Source: MacIver and Donaldson, "Test-case reduction via test-case generation" (2020), section 3.

use crate::random::Random;
use dsrun_core::DType;
use std::fmt;

/// The prefix of the seed in the last part of an id.
const PREFIX: &str = "property-";

/// The id of a random case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DrawnId {
    /// The table it belongs to.
    pub op: String,
    /// The element type.
    pub dtype: DType,
    /// Determines the values, and the choices unless they are listed.
    pub seed: u32,
    /// The choices, each as an index of its possibilities; those not listed are 0.
    pub choices: Option<Vec<usize>>,
}

impl DrawnId {
    /// The id of random case number `index` of an op and element type, for a seed of the whole run.
    pub fn numbered(op: &str, dtype: DType, seed: u64, index: usize) -> Self {
        let mut random = Random::named(&format!("{op}/{dtype}/{seed}/{index}"));
        Self { op: op.to_owned(), dtype, seed: (random.bits() >> 32) as u32, choices: None }
    }

    /// Parses an id; `None` if it is not the id of a random case.
    pub fn parse(id: &str) -> Option<Self> {
        let mut parts = id.split('/');
        let (op, dtype, label) = (parts.next()?, parts.next()?, parts.next()?);
        let drawn = label.strip_prefix(PREFIX)?;
        let (seed, choices) = match drawn.split_once('@') {
            Some((seed, choices)) => {
                let choices: Result<Vec<usize>, _> = choices.split('.').map(str::parse).collect();
                (seed, Some(choices.ok()?))
            }
            None => (drawn, None),
        };
        let seed = u32::from_str_radix(seed, 16).ok()?;
        let parsed = Self { op: op.to_owned(), dtype: DType::from_name(dtype)?, seed, choices };
        parts.next().is_none().then_some(parsed)
    }

    /// The same values with these choices.
    #[must_use]
    pub fn with_choices(&self, choices: &[usize]) -> Self {
        let used = choices.iter().rposition(|choice| *choice != 0).map_or(1, |last| last + 1);
        let choices = choices.iter().copied().chain([0]).take(used).collect();
        Self { choices: Some(choices), ..self.clone() }
    }
}

impl fmt::Display for DrawnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{PREFIX}{:x}", self.op, self.dtype, self.seed)?;
        let choices: Option<Vec<String>> =
            self.choices.as_ref().map(|choices| choices.iter().map(usize::to_string).collect());
        choices.map_or(Ok(()), |choices| write!(f, "@{}", choices.join(".")))
    }
}

/// Makes the choices of a random case, and records them.
#[derive(Clone, Debug)]
pub struct Draw {
    id: DrawnId,
    random: Random,
    made: Vec<usize>,
}

impl Draw {
    /// Begins to draw the case with this id.
    pub fn new(id: DrawnId) -> Self {
        let random = Random::named(&format!("choices/{}/{}/{:x}", id.op, id.dtype, id.seed));
        Self { id, random, made: Vec::new() }
    }

    /// The case's id.
    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// The random stream of the case's values. It depends on the seed alone, so that a simpler case has values of the same kind.
    pub fn values(&self) -> Random {
        Random::named(&format!("values/{}/{}/{:x}", self.id.op, self.id.dtype, self.id.seed))
    }

    /// A number below `bound`, which must not be 0. Smaller numbers count as simpler.
    pub fn below(&mut self, bound: usize) -> usize {
        let drawn = match &self.id.choices {
            Some(choices) => choices.get(self.made.len()).copied().unwrap_or(0).min(bound.max(1) - 1),
            None => self.random.below(bound),
        };
        self.made.push(drawn);
        drawn
    }

    /// One of `of`, whose first element is the simplest.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// True with probability 1/3.
    pub fn sometimes(&mut self) -> bool {
        self.below(3) == 2
    }

    /// The choices that were made.
    pub fn made(&self) -> &[usize] {
        &self.made
    }
}

/// Lowers choices as long as `fails` says that the case still fails, and returns the simplest failing case. At most `budget`
/// cases are tried.
pub fn simplify(
    id: &DrawnId,
    choices: &[usize],
    budget: usize,
    mut fails: impl FnMut(&DrawnId) -> bool,
) -> DrawnId {
    let mut best = choices.to_vec();
    let mut left = budget;
    let mut still_fails = |candidate: &[usize]| {
        let affordable = left > 0;
        left = left.saturating_sub(1);
        affordable && fails(&id.with_choices(candidate))
    };
    loop {
        let before = best.clone();
        // Zero all choices from some place on: most of them have nothing to do with the failure.
        for kept in [0, best.len() / 4, best.len() / 2] {
            if best[kept..].iter().any(|choice| *choice > 0) && still_fails(&best[..kept]) {
                best.truncate(kept);
                break;
            }
        }
        for at in 0..best.len() {
            for lower in [0, best[at] / 2, best[at].saturating_sub(1)] {
                let candidate: Vec<usize> = best
                    .iter()
                    .enumerate()
                    .map(|(i, choice)| if i == at { lower } else { *choice })
                    .collect();
                if lower < best[at] && still_fails(&candidate) {
                    best = candidate;
                    break;
                }
            }
        }
        if best == before {
            return id.with_choices(&best);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn drawn(id: &str) -> DrawnId {
        DrawnId::parse(id).unwrap_or_else(|| panic!("{id} is not the id of a random case"))
    }

    #[rstest]
    #[case("linear/bf16/property-1f3a")]
    #[case("add_rms_norm/f32/property-0")]
    #[case("linear/f32/property-ffffffff@0")]
    #[case("linear/f32/property-1f3a@2.0.11")]
    fn names_are_read_back(#[case] id: &str) {
        assert_eq!(drawn(id).to_string(), id);
    }

    #[rstest]
    #[case("linear/bf16/strided")]
    #[case("linear/bf16")]
    #[case("linear/q4_0/property-1")]
    #[case("linear/f32/property-")]
    #[case("linear/f32/property-1ffffffff")]
    #[case("linear/f32/property-1@")]
    #[case("linear/f32/property-1@1.x")]
    #[case("linear/f32/property-1/lowered")]
    fn other_names_are_refused(#[case] id: &str) {
        assert_eq!(DrawnId::parse(id), None);
    }

    #[test]
    fn the_choices_that_were_made_make_the_same_case() {
        let draw = |id: DrawnId| {
            let mut draw = Draw::new(id);
            let drawn = [draw.pick(&[5, 6, 7, 8]), draw.below(100), usize::from(draw.sometimes())];
            (drawn, draw.values().bits(), draw.made().to_vec())
        };
        let id = DrawnId::numbered("add", DType::F16, 1, 0);
        let first = draw(id.clone());
        assert_eq!(draw(id.with_choices(&first.2)), first);
        assert_eq!(draw(drawn(&id.to_string())), first);
        assert_ne!(DrawnId::numbered("add", DType::F16, 2, 0), id);
        assert_ne!(DrawnId::numbered("add", DType::F16, 1, 1), id);
    }

    #[test]
    fn choices_out_of_range_are_brought_into_it() {
        let mut draw = Draw::new(drawn("add/f32/property-1@9"));
        assert_eq!((draw.pick(&[1, 2, 3]), draw.below(7)), (3, 0));
    }

    #[test]
    fn simplifying_finds_the_smallest_failing_choices() {
        let id = drawn("add/f32/property-1");
        let fails = |id: &DrawnId| {
            let choices = id.choices.clone().unwrap_or_default();
            choices.get(1).is_some_and(|choice| *choice >= 3)
                && choices.get(3).is_some_and(|choice| *choice >= 1)
        };
        let simplest = simplify(&id, &[7, 11, 4, 6, 9, 2], 200, fails);
        assert_eq!(simplest.to_string(), "add/f32/property-1@0.3.0.1");
        let mut tried = 0;
        simplify(&id, &[7, 11, 4, 6, 9, 2], 5, |_| {
            tried += 1;
            false
        });
        assert_eq!(tried, 5);
    }
}
