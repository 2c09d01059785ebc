//! Kernels compile for the architectures, without a GPU: each value of each constant of an entry, and each entry and element type
//! for each architecture that needs it. With `DSRUN_TEST_WHOLE=1` all kernels do, which takes half an hour.
//!
//! Needs NVRTC, for example from `pip install nvidia-cuda-nvrtc` with `DSRUN_CUDA_LIBRARIES` naming its `lib` folder.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "compile/choice.rs"]
mod choice;
#[path = "compile/decoder.rs"]
mod decoder;
#[path = "compile/experts.rs"]
mod experts;
#[path = "compile/latents.rs"]
mod latents;
#[path = "compile/outlined.rs"]
mod outlined;

use choice::{chosen, features};
use decoder::{decoder_calls, summed_decoder_calls};
use dsrun_core::{
    BlockFormat, DType, TensorDesc, WeightFormat, WeightType,
    checked::ValidCall,
    collective::Comm,
    kernels::{CallDesc, OperandDesc},
    op::{
        Activation, Add, Argmax, Attention, AttentionMask, Cast, Columns, CommitTokens, Embed, GateLayout,
        GatedActivation, GatherRows, KvWrite, LayerNorm, Linear, LinearW8A8, LogitProcess, Nonlinearity, Op,
        PageGather, PageScatter, PagedAttention, PrepareStep, QuantPerToken, RmsNorm, Rope, RopePairing,
        Sample,
    },
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, Norm},
    },
};
use dsrun_cuda::{
    DeviceSpec, KernelSpec,
    compiler::{Cache, Compiler},
    copy_kernel, exchange_kernel_specs, kernel_specs,
    library::Library,
    summed_decoder_kernel_specs,
};
use dsrun_test_support::{Missing, Requirement, TestResult, test_main};
use experts::{expert_calls, mixture_calls};
use latents::latent_calls;
use outlined::{attention_and_quantisation, token_calls};
use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, LazyLock},
};

test_main![
    kernels_compile_for_turing,
    kernels_compile_for_ampere,
    kernels_compile_for_hopper,
    kernels_compile_for_blackwell,
    every_constant_is_compiled,
];

/// Compute capabilities, one of each generation of tensor cores.
const CAPABILITIES: [u32; 4] = [75, 80, 90, 100];

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

type Operand = Option<OperandDesc>;

fn tensor(dtype: DType, shape: &[usize]) -> Operand {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)))
}

fn bounded(dtype: DType, shape: &[usize]) -> Operand {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape).with_extent()))
}

fn format_of(name: &str) -> WeightFormat {
    WeightFormat::from_name(name).unwrap()
}

fn weight(format: WeightFormat, shape: [usize; 2]) -> Operand {
    Some(OperandDesc::Weight(WeightType { format, shape: shape.to_vec() }))
}

fn call(op: impl Into<Op>, operands: Vec<Operand>) -> ValidCall {
    call_over(op, operands, None)
}

fn call_over(op: impl Into<Op>, operands: Vec<Operand>, comm: Option<Arc<dyn Comm>>) -> ValidCall {
    let mut call = CallDesc { op: op.into(), operands, results: Vec::new(), comm };
    let inferred = call.op.infer(&call.operand_types()).unwrap();
    for (index, inferred) in inferred.iter().enumerate() {
        let shape = inferred.resolve(&|_| None).unwrap();
        let updated = call.op.updates(index).and_then(|operand| call.tensor(operand).cloned());
        call.results.push(updated.unwrap_or_else(|| TensorDesc::dense(inferred.dtype, &shape)));
    }
    call.validate().unwrap()
}

/// Group-wise formats and blocks with every kind of integer, group and numbers.
fn integer_formats(dtype: DType) -> impl Iterator<Item = WeightFormat> {
    // The types of activations differ in little: one takes all formats.
    let taken = if dtype == DType::BF16 { 8 } else { 2 };
    let groups = [
        "int8",
        "int4g128_f16",
        "int8_bf16",
        "int8z_f16",
        "int8g128_f16",
        "int8g64z_bf16",
        "int4m",
        "int4g64z",
    ];
    let groups = groups.map(|name| WeightFormat::from_name(name).unwrap());
    let blocks =
        [BlockFormat::Q4_0, BlockFormat::Q4_1, BlockFormat::Q5_1, BlockFormat::Q4_K, BlockFormat::Q6_K];
    let blocks = blocks.map(WeightFormat::Block).into_iter();
    groups.into_iter().take(taken).chain(blocks.take(taken / 2 + 1))
}

