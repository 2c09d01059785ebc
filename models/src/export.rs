//! Writes a model as a folder that transformers, vLLM and dsrun open: safetensors, `config.json`, tokenizer.
//!
//! Weights are those of a program, so whatever a pass made of them (rounded to integers, for example) is what is written. Matrices
//! of a [group-wise format](dsrun_core::GroupFormat) are laid out as compressed-tensors does, and
//! `quantization_config` says so. One matrix is read, encoded and written at a time, a few rows of it at once.

mod config;
mod file;
mod matrix;
mod quantisation;
mod tokenizer;

use crate::{
    families,
    fetch::{ModelFiles, WeightFiles},
    model::Model,
    tensor_names::{Naming, Part},
    weights::ExprReader,
};
use dsrun_core::{
    DType, WeightExpr, WeightFormat, WeightReader,
    op::{Op, RopePairing},
    program::{Origin, Program, ValueId},
};
use file::{SafetensorsWriter, Stored};
use matrix::MatrixLayout;
use std::{
    collections::HashSet,
    io,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// The result of writing a model.
pub type Result<T, E = ExportError> = std::result::Result<T, E>;

/// Bytes of decoded rows that are held at a time.
const PIECE_BYTES: usize = 8 << 20;

/// Why a model cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The tensors of the architecture have no form in such folders.
    #[error("models of architecture {architecture} cannot be written; those of {} can", .writable.join(", "))]
    Architecture {
        /// The architecture.
        architecture: &'static str,
        /// Those whose models can be written.
        writable: Vec<&'static str>,
    },
    /// A weight has a format that such folders cannot have.
    #[error("{weight} cannot be written as {format}: {reason}")]
    Format {
        /// The weight's name in the program.
        weight: String,
        /// The format.
        format: WeightFormat,
        /// Why, and what can be done.
        reason: &'static str,
    },
    /// The configuration cannot be said in a `config.json` file.
    #[error("the configuration cannot be written as config.json: {0}")]
    Config(String),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file the model comes from cannot be read.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// A weight cannot be read.
    #[error(transparent)]
    Weight(#[from] dsrun_core::Error),
    /// Whoever watches the progress asked to stop.
    #[error("stopped")]
    Stopped,
}

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Export<'a> {
    /// The model.
    pub model: &'a Model,
    /// Where it comes from; what belongs to its tokenizer is taken along.
    pub files: &'a ModelFiles,
    /// The program whose weights are written.
    pub program: &'a Program,
    /// The type of matrices that are not quantised; as they are if absent, and f16 for GGUF's blocks.
    pub dense: Option<DType>,
}

/// A matrix that was written.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Written {
    /// Its name in the program.
    pub name: String,
    /// How it is stored.
    pub format: String,
    /// Bytes of all its parts.
    pub bytes: u64,
    /// How far it is from what was rounded: the root of the squared differences over that of the squares. None if nothing was.
    pub error: Option<f64>,
}

/// A tensor, or several that make a matrix, to be written.
struct Job<'a> {
    /// In the program.
    name: &'a str,
    /// In the file, without `.weight` or `.bias`.
    module: String,
    /// Whether it is a matrix, which may be quantised; else a vector, of this suffix.
    kind: Kind,
    expr: WeightExpr,
    /// The same weight before it was rounded, if it was.
    original: Option<WeightExpr>,
    quantises_inputs: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Of a product.
    Linear,
    /// That is looked up.
    Embedding,
    /// A vector of this suffix.
    Vector(&'static str),
}

