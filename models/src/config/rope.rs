//! Rotary embeddings: base, scaling for long context, and the frequencies computed from them.

pub(crate) mod json;

use super::{ConfigError, Result, fields::is_positive, limits};
use dsrun_core::op::RopePairing;
use std::f64::consts::PI;

/// A rotary embedding: it rotates pairs of elements of a head by angles proportional to the position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base: before scaling, pair `i` rotates by `theta^(-2 i / dimensions)` radians per position.
    pub theta: f64,
    /// The number of rotated elements of a head, from its first on; even. The others pass unchanged.
    pub dimensions: usize,
    /// The scaling of the frequencies for long context.
    pub scaling: RopeScaling,
    /// Which elements of a head form a pair; it depends on the row order of the stored weights.
    pub pairing: RopePairing,
    /// The factor that multiplies rotated elements: the attention factor of YaRN and LongRoPE, otherwise 1.
    pub scale: f32,
}

/// A scaling of frequencies for sequences longer than those of the pre-training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Divides all frequencies by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Divides low frequencies and keeps high ones, as Llama 3.1 does; frequencies in between are blended.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Pairs that rotate at most this often within the original context are divided.
        low_frequency_factor: f64,
        /// Pairs that rotate at least this often within the original context are kept.
        high_frequency_factor: f64,
        /// The context length of the pre-training, in tokens.
        original_context: usize,
    },
    /// Divides low frequencies and keeps high ones, as YaRN does; it blends by the index of the pair.
    Yarn {
        /// The factor.
        factor: f64,
        /// Pairs that rotate at least this often within the original context are kept.
        beta_fast: f64,
        /// Pairs that rotate at most this often within the original context are divided.
        beta_slow: f64,
        /// Whether the blend begins and ends at whole pairs.
        truncate: bool,
        /// The context length of the pre-training, in tokens.
        original_context: usize,
    },
    /// Divides each frequency by its own divisor, from one of two lists, as LongRoPE does.
    Long {
        /// The divisors for contexts up to the original one.
        short: Vec<f32>,
        /// The divisors for longer contexts.
        long: Vec<f32>,
        /// The context length of the pre-training, in tokens.
        original_context: usize,
    },
    /// Divides each frequency by its own divisor.
    Divisors(Vec<f32>),
}

/// The two rotary embeddings of a model that has one per kind of attention.
#[derive(Clone, Debug)]
pub(crate) struct RopesByKind {
    /// The embedding of layers with full attention.
    pub(crate) full: Rope,
    /// The embedding of layers with a sliding window.
    pub(crate) sliding: Rope,
}

impl Rope {
    /// Returns the rotary embedding of whole heads without scaling, which pairs the halves of a head.
    pub fn plain(theta: f64, head_dim: usize) -> Self {
        Self {
            theta,
            dimensions: head_dim,
            scaling: RopeScaling::None,
            pairing: RopePairing::Halves,
            scale: 1.0,
        }
    }

