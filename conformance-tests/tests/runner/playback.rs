//! A device that computes nothing: it is given a call with its expected results and writes those, or misbehaves in one way.

use dsrun_conformance::{
    case::{CallCase, Element},
    oracle::float,
};
use dsrun_core::{
    Code, DType, Error, Result, TensorDesc, WeightReader, WeightType,
    checked::{ValidArguments, ValidCall},
    collective::{Collective, host::HostCollective},
    device::{Buffer, BufferSlice, Device, DeviceProperties, Event, Flushed, MemoryKind, MemoryUse, Stream},
    kernels::{
        Argument, Arguments, BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
    },
};
use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// How the device misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    WrongElement,
    WritesAll,
    WritesGaps,
    WritesBehind,
    WritesInFront,
    ChangesOperand,
    Wavers,
    OverrunsWorkspace,
    Leaks,
    WritesNothing,
    HalfPrecision,
    LastBit,
    Declines,
}

/// The device.
#[derive(Debug)]
pub(crate) struct PlaybackDevice {
    properties: DeviceProperties,
    call: CallCase,
    fault: Fault,
    leaked: Arc<AtomicU64>,
}

impl PlaybackDevice {
    /// A device that knows the results of `call`.
    pub(crate) fn open(call: &CallCase, fault: Fault) -> Arc<Self> {
        let properties = DeviceProperties {
            name: "playback".into(),
            memory_bytes: 0,
            alignment: 32,
            dtypes: DType::ALL.to_vec(),
            profiles: Vec::new(),
            strict_nan: true,
            flushed: Flushed::default(),
            unified_memory: true,
            binds_pinned: false,
        };
        Arc::new(Self { properties, call: call.clone(), fault, leaked: Arc::default() })
    }
}

impl Device for PlaybackDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { used: self.leaked.load(Ordering::Relaxed), free: None }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(Memory { bytes: Mutex::new(vec![0; bytes]), length: bytes, kind }))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(Immediate))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Err(Error::unsupported("playback has no events"))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&HostCollective)
    }
}

#[derive(Debug)]
struct Memory {
    bytes: Mutex<Vec<u8>>,
    length: usize,
    kind: MemoryKind,
}

impl Buffer for Memory {
    fn bytes(&self) -> usize {
        self.length
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }
}

/// The bytes of a whole buffer.
fn lock(buffer: &Arc<dyn Buffer>) -> MutexGuard<'_, Vec<u8>> {
    let any: &dyn Any = &**buffer;
    any.downcast_ref::<Memory>()
        .expect("a buffer of this device")
        .bytes
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Immediate;

