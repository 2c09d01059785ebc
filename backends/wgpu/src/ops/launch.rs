//! A dispatch as planned from the description of a call, before buffers are bound.

use super::weight::Layout;
use crate::driver::shader::{Element, ParamType, Shader, Tensor, WeightElement};
use dsrun_core::{Error, Result, TensorDesc, kernels::CallDesc};

/// The plan of a call.
#[derive(Debug, Default)]
pub(crate) struct CallPlan {
    pub(crate) launches: Vec<Launch>,
    /// Bytes of scratch memory that the dispatches share.
    pub(crate) workspace: usize,
}

impl From<Launch> for CallPlan {
    fn from(launch: Launch) -> Self {
        vec![launch].into()
    }
}

impl From<Vec<Launch>> for CallPlan {
    fn from(launches: Vec<Launch>) -> Self {
        Self { launches, workspace: 0 }
    }
}

/// The end of the name of a parameter of a weight, the exponent for its integers. It is never a constant: see `weight.wgsl`.
const EXPONENT: &str = "_exponent";

/// Sums and maxima over a workgroup.
const REDUCE: &str = include_str!("../../kernels/reduce.wgsl");

/// Threads of a workgroup in shaders with one thread per element.
pub(crate) const THREADS: usize = 64;

/// The tensor of a call that a shader binding refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// An operand.
    Operand(usize),
    /// A part of an operand that is a weight.
    Weight {
        /// The index of the operand.
        operand: usize,
        /// The index of the part.
        part: usize,
    },
    /// A result.
    Result(usize),
    /// Scratch memory of the call.
    Workspace {
        /// The first byte.
        offset: usize,
        /// The operand with whose number of rows it is filled.
        rows_of: usize,
    },
}

/// A matrix in the scratch memory of a call.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    /// Its shape and type.
    pub(crate) desc: TensorDesc,
    /// The first byte.
    pub(crate) offset: usize,
    /// The operand with whose number of rows it is filled.
    pub(crate) rows_of: usize,
}

/// A parameter of a shader whose value is known when the call is planned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// An unsigned integer.
    U32(u32),
    /// A float.
    F32(f32),
}

impl Value {
    fn word(self) -> u32 {
        match self {
            Self::U32(value) => value,
            Self::F32(value) => value.to_bits(),
        }
    }

    fn kind(self) -> ParamType {
        match self {
            Self::U32(_) => ParamType::U32,
            Self::F32(_) => ParamType::F32,
        }
    }
}

/// A tensor to bind, in the order of the bindings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) source: Source,
    /// Bytes from its first element to the end of its last.
    pub(crate) bytes: usize,
    /// The word of the uniform with the index of its row count in the extents, if the tensor is bounded.
    pub(crate) extent: Option<usize>,
}

/// A dispatch as planned from the description of a call.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) shader: Shader,
    pub(crate) slots: Vec<Slot>,
    /// The words of the uniform.
    pub(crate) words: Vec<u32>,
    /// The values of the `override` constants.
    pub(crate) overrides: Vec<u32>,
    /// The number of workgroups.
    pub(crate) groups: u64,
}

impl Launch {
    /// A dispatch of entry point `entry` of a WGSL file.
    pub(crate) fn new(part: &'static str, entry: &'static str) -> Self {
        let shader = Shader {
            parts: vec![part],
            entry,
            tensors: Vec::new(),
            params: Vec::new(),
            fixed: Vec::new(),
            overrides: Vec::new(),
            constants: Vec::new(),
            flags: Vec::new(),
        };
        Self { shader, slots: Vec::new(), words: Vec::new(), overrides: Vec::new(), groups: 0 }
    }

    /// A dispatch with a thread for each element of result 0, the matrix `y` of `columns` columns.
    ///
    /// # Errors
    /// If the result is not a matrix, or its size exceeds 32 bits.
    pub(crate) fn of_elements(part: &'static str, entry: &'static str, call: &CallDesc) -> Result<Self> {
        let shape = call.results.first().map(|result| result.shape.as_slice());
        let Some(&[rows, columns]) = shape else { return Err(Error::internal("the result is not a matrix")) };
        let elements = rows.checked_mul(columns).ok_or_else(|| Error::unsupported("too many elements"))?;
        Self::new(part, entry).elements(elements).result("y", call, 0)?.size("columns", columns)
    }

