//! Fusion: the regions of programs for devices with various kernels, and equal results of fused programs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    DType, Result, Size, TensorType, WeightExpr, WeightFormat, WeightType,
    op::{Activation, Add, LayerNorm, Linear, Nonlinearity, Op, RmsNorm},
    program::{Call, Origin, Program, ProgramBuilder, ValueId},
    region::well_known,
};
use dsrun_engine::{
    EngineOptions, EnginePlan,
    passes::{Merger, Native, fuse},
};
use dsrun_models::{
    model::Model,
    step::{Heads, ProgramOptions, StepBuilder},
};
use rstest::rstest;
use std::{sync::Arc, thread};
use support::{difference, exact, fixtures, greedy, logits, lowering::LoweringDevice};

const LAYER: [&str; 5] = ["attention_input", "paged_attention", "linear_add", "mlp_input", "linear_add"];
const ADD: Add = Add { alpha: 1.0 };

/// Merges calls for a step whose sizes do not matter.
fn merge(program: &Program, native: &mut Native<'_>) -> Result<Arc<Program>> {
    Merger::new(Arc::new(program.clone()))?.merge(&|_| None, &[], native)
}

fn names(program: &Program) -> Vec<&str> {
    program.nodes.iter().map(|node| node.call.op.name()).collect()
}

/// Admits every region, as a device with kernels for all regions does.
fn all_regions(_: &Program, _: &Call) -> Result<bool> {
    Ok(true)
}

/// Admits regions of these names, as a device with kernels for only those does.
fn regions_named(known: &'static [&'static str]) -> impl FnMut(&Program, &Call) -> Result<bool> {
    move |_, call| Ok(known.contains(&call.op.name()))
}

fn fixture(name: &str) -> Program {
    Model::open(fixtures().join(name)).unwrap().program(&ProgramOptions::default()).unwrap()
}

fn weight(step: &mut StepBuilder, name: &str, shape: [usize; 2]) -> ValueId {
    let weight = WeightType { format: WeightFormat::Dense(DType::F32), shape: shape.to_vec() };
    step.program.weight(name, WeightExpr::tensor(name), weight).unwrap()
}

fn vector(step: &mut StepBuilder, name: &str, size: usize) -> ValueId {
    step.program.vector(name, WeightExpr::tensor(name), TensorType::new(DType::F32, [size])).unwrap()
}

fn biased(step: &mut StepBuilder, x: ValueId, name: &str, shape: [usize; 2]) -> ValueId {
    let weight = weight(step, name, shape);
    let bias = vector(step, &format!("{name}.bias"), shape[0]);
    step.program.call(Linear { dtype: DType::F32 }, [x, weight, bias].map(Some)).unwrap()
}

fn layer_norm(step: &mut StepBuilder, x: ValueId, name: &str, size: usize) -> ValueId {
    let (weight, bias) = (vector(step, name, size), vector(step, &format!("{name}.bias"), size));
    step.program.call(LayerNorm { eps: 1e-5 }, [x, weight, bias].map(Some)).unwrap()
}

/// Two layers of GPT-2: layer norms, biases, and an MLP without a gate.
fn gpt2() -> Program {
    let (hidden, heads) = (32, 2);
    let mut step = StepBuilder::begin("gpt2", 96, ProgramOptions::default()).unwrap();
    let table = weight(&mut step, "embedding", [96, hidden]);
    let mut x = step.embed(table, None).unwrap();
    for layer in 0..2 {
        let name = |part: &str| format!("layers.{layer}.{part}");
        let normed = layer_norm(&mut step, x, &name("ln_1"), hidden);
        let [query, key, value] =
            ["q", "k", "v"].map(|part| biased(&mut step, normed, &name(part), [hidden, hidden]));
        let (kv_heads, head_dim) = (heads, hidden / heads);
        let scale = 0.25;
        let heads = Heads {
            query,
            key,
            value,
            heads,
            kv_heads,
            head_dim,
            scale,
            window: None,
            score_cap: 0.0,
            sinks: None,
        };
        let attended = step.attention(heads).unwrap();
        let attended = biased(&mut step, attended, &name("proj"), [hidden, hidden]);
        x = step.program.call(ADD, [Some(x), Some(attended), None, None]).unwrap();
        let normed = layer_norm(&mut step, x, &name("ln_2"), hidden);
        let inner = biased(&mut step, normed, &name("fc"), [4 * hidden, hidden]);
        let gelu = Activation { function: Nonlinearity::GeluTanh, limit: 0.0 };
        let inner = step.program.call(gelu, [Some(inner), None]).unwrap();
        let outer = biased(&mut step, inner, &name("fc_out"), [hidden, 4 * hidden]);
        x = step.program.call(ADD, [Some(x), Some(outer), None, None]).unwrap();
    }
    let wanted = step.wanted(x).unwrap();
    let wanted = layer_norm(&mut step, wanted, "ln_f", hidden);
    let logits = step.logits(wanted, [Some(table), None], [1.0, 0.0]).unwrap();
    let hidden = layer_norm(&mut step, x, "ln_g", hidden);
    step.finish(logits, hidden).unwrap()
}

