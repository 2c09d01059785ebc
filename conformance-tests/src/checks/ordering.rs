//! The order of work on streams, with events and copies, without graphs.

use super::bench::{Bench, During, Given, Outcome, ensure, fail, floats, same_bits};
use crate::{
    cases::drawn_weight,
    random::{Random, Values},
    runner::TIMEOUT,
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    WeightFormat,
    device::{BufferSlice, MemoryKind},
    op::{Add, Linear},
};

/// The number of rounds, each with other data.
const ROUNDS: usize = 12;
/// The size of the square products, which take a device long enough for a stream that does not wait to come too early.
const SIZE: usize = 768;
const ROWS: usize = 96;

/// A stream reads behind a wait what another stream has computed before the event: a product of products.
pub(super) fn streams(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let mut reader = Bench::new(subject.device())?;
    let dtype = floats(&*bench.device)[0];
    let mut random = Random::named("order/streams");
    let weight = drawn_weight(&mut random, WeightFormat::Dense(dtype), [SIZE, SIZE], 0.03);
    let weight = bench.pack(&weight)?;
    let x = bench.empty(dtype, &[ROWS, SIZE])?;
    let operands = |x: Given| [x, weight.clone(), Given::Absent];
    let plan = bench.plan(Linear { dtype }, &operands((&x).into()))?;
    let mut chain = vec![bench.bind(&plan, &operands((&x).into()))?];
    for _ in 0..3 {
        let last = Given::from(&chain[chain.len() - 1].results[0]);
        chain.push(bench.bind(&plan, &operands(last))?);
    }
    let product = Given::from(&chain[3].results[0]);
    let nothing = bench.give(&Tensor::filled(dtype, &[ROWS, SIZE], 0))?;
    let sum = [product, nothing, Given::Absent, Given::Absent];
    let plan = bench.plan(Add { alpha: 1.0 }, &sum)?;
    let read = reader.bind(&plan, &sum)?;
    bench.wait()?;
    reader.wait()?;
    let event = bench.device.event()?;
    for round in 0..ROUNDS {
        let values = random.tensor(dtype, &[ROWS, SIZE], Values::Uniform);
        bench.set(&x, &values)?;
        chain.iter().try_for_each(|bound| bench.enqueue(bound))?;
        bench.stream.record(&*event)?;
        reader.stream.wait(&*event)?;
        reader.enqueue(&read)?;
        let found = reader.get(&read.results[0])?;
        let expected = bench.get(&chain[3].results[0])?;
        same_bits(&format!("round {round}, a stream that waits for another"), &found, &expected)?;
    }
    Ok(())
}

/// Once an event is reached, or has been waited for, the host finds in pinned memory what was copied there before it.
pub(super) fn events(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let dtype = floats(&*bench.device)[0];
    let mut random = Random::named("order/events");
    let weight = drawn_weight(&mut random, WeightFormat::Dense(dtype), [SIZE, SIZE], 0.03);
    let weight = bench.pack(&weight)?;
    let x = bench.empty(dtype, &[ROWS, SIZE])?;
    let operands = [(&x).into(), weight, Given::Absent];
    let plan = bench.plan(Linear { dtype }, &operands)?;
    let bound = bench.bind(&plan, &operands)?;
    let result = bound.results[0].slice.clone();
    let pinned = bench.device.allocate(result.bytes, MemoryKind::Pinned)?;
    let Some(pointer) = pinned.host_pointer() else {
        return fail("pinned memory has no address for the host");
    };
    let pinned = BufferSlice::whole(pinned);
    let event = bench.device.event()?;
    for round in 0..ROUNDS {
        bench.set(&x, &random.tensor(dtype, &[ROWS, SIZE], Values::Uniform))?;
        bench.enqueue(&bound)?;
        bench.stream.copy(&result, &pinned)?;
        bench.stream.record(&*event)?;
        if round % 2 == 0 {
            event.synchronize("an event behind a copy to the host", TIMEOUT)?;
        } else {
            let start = std::time::Instant::now();
            while !event.reached()? {
                ensure(start.elapsed() < TIMEOUT, || {
                    "an event is never reached, though nothing is in its way".into()
                })?;
                std::thread::yield_now();
            }
        }
        // SAFETY: the buffer lives, is as long, and the event says that the only work that writes it is done.
        let found = unsafe { std::slice::from_raw_parts(pointer.as_ptr(), result.bytes) }.to_vec();
        let expected = bench.get(&bound.results[0])?;
        ensure(found == expected.bytes(), || {
            format!(
                "round {round}: host memory does not hold what was copied there before an event that is reached"
            )
        })?;
    }
    Ok(())
}

