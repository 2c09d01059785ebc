//! Predicts what generation reads of the KV cache over the link, where layers keep it in host memory.

use super::{EnginePlan, stream::LinkRates};
use crate::{error::Result, memory::Bytes};
use dsrun_core::device::Device;
use std::fmt;

/// The KV cache in host memory, and the time in which a step of generation reads it there. Reads do not overlap with other work of the
/// step.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct HostCacheForecast {
    /// Layers whose keys and values are in host memory.
    pub layers: usize,
    /// Bytes of host memory that they take.
    pub bytes: u64,
    /// Bytes of them for each token of a request's context.
    pub bytes_per_token: u64,
    /// Requests that run side by side.
    pub requests: usize,
    /// Tokens of the contexts of all requests halfway through them, as far as the cache has room.
    pub tokens: u64,
    /// The measured rates.
    pub rates: LinkRates,
}

impl HostCacheForecast {
    /// The predicted seconds in which a step reads the cache of `tokens` tokens.
    pub fn seconds(&self, tokens: u64) -> f64 {
        self.read_bytes(tokens) as f64 / self.rates.to_device
    }

    /// Bytes that a step reads of the cache of `tokens` tokens.
    pub fn read_bytes(&self, tokens: u64) -> u64 {
        self.bytes_per_token * tokens
    }
}

impl fmt::Display for HostCacheForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, bytes, bytes_per_token, requests, tokens, rates } = self;
        let (requests, plural) = (requests, if *requests == 1 { "" } else { "s" });
        writeln!(f, "KV cache: keys and values of {layers} layers are in host memory, {}", Bytes(*bytes))?;
        write!(
            f,
            "  generation reads {} for each token of a context over the link of {:.1} GB/s: {:.1} ms a step for {requests} request{plural} \
             with {tokens} tokens together",
            Bytes(*bytes_per_token),
            rates.to_device / 1e9,
            self.seconds(*tokens) * 1e3
        )
    }
}

impl EnginePlan {
    /// Measures the rate of the link, and predicts what a step reads of the KV cache in host memory; `None` if all of it stays on the
    /// device.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn forecast_host_cache(&self, device: &dyn Device) -> Result<Option<HostCacheForecast>> {
        let Some(caches) = &self.host_caches else { return Ok(None) };
        let requests = self.options.max_requests;
        let halfway = (requests * self.context / 2) as u64;
        Ok(Some(HostCacheForecast {
            layers: caches.layers.len(),
            bytes: self.memory.kv_host,
            bytes_per_token: self.host_kv_per_token(),
            requests,
            tokens: halfway.min(self.memory.kv_tokens),
            rates: LinkRates::measure(device)?,
        }))
    }

    /// Bytes of KV cache in host memory for each token.
    pub(super) fn host_kv_per_token(&self) -> u64 {
        self.memory.kv_host / self.memory.kv_tokens.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forecast_says_what_a_step_reads() {
        let forecast = HostCacheForecast {
            layers: 24,
            bytes: 3 << 30,
            bytes_per_token: 98_304,
            requests: 8,
            tokens: 4096,
            rates: LinkRates { to_device: 50e9, inside_device: 4e12 },
        };
        let shown = forecast.to_string();
        assert!(shown.contains("keys and values of 24 layers are in host memory, 3.0 GiB"), "{shown}");
        assert!(shown.contains("8.1 ms a step for 8 requests with 4096 tokens together"), "{shown}");
    }
}
