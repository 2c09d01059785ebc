//! The kernel sources, embedded as text. A unit is the concatenation of the common headers, the headers it names and one `.cu`
//! file: the compiler gets a single text and no include path.

/// A file: its name below `kernels/`, and its text.
struct File {
    name: &'static str,
    text: &'static str,
}

macro_rules! file {
    ($name:literal) => {
        File { name: $name, text: include_str!(concat!("../../kernels/", $name)) }
    };
}

/// The headers of every unit, in order: scalar types, generated structs that kernels of several families take, common functions.
const PRELUDE: [File; 3] = [file!("types.cuh"), file!("params.cuh"), file!("prelude.cuh")];

/// A source file, and the headers it needs after the common ones.
struct Unit {
    own: File,
    headers: &'static [File],
}

macro_rules! unit {
    ($name:literal $(, $header:literal)*) => {
        Unit { own: file!($name), headers: &[$(file!($header)),*] }
    };
}

const UNITS: &[Unit] = &[
    unit!("elementwise/add.cu", "elementwise/add_params.cuh"),
    unit!("elementwise/cast.cu", "elementwise/cast_params.cuh"),
    unit!("elementwise/gather_rows.cu", "elementwise/gather_rows_params.cuh"),
    unit!("elementwise/activation.cu", "elementwise/function.cuh", "elementwise/activation_params.cuh"),
    unit!("elementwise/embed.cu", "linear/floats.cuh", "linear/weight.cuh", "elementwise/embed_params.cuh"),
    unit!("elementwise/rope.cu", "elementwise/rope_params.cuh"),
    unit!("experts/route.cu", "experts/rule.cuh", "experts/choose.cuh", "experts/route_params.cuh"),
    unit!("experts/group.cu", "experts/group_params.cuh"),
    unit!("experts/combine.cu", "experts/combine_params.cuh"),
    unit!(
        "experts/plain.cu",
        "linear/floats.cuh",
        "linear/weight.cuh",
        "linear/dense.cuh",
        "experts/params.cuh",
        "experts/items.cuh"
    ),
    unit!(
        "experts/dense.cu",
        "mma.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/floats.cuh",
        "linear/weight.cuh",
        "experts/params.cuh",
        "experts/items.cuh",
        "experts/tile.cuh"
    ),
    unit!(
        "experts/packed.cu",
        "mma.cuh",
        "matrices.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/floats.cuh",
        "linear/weight.cuh",
        "linear/pieces.cuh",
        "linear/pairs.cuh",
        "experts/params.cuh",
        "experts/items.cuh",
        "experts/tile.cuh"
    ),
    unit!(
        "experts/packed_wgmma.cu",
        "hopper.cuh",
        "wgmma.cuh",
        "matrices.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/floats.cuh",
        "linear/weight.cuh",
        "linear/pieces.cuh",
        "linear/pairs.cuh",
        "experts/params.cuh",
        "experts/items.cuh"
    ),
    unit!(
        "experts/tiles.cu",
        "mma.cuh",
        "matrices.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/floats.cuh",
        "linear/weight.cuh",
        "linear/pieces.cuh",
        "linear/pairs.cuh",
        "experts/params.cuh",
        "experts/items.cuh"
    ),
    unit!("norm/norm.cu", "norm/norm_params.cuh"),
    unit!("cache/cache.cu", "cache/cache_params.cuh"),
    unit!(
        "collective/copy.cu",
        "collective/patience.cuh",
        "collective/exchange.cuh",
        "collective/copy_params.cuh"
    ),
    unit!(
        "collective/reduce.cu",
        "collective/patience.cuh",
        "collective/exchange.cuh",
        "collective/reduce_params.cuh",
        "collective/reduce.cuh"
    ),
    unit!(
        "collective/direct.cu",
        "collective/patience.cuh",
        "collective/exchange.cuh",
        "collective/reduce_params.cuh",
        "collective/reduce.cuh"
    ),
    unit!("copy/copy.cu"),
    unit!("step/step.cu", "step/table_params.cuh", "step/table.cuh", "step/step_params.cuh"),
    unit!(
        "sampling/logits.cu",
        "step/table_params.cuh",
        "step/table.cuh",
        "sampling/logits.cuh",
        "sampling/logits_params.cuh"
    ),
    unit!("sampling/argmax.cu", "sampling/argmax_params.cuh"),
    unit!("sampling/sample.cu", "sampling/token.cuh", "sampling/sample_params.cuh"),
    unit!(
        "sampling/next_token.cu",
        "step/table_params.cuh",
        "step/table.cuh",
        "sampling/logits.cuh",
        "sampling/token.cuh",
        "sampling/next_token_params.cuh"
    ),
    unit!("attention/attention.cu", "attention/params.cuh", "attention/attention_params.cuh"),
    unit!("attention/prompt_mma.cu", "attention/params.cuh", "attention/prompt.cuh"),
    unit!(
        "attention/prompt_wgmma.cu",
        "hopper.cuh",
        "wgmma.cuh",
        "attention/params.cuh",
        "attention/prompt_wgmma_params.cuh",
        "attention/prompt.cuh"
    ),
    unit!(
        "attention/decode.cu",
        "mma.cuh",
        "copies.cuh",
        "quant/round.cuh",
        "attention/params.cuh",
        "attention/decode_params.cuh",
        "attention/token.cuh"
    ),
    unit!(
        "attention/latent.cu",
        "mma.cuh",
        "matrices.cuh",
        "copies.cuh",
        "attention/params.cuh",
        "attention/latent_params.cuh",
        "attention/prompt.cuh"
    ),
    unit!(
        "attention/decode_even.cu",
        "mma.cuh",
        "copies.cuh",
        "attention/params.cuh",
        "attention/decode_even_params.cuh",
        "attention/token.cuh"
    ),
    unit!(
        "decoder/layers.cu",
        "mma.cuh",
        "waits.cuh",
        "linear/digits.cuh",
        "linear/floats.cuh",
        "experts/rule.cuh",
        "experts/choose.cuh",
        "collective/patience.cuh",
        "decoder/params.cuh",
        "decoder/model.cuh",
        "decoder/exchange.cuh",
        "decoder/weights.cuh",
        "decoder/packed.cuh",
        "decoder/floats.cuh",
        "decoder/together.cuh",
        "decoder/ranks.cuh",
        "decoder/stage.cuh",
        "decoder/attend.cuh"
    ),
    unit!(
        "linear/decode_gemm.cu",
        "waits.cuh",
        "mma.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/epilogue_params.cuh",
        "linear/epilogue.cuh",
        "linear/activations.cuh"
    ),
    unit!(
        "linear/batch_wgmma.cu",
        "hopper.cuh",
        "wgmma.cuh",
        "linear/narrow_wgmma.cuh",
        "elementwise/function.cuh",
        "linear/epilogue_params.cuh",
        "linear/epilogue.cuh"
    ),
    unit!(
        "linear/packed.cu",
        "mma.cuh",
        "copies.cuh",
        "elementwise/function.cuh",
        "linear/epilogue_params.cuh",
        "linear/epilogue.cuh",
        "linear/activations.cuh",
        "linear/pieces.cuh",
        "linear/digits.cuh",
        "linear/bytes.cuh",
        "linear/floats.cuh",
        "linear/pairs.cuh",
        "linear/halves.cuh"
    ),
    unit!("linear/packed_wgmma.cu", "hopper.cuh", "wgmma.cuh", "linear/narrow_wgmma.cuh"),
    unit!(
        "linear/tile_wgmma.cu",
        "hopper.cuh",
        "wgmma.cuh",
        "linear/tiles.cuh",
        "elementwise/function.cuh",
        "linear/epilogue_params.cuh",
        "linear/epilogue.cuh"
    ),
    unit!("linear/packed_plain.cu", "linear/floats.cuh", "linear/weight.cuh"),
    unit!(
        "linear/int8_wgmma.cu",
        "hopper.cuh",
        "wgmma.cuh",
        "linear/tiles.cuh",
        "elementwise/function.cuh",
        "linear/int8.cuh"
    ),
    unit!("linear/int8_mma.cu", "linear/int8.cuh"),
    unit!(
        "linear/apply_epilogue.cu",
        "elementwise/function.cuh",
        "linear/epilogue_params.cuh",
        "linear/epilogue.cuh"
    ),
    unit!("linear/heads.cu", "elementwise/function.cuh", "linear/epilogue_params.cuh", "linear/epilogue.cuh"),
    unit!("linear/skinny.cu", "linear/floats.cuh", "linear/weight.cuh", "linear/dense.cuh"),
    unit!("linear/skinny_mma.cu", "mma.cuh"),
    unit!("linear/stream.cu", "copies.cuh", "linear/floats.cuh", "linear/weight.cuh", "linear/dense.cuh"),
    unit!("linear/tiled.cu", "linear/floats.cuh", "linear/weight.cuh"),
    unit!("linear/unpack.cu", "linear/floats.cuh", "linear/weight.cuh"),
    unit!("linear/finish.cu"),
    unit!("linear/guard.cu"),
    unit!("quant/quant.cu", "elementwise/function.cuh", "quant/round.cuh", "quant/quant_params.cuh"),
];

