//! How a model embeds texts, as sentence-transformers says it beside the weights: which modules follow the model, and how its hidden
//! states are pooled. GGUF files say the latter in their metadata.
//!
//! `modules.json` lists the model itself, a module that pools, and perhaps one that scales vectors to length 1. A list with another
//! module, such as a further linear layer, is refused: the vectors would not be those of the model.

use crate::{
    config::{
        ConfigError,
        fields::{Fields, shortened},
        gguf::{self, whole_key},
    },
    gguf::GgufFile,
};
use serde_json::{Map, Value};

/// The file that lists the modules.
pub(crate) const MODULES: &str = "modules.json";
/// The configuration of the module that pools, where the library puts it.
pub(crate) const POOLING: &str = "1_Pooling/config.json";
/// The same in our cache, which has no folders inside that of a model.
pub(crate) const CACHED_POOLING: &str = "1_Pooling.config.json";

/// The hidden states that make the vector of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextPooling {
    /// The mean over all tokens.
    #[default]
    Mean,
    /// The first token.
    First,
    /// The last token.
    Last,
}

/// How a model embeds texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextEmbedding {
    /// The hidden states that make the vector.
    pub pooling: TextPooling,
    /// Whether vectors are scaled to length 1.
    pub normalize: bool,
}

impl TextEmbedding {
    /// Reads the pooling of a GGUF file, if it has one. Vectors are scaled to length 1, as llama.cpp scales them.
    ///
    /// # Errors
    /// If the pooling is not supported.
    pub(crate) fn from_gguf(file: &GgufFile) -> Result<Option<Self>, ConfigError> {
        let Some(architecture) = whole_key::<&str>(file, "general.architecture")? else { return Ok(None) };
        let key = format!("{architecture}.{}", gguf::POOLING);
        let pooling = match whole_key::<u32>(file, &key)? {
            None | Some(0) => return Ok(None),
            Some(1) => TextPooling::Mean,
            Some(2) => TextPooling::First,
            Some(3) => TextPooling::Last,
            Some(other) => {
                let reason = "supported: 0 (none), 1 (mean), 2 (first token), 3 (last token)";
                return Err(ConfigError::unsupported(key, other, reason));
            }
        };
        Ok(Some(Self { pooling, normalize: true }))
    }
}

/// The shorter vectors that a model was trained for: the first elements of a text's vector are one, too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ShorterVectors {
    /// There are none.
    #[default]
    None,
    /// Those of every length.
    All,
    /// Those of these lengths.
    Of(Vec<usize>),
}

impl ShorterVectors {
    /// Reads the fields `matryoshka_dimensions` and `is_matryoshka` of a `config.json`.
    ///
    /// # Errors
    /// If a field has another type.
    pub(crate) fn from_config_json(bytes: &[u8]) -> Result<Self, ConfigError> {
        let object: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| ConfigError::Json { message: error.to_string() })?;
        let field = "matryoshka_dimensions";
        let wrong =
            |value: &Value| ConfigError::value(field, shortened(value), "a list of whole numbers above 0");
        if let Some(value) = object.get(field).filter(|value| !value.is_null()) {
            let length = |value: &Value| value.as_u64().and_then(|length| usize::try_from(length).ok());
            let lengths = value.as_array().map(|list| list.iter().map(length).collect::<Option<Vec<_>>>());
            let lengths = lengths.flatten().filter(|lengths| !lengths.contains(&0));
            return Ok(Self::Of(lengths.ok_or_else(|| wrong(value))?));
        }
        let all = Fields::new(&object).flag("is_matryoshka")?.unwrap_or(false);
        Ok(if all { Self::All } else { Self::None })
    }

    /// Whether there are vectors of this length.
    pub fn has(&self, length: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Of(lengths) => lengths.contains(&length),
        }
    }
}

/// The modules of a model.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Modules {
    /// The folder of the module that pools.
    pub(crate) pooling: String,
    normalize: bool,
}

