//! A table of valid calls of every primitive, with and without optional operands.

use crate::types::operand;
use dsrun_core::{
    DType,
    op::{
        Activation, Add, AllGather, AllReduce, AllToAll, Argmax, Attention, AttentionMask, AttentionPrepare,
        Barrier, Broadcast, Cast, Columns, CommitTokens, Embed, GateLayout, GatedActivation, GatherRows,
        GroupScore, GroupedLinear, HeadLinear, KvWrite, LatentWrite, LayerNorm, Linear, LinearA8, LinearW8A8,
        LogitProcess, MeshAxis, MoeCombine, MoeGroup, MoeRoute, Nonlinearity, Op, OperandType, PageGather,
        PageScatter, PagedAttention, PrepareStep, QuantPerGroup, QuantPerToken, Receive, ReduceScatter,
        Reduction, RmsNorm, Rope, RopePairing, RouterNorm, RouterScore, Sample, Send,
    },
};

pub(crate) const AXIS: MeshAxis = MeshAxis::Tensor;
pub(crate) const EMBED: Embed = Embed { dtype: DType::F16, first_row: 7, position_offset: 2 };
pub(crate) const RMS_NORM: RmsNorm = RmsNorm { eps: 1e-5, weight_offset: 1.0 };
pub(crate) const ACTIVATION: Activation = Activation { function: Nonlinearity::Silu, limit: 0.0 };
pub(crate) const GATED: GatedActivation = GatedActivation {
    function: Nonlinearity::Silu,
    layout: GateLayout::Separate,
    limit: 7.0,
    up_offset: 1.0,
};
pub(crate) const ROPE: Rope = Rope { heads: 4, pairing: RopePairing::Halves, scale: 1.0 };
pub(crate) const COLUMNS: Columns = Columns { start: 52, count: 12 };
pub(crate) const PAGED: PagedAttention = PagedAttention {
    query_heads: 4,
    kv_heads: 2,
    scale: 0.35,
    softcap: 0.0,
    window: 0,
    mask: AttentionMask::Explicit,
    value_size: 0,
};
pub(crate) const ATTENTION: Attention = Attention {
    query_heads: 4,
    kv_heads: 2,
    scale: 0.35,
    softcap: 30.0,
    window: 9,
    mask: AttentionMask::Bidirectional,
};
pub(crate) const ROUTE: MoeRoute = MoeRoute {
    top_k: 2,
    score: RouterScore::Sigmoid,
    groups: 4,
    top_groups: 2,
    group_score: GroupScore::TopTwoSum,
    norm: RouterNorm::Sum,
    eps: 1e-20,
    scale: 2.5,
    threshold: 0.0,
};
pub(crate) const GROUP: MoeGroup = MoeGroup { count: 8, first_expert: 16 };
pub(crate) const GROUPED: GroupedLinear = GroupedLinear { dtype: DType::F32, count: 8, first_expert: 16 };
pub(crate) const COMBINE: MoeCombine = MoeCombine { count: 8, first_expert: 16 };
pub(crate) const HEAD_LINEAR: HeadLinear = HeadLinear { dtype: DType::F32, heads: 4 };
pub(crate) const GATHER: AllGather = AllGather { axis: AXIS, ranks: 4, rows: false };
pub(crate) const SCATTER: ReduceScatter =
    ReduceScatter { axis: AXIS, ranks: 4, rows: false, reduction: Reduction::Sum };
pub(crate) const ALL_REDUCE: AllReduce = AllReduce { axis: AXIS, reduction: Reduction::Sum };

pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) operands: Vec<Option<OperandType>>,
    pub(crate) results: Vec<&'static str>,
}

impl Case {
    pub(crate) fn name(&self) -> &'static str {
        self.op.signature().unwrap().name
    }

    /// The case with operand `index` replaced.
    pub(crate) fn with(&self, index: usize, replacement: Option<OperandType>) -> Vec<Option<OperandType>> {
        let mut operands = self.operands.clone();
        operands[index] = replacement;
        operands
    }
}