#[rstest]
#[case::by_hand(gpt2())]
#[case::gpt2(fixture("gpt2"))]
#[case::opt(fixture("opt"))]
#[case::llama3(fixture("llama3"))]
#[case::biases(fixture("qwen2"))]
#[case::head_norms(fixture("qwen3"))]
#[case::gelu_gate(fixture("llama_gelu"))]
#[case::partial_rotation(fixture("phi3_long"))]
fn layers_fuse_into_the_well_known_regions(#[case] program: Program) {
    let layers = 2;
    let fused = fuse(&program, &mut all_regions).unwrap();
    let found = names(&fused);
    let first = found.iter().position(|name| *name == LAYER[0]).unwrap();
    let layers_found = found[first..].chunks(LAYER.len()).take_while(|chunk| *chunk == LAYER).count();
    assert_eq!(layers_found, layers, "{found:?}");
    assert_eq!(found[..first], ["prepare_step", "attention_prepare", "embed"]);
    // After the layers: norm and head of the wanted rows, norm of all rows, then sampling.
    let rest: Vec<&str> = found[first + layers * LAYER.len()..].to_vec();
    let norm = if program.to_string().contains("layer_norm") { "layer_norm" } else { "rms_norm" };
    // The two variants of sampling.
    let sampling = ["logit_process+sample", "commit_tokens"];
    let head = format!("gather_rows+{norm}+linear");
    assert_eq!(rest, [&[head.as_str(), norm], &sampling[..], &sampling].concat());
    // The well-known names of the same regions.
    let known = ["attention_input", "linear_add", "mlp_input", "norm_linear"];
    let mut native = |_: &Program, call: &Call| Ok(known.contains(&call.op.name()));
    let fused = fuse(&program, &mut native).unwrap();
    let found = names(&fused);
    assert_eq!(found[first..first + layers * LAYER.len()], LAYER.repeat(layers));
    let rest = &found[first + layers * LAYER.len()..];
    assert_eq!(
        rest,
        [
            "gather_rows",
            "norm_linear",
            norm,
            "logit_process",
            "sample",
            "commit_tokens",
            "logit_process",
            "sample",
            "commit_tokens",
        ]
    );
}

/// Norms after attention and MLP need all columns of a product, so they fuse with the sum and not with the product.
#[test]
fn norms_after_attention_and_mlp_fuse_with_the_residual_sum() {
    let layer = [
        "attention_input",
        "paged_attention",
        "linear",
        "rms_norm+add",
        "mlp_input",
        "linear",
        "rms_norm+add",
    ];
    let fused = fuse(&fixture("gemma3"), &mut all_regions).unwrap();
    let found = names(&fused);
    assert_eq!(found[..3], ["prepare_step", "attention_prepare", "embed+add"]);
    assert_eq!(found[3..3 + 3 * layer.len()], layer.repeat(3));
}

