//! What a device must refuse, through core's traits: with a reason, without harm, and it goes on.

use super::{
    bench::{Bench, During, Given, Held, Outcome, Stop, ensure, fail, floats, open},
    memory::sum_is_right,
};
use crate::{
    case::Weight,
    random::{Random, Values},
    runner::TIMEOUT,
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    Code, DType, Error, Result, WeightFormat, WeightType,
    device::{Buffer, BufferSlice, DeviceOptions, Event, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, PackedWeight},
    op::{Add, Linear},
};
use dsrun_plugin_sdk::NO_MESSAGE;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Fails unless something was refused with one of these codes and a reason.
pub(super) fn refused<T>(what: &str, result: Result<T>, codes: &[Code]) -> Outcome {
    let error = match result {
        Ok(_) => return fail(format!("{what} was accepted")),
        Err(error) => error,
    };
    ensure(codes.is_empty() || codes.contains(&error.code()), || {
        format!("{what} is refused as {}, which is not what it is: {error}", error.code().name())
    })?;
    ensure(!error.message().is_empty() && error.message() != NO_MESSAGE, || {
        format!("{what} is refused without a reason")
    })
}

/// A buffer, an event and a weight of no backend at all.
#[derive(Debug)]
pub(super) struct Nobodys(pub(super) WeightType);

