//! What can be wrong with a vocabulary, a text or a token id.

use std::path::PathBuf;

/// The result of the tokenizer's functions.
pub type Result<T> = std::result::Result<T, TokenizerError>;

/// Why a tokenizer could not be built, or could not encode or decode.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A JSON file does not have the form that its kind has.
    #[error("{file} is not valid: {message}")]
    Json {
        /// Which file: `tokenizer.json` or `tokenizer_config.json`.
        file: &'static str,
        /// What is wrong and where.
        message: String,
    },
    /// The GGUF vocabulary is of a kind that is not supported.
    #[error(
        "tokenizer model \"{model}\" is not supported; supported: gpt2, llama. A tokenizer.json file also works"
    )]
    UnknownModel {
        /// The value of `tokenizer.ggml.model`.
        model: String,
    },
    /// The GGUF vocabulary names a way to split words that is not supported.
    #[error(
        "pre-tokenizer \"{name}\" is not supported; supported: {supported}. A tokenizer.json file also works"
    )]
    UnknownPreTokenizer {
        /// The value of `tokenizer.ggml.pre`.
        name: String,
        /// The supported names, with commas.
        supported: String,
    },
    /// An array of the vocabulary is not as long as the list of tokens.
    #[error("{field} has {found} entries, but the vocabulary has {expected} tokens")]
    Length {
        /// The metadata key.
        field: &'static str,
        /// How long it is.
        found: usize,
        /// How long it has to be.
        expected: usize,
    },
    /// A named special token is not in the vocabulary.
    #[error("{field} is {id}, but the vocabulary has only {size} tokens")]
    SpecialOutOfRange {
        /// The metadata key.
        field: &'static str,
        /// The id it holds.
        id: u32,
        /// How many tokens there are.
        size: usize,
    },
    /// The vocabulary asks to add a token that it does not name.
    #[error("{flag} is set, but {field} is missing")]
    MissingSpecial {
        /// The metadata key of the flag.
        flag: &'static str,
        /// The metadata key of the token.
        field: &'static str,
    },
    /// A merge does not have the form `left right`, or names a token that does not exist.
    #[error("merge {index} ({merge:?}) {problem}")]
    Merge {
        /// Its position in the list.
        index: usize,
        /// The merge.
        merge: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The vocabulary contradicts itself in another way.
    #[error("the vocabulary is not usable: {message}")]
    Vocabulary {
        /// What is wrong.
        message: String,
    },
    /// A token id is not in the vocabulary.
    #[error("token id {id} is not in the vocabulary of {size} tokens")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// How many tokens there are.
        size: usize,
    },
    /// The vocabulary cannot represent a character of the text.
    #[error("the vocabulary has no token for {character:?}, no byte tokens and no unknown token")]
    Unencodable {
        /// The character.
        character: char,
    },
    /// The tokenizer library failed on a text.
    #[error("cannot encode the text: {message}")]
    Encode {
        /// What the library said.
        message: String,
    },
}