/// Products with integers, and of bytes with bytes.
fn quantised_calls(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
    let gated = GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Concatenated,
        limit: 0.0,
        up_offset: 0.0,
    };
    let plain = Activation { function: Nonlinearity::GeluErf, limit: 1.0 };
    let region = |region: dsrun_core::Result<Region>| Op::Region(region.unwrap().into());
    let vector = |size: usize| tensor(dtype, &[size]);
    for format in integer_formats(dtype) {
        for (rows, inputs) in [(1, 2304), (12, 1024), (20, 256), (100, 256)] {
            let (x, w) = (bounded(dtype, &[rows, inputs]), weight(format, [512, inputs]));
            calls.push(call(Linear { dtype }, vec![x.clone(), w.clone(), vector(512)]));
            let operands = vec![x.clone(), vector(inputs), w.clone()];
            calls.push(call(region(well_known::mlp_input(norm, dtype, false, gated)), operands));
        }
        let op = Embed { dtype, first_row: 0, position_offset: 0 };
        calls.push(call(op, vec![tensor(DType::I32, &[3]), weight(format, [10, 256]), None, None]));
    }
    for rows in [1, 9, 40, 128, 300] {
        for (format, inputs) in [("int8", 1024), ("int8_f16", 100)] {
            let w = weight(format_of(format), [96, inputs]);
            let x = [bounded(DType::I8, &[rows, inputs]), tensor(DType::F32, &[rows])];
            let with = |behind: Vec<Operand>| [x.to_vec(), vec![w.clone()], behind].concat();
            calls.push(call(LinearW8A8 { dtype: DType::F32 }, with(vec![None])));
            calls.push(call(LinearW8A8 { dtype }, with(vec![vector(96)])));
            let add = well_known::linear_w8a8_add(dtype, false, Add { alpha: 1.0 });
            calls.push(call(region(add), with(vec![bounded(dtype, &[rows, 96])])));
            calls.push(call(region(well_known::linear_w8a8_activation(dtype, false, gated)), with(vec![])));
            calls.push(call(
                region(well_known::linear_w8a8_activation(dtype, true, plain)),
                with(vec![vector(96)]),
            ));
            let rope = |heads| Rope { heads, pairing: RopePairing::Halves, scale: 1.0 };
            let heads = Heads { columns: [128, 64, 64], head_norms: None, ropes: Some([rope(2), rope(1)]) };
            let (w, cache) = (weight(format_of(format), [256, inputs]), tensor(dtype, &[4, 1, 16, 64]));
            let places = || bounded(DType::I32, &[rows]);
            let behind = [w, places(), tensor(DType::F32, &[32]), cache.clone(), cache, places()];
            let region = region(well_known::linear_w8a8_heads(dtype, false, heads));
            calls.push(call(region, [&x[..], &behind].concat()));
        }
    }
    for columns in [64, 99, 14_336] {
        let x = bounded(dtype, &[3, columns]);
        calls.push(call(QuantPerToken {}, vec![x.clone()]));
        calls.push(call(region(well_known::norm_quant(norm)), vec![x.clone(), vector(columns)]));
        let layer = well_known::norm_quant(LayerNorm { eps: 1e-5 });
        calls.push(call(region(layer), vec![x.clone(), vector(columns), vector(columns)]));
        calls.push(call(region(well_known::activation_quant(plain)), vec![x.clone()]));
        let halves = bounded(dtype, &[3, 2 * columns]);
        for layout in [GateLayout::Concatenated, GateLayout::Interleaved] {
            let gated = GatedActivation { layout, ..gated };
            calls.push(call(region(well_known::activation_quant(gated)), vec![halves.clone()]));
        }
        let apart = GatedActivation { layout: GateLayout::Separate, ..gated };
        calls.push(call(region(well_known::activation_quant(apart)), vec![x.clone(), x]));
    }
    calls
}

