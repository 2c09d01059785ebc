//! The request table, which holds the device state of every running request, and the ops that read and advance it.
//!
//! The table is a set of states with one row per running request (`C` rows). The host uploads only changed rows and, for each
//! step, the requests in it with their token counts; the device derives all other inputs of the step. Therefore step `n + 1`
//! can be launched before the host has seen the tokens of step `n`.

use super::{
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    signature::{operand, result, updated},
};
use crate::{DType, Error, Result, tensor::TensorType};

/// The bit in a request's count of a token that says that its prompt contains the token. The lower bits count how often the
/// token was generated.
pub const IN_PROMPT: i32 = 1 << 30;

attributes! {
    /// Derives a step's inputs from the request table and the step's plan, and advances the table.
    ///
    /// Sequence `s` of the step is request `c = step_request[s]`. If `step_source[s] >= 0` the sequence has the `step_length[s]`
    /// prompt tokens `prompt_ids[step_source[s] ..]`; if it is -1, the one token that the request generated last. The tokens of
    /// the step are those of its sequences in order.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `step_request` | i32 `[S]` | row of the request table; -1 is a padded sequence |
    /// | `step_length` | i32 `[S]` | its number of tokens; 1 for a generated token |
    /// | `step_source` | i32 `[S]` | the index in `prompt_ids` at which they start, or -1 |
    /// | `prompt_ids` | i32 `[T]` | the prompt tokens of this step |
    /// | `rows` | i32 `[R]` | the rows of the step whose logits are computed; -1 skips |
    /// | `block_table` | i32 `[C, N]` | the pages of each request; -1 after the last |
    /// | `last_token` | i32 `[C]` | the token generated last |
    /// | `finished` | i32 `[C]` | not 0 if the request is done: it has no more tokens |
    /// | `length` | i32 `[C]` | tokens in the KV cache; updated: grows by the new tokens |
    /// | `counts` | i32 `[C, V]` | updated: [`IN_PROMPT`] is set for the prompt tokens of the step |
    /// | → `ids` | i32 `[T]` | -1 after the last token |
    /// | → `positions` | i32 `[T]` | -1 after the last token |
    /// | → `slots` | i32 `[T]` | the slots for keys and values; -1 without a page |
    /// | → `query_start`, `query_length`, `kv_length` | i32 `[S]` | lengths are 0 for a padded or finished sequence; its start and table are unspecified |
    /// | → `tables` | i32 `[S, N]` | the rows of `block_table`, in the order of sequences |
    /// | → `row_positions` | i32 `[R]` | the position of the token after each of `rows`; -1 for skipped rows |
    /// | → `length`, `counts` | the operands, updated | |
    ///
    /// A finished sequence keeps its rows, with id, position and slot -1; its lengths are 0. Exact.
    PrepareStep {
        /// The number of slots of a page.
        block_size: u32,
    }
}

impl Operation for PrepareStep {
    const SIGNATURE: &'static Signature = &Signature {
        name: "prepare_step",
        profile: Profile::LlmCore1,
        summary: "derives ids, positions, slots and lengths of a step from the request table",
        operands: &[
            operand("step_request", OperandKind::I32),
            operand("step_length", OperandKind::I32),
            operand("step_source", OperandKind::I32),
            operand("prompt_ids", OperandKind::I32),
            operand("rows", OperandKind::I32),
            operand("block_table", OperandKind::I32),
            operand("last_token", OperandKind::I32),
            operand("finished", OperandKind::I32),
            operand("length", OperandKind::I32),
            operand("counts", OperandKind::I32),
        ],
        results: &[
            result("ids"),
            result("positions"),
            result("slots"),
            result("query_start"),
            result("query_length"),
            result("kv_length"),
            result("tables"),
            result("row_positions"),
            updated("length", 8),
            updated("counts", 9),
        ],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        if self.block_size == 0 {
            return Err(Error::invalid("is 0, but a page needs at least one slot").at("block_size"));
        }
        let [sequences] = operands.tensor("step_request")?.sizes()?;
        let [tokens] = operands.tensor("prompt_ids")?.sizes()?;
        let [rows] = operands.tensor("rows")?.sizes()?;
        let [capacity, blocks] = operands.tensor("block_table")?.sizes()?;
        for name in ["step_length", "step_source"] {
            operands.tensor(name)?.expect_shape([sequences], "one per sequence")?;
        }
        for name in ["last_token", "finished", "length"] {
            operands.tensor(name)?.expect_shape([capacity], "one per request")?;
        }
        let (length, counts) = (operands.tensor("length")?, operands.tensor("counts")?);
        counts.sizes::<2>()?;
        counts.expect(0, capacity, "one row per request")?;
        let vector = |size| TensorType { dtype: DType::I32, shape: vec![Clone::clone(size)] };
        Ok(vec![
            vector(tokens),
            vector(tokens),
            vector(tokens),
            vector(sequences),
            vector(sequences),
            vector(sequences),
            TensorType { dtype: DType::I32, shape: vec![sequences.clone(), blocks.clone()] },
            vector(rows),
            length.tensor_type().clone(),
            counts.tensor_type().clone(),
        ])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([1, 1, 1, 1, 1, 2, 1, 1, 1, 2], &[1, 1, 1, 1, 1, 1, 2, 1, 1, 2]))
    }
}

attributes! {
    /// Records the sampled tokens of a step in the request table.
    ///
    /// For every row `r` with `c = requests[r] >= 0` and `ids[r] >= 0`: `last_token[c] = ids[r]`, `counts[c, ids[r]] += 1`,
    /// and `finished[c] = 1` if the token is one of `stop_ids`. Finished requests do not change.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `requests` | i32 `[R]` | the row of the request table; -1 skips; no request twice |
    /// | `ids` | i32 `[R]` | sampled tokens; -1 skips |
    /// | `stop_ids` | i32 `[E]` | tokens that end a request; -1 matches no token |
    /// | `last_token`, `finished` | i32 `[C]` | updated |
    /// | `counts` | i32 `[C, V]` | updated |
    /// | → `last_token`, `finished`, `counts` | the operands, updated | |
    ///
    /// Exact.
    CommitTokens {}
}

impl Operation for CommitTokens {
    const SIGNATURE: &'static Signature = &Signature {
        name: "commit_tokens",
        profile: Profile::LlmCore1,
        summary: "records sampled tokens in the request table",
        operands: &[
            operand("requests", OperandKind::I32),
            operand("ids", OperandKind::I32),
            operand("stop_ids", OperandKind::I32),
            operand("last_token", OperandKind::I32),
            operand("finished", OperandKind::I32),
            operand("counts", OperandKind::I32),
        ],
        results: &[updated("last_token", 3), updated("finished", 4), updated("counts", 5)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [rows] = operands.tensor("requests")?.sizes()?;
        operands.tensor("ids")?.expect_shape([rows], "one per row")?;
        operands.tensor("stop_ids")?.sizes::<1>()?;
        let (last, finished, counts) =
            (operands.tensor("last_token")?, operands.tensor("finished")?, operands.tensor("counts")?);
        let [capacity] = last.sizes()?;
        finished.expect_shape([capacity], "one per request")?;
        counts.sizes::<2>()?;
        counts.expect(0, capacity, "one row per request")?;
        Ok([last, finished, counts].map(|state| state.tensor_type().clone()).into())
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([1, 1, 1, 1, 1, 2], &[1, 1, 2]))
    }
}
