//! Mixed precision: chooses a format for each weight of a model under a budget.
//!
//! The effect of a format on the model is estimated from two measurements: the error of the weight's product in that format, and
//! the [sensitivity](super::sensitivity) of the model to the error of that product, measured in the coarsest format.

use super::sensitivity::{Sensitivity, formats};
use crate::{
    error::{EngineError, Result},
    passes::quantize::{Calibration, Candidate, Choice, Policy, choose, product_weights},
};
use dsrun_core::{Error, GroupFormat, WeightExpr, WeightReader, op::OperandType, program::Origin};
use dsrun_models::{model::Model, step::ProgramOptions, weights::ExprReader};
use std::collections::BTreeMap;

/// Bytes of decoded weight rows held in memory at a time.
const CHUNK_BYTES: usize = 32 << 20;

/// The formats chosen for the weights of matrix products.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPrecision {
    /// The choice as a policy.
    pub policy: Policy,
    /// The choice for each weight.
    pub choices: Vec<Choice>,
    /// Size and error of the choice.
    pub figures: FormatFigures,
    /// Size and error of each format that fits all weights, if all weights had it, the smallest first.
    pub uniform: Vec<(GroupFormat, FormatFigures)>,
}

/// Size and error of quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct FormatFigures {
    /// The average bits of a weight, scales included.
    pub bits: f64,
    /// The relative error of the products: the root of their squared errors over the squares of the products.
    pub error: f64,
    /// The expected change of the model's probabilities in nats per token, which mixed precision minimises: the sum over the
    /// weights of the change caused by each alone.
    pub divergence: f64,
}

/// The measurements of a weight.
struct Measured {
    /// Its formats, with the squared errors of the product.
    candidates: Vec<Candidate>,
    /// The model's divergence per unit of these errors.
    sensitivity: f64,
    elements: u64,
    /// The expected square of the product, on the scale of the errors.
    square: f64,
}

impl Measured {
    /// The weight with its candidate of a format.
    fn in_format(&self, format: GroupFormat) -> Option<(&Self, &Candidate)> {
        Some((self, self.candidates.iter().find(|candidate| candidate.format == format)?))
    }
}

/// Refuses a budget that is too small for a model, before anything is measured.
///
/// # Errors
/// If the weights take more than `bits` on average, scales included, in the smallest formats.
pub fn check_budget(model: &Model, bits: f64) -> Result<()> {
    let program = model.program(&ProgramOptions::default())?;
    let formats = formats();
    let (mut bytes, mut elements) = (0, 0);
    for weight in product_weights(&program).into_iter().filter(|weight| !weight.kept) {
        let OperandType::Weight(weight) = &program.values[weight.id.index()].value_type else { continue };
        let rows = formats.iter().filter_map(|format| format.row(weight.columns()));
        let row_bytes = rows.map(|row| row.integers.len() + row.scales.len() + row.offsets.len());
        let Some(smallest) = row_bytes.min() else { continue };
        bytes += weight.rows() as u64 * smallest as u64;
        elements += weight.rows() as u64 * weight.columns() as u64;
    }
    let least = bytes as f64 * 8.0 / elements.max(1) as f64;
    if !bits.is_finite() {
        return Err(EngineError::option(
            "budget",
            bits,
            "must be a number of bits for each weight, such as 4.5",
        ));
    }
    if bits < least {
        let rule = format!("the smallest formats take {least:.3} bits for each weight");
        return Err(EngineError::option("budget", bits, rule));
    }
    Ok(())
}

