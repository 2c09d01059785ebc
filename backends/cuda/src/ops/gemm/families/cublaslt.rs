//! GEMM by cuBLASLt, which does not support extents and packed weights: `linear/unpack.cu`, `linear/guard.cu` and
//! `linear/finish.cu` add these.

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        cublaslt::{Product, Setup, Shape, WORKSPACE},
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{
        THREADS, WIDE,
        elementwise::weight_words,
        gemm::{
            families::{packed_plain, skinny},
            family::{Description, Family},
            fused_linear::Epilogue,
            problem::{Args, Problem, ProductPlan},
        },
        plane, type_name,
        weight::{UNIT, format_name, layout},
        wide,
    },
};
use dsrun_core::{DType, Result};
use std::{
    fmt::Display,
    sync::{Arc, Mutex, PoisonError},
};

/// From this many bytes of results on, saving and restoring the rows past the extent is cheaper than copying the valid ones: two
/// launches without work take about as long as one that copies 4 MiB.
const GUARDED: usize = 4 << 20;
/// Blocks of `guard`.
const GUARDS: usize = 264;
/// Bytes of weights unpacked at a time.
const SLAB: usize = 64 << 20;

/// How a product is written to its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// Directly: all rows are valid, or may be overwritten.
    Direct,
    /// Directly; rows past the extent are saved before and restored afterwards.
    Guarded,
    /// Through scratch memory; the valid rows are copied.
    Copied,
    /// Through scratch memory; bias and residual are added when the valid rows are copied.
    Finished,
}

impl Arrival {
    fn of(problem: &Problem<'_>) -> Self {
        let (x, y, bias) = (problem.x, problem.y, problem.bias);
        // cuBLASLt writes the type of x or f32, and supports only a bias of the type it writes.
        let takes_all = [x.dtype, DType::F32].contains(&y.dtype) && bias.is_none_or(|bias| bias == y.dtype);
        // If rows of y are not whole vectors, cuBLASLt rounds before it adds the bias.
        let vectors = [problem.outputs(), y.strides[0]]
            .iter()
            .all(|count| (count * y.dtype.bytes()).is_multiple_of(16));
        let takes_all = takes_all && (bias.is_none() || y.dtype == DType::F32 || vectors);
        let bounded = x.bounded || y.bounded || problem.residual.is_some_and(|residual| residual.bounded);
        if !takes_all {
            Self::Finished
        } else if problem.scratch || !bounded {
            Self::Direct
        } else if problem.rows() * problem.outputs() * y.dtype.bytes() >= GUARDED {
            Self::Guarded
        } else {
            Self::Copied
        }
    }

    /// Whether the product goes to scratch memory.
    fn is_in_scratch(self) -> bool {
        matches!(self, Self::Copied | Self::Finished)
    }
}

/// The launches that a problem without a norm needs after the product: one for a bias of another type or another misfit, and one for
/// an epilogue other than a plain sum. Rows past the extent and heads, which other kernels may need a launch for as well, do not
/// count.
pub(super) fn launches_after(problem: &Problem<'_>) -> usize {
    let finished = Arrival::of(problem) == Arrival::Finished;
    let epilogue = match problem.fused.epilogue {
        Epilogue::Nothing | Epilogue::Heads(_) => false,
        Epilogue::Sum(..) => !problem.is_unscaled_sum(),
        Epilogue::Activation(_) | Epilogue::Gate(_) => true,
    };
    usize::from(finished) + usize::from(epilogue)
}

/// See the module.
pub(in crate::ops::gemm) struct CublasLt;

