//! Which layers the CUDA backend admits as one launch. The checks leave out those that a device does not run as a region, so a kernel
//! that refused them would not show there. No device is needed: an H200 is only asked.

use super::*;
use crate::checks::bench::floats;
use dsrun_core::{
    Error, Result, WeightReader,
    checked::ValidCall,
    device::{Backend, Buffer, DeviceOptions, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
    op::Op,
};
use dsrun_cpu::CpuBackend;
use dsrun_cuda::{DeviceSpec, kernel_specs};
use rstest::rstest;

const H200: DeviceSpec =
    DeviceSpec { capability: 90, sm_count: 132, blas: true, custom_gemm: true, shared: false };

/// The memory and the kernels of a CPU, but for regions, about which an H200 is asked.
#[derive(Debug)]
struct Asked(Arc<dyn Device>);

impl Device for Asked {
    fn properties(&self) -> &DeviceProperties {
        self.0.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.0.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.0.allocate(bytes, kind)
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
}

impl Kernels for Asked {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        if !matches!(call.op, Op::Region(_)) {
            return self.0.kernels().query(call);
        }
        let admitted = kernel_specs(call, &H200).map(|_| Support::native());
        Ok(admitted.unwrap_or_else(|error: Error| Support::no(error.to_string())))
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.0.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        reader: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.0.kernels().prepack(stream, weight, reader)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        self.0.kernels().plan(call)
    }
}

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
    let device: Arc<dyn Device> = Arc::new(Asked(cpu));
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
