//! The tokenizer that a GGUF file carries in its metadata.

mod json;

use std::borrow::Cow;
use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Vocab};

use super::bytes;
use super::error::{Result, TokenizerError};
use super::pieces::{Pieces, TextStart};
use super::pre_tokenizer::PreTokenizer;
use super::score_merges::ScoreMerges;
use super::special::{Fragment, SpecialTokens};
use super::{EncodeOptions, StandIns, original};

/// A token that text turns into.
pub const TOKEN_TYPE_NORMAL: i32 = 1;
/// The token for what the vocabulary cannot represent.
pub const TOKEN_TYPE_UNKNOWN: i32 = 2;
/// A token with a meaning to the model and no text of its own, such as the end of a turn.
pub const TOKEN_TYPE_CONTROL: i32 = 3;
/// A token that is found in text before the text is split into words.
pub const TOKEN_TYPE_USER_DEFINED: i32 = 4;
/// A token that the model never learnt.
pub const TOKEN_TYPE_UNUSED: i32 = 5;
/// A token for one byte, `<0x0A>`.
pub const TOKEN_TYPE_BYTE: i32 = 6;

/// How SentencePiece vocabularies write a space.
const WORD_MARKER: char = '▁';

/// The vocabulary of a GGUF file: the metadata keys under `tokenizer.ggml`.
///
/// Lists that a file lacks are left empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `model`: `gpt2` for byte-level vocabularies with merges, `llama` for SentencePiece vocabularies with scores.
    pub model: String,
    /// `pre`: the name of the way to split words; `default` where it is missing.
    pub pre_tokenizer: Option<String>,
    /// `tokens`: the text of each token, by id.
    pub tokens: Vec<String>,
    /// `token_type`: one of the `TOKEN_TYPE` constants per token, or empty if all are normal.
    pub token_types: Vec<i32>,
    /// `scores`: one per token; only for `llama`.
    pub scores: Vec<f32>,
    /// `merges`: pairs `left right`, most important first; only for `gpt2`.
    pub merges: Vec<String>,
    /// `bos_token_id`: begins a sequence.
    pub bos: Option<u32>,
    /// `eos_token_id`: ends a sequence.
    pub eos: Option<u32>,
    /// `unknown_token_id`.
    pub unk: Option<u32>,
    /// `padding_token_id`.
    pub pad: Option<u32>,
    /// `add_bos_token`: whether a sequence begins with `bos`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`: whether a sequence ends with `eos`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`: whether a space is put before a text; only for `llama`.
    pub add_space_prefix: Option<bool>,
}

/// Encodes with the vocabulary of a GGUF file.
#[derive(Debug)]
pub(super) struct GgufEncoder {
    special: SpecialTokens,
    model: Model,
    prefix: Option<u32>,
    suffix: Option<u32>,
}

#[derive(Debug)]
enum Model {
    /// Byte-level words, merged by rank.
    RankedMerges { pre_tokenizer: PreTokenizer, merges: Box<BPE> },
    /// The whole text, merged by score.
    ScoreMerges { merges: ScoreMerges, space_prefix: bool },
}

impl GgufEncoder {
    pub(super) fn encode(
        &self,
        text: &str,
        options: EncodeOptions,
        stand_ins: &StandIns,
    ) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if options.add_special {
            ids.extend(self.prefix);
        }
        // A space belongs before a text, and before one that follows a special token.
        let mut at_start = true;
        for fragment in self.special.split(text, options.parse_special) {
            match (fragment, &self.model) {
                (Fragment::Token(id), _) => ids.push(id),
                (Fragment::Text(text), Model::RankedMerges { pre_tokenizer, merges }) => {
                    let text: Cow<'_, str> = match stand_ins {
                        [] => text.into(),
                        _ => text.chars().map(|character| original(character, stand_ins)).collect(),
                    };
                    ids.extend(pre_tokenizer.encode(&text, merges.as_ref())?);
                }
                (Fragment::Text(text), Model::ScoreMerges { merges, space_prefix }) => {
                    let mut marked = String::with_capacity(text.len() + WORD_MARKER.len_utf8());
                    if *space_prefix && at_start {
                        marked.push(WORD_MARKER);
                    }
                    let characters = text.chars().map(|character| match original(character, stand_ins) {
                        ' ' => WORD_MARKER,
                        character => character,
                    });
                    marked.extend(characters);
                    merges.encode(&marked, &mut ids)?;
                }
            }
            at_start = matches!(fragment, Fragment::Token(_));
        }
        if options.add_special {
            ids.extend(self.suffix);
        }
        Ok(ids)
    }
}

