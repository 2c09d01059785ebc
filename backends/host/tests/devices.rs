//! The device as its users see it, through the traits of core. The conformance suite says what each op computes; here is what the
//! suite cannot see from outside.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/backends.rs"]
mod backends;
#[path = "support/bench.rs"]
mod bench;

use bench::{Bench, desc};
use dsrun_core::{
    BytesReader, Code, DType, TensorDesc, WeightFormat, WeightType,
    checked::CheckedPlan,
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind},
    kernels::{Argument, Binding, CallDesc, WeightDesc},
    op::{Add, GatherRows, Op},
};
use half::{bf16, f16};
use rstest::rstest;
use std::{sync::Arc, time::Duration};

const SECOND: Duration = Duration::from_secs(1);

/// A handle of the CPU backend.
fn bench(threads: usize) -> Bench {
    Bench::new(&*backends::cpu(), threads)
}

/// Opens the CPU backend: devices, memory and streams are the same code for all host backends.
fn open(options: DeviceOptions) -> dsrun_core::Result<Arc<dyn Device>> {
    backends::cpu().open(0, &options)
}

#[rstest]
fn a_backend_has_one_device(#[values(backends::candle(), backends::cpu())] backend: Arc<dyn Backend>) {
    let devices = backend.devices().unwrap();
    assert_eq!(devices.len(), 1);
    assert!(backend.open(1, &DeviceOptions::default()).is_err());
    let device = backend.open(0, &DeviceOptions::default()).unwrap();
    assert_eq!(device.properties().dtypes, [DType::F32, DType::BF16, DType::F16]);
    assert_eq!(Some(device.properties().memory_bytes).filter(|bytes| *bytes > 0), devices[0].memory_bytes);
}

#[rstest]
#[case::no_threads(Some(0), None, "threads")]
#[case::too_many_threads(Some(1 << 40), None, "threads")]
#[case::no_share(None, Some(0.0), "compute_share")]
#[case::more_than_all(None, Some(1.5), "compute_share")]
#[case::no_number(None, Some(f32::NAN), "compute_share")]
fn bad_options_are_refused(
    #[case] threads: Option<usize>,
    #[case] compute_share: Option<f32>,
    #[case] argument: &str,
) {
    let error = open(DeviceOptions { threads, compute_share, ..DeviceOptions::default() }).unwrap_err();
    assert_eq!(error.argument(), Some(argument));
}

#[rstest]
fn absurd_sizes_are_out_of_memory(
    #[values(1 << 45, 1 << 62, usize::MAX - 63, usize::MAX)] bytes: usize,
    #[values(None, Some(u64::MAX))] memory_limit: Option<u64>,
) {
    let device = open(DeviceOptions { memory_limit, ..DeviceOptions::default() }).unwrap();
    let error = device.allocate(bytes, MemoryKind::Device).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory);
    assert!(error.message().contains(&bytes.to_string()), "{error}");
    assert_eq!(device.memory().used, 0);
}

#[test]
fn memory_is_counted_limited_and_given_back() {
    let device = open(DeviceOptions { memory_limit: Some(4096), ..DeviceOptions::default() }).unwrap();
    let first = device.allocate(3000, MemoryKind::Device).unwrap();
    assert_eq!((device.memory().used, device.memory().free), (3000, Some(1096)));
    assert_eq!(device.allocate(1097, MemoryKind::Device).unwrap_err().code(), Code::OutOfMemory);
    // Pinned memory is not device memory.
    let pinned = device.allocate(1 << 20, MemoryKind::Pinned).unwrap();
    assert_eq!(device.memory().used, 3000);
    drop(pinned);

    // Weights count too.
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![32, 16] };
    let weight = WeightDesc { weight_type: weight_type.clone(), immutable: true };
    let mut reader = BytesReader::new(weight_type, vec![0; 32 * 16 * 4]).unwrap();
    let mut stream = device.stream().unwrap();
    let error = device.kernels().prepack(stream.as_mut(), &weight, &mut reader).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory);
    drop(first);
    let packed = device.kernels().prepack(stream.as_mut(), &weight, &mut reader).unwrap();
    assert_eq!(device.memory().used, packed.bytes() as u64);
    drop(packed);
    assert_eq!(device.memory().used, 0);
}

