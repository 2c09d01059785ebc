//! A Rust backend through its own C tables: everything in the traits crosses in both directions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/tiny.rs"]
mod tiny;

use dsrun_core::{
    BytesReader, Code, DType, Error, Result, TensorDesc, WeightFormat, WeightReader, WeightType,
    checked::{CheckedPlan, ValidCall},
    collective::{Comm, host::HostComm},
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind, MemoryUse, Stream},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, PackedWeight, WeightDesc},
    op::{
        Add, AllReduce, Argmax, AttentionPrepare, Barrier, Cast, Columns, LayerNorm, Linear, MeshAxis, Op,
        Profile, Reduction, RmsNorm,
    },
    region::well_known,
};
use dsrun_plugin_sdk::{PluginBackend, backend_entry};
use rstest::rstest;
use std::{
    borrow::Cow,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tiny::{LIVE, Tiny};

const SOON: Duration = Duration::from_secs(10);

fn loopback() -> PluginBackend {
    // SAFETY: this crate defines the entry.
    unsafe { PluginBackend::from_entry(backend_entry!(Tiny::new())) }.unwrap()
}

fn device() -> Arc<dyn Device> {
    loopback().open(0, &DeviceOptions::default()).unwrap()
}

fn tensor(shape: &[usize]) -> TensorDesc {
    TensorDesc::dense(DType::F32, shape)
}

fn call(op: impl Into<Op>, operands: &[Option<OperandDesc>], results: &[TensorDesc]) -> ValidCall {
    call_over(op, operands, results, None)
}

fn call_over(
    op: impl Into<Op>,
    operands: &[Option<OperandDesc>],
    results: &[TensorDesc],
    comm: Option<Arc<dyn Comm>>,
) -> ValidCall {
    let (operands, results) = (operands.to_vec(), results.to_vec());
    CallDesc { op: op.into(), operands, results, comm }.validate().unwrap()
}

/// A copy, because the tiny backend casts from f32 to f32.
fn cast(desc: &TensorDesc) -> ValidCall {
    let operands = [Some(OperandDesc::Tensor(desc.clone()))];
    call(Cast { dtype: DType::F32 }, &operands, std::slice::from_ref(desc))
}

fn one_to_one(x: &Binding, y: &Binding) -> Arguments {
    Arguments { operands: vec![Some(Argument::Tensor(x.clone()))], results: vec![y.clone()], workspace: None }
}

fn buffer(device: &dyn Device, bytes: usize) -> BufferSlice {
    BufferSlice::whole(device.allocate(bytes, MemoryKind::Device).unwrap())
}

fn download(stream: &mut dyn Stream, source: &BufferSlice) -> Vec<f32> {
    let mut bytes = vec![0; source.bytes];
    stream.download(source, &mut bytes, "a result", SOON).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn information_about_backend_and_device_crosses() {
    let (plugin, plain) = (loopback(), Tiny::new());
    assert_eq!(plugin.info(), plain.info());
    assert_eq!(plugin.devices().unwrap(), plain.devices().unwrap());
    assert_eq!(plugin.diagnose(), plain.diagnose());
    assert_eq!(plugin.library(), None);
    let options = DeviceOptions {
        threads: Some(3),
        memory_limit: Some(0),
        compute_share: Some(0.25),
        batch_invariant: true,
    };
    for (index, options) in [(0, DeviceOptions::default()), (7, options)] {
        let (device, plain) = (plugin.open(index, &options).unwrap(), plain.open(index, &options).unwrap());
        assert_eq!(device.properties(), plain.properties());
        assert_eq!(device.properties().profiles, [Profile::LlmCore1, Profile::LlmDist1]);
        assert_eq!(device.graphs().is_some(), plain.graphs().is_some());
        assert_eq!(device.collective().is_some(), plain.collective().is_some());
        assert_eq!(device.memory(), MemoryUse { used: 0, free: Some(1 << 20) });
    }
}

#[test]
fn offline_devices_cross() {
    let plugin = loopback();
    let device = plugin.describe("zeroth").unwrap();
    let plain = Tiny::new().open(0, &DeviceOptions::default()).unwrap();
    assert_eq!(device.properties(), plain.properties());
    let error = plugin.describe("eighth").unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::InvalidArgument, "\"eighth\" is unknown"));
}

