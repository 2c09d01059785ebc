/*
 * dsrun.h: the C ABI of dsrun, for authors of backends.
 *
 * Generated from dsrun-plugin-sdk by `cargo xtask header`. Do not edit.
 *
 * A backend is a dynamic library that exports one function, dsrun_plugin_entry_v0, through which host and plugin exchange
 * function tables. These rules hold for all functions:
 *
 * Errors     A function that can fail returns a dsr_status: NULL is success. The host makes errors (dsr_host_api.status_new) and
 *            frees them; a plugin returns them and keeps none. The last parameters of a function are its outputs; they are
 *            never NULL, and untouched after an error.
 * Ownership  The host owns what a plugin makes, and frees it exactly once, children before their parents. The target of a
 *            pointer parameter belongs to the caller and is valid until the function returns, unless its comment says
 *            otherwise. dsr_host_api.text_set copies the texts that a plugin sets.
 * Sizes      A struct that begins with struct_size may grow at its end in later versions. The writer of a struct sets the size
 *            it was compiled with. The reader of a struct, or the writer of one that the other side has allocated, accesses no
 *            field beyond that size; see DSR_HAS. A missing field means the same as 0. Arrays hold structs whose size never
 *            changes.
 * Threads    Any thread may call the functions of a plugin and of a device at any time. A stream, a bound call and a graph are
 *            used by one thread at a time, and may move between threads. No result may depend on the calling thread. A plugin
 *            calls the host while it holds a lock of its own only for log, text_set and status_*.
 * Unwinding  No panic, exception or longjmp leaves a function. A function that would unwind returns DSR_CODE_PANIC, after which
 *            the host stops using the object. dsrun.hpp does this for C++.
 * Tensors    Row-major, with a stride for each dimension; the last dimension is contiguous. The memory between rows is not part
 *            of the tensor. An extent is an i32 that is read when the call runs; only that many first rows are valid, and others
 *            are neither read nor written. More rows than there are means all, a negative number none. Where tensors of a call
 *            share their rows, those below all of their extents are valid. An index of -1 means skip; an index out of range is
 *            treated as -1. Sizes may be 0. Results share no memory with operands, except those they update. What operands and
 *            extents hold is read when a call runs, never when it is bound.
 * Numbers    Sums are made in f32 or wider, in any order, one running sum included. A result is rounded once, to nearest or by
 *            truncation; a region may omit inner roundings. With u the unit roundoff of a result's type and m the sum of the
 *            absolute values of its terms, a result y may be off by 2 u |y| + 2^-21 m max(1, sqrt(terms) / 4), and by 2^-20 |y|
 *            more where it is in proportion to an exponential, sine or logarithm. Copies and integers are exact. Subnormal
 *            numbers are kept in operands and results, except those of types in dsr_device_properties.flushed_operands and
 *            flushed_results. What is computed on the way may be flushed below the smallest normal f32, but not in copies, casts
 *            and additions. Infinities are infinities of the same sign; for NaN see DSR_DEVICE_STRICT_NAN.
 * Process    A plugin does not end the process, install signal handlers, write to standard output, or change the environment, the
 *            working directory or how the calling thread rounds and treats subnormal numbers. It is never unloaded.
 * Checks     The host validates all descriptions and arguments before it calls a plugin. A plugin that other callers may use
 *            validates them with one call each: dsr_host_api.validate_call and validate_arguments.
 * Version    While DSR_ABI_MAJOR is 0, host and plugin must have the same DSR_ABI_MINOR. A plugin that finds a host of another
 *            version sets its table and calls nothing; the host sees the version and reports it. Numbers are never reused.
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
// A block format of GGUF files: consecutive elements of a row share scales. The numbers are fixed because they cross the C ABI.
//
// d, e and m are little-endian f16 numbers, q the integer of an element, and the parts of a block are in the
// given order:
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
//   mxfp4: 32; 17; an exponent x, 16 bytes of nibbles; 2^(x - 127) * f
//
// In blocks of 32, nibble i of the low halves belongs to element i, of the high halves to element i + 16; bit i of
// the fifth bits, read as one little-endian number, to element i.
//
// In mxfp4, the MXFP4 of the Open Compute Project, x is a byte, 255 standing for NaN. A nibble stands for the 4-bit float f:
// 0, 0.5, 1, 1.5, 2, 3, 4 and 6 for 0 to 7, and the same with a minus sign for 8 to 15.
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
// Rows are stored independently, so they can be sliced, concatenated and permuted without decoding. The parts of a row, all
// little-endian:
//
// 1. the scales of its groups, in order;
// 2. with zero points, one unsigned byte for each group; with minima, one number of the scales' type for each group;
// 3. zeros up to a multiple of 16 bytes;
// 4. the integers: a byte for each column, or a byte for two, column 2 i in the low half of byte i, 2 i + 1 in the high;
// 5. zeros up to a multiple of 16 bytes.
//
// The number of columns is a multiple of the group, and even with integers of 4 bits.
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
#define DSR_FORMAT_MXFP4 267
#define DSR_FORMAT_GROUP 512
#define DSR_GROUP_BITS_4 0 // integers of 4 bits
#define DSR_GROUP_BITS_8 64 // integers of 8 bits
#define DSR_GROUP_ROW 0 // a scale for each row
#define DSR_GROUP_OF_32 16 // a scale for 32 columns
#define DSR_GROUP_OF_64 32 // a scale for 64 columns
#define DSR_GROUP_OF_128 48 // a scale for 128 columns
#define DSR_GROUP_SYMMETRIC 0 // signed integers
#define DSR_GROUP_ZERO_POINT 4 // an integer zero point for each group
#define DSR_GROUP_MINIMUM 8 // a minimum for each group
#define DSR_GROUP_SCALE_F32 1 // scales and minima are f32
#define DSR_GROUP_SCALE_F16 2 // scales and minima are f16
#define DSR_GROUP_SCALE_BF16 3 // scales and minima are bf16

// Sets of ops that a device has all of.
#define DSR_PROFILE_LLM_CORE_1 1
#define DSR_PROFILE_LLM_QUANT_1 2
#define DSR_PROFILE_LLM_MOE_1 3
#define DSR_PROFILE_LLM_DIST_1 4
#define DSR_PROFILE_LLM_MLA_1 5
#define DSR_PROFILE_LLM_QUANT_2 6

// Ops. What each computes stands with its attributes, at the end of this file.
#define DSR_OP_EMBED 1 // y[t] = table[ids[t]] (+ position_table[positions[t]]); ids out of range give zeros
#define DSR_OP_RMS_NORM 2 // y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) over groups of W features
#define DSR_OP_LAYER_NORM 3 // y = (x - mean) * rsqrt(var + eps) * weight + bias, biased variance
#define DSR_OP_LINEAR 4 // y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n])
#define DSR_OP_ACTIVATION 6 // y = f(x + bias): relu, silu, gelu_erf, gelu_tanh, quick_gelu, tanh
#define DSR_OP_GATED_ACTIVATION 7 // y = f(gate) * (up + up_offset), the two halves separate, concatenated or interleaved
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
#define DSR_OP_MOE_ROUTE 28 // chooses the experts of each token and their weights
#define DSR_OP_MOE_GROUP 29 // groups the assignments of tokens by expert
#define DSR_OP_GROUPED_LINEAR 30 // y[t, j] = x[t] . weight[experts[t, j]] (+ bias): the linear layers of experts
#define DSR_OP_MOE_COMBINE 31 // y[t] = sum_j weights[t, j] * x[t, j]: the weighted sum of a token's experts
#define DSR_OP_HEAD_LINEAR 32 // y[t, h] = x[t, h, ..K] . weight[h], x[t, h, K..]: a linear layer of each head
#define DSR_OP_LATENT_WRITE 33 // cache[slots[t]] = value[t], rest[t] in one cache; -1 skips
#define DSR_OP_QUANT_PER_GROUP 34 // quant_per_token of every group consecutive elements of a row
#define DSR_OP_LINEAR_A8 35 // y[m, n] = sum_k scales[m, k / group] * x[m, k] * weight[n, k] (+ bias[n])
#define DSR_OP_ALL_REDUCE 64 // reduces x over the ranks of a mesh axis; every rank gets the result
#define DSR_OP_ALL_GATHER 65 // concatenates x of all ranks, along features or rows
#define DSR_OP_REDUCE_SCATTER 66 // reduces x over the ranks; each keeps its share of features or rows
#define DSR_OP_ALL_TO_ALL 67 // block j of rank i's x becomes block i of rank j's y
#define DSR_OP_BROADCAST 68 // gives every rank the x of one rank
#define DSR_OP_SEND 69 // sends x to another rank
#define DSR_OP_RECEIVE 70 // receives into x what another rank sends
#define DSR_OP_BARRIER 71 // waits until every rank has reached the barrier
#define DSR_OP_REGION 65536 // a fused op: see dsr_region
// Numbers of ops that no longer exist, never used again: 5, 10, 18.

// Values of attributes.
#define DSR_NONLINEARITY_RELU 1 // max(x, 0).
#define DSR_NONLINEARITY_SILU 2 // x / (1 + exp(-x)).
#define DSR_NONLINEARITY_GELU_ERF 3 // x / 2 * (1 + erf(x / sqrt(2))).
#define DSR_NONLINEARITY_GELU_TANH 4 // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
#define DSR_NONLINEARITY_QUICK_GELU 5 // x / (1 + exp(-1.702 x)).
#define DSR_NONLINEARITY_TANH 6 // tanh(x).
#define DSR_GATE_LAYOUT_SEPARATE 1 // Two operands: gate[T, F] and up[T, F].
#define DSR_GATE_LAYOUT_CONCATENATED 2 // One operand gate[T, 2 F]: the gate half, then the up half.
#define DSR_GATE_LAYOUT_INTERLEAVED 3 // One operand gate[T, 2 F]: gate and up elements alternate.
#define DSR_ROPE_PAIRING_HALVES 1 // Element i with element i + r / 2 (GPT-NeoX, Hugging Face Llama).
#define DSR_ROPE_PAIRING_NEIGHBOURS 2 // Element 2 i with element 2 i + 1 (GPT-J, GGUF Llama).
#define DSR_ATTENTION_MASK_CAUSAL 1 // Those at its own position and before it.
#define DSR_ATTENTION_MASK_BIDIRECTIONAL 2 // All keys of its sequence.
#define DSR_ATTENTION_MASK_EXPLICIT 3 // All keys before this step's tokens, and those of this step whose bit is set in mask_bits, for token trees.
#define DSR_ROUTER_SCORE_SOFTMAX 1 // The softmax of all logits.
#define DSR_ROUTER_SCORE_SIGMOID 2 // 1 / (1 + exp(-z)).
#define DSR_ROUTER_SCORE_SOFTMAX_OF_SELECTED 3 // The softmax of the logits of the chosen experts.
#define DSR_ROUTER_SCORE_SPARSE_MIXER 4 // The softmax of the logits near the chosen one, again for each slot.
#define DSR_GROUP_SCORE_MAX 1 // The largest score of an expert of the group.
#define DSR_GROUP_SCORE_TOP_TWO_SUM 2 // The sum of the two largest scores of experts of the group.
#define DSR_ROUTER_NORM_NONE 1 // 1.
#define DSR_ROUTER_NORM_SUM 2 // s + eps.
#define DSR_ROUTER_NORM_CLAMPED_SUM 3 // max(s, eps).
#define DSR_MESH_AXIS_DATA 0 // Data parallelism: replicas with different batches.
#define DSR_MESH_AXIS_PIPELINE 1 // Pipeline parallelism: ranks with different layers.
#define DSR_MESH_AXIS_TENSOR 2 // Tensor parallelism: ranks with slices of every layer.
#define DSR_MESH_AXIS_EXPERT 3 // Expert parallelism: ranks with different experts.
#define DSR_REDUCTION_SUM 1 // The sum.
#define DSR_REDUCTION_MAX 2 // The maximum.
#define DSR_REDUCTION_MIN 3 // The minimum.
#define DSR_REDUCTION_MEAN 4 // The mean; for floats only.

// Columns of a row of sampling parameters, and how many there are.
#define DSR_SAMPLING_TEMPERATURE 0 // The divisor of logits; 0 means greedy: the largest logit.
#define DSR_SAMPLING_TOP_K 1 // The number of largest logits to keep, a whole number; 0 means all.
#define DSR_SAMPLING_TOP_P 2 // Keep the most probable tokens until their probabilities sum to this; 1 means all.
#define DSR_SAMPLING_MIN_P 3 // Keep tokens with at least this probability relative to the most probable one; 0 means all.
#define DSR_SAMPLING_REPETITION_PENALTY 4 // The divisor of positive and factor of negative logits of tokens already seen; 1 means no penalty.
#define DSR_SAMPLING_PRESENCE_PENALTY 5 // The amount subtracted once from logits of tokens already generated.
#define DSR_SAMPLING_FREQUENCY_PENALTY 6 // The amount subtracted from logits for each time the token was generated.
#define DSR_SAMPLING_COLUMNS 8

// Set in a request's count of a token if the token stands in its prompt.
#define DSR_IN_PROMPT 1073741824

// The major version of this ABI. While it is 0, host and plugin must also have the same minor version.
#define DSR_ABI_MAJOR 0

// The minor version of this ABI.
#define DSR_ABI_MINOR 2

// The maximum number of dimensions of a tensor or weight.
#define DSR_MAX_RANK 6

// The value of an absent number.
#define DSR_NONE UINT64_MAX

// The number of an absent value in a region.
#define DSR_NO_VALUE UINT32_MAX

// In dsr_plugin_api.flags: a panic aborts the process. The host refuses such a plugin.
#define DSR_PLUGIN_ABORTS_ON_PANIC 1

// Levels of dsr_host_api.log: a failure.
#define DSR_LOG_ERROR 1

// A problem that does not stop the work.
#define DSR_LOG_WARN 2

// Information for users.
#define DSR_LOG_INFO 3

// Information for developers.
#define DSR_LOG_DEBUG 4

// Verbose information for developers.
#define DSR_LOG_TRACE 5

// In dsr_device_options.flags: kernels are chosen so that a row's result does not depend on the other rows of a call.
#define DSR_OPTION_BATCH_INVARIANT 1

// In dsr_device_properties.flags: NaN in an input makes exactly the outputs that depend on it NaN.
#define DSR_DEVICE_STRICT_NAN 1

// The host can read device memory in place.
#define DSR_DEVICE_UNIFIED_MEMORY 2

// The device supports the graph table.
#define DSR_DEVICE_GRAPHS 4

// The device supports the comm table.
#define DSR_DEVICE_COLLECTIVES 8

// Calls take tensors in pinned memory wherever they take them in device memory, with the same results.
#define DSR_DEVICE_BINDS_PINNED 16

// Kinds of memory: device memory.
#define DSR_MEMORY_DEVICE 1

// Pinned host memory that the device can access. It has a host pointer.
#define DSR_MEMORY_PINNED 2

// In dsr_tensor_desc.flags: a call may bind an extent that makes the first dimension shorter.
#define DSR_TENSOR_BOUNDED 1

// Kinds of operands: absent.
#define DSR_OPERAND_ABSENT 0

// A tensor.
#define DSR_OPERAND_TENSOR 1

// A packed weight.
#define DSR_OPERAND_WEIGHT 2

// In dsr_support.flags: the device runs the call.
#define DSR_SUPPORT_NATIVE 1

// A graph may capture the call.
#define DSR_SUPPORT_CAPTURE_SAFE 2

// Each row's result is bit-identical whatever other rows are in the batch.
#define DSR_SUPPORT_BATCH_INVARIANT 4

// In dsr_packed_layout.flags: packed bytes can be moved with copy_packed and adopt.
#define DSR_PACKED_RELOCATABLE 1

// Kernels also read packed bytes in pinned memory: adopt takes ranges of it.
#define DSR_PACKED_READABLE_WHEN_PINNED 2

// In dsr_weight_desc.flags: the weight is never written again once it is packed.
#define DSR_WEIGHT_IMMUTABLE 1

// The plugin's own data; NULL if it needs none.
typedef struct dsr_backend dsr_backend;

// A piece of memory, made by the plugin.
typedef struct dsr_buffer dsr_buffer;

// A planned call with its arguments, made by the plugin.
typedef struct dsr_call dsr_call;

// A validated call that the host keeps for a plugin: see dsr_host_api.validate_call.
typedef struct dsr_checked_call dsr_checked_call;

// A rank's membership in a group of the plugin's own collective library, made by the plugin.
typedef struct dsr_comm dsr_comm;

// An open device, made by the plugin.
typedef struct dsr_device dsr_device;

// An event: a point in a stream, made by the plugin.
typedef struct dsr_event dsr_event;

// Captured calls, made by the plugin.
typedef struct dsr_graph dsr_graph;

// The host: the first argument of its functions.
typedef struct dsr_host dsr_host;

// A planned call, made by the plugin.
typedef struct dsr_plan dsr_plan;

// An error; NULL means success. Only dsr_host_api.status_new makes errors. The receiver of an error owns it, and returns it or
// frees it with dsr_host_api.status_free.
typedef struct dsr_status dsr_status;

// A stream: a queue of work that runs in order, made by the plugin.
typedef struct dsr_stream dsr_stream;

// The receiver of a text, to be set with dsr_host_api.text_set.
typedef struct dsr_text dsr_text;

// A weight in the layout of the device, made by the plugin.
typedef struct dsr_weight dsr_weight;

// UTF-8 text without a terminating zero. It is empty if `length` is 0, whatever `data` is.
typedef struct dsr_str {
    // The first byte.
    const char *data;
    // The number of bytes.
    size_t length;
} dsr_str;

// The contents of an error.
typedef struct dsr_error {
    // sizeof(dsr_error).
    uint32_t struct_size;
    // One of DSR_CODE_*.
    uint32_t code;
    // The message: what is wrong and what to do.
    struct dsr_str message;
    // The op at fault; may be empty.
    struct dsr_str op;
    // The operand, result or attribute at fault; may be empty.
    struct dsr_str argument;
    // The field of the argument, such as `dtype` or `shape[1]`; may be empty.
    struct dsr_str field;
} dsr_error;

// A device that can be opened. The plugin fills it in.
typedef struct dsr_device_info {
    // sizeof(dsr_device_info) of the host.
    uint32_t struct_size;
    // The index that device_open takes.
    uint32_t index;
    // The size of its memory in bytes, or DSR_NONE if unknown.
    uint64_t memory_bytes;
    // Receives the product name.
    struct dsr_text *name;
} dsr_device_info;

// A thing that a backend looks for on a machine, and whether it is present. The plugin fills it in.
typedef struct dsr_finding {
    // sizeof(dsr_finding) of the host.
    uint32_t struct_size;
    // 1 if it is present and usable, else 0.
    uint32_t present;
    // Receives what was looked for: a driver, a library, a processor feature, a folder.
    struct dsr_text *subject;
    // Receives the version and location found, or where it was searched for and what to do.
    struct dsr_text *detail;
} dsr_finding;

// Options for opening a device.
typedef struct dsr_device_options {
    // sizeof(dsr_device_options) of the host.
    uint32_t struct_size;
    // The share of the compute units that this handle may use, above 0 and up to 1; 0 means all.
    float compute_share;
    // The number of threads that a CPU device may use, or DSR_NONE for all cores.
    uint64_t threads;
    // The limit in bytes on memory that this handle holds, or DSR_NONE.
    uint64_t memory_limit;
    // DSR_OPTION_* flags.
    uint64_t flags;
} dsr_device_options;

// The properties and capabilities of a device. The plugin fills it in.
typedef struct dsr_device_properties {
    // sizeof(dsr_device_properties) of the host.
    uint32_t struct_size;
    // The alignment in bytes that buffer offsets of arguments have; a power of two.
    uint32_t alignment;
    // The size of its memory in bytes; 0 if unknown.
    uint64_t memory_bytes;
    // The float types that its kernels support: bit n stands for DSR_DTYPE_* = n. The profiles below hold for these types.
    // Integer types have no bits, and an op may refuse a mix of types.
    uint64_t dtypes;
    // The profiles of which it supports every op: bit n stands for DSR_PROFILE_* = n.
    uint64_t profiles;
    // DSR_DEVICE_* flags.
    uint64_t flags;
    // Receives the product name.
    struct dsr_text *name;
    // The float types whose subnormal numbers the device may take for zero in operands: bit n stands for DSR_DTYPE_* = n.
    uint64_t flushed_operands;
    // The float types of which a result may be zero, with its sign, where it is subnormal: bit n stands for DSR_DTYPE_* = n.
    uint64_t flushed_results;
} dsr_device_properties;

// The memory use of a device handle. The plugin fills it in.
typedef struct dsr_memory_use {
    // sizeof(dsr_memory_use) of the host.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Bytes that live buffers and weights of this handle hold.
    uint64_t used;
    // Bytes that can still be allocated, or DSR_NONE if unknown.
    uint64_t free;
} dsr_memory_use;

// A tensor as a call is planned for it, with the largest sizes it will have. The size of the struct never changes.
typedef struct dsr_tensor_desc {
    // One of DSR_DTYPE_*.
    uint32_t dtype;
    // The number of dimensions, at most DSR_MAX_RANK.
    uint32_t rank;
    // The sizes, outermost first; 0 from `rank` on.
    uint64_t shape[DSR_MAX_RANK];
    // The distance between neighbours of each dimension, in elements; 1 in the last; 0 from `rank` on.
    uint64_t strides[DSR_MAX_RANK];
    // DSR_TENSOR_* flags.
    uint32_t flags;
    // 0.
    uint32_t reserved;
} dsr_tensor_desc;

// The shape and storage format of a weight. The size of the struct never changes.
typedef struct dsr_weight_type {
    // One of DSR_FORMAT_*.
    uint32_t format;
    // The number of dimensions; a matrix is outputs by inputs.
    uint32_t rank;
    // The sizes, outermost first; 0 from `rank` on.
    uint64_t shape[DSR_MAX_RANK];
    // 0.
    uint32_t reserved[2];
} dsr_weight_type;

// An operand as a call is planned for it. The size of the struct never changes.
typedef struct dsr_operand_desc {
    // One of DSR_OPERAND_*.
    uint32_t kind;
    // 0.
    uint32_t reserved;
    // With DSR_OPERAND_TENSOR: the tensor.
    struct dsr_tensor_desc tensor;
    // With DSR_OPERAND_WEIGHT: the type it was packed from.
    struct dsr_weight_type weight;
} dsr_operand_desc;

// A call in the body of a region. The size of the struct never changes.
typedef struct dsr_region_call {
    // One of DSR_OP_*, but not DSR_OP_REGION.
    uint32_t op;
    // sizeof(the op's attribute struct).
    uint32_t attributes_size;
    // The op's attribute struct, such as dsr_linear_attributes.
    const void *attributes;
    // The values of its operands, one for each operand of the op; DSR_NO_VALUE for an absent operand.
    const uint32_t *operands;
    // The values of its results, one for each result of the op.
    const uint32_t *results;
    // Length of `operands`.
    uint32_t operand_count;
    // Length of `results`.
    uint32_t result_count;
} dsr_region_call;

// A fused op, defined by a body of calls. Values are numbered: the operands first, then the results of each call in order.
typedef struct dsr_region {
    // sizeof(dsr_region) of the caller.
    uint32_t struct_size;
    // The number of operands of the region.
    uint32_t operand_count;
    // A name for messages. It does not affect what the region computes.
    struct dsr_str name;
    // The body, in order.
    const struct dsr_region_call *calls;
    // The values that are the results of the region.
    const uint32_t *results;
    // Length of `calls`.
    uint32_t call_count;
    // Length of `results`.
    uint32_t result_count;
} dsr_region;

// A rank of a group of the host: collectives over host memory, for plugins without a collective library. Every rank calls the
// same functions in the same order. A function waits for the other ranks up to the timeout of the group, and fails with
// DSR_CODE_TIMEOUT or DSR_CODE_COMMUNICATION. One thread at a time uses it.
typedef struct dsr_transport {
    // sizeof(dsr_transport) of the host.
    uint32_t struct_size;
    // This rank.
    uint32_t rank;
    // The number of ranks in the group.
    uint32_t ranks;
    // 0.
    uint32_t reserved;
    // The first argument of every function.
    void *context;
    // Reduces `bytes` (elements of DSR_DTYPE_*) over all ranks with DSR_REDUCTION_*, in place.
    struct dsr_status *(*all_reduce)(void *context,
                                     void *bytes,
                                     size_t length,
                                     uint32_t dtype,
                                     uint32_t reduction);
    // Reduces the `ranks * length` bytes of `source` over all ranks, and writes the `length` bytes that are this rank's share
    // to `destination`.
    struct dsr_status *(*reduce_scatter)(void *context,
                                         const void *source,
                                         void *destination,
                                         size_t length,
                                         uint32_t dtype,
                                         uint32_t reduction);
    // Gathers the `length` bytes of every rank, in the order of ranks: `ranks * length` bytes.
    struct dsr_status *(*all_gather)(void *context,
                                     const void *source,
                                     void *destination,
                                     size_t length);
    // Exchanges blocks: block j of `source` goes to rank j, and block j of `destination` comes from rank j. Both are `length`
    // bytes long, a multiple of `ranks`, and do not overlap.
    struct dsr_status *(*all_to_all)(void *context,
                                     const void *source,
                                     void *destination,
                                     size_t length);
    // Copies the bytes of rank `root` to all ranks, in place.
    struct dsr_status *(*broadcast)(void *context, void *bytes, size_t length, uint32_t root);
    // Waits until all ranks have reached the barrier.
    struct dsr_status *(*barrier)(void *context);
    // Sends bytes to another rank without waiting for it.
    struct dsr_status *(*send)(void *context, const void *bytes, size_t length, uint32_t peer);
    // Receives a message of exactly `length` bytes from another rank.
    struct dsr_status *(*receive)(void *context, void *bytes, size_t length, uint32_t peer);
    // Returns the error with which the group has failed, or NULL. Any thread may call it.
    struct dsr_status *(*status)(void *context);
    // Makes every wait in this group, on every rank, fail at once. Any thread may call it.
    void (*abort)(void *context, struct dsr_str reason);
} dsr_transport;

// A call to be planned. All it points to belongs to the caller and is valid until the function returns, except `comm` and
// `transport`, which are valid as long as the plan.
typedef struct dsr_call_desc {
    // sizeof(dsr_call_desc) of the caller.
    uint32_t struct_size;
    // One of DSR_OP_*.
    uint32_t op;
    // The op's attribute struct, such as dsr_linear_attributes.
    const void *attributes;
    // One for each operand of the op, including absent ones.
    const struct dsr_operand_desc *operands;
    // One for each result of the op. A result that updates an operand has the same description.
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
    // For a collective, or a region with collectives, with the plugin's own library: the rank's membership in the group.
    struct dsr_comm *comm;
    // For such a call without one: the transport of the host.
    const struct dsr_transport *transport;
    // For such a call: this rank.
    uint32_t rank;
    // For such a call: the number of ranks in the group.
    uint32_t ranks;
} dsr_call_desc;

// The answer to whether and how a device runs a call. The plugin fills it in.
typedef struct dsr_support {
    // sizeof(dsr_support) of the host.
    uint32_t struct_size;
    // DSR_SUPPORT_* flags; without DSR_SUPPORT_NATIVE the device does not run the call.
    uint32_t flags;
    // Bytes of scratch memory that a bound call needs.
    uint64_t workspace_bytes;
    // Bytes of memory that a plan or its bound calls hold until they are freed.
    uint64_t persistent_bytes;
    // For DSR_OP_ATTENTION_PREPARE: the length that the device needs for its work list.
    uint64_t work_words;
    // Receives the reason if the device does not run the call: which element type, shape or feature is missing.
    struct dsr_text *reason;
} dsr_support;

// The description of a weight to pack.
typedef struct dsr_weight_desc {
    // sizeof(dsr_weight_desc) of the caller.
    uint32_t struct_size;
    // DSR_WEIGHT_* flags.
    uint32_t flags;
    // The shape and storage format of the rows to pack.
    struct dsr_weight_type weight_type;
} dsr_weight_desc;

// A device's layout for a weight. The plugin fills it in.
typedef struct dsr_packed_layout {
    // sizeof(dsr_packed_layout) of the host.
    uint32_t struct_size;
    // DSR_PACKED_* flags.
    uint32_t flags;
    // The number of bytes on the device.
    uint64_t bytes;
    // Receives the name of the layout, private to the plugin and its version.
    struct dsr_text *name;
} dsr_packed_layout;

// The source of a weight's rows, in the canonical layout of its format: consecutive, without padding, little-endian.
typedef struct dsr_row_reader {
    // sizeof(dsr_row_reader) of the caller.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // The first argument of `rows`.
    void *context;
    // Sets `data` to the bytes of rows first .. first + count, which belong to the host and are valid until the next call or
    // until prepack returns. Rows may be read in any order, and more than once. One thread at a time may call it.
    struct dsr_status *(*rows)(void *context,
                               uint64_t first,
                               uint64_t count,
                               const void **bytes,
                               size_t *length);
} dsr_row_reader;

// A range of a buffer. The size of the struct never changes.
typedef struct dsr_slice {
    // The buffer.
    struct dsr_buffer *buffer;
    // The byte at which the range starts.
    uint64_t offset;
    // The length of the range in bytes.
    uint64_t bytes;
} dsr_slice;

// The argument of an operand or result. The size of the struct never changes.
typedef struct dsr_argument {
    // One of DSR_OPERAND_*.
    uint32_t kind;
    // 0.
    uint32_t reserved;
    // With DSR_OPERAND_TENSOR: the range that holds its elements.
    struct dsr_slice slice;
    // With a bounded tensor: an i32 in device memory, the number of valid rows of the first dimension. Without a buffer all
    // rows are valid.
    struct dsr_slice extent;
    // With DSR_OPERAND_WEIGHT: the packed weight.
    struct dsr_weight *weight;
} dsr_argument;

// The arguments of a call. All it points to belongs to the caller and is valid until the function returns, except buffers and
// weights, which are valid as long as the bound call.
typedef struct dsr_arguments {
    // sizeof(dsr_arguments) of the caller.
    uint32_t struct_size;
    // Length of `operands`.
    uint32_t operand_count;
    // One for each operand of the description.
    const struct dsr_argument *operands;
    // One for each result. A result that updates an operand is bound to the same range.
    const struct dsr_argument *results;
    // Length of `results`.
    uint32_t result_count;
    // 0.
    uint32_t flags;
    // Scratch memory; without a buffer if the plan needs none.
    struct dsr_slice workspace;
} dsr_arguments;

// A plugin's knowledge of its buffers, weights and plan, for dsr_host_api.validate_arguments.
typedef struct dsr_bind_limits {
    // sizeof(dsr_bind_limits) of the plugin.
    uint32_t struct_size;
    // The alignment in bytes that the device requires.
    uint32_t alignment;
    // Bytes of scratch memory that the plan needs.
    uint64_t workspace_bytes;
    // The first argument of the functions.
    void *context;
    // Returns the length of a buffer in bytes, or DSR_NONE if the buffer is not one of this plugin.
    uint64_t (*buffer_bytes)(void *context, const struct dsr_buffer *buffer);
    // Sets the type that a weight was packed from, and returns 1; returns 0 if the weight is not one of this plugin. May be NULL
    // if no op of the plugin takes a weight.
    uint32_t (*weight_type)(void *context,
                            const struct dsr_weight *weight,
                            struct dsr_weight_type *weight_type);
} dsr_bind_limits;

// The id of a group while its ranks join.
typedef struct dsr_group_id {
    // The bytes that one rank made and passed to the others.
    uint8_t bytes[128];
} dsr_group_id;

// The functions of the host. The table is valid forever. Any thread may call the functions at any time.
typedef struct dsr_host_api {
    // sizeof(dsr_host_api) of the host.
    uint32_t struct_size;
    // DSR_ABI_MAJOR of the host.
    uint16_t abi_major;
    // DSR_ABI_MINOR of the host.
    uint16_t abi_minor;
    // The first argument of the functions.
    struct dsr_host *host;
    // The path of the file that this plugin was loaded from; empty if it is linked into the program.
    struct dsr_str library_path;
    // Makes an error from a copy of `error`; the caller owns it. It is never NULL: if `error` cannot be read, the new error says
    // so.
    struct dsr_status *(*status_new)(struct dsr_host *host, const struct dsr_error *error);
    // Reads an error. The texts are valid until the error is freed. Success (NULL) reads as code 0 and empty texts.
    void (*status_get)(struct dsr_host *host,
                       const struct dsr_status *status,
                       struct dsr_error *error);
    // Frees an error that the plugin received and does not return. NULL is allowed.
    void (*status_free)(struct dsr_host *host, struct dsr_status *status);
    // Sets a text to a copy of `value`, replacing an earlier one.
    void (*text_set)(struct dsr_host *host, struct dsr_text *text, struct dsr_str value);
    // Writes to the log of the host with a DSR_LOG_* level. A plugin may call it while it holds locks.
    void (*log)(struct dsr_host *host, uint32_t level, struct dsr_str message);
    // Validates the description of a call; the error names op, argument and field. The host validates a call before it calls a
    // plugin. A plugin that other callers may use begins query and plan with this function. If `kept` is not NULL, it is set to
    // a copy for validate_arguments, which the plugin owns and frees with checked_call_free.
    struct dsr_status *(*validate_call)(struct dsr_host *host,
                                        const struct dsr_call_desc *call,
                                        struct dsr_checked_call **kept);
    // Validates the arguments of a bind: sizes, offsets, alignment, aliasing, and the types of weights. `call` is the planned
    // call; `limits` describes the buffers and weights of the plugin.
    struct dsr_status *(*validate_arguments)(struct dsr_host *host,
                                             const struct dsr_checked_call *call,
                                             const struct dsr_arguments *arguments,
                                             const struct dsr_bind_limits *limits);
    // Frees a call that validate_call has kept. NULL is allowed.
    void (*checked_call_free)(struct dsr_host *host, struct dsr_checked_call *call);
    // Returns the function table of the extension with this name, or NULL if the host does not have it.
    const void *(*get_extension)(struct dsr_host *host, struct dsr_str name);
} dsr_host_api;

// Memory. Any thread may call the functions at any time.
typedef struct dsr_memory_api {
    // sizeof(dsr_memory_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Allocates zeroed memory of a DSR_MEMORY_* kind. The host owns it and frees it once. DSR_CODE_OUT_OF_MEMORY with the
    // requested and free bytes; DSR_CODE_FAILED_PRECONDITION during capture.
    struct dsr_status *(*allocate)(struct dsr_device *device,
                                   uint64_t bytes,
                                   uint32_t kind,
                                   struct dsr_buffer **buffer);
    // Frees memory after all enqueued work that uses it is done; waits if necessary.
    void (*free)(struct dsr_buffer *buffer);
    // Returns the address at which the host can access a buffer until it is freed, or NULL if it cannot. Accesses do not race
    // with work on streams.
    void *(*host_pointer)(struct dsr_buffer *buffer);
    // Fills in the memory use of the device handle.
    struct dsr_status *(*memory_use)(struct dsr_device *device, struct dsr_memory_use *memory_use);
} dsr_memory_api;

// Streams. A stream is used by one thread at a time and may move between threads. Work runs in order and may run later;
// functions that enqueue report wrong arguments only. A device fault surfaces when a stream or event is waited for, and is
// permanent: after DSR_CODE_DEVICE_LOST only freeing works.
typedef struct dsr_stream_api {
    // sizeof(dsr_stream_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Creates a stream. The host owns it and frees it once.
    struct dsr_status *(*create)(struct dsr_device *device, struct dsr_stream **stream);
    // Frees a stream after finishing its work.
    void (*free)(struct dsr_stream *stream);
    // Enqueues a copy from the host. `source` may be reused as soon as this returns. `length` is that of `destination`.
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
    // Enqueues a copy between two ranges of the same length, which do not overlap.
    struct dsr_status *(*copy)(struct dsr_stream *stream,
                               const struct dsr_slice *source,
                               const struct dsr_slice *destination);
    // Enqueues setting every byte of a range to `byte`, below 256.
    struct dsr_status *(*fill)(struct dsr_stream *stream,
                               const struct dsr_slice *destination,
                               uint32_t byte);
    // Records an event, which completes when all work enqueued so far has completed.
    struct dsr_status *(*record)(struct dsr_stream *stream, struct dsr_event *event);
    // Makes later work on this stream wait for an event recorded on any stream of the plugin.
    struct dsr_status *(*wait)(struct dsr_stream *stream, struct dsr_event *event);
    // Waits for all work enqueued so far. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    struct dsr_status *(*synchronize)(struct dsr_stream *stream,
                                      struct dsr_str what,
                                      uint64_t timeout_nanoseconds);
} dsr_stream_api;

// Events. Any thread may call the functions at any time.
typedef struct dsr_event_api {
    // sizeof(dsr_event_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Creates an event. The host owns it and frees it once.
    struct dsr_status *(*create)(struct dsr_device *device, struct dsr_event **event);
    // Frees an event.
    void (*free)(struct dsr_event *event);
    // Sets `reached` to 1 if the last recorded point is reached or the event was never recorded, else to 0.
    struct dsr_status *(*reached)(struct dsr_event *event, uint32_t *reached);
    // Waits until the last recorded point is reached. `what` names the wait; DSR_CODE_TIMEOUT repeats it.
    struct dsr_status *(*synchronize)(struct dsr_event *event,
                                      struct dsr_str what,
                                      uint64_t timeout_nanoseconds);
    // Sets the time from an earlier event to this one; DSR_NONE if the device does not measure time. DSR_CODE_INVALID_ARGUMENT
    // if either was never recorded.
    struct dsr_status *(*elapsed)(struct dsr_event *event,
                                  struct dsr_event *earlier,
                                  uint64_t *nanoseconds);
} dsr_event_api;

// Ops. Any thread may call the functions at any time, except that one thread at a time uses a bound call or stream.
typedef struct dsr_op_api {
    // sizeof(dsr_op_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Says whether and how the device runs a call. This is cheap. That the device does not run it is an answer and not an error.
    struct dsr_status *(*query)(struct dsr_device *device,
                                const struct dsr_call_desc *call,
                                struct dsr_support *support);
    // Says which layout the device would give a weight. This is cheap. DSR_CODE_UNSUPPORTED if it cannot hold this format.
    struct dsr_status *(*prepack_query)(struct dsr_device *device,
                                        const struct dsr_weight_desc *weight,
                                        struct dsr_packed_layout *layout);
    // Packs a weight into device memory, in the layout of prepack_query. The host owns the result and frees it once. The plugin
    // returns errors of the reader. `rows` is valid until this returns.
    struct dsr_status *(*prepack)(struct dsr_device *device,
                                  struct dsr_stream *stream,
                                  const struct dsr_weight_desc *weight,
                                  const struct dsr_row_reader *rows,
                                  struct dsr_weight **packed);
    // Returns the number of bytes that a packed weight holds on the device.
    uint64_t (*weight_bytes)(struct dsr_weight *weight);
    // Frees a packed weight after all enqueued work that uses it is done.
    void (*weight_free)(struct dsr_weight *weight);
    // Plans a call that query calls native; may compile, tune and allocate. The host owns the plan, uses it for any number of
    // bound calls, and frees it once, after them. DSR_CODE_UNSUPPORTED if the device does not run the call.
    struct dsr_status *(*plan)(struct dsr_device *device,
                               const struct dsr_call_desc *call,
                               struct dsr_plan **plan);
    // Frees a plan.
    void (*plan_free)(struct dsr_plan *plan);
    // Returns the number of bytes of scratch memory that a bound call needs.
    uint64_t (*plan_workspace)(struct dsr_plan *plan);
    // Binds a call to its arguments. The host owns the bound call and frees it once; until then it keeps the plan, buffers and
    // weights.
    struct dsr_status *(*bind)(struct dsr_plan *plan,
                               const struct dsr_arguments *arguments,
                               struct dsr_call **call);
    // Enqueues a bound call. It neither allocates nor waits.
    struct dsr_status *(*enqueue)(struct dsr_call *call, struct dsr_stream *stream);
    // Frees a bound call. What it has enqueued may still be pending, and runs to its end all the same; so it does when its plan
    // is freed after it. Buffers and weights wait for that by themselves.
    void (*call_free)(struct dsr_call *call);
    // Enqueues a copy of the packed bytes of a weight to a range as long as its layout, in device or pinned memory. May be NULL
    // if no layout is DSR_PACKED_RELOCATABLE.
    struct dsr_status *(*copy_packed)(struct dsr_device *device,
                                      struct dsr_stream *stream,
                                      struct dsr_weight *weight,
                                      const struct dsr_slice *destination);
    // Makes a packed weight of a range of memory that holds packed bytes of the same description whenever a call uses the weight:
    // device memory, or pinned memory if the layout is DSR_PACKED_READABLE_WHEN_PINNED. The host owns the result, frees it once,
    // and keeps the buffer until then; it may replace the bytes between calls that use the weight. May be NULL if no layout is
    // DSR_PACKED_RELOCATABLE.
    struct dsr_status *(*adopt)(struct dsr_device *device,
                                const struct dsr_weight_desc *weight,
                                const struct dsr_slice *memory,
                                struct dsr_weight **packed);
} dsr_op_api;

// Graphs. One thread at a time uses a graph or stream.
typedef struct dsr_graph_api {
    // sizeof(dsr_graph_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Captures calls, in order, for replay on streams of this device. Capturing runs no call. The host owns the graph and frees
    // it once; until then it keeps the calls.
    struct dsr_status *(*capture)(struct dsr_device *device,
                                  struct dsr_stream *stream,
                                  struct dsr_call *const *calls,
                                  size_t count,
                                  struct dsr_graph **graph);
    // Enqueues all captured calls.
    struct dsr_status *(*launch)(struct dsr_graph *graph, struct dsr_stream *stream);
    // Frees a graph.
    void (*free)(struct dsr_graph *graph);
} dsr_graph_api;

// Collectives of the plugin's own library. Any thread may call the functions at any time.
typedef struct dsr_comm_api {
    // sizeof(dsr_comm_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Makes the id of a new group. One rank calls it, and the host passes the id to the others. If some ranks run in other
    // processes, `address` is the IP address at which these reach this process, else it is empty. A library that finds its own
    // way between processes need not use it; one that cannot reach other processes returns DSR_CODE_UNSUPPORTED.
    struct dsr_status *(*group_id)(struct dsr_device *device,
                                   struct dsr_str address,
                                   struct dsr_group_id *id);
    // Joins a group, and waits until all ranks have joined. The host owns the membership and frees it once, after all plans that
    // use it. DSR_CODE_TIMEOUT names the missing ranks.
    struct dsr_status *(*join)(struct dsr_device *device,
                               const struct dsr_group_id *id,
                               uint32_t rank,
                               uint32_t ranks,
                               uint64_t timeout_nanoseconds,
                               struct dsr_comm **comm);
    // Leaves a group.
    void (*free)(struct dsr_comm *comm);
    // Returns the error of a collective that has failed after it was enqueued, or NULL.
    struct dsr_status *(*status)(struct dsr_comm *comm);
    // Makes every wait in this group, on every rank, fail at once.
    void (*abort)(struct dsr_comm *comm, struct dsr_str reason);
} dsr_comm_api;

// The functions of a plugin. The table is valid forever, because the host does not unload plugins. Any thread may call the
// functions at any time. Tables and functions are not NULL unless their comments allow it.
typedef struct dsr_plugin_api {
    // sizeof(dsr_plugin_api) of the plugin.
    uint32_t struct_size;
    // DSR_ABI_MAJOR of the plugin.
    uint16_t abi_major;
    // DSR_ABI_MINOR of the plugin.
    uint16_t abi_minor;
    // DSR_PLUGIN_* flags.
    uint64_t flags;
    // The first argument of the functions; may be NULL.
    struct dsr_backend *backend;
    // The name that users select it by: lower-case letters, digits and "-".
    struct dsr_str name;
    // Its version.
    struct dsr_str version;
    // A one-line description.
    struct dsr_str description;
    // Sets the number of devices that are present now; may be 0. DSR_CODE_UNAVAILABLE if a driver or library is missing; the
    // message names it and where it was searched for.
    struct dsr_status *(*device_count)(struct dsr_backend *backend, uint32_t *count);
    // Describes device number `position`, below device_count.
    struct dsr_status *(*device_info)(struct dsr_backend *backend,
                                      uint32_t position,
                                      struct dsr_device_info *info);
    // Opens a device, or a share of one. The host owns it and closes it once, after freeing everything made from it. `options`
    // may be NULL. DSR_CODE_INVALID_ARGUMENT if there is no such device or an option cannot be met.
    struct dsr_status *(*device_open)(struct dsr_backend *backend,
                                      uint32_t index,
                                      const struct dsr_device_options *options,
                                      struct dsr_device **device);
    // Closes a device.
    void (*device_close)(struct dsr_device *device);
    // Fills in the properties of the device, which never change while it is open.
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
    // Graphs. May be NULL; then the host replays calls one by one.
    const struct dsr_graph_api *graph;
    // Collectives. May be NULL; then collective calls have a dsr_transport.
    const struct dsr_comm_api *comm;
    // Returns the function table of the extension with this name, or NULL if the plugin does not have it. May be NULL.
    const void *(*get_extension)(struct dsr_backend *backend, struct dsr_str name);
} dsr_plugin_api;

// The extension "diagnose" of a plugin: what it looks for on this machine and what it finds, for people to read.
typedef struct dsr_diagnose_api {
    // sizeof(dsr_diagnose_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Sets the number of findings.
    struct dsr_status *(*finding_count)(struct dsr_backend *backend, uint32_t *count);
    // Describes finding number `position`, below finding_count.
    struct dsr_status *(*finding)(struct dsr_backend *backend,
                                  uint32_t position,
                                  struct dsr_finding *finding);
} dsr_diagnose_api;

// The extension "prepare" of a plugin: it compiles kernels ahead of the first request, on a machine without the device. Any
// thread may call the function at any time.
typedef struct dsr_prepare_api {
    // sizeof(dsr_prepare_api) of the plugin.
    uint32_t struct_size;
    // 0.
    uint32_t reserved;
    // Opens an offline device: one of this model that need not be present. It is closed like others. It answers query,
    // prepack_query and plan as the real device would, but allocates no memory and runs nothing. DSR_CODE_INVALID_ARGUMENT with
    // the known names if `name` is unknown or ambiguous; DSR_CODE_UNSUPPORTED if the plugin knows no names.
    struct dsr_status *(*device_describe)(struct dsr_backend *backend,
                                          struct dsr_str name,
                                          struct dsr_device **device);
} dsr_prepare_api;

// The type of `dsrun_plugin_entry_v0`, the one symbol that a plugin exports. The host calls it once for each load, before any
// other function. `host` is valid forever. Sets `plugin` to the table of the plugin, which is valid forever.
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
// An id outside the table's rows, including -1, contributes zeros, so that the results of vocabulary shards add up to the
// whole. A position that is -1 or outside its table contributes zeros too. The sum is rounded once.
typedef struct dsr_embed_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
    // The row of the vocabulary that is row 0 of table.
    uint32_t first_row;
    // The offset of every position (OPT counts positions from 2).
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
// Each run of W consecutive features is a group with its own mean: W = H is the usual norm, and W = head size
// norms every head of a projection separately. Computed in f32, rounded once.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
typedef struct dsr_rms_norm_attributes {
    // The constant added to the mean square; not negative.
    float eps;
    // The constant added to the weight (1 in models that store weight - 1).
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
    // The constant added to the variance; not negative.
    float eps;
} dsr_layer_norm_attributes;

// linear(x: float, weight: weight, bias?: float) -> y
//
// Linear layer: y[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n]).
//
//   x: float [M, K]
//   weight: weight [N, K]; of any format; the format's formula defines quantised elements
//   bias: float [N], optional
//   -> y: dtype [M, N]
//
// Products are accumulated in f32 or better; the sum with the bias is rounded once. A backend may round dequantised
// weights to the element type of x, but may not quantise x, for which quant_per_token exists.
typedef struct dsr_linear_attributes {
    // The element type of the result; a float.
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
    // The upper bound on the input of f; 0 means no bound.
    float limit;
} dsr_activation_attributes;

// gated_activation(gate: float, up?: float, bias?: float) -> y
//
// Gated activation: y = f(min(g + bias_g, limit)) * (clamp(u + bias_u, -limit, limit) + up_offset).
//
//   gate: float [T, F], or [T, 2 F] if the layout packs both
//   up: as gate, [T, F]; only with layout separate
//   bias: float, [2 F], optional; in the order of a packed row; the gate half first with layout separate
//   -> y: as gate, [T, F]
//
// Computed in f32, rounded once.
// Source: Shazeer, "GLU Variants Improve Transformer" (2020).
typedef struct dsr_gated_activation_attributes {
    // The function f. DSR_NONLINEARITY_*.
    uint32_t function;
    // The layout of the gate and up halves. DSR_GATE_LAYOUT_*.
    uint32_t layout;
    // The upper bound on the gate and on the magnitude of the up half; 0 means no bound.
    float limit;
    // The number added to the up half.
    float up_offset;
} dsr_gated_activation_attributes;

// rope(x: float, positions: i32, inverse_frequencies: f32) -> y
//
// Rotates pairs of elements of every head by an angle proportional to the position.
//
// With a = positions[t] * inverse_frequencies[i], pair i of each head, (p, q), becomes
// scale * (p cos a - q sin a, q cos a + p sin a). The first r = 2 * len(inverse_frequencies) elements of a head
// are rotated; the rest are copied.
//
//   x: float [T, heads * D]
//   positions: i32 [T]; -1 skips the row: it is not written
//   inverse_frequencies: f32 [r / 2]; after any scaling for long context; r <= D
//   -> y: as x
//
// The angle is computed in f32 (the product rounded once), sine and cosine to f32 accuracy, the result rounded once.
// Source: Su et al., "RoFormer" (2021).
typedef struct dsr_rope_attributes {
    // The number of heads in a row.
    uint32_t heads;
    // The elements that are rotated together. DSR_ROPE_PAIRING_*.
    uint32_t pairing;
    // The factor of the rotated elements (1 unless the model's long-context scaling sets another).
    float scale;
} dsr_rope_attributes;

// kv_write(key_cache: float or i8, value_cache: float or i8, key: float, value: float, slots: i32)
//     -> key_cache = key_cache, value_cache = value_cache
//
// Writes the keys and values of this step's tokens into their slots.
//
//   key_cache: float [P, heads, B, D], or i8 [P, heads, B, D + 4 ceil(D / 32)]; updated
//   value_cache: as key_cache, with D'; updated
//   key: float [T, heads * D]
//   value: float [T, heads * D']
//   slots: i32 [T]; the slot of row t; -1 skips; no slot twice
//   -> key_cache, value_cache: the operands, updated
//
// In a float cache, elements are rounded once if it has another element type.
//
// In an i8 cache, the D elements of a head of a row of key become D signed bytes q, and behind them a scale for each group of
// 32 elements (the last may have fewer), a little-endian f32 in four bytes. Groups are quantised as by
// quant_per_group: scale = max_i |x[i]| / 127, q[i] = round(x[i] / scale), and all zeros if the scale is 0. If an
// element is infinite or NaN, the scale of its group is the NaN with the bits 0x7FC00000 and the bytes of the group are
// unspecified, so that all its elements read as NaN; other groups are not affected. The same holds for value.
//
// Slots outside the cache are treated as -1.

// page_gather(cache: float or i8, pages: i32) -> y
//
// Gathers pages into rows: y[i] = cache[pages[i]], flattened.
//
//   cache: float or i8 [P, heads, B, D]; D is the size of a row, scale included
//   pages: i32 [N]; -1 skips: the row is not written
//   -> y: as cache, [N, heads * B * D]
//
// Exact. Pages outside the cache are treated as -1.

// page_scatter(cache: float or i8, x: float or i8, pages: i32) -> cache = cache
//
// Scatters rows into pages, the inverse of page_gather: cache[pages[i]] = x[i].
//
//   cache: float or i8 [P, heads, B, D]; updated; D is the size of a row, scale included
//   x: as cache, [N, heads * B * D]
//   pages: i32 [N]; -1 skips; no page twice
//   -> cache: the operand, updated
//
// Exact. Pages outside the cache are treated as -1.

// attention_prepare(query_start: i32, query_length: i32, kv_length: i32) -> work
//
// Makes the work list that all attention calls of a step share.
//
//   query_start, query_length, kv_length: i32 [S]
//   -> work: i32 [words]; private to the backend
//
// The content of the list is private to the backend; words is the length that the backend asks for when queried. A
// backend that needs no list asks for 0.
typedef struct dsr_attention_prepare_attributes {
    // The length of the work list.
    uint32_t words;
} dsr_attention_prepare_attributes;

// paged_attention(query: float, key_cache: float or i8, value_cache?: float or i8, query_start:
//     i32, query_length: i32, kv_length: i32, block_table: i32, work: i32, alibi?: f32, sinks?:
//     f32, mask_bits?: u32) -> y, log_sum_exp
//
// Attention of this step's queries over the paged KV cache, for any mix of prefill chunks and decode tokens.
//
// For query head h of token t at position p of sequence s, over the keys i < kv_length[s] it attends to:
// score_i = softcap(scale * q . k_i) - alibi[h] * (p - i), w = softmax(score), y = sum_i w_i v_i, with
// softcap(x) = c * tanh(x / c). Query head h reads KV head h / (query_heads / kv_heads). Key i is slot
// i % B of page block_table[s, i / B].
//
//   query: float [T, query_heads * D]; a row of no sequence is skipped: its result is not written
//   key_cache: float [P, kv_heads, B, D], or i8 [P, kv_heads, B, D + 4 ceil(D / 32)]; this step's keys are already in it
//   value_cache: as key_cache, with D'; absent if value_size is not 0
//   query_start, query_length, kv_length: i32 [S]
//   block_table: i32 [S, N]; -1 after the last page, and for a page that is not there: its keys are attended to by none
//   work: i32 [words]; the result of attention_prepare
//   alibi: f32 [query_heads], optional; slopes
//   sinks: f32 [query_heads], optional; one more score in each softmax, without a value
//   mask_bits: u32 [T, ceil(L / 32)], with mask explicit; bit j of row t: it attends to token j < L of its sequence in this step
//   -> y: as query, [T, query_heads * D']
//   -> log_sum_exp: f32 [T, query_heads]; of the scores, sinks included
//
// With value_size = n > 0 there is one cache: the value of a key is its first n elements, and D' = n. Only llm-mla-1
// requires that.
//
// Rows of an i8 cache end with scales, as kv_write writes them: an element of k_i or v_i is its byte times the scale
// of its group, in f32 or better. Such caches have values of their own (value_size = 0), and no profile requires them.
//
// With window = w > 0 a query attends to no key at i <= p - w; pages that the windows of all queries have left may be -1.
// For a query that attends to no key y is zero, and log_sum_exp is its sink or minus infinity. What keys hold that a query
// does not attend to reaches no result of it, NaN and infinity included; nor does what values of f32 hold. NaN and infinity in
// values of 16 bits or of i8 may reach all queries of their sequence: kernels multiply tiles of them by weights of 0. Results are
// undefined if a score is plus infinity, or if all are minus infinity. Scores and sums are computed in f32 or better; softmax
// weights may be rounded to the element type of a float cache before they multiply values (one inner rounding); the result is
// rounded once.
typedef struct dsr_paged_attention_attributes {
    // The number of heads of query, a multiple of kv_heads.
    uint32_t query_heads;
    // The number of heads of the caches.
    uint32_t kv_heads;
    // The factor of every score.
    float scale;
    // The bound c of the soft cap; 0 means none.
    float softcap;
    // The number of positions that a query attends to, including its own; 0 means all.
    uint32_t window;
    // The keys that a query attends to. DSR_ATTENTION_MASK_*.
    uint32_t mask;
    // The number of leading elements of each key that are its value; 0 if values are in value_cache.
    uint32_t value_size;
} dsr_paged_attention_attributes;

// attention(query: float, key: float, value: float, start: i32, length: i32, alibi?: f32) -> y
//
// Attention within ragged sequences, without a cache, as encoders use it.
//
// It computes what paged_attention does, where key i of sequence s is row start[s] + i of key and value, and
// each sequence has as many keys as queries.
//
//   query: float [T, query_heads * D]
//   key: as query, [T, kv_heads * D]
//   value: as query, [T, kv_heads * D']
//   start, length: i32 [S]; rows of each sequence
//   alibi: f32 [query_heads], optional; slopes
//   -> y: as query, [T, query_heads * D']
//
// The mask is causal or bidirectional. Bidirectional ALiBi uses the distance |p - i|, and a bidirectional window
// covers the keys with |p - i| < window.
typedef struct dsr_attention_attributes {
    // The number of heads of query, a multiple of kv_heads.
    uint32_t query_heads;
    // The number of heads of key and value.
    uint32_t kv_heads;
    // The factor of every score.
    float scale;
    // The bound c of the soft cap; 0 means none.
    float softcap;
    // The window in positions, including the query's own; 0 means all.
    uint32_t window;
    // The keys that a query attends to; not explicit. DSR_ATTENTION_MASK_*.
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
    // The factor of b + bias.
    float alpha;
} dsr_add_attributes;

// cast(x: float) -> y
//
// Converts to another float type: y = round(x), to nearest, ties to even.
//
//   x: float [T, H]
//   -> y: dtype [T, H]
//
// Exact except for the rounding; a cast to the same type copies bits. Values beyond the range of f16 become infinite.
typedef struct dsr_cast_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
} dsr_cast_attributes;

// gather_rows(x: float, rows: i32) -> y
//
// Gathers rows: y[r] = x[rows[r]].
//
//   x: float [T, H]
//   rows: i32 [R]; indices into x; -1 skips
//   -> y: as x, [R, H]
//
// Exact. A row whose index is -1 is not written. An index outside x or its extent is treated as -1.

// prepare_step(step_request: i32, step_length: i32, step_source: i32, prompt_ids: i32, rows: i32,
//     block_table: i32, last_token: i32, finished: i32, length: i32, counts: i32) -> ids,
//     positions, slots, query_start, query_length, kv_length, tables, row_positions, length =
//     length, counts = counts
//
// Derives a step's inputs from the request table and the step's plan, and advances the table.
//
// Sequence s of the step is request c = step_request[s]. If step_source[s] >= 0 the sequence has the step_length[s]
// prompt tokens prompt_ids[step_source[s] ..]; if it is -1, the one token that the request generated last. The tokens of
// the step are those of its sequences in order.
//
//   step_request: i32 [S]; row of the request table; -1 is a padded sequence
//   step_length: i32 [S]; its number of tokens; 1 for a generated token
//   step_source: i32 [S]; the index in prompt_ids at which they start, or -1
//   prompt_ids: i32 [T]; the prompt tokens of this step
//   rows: i32 [R]; the rows of the step whose logits are computed; -1 skips
//   block_table: i32 [C, N]; the pages of each request; -1 after the last
//   last_token: i32 [C]; the token generated last
//   finished: i32 [C]; not 0 if the request is done: it has no more tokens
//   length: i32 [C]; tokens in the KV cache; updated: grows by the new tokens
//   counts: i32 [C, V]; updated: DSR_IN_PROMPT is set for the prompt tokens of the step
//   -> ids: i32 [T]; -1 after the last token
//   -> positions: i32 [T]; -1 after the last token
//   -> slots: i32 [T]; the slots for keys and values; -1 without a page
//   -> query_start, query_length, kv_length: i32 [S]; lengths are 0 for a padded or finished sequence; its start and table are unspecified
//   -> tables: i32 [S, N]; the rows of block_table, in the order of sequences
//   -> row_positions: i32 [R]; the position of the token after each of rows; -1 for skipped rows
//   -> length, counts: the operands, updated
//
// A finished sequence keeps its rows, with id, position and slot -1; its lengths are 0. Exact.
typedef struct dsr_prepare_step_attributes {
    // The number of slots of a page.
    uint32_t block_size;
} dsr_prepare_step_attributes;

// logit_process(logits: float, requests: i32, parameters: f32, counts: i32, bias?: f32, mask?: u32)
//     -> y
//
// Applies penalties, bias and mask to logits.
//
// For row r of request c = requests[r], with n the count of token v (see DSR_IN_PROMPT):
// x = logits[r, v]; if the token was seen, in the prompt or generated, x = x / p for x > 0 and x = x * p
// otherwise, with the repetition penalty p; then x -= frequency * n, x -= presence if n > 0, and
// x += bias[c, v]; where the mask bit is 0, x is minus infinity.
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
// Finds the index of the largest element of each row, the lowest on ties.
//
//   x: float [R, V]; NaN counts as minus infinity
//   -> ids: i32 [R]; -1 if the row is empty or all NaN
//
// Exact.

// sample(logits: f32, requests: i32, positions: i32, parameters: f32, seeds: u32) -> ids,
//     log_probability
//
// Draws one token per row, by Gumbel-max over the tokens that the filters leave.
//
// For row r of request c = requests[r], with temperature t, and ties broken towards the lower id throughout:
//
// 1. t = 0: the token of the largest logit (as argmax, but never one of minus infinity).
// 2. Otherwise x = logits / t. Keep the top_k largest; p = softmax over them; keep the most probable until
// their sum reaches top_p (including the token that reaches it, so at least one); keep those with p >= min_p * max(p).
// 3. The token is the argmax of x + g over the tokens left, g = -ln(-ln(1 - v)), with v = (w + 0.5) / 2^32 and w
// the first word of Philox4x32-10 with key seeds[c] and counter (token, positions[r], 0, 0). (ln_1p(-v)
// keeps the rare large g exact in f32, where v is held to at most 1 - 2^-24.)
//
// The draw depends on seed, position and token only, and not on the order of rows, on shards or on the batch.
//
//   logits: f32 [R, V]; NaN and minus infinity are never drawn
//   requests: i32 [R]; -1 skips the row: its result is -1
//   positions: i32 [R]; the position of the drawn token
//   parameters: f32 [C, 8]
//   seeds: u32 [C, 2]
//   -> ids: i32 [R]; -1 if no token is left
//   -> log_probability: f32 [R]; ln softmax(logits)[id] of logits, without temperature and filters; 0 if the id is -1
//
// Sources: Gumbel (1954), Maddison et al., "A* Sampling" (2014); Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (2011).

// commit_tokens(requests: i32, ids: i32, stop_ids: i32, last_token: i32, finished: i32, counts:
//     i32) -> last_token = last_token, finished = finished, counts = counts
//
// Records the sampled tokens of a step in the request table.
//
// For every row r with c = requests[r] >= 0 and ids[r] >= 0: last_token[c] = ids[r], counts[c, ids[r]] += 1,
// and finished[c] = 1 if the token is one of stop_ids. Finished requests do not change.
//
//   requests: i32 [R]; the row of the request table; -1 skips; no request twice
//   ids: i32 [R]; sampled tokens; -1 skips
//   stop_ids: i32 [E]; tokens that end a request; -1 matches no token
//   last_token, finished: i32 [C]; updated
//   counts: i32 [C, V]; updated
//   -> last_token, finished, counts: the operands, updated
//
// Exact.

// columns(x: float) -> y
//
// Takes a slice of columns: y[t, j] = x[t, start + j] for j < count.
//
//   x: float [T, F]
//   -> y: as x, [T, count]
//
// Exact. It splits the result of one GEMM over the concatenated weights of several projections.
typedef struct dsr_columns_attributes {
    // The first column.
    uint32_t start;
    // The number of columns; start + count <= F.
    uint32_t count;
} dsr_columns_attributes;

// quant_per_token(x: float) -> y, scales
//
// Quantises every row with its own scale: scales[m] = max_k |x[m, k]| / 127, y[m, k] = round(x[m, k] / scales[m]).
//
//   x: float [M, K]
//   -> y: i8 [M, K]; within ±127
//   -> scales: f32 [M]
//
// Both divisions are f32 divisions rounded to nearest; round rounds to the nearest integer, ties to even, and results
// beyond ±127 become ±127. A row whose scale is 0 is all zeros. The results of a row with an infinite or NaN value are
// unspecified; they do not affect other rows. In a region the values may be quantised before they are rounded to the
// element type of x.

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
// The sum of products is exact, in i32. Scales and bias are applied in f32 or better, in any order, with one rounding.
// With K = 0 the result is the bias, or zeros.
typedef struct dsr_linear_w8a8_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
} dsr_linear_w8a8_attributes;

// moe_route(logits: float, bias?: f32, selection_bias?: f32, expert_scale?: f32, ids?: i32) ->
//     experts, weights
//
// Router of a mixture of experts: chooses k experts for each token, and their weights.
//
// With z = logits + bias, for each token:
//
// 1. The scores s, by score: the softmax of z over all experts, or the sigmoid of each z. With
// softmax_of_selected and sparse_mixer experts are chosen by z itself, which stands for s in steps 2 and 3.
// 2. Groups: expert e is in group e / (E / groups). Only the experts of the top_groups best groups can be chosen. The
// score of a group is the largest of its s + selection_bias, or the sum of the two largest.
// 3. The k experts with the largest s + selection_bias, in descending order. The lower index wins ties, of experts
// and of groups. With the operand ids these are the experts instead, and -1 skips a slot.
// 4. The weights w: the scores s of the chosen experts, without the selection bias. With softmax_of_selected it is the
// softmax of z over the chosen experts. With sparse_mixer the weight of a slot is the softmax of z at the chosen
// expert, over the experts e that no slot before it has and for which
// z_max - z_e <= threshold * max(|z_e|, z_max); z_max is the logit of the chosen expert.
// 5. w / divisor * scale * expert_scale, with the divisor that norm says.
//
//   logits: float [T, E]
//   bias: f32 [E], optional; part of the logit
//   selection_bias: f32 [E], optional; counts when experts are chosen, not in weights; score softmax or sigmoid
//   expert_scale: f32 [E], optional; a factor of the weights of each expert
//   ids: i32 [T, k], optional; experts chosen in advance; not with a selection bias, groups, or sparse_mixer
//   -> experts: i32 [T, k]
//   -> weights: f32 [T, k]; 0 in skipped slots
//
// Scores are compared exactly, so without a selection bias and groups the order is that of z also where scores round to
// equal numbers. With them, either of two experts or groups may be chosen whose values differ by no more than the
// rounding of f32. If a token's z has a NaN or plus infinity, or is minus infinity throughout, no choice is sound: its
// experts are 0 to k - 1, or those of ids, and all their weights are NaN, so that the fault shows in the result.
//
// Computed in f32, rounded once.
// Sources: Fedus et al., "Switch Transformers" (2021); DeepSeek-AI, "DeepSeek-V3" (2024), for groups and the selection
// bias; Liu et al., "GRIN" (2024), for sparse_mixer.
typedef struct dsr_moe_route_attributes {
    // The number k of experts of a token.
    uint32_t top_k;
    // The score of an expert. DSR_ROUTER_SCORE_*.
    uint32_t score;
    // The number of groups, which divides the number of experts; 1 for no groups.
    uint32_t groups;
    // The number of groups of which experts are chosen.
    uint32_t top_groups;
    // The score of a group. DSR_GROUP_SCORE_*.
    uint32_t group_score;
    // The divisor of the weights. DSR_ROUTER_NORM_*.
    uint32_t norm;
    // What norm adds to the sum, or its least value.
    float eps;
    // A factor of all weights.
    float scale;
    // The largest distance that sparse_mixer allows; other scores do not read it.
    float threshold;
} dsr_moe_route_attributes;

// moe_group(experts: i32) -> order, starts
//
// Groups the assignments of a step by expert: the tables that the linear layers of all experts share.
//
// Assignment t * k + j is slot j of token t. Read row by row, order holds the assignments to expert first_expert
// in ascending order, then those to the next expert, and so on; starts[i] .. starts[i + 1] are the places of those to
// expert first_expert + i.
//
//   experts: i32 [T, k]; -1 and experts outside of first_expert .. first_expert + count are skipped
//   -> order: i32 [T, k]; -1 after the last assignment
//   -> starts: i32 [count + 1]
//
// Exact.
typedef struct dsr_moe_group_attributes {
    // The number of experts.
    uint32_t count;
    // The index of the first expert.
    uint32_t first_expert;
} dsr_moe_group_attributes;

// grouped_linear(x: float, weight: weight, experts: i32, bias?: float, order?: i32, starts?: i32)
//     -> y
//
// Linear layers of experts: y[t, j, n] = sum_k x[t, j, k] * weight[e, n, k] (+ bias[e, n]), with
// e = experts[t, j] - first_expert.
//
//   x: float [T, K], or [T, slots * K]; one row for all slots of a token, or one for each
//   weight: weight [count * N, K]; the matrices of all experts, one after the other, in any format
//   experts: i32 [T, slots]; -1 and experts outside of first_expert .. first_expert + count are skipped
//   bias: float [count * N], optional
//   order: i32 [T, slots], optional; a result of moe_group for these experts
//   starts: i32 [count + 1], with order; the other result
//   -> y: dtype [T, slots * N]; skipped slots are not written
//
// order and starts say nothing that experts does not; they save backends that run expert by expert the search. With
// other tables than those of experts the result is undefined, but no memory outside of operands and result is accessed.
// Rounding is that of linear.
typedef struct dsr_grouped_linear_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
    // The number of experts.
    uint32_t count;
    // The index of the first expert.
    uint32_t first_expert;
} dsr_grouped_linear_attributes;

// moe_combine(x: float, weights: f32, experts: i32) -> y
//
// Weighted sum of the slots of each token: y[t, h] = sum_j weights[t, j] * x[t, j, h].
//
//   x: float [T, slots * H]; skipped slots are not read
//   weights: f32 [T, slots]
//   experts: i32 [T, slots]; -1 and experts outside of first_expert .. first_expert + count are skipped
//   -> y: as x, [T, H]; zeros for a token without slots
//
// Summed in f32 in the order of slots, rounded once.
typedef struct dsr_moe_combine_attributes {
    // The number of experts.
    uint32_t count;
    // The index of the first expert.
    uint32_t first_expert;
} dsr_moe_combine_attributes;

// head_linear(x: float, weight: weight) -> y
//
// A linear layer of each head: y[t, h, n] = sum_k x[t, h, k] * weight[h, n, k], and behind it the rest of the head.
//
//   x: float [T, heads * (K + R)]
//   weight: weight [heads * N, K]; the matrices of all heads, one after the other, in any format
//   -> y: dtype [T, heads * (N + R)]
//
// The first K elements of a head of x are multiplied. The other R >= 0 are copied behind the N products of the head,
// and rounded if dtype is another type. Rounding of products is that of linear.
typedef struct dsr_head_linear_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
    // The number of heads.
    uint32_t heads;
} dsr_head_linear_attributes;

// latent_write(cache: float, value: float, rest: float, slots: i32) -> cache = cache
//
// Writes the values of this step's tokens, and behind each the rest of its key, into their slots.
//
//   cache: float [P, heads, B, D + R]; updated
//   value: float [T, heads * D]; the first elements of the keys
//   rest: float [T, heads * R]; the other elements
//   slots: i32 [T]; the slot of row t; -1 skips; no slot twice
//   -> cache: the operand, updated
//
// Such a cache is for paged_attention with value_size = D. Elements are rounded once if the cache has another
// element type. Slots outside the cache are treated as -1.

// quant_per_group(x: float) -> y, scales
//
// Quantises every group of group consecutive elements of a row with its own scale: quant_per_token of each group.
//
//   x: float [M, K]; K a multiple of group
//   -> y: i8 [M, K]; within ±127
//   -> scales: f32 [M, K / group]
//
// Divisions, rounding and special values are those of quant_per_token, group by group: an infinite or NaN value makes
// the results of its own group unspecified and affects no other group.
typedef struct dsr_quant_per_group_attributes {
    // The number of consecutive elements that share a scale; at least 1.
    uint32_t group;
} dsr_quant_per_group_attributes;

// linear_a8(x: i8, scales: f32, weight: weight, bias?: float) -> y
//
// Linear layer over activations that are quantised in groups: y[m, n] = sum_k scales[m, k / group] * x[m, k] * weight[n, k]
// (+ bias[n]).
//
//   x: i8 [M, K]; within ±127; -128 is unspecified
//   scales: f32 [M, K / group]
//   weight: weight [N, K]; of any format; the format's formula defines quantised elements
//   bias: float [N], optional
//   -> y: dtype [M, N]
//
// Products are accumulated in f32 or better, or exactly in integers within a group; scales are applied in f32 or better, in
// any order. The sum with the bias is rounded once. Weights are not rounded to fewer bits than their format has. No sum of
// integers may wrap around, however long a group is. With K = 0 the result is the bias, or zeros.
//
// A scale that is NaN makes its row of y NaN, and one that is infinite makes it unspecified; neither affects other rows.
typedef struct dsr_linear_a8_attributes {
    // The element type of the result; a float.
    uint32_t dtype;
    // The number of consecutive elements of x that share a scale; at least 1.
    uint32_t group;
} dsr_linear_a8_attributes;

// all_reduce(x: any) -> y = x
//
// Reduces x over all ranks; every rank gets the result.
//
//   x: any [T, H]; updated
//   -> y: x
//
// The order of the reduction may differ between backends, and intermediate results are rounded to the element type or
// better. Every rank gets the same bits.
typedef struct dsr_all_reduce_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // The operation that combines elements. DSR_REDUCTION_*.
    uint32_t reduction;
} dsr_all_reduce_attributes;

// all_gather(x: any) -> y
//
// Concatenates x of all ranks, in the order of ranks; every rank gets the result.
//
//   x: any [T, H]
//   -> y: as x, [T, ranks * H]; or [ranks * T, H] along the rows
//
// Exact. Along the rows, T must be known when the program is built.
typedef struct dsr_all_gather_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // The number of ranks.
    uint32_t ranks;
    // Whether to concatenate along the rows instead of the features.
    uint32_t rows;
} dsr_all_gather_attributes;

// reduce_scatter(x: any) -> y
//
// Reduces x over all ranks; rank i gets features i * H / ranks .. of the result, or rows.
//
//   x: any [T, H]
//   -> y: as x, [T, H / ranks]; or [T / ranks, H] along the rows
//
// Rounding is that of all_reduce. The scattered dimension must be a known multiple of ranks.
typedef struct dsr_reduce_scatter_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // The number of ranks.
    uint32_t ranks;
    // Whether to scatter the rows instead of the features.
    uint32_t rows;
    // The operation that combines elements. DSR_REDUCTION_*.
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
    // The number of ranks.
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
    // The rank that sends its tensor.
    uint32_t root;
} dsr_broadcast_attributes;

// send(x: any)
//
// Sends x to rank peer, which must receive it.
//
//   x: any [T, H]
//
// It has no result.
typedef struct dsr_send_attributes {
    // The axis whose ranks take part. DSR_MESH_AXIS_*.
    uint32_t axis;
    // The rank that receives.
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
    // The rank that sends.
    uint32_t peer;
} dsr_receive_attributes;

// barrier()
//
// Waits until every rank of the axis has reached the barrier. It has no operands and no results.
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

/* Whether a struct of the other side is long enough to have a field. */
#define DSR_HAS(pointer, type, field) \
    ((pointer)->struct_size >= offsetof(type, field) + sizeof((pointer)->field))

/* A field of a struct of the other side; 0 if the struct is too short to have it. */
#define DSR_GET(pointer, type, field) (DSR_HAS(pointer, type, field) ? (pointer)->field : 0)

/* Sets a field of a struct that the other side has allocated, if the struct is long enough to have it. */
#define DSR_SET(pointer, type, field, value) \
    do { \
        if (DSR_HAS(pointer, type, field)) { \
            (pointer)->field = (value); \
        } \
    } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* The symbol that a plugin exports. The host calls it once for each load, before any other function. `host` is valid forever.
 * Sets `plugin` to a table that is valid forever. */
DSR_EXPORT dsr_status *dsrun_plugin_entry_v0(const dsr_host_api *host, const dsr_plugin_api **plugin);

/* The initialiser of a dsr_str from a string literal. */
#define DSR_TEXT(literal) {literal, sizeof(literal) - 1}

/* The dsr_str of a text that ends with a zero. */
static inline dsr_str dsr_text_of(const char *text) {
    dsr_str result = {text, 0};
    while (text != NULL && text[result.length] != '\0') {
        result.length += 1;
    }
    return result;
}

/* An error that names no argument. */
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
