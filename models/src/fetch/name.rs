//! Model names: what they may look like, and which cache folder each one owns.
//!
//! ```text
//! smollm2                              the default model
//! owner/name                           a model of the Hugging Face hub, branch `main`
//! owner/name@revision                  the same at a branch, tag or commit
//! owner/name:path/file.gguf            one GGUF file of it
//! owner/name:Q4_K_M                    its only GGUF file with weights of this type
//! owner/name@revision:path/file.gguf   both
//! https://huggingface.co/owner/name    the address of a model's page
//! ```
//!
//! Names become folders of the cache and parts of addresses, so every component is checked here, once: no
//! separators other than those above, no `.` or `..`, nothing hidden, no control characters.

use std::fmt;
use std::path::Path;

use super::error::FetchError;
use crate::gguf::parts::PartName;

/// The name of the default model.
pub const DEFAULT_MODEL: &str = "smollm2";

/// The branch the hub serves when no revision is named.
pub(crate) const MAIN: &str = "main";

/// The beginnings of the addresses of models' pages.
const HUB_PAGES: [&str; 2] = ["https://huggingface.co/", "https://hf.co/"];

/// Keeps the cache folder under the 255 bytes that file systems allow a name.
const MAX_NAME: usize = 200;

/// A well-formed model name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModelName {
    /// [`DEFAULT_MODEL`].
    SmolLm2,
    /// A repository of the hub.
    Hub(HubName),
}

/// A repository of the hub, a revision of it, and perhaps one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubName {
    pub(crate) owner: String,
    pub(crate) name: String,
    pub(crate) revision: String,
    pub(crate) file: Option<String>,
}

impl ModelName {
    pub(crate) fn parse(text: &str) -> Result<Self, FetchError> {
        let wrong = |reason: String| FetchError::name(text, reason);
        if text.is_empty() {
            return Err(wrong("it is empty".into()));
        }
        if text.len() > MAX_NAME {
            return Err(wrong(format!("it is longer than {MAX_NAME} bytes")));
        }
        if text == DEFAULT_MODEL {
            return Ok(Self::SmolLm2);
        }
        // The address of a page is a name with the hub in front.
        let text = HUB_PAGES.iter().find_map(|hub| text.strip_prefix(hub)).unwrap_or(text);
        let text = text.strip_suffix("/tree/main").unwrap_or(text).trim_end_matches('/');
        let (repository, file) = match text.split_once(':') {
            Some((repository, file)) => (repository, Some(file)),
            None => (text, None),
        };
        let (repository, revision) = match repository.split_once('@') {
            Some((repository, revision)) => (repository, revision),
            None => (repository, MAIN),
        };
        let Some((owner, name)) = repository.split_once('/') else {
            return Err(wrong(
                "no file, folder or built-in model is called so, and a hub name has an owner".into(),
            ));
        };
        for (part, what) in [(owner, "owner"), (name, "name")] {
            check_component(part).map_err(|reason| wrong(format!("the {what} {reason}")))?;
            // The hub reserves `--` for its own folder names; so do we, for ours.
            if part.contains("--") {
                return Err(wrong(format!("the {what} contains `--`")));
            }
        }
        check_path(revision).map_err(|reason| wrong(format!("the revision {reason}")))?;
        if let Some(file) = file {
            check_path(file).map_err(|reason| wrong(format!("the file {reason}")))?;
            if !has_extension(file, "gguf") && !is_weight_type(file) {
                return Err(wrong(
                    "only a .gguf file, or its type such as Q4_K_M, can be named after `:`".into(),
                ));
            }
        }
        Ok(Self::Hub(HubName {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        }))
    }

    /// The cache folder of this name: one path component, different for different names.
    pub(crate) fn folder(&self) -> String {
        match self {
            Self::SmolLm2 => DEFAULT_MODEL.to_owned(),
            Self::Hub(hub) => hub.folder(),
        }
    }
}

