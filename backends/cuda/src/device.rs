//! The backend, its devices, and device handles.

use crate::{
    arch::{DeviceSpec, OLDEST_CAPABILITY, written},
    collective::CudaCollective,
    diagnose,
    driver::{
        compiler::Cache,
        context::Context,
        fault,
        graph::CudaGraphs,
        library::Library,
        memory::CudaBuffer,
        stream::{CudaEvent, CudaStream},
    },
    kernels::CudaKernels,
    offline_device::OfflineDevice,
    properties::{properties, reserved},
};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use dsrun_core::{
    Code, Error, Result,
    collective::Collective,
    device::{
        Backend, BackendInfo, Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, Finding,
        MemoryAccount, MemoryKind, MemoryUse, Stream,
    },
    graph::Graphs,
    kernels::Kernels,
};
use std::{ffi::CStr, sync::Arc};

/// The oldest driver: 12.0.
const OLDEST_DRIVER: i32 = 12_000;
/// The environment variable that overrides the compute capability with an older one, to test the kernels of older devices.
const CAPABILITY: &str = "DSRUN_CUDA_CAPABILITY";

/// The CUDA backend.
#[derive(Debug)]
pub struct CudaBackend {
    info: BackendInfo,
}

impl CudaBackend {
    /// Makes the backend. Always succeeds: missing libraries are reported when devices are listed or opened.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "cuda".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "NVIDIA GPUs, compute capability 7.5 and up".into(),
        };
        Self { info }
    }
}

impl Default for CudaBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let count = initialise()?;
        (0..count)
            .map(|index| {
                let device = handle(index)?;
                let info = DeviceInfo { index, name: name(device)?, memory_bytes: Some(memory(device)?) };
                Ok(info)
            })
            .collect()
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        let count = initialise()?;
        if index >= count {
            return Err(Error::invalid(format!("is {index}, there are {count}")).at("device"));
        }
        Ok(Arc::new(CudaDevice::open(index, options)?))
    }

    fn describe(&self, name: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(OfflineDevice::open(name, Cache::of_user())?))
    }

    fn diagnose(&self) -> Vec<Finding> {
        diagnose::findings()
    }
}

/// Initialises the driver, and returns the number of devices.
fn initialise() -> Result<usize> {
    Library::Driver.require()?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: the driver is present; the pointers are to places of the right type. These functions are in every driver.
    unsafe {
        fault::check(sys::cuDriverGetVersion(&raw mut version), "asking for the driver's version")?;
        if version < OLDEST_DRIVER {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            let message =
                format!("the driver is for CUDA {major}.{minor}; this backend needs one for 12.0 or newer");
            return Err(Error::new(Code::Unavailable, message));
        }
        fault::check(sys::cuInit(0), "starting the driver")?;
        fault::check(sys::cuDeviceGetCount(&raw mut count), "counting devices")?;
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

fn handle(index: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    let ordinal = i32::try_from(index).map_err(|_| Error::invalid("is no device").at("device"))?;
    // SAFETY: the driver was started; the pointer is to a place of the right type.
    fault::check(unsafe { sys::cuDeviceGet(&raw mut device, ordinal) }, "finding a device")?;
    Ok(device)
}

fn name(device: sys::CUdevice) -> Result<String> {
    let mut text = [0u8; 256];
    // SAFETY: the text is as long as is said.
    let status = unsafe { sys::cuDeviceGetName(text.as_mut_ptr().cast(), 255, device) };
    fault::check(status, "asking for a device's name")?;
    Ok(CStr::from_bytes_until_nul(&text)
        .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned()))
}

fn memory(device: sys::CUdevice) -> Result<u64> {
    let mut bytes = 0;
    // SAFETY: the pointer is to a place of the right type.
    let status = unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, device) };
    fault::check(status, "asking for a device's memory")?;
    Ok(bytes as u64)
}

fn attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the pointer is to a place of the right type.
    let status = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    fault::check(status, "asking for a device's properties")?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Parses the overriding compute capability for a device whose own is `own`.
