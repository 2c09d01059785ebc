//! The tokenizer of a `tokenizer.json` file, as the `tokenizers` library reads it.

use std::collections::HashMap;

use serde::Deserialize;
use tokenizers::{AddedVocabulary, Decoder as _, DecoderWrapper, Model as _, OffsetType, PreTokenizer as _};

use super::bytes;
use super::error::{Result, TokenizerError};
use super::growth;
use super::pieces::{Pieces, TextStart};
use super::{EncodeOptions, StandIns, original};

const FILE: &str = "tokenizer.json";

/// Encodes with the library.
#[derive(Debug)]
pub(super) struct JsonEncoder {
    tokenizer: tokenizers::Tokenizer,
    /// The added tokens, with the control tokens among them read as text.
    plain_added: AddedVocabulary,
}

impl JsonEncoder {
    pub(super) fn encode(
        &self,
        text: &str,
        options: EncodeOptions,
        stand_ins: &StandIns,
    ) -> Result<Vec<u32>> {
        let encoding = self.encoding(text, options, stand_ins, 0)?;
        let post_process = || self.tokenizer.post_process(encoding, None, options.add_special);
        let encoding = guarded(post_process).map_err(|message| TokenizerError::Encode { message })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes two texts as the parts of one. Returns the tokens, and the first of them that has the type of the second part.
    pub(super) fn encode_pair(
        &self,
        texts: [&str; 2],
        options: EncodeOptions,
    ) -> Result<(Vec<u32>, Option<usize>)> {
        let first = self.encoding(texts[0], options, &[], 0)?;
        let second = self.encoding(texts[1], options, &[], 1)?;
        let post_process = || self.tokenizer.post_process(first, Some(second), options.add_special);
        let pair = guarded(post_process).map_err(|message| TokenizerError::Encode { message })?;
        let types = pair.get_type_ids();
        let second = types.iter().position(|token_type| *token_type != 0);
        if types[second.unwrap_or(types.len())..].iter().any(|token_type| *token_type != 1) {
            let message = "the file gives the tokens of two texts other types than 0 and then 1".to_owned();
            return Err(TokenizerError::Encode { message });
        }
        Ok((pair.get_ids().to_vec(), second))
    }

    /// The tokens of a text without those around it. `part` is 0 for the first of two parts.
    fn encoding(
        &self,
        text: &str,
        options: EncodeOptions,
        stand_ins: &StandIns,
        part: u32,
    ) -> Result<tokenizers::Encoding> {
        guarded(|| {
            let tokenizer = &self.tokenizer;
            let added =
                if options.parse_special { tokenizer.get_added_vocabulary() } else { &self.plain_added };
            let mut words = added.extract_and_normalize(tokenizer.get_normalizer(), text);
            if !stand_ins.is_empty() {
                words.normalize(|text| {
                    text.map(|character| original(character, stand_ins));
                    Ok(())
                })?;
            }
            if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut words)?;
            }
            words.tokenize(|word| tokenizer.get_model().tokenize(word.get()))?;
            words.into_encoding(None, part, OffsetType::None)
        })
        .map_err(|message| TokenizerError::Encode { message })
    }
}

/// Runs the library, which panics on some contradictions of a file instead of reporting them.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match crate::guarded::guarded(call) {
        Some(result) => result.map_err(|error| error.to_string()),
        None => Err("the tokenizer library gave up; the file contradicts itself".to_owned()),
    }
}

/// The parts of the file that are looked at before the library sees it.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    decoder: Option<serde_json::Value>,
    #[serde(default)]
    normalizer: Option<serde_json::Value>,
}

/// A byte-pair encoding model, if the file has one.
#[derive(Deserialize)]
struct BytePairFile {
    model: BytePairModel,
}

