//! A parser of operand types in the text form of programs, which keeps tables of calls readable.

use dsrun_core::{DType, Size, TensorType, WeightFormat, WeightType, op::OperandType};

/// `f32[?tokens, 8]` is a tensor, `weight q4_1[96, 64]` a packed weight, `_` an absent operand.
pub(crate) fn operand(text: &str) -> Option<OperandType> {
    if text == "_" {
        return None;
    }
    let (kind, text) = text.split_once(' ').filter(|(kind, _)| *kind == "weight").unwrap_or(("tensor", text));
    let (element, sizes) = text.strip_suffix(']').unwrap().split_once('[').unwrap();
    let sizes: Vec<Size> = sizes.split(", ").filter(|size| !size.is_empty()).map(size).collect();
    Some(if kind == "weight" {
        let shape = sizes.iter().map(|size| size.known().unwrap()).collect();
        OperandType::Weight(WeightType { format: WeightFormat::from_name(element).unwrap(), shape })
    } else {
        OperandType::Tensor(TensorType { dtype: DType::from_name(element).unwrap(), shape: sizes })
    })
}

fn size(text: &str) -> Size {
    match (text.strip_prefix('$'), text.strip_prefix('?')) {
        (Some(name), _) => Size::bucket(name),
        (_, Some(name)) => Size::bounded(name),
        _ => Size::Static(text.parse().unwrap()),
    }
}
