/*
 * The function tables of the plugin, and all functions except those of ops: device, memory, streams and events.
 *
 * The one device is the CPU. Work runs on the calling thread when it is enqueued.
 */

#include "backend.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

const dsr_host_api *host;

/* ---- Errors and texts. ---- */

dsr_status *fail(uint32_t code, const char *argument, const char *field, const char *format, ...) {
    char message[256];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return dsr_fail_at(host, code, argument, field, message);
}

void say(dsr_text *text, const char *format, ...) {
    if (text == NULL) {
        return;
    }
    char message[256];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    host->text_set(host->host, text, dsr_text_of(message));
}

/* ---- The device. ---- */

static dsr_status *device_count(dsr_backend *backend, uint32_t *count) {
    (void)backend;
    *count = 1;
    return NULL;
}

static dsr_status *device_info(dsr_backend *backend, uint32_t position, dsr_device_info *info) {
    (void)backend;
    DSR_SET(info, dsr_device_info, index, position);
    DSR_SET(info, dsr_device_info, memory_bytes, DSR_NONE);
    say(DSR_GET(info, dsr_device_info, name), "CPU (one thread)");
    return NULL;
}

static dsr_status *device_open(dsr_backend *backend, uint32_t index, const dsr_device_options *options,
                               dsr_device **device) {
    (void)backend;
    if (index != 0) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "index", NULL, "is %" PRIu32 ", but the only device is 0", index);
    }
    uint64_t limit = DSR_NONE;
    if (options != NULL) {
        float share = options->compute_share;
        if (!(share >= 0.0f && share <= 1.0f)) {
            return fail(DSR_CODE_INVALID_ARGUMENT, "compute_share", NULL, "is %g, must be above 0 and up to 1", share);
        }
        if (options->threads == 0) {
            return fail(DSR_CODE_INVALID_ARGUMENT, "threads", NULL, "is 0, must be at least 1");
        }
        limit = options->memory_limit;
    }
    dsr_device *made = malloc(sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a device");
    }
    atomic_init(&made->used, 0);
    made->limit = limit;
    *device = made;
    return NULL;
}

static void device_close(dsr_device *device) { free(device); }

static dsr_status *device_properties(dsr_device *device, dsr_device_properties *properties) {
    (void)device;
    DSR_SET(properties, dsr_device_properties, alignment, ALIGNMENT);
    DSR_SET(properties, dsr_device_properties, memory_bytes, 0);
    /* The conformance suite tests what is listed here. Integer types have no bits. */
    DSR_SET(properties, dsr_device_properties, dtypes, UINT64_C(1) << DSR_DTYPE_F32);
    DSR_SET(properties, dsr_device_properties, profiles, UINT64_C(1) << DSR_PROFILE_LLM_CORE_1);
    DSR_SET(properties, dsr_device_properties, flags,
            DSR_DEVICE_STRICT_NAN | DSR_DEVICE_UNIFIED_MEMORY | DSR_DEVICE_BINDS_PINNED);
    say(DSR_GET(properties, dsr_device_properties, name), "CPU (one thread)");
    return NULL;
}

/* ---- Memory. ---- */

dsr_status *device_allocate(dsr_device *device, uint64_t bytes, unsigned char **memory) {
    /* Counting before allocating ensures that two threads do not both get the last bytes. */
    uint64_t used = atomic_load(&device->used);
    do {
        if (bytes > device->limit || used > device->limit - bytes) {
            uint64_t left = used < device->limit ? device->limit - used : 0;
            return fail(DSR_CODE_OUT_OF_MEMORY, "bytes", NULL, "%" PRIu64 " requested, %" PRIu64 " of the limit free", bytes,
                        left);
        }
    } while (!atomic_compare_exchange_weak(&device->used, &used, used + bytes));
    /* aligned_alloc requires a multiple of the alignment; a buffer of 0 bytes has an address too. */
    unsigned char *made = NULL;
    if (bytes <= SIZE_MAX - 2 * ALIGNMENT) {
        size_t whole = ((size_t)bytes / ALIGNMENT + 1) * ALIGNMENT;
        made = aligned_alloc(ALIGNMENT, whole);
        if (made != NULL) {
            memset(made, 0, whole);
        }
    }
    if (made == NULL) {
        atomic_fetch_sub(&device->used, bytes);
        return fail(DSR_CODE_OUT_OF_MEMORY, "bytes", NULL, "%" PRIu64 " requested, which the system does not have", bytes);
    }
    *memory = made;
    return NULL;
}

