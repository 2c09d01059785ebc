//! Measures whether an adapter flushes subnormal numbers. WGSL permits both, and no API reports it.

use dsrun_core::{
    DType, Result, TensorDesc,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Flushed, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc},
    op::Add,
};
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// The longest time that the probe waits for the device.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A subnormal number of a type and a normal one, as bits and exponents of two: `operand * 2^up` is normal, and
/// `normal * 2^down` is subnormal.
struct Probe {
    dtype: DType,
    subnormal: u32,
    up: i32,
    normal: u32,
    down: i32,
}

const PROBES: [Probe; 3] = [
    // 2^-140 and 2^-100.
    Probe { dtype: DType::F32, subnormal: 0x0000_0200, up: 100, normal: 0x0D80_0000, down: -40 },
    // 2^-20 and 2^-10.
    Probe { dtype: DType::F16, subnormal: 0x0010, up: 20, normal: 0x1400, down: -10 },
    // 2^-130 and 2^-100.
    Probe { dtype: DType::BF16, subnormal: 0x0008, up: 100, normal: 0x0D80, down: -30 },
];

/// The types whose subnormal numbers a device of this name flushes. A device that has been measured is not measured again.
///
/// # Errors
/// If the device fails.
pub(crate) fn flushed(name: &str, device: &dyn Device) -> Result<Flushed> {
    static KNOWN: Mutex<Option<HashMap<String, Flushed>>> = Mutex::new(None);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(flushed) = known().get_or_insert_default().get(name) {
        return Ok(flushed.clone());
    }
    let mut flushed = Flushed::default();
    for probe in PROBES.iter().filter(|probe| device.properties().dtypes.contains(&probe.dtype)) {
        if scaled(device, probe.dtype, probe.subnormal, probe.up)? == 0 {
            flushed.operands.push(probe.dtype);
        }
        if scaled(device, probe.dtype, probe.normal, probe.down)? == 0 {
            flushed.results.push(probe.dtype);
        }
    }
    tracing::debug!(name, ?flushed, "measured whether the adapter flushes subnormal numbers");
    known().get_or_insert_default().insert(name.to_owned(), flushed.clone());
    Ok(flushed)
}

/// The bits of a number times a power of two, as the kernel of `add` computes `0 + alpha * b`.
fn scaled(device: &dyn Device, dtype: DType, bits: u32, exponent: i32) -> Result<u32> {
    let desc = TensorDesc::dense(dtype, &[1, 1]);
    let operand = || Some(OperandDesc::Tensor(desc.clone()));
    let call = CallDesc {
        op: Add { alpha: 2f32.powi(exponent) }.into(),
        operands: vec![operand(), operand(), None, None],
        results: vec![desc.clone()],
        comm: None,
    };
    let plan = CheckedPlan::new(device, call.validate()?)?;
    let mut stream = device.stream()?;
    let mut tensor = |bits: u32| {
        let slice = BufferSlice::new(device.allocate(4, MemoryKind::Device)?, 0, dtype.bytes())?;
        stream.upload(&bits.to_le_bytes()[..dtype.bytes()], &slice)?;
        Ok(slice)
    };
    let (zero, number, result) = (tensor(0)?, tensor(bits)?, tensor(0)?);
    let workspace = BufferSlice::whole(device.allocate(plan.workspace_bytes().max(4), MemoryKind::Device)?);
    let argument = |slice: BufferSlice| Some(Argument::Tensor(Binding::new(slice)));
    let bound = plan.bind(&Arguments {
        operands: vec![argument(zero), argument(number), None, None],
        results: vec![Binding::new(result.clone())],
        workspace: Some(workspace),
    })?;
    bound.enqueue(&mut *stream)?;
    let mut bytes = [0; 4];
    stream.download(&result, &mut bytes[..dtype.bytes()], "measuring subnormal numbers", TIMEOUT)?;
    Ok(u32::from_le_bytes(bytes))
}
