//! `dsrun generate`: generates an answer to a prompt.

use super::{print_json, speculation_line};
use crate::{
    arguments::Generate,
    devices::open_devices,
    input,
    interrupt::{self, Termination},
    session::{engine_options, generate_options, load_plan, open_draft, open_model, plan_fitted},
    terminal::Terminal,
    trace_file::TraceFile,
};
use anyhow::{Result, bail};
use dsrun_engine::{Answer, EngineError, EngineOptions, FinishReason, Pipeline, Prompt};
use dsrun_models::{
    chat::Message,
    model::{Model, ModelError},
};
use std::ops::ControlFlow;

pub(crate) fn run(command: &Generate, terminal: &Terminal) -> Result<()> {
    let text = input::prompt(command.prompt.as_deref(), command.file.as_deref())?;
    // The devices come first, so that a missing backend does not cost a download.
    let mut devices = open_devices(&command.setup.devices, terminal)?;
    // Declared before the engine, so that it is written after the engine has ended.
    let _trace = TraceFile::open(command.trace.as_deref(), &mut devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let options = generate_options(&model, &command.sampling)?;
    let prompt = as_prompt(text, command, &model, terminal);
    if model.tokenizer().is_none() {
        bail!(
            "the model has no tokenizer, so it can read no prompt\nhint: random weights have none; name a model with weights"
        );
    }
    let speculation = command.speculation.speculation();
    let engine = EngineOptions { speculation, ..engine_options(&command.setup.engine, 1, &devices) };
    let plan = plan_fitted(&model, draft.as_ref(), &devices, engine, terminal)?;
    // Before the weights are loaded, which takes longer than to find a prompt too long.
    let (tokens, context) = (prompt.encode(&model)?, plan.context());
    if tokens.len() > context {
        return Err(EngineError::PromptTooLong { tokens: tokens.len(), context }.into());
    }
    let engine = load_plan(plan, &model, &devices, terminal)?;
    let mut pipeline = Pipeline::with_engine(model, engine);

    pipeline.engine().record_trace(true)?;
    interrupt::listen(Termination::Ends)?;
    let mut writer = (!command.json).then(|| terminal.stream());
    let mut written = Ok(());
    let answers = pipeline.generate_all(&[Prompt::Tokens(tokens)], &options, &mut |progress| {
        if let Some(writer) = &mut writer {
            written = writer.token(progress.text);
        }
        if written.is_err() || interrupt::happened() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    written?;
    if let Some(writer) = writer {
        writer.finish()?;
    }
    for answer in &answers {
        if command.json {
            print_json(answer)?;
        } else {
            terminal.note(&figures(answer));
            speculation_line(pipeline.engine().statistics()).iter().for_each(|line| terminal.note(line));
        }
    }
    Ok(())
}

fn as_prompt(text: String, command: &Generate, model: &Model, terminal: &Terminal) -> Prompt {
    if command.raw {
        return Prompt::Text(text);
    }
    if let (Err(error), None) = (model.chat_template(), &command.system) {
        if !matches!(error, ModelError::NoChatTemplate { .. }) {
            terminal.always(&format!("{error}\nthe prompt is used without a chat template"));
        }
        return Prompt::Text(text);
    }
    let system = command.system.iter().map(|system| Message::new("system", system));
    Prompt::Chat(system.chain([Message::new("user", text)]).collect())
}

/// A line with the token counts and rates of an answer.
pub(crate) fn figures(answer: &Answer) -> String {
    let (prompt, tokens, timings) = (answer.prompt_tokens, answer.tokens.len(), &answer.timings);
    let end = match answer.finish_reason {
        FinishReason::Stop => "",
        FinishReason::Length => "; the limit on tokens was reached",
        FinishReason::Cancelled => "; stopped",
    };
    // The first token is a result of the prompt: an answer of one token has no decode rate.
    let generated = match tokens {
        1 => "1 token".to_owned(),
        _ => format!("{tokens} tokens at {:.1} tokens/s", timings.decode_rate(tokens)),
    };
    let (rate, first) = (timings.prompt_rate(prompt), timings.first_token_seconds);
    format!("{prompt} prompt tokens at {rate:.1} tokens/s, {generated}, first after {first:.2} s{end}")
}