#[rstest]
fn operands_of_regions_have_the_canonical_order(#[values("qwen3", "qwen2")] name: &str) {
    let fused = fuse(&fixture(name), &mut all_regions).unwrap();
    let node = fused.nodes.iter().find(|node| node.call.op.name() == "attention_input").unwrap();
    let values = node.call.operands.iter().map(|id| fused.value(id.unwrap()).unwrap());
    let named: Vec<&str> = values.map(|value| value.name.rsplit('.').next().unwrap()).collect();
    let heads: &[&str] = if name == "qwen3" { &["query_norm", "key_norm"] } else { &["bias"] };
    let rest = ["", "inverse_frequencies", "key_cache", "value_cache", ""];
    // Activations, positions and slots are results of calls, which have no names.
    assert_eq!(named[0], "");
    assert_eq!(named[3..], [heads, &rest].concat(), "{named:?}");
}

#[rstest]
fn a_device_without_region_kernels_gets_the_program_unchanged(
    #[values(gpt2(), fixture("llama3"), fixture("qwen3"))] program: Program,
) {
    assert_eq!(fuse(&program, &mut |_, _| Ok(false)).unwrap(), program);
}

#[test]
fn smaller_regions_are_formed_where_larger_ones_are_refused() {
    let program = fixture("llama3");
    let fused = fuse(&program, &mut regions_named(&["add_rms_norm", "norm_linear"])).unwrap();
    let found = names(&fused);
    // Norms after a sum fuse with it. Projections stay separate, because no admitted region contains them.
    assert_eq!(found.iter().filter(|name| **name == "add_rms_norm").count(), 3);
    assert_eq!(found.iter().filter(|name| **name == "norm_linear").count(), 1, "{found:?}");
    assert_eq!(found.iter().filter(|name| **name == "linear").count(), 2 * 7);
    assert!(!found.contains(&"columns"));

    // Gate and up are concatenated where the MLP is fused; query, key and value stay separate.
    let fused = fuse(&program, &mut regions_named(&["mlp_input"])).unwrap();
    let found = names(&fused);
    assert_eq!(found.iter().filter(|name| **name == "mlp_input").count(), 2);
    assert_eq!(found.iter().filter(|name| **name == "linear").count(), 2 * 5 + 1);
}

#[rstest]
fn fusion_keeps_the_uses_of_every_tensor(#[values(gpt2(), fixture("qwen2"))] program: Program) {
    let tensors = |program: &Program| {
        let mut names: Vec<String> = Vec::new();
        for (_, value) in program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
            let Origin::Weight(expr) = &value.origin else { continue };
            names.extend(expr.tensors().into_iter().map(str::to_owned));
        }
        names.sort();
        names
    };
    let fused = fuse(&program, &mut all_regions).unwrap();
    assert_eq!(tensors(&fused), tensors(&program));
    assert!(fused.values.len() < program.values.len());
    assert_eq!(fused.to_string().parse::<Program>().unwrap(), fused);
}

/// Builds a program of some calls over `x`, fuses it, and returns the names of its calls.
fn fused_names(
    build: impl FnOnce(&mut ProgramBuilder, ValueId, [ValueId; 2], ValueId) -> Vec<ValueId>,
) -> String {
    let mut program = ProgramBuilder::new("rule");
    let tokens = program.bounded("tokens");
    let x = program.input("x", TensorType::new(DType::F32, [tokens, 64.into()])).unwrap();
    let square = |name: &str| {
        let weight = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![64, 64] };
        (name.to_owned(), WeightExpr::tensor(name), weight)
    };
    let weights =
        ["a", "b"].map(square).map(|(name, expr, weight)| program.weight(name, expr, weight).unwrap());
    let head = TensorType::new(DType::F32, [16usize]);
    let head = program.vector("head", WeightExpr::tensor("head"), head).unwrap();
    let outputs = build(&mut program, x, weights, head);
    let program = program.finish(&outputs).unwrap();
    names(&fuse(&program, &mut all_regions).unwrap()).join(", ")
}

const LINEAR: Linear = Linear { dtype: DType::F32 };
const NORM: RmsNorm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };

#[test]
fn two_products_do_not_fuse() {
    let found = fused_names(|program, x, [a, b], _| {
        let y = program.call(LINEAR, [Some(x), Some(a), None]).unwrap();
        vec![program.call(LINEAR, [Some(y), Some(b), None]).unwrap()]
    });
    assert_eq!(found, "linear, linear");
}

