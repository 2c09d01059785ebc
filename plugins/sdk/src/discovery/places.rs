//! The places that are searched for plugins.

use serde::Serialize;
use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The variable of files that replace all other places.
const FILES: &str = "DSRUN_BACKEND_FILES";
/// The variable of folders that precede the default ones.
const PATH: &str = "DSRUN_BACKEND_PATH";
/// The folder of plugins in each data folder.
const FOLDER: &str = "dsrun/backends.d";

/// Why a place is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The user names it.
    Argument,
    /// `DSRUN_BACKEND_FILES`.
    FilesVariable,
    /// `DSRUN_BACKEND_PATH`.
    PathVariable,
    /// It is beside the program.
    Program,
    /// It is in the data folder of the user.
    User,
    /// It is in a data folder of the system.
    System,
}

impl Origin {
    /// Writes the reason for people to read.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Argument => "named by the user",
            Self::FilesVariable => FILES,
            Self::PathVariable => PATH,
            Self::Program => "beside the program",
            Self::User => "the user's data folder",
            Self::System => "the system's data folder",
        }
    }
}

/// The places to search for plugins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Files of manifests and libraries.
    pub files: Vec<(Origin, PathBuf)>,
    /// Folders of manifests and libraries.
    pub folders: Vec<(Origin, PathBuf)>,
}

/// The environment that the places depend on.
pub(super) struct Surroundings<'a> {
    /// The value of a variable.
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Whether the program has more rights than its user.
    pub(super) privileged: bool,
    /// The file of the program.
    pub(super) program: Option<PathBuf>,
    /// The home folder of the user.
    pub(super) home: Option<PathBuf>,
}

impl Places {
    /// The places of this process, after files that the user names.
    pub fn of_process(named: impl IntoIterator<Item = PathBuf>) -> Self {
        Self::from_surroundings(
            named,
            &Surroundings {
                variable: &|name| env::var_os(name),
                privileged: is_privileged(),
                program: env::current_exe().ok().map(|path| path.canonicalize().unwrap_or(path)),
                home: env::home_dir(),
            },
        )
    }

    pub(super) fn from_surroundings(
        named: impl IntoIterator<Item = PathBuf>,
        surroundings: &Surroundings<'_>,
    ) -> Self {
        let variable = |name: &str| {
            let value = (surroundings.variable)(name).filter(|value| !value.is_empty());
            value.filter(|_| !surroundings.privileged)
        };
        let listed = |name, origin| {
            let split = |value: OsString| env::split_paths(&value).map(|path| (origin, path)).collect();
            variable(name).map(split)
        };
        let mut places = Self::default();
        places.files.extend(named.into_iter().map(|path| (Origin::Argument, path)));
        if let Some(files) = listed(FILES, Origin::FilesVariable) {
            let files: Vec<(Origin, PathBuf)> = files;
            places.files.extend(files);
            return places;
        }
        places.folders = listed(PATH, Origin::PathVariable).unwrap_or_default();
        // From `bin/dsrun` to `lib/dsrun/backends.d`.
        let prefix = surroundings.program.as_deref().and_then(Path::parent).and_then(Path::parent);
        places.folders.extend(prefix.map(|prefix| (Origin::Program, prefix.join("lib").join(FOLDER))));
        let data = variable("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = surroundings.home.as_deref().filter(|_| !surroundings.privileged);
        let data = data.or_else(|| Some(home?.join(".local/share")));
        places.folders.extend(data.map(|data| (Origin::User, data.join(FOLDER))));
        for system in ["/usr/local/share", "/usr/share"] {
            places.folders.push((Origin::System, Path::new(system).join(FOLDER)));
        }
        places
    }
}

/// The reason to skip a relative path: the value of a variable must not depend on the current directory.
pub(super) fn refuse_relative(origin: Origin, path: &Path) -> Option<String> {
    let refused = origin != Origin::Argument && !path.is_absolute();
    refused.then(|| "is relative, but plugins are never searched from the current directory".to_owned())
}

/// Whether the process has more rights than the user who started it, and therefore must not run code of the user's choice.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn is_privileged() -> bool {
    use std::ffi::c_ulong;
    unsafe extern "C" {
        fn getauxval(kind: c_ulong) -> c_ulong;
    }
    const AT_SECURE: c_ulong = 23;
    // SAFETY: reads a value that the kernel passed to the process at its start; any key is allowed.
    unsafe { getauxval(AT_SECURE) != 0 }
}

