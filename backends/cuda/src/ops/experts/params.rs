//! The parameter struct of the kernels for linear layers of experts.

use crate::{
    driver::kernel_struct::{Pointer, declaration, header, kernel_struct},
    ops::params::{ExtentParams, MatrixParams, WeightParams},
};

kernel_struct! {
    /// Parameters of the kernels for linear layers of experts.
    pub(super) struct GroupedLinearParams {
        pub(super) extent: ExtentParams = "Extent",
        pub(super) x: MatrixParams = "Matrix<const X>",
        pub(super) weight: WeightParams = "Weight",
        pub(super) experts: MatrixParams = "Matrix<const int>",
        /// The bias of the weight's rows; may be null.
        pub(super) bias: Pointer = "const BIAS*",
        /// The weight and the bias of the up projection; absent without a gate.
        pub(super) other: WeightParams = "Weight",
        pub(super) other_bias: Pointer = "const BIAS*",
        /// The weights of slots whose products are summed; absent otherwise.
        pub(super) factors: MatrixParams = "Matrix<const float>",
        /// The tables of `moe_group`; absent if each assignment is an item.
        pub(super) order: MatrixParams = "Matrix<const int>",
        pub(super) starts: Pointer = "const int*",
        pub(super) y: MatrixParams = "Matrix<Y>",
        /// Inputs and outputs of an expert.
        pub(super) inputs: i64 = "i64",
        pub(super) outputs: i64 = "i64",
        /// Outputs, including those of neighbouring experts in the same units of packed rows.
        pub(super) covered: i64 = "i64",
        /// Experts of the device, and the index of the first.
        pub(super) count: i64 = "i64",
        pub(super) first_expert: i64 = "i64",
        /// Assignments of a token.
        pub(super) slots: i64 = "i64",
        /// Elements behind the inputs and the outputs of a slot.
        pub(super) rest: i64 = "i64",
        /// Whether each slot has its own inputs.
        pub(super) per_slot: i64 = "i64",
        /// The maximum number of items.
        pub(super) items: i64 = "i64",
        /// A counter of the units of work that are taken; 0 between launches. Only on tensor cores, with few assignments per expert.
        pub(super) taken: Pointer = "u32*",
        /// The upper limit of the gate and of the magnitude of up; 0 for none.
        pub(super) limit: f32 = "float",
        /// Added to up.
        pub(super) up_offset: f32 = "float",
    }
}

/// The generated header of the kernels' parameters.
pub(super) fn params_header() -> (String, String) {
    let text = header(
        "Parameters of the kernels for linear layers of experts.",
        &[declaration::<GroupedLinearParams>()],
    );
    ("experts/params.cuh".to_owned(), text)
}