/// Checks the vocabulary and builds its two directions.
pub(super) fn load(vocabulary: GgufVocabulary) -> Result<(GgufEncoder, Pieces)> {
    check(&vocabulary)?;
    let kind = |id: usize| vocabulary.token_types.get(id).copied().unwrap_or(TOKEN_TYPE_NORMAL);
    let of_kind = |kinds: &[i32]| -> Vec<(u32, &str)> {
        (0u32..)
            .zip(&vocabulary.tokens)
            .filter(|(id, _)| kinds.contains(&kind(*id as usize)))
            .map(|(id, token)| (id, token.as_str()))
            .collect()
    };
    let special = SpecialTokens::new(
        &of_kind(&[TOKEN_TYPE_CONTROL, TOKEN_TYPE_UNKNOWN]),
        &of_kind(&[TOKEN_TYPE_USER_DEFINED]),
    )?;
    // Control tokens are no part of these: text must not merge into one by accident.
    let mergeable =
        of_kind(&[TOKEN_TYPE_NORMAL, TOKEN_TYPE_USER_DEFINED, TOKEN_TYPE_UNUSED, TOKEN_TYPE_BYTE]);

    let (model, adds_bos, start) = match vocabulary.model.as_str() {
        "gpt2" => {
            let name = vocabulary.pre_tokenizer.as_deref().unwrap_or("default");
            let pre_tokenizer = PreTokenizer::by_name(name)?;
            let adds_bos = pre_tokenizer.adds_bos;
            let long = |token: &&(u32, &str)| token.1.chars().nth(1).is_some();
            let normal = of_kind(&[TOKEN_TYPE_NORMAL]);
            if let (true, Some((_, token))) = (vocabulary.merges.is_empty(), normal.iter().find(long)) {
                let message = format!(
                    "tokenizer.ggml.merges is missing or empty, but there are longer tokens: {token:?}"
                );
                return Err(TokenizerError::Vocabulary { message });
            }
            let merges = ranked_merges(&mergeable, &vocabulary.merges, pre_tokenizer.whole_words)?;
            (Model::RankedMerges { pre_tokenizer, merges: Box::new(merges) }, adds_bos, TextStart::Kept)
        }
        "llama" => {
            let space_prefix = vocabulary.add_space_prefix.unwrap_or(true);
            let merges = score_merges(&vocabulary, &mergeable, kind);
            let start = if space_prefix { TextStart::WithoutSpaces(1) } else { TextStart::Kept };
            (Model::ScoreMerges { merges, space_prefix }, true, start)
        }
        other => return Err(TokenizerError::UnknownModel { model: other.to_owned() }),
    };

    let prefix = added(vocabulary.add_bos, adds_bos, vocabulary.bos, "add_bos_token", "bos_token_id")?;
    let suffix = added(vocabulary.add_eos, false, vocabulary.eos, "add_eos_token", "eos_token_id")?;
    let byte_level = matches!(model, Model::RankedMerges { .. });
    let encoder = GgufEncoder { special, model, prefix, suffix };

    let special = (0..vocabulary.tokens.len())
        .map(|id| matches!(kind(id), TOKEN_TYPE_CONTROL | TOKEN_TYPE_UNKNOWN))
        .collect();
    let tokens = vocabulary.tokens.iter().map(|token| Some(token.as_str().into())).collect();
    let pieces = Pieces::from_bytes(tokens, special, start, |id, token| match kind(id) {
        TOKEN_TYPE_CONTROL | TOKEN_TYPE_UNKNOWN => token.as_bytes().to_vec(),
        TOKEN_TYPE_BYTE => {
            bytes::from_byte_token(token).map_or_else(|| token.as_bytes().to_vec(), |byte| vec![byte])
        }
        TOKEN_TYPE_USER_DEFINED if byte_level => token.as_bytes().to_vec(),
        _ if byte_level => bytes::from_byte_level(token),
        _ => token.replace(WORD_MARKER, " ").into_bytes(),
    });
    Ok((encoder, pieces))
}

