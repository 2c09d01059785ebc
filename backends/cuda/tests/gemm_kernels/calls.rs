//! Calls with a matrix product in them: every op and region of the family, over types, formats, sizes and layouts.

use dsrun_core::{
    DType, TensorDesc, WeightFormat, WeightType,
    kernels::{CallDesc, OperandDesc},
    op::{
        Activation, Add, GateLayout, GatedActivation, LayerNorm, Linear, LinearW8A8, Nonlinearity, Op,
        RmsNorm, Rope, RopePairing,
    },
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, MlpActivation, Norm},
    },
};

/// A call of any number of rows.
pub(crate) struct Family {
    /// What it multiplies, in words.
    pub(crate) name: String,
    pub(crate) call: Box<dyn Fn(usize) -> CallDesc>,
}

/// Types, format and sizes of a product.
#[derive(Clone, Copy)]
struct Product {
    dtype: DType,
    format: WeightFormat,
    outputs: usize,
    inputs: usize,
}

/// Where rows lie and which of them are real.
#[derive(Clone, Copy, Default)]
struct Layout {
    /// Elements between the rows of activations, of the result, and of a residual.
    x_gap: usize,
    y_gap: usize,
    residual_gap: usize,
    /// Whether activations have an extent.
    bounded: bool,
    bias: Bias,
}

/// Whether there is a bias, and its type.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Bias {
    #[default]
    Absent,
    /// The type of the activations.
    Alike,
    /// The type that models keep biases in.
    F32,
}

const PLAIN: Layout = Layout { x_gap: 0, y_gap: 0, residual_gap: 0, bounded: false, bias: Bias::Absent };
const BOUNDED: Layout = Layout { bounded: true, bias: Bias::Alike, ..PLAIN };
const F32_BIAS: Layout = Layout { bias: Bias::F32, ..BOUNDED };

impl Layout {
    fn name(self) -> String {
        let mut name = String::new();
        for (gap, of) in [(self.x_gap, "x"), (self.y_gap, "y"), (self.residual_gap, "residual")] {
            if gap > 0 {
                name += &format!(", {of} rows {gap} apart");
            }
        }
        let bias = match self.bias {
            Bias::Absent => "",
            Bias::Alike => ", bias",
            Bias::F32 => ", f32 bias",
        };
        name + if self.bounded { ", extent" } else { "" } + bias
    }

    fn is_biased(self) -> bool {
        self.bias != Bias::Absent
    }
}

type Operand = Option<OperandDesc>;

fn tensor(dtype: DType, shape: &[usize]) -> Operand {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)))
}

fn with_gap(mut desc: TensorDesc, gap: usize) -> TensorDesc {
    desc.strides[0] += gap;
    desc
}

fn rows_of(dtype: DType, rows: usize, columns: usize, gap: usize, layout: Layout) -> Operand {
    let desc = with_gap(TensorDesc::dense(dtype, &[rows, columns]), gap);
    Some(OperandDesc::Tensor(if layout.bounded { desc.with_extent() } else { desc }))
}

fn finished(op: impl Into<Op>, operands: Vec<Operand>, layout: Layout) -> CallDesc {
    let mut call = CallDesc { op: op.into(), operands, results: Vec::new(), comm: None };
    for (index, inferred) in call.op.infer(&call.operand_types()).unwrap().iter().enumerate() {
        let shape = inferred.resolve(&|_| None).unwrap();
        let updated = call.op.updates(index).and_then(|operand| call.tensor(operand).cloned());
        let made = with_gap(TensorDesc::dense(inferred.dtype, &shape), layout.y_gap);
        call.results.push(updated.unwrap_or(made));
    }
    call
}

fn region(region: dsrun_core::Result<Region>, operands: Vec<Operand>, layout: Layout) -> CallDesc {
    finished(Op::Region(region.unwrap().into()), operands, layout)
}

impl Product {
    fn name(self) -> String {
        format!("{} x, {} weight, {} x {}", self.dtype, self.format, self.outputs, self.inputs)
    }

