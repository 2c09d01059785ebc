//! The step `backend-names`: code that must be independent of backends names none, the second half of the dependency rule.
//!
//! The code of `core`, `plugins/sdk`, `models`, `engine` and `tools/dsrun` is searched for words such as `candle` or `cuda`,
//! in identifiers and in string literals. Comments, documentation and tests may name backends.
//! `tools/dsrun` may have one such line, which registers the default backend.

use std::str::FromStr;
use std::{fs, iter};

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::rust_tokens::{AttributeKind, attribute_kind, skip_item};
use crate::workspace::{Workspace, display_relative, fail_on, files_with_extension};

/// Names of backends that are searched for even if their folders do not exist.
const KNOWN: &[&str] = &["candle", "cuda", "cudarc", "wgpu"];

/// The folders to search, each with the number of lines that may name a backend.
const SEARCHED: &[(&str, usize)] =
    &[("core", 0), ("plugins/sdk", 0), ("models", 0), ("engine", 0), ("tools/dsrun", 1)];

/// The folder in `backends/` that is not a backend: the shared support of backends that compute in host memory.
pub(crate) const HOST_SUPPORT: &str = "backends/host";

/// The words that name a backend, in lower case.
pub(crate) struct BackendNames(Vec<String>);

impl BackendNames {
    /// [`KNOWN`], and the name of every folder in `backends/` that holds a backend.
    pub(crate) fn new<'a>(package_folders: impl IntoIterator<Item = &'a str>) -> Self {
        let backends = package_folders.into_iter().filter(|folder| *folder != HOST_SUPPORT);
        let from_folders = backends.filter_map(|folder| folder.strip_prefix("backends/"));
        let mut names: Vec<String> =
            KNOWN.iter().copied().chain(from_folders).map(str::to_ascii_lowercase).collect();
        names.sort();
        names.dedup();
        Self(names)
    }

    /// The first backend named in `text`, which may be a crate name, an identifier or a string literal.
    pub(crate) fn first_in(&self, text: &str) -> Option<&str> {
        words(text).find_map(|word| self.0.iter().find(|name| **name == word)).map(String::as_str)
    }
}

/// The words of `text` in lower case: split at characters that are not letters or digits, and before a capital that
/// starts a word (`CandleBackend`, `GPUDevice`). So `scandal` does not contain `candle`, and `use_cuda` contains `cuda`.
fn words(text: &str) -> impl Iterator<Item = String> {
    let characters: Vec<char> = text.chars().collect();
    let mut result = Vec::new();
    let mut word = String::new();
    for (index, &character) in characters.iter().enumerate() {
        let before = index.checked_sub(1).map(|previous| characters[previous]);
        let after = characters.get(index + 1);
        let starts_word = character.is_uppercase()
            && (before.is_some_and(|c| !c.is_uppercase()) || after.is_some_and(|c| c.is_lowercase()));
        if (starts_word || !character.is_alphanumeric()) && !word.is_empty() {
            result.push(std::mem::take(&mut word));
        }
        if character.is_alphanumeric() {
            word.extend(character.to_lowercase());
        }
    }
    result.push(word);
    result.into_iter().filter(|word| !word.is_empty())
}

/// A place in code that names a backend.
#[derive(Debug, PartialEq, Eq)]
struct Mention {
    line: usize,
    backend: String,
}

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let packages = workspace.metadata.workspace_packages();
    let folders: Vec<String> = packages.into_iter().map(|package| workspace.folder(package)).collect();
    let names = BackendNames::new(folders.iter().map(String::as_str));
    let mut problems = Vec::new();
    let mut searched_files = 0;
    for (room, allowance) in SEARCHED {
        let folder = workspace.root().join(room);
        let mut files = files_with_extension(&folder.join("src"), "rs")?;
        files.extend(iter::once(folder.join("build.rs")).filter(|path| path.is_file()));
        let mut lines = Vec::new();
        for file in &files {
            let shown = display_relative(file, workspace.root());
            if is_test_file(&shown) {
                continue;
            }
            searched_files += 1;
            let source = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
            let found = mentions(&source, &names).with_context(|| format!("cannot search {shown}"))?;
            lines.extend(
                found.into_iter().map(|found| format!("{shown}:{} names `{}`", found.line, found.backend)),
            );
        }
        // A line that names two backends is reported twice, a line that names one backend twice is reported once.
        lines.dedup();
        if lines.len() > *allowance {
            let spent = match allowance {
                0 => String::new(),
                _ => format!(" ({room} may have {allowance} such line: the registration of the default)"),
            };
            problems.extend(lines.into_iter().map(|line| line + &spent));
        }
    }
    fail_on(&problems, "a backend is named outside backends/ and plugins/; ask for a capability instead")?;
    Ok(format!("{searched_files} source files name no backend"))
}

