//! The two ways in which vocabularies write bytes that are not text.

use std::sync::LazyLock;

/// The byte behind each character of a byte-level vocabulary.
///
/// GPT-2 writes every byte as one visible character: the printable ones of Latin-1 as themselves, the others, in
/// order, from U+0100 on. So `Ġ` (U+0120) is a space.
static BYTE_OF_CHARACTER: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
    let mut table = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let visible = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let character = if visible { usize::from(byte) } else { next };
        if !visible {
            next += 1;
        }
        table[character] = Some(byte);
    }
    table
});

/// The bytes that a byte-level token stands for. A token with a character outside that alphabet (an added token such
/// as `<｜User｜>`) stands for its own text.
pub(super) fn from_byte_level(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> =
        token.chars().map(|character| BYTE_OF_CHARACTER.get(character as usize).copied().flatten()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a byte token, `<0x0A>`.
pub(super) fn from_byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// How a vocabulary writes the byte token of `byte`.
pub(super) fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("Ġthe", b" the")]
    #[case("Ċ", b"\n")]
    #[case("Ã©", "é".as_bytes())]
    #[case("\u{143}", &[0xAD])]
    #[case("<｜x｜>", "<｜x｜>".as_bytes())]
    #[case("", b"")]
    fn byte_level_tokens(#[case] token: &str, #[case] expected: &[u8]) {
        assert_eq!(from_byte_level(token), expected);
    }

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = BYTE_OF_CHARACTER.iter().flatten().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[rstest]
    #[case("<0x0A>", Some(10))]
    #[case("<0xff>", Some(255))]
    #[case("<0x+1>", None)]
    #[case("<0x1>", None)]
    #[case("<0xé>", None)]
    #[case("0x0A", None)]
    fn byte_tokens(#[case] token: &str, #[case] expected: Option<u8>) {
        assert_eq!(from_byte_token(token), expected);
        if let Some(byte) = expected {
            assert_eq!(byte_token(byte).to_lowercase(), token.to_lowercase());
        }
    }
}
