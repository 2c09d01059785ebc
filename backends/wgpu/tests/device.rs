//! Memory, copies and waits of a device, at offsets and lengths that wgpu has no commands for.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    Code,
    device::{Backend, BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
};
use dsrun_test_support::{Requirement, TestResult, test_main};
use dsrun_wgpu::WgpuBackend;
use std::{sync::Arc, time::Duration};

const TIMEOUT: Duration = Duration::from_secs(60);

test_main![
    bytes_move_at_any_offset_and_length,
    fills_keep_the_bytes_around_them,
    pinned_memory_has_what_was_copied_once_the_event_is_reached,
    copies_within_a_buffer_are_in_order,
    a_limit_on_memory_is_kept,
    a_device_that_does_not_exist_is_refused,
    a_lost_device_is_named_and_others_work,
    events_measure_time_once_it_is_asked_for
];

fn device(options: &DeviceOptions) -> Opened {
    let backend = WgpuBackend::new();
    backend
        .devices()
        .map_err(|error| Requirement::Adapter.missing("wgpu finds no adapter").with_detail(error))?;
    Ok(backend.open(0, options).unwrap())
}

type Opened = Result<Arc<dyn Device>, dsrun_test_support::Missing>;

fn numbers(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index * 37 % 251) as u8).collect()
}

fn downloaded(stream: &mut dyn Stream, slice: &BufferSlice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes];
    stream.download(slice, &mut bytes, "a test", TIMEOUT).unwrap();
    bytes
}

fn bytes_move_at_any_offset_and_length() -> TestResult {
    let device = device(&DeviceOptions::default())?;
    let mut stream = device.stream().unwrap();
    let source = BufferSlice::whole(device.allocate(1001, MemoryKind::Device).unwrap());
    let target = BufferSlice::whole(device.allocate(1001, MemoryKind::Device).unwrap());
    assert_eq!(downloaded(&mut *stream, &source), vec![0; 1001]);
    stream.upload(&numbers(1001), &source).unwrap();
    for (from, to, bytes) in [(0, 0, 1001), (1, 2, 7), (3, 900, 101), (256, 255, 2), (5, 5, 1), (4, 8, 64)] {
        let initial = vec![0xAA; 1001];
        stream.upload(&initial, &target).unwrap();
        let slice = target.slice(to, bytes).unwrap();
        stream.copy(&source.slice(from, bytes).unwrap(), &slice).unwrap();
        let mut expected = initial.clone();
        expected[to..to + bytes].copy_from_slice(&numbers(1001)[from..from + bytes]);
        assert_eq!(downloaded(&mut *stream, &target), expected, "{bytes} bytes from {from} to {to}");
        assert_eq!(downloaded(&mut *stream, &slice), expected[to..to + bytes]);

        stream.upload(&initial, &target).unwrap();
        stream.upload(&numbers(bytes), &slice).unwrap();
        let mut expected = initial;
        expected[to..to + bytes].copy_from_slice(&numbers(bytes));
        assert_eq!(downloaded(&mut *stream, &target), expected, "an upload of {bytes} bytes to {to}");
    }
    Ok(())
}

fn fills_keep_the_bytes_around_them() -> TestResult {
    let device = device(&DeviceOptions::default())?;
    let mut stream = device.stream().unwrap();
    let target = BufferSlice::whole(device.allocate(300, MemoryKind::Device).unwrap());
    for (at, bytes, byte) in [(0, 300, 9), (4, 8, 0), (3, 1, 7), (1, 6, 0), (255, 45, 200)] {
        stream.upload(&numbers(300), &target).unwrap();
        stream.fill(&target.slice(at, bytes).unwrap(), byte).unwrap();
        let mut expected = numbers(300);
        expected[at..at + bytes].fill(byte);
        assert_eq!(downloaded(&mut *stream, &target), expected, "{bytes} bytes at {at}");
    }
    Ok(())
}