impl Modules {
    /// Reads the content of `modules.json`.
    ///
    /// # Errors
    /// If the file is not a list of modules, has an unsupported module, or has no pooling module.
    pub(crate) fn from_json_bytes(bytes: &[u8]) -> Result<Self, ConfigError> {
        let list: Vec<Map<String, Value>> = serde_json::from_slice(bytes)
            .map_err(|error| ConfigError::Json { message: error.to_string() })?;
        let (mut pooling, mut normalize) = (None, false);
        for (index, object) in list.iter().enumerate() {
            let module = Fields::within(format!("[{index}]"), object);
            let missing = |field: &str| ConfigError::Missing { field: module.path(field) };
            let kind = module.text("type")?.ok_or_else(|| missing("type"))?;
            let path = module.text("path")?.ok_or_else(|| missing("path"))?;
            match (index, kind.rsplit('.').next().unwrap_or(kind)) {
                (0, "Transformer") => {}
                (1, "Pooling") => pooling = Some(path.to_owned()),
                (2, "Normalize") => normalize = true,
                _ => {
                    let reason =
                        "a model can be followed by a module Pooling, and that by one called Normalize";
                    return Err(ConfigError::unsupported(module.path("type"), kind, reason));
                }
            }
        }
        match pooling {
            Some(pooling) if is_plain(&pooling) => Ok(Self { pooling, normalize }),
            Some(pooling) => {
                Err(ConfigError::value("[1].path", shortened(&pooling.into()), "the name of a folder"))
            }
            None => Err(ConfigError::Missing { field: "[1] (a module Pooling)".into() }),
        }
    }

    /// Reads the configuration of the module that pools. `hidden` is the width of the hidden states.
    ///
    /// # Errors
    /// If a field is not understood, or asks for another way to pool.
    pub(crate) fn with_pooling(&self, bytes: &[u8], hidden: usize) -> Result<TextEmbedding, ConfigError> {
        let object: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| ConfigError::Json { message: error.to_string() })?;
        let fields = Fields::new(&object);
        for field in ["word_embedding_dimension", "embedding_dimension"] {
            match fields.size(field, 1, usize::MAX)? {
                Some(width) if width != hidden => {
                    let expected = format!("{hidden}, the width of the model's hidden states");
                    return Err(ConfigError::value(fields.path(field), width, expected));
                }
                _ => {}
            }
        }
        fields.flag("include_prompt")?;
        let modes = [
            ("pooling_mode_mean_tokens", Some(TextPooling::Mean)),
            ("pooling_mode_cls_token", Some(TextPooling::First)),
            ("pooling_mode_lasttoken", Some(TextPooling::Last)),
            ("pooling_mode_max_tokens", None),
            ("pooling_mode_mean_sqrt_len_tokens", None),
            ("pooling_mode_weightedmean_tokens", None),
        ];
        let mut found = Vec::new();
        for (field, pooling) in modes {
            if fields.flag(field)?.unwrap_or(false) {
                found.push((field, pooling));
            }
        }
        match fields.text("pooling_mode")? {
            Some("mean") => found.push(("pooling_mode", Some(TextPooling::Mean))),
            Some("cls") => found.push(("pooling_mode", Some(TextPooling::First))),
            Some("lasttoken") => found.push(("pooling_mode", Some(TextPooling::Last))),
            Some(_) => found.push(("pooling_mode", None)),
            None => {}
        }
        fields.refuse_unread("Pooling", |_, _| false)?;
        match found[..] {
            [(_, Some(pooling))] => Ok(TextEmbedding { pooling, normalize: self.normalize }),
            [(field, None)] => {
                let reason = "hidden states are pooled by their mean, or by the first or the last token";
                Err(ConfigError::unsupported(fields.path(field), "set", reason))
            }
            [] => Err(ConfigError::Missing { field: "pooling_mode_mean_tokens, or another mode,".into() }),
            [(first, _), (second, _), ..] => {
                Err(ConfigError::Contradiction { first: first.into(), second: second.into() })
            }
        }
    }
}

