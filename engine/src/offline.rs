//! Offline measurements, made while no request runs: logits of a text, activations, times of calls, and the choice of
//! mixed-precision formats.

mod calibrate;
mod mixed_precision;
mod observe;
mod profile;
mod score;
mod sensitivity;

pub use calibrate::{CALIBRATION_TEXT, calibrate, calibration_sequences};
pub use mixed_precision::{FormatFigures, MixedPrecision, check_budget, mixed_precision};
pub use observe::Observer;
pub use profile::CallFigures;
pub use score::{Score, ScoredPosition, log_probability};
pub use sensitivity::{Sensitivity, sensitivity};
