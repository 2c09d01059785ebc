//! `dsrun eval`: measures the quality of a model.

mod perplexity;

use crate::{
    arguments::{Eval, EvalCommand},
    terminal::Terminal,
};
use anyhow::Result;

pub(crate) fn run(command: &Eval, terminal: &Terminal) -> Result<()> {
    match &command.command {
        EvalCommand::Perplexity(command) => perplexity::run(command, terminal),
    }
}
