//! From text to text: prompts in, streamed answers out.

use crate::{
    engine::Engine,
    error::{EngineError, Result},
    options::EngineOptions,
    plan::EnginePlan,
    request::{FinishReason, Request, RequestId, TokenEvent},
    sampling::SamplingOptions,
    text::TextStream,
};
use dsrun_core::device::Device;
use dsrun_models::{
    chat::{Message, RenderOptions},
    model::Model,
    tokenizer::{EncodeOptions, Tokenizer},
};
use std::{
    collections::HashMap,
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

/// A prompt for a model to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text as it is; special tokens in it are parsed as such.
    Text(String),
    /// A conversation, which the model's chat template turns into text.
    Chat(Vec<Message>),
    /// Tokens.
    Tokens(Vec<u32>),
}

impl Prompt {
    /// The tokens of the prompt for a model.
    ///
    /// # Errors
    /// If the model has no tokenizer or no chat template, or the prompt cannot be encoded.
    pub fn encode(&self, model: &Model) -> Result<Vec<u32>> {
        let tokenizer = || {
            let hint = "give token ids, or a model with a tokenizer";
            model.tokenizer().ok_or(EngineError::Missing { what: "tokenizer", hint })
        };
        match self {
            Self::Tokens(tokens) => Ok(tokens.clone()),
            Self::Text(text) => {
                let options = EncodeOptions { add_special: true, parse_special: true };
                Ok(tokenizer()?.encode(text, options)?)
            }
            Self::Chat(messages) => {
                let (template, tokenizer) = (model.chat_template()?, tokenizer()?);
                let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
                Ok(template.prompt(tokenizer, messages, &render)?.encode(tokenizer)?)
            }
        }
    }
}

/// How an answer is generated.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The maximum number of tokens of an answer; by default what fits into the context.
    pub max_tokens: Option<usize>,
    /// Strings that end an answer. They are not part of it.
    pub stop: Vec<String>,
}

impl GenerateOptions {
    /// The defaults that come with the model, or else defaults for its size ([`SamplingOptions::suggested`]).
    pub fn suggested(model: &Model) -> Self {
        let defaults = model.generation();
        let sampling = SamplingOptions::suggested(model, false);
        Self { sampling, max_tokens: defaults.max_new_tokens, stop: defaults.stop_strings.clone() }
    }
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Answer {
    /// The number of prompt tokens.
    pub prompt_tokens: usize,
    /// The generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// The natural logarithm of each token's probability.
    pub log_probabilities: Vec<f32>,
    /// The text, without special tokens and up to a stop string.
    pub text: String,
    /// The reason why it ended.
    pub finish_reason: FinishReason,
    /// The time it took.
    pub timings: Timings,
}

/// The time that an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Timings {
    /// Seconds from the request to its first token.
    pub first_token_seconds: f64,
    /// Seconds from its first token to its last.
    pub decode_seconds: f64,
}

impl Timings {
    /// Prompt tokens per second.
    pub fn prompt_rate(&self, tokens: usize) -> f64 {
        tokens as f64 / self.first_token_seconds.max(f64::MIN_POSITIVE)
    }

    /// Generated tokens per second, after the first.
    pub fn decode_rate(&self, tokens: usize) -> f64 {
        tokens.saturating_sub(1) as f64 / self.decode_seconds.max(f64::MIN_POSITIVE)
    }
}

/// A model on a device, from text to text.
///
/// ```no_run
/// # use dsrun_core::{device::{Backend, DeviceOptions}};
/// use dsrun_engine::{GenerateOptions, Pipeline, Prompt};
/// use dsrun_models::model::Model;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = dsrun_cpu::CpuBackend::new().open(0, &DeviceOptions::default())?;
/// let mut pipeline = Pipeline::new(Model::open("SmolLM2-135M-Instruct.Q4_1.gguf")?, device)?;
/// let options = GenerateOptions::suggested(pipeline.model());
/// let answer = pipeline.generate(&Prompt::Text("The sky is".into()), &options)?;
/// println!("{}", answer.text);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pipeline {
    model: Arc<Model>,
    engine: Engine,
}

impl Pipeline {
    /// Loads a model on a device, with default options.
    ///
    /// # Errors
    /// Same as [`EnginePlan::new`] and [`EnginePlan::load`].
    pub fn new(model: impl Into<Arc<Model>>, device: Arc<dyn Device>) -> Result<Self> {
        let model = model.into();
        let plan = EnginePlan::new(&model, &*device, &EngineOptions::default())?;
        let engine = plan.load(&model, device, &mut |_, _| {})?;
        Ok(Self { model, engine })
    }

