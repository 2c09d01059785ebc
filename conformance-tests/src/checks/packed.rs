//! Packed weights that are moved: copied to the host, and read from memory that another stream fills between calls.

use super::bench::{Bench, During, Given, Outcome, Stop, ensure, floats, same_bits};
use crate::{
    cases::drawn_weight,
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    BlockFormat, DType, GroupFormat, WeightFormat,
    device::{BufferSlice, MemoryKind},
    kernels::WeightDesc,
    op::{GroupedLinear, Linear, Op, Profile},
};

/// Outputs and inputs of the weights.
const SHAPE: [usize; 2] = [48, 256];
/// Rows of the activations: a single row, and a batch.
const ROWS: [usize; 2] = [1, 9];
/// The order in which two weights are brought to the same memory.
const ORDER: [usize; 5] = [0, 1, 1, 0, 1];

/// Experts that [`SHAPE`] is divided among, and experts of a token.
const EXPERTS: [usize; 2] = [3, 2];

/// Two weights of the same description take turns in one range of device memory, to which a stream of its own copies them. Products
/// with this memory have the bits of products with the weights where they were packed.
pub(super) fn moved(subject: &Subject) -> Outcome {
    let mut formats: Vec<_> = floats(&**subject.device()).into_iter().map(WeightFormat::Dense).collect();
    formats.extend([BlockFormat::Q4_1, BlockFormat::Q8_0].map(WeightFormat::Block));
    formats.extend(groups(&["int8", "int4g128", "int4g32_f16"]));
    let moved = in_formats(subject, &formats, |bench, random, desc, packed| {
        take_turns(bench, random, desc, packed, MemoryKind::Device)
    })?;
    ensure(moved > 0, String::new).map_err(|_| Stop::Unsupported("no packed weight can be moved".into()))
}

/// The same in a range of pinned memory, which the kernels of linear layers and of experts read.
pub(super) fn pinned(subject: &Subject) -> Outcome {
    let mut formats: Vec<_> =
        floats(&**subject.device()).last().copied().map(WeightFormat::Dense).into_iter().collect();
    formats.extend(groups(&["int8", "int4g128", "mxfp4"]));
    let kernels = subject.device().clone();
    let mut read = 0;
    in_formats(subject, &formats, |bench, random, desc, packed| {
        if !kernels.kernels().prepack_query(desc)?.readable_when_pinned {
            return Ok(());
        }
        read += 1;
        take_turns(bench, random, desc, packed, MemoryKind::Pinned)
    })?;
    ensure(read > 0, String::new)
        .map_err(|_| Stop::Unsupported("no packed weight can be read in pinned memory".into()))
}

/// Formats of groups by their names.
fn groups<'a>(names: &'a [&'a str]) -> impl Iterator<Item = WeightFormat> + 'a {
    names.iter().filter_map(|name| GroupFormat::from_name(name)).map(WeightFormat::Group)
}

/// Runs a part of a check with two weights of each format that the device can move; gives the number of these.
fn in_formats(
    subject: &Subject,
    formats: &[WeightFormat],
    mut part: impl FnMut(&mut Bench, &mut Random, &WeightDesc, &[Given; 2]) -> Outcome,
) -> Result<usize, Stop> {
    let mut bench = Bench::new(subject.device())?;
    let mut moved = 0;
    for format in formats {
        let mut random = Random::named(&format!("packed/{format}"));
        let weights = [(); 2].map(|()| drawn_weight(&mut random, *format, SHAPE, 0.1));
        let desc = WeightDesc { weight_type: weights[0].weight_type.clone(), immutable: false };
        let Ok(layout) = bench.device.kernels().prepack_query(&desc) else { continue };
        if layout.relocatable {
            let packed = [bench.pack(&weights[0])?, bench.pack(&weights[1])?];
            part(&mut bench, &mut random, &desc, &packed).during(&format.to_string())?;
            moved += 1;
        }
    }
    Ok(moved)
}

/// The weights take turns in a range of memory of this kind.
fn take_turns(
    bench: &mut Bench,
    random: &mut Random,
    desc: &WeightDesc,
    packed: &[Given; 2],
    kind: MemoryKind,
) -> Outcome {
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
    let slot = BufferSlice::new(device.allocate(offset + bytes, kind)?, offset, bytes)?;
    let adopted = device.kernels().adopt(desc, &slot).during("the adoption of memory")?;
    ensure(adopted.bytes() == bytes, || {
        format!("an adopted weight has {} bytes, not {bytes}", adopted.bytes())
    })?;
    let (full, free) = (device.event()?, device.event()?);
    let mut copies = device.stream()?;
    let dtype: DType = floats(&*device)[0];
    let [experts, slots] = EXPERTS;
    let of_experts = kind == MemoryKind::Pinned && device.properties().profiles.contains(&Profile::LlmMoe1);
    for (rows, grouped) in ROWS.into_iter().flat_map(|rows| [(rows, false), (rows, true)]) {
        if grouped && !of_experts {
            continue;
        }
        let x = bench.give(&random.tensor(dtype, &[rows, SHAPE[1]], Values::Uniform))?;
        let op: Op = match grouped {
            true => GroupedLinear { dtype, count: experts as u32, first_expert: 0 }.into(),
            false => Linear { dtype }.into(),
        };
        let chosen = (0..rows * slots).map(|place| ((place / slots + place % slots) % experts) as u32);
        let chosen =
            bench.give(&Tensor { dtype: DType::I32, shape: vec![rows, slots], bits: chosen.collect() })?;
        let mut product = |weight: Given| -> Result<_, Stop> {
            let mut operands = vec![x.clone(), weight, Given::Absent];
            if grouped {
                operands.splice(2.., [chosen.clone(), Given::Absent, Given::Absent, Given::Absent]);
            }
            let plan = bench.plan(op.clone(), &operands)?;
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
            same_bits(&format!("{rows} rows of {}, turn {turn}", op.name()), &found, &expected)?;
        }
    }
    Ok(())
}
