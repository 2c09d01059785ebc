//! The kernel sources, embedded as text. A unit is the prelude, the headers it names and one `.cu` file, put together here:
//! the compiler is given one text and no folder to look in.

/// What every kernel may use.
const PRELUDE: &str = include_str!("../kernels/prelude.cuh");

/// A source file: its name below `kernels/`, its text, and the headers it needs behind the prelude.
struct Unit {
    name: &'static str,
    text: &'static str,
    headers: &'static [&'static str],
}

macro_rules! unit {
    ($name:literal $(, $header:literal)*) => {
        Unit {
            name: $name,
            text: include_str!(concat!("../kernels/", $name)),
            headers: &[$(include_str!(concat!("../kernels/", $header))),*],
        }
    };
}

const UNITS: &[Unit] = &[
    unit!("elementwise/elementwise.cu"),
    unit!("elementwise/activation.cu", "elementwise/function.cuh"),
    unit!("elementwise/embed.cu", "linear/weight.cuh"),
    unit!("elementwise/rope.cu"),
    unit!("norm/norm.cu"),
    unit!("cache/cache.cu"),
    unit!("copy/copy.cu"),
    unit!("step/step.cu"),
    unit!("sampling/logits.cu"),
    unit!("sampling/argmax.cu"),
    unit!("sampling/sample.cu"),
    unit!("attention/attention.cu"),
    unit!("attention/prompt_mma.cu", "attention/prompt.cuh"),
    unit!("attention/prompt_wgmma.cu", "hopper.cuh", "attention/prompt.cuh"),
    unit!("attention/decode.cu"),
    unit!(
        "decoder/layers.cu",
        "decoder/model.cuh",
        "decoder/exchange.cuh",
        "decoder/weights.cuh",
        "decoder/stage.cuh",
        "decoder/attend.cuh"
    ),
    unit!("linear/band.cu", "elementwise/function.cuh", "linear/epilogue.cuh", "linear/activations.cuh"),
    unit!(
        "linear/batch_wgmma.cu",
        "hopper.cuh",
        "linear/narrow_wgmma.cuh",
        "elementwise/function.cuh",
        "linear/epilogue.cuh"
    ),
    unit!(
        "linear/packed.cu",
        "elementwise/function.cuh",
        "linear/epilogue.cuh",
        "linear/activations.cuh",
        "linear/pieces.cuh",
        "linear/bytes.cuh",
        "linear/halves.cuh"
    ),
    unit!("linear/packed_wgmma.cu", "hopper.cuh", "linear/narrow_wgmma.cuh"),
    unit!(
        "linear/tile_wgmma.cu",
        "hopper.cuh",
        "linear/tiles.cuh",
        "elementwise/function.cuh",
        "linear/epilogue.cuh"
    ),
    unit!("linear/packed_plain.cu", "linear/weight.cuh"),
    unit!("linear/int8_wgmma.cu", "hopper.cuh", "linear/tiles.cuh", "linear/int8.cuh"),
    unit!("linear/int8_mma.cu", "linear/int8.cuh"),
    unit!("linear/conclude.cu", "elementwise/function.cuh", "linear/epilogue.cuh"),
    unit!("linear/heads.cu", "elementwise/function.cuh", "linear/epilogue.cuh"),
    unit!("linear/skinny.cu", "linear/weight.cuh"),
    unit!("linear/skinny_mma.cu"),
    unit!("linear/stream.cu", "linear/weight.cuh"),
    unit!("linear/tiled.cu", "linear/weight.cuh"),
    unit!("linear/matmul.cu"),
    unit!("linear/unpack.cu", "linear/weight.cuh"),
    unit!("linear/finish.cu"),
    unit!("linear/guard.cu"),
    unit!("quant/quant.cu", "elementwise/function.cuh"),
];

/// The whole text of a unit.
pub(crate) fn text(name: &str) -> Option<String> {
    let unit = UNITS.iter().find(|unit| unit.name == name)?;
    let parts = [PRELUDE].into_iter().chain(unit.headers.iter().copied()).chain([unit.text]);
    Some(parts.collect::<Vec<_>>().join("\n"))
}

/// Whether every kernel of a unit waits for the kernels in front of it: only then may it start before they have finished.
pub(crate) fn every_kernel_waits(name: &str) -> bool {
    UNITS.iter().find(|unit| unit.name == name).is_some_and(|unit| {
        let count = |text: &str| unit.text.matches(text).count();
        let waits = count("take_turn();") + count("await_previous();");
        waits > 0 && waits >= count("__global__")
    })
}

/// All units: name and own text.
#[cfg(test)]
pub(crate) fn units() -> impl Iterator<Item = (&'static str, &'static str)> {
    UNITS.iter().map(|unit| (unit.name, unit.text))
}
