//! From logits to tokens.
//!
//! Sampling parameters are a state, `parameters[C, 8]` in f32: one row per running request, with the columns of
//! [`SamplingColumn`]. A request's parameters are uploaded once, and a captured step serves every mix of requests.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{
    DType, Result,
    tensor::{Size, TensorType},
};

choice! {
    /// A column of the sampling parameters.
    SamplingColumn {
        /// The divisor of logits; 0 means greedy: the largest logit.
        Temperature = 0 "temperature",
        /// The number of largest logits to keep, a whole number; 0 means all.
        TopK = 1 "top_k",
        /// Keep the most probable tokens until their probabilities sum to this; 1 means all.
        TopP = 2 "top_p",
        /// Keep tokens with at least this probability relative to the most probable one; 0 means all.
        MinP = 3 "min_p",
        /// The divisor of positive and factor of negative logits of tokens already seen; 1 means no penalty.
        RepetitionPenalty = 4 "repetition_penalty",
        /// The amount subtracted once from logits of tokens already generated.
        PresencePenalty = 5 "presence_penalty",
        /// The amount subtracted from logits for each time the token was generated.
        FrequencyPenalty = 6 "frequency_penalty",
    }
}

/// The number of columns of the sampling parameters; the last is reserved and 0.
pub const SAMPLING_COLUMNS: usize = 8;

attributes! {
    /// Applies penalties, bias and mask to logits.
    ///
    /// For row `r` of request `c = requests[r]`, with `n` the count of token `v` (see [`super::IN_PROMPT`]):
    /// `x = logits[r, v]`; if the token was seen, in the prompt or generated, `x = x / p` for `x > 0` and `x = x * p`
    /// otherwise, with the repetition penalty `p`; then `x -= frequency * n`, `x -= presence` if `n > 0`, and
    /// `x += bias[c, v]`; where the mask bit is 0, `x` is minus infinity.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `logits` | float `[R, V]` | |
    /// | `requests` | i32 `[R]` | -1 skips the row: it is not written |
    /// | `parameters` | f32 `[C, 8]` | |
    /// | `counts` | i32 `[C, V]` | |
    /// | `bias` | f32 `[C, V]`, optional | |
    /// | `mask` | u32 `[R, ceil(V / 32)]`, optional | bit `v % 32` of word `v / 32`: token `v` is allowed |
    /// | → `y` | f32 `[R, V]` | |
    ///
    /// Computed in f32.
    LogitProcess {}
}

impl Operation for LogitProcess {
    const SIGNATURE: &'static Signature = &Signature {
        name: "logit_process",
        profile: Profile::LlmCore1,
        summary: "repetition, presence and frequency penalties, bias and mask on logits",
        operands: &[
            operand("logits", OperandKind::Float),
            operand("requests", OperandKind::I32),
            operand("parameters", OperandKind::F32),
            operand("counts", OperandKind::I32),
            optional("bias", OperandKind::F32),
            optional("mask", OperandKind::U32),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let logits = operands.tensor("logits")?;
        let [rows, vocabulary] = logits.sizes()?;
        operands.tensor("requests")?.expect_shape([rows], "rows of logits")?;
        let parameters = operands.tensor("parameters")?;
        let [capacity, _] = parameters.sizes()?;
        parameters.expect(1, &SAMPLING_COLUMNS.into(), "sampling columns")?;
        operands.tensor("counts")?.expect_shape([capacity, vocabulary], "requests times vocabulary")?;
        if let Some(bias) = operands.optional("bias") {
            bias.expect_shape([capacity, vocabulary], "requests times vocabulary")?;
        }
        if let Some(mask) = operands.optional("mask") {
            let words: Size = logits.known(1)?.div_ceil(32).into();
            mask.expect_shape([rows, &words], "a bit per token")?;
        }
        Ok(vec![TensorType { dtype: DType::F32, shape: vec![rows.clone(), vocabulary.clone()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, vocabulary] = operands.tensor("logits")?.sizes()?;
        let bias =
            if operands.optional("bias").is_some() { &[Axis::Gathered, Axis::Of(&[1])] } else { ABSENT };
        let mask =
            if operands.optional("mask").is_some() { &[Axis::Of(&[0]), Axis::Gathered] } else { ABSENT };
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("vocabulary", Parallel, vocabulary.clone())],
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1])],
                &[Axis::Of(&[0])],
                &[Axis::Gathered, Axis::Gathered],
                &[Axis::Gathered, Axis::Of(&[1])],
                bias,
                mask,
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
        ))
    }
}

