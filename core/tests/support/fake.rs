//! A backend of heap memory whose kernels only count calls.

use dsrun_core::{
    Code, DType, Error, Result, WeightReader, WeightType,
    checked::{ValidArguments, ValidCall, ValidOperand},
    device::{Buffer, BufferSlice, Device, DeviceProperties, Event, Flushed, MemoryKind, MemoryUse, Stream},
    kernels::{Binding, BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
    op::Op,
};
use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

const ALIGNMENT: usize = 16;

/// A device of heap memory, whose kernels refuse some calls with a reason and otherwise count calls.
#[derive(Debug)]
pub(crate) struct Fake {
    properties: DeviceProperties,
    pub(crate) workspace: usize,
    pub(crate) ran: Arc<AtomicUsize>,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let properties = DeviceProperties {
            name: "fake".into(),
            memory_bytes: 0,
            alignment: ALIGNMENT,
            dtypes: DType::ALL.to_vec(),
            profiles: Vec::new(),
            strict_nan: false,
            flushed: Flushed::default(),
            unified_memory: true,
            binds_pinned: true,
        };
        Self { properties, workspace: 0, ran: Arc::default() }
    }
}

#[derive(Debug)]
struct Heap(Mutex<Box<[u8]>>);

impl Buffer for Heap {
    fn bytes(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.0.lock().unwrap().as_mut_ptr())
    }
}

#[derive(Debug)]
pub(crate) struct Packed(pub(crate) WeightType);

impl PackedWeight for Packed {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn bytes(&self) -> usize {
        self.0.bytes().unwrap()
    }
}

#[derive(Debug)]
struct Now;

impl Event for Now {
    fn reached(&self) -> Result<bool> {
        Ok(true)
    }

    fn synchronize(&self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }

    fn elapsed_since(&self, _: &dyn Event) -> Result<Option<Duration>> {
        Ok(None)
    }
}

/// A stream that runs work immediately.
#[derive(Debug)]
struct Queue;

impl Stream for Queue {
    fn upload(&mut self, source: &[u8], to: &BufferSlice) -> Result<()> {
        let pointer = to.buffer.host_pointer().ok_or_else(|| Error::unsupported("no heap"))?;
        if source.len() != to.bytes {
            return Err(Error::invalid("lengths differ"));
        }
        // SAFETY: the slice is inside its buffer, which lives as long as `to`; no test uses a buffer from two threads.
        unsafe {
            pointer.add(to.offset).copy_from_nonoverlapping(NonNull::from(source).cast(), source.len())
        };
        Ok(())
    }

    fn download(&mut self, from: &BufferSlice, destination: &mut [u8], _: &str, _: Duration) -> Result<()> {
        let pointer = from.buffer.host_pointer().ok_or_else(|| Error::unsupported("no heap"))?;
        if destination.len() != from.bytes {
            return Err(Error::invalid("lengths differ"));
        }
        let out = NonNull::from(&mut *destination).cast();
        // SAFETY: as in `upload`.
        unsafe { out.copy_from_nonoverlapping(pointer.add(from.offset), destination.len()) };
        Ok(())
    }

    fn copy(&mut self, from: &BufferSlice, to: &BufferSlice) -> Result<()> {
        let mut bytes = vec![0; from.bytes];
        self.download(from, &mut bytes, "copy", Duration::ZERO)?;
        self.upload(&bytes, to)
    }

    fn fill(&mut self, to: &BufferSlice, byte: u8) -> Result<()> {
        self.upload(&vec![byte; to.bytes], to)
    }

    fn record(&mut self, _: &dyn Event) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: &dyn Event) -> Result<()> {
        Ok(())
    }

    fn synchronize(&mut self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct FakePlan {
    workspace: usize,
    ran: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct FakeCall(Arc<FakePlan>);

impl Plan for FakePlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        // Every backend relies on validated arguments.
        let operands = arguments.operands().filter_map(|operand| match operand {
            Some(ValidOperand::Tensor(desc, binding)) => Some((desc, binding)),
            _ => None,
        });
        for (desc, Binding { slice, .. }) in operands.chain(arguments.results()) {
            assert!(desc.bytes()? <= slice.bytes && slice.offset + slice.bytes <= slice.buffer.bytes());
        }
        assert_eq!(arguments.operands().len(), arguments.call().operands.len());
        Ok(Box::new(FakeCall(self)))
    }
}

impl BoundCall for FakeCall {
    fn enqueue(&self, _: &mut dyn Stream) -> Result<()> {
        self.0.ran.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Kernels for Fake {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        Ok(match &call.op {
            Op::Argmax(_) => Support::no("rows of more than 4 elements"),
            _ => Support::native(),
        })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        Ok(PackedLayout {
            bytes: weight.weight_type.bytes()?,
            name: "rows".into(),
            relocatable: false,
            readable_when_pinned: false,
        })
    }

    fn prepack(
        &self,
        _: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        rows.rows(0, weight.weight_type.rows())?;
        Ok(Arc::new(Packed(weight.weight_type.clone())))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        if matches!(call.op, Op::Cast(_)) {
            return Err(Error::new(Code::OutOfMemory, "no memory for casts"));
        }
        Ok(Arc::new(FakePlan { workspace: self.workspace, ran: self.ran.clone() }))
    }
}

impl Device for Fake {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn allocate(&self, bytes: usize, _: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(Heap(Mutex::new(vec![0; bytes].into()))))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(Queue))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(Now))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}
