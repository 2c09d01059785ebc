//! A device whose kernels can be made to fail.

use dsrun_core::{
    Code, Error, Result, WeightReader,
    checked::ValidCall,
    collective::Collective,
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::sync::{Arc, Mutex};

/// How kernels fail when they are planned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Error,
    Panic,
}

#[derive(Debug)]
pub(crate) struct FaultyDevice {
    inner: Arc<dyn Device>,
    fault: Mutex<Option<Fault>>,
}

impl FaultyDevice {
    pub(crate) fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { inner, fault: Mutex::default() })
    }

    /// Makes every kernel that is planned from now on fail.
    pub(crate) fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = Some(fault);
    }
}

impl Device for FaultyDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.inner.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.inner.stream()
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.inner.event()
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn collective(&self) -> Option<&dyn Collective> {
        self.inner.collective()
    }
}

impl Kernels for FaultyDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        self.inner.kernels().query(call)
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.inner.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.inner.kernels().prepack(stream, weight, rows)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let fault = *self.fault.lock().unwrap();
        match fault {
            None => self.inner.kernels().plan(call),
            Some(Fault::Error) => Err(Error::new(Code::DeviceLost, "the kernel is broken")),
            Some(Fault::Panic) => panic!("the kernel is broken"),
        }
    }
}
