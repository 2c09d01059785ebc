//! Moves pages between the caches of all layers and host memory, on a stream of its own.
//!
//! A page is scattered over the caches of all layers. The compute stream gathers pages side by side in a staging area, in order with
//! the steps, and the copy stream copies the area to the host while the next steps run; the other direction is the reverse. So a page
//! may be overwritten by the next step as soon as its gathering is enqueued, whenever its copy is made.
//!
//! | to the host | to the device |
//! |---|---|
//! | compute stream: waits for the area's last copy, gathers, records `used` | copy stream: waits for `used`, copies, records `copied` |
//! | copy stream: waits for `used`, copies, records `copied` | compute stream: waits for `copied`, scatters, records `used` |

use crate::{
    error::Result,
    plan::{PAGE_BATCH, PlanCache, STAGING_AREAS, StagedPages},
};
use dsrun_core::{
    DType, TensorDesc,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc},
    op::{Op, PageGather, PageScatter},
};
use std::sync::Arc;

/// The copy stream, and the staging areas.
#[derive(Debug)]
pub(crate) struct PageLane {
    areas: Vec<Area>,
    /// The area that is used next.
    next: usize,
    /// The pages of a batch: i32, padded with -1.
    batch: BufferSlice,
    copies: Box<dyn Stream>,
    layout: StagedPages,
}

/// A staging area, and the calls that fill it and are fed from it.
#[derive(Debug)]
struct Area {
    gather: Vec<Box<dyn BoundCall>>,
    scatter: Vec<Box<dyn BoundCall>>,
    memory: BufferSlice,
    /// Recorded by the compute stream after its calls.
    used: Stage,
    /// Recorded by the copy stream after its copies.
    copied: Stage,
}

/// An event that may not have been recorded yet.
#[derive(Debug)]
struct Stage {
    event: Arc<dyn Event>,
    recorded: bool,
}

impl Stage {
    fn record(&mut self, stream: &mut dyn Stream) -> Result<()> {
        self.recorded = true;
        Ok(stream.record(&*self.event)?)
    }

    fn wait(&self, stream: &mut dyn Stream) -> Result<()> {
        if self.recorded {
            stream.wait(&*self.event)?;
        }
        Ok(())
    }
}

impl PageLane {
    /// Allocates the staging areas for these caches.
    ///
    /// # Errors
    /// If the device cannot gather and scatter pages, or there is too little memory.
    pub(crate) fn new(
        device: &dyn Device,
        plans: &mut PlanCache,
        caches: &[(TensorDesc, BufferSlice)],
    ) -> Result<Self> {
        let batch = BufferSlice::whole(device.allocate(PAGE_BATCH * DType::I32.bytes(), MemoryKind::Device)?);
        let layout = StagedPages::of_caches(caches.iter().map(|(cache, _)| cache))?;
        let mut kernels = Vec::with_capacity(caches.len());
        for ((cache, _), page) in caches.iter().zip(layout.caches()) {
            let rows = TensorDesc::dense(cache.dtype, &[PAGE_BATCH, page / cache.dtype.bytes()]);
            let pages = TensorDesc::dense(DType::I32, &[PAGE_BATCH]);
            let mut plan = |op: Op, operands: &[&TensorDesc], result: &TensorDesc| {
                let operands =
                    operands.iter().map(|desc| Some(OperandDesc::Tensor((*desc).clone()))).collect();
                let call = CallDesc { op, operands, results: vec![result.clone()], comm: None };
                plans.plan(device, &call.validate()?)
            };
            let gather = plan(PageGather {}.into(), &[cache, &pages], &rows)?;
            let scatter = plan(PageScatter {}.into(), &[cache, &rows, &pages], cache)?;
            kernels.push((gather, scatter));
        }
        // The calls run one after the other, so they share it.
        let plans = kernels.iter().flat_map(|(gather, scatter)| [gather, scatter]);
        let workspace = match plans.map(CheckedPlan::workspace_bytes).max().unwrap_or(0) {
            0 => None,
            bytes => Some(BufferSlice::whole(device.allocate(bytes, MemoryKind::Device)?)),
        };
        let mut areas = Vec::with_capacity(STAGING_AREAS);
        for _ in 0..STAGING_AREAS {
            let memory = BufferSlice::whole(device.allocate(layout.bytes().max(1), MemoryKind::Device)?);
            let stage = || Ok::<_, crate::EngineError>(Stage { event: device.event()?, recorded: false });
            let (used, copied) = (stage()?, stage()?);
            let mut area = Area { gather: Vec::new(), scatter: Vec::new(), memory, used, copied };
            for (number, ((_, cache), (gather, scatter))) in caches.iter().zip(&kernels).enumerate() {
                let rows = layout.range(number, 0..PAGE_BATCH);
                let rows = area.memory.slice(rows.start, rows.len())?;
                let tensor = |slice: &BufferSlice| Some(Argument::Tensor(Binding::new(slice.clone())));
                let bind = |plan: &CheckedPlan, operands: &[&BufferSlice], result: &BufferSlice| {
                    plan.bind(&Arguments {
                        operands: operands.iter().map(|slice| tensor(slice)).collect(),
                        results: vec![Binding::new(result.clone())],
                        workspace: workspace.clone(),
                    })
                };
                area.gather.push(bind(gather, &[cache, &batch], &rows)?);
                area.scatter.push(bind(scatter, &[cache, &rows, &batch], cache)?);
            }
            areas.push(area);
        }
        Ok(Self { areas, next: 0, batch, copies: device.stream()?, layout })
    }

    /// How pages lie in a staging area.
    pub(crate) fn layout(&self) -> &StagedPages {
        &self.layout
    }

    /// Moves at most [`PAGE_BATCH`] pages to the host: gathers them, and calls `copy` with the copy stream and the staging area.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn move_out(
        &mut self,
        compute: &mut dyn Stream,
        pages: &[i32],
        copy: impl FnOnce(&mut dyn Stream, &BufferSlice) -> Result<()>,
    ) -> Result<()> {
        let area = &mut self.areas[self.next];
        self.next = (self.next + 1) % STAGING_AREAS;
        area.copied.wait(compute)?;
        upload(compute, pages, &self.batch)?;
        area.gather.iter().try_for_each(|call| call.enqueue(compute))?;
        area.used.record(compute)?;
        area.used.wait(&mut *self.copies)?;
        copy(&mut *self.copies, &area.memory)?;
        area.copied.record(&mut *self.copies)
    }

    /// Moves at most [`PAGE_BATCH`] pages to the device: calls `copy` with the copy stream and the staging area, and scatters them.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn move_in(
        &mut self,
        compute: &mut dyn Stream,
        pages: &[i32],
        copy: impl FnOnce(&mut dyn Stream, &BufferSlice) -> Result<()>,
    ) -> Result<()> {
        let area = &mut self.areas[self.next];
        self.next = (self.next + 1) % STAGING_AREAS;
        area.used.wait(&mut *self.copies)?;
        copy(&mut *self.copies, &area.memory)?;
        area.copied.record(&mut *self.copies)?;
        area.copied.wait(compute)?;
        upload(compute, pages, &self.batch)?;
        area.scatter.iter().try_for_each(|call| call.enqueue(compute))?;
        area.used.record(compute)
    }
}

fn upload(stream: &mut dyn Stream, pages: &[i32], batch: &BufferSlice) -> Result<()> {
    let mut padded = [-1i32; PAGE_BATCH];
    padded.iter_mut().zip(pages).for_each(|(entry, page)| *entry = *page);
    Ok(stream.upload(bytemuck::cast_slice(&padded), batch)?)
}