    /// Computes the radians by which each pair rotates per position: `dimensions / 2` numbers.
    ///
    /// `context` is the length of the longest sequence. LongRoPE chooses its divisors by it, once for all sequences, because
    /// cached keys cannot change their rotation when a sequence grows.
    ///
    /// The numbers are computed in f64 and rounded once, so they may differ in the last bit from implementations that
    /// compute powers in f32.
    ///
    /// Sources: Llama 3.1 model code (Meta, 2024), `apply_scaling`; Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024).
    pub fn inverse_frequencies(&self, context: usize) -> Vec<f32> {
        let dimensions = self.dimensions as f64;
        let plain = (0..self.dimensions / 2).map(|pair| self.theta.powf(-((2 * pair) as f64) / dimensions));
        let divided = |frequency: f64, divisors: &[f32], pair: usize| {
            frequency / divisors.get(pair).map_or(1.0, |divisor| f64::from(*divisor))
        };
        let scaled = plain.enumerate().map(|(pair, frequency)| match &self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let turns = *original_context as f64 * frequency / (2.0 * PI);
                let band = high_frequency_factor - low_frequency_factor;
                let kept = match band > 0.0 {
                    true => ((turns - low_frequency_factor) / band).clamp(0.0, 1.0),
                    false => f64::from(turns >= *low_frequency_factor),
                };
                frequency * (kept + (1.0 - kept) / factor)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_context } => {
                // The fractional index of the pair that rotates this often within the original context.
                let pair_of = |rotations: f64| {
                    dimensions * (*original_context as f64 / (rotations * 2.0 * PI)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (low, high) = (pair_of(*beta_fast), pair_of(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(dimensions - 1.0));
                let band = if high == low { 0.001 } else { high - low };
                let divided = ((pair as f64 - low) / band).clamp(0.0, 1.0);
                frequency * (1.0 - divided + divided / factor)
            }
            RopeScaling::Long { short, long, original_context } => {
                divided(frequency, if context > *original_context { long } else { short }, pair)
            }
            RopeScaling::Divisors(divisors) => divided(frequency, divisors, pair),
        });
        scaled.map(|frequency| frequency as f32).collect()
    }

    /// Checks the embedding for heads of size `head_dim`, a field that the file calls `name`.
    pub(super) fn validate(&self, name: Option<&'static str>, head_dim: usize) -> Result<()> {
        if self.dimensions == head_dim && !head_dim.is_multiple_of(2) {
            let name = name.unwrap_or("the head size");
            return Err(ConfigError::value(name, head_dim, "even: its elements are rotated in pairs"));
        }
        if self.dimensions == 0 || self.dimensions > head_dim || !self.dimensions.is_multiple_of(2) {
            let expected = format!("an even number from 2 to {head_dim}, the head size");
            return Err(ConfigError::value("the number of rotated elements", self.dimensions, expected));
        }
        let positive = |field: &str, number: f64| match is_positive(number) {
            true => Ok(()),
            false => Err(ConfigError::value(field, number, "a number above 0, and neither tiny nor huge")),
        };
        let context = |original: usize| match (1..=limits::CONTEXT).contains(&original) {
            true => Ok(()),
            false => {
                let expected = format!("a whole number from 1 to {}", limits::CONTEXT);
                Err(ConfigError::value("original_max_position_embeddings", original, expected))
            }
        };
        let list = |divisors: &[f32]| {
            let pairs = self.dimensions / 2;
            if divisors.len() != pairs {
                let expected = format!("{pairs} long, one for each rotated pair");
                return Err(ConfigError::value(
                    "rope divisors",
                    format!("{} long", divisors.len()),
                    expected,
                ));
            }
            divisors.iter().try_for_each(|divisor| positive("rope divisor", f64::from(*divisor)))
        };
        positive("rope theta", self.theta)?;
        positive("the rope attention factor", f64::from(self.scale))?;
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("rope factor", *factor)?,
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                positive("rope factor", *factor)?;
                positive("low_freq_factor", *low_frequency_factor)?;
                positive("high_freq_factor", *high_frequency_factor)?;
                if high_frequency_factor < low_frequency_factor {
                    let expected = format!("at least {low_frequency_factor} (low_freq_factor)");
                    return Err(ConfigError::value("high_freq_factor", high_frequency_factor, expected));
                }
                context(*original_context)?;
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, .. } => {
                positive("rope factor", *factor)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                if self.theta <= 1.0 {
                    return Err(ConfigError::value("rope theta", self.theta, "above 1 with YaRN"));
                }
                if beta_fast < beta_slow {
                    let expected = format!("at least {beta_slow} (beta_slow)");
                    return Err(ConfigError::value("beta_fast", beta_fast, expected));
                }
                context(*original_context)?;
            }
            RopeScaling::Long { short, long, original_context } => {
                list(short)?;
                list(long)?;
                context(*original_context)?;
            }
            RopeScaling::Divisors(divisors) => list(divisors)?,
        }
        // With a huge base and a long head, frequencies can still underflow to 0 in f32.
        let frequencies = [1, limits::CONTEXT].map(|context| self.inverse_frequencies(context));
        match frequencies.iter().flatten().find(|frequency| !is_positive(f64::from(**frequency))) {
            Some(frequency) => Err(ConfigError::value("a rotary frequency", frequency, "a number above 0")),
            None => Ok(()),
        }
    }
}

/// The default of [`RopeScaling::Yarn`]'s `beta_fast`.
pub(crate) const BETA_FAST: f64 = 32.0;
/// The default of [`RopeScaling::Yarn`]'s `beta_slow`.
pub(crate) const BETA_SLOW: f64 = 1.0;

/// The default attention factor of YaRN.
pub(crate) fn yarn_attention_factor(factor: f64) -> f64 {
    yarn_gain(factor, 1.0)
}

/// The attention factor of YaRN that grows with the logarithm of `factor` by this gain.
pub(crate) fn yarn_gain(factor: f64, gain: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * gain * factor.ln() + 1.0 }
}

/// The default attention factor of LongRoPE.
pub(crate) fn long_attention_factor(factor: f64, original_context: usize) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original_context as f64).ln()).sqrt() }
}
