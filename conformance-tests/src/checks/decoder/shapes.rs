//! What the layers of the decoder checks are made of.

use crate::cases::NormSpan;
use dsrun_core::{
    DType,
    op::{Nonlinearity, RopePairing},
};

/// What layers are made of.
pub(super) struct Shape {
    pub(super) name: &'static str,
    /// RMS norms, rotary positions and a gated MLP without biases; else layer norms, a plain MLP, and biases.
    pub(super) llama: bool,
    pub(super) kv_heads: usize,
    /// Query heads of each.
    pub(super) group: usize,
    /// Elements of a head.
    pub(super) size: usize,
    pub(super) hidden: usize,
    pub(super) inner: usize,
    /// The name of the format of weights; none: dense, as activations.
    pub(super) format: Option<&'static str>,
    /// Whether a token's own key has nearly all the weight, and those before it large values, so that even the few of them that a
    /// device may take together with it come to as much.
    pub(super) small_weights: bool,
    /// Whether the token comes from a table, where there are biases with what a second one has for its position; else it is there.
    pub(super) embeds: bool,
    /// If the MLP is a mixture of experts, how many there are and how many a token has.
    pub(super) experts: Option<[usize; 2]>,
    /// Whether the MLP has that format alone, and the products of attention are dense.
    pub(super) dense_attention: bool,
    /// Whether heads have sinks, products of attention, the router and experts have biases, and the activation has a bound, and an
    /// offset of its second half.
    pub(super) bounded: bool,
    /// What the layer has besides, or instead.
    pub(super) variant: Variant,
}

pub(super) const SHAPES: [Shape; 6] = [
    shape("grouped heads of 64", true, [2, 4, 64], [256, 512]).embedding(),
    shape("grouped heads of 128", true, [2, 2, 128], [512, 384]),
    shape("heads of 64 with keys of their own", false, [4, 1, 64], [256, 256]).embedding(),
    shape("heads of 128 with keys of their own", false, [2, 1, 128], [384, 512]).embedding(),
    shape("groups of 16 heads", true, [1, 16, 32], [128, 512]),
    shape("small weights on large values", false, [4, 1, 64], [256, 256]).with_small_weights(),
];

/// Heads of sizes that are no power of two, many of a large one, and long rows.
pub(super) const OTHER_HEADS: [Shape; 7] = [
    shape("grouped heads of 80", true, [2, 2, 80], [256, 512]),
    shape("heads of 80 with keys of their own", false, [4, 1, 80], [256, 256]),
    shape("grouped heads of 96", false, [2, 3, 96], [384, 512]),
    shape("heads of 96 with keys of their own", true, [2, 1, 96], [256, 384]),
    shape("groups of 16 heads of 128", true, [1, 16, 128], [128, 512]),
    shape("tokens of 5120 elements", false, [1, 1, 128], [5120, 128]),
    shape("an MLP of 20480 elements", false, [1, 1, 128], [128, 20_480]),
];

pub(super) const INTEGERS: [Shape; 7] = [
    shape("grouped heads of 64", true, [2, 4, 64], [256, 8192]).of("int4g128_f16"),
    shape("heads of 64 with keys of their own", false, [4, 1, 64], [256, 768]).of("int8"),
    shape("grouped heads of 128", true, [2, 4, 128], [256, 5632]).of("int4g128_f16"),
    shape("grouped heads of 128", true, [2, 4, 128], [256, 4608]).of("int8"),
    shape("rows of integers that are no whole steps", true, [2, 7, 64], [384, 5504]).of("int4g128_f16"),
    shape("rows of integers that are no whole steps", false, [3, 1, 128], [640, 896]).of("int8").embedding(),
    shape("a row of integers of one span", true, [1, 2, 64], [128, 128]).of("int4g128"),
];

