//! A model, opened: configuration, weights, tokenizer, chat template, and the program they make.
//!
//! Opening checks everything that can be checked without computing: the configuration, every weight's presence and shape,
//! that no tensor of the file is left over, and that the tokenizer fits the embedding. So a model that opens is a model
//! that runs, and one that does not says why in terms of its files.

mod tensors;

pub use crate::error::ModelError;
use crate::{
    chat::ChatTemplate,
    config::{DecoderConfig, Quantisation},
    families,
    fetch::{self, ModelFiles, WeightFiles},
    generation::GenerationDefaults,
    gguf::{
        GgufFile,
        parts::{GgufParts, split_field},
    },
    presets::Preset,
    quantised::QuantisedFiles,
    safetensors_file::{INDEX_FILE, SafetensorsFiles},
    sentence_transformers::{CACHED_POOLING, Modules, ShorterVectors, TextEmbedding},
    step::ProgramOptions,
    tensor_names::Naming,
    tokenizer::{NamedTemplate, Tokenizer, TokenizerConfig, TokenizerError},
    weights::{RandomSource, TensorSource},
};
use dsrun_core::{WeightFormat, program::Program};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The result of opening a model.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// The most that is read of a JSON file. The largest tokenizers are a tenth of it.
const MOST_JSON_BYTES: u64 = 512 << 20;

/// An opened model. Cheap to share: weights stay in their files until rows are asked for.
pub struct Model {
    name: String,
    config: DecoderConfig,
    weights: Arc<dyn TensorSource>,
    naming: Naming,
    tokenizer: Option<Tokenizer>,
    chat: Chat,
    generation: GenerationDefaults,
    embedding: Option<TextEmbedding>,
    shorter_vectors: ShorterVectors,
    eos: Vec<u32>,
}

/// A model that has no valid template can still complete text, so the error waits until a template is asked for.
enum Chat {
    None,
    Template(Box<ChatTemplate>),
    Broken { path: PathBuf, source: Arc<crate::chat::ChatError> },
}

