//! What packing promises: a layout that is true, the reader's own errors, and nothing held after them.

use super::{
    bench::{Bench, During, Given, Outcome, ensure, fail, floats},
    memory::sum_is_right,
};
use crate::{cases::drawn_weight, random::Random, subject::Subject};
use dsrun_core::{
    BlockFormat, BytesReader, Code, Error, GroupFormat, Result, WeightFormat, WeightReader, WeightType,
    kernels::WeightDesc,
};
use std::borrow::Cow;

/// A few rows, and more than a packer reads at a time.
const SHAPES: [[usize; 2]; 3] = [[1, 256], [7, 256], [1031, 256]];

fn formats(bench: &Bench) -> Vec<WeightFormat> {
    let mut formats: Vec<_> = floats(&*bench.device).into_iter().map(WeightFormat::Dense).collect();
    formats.extend([BlockFormat::Q4_0, BlockFormat::Q4_1, BlockFormat::Q8_0].map(WeightFormat::Block));
    let groups = ["int8", "int4g128"].into_iter().filter_map(GroupFormat::from_name);
    formats.extend(groups.map(WeightFormat::Group));
    formats
}

/// A packed weight has the size that was said, is counted while it lives, and its layout has a name.
pub(super) fn layouts(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for format in formats(&bench) {
        for shape in SHAPES {
            let name = format!("{format} of {} by {}", shape[0], shape[1]);
            let weight = drawn_weight(&mut Random::named(&name), format, shape, 0.1);
            let desc = WeightDesc { weight_type: weight.weight_type.clone(), immutable: true };
            let layout = match bench.device.kernels().prepack_query(&desc) {
                Ok(layout) => layout,
                Err(error) if error.code() == Code::Unsupported => continue,
                Err(error) => return fail(format!("{name}: a query for its layout fails: {error}")),
            };
            ensure(!layout.name.trim().is_empty(), || format!("{name}: the layout has no name"))?;
            bench.wait()?;
            let before = bench.device.memory().used;
            let Given::Weight(packed) = bench.pack(&weight).during(&name)? else { continue };
            bench.wait()?;
            ensure(packed.bytes() == layout.bytes, || {
                format!("{name}: {} bytes are packed, and the query said {}", packed.bytes(), layout.bytes)
            })?;
            let held = bench.device.memory().used.saturating_sub(before);
            ensure(held >= packed.bytes() as u64, || {
                format!("{name}: {} bytes are packed, and {held} more are counted", packed.bytes())
            })?;
            drop(packed);
            bench.wait()?;
            let left = bench.device.memory().used;
            ensure(left <= before, || {
                format!("{name}: {} bytes are still counted after it was freed", left - before)
            })?;
        }
    }
    Ok(())
}

/// What the reader says when it breaks.
const GONE: &str = "the file has shrunk while it was read";

/// A reader that breaks after so many reads.
struct Breaking<'a> {
    inner: BytesReader<'a>,
    reads_left: usize,
}

impl WeightReader for Breaking<'_> {
    fn weight_type(&self) -> &WeightType {
        self.inner.weight_type()
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        if self.reads_left == 0 {
            return Err(Error::new(Code::Unavailable, GONE));
        }
        self.reads_left -= 1;
        self.inner.rows(first, count)
    }
}

/// A reader that fails makes packing fail with the reader's error, and nothing is held after it.
pub(super) fn broken_readers(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for format in formats(&bench) {
        let name = format!("a weight of {format} whose reader breaks");
        let weight = drawn_weight(&mut Random::named(&name), format, SHAPES[2], 0.1);
        let desc = WeightDesc { weight_type: weight.weight_type.clone(), immutable: true };
        if bench.device.kernels().prepack_query(&desc).is_err() {
            continue;
        }
        bench.wait()?;
        let before = bench.device.memory().used;
        for reads_left in [0, 1, 3] {
            let inner = BytesReader::new(weight.weight_type.clone(), weight.bytes.as_slice())?;
            let mut reader = Breaking { inner, reads_left };
            let packed = bench.device.kernels().prepack(&mut *bench.stream, &desc, &mut reader);
            match packed {
                Err(error) => {
                    ensure(error.code() == Code::Unavailable && error.message().contains(GONE), || {
                        format!("{name}: the error is not the reader's, which is `{GONE}`: {error}")
                    })?
                }
                Ok(packed) => {
                    drop(packed);
                    ensure(reads_left > 0, || format!("{name} is packed without its rows"))?;
                }
            }
            bench.wait()?;
            let after = bench.device.memory().used;
            ensure(after <= before, || format!("{name}: {} bytes are held afterwards", after - before))?;
        }
    }
    sum_is_right(&mut bench)
}
