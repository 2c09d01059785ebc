//! The inner loops over f32: dot products, weighted sums, exponentials.
//!
//! Each loop is written once, over fixed-size groups of numbers that compilers turn into vector instructions, and compiled
//! three times on x86-64: for every processor, for those with AVX2 and fused multiply-add, and for those with AVX-512, which is
//! detected when the program runs. Dot products have a form of their own there ([`x86`]). Elsewhere the portable form is all there
//! is; on AArch64 it is compiled to NEON and fused multiply-add, which every processor has.

#[cfg(target_arch = "x86_64")]
mod x86;

/// Numbers of a group: two AVX registers.
const GROUP: usize = 16;

/// Whether the portable form may use `mul_add`: without an instruction for it, it is a slow library call.
const PORTABLE_FMA: bool = cfg!(target_arch = "aarch64");

/// Declares functions that choose between the forms of a body when they are called.
macro_rules! dispatched {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $body:ident;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub(crate) fn $name($($argument: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn fast($($argument: $kind),*) $(-> $result)? {
                    $body::<true>($($argument),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
                fn faster($($argument: $kind),*) $(-> $result)? {
                    $body::<true>($($argument),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
                        // SAFETY: the processor has all of them; both need AVX-512 F.
                        return unsafe { faster($($argument),*) };
                    }
                    // SAFETY: the processor has both features.
                    return unsafe { fast($($argument),*) };
                }
            }
            $body::<PORTABLE_FMA>($($argument),*)
        }
    )*};
}

dispatched! {
    /// The sum of all elements.
    fn sum(values: &[f32]) -> f32 = sum_body;
    /// The largest element but for NaN; minus infinity if there is none.
    fn largest(values: &[f32]) -> f32 = largest_body;
    /// `values[i] = exp(values[i] - shift)`; gives their sum.
    fn exp_shifted(values: &mut [f32], shift: f32) -> f32 = exp_shifted_body;
    /// `sum_i exp(values[i] - shift)`, leaving NaN out.
    fn sum_exp_shifted(values: &[f32], shift: f32) -> f32 = sum_exp_shifted_body;
    /// `values[i] *= factor`.
    fn scale(values: &mut [f32], factor: f32) = scale_body;
    /// `out[i] = x[i] / (1 + exp(-x[i]))`.
    fn silu(x: &[f32], out: &mut [f32]) = silu_body;
    /// `out[i] = x[i] / scale`, rounded to the nearest integer, ties to even; gives the scale, the 127th part of the largest size of
    /// an element. If that is 0, so are all integers.
    fn quantise(x: &[f32], out: &mut [i8]) -> f32 = quantise_body;
}

