//! The faults. Each changes what is planned, what a call reads before it runs, or what it has written after.

use crate::{
    change::{change_result, copied, flip, operand, result, round, write_behind},
    faulty_caches::{cache_quantised_down, cache_scale_ignored, cache_scale_of_next_row},
    faulty_calls::{
        argmax_last, bf16_sums, disturbed_by_others, eps_outside, graph_of_old_data, groups_swapped,
        has_long_rows, mask_missing, region_flushes_weights, shared_scratch, slot_count, slot_unchecked,
        truncating_cast,
    },
    faulty_experts::{bias_of_expert_0, selection_bias_weighs, skipped_to_expert_0, ties_to_the_last},
    faulty_groups::{minima_forgotten, one_scale_for_a_row, sums_of_16_bits},
    faulty_latents::{rest_before_value, rest_not_scored},
    faulty_masks, faulty_process,
    raw::{self, Query},
    tensor::{Copied, bytes},
    wrap::{AccountFault, Run, StreamFault, in_region},
};
use dsrun_core::{
    BlockFormat, Code, DType, Error, Result, WeightFormat,
    device::{BufferSlice, Stream},
    kernels::{Argument, Arguments, CallDesc, OperandDesc, Support},
    op::{AttentionMask, GroupScore, IN_PROMPT, MoeRoute, Op, RopePairing, RouterNorm, SamplingColumn},
};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

/// Runs a call in its own way.
type RunCall = fn(&Run, &mut dyn Stream) -> Result<()>;

/// Changes the arguments that a call is bound to.
type ChangeArguments = fn(&mut Arguments);

/// Where a backend goes wrong; all empty is right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) name: &'static str,
    /// The op whose calls `run` and `arguments` are for; `None` for all.
    pub(crate) op: Option<&'static str>,
    /// Changes what a call is bound to.
    pub(crate) arguments: Option<ChangeArguments>,
    /// What is wrong with streams.
    pub(crate) stream: Option<StreamFault>,
    /// What is wrong with the account of memory.
    pub(crate) accounts: Option<AccountFault>,
    /// Says that it flushes subnormal numbers of all types.
    pub(crate) declares_flushing: bool,
    /// Copies the operands and extents when a call is bound, for [`Run::snapshot`].
    pub(crate) copied_when_bound: bool,
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
    /// Keeps the elements of packed weights for [`Run::weight`].
    pub(crate) weights_kept: bool,
    pub(crate) weights_leak: bool,
    /// The last byte of a packed weight is not copied.
    pub(crate) packed_short: bool,
    /// An adopted weight is read at the start of its buffer.
    pub(crate) adopted_early: bool,
    /// A weight in pinned memory keeps the bytes that it had when it was adopted.
    pub(crate) pinned_copied: bool,
    /// An operand in pinned memory keeps the bytes that it had when the call was bound.
    pub(crate) pinned_operand_copied: bool,
}

/// No fault.
pub(crate) const NONE: Fault = Fault {
    name: "none",
    op: None,
    arguments: None,
    copied_when_bound: false,
    declares_flushing: false,
    stream: None,
    accounts: None,
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
    weights_kept: false,
    weights_leak: false,
    packed_short: false,
    adopted_early: false,
    pinned_copied: false,
    pinned_operand_copied: false,
};

/// A call that runs otherwise.
pub(crate) const fn run(name: &'static str, run: RunCall) -> Fault {
    Fault { name, run: Some(run), ..NONE }
}

/// Another call in place of the right one.
pub(crate) const fn instead(name: &'static str, variant: fn(&mut CallDesc) -> bool) -> Fault {
    Fault { name, run: Some(Run::other), variant: Some(variant), ..NONE }
}

const fn stream(name: &'static str, fault: StreamFault) -> Fault {
    Fault { name, stream: Some(fault), ..NONE }
}

const fn accounts(name: &'static str, fault: AccountFault) -> Fault {
    Fault { name, accounts: Some(fault), ..NONE }
}

/// Samples with other parameters.
fn filters(run: &Run, stream: &mut dyn Stream, change: fn(&mut [f32])) -> Result<()> {
    operand(run, stream, "sample", 3, |_, parameters| {
        let width = parameters.width().max(1);
        for row in 0..parameters.count() / width {
            let mut values: Vec<f32> = (0..width).map(|at| parameters.float(row * width + at)).collect();
            change(&mut values);
            values.iter().enumerate().for_each(|(at, value)| parameters.set_float(row * width + at, *value));
        }
    })
}

/// Changes the attributes of a router.
fn router(call: &mut CallDesc, change: impl FnOnce(&mut MoeRoute)) -> bool {
    match &mut call.op {
        Op::MoeRoute(op) => {
            change(op);
            true
        }
        _ => false,
    }
}

