//! Calls of whole decoder layers, in every form that the single-launch kernel takes.

use crate::outlined::{outlined, outlined_over};
use dsrun_core::{
    DType, TensorType, WeightExpr, WeightFormat, WeightType,
    checked::ValidCall,
    op::{
        Activation, Add, AllReduce, AttentionMask, Columns, Embed, GateLayout, GatedActivation, GroupScore,
        GroupedLinear, KvWrite, LayerNorm, Linear, MeshAxis, MoeCombine, MoeGroup, MoeRoute, Nonlinearity,
        PagedAttention, Reduction, RmsNorm, Rope, RopePairing, RouterNorm, RouterScore,
    },
    program::{Program, ProgramBuilder},
};

/// Layers of a decoder in one launch.
struct Layers {
    dtype: DType,
    format: &'static str,
    function: Nonlinearity,
    hidden: usize,
    inner: usize,
    kv_heads: usize,
    group: usize,
    head: usize,
    /// RMS norms, rotary positions, a gated MLP and no biases; else layer norms, a plain MLP, biases and the embedding in front.
    llama: bool,
    head_norms: HeadNorms,
    /// Whether norms precede attention and MLP, and whether norms follow them.
    norms: [bool; 2],
    /// If not 0: every other layer has this window, and a rotary embedding of its own.
    window: u32,
    softcap: f32,
    /// If the MLP is a mixture, how many experts there are and how many a token has, and how they are scored.
    experts: Option<([usize; 2], RouterScore)>,
    /// Whether there are sinks, biases of attention, of the router and of experts, and bounds and an offset of the activation; the
    /// format of experts may then be another one.
    gpt_oss: Option<&'static str>,
    /// Whether the results of attention and MLP are summed over ranks.
    summed: bool,
    mlp: Mlp,
    pairing: RopePairing,
}

/// What the norms of queries and keys cover.
#[derive(Clone, Copy, PartialEq)]
enum HeadNorms {
    None,
    EachHead,
    AllHeads,
}

/// Where the MLP of a layer is.
#[derive(Clone, Copy, PartialEq)]
enum Mlp {
    BehindAttention,
    /// Beside attention, with a norm of its own.
    Beside,
    /// Beside attention, with the norm of attention.
    BesideWithOneNorm,
}

/// Layers as Llama has them.
const LLAMA: Layers = Layers {
    dtype: DType::BF16,
    format: "bf16",
    function: Nonlinearity::Silu,
    hidden: 2048,
    inner: 8192,
    kv_heads: 8,
    group: 4,
    head: 64,
    llama: true,
    head_norms: HeadNorms::None,
    norms: [true, false],
    window: 0,
    softcap: 0.0,
    experts: None,
    gpt_oss: None,
    summed: false,
    mlp: Mlp::BehindAttention,
    pairing: RopePairing::Halves,
};

impl Layers {
    /// The same of other sizes.
    fn of(self, [hidden, inner, kv_heads, group, head]: [usize; 5]) -> Self {
        Self { hidden, inner, kv_heads, group, head, ..self }
    }