    fn x(self, rows: usize, layout: Layout) -> Operand {
        rows_of(self.dtype, rows, self.inputs, layout.x_gap, layout)
    }

    /// Weight and bias.
    fn weight(self, layout: Layout) -> Vec<Operand> {
        let weight = WeightType { format: self.format, shape: vec![self.outputs, self.inputs] };
        let dtype = if layout.bias == Bias::F32 { DType::F32 } else { self.dtype };
        let bias = layout.is_biased().then(|| tensor(dtype, &[self.outputs]));
        [Some(OperandDesc::Weight(weight))].into_iter().chain(bias).collect()
    }

    /// Bytes with the scales of their rows, weight and bias.
    fn bytes(self, rows: usize, layout: Layout) -> Vec<Operand> {
        let x = rows_of(DType::I8, rows, self.inputs, layout.x_gap, layout);
        [x, tensor(DType::F32, &[rows])].into_iter().chain(self.weight(layout)).collect()
    }

    fn family(self, what: &str, layout: Layout, call: impl Fn(usize) -> CallDesc + 'static) -> Family {
        Family { name: format!("{what}: {}{}", self.name(), layout.name()), call: Box::new(call) }
    }

    fn linear(self, y: DType, layout: Layout) -> Family {
        self.family(&format!("linear to {y}"), layout, move |rows| {
            let mut operands = [vec![self.x(rows, layout)], self.weight(layout)].concat();
            operands.resize(3, None);
            finished(Linear { dtype: y }, operands, layout)
        })
    }

    fn linear_add(self, alpha: f32, layout: Layout) -> Family {
        self.family(&format!("linear, sum with alpha {alpha}"), layout, move |rows| {
            let residual = rows_of(self.dtype, rows, self.outputs, layout.residual_gap, layout);
            let operands = [vec![self.x(rows, layout)], self.weight(layout), vec![residual]].concat();
            region(well_known::linear_add(self.dtype, layout.is_biased(), Add { alpha }), operands, layout)
        })
    }

    /// Activations and the vectors of a norm of groups of `width`.
    fn normed(self, norm: Norm, width: usize, rows: usize, layout: Layout) -> Vec<Operand> {
        let vectors = std::iter::repeat_n(tensor(self.dtype, &[width]), norm.vectors());
        [self.x(rows, layout)].into_iter().chain(vectors).chain(self.weight(layout)).collect()
    }

    fn norm_linear(self, norm: Norm, width: usize, layout: Layout) -> Family {
        self.family(&format!("{} of {width}, linear", norm_name(norm)), layout, move |rows| {
            let operands = self.normed(norm, width, rows, layout);
            region(well_known::norm_linear(norm, self.dtype, layout.is_biased()), operands, layout)
        })
    }

    fn mlp_input(self, norm: Norm, activation: MlpActivation, layout: Layout) -> Family {
        let what = format!("{}, linear, {}", norm_name(norm), activation_name(activation));
        self.family(&what, layout, move |rows| {
            let operands = self.normed(norm, self.inputs, rows, layout);
            region(well_known::mlp_input(norm, self.dtype, layout.is_biased(), activation), operands, layout)
        })
    }

    fn attention_input(self, norm: Norm, heads: HeadCase, layout: Layout) -> Family {
        let what = format!("{}, linear, {}", norm_name(norm), heads.name());
        self.family(&what, layout, move |rows| {
            let mut operands = self.normed(norm, self.inputs, rows, layout);
            operands.extend(heads.operands(self, rows, layout));
            let (dtype, bias, heads) = (self.dtype, layout.is_biased(), heads.heads(self.outputs));
            let input = AttentionInput { norm, dtype, bias, heads };
            region(well_known::attention_input(input), operands, layout)
        })
    }

    fn linear_w8a8(self, layout: Layout) -> Family {
        self.family("linear_w8a8", layout, move |rows| {
            let mut operands = self.bytes(rows, layout);
            operands.resize(4, None);
            finished(LinearW8A8 { dtype: self.dtype }, operands, layout)
        })
    }