#[test]
fn errors_keep_code_message_op_argument_and_field() {
    let plugin = loopback();
    let error = plugin.open(5, &DeviceOptions::default()).unwrap_err();
    assert_eq!(error, Error::new(Code::Unavailable, "no device 5").at("index"));
    let share = DeviceOptions { compute_share: Some(0.0), ..DeviceOptions::default() };
    assert_eq!(plugin.open(0, &share).unwrap_err().argument(), Some("compute_share"));

    let device = device();
    let error = device.allocate(1 << 40, MemoryKind::Device).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory);
    assert!(error.message().contains(&(1u64 << 40).to_string()), "{error}");
    let quantised = WeightDesc {
        weight_type: WeightType { format: WeightFormat::from_name("q4_1").unwrap(), shape: vec![2, 32] },
        immutable: true,
    };
    let error = device.kernels().prepack_query(&quantised).unwrap_err();
    assert_eq!(error, Error::unsupported("tiny has no q4_1").at("weight_type").field("format"));
}

#[test]
fn memory_streams_and_events_work() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let a = buffer(&*device, 16);
    let b = buffer(&*device, 16);
    assert_eq!(device.memory().used, 32);
    assert_eq!(download(&mut *stream, &a), [0.0; 4]);

    stream.upload(&bytes_of(&[1.0, 2.0, 3.0, 4.0]), &a).unwrap();
    stream.copy(&a.slice(4, 8).unwrap(), &b.slice(8, 8).unwrap()).unwrap();
    assert_eq!(download(&mut *stream, &b), [0.0, 0.0, 2.0, 3.0]);
    stream.fill(&b.slice(0, 3).unwrap(), 0xFF).unwrap();
    let mut bytes = [0; 4];
    stream.download(&b.slice(0, 4).unwrap(), &mut bytes, "bytes", SOON).unwrap();
    assert_eq!(bytes, [0xFF, 0xFF, 0xFF, 0]);

    let error = stream.synchronize("the third step", Duration::ZERO).unwrap_err();
    assert_eq!(error, Error::new(Code::Timeout, "waited 0ns for the third step"));
    let error = stream.upload(&[1, 2], &a).unwrap_err();
    assert_eq!((error.argument(), error.message()), (Some("source"), "2 bytes for 16"));

    let (first, second) = (device.event().unwrap(), device.event().unwrap());
    assert!(first.reached().unwrap());
    assert_eq!(second.elapsed_since(&*first).unwrap(), None);
    stream.record(&*first).unwrap();
    stream.record(&*second).unwrap();
    stream.wait(&*second).unwrap();
    assert_eq!(second.elapsed_since(&*first).unwrap(), Some(Duration::from_nanos(5)));
    second.synchronize("it", Duration::MAX).unwrap();
    assert_eq!(second.synchronize("it", Duration::ZERO).unwrap_err().code(), Code::Timeout);

    let pinned = device.allocate(4, MemoryKind::Pinned).unwrap();
    assert_eq!((pinned.kind(), pinned.bytes()), (MemoryKind::Pinned, 4));
    let address = pinned.host_pointer().unwrap();
    stream.upload(&[9, 8, 7, 6], &BufferSlice::whole(pinned.clone())).unwrap();
    // SAFETY: four bytes of a live buffer; no work runs.
    assert_eq!(unsafe { address.cast::<[u8; 4]>().read() }, [9, 8, 7, 6]);
    assert!(a.buffer.host_pointer().is_none());
}

