/*
 * dsrun.h: the C ABI of dsrun, for those who write backends.
 *
 * Generated from dsrun-core by `cargo xtask header`. Do not edit.
 *
 * A backend is a dynamic library that exports one function, dsrun_plugin_entry_v0. It is given the host's table and gives its
 * own. Rules that hold everywhere:
 *
 * Errors     A function that can fail returns a dsr_status: NULL is success. The host makes errors (dsr_host_api.status_new) and
 *            frees them; a plugin returns them and keeps none. On an error, what the function would have filled in is
 *            untouched. The last parameters of a function are what it fills in; they are never NULL.
 * Ownership  What a plugin makes is owned by the host, which frees it exactly once, children before their parents. What a
 *            parameter points to belongs to the caller and is valid until the function returns, unless its comment says
 *            otherwise. Texts a plugin gives are copied by dsr_host_api.text_set.
 * Sizes      A struct that begins with struct_size may grow at its end in later versions. Whoever fills one in sets the size it
 *            was compiled with; whoever reads or fills in one of somebody else's leaves alone what lies behind that size: see
 *            DSR_HAS. What is missing means what 0 means. Arrays hold structs whose size never changes.
 * Threads    Functions of the plugin and of a device may be called from any thread, at the same time. A stream, a bound call and
 *            a graph are used by one thread at a time, and may move between threads. Nothing may depend on which thread
 *            calls. A plugin calls back into the host under no lock of its own, but for log, text_set and status_*.
 * Unwinding  No panic, exception or longjmp leaves a function. What would is returned as DSR_CODE_PANIC, and the host uses the
 *            object no more: dsrun.hpp does this for C++.
 * Tensors    Row-major, with a stride for each dimension; the last is contiguous. What lies between rows belongs to somebody
 *            else. With an extent, an i32 that is read when the call runs, only the first rows are real: the others are not
 *            read, and not written. An index of -1 means skip, wherever indices stand; one that is out of range is data that
 *            is wrong, and must not lead out of memory. Sizes may be 0. Results share no memory with operands, but for those
 *            they update.
 * Process    A plugin does not end the process, install signal handlers or change the environment. It is never unloaded.
 * Checks     The host checks every description and every argument before a plugin sees it. A plugin that is to be safe with other
 *            callers checks with one call each: dsr_host_api.validate_call and validate_arguments.
 * Version    While DSR_ABI_MAJOR is 0, host and plugin must have the same DSR_ABI_MINOR. A plugin whose host has another version
 *            gives its table and calls nothing: the host will see the version and say so. Numbers are never used again.
 */

#ifndef DSRUN_H
#define DSRUN_H

#include <stddef.h>
#include <stdint.h>


// What kind of failure an error is.
#define DSR_CODE_INVALID_ARGUMENT 1
#define DSR_CODE_OUT_OF_MEMORY 2
#define DSR_CODE_UNSUPPORTED 3
#define DSR_CODE_FAILED_PRECONDITION 4
#define DSR_CODE_UNAVAILABLE 5
#define DSR_CODE_TIMEOUT 6
#define DSR_CODE_DEVICE_LOST 7
#define DSR_CODE_COMMUNICATION 8
#define DSR_CODE_PANIC 9
#define DSR_CODE_ABI_MISMATCH 10
#define DSR_CODE_INTERNAL 11

// Element types.
#define DSR_DTYPE_F32 1
#define DSR_DTYPE_F16 2
#define DSR_DTYPE_BF16 3
#define DSR_DTYPE_I32 4
#define DSR_DTYPE_U32 5
#define DSR_DTYPE_I8 6
#define DSR_DTYPE_U8 7

// Storage formats of weights: an element type's number, a block format's of GGUF files, or DSR_FORMAT_GROUP plus one of
// each of DSR_GROUP_*.
//
// A block format of GGUF files: consecutive elements of a row share scales. The numbers are fixed: they cross the C ABI.
//
// d, e and m are little-endian f16 numbers, q the integer of an element, and the parts of a block stand in the
// order given:
//
//   format: elements; bytes; a block; element
//   q4_0: 32; 18; d, 16 bytes of nibbles; d * (q - 8)
//   q4_1: 32; 20; d, m, 16 bytes of nibbles; d * q + m
//   q8_0: 32; 34; d, 32 signed bytes; d * q
//   q5_0: 32; 22; d, 4 bytes of fifth bits, 16 bytes of nibbles; d * (q - 16)
//   q5_1: 32; 24; d, m, 4 bytes of fifth bits, 16 bytes of nibbles; d * q + m
//   q2_k: 256; 84; 16 bytes of scales and minima, 64 bytes of pairs, d, e; d * s * q - e * t
//   q3_k: 256; 110; 32 bytes of third bits, 64 bytes of pairs, 12 bytes of scales, d; d * (s - 32) * (q - 4)
//   q4_k: 256; 144; d, e, 12 bytes of scales and minima, 128 bytes of nibbles; d * s * q - e * t
//   q5_k: 256; 176; d, e, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 of nibbles; d * s * q - e * t
//   q6_k: 256; 210; 128 bytes of nibbles, 64 bytes of upper pairs, 16 signed scales, d; d * s * (q - 32)
//
// In blocks of 32, nibble i of the low halves belongs to element i, of the high halves to element i + 16; bit i of
// the fifth bits, read as one little-endian number, to element i.
//
// In blocks of 256, let element 128 h + 32 j + l (h below 2, j below 4, l below 32), and g = 4 h + j.
// - q2_k, q3_k: the lower two bits of q are bits 2 j of byte 32 h + l of the pairs; the third bit of q3_k is bit
// g of byte l. The scale is number 2 g + l / 16. In q2_k a byte holds s in its low half, t in its high half. In
// q3_k the low four bits of scale i are a half of byte i % 8 (the low half if i < 8), the upper two are bits
// 2 (i / 4) of byte 8 + i % 4.
// - q4_k, q5_k: the lower four bits of q are a half of byte 32 (g / 2) + l (the low half if g is even); the fifth
// bit of q5_k is bit g of byte l. s and t are number g: the low six bits of bytes g and g + 4 if g < 4;
// else the low half of byte g + 4 below the upper two bits of byte g - 4, and the high half of byte g + 4 below
// those of byte g.
// - q6_k: the lower four bits of q are a half of byte 64 h + 32 (j % 2) + l (the low half if j < 2), the upper two
// bits 2 j of byte 32 h + l of the upper pairs. The scale is number 2 g + l / 16.
//
// Integers of 4 or 8 bits with a scale for each group of consecutive columns of a row.
//
// With s the group's scale, z its zero point and m its minimum, the stored integer q stands for:
//
//   offset: q, 8 bits; q, 4 bits; element
//   symmetric: a signed byte; a nibble n stands for n - 8; s * q
//   zero point: an unsigned byte; a nibble; s * (q - z)
//   minimum: an unsigned byte; a nibble; s * q + m
//
// A row stands by itself, so rows can be sliced, concatenated and permuted as they are. Its parts, all little-endian:
//
// 1. the scales of its groups, in order;
// 2. with zero points, one unsigned byte for each group; with minima, one number of the scales' type for each group;
// 3. zeros up to a multiple of 16 bytes;
// 4. the integers: a byte for each column, or a byte for two, column 2 i in the low half of byte i, 2 i + 1 in the high;
// 5. zeros up to a multiple of 16 bytes.
//
// The columns are a whole number of groups, and even where integers have 4 bits.
//
// A name is int8 or int4, g32, g64 or g128 unless the group is the row, z for zero points or m for minima, and
// _f16 or _bf16 unless scales are f32: int8, int4g128_f16, int4g32z_bf16.
#define DSR_FORMAT_F32 1
#define DSR_FORMAT_F16 2
#define DSR_FORMAT_BF16 3
#define DSR_FORMAT_I32 4
#define DSR_FORMAT_U32 5
#define DSR_FORMAT_I8 6
#define DSR_FORMAT_U8 7
#define DSR_FORMAT_Q4_0 257
#define DSR_FORMAT_Q4_1 258
#define DSR_FORMAT_Q8_0 259
#define DSR_FORMAT_Q5_0 260
#define DSR_FORMAT_Q5_1 261
#define DSR_FORMAT_Q2_K 262
#define DSR_FORMAT_Q3_K 263
#define DSR_FORMAT_Q4_K 264
#define DSR_FORMAT_Q5_K 265
#define DSR_FORMAT_Q6_K 266
#define DSR_FORMAT_GROUP 512
#define DSR_GROUP_BITS_4 0 // integers of 4 bits
#define DSR_GROUP_BITS_8 64 // integers of 8 bits
#define DSR_GROUP_ROW 0 // a scale for each row
#define DSR_GROUP_OF_32 16 // a scale for 32 columns
#define DSR_GROUP_OF_64 32 // a scale for 64 columns
#define DSR_GROUP_OF_128 48 // a scale for 128 columns
#define DSR_GROUP_SYMMETRIC 0 // counted from 0
#define DSR_GROUP_ZERO_POINT 4 // counted from an integer
#define DSR_GROUP_MINIMUM 8 // counted from a number
#define DSR_GROUP_SCALE_F32 1 // scales and minima are f32
#define DSR_GROUP_SCALE_F16 2 // scales and minima are f16
#define DSR_GROUP_SCALE_BF16 3 // scales and minima are bf16