impl Model {
    /// Opens a `.gguf` or `.safetensors` file, or a folder that holds a model.
    ///
    /// # Errors
    /// [`ModelError`] names the file and what is wrong with it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_files(&fetch::at_path(path.as_ref())?)
    }

    /// Opens the files that [`fetch::resolve`] found.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_files(files: &ModelFiles) -> Result<Self> {
        let mut model = match &files.weights {
            WeightFiles::Gguf(paths) => Self::from_gguf(files, paths)?,
            WeightFiles::Safetensors(paths) => Self::from_safetensors(files, paths)?,
        };
        if let Some(embedding) = embedding(files, model.config.embedding_width())? {
            model.embedding = Some(embedding);
        }
        model.check()?;
        Ok(model)
    }

    fn from_gguf(files: &ModelFiles, paths: &[PathBuf]) -> Result<Self> {
        let (path, others) = match paths {
            [path, others @ ..] => (path.as_path(), others),
            [] => return Err(ModelError::NoConfig { path: files.directory.clone() }),
        };
        let file = GgufFile::open(path)?;
        let parts = split_field(&file, "split.count")?.unwrap_or(1);
        if parts > 1 && others.is_empty() {
            return Err(ModelError::Split { path: path.to_owned(), parts });
        }
        let wrong = |source| ModelError::Config { path: path.to_owned(), source };
        let config = DecoderConfig::from_gguf(&file).map_err(wrong)?;
        let embedding = TextEmbedding::from_gguf(&file).map_err(wrong)?;
        let tokenizer = gguf_tokenizer(files, path, &file)?;
        let text = |id: Option<u32>| {
            id.zip(tokenizer.as_ref()).and_then(|(id, tokenizer)| tokenizer.id_to_token(id))
        };
        let specials = [("bos_token", text(config.bos)), ("eos_token", text(config.eos.first().copied()))];
        let specials =
            specials.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.to_owned())));
        let specials: Vec<(String, String)> = specials.collect();
        let chat = match (file.chat_template()?, &files.chat_template) {
            (Some(source), _) => Chat::new(path, &[default_template(source.to_owned())], &specials),
            (None, Some(path)) => Chat::new(path, &[default_template(read_text(path)?)], &specials),
            (None, None) => Chat::None,
        };
        let generation = generation(files)?;
        let weights: Arc<dyn TensorSource> = match others {
            [] => Arc::new(file),
            _ => Arc::new(GgufParts::open(file, others)?),
        };
        let naming = {
            let names = weights.names();
            let tensors = families::of(&config)?.gguf.as_ref().map(|gguf| &gguf.tensors);
            tensors.map_or(Naming::Plain, |tensors| tensors.of_file(|name| names.contains(&name)))
        };
        let model = Self::assemble(files.name.clone(), config, weights, naming, tokenizer, chat, generation);
        Ok(Self { embedding, ..model })
    }

    fn from_safetensors(files: &ModelFiles, paths: &[PathBuf]) -> Result<Self> {
        let first = paths.first().map_or(files.directory.as_path(), PathBuf::as_path);
        let config_path =
            files.config.as_deref().ok_or_else(|| ModelError::NoConfig { path: first.to_owned() })?;
        let config_bytes = read(config_path)?;
        let wrong = |source| ModelError::Config { path: config_path.to_owned(), source };
        let config = DecoderConfig::from_json_bytes(&config_bytes).map_err(wrong)?;
        let opened = match paths {
            [path] => SafetensorsFiles::open(path)?,
            _ => SafetensorsFiles::open(files.directory.join(INDEX_FILE))?,
        };
        let mut quantisation = Quantisation::from_config_json(&config_bytes).map_err(wrong)?;
        if let (None, Some(path)) = (&quantisation, &files.quantize_config) {
            let wrong = |source| ModelError::Config { path: path.clone(), source };
            quantisation = Some(Quantisation::from_gptq_json(&read(path)?).map_err(wrong)?);
        }
        let weights: Arc<dyn TensorSource> = match &quantisation {
            Some(quantisation) => Arc::new(QuantisedFiles::new(opened, quantisation)?),
            None => Arc::new(opened),
        };
        let (tokenizer, tokenizer_config) = match beside_tokenizer(files)? {
            Some((tokenizer, config)) => (Some(tokenizer), config),
            None => (None, TokenizerConfig::default()),
        };
        let specials = &tokenizer_config.special_tokens;
        let chat = match (&files.chat_template, &files.tokenizer_config) {
            (Some(path), _) => Chat::new(path, &[default_template(read_text(path)?)], specials),
            (None, Some(path)) if !tokenizer_config.chat_templates.is_empty() => {
                Chat::new(path, &tokenizer_config.chat_templates, specials)
            }
            _ => Chat::None,
        };
        let naming = {
            let names = weights.names();
            families::of(&config)?.tensors.of_file(|name| names.contains(&name))
        };
        let generation = generation(files)?;
        let shorter_vectors = ShorterVectors::from_config_json(&config_bytes).map_err(wrong)?;
        let model = Self::assemble(files.name.clone(), config, weights, naming, tokenizer, chat, generation);
        Ok(Self { shorter_vectors, ..model })
    }

    fn assemble(
        name: String,
        config: DecoderConfig,
        weights: Arc<dyn TensorSource>,
        naming: Naming,
        tokenizer: Option<Tokenizer>,
        chat: Chat,
        generation: GenerationDefaults,
    ) -> Self {
        let mut eos = generation.eos.clone();
        if eos.is_empty() {
            eos.clone_from(&config.eos);
            let of_tokenizer = tokenizer.as_ref().and_then(Tokenizer::eos);
            eos.extend(of_tokenizer.filter(|token| !config.eos.contains(token)));
        }
        Self {
            name,
            config,
            weights,
            naming,
            tokenizer,
            chat,
            generation,
            embedding: None,
            shorter_vectors: ShorterVectors::None,
            eos,
        }
    }

    /// A model of this configuration with random weights: matrices in `format`, vectors in f32. It has no tokenizer.
    ///
    /// # Errors
    /// If the configuration is not valid, or a matrix cannot have the format.
    pub fn random(name: &str, config: DecoderConfig, seed: u64, format: WeightFormat) -> Result<Self> {
        config.validate().map_err(|source| ModelError::Config { path: name.into(), source })?;
        let weights = Arc::new(RandomSource::new(seed, tensors::random(&config, format)?)?);
        let (naming, generation) = (Naming::Plain, GenerationDefaults::default());
        Ok(Self::assemble(name.to_owned(), config, weights, naming, None, Chat::None, generation))
    }

    /// A model with random weights: of a [`Preset`], of a `config.json` file, or of one in a folder.
    ///
    /// # Errors
    /// As [`Self::random`], and if there is neither a preset nor a file of this name.
    pub fn random_named(name: &str, seed: u64, format: WeightFormat) -> Result<Self> {
        Self::random(name, config_named(name)?, seed, format)
    }

    /// The name or path it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The tensors, under the names that the program's weight expressions use.
    pub fn weights(&self) -> &Arc<dyn TensorSource> {
        &self.weights
    }

    /// The tokenizer, if the model comes with one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// The chat template.
    ///
    /// # Errors
    /// If the model has none, or one that is not valid.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        match &self.chat {
            Chat::None => Err(ModelError::NoChatTemplate { name: self.name.clone() }),
            Chat::Template(template) => Ok(template),
            Chat::Broken { path, source } => {
                Err(ModelError::Chat { path: path.clone(), source: source.clone() })
            }
        }
    }

    /// How the model wants to be sampled, where the user does not say.
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// How the model embeds texts, where the files of sentence-transformers say.
    pub fn embedding(&self) -> Option<TextEmbedding> {
        self.embedding
    }

    /// The shorter vectors of texts that the model was trained for.
    pub fn shorter_vectors(&self) -> &ShorterVectors {
        &self.shorter_vectors
    }

    /// The tokens that end a text: what `generation_config.json` says, else what configuration and tokenizer say.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// The program of the model; see [`crate::step`] for its inputs, states and outputs.
    ///
    /// # Errors
    /// If the options are not possible, such as activations that are not floats.
    pub fn program(&self, options: &ProgramOptions) -> Result<Program> {
        Ok(tensors::program(&self.config, *options, self.naming, &*self.weights)?.0)
    }

    fn check(&self) -> Result<()> {
        let options = ProgramOptions::default();
        let (_, wanted) = tensors::program(&self.config, options, self.naming, &*self.weights)?;
        tensors::refuse_others(&self.config, self.naming, &*self.weights, &wanted)?;
        let tokens = self.tokenizer.as_ref().map_or(0, Tokenizer::vocabulary_size);
        if tokens > self.config.vocabulary {
            let (path, model) = (PathBuf::from(&self.name), self.config.vocabulary);
            return Err(ModelError::Vocabulary { path, tokenizer: tokens, model });
        }
        Ok(())
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let weights = self.weights.describe();
        f.debug_struct("Model").field("name", &self.name).field("weights", &weights).finish_non_exhaustive()
    }
}

