//! Chooses a format for every weight under a size budget: more bits where errors matter more.
//!
//! The expected squared error of a product with a rounded weight is the sum over columns of the mean square of the activations
//! times the squared error of the column. Products differ in their effect on the whole model, so the caller scales the errors of
//! each product by its measured sensitivity. The sum over all weights is minimised greedily under a budget of bytes: starting
//! from the smallest formats, the change that saves the most error per byte is applied first.

use super::{Policy, Scheme};
use dsrun_core::{Error, GroupFormat, Result, WeightFormat};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// A format that a weight could have.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The format.
    pub format: GroupFormat,
    /// Bytes of the weight in it: integers, scales and offsets.
    pub bytes: u64,
    /// The expected squared error of the products, see the module.
    pub error: f64,
}

/// The format chosen for a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The name of the weight.
    pub weight: String,
    /// The chosen format, with its size and error.
    pub chosen: Candidate,
}

impl Candidate {
    /// Measures a format on rows of a weight, given the mean square of each input channel.
    ///
    /// # Errors
    /// If the format cannot store rows of so many columns, or a value is not finite.
    pub fn of_rows(values: &[f32], mean_squares: &[f64], format: GroupFormat, search: bool) -> Result<Self> {
        let columns = mean_squares.len();
        let rows = values.len() / columns.max(1);
        let Some(parts) = format.row(columns) else {
            return Err(Error::invalid(format!("rows of {columns} columns cannot be stored as {format}")));
        };
        // Padding is ignored: few layouts pad rows.
        let row_bytes = parts.integers.len() + parts.scales.len() + parts.offsets.len();
        let weight = WeightFormat::Group(format);
        let of_row = |(row, rounded): &mut (Vec<u8>, Vec<f32>), values: &[f32]| {
            format.quantise_row(values, search, row)?;
            weight.decode_row(row, rounded)?;
            let squares =
                values.iter().zip(rounded).map(|(value, rounded)| f64::from(value - *rounded).powi(2));
            Ok(squares.zip(mean_squares).map(|(square, energy)| square * energy).sum())
        };
        let buffers = || (vec![0; parts.bytes], vec![0.0; columns]);
        // Summed in order, so that the same weight always has the same error.
        let errors = values.par_chunks_exact(columns.max(1)).map_init(buffers, of_row);
        let errors: Vec<f64> = errors.collect::<Result<_>>()?;
        Ok(Self { format, bytes: rows as u64 * row_bytes as u64, error: errors.into_iter().sum() })
    }

    /// Adds the size and error of more rows of the same weight.
    pub fn add(&mut self, rows: &Self) {
        self.bytes += rows.bytes;
        self.error += rows.error;
    }
}

/// Chooses a format for each weight so that all together take at most `budget` bytes.
///
/// # Errors
/// If a weight has no candidates, or the smallest candidates together exceed the budget.
pub fn choose(candidates: &BTreeMap<String, Vec<Candidate>>, budget: u64) -> Result<Vec<Choice>> {
    let mut curves: Vec<(&String, Vec<&Candidate>, usize)> = Vec::new();
    for (weight, candidates) in candidates {
        let curve = lower_hull(candidates);
        if curve.is_empty() {
            return Err(Error::invalid("no format fits this weight").at(weight));
        }
        curves.push((weight, curve, 0));
    }
    let mut bytes: u64 = curves.iter().map(|(_, curve, _)| curve[0].bytes).sum();
    if bytes > budget {
        let message = format!("{budget} bytes are too few: the smallest formats take {bytes}");
        return Err(Error::invalid(message).at("budget"));
    }
    loop {
        let step = |(_, curve, at): &(&String, Vec<&Candidate>, usize)| {
            let (now, next) = (curve[*at], *curve.get(at + 1)?);
            let more = next.bytes - now.bytes;
            Some(((now.error - next.error) / more.max(1) as f64, more))
        };
        let steps = curves.iter().enumerate().filter_map(|(index, curve)| Some((index, step(curve)?)));
        let fitting = steps.filter(|(_, (_, more))| bytes + more <= budget);
        let Some((index, (_, more))) = fitting.max_by(|a, b| a.1.0.total_cmp(&b.1.0)) else { break };
        curves[index].2 += 1;
        bytes += more;
    }
    let choice = |(weight, curve, at): (&String, Vec<&Candidate>, usize)| Choice {
        weight: weight.clone(),
        chosen: curve[at].clone(),
    };
    Ok(curves.into_iter().map(choice).collect())
}

