//! Text to token ids and back.
//!
//! A [`Tokenizer`] is made from a `tokenizer.json` file or from the vocabulary that a GGUF file carries
//! ([`GgufVocabulary`]). Encoding runs in three steps: special tokens are cut out of the text, the rest is split into
//! words by the model's pre-tokenizer, and each word is merged into tokens. Decoding looks up the bytes of each token;
//! [`StreamDecoder`] does the same one token at a time.
//!
//! A tokenizer is immutable and cheap to clone, so every request may own one.

mod bytes;
mod config;
mod control;
mod error;
mod gguf;
mod growth;
mod json;
mod pieces;
mod pre_tokenizer;
mod score_merges;
mod special;
mod stream;

#[cfg(test)]
pub(crate) mod test_vocabulary;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

pub use config::{NamedTemplate, TokenizerConfig};
pub(crate) use control::ControlTokens;
pub use error::{Result, TokenizerError};
pub use gguf::{GgufVocabulary, TOKEN_TYPE_BYTE, TOKEN_TYPE_CONTROL, TOKEN_TYPE_NORMAL, TOKEN_TYPE_UNKNOWN};
pub use gguf::{TOKEN_TYPE_UNUSED, TOKEN_TYPE_USER_DEFINED};
pub use pre_tokenizer::supported_names as supported_pre_tokenizers;
pub use stream::{StreamDecoder, StreamOptions};

use gguf::GgufEncoder;
use json::JsonEncoder;
use pieces::{Pieces, Rule};

/// What [`Tokenizer::encode`] does besides splitting text.
///
/// The default does neither: the text is taken as plain words, which is what untrusted text needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Adds what the model expects around a text, most often the beginning-of-sequence token. Leave it off for the
    /// output of a chat template, which writes those tokens itself.
    pub add_special: bool,
    /// Reads control tokens such as `<|im_start|>` written in the text as tokens. Where it is off they are ordinary
    /// characters, so that text from outside cannot forge a turn of a conversation.
    pub parse_special: bool,
}

/// Turns text into token ids and token ids into text, for one vocabulary.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<Inner>,
    bos: Option<u32>,
    eos: Option<u32>,
}

#[derive(Debug)]
struct Inner {
    encoder: Encoder,
    pieces: Pieces,
    ids: HashMap<String, u32>,
    control: ControlTokens,
}

/// Bytes for each token that may be, of the beginning that [`Tokenizer::encode_within`] tries first.
const PROBED_BYTES_PER_TOKEN: usize = 8;
/// The fewest bytes of that beginning.
const LEAST_PROBED_BYTES: usize = 16 << 10;
/// Tokens that cutting a text may add.
const CUT_TOKENS: usize = 64;

/// Characters of a text that stand for others: the first of each pair for the second. What they stand for is put back when
/// control tokens have been found.
pub(crate) type StandIns = [(char, char)];

#[derive(Debug)]
enum Encoder {
    Json(Box<JsonEncoder>),
    Gguf(Box<GgufEncoder>),
}

