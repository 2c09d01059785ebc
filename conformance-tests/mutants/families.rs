//! Families of faults: one fault for each of many ops, in tables. The test `families` holds the suite to them in one process.

use crate::{
    change::{change_result, copied},
    faults::{Fault, NONE, run},
    number_families::NUMBER_FAMILIES,
    snapshot::Snapshot,
    tensor::{Copied, bytes},
    wrap::Run,
};
use dsrun_core::{
    Result,
    device::{BufferSlice, Stream},
    kernels::{Argument, Arguments, Binding},
};
use half::f16;

/// A fault that every op of a list can have.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    /// What is wrong.
    pub(crate) about: &'static str,
    pub(crate) fault: Fault,
    /// The cases of an op that catch it; none if the op cannot have it.
    pub(crate) catches: fn(&OpCases) -> Vec<String>,
}

/// An op and its cases, by the kind of fault that they catch. An id that ends with `*` stands for all that begin so.
#[derive(Debug)]
pub(crate) struct OpCases {
    pub(crate) op: &'static str,
    /// The element type of its cases.
    pub(crate) dtype: &'static str,
    /// The first part of the ids.
    first: &'static str,
    /// A case without extents, with at least two rows.
    plain: &'static str,
    /// A case with an extent below the bound.
    extent: &'static str,
    /// A case with an extent of nothing.
    nothing: &'static str,
    /// Whether the case with an extent has variants with unequal extents.
    uneven: bool,
    /// Whether the first result is of floats that are computed.
    computes: bool,
}

const fn of(op: &'static str, first: &'static str, plain: &'static str) -> OpCases {
    OpCases {
        op,
        dtype: "f32",
        first,
        plain,
        extent: "extent",
        nothing: "extent_of_nothing",
        uneven: true,
        computes: true,
    }
}

/// The ops and their cases.
pub(crate) const OPS: &[OpCases] = &[
    of("embed", "embed_f32", "many"),
    of("rms_norm", "rms_norm", "above_a_tile"),
    of("layer_norm", "layer_norm", "prime"),
    of("linear", "linear_f32", "seven_rows"),
    of("activation", "activation_silu", "prime"),
    of("gated_activation", "gated_activation_separate", "prime"),
    of("rope", "rope_halves", "head_80"),
    OpCases { computes: false, ..of("kv_write", "kv_write", "prompt") },
    OpCases { computes: false, ..of("page_gather", "page_gather", "some") },
    OpCases { computes: false, ..of("page_scatter", "page_scatter", "some") },
    OpCases { uneven: false, ..of("paged_attention", "paged_attention", "group_of_three") },
    OpCases { uneven: false, ..of("attention", "attention", "group_of_three") },
    of("add", "add", "prime"),
    of("cast", "cast_to_f32", "prime"),
    OpCases {
        extent: "bounded_wants",
        nothing: "all_bounded",
        uneven: false,
        computes: false,
        ..of("gather_rows", "gather_rows", "some")
    },
    of("logit_process", "logit_process", "a_tile"),
    OpCases { computes: false, ..of("argmax", "argmax", "prime") },
    OpCases {
        extent: "tile",
        nothing: "",
        uneven: false,
        computes: false,
        ..of("sample", "sample_mixed_special", "tile")
    },
    OpCases { computes: false, ..of("columns", "columns", "prime") },
    OpCases { computes: false, ..of("quant_per_token", "quant_per_token", "above_a_tile") },
    of("linear_w8a8", "linear_w8a8", "prime"),
    OpCases { computes: false, ..of("quant_per_group", "quant_per_group_32", "above_a_tile") },
    of("linear_a8", "linear_a8_f32", "seven_rows"),
    OpCases { computes: false, ..of("moe_route", "moe_route_softmax", "many_experts") },
    of("grouped_linear", "grouped_linear_f32", "many_experts"),
    of("moe_combine", "moe_combine", "many_experts"),
    OpCases {
        dtype: "i32",
        extent: "mixed_extents",
        nothing: "",
        uneven: false,
        computes: false,
        ..of("prepare_step", "prepare_step", "mixed_full")
    },
    OpCases { dtype: "i32", uneven: false, computes: false, ..of("moe_group", "moe_group", "many_experts") },
];

