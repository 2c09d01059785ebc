/*
 * Access to packed weights by element. FORMAT and OTHER_FORMAT name the formats; `at` is for kernels that need not be fast.
 *
 * Dense rows are padded to 16 bytes. Integers are stored in units of 8 rows, followed by the scales and offsets of their groups:
 * see weight/packing.rs. The FORMAT of integers is 256 plus: bit 0, 8 bits; bits 1 to 3, columns of a group (0 a row, else 8
 * times a power of two); bits 4 and 5, the zero point (0 constant, 1 a zero point per group, 2 a minimum per group); bits 6 and
 * 7, type of scales and offsets. Zero point 3 stands for floats of 4 bits (floats.cuh), which have none.
 */
#define FORMAT_F32 0
#define FORMAT_F16 1
#define FORMAT_BF16 2
#define FORMAT_PACKED 256

template <int Format> struct WeightOf : WeightParams {
    static constexpr int bits = Format & 1 ? 8 : 4, offset = Format >> 4 & 3, type = Format >> 6 & 3;
    static constexpr int group = Format >> 1 & 7 ? 8 << (Format >> 1 & 7) : 0;
    static constexpr int numbers = offset == 1 || offset == 2 ? 2 : 1, number_bytes = type ? 2 : 4;
    static constexpr int per_word = 32 / bits;

    __device__ float number(i64 row, i64 own_group, int which) const {
        const u8* from = scales + row / 8 * scale_bytes + ((own_group * 8 + row % 8) * numbers + which) * number_bytes;
        if (type == 0) return *(const float*)from;
        return type == 1 ? widen(*(const f16*)from) : widen(*(const bf16*)from);
    }

    /* Integer or float `i` of a word. */
    __device__ static float element(u32 word, int i) {
        if (bits == 8) return (float)(signed char)(word >> i * 8);
        return offset == 3 ? float_of(word, i) : (float)(word >> (i / 2 + i % 2 * 4) * 4 & 15);
    }

    /* An integer or float with its scale and offset. */
    __device__ static float scaled(float stored, float scale, float second) {
        if (offset == 1) return scale * (stored - second);
        if (offset == 2) return scale * (bits == 8 ? stored + 128.0f : stored) + second;
        return scale * (bits == 8 || offset == 3 ? stored : stored - 8.0f);
    }

    __device__ float at(i64 row, i64 column) const {
        if (Format < FORMAT_PACKED) {
            const u8* own = elements + row * row_bytes;
            if (Format == FORMAT_F32) return ((const float*)own)[column];
            return Format == FORMAT_F16 ? widen(((const f16*)own)[column]) : widen(((const bf16*)own)[column]);
        }
        const u8* own = elements + row / 8 * row_bytes + row % 8 * 16;
        i64 own_group = group ? column / (group ? group : 1) : 0;
        float stored;
        if (bits == 8) {
            int i = (int)(column % 64);
            /* 16 columns per line, or 4 per word of each of four lines. */
            int line = group ? i / 4 % 4 : i / 16, byte = group ? i / 16 * 4 + i % 4 : i % 16;
            stored = (float)(signed char)own[(column / 64 * 4 + line) * 128 + byte];
        } else {
            int i = (int)(column % 128);
            stored = element(*(const u32*)(own + (column / 128 * 4 + i / 8 % 4) * 128 + i / 32 * 4), i % 8);
        }
        return scaled(stored, number(row, own_group, 0), numbers == 2 ? number(row, own_group, 1) : 0.0f);
    }
};

typedef WeightOf<FORMAT> Weight;
#ifdef OTHER_FORMAT
typedef WeightOf<OTHER_FORMAT> OtherWeight;
#endif
