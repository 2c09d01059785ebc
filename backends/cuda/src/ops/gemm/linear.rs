//! Products: `linear` and `linear_w8a8` over packed weights, and `matmul` over two tensors.
//!
//! | rows | types | kernel |
//! |---|---|---|
//! | 1 | dense weights | `stream`: plain arithmetic at memory speed |
//! | 1 to 4 | all others, dense | `skinny`: plain arithmetic |
//! | 5 to 16 | f16 or bf16 throughout | `skinny_mma`: tensor cores at memory speed |
//! | 1 to 16 | integers, f16 or bf16 | `packed`: tensor cores at memory speed (see [`super::packed`]) |
//! | 17 to 256 | integers, f16 or bf16, on sm_90 | `packed_wgmma` (see [`mixed`]) |
//! | 17 to 32 | integers, f16 or bf16, on others | `packed`, 16 rows at a time |
//! | 1 to 32 | integers, f32, or before sm_80 | `packed_plain`, four rows at a time |
//! | 17 to 128 | f16 or bf16 weights and activations, on sm_90 | `batch_wgmma`: tensor cores at memory speed (see [`super::batch`]) |
//! | 129 to 1024, without a sum to 2048 | the same, written in that type, with tiles enough for all multiprocessors | `tile_wgmma`: at the speed of the tensor cores (see [`super::batch`]) |
//! | more | same type throughout; integers unpacked to the type of `x`; any weight widened for f32 | cuBLASLt |
//! | more | others, or without cuBLASLt | `skinny_mma` to 64 rows, then `tiled` |
//! | any | bytes times bytes | `packed` to 16 rows, on sm_90 `batch_wgmma` to 128, then see [`int8`] |

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        cublaslt::{Product, Setup, Shape, WORKSPACE},
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID, Parameters},
    },
    ops::{
        KernelPlan, THREADS, WIDE,
        elementwise::weight_words,
        frame::{Bound, Frame},
        gemm::{decode_gemm, fused_linear::FusedLinear, int8, packed_gemm, small_batch, weight_only},
        operand, plane, result, type_name, type_of,
        weight::{Packing, UNIT, format_name},
        weight_type, wide,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightFormat, WeightType,
    kernels::CallDesc,
    op::{GateLayout, GatedActivation, Linear, LinearW8A8, Matmul, RmsNorm},
};
use std::{
    fmt::Display,
    sync::{Arc, Mutex, PoisonError},
};

/// The most inputs that `stream` keeps in shared memory, as f32 beside its ring.
const STAGED: usize = 7168;
/// Blocks of `stream` on a multiprocessor.
const BLOCKS: usize = 6;
/// Warps of a block of `skinny` and of `stream`.
const WARPS: usize = 4;
/// Rows that cuBLASLt is not asked for.
const FEW_ROWS: usize = 16;
/// The same for block formats, which would have to be unpacked.
const FEW_ROWS_OF_BLOCKS: usize = 32;
/// The most rows of `skinny_mma`.
const MMA_ROWS: usize = 64;
/// Bytes of a product from where on guarding rows is cheaper than copying them: two launches that find nothing to do take
/// about as long as one that copies 4 MiB.
const GUARDED: usize = 4 << 20;
/// Blocks of `guard`.
const GUARDS: usize = 264;
/// Bytes of weights unpacked at a time.
const SLAB: usize = 64 << 20;

/// A linear layer, whatever its operands are called.
pub(super) struct Layer<'a> {
    pub(super) x: &'a TensorDesc,
    pub(super) weight: &'a WeightType,
    pub(super) y: &'a TensorDesc,
    /// Element type of the bias, if there is one.
    pub(super) bias: Option<DType>,
    /// The norm in front, with the element type of its weight.
    pub(super) norm: Option<(RmsNorm, DType)>,
    /// What the product is added to, of the type of `y`, rounded once. Only where [`Layer::takes_residual`] says so.
    pub(super) residual: Option<&'a TensorDesc>,
    /// What makes `y` of the two halves of the product. Only where [`Layer::takes_gate`] says so.
    pub(super) gate: Option<GatedActivation>,
    /// Whether `x` are bytes with a scale for each row.
    pub(super) bytes: bool,
    /// Whether `y` is scratch memory, where rows past the extent may be written.
    pub(super) scratch: bool,
}

