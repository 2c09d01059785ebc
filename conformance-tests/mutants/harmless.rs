//! Variants of the CPU backend that keep all the rules, in ways that a suite which is too strict would flag.

use crate::{
    change::{change_result, copied},
    faults::{Fault, NONE, run},
    number_families::{FLUSHING, flushes_operands, flushes_results},
    snapshot::Snapshot,
    wrap::{Run, StreamFault},
};
use dsrun_core::{
    DType, Result, WeightFormat,
    device::Stream,
    kernels::{OperandDesc, Support},
    op::Op,
};
use std::{thread, time::Duration};

/// A variant and what it does.
#[derive(Debug)]
pub(crate) struct Harmless {
    pub(crate) about: &'static str,
    pub(crate) fault: Fault,
    /// Checks that it must pass, too.
    #[allow(dead_code, reason = "only the test asks for them, not the plugin")]
    pub(crate) checks: &'static [&'static str],
}

const fn harmless(about: &'static str, fault: Fault) -> Harmless {
    Harmless { about, fault, checks: &[] }
}

/// Ops whose results are computed in floats, and may be off by a little.
const COMPUTED: [&str; 10] = [
    "rms_norm",
    "layer_norm",
    "linear",
    "activation",
    "gated_activation",
    "paged_attention",
    "attention",
    "moe_combine",
    "grouped_linear",
    "linear_a8",
];

/// All variants.
pub(crate) const HARMLESS: &[Harmless] = &[
    harmless("nothing", Fault { name: "faultless", ..NONE }),
    harmless(
        "flushes subnormal operands, and says so",
        Fault { name: "flushes_operands", run: Some(flushes_operands), ..FLUSHING },
    ),
    harmless(
        "flushes subnormal results, and says so",
        Fault { name: "flushes_results", run: Some(flushes_results), ..FLUSHING },
    ),
    harmless("says that it flushes, and does not", Fault { name: "flushes_nothing", ..FLUSHING }),
    Harmless {
        about: "does all work when it is waited for",
        fault: Fault { name: "late", stream: Some(StreamFault::Late), ..NONE },
        checks: &["check/order_streams", "check/order_events", "check/order_uploads", "check/events"],
    },
    harmless("sums products in one running sum", summing("running_sum")),
    harmless("sums products from the last to the first", summing("backward_sum")),
    harmless("sums products in f64", summing("wide_sum")),
    harmless("sums products in four parts", summing("sum_of_parts")),
    harmless("rounds results towards zero", run("truncates", |run, stream| nudged(run, stream, toward_zero))),
    harmless(
        "has exponentials that are good to 21 bits",
        run("fast_exponential", |run, stream| match run.op() {
            "activation" | "gated_activation" => nudged(run, stream, |value| value * (1.0 + 4e-7)),
            _ => run.right(stream),
        }),
    ),
    harmless(
        "writes NaN with another payload",
        run("other_nan", |run, stream| {
            nudged(run, stream, |value| if value.is_nan() { f32::from_bits(0xFFC1_2345) } else { value })
        }),
    ),
    harmless(
        "writes zeros with the other sign",
        run("other_zero", |run, stream| {
            nudged(run, stream, |value| if value == 0.0 { -value } else { value })
        }),
    ),
    harmless(
        "writes garbage to results before it writes them",
        run("writes_twice", |run, stream| {
            run.right(stream)?;
            let untouched = run.arguments.results.iter().any(|result| result.extent.is_some());
            let skips = ["gather_rows", "rope", "kv_write", "page_gather", "page_scatter", "sample"];
            let skips = skips.contains(&run.op()) || run.op().starts_with("moe_");
            let updates = (0..run.call.results.len()).any(|index| run.call.op.updates(index).is_some());
            if untouched || skips || updates || !COMPUTED.contains(&run.op()) {
                return Ok(());
            }
            if run.op().contains("attention") || run.op() == "grouped_linear" {
                return Ok(());
            }
            change_result(run, stream, 0, |_, y| {
                (0..y.count()).for_each(|index| y.set_bits(index, 0x1234_5678))
            })?;
            run.right(stream)
        }),
    ),
    harmless(
        "reads its operands into a copy first",
        run("copies_operands", |run, stream| {
            let taken = Snapshot::take(stream, &run.arguments)?;
            taken.restore_unless_updated(stream, &run.arguments)?;
            run.right(stream)
        }),
    ),
    harmless(
        "takes a millisecond for every call",
        run("slow", |run, stream| {
            thread::sleep(Duration::from_millis(1));
            run.right(stream)
        }),
    ),
    harmless(
        "asks for workspace and leaves garbage there",
        Fault {
            workspace: 256,
            query: Some(|_, support| support.workspace_bytes = 256),
            ..run("garbage_in_workspace", |run, stream| {
                if let Some(workspace) = &run.arguments.workspace {
                    stream.fill(workspace, 0x9C)?;
                }
                run.right(stream)
            })
        },
    ),
    harmless(
        "claims no batch invariance",
        Fault {
            name: "no_batch_invariance",
            query: Some(|_, support| support.batch_invariant = false),
            ..run("", |run, stream| {
                run.right(stream)?;
                let rows = run.call.results[0].shape.first().copied().unwrap_or(0);
                let other = rows > 128 && run.op() == "rms_norm";
                if other { change_result(run, stream, 0, crate::change::flip) } else { Ok(()) }
            })
        },
    ),
    harmless(
        "claims no graphs for its calls",
        Fault { name: "no_capture", query: Some(|_, support| support.capture_safe = false), ..NONE },
    ),
    harmless(
        "runs no weights in blocks",
        Fault {
            name: "no_blocks",
            query: Some(|call, support| {
                let in_blocks = |operand: &Option<OperandDesc>| matches!(operand, Some(OperandDesc::Weight(weight)) if matches!(weight.format, WeightFormat::Block(_)));
                if call.operands.iter().any(in_blocks) {
                    *support = Support::no("weights in blocks are not supported");
                }
            }),
            ..NONE
        },
    ),
    harmless(
        "runs no regions",
        Fault {
            name: "no_regions",
            query: Some(|call, support| {
                if matches!(call.op, Op::Region(_)) {
                    *support = Support::no("regions are not supported");
                }
            }),
            ..NONE
        },
    ),
];