    fn program(&self) -> Program {
        let Self { dtype, hidden, inner, kv_heads, group, head, llama, .. } = *self;
        let format = WeightFormat::from_name(self.format).unwrap();
        let mut program = ProgramBuilder::new("layers");
        let sum = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
        let over_ranks = |program: &mut ProgramBuilder, x| match self.summed {
            true => program.call(sum, [Some(x)]).unwrap(),
            false => x,
        };
        let mut input = |name: &str, dtype, shape: &[usize]| {
            program.input(name, TensorType::new(dtype, shape.iter().copied())).unwrap()
        };
        let [ids, positions, slots, start, length, total] =
            ["ids", "positions", "slots", "start", "length", "total"]
                .map(|name| input(name, DType::I32, &[1]));
        let (table, work) = (input("table", DType::I32, &[1, 4]), input("work", DType::I32, &[0]));
        let token = input("x", dtype, &[1, hidden]);
        let mut parts = 0;
        let mut name = move || {
            parts += 1;
            format!("weight{parts}")
        };
        let mut x = token;
        if !llama {
            let dense = WeightType { format: WeightFormat::Dense(dtype), shape: vec![96, hidden] };
            let mut rows = || {
                let name = name();
                program.weight(&name, WeightExpr::tensor(&name), dense.clone()).unwrap()
            };
            let (tokens, places) = (rows(), rows());
            let embed = Embed { dtype, first_row: 0, position_offset: 0 };
            x = program.call(embed, [ids, tokens, positions, places].map(Some)).unwrap();
        }
        let vector = |program: &mut ProgramBuilder, name: String, dtype, size: usize| {
            program.vector(&name, WeightExpr::tensor(&name), TensorType::new(dtype, [size])).unwrap()
        };
        let of_kinds = ["frequencies", "frequencies.1"]
            .map(|name| vector(&mut program, name.into(), DType::F32, head / 2));
        let mut outputs = Vec::new();
        for layer in 0..2 {
            let mut linear = |program: &mut ProgramBuilder, x, [rows, columns]: [usize; 2]| {
                let weight_name = name();
                let weight = WeightType { format, shape: vec![rows, columns] };
                let weight = program.weight(&weight_name, WeightExpr::tensor(&weight_name), weight).unwrap();
                let biased = !llama || self.gpt_oss.is_some();
                let bias = biased.then(|| vector(program, format!("{weight_name}.bias"), dtype, rows));
                program.call(Linear { dtype }, [Some(x), Some(weight), bias]).unwrap()
            };
            let norm = |program: &mut ProgramBuilder, x, name: &str| {
                let weight = vector(program, format!("layers.{layer}.{name}"), dtype, hidden);
                if llama {
                    let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
                    return program.call(norm, [x, weight].map(Some)).unwrap();
                }
                let bias = vector(program, format!("layers.{layer}.{name}.bias"), dtype, hidden);
                program.call(LayerNorm { eps: 1e-5 }, [x, weight, bias].map(Some)).unwrap()
            };
            let add = |program: &mut ProgramBuilder, a, b| {
                program.call(Add { alpha: 1.0 }, [Some(a), Some(b), None, None]).unwrap()
            };
            let (queries, keys) = (kv_heads * group * head, kv_heads * head);
            let other = layer == 1 && self.window > 0;
            let (frequencies, window) = if other { (of_kinds[1], 0) } else { (of_kinds[0], self.window) };
            let [pre_norm, post_norm] = self.norms;
            let normed_input = if pre_norm { norm(&mut program, x, "first") } else { x };
            let product = linear(&mut program, normed_input, [queries + 2 * keys, hidden]);
            let mut start_at = 0u32;
            let [mut query, mut key, value] = [queries, keys, keys].map(|count| {
                let columns = Columns { start: start_at, count: count as u32 };
                start_at += count as u32;
                program.call(columns, [Some(product)]).unwrap()
            });
            if self.head_norms != HeadNorms::None {
                let over = |heads: usize| if self.head_norms == HeadNorms::AllHeads { heads } else { 1 };
                let norm = RmsNorm { eps: 1e-6, weight_offset: 0.0 };
                let mut normed = |x, name: &str, heads: usize| {
                    let name = format!("layers.{layer}.{name}_norm");
                    let weight = vector(&mut program, name, DType::F32, over(heads) * head);
                    program.call(norm, [x, weight].map(Some)).unwrap()
                };
                (query, key) = (normed(query, "query", kv_heads * group), normed(key, "key", kv_heads));
            }
            if llama {
                let rope = |heads: usize| Rope { heads: heads as u32, pairing: self.pairing, scale: 1.0 };
                query =
                    program.call(rope(kv_heads * group), [query, positions, frequencies].map(Some)).unwrap();
                key = program.call(rope(kv_heads), [key, positions, frequencies].map(Some)).unwrap();
            }
            let cache = TensorType::new(dtype, [8, kv_heads, 16, head]);
            let caches = ["keys", "values"]
                .map(|name| program.state(format!("layers.{layer}.{name}"), cache.clone()).unwrap());
            let write = [caches[0], caches[1], key, value, slots].map(Some);
            let caches = program.calls(KvWrite {}, write).unwrap();
            let attention = PagedAttention {
                query_heads: (kv_heads * group) as u32,
                kv_heads: kv_heads as u32,
                scale: 0.1,
                softcap: self.softcap,
                window,
                mask: AttentionMask::Causal,
                value_size: 0,
            };
            let operands = [query, caches[0], caches[1], start, length, total, table, work].map(Some);
            let sinks = self
                .gpt_oss
                .map(|_| vector(&mut program, format!("layers.{layer}.sinks"), DType::F32, kv_heads * group));
            let attended =
                program.calls(attention, operands.into_iter().chain([None, sinks, None])).unwrap()[0];
            outputs.extend(caches);
            let projected = linear(&mut program, attended, [hidden, queries]);
            let projected = over_ranks(&mut program, projected);
            let projected = if post_norm { norm(&mut program, projected, "third") } else { projected };
            let before = x;
            if self.mlp == Mlp::BehindAttention {
                x = add(&mut program, x, projected);
            }
            let normed = match self.mlp {
                Mlp::BesideWithOneNorm => normed_input,
                _ if pre_norm => norm(&mut program, x, "second"),
                _ => x,
            };
            if let Some(([count, chosen], score)) = self.experts {
                let biased = score == RouterScore::Sigmoid;
                let route = MoeRoute {
                    top_k: chosen as u32,
                    score,
                    groups: if biased { 4 } else { 1 },
                    top_groups: if biased { 2 } else { 1 },
                    group_score: GroupScore::TopTwoSum,
                    norm: RouterNorm::Sum,
                    eps: 0.0,
                    scale: 1.0,
                    threshold: 0.0,
                };
                let mut weight = |program: &mut ProgramBuilder, format, [rows, columns]: [usize; 2]| {
                    let name = name();
                    let weight = WeightType { format, shape: vec![rows, columns] };
                    program.weight(&name, WeightExpr::tensor(&name), weight).unwrap()
                };
                let format = self.gpt_oss.map_or(format, |name| WeightFormat::from_name(name).unwrap());
                let router = weight(&mut program, WeightFormat::Dense(dtype), [count, hidden]);
                let weights = [[inner, hidden], [inner, hidden], [hidden, inner]]
                    .map(|[rows, columns]| weight(&mut program, format, [count * rows, columns]));
                let bias =
                    biased.then(|| vector(&mut program, format!("layers.{layer}.bias"), DType::F32, count));
                let [of_router, of_gate, of_up, of_down] = [
                    ("router", count),
                    ("gate", count * inner),
                    ("up", count * inner),
                    ("down", count * hidden),
                ]
                .map(|(name, rows)| {
                    self.gpt_oss
                        .map(|_| vector(&mut program, format!("layers.{layer}.{name}.bias"), dtype, rows))
                });
                let operands = [Some(normed), Some(router), of_router];
                let logits = program.call(Linear { dtype: DType::F32 }, operands);
                let routed = program.calls(route, [Some(logits.unwrap()), None, bias, None, None]).unwrap();
                let (count, first_expert) = (count as u32, 0);
                let tables = program.calls(MoeGroup { count, first_expert }, [Some(routed[0])]).unwrap();
                let linear = |program: &mut ProgramBuilder, x, weight, bias| {
                    let operands = [Some(x), Some(weight), Some(routed[0]), bias];
                    let operands = operands.into_iter().chain([Some(tables[0]), Some(tables[1])]);
                    program.call(GroupedLinear { dtype, count, first_expert }, operands).unwrap()
                };
                let gate = linear(&mut program, normed, weights[0], of_gate);
                let up = linear(&mut program, normed, weights[1], of_up);
                let (function, layout) = (self.function, GateLayout::Separate);
                let [limit, up_offset] = if self.gpt_oss.is_some() { [7.0, 1.0] } else { [0.0; 2] };
                let gated = GatedActivation { function, layout, limit, up_offset };
                let activated = program.call(gated, [Some(gate), Some(up), None]).unwrap();
                let down = linear(&mut program, activated, weights[2], of_down);
                let combine = MoeCombine { count, first_expert };
                let mixed = program.call(combine, [down, routed[1], routed[0]].map(Some)).unwrap();
                let mixed = over_ranks(&mut program, mixed);
                x = add(&mut program, x, mixed);
                continue;
            }
            let rows = if llama { 2 * inner } else { inner };
            let product = linear(&mut program, normed, [rows, hidden]);
            let (function, layout) = (self.function, GateLayout::Concatenated);
            let activated = match llama {
                true => {
                    let gated = GatedActivation { function, layout, limit: 0.0, up_offset: 0.0 };
                    program.call(gated, [Some(product), None, None]).unwrap()
                }
                false => program.call(Activation { function, limit: 0.0 }, [Some(product), None]).unwrap(),
            };
            let down = linear(&mut program, activated, [hidden, inner]);
            let down = over_ranks(&mut program, down);
            let down = if post_norm { norm(&mut program, down, "fourth") } else { down };
            x = match self.mlp {
                Mlp::BehindAttention => add(&mut program, x, down),
                _ => {
                    let all = [Some(before), Some(projected), Some(down), None];
                    program.call(Add { alpha: 1.0 }, all).unwrap()
                }
            };
        }
        outputs.push(x);
        program.finish(&outputs).unwrap()
    }
}