/// Where a layer's tensors are.
pub(super) struct Args<'a> {
    pub(super) x: &'a Bound,
    pub(super) weight: &'a crate::ops::weight::CudaWeight,
    pub(super) bias: u64,
    pub(super) gain: u64,
    /// Scales of the rows of `x`, where those are bytes.
    pub(super) scales: u64,
    /// As [`Layer::residual`]. It may be `y` itself.
    pub(super) residual: Option<&'a Bound>,
    pub(super) y: &'a Bound,
    /// Tensors whose extents count.
    pub(super) bounds: &'a [&'a Bound],
    pub(super) workspace: u64,
}

/// How a layer is run.
pub(super) struct Layered {
    pub(super) kernels: Vec<KernelSpec>,
    pub(super) workspace: usize,
    pub(super) batch_invariant: bool,
    pub(super) launches: LayerLaunches,
}

/// As [`super::MakeLaunches`], for a layer.
type LayerLaunches =
    Box<dyn Fn(&Args<'_>, &[Arc<Function>], &Context) -> Result<Vec<LaunchOp>> + Send + Sync>;

impl Layered {
    pub(super) fn launches(
        &self,
        places: &Args<'_>,
        functions: &[Arc<Function>],
        context: &Context,
    ) -> Result<Vec<LaunchOp>> {
        (self.launches)(places, functions, context)
    }
}

/// Elements of a dense weight in 16 bytes.
fn width(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense(dtype) => 16 / dtype.bytes(),
        _ => 1,
    }
}

/// Whether rows begin at multiples of 16 bytes.
pub(super) fn is_vectors(rows: &TensorDesc) -> bool {
    (rows.strides[0] * rows.dtype.bytes()).is_multiple_of(16)
}

/// The kernels there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelKind {
    Stream,
    Skinny,
    SkinnyMma,
    PackedPlain,
    Batch,
    CublasLt,
    Tiled,
    Int8,
    Mixed,
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