/// A way to sum up.
type Sum = fn(&mut dyn DoubleEndedIterator<Item = f32>) -> f32;

/// A backend that sums the products of f32 in its own way. The sum is chosen by name, because a call has no state of its own.
const fn summing(name: &'static str) -> Fault {
    Fault { weights_kept: true, ..run(name, summed) }
}

fn sum_of(name: &str) -> Sum {
    match name {
        "running_sum" => |terms| terms.fold(0.0, |a, b| a + b),
        "backward_sum" => |terms| terms.rev().fold(0.0, |a, b| a + b),
        "wide_sum" => |terms| terms.fold(0.0, |a: f64, b| a + f64::from(b)) as f32,
        _ => |terms| {
            let mut parts = [0.0f32; 4];
            terms.enumerate().for_each(|(index, term)| parts[index % 4] += term);
            (parts[0] + parts[1]) + (parts[2] + parts[3])
        },
    }
}

fn summed(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    // The operands after the activations: scales of groups, if there are any, the weight, and the bias.
    let weight_at = match run.call.op {
        Op::Linear(_) => 1,
        Op::LinearA8(_) => 2,
        _ => return run.right(stream),
    };
    let (Some(weight), None) = (run.weight(weight_at), &run.arguments.results[0].extent) else {
        return run.right(stream);
    };
    let Some(x) = copied(run, stream, 0)? else { return run.right(stream) };
    let scales = if weight_at == 2 { copied(run, stream, 1)? } else { None };
    if scales.is_none() && x.desc.dtype != DType::F32 {
        return run.right(stream);
    }
    let (bias, sum) = (copied(run, stream, weight_at + 1)?, sum_of(run.fault_name()));
    let activation = |row: usize, input: usize| {
        let index = row * x.width() + input;
        match &scales {
            None => x.float(index),
            Some(scales) => {
                let group = input * scales.width() / x.width();
                scales.float(row * scales.width() + group) * f32::from(x.bits(index) as u8 as i8)
            }
        }
    };
    run.right(stream)?;
    change_result(run, stream, 0, |_, y| {
        let (outputs, inputs) = (y.width(), x.width());
        for index in 0..y.count() {
            let (row, output) = (index / outputs, index % outputs);
            let product = |input: usize| activation(row, input) * weight[output * inputs + input];
            let total = sum(&mut (0..inputs).map(product));
            y.set_float(index, total + bias.as_ref().map_or(0.0, |bias| bias.float(output)));
        }
    })
}

/// The next f32 towards zero.
fn toward_zero(value: f32) -> f32 {
    if value == 0.0 || !value.is_finite() { value } else { f32::from_bits(value.to_bits() - 1) }
}

/// Changes every computed element of the first result that was written.
fn nudged(run: &Run, stream: &mut dyn Stream, change: fn(f32) -> f32) -> Result<()> {
    let before = crate::tensor::Copied::read(stream, &run.call.results[0], &run.arguments.results[0])?;
    run.right(stream)?;
    if !COMPUTED.contains(&run.op()) {
        return Ok(());
    }
    change_result(run, stream, 0, |_, y| {
        for index in 0..y.count() {
            if y.bits(index) != before.bits(index) {
                y.set_float(index, change(y.float(index)));
            }
        }
    })
}