impl Buffer for Nobodys {
    fn bytes(&self) -> usize {
        4096
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

impl Event for Nobodys {
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

impl PackedWeight for Nobodys {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn bytes(&self) -> usize {
        0
    }
}

/// A stream of no backend at all.
#[derive(Debug)]
struct NobodysStream;

impl Stream for NobodysStream {
    fn upload(&mut self, _: &[u8], _: &BufferSlice) -> Result<()> {
        Ok(())
    }

    fn download(&mut self, _: &BufferSlice, _: &mut [u8], _: &str, _: Duration) -> Result<()> {
        Ok(())
    }

    fn copy(&mut self, _: &BufferSlice, _: &BufferSlice) -> Result<()> {
        Ok(())
    }

    fn fill(&mut self, _: &BufferSlice, _: u8) -> Result<()> {
        Ok(())
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

/// A sum and its arguments, to be bound wrongly.
struct Sum {
    operands: [Given; 4],
    result: Held,
}

impl Sum {
    fn new(bench: &mut Bench) -> std::result::Result<Self, Stop> {
        let dtype = floats(&*bench.device)[0];
        let one = Tensor::floats(dtype, &[4, 64], &[1.0; 256]);
        let operands = [bench.give(&one)?, bench.give(&one)?, Given::Absent, Given::Absent];
        Ok(Self { operands, result: bench.empty(dtype, &[4, 64])? })
    }

    fn arguments(&self) -> Arguments {
        Arguments {
            operands: self.operands.iter().map(Given::argument).collect(),
            results: vec![self.result.binding()],
            workspace: None,
        }
    }
}

/// Objects of another backend are refused by everything that takes one.
pub(super) fn foreign(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![8, 32] };
    let buffer: Arc<dyn Buffer> = Arc::new(Nobodys(weight_type.clone()));
    let (theirs, ours) = (BufferSlice::new(buffer, 0, 64)?, BufferSlice::whole(bench.buffer(64)?));
    let invalid = &[Code::InvalidArgument];
    let stream = &mut *bench.stream;
    refused("an upload to another backend's buffer", stream.upload(&[0; 64], &theirs), invalid)?;
    let read = stream.download(&theirs, &mut [0; 64], "nothing", TIMEOUT);
    refused("a download from another backend's buffer", read, invalid)?;
    refused("a copy from another backend's buffer", stream.copy(&theirs, &ours), invalid)?;
    refused("a copy to another backend's buffer", stream.copy(&ours, &theirs), invalid)?;
    refused("filling another backend's buffer", stream.fill(&theirs, 1), invalid)?;
    let event = Nobodys(weight_type.clone());
    refused("recording another backend's event", stream.record(&event), invalid)?;
    refused("waiting for another backend's event", stream.wait(&event), invalid)?;

    let sum = Sum::new(&mut bench)?;
    let plan = bench.plan(Add { alpha: 1.0 }, &sum.operands)?;
    let mut arguments = sum.arguments();
    let buffer: Arc<dyn Buffer> = Arc::new(Nobodys(weight_type.clone()));
    let theirs = BufferSlice::whole(buffer);
    arguments.operands[0] = Some(Argument::Tensor(Binding::new(theirs.clone())));
    refused("another backend's buffer as an operand", plan.bind(&arguments), invalid)?;
    let mut arguments = sum.arguments();
    arguments.results[0] = Binding::new(theirs);
    refused("another backend's buffer as a result", plan.bind(&arguments), invalid)?;
    let bound = plan.bind(&sum.arguments())?;
    refused("another backend's stream", bound.enqueue(&mut NobodysStream), invalid)?;
    let device = bench.device.clone();
    if let Some(graphs) = device.graphs() {
        let bound = plan.bind(&sum.arguments())?;
        let captured = graphs.capture(&mut NobodysStream, vec![bound]);
        refused("capturing on another backend's stream", captured, invalid)?;
        let graph = graphs.capture(&mut *bench.stream, vec![plan.bind(&sum.arguments())?])?;
        refused("launching on another backend's stream", graph.launch(&mut NobodysStream), invalid)?;
    }

    let mut random = Random::named("foreign");
    let rows = random.tensor(DType::F32, &[8, 32], Values::Uniform);
    let own = Weight { weight_type: weight_type.clone(), bytes: rows.bytes() };
    match bench.pack(&own) {
        Ok(own) => {
            let x = bench.give(&random.tensor(DType::F32, &[2, 32], Values::Uniform))?;
            let operands = [x, own, Given::Absent];
            let plan = bench.plan(Linear { dtype: DType::F32 }, &operands)?;
            let y = bench.empty(DType::F32, &[2, 8])?;
            let mut arguments = Arguments {
                operands: operands.iter().map(Given::argument).collect(),
                results: vec![y.binding()],
                workspace: Some(bench.workspace(plan.workspace_bytes())?),
            };
            arguments.operands[1] = Some(Argument::Weight(Arc::new(Nobodys(weight_type))));
            refused("another backend's weight", plan.bind(&arguments), invalid)?;
        }
        Err(Stop::Unsupported(_)) => {}
        Err(stop) => return Err(stop),
    }
    untouched(&mut bench, &sum.result)?;
    sum_is_right(&mut bench)
}

/// A result whose call was refused holds what it held before.
fn untouched(bench: &mut Bench, result: &Held) -> Outcome {
    let found = bench.get(result)?;
    ensure(found.bytes().iter().all(|byte| *byte == 0xFF), || {
        "the result of a call that was refused has changed".into()
    })
}

/// Ranges that are not inside their buffer, or do not fit each other.
pub(super) fn ranges(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let (first, second) = (bench.buffer(256)?, bench.buffer(256)?);
    let slice =
        |buffer: &Arc<dyn Buffer>, offset, bytes| BufferSlice { buffer: buffer.clone(), offset, bytes };
    let whole = slice(&second, 0, 256);
    bench.stream.fill(&whole, 0x11)?;
    let invalid = &[Code::InvalidArgument];
    for (offset, bytes) in
        [(1, 256), (257, 0), (usize::MAX, 2), (0, usize::MAX), (256, 1), (1 << 62, 1 << 62)]
    {
        let outside = slice(&first, offset, bytes);
        let what = |verb: &str| format!("{verb} {bytes} bytes at {offset} of a buffer of 256");
        refused(&what("filling"), bench.stream.fill(&outside, 1), invalid)?;
        if bytes <= 256 {
            let source = vec![0; bytes];
            refused(&what("an upload to"), bench.stream.upload(&source, &outside), invalid)?;
            let read = bench.stream.download(&outside, &mut vec![0; bytes], "nothing", TIMEOUT);
            refused(&what("a download of"), read, invalid)?;
            let to = slice(&second, 0, bytes);
            refused(&what("a copy of"), bench.stream.copy(&outside, &to), invalid)?;
            refused(&what("a copy to"), bench.stream.copy(&to, &outside), invalid)?;
        }
    }
    let inside = slice(&first, 0, 128);
    refused("an upload of another length", bench.stream.upload(&[0; 127], &inside), invalid)?;
    let read = bench.stream.download(&inside, &mut [0; 129], "nothing", TIMEOUT);
    refused("a download of another length", read, invalid)?;
    refused("a copy of another length", bench.stream.copy(&inside, &whole), invalid)?;
    let overlapping = slice(&first, 64, 128);
    refused("a copy onto itself", bench.stream.copy(&inside, &overlapping), invalid)?;
    let mut bytes = [0; 256];
    bench.stream.download(&whole, &mut bytes, "what was left alone", TIMEOUT)?;
    ensure(bytes == [0x11; 256], || "memory has changed, though every access to it was refused".into())?;
    sum_is_right(&mut bench)
}

/// More memory than there is.
pub(super) fn out_of_memory(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let before = bench.device.memory().used;
    for (bytes, kind) in [
        (1usize << 62, MemoryKind::Device),
        (1 << 62, MemoryKind::Pinned),
        (usize::MAX, MemoryKind::Device),
        (isize::MAX as usize, MemoryKind::Device),
    ] {
        let asked = bench.device.allocate(bytes, kind);
        refused(&format!("an allocation of {bytes} bytes of {kind:?} memory"), asked, &[Code::OutOfMemory])?;
    }
    let after = bench.device.memory().used;
    ensure(after == before, || {
        format!("{after} bytes are held after allocations that failed, {before} before")
    })?;
    sum_is_right(&mut bench)
}

/// Devices that are not there and options that cannot be.
pub(super) fn opening(subject: &Subject) -> Outcome {
    let backend = subject.backend();
    for index in [1000, usize::MAX] {
        let opened = backend.open(index, &DeviceOptions::default());
        refused(&format!("device {index}"), opened, &[Code::InvalidArgument, Code::Unavailable])?;
    }
    for share in [-0.5, f32::NAN, 1.5] {
        let options = DeviceOptions { compute_share: Some(share), ..DeviceOptions::default() };
        refused(
            &format!("a compute share of {share}"),
            open(subject, &options),
            &[Code::InvalidArgument, Code::Unsupported],
        )?;
    }
    let mut bench = Bench::new(subject.device())?;
    sum_is_right(&mut bench)
}

/// If a device measures time, then that between events: at least what the host waits between them, at most what it sees go by.
fn time_passes(bench: &mut Bench) -> Outcome {
    const PAUSE: Duration = Duration::from_millis(30);
    let [start, end] = [bench.device.event()?, bench.device.event()?];
    let begun = Instant::now();
    bench.stream.record(&*start)?;
    start.synchronize("an event before a pause", TIMEOUT)?;
    thread::sleep(PAUSE);
    bench.stream.record(&*end)?;
    end.synchronize("an event behind a pause", TIMEOUT)?;
    let most = begun.elapsed();
    let elapsed = end.elapsed_since(&*start).during("time between two events")?;
    // Clocks of devices are not exact.
    let bounds = PAUSE.mul_f64(0.9)..=most.mul_f64(1.1);
    ensure(elapsed.is_none_or(|elapsed| bounds.contains(&elapsed)), || {
        format!("{elapsed:?} are said to lie between events that are {PAUSE:?} to {most:?} apart")
    })
}

/// Events by the book: reached before they were ever recorded, and after what they stand behind is done.
pub(super) fn events(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let event = bench.device.event()?;
    ensure(event.reached()?, || "an event that was never recorded is not reached".into())?;
    event.synchronize("an event that was never recorded", TIMEOUT)?;
    let late = bench.device.event()?;
    let elapsed: std::result::Result<_, Error> = late.elapsed_since(&*event);
    refused("time between events that were never recorded", elapsed, &[])?;
    bench.stream.record(&*event)?;
    sum_is_right(&mut bench).during("between two events")?;
    bench.stream.record(&*late)?;
    late.synchronize("a recorded event", TIMEOUT)?;
    ensure(late.reached()? && event.reached()?, || "an event that was waited for is not reached".into())?;
    let never = bench.device.event()?;
    for (end, start) in [(&never, &event), (&late, &never)] {
        let elapsed: std::result::Result<_, Error> = end.elapsed_since(&**start);
        refused("time from or to an event that was never recorded", elapsed, &[])?;
    }
    time_passes(&mut bench)?;
    let mut other = bench.device.stream()?;
    other.wait(&*late)?;
    other.synchronize("a stream that waits for an event of the past", TIMEOUT)?;
    Ok(())
}