// Sets of ops that a device has all of.
#define DSR_PROFILE_LLM_CORE_1 1
#define DSR_PROFILE_LLM_QUANT_1 2
#define DSR_PROFILE_LLM_MOE_1 3
#define DSR_PROFILE_LLM_DIST_1 4

// Ops. What each computes stands with its attributes, at the end of this file.
#define DSR_OP_EMBED 1 // y[t] = table[ids[t]] (+ position_table[positions[t]]); ids outside give zeros
#define DSR_OP_RMS_NORM 2 // y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) over groups of W features
#define DSR_OP_LAYER_NORM 3 // y = (x - mean) * rsqrt(var + eps) * weight + bias, biased variance
#define DSR_OP_LINEAR 4 // y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n])
#define DSR_OP_ACTIVATION 6 // y = f(x + bias): relu, silu, gelu_erf, gelu_tanh
#define DSR_OP_GATED_ACTIVATION 7 // y = f(gate) * up, the two halves separate, concatenated or interleaved
#define DSR_OP_ROPE 8 // rotates pairs of each head by positions[t] * inverse_frequencies[i]
#define DSR_OP_KV_WRITE 9 // cache[slots[t]] = key[t], value[t]; -1 skips
#define DSR_OP_PAGE_GATHER 11 // y[i] = cache[pages[i]]; -1 skips
#define DSR_OP_PAGE_SCATTER 12 // cache[pages[i]] = x[i]; -1 skips
#define DSR_OP_ATTENTION_PREPARE 13 // makes the backend's work list for this step's attention calls
#define DSR_OP_PAGED_ATTENTION 14 // softmax attention of ragged queries over the paged KV cache
#define DSR_OP_ATTENTION 15 // softmax attention within ragged sequences, without a cache
#define DSR_OP_ADD 16 // y = a + alpha * (b + bias) + c
#define DSR_OP_CAST 17 // y = round(x) to another float type
#define DSR_OP_GATHER_ROWS 19 // y[r] = x[rows[r]]; -1 skips the row
#define DSR_OP_PREPARE_STEP 20 // derives ids, positions, slots and lengths of a step from the request table
#define DSR_OP_LOGIT_PROCESS 21 // repetition, presence and frequency penalties, bias and mask on logits
#define DSR_OP_ARGMAX 22 // index of the largest element of each row, the lowest on ties
#define DSR_OP_SAMPLE 23 // temperature, top-k, top-p, min-p, then Gumbel-max keyed by seed, position and token
#define DSR_OP_COMMIT_TOKENS 24 // records sampled tokens in the request table
#define DSR_OP_COLUMNS 25 // y = x[:, start .. start + count]
#define DSR_OP_QUANT_PER_TOKEN 26 // scales[m] = max_k |x[m, k]| / 127, y[m, k] = round(x[m, k] / scales[m])
#define DSR_OP_LINEAR_W8A8 27 // y[m, n] = scales[m] * s[n] * sum_k x[m, k] * q[n, k] (+ bias[n]), the sum exact
#define DSR_OP_ALL_REDUCE 64 // reduces x over the ranks of a mesh axis; every rank gets the result
#define DSR_OP_ALL_GATHER 65 // puts every rank's x together, along features or rows
#define DSR_OP_REDUCE_SCATTER 66 // reduces x over the ranks; each keeps its share of features or rows
#define DSR_OP_ALL_TO_ALL 67 // block j of rank i's x becomes block i of rank j's y
#define DSR_OP_BROADCAST 68 // gives every rank the x of one rank
#define DSR_OP_SEND 69 // sends x to another rank
#define DSR_OP_RECEIVE 70 // receives into x what another rank sends
#define DSR_OP_BARRIER 71 // waits until every rank is here
#define DSR_OP_REGION 65536 // a fused op: see dsr_region
// Numbers of ops that no longer exist, never used again: 5, 10, 18.

// Values of attributes.
#define DSR_NONLINEARITY_RELU 1 // max(x, 0).
#define DSR_NONLINEARITY_SILU 2 // x / (1 + exp(-x)).
#define DSR_NONLINEARITY_GELU_ERF 3 // x / 2 * (1 + erf(x / sqrt(2))).
#define DSR_NONLINEARITY_GELU_TANH 4 // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
#define DSR_GATE_LAYOUT_SEPARATE 1 // Two operands: gate[T, F] and up[T, F].
#define DSR_GATE_LAYOUT_CONCATENATED 2 // One operand gate[T, 2 F]: first all gates, then all others.
#define DSR_GATE_LAYOUT_INTERLEAVED 3 // One operand gate[T, 2 F]: gate and other half alternate.
#define DSR_ROPE_PAIRING_HALVES 1 // Element i with i + r / 2: halves (GPT-NeoX, Hugging Face Llama).
#define DSR_ROPE_PAIRING_NEIGHBOURS 2 // Element 2 i with 2 i + 1: neighbours (GPT-J, GGUF Llama).
#define DSR_ATTENTION_MASK_CAUSAL 1 // Those at its own position and before.
#define DSR_ATTENTION_MASK_BIDIRECTIONAL 2 // All of its sequence.
#define DSR_ATTENTION_MASK_EXPLICIT 3 // All before this step's tokens, and those of this step whose bit is set in mask_bits: token trees.
#define DSR_MESH_AXIS_DATA 0 // Replicas with batches of their own.
#define DSR_MESH_AXIS_PIPELINE 1 // Stages of layers.
#define DSR_MESH_AXIS_TENSOR 2 // Slices of every layer.
#define DSR_MESH_AXIS_EXPERT 3 // Groups of experts.
#define DSR_REDUCTION_SUM 1 // The sum.
#define DSR_REDUCTION_MAX 2 // The largest.
#define DSR_REDUCTION_MIN 3 // The smallest.
#define DSR_REDUCTION_MEAN 4 // The mean; not for integers.

// Columns of a row of sampling parameters, and how many there are.
#define DSR_SAMPLING_TEMPERATURE 0 // 0 means greedy: the largest logit.
#define DSR_SAMPLING_TOP_K 1 // Keep this many of the largest logits; 0 means all. A whole number.
#define DSR_SAMPLING_TOP_P 2 // Keep the likeliest tokens until their probabilities reach this; 1 means all.
#define DSR_SAMPLING_MIN_P 3 // Keep tokens at least this likely, relative to the likeliest; 0 means all.
#define DSR_SAMPLING_REPETITION_PENALTY 4 // Divides positive and multiplies negative logits of tokens already seen; 1 means none.
#define DSR_SAMPLING_PRESENCE_PENALTY 5 // Subtracted once from logits of tokens already generated.
#define DSR_SAMPLING_FREQUENCY_PENALTY 6 // Subtracted from logits for every time the token was generated.
#define DSR_SAMPLING_COLUMNS 8

// Set in a request's count of a token if the token stands in its prompt.
#define DSR_IN_PROMPT 1073741824

// Major version of this ABI. While it is 0, host and plugin must have the same minor version too.
#define DSR_ABI_MAJOR 0

// Minor version of this ABI.
#define DSR_ABI_MINOR 2

// The most dimensions of a tensor or weight.
#define DSR_MAX_RANK 6

// "No value" where a number may be left out.
#define DSR_NONE UINT64_MAX

// "No value" in place of the number of a value in a region.
#define DSR_NO_VALUE UINT32_MAX

// In dsr_plugin_api.flags: built so that a panic ends the process. The host refuses such a plugin.
#define DSR_PLUGIN_ABORTS_ON_PANIC 1

// Levels of dsr_host_api.log.
#define DSR_LOG_ERROR 1

// Something works, but not as well as it could.
#define DSR_LOG_WARN 2

// For users.
#define DSR_LOG_INFO 3

// For developers.
#define DSR_LOG_DEBUG 4

// For developers, much of it.
#define DSR_LOG_TRACE 5

// In dsr_device_properties.flags: NaN in an input shows in exactly the results that depend on it.
#define DSR_DEVICE_STRICT_NAN 1

// The host can read the device's memory in place.
#define DSR_DEVICE_UNIFIED_MEMORY 2

// The graph table works on this device.
#define DSR_DEVICE_GRAPHS 4

// The comm table works on this device.
#define DSR_DEVICE_COLLECTIVES 8

// Kinds of memory: on the device.
#define DSR_MEMORY_DEVICE 1

// On the host, reachable by the device; has a host pointer.
#define DSR_MEMORY_PINNED 2

// In dsr_tensor_desc.flags: a call may bind an extent that makes the first dimension shorter.
#define DSR_TENSOR_BOUNDED 1

// Kinds of operands: left out.
#define DSR_OPERAND_ABSENT 0

// A tensor.
#define DSR_OPERAND_TENSOR 1

// A packed weight.
#define DSR_OPERAND_WEIGHT 2

// In dsr_support.flags: the device runs the call itself.
#define DSR_SUPPORT_NATIVE 1

// The call may be captured in a graph.
#define DSR_SUPPORT_CAPTURE_SAFE 2

// A row's result does not depend on the other rows, to the bit.
#define DSR_SUPPORT_BATCH_INVARIANT 4

