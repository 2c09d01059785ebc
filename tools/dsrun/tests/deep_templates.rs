//! Files whose chat template is nested deeply do not end a command with a signal.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{Ran, dsrun, run, tiny};
use rstest::rstest;
use std::fs;

/// How often a part of the template is repeated.
const DEPTH: usize = 50_000;

#[rstest]
#[case::signs("{{ ", "-", "1 }}")]
#[case::negations("{{ ", "not ", "1 }}")]
#[case::sums("{{ ", "1+", "1 }}")]
#[case::fields("{{ a", ".b", " }}")]
#[case::filters("{{ 'a'", "|trim", " }}")]
#[case::lists("{{ ", "[", "1 }}")]
#[case::blocks("", "{% if a %}", "")]
fn a_deep_template_is_an_error_that_is_told(#[case] before: &str, #[case] piece: &str, #[case] after: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deep.gguf");
    fs::write(&file, with_template(&format!("{before}{}{after}", piece.repeat(DEPTH)))).unwrap();
    let ran = |arguments: &[&str]| run(dsrun(arguments).arg("--model").arg(&file).stdin("Hello\n"));
    let told = |ran: &Ran, code: i32, text: &str| {
        assert_eq!(ran.code, Some(code), "{}", ran.err);
        assert!(text.contains("chat template \"default\"") && text.contains("deep.gguf"), "{text}");
        // The message does not have all of the template.
        assert!(text.len() < 10_000, "{}", text.len());
    };
    let inspected = ran(&["inspect"]);
    told(&inspected, 0, &inspected.out);
    let chat = ran(&["chat"]);
    told(&chat, 1, &chat.err);
    let system = ran(&["generate", "--system", "Be brief.", "-n", "2", "Hello"]);
    told(&system, 1, &system.err);
    let generated = ran(&["generate", "--quiet", "-n", "2", "Hello"]);
    told(&generated, 0, &generated.err);
    assert!(generated.err.contains("without a chat template"), "{}", generated.err);
    // Nobody asks for the template.
    let raw = ran(&["generate", "--raw", "-n", "2", "Hello"]);
    assert_eq!((raw.code, raw.err.contains("template")), (Some(0), false), "{}", raw.err);
    assert_eq!(raw.out, generated.out);
}

/// The tiny model with another chat template.
fn with_template(template: &str) -> Vec<u8> {
    let bytes = fs::read(tiny()).unwrap();
    let key = b"tokenizer.chat_template";
    let starts: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(key)).collect();
    let [start] = starts[..] else { panic!("the template is there {} times", starts.len()) };
    // The type of the value, its length, then the text.
    let length = start + key.len() + 4;
    let text = length + 8;
    let old = u64::from_le_bytes(bytes[length..text].try_into().unwrap()) as usize;
    // The weights stay at a multiple of the alignment.
    let mut new = template.as_bytes().to_vec();
    while new.len() % 32 != old % 32 {
        new.push(b' ');
    }
    [&bytes[..length], &(new.len() as u64).to_le_bytes(), &new, &bytes[text + old..]].concat()
}
