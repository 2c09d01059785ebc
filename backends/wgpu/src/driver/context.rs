//! The context that a device handle, its buffers, streams and plans share.

use super::{adapter::DeviceSpec, pipeline::Pipelines};
use dsrun_core::{Code, Error, Result, device::MemoryAccount};
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use wgpu::{
    Adapter, Buffer, BufferDescriptor, BufferUsages, Device, DeviceDescriptor, ErrorFilter,
    ExperimentalFeatures, MemoryHints, PollError, PollType, Queue, SubmissionIndex, Trace,
};

/// Bytes of the placeholder buffer for empty tensors. Kernels may read, but not use, the first row of one.
const STAND_IN_BYTES: u64 = 64 << 10;

/// The longest wait for accepted work after a fault, before the fault is reported as it is.
const LOSS_PATIENCE: Duration = Duration::from_secs(5);
/// The interval at which to check whether another thread has run a callback.
const CALLBACK_PAUSE: Duration = Duration::from_micros(20);

/// The first fault of a device, after which it is unusable.
#[derive(Debug)]
struct Faults {
    /// The name of the adapter.
    adapter: String,
    first: Mutex<Option<Error>>,
    /// Whether the handle is being closed, so that losing the device is no fault.
    closing: AtomicBool,
}

impl Faults {
    fn new(adapter: &str) -> Self {
        Self { adapter: adapter.to_owned(), first: Mutex::default(), closing: AtomicBool::new(false) }
    }