/// Valid calls. The first of each op has all operands that can be present together.
pub(crate) fn valid() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |op: Op, operands: &[&str], results: &[&'static str]| {
        let operands = operands.iter().map(|text| operand(text)).collect();
        cases.push(Case { op, operands, results: results.to_vec() });
    };
    let (table, positions) = ("weight q4_1[100, 64]", "weight f32[50, 64]");
    add(EMBED.into(), &["i32[?t]", table, "i32[?t]", positions], &["f16[?t, 64]"]);
    add(EMBED.into(), &["i32[?t]", table, "_", "_"], &["f16[?t, 64]"]);
    add(RMS_NORM.into(), &["bf16[?t, 64]", "f32[16]"], &["bf16[?t, 64]"]);
    add(RMS_NORM.into(), &["f32[0, 64]", "f32[64]"], &["f32[0, 64]"]);
    add(LayerNorm { eps: 0.0 }.into(), &["f32[?t, 64]", "f16[64]", "f16[64]"], &["f32[?t, 64]"]);
    add(LayerNorm { eps: 0.0 }.into(), &["f32[?t, 64]", "_", "_"], &["f32[?t, 64]"]);
    let linear = Linear { dtype: DType::F32 };
    add(linear.into(), &["f16[?t, 64]", "weight q8_0[96, 64]", "f32[96]"], &["f32[?t, 96]"]);
    add(linear.into(), &["f16[?t, 64]", "weight bf16[96, 64]", "_"], &["f32[?t, 96]"]);
    add(QuantPerToken {}.into(), &["bf16[?t, 64]"], &["i8[?t, 64]", "f32[?t]"]);
    let quantised = LinearW8A8 { dtype: DType::BF16 };
    for (weight, bias) in [("weight int8[96, 64]", "f16[96]"), ("weight int8_bf16[96, 64]", "_")] {
        add(quantised.into(), &["i8[?t, 64]", "f32[?t]", weight, bias], &["bf16[?t, 96]"]);
    }
    add(QuantPerGroup { group: 16 }.into(), &["bf16[?t, 64]"], &["i8[?t, 64]", "f32[?t, 4]"]);
    let grouped = LinearA8 { dtype: DType::BF16, group: 32 };
    for (weight, bias) in [("weight q4_1[96, 64]", "f16[96]"), ("weight f32[96, 64]", "_")] {
        add(grouped.into(), &["i8[?t, 64]", "f32[?t, 2]", weight, bias], &["bf16[?t, 96]"]);
    }
    add(ACTIVATION.into(), &["f16[?t, 8]", "f32[8]"], &["f16[?t, 8]"]);
    add(ACTIVATION.into(), &["f16[?t, 8]", "_"], &["f16[?t, 8]"]);
    add(GATED.into(), &["f32[?t, 8]", "f32[?t, 8]", "f32[16]"], &["f32[?t, 8]"]);
    for layout in [GateLayout::Concatenated, GateLayout::Interleaved] {
        add(GatedActivation { layout, ..GATED }.into(), &["f32[?t, 16]", "_", "f32[16]"], &["f32[?t, 8]"]);
        add(GatedActivation { layout, ..GATED }.into(), &["f32[?t, 16]", "_", "_"], &["f32[?t, 8]"]);
    }
    add(ROPE.into(), &["f16[?t, 64]", "i32[?t]", "f32[8]"], &["f16[?t, 64]"]);
    add(ROPE.into(), &["f16[?t, 64]", "i32[?t]", "f32[5]"], &["f16[?t, 64]"]);
    let (keys, values) = ("f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 4]");
    add(KvWrite {}.into(), &[keys, values, "f32[?t, 16]", "f32[?t, 8]", "i32[?t]"], &[keys, values]);
    let (small_keys, small_values) = ("i8[$p, 2, 16, 12]", "i8[$p, 2, 16, 8]");
    let small = [small_keys, small_values, "f32[?t, 16]", "f32[?t, 8]", "i32[?t]"];
    add(KvWrite {}.into(), &small, &[small_keys, small_values]);
    add(PageGather {}.into(), &[keys, "i32[?n]"], &["f16[?n, 256]"]);
    add(PageGather {}.into(), &[small_keys, "i32[?n]"], &["i8[?n, 384]"]);
    add(PageScatter {}.into(), &[keys, "f16[?n, 256]", "i32[?n]"], &[keys]);
    add(PageScatter {}.into(), &[small_keys, "i8[?n, 384]", "i32[?n]"], &[small_keys]);
    add(AttentionPrepare { words: 12 }.into(), &["i32[?s]", "i32[?s]", "i32[?s]"], &["i32[12]"]);
    let paged = ["f32[?t, 32]", keys, values, "i32[?s]", "i32[?s]", "i32[?s]", "i32[?s, $n]", "i32[12]"];
    let explicit = [&paged[..], &["f32[4]", "f32[4]", "u32[?t, 3]"]].concat();
    add(PAGED.into(), &explicit, &["f32[?t, 16]", "f32[?t, 4]"]);
    let causal = PagedAttention { mask: AttentionMask::Causal, ..PAGED };
    add(causal.into(), &[&paged[..], &["_", "_", "_"]].concat(), &["f32[?t, 16]", "f32[?t, 4]"]);
    let of_small = [&paged[..1], &[small_keys, small_values], &paged[3..], &["_", "_", "_"]].concat();
    add(causal.into(), &of_small, &["f32[?t, 16]", "f32[?t, 4]"]);
    let shared = PagedAttention { value_size: 6, ..causal };
    let one_cache = [&paged[..2], &["_"], &paged[3..], &["_", "f32[4]", "_"]].concat();
    add(shared.into(), &one_cache, &["f32[?t, 24]", "f32[?t, 4]"]);
    let ragged = ["f32[?t, 32]", "f32[?t, 16]", "f32[?t, 8]", "i32[?s]", "i32[?s]"];
    add(ATTENTION.into(), &[&ragged[..], &["f32[4]"]].concat(), &["f32[?t, 16]"]);
    add(ATTENTION.into(), &[&ragged[..], &["_"]].concat(), &["f32[?t, 16]"]);
    let sum = Add { alpha: 1.0 };
    add(sum.into(), &["f16[?t, 8]", "f16[?t, 8]", "f16[?t, 8]", "f32[8]"], &["f16[?t, 8]"]);
    add(sum.into(), &["f16[?t, 8]", "f16[?t, 8]", "_", "_"], &["f16[?t, 8]"]);
    add(Cast { dtype: DType::BF16 }.into(), &["f32[?t, 8]"], &["bf16[?t, 8]"]);
    add(COLUMNS.into(), &["bf16[?t, 64]"], &["bf16[?t, 12]"]);
    add(Columns { start: 8, count: 0 }.into(), &["f32[0, 8]"], &["f32[0, 0]"]);
    add(GatherRows {}.into(), &["f32[?t, 8]", "i32[?r]"], &["f32[?r, 8]"]);
    let (per_sequence, request, counts) = ("i32[?s]", "i32[64]", "i32[64, 100]");
    add(
        PrepareStep { block_size: 16 }.into(),
        &[
            per_sequence,
            per_sequence,
            per_sequence,
            "i32[?t]",
            "i32[?r]",
            "i32[64, 10]",
            request,
            request,
            request,
            counts,
        ],
        &[
            "i32[?t]",
            "i32[?t]",
            "i32[?t]",
            per_sequence,
            per_sequence,
            per_sequence,
            "i32[?s, 10]",
            "i32[?r]",
            request,
            counts,
        ],
    );
    let logits = ["f16[?r, 100]", "i32[?r]", "f32[64, 8]", counts];
    add(LogitProcess {}.into(), &[&logits[..], &["f32[64, 100]", "u32[?r, 4]"]].concat(), &["f32[?r, 100]"]);
    add(LogitProcess {}.into(), &[&logits[..], &["_", "_"]].concat(), &["f32[?r, 100]"]);
    add(Argmax {}.into(), &["f16[?r, 100]"], &["i32[?r]"]);
    let sampled = ["f32[?r, 100]", "i32[?r]", "i32[?r]", "f32[64, 8]", "u32[64, 2]"];
    add(Sample {}.into(), &sampled, &["i32[?r]", "f32[?r]"]);
    let committed = ["i32[?r]", "i32[?r]", "i32[3]", request, request, counts];
    add(CommitTokens {}.into(), &committed, &[request, request, counts]);
    let routed = ["i32[?t, 2]", "f32[?t, 2]"];
    add(ROUTE.into(), &["bf16[?t, 8]", "f32[8]", "f32[8]", "f32[8]", "_"], &routed);
    let ungrouped = MoeRoute { groups: 1, top_groups: 1, ..ROUTE };
    add(ungrouped.into(), &["f32[?t, 8]", "_", "_", "_", "i32[?t, 2]"], &routed);
    let mixer = MoeRoute { score: RouterScore::SparseMixer, ..ungrouped };
    add(mixer.into(), &["f32[?t, 8]", "_", "_", "_", "_"], &routed);
    add(GROUP.into(), &["i32[?t, 2]"], &["i32[?t, 2]", "i32[9]"]);
    let experts = ["weight q8_0[96, 64]", "i32[?t, 2]"];
    let tables = ["f16[96]", "i32[?t, 2]", "i32[9]"];
    add(GROUPED.into(), &[&["f16[?t, 128]"], &experts[..], &tables].concat(), &["f32[?t, 24]"]);
    add(GROUPED.into(), &[&["f16[?t, 64]"], &experts[..], &["_"; 3]].concat(), &["f32[?t, 24]"]);
    add(COMBINE.into(), &["bf16[?t, 48]", "f32[?t, 2]", "i32[?t, 2]"], &["bf16[?t, 24]"]);
    add(HEAD_LINEAR.into(), &["f16[?t, 160]", "weight q8_0[96, 32]"], &["f32[?t, 128]"]);
    add(HEAD_LINEAR.into(), &["f16[?t, 128]", "weight f16[96, 32]"], &["f32[?t, 96]"]);
    add(LatentWrite {}.into(), &[keys, "f32[?t, 10]", "bf16[?t, 6]", "i32[?t]"], &[keys]);
    let rows = AllGather { rows: true, ..GATHER };
    add(ALL_REDUCE.into(), &["f16[?t, 8]"], &["f16[?t, 8]"]);
    add(GATHER.into(), &["i8[?t, 8]"], &["i8[?t, 32]"]);
    add(rows.into(), &["i8[3, $h]"], &["i8[12, $h]"]);
    add(SCATTER.into(), &["f32[?t, 8]"], &["f32[?t, 2]"]);
    add(ReduceScatter { rows: true, ..SCATTER }.into(), &["f32[8, $h]"], &["f32[2, $h]"]);
    add(AllToAll { axis: AXIS, ranks: 4 }.into(), &["u8[8, 3]"], &["u8[8, 3]"]);
    add(Broadcast { axis: AXIS, root: 1 }.into(), &["f16[?t, 8]"], &["f16[?t, 8]"]);
    add(Send { axis: AXIS, peer: 1 }.into(), &["f16[?t, 8]"], &[]);
    add(Receive { axis: AXIS, peer: 1 }.into(), &["f16[?t, 8]"], &["f16[?t, 8]"]);
    add(Barrier { axis: AXIS }.into(), &[], &[]);
    cases
}
