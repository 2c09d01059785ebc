//! Indices and lengths in device memory may be any numbers: no call may panic or touch memory outside its operands.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/backends.rs"]
mod backends;
#[path = "support/bench.rs"]
mod bench;

use bench::{Bench, Number, Operand, desc};
use dsrun_core::{
    DType,
    device::{Backend, BufferSlice},
    kernels::{Argument, Binding, OperandDesc},
    op::{
        Attention, AttentionMask, CommitTokens, Embed, GatherRows, KvWrite, LogitProcess, Op, PageGather,
        PageScatter, PagedAttention, PrepareStep, Rope, RopePairing, Sample,
    },
};
use rstest::rstest;
use std::sync::Arc;

/// Numbers that are likely to be mishandled, among small ones that are not.
struct Hostile(u64);

impl Hostile {
    fn number(&mut self) -> i32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (choice, small) = ((self.0 >> 33) % 12, (self.0 >> 40) % 9);
        match choice {
            0 => -1,
            1 => i32::MAX,
            2 => i32::MIN,
            3 => -(small as i32),
            4 => 1 << (small + 20),
            _ => small as i32,
        }
    }

    fn numbers(&mut self, count: usize) -> Vec<i32> {
        (0..count).map(|_| self.number()).collect()
    }
}

struct Attack {
    bench: Bench,
    hostile: Hostile,
}

impl Attack {
    fn indices(&mut self, shape: &[usize]) -> Option<Operand> {
        let values = self.hostile.numbers(shape.iter().product());
        Some(self.bench.operand(&values, shape))
    }

    fn of<T: Number>(&mut self, value: T, shape: &[usize]) -> Option<Operand> {
        Some(self.bench.operand(&vec![value; shape.iter().product()], shape))
    }

    /// Runs a call whose results have these types; those that update operand `updates` share its storage.
    fn run(
        &self,
        op: impl Into<Op>,
        operands: Vec<Option<Operand>>,
        results: &[(DType, &[usize], Option<usize>)],
    ) {
        let result = |(dtype, shape, updates): &(DType, &[usize], Option<usize>)| {
            let slice: BufferSlice = match updates.map(|index| &operands[index]) {
                Some(Some((OperandDesc::Tensor(_), Argument::Tensor(binding)))) => binding.slice.clone(),
                _ => self.bench.upload(&vec![0u8; shape.iter().product::<usize>() * dtype.bytes()]),
            };
            (desc(*dtype, shape), Binding::new(slice))
        };
        let results = results.iter().map(result).collect();
        self.bench.run(op, operands, results).unwrap();
    }
}

const F32: DType = DType::F32;
const I32: DType = DType::I32;

