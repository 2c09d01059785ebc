//! Compilation of the C plugin of the tests.

use dsrun_test_support::compile_c_library;
use std::path::{Path, PathBuf};

/// Compiles `plugin.c` with these definitions into a folder.
pub(crate) fn plugin(folder: &Path, file: &str, definitions: &[&str]) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = folder.join(file);
    let mut arguments: Vec<String> = definitions.iter().map(|definition| format!("-D{definition}")).collect();
    arguments.push(format!("-I{}", manifest.join("include").display()));
    arguments.push(manifest.join("tests/support/plugin.c").display().to_string());
    compile_c_library(&library, arguments);
    library
}
