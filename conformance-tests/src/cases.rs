//! The case tables: for every op a fixed list of edge cases and seeded random ones.
//!
//! A table makes its cases on every request, from seeds that depend on the names alone, so that the id of a case is enough to
//! run it again.

mod activation;
mod attention;
mod attention_input;
mod cache;
mod collective;
mod elementwise;
mod embed;
mod head_linear;
mod linear;
mod mixture;
mod moe;
mod norm;
mod plane;
mod quant;
mod quant_group;
mod rank_sum;
mod region;
mod rope;
mod sampling;
mod step;
mod uneven;
mod wanted;

use crate::{
    case::Case,
    draw::{Draw, DrawnId},
    gate::Gate,
};
pub(crate) use attention_input::NormSpan;
use dsrun_core::DType;
pub(crate) use linear::{drawn_weight, formats, goes_with, random_weight};
pub(crate) use uneven::uneven;
pub(crate) use wanted::{ids, only};

/// The cases of an op.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The op, or the well-known region.
    pub op: &'static str,
    /// The element types of its cases: the type of the activations, that of the cache for ops with one, and i32 for ops on integers.
    pub dtypes: &'static [DType],
    /// Makes the cases of an element type.
    pub cases: fn(DType) -> Vec<Case>,
    /// Draws a random case of an element type; `None` if there are no random cases.
    pub drawn: Option<fn(DType, &mut Draw) -> Case>,
}

impl Table {
    /// The random case with this id, and the choices that made it; `None` if the table has no such case.
    pub fn draw(&self, id: DrawnId) -> Option<(Case, Vec<usize>)> {
        let drawn = self.drawn.filter(|_| self.op == id.op && self.dtypes.contains(&id.dtype))?;
        let (dtype, mut draw) = (id.dtype, Draw::new(id));
        let case = drawn(dtype, &mut draw);
        Some((case, draw.made().to_vec()))
    }
}

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
const CACHES: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::I8];
const ALL: &[DType] = &DType::ALL;
const INTEGERS: &[DType] = &[DType::I32];
const F32: &[DType] = &[DType::F32];

const fn table(
    op: &'static str,
    dtypes: &'static [DType],
    cases: fn(DType) -> Vec<Case>,
    drawn: fn(DType, &mut Draw) -> Case,
) -> Table {
    Table { op, dtypes, cases, drawn: Some(drawn) }
}

