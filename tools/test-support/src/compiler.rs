//! C and C++ compilers for tests of the plugin ABI.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
    process::Command,
};

use crate::{lookup::starts, requirement::Missing};

/// The C compiler: the one that `CC` names, or `cc`.
///
/// # Panics
///
/// If it does not start: building dsrun needs a C compiler, so its absence is an error.
pub fn c_compiler() -> OsString {
    let compiler = named("CC", "cc");
    if let Err(problem) = starts(&compiler) {
        panic!("the C compiler `{}` {problem}; install one, or name it in CC", compiler.display());
    }
    compiler
}

/// The C++ compiler: the one that `CXX` names, or `c++`.
pub fn cpp_compiler() -> Result<OsString, Missing> {
    let compiler = named("CXX", "c++");
    match starts(&compiler) {
        Ok(()) => Ok(compiler),
        Err(problem) => {
            Err(Missing::circumstance(format!("the C++ compiler `{}` {problem}", compiler.display())))
        }
    }
}

/// Compiles C into a shared library, with every warning an error.
///
/// `arguments` are the sources, and what else the compiler is to be told: definitions, include folders, libraries.
///
/// # Panics
///
/// If the sources do not compile, or if there is no C compiler.
pub fn compile_c_library<A: AsRef<OsStr>>(library: &Path, arguments: impl IntoIterator<Item = A>) {
    let output = Command::new(c_compiler())
        .args(["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror"])
        .args(["-shared", "-fPIC", "-fvisibility=hidden", "-o"])
        .arg(library)
        .args(arguments)
        .output();
    match output {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => panic!("the C compiler cannot be started: {error}"),
    }
}

/// The program that an environment variable names, or the usual one.
fn named(variable: &str, usual: &str) -> OsString {
    env::var_os(variable).filter(|value| !value.is_empty()).unwrap_or_else(|| usual.into())
}