#[test]
fn answers_of_queries_cross() {
    let device = device();
    let kernels = device.kernels();
    let desc = tensor(&[2, 4]);
    let add = call(
        Add { alpha: 0.5 },
        &[Some(OperandDesc::Tensor(desc.clone())), Some(OperandDesc::Tensor(desc.clone())), None, None],
        std::slice::from_ref(&desc),
    );
    let support = kernels.query(&add).unwrap();
    assert!(!support.native);
    assert_eq!(support.reason, "tiny has no add{alpha=0.5}");

    let lengths = OperandDesc::Tensor(TensorDesc::dense(DType::I32, &[3]));
    let prepare = call(
        AttentionPrepare { words: 9 },
        &[Some(lengths.clone()), Some(lengths.clone()), Some(lengths)],
        &[TensorDesc::dense(DType::I32, &[9])],
    );
    let support = kernels.query(&prepare).unwrap();
    assert!(support.native && support.capture_safe && support.batch_invariant);
    assert_eq!((support.work_words, support.persistent_bytes, support.workspace_bytes), (33, 44, 0));

    let norm = call(
        LayerNorm { eps: 1e-5 },
        &[Some(OperandDesc::Tensor(desc.clone())), None, None],
        std::slice::from_ref(&desc),
    );
    let support = kernels.query(&norm).unwrap();
    assert!(support.native && !support.batch_invariant);
    assert_eq!(support.workspace_bytes, 16);
}

#[test]
fn bodies_of_regions_cross() {
    let region =
        well_known::add_rms_norm(Add { alpha: 2.0 }, RmsNorm { eps: 1e-6, weight_offset: 1.0 }).unwrap();
    let encoding = region.encoding();
    let desc = tensor(&[2, 4]);
    let operand = Some(OperandDesc::Tensor(desc.clone()));
    let weight = Some(OperandDesc::Tensor(tensor(&[4])));
    let call = call(Op::Region(Arc::new(region)), &[operand.clone(), operand, weight], &[desc.clone(), desc]);
    assert_eq!(device().kernels().query(&call).unwrap().reason, encoding);
}

#[test]
fn a_bounded_call_runs_and_replays_and_is_freed() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let desc = tensor(&[3, 2]).with_extent();
    let plan = CheckedPlan::new(&*device, cast(&desc)).unwrap();
    let (x, y, extent) = (buffer(&*device, 24), buffer(&*device, 24), buffer(&*device, 4));
    let bounded = |slice: &BufferSlice| Binding { slice: slice.clone(), extent: Some(extent.clone()) };
    let bound = plan.bind(&one_to_one(&bounded(&x), &bounded(&y))).unwrap();
    // Parents may be dropped first, because children keep them alive.
    drop(plan);
    stream.upload(&bytes_of(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), &x).unwrap();
    stream.upload(&2i32.to_le_bytes(), &extent).unwrap();
    bound.enqueue(&mut *stream).unwrap();
    assert_eq!(download(&mut *stream, &y), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);

    let graph = device.graphs().unwrap().capture(&mut *stream, vec![bound]).unwrap();
    stream.upload(&1i32.to_le_bytes(), &extent).unwrap();
    stream.fill(&y, 0).unwrap();
    assert_eq!(download(&mut *stream, &y), [0.0; 6]);
    graph.launch(&mut *stream).unwrap();
    assert_eq!(download(&mut *stream, &y), [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    drop(extent);
    graph.launch(&mut *stream).unwrap();
    assert!(device.memory().used > 0);
    drop((graph, x, y));
    assert_eq!(
        device.memory().used,
        0,
        "the graph keeps its calls and their buffers alive no longer than it lives"
    );
}

/// A reader that owns its rows, and counts its calls.
struct MadeRows(WeightType, usize);

impl WeightReader for MadeRows {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        self.1 += 1;
        let columns = self.0.columns();
        let value = |index: usize| (index as f32).to_le_bytes();
        Ok(Cow::Owned((first * columns..(first + count) * columns).flat_map(value).collect()))
    }
}

