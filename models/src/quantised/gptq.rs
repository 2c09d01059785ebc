//! GPTQ: `qweight`, `qzeros`, `scales`, and perhaps `g_idx`.

use super::{
    matrix::{Integers, Matrix, Scales, ZeroWords, Zeros, field_order},
    parts::{Parts, Result, group_of},
};
use crate::config::Gptq;

pub(super) fn matrix(parts: Parts<'_>, gptq: &Gptq) -> Result<Matrix> {
    let per_word = 32 / gptq.bits.bits();
    let [words, outputs] = parts.matrix("qweight", "I32")?;
    let inputs = words.checked_mul(per_word).ok_or("its inputs overflow")?;
    let scale = parts.scale_type("scales")?;
    let [groups, scaled] = parts.matrix("scales", scale.dtype().name().to_uppercase().as_str())?;
    let zeros = parts.matrix("qzeros", "I32")?;
    if scaled != outputs || zeros[0] != groups || zeros[1].checked_mul(per_word) != Some(outputs) {
        return Err(format!(
            "qweight {:?}, scales {:?} and qzeros {zeros:?} do not fit together at {} bits",
            [words, outputs],
            [groups, scaled],
            gptq.bits.bits()
        ));
    }
    let group = group_of(inputs, groups)?;
    if groups > 1 && gptq.group != Some(group) {
        let said = gptq.group.map_or("all inputs".to_owned(), |group| group.to_string());
        return Err(format!("it has groups of {group} inputs, but group_size says {said}"));
    }
    Matrix {
        outputs,
        inputs,
        bits: gptq.bits,
        integers: Integers::InputWords(parts.name("qweight")),
        signed: false,
        scales: Scales::Columns(parts.name("scales")),
        scale,
        group,
        zeros: Some(Zeros::Words {
            tensor: parts.name("qzeros"),
            words: ZeroWords::OutputsInRow,
            order: field_order(gptq.bits),
            add: u16::from(gptq.zeros_less_one),
        }),
        symmetric: gptq.symmetric,
        order: parts.order("g_idx", group, inputs)?,
        other_parts: parts.find("g_idx").map(|tensor| tensor.name.to_owned()).into_iter().collect(),
        quantises_inputs: false,
        weight_type: Matrix::UNTYPED,
    }
    .typed()
}
