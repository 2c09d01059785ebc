/*
 * Packing weights. Kernels read f32, so a weight of any format is decoded when it is packed. A faster backend would save
 * memory by decoding in its kernels.
 *
 * Block formats of GGUF files: 32 elements of a row after an f16 scale `d`, all little-endian.
 *
 *   Q8_0   d, 32 signed bytes q           element = d * q
 *   Q4_0   d, 16 bytes                    element = d * (q - 8)
 *   Q4_1   d, f16 minimum m, 16 bytes     element = d * q + m
 *
 * Byte i of the four-bit formats holds element i in its low half and element i + 16 in its high half.
 */

#include "backend.h"

#include <inttypes.h>
#include <math.h>

/* The number of rows to read at a time, because the host may have to compute them. */
#define ROWS_AT_A_TIME 256

static float half(const unsigned char *bytes) {
    uint32_t bits = bytes[0] | (uint32_t)bytes[1] << 8;
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                 : exponent == 0 ? ldexpf((float)fraction, -24)
                                 : ldexpf((float)(fraction + 1024), (int)exponent - 25);
    return bits >> 15 ? -size : size;
}

static float single(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Functions that decode one block. */

static void decode_f32(const unsigned char *from, float *to) {
    *to = single(from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24);
}

static void decode_f16(const unsigned char *from, float *to) { *to = half(from); }

static void decode_bf16(const unsigned char *from, float *to) {
    *to = single((uint32_t)from[0] << 16 | (uint32_t)from[1] << 24);
}

static void decode_q8_0(const unsigned char *from, float *to) {
    float scale = half(from);
    for (int i = 0; i < 32; i++) {
        int q = from[2 + i];
        to[i] = scale * (float)(q < 128 ? q : q - 256);
    }
}

static void decode_q4_0(const unsigned char *from, float *to) {
    float scale = half(from);
    for (int i = 0; i < 16; i++) {
        to[i] = scale * (float)((from[2 + i] & 15) - 8);
        to[i + 16] = scale * (float)((from[2 + i] >> 4) - 8);
    }
}

static void decode_q4_1(const unsigned char *from, float *to) {
    float scale = half(from), minimum = half(from + 2);
    for (int i = 0; i < 16; i++) {
        to[i] = scale * (float)(from[4 + i] & 15) + minimum;
        to[i + 16] = scale * (float)(from[4 + i] >> 4) + minimum;
    }
}

typedef struct format {
    uint32_t number;
    /* The elements and bytes of a block. */
    uint32_t elements, bytes;
    void (*decode)(const unsigned char *from, float *to);
} format;

static const format formats[] = {
    {DSR_FORMAT_F32, 1, 4, decode_f32},     {DSR_FORMAT_F16, 1, 2, decode_f16},     {DSR_FORMAT_BF16, 1, 2, decode_bf16},
    {DSR_FORMAT_Q8_0, 32, 34, decode_q8_0}, {DSR_FORMAT_Q4_0, 32, 18, decode_q4_0}, {DSR_FORMAT_Q4_1, 32, 20, decode_q4_1},
};

static const format *find_format(uint32_t number) {
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (formats[i].number == number) {
            return &formats[i];
        }
    }
    return NULL;
}

bool format_is_known(uint32_t number) { return find_format(number) != NULL; }

/* The rows, columns and bytes of a packed weight. */
typedef struct layout {
    const format *format;
    uint64_t rows, columns, bytes;
} layout;

static dsr_status *lay_out(const dsr_weight_type *type, layout *result) {
    const format *found = find_format(type->format);
    if (found == NULL) {
        return fail(DSR_CODE_UNSUPPORTED, "weight", "format", "is %" PRIu32 ", which this backend does not have", type->format);
    }
    if (type->rank == 0 || type->rank > DSR_MAX_RANK) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "weight", "rank", "is %" PRIu32 ", must be 1 to %d", type->rank, DSR_MAX_RANK);
    }
    uint64_t columns = type->shape[type->rank - 1], rows = 1;
    if (columns % found->elements != 0) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "weight", "shape", "%" PRIu64 " columns are not a multiple of %" PRIu32, columns,
                    found->elements);
    }
    uint64_t most = SIZE_MAX / sizeof(float);
    for (uint32_t i = 0; i + 1 < type->rank; i++) {
        if (type->shape[i] != 0 && rows > most / type->shape[i]) {
            return fail(DSR_CODE_INVALID_ARGUMENT, "weight", "shape", "overflows");
        }
        rows *= type->shape[i];
    }
    if (columns != 0 && rows > most / columns) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "weight", "shape", "overflows");
    }
    result->format = found;
    result->rows = rows;
    result->columns = columns;
    result->bytes = rows * columns * sizeof(float);
    return NULL;
}

dsr_status *prepack_query(dsr_device *device, const dsr_weight_desc *weight, dsr_packed_layout *answer) {
    (void)device;
    layout here = {0};
    dsr_status *wrong = lay_out(&weight->weight_type, &here);
    if (wrong == NULL) {
        DSR_SET(answer, dsr_packed_layout, bytes, here.bytes);
        say(DSR_GET(answer, dsr_packed_layout, name), "f32 rows");
    }
    return wrong;
}

static dsr_status *decode_rows(dsr_weight *weight, const format *stored, const dsr_row_reader *reader) {
    uint64_t blocks = weight->columns / stored->elements;
    float *to = weight->elements;
    for (uint64_t first = 0; first < weight->rows; first += ROWS_AT_A_TIME) {
        uint64_t count = least(ROWS_AT_A_TIME, weight->rows - first);
        const void *bytes;
        size_t length;
        dsr_status *wrong = reader->rows(reader->context, first, count, &bytes, &length);
        if (wrong != NULL) {
            return wrong;
        }
        if (length != count * blocks * stored->bytes) {
            return fail(DSR_CODE_INVALID_ARGUMENT, "rows", "length", "is %zu for %" PRIu64 " rows", length, count);
        }
        const unsigned char *from = bytes;
        for (uint64_t block = 0; block < count * blocks; block++) {
            stored->decode(from, to);
            from += stored->bytes;
            to += stored->elements;
        }
    }
    return NULL;
}

dsr_status *prepack(dsr_device *device, dsr_stream *stream, const dsr_weight_desc *desc, const dsr_row_reader *reader,
                    dsr_weight **packed) {
    if (stream->device != device) {
        return fail(DSR_CODE_INVALID_ARGUMENT, "stream", NULL, "is a stream of another device");
    }
    layout here = {0};
    dsr_status *wrong = lay_out(&desc->weight_type, &here);
    if (wrong != NULL) {
        return wrong;
    }
    dsr_weight *made = malloc(sizeof *made);
    if (made == NULL) {
        return fail(DSR_CODE_OUT_OF_MEMORY, NULL, NULL, "no memory for a weight");
    }
    unsigned char *memory = NULL;
    wrong = device_allocate(device, here.bytes, &memory);
    if (wrong != NULL) {
        free(made);
        return wrong;
    }
    made->device = device;
    made->type = desc->weight_type;
    made->rows = here.rows;
    made->columns = here.columns;
    made->elements = (float *)memory;
    wrong = decode_rows(made, here.format, reader);
    if (wrong != NULL) {
        weight_free(made);
        return wrong;
    }
    *packed = made;
    return NULL;
}

uint64_t weight_bytes(dsr_weight *weight) { return weight->rows * weight->columns * sizeof(float); }

void weight_free(dsr_weight *weight) {
    device_free(weight->device, weight_bytes(weight), (unsigned char *)weight->elements);
    free(weight);
}
