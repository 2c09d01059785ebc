//! How a text is split into words before merging, for the names that GGUF files use.
//!
//! Merges never cross a word, so the split decides the tokens as much as the merges do. GGUF files do not carry the
//! regular expressions; they name them.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior};

use super::error::{Result, TokenizerError};

/// The split of GPT-2: contractions, then letters, digits or signs, each with one space before it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// One digit.
const DIGIT: &str = r"\p{N}";

/// The split of Llama 3: GPT-2's, with contractions in any case, groups of three digits, and line ends kept together.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Llama 3's with digits one by one.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Qwen 2's with combining marks counted as letters.
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The split of GPT-4o: words end where small letters are followed by a capital one, and contractions belong to their word.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The split of Kimi-K2: GPT-4o's, with Chinese characters apart from other letters.
const KIMI: &str = concat!(
    r"\p{Han}+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The split of Mistral's Tekken: GPT-4o's without contractions, and with digits one by one.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Qwen 2's with line ends apart from the signs before them.
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// The last split of DeepSeek-V3, after those of numbers and of Chinese and Japanese characters.
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Letters with a case, as DeepSeek's first tokenizer lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}",
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}ℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ",
    r"Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ",
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
);

/// Chinese, Japanese and Korean characters, as DeepSeek's first tokenizers list them.
const DEEPSEEK_CHARACTERS: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";

/// One way to split, with the names that stand for it.
struct Definition {
    names: &'static [&'static str],
    /// Applied one after the other, each to the pieces that the one before left.
    patterns: &'static [&'static str],
    /// A word that is a token is taken whole, even where the merges would not lead to it.
    whole_words: bool,
    /// Whether a sequence begins with the beginning-of-sequence token where the file does not say.
    adds_bos: bool,
}

const DEFINITIONS: &[Definition] = &[
    Definition {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "exaone4"],
        patterns: &[GPT2],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["smollm", "starcoder", "refact", "command-r"],
        patterns: &[DIGIT, GPT2],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA3],
        whole_words: true,
        adds_bos: true,
    },
    Definition {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        patterns: &[LLAMA3],
        whole_words: false,
        adds_bos: false,
    },
    Definition { names: &["gpt-4o", "llama4"], patterns: &[GPT4O], whole_words: false, adds_bos: false },
    // The tokenizer that the model was published with takes a word whole if it is a token.
    Definition { names: &["kimi-k2"], patterns: &[KIMI], whole_words: true, adds_bos: false },
    Definition { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, adds_bos: true },
    Definition { names: &["seed-coder"], patterns: &[SEED], whole_words: false, adds_bos: false },
    Definition {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2"],
        patterns: &[QWEN2],
        whole_words: false,
        adds_bos: false,
    },
    Definition { names: &["qwen35"], patterns: &[QWEN35], whole_words: false, adds_bos: false },
    Definition {
        names: &["falcon"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CHARACTERS, DIGIT],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
            r"\s+$",
            DEEPSEEK_CHARACTERS,
            DIGIT,
        ],
        whole_words: false,
        adds_bos: false,
    },
    Definition {
        names: &["deepseek-v3"],
        patterns: &[r"\p{N}{1,3}", "[一-龥\u{3040}-\u{30FF}]+", DEEPSEEK3],
        whole_words: false,
        adds_bos: false,
    },
];

/// The names of pre-tokenizers that GGUF vocabularies may use.
pub fn supported_names() -> impl Iterator<Item = &'static str> {
    DEFINITIONS.iter().flat_map(|definition| definition.names).copied()
}

/// Splits text into words and writes them in the byte-level alphabet.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Applied one after the other, each to the pieces that the one before left.
    pub(super) patterns: &'static [&'static str],
    splits: Vec<Split>,
    byte_level: ByteLevel,
    pub(super) whole_words: bool,
    pub(super) adds_bos: bool,
}

impl PreTokenizer {
    /// Finds a pre-tokenizer by its name in GGUF files.
    pub(super) fn by_name(name: &str) -> Result<Self> {
        let definition = DEFINITIONS.iter().find(|definition| definition.names.contains(&name));
        let Some(definition) = definition else {
            let supported = supported_names().collect::<Vec<_>>().join(", ");
            return Err(TokenizerError::UnknownPreTokenizer { name: name.to_owned(), supported });
        };
        let split = |pattern: &&str| {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        };
        let splits = definition.patterns.iter().map(split).collect::<std::result::Result<_, _>>();
        Ok(Self {
            patterns: definition.patterns,
            splits: splits.map_err(failure)?,
            byte_level: ByteLevel::new(false, false, false),
            whole_words: definition.whole_words,
            adds_bos: definition.adds_bos,
        })
    }

