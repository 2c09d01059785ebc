//! Writes the program of one rank from a strategy.

use super::{
    choices::{Choice, Form, Mesh},
    search::{Conversion, Live, Search},
    splits::Along,
};
use dsrun_core::{
    DType, Error, Result, TensorType, WeightExpr,
    op::{AllGather, AllReduce, Columns, MeshAxis, Op, OperandType, ReduceScatter, Reduction},
    placement::Placement,
    program::{Node, Origin, Program, ProgramBuilder, ValueId},
};
use std::collections::HashMap;

/// Writes the program that a rank runs.
///
/// # Errors
/// If the result is not a valid program.
pub(super) fn rank_program(search: &Search<'_>, choices: &[Choice], rank: usize) -> Result<Program> {
    let source = search.mesh.program;
    let mut writer = Writer {
        search,
        mesh: search.mesh,
        rank,
        builder: ProgramBuilder::new(source.name.clone()),
        values: HashMap::new(),
        placed: Vec::new(),
    };
    for extent in &source.extents {
        writer.builder.bounded(extent);
    }
    for (id, value) in source.values_from(|origin| *origin == Origin::Input) {
        if let Some(tensor) = value.tensor_type() {
            let input = writer.builder.input(value.name.clone(), tensor.clone())?;
            writer.values.insert((id, Form::Whole), input);
        }
    }
    writer.declare_states(choices)?;
    let (mut live, mut segment) = (Live::default(), None);
    for (node, choice) in source.nodes.iter().zip(choices) {
        if segment != Some(node.segment) {
            let next = segment.map_or(0, |segment| segment + 1);
            for own in source.segments.get(next..=node.segment).unwrap_or_default() {
                writer.builder.segment(own.name.clone(), own.kind);
            }
            segment = Some(node.segment);
        }
        writer.add(node, choice, &mut live)?;
    }
    let mut outputs = Vec::with_capacity(source.outputs.len());
    for output in &source.outputs {
        let found = writer.values.iter().find(|((id, _), _)| id == output).map(|(_, value)| *value);
        let whole = writer.values.get(&(*output, Form::Whole)).copied();
        outputs.push(whole.or(found).ok_or_else(|| Error::internal(format!("output {output} is lost")))?);
    }
    let placed = writer.placed;
    let mut program = writer.builder.finish(&outputs)?;
    for (id, placement) in placed {
        if let Some(value) = program.values.get_mut(id.index()) {
            value.placements.set(MeshAxis::Tensor, placement);
        }
    }
    program.validate()?;
    Ok(program)
}

/// The program of a rank while it is written.
struct Writer<'a> {
    search: &'a Search<'a>,
    mesh: Mesh<'a>,
    rank: usize,
    builder: ProgramBuilder,
    /// The values of the rank's program, by the value of the whole program and the form.
    values: HashMap<(ValueId, Form), ValueId>,
    placed: Vec<(ValueId, Placement)>,
}

