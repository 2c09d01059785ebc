//! Reads how a checkpoint is quantised: `quantization_config` in `config.json`, or AutoGPTQ's older
//! `quantize_config.json`.
//!
//! Most fields describe how the integers were computed and have no effect on reading them. Fields that describe the format
//! are interpreted or refused, and unknown fields are refused.

use super::{
    ConfigError, Result,
    fields::{Fields, shortened},
};
use dsrun_core::GroupBits;
use serde_json::{Map, Value};

/// The quantisation of a checkpoint. Which matrices are quantised, and their sizes, follow from the tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantisation {
    /// The layout of AutoGPTQ and GPTQModel.
    Gptq(Gptq),
    /// AutoAWQ, layout "gemm": 4 bits with zero points. The value is the group size in inputs; `None` for all inputs of a row.
    Awq(Option<usize>),
    /// compressed-tensors, as llm-compressor and `dsrun quantize` write it.
    CompressedTensors(Vec<Scheme>),
    /// FP8: 8-bit floats (E4M3) with a scale for a matrix, for each output, or for blocks of this many outputs and inputs. Whatever is said
    /// of inputs has no effect: they are not quantised.
    Float8(Option<[usize; 2]>),
    /// MXFP4: 4-bit floats with a power-of-two scale per 32 inputs, as in the experts of gpt-oss.
    Mxfp4,
}

/// The parameters of the GPTQ layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gptq {
    /// Bits of an integer.
    pub bits: GroupBits,
    /// The group size in inputs; `None` for all inputs of a row.
    pub group: Option<usize>,
    /// Whether all zero points are in the middle of the range.
    pub symmetric: bool,
    /// Whether the file stores zero points minus one, as version 1 of the format does.
    pub zeros_less_one: bool,
}

/// The quantisation of a group of modules in a compressed-tensors checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// Names of modules, `Linear` for all, or `re:` and a regular expression for the start of a name.
    pub targets: Vec<String>,
    /// Whether inputs are also quantised to 8 bits, row by row.
    pub quantised_inputs: bool,
    /// Outputs and inputs of a block that shares a scale, of 8-bit floats.
    pub block: Option<[usize; 2]>,
}

/// Fields that do not affect how a GPTQ or AWQ checkpoint is read. Names that begin with `use_` select kernels of the
/// program that wrote it.
const NO_EFFECT: &[&str] = &[
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "modules_to_not_convert",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "quant_method",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_*",
];

/// The largest accepted group size: more than the inputs of any matrix.
const MOST_INPUTS: i64 = 1 << 24;

impl Quantisation {
    /// Reads `quantization_config` of a `config.json` file, if it has one.
    ///
    /// # Errors
    /// If the method is not supported, or a field is unknown.
    pub fn from_config_json(bytes: &[u8]) -> Result<Option<Self>> {
        let object = parse(bytes)?;
        let Some(fields) = Fields::new(&object).object("quantization_config")? else { return Ok(None) };
        let method = fields.text("quant_method")?;
        match method {
            Some("gptq") => gptq(&fields).map(Some),
            Some("awq") => awq(&fields).map(Some),
            Some("compressed-tensors") => compressed_tensors(&fields).map(Some),
            Some("fp8") => float8(&fields).map(Some),
            Some("fbgemm_fp8") => {
                let known = ["activation_scale_ub", "modules_to_not_convert", "quant_method"];
                refuse_unknown(&fields, "fbgemm_fp8", &[&known])?;
                Ok(Some(Self::Float8(None)))
            }
            Some("mxfp4") => {
                refuse_unknown(
                    &fields,
                    "mxfp4",
                    &[&["dequantize", "modules_to_not_convert", "quant_method"]],
                )?;
                Ok(Some(Self::Mxfp4))
            }
            None => Err(ConfigError::Missing { field: fields.path("quant_method") }),
            Some(other) => {
                let reason = "supported: gptq, awq, compressed-tensors, fp8, fbgemm_fp8, mxfp4; or use a GGUF file of the model";
                Err(ConfigError::unsupported(fields.path("quant_method"), shortened(&other.into()), reason))
            }
        }
    }

