//! Tests of the device as its users see it: through the traits of core. What each op computes is the conformance suite's to
//! say; here is what that suite cannot see from outside.

mod bench;
mod hostile;
mod ranks;

use crate::CpuBackend;
use bench::{Bench, desc};
use dsrun_core::{
    BytesReader, Code, DType, TensorDesc, WeightFormat, WeightType,
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind},
    kernels::{Argument, Binding, CallDesc, WeightDesc},
    op::{Add, GatherRows, Linear, Op, RmsNorm},
    program::{Call, ValueId},
    region::{Region, well_known},
};
use half::{bf16, f16};
use rstest::rstest;
use std::{sync::Arc, time::Duration};

const SECOND: Duration = Duration::from_secs(1);

fn open(options: DeviceOptions) -> dsrun_core::Result<Arc<dyn Device>> {
    CpuBackend::new().open(0, &options)
}

#[test]
fn the_backend_has_one_device() {
    let backend = CpuBackend::new();
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
    let error = open(DeviceOptions { threads, compute_share, memory_limit: None }).unwrap_err();
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
    assert_eq!(device.allocate(1097, MemoryKind::Pinned).unwrap_err().code(), Code::OutOfMemory);

    // Weights count too.
    let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![32, 16] };
    let weight = WeightDesc { weight_type: weight_type.clone(), uses: vec![], immutable: true };
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

#[test]
fn another_handles_objects_are_refused() {
    let (own, other) = (Bench::new(1), Bench::new(1));
    let x = desc(DType::F32, &[2, 4]);
    let call = CallDesc {
        op: Op::Add(Add { alpha: 1.0 }),
        operands: [Some(&x), Some(&x), None, None].map(|x| x.cloned().map(bench::tensor)).into(),
        results: vec![x.clone()],
        comm: None,
    };
    let plan = own.device.kernels().plan(&call).unwrap();
    let arguments = |b: &Bench, y: &Bench| {
        bench::arguments(
            vec![Some(own.upload(&[1f32; 8])), Some(b.upload(&[1f32; 8])), None, None],
            vec![y.upload(&[0f32; 8])],
        )
    };
    for bad in [arguments(&other, &own), arguments(&own, &other)] {
        let error = plan.clone().bind(&bad).unwrap_err();
        assert!(error.message().contains("another handle"), "{error}");
    }
    let bound = plan.bind(&arguments(&own, &own)).unwrap();
    let mut foreign = other.device.stream().unwrap();
    assert_eq!(bound.enqueue(foreign.as_mut()).unwrap_err().argument(), Some("stream"));
    let slice = own.upload(&[0f32; 8]);
    assert!(foreign.upload(&[0; 32], &slice).is_err());
    assert!(foreign.fill(&slice, 0).is_err());
}

#[test]
fn a_raw_plan_checks_ranges_and_overlaps_itself() {
    let bench = Bench::new(1);
    let x = desc(DType::F32, &[2, 4]);
    let call = CallDesc {
        op: Op::Add(Add { alpha: 1.0 }),
        operands: [Some(&x), Some(&x), None, None].map(|x| x.cloned().map(bench::tensor)).into(),
        results: vec![x.clone()],
        comm: None,
    };
    let plan = bench.device.kernels().plan(&call).unwrap();
    let all = bench.upload(&[0f32; 64]);
    let at = |offset: usize| BufferSlice { buffer: all.buffer.clone(), offset, bytes: 32 };
    let bind =
        |a, b, y| plan.clone().bind(&bench::arguments(vec![Some(a), Some(b), None, None], vec![y])).map(drop);
    assert!(bind(at(0), at(0), at(64)).is_ok());
    assert!(bind(at(0), at(64), at(64)).is_err(), "result on operand");
    assert!(bind(at(0), at(64), at(2)).is_err(), "misaligned");
    assert!(bind(at(0), at(64), at(240)).is_err(), "behind the end");
    assert!(bind(at(0), at(64), at(usize::MAX - 15)).is_err(), "overflow");
    assert!(bind(at(0), at(64), BufferSlice { bytes: 28, ..at(128) }).is_err(), "too short");
}

#[rstest]
#[case(-5, 0)]
#[case(0, 0)]
#[case(2, 2)]
#[case(99, 3)]
fn rows_past_the_extent_are_left_alone(#[case] extent: i32, #[case] rows: usize) {
    let bench = Bench::new(2);
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
    let bench = Bench::new(1);
    let x = TensorDesc::dense(DType::F16, &[3, 2]).with_extent();
    let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(f16::from_f32);
    let bound = Binding { slice: bench.upload(&values), extent: Some(bench.upload(&[2])) };
    let y = bench.upload(&[f16::ZERO; 6]);
    let operands =
        vec![Some((bench::tensor(x), Argument::Tensor(bound))), Some(bench.operand(&[1, 2, 0], &[3]))];
    bench.run(GatherRows {}, operands, vec![(desc(DType::F16, &[3, 2]), Binding::new(y.clone()))]).unwrap();
    assert_eq!(bench.download::<f16>(&y), [3.0, 4.0, 0.0, 0.0, 1.0, 2.0].map(f16::from_f32));
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|index| ((index * 31 + 7) % 53) as f32 / 26.0 - 1.0).collect()
}

