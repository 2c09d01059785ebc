//! Embedding, activations, rotary positions, sums, casts, fills and picked rows.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, kernel_struct, params_header},
        launch::{LaunchOp, Parameters},
    },
    ops::{
        KernelPlan, THREADS, WIDE,
        frame::{Bound, Frame},
        operand,
        params::{ExtentParams, MatrixParams, WeightParams},
        plane, result, type_name, type_of, type_or_f32,
        weight::{CudaWeight, format_name},
        wide,
    },
};
use dsrun_core::{
    DType, Error, Result,
    kernels::{CallDesc, OperandDesc},
    op::{Activation, Add, Cast, Columns, Embed, Fill, GateLayout, GatedActivation, Rope, RopePairing},
};

/// The present ones of these operands.
fn present<const N: usize>(frame: &Frame, indices: [usize; N]) -> Vec<&Bound> {
    indices.into_iter().filter_map(|index| frame.optional(index)).collect()
}

pub(super) fn add(op: &Add, call: &CallDesc) -> Result<KernelPlan> {
    let alpha = op.alpha;
    let types: [(_, &dyn std::fmt::Display); 2] =
        [("T0", &type_of(call, 0)?), ("T1", &type_or_f32(call, 3)?)];
    let mut planes = vec![operand(call, 0)?, operand(call, 1)?, result(call, 0)?];
    planes.extend(call.tensor(2));
    let wide = wide(&planes);
    let spec = KernelSpec::new("elementwise/elementwise.cu", if wide { "add_wide" } else { "add" }, types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 1, 2]);
        bounds.push(y);
        let parameters = Parameters::default()
            .extent(rows, &bounds)
            .size(columns)
            .float(alpha)
            .rows(a)
            .rows(b)
            .optional_rows(frame.optional(2))
            .address(frame.address(3))
            .rows(y);
        let items = if wide { columns / WIDE } else { columns };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, parameters))
    }))
}

pub(super) fn cast(op: &Cast, call: &CallDesc) -> Result<KernelPlan> {
    let types: [(_, &dyn std::fmt::Display); 2] = [("T0", &type_of(call, 0)?), ("T1", &type_name(op.dtype)?)];
    let spec = KernelSpec::new("elementwise/elementwise.cu", "cast", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let parameters = Parameters::default().extent(rows, &[x, y]).size(columns).rows(x).rows(y);
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, parameters))
    }))
}

/// A copy of the columns, by the kernel that casts.
pub(super) fn columns(op: &Columns, call: &CallDesc) -> Result<KernelPlan> {
    let (name, start) = (type_of(call, 0)?, op.start as usize * operand(call, 0)?.dtype.bytes());
    let spec = KernelSpec::new("elementwise/elementwise.cu", "cast", [("T0", &name), ("T1", &name)]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let parameters = Parameters::default().extent(rows, &[x, y]).size(columns);
        let parameters = parameters.address(x.address + start as u64).size(x.stride(0)).rows(y);
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, parameters))
    }))
}

pub(super) fn fill(op: &Fill, call: &CallDesc) -> Result<KernelPlan> {
    let (dtype, value) = (operand(call, 0)?.dtype, op.value);
    let bits = match dtype {
        DType::F32 => value.to_bits(),
        DType::F16 => u32::from(half::f16::from_f32(value).to_bits()),
        DType::BF16 => u32::from(half::bf16::from_f32(value).to_bits()),
        DType::U32 => value as u32,
        // A whole number in range; the low bits are what is stored.
        _ => value as i32 as u32,
    };
    let name = match dtype.bytes() {
        1 => "u8",
        2 => "u16",
        _ => "u32",
    };
    let spec = KernelSpec::new("elementwise/elementwise.cu", "fill", [("T0", &name), ("T1", &name)]);
    Ok(KernelPlan::of_one(fill_spec(spec), move |frame, function| {
        let x = frame.result(0)?;
        let (rows, columns) = (x.size(0), x.size(1));
        let operand = frame.tensor(0)?;
        let parameters = Parameters::default().extent(rows, &[x, operand]).size(columns).word(bits).rows(x);
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, parameters))
    }))
}

/// Integers have no floats to widen: the other kernels of the source are left out.
fn fill_spec(mut spec: KernelSpec) -> KernelSpec {
    spec.defines.push(("FILL_ONLY", "1".into()));
    spec
}

pub(super) fn gather_rows(call: &CallDesc) -> Result<KernelPlan> {
    let name = type_of(call, 0)?;
    let spec = KernelSpec::new("elementwise/elementwise.cu", "gather_rows", [("T0", &name), ("T1", &name)]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, index, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let parameters = Parameters::default()
            .extent(rows, &[index, y])
            .extent(x.size(0), &[x])
            .size(columns)
            .rows(x)
            .address(index.address)
            .rows(y);
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, parameters))
    }))
}

pub(super) fn activation(op: &Activation, call: &CallDesc) -> Result<KernelPlan> {
    let (function, limit) = (op.function as u32, op.limit);
    let types: [(_, &dyn std::fmt::Display); 3] =
        [("T0", &type_of(call, 0)?), ("T1", &type_or_f32(call, 1)?), ("FUNCTION", &function)];
    let spec = KernelSpec::new("elementwise/activation.cu", "activation", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let parameters = Parameters::default().extent(rows, &[x, y]).size(columns).float(limit).rows(x);
        let parameters = parameters.address(frame.address(1)).rows(y);
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, parameters))
    }))
}

