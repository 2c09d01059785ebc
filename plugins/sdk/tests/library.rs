//! A Rust plugin in a dynamic library with its own copy of this crate, which the loopback tests do not have.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    BytesReader, Code, DType, Error, Result, TensorDesc, WeightFormat, WeightReader, WeightType,
    checked::{CheckedPlan, ValidCall},
    collective::{Comm, host::HostComm},
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, WeightDesc},
    op::{AllReduce, Argmax, Cast, Columns, MeshAxis, Op, Reduction},
};
use dsrun_plugin_sdk::PluginBackend;
use std::{
    borrow::Cow,
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

const SOON: Duration = Duration::from_secs(10);

/// The example `tiny_plugin`, built now unless cargo has built it together with the tests.
fn library() -> PathBuf {
    let program = env::current_exe().unwrap();
    let profile = program.parent().and_then(Path::parent).unwrap();
    let name = format!("{}tiny_plugin{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let library = profile.join("examples").join(name);
    let built = library.metadata().and_then(|file| file.modified());
    let source =
        ["src", "../../core/src"].map(|folder| newest(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)));
    if built.is_ok_and(|built| source.iter().all(|source| built >= *source)) {
        return library;
    }
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "build",
            "--quiet",
            "--package",
            "dsrun-plugin-sdk",
            "--example",
            "tiny_plugin",
            "--target-dir",
        ])
        .arg(profile.parent().unwrap())
        .args((!cfg!(debug_assertions)).then_some("--release"))
        .status()
        .unwrap();
    assert!(status.success(), "the plugin does not build");
    library
}

fn newest(folder: &Path) -> SystemTime {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let time = |path: PathBuf| match path.is_dir() {
        true => newest(&path),
        false => path.metadata().unwrap().modified().unwrap(),
    };
    files.map(time).max().unwrap_or(SystemTime::UNIX_EPOCH)
}

fn device() -> Arc<dyn Device> {
    PluginBackend::load(&library()).unwrap().open(0, &DeviceOptions::default()).unwrap()
}

/// A call of one row of two numbers.
fn call(op: impl Into<Op>, comm: Option<Arc<dyn Comm>>) -> ValidCall {
    let desc = TensorDesc::dense(DType::F32, &[1, 2]);
    let operands = vec![Some(OperandDesc::Tensor(desc.clone()))];
    CallDesc { op: op.into(), operands, results: vec![desc], comm }.validate().unwrap()
}

/// Runs a call on two numbers, in place or into other memory.
fn run(device: &dyn Device, stream: &mut dyn Stream, call: ValidCall, values: [f32; 2]) -> Result<[f32; 2]> {
    let slice = || Ok(BufferSlice::whole(device.allocate(8, MemoryKind::Device)?));
    let x: BufferSlice = slice()?;
    let y = if call.op.updates(0).is_some() { x.clone() } else { slice()? };
    stream.upload(&values.map(f32::to_le_bytes).concat(), &x)?;
    let operands = vec![Some(Argument::Tensor(Binding::new(x)))];
    let arguments = Arguments { operands, results: vec![Binding::new(y.clone())], workspace: None };
    CheckedPlan::new(device, call)?.bind(&arguments)?.enqueue(stream)?;
    let mut bytes = [[0; 4]; 2];
    stream.download(&y, bytes.as_flattened_mut(), "a result", SOON)?;
    Ok(bytes.map(f32::from_le_bytes))
}

#[test]
fn calls_run_and_return_errors_and_panics() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let cast = || call(Cast { dtype: DType::F32 }, None);
    assert_eq!(run(&*device, &mut *stream, cast(), [2.5, -1.0]), Ok([2.5, -1.0]));
    let error = device.allocate(1 << 40, MemoryKind::Device).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory);

    let columns = call(Columns { start: 0, count: 2 }, None);
    let error = run(&*device, &mut *stream, columns, [0.0; 2]).unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Panic, "tiny does not run columns{start=0, count=2}"));
    assert!(stream.synchronize("it", SOON).unwrap_err().message().contains("cannot be used"));

    let desc = TensorDesc::dense(DType::F32, &[2, 2]);
    let argmax = CallDesc {
        op: Argmax {}.into(),
        operands: vec![Some(OperandDesc::Tensor(desc))],
        results: vec![TensorDesc::dense(DType::I32, &[2])],
        comm: None,
    };
    let argmax = argmax.validate().unwrap();
    assert_eq!(device.kernels().query(&argmax).unwrap_err().code(), Code::Panic);
    // All objects are freed, and the library stays loaded.
    drop((stream, device));
    let again = self::device();
    let mut stream = again.stream().unwrap();
    assert_eq!(run(&*again, &mut *stream, cast(), [1.0, 3.0]), Ok([1.0, 3.0]));
}

/// The events of the host's copy of `tracing`.
struct Listener;

static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl tracing::Subscriber for Listener {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = event.metadata().level().to_string();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            text += &format!(" {field}={value:?}");
        });
        HEARD.lock().unwrap().push(text);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn events_of_a_plugin_reach_the_log_of_the_host() {
    tracing::subscriber::set_global_default(Listener).unwrap();
    PluginBackend::load(&library()).unwrap().open(7, &DeviceOptions::default()).unwrap();
    let heard = HEARD.lock().unwrap();
    let said =
        |line: &&String| line.starts_with("DEBUG") && line.contains("message=opened a tiny device index=7");
    let line = heard.iter().find(said).unwrap_or_else(|| panic!("{heard:?}"));
    assert!(line.contains("tiny_plugin"), "the event names its module: {line}");
}

#[test]
fn collectives_run_over_the_transport_of_the_host() {
    let group = HostComm::group(3).unwrap();
    let results: Vec<[f32; 2]> = std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    let device = device();
                    let rank = comm.rank() as f32;
                    let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Max };
                    let call = call(op, Some(Arc::new(comm)));
                    run(&*device, &mut *device.stream().unwrap(), call, [rank, -rank]).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results, [[2.0, 0.0]; 3]);
}

#[test]
fn an_aborted_group_fails_with_the_reason_of_the_host() {
    let mut group = HostComm::group(2).unwrap().into_iter();
    let (here, gone) = (group.next().unwrap(), group.next().unwrap());
    gone.abort("its device was lost");
    let device = device();
    let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
    let call = call(op, Some(Arc::new(here)));
    let error = run(&*device, &mut *device.stream().unwrap(), call, [0.0; 2]).unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Communication, "rank 1 aborted: its device was lost"));
}

/// A reader that fails at its second row.
struct TornFile(WeightType);

impl WeightReader for TornFile {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn rows(&mut self, first: usize, _: usize) -> Result<Cow<'_, [u8]>> {
        match first {
            1 => Err(Error::new(Code::Unavailable, "the file is truncated").at("blk.0.weight")),
            _ => Ok(Cow::Owned(vec![0; 8])),
        }
    }
}

#[test]
fn a_plugin_reads_weights_through_the_host() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![3, 2] };
    let desc = WeightDesc { weight_type: weight_type.clone(), immutable: true };
    let mut rows = BytesReader::new(weight_type.clone(), vec![0; 24]).unwrap();
    let packed = device.kernels().prepack(&mut *stream, &desc, &mut rows).unwrap();
    assert_eq!(packed.bytes(), 24);
    let error = device.kernels().prepack(&mut *stream, &desc, &mut TornFile(weight_type)).unwrap_err();
    assert_eq!(error, Error::new(Code::Unavailable, "the file is truncated").at("blk.0.weight"));
}
