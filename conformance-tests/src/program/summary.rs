//! All results of a run, with the conditions under which they were obtained.

use super::{
    backend::Identity,
    record::{Outcome, Record},
};
use anyhow::{Context, Result};
use dsrun_plugin_sdk::raw::{DSR_ABI_MAJOR, DSR_ABI_MINOR};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, fmt::Write, fs::File, io, path::Path, path::PathBuf, time::Duration};

/// The version of the JSON format, increased by every incompatible change.
const SCHEMA: u32 = 1;

/// The results of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    schema: u32,
    suite: Suite,
    backend: Backend,
    device: Device,
    /// Names of the profiles that were required.
    pub(crate) profiles: Vec<String>,
    seed: u64,
    /// Number of random cases for each op and element type.
    drawn: usize,
    /// Number of cases that ran again after all had run.
    soaked: usize,
    pub(crate) seconds: f64,
    pub(crate) passed: bool,
    pub(crate) counts: BTreeMap<&'static str, usize>,
    pub(crate) cases: Vec<Record>,
}

#[derive(Debug, Serialize)]
struct Suite {
    version: &'static str,
    abi: String,
}

#[derive(Debug, Serialize)]
struct Backend {
    name: String,
    version: String,
    library: Option<Library>,
}

#[derive(Debug, Serialize)]
struct Library {
    path: PathBuf,
    sha256: String,
}

#[derive(Debug, Serialize)]
struct Device {
    index: usize,
    name: String,
    claims: Vec<String>,
    dtypes: Vec<String>,
    /// Guarantees that it does not give.
    unclaimed: Vec<String>,
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) profiles: &'a [dsrun_core::op::Profile],
    pub(crate) device: usize,
    pub(crate) seed: u64,
    pub(crate) drawn: usize,
    pub(crate) soaked: usize,
}

impl Summary {
    /// Collects the results.
    ///
    /// # Errors
    /// If the library cannot be read.
    pub(crate) fn new(
        asked: Asked<'_>,
        identity: Identity,
        cases: Vec<Record>,
        took: Duration,
    ) -> Result<Self> {
        let library =
            identity.library.map(|path| Ok::<_, anyhow::Error>(Library { sha256: sha256(&path)?, path }));
        let count = |outcome: Outcome| cases.iter().filter(|record| record.status == outcome).count();
        Ok(Self {
            schema: SCHEMA,
            suite: Suite {
                version: env!("CARGO_PKG_VERSION"),
                abi: format!("{DSR_ABI_MAJOR}.{DSR_ABI_MINOR}"),
            },
            backend: Backend {
                name: identity.name,
                version: identity.version,
                library: library.transpose()?,
            },
            device: Device {
                index: asked.device,
                name: identity.device,
                claims: identity.profiles,
                dtypes: identity.dtypes,
                unclaimed: identity.unclaimed,
            },
            profiles: asked.profiles.iter().map(|profile| profile.name().to_owned()).collect(),
            seed: asked.seed,
            drawn: asked.drawn,
            soaked: asked.soaked,
            seconds: took.as_secs_f64(),
            passed: !cases.iter().any(Record::is_failure),
            counts: Outcome::ALL.map(|outcome| (outcome.name(), count(outcome))).into(),
            cases,
        })
    }

    /// One line with the number of cases and of each outcome.
    pub(crate) fn total(&self) -> String {
        let counted: Vec<String> = Outcome::ALL
            .iter()
            .filter_map(|outcome| {
                let count = self.counts.get(outcome.name()).copied().unwrap_or(0);
                (count > 0).then(|| format!("{count} {}", outcome.name()))
            })
            .collect();
        let soaked = match self.soaked {
            0 => String::new(),
            soaked => format!(", and {soaked} again with other seeds"),
        };
        format!("{} cases in {:.1} s{soaked}: {}", self.cases.len(), self.seconds, counted.join(", "))
    }

    /// One line with backend, device, profiles and seed, without the path of the library.
    pub(crate) fn conditions(&self) -> String {
        let Backend { name, version, .. } = &self.backend;
        let (device, profiles) = (&self.device.name, self.profiles.join(", "));
        let Suite { version: suite, abi } = &self.suite;
        format!(
            "{name} {version} on {device}, tested for {profiles} by suite {suite} (ABI {abi}), seed {}, {} random cases for each op and \
             element type",
            self.seed, self.drawn
        )
    }

    /// One line with the guarantees that the device does not give; `None` if it gives all.
    pub(crate) fn unclaimed(&self) -> Option<String> {
        let unclaimed = &self.device.unclaimed;
        (!unclaimed.is_empty()).then(|| format!("not claimed, and not tested: {}", unclaimed.join("; ")))
    }

    /// One line with the backend and the device.
    pub(crate) fn subject(&self) -> String {
        let Backend { name, version, library } = &self.backend;
        let library =
            library.as_ref().map_or_else(|| "linked in".into(), |library| library.path.display().to_string());
        format!("{name} {version} ({library}) on {}", self.device.name)
    }
}

fn sha256(path: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    io::copy(&mut file, &mut digest)?;
    let mut text = String::new();
    for byte in digest.finalize() {
        write!(text, "{byte:02x}")?;
    }
    Ok(text)
}
