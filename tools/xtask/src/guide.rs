//! The step `guide`: the commands and sources in the chapter "Write a backend" work as printed.
//!
//! Its blocks become one shell script. A block of C or TOML is the content of the file that its first line names; a block of
//! commands runs unchanged, except for `cargo xtask install`, which the step runs beforehand. Blocks marked `network` or
//! `sources` are skipped: the former need a network, the latter are covered by the step `template`.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};

use crate::install::{self, Profile};
use crate::workspace::Workspace;

const CHAPTER: &str = "docs/src/write-a-backend.md";

/// Lines of output that the chapter shows.
const SHOWN: &[&str] =
    &["PASSED", "FAILED", "FAIL add/f32/extent", "the exit status is 1", "mine: device 0: my CPU"];

/// The end marker of files in the script; no file has such a line.
const END: &str = "END_OF_BLOCK";

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let text = fs::read_to_string(workspace.root().join(CHAPTER))
        .with_context(|| format!("cannot read {CHAPTER}"))?;
    let blocks = blocks(&text);
    let script = script(&blocks)?;
    let home = workspace.metadata.target_directory.as_std_path().join("guide");
    if home.exists() {
        fs::remove_dir_all(&home).with_context(|| format!("cannot remove {}", home.display()))?;
    }
    install::run(&home.join("dsrun"), Profile::Dev)?;
    let output = Command::new("bash")
        .arg("-c")
        .arg(&script)
        .env("HOME", &home)
        .env("NO_COLOR", "1")
        .current_dir(&home)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("bash could not be started")?;
    let output_text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the chapter's commands ended with {}\n{output_text}", output.status);
    for line in SHOWN {
        ensure!(
            text.contains(line) && output_text.contains(line),
            "`{line}` is not in the output\n{output_text}"
        );
    }
    Ok(format!("the {} blocks of {CHAPTER} work as printed", blocks.len()))
}

/// A block of code: the info string of its fence, and its text.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    info: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for event in Parser::new(page) {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => {
                open = Some(Block { info: info.to_string(), text: String::new() });
            }
            Event::Text(part) => {
                if let Some(block) = &mut open {
                    block.text.push_str(&part);
                }
            }
            Event::End(TagEnd::CodeBlock) => blocks.extend(open.take()),
            _ => {}
        }
    }
    blocks
}

/// All blocks as one script.
fn script(blocks: &[Block]) -> Result<String> {
    let mut script = String::from("set -eu\n");
    for block in blocks {
        match block.info.as_str() {
            "sh" => {
                for line in block.text.lines().filter(|line| !line.starts_with("cargo xtask install")) {
                    script += &format!("{line}\n");
                }
            }
            "sh,network" | "sh,sources" => {}
            "c" | "toml" => script += &file(&block.text)?,
            other => bail!("{CHAPTER} has a block of `{other}`, which is not tested"),
        }
    }
    Ok(script)
}

/// The commands that write the file of a block, or append to it.
fn file(text: &str) -> Result<String> {
    let (first, _) = text.split_once('\n').unwrap_or((text, ""));
    let name = first.trim_start_matches(['/', '#', ' ']);
    let (name, arrow) = match name.strip_suffix(", continued") {
        Some(name) => (name, ">>"),
        None => (name, ">"),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    ensure!(
        Path::new(name).extension().is_some() && name.chars().all(plain),
        "a block of {CHAPTER} begins with `{first}`, which names no file"
    );
    Ok(format!("cat {arrow} {name} <<'{END}'\n{text}{END}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_becomes_a_script() {
        let page = "Text\n\n```sh\ncargo xtask install --prefix x\ncd mine\n```\n\n```c\n// a.c\nint a;\n```\n\n\
                    ```c\n// a.c, continued\nint b;\n```\n\n```sh,network\nfetch\n```\n\n```toml\n# a.toml\nb = 1\n```\n";
        let script = script(&blocks(page)).unwrap();
        assert_eq!(
            script,
            "set -eu\ncd mine\ncat > a.c <<'END_OF_BLOCK'\n// a.c\nint a;\nEND_OF_BLOCK\ncat >> a.c <<'END_OF_BLOCK'\n\
             // a.c, continued\nint b;\nEND_OF_BLOCK\ncat > a.toml <<'END_OF_BLOCK'\n# a.toml\nb = 1\nEND_OF_BLOCK\n"
        );
    }

    #[test]
    fn blocks_that_could_not_be_tested_are_refused() {
        for page in ["```c\nint a;\n```\n", "```c\n// ../a.c\n```\n", "```python\nx\n```\n"] {
            assert!(script(&blocks(page)).is_err(), "{page}");
        }
    }
}
