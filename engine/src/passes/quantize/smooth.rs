//! SmoothQuant: moves outliers of activations into weights.
//!
//! A few channels of activations are far larger than the rest, so one scale for a whole row leaves the other channels few
//! levels. Dividing channel `k` by a factor and multiplying column `k` of the weight by the same factor keeps the product and
//! evens out the activations: `factor = largest(x_k)^alpha / largest(w_k)^(1 - alpha)`. The division is folded into the producer
//! of the activations: the weight (and bias) of the preceding norm, or the rows of the up projection of a gated activation.
//!
//! Source: Xiao et al., "SmoothQuant" (2023).

use super::{Calibration, Policy, Scheme, product_weights};
use crate::passes::concatenate::weight_of;
use dsrun_core::{
    Error, Result, WeightExpr,
    op::{Op, OperandType},
    program::{Origin, Program, ValueId},
};
use std::collections::BTreeSet;

/// Reads the elements of a weight, row after row.
pub type ReadWeight<'a> = dyn Fn(&WeightExpr) -> Result<Vec<f32>> + 'a;

/// Factors are limited to this and its inverse: a channel with a more extreme factor is practically constant zero, and its column
/// would overflow half precision.
const MAX_FACTOR: f32 = 1e3;

/// The weights and vectors that the division of the channels is folded into.
#[derive(Debug, Default)]
struct Source {
    /// Vectors with an element for each channel.
    vectors: Vec<ValueId>,
    /// A weight with a row for each channel.
    rows: Option<ValueId>,
}

/// Smooths the activations of every product that quantises them, where the division can be folded into their producer.
///
/// # Errors
/// If the policy asks for smoothing and a product was not calibrated; those of reading weights.
pub fn smooth(
    program: &Program,
    policy: &Policy,
    calibration: &Calibration,
    read: &ReadWeight<'_>,
) -> Result<Program> {
    let Some(alpha) = policy.smooth.filter(|alpha| *alpha > 0.0) else { return Ok(program.clone()) };
    let mut program = program.clone();
    let uses = program.uses();
    let mut names = BTreeSet::new();
    let quantised: Vec<ValueId> = product_weights(&program)
        .iter()
        .filter(|weight| policy.scheme_of(weight, &mut names) == Some(Scheme::W8A8))
        .map(|weight| weight.id)
        .collect();
    for node in 0..program.nodes.len() {
        let Some(x) = program.nodes[node].call.results.first().copied() else { continue };
        let Some(products) = products_of(&program, &uses, x) else { continue };
        if !products.iter().any(|weight| quantised.contains(weight)) {
            continue;
        }
        let Some(source) = source(&program, &uses, node) else { continue };
        let factors = factors(&program, &products, calibration, alpha, read)?;
        let inverse: Vec<f32> = factors.iter().map(|factor| 1.0 / factor).collect();
        for vector in source.vectors {
            multiply(&mut program, vector, &inverse, false);
        }
        if let Some(rows) = source.rows {
            multiply(&mut program, rows, &inverse, true);
        }
        for weight in products {
            multiply(&mut program, weight, &factors, false);
        }
    }
    Ok(program)
}

/// The weights of the products that read a value, if nothing else reads it and each weight is read by its product only.
fn products_of(program: &Program, uses: &[usize], x: ValueId) -> Option<Vec<ValueId>> {
    let readers = program.nodes.iter().filter(|node| node.call.operands.contains(&Some(x)));
    let weights: Vec<ValueId> = readers.filter_map(|node| weight_of(&node.call)).collect();
    let alone = |id: &ValueId| uses[id.index()] == 1 && is_from_file(program, *id);
    (!weights.is_empty() && weights.len() == uses[x.index()] && weights.iter().all(alone)).then_some(weights)
}

fn is_from_file(program: &Program, id: ValueId) -> bool {
    matches!(program.values[id.index()].origin, Origin::Weight(_))
}