impl HubName {
    /// `owner/name`.
    pub(crate) fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    fn folder(&self) -> String {
        // `+`, `=` and `@` are in no component, so the text can be taken apart again: no two names share a
        // folder.
        let mut folder = format!("{}--{}", self.owner, self.name);
        if self.revision != MAIN {
            folder.push('@');
            folder.push_str(&self.revision.replace('/', "+"));
        }
        if let Some(file) = &self.file {
            folder.push('=');
            folder.push_str(&file.replace('/', "+"));
        }
        folder
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmolLm2 => formatter.write_str(DEFAULT_MODEL),
            Self::Hub(hub) => hub.fmt(formatter),
        }
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.owner, self.name)?;
        if self.revision != MAIN {
            write!(formatter, "@{}", self.revision)?;
        }
        match &self.file {
            Some(file) => write!(formatter, ":{file}"),
            None => Ok(()),
        }
    }
}

/// Whether `text` can only be meant as a path, so that a missing file is reported as such and never looked
/// for online.
pub(crate) fn is_plainly_a_path(text: &str) -> bool {
    let path = Path::new(text);
    path.is_absolute()
        || text == "."
        || text == ".."
        || ["./", "../", "~"].iter().any(|start| text.starts_with(start))
        || text.contains('\\')
        || text.ends_with('/')
        || (!text.contains(':')
            && ["gguf", "safetensors"].iter().any(|extension| has_extension(text, extension)))
}

/// Whether a text is the type of the weights of a GGUF file, as names of files have it: `Q4_K_M`, `IQ2_XXS`, `UD-Q4_K_XL`, `bf16`.
pub(crate) fn is_weight_type(text: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    let plain = upper.strip_prefix("UD-").unwrap_or(&upper);
    let digit = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    let known = ["IQ", "TQ", "Q"].iter().find_map(|start| plain.strip_prefix(start)).is_some_and(digit);
    let word = plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    word && (known || ["F32", "F16", "BF16"].contains(&plain) || plain.starts_with("MXFP4"))
}

/// Whether the path of a GGUF file says that its weights have this type: `model-Q4_K_M.gguf`, `model.q4_k_m.gguf`,
/// `Q4_K_M/model-Q4_K_M-00001-of-00002.gguf`.
pub(crate) fn has_weight_type(path: &str, wanted: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = match PartName::parse(file) {
        Some(part) => part.stem(),
        None => file.rsplit_once('.').map_or(file, |(stem, _)| stem),
    };
    let (stem, wanted) = (stem.to_ascii_uppercase(), wanted.to_ascii_uppercase());
    stem == wanted || stem.strip_suffix(&wanted).is_some_and(|before| before.ends_with(['-', '.', '_']))
}