impl Stream for Immediate {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        lock(&destination.buffer)[destination.offset..][..destination.bytes].copy_from_slice(source);
        Ok(())
    }

    fn download(&mut self, source: &BufferSlice, destination: &mut [u8], _: &str, _: Duration) -> Result<()> {
        destination.copy_from_slice(&lock(&source.buffer)[source.offset..][..source.bytes]);
        Ok(())
    }

    fn copy(&mut self, _: &BufferSlice, _: &BufferSlice) -> Result<()> {
        Err(Error::unsupported("playback does not copy"))
    }

    fn fill(&mut self, _: &BufferSlice, _: u8) -> Result<()> {
        Err(Error::unsupported("playback does not fill"))
    }

    fn record(&mut self, _: &dyn Event) -> Result<()> {
        Err(Error::unsupported("playback has no events"))
    }

    fn wait(&mut self, _: &dyn Event) -> Result<()> {
        Err(Error::unsupported("playback has no events"))
    }

    fn synchronize(&mut self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Packed(WeightType);

impl PackedWeight for Packed {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn bytes(&self) -> usize {
        0
    }
}

impl Kernels for PlaybackDevice {
    fn query(&self, _: &ValidCall) -> Result<Support> {
        if self.fault == Fault::Declines {
            return Ok(Support::no("not today"));
        }
        Ok(Support { work_words: 5, workspace_bytes: 16, ..Support::native() })
    }

    fn prepack_query(&self, _: &WeightDesc) -> Result<PackedLayout> {
        Ok(PackedLayout { bytes: 0, name: "nothing".into(), relocatable: false, readable_when_pinned: false })
    }

    fn prepack(
        &self,
        _: &mut dyn Stream,
        weight: &WeightDesc,
        _: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        Ok(Arc::new(Packed(weight.weight_type.clone())))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        if std::mem::discriminant(&call.op) != std::mem::discriminant(&self.call.op) {
            return Err(Error::new(Code::Internal, "not the call this device knows"));
        }
        let plan = Playback {
            case: self.call.clone(),
            results: call.results.clone(),
            fault: self.fault,
            leaked: self.leaked.clone(),
            runs: AtomicU32::new(0),
            arguments: None,
        };
        Ok(Arc::new(plan))
    }
}

/// A plan, and once it has arguments a bound call.
#[derive(Debug)]
struct Playback {
    case: CallCase,
    results: Vec<TensorDesc>,
    fault: Fault,
    leaked: Arc<AtomicU64>,
    runs: AtomicU32,
    arguments: Option<Arguments>,
}

impl Plan for Playback {
    fn workspace_bytes(&self) -> usize {
        16
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        Ok(Box::new(Self {
            case: self.case.clone(),
            results: self.results.clone(),
            fault: self.fault,
            leaked: self.leaked.clone(),
            runs: AtomicU32::new(0),
            arguments: Some(arguments.arguments().clone()),
        }))
    }
}

impl BoundCall for Playback {
    fn enqueue(&self, _: &mut dyn Stream) -> Result<()> {
        let arguments = self.arguments.as_ref().ok_or_else(|| Error::internal("nothing is bound"))?;
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        for (index, desc) in self.results.iter().enumerate() {
            if let Some(result) = arguments.results.get(index).filter(|_| self.fault != Fault::WritesNothing)
            {
                self.write(index, desc, &result.slice, run);
            }
        }
        match self.fault {
            Fault::OverrunsWorkspace => {
                let workspace =
                    arguments.workspace.as_ref().ok_or_else(|| Error::internal("no workspace"))?;
                lock(&workspace.buffer)[workspace.offset + workspace.bytes] ^= 1;
            }
            Fault::ChangesOperand => {
                if let Some(Some(Argument::Tensor(binding))) = arguments.operands.first() {
                    lock(&binding.slice.buffer)[binding.slice.offset] ^= 1;
                }
            }
            Fault::Leaks => drop(self.leaked.fetch_add(100, Ordering::Relaxed)),
            _ => {}
        }
        Ok(())
    }
}

impl Playback {
    fn write(&self, index: usize, desc: &TensorDesc, slice: &BufferSlice, run: u32) {
        let elements = self.case.results.get(index).map_or(&[][..], |expected| &expected.elements);
        let size = desc.dtype.bytes();
        let mut memory = lock(&slice.buffer);
        for (at, element) in elements.iter().enumerate() {
            let mut bits = match element {
                Element::Untouched if self.fault == Fault::WritesAll => 0,
                Element::Untouched | Element::Anything => continue,
                Element::Bits(bits) => *bits,
                Element::OneOf(all) => all[0],
                Element::Real(real) if self.fault == Fault::HalfPrecision => {
                    float::bits(desc.dtype, float::round(DType::F16, real.value))
                }
                Element::Real(real) => float::bits(desc.dtype, real.value),
            };
            let last = at + 1 == elements.len();
            match self.fault {
                Fault::WrongElement if last => bits ^= 1 << (8 * size - 9),
                Fault::Wavers if last => bits ^= run,
                Fault::LastBit if last => bits ^= 1,
                _ => {}
            }
            let place = slice.offset + offset(desc, at) * size;
            memory[place..place + size].copy_from_slice(&bits.to_le_bytes()[..size]);
        }
        match self.fault {
            Fault::WritesGaps => {
                let gap = slice.offset + desc.shape[1] * size;
                memory[gap] ^= 1;
            }
            Fault::WritesBehind => memory[slice.offset + slice.bytes] ^= 1,
            Fault::WritesInFront => memory[slice.offset - 1] ^= 1,
            _ => {}
        }
    }
}

fn offset(desc: &TensorDesc, index: usize) -> usize {
    let mut rest = index;
    let mut offset = 0;
    for (size, stride) in desc.shape.iter().zip(&desc.strides).rev() {
        offset += rest % size * stride;
        rest /= size;
    }
    offset
}
