//! Compiles the backend in C, `plugins/example-c`, as its Makefile does.

use std::{
    fs,
    path::{Path, PathBuf},
};

use dsrun_test_support::compile_c_library;

/// The library, compiled anew into `folder`.
pub(crate) fn build(folder: &Path) -> PathBuf {
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
    let mut arguments = vec!["-O3".into(), "-I".into(), root.join("plugins/sdk/include")];
    arguments.extend(sources);
    arguments.push("-lm".into());
    compile_c_library(&library, arguments);
    library
}
