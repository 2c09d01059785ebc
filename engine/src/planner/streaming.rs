//! Forecasts weights that do not fit into the memory of a device, and are copied from host memory in every step.

use super::hardware::Hardware;
use crate::{
    error::{EngineError, Result},
    plan::{StreamPlan, StreamableLayers},
};
use dsrun_core::{Code, program::Program};

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

/// The fullest rank of a stage: its program, and the bytes of its weights and of its states.
pub(super) struct FullestRank<'a> {
    pub(super) program: &'a Program,
    pub(super) weights: u64,
    pub(super) states: u64,
}

impl FullestRank<'_> {
    /// Whether all weights and states fit into `memory` bytes.
    pub(super) fn fits(&self, memory: u64) -> bool {
        self.weights + self.states <= memory
    }
}

/// What each stage streams, with the bytes of weights that its device holds. All stages must have room for their rank, or none streams.
///
/// # Errors
/// If the size of a weight overflows.
pub(super) fn stream_stages(
    stages: &[FullestRank<'_>],
    hardware: &Hardware,
) -> Result<Vec<Option<(StreamedWeights, u64)>>> {
    let mut streamed = vec![None; stages.len()];
    let Some(memory) = hardware.memory else { return Ok(streamed) };
    for (stage, streamed) in stages.iter().zip(&mut streamed).filter(|(stage, _)| !stage.fits(memory)) {
        *streamed = stream_weights(stage, memory, hardware.host_bandwidth)?;
        if streamed.is_none() {
            return Ok(vec![None; stages.len()]);
        }
    }
    Ok(streamed)
}

/// The streamed weights of a rank that has `memory` bytes, and the bytes of weights that its device holds. `None` if too little is left
/// beside its states, or nothing repeats in its program.
fn stream_weights(
    rank: &FullestRank<'_>,
    memory: u64,
    host_bandwidth: f64,
) -> Result<Option<(StreamedWeights, u64)>> {
    let layers = match StreamableLayers::estimate(rank.program) {
        Err(EngineError::Hal(error)) if error.code() == Code::Unsupported => return Ok(None),
        layers => layers?,
    };
    let kept = rank.weights.saturating_sub(layers.bytes());
    let room = memory.saturating_sub(kept + rank.states);
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
