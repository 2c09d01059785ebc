//! Examples, which cargo has built if all tests were asked for, and otherwise builds now.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// The file that cargo makes of an example of this package.
pub(crate) fn example(name: &str, file: &str) -> PathBuf {
    let program = env::current_exe().expect("a test is a program");
    let profile = program.parent().and_then(Path::parent).expect("it is in the target folder");
    let built = profile.join("examples").join(file);
    if !built.exists() {
        let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--package", "dsrun-conformance", "--example", name])
            .arg("--target-dir")
            .arg(profile.parent().expect("the target folder"))
            .args((!cfg!(debug_assertions)).then_some("--release"))
            .status();
        assert!(status.is_ok_and(|status| status.success()), "example {name} could not be built");
    }
    built
}
