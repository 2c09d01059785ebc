//! Fuzz targets of the readers: whatever a file holds, reading it ends in time, with a value or an error.
//!
//! `dsrun_test_support::fuzz` says how to run them for longer, guided by coverage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "fuzz/gguf.rs"]
mod gguf;

use dsrun_core::WeightFormat;
use dsrun_models::{
    chat::{ChatTemplate, Message, RenderOptions},
    config::{DecoderConfig, Quantisation},
    generation::GenerationDefaults,
    gguf::GgufFile,
    model::Model,
    safetensors_file::SafetensorsFiles,
    step::ProgramOptions,
    tokenizer::{EncodeOptions, StreamDecoder, StreamOptions, Tokenizer, TokenizerConfig},
    weights::{ExprReader, TensorSource},
};
use dsrun_test_support::{
    counting_allocator::Counting,
    fuzz::{Fuzzer, Random, edit_json},
};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A text with letters of several scripts, digits, blanks and control tokens.
const TEXT: &str = "The 12 cats'll sit,\t<|im_end|> naïve Привет 你好 👩‍👩‍👧 \u{0}\r\n  e\u{301}<s>";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The files of this name below the fixtures.
fn files(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![fixtures()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if path.file_name().is_some_and(|file| file == name) {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no fixture has {name}");
    found
}

fn read_all(name: &str) -> Vec<Vec<u8>> {
    files(name).iter().map(|path| fs::read(path).unwrap()).collect()
}

/// All names and short texts of these JSON files.
fn words(files: &[Vec<u8>]) -> Vec<String> {
    fn collect(value: &Value, words: &mut Vec<String>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                words.push(name.clone());
                collect(value, words);
            }),
            Value::Array(items) => items.iter().take(10).for_each(|item| collect(item, words)),
            Value::String(text) if text.len() < 40 => words.push(text.clone()),
            _ => {}
        }
    }
    let mut words = Vec::new();
    files.iter().for_each(|file| collect(&serde_json::from_slice(file).unwrap(), &mut words));
    words.sort();
    words.dedup();
    words
}

/// Tokenises a text, and puts the tokens together again.
fn use_tokenizer(tokenizer: &Tokenizer) -> String {
    let options = EncodeOptions { add_special: true, parse_special: true };
    let ids = match tokenizer.encode(TEXT, options) {
        Ok(ids) => ids,
        Err(error) => return error.to_string(),
    };
    let _ = tokenizer.encode_within(&TEXT.repeat(20), options, 16);
    let _ = tokenizer.encode_pair([TEXT, "b"], options);
    let mut stream = StreamDecoder::new(tokenizer, StreamOptions::default());
    for id in ids.iter().copied().chain([0, u32::MAX]) {
        let _ = stream.push(id);
        let _ = tokenizer.token_bytes(id);
        let _ = tokenizer.id_to_token(id);
    }
    let _ = stream.finish();
    format!("{:?}", tokenizer.decode(&ids, false).is_ok_and(|text| text == TEXT))
}

fn conversation() -> Vec<Message> {
    let call = json!([{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, null]}}}]);
    let mut calls = Message::new("assistant", "");
    calls.other.insert("tool_calls".to_owned(), call);
    let parts = json!([{"type": "text", "text": "hi"}]);
    let parts = Message { content: Some(parts), ..Message::new("user", "") };
    vec![
        Message::new("system", "Be kind."),
        Message::new("user", TEXT),
        calls,
        Message::new("tool", "7"),
        parts,
    ]
}

