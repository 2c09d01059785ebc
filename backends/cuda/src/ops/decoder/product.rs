//! The products of a decoder layer: which weights the kernel supports, and how each is divided into runs of outputs that fill
//! slots of the ring buffer.

use crate::ops::weight::{Offset, Packing};
use dsrun_core::{DType, WeightFormat};

/// Products of a layer: query, key and value; output projection; first half of the MLP; second half of the MLP. With experts,
/// the router's product is an additional one.
pub(super) const PRODUCTS: usize = 4;
/// Consumer warps of a block. An additional producer warp copies weights.
pub(super) const WARPS: usize = 8;
/// Bits of an element of a dense weight.
const DENSE: usize = 16;
/// Inputs that a warp multiplies in one step with packed integers: two groups of activations, each with one scale.
pub(super) const STEP: usize = 256;
/// Outputs of a unit, the smallest block of packed weights.
pub(super) const OUTPUTS: usize = 8;
/// The number of inputs of a slot of packed weights at most, summed over its units: of integers, two steps per warp, or one where
/// shared memory has no room for enough such slots.
pub(super) const SLOT_COLUMNS: [usize; 2] = [2 * WARPS * STEP, WARPS * STEP];

/// The packing of a format if the kernel supports it: integers of 4 bits with a scale per 128 inputs, or of 8 bits with a scale per
/// output; or floats of 4 bits with a scale per 32 inputs.
pub(super) fn packing(format: WeightFormat) -> Option<Packing> {
    Packing::of(format).filter(|packing| match (packing.bits, packing.offset) {
        (4, Offset::Fixed(8)) => packing.group == STEP / 2,
        (8, Offset::Fixed(128)) => packing.group == 0,
        (4, Offset::Floats) => packing.group == 32,
        _ => false,
    })
}

/// Whether products by these weights need the activations as planes of bytes.
pub(super) fn needs_planes(packing: Option<Packing>) -> bool {
    packing.is_some_and(|packing| packing.offset != Offset::Floats)
}

/// Whether the kernel supports a weight of `rows` outputs and `columns` inputs, if `of_experts` of each of several experts, with
/// activations of this type.
pub(super) fn takes(
    format: WeightFormat,
    activations: DType,
    [rows, columns]: [usize; 2],
    of_experts: bool,
) -> bool {
    let step = if of_experts { STEP } else { STEP / 2 };
    let known = match (format, packing(format)) {
        (WeightFormat::Dense(dtype), _) => dtype == activations && columns.is_multiple_of(64),
        (_, Some(Packing { offset: Offset::Floats, group, .. })) => columns.is_multiple_of(group),
        (_, packing) => packing.is_some() && columns.is_multiple_of(step),
    };
    known && rows.is_multiple_of(16) && rows.max(columns) < 1 << 20
}

/// The sizes of a product. A tile has `runs` runs of neighbouring outputs.
pub(super) struct Product {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) runs: usize,
    pub(super) packing: Option<Packing>,
    /// The length of every run must divide this number of neighbouring outputs.
    pub(super) together: usize,
    /// The number of inputs of a slot of packed weights at most, summed over its units.
    pub(super) slot_columns: usize,
    /// Whether the weights are those of experts.
    pub(super) of_experts: bool,
    /// If the inputs consist of pieces that are not contiguous in memory, the length of one piece: a ring slot holds inputs of a
    /// single piece, or with packed weights several whole ones.
    pub(super) piece: Option<usize>,
}

/// The outputs of a run, and the number of its inputs that one slot of the ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

impl Run {
    /// Bytes of the slot, scales of groups included; those of outputs are not.
    pub(super) fn bytes(&self, packing: Option<Packing>) -> usize {
        let elements = self.outputs * self.inputs;
        match packing {
            None => elements * DENSE / 8,
            Some(Packing { bits, group: 0, .. }) => elements * bits / 8,
            Some(packing) => {
                elements * packing.bits / 8 + elements / OUTPUTS / packing.group * packing.line()
            }
        }
    }
}

impl Product {
    /// Bytes of a slot with a run; those of experts have the scales of its outputs, unless groups have scales.
    pub(super) fn slot_bytes(&self, run: Run) -> usize {
        let by_output = self.packing.filter(|packing| self.of_experts && packing.group == 0);
        let rows = run.outputs / OUTPUTS * self.pieces_of_slot(run);
        run.bytes(self.packing) + by_output.map_or(0, |packing| rows * packing.line())
    }

    /// The number of pieces that a slot holds whole; 1 if it holds a part of one.
    fn pieces_of_slot(&self, run: Run) -> usize {
        (run.inputs / self.padded()).max(1)
    }

    /// Whether a slot holds whole rows, where rows are those of dense experts: the kernel was not tried with parts of them. The second
    /// half of the MLP has parts of the concatenated rows.
    pub(super) fn takes_rows_of_experts(&self, run: Run) -> bool {
        let dense_experts = self.of_experts && self.packing.is_none();
        !dense_experts || self.piece.is_some() || run.inputs == self.inputs
    }