impl Layer<'_> {
    pub(super) fn rows(&self) -> usize {
        self.x.shape[0]
    }

    pub(super) fn outputs(&self) -> usize {
        self.weight.rows()
    }

    pub(super) fn inputs(&self) -> usize {
        self.weight.columns()
    }

    pub(super) fn bias_name(&self) -> Result<&'static str> {
        self.bias.map_or(Ok("f32"), type_name)
    }

    /// Whether the norm in front can be part of the kernel.
    pub(super) fn takes_norm(&self, device: &DeviceSpec) -> bool {
        device.custom_gemm && self.rows() <= WARPS && !self.weight.format.is_quantised()
    }

    /// The kernel for the layer: see the table above.
    fn kernel_kind(&self, device: &DeviceSpec) -> KernelKind {
        let (rows, format) = (self.rows(), self.weight.format);
        let same = format == WeightFormat::Dense(self.x.dtype);
        let on_tensor_cores = device.capability >= 80
            && same
            && is_half(self.x.dtype)
            && self.inputs().is_multiple_of(32)
            && self.x.strides[0].is_multiple_of(8);
        let few = if format.is_quantised() { FEW_ROWS_OF_BLOCKS } else { FEW_ROWS };
        // Only widening is exact; a narrower type for `x` than for a dense weight must not round the weight.
        let by_blas =
            device.blas && self.inputs() > 0 && (same || format.is_quantised() || self.x.dtype == DType::F32);
        let indexable = self.outputs().max(self.inputs()) < 1 << 30;
        if self.norm.is_none() && self.planes().fit(device) {
            KernelKind::Batch
        } else if self.bytes {
            KernelKind::Int8
        } else if weight_only::fits(self, device) {
            KernelKind::Mixed
        } else if format.is_quantised() && rows <= few {
            KernelKind::PackedPlain
        } else if by_blas && !device.custom_gemm {
            KernelKind::CublasLt
        } else if rows == 1
            && device.capability >= 80
            && !format.is_quantised()
            && self.inputs() > 0
            && indexable
        {
            KernelKind::Stream
        } else if rows <= 4 || self.norm.is_some() || (rows <= few && !on_tensor_cores) {
            KernelKind::Skinny
        } else if on_tensor_cores && (rows <= FEW_ROWS || (rows <= MMA_ROWS && !by_blas)) {
            KernelKind::SkinnyMma
        } else if by_blas {
            KernelKind::CublasLt
        } else {
            KernelKind::Tiled
        }
    }

    /// Whether the sum with [`Layer::residual`] can be part of the product.
    pub(super) fn takes_residual(&self, device: &DeviceSpec) -> bool {
        matches!(
            self.kernel_kind(device),
            KernelKind::Batch | KernelKind::CublasLt | KernelKind::Int8 | KernelKind::Mixed
        )
    }

    /// Whether a gate of this layout can be part of the product.
    pub(super) fn takes_gate(&self, layout: GateLayout, device: &DeviceSpec) -> bool {
        self.kernel_kind(device) == KernelKind::Int8 && int8::takes_gate(self, layout, device)
    }

    pub(super) fn plan(&self, device: &DeviceSpec) -> Result<Layered> {
        format_name(self.weight.format)?;
        let way = self.kernel_kind(device);
        if self.residual.is_some() && !self.takes_residual(device) {
            return Err(Error::internal("a sum was asked of a product that has none"));
        }
        match way {
            KernelKind::Stream => self.stream(device),
            KernelKind::Skinny => self.skinny(device),
            KernelKind::SkinnyMma => self.skinny_mma(),
            KernelKind::PackedPlain => self.packed_plain(),
            KernelKind::Batch => self.batch(device),
            KernelKind::CublasLt => self.by_blas(),
            KernelKind::Int8 => int8::plan(self, device),
            KernelKind::Mixed => weight_only::plan(self, device),
            KernelKind::Tiled => self.tiled(),
        }
    }

    fn stream(&self, device: &DeviceSpec) -> Result<Layered> {
        let format = self.weight.format;
        let pieces = self.inputs().div_ceil(width(format));
        // Warps that a multiprocessor holds; fewer than two thirds of them would leave memory waiting.
        let most = device.sm_count * BLOCKS * WARPS;
        let split =
            [1, 2].into_iter().find(|split| self.outputs() * split * 2 >= most || pieces < 64 * split);
        let split = split.unwrap_or(WARPS);
        // As many groups as make all take the same number of turns.
        let turns = self.outputs().div_ceil((most / split).max(1)).max(1);
        let blocks = self.outputs().div_ceil(turns).div_ceil(WARPS / split);
        let vectors = |dtype: DType| self.inputs().is_multiple_of(width(format).max(16 / dtype.bytes()));
        let gain = self.norm.as_ref().map_or(DType::F32, |(_, dtype)| *dtype);
        let defines: [(_, &dyn Display); 10] = [
            ("X", &type_name(self.x.dtype)?),
            ("Y", &type_name(self.y.dtype)?),
            ("BIAS", &self.bias_name()?),
            ("G", &type_name(gain)?),
            ("FORMAT", &format_name(format)?),
            ("SPLIT", &split),
            ("X_VECTORS", &i32::from(vectors(self.x.dtype) && self.x.dtype.bytes() * width(format) >= 16)),
            ("STAGED", &(if self.inputs() <= STAGED { pieces } else { 0 })),
            ("WHOLE", &i32::from(pieces.is_multiple_of(32 * split))),
            ("NORM", &i32::from(self.norm.is_some())),
        ];
        let norm = self.norm.as_ref().map_or((0.0, 0.0), |(norm, _)| (norm.eps, norm.weight_offset));
        Ok(Layered {
            kernels: vec![KernelSpec::new("linear/stream.cu", "stream", defines)],
            workspace: 0,
            batch_invariant: true,
            launches: Box::new(move |places, functions, _| {
                let parameters = weight_words(common(places).rows(places.x), Some(places.weight));
                let parameters = parameters.address(places.bias).rows(places.y);
                let parameters = parameters.address(places.gain).float(norm.0).float(norm.1);
                let step = LaunchOp::kernel(function(functions, 0)?, [blocks, 1, 1], WARPS * 32, parameters);
                Ok(step.into_iter().collect())
            }),
        })
    }

    fn skinny(&self, device: &DeviceSpec) -> Result<Layered> {
        let format = self.weight.format;
        let tokens = self.rows().next_power_of_two().clamp(1, WARPS);
        let pieces = self.inputs().div_ceil(width(format));
        // Several outputs for a warp where a read of x is dear beside the weights it meets.
        let outputs = if tokens == 4 { 2 } else { 1 };
        let wanted = device.sm_count * 16;
        let split = [1, 2, 4]
            .into_iter()
            .find(|split| self.outputs() / outputs * split >= wanted || pieces < 64 * split)
            .unwrap_or(WARPS);
        let unroll = pieces.div_ceil(32 * split).next_power_of_two().clamp(1, 8 / outputs);
        let vectors = self.x.strides[0].is_multiple_of(16 / self.x.dtype.bytes())
            && self.inputs().is_multiple_of(width(format).max(16 / self.x.dtype.bytes()));
        let gain = self.norm.as_ref().map_or(Ok("f32"), |(_, dtype)| type_name(*dtype))?;
        let defines: [(_, &dyn Display); 11] = [
            ("X", &type_name(self.x.dtype)?),
            ("Y", &type_name(self.y.dtype)?),
            ("BIAS", &self.bias_name()?),
            ("G", &gain),
            ("FORMAT", &format_name(format)?),
            ("TOKENS", &tokens),
            ("ROWS", &outputs),
            ("SPLIT", &split),
            ("UNROLL", &unroll),
            ("X_VECTORS", &i32::from(vectors)),
            ("NORM", &i32::from(self.norm.is_some())),
        ];
        let spec = KernelSpec::new("linear/skinny.cu", "skinny", defines);
        let norm = self.norm.as_ref().map(|(norm, _)| *norm);
        let per_block = WARPS / split * outputs;
        Ok(Layered {
            kernels: vec![spec],
            workspace: 0,
            batch_invariant: true,
            launches: Box::new(move |places, functions, _| {
                let mut parameters = common(places);
                parameters = parameters.rows(places.x);
                parameters =
                    weight_words(parameters, Some(places.weight)).address(places.bias).rows(places.y);
                if let Some(norm) = norm {
                    parameters = parameters.address(places.gain).float(norm.eps).float(norm.weight_offset);
                }
                let grid = [places.y.size(1).div_ceil(per_block), places.y.size(0).div_ceil(tokens), 1];
                Ok(LaunchOp::kernel(function(functions, 0)?, grid, WARPS * 32, parameters)
                    .into_iter()
                    .collect())
            }),
        })
    }

    fn skinny_mma(&self) -> Result<Layered> {
        let blocks = self.inputs() / 32;
        let tiles = self.rows().div_ceil(8).next_power_of_two();
        let unroll = blocks.div_ceil(8).next_power_of_two().clamp(1, 4);
        let name = type_name(self.x.dtype)?;
        let defines: [(_, &dyn Display); 6] = [
            ("X", &name),
            ("Y", &type_name(self.y.dtype)?),
            ("BIAS", &self.bias_name()?),
            ("HALF", &i32::from(self.x.dtype == DType::F16)),
            ("TILES", &tiles),
            ("UNROLL", &unroll),
        ];
        Ok(Layered {
            kernels: vec![KernelSpec::new("linear/skinny_mma.cu", "skinny_mma", defines)],
            workspace: 0,
            batch_invariant: true,
            launches: Box::new(|places, functions, _| {
                let parameters = common(places)
                    .rows(places.x)
                    .address(places.weight.address())
                    .size(places.weight.layout.row_bytes)
                    .address(places.bias)
                    .rows(places.y);
                let grid = [places.y.size(1).div_ceil(16), places.y.size(0).min(1), 1];
                Ok(LaunchOp::kernel(function(functions, 0)?, grid, 256, parameters).into_iter().collect())
            }),
        })
    }

    fn packed_plain(&self) -> Result<Layered> {
        let tokens = self.rows().next_power_of_two().clamp(1, WARPS);
        let defines: [(_, &dyn Display); 5] = [
            ("X", &type_name(self.x.dtype)?),
            ("Y", &type_name(self.y.dtype)?),
            ("BIAS", &self.bias_name()?),
            ("FORMAT", &format_name(self.weight.format)?),
            ("TOKENS", &tokens),
        ];
        Ok(Layered {
            kernels: vec![KernelSpec::new("linear/packed_plain.cu", "packed_plain", defines)],
            workspace: 0,
            batch_invariant: true,
            launches: Box::new(move |places, functions, _| {
                let parameters = weight_words(common(places).rows(places.x), Some(places.weight));
                let parameters = parameters.address(places.bias).rows(places.y);
                let grid = [places.y.size(1).div_ceil(WARPS * UNIT), places.y.size(0).div_ceil(tokens), 1];
                Ok(LaunchOp::kernel(function(functions, 0)?, grid, WARPS * 32, parameters)
                    .into_iter()
                    .collect())
            }),
        })
    }

    fn planes(&self) -> small_batch::Planes<'_> {
        let (x, weight, y, bias, residual) = (self.x, self.weight, self.y, self.bias, self.residual);
        small_batch::Planes { x, weight, y, bias, residual, gated: false, limited: false }
    }

    fn batch(&self, device: &DeviceSpec) -> Result<Layered> {
        let y = type_name(self.y.dtype)?;
        // The constants and the words of an epilogue that adds a residual or nothing.
        let defines: [(_, &dyn Display); 7] = [
            ("EPILOGUE", &i32::from(self.residual.is_some())),
            ("FUNCTION", &1),
            ("INTERLEAVED", &0),
            ("ROPE", &0),
            ("NEIGHBOURS", &0),
            ("CACHE", &"f32"),
            ("Y", &y),
        ];
        let defines = defines.into_iter().map(|(name, value)| (name, value.to_string())).collect();
        let batch = self.planes().plan(defines, device)?;
        Ok(Layered {
            kernels: vec![batch.spec.clone()],
            workspace: 0,
            batch_invariant: false,
            launches: Box::new(move |places, functions, _| {
                let mut words = [0; 26];
                words[0] = places.weight.layout.rows as u64;
                words[1..4].copy_from_slice(&[places.bias, places.y.address, places.y.stride(0) as u64]);
                if let Some(residual) = places.residual {
                    words[4..6].copy_from_slice(&[residual.address, residual.stride(0) as u64]);
                }
                words[6] = u64::from(1.0f32.to_bits());
                let step = batch.launch(
                    places.x,
                    places.scales,
                    places.weight,
                    places.bounds,
                    words,
                    function(functions, 0)?,
                )?;
                Ok(step.into_iter().collect())
            }),
        })
    }

    fn tiled(&self) -> Result<Layered> {
        let defines: [(_, &dyn Display); 4] = [
            ("X", &type_name(self.x.dtype)?),
            ("Y", &type_name(self.y.dtype)?),
            ("BIAS", &self.bias_name()?),
            ("FORMAT", &format_name(self.weight.format)?),
        ];
        Ok(Layered {
            kernels: vec![KernelSpec::new("linear/tiled.cu", "tiled", defines)],
            workspace: 0,
            batch_invariant: true,
            launches: Box::new(|places, functions, _| {
                let parameters = weight_words(common(places).rows(places.x), Some(places.weight));
                let parameters = parameters.address(places.bias).rows(places.y);
                let blocks = places.y.size(0).div_ceil(64).min(MAX_GRID);
                let grid = [places.y.size(1).div_ceil(64), blocks, 1];
                Ok(LaunchOp::kernel(function(functions, 0)?, grid, THREADS, parameters).into_iter().collect())
            }),
        })
    }

    /// How a product by cuBLASLt reaches `y`.
    fn arrival(&self) -> Arrival {
        let (x, y) = (self.x, self.y);
        // cuBLASLt writes the type of x or f32, and takes a bias of the type it writes.
        let takes_all =
            [x.dtype, DType::F32].contains(&y.dtype) && self.bias.is_none_or(|bias| bias == y.dtype);
        // Where rows of y are not whole vectors it rounds before it adds the bias.
        let vectors =
            [self.outputs(), y.strides[0]].iter().all(|count| (count * y.dtype.bytes()).is_multiple_of(16));
        let takes_all = takes_all && (self.bias.is_none() || y.dtype == DType::F32 || vectors);
        let bounded = x.bounded || y.bounded || self.residual.is_some_and(|residual| residual.bounded);
        if !takes_all {
            Arrival::Finished
        } else if self.scratch || !bounded {
            Arrival::Direct
        } else if self.rows() * self.outputs() * y.dtype.bytes() >= GUARDED {
            Arrival::Guarded
        } else {
            Arrival::Copied
        }
    }

    fn by_blas(&self) -> Result<Layered> {
        let (rows, outputs, inputs) = (self.rows(), self.outputs(), self.inputs());
        let (dtype, size) = (self.x.dtype, self.x.dtype.bytes());
        let arrival = self.arrival();
        let in_scratch = matches!(arrival, Arrival::Copied | Arrival::Finished);
        // What is finished later is not rounded before.
        let product_type = if arrival == Arrival::Finished { DType::F32 } else { self.y.dtype };
        let same = self.weight.format == WeightFormat::Dense(dtype);
        let row_bytes = crate::ops::weight::layout(self.weight)?.row_bytes;
        let packed = Packing::of(self.weight.format).is_some();
        // Whole units of packed rows.
        let slab = (SLAB / (inputs * size)).max(1).next_multiple_of(UNIT).min(outputs);
        let slab = if same { outputs } else { slab };
        let slab_stride = (inputs * size).next_multiple_of(16) / size;
        let slab_bytes = if same { 0 } else { (slab * slab_stride * size).next_multiple_of(256) };
        let beside = if arrival == Arrival::Direct { 0 } else { rows * outputs * product_type.bytes() };
        let weight_stride = if same { row_bytes / size } else { slab_stride };
        let y_stride = if in_scratch { outputs } else { self.y.strides[0] };
        let y_name = type_name(self.y.dtype)?;
        let wide = wide(&[self.y]) && self.residual.is_none_or(|residual| wide(&[residual]));
        let mut kernels = Vec::new();
        if !same {
            let defines: [(_, &dyn Display); 2] =
                [("Y", &type_name(dtype)?), ("FORMAT", &format_name(self.weight.format)?)];
            let entry = if packed { "unpack_integers" } else { "unpack" };
            kernels.push(KernelSpec::new("linear/unpack.cu", entry, defines));
        }
        if in_scratch {
            let defines: [(_, &dyn Display); 3] =
                [("X", &type_name(product_type)?), ("BIAS", &self.bias_name()?), ("Y", &y_name)];
            let entry = if wide { "finish_wide" } else { "finish" };
            kernels.push(KernelSpec::new("linear/finish.cu", entry, defines));
        }
        if arrival == Arrival::Guarded {
            kernels.push(KernelSpec::new("linear/guard.cu", "guard", [("Y", &y_name)]));
        }
        let in_product = arrival != Arrival::Finished;
        let bias_bytes = self.bias.map_or(0, DType::bytes);
        let shape = Shape {
            rows,
            outputs: slab,
            inputs,
            dtype,
            result: product_type,
            strides: [self.x.strides[0], weight_stride, y_stride],
            residual: self.residual.filter(|_| in_product).map(|residual| residual.strides[0]),
            alignments: [0; 4],
            bias: 0,
        };
        let setups = Setups::default();
        Ok(Layered {
            kernels,
            workspace: WORKSPACE + slab_bytes + beside,
            batch_invariant: false,
            launches: Box::new(move |places, functions, context| {
                let unpacked = places.workspace + WORKSPACE as u64;
                let kept = unpacked + slab_bytes as u64;
                let product = if in_scratch { kept } else { places.y.address };
                let residual =
                    places.residual.map_or((0, 0), |residual| (residual.address, residual.stride(0)));
                let guard = |from: (u64, usize), to: (u64, usize)| {
                    let last = functions.last().ok_or_else(|| Error::internal("no kernel to guard with"))?;
                    let parameters = Parameters::default()
                        .extent(rows, places.bounds)
                        .size(rows)
                        .size(outputs)
                        .address(from.0)
                        .size(from.1)
                        .address(to.0)
                        .size(to.1);
                    Ok::<_, Error>(LaunchOp::kernel(last, [GUARDS, 1, 1], THREADS, parameters))
                };
                let (own, beside) = ((places.y.address, y_stride), (kept, outputs));
                let mut steps = Vec::new();
                if arrival == Arrival::Guarded {
                    steps.extend(guard(own, beside)?);
                }
                let mut first = 0;
                while first < outputs {
                    let count = slab.min(outputs - first);
                    let weight = if same {
                        places.weight.address() + (first * row_bytes) as u64
                    } else {
                        let parameters = Parameters::default().size(first).size(count).size(inputs);
                        let parameters =
                            weight_words(parameters, Some(places.weight)).address(unpacked).size(slab_stride);
                        // A warp takes 64 bytes of 8 rows of integers.
                        let grid = match packed {
                            true => plane(count.div_ceil(UNIT), inputs.div_ceil(64) * 32),
                            false => plane(count, inputs),
                        };
                        steps.extend(LaunchOp::kernel(function(functions, 0)?, grid, THREADS, parameters));
                        unpacked
                    };
                    let at = |address: u64, bytes: usize| {
                        if address == 0 { 0 } else { address + (first * bytes) as u64 }
                    };
                    let y = at(product, product_type.bytes());
                    let (x, workspace) = (places.x.address, places.workspace);
                    let added = if in_product { at(residual.0, product_type.bytes()) } else { 0 };
                    let bias = if in_product { at(places.bias, bias_bytes) } else { 0 };
                    let added = if added == 0 { y } else { added };
                    let alignments = [x, weight, added, y].map(alignment);
                    let shape = Shape { outputs: count, alignments, bias, ..shape };
                    let setup = setups.get(context, shape)?;
                    steps.push(LaunchOp::Product(Product { setup, x, weight, added, y, workspace }));
                    first += count;
                }
                match arrival {
                    Arrival::Direct => {}
                    Arrival::Guarded => steps.extend(guard(beside, own)?),
                    Arrival::Copied | Arrival::Finished => {
                        let last =
                            functions.last().ok_or_else(|| Error::internal("no kernel to finish with"))?;
                        let (bias, residual) = if in_product { (0, (0, 0)) } else { (places.bias, residual) };
                        let parameters = Parameters::default()
                            .extent(rows, places.bounds)
                            .size(outputs)
                            .address(product)
                            .size(outputs)
                            .address(bias)
                            .address(residual.0)
                            .size(residual.1)
                            .rows(places.y);
                        let items = if wide { outputs / WIDE } else { outputs };
                        steps.extend(LaunchOp::kernel(last, plane(rows, items), THREADS, parameters));
                    }
                }
                Ok(steps)
            }),
        })
    }
}

