//! Bounds on the source of a template, checked before it is parsed.
//!
//! The parser and the compiler of the template engine recurse into an expression for every operator, filter and attribute, and
//! into a condition for every `elif`. An untrusted template could overflow the stack that way, which ends the process. The
//! number of tokens of a tag bounds the depth of its expressions; the engine itself bounds the depth of parentheses and blocks.
//!
//! The compiler computes products of constants, such as `'a' * 100000000`, and keeps their results. What they can take is estimated
//! from the constants of their tags.

use crate::guarded::guarded;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

/// The maximum number of bytes of a template. The largest known templates have some 30 kB.
const MAX_BYTES: usize = 1 << 20;
/// The maximum number of tokens of a tag. Tags of known templates have less than 200.
const MAX_TAG_TOKENS: usize = 1000;
/// The maximum number of `elif` branches of a template.
const MAX_BRANCHES: usize = 250;

/// The maximum number of bytes of all products of constants, by an upper estimate.
const MAX_PRODUCTS: u64 = 32 << 20;
/// The number of bytes counted for an item of a list.
const ITEM: u64 = 32;

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
    let (mut in_tag, mut branches, mut products) = (0, 0, 0);
    let mut constants = Constants::default();
    let mut tokens = tokenize(source, false, syntax.clone());
    // The engine may panic where it names the place of an error, if that is past column 65,535; the parser does the same, guarded.
    while let Some(Some(token)) = guarded(|| tokens.next()) {
        let Ok((token, span)) = token else { return Ok(()) };
        let line = Some(usize::from(span.start_line));
        products = constants.add(&token).saturating_add(products);
        if products > MAX_PRODUCTS {
            let message = "it multiplies constants to too large a text or list".to_owned();
            return Err(Exceeded { line, message });
        }
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

/// The constants of a tag, which bound the size of its products.
#[derive(Debug, Default)]
struct Constants {
    /// The product of all numbers.
    factor: u64,
    /// The bytes of texts and lists.
    bytes: u64,
    multiplies: bool,
    /// The number before a power.
    last: Option<u64>,
    raises: bool,
}

impl Constants {
    /// Adds a token. At the end of a tag, returns the bytes that its products may take.
    fn add(&mut self, token: &Token<'_>) -> u64 {
        let mut number = None;
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => *self = Self::default(),
            Token::VariableEnd | Token::BlockEnd => {
                let made = std::mem::take(self);
                let factor = if made.multiplies { made.factor.max(1) } else { 0 };
                return factor.saturating_mul(made.bytes);
            }
            Token::Str(text) => self.bytes = self.bytes.saturating_add(text.len() as u64),
            Token::String(text) => self.bytes = self.bytes.saturating_add(text.len() as u64),
            Token::Comma | Token::BracketOpen => self.bytes = self.bytes.saturating_add(ITEM),
            Token::Int(value) => number = Some(*value),
            Token::Int128(value) => number = Some(u64::try_from(**value).unwrap_or(u64::MAX)),
            // A conversion of a float to an integer saturates.
            Token::Float(value) => number = Some(value.abs().ceil() as u64),
            Token::Mul => self.multiplies = true,
            Token::Pow => self.raises = true,
            _ => {}
        }
        if let Some(number) = number {
            // A sum is never larger than the product of its terms if none of these is below 2.
            let number = number.max(2);
            let base = self.last.replace(number).filter(|_| std::mem::take(&mut self.raises));
            let exponent = u32::try_from(number).unwrap_or(u32::MAX);
            let factor = base.map_or(number, |base| base.saturating_pow(exponent));
            self.factor = self.factor.max(1).saturating_mul(factor);
        }
        0
    }
}
