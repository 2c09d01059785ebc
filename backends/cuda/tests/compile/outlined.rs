//! Regions of whole programs: the tail of a step, and attention with its quantisation.

use crate::call_over;
use dsrun_core::{
    DType, TensorDesc, TensorType,
    checked::ValidCall,
    collective::{Comm, host::HostComm},
    kernels::OperandDesc,
    op::{AttentionMask, CommitTokens, LogitProcess, OperandType, PagedAttention, QuantPerToken, Sample},
    program::{Program, ProgramBuilder, ValueId},
};
use std::sync::Arc;

/// The call of a region of all nodes of a program.
pub(crate) fn outlined(program: &Program) -> ValidCall {
    outlined_over(program, 1)
}

/// The same with collectives over so many ranks.
pub(crate) fn outlined_over(program: &Program, ranks: usize) -> ValidCall {
    let outlined = program.outline(0..program.nodes.len(), &program.uses()).unwrap();
    let operand = |id: &Option<ValueId>| {
        Some(match &program.value(id.unwrap()).unwrap().value_type {
            OperandType::Weight(weight) => OperandDesc::Weight(weight.clone()),
            OperandType::Tensor(tensor) => {
                OperandDesc::Tensor(TensorDesc::dense(tensor.dtype, &tensor.resolve(&|_| None).unwrap()))
            }
        })
    };
    let comm =
        outlined.op.mesh_axis().map(|_| Arc::new(HostComm::group(ranks).unwrap().remove(0)) as Arc<dyn Comm>);
    call_over(outlined.op, outlined.operands.iter().map(operand).collect(), comm)
}

/// The tail of a step of one row: logits that are whole vectors and others, with limits and without.
pub(crate) fn token_calls() -> Vec<ValidCall> {
    let mut calls = Vec::new();
    for (columns, limited) in [(64, false), (63, true)] {
        let mut program = ProgramBuilder::new("tail");
        let mut input = |name: &str, dtype, shape: &[usize]| {
            program.input(name, TensorType::new(dtype, shape.iter().copied())).unwrap()
        };
        let logits = input("logits", DType::F32, &[1, columns]);
        let [requests, positions, commits, stops] =
            ["requests", "positions", "commits", "stops"].map(|name| input(name, DType::I32, &[1]));
        let settings = input("parameters", DType::F32, &[4, 8]);
        let seeds = input("seeds", DType::U32, &[4, 2]);
        let bias = limited.then(|| input("bias", DType::F32, &[4, columns]));
        let mask = limited.then(|| input("mask", DType::U32, &[1, columns.div_ceil(32)]));
        let mut state = |name: &str, shape: &[usize]| {
            program.state(name, TensorType::new(DType::I32, shape.iter().copied())).unwrap()
        };
        let (last, finished) = (state("last", &[4]), state("finished", &[4]));
        let counts = state("counts", &[4, columns]);
        let process = [Some(logits), Some(requests), Some(settings), Some(counts), bias, mask];
        let processed = program.call(LogitProcess {}, process).unwrap();
        let sample = [processed, requests, positions, settings, seeds].map(Some);
        let sampled = program.calls(Sample {}, sample).unwrap();
        let commit = [commits, sampled[0], stops, last, finished, counts].map(Some);
        let committed = program.calls(CommitTokens {}, commit).unwrap();
        let outputs = [vec![processed], sampled, committed].concat();
        calls.push(outlined(&program.finish(&outputs).unwrap()));
    }
    calls
}

/// Attention of many single tokens whose rows are quantised.
pub(crate) fn attention_and_quantisation() -> impl Iterator<Item = ValidCall> {
    [(DType::BF16, 128, 32, 8, 128), (DType::F16, 64, 16, 4, 64)].into_iter().map(
        |(dtype, sequences, query_heads, kv_heads, size)| {
            let op = PagedAttention {
                query_heads,
                kv_heads,
                scale: 0.1,
                softcap: 0.0,
                window: 0,
                mask: AttentionMask::Causal,
                value_size: 0,
            };
            let mut program = ProgramBuilder::new("attention");
            let mut input = |name: &str, dtype, shape: &[usize]| {
                program.input(name, TensorType::new(dtype, shape.iter().copied())).unwrap()
            };
            let query = input("query", dtype, &[sequences, query_heads as usize * size]);
            let cache = [64, kv_heads as usize, 16, size];
            let caches = ["keys", "values"].map(|name| input(name, dtype, &cache));
            let lengths = ["start", "length", "total"].map(|name| input(name, DType::I32, &[sequences]));
            let table = input("table", DType::I32, &[sequences, 4]);
            let work = input("work", DType::I32, &[0]);
            let operands = [&[query][..], &caches, &lengths, &[table, work]].concat();
            let operands = operands.into_iter().map(Some).chain([None; 3]);
            let y = program.calls(op, operands).unwrap()[0];
            let quantised = program.calls(QuantPerToken {}, [Some(y)]).unwrap();
            outlined(&program.finish(&quantised).unwrap())
        },
    )
}
