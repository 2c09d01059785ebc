//! `generation_config.json`: how a model wants to be sampled, where the user does not say.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The settings of a `generation_config.json` file. What a file does not say is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Divides the logits before sampling. Above 0; greedy decoding is [`Self::greedy`].
    pub temperature: Option<f32>,
    /// Only so many of the most likely tokens are sampled from; `None` for all.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that have together this probability, in (0, 1].
    pub top_p: Option<f32>,
    /// Only tokens at least this fraction as likely as the most likely one, in [0, 1].
    pub min_p: Option<f32>,
    /// Divides the logits of tokens that appeared before (multiplies negative ones). Above 0; 1 does nothing.
    pub repetition_penalty: Option<f32>,
    /// How many tokens to generate at most.
    pub max_new_tokens: Option<usize>,
    /// How many tokens prompt and answer may have together.
    pub max_length: Option<usize>,
    /// The tokens that end a text.
    pub eos: Vec<u32>,
    /// The token that begins a sequence.
    pub bos: Option<u32>,
    /// The token that fills a batch.
    pub pad: Option<u32>,
    /// Strings that end a text.
    pub stop_strings: Vec<String>,
    /// The file says `do_sample: false`: the most likely token is always taken, whatever the fields above say.
    pub greedy: bool,
    /// Fields that are not used, with their values as JSON, for people to see.
    pub unused: Vec<(String, String)>,
}

/// Why a `generation_config.json` file cannot be followed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum GenerationError {
    /// It is not a JSON object.
    #[error("generation_config.json is not valid: {message}")]
    Json {
        /// What is wrong and where.
        message: String,
    },
    /// A field has a value that it cannot have.
    #[error("generation_config.json: {field} is {value}, but must be {expected}")]
    Value {
        /// The field.
        field: String,
        /// Its value as JSON.
        value: String,
        /// What it has to be.
        expected: &'static str,
    },
    /// A field asks for something that would change the result and is not supported.
    #[error(
        "generation_config.json: {field} = {value} is not supported; remove it to generate without it ({neutral} has no effect)"
    )]
    Unsupported {
        /// The field.
        field: String,
        /// Its value as JSON.
        value: String,
        /// The value that leaves the result as it is.
        neutral: &'static str,
    },
}

/// Fields that change the result and are not supported, with the values that change nothing. `null` never does.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("num_beams", "1"),
    ("num_beam_groups", "1"),
    ("num_return_sequences", "1"),
    ("penalty_alpha", "0"),
    ("typical_p", "1"),
    ("epsilon_cutoff", "0"),
    ("eta_cutoff", "0"),
    ("top_h", "null"),
    ("encoder_repetition_penalty", "1"),
    ("no_repeat_ngram_size", "0"),
    ("encoder_no_repeat_ngram_size", "0"),
    ("bad_words_ids", "[]"),
    ("force_words_ids", "[]"),
    ("constraints", "[]"),
    ("forced_bos_token_id", "null"),
    ("forced_eos_token_id", "null"),
    ("forced_decoder_ids", "[]"),
    ("suppress_tokens", "[]"),
    ("begin_suppress_tokens", "[]"),
    ("sequence_bias", "{}"),
    ("exponential_decay_length_penalty", "null"),
    ("guidance_scale", "1"),
    ("watermarking_config", "null"),
    ("token_healing", "false"),
    ("dola_layers", "null"),
    ("min_length", "0"),
    ("min_new_tokens", "0"),
    ("max_time", "null"),
];

const PROBABILITY: &str = "a number above 0 and at most 1";
const FRACTION: &str = "a number from 0 to 1";
const POSITIVE: &str = "a number above 0";
const COUNT: &str = "a whole number, 0 or more";
const TOKEN: &str = "a token id";
const TEXTS: &str = "a text that is not empty, or a list of them";
const TOKENS: &str = "a token id or a list of them";