// In dsr_weight_desc.flags: the weight never changes once it is packed.
#define DSR_WEIGHT_IMMUTABLE 1

// The plugin's own data; NULL if it needs none.
typedef struct dsr_backend dsr_backend;

// A piece of memory, made by the plugin.
typedef struct dsr_buffer dsr_buffer;

// A plan with its arguments, made by the plugin.
typedef struct dsr_call dsr_call;

// A call that was checked, kept by the host for a plugin: see dsr_host_api.validate_call.
typedef struct dsr_checked_call dsr_checked_call;

// A rank's membership in a group of the plugin's own collective library, made by the plugin.
typedef struct dsr_comm dsr_comm;

// An open device, made by the plugin.
typedef struct dsr_device dsr_device;

// A point in a stream, made by the plugin.
typedef struct dsr_event dsr_event;

// Calls captured for replay, made by the plugin.
typedef struct dsr_graph dsr_graph;

// The host, as its functions want to be given it.
typedef struct dsr_host dsr_host;

// A prepared op, made by the plugin.
typedef struct dsr_plan dsr_plan;

// An error of the host; NULL means success. Made by dsr_host_api.status_new only, so that it outlives the plugin. Whoever
// gets one owns it, and returns it on or frees it with dsr_host_api.status_free.
typedef struct dsr_status dsr_status;

// A queue of work that runs in order, made by the plugin.
typedef struct dsr_stream dsr_stream;

// A text the host wants to be told: see dsr_host_api.text_set.
typedef struct dsr_text dsr_text;

// A weight in the device's own layout, made by the plugin.
typedef struct dsr_weight dsr_weight;

// UTF-8 text, not ended by a zero. Empty if `length` is 0, whatever `data` is.
typedef struct dsr_str {
    // First byte.
    const char *data;
    // Number of bytes.
    size_t length;
} dsr_str;

// What an error says.
typedef struct dsr_error {
    // sizeof(dsr_error).
    uint32_t struct_size;
    // One of DSR_CODE_*.
    uint32_t code;
    // What is wrong and what to do about it.
    struct dsr_str message;
    // The op it is about; may be empty.
    struct dsr_str op;
    // The operand, result or attribute it is about; may be empty.
    struct dsr_str argument;
    // The field of the argument (such as `dtype` or `shape[1]`); may be empty.
    struct dsr_str field;
} dsr_error;

// A device before it is opened. The plugin fills it in.
typedef struct dsr_device_info {
    // sizeof(dsr_device_info) of the host.
    uint32_t struct_size;
    // What device_open takes.
    uint32_t index;
    // Bytes of memory, or DSR_NONE if not known.
    uint64_t memory_bytes;
    // Takes the device's name for people.
    struct dsr_text *name;
} dsr_device_info;

// Something a backend uses on a machine, and whether it is there. The plugin fills it in.
typedef struct dsr_finding {
    // sizeof(dsr_finding) of the host.
    uint32_t struct_size;
    // 1 if it is there and fit for use, else 0.
    uint32_t present;
    // Takes what it is: a driver, a library, a feature of the processor, a folder.
    struct dsr_text *subject;
    // Takes which version, and where; or where it was looked for and what to do.
    struct dsr_text *detail;
} dsr_finding;

// How a device is opened.
typedef struct dsr_device_options {
    // sizeof(dsr_device_options) of the host.
    uint32_t struct_size;
    // The share of the compute units this handle may use, above 0 and up to 1; 0 means all.
    float compute_share;
    // Threads a CPU device may use, or DSR_NONE for all cores.
    uint64_t threads;
    // The most bytes this handle may hold, or DSR_NONE.
    uint64_t memory_limit;
} dsr_device_options;

// What a device is and can do. The plugin fills it in.
typedef struct dsr_device_properties {
    // sizeof(dsr_device_properties) of the host.
    uint32_t struct_size;
    // Operands are bound at multiples of this many bytes: a power of two.
    uint32_t alignment;
    // Bytes of memory; 0 if not known.
    uint64_t memory_bytes;
    // Float types its kernels take: bit n stands for DSR_DTYPE_* = n. A profile is claimed for these; integers go without
    // saying, and any op may still refuse a mix of types.
    uint64_t dtypes;
    // Profiles it has all ops of: bit n stands for DSR_PROFILE_* = n.
    uint64_t profiles;
    // DSR_DEVICE_* flags.
    uint64_t flags;
    // Takes the device's name for people.
    struct dsr_text *name;
} dsr_device_properties;

// Memory in use. The plugin fills it in.
typedef struct dsr_memory_use {
    // sizeof(dsr_memory_use) of the host.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Bytes held by live buffers and weights of this handle.
    uint64_t used;
    // Bytes that can still be had, or DSR_NONE if not known.
    uint64_t free;
} dsr_memory_use;

// A tensor as it is planned for: the largest sizes that come. Its size never changes.
typedef struct dsr_tensor_desc {
    // One of DSR_DTYPE_*.
    uint32_t dtype;
    // Dimensions, at most DSR_MAX_RANK.
    uint32_t rank;
    // Sizes, outermost first; 0 behind `rank`.
    uint64_t shape[DSR_MAX_RANK];
    // Distance between neighbours of each dimension, in elements; 1 in the last; 0 behind `rank`.
    uint64_t strides[DSR_MAX_RANK];
    // DSR_TENSOR_* flags.
    uint32_t flags;
    // 0.
    uint32_t reserved;
} dsr_tensor_desc;

// Shape and storage format of a weight. Its size never changes.
typedef struct dsr_weight_type {
    // One of DSR_FORMAT_*.
    uint32_t format;
    // Dimensions; a matrix is outputs by inputs.
    uint32_t rank;
    // Sizes, outermost first; 0 behind `rank`.
    uint64_t shape[DSR_MAX_RANK];
    // 0.
    uint32_t reserved[2];
} dsr_weight_type;

// An operand as it is planned for. Its size never changes.
typedef struct dsr_operand_desc {
    // One of DSR_OPERAND_*.
    uint32_t kind;
    // 0.
    uint32_t reserved;
    // With DSR_OPERAND_TENSOR.
    struct dsr_tensor_desc tensor;
    // With DSR_OPERAND_WEIGHT: the type it was packed from.
    struct dsr_weight_type weight;
} dsr_operand_desc;

// A call in the body of a region. Its size never changes.
typedef struct dsr_region_call {
    // One of DSR_OP_*, no region.
    uint32_t op;
    // sizeof(the op's attribute struct).
    uint32_t attributes_size;
    // The op's attribute struct, such as dsr_linear_attributes.
    const void *attributes;
    // The numbers of its operands, one for each of the op's; DSR_NO_VALUE for those left out.
    const uint32_t *operands;
    // The numbers of its results, one for each of the op's.
    const uint32_t *results;
    // Length of `operands`.
    uint32_t operand_count;
    // Length of `results`.
    uint32_t result_count;
} dsr_region_call;

// A fused op: a program of its own, whose meaning is its body. Values are numbered: first the operands, then the results of
// each call in turn.
typedef struct dsr_region {
    // sizeof(dsr_region) of the caller.
    uint32_t struct_size;
    // Operands of the region.
    uint32_t operand_count;
    // A name for people; no part of what the region is.
    struct dsr_str name;
    // The body, in order.
    const struct dsr_region_call *calls;
    // The numbers of the values that are the region's results.
    const uint32_t *results;
    // Length of `calls`.
    uint32_t call_count;
    // Length of `results`.
    uint32_t result_count;
} dsr_region;

// A rank's membership in a group of the host: collectives over memory of the host, for plugins without a collective library.
// Every rank calls the same functions in the same order; each waits for the others up to the group's time limit, and fails
// with DSR_CODE_TIMEOUT or DSR_CODE_COMMUNICATION. One thread at a time.
typedef struct dsr_transport {
    // sizeof(dsr_transport) of the host.
    uint32_t struct_size;
    // This rank.
    uint32_t rank;
    // How many ranks there are.
    uint32_t ranks;
    // 0.
    uint32_t reserved;
    // First argument of every function.
    void *context;
    // Reduces `bytes` (elements of DSR_DTYPE_*) over all ranks with DSR_REDUCTION_*, in place.
    struct dsr_status *(*all_reduce)(void *context,
                                     void *bytes,
                                     size_t length,
                                     uint32_t dtype,
                                     uint32_t reduction);
    // Reduces `source` over all ranks and gives each its share, in the order of ranks: `length` bytes of `ranks * length`.
    struct dsr_status *(*reduce_scatter)(void *context,
                                         const void *source,
                                         void *destination,
                                         size_t length,
                                         uint32_t dtype,
                                         uint32_t reduction);
    // Puts the `length` bytes of every rank behind each other, in the order of ranks: `ranks * length` bytes.
    struct dsr_status *(*all_gather)(void *context,
                                     const void *source,
                                     void *destination,
                                     size_t length);
    // Block j of `source` goes to rank j, block j of `destination` comes from rank j. Both are `length` bytes, a multiple of
    // `ranks`, and do not overlap.
    struct dsr_status *(*all_to_all)(void *context,
                                     const void *source,
                                     void *destination,
                                     size_t length);
    // Gives every rank the bytes of rank `root`, in place.
    struct dsr_status *(*broadcast)(void *context, void *bytes, size_t length, uint32_t root);
    // Waits until all ranks are here.
    struct dsr_status *(*barrier)(void *context);
    // Sends bytes to another rank, without waiting for it.
    struct dsr_status *(*send)(void *context, const void *bytes, size_t length, uint32_t peer);
    // Receives what another rank sends: exactly `length` bytes.
    struct dsr_status *(*receive)(void *context, void *bytes, size_t length, uint32_t peer);
    // The error that the group has failed with, or NULL. Any thread.
    struct dsr_status *(*status)(void *context);
    // Makes everything that waits in this group, on any rank, fail now. Any thread.
    void (*abort)(void *context, struct dsr_str reason);
} dsr_transport;

