//! Measurements while no request runs.

mod calibrate;
mod mixed_precision;
mod observe;
mod profile;
mod score;
mod sensitivity;

pub use calibrate::{CALIBRATION_TEXT, calibrate, calibration_sequences};
pub use mixed_precision::{Figures, Mixture, Sensitivity, check_budget, mixture, sensitivity};
pub use observe::Observer;
pub use profile::CallFigures;
pub use score::{Score, ScoredPosition, log_probability};
