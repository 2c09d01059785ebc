//! Parsers of values.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Parses a whole number of at least 1.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        other => other.map_err(|_| "must be a whole number".into()),
    }
}

/// Parses a whole number.
pub(super) fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "must be a whole number, 0 or more".into())
}

/// Parses how many of the most likely tokens to keep. 0 keeps all, and so does -1, as in vLLM.
pub(super) fn kept_tokens(text: &str) -> Result<u32, String> {
    if text == "-1" { Ok(0) } else { text.parse().map_err(|_| "must be -1, 0 or more".into()) }
}

/// Parses a number from 0 to 1.
pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 1".into()),
    }
}

/// Parses a whole number of at least 2.
pub(super) fn at_least_two(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0 | 1) => Err("must be at least 2: the time per token is measured between tokens".into()),
        other => other.map_err(|_| "must be a whole number".into()),
    }
}

/// A number of bytes, written as `20GB`, `1.5GiB`, `512MiB` or `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct MemorySize(pub(crate) u64);

/// The units of [`MemorySize`].
const UNITS: [(&str, f64); 9] = [
    ("KIB", 1024.0),
    ("MIB", 1_048_576.0),
    ("GIB", 1_073_741_824.0),
    ("TIB", 1_099_511_627_776.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("B", 1.0),
];

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.trim().to_ascii_uppercase();
        let unit = UNITS.iter().find_map(|(name, size)| Some((upper.strip_suffix(name)?, *size)));
        let (number, size) = unit.unwrap_or((&upper, 1.0));
        let digits = number.trim();
        let plain = !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || c == '.');
        let bytes = digits.parse::<f64>().ok().filter(|_| plain).map(|number| number * size);
        match bytes {
            Some(bytes) if (1.0..=u64::MAX as f64 / 2.0).contains(&bytes) => Ok(Self(bytes as u64)),
            Some(bytes) if bytes < 1.0 => Err("must be at least one byte".into()),
            Some(_) => Err("is more memory than can be counted".into()),
            None => Err("must be a number with a unit, such as 20GB, 512MiB or 1.5GiB".into()),
        }
    }
}

impl TryFrom<String> for MemorySize {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MemorySize> for String {
    fn from(size: MemorySize) -> Self {
        size.0.to_string()
    }
}

/// Parses the filter of a log, which is kept as it is written.
pub(crate) fn log_filter(text: &str) -> Result<String, String> {
    let filter = tracing_subscriber::EnvFilter::try_new(text);
    filter.map(|_| text.to_owned()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_one_keeps_all_tokens() {
        assert_eq!(["-1", "0", "40"].map(kept_tokens), [Ok(0), Ok(0), Ok(40)]);
        for text in ["-2", "1.5", "", "4294967296"] {
            assert_eq!(kept_tokens(text).expect_err(text), "must be -1, 0 or more");
        }
    }

    #[test]
    fn sizes_of_memory_have_units() {
        for (text, bytes) in [
            ("20GB", 20_000_000_000),
            ("20 gb", 20_000_000_000),
            ("1.5GiB", 3 << 29),
            ("512MiB", 512 << 20),
            ("64KB", 64_000),
            ("4096", 4096),
            ("7B", 7),
        ] {
            assert_eq!(text.parse(), Ok(MemorySize(bytes)), "{text}");
        }
        for (text, part) in [
            ("", "a number with a unit"),
            ("GB", "a number with a unit"),
            ("-1GB", "a number with a unit"),
            ("20 apples", "a number with a unit"),
            ("1e3", "a number with a unit"),
            ("inf", "a number with a unit"),
            ("0", "at least one byte"),
            ("0.0001KB", "at least one byte"),
            ("99999999999TB", "more memory than can be counted"),
        ] {
            let error = text.parse::<MemorySize>().expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
