//! The pass `shard`: which strategies its search finds, and the programs of the ranks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    BlockFormat, DType, WeightExpr, WeightFormat,
    op::{Op, OperandType},
    program::{Call, Lane, Origin, Program, Value},
};
use dsrun_engine::passes::{
    Merger, fuse,
    shard::{MeshCosts, Pin, ShardPolicy, Sharded, shard},
};
use dsrun_models::{
    model::Model,
    step::{ProgramOptions, Storage},
};
use rstest::rstest;

/// The sizes of states of an engine for one request of 2048 tokens.
fn sizes(name: &str) -> Option<usize> {
    Some(match name {
        "pages" | "blocks" => 128,
        _ => 1,
    })
}

fn program(preset: &str, format: WeightFormat) -> Program {
    let model = Model::random_named(preset, 0, format).unwrap();
    let options = ProgramOptions { activation: DType::BF16, cache: DType::BF16, ..ProgramOptions::default() };
    model.program(&options).unwrap()
}

fn bf16(preset: &str) -> Program {
    program(preset, WeightFormat::Dense(DType::BF16))
}

/// Shards a program as for accelerators.
fn sharded(program: &Program, ranks: usize, policy: &ShardPolicy) -> Sharded {
    shard(program, ranks, policy, &MeshCosts::ACCELERATORS, &sizes, None).unwrap()
}

fn count(program: &Program, is: impl Fn(&Op) -> bool) -> usize {
    program.nodes.iter().filter(|node| is(&node.call.op)).count()
}

/// The number of layers of a region that consists of whole ones, with the sums over ranks of the results of attention and MLP.
fn summed_layers(call: &Call) -> Option<usize> {
    let Op::Region(region) = &call.op else { return None };
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    let count = |name: &str| ops.iter().filter(|op| **op == name).count();
    let layers = count("paged_attention");
    let whole = ops.first() == Some(&"rms_norm") && ops.ends_with(&["all_reduce", "add"]);
    (whole && layers > 0 && [count("all_reduce"), count("add")] == [2 * layers; 2]).then_some(layers)
}

/// A device whose launches exchange data with those of other ranks runs all layers of a rank as one.
#[test]
fn layers_of_a_rank_merge_with_their_sums_over_ranks() {
    let program = &sharded(&bf16("llama-1b"), 2, &ShardPolicy::default()).programs[1];
    let fused = fuse(program, &mut |_, call| {
        Ok(["attention_input", "mlp_input", "norm_linear"].contains(&call.op.name()))
    });
    let merger = Merger::new(fused.unwrap().into()).unwrap();
    let merged = merger.merge(&|_| None, &[], &mut |_, call| Ok(summed_layers(call).is_some())).unwrap();
    let regions: Vec<(usize, Lane)> =
        merged.nodes.iter().filter_map(|node| Some((summed_layers(&node.call)?, node.lane))).collect();
    assert_eq!(regions, [(16, Lane::Compute)], "{merged}");
    assert_eq!(merged.to_string().parse::<Program>().unwrap(), *merged);
}

/// The numbers of all-reduces, of all-gathers and of all collectives.
fn collectives(program: &Program) -> [usize; 3] {
    [
        count(program, |op| matches!(op, Op::AllReduce(_))),
        count(program, |op| matches!(op, Op::AllGather(_))),
        count(program, |op| op.mesh_axis().is_some()),
    ]
}

fn weight<'a>(program: &'a Program, name: &str) -> &'a Value {
    program.values.iter().find(|value| value.name == name).unwrap_or_else(|| panic!("no weight {name}"))
}

fn shape(value: &Value) -> Vec<usize> {
    match &value.value_type {
        OperandType::Weight(weight) => weight.shape.clone(),
        OperandType::Tensor(tensor) => tensor.shape.iter().map(|size| size.known().unwrap_or(0)).collect(),
    }
}

/// The rows or columns of the file's tensor that a weight reads: dimension, start, end.
fn slice(value: &Value) -> Option<(usize, usize, usize)> {
    match &value.origin {
        Origin::Weight(WeightExpr::Slice { dimension, start, end, .. }) => Some((*dimension, *start, *end)),
        Origin::Weight(WeightExpr::Pad { of, .. }) => match &**of {
            WeightExpr::Slice { dimension, start, end, .. } => Some((*dimension, *start, *end)),
            _ => None,
        },
        _ => None,
    }
}

