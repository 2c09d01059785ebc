//! Whether the tensors of a file are those that a program wants: all of them, in their shapes, and no others.

use super::{ModelError, Result};
use crate::{
    config::DecoderConfig,
    declare::{Declare, TensorTypes},
    families,
    step::ProgramOptions,
    tensor_names::{Naming, Part},
    weights::{Distribution, RandomTensor, TensorSource},
};
use dsrun_core::{DType, Error, WeightFormat, WeightType, program::Program};
use std::collections::{HashMap, HashSet};

/// How many problems are listed. With more there is little sense in looking on.
const MOST_PROBLEMS: usize = 32;
/// How much of a tensor is compared at a time.
const COMPARED_BYTES: usize = 1 << 20;

/// Builds a program over a source, after which every tensor it wants is known to be there.
pub(super) fn program(
    config: &DecoderConfig,
    options: ProgramOptions,
    naming: Naming,
    source: &dyn TensorSource,
) -> Result<(Program, HashSet<String>)> {
    let names = source.names().into_iter().collect();
    let mut types = FileTypes { source, names, wanted: HashSet::new(), problems: Vec::new() };
    let declare = Declare {
        config,
        naming,
        storage: options.storage,
        types: &mut types,
        stored: HashMap::new(),
        declared: HashMap::new(),
    };
    let built = families::program(options, declare);
    let FileTypes { wanted, problems, .. } = types;
    if !problems.is_empty() {
        return Err(ModelError::Weights { source_name: source.describe(), problems });
    }
    Ok((built?, wanted))
}

/// Checks that the source has no tensors but those wanted, and those that are known not to matter.
pub(super) fn refuse_others(
    config: &DecoderConfig,
    naming: Naming,
    source: &dyn TensorSource,
    wanted: &HashSet<String>,
) -> Result<()> {
    let head = naming.place(Part::Head, 0, config).weight();
    let embedding = naming.place(Part::Embedding, 0, config).weight();
    // The head of pre-training is not read. A classification head is, and may have the same names.
    let of_classifier = |name: &str| {
        let is_there = config.encoder.is_some_and(|encoder| encoder.classifier.is_some());
        let parts = [Part::Pooler, Part::PoolerNorm, Part::Classifier].into_iter();
        is_there && parts.map(|part| naming.place(part, 0, config)).any(|place| name == place.bias())
    };
    let mut problems = Vec::new();
    for name in source.names() {
        let unread = (config.layers..config.layers + config.unread_layers).any(|layer| {
            name.contains(&format!("layers.{layer}.")) || name.starts_with(&format!("blk.{layer}."))
        });
        if wanted.contains(name) || unread || (naming.is_no_weight(name) && !of_classifier(name)) {
            continue;
        }
        if config.tied && name == head {
            if !same_values(source, name, &embedding)? {
                problems.push(format!(
                    "{head} differs from {embedding}, but tie_word_embeddings says that they are one; remove the \
                     tensor, or set the field to false"
                ));
            }
            continue;
        }
        // Some quantisers write biases of zeros for matrices that have none.
        if name.ends_with(".bias") && is_zero(source, name)? {
            continue;
        }
        problems.push(match name.ends_with(".bias") {
            true => format!("{name} is there, but the configuration says that there is no such bias"),
            false => format!("{name} is there, but no part of the model"),
        });
        if problems.len() == MOST_PROBLEMS {
            problems.push("and perhaps more".to_owned());
            break;
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(ModelError::Weights { source_name: source.describe(), problems })
}

/// Whether a vector holds nothing but zeros.
fn is_zero(source: &dyn TensorSource, name: &str) -> Result<bool> {
    let weight_type = source.tensor_type(name)?;
    let bytes = source.rows(name, 0, weight_type.rows())?;
    let mut values = vec![0.0; weight_type.elements()?];
    let flat = WeightType { shape: vec![values.len()], ..weight_type };
    Ok(flat.format.decode_row(&bytes, &mut values).is_ok() && values.iter().all(|value| *value == 0.0))
}

/// Whether two tensors are the same to the bit.
fn same_values(source: &dyn TensorSource, first: &str, second: &str) -> Result<bool> {
    let weight_type = source.tensor_type(first)?;
    if weight_type != source.tensor_type(second)? {
        return Ok(false);
    }
    let rows = weight_type.rows();
    let step = (COMPARED_BYTES / weight_type.row_bytes()?.max(1)).max(1);
    for start in (0..rows).step_by(step) {
        let count = step.min(rows - start);
        if source.rows(first, start, count)? != source.rows(second, start, count)? {
            return Ok(false);
        }
    }
    source.release(first);
    Ok(true)
}

/// The tensors of a file, with a list of what is wrong with them.
struct FileTypes<'a> {
    source: &'a dyn TensorSource,
    names: HashSet<&'a str>,
    wanted: HashSet<String>,
    problems: Vec<String>,
}

impl TensorTypes for FileTypes<'_> {
    /// What is wrong is noted, and the program is built on to find out what else is.
    fn tensor_type(&mut self, name: &str, shape: &[usize]) -> dsrun_core::Result<WeightType> {
        self.wanted.insert(name.to_owned());
        let problem = if self.names.contains(name) {
            match self.source.tensor_type(name) {
                Ok(weight_type) if weight_type.shape == shape => return Ok(weight_type),
                // A matrix of one row may be stored as a vector.
                Ok(weight_type) if shape.first() == Some(&1) && weight_type.shape == shape[1..] => {
                    return Ok(weight_type);
                }
                Ok(weight_type) => {
                    format!("{name} has shape {:?}, but should have {shape:?}", weight_type.shape)
                }
                Err(error) => error.to_string(),
            }
        } else {
            format!("{name} of shape {shape:?} is missing")
        };
        self.problems.push(problem);
        if self.problems.len() == MOST_PROBLEMS {
            self.problems.push("and perhaps more".to_owned());
            return Err(Error::invalid("the tensors do not fit"));
        }
        Ok(WeightType { format: WeightFormat::Dense(DType::F32), shape: shape.to_vec() })
    }
}

/// The tensors that a program of this configuration wants, to be made up: matrices in `format`, vectors in f32.
pub(super) fn random(config: &DecoderConfig, format: WeightFormat) -> Result<Vec<RandomTensor>> {
    let mut types = RandomTypes { format, tensors: Vec::new() };
    let options = ProgramOptions::default();
    let declare = Declare {
        config,
        naming: Naming::Plain,
        storage: options.storage,
        types: &mut types,
        stored: HashMap::new(),
        declared: HashMap::new(),
    };
    families::program(options, declare)?;
    Ok(types.tensors)
}

/// Notes what is asked for.
struct RandomTypes {
    format: WeightFormat,
    tensors: Vec<RandomTensor>,
}

impl TensorTypes for RandomTypes {
    fn tensor_type(&mut self, name: &str, shape: &[usize]) -> dsrun_core::Result<WeightType> {
        let (format, distribution) = match shape {
            [_, inputs] => (self.format, Distribution::matrix(*inputs)),
            _ if name.ends_with(".bias") => (WeightFormat::Dense(DType::F32), Distribution::centred(0.05)),
            _ => (WeightFormat::Dense(DType::F32), Distribution::norm()),
        };
        let weight_type = WeightType { format, shape: shape.to_vec() };
        self.tensors.push(RandomTensor {
            name: name.to_owned(),
            weight_type: weight_type.clone(),
            distribution,
        });
        Ok(weight_type)
    }
}