impl Writer<'_> {
    /// Declares every state in the form that its first reader needs.
    fn declare_states(&mut self, choices: &[Choice]) -> Result<()> {
        let source = self.mesh.program;
        for (id, value) in source.values_from(|origin| *origin == Origin::State) {
            let mut uses = source.nodes.iter().zip(choices).filter_map(|(node, choice)| {
                let place = node.call.operands.iter().position(|operand| *operand == Some(id))?;
                choice.needs.get(place).copied()
            });
            let form = uses.next().unwrap_or(Form::Whole);
            if let OperandType::Tensor(tensor) = self.mesh.local_type(id, form, self.rank)? {
                let state = self.builder.state(value.name.clone(), tensor)?;
                self.insert(id, form, state);
            }
        }
        Ok(())
    }

    fn insert(&mut self, id: ValueId, form: Form, own: ValueId) {
        self.values.insert((id, form), own);
        match form {
            Form::Whole | Form::Experts => {}
            Form::Split { dimension, .. } => self.placed.push((own, Placement::Sharded(dimension))),
            Form::Partial => self.placed.push((own, Placement::Partial)),
        }
    }

    /// Adds a call, preceded by the conversions of its operands.
    fn add(&mut self, node: &Node, choice: &Choice, live: &mut Live) -> Result<()> {
        let call = &node.call;
        let mut operands = Vec::with_capacity(call.operands.len());
        for (index, (id, need)) in call.operands.iter().zip(&choice.needs).enumerate() {
            let Some(id) = id else {
                operands.push(None);
                continue;
            };
            let value = match &self.mesh.program.value(*id)?.origin {
                Origin::Node(_) => {
                    let form = live.form(*id);
                    let conversion = self.search.converted(*id, *need, live)?;
                    Some(self.convert(*id, form, *need, conversion)?)
                }
                Origin::Weight(_) if !choice.has_operand(index, self.rank) => None,
                Origin::Weight(expr) => Some(self.weight(*id, *need, expr)?),
                Origin::Input | Origin::State => Some(self.value(*id, *need)?),
            };
            operands.push(value.filter(|_| choice.has_operand(index, self.rank)));
        }
        let op = self.mesh.local_op(call, choice, self.rank)?;
        let results = self.builder.calls(op, operands)?;
        for ((id, form), own) in call.results.iter().zip(&choice.makes).zip(results) {
            self.insert(*id, *form, own);
            live.set(*id, *form);
            if self.search.stays_whole(*id) {
                let conversion = self.search.converted(*id, Form::Whole, live)?;
                self.convert(*id, *form, Form::Whole, conversion)?;
            }
        }
        Ok(())
    }

    fn value(&self, id: ValueId, form: Form) -> Result<ValueId> {
        let value = self.values.get(&(id, form)).copied();
        value.ok_or_else(|| Error::internal(format!("{id} has no form {form:?}")))
    }

    /// Converts a result to another form.
    fn convert(&mut self, id: ValueId, from: Form, to: Form, conversion: Conversion) -> Result<ValueId> {
        let own = self.value(id, from)?;
        let ranks = self.mesh.splits.ranks();
        let count = |number: usize| {
            u32::try_from(number)
                .map_err(|_| Error::invalid(format!("{number} is out of range")).at("columns"))
        };
        let (axis, reduction) = (MeshAxis::Tensor, Reduction::Sum);
        let width = self.mesh.sizes(id).get(1).copied().flatten().unwrap_or(0);
        let op: Op = match conversion {
            Conversion::None => return Ok(own),
            Conversion::AllReduce => AllReduce { axis, reduction }.into(),
            Conversion::ReduceScatter => {
                ReduceScatter { axis, ranks: count(ranks)?, rows: false, reduction }.into()
            }
            Conversion::AllGather => AllGather { axis, ranks: count(ranks)?, rows: false }.into(),
            Conversion::Slice => {
                if let Some(known) = self.values.get(&(id, to)) {
                    return Ok(*known);
                }
                let Form::Split { candidate, .. } = to else {
                    return Err(Error::internal("a slice has no split"));
                };
                let range = self.mesh.splits.part(Along::once(id, 1), candidate, self.rank, width).range;
                Columns { start: count(range.start)?, count: count(range.len())? }.into()
            }
        };
        let mut converted = self.builder.call(op, [Some(own)])?;
        let found =
            self.builder.value(converted)?.tensor_type().and_then(|tensor| tensor.shape.get(1)?.known());
        if conversion == Conversion::AllGather && found != Some(width) {
            converted = self.builder.call(Columns { start: 0, count: count(width)? }, [Some(converted)])?;
        }
        if conversion == Conversion::AllReduce {
            // The collective overwrites the partial sums.
            self.values.remove(&(id, from));
        }
        self.insert(id, to, converted);
        Ok(converted)
    }

    /// The rank's part of a weight.
    fn weight(&mut self, id: ValueId, form: Form, expr: &WeightExpr) -> Result<ValueId> {
        if let Some(known) = self.values.get(&(id, form)) {
            return Ok(*known);
        }
        let value = self.mesh.program.value(id)?;
        let copies = self.values.keys().filter(|(own, _)| *own == id).count();
        // A weight that is held in two forms needs two names.
        let name = if copies == 0 { value.name.clone() } else { format!("{}.form{copies}", value.name) };
        let local = self.mesh.local_type(id, form, self.rank)?;
        let mut own = expr.clone();
        let lost = || Error::internal("a weight has no such dimension").at(&value.name);
        if form == Form::Experts {
            let size = self.mesh.sizes(id).first().copied().flatten().ok_or_else(lost)?;
            let (count, experts) = self.mesh.experts_of_value(id, self.rank).ok_or_else(lost)?;
            let rows = size / count;
            let (start, end) = (experts.start * rows, experts.end * rows);
            own = WeightExpr::Slice { of: Box::new(own), dimension: 0, start, end };
        }
        if let Form::Split { dimension, repeats, candidate } = form {
            let size = self.mesh.sizes(id).get(dimension).copied().flatten().ok_or_else(lost)?;
            let along = Along { value: id, dimension, repeats };
            let part = self.mesh.splits.part(along, candidate, self.rank, size);
            let (start, end) = (part.range.start, part.range.end);
            let each = size / repeats.max(1);
            if (start, end) != (0, each) {
                let slice = |repeat: usize| {
                    let (start, end) = (repeat * each + start, repeat * each + end);
                    WeightExpr::Slice { of: Box::new(own.clone()), dimension, start, end }
                };
                own = match repeats {
                    1 => slice(0),
                    _ => WeightExpr::Concat { parts: (0..repeats).map(slice).collect(), dimension },
                };
            }
            let padding = part.length - part.range.len();
            if padding > 0 {
                own = match &local {
                    OperandType::Weight(_) => {
                        WeightExpr::Pad { of: Box::new(own), before: 0, after: padding }
                    }
                    OperandType::Tensor(TensorType { .. }) => WeightExpr::Concat {
                        parts: vec![
                            WeightExpr::Cast { of: Box::new(own), dtype: DType::F32 },
                            WeightExpr::Constant(vec![0.0; padding]),
                        ],
                        dimension: 0,
                    },
                };
            }
        }
        let declared = match local {
            OperandType::Weight(weight) => self.builder.weight(name, own, weight)?,
            OperandType::Tensor(tensor) => self.builder.vector(name, own, tensor)?,
        };
        self.insert(id, form, declared);
        Ok(declared)
    }
}
