//! What a measurement says about weights that are streamed from host memory or from disk, and about KV cache in host memory.

use dsrun_engine::{Bytes, HostCacheForecast, StreamForecast};
use serde::Serialize;
use std::fmt;

/// Bytes of weights that were copied to the device, and the share of the link that this took.
#[derive(Debug, Serialize)]
pub(super) struct Streaming {
    bytes: u64,
    seconds: f64,
    bytes_per_second: f64,
    /// The rate of copies alone, measured before the model was loaded.
    link_bytes_per_second: f64,
    share_of_link: f64,
    layers: usize,
    resident_layers: usize,
    disk: Option<DiskShare>,
}

/// Bytes of weights that were read from disk, and the share of its rate that this took.
#[derive(Debug, Serialize)]
struct DiskShare {
    bytes: u64,
    bytes_per_second: f64,
    /// The rate of reads alone, measured when reading began.
    disk_bytes_per_second: Option<f64>,
}

impl Streaming {
    /// The figures of copies of `bytes` in `seconds`.
    pub(super) fn new(bytes: u64, seconds: f64, forecast: &StreamForecast) -> Self {
        let bytes_per_second = bytes as f64 / seconds;
        Self {
            bytes,
            seconds,
            bytes_per_second,
            link_bytes_per_second: forecast.rates.to_device,
            share_of_link: bytes_per_second / forecast.rates.to_device,
            layers: forecast.streamed_layers,
            resident_layers: forecast.resident_layers,
            disk: None,
        }
    }

    /// Adds reads of `bytes` from a disk that reaches `rate` bytes per second.
    pub(super) fn with_disk(mut self, bytes: u64, rate: Option<f64>) -> Self {
        let bytes_per_second = bytes as f64 / self.seconds;
        self.disk = (bytes > 0).then_some(DiskShare { bytes, bytes_per_second, disk_bytes_per_second: rate });
        self
    }
}

impl fmt::Display for Streaming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of weights in {:.3} s, {} of {} layers: {:.1} GB/s, {:.1}% of the {:.1} GB/s that copies alone reach",
            Bytes(self.bytes),
            self.seconds,
            self.layers,
            self.layers + self.resident_layers,
            self.bytes_per_second / 1e9,
            self.share_of_link * 100.0,
            self.link_bytes_per_second / 1e9
        )?;
        let Some(DiskShare { bytes, bytes_per_second, disk_bytes_per_second }) = &self.disk else {
            return Ok(());
        };
        write!(f, "\n             {} from disk: {:.2} GB/s", Bytes(*bytes), bytes_per_second / 1e9)?;
        disk_bytes_per_second.map_or(Ok(()), |rate| {
            let share = bytes_per_second / rate * 100.0;
            write!(f, ", {share:.1}% of the {:.2} GB/s that reads alone reach", rate / 1e9)
        })
    }
}

/// Bytes of KV cache that a step of generation read in host memory.
#[derive(Debug, Serialize)]
pub(super) struct HostCache {
    bytes: u64,
    /// The step's time; reads do not overlap with its other work.
    seconds: f64,
    /// The time in which copies alone move as many bytes.
    link_seconds: f64,
    layers: usize,
}

impl HostCache {
    /// The figures of reads of `bytes` in a step of `seconds`.
    pub(super) fn new(bytes: u64, seconds: f64, forecast: &HostCacheForecast) -> Self {
        let link_seconds = bytes as f64 / forecast.rates.to_device;
        Self { bytes, seconds, link_seconds, layers: forecast.layers }
    }
}

impl fmt::Display for HostCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} read in host memory, {} layers: copying as many bytes takes {:.3} ms, the step {:.3} ms",
            Bytes(self.bytes),
            self.layers,
            self.link_seconds * 1e3,
            self.seconds * 1e3
        )
    }
}
