//! Chooses which layers are streamed, and the size of the ring buffer that they are copied to.

use super::{
    super::chosen_experts::Experts,
    layers::{Layer, layers},
    packed_file::BLOCK,
    streamed_layer::{PlacedWeight, StreamedLayer},
};
use crate::error::{EngineError, Result};
use dsrun_core::{
    Error, WeightType,
    device::Device,
    kernels::{PackedLayout, WeightDesc},
    program::{Node, Program, ValueId},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// For layers of at least this many bytes the ring has two slots. Copies of smaller layers are short, so more slots are
/// needed to hide delays of a step.
const LARGE_LAYER: usize = 256 << 20;
/// Bytes to which weights in a slot are aligned at least.
const ALIGNMENT: usize = 256;
/// Buffers for layers that are read from disk. With two, one is read into while the other is copied; more even out a disk whose rate
/// varies.
const LEAST_READ_AHEAD: u64 = 2;
const MOST_READ_AHEAD: u64 = 4;

/// Experts are read in host memory by steps that are expected to choose at most this share of them. Larger steps copy all experts of a
/// layer to the device while the layer before is computed.
const MOST_READ_IN_PLACE: f64 = 0.75;

/// The repeating layers of a program, and their size on a device.
#[derive(Clone, Debug)]
pub(crate) struct StreamableLayers {
    layers: Vec<StreamedLayer>,
    /// The experts of each layer, if the layers hold nothing but their weights.
    experts: Option<Experts>,
}

impl StreamableLayers {
    /// Finds the repeating layers of a program, and places their packed weights as the device lays them out.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`] if the program has no repeating layers, or the device cannot move their packed weights;
    /// those of the device.
    pub(crate) fn new(program: &Program, device: &dyn Device, on_disk: bool) -> Result<Self> {
        let least = if on_disk { BLOCK } else { ALIGNMENT };
        let layers = Self::place(program, device.properties().alignment.max(least), None, &|weight| {
            Ok(movable(device.kernels().prepack_query(weight)?)?.bytes)
        })?;
        layers.ok_or_else(nothing_repeats)
    }

    /// As [`Self::new`], but only the weights of experts, which kernels can read in host memory. `None` if the program has no experts.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`] if the device cannot read its packed weights in host memory; those of the device.
    pub(crate) fn of_experts(program: &Program, device: &dyn Device) -> Result<Option<Self>> {
        let experts = experts(program);
        Self::place(program, device.properties().alignment.max(ALIGNMENT), Some(&experts), &|weight| {
            let layout = movable(device.kernels().prepack_query(weight)?)?;
            if !layout.readable_when_pinned {
                return Err(Error::unsupported("the backend cannot read experts in host memory"));
            }
            Ok(layout.bytes)
        })
    }

    /// The layers as a device that is not present would have them, if its packed weights were as large as those of the program; with
    /// `of_experts` only the weights of experts. `None` if nothing repeats, or there are no experts.
    ///
    /// # Errors
    /// If a size overflows.
    pub(crate) fn estimate(program: &Program, of_experts: bool) -> Result<Option<Self>> {
        let experts = of_experts.then(|| experts(program));
        Self::place(program, ALIGNMENT, experts.as_ref(), &|weight| weight.weight_type.bytes())
    }

    /// Places all weights of layers, or those of `experts`. `None` if nothing repeats, or no layer has experts.
    fn place(
        program: &Program,
        alignment: usize,
        experts: Option<&HashMap<ValueId, Experts>>,
        packed_bytes: &dyn Fn(&WeightDesc) -> dsrun_core::Result<usize>,
    ) -> Result<Option<Self>> {
        if experts.is_some_and(HashMap::is_empty) {
            return Ok(None);
        }
        let desc = |weight: &WeightType| WeightDesc { weight_type: weight.clone(), immutable: false };
        let place = |layer: Layer| -> Result<StreamedLayer> {
            let mut placed = StreamedLayer { weights: Vec::new(), bytes: 0 };
            let is_placed = |id: &ValueId| experts.is_none_or(|experts| experts.contains_key(id));
            for id in layer.weights.into_iter().filter(is_placed) {
                let value = program.value(id)?;
                let weight =
                    value.weight_type().ok_or_else(|| Error::internal("is no weight").at(&value.name))?;
                let desc = desc(weight);
                let bytes = packed_bytes(&desc).map_err(|error| error.at(&value.name))?;
                let weight = PlacedWeight { name: value.name.clone(), desc, offset: placed.bytes, bytes };
                placed.bytes = (placed.bytes + bytes).next_multiple_of(alignment);
                placed.weights.push(weight);
            }
            Ok(placed)
        };
        let layers = layers(program, &|weight| match experts {
            None => packed_bytes(&desc(weight)),
            // Other weights may be such that the device cannot move them.
            Some(_) => weight.bytes(),
        })?;
        let layers: Vec<_> = layers.into_iter().map(place).collect::<Result<_>>()?;
        let layers: Vec<_> = layers.into_iter().filter(|layer| !layer.weights.is_empty()).collect();
        // If layers have different numbers of experts, those decide that the fewest tokens choose most of.
        let experts =
            experts.and_then(|all| all.values().copied().min_by_key(|it| most_tokens_in_place(*it)));
        Ok((!layers.is_empty()).then_some(Self { layers, experts }))
    }

    /// The number of each weight's layer, by the name of the weight.
    pub(crate) fn numbers(&self) -> HashMap<String, usize> {
        numbers(&self.layers)
    }

    /// The largest number of tokens of a step that reads the layers in host memory, instead of copying them; 0 if none does.
    pub(crate) fn most_tokens_in_place(&self) -> usize {
        self.experts.map_or(0, most_tokens_in_place)
    }

    /// Packed bytes of all layers.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers.iter().map(packed_bytes).sum()
    }

    /// The possible numbers of slots, the best first.
    pub(crate) fn slot_counts(&self) -> Vec<usize> {
        let best = if self.slot_bytes() >= LARGE_LAYER { 2 } else { 4 };
        (1..=best.min(self.layers.len())).rev().collect()
    }

    /// Bytes of a slot: those of the largest layer.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes).max().unwrap_or(0)
    }

    /// Streams as few layers as possible with this many slots. `room` is the memory in bytes for the ring and the resident
    /// layers; at most `most_resident` layers are resident. `None` if there is too little room.
    pub(crate) fn choose(&self, slots: usize, room: u64, most_resident: usize) -> Option<StreamPlan> {
        let all = self.layers.len();
        let multiples = (1..=all / slots).map(|rounds| rounds * slots);
        let mut enough =
            multiples.filter(|streamed| all - streamed <= most_resident || *streamed + slots > all);
        enough
            .find_map(|streamed| Some(self.split(slots, streamed)).filter(|plan| plan.device_bytes() <= room))
    }

    /// Streams as many layers as possible: the largest multiple of the number of slots.
    pub(crate) fn all(&self, slots: usize) -> StreamPlan {
        self.split(slots, self.layers.len() / slots * slots)
    }

    /// Streams this many layers. The resident layers are spread evenly between them, so that copies overlap with their
    /// computation.
    fn split(&self, slots: usize, streamed: usize) -> StreamPlan {
        let all = self.layers.len();
        let is_streamed = |index: usize| (index + 1) * streamed / all > index * streamed / all;
        let (mut layers, mut resident_bytes) = (Vec::with_capacity(streamed), 0);
        for (index, layer) in self.layers.iter().enumerate() {
            match is_streamed(index) {
                true => layers.push(layer.clone()),
                false => resident_bytes += packed_bytes(layer),
            }
        }
        StreamPlan {
            resident_layers: all - layers.len(),
            resident_bytes,
            slots,
            slot_bytes: self.slot_bytes(),
            layers,
            experts: self.experts,
            disk: None,
        }
    }
}