// A call as it is planned for. Everything it points to is the caller's, and is valid until the function returns; `comm` and
// `transport` are valid as long as the plan.
typedef struct dsr_call_desc {
    // sizeof(dsr_call_desc) of the caller.
    uint32_t struct_size;
    // One of DSR_OP_*.
    uint32_t op;
    // The op's attribute struct, such as dsr_linear_attributes.
    const void *attributes;
    // One for each operand of the op, those left out included.
    const struct dsr_operand_desc *operands;
    // One for each result of the op. A result that updates an operand is described like it.
    const struct dsr_tensor_desc *results;
    // sizeof(the op's attribute struct).
    uint32_t attributes_size;
    // Length of `operands`.
    uint32_t operand_count;
    // Length of `results`.
    uint32_t result_count;
    // 0.
    uint32_t flags;
    // With DSR_OP_REGION: the body.
    const struct dsr_region *region;
    // For a collective, the group: of the plugin's own library, or ..
    struct dsr_comm *comm;
    // .. of the host.
    const struct dsr_transport *transport;
    // For a collective: this rank.
    uint32_t rank;
    // For a collective: how many ranks there are.
    uint32_t ranks;
} dsr_call_desc;

// Whether and how a device runs a call. The plugin fills it in.
typedef struct dsr_support {
    // sizeof(dsr_support) of the host.
    uint32_t struct_size;
    // DSR_SUPPORT_* flags; without DSR_SUPPORT_NATIVE the device does not run the call.
    uint32_t flags;
    // Scratch memory a bound call needs.
    uint64_t workspace_bytes;
    // Memory the plan will hold as long as it lives.
    uint64_t persistent_bytes;
    // For DSR_OP_ATTENTION_PREPARE: how long the device wants its work list.
    uint64_t work_words;
    // Takes why the device does not run the call: which element type, shape or feature.
    struct dsr_text *reason;
} dsr_support;

// A weight to be packed. What it points to is the caller's, and is valid until the function returns.
typedef struct dsr_weight_desc {
    // sizeof(dsr_weight_desc) of the caller.
    uint32_t struct_size;
    // DSR_WEIGHT_* flags.
    uint32_t flags;
    // Shape and format it comes in.
    struct dsr_weight_type weight_type;
} dsr_weight_desc;

// How a device would keep a weight. The plugin fills it in.
typedef struct dsr_packed_layout {
    // sizeof(dsr_packed_layout) of the host.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Bytes on the device.
    uint64_t bytes;
    // Takes a name for the layout, private to the plugin and its version.
    struct dsr_text *name;
} dsr_packed_layout;

// The rows of a weight, in the canonical layout of its format: one after the other, no padding, little-endian.
typedef struct dsr_row_reader {
    // sizeof(dsr_row_reader) of the caller.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // First argument of `rows`.
    void *context;
    // Gives the bytes of rows first .. first + count, in any order and number. They are the host's, and valid until the next
    // call or until prepack returns. One thread at a time.
    struct dsr_status *(*rows)(void *context,
                               uint64_t first,
                               uint64_t count,
                               const void **bytes,
                               size_t *length);
} dsr_row_reader;

// A range of a buffer. Its size never changes.
typedef struct dsr_slice {
    // The buffer.
    struct dsr_buffer *buffer;
    // Where the range starts, in bytes.
    uint64_t offset;
    // How many bytes it is long.
    uint64_t bytes;
} dsr_slice;

// What an operand or result is bound to. Its size never changes.
typedef struct dsr_argument {
    // One of DSR_OPERAND_*.
    uint32_t kind;
    // 0.
    uint32_t reserved;
    // With DSR_OPERAND_TENSOR: where its elements are.
    struct dsr_slice slice;
    // With a bounded tensor: an i32 on the device, how many rows of the first dimension are real. No buffer: all are.
    struct dsr_slice extent;
    // With DSR_OPERAND_WEIGHT.
    struct dsr_weight *weight;
} dsr_argument;

// What a call is bound to. What it points to is the caller's, and is valid until the function returns; the buffers and weights
// are valid as long as the bound call.
typedef struct dsr_arguments {
    // sizeof(dsr_arguments) of the caller.
    uint32_t struct_size;
    // Length of `operands`.
    uint32_t operand_count;
    // One for each operand of the description.
    const struct dsr_argument *operands;
    // One for each result; a result that updates an operand is bound to the same range.
    const struct dsr_argument *results;
    // Length of `results`.
    uint32_t result_count;
    // 0.
    uint32_t flags;
    // Scratch memory; no buffer if the plan needs none.
    struct dsr_slice workspace;
} dsr_arguments;

// What a plugin knows of the arguments of a bind, for dsr_host_api.validate_arguments.
typedef struct dsr_bind_limits {
    // sizeof(dsr_bind_limits) of the plugin.
    uint32_t struct_size;
    // The device's alignment.
    uint32_t alignment;
    // Scratch memory the plan needs.
    uint64_t workspace_bytes;
    // First argument of the functions.
    void *context;
    // How long a buffer is; DSR_NONE if it is no buffer of this plugin.
    uint64_t (*buffer_bytes)(void *context, const struct dsr_buffer *buffer);
    // The type a weight was packed from; 0 if it is no weight of this plugin, else 1. May be NULL if no op here takes one.
    uint32_t (*weight_type)(void *context,
                            const struct dsr_weight *weight,
                            struct dsr_weight_type *weight_type);
} dsr_bind_limits;

// The name of a group while its ranks gather.
typedef struct dsr_group_id {
    // What one rank made and gave to the others.
    uint8_t bytes[128];
} dsr_group_id;

// What the host gives a plugin. It is valid for ever. All functions may be called from any thread, at the same time.
typedef struct dsr_host_api {
    // sizeof(dsr_host_api) of the host.
    uint32_t struct_size;
    // DSR_ABI_MAJOR of the host.
    uint16_t abi_major;
    // DSR_ABI_MINOR of the host.
    uint16_t abi_minor;
    // First argument of the functions.
    struct dsr_host *host;
    // The file this plugin was loaded from; empty if it is linked into the program.
    struct dsr_str library_path;
    // Makes an error. Copies the texts; the caller owns the result. Never NULL: if `error` cannot be read, the result says so.
    struct dsr_status *(*status_new)(struct dsr_host *host, const struct dsr_error *error);
    // Reads an error. The texts are valid until it is freed. Success (NULL) reads as code 0 and empty texts.
    void (*status_get)(struct dsr_host *host,
                       const struct dsr_status *status,
                       struct dsr_error *error);
    // Frees an error that the plugin got and does not return. NULL is allowed.
    void (*status_free)(struct dsr_host *host, struct dsr_status *status);
    // Sets a text the host asked for; the last one counts. Copies it.
    void (*text_set)(struct dsr_host *host, struct dsr_text *text, struct dsr_str value);
    // Writes to the host's log with a DSR_LOG_* level. May be called while the plugin holds locks.
    void (*log)(struct dsr_host *host, uint32_t level, struct dsr_str message);
    // Checks everything that can be wrong with a call. The host does this in front of every plugin; a plugin that checks what
    // it is given, whoever calls it, begins query and plan with this. The error names op, argument and field. If `kept` is not
    // NULL it takes a copy for validate_arguments, which the plugin owns and frees with checked_call_free.
    struct dsr_status *(*validate_call)(struct dsr_host *host,
                                        const struct dsr_call_desc *call,
                                        struct dsr_checked_call **kept);
    // Checks everything that can be wrong with the arguments of a bind: sizes, offsets, alignment, aliases, the types of
    // weights. `call` is what was planned; `limits` asks the plugin about its own buffers and weights.
    struct dsr_status *(*validate_arguments)(struct dsr_host *host,
                                             const struct dsr_checked_call *call,
                                             const struct dsr_arguments *arguments,
                                             const struct dsr_bind_limits *limits);
    // Frees a copy of a call. NULL is allowed.
    void (*checked_call_free)(struct dsr_host *host, struct dsr_checked_call *call);
    // A table of functions that are not in this version, by name; NULL if the host does not have it.
    const void *(*get_extension)(struct dsr_host *host, struct dsr_str name);
} dsr_host_api;

