//! Reads safetensors files, one or several with an index, mapped into memory.
//!
//! Headers are checked when the files are opened, in memory proportional to them; the data of tensors is read when rows
//! are asked for. Tensors of types that cannot be used are an error only when a weight is made of one.
//!
//! The format: <https://huggingface.co/docs/safetensors>.

mod error;
mod index;
mod single;
mod unique_map;

use crate::weights::file_bytes::FileBytes;
use crate::weights::{TensorSource, fingerprint_of_files, slice_rows};
use dsrun_core::{DType, WeightFormat, WeightType};
use safetensors::tensor::TensorInfo;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use error::{Result, SafetensorsError, SafetensorsProblem};

use single::SingleFile;

/// The file of a model in one piece.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The index of a model in several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The tensors of one safetensors file, or of all that an index names.
#[derive(Debug)]
pub struct SafetensorsFiles {
    /// What was opened.
    path: PathBuf,
    files: Vec<SingleFile>,
    /// Which of `files` a tensor is in.
    tensors: BTreeMap<String, usize>,
}

/// What a safetensors file says about one of its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafetensorsTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// The name of the type, which need not be one that can be used.
    pub dtype: String,
    /// How long the data is.
    pub bytes: usize,
    /// The file it is in.
    pub file: &'a Path,
}

impl SafetensorsFiles {
    /// Opens a safetensors file, an index (`*.json`), or a folder that has one of them under its usual name; the index
    /// comes first.
    ///
    /// # Errors
    /// If a file cannot be read, is no valid safetensors file, or the index and the files contradict each other.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            let found =
                [INDEX_FILE, SINGLE_FILE].map(|name| path.join(name)).into_iter().find(|path| path.exists());
            let found = found.ok_or_else(|| SafetensorsError::new(path, SafetensorsProblem::NothingThere))?;
            return Self::open_file(&found);
        }
        Self::open_file(path)
    }

    fn open_file(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
            return Self::open_index(path);
        }
        Self::single(path, SingleFile::open(path)?)
    }

    /// Reads a single file that is in memory. Messages call it `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self> {
        let path = path.as_ref();
        Self::single(path, SingleFile::new(path, FileBytes::Owned(bytes))?)
    }

    fn single(path: &Path, file: SingleFile) -> Result<Self> {
        let tensors = file.names.iter().map(|name| (name.clone(), 0)).collect();
        Ok(Self { path: path.to_owned(), files: vec![file], tensors })
    }

    fn open_index(path: &Path) -> Result<Self> {
        let problem = |problem| SafetensorsError::new(path, problem);
        let json = FileBytes::open(path).map_err(|error| problem(SafetensorsProblem::Io(error)))?;
        let map = index::read_index(json.as_slice()).map_err(problem)?;
        let folder = path.parent().unwrap_or(Path::new(""));

        let mut shards: BTreeMap<&str, usize> = BTreeMap::new();
        let mut opened = Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        for (tensor, shard) in &map {
            if shards.contains_key(shard.as_str()) {
                continue;
            }
            let file = folder.join(shard);
            if !file.exists() {
                let (shard, tensor) = (shard.clone(), tensor.clone());
                return Err(problem(SafetensorsProblem::MissingShard { shard, tensor }));
            }
            shards.insert(shard, opened.files.len());
            opened.add(SingleFile::open(&file)?)?;
        }
        for (tensor, shard) in &map {
            if opened.tensors.get(tensor) != shards.get(shard.as_str()) {
                let (shard, tensor) = (shard.clone(), tensor.clone());
                return Err(problem(SafetensorsProblem::NotInShard { tensor, shard }));
            }
        }
        // Loaders elsewhere take every tensor of every shard, and so do we; it is still worth a word.
        if opened.tensors.len() > map.len() {
            let extra = opened.tensors.len() - map.len();
            tracing::warn!(index = %path.display(), extra, "the shards hold tensors that the index does not list");
        }
        Ok(opened)
    }

    fn add(&mut self, file: SingleFile) -> Result<()> {
        for name in &file.names {
            if let Some(other) = self.tensors.insert(name.clone(), self.files.len()) {
                let shard = |file: &SingleFile| {
                    file.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
                };
                let first = self.files.get(other).map(shard).unwrap_or_default();
                let problem =
                    SafetensorsProblem::InTwoShards { tensor: name.clone(), first, second: shard(&file) };
                return Err(SafetensorsError::new(&self.path, problem));
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// What was opened: a safetensors file or an index.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that the tensors are in.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SingleFile::path)
    }

    /// The free texts of all files, `__metadata__` in the header, by key and value.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .flat_map(|file| file.metadata.iter())
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = SafetensorsTensor<'_>> {
        self.files.iter().flat_map(|file| {
            file.names.iter().filter_map(|name| Some(describe_tensor(name, file.info(name)?, file)))
        })
    }

    /// The tensor of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<SafetensorsTensor<'_>> {
        let (name, index) = self.tensors.get_key_value(name)?;
        let file = self.files.get(*index)?;
        Some(describe_tensor(name, file.info(name)?, file))
    }

    fn find(&self, name: &str) -> Result<(&SingleFile, &TensorInfo)> {
        let found = self.tensors.get(name).and_then(|index| self.files.get(*index));
        let found = found.and_then(|file| Some((file, file.info(name)?)));
        found.ok_or_else(|| {
            SafetensorsError::new(&self.path, SafetensorsProblem::MissingTensor(name.to_owned()))
        })
    }

    /// The numbers of a tensor of integers that is no weight: the shape or the order of another.
    pub(crate) fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let (file, info) = self.find(name).ok()?;
        let bytes = file.bytes(info);
        match info.dtype {
            safetensors::Dtype::I64 => {
                Some(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
            }
            safetensors::Dtype::I32 => {
                Some(bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect())
            }
            _ => None,
        }
    }

    /// The data of a tensor of any type.
    pub(crate) fn data(&self, name: &str) -> Option<&[u8]> {
        let (file, info) = self.find(name).ok()?;
        Some(file.bytes(info))
    }

    /// A tensor that weights can be made of: its type and its bytes.
    fn weight(&self, name: &str) -> Result<(WeightType, &[u8])> {
        let (file, info) = self.find(name)?;
        let dtype = element_type(info.dtype).ok_or_else(|| {
            let (tensor, dtype) = (name.to_owned(), info.dtype.to_string());
            SafetensorsError::new(file.path(), SafetensorsProblem::UnsupportedType { tensor, dtype })
        })?;
        if info.shape.contains(&0) {
            let problem = SafetensorsProblem::Empty { tensor: name.to_owned(), shape: info.shape.clone() };
            return Err(SafetensorsError::new(file.path(), problem));
        }
        let weight_type = WeightType { format: WeightFormat::Dense(dtype), shape: info.shape.clone() };
        Ok((weight_type, file.bytes(info)))
    }
}