    fn linear_w8a8_add(self, alpha: f32, layout: Layout) -> Family {
        self.family(&format!("linear_w8a8, sum with alpha {alpha}"), layout, move |rows| {
            let mut operands = self.bytes(rows, layout);
            operands.push(rows_of(self.dtype, rows, self.outputs, layout.residual_gap, layout));
            region(
                well_known::linear_w8a8_add(self.dtype, layout.is_biased(), Add { alpha }),
                operands,
                layout,
            )
        })
    }

    fn linear_w8a8_activation(self, activation: MlpActivation, layout: Layout) -> Family {
        self.family(&format!("linear_w8a8, {}", activation_name(activation)), layout, move |rows| {
            let body = well_known::linear_w8a8_activation(self.dtype, layout.is_biased(), activation);
            region(body, self.bytes(rows, layout), layout)
        })
    }

    fn linear_w8a8_heads(self, heads: HeadCase, layout: Layout) -> Family {
        self.family(&format!("linear_w8a8, {}", heads.name()), layout, move |rows| {
            let mut operands = self.bytes(rows, layout);
            operands.extend(heads.operands(self, rows, layout));
            let body =
                well_known::linear_w8a8_heads(self.dtype, layout.is_biased(), heads.heads(self.outputs));
            region(body, operands, layout)
        })
    }
}

fn norm_name(norm: Norm) -> &'static str {
    match norm {
        Norm::Rms(_) => "RMS norm",
        Norm::Layer(_) => "layer norm",
    }
}

fn activation_name(activation: MlpActivation) -> String {
    let (name, limit) = match activation {
        MlpActivation::Gated(GatedActivation { layout: GateLayout::Interleaved, limit, .. }) => {
            ("interleaved gate", limit)
        }
        MlpActivation::Gated(op) => ("gate", op.limit),
        MlpActivation::Plain(op) => ("activation", op.limit),
    };
    if limit > 0.0 { format!("{name} with a limit") } else { name.to_owned() }
}

/// Queries, keys and values of a product: half of the heads are queries.
#[derive(Clone, Copy)]
struct HeadCase {
    size: usize,
    /// Pairs that are rotated, if any.
    rope: Option<(RopePairing, usize)>,
    norms: bool,
}

impl HeadCase {
    fn name(self) -> String {
        let rope = match self.rope {
            None => String::new(),
            Some((RopePairing::Halves, pairs)) => format!(", {pairs} pairs of halves rotated"),
            Some((_, pairs)) => format!(", {pairs} pairs of neighbours rotated"),
        };
        format!("heads of {}{}{rope}", self.size, if self.norms { ", normed" } else { "" })
    }

    fn heads(self, outputs: usize) -> Heads {
        let per_head = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
        let count = (outputs / self.size / 4) as u32;
        let rope = |heads| self.rope.map(|(pairing, _)| Rope { heads, pairing, scale: 1.0 });
        Heads {
            columns: [2, 1, 1].map(|part| part * count * self.size as u32),
            head_norms: self.norms.then_some([per_head; 2]),
            ropes: rope(2 * count).zip(rope(count)).map(|(query, key)| [query, key]),
        }
    }

    /// Weights of norms, positions and frequencies, caches and slots.
    fn operands(self, product: Product, rows: usize, layout: Layout) -> Vec<Operand> {
        let mut operands = vec![tensor(product.dtype, &[self.size]); if self.norms { 2 } else { 0 }];
        let per_row = || {
            let desc = TensorDesc::dense(DType::I32, &[rows]);
            Some(OperandDesc::Tensor(if layout.bounded { desc.with_extent() } else { desc }))
        };
        if let Some((_, pairs)) = self.rope {
            operands.extend([per_row(), tensor(DType::F32, &[pairs])]);
        }
        let kv_heads = product.outputs / self.size / 4;
        let cache = tensor(product.dtype, &[8, kv_heads, 16, self.size]);
        operands.extend([cache.clone(), cache, per_row()]);
        operands
    }
}