#[rstest]
fn no_op_panics(
    #[values(backends::candle(), backends::cpu())] backend: Arc<dyn Backend>,
    #[values(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] seed: u64,
    #[values(1, 2)] threads: usize,
) {
    let mut a = Attack { bench: Bench::new(&*backend, threads), hostile: Hostile(seed) };
    for _ in 0..5 {
        let (cache, rows) = ([3, 2, 4, 8], [6, 16]);

        let table = Some(a.bench.weight(&[1.0; 5 * 16], 5, 16));
        let learned = Some(a.bench.weight(&[1.0; 4 * 16], 4, 16));
        let operands = vec![a.indices(&[6]), table, a.indices(&[6]), learned];
        a.run(
            Embed { dtype: F32, first_row: u32::MAX, position_offset: u32::MAX },
            operands,
            &[(F32, &rows, None)],
        );

        let operands = vec![a.of(1f32, &rows), a.indices(&[6])];
        a.run(GatherRows {}, operands, &[(F32, &rows, None)]);

        let operands = vec![a.of(1f32, &rows), a.indices(&[6]), a.of(0.5f32, &[4])];
        let rope = Rope { heads: 2, pairing: RopePairing::Halves, scale: 1.0 };
        a.run(rope, operands, &[(F32, &rows, None)]);

        let (caches, values) =
            ([a.of(1f32, &cache), a.of(1f32, &cache)], [a.of(2f32, &rows), a.of(2f32, &rows)]);
        let mut operands = [caches, values].concat();
        operands.push(a.indices(&[6]));
        a.run(KvWrite {}, operands, &[(F32, &cache, Some(0)), (F32, &cache, Some(1))]);

        let operands = vec![a.of(1f32, &cache), a.indices(&[7])];
        a.run(PageGather {}, operands, &[(F32, &[7, 64], None)]);
        let operands = vec![a.of(1f32, &cache), a.of(2f32, &[7, 64]), a.indices(&[7])];
        a.run(PageScatter {}, operands, &[(F32, &cache, Some(0))]);

        for (mask, window) in [
            (AttentionMask::Causal, 0),
            (AttentionMask::Causal, u32::MAX),
            (AttentionMask::Bidirectional, 3),
            (AttentionMask::Explicit, 2),
        ] {
            let mut operands = vec![a.of(1f32, &[6, 32]), a.of(1f32, &cache), a.of(1f32, &cache)];
            operands.extend([a.indices(&[3]), a.indices(&[3]), a.indices(&[3]), a.indices(&[3, 2])]);
            operands.extend([a.of(0i32, &[0]), a.of(0.5f32, &[4]), a.of(0.5f32, &[4])]);
            operands.push(if mask == AttentionMask::Explicit { a.of(0x5555_5555u32, &[6, 1]) } else { None });
            let op = PagedAttention {
                query_heads: 4,
                kv_heads: 2,
                scale: 1.0,
                softcap: 2.0,
                window,
                mask,
                value_size: 0,
            };
            a.run(op, operands, &[(F32, &[6, 32], None), (F32, &[6, 4], None)]);

            if mask != AttentionMask::Explicit {
                let mut operands = vec![a.of(1f32, &[6, 32]), a.of(1f32, &rows), a.of(1f32, &rows)];
                operands.extend([a.indices(&[3]), a.indices(&[3]), a.of(0.5f32, &[4])]);
                let op = Attention { query_heads: 4, kv_heads: 2, scale: 1.0, softcap: 0.0, window, mask };
                a.run(op, operands, &[(F32, &[6, 32], None)]);
            }
        }

        let mut operands =
            vec![a.indices(&[3]), a.indices(&[3]), a.indices(&[3]), a.indices(&[6]), a.indices(&[2])];
        operands.extend([
            a.indices(&[4, 2]),
            a.indices(&[4]),
            a.indices(&[4]),
            a.indices(&[4]),
            a.indices(&[4, 5]),
        ]);
        let results: [(_, &[usize], _); 10] = [
            (I32, &[6], None),
            (I32, &[6], None),
            (I32, &[6], None),
            (I32, &[3], None),
            (I32, &[3], None),
            (I32, &[3], None),
            (I32, &[3, 2], None),
            (I32, &[2], None),
            (I32, &[4], Some(8)),
            (I32, &[4, 5], Some(9)),
        ];
        a.run(PrepareStep { block_size: 4 }, operands, &results);

        let mut operands = vec![a.indices(&[3]), a.indices(&[3]), a.indices(&[2])];
        operands.extend([a.indices(&[4]), a.indices(&[4]), a.indices(&[4, 5])]);
        a.run(
            CommitTokens {},
            operands,
            &[(I32, &[4], Some(3)), (I32, &[4], Some(4)), (I32, &[4, 5], Some(5))],
        );

        for parameter in [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e-40, 0.7, 3.0] {
            for logit in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0] {
                let mut operands = vec![a.of(logit, &[3, 5]), a.indices(&[3]), a.of(parameter, &[4, 8])];
                operands.extend([a.indices(&[4, 5]), None, None]);
                a.run(LogitProcess {}, operands, &[(F32, &[3, 5], None)]);
                let mut operands = vec![a.of(logit, &[3, 5]), a.indices(&[3]), a.indices(&[3])];
                operands.extend([a.of(parameter, &[4, 8]), a.of(7u32, &[4, 2])]);
                a.run(Sample {}, operands, &[(I32, &[3], None), (F32, &[3], None)]);
            }
        }
    }
}
