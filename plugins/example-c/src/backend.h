/*
 * The declarations that the files of this backend share: its objects, and the view that kernels have of tensors.
 *
 * plugin.c     the function tables; devices, memory, streams, events
 * plan.c       querying, planning, binding and running calls
 * weight.c     packing weights: every format is decoded to f32
 *
 * Kernels, one function for each op:
 *
 * elementwise.c  add, cast, columns, activation, gated_activation
 * norm.c         rms_norm, layer_norm, rope
 * linear.c       linear
 * rows.c         embed, gather_rows, kv_write, page_gather, page_scatter
 * attention.c    attention_prepare, paged_attention, attention
 * sampling.c     logit_process, argmax, sample
 * step.c         prepare_step, commit_tokens
 */

#ifndef BACKEND_H
#define BACKEND_H

#include "dsrun.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* The alignment of buffers and of the offsets of arguments: a cache line. */
#define ALIGNMENT 64

/* The most that any op has: operands of paged_attention, results of prepare_step. */
#define MAX_OPERANDS 11
#define MAX_RESULTS 10

/* The table of the host, set by the entry function. */
extern const dsr_host_api *host;

/* The header only declares these types; the plugin defines them. The device is the first field of each, so that one
 * comparison detects an object of another device. */

struct dsr_device {
    /* The bytes of live buffers and weights. Any thread may allocate. */
    _Atomic uint64_t used;
    /* The limit on these bytes; DSR_NONE for no limit. */
    uint64_t limit;
};

struct dsr_buffer {
    dsr_device *device;
    uint64_t bytes;
    unsigned char *memory;
};

/* Work is done when it is enqueued, so a stream has no state. */
struct dsr_stream {
    dsr_device *device;
};

struct dsr_event {
    dsr_device *device;
    atomic_bool recorded;
};

/* A row-major matrix of f32. */
struct dsr_weight {
    dsr_device *device;
    dsr_weight_type type;
    uint64_t rows, columns;
    float *elements;
};

/* Runs a bound call. */
typedef void kernel_function(const dsr_call *call);

/* An op that this backend runs. */
typedef struct kernel {
    uint32_t op;
    kernel_function *run;
    /* Returns the bytes of scratch memory that the kernel needs; NULL means none. */
    uint64_t (*workspace)(const dsr_plan *plan);
} kernel;

/* A copy of the description of a call, because that of the caller is only valid until plan returns. */
struct dsr_plan {
    dsr_device *device;
    /* The copy that the host keeps, for validating arguments. */
    dsr_checked_call *checked;
    const kernel *kernel;
    uint64_t workspace_bytes;
    uint32_t operand_count, result_count;
    dsr_operand_desc operands[MAX_OPERANDS];
    dsr_tensor_desc results[MAX_RESULTS];
    /* The attributes of any op, which are words of four bytes. */
    uint32_t attributes[8];
};

/* An operand or result of a bound call. */
typedef struct tensor {
    /* The planned sizes and strides; NULL if the operand is absent or a weight. */
    const dsr_tensor_desc *desc;
    void *data;
    /* The number of valid rows; NULL if all are valid. */
    const int32_t *extent;
    const dsr_weight *weight;
} tensor;

struct dsr_call {
    const dsr_plan *plan;
    tensor operands[MAX_OPERANDS];
    tensor results[MAX_RESULTS];
    void *workspace;
};

/* Makes an error of the host with a formatted message. */
dsr_status *fail(uint32_t code, const char *argument, const char *field, const char *format, ...);

/* Sets a text of the host to a formatted one, unless it is NULL. */
void say(dsr_text *text, const char *format, ...);

/* Allocates counted, aligned and zeroed memory of a device. */
dsr_status *device_allocate(dsr_device *device, uint64_t bytes, unsigned char **memory);
void device_free(dsr_device *device, uint64_t bytes, unsigned char *memory);

/* Whether this backend can decode a storage format of weights. */
bool format_is_known(uint32_t format);

/* plan.c and weight.c. */
extern const dsr_op_api op_table;
dsr_status *prepack_query(dsr_device *device, const dsr_weight_desc *weight, dsr_packed_layout *layout);
dsr_status *prepack(dsr_device *device, dsr_stream *stream, const dsr_weight_desc *weight, const dsr_row_reader *rows,
                    dsr_weight **packed);
uint64_t weight_bytes(dsr_weight *weight);
void weight_free(dsr_weight *weight);

kernel_function run_add, run_cast, run_columns, run_activation, run_gated_activation;
kernel_function run_rms_norm, run_layer_norm, run_rope;
kernel_function run_linear;
kernel_function run_embed, run_gather_rows, run_kv_write, run_page_gather, run_page_scatter;
kernel_function run_attention_prepare, run_paged_attention, run_attention;
kernel_function run_logit_process, run_argmax, run_sample;
kernel_function run_prepare_step, run_commit_tokens;
uint64_t paged_attention_workspace(const dsr_plan *plan), attention_workspace(const dsr_plan *plan);
uint64_t sample_workspace(const dsr_plan *plan);

/* The dot product, in several partial sums: the compiler keeps them in vector registers, and rounding errors grow more slowly
 * than in one sum. */
float dot(const float *a, const float *b, uint64_t count);

/* ---- The view that kernels have of tensors. ---- */

static inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static inline bool is_there(const tensor *t) { return t->desc != NULL; }

static inline uint64_t size_of(const tensor *t, uint32_t dimension) { return t->desc->shape[dimension]; }

/* The number of valid rows. An extent is device data, so it is read when the call runs. */
static inline uint64_t rows_of(const tensor *t) {
    uint64_t rows = t->desc->shape[0];
    if (t->extent == NULL) {
        return rows;
    }
    return *t->extent < 0 ? 0 : least(rows, (uint64_t)*t->extent);
}

/* The number of rows that are valid in a result and in all of `operands`. */
static inline uint64_t common_rows(uint64_t rows, const tensor *operand) {
    return is_there(operand) ? least(rows, rows_of(operand)) : rows;
}

/* A row of a matrix; row 0 of a vector is the whole vector. */
static inline float *floats(const tensor *t, uint64_t row) {
    return (float *)t->data + (t->desc->rank > 1 ? row * t->desc->strides[0] : 0);
}

static inline int32_t *integers(const tensor *t, uint64_t row) {
    return (int32_t *)t->data + (t->desc->rank > 1 ? row * t->desc->strides[0] : 0);
}

static inline uint32_t *words(const tensor *t, uint64_t row) {
    return (uint32_t *)t->data + (t->desc->rank > 1 ? row * t->desc->strides[0] : 0);
}

/* An index in an operand; -1 if it is not below `limit`, so that wrong data does not lead to an access out of bounds. */
static inline int64_t index_at(const tensor *t, uint64_t place, uint64_t limit) {
    int32_t index = integers(t, 0)[place];
    return index >= 0 && (uint64_t)index < limit ? index : -1;
}

#endif
