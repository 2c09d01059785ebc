//! Mixed precision against a uniform format of equal size, for a model that dsrun does not run: it needs the model's weights and
//! activations recorded by another program.
//!
//!     cargo run --release -p dsrun-engine --example mixed_precision -- MODEL.safetensors ACTIVATIONS.safetensors
//!
//! `mixed_precision/activations.py` makes the second file. Formats are chosen by its calibration text, with the errors of products
//! weighted in three ways: not at all, by each product's own square, and by the sensitivity of the model, as `dsrun quantize
//! --budget` does. Errors are measured on rows of another text: the squared differences of all products with rounded weights from
//! those with the original weights, over the squares of the latter, and the mean of this ratio over the products. It prints the
//! chosen formats, from which `mixed_precision/end_to_end.py` measures the error of the whole model.

#![allow(clippy::print_stdout, reason = "a program for people")]

use dsrun_core::{GroupFormat, WeightFormat};
use dsrun_engine::passes::quantize::{Candidate, choose};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::{collections::BTreeMap, error::Error};

/// The uniform formats to compare with.
const UNIFORM: [&str; 2] = ["int4g64_f16", "int4g32_f16"];
/// The format of `sensitivity` in the file, as in `mixed_precision/activations.py`.
const PROBE: &str = "int4g128_f16";
/// The formats to choose from.
const FORMATS: [&str; 6] =
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16", "int8g32_f16"];

/// A layer: its weight, the mean squares of its inputs on one text, the effect of rounding it on the model's output there, and
/// inputs on another text.
struct Layer {
    name: String,
    weight: Vec<f32>,
    energy: Vec<f64>,
    sensitivity: f64,
    x: Vec<f32>,
}

/// The factor for the errors of a layer, given its error in `PROBE`.
type Weigh = fn(&Layer, f64) -> f64;

/// The formats of all layers, by name.
type Formats = BTreeMap<String, GroupFormat>;

fn floats(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>, Box<dyn Error>> {
    let tensor = file.tensor(name)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(format!("{name} is {:?}, must be F32", tensor.dtype()).into());
    }
    Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

impl Layer {
    /// The expected square of the product on the first text, on the scale of the errors of candidates.
    fn square(&self) -> f64 {
        let rows = self.weight.chunks_exact(self.energy.len());
        rows.map(|row| row.iter().zip(&self.energy).map(|(w, x)| f64::from(*w).powi(2) * x).sum::<f64>())
            .sum()
    }

    /// The squared error of the product on the second text, and the square of the product.
    fn error(&self, format: GroupFormat) -> Result<(f64, f64), dsrun_core::Error> {
        let columns = self.energy.len();
        let weight = WeightFormat::Group(format);
        let mut row = vec![0; weight.row_bytes(columns).unwrap_or(0)];
        let mut rounded = vec![0.0; columns];
        let (mut error, mut square) = (0.0, 0.0);
        for values in self.weight.chunks_exact(columns) {
            format.quantise_row(values, true, &mut row)?;
            weight.decode_row(&row, &mut rounded)?;
            for x in self.x.chunks_exact(columns) {
                let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(x * w)).sum::<f64>();
                let (right, found) = (dot(values), dot(&rounded));
                error += (right - found).powi(2);
                square += right * right;
            }
        }
        Ok((error, square))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, activations] = arguments.as_slice() else {
        return Err("give MODEL.safetensors and ACTIVATIONS.safetensors".into());
    };
    let (model, activations) = (std::fs::read(model)?, std::fs::read(activations)?);
    let (model, activations) = (SafeTensors::deserialize(&model)?, SafeTensors::deserialize(&activations)?);
    let mut layers = Vec::new();
    for name in activations.names().iter().filter_map(|name| name.strip_suffix(".energy")) {
        let energy = floats(&activations, &format!("{name}.energy"))?;
        layers.push(Layer {
            name: name.to_owned(),
            weight: floats(&model, &format!("{name}.weight"))?,
            energy: energy.into_iter().map(f64::from).collect(),
            sensitivity: floats(&activations, &format!("{name}.sensitivity"))?
                .first()
                .copied()
                .map_or(0.0, f64::from),
            x: floats(&activations, &format!("{name}.x"))?,
        });
    }
    let formats: Vec<GroupFormat> = FORMATS.iter().filter_map(|name| GroupFormat::from_name(name)).collect();
    let probe = GroupFormat::from_name(PROBE).ok_or("no such format")?;
    let mut candidates: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
    for layer in &layers {
        let of = |format: &GroupFormat| Candidate::of_rows(&layer.weight, &layer.energy, *format, true);
        candidates.insert(layer.name.clone(), formats.iter().map(of).collect::<Result<_, _>>()?);
    }
    let weightings: [(&str, Weigh); 3] = [
        ("absolute", |_, _| 1.0),
        ("relative", |layer, _| 1.0 / layer.square()),
        ("sensitivity", |layer, probed| layer.sensitivity / probed),
    ];
    println!(
        "{:>14} {:>12} {:>12} {:>12} {:>24}",
        "size of", "weighting", "bytes", "all products", "mean over products"
    );
    let mut choices = Vec::new();
    for name in UNIFORM {
        let uniform = GroupFormat::from_name(name).ok_or("no such format")?;
        let bytes = |of: &dyn Fn(&str) -> GroupFormat| -> u64 {
            let chosen = candidates.iter().flat_map(|(layer, all)| {
                all.iter().filter(|candidate| candidate.format == of(layer)).map(|candidate| candidate.bytes)
            });
            chosen.sum()
        };
        let budget = bytes(&|_| uniform);
        let formats: Formats = layers.iter().map(|layer| (layer.name.clone(), uniform)).collect();
        let mut tried = vec![("uniform", formats)];
        for (weighting, weigh) in weightings {
            let mut weighted = candidates.clone();
            for layer in &layers {
                let Some(all) = weighted.get_mut(&layer.name) else { continue };
                let probed =
                    all.iter().find(|candidate| candidate.format == probe).map_or(1.0, |probed| probed.error);
                let factor = weigh(layer, probed);
                all.iter_mut().for_each(|candidate| candidate.error *= factor);
            }
            let chosen = choose(&weighted, budget)?;
            tried.push((
                weighting,
                chosen.into_iter().map(|choice| (choice.weight, choice.chosen.format)).collect(),
            ));
        }
        for (weighting, formats) in tried {
            let errors = layers.par_iter().map(|layer| layer.error(formats[&layer.name]));
            let errors: Vec<(f64, f64)> = errors.collect::<Result<_, _>>()?;
            let (error, square) = errors.iter().fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            let mean = errors.iter().map(|(error, square)| error / square).sum::<f64>() / errors.len() as f64;
            let (bytes, all) = (bytes(&|layer| formats[layer]), error / square);
            println!("{name:>14} {weighting:>12} {bytes:>12} {all:>12.3e} {mean:>24.3e}");
            choices.push((name, weighting, formats));
        }
    }
    for (size, weighting, formats) in choices {
        formats.iter().for_each(|(layer, format)| println!("{size} {weighting} {layer} {format}"));
    }
    Ok(())
}
