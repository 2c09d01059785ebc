//! Paged attention of single tokens: `attention/decode.cu`.

use super::{KernelSpec, Machine, Recipe, operand, type_name};
use crate::launch::{Frame, Function, Parameters, Step};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{AttentionMask, PagedAttention},
};
use std::{fmt::Display, sync::Arc};

/// The most query heads of a tile: rows of a product.
const ROWS: usize = 16;
/// The same for heads of more than [`LONG`] elements, whose sums would not fit.
const ROWS_OF_LONG: usize = 8;
const LONG: usize = 128;
/// The largest head: its accumulators live in registers.
const MAX_HEAD: usize = 256;
/// The most splits of a sequence's keys.
const MAX_SPLITS: usize = 32;
/// The most splits that merge their results through each other's shared memory: what every device has.
const MAX_CLUSTER: usize = 8;
/// Blocks on a multiprocessor that keep enough reads under way.
const BLOCKS: usize = 2;
/// Bytes of keys and values under way in a block, at most; three such blocks fit on a multiprocessor.
const UNDER_WAY: usize = 64 << 10;
/// The most units under way in a warp.
const STAGES: usize = 2;
/// Threads of a block.
const THREADS: usize = 128;

/// Whether vectors of 16 bytes can be loaded: heads of whole vectors, all strides but the last too.
fn vectors(tensor: &TensorDesc, size: usize) -> bool {
    let (_, outer) = tensor.strides.split_last().unwrap_or((&1, &[]));
    size.is_multiple_of(8) && outer.iter().all(|stride| stride.is_multiple_of(8))
}

/// A launch of the kernel.
pub(super) struct Decode {
    pub(super) spec: KernelSpec,
    /// The grid: rows or sequences, KV heads and parts of their groups, splits.
    grid: [usize; 3],
    group: usize,
    parts: usize,
    op: PagedAttention,
    pub(super) workspace: usize,
    pub(super) persistent: usize,
}

