//! Host memory for the pages of requests that had to give theirs to others.
//!
//! Pages lie scattered over the caches of all layers. They are gathered side by side on the device first, so that a copy
//! to or from the host moves many at once. Everything runs on the engine's stream, in order with the steps: a page that is
//! copied out may be written to by the step behind.

use crate::{error::Result, plan::PlanCache};
use dsrun_core::{
    DType, TensorDesc,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc},
    op::{Op, PageGather, PageScatter},
};

/// Pages that are gathered at a time.
const BATCH: usize = 32;

/// The host memory, and what moves pages there and back.
#[derive(Debug)]
pub(crate) struct SwapSpace {
    caches: Vec<Cache>,
    /// The pages of a batch: i32, -1 behind the last.
    batch: BufferSlice,
}

/// What belongs to one cache.
#[derive(Debug)]
struct Cache {
    gather: Box<dyn BoundCall>,
    scatter: Box<dyn BoundCall>,
    /// A batch of pages on the device.
    staging: BufferSlice,
    host: BufferSlice,
    page_bytes: usize,
}

/// A page's number on the one side, and on the other.
type Pair = (usize, i32);

impl SwapSpace {
    /// Bytes of host memory that so many pages of these caches take.
    pub(crate) fn bytes(caches: &[TensorDesc], host_pages: usize) -> Result<u64> {
        let mut bytes = 0;
        for cache in caches {
            bytes += (page_bytes(cache)? * host_pages) as u64;
        }
        Ok(bytes)
    }

    /// Allocates room for `host_pages` pages of every cache.
    ///
    /// # Errors
    /// If the device cannot move pages, or there is no memory.
    pub(crate) fn new(
        device: &dyn Device,
        plans: &mut PlanCache,
        caches: &[(TensorDesc, BufferSlice)],
        host_pages: usize,
    ) -> Result<Self> {
        let batch = BufferSlice::whole(device.allocate(BATCH * DType::I32.bytes(), MemoryKind::Device)?);
        let pages = TensorDesc::dense(DType::I32, &[BATCH]);
        let mut bound = Vec::with_capacity(caches.len());
        for (cache, memory) in caches {
            let page_bytes = page_bytes(cache)?;
            let host = device.allocate((page_bytes * host_pages).max(1), MemoryKind::Pinned)?;
            let staging =
                BufferSlice::whole(device.allocate((page_bytes * BATCH).max(1), MemoryKind::Device)?);
            let gathered = TensorDesc::dense(cache.dtype, &[BATCH, page_bytes / cache.dtype.bytes()]);
            let tensor = |desc: &TensorDesc| Some(OperandDesc::Tensor(desc.clone()));
            let storage = |slice: &BufferSlice| Some(Argument::Tensor(Binding::new(slice.clone())));
            let mut bind =
                |op: Op, operands: &[(&TensorDesc, &BufferSlice)], result: (&TensorDesc, &BufferSlice)| {
                    let call = CallDesc {
                        op,
                        operands: operands.iter().map(|(desc, _)| tensor(desc)).collect(),
                        results: vec![result.0.clone()],
                        comm: None,
                    };
                    let plan = plans.plan(device, &call)?;
                    let workspace = device.allocate(plan.workspace_bytes().max(1), MemoryKind::Device)?;
                    let arguments = Arguments {
                        operands: operands.iter().map(|(_, slice)| storage(slice)).collect(),
                        results: vec![Binding::new(result.1.clone())],
                        workspace: Some(BufferSlice::whole(workspace)),
                    };
                    Ok::<_, crate::EngineError>(plan.bind(&arguments)?)
                };
            let (cache, batch, row) = ((cache, memory), (&pages, &batch), (&gathered, &staging));
            let gather = bind(PageGather {}.into(), &[cache, batch], row)?;
            let scatter = bind(PageScatter {}.into(), &[cache, row, batch], cache)?;
            bound.push(Cache { gather, scatter, staging, host: BufferSlice::whole(host), page_bytes });
        }
        Ok(Self { caches: bound, batch })
    }

    /// Copies pages to pages of host memory, and others from there.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn swap(
        &mut self,
        stream: &mut dyn Stream,
        out: &[(i32, u32)],
        back: &[(u32, i32)],
    ) -> Result<()> {
        let out: Vec<Pair> = out.iter().map(|(page, host_page)| (*host_page as usize, *page)).collect();
        for batch in out.chunks(BATCH) {
            self.upload_batch(stream, batch)?;
            for cache in &self.caches {
                cache.gather.enqueue(stream)?;
                for (place, host_page, bytes) in cache.runs(batch) {
                    stream.copy(&cache.staging.slice(place, bytes)?, &cache.host.slice(host_page, bytes)?)?;
                }
            }
        }
        let back: Vec<Pair> = back.iter().map(|(host_page, page)| (*host_page as usize, *page)).collect();
        for batch in back.chunks(BATCH) {
            self.upload_batch(stream, batch)?;
            for cache in &self.caches {
                for (place, host_page, bytes) in cache.runs(batch) {
                    stream.copy(&cache.host.slice(host_page, bytes)?, &cache.staging.slice(place, bytes)?)?;
                }
                cache.scatter.enqueue(stream)?;
            }
        }
        Ok(())
    }

    fn upload_batch(&self, stream: &mut dyn Stream, batch: &[Pair]) -> Result<()> {
        let mut pages = [-1i32; BATCH];
        pages.iter_mut().zip(batch).for_each(|(entry, (_, page))| *entry = *page);
        Ok(stream.upload(bytemuck::cast_slice(&pages), &self.batch)?)
    }
}

impl Cache {
    /// Pages of a batch that are neighbours in host memory too: where they start in the staging memory, where in the host's, and
    /// how many bytes they are.
    fn runs<'a>(&'a self, batch: &'a [Pair]) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
        let mut start = 0;
        batch.chunk_by(|before, after| before.0 + 1 == after.0).map(move |run| {
            let place = start * self.page_bytes;
            start += run.len();
            (place, run[0].0 * self.page_bytes, run.len() * self.page_bytes)
        })
    }
}

fn page_bytes(cache: &TensorDesc) -> Result<usize> {
    Ok(cache.bytes()? / cache.shape.first().copied().unwrap_or(1).max(1))
}