impl Export<'_> {
    /// Writes the model into a folder, which must be there. `progress` hears of the bytes written and of all there will be.
    ///
    /// Gives the matrices, and what of the tokenizer could not be written.
    ///
    /// # Errors
    /// If a weight has no form in such files, or a file cannot be read or written.
    pub fn write(
        &self,
        folder: &Path,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(Vec<Written>, Vec<String>)> {
        let architecture = families::of(self.model.config())?;
        if !architecture.writable {
            let writable = families::writable().collect();
            return Err(ExportError::Architecture { architecture: architecture.name, writable });
        }
        let jobs = self.jobs(architecture.tensors.of_file(|_| true))?;
        let mut stored = Vec::new();
        let mut layouts = Vec::new();
        for job in &jobs {
            let layout = self.layout(job)?;
            stored.extend(layout.tensors(&job.module));
            layouts.push(layout);
        }
        config::write(self, &quantisation::config(&jobs, &layouts), folder)?;
        let left_out = tokenizer::write(self, folder)?;
        let mut file = SafetensorsWriter::create(&folder.join("model.safetensors"), &stored)?;
        let total = file.bytes();
        let mut written = Vec::new();
        let mut done = 0;
        for (job, layout) in jobs.iter().zip(&layouts) {
            let error = self.write_job(job, layout, &mut file, &mut |bytes| {
                done += bytes;
                match progress(done, total) {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => Err(ExportError::Stopped),
                }
            })?;
            if !matches!(job.kind, Kind::Vector(_)) {
                let (name, format) = (job.name.to_owned(), layout.describe());
                let bytes = layout.tensors(&job.module).iter().map(Stored::bytes).sum();
                written.push(Written { name, format, bytes, error });
            }
        }
        file.finish()?;
        Ok((written, left_out))
    }

    /// The weights of the program, in order.
    fn jobs(&self, naming: Naming) -> Result<Vec<Job<'_>>> {
        let config = self.model.config();
        let integer_products = quantising_products(self.program);
        // Weights are stored for one pairing, layers that are not rotated included.
        let neighbours = config.ropes().iter().any(|rope| rope.pairing == RopePairing::Neighbours);
        let mut jobs = Vec::new();
        for (id, value) in self.program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
            let Origin::Weight(expr) = &value.origin else { continue };
            let (matrix, bias) = match value.name.strip_suffix(".bias") {
                Some(matrix) => (matrix, true),
                None => (&*value.name, false),
            };
            // Tables that follow from the configuration are no tensors.
            let Some((part, layer)) = Part::of_value(matrix) else { continue };
            let kind = match part {
                _ if bias => Kind::Vector("bias"),
                _ if value.weight_type().is_none() => Kind::Vector("weight"),
                Part::Embedding | Part::Positions => Kind::Embedding,
                _ => Kind::Linear,
            };
            let heads = match part {
                Part::Query if neighbours => Some(config.heads),
                Part::Key if neighbours => Some(config.kv_heads),
                _ => None,
            };
            if heads.is_some() && bias {
                let reason = "biases of queries and keys whose pairs are neighbours are not supported";
                return Err(ExportError::Config(reason.into()));
            }
            let in_file_order = |expr: &WeightExpr| match heads {
                Some(heads) => halves(expr.clone(), heads, config.head_dim),
                None => stored(expr, kind).clone(),
            };
            jobs.push(Job {
                name: &value.name,
                module: naming.place(part, layer, config).tensor,
                kind,
                expr: in_file_order(expr),
                original: exact(expr).map(in_file_order),
                quantises_inputs: integer_products.contains(&id),
            });
        }
        Ok(jobs)
    }

    /// How a weight is laid out in the file.
    fn layout(&self, job: &Job<'_>) -> Result<MatrixLayout> {
        let reader = ExprReader::new(&**self.model.weights(), &job.expr)?;
        let weight = reader.weight_type().clone();
        let wrong =
            |reason| ExportError::Format { weight: job.name.to_owned(), format: weight.format, reason };
        let dense =
            |dtype: DType| MatrixLayout::Dense { suffix: job.suffix(), dtype, shape: weight.shape.clone() };
        match (weight.format, job.kind) {
            (WeightFormat::Dense(dtype), Kind::Vector(_)) => Ok(dense(dtype)),
            (WeightFormat::Dense(dtype), _) => Ok(dense(self.dense.unwrap_or(dtype))),
            (WeightFormat::Group(format), Kind::Linear) => {
                MatrixLayout::of_group(format, &weight, job.quantises_inputs).map_err(wrong)
            }
            (WeightFormat::Group(_), Kind::Embedding) => Err(wrong(
                "an embedding must be dense (one that is the head too is named lm_head in policies)",
            )),
            (WeightFormat::Block(_), _) if job.original.is_some() => Err(wrong(
                "compressed-tensors has no layout for it; give the policy to --quantize, which rounds weights at load",
            )),
            (WeightFormat::Block(_), _) => Ok(dense(self.dense.unwrap_or(DType::F16))),
            _ => Err(wrong("there is no such type in these files")),
        }
    }

    fn write_job(
        &self,
        job: &Job<'_>,
        layout: &MatrixLayout,
        file: &mut SafetensorsWriter,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Option<f64>> {
        let source = &**self.model.weights();
        let mut reader = ExprReader::new(source, &job.expr)?;
        if let MatrixLayout::Dense { dtype, .. } = layout {
            reader = reader.stored_as(WeightFormat::Dense(*dtype))?;
        }
        let original = match &job.original {
            Some(original) => Some(ExprReader::new(source, original)?),
            None => None,
        };
        let weight = reader.weight_type().clone();
        let rows_at_once = (PIECE_BYTES / (weight.columns() * 4).max(1)).clamp(1, weight.rows().max(1));
        let mut encoder = layout.encoder(&job.module);
        let (mut squares, mut differences) = (0.0, 0.0);
        for first in (0..weight.rows()).step_by(rows_at_once) {
            let count = rows_at_once.min(weight.rows() - first);
            let bytes = reader.rows(first, count)?;
            let written = encoder.rows(file, first, &bytes)?;
            if let Some(original) = &original {
                let wanted = original.decoded_rows(first, count)?;
                let mut found = vec![0.0; weight.columns()];
                for (row, wanted) in
                    bytes.chunks_exact(weight.row_bytes()?).zip(wanted.chunks_exact(weight.columns()))
                {
                    weight.format.decode_row(row, &mut found)?;
                    for (found, wanted) in found.iter().zip(wanted) {
                        squares += f64::from(*wanted).powi(2);
                        differences += f64::from(found - wanted).powi(2);
                    }
                }
            }
            progress(written)?;
        }
        progress(encoder.finish(file)?)?;
        reader.release();
        Ok(original.map(|_| if differences == 0.0 { 0.0 } else { (differences / squares).sqrt() }))
    }

    /// The GGUF file that the model comes from, if it does.
    fn gguf_path(&self) -> Option<&Path> {
        match &self.files.weights {
            WeightFiles::Gguf(paths) => paths.first().map(PathBuf::as_path),
            WeightFiles::Safetensors(_) => None,
        }
    }
}