impl GenerationDefaults {
    /// Reads the content of a `generation_config.json` file.
    ///
    /// # Errors
    /// When it is not a JSON object, a field has a value out of its range, or a field asks for something that is not
    /// supported and would change the result, such as `num_beams` above 1.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self, GenerationError> {
        let fields: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| GenerationError::Json { message: error.to_string() })?;
        let mut defaults = Self::default();
        for (field, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            defaults.take(field, value)?;
        }
        if defaults.temperature == Some(0.0) {
            // Some files say greedy in this way.
            (defaults.temperature, defaults.greedy) = (None, true);
        }
        Ok(defaults)
    }

    fn take(&mut self, field: &str, value: &Value) -> Result<(), GenerationError> {
        match field {
            "temperature" => {
                self.temperature = number(field, value, "a number, 0 or more", |value| value >= 0.0)?;
            }
            "top_p" => self.top_p = number(field, value, PROBABILITY, |value| value > 0.0 && value <= 1.0)?,
            "min_p" => self.min_p = number(field, value, FRACTION, |value| (0.0..=1.0).contains(&value))?,
            "repetition_penalty" => {
                self.repetition_penalty = number(field, value, POSITIVE, |value| value > 0.0)?;
            }
            // 0 switches the filter off.
            "top_k" => self.top_k = Some(parsed(field, value, COUNT)?).filter(|count| *count > 0),
            "max_new_tokens" => self.max_new_tokens = Some(parsed(field, value, COUNT)?),
            "max_length" => self.max_length = Some(parsed(field, value, COUNT)?),
            "bos_token_id" => self.bos = Some(parsed(field, value, TOKEN)?),
            "pad_token_id" => self.pad = Some(parsed(field, value, TOKEN)?),
            "eos_token_id" if value.is_array() => self.eos = parsed(field, value, TOKENS)?,
            "eos_token_id" => self.eos = vec![parsed(field, value, TOKENS)?],
            "stop_strings" => {
                self.stop_strings = match value.is_array() {
                    true => parsed(field, value, TEXTS)?,
                    false => vec![parsed(field, value, TEXTS)?],
                };
                if self.stop_strings.iter().any(String::is_empty) {
                    return Err(wrong(field, value, TEXTS));
                }
            }
            "do_sample" => self.greedy = !parsed::<bool>(field, value, "true or false")?,
            _ => match UNSUPPORTED.iter().find(|(name, _)| *name == field) {
                Some((_, neutral)) if !is_neutral(value, neutral) => {
                    return Err(GenerationError::Unsupported {
                        field: field.to_owned(),
                        value: shortened(value),
                        neutral,
                    });
                }
                _ => self.unused.push((field.to_owned(), shortened(value))),
            },
        }
        Ok(())
    }
}

fn is_neutral(value: &Value, neutral: &str) -> bool {
    match (value.as_f64(), neutral.parse::<f64>()) {
        // 1 and 1.0 are the same number, but not the same JSON.
        (Some(value), Ok(neutral)) => value == neutral,
        _ => serde_json::from_str::<Value>(neutral).is_ok_and(|neutral| *value == neutral),
    }
}

fn number(
    field: &str,
    value: &Value,
    expected: &'static str,
    in_range: impl Fn(f32) -> bool,
) -> Result<Option<f32>, GenerationError> {
    match value.as_f64().map(|value| value as f32).filter(|value| value.is_finite() && in_range(*value)) {
        Some(value) => Ok(Some(value)),
        None => Err(wrong(field, value, expected)),
    }
}

fn parsed<T: DeserializeOwned>(
    field: &str,
    value: &Value,
    expected: &'static str,
) -> Result<T, GenerationError> {
    T::deserialize(value).map_err(|_| wrong(field, value, expected))
}

fn wrong(field: &str, value: &Value, expected: &'static str) -> GenerationError {
    GenerationError::Value { field: field.to_owned(), value: shortened(value), expected }
}

