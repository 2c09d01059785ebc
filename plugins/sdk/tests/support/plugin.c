/* A plugin in C with one device that runs nothing, for tests. Each definition makes it invalid in one way. */

#include "dsrun.h"

#include <stdio.h>
#include <stdlib.h>

static const dsr_host_api *host;

#ifndef MINOR
#define MINOR DSR_ABI_MINOR
#endif
#ifndef NAME
#define NAME "c-plugin"
#endif
#ifndef FLAGS
#define FLAGS 0
#endif

static dsr_status *device_count(dsr_backend *backend, uint32_t *count) {
    (void)backend;
#ifdef ABORTS_WHEN_LISTED
    fputs("about to end the process\n", stderr);
    abort();
#endif
#ifdef PANICS_WHEN_LISTED
    (void)count;
    return dsr_fail(host, DSR_CODE_PANIC, "an uncaught exception");
#else
    *count = 1;
    return NULL;
#endif
}

static dsr_status *device_info(dsr_backend *backend, uint32_t position, dsr_device_info *info) {
    (void)backend;
    info->index = position;
    host->text_set(host->host, info->name, host->library_path);
    return NULL;
}

static dsr_status *device_open(dsr_backend *backend, uint32_t index, const dsr_device_options *options,
                               dsr_device **device) {
    (void)backend, (void)options;
    if (index != 0) {
        return dsr_fail_at(host, DSR_CODE_INVALID_ARGUMENT, "index", "value", "is not 0");
    }
    *device = (dsr_device *)&host;
    return NULL;
}

static void device_close(dsr_device *device) { (void)device; }

static dsr_status *device_properties(dsr_device *device, dsr_device_properties *properties) {
    (void)device;
    properties->alignment = 64;
    properties->dtypes = 1u << DSR_DTYPE_F32;
    host->text_set(host->host, properties->name, dsr_text_of("the only one"));
    return NULL;
}

/* A buffer handle is the number of its bytes. */
static dsr_status *allocate(dsr_device *device, uint64_t bytes, uint32_t kind, dsr_buffer **buffer) {
    (void)device, (void)kind;
    *buffer = (dsr_buffer *)(uintptr_t)bytes;
    return NULL;
}

static void buffer_free(dsr_buffer *buffer) { (void)buffer; }

static void *host_pointer(dsr_buffer *buffer) {
    (void)buffer;
    return NULL;
}

static dsr_status *memory_use(dsr_device *device, dsr_memory_use *use) {
    (void)device;
    use->used = 5;
    use->free = DSR_NONE;
    return NULL;
}

static dsr_status *query(dsr_device *device, const dsr_call_desc *call, dsr_support *support) {
    (void)device;
    dsr_status *wrong = host->validate_call(host->host, call, NULL);
    if (wrong != NULL) {
        return wrong;
    }
    if (call->op != DSR_OP_CAST) {
        host->text_set(host->host, support->reason, dsr_text_of("only cast is supported"));
        return NULL;
    }
    support->flags = DSR_SUPPORT_NATIVE;
    support->workspace_bytes = ((const dsr_cast_attributes *)call->attributes)->dtype == DSR_DTYPE_F16 ? 128 : 0;
    return NULL;
}

/* A plan is the call that the host has kept, which is enough to validate arguments. */
static dsr_status *plan(dsr_device *device, const dsr_call_desc *call, dsr_plan **result) {
    (void)device;
    return host->validate_call(host->host, call, (dsr_checked_call **)result);
}

static void plan_free(dsr_plan *kept) { host->checked_call_free(host->host, (dsr_checked_call *)kept); }

static uint64_t plan_workspace(dsr_plan *kept) {
    (void)kept;
    return 0;
}

static uint64_t buffer_bytes(void *context, const dsr_buffer *buffer) {
    (void)context;
    return (uint64_t)(uintptr_t)buffer > 4096 ? DSR_NONE : (uint64_t)(uintptr_t)buffer;
}

