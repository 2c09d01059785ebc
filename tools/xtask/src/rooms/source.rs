//! Parses a Rust file for its modules, items and paths.

use std::collections::HashSet;
use std::str::FromStr;

use anyhow::Result;
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use crate::rust_tokens::{AttributeKind, attribute_kind, skip_item};

/// The source of a module: a whole file, or the body of `mod name { .. }`. Items under `#[cfg(test)]` are ignored.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ModuleSource {
    /// Names of the modules in separate files (`mod name;`).
    pub(super) files: Vec<String>,
    /// Inline modules (`mod name { .. }`).
    pub(super) inline: Vec<(String, Self)>,
    /// Names of functions, types, constants and macros defined here.
    pub(super) items: HashSet<String>,
    /// Paths in `use` declarations, expressions and types.
    pub(super) paths: Vec<NamedPath>,
}

/// A path with at least two segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedPath {
    /// The segments of the path. The first may be `crate`, `self`, `super` or any name in scope.
    pub(super) segments: Vec<String>,
    /// Whether the path is a glob import (`path::*`).
    pub(super) glob: bool,
    /// The name that the path binds in the module, if it is a `use` declaration.
    pub(super) binds: Option<String>,
    pub(super) line: usize,
}

/// Keywords after which the name of an item follows.
const ITEMS: &[&str] = &["fn", "struct", "enum", "trait", "type", "const", "static", "union", "mut"];

impl ModuleSource {
    /// Parses a file.
    pub(super) fn parse(source: &str) -> Result<Self> {
        let tokens =
            TokenStream::from_str(source).map_err(|error| anyhow::anyhow!("this is not Rust: {error}"))?;
        let mut module = Self::default();
        module.scan(tokens, Level::Module);
        Ok(module)
    }

    fn scan(&mut self, tokens: TokenStream, level: Level) {
        let mut tokens = tokens.into_iter().peekable();
        // The number of colons before a token: after two, the token continues a path that was already read.
        let mut colons = 0;
        while let Some(token) = tokens.next() {
            let colons_before = std::mem::take(&mut colons);
            match token {
                TokenTree::Punct(ref punct) if punct.as_char() == '#' => {
                    let is_inner =
                        |next: &TokenTree| matches!(next, TokenTree::Punct(p) if p.as_char() == '!');
                    let inner = tokens.next_if(is_inner).is_some();
                    let is_attribute = |next: &TokenTree| matches!(next, TokenTree::Group(g) if g.delimiter() == Delimiter::Bracket);
                    let Some(TokenTree::Group(attribute)) = tokens.next_if(is_attribute) else { continue };
                    match (attribute_kind(&attribute), inner) {
                        (AttributeKind::TestOnly, true) => return,
                        (AttributeKind::TestOnly, false) => skip_item(&mut tokens),
                        _ => {}
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons = colons_before + 1,
                TokenTree::Punct(_) => {}
                TokenTree::Group(group) => self.scan(group.stream(), Level::Inside),
                TokenTree::Literal(_) => {}
                TokenTree::Ident(ident) => match (ident.to_string().as_str(), level) {
                    ("mod", Level::Module) => self.read_module(&mut tokens),
                    ("use", _) => self.read_use(&mut tokens, level),
                    ("macro_rules", Level::Module) => {
                        let name = tokens.find(|token| matches!(token, TokenTree::Ident(_)));
                        self.items.extend(name.map(|name| name.to_string()));
                    }
                    (keyword, Level::Module) if ITEMS.contains(&keyword) => {
                        if let Some(TokenTree::Ident(name)) = tokens.peek() {
                            self.items.insert(name.to_string());
                        }
                    }
                    (first, _) if colons_before < 2 => {
                        let mut segments = vec![first.to_owned()];
                        while let Some(next) = next_segment(&mut tokens) {
                            segments.push(next);
                        }
                        if segments.len() > 1 {
                            let line = ident.span().start().line;
                            self.paths.push(NamedPath { segments, glob: false, binds: None, line });
                        }
                    }
                    _ => {}
                },
            }
        }
    }

    /// Reads the tokens after `mod`.
    fn read_module(&mut self, tokens: &mut Tokens) {
        let Some(TokenTree::Ident(name)) = tokens.next() else { return };
        match tokens.next() {
            Some(TokenTree::Group(body)) => {
                let mut module = Self::default();
                module.scan(body.stream(), Level::Module);
                self.inline.push((name.to_string(), module));
            }
            _ => self.files.push(name.to_string()),
        }
    }

    /// Reads the tokens after `use`, up to the semicolon.
    fn read_use(&mut self, tokens: &mut Tokens, level: Level) {
        // `impl Trait + use<'a>` captures lifetimes and imports nothing.
        if matches!(tokens.peek(), Some(TokenTree::Punct(punct)) if punct.as_char() == '<') {
            return;
        }
        let is_end = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ';');
        let tree: Vec<TokenTree> = tokens.take_while(|token| !is_end(token)).collect();
        self.read_use_tree(&[], &tree, level);
    }

    /// Reads one use tree whose path begins with `prefix`.
    fn read_use_tree(&mut self, prefix: &[String], tree: &[TokenTree], level: Level) {
        let Some(first) = tree.first() else { return };
        let line = first.span().start().line;
        let mut segments = prefix.to_vec();
        let mut binds = None;
        let mut glob = false;
        let mut tokens = tree.iter();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(ident) if ident == "as" => {
                    binds = tokens.next().map(ToString::to_string);
                }
                // `a::{self}` is `a`.
                TokenTree::Ident(ident) if ident == "self" && !segments.is_empty() => {}
                TokenTree::Ident(ident) => segments.push(ident.to_string()),
                TokenTree::Punct(punct) => glob |= punct.as_char() == '*',
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
                    for branch in inner.split(is_comma) {
                        self.read_use_tree(&segments, branch, level);
                    }
                    return;
                }
                TokenTree::Literal(_) => {}
            }
        }
        let binds = binds.or_else(|| segments.last().cloned()).filter(|_| level == Level::Module && !glob);
        self.paths.push(NamedPath { segments, glob, binds, line });
    }
}