    /// A pipeline over an engine that was loaded from this model.
    pub fn with_engine(model: impl Into<Arc<Model>>, engine: Engine) -> Self {
        Self { model: model.into(), engine }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Continues one prompt.
    ///
    /// # Errors
    /// Same as [`Self::generate_all`].
    pub fn generate(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<Answer> {
        let answers =
            self.generate_all(std::slice::from_ref(prompt), options, &mut |_| ControlFlow::Continue(()))?;
        let none = || dsrun_core::Error::internal("a prompt had no answer").into();
        answers.into_iter().next().ok_or_else(none)
    }

    /// Continues several prompts side by side. `progress` receives every token, and may cancel all answers, which then end with
    /// [`FinishReason::Cancelled`].
    ///
    /// # Errors
    /// If a prompt cannot be encoded or does not fit, an option is out of range, or the device failed.
    pub fn generate_all(
        &mut self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Answer>> {
        let encoded = prompts.iter().map(|prompt| prompt.encode(&self.model)).collect::<Result<Vec<_>>>()?;
        let mut streams = Vec::new();
        let mut indices = HashMap::new();
        let submitted = self.submit_all(encoded, options, &mut streams, &mut indices);
        let finished = submitted.and_then(|()| self.run(&mut streams, &indices, progress));
        if let Err(error) = finished {
            indices.keys().for_each(|id| self.engine.cancel(*id));
            return Err(error);
        }
        Ok(streams.into_iter().map(GrowingAnswer::finish).collect())
    }

    fn submit_all(
        &mut self,
        prompts: Vec<Vec<u32>>,
        options: &GenerateOptions,
        streams: &mut Vec<GrowingAnswer>,
        indices: &mut HashMap<RequestId, usize>,
    ) -> Result<()> {
        for prompt in prompts {
            let stream = GrowingAnswer::new(self.model.tokenizer(), prompt.len(), &options.stop);
            let request = Request {
                prompt,
                sampling: options.sampling.clone(),
                max_tokens: options.max_tokens,
                ..Request::default()
            };
            indices.insert(self.engine.submit(request)?, streams.len());
            streams.push(stream);
        }
        Ok(())
    }

    fn run(
        &mut self,
        streams: &mut [GrowingAnswer],
        indices: &HashMap<RequestId, usize>,
        progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        while !self.engine.is_idle() {
            for event in self.engine.step()? {
                let Some(index) = indices.get(&event.request).copied() else { continue };
                let stream = &mut streams[index];
                if stream.finish.is_some() {
                    continue; // a stop string ended the answer earlier in the same step
                }
                let text = stream.push(&event);
                if stream.finish.is_some() && event.finish.is_none() {
                    self.engine.cancel(event.request); // a stop string ended the answer
                }
                let report = Progress { index, token: event.token, text: &text, finish: stream.finish };
                if progress(report).is_break() {
                    indices.keys().for_each(|id| self.engine.cancel(*id));
                    return Ok(());
                }
            }
            if let Some((_, error)) = self.engine.take_failures().pop() {
                return Err(error);
            }
        }
        Ok(())
    }
}

/// A token of an answer of [`Pipeline::generate_all`].
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The index of the prompt.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Text that is final: it cannot become part of a stop string or of an incomplete character. May be empty, or the text of
    /// several tokens.
    pub text: &'a str,
    /// The reason why the answer ended, set with its last token.
    pub finish: Option<FinishReason>,
}

/// An answer while its tokens arrive.
struct GrowingAnswer {
    prompt_tokens: usize,
    tokens: Vec<u32>,
    log_probabilities: Vec<f32>,
    text: String,
    stream: TextStream,
    finish: Option<FinishReason>,
    started: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl GrowingAnswer {
    fn new(tokenizer: Option<&Tokenizer>, prompt_tokens: usize, stop: &[String]) -> Self {
        Self {
            prompt_tokens,
            tokens: Vec::new(),
            log_probabilities: Vec::new(),
            text: String::new(),
            stream: TextStream::new(tokenizer, stop),
            finish: None,
            started: Instant::now(),
            first_token: None,
            last_token: None,
        }
    }

    /// Adds a token. Returns the text that became final.
    fn push(&mut self, event: &TokenEvent) -> String {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.tokens.push(event.token);
        self.log_probabilities.push(event.log_probability);
        let piece = self.stream.push(event);
        self.finish = piece.finish;
        self.text.push_str(&piece.text);
        piece.text
    }

    fn finish(self) -> Answer {
        let first = self.first_token.unwrap_or(self.started);
        let seconds = |from: Instant, to: Instant| to.checked_duration_since(from).unwrap_or(Duration::ZERO);
        Answer {
            prompt_tokens: self.prompt_tokens,
            tokens: self.tokens,
            log_probabilities: self.log_probabilities,
            text: self.text,
            finish_reason: self.finish.unwrap_or(FinishReason::Cancelled),
            timings: Timings {
                first_token_seconds: seconds(self.started, first).as_secs_f64(),
                decode_seconds: seconds(first, self.last_token.unwrap_or(first)).as_secs_f64(),
            },
        }
    }
}