/// Gated MLPs behind RMS norms, and plain ones behind layer norms; layers of one ring slot a tile, of several, and of tiles that warps
/// take in several rounds; layers that are read at a pace; heads of more than 64; runs in pieces; rows of integers that end with half
/// a step; norms after attention and MLP; windows; MLPs beside attention; pairs of neighbours.
pub(crate) fn decoder_calls() -> impl Iterator<Item = ValidCall> {
    let bf16 = DType::BF16;
    let f16 = DType::F16;
    let [relu, silu, erf, tanh] =
        [Nonlinearity::Relu, Nonlinearity::Silu, Nonlinearity::GeluErf, Nonlinearity::GeluTanh];
    let shapes = [
        (bf16, "bf16", silu, [576, 1536, 3, 3, 64], true),
        (f16, "f16", tanh, [1600, 6400, 25, 1, 64], false),
        (bf16, "bf16", silu, [2048, 8192, 8, 4, 64], true),
        (f16, "f16", erf, [256, 1024, 1, 16, 16], true),
        (bf16, "bf16", relu, [768, 3072, 12, 1, 64], false),
        (bf16, "bf16", erf, [64, 40_960, 1, 1, 64], false),
        (bf16, "int4g128_f16", silu, [2048, 8192, 8, 4, 64], true),
        (bf16, "int4g128_f16", silu, [4096, 14_336, 16, 4, 64], true),
        (f16, "int4g128", tanh, [768, 3072, 12, 1, 64], false),
        (bf16, "int8", silu, [2048, 8192, 8, 4, 64], true),
        (f16, "int8", erf, [256, 1024, 1, 16, 16], true),
        (f16, "f16", tanh, [1280, 5120, 16, 1, 80], false),
        (bf16, "bf16", silu, [1536, 4096, 16, 1, 96], true),
        (bf16, "bf16", silu, [2048, 5632, 4, 4, 128], true),
        (f16, "f16", silu, [256, 1024, 1, 16, 128], true),
        (bf16, "bf16", silu, [4096, 14_336, 8, 4, 128], true),
        (f16, "f16", relu, [5120, 20_480, 40, 1, 128], false),
        (bf16, "int4g128_f16", silu, [4096, 14_336, 8, 4, 128], true),
        (bf16, "int8", silu, [4096, 14_336, 8, 4, 128], true),
        (bf16, "int4g128_f16", silu, [896, 4864, 2, 7, 64], true),
        (f16, "int8_f16", tanh, [384, 1664, 3, 2, 64], false),
        (bf16, "int8", silu, [8192, 29_568, 8, 8, 128], true),
    ];
    let with_head_norms = [
        (bf16, "bf16", [1024, 3072, 8, 2, 128]),
        (f16, "f16", [4096, 12_288, 8, 4, 128]),
        (bf16, "int4g128_f16", [5120, 17_408, 8, 5, 128]),
        (bf16, "bf16", [8192, 28_672, 8, 8, 64]),
    ];
    let plain = shapes.into_iter().map(|(dtype, format, function, sizes, llama)| {
        Layers { dtype, format, function, llama, ..LLAMA }.of(sizes)
    });
    let normed = with_head_norms.into_iter().map(|(dtype, format, sizes)| {
        Layers { dtype, format, head_norms: HeadNorms::EachHead, ..LLAMA }.of(sizes)
    });
    let gemma =
        Layers { function: tanh, norms: [true; 2], window: 1024, head_norms: HeadNorms::EachHead, ..LLAMA };
    let over_all_heads = Layers { head_norms: HeadNorms::AllHeads, ..LLAMA };
    let variants = [
        Layers { ..gemma }.of([2560, 10_240, 4, 2, 256]),
        Layers { ..gemma }.of([1152, 6912, 1, 4, 256]),
        Layers { head_norms: HeadNorms::None, softcap: 50.0, ..gemma }.of([2304, 9216, 4, 2, 256]),
        Layers { dtype: f16, format: "int4g128_f16", ..gemma }.of([2560, 10_240, 4, 2, 256]),
        Layers { norms: [false, true], ..gemma }.of([2048, 4096, 8, 4, 64]),
        Layers { window: 4096, dtype: f16, format: "f16", ..LLAMA }.of([4096, 14_336, 8, 4, 128]),
        Layers { llama: false, ..LLAMA }.of([384, 512, 2, 16, 192]),
        Layers { norms: [false, true], ..over_all_heads }.of([4096, 11_008, 32, 1, 128]),
        Layers { norms: [false, true], ..over_all_heads }.of([5120, 27_648, 8, 5, 128]),
        Layers { experts: Some(([64, 8], RouterScore::Softmax)), ..over_all_heads }
            .of([2048, 1024, 16, 1, 128]),
    ];
    let with_experts = [
        (bf16, "bf16", [2048, 768, 4, 8, 128], [128, 8], RouterScore::Softmax),
        (f16, "f16", [4096, 14_336, 8, 4, 128], [8, 2], RouterScore::SoftmaxOfSelected),
        (bf16, "bf16", [1536, 512, 8, 2, 64], [256, 6], RouterScore::Sigmoid),
        (f16, "f16", [256, 64, 2, 2, 64], [16, 1], RouterScore::SparseMixer),
        (bf16, "int4g128_f16", [2048, 768, 4, 8, 128], [128, 8], RouterScore::Softmax),
        (f16, "int4g128_f16", [4096, 14_336, 8, 4, 128], [8, 2], RouterScore::SoftmaxOfSelected),
        (bf16, "int4g128", [1536, 512, 8, 2, 64], [256, 6], RouterScore::Sigmoid),
        (bf16, "int8", [2048, 768, 4, 8, 128], [128, 8], RouterScore::Softmax),
        (f16, "int8_f16", [4096, 14_336, 8, 4, 128], [8, 2], RouterScore::SoftmaxOfSelected),
    ];
    let mixtures = with_experts.into_iter().map(|(dtype, format, sizes, counts, score)| {
        let head_norms = if sizes[4] == 128 { HeadNorms::EachHead } else { HeadNorms::None };
        Layers { dtype, format, head_norms, experts: Some((counts, score)), ..LLAMA }.of(sizes)
    });
    let quick = Nonlinearity::QuickGelu;
    let selected = RouterScore::SoftmaxOfSelected;
    let oss = Layers { function: quick, gpt_oss: Some("mxfp4"), window: 128, ..LLAMA };
    let bounded = [
        Layers { experts: Some(([32, 4], selected)), ..oss }.of([2880, 2880, 8, 8, 64]),
        Layers { experts: Some(([128, 4], selected)), ..oss }.of([2880, 2880, 8, 8, 64]),
        Layers { experts: Some(([8, 8], selected)), dtype: f16, format: "f16", ..oss }
            .of([256, 96, 2, 2, 64]),
        Layers { experts: Some(([8, 2], selected)), gpt_oss: Some("bf16"), ..oss }.of([512, 384, 2, 8, 64]),
        Layers {
            experts: Some(([16, 2], selected)),
            gpt_oss: Some("int4g128_f16"),
            format: "int4g128_f16",
            ..oss
        }
        .of([512, 768, 1, 4, 64]),
        Layers { experts: Some(([8, 2], selected)), ..oss }.of([4096, 14_336, 8, 4, 128]),
    ];
    let floats = [
        Layers { format: "mxfp4", ..LLAMA }.of([2048, 8192, 8, 4, 64]),
        Layers { format: "mxfp4", head_norms: HeadNorms::EachHead, ..LLAMA }.of([5120, 17_408, 8, 5, 128]),
        Layers { format: "mxfp4", dtype: f16, llama: false, function: tanh, ..LLAMA }
            .of([768, 3072, 12, 1, 64]),
        Layers { format: "mxfp4", experts: Some(([128, 8], RouterScore::Softmax)), ..LLAMA }
            .of([2048, 768, 4, 8, 128]),
    ];
    let (one_norm, beside, neighbours) = (Mlp::BesideWithOneNorm, Mlp::Beside, RopePairing::Neighbours);
    let parallel = [
        Layers { mlp: beside, llama: false, function: erf, ..LLAMA }.of([4096, 16_384, 32, 1, 128]),
        Layers { mlp: one_norm, pairing: neighbours, ..LLAMA }.of([4096, 14_336, 8, 4, 128]),
        Layers { mlp: beside, format: "int4g128_f16", dtype: f16, ..LLAMA }.of([2048, 8192, 8, 4, 64]),
        Layers { pairing: neighbours, dtype: f16, format: "f16", ..LLAMA }.of([4096, 13_696, 2, 16, 128]),
        Layers { pairing: neighbours, format: "int8", ..LLAMA }.of([4096, 14_336, 8, 4, 128]),
    ];
    let plain = plain.chain(parallel);
    let all = plain.chain(normed).chain(variants).chain(mixtures).chain(bounded).chain(floats);
    all.map(|layers| outlined(&layers.program()))
}