    /// The inputs of a row in memory, with its padding.
    fn padded(&self) -> usize {
        let row = self.piece.unwrap_or(self.inputs);
        self.packing.map_or(row, |packing| row.next_multiple_of(packing.span()))
    }

    /// The run of a product with packed weights: two units, or one, if they fit into a slot with all their inputs. Otherwise one
    /// unit over several slots: of integers, so that all warps have the same number of steps in every slot but the last; of floats,
    /// so that slots are as equal as whole steps make them. If several pieces fit into a slot, it holds several, so that slots do not
    /// become so small that waiting for them takes longer than reading them.
    fn units(&self) -> Run {
        let pieces_at_once = self.slot_columns / self.padded();
        if let (Some(piece), 2..) = (self.piece, pieces_at_once) {
            let slots = (self.inputs / piece).div_ceil(pieces_at_once);
            return Run { outputs: OUTPUTS, inputs: (self.inputs / piece).div_ceil(slots) * self.padded() };
        }
        if !needs_planes(self.packing) && (self.piece.is_some() || self.padded() > self.slot_columns) {
            let slots = self.padded().div_ceil(self.slot_columns);
            return Run {
                outputs: OUTPUTS,
                inputs: self.padded().div_ceil(slots).next_multiple_of(STEP / 2),
            };
        }
        if let Some(piece) = self.piece {
            // The largest equal part of a piece that fits into a slot.
            let parts = (1..=piece / STEP).filter(|steps| (piece / STEP).is_multiple_of(*steps));
            let longest = parts.map(|steps| steps * STEP).filter(|inputs| *inputs <= self.slot_columns).max();
            return Run { outputs: OUTPUTS, inputs: longest.unwrap_or(STEP) };
        }
        let whole = |units: &usize| {
            units * self.padded() <= self.slot_columns
                && self.together.is_multiple_of(units * OUTPUTS)
                && self.outputs.is_multiple_of(self.runs * units * OUTPUTS)
        };
        if let Some(units) = [2, 1].into_iter().find(whole) {
            return Run { outputs: units * OUTPUTS, inputs: self.padded() };
        }
        Run { outputs: OUTPUTS, inputs: self.slot_columns.min(self.padded()) }
    }

    /// The longest run that fits into a slot of `slot` bytes with all its inputs; if none does, the shortest run over several
    /// equal slots.
    pub(super) fn run(&self, slot: usize) -> Run {
        if self.packing.is_some() {
            return self.units();
        }
        // The A operand of the mma has 16 rows of 32 inputs; a run of fewer outputs fills them with further inputs.
        let unit = |outputs: usize| 16 / outputs * 32;
        let inputs = self.piece.unwrap_or(self.inputs);
        let possible = |outputs: &usize| {
            inputs.is_multiple_of(unit(*outputs))
                && self.outputs.is_multiple_of(self.runs * outputs)
                && self.together.is_multiple_of(*outputs)
        };
        let whole = |outputs: usize| Run { outputs, inputs };
        let mut lengths = [8, 4, 2].into_iter().filter(possible);
        if let Some(run) = lengths.clone().map(whole).find(|run| run.bytes(None) <= slot) {
            return run;
        }
        if self.piece.is_some() {
            // The largest equal parts of a piece that fit.
            let parts = |outputs: usize| {
                let units = inputs / unit(outputs);
                let even = (1..=units).filter(move |parts| units.is_multiple_of(*parts));
                even.map(move |parts| Run { outputs, inputs: inputs / parts })
            };
            let fitting = lengths.clone().flat_map(parts).filter(|run| run.bytes(None) <= slot);
            if let Some(run) = fitting.max_by_key(|run| run.bytes(None)) {
                return run;
            }
        }
        let outputs = lengths.next_back().unwrap_or(8);
        let pieces = whole(outputs).bytes(None).div_ceil(slot);
        Run { outputs, inputs: self.inputs.div_ceil(pieces).next_multiple_of(unit(outputs)) }
    }

    pub(super) fn bytes(&self) -> usize {
        Run { outputs: self.outputs, inputs: self.inputs }.bytes(self.packing)
    }

    pub(super) fn tiles(&self, run: Run) -> usize {
        self.outputs / (self.runs * run.outputs)
    }

    /// The number of warp teams that alternate on runs, for this number of blocks: two if a block has several runs that fit into
    /// a slot with all their inputs. While one team waits for its next run, the other one multiplies.
    pub(super) fn teams(&self, run: Run, blocks: usize) -> usize {
        let several = self.outputs / run.outputs > blocks;
        if several && self.packing.is_none() && run.inputs == self.inputs { 2 } else { 1 }
    }

    /// Partial sums of a tile: 16 per warp of a team and run.
    pub(super) fn sums(&self, teams: usize) -> usize {
        self.runs * 16 * WARPS / teams
    }

    /// Bytes of the slots that the whole weight fills, with slots of `slot` bytes.
    pub(super) fn bytes_in_slots(&self, slot: usize) -> usize {
        let (run, row) = (self.run(slot), self.piece.unwrap_or(self.inputs));
        let rows = (self.inputs / row).div_ceil(self.pieces_of_slot(run));
        self.outputs / run.outputs * (rows * self.padded().div_ceil(run.inputs)) * slot
    }
}
