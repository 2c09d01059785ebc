//! The faults. Each changes what is planned, what a call reads before it runs, or what it has written after.

use crate::{
    raw::{self, Query},
    tensor::{Copied, bytes},
    wrap::{Run, launching},
};
use dsrun_core::{
    Code, DType, Error, Result, WeightFormat,
    device::{BufferSlice, Stream},
    kernels::{Argument, CallDesc, OperandDesc, Support},
    op::{AttentionMask, Matmul, Op, RopePairing, SamplingColumn},
};
use half::{bf16, f16};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Runs a call in its own way.
type RunCall = fn(&Run, &mut dyn Stream) -> Result<()>;

/// Where a backend goes wrong; all empty is right.
#[derive(Debug)]
pub(crate) struct Fault {
    name: &'static str,
    /// Stands for running a call.
    pub(crate) run: Option<RunCall>,
    /// Makes another call of one, if there is one to be had.
    pub(crate) variant: Option<fn(&mut CallDesc) -> bool>,
    /// Changes the answer to a query.
    pub(crate) query: Option<fn(&CallDesc, &mut Support)>,
    /// Refuses to plan a call.
    pub(crate) plan: Option<fn(&CallDesc) -> Option<Error>>,
    /// Stands in the plugin's table for `query`.
    pub(crate) raw_query: Option<Query>,
    /// What every plan says it needs.
    pub(crate) workspace: usize,
    pub(crate) abort_without_reason: bool,
    pub(crate) copies_go_astray: bool,
    pub(crate) copies_overlap: bool,
    pub(crate) events_refused: bool,
    pub(crate) handles_leak: bool,
    pub(crate) nameless: bool,
    pub(crate) out_of_memory_misnamed: bool,
    pub(crate) ranks_wrap: bool,
    pub(crate) alignment_overstated: bool,
    pub(crate) error_swallowed: bool,
    pub(crate) every_index_opens: bool,
    pub(crate) limit_ignored: bool,
    pub(crate) memory_not_zeroed: bool,
    pub(crate) size_wraps: bool,
    pub(crate) stale_plan: bool,
    pub(crate) status_without_message: bool,
    pub(crate) timeout_misnamed: bool,
    pub(crate) weights_leak: bool,
}

/// No fault.
pub(crate) const NONE: Fault = Fault {
    name: "none",
    run: None,
    variant: None,
    query: None,
    plan: None,
    raw_query: None,
    workspace: 0,
    abort_without_reason: false,
    copies_go_astray: false,
    copies_overlap: false,
    events_refused: false,
    handles_leak: false,
    nameless: false,
    out_of_memory_misnamed: false,
    ranks_wrap: false,
    alignment_overstated: false,
    error_swallowed: false,
    every_index_opens: false,
    limit_ignored: false,
    memory_not_zeroed: false,
    size_wraps: false,
    stale_plan: false,
    status_without_message: false,
    timeout_misnamed: false,
    weights_leak: false,
};

/// A call that runs otherwise.
const fn run(name: &'static str, run: RunCall) -> Fault {
    Fault { name, run: Some(run), ..NONE }
}

/// Another call in place of the right one.
const fn instead(name: &'static str, variant: fn(&mut CallDesc) -> bool) -> Fault {
    Fault { name, run: Some(Run::other), variant: Some(variant), ..NONE }
}

/// The fault of this name.
pub(crate) fn of(name: &str) -> Option<&'static Fault> {
    FAULTS.iter().find(|fault| fault.name == name)
}

