//! Declares the weights of a program: which tensor of the file each one is, and in which format it is kept.

use crate::{
    config::DecoderConfig,
    step::Storage,
    tensor_names::{Interleaved, Naming, Part, Place, numbered},
};
use dsrun_core::{
    DType, Error, Result, TensorType, WeightExpr, WeightFormat, WeightType,
    program::{ProgramBuilder, ValueId},
};
use std::collections::HashMap;

/// What is known of the tensors that a program is made of.
pub(crate) trait TensorTypes {
    /// The type of a tensor, which must have this shape; a matrix of one row may be a vector.
    fn tensor_type(&mut self, name: &str, shape: &[usize]) -> Result<WeightType>;
}

/// Declares weights in a program.
pub(crate) struct Declare<'a> {
    pub(crate) config: &'a DecoderConfig,
    pub(crate) naming: Naming,
    pub(crate) storage: Storage,
    pub(crate) types: &'a mut dyn TensorTypes,
    /// The types of the tensors that were asked for.
    pub(crate) stored: HashMap<String, WeightType>,
    /// The weights that were declared, by their names: layers of some models share theirs.
    pub(crate) declared: HashMap<String, ValueId>,
}

impl Declare<'_> {
    /// A matrix `[outputs, inputs]`; of experts, their matrices one after the other: `[experts * outputs, inputs]`.
    pub(crate) fn matrix(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
    ) -> Result<ValueId> {
        if let Some(known) = self.declared.get(&part.value_name(layer)) {
            return Ok(*known);
        }
        let place = self.naming.place(part, layer, self.config);
        let shape = part.shape(self.config);
        let expr = match self.config.mixture_of(layer).filter(|_| part.is_of_experts()) {
            None if part.is_of_heads() => self.matrices_of_heads(&place, part)?,
            None => self.one_matrix(&place, place.weight(), shape)?,
            Some(mixture) if matches!(self.naming, Naming::Plain) => {
                let [outputs, inputs] = shape;
                self.tensor(place.weight(), &[mixture.experts * outputs, inputs])?
            }
            Some(mixture) if place.is_per_expert() => {
                let matrices = (0..mixture.experts)
                    .map(|expert| self.one_matrix(&place, numbered(&place.weight(), expert), shape));
                stack(matrices.collect::<Result<_>>()?)
            }
            Some(mixture) => self.stacked_matrices(&place, mixture.experts, shape)?,
        };
        let read = self.infer(&expr)?;
        let (expr, format) = match self.storage {
            Storage::Cast(dtype) if read.format != WeightFormat::Dense(dtype) => {
                (WeightExpr::Cast { of: Box::new(expr), dtype }, WeightFormat::Dense(dtype))
            }
            Storage::Keep | Storage::Cast(_) => (expr, read.format),
        };
        let weight = WeightType { format, shape: read.shape };
        let declared = program.weight(part.value_name(layer), expr, weight)?;
        self.declared.insert(part.value_name(layer), declared);
        Ok(declared)
    }

    /// The rows of a part in a tensor that is one matrix.
    fn one_matrix(
        &mut self,
        place: &Place,
        tensor: String,
        [outputs, inputs]: [usize; 2],
    ) -> Result<WeightExpr> {
        let all = place.all(outputs);
        let stored = if place.transposed { [inputs, all] } else { [all, inputs] };
        let mut expr = self.tensor(tensor, &stored)?;
        if place.transposed {
            expr = transpose(expr);
        }
        Ok(own_rows(expr, place, [outputs, inputs]))
    }

    /// The matrices of all heads, one after the other.
    ///
    /// A file has the matrices of keys as `[heads, outputs, inputs]`, and those of values likewise; or one matrix, in which rows of
    /// keys and values follow each other head by head. Then those of keys have to be transposed, which makes f32 of
    /// quantised elements.
    fn matrices_of_heads(&mut self, place: &Place, part: Part) -> Result<WeightExpr> {
        let ([rows, columns], heads) = (part.shape(self.config), self.config.heads);
        if matches!(self.naming, Naming::Plain) {
            return self.tensor(place.weight(), &[rows, columns]);
        }
        if place.all(0) == 0 {
            let tensor = self.tensor(place.weight(), &[heads, rows / heads, columns])?;
            return Ok(reshape(tensor, vec![rows, columns]));
        }
        let latent = self.config.latent.ok_or_else(|| Error::internal("there is no latent"))?;
        let of_head = latent.plain + latent.value;
        let joint = self.tensor(place.weight(), &[heads * of_head, latent.rank])?;
        let matrix = |head: usize| {
            let own = |first, count| slice(joint.clone(), 0, head * of_head + first, count, heads * of_head);
            match part {
                Part::KeyUp => transpose(own(0, latent.plain)),
                _ => own(latent.plain, latent.value),
            }
        };
        Ok(stack((0..heads).map(matrix).collect()))
    }

    /// The rows of a part in a tensor of three dimensions, the first of which is that of experts.
    fn stacked_matrices(
        &mut self,
        place: &Place,
        experts: usize,
        [outputs, inputs]: [usize; 2],
    ) -> Result<WeightExpr> {
        let all = place.all(outputs);
        let [rows, columns] = if place.transposed { [inputs, all] } else { [all, inputs] };
        let tensor = self.tensor(place.weight(), &[experts, rows, columns])?;
        let flat = reshape(tensor, vec![experts * rows, columns]);
        if !place.transposed && all == outputs {
            return Ok(flat);
        }
        if !place.transposed && place.interleaved.is_some() {
            return Ok(own_rows(flat, place, [experts * outputs, inputs]));
        }
        let matrix = |expert: usize| {
            let own = slice(flat.clone(), 0, expert * rows, rows, experts * rows);
            let own = if place.transposed { transpose(own) } else { own };
            own_rows(own, place, [outputs, inputs])
        };
        Ok(stack((0..experts).map(matrix).collect()))
    }

    /// The factors of a norm and other vectors, in f32.
    pub(crate) fn vector(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        if let Some(known) = self.declared.get(&part.value_name(layer)) {
            return Ok(*known);
        }
        let tensor = self.naming.place(part, layer, self.config).weight();
        let expr = self.tensor(tensor, &[size])?;
        self.f32_vector(program, part.value_name(layer), expr)
    }

    /// The bias of a matrix or norm, in f32; of experts, their biases one after the other.
    pub(crate) fn bias(
        &mut self,
        program: &mut ProgramBuilder,
        part: Part,
        layer: usize,
        size: usize,
    ) -> Result<ValueId> {
        if let Some(known) = self.declared.get(&bias_name(part, layer)) {
            return Ok(*known);
        }
        let place = self.naming.place(part, layer, self.config);
        let all = place.all(size);
        let expr = match self.config.mixture_of(layer).filter(|_| part.is_of_experts()) {
            None => {
                let tensor = self.tensor(place.bias(), &[all])?;
                own_runs(tensor, &place, size)
            }
            Some(mixture) if matches!(self.naming, Naming::Plain) => {
                self.tensor(place.bias(), &[mixture.experts * size])?
            }
            Some(mixture) if place.is_per_expert() => {
                let bias = |expert| {
                    let tensor = self.tensor(numbered(&place.bias(), expert), &[all])?;
                    Ok(own_elements(tensor, &place, size))
                };
                stack((0..mixture.experts).map(bias).collect::<Result<_>>()?)
            }
            Some(mixture) => {
                let tensor = self.tensor(place.bias(), &[mixture.experts, all])?;
                let own = match place.interleaved {
                    Some(_) => {
                        let turned = transpose(tensor);
                        transpose(own_rows(turned, &place, [size, mixture.experts]))
                    }
                    None => slice(tensor, 1, place.before, size, all),
                };
                reshape(own, vec![mixture.experts * size])
            }
        };
        self.f32_vector(program, bias_name(part, layer), expr)
    }

    /// A vector that the model computed.
    pub(crate) fn constant(
        &mut self,
        program: &mut ProgramBuilder,
        name: &str,
        values: Vec<f32>,
    ) -> Result<ValueId> {
        if let Some(known) = self.declared.get(name) {
            return Ok(*known);
        }
        let tensor_type = TensorType::new(DType::F32, [values.len()]);
        let declared = program.vector(name, WeightExpr::Constant(values), tensor_type)?;
        self.declared.insert(name.to_owned(), declared);
        Ok(declared)
    }

    /// A matrix of one column that the model computes, in f32.
    pub(crate) fn constant_column(
        &mut self,
        program: &mut ProgramBuilder,
        name: &str,
        values: impl FnOnce() -> Vec<f32>,
    ) -> Result<ValueId> {
        if let Some(known) = self.declared.get(name) {
            return Ok(*known);
        }
        let values = values();
        let rows = values.len();
        let column = transpose(reshape(WeightExpr::Constant(values), vec![1, rows]));
        let weight = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![rows, 1] };
        let declared = program.weight(name, column, weight)?;
        self.declared.insert(name.to_owned(), declared);
        Ok(declared)
    }

    fn tensor(&mut self, name: String, shape: &[usize]) -> Result<WeightExpr> {
        let stored = self.types.tensor_type(&name, shape)?;
        let tensor = WeightExpr::tensor(&name);
        let tensor = if stored.shape == shape { tensor } else { reshape(tensor, shape.to_vec()) };
        self.stored.insert(name, stored);
        Ok(tensor)
    }

    /// The type of an expression over tensors that were asked for.
    fn infer(&self, expr: &WeightExpr) -> Result<WeightType> {
        expr.infer(&|name| {
            let stored = self.stored.get(name).cloned();
            stored.ok_or_else(|| Error::internal(format!("tensor {name} is not declared")))
        })
    }

    fn f32_vector(
        &mut self,
        program: &mut ProgramBuilder,
        name: String,
        mut expr: WeightExpr,
    ) -> Result<ValueId> {
        let read = self.infer(&expr)?;
        let [size] = read.shape[..] else {
            return Err(Error::internal(format!("{name} is no vector but {:?}", read.shape)));
        };
        if read.format != WeightFormat::Dense(DType::F32) {
            expr = WeightExpr::Cast { of: Box::new(expr), dtype: DType::F32 };
        }
        let declared = program.vector(&name, expr, TensorType::new(DType::F32, [size]))?;
        self.declared.insert(name, declared);
        Ok(declared)
    }
}

