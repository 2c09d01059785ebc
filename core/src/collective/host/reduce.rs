//! Reductions over the bytes of all ranks.

use crate::{DType, Error, Result, op::Reduction};
use std::sync::Arc;

/// Combines the bytes at `offset` of all parts into `out`, element by element, in the order of ranks.
///
/// # Errors
/// If integers are to be averaged.
pub(super) fn reduce(
    out: &mut [u8],
    parts: &[Arc<[u8]>],
    offset: usize,
    dtype: DType,
    reduction: Reduction,
) -> Result<()> {
    let parts: Vec<&[u8]> = parts.iter().map(|part| &part[offset..][..out.len()]).collect();
    match dtype {
        DType::F32 => combine(out, &parts, f32::from_le_bytes, f32::to_le_bytes, &float_fold(reduction)),
        DType::F16 => combine(
            out,
            &parts,
            |bytes| half::f16::from_le_bytes(bytes).to_f32(),
            |x| half::f16::from_f32(x).to_le_bytes(),
            &float_fold(reduction),
        ),
        DType::BF16 => combine(
            out,
            &parts,
            |bytes| half::bf16::from_le_bytes(bytes).to_f32(),
            |x| half::bf16::from_f32(x).to_le_bytes(),
            &float_fold(reduction),
        ),
        DType::I32 => {
            let fold = integer_fold(reduction)?;
            combine(out, &parts, |b| i64::from(i32::from_le_bytes(b)), |x| (x as i32).to_le_bytes(), &fold);
        }
        DType::U32 => {
            let fold = integer_fold(reduction)?;
            combine(out, &parts, |b| i64::from(u32::from_le_bytes(b)), |x| (x as u32).to_le_bytes(), &fold);
        }
        DType::I8 => {
            combine(
                out,
                &parts,
                |[b]: [u8; 1]| i64::from(b as i8),
                |x| [x as i8 as u8],
                &integer_fold(reduction)?,
            );
        }
        DType::U8 => {
            combine(out, &parts, |[b]: [u8; 1]| i64::from(b), |x| [x as u8], &integer_fold(reduction)?)
        }
    }
    Ok(())
}

fn float_fold(reduction: Reduction) -> impl Fn(&mut dyn Iterator<Item = f32>) -> f32 {
    move |ranks| match reduction {
        Reduction::Sum => ranks.sum(),
        Reduction::Max => ranks.fold(f32::NEG_INFINITY, f32::max),
        Reduction::Min => ranks.fold(f32::INFINITY, f32::min),
        Reduction::Mean => {
            let (sum, count) = ranks.fold((0.0, 0.0), |(sum, count), x| (sum + x, count + 1.0));
            sum / count
        }
    }
}

fn integer_fold(reduction: Reduction) -> Result<impl Fn(&mut dyn Iterator<Item = i64>) -> i64> {
    if reduction == Reduction::Mean {
        return Err(Error::invalid("is mean, which integers do not support").at("reduction"));
    }
    Ok(move |ranks: &mut dyn Iterator<Item = i64>| match reduction {
        Reduction::Max => ranks.max().unwrap_or(0),
        Reduction::Min => ranks.min().unwrap_or(0),
        Reduction::Sum | Reduction::Mean => ranks.fold(0, i64::wrapping_add),
    })
}

fn combine<const N: usize, T>(
    out: &mut [u8],
    parts: &[&[u8]],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
    fold: &impl Fn(&mut dyn Iterator<Item = T>) -> T,
) {
    for (index, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let mut ranks =
            parts.iter().filter_map(|part| part.as_chunks::<N>().0.get(index)).map(|bytes| read(*bytes));
        *out = write(fold(&mut ranks));
    }
}
