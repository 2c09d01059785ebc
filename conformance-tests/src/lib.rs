//! The conformance suite of dsrun: says whether a device computes what the op documents say.
//!
//! | module | holds |
//! |---|---|
//! | [`oracle`] | every op once more, in plain scalar f64, written from its document |
//! | [`gate`] | how far a device may be from the oracle, with the argument for each bound |
//! | [`case`](mod@case) | a call with its inputs and what has to come out |
//! | [`cases`] | the case tables, one file per op family |
//! | [`checks`] | checks of behaviour, which need more than one call |
//! | [`subject`] | the backend under test |
//! | [`random`] | seeded numbers for the tables |
//! | [`runner`] | runs a case on a device and judges the result |
//! | [`tensor`] | tensors in host memory, as bits |
//!
//! The oracle shares no code with any backend: a mistake has to be made twice to stay unseen. To test a backend, open
//! devices, take the [`cases::TABLES`], and [`runner::run`] every case.

pub mod case;
pub mod cases;
pub mod checks;
pub mod draw;
pub mod gate;
pub mod oracle;
pub mod program;
pub mod random;
pub mod runner;
pub mod subject;
pub mod suite;
pub mod tensor;
