//! Attention of single tokens whose rows are quantised where they are: `attention/decode.cu` with `QUANTISED`.
//!
//! Programs do not know of it. When calls are captured as a graph, `paged_attention` and the `quant_per_token` of its result behind it
//! are found here and launched as one kernel, which writes to the bit what theirs would have written one after the other: the
//! result, and its bytes and scales.

use super::{KernelSpec, Machine};
use crate::{
    context::Context,
    kernels::Work,
    launch::{Launch, Step},
    memory::CudaBuffer,
};
use dsrun_core::{Result, device::MemoryKind, kernels::CallDesc, op::Op};
use std::{ops::Range, sync::Arc};

/// Calls that become one launch.
const CALLS: usize = 2;
/// The longest row: a thread keeps 64 elements.
const MOST_COLUMNS: usize = 8192;
/// Elements that are read and written at once.
const VECTOR: u64 = 8;
/// Blocks on a multiprocessor that are there at once.
const AT_ONCE: usize = 2;
/// Numbers of parameters of attention: the extent of its tokens.
const TOKENS: usize = 1;
/// The same of `quant_per_token`: the extent of its rows, their length, and where they are and go.
const ROWS: usize = 0;
const COLUMNS: usize = 1;
const X_ROW: usize = 3;
const BYTES: usize = 7;
const BYTES_ROW: usize = 8;
const SCALES: usize = 9;

/// Where calls follow each other that become one launch, as ranges.
pub(crate) fn find(calls: &[Work]) -> Vec<Range<usize>> {
    let starts = 0..(calls.len() + 1).saturating_sub(CALLS);
    let found = |start: &usize| Pair::of(&calls[*start..]).is_some();
    starts.filter(found).map(|start| start..start + CALLS).collect()
}

/// Attention, and what quantises its result.
struct Pair<'a> {
    kernel: &'a KernelSpec,
    attention: &'a Launch,
    quantisation: &'a Launch,
}

impl<'a> Pair<'a> {
    fn of(calls: &'a [Work]) -> Option<Self> {
        let [first, second, ..] = calls else { return None };
        let ops = [first, second].map(|work| &work.call().op);
        let [Op::PagedAttention(_), Op::QuantPerToken(_)] = ops else { return None };
        let ([Step::Kernel(attention)], [Step::Kernel(quantisation)]) = (first.steps(), second.steps())
        else {
            return None;
        };
        let [kernel] = first.kernels() else { return None };
        let [blocks, _, splits] = attention.grid;
        let columns = blocks * constant(kernel, "HEADS")? * constant(kernel, "VALUE_SIZE")?;
        let whole = kernel.entry == "decode" && splits == 1 && columns <= MOST_COLUMNS;
        // The rows that are quantised are all of what attention writes.
        let same = first.traffic.writes.first()? == second.traffic.reads.first()?
            && attention.parameters.of(TOKENS) == quantisation.parameters.of(ROWS)
            && quantisation.parameters.of(COLUMNS) == [columns as u64];
        let vectors = [COLUMNS, X_ROW, BYTES_ROW]
            .into_iter()
            .all(|number| quantisation.parameters.of(number).iter().all(|size| size.is_multiple_of(VECTOR)));
        (whole && same && vectors).then_some(Self { kernel, attention, quantisation })
    }
}

/// The launch that stands for both.
#[derive(Debug)]
pub(crate) struct Quantised {
    pub(crate) step: Step,
    /// How many blocks of each row are through.
    _through: Arc<CudaBuffer>,
}

impl Quantised {
    /// Sets up the launch for calls that [`find`] found.
    pub(crate) fn new(calls: &[Work], context: &Arc<Context>) -> Result<Option<Self>> {
        let Some(Pair { kernel, attention, quantisation }) = Pair::of(calls) else { return Ok(None) };
        let [blocks, rows, _] = attention.grid;
        let function = context.function(&kernel_of(kernel, blocks, rows, &context.machine))?;
        let through = CudaBuffer::new(context.clone(), rows * size_of::<u32>(), MemoryKind::Device)?;
        let word = |number: usize| quantisation.parameters.of(number).first().copied().unwrap_or(0);
        let results = [word(BYTES), word(BYTES_ROW), word(SCALES), through.pointer];
        let parameters = attention.parameters.clone().words(results);
        let step = Step::kernel(&function, attention.grid, attention.threads, parameters);
        Ok(step.map(|step| Self { step, _through: Arc::new(through) }))
    }
}