fn attention_calls(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    let integers = |size: usize| tensor(DType::I32, &[size]);
    for (tokens, sequences, query_heads, kv_heads, size) in [
        (1, 1, 32, 8, 128),
        (64, 4, 32, 8, 64),
        (8, 8, 12, 12, 80),
        (3, 2, 9, 3, 33),
        (2, 2, 8, 1, 256),
        (512, 1, 32, 8, 128),
        (40, 2, 12, 12, 80),
        (40, 2, 6, 2, 96),
        (40, 2, 8, 1, 256),
        (40, 2, 14, 2, 24),
        (300, 300, 32, 8, 128),
        (512, 512, 32, 8, 128),
        (4096, 512, 32, 8, 128),
        (800, 800, 48, 3, 64),
        (1024, 1024, 16, 4, 256),
        (600, 600, 8, 8, 80),
    ] {
        for mask in [AttentionMask::Causal, AttentionMask::Bidirectional, AttentionMask::Explicit] {
            let op = PagedAttention {
                query_heads,
                kv_heads,
                scale: 0.1,
                softcap: 0.0,
                window: 0,
                mask,
                value_size: 0,
            };
            let cache = tensor(dtype, &[8, kv_heads as usize, 16, size]);
            let query = tensor(dtype, &[tokens, query_heads as usize * size]);
            let lengths = [integers(sequences), integers(sequences), integers(sequences)];
            let bits = if mask == AttentionMask::Explicit { tensor(DType::U32, &[tokens, 2]) } else { None };
            let mut operands = vec![query, cache.clone(), cache];
            operands.extend(lengths);
            // Many sequences that may be long have a kernel of their own.
            let columns = if sequences >= 512 { 300 } else { 4 };
            operands.extend([tensor(DType::I32, &[sequences, columns]), integers(0), None, None, bits]);
            calls.push(call(op, operands));
        }
        let op = Attention {
            query_heads,
            kv_heads,
            scale: 0.1,
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Bidirectional,
        };
        let key = tensor(dtype, &[tokens, kv_heads as usize * size]);
        let query = tensor(dtype, &[tokens, query_heads as usize * size]);
        calls.push(call(op, vec![query, key.clone(), key, integers(sequences), integers(sequences), None]));
    }
    calls
}

fn linear_calls(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
    for format in [dtype, DType::BF16].map(WeightFormat::Dense) {
        for rows in [1, 2, 3, 7, 20, 64, 100] {
            for inputs in [2048, 96] {
                let (x, w) = (bounded(dtype, &[rows, inputs]), weight(format, [512, inputs]));
                let bias = tensor(dtype, &[512]);
                calls.push(call(Linear { dtype }, vec![x.clone(), w.clone(), None]));
                calls.push(call(Linear { dtype: DType::F32 }, vec![x.clone(), w.clone(), bias.clone()]));
                let region = well_known::norm_linear(norm, dtype, true).unwrap();
                calls.push(call(Op::Region(region.into()), vec![x, tensor(dtype, &[inputs]), w, bias]));
            }
        }
        let op = Embed { dtype, first_row: 0, position_offset: 0 };
        let ids = tensor(DType::I32, &[3]);
        calls.push(call(op, vec![ids.clone(), weight(format, [10, 64]), ids, weight(format, [10, 64])]));
    }
    calls
}

/// Batches: one tile for a block or two, whole and in parts, and tiles of every width.
fn batch_calls(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    let gated = GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Concatenated,
        limit: 0.0,
        up_offset: 0.0,
    };
    let sizes = [
        (17, 272),
        (48, 1104),
        (128, 4240),
        (100, 8464),
        (512, 4096),
        (512, 6144),
        (512, 28_672),
        (2048, 4096),
    ];
    for (rows, outputs) in sizes {
        let (x, w) = (bounded(dtype, &[rows, 192]), weight(WeightFormat::Dense(dtype), [outputs, 192]));
        let residual = bounded(dtype, &[rows, outputs]);
        calls.push(call(Linear { dtype: DType::F32 }, vec![x.clone(), w.clone(), tensor(dtype, &[outputs])]));
        let add = well_known::linear_add(dtype, false, Add { alpha: 0.5 }).unwrap();
        calls.push(call(Op::Region(add.into()), vec![x.clone(), w.clone(), residual]));
        let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
        let region = well_known::mlp_input(norm, dtype, false, gated).unwrap();
        calls.push(call(Op::Region(region.into()), vec![x.clone(), tensor(dtype, &[192]), w.clone()]));
        // A bias in f32, which cuBLASLt does not add to 16 bits.
        let plain = Activation { function: Nonlinearity::GeluErf, limit: 0.0 };
        let region = well_known::mlp_input(norm, dtype, true, plain).unwrap();
        let bias = tensor(DType::F32, &[outputs]);
        calls.push(call(Op::Region(region.into()), vec![x, tensor(dtype, &[192]), w, bias]));
    }
    calls
}