fn matrix() -> WeightDesc {
    WeightDesc {
        weight_type: WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![3, 2] },
        immutable: true,
    }
}

#[test]
fn weights_are_packed_from_borrowed_and_owned_rows() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let desc = matrix();
    let layout = device.kernels().prepack_query(&desc).unwrap();
    assert_eq!((layout.bytes, layout.name), (24, "immutable".into()));

    let values: Vec<f32> = (0..6).map(|value| value as f32).collect();
    let mut borrowed = BytesReader::new(desc.weight_type.clone(), bytes_of(&values)).unwrap();
    let mut made = MadeRows(desc.weight_type.clone(), 0);
    let linear = call(
        Linear { dtype: DType::F32 },
        &[
            Some(OperandDesc::Tensor(tensor(&[2, 2]))),
            Some(OperandDesc::Weight(desc.weight_type.clone())),
            None,
        ],
        &[tensor(&[2, 3])],
    );
    let plan = CheckedPlan::new(&*device, linear).unwrap();
    let (x, y) = (buffer(&*device, 16), buffer(&*device, 24));
    stream.upload(&bytes_of(&[1.0, 0.0, 1.0, 10.0]), &x).unwrap();
    let readers: [&mut dyn WeightReader; 2] = [&mut borrowed, &mut made];
    for reader in readers {
        let packed = device.kernels().prepack(&mut *stream, &desc, reader).unwrap();
        assert_eq!((packed.weight_type(), packed.bytes()), (&desc.weight_type, 24));
        let arguments = Arguments {
            operands: vec![
                Some(Argument::Tensor(Binding::new(x.clone()))),
                Some(Argument::Weight(packed)),
                None,
            ],
            results: vec![Binding::new(y.clone())],
            workspace: None,
        };
        stream.fill(&y, 0).unwrap();
        plan.bind(&arguments).unwrap().enqueue(&mut *stream).unwrap();
        assert_eq!(download(&mut *stream, &y), [0.0, 2.0, 4.0, 10.0, 32.0, 54.0]);
    }
    assert_eq!(made.1, 3);
}

/// A reader that panics, or fails.
struct TornFile {
    weight_type: WeightType,
    bug: bool,
}

impl WeightReader for TornFile {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn rows(&mut self, first: usize, _: usize) -> Result<Cow<'_, [u8]>> {
        match (first, self.bug) {
            (1, true) => panic!("the reader panics"),
            (1, false) => Err(Error::new(Code::Unavailable, "the file is truncated").at("blk.0.weight")),
            _ => Ok(Cow::Owned(vec![0; 8])),
        }
    }
}

#[rstest]
#[case(false, Error::new(Code::Unavailable, "the file is truncated").at("blk.0.weight"))]
#[case(true, Error::new(Code::Panic, "the reader panics"))]
fn errors_and_panics_of_a_reader_pass_through_the_plugin(#[case] bug: bool, #[case] expected: Error) {
    let device = device();
    let mut stream = device.stream().unwrap();
    let desc = matrix();
    let mut torn = TornFile { weight_type: desc.weight_type.clone(), bug };
    let error = device.kernels().prepack(&mut *stream, &desc, &mut torn).unwrap_err();
    assert_eq!(error, expected);
}

#[test]
fn objects_of_another_backend_are_refused() {
    let plain = Tiny::new().open(0, &DeviceOptions::default()).unwrap();
    let (device, other) = (device(), device());
    let desc = tensor(&[1, 1]);
    let plan = CheckedPlan::new(&*device, cast(&desc)).unwrap();
    for foreign in [&plain, &other] {
        let slice = buffer(&**foreign, 4);
        let [x, y] = [(); 2].map(|()| Binding::new(buffer(&*device, 4)));
        let theirs = Binding::new(slice.clone());
        for (arguments, argument) in [(one_to_one(&theirs, &y), "x"), (one_to_one(&x, &theirs), "y")] {
            let error = plan.bind(&arguments).unwrap_err();
            assert_eq!((error.op(), error.argument()), (Some("cast"), Some(argument)), "{error}");
            assert!(error.message().contains("another backend"), "{error}");
        }
        let mut stream = device.stream().unwrap();
        assert_eq!(stream.fill(&slice, 1).unwrap_err().argument(), Some("destination"));
        let mut foreign_stream = foreign.stream().unwrap();
        let bound = plan.bind(&one_to_one(&x, &y)).unwrap();
        assert_eq!(bound.enqueue(&mut *foreign_stream).unwrap_err().argument(), Some("stream"));
        let event = foreign.event().unwrap();
        assert_eq!(stream.record(&*event).unwrap_err().argument(), Some("event"));
    }
}

