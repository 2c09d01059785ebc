//! Requirements of tests: a test that needs something this machine lacks is ignored with a reason, or fails where the
//! environment variable `DSRUN_REQUIRE` asks for it.
//!
//! `DSRUN_REQUIRE=model,nvrtc` turns a missing model and a missing NVRTC into failures that say how to get them. The words
//! are those of [`Requirement`]; any other word is an error.
//!
//! Rust's own test harness cannot ignore a test at run time, so a test binary with requirements has `harness = false` in its
//! manifest and [`test_main!`] in its source. Its tests are functions that return a [`TestResult`]:
//!
//! ```
//! use dsrun_test_support::{TestResult, model, test_main};
//!
//! test_main![the_model_opens, one_and_one_are_two];
//!
//! fn the_model_opens() -> TestResult {
//!     let path = model()?;
//!     assert!(path.exists());
//!     Ok(())
//! }
//!
//! fn one_and_one_are_two() {
//!     assert_eq!(1 + 1, 2);
//! }
//! ```
//!
//! [`faulty_device`] has a device whose calls can be made to fail, to panic or to wait; a [`FrontDevice`] does a part of a device's work
//! in another way, an [`AnsweringDevice`] says otherwise what it supports; [`fuzz`] runs tests with mutated inputs;
//! [`counting_allocator`] measures memory.

mod compiler;
pub mod counting_allocator;
pub mod faulty_device;
mod front_device;
pub mod fuzz;
mod lookup;
mod port;
mod requirement;
mod trial;

pub use compiler::{c_compiler, compile_c_library, cpp_compiler};
pub use front_device::{AnsweringDevice, Front, FrontDevice};
pub use lookup::{NodePackages, browser, encoders, model, node, python};
pub use port::free_port;
pub use requirement::{Missing, REQUIRE, Requirement, TestResult};
pub use trial::{IntoTestResult, run, trial};