fn use_template(template: &ChatTemplate) -> String {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(vec![tool]),
        variables: json!({"enable_thinking": true}).as_object().unwrap().clone(),
        now: Some(0),
        ..RenderOptions::default()
    };
    match template.render(&conversation(), &options) {
        Ok(_) => "rendered".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Reads every row of every tensor.
fn read_weights(source: &dyn TensorSource) -> Result<(), String> {
    for name in source.names() {
        let Ok(weight_type) = source.tensor_type(name) else { continue };
        let reader = ExprReader::new(source, &dsrun_core::WeightExpr::tensor(name))
            .map_err(|error| error.to_string())?;
        for row in 0..weight_type.rows() {
            reader.decoded_rows(row, 1).map_err(|error| error.to_string())?;
        }
        source.release(name);
    }
    Ok(())
}

/// A GGUF file, from its bytes to the program, the tokenizer and the template.
#[test]
fn gguf_models() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let target = |bytes: &[u8]| {
        let file = match GgufFile::from_bytes("model.gguf", bytes.to_vec()) {
            Ok(file) => file,
            Err(error) => return format!("file: {error}"),
        };
        let _ = read_weights(&file);
        if let Ok(vocabulary) = file.vocabulary()
            && let Ok(tokenizer) = Tokenizer::from_gguf(vocabulary)
        {
            use_tokenizer(&tokenizer);
        }
        if let Err(error) = DecoderConfig::from_gguf(&file) {
            return format!("configuration: {error}");
        }
        fs::write(&path, bytes).unwrap();
        let model = match Model::open(&path) {
            Ok(model) => model,
            Err(error) => return format!("model: {error}"),
        };
        let template = model.chat_template().map_or_else(|error| error.to_string(), use_template);
        format!("program: {:?}; template: {template}", model.program(&ProgramOptions::default()).is_ok())
    };
    let seeds = read_all("model.gguf");
    let run =
        Fuzzer::new("gguf_models").seeds(seeds).edit(gguf::edit).words(["\u{120}", "llama.", "{{", "%}"]);
    run.memory(|length| (256 << 20) + 200 * length).run(target);
}

/// Edits the header of a safetensors file, and writes its length anew.
fn edit_header(random: &mut Random, input: &mut Vec<u8>, other: &[u8], words: &[String]) {
    let parts = |file: &[u8]| {
        let length = usize::try_from(u64::from_le_bytes(file.get(..8)?.try_into().ok()?)).ok()?;
        Some((file.get(8..length.checked_add(8)?)?.to_vec(), file[8 + length..].to_vec()))
    };
    let Some((mut header, data)) = parts(input) else { return };
    let (other, _) = parts(other).unwrap_or_default();
    edit_json(random, &mut header, &other, words);
    *input = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
}

#[test]
fn safetensors() {
    let header = |text: &str, data: usize| {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![1; data]].concat()
    };
    let seeds = [
        header(
            r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]}}"#,
            30,
        ),
        header(
            r#"{"__metadata__":{"format":"pt"},"c":{"dtype":"I8","shape":[],"data_offsets":[0,1]},"d":{"dtype":"F8_E4M3","shape":[0,5],"data_offsets":[1,1]}}"#,
            1,
        ),
    ];
    let names =
        ["dtype", "shape", "data_offsets", "__metadata__", "F16", "F64", "I64", "U8", "BOOL", "F4", "a", "b"];
    let words = names.map(str::to_owned);
    let target = |bytes: &[u8]| match SafetensorsFiles::from_bytes("a.safetensors", bytes.to_vec()) {
        Ok(files) => format!("{:?}", read_weights(&files)),
        Err(error) => error.to_string(),
    };
    let edit = move |random: &mut Random, input: &mut Vec<u8>, other: &[u8]| {
        edit_header(random, input, other, &words)
    };
    Fuzzer::new("safetensors")
        .seeds(seeds)
        .words(names)
        .edit(edit)
        .inputs(10_000)
        .memory(|length| (64 << 10) + 16 * length)
        .run(target);
}

