//! The ways in which a call can run on the ranks of a mesh: the form of its operands and of its results.

use super::{
    costs::MeshCosts,
    iteration::{IterationSplit, Place, SplitDimension, iteration_splits},
    splits::{Along, Splits, is_partition},
};
use dsrun_core::{
    Result, Size, TensorType, WeightType,
    op::{Op, OperandType},
    program::{Call, Origin, Program, ValueId},
};

/// How the ranks hold a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Form {
    /// Every rank holds the whole value.
    Whole,
    /// Each rank holds a part of a dimension.
    Split {
        /// The dimension.
        dimension: usize,
        /// How often the split dimension repeats inside the tensor dimension: once, or once per expert or slot.
        repeats: usize,
        /// The candidate split of the dimension.
        candidate: usize,
    },
    /// Each rank holds some of the experts, or the slots that are routed to them.
    Experts,
    /// Each rank holds a partial sum.
    Partial,
}

/// A way to run a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    /// The form that each operand must have.
    pub(super) needs: Vec<Form>,
    /// The form of each result.
    pub(super) makes: Vec<Form>,
    /// Operands that the first rank alone has.
    pub(super) first_rank_only: Vec<usize>,
    /// The time of the slowest rank, in picoseconds.
    pub(super) time: u64,
}

impl Choice {
    /// Whether each rank runs the call for some of the experts.
    fn is_of_experts(&self) -> bool {
        self.needs.iter().chain(&self.makes).any(|form| *form == Form::Experts)
    }

    /// Whether a rank has an operand.
    pub(super) fn has_operand(&self, operand: usize, rank: usize) -> bool {
        rank == 0 || !self.first_rank_only.contains(&operand)
    }
}

/// The program, its splits and the costs, from which the choices of calls are derived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mesh<'a> {
    pub(super) program: &'a Program,
    pub(super) splits: &'a Splits,
    pub(super) costs: &'a MeshCosts,
}

/// The dimension of a place.
fn along(place: Place) -> Along {
    let Place { value, dimension, repeats, .. } = place;
    Along { value, dimension, repeats }
}