#[test]
fn a_norm_of_heads_fuses_after_a_product_and_a_norm_of_rows_does_not() {
    let behind = |whole: bool| {
        fused_names(|program, x, [a, _], head| {
            let y = program.call(LINEAR, [Some(x), Some(a), None]).unwrap();
            if whole {
                return vec![program.call(LayerNorm { eps: 1e-5 }, [Some(y), None, None]).unwrap()];
            }
            vec![program.call(NORM, [Some(y), Some(head)]).unwrap()]
        })
    };
    assert_eq!((behind(false).as_str(), behind(true).as_str()), ("linear+rms_norm", "linear, layer_norm"));
}

#[test]
fn a_value_recomputed_in_every_tile_cannot_be_a_result() {
    let found = |wanted: bool| {
        fused_names(|program, x, [a, _], head| {
            let normed = program.call(NORM, [Some(x), Some(head)]).unwrap();
            let y = program.call(LINEAR, [Some(normed), Some(a), None]).unwrap();
            if wanted { vec![y, normed] } else { vec![y] }
        })
    };
    assert_eq!((found(false).as_str(), found(true).as_str()), ("norm_linear", "rms_norm, linear"));
}

#[test]
fn an_activation_fuses_before_a_product() {
    let found = fused_names(|program, x, [a, _], _| {
        let relu = Activation { function: Nonlinearity::Relu, limit: 0.0 };
        let y = program.call(relu, [Some(x), None]).unwrap();
        vec![program.call(LINEAR, [Some(y), Some(a), None]).unwrap()]
    });
    assert_eq!(found, "activation+linear");
}

/// Attention and MLP read the same normalised activations, but are joined apart: query, key and value; gate and up.
#[rstest]
#[case::gated_mlp(fixture("cohere"))]
#[case::plain_mlp(fixture("phi"))]
fn an_mlp_beside_attention_has_a_product_of_its_own(#[case] program: Program) {
    let layers = names(&program).iter().filter(|name| **name == "paged_attention").count();
    let fused = fuse(&program, &mut all_regions).unwrap().lower_regions(&mut |_| Ok(false)).unwrap();
    let count = |name| names(&fused).iter().filter(|op| **op == name).count();
    assert_eq!([count("linear"), count("columns")], [4 * layers + 1, 3 * layers], "{:?}", names(&fused));
}

#[test]
fn a_region_does_not_read_the_state_that_it_writes() {
    let mut program = ProgramBuilder::new("states");
    let cache = TensorType::new(DType::F32, [Size::bucket("pages"), 2.into(), 4.into(), 8.into()]);
    let cache = program.state("cache", cache).unwrap();
    let pages = program.input("pages", TensorType::new(DType::I32, [3usize])).unwrap();
    let old = program.call(dsrun_core::op::PageGather {}, [cache, pages].map(Some)).unwrap();
    let doubled = program.call(ADD, [Some(old), Some(old), None, None]).unwrap();
    let new = program.call(dsrun_core::op::PageScatter {}, [cache, doubled, pages].map(Some)).unwrap();
    let program = program.finish(&[new]).unwrap();
    let fused = fuse(&program, &mut all_regions).unwrap();
    let found = names(&fused).join(", ");
    assert!(!found.contains("page_gather+add+page_scatter"), "{found}");
}

#[test]
fn an_unknown_region_is_named_after_its_ops() {
    let fused = fuse(&fixture("llama3"), &mut all_regions).unwrap();
    for node in &fused.nodes {
        let Op::Region(region) = &node.call.op else { continue };
        assert_eq!(well_known::named(region).is_some(), !region.name().contains('+'), "{}", region.name());
    }
}

/// Admits the four well-known regions of a layer.
fn four_regions(_: &Program, call: &Call) -> Result<bool> {
    Ok(["attention_input", "linear_add", "mlp_input", "norm_linear"].contains(&call.op.name()))
}

