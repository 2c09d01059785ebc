//! Parsers of values.

/// Parses a whole number of at least 1.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        other => other.map_err(|_| "must be a whole number".into()),
    }
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
