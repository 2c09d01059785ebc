//! `dsrun chat`: talk with a model.

mod input;

use super::{generate::figures, speculation_line};
use crate::{
    arguments::Chat,
    devices::open_devices,
    echo::NoEcho,
    interrupt::{self, Termination},
    session::{engine_options, generate_options, load_fitted, open_draft, open_model},
    terminal::Terminal,
};
use anyhow::{Result, anyhow, bail};
use dsrun_engine::{EngineError, EngineOptions, FinishReason, Prompt};
use dsrun_models::{chat::Message, model::ModelError};
use input::{HELP, History, Input};
use rustyline::{DefaultEditor, error::ReadlineError};
use std::{io::ErrorKind, ops::ControlFlow};

pub(crate) fn run(command: &Chat, terminal: &Terminal) -> Result<()> {
    let devices = open_devices(&command.setup.devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    match model.chat_template() {
        Ok(_) => {}
        Err(ModelError::NoChatTemplate { .. }) => bail!(
            "the model has no chat template, so it cannot hold a conversation\nhint: use dsrun generate --raw"
        ),
        Err(error) => bail!("{error}\nhint: use dsrun generate --raw"),
    }
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let options = generate_options(&model, &command.sampling)?;
    let speculation = command.speculation.speculation();
    let engine = EngineOptions { speculation, ..engine_options(&command.setup.engine, 1, &devices) };
    let mut pipeline = load_fitted(model, draft.as_ref(), &devices, engine, terminal)?;

    interrupt::listen(Termination::Ends)?;
    let _silent = NoEcho::start();
    let mut editor = DefaultEditor::new()?;
    let system: Vec<Message> = command.system.iter().map(|system| Message::new("system", system)).collect();
    let mut messages = system.clone();
    let history = History::open()?;
    for line in history.lines() {
        editor.add_history_entry(line)?;
    }
    terminal.note(HELP);
    loop {
        interrupt::take();
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                terminal.note("/exit or Ctrl-D ends the conversation");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                terminal.error(&anyhow!("the line is not UTF-8, and is left out"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        match Input::of(&line) {
            Input::Empty => continue,
            Input::Exit => return Ok(()),
            Input::Reset => {
                messages.clone_from(&system);
                terminal.note("the conversation is cleared");
                continue;
            }
            Input::Help => {
                terminal.always(HELP);
                continue;
            }
            Input::Unknown(command) => {
                terminal.error(&anyhow!("there is no command /{command}\n{HELP}"));
                continue;
            }
            Input::Message => {}
        }
        editor.add_history_entry(&line)?;
        history.add(&line);
        messages.push(Message::new("user", line));

        let mut writer = terminal.stream();
        let mut written = Ok(());
        let prompt = Prompt::Chat(messages.clone());
        let answers = pipeline.generate_all(&[prompt], &options, &mut |progress| {
            written = writer.token(progress.text);
            if written.is_err() || interrupt::happened() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let answers = match answers {
            Ok(answers) => answers,
            Err(error @ EngineError::PromptTooLong { .. }) => {
                drop(writer);
                messages.pop();
                terminal.error(&anyhow!("{error}\n/reset starts a new conversation"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        written?;
        writer.finish()?;
        for answer in answers {
            terminal.note(&figures(&answer));
            if answer.finish_reason == FinishReason::Length {
                terminal.note("the answer was cut off: raise --max-tokens or --context for a longer one");
            }
            messages.push(Message::new("assistant", answer.text));
        }
        speculation_line(pipeline.engine().statistics()).iter().for_each(|line| terminal.note(line));
    }
}