// Memory. Any thread, at the same time.
typedef struct dsr_memory_api {
    // sizeof(dsr_memory_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Allocates memory of a DSR_MEMORY_* kind. Its contents are zero. The host owns it and frees it once.
    // DSR_CODE_OUT_OF_MEMORY says what was asked for and what is free; DSR_CODE_FAILED_PRECONDITION during capture.
    struct dsr_status *(*allocate)(struct dsr_device *device,
                                   uint64_t bytes,
                                   uint32_t kind,
                                   struct dsr_buffer **buffer);
    // Frees memory, once all work that was enqueued with it is done. Waits if it has to.
    void (*free)(struct dsr_buffer *buffer);
    // The address by which the host may access it, valid until it is freed; NULL if the host may not. Accesses do not race
    // with work on streams.
    void *(*host_pointer)(struct dsr_buffer *buffer);
    // Memory in use.
    struct dsr_status *(*memory_use)(struct dsr_device *device, struct dsr_memory_use *memory_use);
} dsr_memory_api;

// Streams. A stream is used by one thread at a time and may move between threads. Work runs in order, and may run later: what
// enqueues reports wrong arguments only. A fault of the device shows where the stream or an event is waited for, and stays:
// after DSR_CODE_DEVICE_LOST only freeing works.
typedef struct dsr_stream_api {
    // sizeof(dsr_stream_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Creates a stream. The host owns it and frees it once.
    struct dsr_status *(*create)(struct dsr_device *device, struct dsr_stream **stream);
    // Frees a stream. Its work is finished first.
    void (*free)(struct dsr_stream *stream);
    // Copies bytes from the host. `source` may be reused as soon as this returns. `length` is that of `destination`.
    struct dsr_status *(*upload)(struct dsr_stream *stream,
                                 const void *source,
                                 size_t length,
                                 const struct dsr_slice *destination);
    // Waits for all work enqueued so far, then copies bytes to the host. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    struct dsr_status *(*download)(struct dsr_stream *stream,
                                   const struct dsr_slice *source,
                                   void *destination,
                                   size_t length,
                                   struct dsr_str what,
                                   uint64_t timeout_nanoseconds);
    // Copies bytes on the device. The ranges are equally long and do not overlap.
    struct dsr_status *(*copy)(struct dsr_stream *stream,
                               const struct dsr_slice *source,
                               const struct dsr_slice *destination);
    // Sets every byte to `byte`, below 256.
    struct dsr_status *(*fill)(struct dsr_stream *stream,
                               const struct dsr_slice *destination,
                               uint32_t byte);
    // Lets `event` mark the point reached when everything enqueued so far is done.
    struct dsr_status *(*record)(struct dsr_stream *stream, struct dsr_event *event);
    // Lets later work wait for an event recorded on any stream of the plugin.
    struct dsr_status *(*wait)(struct dsr_stream *stream, struct dsr_event *event);
    // Waits until everything enqueued so far is done. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    struct dsr_status *(*synchronize)(struct dsr_stream *stream,
                                      struct dsr_str what,
                                      uint64_t timeout_nanoseconds);
} dsr_stream_api;

// Events. Any thread, at the same time.
typedef struct dsr_event_api {
    // sizeof(dsr_event_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Creates an event. The host owns it and frees it once.
    struct dsr_status *(*create)(struct dsr_device *device, struct dsr_event **event);
    // Frees an event.
    void (*free)(struct dsr_event *event);
    // Sets `reached` to 1 if the point last recorded is reached or none ever was, else to 0.
    struct dsr_status *(*reached)(struct dsr_event *event, uint32_t *reached);
    // Waits until it is reached. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    struct dsr_status *(*synchronize)(struct dsr_event *event,
                                      struct dsr_str what,
                                      uint64_t timeout_nanoseconds);
    // Time from an earlier event to this one; DSR_NONE if the device keeps no time. DSR_CODE_INVALID_ARGUMENT if one of the
    // two was never recorded.
    struct dsr_status *(*elapsed)(struct dsr_event *event,
                                  struct dsr_event *earlier,
                                  uint64_t *nanoseconds);
} dsr_event_api;

// Ops. Any thread, at the same time, but for enqueue: a bound call and a stream are used by one thread at a time.
typedef struct dsr_op_api {
    // sizeof(dsr_op_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Whether and how the device runs a call. Cheap. What cannot be run is an answer and no error.
    struct dsr_status *(*query)(struct dsr_device *device,
                                const struct dsr_call_desc *call,
                                struct dsr_support *support);
    // How the device would keep a weight. Cheap. DSR_CODE_UNSUPPORTED if it cannot keep this format.
    struct dsr_status *(*prepack_query)(struct dsr_device *device,
                                        const struct dsr_weight_desc *weight,
                                        struct dsr_packed_layout *layout);
    // Brings a weight to the device in the layout that prepack_query named. The host owns the result and frees it once. Errors
    // of the reader are returned on. `rows` is valid until this returns.
    struct dsr_status *(*prepack)(struct dsr_device *device,
                                  struct dsr_stream *stream,
                                  const struct dsr_weight_desc *weight,
                                  const struct dsr_row_reader *rows,
                                  struct dsr_weight **packed);
    // Bytes a packed weight holds on the device.
    uint64_t (*weight_bytes)(struct dsr_weight *weight);
    // Frees a packed weight, once all work that was enqueued with it is done.
    void (*weight_free)(struct dsr_weight *weight);
    // Prepares a call that query answers natively. May compile, tune and allocate. The host owns the plan, uses it for any
    // number of bound calls, and frees it once, after them. DSR_CODE_UNSUPPORTED if the device does not run the call.
    struct dsr_status *(*plan)(struct dsr_device *device,
                               const struct dsr_call_desc *call,
                               struct dsr_plan **plan);
    // Frees a plan.
    void (*plan_free)(struct dsr_plan *plan);
    // Scratch memory a bound call needs.
    uint64_t (*plan_workspace)(struct dsr_plan *plan);
    // Fixes the arguments of a call. The host owns the bound call and frees it once; it keeps plan, buffers and weights until
    // then.
    struct dsr_status *(*bind)(struct dsr_plan *plan,
                               const struct dsr_arguments *arguments,
                               struct dsr_call **call);
    // Enqueues a bound call. Never allocates, never waits.
    struct dsr_status *(*enqueue)(struct dsr_call *call, struct dsr_stream *stream);
    // Frees a bound call.
    void (*call_free)(struct dsr_call *call);
} dsr_op_api;

// Capturing and replaying work. A graph and a stream are used by one thread at a time.
typedef struct dsr_graph_api {
    // sizeof(dsr_graph_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Captures calls, in order, for replay on streams of this device. None of them runs. The host owns the graph and frees it
    // once; it keeps the calls until then.
    struct dsr_status *(*capture)(struct dsr_device *device,
                                  struct dsr_stream *stream,
                                  struct dsr_call *const *calls,
                                  size_t count,
                                  struct dsr_graph **graph);
    // Enqueues all of it.
    struct dsr_status *(*launch)(struct dsr_graph *graph, struct dsr_stream *stream);
    // Frees a graph.
    void (*free)(struct dsr_graph *graph);
} dsr_graph_api;

// Collectives of the plugin's own library. Any thread, at the same time.
typedef struct dsr_comm_api {
    // sizeof(dsr_comm_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Makes the name of a new group. One rank does, and the host brings it to the others.
    struct dsr_status *(*group_id)(struct dsr_device *device, struct dsr_group_id *id);
    // Joins a group, and waits until all ranks have. The host owns the membership and frees it once, after every plan that uses
    // it. DSR_CODE_TIMEOUT names the ranks that are missing.
    struct dsr_status *(*join)(struct dsr_device *device,
                               const struct dsr_group_id *id,
                               uint32_t rank,
                               uint32_t ranks,
                               uint64_t timeout_nanoseconds,
                               struct dsr_comm **comm);
    // Leaves a group.
    void (*free)(struct dsr_comm *comm);
    // The error of a collective that failed after it was enqueued, or NULL.
    struct dsr_status *(*status)(struct dsr_comm *comm);
    // Makes everything that waits in this group, on any rank, fail now.
    void (*abort)(struct dsr_comm *comm, struct dsr_str reason);
} dsr_comm_api;

// What a plugin gives the host. It is valid for ever; the host does not unload plugins. Functions may be called from any
// thread, at the same time. Tables and functions are never NULL unless they say so.
typedef struct dsr_plugin_api {
    // sizeof(dsr_plugin_api) of the plugin.
    uint32_t struct_size;
    // DSR_ABI_MAJOR of the plugin.
    uint16_t abi_major;
    // DSR_ABI_MINOR of the plugin.
    uint16_t abi_minor;
    // DSR_PLUGIN_* flags.
    uint64_t flags;
    // First argument of the functions; may be NULL.
    struct dsr_backend *backend;
    // The name users select it by: lower case, digits and "-".
    struct dsr_str name;
    // Its version.
    struct dsr_str version;
    // What it is, in a line.
    struct dsr_str description;
    // How many devices there are now: 0 if there are none. DSR_CODE_UNAVAILABLE if a driver or library is missing: the message
    // says which, and where it was looked for.
    struct dsr_status *(*device_count)(struct dsr_backend *backend, uint32_t *count);
    // Describes device number `position`, below device_count.
    struct dsr_status *(*device_info)(struct dsr_backend *backend,
                                      uint32_t position,
                                      struct dsr_device_info *info);
    // Opens a device, or a share of one. The host owns it and closes it once, when everything made from it is freed. `options`
    // may be NULL. DSR_CODE_INVALID_ARGUMENT if there is no such device or an option cannot be met.
    struct dsr_status *(*device_open)(struct dsr_backend *backend,
                                      uint32_t index,
                                      const struct dsr_device_options *options,
                                      struct dsr_device **device);
    // Closes a device.
    void (*device_close)(struct dsr_device *device);
    // What the device is and can do; always the same for an open device.
    struct dsr_status *(*device_properties)(struct dsr_device *device,
                                            struct dsr_device_properties *properties);
    // Memory.
    const struct dsr_memory_api *memory;
    // Streams.
    const struct dsr_stream_api *stream;
    // Events.
    const struct dsr_event_api *event;
    // Ops.
    const struct dsr_op_api *op;
    // Graphs; may be NULL: the host replays calls one by one.
    const struct dsr_graph_api *graph;
    // Collectives; may be NULL: calls that need them are given a dsr_transport.
    const struct dsr_comm_api *comm;
    // A table of functions that are not in this version, by name; NULL if there is none. May be NULL itself.
    const void *(*get_extension)(struct dsr_backend *backend, struct dsr_str name);
} dsr_plugin_api;

