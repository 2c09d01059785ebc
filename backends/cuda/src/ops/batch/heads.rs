//! Queries, keys and values where their product is: `linear/heads.cuh`.

use super::TURN;
use crate::{
    launch::TensorMap,
    ops::{
        chain::{self, Chain},
        operand, result,
    },
    weight::CudaWeight,
};
use dsrun_core::{DType, Result, TensorDesc, kernels::CallDesc, op::RopePairing};

/// Outputs that belong together: eight, and the eight that they are turned with.
const UNIT: usize = 16;
const EIGHT: usize = UNIT / 2;
/// Where a row goes is counted in eights, in 32 bits.
const FARTHEST: usize = EIGHT * u32::MAX as usize;

/// In which order a tile has its outputs: `ORDER` of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    AsTheyAre = 0,
    ByHalves = 1,
    ByNeighbours = 2,
}

/// What the outputs of a product are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) struct Heads {
    /// How many there are, of queries, keys and values.
    count: usize,
    size: usize,
    /// Pairs of a head that are turned.
    pairs: usize,
    pairing: Option<RopePairing>,
}

impl Heads {
    /// The heads of a chain, if they can be made where the product is.
    pub(in crate::ops) fn of(chain: &Chain, heads: &chain::Heads, call: &CallDesc) -> Result<Option<Self>> {
        let Some([size, value_size, pairs]) = chain.head_sizes(call)? else { return Ok(None) };
        let [query, keys, values] =
            [result(call, 0)?, operand(call, heads.caches[0])?, operand(call, heads.caches[1])?];
        let pairing = heads.turn.map(|turn| turn.pairing);
        let whole = |tensor: &TensorDesc| {
            let (_, outer) = tensor.strides.split_last().unwrap_or((&1, &[]));
            let farthest: usize =
                tensor.shape.iter().zip(&tensor.strides).map(|(size, stride)| size * stride).sum();
            outer.iter().all(|stride| stride.is_multiple_of(EIGHT)) && farthest < FARTHEST
        };
        let turns = match pairing {
            Some(RopePairing::Halves) => 2 * pairs == size,
            _ => 2 * pairs <= size,
        };
        let takes = heads.norms.is_none()
            && size == value_size
            && size.is_multiple_of(UNIT)
            && pairs.is_multiple_of(EIGHT)
            && turns
            && matches!(query.dtype, DType::F16 | DType::BF16)
            && [keys.dtype, values.dtype] == [query.dtype; 2]
            && [query, keys, values].into_iter().all(whole)
            && query.shape[0].saturating_mul(pairs) < 1 << 31;
        let count = heads.columns.iter().sum::<usize>() / size.max(1);
        Ok(takes.then_some(Self { count, size, pairs, pairing }))
    }

    /// Of few rows outputs are the rows of a sum, which a lane has of both eights; of many rows they are its columns, of which a
    /// lane has neighbours.
    fn order(&self, few: bool) -> Order {
        match self.pairing {
            Some(RopePairing::Halves) => Order::ByHalves,
            Some(RopePairing::Neighbours) if few => Order::ByNeighbours,
            _ => Order::AsTheyAre,
        }
    }

    /// Units that are copied at once where a block needs `outputs` of them: none of another head.
    fn units(&self, outputs: usize) -> usize {
        let (mut a, mut b) = (self.size / UNIT, outputs / UNIT);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    }

