//! Computes for the wanted rows alone what nothing else needs.
//!
//! A model runs all tokens through all layers, and picks the rows whose logits are wanted behind the last one. But behind the
//! keys and values of that layer a token hangs on its own row only: its attention, output projection and MLP are wanted of the
//! rows that are picked, which of a prompt is one. So the pass moves the picking forward, over every call that makes each row of
//! its results of the same row of its operands, and picks what is left: mostly the query and the residual of the last layer.
//! There attention is told by [`WANTED`] which rows are a sequence's. These are its last tokens, so it sees the keys it saw.
//!
//! A later segment may read results of all tokens, for hidden states. It then computes them itself.
//!
//! The pass comes last, behind quantisation and fusion: the program it is given serves steps of which every token is wanted, and
//! both have the same weights.

use super::rewrite::{result, results, with_nodes};
use dsrun_core::{
    Error, Result, Size,
    op::{AttentionMask, Axis, DimensionKind, GatherRows, Op, OperandType},
    program::{Call, Node, Origin, Program, Value, ValueId},
};
use dsrun_models::step::WANTED;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Moves the picking of rows forward as far as it goes. Values keep their numbers; new ones come behind them.
///
/// # Errors
/// If the result is no valid program.
pub fn narrow(program: &Program) -> Result<Program> {
    // Picking has to be a call of its own.
    let program = program.lower_regions(&mut |node| match &node.call.op {
        Op::Region(region) => Ok(!region.calls().iter().any(|call| picks(&call.op))),
        _ => Ok(true),
    })?;
    let Some(picking) = Picking::of(&program) else { return Ok(program) };
    let narrowed = picking.narrowed()?;
    if narrowed.is_empty() { Ok(program) } else { picking.moved(&narrowed) }
}

fn picks(op: &Op) -> bool {
    matches!(op, Op::GatherRows(_))
}

/// Where a program picks the wanted rows.
struct Picking<'a> {
    program: &'a Program,
    /// The call that picks them.
    node: usize,
    /// What it picks from, and what it makes.
    all: ValueId,
    picked: ValueId,
    /// Which rows it picks.
    rows: ValueId,
    /// The inputs that say which of them are a sequence's.
    wanted: [ValueId; 2],
    /// How many rows it picks from.
    tokens: Size,
    /// The first segment behind it that reads them all.
    later: usize,
}

impl<'a> Picking<'a> {
    /// That of a program of which a later segment reads all rows; else nothing is moved.
    fn of(program: &'a Program) -> Option<Self> {
        let node = program.nodes.iter().position(|node| picks(&node.call.op))?;
        let Node { call, segment, .. } = &program.nodes[node];
        let ([Some(all), Some(rows)], [picked]) = (&call.operands[..], &call.results[..]) else {
            return None;
        };
        let tokens = program.values[all.index()].tensor_type()?.shape.first()?.clone();
        let input = |name: &str| {
            let mut inputs = program.values_from(|origin| *origin == Origin::Input);
            inputs.find(|(_, value)| value.name == name).map(|(id, _)| id)
        };
        let wanted = [input(WANTED[0])?, input(WANTED[1])?];
        let reads = |node: &&Node| node.segment > *segment && node.call.operands.contains(&Some(*all));
        let later = program.nodes.iter().find(reads)?.segment;
        Some(Self { program, node, all: *all, picked: *picked, rows: *rows, wanted, tokens, later })
    }

    fn value(&self, id: ValueId) -> &Value {
        &self.program.values[id.index()]
    }

    /// Whether a value of the program as it was has a row for each token.
    fn is_of_tokens(&self, id: ValueId) -> bool {
        let tensor = self.program.values.get(id.index()).and_then(Value::tensor_type);
        tensor.and_then(|tensor| tensor.shape.first()) == Some(&self.tokens)
    }

