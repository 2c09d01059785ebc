//! The backends that compute in host memory.

use dsrun_core::device::Backend;
use std::sync::Arc;

pub(crate) fn candle() -> Arc<dyn Backend> {
    Arc::new(dsrun_candle::CandleBackend::new())
}

pub(crate) fn cpu() -> Arc<dyn Backend> {
    Arc::new(dsrun_cpu::CpuBackend::new())
}
