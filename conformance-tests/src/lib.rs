//! The conformance suite of dsrun: tests whether a device computes what the documentation of the ops defines.
//!
//! | module | contents |
//! |---|---|
//! | [`oracle`] | a second implementation of every op, in plain scalar f64, written from its documentation |
//! | [`gate`] | the allowed difference between device and oracle, with the derivation of each bound |
//! | [`verdict`] | the comparison of a result with the expected one |
//! | [`real`] | a float result of the oracle, with the sizes that its error scales with |
//! | [`float`](mod@float) | rounding to storage types |
//! | [`case`](mod@case) | a call with its inputs and expected results |
//! | [`cases`] | the case tables, one file per op family |
//! | [`checks`] | checks of behaviour that takes more than one call |
//! | [`subject`] | the backend under test |
//! | [`draw`] | random cases that can be replayed and simplified |
//! | [`program`] | the command line `dsrun-conformance` |
//! | [`random`] | seeded random numbers for the tables |
//! | [`runner`] | runs a case on a device and compares its results with the expected ones |
//! | [`suite`] | all cases and checks in groups, each found by its id |
//! | [`tensor`] | tensors in host memory, as bits |
//!
//! The oracle shares no code with any backend, so that only a mistake made twice goes unnoticed. To test a backend, open its
//! device as a [`subject::Subject`], and run the items of all [`suite::groups`] on it.

pub mod case;
pub mod cases;
pub mod checks;
pub mod draw;
pub mod float;
pub mod gate;
pub mod oracle;
pub mod program;
pub mod random;
pub mod real;
pub mod runner;
pub mod subject;
pub mod suite;
pub mod tensor;
pub mod verdict;