    /// The constants of the kernels that copy so many outputs for a block.
    pub(super) fn defines(&self, few: bool, outputs: usize) -> [(&'static str, String); 4] {
        [
            ("ORDER", (self.order(few) as u32).to_string()),
            ("HEAD", self.size.to_string()),
            ("PAIRS", self.pairs.to_string()),
            ("UNITS", self.units(outputs).to_string()),
        ]
    }

    /// The weights in that order; none if they are as they are.
    pub(super) fn map(
        &self,
        weight: &CudaWeight,
        bytes: u64,
        few: bool,
        outputs: usize,
    ) -> Result<Option<TensorMap>> {
        // Rows between neighbours of an eight, between both eights, between units.
        let steps = match self.order(few) {
            Order::AsTheyAre => return Ok(None),
            Order::ByHalves => [1, self.pairs, EIGHT],
            Order::ByNeighbours => [2, 1, UNIT],
        };
        let [eight, units] = [EIGHT, self.size / UNIT].map(|size| size as u64);
        let sizes = [bytes, eight, 2, units, self.count as u64];
        let [one, other, unit] = steps;
        let strides = [one, other, unit, self.size].map(|rows| (rows * weight.layout.row_bytes) as u64);
        let at_once = [TURN as u32, EIGHT as u32, 2, self.units(outputs) as u32, 1];
        TensorMap::bytes(weight.address(), sizes, strides, at_once, true).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Machine, kernel_specs};
    use dsrun_core::{
        WeightFormat, WeightType,
        kernels::OperandDesc,
        op::{Op, RmsNorm, Rope},
        region::well_known::{self, AttentionInput},
    };
    use rstest::rstest;

    /// No box reaches into another head, and boxes fill what a block needs.
    #[rstest]
    #[case::whole_heads(128, 128, 8)]
    #[case::half_a_head(128, 64, 4)]
    #[case::tiles_of_192(128, 96, 2)]
    #[case::tiles_of_224(128, 112, 1)]
    #[case::small_heads(64, 128, 4)]
    #[case::odd_heads(80, 64, 1)]
    #[case::six_units(96, 64, 2)]
    #[case::large_heads(256, 64, 4)]
    fn boxes_stay_in_a_head(#[case] size: usize, #[case] outputs: usize, #[case] wanted: usize) {
        let heads = Heads { count: 3, size, pairs: size / 2, pairing: Some(RopePairing::Halves) };
        assert_eq!(heads.units(outputs), wanted);
        assert!((size / UNIT).is_multiple_of(wanted) && (outputs / UNIT).is_multiple_of(wanted));
    }

    /// What makes queries, keys and values of rows of 4096 elements: heads of queries and of keys, their size, and pairs.
    fn attention_input(
        rows: usize,
        [heads, kv_heads, size, pairs]: [usize; 4],
        pairing: Option<RopePairing>,
        head_norms: bool,
    ) -> CallDesc {
        let dtype = DType::BF16;
        let tensor =
            |dtype: DType, shape: &[usize]| Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)));
        let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
        let rope = |heads: usize, pairing| Rope { heads: heads as u32, pairing, scale: 1.0 };
        let region = well_known::attention_input(AttentionInput {
            norm: norm.into(),
            dtype,
            bias: false,
            columns: [heads, kv_heads, kv_heads].map(|heads| (heads * size) as u32),
            head_norms: head_norms.then_some([norm; 2]),
            ropes: pairing.map(|pairing| [rope(heads, pairing), rope(kv_heads, pairing)]),
        });
        let shape = vec![(heads + 2 * kv_heads) * size, 4096];
        let weight = WeightType { format: WeightFormat::Dense(dtype), shape };
        let mut operands =
            vec![tensor(dtype, &[rows, 4096]), tensor(dtype, &[4096]), Some(OperandDesc::Weight(weight))];
        operands.extend(std::iter::repeat_n(tensor(dtype, &[size]), if head_norms { 2 } else { 0 }));
        if pairing.is_some() {
            operands.extend([tensor(DType::I32, &[rows]), tensor(DType::F32, &[pairs])]);
        }
        let cache = tensor(dtype, &[4, kv_heads, 16, size]);
        operands.extend([cache.clone(), cache.clone(), tensor(DType::I32, &[rows])]);
        let query = TensorDesc::dense(dtype, &[rows, heads * size]);
        let cache = TensorDesc::dense(dtype, &[4, kv_heads, 16, size]);
        CallDesc {
            op: Op::Region(region.unwrap().into()),
            operands,
            results: vec![query, cache.clone(), cache],
            comm: None,
        }
    }

    const LLAMA: [usize; 4] = [32, 8, 128, 64];

    #[rstest]
    #[case::few_rows(17, LLAMA, Some(RopePairing::Halves), false, &["turns", "batch_wgmma"])]
    #[case::a_batch(128, LLAMA, Some(RopePairing::Neighbours), false, &["turns", "batch_wgmma"])]
    #[case::a_prompt(512, LLAMA, Some(RopePairing::Halves), false, &["turns", "tile_wgmma"])]
    #[case::many_prompts(8192, LLAMA, Some(RopePairing::Halves), false, &["turns", "tile_wgmma"])]
    #[case::not_turned(128, LLAMA, None, false, &["batch_wgmma"])]
    #[case::neighbours_in_part(128, [32, 8, 128, 32], Some(RopePairing::Neighbours), false, &["turns", "batch_wgmma"])]
    #[case::halves_in_part(128, [32, 8, 128, 32], Some(RopePairing::Halves), false, &["batch_wgmma", "heads_wide"])]
    #[case::normed(128, LLAMA, Some(RopePairing::Halves), true, &["batch_wgmma", "heads_wide"])]
    #[case::odd_heads(128, [32, 8, 72, 36], Some(RopePairing::Halves), false, &["batch_wgmma", "heads"])]
    #[case::half_the_device(256, LLAMA, Some(RopePairing::Halves), false, &["heads_wide"])]
    fn kernels(
        #[case] rows: usize,
        #[case] heads: [usize; 4],
        #[case] pairing: Option<RopePairing>,
        #[case] normed: bool,
        #[case] wanted: &[&str],
    ) {
        let machine = Machine { capability: 90, processors: 132, blas: true, skinny: true };
        let specs = kernel_specs(&attention_input(rows, heads, pairing, normed), &machine).unwrap();
        let behind_norm: Vec<&str> = specs.iter().skip(1).map(|spec| spec.entry).collect();
        assert_eq!(behind_norm, wanted);
    }
}