/// The fault of this name.
pub(crate) fn of(name: &str) -> Option<&'static Fault> {
    FAULTS.iter().find(|fault| fault.name == name)
}

static FAULTS: &[Fault] = &[
    run("truncating_cast", truncating_cast),
    Fault { weights_kept: true, ..run("bf16_sums", bf16_sums) },
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
    run("one_scale_for_a_row", one_scale_for_a_row),
    run("scale_of_next_group", |run, stream| {
        operand(run, stream, "linear_a8", 1, |_, scales| {
            let (before, groups) = (scales.clone(), scales.width().max(1));
            for index in 0..scales.count() {
                let (row, group) = (index / groups, index % groups);
                scales.set_bits(index, before.bits(row * groups + (group + 1) % groups));
            }
        })
    }),
    run("last_group_dropped", |run, stream| {
        operand(run, stream, "linear_a8", 1, |_, scales| {
            let groups = scales.width();
            let lasts = (0..scales.count()).filter(|index| index % groups == groups - 1);
            lasts.for_each(|index| scales.set_float(index, 0.0));
        })
    }),
    instead("group_bias_dropped", |call| {
        matches!(call.op, Op::LinearA8(_)) && call.operands[3].take().is_some()
    }),
    Fault { weights_kept: true, ..run("minima_forgotten", minima_forgotten) },
    Fault { weights_kept: true, ..run("sums_of_16_bits", sums_of_16_bits) },
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
    run("masked_values_multiplied", |run, stream| {
        faulty_masks::hidden_multiplied(run, stream, true, faulty_masks::later)
    }),
    run("masked_keys_multiplied", |run, stream| {
        faulty_masks::hidden_multiplied(run, stream, false, faulty_masks::later)
    }),
    run("left_values_multiplied", |run, stream| {
        faulty_masks::hidden_multiplied(run, stream, true, faulty_masks::left)
    }),
    run("left_keys_multiplied", |run, stream| {
        faulty_masks::hidden_multiplied(run, stream, false, faulty_masks::left)
    }),
    run("scores_overflow", faulty_masks::scores_overflow),
    run("skipped_weight_multiplied", faulty_masks::skipped_weight_multiplied),
    run("zeros_in_order", faulty_masks::zeros_in_order),
    run("region_swallows_nan", faulty_masks::region_swallows_nan),
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
    instead("not_renormalised", |call| router(call, |op| op.norm = RouterNorm::None)),
    instead("router_scale_ignored", |call| router(call, |op| op.scale = 1.0)),
    instead("router_eps_ignored", |call| router(call, |op| op.eps = 0.0)),
    instead("groups_ignored", |call| router(call, |op| (op.groups, op.top_groups) = (1, 1))),
    instead("groups_by_their_best", |call| router(call, |op| op.group_score = GroupScore::Max)),
    instead("sparse_mixer_drops_all", |call| router(call, |op| op.threshold = 0.0)),
    instead("router_bias_dropped", |call| {
        matches!(call.op, Op::MoeRoute(_)) && call.operands[1].take().is_some()
    }),
    instead("expert_scale_dropped", |call| {
        matches!(call.op, Op::MoeRoute(_)) && call.operands[3].take().is_some()
    }),
    run("selection_bias_weighs", selection_bias_weighs),
    run("ties_to_the_last", ties_to_the_last),
    run("skipped_slot_written", |run, stream| skipped_to_expert_0(run, stream, "grouped_linear")),
    run("skipped_slot_summed", |run, stream| skipped_to_expert_0(run, stream, "moe_combine")),
    run("bias_of_expert_0", bias_of_expert_0),
    instead("expert_bias_dropped", |call| {
        matches!(call.op, Op::GroupedLinear(_)) && call.operands[3].take().is_some()
    }),
    instead("first_expert_ignored", |call| match &mut call.op {
        Op::MoeGroup(op) => {
            op.first_expert = 0;
            true
        }
        _ => false,
    }),
    run("cache_quantised_down", cache_quantised_down),
    run("cache_scale_ignored", cache_scale_ignored),
    run("cache_scale_of_next_row", cache_scale_of_next_row),
    run("rest_not_scored", rest_not_scored),
    run("rest_dropped", |run, stream| {
        let Some(Some(OperandDesc::Weight(weight))) = run.call.operands.get(1) else {
            return run.right(stream);
        };
        let columns = weight.columns();
        operand(run, stream, "head_linear", 0, |run, x| {
            let Op::HeadLinear(op) = run.call.op else { return };
            let head = x.width() / op.heads as usize;
            (0..x.count()).filter(|index| index % head >= columns).for_each(|index| x.set_float(index, 0.0));
        })
    }),
    run("heads_rotated", |run, stream| {
        operand(run, stream, "head_linear", 0, |run, x| {
            let Op::HeadLinear(op) = run.call.op else { return };
            let (before, width) = (x.clone(), x.width());
            let head = width / op.heads as usize;
            for index in 0..x.count() {
                let (row, column) = (index / width, index % width);
                x.set_bits(index, before.bits(row * width + (column + head) % width));
            }
        })
    }),
    run("latent_slot_off_by_one", |run, stream| {
        operand(run, stream, "latent_write", 3, |run, slots| {
            let all = slot_count(run);
            slots.map(|_, slot| if (0..all).contains(&slot) { (slot + 1) % all } else { slot });
        })
    }),
    run("rest_before_value", rest_before_value),
    run("routes_past_extent", |run, stream| {
        let bounded = run.arguments.results.first().is_some_and(|experts| experts.extent.is_some());
        if !bounded {
            return run.right(stream);
        }
        result(run, stream, "moe_route", 0, |_, experts| {
            let (count, width) = (experts.count(), experts.width());
            (count.saturating_sub(width)..count).for_each(|index| experts.set_bits(index, 0));
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
    Fault { name: "packed_short", packed_short: true, ..NONE },
    Fault { name: "adopted_early", adopted_early: true, ..NONE },
    Fault { name: "pinned_copied", pinned_copied: true, ..NONE },
    Fault { name: "pinned_operand_copied", pinned_operand_copied: true, ..NONE },
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
    run("region_misses_a_key", |run, stream| match in_region() {
        true => operand(run, stream, "paged_attention", 5, |_, lengths| {
            lengths.map(|_, length| (length - 1).max(0));
        }),
        false => run.right(stream),
    }),
    run("region_flushes_weights", region_flushes_weights),
    run("region_pads_a_head", |run, stream| {
        let size = run.operand(1).and_then(|keys| keys.shape.last()).copied().unwrap_or(0);
        if !in_region() || size.is_power_of_two() {
            return run.right(stream);
        }
        result(run, stream, "paged_attention", 0, |_, y| {
            let lasts = (0..y.count()).filter(|index| index % size == size - 1);
            lasts.for_each(|index| y.set_float(index, 0.0));
        })
    }),
    // A norm follows, which would hide a common factor.
    run("region_halves_capped", |run, stream| match run.call.op {
        Op::PagedAttention(op) if in_region() && op.softcap > 0.0 => {
            result(run, stream, "paged_attention", 0, |_, y| {
                (0..y.count()).step_by(2).for_each(|index| y.set_float(index, y.float(index) * 0.5));
            })
        }
        _ => run.right(stream),
    }),
    run("region_shifts_windows", |run, stream| match run.call.op {
        Op::PagedAttention(op) if in_region() && op.window > 0 => {
            operand(run, stream, "paged_attention", 5, |_, lengths| {
                lengths.map(|_, length| (length - 1).max(0));
            })
        }
        _ => run.right(stream),
    }),
    run("region_enlarges_parallel", |run, stream| match in_region() {
        true => operand(run, stream, "add", 2, |_, mlp| {
            (0..mlp.count()).for_each(|index| mlp.set_float(index, mlp.float(index) * 1.25));
        }),
        false => run.right(stream),
    }),
    run("region_loses_scales", |run, stream| match run.call.operands.get(1) {
        Some(Some(OperandDesc::Weight(weight)))
            if in_region() && !matches!(weight.format, WeightFormat::Dense(_)) =>
        {
            result(run, stream, "linear", 0, |_, y| {
                (0..y.count()).for_each(|index| y.set_float(index, y.float(index) * 1.25));
            })
        }
        _ => run.right(stream),
    }),
    run("region_enlarges_experts", |run, stream| match run.call.operands.get(1) {
        Some(Some(OperandDesc::Weight(weight)))
            if in_region() && !matches!(weight.format, WeightFormat::Dense(_)) =>
        {
            result(run, stream, "grouped_linear", 0, |_, y| {
                (0..y.count()).for_each(|index| y.set_float(index, y.float(index) * 1.25));
            })
        }
        _ => run.right(stream),
    }),
    run("region_loses_sinks", |run, stream| match in_region() {
        true => operand(run, stream, "paged_attention", 9, |_, sinks| {
            (0..sinks.count()).for_each(|index| sinks.set_float(index, f32::NEG_INFINITY));
        }),
        false => run.right(stream),
    }),
    run("region_enlarges_floats", |run, stream| match run.call.operands.get(1) {
        Some(Some(OperandDesc::Weight(weight)))
            if in_region() && weight.format == WeightFormat::Block(BlockFormat::Mxfp4) =>
        {
            result(run, stream, "linear", 0, |_, y| {
                (0..y.count()).for_each(|index| y.set_float(index, y.float(index) * 1.25));
            })
        }
        _ => run.right(stream),
    }),
    run("region_forgets_weights", |run, stream| match in_region() {
        true => operand(run, stream, "moe_combine", 1, |_, weights| {
            let first = if weights.count() > 0 { weights.float(0) } else { 0.0 };
            (0..weights.count()).for_each(|index| weights.set_float(index, first));
        }),
        false => run.right(stream),
    }),
    run("region_enlarges_sums", |run, stream| match in_region() {
        true => result(run, stream, "all_reduce", 0, |_, y| {
            (0..y.count()).for_each(|index| y.set_float(index, y.float(index) * 1.25));
        }),
        false => run.right(stream),
    }),
    run("region_records_another", |run, stream| match in_region() {
        true => result(run, stream, "commit_tokens", 0, flip),
        false => run.right(stream),
    }),
    run("region_scales_a_part", |run, stream| match in_region() {
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
    stream("copies_words", StreamFault::CopiesWords),
    stream("copies_from_words", StreamFault::CopiesFromWords),
    stream("fills_words", StreamFault::FillsWords),
    stream("uploads_to_words", StreamFault::UploadsToWords),
    stream("uploads_late", StreamFault::UploadsLate),
    stream("waits_ignored", StreamFault::WaitsIgnored),
    stream("freed_calls_forgotten", StreamFault::FreedForgotten),
    stream("events_early", StreamFault::EventsEarly),
    accounts("weights_uncounted", AccountFault::WeightsUncounted),
    accounts("buffers_kept", AccountFault::NeverFreed),
    accounts("handles_share_an_account", AccountFault::SharedByHandles),
    run("sets_environment", faulty_process::sets_environment),
    run("changes_folder", faulty_process::changes_folder),
    run("ignores_a_signal", faulty_process::ignores_a_signal),
    run("temperature_at_least_a_tenth", |run, stream| {
        filters(run, stream, |row| {
            row[SamplingColumn::Temperature as usize] = row[0].max(0.1).min(row[0] * 1e9)
        })
    }),
    run("top_k_of_256_at_most", |run, stream| {
        filters(run, stream, |row| {
            let k = &mut row[SamplingColumn::TopK as usize];
            *k = if *k == 0.0 { 0.0 } else { k.min(256.0) };
        })
    }),
    run("min_p_alone_ignored", |run, stream| {
        filters(run, stream, |row| {
            if row[SamplingColumn::TopK as usize] == 0.0 && row[SamplingColumn::TopP as usize] == 1.0 {
                row[SamplingColumn::MinP as usize] = 0.0;
            }
        })
    }),
    run("top_k_drops_min_p", |run, stream| {
        filters(run, stream, |row| {
            if row[SamplingColumn::TopK as usize] > 0.0 {
                row[SamplingColumn::MinP as usize] = 0.0;
            }
        })
    }),
    run("top_p_of_most_is_all", |run, stream| {
        filters(run, stream, |row| {
            let p = &mut row[SamplingColumn::TopP as usize];
            *p = if *p > 0.9 { 1.0 } else { *p };
        })
    }),
    run("temperature_of_two_at_most", |run, stream| filters(run, stream, |row| row[0] = row[0].min(2.0))),
    run("counts_of_a_byte", |run, stream| {
        operand(run, stream, "logit_process", 3, |_, counts| {
            counts.map(|_, count| count & IN_PROMPT | count & 0xFF);
        })
    }),
    run("padding_ends_the_batch", |run, stream| {
        operand(run, stream, "sample", 1, |_, requests| {
            let all: Vec<i32> = (0..requests.count()).map(|row| requests.integer(row)).collect();
            if let Some(first) = all.windows(16).position(|window| window.iter().all(|request| *request < 0))
            {
                requests.map(|row, request| if row > first { -1 } else { request });
            }
        })
    }),
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
    run("large_gathers_changed", |run, stream| {
        let large = run.call.results.first().is_some_and(|y| y.shape[0] >= 1024);
        if large { result(run, stream, "all_gather", 0, flip) } else { run.right(stream) }
    }),
    Fault { name: "error_swallowed", error_swallowed: true, ..NONE },
    Fault { name: "status_without_message", status_without_message: true, ..NONE },
    Fault { name: "answers_too_long", raw_query: Some(raw::answers_too_long), ..NONE },
    Fault { name: "checks_nothing", raw_query: Some(raw::checks_nothing), ..NONE },
    Fault { name: "size_wraps", size_wraps: true, ..NONE },
    Fault { name: "every_index_opens", every_index_opens: true, ..NONE },
    Fault { name: "timeout_misnamed", timeout_misnamed: true, ..NONE },
    run("panics", |run, stream| {
        assert!(run.op() != "columns", "a mutant panics");
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
