//! Chooses the layers whose keys and values stay in host memory.
//!
//! Layer `i` of those always uses slot `i mod k` on the device in steps that copy, so calls are bound to the same memory in every step. A
//! slot has room for a whole layer: a page has the same number in it as in host memory.

use super::{
    bucket::{Bucket, FixedSizes},
    calls::{is_cache, state_bytes},
};
use crate::error::Result;
use dsrun_core::program::{Call, Origin, Program, Value, ValueId};
use std::collections::HashMap;

/// Slots on the device: pages of a layer are copied while the layer before is computed.
const SLOTS: usize = 2;
/// Up to this many tokens of a request, attention reads keys and values in host memory. The more there are, the more often kernels read the
/// same keys again, for each tile of queries, and the link carries them each time. The smallest tile has this many rows; where copying
/// begins to be faster was not measured.
const READ_ONCE: usize = 16;

/// The caches of each layer of a program, in the order of the calls that use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheLayers(Vec<Vec<String>>);

impl CacheLayers {
    /// Groups caches that one call uses, such as those of keys and values.
    ///
    /// # Errors
    /// If a call has a value that the program lacks.
    pub(crate) fn of(program: &Program) -> Result<Self> {
        let mut layers: Vec<Vec<String>> = Vec::new();
        for node in &program.nodes {
            let names: Vec<&String> =
                caches(program, &node.call)?.into_iter().map(|value| &value.name).collect();
            let known = layers.iter().position(|layer| names.iter().any(|name| layer.contains(name)));
            let layer = match known {
                _ if names.is_empty() => continue,
                Some(layer) => layer,
                None => {
                    layers.push(Vec::new());
                    layers.len() - 1
                }
            };
            for name in names {
                if !layers[layer].contains(name) {
                    layers[layer].push(name.clone());
                }
            }
        }
        Ok(Self(layers))
    }

    /// The layer of each cache, by name.
    pub(crate) fn numbers(&self) -> HashMap<String, usize> {
        numbers(&self.0)
    }

    /// The number of layers.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Keeps this many layers in host memory, spread evenly between the others.
    pub(crate) fn split(&self, in_host: usize) -> HostCaches {
        let all = self.0.len();
        let is_in_host = |index: usize| (index + 1) * in_host / all > index * in_host / all;
        let layers = self.0.iter().enumerate().filter(|(index, _)| is_in_host(*index));
        HostCaches { layers: layers.map(|(_, names)| names.clone()).collect() }
    }
}

/// The bytes of a page of the KV cache, if the keys and values of some layers are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachePage {
    /// Layers in host memory.
    pub(crate) in_host: usize,
    /// Bytes on the device, those of slots included.
    pub(crate) device: u64,
    /// Bytes in host memory.
    pub(crate) host: u64,
}

impl CachePage {
    /// The pages that fit, up to `asked`.
    fn fitting(self, device_room: u64, host_room: u64, asked: usize) -> usize {
        let fitting = |room: u64, bytes: u64| room.checked_div(bytes).unwrap_or(u64::MAX);
        let pages = fitting(device_room, self.device).min(fitting(host_room, self.host));
        usize::try_from(pages).unwrap_or(usize::MAX).min(asked)
    }

    /// Of some possibilities, with ever more layers in host memory, the first with the most pages up to `asked`: its layers in host
    /// memory, and the pages, at least `least`. If none has room for those on the device, the last one with what the host has room for.
    pub(crate) fn choose(
        of: &[Self],
        device_room: u64,
        host_room: u64,
        asked: usize,
        least: usize,
    ) -> (usize, usize) {
        let pages = |page: &Self| page.fitting(device_room, host_room, asked);
        let most = of.iter().map(pages).max().unwrap_or(asked);
        let chosen = match of.iter().find(|page| pages(page) == most) {
            Some(page) if most >= least.min(asked) => Some((page.in_host, most)),
            _ => of.last().map(|page| (page.in_host, page.fitting(u64::MAX, host_room, asked))),
        };
        chosen.map_or((0, asked), |(in_host, pages)| (in_host, pages.max(least.min(asked))))
    }
}