/// The sets of instructions that loops here and in `packed` are also compiled for, and whether this processor has them.
pub(crate) fn instruction_sets() -> impl Iterator<Item = (&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    let sets = [
        ("AVX2", is_x86_feature_detected!("avx2")),
        ("FMA", is_x86_feature_detected!("fma")),
        ("F16C", is_x86_feature_detected!("f16c")),
        ("AVX-512 F", is_x86_feature_detected!("avx512f")),
        ("AVX-512 VNNI", is_x86_feature_detected!("avx512vnni")),
        ("AVX-VNNI", is_x86_feature_detected!("avxvnni")),
        ("AMX", crate::lanes::Amx::detect().is_some()),
    ];
    #[cfg(target_arch = "aarch64")]
    let sets = [
        ("NEON", std::arch::is_aarch64_feature_detected!("neon")),
        ("DotProd", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("I8MM", std::arch::is_aarch64_feature_detected!("i8mm")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let sets = [];
    sets.into_iter()
}

#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds up a group pairwise.
#[inline(always)]
fn total(mut group: [f32; GROUP]) -> f32 {
    let mut half = GROUP / 2;
    while half > 0 {
        for index in 0..half {
            group[index] += group[index + half];
        }
        half /= 2;
    }
    group[0]
}

#[inline(always)]
fn dot_body<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let (a_groups, a_rest) = a.as_chunks::<GROUP>();
    let (b_groups, b_rest) = b.as_chunks::<GROUP>();
    let mut sums = [0.0; GROUP];
    for (a, b) in a_groups.iter().zip(b_groups) {
        for lane in 0..GROUP {
            sums[lane] = multiply_add::<FMA>(a[lane], b[lane], sums[lane]);
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(0.0, |sum, (a, b)| multiply_add::<FMA>(*a, *b, sum));
    total(sums) + rest
}

#[inline(always)]
fn sum_body<const FMA: bool>(values: &[f32]) -> f32 {
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut sums = [0.0; GROUP];
    for group in groups {
        for lane in 0..GROUP {
            sums[lane] += group[lane];
        }
    }
    total(sums) + rest.iter().sum::<f32>()
}

#[inline(always)]
fn largest_body<const FMA: bool>(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut found = [f32::NEG_INFINITY; GROUP];
    for group in groups {
        for lane in 0..GROUP {
            found[lane] = larger(found[lane], group[lane]);
        }
    }
    found.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| larger(a, *b))
}

/// `sum_i a[i] * b[i]`.
///
/// Compilers do not vectorise dot products well, so x86-64 has a hand-written version.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both features.
        return unsafe { x86::dot(a, b) };
    }
    dot_body::<PORTABLE_FMA>(a, b)
}

/// The exponential function, to about one unit in the last place.
///
/// `x = n ln 2 + r` with whole `n` and `|r| <= ln 2 / 2`, so `exp(x) = 2^n exp(r)`, and a Taylor polynomial of degree 7 is
/// off by less than 2^-27 there. NaN stays NaN, large numbers become infinite, very negative ones 0.
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding this rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with so few digits that its products with n are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const TAYLOR: [f32; 8] =
        [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = multiply_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = multiply_add::<FMA>(n, -LN_2_LOW, multiply_add::<FMA>(n, -LN_2_HIGH, x));
    let mut polynomial = TAYLOR[0];
    for coefficient in &TAYLOR[1..] {
        polynomial = multiply_add::<FMA>(polynomial, r, *coefficient);
    }
    // 2^n in two factors, because it alone may be too large or too small for an f32.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    polynomial * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
fn exp_shifted_body<const FMA: bool>(values: &mut [f32], shift: f32) -> f32 {
    for value in values.iter_mut() {
        *value = exp::<FMA>(*value - shift);
    }
    sum_body::<FMA>(values)
}

#[inline(always)]
fn sum_exp_shifted_body<const FMA: bool>(values: &[f32], shift: f32) -> f32 {
    let term = |value: f32| if value.is_nan() { 0.0 } else { exp::<FMA>(value - shift) };
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut sums = [0.0; GROUP];
    for group in groups {
        for lane in 0..GROUP {
            sums[lane] += term(group[lane]);
        }
    }
    total(sums) + rest.iter().map(|value| term(*value)).sum::<f32>()
}

/// The largest size of an element but for NaN.
#[inline(always)]
fn largest_size(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut found = [0.0; GROUP];
    for group in groups {
        for lane in 0..GROUP {
            found[lane] = larger(found[lane], group[lane].abs());
        }
    }
    found.iter().copied().chain(rest.iter().map(|value| value.abs())).fold(0.0, larger)
}

#[inline(always)]
fn quantise_body<const FMA: bool>(x: &[f32], out: &mut [i8]) -> f32 {
    // Added to a number below 2^22, it rounds it to the nearest integer, ties to even, which is then in the lowest bits: it is
    // 1.5 * 2^23, where numbers are one apart.
    const ROUND: f32 = 12_582_912.0;
    let scale = largest_size(x) / 127.0;
    if scale == 0.0 {
        out.fill(0);
        return scale;
    }
    for (out, x) in out.iter_mut().zip(x) {
        // Clamped before it is rounded: that is the same, and `ROUND` needs it small. NaN becomes -127.
        let value = x / scale;
        let value = if value > -127.0 { value } else { -127.0 };
        let value = if value < 127.0 { value } else { 127.0 };
        *out = (value + ROUND).to_bits() as i8;
    }
    scale
}

#[inline(always)]
fn scale_body<const FMA: bool>(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
}

#[inline(always)]
fn silu_body<const FMA: bool>(x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x / (1.0 + exp::<FMA>(-x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn exp_is_accurate_and_covers_all_numbers() {
        let mut worst = 0f64;
        for step in -8_700..8_800 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            worst = worst.max(((f64::from(exp::<false>(x)) - expected) / expected).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst}");
        assert_eq!(exp::<false>(0.0), 1.0);
        assert_eq!(exp::<false>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<false>(f32::INFINITY), f32::INFINITY);
        assert!(exp::<false>(f32::NAN).is_nan());
        let tiny = exp::<false>(-100.0);
        assert!((f64::from(tiny) - (-100f64).exp()).abs() < 1e-45, "{tiny}");
    }

    #[rstest]
    fn sums_agree_with_f64(#[values(0, 1, 15, 16, 17, 64, 100)] count: usize) {
        let (a, b) = (numbers(count, 1), numbers(count, 2));
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((f64::from(dot(&a, &b)) - exact).abs() < 1e-5);
        assert!((f64::from(dot_body::<false>(&a, &b)) - exact).abs() < 1e-5);
        let exact: f64 = a.iter().map(|a| f64::from(*a)).sum();
        assert!((f64::from(sum(&a)) - exact).abs() < 1e-5);
    }

    #[test]
    fn nan_is_kept_or_left_out_as_documented() {
        let mut values = [0.0, f32::NAN, 1.0];
        assert_eq!((largest(&values), largest(&[f32::NAN; 20])), (1.0, f32::NEG_INFINITY));
        assert_eq!(sum_exp_shifted(&values, 1.0), sum_exp_shifted(&[0.0, 1.0], 1.0));
        assert!(exp_shifted(&mut values, 1.0).is_nan());
        let mut out = [0.0; 3];
        silu(&[f32::NAN, f32::NEG_INFINITY, 200.0], &mut out);
        assert!(out[0].is_nan());
        assert_eq!(out[2], 200.0);
    }

    #[test]
    fn rounds_to_nearest_even_within_127() {
        let x = [127.0, 0.5, 1.5, 2.5, -0.5, -2.5, -126.5, 3.49, -127.0];
        let mut out = [1; 9];
        assert_eq!(quantise(&x, &mut out), 1.0);
        assert_eq!(out, [127, 0, 2, 2, 0, -2, -126, 3, -127]);
    }

    #[test]
    fn a_row_with_scale_0_is_zeros() {
        let mut out = [1; 3];
        assert_eq!(quantise(&[0.0, -0.0, 0.0], &mut out), 0.0);
        assert_eq!(out, [0; 3]);
        // The largest is so small that its 127th part is 0.
        assert_eq!(quantise(&[f32::from_bits(3), 0.0, 0.0], &mut out), 0.0);
        assert_eq!(out, [0; 3]);
    }
}