impl Family for CublasLt {
    fn description(&self) -> Description {
        Description {
            kernel: "cuBLASLt",
            rows: format!("more than {}; of integers more than {}", skinny::ROWS, packed_plain::ROWS),
            devices: "all",
            operands: "the same type throughout; integers, unpacked to the type of the activations; any weights for f32",
            fused: "a sum".to_owned(),
            method: "without TF32; weights are unpacked slab by slab",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        // A dense weight may be widened, which is exact, but must not be rounded to a narrower type of x.
        let exact = problem.is_uniform() || problem.is_quantised() || problem.x.dtype == DType::F32;
        let enough_rows = match problem.is_quantised() {
            true => problem.rows() > packed_plain::ROWS,
            false => problem.rows() > skinny::ROWS || !device.custom_gemm,
        };
        device.blas
            && (problem.is_bare() || problem.is_unscaled_sum())
            && !problem.is_int8()
            && problem.inputs() > 0
            && exact
            && enough_rows
    }

    fn plan(&self, problem: &Problem<'_>, _: &DeviceSpec) -> Result<ProductPlan> {
        let plan = BlasPlan::new(problem)?;
        Ok(ProductPlan {
            kernels: plan.kernels(problem)?,
            workspace: WORKSPACE + plan.slab_bytes + plan.scratch_bytes,
            persistent: 0,
            launches: Box::new(move |args| plan.launches(args)),
        })
    }
}

/// A cuBLASLt product with the launches around it.
struct BlasPlan {
    arrival: Arrival,
    shape: Shape,
    outputs: usize,
    /// Outputs whose weights are unpacked at a time; all outputs if weights are not unpacked.
    slab: usize,
    /// Bytes of scratch memory for unpacked weights; 0 if weights are not unpacked.
    slab_bytes: usize,
    /// Bytes of scratch memory for the product, or for the saved rows.
    scratch_bytes: usize,
    /// Whether integers are unpacked, rather than dense weights widened.
    packed: bool,
    /// Whether the product is copied [`WIDE`] elements at a time.
    wide: bool,
    bias_bytes: usize,
    setups: Setups,
}

impl BlasPlan {
    fn new(problem: &Problem<'_>) -> Result<Self> {
        let (rows, outputs, inputs) = (problem.rows(), problem.outputs(), problem.inputs());
        let (dtype, size) = (problem.x.dtype, problem.x.dtype.bytes());
        let arrival = Arrival::of(problem);
        // A product that is finished by a later launch is kept in f32.
        let result = if arrival == Arrival::Finished { DType::F32 } else { problem.y.dtype };
        // Whole units of packed rows.
        let slab = (SLAB / (inputs * size)).max(1).next_multiple_of(UNIT).min(outputs);
        let slab_stride = (inputs * size).next_multiple_of(16) / size;
        let (slab, slab_bytes, weight_stride) = match problem.is_uniform() {
            true => (outputs, 0, layout(problem.weight)?.row_bytes / size),
            false => (slab, (slab * slab_stride * size).next_multiple_of(256), slab_stride),
        };
        let y_stride = if arrival.is_in_scratch() { outputs } else { problem.y.strides[0] };
        let residual = problem.residual.filter(|_| arrival != Arrival::Finished);
        let shape = Shape {
            rows,
            outputs: slab,
            inputs,
            dtype,
            result,
            strides: [problem.x.strides[0], weight_stride, y_stride],
            residual: residual.map(|residual| residual.strides[0]),
            alignments: [0; 4],
            bias: 0,
        };
        Ok(Self {
            arrival,
            shape,
            outputs,
            slab,
            slab_bytes,
            scratch_bytes: if arrival == Arrival::Direct { 0 } else { rows * outputs * result.bytes() },
            packed: problem.packing().is_some(),
            wide: wide(&[problem.y]) && problem.residual.is_none_or(|residual| wide(&[residual])),
            bias_bytes: problem.bias.map_or(0, DType::bytes),
            setups: Setups::default(),
        })
    }

    /// Whether weights are unpacked first.
    fn unpacks(&self) -> bool {
        self.slab_bytes > 0
    }

    /// The kernels: `unpack`, if weights are unpacked, and the kernel that saves or copies rows, if one is needed.
    fn kernels(&self, problem: &Problem<'_>) -> Result<Vec<KernelSpec>> {
        let mut kernels = Vec::new();
        let y = type_name(problem.y.dtype)?;
        if self.unpacks() {
            let defines: [(_, &dyn Display); 2] =
                [("Y", &type_name(problem.x.dtype)?), ("FORMAT", &format_name(problem.weight.format)?)];
            let entry = if self.packed { "unpack_integers" } else { "unpack" };
            kernels.push(KernelSpec::new("linear/unpack.cu", entry, defines));
        }
        match self.arrival {
            Arrival::Direct => {}
            Arrival::Guarded => kernels.push(KernelSpec::new("linear/guard.cu", "guard", [("Y", &y)])),
            Arrival::Copied | Arrival::Finished => {
                let defines: [(_, &dyn Display); 3] =
                    [("X", &type_name(self.shape.result)?), ("BIAS", &problem.bias_name()?), ("Y", &y)];
                let entry = if self.wide { "finish_wide" } else { "finish" };
                kernels.push(KernelSpec::new("linear/finish.cu", entry, defines));
            }
        }
        Ok(kernels)
    }