impl Chat {
    fn new(path: &Path, templates: &[NamedTemplate], special_tokens: &[(String, String)]) -> Self {
        match ChatTemplate::with_names(templates, special_tokens) {
            Ok(template) => Self::Template(Box::new(template)),
            Err(error) => Self::Broken { path: path.to_owned(), source: Arc::new(error) },
        }
    }
}

fn default_template(source: String) -> NamedTemplate {
    NamedTemplate { name: "default".to_owned(), source }
}

/// The configuration of a preset or of a file.
fn config_named(name: &str) -> Result<DecoderConfig> {
    let config = |path: PathBuf, source| ModelError::Config { path, source };
    if let Some(preset) = Preset::from_name(name) {
        return preset.config().map_err(|source| config(name.into(), source));
    }
    let mut path = PathBuf::from(name);
    if path.is_dir() {
        path.push("config.json");
    }
    if !path.is_file() {
        let presets = Preset::ALL.iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ");
        return Err(ModelError::UnknownPreset { name: name.to_owned(), presets });
    }
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        return Err(ModelError::NoConfiguration { path });
    }
    DecoderConfig::from_json_bytes(&read(&path)?).map_err(|source| config(path, source))
}

/// The tokenizer that a GGUF file carries. A `tokenizer.json` beside it steps in if there is none or its kind is not
/// supported; it does not win, because a folder of downloads may hold the files of several models.
fn gguf_tokenizer(files: &ModelFiles, path: &Path, file: &GgufFile) -> Result<Option<Tokenizer>> {
    let embedded = match file.metadata().value("tokenizer.ggml.model") {
        Some(_) => Some(Tokenizer::from_gguf(file.vocabulary()?)),
        None => None,
    };
    let source = match embedded {
        Some(Ok(tokenizer)) => return Ok(Some(tokenizer)),
        None => return Ok(beside_tokenizer(files)?.map(|(tokenizer, _)| tokenizer)),
        Some(Err(source)) => source,
    };
    if matches!(source, TokenizerError::UnknownModel { .. } | TokenizerError::UnknownPreTokenizer { .. })
        && let Some((tokenizer, _)) = beside_tokenizer(files)?
    {
        return Ok(Some(tokenizer));
    }
    Err(ModelError::Tokenizer { path: path.to_owned(), source })
}

