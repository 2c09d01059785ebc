//! The option `weights-in`: where the weights of layers are kept.

/// Where the weights of layers are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsIn {
    /// On the device if they fit; else in host memory, if the device has memory of its own.
    #[default]
    Auto,
    /// On the device.
    Device,
    /// In host memory, but for layers that fit on the device beside the KV cache and the ring of slots that the others pass through.
    Host,
}

impl WeightsIn {
    /// The name of the value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}