/// The fused parts of decoder layers of both kinds, for few rows and for many.
fn region_calls(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    let norms: [Norm; 2] = [RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), LayerNorm { eps: 1e-5 }.into()];
    let mut region = |region: dsrun_core::Result<Region>, operands: Vec<Operand>| {
        calls.push(call(Op::Region(region.unwrap().into()), operands));
    };
    // Rows, inputs, head size and pairs that are turned: one launch, slices, many rows, and heads that are no tiles.
    for (rows, inputs, size, pairs) in
        [(1, 256, 64, 32), (8, 14_336, 128, 16), (40, 256, 64, 32), (40, 96, 12, 5)]
    {
        let vector = |size: usize| tensor(dtype, &[size]);
        let (x, format) = (bounded(dtype, &[rows, inputs]), WeightFormat::Dense(dtype));
        for (norm, biased) in norms.into_iter().zip([false, true]) {
            let with_norm = |behind: Vec<Operand>| {
                let vectors = std::iter::repeat_n(vector(inputs), norm.vectors());
                [x.clone()].into_iter().chain(vectors).chain(behind).collect::<Vec<_>>()
            };
            let product = |outputs: usize| {
                let bias = biased.then(|| vector(outputs));
                [weight(format, [outputs, inputs])].into_iter().chain(bias).collect::<Vec<_>>()
            };
            let residual = bounded(dtype, &[rows, 48]);
            let operands = [vec![x.clone()], product(48), vec![residual]].concat();
            region(well_known::linear_add(dtype, biased, Add { alpha: 1.0 }), operands);
            let plain = Activation { function: Nonlinearity::GeluTanh, limit: 0.0 };
            region(well_known::mlp_input(norm, dtype, biased, plain), with_norm(product(48)));
            for (function, layout) in [
                (Nonlinearity::Silu, GateLayout::Concatenated),
                (Nonlinearity::GeluErf, GateLayout::Interleaved),
            ] {
                let gated = GatedActivation { function, layout, limit: 0.0, up_offset: 0.0 };
                region(well_known::mlp_input(norm, dtype, biased, gated), with_norm(product(64)));
            }
            // The heads of queries and of keys that a norm covers, if there are norms.
            for (pairing, head_norms, turned) in [
                (RopePairing::Halves, None, true),
                (RopePairing::Neighbours, Some([1, 1]), true),
                (RopePairing::Halves, Some([4, 2]), true),
                (RopePairing::Halves, Some([4, 2]), false),
                (RopePairing::Neighbours, None, true),
                (RopePairing::Halves, None, false),
            ] {
                let rope = |heads| Rope { heads, pairing, scale: 1.0 };
                let of_heads = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
                let heads = Heads {
                    columns: [4, 2, 2].map(|heads| heads * size as u32),
                    head_norms: head_norms.is_some().then_some([of_heads; 2]),
                    ropes: turned.then(|| [rope(4), rope(2)]),
                };
                let input = AttentionInput { norm, dtype, bias: biased, heads };
                let mut operands = with_norm(product(8 * size));
                operands.extend(head_norms.into_iter().flatten().map(|heads| vector(heads * size)));
                if turned {
                    operands.push(bounded(DType::I32, &[rows]));
                    operands.push(tensor(DType::F32, &[pairs]));
                }
                let cache = tensor(dtype, &[4, 2, 16, size]);
                operands.extend([cache.clone(), cache, bounded(DType::I32, &[rows])]);
                region(well_known::attention_input(input), operands);
            }
        }
    }
    calls
}

