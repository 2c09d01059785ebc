//! Measures the rate of copies from the host, and predicts the time of a step.

use super::{choice::StreamPlan, streamed_layer::PlacedWeight};
use crate::{error::Result, memory::Bytes};
use dsrun_core::device::{BufferSlice, Device, MemoryKind, Stream};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// Bytes of the measurement buffers, if the device has that much free memory.
const BUFFER: usize = 64 << 20;
/// Bytes copied per measurement, for a device with its own memory and for one that uses host memory, where copies are slower.
const MEASURED: [usize; 2] = [512 << 20, 64 << 20];
/// Bytes of a copy.
const PIECE: usize = 16 << 20;
/// The number of measurements; the fastest is used.
const REPEATS: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Rates of copies in bytes per second, measured.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct LinkRates {
    /// From pinned host memory to the device.
    pub to_device: f64,
    /// Reads and writes of copies inside the device's memory.
    pub inside_device: f64,
}

impl LinkRates {
    /// Measures the rates, for which a quarter of the device's free memory is used at most.
    ///
    /// # Errors
    /// If memory cannot be allocated, or the device failed.
    pub fn measure(device: &dyn Device) -> Result<Self> {
        let spare = device.memory().free.map_or(BUFFER, |free| usize::try_from(free / 8).unwrap_or(BUFFER));
        let bytes = spare.clamp(1 << 12, BUFFER);
        let allocate = |kind| device.allocate(bytes, kind).map(BufferSlice::whole);
        let (host, one) = (allocate(MemoryKind::Pinned)?, allocate(MemoryKind::Device)?);
        let two = allocate(MemoryKind::Device)?;
        let mut stream = device.stream()?;
        let rounds = MEASURED[usize::from(device.properties().unified_memory)] / bytes;
        let to_device = rate(&mut *stream, &host, &one, rounds)?;
        let inside_device = 2.0 * rate(&mut *stream, &one, &two, rounds)?;
        Ok(Self { to_device, inside_device })
    }
}

/// Bytes per second of copies from one range to another of the same length.
fn rate(
    stream: &mut dyn Stream,
    source: &BufferSlice,
    destination: &BufferSlice,
    rounds: usize,
) -> Result<f64> {
    let rounds = rounds.clamp(1, 256);
    let mut best = f64::INFINITY;
    // The first run is a warm-up and is not counted.
    for repeat in 0..=REPEATS {
        let start = Instant::now();
        for _ in 0..rounds {
            for at in (0..source.bytes).step_by(PIECE) {
                let bytes = PIECE.min(source.bytes - at);
                stream.copy(&source.slice(at, bytes)?, &destination.slice(at, bytes)?)?;
            }
        }
        stream.synchronize("measuring the rate of copies", TIMEOUT)?;
        if repeat > 0 {
            best = best.min(start.elapsed().as_secs_f64());
        }
    }
    Ok((rounds * source.bytes) as f64 / best.max(1e-9))
}

/// The predicted time of a step that streams weights: the maximum of the time of its copies and of its reads of device memory, and then
/// that of its reads of KV cache in host memory, which do not overlap with either.
/// Arithmetic, which limits large batches, is not modelled.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct StreamForecast {
    /// Layers whose weights are copied to the device in every step.
    pub streamed_layers: usize,
    /// Layers whose weights stay on the device.
    pub resident_layers: usize,
    /// Slots of the ring.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Bytes of the streamed layers, which host memory holds, and which a step copies to the device.
    pub streamed_bytes: u64,
    /// Steps of at most this many tokens read the experts that they choose in host memory instead, and copy nothing; 0 if none does.
    pub most_tokens_in_place: usize,
    /// Bytes of them that a step reads from disk.
    pub disk_bytes: u64,
    /// The measured rates.
    pub rates: LinkRates,
    /// Requests that run side by side.
    pub requests: usize,
    /// The number of requests whose whole context fits into the KV cache; at most `requests`.
    pub kv_requests: usize,
    /// Bytes of weights that cross the link in a step of one request; of experts that it reads, those that it is expected to choose.
    pub link_bytes_alone: u64,
    /// The same in a step of `kv_requests` requests.
    pub link_bytes: u64,
    /// Bytes of KV cache in host memory that a step of one request reads, with half of its context.
    pub host_kv_bytes_alone: u64,
    /// The same with `kv_requests` requests.
    pub host_kv_bytes: u64,
    /// The seconds in which a step of one request reads its weights and KV cache from device memory.
    pub memory_seconds_alone: f64,
    /// The same with all requests, each with half of its context.
    pub memory_seconds: f64,
    /// The number of requests above which a byte of device memory is worth more as a resident weight than as KV cache; 0 if KV cache is in
    /// host memory, and takes no room.
    pub threshold: f64,
    /// Whether the weights have at least 16 bits on average.
    wide: bool,
}

