//! Fused kernels: a region's results must be those of its body, up to the roundings it leaves out.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../host/tests/support/bench.rs"]
mod bench;

use bench::{Bench, desc};
use dsrun_core::{
    Code, DType,
    kernels::{Argument, Binding, CallDesc},
    op::{Add, Linear, Op, RmsNorm},
    program::{Call, ValueId},
    region::{Region, well_known},
};
use dsrun_cpu::CpuBackend;
use rstest::rstest;
use std::sync::Arc;

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
    let bench = Bench::new(&CpuBackend::new(), 2);
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
    let bench = Bench::new(&CpuBackend::new(), 2);
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
fn other_regions_are_refused_with_a_reason() {
    let bench = Bench::new(&CpuBackend::new(), 1);
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
    let call = call.validate().unwrap();
    let support = bench.device.kernels().query(&call).unwrap();
    assert!(!support.native && support.reason.contains("add, rms_norm"), "{}", support.reason);
    assert_eq!(bench.device.kernels().plan(&call).unwrap_err().code(), Code::Unsupported);
}
