//! The option `weights-in`: where the weights of layers are kept.

/// Where the weights of layers are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsIn {
    /// On the device if they fit; otherwise in host memory, if the device has its own memory.
    #[default]
    Auto,
    /// On the device.
    Device,
    /// In host memory, except for the layers that fit on the device beside the KV cache and the ring buffer for streamed layers.
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
