/*
 * The stages of a call: query, plan, bind, enqueue.
 *
 * The host validates descriptions and arguments before it calls, but other callers may not. Therefore each function begins
 * with the validation of the host. Kernels rely on it: shapes fit together, attributes are in range, and ranges are inside
 * their buffers.
 */

#include "backend.h"

#include <inttypes.h>

static const kernel kernels[] = {
    {DSR_OP_EMBED, run_embed, NULL},
    {DSR_OP_RMS_NORM, run_rms_norm, NULL},
    {DSR_OP_LAYER_NORM, run_layer_norm, NULL},
    {DSR_OP_LINEAR, run_linear, NULL},
    {DSR_OP_ACTIVATION, run_activation, NULL},
    {DSR_OP_GATED_ACTIVATION, run_gated_activation, NULL},
    {DSR_OP_ROPE, run_rope, NULL},
    {DSR_OP_KV_WRITE, run_kv_write, NULL},
    {DSR_OP_PAGE_GATHER, run_page_gather, NULL},
    {DSR_OP_PAGE_SCATTER, run_page_scatter, NULL},
    {DSR_OP_ATTENTION_PREPARE, run_attention_prepare, NULL},
    {DSR_OP_PAGED_ATTENTION, run_paged_attention, paged_attention_workspace},
    {DSR_OP_ATTENTION, run_attention, attention_workspace},
    {DSR_OP_ADD, run_add, NULL},
    {DSR_OP_CAST, run_cast, NULL},
    {DSR_OP_COLUMNS, run_columns, NULL},
    {DSR_OP_GATHER_ROWS, run_gather_rows, NULL},
    {DSR_OP_PREPARE_STEP, run_prepare_step, NULL},
    {DSR_OP_LOGIT_PROCESS, run_logit_process, NULL},
    {DSR_OP_ARGMAX, run_argmax, NULL},
    {DSR_OP_SAMPLE, run_sample, sample_workspace},
    {DSR_OP_COMMIT_TOKENS, run_commit_tokens, NULL},
};

static const char *name_of(uint32_t dtype) {
    switch (dtype) {
    case DSR_DTYPE_F16: return "f16";
    case DSR_DTYPE_BF16: return "bf16";
    case DSR_DTYPE_I8: return "i8";
    case DSR_DTYPE_U8: return "u8";
    default: return "another type";
    }
}

/* Whether kernels support an element type: f32, and the integers of indices and masks. */
static bool takes(uint32_t dtype) {
    return dtype == DSR_DTYPE_F32 || dtype == DSR_DTYPE_I32 || dtype == DSR_DTYPE_U32;
}

/* The kernel of a call. Without one it is NULL, and `reason` receives why unless it is NULL. */
static const kernel *find_kernel(const dsr_call_desc *call, dsr_text *reason) {
    const kernel *found = NULL;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        if (kernels[i].op == call->op) {
            found = &kernels[i];
        }
    }
    if (found == NULL) {
        say(reason, "this backend does not have op %" PRIu32, call->op);
        return NULL;
    }
    for (uint32_t i = 0; i < call->operand_count; i++) {
        const dsr_operand_desc *operand = &call->operands[i];
        if (operand->kind == DSR_OPERAND_TENSOR && !takes(operand->tensor.dtype)) {
            say(reason, "operand %" PRIu32 " is %s, but this backend computes only in f32", i, name_of(operand->tensor.dtype));
            return NULL;
        }
        if (operand->kind == DSR_OPERAND_WEIGHT && !format_is_known(operand->weight.format)) {
            say(reason, "operand %" PRIu32 " is a weight of format %" PRIu32 ", which is not in this backend", i,
                operand->weight.format);
            return NULL;
        }
    }
    for (uint32_t i = 0; i < call->result_count; i++) {
        if (!takes(call->results[i].dtype)) {
            say(reason, "result %" PRIu32 " is %s, but this backend computes only in f32", i, name_of(call->results[i].dtype));
            return NULL;
        }
    }
    return found;
}

/* Fills in a plan, which is on the stack of `query` or allocated by `plan`. */
static void describe(dsr_plan *plan, dsr_device *device, const dsr_call_desc *call, const kernel *found) {
    memset(plan, 0, sizeof *plan);
    plan->device = device;
    plan->kernel = found;
    plan->operand_count = call->operand_count;
    plan->result_count = call->result_count;
    memcpy(plan->operands, call->operands, call->operand_count * sizeof plan->operands[0]);
    memcpy(plan->results, call->results, call->result_count * sizeof plan->results[0]);
    if (call->attributes_size > 0) {
        memcpy(plan->attributes, call->attributes, call->attributes_size);
    }
    plan->workspace_bytes = found->workspace != NULL ? found->workspace(plan) : 0;
}

