//! Families of faults in special numbers, in batches, and in calls just over a size.

use crate::{
    change::{change_result, copied},
    families::{Family, OpCases},
    faults::{Fault, NONE, run},
    tensor::Copied,
    wrap::Run,
};
use dsrun_core::{DType, Result, device::Stream, kernels::Argument};

/// The ops with planes of special values.
const SPECIAL: [&str; 12] = [
    "rms_norm",
    "layer_norm",
    "linear",
    "activation",
    "gated_activation",
    "rope",
    "logit_process",
    "paged_attention",
    "attention",
    "grouped_linear",
    "moe_combine",
    "linear_a8",
];

fn special(op: &OpCases) -> Vec<String> {
    if SPECIAL.contains(&op.op) { vec![op.id("special_rare")] } else { Vec::new() }
}

/// The case of an op whose operands are subnormal.
fn subnormal(op: &OpCases) -> Vec<String> {
    match op.op {
        "add" | "cast" | "columns" => vec![op.id("random_subnormal_*")],
        "rms_norm" | "linear" | "linear_a8" | "argmax" | "moe_route" => vec![op.id("special_subnormals")],
        _ => Vec::new(),
    }
}

/// The ops with cases of so many rows.
fn of_rows(op: &OpCases, label: &str) -> Vec<String> {
    let lacks: &[&str] = match op.op {
        "rope" => &["rows_257", "rows_8193"],
        "embed" => &["rows_257", "rows_1025"],
        // Row 256 of the case is padding.
        "logit_process" => &["rows_257"],
        // Groups of 32 make it too large.
        "quant_per_group" => &["rows_65537"],
        _ => &[],
    };
    let all = [
        "rms_norm",
        "layer_norm",
        "linear",
        "activation",
        "gated_activation",
        "add",
        "cast",
        "columns",
        "argmax",
        "quant_per_token",
        "quant_per_group",
        "logit_process",
        "rope",
        "embed",
    ];
    if all.contains(&op.op) && !lacks.contains(&label) { vec![op.id(label)] } else { Vec::new() }
}

/// The ops with cases of so many columns.
fn of_columns(op: &OpCases, label: &str) -> Vec<String> {
    let all = ["rms_norm", "layer_norm", "activation", "gated_activation", "add", "cast", "logit_process"];
    if all.contains(&op.op) { vec![op.id(label)] } else { Vec::new() }
}

/// The families.
pub(crate) const NUMBER_FAMILIES: &[Family] = &[
    Family {
        name: "nan_swallowed",
        about: "writes 0 in place of NaN",
        fault: run("", |run, stream| changed(run, stream, |value| if value.is_nan() { 0.0 } else { value })),
        catches: special,
    },
    Family {
        name: "infinity_capped",
        about: "writes the largest finite number in place of infinity",
        fault: run("", |run, stream| {
            changed(run, stream, |value| if value.is_infinite() { f32::MAX.copysign(value) } else { value })
        }),
        catches: |op| match op.op {
            // Norms make zeros of rows with infinity, and the activations of the case have a limit.
            "rms_norm" | "layer_norm" | "activation" | "gated_activation" => Vec::new(),
            _ => special(op),
        },
    },
    Family {
        name: "nan_spreads",
        about: "writes NaN into the row behind one with NaN",
        fault: run("", |run, stream| {
            run.right(stream)?;
            change_result(run, stream, 0, |_, y| {
                let width = y.width().max(1);
                let rows = y.count() / width;
                let has_nan =
                    |row: usize| (row * width..(row + 1) * width).any(|index| y.float(index).is_nan());
                let behind: Vec<usize> = (1..rows).filter(|row| has_nan(row - 1)).collect();
                behind.into_iter().for_each(|row| y.set_float(row * width, f32::NAN));
            })
        }),
        catches: special,
    },
    Family {
        name: "subnormal_results_flushed",
        about: "writes 0 in place of subnormal results, and does not say so",
        fault: run("", |run, stream| {
            changed(run, stream, |value| if value.is_subnormal() { 0.0 } else { value })
        }),
        catches: |op| match op.op {
            "add" | "cast" | "columns" => subnormal(op),
            _ => Vec::new(),
        },
    },
    Family {
        name: "subnormal_operands_flushed",
        about: "takes subnormal operands for 0, and does not say so",
        fault: run("", |run, stream| with_subnormals_as(run, stream, 0.0)),
        catches: subnormal,
    },
    Family {
        name: "subnormal_operands_garbled",
        about: "says that it takes subnormal operands for 0, and takes them for 1",
        fault: Fault {
            declares_flushing: true,
            ..run("", |run, stream| with_subnormals_as(run, stream, 1.0))
        },
        catches: |op| match op.op {
            // Equal numbers have the largest where zeros have it.
            "argmax" => Vec::new(),
            // The same holds for the order of logits.
            "moe_route" => Vec::new(),
            _ => subnormal(op),
        },
    },
    Family {
        name: "subnormal_results_garbled",
        about: "says that it flushes subnormal results, and writes 1 in their place",
        fault: Fault {
            declares_flushing: true,
            ..run("", |run, stream| {
                changed(run, stream, |value| if value.is_subnormal() { 1.0 } else { value })
            })
        },
        catches: |op| match op.op {
            "add" | "cast" | "columns" => subnormal(op),
            _ => Vec::new(),
        },
    },
    Family {
        name: "batch_matters",
        about: "gives other last bits in batches of more than 128 rows",
        fault: run("", |run, stream| {
            run.right(stream)?;
            let rows = run.call.results[0].shape.first().copied().unwrap_or(0);
            if rows > 128 { change_result(run, stream, 0, crate::change::flip) } else { Ok(()) }
        }),
        catches: |op| match op.op {
            "rms_norm" | "layer_norm" | "activation" | "gated_activation" | "add" | "rope"
            | "quant_per_token" | "quant_per_group" | "argmax" | "linear" | "linear_a8" => {
                vec!["check/batch_rows".into()]
            }
            _ => Vec::new(),
        },
    },
    Family {
        name: "rows_past_256",
        about: "leaves rows past 256 unwritten",
        fault: run("", |run, stream| without(run, stream, 256, usize::MAX)),
        catches: |op| of_rows(op, "rows_257"),
    },
    Family {
        name: "rows_past_1024",
        about: "leaves rows past 1,024 unwritten",
        fault: run("", |run, stream| without(run, stream, 1024, usize::MAX)),
        catches: |op| of_rows(op, "rows_1025"),
    },
    Family {
        name: "rows_past_8192",
        about: "leaves rows past 8,192 unwritten",
        fault: run("", |run, stream| without(run, stream, 8192, usize::MAX)),
        catches: |op| of_rows(op, "rows_8193"),
    },
    Family {
        name: "rows_past_65536",
        about: "leaves rows past 65,536 unwritten",
        fault: run("", |run, stream| without(run, stream, 65_536, usize::MAX)),
        catches: |op| of_rows(op, "rows_65537"),
    },
    Family {
        name: "columns_past_512",
        about: "leaves columns past 512 unwritten",
        fault: run("", |run, stream| without(run, stream, usize::MAX, 512)),
        catches: |op| of_columns(op, "columns_513"),
    },
    Family {
        name: "columns_past_8192",
        about: "leaves columns past 8,192 unwritten",
        fault: run("", |run, stream| without(run, stream, usize::MAX, 8192)),
        catches: |op| of_columns(op, "columns_8193"),
    },
    Family {
        name: "columns_past_65536",
        about: "leaves columns past 65,536 unwritten",
        fault: run("", |run, stream| without(run, stream, usize::MAX, 65_536)),
        catches: |op| of_columns(op, "columns_65537"),
    },
];

