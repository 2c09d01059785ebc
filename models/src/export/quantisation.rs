//! `quantization_config`, as compressed-tensors reads it.

use super::{
    Job, Kind,
    matrix::{GroupLayout, MatrixLayout},
};
use dsrun_core::GroupOffset;
use serde_json::{Map, Value, json};

/// Says which modules are quantised and how; `None` if none is.
pub(super) fn config(jobs: &[Job<'_>], layouts: &[MatrixLayout]) -> Option<Value> {
    let mut schemes: Vec<(Value, Vec<&str>)> = Vec::new();
    let mut ignored = Vec::new();
    for (job, layout) in jobs.iter().zip(layouts) {
        match layout {
            MatrixLayout::Group(layout) => {
                let scheme = scheme(layout);
                match schemes.iter_mut().find(|(other, _)| *other == scheme) {
                    Some((_, targets)) => targets.push(&job.module),
                    None => schemes.push((scheme, vec![&job.module])),
                }
            }
            MatrixLayout::Dense { .. } if job.kind == Kind::Linear => ignored.push(job.module.as_str()),
            MatrixLayout::Dense { .. } => {}
        }
    }
    // With tied embeddings the head has no tensor of its own, but loaders still see a module.
    if !ignored.contains(&"lm_head") && !schemes.iter().any(|(_, targets)| targets.contains(&"lm_head")) {
        ignored.push("lm_head");
    }
    let format = match schemes.as_slice() {
        [] => return None,
        [(only, _)] => only["format"].clone(),
        _ => "mixed-precision".into(),
    };
    let one = schemes.len() == 1;
    let groups: Map<String, Value> = schemes
        .into_iter()
        .enumerate()
        .map(|(index, (mut scheme, targets))| {
            // One scheme goes for every linear module that is not ignored.
            scheme["targets"] = if one { json!(["Linear"]) } else { json!(targets) };
            (format!("group_{index}"), scheme)
        })
        .collect();
    Some(json!({
        "config_groups": groups,
        "format": format,
        "global_compression_ratio": null,
        "ignore": ignored,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }))
}

fn scheme(layout: &GroupLayout) -> Value {
    let arguments = |bits: usize, symmetric: bool, strategy: &str, group: Option<usize>, dynamic: bool| {
        json!({
            "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group,
            "dynamic": dynamic,
        })
    };
    let symmetric = layout.format.offset == GroupOffset::Symmetric;
    let strategy = if layout.group().is_some() { "group" } else { "channel" };
    let weights = arguments(layout.format.bits.bits(), symmetric, strategy, layout.group(), false);
    let inputs = layout.bytes.then(|| arguments(8, true, "token", None, true));
    json!({
        "targets": [],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": null,
        "format": if layout.bytes { "int-quantized" } else { "pack-quantized" },
    })
}
