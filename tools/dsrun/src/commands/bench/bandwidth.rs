//! Measures the read bandwidth of a device's memory, which bounds the decode rate.

use anyhow::Result;
use dsrun_core::{
    BytesReader, DType, TensorDesc, WeightFormat, WeightType,
    checked::CheckedPlan,
    device::{BufferSlice, Device, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, WeightDesc},
    op::Linear,
};
use std::time::{Duration, Instant};

/// Columns of the matrix.
const COLUMNS: usize = 2048;
/// The number of measurements; the fastest counts.
const REPEATS: usize = 7;
/// The least time of a measurement: passes over the matrix are timed together, so that the time to launch one and to learn of its
/// end, up to a third of what a fast GPU takes for it, does not count.
const LEAST_SECONDS: f64 = 5e-3;
/// The most passes that are timed together.
const MOST_PASSES: u32 = 32;
const TIMEOUT: Duration = Duration::from_secs(60);

/// The read bandwidth in bytes per second: that of the fastest of several GEMVs.
///
/// The matrix is dense f32 and far larger than any cache. Two operations for every four bytes make memory the limit.
pub(crate) fn read_bandwidth(device: &dyn Device) -> Result<f64> {
    // Memory of discrete devices is fast and their caches are large: 1 GiB there, 256 MiB for unified memory.
    let bytes: usize = if device.properties().unified_memory { 256 << 20 } else { 1 << 30 };
    // A device whose memory is limited may have no room for that.
    let room = device.memory().free.map_or(bytes, |free| usize::try_from(free / 2).unwrap_or(bytes));
    let bytes = bytes.min(room).max(4 * COLUMNS);
    let rows = bytes / 4 / COLUMNS;
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![rows, COLUMNS] };
    let desc = WeightDesc { weight_type: weight_type.clone(), immutable: true };
    let mut stream = device.stream()?;
    let weight = {
        let mut reader = BytesReader::new(weight_type.clone(), values(rows * COLUMNS))?;
        device.kernels().prepack(&mut *stream, &desc, &mut reader)?
    };
    let x = TensorDesc::dense(DType::F32, &[1, COLUMNS]);
    let y = TensorDesc::dense(DType::F32, &[1, rows]);
    let allocate = |desc: &TensorDesc| -> Result<Binding> {
        Ok(Binding::new(BufferSlice::whole(device.allocate(desc.bytes()?, MemoryKind::Device)?)))
    };
    let (input, output) = (allocate(&x)?, allocate(&y)?);
    stream.upload(&values(COLUMNS), &input.slice)?;
    let call = CallDesc {
        op: Linear { dtype: DType::F32 }.into(),
        operands: vec![Some(OperandDesc::Tensor(x)), Some(OperandDesc::Weight(weight_type)), None],
        results: vec![y],
        comm: None,
    };
    let plan = CheckedPlan::new(device, call.validate()?)?;
    let workspace = BufferSlice::whole(device.allocate(plan.workspace_bytes().max(1), MemoryKind::Device)?);
    let bound = plan.bind(&Arguments {
        operands: vec![Some(Argument::Tensor(input)), Some(Argument::Weight(weight)), None],
        results: vec![output],
        workspace: Some(workspace),
    })?;
    let (mut fastest, mut passes) = (f64::INFINITY, 1);
    for _ in 0..REPEATS {
        let start = Instant::now();
        for _ in 0..passes {
            bound.enqueue(&mut *stream)?;
        }
        stream.synchronize("measuring bandwidth", TIMEOUT)?;
        fastest = fastest.min(start.elapsed().as_secs_f64() / f64::from(passes));
        passes = ((LEAST_SECONDS / fastest).ceil() as u32).clamp(1, MOST_PASSES);
    }
    Ok(bytes as f64 / fastest)
}

/// Pseudorandom values from -1 to 1, because zeros may be faster than real data.
fn values(count: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9u32;
    let mut bytes = Vec::with_capacity(count * 4);
    for _ in 0..count {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}
