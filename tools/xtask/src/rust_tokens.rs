//! Attributes and items in the token streams of Rust sources.

use proc_macro2::{Delimiter, Group, TokenTree};

/// What an attribute says of the item behind it, as far as the checks are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttributeKind {
    /// Documentation.
    Documentation,
    /// The item exists in tests only.
    TestOnly,
    /// Anything else.
    Other,
}

/// The kind of an attribute, given what is in its brackets.
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

/// Steps over one item: up to its body in braces or its semicolon. Attributes before it are stepped over with it.
pub(crate) fn skip_item(tokens: &mut impl Iterator<Item = TokenTree>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return,
            TokenTree::Punct(punct) if punct.as_char() == ';' => return,
            _ => {}
        }
    }
}
