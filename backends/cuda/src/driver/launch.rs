//! Kernel launches: parameters, steps of a bound call, and where its operands are.

use crate::{
    blas::Product,
    context::{Context, Raw, RawStream},
    memory::CudaBuffer,
    stream::CudaStream,
    weight::CudaWeight,
};
use cudarc::driver::sys;
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    device::Buffer,
    kernels::{Argument, Arguments, Binding, CallDesc},
};
use std::{any::Any, ffi::c_void, sync::Arc};

/// A loaded kernel. Its module lives as long as the context.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) raw: Raw<sys::CUfunc_st>,
    pub(crate) name: &'static str,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Whether it may start before the kernel in front of it has finished.
    pub(crate) overlaps: bool,
    /// Whether its blocks wait for each other, and so must all be there at once.
    pub(crate) together: bool,
}

/// How many different extents a kernel takes into account: no op has more operands and results over one dimension.
pub(crate) const EXTENTS: usize = 8;

/// The places among these, each once.
pub(crate) fn distinct(mut pointers: Vec<u64>) -> Vec<u64> {
    pointers.retain(|pointer| *pointer != 0);
    pointers.sort_unstable();
    pointers.dedup();
    pointers
}

/// The most parameters a kernel has.
const MAX_PARAMETERS: usize = 48;

/// Parameters of a kernel, in the order of its signature.
///
/// Each takes a word or more; the driver reads as many bytes from each as the kernel's parameter is long, so words may
/// stand for all scalars, and several for a struct of words.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parameters {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Parameters {
    fn start(&mut self) {
        self.starts.push(self.words.len());
    }

    /// The words of the first parameter.
    pub(crate) fn first(&self) -> &[u64] {
        self.of(0)
    }

    /// The words of a parameter, by its number; none if there is none.
    pub(crate) fn of(&self, number: usize) -> &[u64] {
        let start = |number: usize| self.starts.get(number).copied().unwrap_or(self.words.len());
        &self.words[start(number)..start(number + 1)]
    }

    /// These, and others behind them.
    #[must_use]
    pub(crate) fn then(mut self, others: &Self) -> Self {
        let behind = self.words.len();
        self.starts.extend(others.starts.iter().map(|start| behind + start));
        self.words.extend(&others.words);
        self
    }

    /// An address, or 0 for none.
    #[must_use]
    pub(crate) fn address(mut self, address: u64) -> Self {
        self.start();
        self.words.push(address);
        self
    }

    /// A tensor: address and distance between rows, two parameters.
    #[must_use]
    pub(crate) fn rows(self, tensor: &Bound) -> Self {
        let stride = tensor.stride(0);
        self.address(tensor.address).size(stride)
    }

    /// The same of a tensor that may be absent: zeros then.
    #[must_use]
    pub(crate) fn optional_rows(self, tensor: Option<&Bound>) -> Self {
        match tensor {
            Some(tensor) => self.rows(tensor),
            None => self.address(0).size(0),
        }
    }

    /// A 64-bit whole number.
    #[must_use]
    pub(crate) fn size(mut self, size: usize) -> Self {
        self.start();
        self.words.push(size as u64);
        self
    }

    /// A struct of 64-bit words.
    #[must_use]
    pub(crate) fn words<const N: usize>(mut self, words: [u64; N]) -> Self {
        self.start();
        self.words.extend(words);
        self
    }

    /// A word of 32 bits.
    #[must_use]
    pub(crate) fn word(mut self, value: u32) -> Self {
        self.start();
        self.words.push(u64::from(value));
        self
    }

    /// A real number.
    #[must_use]
    pub(crate) fn float(self, value: f32) -> Self {
        self.word(value.to_bits())
    }

    /// The extents of these tensors, and how many rows there are at most: `struct Extent` of the prelude.
    #[must_use]
    pub(crate) fn extent(self, rows: usize, tensors: &[&Bound]) -> Self {
        self.extents(rows, distinct(tensors.iter().map(|tensor| tensor.extent).collect()))
    }

    /// As [`Self::extent`], given where the extents are: [`distinct`], and no more than [`EXTENTS`].
    #[must_use]
    pub(crate) fn extents(mut self, rows: usize, mut pointers: Vec<u64>) -> Self {
        self.start();
        // Those that are there first: the kernels stop at the first that is not.
        pointers.resize(EXTENTS, 0);
        self.words.extend(pointers);
        self.words.push(rows as u64);
        self
    }
}