fn describe_tensor<'a>(name: &'a str, info: &'a TensorInfo, file: &'a SingleFile) -> SafetensorsTensor<'a> {
    let (start, end) = info.data_offsets;
    SafetensorsTensor {
        name,
        shape: &info.shape,
        dtype: info.dtype.to_string(),
        bytes: end - start,
        file: file.path(),
    }
}

fn element_type(dtype: safetensors::Dtype) -> Option<DType> {
    match dtype {
        safetensors::Dtype::F32 => Some(DType::F32),
        safetensors::Dtype::F16 => Some(DType::F16),
        safetensors::Dtype::BF16 => Some(DType::BF16),
        safetensors::Dtype::I32 => Some(DType::I32),
        safetensors::Dtype::U32 => Some(DType::U32),
        safetensors::Dtype::I8 => Some(DType::I8),
        safetensors::Dtype::U8 => Some(DType::U8),
        _ => None,
    }
}

impl TensorSource for SafetensorsFiles {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> Vec<&str> {
        self.files.iter().flat_map(|file| file.names.iter()).map(String::as_str).collect()
    }

    fn tensor_type(&self, name: &str) -> dsrun_core::Result<WeightType> {
        Ok(self.weight(name)?.0)
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> dsrun_core::Result<Cow<'_, [u8]>> {
        let (weight_type, bytes) = self.weight(name)?;
        slice_rows(&weight_type, bytes, first, count).map(Cow::Borrowed).map_err(|error| error.at(name))
    }

    fn fingerprint(&self) -> Option<String> {
        fingerprint_of_files(self.files.iter().map(SingleFile::path))
    }

    fn release(&self, name: &str) {
        if let Ok((file, info)) = self.find(name) {
            file.release(info);
        }
    }
}
