//! The counter-based random number generator Philox4x32-10.
//!
//! Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds over a counter.
pub fn philox4x32_10(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let halves = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    let ([mut a, mut b, mut c, mut d], [mut left, mut right]) = (counter, key);
    for _ in 0..10 {
        let (high_a, low_a) = halves(MULTIPLIERS[0], a);
        let (high_c, low_c) = halves(MULTIPLIERS[1], c);
        (a, b, c, d) = (high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a);
        left = left.wrapping_add(KEY_STEPS[0]);
        right = right.wrapping_add(KEY_STEPS[1]);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    // Known answers of the Random123 library.
    #[rstest]
    #[case([0; 2], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8])]
    #[case([u32::MAX; 2], [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd])]
    #[case(
        [0xa409_3822, 0x299f_31d0],
        [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
    )]
    fn known_answers(#[case] key: [u32; 2], #[case] counter: [u32; 4], #[case] expected: [u32; 4]) {
        assert_eq!(philox4x32_10(key, counter), expected);
    }
}