void device_free(dsr_device *device, uint64_t bytes, unsigned char *memory) {
    atomic_fetch_sub(&device->used, bytes);
    free(memory);
}

static dsr_status *buffer_allocate(dsr_device *device, uint64_t bytes, uint32_t kind, dsr_buffer **buffer) {
    if (kind != DSR_MEMORY_DEVICE && kind != DSR_MEMORY_PINNED) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "kind", NULL, "is %" PRIu32 ", which is not a kind of memory", kind);
    }
    dsr_buffer *made = malloc(sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a buffer");
    }
    dsr_status *wrong = device_allocate(device, bytes, &made->memory);
    if (wrong != NULL) {
        free(made);
        return wrong;
    }
    made->device = device;
    made->bytes = bytes;
    *buffer = made;
    return NULL;
}

static void buffer_free(dsr_buffer *buffer) {
    device_free(buffer->device, buffer->bytes, buffer->memory);
    free(buffer);
}

static void *host_pointer(dsr_buffer *buffer) { return buffer->memory; }

static dsr_status *memory_use(dsr_device *device, dsr_memory_use *use) {
    uint64_t used = atomic_load(&device->used);
    DSR_SET(use, dsr_memory_use, used, used);
    DSR_SET(use, dsr_memory_use, free, device->limit == DSR_NONE ? DSR_NONE : device->limit - used);
    return NULL;
}

/* Checks that a slice lies in a buffer of this device, and sets its address. */
static dsr_status *slice_address(const dsr_device *device, const dsr_slice *slice, const char *name, unsigned char **address) {
    if (slice->buffer == NULL || slice->buffer->device != device) {
        return fail(DSR_CODE_INVALID_ARGUMENT, name, "buffer", "is not a buffer of this device");
    }
    uint64_t whole = slice->buffer->bytes;
    if (slice->offset > whole || slice->bytes > whole - slice->offset) {
        return fail(DSR_CODE_INVALID_ARGUMENT, name, "offset",
                    "%" PRIu64 " bytes at %" PRIu64 " exceed a buffer of %" PRIu64, slice->bytes, slice->offset,
                    whole);
    }
    *address = slice->buffer->memory + slice->offset;
    return NULL;
}

/* ---- Streams. ---- */

static dsr_status *stream_create(dsr_device *device, dsr_stream **stream) {
    dsr_stream *made = malloc(sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a stream");
    }
    made->device = device;
    *stream = made;
    return NULL;
}

static void stream_free(dsr_stream *stream) { free(stream); }

static dsr_status *equal_lengths(uint64_t source, uint64_t destination) {
    if (source == destination) {
        return NULL;
    }
    return fail(DSR_CODE_INVALID_ARGUMENT, "destination", "bytes", "is %" PRIu64 ", but the source is %" PRIu64,
                destination, source);
}

static dsr_status *stream_upload(dsr_stream *stream, const void *source, size_t length, const dsr_slice *destination) {
    unsigned char *to = NULL;
    dsr_status *wrong = equal_lengths(length, destination->bytes);
    if (wrong == NULL) {
        wrong = slice_address(stream->device, destination, "destination", &to);
    }
    if (wrong == NULL && length > 0) {
        memmove(to, source, length);
    }
    return wrong;
}

static dsr_status *stream_download(dsr_stream *stream, const dsr_slice *source, void *destination, size_t length,
                                   dsr_str what, uint64_t timeout_nanoseconds) {
    (void)what, (void)timeout_nanoseconds; /* All work is already done. */
    unsigned char *from = NULL;
    dsr_status *wrong = equal_lengths(source->bytes, length);
    if (wrong == NULL) {
        wrong = slice_address(stream->device, source, "source", &from);
    }
    if (wrong == NULL && length > 0) {
        memmove(destination, from, length);
    }
    return wrong;
}