/// Mixtures of experts. Which experts a token has must not hang on a rounding: it has all of them, in an order of its own, or a selection
/// bias decides, and its weights are still its own.
pub(super) const EXPERTS: [Shape; 4] = [
    shape("all of 8 experts", true, [2, 4, 64], [256, 128]).of_experts(8, 8),
    shape("2 of 16 experts", true, [2, 2, 128], [512, 384]).of_experts(16, 2).embedding(),
    shape("3 of 40 experts", true, [4, 1, 64], [384, 64]).of_experts(40, 3),
    shape("one of 8 large experts", true, [1, 2, 64], [128, 14_336]).of_experts(8, 1),
];

/// Experts of several slots, and slots of several experts, of which the last may have fewer.
pub(super) const EXPERTS_OF_INTEGERS: [Shape; 6] = [
    shape("5 of 8 experts", true, [2, 4, 64], [256, 1024]).of("int4g128_f16").of_experts(8, 5),
    shape("2 of 16 experts", true, [2, 2, 128], [512, 768]).of("int4g128").of_experts(16, 2).embedding(),
    shape("one of 8 large experts", true, [2, 2, 64], [256, 14_336]).of("int4g128_f16").of_experts(8, 1),
    shape("5 of 8 experts", true, [2, 2, 128], [256, 1024]).of("int8").of_experts(8, 5),
    shape("2 of 16 experts", true, [2, 2, 128], [512, 768]).of("int8_f16").of_experts(16, 2).embedding(),
    shape("one of 8 large experts", true, [2, 2, 64], [256, 14_336]).of("int8").of_experts(8, 1),
];

/// Layers as gpt-oss has them, whose rows are no whole steps of a warp.
pub(super) const BOUNDED: [Shape; 4] = [
    shape("all of 8 experts with biases", true, [2, 4, 64], [448, 352])
        .of("mxfp4")
        .of_experts(8, 8)
        .bounded(),
    shape("2 of 16 experts with biases", true, [1, 8, 64], [320, 1440])
        .of("mxfp4")
        .of_experts(16, 2)
        .bounded()
        .embedding(),
    shape("3 of 8 dense experts with biases", true, [2, 4, 64], [256, 128]).of_experts(8, 3).bounded(),
    Shape {
        dense_attention: false,
        ..shape("experts of integers with biases", true, [2, 2, 64], [256, 256])
            .of("int4g128_f16")
            .of_experts(8, 8)
            .bounded()
    },
];

/// Floats of 4 bits, in rows of one slot and of several, and in slots of several experts, of which the last has fewer.
pub(super) const FLOATS: [Shape; 4] = [
    shape("one of 8 large experts with biases", true, [2, 2, 128], [256, 14_336])
        .of("mxfp4")
        .of_experts(8, 1)
        .bounded(),
    shape("5 of 8 experts", true, [2, 2, 128], [256, 1056]).of("mxfp4").of_experts(8, 5),
    shape("an MLP of floats", true, [2, 4, 64], [256, 8192]).of("mxfp4"),
    shape("rows of floats with padding", true, [2, 2, 128], [4512, 1056]).of("mxfp4"),
];

/// What ranks have of layers that they share: of each kind of norm, of weights, and of MLP.
pub(super) const OVER_RANKS: [Shape; 6] = [
    shape("grouped heads of 128", true, [2, 2, 128], [512, 384]),
    shape("heads of 64 with keys of their own", false, [4, 1, 64], [256, 256]),
    shape("tokens of 5120 elements", true, [1, 1, 128], [5120, 128]),
    shape("norms after attention and MLP", true, [2, 4, 64], [256, 512])
        .with(Variant { scale: None, ..GEMMA }),
    shape("grouped heads of 64", true, [2, 4, 64], [256, 512]).of("int4g128_f16"),
    shape("all of 8 experts", true, [2, 4, 64], [256, 128]).of_experts(8, 8),
];

