//! What a test may need, and which of it `DSRUN_REQUIRE` asks for.

use std::{env, fmt};

/// The environment variable that lists the requirements whose absence fails a test.
pub const REQUIRE: &str = "DSRUN_REQUIRE";

/// The result of a test that may lack something: return `Err` with `?` to have it ignored, or failed if it is required.
pub type TestResult = Result<(), Missing>;

/// Something that a test needs and a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// A device of a GPU backend.
    Gpu,
    /// An adapter of Vulkan, Metal or Direct3D 12; one that computes on the CPU will do.
    Adapter,
    /// The default model's weights.
    Model,
    /// NVRTC, which compiles CUDA kernels without a GPU.
    Nvrtc,
    /// A browser that can be driven, for the server's page.
    Browser,
    /// A Python interpreter with the clients of the server's tests.
    Python,
    /// Node.js with the clients of the server's tests.
    Node,
    /// Real encoders.
    Encoders,
}

impl Requirement {
    /// All requirements, in the order in which messages list them.
    pub const ALL: [Self; 8] = [
        Self::Gpu,
        Self::Adapter,
        Self::Model,
        Self::Nvrtc,
        Self::Browser,
        Self::Python,
        Self::Node,
        Self::Encoders,
    ];

    /// The word that `DSRUN_REQUIRE` has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Adapter => "adapter",
            Self::Model => "model",
            Self::Nvrtc => "nvrtc",
            Self::Browser => "browser",
            Self::Python => "python",
            Self::Node => "node",
            Self::Encoders => "encoders",
        }
    }

    /// How to get it, as an instruction.
    fn remedy(self) -> &'static str {
        match self {
            Self::Gpu => "run the tests on a machine with a supported GPU and its driver",
            Self::Adapter => {
                "install a Vulkan driver; Debian's `mesa-vulkan-drivers` has one that needs no GPU"
            }
            Self::Model => {
                "set DSRUN_TEST_MODEL to the path that `cargo run -p dsrun -- pull smollm2` prints"
            }
            Self::Nvrtc => {
                "`pip install 'nvidia-cuda-nvrtc>=13,<14'` and set DSRUN_CUDA_LIBRARIES to its `lib` folder"
            }
            Self::Browser => "install chromium, or set DSRUN_TEST_BROWSER to a browser of its family",
            Self::Python | Self::Node => {
                "`.ci/clients COMMAND` installs the clients of the tests and runs a command that finds them"
            }
            Self::Encoders => {
                "set DSRUN_TEST_ENCODERS to the folder that engine/tests/data/real_encoders.py has made"
            }
        }
    }

    /// The error of a test that lacks it; `reason` says in a few words what is not there.
    pub fn missing(self, reason: impl fmt::Display) -> Missing {
        Missing { requirement: Some(self), reason: reason.to_string(), detail: None }
    }
}

/// Why a test cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    requirement: Option<Requirement>,
    reason: String,
    detail: Option<String>,
}

impl Missing {
    /// A circumstance that no word of `DSRUN_REQUIRE` stands for, such as the rights of the user: the test is always ignored.
    pub fn circumstance(reason: impl fmt::Display) -> Self {
        Self { requirement: None, reason: reason.to_string(), detail: None }
    }

    /// Adds what only a failure shows, such as the places that were searched.
    pub fn with_detail(self, detail: impl fmt::Display) -> Self {
        Self { detail: Some(detail.to_string()), ..self }
    }

    /// Why the test fails rather than being ignored, given the requirements that are enforced.
    pub(crate) fn failure(&self, required: &[Requirement]) -> Option<String> {
        let requirement = self.requirement.filter(|requirement| required.contains(requirement))?;
        let (name, reason, remedy) = (requirement.name(), &self.reason, requirement.remedy());
        let detail = self.detail.iter().map(|detail| format!("\n{detail}")).collect::<String>();
        Some(format!("{REQUIRE} asks for `{name}`, which is missing: {reason}{detail}\nhint: {remedy}"))
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.requirement {
            Some(requirement) => write!(f, "needs {}: {}", requirement.name(), self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

/// The requirements that `DSRUN_REQUIRE` lists; the error says which word is unknown.
pub(crate) fn required() -> Result<Vec<Requirement>, String> {
    match env::var(REQUIRE) {
        Ok(list) => parse(&list),
        Err(env::VarError::NotPresent) => Ok(Vec::new()),
        Err(env::VarError::NotUnicode(value)) => {
            Err(format!("{REQUIRE} is not Unicode: {}", value.display()))
        }
    }
}

/// Reads words with commas between them; empty words count for nothing.
fn parse(list: &str) -> Result<Vec<Requirement>, String> {
    let words = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    words
        .map(|word| {
            Requirement::ALL.into_iter().find(|requirement| requirement.name() == word).ok_or_else(|| {
                let names = Requirement::ALL.map(Requirement::name).join(", ");
                format!("{REQUIRE}={list}: `{word}` is unknown; the words are {names}")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", &[])]
    #[case("gpu", &[Requirement::Gpu])]
    #[case("adapter,model,nvrtc,browser,python,node,encoders", &Requirement::ALL[1..])]
    #[case(" python , model,", &[Requirement::Python, Requirement::Model])]
    fn a_list_is_read(#[case] list: &str, #[case] expected: &[Requirement]) {
        assert_eq!(parse(list).unwrap(), expected);
    }

    #[rstest]
    #[case("models")]
    #[case("GPU")]
    #[case("gpu model")]
    #[case("model;nvrtc")]
    fn an_unknown_word_is_refused_with_the_words_there_are(#[case] list: &str) {
        let error = parse(list).unwrap_err();
        assert!(
            error.contains(&format!("`{list}`")) && error.contains("gpu, adapter, model, nvrtc"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_requirement_fails_a_test_only_where_it_is_required() {
        let missing =
            Requirement::Model.missing("DSRUN_TEST_MODEL is not set").with_detail("nor found in a cache");
        assert_eq!(missing.to_string(), "needs model: DSRUN_TEST_MODEL is not set");
        assert_eq!(missing.failure(&[]), None);
        assert_eq!(missing.failure(&[Requirement::Gpu]), None);
        let failure = missing.failure(&[Requirement::Gpu, Requirement::Model]).unwrap();
        for part in
            ["asks for `model`", "DSRUN_TEST_MODEL is not set", "nor found in a cache", "pull smollm2"]
        {
            assert!(failure.contains(part), "{failure}");
        }
    }

    #[test]
    fn a_circumstance_never_fails_a_test() {
        let missing = Missing::circumstance("root may write to read-only folders");
        assert_eq!(missing.to_string(), "root may write to read-only folders");
        assert_eq!(missing.failure(&Requirement::ALL), None);
    }
}