    fn set(&self, error: Error) {
        if !self.closing.load(Ordering::Acquire) {
            tracing::error!(%error, "a wgpu device failed");
            self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Records that the device is lost, and why. This replaces an earlier fault, which may be a consequence of the loss.
    fn lose(&self, reason: &str) {
        let message = format!(
            "{} was lost ({reason}); close it and open it again, or restart the process if that fails",
            self.adapter
        );
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.take_if(|fault| fault.code() != Code::DeviceLost);
        drop(first);
        self.set(Error::new(Code::DeviceLost, message));
    }

    /// Converts an error of wgpu; `what` names the operation. An error that says that the device is lost is recorded as a fault.
    fn converted(&self, error: &wgpu::Error, what: &str) -> Error {
        let adapter = &self.adapter;
        match error {
            wgpu::Error::OutOfMemory { .. } => {
                Error::new(Code::OutOfMemory, format!("{what}: {adapter} has no memory left"))
            }
            error => {
                let text = error.to_string();
                // wgpu has no error type for this; it refuses every object of a lost device with this text.
                if text.contains("device is lost") {
                    self.lose("wgpu refuses its objects");
                }
                self.check().err().unwrap_or_else(|| Error::internal(format!("{what} on {adapter}: {text}")))
            }
        }
    }

    fn check(&self) -> Result<()> {
        match &*self.first.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

/// The context that a device handle, its buffers, streams and plans share.
pub(crate) struct Context {
    pub(crate) device: Device,
    pub(crate) queue: Queue,
    pub(crate) spec: DeviceSpec,
    pub(crate) account: Arc<MemoryAccount>,
    pub(crate) pipelines: Pipelines,
    /// A placeholder that is bound for empty tensors.
    pub(crate) stand_in: Buffer,
    faults: Arc<Faults>,
}

impl Context {
    /// Opens a device on an adapter; `adjust` may restrict what its kernels use.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if the driver refuses.
    pub(crate) fn open(
        adapter: &Adapter,
        account: Arc<MemoryAccount>,
        adjust: impl FnOnce(&mut DeviceSpec),
    ) -> Result<Arc<Self>> {
        let features = DeviceSpec::features(adapter);
        let mut spec = DeviceSpec::new(adapter, features);
        adjust(&mut spec);
        let descriptor = DeviceDescriptor {
            label: Some("dsrun"),
            required_features: features,
            required_limits: adapter.limits(),
            // SAFETY: the only such feature is cooperative matrices. Kernels with them are those of this crate, whose results the
            // backend checks when it opens a device.
            experimental_features: unsafe { ExperimentalFeatures::enabled() },
            memory_hints: MemoryHints::Performance,
            trace: Trace::Off,
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).map_err(|error| {
            Error::new(Code::Unavailable, format!("{} cannot be opened: {error}", spec.name))
        })?;
        let faults = Arc::new(Faults::new(&spec.name));
        let (lost, failed) = (faults.clone(), faults.clone());
        device.set_device_lost_callback(move |reason, message| match reason {
            wgpu::DeviceLostReason::Destroyed => lost.lose("it was destroyed"),
            _ => lost.lose(&message),
        });
        device.on_uncaptured_error(Arc::new(move |error| {
            let error = failed.converted(&error, "running a command");
            failed.set(error);
        }));
        let stand_in = device.create_buffer(&BufferDescriptor {
            label: Some("stand-in"),
            size: STAND_IN_BYTES,
            usage: BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let pipelines = Pipelines::open(&device, adapter, features);
        tracing::debug!(name = %spec.name, %spec, "opened an adapter");
        Ok(Arc::new(Self { device, queue, spec, account, pipelines, stand_in, faults }))
    }

    /// Destroys the device, as if its driver had been reset.
    pub(crate) fn destroy(&self) {
        self.device.destroy();
    }

    /// Reports the fault of the device, if it has failed.
    ///
    /// # Errors
    /// The first fault.
    pub(crate) fn check(&self) -> Result<()> {
        match self.faults.check() {
            Err(error) if error.code() != Code::DeviceLost => {
                // The objects of a lost device are invalid, which may be recorded as a fault before wgpu reports the loss.
                self.await_loss();
                self.faults.check()
            }
            checked => checked,
        }
    }

    /// Runs `make`, which creates objects, and converts wgpu's errors.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] if memory ran out; [`Code::Internal`] if wgpu refuses the object.
    pub(crate) fn scoped<T>(&self, what: &str, make: impl FnOnce() -> T) -> Result<T> {
        let memory = self.device.push_error_scope(ErrorFilter::OutOfMemory);
        let validation = self.device.push_error_scope(ErrorFilter::Validation);
        let internal = self.device.push_error_scope(ErrorFilter::Internal);
        let made = make();
        // Scopes are popped innermost first.
        let errors = [internal.pop(), validation.pop()]
            .map(pollster::block_on)
            .into_iter()
            .chain([pollster::block_on(memory.pop())]);
        match errors.flatten().next() {
            Some(error) => Err(self.faults.converted(&error, what)),
            None => Ok(made),
        }
    }

    /// A uniform buffer of these words.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`].
    pub(crate) fn uniform(&self, words: &[u32]) -> Result<Buffer> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(16).max(16), 0);
        let descriptor = BufferDescriptor {
            label: None,
            size: bytes.len() as u64,
            usage: BufferUsages::UNIFORM,
            mapped_at_creation: true,
        };
        let what = "making a uniform buffer";
        let buffer = self.scoped(what, || self.device.create_buffer(&descriptor))?;
        let mapped = self.scoped(what, || {
            let mapped = buffer.get_mapped_range_mut(..).map(|mut view| view.copy_from_slice(&bytes));
            buffer.unmap();
            mapped
        })?;
        mapped.map_err(|error| Error::internal(format!("{what}: writing to it: {error}")))?;
        Ok(buffer)
    }

    /// A grid of at least this many workgroups.
    ///
    /// # Errors
    /// [`Code::Unsupported`] if the adapter has no such grid.
    pub(crate) fn grid(&self, groups: u64) -> Result<[u32; 3]> {
        grid(groups, self.spec.limits.max_compute_workgroups_per_dimension)
    }

    /// Waits until a submission is done, which also runs the callbacks of mappings requested after it.
    ///
    /// # Errors
    /// [`Code::Timeout`] with the name of the wait; the fault of the device.
    pub(crate) fn wait(&self, submission: &SubmissionIndex, what: &str, timeout: Duration) -> Result<()> {
        let poll = PollType::Wait { submission_index: Some(submission.clone()), timeout: Some(timeout) };
        let polled = self.device.poll(poll);
        self.check()?;
        match polled {
            Ok(_) => Ok(()),
            Err(PollError::Timeout) => Err(self.late(what, timeout)),
            Err(error) => {
                // wgpu refuses to wait for a submission that a lost device never accepted, perhaps before it reports the loss.
                self.await_loss();
                self.check()?;
                Err(Error::internal(format!("waiting for {what} on {}: {error}", self.spec.name)))
            }
        }
    }

    /// Lets wgpu report the loss of the device, if it is lost: it does so in a poll, once the work that was accepted is done.
    fn await_loss(&self) {
        let _ = self.device.poll(PollType::Wait { submission_index: None, timeout: Some(LOSS_PATIENCE) });
    }

    fn late(&self, what: &str, timeout: Duration) -> Error {
        let message = format!("waiting for {what} on {} took longer than {timeout:?}", self.spec.name);
        Error::new(Code::Timeout, message)
    }

    /// Waits until `done`, which a callback of wgpu sets. The device is done already, but the callback may still be running on
    /// another thread, whose poll noticed it first.
    ///
    /// # Errors
    /// [`Code::Timeout`] with the name of the wait; the fault of the device.
    pub(crate) fn wait_until(&self, done: impl Fn() -> bool, what: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        while !done() {
            self.check()?;
            if start.elapsed() > timeout {
                return Err(self.late(what, timeout));
            }
            // Errors of a poll are recorded in the context as faults.
            let _ = self.device.poll(PollType::Poll);
            std::thread::sleep(CALLBACK_PAUSE);
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.faults.closing.store(true, Ordering::Release);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.spec.name).finish_non_exhaustive()
    }
}

/// A grid of at least `groups` workgroups, with at most `longest` in each dimension.
fn grid(groups: u64, longest: u32) -> Result<[u32; 3]> {
    let limit = u64::from(longest.max(1));
    let x = groups.min(limit);
    let y = groups.div_ceil(x.max(1)).min(limit);
    let z = groups.div_ceil((x * y).max(1));
    match [x, y, z].map(u32::try_from) {
        [Ok(x), Ok(y), Ok(z)] if u64::from(z) <= limit && groups <= u64::from(u32::MAX / 2) => Ok([x, y, z]),
        _ => {
            Err(Error::unsupported(format!("needs {groups} workgroups, more than the adapter runs at once")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, [0, 0, 0])]
    #[case(1, [1, 1, 1])]
    #[case(7, [7, 1, 1])]
    #[case(8, [7, 2, 1])]
    #[case(50, [7, 7, 2])]
    fn grids_have_room_for_all_workgroups(#[case] groups: u64, #[case] expected: [u32; 3]) {
        assert_eq!(grid(groups, 7).unwrap(), expected);
    }

    #[test]
    fn a_grid_beyond_the_limits_is_refused() {
        assert_eq!(grid(7 * 7 * 7 + 1, 7).unwrap_err().code(), Code::Unsupported);
        assert_eq!(grid(1 << 40, 65_535).unwrap_err().code(), Code::Unsupported);
    }
}
