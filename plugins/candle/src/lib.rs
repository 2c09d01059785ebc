//! The reference backend as a plugin.

dsrun_plugin_sdk::export_backend!(dsrun_candle::CandleBackend::new());
