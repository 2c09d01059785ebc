//! Compiles the backend in C, `plugins/example-c`, as its Makefile does.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The library, compiled anew into `folder`; `None`, with a printed reason, if there is no C compiler.
#[allow(clippy::print_stdout, reason = "a test that skips says why")]
pub(crate) fn build(folder: &Path) -> Option<PathBuf> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|folder| folder.join("plugins").exists());
    let root = root.expect("the repository has plugins");
    let example = root.join("plugins/example-c");
    let mut sources: Vec<PathBuf> = fs::read_dir(example.join("src"))
        .expect("the example has sources")
        .map(|entry| entry.expect("the folder can be listed").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    fs::create_dir_all(folder).expect("a folder for the library can be made");
    let library = folder.join("libdsrun_backend_example_c.so");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-O3", "-Wall", "-Wextra", "-pedantic", "-Werror"])
        .args(["-shared", "-fPIC", "-fvisibility=hidden", "-o"])
        .arg(&library)
        .arg("-I")
        .arg(root.join("core/include"))
        .args(&sources)
        .arg("-lm")
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