/// The name in programs of the bias of a matrix or norm.
fn bias_name(part: Part, layer: usize) -> String {
    format!("{}.bias", part.value_name(layer))
}

/// The rows of a part among those of all parts of a tensor. The part has `rows` rows, of `columns` elements.
fn own_rows(of: WeightExpr, place: &Place, [rows, columns]: [usize; 2]) -> WeightExpr {
    match place.interleaved {
        // Rows that take turns stand side by side in rows of as many columns.
        Some(Interleaved { parts, part, run: 1 }) => {
            let joined = reshape(of, vec![rows, parts * columns]);
            slice(joined, 1, part * columns, columns, parts * columns)
        }
        Some(_) => own_runs(of, place, rows),
        None => own_elements(of, place, rows),
    }
}

/// The rows, or elements of a vector, of a part whose runs take turns with those of others, or that follows others.
fn own_runs(of: WeightExpr, place: &Place, count: usize) -> WeightExpr {
    let Some(Interleaved { parts, part, run }) = place.interleaved else {
        return own_elements(of, place, count);
    };
    let own = |index: usize| slice(of.clone(), 0, (index * parts + part) * run, run, parts * count);
    stack((0..count / run.max(1)).map(own).collect())
}

/// The rows, or elements of a vector, of a part that follows others.
fn own_elements(of: WeightExpr, place: &Place, count: usize) -> WeightExpr {
    slice(of, 0, place.before, count, place.all(count))
}

/// Some of `all` elements along a dimension.
fn slice(of: WeightExpr, dimension: usize, start: usize, count: usize, all: usize) -> WeightExpr {
    if count == all {
        return of;
    }
    WeightExpr::Slice { of: Box::new(of), dimension, start, end: start + count }
}

fn transpose(of: WeightExpr) -> WeightExpr {
    WeightExpr::Transpose { of: Box::new(of) }
}

fn reshape(of: WeightExpr, shape: Vec<usize>) -> WeightExpr {
    WeightExpr::Reshape { of: Box::new(of), shape }
}

/// Matrices or vectors one after the other.
fn stack(parts: Vec<WeightExpr>) -> WeightExpr {
    WeightExpr::Concat { parts, dimension: 0 }
}