/// The kernels that a graph of such calls would have for attention whose rows are quantised, if each reads what the one before
/// left. Where there are no clusters, splits do not show in a kernel: one too many costs the time to build it.
pub(crate) fn foreseen(calls: &[CallDesc], machine: &Machine) -> Vec<KernelSpec> {
    let kernel = |calls: &[CallDesc]| {
        let [attention, quantisation] = calls else { return None };
        let [Op::PagedAttention(_), Op::QuantPerToken(_)] = [&attention.op, &quantisation.op] else {
            return None;
        };
        let &[rows, columns] = &attention.results.first()?.shape[..] else { return None };
        let recipe = super::recipe(attention, machine).ok()?;
        let [kernel] = &recipe.kernels[..] else { return None };
        let of_block = constant(kernel, "HEADS")? * constant(kernel, "VALUE_SIZE")?;
        let whole = kernel.entry == "decode"
            && constant(kernel, "CLUSTER") == Some(1)
            && columns <= MOST_COLUMNS
            && columns.is_multiple_of(of_block);
        (whole && quantisation.tensor(0)?.shape == [rows, columns])
            .then(|| kernel_of(kernel, columns / of_block, rows, machine))
    };
    calls.windows(CALLS).filter_map(kernel).collect()
}

/// A constant of a kernel that is a number.
fn constant(kernel: &KernelSpec, name: &str) -> Option<usize> {
    kernel.defines.iter().find(|(known, _)| *known == name)?.1.parse().ok()
}

/// The kernel that stands for both calls, for so many rows, of which each has so many blocks.
fn kernel_of(attention: &KernelSpec, blocks: usize, rows: usize, machine: &Machine) -> KernelSpec {
    let mut kernel = quantised_kernel(attention, blocks);
    if blocks * rows <= AT_ONCE * machine.processors {
        // Nothing fetched ahead: 32 sequences of a model with w8a8 were 0.7% faster so when a launch of its own made heads. Where
        // the product finishes them, it made no difference.
        for (_, value) in kernel.defines.iter_mut().filter(|(name, _)| *name == "AHEAD") {
            "0".clone_into(value);
        }
    }
    kernel
}

/// The kernel of attention that quantises its rows, of which each has so many blocks.
#[must_use]
pub fn quantised_kernel(attention: &KernelSpec, blocks: usize) -> KernelSpec {
    let mut kernel = attention.clone();
    for (name, value) in &mut kernel.defines {
        if *name == "QUANTISED" {
            *value = blocks.to_string();
        }
    }
    kernel
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::{
        DType, TensorDesc,
        kernels::OperandDesc,
        op::{AttentionMask, PagedAttention, QuantPerToken},
    };
    use rstest::rstest;

    fn call(op: impl Into<Op>, operands: Vec<Option<OperandDesc>>) -> CallDesc {
        let mut call = CallDesc { op: op.into(), operands, results: Vec::new(), comm: None };
        let inferred = call.op.infer(&call.operand_types()).unwrap();
        call.results = inferred
            .iter()
            .map(|result| TensorDesc::dense(result.dtype, &result.resolve(&|_| None).unwrap()))
            .collect();
        call
    }

    /// Attention of so many sequences, 8 KV heads of 128, and what quantises so many columns.
    fn calls(sequences: usize, group: usize, columns: usize) -> [CallDesc; 2] {
        let tensor = |dtype, shape: &[usize]| Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)));
        let words = || tensor(DType::I32, &[sequences]);
        let query = tensor(DType::BF16, &[sequences, 8 * group * 128]);
        let cache = || tensor(DType::BF16, &[64, 8, 16, 128]);
        let attention = PagedAttention {
            query_heads: 8 * group as u32,
            kv_heads: 8,
            scale: 0.1,
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
        };
        let (table, work) = (tensor(DType::I32, &[sequences, 4]), tensor(DType::I32, &[0]));
        let operands =
            vec![query, cache(), cache(), words(), words(), words(), table, work, None, None, None];
        [call(attention, operands), call(QuantPerToken {}, vec![tensor(DType::BF16, &[sequences, columns])])]
    }

    #[rstest]
    #[case::many_sequences(32, 4, 4096, Some("8"))]
    #[case::other_columns(32, 4, 2048, None)]
    #[case::keys_are_split(2, 4, 4096, None)]
    #[case::rows_too_long(32, 16, 16_384, None)]
    fn attention_that_quantises_is_foreseen(
        #[case] sequences: usize,
        #[case] group: usize,
        #[case] columns: usize,
        #[case] blocks: Option<&str>,
    ) {
        let machine = Machine { capability: 90, processors: 132, blas: true, skinny: true };
        let kernels = foreseen(&calls(sequences, group, columns), &machine);
        let found: Vec<_> = kernels
            .iter()
            .flat_map(|kernel| kernel.defines.iter().filter(|(name, _)| *name == "QUANTISED"))
            .map(|(_, value)| value.as_str())
            .collect();
        assert_eq!(found, Vec::from_iter(blocks));
    }
}