/// The layers that are streamed, and the ring buffer that they are copied to.
#[derive(Clone, Debug)]
pub(crate) struct StreamPlan {
    /// The streamed layers in the order of a step; a multiple of the number of slots.
    pub(crate) layers: Vec<StreamedLayer>,
    /// The layers that stay on the device.
    pub(crate) resident_layers: usize,
    resident_bytes: u64,
    /// Slots on the device.
    pub(crate) slots: usize,
    /// Bytes of a slot.
    pub(crate) slot_bytes: usize,
    /// The experts of each layer, if their weights are all that is streamed.
    experts: Option<Experts>,
    /// Which of the layers are read from disk; all are kept in host memory if absent.
    pub(crate) disk: Option<DiskPlan>,
}

/// A file of packed weights, and how many layers are read from it for every step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlan {
    /// The folder of the file.
    pub(crate) folder: PathBuf,
    /// Streamed layers that are not kept in host memory.
    pub(crate) layers: usize,
    /// Buffers in host memory, each for a layer, that the others are read into ahead of their copies.
    pub(crate) read_ahead: usize,
}

impl DiskPlan {
    /// Whether a layer, of `all` streamed ones, is read for every step. Those that are not are spread evenly.
    pub(crate) fn reads(&self, layer: usize, all: usize) -> bool {
        (layer + 1) * self.layers / all > layer * self.layers / all
    }
}

