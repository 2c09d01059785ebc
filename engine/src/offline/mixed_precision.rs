//! Choosing formats for the weights of a model under a budget.
//!
//! How far a product is off when its weight is rounded says little about how much that matters: an error at the start of a model
//! grows on its way, one in the scores of attention all but vanishes. So each weight is rounded once, by itself and as coarsely as
//! its formats go, and what becomes of the model's probabilities is measured; for the other formats this is scaled by the error of
//! the product.

use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, Precision},
    passes::quantize::{Calibration, Candidate, Choice, Policy, Scheme, choose, product_weights},
    plan::EnginePlan,
};
use dsrun_core::{
    DType, Error, GroupFormat, WeightExpr, WeightReader, WeightType,
    device::Device,
    op::{Op, OperandType},
    program::{Origin, Program},
};
use dsrun_models::{model::Model, step::ProgramOptions, weights::ExprReader};
use std::{collections::BTreeMap, sync::Arc};

/// Bytes of decoded rows that are held at a time.
const PIECE_BYTES: usize = 32 << 20;

/// The formats that a mixture is made of, the smallest first: those that every program that reads compressed-tensors knows.
const FORMATS: [&str; 6] =
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16", "int8g32_f16"];

/// The formats of a mixture.
fn formats() -> Vec<GroupFormat> {
    FORMATS.iter().filter_map(|name| GroupFormat::from_name(name)).collect()
}

/// What rounding one weight does to a model: see [`sensitivity`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sensitivity {
    /// What the weight was rounded to.
    pub format: GroupFormat,
    /// How far the model's probabilities moved: the Kullback-Leibler divergence in nats a token.
    pub divergence: f64,
}

/// Rounds the weight of one product after the other, the others being as they are, and measures how far that moves the
/// probabilities of a sequence of tokens. Weights that nothing quantises unless they are named, and those that fit no format of a
/// mixture, are left out. `progress` hears of the weights that are done, and of all.
///
/// # Errors
/// If the sequence is empty or longer than the model's context; those of planning, loading and running the model.
pub fn sensitivity(
    model: &Model,
    device: Arc<dyn Device>,
    tokens: &[u32],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<BTreeMap<String, Sensitivity>> {
    let mut options = EngineOptions {
        context: Some(tokens.len().max(1)),
        step_tokens: tokens.len().max(1),
        fuse: false,
        ..EngineOptions::default()
    };
    let mut plan = EnginePlan::new(model, &*device, &options)?;
    if plan.program.nodes.iter().any(|node| matches!(node.call.op, Op::LinearW8A8(_))) {
        // Made for products of integers, which rounding their weights would turn into others.
        options.precision = dense(&*device);
        plan = EnginePlan::new(model, &*device, &options)?;
    }
    let coarsest = coarsest(&plan.program);
    let weights = coarsest.iter().map(|(name, format)| (name.clone(), Scheme::Group(*format)));
    let policy = Policy { weights: weights.collect(), ..Policy::default() };
    let rounded = EnginePlan::new(model, &*device, &EngineOptions { quantize: Some(policy), ..options })?;
    let mut engine = plan.load(model, device, &mut |_, _| {})?;
    let moved = engine.reach(model, &rounded, tokens, progress)?;
    let of = |(name, format): (String, GroupFormat)| {
        let divergence = *moved.get(&name)?;
        Some((name, Sensitivity { format, divergence }))
    };
    Ok(coarsest.into_iter().filter_map(of).collect())
}

/// The type that a device likes best.
fn dense(device: &dyn Device) -> Precision {
    match device.properties().dtypes.first() {
        Some(DType::BF16) => Precision::Bf16,
        Some(DType::F16) => Precision::F16,
        _ => Precision::F32,
    }
}

/// The smallest format of every weight that only products read.
fn coarsest(program: &Program) -> BTreeMap<String, GroupFormat> {
    let formats = formats();
    let of = |name: &String, columns: usize| {
        let format = formats.iter().find(|format| format.row(columns).is_some())?;
        Some((name.clone(), *format))
    };
    let weights = product_weights(program).into_iter().filter(|weight| !weight.kept);
    weights
        .filter_map(|weight| {
            let columns = program.values[weight.id.index()].weight_type().map(WeightType::columns)?;
            of(&weight.name, columns)
        })
        .collect()
}

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
    /// How far products are off: the root of their squared errors over the squares of the products themselves.
    pub error: f64,
    /// How far the model's probabilities are expected to move, which a mixture makes small: what each weight does by itself, in
    /// nats a token, added up.
    pub divergence: f64,
}

