//! Declares the weights of a program: which tensor of the file each one is, and in which format it is kept.

use crate::{
    config::DecoderConfig,
    step::Storage,
    tensor_names::{Naming, Part},
};
use dsrun_core::{
    DType, Error, Result, TensorType, WeightExpr, WeightFormat, WeightType,
    program::{ProgramBuilder, ValueId},
};

/// What is known of the tensors that a program is made of.
pub(crate) trait TensorTypes {
    /// The type of a tensor, which must have this shape.
    fn tensor_type(&mut self, name: &str, shape: &[usize]) -> Result<WeightType>;
}

/// Declares weights in a program.
pub(crate) struct Declare<'a> {
    pub(crate) config: &'a DecoderConfig,
    pub(crate) naming: Naming,
    pub(crate) storage: Storage,
    pub(crate) types: &'a mut dyn TensorTypes,
}

impl Declare<'_> {
    /// A matrix `[outputs, inputs]`.
    pub(crate) fn matrix(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
    ) -> Result<ValueId> {
        let place = self.naming.place(part, layer, self.config);
        let [outputs, inputs] = part.shape(self.config);
        let all = place.before + outputs + place.after;
        let stored = if place.transposed { [inputs, all] } else { [all, inputs] };
        let (mut expr, stored) = self.tensor(format!("{}.weight", place.tensor), &stored)?;
        if place.transposed {
            expr = WeightExpr::Transpose { of: Box::new(expr) };
        }
        let expr = rows(expr, place.before, outputs, all);
        let read = expr.infer(&|_| Ok(stored.clone()))?;
        let (expr, format) = match self.storage {
            Storage::Cast(dtype) if read.format != WeightFormat::Dense(dtype) => {
                (WeightExpr::Cast { of: Box::new(expr), dtype }, WeightFormat::Dense(dtype))
            }
            Storage::Keep | Storage::Cast(_) => (expr, read.format),
        };
        program.weight(part.value_name(layer), expr, WeightType { format, shape: read.shape })
    }

    /// The factors of a norm, in f32.
    pub(crate) fn vector(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        let tensor = format!("{}.weight", self.naming.place(part, layer, self.config).tensor);
        let (expr, stored) = self.tensor(tensor, &[size])?;
        f32_vector(program, part.value_name(layer), expr, &stored)
    }

    /// The bias of a matrix or norm, in f32.
    pub(crate) fn bias(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        let place = self.naming.place(part, layer, self.config);
        let all = place.before + size + place.after;
        let (expr, stored) = self.tensor(format!("{}.bias", place.tensor), &[all])?;
        let expr = rows(expr, place.before, size, all);
        f32_vector(program, format!("{}.bias", part.value_name(layer)), expr, &stored)
    }

    /// A vector that the model computed.
    pub(crate) fn constant(
        &mut self,
        program: &mut ProgramBuilder,
        name: &str,
        values: Vec<f32>,
    ) -> Result<ValueId> {
        let tensor_type = TensorType::new(DType::F32, [values.len()]);
        program.vector(name, WeightExpr::Constant(values), tensor_type)
    }

    fn tensor(&mut self, name: String, shape: &[usize]) -> Result<(WeightExpr, WeightType)> {
        let stored = self.types.tensor_type(&name, shape)?;
        Ok((WeightExpr::Tensor(name), stored))
    }
}

/// Some of `all` rows of a matrix, or elements of a vector.
fn rows(of: WeightExpr, start: usize, count: usize, all: usize) -> WeightExpr {
    if count == all {
        return of;
    }
    WeightExpr::Slice { of: Box::new(of), dimension: 0, start, end: start + count }
}

fn f32_vector(
    program: &mut ProgramBuilder,
    name: String,
    mut expr: WeightExpr,
    stored: &WeightType,
) -> Result<ValueId> {
    let read = expr.infer(&|_| Ok(stored.clone()))?;
    let [size] = read.shape[..] else {
        return Err(Error::internal(format!("{name} is no vector but {:?}", read.shape)));
    };
    if read.format != WeightFormat::Dense(DType::F32) {
        expr = WeightExpr::Cast { of: Box::new(expr), dtype: DType::F32 };
    }
    program.vector(name, expr, TensorType::new(DType::F32, [size]))
}