fn older(text: &str, own: u32) -> Result<u32> {
    let number = |text: &str| text.parse::<u32>().ok();
    let read = text.split_once('.').and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
    let capability = read.filter(|(major, minor)| *major < 100 && *minor < 10);
    let capability = capability.map(|(major, minor)| major * 10 + minor);
    capability.filter(|capability| (OLDEST_CAPABILITY..=own).contains(capability)).ok_or_else(|| {
        let message =
            format!("{CAPABILITY} is {text:?}, must be one from 7.5 to the device's, {}", written(own));
        Error::invalid(message)
    })
}

/// An open device.
#[derive(Debug)]
struct CudaDevice {
    properties: DeviceProperties,
    context: Arc<Context>,
    kernels: CudaKernels,
    graphs: CudaGraphs,
    collective: CudaCollective,
}

impl CudaDevice {
    fn open(index: usize, options: &DeviceOptions) -> Result<Self> {
        let device = handle(index)?;
        let (name, total) = (name(device)?, memory(device)?);
        let capability = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if capability < OLDEST_CAPABILITY {
            let message = format!("{name} has compute capability {}, 7.5 is needed", written(capability));
            return Err(Error::unsupported(message));
        }
        let taken_for = match std::env::var_os(CAPABILITY) {
            Some(text) => older(&text.to_string_lossy(), capability)?,
            None => capability,
        };
        if attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
            return Err(Error::unsupported(format!("{name} has no stream-ordered memory pools here")));
        }
        if options.compute_share.is_some_and(|share| share != 1.0) {
            let message = "cannot be shared by compute units yet; leave it out";
            return Err(Error::unsupported(message).at("compute_share"));
        }
        Library::Nvrtc.require()?;
        let sm_count = attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1);
        let spec = DeviceSpec {
            batch_invariant: options.batch_invariant,
            ..DeviceSpec::new(taken_for, sm_count as usize)
        };
        let account = MemoryAccount::new(Some(options.memory_limit.unwrap_or_else(|| reserved(total))));
        let context = Context::open(index, &name, taken_for, taken_for != capability, account)?;
        tracing::debug!(%name, ?spec, total, "opened a GPU");
        let properties = properties(name, total);
        let (kernels, graphs) =
            (CudaKernels { context: context.clone(), device: spec }, CudaGraphs { context: context.clone() });
        let collective = CudaCollective { context: context.clone(), multiprocessors: sm_count as usize };
        Ok(Self { properties, context, kernels, graphs, collective })
    }
}

impl Device for CudaDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        let account = &self.context.account;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is entered; the pointers are to places of the right type.
        let known = self.context.enter().is_ok()
            && unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) } == sys::CUresult::CUDA_SUCCESS;
        let free = account.free().map(|left| if known { left.min(free as u64) } else { left });
        MemoryUse { used: account.used(), free }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(CudaBuffer::new(self.context.clone(), bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(CudaStream::new(self.context.clone())?))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::new(self.context.clone())?))
    }

    fn kernels(&self) -> &dyn Kernels {
        &self.kernels
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(&self.graphs)
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&self.collective)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("7.5", Some(75))]
    #[case("9.0", Some(90))]
    #[case("7.0", None)]
    #[case("10.0", None)]
    #[case("8", None)]
    #[case("8.10", None)]
    #[case("-8.0", None)]
    fn a_device_is_taken_for_an_older_one(#[case] text: &str, #[case] expected: Option<u32>) {
        let read = older(text, 90);
        assert_eq!(read.as_ref().ok().copied(), expected);
        assert!(read.is_ok() || read.is_err_and(|error| error.message().contains(CAPABILITY)));
    }

    #[test]
    fn without_a_driver_the_backend_is_there_and_says_what_is_missing() {
        let backend = CudaBackend::new();
        assert_eq!(backend.info().name, "cuda");
        match backend.devices() {
            // There is a driver: nothing is missing, so nothing is to be said.
            Ok(devices) => assert!(devices.iter().enumerate().all(|(index, device)| device.index == index)),
            Err(error) => {
                assert_eq!(error.code(), Code::Unavailable, "{error}");
                assert!(error.message().contains("libcuda"), "{error}");
                assert_eq!(backend.open(0, &DeviceOptions::default()).unwrap_err().code(), Code::Unavailable);
            }
        }
    }
}
