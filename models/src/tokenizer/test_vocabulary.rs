//! Small vocabularies for the tests.

use super::gguf::{GgufVocabulary, TOKEN_TYPE_BYTE, TOKEN_TYPE_CONTROL, TOKEN_TYPE_NORMAL};
use super::gguf::{TOKEN_TYPE_UNKNOWN, TOKEN_TYPE_USER_DEFINED};
use serde_json::{Map, Value, json};

/// The 256 characters of the byte-level alphabet, by byte.
pub(super) fn byte_level_alphabet() -> Vec<String> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| {
            let visible = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if visible { u32::from(byte) } else { next };
            next += u32::from(!visible);
            char::from_u32(code).unwrap().to_string()
        })
        .collect()
}

/// Token `b` is byte `b`; then `he` 256, `ll` 257, `Ġw` 258, `ĠÐ` 259, and the special tokens `<|end|>` 260 (control)
/// and `<|tab|>` 261 (user-defined).
pub(super) fn byte_level() -> GgufVocabulary {
    let mut tokens = byte_level_alphabet();
    tokens.extend(["he", "ll", "Ġw", "ĠÐ", "<|end|>", "<|tab|>"].map(str::to_owned));
    let mut token_types = vec![TOKEN_TYPE_NORMAL; tokens.len()];
    token_types[260] = TOKEN_TYPE_CONTROL;
    token_types[261] = TOKEN_TYPE_USER_DEFINED;
    GgufVocabulary {
        model: "gpt2".to_owned(),
        pre_tokenizer: Some("gpt-2".to_owned()),
        tokens,
        token_types,
        merges: ["h e", "l l", "Ġ w", "Ġ Ð"].map(str::to_owned).to_vec(),
        bos: Some(260),
        eos: Some(260),
        ..GgufVocabulary::default()
    }
}

/// A vocabulary for conversations, as a GGUF file has it and as the same in a `tokenizer.json`: token `b` is byte `b`; then
/// `<|im_start|>` 256 and `<|im_end|>` 257 (control), and `<think>` 258 (user-defined).
pub(crate) fn chat() -> (GgufVocabulary, String) {
    let special = ["<|im_start|>", "<|im_end|>", "<think>"];
    let bytes = byte_level_alphabet();
    let tokens: Vec<String> = bytes.iter().cloned().chain(special.map(str::to_owned)).collect();
    let mut token_types = vec![TOKEN_TYPE_NORMAL; tokens.len()];
    token_types[256..].copy_from_slice(&[TOKEN_TYPE_CONTROL, TOKEN_TYPE_CONTROL, TOKEN_TYPE_USER_DEFINED]);
    let added = |(index, token): (usize, &str)| {
        json!({"id": 256 + index, "content": token, "special": index < 2, "normalized": false, "lstrip": false,
            "rstrip": false, "single_word": false})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let ids: Map<String, Value> =
        bytes.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let file = json!({
        "version": "1.0",
        "added_tokens": special.into_iter().enumerate().map(added).collect::<Vec<_>>(),
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    });
    let vocabulary = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre_tokenizer: Some("gpt-2".to_owned()),
        tokens,
        token_types,
        eos: Some(257),
        ..GgufVocabulary::default()
    };
    (vocabulary, file.to_string())
}

/// `<unk>` 0, `<s>` 1, `</s>` 2, byte `b` at `b + 3`, then the words from 259 on.
pub(super) fn sentence_piece() -> GgufVocabulary {
    let words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello", "<tool>"];
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(words.map(str::to_owned));
    let mut token_types = vec![TOKEN_TYPE_UNKNOWN, TOKEN_TYPE_CONTROL, TOKEN_TYPE_CONTROL];
    token_types.extend([TOKEN_TYPE_BYTE; 256]);
    token_types.extend([TOKEN_TYPE_NORMAL; 10]);
    token_types.push(TOKEN_TYPE_USER_DEFINED);
    let mut scores = vec![0.0; 259];
    scores.extend((0..words.len()).map(|rank| -(rank as f32)));
    GgufVocabulary {
        model: "llama".to_owned(),
        pre_tokenizer: Some("default".to_owned()),
        tokens,
        token_types,
        scores,
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufVocabulary::default()
    }
}
