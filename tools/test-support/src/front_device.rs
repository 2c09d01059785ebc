//! Devices in front of another, which do a part of its work in their own way.

use dsrun_core::{
    Result, WeightReader,
    checked::ValidCall,
    collective::Collective,
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{fmt, ops::Deref, sync::Arc};

/// What a device in front of another does. Where a method is not written anew, the device behind it does the work; collectives and
/// everything else that is optional is left out.
pub trait Front: fmt::Debug + Send + Sync + 'static {
    /// The device behind this one.
    fn behind(&self) -> &dyn Device;

    /// A new stream.
    ///
    /// # Errors
    /// Those of the device behind.
    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.behind().stream()
    }

    /// A new event.
    ///
    /// # Errors
    /// Those of the device behind.
    fn event(&self) -> Result<Arc<dyn Event>> {
        self.behind().event()
    }

    /// The collectives, if there are some.
    fn collective(&self) -> Option<&dyn Collective> {
        None
    }

    /// Whether a call is supported.
    ///
    /// # Errors
    /// Those of the device behind.
    fn query(&self, call: &ValidCall) -> Result<Support> {
        self.behind().kernels().query(call)
    }

    /// The stream of the device behind for one of this device.
    ///
    /// # Errors
    /// If it is not a stream of this device.
    fn stream_behind<'a>(&self, stream: &'a mut dyn Stream) -> Result<&'a mut dyn Stream> {
        Ok(stream)
    }

    /// The plan of a call.
    ///
    /// # Errors
    /// Those of the device behind.
    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        self.behind().kernels().plan(call)
    }
}

/// The device of a [`Front`].
#[derive(Debug)]
pub struct FrontDevice<F>(pub F);

impl<F> Deref for FrontDevice<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.0
    }
}

impl<F: Front> Device for FrontDevice<F> {
    fn properties(&self) -> &DeviceProperties {
        self.0.behind().properties()
    }

    fn memory(&self) -> MemoryUse {
        self.0.behind().memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.0.behind().allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.0.stream()
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.0.event()
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn collective(&self) -> Option<&dyn Collective> {
        self.0.collective()
    }
}

impl<F: Front> Kernels for FrontDevice<F> {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        self.0.query(call)
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.0.behind().kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.0.behind().kernels().prepack(self.0.stream_behind(stream)?, weight, rows)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        self.0.plan(call)
    }
}

/// Answers whether a device supports a call, given its kernels.
type Answer = dyn Fn(&dyn Kernels, &ValidCall) -> Result<Support> + Send + Sync;

/// A device with answers of its own about what it supports.
pub struct AnsweringDevice {
    device: Arc<dyn Device>,
    answer: Box<Answer>,
}

impl AnsweringDevice {
    /// A device in front of another. `answer` takes the kernels of that device and the call.
    pub fn open(
        device: Arc<dyn Device>,
        answer: impl Fn(&dyn Kernels, &ValidCall) -> Result<Support> + Send + Sync + 'static,
    ) -> Arc<FrontDevice<Self>> {
        Arc::new(FrontDevice(Self { device, answer: Box::new(answer) }))
    }
}

impl fmt::Debug for AnsweringDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnsweringDevice").field(&self.device).finish()
    }
}

impl Front for AnsweringDevice {
    fn behind(&self) -> &dyn Device {
        &*self.device
    }

    fn query(&self, call: &ValidCall) -> Result<Support> {
        (self.answer)(self.device.kernels(), call)
    }
}
