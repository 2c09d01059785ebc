//! MXFP4 as the files of gpt-oss have it: `<module>_blocks` u8 `[experts, N, K / 32, 16]` and `<module>_scales` u8
//! `[experts, N, K / 32]`.
//!
//! A byte of a block holds two neighbours, the first in its lower half. The format of GGUF puts the scale in front, and in a
//! byte element `i` beside element `i + 16`.

use super::parts::Result;
use crate::{safetensors_file::SafetensorsFiles, weights::TensorSource};
use dsrun_core::{BlockFormat, Error, WeightFormat, WeightType};

/// Bytes of a block in the file, without its scale.
const NIBBLES: usize = 16;

/// The matrices of all experts of a module, `[experts, N, K]`.
#[derive(Debug)]
pub(super) struct Mxfp4 {
    pub(super) blocks: String,
    pub(super) scales: String,
    pub(super) weight_type: WeightType,
}

impl Mxfp4 {
    /// Finds the two tensors of a module, and checks that they fit together.
    pub(super) fn new(files: &SafetensorsFiles, module: &str) -> Result<Self> {
        let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{module}_{part}"));
        let shape = |name: &str, part: &str| {
            let tensor = files.tensor(name).ok_or_else(|| format!("it has no {part}"))?;
            match tensor.dtype.as_str() {
                "U8" => Ok(tensor.shape.to_vec()),
                other => Err(format!("{part} is {other}, not U8")),
            }
        };
        let (of_blocks, of_scales) = (shape(&blocks, "blocks")?, shape(&scales, "scales")?);
        let fits = || format!("blocks {of_blocks:?} and scales {of_scales:?} do not fit together");
        let [experts, outputs, groups, NIBBLES] = of_blocks[..] else { return Err(fits()) };
        if of_scales != [experts, outputs, groups] {
            return Err(fits());
        }
        let inputs = groups.checked_mul(2 * NIBBLES).ok_or("its inputs overflow")?;
        let format = WeightFormat::Block(BlockFormat::Mxfp4);
        let weight_type = WeightType { format, shape: vec![experts, outputs, inputs] };
        weight_type.elements().and(weight_type.bytes()).map_err(|error| error.to_string())?;
        Ok(Self { blocks, scales, weight_type })
    }

    /// Rows `first .. first + count` of all experts' rows, as GGUF has them.
    pub(super) fn rows(
        &self,
        files: &SafetensorsFiles,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let groups = self.weight_type.columns() / (2 * NIBBLES);
        let [start, length] = [first, count].map(|rows| rows.checked_mul(groups));
        let (Some(start), Some(length)) = (start, length) else {
            return Err(Error::invalid(format!("rows {first}..{first}+{count} overflow")));
        };
        let blocks = files.rows(&self.blocks, start, length)?;
        let scales = files.rows(&self.scales, first, count)?;
        let mut out = Vec::with_capacity(length * (NIBBLES + 1));
        for (block, scale) in blocks.chunks_exact(NIBBLES).zip(scales.iter()) {
            let element = |index: usize| block[index / 2] >> (4 * (index % 2)) & 15;
            out.push(*scale);
            out.extend((0..NIBBLES).map(|index| element(index) | element(index + NIBBLES) << 4));
        }
        Ok(out)
    }
}
