//! The random numbers of op `sample`.

/// The random number `v` of op [`sample`](dsrun_core::op::Sample), between 0 and 1, for a candidate token at a position.
pub fn uniform(seed: [u32; 2], token: u32, position: u32) -> f64 {
    let [word, ..] = philox4x32_10(seed, [token, position, 0, 0]);
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// The counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): four words and ten
/// rounds.
fn philox4x32_10(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let wide = u64::from(a) * u64::from(b);
        ((wide >> 32) as u32, wide as u32)
    };
    for _ in 0..10 {
        let (high_0, low_0) = product(0xD251_1F53, counter[0]);
        let (high_2, low_2) = product(0xCD9E_8D57, counter[2]);
        counter = [high_2 ^ counter[1] ^ key[0], low_2, high_0 ^ counter[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Known answers published with the Random123 library.
    #[rstest]
    #[case([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8])]
    #[case([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd])]
    fn philox_gives_the_known_answers(
        #[case] key: [u32; 2],
        #[case] counter: [u32; 4],
        #[case] words: [u32; 4],
    ) {
        assert_eq!(philox4x32_10(key, counter), words);
    }
}
