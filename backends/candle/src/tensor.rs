//! Operands as candle tensors, and candle tensors as results.

use crate::failure::Failure;
use bytemuck::{NoUninit, cast_slice};
use candle_core::{DType as CandleType, Device, Tensor, WithDType};
use dsrun_core::{DType, Error};
use dsrun_host::Frame;
use half::{bf16, f16};

/// The result of an op, or of a step of one.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// The device of all tensors.
pub(crate) const CPU: &Device = &Device::Cpu;

/// Rows below the extent of all these operands and results, which are given by their index.
pub(crate) fn rows(frame: &Frame<'_>, operands: &[usize], results: &[usize]) -> usize {
    let operands = operands.iter().map(|index| frame.operand_rows(*index));
    operands.chain(results.iter().map(|index| frame.result_rows(*index))).min().unwrap_or(0)
}

/// The first `rows` rows of operand `index`, in its own element type.
pub(crate) fn operand(frame: &Frame<'_>, index: usize, rows: usize) -> Result<Tensor> {
    let source = frame.bytes(index)?;
    let mut bytes = Vec::new();
    for (start, count) in runs(source.shape, source.strides, rows) {
        bytes.extend_from_slice(source.data.range(start, count));
    }
    let mut shape = source.shape.to_vec();
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    from_bytes(&bytes, frame.operand_dtype(index)?, &shape)
}

/// The tensor whose elements have these bytes.
pub(crate) fn from_bytes(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Ok(Tensor::from_raw_buffer(bytes, candle_type(dtype)?, shape, CPU)?)
}

/// The first `rows` rows of operand `index`, a float tensor, widened to f32.
pub(crate) fn floats(frame: &Frame<'_>, index: usize, rows: usize) -> Result<Tensor> {
    Ok(operand(frame, index, rows)?.to_dtype(CandleType::F32)?)
}

/// All of operand `index`, a float vector, widened to f32.
pub(crate) fn vector(frame: &Frame<'_>, index: usize) -> Result<Tensor> {
    floats(frame, index, frame.operand_rows(index))
}

/// As [`vector`], if the operand was bound.
pub(crate) fn optional_vector(frame: &Frame<'_>, index: usize) -> Result<Option<Tensor>> {
    frame.has(index).then(|| vector(frame, index)).transpose()
}

/// Rounds a tensor to the type of result `index`, and makes it the result's first rows.
pub(crate) fn store(frame: &Frame<'_>, index: usize, y: &Tensor) -> Result<()> {
    store_rows(frame, index, &(0..y.dim(0)?).collect::<Vec<_>>(), y)
}

/// As [`store`], with row `i` of the tensor at row `rows[i]` of the result. Other rows keep what they hold.
pub(crate) fn store_rows(frame: &Frame<'_>, index: usize, rows: &[usize], y: &Tensor) -> Result<()> {
    if y.elem_count() == 0 {
        return Ok(());
    }
    let bytes = rounded_bytes(y, frame.result_dtype(index)?)?;
    let mut result = frame.bytes_mut(index)?;
    let row_bytes = bytes.len() / rows.len();
    for (row, bytes) in rows.iter().zip(bytes.chunks_exact(row_bytes)) {
        let (start, mut rest) = (result.row_start(*row), bytes);
        for (offset, count) in runs(result.shape, result.strides, 1) {
            let run = result.data.range_mut(start + offset, count);
            let (bytes, tail) = rest.split_at(run.len());
            run.copy_from_slice(bytes);
            rest = tail;
        }
    }
    Ok(())
}

/// Row `i` of the tensor, rounded to the type of result `index`, goes to the row and first column `places[i]` of the result, a
/// matrix. Other elements keep what they hold.
pub(crate) fn store_slots(
    frame: &Frame<'_>,
    index: usize,
    places: &[(usize, usize)],
    y: &Tensor,
) -> Result<()> {
    if y.elem_count() == 0 {
        return Ok(());
    }
    let (bytes, width) = (rounded_bytes(y, frame.result_dtype(index)?)?, y.dim(1)?);
    let mut result = frame.bytes_mut(index)?;
    for ((row, column), bytes) in places.iter().zip(bytes.chunks_exact(bytes.len() / places.len())) {
        let start = result.row_start(*row) + column;
        result.data.range_mut(start, width).copy_from_slice(bytes);
    }
    Ok(())
}

/// The contiguous runs of elements in the first `rows` rows: the start and length of each.
fn runs(shape: &[usize], strides: &[usize], rows: usize) -> Vec<(usize, usize)> {
    let Some((&length, outer)) = shape.split_last() else { return vec![(0, 1)] };
    let Some(inner) = outer.get(1..) else { return vec![(0, rows)] };
    let mut starts: Vec<usize> = (0..rows).map(|row| row * strides[0]).collect();
    for (size, stride) in inner.iter().zip(&strides[1..]) {
        starts =
            starts.iter().flat_map(|start| (0..*size).map(move |place| start + place * stride)).collect();
    }
    starts.into_iter().map(|start| (start, length)).collect()
}

/// The bytes of a tensor's elements, rounded to `dtype`.
pub(crate) fn rounded_bytes(y: &Tensor, dtype: DType) -> Result<Vec<u8>> {
    fn bytes<T: WithDType + NoUninit>(y: &Tensor) -> Result<Vec<u8>> {
        Ok(cast_slice(&y.flatten_all()?.to_vec1::<T>()?).to_vec())
    }
    if dtype == DType::I8 {
        let integers = y.to_dtype(CandleType::I32)?.flatten_all()?.to_vec1::<i32>()?;
        return Ok(integers.into_iter().map(|integer| integer as u8).collect());
    }
    let y = y.to_dtype(candle_type(dtype)?)?;
    match y.dtype() {
        CandleType::F32 => bytes::<f32>(&y),
        CandleType::F16 => bytes::<f16>(&y),
        CandleType::BF16 => bytes::<bf16>(&y),
        CandleType::I32 => bytes::<i32>(&y),
        CandleType::U32 => bytes::<u32>(&y),
        _ => bytes::<u8>(&y),
    }
}

/// The type in candle of a tensor of `dtype`. Signed bytes have none.
fn candle_type(dtype: DType) -> Result<CandleType> {
    Ok(match dtype {
        DType::F32 => CandleType::F32,
        DType::F16 => CandleType::F16,
        DType::BF16 => CandleType::BF16,
        DType::I32 => CandleType::I32,
        DType::U32 => CandleType::U32,
        DType::U8 => CandleType::U8,
        other => return Err(Error::unsupported(format!("candle has no tensors of {other}")).into()),
    })
}
