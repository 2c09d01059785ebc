//! GEMMs by cuBLASLt.
//!
//! `y[m, n] = sum_k x[m, k] w[n, k]`, accumulated in f32 and never through TF32. cuBLASLt is column-major, so it computes
//! `y^T = w x^T`, with `w` transposed. It can add a bias and a residual. It ignores extents; `ops::gemm::families::cublaslt`
//! handles rows past them.

use crate::driver::{
    library::Library,
    raw::{Raw, RawStream},
};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{self, cudaDataType_t},
};
use dsrun_core::{DType, Error, Result};
use std::{fmt, ptr};
use sys::{cublasLtMatmulDescAttributes_t as Describe, cublasLtMatmulPreferenceAttributes_t as Prefer};

/// Scratch memory cuBLASLt may use.
pub(crate) const WORKSPACE: usize = 32 << 20;

/// A handle of the library.
#[derive(Debug)]
pub(crate) struct CublasLt {
    handle: Raw<sys::cublasLtContext>,
}

fn failed(what: &str) -> impl FnOnce(CublasError) -> Error {
    move |error| Error::internal(format!("cuBLASLt: {what}: {:?}", error.0))
}

impl CublasLt {
    pub(crate) fn new() -> Result<Self> {
        Library::CublasLt.require()?;
        Ok(Self { handle: Raw(result::create_handle().map_err(failed("making a handle"))?) })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: the handle is live, and products that use it are gone.
        let _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

/// The shape and types of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// Element type of both operands.
    pub(crate) dtype: DType,
    /// Element type of the result: that of the operands, or f32.
    pub(crate) result: DType,
    /// Elements from row to row of `x`, `w` and `y`.
    pub(crate) strides: [usize; 3],
    /// Elements from row to row of the residual, if there is one: of the type of the result.
    pub(crate) residual: Option<usize>,
    /// Bytes that the addresses of `x`, `w`, the residual and `y` are multiples of, at most 256.
    pub(crate) alignments: [u32; 4],
    /// The address of the bias, which has the type of the result; 0 for none.
    pub(crate) bias: u64,
}

/// The descriptors of a product, with the algorithm chosen for it.
pub(crate) struct Setup {
    handle: Raw<sys::cublasLtContext>,
    product: Raw<sys::cublasLtMatmulDescOpaque_t>,
    /// Of `w`, `x`, the residual and `y`.
    layouts: [Raw<sys::cublasLtMatrixLayoutOpaque_t>; 4],
    /// The factor of the residual.
    beta: f32,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl fmt::Debug for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Setup").finish_non_exhaustive()
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(cudaDataType_t::CUDA_R_16BF),
        other => Err(Error::internal(format!("cuBLASLt is not used for {other}"))),
    }
}