/// Whether the file name ends in `.extension`, in any case.
pub(crate) fn has_extension(file: &str, extension: &str) -> bool {
    Path::new(file).extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// Checks a relative path of plain components separated by `/`.
pub(crate) fn check_path(path: &str) -> Result<(), String> {
    path.split('/').try_for_each(check_component)
}

fn check_component(part: &str) -> Result<(), String> {
    if part.is_empty() {
        return Err("is empty or has an empty part".into());
    }
    if part.starts_with('.') || part.ends_with('.') || part.starts_with('-') {
        return Err(format!("part `{part}` starts with `.` or `-`, or ends with `.`"));
    }
    match part.chars().find(|&c| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))) {
        Some(odd) => Err(format!("contains {odd:?}; letters, digits, `-`, `_` and `.` are allowed")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("smollm2", "smollm2")]
    #[case("a/b", "a--b")]
    #[case("a/b@main", "a--b")]
    #[case("Qwen/Qwen2.5-0.5B-Instruct@refs/pr/3", "Qwen--Qwen2.5-0.5B-Instruct@refs+pr+3")]
    #[case("a/b:q4/model.Q4_1.GGUF", "a--b=q4+model.Q4_1.GGUF")]
    #[case("a/b@v1.0:m.gguf", "a--b@v1.0=m.gguf")]
    #[case("a/b:Q4_K_M", "a--b=Q4_K_M")]
    #[case("https://huggingface.co/a/b", "a--b")]
    #[case("https://huggingface.co/a/b/tree/main", "a--b")]
    #[case("https://hf.co/a/b/", "a--b")]
    #[case("https://hf.co/a/b:Q4_K_M", "a--b=Q4_K_M")]
    fn names_own_one_folder_each(#[case] name: &str, #[case] folder: &str) {
        assert_eq!(ModelName::parse(name).unwrap().folder(), folder);
    }

    #[rstest]
    #[case("", "empty")]
    #[case("gpt2", "owner")]
    #[case("../etc", "starts with")]
    #[case("a/..", "starts with")]
    #[case("a/b/c", "contains '/'")]
    #[case("a--x/b", "--")]
    #[case("a/b@../../x", "starts with")]
    #[case("a/b@", "empty")]
    #[case("a/b@x//y", "empty part")]
    #[case("a/b:../m.gguf", "starts with")]
    #[case("a/b:/m.gguf", "empty part")]
    #[case("a/b:model.bin", ".gguf")]
    #[case("a/b\0", "'\\0'")]
    #[case("a/b c", "' '")]
    #[case("https://example.org/a/b", "owner")]
    #[case("a/b%2e", "'%'")]
    #[case("a\\b/c", "contains")]
    fn bad_names_are_refused(#[case] name: &str, #[case] reason: &str) {
        let message = ModelName::parse(name).unwrap_err().to_string();
        assert!(message.contains(reason), "{message}");
    }

    #[rstest]
    #[case("m-Q4_K_M.gguf", "Q4_K_M", true)]
    #[case("m.q4_k_m.gguf", "Q4_K_M", true)]
    #[case("Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "q4_k_m", true)]
    #[case("m-Q4_K_S.gguf", "Q4_K_M", false)]
    #[case("m-IQ4_XS.gguf", "Q4_XS", false)]
    #[case("m-BF16.gguf", "F16", false)]
    #[case("BF16.gguf", "bf16", true)]
    fn weight_types_are_found_in_names(#[case] file: &str, #[case] wanted: &str, #[case] found: bool) {
        assert!(is_weight_type(wanted));
        assert_eq!(has_weight_type(file, wanted), found);
    }

    #[test]
    fn long_names_are_refused_and_shown_short() {
        let message = ModelName::parse(&"x".repeat(100_000)).unwrap_err().to_string();
        assert!(message.contains("longer than") && message.len() < 600, "{message}");
    }

    #[rstest]
    #[case("./m", true)]
    #[case("/m", true)]
    #[case("m.gguf", true)]
    #[case("dir/m.SafeTensors", true)]
    #[case("a/b", false)]
    #[case("a/b:m.gguf", false)]
    #[case("smollm2", false)]
    fn paths_are_told_from_names(#[case] text: &str, #[case] path: bool) {
        assert_eq!(is_plainly_a_path(text), path);
    }

    proptest! {
        #[test]
        fn a_folder_is_always_one_plain_component(text in "[a-z0-9./@:_+=-]{0,24}") {
            if let Ok(name) = ModelName::parse(&text) {
                let folder = name.folder();
                prop_assert!(!folder.contains(['/', '\\']) && !folder.starts_with('.'), "{folder}");
                prop_assert_eq!(ModelName::parse(&name.to_string()).unwrap(), name);
            }
        }

        #[test]
        fn different_names_have_different_folders(a in "[ab]/[ab](@[ab](/[ab]){0,1}){0,1}(:[ab]/{0,1}[ab][.]gguf){0,1}",
                                                  b in "[ab]/[ab](@[ab](/[ab]){0,1}){0,1}(:[ab]/{0,1}[ab][.]gguf){0,1}") {
            let (a, b) = (ModelName::parse(&a).unwrap(), ModelName::parse(&b).unwrap());
            prop_assert_eq!(a == b, a.folder() == b.folder());
        }
    }
}