fn pinned_memory_has_what_was_copied_once_the_event_is_reached() -> TestResult {
    let device = device(&DeviceOptions::default())?;
    let mut stream = device.stream().unwrap();
    let memory = BufferSlice::whole(device.allocate(100, MemoryKind::Device).unwrap());
    let pinned = BufferSlice::whole(device.allocate(200, MemoryKind::Pinned).unwrap());
    let event = device.event().unwrap();
    stream.upload(&numbers(100), &memory).unwrap();
    stream.copy(&memory.slice(3, 90).unwrap(), &pinned.slice(5, 90).unwrap()).unwrap();
    stream.record(&*event).unwrap();
    event.synchronize("a copy to the host", TIMEOUT).unwrap();
    assert!(event.reached().unwrap());
    let pointer = pinned.buffer.host_pointer().unwrap();
    // SAFETY: the buffer has 200 bytes and lives; the only work that writes to it is done.
    let found = unsafe { std::slice::from_raw_parts(pointer.as_ptr().add(5), 90) };
    assert_eq!(found, &numbers(100)[3..93]);
    // What was copied to pinned memory can be copied on without a wait of the caller.
    stream.fill(&memory, 0).unwrap();
    stream.copy(&memory.slice(0, 10).unwrap(), &pinned.slice(5, 10).unwrap()).unwrap();
    stream.copy(&pinned.slice(5, 90).unwrap(), &memory.slice(10, 90).unwrap()).unwrap();
    let mut expected = vec![0; 20];
    expected.extend_from_slice(&numbers(100)[13..93]);
    assert_eq!(downloaded(&mut *stream, &memory), expected);
    Ok(())
}

fn copies_within_a_buffer_are_in_order() -> TestResult {
    let device = device(&DeviceOptions::default())?;
    let mut stream = device.stream().unwrap();
    let memory = BufferSlice::whole(device.allocate(4096, MemoryKind::Device).unwrap());
    stream.upload(&numbers(4096), &memory).unwrap();
    for step in 1..8 {
        let half = |index: usize| memory.slice(index * 512, 512).unwrap();
        stream.copy(&half(step - 1), &half(step)).unwrap();
    }
    assert_eq!(downloaded(&mut *stream, &memory), numbers(512).repeat(8));
    let (from, to) = (memory.slice(0, 8).unwrap(), memory.slice(4, 8).unwrap());
    assert_eq!(stream.copy(&from, &to).unwrap_err().code(), Code::InvalidArgument);
    Ok(())
}

fn a_limit_on_memory_is_kept() -> TestResult {
    let device = device(&DeviceOptions { memory_limit: Some(1 << 20), ..DeviceOptions::default() })?;
    let first = device.allocate(1 << 19, MemoryKind::Device).unwrap();
    let error = device.allocate((1 << 19) + 1, MemoryKind::Device).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory, "{error}");
    assert_eq!(device.memory().used, 1 << 19);
    drop(first);
    assert_eq!(device.memory().used, 0);
    let error = device.allocate(usize::MAX / 2, MemoryKind::Device).unwrap_err();
    assert_eq!(error.code(), Code::OutOfMemory, "{error}");
    assert!(device.allocate(1 << 20, MemoryKind::Device).is_ok(), "the device is of use after a refusal");
    Ok(())
}

fn a_device_that_does_not_exist_is_refused() -> TestResult {
    device(&DeviceOptions::default())?;
    let error = WgpuBackend::new().open(99, &DeviceOptions::default()).unwrap_err();
    assert_eq!((error.code(), error.argument()), (Code::InvalidArgument, Some("device")), "{error}");
    Ok(())
}

