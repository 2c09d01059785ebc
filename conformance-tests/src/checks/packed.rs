//! Packed weights that are moved: copied to the host, and read from memory that another stream fills between calls.

use super::bench::{Bench, During, Given, Outcome, Stop, ensure, floats, same_bits};
use crate::{
    cases::drawn_weight,
    random::{Random, Values},
    subject::Subject,
};
use dsrun_core::{
    BlockFormat, DType, GroupFormat, WeightFormat,
    device::{BufferSlice, MemoryKind},
    kernels::WeightDesc,
    op::Linear,
};

/// Outputs and inputs of the weights.
const SHAPE: [usize; 2] = [48, 256];
/// Rows of the activations: a single row, and a batch.
const ROWS: [usize; 2] = [1, 9];
/// The order in which two weights are brought to the same memory.
const ORDER: [usize; 5] = [0, 1, 1, 0, 1];

/// Two weights of the same description take turns in one range of device memory, to which a stream of its own copies them. Products
/// with this memory have the bits of products with the weights where they were packed.
pub(super) fn moved(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let mut formats: Vec<_> = floats(&*bench.device).into_iter().map(WeightFormat::Dense).collect();
    formats.extend([BlockFormat::Q4_1, BlockFormat::Q8_0].map(WeightFormat::Block));
    let groups = ["int8", "int4g128", "int4g32_f16"].into_iter().filter_map(GroupFormat::from_name);
    formats.extend(groups.map(WeightFormat::Group));
    let mut moved = 0;
    for format in formats {
        let mut random = Random::named(&format!("packed/{format}"));
        let weights = [(); 2].map(|()| drawn_weight(&mut random, format, SHAPE, 0.1));
        let desc = WeightDesc { weight_type: weights[0].weight_type.clone(), immutable: false };
        let Ok(layout) = bench.device.kernels().prepack_query(&desc) else { continue };
        if layout.relocatable {
            let packed = [bench.pack(&weights[0])?, bench.pack(&weights[1])?];
            take_turns(&mut bench, &mut random, &desc, &packed).during(&format.to_string())?;
            moved += 1;
        }
    }
    ensure(moved > 0, String::new).map_err(|_| Stop::Unsupported("no packed weight can be moved".into()))
}

fn take_turns(bench: &mut Bench, random: &mut Random, desc: &WeightDesc, packed: &[Given; 2]) -> Outcome {
    let device = bench.device.clone();
    let bytes = device.kernels().prepack_query(desc)?.bytes;
    let mut images = Vec::new();
    for weight in packed {
        let Given::Weight(weight) = weight else { continue };
        let image = BufferSlice::whole(device.allocate(bytes, MemoryKind::Pinned)?);
        device.kernels().copy_packed(&mut *bench.stream, weight, &image).during("the copy to the host")?;
        images.push(image);
    }
    bench.wait()?;
    // The range does not begin where its buffer begins.
    let offset = device.properties().alignment.max(64) * 3;
    let slot = BufferSlice::new(device.allocate(offset + bytes, MemoryKind::Device)?, offset, bytes)?;
    let adopted = device.kernels().adopt(desc, &slot).during("the adoption of memory")?;
    ensure(adopted.bytes() == bytes, || {
        format!("an adopted weight has {} bytes, not {bytes}", adopted.bytes())
    })?;
    let (full, free) = (device.event()?, device.event()?);
    let mut copies = device.stream()?;
    let dtype: DType = floats(&*device)[0];
    for rows in ROWS {
        let x = bench.give(&random.tensor(dtype, &[rows, SHAPE[1]], Values::Uniform))?;
        let mut product = |weight: Given| -> Result<_, Stop> {
            let operands = [x.clone(), weight, Given::Absent];
            let plan = bench.plan(Linear { dtype }, &operands)?;
            bench.bind(&plan, &operands)
        };
        let resident = [product(packed[0].clone())?, product(packed[1].clone())?];
        let shared = product(Given::Weight(adopted.clone()))?;
        for (turn, index) in ORDER.into_iter().enumerate() {
            copies.wait(&*free)?;
            copies.copy(&images[index], &slot)?;
            copies.record(&*full)?;
            bench.stream.wait(&*full)?;
            bench.enqueue(&shared)?;
            bench.stream.record(&*free)?;
            bench.enqueue(&resident[index])?;
            let found = bench.get(&shared.results[0])?;
            let expected = bench.get(&resident[index].results[0])?;
            same_bits(&format!("{rows} rows, turn {turn}"), &found, &expected)?;
        }
    }
    Ok(())
}