#[derive(Deserialize)]
struct BytePairModel {
    vocab: HashMap<String, u32>,
    merges: Merges,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merges {
    Pairs(Vec<(String, String)>),
    Lines(Vec<String>),
}

/// Reads the file and builds its two directions.
pub(super) fn load(content: &[u8]) -> Result<(JsonEncoder, Pieces)> {
    let invalid = |message: String| TokenizerError::Json { file: FILE, message };
    let file: File = serde_json::from_slice(content).map_err(|error| invalid(error.to_string()))?;
    if let Ok(BytePairFile { model }) = serde_json::from_slice(content) {
        check_merges(&model)?;
    }
    for (field, steps) in [("normalizer", &file.normalizer), ("decoder", &file.decoder)] {
        steps.as_ref().map_or(Ok(()), |steps| growth::check(field, steps)).map_err(invalid)?;
    }
    let mut tokenizer = guarded(|| tokenizers::Tokenizer::from_bytes(content)).map_err(invalid)?;
    // How long a text may be is the caller's to say.
    tokenizer.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
    tokenizer.with_padding(None);

    let mut plain_added = tokenizer.get_added_vocabulary().clone();
    plain_added.set_encode_special_tokens(true);

    let (tokens, special) = token_table(&tokenizer)?;
    let pieces = pieces(&tokenizer, file.decoder.as_ref(), tokens, special)?;
    Ok((JsonEncoder { tokenizer, plain_added }, pieces))
}

/// The library copies the merged text into a buffer that fits known tokens, so each merge must make one.
fn check_merges(model: &BytePairModel) -> Result<()> {
    let prefix = model.continuing_subword_prefix.as_deref().unwrap_or_default();
    let check = |index: usize, left: &str, right: &str| {
        let error =
            |problem: String| TokenizerError::Merge { index, merge: format!("{left} {right}"), problem };
        let Some(tail) = right.get(prefix.len()..) else {
            return Err(error(format!("has a right side shorter than the prefix {prefix:?}")));
        };
        let joined = format!("{left}{tail}");
        match [left, right, &joined].into_iter().find(|token| !model.vocab.contains_key(*token)) {
            Some(missing) => {
                Err(error(format!("needs token {missing:?}, which the vocabulary does not have")))
            }
            None => Ok(()),
        }
    };
    match &model.merges {
        Merges::Pairs(pairs) => {
            pairs.iter().enumerate().try_for_each(|(index, (left, right))| check(index, left, right))
        }
        Merges::Lines(lines) => lines
            .iter()
            .filter(|line| !line.starts_with("#version"))
            .enumerate()
            .filter_map(|(index, line)| line.split_once(' ').map(|(left, right)| (index, left, right)))
            .try_for_each(|(index, left, right)| check(index, left, right)),
    }
}

type TokenTable = (Vec<Option<Box<str>>>, Vec<bool>);

/// All tokens by id, and which of them are control tokens.
fn token_table(tokenizer: &tokenizers::Tokenizer) -> Result<TokenTable> {
    let vocabulary = tokenizer.get_vocab(true);
    let largest = vocabulary.values().max().map_or(0, |id| *id as usize);
    // Real vocabularies have a few holes. A table for ids far apart would take memory out of proportion to the file.
    if largest > vocabulary.len().saturating_mul(4).saturating_add(1024) {
        let message = format!("{} tokens have ids up to {largest}", vocabulary.len());
        return Err(TokenizerError::Vocabulary { message });
    }
    if vocabulary.is_empty() {
        return Err(TokenizerError::Vocabulary { message: "there are no tokens".to_owned() });
    }
    let mut tokens = vec![None; largest + 1];
    let mut special = vec![false; largest + 1];
    let added = tokenizer.get_added_vocabulary();
    for (token, id) in vocabulary {
        let id = id as usize;
        special[id] = added.is_special_token(&token);
        tokens[id] = Some(token.into_boxed_str());
    }
    Ok((tokens, special))
}

/// How the file's decoder turns tokens into text, reduced to a table where it can be.
fn pieces(
    tokenizer: &tokenizers::Tokenizer,
    decoder: Option<&serde_json::Value>,
    tokens: Vec<Option<Box<str>>>,
    special: Vec<bool>,
) -> Result<Pieces> {
    let library = tokenizer.get_decoder().cloned();
    let Some(decoder) = decoder.filter(|decoder| !decoder.is_null()) else {
        return Ok(Pieces::with_neighbours(tokens, special, |tokens| tokens.join(" ")));
    };
    // Some added tokens are decoded from the form that they have after normalisation.
    let written: HashMap<usize, String> = tokenizer
        .get_added_vocabulary()
        .get_added_tokens_decoder()
        .keys()
        .filter_map(|id| Some((*id as usize, tokenizer.get_added_vocabulary().simple_id_to_token(*id)?)))
        .collect();
    let written = |id: usize, token: &str| written.get(&id).cloned().unwrap_or_else(|| token.to_owned());
    match Decoding::of(decoder)? {
        Decoding::ByteLevel => Ok(Pieces::from_bytes(tokens, special, TextStart::Kept, |id, token| {
            bytes::from_byte_level(&written(id, token))
        })),
        Decoding::Marked { marker, start } => Ok(Pieces::from_bytes(tokens, special, start, |id, token| {
            written(id, token).replace(marker, " ").into_bytes()
        })),
        Decoding::Steps { replacements, byte_tokens, start } => {
            Ok(Pieces::from_bytes(tokens, special, start, |id, token| {
                let mut text = written(id, token);
                for (from, to) in &replacements {
                    text = text.replace(from.as_str(), to);
                }
                match bytes::from_byte_token(&text).filter(|_| byte_tokens) {
                    Some(byte) => vec![byte],
                    None => text.into_bytes(),
                }
            }))
        }
        Decoding::Neighbours => match library {
            Some(decoder) => {
                Ok(Pieces::with_neighbours(tokens, special, move |tokens| library_text(&decoder, tokens)))
            }
            None => Err(unsupported(decoder)),
        },
    }
}

fn library_text(decoder: &DecoderWrapper, tokens: Vec<String>) -> String {
    guarded(|| decoder.decode(tokens)).unwrap_or_default()
}

/// What a decoder does, as far as a token's text is concerned.
enum Decoding {
    /// Tokens are bytes in the byte-level alphabet.
    ByteLevel,
    /// A marker stands for a space.
    Marked { marker: char, start: TextStart },
    /// Replacements in each token, then byte tokens, then spaces off the start of the text.
    Steps { replacements: Vec<(String, String)>, byte_tokens: bool, start: TextStart },
    /// The text of a token depends on whether, and which, tokens stand beside it.
    Neighbours,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Step {
    ByteLevel,
    ByteFallback,
    Fuse,
    WordPiece,
    #[serde(rename = "BPEDecoder")]
    Suffix,
    Metaspace {
        replacement: char,
        #[serde(default)]
        prepend_scheme: Option<String>,
        #[serde(default)]
        add_prefix_space: Option<bool>,
    },
    Replace {
        pattern: Pattern,
        content: String,
    },
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    Sequence {
        decoders: Vec<Self>,
    },
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
}

impl Decoding {
    fn of(decoder: &serde_json::Value) -> Result<Self> {
        let step: Step = serde_json::from_value(decoder.clone()).map_err(|_| unsupported(decoder))?;
        let steps = match step {
            Step::Sequence { decoders } => decoders,
            step => vec![step],
        };
        match steps.as_slice() {
            [Step::ByteLevel] => return Ok(Self::ByteLevel),
            [Step::WordPiece | Step::Suffix] => return Ok(Self::Neighbours),
            [Step::Metaspace { replacement, prepend_scheme, add_prefix_space }] => {
                let never = prepend_scheme.as_deref() == Some("never") || *add_prefix_space == Some(false);
                let start = if never { TextStart::Kept } else { TextStart::WithoutMarker(*replacement) };
                return Ok(Self::Marked { marker: *replacement, start });
            }
            _ => {}
        }
        let (mut replacements, mut byte_tokens, mut fused, mut start) =
            (vec![], false, false, TextStart::Kept);
        for step in steps {
            match step {
                Step::Replace { pattern: Pattern::String(from), content } if !fused && !byte_tokens => {
                    replacements.push((from, content));
                }
                Step::ByteFallback if !fused => byte_tokens = true,
                Step::Fuse => fused = true,
                Step::Strip { content: ' ', start: spaces, stop: 0 } if fused && start == TextStart::Kept => {
                    start = TextStart::WithoutSpaces(spaces);
                }
                _ => return Err(unsupported(decoder)),
            }
        }
        Ok(Self::Steps { replacements, byte_tokens, start })
    }
}

fn unsupported(decoder: &serde_json::Value) -> TokenizerError {
    let mut shown = decoder.to_string();
    if shown.len() > 300 {
        shown.truncate((0..=300).rev().find(|end| shown.is_char_boundary(*end)).unwrap_or(0));
        shown.push_str("...");
    }
    TokenizerError::Json { file: FILE, message: format!("its decoder is not supported: {shown}") }
}

#[cfg(test)]
mod tests;
