//! `dsrun inspect`: describes a model and the memory that running it needs.

use super::{print, print_json};
use crate::{
    arguments::{Inspect, SamplingArguments},
    devices::{Devices, open_devices},
    session::{
        Forecasts, describe_device, engine_options, fit, generate_options, open_draft, open_model,
        plan_engine,
    },
    terminal::Terminal,
};
use anyhow::Result;
use dsrun_core::WeightType;
use dsrun_engine::{EngineOptions, EnginePlan, GenerateOptions};
use dsrun_models::{
    config::{DecoderConfig, RopeScaling},
    model::{Model, ModelError},
};
use serde_json::{Value, json};

pub(crate) fn run(command: &Inspect, terminal: &Terminal) -> Result<()> {
    let devices = match &command.absent {
        Some(name) => Devices::one(describe_device(&command.setup.devices.device, name)?),
        None => open_devices(&command.setup.devices, terminal)?,
    };
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let speculation = command.speculation.speculation();
    let options =
        EngineOptions { speculation, ..engine_options(&command.setup.engine, command.requests, &devices) };
    let (options, note) = fit::for_one_request(&model, draft.as_ref(), &devices, options)?;
    let plan = fit::plan_chosen(&model, draft.as_ref(), &devices, &options, note.as_deref(), terminal)?;
    let forecasts = Forecasts::of(&plan, &devices)?;
    let program = command.program || command.fused || command.step.is_some();
    let program = match (program, command.fused, command.step) {
        (false, ..) => None,
        (true, _, Some(tokens)) => {
            Some(plan.step_program(&**devices.first(), tokens, command.requests)?.to_string())
        }
        (true, true, _) => Some(plan.program().to_string()),
        (true, false, _) => {
            let options = EngineOptions { fuse: false, ..options };
            Some(plan_engine(&model, draft.as_ref(), &devices, &options)?.program().to_string())
        }
    };
    let tensors = tensors(&model);
    let defaults = generate_options(&model, &SamplingArguments::default())?;
    if command.json {
        return print_json(&as_json(command, &model, &plan, program, &tensors, &defaults));
    }
    let elements: usize = tensors.iter().filter_map(|(_, tensor)| tensor.elements().ok()).sum();
    let (name, source) = (model.name(), model.weights().describe());
    let source = if source == name { String::new() } else { format!(" ({source})") };
    print(&format!("model      {name}{source}"))?;
    for (name, value) in facts(&model) {
        print(&format!("{name:10} {value}"))?;
    }
    print(&format!("parameters {:.1} million in {} tensors", elements as f64 / 1e6, tensors.len()))?;
    print(&format!("context    {} tokens, planned for {}", model.config().context, plan.context()))?;
    print(&format!("sampling   {}", sampling(&defaults)))?;
    for (field, value) in &model.generation().unused {
        print(&format!("           {field} = {value} is not used"))?;
    }
    print(&devices.memory(&plan))?;
    forecasts.lines().try_for_each(|line| print(&line))?;
    if command.tensors {
        let width = tensors.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, tensor) in &tensors {
            print(&format!("{name:width$}  {tensor}"))?;
        }
    }
    match program {
        Some(program) => print(program.trim_end()),
        None => Ok(()),
    }
}