static dsr_status *query(dsr_device *device, const dsr_call_desc *call, dsr_support *support) {
    dsr_status *wrong = host->validate_call(host->host, call, NULL);
    if (wrong != NULL) {
        return wrong;
    }
    const kernel *found = find_kernel(call, DSR_GET(support, dsr_support, reason));
    dsr_plan plan = {0};
    if (found != NULL) {
        describe(&plan, device, call, found);
    }
    DSR_SET(support, dsr_support, flags, found != NULL ? DSR_SUPPORT_NATIVE | DSR_SUPPORT_BATCH_INVARIANT : 0);
    DSR_SET(support, dsr_support, workspace_bytes, plan.workspace_bytes);
    DSR_SET(support, dsr_support, persistent_bytes, 0);
    DSR_SET(support, dsr_support, work_words, 0);
    return NULL;
}

static dsr_status *make_plan(dsr_device *device, const dsr_call_desc *call, dsr_plan **result) {
    dsr_checked_call *checked;
    dsr_status *wrong = host->validate_call(host->host, call, &checked);
    if (wrong != NULL) {
        return wrong;
    }
    const kernel *found = find_kernel(call, NULL);
    dsr_plan *made = found != NULL ? malloc(sizeof *made) : NULL;
    if (made == NULL) {
        host->checked_call_free(host->host, checked);
        return found == NULL ? fail(DSR_CODE_UNSUPPORTED, NULL, NULL, "this backend does not run the call; query says why")
                             : fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a plan");
    }
    describe(made, device, call, found);
    made->checked = checked;
    *result = made;
    return NULL;
}

static void plan_free(dsr_plan *plan) {
    host->checked_call_free(host->host, plan->checked);
    free(plan);
}

static uint64_t plan_workspace(dsr_plan *plan) { return plan->workspace_bytes; }

/* The host calls these two to validate the buffers and weights in the arguments of a bind. */

static uint64_t limit_of_buffer(void *context, const dsr_buffer *buffer) {
    const dsr_plan *plan = context;
    return buffer->device == plan->device ? buffer->bytes : DSR_NONE;
}

static uint32_t type_of_weight(void *context, const dsr_weight *weight, dsr_weight_type *type) {
    const dsr_plan *plan = context;
    if (weight->device != plan->device) {
        return 0;
    }
    *type = weight->type;
    return 1;
}

static void *address_of(const dsr_slice *slice) {
    return slice->buffer != NULL ? slice->buffer->memory + slice->offset : NULL;
}

static tensor bound_tensor(const dsr_tensor_desc *desc, const dsr_argument *argument) {
    tensor result = {desc, address_of(&argument->slice), address_of(&argument->extent), NULL};
    return result;
}

static dsr_status *bind(dsr_plan *plan, const dsr_arguments *arguments, dsr_call **result) {
    dsr_bind_limits limits = {
        .struct_size = sizeof limits,
        .alignment = ALIGNMENT,
        .workspace_bytes = plan->workspace_bytes,
        .context = plan,
        .buffer_bytes = limit_of_buffer,
        .weight_type = type_of_weight,
    };
    dsr_status *wrong = host->validate_arguments(host->host, plan->checked, arguments, &limits);
    if (wrong != NULL) {
        return wrong;
    }
    dsr_call *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a bound call");
    }
    made->plan = plan;
    made->workspace = address_of(&arguments->workspace);
    for (uint32_t i = 0; i < plan->operand_count; i++) {
        if (plan->operands[i].kind == DSR_OPERAND_TENSOR) {
            made->operands[i] = bound_tensor(&plan->operands[i].tensor, &arguments->operands[i]);
        } else if (plan->operands[i].kind == DSR_OPERAND_WEIGHT) {
            made->operands[i].weight = arguments->operands[i].weight;
        }
    }
    for (uint32_t i = 0; i < plan->result_count; i++) {
        made->results[i] = bound_tensor(&plan->results[i], &arguments->results[i]);
    }
    *result = made;
    return NULL;
}

static dsr_status *enqueue(dsr_call *call, dsr_stream *stream) {
    if (stream->device != call->plan->device) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "stream", NULL, "is a stream of another device");
    }
    call->plan->kernel->run(call);
    return NULL;
}

static void call_free(dsr_call *call) { free(call); }

const dsr_op_api op_table = {
    .struct_size = sizeof op_table,
    .query = query,
    .prepack_query = prepack_query,
    .prepack = prepack,
    .weight_bytes = weight_bytes,
    .weight_free = weight_free,
    .plan = make_plan,
    .plan_free = plan_free,
    .plan_workspace = plan_workspace,
    .bind = bind,
    .enqueue = enqueue,
    .call_free = call_free,
};