/// Whether a file contains only tests, by its path from the root: `tests.rs`, or a file in a folder `tests`.
fn is_test_file(file: &str) -> bool {
    file.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// Every mention of a backend in the code of one Rust file, outside documentation and `#[cfg(test)]` items.
fn mentions(source: &str, names: &BackendNames) -> Result<Vec<Mention>> {
    let tokens =
        TokenStream::from_str(source).map_err(|error| anyhow::anyhow!("this is not Rust: {error}"))?;
    let mut found = Vec::new();
    search(tokens, names, &mut found);
    Ok(found)
}

fn search(tokens: TokenStream, names: &BackendNames, found: &mut Vec<Mention>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(ref punct) if punct.as_char() == '#' => {
                let inner = tokens.next_if(|next| matches!(next, TokenTree::Punct(p) if p.as_char() == '!'));
                let is_attribute = |next: &TokenTree| matches!(next, TokenTree::Group(g) if g.delimiter() == Delimiter::Bracket);
                let Some(TokenTree::Group(attribute)) = tokens.next_if(is_attribute) else { continue };
                match attribute_kind(&attribute) {
                    AttributeKind::Documentation => {}
                    // `#![cfg(test)]`: the rest of this file or module is a test.
                    AttributeKind::TestOnly if inner.is_some() => return,
                    AttributeKind::TestOnly => skip_item(&mut tokens),
                    AttributeKind::Other => search(attribute.stream(), names, found),
                }
            }
            TokenTree::Group(group) => search(group.stream(), names, found),
            TokenTree::Ident(_) | TokenTree::Literal(_) => {
                if let Some(backend) = names.first_in(&token.to_string()) {
                    found.push(Mention { line: token.span().start().line, backend: backend.to_owned() });
                }
            }
            TokenTree::Punct(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("candle_core", Some("candle"))]
    #[case("dsrun-candle", Some("candle"))]
    #[case("CandleBackend", Some("candle"))]
    #[case("MyCUDADevice", Some("cuda"))]
    #[case("CUDA_VISIBLE_DEVICES", Some("cuda"))]
    #[case("cudarc", Some("cudarc"))]
    #[case("\"cuda:0\"", Some("cuda"))]
    #[case("newcomer", Some("newcomer"))]
    #[case("scandal", None)]
    #[case("candles", None)]
    #[case("barracuda", None)]
    #[case("wgpus2", None)]
    #[case("HostComm", None)]
    #[case("", None)]
    fn a_name_is_a_whole_word(#[case] text: &str, #[case] expected: Option<&str>) {
        let names = BackendNames::new(["core", "backends/newcomer", "backends/host"]);
        assert_eq!(names.first_in(text), expected);
    }

    fn lines(source: &str) -> Vec<usize> {
        let names = BackendNames::new([]);
        mentions(source, &names).unwrap().into_iter().map(|mention| mention.line).collect()
    }

    #[rstest]
    #[case::import("\nuse candle_core::Tensor;", &[2])]
    #[case::string("fn f() -> &'static str {\n \"cuda\"\n}", &[2])]
    #[case::raw_string("const A: &str = r#\"wgpu\"#;", &[1])]
    #[case::type_name("struct WgpuDevice;", &[1])]
    #[case::attribute("#[cfg(feature = \"cuda\")]\nfn f() {}", &[1])]
    #[case::in_macro("fn f() { g!(wgpu) }", &[1])]
    #[case::after_test_item("#[cfg(test)]\nuse wgpu::A;\nuse wgpu::B;", &[3])]
    #[case::not_test("#[cfg(not(test))]\nuse wgpu::A;", &[2])]
    #[case::one_of_two("#[cfg(any(test, unix))]\nuse wgpu::A;", &[2])]
    fn finds(#[case] source: &str, #[case] expected: &[usize]) {
        assert_eq!(lines(source), expected);
    }

    #[rstest]
    #[case::line_comment("// candle does this\nfn f() {}")]
    #[case::block_comment("/* cuda /* wgpu */ */ fn f() {}")]
    #[case::documentation("//! Like wgpu.\n\n/// As candle does.\nstruct A;")]
    #[case::documentation_attribute("#[doc = \"candle\"]\nstruct A;")]
    #[case::test_module("#[cfg(test)]\nmod tests { use candle_core::Tensor; }")]
    #[case::test_import("#[cfg(test)]\n#[allow(unused)]\nuse candle_core::Tensor;")]
    #[case::test_file("#![cfg(test)]\nuse candle_core::Tensor;")]
    #[case::other_word("fn chandler() -> Barracuda { \"scandal\" }")]
    fn leaves_alone(#[case] source: &str) {
        assert_eq!(lines(source), &[] as &[usize]);
    }

    #[test]
    fn a_file_that_is_not_rust_is_an_error() {
        assert!(mentions("fn f() {", &BackendNames::new([])).is_err());
    }

    #[rstest]
    #[case("engine/src/scheduler/tests.rs", true)]
    #[case("engine/src/tests/batch.rs", true)]
    #[case("engine/src/attests.rs", false)]
    fn test_files_are_known_by_their_name(#[case] path: &str, #[case] expected: bool) {
        assert_eq!(is_test_file(path), expected);
    }
}
