//! Forwarding of `tracing` events to the log of the host.
//!
//! A library has its own copy of `tracing` without a subscriber, so its events would be lost.

use crate::{
    host_table::HostTable,
    raw::{DSR_LOG_DEBUG, DSR_LOG_ERROR, DSR_LOG_INFO, DSR_LOG_WARN},
};
use std::fmt::{Debug, Write};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
};

/// A subscriber that forwards events to the host. It drops trace events, because the host cannot disable them and backends emit
/// one for every call they bind.
pub(super) struct ToHost(pub(super) HostTable);

impl Subscriber for ToHost {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span() && *metadata.level() <= Level::DEBUG
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn event(&self, event: &Event<'_>) {
        let level = match *event.metadata().level() {
            Level::ERROR => DSR_LOG_ERROR,
            Level::WARN => DSR_LOG_WARN,
            Level::INFO => DSR_LOG_INFO,
            _ => DSR_LOG_DEBUG,
        };
        let mut text = Text::default();
        event.record(&mut text);
        self.0.log(level, &(text.message + &text.fields));
    }

    // Spans are not enabled.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The text of an event: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
        debug_assert!(written.is_ok(), "writing to a string cannot fail");
    }
}
