//! A mixture of formats against four bits everywhere, at equal size, on a model's own weights and activations.
//!
//!     cargo run --release -p dsrun-engine --example mixture -- MODEL.safetensors ACTIVATIONS.safetensors
//!
//! `mixture/activations.py` makes the second file. Formats are chosen by the energies of its calibration text; the error is measured
//! on rows of another: of each product with a rounded weight, the squared difference from the product with the weight itself,
//! over the square of the latter, summed over all products of the model.

#![allow(clippy::print_stdout, reason = "a program for people")]

use dsrun_core::{GroupFormat, WeightFormat};
use dsrun_engine::passes::quantize::{Candidate, Policy, choose, weight_error};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::{collections::BTreeMap, error::Error};

/// What everything is compared with.
const UNIFORM: &str = "int4g64_f16";
/// What a mixture may choose from.
const FORMATS: [&str; 6] =
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16", "int8g32_f16"];

/// A layer: its weight, the mean squares of its inputs on one text, and inputs on another.
struct Layer {
    name: String,
    weight: Vec<f32>,
    energy: Vec<f64>,
    x: Vec<f32>,
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>, Box<dyn Error>> {
    let tensor = file.tensor(name)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(format!("{name} is {:?}, must be F32", tensor.dtype()).into());
    }
    Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

impl Layer {
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
            x: floats(&activations, &format!("{name}.x"))?,
        });
    }
    let formats: Vec<GroupFormat> = FORMATS.iter().filter_map(|name| GroupFormat::from_name(name)).collect();
    let uniform = GroupFormat::from_name(UNIFORM).ok_or("no such format")?;
    let candidates: BTreeMap<String, Vec<Candidate>> = layers
        .par_iter()
        .map(|layer| {
            let of = |format: &GroupFormat| weight_error(&layer.weight, &layer.energy, *format, true);
            Ok((layer.name.clone(), formats.iter().map(of).collect::<Result<_, _>>()?))
        })
        .collect::<Result<_, dsrun_core::Error>>()?;
    let bytes_of = |format: GroupFormat| -> u64 {
        let of =
            |all: &Vec<Candidate>| all.iter().find(|candidate| candidate.format == format).map(|c| c.bytes);
        candidates.values().filter_map(of).sum()
    };
    let budget = bytes_of(uniform);
    let chosen = choose(&candidates, budget)?;
    let by_name: BTreeMap<&str, GroupFormat> =
        chosen.iter().map(|choice| (choice.weight.as_str(), choice.chosen.format)).collect();
    let total = |format: &(dyn Fn(&Layer) -> GroupFormat + Sync)| -> Result<f64, dsrun_core::Error> {
        let all = layers.par_iter().map(|layer| layer.error(format(layer))).collect::<Result<Vec<_>, _>>()?;
        // Each product counts by its own size: the sum of relative errors.
        Ok(all.iter().map(|(error, square)| error / square).sum::<f64>() / all.len() as f64)
    };
    let uniform_error = total(&|_| uniform)?;
    let mixture_error = total(&|layer| by_name.get(layer.name.as_str()).copied().unwrap_or(uniform))?;
    let absolute = |format: &(dyn Fn(&Layer) -> GroupFormat + Sync)| -> Result<f64, dsrun_core::Error> {
        let all = layers.par_iter().map(|layer| layer.error(format(layer))).collect::<Result<Vec<_>, _>>()?;
        Ok(all.iter().map(|(error, _)| error).sum::<f64>()
            / all.iter().map(|(_, square)| square).sum::<f64>())
    };
    let uniform_sum = absolute(&|_| uniform)?;
    let mixture_sum = absolute(&|layer| by_name.get(layer.name.as_str()).copied().unwrap_or(uniform))?;
    let mixture_bytes: u64 = chosen.iter().map(|choice| choice.chosen.bytes).sum();
    println!(
        "{} products; weights of {budget} bytes in {UNIFORM}, {mixture_bytes} in the mixture",
        layers.len()
    );
    println!("error of all products, squared, over their square: {uniform_sum:.3e} and {mixture_sum:.3e}");
    println!(
        "the same for each product, on average:             {uniform_error:.3e} and {mixture_error:.3e}"
    );
    println!("\n{}", Policy::of_choices(&chosen).to_toml()?);
    Ok(())
}