fn a_lost_device_is_named_and_others_work() -> TestResult {
    device(&DeviceOptions::default())?;
    let backend = WgpuBackend::new();
    let open = || backend.open(0, &DeviceOptions::default());
    let device = open().unwrap();
    let name = device.properties().name.clone();
    let mut stream = device.stream().unwrap();
    let memory = BufferSlice::whole(device.allocate(4096, MemoryKind::Device).unwrap());
    let pinned = BufferSlice::whole(device.allocate(4096, MemoryKind::Pinned).unwrap());
    let event = device.event().unwrap();
    stream.upload(&numbers(4096), &memory).unwrap();
    stream.copy(&memory, &pinned).unwrap();
    stream.record(&*event).unwrap();
    // Work that is enqueued and not submitted is lost with the device.
    stream.fill(&memory.slice(1, 99).unwrap(), 7).unwrap();
    backend.lose_devices();

    let mut bytes = vec![0; 4096];
    let errors = [
        stream.synchronize("a test", TIMEOUT).unwrap_err(),
        stream.download(&memory, &mut bytes, "a test", TIMEOUT).unwrap_err(),
        stream.upload(&bytes, &memory).unwrap_err(),
        stream.fill(&memory.slice(1, 99).unwrap(), 7).unwrap_err(),
        stream.copy(&memory, &pinned).unwrap_err(),
        stream.record(&*event).unwrap_err(),
        event.synchronize("a test", TIMEOUT).unwrap_err(),
        event.reached().unwrap_err(),
        device.allocate(64, MemoryKind::Device).unwrap_err(),
    ];
    for (index, error) in errors.iter().enumerate() {
        assert_eq!(error.code(), Code::DeviceLost, "error {index}: {error}");
        let text = error.to_string();
        assert!(text.contains(&name) && text.contains("open it again"), "error {index}: {error}");
    }
    // Whatever comes first after the loss, the next wait reports it.
    type First = fn(&dyn Device, &mut dyn Stream, &BufferSlice);
    let firsts: [First; 5] = [
        |_, stream, memory| drop(stream.upload(&numbers(4096), memory)),
        |_, stream, memory| drop(stream.upload(&numbers(99), &memory.slice(1, 99).unwrap())),
        |_, stream, memory| drop(stream.fill(&memory.slice(1, 99).unwrap(), 7)),
        |_, stream, memory| drop(stream.download(memory, &mut [0; 4096], "a test", TIMEOUT)),
        |device, stream, _| drop(device.event().map(|event| stream.record(&*event))),
    ];
    for (index, first) in firsts.into_iter().enumerate() {
        let device = open().unwrap();
        let mut stream = device.stream().unwrap();
        let memory = BufferSlice::whole(device.allocate(4096, MemoryKind::Device).unwrap());
        stream.fill(&memory.slice(1, 99).unwrap(), 7).unwrap();
        backend.lose_devices();
        first(&*device, &mut *stream, &memory);
        let error = stream.synchronize("a test", TIMEOUT).unwrap_err();
        assert_eq!(error.code(), Code::DeviceLost, "first action {index}: {error}");
    }
    // A new handle works, beside what is left of the lost one.
    let other = open().unwrap();
    let mut other_stream = other.stream().unwrap();
    let memory = BufferSlice::whole(other.allocate(64, MemoryKind::Device).unwrap());
    other_stream.upload(&numbers(64), &memory).unwrap();
    assert_eq!(downloaded(&mut *other_stream, &memory), numbers(64));
    Ok(())
}

fn events_measure_time_once_it_is_asked_for() -> TestResult {
    let device = device(&DeviceOptions::default())?;
    let mut stream = device.stream().unwrap();
    let memory = BufferSlice::whole(device.allocate(1 << 22, MemoryKind::Device).unwrap());
    let [start, end] = [(); 2].map(|()| device.event().unwrap());
    let mut measured = |pieces: usize| {
        stream.record(&*start).unwrap();
        for index in 0..pieces {
            stream.fill(&memory, index as u8 + 1).unwrap();
        }
        stream.record(&*end).unwrap();
        end.synchronize("a test", TIMEOUT).unwrap();
        end.elapsed_since(&*start).unwrap()
    };
    assert_eq!(measured(1), None);
    // An adapter without a clock never measures.
    if let Some(elapsed) = measured(4) {
        assert!(elapsed > Duration::ZERO && elapsed < TIMEOUT, "{elapsed:?}");
        assert_eq!(measured(0).map(|elapsed| elapsed < TIMEOUT), Some(true));
    }
    Ok(())
}