impl Job<'_> {
    fn suffix(&self) -> &'static str {
        match self.kind {
            Kind::Vector(suffix) => suffix,
            Kind::Linear | Kind::Embedding => "weight",
        }
    }
}

/// A vector as the file has it: programs hold vectors as f32.
fn stored(expr: &WeightExpr, kind: Kind) -> &WeightExpr {
    match (expr, kind) {
        (WeightExpr::Cast { of, .. }, Kind::Vector(_)) => of,
        _ => expr,
    }
}

/// What a pass rounds, if it does.
fn exact(expr: &WeightExpr) -> Option<&WeightExpr> {
    match expr {
        WeightExpr::Quantise { of, .. } | WeightExpr::Cast { of, .. } => Some(of),
        _ => None,
    }
}

/// Rows of heads in which pairs are neighbours, put into the order in which the halves of a head are paired.
fn halves(of: WeightExpr, heads: usize, head_dim: usize) -> WeightExpr {
    let half = head_dim / 2;
    let row = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % half * 2 + within / half
    };
    WeightExpr::Permute { of: Box::new(of), rows: (0..heads * head_dim).map(row).collect() }
}

/// The weights of products that quantise their inputs.
fn quantising_products(program: &Program) -> HashSet<ValueId> {
    let of = |op: &Op, operands: &[Option<ValueId>]| match op {
        Op::LinearW8A8(_) => operands.get(2).copied().flatten(),
        _ => None,
    };
    program.nodes.iter().filter_map(|node| of(&node.call.op, &node.call.operands)).collect()
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> ExportError + '_ {
    |source| ExportError::Io { path: path.to_owned(), source }
}
