//! Estimates how much KV cache fits beside the weights of a model, before an engine is planned.

use super::{
    EnginePlan,
    bucket::{Bucket, FixedSizes},
    calls::{is_cache, weight_desc},
    memory::cache_desc,
    programs::{DeviceNumbers, StepPrograms},
    staged_pages::page_bytes,
};
use crate::{
    error::Result,
    options::{EngineOptions, KvIn},
    passes::quantize::{Calibration, Policy},
};
use dsrun_core::{
    device::Device,
    host_memory,
    op::OperandType,
    program::{Origin, Program},
};
use dsrun_models::model::Model;
use std::sync::Arc;

/// One part in this many of the devices' free memory is reserved for allocations that are not counted.
const UNCOUNTED: u64 = 10;

/// One part in this many of the devices' memory may be taken by slots for layers whose keys and values are in host memory.
const SLOTS_SHARE: u64 = 10;

/// The assumed peak memory of a step's intermediate results, as a multiple of the largest one.
const LIVE_RESULTS: u64 = 6;

/// The room for KV cache beside the weights of a model and the activations of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheRoom {
    /// The bytes that a token takes in the KV cache of all layers, that of a draft model included.
    pub token_bytes: u64,
    /// The bytes of all devices that are free for KV cache, and of the host if the options keep it there; `None` if a device does not report
    /// its free memory.
    pub free: Option<u64>,
    /// Whether the devices use host memory, which they share with other programs.
    pub of_host: bool,
    /// Whether some of the room is host memory beside the devices.
    pub in_host: bool,
}

impl CacheRoom {
    /// Estimates the room for a model, and for a draft model if there is one, on these devices, which this many equal engines
    /// share. Allocates nothing.
    ///
    /// # Errors
    /// If a program cannot be built, or the device cannot say how large a packed weight is.
    pub fn estimate(
        model: &Model,
        draft: Option<&Model>,
        devices: &[Arc<dyn Device>],
        engines: usize,
        options: &EngineOptions,
    ) -> Result<Self> {
        let mut sizes = Sizes::default();
        let Some(device) = devices.first() else {
            return Ok(Self { token_bytes: 1, free: None, of_host: false, in_host: false });
        };
        // Smoothing needs a calibration, which takes time and does not change sizes.
        let unsmoothed = |policy: &Policy| Policy { smooth: None, ..policy.clone() };
        let quantize = options.quantize.as_ref().map(unsmoothed);
        let options = EngineOptions { quantize, calibration: None::<Arc<Calibration>>, ..options.clone() };
        sizes.add(model, &**device, &options)?;
        if let Some(draft) = draft {
            let own = EngineOptions { quantize: None, context: None, ..options.clone() };
            sizes.add(draft, &**device, &own)?;
        }
        let of_host = devices.iter().all(|device| device.properties().unified_memory);
        let available: Option<u64> = devices.iter().map(|device| device.memory().free).sum();
        // Other programs may use some of the memory that the device reports as free.
        let of_system = host_memory::available().filter(|_| of_host).unwrap_or(u64::MAX);
        let available = available.map(|bytes| bytes.min(of_system) / engines.max(1) as u64);
        // With streamed weights only the smallest context is planned: memory is better used for resident layers than for a longer
        // context.
        let weights = if options.keeps_weights_off_device() { u64::MAX } else { sizes.weights };
        let taken = weights.saturating_add(sizes.activations);
        let free = available.map(|bytes| (bytes - bytes / UNCOUNTED).saturating_sub(taken));
        let mut in_host = 0;
        if options.kv_in == KvIn::Host && !of_host {
            // What is available varies, and the slots for two layers take a part of the device.
            let slots = available.unwrap_or(0) / SLOTS_SHARE;
            let off_device = available.is_some_and(|available| taken > available);
            let beside = if off_device { sizes.weights } else { 0 };
            let host = host_memory::available().unwrap_or(0).saturating_sub(beside) / 2;
            let host = host / options.replicas.max(1) as u64;
            in_host = (host - host / UNCOUNTED).min(slots.saturating_mul(model.config().layers as u64 / 2));
        }
        let free = free.map(|bytes| bytes.saturating_add(in_host));
        Ok(Self { token_bytes: sizes.token.max(1), free, of_host, in_host: in_host > 0 })
    }

    /// The tokens of KV cache that there is room for.
    pub fn tokens(&self) -> Option<usize> {
        self.free.map(|free| usize::try_from(free / self.token_bytes).unwrap_or(usize::MAX))
    }
}

/// Bytes of a plan by category.
#[derive(Debug, Default)]
struct Sizes {
    weights: u64,
    activations: u64,
    token: u64,
}

impl Sizes {
    /// Adds the bytes of a model.
    fn add(&mut self, model: &Model, device: &dyn Device, options: &EngineOptions) -> Result<()> {
        let options = &options.for_model(model.config())?;
        let program = StepPrograms::quantized(model, &DeviceNumbers::of(device)?, options)?;
        let (_, fixed, limits) = EnginePlan::sizes(model.config().context, options)?;
        self.activations += activations(&program, limits, fixed)?;
        for value in &program.values {
            match (&value.origin, &value.value_type) {
                (Origin::Weight(_), OperandType::Weight(weight)) => {
                    self.weights += device.kernels().prepack_query(&weight_desc(weight))?.bytes as u64;
                }
                (Origin::State, _) if is_cache(value) => {
                    let page = page_bytes(&cache_desc(value, limits, fixed)?)?;
                    self.token += page.div_ceil(options.block_size) as u64;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Estimates the bytes of the intermediate results of the largest step.
fn activations(program: &Program, limits: Bucket, fixed: FixedSizes) -> Result<u64> {
    let mut largest = 0;
    for value in program.values.iter().filter(|value| matches!(value.origin, Origin::Node(_))) {
        let Some(tensor) = value.tensor_type() else { continue };
        let elements: usize = tensor.resolve(&limits.sizes(fixed))?.iter().product();
        largest = largest.max((elements * tensor.dtype.bytes()) as u64);
    }
    Ok(largest.saturating_mul(LIVE_RESULTS))
}