impl Decode {
    /// The kernel, if it takes the types and heads: for all rows, or for those of sequences that have one alone.
    pub(super) fn plan(
        op: &PagedAttention,
        call: &CallDesc,
        machine: &Machine,
        singles: bool,
    ) -> Result<Option<Self>> {
        let (query, keys, values) = (operand(call, 0)?, operand(call, 1)?, operand(call, 2)?);
        let (tokens, sequences) = (query.shape[0], operand(call, 3)?.shape[0]);
        let (key_size, value_size) = (keys.shape[3], values.shape[3]);
        let takes = machine.capability >= 80
            && matches!(query.dtype, DType::F16 | DType::BF16)
            && keys.dtype == query.dtype
            && (8..=MAX_HEAD).contains(&key_size)
            && (8..=MAX_HEAD).contains(&value_size)
            && vectors(query, key_size)
            && vectors(keys, key_size)
            && vectors(values, value_size)
            && keys.shape[2] > 0
            && op.mask != AttentionMask::Explicit;
        if !takes {
            return Ok(None);
        }
        let group = (op.query_heads / op.kv_heads.max(1)).max(1) as usize;
        let most = if key_size.max(value_size) > LONG { ROWS_OF_LONG } else { ROWS };
        let heads = (1..=most.min(group)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        let parts = group / heads;
        let columns = op.kv_heads as usize * parts;
        let rows = if singles { sequences } else { tokens };
        let blocks = rows * columns;
        // No more than there is room for: blocks that wait for others to end cost more than a few idle multiprocessors.
        let splits = (machine.processors * BLOCKS / blocks.max(1)).clamp(1, MAX_SPLITS);
        let cluster = if machine.capability >= 90 { splits.min(MAX_CLUSTER) } else { 1 };
        let splits = splits.next_multiple_of(cluster);
        let row = key_size.next_multiple_of(64) + value_size.next_multiple_of(64);
        let unit = THREADS / 32 * 16 * row * 2;
        let stages = (UNDER_WAY / unit).clamp(1, STAGES);
        let mask = if op.mask == AttentionMask::Causal { 1 } else { 2 };
        let defines: [(_, &dyn Display); 13] = [
            ("Q", &type_name(query.dtype)?),
            ("HALF", &i32::from(query.dtype == DType::F16)),
            ("KEY_SIZE", &key_size),
            ("VALUE_SIZE", &value_size),
            ("HEADS", &heads),
            ("SLOTS", &keys.shape[2]),
            ("STAGES", &stages),
            ("CLUSTER", &cluster),
            ("MASK", &mask),
            ("WINDOW", &i32::from(op.window > 0)),
            ("SOFTCAP", &i32::from(op.softcap > 0.0)),
            ("ALIBI", &i32::from(call.tensor(8).is_some())),
            ("SINGLES", &i32::from(singles)),
        ];
        let spec = KernelSpec::new("attention/decode.cu", "decode", defines).with_shared(stages * unit);
        let merged = splits > cluster;
        Ok(Some(Self {
            spec,
            grid: [rows, columns, splits],
            group,
            parts,
            op: *op,
            workspace: if merged { blocks * (splits / cluster) * heads * (value_size + 4) * 4 } else { 0 },
            persistent: if merged { blocks * cluster * 4 } else { 0 },
        }))
    }

    /// The launch, with scratch and zeroed memory of its own.
    pub(super) fn step(
        &self,
        frame: &Frame,
        function: &Arc<Function>,
        workspace: u64,
        persistent: u64,
    ) -> Result<Option<Step>> {
        let (query, keys, values) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, total) = (frame.tensor(3)?, frame.tensor(4)?, frame.tensor(5)?);
        let (table, y, log) = (frame.tensor(6)?, frame.result(0)?, frame.result(1)?);
        let [key_page, key_head, key_slot] = super::cache::strides(keys);
        let [value_page, value_head, value_slot] = super::cache::strides(values);
        let parameters = Parameters::default()
            .extent(start.size(0), &[start, length, total, table])
            .extent(query.size(0), &[query, y, log])
            .float(self.op.scale)
            .float(self.op.softcap)
            .words([
                query.address,
                query.stride(0) as u64,
                keys.address,
                key_page,
                key_head,
                key_slot,
                values.address,
                value_page,
                value_head,
                value_slot,
                start.address,
                length.address,
                total.address,
                start.size(0) as u64,
                table.address,
                table.stride(0) as u64,
                table.size(1) as u64,
                keys.size(0) as u64,
                frame.address(8),
                frame.address(9),
                self.group as u64,
                self.parts as u64,
                u64::from(self.op.window),
                y.address,
                y.stride(0) as u64,
                log.address,
                log.stride(0) as u64,
                self.grid[2] as u64,
                workspace,
                persistent,
            ]);
        Ok(Step::kernel(function, self.grid, THREADS, parameters))
    }
}

/// The kernel by itself, if every sequence has one token at most as far as the sizes tell, and it takes the types and heads.
pub(super) fn recipe(op: &PagedAttention, call: &CallDesc, machine: &Machine) -> Result<Option<Recipe>> {
    if operand(call, 0)?.shape[0] > operand(call, 3)?.shape[0] {
        return Ok(None);
    }
    let Some(decode) = Decode::plan(op, call, machine, false)? else { return Ok(None) };
    Ok(Some(Recipe {
        kernels: vec![decode.spec.clone()],
        workspace: decode.workspace,
        persistent: decode.persistent,
        // How keys are split depends on how many sequences there may be.
        batch_invariant: false,
        steps: Box::new(move |frame, functions, _| {
            let function = functions.first().ok_or_else(|| Error::internal("a recipe without a kernel"))?;
            Ok(decode.step(frame, function, frame.workspace, frame.persistent)?.into_iter().collect())
        }),
    }))
}
