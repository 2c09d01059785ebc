//! Calls of models with latent attention: writes of latents, attention over them, and the linear layers of heads.

use super::{bounded, call, integer_formats, tensor, weight};
use dsrun_core::{
    DType, WeightFormat,
    checked::ValidCall,
    op::{AttentionMask, HeadLinear, LatentWrite, PagedAttention},
};

/// Few rows and many, heads with rest and without, and heads that are whole units of packed rows or not.
fn linears(dtype: DType) -> Vec<ValidCall> {
    let integers = integer_formats(dtype).skip(1).take(2);
    let formats = [dtype, DType::BF16].map(WeightFormat::Dense).into_iter().chain(integers);
    let mut calls = Vec::new();
    for format in formats {
        for (rows, [heads, inputs, outputs, rest]) in
            [(1, [4, 256, 512, 64]), (16, [4, 256, 20, 0]), (40, [3, 256, 128, 5]), (300, [4, 512, 128, 8])]
        {
            let x = bounded(dtype, &[rows, heads * (inputs + rest)]);
            let operands = vec![x, weight(format, [heads * outputs, inputs])];
            calls.push(call(HeadLinear { dtype, heads: heads as u32 }, operands));
        }
    }
    calls
}

/// Decode steps, prefills and both, for few and many heads, of the sizes of DeepSeek and of others.
fn attentions(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    for (tokens, sequences, query_heads, [key_size, value_size]) in [
        (1, 1, 16, [576, 512]),
        (8, 8, 32, [576, 512]),
        (200, 200, 128, [576, 512]),
        (512, 1, 16, [576, 512]),
        (600, 4, 128, [576, 512]),
        (40, 4, 5, [296, 272]),
        (3, 2, 8, [577, 500]),
        (100, 4, 8, [80, 64]),
        (4, 4, 8, [96, 64]),
    ] {
        // The masks differ in little: one of a few calls is explicit.
        for mask in [AttentionMask::Causal, AttentionMask::Explicit] {
            if mask == AttentionMask::Explicit && query_heads > 8 {
                continue;
            }
            let is_explicit = mask == AttentionMask::Explicit;
            let op = PagedAttention {
                query_heads,
                kv_heads: 1,
                scale: 0.1,
                softcap: if is_explicit { 5.0 } else { 0.0 },
                window: if is_explicit { 30 } else { 0 },
                mask,
                value_size: value_size as u32,
            };
            let integers = |size: usize| tensor(DType::I32, &[size]);
            let mut operands = vec![
                bounded(dtype, &[tokens, query_heads as usize * key_size]),
                tensor(dtype, &[8, 1, 16, key_size]),
                None,
            ];
            operands.extend([0; 3].map(|_| integers(sequences)));
            operands.extend([tensor(DType::I32, &[sequences, 4]), integers(0)]);
            let vector = || is_explicit.then(|| tensor(DType::F32, &[query_heads as usize])).flatten();
            let bits = if is_explicit { bounded(DType::U32, &[tokens, 2]) } else { None };
            operands.extend([vector(), vector(), bits]);
            calls.push(call(op, operands));
        }
    }
    calls
}

pub(super) fn latent_calls(dtype: DType) -> Vec<ValidCall> {
    let write = vec![
        tensor(dtype, &[4, 1, 16, 576]),
        bounded(DType::F32, &[3, 512]),
        bounded(dtype, &[3, 64]),
        bounded(DType::I32, &[3]),
    ];
    let mut calls = vec![call(LatentWrite {}, write)];
    calls.extend(linears(dtype));
    calls.extend(attentions(dtype));
    calls
}
