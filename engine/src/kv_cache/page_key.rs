//! The key of a page in the store of pages: the same in every run of the same model.

use sha2::{Digest, Sha256};
use std::fmt;

/// Stands for a model, the tokens of a page and all tokens before them. It is a hash chain, so equal keys are equal prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageKey {
    hash: [u8; 32],
    /// The number of pages in front of this one, plus one; 0 for the empty prefix.
    depth: u32,
}

impl PageKey {
    /// The key of the empty prefix of a model. `model` is a hash of all that a page depends on besides tokens.
    pub(crate) fn root(model: [u8; 32]) -> Self {
        Self { hash: model, depth: 0 }
    }

    /// The key of the empty prefix of requests with a salt.
    pub(crate) fn salted(self, salt: &str) -> Self {
        Self { hash: self.chained("salt", salt.as_bytes()), depth: 0 }
    }

    /// The key of the page that has these tokens after the prefix.
    pub(crate) fn after(self, tokens: &[i32]) -> Self {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Self { hash: self.chained("page", &bytes), depth: self.depth.saturating_add(1) }
    }

    fn chained(&self, kind: &str, bytes: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(kind);
        hash.update(self.hash);
        hash.update(bytes);
        hash.finalize().into()
    }

    /// The hash.
    pub(crate) fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// The number of pages in front of this one, plus one.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }
}

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hash.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageKey({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_model_salt_tokens_and_all_that_precedes() {
        let root = PageKey::root([1; 32]);
        let keys = [
            root,
            PageKey::root([2; 32]),
            root.salted(""),
            root.salted("a"),
            root.after(&[1, 2]),
            root.after(&[2, 1]),
            root.after(&[1, 2, 3]),
            root.salted("a").after(&[1, 2]),
            root.after(&[1, 2]).after(&[1, 2]),
            PageKey::root([2; 32]).after(&[1, 2]),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert_eq!(keys.iter().position(|other| other.hash() == key.hash()), Some(index));
        }
        assert_eq!((keys[8].depth(), keys[8]), (2, root.after(&[1, 2]).after(&[1, 2])));
        assert_eq!(root.to_string(), "01".repeat(32));
    }
}