impl Setup {
    pub(crate) fn new(blas: &CublasLt, shape: Shape) -> Result<Self> {
        let kind = data_type(shape.dtype)?;
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let product = result::create_matmul_desc(compute, scale).map_err(failed("describing a product"))?;
        let null = Raw(ptr::null_mut());
        let beta = if shape.residual.is_some() { 1.0 } else { 0.0 };
        // SAFETY: plain data for which zero is a valid value; it is overwritten before use.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut setup =
            Self { handle: blas.handle, product: Raw(product), layouts: [null; 4], beta, algorithm };
        // CUBLAS_OP_T, which the bindings do not define.
        setup.describe(Describe::CUBLASLT_MATMUL_DESC_TRANSA, 1i32)?;
        if shape.bias != 0 {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            setup.describe(Describe::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            setup.describe(Describe::CUBLASLT_MATMUL_DESC_BIAS_POINTER, shape.bias)?;
        }
        let [x, w, y] = shape.strides;
        let residual = shape.residual.unwrap_or(y);
        let [x, w, y, residual] = [x, w, y, residual].map(|stride| i64::try_from(stride).unwrap_or(i64::MAX));
        let (rows, outputs, inputs) = (shape.rows as u64, shape.outputs as u64, shape.inputs as u64);
        let written = data_type(shape.result)?;
        let matrices = [
            (kind, inputs, outputs, w),
            (kind, inputs, rows, x),
            (written, outputs, rows, residual),
            (written, outputs, rows, y),
        ];
        for (layout, (kind, rows, columns, stride)) in setup.layouts.iter_mut().zip(matrices) {
            let made = result::create_matrix_layout(kind, rows, columns, stride);
            *layout = Raw(made.map_err(failed("describing a matrix"))?);
        }
        setup.algorithm = setup.choose(shape.alignments)?;
        Ok(setup)
    }

    /// Sets an attribute of the product.
    fn describe<T>(&self, attribute: Describe, value: T) -> Result<()> {
        // SAFETY: the description is live; the value is given with its own size, and copied.
        let set = unsafe {
            let value = (&raw const value).cast();
            result::set_matmul_desc_attribute(self.product.0, attribute, value, size_of::<T>())
        };
        set.map_err(failed("describing a product"))
    }

    /// The algorithm that cuBLASLt's heuristic prefers, given the alignments of `x`, `w`, the residual and `y`.
    fn choose(&self, alignments: [u32; 4]) -> Result<sys::cublasLtMatmulAlgo_t> {
        let preference = result::create_matmul_pref().map_err(failed("making a preference"))?;
        let [x, w, residual, y] = alignments;
        let attributes = [
            // Split-K partial sums must not be rounded to the type of the result before they are added.
            (Prefer::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCED_UNROUNDED),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, residual),
            (Prefer::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, y),
        ];
        let [a, b, c, d] = self.layouts;
        // SAFETY: all objects are live; attributes are given with their own size, and copied.
        let found = unsafe {
            let set = |attribute, value, bytes| {
                result::set_matmul_pref_attribute(preference, attribute, value, bytes)
            };
            let bytes = (&raw const WORKSPACE_BYTES).cast();
            let limited = set(Prefer::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes, size_of::<usize>());
            let set = attributes.iter().fold(limited, |so_far, (attribute, value)| {
                so_far.and_then(|()| set(*attribute, (&raw const *value).cast(), size_of::<u32>()))
            });
            let found = set.and_then(|()| {
                result::get_matmul_algo_heuristic(
                    self.handle.0,
                    self.product.0,
                    a.0,
                    b.0,
                    c.0,
                    d.0,
                    preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        Ok(found.map_err(failed("choosing an algorithm"))?.algo)
    }
}

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`.
const REDUCED_UNROUNDED: u32 = 2;

static WORKSPACE_BYTES: usize = WORKSPACE;

impl Drop for Setup {
    fn drop(&mut self) {
        // SAFETY: the objects are live, or null if they were never made, and are dropped once.
        unsafe {
            for layout in self.layouts {
                if !layout.0.is_null() {
                    let _ = result::destroy_matrix_layout(layout.0);
                }
            }
            let _ = result::destroy_matmul_desc(self.product.0);
        }
    }
}

/// A product with its addresses.
#[derive(Debug)]
pub(crate) struct Product {
    pub(crate) setup: std::sync::Arc<Setup>,
    pub(crate) x: u64,
    pub(crate) weight: u64,
    /// The address of the residual; any address if there is none.
    pub(crate) added: u64,
    pub(crate) y: u64,
    pub(crate) workspace: u64,
}

impl Product {
    pub(crate) fn enqueue(&self, stream: RawStream) -> Result<()> {
        let one = 1f32;
        let Setup { handle, product, layouts: [a, b, c, d], beta, algorithm } = &*self.setup;
        // SAFETY: the descriptions are live and say what the addresses hold, which the bound call keeps alive.
        let status = unsafe {
            result::matmul(
                handle.0,
                product.0,
                (&raw const one).cast(),
                (&raw const *beta).cast(),
                self.weight as *const _,
                a.0,
                self.x as *const _,
                b.0,
                self.added as *const _,
                c.0,
                self.y as *mut _,
                d.0,
                algorithm,
                self.workspace as *mut _,
                WORKSPACE,
                stream.0.cast(),
            )
        };
        status.map_err(failed("multiplying"))
    }
}