/// How a product by cuBLASLt, which knows nothing of extents, reaches its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    /// It is written where it belongs: all rows are real, or may be written.
    Direct,
    /// It is written where it belongs; rows past the extent are kept aside and put back.
    Guarded,
    /// It goes to scratch memory whole, and its real rows are copied.
    Copied,
    /// It goes to scratch memory without bias and residual, which are added on the way from there.
    Finished,
}

/// The largest power of two, up to 256, that divides an address.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// Products set up so far: all layers that share a plan share them.
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

pub(super) fn function(functions: &[Arc<Function>], index: usize) -> Result<&Arc<Function>> {
    functions.get(index).ok_or_else(|| Error::internal("a recipe without a kernel"))
}

/// What all kernels of a layer begin with.
pub(super) fn common(places: &Args<'_>) -> Parameters {
    let layout = &places.weight.layout;
    Parameters::default().extent(places.y.size(0), places.bounds).size(layout.rows).size(layout.columns)
}

pub(in crate::ops) fn linear(op: &Linear, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let chain = FusedLinear::of_linear(call, op.dtype);
    if let Some(band) = decode_gemm::plan(&chain, operand(call, 0)?, call, device)? {
        return Ok(band.recipe(chain));
    }
    if let Some(packed) = packed_gemm::plan(&chain, operand(call, 0)?, call, device)? {
        return Ok(packed.recipe(chain));
    }
    by_layer(chain, call, device)
}

