//! The manifest of a plugin, which describes it without running its code.

use crate::raw::{DSR_ABI_MAJOR, DSR_ABI_MINOR};
use dsrun_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::Read,
    path::{Component, Path, PathBuf},
};

/// The version of the manifest format.
const MANIFEST_VERSION: u32 = 1;
/// The maximum size of a manifest, so that a wrong file is not read into memory.
const MAX_BYTES: u64 = 64 * 1024;

/// The manifest of a plugin, `NAME.dsrun.toml`:
///
/// ```toml
/// manifest_version = 1
/// name = "example"                  # the name that users select it by
/// version = "0.3.1"
/// vendor = "Example"                # optional
/// description = "An example."       # optional
/// priority = 100                    # optional: in a folder, higher ones precede
/// default_rank = 100                # optional: the default backend where it finds a device
///
/// [abi]                             # the version it was built for
/// major = 0
/// minor = 2
///
/// [library]                         # OS_ARCHITECTURE = file, relative to the manifest
/// linux_amd64 = "libexample.so"
///
/// [requires]                        # optional
/// any_of = ["libdriver.so.1"]       # libraries of the system, one of which must exist
///
/// [conformance]                     # optional
/// report = "example.report.json"    # relative to the manifest
/// ```
///
/// Systems are `linux`, `macos`, `windows` and so on; architectures `amd64`, `arm64` and so on. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The version of the format: 1.
    pub manifest_version: u32,
    /// The name that users select the backend by.
    pub name: String,
    /// The version of the plugin.
    pub version: String,
    /// The vendor.
    pub vendor: Option<String>,
    /// A one-line description.
    pub description: Option<String>,
    /// The priority: in a folder, plugins of higher priority precede.
    #[serde(default)]
    pub priority: i32,
    /// The rank as the default: of the plugins with ranks above 0 that find a device, the one of the highest rank is the backend
    /// that is used if none is named.
    #[serde(default)]
    pub default_rank: i32,
    /// The version of the ABI that it was built for.
    pub abi: AbiVersion,
    /// The library of each platform, relative to the manifest.
    pub library: BTreeMap<String, PathBuf>,
    /// Its requirements on the system.
    pub requires: Option<Requires>,
    /// Its conformance report.
    pub conformance: Option<Conformance>,
}

/// A version of the plugin ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AbiVersion {
    /// The major version.
    pub major: u16,
    /// The minor version.
    pub minor: u16,
}

/// The requirements of a plugin on the system.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Requires {
    /// File names of libraries, one of which the system's loader must find.
    pub any_of: Vec<String>,
}

/// The conformance of a plugin.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Conformance {
    /// The report of the conformance suite, relative to the manifest.
    pub report: PathBuf,
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// If the file cannot be read, is not a manifest, or has another version.
    pub fn read(path: &Path) -> Result<Self> {
        let unreadable =
            |error: std::io::Error| Error::new(Code::Unavailable, format!("cannot be read: {error}"));
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        file.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(Error::invalid(format!("has more than {MAX_BYTES} bytes, too many for a manifest")));
        }
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        // The version is checked first, because another version may have other keys.
        #[derive(Deserialize)]
        struct Version {
            manifest_version: u32,
        }
        let wrong = |error: toml::de::Error| {
            Error::invalid(format!("is not a manifest: {}", error.to_string().trim_end()))
        };
        let Version { manifest_version } = toml::from_str(text).map_err(wrong)?;
        if manifest_version != MANIFEST_VERSION {
            let message = format!("is {manifest_version}, but this program reads {MANIFEST_VERSION}");
            return Err(Error::unsupported(message).at("manifest_version"));
        }
        let manifest: Self = toml::from_str(text).map_err(wrong)?;
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if manifest.name.is_empty() || !manifest.name.chars().all(is_part) {
            let message = format!(
                "backend name {:?} is invalid; use lower-case letters, digits and `-`",
                manifest.name
            );
            return Err(Error::invalid(message).at("name"));
        }
        Ok(manifest)
    }

    /// The library of this platform, for the manifest at `path`.
    ///
    /// # Errors
    /// If the manifest has none, or its path leads out of the folder of the manifest.
    pub fn library(&self, path: &Path) -> Result<PathBuf> {
        let platform = platform();
        let library = self.library.get(&platform).ok_or_else(|| {
            let there: Vec<&str> = self.library.keys().map(String::as_str).collect();
            let message = format!("has no library for {platform}, only for {}", there.join(", "));
            Error::new(Code::Unavailable, message).at("library")
        })?;
        let below = library.components().all(|part| matches!(part, Component::Normal(_)));
        if !below || library.as_os_str().is_empty() {
            let message = format!("{} must be a path below the folder of the manifest", library.display());
            return Err(Error::invalid(message).at("library").field(platform));
        }
        Ok(path.parent().unwrap_or(Path::new("")).join(library))
    }

    /// Checks the version, the library and the requirements before any code of the plugin runs. `find` looks up libraries of the
    /// system.
    ///
    /// # Errors
    /// Names the unmet requirement, with both versions or all libraries.
    pub(super) fn check(&self, library: &Path, find: &dyn Fn(&str) -> Result<(), String>) -> Result<()> {
        let AbiVersion { major, minor } = self.abi;
        if (major, minor) != (DSR_ABI_MAJOR, DSR_ABI_MINOR) {
            let message = format!(
                "is for version {major}.{minor} of the plugin ABI, this program speaks {DSR_ABI_MAJOR}.{DSR_ABI_MINOR}: \
                 use a plugin built for this version"
            );
            return Err(Error::new(Code::AbiMismatch, message));
        }
        if !library.is_file() {
            let message = format!("names {}, which does not exist", library.display());
            return Err(Error::new(Code::Unavailable, message).at("library"));
        }
        let Some(Requires { any_of }) = &self.requires else { return Ok(()) };
        if let Some(path) = any_of.iter().find(|name| name.is_empty() || name.contains(['/', '\\'])) {
            let message = format!("{path:?} must be the file name of a library, without a folder");
            return Err(Error::invalid(message).at("requires").field("any_of"));
        }
        let mut reasons = Vec::new();
        for name in any_of {
            match find(name) {
                Ok(()) => return Ok(()),
                Err(reason) => reasons.push(reason),
            }
        }
        let message =
            format!("needs one of {}, and none can be opened: {}", any_of.join(", "), reasons.join("; "));
        Err(Error::new(Code::Unavailable, message).at("requires"))
    }
}

