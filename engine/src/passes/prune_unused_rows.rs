//! Computes the end of the last layer for the output rows only.
//!
//! The output rows of a step are the token rows whose logits are needed, such as the last token of a prompt. A model runs every
//! token through every layer and gathers the output rows before the LM head. Once the keys and values of the last layer are
//! written to the KV cache, no row depends on another one, so attention, the output projection and the MLP of that layer are
//! needed for the output rows only. The pass moves the gather before all calls that compute each row of their results from the
//! same row of their operands. It then gathers the operands of these calls, usually the query and the residual of the last
//! layer. The inputs [`WANTED`] give attention the output rows of each sequence. These are the last tokens of the sequence, so
//! they attend to the same keys as before.
//!
//! A later segment may read results of all tokens (hidden states for embeddings). The full computation then moves to that segment.
//!
//! The pass runs last, after quantisation and fusion. The unpruned program is used for steps in which every row is an output
//! row; both programs share their weights.

use super::rewrite::{add_result, add_results, with_nodes};
use dsrun_core::{
    Error, Result, Size,
    op::{AttentionMask, Axis, DimensionKind, GatherRows, Op, OperandType},
    program::{Call, Node, Origin, Program, Value, ValueId},
};
use dsrun_models::step::WANTED;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Moves the gather of the output rows as early in a program as possible.
///
/// # Errors
/// If the result is not a valid program.
pub fn prune_unused_rows(program: &Program) -> Result<Program> {
    // Regions that contain a gather are lowered, so that the gather is a separate call.
    let program = program.lower_regions(&mut |node| match &node.call.op {
        Op::Region(region) => Ok(!region.calls().iter().any(|call| is_gather(&call.op))),
        _ => Ok(true),
    })?;
    let Some(gather) = Gather::find(&program) else { return Ok(program) };
    let pruned = gather.prunable_calls()?;
    if pruned.is_empty() { Ok(program) } else { gather.moved_before(&pruned) }
}

fn is_gather(op: &Op) -> bool {
    matches!(op, Op::GatherRows(_))
}

/// The call of a program that gathers the output rows.
struct Gather<'a> {
    program: &'a Program,
    /// The index of the call.
    node: usize,
    /// The operand: a row for every token.
    all: ValueId,
    /// The result: the output rows.
    gathered: ValueId,
    /// The input with the indices of the output rows.
    rows: ValueId,
    /// The inputs with the range of output rows of each sequence.
    wanted: [ValueId; 2],
    /// The size of a dimension with a row for each token.
    tokens: Size,
    /// The first later segment that reads the rows of all tokens.
    later: usize,
}