impl OpCases {
    pub(crate) fn id(&self, label: &str) -> String {
        format!("{}/{}/{label}", self.first, self.dtype)
    }

    /// Cases that every harmless variant must pass.
    #[allow(dead_code, reason = "only the test asks for them, not the plugin")]
    pub(crate) fn small_cases(&self) -> Vec<String> {
        let labels = ["special_rare", "special_zeros", "special_subnormals", "random_subnormal_*"];
        let own = [self.plain, self.extent, self.nothing].map(|label| self.id(label));
        own.into_iter().chain(labels.map(|label| self.id(label))).collect()
    }

    fn some(&self, label: &str) -> Vec<String> {
        if label.is_empty() { Vec::new() } else { vec![self.id(label)] }
    }
}

/// The families of faults in extents, in what is read when, and in what is written.
const FAMILIES: &[Family] = &[
    Family {
        name: "extent_ignored",
        about: "computes and writes all rows, whatever the extent",
        fault: Fault { arguments: Some(|arguments| keep_extents(arguments, false, false)), ..NONE },
        catches: |op| op.some(op.extent),
    },
    Family {
        name: "extent_of_results_only",
        about: "computes rows past the extents of operands",
        fault: Fault { arguments: Some(|arguments| keep_extents(arguments, false, true)), ..NONE },
        catches: |op| op.some(if op.uneven { "extent_of_*" } else { "" }),
    },
    Family {
        name: "extent_of_operands_only",
        about: "writes rows past the extents of results",
        fault: Fault { arguments: Some(|arguments| keep_extents(arguments, true, false)), ..NONE },
        catches: |op| match op.op {
            // These have no result of their own with an extent.
            "kv_write" | "page_scatter" => Vec::new(),
            _ => op.some(if op.uneven { "extent_of_*" } else { "" }),
        },
    },
    Family {
        name: "extent_at_bind",
        about: "reads extents when a call is bound",
        fault: Fault {
            copied_when_bound: true,
            ..run("", |run, stream| with_old(run, stream, Snapshot::restore_extents))
        },
        catches: |op| op.some(op.extent),
    },
    Family {
        name: "extent_above_the_bound",
        about: "takes an extent above the bound for nothing",
        fault: run("", |run, stream| {
            change_extents(run, stream, |extent, rows| if extent > rows { 0 } else { extent })
        }),
        catches: |op| op.some(if op.uneven { "extent_of_*" } else { "" }),
    },
    Family {
        name: "extent_below_zero",
        about: "takes a negative extent for all rows",
        fault: run("", |run, stream| {
            change_extents(run, stream, |extent, rows| if extent < 0 { rows } else { extent })
        }),
        catches: |op| op.some(op.nothing),
    },
    Family {
        name: "extent_one_too_large",
        about: "takes one row past the extent for valid",
        fault: run("", |run, stream| change_extents(run, stream, |extent, _| extent.saturating_add(1))),
        catches: |op| match op.op {
            // The next row of the case belongs to a sequence that ends before, or is skipped.
            "paged_attention" | "attention" | "kv_write" | "page_gather" | "logit_process" => Vec::new(),
            _ => op.some(op.extent),
        },
    },
    Family {
        name: "operands_at_bind",
        about: "reads operands when a call is bound",
        fault: Fault {
            copied_when_bound: true,
            ..run("", |run, stream| with_old(run, stream, Snapshot::restore_operands))
        },
        catches: |op| op.some(op.plain),
    },
    Family {
        name: "operands_of_the_first_run",
        about: "keeps the operands of its first run",
        fault: run("", |run, stream| {
            if run.snapshot.borrow().is_none() {
                let taken = Snapshot::take(stream, &run.arguments)?;
                run.snapshot.replace(Some(taken));
            }
            with_old(run, stream, Snapshot::restore_operands)
        }),
        catches: |op| op.some(op.plain),
    },
    Family {
        name: "last_row_unwritten",
        about: "does not write the last row of its first result",
        fault: run("", last_row_unwritten),
        catches: |op| match op.op {
            // The last row of the case is skipped, or the result is a cache.
            "kv_write" | "page_scatter" | "page_gather" => Vec::new(),
            _ => op.some(op.plain),
        },
    },
    Family {
        name: "writes_behind_itself",
        about: "writes an element behind its first result",
        fault: run("", |run, stream| {
            run.right(stream)?;
            crate::change::write_behind(run, stream, 0)
        }),
        catches: |op| op.some(op.plain),
    },
    Family {
        name: "changes_an_operand",
        about: "changes an operand that it does not update",
        fault: run("", changes_an_operand),
        catches: |op| op.some(op.plain),
    },
    Family {
        name: "finite_leak",
        about: "adds what stands past the extent to its first row, unless that is NaN",
        fault: run("", finite_leak),
        catches: |op| match op.op {
            // The first float operand with an extent is none that is added up.
            "embed" | "linear_w8a8" => Vec::new(),
            _ => op.some(if op.computes { op.extent } else { "" }),
        },
    },
    Family {
        name: "half_results",
        about: "rounds results of f32 to f16 on the way",
        fault: run("", |run, stream| {
            run.right(stream)?;
            change_result(run, stream, 0, |_, y| {
                for index in 0..y.count() {
                    let value = y.float(index);
                    // What is not in the range of f16 stays.
                    if value.abs() < 60000.0 && value.abs() > 1e-4 {
                        y.set_float(index, f16::from_f32(value).to_f32());
                    }
                }
            })
        }),
        catches: |op| op.some(if op.computes { op.plain } else { "" }),
    },
];