fn check(vocabulary: &GgufVocabulary) -> Result<()> {
    let size = vocabulary.tokens.len();
    if size == 0 {
        return Err(TokenizerError::Vocabulary { message: "tokenizer.ggml.tokens is empty".to_owned() });
    }
    if u32::try_from(size).is_err() {
        return Err(TokenizerError::Vocabulary { message: format!("{size} tokens are too many") });
    }
    let types = vocabulary.token_types.len();
    if types != 0 && types != size {
        return Err(TokenizerError::Length {
            field: "tokenizer.ggml.token_type",
            found: types,
            expected: size,
        });
    }
    if vocabulary.model == "llama" && vocabulary.scores.len() != size {
        return Err(TokenizerError::Length {
            field: "tokenizer.ggml.scores",
            found: vocabulary.scores.len(),
            expected: size,
        });
    }
    for (field, id) in [
        ("tokenizer.ggml.bos_token_id", vocabulary.bos),
        ("tokenizer.ggml.eos_token_id", vocabulary.eos),
        ("tokenizer.ggml.unknown_token_id", vocabulary.unk),
        ("tokenizer.ggml.padding_token_id", vocabulary.pad),
    ] {
        if let Some(id) = id.filter(|id| *id as usize >= size) {
            return Err(TokenizerError::SpecialOutOfRange { field, id, size });
        }
    }
    Ok(())
}

/// The token to add, if it is to be added: asked for by the file, or else by default and known.
fn added(
    asked: Option<bool>,
    default: bool,
    id: Option<u32>,
    flag: &'static str,
    field: &'static str,
) -> Result<Option<u32>> {
    match (asked, id) {
        (Some(true), None) => Err(TokenizerError::MissingSpecial { flag, field }),
        (asked, id) => Ok(id.filter(|_| asked.unwrap_or(default))),
    }
}

fn ranked_merges(tokens: &[(u32, &str)], merges: &[String], whole_words: bool) -> Result<BPE> {
    let pairs = merges.iter().enumerate().map(|(index, merge)| {
        let pair = pair_of(merge).map(|(left, right)| (left.to_owned(), right.to_owned()));
        pair.ok_or_else(|| {
            let problem = "is not two tokens with a space between".to_owned();
            TokenizerError::Merge { index, merge: merge.clone(), problem }
        })
    });
    let pairs = pairs.collect::<Result<_>>()?;
    let vocabulary: Vocab = tokens.iter().map(|(id, token)| ((*token).to_owned(), *id)).collect();
    // The library copies the merged text into a buffer that fits known tokens, so each merge must make one.
    if let Some(error) = unknown_token(&vocabulary, merges) {
        return Err(error);
    }
    BPE::builder()
        .vocab_and_merges(vocabulary, pairs)
        .ignore_merges(whole_words)
        .build()
        .map_err(|error| TokenizerError::Vocabulary { message: error.to_string() })
}

/// The two tokens of a merge. A space inside a token is written otherwise, so there is exactly one.
fn pair_of(merge: &str) -> Option<(&str, &str)> {
    merge
        .split_once(' ')
        .filter(|(left, right)| !left.is_empty() && !right.is_empty() && !right.contains(' '))
}

/// The error for the first merge that has, or makes, a token that is not in the vocabulary.
fn unknown_token(vocabulary: &Vocab, merges: &[String]) -> Option<TokenizerError> {
    merges.iter().enumerate().find_map(|(index, merge)| {
        let (left, right) = pair_of(merge)?;
        let joined = [left, right].concat();
        let missing = [left, right, &joined].into_iter().find(|token| !vocabulary.contains_key(*token))?;
        let problem = format!("needs token {missing:?}, which the vocabulary does not have");
        Some(TokenizerError::Merge { index, merge: merge.clone(), problem })
    })
}

fn score_merges(
    vocabulary: &GgufVocabulary,
    mergeable: &[(u32, &str)],
    kind: impl Fn(usize) -> i32,
) -> ScoreMerges {
    let (bytes, words): (Vec<_>, Vec<_>) =
        mergeable.iter().copied().partition(|(id, _)| kind(*id as usize) == TOKEN_TYPE_BYTE);
    let bytes: HashMap<&str, u32> = bytes.into_iter().map(|(id, token)| (token, id)).collect();
    let words = words
        .into_iter()
        .map(|(id, token)| {
            (token.into(), (id, vocabulary.scores.get(id as usize).copied().unwrap_or_default()))
        })
        .collect();
    ScoreMerges::new(words, |token| bytes.get(token).copied(), vocabulary.unk)
}

#[cfg(test)]
mod tests;