    fn launches(&self, args: &Args<'_>) -> Result<Vec<LaunchOp>> {
        let slabs = args.workspace + WORKSPACE as u64;
        let scratch = slabs + self.slab_bytes as u64;
        let in_place = ((args.y.address, args.y.stride(0)), (scratch, self.outputs));
        let mut launches = Vec::new();
        if self.arrival == Arrival::Guarded {
            launches.extend(self.guard(args, in_place.0, in_place.1)?);
        }
        for first in (0..self.outputs).step_by(self.slab.max(1)) {
            let count = self.slab.min(self.outputs - first);
            let weight = match self.unpacks() {
                true => {
                    launches.extend(self.unpack(args, [first, count], slabs)?);
                    slabs
                }
                false => args.weight.address() + (first * args.weight.layout.row_bytes) as u64,
            };
            launches.push(self.product(args, [first, count], weight, scratch)?);
        }
        match self.arrival {
            Arrival::Direct => {}
            Arrival::Guarded => launches.extend(self.guard(args, in_place.1, in_place.0)?),
            Arrival::Copied | Arrival::Finished => launches.extend(self.finish(args, scratch)?),
        }
        Ok(launches)
    }

    /// Unpacks rows of weights to scratch memory.
    fn unpack(&self, args: &Args<'_>, [first, count]: [usize; 2], to: u64) -> Result<Option<LaunchOp>> {
        let [_, stride, _] = self.shape.strides;
        let parameters = Parameters::default().size(first).size(count).size(self.shape.inputs);
        let parameters = weight_words(parameters, Some(args.weight)).address(to).size(stride);
        // A warp processes 64 bytes of 8 rows of integers.
        let grid = match self.packed {
            true => plane(count.div_ceil(UNIT), self.shape.inputs.div_ceil(64) * 32),
            false => plane(count, self.shape.inputs),
        };
        Ok(LaunchOp::kernel(args.function(0)?, grid, THREADS, parameters))
    }

    /// The product of a slab of weights.
    fn product(
        &self,
        args: &Args<'_>,
        [first, count]: [usize; 2],
        weight: u64,
        scratch: u64,
    ) -> Result<LaunchOp> {
        let at = |address: u64, bytes: usize| if address == 0 { 0 } else { address + (first * bytes) as u64 };
        let element = self.shape.result.bytes();
        let y = at(if self.arrival.is_in_scratch() { scratch } else { args.y.address }, element);
        let (bias, residual) = match self.arrival {
            Arrival::Finished => (0, 0),
            _ => (at(args.bias, self.bias_bytes), at(args.residual_rows().0, element)),
        };
        let added = if residual == 0 { y } else { residual };
        let alignments = [args.x.address, weight, added, y].map(alignment);
        let shape = Shape { outputs: count, alignments, bias, ..self.shape };
        let setup = self.setups.get(args.context, shape)?;
        let (x, workspace) = (args.x.address, args.workspace);
        Ok(LaunchOp::Product(Product { setup, x, weight, added, y, workspace }))
    }

    /// Copies rows past the extent.
    fn guard(&self, args: &Args<'_>, from: (u64, usize), to: (u64, usize)) -> Result<Option<LaunchOp>> {
        let parameters = Parameters::default()
            .extent(self.shape.rows, &args.bounds)
            .size(self.shape.rows)
            .size(self.outputs)
            .address(from.0)
            .size(from.1)
            .address(to.0)
            .size(to.1);
        Ok(LaunchOp::kernel(args.function(self.last())?, [GUARDS, 1, 1], THREADS, parameters))
    }

    /// Copies valid rows from scratch memory, and adds bias and residual if needed.
    fn finish(&self, args: &Args<'_>, scratch: u64) -> Result<Option<LaunchOp>> {
        let (bias, residual) = match self.arrival {
            Arrival::Finished => (args.bias, args.residual_rows()),
            _ => (0, (0, 0)),
        };
        let rows = self.shape.rows;
        let parameters = Parameters::default()
            .extent(rows, &args.bounds)
            .size(self.outputs)
            .address(scratch)
            .size(self.outputs)
            .address(bias)
            .address(residual.0)
            .size(residual.1)
            .rows(args.y);
        let items = if self.wide { self.outputs / WIDE } else { self.outputs };
        Ok(LaunchOp::kernel(args.function(self.last())?, plane(rows, items), THREADS, parameters))
    }

    /// The index of the kernel that saves or copies rows.
    fn last(&self) -> usize {
        usize::from(self.unpacks())
    }
}

/// The largest power of two, up to 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// The cuBLASLt setups made so far, shared by all layers that share a plan.
#[derive(Default)]
struct Setups(Mutex<Vec<(Shape, Arc<Setup>)>>);

impl Setups {
    fn get(&self, context: &Context, shape: Shape) -> Result<Arc<Setup>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, setup)) = known.iter().find(|(known, _)| *known == shape) {
            return Ok(setup.clone());
        }
        context.enter()?;
        let setup = Arc::new(Setup::new(context.blas()?, shape)?);
        known.push((shape, setup.clone()));
        Ok(setup)
    }
}
