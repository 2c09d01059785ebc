//! Parameter structs of the sampling kernels.

use crate::{
    driver::kernel_struct::{Pointer, declaration, kernel_struct, params_header},
    ops::{
        params::{ExtentParams, MatrixParams},
        step::TokenRecords,
    },
};

kernel_struct! {
    /// Parameters of `logit_process`.
    pub(super) struct LogitProcessParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) vocabulary: i64 = "i64",
        /// The number of requests that have settings.
        pub(super) capacity: i64 = "i64",
        pub(super) logits: MatrixParams = "Matrix<const X>",
        pub(super) requests: Pointer = "const int*",
        pub(super) settings: MatrixParams = "Matrix<const float>",
        pub(super) counts: MatrixParams = "Matrix<const int>",
        /// A row for each request; may be absent.
        pub(super) bias: MatrixParams = "Matrix<const float>",
        /// Bits of the allowed tokens, in words; may be absent.
        pub(super) mask: MatrixParams = "Matrix<const u32>",
        pub(super) y: MatrixParams = "Matrix<float>",
    }
}

kernel_struct! {
    /// Parameters of `argmax`.
    pub(super) struct ArgmaxParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) columns: i64 = "i64",
        pub(super) x: MatrixParams = "Matrix<const X>",
        pub(super) ids: Pointer = "int*",
        /// The best of each split of each row; null without splits.
        pub(super) partial: Pointer = "struct Best*",
        /// The number of finished splits of each row; null without splits.
        pub(super) counters: Pointer = "u32*",
    }
}

kernel_struct! {
    /// Parameters of `sample_chunks` and `sample`.
    pub(super) struct SampleParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) columns: i64 = "i64",
        /// The number of requests that have settings and a seed.
        pub(super) capacity: i64 = "i64",
        pub(super) logits: MatrixParams = "Matrix<const float>",
        pub(super) requests: Pointer = "const int*",
        pub(super) positions: Pointer = "const int*",
        pub(super) settings: MatrixParams = "Matrix<const float>",
        pub(super) seeds: MatrixParams = "Matrix<const u32>",
        /// The summary of each chunk of each row.
        pub(super) shares: Pointer = "Share*",
        /// Chunks of a row.
        pub(super) chunks: i64 = "i64",
        pub(super) ids: Pointer = "int*",
        pub(super) log_probability: Pointer = "float*",
    }
}

kernel_struct! {
    /// Parameters of `next_token`.
    pub(super) struct NextTokenParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) columns: i64 = "i64",
        /// The number of requests that have settings and a seed.
        pub(super) capacity: i64 = "i64",
        pub(super) logits: Pointer = "const X*",
        pub(super) requests: Pointer = "const int*",
        pub(super) settings: MatrixParams = "Matrix<const float>",
        pub(super) counts: MatrixParams = "Matrix<const int>",
        /// A row for each request; may be absent.
        pub(super) bias: MatrixParams = "Matrix<const float>",
        /// Bits of the allowed tokens, in words; may be null.
        pub(super) mask: Pointer = "const u32*",
        /// The processed logits.
        pub(super) y: Pointer = "float*",
        pub(super) positions: Pointer = "const int*",
        pub(super) seeds: MatrixParams = "Matrix<const u32>",
        /// The summary of each chunk.
        pub(super) shares: Pointer = "Share*",
        pub(super) chunks: i64 = "i64",
        pub(super) ids: Pointer = "int*",
        pub(super) log_probability: Pointer = "float*",
        /// The request whose token is recorded.
        pub(super) commits: Pointer = "const int*",
        pub(super) records: TokenRecords = "TokenRecords",
        /// The number of finished chunks.
        pub(super) counter: Pointer = "u32*",
    }
}

/// The generated headers of these structs.
pub(in crate::ops) fn params_headers() -> Vec<(String, String)> {
    vec![
        params_header("sampling/logits", &[declaration::<LogitProcessParams>()]),
        params_header("sampling/argmax", &[declaration::<ArgmaxParams>()]),
        params_header("sampling/sample", &[declaration::<SampleParams>()]),
        params_header("sampling/next_token", &[declaration::<NextTokenParams>()]),
    ]
}
