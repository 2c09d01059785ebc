//! The option `experts`: where the weights of experts are kept.

use std::{fmt, str::FromStr};

/// Where the weights of experts are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsIn {
    /// With the other weights of their layer, as [`WeightsIn`](super::WeightsIn) says.
    #[default]
    Auto,
    /// In host memory, except for those of layers that fit on the device beside all other weights, the KV cache and the ring buffer.
    Host,
}

impl fmt::Display for ExpertsIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Host => "host",
        })
    }
}

impl FromStr for ExpertsIn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Auto, Self::Host]
            .into_iter()
            .find(|place| place.to_string() == text)
            .ok_or_else(|| format!("`{text}` is neither auto nor host"))
    }
}
