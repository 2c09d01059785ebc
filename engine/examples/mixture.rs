//! A mixture of formats against four bits everywhere, at equal size, for a model that dsrun does not run: its weights, and
//! activations that another program saw.
//!
//!     cargo run --release -p dsrun-engine --example mixture -- MODEL.safetensors ACTIVATIONS.safetensors
//!
//! `mixture/activations.py` makes the second file. Formats are chosen by the energies of its calibration text; the error is
//! measured on rows of another: the squared differences of all products with rounded weights from those with the weights
//! themselves, over the squares of the latter. (For models that dsrun runs there is `dsrun quantize --budget`.)

#![allow(clippy::print_stdout, reason = "a program for people")]

use dsrun_core::{GroupFormat, WeightFormat};
use dsrun_engine::passes::quantize::{Candidate, choose};
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

/// The format of a layer.
type FormatOf<'a> = dyn Fn(&Layer) -> GroupFormat + Sync + 'a;

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
    let mut candidates = BTreeMap::new();
    for layer in &layers {
        let of = |format: &GroupFormat| Candidate::of_rows(&layer.weight, &layer.energy, *format, true);
        candidates.insert(layer.name.clone(), formats.iter().map(of).collect::<Result<Vec<_>, _>>()?);
    }
    let all = candidates.values().flatten();
    let budget = all.filter(|candidate| candidate.format == uniform).map(|candidate| candidate.bytes).sum();
    let chosen = choose(&candidates, budget)?;
    let bytes: u64 = chosen.iter().map(|choice| choice.chosen.bytes).sum();
    println!("{} products; weights of {budget} bytes in {UNIFORM}, {bytes} in the mixture", layers.len());

    let format_of: BTreeMap<&str, GroupFormat> =
        chosen.iter().map(|choice| (choice.weight.as_str(), choice.chosen.format)).collect();
    let everywhere = |_: &Layer| uniform;
    let mixed = |layer: &Layer| format_of.get(layer.name.as_str()).copied().unwrap_or(uniform);
    let formats: [(&str, &FormatOf<'_>); 2] = [(UNIFORM, &everywhere), ("mixture", &mixed)];
    println!("{:>16} {:>12} {:>24}", "", "all products", "mean of each product's");
    for (name, format) in formats {
        let errors = layers.par_iter().map(|layer| layer.error(format(layer)));
        let errors: Vec<(f64, f64)> = errors.collect::<Result<_, _>>()?;
        let (error, square) = errors.iter().fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let mean = errors.iter().map(|(error, square)| error / square).sum::<f64>() / errors.len() as f64;
        println!("{name:>16} {:>12.3e} {mean:>24.3e}", error / square);
    }
    for choice in &chosen {
        println!("{:<48} {}", choice.weight, choice.chosen.format);
    }
    Ok(())
}