// The extension "diagnose" of a plugin: what it uses on this machine, and what it found of it, for people.
typedef struct dsr_diagnose_api {
    // sizeof(dsr_diagnose_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // How many findings there are.
    struct dsr_status *(*finding_count)(struct dsr_backend *backend, uint32_t *count);
    // Describes finding number `position`, below finding_count.
    struct dsr_status *(*finding)(struct dsr_backend *backend,
                                  uint32_t position,
                                  struct dsr_finding *finding);
} dsr_diagnose_api;

// The extension "prepare" of a plugin: what it builds is built ahead of the first request, also on a machine without the device.
// Any thread, at the same time.
typedef struct dsr_prepare_api {
    // sizeof(dsr_prepare_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // A device that is not here, by a name that the plugin knows it by; closed as others are. It answers query, prepack_query and
    // plan as the device would, has no memory to allocate, and runs nothing. DSR_CODE_INVALID_ARGUMENT if the name is not known
    // or says too little: the message says which names there are. DSR_CODE_UNSUPPORTED if there are none.
    struct dsr_status *(*device_describe)(struct dsr_backend *backend,
                                          struct dsr_str name,
                                          struct dsr_device **device);
    // Builds what a graph of such calls, in this order, would need beside what planning each of them builds.
    struct dsr_status *(*graph_prepare)(struct dsr_device *device,
                                        const struct dsr_call_desc *const *calls,
                                        size_t count);
} dsr_prepare_api;

// The one symbol a plugin exports, as `dsrun_plugin_entry_v0`. Called once for every load, before anything else. `host` is
// valid for ever. Sets `plugin` to the plugin's table, which is valid for ever.
typedef struct dsr_status *(*dsr_plugin_entry)(const struct dsr_host_api *host,
                                               const struct dsr_plugin_api **plugin);

// Ops: operands and results of each, in order; its definition; and its attributes for dsr_call_desc.attributes. An
// operand with `?` may be left out; a result `y = x` is the operand x, updated in place.

// embed(ids: i32, table: weight, positions?: i32, position_table?: weight) -> y
//
// Token embedding: y[t] = table[ids[t] - first_row] (+ position_table[positions[t] + position_offset]).
//
//   ids: i32 [T]; token ids
//   table: weight [V, H]; rows first_row .. first_row + V of the vocabulary
//   positions: i32 [T], optional; needed with position_table
//   position_table: weight [P, H], optional; learned positions
//   -> y: dtype [T, H]
//
// An id outside the table's rows, -1 included, contributes zeros: so shards of the vocabulary add up to the whole. A
// position that is -1, or outside its table, contributes zeros too. The sum is rounded once.
typedef struct dsr_embed_attributes {
    // Element type of the result; a float.
    uint32_t dtype;
    // The vocabulary's row that is row 0 of table.
    uint32_t first_row;
    // Added to every position (OPT counts positions from 2).
    uint32_t position_offset;
} dsr_embed_attributes;

// rms_norm(x: float, weight: float) -> y
//
// Root-mean-square norm: y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset).
//
//   x: float [T, H]
//   weight: float [W]; W divides H
//   -> y: as x
//
// Each run of W consecutive features is a group with its own mean; W = H is the usual norm, W = head size norms
// every head of a projection by itself. Computed in f32, rounded once.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
typedef struct dsr_rms_norm_attributes {
    // Added to the mean square; not negative.
    float eps;
    // Added to the weight (1 in models that store weight - 1).
    float weight_offset;
} dsr_rms_norm_attributes;

// layer_norm(x: float, weight?: float, bias?: float) -> y
//
// Layer norm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias, with the biased variance.
//
//   x: float [T, H]
//   weight: float [H], optional; ones if absent
//   bias: float [H], optional; zeros if absent
//   -> y: as x
//
// Computed in f32 in two passes (mean first), rounded once.
typedef struct dsr_layer_norm_attributes {
    // Added to the variance; not negative.
    float eps;
} dsr_layer_norm_attributes;

// linear(x: float, weight: weight, bias?: float) -> y
//
// Linear layer: y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n]).
//
//   x: float [M, K]
//   weight: weight [N, K]; any format; quantised elements are what their format's formula says
//   bias: float [N], optional
//   -> y: dtype [M, N]
//
// Products are accumulated in f32 or better; the sum with the bias is rounded once. A backend may round dequantised
// weights to the element type of x, but may not quantise x: that is an op of its own.
typedef struct dsr_linear_attributes {
    // Element type of the result; a float.
    uint32_t dtype;
} dsr_linear_attributes;

// activation(x: float, bias?: float) -> y
//
// y = f(min(x + bias, limit)).
//
//   x: float [T, F]
//   bias: float [F], optional
//   -> y: as x
//
// Computed in f32, rounded once.
typedef struct dsr_activation_attributes {
    // The function f. DSR_NONLINEARITY_*.
    uint32_t function;
    // The largest input; 0 means no limit.
    float limit;
} dsr_activation_attributes;

// gated_activation(gate: float, up?: float, bias?: float) -> y
//
// Gated activation: y = f(min(g + bias_g, limit)) * clamp(u + bias_u, -limit, limit).
//
//   gate: float [T, F], or [T, 2 F] if the layout packs both
//   up: as gate, [T, F]; only with layout separate
//   bias: float, [2 F], optional; laid out as a packed row is; gates first with layout separate
//   -> y: as gate, [T, F]
//
// Computed in f32, rounded once.
// Source: Shazeer, "GLU Variants Improve Transformer" (2020).
typedef struct dsr_gated_activation_attributes {
    // The function f. DSR_NONLINEARITY_*.
    uint32_t function;
    // Where gate and other half are. DSR_GATE_LAYOUT_*.
    uint32_t layout;
    // The largest gate and the largest size of the other half; 0 means no limit.
    float limit;
} dsr_gated_activation_attributes;

// rope(x: float, positions: i32, inverse_frequencies: f32) -> y
//
// Rotates pairs of every head by an angle that grows with the position.
//
// With a = positions[t] * inverse_frequencies[i], pair i of each head, (p, q), becomes
// scale * (p cos a - q sin a, q cos a + p sin a). The first r = 2 * len(inverse_frequencies) elements of a head
// are rotated; the rest are copied.
//
//   x: float [T, heads * D]
//   positions: i32 [T]; -1 marks a row that is not real: it is not written
//   inverse_frequencies: f32 [r / 2]; after any scaling for long context; r <= D
//   -> y: as x
//
// The angle is computed in f32 (the product rounded once), sine and cosine to f32 accuracy, the result rounded once.
// Source: Su et al., "RoFormer" (2021).
typedef struct dsr_rope_attributes {
    // Heads in a row.
    uint32_t heads;
    // Which elements are rotated together. DSR_ROPE_PAIRING_*.
    uint32_t pairing;
    // Multiplies the rotated elements (1 unless the model's scaling for long context says otherwise).
    float scale;
} dsr_rope_attributes;

// kv_write(key_cache: float, value_cache: float, key: float, value: float, slots: i32) -> key_cache
//     = key_cache, value_cache = value_cache
//
// Writes the keys and values of this step's tokens into their slots.
//
//   key_cache: float [P, heads, B, D]; updated
//   value_cache: as key_cache, [P, heads, B, D']; updated
//   key: float [T, heads * D]
//   value: float [T, heads * D']
//   slots: i32 [T]; where row t goes; -1 skips; no slot twice
//   -> key_cache, value_cache: the operands, updated
//
// Rounded once if the cache has another element type. Slots outside the cache are treated as -1.

// page_gather(cache: float, pages: i32) -> y
//
// Gathers pages into rows, to move them elsewhere: y[i] = cache[pages[i]], flattened.
//
//   cache: float [P, heads, B, D]
//   pages: i32 [N]; -1 skips: the row is not written
//   -> y: as cache, [N, heads * B * D]
//
// Exact. Pages outside the cache are treated as -1.

