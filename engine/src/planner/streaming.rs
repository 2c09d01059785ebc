//! Forecasts weights that do not fit into the memory of a device and are copied from host memory in every step, and keys and values that are
//! read there.

use super::hardware::Hardware;
use crate::{
    error::Result,
    plan::{Bucket, CacheLayers, FixedSizes, StreamPlan, StreamableLayers},
};
use dsrun_core::program::Program;

/// The weights of a rank, some of which are streamed from host memory.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct StreamedWeights {
    /// Layers whose weights, or whose experts, are in host memory.
    pub layers: usize,
    /// Layers that stay on the device.
    pub resident_layers: usize,
    /// Whether only experts are in host memory, and the other weights of these layers on the device.
    pub of_experts: bool,
    /// Whether a step reads the experts that it chooses in host memory; otherwise it copies all that is there to the device.
    pub in_place: bool,
    /// Bytes that a step copies or reads.
    pub bytes: u64,
    /// Microseconds that this takes.
    pub copy_us: f64,
    /// Microseconds in which a part of a prompt copies all of these layers.
    pub prompt_copy_us: f64,
    /// Bytes of all layers, streamed or not.
    pub layer_bytes: u64,
}

/// The fullest rank of a stage: its program, and the bytes of its weights and of its states.
pub(super) struct FullestRank<'a> {
    pub(super) program: &'a Program,
    pub(super) weights: u64,
    pub(super) states: u64,
}

impl StreamedWeights {
    /// Microseconds of a step that takes `step_us` with all weights on the device. Copies overlap with it, reads in host memory do not.
    pub(super) fn step_us(&self, step_us: f64) -> f64 {
        if self.in_place { step_us + self.copy_us } else { step_us.max(self.copy_us) }
    }
}

/// Keys and values of a rank that are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct HostCache {
    /// Layers whose keys and values are there.
    pub layers: usize,
    /// Bytes of them, when the context of every request is full.
    pub bytes: u64,
    /// Microseconds in which the steps of all requests read them.
    pub read_us: f64,
}

impl FullestRank<'_> {
    /// Moves the keys and values of as few layers as possible to host memory, as an engine does, if the rank has more than `memory`
    /// bytes; of all layers, if it does not fit then either.
    ///
    /// # Errors
    /// If the program is not valid, or a size overflows.
    pub(super) fn move_caches(
        &mut self,
        hardware: &Hardware,
        limits: Bucket,
        fixed: FixedSizes,
    ) -> Result<Option<HostCache>> {
        let Some(memory) = hardware.memory.filter(|memory| !self.fits(*memory)) else { return Ok(None) };
        let layers = CacheLayers::of(self.program)?;
        let mut moved = None;
        for in_host in 1..=layers.count() {
            let (bytes, slots) = layers.split(in_host).bytes(self.program, limits, fixed)?;
            let states = self.states.saturating_sub(bytes) + slots;
            moved = Some((in_host, bytes, states));
            if self.weights + states <= memory {
                break;
            }
        }
        let Some((layers, bytes, states)) = moved else { return Ok(None) };
        self.states = states;
        Ok(Some(HostCache { layers, bytes, read_us: bytes as f64 / hardware.host_bandwidth * 1e6 }))
    }

    /// Whether all weights and states fit into `memory` bytes.
    pub(super) fn fits(&self, memory: u64) -> bool {
        self.weights + self.states <= memory
    }
}

/// What each stage streams in a step of `tokens` tokens, with the bytes of weights that its device holds. All stages must have room for their rank, or none streams.
///
/// # Errors
/// If the size of a weight overflows.
pub(super) fn stream_stages(
    stages: &[FullestRank<'_>],
    tokens: usize,
    hardware: &Hardware,
) -> Result<Vec<Option<(StreamedWeights, u64)>>> {
    let mut streamed = vec![None; stages.len()];
    let Some(memory) = hardware.memory else { return Ok(streamed) };
    for (stage, streamed) in stages.iter().zip(&mut streamed).filter(|(stage, _)| !stage.fits(memory)) {
        *streamed = stream_weights(stage, memory, tokens, hardware.host_bandwidth)?;
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
    tokens: usize,
    host_bandwidth: f64,
) -> Result<Option<(StreamedWeights, u64)>> {
    // As an engine does: experts alone if all other weights fit.
    for of_experts in [true, false] {
        let Some(layers) = StreamableLayers::estimate(rank.program, of_experts)? else { continue };
        let kept = rank.weights.saturating_sub(layers.bytes());
        let room = memory.saturating_sub(kept + rank.states);
        let fit = |slots: usize| layers.choose(slots, room, usize::MAX);
        let chosen: Option<StreamPlan> = layers.slot_counts().into_iter().find_map(fit);
        let Some(plan) = chosen else { continue };
        let bytes = plan.link_bytes(tokens);
        let streamed = StreamedWeights {
            layers: plan.layers.len(),
            resident_layers: plan.resident_layers,
            of_experts,
            in_place: plan.reads_in_place(tokens),
            bytes,
            copy_us: bytes as f64 / host_bandwidth * 1e6,
            prompt_copy_us: plan.streamed_bytes() as f64 / host_bandwidth * 1e6,
            layer_bytes: layers.bytes(),
        };
        return Ok(Some((streamed, kept + plan.device_bytes())));
    }
    Ok(None)
}