type Tokens = std::iter::Peekable<proc_macro2::token_stream::IntoIter>;

/// The context of tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    /// Directly in a module.
    Module,
    /// Inside a group: a body, arguments, or the like.
    Inside,
}

/// Takes the path segment after `::`, if there is one.
fn next_segment(tokens: &mut Tokens) -> Option<String> {
    let mut ahead = tokens.clone();
    let joint =
        matches!(ahead.next()?, TokenTree::Punct(p) if p.as_char() == ':' && p.spacing() == Spacing::Joint);
    let colon = matches!(ahead.next()?, TokenTree::Punct(p) if p.as_char() == ':');
    match ahead.next()? {
        TokenTree::Ident(ident) if joint && colon => {
            *tokens = ahead;
            Some(ident.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(source: &str) -> Vec<String> {
        let module = ModuleSource::parse(source).unwrap();
        let show = |path: &NamedPath| {
            let glob = if path.glob { "::*" } else { "" };
            let binds = path.binds.as_ref().map(|name| format!(" as {name}")).unwrap_or_default();
            format!("{}: {}{glob}{binds}", path.line, path.segments.join("::"))
        };
        module.paths.iter().map(show).collect()
    }

    #[test]
    fn use_trees_are_read_with_their_names_and_lines() {
        let source = "use crate::a::{\n    B, c::{self, D as E},\n    f::*,\n};\npub(super) use super::g;";
        assert_eq!(
            paths(source),
            [
                "2: crate::a::B as B",
                "2: crate::a::c as c",
                "2: crate::a::c::D as E",
                "3: crate::a::f::*",
                "5: super::g as g",
            ]
        );
    }

    #[test]
    fn paths_in_bodies_and_types_are_read() {
        let source = "fn f(x: crate::a::B) -> u8 {\n    use super::c;\n    d::e(x)::<crate::F>() + x.g\n}\n\
                      impl<T> Trait for super::T<T> {}";
        assert_eq!(paths(source), ["1: crate::a::B", "2: super::c", "3: d::e", "3: crate::F", "5: super::T"]);
    }

    #[test]
    fn tests_and_documentation_are_left_out() {
        let source = "//! See [`crate::a`].\nuse crate::b::C;\n#[cfg(test)]\nuse crate::d::E;\n\
                      #[cfg(test)]\nmod tests {\n    use crate::f::G;\n}\n#[cfg(test)]\nmod more;\nmod kept;";
        assert_eq!(paths(source), ["2: crate::b::C as C"]);
        let module = ModuleSource::parse(source).unwrap();
        assert_eq!(module.files, ["kept"]);
        assert!(module.inline.is_empty());
    }

    #[test]
    fn items_and_modules_are_named() {
        let source = "mod a;\npub mod b { fn inner() {} }\npub struct C;\nconst fn d() {}\nstatic mut E: u8 = 0;\n\
                      macro_rules! f { () => {} }\nimpl C { fn g() {} }\nfn h() -> impl Sized + use<> {}";
        let module = ModuleSource::parse(source).unwrap();
        assert_eq!(module.files, ["a"]);
        assert_eq!(module.inline[0].0, "b");
        for name in ["C", "d", "E", "f", "h"] {
            assert!(module.items.contains(name), "{name}");
        }
        assert!(!module.items.contains("g") && !module.items.contains("inner"));
    }
}