/// The names and types of the tensors of the model, sorted by name.
fn tensors(model: &Model) -> Vec<(String, WeightType)> {
    let names = model.weights().names();
    let known = |name: &str| Some((name.to_owned(), model.weights().tensor_type(name).ok()?));
    let mut tensors: Vec<_> = names.into_iter().filter_map(known).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

/// The configuration as lines of a name and a value.
fn facts(model: &Model) -> Vec<(&'static str, String)> {
    let config = model.config();
    let mut windows = config.attention.iter().filter_map(|layer| layer.window);
    let (window, windowed) = (windows.next(), 1 + windows.count());
    let mut facts = vec![
        ("family", config.architecture.to_owned()),
        (
            "layers",
            format!("{} of hidden size {}, MLP {}", config.layers, config.hidden, config.intermediate),
        ),
        (
            "heads",
            format!("{} of size {}, {} for keys and values", config.heads, config.head_dim, config.kv_heads),
        ),
        (
            "vocabulary",
            format!("{}{}", config.vocabulary, if config.tied { ", head tied to embedding" } else { "" }),
        ),
        ("positions", positions(config)),
    ];
    if let Some(window) = window {
        facts.push(("window", format!("{window} tokens in {windowed} of {} layers", config.layers)));
    }
    let chat = match model.chat_template() {
        Ok(_) => "a chat template".to_owned(),
        Err(ModelError::NoChatTemplate { .. }) => "no chat template".to_owned(),
        Err(error) => format!("no usable chat template ({error})"),
    };
    let tokenizer = match model.tokenizer() {
        Some(tokenizer) => format!("{} tokens, {chat}", tokenizer.vocabulary_size()),
        None => "none".to_owned(),
    };
    facts.push(("tokenizer", tokenizer));
    facts.push(("ends at", format!("tokens {:?}", model.eos())));
    facts
}

/// How positions reach the model.
fn positions(config: &DecoderConfig) -> String {
    let ropes = config.ropes();
    if ropes.is_empty() {
        return "learned".to_owned();
    }
    let described = ropes.into_iter().map(|rope| {
        let scaling = match &rope.scaling {
            RopeScaling::None => String::new(),
            RopeScaling::Linear { factor } => format!(", scaled by {factor}"),
            RopeScaling::Llama3 { factor, original_context, .. } => {
                format!(", scaled by {factor} as Llama 3.1 does beyond {original_context} tokens")
            }
            RopeScaling::Yarn { factor, original_context, .. } => {
                format!(", scaled by {factor} as YaRN does beyond {original_context} tokens")
            }
            RopeScaling::Long { original_context, .. } => {
                format!(", scaled as LongRoPE does beyond {original_context} tokens")
            }
            RopeScaling::Divisors(_) => ", scaled as the file says".to_owned(),
        };
        let part = match rope.dimensions {
            all if all == config.head_dim => String::new(),
            part => format!(", {part} elements of a head"),
        };
        let layers = config.attention.iter().filter(|layer| layer.rope.as_ref() == Some(rope)).count();
        let layers = match layers {
            all if all == config.layers => String::new(),
            some => format!(", in {some} of {} layers", config.layers),
        };
        format!("rotary, theta {}{scaling}{part}{layers}", rope.theta)
    });
    described.collect::<Vec<_>>().join("; ")
}

fn sampling(options: &GenerateOptions) -> String {
    let sampling = &options.sampling;
    let how = if sampling.temperature == 0.0 {
        "greedy".to_owned()
    } else {
        format!(
            "temperature {}, top-k {}, top-p {}, min-p {}",
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
    };
    let penalty = if sampling.repetition_penalty == 1.0 {
        String::new()
    } else {
        format!(", repetition penalty {}", sampling.repetition_penalty)
    };
    let length = options
        .max_tokens
        .map_or_else(|| "up to the context".into(), |tokens| format!("up to {tokens} tokens"));
    format!("{how}{penalty}, {length}")
}

fn as_json(
    command: &Inspect,
    model: &Model,
    plan: &EnginePlan,
    program: Option<String>,
    tensors: &[(String, WeightType)],
    defaults: &GenerateOptions,
) -> Value {
    let config = model.config();
    let mut value = json!({
        "name": model.name(),
        "source": model.weights().describe(),
        "family": config.architecture,
        "layers": config.layers,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocabulary,
        "tied": config.tied,
        "context": config.context,
        "planned_context": plan.context(),
        "stop_ids": model.eos(),
        "chat_template": model.chat_template().is_ok(),
        "sampling": defaults.sampling,
        "max_tokens": defaults.max_tokens,
        "memory": plan.memory(),
        "memory_of_ranks": plan.memory_of_ranks().collect::<Vec<_>>(),
    });
    if command.tensors {
        let tensor = |(name, tensor): &(String, WeightType)| json!({ "name": name, "format": tensor.format.name(), "shape": tensor.shape });
        value["tensors"] = tensors.iter().map(tensor).collect();
    }
    if let Some(program) = program {
        value["program"] = program.into();
    }
    value
}
