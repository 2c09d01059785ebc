//! Checkpoints whose matrices other tools have quantised, read as they are.
//!
//! GPTQ, AWQ and compressed-tensors each store a matrix as several tensors: packed integers, scales, zero points. Here
//! they are put together into one tensor `<module>.weight` `[outputs, inputs]` of a
//! [group-wise format](dsrun_core::GroupFormat), a few rows at a time as rows are asked for: nothing is held in memory, and
//! no weight is decoded. The rest of the checkpoint is as it is in the files.
//!
//! | method | integers | scales | zero points |
//! |---|---|---|---|
//! | GPTQ | `qweight` i32 `[K / 8, N]`, inputs along a word | `scales` `[G, N]` | `qzeros` i32 `[G, N / 8]`, outputs along a word |
//! | AWQ | `qweight` i32 `[K, N / 8]`, outputs along a word, in the order 0 2 4 6 1 3 5 7 | `scales` `[G, N]` | `qzeros` i32 `[G, N / 8]`, the same order |
//! | compressed-tensors | `weight_packed` i32 `[N, K / 8]`, inputs along a word, or `weight` i8 `[N, K]` | `weight_scale` `[N, G]` | `weight_zero_point` i32 `[N / 8, G]`, outputs along a word, or i8 `[N, G]` |
//!
//! The files of gpt-oss hold the matrices of experts as MXFP4; they are `<module>.mxfp4` `[experts, outputs, inputs]` here.
//!
//! (`N` outputs, `K` inputs, `G` groups of inputs; the words are those of 4 bits. The lowest bits of a word come first.)
//!
//! GPTQ may assign inputs to groups in another order (`g_idx`, "act-order"). No format here can say that, so such a matrix is
//! decoded as it is read, in the type of its scales, and takes 16 bits for each weight; a warning says so. So is a matrix of 8-bit floats
//! (FP8), to bf16.

mod awq;
mod compressed_tensors;
mod float8;
mod gptq;
mod matrix;
mod mxfp4;
mod parts;

use crate::{
    config::Quantisation,
    error::ModelError,
    safetensors_file::{SafetensorsFiles, SafetensorsTensor},
    weights::TensorSource,
};
use dsrun_core::WeightType;
use float8::Float8;
use matrix::Matrix;
use mxfp4::Mxfp4;
use parts::Parts;
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
};

/// The tensors of a quantised checkpoint, each matrix in one piece.
#[derive(Debug)]
pub struct QuantisedFiles {
    files: SafetensorsFiles,
    /// By the name of the matrix, `<module>.weight`; of the matrices of experts `<module>.mxfp4`.
    matrices: BTreeMap<String, Stored>,
    /// The tensors that matrices are made of.
    parts: HashSet<String>,
}

/// A matrix as the files hold it.
#[derive(Debug)]
enum Stored {
    Integers(Matrix),
    Floats8(Float8),
    Experts(Mxfp4),
}

impl Stored {
    /// The type of its rows.
    fn weight_type(&self) -> &WeightType {
        match self {
            Self::Integers(matrix) => matrix.weight_type(),
            Self::Floats8(matrix) => &matrix.weight_type,
            Self::Experts(experts) => &experts.weight_type,
        }
    }

    /// The tensors that belong to it.
    fn tensors(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match self {
            Self::Integers(matrix) => Box::new(matrix.tensors()),
            Self::Floats8(matrix) => Box::new(matrix.tensors()),
            Self::Experts(experts) => {
                Box::new([&experts.blocks, &experts.scales].into_iter().map(String::as_str))
            }
        }
    }

    /// Rows `first .. first + count`.
    fn rows(&self, files: &SafetensorsFiles, first: usize, count: usize) -> dsrun_core::Result<Vec<u8>> {
        match self {
            Self::Integers(matrix) => matrix.rows(files, first, count),
            Self::Floats8(matrix) => matrix.rows(files, first, count),
            Self::Experts(experts) => experts.rows(files, first, count),
        }
    }

    /// Why it is decoded as it is read, if it is.
    fn decoded_because(&self) -> Option<&'static str> {
        match self {
            Self::Integers(matrix) if matrix.is_decoded() => Some("inputs are in act-order (desc_act)"),
            Self::Floats8(_) => Some("weights are 8-bit floats (FP8)"),
            Self::Integers(_) | Self::Experts(_) => None,
        }
    }
}