fn rms() -> Norm {
    RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into()
}

fn layer() -> Norm {
    LayerNorm { eps: 1e-5 }.into()
}

fn gate(layout: GateLayout, limit: f32) -> MlpActivation {
    GatedActivation { function: Nonlinearity::Silu, layout, limit, up_offset: 0.0 }.into()
}

fn activation(limit: f32) -> MlpActivation {
    Activation { function: Nonlinearity::GeluTanh, limit }.into()
}

/// Formats beside that of the activations.
fn formats(dtype: DType) -> Vec<WeightFormat> {
    let dense = if dtype == DType::BF16 { DType::F32 } else { DType::BF16 };
    let mut formats = vec![WeightFormat::Dense(dtype), WeightFormat::Dense(dense)];
    let named = match dtype {
        DType::BF16 => &["int8", "int4g128_f16", "int8g64z_bf16", "q4_1", "q4_k", "q6_k"][..],
        _ => &["int8_f16", "int4g64z"][..],
    };
    formats.extend(named.iter().map(|name| WeightFormat::from_name(name).unwrap()));
    formats
}

/// All families of calls.
pub(crate) fn families() -> Vec<Family> {
    let mut all = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for format in formats(dtype) {
            let of = |outputs, inputs| Product { dtype, format, outputs, inputs };
            linear_families(dtype, &of, &mut all);
            region_families(dtype, &of, &mut all);
        }
        for format in ["int8", "int8_f16"].map(|name| WeightFormat::from_name(name).unwrap()) {
            let of = |outputs, inputs| Product { dtype, format, outputs, inputs };
            byte_families(&of, &mut all);
        }
    }
    all
}

fn linear_families(dtype: DType, of: &dyn Fn(usize, usize) -> Product, all: &mut Vec<Family>) {
    for (outputs, inputs) in [(4096, 4096), (512, 2048), (6144, 4096), (128_256, 2048), (96, 100), (130, 96)]
    {
        all.push(of(outputs, inputs).linear(dtype, PLAIN));
    }
    for (outputs, inputs) in [(4096, 14_336), (48, 32), (33, 8)] {
        all.push(of(outputs, inputs).linear(dtype, BOUNDED));
    }
    all.push(of(512, 0).linear(dtype, Layout { x_gap: 8, ..BOUNDED }));
    for y in [DType::F32, DType::F16] {
        all.push(of(512, 2048).linear(y, BOUNDED));
    }
    for layout in [
        Layout { x_gap: 1, ..PLAIN },
        Layout { x_gap: 8, ..PLAIN },
        Layout { y_gap: 1, ..BOUNDED },
        Layout { y_gap: 2, ..BOUNDED },
    ] {
        all.push(of(4096, 4096).linear(dtype, layout));
    }
}