/// Megatron's split: projections into a layer by outputs, projections out of it by inputs, the vocabulary by rows.
#[rstest]
fn llama_is_split_as_by_megatron(
    #[values("llama-1b", "llama-8b")] preset: &str,
    #[values(2, 4)] ranks: usize,
) {
    let program = bf16(preset);
    let layers = count(&program, |op| matches!(op, Op::PagedAttention(_)));
    let sharded = sharded(&program, ranks, &ShardPolicy::default());
    for (rank, own) in sharded.programs.iter().enumerate() {
        assert_eq!(collectives(own), [2 * layers + 1, 1, 2 * layers + 2]);
        for layer in 0..layers {
            for (name, dimension) in
                [("query", 0), ("key", 0), ("value", 0), ("gate", 0), ("up", 0), ("output", 1), ("down", 1)]
            {
                let name = format!("layers.{layer}.{name}");
                let size = shape(weight(&program, &name))[dimension];
                let part = size / ranks;
                let found = slice(weight(own, &name));
                assert_eq!(found, Some((dimension, rank * part, (rank + 1) * part)), "{name}");
            }
            let cache = format!("layers.{layer}.key_cache");
            assert_eq!(shape(weight(own, &cache))[1] * ranks, shape(weight(&program, &cache))[1]);
        }
        let rows = shape(weight(&program, "embedding"))[0];
        assert_eq!(shape(weight(own, "embedding"))[0], rows / ranks);
    }
}

/// A part of every expert: ranks read equally much whatever tokens choose, and exchange two sums in a layer.
#[rstest]
fn experts_are_sliced(#[values("mixtral-8x7b", "qwen3-30b-a3b")] preset: &str, #[values(2, 4)] ranks: usize) {
    let program = bf16(preset);
    let layers = count(&program, |op| matches!(op, Op::PagedAttention(_)));
    let sharded = sharded(&program, ranks, &ShardPolicy::default());
    for own in &sharded.programs {
        assert_eq!(collectives(own), [2 * layers + 1, 1, 2 * layers + 2]);
        for (name, dimension) in [("expert_gate", 0), ("expert_up", 0), ("expert_down", 1)] {
            let name = format!("layers.0.{name}");
            let mut expected = shape(weight(&program, &name));
            expected[dimension] /= ranks;
            assert_eq!(shape(weight(own, &name)), expected, "{name}");
        }
    }
}

/// Whole experts where the blocks of their format do not divide, so that some ranks would have larger parts of each.
#[test]
fn experts_are_split_by_experts_where_parts_would_be_uneven() {
    // 768 inputs are 24 blocks of 32.
    let program = program("qwen3-30b-a3b", WeightFormat::Block(BlockFormat::Q8_0));
    let sharded = sharded(&program, 16, &ShardPolicy::default());
    for (rank, own) in sharded.programs.iter().enumerate() {
        let is_own = |op: &Op| matches!(op, Op::GroupedLinear(op) if op.first_expert as usize == 8 * rank);
        assert_eq!(count(own, is_own), 3 * 48);
        assert_eq!(shape(weight(own, "layers.0.expert_down")), [8 * 2048, 768]);
    }
}

#[rstest]
fn gpt2_is_split_as_by_megatron_and_its_vocabulary_is_padded(#[values(2, 4)] ranks: usize) {
    let program = bf16("gpt2-xl");
    let layers = count(&program, |op| matches!(op, Op::PagedAttention(_)));
    let sharded = sharded(&program, ranks, &ShardPolicy::default());
    for (rank, own) in sharded.programs.iter().enumerate() {
        assert_eq!(collectives(own), [2 * layers + 1, 1, 2 * layers + 2]);
        for (name, dimension) in [("query", 0), ("up", 0), ("output", 1), ("down", 1)] {
            let found = slice(weight(own, &format!("layers.7.{name}"))).unwrap();
            assert_eq!(found.0, dimension, "{name}");
        }
        assert_eq!(shape(weight(own, "embedding"))[0], 50257usize.div_ceil(ranks));
        // What is added to a sum is added by one rank: positions, and the biases of projections out of a layer.
        assert_eq!(own.values.iter().any(|value| value.name == "positions"), rank == 0);
        let biases =
            |name: &str| own.values.iter().any(|value| value.name == format!("layers.3.{name}.bias"));
        assert!(biases("up"));
        assert_eq!([biases("down"), biases("output")], [rank == 0; 2]);
    }
    let rows: usize =
        sharded.programs.iter().map(|own| slice(weight(own, "embedding")).map_or(0, |s| s.2 - s.1)).sum();
    assert_eq!(rows, 50257);
}

/// 9 query heads and 3 KV heads.
#[rstest]
#[case(2, &[[6, 2], [3, 1]])]
#[case(3, &[[3, 1], [3, 1], [3, 1]])]
#[case(4, &[[2, 1], [1, 1], [3, 1], [3, 1]])]
fn heads_that_do_not_divide_are_split_unevenly(#[case] ranks: usize, #[case] expected: &[[u32; 2]]) {
    let program = bf16("smollm2-135m");
    let sharded = sharded(&program, ranks, &split_all());
    for (own, expected) in sharded.programs.iter().zip(expected) {
        for node in &own.nodes {
            if let Op::PagedAttention(op) = &node.call.op {
                assert_eq!([op.query_heads, op.kv_heads], *expected);
            }
        }
    }
    let columns: usize = sharded.programs.iter().map(|own| shape(weight(own, "layers.0.output"))[1]).sum();
    assert_eq!(columns, 576, "every query head is on one rank");
}