#[test]
fn a_panic_while_planning_poisons_only_the_device() {
    let backend = loopback();
    let open = || backend.open(0, &DeviceOptions::default()).unwrap();
    let device = open();
    let mut stream = device.stream().unwrap();
    let slice = buffer(&*device, 4);
    let argmax = call(
        Argmax {},
        &[Some(OperandDesc::Tensor(tensor(&[2, 2])))],
        &[TensorDesc::dense(DType::I32, &[2])],
    );
    let error = device.kernels().query(&argmax).unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Panic, "argmax panics when queried"));
    let error = device.kernels().query(&cast(&tensor(&[1, 1]))).unwrap_err();
    assert_eq!(error.code(), Code::Panic);
    assert!(error.message().contains("the device cannot be used"), "{error}");
    assert_eq!(device.allocate(4, MemoryKind::Device).unwrap_err().code(), Code::Panic);
    // Objects made before still work and are freed, and another device works.
    stream.fill(&slice, 1).unwrap();
    drop((stream, slice));
    assert!(open().kernels().query(&cast(&tensor(&[1, 1]))).unwrap().native);
}

#[test]
fn a_panic_while_running_poisons_the_call_and_its_stream() {
    let device = device();
    let mut stream = device.stream().unwrap();
    let desc = tensor(&[1, 1]);
    let columns = call(
        Columns { start: 0, count: 1 },
        &[Some(OperandDesc::Tensor(desc.clone()))],
        std::slice::from_ref(&desc),
    );
    let plan = CheckedPlan::new(&*device, columns).unwrap();
    let (x, y) = (buffer(&*device, 4), buffer(&*device, 4));
    let arguments = one_to_one(&Binding::new(x.clone()), &Binding::new(y));
    let bound = plan.bind(&arguments).unwrap();
    let error = bound.enqueue(&mut *stream).unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Panic, "tiny does not run columns{start=0, count=1}"));
    let mut fresh = device.stream().unwrap();
    let error = bound.enqueue(&mut *fresh).unwrap_err();
    assert!(error.message().contains("the call cannot be used"), "{error}");
    let error = stream.synchronize("it", SOON).unwrap_err();
    assert!(error.message().contains("the stream cannot be used"), "{error}");
    fresh.fill(&x, 1).unwrap();
    fresh.synchronize("it", SOON).unwrap();
}

#[test]
fn a_panic_while_listing_devices_is_an_error() {
    // SAFETY: this crate defines the entry.
    let backend =
        unsafe { PluginBackend::from_entry(backend_entry!(Tiny::that_panics_when_listed())) }.unwrap();
    assert_eq!(backend.info().name, "tiny");
    let error = backend.devices().unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::Panic, "listing devices panics"));
    let findings = backend.diagnose();
    assert!(!findings[0].present && findings[0].detail.contains("panicked"), "{findings:?}");
}

#[test]
fn a_failed_constructor_returns_its_error_and_is_tried_again() {
    fn make() -> Result<Tiny> {
        Err(Error::new(Code::Unavailable, "the driver is missing").at("libtiny.so"))
    }
    let entry = backend_entry!(make()?);
    for _ in 0..2 {
        // SAFETY: this crate defines the entry.
        let error = unsafe { PluginBackend::from_entry(entry) }.unwrap_err();
        assert_eq!(error, Error::new(Code::Unavailable, "the driver is missing").at("libtiny.so"));
    }
}