/// The candidates on the lower convex hull of error over bytes, smallest first: each saves less error per byte than the one
/// before.
fn lower_hull(candidates: &[Candidate]) -> Vec<&Candidate> {
    let mut sorted: Vec<&Candidate> = candidates.iter().collect();
    sorted.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error)));
    let slope = |a: &Candidate, b: &Candidate| (a.error - b.error) / (b.bytes - a.bytes) as f64;
    let mut hull: Vec<&Candidate> = Vec::new();
    for next in sorted {
        if hull.last().is_some_and(|last| next.bytes == last.bytes || next.error >= last.error) {
            continue;
        }
        while let [.., before, last] = hull[..] {
            if slope(before, last) > slope(last, next) {
                break;
            }
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

impl Policy {
    /// The policy that gives every weight its chosen format: the most frequent format is the default, and weights with other
    /// formats are listed by name.
    pub fn of_choices(choices: &[Choice]) -> Self {
        let mut counts: Vec<(GroupFormat, usize)> = Vec::new();
        for Choice { chosen, .. } in choices {
            match counts.iter_mut().find(|(format, _)| *format == chosen.format) {
                Some((_, count)) => *count += 1,
                None => counts.push((chosen.format, 1)),
            }
        }
        let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(format, _)| format);
        let others = choices.iter().filter(|choice| Some(choice.chosen.format) != most);
        let weights = others.map(|choice| (choice.weight.clone(), Scheme::Group(choice.chosen.format)));
        Self {
            default: most.map_or(Scheme::Keep, Scheme::Group),
            weights: weights.collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::ProductWeight, *};
    use dsrun_core::program::ValueId;
    use std::collections::BTreeSet;

    fn candidate(name: &str, bytes: u64, error: f64) -> Candidate {
        Candidate { format: GroupFormat::from_name(name).unwrap(), bytes, error }
    }

    #[test]
    fn bytes_go_where_they_save_the_most_error() {
        let steep = vec![
            candidate("int4g128", 10, 100.0),
            candidate("int4g32", 12, 50.0),
            candidate("int8", 20, 1.0),
        ];
        let flat =
            vec![candidate("int4g128", 10, 10.0), candidate("int4g32", 12, 9.0), candidate("int8", 20, 0.0)];
        let all = BTreeMap::from([("flat".to_owned(), flat), ("steep".to_owned(), steep)]);
        let chosen = |budget| -> Vec<String> {
            choose(&all, budget).unwrap().iter().map(|choice| choice.chosen.format.to_string()).collect()
        };
        assert_eq!(chosen(20), ["int4g128", "int4g128"]);
        assert_eq!(chosen(22), ["int4g128", "int4g32"]);
        assert_eq!(chosen(30), ["int4g128", "int8"]);
        assert_eq!(chosen(40), ["int8", "int8"]);
        assert!(choose(&all, 19).unwrap_err().to_string().contains("the smallest formats take 20"));
    }

    #[test]
    fn candidates_above_the_lower_hull_are_skipped() {
        let all = [candidate("int4g128", 10, 5.0), candidate("int4g64", 11, 6.0), candidate("int8", 20, 1.0)];
        let left: Vec<u64> = lower_hull(&all).iter().map(|candidate| candidate.bytes).collect();
        assert_eq!(left, [10, 20]);
        // A step that saves little in front of one that saves much is skipped.
        let all = [candidate("int4g128", 10, 5.0), candidate("int4g64", 15, 4.9), candidate("int8", 20, 1.0)];
        let left: Vec<u64> = lower_hull(&all).iter().map(|candidate| candidate.bytes).collect();
        assert_eq!(left, [10, 20]);
    }

    #[test]
    fn errors_are_weighted_by_the_activations() {
        let mut values = vec![0.5f32; 64];
        values[3] = 8.0;
        let format = GroupFormat::from_name("int4g32").unwrap();
        let quiet = Candidate::of_rows(&values, &[0.0; 32], format, false).unwrap();
        let mut loud = [0.0; 32];
        loud[5] = 4.0;
        let mut loud = Candidate::of_rows(&values, &loud, format, false).unwrap();
        // 0.5 is nearest to 0 of multiples of 8 / 7; the second row has it on its grid.
        assert_eq!((quiet.error, loud.error), (0.0, 1.0));
        assert_eq!(quiet.bytes, 2 * 20);
        loud.add(&quiet);
        assert_eq!((loud.error, loud.bytes), (1.0, 80));
    }

    #[test]
    fn the_policy_gives_every_weight_its_chosen_format() {
        let names = ["int8", "int4g32", "int4g64", "int4g32", "int4g32"];
        let choices: Vec<Choice> = names
            .iter()
            .enumerate()
            .map(|(layer, name)| Choice {
                weight: format!("layers.{layer}.up"),
                chosen: candidate(name, 1, 0.0),
            })
            .collect();
        let policy = Policy::of_choices(&choices);
        assert_eq!((policy.default.to_string().as_str(), policy.weights.len()), ("int4g32", 2));
        let policy = Policy::from_toml(&policy.to_toml().unwrap()).unwrap();
        for (layer, name) in names.iter().enumerate() {
            let weight = ProductWeight {
                id: ValueId::new(0),
                name: format!("layers.{layer}.up"),
                kept: false,
                head: false,
                router: false,
                expert: false,
            };
            assert_eq!(policy.scheme_of(&weight, &mut BTreeSet::new()).unwrap().to_string(), *name);
        }
        assert_eq!(Policy::of_choices(&[]), Policy::default());
    }
}
