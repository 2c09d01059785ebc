//! The option `kv-in`: where the KV cache is kept.

use std::{fmt, str::FromStr};

/// Where keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvIn {
    /// On the device.
    #[default]
    Device,
    /// In host memory, except for those of layers that fit on the device beside the weights.
    Host,
}

impl fmt::Display for KvIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

impl FromStr for KvIn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Device, Self::Host]
            .into_iter()
            .find(|place| place.to_string() == text)
            .ok_or_else(|| format!("`{text}` is neither device nor host"))
    }
}