/// A region's results must be those of its body, up to the roundings it leaves out.
#[rstest]
#[case(RmsNorm { eps: 1e-5, weight_offset: 0.0 }, 1.0, 32)]
#[case(RmsNorm { eps: 0.1, weight_offset: 1.0 }, -0.5, 8)]
fn add_rms_norm_is_its_body(
    #[case] norm: RmsNorm,
    #[case] alpha: f32,
    #[case] group: usize,
    #[values(false, true)] half: bool,
) {
    let bench = Bench::new(2);
    let (rows, width) = (3, 32);
    let dtype = if half { DType::BF16 } else { DType::F32 };
    let x = desc(dtype, &[rows, width]);
    let a = bench.floats(dtype, &numbers(rows * width), &[rows, width]);
    let b = bench.floats(dtype, &numbers(rows * width + 5)[5..], &[rows, width]);
    let weight = bench.floats(dtype, &numbers(group), &[group]);
    let output = || Binding::new(bench.floats_slice(dtype, &vec![0.0; rows * width]));
    let (sum, normed, fused_sum, fused) = (output(), output(), output(), output());

    let add = Add { alpha };
    let operands = vec![Some(a.clone()), Some(b.clone()), None, None];
    bench.run(add, operands, vec![(x.clone(), sum.clone())]).unwrap();
    let between = (bench::tensor(x.clone()), Argument::Tensor(sum.clone()));
    bench.run(norm, vec![Some(between), Some(weight.clone())], vec![(x.clone(), normed.clone())]).unwrap();

    let region = Op::Region(Arc::new(well_known::add_rms_norm(add, norm).unwrap()));
    let results = vec![(x.clone(), fused_sum.clone()), (x.clone(), fused.clone())];
    bench.run(region, vec![Some(a), Some(b), Some(weight)], results).unwrap();

    let read = |binding: &Binding| bench.read_floats(dtype, &binding.slice);
    assert_eq!(read(&sum), read(&fused_sum));
    let tolerance = if half { 0.02 } else { 1e-6 };
    for (expected, found) in read(&normed).into_iter().zip(read(&fused)) {
        assert!((expected - found).abs() <= tolerance * expected.abs().max(0.5), "{expected} {found}");
    }
}

#[rstest]
fn norm_linear_is_its_body(#[values(false, true)] half: bool, #[values(false, true)] with_bias: bool) {
    let bench = Bench::new(2);
    let (rows, inputs, outputs) = (3, 32, 24);
    let dtype = if half { DType::F16 } else { DType::F32 };
    let x = bench.floats(dtype, &numbers(rows * inputs), &[rows, inputs]);
    let norm_weight = bench.floats(DType::F32, &numbers(inputs), &[inputs]);
    let weight = bench.weight(&numbers(outputs * inputs), outputs, inputs);
    let bias = with_bias.then(|| bench.floats(dtype, &numbers(outputs), &[outputs]));
    let (normed_desc, y_desc) = (desc(dtype, &[rows, inputs]), desc(DType::F32, &[rows, outputs]));
    let normed = Binding::new(bench.floats_slice(dtype, &vec![0.0; rows * inputs]));
    let [y, fused] = [(); 2].map(|()| Binding::new(bench.upload(&vec![0f32; rows * outputs])));

    let norm = RmsNorm { eps: 1e-6, weight_offset: 0.0 };
    let linear = Linear { dtype: DType::F32 };
    let operands = vec![Some(x.clone()), Some(norm_weight.clone())];
    bench.run(norm, operands, vec![(normed_desc.clone(), normed.clone())]).unwrap();
    let between = (bench::tensor(normed_desc), Argument::Tensor(normed));
    let operands = vec![Some(between), Some(weight.clone()), bias.clone()];
    bench.run(linear, operands, vec![(y_desc.clone(), y.clone())]).unwrap();

    let region = well_known::norm_linear(norm, DType::F32, with_bias).unwrap();
    let mut operands = vec![Some(x), Some(norm_weight), Some(weight)];
    operands.extend(bias.map(Some));
    bench.run(Op::Region(Arc::new(region)), operands, vec![(y_desc, fused.clone())]).unwrap();

    let tolerance = if half { 0.01 } else { 1e-5 };
    let (expected, found) = (bench.download::<f32>(&y.slice), bench.download::<f32>(&fused.slice));
    for (expected, found) in expected.into_iter().zip(found) {
        assert!((expected - found).abs() <= tolerance * expected.abs().max(1.0), "{expected} {found}");
    }
}

#[test]
fn other_regions_are_left_to_core_with_a_reason() {
    let bench = Bench::new(1);
    let values =
        |indices: &[usize]| indices.iter().map(|index| Some(ValueId::new(*index))).collect::<Vec<_>>();
    let norm = RmsNorm { eps: 0.0, weight_offset: 0.0 };
    // The same two ops as a known region, but only the second value is a result.
    let mut add = values(&[0, 1]);
    add.extend([None, None]);
    let calls = vec![
        Call::new(Add { alpha: 1.0 }, add, vec![ValueId::new(3)]),
        Call::new(norm, values(&[3, 2]), vec![ValueId::new(4)]),
    ];
    let region = Region::new("add_rms_norm", 3, calls, vec![ValueId::new(4)]).unwrap();
    let x = desc(DType::F32, &[2, 4]);
    let call = CallDesc {
        op: Op::Region(Arc::new(region)),
        operands: [x.clone(), x.clone(), desc(DType::F32, &[4])].map(|x| Some(bench::tensor(x))).into(),
        results: vec![x],
        comm: None,
    };
    let support = bench.device.kernels().query(&call).unwrap();
    assert!(!support.native && support.reason.contains("add, rms_norm"), "{}", support.reason);
    assert_eq!(bench.device.kernels().plan(&call).unwrap_err().code(), Code::Unsupported);
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
