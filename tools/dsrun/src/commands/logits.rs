//! `dsrun logits`: prints the logits of a text, for comparison between engines.

use super::{print, print_json};
use crate::{
    arguments::Logits,
    devices::open_devices,
    input,
    session::{engine_options, load, open_model},
    terminal::Terminal,
};
use anyhow::{Result, bail};
use dsrun_engine::{Prompt, Score, ScoredPosition};
use dsrun_models::model::Model;

pub(crate) fn run(command: &Logits, terminal: &Terminal) -> Result<()> {
    let prompt = match &command.prompt {
        Some(text) => Prompt::Text(input::prompt(Some(text), None)?),
        None => Prompt::Tokens(command.tokens.clone()),
    };
    let devices = open_devices(&command.setup.devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let mut pipeline =
        load(model, None, &devices, &engine_options(&command.setup.engine, 1, &devices), terminal)?;
    let tokens = prompt.encode(pipeline.model())?;
    if let Some(outside) = command.at.iter().find(|at| **at >= tokens.len()) {
        bail!("there is no position {outside}: the text has {} tokens, counted from 0", tokens.len());
    }
    let selected = |index: usize| command.at.is_empty() || command.at.contains(&index);
    let score = Score::of(pipeline.engine(), &tokens, command.top, &selected)?;
    if command.json {
        return print_json(&score);
    }
    for position in &score.positions {
        print(&line(position, &score.tokens, pipeline.model()))?;
    }
    match score.mean_nll {
        Some(nll) => {
            print(&format!("mean negative log-likelihood: {nll:.6} nats, perplexity {:.4}", nll.exp()))
        }
        None => Ok(()),
    }
}

fn line(position: &ScoredPosition, tokens: &[u32], model: &Model) -> String {
    let piece = |id: u32| match model.tokenizer() {
        Some(tokenizer) => format!("{:?}", tokenizer.decode(&[id], false).unwrap_or_default()),
        None => id.to_string(),
    };
    let top: Vec<String> =
        position.top.iter().map(|(id, logit)| format!("{} {logit:.4}", piece(*id))).collect();
    format!("{:>4} {:14} {}", position.index, piece(tokens[position.index]), top.join(", "))
}