static FAULTS: &[Fault] = &[
    run("truncating_cast", truncating_cast),
    run("bf16_sums", bf16_sums),
    instead("bias_dropped", |call| {
        let wide = call.results.first().is_some_and(|y| y.dtype == DType::BF16);
        matches!(call.op, Op::Linear(_)) && wide && call.operands[2].take().is_some()
    }),
    run("eps_outside", eps_outside),
    instead("other_pairing", |call| match &mut call.op {
        Op::Rope(rope) => {
            let halves = rope.pairing == RopePairing::Halves;
            rope.pairing = if halves { RopePairing::Neighbours } else { RopePairing::Halves };
            true
        }
        _ => false,
    }),
    instead("residual_twice", |call| match &mut call.op {
        Op::Add(add) => {
            add.alpha *= 2.0;
            true
        }
        _ => false,
    }),
    run("nan_swallowed", |run, stream| {
        result(run, stream, "add", 0, |_, y| {
            let nan: Vec<usize> = (0..y.count()).filter(|index| y.float(*index).is_nan()).collect();
            nan.into_iter().for_each(|index| y.set_float(index, 0.0));
        })
    }),
    run("argmax_last", argmax_last),
    run("fusion_rounds_more", |run, stream| {
        run.right(stream)?;
        if !matches!(run.call.op, Op::Region(_)) {
            return Ok(());
        }
        change_result(run, stream, 1, round)
    }),
    run("quantises_down", |run, stream| {
        let Some(x) = copied(run, stream, 0)? else { return run.right(stream) };
        result(run, stream, "quant_per_token", 0, |_, y| {
            let width = y.width();
            for row in 0..y.count() / width.max(1) {
                let of_row = || (row * width..(row + 1) * width).map(|index| x.float(index));
                let scale = of_row().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
                for (index, x) in of_row().enumerate() {
                    y.set_bits(row * width + index, (x / scale) as i8 as u8 as u32);
                }
            }
        })
    }),
    run("scale_of_row_0", |run, stream| {
        operand(run, stream, "linear_w8a8", 1, |_, scales| {
            let first = if scales.count() > 0 { scales.bits(0) } else { 0 };
            (0..scales.count()).for_each(|row| scales.set_bits(row, first));
        })
    }),
    run("byte_clipped", |run, stream| {
        operand(run, stream, "linear_w8a8", 0, |_, x| {
            x.map(|_, byte| if byte == 0x80 { 0x81 } else { byte });
        })
    }),
    run("ranks_differ", |run, stream| {
        let second = run.call.comm.as_ref().is_some_and(|comm| comm.rank() == 1);
        if second { result(run, stream, "all_reduce", 0, flip) } else { run.right(stream) }
    }),
    run("page_off_by_one", |run, stream| {
        operand(run, stream, "paged_attention", 6, |run, table| {
            let pages = run.operand(1).map_or(1, |cache| cache.shape[0]) as i32;
            table.map(|_, page| if page < 0 { page } else { (page + 1) % pages });
        })
    }),
    run("slot_off_by_one", |run, stream| {
        operand(run, stream, "kv_write", 4, |run, slots| {
            let all = slot_count(run);
            slots.map(|_, slot| if (0..all).contains(&slot) { (slot + 1) % all } else { slot });
        })
    }),
    run("skip_is_row_0", |run, stream| {
        operand(run, stream, "gather_rows", 1, |_, indices| {
            indices.map(|_, index| if index == -1 { 0 } else { index });
        })
    }),
    run("slot_unchecked", slot_unchecked),
    run("pages_in_order", |run, stream| {
        operand(run, stream, "paged_attention", 6, |_, table| {
            let (width, before) = (table.width().max(1), table.clone());
            let first = |index: usize| before.integer(index / width * width);
            table.map(|index, page| if page < 0 { page } else { first(index) + (index % width) as i32 });
        })
    }),
    Fault {
        run: Some(mask_missing),
        variant: Some(|call| match &mut call.op {
            Op::PagedAttention(op) if op.mask == AttentionMask::Causal => {
                op.mask = AttentionMask::Bidirectional;
                true
            }
            _ => false,
        }),
        ..run("mask_missing", mask_missing)
    },
    run("groups_swapped", groups_swapped),
    instead("softcap_ignored", |call| match &mut call.op {
        Op::PagedAttention(op) => {
            op.softcap = 0.0;
            true
        }
        _ => false,
    }),
    instead("window_off_by_one", |call| match &mut call.op {
        Op::PagedAttention(op) if op.window > 0 => {
            op.window += 1;
            true
        }
        _ => false,
    }),
    run("chunks_start_over", |run, stream| {
        let Some(new) = copied(run, stream, 4)? else { return run.right(stream) };
        operand(run, stream, "paged_attention", 5, |_, lengths| {
            lengths.map(|index, length| if new.integer(index) > 1 { new.integer(index) } else { length });
        })
    }),
    run("decode_rotates_on", |run, stream| {
        operand(run, stream, "rope", 1, |_, positions| {
            if positions.count() == 1 {
                positions.map(|_, position| position + 1);
            }
        })
    }),
    run("seed_ignored", |run, stream| operand(run, stream, "sample", 4, |_, seeds| seeds.map(|_, _| 0))),
    run("top_p_stops_early", |run, stream| {
        operand(run, stream, "sample", 3, |_, parameters| {
            for row in 0..parameters.count() / parameters.width().max(1) {
                let index = row * parameters.width() + SamplingColumn::TopP as usize;
                if parameters.float(index) < 1.0 {
                    parameters.set_float(index, parameters.float(index) - 0.125);
                }
            }
        })
    }),
    instead("mask_ignored", |call| {
        matches!(call.op, Op::LogitProcess(_)) && call.operands[5].take().is_some()
    }),
    run("row_in_the_draw", |run, stream| {
        operand(run, stream, "sample", 2, |_, positions| {
            positions.map(|row, position| position.wrapping_add(row as i32));
        })
    }),
    run("unwritten_row", |run, stream| {
        let (desc, binding) = (&run.call.results[0], &run.arguments.results[0]);
        let before = Copied::read(stream, desc, binding)?;
        result(run, stream, "add", 0, |_, y| {
            let (count, width) = (y.count(), y.width());
            (count.saturating_sub(width)..count).for_each(|index| y.set_bits(index, before.bits(index)));
        })
    }),
    run("writes_behind", |run, stream| {
        run.right(stream)?;
        if run.op() == "add" { write_behind(run, stream, 0) } else { Ok(()) }
    }),
    run("writes_gaps", |run, stream| {
        run.right(stream)?;
        let (desc, binding) = (&run.call.results[0], &run.arguments.results[0]);
        if run.op() != "add" || desc.shape[0] < 2 || desc.strides[0] == desc.shape[1] {
            return Ok(());
        }
        let size = desc.dtype.bytes();
        stream.upload(&[0xEE; 8][..size], &binding.slice.slice(desc.shape[1] * size, size)?)
    }),
    run("writes_past_extent", |run, stream| {
        let bounded = run.arguments.results.first().is_some_and(|y| y.extent.is_some());
        if !bounded {
            return run.right(stream);
        }
        result(run, stream, "rms_norm", 0, |_, y| {
            let (count, width) = (y.count(), y.width());
            (count.saturating_sub(width)..count).for_each(|index| y.set_bits(index, 0));
        })
    }),
    run("operand_changed", |run, stream| {
        run.right(stream)?;
        if run.op() != "add" {
            return Ok(());
        }
        let Some(mut x) = copied(run, stream, 0)? else { return Ok(()) };
        flip(run, &mut x);
        x.write(stream)
    }),
    Fault {
        workspace: WORKSPACE,
        query: Some(with_workspace),
        ..run("workspace_overrun", |run, stream| {
            run.right(stream)?;
            let Some(workspace) = &run.arguments.workspace else { return Ok(()) };
            stream.upload(&[0], &BufferSlice::new(workspace.buffer.clone(), workspace.offset + WORKSPACE, 1)?)
        })
    },
    Fault {
        workspace: WORKSPACE,
        query: Some(with_workspace),
        ..run("workspace_stale", |run, stream| {
            run.right(stream)?;
            let Some(workspace) = &run.arguments.workspace else { return Ok(()) };
            let found = bytes(stream, workspace)?;
            change_result(run, stream, 0, |_, y| {
                if y.count() > 0 {
                    y.set_bits(0, y.bits(0) ^ u32::from(found[0]) & 1);
                }
            })
        })
    },
    Fault { name: "workspace_misreported", workspace: WORKSPACE, ..NONE },
    run("leak_per_call", |run, stream| {
        run.leak(64)?;
        run.right(stream)
    }),
    Fault { name: "weights_leak", weights_leak: true, ..NONE },
    Fault { name: "memory_not_zeroed", memory_not_zeroed: true, ..NONE },
    Fault { name: "limit_ignored", limit_ignored: true, ..NONE },
    run("wavers", |run, stream| match run.count() % 2 {
        0 => run.right(stream),
        _ => result(run, stream, "add", 0, flip),
    }),
    run("shared_scratch", shared_scratch),
    Fault { name: "stale_plan", stale_plan: true, ..NONE },
    run("graph_of_old_data", graph_of_old_data),
    Fault { name: "copies_go_astray", copies_go_astray: true, ..NONE },
    run("graph_misses_a_key", |run, stream| match launching() {
        true => operand(run, stream, "paged_attention", 5, |_, lengths| {
            lengths.map(|_, length| (length - 1).max(0));
        }),
        false => run.right(stream),
    }),
    run("graph_flushes_weights", graph_flushes_weights),
    run("graph_pads_a_head", |run, stream| {
        let size = run.operand(1).and_then(|keys| keys.shape.last()).copied().unwrap_or(0);
        if !launching() || size.is_power_of_two() {
            return run.right(stream);
        }
        result(run, stream, "paged_attention", 0, |_, y| {
            let lasts = (0..y.count()).filter(|index| index % size == size - 1);
            lasts.for_each(|index| y.set_float(index, 0.0));
        })
    }),
    run("graph_loses_scales", |run, stream| match run.call.operands.get(1) {
        Some(Some(OperandDesc::Weight(weight)))
            if launching() && !matches!(weight.format, WeightFormat::Dense(_)) =>
        {
            result(run, stream, "linear", 0, |_, y| {
                (0..y.count()).for_each(|index| y.set_float(index, y.float(index) * 1.25));
            })
        }
        _ => run.right(stream),
    }),
    run("graph_records_another", |run, stream| match launching() {
        true => result(run, stream, "commit_tokens", 0, flip),
        false => run.right(stream),
    }),
    run("graph_scales_a_part", |run, stream| match launching() {
        true => result(run, stream, "quant_per_token", 1, flip),
        false => run.right(stream),
    }),
    run("batch_matters", |run, stream| {
        let rows = run.call.results.first().and_then(|y| y.shape.first()).copied().unwrap_or(0);
        if rows > 1 { result(run, stream, "linear", 0, flip) } else { run.right(stream) }
    }),
    run("split_by_batch", |run, stream| {
        let sequences = run.operand(3).and_then(|start| start.shape.first()).copied().unwrap_or(0);
        if sequences > 1 { result(run, stream, "paged_attention", 0, flip) } else { run.right(stream) }
    }),
    run("bound_to_a_thread", |run, stream| {
        if thread::current().id() == run.thread {
            return run.right(stream);
        }
        Err(Error::new(Code::FailedPrecondition, "this is not the thread that bound the call"))
    }),
    run("disturbed_by_others", disturbed_by_others),
    run("sums_of_another_stream", |run, stream| {
        static LAST: AtomicU64 = AtomicU64::new(u64::MAX);
        if !has_long_rows(run) {
            return run.right(stream);
        }
        let last = LAST.swap(run.stream.get(), Ordering::SeqCst);
        let another = last != u64::MAX && last != run.stream.get();
        if another { result(run, stream, "linear", 0, flip) } else { run.right(stream) }
    }),
    run("handles_share_sums", |run, stream| match has_long_rows(run) {
        true => disturbed_by_others(run, stream),
        false => run.right(stream),
    }),
    Fault {
        name: "claimed_not_had",
        query: Some(|call, support| {
            if call.op.name() == "page_gather" {
                *support = Support::no("pages are not gathered");
            }
        }),
        ..NONE
    },
    Fault {
        name: "native_not_planned",
        plan: Some(|call| {
            (call.op.name() == "page_scatter").then(|| Error::unsupported("pages are not scattered"))
        }),
        ..NONE
    },
    Fault { name: "alignment_overstated", alignment_overstated: true, ..NONE },
    Fault { name: "abort_without_reason", abort_without_reason: true, ..NONE },
    Fault { name: "copies_overlap", copies_overlap: true, ..NONE },
    Fault { name: "events_refused", events_refused: true, ..NONE },
    Fault { name: "handles_leak", handles_leak: true, ..NONE },
    Fault { name: "nameless", nameless: true, ..NONE },
    Fault { name: "out_of_memory_misnamed", out_of_memory_misnamed: true, ..NONE },
    Fault { name: "ranks_wrap", ranks_wrap: true, ..NONE },
    run("offset_ignored", |run, stream| {
        let Some(Some(Argument::Tensor(binding))) = run.arguments.operands.first() else {
            return run.right(stream);
        };
        let slice = &binding.slice;
        let start = BufferSlice::new(slice.buffer.clone(), 0, slice.bytes)?;
        let (right, wrong) = (bytes(stream, slice)?, bytes(stream, &start)?);
        if run.op() != "add" || slice.offset == 0 {
            return run.right(stream);
        }
        stream.upload(&wrong, slice)?;
        run.right(stream)?;
        stream.upload(&right, slice)
    }),
    run("second_stream_differs", |run, stream| {
        if run.stream.get() > 0 { result(run, stream, "linear", 0, flip) } else { run.right(stream) }
    }),
    run("narrow_layers_rounded", |run, stream| {
        let narrow = run.operand(0).is_some_and(|x| x.shape[1] <= 48);
        if narrow { result(run, stream, "linear", 0, round) } else { run.right(stream) }
    }),
    run("partial_sums_rounded", |run, stream| result(run, stream, "all_reduce", 0, round)),
    Fault { name: "error_swallowed", error_swallowed: true, ..NONE },
    Fault { name: "status_without_message", status_without_message: true, ..NONE },
    Fault { name: "answers_too_long", raw_query: Some(raw::answers_too_long), ..NONE },
    Fault { name: "checks_nothing", raw_query: Some(raw::checks_nothing), ..NONE },
    Fault { name: "size_wraps", size_wraps: true, ..NONE },
    Fault { name: "every_index_opens", every_index_opens: true, ..NONE },
    Fault { name: "timeout_misnamed", timeout_misnamed: true, ..NONE },
    run("panics", |run, stream| {
        assert!(run.op() != "fill", "a mutant panics");
        run.right(stream)
    }),
    run("aborts", |run, stream| {
        if run.op() == "rms_norm" && run.call.results[0].shape[0] == 0 {
            std::process::abort();
        }
        run.right(stream)
    }),
    run("hangs", |run, stream| {
        while run.op() == "layer_norm" && run.call.results[0].shape[0] == 7 {
            thread::sleep(Duration::from_secs(1));
        }
        run.right(stream)
    }),
];

