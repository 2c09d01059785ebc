//! Which layers the CUDA backend admits as one launch. The checks leave out those that a device does not run as a region, so a kernel
//! that refused them would not show there. No device is needed: an H200 is only asked.

use super::*;
use crate::checks::bench::floats;
use dsrun_core::{
    device::{Backend, DeviceOptions},
    kernels::Support,
    op::Op,
};
use dsrun_cpu::CpuBackend;
use dsrun_cuda::{DeviceSpec, kernel_specs};
use dsrun_test_support::AnsweringDevice;
use rstest::rstest;

const H200: DeviceSpec = DeviceSpec::usual(90, 132);

#[rstest]
#[case::plain(&SHAPES)]
#[case::other_heads(&OTHER_HEADS)]
#[case::integers(&INTEGERS)]
#[case::experts(&EXPERTS)]
#[case::experts_of_integers(&EXPERTS_OF_INTEGERS)]
#[case::bounded(&BOUNDED)]
#[case::floats(&FLOATS)]
#[case::variants(&VARIANTS)]
#[case::large_heads(&LARGE_HEADS)]
#[case::parallel(&PARALLEL)]
fn an_h200_runs_all_layers_of_the_checks_in_one_launch(#[case] shapes: &'static [Shape]) {
    let cpu = CpuBackend::new().open(0, &DeviceOptions::default()).unwrap();
    // The memory and the kernels of a CPU, but for regions, about which an H200 is asked.
    let device: Arc<dyn Device> = AnsweringDevice::open(cpu, |kernels, call| {
        if !matches!(call.op, Op::Region(_)) {
            return kernels.query(call);
        }
        let admitted = kernel_specs(call, &H200).map(|_| Support::native());
        Ok(admitted.unwrap_or_else(|error| Support::no(error.to_string())))
    });
    let mut bench = Bench::new(&device).unwrap();
    let halves = floats(&*device).into_iter().filter(|dtype| *dtype != DType::F32);
    let mut refused = Vec::new();
    for dtype in halves {
        for shape in shapes {
            let place = Place::new(&mut bench, dtype, shape).unwrap();
            let layers = Layers::new(&mut bench, dtype, shape, None, Stored::Types).unwrap();
            let (tape, results, _) = layers.tape(&mut bench, &place).unwrap();
            if let Err(stop) = tape.ask(&bench, &shape.named(dtype), &results) {
                refused.push(format!("{stop:?}"));
            }
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
}