/// All families of both tables.
pub(crate) fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().chain(NUMBER_FAMILIES)
}

/// A fault of a family for an op.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) family: &'static Family,
    pub(crate) op: &'static OpCases,
    pub(crate) fault: Fault,
    pub(crate) caught_by: String,
}

impl Member {
    /// The name, with the op.
    pub(crate) fn name(&self) -> String {
        format!("{}::{}", self.family.name, self.op.op)
    }
}

/// All faults of all families.
pub(crate) fn members() -> Vec<Member> {
    let of = |family: &'static Family| {
        let member = move |op: &'static OpCases| {
            let caught_by = (family.catches)(op).into_iter().next()?;
            let fault = Fault { name: family.name, op: Some(op.op), ..family.fault };
            Some(Member { family, op, fault, caught_by })
        };
        OPS.iter().filter_map(member)
    };
    families().flat_map(of).collect()
}

/// Drops the extents of operands or results.
fn keep_extents(arguments: &mut Arguments, of_operands: bool, of_results: bool) {
    for argument in arguments.operands.iter_mut().flatten() {
        if let (Argument::Tensor(binding), false) = (argument, of_operands) {
            binding.extent = None;
        }
    }
    if !of_results {
        arguments.results.iter_mut().for_each(|binding| binding.extent = None);
    }
}

/// Runs a call on what a snapshot holds, and brings back what was there.
fn with_old(
    run: &Run,
    stream: &mut dyn Stream,
    restore: fn(&Snapshot, &mut dyn Stream) -> Result<()>,
) -> Result<()> {
    let now = Snapshot::take(stream, &run.arguments)?;
    if let Some(old) = &*run.snapshot.borrow() {
        restore(old, stream)?;
    }
    let outcome = run.right(stream);
    now.restore_unless_updated(stream, &run.arguments)?;
    outcome
}