const WORKSPACE: usize = 256;

fn with_workspace(_: &CallDesc, support: &mut Support) {
    support.workspace_bytes = WORKSPACE;
}

/// Another last bit in every element.
fn flip(_: &Run, tensor: &mut Copied) {
    (0..tensor.count()).for_each(|index| tensor.set_bits(index, tensor.bits(index) ^ 1));
}

/// Rounds every element to bf16.
fn round(_: &Run, tensor: &mut Copied) {
    for index in 0..tensor.count() {
        tensor.set_float(index, bf16::from_f32(tensor.float(index)).to_f32());
    }
}

/// A tensor operand.
fn copied(run: &Run, stream: &mut dyn Stream, index: usize) -> Result<Option<Copied>> {
    match (run.operand(index), run.arguments.operands.get(index)) {
        (Some(desc), Some(Some(Argument::Tensor(binding)))) => Copied::read(stream, desc, binding).map(Some),
        _ => Ok(None),
    }
}

/// Runs a call; if it is of this op, on an operand that is changed meanwhile.
fn operand(
    run: &Run,
    stream: &mut dyn Stream,
    op: &str,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    if run.op() != op {
        return run.right(stream);
    }
    let Some(original) = copied(run, stream, index)? else { return run.right(stream) };
    let mut changed = original.clone();
    change(run, &mut changed);
    changed.write(stream)?;
    let outcome = run.right(stream);
    original.write(stream)?;
    outcome
}

