//! `dsrun eval perplexity`: measures how well a model predicts a text.
//!
//! The text is split into windows of `--context` tokens. In each window, the model predicts every token from the tokens before
//! it. Tokens near the start have little context and are not counted. Perplexity is the exponential of the mean negative
//! log-likelihood of the counted tokens. The windows are those of llama.cpp's `perplexity`:
//!
//! - By default, windows do not overlap and their second half is counted: with a context of `n`, the tokens after positions
//!   `n / 2 .. n - 1`.
//! - With `--stride s`, a window starts every `s` tokens and its last `s` tokens are counted. llama.cpp makes these windows half
//!   a stride longer than the given context.
//!
//! If the texts of the model begin with a BOS token, it replaces the first token of each window. Special tokens in the text
//! are read as plain text.

use crate::{
    arguments::Perplexity,
    commands::{print, print_json},
    devices::open_devices,
    input,
    session::{engine_options, load, open_model},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_engine::log_probability;
use dsrun_models::tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;
use std::{ops::Range, path::Path};

/// The default context, which is that of llama.cpp.
const CONTEXT: usize = 512;

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend_device: String,
    dtype: String,
    /// Tokens of a window.
    context: usize,
    /// Tokens from one window to the next.
    stride: usize,
    windows: usize,
    /// Predicted tokens that were counted.
    predictions: usize,
    #[serde(flatten)]
    estimate: Estimate,
}

pub(crate) fn run(command: &Perplexity, terminal: &Terminal) -> Result<()> {
    let path = (command.file.as_path() != Path::new("-")).then_some(command.file.as_path());
    let text = input::prompt(path.is_none().then_some("-"), path)?;
    let devices = open_devices(&command.setup.devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let context = command.setup.engine.context.unwrap_or_else(|| CONTEXT.min(model.config().context));
    let tokenizer =
        model.tokenizer().context("the model has no tokenizer, which perplexity of a text needs")?;
    let (begin, tokens) = encode(tokenizer, &text)?;
    let mut windows = windows(tokens.len(), context, command.stride)?;
    windows.truncate(command.chunks.unwrap_or(usize::MAX));

    let mut options = engine_options(&command.setup.engine, 1, &devices);
    options.context = Some(context);
    let name = model.name().to_owned();
    let mut pipeline = load(model, None, &devices, &options, terminal)?;
    let bar = terminal.counter("predicting");
    bar.set_length(windows.len() as u64);
    let mut losses = Losses::default();
    for window in &windows {
        let mut window_tokens = tokens[window.tokens.clone()].to_vec();
        if let (Some(begin), Some(first)) = (begin, window_tokens.first_mut()) {
            *first = begin;
        }
        pipeline.engine().score(&window_tokens, &mut |position, logits| {
            if window.counted.contains(&position) {
                losses.add(-log_probability(logits, window_tokens[position + 1]));
            }
        })?;
        if losses.sum.is_nan() {
            bar.finish_and_clear();
            bail!("the model's logits are not finite, so its predictions have no perplexity");
        }
        bar.inc(1);
        bar.set_message(format!("perplexity {:.3} so far", losses.estimate().perplexity));
    }
    bar.finish_and_clear();
    let figures = Figures {
        model: name,
        backend_device: devices.name(pipeline.engine().ranks()),
        dtype: format!("{:?}", command.setup.engine.dtype).to_lowercase(),
        context,
        stride: command.stride.unwrap_or(context),
        windows: windows.len(),
        predictions: losses.count,
        estimate: losses.estimate(),
    };
    if command.json { print_json(&figures) } else { show(&figures) }
}

fn show(figures: &Figures) -> Result<()> {
    let Figures { context, stride, windows, predictions, estimate, .. } = figures;
    let Estimate { perplexity, standard_error, mean_nll } = estimate;
    print(&format!("{} on {}, dtype {}", figures.model, figures.backend_device, figures.dtype))?;
    print(&format!(
        "{predictions} tokens predicted in {windows} windows of {context}, one every {stride} tokens"
    ))?;
    print(&format!("mean negative log-likelihood {mean_nll:.6} nats"))?;
    let error = standard_error.map_or_else(String::new, |error| format!(" +/- {error:.4} (standard error)"));
    print(&format!("perplexity {perplexity:.4}{error}"))
}

/// Encodes a text. Returns the token that texts of the model begin with, if any, and the tokens of the text, which include it.
fn encode(tokenizer: &Tokenizer, text: &str) -> Result<(Option<u32>, Vec<u32>)> {
    let special = EncodeOptions { add_special: true, parse_special: false };
    let around_nothing = tokenizer.encode("", special)?;
    let ends = |token: &u32| tokenizer.eos() == Some(*token) && tokenizer.bos() != Some(*token);
    let begin = around_nothing.first().copied().filter(|token| !ends(token));
    let mut tokens: Vec<u32> = begin.into_iter().collect();
    tokens.extend(tokenizer.encode(text, EncodeOptions::default())?);
    Ok((begin, tokens))
}

/// A window of the text, and the predictions in it that are counted.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    /// The tokens of the text in the window.
    tokens: Range<usize>,
    /// The positions within the window whose next token is counted.
    counted: Range<usize>,
}