fn plane_calls(dtype: DType) -> Vec<ValidCall> {
    let (plane, vector) = (tensor(dtype, &[3, 64]), tensor(dtype, &[64]));
    let cache = tensor(dtype, &[4, 2, 8, 32]);
    let (norm, add) = (RmsNorm { eps: 1e-5, weight_offset: 0.0 }, Add { alpha: 1.0 });
    let ids = tensor(DType::I32, &[3]);
    let page = tensor(dtype, &[3, 512]);
    let mut calls = vec![
        call(norm, vec![plane.clone(), vector.clone()]),
        call(LayerNorm { eps: 1e-5 }, vec![plane.clone(), vector.clone(), vector.clone()]),
        call(LayerNorm { eps: 1e-5 }, vec![tensor(dtype, &[3, 63]), None, None]),
        call(add, vec![plane.clone(), plane.clone(), plane.clone(), vector.clone()]),
        call(GatherRows {}, vec![plane.clone(), ids.clone()]),
        call(KvWrite {}, vec![cache.clone(), cache.clone(), plane.clone(), plane.clone(), ids.clone()]),
        call(PageGather {}, vec![cache.clone(), ids.clone()]),
        call(PageScatter {}, vec![cache, page, ids.clone()]),
        call(Columns { start: 3, count: 5 }, vec![plane.clone()]),
        call(Argmax {}, vec![plane.clone()]),
        call(
            LogitProcess {},
            vec![
                plane.clone(),
                ids.clone(),
                tensor(DType::F32, &[2, 8]),
                tensor(DType::I32, &[2, 64]),
                None,
                None,
            ],
        ),
        call(
            LogitProcess {},
            vec![
                tensor(dtype, &[300, 4097]),
                tensor(DType::I32, &[300]),
                tensor(DType::F32, &[2, 8]),
                tensor(DType::I32, &[2, 4097]),
                tensor(DType::F32, &[2, 4097]),
                tensor(DType::U32, &[300, 129]),
            ],
        ),
    ];
    let region = well_known::add_rms_norm(add, norm).unwrap();
    calls.push(call(Op::Region(region.into()), vec![plane.clone(), plane.clone(), vector.clone()]));
    let many = tensor(dtype, &[32, 64]);
    calls.push(call(norm, vec![many.clone(), vector.clone()]));
    calls.push(call(add, vec![many.clone(), many.clone(), None, vector.clone()]));
    let gated = GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Concatenated,
        limit: 0.0,
        up_offset: 0.0,
    };
    calls.push(call(gated, vec![many, None, None]));
    for to in FLOATS {
        calls.push(call(Cast { dtype: to }, vec![plane.clone()]));
    }
    for function in [
        Nonlinearity::Relu,
        Nonlinearity::Silu,
        Nonlinearity::GeluErf,
        Nonlinearity::GeluTanh,
        Nonlinearity::QuickGelu,
        Nonlinearity::Tanh,
    ] {
        calls.push(call(Activation { function, limit: 0.0 }, vec![plane.clone(), vector.clone()]));
        for layout in [GateLayout::Separate, GateLayout::Concatenated, GateLayout::Interleaved] {
            let up = if layout == GateLayout::Separate { plane.clone() } else { None };
            calls.push(call(
                GatedActivation { function, layout, limit: 0.0, up_offset: 0.0 },
                vec![plane.clone(), up, None],
            ));
        }
    }
    for pairing in [RopePairing::Halves, RopePairing::Neighbours] {
        let frequencies = tensor(DType::F32, &[16]);
        calls.push(call(
            Rope { heads: 2, pairing, scale: 1.0 },
            vec![plane.clone(), ids.clone(), frequencies],
        ));
    }
    let many_rows = vec![tensor(dtype, &[1024, 768]), tensor(DType::I32, &[1024]), tensor(DType::F32, &[32])];
    calls.push(call(Rope { heads: 12, pairing: RopePairing::Halves, scale: 1.0 }, many_rows));
    calls
}

fn integer_calls() -> Vec<ValidCall> {
    let ids = |size: usize| tensor(DType::I32, &[size]);
    let (table, counts) = (tensor(DType::I32, &[4, 8]), tensor(DType::I32, &[4, 64]));
    let (settings, seeds) = (tensor(DType::F32, &[4, 8]), tensor(DType::U32, &[4, 2]));
    let mut calls = vec![
        call(
            PrepareStep { block_size: 16 },
            vec![ids(2), ids(2), ids(2), ids(6), ids(2), table, ids(4), ids(4), ids(4), counts.clone()],
        ),
        call(CommitTokens {}, vec![ids(2), ids(2), ids(1), ids(4), ids(4), counts]),
    ];
    for columns in [64, 63] {
        let logits = tensor(DType::F32, &[2, columns]);
        calls.push(call(Sample {}, vec![logits, ids(2), ids(2), settings.clone(), seeds.clone()]));
    }
    calls
}