impl Tokenizer {
    /// Reads a `tokenizer.json` file.
    ///
    /// Such a file does not say which tokens begin and end a sequence; give them with [`Self::with_bos_eos`].
    ///
    /// # Errors
    /// When the file cannot be read, and as [`Self::from_json_bytes`].
    pub fn from_json_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
        Self::from_json_bytes(&bytes)
    }

    /// Reads the content of a `tokenizer.json` file.
    ///
    /// # Errors
    /// When the content is not a tokenizer, contradicts itself (a merge of unknown tokens, ids far apart), or uses a
    /// decoder that cannot be streamed.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self> {
        let (encoder, pieces) = json::load(bytes)?;
        Self::assemble(Encoder::Json(Box::new(encoder)), pieces, None, None)
    }

    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// When the model kind or the pre-tokenizer is not supported, or when the vocabulary contradicts itself: arrays of
    /// different lengths, ids out of range, merges of unknown tokens.
    pub fn from_gguf(vocabulary: GgufVocabulary) -> Result<Self> {
        let (bos, eos) = (vocabulary.bos, vocabulary.eos);
        let (encoder, pieces) = gguf::load(vocabulary)?;
        Self::assemble(Encoder::Gguf(Box::new(encoder)), pieces, bos, eos)
    }

    fn assemble(encoder: Encoder, pieces: Pieces, bos: Option<u32>, eos: Option<u32>) -> Result<Self> {
        let ids = pieces.ids_by_text();
        let special = (0..pieces.len() as u32).filter(|id| pieces.is_special(*id));
        let control = ControlTokens::new(special.filter_map(|id| pieces.token(id)))?;
        Ok(Self { inner: Arc::new(Inner { encoder, pieces, ids, control }), bos, eos })
    }

    /// The same tokenizer with the tokens that begin and end a sequence set, as `tokenizer_config.json` names them.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    pub fn with_bos_eos(mut self, bos: Option<u32>, eos: Option<u32>) -> Result<Self> {
        for id in [bos, eos].into_iter().flatten() {
            self.inner.pieces.check(id)?;
        }
        (self.bos, self.eos) = (bos, eos);
        Ok(self)
    }

    /// The token ids of `text`.
    ///
    /// A byte-level vocabulary may lack a token for some byte values; such bytes are left out, as the reference
    /// tokenizers do.
    ///
    /// # Errors
    /// When the text has a character for which the vocabulary has neither a token, nor byte tokens, nor an unknown
    /// token.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>> {
        self.encode_with(text, options, &[])
    }

    /// The token ids of two texts that are read as the parts of one, as cross-encoders do, and the index of the first token of the
    /// second part, if the tokenizer tells the parts apart.
    ///
    /// # Errors
    /// As [`Self::encode`], and if the vocabulary is that of a GGUF file, which does not say how parts are joined.
    pub fn encode_pair(&self, texts: [&str; 2], options: EncodeOptions) -> Result<(Vec<u32>, Option<usize>)> {
        match &self.inner.encoder {
            Encoder::Json(encoder) => encoder.encode_pair(texts, options),
            Encoder::Gguf(_) => Err(TokenizerError::Encode {
                message: "a GGUF file does not say how two texts are joined; use tokenizer.json".to_owned(),
            }),
        }
    }

    /// As [`Self::encode`], of a text some of whose characters stand for others.
    pub(crate) fn encode_with(
        &self,
        text: &str,
        options: EncodeOptions,
        stand_ins: &StandIns,
    ) -> Result<Vec<u32>> {
        match &self.inner.encoder {
            Encoder::Json(encoder) => encoder.encode(text, options, stand_ins),
            Encoder::Gguf(encoder) => encoder.encode(text, options, stand_ins),
        }
    }

    /// As [`Self::encode`], but gives up on a text that certainly has more than `most` tokens, before all of it is encoded. Returns
    /// `None` then; a text that is only slightly longer is encoded as a whole.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_within(&self, text: &str, options: EncodeOptions, most: usize) -> Result<Option<Vec<u32>>> {
        self.encode_within_with(text, options, &[], most)
    }

    /// As [`Self::encode_within`], of a text some of whose characters stand for others.
    pub(crate) fn encode_within_with(
        &self,
        text: &str,
        options: EncodeOptions,
        stand_ins: &StandIns,
        most: usize,
    ) -> Result<Option<Vec<u32>>> {
        // Few texts have more bytes per token than this, so the beginning of most is not encoded twice.
        let mut end = most.saturating_mul(PROBED_BYTES_PER_TOKEN).max(LEAST_PROBED_BYTES);
        while end < text.len() {
            let beginning = &text[..text.floor_char_boundary(end)];
            // Where the text is cut, a few tokens may be more than without the cut.
            if self.encode_with(beginning, options, stand_ins)?.len() > most.saturating_add(CUT_TOKENS) {
                return Ok(None);
            }
            end = end.saturating_mul(4);
        }
        self.encode_with(text, options, stand_ins).map(Some)
    }

    /// The texts of the control tokens.
    pub(crate) fn control_tokens(&self) -> &ControlTokens {
        &self.inner.control
    }

    /// The text of `ids`, read as a whole text. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// With `skip_special`, control tokens give no text.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        for &id in ids {
            self.inner.pieces.check(id)?;
        }
        let mut stream = StreamDecoder::new(self, StreamOptions { skip_special, continues_text: false });
        let mut text = String::new();
        for &id in ids {
            stream.push_to(id, &mut text);
        }
        stream.finish_to(&mut text);
        Ok(text)
    }

    /// One more than the largest token id. The model's output may have more rows than that, for padding.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// The token that begins a sequence, where the vocabulary has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a sequence, where the vocabulary has one. `generation_config.json` may name more.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The id of the token with exactly this text in the vocabulary (`Ġthe`, `▁the`, `<|im_end|>`).
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.ids.get(token).copied()
    }

    /// The text of a token as the vocabulary writes it; not what it decodes to.
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        self.inner.pieces.token(id)
    }

    /// The bytes that a token adds to a text; none for an id that no token has. They may be part of a character.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.pieces().rule() {
            Rule::Bytes { bytes, ends, .. } => Rule::bytes_of(bytes, ends, id).as_ref().to_vec(),
            // Within a text: with a token before it.
            Rule::Neighbours(_) => {
                let continues = StreamOptions { skip_special: false, continues_text: true };
                StreamDecoder::new(self, continues).push(id).unwrap_or_default().into_bytes()
            }
        }
    }

    /// Whether the token is a control token, which [`Self::decode`] can skip.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    fn pieces(&self) -> &Pieces {
        &self.inner.pieces
    }
}

/// What a character stands for: mostly itself.
fn original(character: char, stand_ins: &StandIns) -> char {
    stand_ins.iter().find(|(stand_in, _)| *stand_in == character).map_or(character, |pair| pair.1)
}