#[test]
fn buffers_are_aligned_zeroed_and_may_be_empty() {
    let device = open(DeviceOptions::default()).unwrap();
    for bytes in [0, 1, 63, 64, 1 << 20] {
        let buffer = device.allocate(bytes, MemoryKind::Device).unwrap();
        assert_eq!(buffer.host_pointer().unwrap().align_offset(64), 0);
        let mut contents = vec![1; bytes];
        let mut stream = device.stream().unwrap();
        stream.download(&BufferSlice::whole(buffer), &mut contents, "zeros", SECOND).unwrap();
        assert!(contents.iter().all(|byte| *byte == 0));
    }
}

#[rstest]
fn another_handles_objects_are_refused(
    #[values(backends::candle(), backends::cpu())] backend: Arc<dyn Backend>,
) {
    let (own, other) = (bench(1), Bench::new(&*backend, 1));
    let x = desc(DType::F32, &[2, 4]);
    let call = CallDesc {
        op: Op::Add(Add { alpha: 1.0 }),
        operands: [Some(&x), Some(&x), None, None].map(|x| x.cloned().map(bench::tensor)).into(),
        results: vec![x.clone()],
        comm: None,
    };
    let plan = CheckedPlan::new(own.device.as_ref(), call.validate().unwrap()).unwrap();
    let arguments = |b: &Bench, y: &Bench| {
        bench::arguments(
            vec![Some(own.upload(&[1f32; 8])), Some(b.upload(&[1f32; 8])), None, None],
            vec![y.upload(&[0f32; 8])],
        )
    };
    for bad in [arguments(&other, &own), arguments(&own, &other)] {
        let error = plan.bind(&bad).unwrap_err();
        assert!(error.message().contains("another handle"), "{error}");
    }
    let bound = plan.bind(&arguments(&own, &own)).unwrap();
    let mut foreign = other.device.stream().unwrap();
    assert_eq!(bound.enqueue(foreign.as_mut()).unwrap_err().argument(), Some("stream"));
    let slice = own.upload(&[0f32; 8]);
    assert!(foreign.upload(&[0; 32], &slice).is_err());
    assert!(foreign.fill(&slice, 0).is_err());
}

#[rstest]
#[case(-5, 0)]
#[case(0, 0)]
#[case(2, 2)]
#[case(99, 3)]
fn rows_past_the_extent_are_left_alone(#[case] extent: i32, #[case] rows: usize) {
    let bench = bench(2);
    let x = TensorDesc { strides: vec![5, 1], ..TensorDesc::dense(DType::BF16, &[3, 4]) }.with_extent();
    let extent = bench.upload(&[extent]);
    let bound = |values: &[bf16]| Binding { slice: bench.upload(values), extent: Some(extent.clone()) };
    let operand = || Some((bench::tensor(x.clone()), Argument::Tensor(bound(&[bf16::ONE; 15]))));
    let y = bound(&[bf16::from_f32(7.0); 15]);
    bench
        .run(Add { alpha: 2.0 }, vec![operand(), operand(), None, None], vec![(x.clone(), y.clone())])
        .unwrap();
    let found: Vec<bf16> = bench.download(&y.slice);
    for (index, value) in found.iter().enumerate() {
        let written = index / 5 < rows && index % 5 < 4;
        assert_eq!(value.to_f32(), if written { 3.0 } else { 7.0 }, "{index}");
    }
}

#[test]
fn gathering_stops_at_the_extent_of_what_is_gathered() {
    let bench = bench(1);
    let x = TensorDesc::dense(DType::F16, &[3, 2]).with_extent();
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(f16::from_f32);
    let bound = Binding { slice: bench.upload(&values), extent: Some(bench.upload(&[2])) };
    let y = bench.upload(&[f16::ZERO; 6]);
    let operands =
        vec![Some((bench::tensor(x), Argument::Tensor(bound))), Some(bench.operand(&[1, 2, 0], &[3]))];
    bench.run(GatherRows {}, operands, vec![(desc(DType::F16, &[3, 2]), Binding::new(y.clone()))]).unwrap();
    assert_eq!(bench.download::<f16>(&y), [3.0, 4.0, 0.0, 0.0, 1.0, 2.0].map(f16::from_f32));
}

#[test]
fn events_are_reached_at_once_and_keep_time() {
    let device = open(DeviceOptions::default()).unwrap();
    let (mut stream, first, second) =
        (device.stream().unwrap(), device.event().unwrap(), device.event().unwrap());
    assert!(first.reached().unwrap());
    assert!(second.elapsed_since(first.as_ref()).is_err());
    stream.record(first.as_ref()).unwrap();
    stream.record(second.as_ref()).unwrap();
    stream.wait(second.as_ref()).unwrap();
    assert!(second.elapsed_since(first.as_ref()).unwrap().is_some());
}