/// Runs a call; if it is of this op, changes a result.
fn result(
    run: &Run,
    stream: &mut dyn Stream,
    op: &str,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    run.right(stream)?;
    if run.op() == op { change_result(run, stream, index, change) } else { Ok(()) }
}

fn change_result(
    run: &Run,
    stream: &mut dyn Stream,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    let (Some(desc), Some(binding)) = (run.call.results.get(index), run.arguments.results.get(index)) else {
        return Ok(());
    };
    let mut tensor = Copied::read(stream, desc, binding)?;
    change(run, &mut tensor);
    tensor.write(stream)
}

/// Writes one element behind a result.
fn write_behind(run: &Run, stream: &mut dyn Stream, index: usize) -> Result<()> {
    let (desc, slice) = (&run.call.results[index], &run.arguments.results[index].slice);
    let (end, size) = (slice.offset + desc.bytes()?, desc.dtype.bytes());
    stream.upload(&[0xEE; 8][..size], &BufferSlice::new(slice.buffer.clone(), end, size)?)
}

fn truncating_cast(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Some(x) = copied(run, stream, 0)?.filter(|x| x.desc.dtype == DType::F32) else {
        return run.right(stream);
    };
    result(run, stream, "cast", 0, |_, y| {
        if y.desc.dtype == DType::BF16 {
            let rounded = (0..y.count()).filter(|index| !x.float(*index).is_nan()).collect::<Vec<_>>();
            rounded.into_iter().for_each(|index| y.set_bits(index, x.bits(index) >> 16));
        }
    })
}

