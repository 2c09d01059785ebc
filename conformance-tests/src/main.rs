//! Tests a backend with the conformance suite: `dsrun-conformance run PATH --profile llm-core-1`.

use dsrun_candle::CandleBackend;
use dsrun_cpu::CpuBackend;
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    dsrun_conformance::program::main(&[Arc::new(CpuBackend::new()), Arc::new(CandleBackend::new())])
}