/// The kernels that common calls need on a device of this capability, with cuBLASLt, without, and batch-invariant; and those of
/// exchanges.
fn needed(capability: u32) -> HashSet<KernelSpec> {
    let mut calls = integer_calls();
    for dtype in FLOATS {
        calls.extend(plane_calls(dtype));
        calls.extend(region_calls(dtype));
        calls.extend(linear_calls(dtype));
        calls.extend(batch_calls(dtype));
        calls.extend(quantised_calls(dtype));
        calls.extend(attention_calls(dtype));
        calls.extend(expert_calls(dtype));
        calls.extend(latent_calls(dtype));
    }
    calls.extend(token_calls());
    if capability >= 80 {
        calls.extend(attention_and_quantisation());
        calls.extend(mixture_calls());
    }
    if capability >= 90 {
        calls.extend(decoder_calls());
    }
    let device =
        |blas, batch_invariant| DeviceSpec { blas, batch_invariant, ..DeviceSpec::usual(capability, 132) };
    let devices = [device(true, false), device(false, false), device(true, true)];
    let of_calls =
        calls.iter().flat_map(|call| devices.map(|device| kernel_specs(call, &device).unwrap())).flatten();
    let summed: Vec<_> = if capability >= 90 { summed_decoder_calls().collect() } else { Vec::new() };
    let of_layers = summed.iter().flat_map(|call| summed_decoder_kernel_specs(call, &devices[0]).unwrap());
    of_calls.chain(of_layers).chain([copy_kernel()]).chain(exchange_kernel_specs().unwrap()).collect()
}

static CHOSEN: LazyLock<[HashSet<KernelSpec>; CAPABILITIES.len()]> =
    LazyLock::new(|| chosen(CAPABILITIES.map(needed)));

fn nvrtc_is_missing(error: dsrun_core::Error) -> Missing {
    Requirement::Nvrtc.missing("the library cannot be loaded").with_detail(error)
}

/// Compiles the kernels that are chosen for one of [`CAPABILITIES`].
fn compile(capability: u32) -> TestResult {
    Library::Nvrtc.require().map_err(nvrtc_is_missing)?;
    let index = CAPABILITIES.iter().position(|known| *known == capability).unwrap();
    // What has not changed since the last run need not be compiled again.
    let cache = Cache::new(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")));
    let compiler = Compiler::new(capability, cache).unwrap();
    let specs = &CHOSEN[index];
    let failures: Vec<String> =
        specs.iter().filter_map(|spec| compiler.build(spec).err()).map(|error| error.to_string()).collect();
    assert!(failures.is_empty(), "{} of {} fail; the first:\n{}", failures.len(), specs.len(), failures[0]);
    Ok(())
}

fn kernels_compile_for_turing() -> TestResult {
    compile(75)
}

fn kernels_compile_for_ampere() -> TestResult {
    compile(80)
}

fn kernels_compile_for_hopper() -> TestResult {
    compile(90)
}

fn kernels_compile_for_blackwell() -> TestResult {
    compile(100)
}

/// Nothing is left out: all features of kernels are compiled, and they are kernels that the capability needs.
fn every_constant_is_compiled() {
    let names = |specs: &HashSet<KernelSpec>| -> HashSet<_> {
        specs.iter().map(|spec| (spec.unit, spec.entry)).collect()
    };
    let of = |index: usize, specs: &HashSet<KernelSpec>| -> HashSet<_> {
        let named = |spec: &KernelSpec| -> Vec<_> {
            features(index, spec)
                .iter()
                .map(|one| format!("{} of {}: {one:?}", spec.entry, spec.unit))
                .collect()
        };
        specs.iter().flat_map(named).collect()
    };
    let compiled: HashSet<_> =
        CHOSEN.iter().enumerate().flat_map(|(index, specs)| of(index, specs)).collect();
    for (index, capability) in CAPABILITIES.into_iter().enumerate() {
        let needed = needed(capability);
        assert!(needed.len() > 100, "only {} kernels for {capability}", needed.len());
        assert_eq!(names(&needed), names(&CHOSEN[index]), "entries for {capability}");
        assert!(CHOSEN[index].is_subset(&needed), "kernels that {capability} does not need");
        let all = of(index, &needed);
        let missing: Vec<_> = all.difference(&compiled).collect();
        assert!(missing.is_empty(), "for {capability} nothing has {missing:?}");
    }
}