/// Chooses formats for a model's weights that keep its probabilities best, with at most `bits` for a weight on average, scales
/// included. `sensitivity` is that of [`sensitivity`](super::sensitivity()). `progress` receives the number of weights measured,
/// and of all.
///
/// # Errors
/// If the budget is too small, the calibration or the sensitivities lack a product, or a weight cannot be read.
pub fn mixed_precision(
    model: &Model,
    calibration: &Calibration,
    sensitivity: &BTreeMap<String, Sensitivity>,
    bits: f64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<MixedPrecision> {
    check_budget(model, bits)?;
    let program = model.program(&ProgramOptions::default())?;
    let formats = formats();
    let weights: Vec<_> = product_weights(&program).into_iter().filter(|weight| !weight.kept).collect();
    let total = weights.len() as u64;
    let mut measured = BTreeMap::new();
    for (weight, done) in weights.into_iter().zip(0..) {
        progress(done, total);
        let Origin::Weight(expr) = &program.values[weight.id.index()].origin else { continue };
        let squares = calibration.mean_squares(&weight.name)?;
        let of_weight = measure(model, expr, &squares, &formats, sensitivity.get(&weight.name));
        let of_weight = of_weight.map_err(|error| error.at(&weight.name))?;
        measured.insert(weight.name, of_weight);
    }
    progress(total, total);

    let elements: u64 = measured.values().map(|weight| weight.elements).sum();
    let square: f64 = measured.values().map(|weight| weight.square).sum();
    // Sums sizes, product errors, and the resulting divergence of the model.
    let figures = |parts: &mut dyn Iterator<Item = (&Measured, &Candidate)>| {
        let (mut bytes, mut error, mut divergence) = (0, 0.0, 0.0);
        for (weight, candidate) in parts {
            bytes += candidate.bytes;
            error += candidate.error;
            divergence += candidate.error * weight.sensitivity;
        }
        let error = if error == 0.0 { 0.0 } else { (error / square).sqrt() };
        FormatFigures { bits: bytes as f64 * 8.0 / elements.max(1) as f64, error, divergence }
    };
    let weighted = |weight: &Measured| -> Vec<Candidate> {
        let of = |candidate: &Candidate| Candidate {
            error: candidate.error * weight.sensitivity,
            ..candidate.clone()
        };
        weight.candidates.iter().map(of).collect()
    };
    let candidates = measured.iter().map(|(name, weight)| (name.clone(), weighted(weight))).collect();
    // The cast saturates: a budget above all formats selects the largest ones.
    let choices = choose(&candidates, (bits * elements as f64 / 8.0) as u64)?;
    let uniform = formats.into_iter().filter_map(|format| {
        let parts: Option<Vec<_>> = measured.values().map(|weight| weight.in_format(format)).collect();
        Some((format, figures(&mut parts?.into_iter())))
    });
    let chosen =
        choices.iter().filter_map(|choice| measured.get(&choice.weight)?.in_format(choice.chosen.format));
    let chosen: Vec<_> = chosen.collect();
    Ok(MixedPrecision {
        uniform: uniform.collect(),
        figures: figures(&mut chosen.into_iter()),
        policy: Policy::of_choices(&choices),
        choices,
    })
}

/// Measures a weight in each format that can store rows of its length, a few rows at a time.
fn measure(
    model: &Model,
    expr: &WeightExpr,
    mean_squares: &[f64],
    formats: &[GroupFormat],
    sensitivity: Option<&Sensitivity>,
) -> dsrun_core::Result<Measured> {
    let reader = ExprReader::new(&**model.weights(), expr)?;
    let (rows, columns) = (reader.weight_type().rows(), reader.weight_type().columns());
    if columns != mean_squares.len() {
        let message =
            format!("the weight has {columns} columns, but {} channels were observed", mean_squares.len());
        return Err(Error::invalid(message));
    }
    let fitting = formats.iter().filter(|format| format.row(columns).is_some());
    let empty = |format: &GroupFormat| Candidate { format: *format, bytes: 0, error: 0.0 };
    let mut candidates: Vec<Candidate> = fitting.map(empty).collect();
    let mut square = 0.0;
    let at_once = (CHUNK_BYTES / (columns * 4).max(1)).max(1);
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
    let missing = || Error::invalid("the sensitivity of the model to this weight was not measured");
    let seen = sensitivity.ok_or_else(missing)?;
    let error =
        candidates.iter().find(|candidate| candidate.format == seen.format).ok_or_else(missing)?.error;
    // A weight that is exact in the coarsest format needs no finer one.
    let sensitivity = if error > 0.0 { seen.divergence / error } else { 0.0 };
    Ok(Measured { candidates, sensitivity, elements: rows as u64 * columns as u64, square })
}