/// Changes every float of the first result.
fn changed(run: &Run, stream: &mut dyn Stream, change: fn(f32) -> f32) -> Result<()> {
    run.right(stream)?;
    change_result(run, stream, 0, |_, y| {
        for index in 0..y.count() {
            let (before, after) = (y.float(index), change(y.float(index)));
            if before.to_bits() != after.to_bits() && y.desc.dtype.is_float() {
                y.set_float(index, after);
            }
        }
    })
}

/// Runs a call with another number in place of subnormal ones in its float operands.
fn with_subnormals_as(run: &Run, stream: &mut dyn Stream, number: f32) -> Result<()> {
    let mut originals = Vec::new();
    for (index, argument) in run.arguments.operands.iter().enumerate() {
        let updated = (0..run.call.results.len()).any(|result| run.call.op.updates(result) == Some(index));
        let is_float = run.operand(index).is_some_and(|desc| desc.dtype == DType::F32 && !updated);
        let (true, Some(Argument::Tensor(_))) = (is_float, argument) else { continue };
        let Some(original) = copied(run, stream, index)? else { continue };
        let mut changed = original.clone();
        for at in 0..changed.count() {
            if changed.float(at).is_subnormal() {
                changed.set_float(at, number);
            }
        }
        changed.write(stream)?;
        originals.push(original);
    }
    let outcome = run.right(stream);
    originals.iter().try_for_each(|original| original.write(stream))?;
    outcome
}

/// Runs a call without writing the rows from `rows` and the columns from `columns` on.
fn without(run: &Run, stream: &mut dyn Stream, rows: usize, columns: usize) -> Result<()> {
    let before = Copied::read(stream, &run.call.results[0], &run.arguments.results[0])?;
    run.right(stream)?;
    change_result(run, stream, 0, |_, y| {
        let width = y.width().max(1);
        let lost = (0..y.count()).filter(|index| index / width >= rows || index % width >= columns);
        lost.for_each(|index| y.set_bits(index, before.bits(index)));
    })
}

/// No fault, but for what it says of subnormal numbers.
pub(crate) const FLUSHING: Fault = Fault { declares_flushing: true, ..NONE };

/// Takes subnormal operands for zero.
pub(crate) fn flushes_operands(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    with_subnormals_as(run, stream, 0.0)
}

/// Writes zero in place of subnormal results.
pub(crate) fn flushes_results(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    changed(run, stream, |value| if value.is_subnormal() { 0.0 } else { value })
}