impl<'a> Gather<'a> {
    /// Finds the gather, if a later segment also reads the rows of all tokens; other programs are left unchanged.
    fn find(program: &'a Program) -> Option<Self> {
        let node = program.nodes.iter().position(|node| is_gather(&node.call.op))?;
        let Node { call, segment, .. } = &program.nodes[node];
        let ([Some(all), Some(rows)], [gathered]) = (&call.operands[..], &call.results[..]) else {
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
        Some(Self { program, node, all: *all, gathered: *gathered, rows: *rows, wanted, tokens, later })
    }

    fn value(&self, id: ValueId) -> &Value {
        &self.program.values[id.index()]
    }

    /// Whether a value of the original program has a row for each token.
    fn is_of_tokens(&self, id: ValueId) -> bool {
        let tensor = self.program.values.get(id.index()).and_then(Value::tensor_type);
        tensor.and_then(|tensor| tensor.shape.first()) == Some(&self.tokens)
    }

    /// The calls that can run on the output rows only.
    fn prunable_calls(&self) -> Result<BTreeSet<usize>> {
        let mut refused = BTreeSet::new();
        loop {
            let pruned = self.row_by_row_calls(&refused)?;
            let before = refused.len();
            refused.extend(pruned.iter().filter(|node| !self.can_gather_operands(**node, &pruned)));
            if refused.len() == before {
                return Ok(pruned);
            }
        }
    }

    /// The calls before the gather that work row by row and whose results are read, within the segment, only by each other
    /// and the gather. Calls in `refused` are excluded.
    fn row_by_row_calls(&self, refused: &BTreeSet<usize>) -> Result<BTreeSet<usize>> {
        let nodes = &self.program.nodes;
        let mut pruned = BTreeSet::from([self.node]);
        let mut read: HashSet<ValueId> = HashSet::from([self.all]);
        for (index, Node { call, segment, .. }) in nodes.iter().enumerate().take(self.node).rev() {
            let reads = |node: &Node| call.results.iter().any(|id| node.call.operands.contains(&Some(*id)));
            let elsewhere = |(reader, node): (usize, &Node)| {
                reads(node) && node.segment < self.later && !pruned.contains(&reader)
            };
            if *segment == nodes[self.node].segment
                && !refused.contains(&index)
                && call.results.iter().any(|id| read.contains(id))
                && !call.results.iter().any(|id| self.program.outputs.contains(id))
                && !nodes.iter().enumerate().any(elsewhere)
                && row_by_row(&call.op, &self.program.operand_types(&call.operands)?, &self.tokens)?
            {
                pruned.insert(index);
                read.extend(call.operands.iter().flatten());
            }
        }
        pruned.remove(&self.node);
        Ok(pruned)
    }

    /// Whether each per-token operand of a call is either computed by a pruned call or can be gathered.
    fn can_gather_operands(&self, node: usize, pruned: &BTreeSet<usize>) -> bool {
        let can = |id: &ValueId| {
            let Value { value_type, origin, .. } = self.value(*id);
            let can_be_gathered = match value_type {
                OperandType::Tensor(tensor) => tensor.dtype.is_float() && tensor.shape.len() == 2,
                OperandType::Weight(_) => false,
            };
            can_be_gathered || matches!(origin, Origin::Node(producer) if pruned.contains(producer))
        };
        let operands = self.program.nodes[node].call.operands.iter().flatten();
        operands.filter(|id| self.is_of_tokens(**id)).all(can)
    }

    /// The program in which the `pruned` calls run on the output rows, with copies of them in the later segment that run on all
    /// tokens.
    fn moved_before(&self, pruned: &BTreeSet<usize>) -> Result<Program> {
        let mut rewritten =
            Rewritten { program: self.program.clone(), nodes: Vec::new(), replaced: HashMap::new() };
        let mut of_all_tokens = Vec::with_capacity(pruned.len());
        for (index, node) in self.program.nodes.iter().enumerate() {
            if node.segment >= self.later {
                rewritten.nodes.append(&mut of_all_tokens);
            }
            if pruned.contains(&index) {
                of_all_tokens.push(Node { segment: self.later, ..node.clone() });
                self.add_pruned(node, &mut rewritten)?;
            } else if index != self.node {
                rewritten.nodes.push(node.clone());
            }
        }
        with_nodes(&rewritten.program, rewritten.nodes)
    }

    /// Adds a call on the output rows, preceded by the gathers of its operands.
    fn add_pruned(&self, node: &Node, rewritten: &mut Rewritten) -> Result<()> {
        let mut call = node.call.clone();
        if let Op::PagedAttention(_) = call.op {
            self.restrict_attention(&mut call, node, rewritten)?;
        }
        for id in call.operands.iter_mut().flatten().filter(|id| self.is_of_tokens(**id)) {
            *id = rewritten.replacement(*id, node, GatherRows {}, [*id, self.rows])?;
        }
        let types = rewritten.program.operand_types(&call.operands)?;
        for (id, tensor) in call.results.iter_mut().zip(call.op.infer(&types)?) {
            let new =
                if *id == self.all { self.gathered } else { add_result(&mut rewritten.program, tensor) };
            rewritten.replaced.insert(*id, new);
            *id = new;
        }
        rewritten.nodes.push(Node { call, ..node.clone() });
        Ok(())
    }

    /// Restricts attention to the output rows: sets their range per sequence, and a work list for these ranges.
    fn restrict_attention(&self, call: &mut Call, node: &Node, rewritten: &mut Rewritten) -> Result<()> {
        let [_, _, _, Some(start), Some(length), Some(total), _, Some(work), ..] = &mut call.operands[..]
        else {
            return Err(Error::internal("paged attention has no work list"));
        };
        let Origin::Node(producer) = self.value(*work).origin else {
            return Err(Error::internal("no call makes the work list of paged attention"));
        };
        let prepare = self.program.nodes[producer].call.op.clone();
        [*start, *length] = self.wanted;
        *work = rewritten.replacement(*work, node, prepare, [*start, *length, *total])?;
        Ok(())
    }
}

/// The new program while it is built.
struct Rewritten {
    /// The original program with the new values added.
    program: Program,
    /// The new calls.
    nodes: Vec<Node>,
    /// Maps each replaced per-token value to its value on the output rows.
    replaced: HashMap<ValueId, ValueId>,
}

impl Rewritten {
    /// The value that replaces `id`. On first use it is computed by a new call of `op`, in the segment and on the lane of the
    /// node `like`.
    fn replacement<const N: usize>(
        &mut self,
        id: ValueId,
        like: &Node,
        op: impl Into<Op>,
        operands: [ValueId; N],
    ) -> Result<ValueId> {
        if let Some(known) = self.replaced.get(&id) {
            return Ok(*known);
        }
        let (op, operands) = (op.into(), operands.map(Some).to_vec());
        let results = add_results(&mut self.program, &op, &operands)?;
        let [new] = results[..] else {
            return Err(Error::internal(format!(
                "{} has {} results, expected one",
                op.name(),
                results.len()
            )));
        };
        self.nodes.push(Node { call: Call::new(op, operands, results), ..like.clone() });
        self.replaced.insert(id, new);
        Ok(new)
    }
}

/// Whether an op computes each row of its results from only the same row of every operand with `rows` rows. Attention does,
/// given the output rows of each sequence.
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
    let has_sequence_ranges = match op {
        // The bits of an explicit mask are relative to the sequence's first token in the step, which pruning would change.
        Op::PagedAttention(attention) => attention.mask != AttentionMask::Explicit,
        _ => false,
    };
    let maps = op.index_maps(operands)?;
    let Some(first @ Axis::Of([row])) = maps.results.first().and_then(|axes| axes.first()) else {
        return Ok(false);
    };
    let runs_along_row = |axis: &Axis| match axis {
        Axis::Of(dimensions) => dimensions.contains(row),
        Axis::From { dimension, .. } => dimension == row,
        Axis::Gathered => false,
    };
    let by_row = |axes: &[Axis]| {
        axes.split_first().is_some_and(|(own, rest)| own == first && !rest.iter().any(runs_along_row))
    };
    let fits = |(operand, axes): (&Option<OperandType>, &Vec<Axis>)| {
        let size = match operand {
            Some(OperandType::Tensor(tensor)) => tensor.shape.first(),
            _ => None,
        };
        match size {
            Some(size) if size == rows => by_row(axes),
            Some(Size::Bounded(_)) => has_sequence_ranges,
            _ => !axes.iter().any(runs_along_row),
        }
    };
    Ok(maps.dimensions.get(*row).is_some_and(|dimension| dimension.kind == DimensionKind::Parallel)
        && (0..maps.results.len())
            .all(|result| op.updates(result).is_none() && by_row(&maps.results[result]))
        && operands.iter().zip(&maps.operands).all(fits))
}