impl QuantisedFiles {
    /// Finds the quantised matrices of a checkpoint.
    ///
    /// # Errors
    /// If one lacks a part, its parts do not fit together, or its format cannot be used.
    pub fn new(files: SafetensorsFiles, quantisation: &Quantisation) -> Result<Self, ModelError> {
        let mut opened = Self { matrices: BTreeMap::new(), parts: HashSet::new(), files };
        let mut decoded: BTreeMap<&str, usize> = BTreeMap::new();
        for tensor in opened.files.tensors() {
            let Some(module) = module_of(&tensor, quantisation) else { continue };
            let wrong = |problem| ModelError::Quantised {
                path: tensor.file.to_owned(),
                module: module.to_owned(),
                problem,
            };
            let parts = Parts { files: &opened.files, module };
            let stored = match quantisation {
                Quantisation::Mxfp4 => Mxfp4::new(&opened.files, module).map(Stored::Experts),
                Quantisation::Gptq(gptq) => gptq::matrix(parts, gptq).map(Stored::Integers),
                Quantisation::Awq(group) => awq::matrix(parts, *group).map(Stored::Integers),
                Quantisation::Float8(block) => Float8::new(parts, *block).map(Stored::Floats8),
                Quantisation::CompressedTensors(_) if tensor.dtype == float8::DTYPE => {
                    let block = quantisation.block_of(module).map_err(|error| error.to_string());
                    block.and_then(|block| Float8::new(parts, block)).map(Stored::Floats8)
                }
                Quantisation::CompressedTensors(_) => {
                    let inputs = quantisation.quantises_inputs(module).map_err(|error| error.to_string());
                    inputs.and_then(|inputs| compressed_tensors::matrix(parts, inputs)).map(Stored::Integers)
                }
            };
            let stored = stored.map_err(wrong)?;
            if let Some(reason) = stored.decoded_because() {
                *decoded.entry(reason).or_default() += 1;
            }
            opened.parts.extend(stored.tensors().map(str::to_owned));
            let part = if let Stored::Experts(_) = stored { "mxfp4" } else { "weight" };
            opened.matrices.insert(format!("{module}.{part}"), stored);
        }
        for (reason, decoded) in decoded {
            let files = opened.files.path().display();
            let all = opened.matrices.len();
            tracing::warn!(
                %files, decoded, all, reason,
                "matrices are decoded and take 16 bits for each weight"
            );
        }
        Ok(opened)
    }
}

/// The module that a tensor shows to be quantised.
fn module_of<'a>(tensor: &SafetensorsTensor<'a>, quantisation: &Quantisation) -> Option<&'a str> {
    match quantisation {
        Quantisation::Gptq(_) | Quantisation::Awq(_) => tensor.name.strip_suffix(".qweight"),
        Quantisation::Float8(_) => {
            tensor.name.strip_suffix(".weight").filter(|_| tensor.dtype == float8::DTYPE)
        }
        Quantisation::CompressedTensors(_) => match tensor.name.strip_suffix(".weight") {
            Some(module) => ["I8", float8::DTYPE].contains(&tensor.dtype.as_str()).then_some(module),
            None => tensor.name.strip_suffix(".weight_packed"),
        },
        Quantisation::Mxfp4 => tensor.name.strip_suffix("_blocks"),
    }
}

impl TensorSource for QuantisedFiles {
    fn describe(&self) -> String {
        self.files.describe()
    }

    fn names(&self) -> Vec<&str> {
        let others = self.files.names().into_iter().filter(|name| !self.parts.contains(*name));
        others.chain(self.matrices.keys().map(String::as_str)).collect()
    }

    fn tensor_type(&self, name: &str) -> dsrun_core::Result<WeightType> {
        match self.matrices.get(name) {
            Some(stored) => Ok(stored.weight_type().clone()),
            None => self.files.tensor_type(name),
        }
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> dsrun_core::Result<Cow<'_, [u8]>> {
        match self.matrices.get(name) {
            Some(stored) => {
                stored.rows(&self.files, first, count).map(Cow::Owned).map_err(|error| error.at(name))
            }
            None => self.files.rows(name, first, count),
        }
    }

    fn quantises_inputs(&self, name: &str) -> bool {
        matches!(self.matrices.get(name), Some(Stored::Integers(matrix)) if matrix.quantises_inputs)
    }

    fn fingerprint(&self) -> Option<String> {
        self.files.fingerprint()
    }

    fn release(&self, name: &str) {
        match self.matrices.get(name) {
            Some(stored) => stored.tensors().for_each(|part| self.files.release(part)),
            None => self.files.release(name),
        }
    }
}
