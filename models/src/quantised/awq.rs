//! AWQ, layout "gemm": `qweight`, `qzeros`, `scales`.

use super::{
    matrix::{Integers, Matrix, Scales, ZeroWords, Zeros},
    parts::{Parts, Result, group_of},
};
use dsrun_core::GroupBits;

/// The nibble of a word that each of eight outputs is in: the word's nibbles are outputs 0 2 4 6 1 3 5 7.
pub(super) const NIBBLES: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub(super) fn matrix(parts: Parts<'_>, group: Option<usize>) -> Result<Matrix> {
    let [inputs, words] = parts.matrix("qweight", "I32")?;
    let outputs = words.checked_mul(8).ok_or("its outputs overflow")?;
    let scale = parts.scale_type("scales")?;
    let [groups, scaled] = parts.matrix("scales", scale.dtype().name().to_uppercase().as_str())?;
    let zeros = parts.matrix("qzeros", "I32")?;
    if scaled != outputs || zeros != [groups, words] {
        return Err(format!(
            "qweight {:?}, scales {:?} and qzeros {zeros:?} do not fit together",
            [inputs, words],
            [groups, scaled]
        ));
    }
    let found = group_of(inputs, groups)?;
    if groups > 1 && group != Some(found) {
        let said = group.map_or("all inputs".to_owned(), |group| group.to_string());
        return Err(format!("it has groups of {found} inputs, but group_size says {said}"));
    }
    Matrix {
        outputs,
        inputs,
        bits: GroupBits::Four,
        integers: Integers::OutputWords(parts.name("qweight")),
        signed: false,
        scales: Scales::Columns(parts.name("scales")),
        scale,
        group: found,
        zeros: Some(Zeros::Words {
            tensor: parts.name("qzeros"),
            words: ZeroWords::OutputsInRow,
            order: NIBBLES,
            add: 0,
        }),
        symmetric: false,
        order: None,
        other_parts: Vec::new(),
        quantises_inputs: false,
        weight_type: Matrix::UNTYPED,
    }
    .typed()
}