static dsr_status *bind(dsr_plan *kept, const dsr_arguments *arguments, dsr_call **call) {
    dsr_bind_limits limits = {sizeof limits, 64, 0, NULL, buffer_bytes, NULL};
    (void)call;
    dsr_status *wrong = host->validate_arguments(host->host, (dsr_checked_call *)kept, arguments, &limits);
    return wrong != NULL ? wrong : dsr_fail(host, DSR_CODE_UNSUPPORTED, "valid, but this device runs nothing");
}

/* Required functions that no test calls. */
static dsr_status *nothing(void) { return dsr_fail(host, DSR_CODE_UNSUPPORTED, "this device runs nothing"); }
typedef void (*any)(void);
#define STUB(table, slot) (*(any *)&table.slot = (any)nothing)

static dsr_memory_api memory = {sizeof memory, 0, allocate, buffer_free, host_pointer, memory_use};
static dsr_stream_api stream = {.struct_size = sizeof stream};
static dsr_event_api event = {.struct_size = sizeof event};
static dsr_op_api op = {.struct_size = sizeof op,
                        .query = query,
                        .plan = plan,
                        .plan_free = plan_free,
                        .plan_workspace = plan_workspace,
                        .bind = bind};

/* A table of a later version, with more fields after those of this version. */
static struct {
    dsr_plugin_api known;
    uint64_t unknown[4];
} api;

#ifdef NO_ENTRY
#define dsrun_plugin_entry_v0 some_other_function
#endif
#ifdef OTHER_MAJOR
#define dsrun_plugin_entry_v0 dsrun_plugin_entry_v3
#endif
DSR_EXPORT dsr_status *dsrun_plugin_entry_v0(const dsr_host_api *given, const dsr_plugin_api **plugin) {
    host = given;
#ifdef REFUSES
    return dsr_fail(host, DSR_CODE_UNAVAILABLE, "libdriver.so.1 is missing");
#endif
    STUB(stream, create), STUB(stream, free), STUB(stream, upload), STUB(stream, download);
    STUB(stream, copy), STUB(stream, fill), STUB(stream, record), STUB(stream, wait), STUB(stream, synchronize);
    STUB(event, create), STUB(event, free), STUB(event, reached), STUB(event, synchronize), STUB(event, elapsed);
    STUB(op, prepack_query), STUB(op, prepack), STUB(op, weight_bytes), STUB(op, weight_free);
    STUB(op, enqueue), STUB(op, call_free);
    api.known.struct_size = sizeof api.known;
    api.known.abi_major = DSR_ABI_MAJOR;
    api.known.abi_minor = MINOR;
    api.known.flags = FLAGS;
    api.known.name = dsr_text_of(NAME);
    api.known.version = dsr_text_of("0.0.1");
    api.known.description = dsr_text_of("for tests");
    api.known.device_count = device_count;
    api.known.device_info = device_info;
    api.known.device_open = device_open;
    api.known.device_close = device_close;
    api.known.device_properties = device_properties;
    api.known.memory = &memory;
    api.known.stream = &stream;
    api.known.event = &event;
    api.known.op = &op;
#ifdef TRUNCATED
    api.known.struct_size = offsetof(dsr_plugin_api, device_close);
#endif
#ifdef TRUNCATED_OPS
    op.struct_size = offsetof(dsr_op_api, enqueue);
#endif
#ifdef TINY
    api.known.struct_size = 4;
#endif
#ifdef LARGER
    api.known.struct_size = sizeof api;
    api.unknown[0] = UINT64_MAX;
#endif
#ifdef NULL_SLOT
    memory.host_pointer = NULL;
#endif
#ifdef NO_OPS
    api.known.op = NULL;
#endif
#ifndef NO_TABLE
    *plugin = &api.known;
#else
    (void)plugin;
#endif
    return NULL;
}
