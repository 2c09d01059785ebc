//! The most likely tokens of a row of logits.

/// The `count` most likely tokens of a row of logits, with the logarithms of their probabilities: the most likely first, and the
/// lower token first on ties. `known` is a token whose probability the device has computed.
pub(super) fn top_tokens(logits: &[f32], count: usize, known: (u32, f32)) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, logit) in (0u32..).zip(logits.iter().copied()) {
        let full = top.len() == count;
        if logit.is_nan() || (full && top.last().is_none_or(|(_, last)| logit <= *last)) {
            continue;
        }
        let place = top.partition_point(|(_, other)| *other >= logit);
        top.insert(place, (token, logit));
        top.truncate(count);
    }
    let (token, log_probability) = known;
    let normaliser = logits.get(token as usize).map_or(0.0, |logit| logit - log_probability);
    for (other, logit) in &mut top {
        // The known token gets the value that the device computed, so that the reported values are identical.
        *logit = if *other == token { log_probability } else { *logit - normaliser };
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_tokens_are_in_order_with_their_log_probabilities() {
        let logits = [1.0, f32::NAN, 4.0, 3.0, 4.0, f32::NEG_INFINITY];
        let normaliser = 0.5;
        let known = (3, 3.0 - normaliser);
        let expected = [(2, 3.5), (4, 3.5), (3, 2.5)];
        assert_eq!(top_tokens(&logits, 3, known), expected);
        assert_eq!(top_tokens(&logits, 1, known), expected[..1]);
        assert_eq!(top_tokens(&logits, 0, known), []);
        assert_eq!(top_tokens(&logits, 10, known).len(), 5);
    }
}
