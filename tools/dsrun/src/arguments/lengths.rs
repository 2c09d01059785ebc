//! Distributions of the lengths of prompts and answers.

use rand::Rng;
use std::{fmt, str::FromStr};

/// A distribution of lengths in tokens. Written `512`, `uniform:100-900` or `normal:2600/780` (mean and deviation).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lengths {
    /// A constant length.
    Fixed(usize),
    /// A uniform distribution, both ends included.
    Uniform(usize, usize),
    /// A normal distribution, rounded, at least 1.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        deviation: f64,
    },
}

impl Lengths {
    /// Draws a length.
    pub(crate) fn draw(&self, random: &mut impl Rng) -> usize {
        match *self {
            Self::Fixed(length) => length,
            Self::Uniform(low, high) => random.random_range(low..=high),
            Self::Normal { mean, deviation } => {
                // The transform of Box and Muller (1958). `1 - u` is above 0, so its logarithm is finite.
                let radius = (-2.0 * (1.0 - random.random::<f64>()).ln()).sqrt();
                let angle = std::f64::consts::TAU * random.random::<f64>();
                (mean + deviation * radius * angle.cos()).round().max(1.0) as usize
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("`{text}` is not a length; write one such as 512, uniform:100-900 or normal:2600/780");
        let lengths = if let Some(range) = text.strip_prefix("uniform:") {
            let (low, high) = range.split_once('-').ok_or_else(wrong)?;
            Self::Uniform(low.parse().map_err(|_| wrong())?, high.parse().map_err(|_| wrong())?)
        } else if let Some(bell) = text.strip_prefix("normal:") {
            let (mean, deviation) = bell.split_once('/').ok_or_else(wrong)?;
            Self::Normal {
                mean: mean.parse().map_err(|_| wrong())?,
                deviation: deviation.parse().map_err(|_| wrong())?,
            }
        } else {
            Self::Fixed(text.parse().map_err(|_| wrong())?)
        };
        let sensible = match lengths {
            Self::Fixed(length) => length > 0,
            Self::Uniform(low, high) => 0 < low && low <= high,
            // A length beyond a million tokens is a typing error.
            Self::Normal { mean, deviation } => (1.0..1e6).contains(&mean) && (0.0..1e6).contains(&deviation),
        };
        if sensible {
            Ok(lengths)
        } else {
            Err(format!("`{text}`: lengths must be at least 1, with the smaller one first"))
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => write!(formatter, "{length}"),
            Self::Uniform(low, high) => write!(formatter, "uniform:{low}-{high}"),
            Self::Normal { mean, deviation } => write!(formatter, "normal:{mean}/{deviation}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::StdRng};
    use rstest::rstest;

    #[rstest]
    #[case("512", Lengths::Fixed(512))]
    #[case("uniform:100-900", Lengths::Uniform(100, 900))]
    #[case("normal:2600/780", Lengths::Normal { mean: 2600.0, deviation: 780.0 })]
    fn lengths_parse_as_they_display(#[case] text: &str, #[case] lengths: Lengths) {
        assert_eq!(text.parse::<Lengths>().as_ref(), Ok(&lengths));
        assert_eq!(lengths.to_string(), text);
    }

    #[rstest]
    fn invalid_lengths_are_refused(
        #[values(
            "",
            "0",
            "-1",
            "uniform:5",
            "uniform:9-1",
            "uniform:0-3",
            "normal:1",
            "normal:nan/1",
            "normal:5/-1"
        )]
        text: &str,
    ) {
        assert!(text.parse::<Lengths>().is_err());
    }

    #[test]
    fn draws_have_the_given_mean_and_deviation() {
        let mut random = StdRng::seed_from_u64(7);
        let bell = Lengths::Normal { mean: 1000.0, deviation: 100.0 };
        let draws: Vec<f64> = (0..20_000).map(|_| bell.draw(&mut random) as f64).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        // Five standard errors: 100 / sqrt(20000) of the mean, 100 / sqrt(40000) of the deviation.
        assert!((mean - 1000.0).abs() < 3.6, "{mean}");
        assert!((variance.sqrt() - 100.0).abs() < 2.6, "{variance}");
        let even = Lengths::Uniform(3, 5);
        let draws: Vec<usize> = (0..100).map(|_| even.draw(&mut random)).collect();
        assert!([3, 4, 5].iter().all(|length| draws.contains(length)));
        assert!(draws.iter().all(|length| (3..=5).contains(length)));
    }
}