/// The windows of a text.
fn windows(tokens: usize, context: usize, stride: Option<usize>) -> Result<Vec<Window>> {
    if context < 3 {
        bail!("--context is {context}; a window must have at least 3 tokens");
    }
    let (last, step, first) = match stride {
        None => (tokens.checked_sub(context), context, context / 2),
        Some(stride) if (1..context).contains(&stride) => {
            (tokens.checked_sub(context + 1), stride, context - stride - 1)
        }
        Some(stride) => {
            bail!("--stride is {stride}; it must be from 1 to {} (--context less one)", context - 1)
        }
    };
    let last = last.with_context(|| {
        format!(
            "the text has {tokens} tokens, fewer than a window of {context}; give a longer text or a smaller --context"
        )
    })?;
    let window = |start: usize| Window { tokens: start..start + context, counted: first..context - 1 };
    Ok((0..=last).step_by(step).map(window).collect())
}

/// Sums of negative log-likelihoods.
#[derive(Debug, Default)]
struct Losses {
    count: usize,
    sum: f64,
    squares: f64,
}

/// An estimate of the perplexity.
#[derive(Debug, Serialize)]
struct Estimate {
    /// The mean negative log-likelihood in nats.
    mean_nll: f64,
    perplexity: f64,
    /// The standard error of the perplexity under the assumption of independent predictions; `None` for a single one.
    standard_error: Option<f64>,
}

impl Losses {
    fn add(&mut self, loss: f64) {
        self.count += 1;
        self.sum += loss;
        self.squares += loss * loss;
    }

    fn estimate(&self) -> Estimate {
        let count = self.count as f64;
        let mean_nll = self.sum / count;
        let perplexity = mean_nll.exp();
        // Rounding may leave a variance slightly below 0.
        let variance = (self.squares / count - mean_nll * mean_nll).max(0.0);
        let standard_error = (self.count > 1).then(|| perplexity * (variance / (count - 1.0)).sqrt());
        Estimate { mean_nll, perplexity, standard_error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: usize, context: usize, stride: Option<usize>) -> Vec<(usize, Range<usize>)> {
        let windows = windows(tokens, context, stride).unwrap();
        assert!(windows.iter().all(|window| window.tokens.end <= tokens && window.tokens.len() == context));
        windows.into_iter().map(|window| (window.tokens.start, window.counted)).collect()
    }

    #[test]
    fn windows_follow_each_other_and_their_second_half_counts() {
        assert_eq!(of(25, 8, None), [(0, 4..7), (8, 4..7), (16, 4..7)]);
        assert_eq!(of(8, 8, None), [(0, 4..7)]);
        assert_eq!(of(15, 7, None), [(0, 3..6), (7, 3..6)]);
    }

    #[test]
    fn strided_windows_count_every_token_once() {
        let windows = of(19, 8, Some(3));
        assert_eq!(windows.iter().map(|(start, _)| *start).collect::<Vec<_>>(), [0, 3, 6, 9]);
        let predicted: Vec<usize> =
            windows.into_iter().flat_map(|(start, counted)| counted.map(move |at| start + at + 1)).collect();
        assert_eq!(predicted, (5..17).collect::<Vec<_>>());
        assert_eq!(of(9, 8, Some(7)), [(0, 0..7)]);
    }

    #[test]
    fn contexts_and_strides_without_a_window_are_refused() {
        for (tokens, context, stride) in
            [(7, 8, None), (8, 8, Some(2)), (100, 2, None), (100, 8, Some(0)), (100, 8, Some(8))]
        {
            assert!(windows(tokens, context, stride).is_err(), "{tokens} {context} {stride:?}");
        }
    }

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let mut losses = Losses::default();
        losses.add(1.0);
        assert!(losses.estimate().standard_error.is_none());
        losses.add(3.0);
        let estimate = losses.estimate();
        // Mean 2, variance 1 over 2 values: the error of the mean is 1.
        assert_eq!((estimate.mean_nll, estimate.perplexity), (2.0, 2.0f64.exp()));
        assert!((estimate.standard_error.unwrap() - 2.0f64.exp()).abs() < 1e-12);
    }
}