    /// Reads a `quantize_config.json` file, which AutoGPTQ writes.
    ///
    /// # Errors
    /// If a field is unknown.
    pub fn from_gptq_json(bytes: &[u8]) -> Result<Self> {
        gptq(&Fields::new(&parse(bytes)?))
    }

    /// Whether this is a compressed-tensors module whose inputs are quantised too.
    pub(crate) fn quantises_inputs(&self, module: &str) -> Result<bool> {
        Ok(self.scheme_of(module)?.is_some_and(|scheme| scheme.quantised_inputs))
    }

    /// The outputs and inputs of a block of this compressed-tensors module, if it has blocks.
    pub(crate) fn block_of(&self, module: &str) -> Result<Option<[usize; 2]>> {
        Ok(self.scheme_of(module)?.and_then(|scheme| scheme.block))
    }

    /// The scheme of a compressed-tensors module.
    fn scheme_of(&self, module: &str) -> Result<Option<&Scheme>> {
        let Self::CompressedTensors(schemes) = self else { return Ok(None) };
        // Names take precedence over regular expressions, and these over classes, as in the library.
        let found = schemes.iter().find(|scheme| scheme.targets.iter().any(|target| target == module));
        if found.is_some() {
            return Ok(found);
        }
        for scheme in schemes {
            for target in &scheme.targets {
                if let Some(pattern) = target.strip_prefix("re:")
                    && starts_with_match(pattern, module)?
                {
                    return Ok(Some(scheme));
                }
            }
        }
        Ok(schemes.iter().find(|scheme| scheme.targets.iter().any(|target| target == "Linear")))
    }
}

/// Whether a regular expression matches at the start of a name.
fn starts_with_match(pattern: &str, name: &str) -> Result<bool> {
    let compiled = regex::Regex::new(&format!("^(?:{pattern})"));
    let compiled = compiled.map_err(|error| {
        let reason = error.to_string().lines().last().unwrap_or_default().to_owned();
        let pattern = shortened(&pattern.into());
        ConfigError::unsupported("quantization_config.config_groups", pattern, reason)
    })?;
    Ok(compiled.is_match(name))
}

fn parse(bytes: &[u8]) -> Result<Map<String, Value>> {
    serde_json::from_slice(bytes).map_err(|error| ConfigError::Json { message: error.to_string() })
}

fn gptq(fields: &Fields<'_>) -> Result<Quantisation> {
    const READ: &[&str] = &[
        "bits",
        "checkpoint_format",
        "dynamic",
        "format",
        "group_size",
        "is_marlin_format",
        "pack_dtype",
        "sym",
    ];
    refuse_unknown(fields, "gptq", &[READ, NO_EFFECT])?;
    let zeros_less_one = match fields.text("checkpoint_format")?.or(fields.text("format")?) {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => {
            let (field, value) = (fields.path("checkpoint_format"), shortened(&other.into()));
            return Err(ConfigError::unsupported(field, value, "supported: gptq, gptq_v2"));
        }
    };
    expect(fields, "is_marlin_format", &[Value::Bool(false)])?;
    expect(fields, "pack_dtype", &["int32".into()])?;
    // Exceptions for modules that are not quantised (`-:`) can be ignored, as their tensors show it.
    let mut exceptions = fields.value("dynamic").and_then(Value::as_object).into_iter().flatten();
    if let Some((module, value)) = exceptions.find(|(module, _)| !module.starts_with("-:")) {
        let reason =
            format!("modules with a different quantisation than the rest ({module}) are not supported");
        return Err(ConfigError::unsupported(fields.path("dynamic"), shortened(value), reason));
    }
    Ok(Quantisation::Gptq(Gptq {
        bits: bits(fields, "bits")?,
        group: group(fields)?,
        symmetric: fields.flag("sym")?.unwrap_or(false),
        zeros_less_one,
    }))
}

