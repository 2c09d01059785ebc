//! How far the region of whole layers and its body op by op may be apart.
//!
//! It is counted in roundings, as in [`super::super::logits`]: of the two answers each is off by as many
//! roundings in mean square as there are stored values on the longest way, and so they are apart by four times that at most.
//!
//! This holds only if layers do not enlarge relative errors. Norms and sums do not, but attention does where scores are far apart:
//! if scores differ by about `s`, a relative error `e` of a query or key changes a score by about `s e`. A weight is the exponential
//! of a score, so it changes by the share `s e` of itself, and the result of attention is off by `s² e²` in relative mean square. As
//! long as that result is a small part of the token, little of this is seen. A norm after attention makes it as large as the token,
//! and then each layer multiplies the error of the one before by `s²`. Layers with such norms therefore have scores that differ by
//! about 1 ([`Variant::score_spread`]). Many keys then share the weight, so that a key that is left out shows as well.
//!
//! A mixture of experts enlarges errors in the same way, by the spread of its router's logits, and its result may be larger than the
//! token. So logits differ by about 1 too, experts do not enlarge what they are given, and scores differ by half as much as otherwise.
//!
//! Seen in bf16 with other random numbers, over two ranks: with norms after attention and scores that differ by 4, 1 of 300 results is
//! beyond the bound, because its ops round; with scores that differ by 1, none of 900 is beyond a quarter of it. With experts it
//! was 1 of 130, where logits differed by 4 and results were several times the token; it is none of 540, the largest a quarter of it.

use super::{
    super::bench::{Outcome, ensure},
    LAYERS,
    shapes::{Shape, Variant},
};
use crate::{gate::Gate, tensor::Tensor};

/// Stored values on the longest way through a layer: two norms, a projection, the rotation, the cache, the weighted values, two
/// projections back, the gate, and two sums; with experts their weighted sum too.
const ROUNDINGS: f64 = 11.0;
const ROUNDINGS_OF_EXPERTS: f64 = 12.0;
/// Further ones of norms after attention and MLP, of norms of heads, and of the embedding that is added to itself.
const ROUNDINGS_OF_POST_NORMS: f64 = 2.0;
const ROUNDINGS_OF_HEAD_NORMS: f64 = 1.0;
const ROUNDINGS_OF_SCALE: f64 = 1.0;

/// Fails unless two answers are as near as their roundings make them.
pub(super) fn apart(what: &str, shape: &Shape, found: &Tensor, expected: &Tensor) -> Outcome {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let (found, values) = (found.values(), expected.values());
    let size = square(&mut values.iter().copied());
    let error = square(&mut found.iter().zip(&values).map(|(a, b)| a - b));
    let Variant { post_norms, head_norms, scale, .. } = shape.variant;
    let further = [
        (post_norms, ROUNDINGS_OF_POST_NORMS),
        (head_norms.is_some(), ROUNDINGS_OF_HEAD_NORMS),
        (scale.is_some(), ROUNDINGS_OF_SCALE / LAYERS as f64),
    ];
    let further: f64 = further.into_iter().filter(|(has, _)| *has).map(|(_, roundings)| roundings).sum();
    let roundings = further + if shape.experts.is_some() { ROUNDINGS_OF_EXPERTS } else { ROUNDINGS };
    let limit = 4.0 * roundings * LAYERS as f64 * Gate::default().mean_square_limit(expected.dtype);
    ensure(error <= limit * size, || {
        format!("{what}: {:.1e} apart in relative mean square, at most {limit:.1e}", error / size)
    })
}