    /// The calls that are to run on the wanted rows.
    fn narrowed(&self) -> Result<BTreeSet<usize>> {
        let mut refused = BTreeSet::new();
        loop {
            let narrowed = self.narrowed_but(&refused)?;
            let before = refused.len();
            refused.extend(narrowed.iter().filter(|node| !self.can_be_given(**node, &narrowed)));
            if refused.len() == before {
                return Ok(narrowed);
            }
        }
    }

    /// The calls in front of the picking, besides those refused, that go row by row, and whose results are read by nothing of the
    /// segment but each other and the picking.
    fn narrowed_but(&self, refused: &BTreeSet<usize>) -> Result<BTreeSet<usize>> {
        let nodes = &self.program.nodes;
        let mut narrowed = BTreeSet::from([self.node]);
        let mut read: HashSet<ValueId> = HashSet::from([self.all]);
        for (index, Node { call, segment, .. }) in nodes.iter().enumerate().take(self.node).rev() {
            let reads = |node: &Node| call.results.iter().any(|id| node.call.operands.contains(&Some(*id)));
            let elsewhere = |(reader, node): (usize, &Node)| {
                reads(node) && node.segment < self.later && !narrowed.contains(&reader)
            };
            if *segment == nodes[self.node].segment
                && !refused.contains(&index)
                && call.results.iter().any(|id| read.contains(id))
                && !call.results.iter().any(|id| self.program.outputs.contains(id))
                && !nodes.iter().enumerate().any(elsewhere)
                && row_by_row(&call.op, &self.program.operand_types(&call.operands)?, &self.tokens)?
            {
                narrowed.insert(index);
                read.extend(call.operands.iter().flatten());
            }
        }
        narrowed.remove(&self.node);
        Ok(narrowed)
    }

    /// Whether what a call reads of tokens is narrowed too, or can be picked from.
    fn can_be_given(&self, node: usize, narrowed: &BTreeSet<usize>) -> bool {
        let can = |id: &ValueId| {
            let Value { value_type, origin, .. } = self.value(*id);
            let picked = match value_type {
                OperandType::Tensor(tensor) => tensor.dtype.is_float() && tensor.shape.len() == 2,
                OperandType::Weight(_) => false,
            };
            picked || matches!(origin, Origin::Node(maker) if narrowed.contains(maker))
        };
        let operands = self.program.nodes[node].call.operands.iter().flatten();
        operands.filter(|id| self.is_of_tokens(**id)).all(can)
    }

    /// The program with these calls on the wanted rows, and on all tokens where a later segment needs them.
    fn moved(&self, narrowed: &BTreeSet<usize>) -> Result<Program> {
        let mut made = Made { program: self.program.clone(), nodes: Vec::new(), instead: HashMap::new() };
        let mut of_all = Vec::with_capacity(narrowed.len());
        for (index, node) in self.program.nodes.iter().enumerate() {
            if node.segment >= self.later {
                made.nodes.append(&mut of_all);
            }
            if narrowed.contains(&index) {
                of_all.push(Node { segment: self.later, ..node.clone() });
                self.narrow(node, &mut made)?;
            } else if index != self.node {
                made.nodes.push(node.clone());
            }
        }
        with_nodes(&made.program, made.nodes)
    }

    /// Adds a call on the wanted rows, and in front of it what picks them.
    fn narrow(&self, node: &Node, made: &mut Made) -> Result<()> {
        let mut call = node.call.clone();
        if let Op::PagedAttention(_) = call.op {
            self.attend(&mut call, node, made)?;
        }
        for id in call.operands.iter_mut().flatten().filter(|id| self.is_of_tokens(**id)) {
            *id = made.instead_of(*id, node, GatherRows {}, [*id, self.rows])?;
        }
        let types = made.program.operand_types(&call.operands)?;
        for (id, tensor) in call.results.iter_mut().zip(call.op.infer(&types)?) {
            let known = if *id == self.all { self.picked } else { result(&mut made.program, tensor) };
            made.instead.insert(*id, known);
            *id = known;
        }
        made.nodes.push(Node { call, ..node.clone() });
        Ok(())
    }

