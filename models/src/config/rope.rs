//! The rotary embedding of a model: its base, its scaling for long context, and the frequencies that follow.

use super::{
    ConfigError, Result,
    fields::{Fields, is_positive, shortened},
    limits,
};
use dsrun_core::op::RopePairing;
use std::f64::consts::PI;

/// How the positions of tokens are turned into rotations.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base: pair `i` of a head of `d` turns by `theta^(-2 i / d)` per position, before scaling.
    pub theta: f64,
    /// How the frequencies are changed for long context.
    pub scaling: RopeScaling,
    /// Which elements of a head form a pair, as the weights are stored.
    pub pairing: RopePairing,
}

/// How frequencies are changed for texts longer than those of the pre-training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by the factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: pairs that turn often within the original context are kept, those that turn rarely are divided by the
    /// factor, those between are blended.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Pairs with at most so many turns are divided.
        low_frequency_factor: f64,
        /// Pairs with at least so many turns are kept.
        high_frequency_factor: f64,
        /// The context of the pre-training, in tokens.
        original_context: usize,
    },
    /// Each is divided by a number of its own, from the file.
    Divisors(Vec<f32>),
}

impl Rope {
    /// Radians that each pair of a head of `head_dim` turns per position: `head_dim / 2` numbers.
    ///
    /// They are computed in f64 and rounded once, so they may differ in the last bit from implementations that compute
    /// powers in f32.
    ///
    /// Source of the Llama 3 formula: Llama 3.1 model code (Meta, 2024), `apply_scaling`.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let pairs = head_dim / 2;
        let plain = (0..pairs).map(|pair| self.theta.powf(-((2 * pair) as f64) / head_dim as f64));
        let scaled = plain.enumerate().map(|(pair, frequency)| match &self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let turns = *original_context as f64 * frequency / (2.0 * PI);
                let band = high_frequency_factor - low_frequency_factor;
                let kept = ((turns - low_frequency_factor) / band).clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
            RopeScaling::Divisors(divisors) => {
                frequency / divisors.get(pair).map_or(1.0, |divisor| f64::from(*divisor))
            }
        });
        scaled.map(|frequency| frequency as f32).collect()
    }

    pub(super) fn validate(&self, head_dim: usize) -> Result<()> {
        let positive = |field: &str, number: f64| match is_positive(number) {
            true => Ok(()),
            false => Err(ConfigError::value(field, number, "a number above 0")),
        };
        positive("rope theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("rope factor", *factor)?,
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                positive("rope factor", *factor)?;
                positive("low_freq_factor", *low_frequency_factor)?;
                positive("high_freq_factor", *high_frequency_factor)?;
                if high_frequency_factor <= low_frequency_factor {
                    let expected = format!("above {low_frequency_factor} (low_freq_factor)");
                    return Err(ConfigError::value("high_freq_factor", high_frequency_factor, expected));
                }
                if *original_context == 0 || *original_context > limits::CONTEXT {
                    let expected = format!("a whole number from 1 to {}", limits::CONTEXT);
                    let field = "original_max_position_embeddings";
                    return Err(ConfigError::value(field, original_context, expected));
                }
            }
            RopeScaling::Divisors(divisors) => {
                if divisors.len() != head_dim / 2 {
                    let expected = format!("{} long, half of a head", head_dim / 2);
                    return Err(ConfigError::value(
                        "rope divisors",
                        format!("{} long", divisors.len()),
                        expected,
                    ));
                }
                divisors.iter().try_for_each(|divisor| positive("rope divisor", f64::from(*divisor)))?;
            }
        }
        // A huge base times a long head can still leave f32; a frequency of 0 would never turn.
        match self.inverse_frequencies(head_dim).iter().find(|frequency| !is_positive(f64::from(**frequency)))
        {
            Some(frequency) => Err(ConfigError::value("a rotary frequency", frequency, "a number above 0")),
            None => Ok(()),
        }
    }
}

/// The fields a rope table may have; each kind reads some of them.
const KNOWN: [&str; 8] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
];

/// Reads the rotary embedding in both spellings: `rope_theta` beside `rope_scaling`, and the table `rope_parameters` that
/// holds everything. A table `rope_scaling` that is not empty replaces `rope_parameters` altogether, and a theta inside
/// of the table wins over the one beside it.
pub(super) fn read(fields: Fields<'_>, architecture: &'static str, context: usize) -> Result<Rope> {
    let beside = fields.positive("rope_theta")?;
    whole_head(fields)?;
    let scaling_table = fields.object("rope_scaling")?;
    let parameters = fields.object("rope_parameters")?;
    let Some(table) = scaling_table.or(parameters) else {
        return Ok(Rope {
            theta: beside.unwrap_or(10_000.0),
            scaling: RopeScaling::None,
            pairing: RopePairing::Halves,
        });
    };
    let kind = kind(table)?;
    if let Some((field, value)) = table.present().find(|(field, _)| !KNOWN.contains(field)) {
        let (field, value) = (table.path(field), shortened(value));
        return Err(ConfigError::Unknown { field, value, architecture });
    }
    whole_head(table)?;
    let theta = table.positive("rope_theta")?.or(beside).unwrap_or(10_000.0);
    let scaling = match kind {
        Kind::Default => RopeScaling::None,
        Kind::Linear => RopeScaling::Linear { factor: table.required_positive("factor")? },
        Kind::Llama3 => RopeScaling::Llama3 {
            factor: table.required_positive("factor")?,
            low_frequency_factor: table.required_positive("low_freq_factor")?,
            high_frequency_factor: table.required_positive("high_freq_factor")?,
            original_context: table
                .size("original_max_position_embeddings", 1, limits::CONTEXT)?
                .unwrap_or(context),
        },
    };
    Ok(Rope { theta, scaling, pairing: RopePairing::Halves })
}

enum Kind {
    Default,
    Linear,
    Llama3,
}

/// The kind of scaling. Where a table has both of its names, readers disagree on which one wins.
fn kind(table: Fields<'_>) -> Result<Kind> {
    let (new, old) = (table.text("rope_type")?, table.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(ConfigError::Contradiction {
            first: format!("{} = \"{new}\"", table.path("rope_type")),
            second: format!("{} = \"{old}\"", table.path("type")),
        });
    }
    match new.or(old) {
        None | Some("default") => Ok(Kind::Default),
        Some("linear") => Ok(Kind::Linear),
        Some("llama3") => Ok(Kind::Llama3),
        Some(other) => {
            let field = table.path(if new.is_some() { "rope_type" } else { "type" });
            let reason = "rotary embeddings can be scaled as default, linear or llama3";
            Err(ConfigError::unsupported(field, shortened(&other.into()), reason))
        }
    }
}

/// Only whole heads are rotated in these families.
fn whole_head(fields: Fields<'_>) -> Result<()> {
    match fields.positive("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(factor) => {
            let reason = "heads are rotated as a whole (1)";
            Err(ConfigError::unsupported(fields.path("partial_rotary_factor"), factor, reason))
        }
    }
}