/// Whether the process has more rights than the user who started it, and therefore must not run code of the user's choice.
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
fn is_privileged() -> bool {
    unsafe extern "C" {
        fn issetugid() -> std::ffi::c_int;
    }
    // SAFETY: has no parameters and reads a flag of the process.
    unsafe { issetugid() != 0 }
}

/// Whether the process has more rights than the user who started it, which only Unix knows.
#[cfg(not(unix))]
fn is_privileged() -> bool {
    false
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn places(variables: &[(&str, &str)], privileged: bool) -> Places {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        };
        Places::from_surroundings(
            [PathBuf::from("x.so")],
            &Surroundings {
                variable: &variable,
                privileged,
                program: Some("/opt/dsrun/bin/dsrun".into()),
                home: Some("/home/user".into()),
            },
        )
    }

    fn folders(places: &Places) -> Vec<&str> {
        places.folders.iter().map(|(_, path)| path.to_str().unwrap()).collect()
    }

    #[test]
    fn folders_come_in_their_order() {
        let found = places(&[("DSRUN_BACKEND_PATH", "/a:/b"), ("XDG_DATA_HOME", "/data")], false);
        assert_eq!(found.files, [(Origin::Argument, "x.so".into())]);
        assert_eq!(
            folders(&found),
            [
                "/a",
                "/b",
                "/opt/dsrun/lib/dsrun/backends.d",
                "/data/dsrun/backends.d",
                "/usr/local/share/dsrun/backends.d",
                "/usr/share/dsrun/backends.d"
            ]
        );
    }

    #[test]
    fn the_home_folder_stands_in_for_the_data_folder() {
        for variables in [&[][..], &[("XDG_DATA_HOME", "")], &[("XDG_DATA_HOME", "relative")]] {
            let found = places(variables, false);
            assert!(folders(&found).contains(&"/home/user/.local/share/dsrun/backends.d"), "{found:?}");
        }
    }

    #[test]
    fn named_files_replace_all_folders() {
        let found = places(&[("DSRUN_BACKEND_FILES", "/a.so:/b.so"), ("DSRUN_BACKEND_PATH", "/a")], false);
        let files: Vec<&Path> = found.files.iter().map(|(_, path)| path.as_path()).collect();
        assert_eq!(files, [Path::new("x.so"), Path::new("/a.so"), Path::new("/b.so")]);
        assert!(found.folders.is_empty());
    }

    #[test]
    fn a_privileged_program_ignores_what_its_user_says() {
        let variables =
            [("DSRUN_BACKEND_FILES", "/a.so"), ("DSRUN_BACKEND_PATH", "/a"), ("XDG_DATA_HOME", "/data")];
        let found = places(&variables, true);
        assert_eq!(found.files, [(Origin::Argument, "x.so".into())]);
        assert_eq!(
            folders(&found),
            [
                "/opt/dsrun/lib/dsrun/backends.d",
                "/usr/local/share/dsrun/backends.d",
                "/usr/share/dsrun/backends.d"
            ]
        );
    }

    #[test]
    fn relative_paths_are_refused_unless_the_user_names_them() {
        assert!(refuse_relative(Origin::PathVariable, Path::new("plugins")).is_some());
        assert!(refuse_relative(Origin::FilesVariable, Path::new("")).is_some());
        assert!(refuse_relative(Origin::PathVariable, Path::new("/plugins")).is_none());
        assert!(refuse_relative(Origin::Argument, Path::new("plugins/x.so")).is_none());
    }

    #[test]
    fn this_test_is_not_privileged() {
        assert!(!is_privileged());
    }
}