fn all_reduce(device: &dyn Device, comm: Arc<dyn Comm>) -> Result<Vec<f32>> {
    let desc = tensor(&[1, 2]);
    let rank = comm.rank() as f32;
    let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
    let operands = [Some(OperandDesc::Tensor(desc.clone()))];
    let reduce = call_over(op, &operands, std::slice::from_ref(&desc), Some(comm));
    let plan = CheckedPlan::new(device, reduce)?;
    let (mut stream, slice) = (device.stream()?, buffer(device, 8));
    stream.upload(&bytes_of(&[rank + 1.0, 10.0 * rank]), &slice)?;
    let binding = Binding::new(slice.clone());
    let bound = plan.bind(&one_to_one(&binding, &binding))?;
    // The bound call keeps the plan alive, and the plan its group.
    drop(plan);
    bound.enqueue(&mut *stream)?;
    Ok(download(&mut *stream, &slice))
}

#[rstest]
#[case::the_hosts_transport(false)]
#[case::the_plugins_own_group(true)]
fn collectives_run_over(#[case] own: bool) {
    let backend = loopback();
    let id =
        backend.open(0, &DeviceOptions::default()).unwrap().collective().unwrap().group_id(None).unwrap();
    let host: Vec<HostComm> = HostComm::group(3).unwrap();
    let results: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = host
            .into_iter()
            .map(|comm| {
                let (backend, id) = (&backend, &id);
                scope.spawn(move || {
                    let device = backend.open(0, &DeviceOptions::default()).unwrap();
                    let rank = comm.rank();
                    let comm: Arc<dyn Comm> = match own {
                        true => device.collective().unwrap().join(id, rank, 3, SOON).unwrap(),
                        false => Arc::new(comm),
                    };
                    assert_eq!((comm.rank(), comm.ranks(), comm.status()), (rank, 3, Ok(())));
                    all_reduce(&*device, comm).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results, vec![vec![6.0, 30.0]; 3]);
}

#[test]
fn a_failed_group_fails_the_call_with_the_reason_of_the_host() {
    let device = device();
    let mut group = HostComm::group(2).unwrap().into_iter();
    let (here, gone) = (group.next().unwrap().with_timeout(Duration::from_millis(50)), group.next().unwrap());
    gone.abort("its device was lost");
    let barrier = call_over(Barrier { axis: MeshAxis::Tensor }, &[], &[], Some(Arc::new(here)));
    let plan = CheckedPlan::new(&*device, barrier).unwrap();
    let none = Arguments { operands: Vec::new(), results: Vec::new(), workspace: None };
    let error = plan.bind(&none).unwrap().enqueue(&mut *device.stream().unwrap()).unwrap_err();
    assert_eq!(error.code(), Code::Communication);
    assert!(error.message().contains("its device was lost"), "{error}");
}

#[test]
fn a_group_of_the_plugin_times_out_with_the_missing_ranks() {
    let device = device();
    let collective = device.collective().unwrap();
    let id = collective.group_id(None).unwrap();
    let error = collective.join(&id, 1, 3, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains("0, 2"), "{error}");
}

/// All objects are freed with their last owner. Other tests run at the same time, so this test waits.
#[test]
fn no_object_leaks() {
    {
        let device = device();
        let mut stream = device.stream().unwrap();
        let desc = matrix();
        let mut rows = MadeRows(desc.weight_type.clone(), 0);
        let packed: Arc<dyn PackedWeight> = device.kernels().prepack(&mut *stream, &desc, &mut rows).unwrap();
        drop(device);
        assert!(LIVE.load(Ordering::SeqCst) >= 2);
        drop((packed, stream));
    }
    for _ in 0..500 {
        if LIVE.load(Ordering::SeqCst) == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} objects are alive", LIVE.load(Ordering::SeqCst));
}