fn awq(fields: &Fields<'_>) -> Result<Quantisation> {
    const READ: &[&str] = &["bits", "group_size", "version", "zero_point"];
    refuse_unknown(fields, "awq", &[READ, NO_EFFECT])?;
    if bits(fields, "bits")? != GroupBits::Four {
        return Err(ConfigError::unsupported(fields.path("bits"), 8, "AWQ has 4 bits"));
    }
    expect(fields, "version", &["gemm".into(), "GEMM".into()])?;
    expect(fields, "zero_point", &[Value::Bool(true)])?;
    Ok(Quantisation::Awq(group(fields)?))
}

fn float8(fields: &Fields<'_>) -> Result<Quantisation> {
    // How inputs are quantised has no effect here, and neither has the type in which block scales were computed.
    const NO_EFFECT_HERE: &[&str] = &[
        "activation_scheme",
        "dequantize",
        "ignored_layers",
        "modules_to_not_convert",
        "quant_method",
        "scale_fmt",
    ];
    refuse_unknown(fields, "fp8", &[NO_EFFECT_HERE, &["fmt", "weight_block_size"]])?;
    expect(fields, "fmt", &["e4m3".into(), "float8_e4m3fn".into()])?;
    block(fields, "weight_block_size").map(Quantisation::Float8)
}