/// Calls, their plans, weights and operands are dropped as soon as they are enqueued; the last result is that of calls that stay.
pub(super) fn freed(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let dtype = floats(&*bench.device)[0];
    let mut random = Random::named("order/freed");
    let weight = drawn_weight(&mut random, WeightFormat::Dense(dtype), [SIZE, SIZE], 0.03);
    for round in 0..ROUNDS / 2 {
        let values = random.tensor(dtype, &[ROWS, SIZE], Values::Uniform);
        let mut product = |stays: bool| {
            let mut kept = Vec::new();
            let mut x = bench.put(&values)?;
            for _ in 0..3 {
                let operands = [Given::from(&x), bench.pack(&weight)?, Given::Absent];
                let plan = bench.plan(Linear { dtype }, &operands)?;
                let bound = bench.bind(&plan, &operands)?;
                bench.enqueue(&bound)?;
                x = bound.results[0].clone();
                if stays {
                    kept.push((plan, operands, bound));
                }
            }
            bench.get(&x)
        };
        let (expected, found) = (product(true)?, product(false)?);
        same_bits(&format!("round {round}, products whose calls were dropped"), &found, &expected)?;
    }
    Ok(())
}

/// Bytes of the buffers that are copied between.
const BYTES: usize = 9000;
const OFFSETS: [usize; 7] = [0, 1, 2, 3, 5, 64, 255];
const LENGTHS: [usize; 14] = [0, 1, 2, 3, 5, 7, 15, 16, 17, 63, 65, 257, 4096, 4099];

fn bytes(random: &mut Random) -> Vec<u8> {
    (0..BYTES).map(|_| random.bits() as u8).collect()
}

/// Every kind of copy moves its bytes and no others.
pub(super) fn copies(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let mut random = Random::named("order/copies");
    let kinds = [MemoryKind::Device, MemoryKind::Pinned];
    let (source, background) = (bytes(&mut random), bytes(&mut random));
    for (from_kind, to_kind) in kinds.into_iter().flat_map(|from| kinds.map(|to| (from, to))) {
        let from = BufferSlice::whole(bench.device.allocate(BYTES, from_kind)?);
        let to = BufferSlice::whole(bench.device.allocate(BYTES, to_kind)?);
        bench.stream.upload(&source, &from)?;
        for (number, length) in LENGTHS.into_iter().enumerate() {
            for (index, start) in OFFSETS.into_iter().enumerate() {
                let at = OFFSETS[(index + number) % OFFSETS.len()];
                bench.stream.upload(&background, &to)?;
                bench.stream.copy(&from.slice(start, length)?, &to.slice(at, length)?)?;
                let mut expected = background.clone();
                expected[at..at + length].copy_from_slice(&source[start..start + length]);
                let how = format!(
                    "a copy of {length} bytes from byte {start} of {from_kind:?} memory to byte {at} of {to_kind:?} memory"
                );
                holds(&mut bench, &to, &expected, &how)?;
                let byte = (number * 16 + index) as u8;
                bench.stream.fill(&to.slice(start, length)?, byte)?;
                expected[start..start + length].fill(byte);
                holds(
                    &mut bench,
                    &to,
                    &expected,
                    &format!("a fill of {length} bytes at byte {start} of {to_kind:?} memory"),
                )?;
                bench.stream.upload(&source[..length], &to.slice(at, length)?)?;
                expected[at..at + length].copy_from_slice(&source[..length]);
                holds(
                    &mut bench,
                    &to,
                    &expected,
                    &format!("an upload of {length} bytes to byte {at} of {to_kind:?} memory"),
                )?;
                let mut part = vec![0x5A; length];
                bench.stream.download(&to.slice(start, length)?, &mut part, "a part of a buffer", TIMEOUT)?;
                ensure(part == expected[start..start + length], || {
                    format!(
                        "a download of {length} bytes at byte {start} of {to_kind:?} memory has other bytes"
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Fails unless a range holds these bytes.
fn holds(bench: &mut Bench, slice: &BufferSlice, expected: &[u8], how: &str) -> Outcome {
    let mut found = vec![0; slice.bytes];
    bench.stream.download(slice, &mut found, "the target of a copy", TIMEOUT).during(how)?;
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        Some(at) => fail(format!("after {how}, byte {at} is {:#x}, must be {:#x}", found[at], expected[at])),
        None => Ok(()),
    }
}

/// Uploads come between the calls that they are enqueued between.
pub(super) fn uploads(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let dtype = floats(&*bench.device)[0];
    let mut random = Random::named("order/uploads");
    let shape = [64, 257];
    let (a, zero) = (bench.empty(dtype, &shape)?, bench.give(&Tensor::filled(dtype, &shape, 0))?);
    let operands = [(&a).into(), zero, Given::Absent, Given::Absent];
    let plan = bench.plan(Add { alpha: 1.0 }, &operands)?;
    let bound: Vec<_> = (0..ROUNDS).map(|_| bench.bind(&plan, &operands)).collect::<Result<_, _>>()?;
    let values: Vec<Tensor> = (0..ROUNDS).map(|_| random.tensor(dtype, &shape, Values::Uniform)).collect();
    let mut source = vec![0; a.slice.bytes];
    for (bound, values) in bound.iter().zip(&values) {
        source.copy_from_slice(&values.bytes());
        bench.stream.upload(&source, &a.slice)?;
        source.fill(0xFF);
        bench.enqueue(bound)?;
    }
    for (round, (bound, values)) in bound.iter().zip(&values).enumerate() {
        let found = bench.get(&bound.results[0])?;
        same_bits(&format!("call {round} of those with an upload before each"), &found, values)?;
    }
    Ok(())
}