    /// Adds an operand; one that is absent reads as zeros.
    ///
    /// # Errors
    /// If its size exceeds 32 bits.
    pub(crate) fn operand(self, name: &'static str, call: &CallDesc, index: usize) -> Result<Self> {
        self.tensor(name, call.tensor(index), Source::Operand(index), false)
    }

    /// Adds an operand that is read four elements at a time; its rows begin at multiples of four elements.
    ///
    /// # Errors
    /// If its size exceeds 32 bits.
    pub(crate) fn vectors(self, name: &'static str, call: &CallDesc, index: usize) -> Result<Self> {
        self.tensor(name, call.tensor(index), Source::Operand(index), true)
    }

    /// Reads the tensor that was added last as words; one that is read four elements at a time, as vectors of four words.
    pub(crate) fn words(mut self) -> Self {
        if let Some(tensor) = self.shader.tensors.last_mut() {
            tensor.element = Element::U32;
        }
        self
    }

    /// Adds a part of an operand that is a weight; one that is absent reads as zeros.
    ///
    /// # Errors
    /// If its size exceeds 32 bits.
    pub(crate) fn weight_part(
        mut self,
        name: &'static str,
        operand: usize,
        part: usize,
        layout: Option<&Layout>,
    ) -> Result<Self> {
        if let Some(layout) = layout {
            let source = Source::Weight { operand, part };
            self.slots.push(Slot { source, bytes: layout.bytes, extent: None });
        }
        let element = Element::Weight(layout.map_or(WeightElement::F32, |layout| layout.element));
        let (present, vectors, bounded) = (layout.is_some(), false, false);
        // A weight has a separate buffer, which no dispatch writes.
        self.shader.tensors.push(Tensor { name, element, vectors, read_only: true, present, bounded });
        let sizes = layout.map_or([0; 7], |layout| {
            let Layout { first, rows, row_words, scales, groups, group, half_scales, .. } = *layout;
            [first, rows, row_words, scales, groups, group, half_scales]
        });
        let fields = ["first", "rows", "row_words", "scales", "groups", "group", "half_scales"];
        for (field, size) in fields.into_iter().zip(sizes) {
            self = self.size(format!("{name}_{field}"), size)?;
        }
        if layout.is_some_and(|layout| layout.element.is_quantised()) {
            self = self.param(format!("{name}{EXPONENT}"), Value::U32(2_f32.powi(23).to_bits()));
        }
        Ok(self)
    }

    /// Binds the tensor that was added last for writing, although nothing writes it. Drivers move loads of read-only buffers behind
    /// the products of other loads, and to just before their values are used, where all of their latency is waited for, one after the
    /// other. Loads of writable buffers are moved less, and stay on their side of a barrier.
    pub(crate) fn writable(mut self) -> Self {
        if let Some(tensor) = self.shader.tensors.last_mut() {
            tensor.read_only = false;
        }
        self
    }

    /// Adds a matrix in scratch memory; `vectors` reads four elements at a time.
    ///
    /// # Errors
    /// If its size exceeds 32 bits.
    pub(crate) fn scratch(self, name: &'static str, scratch: &Scratch, vectors: bool) -> Result<Self> {
        let source = Source::Workspace { offset: scratch.offset, rows_of: scratch.rows_of };
        self.tensor(name, Some(&scratch.desc), source, vectors)
    }