/// All tensors of a call with their numbers of rows.
fn bindings(run: &Run) -> Vec<(usize, &Binding)> {
    let operands = run.arguments.operands.iter().enumerate().filter_map(|(index, argument)| match argument {
        Some(Argument::Tensor(binding)) => {
            Some((run.operand(index)?.shape.first().copied().unwrap_or(0), binding))
        }
        _ => None,
    });
    let rows = run.call.results.iter().map(|desc| desc.shape.first().copied().unwrap_or(0));
    operands.chain(rows.zip(&run.arguments.results)).collect()
}

/// Runs a call with other extents, which are given the extent and the rows.
fn change_extents(run: &Run, stream: &mut dyn Stream, change: fn(i32, i32) -> i32) -> Result<()> {
    let mut before: Vec<(BufferSlice, Vec<u8>)> = Vec::new();
    for (rows, binding) in bindings(run) {
        let Some(extent) = &binding.extent else { continue };
        let found = bytes(stream, extent)?;
        let value = i32::from_le_bytes(found[..4].try_into().unwrap_or_default());
        stream.upload(&change(value, rows as i32).to_le_bytes(), &extent.slice(0, 4)?)?;
        before.push((extent.clone(), found));
    }
    let outcome = run.right(stream);
    // In reverse, because tensors may share an extent.
    before.iter().rev().try_for_each(|(extent, bytes)| stream.upload(bytes, extent))?;
    outcome
}

/// The number of rows of a tensor below its extent.
fn valid_rows(stream: &mut dyn Stream, rows: usize, binding: &Binding) -> Result<usize> {
    let Some(extent) = &binding.extent else { return Ok(rows) };
    let value = i32::from_le_bytes(bytes(stream, extent)?[..4].try_into().unwrap_or_default());
    Ok(usize::try_from(value).unwrap_or(0).min(rows))
}

fn last_row_unwritten(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let (desc, binding) = (&run.call.results[0], &run.arguments.results[0]);
    let before = Copied::read(stream, desc, binding)?;
    run.right(stream)?;
    let valid = valid_rows(stream, desc.shape.first().copied().unwrap_or(0), binding)?;
    change_result(run, stream, 0, |_, y| {
        let width = y.width();
        let last = valid.saturating_sub(1) * width..valid * width;
        last.for_each(|index| y.set_bits(index, before.bits(index)));
    })
}

fn changes_an_operand(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    let updated =
        |index: usize| (0..run.call.results.len()).any(|result| run.call.op.updates(result) == Some(index));
    let operands = run.call.operands.len();
    let Some(index) = (0..operands).find(|index| run.operand(*index).is_some() && !updated(*index)) else {
        return Ok(());
    };
    let Some(mut tensor) = copied(run, stream, index)? else { return Ok(()) };
    if tensor.count() > 0 {
        tensor.set_bits(0, tensor.bits(0) ^ 1);
    }
    tensor.write(stream)
}

fn finite_leak(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    let floats = run.arguments.operands.iter().enumerate().filter_map(|(index, argument)| match argument {
        Some(Argument::Tensor(binding)) => Some((run.operand(index)?, binding)),
        _ => None,
    });
    let mut bounded = floats.filter(|(desc, binding)| desc.dtype.is_float() && binding.extent.is_some());
    let Some((desc, binding)) = bounded.next() else { return Ok(()) };
    let rows = desc.shape.first().copied().unwrap_or(0);
    let valid = valid_rows(stream, rows, binding)?;
    let x = Copied::read(stream, desc, binding)?;
    if valid == 0 || valid == rows {
        return Ok(());
    }
    let behind = x.float(valid * x.width());
    change_result(run, stream, 0, |_, y| {
        // Nothing can be added to an infinity.
        let at = (0..y.count()).find(|at| y.float(*at).is_finite());
        if let Some(at) = at.filter(|_| behind.is_finite()) {
            y.set_float(at, y.float(at) + behind);
        }
    })
}
