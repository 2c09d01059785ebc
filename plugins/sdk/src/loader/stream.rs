//! Streams and events of a plugin.

use super::{
    open_device::{OpenDevice, slice},
    plugin::{Health, Plugin, Raw, call, free},
};
use crate::{encode, prefix, raw::*};
use dsrun_core::{
    Error, Result,
    device::{BufferSlice, Event, Stream},
};
use std::{any::Any, ptr, sync::Arc, time::Duration};

/// A stream of a plugin.
#[derive(Debug)]
pub(super) struct PluginStream {
    pub(super) handle: Raw<dsr_stream>,
    pub(super) health: Health,
    open: Arc<OpenDevice>,
}

impl Drop for PluginStream {
    fn drop(&mut self) {
        free!(self.table(), free, self.handle);
    }
}

impl PluginStream {
    pub(super) fn create(open: &Arc<OpenDevice>) -> Result<Self> {
        let table = &open.plugin.tables.stream;
        let mut handle = ptr::null_mut();
        open.health.call("device", || Ok(call!(table, create(open.handle.get(), &raw mut handle))))?;
        Ok(Self { handle: Raw::new(handle, "stream")?, health: Health::default(), open: open.clone() })
    }

    /// The stream behind a trait object.
    ///
    /// # Errors
    /// If it belongs to another backend.
    pub(super) fn of<'a>(stream: &'a mut dyn Stream, plugin: &Arc<Plugin>) -> Result<&'a mut Self> {
        let any: &mut dyn Any = stream;
        match any.downcast_mut::<Self>() {
            Some(stream) if Arc::ptr_eq(&stream.open.plugin, plugin) => Ok(stream),
            _ => Err(Error::invalid("is a stream of another backend").at("stream")),
        }
    }

    fn table(&self) -> &dsr_stream_api {
        &self.open.plugin.tables.stream
    }

    fn call(
        &self,
        run: impl FnOnce(&dsr_stream_api, *mut dsr_stream) -> Result<*mut dsr_status>,
    ) -> Result<()> {
        self.health.call("stream", || run(self.table(), self.handle.get()))
    }

    fn slice(&self, range: &BufferSlice, name: &str) -> Result<dsr_slice> {
        slice(&self.open.plugin, range).map_err(|error| error.at(name))
    }

    fn event<'a>(&self, event: &'a dyn Event) -> Result<&'a PluginEvent> {
        PluginEvent::of(event, &self.open.plugin)
    }
}

impl Stream for PluginStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        let to = self.slice(destination, "destination")?;
        self.call(|table, stream| {
            Ok(call!(table, upload(stream, source.as_ptr().cast(), source.len(), &raw const to)))
        })
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        let from = self.slice(source, "source")?;
        let (what, timeout) = (prefix::str_of(what), encode::timeout(timeout));
        let (bytes, length) = (destination.as_mut_ptr().cast(), destination.len());
        self.call(|table, stream| {
            Ok(call!(table, download(stream, &raw const from, bytes, length, what, timeout)))
        })
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        let (from, to) = (self.slice(source, "source")?, self.slice(destination, "destination")?);
        self.call(|table, stream| Ok(call!(table, copy(stream, &raw const from, &raw const to))))
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        let to = self.slice(destination, "destination")?;
        self.call(|table, stream| Ok(call!(table, fill(stream, &raw const to, u32::from(byte)))))
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = self.event(event)?;
        self.call(|table, stream| Ok(call!(table, record(stream, event.handle.get()))))
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let event = self.event(event)?;
        self.call(|table, stream| Ok(call!(table, wait(stream, event.handle.get()))))
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        let (what, timeout) = (prefix::str_of(what), encode::timeout(timeout));
        self.call(|table, stream| Ok(call!(table, synchronize(stream, what, timeout))))
    }
}

/// An event of a plugin.
#[derive(Debug)]
pub(super) struct PluginEvent {
    handle: Raw<dsr_event>,
    health: Health,
    open: Arc<OpenDevice>,
}

impl Drop for PluginEvent {
    fn drop(&mut self) {
        free!(self.open.plugin.tables.event, free, self.handle);
    }
}

impl PluginEvent {
    pub(super) fn create(open: &Arc<OpenDevice>) -> Result<Self> {
        let table = &open.plugin.tables.event;
        let mut handle = ptr::null_mut();
        open.health.call("device", || Ok(call!(table, create(open.handle.get(), &raw mut handle))))?;
        Ok(Self { handle: Raw::new(handle, "event")?, health: Health::default(), open: open.clone() })
    }

    fn of<'a>(event: &'a dyn Event, plugin: &Arc<Plugin>) -> Result<&'a Self> {
        let any: &dyn Any = event;
        match any.downcast_ref::<Self>() {
            Some(event) if Arc::ptr_eq(&event.open.plugin, plugin) => Ok(event),
            _ => Err(Error::invalid("is an event of another backend").at("event")),
        }
    }

    fn call(
        &self,
        run: impl FnOnce(&dsr_event_api, *mut dsr_event) -> Result<*mut dsr_status>,
    ) -> Result<()> {
        self.health.call("event", || run(&self.open.plugin.tables.event, self.handle.get()))
    }
}

impl Event for PluginEvent {
    fn reached(&self) -> Result<bool> {
        let mut reached = 0;
        self.call(|table, event| Ok(call!(table, reached(event, &raw mut reached))))?;
        Ok(reached != 0)
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        let (what, timeout) = (prefix::str_of(what), encode::timeout(timeout));
        self.call(|table, event| Ok(call!(table, synchronize(event, what, timeout))))
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let earlier = Self::of(earlier, &self.open.plugin)?;
        let mut nanoseconds = DSR_NONE;
        self.call(|table, event| {
            Ok(call!(table, elapsed(event, earlier.handle.get(), &raw mut nanoseconds)))
        })?;
        Ok((nanoseconds != DSR_NONE).then(|| Duration::from_nanos(nanoseconds)))
    }
}