pub(super) fn gated_activation(op: &GatedActivation, call: &CallDesc) -> Result<KernelPlan> {
    let (function, limit) = (op.function as u32, op.limit);
    let layout = match op.layout {
        GateLayout::Separate => 1,
        GateLayout::Concatenated => 2,
        GateLayout::Interleaved => 3,
    };
    let types: [(_, &dyn std::fmt::Display); 4] = [
        ("T0", &type_of(call, 0)?),
        ("T1", &type_or_f32(call, 2)?),
        ("FUNCTION", &function),
        ("LAYOUT", &layout),
    ];
    let mut planes = vec![operand(call, 0)?, result(call, 0)?];
    planes.extend(call.tensor(1));
    let wide = wide(&planes);
    let name = if wide { "gated_activation_wide" } else { "gated_activation" };
    let spec = KernelSpec::new("elementwise/activation.cu", name, types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (gate, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 1]);
        bounds.push(y);
        let parameters = Parameters::default()
            .extent(rows, &bounds)
            .size(columns)
            .float(limit)
            .rows(gate)
            .optional_rows(frame.optional(1))
            .address(frame.address(2))
            .rows(y);
        let items = if wide { columns / WIDE } else { columns };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, parameters))
    }))
}

kernel_struct! {
    /// Parameters of `rope`.
    struct RopeParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const T0>",
        y: MatrixParams = "Matrix<T0>",
        positions: Pointer = "const int*",
        /// Angles of the pairs at position 1.
        frequencies: Pointer = "const float*",
        heads: i64 = "i64",
        /// Elements of a head.
        size: i64 = "i64",
        /// Rotated pairs of a head.
        pairs: i64 = "i64",
        scale: f32 = "float",
    }
}

pub(super) fn rope(op: &Rope, call: &CallDesc) -> Result<KernelPlan> {
    let (heads, scale) = (op.heads as usize, op.scale);
    let neighbours = i32::from(op.pairing == RopePairing::Neighbours);
    let types: [(_, &dyn std::fmt::Display); 2] = [("T0", &type_of(call, 0)?), ("NEIGHBOURS", &neighbours)];
    let spec = KernelSpec::new("elementwise/rope.cu", "rope", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, positions, frequencies, y) =
            (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?, frame.result(0)?);
        let (rows, size, pairs) = (y.size(0), y.size(1) / heads.max(1), frequencies.size(0));
        let params = RopeParams {
            extent: ExtentParams::of(rows, &[x, positions, y]),
            x: MatrixParams::of(x),
            y: MatrixParams::of(y),
            positions: positions.address,
            frequencies: frequencies.address,
            heads: heads as i64,
            size: size as i64,
            pairs: pairs as i64,
            scale,
        };
        Ok(LaunchOp::kernel(function, plane(rows, heads * (size - pairs)), THREADS, &params))
    }))
}

/// Appends a weight.
pub(super) fn weight_words(parameters: Parameters, weight: Option<&CudaWeight>) -> Parameters {
    parameters.structure(&weight.map(WeightParams::of).unwrap_or_default())
}

/// The generated headers of these kernels' parameters.
pub(super) fn params_headers() -> Vec<(String, String)> {
    vec![params_header("elementwise/rope", &[declaration::<RopeParams>()])]
}

/// Tokens from where on a block looks up all of a row: enough blocks for every multiprocessor then.
const WHOLE_ROWS: usize = 512;

pub(super) fn embed(op: &Embed, call: &CallDesc) -> Result<KernelPlan> {
    let (first_row, offset) = (op.first_row as usize, op.position_offset as usize);
    let format = |index: usize| match call.operands.get(index) {
        Some(Some(OperandDesc::Weight(weight))) => format_name(weight.format),
        Some(None) => Ok("FORMAT_F32".into()),
        _ => Err(Error::internal(format!("operand {index} is no weight"))),
    };
    let types: [(_, &dyn std::fmt::Display); 3] =
        [("T0", &type_name(result(call, 0)?.dtype)?), ("FORMAT", &format(1)?), ("OTHER_FORMAT", &format(3)?)];
    let spec = KernelSpec::new("elementwise/embed.cu", "embed", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (ids, table, y) = (frame.tensor(0)?, frame.weight(1)?, frame.result(0)?);
        let places = frame.optional_weight(3).map(|weight| &**weight);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 2]);
        bounds.push(y);
        let parameters =
            Parameters::default().extent(rows, &bounds).size(columns).address(ids.address).size(first_row);
        let parameters = weight_words(parameters, Some(table))
            .size(table.layout.rows)
            .address(frame.address(2))
            .size(offset);
        let parameters =
            weight_words(parameters, places).size(places.map_or(0, |places| places.layout.rows)).rows(y);
        // A block has to read which token a row is before it reads anything of it: of many tokens it takes a whole row.
        let items = if rows < WHOLE_ROWS { columns } else { columns.min(THREADS) };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, parameters))
    }))
}