    /// Adds a result.
    ///
    /// # Errors
    /// If there is no such result, or its size exceeds 32 bits.
    pub(crate) fn result(self, name: &'static str, call: &CallDesc, index: usize) -> Result<Self> {
        let desc =
            call.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))?;
        self.tensor(name, Some(desc), Source::Result(index), false)
    }

    fn tensor(
        mut self,
        name: &'static str,
        desc: Option<&TensorDesc>,
        source: Source,
        vectors: bool,
    ) -> Result<Self> {
        let element = desc.map_or(Element::F32, |desc| Element::of(desc.dtype));
        let bounded = desc.is_some_and(|desc| desc.bounded);
        let (present, read_only) = (desc.is_some(), false);
        self.shader.tensors.push(Tensor { name, element, vectors, read_only, present, bounded });
        let sizes = |desc: &TensorDesc| {
            let rows = desc.shape.first().copied().unwrap_or(1);
            [rows, desc.strides.first().copied().unwrap_or(1)]
        };
        let [rows, stride] = desc.map_or([0; 2], sizes);
        self = self.size(format!("{name}_rows"), rows)?.size(format!("{name}_stride"), stride)?;
        if bounded {
            self = self.param(format!("{name}_extent"), Value::U32(u32::MAX));
        }
        if let Some(desc) = desc {
            let extent = bounded.then(|| self.words.len() - 1);
            self.slots.push(Slot { source, bytes: desc.bytes()?, extent });
        }
        Ok(self)
    }

    /// Adds a parameter.
    pub(crate) fn param(mut self, name: impl Into<String>, value: Value) -> Self {
        self.shader.params.push((name.into(), value.kind()));
        self.words.push(value.word());
        self
    }

    /// Adds a size as a parameter.
    ///
    /// # Errors
    /// If it exceeds 32 bits.
    pub(crate) fn size(self, name: impl Into<String>, size: usize) -> Result<Self> {
        let value = u32::try_from(size).map_err(|_| {
            Error::unsupported(format!("a size of {size} exceeds the 32-bit integers of shaders"))
        })?;
        Ok(self.param(name, Value::U32(value)))
    }

    /// Sets the number of workgroups so that there is one thread per element, with [`THREADS`] threads per workgroup.
    pub(crate) fn elements(self, elements: usize) -> Self {
        self.groups(elements.div_ceil(THREADS))
    }

    /// Sets the number of workgroups.
    pub(crate) fn groups(mut self, groups: usize) -> Self {
        self.groups = groups as u64;
        self
    }

    /// Compiles the parameters that are known by now into the shader, which then computes with them what it would compute at run
    /// time, and does not wait for them. For shaders that run for so short a time that this counts, and have few distinct shapes.
    pub(crate) fn fixed(mut self) -> Self {
        let is_finite =
            |kind: ParamType, word: u32| kind == ParamType::U32 || f32::from_bits(word).is_finite();
        let bound: Vec<usize> = self.slots.iter().filter_map(|slot| slot.extent).collect();
        let all = std::mem::take(&mut self.shader.params).into_iter().zip(std::mem::take(&mut self.words));
        let all: Vec<((String, ParamType), u32)> = all.collect();
        if !all.iter().all(|((_, kind), word)| is_finite(*kind, *word)) {
            (self.shader.params, self.words) = all.into_iter().unzip();
            return self;
        }
        for (index, ((name, kind), word)) in all.into_iter().enumerate() {
            if !bound.contains(&index) && !name.ends_with(EXPONENT) {
                self.shader.fixed.push((name, kind, word));
                continue;
            }
            let place = Some(self.words.len());
            self.slots
                .iter_mut()
                .filter(|slot| slot.extent == Some(index))
                .for_each(|slot| slot.extent = place);
            self.shader.params.push((name, kind));
            self.words.push(word);
        }
        if self.words.is_empty() {
            // A struct has at least one field.
            self = self.param("unused", Value::U32(0));
        }
        self
    }

    /// Adds the sums over the threads of a workgroup, and with `maxima` the maxima.
    pub(crate) fn reducing(mut self, maxima: bool) -> Self {
        self.shader.parts.push(REDUCE);
        self.flag("MAXIMA", maxima)
    }

    /// Sets a flag of the source.
    pub(crate) fn flag(mut self, flag: &'static str, set: bool) -> Self {
        self.shader.flags.extend(set.then_some(flag));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_number_is_a_literal() {
        for number in [0.0, -0.0, 1e-5, f32::MAX, -f32::MAX, f32::MIN_POSITIVE, 1e-45, 1.0 / 3.0] {
            let launch = Launch::new("@compute @workgroup_size(1)\nfn entry() {}\n", "entry");
            let launch = launch.param("number", Value::F32(number)).fixed();
            assert_eq!(launch.shader.fixed.len(), 1);
            crate::ops::sources::check_sources(&launch.into());
        }
    }

    #[test]
    fn numbers_that_no_literal_has_stay_in_the_uniform() {
        let launch = || Launch::new("", "entry").param("count", Value::U32(7));
        let fixed = launch().param("scale", Value::F32(-0.0)).fixed();
        assert_eq!(fixed.shader.fixed.len(), 2);
        assert!(fixed.shader.source().contains("const P = Fixed(7u, -0e0f);"));
        // The uniform is not empty.
        assert_eq!(fixed.words, [0]);
        let open = launch().param("limit", Value::F32(f32::INFINITY)).fixed();
        assert!(open.shader.fixed.is_empty());
        assert_eq!(open.words, [7, f32::INFINITY.to_bits()]);
    }
}