/// A kernel with its grid and parameters.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) function: Arc<Function>,
    pub(crate) grid: [usize; 3],
    pub(crate) threads: usize,
    pub(crate) parameters: Parameters,
}

/// What a bound call enqueues.
#[derive(Debug)]
pub(crate) enum Step {
    /// A kernel.
    Kernel(Launch),
    /// A product by cuBLASLt.
    Product(Product),
}

/// The most blocks along the second and third dimension of a grid.
pub(crate) const MAX_GRID: usize = 65_535;

impl Step {
    /// A kernel; none if the grid is empty.
    pub(crate) fn kernel(
        function: &Arc<Function>,
        grid: [usize; 3],
        threads: usize,
        parameters: Parameters,
    ) -> Option<Self> {
        let empty = grid.contains(&0);
        let launch = Launch { function: function.clone(), grid, threads, parameters };
        (!empty).then_some(Self::Kernel(launch))
    }

    pub(crate) fn enqueue(&self, context: &Context, stream: &mut CudaStream) -> Result<()> {
        match self {
            Self::Kernel(launch) => {
                context.recent.note(launch.function.name);
                launch.enqueue_on(context, stream.raw)
            }
            Self::Product(product) => {
                context.recent.note("cublasLtMatmul");
                product.enqueue(stream)
            }
        }
    }
}

impl Launch {
    /// Enqueues the launch on a stream of the context.
    pub(crate) fn enqueue_on(&self, context: &Context, stream: RawStream) -> Result<()> {
        let Parameters { words, starts } = &self.parameters;
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        if starts.len() > MAX_PARAMETERS {
            return Err(Error::internal(format!("kernel {} has too many parameters", self.function.name)));
        }
        for (pointer, start) in pointers.iter_mut().zip(starts) {
            *pointer = words[*start..].as_ptr().cast_mut().cast();
        }
        let [x, y, z] = self.grid.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let threads = u32::try_from(self.threads).unwrap_or(u32::MAX);
        // SAFETY: plain data for which zero is a valid value.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        if self.function.together {
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attribute.value.cooperative = 1;
        } else {
            attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.function.shared,
            hStream: stream.0,
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.function.overlaps || self.function.together),
        };
        // SAFETY: the parameters were made for this kernel by its recipe; the memory they point to is kept alive by the
        // bound call, and freed behind the stream's work. A kernel that overlaps waits for those in front by itself.
        let status = unsafe {
            let raw = self.function.raw.0;
            sys::cuLaunchKernelEx(&raw const config, raw, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        context.check_with(status, || format!("launching kernel {}", self.function.name))
    }
}

/// What the bulk copy engine is told of a tensor. What lies outside arrives as zeros.
pub(crate) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Bytes: sizes of all dimensions, innermost first, strides of all but that, and the box that a copy brings. Rows of a
    /// box may be swizzled: then they are 128 bytes.
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

    /// Elements of a type, of which strides count the bytes.
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
        Ok(Self(map))
    }

    /// Elements of 16 bits, which strides count too, in rows of 128 bytes, swizzled, as a parameter.
    pub(crate) fn of_halves<const N: usize, const M: usize>(
        dtype: DType,
        address: u64,
        sizes: [u64; N],
        strides: [u64; M],
        box_sizes: [u32; N],
    ) -> Result<[u64; 16]> {
        let kind = match dtype {
            DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let strides = strides.map(|stride| stride * 2);
        Ok(Self::new(kind, address, sizes, strides, box_sizes, true)?.words())
    }

    /// As a parameter.
    pub(crate) fn words(&self) -> [u64; 16] {
        self.0.opaque
    }
}

/// A tensor of a bound call.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) desc: TensorDesc,
    /// Where its first element is.
    pub(crate) address: u64,
    /// Where its extent is; 0 if all rows are real.
    pub(crate) extent: u64,
}

impl Bound {
    /// Distance between neighbours of a dimension, in elements.
    pub(crate) fn stride(&self, dimension: usize) -> usize {
        self.desc.strides.get(dimension).copied().unwrap_or(1)
    }

    /// A size; 1 for a dimension it does not have.
    pub(crate) fn size(&self, dimension: usize) -> usize {
        self.desc.shape.get(dimension).copied().unwrap_or(1)
    }
}

#[derive(Debug)]
enum Operand {
    Tensor(Bound),
    Weight(Arc<CudaWeight>),
}

