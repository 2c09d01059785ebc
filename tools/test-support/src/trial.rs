//! Test functions as trials that can be ignored at run time.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::requirement::{Missing, Requirement, TestResult, required};

/// What a test function may return: nothing, or a [`TestResult`].
pub trait IntoTestResult {
    /// The value as a [`TestResult`].
    fn into_test_result(self) -> TestResult;
}

impl IntoTestResult for () {
    fn into_test_result(self) -> TestResult {
        Ok(())
    }
}

impl IntoTestResult for TestResult {
    fn into_test_result(self) -> TestResult {
        self
    }
}

/// Makes a trial of a test function, which fails by panicking.
pub fn trial<R: IntoTestResult>(name: impl Into<String>, test: impl FnOnce() -> R + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || match test().into_test_result() {
        Ok(()) => Ok(Completion::Completed),
        Err(missing) => missing.outcome(),
    })
}

impl Missing {
    /// The outcome of a test that lacks this: ignored, or failed if `DSRUN_REQUIRE` asks for it.
    pub fn outcome(&self) -> Result<Completion, Failed> {
        self.outcome_given(&required()?)
    }

    fn outcome_given(&self, required: &[Requirement]) -> Result<Completion, Failed> {
        match self.failure(required) {
            Some(failure) => Err(failure.into()),
            None => Ok(Completion::ignored_with(self)),
        }
    }
}

/// Runs trials as the command line of the test binary says.
pub fn run(trials: Vec<Trial>) -> ExitCode {
    if let Err(error) = required() {
        #[allow(
            clippy::print_stderr,
            reason = "standard error is where a test binary reports why it cannot start"
        )]
        {
            eprintln!("error: {error}");
        }
        return ExitCode::FAILURE;
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Defines the `main` of a test binary that has `harness = false`: it runs the functions listed, under their names. A function
/// may have attributes, such as `#[cfg(unix)]`, in the list as well.
#[macro_export]
macro_rules! test_main {
    ($($(#[$attribute:meta])* $test:ident),+ $(,)?) => {
        fn main() -> ::std::process::ExitCode {
            $crate::run(vec![$($(#[$attribute])* $crate::trial(stringify!($test), $test)),+])
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_requirement_is_ignored_with_its_reason_or_fails() {
        let missing = Requirement::Gpu.missing("no device");
        match missing.outcome_given(&[Requirement::Model]) {
            Ok(Completion::Ignored { reason }) => assert_eq!(reason.unwrap(), "needs gpu: no device"),
            Ok(Completion::Completed) => panic!("the test counts as passed"),
            Err(failed) => panic!("{failed:?}"),
        }
        let failed = missing.outcome_given(&[Requirement::Gpu]).err().unwrap();
        assert!(failed.message().unwrap().contains("no device"), "{failed:?}");
    }
}
