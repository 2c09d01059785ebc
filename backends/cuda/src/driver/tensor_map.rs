//! Tensor maps, which describe tensors to TMA, the bulk copy engine.

use crate::driver::kernel_struct::Length;
use cudarc::driver::sys;
use dsrun_core::{DType, Error, Result};

/// A TMA tensor map, as passed to kernels. Elements outside the tensor are read as zeros.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TensorMap([u64; 16]);

impl Length for TensorMap {
    const LENGTH: usize = 0;
}

impl TensorMap {
    /// A tensor of bytes: sizes of all dimensions, innermost first; strides of all but the innermost; and the box of one
    /// copy. Rows of a box may be swizzled; then they have 128 bytes.
    pub(crate) fn bytes<const N: usize, const M: usize>(
        address: u64,
        sizes: [u64; N],
        strides: [u64; M],
        box_sizes: [u32; N],
        swizzled: bool,
    ) -> Result<Self> {
        Self::new(
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            address,
            sizes,
            strides,
            box_sizes,
            swizzled,
        )
    }

    /// A tensor of a given element type, with strides in bytes.
    pub(crate) fn new<const N: usize, const M: usize>(
        kind: sys::CUtensorMapDataType,
        address: u64,
        sizes: [u64; N],
        strides: [u64; M],
        box_sizes: [u32; N],
        swizzled: bool,
    ) -> Result<Self> {
        let swizzle = match swizzled {
            true => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            false => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let ones = [1u32; N];
        let mut map = std::mem::MaybeUninit::<sys::CUtensorMap>::zeroed();
        // SAFETY: sizes, box and steps have N entries and strides N - 1, as is said; the map is written, or stays zero, which
        // is a valid value. The memory is not touched.
        let (status, map) = unsafe {
            let status = sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                kind,
                N as u32,
                address as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                box_sizes.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            );
            (status, map.assume_init())
        };
        if status != sys::CUresult::CUDA_SUCCESS {
            let message = format!(
                "the driver refuses to describe a tensor of {sizes:?} with strides {strides:?}: {status:?}"
            );
            return Err(Error::internal(message));
        }
        Ok(Self(map.opaque))
    }

    /// A tensor of 16-bit elements, with strides in elements, in swizzled rows of 128 bytes.
    pub(crate) fn of_halves<const N: usize, const M: usize>(
        dtype: DType,
        address: u64,
        sizes: [u64; N],
        strides: [u64; M],
        box_sizes: [u32; N],
    ) -> Result<Self> {
        let kind = match dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let strides = strides.map(|stride| stride * 2);
        Self::new(kind, address, sizes, strides, box_sizes, true)
    }

    /// The words of a kernel parameter.
    pub(crate) fn words(&self) -> [u64; 16] {
        self.0
    }
}