fn find(name: &str) -> Option<&'static Unit> {
    UNITS.iter().find(|unit| unit.own.name == name)
}

/// The whole text of a unit, with `#line` directives that refer to the original files.
pub(crate) fn text(name: &str) -> Option<String> {
    let unit = find(name)?;
    let files = PRELUDE.iter().chain(unit.headers).chain([&unit.own]);
    let parts = files.map(|file| format!("#line 1 \"{}\"\n{}", file.name, file.text));
    Some(parts.collect::<Vec<_>>().join("\n"))
}

/// Whether a unit includes a header.
pub(crate) fn includes(name: &str, header: &str) -> bool {
    find(name).is_some_and(|unit| unit.headers.iter().any(|file| file.name == header))
}

/// Whether every kernel of a unit waits for its predecessor: only then may it use programmatic dependent launch.
pub(crate) fn every_kernel_waits(name: &str) -> bool {
    find(name).is_some_and(|unit| {
        let count = |text: &str| unit.own.text.matches(text).count();
        let waits = count("wait_for_predecessor();") + count("launch_dependents_and_wait();");
        waits > 0 && waits >= count("__global__")
    })
}

/// All units: name and own text.
#[cfg(test)]
pub(crate) fn units() -> impl Iterator<Item = (&'static str, &'static str)> {
    UNITS.iter().map(|unit| (unit.own.name, unit.own.text))
}
