//! Products of many rows, by cuBLASLt.
//!
//! `y[m, n] = sum_k x[m, k] w[n, k]`, accumulated in f32 and never through TF32. cuBLASLt counts columns first: to it this
//! is `y^T = w x^T`, with `w` transposed. It knows nothing of extents, so products go to scratch memory, from where
//! `linear/finish.cu` takes the rows that are real.

use crate::{context::Raw, library::Library, stream::CudaStream};
use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{self, cudaDataType_t},
};
use dsrun_core::{DType, Error, Result};
use std::{fmt, ptr};

/// Scratch memory cuBLASLt may use.
pub(crate) const WORKSPACE: usize = 32 << 20;

/// A handle of the library.
#[derive(Debug)]
pub(crate) struct Blas {
    handle: Raw<sys::cublasLtContext>,
}

fn failed(what: &str) -> impl FnOnce(CublasError) -> Error {
    move |error| Error::internal(format!("cuBLASLt: {what}: {:?}", error.0))
}

impl Blas {
    pub(crate) fn new() -> Result<Self> {
        Library::CublasLt.require()?;
        Ok(Self { handle: Raw(result::create_handle().map_err(failed("making a handle"))?) })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle is live, and products that use it are gone.
        let _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

/// What is multiplied.
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
}

/// Descriptions of a product, with the algorithm chosen for it.
pub(crate) struct Setup {
    handle: Raw<sys::cublasLtContext>,
    product: Raw<sys::cublasLtMatmulDescOpaque_t>,
    layouts: [Raw<sys::cublasLtMatrixLayoutOpaque_t>; 3],
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
    pub(crate) fn new(blas: &Blas, shape: Shape) -> Result<Self> {
        let kind = data_type(shape.dtype)?;
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let product = result::create_matmul_desc(compute, scale).map_err(failed("describing a product"))?;
        let null = Raw(ptr::null_mut());
        // SAFETY: plain data for which zero is a valid value; it is overwritten before use.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut setup = Self { handle: blas.handle, product: Raw(product), layouts: [null; 3], algorithm };
        // CUBLAS_OP_T, which the bindings leave out.
        let transpose: i32 = 1;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let [x, w, y] = shape.strides.map(|stride| i64::try_from(stride).unwrap_or(i64::MAX));
        let (rows, outputs, inputs) = (shape.rows as u64, shape.outputs as u64, shape.inputs as u64);
        let matrices = [
            (kind, inputs, outputs, w),
            (kind, inputs, rows, x),
            (data_type(shape.result)?, outputs, rows, y),
        ];
        for (layout, (kind, rows, columns, stride)) in setup.layouts.iter_mut().zip(matrices) {
            let made = result::create_matrix_layout(kind, rows, columns, stride);
            *layout = Raw(made.map_err(failed("describing a matrix"))?);
        }
        let preference = result::create_matmul_pref().map_err(failed("making a preference"))?;
        let limit = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let [a, b, d] = setup.layouts;
        // SAFETY: all objects are live; attributes are given with their own size.
        let found = unsafe {
            let set = result::set_matmul_desc_attribute(
                product,
                attribute,
                (&raw const transpose).cast(),
                size_of_val(&transpose),
            )
            .and_then(|()| {
                let bytes = (&raw const WORKSPACE_BYTES).cast();
                result::set_matmul_pref_attribute(preference, limit, bytes, size_of::<usize>())
            });
            let found = set.and_then(|()| {
                result::get_matmul_algo_heuristic(blas.handle.0, product, a.0, b.0, d.0, d.0, preference)
            });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        setup.algorithm = found.map_err(failed("choosing an algorithm"))?.algo;
        Ok(setup)
    }
}

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
    pub(crate) y: u64,
    pub(crate) workspace: u64,
}

impl Product {
    pub(crate) fn enqueue(&self, stream: &CudaStream) -> Result<()> {
        let (one, zero) = (1f32, 0f32);
        let Setup { handle, product, layouts: [a, b, d], algorithm } = &*self.setup;
        // SAFETY: the descriptions are live and say what the addresses hold, which the bound call keeps alive.
        let status = unsafe {
            result::matmul(
                handle.0,
                product.0,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                self.weight as *const _,
                a.0,
                self.x as *const _,
                b.0,
                self.y as *const _,
                d.0,
                self.y as *mut _,
                d.0,
                algorithm,
                self.workspace as *mut _,
                WORKSPACE,
                stream.raw.0.cast(),
            )
        };
        status.map_err(failed("multiplying"))
    }
}