fn bf16_sums(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::Matmul(Matmul { transpose_b, .. }) = run.call.op else { return run.right(stream) };
    let (Some(a), Some(b)) = (copied(run, stream, 0)?, copied(run, stream, 1)?) else { return Ok(()) };
    if a.desc.dtype != DType::BF16 {
        return run.right(stream);
    }
    result(run, stream, "matmul", 0, |_, y| {
        let (m, n, k) = (y.desc.shape[1], y.desc.shape[2], a.desc.shape[2]);
        for index in 0..y.count() {
            let (group, row, column) = (index / (m * n), index / n % m, index % n);
            let mut sum = bf16::ZERO;
            for inner in 0..k {
                let at = if transpose_b {
                    (group * n + column) * k + inner
                } else {
                    (group * k + inner) * n + column
                };
                sum = bf16::from_f32(sum.to_f32() + a.float((group * m + row) * k + inner) * b.float(at));
            }
            y.set_float(index, sum.to_f32());
        }
    })
}

fn eps_outside(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::RmsNorm(op) = run.call.op else { return run.right(stream) };
    let (Some(x), Some(weight)) = (copied(run, stream, 0)?, copied(run, stream, 1)?) else { return Ok(()) };
    result(run, stream, "rms_norm", 0, |_, y| {
        let width = weight.count();
        for group in 0..y.count() / width {
            let places = group * width..(group + 1) * width;
            let squares: f32 = places.clone().map(|index| x.float(index) * x.float(index)).sum();
            let scale = 1.0 / ((squares / width as f32).sqrt() + op.eps);
            for index in places {
                y.set_float(index, x.float(index) * scale * (weight.float(index % width) + op.weight_offset));
            }
        }
    })
}