static dsr_status *stream_copy(dsr_stream *stream, const dsr_slice *source, const dsr_slice *destination) {
    unsigned char *from = NULL, *to = NULL;
    dsr_status *wrong = equal_lengths(source->bytes, destination->bytes);
    if (wrong == NULL) {
        wrong = slice_address(stream->device, source, "source", &from);
    }
    if (wrong == NULL) {
        wrong = slice_address(stream->device, destination, "destination", &to);
    }
    if (wrong == NULL && source->buffer == destination->buffer && source->offset < destination->offset + source->bytes &&
        destination->offset < source->offset + source->bytes) {
        wrong = fail(DSR_CODE_INVALID_ARGUMENT, "destination", NULL, "overlaps the source");
    }
    if (wrong == NULL) {
        memcpy(to, from, source->bytes);
    }
    return wrong;
}

static dsr_status *stream_fill(dsr_stream *stream, const dsr_slice *destination, uint32_t byte) {
    if (byte > 255) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "byte", NULL, "is %" PRIu32 ", must be below 256", byte);
    }
    unsigned char *to = NULL;
    dsr_status *wrong = slice_address(stream->device, destination, "destination", &to);
    if (wrong == NULL) {
        memset(to, (int)byte, destination->bytes);
    }
    return wrong;
}

static dsr_status *stream_record(dsr_stream *stream, dsr_event *event) {
    (void)stream;
    atomic_store(&event->recorded, true);
    return NULL;
}

static dsr_status *stream_wait(dsr_stream *stream, dsr_event *event) {
    (void)stream, (void)event;
    return NULL;
}

static dsr_status *stream_synchronize(dsr_stream *stream, dsr_str what, uint64_t timeout_nanoseconds) {
    (void)stream, (void)what, (void)timeout_nanoseconds;
    return NULL;
}

/* ---- Events, which are reached as soon as they are recorded. ---- */

static dsr_status *event_create(dsr_device *device, dsr_event **event) {
    dsr_event *made = malloc(sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for an event");
    }
    made->device = device;
    atomic_init(&made->recorded, false);
    *event = made;
    return NULL;
}

static void event_free(dsr_event *event) { free(event); }

static dsr_status *event_reached(dsr_event *event, uint32_t *reached) {
    (void)event;
    *reached = 1;
    return NULL;
}

static dsr_status *event_synchronize(dsr_event *event, dsr_str what, uint64_t timeout_nanoseconds) {
    (void)event, (void)what, (void)timeout_nanoseconds;
    return NULL;
}

static dsr_status *event_elapsed(dsr_event *event, dsr_event *earlier, uint64_t *nanoseconds) {
    if (!atomic_load(&event->recorded) || !atomic_load(&earlier->recorded)) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "event", NULL, "was never recorded");
    }
    *nanoseconds = DSR_NONE; /* This device does not measure time. */
    return NULL;
}

/* ---- The tables. ---- */

static const dsr_memory_api memory_table = {
    .struct_size = sizeof memory_table,
    .allocate = buffer_allocate,
    .free = buffer_free,
    .host_pointer = host_pointer,
    .memory_use = memory_use,
};

static const dsr_stream_api stream_table = {
    .struct_size = sizeof stream_table,
    .create = stream_create,
    .free = stream_free,
    .upload = stream_upload,
    .download = stream_download,
    .copy = stream_copy,
    .fill = stream_fill,
    .record = stream_record,
    .wait = stream_wait,
    .synchronize = stream_synchronize,
};

static const dsr_event_api event_table = {
    .struct_size = sizeof event_table,
    .create = event_create,
    .free = event_free,
    .reached = event_reached,
    .synchronize = event_synchronize,
    .elapsed = event_elapsed,
};

/* There are no tables for graphs and collectives: the host replays calls one by one, and no listed profile has collectives. */
static const dsr_plugin_api plugin_table = {
    .struct_size = sizeof plugin_table,
    .abi_major = DSR_ABI_MAJOR,
    .abi_minor = DSR_ABI_MINOR,
    .name = DSR_TEXT("example-c"),
    .version = DSR_TEXT("0.1.0"),
    .description = DSR_TEXT("A backend in plain C: f32 on one thread of the CPU, to learn from"),
    .device_count = device_count,
    .device_info = device_info,
    .device_open = device_open,
    .device_close = device_close,
    .device_properties = device_properties,
    .memory = &memory_table,
    .stream = &stream_table,
    .event = &event_table,
    .op = &op_table,
};

DSR_EXPORT dsr_status *dsrun_plugin_entry_v0(const dsr_host_api *given, const dsr_plugin_api **plugin) {
    host = given;
    *plugin = &plugin_table;
    return NULL;
}