impl StreamPlan {
    /// Bytes of the ring.
    pub(crate) fn ring_bytes(&self) -> u64 {
        self.slots as u64 * self.slot_bytes as u64
    }

    /// Bytes on the device: those of the ring and of the layers that stay there.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.ring_bytes() + self.resident_bytes
    }

    /// Packed bytes of the streamed layers.
    pub(crate) fn packed_bytes(&self) -> u64 {
        self.layers.iter().map(packed_bytes).sum()
    }

    /// Bytes that a step copies to the device.
    pub(crate) fn streamed_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes as u64).sum()
    }

    /// Whether a step of this many tokens reads the weights of streamed layers in host memory, instead of copying them to the ring.
    pub(crate) fn reads_in_place(&self, tokens: usize) -> bool {
        self.experts.is_some_and(|experts| are_read_in_place(experts, tokens))
    }

    /// The largest number of tokens of a step that [reads them there](Self::reads_in_place); 0 if none does.
    pub(crate) fn most_tokens_in_place(&self) -> usize {
        self.experts.map_or(0, most_tokens_in_place)
    }

    /// Bytes that cross the link in a step of this many tokens: those of experts that are expected to be chosen, or all.
    pub(crate) fn link_bytes(&self, tokens: usize) -> u64 {
        let all = self.streamed_bytes();
        match self.experts.filter(|experts| are_read_in_place(*experts, tokens)) {
            Some(experts) => (all as f64 * experts.expected_share(tokens)) as u64,
            None => all,
        }
    }

    /// Bytes that are read from disk in each step.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let Some(disk) = &self.disk else { return 0 };
        let layers =
            self.layers.iter().enumerate().filter(|(number, _)| disk.reads(*number, self.layers.len()));
        layers.map(|(_, layer)| layer.bytes as u64).sum()
    }

    /// Bytes of host memory: layers that are kept in it, and buffers for those that are read from disk.
    pub(crate) fn host_bytes(&self) -> u64 {
        let read_ahead = self.disk.as_ref().map_or(0, |disk| disk.read_ahead);
        self.streamed_bytes() - self.disk_bytes() + read_ahead as u64 * self.slot_bytes as u64
    }

    /// The plan with a file in this folder. As many layers stay in host memory as `budget` has room for beside the buffers; none if it
    /// is not known.
    ///
    /// # Errors
    /// [`EngineError::ReadAhead`] if the budget is too small for two layers.
    pub(crate) fn with_disk(mut self, folder: &Path, budget: Option<u64>) -> Result<Self> {
        let (all, slot) = (self.layers.len(), self.slot_bytes as u64);
        let budget = budget.unwrap_or(MOST_READ_AHEAD * slot);
        let (layers, read_ahead) = if self.streamed_bytes() <= budget {
            (0, 0)
        } else {
            let read_ahead = (LEAST_READ_AHEAD..=MOST_READ_AHEAD).rev().find(|count| count * slot <= budget);
            let Some(read_ahead) = read_ahead else {
                return Err(EngineError::ReadAhead { needed: LEAST_READ_AHEAD * slot, available: budget });
            };
            let kept = (budget / slot.max(1) - read_ahead).min(all as u64 - 1);
            let layers = all - usize::try_from(kept).unwrap_or(0);
            (layers, usize::try_from(read_ahead).unwrap_or(1).min(layers))
        };
        self.disk = Some(DiskPlan { folder: folder.to_owned(), layers, read_ahead });
        Ok(self)
    }

    /// The number of each streamed weight's layer, by the name of the weight.
    pub(crate) fn numbers(&self) -> HashMap<String, usize> {
        numbers(&self.layers)
    }
}

/// Whether the experts that so many tokens choose are read in host memory.
fn are_read_in_place(experts: Experts, tokens: usize) -> bool {
    experts.expected_share(tokens) <= MOST_READ_IN_PLACE
}

/// The largest number of tokens whose experts are read in host memory. The share of experts grows with the number of tokens.
fn most_tokens_in_place(experts: Experts) -> usize {
    (1..).take_while(|tokens| are_read_in_place(experts, *tokens)).last().unwrap_or(0)
}

/// The weights of experts of a program.
fn experts(program: &Program) -> HashMap<ValueId, Experts> {
    let of_node = |node: &Node| {
        let weights = node.call.operands.iter().flatten();
        let found = weights.filter_map(|id| Some((*id, Experts::of_weight(program, &node.call, *id)?)));
        found.collect::<Vec<_>>()
    };
    program.nodes.iter().flat_map(of_node).collect()
}