/// Reads the outputs and inputs of blocks.
fn block(fields: &Fields<'_>, field: &str) -> Result<Option<[usize; 2]>> {
    let Some(value) = fields.value(field) else { return Ok(None) };
    let sizes = value.as_array().map(|sizes| {
        let size = |size: &Value| size.as_u64().filter(|size| (1..=MOST_INPUTS as u64).contains(size));
        sizes.iter().filter_map(size).map(|size| size as usize).collect::<Vec<_>>()
    });
    match sizes.as_deref() {
        Some(&[outputs, inputs]) => Ok(Some([outputs, inputs])),
        _ => Err(ConfigError::value(fields.path(field), shortened(value), "two sizes, such as [128, 128]")),
    }
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<Quantisation> {
    const METHOD: &str = "compressed-tensors";
    const READ: &[&str] = &[
        "config_groups",
        "format",
        // The modules that are not quantised; their tensors show it.
        "ignore",
        "kv_cache_scheme",
        "moe_sparsity_config",
        "quantization_status",
        "sparsity_config",
        "transform_config",
    ];
    refuse_unknown(fields, METHOD, &[READ, &["global_compression_ratio", "quant_method", "version"]])?;
    expect(fields, "format", &formats().chain(["mixed-precision".into()]).collect::<Vec<_>>())?;
    expect(fields, "quantization_status", &["compressed".into()])?;
    for field in ["kv_cache_scheme", "moe_sparsity_config", "transform_config"] {
        expect(fields, field, &[])?;
    }
    if let Some(sparsity) =
        fields.value("sparsity_config").filter(|value| value.get("format") != Some(&"dense".into()))
    {
        let empty = sparsity.as_object().is_some_and(Map::is_empty);
        if !empty {
            let reason = "sparse matrices are not supported";
            return Err(ConfigError::unsupported(
                fields.path("sparsity_config"),
                shortened(sparsity),
                reason,
            ));
        }
    }
    let groups = fields.value("config_groups").and_then(Value::as_object);
    let groups = groups.ok_or_else(|| ConfigError::Missing { field: fields.path("config_groups") })?;
    let schemes = groups.values().map(|group| {
        let wrong = || {
            ConfigError::value(
                fields.path("config_groups"),
                shortened(group),
                "an object that names its targets",
            )
        };
        scheme(&Fields::within("config_groups", group.as_object().ok_or_else(wrong)?))
    });
    schemes.collect::<Result<_>>().map(Quantisation::CompressedTensors)
}

fn scheme(fields: &Fields<'_>) -> Result<Scheme> {
    const READ: &[&str] = &["format", "input_activations", "output_activations", "targets", "weights"];
    refuse_unknown(fields, "compressed-tensors", &[READ])?;
    expect(fields, "format", &formats().collect::<Vec<_>>())?;
    expect(fields, "output_activations", &[])?;
    let targets =
        fields.texts("targets")?.ok_or_else(|| ConfigError::Missing { field: fields.path("targets") })?;
    let targets = targets.into_iter().map(str::to_owned).collect();
    let weights =
        fields.object("weights")?.ok_or_else(|| ConfigError::Missing { field: fields.path("weights") })?;
    let is_float = arguments(&weights)?;
    let bits = bits(&weights, "num_bits")?;
    expect(&weights, "dynamic", &[Value::Bool(false)])?;
    let inputs = fields.object("input_activations")?;
    if is_float {
        if bits != GroupBits::Eight {
            return Err(ConfigError::unsupported(weights.path("num_bits"), 4, "floats have 8 bits"));
        }
        expect(&weights, "strategy", &["tensor", "channel", "block"].map(Value::from))?;
        expect(&weights, "symmetric", &[Value::Bool(true)])?;
        // Inputs are not quantised here.
        inputs.as_ref().map(arguments).transpose()?;
        let block = block(&weights, "block_structure")?;
        return Ok(Scheme { targets, quantised_inputs: false, block });
    }
    expect(&weights, "strategy", &["tensor", "channel", "group"].map(Value::from))?;
    if let Some(inputs) = &inputs {
        if arguments(inputs)? {
            let reason = "the weights are integers";
            return Err(ConfigError::unsupported(inputs.path("type"), shortened(&"float".into()), reason));
        }
        expect(inputs, "num_bits", &[8.into()])?;
        expect(inputs, "strategy", &["token".into()])?;
        expect(inputs, "symmetric", &[Value::Bool(true)])?;
        // The default is false.
        if inputs.flag("dynamic")? != Some(true) {
            let reason = "inputs whose scales are fixed cannot be computed; they must be found for each row";
            return Err(ConfigError::unsupported(inputs.path("dynamic"), false, reason));
        }
    }
    Ok(Scheme { targets, quantised_inputs: inputs.is_some(), block: None })
}

/// How compressed-tensors may store matrices.
fn formats() -> impl Iterator<Item = Value> {
    ["int-quantized", "naive-quantized", "pack-quantized", "float-quantized"].into_iter().map(Value::from)
}

/// Checks the fields that descriptions of weights and of inputs share. Returns whether they describe floats.
fn arguments(fields: &Fields<'_>) -> Result<bool> {
    const KNOWN: &[&str] = &[
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    ];
    refuse_unknown(fields, "compressed-tensors", &[KNOWN])?;
    expect(fields, "type", &["int".into(), "float".into()])?;
    Ok(fields.text("type")? == Some("float"))
}

fn refuse_unknown(fields: &Fields<'_>, method: &'static str, known: &[&[&str]]) -> Result<()> {
    for (field, value) in fields.present() {
        let empty =
            value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty);
        let is =
            |name: &&str| name.strip_suffix('*').map_or(*name == field, |start| field.starts_with(start));
        if !empty && !known.iter().copied().flatten().any(is) {
            let field = fields.path(&field.chars().take(80).collect::<String>());
            return Err(ConfigError::Unknown { field, value: shortened(value), architecture: method });
        }
    }
    Ok(())
}

/// Refuses a field that is present, not empty, and none of these values.
fn expect(fields: &Fields<'_>, field: &str, values: &[Value]) -> Result<()> {
    let Some(value) = fields.value(field) else { return Ok(()) };
    if values.contains(value) || value.as_object().is_some_and(Map::is_empty) {
        return Ok(());
    }
    let supported: Vec<String> = values.iter().map(Value::to_string).collect();
    let reason = match supported.is_empty() {
        true => "such checkpoints are not supported".to_owned(),
        false => format!("supported: {}", supported.join(", ")),
    };
    Err(ConfigError::unsupported(fields.path(field), shortened(value), reason))
}