/// The tokenizer in `tokenizer.json`, and what `tokenizer_config.json` says about it.
fn beside_tokenizer(files: &ModelFiles) -> Result<Option<(Tokenizer, TokenizerConfig)>> {
    let wrong = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Tokenizer { path, source }
    };
    let Some(path) = &files.tokenizer else { return Ok(None) };
    let tokenizer = Tokenizer::from_json_bytes(&read(path)?).map_err(wrong(path))?;
    let config = match &files.tokenizer_config {
        Some(path) => TokenizerConfig::from_json_bytes(&read(path)?).map_err(wrong(path))?,
        None => TokenizerConfig::default(),
    };
    let id = |name: &str| config.special_token(name).and_then(|token| tokenizer.token_to_id(token));
    let (bos, eos) = (id("bos_token"), id("eos_token"));
    let tokenizer = tokenizer.with_bos_eos(bos, eos).map_err(wrong(path))?;
    Ok(Some((tokenizer, config)))
}

fn generation(files: &ModelFiles) -> Result<GenerationDefaults> {
    let Some(path) = &files.generation_config else { return Ok(GenerationDefaults::default()) };
    let wrong = |source| ModelError::Generation { path: path.clone(), source };
    GenerationDefaults::from_json_bytes(&read(path)?).map_err(wrong)
}

/// How the model embeds texts, if there is a `modules.json`. `hidden` is the width of its hidden states.
fn embedding(files: &ModelFiles, hidden: usize) -> Result<Option<TextEmbedding>> {
    let Some(path) = &files.modules else { return Ok(None) };
    let wrong = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Config { path, source }
    };
    let modules = Modules::from_json_bytes(&read(path)?).map_err(wrong(path))?;
    let beside = files.directory.join(&modules.pooling).join("config.json");
    let cached = files.directory.join(CACHED_POOLING);
    let path = if !beside.is_file() && cached.is_file() { cached } else { beside };
    modules.with_pooling(&read(&path)?, hidden).map(Some).map_err(wrong(&path))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let wrong = |source| ModelError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(wrong)?;
    let mut bytes = Vec::new();
    file.take(MOST_JSON_BYTES + 1).read_to_end(&mut bytes).map_err(wrong)?;
    if bytes.len() as u64 > MOST_JSON_BYTES {
        return Err(ModelError::TooLarge { path: path.to_owned(), most: MOST_JSON_BYTES });
    }
    Ok(bytes)
}

fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|error| ModelError::Read {
        path: path.to_owned(),
        source: std::io::Error::new(std::io::ErrorKind::InvalidData, error),
    })
}
