//! `tokenizer_config.json`: which tokens begin and end a sequence, and the chat templates.

use serde_json::Value;

use super::error::{Result, TokenizerError};

/// What is used of a `tokenizer_config.json` file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerConfig {
    /// The text of every special token that the file names: `("bos_token", "<s>")` and so on, in the file's order.
    /// Chat templates see them under these names.
    pub special_tokens: Vec<(String, String)>,
    /// The chat templates. A file with a single one has it under the name `default`.
    pub chat_templates: Vec<NamedTemplate>,
}

/// A chat template and the name under which it is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTemplate {
    /// `default`, `tool_use`, `rag`, ..
    pub name: String,
    /// The Jinja source.
    pub source: String,
}

impl TokenizerConfig {
    /// Reads the content of a `tokenizer_config.json` file.
    ///
    /// # Errors
    /// When it is not a JSON object, or `chat_template` is neither a text nor a list of named texts.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self> {
        let config: serde_json::Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
        let mut special_tokens = Vec::new();
        for (key, value) in &config {
            // A token is a text, or an object that says how it is matched in text.
            let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
            if let Some(text) = text.filter(|_| key.ends_with("_token")) {
                special_tokens.push((key.clone(), text.to_owned()));
            }
        }
        let chat_templates = match config.get("chat_template") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(source)) => {
                vec![NamedTemplate { name: "default".to_owned(), source: source.clone() }]
            }
            Some(Value::Array(templates)) => {
                templates.iter().enumerate().map(named_template).collect::<Result<_>>()?
            }
            Some(_) => return Err(invalid("chat_template is neither a text nor a list".to_owned())),
        };
        Ok(Self { special_tokens, chat_templates })
    }

    /// The text of a special token, such as `bos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.iter().find(|(key, _)| key == name).map(|(_, text)| text.as_str())
    }
}

fn named_template((index, template): (usize, &Value)) -> Result<NamedTemplate> {
    let field = |name| template.get(name).and_then(Value::as_str).map(str::to_owned);
    match (field("name"), field("template")) {
        (Some(name), Some(source)) => Ok(NamedTemplate { name, source }),
        _ => Err(invalid(format!("chat_template[{index}] lacks a name or a template"))),
    }
}

fn invalid(message: String) -> TokenizerError {
    TokenizerError::Json { file: "tokenizer_config.json", message }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn reads_tokens_in_both_forms_and_named_templates() {
        let config = TokenizerConfig::from_json_bytes(
            br#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
                 "add_bos_token": true,
                 "chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}"#,
        )
        .unwrap();
        assert_eq!(config.special_token("bos_token"), Some("<s>"));
        assert_eq!(config.special_token("eos_token"), Some("</s>"));
        assert_eq!(config.special_tokens.len(), 2);
        let names: Vec<&str> = config.chat_templates.iter().map(|template| template.name.as_str()).collect();
        assert_eq!(names, ["default", "rag"]);
    }

    #[test]
    fn a_single_template_is_the_default() {
        let config = TokenizerConfig::from_json_bytes(br#"{"chat_template": "x"}"#).unwrap();
        assert_eq!(
            config.chat_templates,
            [NamedTemplate { name: "default".to_owned(), source: "x".to_owned() }]
        );
    }

    #[rstest]
    #[case(b"[]", "invalid type")]
    #[case(b"{\"chat_template\": 3}", "neither a text nor a list")]
    #[case(b"{\"chat_template\": [{\"name\": \"x\"}]}", "chat_template[0]")]
    #[case(b"\xff", "tokenizer_config.json")]
    fn errors_say_what_is_wrong(#[case] content: &[u8], #[case] expected: &str) {
        let message = TokenizerConfig::from_json_bytes(content).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}