/// The weights and vectors that can take in the division of the channels of a node's result.
fn source(program: &Program, uses: &[usize], node: usize) -> Option<Source> {
    let call = &program.nodes[node].call;
    let own = |id: &ValueId| uses[id.index()] == 1 && is_from_file(program, *id);
    match call.op {
        // A per-head norm has fewer elements than channels, and scaling a weight with an offset does not scale its channel.
        Op::RmsNorm(norm) if norm.weight_offset == 0.0 => {
            let weight = call.operands[1].filter(own)?;
            let [width, features] = [weight, call.results[0]]
                .map(|id| program.values[id.index()].tensor_type().and_then(|tensor| tensor.shape.last()));
            (width == features).then(|| Source { vectors: vec![weight], rows: None })
        }
        Op::LayerNorm(_) => {
            let vectors = [call.operands[1], call.operands[2]];
            let all = vectors.iter().flatten().copied().collect::<Vec<_>>();
            (vectors[0].is_some() && all.iter().all(own)).then_some(Source { vectors: all, rows: None })
        }
        Op::GatedActivation(activation) if activation.limit == 0.0 && call.operands[2].is_none() => {
            let up = call.operands[1].filter(|up| uses[up.index()] == 1)?;
            let makes = program.nodes.iter().find(|node| node.call.results.contains(&up))?;
            let Op::Linear(_) = makes.call.op else { return None };
            let (weight, bias) = (makes.call.operands[1].filter(own)?, makes.call.operands[2]);
            bias.is_none_or(|bias| own(&bias))
                .then(|| Source { vectors: bias.into_iter().collect(), rows: Some(weight) })
        }
        _ => None,
    }
}

/// The factor that each channel is divided by.
fn factors(
    program: &Program,
    products: &[ValueId],
    calibration: &Calibration,
    alpha: f32,
    read: &ReadWeight<'_>,
) -> Result<Vec<f32>> {
    let mut activations: Vec<f32> = Vec::new();
    let mut weights: Vec<f32> = Vec::new();
    for id in products {
        let value = &program.values[id.index()];
        let channels = calibration.products.get(&value.name).ok_or_else(|| {
            Error::invalid("cannot be smoothed: its activations were not observed").at(&value.name)
        })?;
        let Origin::Weight(expr) = &value.origin else { continue };
        let columns = channels.largest.len();
        activations.resize(columns, 0.0);
        weights.resize(columns, 0.0);
        activations.iter_mut().zip(&channels.largest).for_each(|(all, largest)| *all = all.max(*largest));
        for row in read(expr)?.chunks_exact(columns.max(1)) {
            weights.iter_mut().zip(row).for_each(|(all, element)| *all = all.max(element.abs()));
        }
    }
    let factor = |(x, w): (&f32, &f32)| {
        let factor = x.powf(alpha) / w.powf(1.0 - alpha);
        if factor.is_finite() && factor > 0.0 { factor.clamp(1.0 / MAX_FACTOR, MAX_FACTOR) } else { 1.0 }
    };
    Ok(activations.iter().zip(&weights).map(factor).collect())
}

/// Multiplies the columns or rows of a weight, or the elements of a vector.
fn multiply(program: &mut Program, id: ValueId, factors: &[f32], rows: bool) {
    let value = &mut program.values[id.index()];
    let dtype = match &value.value_type {
        OperandType::Tensor(tensor) => Some(tensor.dtype),
        OperandType::Weight(_) => None,
    };
    let Origin::Weight(expr) = &mut value.origin else { return };
    let of = Box::new(expr.clone());
    *expr = WeightExpr::Factors { of, factors: factors.to_vec(), rows };
    match (dtype, &mut value.value_type) {
        (Some(dtype), _) => *expr = WeightExpr::Cast { of: Box::new(expr.clone()), dtype },
        (None, OperandType::Weight(weight)) => {
            weight.format = dsrun_core::WeightFormat::Dense(dsrun_core::DType::F32);
        }
        (None, OperandType::Tensor(_)) => {}
    }
}