/// Whether a path is the name of a folder beside the file.
fn is_plain(path: &str) -> bool {
    !path.is_empty() && !path.starts_with('.') && !path.contains(['/', '\\', ':'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn modules(kinds: &[&str]) -> Result<Modules, ConfigError> {
        let module = |(index, kind): (usize, &&str)| {
            let path = if index == 0 { String::new() } else { format!("{index}_{kind}") };
            json!({"idx": index, "name": "x", "path": path, "type": format!("sentence_transformers.models.{kind}")})
        };
        let list: Vec<Value> = kinds.iter().enumerate().map(module).collect();
        Modules::from_json_bytes(json!(list).to_string().as_bytes())
    }

    #[rstest]
    #[case(json!({}), ShorterVectors::None)]
    #[case(json!({"is_matryoshka": false, "matryoshka_dimensions": null}), ShorterVectors::None)]
    #[case(json!({"is_matryoshka": true}), ShorterVectors::All)]
    #[case(json!({"matryoshka_dimensions": [768, 256], "is_matryoshka": true}), ShorterVectors::Of(vec![768, 256]))]
    fn shorter_vectors_are_read(#[case] config: Value, #[case] expected: ShorterVectors) {
        let read = |config: &Value| ShorterVectors::from_config_json(config.to_string().as_bytes());
        assert_eq!(read(&config).unwrap(), expected);
        assert_eq!(expected.has(256), expected != ShorterVectors::None);
        for wrong in [
            json!({"matryoshka_dimensions": [0]}),
            json!({"matryoshka_dimensions": "8"}),
            json!({"is_matryoshka": 1}),
        ] {
            assert!(read(&wrong).is_err(), "{wrong}");
        }
    }

    #[rstest]
    #[case(json!({"word_embedding_dimension": 8, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}), TextPooling::First)]
    #[case(json!({"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false}), TextPooling::Mean)]
    #[case(json!({"pooling_mode_lasttoken": true, "include_prompt": true}), TextPooling::Last)]
    #[case(json!({"embedding_dimension": 8, "pooling_mode": "lasttoken"}), TextPooling::Last)]
    fn the_mode_is_read(#[case] config: Value, #[case] pooling: TextPooling) {
        for (kinds, normalize) in
            [(&["Transformer", "Pooling", "Normalize"][..], true), (&["Transformer", "Pooling"], false)]
        {
            let found = modules(kinds).unwrap().with_pooling(config.to_string().as_bytes(), 8).unwrap();
            assert_eq!(found, TextEmbedding { pooling, normalize });
        }
    }

    #[rstest]
    #[case(json!({"pooling_mode_max_tokens": true}), "pooling_mode_max_tokens")]
    #[case(json!({"pooling_mode": "max"}), "pooling_mode")]
    #[case(json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}), "pooling_mode_mean_tokens")]
    #[case(json!({"pooling_mode_mean_tokens": false}), "or another mode")]
    #[case(json!({"pooling_mode_mean_tokens": true, "word_embedding_dimension": 9}), "hidden states")]
    #[case(json!({"pooling_mode_mean_tokens": true, "pooling_mode_median": false}), "pooling_mode_median")]
    fn other_modes_are_refused(#[case] config: Value, #[case] message: &str) {
        let modules = modules(&["Transformer", "Pooling"]).unwrap();
        let refused = modules.with_pooling(config.to_string().as_bytes(), 8).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }

    #[rstest]
    #[case(&["Transformer", "Pooling", "Dense"], "[2].type")]
    #[case(&["Transformer"], "Pooling")]
    #[case(&["CLIPModel"], "[0].type")]
    fn other_modules_are_refused(#[case] kinds: &[&str], #[case] message: &str) {
        let refused = modules(kinds).unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}");
    }

    #[test]
    fn a_path_stays_in_the_folder() {
        let list = json!([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../x"}]);
        assert!(
            Modules::from_json_bytes(list.to_string().as_bytes())
                .unwrap_err()
                .to_string()
                .contains("[1].path")
        );
    }
}