    /// Tells attention which rows are a sequence's, and gives it a work list for these.
    fn attend(&self, call: &mut Call, node: &Node, made: &mut Made) -> Result<()> {
        let [_, _, _, Some(start), Some(length), Some(total), _, Some(work), ..] = &mut call.operands[..]
        else {
            return Err(Error::internal("attention over pages without a work list"));
        };
        let Origin::Node(maker) = self.value(*work).origin else {
            return Err(Error::internal("a work list that no call makes"));
        };
        let prepare = self.program.nodes[maker].call.op.clone();
        [*start, *length] = self.wanted;
        *work = made.instead_of(*work, node, prepare, [*start, *length, *total])?;
        Ok(())
    }
}

/// The new program, as far as it is made.
struct Made {
    /// All values, and the calls of before.
    program: Program,
    nodes: Vec<Node>,
    /// What stands for a value among the wanted rows.
    instead: HashMap<ValueId, ValueId>,
}

impl Made {
    /// What stands for a value. If nothing does yet, this call makes it, in the segment and on the lane of another.
    fn instead_of<const N: usize>(
        &mut self,
        id: ValueId,
        like: &Node,
        op: impl Into<Op>,
        operands: [ValueId; N],
    ) -> Result<ValueId> {
        if let Some(known) = self.instead.get(&id) {
            return Ok(*known);
        }
        let (op, operands) = (op.into(), operands.map(Some).to_vec());
        let made = results(&mut self.program, &op, &operands)?;
        let [known] = made[..] else { return Err(Error::internal("a call without one result")) };
        self.nodes.push(Node { call: Call::new(op, operands, made), ..like.clone() });
        self.instead.insert(id, known);
        Ok(known)
    }
}

/// Whether a call makes each row of its results of the same row of those operands that have `rows` rows, and of no other of
/// these. Of attention that holds once it is told which rows are a sequence's.
fn row_by_row(op: &Op, operands: &[Option<OperandType>], rows: &Size) -> Result<bool> {
    if let Op::Region(region) = op {
        let types = region.value_types(operands)?;
        for call in region.calls() {
            let operands: Vec<_> =
                call.operands.iter().map(|id| id.and_then(|id| types[id.index()].clone())).collect();
            if matches!(call.op, Op::PagedAttention(_)) || !row_by_row(&call.op, &operands, rows)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    let knows_sequences = match op {
        // Whose bits count from the first token that the sequence brings.
        Op::PagedAttention(attention) => attention.mask != AttentionMask::Explicit,
        _ => false,
    };
    let maps = op.index_maps(operands)?;
    let Some(first @ Axis::Of([row])) = maps.results.first().and_then(|axes| axes.first()) else {
        return Ok(false);
    };
    let goes_along = |axis: &Axis| match axis {
        Axis::Of(dimensions) => dimensions.contains(row),
        Axis::From { dimension, .. } => dimension == row,
        Axis::Gathered => false,
    };
    let by_row = |axes: &[Axis]| {
        axes.split_first().is_some_and(|(own, rest)| own == first && !rest.iter().any(goes_along))
    };
    let fits = |(operand, axes): (&Option<OperandType>, &Vec<Axis>)| {
        let size = match operand {
            Some(OperandType::Tensor(tensor)) => tensor.shape.first(),
            _ => None,
        };
        match size {
            Some(size) if size == rows => by_row(axes),
            Some(Size::Bounded(_)) => knows_sequences,
            _ => !axes.iter().any(goes_along),
        }
    };
    Ok(maps.dimensions.get(*row).is_some_and(|dimension| dimension.kind == DimensionKind::Parallel)
        && (0..maps.results.len())
            .all(|result| op.updates(result).is_none() && by_row(&maps.results[result]))
        && operands.iter().zip(&maps.operands).all(fits))
}