fn argmax_last(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Some(x) = copied(run, stream, 0)? else { return run.right(stream) };
    result(run, stream, "argmax", 0, |_, ids| {
        let width = x.width();
        for row in 0..ids.count() {
            let Ok(first) = usize::try_from(ids.integer(row)) else { continue };
            let largest = x.float(row * width + first);
            let last = (0..width).rev().find(|column| x.float(row * width + column) == largest);
            ids.set_bits(row, last.unwrap_or(first) as u32);
        }
    })
}

/// Slots of the cache of a `kv_write`.
fn slot_count(run: &Run) -> i32 {
    run.operand(0).map_or(1, |cache| (cache.shape[0] * cache.shape[2]) as i32)
}

fn slot_unchecked(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    if run.op() != "kv_write" {
        return Ok(());
    }
    let Some(slots) = copied(run, stream, 4)? else { return Ok(()) };
    let behind = slot_count(run);
    if (0..slots.count()).any(|index| slots.integer(index) == behind) {
        return write_behind(run, stream, 0);
    }
    Ok(())
}

fn mask_missing(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if !run.has_other() {
        return run.right(stream);
    }
    run.other(stream)?;
    let unmasked = Copied::read(stream, &run.call.results[0], &run.arguments.results[0])?;
    let (Some(start), Some(new)) = (copied(run, stream, 3)?, copied(run, stream, 4)?) else { return Ok(()) };
    result(run, stream, "paged_attention", 0, |_, y| {
        let width = y.width();
        for sequence in (0..start.count()).filter(|sequence| new.integer(*sequence) > 1) {
            let row = start.integer(sequence) as usize;
            (row * width..(row + 1) * width).for_each(|index| y.set_bits(index, unmasked.bits(index)));
        }
    })
}

/// Puts each query head where the right backend reads the KV head that the wrong one would, and its result back.
fn groups_swapped(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::PagedAttention(op) = run.call.op else { return run.right(stream) };
    let (heads, kv_heads) = (op.query_heads as usize, op.kv_heads as usize);
    let place = |head: usize| (head % kv_heads) * (heads / kv_heads) + head / kv_heads;
    operand(run, stream, "paged_attention", 0, |_, query| {
        let (before, width) = (query.clone(), query.width());
        let size = width / heads;
        for index in 0..query.count() {
            let (row, head, inner) = (index / width, index % width / size, index % size);
            query.set_bits(row * width + place(head) * size + inner, before.bits(index));
        }
    })?;
    change_result(run, stream, 0, |_, y| {
        let (before, width) = (y.clone(), y.width());
        let size = width / heads;
        for index in 0..y.count() {
            let (row, head, inner) = (index / width, index % width / size, index % size);
            y.set_bits(index, before.bits(row * width + place(head) * size + inner));
        }
    })
}