impl Mesh<'_> {
    /// All ways to run a call; the first runs it whole on every rank.
    ///
    /// # Errors
    /// If the call is not valid.
    pub(super) fn choices(&self, call: &Call) -> Result<Vec<Choice>> {
        let whole = |count: usize| vec![Form::Whole; count];
        let mut choices = Vec::new();
        self.add(&mut choices, call, whole(call.operands.len()), whole(call.results.len()), Vec::new())?;
        for (needs, makes) in self.sums(call).into_iter().chain(self.experts(call)) {
            self.add(&mut choices, call, needs, makes, Vec::new())?;
        }
        for split in iteration_splits(self.program, call)? {
            let first = split.places(call).next();
            let count = first.map_or(0, |place| self.splits.count(along(place)));
            for candidate in 0..count {
                if split.sums && !self.sums_each_once(&split, call, candidate) {
                    continue;
                }
                let form = |split: &Option<SplitDimension>| match split {
                    Some(SplitDimension { dimension, repeats, .. }) => {
                        Form::Split { dimension: *dimension, repeats: *repeats, candidate }
                    }
                    None => Form::Whole,
                };
                let needs = split.operands.iter().map(form).collect();
                let makes = match split.sums {
                    true => vec![Form::Partial; call.results.len()],
                    false => split.results.iter().map(form).collect(),
                };
                self.add(&mut choices, call, needs, makes, split.first_rank_only.clone())?;
            }
        }
        Ok(choices)
    }

    /// Whether every element of a dimension that is summed over is on one rank only.
    fn sums_each_once(&self, split: &IterationSplit, call: &Call, candidate: usize) -> bool {
        split.places(call).all(|place| {
            let size = self.sizes(place.value).get(place.dimension).copied().flatten();
            let parts = size.map(|size| self.splits.parts(along(place), candidate, size));
            parts.zip(size).is_some_and(|(parts, size)| is_partition(&parts, size / place.repeats))
        })
    }

    /// Adds a choice, if the call is valid on every rank.
    fn add(
        &self,
        choices: &mut Vec<Choice>,
        call: &Call,
        needs: Vec<Form>,
        makes: Vec<Form>,
        first_rank_only: Vec<usize>,
    ) -> Result<()> {
        let mut choice = Choice { needs, makes, first_rank_only, time: 0 };
        for rank in 0..self.splits.ranks() {
            let Some(local) = self.local_types(call, &choice, rank)? else { return Ok(()) };
            let time = self.costs.call(&local.op, &call.op, &local.operands, &local.results);
            choice.time = choice.time.max(time);
        }
        choices.push(choice);
        Ok(())
    }

    /// A call as a rank runs it; `None` if the rank cannot.
    fn local_types(&self, call: &Call, choice: &Choice, rank: usize) -> Result<Option<LocalCall>> {
        let mut operands = Vec::with_capacity(call.operands.len());
        for (index, (id, form)) in call.operands.iter().zip(&choice.needs).enumerate() {
            let id = id.filter(|_| choice.has_operand(index, rank));
            operands.push(id.map(|id| self.local_type(id, *form, rank)).transpose()?);
        }
        let op = self.local_op(call, choice, rank)?;
        let Ok(results) = op.infer(&operands) else { return Ok(None) };
        for ((id, form), found) in call.results.iter().zip(&choice.makes).zip(&results) {
            if self.local_type(*id, *form, rank)? != OperandType::Tensor(found.clone()) {
                return Ok(None);
            }
        }
        Ok(Some(LocalCall { op, operands, results }))
    }

    /// The type of a rank's part of a value. Quantised weights keep their format where a part consists of whole groups.
    ///
    /// # Errors
    /// If there is no such value.
    pub(super) fn local_type(&self, id: ValueId, form: Form, rank: usize) -> Result<OperandType> {
        let mut value_type = self.program.value(id)?.value_type.clone();
        if form == Form::Experts {
            self.keep_experts(id, rank, &mut value_type);
        }
        let Form::Split { dimension, repeats, candidate } = form else { return Ok(value_type) };
        let along = Along { value: id, dimension, repeats };
        let part = |size: usize| self.splits.part(along, candidate, rank, size);
        Ok(match value_type {
            OperandType::Tensor(mut tensor) => {
                if let Some(size) = tensor.shape.get_mut(dimension)
                    && let Some(known) = size.known()
                {
                    *size = (part(known).length * repeats).into();
                }
                OperandType::Tensor(tensor)
            }
            OperandType::Weight(mut weight) => {
                let last = dimension + 1 == weight.shape.len();
                let columns = weight.columns();
                if let Some(size) = weight.shape.get_mut(dimension) {
                    let part = part(*size);
                    *size = part.length * repeats;
                    if last && !weight.format.holds_columns(columns, part.range) {
                        weight.format = dsrun_core::WeightFormat::Dense(self.reader_dtype(id));
                    }
                }
                OperandType::Weight(weight)
            }
        })
    }

    /// The element type that a weight may be decoded to: that of the activations it is multiplied with.
    fn reader_dtype(&self, weight: ValueId) -> dsrun_core::DType {
        let reader = self.program.nodes.iter().find(|node| node.call.operands.contains(&Some(weight)));
        let tensors = reader.into_iter().flat_map(|node| {
            node.call.operands.iter().flatten().chain(&node.call.results).filter_map(|id| {
                self.program.values.get(id.index())?.tensor_type().map(|tensor| tensor.dtype)
            })
        });
        tensors.into_iter().find(|dtype| dtype.is_float()).unwrap_or(dsrun_core::DType::F32)
    }

    /// The op as a rank runs it: with its own number of heads, or its own rows of the vocabulary.
    ///
    /// # Errors
    /// If a value of the call does not exist.
    pub(super) fn local_op(&self, call: &Call, choice: &Choice, rank: usize) -> Result<Op> {
        let scaled = |count: u32, place: Option<ValueId>, form: Form, dimension: usize| -> u32 {
            let (Some(id), Form::Split { repeats: 1, candidate, .. }) = (place, form) else {
                return count;
            };
            let Some(size) = self.sizes(id).get(dimension).copied().flatten().filter(|size| *size > 0) else {
                return count;
            };
            let length = self.splits.part(Along::once(id, dimension), candidate, rank, size).length;
            u32::try_from(count as usize * length / size).unwrap_or(count)
        };
        let operand = |index: usize| call.operands.get(index).copied().flatten();
        let form = |index: usize| choice.needs.get(index).copied().unwrap_or(Form::Whole);
        Ok(match call.op.clone() {
            Op::Rope(mut op) => {
                op.heads = scaled(op.heads, operand(0), form(0), 1);
                op.into()
            }
            Op::HeadLinear(mut op) => {
                op.heads = scaled(op.heads, operand(0), form(0), 1);
                op.into()
            }
            Op::PagedAttention(mut op) => {
                op.query_heads = scaled(op.query_heads, operand(0), form(0), 1);
                op.kv_heads = scaled(op.kv_heads, operand(1), form(1), 1);
                op.into()
            }
            Op::Attention(mut op) => {
                op.query_heads = scaled(op.query_heads, operand(0), form(0), 1);
                op.kv_heads = scaled(op.kv_heads, operand(1), form(1), 1);
                op.into()
            }
            Op::Embed(mut op) => {
                if let (Some(table), Form::Split { dimension: 0, repeats: 1, candidate }) =
                    (operand(1), form(1))
                {
                    let rows = self.program.value(table)?.weight_type().map_or(0, WeightType::rows);
                    let first = self.splits.part(Along::once(table, 0), candidate, rank, rows).range.start;
                    op.first_row = op.first_row.saturating_add(u32::try_from(first).unwrap_or(u32::MAX));
                }
                op.into()
            }
            Op::MoeGroup(mut op) if choice.is_of_experts() => {
                (op.count, op.first_expert) = self.own_experts(op.count, op.first_expert, rank)?;
                op.into()
            }
            Op::GroupedLinear(mut op) if choice.is_of_experts() => {
                (op.count, op.first_expert) = self.own_experts(op.count, op.first_expert, rank)?;
                op.into()
            }
            Op::MoeCombine(mut op) if choice.is_of_experts() => {
                (op.count, op.first_expert) = self.own_experts(op.count, op.first_expert, rank)?;
                op.into()
            }
            other => other,
        })
    }

    /// The sizes of a value's dimensions, as far as they are known.
    pub(super) fn sizes(&self, id: ValueId) -> Vec<Option<usize>> {
        match self.program.values.get(id.index()).map(|value| &value.value_type) {
            Some(OperandType::Tensor(tensor)) => tensor.shape.iter().map(Size::known).collect(),
            Some(OperandType::Weight(weight)) => weight.shape.iter().copied().map(Some).collect(),
            None => Vec::new(),
        }
    }

    /// The bytes of a weight or state on the rank that holds the largest part.
    ///
    /// # Errors
    /// If a size has no value.
    pub(super) fn resident_bytes(
        &self,
        id: ValueId,
        form: Form,
        sizes: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<u64> {
        let mut most = 0;
        for rank in 0..self.splits.ranks() {
            let bytes = match self.local_type(id, form, rank)? {
                OperandType::Weight(weight) => weight.bytes()?,
                OperandType::Tensor(TensorType { dtype, shape }) => {
                    let shape = TensorType { dtype, shape }.resolve(sizes)?;
                    shape.iter().fold(dtype.bytes(), |bytes, size| bytes.saturating_mul(*size))
                }
            };
            most = most.max(bytes as u64);
        }
        Ok(most)
    }

    /// Whether a value is a weight.
    pub(super) fn is_weight(&self, id: ValueId) -> bool {
        matches!(self.program.values[id.index()].origin, Origin::Weight(_))
    }
}

/// A call as a rank runs it.
struct LocalCall {
    op: Op,
    operands: Vec<Option<OperandType>>,
    results: Vec<TensorType>,
}