// page_scatter(cache: float, x: float, pages: i32) -> cache = cache
//
// The inverse of page_gather: cache[pages[i]] = x[i].
//
//   cache: float [P, heads, B, D]; updated
//   x: as cache, [N, heads * B * D]
//   pages: i32 [N]; -1 skips; no page twice
//   -> cache: the operand, updated
//
// Exact. Pages outside the cache are treated as -1.

// attention_prepare(query_start: i32, query_length: i32, kv_length: i32) -> work
//
// Makes the work list that all attention calls of a step share, sized for the device.
//
//   query_start, query_length, kv_length: i32 [S]
//   -> work: i32 [words]; private to the backend
//
// What is in the list is the backend's own business; words is what it asks for when queried. A backend that needs
// no list asks for 0.
typedef struct dsr_attention_prepare_attributes {
    // Length of the work list.
    uint32_t words;
} dsr_attention_prepare_attributes;

// paged_attention(query: float, key_cache: float, value_cache: float, query_start: i32,
//     query_length: i32, kv_length: i32, block_table: i32, work: i32, alibi?: f32, sinks?: f32,
//     mask_bits?: u32) -> y, log_sum_exp
//
// Attention of this step's queries over the paged KV cache, prompt chunks and single tokens mixed.
//
// For query head h of token t at position p of sequence s, over the keys i < kv_length[s] it sees:
// score_i = softcap(scale * q . k_i) - alibi[h] * (p - i), w = softmax(score), y = sum_i w_i v_i, with
// softcap(x) = c * tanh(x / c). Query head h reads KV head h / (query_heads / kv_heads). Key i is slot
// i % B of page block_table[s, i / B].
//
//   query: float [T, query_heads * D]; rows of no sequence are not real: their result is not written
//   key_cache: float [P, kv_heads, B, D]; this step's keys are already in it
//   value_cache: as key_cache, [P, kv_heads, B, D']
//   query_start, query_length, kv_length: i32 [S]
//   block_table: i32 [S, N]; -1 behind the last page
//   work: i32 [words]; of attention_prepare
//   alibi: f32 [query_heads], optional; slopes
//   sinks: f32 [query_heads], optional; joins the softmax as one more score with no value
//   mask_bits: u32 [T, ceil(L / 32)], with mask explicit; bit j of row t: it sees its step's token j < L
//   -> y: as query, [T, query_heads * D']
//   -> log_sum_exp: f32 [T, query_heads]; of the scores, sinks included
//
// With window = w > 0 a query also sees no key at i <= p - w. A query that sees nothing gives zeros, and minus
// infinity or its sink. Scores and sums in f32 or better; weights may be rounded to the element type of the cache before they
// multiply values (one inner rounding); the result is rounded once.
typedef struct dsr_paged_attention_attributes {
    // Heads of query; a multiple of kv_heads.
    uint32_t query_heads;
    // Heads of the caches.
    uint32_t kv_heads;
    // Multiplies every score.
    float scale;
    // Bounds the scores smoothly; 0 means no bound.
    float softcap;
    // How many positions back a query sees, its own counted; 0 means all.
    uint32_t window;
    // Which keys a query sees. DSR_ATTENTION_MASK_*.
    uint32_t mask;
} dsr_paged_attention_attributes;

// attention(query: float, key: float, value: float, start: i32, length: i32, alibi?: f32) -> y
//
// Attention within ragged sequences, without a cache: what encoders use.
//
// As paged_attention, with key i of sequence s being row start[s] + i of key and value, and all sequences
// as long as their queries.
//
//   query: float [T, query_heads * D]
//   key: as query, [T, kv_heads * D]
//   value: as query, [T, kv_heads * D']
//   start, length: i32 [S]; rows of each sequence
//   alibi: f32 [query_heads], optional; slopes
//   -> y: as query, [T, query_heads * D']
//
// The mask is causal or bidirectional; bidirectional ALiBi uses the distance |p - i|, and a bidirectional window
// sees |p - i| < window.
typedef struct dsr_attention_attributes {
    // Heads of query; a multiple of kv_heads.
    uint32_t query_heads;
    // Heads of key and value.
    uint32_t kv_heads;
    // Multiplies every score.
    float scale;
    // Bounds the scores smoothly; 0 means no bound.
    float softcap;
    // How many positions away a query sees, its own counted; 0 means all.
    uint32_t window;
    // Which keys a query sees; not explicit. DSR_ATTENTION_MASK_*.
    uint32_t mask;
} dsr_attention_attributes;

// add(a: float, b: float, c?: float, bias?: float) -> y
//
// Residual sum: y = a + alpha * (b + bias) + c.
//
//   a, b: float [T, H], of one type
//   c: as a, optional; a second residual (parallel attention and MLP)
//   bias: float [H], optional
//   -> y: as a
//
// Computed in f32, rounded once.
typedef struct dsr_add_attributes {
    // Multiplies b + bias.
    float alpha;
} dsr_add_attributes;

// cast(x: float) -> y
//
// Copies and rounds to another float type: y = round(x), to nearest, ties to even.
//
//   x: float [T, H]
//   -> y: dtype [T, H]
//
// Exact but for the rounding; the same type copies bits. Values beyond f16's range become infinite.
typedef struct dsr_cast_attributes {
    // Element type of the result; a float.
    uint32_t dtype;
} dsr_cast_attributes;

// gather_rows(x: float, rows: i32) -> y
//
// Picks rows: y[r] = x[rows[r]].
//
//   x: float [T, H]
//   rows: i32 [R]; indices into x; -1 skips
//   -> y: as x, [R, H]
//
// Exact. A row whose index is -1 is not written. An index outside x or its extent is a caller's error and is
// treated as -1.

// prepare_step(step_request: i32, step_length: i32, step_source: i32, prompt_ids: i32, rows: i32,
//     block_table: i32, last_token: i32, finished: i32, length: i32, counts: i32) -> ids,
//     positions, slots, query_start, query_length, kv_length, tables, row_positions, length =
//     length, counts = counts
//
// Derives a step's inputs from the request table and the step's plan, and advances the table.
//
// Sequence s of the step is request c = step_request[s]. If step_source[s] >= 0 it brings step_length[s]
// prompt tokens, prompt_ids[step_source[s] ..]; if it is -1 it brings the one token the request generated last.
// Tokens are laid out one sequence after the other.
//
//   step_request: i32 [S]; row of the request table; -1 is a padded sequence
//   step_length: i32 [S]; tokens it brings; 1 for a generated token
//   step_source: i32 [S]; where in prompt_ids they start, or -1
//   prompt_ids: i32 [T]; prompt tokens of this step
//   rows: i32 [R]; rows of the step whose logits are wanted; -1 skips
//   block_table: i32 [C, N]; pages of each request, -1 behind the last
//   last_token: i32 [C]; the token generated last
//   finished: i32 [C]; not 0: the request is done and brings nothing any more
//   length: i32 [C]; tokens in the KV cache; updated: grows by those it brings
//   counts: i32 [C, V]; updated: DSR_IN_PROMPT is set for the prompt tokens it brings
//   -> ids: i32 [T]; -1 behind the last
//   -> positions: i32 [T]; -1 behind the last
//   -> slots: i32 [T]; where keys and values go; -1 where there is no page
//   -> query_start, query_length, kv_length: i32 [S]; lengths 0 for a padded or finished sequence, whose start and table say nothing
//   -> tables: i32 [S, N]; rows of block_table, in the step's order
//   -> row_positions: i32 [R]; position of the token that follows each wanted row; -1 for skipped rows
//   -> length, counts: the operands, updated
//
// A sequence that is finished keeps its place: its rows get id, position and slot -1, its lengths are 0. Exact.
typedef struct dsr_prepare_step_attributes {
    // Slots of a page.
    uint32_t block_size;
} dsr_prepare_step_attributes;

// logit_process(logits: float, requests: i32, parameters: f32, counts: i32, bias?: f32, mask?: u32)
//     -> y
//
// Penalties, bias and mask on logits.
//
// For row r of request c = requests[r], with n the count of token v (see DSR_IN_PROMPT):
// x = logits[r, v]; if the token was seen, in the prompt or generated, x = x / p for x > 0 and x * p else, with
// the repetition penalty p; then x -= frequency * n, x -= presence if n > 0, x += bias[c, v]; minus infinity
// where the mask bit is 0.
//
//   logits: float [R, V]
//   requests: i32 [R]; -1 skips the row: it is not written
//   parameters: f32 [C, 8]
//   counts: i32 [C, V]
//   bias: f32 [C, V], optional
//   mask: u32 [R, ceil(V / 32)], optional; bit v % 32 of word v / 32: token v is allowed
//   -> y: f32 [R, V]
//
// Computed in f32.

// argmax(x: float) -> ids
//
// The index of the largest element of each row; the lowest on ties.
//
//   x: float [R, V]; NaN counts as minus infinity
//   -> ids: i32 [R]; -1 if the row is empty or all NaN
//
// Exact.