const fn shape(name: &'static str, llama: bool, heads: [usize; 3], sizes: [usize; 2]) -> Shape {
    let ([kv_heads, group, size], [hidden, inner]) = (heads, sizes);
    Shape {
        name,
        llama,
        kv_heads,
        group,
        size,
        hidden,
        inner,
        format: None,
        small_weights: false,
        embeds: false,
        experts: None,
        dense_attention: false,
        bounded: false,
        variant: PLAIN,
    }
}

/// What families of models do differently, in layers with RMS norms. Layers have two kinds of attention in turn.
#[derive(Clone, Copy)]
pub(super) struct Variant {
    /// Whether norms precede attention and MLP.
    pub(super) pre_norms: bool,
    /// Whether the results of attention and MLP are normalised before they are added.
    pub(super) post_norms: bool,
    /// What the norms of queries and keys cover, if they have any.
    pub(super) head_norms: Option<NormSpan>,
    /// Added to the weights of norms.
    pub(super) weight_offset: f32,
    /// The window of each kind of attention; 0 for none.
    pub(super) windows: [u32; 2],
    /// The base of the rotary embedding of each kind; none where heads are not rotated.
    pub(super) bases: [Option<f64>; 2],
    /// Which elements of a head are rotated with each other, and one of how many is: the first ones.
    pub(super) pairing: RopePairing,
    pub(super) rotates_one_of: usize,
    /// Whether the MLP is beside attention: its norm takes the token in front of the layer, and both results are added to that at once.
    pub(super) parallel: bool,
    /// Whether it then takes what the norm of attention gives, instead of having a norm of its own.
    pub(super) shares_norm: bool,
    pub(super) softcap: f32,
    /// What scores are divided by, besides the square root of the size of a head. With norms after attention, and with experts, it is
    /// about how far apart they would be otherwise: the product of the sizes of an element of a query and of a key.
    pub(super) score_spread: f32,
    /// The factor with which the embedding is added to itself.
    pub(super) scale: Option<f32>,
    /// The activation of the gated MLP.
    pub(super) function: Nonlinearity,
}

/// Layers of one kind, as Llama has them.
const PLAIN: Variant = Variant {
    pre_norms: true,
    post_norms: false,
    head_norms: None,
    weight_offset: 0.0,
    windows: [0; 2],
    bases: [Some(10_000.0); 2],
    pairing: RopePairing::Halves,
    rotates_one_of: 1,
    parallel: false,
    shares_norm: false,
    softcap: 0.0,
    score_spread: 1.0,
    scale: None,
    function: Nonlinearity::Silu,
};

/// As Gemma 3 has them. The weights of norms are about 2, offset included, and so are the elements of normalised queries and keys.
const GEMMA: Variant = Variant {
    post_norms: true,
    head_norms: Some(NormSpan::EachHead),
    weight_offset: 1.0,
    windows: [40, 0],
    bases: [Some(10_000.0), Some(1_000_000.0)],
    score_spread: 4.0,
    scale: Some(15.0),
    function: Nonlinearity::GeluTanh,
    ..PLAIN
};

/// As OLMo 2 has them.
const OLMO: Variant =
    Variant { pre_norms: false, post_norms: true, head_norms: Some(NormSpan::AllHeads), ..PLAIN };

/// Norms after attention and MLP, two kinds of attention, and norms over all heads, as OLMo 2 has them.
pub(super) const VARIANTS: [Shape; 7] = [
    shape("two kinds of attention", true, [1, 3, 64], [192, 512]).with(GEMMA).embedding(),
    shape("norms after attention and MLP alone", true, [2, 4, 64], [256, 512]).with(Variant {
        pre_norms: false,
        weight_offset: 0.0,
        windows: [100, 0],
        bases: [Some(10_000.0), None],
        // The weights of norms are about 1.
        score_spread: 1.0,
        ..GEMMA
    }),
    shape("a window", true, [2, 2, 128], [256, 384]).with(Variant { windows: [33; 2], ..PLAIN }),
    shape("norms over all heads", true, [4, 1, 128], [512, 384]).with(OLMO),
    shape("norms over all grouped heads", true, [8, 5, 64], [256, 512]).with(OLMO),
    shape("experts, and norms over all heads", true, [2, 4, 64], [256, 128])
        .with(Variant { pre_norms: true, post_norms: false, ..OLMO })
        .of_experts(8, 8),
    shape("norms after products by integers", true, [2, 2, 128], [512, 768]).of("int4g128_f16").with(GEMMA),
];

