//! How products of more than 128 rows are cut: `linear/tile_wgmma.cu`.

use crate::{
    driver::kernel_spec::KernelSpec,
    ops::gemm::small_batch::{ALIGNMENT, DEPTH, Planes, TURN},
};
use dsrun_core::Result;
use std::fmt::Display;

/// Rows of a tile, 64 for each warpgroup that multiplies.
const GROUPS: usize = 2;
pub(super) const ROWS: usize = GROUPS * 64;
pub(super) const THREADS: usize = (GROUPS + 1) * 128;
/// Outputs of a tile: which of them keeps all multiprocessors busy to the end depends on how many there are in all.
const OUTPUTS: [usize; 4] = [256, 224, 192, 128];
/// Blocks that share what they read of the weights: a cluster.
const CLUSTER: usize = 2;
/// Shared memory for the ring.
const ROOM: usize = 224 << 10;
const MOST_STAGES: usize = 8;
/// Results that are written at once.
pub(super) const VECTOR: usize = 8;
/// Outputs of which each lane of four has 8 neighbours.
pub(super) const ORDER: usize = 32;
/// What the end of a tile costs, in turns.
const END: usize = 2;
/// Rows up to which a product is faster here than with cuBLASLt, if it keeps so many in a hundred of the multiprocessors busy: of a
/// product with a sum, and of one by itself, in front of which cuBLASLt clears a counter. Measured on an H200: of more rows cuBLASLt
/// has a little more out of the tensor cores.
const MOST_ROWS: usize = 1024;
const MOST_ROWS_ALONE: usize = 2048;
const BUSY: usize = 85;

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileConfig {
    /// Outputs of a tile.
    pub(super) outputs: usize,
    /// Blocks, of which each takes tiles in turns.
    pub(super) blocks: usize,
    /// Whether weights are fetched in the order of the lanes that have their results: by the [`ORDER`].
    pub(super) ordered: bool,
    stages: usize,
    /// How many in a hundred of the multiprocessors have something to do.
    busy: usize,
}

impl TileConfig {
    /// The cut with which the busiest multiprocessor has least to do.
    pub(super) fn new(rows: usize, outputs: usize, inputs: usize, gated: bool, sm_count: usize) -> Self {
        let clusters = (sm_count / CLUSTER).max(1);
        let turns = inputs.div_ceil(DEPTH) + END;
        let tiles = |in_tile: usize| rows.div_ceil(ROWS * CLUSTER) * outputs.div_ceil(in_tile);
        let cost = |in_tile: &usize| tiles(*in_tile).div_ceil(clusters) * turns * in_tile;
        let results = if gated { outputs / 2 } else { outputs };
        let outputs = OUTPUTS.into_iter().min_by_key(cost).unwrap_or(OUTPUTS[0]);
        let stages = (ROOM / ((ROWS + outputs) * TURN)).min(MOST_STAGES);
        let pairs = tiles(outputs);
        let busy = 100 * pairs / (pairs.div_ceil(clusters) * clusters).max(1);
        let ordered = results.is_multiple_of(ORDER) && (outputs / 2).is_multiple_of(ORDER);
        Self { outputs, blocks: pairs.min(clusters) * CLUSTER, ordered, stages, busy }
    }

    /// Whether a product that needs nothing behind it, or a sum at most, is worth it.
    pub(super) fn pays(&self, rows: usize, sum: bool) -> bool {
        rows <= if sum { MOST_ROWS } else { MOST_ROWS_ALONE } && self.busy >= BUSY
    }

    /// The kernel, but for its epilogue.
    pub(super) fn kernel(&self, planes: &Planes<'_>) -> Result<KernelSpec> {
        let [half, bias] = planes.types()?;
        let defines: [(_, &dyn Display); 8] = [
            ("GROUPS", &GROUPS),
            ("OUTPUTS", &self.outputs),
            ("STAGES", &self.stages),
            ("ORDERED", &i32::from(self.ordered)),
            ("HALF", &half),
            ("BIAS", &bias),
            ("BIASED", &i32::from(planes.bias.is_some())),
            ("LIMITED", &i32::from(planes.limited)),
        ];
        let shared = ALIGNMENT + self.stages * (ROWS + self.outputs) * TURN;
        Ok(KernelSpec::new("linear/tile_wgmma.cu", "tile_wgmma", defines).with_shared(shared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::query_key_value(512, 6144, 4096)]
    #[case::output(512, 4096, 4096)]
    #[case::gate(512, 28_672, 4096)]
    #[case::many_rows(2048, 4096, 14_336)]
    #[case::one_tile(129, 8, 8)]
    fn clusters_are_whole_and_all_there_at_once(
        #[case] rows: usize,
        #[case] outputs: usize,
        #[case] inputs: usize,
    ) {
        let cut = TileConfig::new(rows, outputs, inputs, false, 132);
        assert!(cut.blocks > 0 && cut.blocks <= 132 && cut.blocks.is_multiple_of(CLUSTER), "{cut:?}");
    }

    #[rstest]
    #[case::all_even(2048, 28_672, true)]
    #[case::halves_of_a_tile(512, 28_672, true)]
    #[case::halves_of_the_outputs(2048, 28_704, true)]
    #[case::outputs(2048, 6152, false)]
    fn what_is_ordered_is_made_of_whole_groups(
        #[case] rows: usize,
        #[case] outputs: usize,
        #[case] gated: bool,
    ) {
        let cut = TileConfig::new(rows, outputs, 4096, gated, 132);
        let results = if gated { outputs / 2 } else { outputs };
        let whole = results.is_multiple_of(ORDER) && (cut.outputs / 2).is_multiple_of(ORDER);
        assert!(whole || !cut.ordered, "{cut:?}");
    }

    #[test]
    fn rings_fit() {
        for outputs in OUTPUTS {
            let stages = (ROOM / ((ROWS + outputs) * TURN)).min(MOST_STAGES);
            assert!(stages >= 4 && (outputs / 2 * TURN).is_multiple_of(ALIGNMENT));
        }
    }
}
