//! The network as a program, with random weights.

use crate::Result;
use dsrun_core::{
    DType, Size, TensorType, WeightExpr, WeightFormat, WeightType,
    op::{Activation, Linear, Nonlinearity},
    program::{Program, ProgramBuilder},
};
use dsrun_models::weights::{Distribution, RandomSource, RandomTensor};
use std::fmt::Write;

/// A multilayer perceptron for micro-batches of a fixed size: linear layers, with ReLU between them.
pub(crate) struct Network {
    pub(crate) program: Program,
    pub(crate) weights: RandomSource,
    /// Rows of a micro-batch.
    pub(crate) rows: usize,
    /// Features of a row of inputs.
    pub(crate) inputs: usize,
    layers: usize,
}

impl Network {
    /// The network with these widths, inputs first.
    pub(crate) fn new(widths: &[usize], rows: usize) -> Result<Self> {
        let mut builder = ProgramBuilder::new("perceptron");
        let dense = WeightFormat::Dense(DType::F32);
        let mut x = builder.input("x", TensorType::new(DType::F32, [Size::from(rows), widths[0].into()]))?;
        let (mut tensors, layers) = (Vec::new(), widths.len() - 1);
        for (layer, pair) in widths.windows(2).enumerate() {
            let name = format!("layers.{layer}.weight");
            let weight_type = WeightType { format: dense, shape: vec![pair[1], pair[0]] };
            let weight = builder.weight(name.clone(), WeightExpr::tensor(&name), weight_type.clone())?;
            tensors.push(RandomTensor { name, weight_type, distribution: Distribution::matrix(pair[0]) });
            x = builder.call(Linear { dtype: DType::F32 }, [Some(x), Some(weight), None])?;
            if layer + 1 < layers {
                let relu = Activation { function: Nonlinearity::Relu, limit: 0.0 };
                x = builder.call(relu, [Some(x), None])?;
            }
        }
        let (program, weights) = (builder.finish(&[x])?, RandomSource::new(0, tensors)?);
        Ok(Self { program, weights, rows, inputs: widths[0], layers })
    }

    /// The policy of a tensor-parallel split: layers by outputs and by inputs in turn, as in a transformer's MLP, so that the ranks
    /// exchange once for two layers.
    pub(crate) fn split(&self) -> String {
        let mut policy = String::from("[weights]\n");
        for layer in 0..self.layers {
            let pin = match layer % 2 {
                0 if layer + 1 == self.layers => "replicated",
                0 => "rows",
                _ => "columns",
            };
            // Writing to a string cannot fail.
            let _ = writeln!(policy, "\"layers.{layer}.weight\" = \"{pin}\"");
        }
        policy
    }
}