pub(in crate::ops) fn linear_w8a8(
    op: &LinearW8A8,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<KernelPlan> {
    let chain = FusedLinear::of_linear_w8a8(call, op.dtype);
    if let Some(packed) = packed_gemm::plan(&chain, operand(call, 0)?, call, device)? {
        return Ok(packed.recipe(chain));
    }
    by_layer(chain, call, device)
}

/// A product with nothing in front of it or behind it.
fn by_layer(chain: FusedLinear, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let layer = Layer {
        x: operand(call, chain.x)?,
        weight: weight_type(call, chain.weight)?,
        y: result(call, 0)?,
        bias: chain.bias.map(|bias| operand(call, bias)).transpose()?.map(|bias| bias.dtype),
        norm: None,
        residual: None,
        gate: None,
        bytes: chain.scales.is_some(),
        scratch: false,
    };
    let layered = layer.plan(device)?;
    let (kernels, workspace, batch_invariant) =
        (layered.kernels.clone(), layered.workspace, layered.batch_invariant);
    let launches = Box::new(move |frame: &Frame, functions: &[Arc<Function>], context: &Context| {
        let (x, y) = (frame.tensor(chain.x)?, frame.result(0)?);
        let mut bounds = chain.bounds(frame)?;
        bounds.push(x);
        let places = Args {
            x,
            weight: frame.weight(chain.weight)?,
            bias: chain.bias.map_or(0, |bias| frame.address(bias)),
            gain: 0,
            scales: chain.scales.map_or(0, |scales| frame.address(scales)),
            residual: None,
            y,
            bounds: &bounds,
            workspace: frame.workspace,
        };
        if y.size(0) == 0 || y.size(1) == 0 {
            return Ok(Vec::new());
        }
        layered.launches(&places, functions, context)
    });
    Ok(KernelPlan { kernels, workspace, persistent: 0, batch_invariant, launches })
}

pub(in crate::ops) fn matmul(op: &Matmul, call: &CallDesc) -> Result<KernelPlan> {
    let transposed = op.transpose_b;
    let defines: [(_, &dyn Display); 3] =
        [("X", &type_of(call, 0)?), ("Y", &type_name(op.dtype)?), ("TRANSPOSED", &i32::from(transposed))];
    let spec = KernelSpec::new("linear/matmul.cu", "matmul", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let [groups, rows, columns] = [0, 1, 2].map(|dimension| y.size(dimension));
        let tensor = |parameters: Parameters, tensor: &Bound| {
            parameters.address(tensor.address).size(tensor.stride(0)).size(tensor.stride(1))
        };
        let parameters =
            Parameters::default().extent(groups, &[a, b, y]).size(rows).size(columns).size(a.size(2));
        let parameters = tensor(tensor(tensor(parameters, a), b), y);
        let grid = [columns.div_ceil(64), rows.div_ceil(64).min(MAX_GRID), groups.min(MAX_GRID)];
        Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
    }))
}