// sample(logits: f32, requests: i32, positions: i32, parameters: f32, seeds: u32) -> ids,
//     log_probability
//
// Draws one token per row, by Gumbel-max over what the filters leave.
//
// For row r of request c = requests[r], with temperature t, and ties broken towards the lower id throughout:
//
// 1. t = 0: the token of the largest logit (as argmax, but minus infinity is no choice).
// 2. Otherwise x = logits / t. Keep the top_k largest; p = softmax over them; keep the likeliest until their
// sum reaches top_p (the token that reaches it included, so at least one); keep those with p >= min_p * max(p).
// 3. The token is the argmax over what is left of x + g, g = -ln(-ln(1 - v)), with v = (w + 0.5) / 2^32 and w
// the first word of Philox4x32-10 with key seeds[c] and counter (token, positions[r], 0, 0). (ln_1p(-v)
// keeps the rare large g exact in f32, where v is held to at most 1 - 2^-24.)
//
// The draw depends on seed, position and token only: not on the order of rows, on shards or on the batch.
//
//   logits: f32 [R, V]; NaN and minus infinity are never drawn
//   requests: i32 [R]; -1 skips the row: its result is -1
//   positions: i32 [R]; position of the token that is drawn
//   parameters: f32 [C, 8]
//   seeds: u32 [C, 2]
//   -> ids: i32 [R]; -1 if no token is left
//   -> log_probability: f32 [R]; ln softmax(logits)[id] of the logits given, no temperature or filter; 0 if the id is -1
//
// Sources: Gumbel (1954), Maddison et al., "A* Sampling" (2014); Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (2011).

// commit_tokens(requests: i32, ids: i32, stop_ids: i32, last_token: i32, finished: i32, counts:
//     i32) -> last_token = last_token, finished = finished, counts = counts
//
// Records the tokens a step has sampled in the request table.
//
// For every row r with c = requests[r] >= 0 and ids[r] >= 0: last_token[c] = ids[r], counts[c, ids[r]] += 1,
// and finished[c] = 1 if the token is one of stop_ids. Requests that are finished are left alone.
//
//   requests: i32 [R]; row of the request table; -1 skips; no request twice
//   ids: i32 [R]; sampled tokens; -1 skips
//   stop_ids: i32 [E]; tokens that end a request; -1 is no token
//   last_token, finished: i32 [C]; updated
//   counts: i32 [C, V]; updated
//   -> last_token, finished, counts: the operands, updated
//
// Exact.

// columns(x: float) -> y
//
// Takes a run of columns: y[t, j] = x[t, start + j] for j < count.
//
//   x: float [T, F]
//   -> y: as x, [T, count]
//
// Exact. Projections of the same activations can be one product over their concatenated weights; this takes the
// result apart again.
typedef struct dsr_columns_attributes {
    // The first column.
    uint32_t start;
    // How many; start + count <= F.
    uint32_t count;
} dsr_columns_attributes;

// quant_per_token(x: float) -> y, scales
//
// Quantises every row by itself: scales[m] = max_k |x[m, k]| / 127, y[m, k] = round(x[m, k] / scales[m]).
//
//   x: float [M, K]
//   -> y: i8 [M, K]; within ±127
//   -> scales: f32 [M]
//
// Both divisions are those of f32, rounded to nearest; round is to the nearest integer, ties to even, and what is beyond
// ±127 after it becomes ±127. Where the scale is 0 the row is all zeros. In a row with a value that is not finite, results
// are not defined; other rows are as they would be without it. In a region the values before they are rounded may be
// quantised.

// linear_w8a8(x: i8, scales: f32, weight: weight, bias?: float) -> y
//
// Linear layer over quantised activations and weights: y[m, n] = scales[m] * s[n] * sum_k x[m, k] * q[n, k] (+ bias[n]),
// with s the scales and q the integers of weight.
//
//   x: i8 [M, K]; at most 131071 columns, so that no sum overflows
//   scales: f32 [M]
//   weight: weight [N, K]; signed bytes with one scale for each row: int8, int8_f16 or int8_bf16
//   bias: float [N], optional
//   -> y: dtype [M, N]
//
// The sum of products is exact, in i32. The rest is computed in f32 or better, in any order, and rounded once. K = 0 gives
// the bias, or zeros.
typedef struct dsr_linear_w8a8_attributes {
    // Element type of the result; a float.
    uint32_t dtype;
} dsr_linear_w8a8_attributes;

// all_reduce(x: any) -> y = x
//
// y =  the reduction of every rank's x, on every rank.
//
//   x: any [T, H]; updated
//   -> y: x
//
// Floats are combined in an order that may differ between backends, each hop rounded to no less than their own type;
// every rank gets the same bits.
typedef struct dsr_all_reduce_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // How elements are combined. DSR_REDUCTION_*.
    uint32_t reduction;
} dsr_all_reduce_attributes;

// all_gather(x: any) -> y
//
// Puts every rank's x together, in the order of ranks, on every rank.
//
//   x: any [T, H]
//   -> y: as x, [T, ranks * H]; or [ranks * T, H] along the rows
//
// Exact. Along the rows, T must be known when the program is built.
typedef struct dsr_all_gather_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // How many they are.
    uint32_t ranks;
    // Whether rows are put together, and not features.
    uint32_t rows;
} dsr_all_gather_attributes;

// reduce_scatter(x: any) -> y
//
// Reduces every rank's x and leaves each rank its own share: rank i gets features i * H / ranks .., or rows.
//
//   x: any [T, H]
//   -> y: as x, [T, H / ranks]; or [T / ranks, H] along the rows
//
// Rounding as all_reduce. The shared dimension must be a known multiple of ranks.
typedef struct dsr_reduce_scatter_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // How many they are.
    uint32_t ranks;
    // Whether rows are shared out, and not features.
    uint32_t rows;
    // How elements are combined. DSR_REDUCTION_*.
    uint32_t reduction;
} dsr_reduce_scatter_attributes;

// all_to_all(x: any) -> y
//
// Exchanges blocks of rows: block j of rank i's x becomes block i of rank j's y.
//
//   x: any [T, H]; T a known multiple of ranks
//   -> y: as x
//
// Exact.
typedef struct dsr_all_to_all_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // How many they are.
    uint32_t ranks;
} dsr_all_to_all_attributes;

// broadcast(x: any) -> y = x
//
// Gives every rank the x of rank root.
//
//   x: any [T, H]; updated
//   -> y: x
//
// Exact.
typedef struct dsr_broadcast_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // The rank whose tensor everyone gets.
    uint32_t root;
} dsr_broadcast_attributes;

// send(x: any)
//
// Sends x to rank peer, which must receive it.
//
//   x: any [T, H]
//
// No result.
typedef struct dsr_send_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // Who receives.
    uint32_t peer;
} dsr_send_attributes;

// receive(x: any) -> y = x
//
// Receives into x what rank peer sends.
//
//   x: any [T, H]; updated
//   -> y: x
//
// Exact.
typedef struct dsr_receive_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // Who sends.
    uint32_t peer;
} dsr_receive_attributes;

// barrier()
//
// Waits until every rank of the axis is here. No operands, no results.
typedef struct dsr_barrier_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
} dsr_barrier_attributes;


#if defined(_WIN32)
#define DSR_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define DSR_EXPORT __attribute__((visibility("default")))
#else
#define DSR_EXPORT
#endif

/* Whether a struct of somebody else's, given by a pointer, is long enough to have a field. */
#define DSR_HAS(pointer, type, field) \
    ((pointer)->struct_size >= offsetof(type, field) + sizeof((pointer)->field))

/* A field of a struct of somebody else's: 0 if the struct is too short to have it. */
#define DSR_GET(pointer, type, field) (DSR_HAS(pointer, type, field) ? (pointer)->field : 0)

/* Sets a field of a struct that somebody else wants filled in, if the struct is long enough to have it. */
#define DSR_SET(pointer, type, field, value) \
    do { \
        if (DSR_HAS(pointer, type, field)) { \
            (pointer)->field = (value); \
        } \
    } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* What a plugin exports. `host` is valid for ever. Sets `plugin` to a table that is valid for ever. Called once for every load,
 * before anything else. */
DSR_EXPORT dsr_status *dsrun_plugin_entry_v0(const dsr_host_api *host, const dsr_plugin_api **plugin);

/* The text of a string literal, for a table that is initialised with it. */
#define DSR_TEXT(literal) {literal, sizeof(literal) - 1}

/* A text that ends with a zero. */
static inline dsr_str dsr_text_of(const char *text) {
    dsr_str result = {text, 0};
    while (text != NULL && text[result.length] != '\0') {
        result.length += 1;
    }
    return result;
}

/* An error about nothing in particular. */
static inline dsr_status *dsr_fail(const dsr_host_api *host, uint32_t code, const char *message) {
    dsr_str none = {NULL, 0};
    dsr_error error;
    error.struct_size = (uint32_t)sizeof error;
    error.code = code;
    error.message = dsr_text_of(message);
    error.op = none;
    error.argument = none;
    error.field = none;
    return host->status_new(host->host, &error);
}

/* An error about an argument (operand, result or parameter) and a field of it; `field` may be NULL. */
static inline dsr_status *dsr_fail_at(const dsr_host_api *host, uint32_t code, const char *argument,
                                      const char *field, const char *message) {
    dsr_str none = {NULL, 0};
    dsr_error error;
    error.struct_size = (uint32_t)sizeof error;
    error.code = code;
    error.message = dsr_text_of(message);
    error.op = none;
    error.argument = dsr_text_of(argument);
    error.field = dsr_text_of(field);
    return host->status_new(host->host, &error);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DSRUN_H */