    /// The ids of `text`, with `model` merging each word.
    pub(super) fn encode(&self, text: &str, model: &impl tokenizers::Model) -> Result<Vec<u32>> {
        let mut words = PreTokenizedString::from(text);
        for split in &self.splits {
            split.pre_tokenize(&mut words).map_err(failure)?;
        }
        self.byte_level.pre_tokenize(&mut words).map_err(failure)?;
        words.tokenize(|word| model.tokenize(word.get())).map_err(failure)?;
        let encoding = words.into_encoding(None, 0, OffsetType::None).map_err(failure)?;
        Ok(encoding.get_ids().to_vec())
    }
}

fn failure(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Encode { message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokenizers::OffsetReferential;

    use super::*;

    #[rstest]
    #[case("gpt-2", "I'll pay  $1234\n\nNow", &["I", "'ll", " pay", " ", " $", "1234", "\n", "\n", "Now"])]
    #[case("smollm", "a 12\n", &["a", " ", "1", "2", "\n"])]
    #[case("llama-bpe", "I'LL 12345 x\n\n y", &["I", "'LL", " ", "123", "45", " x", "\n\n", " y"])]
    #[case("dbrx", "I'LL 12345", &["I", "'LL", " ", "123", "45"])]
    #[case("glm4", "I'LL 12345", &["I", "'LL", " ", "123", "45"])]
    #[case("exaone4", "I'll 12345", &["I", "'ll", " 12345"])]
    #[case("stablelm2", "I'LL 123", &["I", "'LL", " ", "1", "2", "3"])]
    #[case("tekken", "aBc I'll 12", &["a", "Bc", " I", "'ll", " ", "1", "2"])]
    #[case("seed-coder", "I'LL x!!\n\n1", &["I", "'LL", " x", "!!", "\n\n", "1"])]
    #[case("deepseek-v3", "12345 漢字かな x=1\n(foo)", &["123", "45", " ", "漢字かな", " x", "=", "1", "\n", "(foo", ")"])]
    // Its signs are those from the colon to the tilde, so Latin letters without marks are among them.
    #[case("deepseek-llm", "Das Öl 12!\n漢字 x", &["Das", " Ö", "l", " ", "1", "2", "!", "\n", "漢字", " x"])]
    #[case("gpt-4o", "aBc I'll 12345 (x)/\n", &["a", "Bc", " I'll", " ", "123", "45", " (", "x", ")/\n"])]
    #[case("kimi-k2", "aBc I'll 12345 (x)/\n", &["a", "Bc", " I'll", " ", "123", "45", " (", "x", ")/\n"])]
    #[case(
        "kimi-k2",
        "Kimi月之暗面 漢字かなABC你好'S  12\n\nx",
        &["Kimi", "月之暗面", " ", "漢字", "かな", "ABC", "你好", "'S", " ", " ", "12", "\n\n", "x"]
    )]
    #[case("qwen2", "a12(b)\n", &["a", "1", "2", "(b", ")\n"])]
    #[case("default", "a=12345", &["a", "=", "123", "45"])]
    fn splits(#[case] name: &str, #[case] text: &str, #[case] expected: &[&str]) {
        let mut words = PreTokenizedString::from(text);
        for split in &PreTokenizer::by_name(name).unwrap().splits {
            split.pre_tokenize(&mut words).unwrap();
        }
        let words: Vec<&str> = words
            .get_splits(OffsetReferential::Original, OffsetType::None)
            .iter()
            .map(|word| word.0)
            .collect();
        assert_eq!(words, expected);
    }

    #[test]
    fn every_name_builds_and_no_name_is_twice() {
        let mut names: Vec<&str> = supported_names().collect();
        for name in &names {
            PreTokenizer::by_name(name).unwrap();
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known() {
        let message = PreTokenizer::by_name("klingon").unwrap_err().to_string();
        assert!(message.contains("\"klingon\"") && message.contains("smollm, starcoder"), "{message}");
    }
}
