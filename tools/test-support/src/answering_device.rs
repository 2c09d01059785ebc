//! A device that answers queries in another way.

use dsrun_core::{
    Result, WeightReader,
    checked::ValidCall,
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{fmt, sync::Arc};

/// Answers whether a device supports a call, given its kernels.
type Answer = dyn Fn(&dyn Kernels, &ValidCall) -> Result<Support> + Send + Sync;

/// A device with answers of its own about what it supports. Everything else is that of the device behind it.
pub struct AnsweringDevice {
    device: Arc<dyn Device>,
    answer: Box<Answer>,
}

impl AnsweringDevice {
    /// A device in front of another. `answer` takes the kernels of that device and the call.
    pub fn new(
        device: Arc<dyn Device>,
        answer: impl Fn(&dyn Kernels, &ValidCall) -> Result<Support> + Send + Sync + 'static,
    ) -> Self {
        Self { device, answer: Box::new(answer) }
    }
}

impl fmt::Debug for AnsweringDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnsweringDevice").field(&self.device).finish()
    }
}

impl Device for AnsweringDevice {
    fn properties(&self) -> &DeviceProperties {
        self.device.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.device.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.device.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.device.stream()
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.device.event()
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}

impl Kernels for AnsweringDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        (self.answer)(self.device.kernels(), call)
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.device.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.device.kernels().prepack(stream, weight, rows)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        self.device.kernels().plan(call)
    }
}