/// A weight with its formats.
struct Measured {
    /// With the squared errors of the product.
    candidates: Vec<Candidate>,
    /// What a unit of these errors does to the model.
    reach: f64,
    elements: u64,
    /// The square of the product, counted like the errors.
    square: f64,
}

impl Measured {
    /// The weight in a format.
    fn part(&self, format: GroupFormat) -> Option<(&Self, &Candidate)> {
        Some((self, self.candidates.iter().find(|candidate| candidate.format == format)?))
    }
}

/// Refuses a budget that is too small for a model, before anything is measured.
///
/// # Errors
/// If a weight would take more than `bits` on average, scales included, with the smallest formats.
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
    if bits.is_nan() || bits < least {
        let rule = format!("the smallest formats take {least:.3} bits for each weight");
        return Err(EngineError::option("budget", bits, rule));
    }
    Ok(())
}

/// Chooses formats for a model's weights so that one takes `bits` on average at most, scales included, where they keep the model's
/// probabilities best: see [`sensitivity`]. Hears of the weights that are measured, and of all.
///
/// # Errors
/// If the budget is too small, the calibration or the sensitivities lack a product, or a weight cannot be read.
pub fn mixture(
    model: &Model,
    calibration: &Calibration,
    sensitivity: &BTreeMap<String, Sensitivity>,
    bits: f64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Mixture> {
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
    // Bytes, errors of products, and what these do to the model.
    let figures = |parts: &mut dyn Iterator<Item = (&Measured, &Candidate)>| {
        let (mut bytes, mut error, mut divergence) = (0, 0.0, 0.0);
        for (weight, candidate) in parts {
            bytes += candidate.bytes;
            error += candidate.error;
            divergence += candidate.error * weight.reach;
        }
        let error = if error == 0.0 { 0.0 } else { (error / square).sqrt() };
        Figures { bits: bytes as f64 * 8.0 / elements.max(1) as f64, error, divergence }
    };
    let by_reach = |weight: &Measured| -> Vec<Candidate> {
        let of =
            |candidate: &Candidate| Candidate { error: candidate.error * weight.reach, ..candidate.clone() };
        weight.candidates.iter().map(of).collect()
    };
    let candidates = measured.iter().map(|(name, weight)| (name.clone(), by_reach(weight))).collect();
    // (More than any weights take is all of them.)
    let choices = choose(&candidates, (bits * elements as f64 / 8.0) as u64)?;
    let everywhere = formats.into_iter().filter_map(|format| {
        let parts: Option<Vec<_>> = measured.values().map(|weight| weight.part(format)).collect();
        Some((format, figures(&mut parts?.into_iter())))
    });
    let chosen = choices.iter().filter_map(|choice| measured.get(&choice.weight)?.part(choice.chosen.format));
    let chosen: Vec<_> = chosen.collect();
    Ok(Mixture {
        everywhere: everywhere.collect(),
        figures: figures(&mut chosen.into_iter()),
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
    sensitivity: Option<&Sensitivity>,
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
    let missing = || Error::invalid("what rounding it does to the model was not measured");
    let seen = sensitivity.ok_or_else(missing)?;
    let error =
        candidates.iter().find(|candidate| candidate.format == seen.format).ok_or_else(missing)?.error;
    // What is exact in the coarsest format is so in this one, which is the smallest: it needs no weighing.
    let reach = if error > 0.0 { seen.divergence / error } else { 0.0 };
    Ok(Measured { candidates, reach, elements: rows as u64 * columns as u64, square })
}