/// All tables: primitives in the order of the op table, then regions.
pub const TABLES: &[Table] = &[
    table("embed", FLOATS, embed::embed, embed::drawn_embed),
    table("rms_norm", FLOATS, norm::rms_norm, norm::drawn_rms_norm),
    table("layer_norm", FLOATS, norm::layer_norm, norm::drawn_layer_norm),
    table("linear", FLOATS, linear::linear, linear::drawn_linear),
    table("activation", FLOATS, activation::activation, activation::drawn_activation),
    table("gated_activation", FLOATS, activation::gated_activation, activation::drawn_gated_activation),
    table("rope", FLOATS, rope::rope, rope::drawn_rope),
    table("kv_write", CACHES, cache::kv_write, cache::drawn_kv_write),
    table("page_gather", CACHES, cache::page_gather, cache::drawn_page_gather),
    table("page_scatter", CACHES, cache::page_scatter, cache::drawn_page_scatter),
    table("attention_prepare", INTEGERS, attention::prepare, attention::drawn_prepare),
    table("paged_attention", CACHES, attention::paged, attention::drawn_paged),
    table("attention", FLOATS, attention::unpaged, attention::drawn_unpaged),
    table("add", FLOATS, elementwise::add, elementwise::drawn_add),
    table("cast", FLOATS, elementwise::cast, elementwise::drawn_cast),
    table("gather_rows", FLOATS, embed::gather_rows, embed::drawn_gather_rows),
    table("prepare_step", INTEGERS, step::prepare_step, step::drawn_prepare_step),
    table("logit_process", FLOATS, sampling::logit_process, sampling::drawn_logit_process),
    table("argmax", FLOATS, sampling::argmax, sampling::drawn_argmax),
    table("sample", F32, sampling::sample, sampling::drawn_sample),
    table("commit_tokens", INTEGERS, step::commit_tokens, step::drawn_commit_tokens),
    table("columns", FLOATS, elementwise::columns, elementwise::drawn_columns),
    table("quant_per_token", FLOATS, quant::quant_per_token, quant::drawn_quant_per_token),
    table("linear_w8a8", FLOATS, quant::linear_w8a8, quant::drawn_linear_w8a8),
    table("moe_route", FLOATS, moe::route, moe::drawn_route),
    table("moe_group", INTEGERS, moe::group, moe::drawn_group),
    table("grouped_linear", FLOATS, moe::grouped_linear, moe::drawn_grouped_linear),
    table("moe_combine", FLOATS, moe::combine, moe::drawn_combine),
    table("head_linear", FLOATS, head_linear::head_linear, head_linear::drawn_head_linear),
    table("latent_write", FLOATS, cache::latent_write, cache::drawn_latent_write),
    table("quant_per_group", FLOATS, quant_group::quant_per_group, quant_group::drawn_quant_per_group),
    table("linear_a8", FLOATS, quant_group::linear_a8, quant_group::drawn_linear_a8),
    table("all_reduce", ALL, collective::all_reduce, collective::drawn_all_reduce),
    table("all_gather", ALL, collective::all_gather, collective::drawn_all_gather),
    table("reduce_scatter", ALL, collective::reduce_scatter, collective::drawn_reduce_scatter),
    table("all_to_all", ALL, collective::all_to_all, collective::drawn_all_to_all),
    table("broadcast", ALL, collective::broadcast, collective::drawn_broadcast),
    table("send", ALL, collective::send_and_receive, collective::drawn_send),
    // Random cases of `receive` are those of `send`.
    Table { op: "receive", dtypes: ALL, cases: collective::send_and_receive, drawn: None },
    Table { op: "barrier", dtypes: INTEGERS, cases: collective::barrier, drawn: None },
    table("add_rms_norm", FLOATS, region::add_rms_norm, region::drawn_add_rms_norm),
    table("norm_linear", FLOATS, region::norm_linear, region::drawn_norm_linear),
    table("linear_add", FLOATS, region::linear_add, region::drawn_linear_add),
    table("mlp_input", FLOATS, region::mlp_input, region::drawn_mlp_input),
    table("attention_input", FLOATS, attention_input::cases, attention_input::drawn),
    table("norm_quant", FLOATS, quant::norm_quant, quant::drawn_norm_quant),
    table(
        "gated_activation_quant",
        FLOATS,
        quant::gated_activation_quant,
        quant::drawn_gated_activation_quant,
    ),
    table("activation_quant", FLOATS, quant::activation_quant, quant::drawn_activation_quant),
    table("linear_w8a8_add", FLOATS, quant::linear_w8a8_add, quant::drawn_linear_w8a8_add),
    table("linear_w8a8_heads", FLOATS, quant::linear_w8a8_heads, quant::drawn_linear_w8a8_heads),
    table(
        "linear_w8a8_activation",
        FLOATS,
        quant::linear_w8a8_activation,
        quant::drawn_linear_w8a8_activation,
    ),
    table("linear_all_reduce", FLOATS, rank_sum::linear_all_reduce, rank_sum::drawn_linear_all_reduce),
    table(
        "linear_all_reduce_add",
        FLOATS,
        rank_sum::linear_all_reduce_add,
        rank_sum::drawn_linear_all_reduce_add,
    ),
    table("mixture", FLOATS, mixture::mixture, mixture::drawn_mixture),
];

const EXPONENTIAL: Gate = Gate { inner: None, exponential: true };

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::op::Op;

    const REGIONS: [&str; 14] = [
        "add_rms_norm",
        "norm_linear",
        "linear_add",
        "mlp_input",
        "attention_input",
        "norm_quant",
        "gated_activation_quant",
        "activation_quant",
        "linear_w8a8_add",
        "linear_w8a8_heads",
        "linear_w8a8_activation",
        "linear_all_reduce",
        "linear_all_reduce_add",
        "mixture",
    ];

    #[test]
    fn every_primitive_has_a_table() {
        let primitives: Vec<&str> = Op::PRIMITIVES.iter().map(|signature| signature.name).collect();
        let tables: Vec<&str> = TABLES.iter().map(|table| table.op).collect();
        assert_eq!(tables[..primitives.len()], primitives);
        assert_eq!(tables[primitives.len()..], REGIONS);
    }

    #[test]
    fn drawn_cases_are_named_and_repeat() {
        for table in TABLES.iter().filter(|table| table.drawn.is_some()) {
            let dtype = table.dtypes[table.dtypes.len() - 1];
            for index in 0..3 {
                let id = DrawnId::numbered(table.op, dtype, 0, index);
                let (case, choices) = table.draw(id.clone()).expect("the table draws");
                assert_eq!(case.id, id.to_string());
                let spelled = id.with_choices(&choices);
                let (again, _) = table.draw(spelled.clone()).expect("the table draws");
                assert_eq!(again.id, spelled.to_string());
                for (call, again) in case.calls.iter().zip(&again.calls) {
                    assert_eq!(call.op, again.op, "{}", case.id);
                    assert!(call.operands == again.operands, "{} and {spelled} differ", case.id);
                }
            }
        }
    }
}
