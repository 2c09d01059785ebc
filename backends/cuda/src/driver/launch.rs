//! Kernel launches and their parameters.

use crate::driver::{
    context::Context,
    cublaslt::Product,
    kernel_struct::KernelStruct,
    nccl::NcclCall,
    raw::{Raw, RawStream},
    rendezvous::{Gatherings, Rendezvous},
    stream::CudaStream,
};
use cudarc::driver::sys;
use dsrun_core::{Error, Result};
use std::{ffi::c_void, mem::MaybeUninit, sync::Arc};

/// A loaded kernel. Its module lives as long as the context.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) raw: Raw<sys::CUfunc_st>,
    pub(crate) name: &'static str,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Whether it may start before the preceding kernel has finished (programmatic dependent launch).
    pub(crate) overlaps: bool,
    /// Whether its blocks wait for each other, so that all must be resident at once (cooperative launch).
    pub(crate) together: bool,
}

/// The maximum number of parameters of a kernel.
const MAX_PARAMETERS: usize = 48;

/// Parameters of a kernel, in the order of its signature.
///
/// Each parameter is stored in one or more 64-bit words. The driver reads only the bytes of the kernel's parameter, so
/// one word can hold any scalar, and several words a struct.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parameters {
    words: Vec<MaybeUninit<u64>>,
    starts: Vec<usize>,
}

impl Parameters {
    fn start(&mut self) {
        self.starts.push(self.words.len());
    }

    /// An address, or 0 for none.
    #[must_use]
    pub(crate) fn address(mut self, address: u64) -> Self {
        self.start();
        self.words.push(MaybeUninit::new(address));
        self
    }

    /// A 64-bit integer.
    #[must_use]
    pub(crate) fn size(mut self, size: usize) -> Self {
        self.start();
        self.words.push(MaybeUninit::new(size as u64));
        self
    }

    /// A struct of 64-bit words.
    #[must_use]
    pub(crate) fn words<const N: usize>(mut self, words: [u64; N]) -> Self {
        self.start();
        self.words.extend(words.map(MaybeUninit::new));
        self
    }

    /// A parameter struct.
    #[must_use]
    pub(crate) fn structure<T: KernelStruct>(mut self, structure: &T) -> Self {
        self.start();
        let first = self.words.len();
        self.words.resize(first + size_of::<T>().div_ceil(size_of::<u64>()), MaybeUninit::zeroed());
        // SAFETY: there is room for all bytes of the struct. Its padding stays uninitialised, and only the driver reads the
        // words.
        unsafe {
            let to = self.words[first..].as_mut_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(std::ptr::from_ref(structure).cast::<u8>(), to, size_of::<T>());
        }
        self
    }

    /// A 32-bit word.
    #[must_use]
    pub(crate) fn word(mut self, value: u32) -> Self {
        self.start();
        self.words.push(MaybeUninit::new(u64::from(value)));
        self
    }

    /// A 32-bit float.
    #[must_use]
    pub(crate) fn float(self, value: f32) -> Self {
        self.word(value.to_bits())
    }
}

impl<T: KernelStruct> From<&T> for Parameters {
    fn from(structure: &T) -> Self {
        Self::default().structure(structure)
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

/// One operation of a bound call.
#[derive(Debug)]
pub(crate) enum LaunchOp {
    /// A kernel.
    Kernel(Launch),
    /// A GEMM by cuBLASLt.
    Product(Product),
    /// An operation of NCCL.
    Nccl(NcclCall),
}

/// The maximum number of blocks along the second and third dimension of a grid.
pub(crate) const MAX_GRID: usize = 65_535;

impl LaunchOp {
    /// A kernel launch; `None` if the grid is empty.
    pub(crate) fn kernel(
        function: &Arc<Function>,
        grid: [usize; 3],
        threads: usize,
        parameters: impl Into<Parameters>,
    ) -> Option<Self> {
        let empty = grid.contains(&0);
        let launch = Launch { function: function.clone(), grid, threads, parameters: parameters.into() };
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
                product.enqueue(stream.raw)
            }
            Self::Nccl(call) => {
                context.recent.note("NCCL");
                call.enqueue(stream.raw)
            }
        }
    }
}

/// The operations of a bound call, with all parameters filled in. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Launches {
    op: Arc<str>,
    launches: Arc<[LaunchOp]>,
    /// The group and the role of the call in it, if it is a collective.
    pub(crate) rendezvous: Option<Rendezvous>,
}

impl Launches {
    /// The operations of a call of the op with this name.
    pub(crate) fn new(op: &str, launches: Vec<LaunchOp>, rendezvous: Option<Rendezvous>) -> Self {
        Self { op: op.into(), launches: launches.into(), rendezvous }
    }

    /// Enqueues the operations on a stream that is not being captured; those of a collective when its group is ready.
    pub(crate) fn run(&self, context: &Context, stream: &mut CudaStream) -> Result<()> {
        let Some(rendezvous) = &self.rendezvous else { return self.enqueue(context, stream) };
        let mut gatherings = Gatherings::default();
        gatherings.add(rendezvous);
        stream
            .gathered(&gatherings, |stream| self.enqueue(context, stream))
            .map_err(|error| self.blame(error))
    }

    pub(crate) fn enqueue(&self, context: &Context, stream: &mut CudaStream) -> Result<()> {
        let enqueued = self.launches.iter().try_for_each(|launch| launch.enqueue(context, stream));
        enqueued.map_err(|error| self.blame(error))
    }

    /// An error that names the op.
    pub(crate) fn blame(&self, error: Error) -> Error {
        error.in_op(&self.op)
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
