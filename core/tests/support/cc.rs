//! Compiles the C plugin of the loader's tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Compiles `plugin.c` with these definitions into a folder; `None`, with a printed reason, if there is no C compiler.
#[allow(clippy::print_stdout, reason = "a test that skips says why")]
pub(crate) fn plugin(folder: &Path, file: &str, definitions: &[&str]) -> Option<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let library = folder.join(file);
    let output = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-o"])
        .arg(&library)
        .args(definitions.iter().map(|definition| format!("-D{definition}")))
        .arg("-I")
        .arg(manifest.join("include"))
        .arg(manifest.join("tests/support/plugin.c"))
        .output();
    match output {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            println!("skipped: the C compiler {} cannot be started: {error}", compiler.to_string_lossy());
            None
        }
    }
}