attributes! {
    /// Finds the index of the largest element of each row, the lowest on ties.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[R, V]` | NaN counts as minus infinity |
    /// | → `ids` | i32 `[R]` | -1 if the row is empty or all NaN |
    ///
    /// Exact.
    Argmax {}
}

impl Operation for Argmax {
    const SIGNATURE: &'static Signature = &Signature {
        name: "argmax",
        profile: Profile::LlmCore1,
        summary: "index of the largest element of each row, the lowest on ties",
        operands: &[operand("x", OperandKind::Float)],
        results: &[result("ids")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        Ok(vec![TensorType { dtype: DType::I32, shape: vec![rows.clone()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, vocabulary] = operands.tensor("x")?.sizes()?;
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("vocabulary", Reduced, vocabulary.clone())],
            &[&[Axis::Of(&[0]), Axis::Of(&[1])]],
            &[&[Axis::Of(&[0])]],
        ))
    }
}

attributes! {
    /// Draws one token per row, by Gumbel-max over the tokens that the filters leave.
    ///
    /// For row `r` of request `c = requests[r]`, with temperature `t`, and ties broken towards the lower id throughout:
    ///
    /// 1. `t = 0`: the token of the largest logit (as [`Argmax`], but never one of minus infinity).
    /// 2. Otherwise `x = logits / t`. Keep the `top_k` largest; `p = softmax` over them; keep the most probable until
    ///    their sum reaches `top_p` (including the token that reaches it, so at least one); keep those with `p >= min_p * max(p)`.
    /// 3. The token is the argmax of `x + g` over the tokens left, `g = -ln(-ln(1 - v))`, with `v = (w + 0.5) / 2^32` and `w`
    ///    the first word of Philox4x32-10 with key `seeds[c]` and counter `(token, positions[r], 0, 0)`. (`ln_1p(-v)`
    ///    keeps the rare large `g` exact in f32, where `v` is held to at most `1 - 2^-24`.)
    ///
    /// The draw depends on seed, position and token only, and not on the order of rows, on shards or on the batch.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `logits` | f32 `[R, V]` | NaN and minus infinity are never drawn |
    /// | `requests` | i32 `[R]` | -1 skips the row: its result is -1 |
    /// | `positions` | i32 `[R]` | the position of the drawn token |
    /// | `parameters` | f32 `[C, 8]` | |
    /// | `seeds` | u32 `[C, 2]` | |
    /// | → `ids` | i32 `[R]` | -1 if no token is left |
    /// | → `log_probability` | f32 `[R]` | `ln softmax(logits)[id]` of `logits`, without temperature and filters; 0 if the id is -1 |
    ///
    /// Sources: Gumbel (1954), Maddison et al., "A* Sampling" (2014); Salmon et al., "Parallel random numbers: as easy as
    /// 1, 2, 3" (2011).
    Sample {}
}

impl Operation for Sample {
    const SIGNATURE: &'static Signature = &Signature {
        name: "sample",
        profile: Profile::LlmCore1,
        summary: "temperature, top-k, top-p, min-p, then Gumbel-max keyed by seed, position and token",
        operands: &[
            operand("logits", OperandKind::F32),
            operand("requests", OperandKind::I32),
            operand("positions", OperandKind::I32),
            operand("parameters", OperandKind::F32),
            operand("seeds", OperandKind::U32),
        ],
        results: &[result("ids"), result("log_probability")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [rows, _] = operands.tensor("logits")?.sizes()?;
        for name in ["requests", "positions"] {
            operands.tensor(name)?.expect_shape([rows], "rows of logits")?;
        }
        let parameters = operands.tensor("parameters")?;
        let [capacity, _] = parameters.sizes()?;
        parameters.expect(1, &SAMPLING_COLUMNS.into(), "sampling columns")?;
        operands.tensor("seeds")?.expect_shape([capacity, &2.into()], "two words per request")?;
        Ok([DType::I32, DType::F32].map(|dtype| TensorType { dtype, shape: vec![rows.clone()] }).into())
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, vocabulary] = operands.tensor("logits")?.sizes()?;
        Ok(IndexMaps::new(
            [("rows", Parallel, rows.clone()), ("vocabulary", Reduced, vocabulary.clone())],
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1])],
                &[Axis::Of(&[0])],
                &[Axis::Of(&[0])],
                &[Axis::Gathered, Axis::Gathered],
                &[Axis::Gathered, Axis::Gathered],
            ],
            &[&[Axis::Of(&[0])], &[Axis::Of(&[0])]],
        ))
    }
}
