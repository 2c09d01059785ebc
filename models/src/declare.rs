//! Declares the weights of a program: which tensor of the file each one is, and in which format it is kept.

use crate::{
    step::Storage,
    tensor_names::{Naming, Part},
};
use dsrun_core::{
    DType, Result, TensorType, WeightExpr, WeightFormat, WeightType,
    program::{ProgramBuilder, ValueId},
};

/// What is known of the tensors that a program is made of.
pub(crate) trait TensorTypes {
    /// The type of a tensor, which must have this shape.
    fn tensor_type(&mut self, name: &str, shape: &[usize]) -> Result<WeightType>;
}

/// Declares weights in a program.
pub(crate) struct Declare<'a> {
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
        shape: [usize; 2],
    ) -> Result<ValueId> {
        let tensor = format!("{}.weight", self.naming.tensor(part, layer));
        let in_file = self.types.tensor_type(&tensor, &shape)?;
        let expr = WeightExpr::Tensor(tensor);
        let (expr, format) = match self.storage {
            Storage::Cast(dtype) if in_file.format != WeightFormat::Dense(dtype) => {
                (WeightExpr::Cast { of: Box::new(expr), dtype }, WeightFormat::Dense(dtype))
            }
            Storage::Keep | Storage::Cast(_) => (expr, in_file.format),
        };
        program.weight(part.value_name(layer), expr, WeightType { format, shape: shape.to_vec() })
    }

    /// The factors of a norm, in f32.
    pub(crate) fn vector(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        let tensor = format!("{}.weight", self.naming.tensor(part, layer));
        self.f32_vector(program, part.value_name(layer), tensor, size)
    }

    /// The bias of a matrix, in f32.
    pub(crate) fn bias(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        let tensor = format!("{}.bias", self.naming.tensor(part, layer));
        self.f32_vector(program, format!("{}.bias", part.value_name(layer)), tensor, size)
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

    fn f32_vector(
        &mut self,
        program: &mut ProgramBuilder,
        name: String,
        tensor: String,
        size: usize,
    ) -> Result<ValueId> {
        let in_file = self.types.tensor_type(&tensor, &[size])?;
        let mut expr = WeightExpr::Tensor(tensor);
        if in_file.format != WeightFormat::Dense(DType::F32) {
            expr = WeightExpr::Cast { of: Box::new(expr), dtype: DType::F32 };
        }
        program.vector(name, expr, TensorType::new(DType::F32, [size]))
    }
}
