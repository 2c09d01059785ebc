//! Tensors in pinned memory: calls read and write them there, with the bits that they give in device memory.

use super::{
    bench::{Bench, During, Held, Outcome, Stop, ensure, floats, same_bits},
    paged::{Sequence, Turn},
};
use crate::subject::Subject;
use dsrun_core::device::{BufferSlice, MemoryKind};

/// Query heads, heads of keys and values, and elements of a head.
const HEADS: [usize; 3] = [8, 2, 64];
/// Tokens of each step: a prompt, its next tokens, and single tokens as in generation.
const STEPS: [usize; 5] = [37, 20, 1, 1, 3];
/// Tokens of a page, and the pages of the sequence, which are not in order.
const BLOCK: usize = 16;
const PAGES: [i32; 4] = [3, 0, 4, 1];
/// All pages, one more than the sequence has.
const ALL_PAGES: usize = 5;

/// A sequence has its keys and values in pinned memory. What attention gives in each step, and the keys and values, have the bits of those
/// of a cache in device memory. Attention is bound before a step's keys and values are written.
pub(super) fn cache(subject: &Subject) -> Outcome {
    if !subject.device().properties().binds_pinned {
        return Err(Stop::Unsupported("the device does not take tensors in pinned memory".into()));
    }
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        let sequence = Sequence::new(&format!("pinned/{dtype}"), dtype, HEADS, STEPS.iter().sum());
        let caches = [
            sequence.cache(&mut bench, ALL_PAGES, BLOCK)?,
            sequence.cache(&mut bench, ALL_PAGES, BLOCK)?.map(|held| in_pinned(&mut bench, held))?,
        ];
        let mut first = 0;
        for (step, count) in STEPS.into_iter().enumerate() {
            let turn = [Turn { sequence: &sequence, first, count, pages: &PAGES }];
            let mut found = Vec::new();
            for cache in &caches {
                let operands = cache.operands(&mut bench, &turn)?;
                let plan = bench.plan(sequence.op(), &operands)?;
                let attention = bench.bind(&plan, &operands)?;
                cache.write(&mut bench, &turn)?;
                bench.enqueue(&attention)?;
                found.push(bench.get(&attention.results[0])?);
            }
            same_bits(&format!("attention of {dtype} in step {step}"), &found[1], &found[0])?;
            first += count;
        }
        let [device, pinned] = &caches;
        for (on_device, in_host) in device.tensors().into_iter().zip(pinned.tensors()) {
            let (expected, found) = (bench.get(on_device)?, bench.get(in_host)?);
            same_bits(&format!("keys and values of {dtype}"), &found, &expected)?;
            ensure(in_host.slice.buffer.kind() == MemoryKind::Pinned, || "the cache is not pinned".into())?;
        }
    }
    Ok(())
}

/// A tensor of the same type and content in pinned memory, not at the start of its buffer.
fn in_pinned(bench: &mut Bench, held: &Held) -> Result<Held, Stop> {
    let offset = bench.device.properties().alignment.max(64);
    let buffer = bench.device.allocate(offset + held.slice.bytes, MemoryKind::Pinned)?;
    let slice = BufferSlice::new(buffer, offset, held.slice.bytes)?;
    bench.stream.copy(&held.slice, &slice).during("the copy to pinned memory")?;
    Ok(Held { desc: held.desc.clone(), slice })
}
