//! Helpers to scan the token streams of Rust sources: attributes and items.

use proc_macro2::{Delimiter, Group, TokenTree};

/// The kinds of attributes that the checks distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttributeKind {
    /// A doc comment or `#[doc]`.
    Documentation,
    /// `#[cfg(test)]`: the item exists in tests only.
    TestOnly,
    /// Anything else.
    Other,
}

/// The kind of an attribute, given the contents of its brackets.
pub(crate) fn attribute_kind(attribute: &Group) -> AttributeKind {
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    if text.starts_with("doc=") || text.starts_with("doc(") {
        AttributeKind::Documentation
    } else if text == "cfg(test)" || text.starts_with("cfg(all(test,") {
        AttributeKind::TestOnly
    } else {
        AttributeKind::Other
    }
}

/// Skips one item with its attributes: up to and including its body in braces or its semicolon.
pub(crate) fn skip_item(tokens: &mut impl Iterator<Item = TokenTree>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return,
            TokenTree::Punct(punct) if punct.as_char() == ';' => return,
            _ => {}
        }
    }
}
