//! Tensors of more than 2^31 elements, where offsets need more than 32 bits. They take gigabytes, so they run only when they are
//! asked for.

use super::{
    bench::{Bench, Given, Held, Outcome, Stop, floats, near, rows, same_bits},
    paged::{self, Sequence},
};
use crate::{
    cases::random_weight,
    gate::Gate,
    oracle::Real,
    random::{Random, Values},
    subject::Subject,
    tensor::{Tensor, read_bits},
};
use dsrun_core::{
    Code, DType, TensorDesc, WeightFormat,
    device::{BufferSlice, MemoryKind},
    kernels::Arguments,
    op::{Add, GatherRows, Linear, Op},
};
use std::time::Duration;

/// The number of elements that no 32-bit signed integer counts.
const MANY: usize = 1 << 31;
/// How long a single call on so many elements may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// The smallest float type of the device.
fn smallest(bench: &Bench) -> DType {
    let all = floats(&*bench.device);
    all.iter().copied().find(|dtype| dtype.bytes() == 2).unwrap_or(all[0])
}

/// A tensor of so many rows, which holds zeros.
fn zeros(bench: &Bench, dtype: DType, shape: [usize; 2]) -> Result<Held, Stop> {
    let desc = TensorDesc::dense(dtype, &shape);
    let bytes = desc.bytes()?;
    match bench.device.allocate(bytes, MemoryKind::Device) {
        Ok(buffer) => Ok(Held { desc, slice: BufferSlice::whole(buffer) }),
        Err(error) if error.code() == Code::OutOfMemory => {
            Err(Stop::Unsupported(format!("a tensor of {bytes} bytes does not fit: {error}")))
        }
        Err(error) => Err(error.into()),
    }
}

/// A row of a matrix on the device.
fn row_of(held: &Held, row: usize) -> Result<BufferSlice, Stop> {
    let bytes = held.desc.shape[1] * held.desc.dtype.bytes();
    Ok(held.slice.slice(row * bytes, bytes)?)
}

fn read_row(bench: &mut Bench, held: &Held, row: usize) -> Result<Tensor, Stop> {
    let (slice, size) = (row_of(held, row)?, held.desc.dtype.bytes());
    let mut bytes = vec![0; slice.bytes];
    bench.stream.download(&slice, &mut bytes, "a row of a large tensor", PATIENCE)?;
    let bits = (0..bytes.len() / size).map(|index| read_bits(&bytes, index * size, size)).collect();
    Ok(Tensor { dtype: held.desc.dtype, shape: vec![1, held.desc.shape[1]], bits })
}