/// What a step with streamed layers reads and how many requests it serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamedStep {
    /// Bytes of weights that a step reads: with one request, and with `kv_requests` requests.
    pub(crate) weights: [u64; 2],
    /// Bytes of KV cache for each token of a request's context.
    pub(crate) kv_per_token: u64,
    /// Those of them in host memory.
    pub(crate) host_kv_per_token: u64,
    /// Tokens of a whole context.
    pub(crate) context: usize,
    /// Requests that run side by side.
    pub(crate) requests: usize,
    /// Requests whose whole context the KV cache holds; at least one.
    pub(crate) kv_requests: usize,
}

impl StreamForecast {
    /// Predicts the time of a step.
    pub(crate) fn new(stream: &StreamPlan, step: StreamedStep, rates: LinkRates) -> Self {
        let StreamedStep { weights, kv_per_token, host_kv_per_token, context, requests, kv_requests } = step;
        let tokens = |requests: usize| (requests * context / 2) as u64;
        let kv = |requests: usize| (kv_per_token - host_kv_per_token) * tokens(requests);
        let memory_seconds = |weights: u64, requests| (weights + kv(requests)) as f64 / rates.inside_device;
        let host_kv = |requests: usize| host_kv_per_token * tokens(requests);
        let streamable = stream.packed_bytes() + stream.device_bytes() - stream.ring_bytes();
        let elements: usize = stream.layers.iter().flat_map(|layer| &layer.weights).map(elements).sum();
        Self {
            streamed_layers: stream.layers.len(),
            resident_layers: stream.resident_layers,
            slots: stream.slots,
            slot_bytes: stream.slot_bytes as u64,
            streamed_bytes: stream.streamed_bytes(),
            most_tokens_in_place: stream.most_tokens_in_place(),
            disk_bytes: stream.disk_bytes(),
            rates,
            requests,
            kv_requests,
            link_bytes_alone: stream.link_bytes(1),
            link_bytes: stream.link_bytes(kv_requests),
            host_kv_bytes_alone: host_kv(1),
            host_kv_bytes: host_kv(kv_requests),
            memory_seconds_alone: memory_seconds(weights[0], 1),
            memory_seconds: memory_seconds(weights[1], kv_requests),
            threshold: match host_kv_per_token {
                0 => streamable as f64 / (context as f64 * kv_per_token as f64).max(1.0),
                _ => 0.0,
            },
            wide: stream.packed_bytes() >= 2 * elements as u64,
        }
    }

    /// The predicted seconds of a step with one request.
    pub fn seconds_alone(&self) -> f64 {
        let link = self.link_bytes_alone as f64 / self.rates.to_device;
        link.max(self.memory_seconds_alone) + self.host_kv_bytes_alone as f64 / self.rates.to_device
    }

    /// The predicted seconds of a step with all requests.
    pub fn seconds(&self) -> f64 {
        let weights = self.link_bytes as f64 / self.rates.to_device;
        weights.max(self.memory_seconds) + self.host_kv_bytes as f64 / self.rates.to_device
    }

    /// The predicted seconds of what crosses the link in a step with all requests.
    fn link_seconds(&self) -> f64 {
        (self.link_bytes + self.host_kv_bytes) as f64 / self.rates.to_device
    }

    fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        if self.link_seconds() < self.memory_seconds {
            return advice;
        }
        if self.wide {
            advice.push("--quantize w4a16 moves a quarter of the bytes of bf16".to_owned());
        }
        if (self.requests as f64) < self.threshold {
            advice.push(format!(
                "more requests side by side share the copies of a step: below about {:.0} requests memory is worth more as KV cache \
                 than as resident layers",
                self.threshold
            ));
        }
        // More tokens choose more experts.
        if self.requests == 1 && self.most_tokens_in_place == 0 {
            advice.push("--speculate checks several tokens for the copies of one".to_owned());
        }
        advice.push("a larger --gpu-memory keeps more layers on the device".to_owned());
        advice
    }
}