/// Splits the layers, whatever it costs.
fn split_all() -> ShardPolicy {
    let pins = ["query", "gate"].map(|name| (format!("layers.*.{name}"), Pin::Rows));
    ShardPolicy { weights: pins.into(), ..ShardPolicy::default() }
}

/// Blocks of 32 columns stay whole where parts hold whole blocks, and the weight keeps its format.
#[rstest]
fn quantised_weights_keep_their_format(#[values(2, 4)] ranks: usize) {
    let program = program("llama-1b", WeightFormat::Block(BlockFormat::Q4_1));
    let q4_1 = WeightFormat::Block(BlockFormat::Q4_1);
    for own in &sharded(&program, ranks, &ShardPolicy::default()).programs {
        for name in ["layers.0.query", "layers.0.output", "layers.0.down", "embedding"] {
            assert_eq!(weight(own, name).weight_type().unwrap().format, q4_1, "{name}");
        }
    }
}

#[test]
fn one_rank_gets_the_program_itself() {
    let program = bf16("llama-1b");
    assert_eq!(sharded(&program, 1, &ShardPolicy::default()).programs, [program]);
}

#[test]
fn pins_decide_and_the_rest_is_found() {
    let program = bf16("llama-1b");
    let policy =
        ShardPolicy::from_toml("[weights]\nembedding = \"replicated\"\n\"layers.0\" = \"replicated\"\n");
    let own = &sharded(&program, 2, &policy.unwrap()).programs[1];
    for name in ["embedding", "layers.0.query", "layers.0.down"] {
        assert_eq!(shape(weight(own, name)), shape(weight(&program, name)), "{name}");
    }
    assert_eq!(slice(weight(own, "layers.1.down")).map(|slice| slice.0), Some(1));
}

#[test]
fn pins_that_are_wrong_are_refused() {
    let program = bf16("llama-1b");
    let refused = |text: &str| {
        let policy = ShardPolicy::from_toml(text)?;
        shard(&program, 2, &policy, &MeshCosts::ACCELERATORS, &sizes, None).map(drop)
    };
    let message = |text: &str| refused(text).unwrap_err().to_string();
    assert!(message("[weights]\nlayer = \"rows\"\n").contains("`layer` matches no weight"));
    let norm = message("[weights]\nfinal_norm = \"rows\"\n");
    assert!(norm.contains("no strategy is possible with the pinned forms"), "{norm}");
    assert!(message("[weights]\nembedding = \"diagonal\"\n").contains("diagonal"));
    assert!(message("weight = 1\n").contains("unknown field"));
    assert!(message("[costs]\nlatency-us = -1.0\n").contains("must be 0 or more"));
}

#[test]
fn memory_is_a_hard_limit() {
    let program = bf16("llama-1b");
    // Nothing is worth an exchange, unless memory asks for it.
    let costs =
        MeshCosts { latency_us: 1e6, gather_latency_us: 1e6, memory_price: 0.0, ..MeshCosts::ACCELERATORS };
    let within = |limit| shard(&program, 2, &ShardPolicy::default(), &costs, &sizes, limit);
    let free = within(None).unwrap();
    assert_eq!(collectives(&free.programs[0])[2], 0);
    let tight = within(Some(free.memory * 3 / 4)).unwrap();
    assert!(tight.memory <= free.memory * 3 / 4);
    let exchanges = collectives(&tight.programs[0])[2];
    assert!((1..34).contains(&exchanges), "{exchanges} collectives");
    let error = within(Some(free.memory / 4)).unwrap_err();
    assert!(error.to_string().contains("2 ranks needs at least"), "{error}");
}

/// Every fixture of every family has a strategy that splits its layers, and rank programs that are valid.
#[rstest]
fn every_family_is_sharded(#[values(2, 3, 4)] ranks: usize) {
    let mut split = 0;
    let folders = std::fs::read_dir(support::fixtures()).unwrap().map(|entry| entry.unwrap().path());
    for folder in folders.filter(|folder| folder.join("expected.json").exists()) {
        let model = Model::open(&folder).unwrap();
        let options = ProgramOptions { storage: Storage::Cast(DType::F32), ..ProgramOptions::default() };
        let program = model.program(&options).unwrap();
        let costs = MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, ..MeshCosts::HOST };
        let sharded = shard(&program, ranks, &ShardPolicy::default(), &costs, &sizes, None);
        let sharded = sharded.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let collectives: Vec<_> = sharded.programs.iter().map(collectives).collect();
        assert!(
            collectives.iter().all(|own| *own == collectives[0]),
            "{}: {collectives:?}",
            folder.display()
        );
        split += usize::from(collectives[0][2] > 0);
    }
    assert!(split >= 20, "only {split} models are split over {ranks} ranks");
}
