//! The cost of a step on a mesh: bytes that each rank reads, operations that it computes, and bytes that ranks exchange.
//!
//! The passes `shard` and `partition` and the planner all use this model, so that strategies are chosen by the same figures that
//! are shown to the user.

use dsrun_core::{
    DType, Size, TensorType,
    op::{Op, OperandType},
};

/// The speeds of a mesh, and the step that a strategy is chosen for.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct MeshCosts {
    /// Bytes per second that a rank reads from its memory.
    pub memory_bandwidth: f64,
    /// Floating-point operations per second of a rank in matrix products.
    pub operations: f64,
    /// Bytes per second that a rank exchanges with the others.
    pub link_bandwidth: f64,
    /// Microseconds of an all-reduce, besides its bytes. Small ones usually have a faster path than other collectives.
    pub latency_us: f64,
    /// Microseconds of an all-gather or a reduce-scatter, besides its bytes.
    pub gather_latency_us: f64,
    /// Tokens of the step.
    pub tokens: usize,
    /// Sequences of the step, each of which has a KV cache of its own to read.
    pub sequences: usize,
    /// Tokens of each sequence in the KV cache.
    pub context: usize,
    /// The price of holding weights and KV cache: each byte on a rank costs as much as reading it this many times. It favours
    /// splitting over replication, which leaves less memory for requests.
    pub memory_price: f64,
}

impl Default for MeshCosts {
    fn default() -> Self {
        Self::ACCELERATORS
    }
}

/// The name of the number of output rows in programs: rows whose logits are needed.
const OUTPUT_ROWS: &str = "rows";

/// The work of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// Bytes that it reads and writes.
    pub(crate) bytes: f64,
    /// Floating-point operations of its matrix products.
    operations: f64,
}

impl Work {
    /// Seconds of its bytes.
    pub(crate) fn read_seconds(self, costs: &MeshCosts) -> f64 {
        self.bytes / costs.memory_bandwidth
    }

    /// Seconds of its operations.
    pub(crate) fn compute_seconds(self, costs: &MeshCosts) -> f64 {
        self.operations / costs.operations
    }
}

/// Picoseconds of a second.
const SECOND: f64 = 1e12;

impl MeshCosts {
    /// Accelerators with their own memory and fast links between them. The figures are chosen, as round numbers of this kind of
    /// device, and not measured.
    pub const ACCELERATORS: Self = Self {
        memory_bandwidth: 3e12,
        operations: 4e14,
        link_bandwidth: 2e11,
        latency_us: 4.0,
        gather_latency_us: 10.0,
        tokens: 16,
        sequences: 16,
        context: 1024,
        memory_price: 8.0,
    };

    /// Ranks that share the processors and the memory of a host. The figures are chosen, not measured.
    pub const HOST: Self = Self {
        memory_bandwidth: 1e10,
        operations: 1e11,
        link_bandwidth: 4e9,
        latency_us: 20.0,
        gather_latency_us: 20.0,
        ..Self::ACCELERATORS
    };