/// The number of whole layers in a region, if it starts like a decoder and ends with a residual sum.
fn layers_of(call: &Call) -> Option<usize> {
    let Op::Region(region) = &call.op else { return None };
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    let begins = ["embed", "rms_norm", "layer_norm"].contains(ops.first()?);
    let whole = begins && *ops.last()? == "add";
    let layers = ops.iter().filter(|op| **op == "paged_attention").count();
    let sums = ops.iter().filter(|op| **op == "add").count();
    let scaled = usize::from(ops.starts_with(&["embed", "add"]));
    (whole && layers > 0 && sums == 2 * layers + scaled).then_some(layers)
}

#[rstest]
#[case::by_hand(gpt2(), 2)]
#[case::llama3(fixture("llama3"), 2)]
#[case::head_norms(fixture("qwen3"), 2)]
#[case::biases(fixture("qwen2"), 2)]
#[case::partial_rotation(fixture("phi3_long"), 2)]
#[case::norms_after_attention_and_mlp(fixture("gemma3"), 3)]
#[case::soft_caps(fixture("gemma2"), 3)]
fn layers_merge_with_each_other_and_the_embedding(#[case] program: Program, #[case] layers: usize) {
    let fused = fuse(&program, &mut four_regions).unwrap();
    let mut asked = 0;
    let merged = merge(&fused, &mut |_, call| {
        asked += 1;
        Ok(layers_of(call).is_some())
    });
    let merged = merged.unwrap();
    let regions: Vec<usize> = merged.nodes.iter().filter_map(|node| layers_of(&node.call)).collect();
    assert_eq!(regions, [layers], "{:?}", names(&merged));
    assert!(!names(&merged).contains(&"embed") && !names(&merged).contains(&"paged_attention"));
    // Layers repeat, or those of one kind do, so the device is asked once about equal runs.
    assert!(asked < 100 * layers, "{asked}");
    // Values between merged layers are no longer values of the program.
    assert!(merged.values.len() < fused.values.len());
    assert_eq!(merged.to_string().parse::<Program>().unwrap(), *merged);
    let lowered = merged.lower_regions(&mut |_| Ok(false)).unwrap();
    assert_eq!(names(&lowered), names(&fused.lower_regions(&mut |_| Ok(false)).unwrap()));
}

#[test]
fn nothing_is_merged_across_segments() {
    let program = fixture("llama3");
    let fused = fuse(&program, &mut four_regions).unwrap();
    let merged = merge(&fused, &mut all_regions).unwrap();
    let segments: Vec<usize> = merged.nodes.iter().map(|node| node.segment).collect();
    let mut distinct = segments.clone();
    distinct.dedup();
    assert_eq!(segments, distinct, "a device that takes everything runs each segment in one launch");
    let tail = merged.nodes.last().unwrap();
    let Op::Region(region) = &tail.call.op else { panic!("{:?}", tail.call) };
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    assert_eq!(ops, ["logit_process", "sample", "commit_tokens"]);
}

#[test]
fn a_device_that_admits_nothing_larger_keeps_the_fused_program() {
    let fused = fuse(&fixture("llama3"), &mut four_regions).unwrap();
    assert_eq!(*merge(&fused, &mut |_, _| Ok(false)).unwrap(), fused);
}

/// On a device that has layers in one launch for steps of a single token only.
#[test]
fn answers_are_kept_for_equal_sizes_alone() {
    let fused = Arc::new(fuse(&fixture("llama3"), &mut four_regions).unwrap());
    let merger = Merger::new(fused.clone()).unwrap();
    let merged = |tokens: usize, sequences: usize, conditions: &[bool]| {
        let mut asked = Vec::new();
        let sizes = move |name: &str| Some(if name == "tokens" { tokens } else { sequences });
        let mut native = |program: &Program, call: &Call| {
            let sizes_of =
                |id: &ValueId| program.value(*id).unwrap().tensor_type().map(|own| own.shape.clone());
            let shapes: Vec<_> =
                call.operands.iter().flatten().chain(&call.results).filter_map(sizes_of).collect();
            asked.push(format!("{shapes:?}").contains("tokens"));
            Ok(tokens == 1 && layers_of(call).is_some())
        };
        let program = merger.merge(&sizes, conditions, &mut native).unwrap();
        (program, asked)
    };
    let (one, asked_one) = merged(1, 1, &[]);
    assert!(one.nodes.len() < fused.nodes.len());
    let (two, asked_two) = merged(2, 1, &[]);
    assert_eq!(two, fused);
    assert!(asked_two.iter().all(|of_tokens| *of_tokens) && !asked_two.is_empty(), "{asked_two:?}");
    let (again, asked_again) = merged(1, 1, &[]);
    assert_eq!(again, one);
    let (again, asked_again_two) = merged(2, 1, &[]);
    assert_eq!((again, asked_again_two), (fused.clone(), Vec::new()));
    assert!(asked_again.len() < asked_one.len());
    assert!(!merged(2, 1, &[true]).1.is_empty(), "conditions count");
    assert!(!merged(2, 2, &[]).1.is_empty(), "other sizes count");
    assert!(merged(2, 2, &[]).1.is_empty());
}

