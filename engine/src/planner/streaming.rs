//! Forecasts weights that do not fit into the memory of a device, and are copied from host memory in every step.

use crate::{
    error::Result,
    plan::{StreamPlan, StreamableLayers},
};
use dsrun_core::program::Program;

/// The weights of a rank, some of which are streamed from host memory.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct StreamedWeights {
    /// Layers that are copied to the device in every step.
    pub layers: usize,
    /// Layers that stay on the device.
    pub resident_layers: usize,
    /// Bytes that a step copies, which host memory holds.
    pub bytes: u64,
    /// Microseconds of these copies.
    pub copy_us: f64,
    /// Bytes of all layers, streamed or not.
    pub layer_bytes: u64,
}

/// The weights of a rank that has `memory` bytes, and the bytes of them that its device holds. `None` if too little is left beside
/// `states`, or nothing repeats in the program.
pub(super) fn stream_weights(
    program: &Program,
    [weights, states]: [u64; 2],
    memory: u64,
    host_bandwidth: f64,
) -> Result<Option<(StreamedWeights, u64)>> {
    let Ok(layers) = StreamableLayers::estimate(program) else { return Ok(None) };
    let kept = weights.saturating_sub(layers.bytes());
    let room = memory.saturating_sub(kept + states);
    let fit = |slots: usize| layers.choose(slots, room, usize::MAX);
    let chosen: Option<StreamPlan> = layers.slot_counts().into_iter().find_map(fit);
    Ok(chosen.map(|plan| {
        let streamed = StreamedWeights {
            layers: plan.layers.len(),
            resident_layers: plan.resident_layers,
            bytes: plan.streamed_bytes(),
            copy_us: plan.streamed_bytes() as f64 / host_bandwidth * 1e6,
            layer_bytes: layers.bytes(),
        };
        (streamed, kept + plan.device_bytes())
    }))
}