/// The name of this platform in manifests.
fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}_{architecture}", std::env::consts::OS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn text(more: &str) -> String {
        format!(
            "manifest_version = 1\nname = \"example\"\nversion = \"0.3.1\"\n{more}\n[abi]\nmajor = 0\nminor = 2\n\
             [library]\n{} = \"libexample.so\"\n",
            platform()
        )
    }

    #[test]
    fn a_whole_manifest_reads() {
        let whole = text("vendor = \"v\"\ndescription = \"d\"\npriority = 7\ndefault_rank = 3")
            + "[requires]\nany_of = [\"liba.so\"]\n[conformance]\nreport = \"r.json\"\n";
        let manifest = Manifest::parse(&whole).unwrap();
        assert_eq!((manifest.name.as_str(), manifest.priority), ("example", 7));
        assert_eq!((manifest.default_rank, Manifest::parse(&text("")).unwrap().default_rank), (3, 0));
        let library = manifest.library(Path::new("/plugins/example.dsrun.toml")).unwrap();
        assert_eq!(library, Path::new("/plugins/libexample.so"));
        assert_eq!(Manifest::parse(&text("")).unwrap().priority, 0);
    }

    #[rstest]
    #[case::unknown_key(&text("colour = 1"), "colour")]
    #[case::unknown_key_in_a_table(&(text("") + "[requires]\nany_of = []\nall_of = []\n"), "all_of")]
    #[case::missing_key("manifest_version = 1\nname = \"a\"", "version")]
    #[case::other_version("manifest_version = 2\ncolour = 1", "manifest_version: is 2")]
    #[case::no_toml("]", "not a manifest")]
    #[case::name(&text("").replace("\"example\"", "\"Ex ample\""), "backend name")]
    fn wrong_manifests_are_refused(#[case] text: &str, #[case] part: &str) {
        let error = Manifest::parse(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }

    #[rstest]
    #[case("/etc/libexample.so")]
    #[case("../libexample.so")]
    #[case("")]
    fn libraries_stay_below_the_manifest(#[case] library: &str) {
        let manifest = Manifest::parse(&text("").replace("libexample.so", library)).unwrap();
        let error = manifest.library(Path::new("/plugins/example.dsrun.toml")).unwrap_err();
        assert_eq!(error.argument(), Some("library"), "{error}");
    }

    #[test]
    fn another_platform_is_named() {
        let manifest = Manifest::parse(&text("").replace(&platform(), "plan9_mips")).unwrap();
        let error = manifest.library(Path::new("x")).unwrap_err().to_string();
        assert!(error.contains(&platform()) && error.contains("plan9_mips"), "{error}");
    }

    #[test]
    fn version_library_and_requirements_are_checked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let none = |name: &str| Err(format!("{name}: no such file"));
        let check = |text: &str, find: &dyn Fn(&str) -> Result<(), String>| {
            Manifest::parse(text).unwrap().check(file.path(), find)
        };
        assert_eq!(check(&text(""), &none), Ok(()));
        let error = check(&text("").replace("minor = 2", "minor = 9"), &none).unwrap_err();
        assert_eq!(error.code(), Code::AbiMismatch);
        assert!(error.to_string().contains("0.9") && error.to_string().contains("0.2"), "{error}");

        let needs = text("") + "[requires]\nany_of = [\"liba.so\", \"libb.so\"]\n";
        let error = check(&needs, &none).unwrap_err().to_string();
        assert!(error.contains("liba.so: no such file") && error.contains("libb.so"), "{error}");
        assert_eq!(check(&needs, &|name| if name == "libb.so" { Ok(()) } else { none(name) }), Ok(()));

        let path = text("") + "[requires]\nany_of = [\"/tmp/liba.so\"]\n";
        assert!(check(&path, &|_| Ok(())).is_err());

        let gone =
            Manifest::parse(&text("")).unwrap().check(Path::new("/does/not/exist"), &none).unwrap_err();
        assert_eq!(gone.code(), Code::Unavailable);
    }
}
