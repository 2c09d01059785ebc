//! Errors of dsrun and of candle.

use dsrun_core::Error;

/// Why an op could not run: an error of dsrun or of candle.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Dsrun(#[from] Error),
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Dsrun(error) => error,
            Failure::Candle(error) => Self::internal(format!("candle: {error}")),
        }
    }
}