/// Rows to look at: the ends, and those around the elements that 31 and 32 bits cannot count, and 32 bits of bytes.
fn witnesses(dtype: DType, rows: usize, columns: usize) -> Vec<usize> {
    let limits = [MANY, MANY / dtype.bytes(), 2 * MANY / dtype.bytes()].map(|limit| limit / columns);
    let around = limits.into_iter().flat_map(|row| [row.wrapping_sub(1), row, row + 1]);
    let mut all: Vec<usize> = around.chain([0, 1, rows - 1]).filter(|row| *row < rows).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Gathers rows from behind element 2^31.
pub(super) fn gather(subject: &Subject) -> Outcome {
    const COLUMNS: usize = 4096;
    const ROWS: usize = MANY / COLUMNS + 37;
    let mut bench = Bench::new(subject.device())?;
    let dtype = smallest(&bench);
    let mut random = Random::named("large/gather");
    let x = zeros(&bench, dtype, [ROWS, COLUMNS])?;
    let wanted = witnesses(dtype, ROWS, COLUMNS);
    let values = random.tensor(dtype, &[wanted.len(), COLUMNS], Values::HeavyTailed);
    for (index, row) in wanted.iter().enumerate() {
        bench.stream.upload(&rows(&values, index, 1).bytes(), &row_of(&x, *row)?)?;
    }
    let indices: Vec<i32> = wanted.iter().map(|row| *row as i32).collect();
    let indices = bench.give(&Tensor::vector(&indices))?;
    let y = bench.one(GatherRows {}, &[x.into(), indices])?;
    same_bits("rows of a tensor of more than 2^31 elements", &bench.get(&y)?, &values)
}

/// Adds more than 2^31 elements.
pub(super) fn add(subject: &Subject) -> Outcome {
    const COLUMNS: usize = 8192;
    const ROWS: usize = MANY / COLUMNS + 5;
    let mut bench = Bench::new(subject.device())?;
    let dtype = smallest(&bench);
    let (a, b) = (zeros(&bench, dtype, [ROWS, COLUMNS])?, zeros(&bench, dtype, [ROWS, COLUMNS])?);
    let y = zeros(&bench, dtype, [ROWS, COLUMNS])?;
    let wanted = witnesses(dtype, ROWS, COLUMNS);
    for (index, row) in wanted.iter().enumerate() {
        let constant = |value: f64| Tensor::floats(dtype, &[COLUMNS], &[value; COLUMNS]).bytes();
        bench.stream.upload(&constant(1.0 + index as f64), &row_of(&a, *row)?)?;
        bench.stream.upload(&constant(0.5), &row_of(&b, *row)?)?;
    }
    run_into(&mut bench, Add { alpha: 1.0 }, &[a.into(), b.into(), Given::Absent, Given::Absent], &y)?;
    for (index, row) in wanted.iter().enumerate() {
        let expected = Tensor::floats(dtype, &[1, COLUMNS], &[1.5 + index as f64; COLUMNS]);
        same_bits(
            &format!("row {row} of a sum of more than 2^31 elements"),
            &read_row(&mut bench, &y, *row)?,
            &expected,
        )?;
    }
    Ok(())
}

/// A linear layer with more than 2^31 results.
pub(super) fn linear(subject: &Subject) -> Outcome {
    const INPUTS: usize = 32;
    const OUTPUTS: usize = 32_768 + 64;
    const ROWS: usize = MANY / OUTPUTS + 70;
    let mut bench = Bench::new(subject.device())?;
    let dtype = smallest(&bench);
    let mut random = Random::named("large/linear");
    let (weight, matrix) = random_weight(&mut random, WeightFormat::Dense(dtype), [OUTPUTS, INPUTS], 0.2);
    let x = random.tensor(dtype, &[ROWS, INPUTS], Values::Uniform);
    let y = zeros(&bench, dtype, [ROWS, OUTPUTS])?;
    let operands = [bench.give(&x)?, bench.pack(&weight)?, Given::Absent];
    run_into(&mut bench, Linear { dtype }, &operands, &y)?;
    for row in witnesses(dtype, ROWS, OUTPUTS) {
        let inputs = rows(&x, row, 1).values();
        let one = |output: usize| {
            let term = |input: usize| inputs[input] * matrix[output * INPUTS + input];
            let (sum, magnitude) =
                (0..INPUTS).map(term).fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x.abs()));
            Real::sum(sum, magnitude, INPUTS)
        };
        let expected: Vec<Real> = (0..OUTPUTS).map(one).collect();
        let found = read_row(&mut bench, &y, row)?;
        near(&format!("row {row} of more than 2^31 results"), Gate::default(), &expected, &[("it", &found)])?;
    }
    Ok(())
}

/// Keys and values in pages behind element 2^31 of their cache.
pub(super) fn cache(subject: &Subject) -> Outcome {
    const HEADS: [usize; 3] = [8, 8, 128];
    const BLOCK: usize = 16;
    const PAGE: usize = HEADS[1] * HEADS[2] * BLOCK;
    let mut bench = Bench::new(subject.device())?;
    let dtype = smallest(&bench);
    let last = (MANY / PAGE) as i32;
    let pages = [last + 1, 0, last - 1, last];
    let rows = (last as usize + 2) * HEADS[1] * BLOCK;
    drop([zeros(&bench, dtype, [rows, HEADS[2]])?, zeros(&bench, dtype, [rows, HEADS[2]])?]);
    let sequence = Sequence::new("large/cache", dtype, HEADS, 57);
    let found = sequence.in_chunks(&mut bench, &[50, 6, 1], &pages, BLOCK)?;
    let what = "attention to pages behind element 2^31";
    near(what, paged::gate(dtype), &sequence.expected(), &[("the result", &found)])
}

/// Runs a call into this result and waits for it.
fn run_into(bench: &mut Bench, op: impl Into<Op>, operands: &[Given], y: &Held) -> Outcome {
    let plan = bench.plan(op, operands)?;
    let workspace = bench.workspace(plan.workspace_bytes())?;
    let call = plan.bind(&Arguments {
        operands: operands.iter().map(Given::argument).collect(),
        results: vec![y.binding()],
        workspace: Some(workspace),
    })?;
    call.enqueue(&mut *bench.stream)?;
    Ok(bench.stream.synchronize("a call on more than 2^31 elements", PATIENCE)?)
}
