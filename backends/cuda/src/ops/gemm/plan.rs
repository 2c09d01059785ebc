//! Plans a fused linear layer with as few launches as the kernel families allow.

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        launch::{Function, LaunchOp},
    },
    ops::{
        KernelPlan,
        bound::Bound,
        frame::Frame,
        gemm::{
            apply_epilogue::ApplyEpilogue,
            fused_linear::FusedLinear,
            problem::{Args, Problem, ProductPlan},
            select::select,
        },
        norm::{self, InFront},
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc, kernels::CallDesc};
use std::sync::Arc;

/// The launches for a fused linear layer.
///
/// Tries in this order: all in one launch; the norm as a separate launch; the epilogue as a separate launch; norm, product and
/// epilogue as three launches. So a fused layer is native for every number of rows.
pub(in crate::ops) fn plan(fused: FusedLinear, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let whole = Problem::new(fused, call)?;
    if let Some(family) = select(&whole, device) {
        return Ok(Stages::new(&whole, family.plan(&whole, device)?).into_plan(device));
    }
    let normed = scratch(whole.x.dtype, whole.x, whole.x.shape[1]);
    let (norm, rest) = match fused.norm {
        None => (None, whole),
        Some(norm) => {
            let launch = norm::in_front(norm, whole.x, &normed.desc, call, device)?;
            (Some((launch, normed.clone())), whole.without_norm(&normed.desc))
        }
    };
    if let Some(family) = select(&rest, device) {
        return Ok(Stages { norm, ..Stages::new(&rest, family.plan(&rest, device)?) }.into_plan(device));
    }
    let product = scratch(fused.product, rest.x, rest.outputs());
    let with_norm = whole.without_epilogue(&product.desc);
    let (norm, bare, family) = match select(&with_norm, device) {
        Some(family) => (None, with_norm, Some(family)),
        None => {
            let bare = rest.without_epilogue(&product.desc);
            let family = select(&bare, device);
            (norm, bare, family)
        }
    };
    let family = family.ok_or_else(|| {
        Error::unsupported(format!(
            "CUDA has no kernel for {} x, {} weights",
            bare.x.dtype, bare.weight.format
        ))
    })?;
    let epilogue = ApplyEpilogue::new(rest.fused, &product.desc, call, device)?;
    let stages = Stages::new(&bare, family.plan(&bare, device)?);
    Ok(Stages { norm, epilogue: Some((epilogue, product)), ..stages }.into_plan(device))
}

/// A tensor in scratch memory, and its size in bytes.
#[derive(Clone)]
struct Scratch {
    desc: TensorDesc,
    bytes: usize,
}

impl Scratch {
    fn bound(&self, address: u64, extent: u64) -> Bound {
        Bound { desc: self.desc.clone(), address, extent }
    }
}

/// A tensor with as many rows as `like`, with rows aligned to 16 bytes for vector loads.
fn scratch(dtype: DType, like: &TensorDesc, columns: usize) -> Scratch {
    let stride = (columns * dtype.bytes()).next_multiple_of(16) / dtype.bytes();
    let mut desc = TensorDesc::dense(dtype, &[like.shape[0], columns]);
    desc.strides[0] = stride;
    desc.bounded = like.bounded;
    let bytes = (like.shape[0] * stride * dtype.bytes()).next_multiple_of(256);
    Scratch { desc, bytes }
}

/// A product with the launches around it.
struct Stages {
    /// The part that the product's launch computes.
    fused: FusedLinear,
    /// The separate launch of the norm, with its result.
    norm: Option<(InFront, Scratch)>,
    product: ProductPlan,
    /// The separate launch of the epilogue, with the product it is applied to.
    epilogue: Option<(ApplyEpilogue, Scratch)>,
}

impl Stages {
    fn new(problem: &Problem<'_>, product: ProductPlan) -> Self {
        Self { fused: problem.fused, norm: None, product, epilogue: None }
    }

    fn into_plan(mut self, device: &DeviceSpec) -> KernelPlan {
        let mut kernels: Vec<_> = self.norm.iter().map(|(norm, _)| norm.spec.clone()).collect();
        kernels.append(&mut self.product.kernels);
        kernels.extend(self.epilogue.iter().map(|(epilogue, _)| epilogue.spec.clone()));
        let normed = self.norm.as_ref().map_or(0, |(_, normed)| normed.bytes);
        let product = self.epilogue.as_ref().map_or(0, |(_, product)| product.bytes);
        KernelPlan {
            kernels,
            workspace: normed + product + self.product.workspace,
            persistent: self.product.persistent,
            batch_invariant: device.batch_invariant,
            launches: Box::new(move |frame, functions, context| self.launches(frame, functions, context)),
        }
    }

    fn launches(
        &self,
        frame: &Frame,
        mut functions: &[Arc<Function>],
        context: &Context,
    ) -> Result<Vec<LaunchOp>> {
        let x = frame.tensor(self.fused.x)?;
        let mut workspace = frame.workspace;
        let mut launches = Vec::new();
        let mut normed = None;
        if let Some((norm, to)) = &self.norm {
            let (first, rest) = functions.split_first().ok_or_else(too_few_functions)?;
            let to_bytes = to.bytes as u64;
            let to = to.bound(workspace, x.extent);
            launches.extend(norm.step(frame, x, &to, first)?);
            (functions, normed, workspace) = (rest, Some(to), workspace + to_bytes);
        }
        let x = normed.as_ref().unwrap_or(x);
        let Some((epilogue, to)) = &self.epilogue else {
            let y = frame.result(0)?;
            launches.extend(self.product_launches(frame, [x, y], workspace, functions, context)?);
            return Ok(launches);
        };
        let product = to.bound(workspace, x.extent);
        let (last, functions) = functions.split_last().ok_or_else(too_few_functions)?;
        let workspace = workspace + to.bytes as u64;
        launches.extend(self.product_launches(frame, [x, &product], workspace, functions, context)?);
        if product.size(0) > 0 && product.size(1) > 0 {
            launches.extend(epilogue.launch(frame, &product, last)?);
        }
        Ok(launches)
    }

    /// The launches of the product from `x` to `y`; none if it is empty.
    fn product_launches(
        &self,
        frame: &Frame,
        [x, y]: [&Bound; 2],
        workspace: u64,
        functions: &[Arc<Function>],
        context: &Context,
    ) -> Result<Vec<LaunchOp>> {
        if y.size(0) == 0 || y.size(1) == 0 {
            return Ok(Vec::new());
        }
        let args = Args::new(&self.fused, frame, [x, y], workspace, functions, context)?;
        (self.product.launches)(&args)
    }
}

fn too_few_functions() -> Error {
    Error::internal("a plan with fewer functions than launches")
}