impl fmt::Display for StreamForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (experts, steps) = match self.most_tokens_in_place {
            0 => ("", "a step".to_owned()),
            most => ("the experts of ", format!("in steps of more than {most} tokens")),
        };
        writeln!(
            f,
            "streaming: {experts}{} of {} layers stay {}, {} {steps} through a ring of {} slots of {}",
            self.streamed_layers,
            self.streamed_layers + self.resident_layers,
            if self.disk_bytes > 0 { "in host memory and on disk" } else { "in host memory" },
            Bytes(self.streamed_bytes),
            self.slots,
            Bytes(self.slot_bytes)
        )?;
        if self.most_tokens_in_place > 0 {
            writeln!(
                f,
                "  smaller steps read the experts that they choose in host memory: {} for one token",
                Bytes(self.link_bytes_alone)
            )?;
        }
        if self.disk_bytes > 0 {
            writeln!(
                f,
                "  {} of them are read from disk in each step, which may bind",
                Bytes(self.disk_bytes)
            )?;
        }
        let binds = if self.link_seconds() >= self.memory_seconds { "the link" } else { "device memory" };
        writeln!(
            f,
            "  link {:.1} GB/s measured: {:.1} ms a step; device memory: {:.1} ms; {binds} binds",
            self.rates.to_device / 1e9,
            self.link_seconds() * 1e3,
            self.memory_seconds * 1e3
        )?;
        write!(f, "  expected: at most {:.2} tokens/s for one request", 1.0 / self.seconds_alone())?;
        if self.requests > 1 {
            let together = self.kv_requests.max(1);
            write!(f, ", {:.1} for {together} side by side", together as f64 / self.seconds())?;
        }
        if self.kv_requests < self.requests {
            write!(
                f,
                "\n  the KV cache binds: it holds the whole context of {} of {} requests",
                self.kv_requests, self.requests
            )?;
        }
        for advice in self.advice() {
            write!(f, "\n  hint: {advice}")?;
        }
        Ok(())
    }
}

fn elements(weight: &PlacedWeight) -> usize {
    weight.desc.weight_type.elements().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forecast_names_what_binds() {
        let forecast = StreamForecast {
            streamed_layers: 6,
            resident_layers: 2,
            slots: 2,
            slot_bytes: 1 << 30,
            streamed_bytes: 6 << 30,
            disk_bytes: 0,
            most_tokens_in_place: 0,
            rates: LinkRates { to_device: 50e9, inside_device: 4e12 },
            requests: 4,
            kv_requests: 4,
            link_bytes_alone: 6_250_000_000,
            link_bytes: 6_250_000_000,
            host_kv_bytes_alone: 0,
            host_kv_bytes: 0,
            memory_seconds_alone: 0.01,
            memory_seconds: 0.02,
            threshold: 100.0,
            wide: true,
        };
        let shown = forecast.to_string();
        assert!(shown.contains("6 of 8 layers stay in host memory, 6.0 GiB a step"), "{shown}");
        assert!(
            shown.contains("the link binds") && shown.contains("8.00 tokens/s for one request, 32.0 for 4"),
            "{shown}"
        );
        assert!(shown.contains("w4a16") && shown.contains("below about 100 requests"), "{shown}");
        let experts =
            StreamForecast { most_tokens_in_place: 21, link_bytes_alone: 1_000_000_000, ..forecast.clone() };
        let shown = experts.to_string();
        assert!(
            shown.contains("the experts of 6 of 8 layers stay in host memory, 6.0 GiB in steps of more"),
            "{shown}"
        );
        assert!(
            shown.contains("953.7 MiB for one token") && shown.contains("50.00 tokens/s for one"),
            "{shown}"
        );
        let with_cache = StreamForecast {
            host_kv_bytes_alone: 1_250_000_000,
            host_kv_bytes: 6_250_000_000,
            ..forecast.clone()
        };
        let shown = with_cache.to_string();
        assert!(shown.contains("6.67 tokens/s for one request, 16.0 for 4"), "{shown}");
        let other = StreamForecast { memory_seconds: 0.5, kv_requests: 2, ..forecast };
        let shown = other.to_string();
        assert!(shown.contains("device memory binds") && shown.contains("of 2 of 4 requests"), "{shown}");
        assert!(!shown.contains("hint"), "{shown}");
    }
}