#[test]
fn threads_that_share_a_merger_get_what_one_gets() {
    let fused = Arc::new(fuse(&fixture("llama3"), &mut four_regions).unwrap());
    let merged = |merger: &Merger, tokens: usize| {
        let sizes = move |name: &str| Some(if name == "tokens" { tokens } else { 1 });
        let mut native = |_: &Program, call: &Call| Ok(tokens % 3 == 1 && layers_of(call).is_some());
        merger.merge(&sizes, &[], &mut native).unwrap()
    };
    let one = Merger::new(fused.clone()).unwrap();
    let expected: Vec<_> = (1..40).map(|tokens| merged(&one, tokens)).collect();
    let shared = Merger::new(fused.clone()).unwrap();
    thread::scope(|scope| {
        let work = || (1..40).map(|tokens| merged(&shared, tokens)).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for programs in threads.into_iter().map(|thread| thread.join().unwrap()) {
            assert_eq!(programs, expected);
        }
    });
    assert!(expected[0].nodes.len() < fused.nodes.len() && *expected[1] == *fused);
}

/// Compares fused programs, on a device that runs the bodies of regions, with primitives bit by bit: the bodies are the same
/// primitives, and a column of a product does not depend on the columns beside it.
#[rstest]
fn fused_programs_compute_the_same(
    #[values(
        "llama3",
        "qwen2",
        "qwen3",
        "llama_gelu",
        "mistral",
        "gpt2",
        "opt",
        "gemma3_layer_types",
        "gemma3_wide",
        "phi3_long",
        "olmo3",
        "smollm3",
        "gguf/qwen2_q4_1",
        "gguf/smollm2_q8_0"
    )]
    fixture: &str,
) {
    let folder = fixtures().join(fixture);
    let gguf = folder.join("model.gguf");
    let model = Model::open(if gguf.exists() { gguf } else { folder }).unwrap();
    let prompts: Vec<Vec<u32>> = vec![(0..23).map(|index| (index * 17 + 5) % 96).collect(), vec![3, 1, 4]];
    for step_tokens in [64, 5] {
        let device = LoweringDevice::open();
        let run = |fuse: bool| {
            let options = EngineOptions { fuse, ignore_end: true, ..exact(step_tokens, 2) };
            let plan = EnginePlan::new(&model, &*device, &options).unwrap();
            let program = plan.program().to_string();
            // Layers of OLMo begin with products, and the well-known regions begin with norms.
            let regions: &[&str] = match fixture {
                "olmo3" => &["linear+gated_activation", "rms_norm+add"],
                _ => &["attention_input", "mlp_input"],
            };
            assert!(regions.iter().all(|name| program.contains(name) == fuse), "{program}");
            let weights = plan.memory().weights;
            let mut engine = plan.load(&model, device.clone(), &mut |_, _| {}).unwrap();
            (logits(&mut engine, &prompts[0]), greedy(&mut engine, &prompts, 12), weights)
        };
        let (plain_logits, plain, plain_weights) = run(false);
        assert!(device.planned().is_empty());
        let (fused_logits, fused, fused_weights) = run(true);
        let layers = |name: &String| name.starts_with("prepare_step+");
        assert!(device.planned().iter().any(layers), "{:?}", device.planned());
        assert_eq!(difference(&fused_logits, &plain_logits), 0.0, "{fixture}");
        assert_eq!(fused, plain);
        assert_eq!(fused_weights, plain_weights, "weights are stored once");
    }
}
