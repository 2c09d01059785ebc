//! Token embedding, optionally with position embedding.

use super::present;
use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS,
        params::{ExtentParams, MatrixParams, WeightParams},
        plane, result, type_name,
        weight::format_name,
    },
};
use dsrun_core::{
    Error, Result, WeightFormat,
    kernels::{CallDesc, OperandDesc},
    op::Embed,
};

/// From this many tokens on, a block loops over the whole row: there are enough blocks to fill any device.
const WHOLE_ROWS: usize = 512;

kernel_struct! {
    /// Parameters of `embed`.
    struct EmbedParams {
        extent: ExtentParams = "Extent",
        y: MatrixParams = "Matrix<X>",
        columns: i64 = "i64",
        ids: Pointer = "const int*",
        /// The id of the first row of the table.
        first_row: i64 = "i64",
        table: WeightParams = "Weight",
        table_rows: i64 = "i64",
        /// Null without a table of positions.
        positions: Pointer = "const int*",
        /// The row of position 0.
        position_offset: i64 = "i64",
        position_table: WeightParams = "OtherWeight",
        position_table_rows: i64 = "i64",
    }
}

/// The generated header of the kernel's parameters.
pub(super) fn params_header() -> (String, String) {
    kernel_struct::params_header("elementwise/embed", &[declaration::<EmbedParams>()])
}

pub(in crate::ops) fn embed(op: &Embed, call: &CallDesc) -> Result<KernelPlan> {
    let (first_row, position_offset) = (i64::from(op.first_row), i64::from(op.position_offset));
    let y = result(call, 0)?.dtype;
    let format = |index: usize| match call.operands.get(index) {
        Some(Some(OperandDesc::Weight(weight))) => format_name(weight.format),
        // Any format will do: that which present tables mostly have, so that one kernel serves both.
        Some(None) => format_name(WeightFormat::Dense(y)),
        _ => Err(Error::internal(format!("operand {index} is not a weight"))),
    };
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("X", &type_name(y)?), ("FORMAT", &format(1)?), ("OTHER_FORMAT", &format(3)?)];
    let spec = KernelSpec::new("elementwise/embed.cu", "embed", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (ids, table, y) = (frame.tensor(0)?, frame.weight(1)?, frame.result(0)?);
        let position_table = frame.optional_weight(3).map(|weight| &**weight);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 2]);
        bounds.push(y);
        let params = EmbedParams {
            extent: ExtentParams::of(rows, &bounds),
            y: MatrixParams::of(y),
            columns: columns as i64,
            ids: ids.address,
            first_row,
            table: WeightParams::of(table),
            table_rows: table.layout.rows as i64,
            positions: frame.address(2),
            position_offset,
            position_table: position_table.map(WeightParams::of).unwrap_or_default(),
            position_table_rows: position_table.map_or(0, |table| table.layout.rows as i64),
        };
        // A block reads the id of a row before it can read the row: with many tokens it processes the whole row, to wait for an
        // id only once.
        let items = if rows < WHOLE_ROWS { columns } else { columns.min(THREADS) };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, &params))
    }))
}