/// Layers whose results are summed over ranks: with each kind of norm, kind of weight and kind of MLP.
pub(crate) fn summed_decoder_calls() -> impl Iterator<Item = ValidCall> {
    let all = Layers { summed: true, ..LLAMA };
    let (f16, tanh) = (DType::F16, Nonlinearity::GeluTanh);
    let layers = [
        (Layers { ..all }.of([4096, 7168, 4, 4, 128]), 2),
        (Layers { head_norms: HeadNorms::EachHead, ..all }.of([8192, 3584, 1, 8, 128]), 8),
        (Layers { format: "int4g128_f16", ..all }.of([4096, 3584, 2, 4, 128]), 4),
        (
            Layers { dtype: f16, format: "f16", function: tanh, llama: false, ..all }
                .of([768, 1536, 6, 1, 64]),
            2,
        ),
        (
            Layers { function: tanh, norms: [true; 2], window: 1024, head_norms: HeadNorms::EachHead, ..all }
                .of([2560, 5120, 2, 2, 256]),
            2,
        ),
        (
            Layers {
                head_norms: HeadNorms::EachHead,
                experts: Some(([128, 8], RouterScore::Softmax)),
                ..all
            }
            .of([2048, 384, 2, 8, 128]),
            2,
        ),
    ];
    layers.into_iter().map(|(layers, ranks)| outlined_over(&layers.program(), ranks))
}
