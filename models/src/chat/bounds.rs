//! Bounds on the source of a template, checked before it is parsed.
//!
//! The parser and the compiler of the template engine recurse into an expression for every operator, filter and attribute, and
//! into a condition for every `elif`. A template from a stranger could overflow the stack that way, which ends the process. The
//! number of tokens of a tag bounds the depth of its expressions; the engine itself bounds the depth of parentheses and blocks.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// The most bytes of a template. The largest known templates have some 30 kB.
const MAX_BYTES: usize = 1 << 20;
/// The most tokens of a tag. Tags of known templates have less than 200.
const MAX_TAG_TOKENS: usize = 1000;
/// The most `elif` of a template.
const MAX_BRANCHES: usize = 250;

/// A bound that a template exceeds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Exceeded {
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

/// Checks the source of a template. Sources that cannot be split into tokens are left to the parser, which names their error.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), Exceeded> {
    if source.len() > MAX_BYTES {
        let message = format!("it has {} bytes, but a template may have at most {MAX_BYTES}", source.len());
        return Err(Exceeded { line: None, message });
    }
    let (mut in_tag, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        let Ok((token, span)) = token else { return Ok(()) };
        let line = Some(usize::from(span.start_line));
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => in_tag = 0,
            Token::Ident("elif") if in_tag == 0 => branches += 1,
            _ => in_tag += 1,
        }
        if in_tag > MAX_TAG_TOKENS {
            let message = format!("this tag has more than {MAX_TAG_TOKENS} tokens");
            return Err(Exceeded { line, message });
        }
        if branches > MAX_BRANCHES {
            let message = format!("the template has more than {MAX_BRANCHES} branches (elif)");
            return Err(Exceeded { line, message });
        }
    }
    Ok(())
}
