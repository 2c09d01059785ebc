//! Measures what no API reports: whether an adapter flushes subnormal numbers, which WGSL permits, and whether products by
//! cooperative matrices, which are experimental, are right.

use dsrun_core::{
    BytesReader, DType, Error, Result, TensorDesc, WeightFormat, WeightType,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Flushed, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, WeightDesc},
    op::{Add, Linear},
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

/// Rows, outputs and inputs of the product that checks cooperative matrices: more than one tile, not whole tiles, several steps.
const PRODUCT: [usize; 3] = [150, 200, 96];

/// Whether a device of this name multiplies correctly. A device that has been checked is not checked again.
pub(crate) fn multiplies(name: &str, device: &dyn Device) -> bool {
    static KNOWN: Mutex<Option<HashMap<String, bool>>> = Mutex::new(None);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known().get_or_insert_default().get(name) {
        return *known;
    }
    let checked = product(device).and_then(|wrong| match wrong {
        None => Ok(()),
        Some(index) => Err(Error::internal(format!("element {index} of a product is wrong"))),
    });
    if let Err(error) = &checked {
        tracing::warn!(adapter = name, %error, "its cooperative matrices are not used");
    }
    known().get_or_insert_default().insert(name.to_owned(), checked.is_ok());
    checked.is_ok()
}

/// Multiplies small integers, whose product is exact, and returns the first wrong element.
fn product(device: &dyn Device) -> Result<Option<usize>> {
    let [rows, outputs, inputs] = PRODUCT;
    let integer = |row: usize, column: usize| ((row * 31 + column * 7 + row * column) % 9) as f32 - 4.0;
    // The bits of an integer of at most 4 in magnitude as f16.
    let half = |value: f32| {
        let bits = value.to_bits();
        if value == 0.0 { 0 } else { (bits >> 16 & 0x8000 | (bits - (112 << 23)) >> 13 & 0x7FFF) as u16 }
    };
    let bytes = |rows: usize| -> Vec<u8> {
        let elements = (0..rows * inputs).map(|index| integer(index / inputs, index % inputs));
        elements.flat_map(|element| half(element).to_le_bytes()).collect()
    };
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F16), shape: vec![outputs, inputs] };
    let x = TensorDesc::dense(DType::F16, &[rows, inputs]);
    let y = TensorDesc::dense(DType::F32, &[rows, outputs]);
    let call = CallDesc {
        op: Linear { dtype: DType::F32 }.into(),
        operands: vec![
            Some(OperandDesc::Tensor(x.clone())),
            Some(OperandDesc::Weight(weight_type.clone())),
            None,
        ],
        results: vec![y.clone()],
        comm: None,
    };
    let plan = CheckedPlan::new(device, call.validate()?)?;
    let mut stream = device.stream()?;
    let slice = |bytes: usize| Ok(BufferSlice::whole(device.allocate(bytes.max(4), MemoryKind::Device)?));
    let (operand, result, workspace) =
        (slice(x.bytes()?)?, slice(y.bytes()?)?, slice(plan.workspace_bytes())?);
    stream.upload(&bytes(rows), &operand)?;
    let mut reader = BytesReader::new(weight_type.clone(), bytes(outputs))?;
    let weight =
        device.kernels().prepack(&mut *stream, &WeightDesc { weight_type, immutable: true }, &mut reader)?;
    let bound = plan.bind(&Arguments {
        operands: vec![Some(Argument::Tensor(Binding::new(operand))), Some(Argument::Weight(weight)), None],
        results: vec![Binding::new(result.clone())],
        workspace: Some(workspace),
    })?;
    bound.enqueue(&mut *stream)?;
    let mut bytes = vec![0; 4 * rows * outputs];
    stream.download(&result, &mut bytes, "checking cooperative matrices", TIMEOUT)?;
    let value = |index: usize| -> f32 {
        let (row, output) = (index / outputs, index % outputs);
        (0..inputs).map(|column| integer(row, column) * integer(output, column)).sum()
    };
    let wrong = |(index, element): (usize, &[u8])| (element != value(index).to_le_bytes()).then_some(index);
    Ok(bytes.chunks_exact(4).enumerate().find_map(wrong))
}