/// The layers whose keys and values are in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostCaches {
    /// The names of the caches of each layer, in the order of a step.
    pub(crate) layers: Vec<Vec<String>>,
}

impl HostCaches {
    /// The layer of each cache, by name.
    pub(crate) fn numbers(&self) -> HashMap<String, usize> {
        numbers(&self.layers)
    }

    /// The number of slots on the device.
    pub(crate) fn slots(&self) -> usize {
        SLOTS.min(self.layers.len())
    }

    /// Bytes in host memory, and bytes of the slots on the device.
    ///
    /// # Errors
    /// If a size has no value or overflows.
    pub(crate) fn bytes(&self, program: &Program, limits: Bucket, fixed: FixedSizes) -> Result<(u64, u64)> {
        let numbers = self.numbers();
        let mut layers = vec![0u64; self.layers.len()];
        for (_, value) in program.values_from(|origin| *origin == Origin::State) {
            if let Some(bytes) = numbers.get(&value.name).and_then(|layer| layers.get_mut(*layer)) {
                *bytes += state_bytes(value, limits, fixed)? as u64;
            }
        }
        let largest = layers.iter().max().copied().unwrap_or(0);
        Ok((layers.iter().sum(), largest * self.slots() as u64))
    }
}

/// Whether the steps of a bucket read keys and values in host memory, instead of copying their pages to the device.
pub(crate) fn reads_caches_in_place(bucket: Bucket) -> bool {
    let of_each = if bucket.all_rows { bucket.sequences } else { 1 };
    bucket.tokens <= READ_ONCE * of_each
}

/// The caches that a call reads or writes, also as the results of calls that update them.
///
/// # Errors
/// If the call has a value that the program lacks.
pub(crate) fn caches<'a>(program: &'a Program, call: &Call) -> dsrun_core::Result<Vec<&'a Value>> {
    let mut found = Vec::new();
    for id in call.operands.iter().flatten() {
        let value = program.value(origin(program, *id)?)?;
        if value.origin == Origin::State && is_cache(value) {
            found.push(value);
        }
    }
    Ok(found)
}

/// The value that was updated in place to give this one; itself if none was.
fn origin(program: &Program, mut id: ValueId) -> dsrun_core::Result<ValueId> {
    while let Origin::Node(node) = program.value(id)?.origin
        && let Some(call) = program.nodes.get(node).map(|node| &node.call)
        && let Some(result) = call.results.iter().position(|result| *result == id)
        && let Some(updated) = call.op.updates(result).and_then(|operand| *call.operands.get(operand)?)
    {
        id = updated;
    }
    Ok(id)
}

fn numbers(layers: &[Vec<String>]) -> HashMap<String, usize> {
    let all = layers.iter().enumerate();
    all.flat_map(|(number, names)| names.iter().map(move |name| (name.clone(), number))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Pages of 32 layers with a byte each, and of two slots.
    fn pages() -> Vec<CachePage> {
        let page = |in_host: u64| CachePage {
            in_host: in_host as usize,
            device: 32 - in_host + in_host.min(2),
            host: in_host,
        };
        (0..=32).map(page).collect()
    }

    #[rstest]
    // As many as were asked for, with as few layers in host memory as possible: 8 pages of 20 bytes.
    #[case(160, 1000, 8, (14, 8))]
    // What the device and the host have room for together, not only one of them.
    #[case(320, 320, 1000, (17, 18))]
    // A host with little memory: no fewer pages than without it.
    #[case(320, 10, 1000, (0, 10))]
    #[case(320, 0, 1000, (0, 10))]
    // The slots limit the pages if all layers are in host memory.
    #[case(20, 1_000_000, 1000, (32, 10))]
    // No room on the device, where weights are streamed to make some.
    #[case(0, 320, 1000, (32, 10))]
    #[case(0, 0, 1000, (32, 4))]
    fn device_and_host_hold_as_many_pages_as_possible(
        #[case] device: u64,
        #[case] host: u64,
        #[case] asked: usize,
        #[case] expected: (usize, usize),
    ) {
        assert_eq!(CachePage::choose(&pages(), device, host, asked, 4), expected);
    }
}