/// An MLP beside attention, as GPT-NeoX has it, or Command R with one norm for both; and rotated pairs that are neighbours, as GLM-4 has
/// them.
pub(super) const PARALLEL: [Shape; 6] = [
    shape("an MLP beside attention", true, [2, 4, 64], [256, 512]).with(BESIDE).embedding(),
    shape("a plain MLP beside attention", false, [2, 1, 128], [384, 512]).with(BESIDE).embedding(),
    shape("one norm for attention and MLP", true, [2, 4, 64], [256, 512]).with(Variant {
        shares_norm: true,
        parallel: true,
        ..NEIGHBOURS
    }),
    shape("pairs of neighbours", true, [2, 2, 128], [512, 384]).with(NEIGHBOURS),
    shape("pairs of neighbours in a part of a head", true, [1, 16, 64], [128, 512])
        .with(Variant { rotates_one_of: 2, ..NEIGHBOURS }),
    shape("an MLP of integers beside attention", true, [2, 4, 128], [256, 5632])
        .of("int4g128_f16")
        .with(Variant { parallel: true, ..NEIGHBOURS }),
];

const BESIDE: Variant = Variant { parallel: true, ..PLAIN };
const NEIGHBOURS: Variant = Variant { pairing: RopePairing::Neighbours, ..PLAIN };

/// Heads whose keys and values registers do not hold together.
pub(super) const LARGE_HEADS: [Shape; 4] = [
    shape("two kinds of attention with heads of 256", true, [2, 2, 256], [512, 384]).with(GEMMA),
    shape("soft caps", true, [2, 1, 256], [256, 512])
        // Queries and keys are not normalised, and about 3 in size.
        .with(Variant { head_norms: None, softcap: 1.0, score_spread: 8.0, windows: [17, 0], ..GEMMA })
        .embedding(),
    shape("groups of 16 heads of 256", true, [1, 16, 256], [128, 512]),
    shape("heads of 192 with keys of their own", false, [2, 1, 192], [384, 512]).embedding(),
];

impl Shape {
    /// The same with weights of a format.
    const fn of(self, format: &'static str) -> Self {
        Self { format: Some(format), ..self }
    }

    /// The same with weights of attention that are small.
    const fn with_small_weights(self) -> Self {
        Self { small_weights: true, ..self }
    }

    /// The same with so many experts, of which a token has `chosen`. Their result may be larger than the token, as if it had a norm.
    const fn of_experts(self, count: usize, chosen: usize) -> Self {
        let variant = Variant { score_spread: 2.0, ..self.variant };
        Self { experts: Some([count, chosen]), variant, ..self }
    }

    /// The same as gpt-oss has them: every second layer has a window.
    const fn bounded(self) -> Self {
        let variant = Variant { windows: [40, 0], function: Nonlinearity::QuickGelu, ..self.variant };
        Self { bounded: true, dense_attention: true, variant, ..self }
    }

    /// The same in another variant.
    const fn with(self, variant: Variant) -> Self {
        Self { variant, ..self }
    }

    /// The same, whose token comes from a table.
    const fn embedding(self) -> Self {
        Self { embeds: true, ..self }
    }

    /// What it is called with activations of a type.
    pub(super) fn named(&self, dtype: DType) -> String {
        format!(
            "{}, {dtype}{}",
            self.name,
            self.format.map(|format| format!(" by {format}")).unwrap_or_default()
        )
    }
}
