//! Sampling options: how the tokens of a request are chosen.

use crate::error::{EngineError, Result};
use dsrun_core::op::{SAMPLING_COLUMNS, SamplingColumn};
use dsrun_models::model::Model;

/// The options that choose tokens. The default is greedy.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingOptions {
    /// The temperature: 0 takes the most likely token, 1 samples from the model's own distribution, higher values flatten it.
    pub temperature: f32,
    /// The number of most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// The most likely tokens are kept until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Tokens are kept if they are at least this likely, relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occur in the prompt or the answer; 1 has no effect.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens that were generated before.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens once for each time they were generated.
    pub frequency_penalty: f32,
    /// The seed of the draws. Equal seeds give equal draws, whatever else is in the batch.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// The number of parameters from which on a higher temperature is suggested; smaller models soon become incoherent with it.
const LARGE: u64 = 4_000_000_000;

impl SamplingOptions {
    /// The defaults for a model: those of its generation configuration. If it has none, and the user has not `chosen` any of
    /// temperature, top-k, top-p and min-p, defaults for its size.
    pub fn suggested(model: &Model, chosen: bool) -> Self {
        let defaults = model.generation();
        let neutral = Self {
            repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
            temperature: if defaults.greedy { 0.0 } else { 1.0 },
            ..Self::default()
        };
        if defaults.greedy {
            return neutral;
        }
        let silent = defaults.temperature.is_none()
            && defaults.top_k.is_none()
            && defaults.top_p.is_none()
            && defaults.min_p.is_none();
        if silent && !chosen {
            let (temperature, min_p) = if parameters(model) < LARGE { (0.6, 0.1) } else { (0.8, 0.05) };
            return Self { temperature, top_p: 0.95, min_p, ..neutral };
        }
        Self {
            temperature: defaults.temperature.unwrap_or(neutral.temperature),
            top_k: defaults.top_k.map_or(0, |top_k| u32::try_from(top_k).unwrap_or(0)),
            top_p: defaults.top_p.unwrap_or(neutral.top_p),
            min_p: defaults.min_p.unwrap_or(neutral.min_p),
            ..neutral
        }
    }

    /// Checks every field's range.
    ///
    /// # Errors
    /// Names the field, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let check = |option, value: f32, valid: bool, rule: &str| {
            if value.is_finite() && valid { Ok(()) } else { Err(EngineError::option(option, value, rule)) }
        };
        check("temperature", self.temperature, self.temperature >= 0.0, "must be 0 (greedy) or more")?;
        check("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "must be above 0 and at most 1")?;
        check("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "must be from 0 to 1")?;
        check(
            "repetition-penalty",
            self.repetition_penalty,
            self.repetition_penalty > 0.0,
            "must be above 0",
        )?;
        let penalty = "must be from -2 to 2";
        check("presence-penalty", self.presence_penalty, self.presence_penalty.abs() <= 2.0, penalty)?;
        check("frequency-penalty", self.frequency_penalty, self.frequency_penalty.abs() <= 2.0, penalty)?;
        if self.top_k >= 1 << 24 {
            return Err(EngineError::option("top-k", self.top_k, "must be below 16777216"));
        }
        Ok(())
    }

    /// Whether any penalty is enabled, so that earlier tokens change the logits.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The request's row of the sampling parameters on the device.
    pub(crate) fn row(&self) -> [f32; SAMPLING_COLUMNS] {
        let mut row = [0.0; SAMPLING_COLUMNS];
        for column in SamplingColumn::ALL {
            row[*column as usize] = match column {
                SamplingColumn::Temperature => self.temperature,
                SamplingColumn::TopK => self.top_k as f32,
                SamplingColumn::TopP => self.top_p,
                SamplingColumn::MinP => self.min_p,
                SamplingColumn::RepetitionPenalty => self.repetition_penalty,
                SamplingColumn::PresencePenalty => self.presence_penalty,
                SamplingColumn::FrequencyPenalty => self.frequency_penalty,
            };
        }
        row
    }

    /// The request's row of the seeds on the device.
    pub(crate) fn seed_row(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }
}

/// The number of parameters of a model.
fn parameters(model: &Model) -> u64 {
    let weights = model.weights();
    let elements = |name: &str| Some(weights.tensor_type(name).ok()?.elements().ok()? as u64);
    weights.names().into_iter().filter_map(elements).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::temperature(SamplingOptions { temperature: -0.1, ..Default::default() }, "temperature")]
    #[case::nan(SamplingOptions { temperature: f32::NAN, ..Default::default() }, "temperature")]
    #[case::top_p_zero(SamplingOptions { top_p: 0.0, ..Default::default() }, "top-p")]
    #[case::top_p_large(SamplingOptions { top_p: 1.5, ..Default::default() }, "top-p")]
    #[case::min_p(SamplingOptions { min_p: -1.0, ..Default::default() }, "min-p")]
    #[case::repetition(SamplingOptions { repetition_penalty: 0.0, ..Default::default() }, "repetition-penalty")]
    #[case::presence(SamplingOptions { presence_penalty: 3.0, ..Default::default() }, "presence-penalty")]
    #[case::frequency(SamplingOptions { frequency_penalty: f32::INFINITY, ..Default::default() }, "frequency-penalty")]
    #[case::top_k(SamplingOptions { top_k: 1 << 24, ..Default::default() }, "top-k")]
    fn values_out_of_range_are_refused_by_name(#[case] options: SamplingOptions, #[case] name: &str) {
        assert!(options.validate().unwrap_err().to_string().starts_with(name));
    }

    #[test]
    fn rows_hold_every_column_and_both_halves_of_the_seed() {
        let options = SamplingOptions { top_k: 40, seed: 0x1_0000_0002, ..Default::default() };
        assert!(options.validate().is_ok());
        assert_eq!(options.row(), [0.0, 40.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(options.seed_row(), [2, 1]);
    }
}
