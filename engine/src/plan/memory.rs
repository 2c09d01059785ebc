//! Counts the memory of an engine before anything is allocated.

use super::{
    bucket::{Bucket, FixedSizes},
    calls::{is_activation, is_cache, state_bytes, weight_desc},
    layout::SharedSizes,
    staged_pages::{STAGING_AREAS, StagedPages, page_bytes},
};
use crate::{error::Result, memory::MemoryPlan, options::EngineOptions};
use dsrun_core::{
    TensorDesc,
    device::Device,
    op::OperandType,
    program::{Origin, Program, Value},
};

/// Computes the memory plan of an engine for a program with these sizes.
///
/// # Errors
/// If the device cannot say how large a packed weight is, or a size overflows.
pub(crate) fn count_memory(
    program: &Program,
    device: &dyn Device,
    shared: SharedSizes,
    limits: Bucket,
    fixed: FixedSizes,
    options: &EngineOptions,
) -> Result<MemoryPlan> {
    let mut memory = MemoryPlan {
        kv_tokens: (fixed.pages * options.block_size) as u64,
        activations: shared.arena as u64,
        workspace: (shared.workspace + shared.inputs) as u64,
        available: device.memory().free,
        ..MemoryPlan::default()
    };
    let host_pages = options.host_pages();
    let mut pages = Vec::new();
    memory.prefix_host = options.prefix_store.host_bytes;
    for value in &program.values {
        match (&value.origin, &value.value_type) {
            (Origin::Weight(_), OperandType::Weight(weight)) => {
                memory.weights += device.kernels().prepack_query(&weight_desc(weight))?.bytes as u64;
            }
            (Origin::Weight(_), OperandType::Tensor(tensor)) => {
                let elements: usize = tensor.resolve(&|_| None)?.iter().product();
                memory.weights += (elements * tensor.dtype.bytes()) as u64;
            }
            (Origin::State, _) => {
                let bytes = state_bytes(value, limits, fixed)? as u64;
                if is_cache(value) {
                    memory.kv_cache += bytes;
                    let page = page_bytes(&cache_desc(value, limits, fixed)?)?;
                    memory.swap += (page * host_pages) as u64;
                    pages.push(page);
                } else if is_activation(value) {
                    memory.activations += bytes;
                } else {
                    memory.requests += bytes;
                }
            }
            _ => {}
        }
    }
    if options.moves_pages() {
        memory.workspace += (STAGING_AREAS * StagedPages::new(pages).bytes()) as u64;
    }
    Ok(memory)
}

/// Describes a key or value cache.
///
/// # Errors
/// If a size has no value.
pub(crate) fn cache_desc(value: &Value, limits: Bucket, fixed: FixedSizes) -> Result<TensorDesc> {
    let not_a_tensor = || dsrun_core::Error::internal("a cache is not a tensor").at(&value.name);
    let tensor = value.tensor_type().ok_or_else(not_a_tensor)?;
    Ok(TensorDesc::dense(tensor.dtype, &tensor.resolve(&limits.sizes(fixed))?))
}