/// A layout whose packed bytes can be moved.
fn movable(layout: PackedLayout) -> dsrun_core::Result<PackedLayout> {
    if layout.relocatable {
        return Ok(layout);
    }
    Err(Error::unsupported("the backend cannot stream weights: its packed weights cannot be moved"))
}

fn nothing_repeats() -> EngineError {
    Error::unsupported("the program has no repeating layers whose weights could be streamed").into()
}

fn packed_bytes(layer: &StreamedLayer) -> u64 {
    layer.weights.iter().map(|weight| weight.bytes as u64).sum()
}

fn numbers(layers: &[StreamedLayer]) -> HashMap<String, usize> {
    let named = |(number, layer): (usize, &StreamedLayer)| {
        let weights = layer.weights.iter().map(move |weight| (weight.name.clone(), number));
        weights.collect::<Vec<_>>()
    };
    layers.iter().enumerate().flat_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::{DType, WeightFormat};
    use rstest::rstest;

    /// Layers of one weight of 100 bytes each, in slots of 128.
    fn alike(count: usize) -> StreamableLayers {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![5, 5] };
        let weight = |index: usize| PlacedWeight {
            name: format!("w{index}"),
            desc: WeightDesc { weight_type: weight_type.clone(), immutable: false },
            offset: 0,
            bytes: 100,
        };
        let layer = |index| StreamedLayer { weights: vec![weight(index)], bytes: 128 };
        StreamableLayers { layers: (0..count).map(layer).collect(), experts: None }
    }

    fn streamed(plan: &StreamPlan) -> Vec<&str> {
        plan.layers.iter().map(|layer| layer.weights[0].name.as_str()).collect()
    }

    #[test]
    fn resident_layers_are_spread_evenly() {
        // The ring takes 256 bytes, so three layers of eight fit, and the slots divide the streamed ones with two.
        let plan = alike(8).choose(2, 256 + 399, usize::MAX).unwrap();
        assert_eq!((plan.layers.len(), plan.resident_layers), (6, 2));
        assert_eq!(streamed(&plan), ["w1", "w2", "w3", "w5", "w6", "w7"]);
        assert_eq!((plan.ring_bytes(), plan.device_bytes(), plan.streamed_bytes()), (256, 456, 768));
    }

    #[rstest]
    #[case(8, 2, 256, usize::MAX, Some(8))]
    #[case(8, 2, 255, usize::MAX, None)]
    #[case(8, 2, 1 << 20, usize::MAX, Some(2))]
    #[case(8, 2, 1 << 20, 3, Some(6))]
    #[case(8, 2, 1 << 20, 0, Some(8))]
    #[case(8, 4, 512 + 400, usize::MAX, Some(4))]
    // Of seven layers one has to stay if there are two slots.
    #[case(7, 2, 256, usize::MAX, None)]
    #[case(7, 2, 356, 0, Some(6))]
    #[case(7, 1, 128, 0, Some(7))]
    fn as_few_layers_are_streamed_as_there_is_no_room_for(
        #[case] layers: usize,
        #[case] slots: usize,
        #[case] room: u64,
        #[case] most_resident: usize,
        #[case] expected: Option<usize>,
    ) {
        let plan = alike(layers).choose(slots, room, most_resident);
        assert_eq!(plan.as_ref().map(|plan| plan.layers.len()), expected);
        assert!(plan.is_none_or(|plan| plan.layers.len() % slots == 0 && plan.device_bytes() <= room));
    }

    /// Eight layers in slots of 128 bytes.
    #[rstest]
    #[case(None, Some((8, 4)))]
    #[case(Some(255), None)]
    #[case(Some(256), Some((8, 2)))]
    #[case(Some(4 * 128), Some((8, 4)))]
    #[case(Some(7 * 128), Some((5, 4)))]
    #[case(Some(8 * 128), Some((0, 0)))]
    fn as_many_layers_stay_in_host_memory_as_fit(
        #[case] budget: Option<u64>,
        #[case] expected: Option<(usize, usize)>,
    ) {
        let plan = alike(8).all(2).with_disk(Path::new("x"), budget).ok();
        let disk = plan.as_ref().and_then(|plan| plan.disk.as_ref());
        assert_eq!(disk.map(|disk| (disk.layers, disk.read_ahead)), expected);
        let Some(plan) = plan else { return };
        assert!(budget.is_none_or(|budget| plan.host_bytes() <= budget), "{plan:?}");
        assert_eq!(plan.disk_bytes(), expected.unwrap().0 as u64 * 128);
    }
}