/// `config.json` of all families, up to the program of those that are small.
#[test]
fn configurations() {
    let seeds = read_all("config.json");
    let words = words(&seeds);
    let target = |bytes: &[u8]| {
        let _ = Quantisation::from_config_json(bytes);
        let config = match DecoderConfig::from_json_bytes(bytes) {
            Ok(config) => config,
            Err(error) => return error.to_string(),
        };
        config.validate().unwrap();
        if config.layers > 8 {
            return "large".to_owned();
        }
        let model = Model::random("fuzzed", config, 0, WeightFormat::Dense(dsrun_core::DType::F32));
        match model.and_then(|model| model.program(&ProgramOptions::default())) {
            Ok(_) => "program".to_owned(),
            Err(error) => error.to_string(),
        }
    };
    let run = Fuzzer::new("configurations").seeds(seeds).words(words).json().inputs(5000);
    run.memory(|length| (64 << 20) + 200 * length).run(target);
}

#[test]
fn tokenizer_files() {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let vocabulary: Value = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", "Ċ", "T", "h", "e", "The"]
        .iter()
        .enumerate()
        .map(|(id, token)| ((*token).to_owned(), json!(id)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let added = |id: usize, text: &str| json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let seed = |model: Value, pre: Value, decoder: Value| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [added(0, "<s>"), added(1, "</s>")],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}]},
            "pre_tokenizer": pre, "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "decoder": decoder, "model": model}).to_string()
    };
    let bpe = json!({"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false, "vocab": vocabulary, "merges": ["a b", ["Ġ", "a"]]});
    let split = json!({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|[^\\s]+|\\s+"}, "behavior": "Isolated", "invert": false}, byte_level]});
    let word_piece = json!({"type": "WordPiece", "unk_token": "<s>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocabulary});
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": [["<s>", 0.0], ["a", -1.5], ["▁a", -2.0]]});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let seeds = [
        seed(bpe, split, byte_level),
        seed(
            word_piece,
            json!({"type": "BertPreTokenizer"}),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ),
        seed(unigram, metaspace.clone(), metaspace),
    ];
    let mut names = words(&seeds.clone().map(String::into_bytes));
    names.extend(
        [
            "Digits",
            "Whitespace",
            "Punctuation",
            "BertNormalizer",
            "Precompiled",
            "Strip",
            "Prepend",
            "Lowercase",
            "NFKC",
            "Fuse",
            "ByteFallback",
            "(?:a*)*b",
            "[",
            "\\p{L}+",
            "(a|a)*$",
        ]
        .map(str::to_owned),
    );
    let target = |bytes: &[u8]| {
        let _ = TokenizerConfig::from_json_bytes(bytes);
        match Tokenizer::from_json_bytes(bytes) {
            Ok(tokenizer) => use_tokenizer(&tokenizer),
            Err(error) => error.to_string(),
        }
    };
    Fuzzer::new("tokenizer_files")
        .seeds(seeds)
        .words(names)
        .json()
        .memory(|length| (64 << 20) + 1000 * length)
        .run(target);
}

#[test]
fn small_json_files() {
    let seeds = [
        r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "add_bos_token": true, "chat_template": [{"name": "default", "template": "{{ messages }}"}], "model_max_length": 1e30, "added_tokens_decoder": {"0": {"content": "<s>", "special": true}}}"#,
        r#"{"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "eos_token_id": [1, 2], "bos_token_id": 0, "repetition_penalty": 1.1, "do_sample": true, "max_new_tokens": 2048}"#,
        r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true, "quant_method": "gptq", "checkpoint_format": "gptq", "dynamic": {"-:.*lm_head.*": {}}}"#,
    ];
    let words = words(&seeds.map(|seed| seed.as_bytes().to_vec()));
    let target = |bytes: &[u8]| {
        let config = TokenizerConfig::from_json_bytes(bytes).map(drop).map_err(|error| error.to_string());
        let generation =
            GenerationDefaults::from_json_bytes(bytes).map(drop).map_err(|error| error.to_string());
        let quantisation = Quantisation::from_gptq_json(bytes).map(drop).map_err(|error| error.to_string());
        format!("{config:?} {generation:?} {quantisation:?}")
    };
    Fuzzer::new("small_json_files")
        .seeds(seeds)
        .words(words)
        .json()
        .inputs(5000)
        .memory(|length| (1 << 20) + 200 * length)
        .run(target);
}

#[test]
fn chat_templates() {
    let seeds = [
        "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "{% macro f(x, y=1) %}{{ x | tojson(indent=2) }}{{ y * 'ab' }}{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 %}{{ f(m.tool_calls) }}{% endfor %}{{ ns.n ** 2 }}",
        "{% for tool in tools %}{{ tool.function.name | upper | replace('F', 'g') | indent(4) }}{% endfor %}{{ raise_exception('no') if messages | length > 9 }}{{ strftime_now('%Y-%m-%d') }}{{ messages | map(attribute='role') | join(', ') }}",
        "{% set a = 'x' %}{% for i in range(9) %}{% set a = a ~ a %}{% endfor %}{{ a.split('x')[:3] }}{{ 'abc'.startswith('a') and not (1 in [2, 3]) }}{% generation %}{{ bos_token }}{% endgeneration %}",
        "{% block b %}{% filter upper %}{{ messages | selectattr('role', 'equalto', 'user') | list | last }}{% endfilter %}{% endblock %}{% with x = 1 %}{{ x is defined }}{% endwith %}{% call(y) f(1) %}{{ y }}{% endcall %}",
    ];
    let words = [
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "{%-",
        "-%}",
        " for x in ",
        " endfor ",
        " if ",
        " elif ",
        " else ",
        " endif ",
        " set ",
        " endset ",
        " macro ",
        " endmacro ",
        " block ",
        " endblock ",
        " filter ",
        " call ",
        " include 'default' ",
        " extends 'default' ",
        " import ",
        " recursive ",
        " do ",
        " autoescape ",
        " raw ",
        " endraw ",
        " loop(",
        " loop.cycle(",
        "| tojson",
        "| join",
        "| format",
        "| batch(",
        "| slice(",
        "| replace(",
        "| map(",
        "| select(",
        "| sort",
        "| unique",
        "| dictsort",
        "| pprint",
        "| indent(",
        "| groupby(",
        "| default(",
        "| round(",
        "| int(",
        "| items",
        "| tojson(indent=",
        "range(",
        "dict(",
        "namespace(",
        "lipsum(",
        "cycler(",
        "joiner(",
        "debug()",
        ".format(",
        ".split(",
        ".join(",
        ".replace(",
        ".zfill(",
        ".ljust(",
        ".center(",
        ".splitlines(",
        ".keys()",
        ".items()",
        ".strip(",
        "[::-1]",
        "[1:]",
        " ~ ",
        " * ",
        " ** ",
        " // ",
        " % ",
        " not ",
        " and ",
        " is ",
        " in ",
        "messages",
        "99999999999",
        "'%9999999d'",
        "**{}",
        "*[]",
        "-",
    ];
    let special = [("bos_token".to_owned(), "<s>".to_owned())];
    let target = |bytes: &[u8]| {
        let Ok(source) = str::from_utf8(bytes) else { return "no text".to_owned() };
        match ChatTemplate::new(source, &special) {
            Ok(template) => use_template(&template),
            Err(error) => error.to_string(),
        }
    };
    let inserted: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    let edit = move |random: &mut Random, input: &mut Vec<u8>, _: &[u8]| {
        // Between tokens, where an insertion is most likely to parse.
        let places: Vec<usize> = (0..input.len()).filter(|at| b" |.([{'".contains(&input[*at])).collect();
        if let (Some(at), Some(word)) = (random.of(&places), random.of(&inserted)) {
            let word = word.repeat(if random.below(20) == 0 { 1 + random.below(3000) } else { 1 });
            input.splice(at..at, word);
        }
    };
    Fuzzer::new("chat_templates").seeds(seeds).words(words).edit(edit).memory(|_| 512 << 20).run(target);
}
