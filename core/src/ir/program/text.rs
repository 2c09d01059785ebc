//! The text form of programs, for people and tests. The parser in `parse.rs` reads exactly this form.
//!
//! ```text
//! program "llama" {
//!   extents tokens, sequences
//!   segment "step": graph
//!   %0 = input "ids": i32[?tokens]
//!   %1 = weight "embed": q4_1[49152, 576] = tensor("token_embd.weight")
//!   %2 = vector "norm": f32[576] = tensor("output_norm.weight")
//!   %3 = state "kv": f32[$pages, 3, 16, 64] @ tensor=sharded(1)
//!   %4: f32[?tokens, 576] = embed{dtype=f32, first_row=0, position_offset=0}(%0, %1, _, _)
//!   output %4
//! }
//! ```

use super::{Call, Lane, Node, Origin, Program, Value, ValueId};
use crate::{WeightExpr, WeightType, op::OperandType};
use std::fmt::{self, Display, Formatter, Write};

fn list<T: Display>(f: &mut Formatter<'_>, items: impl IntoIterator<Item = T>) -> fmt::Result {
    for (index, item) in items.into_iter().enumerate() {
        write!(f, "{}{item}", if index == 0 { "" } else { ", " })?;
    }
    Ok(())
}

struct Operand<'a>(&'a Option<ValueId>);

impl Display for Operand<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(id) => id.fmt(f),
            None => f.write_char('_'),
        }
    }
}

impl Display for Call {
    /// Writes `%2, %3 = op{attributes}(%0, %1, _)`; a call without results starts with the op.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        list(f, &self.results)?;
        if !self.results.is_empty() {
            f.write_str(" = ")?;
        }
        write!(f, "{}(", self.op)?;
        list(f, self.operands.iter().map(Operand))?;
        f.write_char(')')
    }
}

impl Display for WeightType {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.format)?;
        list(f, &self.shape)?;
        f.write_char(']')
    }
}

impl Display for WeightExpr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(name) => write!(f, "tensor({name:?})"),
            Self::Constant(values) => {
                f.write_str("constant(")?;
                list(f, values.iter().map(|value| format!("{value:?}")))?;
                f.write_char(')')
            }
            Self::Slice { of, dimension, start, end } => {
                write!(f, "slice({dimension}, {start}, {end}, {of})")
            }
            Self::Concat { parts, dimension } => {
                write!(f, "concat({dimension}, ")?;
                list(f, parts)?;
                f.write_char(')')
            }
            Self::Interleave { parts, block } => {
                write!(f, "interleave({block}, ")?;
                list(f, parts)?;
                f.write_char(')')
            }
            Self::Permute { of, rows } => {
                write!(f, "permute({of}")?;
                rows.iter().try_for_each(|row| write!(f, ", {row}"))?;
                f.write_char(')')
            }
            Self::Transpose { of } => write!(f, "transpose({of})"),
            Self::Reshape { of, shape } => {
                write!(f, "reshape({of}")?;
                shape.iter().try_for_each(|size| write!(f, ", {size}"))?;
                f.write_char(')')
            }
            Self::Scale { of, factor } => write!(f, "scale({factor:?}, {of})"),
            Self::Cast { of, dtype } => write!(f, "cast({dtype}, {of})"),
            Self::Factors { of, factors, rows } => {
                write!(f, "factors({}, {of}", if *rows { "rows" } else { "columns" })?;
                factors.iter().try_for_each(|factor| write!(f, ", {factor:?}"))?;
                f.write_char(')')
            }
            Self::Quantise { of, format, search } => {
                write!(f, "quantise({format}, {}, {of})", if *search { "search" } else { "span" })
            }
            Self::Pad { of, before, after } => write!(f, "pad({before}, {after}, {of})"),
        }
    }
}

fn placements(f: &mut Formatter<'_>, value: &Value) -> fmt::Result {
    for (index, (axis, placement)) in value.placements.placed().enumerate() {
        write!(f, "{} {}={placement}", if index == 0 { " @" } else { "," }, axis.name())?;
    }
    Ok(())
}

fn declaration(f: &mut Formatter<'_>, id: usize, value: &Value) -> fmt::Result {
    let keyword = match (&value.origin, &value.value_type) {
        (Origin::Input, _) => "input",
        (Origin::State, _) => "state",
        (Origin::Weight(_), OperandType::Weight(_)) => "weight",
        (Origin::Weight(_), OperandType::Tensor(_)) => "vector",
        (Origin::Node(_), _) => return Ok(()),
    };
    write!(f, "  %{id} = {keyword} {:?}: ", value.name)?;
    match &value.value_type {
        OperandType::Tensor(tensor) => tensor.fmt(f)?,
        OperandType::Weight(weight) => weight.fmt(f)?,
    }
    placements(f, value)?;
    if let Origin::Weight(expr) = &value.origin {
        write!(f, " = {expr}")?;
    }
    f.write_char('\n')
}

fn node(f: &mut Formatter<'_>, program: &Program, node: &Node) -> fmt::Result {
    f.write_str("  ")?;
    for (index, id) in node.call.results.iter().enumerate() {
        write!(f, "{}{id}: ", if index == 0 { "" } else { ", " })?;
        if let Some(value) = program.values.get(id.index()) {
            if let Some(tensor) = value.tensor_type() {
                tensor.fmt(f)?;
            }
            placements(f, value)?;
        }
    }
    if !node.call.results.is_empty() {
        f.write_str(" = ")?;
    }
    write!(f, "{}(", node.call.op)?;
    list(f, node.call.operands.iter().map(Operand))?;
    f.write_char(')')?;
    if node.lane != Lane::usual(&node.call.op) {
        write!(f, " on {}", node.lane.name())?;
    }
    f.write_char('\n')
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {:?} {{", self.name)?;
        if !self.extents.is_empty() {
            f.write_str("  extents ")?;
            list(f, &self.extents)?;
            f.write_char('\n')?;
        }
        for (id, value) in self.values.iter().enumerate() {
            declaration(f, id, value)?;
        }
        for (index, segment) in self.segments.iter().enumerate() {
            writeln!(f, "  segment {:?}: {}", segment.name, segment.kind.name())?;
            for in_segment in self.nodes.iter().filter(|node| node.segment == index) {
                node(f, self, in_segment)?;
            }
        }
        f.write_str("  output ")?;
        list(f, &self.outputs)?;
        f.write_str("\n}\n")
    }
}
