//! Swaps the KV cache pages of pre-empted requests to host memory.
//!
//! Pages are scattered over the caches of all layers. They are first gathered side by side on the device, so that one copy to or
//! from the host moves many of them. All work runs on the engine's stream, in order with the steps: the next step may write to a
//! page that was copied out.

use crate::{
    error::Result,
    plan::{PlanCache, page_bytes},
};
use dsrun_core::{
    DType, TensorDesc,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc},
    op::{Op, PageGather, PageScatter},
};

/// The maximum number of pages gathered at a time.
const BATCH: usize = 32;

/// The host memory, and the calls that copy pages to it and back.
#[derive(Debug)]
pub(crate) struct SwapSpace {
    caches: Vec<Cache>,
    /// The pages of a batch: i32, padded with -1.
    batch: BufferSlice,
}

/// The host memory of one cache, and the calls that gather and scatter its pages.
#[derive(Debug)]
struct Cache {
    gather: Box<dyn BoundCall>,
    scatter: Box<dyn BoundCall>,
    /// Device memory for a batch of gathered pages.
    staging: BufferSlice,
    host: BufferSlice,
    page_bytes: usize,
}

/// The number of a page in host memory, and on the device.
type Pair = (usize, i32);

impl SwapSpace {
    /// Allocates host memory for `host_pages` pages of every cache.
    ///
    /// # Errors
    /// If the device cannot gather and scatter pages, or there is too little memory.
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
                    }
                    .validate()?;
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

    /// Copies the pages `out` to host memory, and then the pages `back` to the device.
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
    /// Splits a batch into runs of pages that are neighbours in host memory too: the offset of each run in the staging memory, its
    /// offset in host memory, and its bytes.
    fn runs<'a>(&'a self, batch: &'a [Pair]) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
        let mut start = 0;
        batch.chunk_by(|before, after| before.0 + 1 == after.0).map(move |run| {
            let place = start * self.page_bytes;
            start += run.len();
            (place, run[0].0 * self.page_bytes, run.len() * self.page_bytes)
        })
    }
}