fn bits(fields: &Fields<'_>, field: &str) -> Result<GroupBits> {
    let Some(value) = fields.value(field) else {
        return Err(ConfigError::Missing { field: fields.path(field) });
    };
    let found = GroupBits::ALL.into_iter().find(|bits| value.as_u64() == Some(bits.bits() as u64));
    found.ok_or_else(|| ConfigError::unsupported(fields.path(field), shortened(value), "supported: 4, 8"))
}

/// Reads the group size in inputs; -1 for all inputs of a row.
fn group(fields: &Fields<'_>) -> Result<Option<usize>> {
    let Some(value) = fields.value("group_size") else {
        return Err(ConfigError::Missing { field: fields.path("group_size") });
    };
    match value.as_i64() {
        Some(-1) => Ok(None),
        Some(size @ 1..=MOST_INPUTS) => Ok(Some(size as usize)),
        _ => {
            let expected = "a whole number from 1, or -1 for all inputs of a matrix";
            Err(ConfigError::value(fields.path("group_size"), shortened(value), expected))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(config: &Value) -> Result<Option<Quantisation>> {
        Quantisation::from_config_json(json!({ "quantization_config": config }).to_string().as_bytes())
    }

    fn scheme(input_activations: &Value) -> Value {
        json!({"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel",
               "symmetric": true, "observer": "minmax"}, "input_activations": input_activations})
    }

    fn tokens() -> Value {
        json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true, "symmetric": true})
    }

    #[test]
    fn what_the_tools_write_is_understood() {
        let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false,
                          "damp_percent": 0.1, "tokenizer": null, "meta": {"quantizer": "x"}});
        let expected =
            Gptq { bits: GroupBits::Four, group: Some(128), symmetric: true, zeros_less_one: true };
        assert_eq!(read(&gptq), Ok(Some(Quantisation::Gptq(expected))));
        let older = json!({"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}).to_string();
        let expected = Gptq { bits: GroupBits::Eight, group: None, symmetric: false, zeros_less_one: false };
        assert_eq!(Quantisation::from_gptq_json(older.as_bytes()), Ok(Quantisation::Gptq(expected)));
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": true,
                         "modules_to_not_convert": null});
        assert_eq!(read(&awq), Ok(Some(Quantisation::Awq(Some(64)))));
        assert_eq!(read(&Value::Null), Ok(None));
    }

    #[test]
    fn schemes_are_found_by_name_then_pattern_then_class() {
        let mut by_name = scheme(&tokens());
        by_name["targets"] = json!(["model.layers.0.mlp.down_proj"]);
        let mut by_pattern = scheme(&Value::Null);
        by_pattern["targets"] = json!(["re:.*down_proj"]);
        let config = json!({"quant_method": "compressed-tensors", "format": "int-quantized", "kv_cache_scheme": null,
            "quantization_status": "compressed", "ignore": ["lm_head"], "version": "0.9",
            "sparsity_config": {}, "transform_config": {},
            "config_groups": {"group_0": scheme(&tokens()), "group_1": by_pattern, "group_2": by_name}});
        let read = read(&config).unwrap().unwrap();
        for (module, inputs) in [
            ("model.layers.0.mlp.down_proj", true),
            ("model.layers.1.mlp.down_proj", false),
            ("model.layers.1.mlp.up_proj", true),
        ] {
            assert_eq!(read.quantises_inputs(module), Ok(inputs), "{module}");
        }
    }

    #[test]
    fn floats_of_8_bits_have_the_blocks_that_the_file_names() {
        let published = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                               "weight_block_size": [128, 128], "scale_fmt": "ue8m0"});
        assert_eq!(read(&published).unwrap(), Some(Quantisation::Float8(Some([128, 128]))));
        let whole = json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null});
        assert_eq!(read(&whole).unwrap(), Some(Quantisation::Float8(None)));
        let rows = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0});
        assert_eq!(read(&rows).unwrap(), Some(Quantisation::Float8(None)));

        let mut blocks = scheme(&tokens());
        blocks["weights"]["type"] = "float".into();
        blocks["weights"]["strategy"] = "block".into();
        blocks["weights"]["block_structure"] = json!([128, 128]);
        blocks["input_activations"] = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
                                             "dynamic": true, "symmetric": true});
        let config = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                            "config_groups": {"a": blocks, "b": scheme(&tokens())}});
        let read = read(&config).unwrap().unwrap();
        let module = "model.layers.0.mlp.down_proj";
        assert_eq!(read.block_of(module), Ok(Some([128, 128])));
        assert_eq!(read.quantises_inputs(module), Ok(false));
    }

    #[test]
    fn what_would_change_the_result_is_refused_by_name() {
        let gptq = |field: &str, value: Value| {
            let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
            config[field] = value;
            config
        };
        let compressed = |field: &str, value: Value| {
            let mut config =
                json!({"quant_method": "compressed-tensors", "config_groups": {"a": scheme(&tokens())}});
            config[field] = value;
            config
        };
        let inputs = |field: &str, value: Value| {
            let mut inputs = tokens();
            inputs[field] = value;
            compressed("config_groups", json!({ "a": scheme(&inputs) }))
        };
        let floats = |field: &str, value: Value| {
            let mut floats = scheme(&Value::Null);
            floats["weights"]["type"] = "float".into();
            floats["weights"][field] = value;
            compressed("config_groups", json!({ "a": floats }))
        };
        for (config, message) in [
            (json!({"quant_method": "bitsandbytes"}), "quant_method = \"bitsandbytes\""),
            (json!({"bits": 4}), "quantization_config.quant_method is missing"),
            (gptq("bits", 3.into()), "bits = 3 is not supported: supported: 4, 8"),
            (gptq("group_size", 0.into()), "group_size is 0"),
            (gptq("checkpoint_format", "marlin".into()), "checkpoint_format"),
            (gptq("is_marlin_format", true.into()), "is_marlin_format"),
            (gptq("dynamic", json!({"+:.*": {"bits": 8}})), "dynamic"),
            (gptq("rotation", "hadamard".into()), "quantization_config.rotation"),
            (
                json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}),
                "supported: \"gemm\"",
            ),
            (compressed("kv_cache_scheme", json!({"num_bits": 8})), "kv_cache_scheme"),
            (compressed("format", "nvfp4-pack-quantized".into()), "nvfp4"),
            (compressed("sparsity_config", json!({"format": "sparse-24"})), "sparsity_config"),
            (compressed("transform_config", json!({"config_groups": {}})), "transform_config"),
            (inputs("dynamic", false.into()), "dynamic"),
            (inputs("type", "float".into()), "type = \"float\""),
            (inputs("strategy", "tensor".into()), "strategy"),
            (inputs("num_bits", 4.into()), "num_bits = 4"),
            (floats("num_bits", 4.into()), "floats have 8 bits"),
            (floats("strategy", "group".into()), "strategy = \"group\""),
            (floats("symmetric", false.into()), "symmetric = false"),
            (floats("block_structure", json!([128])), "block_structure"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fmt = \"e5m2\""),
            (json!({"quant_method": "fp8", "weight_block_size": [128, 0]}), "weight_block_size"),
            (json!({"quant_method": "fp8", "rotation": "hadamard"}), "quantization_config.rotation"),
            (json!({"quant_method": "fbgemm_fp8", "rotation": "hadamard"}), "quantization_config.rotation"),
        ] {
            let error = read(&config).unwrap_err().to_string();
            assert!(error.contains(message), "{error} for {config}");
        }
        let mut pattern = scheme(&tokens());
        pattern["targets"] = json!(["re:("]);
        let config = json!({"quant_method": "compressed-tensors", "config_groups": {"a": pattern}});
        let error = read(&config).unwrap().unwrap().quantises_inputs("x").unwrap_err().to_string();
        assert!(error.contains("unclosed group"), "{error}");
    }
}
