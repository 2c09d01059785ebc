//! Ops on the request table.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, header, kernel_struct, params_header},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS,
        bound::Bound,
        params::{ExtentParams, MatrixParams},
    },
};
use dsrun_core::{Result, kernels::CallDesc, op::PrepareStep};

/// The maximum number of blocks that copy rows of the block table.
const COPIERS: usize = 1024;
/// Threads of a block of `prepare_step`: few warps, with fast barriers, if every sequence has one token.
const PREPARE_THREADS: std::ops::RangeInclusive<usize> = 128..=1024;

kernel_struct! {
    /// The columns of the request table that record tokens.
    pub(super) struct TokenRecords {
        requests: ExtentParams = "Extent",
        last_token: Pointer = "int*",
        finished: Pointer = "int*",
        /// The number of times each token was generated, and whether it is in the prompt.
        counts: MatrixParams = "Matrix<int>",
        vocabulary: i64 = "i64",
        /// Tokens that finish a request.
        stop_ids: Pointer = "const int*",
        stops: i64 = "i64",
    }
}

kernel_struct! {
    /// Parameters of `prepare_step`.
    struct PrepareStepParams {
        sequence_extent: ExtentParams = "Extent",
        token_extent: ExtentParams = "Extent",
        row_extent: ExtentParams = "Extent",
        request_extent: ExtentParams = "Extent",
        /// Tokens of `prompt`.
        prompt_tokens: i64 = "i64",
        /// Columns of `table`.
        blocks: i64 = "i64",
        vocabulary: i64 = "i64",
        block_size: i64 = "i64",
        /// The request of each sequence.
        requests: Pointer = "const int*",
        /// The number of tokens of each sequence, before it is bounded by the extent.
        lengths: Pointer = "const int*",
        /// Where the tokens of each sequence begin in `prompt`, or -1 for its last token.
        sources: Pointer = "const int*",
        prompt: Pointer = "const int*",
        /// The rows of the step whose logits are needed.
        wanted: Pointer = "const int*",
        /// The block table of all requests.
        table: MatrixParams = "Matrix<const int>",
        last_token: Pointer = "const int*",
        finished: Pointer = "const int*",
        ids: Pointer = "int*",
        positions: Pointer = "int*",
        slots: Pointer = "int*",
        query_start: Pointer = "int*",
        query_length: Pointer = "int*",
        kv_length: Pointer = "int*",
        /// The block table of the sequences.
        tables: MatrixParams = "Matrix<int>",
        row_positions: Pointer = "int*",
        /// Tokens of each request.
        length: Pointer = "int*",
        counts: MatrixParams = "Matrix<int>",
    }
}

kernel_struct! {
    /// Parameters of `commit_tokens`.
    struct CommitTokensParams {
        extent: ExtentParams = "Extent",
        requests: Pointer = "const int*",
        ids: Pointer = "const int*",
        records: TokenRecords = "TokenRecords",
    }
}

impl TokenRecords {
    pub(super) fn of(stop_ids: &Bound, last_token: &Bound, finished: &Bound, counts: &Bound) -> Self {
        Self {
            requests: ExtentParams::of(last_token.size(0), &[last_token, finished, counts]),
            last_token: last_token.address,
            finished: finished.address,
            counts: MatrixParams::of(counts),
            vocabulary: counts.size(1) as i64,
            stop_ids: stop_ids.address,
            stops: stop_ids.size(0) as i64,
        }
    }
}

/// The generated headers of these structs.
pub(super) fn params_headers() -> Vec<(String, String)> {
    let about = "The columns of the request table in which kernels record tokens.";
    vec![
        ("step/table_params.cuh".to_owned(), header(about, &[declaration::<TokenRecords>()])),
        params_header(
            "step/step",
            &[declaration::<PrepareStepParams>(), declaration::<CommitTokensParams>()],
        ),
    ]
}

pub(super) fn prepare_step(op: &PrepareStep, _: &CallDesc) -> Result<KernelPlan> {
    let block_size = i64::from(op.block_size);
    let spec = KernelSpec::new("step/step.cu", "prepare_step", []);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let [requests, lengths, sources, prompt, wanted] = [0, 1, 2, 3, 4].map(|index| frame.tensor(index));
        let (requests, lengths, sources, prompt, wanted) = (requests?, lengths?, sources?, prompt?, wanted?);
        let (table, last_token, finished) = (frame.tensor(5)?, frame.tensor(6)?, frame.tensor(7)?);
        let (ids, positions, slots) = (frame.result(0)?, frame.result(1)?, frame.result(2)?);
        let (query_start, query_length, kv_length) = (frame.result(3)?, frame.result(4)?, frame.result(5)?);
        let (tables, row_positions) = (frame.result(6)?, frame.result(7)?);
        let (length, counts) = (frame.result(8)?, frame.result(9)?);
        let (sequences, tokens) = (requests.size(0), ids.size(0));
        let of_sequences = [requests, lengths, sources, query_start, query_length, kv_length, tables];
        let of_requests = [table, last_token, finished, length, counts];
        let params = PrepareStepParams {
            sequence_extent: ExtentParams::of(sequences, &of_sequences),
            token_extent: ExtentParams::of(tokens, &[prompt, ids, positions, slots]),
            row_extent: ExtentParams::of(wanted.size(0), &[wanted, row_positions]),
            request_extent: ExtentParams::of(table.size(0), &of_requests),
            prompt_tokens: prompt.size(0) as i64,
            blocks: table.size(1) as i64,
            vocabulary: counts.size(1) as i64,
            block_size,
            requests: requests.address,
            lengths: lengths.address,
            sources: sources.address,
            prompt: prompt.address,
            wanted: wanted.address,
            table: MatrixParams::of(table),
            last_token: last_token.address,
            finished: finished.address,
            ids: ids.address,
            positions: positions.address,
            slots: slots.address,
            query_start: query_start.address,
            query_length: query_length.address,
            kv_length: kv_length.address,
            tables: MatrixParams::of(tables),
            row_positions: row_positions.address,
            length: length.address,
            counts: MatrixParams::of(counts),
        };
        let (least, most) = PREPARE_THREADS.into_inner();
        let threads =
            if tokens > sequences { most } else { sequences.next_multiple_of(32).clamp(least, most) };
        Ok(LaunchOp::kernel(function, [1 + sequences.min(COPIERS), 1, 1], threads, &params))
    }))
}

pub(super) fn commit_tokens(_: &CallDesc) -> Result<KernelPlan> {
    let spec = KernelSpec::new("step/step.cu", "commit_tokens", []);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (requests, ids, stop) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (last, finished, counts) = (frame.result(0)?, frame.result(1)?, frame.result(2)?);
        let rows = requests.size(0);
        let params = CommitTokensParams {
            extent: ExtentParams::of(rows, &[requests, ids]),
            requests: requests.address,
            ids: ids.address,
            records: TokenRecords::of(stop, last, finished, counts),
        };
        Ok(LaunchOp::kernel(function, [rows.div_ceil(THREADS), 1, 1], THREADS, &params))
    }))
}