/// A value as JSON, cut to a length that fits on a line.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(content: &str) -> Result<GenerationDefaults, GenerationError> {
        GenerationDefaults::from_json_bytes(content.as_bytes())
    }

    #[test]
    fn reads_what_it_knows_and_keeps_the_rest() {
        let defaults = read(
            r#"{"bos_token_id": 1, "pad_token_id": 0, "do_sample": true, "eos_token_id": [2, 7], "temperature": 0.6,
                "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 64,
                "max_length": 8192, "transformers_version": "4.51.0", "use_cache": true, "num_beams": 1,
                "stop_strings": "END"}"#,
        )
        .unwrap();
        let expected = GenerationDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.0),
            repetition_penalty: Some(1.05),
            max_new_tokens: Some(64),
            max_length: Some(8192),
            eos: vec![2, 7],
            bos: Some(1),
            pad: Some(0),
            stop_strings: vec!["END".to_owned()],
            greedy: false,
            unused: [("transformers_version", "\"4.51.0\""), ("use_cache", "true"), ("num_beams", "1")]
                .map(|(field, value)| (field.to_owned(), value.to_owned()))
                .to_vec(),
        };
        assert_eq!(defaults, expected);
    }

    #[rstest]
    #[case(r#"{"do_sample": false, "temperature": 0.7}"#, true, Some(0.7))]
    #[case(r#"{"temperature": 0}"#, true, None)]
    #[case(r#"{"temperature": 1.0}"#, false, Some(1.0))]
    #[case("{}", false, None)]
    fn greedy_in_both_ways(#[case] content: &str, #[case] greedy: bool, #[case] temperature: Option<f32>) {
        let defaults = read(content).unwrap();
        assert_eq!((defaults.greedy, defaults.temperature), (greedy, temperature));
    }

    #[test]
    fn one_end_token_and_nulls() {
        let defaults =
            read(r#"{"eos_token_id": 5, "pad_token_id": null, "top_k": 0, "suppress_tokens": null}"#)
                .unwrap();
        assert_eq!((defaults.eos, defaults.pad, defaults.top_k), (vec![5], None, None));
        assert_eq!(defaults.unused, []);
    }

    #[rstest]
    #[case("num_beams", "4", "1")]
    #[case("penalty_alpha", "0.6", "0")]
    #[case("no_repeat_ngram_size", "3", "0")]
    #[case("suppress_tokens", "[1, 2]", "[]")]
    #[case("guidance_scale", "1.5", "1")]
    #[case("forced_eos_token_id", "2", "null")]
    fn what_would_change_the_result_is_refused(
        #[case] field: &str,
        #[case] value: &str,
        #[case] neutral: &str,
    ) {
        let message = read(&format!(r#"{{"{field}": {value}}}"#)).unwrap_err().to_string();
        assert!(message.contains(field) && message.contains("not supported"), "{message}");
        assert!(read(&format!(r#"{{"{field}": {neutral}}}"#)).is_ok());
    }

    #[rstest]
    #[case(r#"{"typical_p": 1.0}"#)]
    #[case(r#"{"length_penalty": 2.0}"#)]
    #[case(r#"{"epsilon_cutoff": 0.0}"#)]
    fn what_changes_nothing_is_accepted(#[case] content: &str) {
        assert_eq!(read(content).unwrap().unused.len(), 1);
    }

    #[rstest]
    #[case(r#"{"temperature": -1}"#, "temperature is -1")]
    #[case(r#"{"temperature": 1e300}"#, "temperature is")]
    #[case(r#"{"top_p": 0}"#, "top_p is 0")]
    #[case(r#"{"top_k": -1}"#, "top_k is -1")]
    #[case(r#"{"eos_token_id": [1, "x"]}"#, "eos_token_id is")]
    #[case(r#"{"bos_token_id": 4294967296}"#, "bos_token_id is 4294967296")]
    #[case(r#"{"do_sample": 1}"#, "do_sample is 1")]
    #[case("[]", "not valid")]
    #[case("", "not valid")]
    fn wrong_values_name_the_field(#[case] content: &str, #[case] expected: &str) {
        let message = read(content).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