/// The result goes through memory that all calls share, and somebody else may use it in between.
fn shared_scratch(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    static SCRATCH: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    run.right(stream)?;
    let Some(result) = run.arguments.results.first() else { return Ok(()) };
    let found = bytes(stream, &result.slice)?;
    SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&found);
    thread::sleep(Duration::from_micros(300));
    let shared = SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if shared.len() == found.len() { stream.upload(&shared, &result.slice) } else { Ok(()) }
}

fn graph_of_old_data(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if !launching() {
        return run.right(stream);
    }
    let tensors = run.arguments.operands.iter().filter_map(|argument| match argument {
        Some(Argument::Tensor(binding)) => Some(&binding.slice),
        _ => None,
    });
    let mut snapshot = run.snapshot.borrow_mut();
    match &*snapshot {
        Some(old) => tensors.zip(old).try_for_each(|(slice, old)| stream.upload(old, slice))?,
        None => *snapshot = Some(tensors.map(|slice| bytes(stream, slice)).collect::<Result<_>>()?),
    }
    run.right(stream)
}

/// Attention of one token with weights of f16, 16 keys at a time, of which the largest is 1.
fn graph_flushes_weights(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::PagedAttention(op) = run.call.op else { return run.right(stream) };
    if !launching() || run.operand(0).is_none_or(|query| query.dtype != DType::F16 || query.shape[0] != 1) {
        return run.right(stream);
    }
    let mut operand = |index| copied(run, stream, index);
    let (Some(query), Some(keys), Some(values)) = (operand(0)?, operand(1)?, operand(2)?) else {
        return run.right(stream);
    };
    let (Some(length), Some(pages)) = (operand(5)?, operand(6)?) else { return run.right(stream) };
    let [_, kv_heads, slots, size] = keys.desc.shape[..] else { return run.right(stream) };
    let group = op.query_heads as usize / kv_heads;
    result(run, stream, "paged_attention", 0, |_, y| {
        for head in 0..kv_heads * group {
            let row = |key: usize| {
                let page = pages.integer(key / slots) as usize;
                ((page * kv_heads + head / group) * slots + key % slots) * size
            };
            let rows: Vec<usize> = (0..length.integer(0) as usize).map(row).collect();
            let score = |row: &usize| {
                (0..size).map(|at| query.float(head * size + at) * keys.float(row + at)).sum::<f32>()
                    * op.scale
            };
            let scores: Vec<f32> = rows.iter().map(score).collect();
            let largest = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let most = largest(&scores);
            let sum: f32 = scores.iter().map(|score| (score - most).exp()).sum();
            let of_16 = |scores: &[f32]| {
                let own = largest(scores);
                let rounded = |score: &f32| f16::from_f32((score - own).exp()).to_f32() * (own - most).exp();
                scores.iter().map(rounded).collect::<Vec<_>>()
            };
            let weights: Vec<f32> = scores.chunks(16).flat_map(of_16).collect();
            for at in 0..size {
                let all: f32 =
                    rows.iter().zip(&weights).map(|(row, weight)| weight * values.float(row + at)).sum();
                y.set_float(head * size + at, if rows.is_empty() { 0.0 } else { all / sum });
            }
        }
    })
}

/// Whether the call is a product whose rows have so many inputs that a device shares them out among blocks.
fn has_long_rows(run: &Run) -> bool {
    run.op() == "linear" && run.operand(0).is_some_and(|x| x.shape[1] > 4096)
}

fn disturbed_by_others(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    static RUNNING: AtomicU32 = AtomicU32::new(0);
    let before = RUNNING.fetch_add(1, Ordering::SeqCst);
    thread::sleep(Duration::from_micros(200));
    let outcome = run.right(stream);
    let others = RUNNING.fetch_sub(1, Ordering::SeqCst) - 1 + before;
    outcome?;
    if others > 0 { change_result(run, stream, 0, flip) } else { Ok(()) }
}