fn region_families(dtype: DType, of: &dyn Fn(usize, usize) -> Product, all: &mut Vec<Family>) {
    for (norm, width) in [(rms(), 2048), (rms(), 128), (layer(), 2048)] {
        all.push(of(512, 2048).norm_linear(norm, width, PLAIN));
    }
    for layout in [Layout { x_gap: 1, ..BOUNDED }, Layout { y_gap: 1, ..PLAIN }] {
        all.push(of(512, 2048).norm_linear(rms(), 2048, layout));
    }
    all.push(of(4096, 4096).linear_add(1.0, PLAIN));
    all.push(of(4096, 14_336).linear_add(0.5, BOUNDED));
    all.push(of(576, 1536).linear_add(1.0, BOUNDED));
    all.push(of(100, 96).linear_add(1.0, PLAIN));
    if dtype != DType::F16 {
        all.push(of(4096, 4096).linear_add(1.0, Layout { y_gap: 1, ..PLAIN }));
        for alpha in [1.0, 0.5] {
            all.push(of(4096, 4096).linear_add(alpha, Layout { residual_gap: 1, ..BOUNDED }));
        }
    }
    for gate_layout in [GateLayout::Concatenated, GateLayout::Interleaved] {
        all.push(of(28_672, 4096).mlp_input(rms(), gate(gate_layout, 0.0), PLAIN));
        all.push(of(96, 100).mlp_input(rms(), gate(gate_layout, 7.0), BOUNDED));
    }
    all.push(of(48, 64).mlp_input(layer(), gate(GateLayout::Concatenated, 0.0), BOUNDED));
    for norm in [rms(), layer()] {
        all.push(of(4096, 1024).mlp_input(norm, activation(0.0), BOUNDED));
    }
    all.push(of(130, 96).mlp_input(rms(), activation(1.0), PLAIN));
    let halves = |size| HeadCase { size, rope: Some((RopePairing::Halves, size / 2)), norms: false };
    let none = HeadCase { rope: None, ..halves(64) };
    let neighbours = HeadCase { rope: Some((RopePairing::Neighbours, 64)), ..halves(128) };
    let some = HeadCase { rope: Some((RopePairing::Halves, 16)), ..halves(80) };
    for (outputs, heads, layout) in [
        (6144, halves(128), PLAIN),
        (1024, halves(64), BOUNDED),
        (1024, none, PLAIN),
        (1024, neighbours, PLAIN),
        (640, some, BOUNDED),
        (96, halves(12), PLAIN),
        (1024, HeadCase { norms: true, ..halves(128) }, PLAIN),
    ] {
        all.push(of(outputs, 1024).attention_input(rms(), heads, layout));
    }
    all.push(of(1024, 1024).attention_input(layer(), halves(64), BOUNDED));
    if dtype == DType::BF16 {
        all.push(of(768, 768).linear(dtype, F32_BIAS));
        all.push(of(4096, 11_008).linear_add(1.0, F32_BIAS));
        all.push(of(3072, 768).mlp_input(layer(), activation(0.0), F32_BIAS));
        all.push(of(6144, 4096).attention_input(layer(), halves(128), F32_BIAS));
    }
}

fn byte_families(of: &dyn Fn(usize, usize) -> Product, all: &mut Vec<Family>) {
    for (outputs, inputs) in [(4096, 4096), (6144, 4096), (96, 100), (40, 64)] {
        all.push(of(outputs, inputs).linear_w8a8(BOUNDED));
    }
    all.push(of(512, 0).linear_w8a8(Layout { x_gap: 16, ..BOUNDED }));
    for layout in [Layout { x_gap: 1, ..PLAIN }, Layout { x_gap: 16, ..PLAIN }, Layout { y_gap: 1, ..PLAIN }]
    {
        all.push(of(512, 2048).linear_w8a8(layout));
    }
    for alpha in [1.0, 0.5] {
        all.push(of(4096, 4096).linear_w8a8_add(alpha, BOUNDED));
        all.push(of(100, 96).linear_w8a8_add(alpha, PLAIN));
    }
    all.push(of(4096, 4096).linear_w8a8_add(1.0, Layout { residual_gap: 1, ..PLAIN }));
    for gate_layout in [GateLayout::Concatenated, GateLayout::Interleaved] {
        all.push(of(28_672, 4096).linear_w8a8_activation(gate(gate_layout, 0.0), PLAIN));
        all.push(of(96, 100).linear_w8a8_activation(gate(gate_layout, 7.0), BOUNDED));
    }
    all.push(of(4096, 1024).linear_w8a8_activation(activation(1.0), BOUNDED));
    let halves = |size| HeadCase { size, rope: Some((RopePairing::Halves, size / 2)), norms: false };
    let neighbours = HeadCase { rope: Some((RopePairing::Neighbours, 64)), ..halves(128) };
    for (outputs, heads) in
        [(6144, halves(128)), (1024, halves(64)), (1024, neighbours), (640, halves(80)), (96, halves(12))]
    {
        all.push(of(outputs, 1024).linear_w8a8_heads(heads, BOUNDED));
    }
    let normed = HeadCase { norms: true, ..halves(128) };
    all.push(of(1024, 1024).linear_w8a8_heads(normed, PLAIN));
}
