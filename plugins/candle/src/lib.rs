//! The reference backend as a plugin.

dsrun_core::export_backend!(dsrun_candle::CandleBackend::new());