    /// Checks that every number is usable.
    ///
    /// # Errors
    /// Names the field at fault.
    pub(crate) fn check(&self) -> dsrun_core::Result<()> {
        let positive = [
            ("memory-bandwidth", self.memory_bandwidth),
            ("operations", self.operations),
            ("link-bandwidth", self.link_bandwidth),
        ];
        let not_negative = [
            ("latency-us", self.latency_us),
            ("gather-latency-us", self.gather_latency_us),
            ("memory-price", self.memory_price),
        ];
        let wrong = |(field, value): (&str, f64), rule: &str| {
            dsrun_core::Error::invalid(format!("is {value}, must be {rule}")).at("costs").field(field)
        };
        if let Some(found) = positive.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
            return Err(wrong(found, "positive"));
        }
        match not_negative.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some(found) => Err(wrong(found, "0 or more")),
            None => Ok(()),
        }
    }

    /// The step size at which computing takes as long as reading 16-bit weights. Smaller steps are memory-bound.
    pub(crate) fn balanced_tokens(&self) -> usize {
        (self.operations / self.memory_bandwidth) as usize
    }

    /// Picoseconds of reading bytes.
    pub(super) fn read(&self, bytes: f64) -> u64 {
        (bytes / self.memory_bandwidth * SECOND) as u64
    }

    /// Picoseconds that are charged for holding bytes.
    pub(super) fn hold(&self, bytes: u64) -> u64 {
        self.read(bytes as f64 * self.memory_price)
    }

    /// Picoseconds of an all-gather or a reduce-scatter of a tensor; `bytes` is the size of the whole tensor.
    pub(crate) fn gather(&self, bytes: f64, ranks: usize) -> u64 {
        let share = (ranks - 1) as f64 / ranks as f64;
        ((bytes * share / self.link_bandwidth + self.gather_latency_us * 1e-6) * SECOND) as u64
    }

    /// Picoseconds of an all-reduce of a tensor.
    pub(crate) fn all_reduce(&self, bytes: f64, ranks: usize) -> u64 {
        let share = 2.0 * (ranks - 1) as f64 / ranks as f64;
        ((bytes * share / self.link_bandwidth + self.latency_us * 1e-6) * SECOND) as u64
    }

    /// Picoseconds of sending a tensor to the next stage.
    pub(crate) fn send(&self, bytes: f64) -> u64 {
        ((bytes / self.link_bandwidth + self.gather_latency_us * 1e-6) * SECOND) as u64
    }

    /// The rows of a tensor in the step. A sequence has one output row.
    fn rows(&self, size: &Size) -> usize {
        match size {
            Size::Static(rows) => *rows,
            Size::Bounded(name) if &**name == OUTPUT_ROWS => self.sequences,
            _ => self.tokens,
        }
    }

    /// The bytes of a tensor in the step. Columns of the request table do not count: a step reads few of their rows.
    pub(crate) fn bytes(&self, tensor: &TensorType) -> f64 {
        let size = |size: &Size| match size {
            Size::Static(size) => *size as f64,
            Size::Bounded(_) => self.rows(size) as f64,
            Size::Bucket(_) => 0.0,
        };
        tensor.shape.iter().map(size).product::<f64>() * tensor.dtype.bytes() as f64
    }

    /// Picoseconds of a call on a rank: of the bytes that it reads and writes, or of its operations if these take longer. `whole` is
    /// the op before it was split.
    pub(crate) fn call(
        &self,
        op: &Op,
        whole: &Op,
        operands: &[Option<OperandType>],
        results: &[TensorType],
    ) -> u64 {
        let work = self.work(op, whole, operands, results);
        self.read(work.bytes).max((work.compute_seconds(self) * SECOND) as u64)
    }

    /// The work of a call on a rank. `whole` is the op before it was split.
    pub(crate) fn work(
        &self,
        op: &Op,
        whole: &Op,
        operands: &[Option<OperandType>],
        results: &[TensorType],
    ) -> Work {
        let tensors = operands.iter().flatten().filter_map(|operand| match operand {
            OperandType::Tensor(tensor) => Some(tensor),
            OperandType::Weight(_) => None,
        });
        let activations: f64 = tensors.chain(results).map(|tensor| self.bytes(tensor)).sum();
        let weights: f64 = match op {
            // Only the looked-up rows of the table are read, and they are counted as the result.
            Op::Embed(_) => 0.0,
            Op::GroupedLinear(own) => {
                let all = if let Op::GroupedLinear(all) = whole { all.count } else { own.count };
                let slots = operands.get(2).and_then(|experts| match experts {
                    Some(OperandType::Tensor(tensor)) => tensor.shape.get(1)?.known(),
                    _ => None,
                });
                let read = self.read_experts(own.count, all, slots.unwrap_or(1));
                operands.iter().flatten().map(weight_bytes).sum::<f64>() * read
            }
            _ => operands.iter().flatten().map(weight_bytes).sum(),
        };
        let caches: f64 = match op {
            Op::PagedAttention(_) => operands.iter().flatten().map(|operand| self.cache_bytes(operand)).sum(),
            _ => 0.0,
        };
        let operations = self.operations_of(op, operands, results);
        Work { bytes: activations + weights + caches, operations }
    }

    /// The floating-point operations of the matrix products of a call: two for each multiply-add.
    fn operations_of(&self, op: &Op, operands: &[Option<OperandType>], results: &[TensorType]) -> f64 {
        let elements = || -> f64 {
            let weights = operands.iter().flatten().filter_map(|operand| match operand {
                OperandType::Weight(weight) => weight.elements().ok(),
                OperandType::Tensor(_) => None,
            });
            weights.sum::<usize>() as f64
        };
        let rows = results.first().and_then(|result| result.shape.first());
        let rows = rows.map_or(self.tokens, |rows| self.rows(rows)) as f64;
        match op {
            Op::Linear(_) | Op::LinearW8A8(_) | Op::LinearA8(_) | Op::HeadLinear(_) => {
                2.0 * rows * elements()
            }
            // Each row is multiplied with the matrix of every expert that it is routed to.
            Op::GroupedLinear(op) => {
                let slots = operands.get(2).and_then(|experts| match experts {
                    Some(OperandType::Tensor(tensor)) => tensor.shape.get(1)?.known(),
                    _ => None,
                });
                2.0 * rows * elements() * slots.unwrap_or(1) as f64 / f64::from(op.count.max(1))
            }
            // A product for the scores, and one for the values.
            Op::PagedAttention(op) => {
                let width =
                    results.first().and_then(|result| result.shape.get(1)?.known()).unwrap_or(0) as f64;
                let keys = if op.window > 0 { self.context.min(op.window as usize) } else { self.context };
                4.0 * rows * keys as f64 * width
            }
            _ => 0.0,
        }
    }

    /// The share of its own experts that the slowest rank reads, if it holds `own` of `all` experts and tokens choose experts at
    /// random.
    fn read_experts(&self, own: u32, all: u32, slots: usize) -> f64 {
        let (own, all, chosen) = (f64::from(own), f64::from(all), (self.tokens * slots) as f64);
        let mean = chosen * own / all;
        // Approximately the maximum over the ranks of the number of assignments, for independent choices.
        let most = (mean + (2.0 * mean * (all / own).ln()).sqrt()).min(chosen);
        1.0 - (1.0 - 1.0 / own).powf(most)
    }

    /// The bytes of a KV cache that attention reads.
    fn cache_bytes(&self, operand: &OperandType) -> f64 {
        match operand {
            OperandType::Tensor(TensorType { dtype, shape }) => match &shape[..] {
                [_, heads, _, width] => {
                    slot_bytes(*dtype, heads, width) * (self.sequences * self.context) as f64
                }
                _ => 0.0,
            },
            OperandType::Weight(_) => 0.0,
        }
    }
}

fn slot_bytes(dtype: DType, heads: &Size, width: &Size) -> f64 {
    let known = |size: &Size| size.known().unwrap_or(0) as f64;
    known(heads) * known(width) * dtype.bytes() as f64
}

fn weight_bytes(operand: &OperandType) -> f64 {
    match operand {
        OperandType::Weight(weight) => weight.bytes().unwrap_or(usize::MAX) as f64,
        OperandType::Tensor(_) => 0.0,
    }
}
