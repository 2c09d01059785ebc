//! Choosing formats for the weights of a model under a budget.

use crate::{
    error::{EngineError, Result},
    passes::quantize::{Calibration, Candidate, Choice, Policy, choose, product_weights},
};
use dsrun_core::{Error, GroupFormat, WeightExpr, WeightReader, program::Origin};
use dsrun_models::{model::Model, step::ProgramOptions, weights::ExprReader};
use std::collections::BTreeMap;

/// Bytes of decoded rows that are held at a time.
const PIECE_BYTES: usize = 32 << 20;

/// The formats that a mixture is made of: those that every program that reads compressed-tensors knows.
const FORMATS: [&str; 6] =
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16", "int8g32_f16"];

/// A format for every weight that only products read.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// What was chosen, as a policy.
    pub policy: Policy,
    /// What was chosen for each weight.
    pub choices: Vec<Choice>,
    /// Bits of a weight on average, scales included, and the error.
    pub figures: Figures,
    /// The same of each format that fits all weights, if all had it, from the smallest on.
    pub everywhere: Vec<(GroupFormat, Figures)>,
}

/// Size and error of quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Figures {
    /// Bits of a weight on average, scales included.
    pub bits: f64,
    /// How far products are off: the root of the squared errors, as the mixture's choice counts them, over the squares of the
    /// products themselves.
    pub error: f64,
}

/// A weight with its formats.
struct Measured {
    candidates: Vec<Candidate>,
    elements: u64,
    /// The square of the product, counted like the errors.
    square: f64,
}

/// Chooses formats for a model's weights so that one takes `bits` on average at most, scales included, where they save most
/// error: see [`passes::quantize`](crate::passes::quantize). Hears of the weights that are measured, and of all.
///
/// # Errors
/// If the budget is too small, the calibration lacks a product, or a weight cannot be read.
pub fn mixture(
    model: &Model,
    calibration: &Calibration,
    bits: f64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Mixture> {
    let program = model.program(&ProgramOptions::default())?;
    let formats: Vec<GroupFormat> = FORMATS.iter().filter_map(|name| GroupFormat::from_name(name)).collect();
    let weights: Vec<_> = product_weights(&program).into_iter().filter(|weight| !weight.kept).collect();
    let total = weights.len() as u64;
    let mut measured = BTreeMap::new();
    for (weight, done) in weights.into_iter().zip(0..) {
        progress(done, total);
        let Origin::Weight(expr) = &program.values[weight.id.index()].origin else { continue };
        let squares = calibration.mean_squares(&weight.name)?;
        let of_weight = measure(model, expr, &squares, &formats).map_err(|error| error.at(&weight.name))?;
        measured.insert(weight.name, of_weight);
    }
    progress(total, total);

    let elements: u64 = measured.values().map(|weight| weight.elements).sum();
    let square: f64 = measured.values().map(|weight| weight.square).sum();
    let figures = |bytes: u64, error: f64| Figures {
        bits: bytes as f64 * 8.0 / elements.max(1) as f64,
        error: if error == 0.0 { 0.0 } else { (error / square).sqrt() },
    };
    let candidates: BTreeMap<String, Vec<Candidate>> =
        measured.into_iter().map(|(name, weight)| (name, weight.candidates)).collect();
    let smallest =
        candidates.values().filter_map(|all| all.iter().map(|candidate| candidate.bytes).min()).sum();
    let least = figures(smallest, 0.0).bits;
    if bits.is_nan() || bits < least {
        let rule = format!("the smallest formats take {least:.3} bits for each weight");
        return Err(EngineError::option("budget", bits, rule));
    }
    // (More than any weights take is all of them.)
    let choices = choose(&candidates, (bits * elements as f64 / 8.0) as u64)?;
    let sum = |chosen: &mut dyn Iterator<Item = &Candidate>| {
        let (bytes, error) = chosen.fold((0, 0.0), |(bytes, error), of| (bytes + of.bytes, error + of.error));
        figures(bytes, error)
    };
    let everywhere = formats.into_iter().filter_map(|format| {
        let of = |all: &Vec<Candidate>| all.iter().position(|candidate| candidate.format == format);
        let places = candidates.values().map(|all| Some(&all[of(all)?])).collect::<Option<Vec<_>>>()?;
        Some((format, sum(&mut places.into_iter())))
    });
    Ok(Mixture {
        everywhere: everywhere.collect(),
        figures: sum(&mut choices.iter().map(|choice| &choice.chosen)),
        policy: Policy::of_choices(&choices),
        choices,
    })
}

/// Measures a weight in each format that its columns fit, a few rows at a time.
fn measure(
    model: &Model,
    expr: &WeightExpr,
    mean_squares: &[f64],
    formats: &[GroupFormat],
) -> dsrun_core::Result<Measured> {
    let reader = ExprReader::new(&**model.weights(), expr)?;
    let (rows, columns) = (reader.weight_type().rows(), reader.weight_type().columns());
    if columns != mean_squares.len() {
        let message = format!("has {columns} columns, but {} channels were observed", mean_squares.len());
        return Err(Error::invalid(message));
    }
    let fitting = formats.iter().filter(|format| format.row(columns).is_some());
    let empty = |format: &GroupFormat| Candidate { format: *format, bytes: 0, error: 0.0 };
    let mut candidates: Vec<Candidate> = fitting.map(empty).collect();
    let mut square = 0.0;
    let at_once = (PIECE_BYTES / (columns * 4).max(1)).max(1);
    for first in (0..rows).step_by(at_once) {
        let values = reader.decoded_rows(first, at_once.min(rows - first))?;
        for candidate in &mut candidates {
            candidate.add(&Candidate::of_rows(&values, mean_squares, candidate.format, true)?);
        }
        for row in values.chunks_exact(columns.max(1)) {
            square += row.iter().zip(mean_squares).map(|(w, x)| f64::from(*w).powi(2) * x).sum::<f64>();
        }
    }
    reader.release();
    Ok(Measured { candidates, elements: rows as u64 * columns as u64, square })
}