/// The operands and results of a bound call.
#[derive(Debug)]
pub(crate) struct Frame {
    operands: Vec<Option<Operand>>,
    pub(crate) results: Vec<Bound>,
    pub(crate) workspace: u64,
    /// Zeroed memory of this bound call alone.
    pub(crate) persistent: u64,
    keep: Vec<Arc<CudaBuffer>>,
}

impl Frame {
    pub(crate) fn bind(
        call: &CallDesc,
        arguments: &Arguments,
        context: &Arc<Context>,
        persistent: Option<Arc<CudaBuffer>>,
    ) -> Result<Self> {
        let mut keep = Vec::new();
        let mut tensor = |desc: &TensorDesc, binding: &Binding| -> Result<Bound> {
            let (buffer, address) = CudaBuffer::locate(&binding.slice, context)?;
            keep.push(buffer);
            let mut extent = 0;
            if let Some(slice) = &binding.extent {
                let (buffer, address) = CudaBuffer::locate(slice, context)?;
                keep.push(buffer);
                extent = address;
            }
            let needed = desc.bytes()?;
            if binding.slice.bytes < needed {
                let message = format!("is {} bytes, needs {needed}", binding.slice.bytes);
                return Err(Error::invalid(message).field("bytes"));
            }
            Ok(Bound { desc: desc.clone(), address, extent })
        };
        let mut operands = Vec::new();
        for (index, argument) in arguments.operands.iter().enumerate() {
            let bound = match argument {
                None => None,
                Some(Argument::Tensor(binding)) => {
                    let missing = || Error::invalid("was planned without a tensor");
                    let desc = call.tensor(index).ok_or_else(missing);
                    let bound = desc.and_then(|desc| tensor(desc, binding));
                    Some(Operand::Tensor(bound.map_err(|error| error.at(&call.operand_name(index)))?))
                }
                Some(Argument::Weight(weight)) => {
                    let any: Arc<dyn Any + Send + Sync> = weight.clone();
                    let own = any.downcast::<CudaWeight>().map_err(|_| {
                        Error::invalid("belongs to another backend").at(&call.operand_name(index))
                    })?;
                    Some(Operand::Weight(own))
                }
            };
            operands.push(bound);
        }
        let mut results = Vec::new();
        for (index, (desc, binding)) in call.results.iter().zip(&arguments.results).enumerate() {
            results.push(tensor(desc, binding).map_err(|error| error.at(&call.result_name(index)))?);
        }
        let mut workspace = 0;
        if let Some(slice) = &arguments.workspace {
            let (buffer, address) =
                CudaBuffer::locate(slice, context).map_err(|error| error.at("workspace"))?;
            keep.push(buffer);
            workspace = address;
        }
        let own = persistent.as_ref().map_or(0, |buffer| buffer.pointer);
        keep.extend(persistent);
        keep.retain(|buffer| buffer.bytes() > 0);
        Ok(Self { operands, results, workspace, persistent: own, keep })
    }

    /// The tensor operand at `index`, if it is there.
    pub(crate) fn optional(&self, index: usize) -> Option<&Bound> {
        match self.operands.get(index)?.as_ref()? {
            Operand::Tensor(bound) => Some(bound),
            Operand::Weight(_) => None,
        }
    }

    /// All tensor operands.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Bound> {
        self.operands.iter().flatten().filter_map(|operand| match operand {
            Operand::Tensor(bound) => Some(bound),
            Operand::Weight(_) => None,
        })
    }

    /// Where the tensor operand at `index` is, or 0.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.optional(index).map_or(0, |bound| bound.address)
    }

    /// The tensor operand at `index`.
    pub(crate) fn tensor(&self, index: usize) -> Result<&Bound> {
        self.optional(index).ok_or_else(|| Error::internal(format!("operand {index} is no tensor")))
    }

    /// The weight at `index`, if it is there.
    pub(crate) fn optional_weight(&self, index: usize) -> Option<&Arc<CudaWeight>> {
        match self.operands.get(index)?.as_ref()? {
            Operand::Weight(weight) => Some(weight),
            Operand::Tensor(_) => None,
        }
    }

    /// The weight at `index`.
    pub(crate) fn weight(&self, index: usize) -> Result<&Arc<CudaWeight>> {
        self.optional_weight(index).ok_or_else(|| Error::internal(format!("operand {index} is no weight")))
    }

    /// The result at `index`.
    pub(crate) fn result(&self, index: usize) -> Result<&Bound> {
        self.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))
    }

    /// How many buffers the frame keeps alive.
    pub(crate) fn kept(&self) -> usize {
        self.keep.len()
    }
}
