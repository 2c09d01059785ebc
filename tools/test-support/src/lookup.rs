//! Where tests find the default model, a browser and clients.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::requirement::{Missing, Requirement};

/// The file that the tests on real weights are written for.
const MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The default model's file: `DSRUN_TEST_MODEL` names it, or the folder that holds it.
///
/// # Panics
///
/// If the variable is set and leads to no file.
pub fn model() -> Result<PathBuf, Missing> {
    let Some(path) = variable("DSRUN_TEST_MODEL") else {
        return Err(Requirement::Model.missing("DSRUN_TEST_MODEL is not set"));
    };
    Ok(model_file(Path::new(&path)))
}

fn model_file(path: &Path) -> PathBuf {
    let file = if path.is_dir() { path.join(MODEL_FILE) } else { path.to_path_buf() };
    assert!(file.is_file(), "DSRUN_TEST_MODEL leads to {}, which is not a file", file.display());
    file
}

/// The folder of real encoders: `DSRUN_TEST_ENCODERS` names it.
///
/// # Panics
///
/// If the variable is set and leads to no folder.
pub fn encoders() -> Result<PathBuf, Missing> {
    let Some(path) = variable("DSRUN_TEST_ENCODERS") else {
        return Err(Requirement::Encoders.missing("DSRUN_TEST_ENCODERS is not set"));
    };
    let folder = PathBuf::from(path);
    assert!(folder.is_dir(), "DSRUN_TEST_ENCODERS leads to {}, which is not a folder", folder.display());
    Ok(folder)
}

/// A Python interpreter with the clients of the server's tests: the one that `DSRUN_TEST_PYTHON` names.
///
/// # Panics
///
/// If the variable is set and its interpreter cannot import the package.
pub fn python() -> Result<PathBuf, Missing> {
    let Some(python) = variable("DSRUN_TEST_PYTHON") else {
        return Err(Requirement::Python.missing("DSRUN_TEST_PYTHON is not set"));
    };
    let output = Command::new(&python).args(["-c", "import openai"]).output();
    let problem = match output {
        Ok(output) if output.status.success() => return Ok(python.into()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    panic!("DSRUN_TEST_PYTHON={} cannot import the package openai: {problem}", python.display());
}

/// Node.js, and where its packages are.
#[derive(Debug)]
pub struct NodePackages {
    /// The program.
    pub program: PathBuf,
    /// The folder that has `node_modules`.
    pub folder: PathBuf,
}

/// Node.js with the clients of the server's tests: `DSRUN_TEST_NODE` names the folder of its packages. The program is beside the one
/// that `DSRUN_TEST_PYTHON` names, or on the path.
///
/// # Panics
///
/// If the variable is set and its folder has no packages, or no program starts.
pub fn node() -> Result<NodePackages, Missing> {
    let Some(folder) = variable("DSRUN_TEST_NODE") else {
        return Err(Requirement::Node.missing("DSRUN_TEST_NODE is not set"));
    };
    let folder = PathBuf::from(folder);
    let packages = folder.join("node_modules");
    assert!(packages.is_dir(), "DSRUN_TEST_NODE={}: it has no packages", folder.display());
    let beside = variable("DSRUN_TEST_PYTHON").map(|python| Path::new(&python).with_file_name("node"));
    let program = beside.filter(|program| program.is_file()).unwrap_or_else(|| "node".into());
    if let Err(problem) = starts(program.as_os_str()) {
        panic!("DSRUN_TEST_NODE is set, but {}: {problem}", program.display());
    }
    Ok(NodePackages { program, folder })
}

/// A browser of chromium's family: the one that `DSRUN_TEST_BROWSER` names, or `chromium` on the path.
///
/// # Panics
///
/// If the variable is set and its program does not start.
pub fn browser() -> Result<PathBuf, Missing> {
    match variable("DSRUN_TEST_BROWSER") {
        Some(browser) => match starts(&browser) {
            Ok(()) => Ok(browser.into()),
            Err(problem) => panic!("DSRUN_TEST_BROWSER={}: {problem}", browser.display()),
        },
        None => match starts("chromium".as_ref()) {
            Ok(()) => Ok("chromium".into()),
            Err(problem) => Err(Requirement::Browser
                .missing(format!("DSRUN_TEST_BROWSER is not set, and `chromium`: {problem}"))),
        },
    }
}

/// Whether `PROGRAM --version` runs; the error says why it does not.
pub(crate) fn starts(program: &OsStr) -> Result<(), String> {
    let status = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`--version` ended with {status}")),
        Err(error) => Err(format!("cannot be started: {error}")),
    }
}

/// The value of an environment variable, if it is set and not empty.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_model_is_a_file_or_the_folder_that_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(MODEL_FILE);
        fs::write(&file, "weights").unwrap();
        assert_eq!(model_file(&file), file);
        assert_eq!(model_file(folder.path()), file);
    }

    #[test]
    #[should_panic(expected = "is not a file")]
    fn a_model_path_that_leads_nowhere_is_no_reason_to_ignore_a_test() {
        model_file(Path::new("/does/not/exist"));
    }

    #[test]
    fn a_program_that_is_not_there_is_reported() {
        let problem = starts("/does/not/exist".as_ref()).unwrap_err();
        assert!(problem.contains("cannot be started"), "{problem}");
    }
}
