//! Why a model cannot be opened.

use crate::{
    chat::ChatError, config::ConfigError, fetch::FetchError, generation::GenerationError, gguf::GgufError,
    safetensors_file::SafetensorsError, tokenizer::TokenizerError,
};
use std::path::PathBuf;

/// Why a model cannot be opened or turned into a program. Messages say which file, what in it, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// There is no model at the path.
    #[error(transparent)]
    Files(#[from] FetchError),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that comes with a model is much too large to be what its name says.
    #[error("{} is over {most} bytes: it is not what its name says", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most that is read.
        most: u64,
    },
    /// The safetensors files have no `config.json` beside them.
    #[error("{} has no config.json beside it, which says what the tensors are", path.display())]
    NoConfig {
        /// The file of weights.
        path: PathBuf,
    },
    /// The configuration cannot be followed.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
    /// The GGUF file is not valid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The GGUF file is one of several that belong together, but its name does not tell which the others are.
    #[error(
        "{} is one of {parts} parts, but is not called so\nhint: give the parts their names back, such as \
         model-00001-of-{parts:05}.gguf", path.display()
    )]
    Split {
        /// The file.
        path: PathBuf,
        /// How many parts there are.
        parts: u64,
    },
    /// A safetensors file is not valid.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A quantised matrix cannot be used.
    #[error("{}: the quantised matrix {module} cannot be used: {problem}", path.display())]
    Quantised {
        /// The file.
        path: PathBuf,
        /// The module it belongs to.
        module: String,
        /// What is wrong.
        problem: String,
    },
    /// The tensors are not those that the configuration asks for.
    #[error("the tensors of {source_name} do not fit the configuration:{}", list(problems))]
    Weights {
        /// The files.
        source_name: String,
        /// One line for each tensor that is missing, has another shape or is one too many; the first of them.
        problems: Vec<String>,
    },
    /// A file of the tokenizer cannot be used.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: TokenizerError,
    },
    /// The tokenizer has tokens that the model has no embedding for.
    #[error(
        "the tokenizer of {} has {tokenizer} tokens, but the model only {model}: they do not belong together",
        path.display()
    )]
    Vocabulary {
        /// The file the tokenizer is from.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Rows of the embedding.
        model: usize,
    },
    /// `generation_config.json` cannot be followed.
    #[error("{}: {source}", path.display())]
    Generation {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: GenerationError,
    },
    /// The chat template is not valid; the model can be used without it.
    #[error("{}: {source}", path.display())]
    Chat {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: std::sync::Arc<ChatError>,
    },
    /// The model has no chat template.
    #[error("{name} has no chat template; give plain text, or a model that was trained for conversations")]
    NoChatTemplate {
        /// The model.
        name: String,
    },
    /// Neither a preset nor a file has the name.
    #[error("there is no preset \"{name}\" and no such config.json; presets: {presets}")]
    UnknownPreset {
        /// The name.
        name: String,
        /// The names of the presets, with commas.
        presets: String,
    },
    /// Random weights are asked for with a file that has weights.
    #[error(
        "{} is a GGUF file; random weights take the name of a preset, a config.json, or a folder with one",
        path.display()
    )]
    NoConfiguration {
        /// The file.
        path: PathBuf,
    },
    /// The program cannot be built.
    #[error(transparent)]
    Program(#[from] dsrun_core::Error),
}

fn list(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}
